/* SPDX-License-Identifier: Apache-2.0 */
/* Validation: every wrong problem and every wrong buffer is refused with its status and a reason
 * that names the field; outputs stay untouched; accepted problems come out in normal form. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "core/abi.h"
#include "core/dtype.h"
#include "core/operands.h"
#include "core/problem.h"
#include "fattn/distributed.h"
#include "tests/random.h"
#include "tests/strip.h"
#include "tests/unit_answers.h"
#include "tools/judge/random_case.h"

static fattn_problem sound(void)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.batch = 2;
    p.heads_q = 4;
    p.heads_k = 2;
    p.seqlen_q = 5;
    p.seqlen_k = 7;
    p.dim = 8;
    p.dim_v = 6;
    return p;
}

/* The problem is refused with this status, and the reason contains these words. */
static void refused(const fattn_problem *p, fattn_status status, const char *words)
{
    fattn_problem out;
    fattn_problem before;
    memset(&out, 0x5a, sizeof out);
    memset(&before, 0x5a, sizeof before);
    ANSWERS(fattn_problem_normalise(p, &out), status);
    REASON_HAS(words);
    cr_assert(memcmp(&out, &before, sizeof out) == 0, "%s: output touched", words);
}

#define REFUSED(status, words, ...) \
    do {                            \
        fattn_problem p = sound();  \
        __VA_ARGS__;                \
        refused(&p, status, words); \
    } while (0)

Test(problem, the_default_is_sound)
{
    const fattn_problem p = sound();
    fattn_problem out;
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK, "%s", fattn_last_reason());
}

Test(problem, struct_sizes)
{
    REFUSED(FATTN_INVALID_STRUCT, "struct_size", p.struct_size = 0);
    REFUSED(FATTN_INVALID_STRUCT, "struct_size", p.struct_size = (size_t)1 << 40);
    cr_assert_eq(fattn_problem_normalise(NULL, NULL), FATTN_NULL_POINTER);

    struct {
        fattn_problem known;
        char tail[64];
    } longer = {.known = sound()};
    longer.known.struct_size = sizeof longer;
    fattn_problem out;
    cr_assert_eq(fattn_problem_normalise(&longer.known, &out), FATTN_OK);
    cr_assert_eq(out.struct_size, sizeof out);
    longer.tail[63] = 1;
    cr_assert_eq(fattn_problem_normalise(&longer.known, &out), FATTN_INVALID_STRUCT);

    /* No version of the struct ended there, or inside a field. */
    REFUSED(FATTN_INVALID_STRUCT, "struct_size is 8", p.struct_size = sizeof(size_t));
    REFUSED(FATTN_INVALID_STRUCT, "struct_size",
            p.struct_size = offsetof(fattn_problem, pointer_alignment));
    for (size_t size = 0; size < FATTN_ABI_END(fattn_problem, pointer_alignment); size++) {
        REFUSED(FATTN_INVALID_STRUCT, "struct_size", p.struct_size = size);
    }
    for (size_t size = 0; size < sizeof(fattn_buffers); size++) {
        fattn_buffers b, read;
        fattn_buffers_init(&b);
        b.struct_size = size;
        b.seqstart_k = (const int32_t *)&size;
        const bool first = size == FATTN_ABI_END(fattn_buffers, offset_ptr);
        cr_assert_eq(fattn_buffers_read(&read, &b), first ? FATTN_OK : FATTN_INVALID_STRUCT, "%zu",
                     size);
        cr_assert(!first || (read.seqstart_k == NULL && read.whole_q == -1));
    }
}

/* A struct that grew twice. */
typedef struct grown {
    size_t struct_size;
    int64_t first;
    int64_t second;        /* since version 2, default -1 */
    int64_t third, fourth; /* since version 3, defaults 16 and 0 */
} grown;

static void init_grown(void *to) { *(grown *)to = (grown){sizeof(grown), 0, -1, 16, 0}; }

Test(problem, older_callers)
{
    static const fattn_abi abi = {
        .name = "grown",
        .sizes = {FATTN_ABI_END(grown, first), FATTN_ABI_END(grown, second), sizeof(grown)},
        .init = init_grown,
    };
    for (size_t size = 0; size <= sizeof(grown) + 8; size++) {
        struct {
            grown known;
            int64_t tail;
        } caller = {.known = {size, 1, 2, 3, 4}};
        grown read = {0};
        const bool first = size == FATTN_ABI_END(grown, first);
        const bool second = size == FATTN_ABI_END(grown, second);
        const bool legal = first || second || size >= sizeof(grown);
        const fattn_status status = fattn_abi_read_grown(&read, &abi, &caller);
        cr_assert_eq(status, legal ? FATTN_OK : FATTN_INVALID_STRUCT, "size %zu", size);
        if (legal) {
            cr_assert_eq(read.struct_size, sizeof(grown));
            cr_assert_eq(read.first, 1);
            cr_assert_eq(read.second, first ? -1 : 2);
            cr_assert_eq(read.third, first || second ? 16 : 3);
            cr_assert_eq(read.fourth, first || second ? 0 : 4);
        }
    }
}

Test(problem, every_struct_has_an_init)
{
    fattn_device_info device;
    fattn_plan_info plan;
    fattn_merge_args merge;
    fattn_dropout_args dropout;
    fattn_host_allocator allocator;
    fattn_cache_info cache;
    fattn_transport transport;
    memset(&device, 0x5a, sizeof device);
    memset(&plan, 0x5a, sizeof plan);
    memset(&merge, 0x5a, sizeof merge);
    memset(&dropout, 0x5a, sizeof dropout);
    memset(&allocator, 0x5a, sizeof allocator);
    memset(&cache, 0x5a, sizeof cache);
    memset(&transport, 0x5a, sizeof transport);
    fattn_device_info_init(&device);
    fattn_plan_info_init(&plan);
    fattn_merge_args_init(&merge);
    fattn_dropout_args_init(&dropout);
    fattn_host_allocator_init(&allocator);
    fattn_cache_info_init(&cache);
    fattn_transport_init(&transport);
    cr_assert(device.struct_size == sizeof device && !device.name[0] && !device.total_memory);
    cr_assert(plan.struct_size == sizeof plan && !plan.kernel[0] && plan.effective_dropout == 0);
    cr_assert(merge.struct_size == sizeof merge && !merge.o && !merge.o_stride.head);
    cr_assert(dropout.struct_size == sizeof dropout && !dropout.keep && dropout.p == 0);
    cr_assert(allocator.struct_size == sizeof allocator && !allocator.allocate && !allocator.user);
    cr_assert(cache.struct_size == sizeof cache && !cache.entries && !cache.allocations);
    cr_assert(transport.struct_size == sizeof transport && !transport.start && !transport.stream);
}

Test(problem, enums)
{
    REFUSED(FATTN_INVALID_ARGUMENT, "op is 7", p.op = (fattn_op)7);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype is 0", p.dtype = (fattn_dtype)0);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype is 99", p.dtype = (fattn_dtype)99);
    REFUSED(FATTN_UNSUPPORTED, "dtype is e4m3", p.dtype = FATTN_E4M3);
    REFUSED(FATTN_UNSUPPORTED, "dtype_kv is e4m3 in a backward", p.op = FATTN_BACKWARD,
            p.dtype_kv = FATTN_E4M3);
    REFUSED(FATTN_UNSUPPORTED, "dtype_v is e4m3 in a backward", p.op = FATTN_BACKWARD,
            p.dtype_v = FATTN_E4M3);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_o is e4m3", p.dtype_o = FATTN_E4M3);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_bias is e4m3", p.features = FATTN_BIAS,
            p.dtype_bias = FATTN_E4M3);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_kv is unknown (6)", p.dtype_kv = (fattn_dtype)6);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_o is f16", p.dtype_o = FATTN_F16);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_o", p.dtype_o = (fattn_dtype)-3);
    REFUSED(FATTN_INVALID_ARGUMENT, "dtype_bias is f64", p.features = FATTN_BIAS,
            p.dtype_bias = FATTN_F64);
    REFUSED(FATTN_INVALID_ARGUMENT, "layout is 0", p.layout = (fattn_layout)0);
    REFUSED(FATTN_INVALID_ARGUMENT, "anchor is 3", p.anchor = (fattn_anchor)3);
    REFUSED(FATTN_INVALID_ARGUMENT, "unknown bits", p.features = UINT64_C(1) << 40);
    REFUSED(FATTN_INVALID_ARGUMENT, "reserved", p.reserved = 1);
}

Test(problem, sizes)
{
    REFUSED(FATTN_INVALID_SHAPE, "batch is -1", p.batch = -1);
    REFUSED(FATTN_INVALID_SHAPE, "batch", p.batch = INT64_C(1) << 31);
    REFUSED(FATTN_INVALID_SHAPE, "heads_q", p.heads_q = -4);
    REFUSED(FATTN_INVALID_SHAPE, "heads_k", p.heads_k = 0);
    REFUSED(FATTN_INVALID_SHAPE, "heads_q is 4, not a multiple", p.heads_k = 3);
    REFUSED(FATTN_INVALID_SHAPE, "seqlen_q", p.seqlen_q = INT64_MAX);
    REFUSED(FATTN_INVALID_SHAPE, "seqlen_k", p.seqlen_k = INT64_MIN);
    REFUSED(FATTN_INVALID_SHAPE, "dim is 0", p.dim = 0);
    REFUSED(FATTN_INVALID_SHAPE, "dim is 577", p.dim = 577);
    REFUSED(FATTN_INVALID_SHAPE, "dim_v is 0", p.dim_v = 0);
    REFUSED(FATTN_INVALID_SHAPE, "total_q", p.features = FATTN_CU_SEQLENS_Q, p.total_q = -1);
    REFUSED(FATTN_INVALID_SHAPE, "total_k", p.features = FATTN_CU_SEQLENS_K, p.total_k = -1);
    REFUSED(FATTN_INVALID_SHAPE, "page_size", p.features = FATTN_PAGED);
    REFUSED(FATTN_INVALID_SHAPE, "max_pages", p.features = FATTN_PAGED, p.page_size = 3,
            p.num_pages = 9, p.max_pages = 2);
    REFUSED(FATTN_INVALID_STRIDE, "block_table_stride", p.features = FATTN_PAGED, p.page_size = 3,
            p.num_pages = 9, p.max_pages = 3, p.block_table_stride = 2);
    REFUSED(FATTN_INVALID_SHAPE, "block_m", p.features = FATTN_BLOCK_MASK, p.block_n = 4);
    REFUSED(FATTN_INVALID_SHAPE, "block_n", p.features = FATTN_BLOCK_MASK, p.block_m = 4);
}

Test(problem, options)
{
    const double bad_scales[] = {NAN, INFINITY, -INFINITY, 1e300};
    for (size_t i = 0; i < sizeof bad_scales / sizeof bad_scales[0]; i++) {
        REFUSED(FATTN_INVALID_ARGUMENT, "scale", p.features = FATTN_SCALE, p.scale = bad_scales[i]);
    }
    const double bad_caps[] = {NAN, INFINITY, 0, -1, 1e300, 1e-300};
    for (size_t i = 0; i < sizeof bad_caps / sizeof bad_caps[0]; i++) {
        REFUSED(FATTN_INVALID_ARGUMENT, "softcap", p.features = FATTN_SOFTCAP,
                p.softcap = bad_caps[i]);
    }
    const double bad_p[] = {NAN, -0.1, 1.1, INFINITY};
    for (size_t i = 0; i < sizeof bad_p / sizeof bad_p[0]; i++) {
        REFUSED(FATTN_INVALID_ARGUMENT, "dropout_p", p.features = FATTN_DROPOUT,
                p.dropout_p = bad_p[i]);
    }
    REFUSED(FATTN_INVALID_ARGUMENT, "window_left is -2", p.features = FATTN_WINDOW,
            p.window_left = -2);
    REFUSED(FATTN_INVALID_ARGUMENT, "window_right", p.features = FATTN_WINDOW, p.window_right = -9);
    REFUSED(FATTN_INVALID_STRIDE, "alibi_batch_stride", p.features = FATTN_ALIBI,
            p.alibi_batch_stride = 3);
    REFUSED(FATTN_INVALID_SHAPE, "chunk is 0, not in 1..2147483647", p.features = FATTN_CHUNK);
    REFUSED(FATTN_INVALID_SHAPE, "chunk is -4", p.features = FATTN_CHUNK, p.chunk = -4);
    REFUSED(FATTN_INVALID_SHAPE, "chunk is 2147483648", p.features = FATTN_CHUNK,
            p.chunk = INT64_C(1) << 31);
    REFUSED(FATTN_INVALID_ARGUMENT, "FATTN_ALIBI_BIAS without FATTN_BIAS",
            p.features = FATTN_ALIBI_BIAS | FATTN_ALIBI);
    REFUSED(FATTN_INVALID_ARGUMENT, "FATTN_ALIBI_BIAS without FATTN_ALIBI",
            p.features = FATTN_ALIBI_BIAS | FATTN_BIAS);
    REFUSED(FATTN_INVALID_ARGUMENT, "batch_offset", p.features = FATTN_DROPOUT, p.dropout_p = 0.5,
            p.batch_offset = -1);
    REFUSED(FATTN_INVALID_ARGUMENT, "head_offset", p.features = FATTN_DROPOUT, p.dropout_p = 0.5,
            p.head_offset = (INT64_C(1) << 32) - 3);
    const int64_t bad_alignments[] = {0, -16, 24, 8192};
    for (size_t i = 0; i < sizeof bad_alignments / sizeof bad_alignments[0]; i++) {
        REFUSED(FATTN_INVALID_ARGUMENT, "pointer_alignment",
                p.pointer_alignment = bad_alignments[i]);
    }
}

/* A field without its feature bit is refused, and the reason names both. */
#define UNUSED(bit, field, words, ...)                       \
    do {                                                     \
        REFUSED(FATTN_INVALID_ARGUMENT, words, __VA_ARGS__); \
        REFUSED(FATTN_INVALID_ARGUMENT, #bit, __VA_ARGS__);  \
        cr_assert(strstr(words, #field));                    \
    } while (0)

Test(problem, fields_without_their_bit)
{
    UNUSED(FATTN_SCALE, scale, "scale is nan", p.scale = NAN);
    UNUSED(FATTN_SCALE, scale, "scale is 0.5", p.scale = 0.5);
    UNUSED(FATTN_SOFTCAP, softcap, "softcap is -5", p.softcap = -5);
    UNUSED(FATTN_DROPOUT, dropout_p, "dropout_p is 0.1", p.dropout_p = 0.1);
    UNUSED(FATTN_DROPOUT, batch_offset, "batch_offset is 1", p.batch_offset = 1);
    UNUSED(FATTN_DROPOUT, head_offset, "head_offset is 8", p.head_offset = 8);
    UNUSED(FATTN_WINDOW, window_left, "window_left is -7", p.window_left = -7);
    UNUSED(FATTN_WINDOW, window_left, "window_left is 0", p.window_left = 0);
    UNUSED(FATTN_WINDOW, window_right, "window_right is 0", p.window_right = 0);
    UNUSED(FATTN_WINDOW, window_right, "window_right is 1", p.features = FATTN_CAUSAL,
           p.window_right = 1);
    UNUSED(FATTN_BIAS, dtype_bias, "dtype_bias is 1", p.dtype_bias = FATTN_F32);
    UNUSED(FATTN_BIAS, bias_stride, "bias_stride[3] is 1", p.bias_stride[3] = 1);
    UNUSED(FATTN_BIAS, dbias_stride, "dbias_stride[0] is 7", p.dbias_stride[0] = 7);
    UNUSED(FATTN_MASK, mask_stride, "mask_stride[2] is -3", p.mask_stride[2] = -3);
    UNUSED(FATTN_BLOCK_MASK, block_mask_stride, "block_mask_stride[1] is 2",
           p.block_mask_stride[1] = 2);
    UNUSED(FATTN_BLOCK_MASK, block_m, "block_m is 64", p.block_m = 64);
    UNUSED(FATTN_BLOCK_MASK, block_n, "block_n is 64", p.block_n = 64);
    UNUSED(FATTN_ALIBI, alibi_batch_stride, "alibi_batch_stride is 4", p.alibi_batch_stride = 4);
    UNUSED(FATTN_CU_SEQLENS_Q, total_q, "total_q is 10", p.total_q = 10);
    UNUSED(FATTN_CU_SEQLENS_K, total_k, "total_k is 10", p.total_k = 10);
    UNUSED(FATTN_CHUNK, chunk, "chunk is 64", p.chunk = 64);
    UNUSED(FATTN_DESCALE, descale_stride, "descale_stride[0] is 1", p.descale_stride[0] = 1);
    UNUSED(FATTN_DESCALE, descale_stride, "descale_stride[1] is 2", p.descale_stride[1] = 2);
    UNUSED(FATTN_PAGED, page_size, "page_size is 16", p.page_size = 16);
    UNUSED(FATTN_PAGED, num_pages, "num_pages is 9", p.num_pages = 9);
    UNUSED(FATTN_PAGED, max_pages, "max_pages is 3", p.max_pages = 3);
    UNUSED(FATTN_PAGED, block_table_stride, "block_table_stride is 3", p.block_table_stride = 3);
    const size_t strides[] = {offsetof(fattn_problem, q),    offsetof(fattn_problem, k),
                              offsetof(fattn_problem, v),    offsetof(fattn_problem, o),
                              offsetof(fattn_problem, dout), offsetof(fattn_problem, dq),
                              offsetof(fattn_problem, dk),   offsetof(fattn_problem, dv)};
    for (size_t i = 0; i < 3 * sizeof strides / sizeof strides[0]; i++) {
        REFUSED(FATTN_INVALID_STRIDE, "FATTN_STRIDED", p.layout = i % 2 ? FATTN_BSHD : FATTN_BHSD,
                ((int64_t *)(void *)((char *)&p + strides[i / 3]))[i % 3] = 8);
    }

    /* What the library would fill in is no contradiction. */
    fattn_problem p = sound();
    fattn_problem out;
    p.features = FATTN_CAUSAL;
    p.window_right = 0, p.scale = 1 / sqrt(8.0), p.total_q = 5, p.total_k = 7;
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK, "%s", fattn_last_reason());
    /* A backward's strides may stand in a forward, and dbias_stride where dbias is not wanted. */
    p.layout = FATTN_STRIDED, p.features |= FATTN_BIAS;
    p.q = p.k = p.v = p.o = p.dout = p.dq = p.dk = p.dv = (fattn_strides){256, 32, 8};
    p.dbias_stride[3] = 1;
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK, "%s", fattn_last_reason());
    cr_assert_eq(out.dbias_stride[3], 0);
}

Test(problem, outputs)
{
    REFUSED(FATTN_INVALID_ARGUMENT, "forward", p.outputs = FATTN_OUT_O | FATTN_OUT_DQ);
    REFUSED(FATTN_INVALID_ARGUMENT, "alone", p.outputs = FATTN_OUT_LSE);
    REFUSED(FATTN_INVALID_ARGUMENT, "backward", p.op = FATTN_BACKWARD, p.outputs = FATTN_OUT_O);
    REFUSED(FATTN_INVALID_ARGUMENT, "DBIAS", p.op = FATTN_BACKWARD, p.outputs = FATTN_OUT_DBIAS);
    REFUSED(FATTN_INVALID_ARGUMENT, "DSINK", p.op = FATTN_BACKWARD, p.outputs = FATTN_OUT_DSINK);
    REFUSED(FATTN_INVALID_ARGUMENT, "DLSE", p.features = FATTN_DLSE);
    REFUSED(FATTN_INVALID_ARGUMENT, "ACCUMULATE", p.features = FATTN_ACCUMULATE);
    REFUSED(FATTN_UNSUPPORTED, "PAGED", p.op = FATTN_BACKWARD, p.features = FATTN_PAGED,
            p.page_size = 4, p.num_pages = 4, p.max_pages = 4);
    REFUSED(FATTN_UNSUPPORTED, "BATCH_INVARIANT", p.op = FATTN_BACKWARD,
            p.features = FATTN_BATCH_INVARIANT);
}

Test(problem, strides)
{
#define STRIDED p.layout = FATTN_STRIDED, p.q = p.o = (fattn_strides){256, 32, 8}, p.k = p.v = p.q
    REFUSED(FATTN_INVALID_STRIDE, "seq stride of k is -8", STRIDED, p.k.seq = -8);
    REFUSED(FATTN_OVERFLOW, "head stride of v", STRIDED, p.v.head = INT64_MAX / 2);
    REFUSED(FATTN_OVERFLOW, "q spans", STRIDED, p.q.batch = p.q.head = p.q.seq = INT64_MAX / 8);
    REFUSED(FATTN_OVERLAP, "o overlaps itself: strides (256, 32, 5) let", STRIDED, p.o.head = 5);
    REFUSED(FATTN_OVERLAP, "o overlaps itself", STRIDED, p.o.batch = 0);
    REFUSED(FATTN_OVERLAP, "o overlaps itself: strides (0, 0, 0), which are not set, let", STRIDED,
            p.o = (fattn_strides){0});
    REFUSED(FATTN_INVALID_STRIDE, "query stride of bias", p.features = FATTN_BIAS,
            p.bias_stride[2] = -1);
    REFUSED(FATTN_INVALID_STRIDE, "key stride of mask", p.features = FATTN_MASK,
            p.mask_stride[3] = -1);
    REFUSED(FATTN_OVERLAP, "dbias overlaps itself", p.op = FATTN_BACKWARD, p.features = FATTN_BIAS,
            p.outputs = FATTN_OUT_DBIAS, p.dbias_stride[2] = 6, p.dbias_stride[3] = 1);
    REFUSED(FATTN_OVERFLOW, "q has", p.batch = p.heads_q = p.heads_k = 2147483647,
            p.seqlen_q = 2147483647, p.dim = 576);
    fattn_problem p = sound();
    fattn_problem out;
    STRIDED, p.k.batch = p.k.head = p.v.seq = 0;
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK, "inputs may broadcast: %s",
                 fattn_last_reason());
}

Test(problem, normal_form)
{
    fattn_problem p = sound();
    fattn_problem out;
    p.features = FATTN_CAUSAL | FATTN_DROPOUT; /* p = 0: no dropout */
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK);
    cr_assert_eq(out.layout, FATTN_STRIDED);
    cr_assert_eq(out.window_left, -1);
    cr_assert_eq(out.window_right, 0);
    cr_assert_eq(out.features, FATTN_CAUSAL);
    cr_assert_eq(out.outputs, FATTN_OUT_O);
    cr_assert_eq(out.dtype_o, FATTN_F32);
    cr_assert_float_eq(out.scale, 1 / sqrt(8.0), 1e-15);
    cr_assert_eq(out.q.batch, 5 * 4 * 8);
    cr_assert_eq(out.q.seq, 4 * 8);
    cr_assert_eq(out.v.seq, 2 * 6);
    cr_assert_eq(out.o.head, 6);

    p.layout = FATTN_BHSD;
    p.op = FATTN_BACKWARD;
    p.features = FATTN_WINDOW | FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_ACCUMULATE;
    p.window_left = 3;
    p.window_right = 5;
    p.total_q = 9;
    p.dtype = FATTN_BF16;
    cr_assert_eq(fattn_problem_normalise(&p, &out), FATTN_OK, "%s", fattn_last_reason());
    cr_assert_eq(out.window_left, 3);
    cr_assert_eq(out.window_right, 0);
    cr_assert_eq(out.outputs, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV);
    cr_assert_eq(out.q.head, 9 * 8);
    cr_assert_eq(out.q.batch, 0);
    cr_assert_eq(out.k.head, 7 * 8);
    cr_assert_eq(fattn_gradient_dtype(&out, out.dtype), FATTN_F32);
    fattn_problem twice;
    cr_assert_eq(fattn_problem_normalise(&out, &twice), FATTN_OK);
    cr_assert(memcmp(&out, &twice, sizeof out) == 0, "the normal form is its own normal form");
}

Test(problem, dropout_threshold)
{
    cr_assert_eq(fattn_dropout_threshold(0), 0);
    cr_assert_eq(fattn_dropout_threshold(1e-9), 1);
    cr_assert_eq(fattn_dropout_threshold(0.1), 6554);
    cr_assert_eq(fattn_dropout_threshold(0.9999999), 65535);
    cr_assert_eq(fattn_dropout_threshold(1), 65536);
}

/* --- Buffers ---------------------------------------------------------------------------------- */

static _Alignas(256) float memory[4096];

typedef struct world {
    fattn_problem p;
    fattn_buffers b;
} world;

/* The sound problem, normal, with q, k, v, o side by side. */
static world sound_world(uint64_t features)
{
    world w;
    const fattn_problem p = sound();
    w.p = p;
    w.p.features = features;
    w.p.total_q = w.p.total_k = 12;
    w.p.page_size = 2, w.p.num_pages = 6, w.p.max_pages = 4;
    strip_problem(&w.p);
    cr_assert_eq(fattn_problem_normalise(&w.p, &w.p), FATTN_OK, "%s", fattn_last_reason());
    fattn_buffers_init(&w.b);
    w.b.q = memory;
    w.b.k = memory + 1024;
    w.b.v = memory + 2048;
    w.b.o = memory + 3072;
    return w;
}

static void refused_buffers(const world *w, fattn_status status, const char *words)
{
    fattn_buffers out;
    fattn_pointers pointers;
    fattn_status got = fattn_buffers_normalise(&w->p, &w->b, &out);
    fattn_pointers_make(&w->p, &pointers);
    cr_assert(!got || got == FATTN_INVALID_STRUCT || !fattn_pointers_are_valid(&pointers, &w->b),
              "held good: %s", fattn_last_reason());
    got = got ? got : fattn_buffers_validate(&w->p, &out);
    cr_assert_eq(got, status, "%s, not %s: %s", fattn_status_string(got),
                 fattn_status_string(status), fattn_last_reason());
    cr_assert(status == FATTN_OK || strstr(fattn_last_reason(), words) != NULL,
              "reason \"%s\" lacks \"%s\"", fattn_last_reason(), words);
}

Test(buffers, pointers)
{
    world w = sound_world(0);
    refused_buffers(&w, FATTN_OK, "");
    w.b.k = NULL;
    refused_buffers(&w, FATTN_NULL_POINTER, "k is NULL");
    w.b.k = memory + 1025;
    refused_buffers(&w, FATTN_MISALIGNED,
                    "not a multiple of 16 bytes, as the plan's pointer_alignment promises: this "
                    "pointer needs a plan with pointer_alignment 4");
    w.p.pointer_alignment = 4;
    refused_buffers(&w, FATTN_OK, "");
    w.b.k = (char *)memory + 4098;
    refused_buffers(&w, FATTN_MISALIGNED, "not a multiple of 4 bytes, the size of its elements");
    w.p.pointer_alignment = 16;
    refused_buffers(&w, FATTN_MISALIGNED, "not a multiple of 4 bytes, the size of its elements");
    w.b.k = (const void *)(UINTPTR_MAX - 15);
    refused_buffers(&w, FATTN_OVERFLOW, "end of memory");
    w.b.k = memory + 1024;
    w.b.o = memory + 1024 + 16;
    refused_buffers(&w, FATTN_OVERLAP, "o overlaps k: ");
    w.b.struct_size = 3;
    refused_buffers(&w, FATTN_INVALID_STRUCT, "fattn_buffers");
}

/* Through both doors: with a plan, and in one call. */
static void refused_execution(const fattn_problem *p, const fattn_buffers *b, fattn_status status,
                              const char *words, const char *bit)
{
    fattn_device *cpu = NULL;
    fattn_plan *plan = NULL;
    cr_assert_eq(fattn_device_open("cpu", &cpu), FATTN_OK);
    cr_assert_eq(fattn_plan_create(cpu, p, &plan), FATTN_OK, "%s", fattn_last_reason());
    for (int door = 0; door < 2; door++) {
        const fattn_status got =
            door == 0 ? fattn_execute(plan, b, NULL, NULL) : fattn_attention(cpu, p, b, NULL);
        cr_assert_eq(got, status, "door %d: %s, not %s: %s", door, fattn_status_string(got), words,
                     got ? fattn_last_reason() : "");
        cr_assert(status == FATTN_OK ||
                      (strstr(fattn_last_reason(), words) == fattn_last_reason() &&
                       strstr(fattn_last_reason(), bit)),
                  "reason \"%s\" lacks \"%s\" or %s", fattn_last_reason(), words, bit);
    }
    fattn_plan_destroy(plan);
    fattn_cache_clear();
    fattn_device_close(cpu);
}

Test(buffers, fields_without_their_bit)
{
    const struct {
        const char *name, *bit;
        size_t offset;
    } pointers[] = {
#define POINTER(field, bit) {#field " is ", #bit, offsetof(fattn_buffers, field)}
        POINTER(mask, FATTN_MASK),
        POINTER(block_mask, FATTN_BLOCK_MASK),
        POINTER(bias, FATTN_BIAS),
        POINTER(alibi_slopes, FATTN_ALIBI),
        POINTER(sink, FATTN_SINK),
        POINTER(cu_seqlens_q, FATTN_CU_SEQLENS_Q),
        POINTER(cu_seqlens_k, FATTN_CU_SEQLENS_K),
        POINTER(seqused_q, FATTN_SEQUSED_Q),
        POINTER(seqused_k, FATTN_SEQUSED_K),
        POINTER(block_table, FATTN_PAGED),
        POINTER(q_offsets, FATTN_POSITIONS),
        POINTER(k_offsets, FATTN_POSITIONS),
        POINTER(wholes_q, FATTN_POSITIONS),
        POINTER(wholes_k, FATTN_POSITIONS),
        POINTER(seed_ptr, FATTN_DROPOUT),
        POINTER(offset_ptr, FATTN_DROPOUT),
        POINTER(seqstart_k, FATTN_SEQSTART_K),
        POINTER(k_descale, FATTN_DESCALE),
        POINTER(v_descale, FATTN_DESCALE),
#undef POINTER
    };
    const fattn_problem p = sound();
    world w = sound_world(0);
    refused_execution(&p, &w.b, FATTN_OK, "", "");
    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++) {
        fattn_buffers b = w.b;
        const void *const pointer = memory;
        memcpy((char *)&b + pointers[i].offset, &pointer, sizeof pointer);
        refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, pointers[i].name, pointers[i].bit);
    }
    fattn_buffers b = w.b;
    b.q_offset = 3;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "q_offset is 3", "FATTN_POSITIONS");
    b = w.b, b.k_offset = -3;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "k_offset is -3", "FATTN_POSITIONS");
    b = w.b, b.whole_q = 0;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "whole_q is 0", "FATTN_POSITIONS");
    b = w.b, b.whole_k = 0;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "whole_k is 0", "FATTN_POSITIONS");
    b = w.b, b.seed = 7;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "seed is 7", "FATTN_DROPOUT");
    b = w.b, b.seed = UINT64_MAX; /* unsigned in the reason, too */
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "seed is 18446744073709551615",
                      "FATTN_DROPOUT");
    b = w.b, b.offset = 7;
    refused_execution(&p, &b, FATTN_INVALID_ARGUMENT, "offset is 7", "FATTN_DROPOUT");

    /* Dropout of probability 0 has a seed all the same. */
    fattn_problem dropout = p;
    dropout.features = FATTN_DROPOUT;
    refused_execution(&dropout, &b, FATTN_OK, "", "");

    /* One struct serves forward and backward: what the other operation uses may stand there. */
    static float more[4096];
    b = w.b, b.lse = more, b.dout = more + 256, b.dlse = more + 512, b.dq = more + 1024;
    b.dk = more + 2048, b.dv = more + 3072;
    refused_execution(&p, &b, FATTN_OK, "", "");
    fattn_problem backward = p;
    backward.op = FATTN_BACKWARD;
    refused_execution(&backward, &b, FATTN_INVALID_ARGUMENT, "dlse is ", "FATTN_DLSE");
    backward.features = FATTN_DLSE;
    refused_execution(&backward, &b, FATTN_OK, "", "");
}

/* What a run checks of pointers side by side is their addresses: the proof that boxes of strided
 * runs share no byte is for those whose spans meet. */
Test(buffers, addresses_show_that_pointers_are_good)
{
    static const uint64_t features[] = {0, FATTN_SEQUSED_K, FATTN_DROPOUT, FATTN_POSITIONS};
    for (size_t n = 0; n < sizeof features / sizeof features[0]; n++) {
        world w = sound_world(features[n]);
        const int32_t used[2] = {1, 2};
        w.b.seqused_k = used;
        fattn_pointers pointers;
        fattn_pointers_make(&w.p, &pointers);
        cr_assert_eq(pointers.outputs, 1);
        cr_assert(fattn_pointers_are_valid(&pointers, &w.b));
        for (int i = 0; i < 4; i++) {
            const void *bad[] = {NULL, memory + 1, (const void *)(UINTPTR_MAX - 15)};
            for (size_t which = 0; which < sizeof bad / sizeof bad[0]; which++) {
                fattn_buffers b = w.b;
                memcpy((char *)&b + pointers.of[i].offset, &bad[which], sizeof bad[which]);
                cr_assert(!fattn_pointers_are_valid(&pointers, &b), "operand %d, %zu", i, which);
            }
        }
        w.b.v = w.b.k; /* inputs may share bytes */
        cr_assert(fattn_pointers_are_valid(&pointers, &w.b));
        w.b.o = (char *)memory + 1024 + 16;
        cr_assert(!fattn_pointers_are_valid(&pointers, &w.b));
    }
}

Test(buffers, empty_tensors_need_no_pointer)
{
    world w = sound_world(0);
    w.p.seqlen_k = w.p.total_k = 0;
    w.b.k = w.b.v = NULL;
    refused_buffers(&w, FATTN_OK, "");
}

Test(buffers, slices_of_one_array_do_not_overlap)
{
    /* q, k, v and o interleaved along a row of one array: (B, S, 4, H, D). */
    world w = sound_world(0);
    w.p = sound();
    w.p.heads_k = 4;
    w.p.seqlen_k = 5;
    w.p.dim_v = 8;
    w.p.layout = FATTN_STRIDED;
    w.p.q = w.p.k = w.p.v = w.p.o = (fattn_strides){5 * 128, 128, 8};
    cr_assert_eq(fattn_problem_normalise(&w.p, &w.p), FATTN_OK);
    w.b.q = memory;
    w.b.k = memory + 32;
    w.b.v = memory + 64;
    w.b.o = memory + 96;
    refused_buffers(&w, FATTN_OK, "");
    w.b.o = memory + 92;
    refused_buffers(&w, FATTN_OVERLAP, "o overlaps v");
    w.b.o = memory + 100; /* its last head runs into the next row's q */
    refused_buffers(&w, FATTN_OVERLAP, "o overlaps q");
}

Test(buffers, lengths)
{
    int32_t cu[3] = {0, 5, 10};
    world w = sound_world(FATTN_CU_SEQLENS_Q);
    refused_buffers(&w, FATTN_NULL_POINTER, "cu_seqlens_q");
    w.b.cu_seqlens_q = cu;
    refused_buffers(&w, FATTN_OK, "");
    cu[0] = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "cu_seqlens_q[0] is -1");
    cu[0] = 0, cu[1] = 4, cu[2] = 3;
    refused_buffers(&w, FATTN_INVALID_DATA, "less than the 4 before it");
    cu[2] = 13;
    refused_buffers(&w, FATTN_INVALID_DATA, "cu_seqlens_q[2] is 13");
    cu[2] = 10;
    refused_buffers(&w, FATTN_INVALID_DATA, "a sequence of 6");

    int32_t used[2] = {7, 8};
    w = sound_world(FATTN_SEQUSED_K);
    w.b.seqused_k = used;
    refused_buffers(&w, FATTN_INVALID_DATA, "seqused_k[1] is 8");
    used[1] = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "seqused_k[1] is -1");
    used[1] = 0;
    refused_buffers(&w, FATTN_OK, "");
}

Test(buffers, padding_on_the_left)
{
    const int32_t starts[2] = {7, 3};
    int32_t used[2] = {7, 2}, table[2][4] = {{-1, -1, -1, -1}, {-1, 4, 0, 5}};
    world w = sound_world(FATTN_SEQSTART_K);
    refused_buffers(&w, FATTN_NULL_POINTER, "seqstart_k");
    w.b.seqstart_k = starts;
    refused_buffers(&w, FATTN_OK, "");
    fattn_sequence s = fattn_sequence_of(&w.p, &w.b, 1);
    cr_assert(s.sk == 4 && s.slot_k == 4 && s.k_row == 3 && s.k_position == 3);
    cr_assert_eq(fattn_start_k(&w.p, &w.b, 1), 3);
    cr_assert_eq(s.diagonal, 7 - 5 - 3);
    s = fattn_sequence_of(&w.p, &w.b, 0);
    cr_assert(s.sk == 0 && s.slot_k == 0);
    w = sound_world(FATTN_SEQSTART_K | FATTN_SEQUSED_K);
    w.b.seqstart_k = starts, w.b.seqused_k = used;
    refused_buffers(&w, FATTN_INVALID_DATA, "seqstart_k[1] is 3");
    used[1] = 7;
    refused_buffers(&w, FATTN_OK, "");
    const int32_t negative[2] = {-1, 0};
    w.b.seqstart_k = negative;
    refused_buffers(&w, FATTN_INVALID_DATA, "seqstart_k[0] is -1");
    w = sound_world(FATTN_SEQSTART_K | FATTN_PAGED);
    w.b.seqstart_k = starts, w.b.block_table = table[0];
    refused_buffers(&w, FATTN_OK, ""); /* entries of pages without keys that exist are not read */
    table[1][1] = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "block_table[1][1] is -1");
}

Test(buffers, pages)
{
    int32_t table[2][4] = {{0, 1, 2, 5}, {3, 4, 0, 99}};
    int32_t used[2] = {7, 6};
    world w = sound_world(FATTN_PAGED | FATTN_SEQUSED_K);
    w.b.block_table = table[0];
    w.b.seqused_k = used;
    refused_buffers(&w, FATTN_OK, ""); /* the entry past 6 keys is never read */
    used[1] = 7;
    refused_buffers(&w, FATTN_INVALID_DATA, "block_table[1][3] is 99");
    table[1][3] = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "block_table[1][3] is -1");
    table[1][3] = 6; /* of 6 pages */
    refused_buffers(&w, FATTN_INVALID_DATA, "block_table[1][3] is 6");
    w.p.window_left = 1; /* which page 0 of neither sequence is in */
    table[0][0] = -1;
    refused_buffers(
        &w, FATTN_INVALID_DATA,
        "block_table[0][0] is -1, not in 0..5 (FATTN_SEQSTART_K leaves out pages before");
    table[0][0] = 0;
    w.p.window_left = -1;
    w.b.o = (void *)((uintptr_t)w.b.k + 16);
    refused_buffers(&w, FATTN_OVERLAP, ", num_pages 6");
    w.b.o = memory + 3072;
    table[1][3] = 5;
    refused_buffers(&w, FATTN_OK, "");
}

Test(buffers, positions)
{
    world w = sound_world(FATTN_POSITIONS | FATTN_DROPOUT);
    refused_buffers(&w, FATTN_OK, "");
    w.b.q_offset = INT64_MAX;
    refused_buffers(&w, FATTN_INVALID_DATA, "q_offset");
    w.b.q_offset = 0, w.b.whole_k = -2;
    refused_buffers(&w, FATTN_INVALID_DATA, "whole_k");
    w = sound_world(FATTN_POSITIONS);
    const int64_t offsets[2] = {3, -(INT64_C(1) << 41)};
    w.b.k_offsets = offsets;
    refused_buffers(&w, FATTN_INVALID_DATA,
                    "k_offset of sequence 1 is -2199023255552, not in -2^40..2^40");

    w = sound_world(FATTN_POSITIONS | FATTN_DROPOUT);
    w.p.features |= FATTN_DROPOUT;
    w.p.dropout_p = 0.5;
    w.b.q_offset = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "dropout");
    w.b.q_offset = (INT64_C(1) << 33) - 5;
    refused_buffers(&w, FATTN_OK, "");
    w.b.q_offset++;
    refused_buffers(&w, FATTN_INVALID_DATA,
                    "q_offset puts the 5 rows of sequence 0 at positions from 8589934588 on: "
                    "with dropout positions must be in 0..2^33 - 1");
    w.b.q_offset = 0, w.b.k_offset = -1;
    refused_buffers(&w, FATTN_INVALID_DATA, "k_offset puts");
}

Test(buffers, sequences)
{
    const int32_t cu[3] = {1, 4, 9};
    const int32_t used[2] = {2, 5};
    world w =
        sound_world(FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K | FATTN_POSITIONS);
    w.b.cu_seqlens_q = w.b.cu_seqlens_k = cu;
    w.b.seqused_k = used;
    w.b.q_offset = 10;
    fattn_sequence s = fattn_sequence_of(&w.p, &w.b, 0);
    cr_assert_eq(s.sq, 3);
    cr_assert_eq(s.sk, 2);
    cr_assert_eq(s.slot_k, 3);
    cr_assert_eq(s.q_row, 1);
    cr_assert_eq(s.q_batch, 0);
    cr_assert_eq(s.diagonal, 2 - 3 + 10);
    cr_assert_eq(fattn_lse_index(&w.p, &s, 0, 3), 3 * 12 + 1);
    w.b.whole_q = 20, w.b.whole_k = 30;
    s = fattn_sequence_of(&w.p, &w.b, 1);
    cr_assert_eq(s.diagonal, 10 + 10);
    w.p.anchor = FATTN_TOP_LEFT;
    s = fattn_sequence_of(&w.p, &w.b, 1);
    cr_assert_eq(s.diagonal, 10);
}

/* --- Operands: against what the drawing of cases knows of them -------------------------------- */

static draw_id id_of(const char *name)
{
    int id = 0;
    while (id < DRAW_IDS && strcmp(draw_name((draw_id)id), name) != 0) {
        id++;
    }
    cr_assert(id < DRAW_IDS, "%s", name);
    return (draw_id)id;
}

/* Axes of the info, in the order of the drawing's: lse has (batch, sequence, head) there, arrays
 * axis 1. */
static void same_axes(const draw_tensor *t, draw_id id, const fattn_operand_info *info)
{
    static const int whole[] = {0, 1, 2, 3}, lse[] = {0, 2, 1}, slopes[] = {0, 1}, array[] = {1};
    const bool sums = id == DRAW_LSE || id == DRAW_DLSE;
    const int *const axes = info->rank == 4 ? whole : sums ? lse : info->rank == 2 ? slopes : array;
    int64_t last = 0;
    for (int a = 0; a < info->rank; a++) {
        const int64_t extent = t->extent[axes[a]], stride = t->stride[axes[a]];
        const bool summed = id == DRAW_DBIAS && stride == 0;
        cr_assert_eq(info->shape[a], summed ? 1 : extent, "%s, axis %d: %lld, not %lld", info->name,
                     a, (long long)info->shape[a], (long long)extent);
        cr_assert(extent <= 1 || !info->bytes || info->stride[a] == stride,
                  "%s, axis %d: stride %lld, not %lld", info->name, a, (long long)info->stride[a],
                  (long long)stride);
        last += (info->shape[a] - 1) * info->stride[a];
    }
    const bool empty = info->shape[0] * info->shape[1] * info->shape[2] * info->shape[3] == 0;
    cr_assert_eq(info->bytes, empty ? 0 : (last + 1) * t->size, "%s", info->name);
}

Test(operands, are_what_is_drawn)
{
    int64_t seen[DRAW_IDS] = {0};
    for (int64_t index = 0; index < 3000; index++) {
        draw_case c;
        int count = 0;
        uint32_t listed = 0;
        cr_assert(draw_problem(&c, 9, index) == 0 && draw_build(&c) == 0);
        cr_assert_eq(fattn_operand_count(&c.problem, &count), FATTN_OK, "%s", fattn_last_reason());
        for (int i = 0; i < count; i++) {
            fattn_operand_info info, found;
            fattn_operand_info_init(&info);
            fattn_operand_info_init(&found);
            cr_assert_eq(fattn_operand_get_info(&c.problem, i, &info), FATTN_OK);
            cr_assert_eq(fattn_operand_find(&c.problem, info.name, &found), FATTN_OK);
            cr_assert(memcmp(&info, &found, sizeof info) == 0);
            const draw_id id = id_of(info.name);
            const draw_tensor *const t = &c.tensors[id];
            void *pointer = NULL;
            memcpy(&pointer, (char *)&c.buffers + info.offset, sizeof pointer);
            cr_assert(pointer == draw_pointer(&c.buffers, id));
            listed |= 1u << id;
            if (!t->present) {
                cr_assert(!info.required && id >= DRAW_Q_OFFSETS && id <= DRAW_OFFSET, "%s",
                          info.name);
                continue;
            }
            seen[id]++;
            if (c.problem.batch > 0 || (id != DRAW_CU_Q && id != DRAW_CU_K)) { /* not read then */
                same_axes(t, id, &info);
            }
            cr_assert_eq(info.dtype, t->dtype, "%s", info.name);
            cr_assert_eq(info.element_bytes, t->size, "%s", info.name);
            const bool words = id == DRAW_SEED || id == DRAW_OFFSET;
            cr_assert_str_eq(info.type, t->dtype       ? fattn_dtype_name(t->dtype)
                                        : t->size == 1 ? "u8"
                                        : t->size == 4 ? "i32"
                                        : words        ? "u64"
                                                       : "i64");
            cr_assert_eq((uintptr_t)pointer % (uintptr_t)info.alignment, 0, "%s", info.name);
            cr_assert_eq(info.written, c.images[t->image].output, "%s", info.name);
            const bool optional = id >= DRAW_Q_OFFSETS && id <= DRAW_OFFSET;
            cr_assert_eq(info.required, info.bytes > 0 && !optional, "%s", info.name);
        }
        for (int id = 0; id < DRAW_IDS; id++) { /* outputs may be given without being asked for */
            const bool none =
                c.problem.dropout_p == 0 && (id == DRAW_SEED || id == DRAW_OFFSET); /* no dropout */
            const bool output = c.tensors[id].present && c.images[c.tensors[id].image].output;
            cr_assert(!c.tensors[id].present || output || none || listed >> id & 1, "%s",
                      draw_name(id));
        }
        draw_free(&c);
    }
    for (int id = 0; id < DRAW_IDS; id++) {
        cr_assert_gt(seen[id], 50, "%s was seen %lld times", draw_name((draw_id)id),
                     (long long)seen[id]);
    }
}

Test(operands, refusals)
{
    fattn_problem p = sound();
    fattn_operand_info info;
    fattn_operand_info_init(&info);
    int count = 0;
    cr_assert_eq(fattn_operand_count(&p, &count), FATTN_OK);
    cr_assert_eq(count, 4); /* q k v o */
    cr_assert_eq(fattn_operand_count(&p, NULL), FATTN_NULL_POINTER);
    cr_assert_eq(fattn_operand_count(NULL, &count), FATTN_NULL_POINTER);
    cr_assert_eq(fattn_operand_get_info(&p, 4, &info), FATTN_INVALID_ARGUMENT);
    cr_assert_eq(fattn_operand_get_info(&p, -1, &info), FATTN_INVALID_ARGUMENT);
    cr_assert_eq(fattn_operand_get_info(&p, 0, NULL), FATTN_NULL_POINTER);
    cr_assert_eq(fattn_operand_find(&p, "mask", &info), FATTN_INVALID_ARGUMENT);
    cr_assert_eq(fattn_operand_find(&p, NULL, &info), FATTN_NULL_POINTER);
    info.struct_size = 8;
    cr_assert_eq(fattn_operand_find(&p, "q", &info), FATTN_INVALID_STRUCT);
    fattn_operand_info_init(&info);
    p.features = FATTN_DROPOUT, p.dropout_p = 0.5;
    cr_assert_eq(fattn_operand_find(&p, "seed_ptr", &info), FATTN_OK);
    cr_assert_str_eq(info.type, "u64");
    p.dim = 0;
    cr_assert_eq(fattn_operand_count(&p, &count), FATTN_INVALID_SHAPE);

    char text[64], whole[600];
    const size_t length = fattn_last_reason_copy(whole, sizeof whole);
    cr_assert_str_eq(whole, fattn_last_reason());
    cr_assert_eq(length, strlen(whole));
    memset(text, 'x', sizeof text);
    cr_assert_eq(fattn_last_reason_copy(text, 4), length);
    cr_assert(strncmp(text, whole, 3) == 0 && text[3] == '\0' && text[4] == 'x');
    cr_assert_eq(fattn_last_reason_copy(text, 0), length);
    cr_assert_eq(fattn_last_reason_copy(NULL, 9), length);
}

/* --- Regions: against every address, one by one ----------------------------------------------- */

static void mark(const fattn_region *r, uint8_t *bytes)
{
    for (int64_t x = 0; x < r->extent[0]; x++)
        for (int64_t y = 0; y < r->extent[1]; y++)
            for (int64_t z = 0; z < r->extent[2]; z++)
                for (int64_t c = 0; c < r->run; c++)
                    bytes[(int64_t)r->base + x * r->stride[0] + y * r->stride[1] +
                          z * r->stride[2] + c]++;
}

static uint64_t state = 1;

static int64_t draw(int64_t n) { return (int64_t)((random_next(&state) >> 33) % (uint64_t)n); }

static fattn_region draw_region(void)
{
    fattn_region r = {.base = (uintptr_t)draw(64), .extent[3] = 1, .run = 1 + draw(4)};
    for (int a = 0; a < 3; a++) {
        r.extent[a] = draw(12) == 0 ? 0 : 1 + draw(4);
        r.stride[a] = 4 * draw(12);
    }
    return r;
}

Test(region, never_denies_an_overlap)
{
    int seen_apart = 0;
    for (int round = 0; round < 200000; round++) {
        uint8_t a_bytes[1024] = {0};
        uint8_t b_bytes[1024] = {0};
        const fattn_region a = draw_region();
        const fattn_region b = draw_region();
        bool shared = false;
        bool doubled = false;
        mark(&a, a_bytes);
        mark(&b, b_bytes);
        for (int i = 0; i < 1024; i++) {
            shared = shared || (a_bytes[i] && b_bytes[i]);
            doubled = doubled || a_bytes[i] > 1;
        }
        cr_assert(!shared || fattn_regions_overlap(&a, &b));
        cr_assert(!doubled || fattn_region_overlaps_itself(&a));
        seen_apart += !fattn_regions_overlap(&a, &b);
    }
    cr_assert_gt(seen_apart, 40000, "boxes that lie apart are mostly seen to: %d", seen_apart);
}

/* Spans against 128-bit arithmetic, which C11 lacks and every compiler of ours has. */
__extension__ typedef __int128 int128;

Test(region, spans_do_not_wrap)
{
    for (int round = 0; round < 200000; round++) {
        fattn_region r = {.run = 1 + draw(1000)};
        int128 exact = r.run;
        bool empty = false;
        for (int a = 0; a < 4; a++) {
            r.extent[a] = draw(8) == 0 ? 0 : (int64_t)(state >> (20 + draw(40)));
            r.stride[a] = (int64_t)(state >> (1 + draw(60)));
            exact += (int128)(r.extent[a] - 1) * r.stride[a];
            empty = empty || r.extent[a] == 0;
            (void)draw(2);
        }
        int64_t bytes = -1;
        const bool fits = fattn_region_span(&r, &bytes);
        if (empty) {
            cr_assert(fits && bytes == 0);
        } else {
            cr_assert_eq(fits, exact <= INT64_MAX);
            cr_assert(!fits || bytes == (int64_t)exact);
        }
    }
}
