/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LDS, the fast memory of a work-group: loads, stores and atomics; permutations of lanes that go
 * through its crossbar; the check for races between waves; the count of bank conflicts.
 *
 * Races. Waves of a work-group run in any order between two barriers, so no other wave may read or
 * write what one of them writes there, except for atomics among themselves. Nor may two lanes of
 * one store write different values to one place. Each dword records its accesses in the current
 * interval.
 *
 * Bank conflicts. LDS has 32 banks of one dword (64 on gfx950). Lanes are served in order, as many
 * at a time as could fill the banks; a group takes as many cycles as there are different dwords on
 * one bank.
 */
#include <string.h>

#include "tests/emulator/memory.h"

enum { MAX_BANKS = 64 };

/* ---- races ----------------------------------------------------------------------------------- */

enum { WRITER_ATOMIC = 0xfffe };

static const char *touch_dword(lds_touch *t, uint32_t epoch, int wave, uint8_t bytes, bool write,
                               bool atomic)
{
    const uint32_t me = UINT32_C(1) << wave;
    const bool written = t->write_epoch == epoch;
    const uint16_t writer = atomic ? WRITER_ATOMIC : (uint16_t)wave;
    if (!write) {
        if (t->read_epoch != epoch) t->readers = 0;
        t->read_epoch = epoch;
        t->readers |= me;
        return written && t->writer != writer && (t->written & bytes)
                   ? "reads what another wave writes"
                   : NULL;
    }
    const char *race = NULL;
    if (!written) {
        t->write_epoch = epoch;
        t->writer = writer;
        t->written = bytes;
    } else {
        if (t->writer != writer && (t->written & bytes)) race = "writes what another wave writes";
        if (t->writer != writer) t->writer = LDS_MIXED;
        t->written |= bytes;
    }
    if (t->read_epoch == epoch && (t->readers & ~me) != 0) race = "writes what another wave reads";
    return race;
}

static void check_race(emu_wave *w, const emu_instr *in, int lane, uint32_t address, int bytes,
                       bool write, bool atomic)
{
    emu_group *const g = w->group;
    const uint32_t end = address + (uint32_t)bytes;
    for (uint32_t dword = address / 4; dword * 4 < end; dword++) {
        lds_touch *const t = &g->touch[dword];
        const uint32_t me = UINT32_C(1) << w->index;
        if (!write && t->read_epoch == g->epoch && (t->readers & me) &&
            (t->write_epoch != g->epoch || t->writer == w->index))
            continue; /* seen already */
        const uint32_t first = dword * 4 < address ? address - dword * 4 : 0,
                       rest = end - dword * 4 < 4 ? 4 - (end - dword * 4) : 0;
        const uint8_t mask = (uint8_t)((0xfu << first) & (0xfu >> rest));
        const char *const race = touch_dword(t, g->epoch, w->index, mask, write, atomic);
        if (race != NULL) emu_race(w, in, "lane %d, LDS byte %u: %s", lane, address, race);
    }
}

uint8_t *emu_lds_at(emu_wave *w, const emu_instr *in, int lane, uint32_t address, int bytes,
                    bool write, bool atomic, uint8_t **def)
{
    emu_group *const g = w->group;
    if (address >= g->lds_size || g->lds_size - address < (uint32_t)bytes) {
        emu_fault(w, in, "lane %d: %d bytes at byte %u are out of %u bytes of LDS", lane, bytes,
                  address, g->lds_size);
        return NULL;
    }
    check_race(w, in, lane, address, bytes, write, atomic);
    *def = g->lds_def + address;
    return g->lds + address;
}

/* ---- bank conflicts -------------------------------------------------------------------------- */

/* Cycles of one group of lanes. */
static int group_cycles(const uint32_t *address, uint64_t mask, int first, int lanes, int dwords,
                        int banks)
{
    uint32_t seen[MAX_BANKS][8];
    uint8_t count[MAX_BANKS] = {0};
    int cycles = 0;
    for (int l = first; l < first + lanes; l++) {
        if (!lane_in(mask, l)) continue;
        for (int n = 0; n < dwords; n++) {
            const uint32_t dword = address[l] / 4 + (uint32_t)n;
            const uint32_t bank = dword % (uint32_t)banks;
            int k = 0;
            while (k < count[bank] && k < 8 && seen[bank][k] != dword) k++;
            if (k < count[bank] && k < 8) continue;
            if (k < 8) seen[bank][k] = dword;
            if (++count[bank] > cycles) cycles = count[bank];
        }
    }
    return cycles;
}

static void count_conflicts(emu_wave *w, const uint32_t *address, uint64_t mask, int bytes)
{
    const int banks = w->group->machine->lds_banks, dwords = (bytes + 3) / 4;
    if (!w->group->machine->launch->count_banks) return;
    const int lanes = banks / (dwords == 3 ? 4 : dwords);
    emu_report *const report = w->group->machine->report;
    for (int first = 0; first < w->lanes; first += lanes) {
        const int count = first + lanes > w->lanes ? w->lanes - first : lanes;
        const int cycles = group_cycles(address, mask, first, count, dwords, banks);
        report->lds_cycles += (uint64_t)cycles;
        report->lds_cycles_ideal += cycles > 0;
    }
}

/* ---- accesses -------------------------------------------------------------------------------- */

/* emu_row.data above MEM_SPACE. */
enum {
    TWO = 1 * MEM_SPACE,    /* two addresses, offset0 and offset1 in units */
    STRIDED = 2 * MEM_SPACE /* of 64 elements */
};

/* Byte addresses of all lanes; reports undefined ones. */
static void addresses(emu_wave *w, const emu_instr *in, int32_t offset, uint32_t *address)
{
    const emu_operand *const o = &in->src[0];
    const uint64_t exec = exec_mask(w), def = w->v_def[o->reg][0] & w->v_def[o->reg][1];
    if ((def & exec) != exec) emu_undefined(w, in, "an address in LDS");
    for (int l = 0; l < w->lanes; l++) address[l] = w->v[o->reg][l] + (uint32_t)offset;
}

static int32_t offset_of(const emu_instr *in, int which)
{
    const int64_t data = in->row->data;
    if ((data & TWO) == 0) return in->mod.offset;
    const int32_t unit = (int32_t)(data & MEM_BYTES) * ((data & STRIDED) ? 64 : 1);
    return unit * (which == 0 ? in->mod.offset0 : in->mod.offset1);
}

static void run_load(emu_wave *w, const emu_instr *in)
{
    const int64_t data = in->row->data;
    const int bytes = (int)(data & MEM_BYTES), parts = (data & TWO) ? 2 : 1;
    emu_transfer t[2];
    for (int part = 0; part < parts; part++) {
        uint32_t address[LANES];
        addresses(w, in, offset_of(in, part), address);
        emu_transfer_begin(&t[part], data);
        EACH (lane, exec_mask(w)) {
            uint8_t *def;
            const uint8_t *const p =
                emu_lds_at(w, in, lane, address[lane], bytes, false, false, &def);
            if (p == NULL) return;
            emu_transfer_load(&t[part], data, lane, p, def);
        }
        count_conflicts(w, address, exec_mask(w), bytes);
    }
    if (parts == 1) {
        emu_transfer_write(w, in, &t[0], exec_mask(w));
        return;
    }
    for (int n = 0; n < 2 * t[0].dwords; n++) {
        const emu_transfer *const from = &t[n / t[0].dwords];
        const int dword = n % t[0].dwords;
        emu_vector_write(w, in->dst[0].reg + n, from->d[dword], exec_mask(w),
                         ~from->undef[dword][0], ~from->undef[dword][1]);
    }
}

/* Whether another lane of the same store wrote other values to these bytes, which were `before`. */
static bool clashes(emu_group *g, uint32_t address, int bytes, const uint8_t *before)
{
    bool found = false;
    for (int n = 0; n < bytes; n++) {
        const uint32_t at = address + (uint32_t)n;
        lds_touch *const t = &g->touch[at / 4];
        const uint8_t bit = (uint8_t)(1 << at % 4);
        if (t->store != g->stores) t->stored = 0;
        found |= (t->stored & bit) && before[n] != g->lds[at];
        t->store = g->stores;
        t->stored |= bit;
    }
    return found;
}

static void store_lane(emu_wave *w, const emu_instr *in, int lane, uint32_t address, int reg)
{
    const int bytes = (int)(in->row->data & MEM_BYTES);
    uint8_t *def, before[16];
    uint8_t *const p = emu_lds_at(w, in, lane, address, bytes, true, false, &def);
    if (p == NULL) return;
    memcpy(before, p, (size_t)bytes);
    emu_transfer_store(w, reg, in->row->data, lane, p, def);
    if (clashes(w->group, address, bytes, before))
        emu_race(w, in, "lane %d, LDS byte %u: another lane of the store writes other values", lane,
                 address);
}

static void run_store(emu_wave *w, const emu_instr *in)
{
    const int64_t data = in->row->data;
    for (int part = 0; part < ((data & TWO) ? 2 : 1); part++) {
        uint32_t address[LANES];
        addresses(w, in, offset_of(in, part), address);
        w->group->stores++;
        EACH (lane, exec_mask(w)) {
            store_lane(w, in, lane, address[lane], in->src[1 + part].reg);
            if (w->state == FAULTED) return;
        }
        count_conflicts(w, address, exec_mask(w), (int)(data & MEM_BYTES));
    }
}

/* ---- atomics --------------------------------------------------------------------------------- */

enum { ATOMIC_SHIFT = 20, COMPARE_FIRST = MEM_SPACE };

static void run_atomic(emu_wave *w, const emu_instr *in)
{
    const int bytes = (int)(in->row->data & MEM_BYTES);
    const atomic_op op = (atomic_op)(in->row->data >> ATOMIC_SHIFT);
    const bool swapped = (in->row->data & COMPARE_FIRST) != 0; /* gfx9 names the comparand first */
    uint32_t address[LANES];
    addresses(w, in, in->mod.offset, address);
    emu_transfer t;
    emu_transfer_begin(&t, bytes);
    EACH (lane, exec_mask(w)) {
        uint8_t *def;
        uint8_t *const p = emu_lds_at(w, in, lane, address[lane], bytes, true, true, &def);
        if (p == NULL) return;
        bool def_x, def_y = true;
        uint64_t x = emu_lane_value(w, &in->src[1], lane, &def_x);
        uint64_t y = op == ATOMIC_CMPSWAP ? emu_lane_value(w, &in->src[2], lane, &def_y) : 0;
        emu_transfer_load(&t, bytes, lane, p, def);
        uint64_t old = 0;
        memcpy(&old, p, (size_t)bytes);
        const uint64_t now =
            swapped ? emu_atomic(op, bytes, old, y, x) : emu_atomic(op, bytes, old, x, y);
        memcpy(p, &now, (size_t)bytes);
        for (int n = 0; n < bytes; n++) def[n] &= def_x && def_y;
    }
    count_conflicts(w, address, exec_mask(w), bytes);
    if (in->dst[0].kind == VECTOR) emu_transfer_write(w, in, &t, exec_mask(w));
}

/* ---- permutations ---------------------------------------------------------------------------- */

static void addresses_of_lanes(emu_wave *w, const emu_instr *in, int *lane_of)
{
    uint32_t address[LANES];
    addresses(w, in, in->mod.offset, address);
    for (int l = 0; l < w->lanes; l++) lane_of[l] = (int)(address[l] / 4 % (uint32_t)w->lanes);
}

/* Each lane gets the value of lane from[], or 0 if that one is inactive. */
static void gather(emu_wave *w, const emu_instr *in, int reg, const int *from)
{
    const uint64_t exec = exec_mask(w);
    uint32_t d[LANES];
    uint64_t def[2] = {0, 0};
    for (int l = 0; l < w->lanes; l++) {
        const bool there = lane_in(exec, from[l]);
        d[l] = there ? w->v[reg][from[l]] : 0;
        for (int half = 0; half < 2; half++)
            def[half] |= (uint64_t)(!there || lane_in(w->v_def[reg][half], from[l])) << l;
    }
    emu_vector_write(w, in->dst[0].reg, d, exec, def[0], def[1]);
}

static void run_bpermute(emu_wave *w, const emu_instr *in)
{
    int from[LANES];
    addresses_of_lanes(w, in, from);
    gather(w, in, in->src[1].reg, from);
}

/* Each active lane sends to the lane it names. The highest sender wins; lanes without a sender get
 * 0. */
static void run_permute(emu_wave *w, const emu_instr *in)
{
    int to[LANES];
    const int reg = in->src[1].reg;
    uint32_t d[LANES] = {0};
    uint64_t def[2] = {~UINT64_C(0), ~UINT64_C(0)};
    addresses_of_lanes(w, in, to);
    EACH (lane, exec_mask(w)) {
        d[to[lane]] = w->v[reg][lane];
        for (int half = 0; half < 2; half++) {
            const uint64_t bit = UINT64_C(1) << to[lane];
            def[half] = lane_in(w->v_def[reg][half], lane) ? def[half] | bit : def[half] & ~bit;
        }
    }
    emu_vector_write(w, in->dst[0].reg, d, exec_mask(w), def[0], def[1]);
}

/* The offset is a pattern: four lanes in any order, or masks on a lane's number within its 32. */
static void run_swizzle(emu_wave *w, const emu_instr *in)
{
    const int pattern = in->mod.offset;
    int from[LANES];
    for (int l = 0; l < w->lanes; l++) {
        if (pattern & 0x8000) {
            from[l] = (l & ~3) | (pattern >> 2 * (l & 3) & 3);
        } else {
            const int and_mask = pattern & 31, or_mask = pattern >> 5 & 31,
                      xor_mask = pattern >> 10 & 31;
            from[l] = (l & 32) | ((((l & 31) & and_mask) | or_mask) ^ xor_mask);
        }
    }
    if (pattern >= 0xc000) {
        emu_fault(w, in, "a swizzle that is not known");
        return;
    }
    gather(w, in, in->src[0].reg, from);
}

/* A transpose on the way, of blocks of 16 lanes: they bring 4 rows by 16 columns of 16 bits, lane i
 * columns 4 (i % 4) .. + 3 of row i / 4, and lane i gets column i of the 4 rows. */
static void run_transpose(emu_wave *w, const emu_instr *in)
{
    uint32_t address[LANES];
    addresses(w, in, in->mod.offset, address);
    uint16_t element[LANES][4];
    uint8_t known[LANES][4];
    const uint64_t all = all_lanes(w);
    if (exec_mask(w) != all) emu_fault(w, in, "transposes without all lanes");
    for (int l = 0; l < w->lanes; l++) {
        uint8_t *def;
        const uint8_t *const p = emu_lds_at(w, in, l, address[l], 8, false, false, &def);
        if (p == NULL) return;
        memcpy(element[l], p, 8);
        for (int n = 0; n < 4; n++) known[l][n] = def[2 * n] && def[2 * n + 1];
    }
    count_conflicts(w, address, all, 8);
    for (int dword = 0; dword < 2; dword++) {
        uint32_t d[LANES];
        uint64_t def[2] = {0, 0};
        for (int l = 0; l < w->lanes; l++) {
            const int block = l & ~15, i = l & 15;
            d[l] = 0;
            for (int half = 0; half < 2; half++) {
                const int from = block + 4 * (2 * dword + half) + i / 4;
                d[l] |= (uint32_t)element[from][i % 4] << 16 * half;
                def[half] |= (uint64_t)known[from][i % 4] << l;
            }
        }
        emu_vector_write(w, in->dst[0].reg + dword, d, all, def[0], def[1]);
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

#define ROW(name, form, run, data)                             \
    {                                                          \
        name, form, run, EMU_LDS, NULL, NULL, data, HALF_ALONE \
    }
/* The names of gfx9 and of gfx11. */
#define LOAD(old, new, data) \
    ROW("ds_read_" old, "r=r", run_load, data), ROW("ds_load_" new, "r=r", run_load, data)
#define STORE(old, new, data) \
    ROW("ds_write_" old, "=rr", run_store, data), ROW("ds_store_" new, "=rr", run_store, data)
#define ATOMIC_DATA(bytes, op) ((bytes) | (int64_t)(op) << ATOMIC_SHIFT)
#define ATOMIC(name, returning, bytes, op)                      \
    ROW("ds_" name, "=rr", run_atomic, ATOMIC_DATA(bytes, op)), \
        ROW("ds_" returning, "r=rr", run_atomic, ATOMIC_DATA(bytes, op))

static const emu_row rows[] = {
    LOAD("b32", "b32", 4),
    LOAD("b64", "b64", 8),
    LOAD("b96", "b96", 12),
    LOAD("b128", "b128", 16),
    LOAD("u8", "u8", 1),
    LOAD("i8", "i8", 1 | MEM_SIGN),
    LOAD("u16", "u16", 2),
    LOAD("i16", "i16", 2 | MEM_SIGN),
    LOAD("u8_d16", "u8_d16", 1 | MEM_D16),
    LOAD("u8_d16_hi", "u8_d16_hi", 1 | MEM_D16 | MEM_HIGH),
    LOAD("i8_d16", "i8_d16", 1 | MEM_SIGN | MEM_D16),
    LOAD("i8_d16_hi", "i8_d16_hi", 1 | MEM_SIGN | MEM_D16 | MEM_HIGH),
    LOAD("u16_d16", "u16_d16", 2 | MEM_D16),
    LOAD("u16_d16_hi", "u16_d16_hi", 2 | MEM_D16 | MEM_HIGH),
    ROW("ds_read2_b32", "r=r", run_load, 4 | TWO),
    ROW("ds_read2_b64", "r=r", run_load, 8 | TWO),
    ROW("ds_read2st64_b32", "r=r", run_load, 4 | TWO | STRIDED),
    ROW("ds_read2st64_b64", "r=r", run_load, 8 | TWO | STRIDED),
    ROW("ds_load_2addr_b32", "r=r", run_load, 4 | TWO),
    ROW("ds_load_2addr_b64", "r=r", run_load, 8 | TWO),
    ROW("ds_load_2addr_stride64_b32", "r=r", run_load, 4 | TWO | STRIDED),
    ROW("ds_load_2addr_stride64_b64", "r=r", run_load, 8 | TWO | STRIDED),
    ROW("ds_read_b64_tr_b16", "r=r", run_transpose, 8),

    STORE("b8", "b8", 1),
    STORE("b16", "b16", 2),
    STORE("b32", "b32", 4),
    STORE("b64", "b64", 8),
    STORE("b96", "b96", 12),
    STORE("b128", "b128", 16),
    STORE("b8_d16_hi", "b8_d16_hi", 1 | MEM_HIGH),
    STORE("b16_d16_hi", "b16_d16_hi", 2 | MEM_HIGH),
    ROW("ds_write2_b32", "=rrr", run_store, 4 | TWO),
    ROW("ds_write2_b64", "=rrr", run_store, 8 | TWO),
    ROW("ds_write2st64_b32", "=rrr", run_store, 4 | TWO | STRIDED),
    ROW("ds_write2st64_b64", "=rrr", run_store, 8 | TWO | STRIDED),
    ROW("ds_store_2addr_b32", "=rrr", run_store, 4 | TWO),
    ROW("ds_store_2addr_b64", "=rrr", run_store, 8 | TWO),
    ROW("ds_store_2addr_stride64_b32", "=rrr", run_store, 4 | TWO | STRIDED),
    ROW("ds_store_2addr_stride64_b64", "=rrr", run_store, 8 | TWO | STRIDED),

    ATOMIC("add_u32", "add_rtn_u32", 4, ATOMIC_ADD),
    ATOMIC("sub_u32", "sub_rtn_u32", 4, ATOMIC_SUB),
    ATOMIC("rsub_u32", "rsub_rtn_u32", 4, ATOMIC_RSUB),
    ATOMIC("inc_u32", "inc_rtn_u32", 4, ATOMIC_INC),
    ATOMIC("dec_u32", "dec_rtn_u32", 4, ATOMIC_DEC),
    ATOMIC("min_i32", "min_rtn_i32", 4, ATOMIC_SMIN),
    ATOMIC("max_i32", "max_rtn_i32", 4, ATOMIC_SMAX),
    ATOMIC("min_u32", "min_rtn_u32", 4, ATOMIC_UMIN),
    ATOMIC("max_u32", "max_rtn_u32", 4, ATOMIC_UMAX),
    ATOMIC("and_b32", "and_rtn_b32", 4, ATOMIC_AND),
    ATOMIC("or_b32", "or_rtn_b32", 4, ATOMIC_OR),
    ATOMIC("xor_b32", "xor_rtn_b32", 4, ATOMIC_XOR),
    ATOMIC("add_f32", "add_rtn_f32", 4, ATOMIC_FADD),
    ATOMIC("add_f64", "add_rtn_f64", 8, ATOMIC_FADD),
    ATOMIC("min_f32", "min_rtn_f32", 4, ATOMIC_FMIN),
    ATOMIC("max_f32", "max_rtn_f32", 4, ATOMIC_FMAX),
    ATOMIC("min_num_f32", "min_num_rtn_f32", 4, ATOMIC_FMIN),
    ATOMIC("max_num_f32", "max_num_rtn_f32", 4, ATOMIC_FMAX),
    ATOMIC("add_u64", "add_rtn_u64", 8, ATOMIC_ADD),
    ATOMIC("pk_add_f16", "pk_add_rtn_f16", 4, ATOMIC_PK_F16),
    ATOMIC("pk_add_bf16", "pk_add_rtn_bf16", 4, ATOMIC_PK_BF16),
    ROW("ds_wrxchg_rtn_b32", "r=rr", run_atomic, ATOMIC_DATA(4, ATOMIC_SWAP)),
    ROW("ds_wrxchg_rtn_b64", "r=rr", run_atomic, ATOMIC_DATA(8, ATOMIC_SWAP)),
    ROW("ds_storexchg_rtn_b32", "r=rr", run_atomic, ATOMIC_DATA(4, ATOMIC_SWAP)),
    ROW("ds_storexchg_rtn_b64", "r=rr", run_atomic, ATOMIC_DATA(8, ATOMIC_SWAP)),
    ROW("ds_cmpst_b32", "=rrr", run_atomic, ATOMIC_DATA(4, ATOMIC_CMPSWAP) | COMPARE_FIRST),
    ROW("ds_cmpst_rtn_b32", "r=rrr", run_atomic, ATOMIC_DATA(4, ATOMIC_CMPSWAP) | COMPARE_FIRST),
    ROW("ds_cmpst_rtn_b64", "r=rrr", run_atomic, ATOMIC_DATA(8, ATOMIC_CMPSWAP) | COMPARE_FIRST),
    ROW("ds_cmpstore_b32", "=rrr", run_atomic, ATOMIC_DATA(4, ATOMIC_CMPSWAP)),
    ROW("ds_cmpstore_rtn_b32", "r=rrr", run_atomic, ATOMIC_DATA(4, ATOMIC_CMPSWAP)),
    ROW("ds_cmpstore_rtn_b64", "r=rrr", run_atomic, ATOMIC_DATA(8, ATOMIC_CMPSWAP)),

    ROW("ds_bpermute_b32", "r=rr", run_bpermute, 0),
    ROW("ds_permute_b32", "r=rr", run_permute, 0),
    ROW("ds_swizzle_b32", "r=r", run_swizzle, 0),
};

const emu_table emu_lds_table = {rows, sizeof rows / sizeof *rows};
