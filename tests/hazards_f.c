/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group F: split-KV, lse, merging, invariance. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/problem.h"
#include "core/tiling.h"
#include "tests/hazard.h"
#include "tests/worst.h"

static bool cuts_keys(const place *at, const draw_case *c)
{
    return at->kernel->split != NULL && hazard_takes(at, c);
}

static fattn_status run_split(const place *at, const draw_case *c, int64_t splits)
{
    const fattn_wish wish = {.tile = at->kernel->tiles[0], .splits = splits};
    return hazard_run(at, c, &wish);
}

static void f1(void)
{
    static const int64_t groups[] = {1, 3, 8};
    EACH (g, groups) {
        for (int64_t rows = 1; rows <= 5; rows++) {
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 2, 2 * groups[g], 2, rows, 300, 16);
            c.problem.features = FATTN_CAUSAL;
            hazard_judge_drawn(&c, 8, "%lld rows, groups of %lld", (long long)rows,
                               (long long)groups[g]);
        }
    }
}

static void f2(void)
{
    static const int64_t rows[] = {1, 0, 3, 0, 0, 2}, keys[] = {300, 40, 0, 0, 1, 70};
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 6, 4, 2, 3, 300, 8);
    c.problem.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    for (int b = 0; b < 6; b++) {
        c.sequences[b].rows = c.sequences[b].own_rows = rows[b];
        c.sequences[b].keys = c.sequences[b].own_keys = keys[b];
    }
    hazard_judge_drawn(&c, 9, "a batch with empty sequences");
}

/* -------------------------------------------------------------------------------------------------
 * Merging
 * ---------------------------------------------------------------------------------------------- */

enum { ROWS = 40, CHANNELS = 8, BATCHES = 2, MANY_HEADS = 20, POSITIONS = 70 };

typedef struct state {
    _Alignas(16) float o[ROWS][CHANNELS]; /* with the alignment that problems promise */
    float lse[ROWS];
} state;

/* About a third of the rows are empty: their contents must not be read. */
static state random_state(uint64_t seed, bool with_empty)
{
    draw_rng rng = draw_stream(seed, 3, 0);
    state s;
    for (int i = 0; i < ROWS; i++) {
        const bool empty = with_empty && draw_chance(&rng, 3);
        s.lse[i] = empty ? -INFINITY : (float)(20 * draw_normal(&rng));
        for (int n = 0; n < CHANNELS; n++) {
            s.o[i][n] = empty ? NAN : (float)draw_normal(&rng);
        }
    }
    return s;
}

/* In the device's memory. */
static state merged(fattn_device *device, const state *a, const state *b)
{
    state result, *on = NULL; /* on[0..2]: a, b, the result */
    void *memory = NULL;
    memset(&result, 0xff, sizeof result);
    fattn_status status = fattn_device_malloc(device, 3 * sizeof *on, &memory);
    on = memory;
    const state *const sources[] = {a, b, &result};
    for (int n = 0; n < 3 && !status; n++) {
        status = fattn_device_copy(device, &on[n], sources[n], sizeof *on, NULL);
    }
    if (!hazard_check(status == FATTN_OK, "%s", fattn_last_reason())) {
        fattn_device_free(device, memory);
        return result;
    }
    const fattn_strides strides = {
        .batch = ROWS * CHANNELS, .seq = CHANNELS, .head = ROWS * CHANNELS};
    const fattn_merge_args args = {
        .struct_size = sizeof args,
        .batch = 1,
        .heads = 1,
        .seqlen = ROWS,
        .dim_v = CHANNELS,
        .o1 = &on[0].o[0][0],
        .lse1 = on[0].lse,
        .o2 = &on[1].o[0][0],
        .lse2 = on[1].lse,
        .o = &on[2].o[0][0],
        .lse = on[2].lse,
        .o1_stride = strides,
        .o2_stride = strides,
        .o_stride = strides,
    };
    hazard_check(fattn_merge(device, &args, NULL) == FATTN_OK &&
                     fattn_device_copy(device, &result, &on[2], sizeof result, NULL) == FATTN_OK &&
                     fattn_stream_synchronize(device, NULL) == FATTN_OK,
                 "%s", fattn_last_reason());
    fattn_device_free(device, memory);
    return result;
}

static void check_row(const state *s, int i, double lse, const double o[CHANNELS], const char *law)
{
    const double slack = 1e-6 * (1 + fabs(lse));
    hazard_check(s->lse[i] == (float)lse || fabs(s->lse[i] - lse) <= slack,
                 "%s: lse %g, expected %g", law, (double)s->lse[i], lse);
    for (int n = 0; n < CHANNELS; n++) {
        hazard_check(fabs((double)s->o[i][n] - o[n]) <= 1e-5, "%s: o %g, expected %g", law,
                     (double)s->o[i][n], o[n]);
    }
}

/* Against the formula in double, row by row. */
static void check_formula(const state *a, const state *b, const state *s)
{
    for (int i = 0; i < ROWS; i++) {
        const double m = fmax((double)a->lse[i], (double)b->lse[i]);
        const bool none = m == -(double)INFINITY;
        const double wa = none ? 0 : exp((double)a->lse[i] - m),
                     wb = none ? 0 : exp((double)b->lse[i] - m);
        double o[CHANNELS];
        for (int n = 0; n < CHANNELS; n++) {
            const double xa = wa == 0 ? 0 : wa * (double)a->o[i][n];
            const double xb = wb == 0 ? 0 : wb * (double)b->o[i][n];
            o[n] = none ? 0 : (xa + xb) / (wa + wb);
        }
        check_row(s, i, none ? -(double)INFINITY : m + log(wa + wb), o, "formula");
    }
}

static void check_merge_laws(fattn_device *device, uint64_t seed)
{
    const state a = random_state(seed, true), b = random_state(seed + 1000, true),
                c = random_state(seed + 2000, true);
    state nothing = random_state(seed + 3000, false);
    for (int i = 0; i < ROWS; i++) {
        nothing.lse[i] = -INFINITY;
        for (int n = 0; n < CHANNELS; n++) {
            nothing.o[i][n] = NAN;
        }
    }
    const state ab = merged(device, &a, &b), ba = merged(device, &b, &a);
    check_formula(&a, &b, &ab);
    hazard_check(memcmp(&ab, &ba, sizeof ab) == 0, "merging does not commute");

    const state left = merged(device, &ab, &c), bc = merged(device, &b, &c);
    const state right = merged(device, &a, &bc);
    for (int i = 0; i < ROWS; i++) {
        double o[CHANNELS];
        for (int n = 0; n < CHANNELS; n++) {
            o[n] = (double)right.o[i][n];
        }
        check_row(&left, i, (double)right.lse[i], o, "associativity");
    }
    const state with_nothing = merged(device, &a, &nothing),
                twice = merged(device, &nothing, &nothing);
    for (int i = 0; i < ROWS; i++) {
        const bool empty = a.lse[i] == -INFINITY;
        hazard_check(with_nothing.lse[i] == a.lse[i], "the empty state changes lse");
        hazard_check(twice.lse[i] == -INFINITY, "two empty states give lse %g",
                     (double)twice.lse[i]);
        for (int n = 0; n < CHANNELS; n++) {
            hazard_check(with_nothing.o[i][n] == (empty ? 0 : a.o[i][n]),
                         "the empty state changes o");
            hazard_check(twice.o[i][n] == 0, "two empty states give o %g", (double)twice.o[i][n]);
        }
    }
}

/* The same rows as BSHD and as BHSD. */
typedef struct layouts {
    _Alignas(16) float o[2][BATCHES * MANY_HEADS * POSITIONS * CHANNELS];
    float lse[BATCHES * MANY_HEADS * POSITIONS];
} layouts;

static fattn_strides layout_strides(int bhsd, int64_t heads, int64_t seqlen)
{
    return bhsd ? (fattn_strides){heads * seqlen * CHANNELS, CHANNELS, seqlen * CHANNELS}
                : (fattn_strides){heads * seqlen * CHANNELS, heads * CHANNELS, CHANNELS};
}

static void draw_layouts(layouts *to, uint64_t seed, int64_t heads, int64_t seqlen)
{
    draw_rng rng = draw_stream(seed, 3, 0);
    for (int64_t n = 0; n < BATCHES * heads * seqlen; n++) {
        const int64_t b = n / heads / seqlen, h = n / seqlen % heads, i = n % seqlen;
        to->lse[n] = draw_chance(&rng, 5) ? -INFINITY : (float)(3 * draw_normal(&rng));
        for (int64_t c = 0; c < CHANNELS; c++) {
            const float x = (float)draw_normal(&rng);
            for (int bhsd = 0; bhsd < 2; bhsd++) {
                const fattn_strides s = layout_strides(bhsd, heads, seqlen);
                to->o[bhsd][b * s.batch + h * s.head + i * s.seq + c] = x;
            }
        }
    }
}

/* Merges in both layouts; rows have the same bits. */
static void check_merge_layouts(fattn_device *device, int64_t heads, int64_t seqlen)
{
    static layouts on_host[3];
    void *memory = NULL;
    draw_layouts(&on_host[0], 11, heads, seqlen);
    draw_layouts(&on_host[1], 12, heads, seqlen);
    memset(&on_host[2], 0xff, sizeof on_host[2]);
    fattn_status status = fattn_device_malloc(device, sizeof on_host, &memory);
    layouts *const on = memory;
    for (int bhsd = 0; bhsd < 2; bhsd++) {
        const fattn_strides strides = layout_strides(bhsd, heads, seqlen);
        const fattn_merge_args args = {.struct_size = sizeof args,
                                       .batch = BATCHES,
                                       .heads = heads,
                                       .seqlen = seqlen,
                                       .dim_v = CHANNELS,
                                       .o1 = on[0].o[bhsd],
                                       .lse1 = on[0].lse,
                                       .o2 = on[1].o[bhsd],
                                       .lse2 = on[1].lse,
                                       .o = on[2].o[bhsd],
                                       .lse = on[2].lse,
                                       .o1_stride = strides,
                                       .o2_stride = strides,
                                       .o_stride = strides};
        status = status ? status : fattn_device_copy(device, on, on_host, sizeof on_host, NULL);
        status = status ? status : fattn_merge(device, &args, NULL);
        const size_t bytes = sizeof on->o[bhsd];
        status = status ? status
                        : fattn_device_copy(device, on_host[2].o[bhsd], on[2].o[bhsd], bytes, NULL);
        status = status ? status : fattn_stream_synchronize(device, NULL);
    }
    fattn_device_free(device, memory);
    bool same = hazard_check(status == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t n = 0; n < BATCHES * heads * seqlen && same; n++) {
        const int64_t b = n / heads / seqlen, h = n / seqlen % heads, i = n % seqlen;
        const fattn_strides s = layout_strides(0, heads, seqlen);
        const fattn_strides t = layout_strides(1, heads, seqlen);
        const float *const o = &on_host[2].o[0][b * s.batch + h * s.head + i * s.seq];
        same = !isnan(*o) && memcmp(o, &on_host[2].o[1][b * t.batch + h * t.head + i * t.seq],
                                    CHANNELS * sizeof(float)) == 0;
    }
    hazard_check(same, "%lld heads of %lld rows: layouts differ", (long long)heads,
                 (long long)seqlen);
}

static void f3(void)
{
    static const int64_t shapes[][2] = {{1, 70}, {2, 33}, {3, 70}, {17, 5}, {20, 1}, {20, 70}};
    for (int n = 0; n < hazard_place_count; n++) {
        if (n > 0 && hazard_places[n].device == hazard_places[n - 1].device) {
            continue;
        }
        for (uint64_t seed = 0; seed < 30; seed++) {
            check_merge_laws(hazard_places[n].device, seed);
        }
        for (size_t shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++) {
            check_merge_layouts(hazard_places[n].device, shapes[shape][0], shapes[shape][1]);
        }
    }
}

/* Runs the case's keys in `parts` shards, each with its position in the whole, and merges. */
static bool run_shards(const place *at, const draw_case *c, int64_t parts, state *sum)
{
    const fattn_problem *const p = &c->problem;
    const int64_t keys = p->seqlen_k, rows = p->seqlen_q;
    bool good = true;
    for (int64_t part = 0; part < parts && good; part++) {
        const int64_t first = keys * part / parts, end = keys * (part + 1) / parts;
        state shard;
        fattn_problem local = *p;
        fattn_buffers buf = c->buffers;
        local.features |= FATTN_POSITIONS;
        local.seqlen_k = end - first;
        local.dtype_o = FATTN_F32;
        local.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
        const int64_t bytes = c->tensors[DRAW_K].size;
        buf.k = (const char *)buf.k + first * CHANNELS * bytes;
        buf.v = (const char *)buf.v + first * CHANNELS * bytes;
        buf.k_offset = first, buf.whole_k = keys, buf.whole_q = rows;
        buf.o = &shard.o[0][0], buf.lse = shard.lse;
        fattn_plan *plan = NULL;
        good =
            fattn_plan_create_with(at->device, &local, at->kernel->name, NULL, &plan) == FATTN_OK &&
            hazard_execute(plan, &buf) == FATTN_OK;
        fattn_plan_destroy(plan);
        if (good && part == 0) {
            *sum = shard;
        } else if (good) {
            *sum = merged(at->device, sum, &shard);
        }
    }
    return good;
}

/* Shards of the keys give the same as the whole, with intermediate o in f32: the error of the
 * merged result against float64 is at most twice that of a single pass. */
static void check_shards(fattn_dtype dtype, uint64_t features, int64_t parts)
{
    draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 1, 1, ROWS, 173, CHANNELS);
    c.problem.features = features;
    c.problem.dtype_o = FATTN_F32;
    fattn_naive exact = {0};
    judge_truth truth = {0};
    if (!hazard_build(&c)) {
        return;
    }
    judge_verdict v;
    judge_run(hazard_places[0].device, NULL, &c, &truth, &v); /* for the oracle's answer */
    exact = truth.exact;
    for (int n = 0; n < hazard_place_count; n++) {
        state sum;
        if (!hazard_takes(&hazard_places[n], &c) || hazard_places[n].kernel->rows_max != 0) {
            continue;
        }
        hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                     fattn_last_reason());
        if (!hazard_check(run_shards(&hazard_places[n], &c, parts, &sum), "%s: %s",
                          hazard_places[n].kernel->name, fattn_last_reason())) {
            continue;
        }
        double single = 0, shards = 0, largest = 0;
        for (int64_t i = 0; i < ROWS; i++) {
            const double lse = exact.lse[i];
            hazard_check((double)sum.lse[i] == lse || fabs((double)sum.lse[i] - lse) <= 2e-5,
                         "%s: lse of %lld shards is %g, expected %g", hazard_places[n].kernel->name,
                         (long long)parts, (double)sum.lse[i], lse);
            for (int64_t d = 0; d < CHANNELS; d++) {
                const double x = exact.o[i * CHANNELS + d];
                const double o = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, i, 0, d));
                single = worst_of(single, fabs(o - x));
                shards = worst_of(shards, fabs((double)sum.o[i][d] - x));
                largest = fmax(largest, fabs(x));
            }
        }
        hazard_check(shards <= 2 * single + 1e-6 * largest,
                     "%s: error %g of %lld shards, %g of one pass", hazard_places[n].kernel->name,
                     shards, (long long)parts, single);
    }
    judge_truth_free(&truth);
    draw_free(&c);
}

static void f8(void)
{
    static const uint64_t features[] = {0, FATTN_CAUSAL, FATTN_ALIBI, FATTN_ALIBI | FATTN_CAUSAL};
    EACH (f, features) {
        for (int64_t parts = 2; parts <= 7; parts++) {
            check_shards(FATTN_F32, features[f], parts);
        }
    }
}

static void f12(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F16, FATTN_BF16};
    EACH (t, dtypes) {
        for (int64_t parts = 2; parts <= 16; parts *= 2) {
            check_shards(dtypes[t], FATTN_CAUSAL, parts);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * lse
 * ---------------------------------------------------------------------------------------------- */

/* Natural logarithm: exp(score - lse) sums to 1. */
static void f4(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 7, 90, 16);
        if (hazard_build(&c) && hazard_takes(&hazard_places[n], &c)) {
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                         fattn_last_reason());
            for (int64_t i = 0; i < 7; i++) {
                double sum = 0;
                for (int64_t j = 0; j < 90; j++) {
                    double x = 0;
                    for (int64_t d = 0; d < 16; d++) {
                        x += draw_get(&c, DRAW_Q, i * 16 + d) * draw_get(&c, DRAW_K, j * 16 + d);
                    }
                    sum += exp(x / 4 - draw_get(&c, DRAW_LSE, i));
                }
                hazard_check(fabs(sum - 1) <= 1e-5, "%s: probabilities sum to %g",
                             hazard_places[n].kernel->name, sum);
            }
        }
        draw_free(&c);
    }
}

/* Splits compute lse internally, whether or not the caller requests it. */
static void f5(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 2, 2, 1, 2, 500, 16);
        for (int64_t splits = 1;
             splits <= 8 && hazard_build(&c) && cuts_keys(&hazard_places[n], &c); splits++) {
            c.problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
            hazard_check(run_split(&hazard_places[n], &c, splits) == FATTN_OK, "%s",
                         fattn_last_reason());
            unsigned char *const o = hazard_copy(&c, DRAW_O);
            hazard_clear_outputs(&c);
            void *const lse = c.buffers.lse;
            c.buffers.lse = NULL;
            c.problem.outputs = FATTN_OUT_O;
            hazard_check(run_split(&hazard_places[n], &c, splits) == FATTN_OK &&
                             hazard_equals(&c, DRAW_O, o),
                         "%s: %lld splits without lse differ: %s", hazard_places[n].kernel->name,
                         (long long)splits, fattn_last_reason());
            c.buffers.lse = lse;
            free(o);
            draw_free(&c);
            c = hazard_case(FATTN_FORWARD, FATTN_F32, 2, 2, 1, 2, 500, 16);
        }
        draw_free(&c);
    }
}

static void f6(void)
{
    judge_truth truth = {0};
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 4, 2, 1, 700, 16);
    if (!hazard_build(&c)) {
        return;
    }
    for (int n = 0; n < hazard_place_count; n++) {
        for (c.splits = 1; c.splits <= 128 && cuts_keys(&hazard_places[n], &c); c.splits++) {
            judge_verdict v;
            c.tile = 1;
            judge_run(hazard_places[n].device, hazard_places[n].kernel, &c, &truth, &v);
            hazard_check(v.outcome == JUDGE_PASSED, "%s, %lld splits: %s",
                         hazard_places[n].kernel->name, (long long)c.splits, v.reason);
        }
    }
    judge_truth_free(&truth);
    draw_free(&c);
}

/* Each code path that the tests rely on is really taken. */
static void f7(void)
{
    int cutting = 0, by_itself = 0;
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        const bool any = at->kernel->dtypes & FATTN_DTYPE_BIT(FATTN_F32);
        const int64_t rows = at->kernel->rows_min > 1 ? at->kernel->rows_min : 1;
        draw_case c =
            hazard_case(FATTN_FORWARD, any ? FATTN_F32 : FATTN_BF16, 1, 1, 1, rows, 16384, 16);
        for (const fattn_tile *tile = at->kernel->tiles; tile->br != 0; tile++) {
            c.problem.op =
                at->kernel->ops & FATTN_OP_BIT(FATTN_FORWARD) ? FATTN_FORWARD : FATTN_BACKWARD;
            c.problem.outputs = 0;
            c.problem.dtype_kv = at->kernel->caches_alone ? FATTN_E4M3 : FATTN_DTYPE_DEFAULT;
            const bool splits = at->kernel->split && c.problem.op == FATTN_FORWARD;
            const fattn_wish wish = {.tile = *tile, .splits = splits ? 4 : 0};
            fattn_plan *plan = NULL;
            fattn_status status =
                fattn_plan_create_with(at->device, &c.problem, at->kernel->name, &wish, &plan);
            if (status && at->kernel->features & FATTN_BIAS) { /* some tiles are for a bias alone */
                fattn_problem biased = c.problem;
                biased.features = FATTN_BIAS;
                biased.dtype_bias = biased.dtype;
                biased.bias_stride[2] = biased.seqlen_k, biased.bias_stride[3] = 1;
                status =
                    fattn_plan_create_with(at->device, &biased, at->kernel->name, &wish, &plan);
            }
            hazard_check(status == FATTN_OK, "%s: %s", at->kernel->name, fattn_last_reason());
            hazard_check(plan == NULL ||
                             (plan->tiling.br == tile->br && plan->tiling.bc == tile->bc &&
                              plan->tiling.splits == (splits ? 4 : 1) &&
                              plan->kernel == at->kernel),
                         "%s: the plan is not what was asked for", at->kernel->name);
            cutting += splits;
            fattn_plan_destroy(plan);
        }
        fattn_plan *plan = NULL;
        if (fattn_plan_create(at->device, &c.problem, &plan) == FATTN_OK) {
            by_itself += plan->tiling.splits > 1;
        }
        fattn_plan_destroy(plan);
        draw_free(&c);
    }
    hazard_check(cutting > 0, "no row can cut keys");
    hazard_check(by_itself > 0, "the planner never cuts the keys of one query by itself");
}

static void f9(void)
{
    for (int64_t rows = 1; rows <= 130; rows++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 3, 1, rows, 40, 4);
        hazard_judge_drawn(&c, 0, "%lld rows", (long long)rows);
    }
    for (int64_t rows = 1; rows <= 130; rows += 16) {
        draw_case c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, 3, 1, rows, 40, 4);
        hazard_judge_drawn(&c, 0, "backward of %lld rows", (long long)rows);
    }
}

/* From 2,048 rows on, blocks of GPUs merge the parts of several rows. */
static void f9_many(void)
{
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F32};
    static const int64_t channels[] = {8, 136};
    EACH (d, dtypes) {
        draw_case c = hazard_case(FATTN_FORWARD, dtypes[d], 2, 16, 4, 65, 270, 8);
        c.problem.dim_v = channels[d];
        c.problem.features = FATTN_SEQUSED_K;
        c.sequences[1].keys = 30;
        hazard_judge_drawn(&c, 2, "%lld channels", (long long)channels[d]);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Invariance
 * ---------------------------------------------------------------------------------------------- */

enum { INVARIANT_HEADS = 2, INVARIANT_ROWS = 64, INVARIANT_DIM = 64 };

/* Only rows first .. past - 1 of sequence b, without the keys that a causal mask hides from them.
 * The diagonal is bottom-right and therefore stays. */
static void check_alone(const place *at, const draw_case *c, int64_t b, int64_t first, int64_t past)
{
    _Alignas(
        16) float o[INVARIANT_ROWS * INVARIANT_HEADS * INVARIANT_DIM]; /* aligned like the others */
    float lse[INVARIANT_ROWS * INVARIANT_HEADS];
    fattn_problem p = c->problem;
    fattn_buffers buf = c->buffers;
    fattn_plan *plan = NULL;
    const int64_t size = fattn_dtype_size(p.dtype), rows = p.seqlen_q, keys = p.seqlen_k;
    const int64_t q = (b * rows + first) * INVARIANT_HEADS * p.dim * size;
    if (p.features & FATTN_BIAS) {
        buf.bias = (const char *)buf.bias + fattn_dtype_size(p.dtype_bias) *
                                                (b * p.bias_stride[0] + first * p.bias_stride[2]);
    }
    if (p.features & FATTN_MASK) {
        buf.mask += b * p.mask_stride[0] + first * p.mask_stride[2];
    }
    p.batch = 1, p.seqlen_q = past - first;
    p.seqlen_k -= p.features & FATTN_CAUSAL ? rows - past : 0;
    buf.q = (const char *)buf.q + q;
    buf.k = (const char *)buf.k + b * keys * p.dim * size;
    buf.v = (const char *)buf.v + b * keys * p.dim * size;
    buf.o = o, buf.lse = lse;
    hazard_check(fattn_plan_create_with(at->device, &p, at->kernel->name, NULL, &plan) ==
                         FATTN_OK &&
                     hazard_execute(plan, &buf) == FATTN_OK,
                 "%s", fattn_last_reason());
    fattn_plan_destroy(plan);
    const size_t bytes = (size_t)((past - first) * INVARIANT_HEADS * p.dim * size);
    hazard_check(
        memcmp(o, (const char *)c->buffers.o + q, bytes) == 0,
        "%s: %s %lld x %lld, features 0x%llx: rows %lld to %lld of sequence %lld depend on "
        "their mates",
        at->kernel->name, fattn_dtype_name(p.dtype), (long long)rows, (long long)keys,
        (unsigned long long)p.features, (long long)first, (long long)past, (long long)b);
}

/* With FATTN_BATCH_INVARIANT a sequence has the same bits alone as among others, and a row the same
 * bits with other rows around it. small: all values except those of the last keys are small. */
static void check_invariance(const place *at, fattn_dtype dtype, int64_t rows, int64_t keys,
                             int64_t dim, uint64_t features, bool small)
{
    enum { BATCH = 3 };
    draw_case c = hazard_case(FATTN_FORWARD, dtype, BATCH, INVARIANT_HEADS, 1, rows, keys, dim);
    c.problem.features = FATTN_BATCH_INVARIANT | features;
    c.problem.dtype_bias = features & FATTN_BIAS ? dtype : FATTN_DTYPE_DEFAULT;
    c.problem.softcap = features & FATTN_SOFTCAP ? 10 : 0; /* scores are at most about 4 */
    if (!hazard_build(&c) || !hazard_takes(at, &c)) {
        draw_free(&c);
        return;
    }
    for (int64_t n = 0; small && n < BATCH * keys * dim; n++) {
        if (n / dim % keys < keys - 1) {
            const double v = fattn_dtype_load(dtype, c.buffers.v, n);
            fattn_dtype_store(dtype, (void *)c.buffers.v, n, v * 0x1p-80);
        }
    }
    hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t b = 0; b < BATCH; b++) {
        for (int64_t first = 0; first<rows; first += rows> 4 ? 3 : 1) {
            check_alone(at, &c, b, first, rows);
            check_alone(at, &c, b, first / 2, first / 2 + 1);
        }
    }
    draw_free(&c);
}

/* And the tile in which a row is summed depends on no length, for any size of fast memory. */
static void check_tile(const place *at, fattn_dtype dtype, int64_t dim, uint64_t features)
{
    static const int64_t lengths[] = {1, 33, 64, 130, 250, 257, 384, 400, 700, 5000};
    const fattn_wish none = {.splits = 0};
    for (int64_t fast = 1 << 17; fast <= 1 << 22; fast += fast / 8) {
        const fattn_limits limits = {.fast_memory = fast, .parallelism = 8, .units = 4};
        fattn_tiling first = {.br = 0};
        EACH (n, lengths) {
            draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 2, 1, lengths[n], lengths[n], dim);
            c.problem.features = FATTN_BATCH_INVARIANT | features;
            fattn_problem p;
            fattn_tiling t;
            const bool taken = fattn_problem_normalise(&c.problem, &p) == FATTN_OK &&
                               hazard_takes(at, &c) &&
                               fattn_tiling_choose(&p, &limits, at->kernel, &none, &t) == FATTN_OK;
            draw_free(&c);
            if (!taken) {
                continue;
            }
            first = first.br ? first : t;
            hazard_check(t.br == first.br && t.bc == first.bc,
                         "%s: %s, D %lld, %lld bytes: %lld x %lld of %lld keys, not %lld x %lld",
                         at->kernel->name, fattn_dtype_name(dtype), (long long)dim, (long long)fast,
                         (long long)t.br, (long long)t.bc, (long long)lengths[n],
                         (long long)first.br, (long long)first.bc);
        }
    }
}

static void f10(void)
{
    static const int64_t rows[] = {1, 2, 7, 33, INVARIANT_ROWS}, keys[] = {64, 130, 600};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (r, rows) {
            EACH (k, keys) {
                EACH (d, dtypes) {
                    const place *const at = &hazard_places[n];
                    check_invariance(at, dtypes[d], rows[r], keys[k], 8, 0, false);
                    check_invariance(at, dtypes[d], rows[r], keys[k], 8, FATTN_CAUSAL, false);
                    check_invariance(at, dtypes[d], rows[r], keys[k], INVARIANT_DIM, FATTN_CAUSAL,
                                     d > 0);
                }
            }
        }
        EACH (d, dtypes) {
            check_tile(&hazard_places[n], dtypes[d], 64, 0);
            check_tile(&hazard_places[n], dtypes[d], 256, FATTN_MASK | FATTN_CAUSAL);
        }
    }
}

/* The bits of a row whose scores are all negative, and which raises its reference only in its first
 * tile, among rows that raise theirs in another. Key 100 and the last key dominate such a row. */
static void check_negative(const place *at, fattn_dtype dtype, int64_t dim)
{
    enum { BATCH = 2, FEW = 16, KEYS = 300, LARGE = 100 };
    draw_case c = hazard_case(FATTN_FORWARD, dtype, BATCH, INVARIANT_HEADS, 1, FEW, KEYS, dim);
    c.problem.features = FATTN_BATCH_INVARIANT | FATTN_SCALE;
    c.problem.scale = 1;
    if (!hazard_build(&c) || !hazard_takes(at, &c)) {
        draw_free(&c);
        return;
    }
    for (int64_t n = 0; n < BATCH * KEYS; n++) {
        const int64_t j = n % KEYS;
        const double low = j == LARGE ? 0.1 : j == KEYS - 1 ? 4 : 30;
        const double high = fattn_dtype_load(dtype, c.buffers.k, n * dim + 1);
        fattn_dtype_store(dtype, (void *)c.buffers.k, n * dim, low);
        fattn_dtype_store(dtype, (void *)c.buffers.k, n * dim + 1, j == LARGE ? 60 : high);
    }
    for (int64_t n = 0; n < BATCH * FEW * INVARIANT_HEADS; n++) {
        const bool rises = n / INVARIANT_HEADS % 4 == 1;
        for (int64_t e = 0; e < dim; e++) {
            const double low = e == 0 ? -1 : 0, high = e == 1 ? 1 : 0;
            fattn_dtype_store(dtype, (void *)c.buffers.q, n * dim + e, rises ? high : low);
        }
    }
    hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t n = 0; n < BATCH * FEW; n++) {
        check_alone(at, &c, n / FEW, n % FEW, n % FEW + 1);
    }
    draw_free(&c);
}

static void f10_features(void)
{
    static const uint64_t features[] = {FATTN_SOFTCAP,
                                        FATTN_SOFTCAP | FATTN_CAUSAL,
                                        FATTN_ALIBI | FATTN_CAUSAL,
                                        FATTN_SINK | FATTN_CAUSAL,
                                        FATTN_SOFTCAP | FATTN_ALIBI | FATTN_CAUSAL,
                                        FATTN_BIAS,
                                        FATTN_MASK,
                                        FATTN_BIAS | FATTN_MASK | FATTN_CAUSAL};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (f, features) {
            EACH (d, dtypes) {
                check_invariance(&hazard_places[n], dtypes[d], 33, 300, INVARIANT_DIM, features[f],
                                 false);
            }
        }
    }
}

static void f10_negative(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (d, dtypes) {
            check_negative(&hazard_places[n], dtypes[d], INVARIANT_DIM);
            check_negative(&hazard_places[n], dtypes[d], 2 * INVARIANT_DIM);
        }
    }
}

static void f11(void)
{
    for (uint32_t subset = 1; subset < 32; subset++) {
        for (int others = 0; others < 2; others++) {
            draw_case c = hazard_case(FATTN_BACKWARD, FATTN_F32, 2, 4, 2, 21, 35, 16);
            c.problem.features = FATTN_BIAS | FATTN_SINK | FATTN_CAUSAL;
            c.problem.outputs = subset << 2;
            c.pass_unwanted = others;
            hazard_judge_drawn(&c, 0, "gradients 0x%x", (unsigned)c.problem.outputs);
        }
    }
}

static const hazard table[] = {
    {"hazard_F1", "lse transposed where heads were packed and keys split", f1, NULL},
    {"hazard_F2", "an early exit wrote -inf into another sequence's lse", f2, NULL},
    {"hazard_F3", "merging two empty states gave NaN", f3, NULL},
    {"hazard_F4", "lse in base 2 was taken for base e", f4, NULL},
    {"hazard_F5", "splits needed an lse that was not requested", f5, NULL},
    {"hazard_F6", "the number of splits changed the result", f6, NULL},
    {"hazard_F7", "the split path was dead and tests never noticed", f7, NULL},
    {"hazard_F8", "lse off by a constant: seen only when shards are merged", f8, NULL},
    {"hazard_F9", "lse wrong for some remainders of a tile", f9, NULL},
    {"hazard_F9_many", "lse and o of many rows whose parts are merged", f9_many, NULL},
    {"hazard_F10", "a result depended on its batch mates", f10, NULL},
    {"hazard_F10_features", "a feature was computed as other rows of the batch allowed",
     f10_features, NULL},
    {"hazard_F10_negative", "a row's bits depended on whether its neighbours' maxima rose",
     f10_negative, NULL},
    {"hazard_F11", "a subset of gradients dereferenced a null pointer", f11, NULL},
    {"hazard_F12", "partial results in half precision lost accuracy", f12, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
