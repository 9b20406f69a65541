/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group C: strides, layout, alignment. */
#include <stdlib.h>
#include <string.h>

#include "tests/hazard.h"

static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};

static draw_case strided(fattn_op op, fattn_dtype dtype, int64_t rows, int64_t keys, int64_t dim,
                         uint64_t seed)
{
    draw_case c = hazard_case(op, dtype, 2, 4, 2, rows, keys, dim);
    c.seed = seed;
    c.problem.layout = FATTN_STRIDED;
    return c;
}

/* Every operand of a strided backward has strides and padding of its own. */
static void c1(void)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        draw_case c = strided(FATTN_BACKWARD, FATTN_F32, 19, 37, 24, seed);
        c.packed = seed % 2;
        hazard_judge_drawn(&c, 0, "seed %llu", (unsigned long long)seed);
    }
}

static void c2(void)
{
    for (int axes = 1; axes < 8; axes++) {
        draw_case c = strided(FATTN_BACKWARD, FATTN_F32, 19, 37, 16, 2);
        for (int axis = 0; axis < 3; axis++) {
            c.tensors[DRAW_DOUT].flat[axis] = axes >> axis & 1;
        }
        hazard_judge_drawn(&c, 0, "dO repeated along axes %d", axes);
    }
}

static void c3(void)
{
    static const int64_t keys[] = {1, 33, 65, 129, 1025};
    EACH (k, keys) {
        for (int axes = 1; axes < 8; axes++) {
            draw_case c = strided(FATTN_FORWARD, FATTN_BF16, 5, keys[k], 16, 3);
            for (int axis = 0; axis < 3; axis++) {
                c.tensors[DRAW_K].flat[axis] = c.tensors[DRAW_V].flat[axis] = axes >> axis & 1;
            }
            hazard_judge_drawn(&c, 3, "%lld keys repeated along axes %d", (long long)keys[k], axes);
        }
    }
}

/* The channel is always innermost, so a tensor has 6 orders; each draws its own, and its
 * padding. */
static void c4(void)
{
    EACH (o, ops) {
        for (uint64_t seed = 0; seed < 24; seed++) {
            draw_case c = strided(ops[o], FATTN_F16, 9, 21, 8, 100 + seed);
            hazard_judge_drawn(&c, 2, "seed %llu", (unsigned long long)seed);
        }
    }
}

/* Splits write partial results and combine them; nothing, including lse, is written outside. */
static void c5(void)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        draw_case c = strided(FATTN_FORWARD, FATTN_F32, 3, 700, 40, seed);
        hazard_judge_drawn(&c, 9, "seed %llu", (unsigned long long)seed);
    }
}

static void c7(void)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        draw_case c = strided(FATTN_BACKWARD, FATTN_BF16, 33, 18, 32, 700 + seed);
        c.problem.features = FATTN_CAUSAL;
        c.problem.dtype_o = seed % 2 ? FATTN_F32 : 0;
        hazard_judge_drawn(&c, 0, "seed %llu", (unsigned long long)seed);
    }
}

/* Pointers aligned only to an element, odd lengths, rows that are not a multiple of 16 bytes. */
static void c8(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    EACH (o, ops) {
        EACH (t, dtypes) {
            for (uint64_t seed = 0; seed < 4; seed++) {
                draw_case c = strided(ops[o], dtypes[t], 7, 35, 17, seed);
                c.problem.pointer_alignment = 1;
                c.problem.features = FATTN_BIAS | FATTN_MASK;
                c.problem.dtype_bias = seed % 2 ? dtypes[t] : 0;
                hazard_judge_drawn(&c, 2, "seed %llu", (unsigned long long)seed);
            }
        }
    }
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 4, 4, 4);
    if (hazard_build(&c)) { /* a broken promise is an error */
        c.buffers.q = (const char *)c.buffers.q + 4;
        for (int n = 0; n < hazard_place_count; n++) {
            if (!hazard_takes(&hazard_places[n], &c)) {
                continue;
            }
            const fattn_status status = hazard_run(&hazard_places[n], &c, NULL);
            hazard_check(status == FATTN_MISALIGNED, "%s: %s", hazard_places[n].kernel->name,
                         fattn_status_string(status));
        }
    }
    draw_free(&c);
}

static void c9(void)
{
    EACH (o, ops) {
        for (uint64_t seed = 0; seed < 6; seed++) {
            draw_case c = strided(ops[o], FATTN_F32, 9, 21, 256, 900 + seed);
            hazard_judge_drawn(&c, 0, "seed %llu", (unsigned long long)seed);
        }
    }
}

/* One shape with alternating strides, through the cache of the one-shot call. */
static void c10(void)
{
    enum { VARIANTS = 4 };
    for (int n = 0; n < hazard_place_count; n++) {
        fattn_device *const device = hazard_places[n].device;
        if (n > 0 && device == hazard_places[n - 1].device) {
            continue;
        }
        draw_case cases[VARIANTS];
        unsigned char *alone[VARIANTS];
        for (int v = 0; v < VARIANTS; v++) {
            cases[v] = strided(FATTN_FORWARD, FATTN_F32, 11, 29, 16, 1000 + (uint64_t)v);
            cases[v].tensors[DRAW_K].flat[2] = v == 3;
            hazard_build(&cases[v]);
            fattn_plan *plan = NULL;
            const fattn_status made = fattn_plan_create(device, &cases[v].problem, &plan);
            hazard_check(made == FATTN_OK && hazard_execute(plan, &cases[v].buffers) == FATTN_OK,
                         "%s", fattn_last_reason());
            fattn_plan_destroy(plan);
            alone[v] = hazard_copy(&cases[v], DRAW_O);
        }
        for (int turn = 0; turn < 5 * VARIANTS; turn++) {
            draw_case *const c = &cases[turn * 3 % VARIANTS];
            hazard_clear_outputs(c);
            const fattn_status status = fattn_attention(device, &c->problem, &c->buffers, NULL);
            hazard_check(status == FATTN_OK && hazard_equals(c, DRAW_O, alone[c - cases]),
                         "%s: turn %d: the one-shot call differs from a plan: %s",
                         hazard_places[n].backend, turn, fattn_last_reason());
        }
        for (int v = 0; v < VARIANTS; v++) {
            free(alone[v]);
            draw_free(&cases[v]);
        }
    }
    fattn_cache_clear();
}

static const hazard table[] = {
    {"hazard_C1", "dO that is not contiguous gave wrong gradients", c1, NULL},
    {"hazard_C2", "dO repeated by stride 0", c2, NULL},
    {"hazard_C3", "keys and values repeated by stride 0", c3, NULL},
    {"hazard_C4", "permuted views were read as contiguous", c4, NULL},
    {"hazard_C5", "combining splits wrote outside, into lse too", c5, NULL},
    {"hazard_C6", "strides of lse were taken for granted", NULL,
     "lse has no strides: the contract makes it contiguous"},
    {"hazard_C7", "dO had to have the strides of O", c7, NULL},
    {"hazard_C8", "misaligned bias and odd last dimensions", c8, NULL},
    {"hazard_C9", "the widest head dimension ignored strides", c9, NULL},
    {"hazard_C10", "a cache forgot strides and ran another call's kernel", c10, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
