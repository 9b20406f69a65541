/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arguments of the kernels: the problem and the buffers as the core made them, passed by value in
 * the one parameter that every entry has. The host (in C) and device code share this header. Kernel
 * parameters may hold 4 KB, and a read that is uniform over a warp costs nothing.
 */
#ifndef FATTN_GPU_ARGS_H
#define FATTN_GPU_ARGS_H

#include "backends/gpu/scalar.h"
#include "core/kernel.h"
#include "core/score.h"
#include "fattn/fattn.h"

/* One bit for each tensor, for the fields `quads` and `chunks` of fattn_gpu_args. In `quads` it
 * means that the tensor's rows may be read and written four elements at a time, in `chunks` that
 * its rows begin at multiples of 16 bytes. */
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

/* The kernels that merge the parts of rows (combine.cuh) have blocks of FATTN_GPU_COMBINE_THREADS
 * threads. In `combine`, 32 threads merge 32 channels of one row. In `combine_rows`, a block merges
 * FATTN_GPU_COMBINE_ROWS rows of one item, and 32 threads merge 128 channels of a row at a time. */
#define FATTN_GPU_COMBINE_THREADS 128
#define FATTN_GPU_COMBINE_ROWS 8

/* If the last block merges the parts instead, 32 threads merge FATTN_GPU_MERGE_CHANNELS channels of
 * a row and FATTN_GPU_MERGE_PARTS parts at a time. */
#define FATTN_GPU_MERGE_CHANNELS 128
#define FATTN_GPU_MERGE_PARTS 16

/* In the kernels of backward_rows.cuh a thread has 16 channels of a row. How many threads share a
 * row, and how many rows a block of 128 threads has: */
#define FATTN_GPU_ROW_THREADS(width) ((width) / 16)
#define FATTN_GPU_BACKWARD_ROWS(width) (128 / FATTN_GPU_ROW_THREADS(width))

/* Threads per block of the kernels of image "verbs", and rows per block of its `merge`. */
#define FATTN_GPU_VERB_THREADS 128
#define FATTN_GPU_MERGE_ROWS 8

/* The order is that in which a decoding step, whose blocks wait for their first reads of arguments,
 * reads the fewest lines of 64 bytes: tensors are in one, and what counts finished blocks is beside
 * the tiling. */
typedef struct fattn_gpu_args {
    fattn_problem problem; /* normalised */
    fattn_score_rule rule;
    unsigned quads, chunks; /* FATTN_GPU_QUADS_* */
    char *workspace;
    int64_t group;         /* query heads of a key/value head */
    fattn_buffers buffers; /* normalised; lengths and tables in device memory are unchecked */
    fattn_tiling tiling;
    /* For kernels that merge parts themselves (combine.cuh): the offset in the workspace, in bytes,
     * of the counters of finished blocks, and the value from which these count. counters is -1
     * where a later kernel merges. */
    int64_t counters;
    uint64_t mark;
    fattn_dtype dtype_gradient; /* of dq, dk, dv */
    uint32_t dropout_threshold;
    int64_t key_tiles; /* backward: tiles of keys of one head of all sequences (packed.h) */
#ifndef __CUDACC__
    /* For kernels that sum dbias over axes in the workspace instead of in the caller's memory: the
     * offset of the sums in bytes, and their strides in elements. sums is -1 if no axis is summed
     * over. These fields are last because only HIP kernels have them: a CUDA kernel's parameter
     * ends here, and cuLaunchKernel copies no more than that. */
    int64_t sums, sums_stride[4];
#endif
} fattn_gpu_args;

/* For the peak loops (peaks.cuh), which run one block per multiprocessor. */
#define FATTN_GPU_PEAK_THREADS 512 /* per block */
#define FATTN_GPU_PEAK_FMAS 256    /* per thread and round */

typedef struct fattn_gpu_peak_args {
    const void *data;
    int64_t bytes, rounds;
    float factor, summand;
    uint64_t *out; /* cycles of each block, and an entry behind them that is never written */
} fattn_gpu_peak_args;

/* Arguments of the kernel behind fattn_dropout_mask(). */
typedef struct fattn_gpu_dropout_args {
    fattn_dropout_args args;
    uint32_t threshold;
} fattn_gpu_dropout_args;

/* Fills in everything but buffers and workspace. Sets counters to -1. */
void fattn_gpu_args_fill(const fattn_problem *problem, const fattn_tiling *tiling,
                         fattn_gpu_args *args);

#endif
