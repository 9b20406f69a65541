/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows. Each backend has a table of its kernels: what a kernel computes, for which problems,
 * with which tiles. The planner takes the first row that accepts a problem; tests and benchmarks
 * walk the same tables, so every kernel is tested and measured. Tables are ordered best first, and
 * the last row that is not `by_name` takes everything that the backend can do.
 */
#ifndef FATTN_CORE_KERNEL_H
#define FATTN_CORE_KERNEL_H

#include <stdbool.h>

#include "fattn/fattn.h"

#define FATTN_OP_BIT(op) (1u << (op))
#define FATTN_DTYPE_BIT(dtype) (1u << (dtype))

/* br queries by bc keys. A kernel's list of tiles ends with {0, 0}. */
typedef struct fattn_tile {
    int64_t br, bc;
} fattn_tile;

/* The features of a full row, as one name. A row honours the features that it names and no others,
 * so that no row accepts a new feature by default. */
#define FATTN_KERNEL_COMMON                                                                   \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_SOFTCAP | FATTN_BIAS | FATTN_ALIBI |   \
     FATTN_MASK | FATTN_BLOCK_MASK | FATTN_SINK | FATTN_DROPOUT | FATTN_CU_SEQLENS_Q |        \
     FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | \
     FATTN_DLSE | FATTN_ACCUMULATE | FATTN_DETERMINISTIC | FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* The features that the last rows of every backend honour, which take what other rows decline:
 * those of the reference and of the CPU, and the GPU rows that use plain multiply-adds (SIMT). */
#define FATTN_KERNEL_LAST (FATTN_KERNEL_COMMON | FATTN_CHUNK | FATTN_DESCALE)

/* The features that a backward cannot have. */
#define FATTN_KERNEL_NOT_BACKWARD (FATTN_PAGED | FATTN_BATCH_INVARIANT | FATTN_DESCALE)

struct fattn_limits; /* what a backend says about a device (tiling.h) */

/* How a run is divided into work items: the planner's result (tiling.h). */
typedef struct fattn_tiling {
    int64_t br, bc;   /* the tile */
    int64_t q_blocks; /* ceil(rows / br), rows = Sq, or G * Sq for a kernel that packs a kv group */
    int64_t k_blocks; /* ceil(Sk / bc) */
    int64_t heads;    /* of all batches, key/value heads for a kernel that packs groups */
    int64_t together; /* heads whose items alternate, >= 1 (schedule.h) */
    int64_t splits;   /* most parts into which a sequence's keys are cut, >= 1 */
    int64_t split_blocks; /* key blocks per part if a row attends to all k_blocks (schedule.h) */
    int64_t part_blocks;  /* fewest key blocks that are worth a part, >= 1 */
    int64_t whole_blocks; /* up to this many key blocks stay one part */
    int64_t items;        /* independent pieces of work */
    int64_t pieces;       /* into how many pieces a run cuts the keys of all sequences, by their
                           * lengths; 0: each sequence is cut by its own length (tiling.h) */
    int64_t workspace;    /* bytes, a multiple of 256 */
    double traffic;       /* predicted slow-memory bytes */
    int workers;          /* CPU: threads that are worth waking for a run; 0 elsewhere */
} fattn_tiling;

/* What it costs a kernel to cut keys into parts. From this the planner chooses how many parts. */
typedef struct fattn_split_cost {
    int64_t keys;   /* a part of fewer keys does not pay */
    int64_t pieces; /* keys are cut if there are fewer pieces of work than this; 0: the keys of this
                     * problem are not cut by the lengths of all sequences (tiling.h) */
    int64_t units;  /* for a kernel that memory bounds, else 0: so many parts run at the same time,
                     * as a round, and each round takes the time of `keys` more keys */
} fattn_split_cost;

typedef struct fattn_kernel fattn_kernel;
struct fattn_kernel {
    const char *name;
    uint32_t ops;       /* FATTN_OP_BIT(...) */
    uint32_t dtypes;    /* FATTN_DTYPE_BIT(...) of q, k, v */
    uint32_t dtypes_kv; /* those that k and v may have instead of q's; 0: none */
    bool caches_alone;  /* k and v have these types alone, not q's */
    bool any_bias;      /* a bias may be of another type than q and f32 */
    uint64_t features;  /* FATTN_* bits that it honours */
    int64_t dim_max;    /* largest D and Dv */
    int64_t dim_v_max;  /* largest Dv if that is less; 0: dim_max */
    int64_t rows_max;   /* most rows G * Sq that share a kv head; 0: any */
    int64_t rows_min;   /* fewest such rows; ignored for batch-invariant problems, whose kernel
                         * must not depend on the number of rows */
    int64_t align;      /* rows of q, k, v and dout begin at multiples of this many bytes; 0: any */
    bool own_dtype_o;   /* o and dout must have the type of q, k, v */
    bool adds_dbias;    /* sums dbias over an axis in any order: not with FATTN_DETERMINISTIC */
    double dropout_max; /* largest dropout_p; 0: any */
    bool packs_groups;  /* the G query heads of a kv head form the rows of one block */
    bool must_fit;      /* runs only with a tile that fits fast memory */
    bool by_name;       /* taken only if FATTN_KERNEL names it */
    bool by_lengths;    /* its kernels read all lengths and cut keys by them, on a device whose runs
                         * do not know lengths before they start (tiling.h) */
    int64_t leaves_few; /* if sequences differ in their number of queries, those with at most so
                         * many rows G * Sq may go to a row with rows_max; 0: none do */
    const fattn_tile *tiles;

    /* The functions of a row are pure. Each is given the row, so that rows of a family share it. */

    /* Why the row cannot take the problem, if the fields above do not say it; else NULL. The
     * function is NULL if the fields say all. */
    const char *(*cannot)(const fattn_kernel *row, const fattn_problem *problem);
    /* Whether the row is fast enough to be taken when it is not named; NULL: always. */
    bool (*pays)(const fattn_kernel *row, const fattn_problem *problem,
                 const struct fattn_limits *limits);
    /* The cost of a tile, in any unit: the planner takes the cheapest. NULL: traffic decides. */
    double (*cost)(const fattn_kernel *row, const fattn_problem *problem,
                   const struct fattn_limits *limits, fattn_tile tile);
    /* The cost of parts of the keys; NULL: the row cannot cut keys into parts and merge them. */
    fattn_split_cost (*split)(const fattn_kernel *row, const fattn_problem *problem,
                              const struct fattn_limits *limits);
    /* Fast memory that a tile occupies, in bytes; below 0 if the row has no kernel with this tile
     * for the problem. */
    int64_t (*fast_bytes)(const fattn_kernel *row, const fattn_problem *problem, fattn_tile tile);
    /* Workspace of a run, in bytes, or -1 on overflow. tiling->workspace and traffic are not set
     * yet. */
    int64_t (*workspace)(const fattn_kernel *row, const fattn_problem *problem,
                         const fattn_tiling *tiling);
};

/* Why the row does not take the problem; NULL if it does. text is room for the sentence. */
const char *fattn_kernel_declines(const fattn_kernel *kernel, const fattn_problem *problem,
                                  char *text, size_t size);

/* False if the row must_fit and none of its tiles fits `memory` bytes of fast memory. */
bool fattn_kernel_fits(const fattn_kernel *kernel, const fattn_problem *problem, int64_t memory);

/* Rows per head and heads per sequence as the row counts them: G * Sq and Hk if it packs groups,
 * else Sq and Hq. */
int64_t fattn_kernel_rows(const fattn_kernel *kernel, const fattn_problem *problem);
int64_t fattn_kernel_heads(const fattn_kernel *kernel, const fattn_problem *problem);

/* Blocks of rows in the problem with the row's first tile; INT64_MAX on overflow. */
int64_t fattn_kernel_blocks(const fattn_kernel *kernel, const fattn_problem *problem);

#endif
