/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group G: backward, races, determinism. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "tests/hazard.h"

static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};

/* -------------------------------------------------------------------------------------------------
 * The same run again
 * ---------------------------------------------------------------------------------------------- */

/* Few on the host, where check_threads covers any number of threads. Emulated waves alternate in
 * three ways, and a race among them is detected even without a difference. */
static int runs_at(const place *at, int runs)
{
    return hazard_on_host(at) || hazard_emulated() ? 4 : runs;
}

/* A case built for a place, to be run repeatedly from the same device memory. */
typedef struct stage {
    draw_case c;
    twin t;
    fattn_plan *plan;
    void *workspace;
} stage;

/* Builds s->c and allocates the rest. False if the place declines it. */
static bool stage_make(stage *s, const place *at)
{
    s->t = (twin){.device = at->device};
    s->plan = NULL;
    s->workspace = NULL;
    if (!hazard_build(&s->c) || !hazard_takes(at, &s->c)) {
        return false;
    }
    return hazard_check(
        !draw_save(&s->c) &&
            !fattn_plan_create_with(at->device, &s->c.problem, at->kernel->name, NULL, &s->plan) &&
            !fattn_device_malloc(at->device, (size_t)s->plan->tiling.workspace, &s->workspace) &&
            !twin_make(&s->t, at->device, &s->c),
        "%s: %s", at->kernel->name, fattn_last_reason());
}

static void stage_free(stage *s)
{
    fattn_device_free(s->t.device, s->workspace);
    fattn_plan_destroy(s->plan);
    twin_free(&s->t);
    draw_free(&s->c);
}

/* Resets the outputs to poison, runs, and reads them. */
static bool stage_run(stage *s, void *workspace)
{
    hazard_clear_outputs(&s->c);
    return hazard_check(!twin_send(&s->t, NULL) &&
                            !fattn_execute(s->plan, &s->t.buffers, workspace, NULL) &&
                            !twin_read(&s->t, NULL),
                        "%s: %s", s->plan->kernel->name, fattn_last_reason());
}

/* Runs the staged case repeatedly: the bits of every output must not change. */
static void check_repeats(stage *s, int runs, bool own_workspace, const char *what)
{
    unsigned char *first[DRAW_IDS] = {NULL};
    bool same = true;
    for (int run = 0; run < runs && same; run++) {
        same = stage_run(s, own_workspace ? NULL : s->workspace);
        for (int id = 0; id < DRAW_IDS && same; id++) {
            const draw_tensor *const t = &s->c.tensors[id];
            if (!t->present || !s->c.images[t->image].output) {
                continue;
            }
            if (run == 0) {
                first[id] = hazard_copy(&s->c, (draw_id)id);
            }
            same = hazard_check(hazard_equals(&s->c, (draw_id)id, first[id]),
                                "%s: %s: run %d differs in %s", s->plan->kernel->name, what, run,
                                draw_name((draw_id)id));
        }
    }
    for (int id = 0; id < DRAW_IDS; id++) {
        free(first[id]);
    }
}

static draw_case grouped(fattn_op op, fattn_dtype dtype, int64_t dim, uint64_t features)
{
    draw_case c = hazard_case(op, dtype, 2, 4, 2, 70, 130, dim);
    c.problem.features = features;
    c.problem.outputs |= op == FATTN_BACKWARD && features & FATTN_BIAS
                             ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS
                             : 0;
    return c;
}

/* A race shows only in some runs. Forward always promises equal bits. */
static void g1(void)
{
    static const int64_t dims[] = {64, 128};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (t, dtypes) {
            EACH (d, dims) {
                stage s = {.c = grouped(FATTN_FORWARD, dtypes[t], dims[d], FATTN_CAUSAL)};
                if (stage_make(&s, &hazard_places[n])) {
                    check_repeats(&s, runs_at(&hazard_places[n], 50), false,
                                  fattn_dtype_name(dtypes[t]));
                }
                stage_free(&s);
            }
        }
    }
}

/* Backward promises equal bits with FATTN_DETERMINISTIC. */
static void g2(void)
{
    static const int64_t dims[] = {16, 40, 64, 128, 256};
    static const uint64_t features[] = {0, FATTN_CAUSAL, FATTN_CAUSAL | FATTN_DROPOUT, FATTN_BIAS};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (t, dtypes) {
            EACH (d, dims) {
                const uint64_t more = features[(t + d) % 4];
                stage s = {
                    .c = grouped(FATTN_BACKWARD, dtypes[t], dims[d], FATTN_DETERMINISTIC | more)};
                s.c.problem.dropout_p = more & FATTN_DROPOUT ? 0.25 : 0;
                s.c.tensors[DRAW_BIAS].flat[0] = s.c.tensors[DRAW_DBIAS].flat[0] = true;
                if (stage_make(&s, &hazard_places[n])) {
                    check_repeats(&s, runs_at(&hazard_places[n], 50), false,
                                  fattn_dtype_name(dtypes[t]));
                }
                stage_free(&s);
            }
        }
    }
}

/* With FATTN_DETERMINISTIC blocks wait for one another at every tile of dQ, in one order under a
 * causal mask and in another without. */
static void g2_tiles(void)
{
    static const int64_t dims[] = {64, 128, 256};
    EACH (d, dims) {
        for (int causal = 0; causal < 2; causal++) {
            draw_case c = hazard_case(FATTN_BACKWARD, FATTN_BF16, 1, 2, 1, 270, 260, dims[d]);
            c.problem.features = FATTN_DETERMINISTIC | (causal ? FATTN_CAUSAL : 0);
            hazard_judge_drawn(&c, 0, "D %lld%s", (long long)dims[d], causal ? ", causal" : "");
        }
    }
}

/* Semaphores and partial sums are in the workspace, which may change between runs. */
static void g9(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        stage s = {.c = grouped(FATTN_BACKWARD, FATTN_F32, 64, FATTN_DETERMINISTIC)};
        if (stage_make(&s, &hazard_places[n])) {
            check_repeats(&s, runs_at(&hazard_places[n], 50), true, "a workspace for each run");
        }
        stage_free(&s);
    }
}

/* Hundreds of runs: all results are finite, with and without atomic sums. */
static void g8(void)
{
    static const draw_id outputs[] = {DRAW_DQ, DRAW_DK, DRAW_DV};
    for (int n = 0; n < hazard_place_count; n++) {
        const bool f32 = hazard_places[n].kernel->dtypes & FATTN_DTYPE_BIT(FATTN_F32);
        stage s = {
            .c = hazard_case(FATTN_BACKWARD, f32 ? FATTN_F32 : FATTN_BF16, 1, 2, 1, 33, 65, 32)};
        bool good = stage_make(&s, &hazard_places[n]);
        for (int run = 0; run < runs_at(&hazard_places[n], 300) && good; run++) {
            int64_t lost = 0;
            good = stage_run(&s, s.workspace);
            EACH (o, outputs) {
                const int64_t *const e = s.c.tensors[outputs[o]].extent;
                for (int64_t at = 0; at < e[0] * e[1] * e[2] * e[3]; at++) {
                    lost += !isfinite(draw_get(&s.c, outputs[o], at));
                }
            }
            good = hazard_check(lost == 0, "%s: run %d: %lld gradients are not finite",
                                hazard_places[n].kernel->name, run, (long long)lost);
        }
        stage_free(&s);
    }
}

/* dO is written by earlier work on the same stream, behind a long copy. */
static void g3(void)
{
    enum { LONG = 1 << 26 };
    for (int n = 0; n < hazard_place_count; n++) {
        fattn_device *const device = hazard_places[n].device;
        fattn_stream stream = NULL;
        void *late = NULL, *slow = NULL;
        stage s = {.c = grouped(FATTN_BACKWARD, FATTN_F16, 64, FATTN_DETERMINISTIC)};
        if (!hazard_on_host(&hazard_places[n]) && stage_make(&s, &hazard_places[n]) &&
            stage_run(&s, s.workspace)) {
            const int image = s.c.tensors[DRAW_DOUT].image;
            const size_t size = (size_t)s.c.images[image].size;
            unsigned char *const expected = hazard_copy(&s.c, DRAW_DQ);
            hazard_check(!fattn_stream_create(device, &stream) &&
                             !fattn_device_malloc(device, size, &late) &&
                             !fattn_device_malloc(device, 2 * LONG, &slow) &&
                             !fattn_device_copy(device, late, s.t.bytes[image], size, stream),
                         "%s", fattn_last_reason());
            for (int run = 0; run < 20; run++) {
                hazard_check(
                    !fattn_device_copy(device, s.t.bytes[image], slow, size, stream) &&
                        !fattn_device_copy(device, slow, (char *)slow + LONG, LONG, stream) &&
                        !fattn_device_copy(device, s.t.bytes[image], late, size, stream) &&
                        !fattn_execute(s.plan, &s.t.buffers, s.workspace, stream) &&
                        !twin_read(&s.t, stream),
                    "%s", fattn_last_reason());
                hazard_check(hazard_equals(&s.c, DRAW_DQ, expected),
                             "%s: run %d read dO before it was written",
                             hazard_places[n].kernel->name, run);
            }
            free(expected);
        }
        fattn_device_free(device, slow);
        fattn_device_free(device, late);
        fattn_stream_destroy(device, stream);
        stage_free(&s);
    }
    if (hazard_on_host(&hazard_places[0])) {
        hazard_skip("work is done when a call returns: nothing is queued");
    }
}

/* -------------------------------------------------------------------------------------------------
 * Gradients judged
 * ---------------------------------------------------------------------------------------------- */

static void g4(void)
{
    static const draw_family families[] = {DRAW_OUTLIER, DRAW_MASSIVE, DRAW_SORTED, DRAW_ONE_HOT,
                                           DRAW_CONSTANT};
    static const int64_t dims[] = {64, 256};
    EACH (f, families) {
        EACH (t, dtypes) {
            EACH (d, dims) {
                draw_case c = hazard_case(FATTN_BACKWARD, dtypes[t], 3, 2, 2, 37, 70, dims[d]);
                c.family = families[f];
                hazard_judge_drawn(&c, -1, "%s in %s, D %lld", draw_family_names[families[f]],
                                   fattn_dtype_name(dtypes[t]), (long long)dims[d]);
            }
        }
    }
    /* Equal terms, whose errors do not cancel. Seed 260 revealed sums of 128 terms that were too
     * long. */
    for (uint64_t seed = 258; seed < 262; seed++) {
        draw_case c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, 1, 1, 324, 15, 16);
        c.family = DRAW_CONSTANT;
        c.seed = seed;
        hazard_judge_drawn(&c, -1, "324 queries alike, seed %d", (int)seed);
    }
    /* Random problems that revealed such sums elsewhere, and a dSink whose delta needs exact
     * products. */
    static const int64_t drawn[][2] = {{9103, 11063}, {9301, 11649}, {9304, 9525}, {9602, 5249},
                                       {9602, 4060},  {9302, 9768},  {1001, 419}};
    EACH (n, drawn) {
        draw_case c;
        if (!hazard_check(draw_problem(&c, (uint64_t)drawn[n][0], drawn[n][1]) == 0,
                          "a problem cannot be drawn")) {
            continue;
        }
        if (c.problem.features & FATTN_ALIBI_BIAS && !hazard_on_host(&hazard_places[0])) {
            draw_free(&c); /* no GPU kernel of backward takes it */
        } else {
            hazard_judge_drawn(&c, -1, "fattn check --seed %lld --case %lld",
                               (long long)drawn[n][0], (long long)drawn[n][1]);
        }
    }
}

static void g5(void)
{
    static const int64_t heads[][2] = {{3, 1}, {6, 2}, {8, 1}, {5, 5}, {12, 4}, {7, 1}};
    EACH (h, heads) {
        EACH (t, dtypes) {
            draw_case c =
                hazard_case(FATTN_BACKWARD, dtypes[t], 2, heads[h][0], heads[h][1], 21, 45, 32);
            c.problem.features = h % 2 ? FATTN_CAUSAL : 0;
            hazard_judge_drawn(&c, -1, "%lld heads on %lld in %s", (long long)heads[h][0],
                               (long long)heads[h][1], fattn_dtype_name(dtypes[t]));
        }
    }
}

static void g6(void)
{
    static const int64_t lengths[] = {1, 15, 17, 63, 65, 100, 127, 129};
    EACH (l, lengths) {
        EACH (t, dtypes) {
            draw_case c =
                hazard_case(FATTN_BACKWARD, dtypes[t], 1, 2, 2, lengths[l], lengths[7 - l] + 3, 64);
            c.family = DRAW_MASSIVE;
            hazard_judge_drawn(&c, -1, "%lld rows in %s", (long long)lengths[l],
                               fattn_dtype_name(dtypes[t]));
        }
    }
}

/* With one key tile, dQ may be stored instead of accumulated. Queries without keys must still
 * become 0, and a second key tile must add. */
static void g6_one_tile(void)
{
    static const int64_t dims[] = {64, 128}, keys[] = {70, 128, 200};
    EACH (d, dims) {
        EACH (k, keys) {
            for (int causal = 0; causal < 2; causal++) {
                draw_case c =
                    hazard_case(FATTN_BACKWARD, FATTN_BF16, 1, 2, 1, 220, keys[k], dims[d]);
                c.problem.features = causal ? FATTN_CAUSAL : 0;
                hazard_judge_drawn(&c, 0, "D %lld, %lld keys%s", (long long)dims[d],
                                   (long long)keys[k], causal ? ", causal" : "");
            }
        }
    }
}

static void g7(void)
{
    static const uint64_t bits[] = {FATTN_ALIBI, FATTN_CAUSAL, FATTN_WINDOW};
    for (int set = 0; set < 8; set++) {
        EACH (t, dtypes) {
            draw_case c = hazard_case(FATTN_BACKWARD, dtypes[t], 2, 2, 1, 50, 75, 32);
            EACH (b, bits) {
                c.problem.features |= set >> b & 1 ? bits[b] : 0;
            }
            if (c.problem.features & FATTN_WINDOW) {
                c.problem.window_left = 9, c.problem.window_right = 4;
            }
            hazard_judge_drawn(&c, -1, "alibi, causal, window: %d in %s", set,
                               fattn_dtype_name(dtypes[t]));
        }
    }
}

static void g10(void)
{
    EACH (t, dtypes) {
        for (int flat = 0; flat < 16; flat++) {
            draw_case c = hazard_case(FATTN_BACKWARD, dtypes[t], 2, 2, 2, 30, 41, 32);
            c.problem.features = FATTN_BIAS;
            c.problem.dtype_bias = FATTN_F32;
            c.problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS;
            for (int axis = 0; axis < 4; axis++) {
                c.tensors[DRAW_BIAS].flat[axis] = c.tensors[DRAW_DBIAS].flat[axis] =
                    flat >> axis & 1;
            }
            hazard_judge_drawn(&c, -1, "bias in f32 repeated along axes %d, the rest in %s", flat,
                               fattn_dtype_name(dtypes[t]));
        }
    }
}

static void g12(void)
{
    static const int64_t dims[] = {32, 64, 128};
    EACH (t, dtypes) {
        EACH (d, dims) {
            draw_case c = hazard_case(FATTN_BACKWARD, dtypes[t], 1, 2, 1, 140, 200, dims[d]);
            c.problem.features = FATTN_CAUSAL;
            hazard_judge_drawn(&c, 0, "every tile, D %lld in %s", (long long)dims[d],
                               fattn_dtype_name(dtypes[t]));
        }
    }
}

static const hazard table[] = {
    {"hazard_G1", "a race that some runs show", g1, NULL},
    {"hazard_G2", "a deterministic mode that was not", g2, NULL},
    {"hazard_G2_tiles", "blocks waited for a turn that never came", g2_tiles, NULL},
    {"hazard_G3", "dO was read before it was written", g3, NULL},
    {"hazard_G4", "wrong gradients that Gaussian inputs hide", g4, NULL},
    {"hazard_G5", "indices of grouped heads in dk and dv", g5, NULL},
    {"hazard_G6", "a mask was missing at the end of a tile", g6, NULL},
    {"hazard_G6_one_tile", "sums that nobody began with zeros", g6_one_tile, NULL},
    {"hazard_G7", "ALiBi and a causal mask gave NaN", g7, NULL},
    {"hazard_G8", "NaN after hundreds of runs", g8, NULL},
    {"hazard_G9", "a buffer of semaphores was freed too early", g9, NULL},
    {"hazard_G10", "a bias in f32 beside 16-bit tensors", g10, NULL},
    {"hazard_G11", "sums in shared memory that were not atomic", NULL,
     "racecheck looks for them (docs/TESTING.md); hazard_G1 and G2 would see them by chance"},
    {"hazard_G12", "a tile of another size than the one computed with", g12, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
