/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle: see naive.h. In three parts: finding and decoding the data (shared with
 * comparator.c), the formulas, and writing outputs. Number formats, Philox and sequence arithmetic
 * are implemented again here: an oracle that shared them with core/ could not reveal errors in
 * core/.
 */
#include "backends/reference/naive.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "core/memory.h"
#include "core/status.h"

/* --- Number formats --------------------------------------------------------------------------- */

/* A binary format: a sign, an exponent field, digits - 1 bits of fraction. */
typedef struct format {
    int digits;         /* of the significand, including the implicit one */
    int exponent_min;   /* 2^exponent_min is the smallest normal number */
    unsigned field_max; /* exponent field of infinities and NaN */
    unsigned sign;      /* bit of the sign, the highest one */
} format;

static const format f16 = {11, -14, 31, 0x8000}, bf16 = {8, -126, 255, 0x8000};
/* No infinity, and one NaN, whose exponent field is that of numbers too. */
static const format e4m3 = {4, -6, 16, 0x80};
#define E4M3_NAN 0x7f

static double decode(unsigned bits, const format *f)
{
    const unsigned one = 1u << (f->digits - 1), magnitude = bits & (f->sign - 1);
    const unsigned fraction = bits & (one - 1), field = magnitude >> (f->digits - 1);
    const int ulp_min = f->exponent_min - (f->digits - 1);
    double x;
    if (f == &e4m3 && magnitude == E4M3_NAN) {
        x = (double)NAN;
    } else if (field == f->field_max) {
        x = fraction != 0 ? (double)NAN : (double)INFINITY;
    } else if (field == 0) {
        x = ldexp(fraction, ulp_min);
    } else {
        x = ldexp(fraction + one, ulp_min + (int)field - 1);
    }
    return bits & f->sign ? -x : x;
}

/* Rounds to nearest even, in units of x's last place in the format. The encoding of a number is its
 * count of such units from 0 upwards, so a carry into the exponent field needs no extra step. */
static unsigned encode(double x, const format *f)
{
    const unsigned one = 1u << (f->digits - 1), infinity = f->field_max * one;
    const unsigned sign = signbit(x) ? f->sign : 0;
    if (x == 0) {
        return sign;
    }
    if (isnan(x)) {
        return sign | infinity | one >> 1;
    }
    if (isinf(x)) {
        return sign | infinity;
    }
    int exponent;
    frexp(x, &exponent); /* |x| in [1/2, 1) * 2^exponent */
    const int field = exponent > f->exponent_min ? exponent - f->exponent_min : 0;
    const int ulp = f->exponent_min - (f->digits - 1) + (field > 0 ? field - 1 : 0);
    const double units = rint(ldexp(fabs(x), -ulp)); /* at most 2 * one */
    const unsigned above = field > 0 ? (unsigned)(field - 1) : 0;
    if (above >= f->field_max) {
        return sign | infinity;
    }
    const unsigned bits = above * one + (unsigned)units;
    return sign | (bits < infinity ? bits : infinity);
}

double fattn_naive_load(const void *array, fattn_dtype dtype, int64_t index)
{
    switch (dtype) {
    case FATTN_F64: return ((const double *)array)[index];
    case FATTN_F32: return (double)((const float *)array)[index];
    case FATTN_F16: return decode(((const uint16_t *)array)[index], &f16);
    case FATTN_BF16: return decode(((const uint16_t *)array)[index], &bf16);
    case FATTN_E4M3: return decode(((const uint8_t *)array)[index], &e4m3);
    default: assert(!"a dtype that no problem has"); return (double)NAN;
    }
}

static void store(void *array, fattn_dtype dtype, int64_t index, double x)
{
    switch (dtype) {
    case FATTN_F64: ((double *)array)[index] = x; break;
    case FATTN_F32: ((float *)array)[index] = (float)x; break;
    case FATTN_F16: ((uint16_t *)array)[index] = (uint16_t)encode(x, &f16); break;
    case FATTN_BF16: ((uint16_t *)array)[index] = (uint16_t)encode(x, &bf16); break;
    default: assert(!"a dtype that no output has");
    }
}

double fattn_naive_round(double x, fattn_dtype dtype)
{
    union {
        double f64;
        float f32;
        uint16_t bits;
    } stored = {0};
    store(&stored, dtype, 0, x);
    return fattn_naive_load(&stored, dtype, 0);
}

fattn_dtype fattn_naive_dtype_lse(const fattn_problem *p)
{
    return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
}

fattn_dtype fattn_naive_dtype_grad(const fattn_problem *p, fattn_dtype input)
{
    return p->features & FATTN_ACCUMULATE ? fattn_naive_dtype_lse(p) : input;
}

fattn_dtype fattn_naive_dtype_operand(const fattn_problem *p)
{
    const bool k_alike = p->dtype_kv == p->dtype || p->dtype_kv == FATTN_E4M3;
    const bool v_alike = p->dtype_v == p->dtype || p->dtype_v == FATTN_E4M3;
    return k_alike && v_alike ? p->dtype : FATTN_F32;
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. */
void fattn_naive_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = UINT64_C(0xD2511F53) * c0, product1 = UINT64_C(0xCD9E8D57) * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += UINT32_C(0x9E3779B9);
        k1 += UINT32_C(0xBB67AE85);
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

int64_t fattn_naive_dropout_threshold(double probability)
{
    if (probability == 0) {
        return 0;
    }
    if (probability == 1) {
        return 65536;
    }
    const double t = floor(probability * 65536 + 0.5);
    return t < 1 ? 1 : t > 65535 ? 65535 : (int64_t)t;
}

void fattn_naive_dropout_key(uint64_t seed, uint64_t offset, uint32_t key[2])
{
    const uint32_t counter[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), 0, 0};
    const uint32_t seed_key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    fattn_naive_philox(counter, seed_key, words);
    key[0] = words[0], key[1] = words[1];
}

/* Dropout bits: one Philox call serves rows i, i + 8 and columns j, j + 1, j + 8, j + 9 of a 16 x
 * 16 block (docs/MATH.md, section 7). */
double fattn_naive_dropout(const uint32_t key[2], int64_t threshold, int64_t b, int64_t h,
                           int64_t i, int64_t j)
{
    if (threshold == 65536) {
        return 0;
    }
    const uint32_t counter[4] = {(uint32_t)(i / 16 * 8 + i % 8), (uint32_t)(j / 16 * 4 + j % 8 / 2),
                                 (uint32_t)b, (uint32_t)h};
    uint32_t words[4];
    fattn_naive_philox(counter, key, words);
    const uint32_t word = words[i / 8 % 2 * 2 + j / 8 % 2];
    const int64_t bits = j % 2 == 0 ? word & 0xffff : word >> 16;
    return bits < threshold ? 0 : 65536.0 / (double)(65536 - threshold);
}

/* --- Memory: one block per object, cut into arrays -------------------------------------------- */

typedef struct piece {
    double **place;
    int64_t extent[4];
    bool wanted; /* false: *place becomes NULL */
} piece;

/* Elements of a piece, or -1 if their bytes exceed 63 bits. */
static int64_t elements(const piece *a)
{
    const int64_t most = INT64_MAX / (int64_t)sizeof(double);
    int64_t count = 1;
    for (int axis = 0; axis < 4; axis++) {
        if (a->extent[axis] == 0) {
            return 0;
        }
    }
    for (int axis = 0; axis < 4; axis++) {
        if (count > most / a->extent[axis]) {
            return -1;
        }
        count *= a->extent[axis];
    }
    return count;
}

/* Allocates all wanted pieces as one zeroed block. Empty pieces get a pointer too. */
static fattn_status allocate(const piece *pieces, size_t count, void **memory)
{
    const char *const what = "the reference's arrays in double precision";
    const int64_t most = INT64_MAX / (int64_t)sizeof(double);
    int64_t total = 1;
    for (size_t n = 0; n < count; n++) {
        const int64_t size = pieces[n].wanted ? elements(&pieces[n]) : 0;
        if (size < 0 || total > most - size) {
            return fattn_fail(FATTN_OUT_OF_MEMORY, "no memory for 2^63 bytes or more of %s", what);
        }
        total += size;
    }
    const uint64_t bytes = (uint64_t)total * sizeof(double);
    double *room = bytes <= SIZE_MAX ? fattn_memory_alloc((size_t)bytes) : NULL;
    if (room == NULL) {
        return fattn_fail_memory((int64_t)bytes, what);
    }
    memset(room, 0, (size_t)bytes);
    *memory = room;
    for (size_t n = 0; n < count; n++) {
        *pieces[n].place = pieces[n].wanted ? room : NULL;
        if (pieces[n].wanted) {
            room += elements(&pieces[n]);
        }
    }
    return FATTN_OK;
}

/* --- Where things are ------------------------------------------------------------------------- */

static fattn_naive_sequence sequence_of(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    fattn_naive_sequence s = {.own_rows = p->seqlen_q, .own_keys = p->seqlen_k};
    if (p->features & FATTN_CU_SEQLENS_Q) {
        s.first_row = buf->cu_seqlens_q[b];
        s.own_rows = buf->cu_seqlens_q[b + 1] - s.first_row;
    }
    if (p->features & FATTN_CU_SEQLENS_K) {
        s.first_key = buf->cu_seqlens_k[b];
        s.own_keys = buf->cu_seqlens_k[b + 1] - s.first_key;
    }
    s.rows = p->features & FATTN_SEQUSED_Q ? buf->seqused_q[b] : s.own_rows;
    s.keys = p->features & FATTN_SEQUSED_K ? buf->seqused_k[b] : s.own_keys;
    s.start = p->features & FATTN_SEQSTART_K ? buf->seqstart_k[b] : 0;
    assert(0 <= s.start && s.start <= s.keys);
    assert(0 <= s.rows && s.rows <= p->seqlen_q && 0 <= s.keys && s.keys <= p->seqlen_k);

    int64_t whole_q = s.rows, whole_k = s.keys;
    if (p->features & FATTN_POSITIONS) {
        const int64_t given_q = buf->wholes_q != NULL ? buf->wholes_q[b] : buf->whole_q;
        const int64_t given_k = buf->wholes_k != NULL ? buf->wholes_k[b] : buf->whole_k;
        if (given_q != -1) {
            whole_q = given_q;
        }
        if (given_k != -1) {
            whole_k = given_k;
        }
        s.q_offset = buf->q_offsets != NULL ? buf->q_offsets[b] : buf->q_offset;
        s.k_offset = buf->k_offsets != NULL ? buf->k_offsets[b] : buf->k_offset;
    }
    s.off = (p->anchor == FATTN_BOTTOM_RIGHT ? whole_k - whole_q : 0) + s.q_offset - s.k_offset;
    return s;
}

/* Index of channel 0 in a tensor like q or o. */
static int64_t row_index(const fattn_problem *p, const fattn_naive_sequence *seq,
                         const fattn_strides *stride, int64_t b, int64_t h, int64_t i)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_Q ? 0 : b * stride->batch;
    return batch + (seq->first_row + i) * stride->seq + h * stride->head;
}

/* Index of channel 0 in a tensor like k or v, which may be paged. */
static int64_t key_index(const fattn_problem *p, const fattn_buffers *buf,
                         const fattn_naive_sequence *seq, const fattn_strides *stride, int64_t b,
                         int64_t hk, int64_t j)
{
    if (p->features & FATTN_PAGED) {
        const int64_t page = buf->block_table[b * p->block_table_stride + j / p->page_size];
        return page * stride->batch + j % p->page_size * stride->seq + hk * stride->head;
    }
    const int64_t batch = p->features & FATTN_CU_SEQLENS_K ? 0 : b * stride->batch;
    return batch + (seq->first_key + j) * stride->seq + hk * stride->head;
}

/* Index of a row in lse or dlse. */
static int64_t lse_index(const fattn_problem *p, const fattn_naive_sequence *seq, int64_t b,
                         int64_t h, int64_t i)
{
    if (p->features & FATTN_CU_SEQLENS_Q) {
        return h * p->total_q + seq->first_row + i;
    }
    return (b * p->heads_q + h) * p->seqlen_q + i;
}

static int64_t pair_index(const int64_t stride[4], int64_t b, int64_t h, int64_t i, int64_t j)
{
    return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
}

int64_t fattn_naive_dbias_index(const fattn_problem *p, const fattn_naive *result,
                                const fattn_naive_slice *slice, int64_t i, int64_t j)
{
    const int64_t at[4] = {slice->b, slice->h, i, j};
    int64_t index = 0;
    for (int axis = 0; axis < 4; axis++) {
        index = index * result->bias_extent[axis] + (p->dbias_stride[axis] != 0 ? at[axis] : 0);
    }
    return index;
}

/* --- Results and slices ----------------------------------------------------------------------- */

fattn_status fattn_naive_allocate(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result)
{
    *result = (fattn_naive){.batch = p->batch,
                            .heads_q = p->heads_q,
                            .heads_k = p->heads_k,
                            .sq = p->seqlen_q,
                            .sk = p->seqlen_k,
                            .dim = p->dim,
                            .dim_v = p->dim_v};
    fattn_naive *r = result;
    const bool backward = p->op == FATTN_BACKWARD;
    const bool dbias = backward && (p->outputs & FATTN_OUT_DBIAS);
    const bool dsink = backward && (p->outputs & FATTN_OUT_DSINK);
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    for (int axis = 0; axis < 4; axis++) {
        r->bias_extent[axis] = !dbias ? 0 : p->dbias_stride[axis] != 0 ? pairs[axis] : 1;
    }
    const int64_t *e = r->bias_extent;

    double *sequences;
    const piece pieces[] = {
        {&sequences, {r->batch, sizeof(fattn_naive_sequence) / sizeof(double), 1, 1}, true},
        {&r->o, {r->batch, r->heads_q, r->sq, r->dim_v}, true},
        {&r->lse, {r->batch, r->heads_q, r->sq, 1}, true},
        {&r->dq, {r->batch, r->heads_q, r->sq, r->dim}, backward},
        {&r->dk, {r->batch, r->heads_k, r->sk, r->dim}, backward},
        {&r->dv, {r->batch, r->heads_k, r->sk, r->dim_v}, backward},
        {&r->dbias, {e[0], e[1], e[2], e[3]}, dbias},
        {&r->dsink, {r->heads_q, 1, 1, 1}, dsink},
        {&r->a_o, {r->batch, r->heads_q, 1, 1}, true},
        {&r->a_dq, {r->batch, r->heads_q, 1, 1}, backward},
        {&r->a_dk, {r->batch, r->heads_k, 1, 1}, backward},
        {&r->a_dv, {r->batch, r->heads_k, 1, 1}, backward},
        {&r->a_dbias, {e[0], e[1], 1, 1}, dbias},
        {&r->a_dsink, {r->heads_q, 1, 1, 1}, dsink},
        {&r->x_max, {r->batch, r->heads_q, 1, 1}, true},
        {&r->lse_scale, {r->batch, r->heads_q, r->sq, 1}, true},
    };
    const fattn_status status =
        allocate(pieces, sizeof(pieces) / sizeof(pieces[0]), &result->memory);
    if (status != FATTN_OK) {
        *result = (fattn_naive){0};
        return status;
    }
    r->sequences = (fattn_naive_sequence *)(void *)sequences;
    for (int64_t b = 0; b < p->batch; b++) {
        r->sequences[b] = sequence_of(p, buf, b);
    }
    return FATTN_OK;
}

void fattn_naive_free(fattn_naive *result)
{
    fattn_memory_free(result->memory);
    *result = (fattn_naive){0};
}

fattn_status fattn_naive_slice_create(const fattn_problem *p, fattn_naive_slice *slice)
{
    *slice = (fattn_naive_slice){0};
    fattn_naive_slice *s = slice;
    const bool backward = p->op == FATTN_BACKWARD, empty = p->batch == 0 || p->heads_q == 0;
    const int64_t sq = empty ? 0 : p->seqlen_q, sk = empty ? 0 : p->seqlen_k;
    const piece pieces[] = {
        {&s->q, {sq, p->dim, 1, 1}, true},    {&s->k, {sk, p->dim, 1, 1}, true},
        {&s->kt, {sk, p->dim, 1, 1}, true},   {&s->v, {sk, p->dim_v, 1, 1}, true},
        {&s->vt, {sk, p->dim_v, 1, 1}, true}, {&s->dout, {sq, p->dim_v, 1, 1}, backward},
        {&s->dlse, {sq, 1, 1, 1}, backward},  {&s->keep, {sk, 1, 1, 1}, true},
        {&s->bias, {sk, 1, 1, 1}, true},      {&s->alibi, {sk, 1, 1, 1}, true},
        {&s->z, {sk, 1, 1, 1}, true},
    };
    return allocate(pieces, sizeof(pieces) / sizeof(pieces[0]), &slice->memory);
}

void fattn_naive_slice_free(fattn_naive_slice *slice)
{
    fattn_memory_free(slice->memory);
    *slice = (fattn_naive_slice){0};
}

/* Decodes channels of one row or key, and multiplies them by factor. */
static void load_channels(const void *tensor, fattn_dtype dtype, int64_t index, int64_t channels,
                          double factor, double *dense)
{
    for (int64_t c = 0; c < channels; c++) {
        dense[c] = factor * fattn_naive_load(tensor, dtype, index + c);
    }
}

/* The factor of the keys, or the values, of a sequence and head. */
static double descale_of(const fattn_problem *p, const void *descales, int64_t b, int64_t hk)
{
    const int64_t index = b * p->descale_stride[0] + hk * p->descale_stride[1];
    return p->features & FATTN_DESCALE ? fattn_naive_load(descales, fattn_naive_dtype_lse(p), index)
                                       : 1;
}

static void transpose(const double *in, int64_t rows, int64_t columns, double *out)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            out[c * rows + r] = in[r * columns + c];
        }
    }
}

void fattn_naive_slice_load(const fattn_problem *p, const fattn_buffers *buf, int64_t b, int64_t h,
                            fattn_naive_slice *slice)
{
    const fattn_dtype dtype_lse = fattn_naive_dtype_lse(p);
    const int64_t hk = h / (p->heads_q / p->heads_k);
    const fattn_naive_sequence seq = sequence_of(p, buf, b);
    const double k_factor = descale_of(p, buf->k_descale, b, hk);
    const double v_factor = descale_of(p, buf->v_descale, b, hk);
    slice->b = b, slice->h = h, slice->hk = hk, slice->seq = seq;
    for (int64_t i = 0; i < seq.rows; i++) {
        load_channels(buf->q, p->dtype, row_index(p, &seq, &p->q, b, h, i), p->dim, 1,
                      slice->q + i * p->dim);
    }
    for (int64_t j = seq.start; j < seq.keys; j++) { /* pages before have no entry in the table */
        load_channels(buf->k, p->dtype_kv, key_index(p, buf, &seq, &p->k, b, hk, j), p->dim,
                      k_factor, slice->k + j * p->dim);
        load_channels(buf->v, p->dtype_v, key_index(p, buf, &seq, &p->v, b, hk, j), p->dim_v,
                      v_factor, slice->v + j * p->dim_v);
    }
    transpose(slice->k, seq.keys, p->dim, slice->kt);
    transpose(slice->v, seq.keys, p->dim_v, slice->vt);
    slice->sink =
        p->features & FATTN_SINK ? fattn_naive_load(buf->sink, dtype_lse, h) : -(double)INFINITY;
    if (p->op != FATTN_BACKWARD) {
        return;
    }
    for (int64_t i = 0; i < seq.rows; i++) {
        load_channels(buf->dout, p->dtype_o, row_index(p, &seq, &p->dout, b, h, i), p->dim_v, 1,
                      slice->dout + i * p->dim_v);
        if (p->features & FATTN_DLSE) {
            slice->dlse[i] = fattn_naive_load(buf->dlse, dtype_lse, lse_index(p, &seq, b, h, i));
        }
    }
}

void fattn_naive_slice_load_saved(const fattn_problem *p, const fattn_buffers *buf,
                                  const fattn_naive_slice *slice, fattn_naive *result)
{
    const int64_t b = slice->b, h = slice->h, first = (b * p->heads_q + h) * p->seqlen_q;
    const fattn_naive_sequence *seq = &slice->seq;
    for (int64_t i = 0; i < seq->rows; i++) {
        load_channels(buf->o, p->dtype_o, row_index(p, seq, &p->o, b, h, i), p->dim_v, 1,
                      result->o + (first + i) * p->dim_v);
        result->lse[first + i] =
            fattn_naive_load(buf->lse, fattn_naive_dtype_lse(p), lse_index(p, seq, b, h, i));
    }
}

/* Clamps a finite bias so that it stays finite in kernels that multiply by log2 e in f32; the
 * contract demands this. */
static double bounded(const fattn_problem *p, double bias)
{
    if (p->dtype == FATTN_F64 || !isfinite(bias)) {
        return bias;
    }
    return fmax(-0x1p126, fmin(bias, 0x1p126));
}

/* slope is FATTN_ALIBI_BIAS's, else 1. -inf stays -inf, whatever the slope. */
static double bias_of(const fattn_problem *p, const fattn_buffers *buf, double slope, int64_t index)
{
    const double bias = bounded(p, fattn_naive_load(buf->bias, p->dtype_bias, index));
    return bias == -(double)INFINITY ? bias : bounded(p, slope * bias);
}

/* The chunk that a position is in, rounded down. */
static int64_t chunk_of(const fattn_problem *p, int64_t position)
{
    return position / p->chunk - (position % p->chunk < 0);
}

/* A bias of -inf is a mask: it hides the pair whatever q.k is. */
static bool is_kept(const fattn_problem *p, const fattn_buffers *buf, const fattn_naive_slice *s,
                    int64_t i, int64_t j)
{
    const int64_t distance = j - (i + s->seq.off);
    if (j < s->seq.start) {
        return false;
    }
    if (p->window_left >= 0 && distance < -p->window_left) {
        return false;
    }
    if (p->window_right >= 0 && distance > p->window_right) {
        return false;
    }
    if ((p->features & FATTN_CHUNK) &&
        chunk_of(p, s->seq.k_offset + j) != chunk_of(p, s->seq.k_offset + s->seq.off + i)) {
        return false;
    }
    if ((p->features & FATTN_MASK) &&
        buf->mask[pair_index(p->mask_stride, s->b, s->h, i, j)] == 0) {
        return false;
    }
    if ((p->features & FATTN_BLOCK_MASK) &&
        buf->block_mask[pair_index(p->block_mask_stride, s->b, s->h, i / p->block_m,
                                   j / p->block_n)] == 0) {
        return false;
    }
    return !(p->features & FATTN_BIAS) ||
           bias_of(p, buf, s->bias_slope, pair_index(p->bias_stride, s->b, s->h, i, j)) !=
               -(double)INFINITY;
}

void fattn_naive_slice_load_row(const fattn_problem *p, const fattn_buffers *buf, int64_t i,
                                fattn_naive_slice *slice)
{
    const fattn_naive_sequence *seq = &slice->seq;
    const int64_t b = slice->b, h = slice->h;
    const bool bias = p->features & FATTN_BIAS, alibi = p->features & FATTN_ALIBI;
    const bool dropout = p->features & FATTN_DROPOUT;
    const double slope = !alibi ? 0
                                : fattn_naive_load(buf->alibi_slopes, fattn_naive_dtype_lse(p),
                                                   b * p->alibi_batch_stride + h);
    const bool sloped = p->features & FATTN_ALIBI_BIAS;
    const int64_t threshold = dropout ? fattn_naive_dropout_threshold(p->dropout_p) : 0;
    uint32_t key[2] = {0, 0};
    slice->bias_slope = sloped ? slope : 1;
    if (dropout) {
        fattn_naive_dropout_key(buf->seed_ptr != NULL ? *buf->seed_ptr : buf->seed,
                                buf->offset_ptr != NULL ? *buf->offset_ptr : buf->offset, key);
    }

    for (int64_t j = 0; j < seq->keys; j++) {
        slice->keep[j] = is_kept(p, buf, slice, i, j);
        if (bias) {
            slice->bias[j] =
                bias_of(p, buf, slice->bias_slope, pair_index(p->bias_stride, b, h, i, j));
        }
        if (alibi && !sloped) {
            slice->alibi[j] = -slope * fabs((double)(i + seq->off - j));
        }
        slice->z[j] = threshold == 0 ? 1
                                     : fattn_naive_dropout(key, threshold, b + p->batch_offset,
                                                           h + p->head_offset, i + seq->q_offset,
                                                           j + seq->k_offset);
    }
}

/* --- The formulas ----------------------------------------------------------------------------- */

/* Scratch for one row. Names that end in _abs hold sums of absolute values. */
typedef struct scratch {
    double *x, *dot_abs;     /* [sk]: scores; sum_c |q_c k_c| */
    double *slope;           /* [sk]: derivative of the softcap: 1 - tanh^2; 1 without one */
    double *slope_abs;       /* [sk]: 1 + tanh^2 */
    double *dp, *dp_abs;     /* [sk]: dO v */
    double *o_abs;           /* [dim_v] */
    double *dq_abs;          /* [dim] */
    double *dk_abs, *dv_abs; /* [sk][dim], [sk][dim_v]: of a kv head */
    double *dbias_abs;       /* like dbias */
    double *dsink_abs;       /* [hq] */
    void *memory;
} scratch;

static fattn_status scratch_create(const fattn_problem *p, const fattn_naive *r, scratch *w)
{
    *w = (scratch){0};
    const int64_t *e = r->bias_extent;
    const bool backward = p->op == FATTN_BACKWARD;
    const int64_t sk = p->batch == 0 || p->heads_q == 0 ? 0 : r->sk;
    const piece pieces[] = {
        {&w->x, {sk, 1, 1, 1}, true},
        {&w->dot_abs, {sk, 1, 1, 1}, true},
        {&w->slope, {sk, 1, 1, 1}, true},
        {&w->slope_abs, {sk, 1, 1, 1}, true},
        {&w->dp, {sk, 1, 1, 1}, backward},
        {&w->dp_abs, {sk, 1, 1, 1}, backward},
        {&w->o_abs, {r->dim_v, 1, 1, 1}, true},
        {&w->dq_abs, {r->dim, 1, 1, 1}, backward},
        {&w->dk_abs, {sk, r->dim, 1, 1}, backward},
        {&w->dv_abs, {sk, r->dim_v, 1, 1}, backward},
        {&w->dbias_abs, {e[0], e[1], e[2], e[3]}, r->dbias != NULL},
        {&w->dsink_abs, {r->heads_q, 1, 1, 1}, r->dsink != NULL},
    };
    return allocate(pieces, sizeof(pieces) / sizeof(pieces[0]), &w->memory);
}

static void clear(double *array, int64_t count)
{
    if (count > 0) {
        memset(array, 0, (size_t)count * sizeof(*array));
    }
}

/* sum[j] = sum_c a_c b_cj over the channels in ascending order, and the same of |a_c b_cj|. */
static void products(const double *a, int64_t channels, const double *b, int64_t keys,
                     double *restrict sum, double *restrict sum_abs)
{
    clear(sum, keys);
    clear(sum_abs, keys);
    for (int64_t c = 0; c < channels; c++, b += keys) {
        for (int64_t j = 0; j < keys; j++) {
            sum[j] += a[c] * b[j];
            sum_abs[j] += fabs(a[c] * b[j]);
        }
    }
}

/* sum += factor * a, sum_abs += factor_abs * |a|. */
static void add(double factor, double factor_abs, const double *a, int64_t channels,
                double *restrict sum, double *restrict sum_abs)
{
    for (int64_t c = 0; c < channels; c++) {
        sum[c] += factor * a[c];
        sum_abs[c] += factor_abs * fabs(a[c]);
    }
}

static void grow(double *maximum, double x)
{
    if (isfinite(x) && fabs(x) > *maximum) {
        *maximum = fabs(x);
    }
}

static void grow_all(double *maximum, const double *x, int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        grow(maximum, x[n]);
    }
}

/* x_ij of the row that the slice holds, with the derivative of the softcap. */
static void scores(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, scratch *w)
{
    const bool capped = p->features & FATTN_SOFTCAP;
    const int64_t keys = s->seq.keys;
    products(s->q + i * p->dim, p->dim, s->kt, keys, w->x, w->dot_abs);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] == 0) {
            continue;
        }
        double x = p->scale * w->x[j], t = 0;
        if (capped) {
            t = tanh(x / p->softcap);
            x = p->softcap * t;
        }
        x += s->bias[j];
        x += s->alibi[j];
        w->x[j] = x;
        w->slope[j] = 1 - t * t;
        w->slope_abs[j] = 1 + t * t;
    }
}

/* A bound on |x_j|: the score formula with all products and summands made absolute. If those
 * overflow under a softcap, the capped value. */
static double score_abs(const fattn_problem *p, const fattn_naive_slice *s, const scratch *w,
                        int64_t j)
{
    const double x = fabs(p->scale) * w->dot_abs[j] + fabs(s->bias[j]) + fabs(s->alibi[j]);
    return isfinite(x) ? x : fabs(w->x[j]);
}

/* lse_i = ln(sum_j exp(x_ij) + exp(sink)), o_i = sum_j Z_ij exp(x_ij - lse_i) v_j. */
static void forward_row(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, scratch *w,
                        fattn_naive *r)
{
    const int64_t slice = s->b * p->heads_q + s->h, row = slice * p->seqlen_q + i;
    const int64_t keys = s->seq.keys;
    scores(p, s, i, w);

    /* Comparisons skip NaN, which reappears in l. A row with only -inf has l = 0. */
    double m = s->sink, scale = 1;
    grow(&scale, s->sink);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] == 0) {
            continue;
        }
        if (w->x[j] > m) {
            m = w->x[j];
        }
        grow(&scale, score_abs(p, s, w, j));
    }
    r->lse_scale[row] = scale;
    if (m == -(double)INFINITY) {
        m = 0;
    }
    double l = exp(s->sink - m);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] != 0) {
            l += exp(w->x[j] - m);
        }
    }
    r->lse[row] = l == 0 ? -(double)INFINITY : m + log(l);
    if (l == 0) {
        return;
    }

    double *o = r->o + row * p->dim_v;
    clear(w->o_abs, p->dim_v);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] == 0) {
            continue;
        }
        const double zp = s->z[j] * (exp(w->x[j] - m) / l); /* exact even if lse absorbs ln(l) */
        add(zp, zp, s->v + j * p->dim_v, p->dim_v, o, w->o_abs);
        grow(&r->x_max[slice], score_abs(p, s, w, j));
    }
    grow(&r->x_max[slice], r->lse[row]);
    grow_all(&r->a_o[slice], w->o_abs, p->dim_v);
}

/* Differentiates forward_row() given o and lse: with p_j = exp(x_j - lse) and the loss L,
 *   o = sum_j z_j p_j v_j   ->  dL/dv_j = z_j p_j dO,  dL/dp_j = z_j dO.v_j
 *   p_j = exp(x_j - lse)    ->  dS_j = dL/dx_j = p_j (z_j dO.v_j - delta),  delta = dO.o - dLSE
 *   x = cap(scale q.k) + bias. */
static void backward_row(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, scratch *w,
                         fattn_naive *r)
{
    const int64_t slice = s->b * p->heads_q + s->h, row = slice * p->seqlen_q + i;
    const int64_t kv = s->b * p->heads_k + s->hk, keys = s->seq.keys, dim = p->dim,
                  dim_v = p->dim_v;
    const double lse = r->lse[row];
    const double *q = s->q + i * dim, *o = r->o + row * dim_v, *dout = s->dout + i * dim_v;
    if (lse == -(double)INFINITY) {
        return;
    } /* an empty row contributes nothing */

    double delta = 0, delta_abs = fabs(s->dlse[i]);
    for (int64_t c = 0; c < dim_v; c++) {
        delta += dout[c] * o[c];
        delta_abs += fabs(dout[c] * o[c]);
    }
    delta -= s->dlse[i];
    grow(&r->x_max[slice], lse);
    if (r->dsink != NULL) {
        const double p_sink = exp(s->sink - lse);
        r->dsink[s->h] -= p_sink * delta;
        w->dsink_abs[s->h] += p_sink * delta_abs;
    }

    scores(p, s, i, w);
    products(dout, dim_v, s->vt, keys, w->dp, w->dp_abs);
    clear(w->dq_abs, dim);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] == 0) {
            continue;
        }
        const int64_t key = kv * p->seqlen_k + j;
        const double prob = exp(w->x[j] - lse), zp = s->z[j] * prob;
        grow(&r->x_max[slice], score_abs(p, s, w, j));
        add(zp, zp, dout, dim_v, r->dv + key * dim_v, w->dv_abs + j * dim_v);

        const double ds = prob * (s->z[j] * w->dp[j] - delta);
        const double ds_abs = prob * (s->z[j] * w->dp_abs[j] + delta_abs);
        if (r->dbias != NULL) {
            const int64_t index = fattn_naive_dbias_index(p, r, s, i, j);
            r->dbias[index] += s->bias_slope * ds;
            w->dbias_abs[index] += fabs(s->bias_slope) * ds_abs;
        }
        const double ddot = p->scale * (ds * w->slope[j]);
        const double ddot_abs = fabs(p->scale) * (ds_abs * w->slope_abs[j]);
        add(ddot, ddot_abs, s->k + j * dim, dim, r->dq + row * dim, w->dq_abs);
        add(ddot, ddot_abs, q, dim, r->dk + key * dim, w->dk_abs + j * dim);
    }
    grow_all(&r->a_dq[slice], w->dq_abs, dim);
}

/* All query heads that read one kv head of one sequence. */
static void run_group(const fattn_problem *p, const fattn_buffers *buf, int64_t b, int64_t hk,
                      bool pure, fattn_naive_slice *s, scratch *w, fattn_naive *r)
{
    const int64_t group = p->heads_q / p->heads_k, kv = b * p->heads_k + hk;
    const bool backward = p->op == FATTN_BACKWARD;
    if (backward) {
        clear(w->dk_abs, p->seqlen_k * p->dim);
        clear(w->dv_abs, p->seqlen_k * p->dim_v);
    }
    for (int64_t h = hk * group; h < (hk + 1) * group; h++) {
        fattn_naive_slice_load(p, buf, b, h, s);
        if (backward && !pure) {
            fattn_naive_slice_load_saved(p, buf, s, r);
        }
        for (int64_t i = 0; i < s->seq.rows; i++) {
            fattn_naive_slice_load_row(p, buf, i, s);
            if (!backward || pure) {
                forward_row(p, s, i, w, r);
            }
            if (backward) {
                backward_row(p, s, i, w, r);
            }
        }
    }
    if (backward) {
        grow_all(&r->a_dk[kv], w->dk_abs, p->seqlen_k * p->dim);
        grow_all(&r->a_dv[kv], w->dv_abs, p->seqlen_k * p->dim_v);
    }
}

static fattn_status run(const fattn_problem *p, const fattn_buffers *buf, bool pure, fattn_naive *r)
{
    fattn_naive_slice slice = {0};
    scratch w = {0};
    fattn_status status = fattn_naive_allocate(p, buf, r);
    if (status == FATTN_OK) {
        status = fattn_naive_slice_create(p, &slice);
    }
    if (status == FATTN_OK) {
        status = scratch_create(p, r, &w);
    }
    if (status == FATTN_OK) {
        for (int64_t b = 0; p->heads_q > 0 && b < p->batch; b++) {
            for (int64_t hk = 0; hk < p->heads_k; hk++) {
                run_group(p, buf, b, hk, pure, &slice, &w, r);
            }
        }

        const int64_t bias_slices = r->bias_extent[0] * r->bias_extent[1];
        const int64_t bias_slice = r->bias_extent[2] * r->bias_extent[3];
        for (int64_t n = 0; n < bias_slices; n++) {
            grow_all(&r->a_dbias[n], w.dbias_abs + n * bias_slice, bias_slice);
        }
        for (int64_t h = 0; r->dsink != NULL && h < p->heads_q; h++) {
            grow(&r->a_dsink[h], w.dsink_abs[h]);
        }
    }
    fattn_memory_free(w.memory);
    fattn_naive_slice_free(&slice);
    if (status != FATTN_OK) {
        fattn_naive_free(r);
    }
    return status;
}

fattn_status fattn_naive_run(const fattn_problem *p, const fattn_buffers *buf, fattn_naive *result)
{
    return run(p, buf, false, result);
}

fattn_status fattn_naive_run_pure(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result)
{
    return run(p, buf, true, result);
}

/* --- Outputs ---------------------------------------------------------------------------------- */

/* Writes a gradient, or adds it to the existing value; either way rounds once. */
static void emit(const fattn_problem *p, void *array, fattn_dtype dtype, int64_t index, double x)
{
    const bool accumulate = p->features & FATTN_ACCUMULATE;
    store(array, dtype, index, accumulate ? fattn_naive_load(array, dtype, index) + x : x);
}

/* Forward always computes o. */
static void write_forward(const fattn_problem *p, const fattn_buffers *buf, const fattn_naive *r)
{
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            for (int64_t i = 0; i < r->sequences[b].rows; i++) {
                const fattn_naive_sequence *seq = &r->sequences[b];
                const int64_t row = (b * p->heads_q + h) * p->seqlen_q + i;
                const int64_t at = row_index(p, seq, &p->o, b, h, i);
                for (int64_t c = 0; c < p->dim_v; c++) {
                    store(buf->o, p->dtype_o, at + c, r->o[row * p->dim_v + c]);
                }
                if (p->outputs & FATTN_OUT_LSE) {
                    store(buf->lse, fattn_naive_dtype_lse(p), lse_index(p, seq, b, h, i),
                          r->lse[row]);
                }
            }
        }
    }
}

static void write_dq(const fattn_problem *p, const fattn_buffers *buf, const fattn_naive *r)
{
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            for (int64_t i = 0; i < r->sequences[b].rows; i++) {
                const int64_t row = (b * p->heads_q + h) * p->seqlen_q + i;
                const int64_t at = row_index(p, &r->sequences[b], &p->dq, b, h, i);
                for (int64_t c = 0; c < p->dim; c++) {
                    emit(p, buf->dq, fattn_naive_dtype_grad(p, p->dtype), at + c,
                         r->dq[row * p->dim + c]);
                }
            }
        }
    }
}

/* dk or dv. Allotted but unused keys get 0, or with FATTN_ACCUMULATE stay as they are. */
static void write_keys(const fattn_problem *p, const fattn_buffers *buf, const fattn_naive *r,
                       const double *dense, int64_t channels, const fattn_strides *stride,
                       fattn_dtype dtype, void *array)
{
    for (int64_t b = 0; b < p->batch; b++) {
        const fattn_naive_sequence *seq = &r->sequences[b];
        const bool adds = p->features & FATTN_ACCUMULATE;
        const int64_t end = adds ? seq->keys : seq->own_keys;
        for (int64_t hk = 0; hk < p->heads_k; hk++) {
            for (int64_t j = adds ? seq->start : 0; j < end; j++) {
                const int64_t key = (b * p->heads_k + hk) * p->seqlen_k + j;
                const int64_t at = key_index(p, buf, seq, stride, b, hk, j);
                for (int64_t c = 0; c < channels; c++) {
                    emit(p, array, fattn_naive_dtype_grad(p, dtype), at + c,
                         j < seq->keys ? dense[key * channels + c] : 0);
                }
            }
        }
    }
}

static void write_dbias(const fattn_problem *p, const fattn_buffers *buf, const fattn_naive *r)
{
    const int64_t *extent = r->bias_extent;
    const double *dense = r->dbias;
    for (int64_t b = 0; b < extent[0]; b++) {
        for (int64_t h = 0; h < extent[1]; h++) {
            for (int64_t i = 0; i < extent[2]; i++) {
                for (int64_t j = 0; j < extent[3]; j++) {
                    emit(p, buf->dbias, fattn_naive_dtype_lse(p),
                         pair_index(p->dbias_stride, b, h, i, j), *dense++);
                }
            }
        }
    }
}

fattn_status fattn_naive_execute(const fattn_problem *p, const fattn_buffers *buf)
{
    fattn_naive r;
    const fattn_status status = fattn_naive_run(p, buf, &r);
    if (status != FATTN_OK) {
        return status;
    }
    if (p->op == FATTN_FORWARD) {
        write_forward(p, buf, &r);
    } else {
        if (p->outputs & FATTN_OUT_DQ) {
            write_dq(p, buf, &r);
        }
        if (p->outputs & FATTN_OUT_DK) {
            write_keys(p, buf, &r, r.dk, p->dim, &p->dk, p->dtype_kv, buf->dk);
        }
        if (p->outputs & FATTN_OUT_DV) {
            write_keys(p, buf, &r, r.dv, p->dim_v, &p->dv, p->dtype_v, buf->dv);
        }
        if (p->outputs & FATTN_OUT_DBIAS) {
            write_dbias(p, buf, &r);
        }
        if (p->outputs & FATTN_OUT_DSINK) {
            for (int64_t h = 0; h < p->heads_q; h++) {
                emit(p, buf->dsink, fattn_naive_dtype_lse(p), h, r.dsink[h]);
            }
        }
    }
    fattn_naive_free(&r);
    return FATTN_OK;
}

/* A row as the softmax sees it, with lse from it alone. */
static void inspect_row(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, scratch *w,
                        const fattn_inspect_args *a)
{
    const double none = -(double)INFINITY;
    double m = s->sink;
    scores(p, s, i, w);
    for (int64_t j = s->seq.start; j < s->seq.keys; j++) {
        if (s->keep[j] != 0 && w->x[j] > m) {
            m = w->x[j];
        }
    }
    m = m == none ? 0 : m;
    double l = exp(s->sink - m);
    for (int64_t j = s->seq.start; j < s->seq.keys; j++) {
        if (s->keep[j] != 0) {
            l += exp(w->x[j] - m);
        }
    }
    for (int64_t j = s->seq.start; j < s->seq.keys; j++) {
        const bool kept = s->keep[j] != 0;
        const double x = kept ? w->x[j] : none, prob = kept && l != 0 ? exp(w->x[j] - m) / l : 0;
        store(a->to, fattn_naive_dtype_lse(p), pair_index(a->stride, s->b, s->h, i, j),
              a->what == FATTN_SCORES ? x : prob);
    }
}

fattn_status fattn_naive_inspect(const fattn_problem *p, const fattn_buffers *buf,
                                 const fattn_inspect_args *a)
{
    fattn_naive r = {.sk = p->seqlen_k, .dim = p->dim, .dim_v = p->dim_v, .heads_q = p->heads_q};
    fattn_naive_slice slice = {0};
    scratch w = {0};
    fattn_status status = fattn_naive_slice_create(p, &slice);
    if (status == FATTN_OK) {
        status = scratch_create(p, &r, &w);
    }
    for (int64_t b = 0; status == FATTN_OK && p->seqlen_q > 0 && b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            fattn_naive_slice_load(p, buf, b, h, &slice);
            for (int64_t i = 0; i < slice.seq.rows; i++) {
                fattn_naive_slice_load_row(p, buf, i, &slice);
                inspect_row(p, &slice, i, &w, a);
            }
        }
    }
    fattn_naive_slice_free(&slice);
    fattn_memory_free(w.memory);
    return status;
}
