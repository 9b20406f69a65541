/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn: exact, IO-aware attention (FlashAttention) on CPUs, NVIDIA and AMD GPUs.
 *
 * The whole public interface. Describe what is to be computed in a `fattn_problem`, make a plan of
 * it once, execute the plan on `fattn_buffers` as often as you like:
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
 * What is computed, formula by formula, is derived in docs/MATH.md; how accurate it is, in
 * docs/NUMERICS.md. Letters used below: B batch, Hq and Hk query and key/value heads, Sq and Sk
 * query and key lengths, D and Dv head dimensions of (q, k) and (v, o); i a query, j a key, c a
 * channel.
 *
 * Rules that hold for every function here:
 *
 * - Errors. Functions that can fail return a `fattn_status`. On failure outputs are untouched,
 *   handles written through a pointer are NULL, and fattn_last_reason() explains, naming the field
 *   and its value. (An error that a device reports after a kernel has started may leave outputs
 *   half written.) The library never aborts, exits or throws. A required pointer that is NULL is
 *   FATTN_NULL_POINTER. Only the fattn_*_init() functions, which return nothing, may not get NULL.
 * - Threads. Every function may be called from any thread. Plans and devices may be shared between
 *   threads; one workspace serves one execution at a time. A thread with 64 KiB of stack may call
 *   every function of an optimised build; on a GPU the driver's own needs come on top. A run cannot
 *   be stopped: a thread that is cancelled (pthread_cancel()) in a run on the library's own threads
 *   finishes it first. In calls that open devices or make plans no thread may be cancelled.
 * - Ownership. The caller owns all memory passed in. It must stay valid until the work is done:
 *   until the call returns on a CPU, until the stream has come that far on a GPU. Handles are the
 *   library's, and invalid once their close or destroy function is called: using one after that,
 *   closing it again included, is undefined.
 * - Structs begin with struct_size, which their fattn_*_init() sets. It tells the version of the
 *   header that a caller was compiled with: fields that are missing in an older, shorter struct
 *   read as their defaults; a newer, longer one is accepted while the fields that this library does
 *   not know are zero. In a struct that the library fills, such fields become zero. A size that the
 *   struct never had is FATTN_INVALID_STRUCT. The init functions fill the struct of the library's
 *   own header, so a caller with another header sets struct_size and the fields itself.
 * - Units. Strides are in elements, sizes named `bytes` in bytes, lse in natural logarithms.
 *
 * Not promised: the ABI before version 1.0, and bit-identical results between different backends,
 * instruction sets or versions.
 */
#ifndef FATTN_H
#define FATTN_H

#include <stddef.h>
#include <stdint.h>

#include "fattn/version.h"

/* How a function is declared. A program may define it before it includes this header, to load the
 * functions in its own way. */
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
    FATTN_OK = 0, /* done as asked */

    /* The request is wrong whatever the device. */
    FATTN_INVALID_ARGUMENT = 10, /* an unknown enum value or bit, or a number out of its range */
    FATTN_INVALID_STRUCT =
        11, /* struct_size is no version's, or a larger struct has a tail in use */
    FATTN_INVALID_SHAPE = 12,  /* a negative or inconsistent size */
    FATTN_INVALID_STRIDE = 13, /* a stride that the problem cannot have */
    FATTN_NULL_POINTER = 14,   /* a required pointer is NULL */
    FATTN_MISALIGNED = 15,     /* a pointer is less aligned than promised */
    FATTN_OVERLAP = 16,        /* an output overlaps itself or another buffer, or a buffer the
                                * workspace */
    FATTN_OVERFLOW = 17,       /* a size in bytes does not fit in 63 bits */
    FATTN_INVALID_DATA = 18,   /* lengths, cu_seqlens or a block table contradict the problem */

    /* The request is legal and this device, build or backend cannot honour it. */
    FATTN_UNSUPPORTED = 20, /* the reason says what is in the way */

    /* Devices. */
    FATTN_NO_DEVICE = 30,      /* this build has the backend, but no such device is present */
    FATTN_UNKNOWN_DEVICE = 31, /* not the name of a backend of this build */
    FATTN_DEVICE_ERROR = 32,   /* a device's driver reported an error; the reason has its words */

    /* Resources. */
    FATTN_OUT_OF_MEMORY = 40, /* the reason says how many bytes were wanted */

    /* Environment. */
    FATTN_BAD_ENVIRONMENT =
        50, /* a FATTN_* variable has a value outside docs/BUILDING.md's table */

    /* Other ranks (fattn/distributed.h). */
    FATTN_RANK_LOST = 60,     /* a rank has given up or is gone; the reason says which, and why */
    FATTN_RANK_TIMEOUT = 61,  /* a rank did not answer in time */
    FATTN_RANKS_DISAGREE = 62 /* ranks describe different problems */
} fattn_status;

/* The name of a status, such as "FATTN_OVERLAP"; "unknown fattn_status" for any other number.
 * Static. */
FATTN_API const char *fattn_status_string(fattn_status status);

/* A sentence about this thread's most recent failure, naming the field and the value that were
 * wrong: one line of printable ASCII; empty before the first failure. Valid until the next failure
 * in this thread. Never NULL. */
FATTN_API const char *fattn_last_reason(void);

/* Copies that sentence into text, cut to size bytes and always terminated; NULL takes none. Returns
 * the length that the whole has, like snprintf. A runtime that may move a caller to another thread
 * between two foreign calls calls this in the same one as the function that failed. */
FATTN_API size_t fattn_last_reason_copy(char *text, size_t size);

/* The version of the library that is running, as "major.minor.patch". */
FATTN_API const char *fattn_version(void);

/* -------------------------------------------------------------------------------------------------
 * The problem
 * ---------------------------------------------------------------------------------------------- */

/* What the elements of a tensor are, in the processor's byte order. */
typedef enum fattn_dtype {
    FATTN_DTYPE_DEFAULT = 0, /* of dtype_o, _bias, _kv and _v: what their comments say */
    FATTN_F32 = 1,           /* IEEE binary32 */
    FATTN_F16 = 2,           /* IEEE binary16 */
    FATTN_BF16 = 3,          /* the upper half of a binary32 */
    FATTN_F64 =
        4, /* backend "reference" only; then lse, bias, sink, slopes and gradients are f64 */
    FATTN_E4M3 = 5 /* reserved: fp8 inputs, not accepted by any backend yet */
} fattn_dtype;

/* Which way a problem is gone through. */
typedef enum fattn_op {
    FATTN_FORWARD = 1, /* q k v -> o, lse. Decoding is a forward with few queries */
    FATTN_BACKWARD = 2 /* q k v o lse dout -> dq dk dv dbias dsink */
} fattn_op;

/* How q, k, v, o and their gradients lie in memory. BSHD and BHSD are contiguous, and all strides
 * are 0 there; STRIDED reads those of the tensors that the operation has. With cu_seqlens a tensor
 * has no batch axis and BSHD means (total, head, channel), BHSD (head, total, channel). Paged k and
 * v are (page, slot, head, channel) and (page, head, slot, channel). */
typedef enum fattn_layout {
    FATTN_BSHD = 1,   /* (batch, sequence, head, channel) */
    FATTN_BHSD = 2,   /* (batch, head, sequence, channel) */
    FATTN_STRIDED = 3 /* any strides, 0 included for inputs; the channel stride is always 1 */
} fattn_layout;

/* Which corner of the score matrix causal masks, windows and ALiBi are anchored to when Sq !=
 * Sk. */
typedef enum fattn_anchor {
    FATTN_BOTTOM_RIGHT = 1, /* the default: the last query sees the last key, as decoding needs */
    FATTN_TOP_LEFT = 2      /* query 0 sees key 0; PyTorch's is_causal */
} fattn_anchor;

/* Options. Without its bit a field must be at its default, which fattn_problem_init() and
 * fattn_buffers_init() give, or the call fails with a reason that names field and bit. In
 * fattn_buffers that holds for everything below `dsink`, and for dlse in a backward. The tensors
 * above it may be set though this operation does not use them or the problem does not ask for them:
 * they are left alone, and one struct serves forward and backward. The constants are bare literals,
 * which every generator of bindings reads, and 64 bits wide, so that ~FATTN_CAUSAL has all other
 * bits; an enumerator of C is an int. */
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
#define FATTN_ALIBI_BIAS 0x400000ull     /* slopes multiply bias, not distances (CPU, reference) */
#define FATTN_CHUNK 0x800000ull          /* chunk: keys of the query's own chunk alone */
/* All of these bits. */
#define FATTN_FEATURES_ALL 0xffffffull

/* Which outputs are wanted. Forward: O, with or without LSE. Backward: any subset of the others. An
 * output of the other direction is an error. */

#define FATTN_OUT_O 0x1u      /* o */
#define FATTN_OUT_LSE 0x2u    /* lse; backward reads it */
#define FATTN_OUT_DQ 0x4u     /* dq */
#define FATTN_OUT_DK 0x8u     /* dk */
#define FATTN_OUT_DV 0x10u    /* dv */
#define FATTN_OUT_DBIAS 0x20u /* dbias; needs FATTN_BIAS */
#define FATTN_OUT_DSINK 0x40u /* dsink; needs FATTN_SINK */

/* Strides of a rank-4 tensor (batch, sequence, head, channel), in elements. The channel stride is
 * 1: a DLPack tensor maps to this one to one. With cu_seqlens `batch` is ignored; a paged k or v
 * reads `batch` as the stride between pages and `seq` as the stride between the slots of a page. */
typedef struct fattn_strides {
    int64_t batch, seq, head; /* between neighbours along that axis */
} fattn_strides;

/*
 * What is to be computed. Set it up with fattn_problem_init(), then fill in what differs. Where no
 * default is named, it is 0; dim and dim_v have none, and 0 is refused.
 *
 * With x the scaled, capped and biased score of a query and a key that is kept (docs/MATH.md):
 *     lse_i = ln(sum_j exp(x_ij) + exp(sink)),   o_i = sum_j Z_ij exp(x_ij - lse_i) v_j.
 * A row without any key (and without a sink) has o = 0 and lse = -inf and contributes 0 to every
 * gradient. Query head h reads key/value head h / (Hq / Hk).
 */
typedef struct fattn_problem {
    size_t struct_size; /* sizeof(fattn_problem); set by fattn_problem_init */

    fattn_op op;            /* default FATTN_FORWARD */
    fattn_dtype dtype;      /* of q and dq; of k, v, dk, dv too by default; default FATTN_F32 */
    fattn_dtype dtype_o;    /* of o and dout: dtype or FATTN_F32; FATTN_DTYPE_DEFAULT means dtype */
    fattn_dtype dtype_bias; /* of bias: f32, f16 or bf16, or f64 beside f64; FATTN_DTYPE_DEFAULT:
                             * FATTN_F32 or F64. GPUs take dtype and FATTN_F32 */
    fattn_layout layout;    /* default FATTN_BSHD */
    fattn_anchor anchor;    /* default FATTN_BOTTOM_RIGHT */
    uint64_t features;      /* FATTN_CAUSAL | ...; default 0 */
    uint32_t outputs;       /* FATTN_OUT_*; 0, the default, means O, or DQ | DK | DV */
    uint32_t reserved;      /* 0 */

    /* Sizes are 2^31 - 1 at most. */
    int64_t batch;    /* B, default 1 */
    int64_t heads_q;  /* Hq, a multiple of heads_k, default 1 */
    int64_t heads_k;  /* Hk, default 1 */
    int64_t seqlen_q; /* Sq; with cu_seqlens_q the maximum over the batch */
    int64_t seqlen_k; /* Sk; with cu_seqlens_k or FATTN_PAGED the maximum over the batch */
    int64_t dim;      /* D, 1..576, no default. Above 256 GPUs have plain (SIMT) kernels only */
    int64_t dim_v;    /* Dv, likewise. Latent attention (MLA) is D 576, Dv 512, Hk 1, with v = k */
    int64_t total_q;  /* FATTN_CU_SEQLENS_Q: rows of the packed q, at least cu_seqlens_q[B] */
    int64_t total_k;  /* FATTN_CU_SEQLENS_K: rows of the packed k and v */

    int64_t page_size; /* FATTN_PAGED: keys a page, >= 1 */
    int64_t num_pages; /* FATTN_PAGED: pages in k and in v */
    int64_t max_pages; /* FATTN_PAGED: columns of block_table; max_pages * page_size >= Sk */
    int64_t block_table_stride; /* FATTN_PAGED: between rows of block_table; 0 means max_pages */

    fattn_strides q, k, v, o;       /* FATTN_STRIDED */
    fattn_strides dout, dq, dk, dv; /* FATTN_STRIDED, backward */

    double scale;         /* FATTN_SCALE: any finite value. With 0, which it is until it is set,
                           * all keys that are kept weigh the same */
    double softcap;       /* FATTN_SOFTCAP: finite, > 0: x = softcap * tanh(x / softcap) */
    double dropout_p;     /* FATTN_DROPOUT: 0..1, rounded to a multiple of 1/65536; what is neither
                           * 0 nor 1 is 1/65536 at least and 65535/65536 at most */
    int64_t window_left;  /* FATTN_WINDOW: keys kept to the left of the diagonal, -1 for all;
                           * default -1 */
    int64_t window_right; /* FATTN_WINDOW: to the right, -1 for all; default -1. FATTN_CAUSAL makes
                           * it 0, whatever it is */

    /* Strides of (batch, head, query, key); any of them may be 0 to broadcast: with none set, one
     * value serves all pairs. i and j count the rows and keys of one sequence from 0, in packed
     * batches too. */
    int64_t bias_stride[4];       /* FATTN_BIAS */
    int64_t mask_stride[4];       /* FATTN_MASK */
    int64_t block_mask_stride[4]; /* FATTN_BLOCK_MASK: of (batch, head, i / block_m, j / block_n) */
    int64_t dbias_stride[4];  /* FATTN_OUT_DBIAS: dbias is summed over the axes whose stride is 0 */
    int64_t block_m, block_n; /* FATTN_BLOCK_MASK: queries and keys a block, >= 1 */
    int64_t alibi_batch_stride; /* FATTN_ALIBI: 0 for slopes (Hq), Hq or more for (B, Hq) */

    int64_t batch_offset, head_offset; /* global index of the first local batch entry and query
                                        * head: dropout is the same whether a problem runs whole or
                                        * split over devices */

    int64_t pointer_alignment; /* every q k v o dout dq dk dv pointer is a multiple of this many
                                * bytes; a power of two, 4096 at most, default 16 */

    /* Mixed types, as of a 16-bit cache under f32 queries. f64 does not mix. Sums and products are
     * those of f32 then, whatever the types; each gradient has its input's. Forward on a CPU,
     * forward and backward of the reference. */
    fattn_dtype dtype_kv; /* of k and dk; FATTN_DTYPE_DEFAULT means dtype */
    fattn_dtype dtype_v;  /* of v and dv; FATTN_DTYPE_DEFAULT means dtype_kv */

    /* FATTN_CHUNK: keys are cut into chunks of this many, counted from position 0. Query i attends
     * only to the chunk that holds key i + off, from which causal and window count too. Positions
     * are those of the whole sequence (k_offset). 1..2^31 - 1. */
    int64_t chunk;
} fattn_problem;

/* Fills *problem with the defaults named above. */
FATTN_API void fattn_problem_init(fattn_problem *problem);

/*
 * The pointers, and what may change from run to run of one plan. Set it up with
 * fattn_buffers_init(). On a GPU plan every pointer is device memory, except that the scalars are
 * read at the call.
 */
typedef struct fattn_buffers {
    size_t struct_size; /* sizeof(fattn_buffers); set by fattn_buffers_init */

    const void *q; /* (B, Sq, Hq, D) in the problem's layout */
    const void *k; /* (B, Sk, Hk, D) */
    const void *v; /* (B, Sk, Hk, Dv) */
    void *o;       /* (B, Sq, Hq, Dv); output of forward; input of every backward, also of dv alone,
                    * whose formula lacks it */
    void *lse;     /* f32 (B, Hq, Sq), with cu_seqlens_q (Hq, total_q); output, then input. This and
                    * all that has no strides in fattn_problem is contiguous; f32 here and below is
                    * f64 in f64 problems */

    const void *dout; /* like o, in o's dtype */
    const void *dlse; /* like lse */
    void *dq;         /* like q; f32 with FATTN_ACCUMULATE */
    void *dk;         /* like k */
    void *dv;         /* like v */
    void *dbias;      /* f32 (B, Hq, Sq, Sk), dbias_stride: 1 long on axes of stride 0 */
    void *dsink;      /* f32 (Hq) */

    const void *bias;          /* dtype_bias (B, Hq, Sq, Sk), bias_stride; (i, j) are those of a
                                * sequence, whatever precedes it in a packed batch */
    const uint8_t *mask;       /* (B, Hq, Sq, Sk), mask_stride: a byte an entry, non-zero keeps */
    const uint8_t *block_mask; /* (B, Hq, ceil(Sq / block_m), ceil(Sk / block_n)),
                                * block_mask_stride: a byte a block, non-zero keeps */
    const void *alibi_slopes;  /* f32 (Hq), or (B, Hq) in alibi_batch_stride */
    const void *sink;          /* f32 (Hq): logits of one more key whose value is 0 */

    const int32_t *cu_seqlens_q; /* (B + 1): rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 are
                                  * sequence b's */
    const int32_t *cu_seqlens_k; /* (B + 1), likewise */
    const int32_t *seqused_q;    /* (B): only so many rows of sequence b exist */
    const int32_t *seqused_k;    /* (B): only so many keys of sequence b exist */
    const int32_t *block_table;  /* (B, max_pages): page of keys j * page_size .. of sequence b. All
                                  * that has keys of the sequence is valid, also before a window;
                                  * what is before seqstart_k or past the keys is not read */

    /* FATTN_POSITIONS. The arrays, where not NULL, are per sequence (B) and replace the scalars. */
    int64_t q_offset, k_offset; /* position of the first local row and key in the whole sequence,
                                 * at most 2^40 either way; with dropout those of all rows and
                                 * keys are 0..2^33 - 1 */
    int64_t whole_q, whole_k; /* lengths of the whole sequence, at most 2^40; -1: the local ones */
    const int64_t *q_offsets, *k_offsets; /* (B), like q_offset and k_offset */
    const int64_t *wholes_q, *wholes_k;   /* (B), like whole_q and whole_k */

    /* FATTN_DROPOUT. The pointers, where not NULL, replace the values. */
    uint64_t seed, offset; /* a call consumes one offset: the next call uses offset + 1 */
    const uint64_t *seed_ptr, *offset_ptr; /* one each; device memory on a GPU, for graphs */

    const int32_t *seqstart_k; /* (B): keys of sequence b before this one do not exist. Those that
                                * do keep their numbers j, and with them the diagonal, distances,
                                * biases and masks. For padding on the left, and for a cache that
                                * has given up the pages which a window has left */
} fattn_buffers;

/* Fills *buffers with NULL pointers, offsets 0 and whole lengths -1. */
FATTN_API void fattn_buffers_init(fattn_buffers *buffers);

/* -------------------------------------------------------------------------------------------------
 * Operands
 * ---------------------------------------------------------------------------------------------- */

/* An array that a problem reads or writes, for bindings that make arrays or check given ones. */
typedef struct fattn_operand_info {
    size_t struct_size; /* sizeof(fattn_operand_info); set by fattn_operand_info_init */
    const char *name;   /* of its pointer in fattn_buffers, as in "cu_seqlens_q". Static */
    const char *type;   /* of its elements: "f32", "f16", "bf16" or "f64"; "u8", "i32", "i64" or
                            * "u64". Static */
    fattn_dtype dtype;  /* the same where it is a fattn_dtype, else FATTN_DTYPE_DEFAULT */
    int32_t rank;       /* 1..4 axes */
    int64_t offset;     /* of its pointer in fattn_buffers, in bytes */
    int64_t shape[4];   /* q, k, v, o and their gradients: (batch or page, sequence or slot, head,
                            * channel), whatever the layout; lse and dlse: (batch, head, query).
                            * Packed ones have a batch of 1. dbias: 1 where it is summed */
    int64_t stride[4];  /* in elements; 0 where a value serves the whole axis */
    int64_t element_bytes; /* of an element */
    int64_t bytes;         /* from the pointer to the end of the last element */
    int64_t alignment;     /* the pointer is a multiple of so many bytes */
    int32_t written;       /* 1: an output of the operation */
    int32_t required;      /* 1: the pointer may not be NULL; 0 where scalars stand in, and where
                            * there is nothing to read or write */
} fattn_operand_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_operand_info_init(fattn_operand_info *info);

/* How many operands a problem has; they and their order follow from op, features and outputs. The
 * problem is validated first, here and below, whatever the device. */
FATTN_API fattn_status fattn_operand_count(const fattn_problem *problem, int *count);

/* Describes one of them, index 0 being the first. */
FATTN_API fattn_status fattn_operand_get_info(const fattn_problem *problem, int index,
                                              fattn_operand_info *info);

/* Describes the one of this name; FATTN_INVALID_ARGUMENT where the problem has none. */
FATTN_API fattn_status fattn_operand_find(const fattn_problem *problem, const char *name,
                                          fattn_operand_info *info);

/* -------------------------------------------------------------------------------------------------
 * Devices
 * ---------------------------------------------------------------------------------------------- */

/* Where the library gets the host's memory for its own objects, and tensors of backends in host
 * memory that have no allocator of their own. Threads' stacks and other libraries are apart. */
typedef struct fattn_host_allocator {
    size_t struct_size; /* sizeof(fattn_host_allocator); set by fattn_host_allocator_init */
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL when there is none */
    void (*release)(void *user, void *memory);   /* of allocate; never NULL */
    void *user;                                  /* their first argument */
} fattn_host_allocator;

/* Fills *allocator with its size and NULL pointers. */
FATTN_API void fattn_host_allocator_init(fattn_host_allocator *allocator);

/*
 * Sets the allocator of the process, which is copied; NULL means malloc() and free(). The functions
 * may be called from any thread, and must not call the library. To be set before anything else is
 * called: FATTN_INVALID_ARGUMENT when memory of the allocator before is in use.
 */
FATTN_API fattn_status fattn_set_host_allocator(const fattn_host_allocator *allocator);

/* An open device. Several threads may use one. Wherever a function takes a device, NULL is the
 * default one: what fattn_device_open(NULL) opens, opened at the first use and kept until
 * fattn_cache_clear(), before which its memory and streams must be given back. */
typedef struct fattn_device fattn_device;

/* A device's queue of work: CUstream or hipStream_t on a GPU, where NULL is the default stream. On
 * a CPU work is done when a call returns, and only NULL is a stream. */
typedef void *fattn_stream;

/*
 * Opens a device. spec is "cpu", "cuda", "cuda:1", "hip", "reference" or "auto"; NULL reads the
 * environment variable FATTN_BACKEND, and means "auto", the best device present, without it. "auto"
 * passes over devices that cannot be used, such as a GPU that this build has no code for, and
 * FATTN_VERBOSE=1 says which and why. A device that is named and cannot be used is an error, never
 * another device. Close it with fattn_device_close(); plans made on it hold it open.
 *
 * Errors: FATTN_UNKNOWN_DEVICE for a spec that names no backend of this build; FATTN_NO_DEVICE
 * where the backend has no such device, or no driver; FATTN_UNSUPPORTED for a device that this
 * build has no code for; FATTN_BAD_ENVIRONMENT; FATTN_OUT_OF_MEMORY; FATTN_DEVICE_ERROR.
 */
FATTN_API fattn_status fattn_device_open(const char *spec, fattn_device **device);

/* Whose threads a CPU device has. */
typedef enum fattn_engine {
    FATTN_ENGINE_DEFAULT = 0, /* FATTN_ENGINE_OWN */
    FATTN_ENGINE_OWN = 1,     /* the library's */
    FATTN_ENGINE_OPENMP = 2   /* OpenMP's, for programs that want one pool for everything: of the
                               * runtime that the library was built with, or, without one, that
                               * the process has loaded. It may end the process where threads or
                               * memory fail */
} fattn_engine;

/*
 * A loop over a caller's own threads: calls body(context, i) once for each i in 0 .. count - 1 and
 * returns when all of these calls have returned. They may come in any order, on any threads,
 * concurrently or one after another. It may be called from several threads concurrently, and must
 * not throw through the library. The bodies share out the work among those that run, so that a loop
 * with fewer threads than count is right, and merely takes longer. It is as fast as the library's
 * own threads if the calling thread makes one of the calls itself, all others begin at once, and
 * its threads look for the next loop for some 30 microseconds before they sleep.
 */
typedef void (*fattn_parallel_for)(void *user, int64_t count,
                                   void (*body)(void *context, int64_t i), void *context);

/* Allocates memory of a caller's on a device: see fattn_device_options. */
typedef void *(*fattn_device_allocate)(void *user, size_t bytes, fattn_stream stream);

/* Releases what a fattn_device_allocate returned. */
typedef void (*fattn_device_release)(void *user, void *memory);

/*
 * How a device is opened. Set it up with fattn_device_options_init(), then fill in what differs. An
 * option that a backend does not have must be left at its default: those of threads are the CPU's,
 * those of memory every backend's.
 *
 * Threads. A device has a number of threads, which is decided when it is opened and which its plans
 * have. It is FATTN_NUM_THREADS if that is set; else `threads`; else the number of `cpus`; else
 * omp_get_max_threads(), in a build with OpenMP; else, and where OpenMP merely counts processors,
 * those that affinity and control groups grant the process. Results do not depend on the number of
 * threads. Their last bits may depend on how many processors the process is granted, by affinity
 * (or OpenMP's places) and control groups, because tiles do; FATTN_TILE, FATTN_SPLITS and
 * FATTN_SRAM fix the choice.
 *
 * The library's own threads (FATTN_ENGINE_OWN) are made when a problem first is large enough for
 * them, serve all calling threads together, and end with their last device. Devices share them,
 * unless `threads` or `cpus` is given. The calling thread always works, and waits for others only
 * while they are at work on its problem. So where the system refuses to make a thread, the device
 * goes on with fewer. They look for work for 30 microseconds before they sleep, and block all
 * signals. In a child of fork() a device goes on, with new threads; that needs no exec. In a
 * parallel region of the caller's OpenMP, where that allows no further threads, the calling thread
 * works alone, if the number was OpenMP's.
 *
 * Memory. `allocate` and `release` take the place of the backend's own functions for everything
 * that the library allocates on the device: workspaces, copies of host memory,
 * fattn_device_malloc(). They may be called from any thread, in whichever context is current there,
 * from several threads concurrently, and while streams are captured; they must not call the
 * library. Memory is aligned to 256 bytes; NULL becomes FATTN_OUT_OF_MEMORY. `stream` is that of
 * the call which needs the memory, NULL where there is none. The library waits for the last use
 * before it releases.
 */
typedef struct fattn_device_options {
    size_t struct_size; /* sizeof(fattn_device_options); set by fattn_device_options_init */

    int64_t threads;                 /* 1..1024; 0, the default, as said above */
    const char *isa;                 /* this instruction set, with its base; NULL: the best */
    const char *cpus;                /* processors that the library's own threads may run on, as in
                                      * "0-15,32", one of them at least in this machine; the
                                      * calling thread stays where it is. NULL, the default: those
                                      * of the program's first thread and of the one that opens the
                                      * device, or OpenMP's places */
    fattn_engine engine;             /* default FATTN_ENGINE_DEFAULT */
    uint32_t reserved;               /* 0 */
    fattn_parallel_for parallel_for; /* whose threads work instead; default NULL. No other thread is
                                      * then created */
    void *parallel_user;             /* its first argument */
    fattn_device_allocate allocate;  /* default NULL; give both or none */
    fattn_device_release release;    /* default NULL */
    void *allocator_user;            /* their first argument */
} fattn_device_options;

/* Fills *options with the defaults named above. */
FATTN_API void fattn_device_options_init(fattn_device_options *options);

/* Opens a device like fattn_device_open(), with options, which are copied; NULL means the
 * defaults. FATTN_NUM_THREADS and FATTN_CPU_ISA override them. FATTN_UNSUPPORTED where the backend
 * or the build lacks an option that is not at its default. */
FATTN_API fattn_status fattn_device_open_with(const char *spec, const fattn_device_options *options,
                                              fattn_device **device);

/*
 * Gives a device up. NULL is allowed. The plans and workspaces that fattn_attention() keeps for it
 * are freed, after what is queued with them. Plans of the caller's, and workspaces that belong to
 * graphs, keep the device open until they are gone; until then it may call the functions of its
 * options.
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
    int units;            /* worker threads, or multiprocessors */
    int64_t fast_memory;  /* bytes of cache or shared memory a unit may plan with */
    int64_t total_memory; /* bytes, 0 when unknown */
} fattn_device_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_device_info_init(fattn_device_info *info);

/* Describes a device. */
FATTN_API fattn_status fattn_device_get_info(const fattn_device *device, fattn_device_info *info);

/* Memory on the device, aligned to 256 bytes. bytes = 0 gives NULL. Contents are undefined. */
FATTN_API fattn_status fattn_device_malloc(fattn_device *device, size_t bytes, void **memory);

/* Gives memory of fattn_device_malloc() back; nothing queued may still use it. NULL is allowed. */
FATTN_API fattn_status fattn_device_free(fattn_device *device, void *memory);

/* Copies bytes; either side may be host or device memory. Ordered on the stream; host memory may be
 * used again after fattn_stream_synchronize(). */
FATTN_API fattn_status fattn_device_copy(fattn_device *device, void *dst, const void *src,
                                         size_t bytes, fattn_stream stream);

/* Creates a stream besides the default one. Release it with fattn_stream_destroy(). On a CPU it is
 * NULL. */
FATTN_API fattn_status fattn_stream_create(fattn_device *device, fattn_stream *stream);

/* Gives a stream up. Work that is queued on it still gets done. NULL is allowed. */
FATTN_API fattn_status fattn_stream_destroy(fattn_device *device, fattn_stream stream);

/* Waits until all work queued on the stream is done, and reports what went wrong in it. */
FATTN_API fattn_status fattn_stream_synchronize(fattn_device *device, fattn_stream stream);

/* A point in a stream, for timing. */
typedef struct fattn_event fattn_event;

/* Creates an event, which holds the device open. Release it with fattn_event_destroy(). */
FATTN_API fattn_status fattn_event_create(fattn_device *device, fattn_event **event);

/* Gives an event up. NULL is allowed. */
FATTN_API void fattn_event_destroy(fattn_event *event);

/* Puts the event behind all that is queued on the stream by now; a second time moves it. */
FATTN_API fattn_status fattn_event_record(fattn_event *event, fattn_stream stream);

/* Lets what is queued on the stream from now on wait until the event is reached; the caller does
 * not wait. The stream is of the event's device, mostly another than the one that it was recorded
 * on. An event that was never recorded holds nothing up. On a CPU it does nothing. */
FATTN_API fattn_status fattn_event_wait(fattn_event *event, fattn_stream stream);

/* Waits until the event is reached, and reports what went wrong before it. */
FATTN_API fattn_status fattn_event_synchronize(fattn_event *event);

/* Waits for two events of one device, and gives the time from start to stop. Events of two open
 * devices are FATTN_INVALID_ARGUMENT, even if both are the same hardware. An event that was never
 * recorded is an error: FATTN_INVALID_ARGUMENT on a CPU, FATTN_DEVICE_ERROR on a GPU. */
FATTN_API fattn_status fattn_event_elapsed(fattn_event *start, fattn_event *stop,
                                           double *milliseconds);

/* -------------------------------------------------------------------------------------------------
 * Plans
 * ---------------------------------------------------------------------------------------------- */

/* A problem, a device, and the choice how the one is computed on the other. */
typedef struct fattn_plan fattn_plan;

/*
 * Validates the problem, chooses a kernel, its tiles and splits, and loads what is needed, so that
 * fattn_execute() allocates nothing if it is given a workspace. problem is copied. *plan is
 * destroyed by fattn_plan_destroy(). It is immutable, and several threads may execute it
 * concurrently, each with a workspace of its own.
 *
 * One plan may serve all steps of an engine. Where lengths are data (cu_seqlens, seqused), batch,
 * seqlen_q, seqlen_k and the totals are the most that a run may have, and a run takes the time of
 * its actual lengths. Sequences that a run lacks have no rows: the last entry of cu_seqlens_q
 * repeats, or seqused_q is 0. Their lengths and pages are checked all the same: seqused_k is 0
 * there, or block_table has valid pages for it. Strides do not change with the run: lse has total_q
 * entries a head, however many rows there are. Other problems want other plans: fattn_attention()
 * finds its own by all fields of the problem, and a seqlen_k that grows by one is a new one at each
 * step.
 */
FATTN_API fattn_status fattn_plan_create(fattn_device *device, const fattn_problem *problem,
                                         fattn_plan **plan);

/* Gives a plan up. NULL is allowed. No execution of the plan may still be running. */
FATTN_API void fattn_plan_destroy(fattn_plan *plan);

/* What was chosen, and what it costs. */
typedef struct fattn_plan_info {
    size_t struct_size;       /* sizeof(fattn_plan_info); set by fattn_plan_info_init */
    char kernel[64];          /* name of the kernel row */
    int64_t br, bc;           /* tile: queries, keys */
    int64_t splits;           /* most parts that this kernel cuts the keys of a sequence into: a
                               * run's lengths may be worth fewer. Where lengths of queries differ,
                               * another kernel may have sequences of few rows, and cut those:
                               * fattn_plan_describe() names it */
    int64_t work_items;       /* independent pieces of work */
    int64_t workspace_bytes;  /* what fattn_execute() needs */
    double predicted_bytes;   /* slow-memory traffic of this plan */
    double standard_bytes;    /* of standard attention, which materialises the score matrix */
    double lower_bound_bytes; /* every input read once, every output written once */
    double flops;             /* multiplications and additions of the matrix products */
    double effective_dropout; /* the dropout probability after rounding, 0 without dropout */
} fattn_plan_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_plan_info_init(fattn_plan_info *info);

/* Describes a plan. */
FATTN_API fattn_status fattn_plan_get_info(const fattn_plan *plan, fattn_plan_info *info);

/* Writes the plan in words, with the reason why each better kernel declined, into text, cut to size
 * bytes and always terminated; NULL for text takes none. Returns the length that the whole text
 * has, like snprintf: 0 if plan is NULL. */
FATTN_API size_t fattn_plan_describe(const fattn_plan *plan, char *text, size_t size);

/*
 * Runs a plan. workspace points to at least workspace_bytes bytes of device memory aligned to 256,
 * any contents, for this execution alone; NULL makes the library allocate (and, on a GPU, wait).
 * On an AMD GPU it is not memory that host and device keep coherent (fine-grained or managed).
 * Work is queued on stream; on a CPU it is done on return.
 */
FATTN_API fattn_status fattn_execute(const fattn_plan *plan, const fattn_buffers *buffers,
                                     void *workspace, fattn_stream stream);

/*
 * One shot: plans through a cache of recent plans and executes. The pointer alignment is taken from
 * the pointers, whatever the problem promises, and the workspace is allocated where one is needed,
 * and kept. With a GPU device and host pointers it copies to the device and back and waits.
 *
 * Calls may come from any threads and on any streams, one after another or at once: a plan has a
 * workspace for each of up to four streams, and streams beyond them wait, on the GPU, for the
 * workspace that they are given.
 *
 * A call may be captured into a graph (not with host pointers). Its workspace then belongs to the
 * graph: calls of that capture share it, no other call ever gets it, and it is not freed before the
 * process ends. Programs that capture again and again run plans with workspaces of their own.
 */
FATTN_API fattn_status fattn_attention(fattn_device *device, const fattn_problem *problem,
                                       const fattn_buffers *buffers, fattn_stream stream);

/* Frees the cached plans and workspaces of fattn_attention() and the default device, as far as they
 * are not in use. Waits for what is queued with them. */
FATTN_API void fattn_cache_clear(void);

/*
 * How much fattn_attention() keeps, in the whole process. Set it up with
 * fattn_cache_options_init().
 *
 * Beside a plan stay its workspaces, of workspace_bytes each (fattn_plan_info): one on a CPU, up to
 * four on a GPU, and more where more calls ran at once. They may be large: backward on Hopper keeps
 * dq in f32 there, 4 bytes for each element of q. By default only the number of plans bounds their
 * sum, so a program whose problems change from call to call had better set `bytes`. Where memory
 * runs out for a workspace, the idle ones of the device are freed first.
 */
typedef struct fattn_cache_options {
    size_t struct_size; /* sizeof(fattn_cache_options); set by fattn_cache_options_init */
    int64_t entries;    /* plans, 0..4096: those used last are kept; default 32. Finding one takes
                         * the same time among few and among many */
    int64_t bytes;      /* of all their workspaces together; default INT64_MAX. A call that needs
                         * more gets it, and waits until it can be freed again */
} fattn_cache_options;

/* Fills *options with the defaults named above. */
FATTN_API void fattn_cache_options_init(fattn_cache_options *options);

/* Sets how much is kept, and frees what is too much. Any thread may call it at any time. */
FATTN_API fattn_status fattn_cache_set_options(const fattn_cache_options *options);

/* What fattn_attention() keeps now, and how it went since the process began. */
typedef struct fattn_cache_info {
    size_t struct_size;  /* sizeof(fattn_cache_info); set by fattn_cache_info_init */
    int64_t entries;     /* plans */
    int64_t bytes;       /* of their workspaces */
    int64_t graph_bytes; /* of workspaces that belong to captured graphs, not among bytes */
    int64_t hits;        /* calls that found their plan */
    int64_t misses;      /* calls that did not, and made one */
    int64_t evictions;   /* plans that were given up for others */
    int64_t allocations; /* workspaces that were allocated */
} fattn_cache_info;

/* Fills *info with its size and zeros. */
FATTN_API void fattn_cache_info_init(fattn_cache_info *info);

/* Describes the cache. */
FATTN_API fattn_status fattn_cache_get_info(fattn_cache_info *info);

/* FATTN_OK when the device has a kernel for the problem; else the status that fattn_plan_create()
 * would return, with fattn_last_reason(). Loads nothing. */
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
    fattn_strides o1_stride, o2_stride, o_stride; /* of o1, o2 and o, in elements; without a
                                                   * default, even of contiguous tensors */
} fattn_merge_args;

/* Fills *args with its size and zeros. */
FATTN_API void fattn_merge_args_init(fattn_merge_args *args);

/*
 * Merges two results: m = max(lse1, lse2), w = exp(lse - m), lse = m + ln(w1 + w2),
 * o = (w1 o1 + w2 o2) / (w1 + w2). A state with lse = -inf is not read and is the identity; two
 * empty states give the empty state. Commutative exactly, associative up to rounding.
 */
FATTN_API fattn_status fattn_merge(fattn_device *device, const fattn_merge_args *args,
                                   fattn_stream stream);

/* What fattn_inspect() writes of a query and a key. */
typedef enum fattn_inspection {
    FATTN_SCORES = 1,       /* x, as the softmax sees it; -inf where the pair is not kept */
    FATTN_PROBABILITIES = 2 /* exp(x - lse), before dropout; 0 where the pair is not kept */
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
 * Writes the scores or probabilities of a forward, which attention itself never stores: for looking
 * at heads, and for tests. problem and buffers are those of the forward; none of its outputs is
 * written, and none need be there. Entries of rows and keys that a sequence does not have stay as
 * they are. The numbers are the reference's, computed in double precision by one thread, on every
 * device that uses host memory; GPUs answer FATTN_UNSUPPORTED.
 */
FATTN_API fattn_status fattn_inspect(fattn_device *device, const fattn_problem *problem,
                                     const fattn_buffers *buffers, const fattn_inspect_args *args);

/* A rectangle of the dropout pattern: what forward and backward multiply with. */
typedef struct fattn_dropout_args {
    size_t struct_size; /* sizeof(fattn_dropout_args); set by fattn_dropout_args_init */
    int64_t batch, heads, seqlen_q, seqlen_k;              /* its size; heads are query heads */
    int64_t batch_offset, head_offset, q_offset, k_offset; /* where it begins */
    double p;                                              /* as dropout_p of fattn_problem */
    uint64_t seed, offset;                                 /* as in fattn_buffers */
    uint8_t *keep; /* contiguous (batch, heads, seqlen_q, seqlen_k): 1 kept, 0 dropped. On a GPU it
                    * is device memory */
} fattn_dropout_args;

/* Fills *args with its size and zeros. */
FATTN_API void fattn_dropout_args_init(fattn_dropout_args *args);

/* Writes the dropout pattern of a seed, for inspection and tests. Queued on stream; on a CPU it is
 * done on return. FATTN_INVALID_SHAPE for a size that is not in 0..2^31 - 1, and for a rectangle
 * that reaches beyond 2^32 batch entries or heads or 2^33 positions; FATTN_INVALID_ARGUMENT for p;
 * FATTN_NULL_POINTER for keep. */
FATTN_API fattn_status fattn_dropout_mask(fattn_device *device, const fattn_dropout_args *args,
                                          fattn_stream stream);

/* -------------------------------------------------------------------------------------------------
 * Messages
 * ---------------------------------------------------------------------------------------------- */

/* Is given one line of printable ASCII without a newline, which lasts until it returns. May be
 * called from any thread, and from several concurrently. It must not call the library, which may
 * hold locks meanwhile. */
typedef void (*fattn_log_callback)(void *user, const char *line);

/* Sends the lines that FATTN_VERBOSE asks for to callback instead of stderr; NULL restores stderr.
 * It does not wait: another thread may still be in the callback before, or about to call it. */
FATTN_API void fattn_set_log_callback(fattn_log_callback callback, void *user);

#ifdef __cplusplus
}
#endif
#endif
