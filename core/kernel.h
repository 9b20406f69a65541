/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kernel is a row in its backend's table: what it computes, on what, with which tiles. The
 * planner takes the first row that accepts a problem; tests and benchmarks walk the same tables, so
 * that no kernel exists without them. Tables are ordered best first, and the last row that is not
 * `by_name` takes everything that the backend can do.
 */
#ifndef FATTN_CORE_KERNEL_H
#define FATTN_CORE_KERNEL_H

#include <stdbool.h>

#include "fattn/fattn.h"

#define FATTN_OP_BIT(op) (1u << (op))
#define FATTN_DTYPE_BIT(dtype) (1u << (dtype))

/* br queries by bc keys. Menus end with {0, 0}. */
typedef struct fattn_tile {
    int64_t br, bc;
} fattn_tile;

/* What rows of every backend honour. A feature that is not among these is named by each row that
 * honours it, so that no row claims a new one by itself. */
#define FATTN_KERNEL_COMMON                                                                   \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_SOFTCAP | FATTN_BIAS | FATTN_ALIBI |   \
     FATTN_MASK | FATTN_BLOCK_MASK | FATTN_SINK | FATTN_DROPOUT | FATTN_CU_SEQLENS_Q |        \
     FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | \
     FATTN_DLSE | FATTN_ACCUMULATE | FATTN_DETERMINISTIC | FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* What the last rows of every backend honour, which take what others decline: the definition of the
 * reference, the rows of CPUs, and those of GPUs that are made of plain multiply-adds. */
#define FATTN_KERNEL_LAST (FATTN_KERNEL_COMMON | FATTN_CHUNK)

struct fattn_limits; /* what a backend says about a device (tiling.h) */

/* How a run is cut up: the planner's answer (tiling.h). */
typedef struct fattn_tiling {
    int64_t br, bc;   /* the tile */
    int64_t q_blocks; /* ceil(rows / br), rows = Sq, or G * Sq for a kernel that packs a kv group */
    int64_t k_blocks; /* ceil(Sk / bc) */
    int64_t heads;    /* of all batches, key/value heads for a kernel that packs groups */
    int64_t together; /* heads whose items take turns, >= 1 (schedule.h) */
    int64_t splits;   /* parts that keys are cut into at most, >= 1: those of whole sequences */
    int64_t split_blocks; /* key blocks of a part where a row sees all k_blocks (schedule.h) */
    int64_t part_blocks;  /* fewest key blocks that are worth a part, >= 1 */
    int64_t whole_blocks; /* a row that sees no more than these has its keys in one part */
    int64_t items;        /* independent pieces of work */
    int64_t workspace;    /* bytes, a multiple of 256 */
    double traffic;       /* predicted slow-memory bytes */
    int workers;          /* threads that a CPU's run has, those worth waking; 0 elsewhere */
} fattn_tiling;

/* What cutting keys into parts costs a row. The planner decides by it how many parts there are. */
typedef struct fattn_split_cost {
    int64_t keys;   /* fewest that are worth a part of their own */
    int64_t pieces; /* of work, below which keys are worth cutting */
    int64_t units;  /* of a row that memory bounds: parts fill rounds of so many units, and a round
                     * costs the time of `keys` besides; else 0 */
} fattn_split_cost;

typedef struct fattn_kernel fattn_kernel;
struct fattn_kernel {
    const char *name;
    uint32_t ops;       /* FATTN_OP_BIT(...) */
    uint32_t dtypes;    /* FATTN_DTYPE_BIT(...) of q, k, v */
    bool mixes_kv;      /* k and v may be of other types than q */
    bool any_bias;      /* a bias may be of another type than q and f32 */
    uint64_t features;  /* FATTN_* bits that it honours */
    int64_t dim_max;    /* largest D and Dv */
    int64_t dim_v_max;  /* largest Dv where that is less; 0: dim_max */
    int64_t rows_max;   /* most rows G * Sq that share a kv head; 0 any */
    int64_t rows_min;   /* fewest; not asked of batch-invariant problems, whose row must not
                         * depend on their rows */
    int64_t align;      /* bytes whose multiples rows of q, k, v and dout begin at; 0 any */
    bool own_dtype_o;   /* o and dout must be of the type of q, k, v */
    bool adds_dbias;    /* sums dbias over an axis in any order: not with deterministic */
    double dropout_max; /* largest dropout_p; 0 any */
    bool packs_groups;  /* the G query heads of a kv head form the rows of one block */
    bool must_fit;      /* runs with no tile but one that fits fast memory */
    bool by_name;       /* taken only when FATTN_KERNEL asks for it */
    int64_t leaves_few; /* sequences of at most so many rows G * Sq are left to a row with rows_max
                         * where lengths differ and that pays; 0: none are */
    const fattn_tile *tiles;

    /* Functions of a row are pure. Each is given the row, so that rows of a family share it. */

    /* Why the row cannot take the problem, where the fields above do not say it; NULL where it can,
     * and where the row has no such reasons. */
    const char *(*cannot)(const fattn_kernel *row, const fattn_problem *problem);
    /* Whether the row is worth taking, unless by name; NULL where it always is. */
    bool (*pays)(const fattn_kernel *row, const fattn_problem *problem,
                 const struct fattn_limits *limits);
    /* What tiles of the menu are compared by, in any unit: the planner takes the one that costs
     * least. NULL where traffic decides. */
    double (*cost)(const fattn_kernel *row, const fattn_problem *problem,
                   const struct fattn_limits *limits, fattn_tile tile);
    /* What parts of the keys cost; NULL where the row cannot cut keys into parts and merge them. */
    fattn_split_cost (*split)(const fattn_kernel *row, const fattn_problem *problem,
                              const struct fattn_limits *limits);
    /* Fast memory that a tile occupies, in bytes; below 0 where the row has no kernel of this
     * tile for the problem. */
    int64_t (*fast_bytes)(const fattn_kernel *row, const fattn_problem *problem, fattn_tile tile);
    /* Workspace of a run, in bytes, or -1 on overflow; tiling->workspace and traffic are not set
     * yet. */
    int64_t (*workspace)(const fattn_kernel *row, const fattn_problem *problem,
                         const fattn_tiling *tiling);
};

/* Why the row does not take the problem; NULL when it does. text is scratch for the sentence. */
const char *fattn_kernel_declines(const fattn_kernel *kernel, const fattn_problem *problem,
                                  char *text, size_t size);

/* Whether a row that must fit has a tile for so many bytes of fast memory; true for others. */
bool fattn_kernel_fits(const fattn_kernel *kernel, const fattn_problem *problem, int64_t memory);

/* Rows of a head, and heads of a sequence, as the row takes them: with all of a group together, or
 * not. */
int64_t fattn_kernel_rows(const fattn_kernel *kernel, const fattn_problem *problem);
int64_t fattn_kernel_heads(const fattn_kernel *kernel, const fattn_problem *problem);

/* The problem's blocks of rows with the first tile; INT64_MAX where there are more. */
int64_t fattn_kernel_blocks(const fattn_kernel *kernel, const fattn_problem *problem);

#endif
