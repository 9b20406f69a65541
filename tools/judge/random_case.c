/* SPDX-License-Identifier: Apache-2.0 */
/* Draws problems, and describes a case in words; random_image.c allocates its memory. */
#include "tools/judge/random_case.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/feature.h"
#include "core/kernel.h"
#include "core/status.h"

#define PICK(rng, list) \
    ((list)[draw_between((rng), 0, (int64_t)(sizeof(list) / sizeof *(list)) - 1)])

/* -------------------------------------------------------------------------------------------------
 * Names
 * ---------------------------------------------------------------------------------------------- */

const char *const draw_family_names[DRAW_FAMILIES] = {
    "gaussian", "uniform",  "one-hot", "constant", "outlier", "negative",
    "sorted",   "denormal", "massive", "wild",     "peaked",
};

enum { FIRST_FEATURES = 21 };

uint64_t draw_features_of(fattn_op op)
{
    const uint64_t backward_alone = FATTN_DLSE | FATTN_ACCUMULATE;
    return FATTN_FEATURES_ALL & ~(op == FATTN_FORWARD ? backward_alone : FATTN_KERNEL_NOT_BACKWARD);
}

/* -------------------------------------------------------------------------------------------------
 * Problems
 * ---------------------------------------------------------------------------------------------- */

void draw_blank(draw_case *c, uint64_t seed)
{
    memset(c, 0, sizeof *c);
    c->seed = seed;
    fattn_problem_init(&c->problem);
    fattn_buffers_init(&c->buffers);
}

int draw_sequences(draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    free(c->sequences);
    c->sequences = calloc((size_t)p->batch + 1, sizeof *c->sequences);
    if (c->sequences == NULL) {
        return -1;
    }
    for (int64_t b = 0; b < p->batch; b++) {
        draw_sequence *const s = &c->sequences[b];
        s->rows = s->own_rows = p->seqlen_q;
        s->keys = s->own_keys = p->seqlen_k;
        s->whole_q = s->whole_k = -1;
    }
    return 0;
}

/* A quarter of the lengths are within 1 of a multiple of a tile. The rest are uniform within
 * octaves, and all octaves are equally likely; the last one ends at 700. */
static int64_t draw_length(draw_rng *rng)
{
    static const int64_t tiles[] = {1,  4,   8,   16,  24,  32,  48,  64,  80,
                                    96, 112, 128, 160, 192, 256, 320, 384, 512};
    if (draw_chance(rng, 60)) {
        return 0;
    }
    if (draw_chance(rng, 4)) {
        return PICK(rng, tiles) + draw_between(rng, -1, 1);
    }
    const int64_t octave = draw_between(rng, 0, 18) / 2;
    const int64_t low = INT64_C(1) << octave;
    return draw_between(rng, low, 2 * low - 1 < 700 ? 2 * low - 1 : 700);
}

static int64_t draw_dim(draw_rng *rng)
{
    static const int64_t dims[] = {8, 16, 32, 40, 64, 72, 80, 96, 128, 192, 256};
    if (draw_chance(rng, 2)) {
        return PICK(rng, dims);
    }
    const int64_t low = INT64_C(1) << draw_between(rng, 0, 7);
    return draw_between(rng, low, 2 * low);
}

/* The maximum of `count` lengths. */
static int64_t draw_longest(draw_rng *rng, int count)
{
    int64_t longest = 0;
    for (int n = 0; n < count; n++) {
        const int64_t length = draw_length(rng);
        longest = length > longest ? length : longest;
    }
    return longest;
}

/* Sizes whose oracle stays within a budget of multiplications, which is random too. Batch, heads
 * and dimensions are cut first, then lengths. Plain problems are for kernels with large tiles and
 * must span several of them. Some problems have few queries and many keys, like decoding. */
static void draw_sizes(fattn_problem *p, bool plain, draw_rng *rng)
{
    static const int64_t batches[] = {1, 1, 1, 2, 2, 3, 4};
    static const int64_t groups[] = {1, 1, 1, 1, 2, 3, 5, 7, 8};
    static const int64_t heads[] = {1, 1, 2, 3};
    int64_t group = PICK(rng, groups);
    const bool few = draw_chance(rng, plain ? 3 : 6);
    p->seqlen_q = few ? draw_between(rng, 1, 4) : draw_longest(rng, plain ? 3 : 1);
    p->seqlen_k = draw_longest(rng, plain ? 3 : 1) * (few ? draw_between(rng, 1, 6) : 1);
    p->batch = draw_chance(rng, 64) ? 0 : PICK(rng, batches);
    p->heads_k = PICK(rng, heads);
    p->dim = draw_dim(rng);
    p->dim_v = draw_chance(rng, 2) ? p->dim : draw_dim(rng);

    const int64_t budget = INT64_C(1)
                           << (plain ? draw_between(rng, 19, 23)
                                     : draw_between(rng, 15, draw_chance(rng, 24) ? 24 : 20));
    int64_t *const cuts[] = {&p->batch, &group,  &p->heads_k, &p->dim,
                             &p->dim_v, &p->dim, &p->dim_v};
    for (int tries = 0; tries < 64; tries++) {
        const int64_t cost = p->batch * p->heads_k * group * p->seqlen_q * p->seqlen_k *
                             (p->dim + p->dim_v) * (p->op == FATTN_BACKWARD ? 3 : 1);
        int64_t *const cut = tries < 40 ? PICK(rng, cuts) : tries % 2 ? &p->seqlen_q : &p->seqlen_k;
        if (cost <= budget) {
            break;
        }
        *cut = *cut > 1 ? *cut - *cut / 2 : *cut;
    }
    p->heads_q = group * p->heads_k;
}

/* Features that were added to the library later are drawn from a stream of their own, so that old
 * seeds and indices still give the same cases, apart from these features. */
static uint64_t draw_later_features(uint64_t seed, int64_t index, fattn_op op, bool plain)
{
    draw_rng rng = draw_stream(seed, index, 5);
    uint64_t drawn = 0;
    for (int bit = FIRST_FEATURES; bit < FATTN_FEATURE_COUNT; bit++) {
        drawn |= draw_chance(&rng, plain ? 16 : 6) ? UINT64_C(1) << bit : 0;
    }
    drawn &= draw_features_of(op);
    return drawn & FATTN_ALIBI_BIAS ? drawn | FATTN_ALIBI | FATTN_BIAS : drawn;
}

/* plain: draws few features. */
static uint64_t draw_features(fattn_op op, bool plain, draw_rng *rng)
{
    uint64_t drawn = 0;
    for (int bit = 0; bit < FIRST_FEATURES; bit++) {
        const bool on = draw_chance(rng, 4) && (!plain || draw_chance(rng, 4));
        drawn |= on ? UINT64_C(1) << bit : 0;
    }
    return drawn & draw_features_of(op);
}

/* Family DRAW_PEAKED, a sixteenth of the problems, is drawn from a stream of its own too. Its
 * problems have many keys, mostly no features, and o in f32, because rounding to 16 bits would hide
 * errors of the size that it is for. */
static bool draws_peaked(uint64_t seed, int64_t index)
{
    draw_rng rng = draw_stream(seed, index, 9);
    return draw_chance(&rng, 16);
}

static void draw_peaked(fattn_problem *p, uint64_t seed, int64_t index)
{
    static const int64_t dims[] = {16, 24, 32};
    draw_rng rng = draw_stream(seed, index, 10);
    p->batch = 1;
    p->heads_q = p->heads_k = draw_between(&rng, 1, 2);
    p->seqlen_q = draw_between(&rng, 17, 32);
    p->seqlen_k = draw_between(&rng, 1024, 1152);
    p->dim = p->dim_v = PICK(&rng, dims);
    p->features = draw_chance(&rng, 4) ? p->features : 0;
    p->dtype_bias = p->features & FATTN_BIAS ? p->dtype_bias : 0;
    p->dtype_o = p->op == FATTN_BACKWARD || p->dtype == FATTN_F64 ? p->dtype_o : FATTN_F32;
}

/* A twentieth of the problems have more than 256 channels, again from a stream of their own. */
static bool draws_wide(uint64_t seed, int64_t index)
{
    draw_rng rng = draw_stream(seed, index, 11);
    return draw_chance(&rng, 20);
}

static void draw_wide(fattn_problem *p, uint64_t seed, int64_t index)
{
    static const int64_t dims[] = {264, 288, 320, 384, 512, 576};
    draw_rng rng = draw_stream(seed, index, 12);
    const int64_t budget = INT64_C(1) << draw_between(&rng, 17, 21);
    p->dim = draw_chance(&rng, 2) ? PICK(&rng, dims) : draw_between(&rng, 257, 576);
    p->dim_v = draw_chance(&rng, 2)   ? p->dim
               : draw_chance(&rng, 2) ? PICK(&rng, dims)
                                      : draw_between(&rng, 1, 576);
    p->batch = p->batch > 1 ? 1 : p->batch;
    const int64_t row = p->heads_q * (p->dim + p->dim_v) * (p->op == FATTN_BACKWARD ? 3 : 1);
    for (int64_t n = 0; p->seqlen_q * p->seqlen_k * row > budget && n < 64; n++) {
        int64_t *const cut = n % 2 ? &p->seqlen_q : &p->seqlen_k;
        *cut = *cut > 1 ? *cut - *cut / 2 : *cut;
    }
}

static uint32_t draw_outputs(const fattn_problem *p, draw_rng *rng)
{
    if (p->op == FATTN_FORWARD) {
        return draw_chance(rng, 8)   ? 0 /* the default: o */
               : draw_chance(rng, 8) ? FATTN_OUT_O
                                     : FATTN_OUT_O | FATTN_OUT_LSE;
    }
    uint32_t legal = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    legal |= p->features & FATTN_BIAS ? FATTN_OUT_DBIAS : 0;
    legal |= p->features & FATTN_SINK ? FATTN_OUT_DSINK : 0;
    const uint32_t some = legal & (uint32_t)draw_bits(rng);
    return draw_chance(rng, 3) && some ? some : legal;
}

/* Window sizes relative to the diagonal: unlimited, the diagonal with at most 2 keys, a few, or
 * any. */
static int64_t draw_window(draw_rng *rng, int64_t length)
{
    switch (draw_between(rng, 0, 3)) {
    case 0: return -1;
    case 1: return draw_between(rng, 0, 2);
    case 2: return draw_between(rng, 0, 64);
    default: return draw_between(rng, 0, length + 1);
    }
}

static double draw_probability(draw_rng *rng)
{
    static const double common[] = {0.1, 0.1, 0.2, 0.5, 0.5, 0.9, 1e-9, 0.9999999, 1, 0};
    return draw_chance(rng, 3) ? draw_unit(rng) : PICK(rng, common);
}

static double draw_scale(draw_rng *rng, int64_t dim)
{
    const double usual = 1 / sqrt((double)dim);
    switch (draw_between(rng, 0, 7)) {
    case 0: return 0;
    case 1: return -usual;
    case 2: return ldexp(1, -30);
    default: return usual * (0.25 + 2 * draw_unit(rng));
    }
}

/* Numbers that belong to features; without the feature they keep their defaults. */
static void draw_options(fattn_problem *p, draw_rng *rng)
{
    const uint64_t f = p->features;
    p->scale = f & FATTN_SCALE ? draw_scale(rng, p->dim) : 0;
    p->softcap = f & FATTN_SOFTCAP ? 1 + 40 * draw_unit(rng) : 0;
    p->dropout_p = f & FATTN_DROPOUT ? draw_probability(rng) : 0;
    p->window_left = f & FATTN_WINDOW ? draw_window(rng, p->seqlen_k) : -1;
    p->window_right = f & FATTN_WINDOW ? draw_window(rng, p->seqlen_k) : -1;
    p->alibi_batch_stride =
        f & FATTN_ALIBI && !draw_chance(rng, 2) ? p->heads_q + draw_between(rng, 0, 3) : 0;
    static const int64_t blocks[] = {1, 3, 16, 64, 100, 128};
    p->block_m = f & FATTN_BLOCK_MASK ? PICK(rng, blocks) : 0;
    p->block_n = f & FATTN_BLOCK_MASK ? PICK(rng, blocks) : 0;
    static const int64_t pages[] = {1, 2, 7, 16, 16, 64, 100, 256};
    p->page_size = f & FATTN_PAGED ? PICK(rng, pages) : 0;
    p->batch_offset = f & FATTN_DROPOUT ? draw_between(rng, 0, 40) : 0;
    p->head_offset = f & FATTN_DROPOUT ? draw_between(rng, 0, 40) : 0;
}

/* The numbers of features that were added later. Fields are sizes: any size, or one of tiles. */
static void draw_later_options(fattn_problem *p, uint64_t seed, int64_t index)
{
    static const int64_t sizes[] = {1, 3, 16, 64, 100, 128};
    draw_rng rng = draw_stream(seed, index, 8);
    for (int bit = FIRST_FEATURES; bit < FATTN_FEATURE_COUNT; bit++) {
        const fattn_feature_field *field = fattn_feature_row(bit)->fields;
        for (; p->features >> bit & 1 && field->name; field++) {
            const int64_t size =
                draw_chance(&rng, 3) ? PICK(&rng, sizes) : draw_between(&rng, 1, p->seqlen_k + 1);
            memcpy((char *)p + field->offset, &size, sizeof size);
        }
    }
    if (p->features & FATTN_DESCALE) {
        const int64_t head = draw_between(&rng, 0, 2);
        p->descale_stride[1] = head;
        p->descale_stride[0] =
            draw_chance(&rng, 2) ? 0 : head * p->heads_k + draw_between(&rng, 1, 3);
    }
}

/* Draws the sequence lengths, and how many of the allotted rows are used. */
static void draw_lengths(draw_case *c, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    const uint64_t f = p->features;
    const int64_t empty = p->batch > 1 ? 5 : 20;
    for (int64_t b = 0; b < p->batch; b++) {
        draw_sequence *const s = &c->sequences[b];
        if (f & FATTN_CU_SEQLENS_Q) {
            s->own_rows =
                draw_chance(rng, empty) ? 0 : draw_between(rng, p->seqlen_q / 2, p->seqlen_q);
        }
        if (f & FATTN_CU_SEQLENS_K) {
            s->own_keys =
                draw_chance(rng, empty) ? 0 : draw_between(rng, p->seqlen_k / 2, p->seqlen_k);
        }
        s->rows = !(f & FATTN_SEQUSED_Q)    ? s->own_rows
                  : draw_chance(rng, empty) ? 0
                                            : draw_between(rng, s->own_rows / 3, s->own_rows);
        s->keys = !(f & FATTN_SEQUSED_K)    ? s->own_keys
                  : draw_chance(rng, empty) ? 0
                                            : draw_between(rng, s->own_keys / 3, s->own_keys);
    }
}

/* Padding in front of the keys: mostly a few, sometimes all, or enough to fill whole tiles. */
static void draw_starts(draw_case *c)
{
    draw_rng rng = draw_stream(c->seed, c->index, 6);
    for (int64_t b = 0; b < c->problem.batch; b++) {
        draw_sequence *const s = &c->sequences[b];
        const int64_t most = draw_chance(&rng, 2) && s->keys > 9 ? 9 : s->keys;
        s->start = draw_chance(&rng, 12) ? s->keys : draw_between(&rng, 0, most);
    }
}

/* Positions of a shard. The diagonal stays near the local rows and keys; otherwise masks would hide
 * everything. */
static void draw_positions(draw_case *c, draw_rng *rng)
{
    const fattn_problem *const p = &c->problem;
    const bool dropout = p->features & FATTN_DROPOUT;
    c->position_arrays = draw_chance(rng, 2);
    for (int64_t b = 0; b < p->batch; b++) {
        draw_sequence *const s = &c->sequences[b];
        const draw_sequence *const first = &c->sequences[0];
        const int64_t base = draw_chance(rng, 4)   ? INT64_C(4000000000)
                             : draw_chance(rng, 3) ? 16 * draw_between(rng, 0, 9)
                             : dropout             ? draw_between(rng, 0, 300)
                                                   : draw_between(rng, -300, 300);
        s->k_offset = base + (dropout ? 0 : draw_between(rng, -9, 9));
        s->q_offset = base + draw_between(rng, 0, s->keys / 2);
        s->whole_k = draw_chance(rng, 2) ? -1 : s->keys + draw_between(rng, 0, 20);
        s->whole_q = draw_chance(rng, 2) ? -1 : s->rows + draw_between(rng, 0, 20);
        if (!c->position_arrays) { /* the same scalars for all sequences */
            s->k_offset = first->k_offset, s->q_offset = first->q_offset;
            s->whole_k = first->whole_k, s->whole_q = first->whole_q;
        }
    }
}

/* Draws the axes along which bias and masks are broadcast. */
static void draw_flat(draw_case *c, draw_rng *rng)
{
    static const draw_id scores[] = {DRAW_BIAS, DRAW_MASK, DRAW_BLOCK_MASK, DRAW_DBIAS};
    for (int n = 0; n < 4; n++) {
        for (int axis = 0; axis < 4; axis++) {
            c->tensors[scores[n]].flat[axis] = draw_chance(rng, axis < 2 ? 2 : 6);
        }
    }
    if (!draw_chance(rng, 4)) { /* the gradient mostly has the bias's shape */
        memcpy(c->tensors[DRAW_DBIAS].flat, c->tensors[DRAW_BIAS].flat, sizeof c->tensors[0].flat);
    }
    static const draw_id inputs[] = {DRAW_Q, DRAW_K, DRAW_V, DRAW_DOUT};
    for (int n = 0; n < 4; n++) {
        for (int axis = 0; axis < 3; axis++) {
            c->tensors[inputs[n]].flat[axis] = draw_chance(rng, 12);
        }
    }
}

/* In a twelfth of the problems k and v (forward only) and the bias, if there is one, may have other
 * types than q. A quarter of the forwards have a cache in e4m3, mostly of both k and v. */
static void draw_mixed_types(fattn_problem *p, uint64_t seed, int64_t index)
{
    static const fattn_dtype types[] = {0, FATTN_F32, FATTN_F16, FATTN_BF16};
    draw_rng rng = draw_stream(seed, index, 7), cache = draw_stream(seed, index, 13);
    if (p->dtype == FATTN_F64) {
        return;
    }
    const bool mixed = draw_chance(&rng, 12);
    if (mixed && p->op == FATTN_FORWARD) {
        p->dtype_kv = types[draw_between(&rng, 0, 3)];
        p->dtype_v = types[draw_between(&rng, 0, 3)];
    }
    if (mixed && p->features & FATTN_BIAS) {
        p->dtype_bias = types[draw_between(&rng, 0, 3)];
    }
    if (p->op == FATTN_FORWARD && draw_chance(&cache, 4)) {
        const int which = (int)draw_between(&cache, 0, 5);
        const fattn_dtype key = p->dtype_kv ? p->dtype_kv : p->dtype;
        p->dtype_v = which == 0 ? (p->dtype_v ? p->dtype_v : key) : FATTN_E4M3;
        p->dtype_kv = which == 1 ? key : FATTN_E4M3;
    }
}

int draw_problem(draw_case *c, uint64_t seed, int64_t index)
{
    draw_rng stream = draw_stream(seed, index, 1);
    draw_rng *const rng = &stream;
    draw_blank(c, seed);
    c->index = index;
    fattn_problem *const p = &c->problem;

    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F32, FATTN_F32,  FATTN_F32,
                                         FATTN_F16, FATTN_F16, FATTN_BF16, FATTN_BF16};
    /* A fifth of the problems are plain, as in most programs; the fastest kernels take no others. A
     * quarter of the rest have aligned rows, for kernels that honour features and copy 16 bytes at
     * a time. */
    const bool peaked = draws_peaked(seed, index), plain = draw_chance(rng, 5) || peaked;
    c->aligned_rows = plain || draw_chance(rng, 4);
    p->op = draw_chance(rng, 2) ? FATTN_BACKWARD : FATTN_FORWARD;
    p->dtype = draw_chance(rng, 24) ? FATTN_F64 : PICK(rng, dtypes);
    p->dtype_o = p->dtype == FATTN_F64 || plain || draw_chance(rng, 2) ? 0
                 : draw_chance(rng, 2)                                 ? p->dtype
                                                                       : FATTN_F32;
    p->features = draw_features(p->op, plain, rng) | draw_later_features(seed, index, p->op, plain);
    p->dtype_bias = draw_chance(rng, 2) || !(p->features & FATTN_BIAS) ? 0 : p->dtype;
    draw_mixed_types(p, seed, index);
    p->anchor = draw_chance(rng, 3) ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
    p->layout = (fattn_layout)draw_between(rng, FATTN_BSHD, FATTN_STRIDED);
    static const int64_t alignments[] = {16, 16, 1, 2, 4, 8, 32, 64};
    p->pointer_alignment = PICK(rng, alignments);
    draw_sizes(p, plain, rng);
    if (peaked) {
        draw_peaked(p, seed, index);
    } else if (draws_wide(seed, index)) {
        draw_wide(p, seed, index);
    }
    if (c->aligned_rows) {
        p->pointer_alignment = p->pointer_alignment < 16 ? 16 : p->pointer_alignment;
        p->dim = (p->dim + 7) / 8 * 8;
        p->dim_v = (p->dim_v + 7) / 8 * 8;
    }
    p->outputs = draw_outputs(p, rng);
    draw_options(p, rng);
    draw_later_options(p, seed, index);
    if (draw_sequences(c)) {
        return -1;
    }
    draw_lengths(c, rng);
    if (p->features & FATTN_SEQSTART_K) {
        draw_starts(c);
    }
    if (p->features & FATTN_POSITIONS) {
        draw_positions(c, rng);
    }
    draw_flat(c, rng);

    c->family =
        draw_chance(rng, 3) ? DRAW_GAUSSIAN : (draw_family)draw_between(rng, 0, DRAW_WILD - 1);
    c->family = draw_chance(rng, 16) ? DRAW_WILD : c->family;
    c->family = peaked ? DRAW_PEAKED : c->family;
    c->seed_value = draw_bits(rng);
    c->offset_value = draw_chance(rng, 2) ? draw_bits(rng) : (uint64_t)draw_between(rng, 0, 3);
    c->seed_pointers = draw_chance(rng, 2);
    c->packed = draw_chance(rng, 4) && !p->dtype_kv && !p->dtype_v;
    c->pass_unwanted = draw_chance(rng, 2);
    c->page_slack = draw_between(rng, 0, 5);
    c->tile = (int)draw_between(rng, 0, 7);
    c->splits = draw_chance(rng, 2) ? 0 : draw_between(rng, 1, 9);
    c->twice = draw_chance(rng, 4);
    c->without_workspace = draw_chance(rng, 8);
    c->v_in_k = draw_chance(rng, 4);
    return 0;
}

/* -------------------------------------------------------------------------------------------------
 * Words
 * ---------------------------------------------------------------------------------------------- */

typedef struct words {
    char *text;
    size_t size, length;
} words;

static void say(words *w, const char *format, ...) FATTN_PRINTF(2, 3);

static void say(words *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int more = w->length < w->size
                         ? vsnprintf(w->text + w->length, w->size - w->length, format, arguments)
                         : 0;
    va_end(arguments);
    w->length += more > 0 ? (size_t)more : 0;
}

static void say_features(words *w, const fattn_problem *p)
{
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        if (!(p->features >> bit & 1)) {
            continue;
        }
        char value[64];
        say(w, " %s%s", fattn_feature_name(bit), fattn_feature_value(p, bit, value, sizeof value));
    }
}

void draw_describe(const draw_case *c, char *text, size_t size)
{
    static const char *const layouts[] = {"?", "bshd", "bhsd", "strided"};
    const fattn_problem *const p = &c->problem;
    words w = {text, size, 0};
    say(&w, "%s %s", p->op == FATTN_FORWARD ? "forward" : "backward", fattn_dtype_name(p->dtype));
    const struct {
        const char *name;
        fattn_dtype dtype;
    } others[] = {
        {"o", p->dtype_o}, {"kv", p->dtype_kv}, {"v", p->dtype_v}, {"bias", p->dtype_bias}};
    for (size_t n = 0; n < sizeof others / sizeof others[0]; n++) {
        if (others[n].dtype != 0 && others[n].dtype != p->dtype) {
            say(&w, " %s:%s", others[n].name, fattn_dtype_name(others[n].dtype));
        }
    }
    say(&w, " B=%lld Hq=%lld Hk=%lld Sq=%lld Sk=%lld D=%lld Dv=%lld %s%s%s%s", (long long)p->batch,
        (long long)p->heads_q, (long long)p->heads_k, (long long)p->seqlen_q,
        (long long)p->seqlen_k, (long long)p->dim, (long long)p->dim_v, layouts[p->layout],
        c->packed && p->layout == FATTN_STRIDED ? " packed" : "",
        draw_has_v_in_k(c) ? " v-in-k" : "", p->anchor == FATTN_TOP_LEFT ? " top-left" : "");
    say_features(&w, p);
    say(&w, " outputs=0x%x family=%s", (unsigned)p->outputs, draw_family_names[c->family]);
    if (p->features &
        (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K)) {
        say(&w, " lengths");
        for (int64_t b = 0; b < p->batch && b < 8; b++) {
            const draw_sequence *const s = &c->sequences[b];
            say(&w, " %lld/%lldx%lld/%lld", (long long)s->rows, (long long)s->own_rows,
                (long long)s->keys, (long long)s->own_keys);
        }
    }
}
