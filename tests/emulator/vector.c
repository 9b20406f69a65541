/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Execution of a vector instruction: its sources become arrays of lanes, with DPP, SDWA and sign
 * modifiers applied; the operation of its row computes all lanes; the results go back to the lanes
 * of EXEC. A rule of the row determines which results are defined. vector_ops.c has the operations.
 */
#include <stdio.h>
#include <string.h>

#include "tests/emulator/number.h"
#include "tests/emulator/vector.h"

/* ---- sources --------------------------------------------------------------------------------- */

static bool is_half(char type) { return type == 'h' || type == 'w'; }
static bool is_packed(char type) { return type == 'p' || type == 'i'; }
static bool is_wide(char type) { return type == 'd' || type == 'q' || type == 'k'; }

static void fill(uint32_t *room, uint32_t value, int n)
{
    for (int l = 0; l < n; l++) room[l] = value;
}

/* The operand's registers before any modifier. */
static emu_view raw_view(const emu_wave *w, const emu_operand *o, uint32_t *room)
{
    emu_view view = {room, {~UINT64_C(0), ~UINT64_C(0)}};
    if (o->type == 'm') {
        const uint64_t mask = emu_mask_read(w, o, &view.def[0]);
        for (int l = 0; l < w->lanes; l++) room[l] = mask >> l & 1;
        view.def[1] = view.def[0];
    } else if (o->kind == VECTOR) {
        view.v = w->v[o->reg];
        for (int n = 0; n < 2; n++)
            view.def[n] = is_wide(o->type) ? w->v_def[o->reg + n][0] & w->v_def[o->reg + n][1]
                                           : w->v_def[o->reg][n];
    } else {
        uint64_t def;
        emu_operand bare = *o; /* its sign is changed as a vector's is */
        bare.neg = bare.abs = false;
        const uint64_t value = emu_scalar_read(w, &bare, &def);
        const int bits = is_wide(o->type) ? 32 : 16;
        const uint64_t part = (UINT64_C(1) << bits) - 1;
        fill(room, (uint32_t)value, w->lanes);
        if (is_wide(o->type)) fill(room + LANES, (uint32_t)(value >> 32), w->lanes);
        for (int n = 0; n < 2; n++)
            view.def[n] = (def >> bits * n & part) == part ? ~UINT64_C(0) : 0;
    }
    return view;
}

static uint64_t gather_bits(uint64_t bits, const int8_t *from, int n)
{
    uint64_t out = 0;
    for (int l = 0; l < n; l++)
        if (from[l] < 0 || from[l] >= n || lane_in(bits, from[l])) out |= UINT64_C(1) << l;
    return out;
}

/* Lanes that DPP allows to write: those with a valid source, or all if bound_ctrl supplies
 * zeros. */
static uint64_t dpp_writes(const emu_wave *w, const emu_modifiers *m)
{
    const uint64_t exec = exec_mask(w);
    uint64_t mask = 0;
    for (int l = 0; l < w->lanes; l++) {
        const int from = m->dpp[l];
        const bool there =
            from >= 0 && from < w->lanes && (m->fetch_inactive || lane_in(exec, from));
        const bool named = (m->row_mask >> (l / 16) & 1) && (m->bank_mask >> (l % 16 / 4) & 1);
        if (named && (there || m->bound_ctrl)) mask |= UINT64_C(1) << l;
    }
    return mask;
}

static emu_view dpp_view(const emu_wave *w, const emu_modifiers *m, emu_view in, uint32_t *room)
{
    const uint64_t exec = exec_mask(w);
    uint32_t out[LANES];
    for (int l = 0; l < w->lanes; l++) {
        const int from = m->dpp[l];
        const bool there =
            from >= 0 && from < w->lanes && (m->fetch_inactive || lane_in(exec, from));
        out[l] = there ? in.v[from] : 0;
    }
    emu_view view = {room, {0, 0}};
    memcpy(room, out, (size_t)w->lanes * sizeof *out);
    for (int half = 0; half < 2; half++)
        view.def[half] = gather_bits(in.def[half], m->dpp, w->lanes);
    return view;
}

/* A part of 16 or 8 bits, moved to the low end and extended. */
static emu_view part_view(const emu_view in, operand_part part, bool sign, int n, uint32_t *room)
{
    const bool word = part == WORD_0 || part == WORD_1;
    const int bits = word ? 16 : 8, shift = part == WORD_1 ? 16 : word ? 0 : 8 * (part - BYTE_0);
    for (int l = 0; l < n; l++) {
        const uint32_t x = in.v[l] << (32 - bits - shift);
        room[l] = sign ? (uint32_t)((int32_t)x >> (32 - bits)) : x >> (32 - bits);
    }
    const uint64_t def = in.def[shift >= 16];
    return (emu_view){room, {def, sign ? def : ~UINT64_C(0)}};
}

/* Chooses the halves of a packed source, and their signs. */
static emu_view packed_view(const emu_view in, const emu_instr *instr, int source, int n,
                            uint32_t *room)
{
    const emu_modifiers *const m = &instr->mod;
    const int low = m->op_sel >> source & 1 ? 16 : 0, high = m->op_sel_hi >> source & 1 ? 16 : 0;
    const bool neg = instr->src[source].neg;
    const uint32_t flip = ((m->neg_lo >> source & 1) != neg ? 0x8000u : 0) |
                          ((m->neg_hi >> source & 1) != neg ? 0x80000000 : 0);
    for (int l = 0; l < n; l++) {
        const uint32_t x = in.v[l];
        room[l] = ((x >> low & 0xffff) | x >> high << 16) ^ flip;
    }
    return (emu_view){room, {in.def[low != 0], in.def[high != 0]}};
}

/* The same of two f32 in two registers, or of a constant that is both. */
static emu_view packed_wide_view(const emu_wave *w, const emu_view in, const emu_instr *instr,
                                 int source, uint32_t *room)
{
    const emu_modifiers *const m = &instr->mod;
    uint32_t out[2 * LANES];
    emu_view view = {room, {in.def[0], in.def[1]}};
    for (int half = 0; half < 2; half++) {
        const int from = (half == 0 ? m->op_sel : m->op_sel_hi) >> source & 1;
        const uint32_t flip = (half == 0 ? m->neg_lo : m->neg_hi) >> source & 1 ? 0x80000000 : 0;
        for (int l = 0; l < w->lanes; l++) out[half * LANES + l] = in.v[from * LANES + l] ^ flip;
        view.def[half] = in.def[from];
    }
    memcpy(room, out, sizeof out);
    return view;
}

/* Mixed precision: op_sel_hi says that the source is f16, op_sel which half. The result is f32. */
static emu_view mixed_view(const emu_view in, const emu_modifiers *m, int source, int n,
                           uint32_t *room)
{
    const bool half = m->op_sel_hi >> source & 1;
    const int shift = m->op_sel >> source & 1 ? 16 : 0;
    if (!half) return in;
    for (int l = 0; l < n; l++) room[l] = bits_of(half_to_float(in.v[l] >> shift & 0xffff));
    const uint64_t def = in.def[shift != 0];
    return (emu_view){room, {def, def}};
}

static emu_view sign_view(emu_view in, const emu_operand *o, int n, uint32_t *room)
{
    const uint32_t bit = is_half(o->type) ? 0x8000 : 0x80000000;
    const int high = o->type == 'd' || o->type == 'q' ? LANES : 0;
    const uint32_t keep = o->abs ? ~bit : UINT32_MAX, flip = o->neg ? bit : 0;
    if (high != 0 && in.v != room) memcpy(room, in.v, (size_t)n * sizeof *room);
    for (int l = 0; l < n; l++) room[high + l] = (in.v[high + l] & keep) ^ flip;
    in.v = room;
    return in;
}

emu_view emu_vector_read(const emu_wave *w, const emu_instr *instr, int source, uint32_t *room)
{
    const emu_operand *const o = &instr->src[source];
    const emu_modifiers *const m = &instr->mod;
    if (o->registers) { /* most are: without the detour through raw_view's cases */
        const uint64_t *const def = w->v_def[o->reg];
        return (emu_view){w->v[o->reg], {def[0], def[1]}};
    }
    emu_view view = raw_view(w, o, room);
    if (o->plain) return view;
    if (m->dpp != NULL && source == 0) view = dpp_view(w, m, view, room);
    if (o->part != WHOLE) view = part_view(view, (operand_part)o->part, o->sext, w->lanes, room);
    if (is_packed(o->type)) return packed_view(view, instr, source, w->lanes, room);
    if (o->type == 'k') return packed_wide_view(w, view, instr, source, room);
    if (is_half(o->type) && (m->op_sel >> source & 1) && o->part == WHOLE && o->kind == VECTOR)
        view = part_view(view, WORD_1, false, w->lanes, room);
    if (o->type == 'x') view = mixed_view(view, m, source, w->lanes, room);
    if (o->neg || o->abs) view = sign_view(view, o, w->lanes, room);
    return view;
}

/* ---- what is defined ------------------------------------------------------------------------- */

static uint64_t whole(const emu_view *v, char type)
{
    return is_half(type) ? v->def[0] : v->def[0] & v->def[1];
}

/* Whether the number that operand o is has these bits in the half. */
static bool is_number(const emu_operand *o, int half, uint32_t value)
{
    return o->kind == NUMBER && (o->bits >> 16 * half & 0xffff) == value;
}

/* A half of a & b is known if either is a known zero. */
static uint64_t and_def(const emu_instr *in, const emu_view *v, int half)
{
    const bool zero = is_number(&in->src[0], half, 0) || is_number(&in->src[1], half, 0);
    return zero ? ~UINT64_C(0) : v[0].def[half] & v[1].def[half];
}

/* A half of x shifted left by a number. */
static uint64_t shift_def(const emu_view *x, const emu_view *amount, const emu_operand *number,
                          int half)
{
    const uint64_t all = x->def[0] & x->def[1] & amount->def[0] & amount->def[1];
    if (number->kind != NUMBER) return all;
    const int by = (int)(number->bits & 31);
    if (half == 0) return by >= 16 ? ~UINT64_C(0) : x->def[0];
    return by >= 16 ? x->def[0] : by == 0 ? x->def[1] : all;
}

/* A half of x shifted right by a number, and of the bits that come in. */
static uint64_t shift_right_def(const emu_view *x, const emu_view *amount,
                                const emu_operand *number, int half, bool arithmetic)
{
    const uint64_t all = x->def[0] & x->def[1] & amount->def[0] & amount->def[1];
    if (number->kind != NUMBER) return all;
    const int by = (int)(number->bits & 31);
    if (half == 1) return by >= 16 && !arithmetic ? ~UINT64_C(0) : x->def[1];
    return by >= 16 ? x->def[1] : by == 0 ? x->def[0] : all;
}

/* Bytes chosen by a permutation, if the selector is the same for all lanes; otherwise any byte. */
static uint64_t perm_def(const emu_wave *w, const emu_instr *in, const emu_view *v, int half)
{
    const uint64_t all =
        v[0].def[0] & v[0].def[1] & v[1].def[0] & v[1].def[1] & v[2].def[0] & v[2].def[1];
    if (in->src[2].kind == VECTOR) return all;
    uint64_t def = ~UINT64_C(0), known;
    const uint64_t selector = emu_scalar_read(w, &in->src[2], &known);
    for (int byte = 2 * half; byte < 2 * half + 2; byte++) {
        const uint32_t from = selector >> 8 * byte & 0xff;
        if (from < 8)
            def &= v[from < 4 ? 1 : 0].def[from % 4 / 2];
        else if (from < 12)
            def &= v[from < 10 ? 1 : 0].def[from & 1];
    }
    return (uint32_t)known == UINT32_MAX ? def : 0;
}

static uint64_t select_def(const emu_view *v, int half)
{
    uint64_t mask = 0;
    for (int l = 0; l < LANES; l++) mask |= (uint64_t)(v[2].v[l] & 1) << l;
    return v[2].def[0] & ((mask & v[1].def[half]) | (~mask & v[0].def[half]));
}

/* Of a field of bits [offset, offset + width) given by numbers. */
static uint64_t field_def(const emu_instr *in, const emu_view *v)
{
    if (in->src[1].kind != NUMBER || in->src[2].kind != NUMBER)
        return v[0].def[0] & v[0].def[1] & v[1].def[0] & v[1].def[1] & v[2].def[0] & v[2].def[1];
    const int offset = (int)(in->src[1].bits & 31), width = (int)(in->src[2].bits & 31);
    return (offset < 16 ? v[0].def[0] : ~UINT64_C(0)) &
           (offset + width > 16 ? v[0].def[1] : ~UINT64_C(0));
}

static uint64_t insert_def(const emu_instr *in, const emu_view *v, int half)
{
    if (is_number(&in->src[0], half, 0xffff)) return v[1].def[half];
    if (is_number(&in->src[0], half, 0)) return v[2].def[half];
    return v[0].def[half] & v[1].def[half] & v[2].def[half];
}

static uint64_t half_def(const emu_wave *w, const emu_instr *in, const emu_view *v, int half)
{
    switch ((def_rule)in->row->data) {
    case DEF_HALVES: {
        uint64_t def = ~UINT64_C(0);
        for (int s = 0; s < in->sources; s++) def &= v[s].def[half];
        return def;
    }
    case DEF_AND: return and_def(in, v, half);
    case DEF_AND_OR: return and_def(in, v, half) & v[2].def[half];
    case DEF_SHIFT_LEFT: return shift_def(&v[1], &v[0], &in->src[0], half);
    case DEF_SHIFT_OR: return shift_def(&v[0], &v[1], &in->src[1], half) & v[2].def[half];
    case DEF_SHIFT_RIGHT: return shift_right_def(&v[1], &v[0], &in->src[0], half, false);
    case DEF_SHIFT_ARITHMETIC: return shift_right_def(&v[1], &v[0], &in->src[0], half, true);
    case DEF_PACK: return v[half].def[0];
    case DEF_SELECT: return select_def(v, half);
    case DEF_PERM: return perm_def(w, in, v, half);
    case DEF_FIELD: return field_def(in, v);
    case DEF_INSERT: return insert_def(in, v, half);
    case DEF_ALIGN_16:
        if (!is_number(&in->src[2], 0, 16)) break;
        return half == 0 ? v[1].def[1] : v[0].def[0];
    case DEF_SUM: {
        uint64_t def = whole(&v[1], in->src[1].type);
        for (int s = 0; s <= 2; s += 2)
            def &=
                is_wide(in->src[s].type) && half == 0 ? v[s].def[0] : whole(&v[s], in->src[s].type);
        return def;
    }
    case DEF_ALL: break;
    }
    uint64_t def = ~UINT64_C(0);
    for (int s = 0; s < in->sources; s++) def &= whole(&v[s], in->src[s].type);
    return def;
}

/* ---- results --------------------------------------------------------------------------------- */

typedef struct results {
    uint32_t d[2 * LANES], e[2 * LANES];
    uint64_t def[2], mask;
} results;

void emu_vector_write(emu_wave *w, int reg, const uint32_t *d, uint64_t mask, uint64_t def_lo,
                      uint64_t def_hi)
{
    uint32_t *const to = w->v[reg];
    if (mask == all_lanes(w)) {
        memcpy(to, d, (size_t)w->lanes * sizeof *to);
    } else if (mask == exec_mask(w)) {
        const uint32_t *const lane = emu_exec_lanes(w);
        for (int l = 0; l < w->lanes; l++) to[l] = (d[l] & lane[l]) | (to[l] & ~lane[l]);
    } else {
        for (int l = 0; l < w->lanes; l++)
            if (lane_in(mask, l)) to[l] = d[l];
    }
    w->v_def[reg][0] = (w->v_def[reg][0] & ~mask) | (def_lo & mask);
    w->v_def[reg][1] = (w->v_def[reg][1] & ~mask) | (def_hi & mask);
}

static float clamped(float x) { return x > 1 ? 1 : x > 0 ? x : 0; }

static void clamp_floats(char type, uint32_t *d, int n)
{
    for (int l = 0; l < n; l++) {
        if (type == 'f') {
            d[l] = bits_of(clamped(float_of(d[l])));
        } else if (type == 'h') {
            d[l] = half_from_float(clamped(half_to_float(d[l] & 0xffff)));
        } else { /* two halves */
            d[l] = half_from_float(clamped(half_to_float(d[l] & 0xffff))) |
                   half_from_float(clamped(half_to_float(d[l] >> 16))) << 16;
        }
    }
}

/* Writes the low bits of d to a part of the register, and keeps, clears or extends the rest. */
static void write_part(emu_wave *w, const emu_instr *in, const results *r, operand_part part,
                       bool keep, bool sign)
{
    const int reg = in->dst[0].reg;
    const bool word = part == WORD_0 || part == WORD_1;
    const int bits = word ? 16 : 8, shift = part == WORD_1 ? 16 : word ? 0 : 8 * (part - BYTE_0);
    const uint32_t field = (word ? 0xffffu : 0xffu) << shift;
    uint32_t d[LANES];
    for (int l = 0; l < w->lanes; l++) {
        const uint32_t x = r->d[l] << shift & field;
        const uint32_t top = (uint32_t)((int32_t)(r->d[l] << (32 - bits)) >> (32 - bits)) << shift;
        d[l] = keep ? x | (w->v[reg][l] & ~field) : sign ? top : x;
    }
    uint64_t def[2];
    for (int half = 0; half < 2; half++) {
        const uint64_t rest = keep ? w->v_def[reg][half] : ~UINT64_C(0);
        def[half] = half != shift / 16 ? rest : word ? r->def[0] : r->def[0] & rest;
    }
    emu_vector_write(w, reg, d, r->mask, def[0], def[1]);
}

static uint64_t mask_of(const uint32_t *lane, int n)
{
    uint8_t byte[LANES];
    for (int l = 0; l < n; l++) byte[l] = (uint8_t)lane[l];
    uint64_t mask = 0;
    for (int l = 0; l < n; l += 8) { /* a multiplication moves bit 0 of 8 bytes side by side */
        uint64_t eight;
        memcpy(&eight, byte + l, 8);
        mask |= (eight * UINT64_C(0x0102040810204080) >> 56) << l;
    }
    return mask;
}

static void write_mask(emu_wave *w, const emu_instr *in, const emu_operand *o, const uint32_t *lane,
                       uint64_t mask, uint64_t def)
{
    emu_scalar_write(w, in, o, mask_of(lane, w->lanes) & mask, def | ~mask);
}

static void write_first(emu_wave *w, const emu_instr *in, results *r)
{
    const emu_operand *const o = &in->dst[0];
    if (in->mod.clamp) clamp_floats(o->type, r->d, w->lanes);
    if (in->mod.sdwa && in->mod.dst_sel != WHOLE) {
        write_part(w, in, r, in->mod.dst_sel, in->mod.dst_preserve, in->mod.dst_sext);
    } else if (is_half(o->type)) {
        const bool high =
            o->part == WORD_1 || (in->mod.op_sel & 8) != 0 || in->row->half == HALF_HIGH;
        const bool keep = in->arch_major > 9 || in->row->half == HALF_KEEPS || high;
        write_part(w, in, r, high ? WORD_1 : WORD_0, keep, false);
    } else if (o->kind == VECTOR) {
        const bool wide = is_wide(o->type); /* def is of each register, not of each half */
        emu_vector_write(w, o->reg, r->d, r->mask, r->def[0], r->def[wide ? 0 : 1]);
        if (wide) emu_vector_write(w, o->reg + 1, r->d + LANES, r->mask, r->def[1], r->def[1]);
    }
}

/* ---- running --------------------------------------------------------------------------------- */

static void compute(emu_wave *w, const emu_instr *in, results *r)
{
    uint32_t room[MAX_SRC][2 * LANES];
    emu_view view[MAX_SRC];
    for (int s = 0; s < MAX_SRC; s++)
        view[s] =
            s < in->sources ? emu_vector_read(w, in, s, room[s]) : (emu_view){room[s], {0, 0}};
    if (in->sources == MAX_SRC) memcpy(r->e, view[3].v, (size_t)w->lanes * sizeof *r->e);
    in->row->lanes(r->d, r->e, view[0].v, view[1].v, view[2].v, w->lanes);
    r->def[0] = half_def(w, in, view, 0);
    r->def[1] = half_def(w, in, view, 1);
    r->mask = exec_mask(w);
    if (in->mod.dpp != NULL) r->mask &= dpp_writes(w, &in->mod);
}

static void commit(emu_wave *w, const emu_instr *in, results *r)
{
    if (in->dst[0].type == 'm')
        write_mask(w, in, &in->dst[0], r->e, r->mask, r->def[0]);
    else
        write_first(w, in, r);
    if (in->dst[1].type == 'm') write_mask(w, in, &in->dst[1], r->e, r->mask, r->def[0]);
}

void emu_vector_run(emu_wave *w, const emu_instr *in)
{
    results first;
    compute(w, in, &first);
    if (in->second == NULL) {
        commit(w, in, &first);
        return;
    }
    results second; /* of a dual issue, which reads everything before it writes anything */
    compute(w, in->second, &second);
    commit(w, in, &first);
    commit(w, in->second, &second);
}

/* Comparisons that write EXEC, beside their result where they have one. */
void emu_vector_compare_exec(emu_wave *w, const emu_instr *in)
{
    static const emu_operand exec = {.kind = SCALAR, .reg = S_EXEC, .count = 2};
    results r;
    compute(w, in, &r);
    if (in->dst[0].type == 'm') write_mask(w, in, &in->dst[0], r.e, r.mask, r.def[0]);
    write_mask(w, in, &exec, r.e, r.mask, r.def[0]);
}

/* ---- decoding -------------------------------------------------------------------------------- */

static bool is_plain(const emu_instr *in, int source)
{
    const emu_operand *const o = &in->src[source];
    const emu_modifiers *const m = &in->mod;
    if ((source == 0 && m->dpp != NULL) || o->part != WHOLE || o->neg || o->abs || o->sext)
        return false;
    if (is_half(o->type)) return (m->op_sel >> source & 1) == 0;
    if (is_packed(o->type) || o->type == 'k')
        return (m->op_sel >> source & 1) == 0 && (m->op_sel_hi >> source & 1) == 1 &&
               ((m->neg_lo | m->neg_hi) >> source & 1) == 0;
    return o->type != 'x' || (m->op_sel_hi >> source & 1) == 0;
}

bool emu_vector_prepare(emu_instr *in, char *why, size_t why_size)
{
    for (in->sources = 0; in->sources < MAX_SRC && in->src[in->sources].type != '\0';)
        in->sources++;
    if (in->row->lanes == NULL) return true;
    bool mixed = false;
    for (int s = 0; s < in->sources; s++) mixed |= in->src[s].type == 'x';
    if (mixed && !in->mod.has_op_sel_hi) in->mod.op_sel_hi = 0;
    for (int s = 0; s < in->sources; s++) {
        /* A constant's second half of 16 bits is its first; two f32 constants are one. */
        in->src[s].plain = is_plain(in, s);
        in->src[s].registers = in->src[s].plain && in->src[s].kind == VECTOR &&
                               in->src[s].type != 'm' && !is_wide(in->src[s].type);
    }
    if (in->mod.clamp && strchr("fhp", in->dst[0].type) == NULL) {
        snprintf(why, why_size, "%s: clamp is known for floating-point results only",
                 in->row->name);
        return false;
    }
    return true;
}
