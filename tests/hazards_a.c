/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group A: softmax numerics, masks, NaN. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/hazard.h"
#include "tests/strip.h"
#include "tests/worst.h"

static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};

/* Writes value to the pairs (i, j) of bias or mask that `where` selects, in every batch and
 * head. */
static void paint(draw_case *c, draw_id id, double value,
                  bool (*where)(int64_t i, int64_t j, int64_t n), int64_t n)
{
    const fattn_problem *const p = &c->problem;
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            for (int64_t i = 0; i < p->seqlen_q; i++) {
                for (int64_t j = 0; j < p->seqlen_k; j++) {
                    if (where(i, j, n)) {
                        draw_set(c, id, draw_at(c, id, b, h, i, j), value);
                    }
                }
            }
        }
    }
}

static bool everywhere(int64_t i, int64_t j, int64_t n) { return i >= 0 && j >= 0 && n >= 0; }

static bool third_rows(int64_t i, int64_t j, int64_t n) { return i % 3 == n && j >= 0; }

static bool prefix(int64_t i, int64_t j, int64_t n) { return i >= 0 && j < n; }

static bool suffix(int64_t i, int64_t j, int64_t n) { return i >= 0 && j >= n; }

static bool outside_band(int64_t i, int64_t j, int64_t n) { return j < i || j >= i + n; }

/* Empty rows give exactly 0 and -inf, and a gradient of exactly 0. */
static void check_empty_rows(const draw_case *c, const place *at)
{
    const bool backward = c->problem.op == FATTN_BACKWARD;
    const draw_id id = backward ? DRAW_DQ : DRAW_O;
    const fattn_status status = hazard_run(at, c, NULL);
    hazard_check(status == FATTN_OK, "%s: %s", at->kernel->name, fattn_last_reason());
    for (int64_t h = 0; h < c->problem.heads_q; h++) {
        for (int64_t i = 1; i < c->problem.seqlen_q; i += 3) {
            for (int64_t n = 0; n < c->problem.dim; n++) {
                const double x = draw_get(c, id, draw_at(c, id, 0, i, h, n));
                hazard_check(x == 0, "%s: %s[%lld] is %g", at->kernel->name, draw_name(id),
                             (long long)i, x);
            }
            const double lse = draw_get(c, DRAW_LSE, draw_at(c, DRAW_LSE, 0, i, h, 0));
            hazard_check(lse == -(double)INFINITY, "%s: lse[%lld] is %g", at->kernel->name,
                         (long long)i, lse);
        }
    }
}

/* dO of an empty row reaches no gradient. */
static void check_no_contribution(draw_case *c, const place *at)
{
    unsigned char *dk = hazard_copy(c, DRAW_DK), *dv = hazard_copy(c, DRAW_DV);
    for (int64_t i = 1; i < c->problem.seqlen_q; i += 3) {
        for (int64_t n = 0; n < c->problem.dim; n++) {
            draw_set(c, DRAW_DOUT, draw_at(c, DRAW_DOUT, 0, i, 0, n), 30000);
        }
    }
    hazard_clear_outputs(c);
    hazard_check(hazard_run(at, c, NULL) == FATTN_OK, "%s: %s", at->kernel->name,
                 fattn_last_reason());
    hazard_check(hazard_equals(c, DRAW_DK, dk) && hazard_equals(c, DRAW_DV, dv),
                 "%s: dO of an empty row reaches dk or dv", at->kernel->name);
    free(dk);
    free(dv);
}

static void a1_case(fattn_op op, fattn_dtype dtype, int way)
{
    draw_case c = hazard_case(op, dtype, 1, 2, 1, 70, 90, 24);
    c.problem.features |= way == 0 ? FATTN_MASK : FATTN_BIAS;
    c.problem.features |= way == 2 ? FATTN_CAUSAL : 0;
    if (!hazard_build(&c)) {
        return;
    }
    if (way == 0) {
        paint(&c, DRAW_MASK, 1, everywhere, 0);
        paint(&c, DRAW_MASK, 0, third_rows, 1);
    } else {
        paint(&c, DRAW_BIAS, 0, everywhere, 0);
        paint(&c, DRAW_BIAS, -(double)INFINITY, third_rows, 1);
    }
    hazard_check(draw_save(&c) == FATTN_OK, "%s", fattn_last_reason());
    for (int n = 0; n < hazard_place_count; n++) {
        if (hazard_takes(&hazard_places[n], &c)) {
            hazard_clear_outputs(&c);
            check_empty_rows(&c, &hazard_places[n]);
            if (op == FATTN_BACKWARD) {
                check_no_contribution(&c, &hazard_places[n]);
            }
        }
    }
    hazard_clear_outputs(&c);
    hazard_judge(&c, 3, "way %d", way);
}

static void a1(void)
{
    EACH (o, ops) {
        EACH (t, dtypes) {
            for (int way = 0; way < 3; way++) {
                a1_case(ops[o], dtypes[t], way);
            }
        }
    }
    /* Only causal: with more rows than keys the first rows are empty. */
    EACH (o, ops) {
        draw_case c = hazard_case(ops[o], FATTN_F32, 2, 2, 2, 200, 70, 8);
        c.problem.features = FATTN_CAUSAL;
        hazard_judge_drawn(&c, 3, "causal, 200 rows, 70 keys");
    }
}

static void a2(void)
{
    static const int64_t lengths[] = {17, 33, 65, 129, 640, 2049}, widths[] = {1, 2, 10, 31, 64};
    EACH (l, lengths) {
        EACH (w, widths) {
            if (lengths[l] > 1000 && widths[w] != 10) {
                continue; /* the oracle computes every pair */
            }
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, lengths[l], lengths[l], 2);
            c.problem.features = FATTN_WINDOW;
            c.problem.window_left = 0, c.problem.window_right = widths[w] - 1;
            hazard_judge_drawn(&c, 0, "window %lld of %lld", (long long)widths[w],
                               (long long)lengths[l]);

            draw_case m = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, lengths[l], lengths[l], 2);
            m.problem.features = FATTN_MASK;
            if (lengths[l] < 1000 && hazard_build(&m)) {
                paint(&m, DRAW_MASK, 1, everywhere, 0);
                paint(&m, DRAW_MASK, 0, outside_band, widths[w]);
                hazard_judge(&m, 0, "band mask %lld of %lld", (long long)widths[w],
                             (long long)lengths[l]);
            } else {
                draw_free(&m);
            }
        }
    }
}

static void a3(void)
{
    static const int64_t prefixes[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 199};
    EACH (n, prefixes) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 2, 1, 3, 200, 8);
        c.problem.features = FATTN_BIAS;
        if (hazard_build(&c)) {
            paint(&c, DRAW_BIAS, 0.5, everywhere, 0);
            paint(&c, DRAW_BIAS, -(double)INFINITY, prefix, prefixes[n]);
            hazard_judge(&c, 8, "-inf in the first %lld keys", (long long)prefixes[n]);
        }
    }
}

/* Adding a constant to all scores leaves o and shifts lse. In f32 a score of size X has an error of
 * X 2^-24, and a kernel may lose a few of these. */
static void a4(void)
{
    static const double moves[] = {-1e5, -2.45e5, -1e6, 1e5};
    EACH (m, moves) {
        for (int n = 0; n < hazard_place_count; n++) {
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 5, 150, 8);
            c.problem.features = FATTN_BIAS;
            if (!hazard_build(&c) || !hazard_takes(&hazard_places[n], &c)) {
                draw_free(&c);
                continue;
            }
            const char *const name = hazard_places[n].kernel->name;
            paint(&c, DRAW_BIAS, 0, everywhere, 0);
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s: %s", name,
                         fattn_last_reason());
            double o[5][8], lse[5];
            for (int64_t i = 0; i < 5; i++) {
                lse[i] = draw_get(&c, DRAW_LSE, draw_at(&c, DRAW_LSE, 0, i, 0, 0));
                for (int64_t d = 0; d < 8; d++) {
                    o[i][d] = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, i, 0, d));
                }
            }
            paint(&c, DRAW_BIAS, moves[m], everywhere, 0);
            hazard_clear_outputs(&c);
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s: %s", name,
                         fattn_last_reason());
            const double lost = 4 * 0x1p-24 * fabs(moves[m]);
            for (int64_t i = 0; i < 5; i++) {
                const double l = draw_get(&c, DRAW_LSE, draw_at(&c, DRAW_LSE, 0, i, 0, 0));
                hazard_check(fabs(l - lse[i] - moves[m]) <= lost, "%s, %g: lse %g from %g", name,
                             moves[m], l, lse[i]);
                for (int64_t d = 0; d < 8; d++) {
                    const double x = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, i, 0, d));
                    hazard_check(fabs(x - o[i][d]) <= 6 * lost, "%s, %g: o %g from %g", name,
                                 moves[m], x, o[i][d]);
                }
            }
            draw_free(&c);
        }
    }
}

static void a5(void)
{
    EACH (t, dtypes) {
        draw_case c = hazard_case(FATTN_FORWARD, dtypes[t], 1, 7, 1, 88, 448, 16);
        c.problem.features = FATTN_CAUSAL | FATTN_BIAS;
        c.tensors[DRAW_BIAS].flat[1] = true;
        if (hazard_build(&c)) {
            paint(&c, DRAW_BIAS, -150, everywhere, 0);
            hazard_judge(&c, 3, "dtype %d", dtypes[t]);
        }
    }
}

static void a6(void)
{
    static const int64_t lengths[] = {64, 192, 704, 832, 1088, 2112};
    EACH (l, lengths) {
        EACH (o, ops) {
            draw_case c = hazard_case(ops[o], FATTN_BF16, 1, 1, 1, lengths[l], lengths[l], 4);
            c.problem.features = FATTN_MASK | FATTN_BIAS | FATTN_SCALE;
            c.problem.scale = 0.5;
            c.tensors[DRAW_MASK].flat[2] = true;
            c.tensors[DRAW_BIAS].flat[2] = c.tensors[DRAW_BIAS].flat[3] = true;
            if (lengths[l] > 1000 && ops[o] == FATTN_BACKWARD && lengths[l] != 1088) {
                draw_free(&c);
            } else if (hazard_build(&c)) {
                draw_set(&c, DRAW_BIAS, 0, -120);
                hazard_judge(&c, 0, "length %lld", (long long)lengths[l]);
            }
        }
    }
}

/* NaN and infinities appear in the same elements everywhere: each element has the oracle's
 * class. */
static void a7(void)
{
    static const double wild[] = {NAN, INFINITY, -INFINITY};
    static const draw_id tensors[] = {DRAW_Q, DRAW_K, DRAW_V, DRAW_DOUT};
    EACH (o, ops) {
        EACH (w, wild) {
            EACH (t, tensors) {
                draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 2, 40, 50, 8);
                c.problem.features = FATTN_CAUSAL;
                c.family = DRAW_WILD;
                if (!hazard_build(&c) || !c.tensors[tensors[t]].present) {
                    draw_free(&c);
                    continue;
                }
                draw_set(&c, tensors[t], draw_at(&c, tensors[t], 0, 20, 1, 3), wild[w]);
                hazard_judge(&c, 2, "%g in %s", wild[w], draw_name(tensors[t]));
            }
        }
    }
}

static void a8(void)
{
    for (int64_t index = 0; index < 120; index++) {
        draw_case c;
        if (!hazard_check(draw_problem(&c, 8, index) == 0, "case %lld: no memory",
                          (long long)index) ||
            c.problem.op != FATTN_FORWARD || !hazard_build(&c) || !c.tensors[DRAW_LSE].present) {
            draw_free(&c);
            continue;
        }
        for (int n = 0; n < hazard_place_count; n++) {
            c.problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
            if (!hazard_takes(&hazard_places[n], &c)) {
                continue;
            }
            hazard_clear_outputs(&c);
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                         fattn_last_reason());
            unsigned char *const o = hazard_copy(&c, DRAW_O);
            hazard_clear_outputs(&c);
            c.problem.outputs = FATTN_OUT_O;
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                         fattn_last_reason());
            hazard_check(hazard_equals(&c, DRAW_O, o),
                         "%s, case %lld: o depends on lse being wanted",
                         hazard_places[n].kernel->name, (long long)index);
            free(o);
        }
        draw_free(&c);
    }
}

/* A bias of -inf hides the keys j for which where(i, j, 700) holds. A NaN in the value of one of
 * them, `key`, whose tile has no other keys, does not reach o. GPUs do not promise this
 * (docs/NUMERICS.md, section 8). */
static void weightless_nan(fattn_dtype dtype, bool (*where)(int64_t i, int64_t j, int64_t n),
                           int64_t key)
{
    draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 2, 1, 40, 1400, 16);
    c.problem.features |= FATTN_BIAS;
    if (!hazard_build(&c)) {
        return;
    }
    paint(&c, DRAW_BIAS, 0, everywhere, 0);
    paint(&c, DRAW_BIAS, -(double)INFINITY, where, 700);
    draw_set(&c, DRAW_V, draw_at(&c, DRAW_V, 0, key, 0, 7), NAN);
    hazard_judge(&c, 3, "a NaN of no weight in key %lld", (long long)key);
}

/* A NaN in row i of q reaches only row i of o; one in a visible key or value reaches o. */
static void a9(void)
{
    static const draw_id tensors[] = {DRAW_Q, DRAW_K, DRAW_V};
    if (hazard_on_host(&hazard_places[0])) {
        weightless_nan(FATTN_F32, suffix, 1390);
        weightless_nan(FATTN_BF16, suffix, 1390);
        weightless_nan(FATTN_F32, prefix, 20);
        weightless_nan(FATTN_BF16, prefix, 20);
    }
    EACH (t, tensors) {
        for (int n = 0; n < hazard_place_count; n++) {
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 9, 140, 16);
            if (!hazard_build(&c) || !hazard_takes(&hazard_places[n], &c)) {
                draw_free(&c);
                continue;
            }
            draw_set(&c, tensors[t], draw_at(&c, tensors[t], 0, 4, 0, 7), NAN);
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                         fattn_last_reason());
            for (int64_t i = 0; i < 9; i++) {
                for (int64_t d = 0; d < 16; d++) {
                    const double x = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, i, 0, d));
                    const bool must = tensors[t] == DRAW_Q   ? i == 4
                                      : tensors[t] == DRAW_V ? d == 7
                                                             : true;
                    const bool may = must || tensors[t] == DRAW_V;
                    hazard_check(isnan(x) ? may : !must, "%s: NaN in %s: o[%lld,%lld] is %g",
                                 hazard_places[n].kernel->name, draw_name(tensors[t]), (long long)i,
                                 (long long)d, x);
                }
            }
            draw_free(&c);
        }
    }
}

static bool same_bits(const draw_case *a, const draw_case *b)
{
    bool same = true;
    for (int image = 0; image < a->image_count; image++) {
        same = same &&
               (!a->images[image].output || memcmp(a->images[image].bytes, b->images[image].bytes,
                                                   (size_t)a->images[image].size) == 0);
    }
    return same;
}

/* Gradients summed in any order: equal up to rounding, and NaN in the same elements. */
static bool same_class(const draw_case *a, const draw_case *b)
{
    for (int id = DRAW_DQ; id <= DRAW_DSINK; id++) {
        const draw_tensor *const t = &a->tensors[id];
        if (!t->present || !a->images[t->image].output) {
            continue;
        }
        const int64_t count = (a->images[t->image].size - t->offset) / t->size;
        double largest = 0, difference = 0;
        for (int64_t at = 0; at < count; at++) {
            const double x = draw_get(a, (draw_id)id, at), y = draw_get(b, (draw_id)id, at);
            if (isnan(x) != isnan(y) || (isinf(x) || isinf(y) ? x != y && !isnan(x) : false)) {
                return false;
            }
            if (isfinite(x)) {
                largest = fmax(largest, fabs(x));
                difference = worst_of(difference, fabs(x - y));
            }
        }
        if (!(difference <= 0x1p-6 * largest)) {
            return false;
        }
    }
    return true;
}

/* The same case with zeros instead of NaN and infinities in unused memory. */
static void a10(void)
{
    for (int64_t index = 0; index < 250; index++) {
        draw_case poisoned, clean;
        if (!hazard_check(!draw_problem(&poisoned, 10, index) && !draw_problem(&clean, 10, index),
                          "case %lld: no memory", (long long)index)) {
            continue;
        }
        clean.clean = true;
        if (hazard_build(&poisoned) && hazard_build(&clean) &&
            hazard_check(!draw_save(&poisoned) && !draw_save(&clean), "case %lld: %s",
                         (long long)index, fattn_last_reason())) {
            for (int n = 0; n < hazard_place_count; n++) {
                if (!hazard_takes(&hazard_places[n], &poisoned)) {
                    continue;
                }
                for (int id = 0; id < DRAW_IDS;
                     id++) { /* accumulation starts from the same numbers */
                    const draw_tensor *const t = &clean.tensors[id];
                    if (t->present && clean.images[t->image].output) {
                        memcpy(clean.images[t->image].bytes, poisoned.images[t->image].bytes,
                               (size_t)clean.images[t->image].size);
                    }
                }
                const fattn_status a = hazard_run(&hazard_places[n], &poisoned, NULL);
                const fattn_status b = hazard_run(&hazard_places[n], &clean, NULL);
                hazard_check(a == FATTN_OK && b == FATTN_OK, "%s", fattn_last_reason());
                const bool bits =
                    hazard_on_host(&hazard_places[n]) || clean.problem.op == FATTN_FORWARD;
                hazard_check(bits ? same_bits(&clean, &poisoned) : same_class(&clean, &poisoned),
                             "%s, case %lld: padding leaks", hazard_places[n].kernel->name,
                             (long long)index);
            }
        }
        draw_free(&poisoned);
        draw_free(&clean);
    }
}

/* The judge runs cases marked `twice` on workspaces filled with NaN and with other bits. */
static void a11(void)
{
    EACH (o, ops) {
        EACH (t, dtypes) {
            draw_case c = hazard_case(ops[o], dtypes[t], 2, 4, 2, 77, 131, 40);
            c.twice = true;
            c.problem.features = FATTN_CAUSAL | FATTN_SEQUSED_K;
            c.sequences[1].keys = 50;
            hazard_judge_drawn(&c, 3, "dtype %d", dtypes[t]);
        }
    }
}

/* Some keys have no row that attends to them: those before a window, far after the rows, or in
 * other chunks. Their gradients are 0. */
static void a12_unattended(fattn_dtype dtype)
{
    for (int n = 0; n < 5; n++) {
        draw_case c = hazard_case(FATTN_BACKWARD, dtype, 1, 2, 1, 5, 450, 16);
        c.problem.anchor = n == 1 || n == 2 ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
        c.problem.features = n < 2 ? FATTN_CAUSAL : n < 4 ? FATTN_WINDOW : FATTN_CHUNK;
        c.problem.window_right = n == 2 ? 120 : -1;
        c.problem.window_left = n == 3 ? 120 : -1;
        c.problem.chunk = n == 4 ? 120 : 0;
        hazard_judge_drawn(&c, 0, "unattended keys, case %d", n);
    }
}

static void a12(void)
{
    a12_unattended(FATTN_F32);
    a12_unattended(FATTN_BF16);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        draw_case c = hazard_case(FATTN_BACKWARD, FATTN_F32, 3, 2, 1, 20, 40, 16);
        c.problem.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                             FATTN_SEQUSED_K | (accumulate ? FATTN_ACCUMULATE : 0);
        for (int64_t b = 0; b < 3; b++) {
            c.sequences[b].rows = 5 * b, c.sequences[b].keys = 19 * b;
        }
        hazard_judge_drawn(&c, 0, "accumulate %d", accumulate);
    }
}

static void a13(void)
{
    static const int64_t dims[] = {16, 32, 128};
    for (int64_t rows = 1; rows <= 3; rows++) {
        for (int64_t keys = 1; keys <= 3; keys++) {
            EACH (d, dims) {
                for (int level = 0; level < 3; level++) {
                    draw_case c =
                        hazard_case(FATTN_BACKWARD, FATTN_F16, 1, 1, 1, rows, keys, dims[d]);
                    c.family = level == 0   ? DRAW_GAUSSIAN
                               : level == 1 ? DRAW_OUTLIER
                                            : DRAW_MASSIVE;
                    hazard_judge_drawn(&c, 0, "level %d", level);
                }
            }
        }
    }
    draw_case c = hazard_case(FATTN_BACKWARD, FATTN_BF16, 3, 1, 1, 4, 1, 16);
    c.problem.features = FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    hazard_judge_drawn(&c, 0, "three sequences of one key");
}

static void a14(void)
{
    static const double floors[] = {-(double)FLT_MAX, -65504, -1e10, -1e30, 1e30};
    EACH (o, ops) {
        EACH (f, floors) {
            for (int whole = 0; whole < 2; whole++) {
                draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 2, 70, 90, 8);
                c.problem.features = FATTN_BIAS;
                if (hazard_build(&c)) {
                    paint(&c, DRAW_BIAS, 0, everywhere, 0);
                    paint(&c, DRAW_BIAS, floors[f], whole ? third_rows : prefix, whole ? 1 : 40);
                    hazard_judge(&c, 2, "%g on %s", floors[f], whole ? "rows" : "keys");
                }
            }
        }
    }
}

static void a15(void)
{
    static const double good[] = {0, -1, 1e-30, -0.25, 3}, bad[] = {INFINITY, -INFINITY, NAN, 1e39};
    EACH (s, good) {
        EACH (o, ops) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 1, 33, 70, 16);
            c.problem.features = FATTN_SCALE | FATTN_CAUSAL | FATTN_BIAS;
            c.problem.scale = good[s];
            c.family = DRAW_UNIFORM;
            hazard_judge_drawn(&c, 2, "scale %g", good[s]);
        }
    }
    EACH (s, bad) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 3, 3, 8);
        c.problem.features = FATTN_SCALE;
        c.problem.scale = bad[s];
        const fattn_status status = fattn_support(hazard_places[0].device, &c.problem);
        hazard_check(status == FATTN_INVALID_ARGUMENT, "scale %g: %s", bad[s],
                     fattn_status_string(status));
        draw_free(&c);
    }
}

/* Gradients through the softcap; and a cap far above every score has no effect. */
static void a16(void)
{
    static const double caps[] = {2, 15, 30, 50};
    EACH (o, ops) {
        EACH (n, caps) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 1, 45, 67, 16);
            c.problem.features = FATTN_SOFTCAP | FATTN_SCALE;
            c.problem.softcap = caps[n], c.problem.scale = 1;
            hazard_judge_drawn(&c, 2, "cap %g", caps[n]);
        }
    }
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 9, 50, 16);
        if (!hazard_build(&c)) {
            continue;
        }
        c.problem.features = FATTN_SOFTCAP, c.problem.softcap = 1e5;
        if (hazard_takes(&hazard_places[n], &c)) {
            double o[16];
            c.problem.features = 0, c.problem.softcap = 0;
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s: %s",
                         hazard_places[n].kernel->name, fattn_last_reason());
            for (int64_t d = 0; d < 16; d++) {
                o[d] = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, 5, 0, d));
            }
            c.problem.features = FATTN_SOFTCAP, c.problem.softcap = 1e5;
            hazard_clear_outputs(&c);
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s: %s",
                         hazard_places[n].kernel->name, fattn_last_reason());
            for (int64_t d = 0; d < 16; d++) {
                const double x = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, 5, 0, d));
                hazard_check(fabs(x - o[d]) <= 1e-5, "%s: o %g with a huge cap, %g without",
                             hazard_places[n].kernel->name, x, o[d]);
            }
        }
        draw_free(&c);
    }
}

/* Dot products above f16's largest number, and 65536 values of 6e4 averaged. */
static void a17(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F16, 1, 1, 1, 2, 65536, 4);
    if (!hazard_build(&c)) {
        return;
    }
    for (int64_t d = 0; d < 4; d++) {
        for (int64_t i = 0; i < 2; i++) {
            draw_set(&c, DRAW_Q, draw_at(&c, DRAW_Q, 0, i, 0, d), 200);
        }
        for (int64_t j = 0; j < 65536; j++) {
            draw_set(&c, DRAW_K, draw_at(&c, DRAW_K, 0, j, 0, d), 200);
            draw_set(&c, DRAW_V, draw_at(&c, DRAW_V, 0, j, 0, d), j % 2 ? 60000 : 59000);
        }
    }
    hazard_judge(&c, 2, "64k keys of 200");
}

/* Causal and mask change o on every row. hazard_M4 toggles every option. */
static void a18(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 2, 1, 12, 12, 8);
        c.problem.features = FATTN_MASK;
        if (hazard_build(&c) && hazard_takes(&hazard_places[n], &c)) {
            static const uint64_t variants[] = {0, FATTN_CAUSAL, FATTN_MASK,
                                                FATTN_CAUSAL | FATTN_MASK};
            unsigned char *before[4];
            EACH (v, variants) {
                draw_case asked = c;
                asked.problem.features = variants[v];
                strip(&asked.problem, &asked.buffers);
                hazard_clear_outputs(&c);
                hazard_check(hazard_run(&hazard_places[n], &asked, NULL) == FATTN_OK, "%s",
                             fattn_last_reason());
                before[v] = hazard_copy(&c, DRAW_O);
                for (size_t w = 0; w < v; w++) {
                    hazard_check(!hazard_equals(&c, DRAW_O, before[w]),
                                 "%s: variants %zu and %zu agree", hazard_places[n].kernel->name, w,
                                 v);
                }
            }
            EACH (v, variants) {
                free(before[v]);
            }
        }
        draw_free(&c);
    }
}

/* With a small scale gradients are far below dO, and still normal numbers. */
static void a19(void)
{
    for (int n = 0; n < 6; n++) {
        draw_case c =
            hazard_case(FATTN_BACKWARD, n % 2 ? FATTN_F32 : FATTN_BF16, 1, 1, 1, 64, 64, 32);
        const bool small_dout = n / 2 == 1;
        c.problem.features = FATTN_SCALE | (n / 2 == 2 ? FATTN_ALIBI : 0);
        c.problem.scale = small_dout ? 0x1p-60 : 0x1p-118;
        if (hazard_build(&c)) {
            for (int64_t at = 0; small_dout && at < 64 * 32; at++) {
                draw_set(&c, DRAW_DOUT, at, 1e-20 * draw_get(&c, DRAW_DOUT, at));
            }
            hazard_judge(&c, 0, "case %d", n);
        }
    }
}

static const hazard table[] = {
    {"hazard_A1", "fully masked rows gave NaN, or reached gradients", a1, NULL},
    {"hazard_A2", "a masked leading block of keys gave exp(-inf - -inf)", a2, NULL},
    {"hazard_A3", "NaN after many -inf in a bias, with and without splits", a3, NULL},
    {"hazard_A4", "a finite sentinel stood for -inf: low scores vanished", a4, NULL},
    {"hazard_A5", "the running maximum fell back to 0: low scores vanished", a5, NULL},
    {"hazard_A6", "half a tile of padding scored 0 in backward", a6, NULL},
    {"hazard_A7", "backends disagreed where NaN and infinities come out", a7, NULL},
    {"hazard_A8", "the path without lse answered differently", a8, NULL},
    {"hazard_A9", "NaN inputs became zeros", a9, NULL},
    {"hazard_A10", "NaN in padding polluted results", a10, NULL},
    {"hazard_A11", "uninitialised workspace polluted results", a11, NULL},
    {"hazard_A12", "gradients past the sequences were left to chance", a12, NULL},
    {"hazard_A13", "NaN gradients of the smallest shapes", a13, NULL},
    {"hazard_A14", "the most negative number as a mask", a14, NULL},
    {"hazard_A15", "scales of 0, below 0 and not finite", a15, NULL},
    {"hazard_A16", "softcap in forward, in backward, at infinity", a16, NULL},
    {"hazard_A17", "half-precision accumulators overflowed", a17, NULL},
    {"hazard_A18", "a mask or causal was silently ignored", a18, NULL},
    {"hazard_A19", "with a small scale dQ and dK were 0", a19, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
