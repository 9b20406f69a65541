/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group D: shapes and tails. */
#include <stdlib.h>

#include "tests/hazard.h"

static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};

static void d1(void)
{
    EACH (o, ops) {
        for (int64_t dim = 1; dim <= 256; dim++) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 1, 3, 19, dim);
            hazard_judge_drawn(&c, -1, "D = %lld", (long long)dim);
        }
    }
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 2, 2, 0);
        for (int v = 0; v < 2; v++) {
            c.problem.dim = v ? 8 : hazard_places[n].kernel->dim_max + 1;
            c.problem.dim_v = v ? hazard_places[n].kernel->dim_max + 1 : 8;
            fattn_plan *plan = NULL;
            const fattn_status status = fattn_plan_create_with(
                hazard_places[n].device, &c.problem, hazard_places[n].kernel->name, NULL, &plan);
            hazard_check(
                plan == NULL && (status == FATTN_UNSUPPORTED || status == FATTN_INVALID_SHAPE),
                "%s: D %lld, Dv %lld: %s", hazard_places[n].kernel->name, (long long)c.problem.dim,
                (long long)c.problem.dim_v, fattn_status_string(status));
        }
        draw_free(&c);
    }
}

/* The whole score, and the whole value, in the last channel. */
static void d2(void)
{
    static const int64_t dims[] = {2, 8, 16, 17, 32, 40, 64, 72, 96, 128, 129, 192, 256};
    EACH (o, ops) {
        EACH (d, dims) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 1, 1, 9, 21, dims[d]);
            if (!hazard_build(&c)) {
                continue;
            }
            static const draw_id tensors[] = {DRAW_Q, DRAW_K, DRAW_V};
            EACH (t, tensors) {
                for (int64_t s = 0; s < (t == 0 ? 9 : 21); s++) {
                    for (int64_t n = 0; n < dims[d]; n++) {
                        const bool last = n == dims[d] - 1;
                        draw_set(&c, tensors[t], draw_at(&c, tensors[t], 0, s, 0, n),
                                 last ? 1 + (double)(s % 5) : 0);
                    }
                }
            }
            hazard_judge(&c, 0, "D = %lld", (long long)dims[d]);
        }
    }
}

static void d3(void)
{
    EACH (o, ops) {
        draw_case c = hazard_case(ops[o], FATTN_F16, 2, 3, 3, 50, 90, 72);
        c.problem.features = ops[o] == FATTN_BACKWARD ? FATTN_DETERMINISTIC : 0;
        const draw_id out = ops[o] == FATTN_FORWARD ? DRAW_O : DRAW_DK;
        if (!hazard_build(&c) ||
            !hazard_check(draw_save(&c) == FATTN_OK, "%s", fattn_last_reason())) {
            draw_free(&c);
            continue;
        }
        for (int n = 0; n < hazard_place_count; n++) {
            unsigned char *first = NULL;
            for (int time = 0; time < 4 && hazard_takes(&hazard_places[n], &c); time++) {
                hazard_clear_outputs(&c);
                hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                             fattn_last_reason());
                hazard_check(first == NULL || hazard_equals(&c, out, first), "%s: run %d differs",
                             hazard_places[n].kernel->name, time);
                first = first != NULL ? first : hazard_copy(&c, out);
            }
            free(first);
        }
        draw_free(&c);
    }
}

static void d4(void)
{
    EACH (o, ops) {
        for (int64_t length = 1; length <= 130; length += length < 70 ? 1 : 7) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 1, 1, length, length, 4);
            c.problem.features = length % 2 ? FATTN_CAUSAL : 0;
            hazard_judge_drawn(&c, 0, "length %lld", (long long)length);
        }
    }
}

static void d5(void)
{
    for (int64_t rows = 1; rows <= 8; rows++) {
        for (int64_t keys = 33; keys <= 70; keys++) {
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, rows, keys, 8);
            hazard_judge_drawn(&c, 2, "%lld x %lld", (long long)rows, (long long)keys);
        }
    }
}

static void d6(void)
{
    for (int64_t length = 1; length < 140; length += 6) {
        draw_case c = hazard_case(FATTN_BACKWARD, FATTN_BF16, 1, 2, 2, length, length + 2, 16);
        hazard_judge_drawn(&c, 0, "length %lld", (long long)length);
    }
}

static void d7(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F16, 2, 4, 4, 1, 257, 32);
    hazard_judge_drawn(&c, 8, "1 x 257");
}

static void d8(void)
{
    static const int64_t dims[][2] = {{192, 128}, {128, 192}, {64, 1}, {1, 64}, {33, 31}};
    EACH (o, ops) {
        EACH (d, dims) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2, 1, 21, 50, dims[d][0]);
            c.problem.dim_v = dims[d][1];
            hazard_judge_drawn(&c, 2, "D = %lld, Dv = %lld", (long long)dims[d][0],
                               (long long)dims[d][1]);
        }
    }
}

static void d9(void)
{
    static const int64_t groups[] = {2, 4, 8};
    EACH (g, groups) {
        const int64_t rows[] = {1, groups[g] - 1, groups[g], groups[g] + 1};
        EACH (r, rows) {
            for (int causal = 0; causal < 2; causal++) {
                draw_case c =
                    hazard_case(FATTN_FORWARD, FATTN_F32, 2, 2 * groups[g], 2, rows[r], 70, 8);
                c.problem.features = causal ? FATTN_CAUSAL : 0;
                hazard_judge_drawn(&c, 2, "%lld rows, groups of %lld", (long long)rows[r],
                                   (long long)groups[g]);
            }
        }
    }
}

static void d10(void)
{
    EACH (o, ops) {
        for (int64_t length = 16; length <= 256; length += length < 128 ? 16 : 64) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 1, 1, length, length, 8);
            hazard_judge_drawn(&c, 0, "length %lld", (long long)length);
        }
    }
}

static void d11(void)
{
    static const int64_t groups[] = {1, 2, 3, 5, 7, 8};
    EACH (o, ops) {
        EACH (g, groups) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 1, 2 * groups[g], 2, 41, 67, 16);
            c.problem.features = FATTN_CAUSAL;
            hazard_judge_drawn(&c, 0, "groups of %lld", (long long)groups[g]);
        }
    }
}

static const hazard table[] = {
    {"hazard_D1", "head dimensions between the usual ones", d1, NULL},
    {"hazard_D2", "only the first half of the channels was used", d2, NULL},
    {"hazard_D3", "uninitialised reads made runs differ", d3, NULL},
    {"hazard_D4", "remainders of a tile, hidden at large lengths", d4, NULL},
    {"hazard_D5", "few queries, keys no multiple of 32", d5, NULL},
    {"hazard_D6", "odd lengths gave NaN in backward", d6, NULL},
    {"hazard_D7", "one query, 257 keys, splits", d7, NULL},
    {"hazard_D8", "Dv that is not D", d8, NULL},
    {"hazard_D9", "as many queries as heads a group were taken for packed heads", d9, NULL},
    {"hazard_D10", "lengths at tile boundaries, small head dimension", d10, NULL},
    {"hazard_D11", "row indices divided by a group that was not packed", d11, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
