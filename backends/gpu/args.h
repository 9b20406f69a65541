/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a kernel of a run is given: the problem and the buffers as the core made them, by value, in
 * the one parameter that every entry takes. Read by the host in C and by device code alike. Kernel
 * parameters may hold 4 KB, and uniform reads of them cost a GPU nothing.
 */
#ifndef FATTN_GPU_ARGS_H
#define FATTN_GPU_ARGS_H

#include "backends/gpu/scalar.h"
#include "core/kernel.h"
#include "core/score.h"
#include "fattn/fattn.h"

/* Tensors: those whose rows may be read and written four elements at a time are set in `quads`,
 * those whose rows begin at multiples of 16 bytes in `chunks`. */
enum {
    FATTN_GPU_QUADS_Q = 1,
    FATTN_GPU_QUADS_K = 2,
    FATTN_GPU_QUADS_V = 4,
    FATTN_GPU_QUADS_O = 8,
    FATTN_GPU_QUADS_DOUT = 16,
    FATTN_GPU_QUADS_DQ = 32,
    FATTN_GPU_QUADS_DK = 64,
    FATTN_GPU_QUADS_DV = 128
};

/* Of the kernels that merge the parts of rows (parts.cuh). combine: 32 threads take 32 channels
 * of one row. combine_rows: a block takes so many rows of one item, 32 threads 128 channels of
 * each. */
#define FATTN_GPU_COMBINE_THREADS 128
#define FATTN_GPU_COMBINE_ROWS 8

/* Where the last block merges them instead: channels of a row that 32 threads take at a time, and
 * parts. */
#define FATTN_GPU_MERGE_CHANNELS 128
#define FATTN_GPU_MERGE_PARTS 16

/* Rows that a block of the kernels of backward_rows.cuh takes, of 128 threads. */
#define FATTN_GPU_BACKWARD_ROWS 16
/* The same of merge, of image "verbs". */
#define FATTN_GPU_MERGE_ROWS 8

typedef struct fattn_gpu_args {
    fattn_problem problem; /* normalised */
    fattn_buffers buffers; /* normalised; what they point to may be wrong, and must not do harm */
    fattn_tiling tiling;
    fattn_score_rule rule;
    fattn_dtype dtype_gradient; /* of dq, dk, dv */
    uint32_t dropout_threshold;
    unsigned quads, chunks; /* FATTN_GPU_QUADS_* */
    char *workspace;
    int64_t group; /* query heads of a key/value head */
    /* Of kernels that merge parts themselves: where they count them, bytes into the workspace, and
     * what they count from (parts.cuh); -1 where the kernel after them merges. */
    int64_t counters;
    uint64_t mark;
#ifndef __CUDACC__
    /* Where kernels add to entries of dbias that are summed over axes, and the caller's memory
     * will not do: so many bytes into the workspace, and strides there; -1: no axis is summed
     * over. Last, and for hip's kernels alone: CUDA's do not know the fields, and their launches
     * read the struct up to here. */
    int64_t sums, sums_stride[4];
#endif
} fattn_gpu_args;

/* Of the peak loops (peaks.cuh). */
#define FATTN_GPU_PEAK_THREADS 512 /* of a block, of which a unit has one */
#define FATTN_GPU_PEAK_FMAS 256    /* of a thread, in a round */

typedef struct fattn_gpu_peak_args {
    const void *data;
    int64_t bytes, rounds;
    float factor, summand;
    uint64_t *out; /* cycles of each block, and one that is never written */
} fattn_gpu_peak_args;

/* Of the kernel behind fattn_dropout_mask(). */
typedef struct fattn_gpu_dropout_args {
    fattn_dropout_args args;
    uint32_t threshold;
} fattn_gpu_dropout_args;

/* Everything but buffers and workspace; counters are -1. */
void fattn_gpu_args_fill(const fattn_problem *problem, const fattn_tiling *tiling,
                         fattn_gpu_args *args);

#endif
