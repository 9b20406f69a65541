/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scalar arithmetic. Lane masks are computed here, and unwritten lanes may leave undefined bits in
 * them. So bitwise operations track definedness bit by bit; others require whole operands.
 */
#include <math.h>
#include <string.h>

#include "tests/emulator/machine.h"
#include "tests/emulator/number.h"

/* emu_row.data: which bits of the result are defined, and whether SCC is a source. */
enum {
    ALL,
    BITS,
    AND,
    OR,
    ANDN,
    ORN,
    EXEC_ANDN,
    SHIFT_LEFT,
    SHIFT_RIGHT,
    FIELD,
    RULES = 15,
    READS_SCC
};

/* Returned as SCC by operations that do not set it. */
enum { SCC_KEPT = 2 };

#define FULL ~UINT64_C(0)

/* ---- operands -------------------------------------------------------------------------------- */

uint64_t emu_scalar_read(const emu_wave *w, const emu_operand *o, uint64_t *def)
{
    *def = FULL;
    if (o->kind == NUMBER) return o->bits;
    if (o->kind == VECTOR) return 0; /* scalar instructions never have one */
    if (o->reg == S_NULL) return 0;
    if (o->reg == S_VCCZ) return pair(w->s + S_VCC) == 0;
    if (o->reg == S_EXECZ) return exec_mask(w) == 0;
    const bool wide = o->count > 1;
    *def = wide ? pair(w->s_def + o->reg) : w->s_def[o->reg] | FULL << 32;
    const uint64_t value = wide ? pair(w->s + o->reg) : w->s[o->reg];
    if (!o->neg && !o->abs) return value;
    const uint32_t x = o->abs ? (uint32_t)value & 0x7fffffff : (uint32_t)value;
    return o->neg ? x ^ 0x80000000 : x;
}

uint64_t emu_mask_read(const emu_wave *w, const emu_operand *o, uint64_t *def)
{
    const uint64_t all = all_lanes(w), value = emu_scalar_read(w, o, def);
    *def |= ~all;
    return value & all;
}

void emu_scalar_write(emu_wave *w, const emu_instr *in, const emu_operand *o, uint64_t value,
                      uint64_t def)
{
    if (o->reg == S_NULL) return;
    const bool wide = o->count > 1 && !(o->type == 'm' && w->lanes == 32);
    w->s[o->reg] = (uint32_t)value;
    w->s_def[o->reg] = (uint32_t)def;
    if (wide) {
        w->s[o->reg + 1] = (uint32_t)(value >> 32);
        w->s_def[o->reg + 1] = (uint32_t)(def >> 32);
    }
    if (o->reg != S_EXEC && o->reg != S_EXEC + 1) return;
    if (w->lanes == 32) w->s[S_EXEC + 1] = 0;
    const uint64_t known = pair(w->s_def + S_EXEC);
    if ((known & all_lanes(w)) != all_lanes(w)) emu_undefined(w, in, "EXEC");
    w->s_def[S_EXEC] = w->s_def[S_EXEC + 1] = UINT32_MAX;
}

/* ---- running --------------------------------------------------------------------------------- */

static uint64_t width_of(const emu_operand *o)
{
    return o->type == 'q' || o->type == 'd' ? FULL : UINT32_MAX;
}

/* Known bits of an AND: both sources are known, or either is a known 0. */
static uint64_t and_bits(uint64_t a, uint64_t a_def, uint64_t b, uint64_t b_def)
{
    return (a_def & b_def) | (a_def & ~a) | (b_def & ~b);
}

/* Whether x is known in all bits of the field that y describes. Other bits may be undefined: a
 * 32-bit field sign-extends a word, whatever the adjacent word holds. */
static bool field_known(uint64_t x_def, uint64_t y, uint64_t y_def, uint64_t width)
{
    const uint64_t count = y >> 16 & 0x7f, low = count < 64 ? (UINT64_C(1) << count) - 1 : FULL;
    const uint64_t bits = low << (y & (width == FULL ? 63 : 31)) & width;
    return (uint32_t)y_def == UINT32_MAX && (x_def & bits) == bits;
}

static uint64_t result_def(const emu_instr *in, const uint64_t *x, const uint64_t *def)
{
    const uint64_t width = width_of(&in->src[0]);
    switch (in->row->data & RULES) {
    case BITS: return def[0] & def[1];
    case AND: return and_bits(x[0], def[0], x[1], def[1]);
    case OR: return and_bits(~x[0], def[0], ~x[1], def[1]);
    case ANDN: return and_bits(x[0], def[0], ~x[1], def[1]);
    case EXEC_ANDN: return and_bits(~x[0], def[0], x[1], def[1]);
    case ORN: return and_bits(~x[0], def[0], x[1], def[1]);
    case SHIFT_LEFT: return (uint32_t)def[1] == UINT32_MAX ? ~(~def[0] << (x[1] & 63)) : 0;
    case SHIFT_RIGHT:
        return (uint32_t)def[1] == UINT32_MAX ? ~((~def[0] & width) >> (x[1] & 63)) : 0;
    case FIELD: return field_known(def[0], x[1], def[1], width) ? FULL : 0;
    default: break;
    }
    for (int s = 0; s < in->sources; s++)
        if ((def[s] & width_of(&in->src[s])) != width_of(&in->src[s])) return 0;
    return FULL;
}

/* Whether "not zero" is known of a result: a known 1, or all bits known. */
static bool nonzero_known(uint64_t x, uint64_t def, uint64_t width)
{
    return (def & width) == width || (x & def & width) != 0;
}

static void run_scalar(emu_wave *w, const emu_instr *in)
{
    uint64_t x[3] = {0, 0, 0}, def[3] = {FULL, FULL, FULL};
    for (int s = 0; s < in->sources && s < 3; s++) x[s] = emu_scalar_read(w, &in->src[s], &def[s]);
    const bool logical = (in->row->data & RULES) != ALL;
    uint32_t scc = w->s[S_SCC];
    const uint64_t result = in->row->scalar(x[0], x[1], &scc);
    uint64_t known = result_def(in, x, def);
    if ((in->row->data & READS_SCC) != 0 && w->s_def[S_SCC] == 0) known = 0;
    const bool has_result = in->dst[0].kind != NO_OPERAND;
    if (has_result) emu_scalar_write(w, in, &in->dst[0], result, known);
    if (scc == SCC_KEPT) return;
    const uint64_t width = has_result ? width_of(&in->dst[0]) : FULL;
    w->s[S_SCC] = scc;
    w->s_def[S_SCC] =
        (logical ? nonzero_known(result, known, width) : known == FULL) ? UINT32_MAX : 0;
}

/* D = S0 op EXEC written to EXEC, the old EXEC to the destination. */
static void run_saveexec(emu_wave *w, const emu_instr *in)
{
    static const emu_operand exec = {.kind = SCALAR, .reg = S_EXEC, .count = 2, .type = 'm'};
    uint64_t def;
    const uint64_t x = emu_mask_read(w, &in->src[0], &def), old = exec_mask(w);
    uint32_t scc = 0;
    const uint64_t result = in->row->scalar(x, old, &scc) & all_lanes(w);
    const uint64_t xs[2] = {x, old}, defs[2] = {def, FULL};
    emu_scalar_write(w, in, &in->dst[0], old, FULL);
    emu_scalar_write(w, in, &exec, result, result_def(in, xs, defs));
    w->s[S_SCC] = result != 0;
    w->s_def[S_SCC] = UINT32_MAX;
}

static void run_cselect(emu_wave *w, const emu_instr *in)
{
    uint64_t def;
    const uint64_t x = emu_scalar_read(w, &in->src[w->s[S_SCC] ? 0 : 1], &def);
    emu_scalar_write(w, in, &in->dst[0], x, w->s_def[S_SCC] != 0 ? def : 0);
}

/* s_cmov, s_cmovk: only if SCC. */
static void run_cmov(emu_wave *w, const emu_instr *in)
{
    uint64_t def;
    const uint64_t x = emu_scalar_read(w, &in->src[0], &def);
    if (w->s_def[S_SCC] == 0) emu_undefined(w, in, "SCC");
    if (w->s[S_SCC]) emu_scalar_write(w, in, &in->dst[0], x, def);
}

static void run_getpc(emu_wave *w, const emu_instr *in)
{
    const uint64_t next = w->group->machine->base + in[1].address;
    emu_scalar_write(w, in, &in->dst[0], next, FULL);
}

/* Needs its third source, for one rounding. */
static void run_fma(emu_wave *w, const emu_instr *in)
{
    uint64_t x[3], def[3];
    for (int s = 0; s < 3; s++) x[s] = emu_scalar_read(w, &in->src[s], &def[s]);
    const float r =
        fmaf(float_of((uint32_t)x[0]), float_of((uint32_t)x[1]), float_of((uint32_t)x[2]));
    const bool known = (uint32_t)(def[0] & def[1] & def[2]) == UINT32_MAX;
    emu_scalar_write(w, in, &in->dst[0], bits_of(r), known ? FULL : 0);
}

/* ---- operations ------------------------------------------------------------------------------ */

#define SCALAR_OP(name, type, truth, ...)                                   \
    static uint64_t name(uint64_t given_x, uint64_t given_y, uint32_t *scc) \
    {                                                                       \
        const type x = (type)given_x, y = (type)given_y;                    \
        (void)x, (void)y;                                                   \
        const uint64_t r = (uint64_t)(__VA_ARGS__);                         \
        *scc = (uint32_t)(truth);                                           \
        return r;                                                           \
    }

#define KEEP SCC_KEPT
#define NONZERO32 ((uint32_t)r != 0)
#define NONZERO64 (r != 0)

static uint64_t count_ones(uint64_t x)
{
    uint64_t n = 0;
    for (; x != 0; x &= x - 1) n++;
    return n;
}

static uint64_t lowest(uint64_t x)
{
    uint64_t n = 0;
    if (x == 0) return FULL;
    for (; !(x & 1); x >>= 1) n++;
    return n;
}

static uint64_t highest_from(uint64_t x, int bits)
{
    uint64_t n = 0;
    if (x == 0) return FULL;
    for (; !(x >> (bits - 1) & 1); x <<= 1) n++;
    return n;
}

static uint64_t reverse(uint64_t x, int bits)
{
    uint64_t r = 0;
    for (int n = 0; n < bits; n++) r |= (x >> n & 1) << (bits - 1 - n);
    return r;
}

static uint64_t field(uint64_t x, uint64_t spec, int bits, bool sign)
{
    const int offset = (int)(spec & (uint64_t)(bits - 1)), width = (int)(spec >> 16 & 0x7f);
    if (width == 0) return 0;
    const uint64_t value = x >> offset & (width >= 64 ? FULL : (UINT64_C(1) << width) - 1);
    const bool negative = sign && width < 64 && (value >> (width - 1) & 1);
    return negative ? value | FULL << width : value;
}

static bool signed_overflow(int64_t r) { return r != (int32_t)r; }
static uint32_t magnitude(int32_t x) { return x < 0 ? 0u - (uint32_t)x : (uint32_t)x; }

static inline float f(uint32_t x) { return float_of(x); }
static inline float half(uint32_t x) { return half_to_float(x & 0xffff); }
static inline float fmin_of(float x, float y) { return x != x ? y : y != y ? x : x < y ? x : y; }
static inline float fmax_of(float x, float y) { return x != x ? y : y != y ? x : x > y ? x : y; }

static uint32_t float_to_int(float x, bool sign)
{
    if (x != x) return 0;
    if (!sign) return x <= 0 ? 0 : x >= 4294967296.0f ? UINT32_MAX : (uint32_t)x;
    return x >= 2147483648.0f    ? INT32_MAX
           : x <= -2147483648.0f ? (uint32_t)INT32_MIN
                                 : (uint32_t)(int32_t)x;
}

SCALAR_OP(mov, uint64_t, KEEP, x)
SCALAR_OP(movk, int16_t, KEEP, x)
SCALAR_OP(not32, uint32_t, NONZERO32, ~x)
SCALAR_OP(not64, uint64_t, NONZERO64, ~x)
SCALAR_OP(and32, uint32_t, NONZERO32, x &y)
SCALAR_OP(and64, uint64_t, NONZERO64, x &y)
SCALAR_OP(or32, uint32_t, NONZERO32, x | y)
SCALAR_OP(or64, uint64_t, NONZERO64, x | y)
SCALAR_OP(xor32, uint32_t, NONZERO32, x ^ y)
SCALAR_OP(xor64, uint64_t, NONZERO64, x ^ y)
SCALAR_OP(andn32, uint32_t, NONZERO32, x & ~y)
SCALAR_OP(andn64, uint64_t, NONZERO64, x & ~y)
SCALAR_OP(orn32, uint32_t, NONZERO32, x | ~y)
SCALAR_OP(orn64, uint64_t, NONZERO64, x | ~y)
SCALAR_OP(exec_andn, uint64_t, NONZERO64, ~x &y)
SCALAR_OP(nand32, uint32_t, NONZERO32, ~(x &y))
SCALAR_OP(nand64, uint64_t, NONZERO64, ~(x &y))
SCALAR_OP(nor32, uint32_t, NONZERO32, ~(x | y))
SCALAR_OP(nor64, uint64_t, NONZERO64, ~(x | y))
SCALAR_OP(xnor32, uint32_t, NONZERO32, ~(x ^ y))
SCALAR_OP(xnor64, uint64_t, NONZERO64, ~(x ^ y))
SCALAR_OP(lshl32, uint32_t, NONZERO32, (uint32_t)(x << (y & 31)))
SCALAR_OP(lshl64, uint64_t, NONZERO64, x << (y & 63))
SCALAR_OP(lshr32, uint32_t, NONZERO32, x >> (y & 31))
SCALAR_OP(lshr64, uint64_t, NONZERO64, x >> (y & 63))
SCALAR_OP(ashr32, int32_t, NONZERO32, (uint32_t)(x >> (y & 31)))
SCALAR_OP(ashr64, int64_t, NONZERO64, x >> (y & 63))
SCALAR_OP(bfm32, uint32_t, KEEP, (uint32_t)(((UINT64_C(1) << (x & 31)) - 1) << (y & 31)))
SCALAR_OP(bfm64, uint64_t, KEEP, ((UINT64_C(1) << (x & 63)) - 1) << (y & 63))
SCALAR_OP(bfe_u32, uint64_t, NONZERO32, (uint32_t)field((uint32_t)x, y, 32, false))
SCALAR_OP(bfe_i32, uint64_t, NONZERO32, (uint32_t)field((uint32_t)x, y, 32, true))
SCALAR_OP(bfe_u64, uint64_t, NONZERO64, field(x, y, 64, false))
SCALAR_OP(bfe_i64, uint64_t, NONZERO64, field(x, y, 64, true))
SCALAR_OP(brev32, uint32_t, KEEP, reverse(x, 32))
SCALAR_OP(brev64, uint64_t, KEEP, reverse(x, 64))
SCALAR_OP(bcnt0_32, uint32_t, NONZERO32, 32 - count_ones(x))
SCALAR_OP(bcnt1_32, uint32_t, NONZERO32, count_ones(x))
SCALAR_OP(bcnt1_64, uint64_t, NONZERO32, count_ones(x))
SCALAR_OP(ff1_32, uint32_t, KEEP, (uint32_t)lowest(x))
SCALAR_OP(ff1_64, uint64_t, KEEP, (uint32_t)lowest(x))
SCALAR_OP(flbit32, uint32_t, KEEP, (uint32_t)highest_from(x, 32))
SCALAR_OP(flbit64, uint64_t, KEEP, (uint32_t)highest_from(x, 64))
SCALAR_OP(sext8, int8_t, KEEP, (uint32_t)x)
SCALAR_OP(sext16, int16_t, KEEP, (uint32_t)x)
SCALAR_OP(bitset0, uint32_t, KEEP, y & ~(UINT32_C(1) << (x & 31)))
SCALAR_OP(bitset1, uint32_t, KEEP, y | UINT32_C(1) << (x & 31))
SCALAR_OP(abs32, int32_t, NONZERO32, magnitude(x))

SCALAR_OP(add_u, uint32_t, r >> 32, (uint64_t)x + y)
SCALAR_OP(sub_u, uint32_t, x < y, (uint32_t)(x - y))
SCALAR_OP(add_i, int32_t, signed_overflow((int64_t)x + y), (uint32_t)x + (uint32_t)y)
SCALAR_OP(sub_i, int32_t, signed_overflow((int64_t)x - y), (uint32_t)x - (uint32_t)y)
SCALAR_OP(addk, int32_t, signed_overflow((int64_t)x + (int16_t)y), (uint32_t)(x + (int16_t)y))
SCALAR_OP(addc, uint32_t, r >> 32, (uint64_t)x + y + *scc)
SCALAR_OP(subb, uint32_t, (uint64_t)x < (uint64_t)y + *scc, (uint32_t)(x - y - *scc))
SCALAR_OP(mul_lo, uint32_t, KEEP, x *y)
SCALAR_OP(mulk, int32_t, KEEP, (uint32_t)x *(uint32_t)(int16_t)y)
SCALAR_OP(mul_hi_u, uint32_t, KEEP, (uint64_t)x *y >> 32)
SCALAR_OP(mul_hi_i, int32_t, KEEP, (uint32_t)((int64_t)x *y >> 32))
SCALAR_OP(add_u64, uint64_t, KEEP, x + y)
SCALAR_OP(sub_u64, uint64_t, KEEP, x - y)
SCALAR_OP(mul_u64, uint64_t, KEEP, x *y)
SCALAR_OP(min_i, int32_t, x < y, (uint32_t)(x < y ? x : y))
SCALAR_OP(max_i, int32_t, x > y, (uint32_t)(x > y ? x : y))
SCALAR_OP(min_u, uint32_t, x < y, x < y ? x : y)
SCALAR_OP(max_u, uint32_t, x > y, x > y ? x : y)
SCALAR_OP(absdiff, int32_t, NONZERO32, (uint32_t)(x > y ? (int64_t)x - y : (int64_t)y - x))
SCALAR_OP(lshl1_add, uint32_t, r >> 32, ((uint64_t)x << 1) + y)
SCALAR_OP(lshl2_add, uint32_t, r >> 32, ((uint64_t)x << 2) + y)
SCALAR_OP(lshl3_add, uint32_t, r >> 32, ((uint64_t)x << 3) + y)
SCALAR_OP(lshl4_add, uint32_t, r >> 32, ((uint64_t)x << 4) + y)
SCALAR_OP(pack_ll, uint32_t, KEEP, (x & 0xffff) | y << 16)
SCALAR_OP(pack_lh, uint32_t, KEEP, (x & 0xffff) | (y & 0xffff0000))
SCALAR_OP(pack_hh, uint32_t, KEEP, x >> 16 | (y & 0xffff0000))
SCALAR_OP(pack_hl, uint32_t, KEEP, x >> 16 | y << 16)

#define COMPARE(name, type, truth) SCALAR_OP(name, type, r, truth)
COMPARE(eq_u, uint32_t, x == y)
COMPARE(lg_u, uint32_t, x != y)
COMPARE(gt_u, uint32_t, x > y)
COMPARE(ge_u, uint32_t, x >= y)
COMPARE(lt_u, uint32_t, x < y)
COMPARE(le_u, uint32_t, x <= y)
COMPARE(gt_i, int32_t, x > y)
COMPARE(ge_i, int32_t, x >= y)
COMPARE(lt_i, int32_t, x < y)
COMPARE(le_i, int32_t, x <= y)
/* With a constant of 16 bits, which is signed. */
COMPARE(k_eq_i, int32_t, x == (int16_t)y)
COMPARE(k_lg_i, int32_t, x != (int16_t)y)
COMPARE(k_gt_i, int32_t, x > (int16_t)y)
COMPARE(k_ge_i, int32_t, x >= (int16_t)y)
COMPARE(k_lt_i, int32_t, x < (int16_t)y)
COMPARE(k_le_i, int32_t, x <= (int16_t)y)
COMPARE(eq_64, uint64_t, x == y)
COMPARE(lg_64, uint64_t, x != y)
COMPARE(bit0_32, uint32_t, !(x >> (y & 31) & 1))
COMPARE(bit1_32, uint32_t, x >> (y & 31) & 1)
COMPARE(bit0_64, uint64_t, !(x >> (y & 63) & 1))
COMPARE(bit1_64, uint64_t, x >> (y & 63) & 1)
COMPARE(lt_f, uint32_t, f(x) < f(y))
COMPARE(eq_f, uint32_t, f(x) == f(y))
COMPARE(le_f, uint32_t, f(x) <= f(y))
COMPARE(gt_f, uint32_t, f(x) > f(y))
COMPARE(ge_f, uint32_t, f(x) >= f(y))
COMPARE(lg_f, uint32_t, f(x) < f(y) || f(x) > f(y))
COMPARE(o_f, uint32_t, f(x) == f(x) && f(y) == f(y))
COMPARE(u_f, uint32_t, f(x) != f(x) || f(y) != f(y))
COMPARE(nge_f, uint32_t, !(f(x) >= f(y)))
COMPARE(nlg_f, uint32_t, !(f(x) < f(y) || f(x) > f(y)))
COMPARE(ngt_f, uint32_t, !(f(x) > f(y)))
COMPARE(nle_f, uint32_t, !(f(x) <= f(y)))
COMPARE(neq_f, uint32_t, !(f(x) == f(y)))
COMPARE(nlt_f, uint32_t, !(f(x) < f(y)))

SCALAR_OP(add_f, uint32_t, KEEP, bits_of(f(x) + f(y)))
SCALAR_OP(sub_f, uint32_t, KEEP, bits_of(f(x) - f(y)))
SCALAR_OP(mul_f, uint32_t, KEEP, bits_of(f(x) * f(y)))
SCALAR_OP(min_f, uint32_t, KEEP, bits_of(fmin_of(f(x), f(y))))
SCALAR_OP(max_f, uint32_t, KEEP, bits_of(fmax_of(f(x), f(y))))
SCALAR_OP(floor_f, uint32_t, KEEP, bits_of(floorf(f(x))))
SCALAR_OP(ceil_f, uint32_t, KEEP, bits_of(ceilf(f(x))))
SCALAR_OP(trunc_f, uint32_t, KEEP, bits_of(truncf(f(x))))
SCALAR_OP(rndne_f, uint32_t, KEEP, bits_of(rintf(f(x))))
SCALAR_OP(f_from_i, int32_t, KEEP, bits_of((float)x))
SCALAR_OP(f_from_u, uint32_t, KEEP, bits_of((float)x))
SCALAR_OP(i_from_f, uint32_t, KEEP, float_to_int(f(x), true))
SCALAR_OP(u_from_f, uint32_t, KEEP, float_to_int(f(x), false))
SCALAR_OP(half_from_f, uint32_t, KEEP, half_from_float(f(x)))
SCALAR_OP(f_from_half, uint32_t, KEEP, bits_of(half(x)))
SCALAR_OP(f_from_high_half, uint32_t, KEEP, bits_of(half(x >> 16)))
SCALAR_OP(exp_f, uint32_t, KEEP, bits_of((float)exp2(f(x))))
SCALAR_OP(log_f, uint32_t, KEEP, bits_of((float)log2(f(x))))
SCALAR_OP(rcp_f, uint32_t, KEEP, bits_of(1 / f(x)))
SCALAR_OP(rsq_f, uint32_t, KEEP, bits_of((float)(1 / sqrt(f(x)))))
SCALAR_OP(sqrt_f, uint32_t, KEEP, bits_of(sqrtf(f(x))))

/* ---- the table ------------------------------------------------------------------------------- */

#define S(name, form, op, rule)                                      \
    {                                                                \
        name, form, run_scalar, EMU_SALU, NULL, op, rule, HALF_ALONE \
    }
#define SPECIAL(name, form, run, op, rule)                    \
    {                                                         \
        name, form, run, EMU_SALU, NULL, op, rule, HALF_ALONE \
    }

static const emu_row rows[] = {
    S("s_mov_b32", "u=u", mov, BITS),
    S("s_mov_b64", "q=q", mov, BITS),
    S("s_movk_i32", "u=u", movk, BITS),
    S("s_not_b32", "u=u", not32, BITS),
    S("s_not_b64", "q=q", not64, BITS),
    S("s_and_b32", "u=uu", and32, AND),
    S("s_and_b64", "q=qq", and64, AND),
    S("s_or_b32", "u=uu", or32, OR),
    S("s_or_b64", "q=qq", or64, OR),
    S("s_xor_b32", "u=uu", xor32, BITS),
    S("s_xor_b64", "q=qq", xor64, BITS),
    S("s_andn2_b32", "u=uu", andn32, ANDN),
    S("s_andn2_b64", "q=qq", andn64, ANDN),
    S("s_and_not1_b32", "u=uu", andn32, ANDN),
    S("s_and_not1_b64", "q=qq", andn64, ANDN),
    S("s_orn2_b32", "u=uu", orn32, ORN),
    S("s_orn2_b64", "q=qq", orn64, ORN),
    S("s_or_not1_b32", "u=uu", orn32, ORN),
    S("s_or_not1_b64", "q=qq", orn64, ORN),
    S("s_nand_b32", "u=uu", nand32, AND),
    S("s_nand_b64", "q=qq", nand64, AND),
    S("s_nor_b32", "u=uu", nor32, OR),
    S("s_nor_b64", "q=qq", nor64, OR),
    S("s_xnor_b32", "u=uu", xnor32, BITS),
    S("s_xnor_b64", "q=qq", xnor64, BITS),
    S("s_lshl_b32", "u=uu", lshl32, SHIFT_LEFT),
    S("s_lshl_b64", "q=qu", lshl64, SHIFT_LEFT),
    S("s_lshr_b32", "u=uu", lshr32, SHIFT_RIGHT),
    S("s_lshr_b64", "q=qu", lshr64, SHIFT_RIGHT),
    S("s_ashr_i32", "u=uu", ashr32, ALL),
    S("s_ashr_i64", "q=qu", ashr64, ALL),
    S("s_bfm_b32", "u=uu", bfm32, ALL),
    S("s_bfm_b64", "q=uu", bfm64, ALL),
    S("s_bfe_u32", "u=uu", bfe_u32, FIELD),
    S("s_bfe_i32", "u=uu", bfe_i32, FIELD),
    S("s_bfe_u64", "q=qu", bfe_u64, FIELD),
    S("s_bfe_i64", "q=qu", bfe_i64, FIELD),
    S("s_brev_b32", "u=u", brev32, ALL),
    S("s_brev_b64", "q=q", brev64, ALL),
    S("s_bcnt0_i32_b32", "u=u", bcnt0_32, ALL),
    S("s_bcnt1_i32_b32", "u=u", bcnt1_32, ALL),
    S("s_bcnt1_i32_b64", "u=q", bcnt1_64, ALL),
    S("s_ff1_i32_b32", "u=u", ff1_32, ALL),
    S("s_ff1_i32_b64", "u=q", ff1_64, ALL),
    S("s_ctz_i32_b32", "u=u", ff1_32, ALL),
    S("s_ctz_i32_b64", "u=q", ff1_64, ALL),
    S("s_flbit_i32_b32", "u=u", flbit32, ALL),
    S("s_clz_i32_u32", "u=u", flbit32, ALL),
    S("s_flbit_i32_b64", "u=q", flbit64, ALL),
    S("s_clz_i32_u64", "u=q", flbit64, ALL),
    S("s_sext_i32_i8", "u=u", sext8, ALL),
    S("s_sext_i32_i16", "u=u", sext16, ALL),
    S("s_bitset0_b32", "u=u+", bitset0, ALL),
    S("s_bitset1_b32", "u=u+", bitset1, ALL),
    S("s_abs_i32", "u=u", abs32, ALL),
    SPECIAL("s_cselect_b32", "u=uu", run_cselect, NULL, ALL),
    SPECIAL("s_cselect_b64", "q=qq", run_cselect, NULL, ALL),
    SPECIAL("s_cmov_b32", "u=u", run_cmov, NULL, ALL),
    SPECIAL("s_cmov_b64", "q=q", run_cmov, NULL, ALL),
    SPECIAL("s_cmovk_i32", "u=u", run_cmov, NULL, ALL),
    SPECIAL("s_and_saveexec_b32", "m=m", run_saveexec, and64, AND),
    SPECIAL("s_and_saveexec_b64", "m=m", run_saveexec, and64, AND),
    SPECIAL("s_or_saveexec_b32", "m=m", run_saveexec, or64, OR),
    SPECIAL("s_or_saveexec_b64", "m=m", run_saveexec, or64, OR),
    SPECIAL("s_xor_saveexec_b32", "m=m", run_saveexec, xor64, BITS),
    SPECIAL("s_xor_saveexec_b64", "m=m", run_saveexec, xor64, BITS),
    SPECIAL("s_andn2_saveexec_b32", "m=m", run_saveexec, andn64, ANDN),
    SPECIAL("s_andn2_saveexec_b64", "m=m", run_saveexec, andn64, ANDN),
    SPECIAL("s_and_not1_saveexec_b32", "m=m", run_saveexec, andn64, ANDN),
    SPECIAL("s_and_not1_saveexec_b64", "m=m", run_saveexec, andn64, ANDN),
    SPECIAL("s_orn2_saveexec_b32", "m=m", run_saveexec, orn64, ORN),
    SPECIAL("s_orn2_saveexec_b64", "m=m", run_saveexec, orn64, ORN),
    SPECIAL("s_or_not1_saveexec_b32", "m=m", run_saveexec, orn64, ORN),
    SPECIAL("s_or_not1_saveexec_b64", "m=m", run_saveexec, orn64, ORN),
    SPECIAL("s_andn1_saveexec_b32", "m=m", run_saveexec, exec_andn, EXEC_ANDN),
    SPECIAL("s_andn1_saveexec_b64", "m=m", run_saveexec, exec_andn, EXEC_ANDN),
    SPECIAL("s_and_not0_saveexec_b32", "m=m", run_saveexec, exec_andn, EXEC_ANDN),
    SPECIAL("s_and_not0_saveexec_b64", "m=m", run_saveexec, exec_andn, EXEC_ANDN),
    SPECIAL("s_getpc_b64", "q=", run_getpc, NULL, ALL),

    S("s_add_u32", "u=uu", add_u, ALL),
    S("s_add_co_u32", "u=uu", add_u, ALL),
    S("s_sub_u32", "u=uu", sub_u, ALL),
    S("s_sub_co_u32", "u=uu", sub_u, ALL),
    S("s_add_i32", "u=uu", add_i, ALL),
    S("s_add_co_i32", "u=uu", add_i, ALL),
    S("s_sub_i32", "u=uu", sub_i, ALL),
    S("s_sub_co_i32", "u=uu", sub_i, ALL),
    S("s_addc_u32", "u=uu", addc, READS_SCC),
    S("s_add_co_ci_u32", "u=uu", addc, READS_SCC),
    S("s_subb_u32", "u=uu", subb, READS_SCC),
    S("s_sub_co_ci_u32", "u=uu", subb, READS_SCC),
    S("s_addk_i32", "u=+u", addk, ALL),
    S("s_addk_co_i32", "u=+u", addk, ALL),
    S("s_mulk_i32", "u=+u", mulk, ALL),
    S("s_mul_i32", "u=uu", mul_lo, ALL),
    S("s_mul_hi_u32", "u=uu", mul_hi_u, ALL),
    S("s_mul_hi_i32", "u=uu", mul_hi_i, ALL),
    S("s_add_u64", "q=qq", add_u64, ALL),
    S("s_add_nc_u64", "q=qq", add_u64, ALL),
    S("s_sub_u64", "q=qq", sub_u64, ALL),
    S("s_sub_nc_u64", "q=qq", sub_u64, ALL),
    S("s_mul_u64", "q=qq", mul_u64, ALL),
    S("s_min_i32", "u=uu", min_i, ALL),
    S("s_min_u32", "u=uu", min_u, ALL),
    S("s_max_i32", "u=uu", max_i, ALL),
    S("s_max_u32", "u=uu", max_u, ALL),
    S("s_absdiff_i32", "u=uu", absdiff, ALL),
    S("s_lshl1_add_u32", "u=uu", lshl1_add, ALL),
    S("s_lshl2_add_u32", "u=uu", lshl2_add, ALL),
    S("s_lshl3_add_u32", "u=uu", lshl3_add, ALL),
    S("s_lshl4_add_u32", "u=uu", lshl4_add, ALL),
    S("s_pack_ll_b32_b16", "u=uu", pack_ll, ALL),
    S("s_pack_lh_b32_b16", "u=uu", pack_lh, ALL),
    S("s_pack_hh_b32_b16", "u=uu", pack_hh, ALL),
    S("s_pack_hl_b32_b16", "u=uu", pack_hl, ALL),

    S("s_cmp_eq_i32", "=uu", eq_u, ALL),
    S("s_cmp_eq_u32", "=uu", eq_u, ALL),
    S("s_cmp_lg_i32", "=uu", lg_u, ALL),
    S("s_cmp_lg_u32", "=uu", lg_u, ALL),
    S("s_cmp_gt_i32", "=uu", gt_i, ALL),
    S("s_cmp_gt_u32", "=uu", gt_u, ALL),
    S("s_cmp_ge_i32", "=uu", ge_i, ALL),
    S("s_cmp_ge_u32", "=uu", ge_u, ALL),
    S("s_cmp_lt_i32", "=uu", lt_i, ALL),
    S("s_cmp_lt_u32", "=uu", lt_u, ALL),
    S("s_cmp_le_i32", "=uu", le_i, ALL),
    S("s_cmp_le_u32", "=uu", le_u, ALL),
    S("s_cmp_eq_u64", "=qq", eq_64, ALL),
    S("s_cmp_lg_u64", "=qq", lg_64, ALL),
    S("s_cmpk_eq_i32", "=uu", k_eq_i, ALL),
    S("s_cmpk_eq_u32", "=uu", eq_u, ALL),
    S("s_cmpk_lg_i32", "=uu", k_lg_i, ALL),
    S("s_cmpk_lg_u32", "=uu", lg_u, ALL),
    S("s_cmpk_gt_i32", "=uu", k_gt_i, ALL),
    S("s_cmpk_gt_u32", "=uu", gt_u, ALL),
    S("s_cmpk_ge_i32", "=uu", k_ge_i, ALL),
    S("s_cmpk_ge_u32", "=uu", ge_u, ALL),
    S("s_cmpk_lt_i32", "=uu", k_lt_i, ALL),
    S("s_cmpk_lt_u32", "=uu", lt_u, ALL),
    S("s_cmpk_le_i32", "=uu", k_le_i, ALL),
    S("s_cmpk_le_u32", "=uu", le_u, ALL),
    S("s_bitcmp0_b32", "=uu", bit0_32, ALL),
    S("s_bitcmp1_b32", "=uu", bit1_32, ALL),
    S("s_bitcmp0_b64", "=qu", bit0_64, ALL),
    S("s_bitcmp1_b64", "=qu", bit1_64, ALL),

    S("s_cmp_lt_f32", "=ff", lt_f, ALL),
    S("s_cmp_eq_f32", "=ff", eq_f, ALL),
    S("s_cmp_le_f32", "=ff", le_f, ALL),
    S("s_cmp_gt_f32", "=ff", gt_f, ALL),
    S("s_cmp_ge_f32", "=ff", ge_f, ALL),
    S("s_cmp_lg_f32", "=ff", lg_f, ALL),
    S("s_cmp_o_f32", "=ff", o_f, ALL),
    S("s_cmp_u_f32", "=ff", u_f, ALL),
    S("s_cmp_nge_f32", "=ff", nge_f, ALL),
    S("s_cmp_nlg_f32", "=ff", nlg_f, ALL),
    S("s_cmp_ngt_f32", "=ff", ngt_f, ALL),
    S("s_cmp_nle_f32", "=ff", nle_f, ALL),
    S("s_cmp_neq_f32", "=ff", neq_f, ALL),
    S("s_cmp_nlt_f32", "=ff", nlt_f, ALL),
    S("s_add_f32", "f=ff", add_f, ALL),
    S("s_sub_f32", "f=ff", sub_f, ALL),
    S("s_mul_f32", "f=ff", mul_f, ALL),
    S("s_min_f32", "f=ff", min_f, ALL),
    S("s_max_f32", "f=ff", max_f, ALL),
    S("s_min_num_f32", "f=ff", min_f, ALL),
    S("s_max_num_f32", "f=ff", max_f, ALL),
    SPECIAL("s_fmac_f32", "f=ff+", run_fma, NULL, ALL),
    SPECIAL("s_fmaak_f32", "f=fff", run_fma, NULL, ALL),
    SPECIAL("s_fmamk_f32", "f=fff", run_fma, NULL, ALL),
    S("s_floor_f32", "f=f", floor_f, ALL),
    S("s_ceil_f32", "f=f", ceil_f, ALL),
    S("s_trunc_f32", "f=f", trunc_f, ALL),
    S("s_rndne_f32", "f=f", rndne_f, ALL),
    S("s_cvt_f32_i32", "f=u", f_from_i, ALL),
    S("s_cvt_f32_u32", "f=u", f_from_u, ALL),
    S("s_cvt_i32_f32", "u=f", i_from_f, ALL),
    S("s_cvt_u32_f32", "u=f", u_from_f, ALL),
    S("s_cvt_f16_f32", "u=f", half_from_f, ALL),
    S("s_cvt_f32_f16", "f=u", f_from_half, ALL),
    S("s_cvt_hi_f32_f16", "f=u", f_from_high_half, ALL),
    {"v_s_exp_f32", "f=f", run_scalar, EMU_TRANS, NULL, exp_f, ALL, HALF_ALONE},
    {"v_s_log_f32", "f=f", run_scalar, EMU_TRANS, NULL, log_f, ALL, HALF_ALONE},
    {"v_s_rcp_f32", "f=f", run_scalar, EMU_TRANS, NULL, rcp_f, ALL, HALF_ALONE},
    {"v_s_rsq_f32", "f=f", run_scalar, EMU_TRANS, NULL, rsq_f, ALL, HALF_ALONE},
    {"v_s_sqrt_f32", "f=f", run_scalar, EMU_TRANS, NULL, sqrt_f, ALL, HALF_ALONE},
};

const emu_table emu_scalar_table = {rows, sizeof rows / sizeof *rows};
