/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn: exact, IO-aware attention (FlashAttention) on CPUs, NVIDIA and AMD GPUs.
 *
 * This is the interface for one device; fattn/distributed.h adds several. Describe the computation
 * in a `fattn_problem` and the tensors in a `fattn_buffers`. fattn_attention() then plans and runs
 * it in one call; fattn_plan_create() and fattn_execute() do so in two, so that one plan can be
 * executed many times:
 *
 *     fattn_problem problem;
 *     fattn_problem_init(&problem);
 *     problem.batch = 1, problem.heads_q = problem.heads_k = 16;
 *     problem.seqlen_q = problem.seqlen_k = 4096, problem.dim = problem.dim_v = 128;
 *     problem.features = FATTN_CAUSAL;
 *
 *     fattn_buffers buffers;
 *     fattn_buffers_init(&buffers);
 *     buffers.q = q, buffers.k = k, buffers.v = v, buffers.o = o;
 *
 *     fattn_status status = fattn_attention(NULL, &problem, &buffers, NULL);
 *     if (status != FATTN_OK) fprintf(stderr, "%s\n", fattn_last_reason());
 *
 * docs/MATH.md derives the formulas, docs/NUMERICS.md bounds their error. Letters used below: B
 * batch, Hq and Hk query and key/value heads, Sq and Sk query and key lengths, D and Dv head
 * dimensions of (q, k) and (v, o); i a query, j a key, c a channel. "Row" means query row. `off` is
 * the diagonal: query i is aligned with key i + off (fattn_anchor, FATTN_POSITIONS).
 *
 * Rules that hold for every function here:
 *
 * - Errors. Functions that can fail return a `fattn_status`. On failure outputs are untouched,
 *   handles written through a pointer are NULL, and fattn_last_reason() explains, naming the field
 *   and its value. (An error that a device reports after a kernel has started may leave outputs
 *   half written.) The library never aborts, exits or throws. A required pointer that is NULL is
 *   FATTN_NULL_POINTER. Only the fattn_*_init() functions, which return nothing, must not be given
 *   NULL.
 * - Threads. Every function may be called from any thread. Threads may share plans and devices; a
 *   workspace serves one execution at a time. In an optimised build 64 KiB of stack suffice for
 *   every function; on a GPU the driver needs more. A run cannot be stopped: a thread that is
 *   cancelled (pthread_cancel()) during a run on the library's own threads finishes the run first.
 *   No thread may be cancelled in a call that opens a device or makes a plan.
 * - Ownership. The caller owns all memory passed in. It must stay valid until the work is done: on
 *   a CPU until the call returns, on a GPU until the stream has executed the call's work. Handles
 *   belong to the library, and are invalid once their close or destroy function is called: using
 *   one after that, or closing it again, is undefined.
 * - Structs begin with struct_size, which their fattn_*_init() sets. It tells the library which
 *   version of this header the caller was compiled with. Fields that an older, shorter struct lacks
 *   read as their defaults; a newer, longer struct is accepted if the fields that this library does
 *   not know are zero. In a struct that the library fills, such fields become zero. A size that the
 *   struct never had is FATTN_INVALID_STRUCT. The init functions write the struct of the library's
 *   own header, so a caller with another header sets struct_size and the fields itself.
 * - Units. Strides are in elements, sizes named `bytes` in bytes; lse is a natural logarithm.
 *
 * Not promised: the ABI before version 1.0, and bit-identical results between different backends,
 * instruction sets or versions.
 */
#ifndef FATTN_H
#define FATTN_H

#include <stddef.h>
#include <stdint.h>

#include "fattn/version.h"

/* Precedes every function declaration. A program that loads the library itself may define it before
 * it includes this header. */
#ifndef FATTN_API
#if defined(_WIN32) && defined(FATTN_BUILDING)
#define FATTN_API __declspec(dllexport)
#elif defined(_WIN32) && defined(FATTN_SHARED)
#define FATTN_API __declspec(dllimport)
#elif defined(__GNUC__)
#define FATTN_API __attribute__((visibility("default")))
#else
#define FATTN_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------------
 * Status
 * ---------------------------------------------------------------------------------------------- */

/* Numbered in groups of ten by cause; a number is never reused for another meaning. */
typedef enum fattn_status {
    FATTN_OK = 0, /* success */

    /* The request is wrong on every device. */
    FATTN_INVALID_ARGUMENT = 10, /* an unknown enum value or bit, or a number out of its range */
    FATTN_INVALID_STRUCT =
        11, /* struct_size fits no version, or a field unknown to this library is not zero */
    FATTN_INVALID_SHAPE = 12,  /* a negative or inconsistent size */
    FATTN_INVALID_STRIDE = 13, /* a stride that the problem cannot have */
    FATTN_NULL_POINTER = 14,   /* a required pointer is NULL */
    FATTN_MISALIGNED = 15,     /* a pointer is less aligned than promised */
    FATTN_OVERLAP = 16,        /* an output overlaps itself or another buffer, or a buffer overlaps
                                * the workspace */
    FATTN_OVERFLOW = 17,       /* a size in bytes does not fit in 63 bits */
    FATTN_INVALID_DATA = 18,   /* lengths, cu_seqlens or a block table contradict the problem */

    /* The request is legal, but this device, build or backend cannot honour it. */
    FATTN_UNSUPPORTED = 20, /* the reason says what is missing */

    /* Devices. */
    FATTN_NO_DEVICE = 30,      /* this build has the backend, but no such device is present */
    FATTN_UNKNOWN_DEVICE = 31, /* not the name of a backend of this build */
    FATTN_DEVICE_ERROR = 32,   /* a device's driver reported an error, which the reason quotes */

    /* Resources. */
    FATTN_OUT_OF_MEMORY = 40, /* the reason says how many bytes were requested */

    /* Environment. */
    FATTN_BAD_ENVIRONMENT =
        50, /* a FATTN_* variable has a value outside docs/BUILDING.md's table */

    /* Other ranks (fattn/distributed.h). */
    FATTN_RANK_LOST = 60,     /* a rank failed or is gone; the reason says which, and why */
    FATTN_RANK_TIMEOUT = 61,  /* a rank did not answer in time */
    FATTN_RANKS_DISAGREE = 62 /* ranks described different problems */
} fattn_status;

/* The name of a status, such as "FATTN_OVERLAP"; "unknown fattn_status" for any other number.
 * Static. */
FATTN_API const char *fattn_status_string(fattn_status status);

/* A sentence about this thread's most recent failure, naming the field and the value that were
 * wrong: one line of printable ASCII; empty before the first failure. Valid until the next failure
 * in this thread. Never NULL. */
FATTN_API const char *fattn_last_reason(void);

/* Copies that sentence into text, truncated to size bytes and always terminated; with text NULL it
 * copies nothing. Returns the length of the whole sentence, like snprintf. The reason belongs to a
 * thread: a language runtime that may move its caller to another thread between two foreign calls
 * must make this call on the thread on which the function failed. */
FATTN_API size_t fattn_last_reason_copy(char *text, size_t size);

/* The version of the library that is running, as "major.minor.patch". */
FATTN_API const char *fattn_version(void);

/* -------------------------------------------------------------------------------------------------
 * The problem
 * ---------------------------------------------------------------------------------------------- */

/* The element type of a tensor, in the processor's byte order. */
typedef enum fattn_dtype {
    FATTN_DTYPE_DEFAULT = 0, /* only in dtype_o, _bias, _kv and _v, whose comments define it */
    FATTN_F32 = 1,           /* IEEE binary32 */
    FATTN_F16 = 2,           /* IEEE binary16 */
    FATTN_BF16 = 3,          /* the upper half of a binary32 */
    FATTN_F64 =
        4, /* backend "reference" only; lse, bias, sink, slopes and gradients are f64 too then */
    FATTN_E4M3 = 5 /* fp8 with 4 exponent and 3 mantissa bits, largest value 448, NaN but no
                    * infinity (OCP's E4M3): a cache of k and v, forward only */
} fattn_dtype;

/* What is computed: attention or its gradients. */
typedef enum fattn_op {
    FATTN_FORWARD = 1, /* q k v -> o, lse. Decoding is a forward with few queries */
    FATTN_BACKWARD = 2 /* q k v o lse dout -> dq dk dv dbias dsink */
} fattn_op;

/* The memory layout of q, k, v, o and their gradients. BSHD and BHSD tensors are contiguous, and
 * the strides in fattn_problem must be 0; STRIDED reads the strides of the tensors that the
 * operation uses. With cu_seqlens a tensor has no batch axis: BSHD means (total, head, channel) and
 * BHSD (head, total, channel). Paged k and v are (page, slot, head, channel) in BSHD and (page,
 * head, slot, channel) in BHSD. */
typedef enum fattn_layout {
    FATTN_BSHD = 1,   /* (batch, sequence, head, channel) */
    FATTN_BHSD = 2,   /* (batch, head, sequence, channel) */
    FATTN_STRIDED = 3 /* any strides; inputs may have 0. The channel stride is always 1 */
} fattn_layout;

/* Which corner of the score matrix causal masks, windows and ALiBi are anchored to when Sq !=
 * Sk. */
typedef enum fattn_anchor {
    FATTN_BOTTOM_RIGHT = 1, /* the default: the last query is aligned with the last key (off = Sk -
                             * Sq), as decoding needs */
    FATTN_TOP_LEFT = 2      /* query 0 is aligned with key 0 (off = 0), as PyTorch's is_causal */
} fattn_anchor;

/* Features. A field that belongs to a feature must have its default, which fattn_problem_init() or
 * fattn_buffers_init() sets, unless the feature's bit is set; else the call fails with a reason
 * that names field and bit. In fattn_buffers this holds for every field below `dsink`, and for dlse
 * in a backward. The fields above, the tensors, may be set even if the operation or the outputs
 * do not use them: they are neither read nor written, so one struct serves forward and backward.
 *
 * The constants are bare literals, so that binding generators can read them, and 64 bits wide, so
 * that ~FATTN_CAUSAL has all other bits set. (An enumerator of C would be an int.) */
#define FATTN_CAUSAL 0x1ull              /* j <= i + off */
#define FATTN_WINDOW 0x2ull              /* window_left, window_right */
#define FATTN_SCALE 0x4ull               /* scale; 1 / sqrt(D) otherwise */
#define FATTN_SOFTCAP 0x8ull             /* softcap */
#define FATTN_BIAS 0x10ull               /* bias, dtype_bias, bias_stride */
#define FATTN_ALIBI 0x20ull              /* alibi_slopes, alibi_batch_stride */
#define FATTN_MASK 0x40ull               /* mask, mask_stride */
#define FATTN_BLOCK_MASK 0x80ull         /* block_mask, block_mask_stride, block_m, block_n */
#define FATTN_SINK 0x100ull              /* sink */
#define FATTN_DROPOUT 0x200ull           /* dropout_p; seed, offset or their pointers */
#define FATTN_CU_SEQLENS_Q 0x400ull      /* cu_seqlens_q, total_q */
#define FATTN_CU_SEQLENS_K 0x800ull      /* cu_seqlens_k, total_k */
#define FATTN_SEQUSED_Q 0x1000ull        /* seqused_q */
#define FATTN_SEQUSED_K 0x2000ull        /* seqused_k */
#define FATTN_PAGED 0x4000ull            /* block_table, page_size, num_pages, max_pages */
#define FATTN_POSITIONS 0x8000ull        /* q_offset(s), k_offset(s), whole_q, whole_k */
#define FATTN_DLSE 0x10000ull            /* dlse: lse has a gradient too (backward) */
#define FATTN_ACCUMULATE 0x20000ull      /* add to the gradients, which are then all f32 */
#define FATTN_DETERMINISTIC 0x40000ull   /* backward bit-identical from run to run on GPUs too */
#define FATTN_BATCH_INVARIANT 0x80000ull /* a row's result depends on its own inputs only */
#define FATTN_CHECKED 0x100000ull        /* GPU: validate lengths and tables, synchronously */
#define FATTN_SEQSTART_K 0x200000ull     /* seqstart_k: no keys before it (CPU, reference) */
#define FATTN_ALIBI_BIAS 0x400000ull     /* slopes times bias: needs ALIBI, BIAS (CPU, reference) */
#define FATTN_CHUNK 0x800000ull          /* chunk: a query attends to its own chunk of keys only */
#define FATTN_DESCALE 0x1000000ull       /* k_descale, v_descale, descale_stride: forward */
/* All of these bits. */
#define FATTN_FEATURES_ALL 0x1ffffffull

/* The outputs to compute. Forward: O, with or without LSE. Backward: any subset of the others. An
 * output of the other operation is FATTN_INVALID_ARGUMENT. */

#define FATTN_OUT_O 0x1u      /* o */
#define FATTN_OUT_LSE 0x2u    /* lse; backward reads it */
#define FATTN_OUT_DQ 0x4u     /* dq */
#define FATTN_OUT_DK 0x8u     /* dk */
#define FATTN_OUT_DV 0x10u    /* dv */
#define FATTN_OUT_DBIAS 0x20u /* dbias; needs FATTN_BIAS */
#define FATTN_OUT_DSINK 0x40u /* dsink; needs FATTN_SINK */

/* Strides of a rank-4 tensor (batch, sequence, head, channel), in elements. The channel stride is
 * 1, so these are a DLPack tensor's strides without the last. With cu_seqlens `batch` is ignored;
 * in a paged k or v `batch` is the stride between pages and `seq` the stride between the slots of a
 * page. */
typedef struct fattn_strides {
    int64_t batch, seq, head; /* between neighbours along that axis */
} fattn_strides;

/*
 * What is to be computed. Set it up with fattn_problem_init(), then fill in what differs. The
 * default is 0 unless a field's comment names another; dim and dim_v have none, and 0 is refused.
 *
 * Let x_ij be the scaled, capped and biased score of query i and key j, and let the sums run over
 * the keys that masks and windows keep (docs/MATH.md). Then
 *     lse_i = ln(sum_j exp(x_ij) + exp(sink)),   o_i = sum_j Z_ij exp(x_ij - lse_i) v_j,
 * where Z_ij is the dropout multiplier, 1 without dropout. A row without any key (and without a
 * sink) has o = 0 and lse = -inf and contributes 0 to every gradient. Query head h reads key/value
 * head h / (Hq / Hk).
 */
typedef struct fattn_problem {
    size_t struct_size; /* sizeof(fattn_problem); set by fattn_problem_init */

    fattn_op op;            /* default FATTN_FORWARD */
    fattn_dtype dtype;      /* of q and dq; of k, v, dk, dv too by default; default FATTN_F32 */
    fattn_dtype dtype_o;    /* of o and dout: dtype or FATTN_F32; FATTN_DTYPE_DEFAULT means dtype */
    fattn_dtype dtype_bias; /* of bias: f32, f16 or bf16, in an f64 problem also f64.
                             * FATTN_DTYPE_DEFAULT means FATTN_F32, in an f64 problem FATTN_F64.
                             * GPUs take dtype and FATTN_F32 */
    fattn_layout layout;    /* default FATTN_BSHD */
    fattn_anchor anchor;    /* default FATTN_BOTTOM_RIGHT */
    uint64_t features;      /* FATTN_CAUSAL | ...; default 0 */
    uint32_t outputs;       /* FATTN_OUT_*; 0, the default, means O, or DQ | DK | DV */
    uint32_t reserved;      /* 0 */

    /* Sizes are 2^31 - 1 at most. */
    int64_t batch;    /* B, default 1 */
    int64_t heads_q;  /* Hq, a multiple of heads_k, default 1 */
    int64_t heads_k;  /* Hk, default 1 */
    int64_t seqlen_q; /* Sq; with cu_seqlens_q the most rows that a sequence may have. Default 0:
                       * then there is nothing to compute, and calls succeed */
    int64_t seqlen_k; /* Sk; with cu_seqlens_k or FATTN_PAGED the most keys that one may have.
                       * Default 0: then o is 0 */
    int64_t dim;      /* D, 1..576, no default. Above 256 most GPUs only have SIMT kernels */
    int64_t dim_v;    /* Dv, likewise. Latent attention (MLA) is D 576, Dv 512, Hk 1, and v is the
                       * first 512 channels of k: FATTN_STRIDED, k's pointer and strides for v */
    int64_t total_q;  /* FATTN_CU_SEQLENS_Q: rows of the packed q, at least cu_seqlens_q[B] */
    int64_t total_k;  /* FATTN_CU_SEQLENS_K: rows of the packed k and v, at least cu_seqlens_k[B] */

    int64_t page_size; /* FATTN_PAGED: keys per page, >= 1 */
    int64_t num_pages; /* FATTN_PAGED: pages in k and in v */
    int64_t max_pages; /* FATTN_PAGED: columns of block_table; max_pages * page_size >= Sk */
    int64_t block_table_stride; /* FATTN_PAGED: between rows of block_table; 0 means max_pages */

    fattn_strides q, k, v, o;       /* FATTN_STRIDED */
    fattn_strides dout, dq, dk, dv; /* FATTN_STRIDED, backward */

    double scale;         /* FATTN_SCALE: factor of q.k; any finite value, 0 and negative ones
                           * included. Without FATTN_SCALE leave it 0, the default; the factor is
                           * then 1 / sqrt(D) */
    double softcap;       /* FATTN_SOFTCAP: finite, > 0: x = softcap * tanh(x / softcap) */
    double dropout_p;     /* FATTN_DROPOUT: probability of dropping a weight, 0..1, rounded to a
                           * multiple of 1/65536: to 0 or 1 only if it is exactly that */
    int64_t window_left;  /* FATTN_WINDOW: the number of keys before key i + off that query i
                           * attends to; -1, the default: all */
    int64_t window_right; /* FATTN_WINDOW: the number of keys after it; -1, the default: all. With
                           * FATTN_CAUSAL it counts as 0, whatever it is */

    /* Strides of (batch, head, query, key); any of them may be 0 to broadcast: with none set, one
     * value serves all pairs. i and j count the rows and keys of one sequence from 0, in packed
     * batches too. */
    int64_t bias_stride[4];       /* FATTN_BIAS */
    int64_t mask_stride[4];       /* FATTN_MASK */
    int64_t block_mask_stride[4]; /* FATTN_BLOCK_MASK: of (batch, head, i / block_m, j / block_n) */
    int64_t dbias_stride[4];  /* FATTN_OUT_DBIAS: dbias is summed over the axes whose stride is 0 */
    int64_t block_m, block_n; /* FATTN_BLOCK_MASK: queries and keys per block, >= 1 */
    int64_t alibi_batch_stride; /* FATTN_ALIBI: 0 for slopes (Hq), Hq or more for (B, Hq) */

    int64_t batch_offset, head_offset; /* FATTN_DROPOUT: global indices of the first batch entry and
                                        * query head, so that dropout is the same whether a problem
                                        * runs whole or split over devices */

    int64_t pointer_alignment; /* promise: every q k v o dout dq dk dv pointer is a multiple of this
                                * many bytes; a power of two, 4096 at most, default 16 */

    /* Mixed types, for example an 8-bit or 16-bit cache with f32 queries. f64 does not mix, and
     * only k and v can be FATTN_E4M3, in forward. If both k and v have type dtype or e4m3, the
     * arithmetic is that of a problem whose tensors all have type dtype; otherwise it is f32. Only
     * backend "reference" has a backward of mixed types; each gradient has the type of its
     * input. */
    fattn_dtype dtype_kv; /* of k and dk; FATTN_DTYPE_DEFAULT means dtype */
    fattn_dtype dtype_v;  /* of v and dv; FATTN_DTYPE_DEFAULT means dtype_kv */

    /* FATTN_CHUNK: chunk size, 1..2^31 - 1. The keys of the whole sequence (k_offset) are cut into
     * chunks of this size from position 0 on. Query i attends only to the chunk that holds key
     * i + off; causal masks and windows hide more of it. */
    int64_t chunk;

    int64_t descale_stride[2]; /* FATTN_DESCALE: strides of k_descale and v_descale along (batch,
                                * key/value head); either may be 0 to broadcast */
} fattn_problem;

/* Fills *problem with the defaults named above. */
FATTN_API void fattn_problem_init(fattn_problem *problem);

/*
 * The tensors, and the values that may change from run to run of one plan. Set it up with
 * fattn_buffers_init(). For a plan on a GPU every pointer is device memory; scalars are read during
 * the call. Arrays for which fattn_problem has no strides are contiguous. f32 below means f64 in
 * f64 problems.
 */
typedef struct fattn_buffers {
    size_t struct_size; /* sizeof(fattn_buffers); set by fattn_buffers_init */

    const void *q; /* (B, Sq, Hq, D) in the problem's layout */
    const void *k; /* (B, Sk, Hk, D) */
    const void *v; /* (B, Sk, Hk, Dv) */
    void *o;       /* (B, Sq, Hq, Dv); output of forward; input of every backward, even one that
                    * computes dv alone, whose formula does not use it */
    void *lse;     /* f32 (B, Hq, Sq), with cu_seqlens_q (Hq, total_q); output of forward if the
                    * problem asks for it, input of backward */

    const void *dout; /* like o, in o's dtype */
    const void *dlse; /* like lse */
    void *dq;         /* like q; f32 with FATTN_ACCUMULATE */
    void *dk;         /* like k; f32 with FATTN_ACCUMULATE */
    void *dv;         /* like v; f32 with FATTN_ACCUMULATE */
    void *dbias;      /* f32 (B, Hq, Sq, Sk), dbias_stride; axes of stride 0 have length 1 */
    void *dsink;      /* f32 (Hq) */

    const void *bias;          /* dtype_bias (B, Hq, Sq, Sk), bias_stride; -inf hides the pair */
    const uint8_t *mask;       /* (B, Hq, Sq, Sk), mask_stride; 0 hides the pair */
    const uint8_t *block_mask; /* (B, Hq, ceil(Sq / block_m), ceil(Sk / block_n)),
                                * block_mask_stride; 0 hides the block */
    const void *alibi_slopes;  /* f32 (Hq), or (B, Hq) in alibi_batch_stride */
    const void *sink;          /* f32 (Hq): for each head the score of one more key whose value is
                                * 0 */

    const int32_t *cu_seqlens_q; /* (B + 1): rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of the
                                  * packed q belong to sequence b */
    const int32_t *cu_seqlens_k; /* (B + 1), likewise for the keys */
    const int32_t *seqused_q;    /* (B): how many of its rows sequence b uses: the first ones */
    const int32_t *seqused_k;    /* (B): how many of its keys sequence b uses: the first ones,
                                  * including those that were just appended for its queries */
    const int32_t *block_table;  /* (B, max_pages): entry [b][n] is the page that holds keys
                                  * n * page_size .. of sequence b. The entry of every page with
                                  * keys of the sequence must be valid, even of those before its
                                  * window; entries before seqstart_k or past the keys are not
                                  * read */

    /* FATTN_POSITIONS. An array that is not NULL has one value per sequence and replaces the
     * scalar. */
    int64_t q_offset, k_offset; /* positions of row 0 and key 0 in the whole sequence, within
                                 * +-2^40; with dropout the positions of all rows and keys must be
                                 * in 0..2^33 - 1 */
    int64_t whole_q, whole_k;   /* lengths of the whole sequence, at most 2^40; -1: the sequence is
                               * whole, and its own lengths count */
    const int64_t *q_offsets, *k_offsets; /* (B), like q_offset and k_offset */
    const int64_t *wholes_q, *wholes_k;   /* (B), like whole_q and whole_k */

    /* FATTN_DROPOUT. A pointer that is not NULL replaces the value. */
    uint64_t seed, offset; /* use a new offset for each forward, such as the last one plus 1, and
                            * the same seed and offset in its backward */
    const uint64_t *seed_ptr, *offset_ptr; /* one value each; in device memory on a GPU, so that a
                                            * captured graph can change them */

    const int32_t *seqstart_k; /* (B): the first key that sequence b uses; earlier keys do not
                                * exist. The others keep their numbers j, so diagonal, distances,
                                * biases and masks do not move. For left padding, and for a cache
                                * that has freed the pages before a sliding window */

    const void *k_descale, *v_descale; /* FATTN_DESCALE: f32 (B, Hk), descale_stride: what the
                                        * stored k and v of a sequence and head are multiplied by,
                                        * for caches whose numbers were divided to fit their type */
} fattn_buffers;

/* Fills *buffers with NULL pointers, offsets 0 and whole lengths -1. */
FATTN_API void fattn_buffers_init(fattn_buffers *buffers);

/* -------------------------------------------------------------------------------------------------
 * Operands
 * ---------------------------------------------------------------------------------------------- */

/* An array that a problem reads or writes, for bindings that allocate arrays or check those of
 * their callers. */
typedef struct fattn_operand_info {
    size_t struct_size; /* sizeof(fattn_operand_info); set by fattn_operand_info_init */
    const char *name;   /* of its pointer in fattn_buffers, as in "cu_seqlens_q". Static */
    const char *type;   /* of its elements: "f32", "f16", "bf16", "f64" or "e4m3"; "u8", "i32",
                         * "i64" or "u64". Static */
    fattn_dtype dtype;  /* the same if it is a fattn_dtype, else FATTN_DTYPE_DEFAULT */
    int32_t rank;       /* number of axes, 1..4 */
    int64_t offset;     /* of its pointer in fattn_buffers, in bytes */
    int64_t shape[4];   /* q, k, v, o and their gradients: (batch or page, sequence or slot, head,
                         * channel), whatever the layout; lse and dlse: (batch, head, query).
                         * Packed tensors have a batch of 1. dbias has 1 on axes that are summed */
    int64_t stride[4];  /* in elements; 0 on axes that are broadcast or summed */
    int64_t element_bytes; /* size of an element */
    int64_t bytes;         /* from the pointer to the end of the last element */
    int64_t alignment;     /* the pointer must be a multiple of this many bytes */
    int32_t written;       /* 1: an output of the operation; 0: an input */
    int32_t required;      /* 1: the pointer must not be NULL; 0: a scalar can replace the array, or
                            * the array is empty */
} fattn_operand_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_operand_info_init(fattn_operand_info *info);

/* Counts a problem's operands. They and their order follow from op, features and outputs. This and
 * the next two functions validate the problem first, without a device. */
FATTN_API fattn_status fattn_operand_count(const fattn_problem *problem, int *count);

/* Describes operand `index`, counted from 0. FATTN_INVALID_ARGUMENT if there is none. */
FATTN_API fattn_status fattn_operand_get_info(const fattn_problem *problem, int index,
                                              fattn_operand_info *info);

/* Describes the operand with this name. FATTN_INVALID_ARGUMENT if the problem has none. */
FATTN_API fattn_status fattn_operand_find(const fattn_problem *problem, const char *name,
                                          fattn_operand_info *info);

/* -------------------------------------------------------------------------------------------------
 * Devices
 * ---------------------------------------------------------------------------------------------- */

/* The source of host memory: for the library's own objects, and for the workspaces and
 * fattn_device_malloc() of devices that compute in host memory and were opened without an allocator
 * of their own. It does not serve the stacks of threads, or other libraries. */
typedef struct fattn_host_allocator {
    size_t struct_size; /* sizeof(fattn_host_allocator); set by fattn_host_allocator_init */
    void *(*allocate)(void *user, size_t bytes); /* returns memory aligned for any type, or NULL */
    void (*release)(void *user, void *memory);   /* frees memory of allocate(); never NULL */
    void *user;                                  /* first argument of both */
} fattn_host_allocator;

/* Fills *allocator with its size and NULL pointers. */
FATTN_API void fattn_host_allocator_init(fattn_host_allocator *allocator);

/*
 * Sets the allocator of the process, which is copied; NULL means malloc() and free(). Its functions
 * may be called from any thread, and must not call the library. Set it before any other call to the
 * library: FATTN_INVALID_ARGUMENT if memory of the previous allocator is in use.
 */
FATTN_API fattn_status fattn_set_host_allocator(const fattn_host_allocator *allocator);

/* An open device. Several threads may use one. Wherever a function takes a device, NULL means the
 * default device: the one that fattn_device_open(NULL) would open. It is opened at its first use
 * and kept until fattn_cache_clear(); free its memory and destroy its streams before that. */
typedef struct fattn_device fattn_device;

/* A device's queue of work: CUstream or hipStream_t on a GPU, where NULL is the default stream. On
 * a CPU work is done when a call returns, and NULL is the only stream. */
typedef void *fattn_stream;

/*
 * Opens a device. spec is "cpu", "cuda", "cuda:1", "hip", "reference" or "auto"; NULL means the
 * value of the environment variable FATTN_BACKEND, or "auto" if it is unset. "auto" is the best
 * device present. It skips devices that cannot be used, such as a GPU for which this build has no
 * code, and FATTN_VERBOSE=1 says which and why. A device that is named but cannot be used is an
 * error; no other device takes its place. Close the device with fattn_device_close(); plans made on
 * it keep it open.
 *
 * A device of backend "cuda" works in the context that is current on the calling thread, if that
 * belongs to its GPU, else in the GPU's primary context. Streams and memory must belong to this
 * context, and it must outlive the device.
 *
 * Errors: FATTN_UNKNOWN_DEVICE for a spec that names no backend of this build; FATTN_NO_DEVICE
 * where the backend has no such device, or no driver; FATTN_UNSUPPORTED for a device that this
 * build has no code for; FATTN_BAD_ENVIRONMENT; FATTN_OUT_OF_MEMORY; FATTN_DEVICE_ERROR.
 */
FATTN_API fattn_status fattn_device_open(const char *spec, fattn_device **device);

/* Which threads a CPU device works with. */
typedef enum fattn_engine {
    FATTN_ENGINE_DEFAULT = 0, /* FATTN_ENGINE_OWN */
    FATTN_ENGINE_OWN = 1,     /* the library's */
    FATTN_ENGINE_OPENMP = 2   /* OpenMP's, for programs that want one pool of threads: those of the
                               * runtime that the library was built with, or, if it was built
                               * without, of the one that the process has loaded. That runtime may
                               * end the process if it cannot get threads or memory. Its waiting
                               * threads spin (OMP_WAIT_POLICY), and if other work needs their
                               * processors, a call may take milliseconds longer */
} fattn_engine;

/*
 * A parallel loop on the caller's own threads. The function calls body(context, i) once for each i
 * in 0 .. count - 1 and returns when all of these calls have returned. The calls may run in any
 * order, on any threads, concurrently or one after another. The bodies divide the work among
 * themselves as they run, so a loop with fewer threads than count is correct, only slower. A loop
 * is as fast as the library's own threads if the calling thread runs one of the bodies, all others
 * start at once, and idle threads poll for the next loop for some 30 microseconds before they
 * sleep.
 *
 * The library calls the function on the thread that called the library: at most once in a call of
 * fattn_execute() or fattn_attention(), not at all if there is little work. `count` is at most the
 * device's number of threads. Threads that call the library concurrently have loops concurrently.
 * The function must not throw.
 *
 * An engine whose threads all arrive at each operator uses it like this: one of the threads calls
 * the library, and keeps what its loop needs in a thread-local variable; the others run bodies as
 * they come, until that call has returned.
 */
typedef void (*fattn_parallel_for)(void *user, int64_t count,
                                   void (*body)(void *context, int64_t i), void *context);

/* Allocates device memory for the library: see fattn_device_options. */
typedef void *(*fattn_device_allocate)(void *user, size_t bytes, fattn_stream stream);

/* Releases memory that a fattn_device_allocate returned. */
typedef void (*fattn_device_release)(void *user, void *memory);

/*
 * How a device is opened. Set it up with fattn_device_options_init(), then fill in what differs.
 * Options that a backend does not have must be left at their defaults: only the CPU has those about
 * threads, every backend has those about memory.
 *
 * Threads. The number of a device's threads is fixed when it is opened, for all of its plans. It is
 * the first of these that is given: FATTN_NUM_THREADS; `threads`; the number of `cpus`; in a build
 * with OpenMP omp_get_max_threads(), unless that merely counts processors; the number of processors
 * that affinity and control groups grant the process. Results do not depend on the number of
 * threads. Their last bits may depend on how many processors the process is granted, by affinity
 * (or OpenMP's places) and control groups, because the choice of tiles does; FATTN_TILE,
 * FATTN_SPLITS and FATTN_SRAM fix that choice.
 *
 * The library's own threads (FATTN_ENGINE_OWN) are created when a problem is first large enough for
 * them, serve all calling threads together, and end with their last device. Devices share them
 * unless `threads` or `cpus` is given. The calling thread always works too, and waits for others
 * only while they work on its problem; so if the system refuses to create a thread, the device
 * works with fewer. Idle threads poll for 30 microseconds before they sleep. The threads block all
 * signals. In a child of fork() a device keeps working, with new threads; no exec is needed. If the
 * number of threads came from OpenMP, a call from inside a parallel region that allows no nested
 * threads runs on the calling thread alone.
 *
 * Memory. `allocate` and `release` replace the backend's own functions for everything that the
 * library allocates on the device: workspaces, copies of host memory, fattn_device_malloc(). The
 * library may call them from any thread, whichever context is current there, from several threads
 * concurrently, and while streams are being captured; they must not call the library. `allocate`
 * returns memory aligned to 256 bytes, or NULL, which becomes FATTN_OUT_OF_MEMORY. `stream` is the
 * stream of the call that needs the memory, NULL if there is none. The library waits until the
 * memory is no longer in use before it releases it.
 */
typedef struct fattn_device_options {
    size_t struct_size; /* sizeof(fattn_device_options); set by fattn_device_options_init */

    int64_t threads;                 /* 1..1024; 0, the default: chosen as described above */
    const char *isa;                 /* instruction set to use, as in "avx2", with those that it
                                      * includes; NULL, the default: the best of this machine */
    const char *cpus;                /* processors that the library's own threads may run on, as in
                                      * "0-15,32"; this machine must have at least one of them. The
                                      * calling thread is not moved. NULL, the default: those of the
                                      * program's first thread and of the thread that opens the
                                      * device, or OpenMP's places */
    fattn_engine engine;             /* default FATTN_ENGINE_DEFAULT */
    uint32_t reserved;               /* 0 */
    fattn_parallel_for parallel_for; /* runs the work on the caller's threads, so that the library
                                      * creates none; default NULL */
    void *parallel_user;             /* its first argument */
    fattn_device_allocate allocate;  /* default NULL; set both allocate and release, or neither */
    fattn_device_release release;    /* default NULL */
    void *allocator_user;            /* first argument of both */
} fattn_device_options;

/* Fills *options with the defaults named above. */
FATTN_API void fattn_device_options_init(fattn_device_options *options);

/* Opens a device like fattn_device_open(), with options, which are copied; NULL means the defaults.
 * FATTN_NUM_THREADS and FATTN_CPU_ISA override them. FATTN_UNSUPPORTED if an option is not at its
 * default and the backend or the build does not have it. */
FATTN_API fattn_status fattn_device_open_with(const char *spec, const fattn_device_options *options,
                                              fattn_device **device);

/*
 * Closes a device. NULL is allowed. The plans and workspaces that fattn_attention() keeps for the
 * device are freed once the work queued with them is done. The caller's own plans, and workspaces
 * that belong to graphs, keep the device open until they are destroyed; until then the library may
 * call the functions in the device's options.
 */
FATTN_API void fattn_device_close(fattn_device *device);

/* How many devices the named backend ("cpu", "cuda" ...) has now; 0 for unknown names and NULL. */
FATTN_API int fattn_device_count(const char *backend);

/* Name of the i-th backend of this build, in the order in which "auto" looks for a device, 0 being
 * the first; NULL if there is none. Static. */
FATTN_API const char *fattn_backend_name(int i);

/* What a device is. */
typedef struct fattn_device_info {
    size_t struct_size;   /* sizeof(fattn_device_info); set by fattn_device_info_init */
    char backend[16];     /* "cpu" */
    char name[96];        /* "AMD EPYC ..." */
    char isa[32];         /* "avx512", "sm_90" */
    int ordinal;          /* 0 for the first device of the backend */
    int host_memory;      /* 1: kernels read host memory directly */
    int units;            /* threads, or multiprocessors */
    int64_t fast_memory;  /* bytes of cache or shared memory that a unit's tiles may occupy */
    int64_t total_memory; /* bytes, 0 when unknown */
} fattn_device_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_device_info_init(fattn_device_info *info);

/* Describes a device. */
FATTN_API fattn_status fattn_device_get_info(const fattn_device *device, fattn_device_info *info);

/* Allocates memory on the device, aligned to 256 bytes, with undefined contents. Free it with
 * fattn_device_free(). bytes = 0 gives NULL. */
FATTN_API fattn_status fattn_device_malloc(fattn_device *device, size_t bytes, void **memory);

/* Frees memory of fattn_device_malloc(); no queued work may still use it. NULL is allowed. */
FATTN_API fattn_status fattn_device_free(fattn_device *device, void *memory);

/* Copies `bytes` bytes from src to dst; either may be host or device memory. The copy is queued on
 * the stream: do not touch host memory before fattn_stream_synchronize(). With bytes = 0 nothing
 * happens, and dst and src may be NULL. */
FATTN_API fattn_status fattn_device_copy(fattn_device *device, void *dst, const void *src,
                                         size_t bytes, fattn_stream stream);

/* Creates a stream in addition to the default one. Destroy it with fattn_stream_destroy(). On a CPU
 * *stream is NULL. */
FATTN_API fattn_status fattn_stream_create(fattn_device *device, fattn_stream *stream);

/* Destroys a stream. Work that is queued on it still runs. NULL is allowed. */
FATTN_API fattn_status fattn_stream_destroy(fattn_device *device, fattn_stream stream);

/* Waits until all work queued on the stream is done, and returns any error that occurred in it. */
FATTN_API fattn_status fattn_stream_synchronize(fattn_device *device, fattn_stream stream);

/* A point in a stream, for timing and for ordering streams. */
typedef struct fattn_event fattn_event;

/* Creates an event, which keeps the device open. Destroy it with fattn_event_destroy(). */
FATTN_API fattn_status fattn_event_create(fattn_device *device, fattn_event **event);

/* Destroys an event. NULL is allowed. */
FATTN_API void fattn_event_destroy(fattn_event *event);

/* Records the event behind all work that is queued on the stream now. Recording it again moves
 * it. */
FATTN_API fattn_status fattn_event_record(fattn_event *event, fattn_stream stream);

/* Makes all work that is queued on the stream from now on wait for the event; the calling thread
 * does not wait. The stream belongs to the event's device; it need not be the one on which the
 * event was recorded. An event that was never recorded delays nothing. On a CPU the call does
 * nothing. */
FATTN_API fattn_status fattn_event_wait(fattn_event *event, fattn_stream stream);

/* Waits until the device reaches the event, and returns any error that occurred before it. */
FATTN_API fattn_status fattn_event_synchronize(fattn_event *event);

/* Waits for two events of one device, and gives the time from start to stop. Events of different
 * handles are FATTN_INVALID_ARGUMENT, even if both handles are the same hardware. An event that was
 * never recorded is an error: FATTN_INVALID_ARGUMENT on a CPU, FATTN_DEVICE_ERROR on a GPU. */
FATTN_API fattn_status fattn_event_elapsed(fattn_event *start, fattn_event *stop,
                                           double *milliseconds);

/* -------------------------------------------------------------------------------------------------
 * Plans
 * ---------------------------------------------------------------------------------------------- */

/* A problem, a device, and the choice of how the device computes the problem. */
typedef struct fattn_plan fattn_plan;

/*
 * Validates the problem, chooses a kernel, its tiles and splits, and loads what is needed, so that
 * fattn_execute() allocates nothing if it is given a workspace. problem is copied. Destroy the plan
 * with fattn_plan_destroy(). A plan is immutable, and several threads may execute it concurrently,
 * each with a workspace of its own.
 *
 * One plan can serve every step of an inference engine. Where lengths are data (cu_seqlens,
 * seqused), batch, seqlen_q, seqlen_k and the totals are upper bounds, and a run takes the time of
 * its actual lengths. If a run has fewer sequences than batch, the others have no rows: repeat the
 * last entry of cu_seqlens_q, or set seqused_q to 0. Their keys are checked all the same: set
 * seqused_k to 0 too, or give them valid pages. Strides do not change with the run: lse has total_q
 * entries per head, however many rows there are. A problem with any other field needs its own plan.
 * fattn_attention() finds plans by all fields of the problem, so a seqlen_k that grows by one at
 * each step makes a new plan at each step; seqused_k avoids that.
 */
FATTN_API fattn_status fattn_plan_create(fattn_device *device, const fattn_problem *problem,
                                         fattn_plan **plan);

/* Destroys a plan. NULL is allowed. No execution of the plan may still be running. */
FATTN_API void fattn_plan_destroy(fattn_plan *plan);

/* What a plan chose, and what its execution costs. */
typedef struct fattn_plan_info {
    size_t struct_size;       /* sizeof(fattn_plan_info); set by fattn_plan_info_init */
    char kernel[64];          /* the kernel's name */
    int64_t br, bc;           /* tile: queries, keys */
    int64_t splits;           /* the most parts into which the kernel cuts the keys of a sequence; a
                               * run with short sequences may use fewer. If sequences differ in
                               * their number of queries, a second kernel may compute those with
                               * few, and split their keys: fattn_plan_describe() names it */
    int64_t work_items;       /* independent pieces of work */
    int64_t workspace_bytes;  /* size of the workspace of fattn_execute() */
    double predicted_bytes;   /* slow-memory traffic of this plan, predicted by a model */
    double standard_bytes;    /* that of standard attention, which materialises the score matrix */
    double lower_bound_bytes; /* every input read once, every output written once */
    double flops;             /* multiplications and additions of the matrix products */
    double effective_dropout; /* the dropout probability after rounding, 0 without dropout */
} fattn_plan_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_plan_info_init(fattn_plan_info *info);

/* Describes a plan. */
FATTN_API fattn_status fattn_plan_get_info(const fattn_plan *plan, fattn_plan_info *info);

/* Writes a description of the plan into text, truncated to size bytes and always terminated; with
 * text NULL it writes nothing. It includes the reason why each better kernel was not chosen. The
 * wording may change from version to version. Returns the length of the whole text, like snprintf;
 * 0 if plan is NULL. */
FATTN_API size_t fattn_plan_describe(const fattn_plan *plan, char *text, size_t size);

/*
 * Runs a plan. Work is queued on stream; on a CPU it is done on return.
 *
 * workspace is device memory of at least workspace_bytes bytes (fattn_plan_info), aligned to 256,
 * with any contents. Its size cannot be checked: with less the run writes past its end. Several
 * plans may share one that suffices for all of them, one run at a time. Nothing else may use it
 * during the execution. With NULL the library allocates a workspace for this run and, on a GPU,
 * waits for the run to free it. On an AMD GPU the workspace must not be memory that host and device
 * keep coherent (fine-grained or managed).
 *
 * Where kernels read host memory, lengths and tables in the buffers are validated before the run;
 * on a GPU FATTN_CHECKED does that, and without it wrong ones are undefined behaviour.
 *
 * With a workspace of the caller's a run on a GPU may be captured into a graph, unless the plan has
 * FATTN_CHECKED.
 */
FATTN_API fattn_status fattn_execute(const fattn_plan *plan, const fattn_buffers *buffers,
                                     void *workspace, fattn_stream stream);

/*
 * Plans and runs in one call. Recent plans and their workspaces are kept in a cache, so that a
 * repeated problem is neither planned nor allocated again. The call takes the alignment of the
 * pointers from the pointers themselves, not from the problem's pointer_alignment. On a GPU buffers
 * in host memory are copied to the device and back, and the call waits.
 *
 * Threads and streams may call it concurrently. On a GPU a plan has workspaces for up to four
 * streams; further streams wait, on the GPU, for the workspace that they are given.
 *
 * A call may be captured into a graph, unless its buffers are in host memory. Its workspace then
 * belongs to the graph: calls in the same capture share it, no other call ever gets it, and it is
 * not freed before the process ends. A program that captures again and again should therefore
 * create plans and give them workspaces of its own.
 */
FATTN_API fattn_status fattn_attention(fattn_device *device, const fattn_problem *problem,
                                       const fattn_buffers *buffers, fattn_stream stream);

/* Frees the cached plans and workspaces of fattn_attention(), and the default device, unless they
 * are in use. Waits for work that is queued with them. */
FATTN_API void fattn_cache_clear(void);

/*
 * How much fattn_attention() keeps, in the whole process. Set it up with
 * fattn_cache_options_init().
 *
 * A cached plan keeps its workspaces, of workspace_bytes each (fattn_plan_info): one on a CPU, up
 * to four on a GPU, and more if more calls ran at once. They may be large: backward on Hopper keeps
 * dq in f32 there, 4 bytes for each element of q. By default only the number of plans limits the
 * memory of all workspaces, so a program whose problems change from call to call should set
 * `bytes`. If there is no memory for a new workspace, the device's idle workspaces are freed first.
 */
typedef struct fattn_cache_options {
    size_t struct_size; /* sizeof(fattn_cache_options); set by fattn_cache_options_init */
    int64_t entries;    /* most plans to keep, 0..4096: the most recently used; default 32. The time
                         * to find a plan does not grow with their number */
    int64_t bytes;      /* most bytes of all their workspaces together; default INT64_MAX. A call
                         * that needs more gets a workspace, and waits for the run to free it */
} fattn_cache_options;

/* Fills *options with the defaults named above. */
FATTN_API void fattn_cache_options_init(fattn_cache_options *options);

/* Sets the limits, and frees what exceeds them. Any thread may call it at any time.
 * FATTN_INVALID_ARGUMENT for a number out of range. */
FATTN_API fattn_status fattn_cache_set_options(const fattn_cache_options *options);

/* What the cache of fattn_attention() holds now, and its counts since the process began. */
typedef struct fattn_cache_info {
    size_t struct_size;  /* sizeof(fattn_cache_info); set by fattn_cache_info_init */
    int64_t entries;     /* plans in the cache */
    int64_t bytes;       /* size of their workspaces */
    int64_t graph_bytes; /* size of the workspaces that belong to captured graphs, not in `bytes` */
    int64_t hits;        /* calls that found their plan */
    int64_t misses;      /* calls that had to make a plan */
    int64_t evictions;   /* plans that were dropped to make room for others */
    int64_t allocations; /* workspaces that were allocated */
} fattn_cache_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_cache_info_init(fattn_cache_info *info);

/* Describes the cache. */
FATTN_API fattn_status fattn_cache_get_info(fattn_cache_info *info);

/* Returns FATTN_OK if the device has a kernel for the problem, else the status that
 * fattn_plan_create() would return, with its reason. Loads nothing and keeps nothing. */
FATTN_API fattn_status fattn_support(fattn_device *device, const fattn_problem *problem);

/* -------------------------------------------------------------------------------------------------
 * Merging and inspection
 * ---------------------------------------------------------------------------------------------- */

/* Two results over disjoint keys, all f32. On a GPU the pointers are device memory. */
typedef struct fattn_merge_args {
    size_t struct_size; /* sizeof(fattn_merge_args); set by fattn_merge_args_init */
    int64_t batch, heads, seqlen, dim_v; /* B, H, S, Dv */
    const float *o1, *lse1; /* first state: (B, S, H, Dv) in o1_stride, contiguous (B, H, S) */
    const float *o2, *lse2; /* second state, likewise */
    float *o, *lse; /* result, likewise; may be (o1, lse1) or (o2, lse2), with the same strides */
    fattn_strides o1_stride, o2_stride, o_stride; /* of o1, o2 and o, in elements; always required,
                                                   * also for contiguous tensors */
} fattn_merge_args;

/* Fills *args with its size and zeros. */
FATTN_API void fattn_merge_args_init(fattn_merge_args *args);

/*
 * Merges two results over disjoint keys into the result over all of them: with m = max(lse1, lse2)
 * and w_k = exp(lse_k - m), lse = m + ln(w1 + w2) and o = (w1 o1 + w2 o2) / (w1 + w2). A state with
 * lse = -inf is the identity, and its o is not read; two such states give o = 0 and lse = -inf.
 * Exactly commutative; associative up to rounding. Work is queued on stream; on a CPU it is done on
 * return.
 */
FATTN_API fattn_status fattn_merge(fattn_device *device, const fattn_merge_args *args,
                                   fattn_stream stream);

/* What fattn_inspect() writes for each pair of a query and a key. */
typedef enum fattn_inspection {
    FATTN_SCORES = 1,       /* the final score x, the argument of softmax; -inf if it is masked */
    FATTN_PROBABILITIES = 2 /* exp(x - lse), before dropout; 0 if the pair is masked */
} fattn_inspection;

/* Which matrix fattn_inspect() writes, and where. Set it up with fattn_inspect_args_init(). */
typedef struct fattn_inspect_args {
    size_t struct_size;    /* sizeof(fattn_inspect_args); set by fattn_inspect_args_init */
    fattn_inspection what; /* default FATTN_SCORES */
    uint32_t reserved;     /* 0 */
    void *to;              /* f32 (f64 in an f64 problem) (B, Hq, Sq, Sk) */
    int64_t stride[4];     /* of (batch, head, query, key), in elements; all 0, the default:
                            * contiguous */
} fattn_inspect_args;

/* Fills *args with the defaults named above. */
FATTN_API void fattn_inspect_args_init(fattn_inspect_args *args);

/*
 * Writes the scores or probabilities of a forward, which attention itself never stores: for
 * inspecting heads, and for tests. problem and buffers are those of the forward; its outputs are
 * not written, and their pointers may be NULL. Entries of rows and keys past the end of a sequence,
 * and of keys before seqstart_k, are left as they are. On devices that compute in host memory,
 * backend "reference" computes the numbers, in double precision on one thread. GPUs return
 * FATTN_UNSUPPORTED.
 */
FATTN_API fattn_status fattn_inspect(fattn_device *device, const fattn_problem *problem,
                                     const fattn_buffers *buffers, const fattn_inspect_args *args);

/* Which part of the dropout pattern fattn_dropout_mask() writes, and where. */
typedef struct fattn_dropout_args {
    size_t struct_size; /* sizeof(fattn_dropout_args); set by fattn_dropout_args_init */
    int64_t batch, heads, seqlen_q, seqlen_k;              /* its size; heads are query heads */
    int64_t batch_offset, head_offset, q_offset, k_offset; /* its first entry */
    double p;                                              /* dropout_p of fattn_problem */
    uint64_t seed, offset;                                 /* those of fattn_buffers */
    uint8_t *keep; /* contiguous (batch, heads, seqlen_q, seqlen_k): 1 kept, 0 dropped. Device
                    * memory on a GPU */
} fattn_dropout_args;

/* Fills *args with its size and zeros. */
FATTN_API void fattn_dropout_args_init(fattn_dropout_args *args);

/* Writes the dropout pattern that forward and backward use for a seed and an offset, for inspection
 * and tests. Queued on stream; on a CPU it is done on return. FATTN_INVALID_SHAPE for a size that
 * is not in 0..2^31 - 1, and for a part that reaches beyond 2^32 batch entries or heads or 2^33
 * positions; FATTN_INVALID_ARGUMENT for p; FATTN_NULL_POINTER for keep. */
FATTN_API fattn_status fattn_dropout_mask(fattn_device *device, const fattn_dropout_args *args,
                                          fattn_stream stream);

/* -------------------------------------------------------------------------------------------------
 * Messages
 * ---------------------------------------------------------------------------------------------- */

/* Receives one line of printable ASCII without a newline, valid until the callback returns. The
 * library may call it from any thread, and from several concurrently. It must not call the library,
 * which may hold locks at the time. */
typedef void (*fattn_log_callback)(void *user, const char *line);

/* Sends the lines that FATTN_VERBOSE asks for to callback instead of stderr; NULL restores stderr.
 * The call does not wait: another thread may still be inside the previous callback, or about to
 * call it. `user` is the callback's first argument. */
FATTN_API void fattn_set_log_callback(fattn_log_callback callback, void *user);

#ifdef __cplusplus
}
#endif
#endif
