/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory: the regions that lanes may touch, and the instructions that touch them: scalar loads,
 * global, flat, buffer and scratch accesses, and atomics. Every lane's every access is checked.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/memory.h"
#include "tests/emulator/number.h"

/* ---- regions --------------------------------------------------------------------------------- */

typedef struct region {
    uintptr_t base;
    size_t size;
    uint8_t *def; /* [size], or NULL when all is defined */
    bool fine;
} region;

struct emu_memory {
    region *region; /* by address */
    int regions, room;
    int last; /* the one last hit */
};

emu_memory *emu_memory_create(void) { return calloc(1, sizeof(emu_memory)); }

void emu_memory_destroy(emu_memory *memory)
{
    if (memory == NULL) return;
    for (int n = 0; n < memory->regions; n++) free(memory->region[n].def);
    free(memory->region);
    free(memory);
}

/* The first region that ends after the address. */
static int find_region(const emu_memory *m, uintptr_t address)
{
    int low = 0, high = m->regions;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (m->region[middle].base + m->region[middle].size > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool emu_memory_add(emu_memory *m, void *base, size_t size, bool fresh)
{
    if (size == 0) return true;
    const uintptr_t address = (uintptr_t)base;
    const int at = find_region(m, address);
    if (at < m->regions && m->region[at].base < address + size) return false;
    if (m->regions == m->room) {
        const int room = m->room == 0 ? 64 : 2 * m->room;
        region *const grown = realloc(m->region, (size_t)room * sizeof *grown);
        if (grown == NULL) return false;
        m->region = grown;
        m->room = room;
    }
    uint8_t *const def = fresh ? calloc(1, size) : NULL;
    if (fresh && def == NULL) return false;
    memmove(m->region + at + 1, m->region + at, (size_t)(m->regions - at) * sizeof *m->region);
    m->region[at] = (region){address, size, def, false};
    m->regions++;
    return true;
}

bool emu_memory_remove(emu_memory *m, const void *base)
{
    const int at = find_region(m, (uintptr_t)base);
    if (at == m->regions || m->region[at].base != (uintptr_t)base) return false;
    free(m->region[at].def);
    m->regions--;
    memmove(m->region + at, m->region + at + 1, (size_t)(m->regions - at) * sizeof *m->region);
    return true;
}

bool emu_memory_refine(emu_memory *m, const void *base)
{
    const int at = find_region(m, (uintptr_t)base);
    if (at == m->regions || m->region[at].base != (uintptr_t)base) return false;
    m->region[at].fine = true;
    return true;
}

/* Whether it lies in a fine-grained region. */
static bool is_fine(const emu_memory *m, const uint8_t *address)
{
    const int at = find_region(m, (uintptr_t)address);
    return at < m->regions && m->region[at].base <= (uintptr_t)address && m->region[at].fine;
}

uint8_t *emu_memory_at(emu_memory *m, uint64_t address, size_t size, uint8_t **def)
{
    if (m->last >= m->regions || address - m->region[m->last].base >= m->region[m->last].size)
        m->last = find_region(m, (uintptr_t)address);
    if (m->last >= m->regions) return NULL;
    const region *const r = &m->region[m->last];
    const uint64_t offset = address - r->base; /* large when below */
    if (offset >= r->size || r->size - offset < size) return NULL;
    *def = r->def == NULL ? NULL : r->def + offset;
    return (uint8_t *)(uintptr_t)address;
}

bool emu_memory_holds(const emu_memory *m, const void *base, size_t size)
{
    if (size == 0) return true;
    const uintptr_t address = (uintptr_t)base;
    const int at = find_region(m, address);
    return at < m->regions && m->region[at].base <= address &&
           m->region[at].base + m->region[at].size - address >= size;
}

void emu_memory_define(emu_memory *m, const void *base, size_t size)
{
    uint8_t *def;
    if (size > 0 && emu_memory_at(m, (uintptr_t)base, size, &def) != NULL && def != NULL)
        memset(def, 1, size);
}

void emu_memory_explain(const emu_memory *m, uint64_t address, char *text, size_t size)
{
    const int next = find_region(m, (uintptr_t)address);
    const region *const after = next < m->regions ? &m->region[next] : NULL;
    const region *const before = next > 0 ? &m->region[next - 1] : NULL;
    if (after != NULL && after->base <= address)
        snprintf(text, size, "%llu bytes before the end of a region of %zu",
                 (unsigned long long)(after->base + after->size - address), after->size);
    else if (before != NULL &&
             (after == NULL || address - (before->base + before->size) < after->base - address))
        snprintf(text, size, "%llu bytes after the end of a region of %zu",
                 (unsigned long long)(address - (before->base + before->size)), before->size);
    else if (after != NULL)
        snprintf(text, size, "%llu bytes before a region of %zu",
                 (unsigned long long)(after->base - address), after->size);
    else
        snprintf(text, size, "there is no region");
}

/* ---- bytes and registers --------------------------------------------------------------------- */

void emu_transfer_begin(emu_transfer *t, int64_t data)
{
    t->dwords = (int)((data & MEM_BYTES) + 3) / 4;
    memset(t->undef, 0, sizeof t->undef);
}

static bool all_defined(const uint8_t *def, int bytes)
{
    for (int n = 0; n < bytes; n++)
        if (!def[n]) return false;
    return true;
}

void emu_transfer_load(emu_transfer *t, int64_t data, int lane, const uint8_t *p,
                       const uint8_t *def)
{
    const int bytes = (int)(data & MEM_BYTES);
    const uint64_t bit = UINT64_C(1) << lane;
    if (bytes >= 4) {
        for (int n = 0; n < t->dwords; n++) memcpy(&t->d[n][lane], p + 4 * n, 4);
    } else {
        uint32_t x = p[0];
        if (bytes == 2) x |= (uint32_t)p[1] << 8;
        const uint32_t sign = UINT32_C(1) << (8 * bytes - 1);
        t->d[0][lane] = (data & MEM_SIGN) ? (x ^ sign) - sign : x;
    }
    for (int n = 0; def != NULL && n < t->dwords; n++) {
        uint32_t known = 0; /* of a dword's bytes, mostly all */
        if (bytes >= 4) memcpy(&known, def + 4 * n, 4);
        if (known == 0x01010101) continue;
        for (int half = 0; half < 2; half++)
            if (!all_defined(def + (bytes >= 4 ? 4 * n + 2 * half : 0), bytes >= 2 ? 2 : 1))
                t->undef[n][half] |= bit;
    }
}

void emu_transfer_write(emu_wave *w, const emu_instr *in, const emu_transfer *t, uint64_t mask)
{
    const int reg = in->dst[0].reg;
    const int64_t data = in->row->data;
    if ((data & MEM_D16) == 0) {
        for (int n = 0; n < t->dwords; n++)
            emu_vector_write(w, reg + n, t->d[n], mask, ~t->undef[n][0], ~t->undef[n][1]);
        return;
    }
    const int high = (data & MEM_HIGH) ? 1 : 0;
    uint32_t d[LANES];
    for (int l = 0; l < w->lanes; l++) {
        const uint32_t x = t->d[0][l] & 0xffff, old = w->v[reg][l];
        d[l] = high ? x << 16 | (old & 0xffff) : x | (old & 0xffff0000);
    }
    const uint64_t loaded = ~t->undef[0][0];
    emu_vector_write(w, reg, d, mask, high ? w->v_def[reg][0] : loaded,
                     high ? loaded : w->v_def[reg][1]);
}

bool emu_transfer_store(const emu_wave *w, int reg, int64_t data, int lane, uint8_t *p,
                        uint8_t *def)
{
    const int bytes = (int)(data & MEM_BYTES), high = (data & MEM_HIGH) ? 1 : 0;
    bool known = true;
    if (bytes < 4) {
        const uint32_t x = w->v[reg][lane] >> (high ? 16 : 0);
        memcpy(p, &x, (size_t)bytes);
        known = lane_in(w->v_def[reg][high], lane);
        if (def != NULL) memset(def, known, (size_t)bytes);
        return known;
    }
    for (int n = 0; n < bytes / 4; n++) {
        memcpy(p + 4 * n, &w->v[reg + n][lane], 4);
        const bool low = lane_in(w->v_def[reg + n][0], lane),
                   top = lane_in(w->v_def[reg + n][1], lane);
        known &= low && top;
        if (def == NULL) continue;
        def[4 * n] = def[4 * n + 1] = low;
        def[4 * n + 2] = def[4 * n + 3] = top;
    }
    return known;
}

uint64_t emu_lane_value(const emu_wave *w, const emu_operand *o, int lane, bool *def)
{
    uint64_t value = 0;
    *def = true;
    for (int n = 0; n < o->count && n < 2; n++) {
        value |= (uint64_t)w->v[o->reg + n][lane] << 32 * n;
        *def &= lane_in(w->v_def[o->reg + n][0] & w->v_def[o->reg + n][1], lane);
    }
    return value;
}

/* ---- scalar loads ---------------------------------------------------------------------------- */

static void fault_at(emu_wave *w, const emu_instr *in, int lane, uint64_t address, int bytes)
{
    char where[128];
    emu_memory_explain(w->group->machine->memory, address, where, sizeof where);
    if (lane < 0)
        emu_fault(w, in, "%d bytes at %#llx are out of bounds: %s", bytes,
                  (unsigned long long)address, where);
    else
        emu_fault(w, in, "lane %d: %d bytes at %#llx are out of bounds: %s", lane, bytes,
                  (unsigned long long)address, where);
}

/* data: dwords, or less than one as bytes with MEM_SPACE set. A sum of a pair, a register or
 * number, and the offset; buffers add theirs to the base of a descriptor. */
static void run_scalar_load(emu_wave *w, const emu_instr *in)
{
    uint64_t def[2];
    const uint64_t base = emu_scalar_read(w, &in->src[0], &def[0]);
    const uint64_t offset = in->sources > 1 ? emu_scalar_read(w, &in->src[1], &def[1]) : 0;
    const bool buffer = in->src[0].count == 4;
    const int bytes = (int)(in->row->data & MEM_BYTES);
    const bool number = in->src[1].kind == NUMBER;
    const uint64_t address = (base & UINT64_C(0xffffffffffff)) +
                             (number ? offset : (uint32_t)offset) +
                             (uint64_t)(int64_t)in->mod.offset;
    if (def[0] != ~UINT64_C(0) || (uint32_t)def[1] != UINT32_MAX)
        emu_undefined(w, in, "an address");
    const uint32_t dwords = (uint32_t)(bytes + 3) / 4;
    const int to = in->dst[0].reg;
    const uint32_t records = w->s[in->src[0].reg + 2];
    if (buffer && address - (base & UINT64_C(0xffffffffffff)) + (uint64_t)bytes > records) {
        emu_fault(w, in, "reads behind a buffer of %u bytes", records);
        return;
    }
    uint8_t *known;
    const uint8_t *const p =
        emu_memory_at(w->group->machine->memory, address, (size_t)bytes, &known);
    if (p == NULL) {
        fault_at(w, in, -1, address, bytes);
        return;
    }
    for (uint32_t n = 0; n < dwords; n++) {
        uint32_t x = 0;
        memcpy(&x, p + 4 * n, bytes < 4 ? (size_t)bytes : 4);
        const uint32_t sign = bytes < 4 ? UINT32_C(1) << (8 * bytes - 1) : 0;
        w->s[to + (int)n] = (in->row->data & MEM_SIGN) ? (x ^ sign) - sign : x;
        w->s_def[to + (int)n] =
            known == NULL || all_defined(known + 4 * n, bytes < 4 ? bytes : 4) ? UINT32_MAX : 0;
    }
}

static void run_memtime(emu_wave *w, const emu_instr *in)
{
    emu_scalar_write(w, in, &in->dst[0], w->steps, ~UINT64_C(0));
}

/* ---- addresses of lanes ---------------------------------------------------------------------- */

/* emu_row.data above MEM_SPACE: where the address comes from. */
enum {
    GLOBAL = 0 * MEM_SPACE,
    FLAT = 1 * MEM_SPACE,
    BUFFER = 2 * MEM_SPACE,
    SCRATCH = 3 * MEM_SPACE,
    SPACES = 3 * MEM_SPACE,
    STORE = 4 * MEM_SPACE,
    TO_LDS = 8 * MEM_SPACE,
};

enum { ATOMIC_SHIFT = 20 };

/* The parts of addresses that all lanes share. */
typedef struct address_parts {
    const emu_operand *vector; /* or NULL */
    uint64_t base;             /* of all lanes */
    uint32_t records, stride;  /* of a buffer */
    int space;
} address_parts;

static uint64_t scalar_part(emu_wave *w, const emu_instr *in, const emu_operand *o)
{
    if (o->kind == OFF) return 0;
    uint64_t def;
    const uint64_t x = emu_scalar_read(w, o, &def);
    const bool known = o->count > 1 ? def == ~UINT64_C(0) : (uint32_t)def == UINT32_MAX;
    if (!known && exec_mask(w) != 0) emu_undefined(w, in, "a scalar address");
    return o->count > 1 ? x : (uint32_t)x;
}

/* vector: which source is the vector address; the scalar one is `scalar`, the last for others. */
static address_parts parts_of(emu_wave *w, const emu_instr *in, int vector, int scalar)
{
    address_parts p = {.space = (int)(in->row->data & SPACES)};
    p.vector = in->src[vector].kind == VECTOR ? &in->src[vector] : NULL;
    p.base = (uint64_t)(int64_t)in->mod.offset;
    if (p.space == BUFFER) {
        const int rsrc = in->src[vector + 1].reg;
        for (int n = 0; n < 4; n++)
            if (w->s_def[rsrc + n] != UINT32_MAX && exec_mask(w) != 0)
                emu_undefined(w, in, "a buffer's descriptor");
        p.base += pair(w->s + rsrc) & UINT64_C(0xffffffffffff);
        p.base += scalar_part(w, in, &in->src[vector + 2]);
        p.stride = w->s[rsrc + 1] >> 16 & 0x3fff;
        p.records = w->s[rsrc + 2];
    } else if (p.space != FLAT) {
        p.base += scalar_part(w, in, &in->src[scalar]);
    }
    return p;
}

/* The address of a lane. *inside is false if a buffer's descriptor suppresses the access. */
static uint64_t lane_address(emu_wave *w, const emu_instr *in, const address_parts *p, int lane,
                             int bytes, bool *inside)
{
    bool def = true;
    uint64_t v = p->vector == NULL ? 0 : emu_lane_value(w, p->vector, lane, &def);
    if (!def) emu_undefined(w, in, "lane %d: an address", lane);
    *inside = true;
    if (p->space != BUFFER) return p->base + v;
    uint64_t index = 0;
    if (in->mod.idxen) {
        index = (uint32_t)v;
        v = in->mod.offen ? v >> 32 : 0;
    } else if (!in->mod.offen) {
        v = 0;
    }
    const uint64_t offset = index * p->stride + (uint32_t)v + (uint64_t)(int64_t)in->mod.offset;
    if (p->stride != 0)
        *inside = index < p->records;
    else if (offset + (uint64_t)bytes > p->records) {
        *inside = false;
        if (offset < p->records)
            emu_fault(w, in, "lane %d: straddles the end of a buffer of %u bytes", lane,
                      p->records);
    }
    return p->base + index * p->stride + (uint32_t)v;
}

typedef enum place { IN_MEMORY, IN_LDS, IN_SCRATCH } place;

/* The high half of a flat address selects LDS or scratch. */
static place place_of(const emu_wave *w, const address_parts *p, uint64_t address)
{
    if (p->space == SCRATCH) return IN_SCRATCH;
    if (p->space != FLAT) return IN_MEMORY;
    return address >> 32 == w->s[S_SHARED_BASE + 1]    ? IN_LDS
           : address >> 32 == w->s[S_PRIVATE_BASE + 1] ? IN_SCRATCH
                                                       : IN_MEMORY;
}

static uint8_t *scratch_at(emu_wave *w, const emu_instr *in, int lane, uint32_t address, int bytes,
                           uint8_t **def)
{
    const uint32_t size = (uint32_t)w->group->machine->scratch_size;
    if (address >= size || size - address < (uint32_t)bytes) {
        emu_fault(w, in, "lane %d: %d bytes at byte %u are out of %u bytes of scratch", lane, bytes,
                  address, size);
        return NULL;
    }
    const size_t at = (size_t)lane * size + address;
    *def = w->scratch_def + at;
    return w->scratch + at;
}

/* The bytes of a lane; NULL after a fault. */
static uint8_t *bytes_at(emu_wave *w, const emu_instr *in, const address_parts *p, int lane,
                         uint64_t address, int bytes, bool write, bool atomic, uint8_t **def)
{
    const place at = place_of(w, p, address);
    if (at == IN_LDS) return emu_lds_at(w, in, lane, (uint32_t)address, bytes, write, atomic, def);
    if (at == IN_SCRATCH) return scratch_at(w, in, lane, (uint32_t)address, bytes, def);
    uint8_t *const found = emu_memory_at(w->group->machine->memory, address, (size_t)bytes, def);
    if (found == NULL) fault_at(w, in, lane, address, bytes);
    return found;
}

/* ---- vector accesses ------------------------------------------------------------------------- */

static void run_load(emu_wave *w, const emu_instr *in)
{
    const int64_t data = in->row->data;
    const int bytes = (int)(data & MEM_BYTES);
    const address_parts p = parts_of(w, in, 0, 1);
    emu_transfer t;
    emu_transfer_begin(&t, data);
    EACH (lane, exec_mask(w)) {
        bool inside;
        const uint64_t address = lane_address(w, in, &p, lane, bytes, &inside);
        uint8_t *def = NULL;
        static const uint8_t zeros[16];
        const uint8_t *const from =
            inside ? bytes_at(w, in, &p, lane, address, bytes, false, false, &def) : zeros;
        if (from == NULL || w->state == FAULTED) return;
        emu_transfer_load(&t, data, lane, from, def);
    }
    emu_transfer_write(w, in, &t, exec_mask(w));
}

/* Loads directly to LDS: lane after lane from the address in M0. */
static void run_load_to_lds(emu_wave *w, const emu_instr *in)
{
    const int bytes = (int)(in->row->data & MEM_BYTES), room = bytes < 4 ? 4 : bytes;
    const address_parts p = parts_of(w, in, 0, 1);
    const uint32_t to = (w->s[S_M0] & 0xffff) + (uint32_t)in->mod.offset;
    if (w->s_def[S_M0] != UINT32_MAX && exec_mask(w) != 0) emu_undefined(w, in, "M0");
    EACH (lane, exec_mask(w)) {
        bool inside;
        const uint64_t address = lane_address(w, in, &p, lane, bytes, &inside);
        uint8_t *def = NULL, *lds_def;
        uint8_t *const lds =
            emu_lds_at(w, in, lane, to + (uint32_t)(lane * room), room, true, false, &lds_def);
        const uint8_t *const from =
            inside && lds != NULL ? bytes_at(w, in, &p, lane, address, bytes, false, false, &def)
                                  : NULL;
        if (w->state == FAULTED) return;
        memset(lds, 0, (size_t)room);
        memset(lds_def, 1, (size_t)room);
        if (from != NULL) memcpy(lds, from, (size_t)bytes);
        if (def != NULL) memcpy(lds_def, def, (size_t)bytes);
    }
}

/* On gfx90a a modifier makes a load go to LDS; buffer loads have it everywhere. */
static void run_load_anywhere(emu_wave *w, const emu_instr *in)
{
    if (in->mod.lds)
        run_load_to_lds(w, in);
    else
        run_load(w, in);
}

static void run_store(emu_wave *w, const emu_instr *in)
{
    const int64_t data = in->row->data;
    const int bytes = (int)(data & MEM_BYTES);
    const bool buffer = (data & SPACES) == BUFFER;
    const address_parts p = parts_of(w, in, buffer ? 1 : 0, 2);
    const int reg = in->src[buffer ? 0 : 1].reg;
    EACH (lane, exec_mask(w)) {
        bool inside;
        const uint64_t address = lane_address(w, in, &p, lane, bytes, &inside);
        if (w->state == FAULTED) return;
        if (!inside) continue;
        uint8_t *def = NULL;
        uint8_t *const to = bytes_at(w, in, &p, lane, address, bytes, true, false, &def);
        if (to == NULL) return;
        const bool known = emu_transfer_store(w, reg, data, lane, to, def);
        if (!known && place_of(w, &p, address) == IN_MEMORY)
            emu_undefined(w, in, "lane %d: a stored value", lane);
    }
}

/* ---- atomics --------------------------------------------------------------------------------- */

static uint64_t packed_add(uint64_t a, uint64_t b, float (*to)(uint32_t), uint32_t (*from)(float))
{
    const uint32_t low = from(to(a & 0xffff) + to(b & 0xffff));
    const uint32_t high = from(to(a >> 16 & 0xffff) + to(b >> 16 & 0xffff));
    return low | (uint64_t)high << 16;
}

static uint64_t float_atomic(atomic_op op, int bytes, uint64_t old, uint64_t x)
{
    double a, b;
    if (bytes == 8) {
        memcpy(&a, &old, 8);
        memcpy(&b, &x, 8);
    } else {
        a = float_of((uint32_t)old);
        b = float_of((uint32_t)x);
    }
    if (op != ATOMIC_FADD) {
        const bool second = op == ATOMIC_FMIN ? b < a : b > a;
        return second || a != a ? x : old;
    }
    if (bytes == 4) return bits_of((float)a + (float)b);
    const double sum = a + b;
    uint64_t r;
    memcpy(&r, &sum, 8);
    return r;
}

uint64_t emu_atomic(atomic_op op, int bytes, uint64_t old, uint64_t x, uint64_t compare)
{
    const int64_t s = bytes == 8 ? (int64_t)old : (int32_t)old,
                  y = bytes == 8 ? (int64_t)x : (int32_t)x;
    switch (op) {
    case ATOMIC_ADD: return old + x;
    case ATOMIC_SUB: return old - x;
    case ATOMIC_RSUB: return x - old;
    case ATOMIC_SMIN: return s < y ? old : x;
    case ATOMIC_SMAX: return s > y ? old : x;
    case ATOMIC_UMIN: return old < x ? old : x;
    case ATOMIC_UMAX: return old > x ? old : x;
    case ATOMIC_AND: return old & x;
    case ATOMIC_OR: return old | x;
    case ATOMIC_XOR: return old ^ x;
    case ATOMIC_INC: return old >= x ? 0 : old + 1;
    case ATOMIC_DEC: return old == 0 || old > x ? x : old - 1;
    case ATOMIC_SWAP: return x;
    case ATOMIC_CMPSWAP: return old == compare ? x : old;
    case ATOMIC_FADD:
    case ATOMIC_FMIN:
    case ATOMIC_FMAX: return float_atomic(op, bytes, old, x);
    case ATOMIC_PK_F16: return packed_add(old, x, half_to_float, half_from_float);
    case ATOMIC_PK_BF16: return packed_add(old, x, bf16_to_float, bf16_from_float);
    }
    return old;
}

/* The data register of an atomic holds the new value, then cmpswap's comparand. */
static void run_atomic(emu_wave *w, const emu_instr *in)
{
    const int bytes = (int)(in->row->data & MEM_BYTES);
    const bool buffer = (in->row->data & SPACES) == BUFFER;
    const atomic_op op = (atomic_op)(in->row->data >> ATOMIC_SHIFT);
    const address_parts p = parts_of(w, in, buffer ? 1 : 0, 2);
    const emu_operand data = in->src[buffer ? 0 : 1];
    const emu_operand first = {.kind = VECTOR, .reg = data.reg, .count = (int16_t)(bytes / 4)};
    const emu_operand second = {
        .kind = VECTOR, .reg = (int16_t)(data.reg + bytes / 4), .count = (int16_t)(bytes / 4)};
    const bool returns = in->dst[0].kind == VECTOR || (buffer && in->mod.returns);
    emu_transfer t;
    emu_transfer_begin(&t, bytes);
    EACH (lane, exec_mask(w)) {
        bool inside, def_x, def_compare = true;
        const uint64_t address = lane_address(w, in, &p, lane, bytes, &inside);
        if (w->state == FAULTED) return;
        uint8_t *def = NULL, gone[8] = {0};
        uint8_t *const at =
            inside ? bytes_at(w, in, &p, lane, address, bytes, true, true, &def) : gone;
        if (at == NULL) return;
        const uint64_t x = emu_lane_value(w, &first, lane, &def_x);
        const uint64_t compare =
            op == ATOMIC_CMPSWAP ? emu_lane_value(w, &second, lane, &def_compare) : 0;
        if (!def_x || !def_compare || (def != NULL && !all_defined(def, bytes)))
            emu_undefined(w, in, "lane %d: an operand of an atomic", lane);
        emu_transfer_load(&t, bytes, lane, at, NULL);
        uint64_t old = 0;
        memcpy(&old, at, (size_t)bytes);
        const uint64_t now = emu_atomic(op, bytes, old, x, compare);
        if (op >= ATOMIC_FADD && is_fine(w->group->machine->memory, at)) continue; /* lost */
        memcpy(at, &now, (size_t)bytes);
    }
    if (!returns) return;
    const emu_operand *const to = buffer ? &data : &in->dst[0];
    for (int n = 0; n < bytes / 4; n++)
        emu_vector_write(w, to->reg + n, t.d[n], exec_mask(w), ~UINT64_C(0), ~UINT64_C(0));
}

/* ---- the table ------------------------------------------------------------------------------- */

#define ROW(name, form, run, class, data)                    \
    {                                                        \
        name, form, run, class, NULL, NULL, data, HALF_ALONE \
    }
#define SMEM(name, bytes) ROW(name, "r=rr", run_scalar_load, EMU_SMEM, bytes)

/* One kind of access in every space: the names of gfx9 and of gfx11. */
#define LOAD(suffix, data)                                                                \
    ROW("global_load_" suffix, "r=rr|=rr", run_load_anywhere, EMU_VMEM, (data) | GLOBAL), \
        ROW("flat_load_" suffix, "r=r", run_load, EMU_VMEM, (data) | FLAT),               \
        ROW("scratch_load_" suffix, "r=rr", run_load, EMU_VMEM, (data) | SCRATCH),        \
        ROW("buffer_load_" suffix, "r=rrr|=rrr", run_load_anywhere, EMU_VMEM, (data) | BUFFER)
#define STORE_ROW(suffix, data)                                                              \
    ROW("global_store_" suffix, "=rrr", run_store, EMU_VMEM, (data) | GLOBAL | STORE),       \
        ROW("flat_store_" suffix, "=rr", run_store, EMU_VMEM, (data) | FLAT | STORE),        \
        ROW("scratch_store_" suffix, "=rrr", run_store, EMU_VMEM, (data) | SCRATCH | STORE), \
        ROW("buffer_store_" suffix, "=rrrr", run_store, EMU_VMEM, (data) | BUFFER | STORE)
#define ATOMIC_ROW(suffix, bytes, op)                                  \
    ROW("global_atomic_" suffix, "r=rrr|=rrr", run_atomic, EMU_ATOMIC, \
        (bytes) | GLOBAL | (int64_t)(op) << ATOMIC_SHIFT),             \
        ROW("flat_atomic_" suffix, "r=rr|=rr", run_atomic, EMU_ATOMIC, \
            (bytes) | FLAT | (int64_t)(op) << ATOMIC_SHIFT),           \
        ROW("buffer_atomic_" suffix, "=rrrr", run_atomic, EMU_ATOMIC,  \
            (bytes) | BUFFER | (int64_t)(op) << ATOMIC_SHIFT)
/* gfx9: add, add_x2; gfx11: add_u32, add_u64. */
#define INTEGER_ATOMIC(name, name32, name64, op)                                       \
    ATOMIC_ROW(name, 4, op), ATOMIC_ROW(name "_x2", 8, op), ATOMIC_ROW(name32, 4, op), \
        ATOMIC_ROW(name64, 8, op)

static const emu_row rows[] = {
    SMEM("s_load_dword", 4),
    SMEM("s_load_dwordx2", 8),
    SMEM("s_load_dwordx3", 12),
    SMEM("s_load_dwordx4", 16),
    SMEM("s_load_dwordx8", 32),
    SMEM("s_load_dwordx16", 64),
    SMEM("s_load_b32", 4),
    SMEM("s_load_b64", 8),
    SMEM("s_load_b96", 12),
    SMEM("s_load_b128", 16),
    SMEM("s_load_b256", 32),
    SMEM("s_load_b512", 64),
    SMEM("s_load_u8", 1),
    SMEM("s_load_i8", 1 | MEM_SIGN),
    SMEM("s_load_u16", 2),
    SMEM("s_load_i16", 2 | MEM_SIGN),
    SMEM("s_buffer_load_dword", 4),
    SMEM("s_buffer_load_dwordx2", 8),
    SMEM("s_buffer_load_dwordx4", 16),
    SMEM("s_buffer_load_b32", 4),
    SMEM("s_buffer_load_b64", 8),
    SMEM("s_buffer_load_b128", 16),
    ROW("s_memtime", "q=", run_memtime, EMU_SMEM, 0),
    ROW("s_memrealtime", "q=", run_memtime, EMU_SMEM, 0),

    LOAD("ubyte", 1),
    LOAD("u8", 1),
    LOAD("sbyte", 1 | MEM_SIGN),
    LOAD("i8", 1 | MEM_SIGN),
    LOAD("ushort", 2),
    LOAD("u16", 2),
    LOAD("sshort", 2 | MEM_SIGN),
    LOAD("i16", 2 | MEM_SIGN),
    LOAD("ubyte_d16", 1 | MEM_D16),
    LOAD("ubyte_d16_hi", 1 | MEM_D16 | MEM_HIGH),
    LOAD("sbyte_d16", 1 | MEM_SIGN | MEM_D16),
    LOAD("sbyte_d16_hi", 1 | MEM_SIGN | MEM_D16 | MEM_HIGH),
    LOAD("short_d16", 2 | MEM_D16),
    LOAD("short_d16_hi", 2 | MEM_D16 | MEM_HIGH),
    LOAD("d16_u8", 1 | MEM_D16),
    LOAD("d16_hi_u8", 1 | MEM_D16 | MEM_HIGH),
    LOAD("d16_i8", 1 | MEM_SIGN | MEM_D16),
    LOAD("d16_hi_i8", 1 | MEM_SIGN | MEM_D16 | MEM_HIGH),
    LOAD("d16_b16", 2 | MEM_D16),
    LOAD("d16_hi_b16", 2 | MEM_D16 | MEM_HIGH),
    LOAD("dword", 4),
    LOAD("b32", 4),
    LOAD("dwordx2", 8),
    LOAD("b64", 8),
    LOAD("dwordx3", 12),
    LOAD("b96", 12),
    LOAD("dwordx4", 16),
    LOAD("b128", 16),
    ROW("global_load_lds_ubyte", "=rr", run_load_to_lds, EMU_VMEM, 1 | GLOBAL | TO_LDS),
    ROW("global_load_lds_ushort", "=rr", run_load_to_lds, EMU_VMEM, 2 | GLOBAL | TO_LDS),
    ROW("global_load_lds_dword", "=rr", run_load_to_lds, EMU_VMEM, 4 | GLOBAL | TO_LDS),
    ROW("global_load_lds_dwordx3", "=rr", run_load_to_lds, EMU_VMEM, 12 | GLOBAL | TO_LDS),
    ROW("global_load_lds_dwordx4", "=rr", run_load_to_lds, EMU_VMEM, 16 | GLOBAL | TO_LDS),

    STORE_ROW("byte", 1),
    STORE_ROW("b8", 1),
    STORE_ROW("byte_d16_hi", 1 | MEM_HIGH),
    STORE_ROW("d16_hi_b8", 1 | MEM_HIGH),
    STORE_ROW("short", 2),
    STORE_ROW("b16", 2),
    STORE_ROW("short_d16_hi", 2 | MEM_HIGH),
    STORE_ROW("d16_hi_b16", 2 | MEM_HIGH),
    STORE_ROW("dword", 4),
    STORE_ROW("b32", 4),
    STORE_ROW("dwordx2", 8),
    STORE_ROW("b64", 8),
    STORE_ROW("dwordx3", 12),
    STORE_ROW("b96", 12),
    STORE_ROW("dwordx4", 16),
    STORE_ROW("b128", 16),

    INTEGER_ATOMIC("add", "add_u32", "add_u64", ATOMIC_ADD),
    INTEGER_ATOMIC("sub", "sub_u32", "sub_u64", ATOMIC_SUB),
    INTEGER_ATOMIC("smin", "min_i32", "min_i64", ATOMIC_SMIN),
    INTEGER_ATOMIC("umin", "min_u32", "min_u64", ATOMIC_UMIN),
    INTEGER_ATOMIC("smax", "max_i32", "max_i64", ATOMIC_SMAX),
    INTEGER_ATOMIC("umax", "max_u32", "max_u64", ATOMIC_UMAX),
    INTEGER_ATOMIC("and", "and_b32", "and_b64", ATOMIC_AND),
    INTEGER_ATOMIC("or", "or_b32", "or_b64", ATOMIC_OR),
    INTEGER_ATOMIC("xor", "xor_b32", "xor_b64", ATOMIC_XOR),
    INTEGER_ATOMIC("inc", "inc_u32", "inc_u64", ATOMIC_INC),
    INTEGER_ATOMIC("dec", "dec_u32", "dec_u64", ATOMIC_DEC),
    INTEGER_ATOMIC("swap", "swap_b32", "swap_b64", ATOMIC_SWAP),
    INTEGER_ATOMIC("cmpswap", "cmpswap_b32", "cmpswap_b64", ATOMIC_CMPSWAP),
    ATOMIC_ROW("add_f32", 4, ATOMIC_FADD),
    ATOMIC_ROW("add_f64", 8, ATOMIC_FADD),
    ATOMIC_ROW("min_f32", 4, ATOMIC_FMIN),
    ATOMIC_ROW("max_f32", 4, ATOMIC_FMAX),
    ATOMIC_ROW("min_num_f32", 4, ATOMIC_FMIN),
    ATOMIC_ROW("max_num_f32", 4, ATOMIC_FMAX),
    ATOMIC_ROW("min_f64", 8, ATOMIC_FMIN),
    ATOMIC_ROW("max_f64", 8, ATOMIC_FMAX),
    ATOMIC_ROW("pk_add_f16", 4, ATOMIC_PK_F16),
    ATOMIC_ROW("pk_add_bf16", 4, ATOMIC_PK_BF16),
};

const emu_table emu_memory_table = {rows, sizeof rows / sizeof *rows};
