/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions that rows of backend "hip" launch, for hip_entries.py:
 *
 *     hip_entries gfx942 ...
 *
 * prints a line for each: processor, image, function, threads of a block. They are those of plans
 * for problems of every type and width that a row takes, with and without what has phases of its
 * own. Names are put together when a plan is made (fattn_gpu_phase), so that a compiler compares
 * them with nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/hip/hip.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/tiling.h"

/* A problem of the row's operation: few rows of many keys, or with many_rows many. packed: a
 * backward of packed sequences. */
static fattn_problem problem_of(const fattn_kernel *row, int dtype, int64_t dim, bool many_rows,
                                bool summed, bool packed)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = row->ops & FATTN_OP_BIT(FATTN_FORWARD) ? FATTN_FORWARD : FATTN_BACKWARD;
    p.dtype = (fattn_dtype)dtype;
    p.batch = many_rows ? 2048 : 2;
    p.heads_q = 2, p.heads_k = 1;
    p.seqlen_q = p.op == FATTN_FORWARD ? 4 : 256;
    p.seqlen_k = 4096;
    p.dim = p.dim_v = dim;
    if (p.op == FATTN_BACKWARD) {
        p.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        p.features = row->features & (FATTN_BIAS | FATTN_SINK);
        p.features |= packed ? FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K : 0;
        p.total_q = packed ? p.batch * p.seqlen_q : 0;
        p.total_k = packed ? p.batch * p.seqlen_k : 0;
    }
    if (p.features & FATTN_BIAS) {
        const int64_t stride[] = {p.heads_q * p.seqlen_q * p.seqlen_k, p.seqlen_q * p.seqlen_k,
                                  p.seqlen_k, 1};
        memcpy(p.bias_stride, stride, sizeof stride);
        memcpy(p.dbias_stride, stride, sizeof stride);
        p.dbias_stride[0] = summed ? 0 : stride[0];
        p.outputs |= FATTN_OUT_DBIAS | FATTN_OUT_DSINK;
    }
    return p;
}

/* Returns whether the row has a plan for the problem. */
static bool print_entries(const char *processor, const fattn_gpu_kernel *kernel,
                          const fattn_problem *problem)
{
    const fattn_limits limits = {.fast_memory = 65536, .parallelism = 16, .units = 8};
    const fattn_wish wish = {.splits = kernel->row.split ? 4 : 0};
    fattn_problem p;
    fattn_tiling t;
    char why[256];
    if (fattn_problem_normalise(problem, &p) ||
        fattn_tiling_choose(&p, &limits, &kernel->row, &wish, &t)) {
        fprintf(stderr, "%s: %s\n", kernel->row.name, fattn_last_reason());
        return false;
    }
    if (fattn_kernel_declines(&kernel->row, &p, why, sizeof why)) {
        fprintf(stderr, "%s: %s\n", kernel->row.name, why);
        return false;
    }
    for (int n = 0; n < FATTN_GPU_PHASES && kernel->phases[n]; n++) {
        fattn_gpu_shape shape;
        memset(&shape, 0, sizeof shape);
        kernel->phases[n](kernel, &p, &t, &shape);
        if (shape.blocks > 0) {
            printf("%s %s %s %d\n", processor, kernel->image, shape.entry, shape.threads);
        }
        if (shape.merges) {
            break;
        }
    }
    return true;
}

static bool print_row(const char *processor, const fattn_gpu_kernel *kernel)
{
    static const int64_t dims[] = {64, 128, 256};
    const fattn_kernel *const row = &kernel->row;
    bool good = true;
    for (int n = 0; n < 8 * 3 * 8; n++) {
        const int dtype = n / 24;
        const int64_t dim = dims[n / 8 % 3];
        if (row->dtypes & FATTN_DTYPE_BIT(dtype) && dim <= row->dim_max) {
            const fattn_problem p = problem_of(row, dtype, dim, n % 2, n / 2 % 2, n / 4 % 2);
            good = print_entries(processor, kernel, &p) && good;
        }
    }
    return good;
}

int main(int argc, char **argv)
{
    const fattn_gpu_kernel *const tables[] = {fattn_hip_matrix, fattn_hip_matrix_backward,
                                              fattn_gpu_simt};
    bool good = true;
    for (int a = 1; a < argc; a++) {
        const int isa = (int)strtol(argv[a] + strlen("gfx"), NULL, 16);
        for (int n = 0; n < 3; n++) {
            for (const fattn_gpu_kernel *kernel = tables[n]; kernel->row.name; kernel++) {
                if (fattn_gpu_kernel_runs(kernel, isa)) {
                    good = print_row(argv[a], kernel) && good;
                }
            }
        }
    }
    return good ? 0 : 1;
}
