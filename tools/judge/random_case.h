/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Test cases from a seed: problems, memory layouts and values. Everything about a case follows from
 * (seed, index), by integer arithmetic and exact conversions only, so that a line such as
 * `fattn check --seed 7 --case 1234` gives the same case on every machine.
 *
 * A case is made in three steps. A test may start from a problem of its own and still have it laid
 * out, poisoned and judged like any other:
 *
 *     draw_problem()  or  draw_blank() and assignments   sizes, options, lengths; no memory yet
 *     draw_build()    and draw_set() for special values  images of the operands, filled inputs
 *     draw_save()                                        o and lse of a backward, by the oracle
 *
 * Memory that must not influence a result is poisoned with NaN or infinities: rows past a sequence,
 * gaps between strides, channels past D, unused pages. Outputs begin as NaN.
 */
#ifndef FATTN_TOOLS_DRAW_H
#define FATTN_TOOLS_DRAW_H

#include <stdbool.h>

#include "fattn/fattn.h"
#include "tools/judge/random.h"

/* -------------------------------------------------------------------------------------------------
 * Operands
 * ---------------------------------------------------------------------------------------------- */

/* Every pointer of fattn_buffers, in the order of the table in random_image.c. */
typedef enum draw_id {
    DRAW_Q,
    DRAW_K,
    DRAW_V,
    DRAW_O,
    DRAW_LSE,
    DRAW_DOUT,
    DRAW_DLSE,
    DRAW_DQ,
    DRAW_DK,
    DRAW_DV,
    DRAW_DBIAS,
    DRAW_DSINK,
    DRAW_BIAS,
    DRAW_MASK,
    DRAW_BLOCK_MASK,
    DRAW_SLOPES,
    DRAW_SINK,
    DRAW_CU_Q,
    DRAW_CU_K,
    DRAW_USED_Q,
    DRAW_USED_K,
    DRAW_TABLE,
    DRAW_Q_OFFSETS,
    DRAW_K_OFFSETS,
    DRAW_WHOLES_Q,
    DRAW_WHOLES_K,
    DRAW_SEED,
    DRAW_OFFSET,
    DRAW_START_K,
    DRAW_K_DESCALE,
    DRAW_V_DESCALE,
    DRAW_IDS
} draw_id;

/* Guard bytes around each image and around the workspace, which must not change. */
enum { DRAW_RING = 256 };

/* The bytes of an operand before a run. Operands that are slices of one packed array share an
 * image. */
typedef struct draw_image {
    unsigned char *bytes; /* ring, elements, ring; aligned to 256 */
    int64_t size;
    bool output;
} draw_image;

/* Axes are (batch or page, sequence or slot, head, channel) for tensors and lse, (batch, head,
 * query, key) for bias and masks, (batch, entry) for slopes, descales and the block table. Arrays
 * use axis 1 only. */
typedef struct draw_tensor {
    bool present;
    fattn_dtype dtype; /* 0: integers */
    int64_t size;      /* bytes per element */
    int64_t extent[4], stride[4];
    bool flat[4]; /* broadcast: stride 0 along this axis */
    int image;
    int64_t offset; /* bytes from the start of the image to element 0 */
} draw_tensor;

typedef struct draw_sequence {
    int64_t rows, keys; /* used; keys before start are padding */
    int64_t start;
    int64_t own_rows, own_keys; /* allotted */
    int64_t first_row, first_key;
    int64_t q_offset, k_offset, whole_q, whole_k;
} draw_sequence;

/* -------------------------------------------------------------------------------------------------
 * Cases
 * ---------------------------------------------------------------------------------------------- */

/* Kinds of input values. With Gaussian inputs alone, wrong kernels have passed. */
typedef enum draw_family {
    DRAW_GAUSSIAN,
    DRAW_UNIFORM,  /* [-0.5, 0.5) */
    DRAW_ONE_HOT,  /* one channel of a row is 1 */
    DRAW_CONSTANT, /* all elements of a tensor are equal */
    DRAW_OUTLIER,  /* one channel 100 times as large */
    DRAW_NEGATIVE, /* every score far below zero */
    DRAW_SORTED,   /* scores rise or fall with the key, so that each tile has a new maximum */
    DRAW_DENORMAL, /* f32 and e4m3 subnormal; other formats near their smallest normal number */
    DRAW_MASSIVE,  /* scores of several hundred, both signs */
    DRAW_WILD,   /* Gaussian with a few NaN and infinities: judged by class where they propagate */
    DRAW_PEAKED, /* Gaussian, scores of deviation 3 for at least 1024 keys: few have the weight */
    DRAW_FAMILIES
} draw_family;

extern const char *const draw_family_names[DRAW_FAMILIES];

typedef struct draw_case {
    uint64_t seed;
    int64_t index;

    fattn_problem problem;    /* as passed to the library */
    fattn_buffers buffers;    /* scalars; pointers into the images */
    draw_sequence *sequences; /* [batch] */
    draw_tensor tensors[DRAW_IDS];
    draw_image images[DRAW_IDS];
    int image_count;

    draw_family family;
    uint64_t seed_value, offset_value; /* contents of DRAW_SEED and DRAW_OFFSET */

    /* Layout, used by draw_build. */
    bool aligned_rows; /* rows of q, k, v and the like begin at multiples of 16 bytes */
    bool packed;       /* q, k, v (and dq, dk, dv) are slices of one array; FATTN_STRIDED only */
    bool v_in_k; /* v is the first channels of k, if types and sizes allow; FATTN_STRIDED only */
    bool pass_unwanted; /* outputs that are not requested have pointers too */
    bool clean;         /* zeros instead of poison, except in outputs */
    int64_t lead;       /* unused rows before the first sequence of packed tensors */
    int64_t page_slack; /* unused pages */
    bool position_arrays, seed_pointers; /* instead of scalars */

    /* The run, used by the judge. */
    int tile;               /* 0: the planner's choice; n: the row's n-th tile, cyclically */
    int64_t splits;         /* 0: the planner's choice */
    bool twice;             /* run again with different poison and compare bits */
    bool without_workspace; /* pass NULL */
} draw_case;

/* A problem with the library's defaults, for tests that write their own. */
void draw_blank(draw_case *c, uint64_t seed);

/* Draws problem, lengths, layout and run. Returns 0, or -1 if memory runs out. */
int draw_problem(draw_case *c, uint64_t seed, int64_t index);

/* Gives each of the c->problem.batch sequences the full length. Call it before changing single
 * sequences. Rows and keys allotted come from seqlen_q and seqlen_k; with cu_seqlens a test may
 * write own_rows and own_keys. */
int draw_sequences(draw_case *c);

/* Whether v is the first channels of k. */
bool draw_has_v_in_k(const draw_case *c);

/* Lays out, allocates, poisons and fills. Returns 0, or -1 if memory runs out. */
int draw_build(draw_case *c);

/* The problem of a built case under FATTN_STRIDED, with the strides chosen here. The oracle gets
 * this one, so that it does not depend on the library's interpretation of layouts. */
fattn_problem draw_spelled(const draw_case *c);

/* Backward: computes o and lse, rounded to their types, as a user would pass them. Forward: does
 * nothing. */
fattn_status draw_save(draw_case *c);

void draw_free(draw_case *c);

/* Index in elements of an entry, relative to element 0 of the operand. s is a local row or key: the
 * function resolves sequences and pages. */
int64_t draw_at(const draw_case *c, draw_id id, int64_t b, int64_t s, int64_t h, int64_t channel);

/* Reads and writes the element at an index of draw_at in the image. */
double draw_get(const draw_case *c, draw_id id, int64_t at);
void draw_set(draw_case *c, draw_id id, int64_t at, double value);

/* The address of an operand's field in fattn_buffers, and the operand's name in messages. */
void *draw_pointer(fattn_buffers *buffers, draw_id id);
void draw_point(fattn_buffers *buffers, draw_id id, void *pointer);
const char *draw_name(draw_id id);

/* Describes the case, truncated to size. */
void draw_describe(const draw_case *c, char *text, size_t size);

/* The features that problems of an op can have. */
uint64_t draw_features_of(fattn_op op);

#endif
