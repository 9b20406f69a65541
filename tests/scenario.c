/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/scenario.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/dtype.h"
#include "core/problem.h"
#include "tests/random.h"
#include "tests/strip.h"

const char *const trait_names[TRAITS] = {
    "causal",    "window",    "top-left", "scale",   "softcap", "bias",       "alibi",
    "mask",      "block",     "sink",     "dropout", "cu_q",    "cu_k",       "seqused_q",
    "seqused_k", "positions", "gqa",      "Dv != D", "dlse",    "accumulate", "strided",
};

double scenario_random(uint64_t *state)
{
    return (double)(int64_t)(random_next(state) >> 11) / (double)(INT64_C(1) << 52) - 1;
}

double tensor_get(const tensor *t, int64_t n)
{
    const void *const room = t->room;
    switch (t->dtype) {
    case FATTN_F32: return (double)((const float *)room)[n];
    case FATTN_F16: return (double)fattn_f16_to_f32(((const uint16_t *)room)[n]);
    case FATTN_BF16: return (double)fattn_bf16_to_f32(((const uint16_t *)room)[n]);
    default: return t->room[n];
    }
}

void tensor_set(tensor *t, int64_t n, double x)
{
    void *const room = t->room;
    switch (t->dtype) {
    case FATTN_F32: ((float *)room)[n] = (float)x; break;
    case FATTN_F16: ((uint16_t *)room)[n] = fattn_f16_from_f64(x); break;
    case FATTN_BF16: ((uint16_t *)room)[n] = fattn_bf16_from_f64(x); break;
    default: t->room[n] = x;
    }
}

static void tensor_create(tensor *t, fattn_dtype dtype, int64_t count)
{
    assert(count <= SCENARIO_ROOM);
    t->dtype = dtype;
    t->count = count;
}

static void tensor_fill(tensor *t, double size, uint64_t *state)
{
    for (int64_t n = 0; n < t->count; n++) tensor_set(t, n, size * scenario_random(state));
}

static void set_mask(uint8_t *mask, int64_t count, uint64_t *state)
{
    assert(count <= SCENARIO_ROOM);
    for (int64_t n = 0; n < count; n++) mask[n] = scenario_random(state) > -0.4 ? 1 + n % 255 : 0;
}

/* (batch, row, head, channel), or with gaps (batch, head, row, channel). Returns the elements. */
static int64_t lay_out(fattn_strides *stride, bool packed, bool gaps, int64_t rows, int64_t heads,
                       int64_t channels)
{
    if (gaps)
        *stride = (fattn_strides){.seq = channels + 1, .head = rows * (channels + 1) + 2};
    else
        *stride = (fattn_strides){.seq = heads * channels, .head = channels};
    const int64_t entry = gaps ? heads * stride->head : rows * stride->seq;
    stride->batch = packed ? 0 : entry;
    return packed ? entry : SCENARIO_BATCH * entry;
}

static void set_lengths(scenario *s, uint32_t traits, fattn_problem *p)
{
    const int32_t sq = (int32_t)p->seqlen_q, sk = (int32_t)p->seqlen_k;
    const int32_t cu_q[] = {0, sq - 2, 2 * sq - 2}, cu_k[] = {1, sk + 1, 2 * sk - 1};
    memcpy(s->cu_q, cu_q, sizeof(cu_q));
    memcpy(s->cu_k, cu_k, sizeof(cu_k));
    p->total_q = 2 * sq - 1; /* the last row and the first key belong to no sequence */
    p->total_k = 2 * sk;
    const bool packed_q = traits & 1u << CU_Q, packed_k = traits & 1u << CU_K;
    s->used_q[0] = packed_q ? sq - 2 : sq - 1;
    s->used_q[1] = packed_q ? sq - 1 : sq;
    s->used_k[0] = sk;
    s->used_k[1] = packed_k ? sk - 3 : sk - 2;
    s->q_offsets[0] = 3, s->q_offsets[1] = 17;
    s->k_offsets[0] = 2, s->k_offsets[1] = 16;
    s->buffers.whole_q = sq + 4;
    s->buffers.whole_k = sk + 5;
}

static void set_options(scenario *s, uint32_t traits, unsigned bias_flat, fattn_problem *p)
{
    static const uint64_t bits[TRAITS] = {
        [CAUSAL] = FATTN_CAUSAL,    [WINDOW] = FATTN_WINDOW,     [SCALE] = FATTN_SCALE,
        [SOFTCAP] = FATTN_SOFTCAP,  [BIAS] = FATTN_BIAS,         [ALIBI] = FATTN_ALIBI,
        [MASK] = FATTN_MASK,        [SINK] = FATTN_SINK,         [BLOCK_MASK] = FATTN_BLOCK_MASK,
        [DROPOUT] = FATTN_DROPOUT,  [CU_Q] = FATTN_CU_SEQLENS_Q, [CU_K] = FATTN_CU_SEQLENS_K,
        [USED_Q] = FATTN_SEQUSED_Q, [USED_K] = FATTN_SEQUSED_K,  [POSITIONS] = FATTN_POSITIONS,
    };
    for (int t = 0; t < TRAITS; t++)
        if (traits & 1u << t) p->features |= bits[t];
    p->batch = SCENARIO_BATCH;
    p->heads_q = traits & 1u << GQA ? 4 : 2;
    p->heads_k = 2;
    p->dim = 3;
    p->dim_v = traits & 1u << DIM_V ? 4 : 3;
    p->anchor = traits & 1u << TOP_LEFT ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
    p->layout = FATTN_STRIDED;
    p->window_left = 2, p->window_right = 1;
    p->scale = -0.8;
    p->softcap = 0.9;
    p->dropout_p = 0.3;
    p->batch_offset = 5, p->head_offset = 7;
    p->alibi_batch_stride = p->heads_q;
    p->block_m = 2, p->block_n = 3;
    s->buffers.seed = UINT64_C(0x0123456789abcdef), s->buffers.offset = 11;

    const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    const int64_t blocks[4] = {p->batch, p->heads_q, (p->seqlen_q + 1) / 2, (p->seqlen_k + 2) / 3};
    int64_t bias = 1, mask = 1, block = 1;
    for (int axis = 3; axis >= 0; axis--) {
        const bool flat = bias_flat >> axis & 1;
        p->bias_stride[axis] = p->dbias_stride[axis] = flat ? 0 : bias;
        p->mask_stride[axis] = axis == 1 ? 0 : mask; /* one mask for all heads */
        p->block_mask_stride[axis] = axis == 0 ? 0 : block;
        bias *= flat ? 1 : extent[axis];
        mask *= axis == 1 ? 1 : extent[axis];
        block *= axis == 0 ? 1 : blocks[axis];
    }
    s->tensors[BIAS_IN].count = s->tensors[DBIAS].count = bias;
    uint64_t state = bias_flat + traits;
    set_mask(s->mask, mask, &state);
    set_mask(s->block_mask, block, &state);
}

static void set_tensors(scenario *s, uint32_t traits, fattn_problem *p, uint64_t seed)
{
    const bool packed_q = traits & 1u << CU_Q, packed_k = traits & 1u << CU_K;
    const bool gaps = traits & 1u << STRIDED;
    const fattn_dtype dtype = p->dtype, f32 = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_dtype grad = traits & 1u << ACCUMULATE ? f32 : dtype;
    const int64_t rows = packed_q ? p->total_q : p->seqlen_q;
    const int64_t keys = packed_k ? p->total_k : p->seqlen_k;
    const int64_t lse = p->heads_q * rows * (packed_q ? 1 : p->batch);
    const int64_t q = lay_out(&p->q, packed_q, gaps, rows, p->heads_q, p->dim);
    const int64_t k = lay_out(&p->k, packed_k, gaps, keys, p->heads_k, p->dim);
    const int64_t v = lay_out(&p->v, packed_k, gaps, keys, p->heads_k, p->dim_v);
    const int64_t o = lay_out(&p->o, packed_q, gaps, rows, p->heads_q, p->dim_v);
    p->dq = p->q, p->dk = p->k, p->dv = p->v, p->dout = p->o;

    const int64_t bias = s->tensors[BIAS_IN].count;
    const struct {
        fattn_dtype dtype;
        int64_t count;
        double size; /* of its initial values */
    } table[TENSORS] = {
        [Q] = {dtype, q, 1.5},
        [K] = {dtype, k, 1.5},
        [V] = {dtype, v, 1},
        [O] = {dtype, o, 0},
        [LSE] = {f32, lse, 0},
        [DOUT] = {dtype, o, 1},
        [DLSE_IN] = {f32, lse, 1},
        [DQ] = {grad, q, 0},
        [DK] = {grad, k, 0},
        [DV] = {grad, v, 0},
        [DBIAS] = {f32, bias, 0},
        [DSINK] = {f32, p->heads_q, 0},
        [BIAS_IN] = {f32, bias, 1},
        [SINK_IN] = {f32, p->heads_q, 1},
        [SLOPES] = {f32, p->batch * p->heads_q, 0.3},
    };
    uint64_t state = seed;
    for (int t = 0; t < TENSORS; t++) {
        const bool gradient = t >= DQ && t <= DSINK;
        tensor_create(&s->tensors[t], table[t].dtype, table[t].count);
        tensor_fill(&s->tensors[t], gradient && traits & 1u << ACCUMULATE ? 1 : table[t].size,
                    &state);
    }
}

static void set_pointers(scenario *s, uint32_t traits)
{
    fattn_buffers *const b = &s->buffers;
    tensor *const t = s->tensors;
    b->q = t[Q].room, b->k = t[K].room, b->v = t[V].room;
    b->o = t[O].room, b->lse = t[LSE].room;
    b->dout = t[DOUT].room, b->dlse = t[DLSE_IN].room;
    b->dq = t[DQ].room, b->dk = t[DK].room, b->dv = t[DV].room;
    b->dbias = t[DBIAS].room, b->dsink = t[DSINK].room;
    b->bias = t[BIAS_IN].room, b->sink = t[SINK_IN].room, b->alibi_slopes = t[SLOPES].room;
    b->mask = s->mask, b->block_mask = s->block_mask;
    b->cu_seqlens_q = s->cu_q, b->cu_seqlens_k = s->cu_k;
    b->seqused_q = s->used_q, b->seqused_k = s->used_k;
    if (traits & 1u << POSITIONS) b->q_offsets = s->q_offsets, b->k_offsets = s->k_offsets;
}

bool scenario_create(scenario *s, uint32_t traits, unsigned bias_flat, fattn_dtype dtype,
                     int64_t sq, int64_t sk, uint64_t seed)
{
    fattn_problem p;
    memset(s, 0, sizeof(*s));
    fattn_problem_init(&p);
    fattn_buffers_init(&s->buffers);
    p.dtype = dtype;
    p.seqlen_q = sq;
    p.seqlen_k = sk;
    p.pointer_alignment = 8;
    set_options(s, traits, bias_flat, &p);
    set_lengths(s, traits, &p);
    set_tensors(s, traits, &p, seed);
    set_pointers(s, traits);

    strip_problem(&p);
    s->forward = s->backward = p;
    s->forward.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    s->backward.op = FATTN_BACKWARD;
    s->backward.features |=
        (traits & 1u << DLSE ? FATTN_DLSE : 0) | (traits & 1u << ACCUMULATE ? FATTN_ACCUMULATE : 0);
    s->backward.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV |
                          (traits & 1u << BIAS ? FATTN_OUT_DBIAS : 0) |
                          (traits & 1u << SINK ? FATTN_OUT_DSINK : 0);
    const bool legal =
        fattn_problem_normalise(&s->forward, &s->forward) == FATTN_OK &&
        fattn_problem_normalise(&s->backward, &s->backward) == FATTN_OK &&
        fattn_buffers_normalise(&s->forward, &s->buffers, &s->buffers) == FATTN_OK &&
        fattn_buffers_normalise(&s->backward, &s->buffers, &s->buffers) == FATTN_OK &&
        fattn_buffers_validate(&s->backward, &s->buffers) == FATTN_OK;
    if (!legal) printf("# refused: %s\n", fattn_last_reason());
    return legal;
}

void scenario_name(uint32_t traits, unsigned bias_flat, char *text, size_t size)
{
    size_t length = 0;
    text[0] = 0;
    for (int t = 0; t < TRAITS && length < size; t++)
        if (traits & 1u << t)
            length += (size_t)snprintf(text + length, size - length, "%s%s",
                                       length > 0 ? " + " : "", trait_names[t]);
    if (traits & 1u << BIAS && bias_flat != 0 && length < size)
        snprintf(text + length, size - length, " flat along%s%s%s%s", bias_flat & 1 ? " batch" : "",
                 bias_flat & 2 ? " head" : "", bias_flat & 4 ? " query" : "",
                 bias_flat & 8 ? " key" : "");
}
