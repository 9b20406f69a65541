/* SPDX-License-Identifier: Apache-2.0 */
/* Gives a case its memory: lays out the operands, poisons everything, then fills in the values. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "tools/judge/random_case.h"

static const struct {
    const char *name;
    size_t offset; /* in fattn_buffers */
    int64_t size;  /* bytes per element; 0: the dtype's size */
} operands[DRAW_IDS] = {
    {"q", offsetof(fattn_buffers, q), 0},
    {"k", offsetof(fattn_buffers, k), 0},
    {"v", offsetof(fattn_buffers, v), 0},
    {"o", offsetof(fattn_buffers, o), 0},
    {"lse", offsetof(fattn_buffers, lse), 0},
    {"dout", offsetof(fattn_buffers, dout), 0},
    {"dlse", offsetof(fattn_buffers, dlse), 0},
    {"dq", offsetof(fattn_buffers, dq), 0},
    {"dk", offsetof(fattn_buffers, dk), 0},
    {"dv", offsetof(fattn_buffers, dv), 0},
    {"dbias", offsetof(fattn_buffers, dbias), 0},
    {"dsink", offsetof(fattn_buffers, dsink), 0},
    {"bias", offsetof(fattn_buffers, bias), 0},
    {"mask", offsetof(fattn_buffers, mask), 1},
    {"block_mask", offsetof(fattn_buffers, block_mask), 1},
    {"alibi_slopes", offsetof(fattn_buffers, alibi_slopes), 0},
    {"sink", offsetof(fattn_buffers, sink), 0},
    {"cu_seqlens_q", offsetof(fattn_buffers, cu_seqlens_q), 4},
    {"cu_seqlens_k", offsetof(fattn_buffers, cu_seqlens_k), 4},
    {"seqused_q", offsetof(fattn_buffers, seqused_q), 4},
    {"seqused_k", offsetof(fattn_buffers, seqused_k), 4},
    {"block_table", offsetof(fattn_buffers, block_table), 4},
    {"q_offsets", offsetof(fattn_buffers, q_offsets), 8},
    {"k_offsets", offsetof(fattn_buffers, k_offsets), 8},
    {"wholes_q", offsetof(fattn_buffers, wholes_q), 8},
    {"wholes_k", offsetof(fattn_buffers, wholes_k), 8},
    {"seed_ptr", offsetof(fattn_buffers, seed_ptr), 8},
    {"offset_ptr", offsetof(fattn_buffers, offset_ptr), 8},
    {"seqstart_k", offsetof(fattn_buffers, seqstart_k), 4},
    {"k_descale", offsetof(fattn_buffers, k_descale), 0},
    {"v_descale", offsetof(fattn_buffers, v_descale), 0},
};

const char *draw_name(draw_id id) { return operands[id].name; }

void *draw_pointer(fattn_buffers *buffers, draw_id id)
{
    void *pointer;
    memcpy(&pointer, (char *)buffers + operands[id].offset, sizeof pointer);
    return pointer;
}

void draw_point(fattn_buffers *buffers, draw_id id, void *pointer)
{
    memcpy((char *)buffers + operands[id].offset, &pointer, sizeof pointer);
}

/* -------------------------------------------------------------------------------------------------
 * Which operands there are
 * ---------------------------------------------------------------------------------------------- */

static void declare(draw_case *c, draw_id id, bool present, fattn_dtype dtype, int64_t e0,
                    int64_t e1, int64_t e2, int64_t e3)
{
    draw_tensor *const t = &c->tensors[id];
    t->present = present;
    t->dtype = operands[id].size ? (fattn_dtype)0 : dtype;
    t->size = operands[id].size ? operands[id].size : fattn_dtype_size(dtype);
    t->extent[0] = e0, t->extent[1] = e1, t->extent[2] = e2, t->extent[3] = e3;
}

static bool has(const draw_case *c, uint64_t feature)
{
    return (c->problem.features & feature) != 0;
}

/* An output has memory if it is requested, or if the case passes pointers to unrequested outputs,
 * which must be ignored. */
static bool writes(const draw_case *c, fattn_op op, uint32_t output)
{
    const uint32_t usual =
        op == FATTN_FORWARD ? FATTN_OUT_O : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    const uint32_t wanted = c->problem.outputs ? c->problem.outputs : usual;
    return c->problem.op == op && (wanted & output || c->pass_unwanted);
}

static void declare_tensors(draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    const bool backward = p->op == FATTN_BACKWARD;
    const bool paged = has(c, FATTN_PAGED);
    const fattn_dtype f32 = p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_dtype out = p->dtype_o ? p->dtype_o : p->dtype;
    const fattn_dtype type_k = p->dtype_kv ? p->dtype_kv : p->dtype;
    const fattn_dtype type_v = p->dtype_v ? p->dtype_v : type_k;
    const bool sums = has(c, FATTN_ACCUMULATE);
    const int64_t qb = has(c, FATTN_CU_SEQLENS_Q) ? 1 : p->batch;
    const int64_t qs = has(c, FATTN_CU_SEQLENS_Q) ? p->total_q : p->seqlen_q;
    const int64_t kb = paged ? p->num_pages : has(c, FATTN_CU_SEQLENS_K) ? 1 : p->batch;
    const int64_t ks = paged ? p->page_size : has(c, FATTN_CU_SEQLENS_K) ? p->total_k : p->seqlen_k;
    const int64_t hq = p->heads_q, hk = p->heads_k, d = p->dim, dv = p->dim_v;

    declare(c, DRAW_Q, true, p->dtype, qb, qs, hq, d);
    declare(c, DRAW_K, true, type_k, kb, ks, hk, d);
    declare(c, DRAW_V, true, type_v, kb, ks, hk, dv);
    declare(c, DRAW_O, backward || writes(c, FATTN_FORWARD, FATTN_OUT_O), out, qb, qs, hq, dv);
    declare(c, DRAW_LSE, backward || writes(c, FATTN_FORWARD, FATTN_OUT_LSE), f32, qb, qs, hq, 1);
    declare(c, DRAW_DOUT, backward, out, qb, qs, hq, dv);
    declare(c, DRAW_DLSE, has(c, FATTN_DLSE), f32, qb, qs, hq, 1);
    declare(c, DRAW_DQ, writes(c, FATTN_BACKWARD, FATTN_OUT_DQ), sums ? f32 : p->dtype, qb, qs, hq,
            d);
    declare(c, DRAW_DK, writes(c, FATTN_BACKWARD, FATTN_OUT_DK), sums ? f32 : type_k, kb, ks, hk,
            d);
    declare(c, DRAW_DV, writes(c, FATTN_BACKWARD, FATTN_OUT_DV), sums ? f32 : type_v, kb, ks, hk,
            dv);
    declare(c, DRAW_DBIAS, has(c, FATTN_BIAS) && writes(c, FATTN_BACKWARD, FATTN_OUT_DBIAS), f32,
            p->batch, hq, p->seqlen_q, p->seqlen_k);
    declare(c, DRAW_DSINK, has(c, FATTN_SINK) && writes(c, FATTN_BACKWARD, FATTN_OUT_DSINK), f32, 1,
            hq, 1, 1);
}

static void declare_options(draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    const int64_t b = p->batch, hq = p->heads_q, sq = p->seqlen_q, sk = p->seqlen_k;
    const fattn_dtype f32 = p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const int64_t bm = p->block_m, bn = p->block_n;
    declare(c, DRAW_BIAS, has(c, FATTN_BIAS), p->dtype_bias ? p->dtype_bias : f32, b, hq, sq, sk);
    declare(c, DRAW_MASK, has(c, FATTN_MASK), f32, b, hq, sq, sk);
    if (has(c, FATTN_BLOCK_MASK)) {
        declare(c, DRAW_BLOCK_MASK, true, f32, b, hq, (sq + bm - 1) / bm, (sk + bn - 1) / bn);
    }
    declare(c, DRAW_SLOPES, has(c, FATTN_ALIBI), f32, p->alibi_batch_stride ? b : 1, hq, 1, 1);
    declare(c, DRAW_SINK, has(c, FATTN_SINK), f32, 1, hq, 1, 1);
    declare(c, DRAW_TABLE, has(c, FATTN_PAGED), f32, b, p->max_pages, 1, 1);

    const bool positions = has(c, FATTN_POSITIONS) && c->position_arrays;
    const bool seeds = has(c, FATTN_DROPOUT) && c->seed_pointers;
    declare(c, DRAW_CU_Q, has(c, FATTN_CU_SEQLENS_Q), f32, 1, b + 1, 1, 1);
    declare(c, DRAW_CU_K, has(c, FATTN_CU_SEQLENS_K), f32, 1, b + 1, 1, 1);
    declare(c, DRAW_USED_Q, has(c, FATTN_SEQUSED_Q), f32, 1, b, 1, 1);
    declare(c, DRAW_USED_K, has(c, FATTN_SEQUSED_K), f32, 1, b, 1, 1);
    declare(c, DRAW_START_K, has(c, FATTN_SEQSTART_K), f32, 1, b, 1, 1);
    declare(c, DRAW_K_DESCALE, has(c, FATTN_DESCALE), f32, b, p->heads_k, 1, 1);
    declare(c, DRAW_V_DESCALE, has(c, FATTN_DESCALE), f32, b, p->heads_k, 1, 1);
    for (draw_id id = DRAW_Q_OFFSETS; id <= DRAW_WHOLES_K; id++) {
        declare(c, id, positions, f32, 1, b, 1, 1);
    }
    declare(c, DRAW_SEED, seeds, f32, 1, 1, 1, 1);
    declare(c, DRAW_OFFSET, seeds, f32, 1, 1, 1, 1);
}

/* -------------------------------------------------------------------------------------------------
 * Sizes that follow from the lengths
 * ---------------------------------------------------------------------------------------------- */

/* Packed tensors have unused rows at both ends, and behind each sequence that does not use all of
 * its rows. */
static void pack_sequences(draw_case *c, draw_rng *rng)
{
    fattn_problem *const p = &c->problem;
    int64_t row = c->lead + draw_between(rng, 0, 2), key = c->lead + draw_between(rng, 0, 2);
    for (int64_t b = 0; b < p->batch; b++) {
        draw_sequence *const s = &c->sequences[b];
        s->first_row = has(c, FATTN_CU_SEQLENS_Q) ? row : 0;
        s->first_key = has(c, FATTN_CU_SEQLENS_K) ? key : 0;
        row += s->own_rows;
        key += s->own_keys;
    }
    if (has(c, FATTN_CU_SEQLENS_Q)) {
        p->total_q = row + draw_between(rng, 0, 2);
    }
    if (has(c, FATTN_CU_SEQLENS_K)) {
        p->total_k = key + draw_between(rng, 0, 2);
    }
}

static int64_t pages_of(const draw_case *c, int64_t keys)
{
    return (keys + c->problem.page_size - 1) / c->problem.page_size;
}

static void count_pages(draw_case *c, draw_rng *rng)
{
    fattn_problem *const p = &c->problem;
    p->num_pages = c->page_slack;
    for (int64_t b = 0; b < p->batch; b++) {
        p->num_pages += pages_of(c, c->sequences[b].keys);
    }
    p->max_pages = pages_of(c, p->seqlen_k) + draw_between(rng, 0, 2);
    p->block_table_stride = draw_chance(rng, 2) ? 0 : p->max_pages + draw_between(rng, 0, 3);
}

/* -------------------------------------------------------------------------------------------------
 * Layout
 * ---------------------------------------------------------------------------------------------- */

/* Sets strides for axes from the innermost outwards; -1 ends the list. Each axis is padded by at
 * most `gap` elements. */
static void lay_out(draw_tensor *t, const int axes[4], int64_t gap, draw_rng *rng)
{
    int64_t stride = 1;
    for (int n = 0; n < 4 && axes[n] >= 0; n++) {
        const int axis = axes[n];
        const bool channel = n == 0;
        t->stride[axis] = t->flat[axis] && !channel ? 0 : stride;
        if (t->stride[axis] != 0 && t->extent[axis] > 1) {
            stride = stride * t->extent[axis] + draw_between(rng, 0, gap);
        } else if (t->extent[axis] == 1 && gap > 0 && !channel && draw_chance(rng, 8)) {
            t->stride[axis] = INT64_C(1) << 40; /* of an axis with one entry */
        }
    }
}

static void shuffle(int axes[], int count, draw_rng *rng)
{
    for (int n = count - 1; n > 0; n--) {
        const int other = (int)draw_between(rng, 0, n), axis = axes[n];
        axes[n] = axes[other];
        axes[other] = axis;
    }
}

/* Number of elements from the first one to the last one. */
static int64_t span(const draw_tensor *t)
{
    int64_t last = 0;
    for (int axis = 0; axis < 4; axis++) {
        if (t->extent[axis] == 0) {
            return 0;
        }
        last += (t->extent[axis] - 1) * t->stride[axis];
    }
    return last + 1;
}

static int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

/* Fills memory with values that must not influence a result. Outputs begin as a NaN with a bit
 * pattern that no operation produces. */
static void poison(draw_image *image, fattn_dtype dtype, int64_t size, bool clean)
{
    const double values[] = {NAN, INFINITY, -INFINITY, NAN};
    memset(image->bytes, image->output ? 0xff : clean ? 0 : 0x80, (size_t)image->size);
    for (int64_t n = 0; dtype && !clean && !image->output && n < image->size / size; n++) {
        fattn_dtype_store(dtype, image->bytes, n, values[n % 4]);
    }
}

/* Adds an image with this operand's element type. */
static int add_image(draw_case *c, int64_t bytes, draw_id id, bool output)
{
    draw_image *const image = &c->images[c->image_count];
    image->size = round_up(bytes + 2 * DRAW_RING, DRAW_RING);
    image->bytes = aligned_alloc(DRAW_RING, (size_t)image->size);
    if (image->bytes == NULL) {
        return -1;
    }
    c->image_count++;
    image->output = output;
    poison(image, c->tensors[id].dtype, c->tensors[id].size, c->clean);
    return 0;
}

/* An offset with the promised alignment, and half of the time with no better one. */
static int64_t misalign(const draw_case *c, draw_id id, int64_t size, draw_rng *rng)
{
    const bool tensor = id <= DRAW_DV && id != DRAW_LSE && id != DRAW_DLSE;
    const int64_t promised =
        tensor && c->problem.pointer_alignment > size ? c->problem.pointer_alignment : size;
    return promised * draw_between(rng, 0, 3);
}

static int place_alone(draw_case *c, draw_id id, draw_rng *rng)
{
    draw_tensor *const t = &c->tensors[id];
    const bool output = c->problem.op == FATTN_FORWARD ? id == DRAW_O || id == DRAW_LSE
                                                       : id >= DRAW_DQ && id <= DRAW_DSINK;
    const int64_t extra = misalign(c, id, t->size, rng);
    t->image = c->image_count;
    t->offset = DRAW_RING + extra;
    return add_image(c, extra + span(t) * t->size, id, output);
}

/* Places tensors as slices of one array, (batch, row, [a heads | b heads | ...]). They have the
 * same rows. */
static int place_packed(draw_case *c, const draw_id ids[], int count, draw_rng *rng)
{
    const draw_tensor *const first = &c->tensors[ids[0]];
    const int64_t size = first->size;
    const int64_t align =
        c->problem.pointer_alignment > size ? c->problem.pointer_alignment / size : 1;
    const int64_t extra = misalign(c, ids[0], size, rng);
    int64_t width = 0;
    for (int n = 0; n < count; n++) {
        draw_tensor *const t = &c->tensors[ids[n]];
        t->stride[3] = 1;
        t->stride[2] = t->extent[3];
        t->image = c->image_count;
        t->offset = DRAW_RING + extra + width * size;
        width += round_up(t->extent[2] * t->extent[3], align);
    }
    width += draw_between(rng, 0, 5);
    for (int n = 0; n < count; n++) {
        c->tensors[ids[n]].stride[1] = width;
        c->tensors[ids[n]].stride[0] = width * first->extent[1];
    }
    return add_image(c, extra + width * first->extent[0] * first->extent[1] * size, ids[0],
                     ids[0] >= DRAW_DQ);
}

/* Packs q k v, and dq dk dv, if they have the same rows; otherwise k v alone. Marks what it
 * placed. */
static int place_slices(draw_case *c, bool placed[DRAW_IDS], draw_rng *rng)
{
    static const draw_id groups[2][3] = {{DRAW_Q, DRAW_K, DRAW_V}, {DRAW_DQ, DRAW_DK, DRAW_DV}};
    for (int n = 0; n < 2; n++) {
        const draw_tensor *const q = &c->tensors[groups[n][0]],
                                 *const k = &c->tensors[groups[n][1]],
                                 *const v = &c->tensors[groups[n][2]];
        if (!k->present || !v->present) {
            continue;
        }
        const bool all = q->present && q->extent[0] == k->extent[0] && q->extent[1] == k->extent[1];
        if (place_packed(c, groups[n] + !all, all ? 3 : 2, rng)) {
            return -1;
        }
        for (int m = !all; m < 3; m++) {
            placed[groups[n][m]] = true;
        }
    }
    return 0;
}

bool draw_has_v_in_k(const draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    const fattn_dtype type_k = p->dtype_kv ? p->dtype_kv : p->dtype;
    const fattn_dtype type_v = p->dtype_v ? p->dtype_v : type_k;
    return c->v_in_k && !c->packed && p->layout == FATTN_STRIDED && p->dim_v <= p->dim &&
           type_v == type_k;
}

/* Strides of the tensors that follow problem.layout. */
static void stride_tensor(draw_case *c, draw_id id, draw_rng *rng)
{
    static const int orders[2][4] = {{3, 2, 1, 0}, {3, 1, 2, 0}};
    draw_tensor *const t = &c->tensors[id];
    if (c->problem.layout != FATTN_STRIDED) {
        memset(t->flat, 0, sizeof t->flat);
        lay_out(t, orders[c->problem.layout == FATTN_BHSD], 0, rng);
        return;
    }
    int axes[4] = {3, 0, 1, 2};
    shuffle(axes + 1, 3, rng);
    lay_out(t, axes, c->aligned_rows ? 0 : draw_between(rng, 0, 1) * 9, rng);
}

static void stride_scores(draw_case *c, draw_id id, draw_rng *rng)
{
    int axes[4] = {0, 1, 2, 3};
    if (draw_chance(rng, 2)) {
        axes[0] = 3, axes[1] = 2, axes[2] = 1, axes[3] = 0;
    } else {
        shuffle(axes, 4, rng);
    }
    draw_tensor *const t = &c->tensors[id];
    const bool flat = t->flat[axes[0]];
    lay_out(t, axes, draw_chance(rng, 2) ? 7 : 0, rng);
    t->stride[axes[0]] = flat ? 0 : t->stride[axes[0]];
    for (int axis = 0; axis < 4; axis++) { /* dbias: a broadcast axis has one entry */
        if (id == DRAW_DBIAS && t->stride[axis] == 0) {
            t->extent[axis] = 1;
        }
    }
}

static void stride_lists(draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    for (int id = 0; id < DRAW_IDS; id++) {
        draw_tensor *const t = &c->tensors[id];
        t->stride[1] = 1;
        switch (id) {
        case DRAW_LSE:
        case DRAW_DLSE:
            t->stride[2] = t->extent[1];
            t->stride[0] = t->extent[1] * t->extent[2];
            break;
        case DRAW_SLOPES:
            t->stride[0] = p->alibi_batch_stride > 0 ? p->alibi_batch_stride : 0;
            break;
        case DRAW_K_DESCALE:
        case DRAW_V_DESCALE:
            t->stride[0] = p->descale_stride[0];
            t->stride[1] = p->descale_stride[1];
            break;
        case DRAW_TABLE:
            t->stride[0] = p->block_table_stride ? p->block_table_stride : p->max_pages;
            break;
        default: break;
        }
    }
}

static int place(draw_case *c, draw_rng *rng)
{
    static const draw_id tensors[] = {DRAW_Q,    DRAW_K,  DRAW_V,  DRAW_O,
                                      DRAW_DOUT, DRAW_DQ, DRAW_DK, DRAW_DV};
    static const draw_id scores[] = {DRAW_BIAS, DRAW_MASK, DRAW_BLOCK_MASK, DRAW_DBIAS};
    bool placed[DRAW_IDS] = {false};
    stride_lists(c);
    for (size_t n = 0; n < sizeof tensors / sizeof *tensors; n++) {
        const bool input = tensors[n] <= DRAW_V || tensors[n] == DRAW_DOUT;
        if (!input) {
            memset(c->tensors[tensors[n]].flat, 0, sizeof c->tensors[0].flat);
        }
        stride_tensor(c, tensors[n], rng);
    }
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++) {
        if (c->tensors[scores[n]].present) {
            stride_scores(c, scores[n], rng);
        }
    }
    if (c->packed && c->problem.layout == FATTN_STRIDED && !has(c, FATTN_PAGED) &&
        place_slices(c, placed, rng)) {
        return -1;
    }
    const bool v_in_k = draw_has_v_in_k(c);
    for (int id = 0; id < DRAW_IDS; id++) {
        const bool alone = c->tensors[id].present && !placed[id] && !(v_in_k && id == DRAW_V);
        if (alone && place_alone(c, (draw_id)id, rng)) {
            return -1;
        }
    }
    if (v_in_k) {
        const draw_tensor *const k = &c->tensors[DRAW_K];
        draw_tensor *const v = &c->tensors[DRAW_V];
        memcpy(v->stride, k->stride, sizeof v->stride);
        v->image = k->image;
        v->offset = k->offset;
    }
    return 0;
}

/* -------------------------------------------------------------------------------------------------
 * Elements
 * ---------------------------------------------------------------------------------------------- */

static bool has_rows_of_q(draw_id id)
{
    return id == DRAW_Q || id == DRAW_DQ || (id >= DRAW_O && id <= DRAW_DLSE);
}

int64_t draw_at(const draw_case *c, draw_id id, int64_t b, int64_t s, int64_t h, int64_t channel)
{
    const draw_tensor *const t = &c->tensors[id];
    if (has_rows_of_q(id) && has(c, FATTN_CU_SEQLENS_Q)) {
        s += c->sequences[b].first_row;
        b = 0;
    } else if (id == DRAW_K || id == DRAW_V || id == DRAW_DK || id == DRAW_DV) {
        if (has(c, FATTN_PAGED)) {
            const int64_t size = c->problem.page_size;
            const draw_tensor *const table = &c->tensors[DRAW_TABLE];
            b = (int64_t)draw_get(c, DRAW_TABLE, b * table->stride[0] + s / size);
            s %= size;
        } else if (has(c, FATTN_CU_SEQLENS_K)) {
            s += c->sequences[b].first_key;
            b = 0;
        }
    }
    return b * t->stride[0] + s * t->stride[1] + h * t->stride[2] + channel * t->stride[3];
}

static void *element(const draw_case *c, draw_id id, int64_t at)
{
    const draw_tensor *const t = &c->tensors[id];
    return c->images[t->image].bytes + t->offset + at * t->size;
}

double draw_get(const draw_case *c, draw_id id, int64_t at)
{
    const void *const place = element(c, id, at);
    if (c->tensors[id].dtype) {
        return fattn_naive_load(place, c->tensors[id].dtype, 0);
    }
    switch (c->tensors[id].size) {
    case 1: return *(const uint8_t *)place;
    case 4: return *(const int32_t *)place;
    default: return (double)*(const int64_t *)place;
    }
}

void draw_set(draw_case *c, draw_id id, int64_t at, double value)
{
    void *const place = element(c, id, at);
    if (c->tensors[id].dtype) {
        fattn_dtype_store(c->tensors[id].dtype, place, 0, value);
        return;
    }
    switch (c->tensors[id].size) {
    case 1: *(uint8_t *)place = (uint8_t)value; break;
    case 4: *(int32_t *)place = (int32_t)value; break;
    default: *(int64_t *)place = (int64_t)value; break;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Values
 * ---------------------------------------------------------------------------------------------- */

/* Generates the values of one tensor. */
typedef struct painter {
    draw_rng *rng;
    draw_family family;
    double constant, level, tiny;
    bool query, key, subnormal, falling;
    int64_t outlier, hot;
} painter;

static painter painter_of(const draw_case *c, draw_id id, draw_rng *rng)
{
    static const double levels[] = {3, 30, 100};
    const draw_tensor *const t = &c->tensors[id];
    painter p = {.rng = rng, .family = c->family, .query = id == DRAW_Q, .key = id == DRAW_K};
    draw_rng shared = draw_stream(c->seed, c->index, 3); /* the same values for q and k */
    p.level = levels[draw_between(&shared, 0, 2)];
    p.falling = draw_chance(&shared, 2);
    p.outlier = (int64_t)(draw_bits(&shared) % (uint64_t)c->problem.dim) % t->extent[3];
    p.constant = draw_normal(rng);
    p.subnormal = t->dtype == FATTN_F32 || t->dtype == FATTN_F64 || t->dtype == FATTN_E4M3;
    p.tiny = ldexp(1, t->dtype == FATTN_F16    ? -14
                      : t->dtype == FATTN_E4M3 ? -8
                      : t->dtype == FATTN_F64  ? -1000
                      : p.subnormal            ? -132
                                               : -126);
    return p;
}

/* The value of channel after channel of row `s` of `rows`. */
static double paint(painter *p, int64_t s, int64_t rows, int64_t channel, int64_t channels)
{
    const double x = draw_normal(p->rng);
    switch (p->family) {
    case DRAW_UNIFORM: return draw_unit(p->rng) - 0.5;
    case DRAW_ONE_HOT:
        p->hot = channel == 0 ? draw_between(p->rng, 0, channels - 1) : p->hot;
        return channel == p->hot;
    case DRAW_CONSTANT: return p->constant;
    case DRAW_OUTLIER: return channel == p->outlier ? 100 * x : x;
    case DRAW_NEGATIVE:
        return p->query ? p->level * (1 + x / 16) : p->key ? -p->level * (1 + x / 16) : x;
    case DRAW_SORTED: {
        const double rise = 4 * (double)s / (double)rows - 2;
        return p->query ? fabs(x) : p->key ? (p->falling ? -rise : rise) + x / 8 : x;
    }
    case DRAW_DENORMAL:
        return p->subnormal ? p->tiny * x : copysign(p->tiny * (1 + draw_unit(p->rng)), x);
    case DRAW_PEAKED: return p->query ? 3 * x : x;
    case DRAW_MASSIVE: return p->query || p->key ? 24 * x : x;
    default: return x;
    }
}

/* Fills the used rows of every sequence. */
static void paint_tensor(draw_case *c, draw_id id, draw_rng *rng)
{
    const draw_tensor *const t = &c->tensors[id];
    painter p = painter_of(c, id, rng);
    for (int64_t b = 0; b < c->problem.batch; b++) {
        const int64_t first = has_rows_of_q(id) ? 0 : c->sequences[b].start;
        const int64_t rows = has_rows_of_q(id) ? c->sequences[b].rows : c->sequences[b].keys;
        for (int64_t s = first; s < rows; s++) {
            for (int64_t h = 0; h < t->extent[2]; h++) {
                for (int64_t channel = 0; channel < t->extent[3]; channel++) {
                    draw_set(c, id, draw_at(c, id, b, s, h, channel),
                             paint(&p, s, rows, channel, t->extent[3]));
                }
            }
        }
    }
}

/* Makes a few entries non-finite. */
static void sprinkle(draw_case *c, draw_id id, draw_rng *rng)
{
    static const double wild[] = {NAN, INFINITY, -INFINITY};
    const draw_tensor *const t = &c->tensors[id];
    for (int n = 0; n < 3 && c->problem.batch > 0 && t->extent[2] > 0; n++) {
        const int64_t b = draw_between(rng, 0, c->problem.batch - 1);
        const int64_t rows = has_rows_of_q(id) ? c->sequences[b].rows : c->sequences[b].keys;
        const int64_t first = has_rows_of_q(id) ? 0 : c->sequences[b].start;
        if (rows > first && draw_chance(rng, 2)) {
            const int64_t at = draw_at(c, id, b, draw_between(rng, first, rows - 1),
                                       draw_between(rng, 0, t->extent[2] - 1),
                                       draw_between(rng, 0, t->extent[3] - 1));
            draw_set(c, id, at, wild[draw_between(rng, 0, 2)]);
        }
    }
}

/* Structures of bias and masks other than independent random entries. */
typedef enum pattern { PLAIN, HOLES, PREFIX, ROWS, FLOOR, TRIANGLE, TILES, PATTERNS } pattern;

/* Whether the pattern hides (i, j). TILES: about half of all squares. */
static bool is_hidden(pattern kind, int64_t i, int64_t j, int64_t edge)
{
    const uint32_t square = (uint32_t)(i / 24 * 31 + j / 40 * 17 + edge);
    return kind == PREFIX     ? j < edge
           : kind == ROWS     ? i % 3 == 1
           : kind == TRIANGLE ? j > i + edge / 2
           : kind == TILES    ? square * UINT32_C(2654435761) >> 31
                              : false;
}

static double bias_entry(pattern kind, int64_t i, int64_t j, int64_t edge, fattn_dtype dtype,
                         draw_rng *rng)
{
    const double x = 2 * draw_normal(rng);
    const bool hidden = kind == HOLES ? draw_chance(rng, 8) : is_hidden(kind, i, j, edge);
    if (kind == FLOOR && j < edge) { /* the most negative number instead of -inf */
        return dtype == FATTN_F16 ? -65504.0 : -(double)FLT_MAX;
    }
    return hidden ? -(double)INFINITY : kind == TRIANGLE ? 0 : x;
}

static bool mask_entry(pattern kind, int64_t i, int64_t j, int64_t edge, draw_rng *rng)
{
    switch (kind) {
    case PLAIN: return draw_chance(rng, 2);
    case HOLES: return !draw_chance(rng, 8);
    case FLOOR: return j > i - edge && j < i + edge; /* a band */
    default: return !is_hidden(kind, i, j, edge);
    }
}

/* The number of distinct entries along an axis: 1 if it is broadcast. */
static int64_t once(const draw_tensor *t, int axis, int64_t count)
{
    return count > 1 && t->stride[axis] == 0 ? 1 : count;
}

static void paint_pairs(draw_case *c, draw_id id, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    const draw_tensor *const t = &c->tensors[id];
    const int64_t bm = id == DRAW_BLOCK_MASK ? p->block_m : 1,
                  bn = id == DRAW_BLOCK_MASK ? p->block_n : 1;
    const pattern kind = draw_chance(rng, 2) ? PLAIN : (pattern)draw_between(rng, 0, PATTERNS - 1);
    const int64_t edge = draw_between(rng, 0, t->extent[3]);
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t heads = once(t, 1, p->heads_q);
        const int64_t rows = once(t, 2, (c->sequences[b].rows + bm - 1) / bm);
        const int64_t keys = once(t, 3, (c->sequences[b].keys + bn - 1) / bn);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t own = (edge + 131 * h + 197 * b) % (t->extent[3] + 1);
            for (int64_t i = 0; i < rows; i++) {
                for (int64_t j = 0; j < keys; j++) {
                    const int64_t at = draw_at(c, id, b, h, i, j);
                    draw_set(c, id, at,
                             id == DRAW_BIAS ? bias_entry(kind, i, j, own, t->dtype, rng)
                             : mask_entry(kind, i, j, own, rng) ? (double)draw_between(rng, 1, 255)
                                                                : 0);
                }
            }
        }
    }
}

/* Whether a bias of -inf hides key j from every row of its key/value head. */
static bool is_key_hidden(const draw_case *c, int64_t b, int64_t hk, int64_t j)
{
    const int64_t group = c->problem.heads_q / c->problem.heads_k;
    for (int64_t h = hk * group; h < (hk + 1) * group; h++) {
        for (int64_t i = 0; i < c->sequences[b].rows; i++) {
            const int64_t at = draw_at(c, DRAW_BIAS, b, h, i, j);
            if (draw_get(c, DRAW_BIAS, at) != -(double)INFINITY) {
                return false;
            }
        }
    }
    return true;
}

/* In forward, keys hidden by -inf may hold anything; half of the cases poison them, except channels
 * that are values as well: those may reach o. In backward keys may reach gradients, like any masked
 * value. */
static void poison_hidden_keys(draw_case *c)
{
    static const double wild[] = {NAN, INFINITY, -INFINITY};
    draw_rng rng = draw_stream(c->seed, c->index, 4);
    const bool may_spread = c->problem.op == FATTN_BACKWARD && c->family != DRAW_WILD;
    const int64_t first = draw_has_v_in_k(c) ? c->problem.dim_v : 0;
    if (may_spread || first == c->problem.dim || !c->tensors[DRAW_BIAS].present ||
        c->tensors[DRAW_K].extent[3] == 0 || draw_chance(&rng, 2)) {
        return;
    }
    for (int64_t b = 0; b < c->problem.batch; b++) {
        for (int64_t hk = 0; hk < c->problem.heads_k; hk++) {
            for (int64_t j = c->sequences[b].start; j < c->sequences[b].keys; j++) {
                if (is_key_hidden(c, b, hk, j)) {
                    const int64_t channel = draw_between(&rng, first, c->problem.dim - 1);
                    draw_set(c, DRAW_K, draw_at(c, DRAW_K, b, j, hk, channel), wild[j % 3]);
                }
            }
        }
    }
}

static void paint_vectors(draw_case *c, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    const draw_tensor *const slopes = &c->tensors[DRAW_SLOPES];
    for (int64_t b = 0; slopes->present && b < slopes->extent[0]; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            draw_set(c, DRAW_SLOPES, b * slopes->stride[0] + h,
                     ldexp(draw_chance(rng, 8) ? -1 : 1 + draw_unit(rng),
                           -(int)draw_between(rng, 1, 9)));
        }
    }
    for (int64_t h = 0; c->tensors[DRAW_SINK].present && h < p->heads_q; h++) {
        draw_set(c, DRAW_SINK, h, draw_chance(rng, 16) ? -(double)INFINITY : 2 * draw_normal(rng));
    }
}

/* Where entries are broadcast, the last value stays. */
static void paint_descales(draw_case *c)
{
    draw_rng rng = draw_stream(c->seed, c->index, 14);
    for (draw_id id = DRAW_K_DESCALE; id <= DRAW_V_DESCALE; id++) {
        const draw_tensor *const t = &c->tensors[id];
        for (int64_t n = 0; t->present && n < t->extent[0] * t->extent[1]; n++) {
            const int64_t b = n / t->extent[1], hk = n % t->extent[1];
            const double factor = ldexp(1 + draw_unit(&rng), (int)draw_between(&rng, -3, 1));
            draw_set(c, id, b * t->stride[0] + hk * t->stride[1],
                     draw_chance(&rng, 8) ? -factor : factor);
        }
    }
}

/* Initial values of accumulated gradients; other outputs begin as NaN. */
static void paint_gradients(draw_case *c, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    for (draw_id id = DRAW_DQ; id <= DRAW_DV; id++) {
        const draw_tensor *const t = &c->tensors[id];
        for (int64_t b = 0; t->present && b < p->batch; b++) {
            const int64_t rows = id == DRAW_DQ ? c->sequences[b].rows : c->sequences[b].own_keys;
            for (int64_t s = 0; s < rows; s++) {
                for (int64_t h = 0; h < t->extent[2]; h++) {
                    for (int64_t channel = 0; channel < t->extent[3]; channel++) {
                        draw_set(c, id, draw_at(c, id, b, s, h, channel), draw_normal(rng));
                    }
                }
            }
        }
    }
    const int64_t *const e = c->tensors[DRAW_DBIAS].extent;
    for (int64_t n = 0; c->tensors[DRAW_DBIAS].present && n < e[0] * e[1] * e[2] * e[3]; n++) {
        const int64_t at = draw_at(c, DRAW_DBIAS, n / (e[1] * e[2] * e[3]),
                                   n / (e[2] * e[3]) % e[1], n / e[3] % e[2], n % e[3]);
        draw_set(c, DRAW_DBIAS, at, draw_normal(rng));
    }
    for (int64_t h = 0; c->tensors[DRAW_DSINK].present && h < p->heads_q; h++) {
        draw_set(c, DRAW_DSINK, h, draw_normal(rng));
    }
}

/* -------------------------------------------------------------------------------------------------
 * Lengths, tables and scalars
 * ---------------------------------------------------------------------------------------------- */

static void write_lengths(draw_case *c)
{
    const int64_t batch = c->problem.batch;
    for (int64_t b = 0; b < batch; b++) {
        const draw_sequence *const s = &c->sequences[b];
        const struct {
            draw_id id;
            int64_t at, value;
        } entries[] = {
            {DRAW_CU_Q, b, s->first_row},     {DRAW_CU_Q, b + 1, s->first_row + s->own_rows},
            {DRAW_CU_K, b, s->first_key},     {DRAW_CU_K, b + 1, s->first_key + s->own_keys},
            {DRAW_USED_Q, b, s->rows},        {DRAW_USED_K, b, s->keys},
            {DRAW_START_K, b, s->start},      {DRAW_Q_OFFSETS, b, s->q_offset},
            {DRAW_K_OFFSETS, b, s->k_offset}, {DRAW_WHOLES_Q, b, s->whole_q},
            {DRAW_WHOLES_K, b, s->whole_k},
        };
        for (size_t n = 0; n < sizeof entries / sizeof *entries; n++) {
            if (c->tensors[entries[n].id].present) {
                draw_set(c, entries[n].id, entries[n].at, (double)entries[n].value);
            }
        }
    }
}

/* A shuffled page table; entries past a sequence stay poison. */
static int write_table(draw_case *c, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    int *const pages = malloc(((size_t)p->num_pages + 1) * sizeof *pages);
    if (pages == NULL) {
        return -1;
    }
    for (int n = 0; n < p->num_pages; n++) {
        pages[n] = n;
    }
    shuffle(pages, (int)p->num_pages, rng);
    int used = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const draw_sequence *const s = &c->sequences[b];
        for (int64_t n = s->start / p->page_size; n < pages_of(c, s->keys); n++) {
            draw_set(c, DRAW_TABLE, b * c->tensors[DRAW_TABLE].stride[0] + n, pages[used++]);
        }
    }
    free(pages);
    return 0;
}

static void write_scalars(draw_case *c)
{
    fattn_buffers *const buf = &c->buffers;
    if (has(c, FATTN_DROPOUT)) {
        buf->seed = c->seed_value, buf->offset = c->offset_value;
    }
    if (c->tensors[DRAW_SEED].present) {
        memcpy(element(c, DRAW_SEED, 0), &c->seed_value, sizeof c->seed_value);
        memcpy(element(c, DRAW_OFFSET, 0), &c->offset_value, sizeof c->offset_value);
        buf->seed = buf->offset = 99;
    }
    if (c->problem.batch > 0) { /* the position arrays replace the scalars */
        const draw_sequence *const s = &c->sequences[0];
        const bool arrays = c->tensors[DRAW_Q_OFFSETS].present;
        buf->q_offset = arrays ? INT64_MAX : s->q_offset,
        buf->k_offset = arrays ? INT64_MIN : s->k_offset;
        buf->whole_q = arrays ? -9 : s->whole_q, buf->whole_k = arrays ? -9 : s->whole_k;
    }
}

static const struct {
    draw_id id;
    size_t offset; /* in fattn_problem */
} strided[] = {
    {DRAW_Q, offsetof(fattn_problem, q)},       {DRAW_K, offsetof(fattn_problem, k)},
    {DRAW_V, offsetof(fattn_problem, v)},       {DRAW_O, offsetof(fattn_problem, o)},
    {DRAW_DOUT, offsetof(fattn_problem, dout)}, {DRAW_DQ, offsetof(fattn_problem, dq)},
    {DRAW_DK, offsetof(fattn_problem, dk)},     {DRAW_DV, offsetof(fattn_problem, dv)},
};

static fattn_strides *strides_of(fattn_problem *p, size_t n)
{
    return (fattn_strides *)(void *)((char *)p + strided[n].offset);
}

static fattn_strides tensor_strides(const draw_case *c, draw_id id)
{
    const int64_t *const s = c->tensors[id].stride;
    return (fattn_strides){.batch = s[0], .seq = s[1], .head = s[2]};
}

static void write_strides(draw_case *c)
{
    fattn_problem *const p = &c->problem;
    const struct {
        draw_id id;
        int64_t *strides;
    } scores[] = {
        {DRAW_BIAS, p->bias_stride},
        {DRAW_MASK, p->mask_stride},
        {DRAW_BLOCK_MASK, p->block_mask_stride},
        {DRAW_DBIAS, p->dbias_stride},
    };
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++) {
        if (c->tensors[scores[n].id].present) {
            memcpy(scores[n].strides, c->tensors[scores[n].id].stride, sizeof p->bias_stride);
        }
    }
    for (size_t n = 0; p->layout == FATTN_STRIDED && n < sizeof strided / sizeof *strided; n++) {
        *strides_of(p, n) = tensor_strides(c, strided[n].id);
    }
}

fattn_problem draw_spelled(const draw_case *c)
{
    fattn_problem p = c->problem;
    p.layout = FATTN_STRIDED;
    for (size_t n = 0; n < sizeof strided / sizeof *strided; n++) {
        *strides_of(&p, n) = tensor_strides(c, strided[n].id);
    }
    return p;
}

/* -------------------------------------------------------------------------------------------------
 * Building
 * ---------------------------------------------------------------------------------------------- */

int draw_build(draw_case *c)
{
    draw_rng stream = draw_stream(c->seed, c->index, 2);
    draw_rng *const rng = &stream;
    pack_sequences(c, rng);
    if (has(c, FATTN_PAGED)) {
        count_pages(c, rng);
    }
    declare_tensors(c);
    declare_options(c);
    if (place(c, rng)) {
        return -1;
    }
    write_strides(c);
    write_lengths(c);
    if (has(c, FATTN_PAGED) && write_table(c, rng)) {
        return -1;
    }
    write_scalars(c);

    static const draw_id inputs[] = {DRAW_Q, DRAW_K, DRAW_V, DRAW_DOUT, DRAW_DLSE};
    for (size_t n = 0; n < sizeof inputs / sizeof *inputs; n++) {
        const bool in_k = inputs[n] == DRAW_V && draw_has_v_in_k(c);
        if (c->tensors[inputs[n]].present && !in_k) {
            paint_tensor(c, inputs[n], rng);
            if (c->family == DRAW_WILD && inputs[n] != DRAW_DLSE) {
                sprinkle(c, inputs[n], rng);
            }
        }
    }
    for (draw_id id = DRAW_BIAS; id <= DRAW_BLOCK_MASK; id++) {
        if (c->tensors[id].present) {
            paint_pairs(c, id, rng);
        }
    }
    poison_hidden_keys(c);
    paint_vectors(c, rng);
    paint_descales(c);
    if (has(c, FATTN_ACCUMULATE)) {
        paint_gradients(c, rng);
    }
    for (int id = 0; id < DRAW_IDS; id++) {
        if (c->tensors[id].present) {
            draw_point(&c->buffers, (draw_id)id, element(c, (draw_id)id, 0));
        }
    }
    return 0;
}

fattn_status draw_save(draw_case *c)
{
    if (c->problem.op != FATTN_BACKWARD) {
        return FATTN_OK;
    }
    fattn_problem forward = draw_spelled(c);
    fattn_buffers buffers = c->buffers;
    forward.op = FATTN_FORWARD;
    forward.features &= ~(FATTN_DLSE | FATTN_ACCUMULATE);
    forward.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    fattn_status status = fattn_problem_normalise(&forward, &forward);
    if (status == FATTN_OK) {
        status = fattn_buffers_normalise(&forward, &buffers, &buffers);
    }
    return status ? status : fattn_naive_execute(&forward, &buffers);
}

void draw_free(draw_case *c)
{
    for (int n = 0; n < c->image_count; n++) {
        free(c->images[n].bytes);
    }
    free(c->sequences);
    memset(c, 0, sizeof *c);
}
