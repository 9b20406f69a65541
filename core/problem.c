/* SPDX-License-Identifier: Apache-2.0 */
#include "core/problem.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/abi.h"
#include "core/dtype.h"
#include "core/feature.h"
#include "core/operands.h"
#include "core/philox.h"
#include "core/status.h"
#include "core/tensors.h"

#define STRIDE_LIMIT (INT64_MAX / 8) /* bytes fit in 63 bits */
#define ALIGNMENT_LIMIT 4096

void fattn_problem_init(fattn_problem *problem)
{
    memset(problem, 0, sizeof *problem);
    problem->struct_size = sizeof *problem;
    problem->op = FATTN_FORWARD;
    problem->dtype = FATTN_F32;
    problem->layout = FATTN_BSHD;
    problem->anchor = FATTN_BOTTOM_RIGHT;
    problem->batch = problem->heads_q = problem->heads_k = 1;
    problem->window_left = problem->window_right = -1;
    problem->pointer_alignment = 16;
}

static void init_problem(void *to) { fattn_problem_init(to); }

fattn_status fattn_problem_read(fattn_problem *to, const fattn_problem *from)
{
    static const fattn_abi abi = {
        .name = "fattn_problem",
        .sizes = {FATTN_ABI_END(fattn_problem, pointer_alignment), /* 0.1 */
                  FATTN_ABI_END(fattn_problem, descale_stride)},
        .init = init_problem,
    };
    _Static_assert(sizeof(fattn_problem) == FATTN_ABI_END(fattn_problem, descale_stride),
                   "the last of the sizes is this library's");
    return fattn_abi_read_grown(to, &abi, from);
}

fattn_dtype fattn_gradient_dtype(const fattn_problem *p, fattn_dtype input)
{
    return p->features & FATTN_ACCUMULATE && input != FATTN_F64 ? FATTN_F32 : input;
}

fattn_dtype fattn_statistics_dtype(const fattn_problem *p)
{
    return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
}

uint32_t fattn_dropout_threshold(double p)
{
    const double t = floor(p * 65536 + 0.5);
    if (p <= 0) {
        return 0;
    }
    if (p >= 1) {
        return 65536;
    }
    return t < 1 ? 1 : t > 65535 ? 65535 : (uint32_t)t;
}

/* --- Checks of single fields ------------------------------------------------------------------ */

static fattn_status check_enums(const fattn_problem *p)
{
    const fattn_dtype statistics = fattn_statistics_dtype(p);
    if (p->op != FATTN_FORWARD && p->op != FATTN_BACKWARD) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "op is %d, no fattn_op", (int)p->op);
    }
    if (fattn_dtype_size(p->dtype) == 0) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "dtype is %d, no fattn_dtype", (int)p->dtype);
    }
    if (p->dtype == FATTN_E4M3) {
        return fattn_fail(FATTN_UNSUPPORTED, "dtype is e4m3, a type of k and v alone");
    }
    if (p->dtype_o != 0 && p->dtype_o != p->dtype && p->dtype_o != statistics) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "dtype_o is %s (%d), neither dtype (%s) nor f32",
                          fattn_dtype_name(p->dtype_o), (int)p->dtype_o,
                          fattn_dtype_name(p->dtype));
    }
    const struct {
        const char *name;
        bool used, mixes, cached; /* mixes: not only f64 in an f64 problem. cached: may be e4m3 */
        fattn_dtype dtype;
    } others[] = {
        {"dtype_bias", p->features & FATTN_BIAS, p->dtype == FATTN_F64, false, p->dtype_bias},
        {"dtype_kv", true, false, true, p->dtype_kv},
        {"dtype_v", true, false, true, p->dtype_v},
    };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        const fattn_dtype dtype = others[i].dtype;
        if (!others[i].used || dtype == FATTN_DTYPE_DEFAULT || dtype == p->dtype) {
            continue;
        }
        if (fattn_dtype_size(dtype) == 0 || (dtype == FATTN_E4M3 && !others[i].cached)) {
            return fattn_fail(FATTN_INVALID_ARGUMENT,
                              "%s is %s (%d), none of f32, f16, bf16, f64%s", others[i].name,
                              fattn_dtype_name(dtype), (int)dtype,
                              others[i].cached ? ", e4m3" : "");
        }
        if (dtype == FATTN_E4M3 && p->op == FATTN_BACKWARD) {
            return fattn_fail(FATTN_UNSUPPORTED, "%s is e4m3 in a backward: e4m3 is forward only",
                              others[i].name);
        }
        if ((dtype == FATTN_F64 || p->dtype == FATTN_F64) && !others[i].mixes) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %s and dtype is %s: f64 does not mix",
                              others[i].name, fattn_dtype_name(dtype), fattn_dtype_name(p->dtype));
        }
    }
    if (p->layout != FATTN_BSHD && p->layout != FATTN_BHSD && p->layout != FATTN_STRIDED) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "layout is %d, no fattn_layout", (int)p->layout);
    }
    if (p->anchor != FATTN_BOTTOM_RIGHT && p->anchor != FATTN_TOP_LEFT) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "anchor is %d, no fattn_anchor", (int)p->anchor);
    }
    if (p->features & ~FATTN_FEATURES_ALL) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "features has unknown bits 0x%llx",
                          (unsigned long long)(p->features & ~FATTN_FEATURES_ALL));
    }
    if (p->reserved) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "reserved is %u, not 0", p->reserved);
    }
    return FATTN_OK;
}

static fattn_status check_feature_fields(const fattn_problem *p)
{
    fattn_status status = FATTN_OK;
    for (int bit = 0; !status && bit < FATTN_FEATURE_COUNT; bit++) {
        const fattn_feature_field *field = fattn_feature_row(bit)->fields;
        for (; !status && p->features >> bit & 1 && field->name; field++) {
            if (field->high) {
                status = fattn_check_range(field->name, fattn_feature_integer(p, field), field->low,
                                           field->high, FATTN_INVALID_SHAPE);
            }
        }
    }
    return status;
}

static fattn_status check_sizes(const fattn_problem *p)
{
    const bool paged = p->features & FATTN_PAGED;
    const struct {
        const char *name;
        bool used;
        int64_t value, low, high;
    } sizes[] = {
        {"batch", true, p->batch, 0, FATTN_SIZE_LIMIT},
        {"heads_q", true, p->heads_q, 0, FATTN_SIZE_LIMIT},
        {"heads_k", true, p->heads_k, p->heads_q > 0, FATTN_SIZE_LIMIT},
        {"seqlen_q", true, p->seqlen_q, 0, FATTN_SIZE_LIMIT},
        {"seqlen_k", true, p->seqlen_k, 0, FATTN_SIZE_LIMIT},
        {"dim", true, p->dim, 1, FATTN_PROBLEM_DIM_MAX},
        {"dim_v", true, p->dim_v, 1, FATTN_PROBLEM_DIM_MAX},
        {"total_k", p->features & FATTN_CU_SEQLENS_K && !paged, p->total_k, 0, FATTN_SIZE_LIMIT},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].used) {
            const fattn_status status = fattn_check_range(
                sizes[i].name, sizes[i].value, sizes[i].low, sizes[i].high, FATTN_INVALID_SHAPE);
            if (status) {
                return status;
            }
        }
    }
    const fattn_status status = check_feature_fields(p);
    if (status) {
        return status;
    }
    if (p->heads_k > 0 && p->heads_q % p->heads_k) {
        return fattn_fail(FATTN_INVALID_SHAPE, "heads_q is %lld, not a multiple of heads_k, %lld",
                          (long long)p->heads_q, (long long)p->heads_k);
    }
    if (paged && p->max_pages * p->page_size < p->seqlen_k) { /* both below 2^31: no overflow */
        return fattn_fail(FATTN_INVALID_SHAPE,
                          "max_pages is %lld: %lld pages of %lld hold less than seqlen_k, %lld",
                          (long long)p->max_pages, (long long)p->max_pages, (long long)p->page_size,
                          (long long)p->seqlen_k);
    }
    if (paged && p->block_table_stride != 0 && p->block_table_stride < p->max_pages) {
        return fattn_fail(FATTN_INVALID_STRIDE,
                          "block_table_stride is %lld, less than max_pages, %lld",
                          (long long)p->block_table_stride, (long long)p->max_pages);
    }
    return FATTN_OK;
}

static bool finite_in(const fattn_problem *p, double value)
{
    return p->dtype == FATTN_F64 ? isfinite(value) : fabs(value) <= (double)FLT_MAX;
}

fattn_status fattn_problem_check_alignment(const fattn_problem *p)
{
    if (p->pointer_alignment < 1 || p->pointer_alignment > ALIGNMENT_LIMIT ||
        p->pointer_alignment & (p->pointer_alignment - 1)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "pointer_alignment is %lld, not a power of two in 1..%d",
                          (long long)p->pointer_alignment, ALIGNMENT_LIMIT);
    }
    return FATTN_OK;
}

static fattn_status check_options(const fattn_problem *p)
{
    if (p->features & FATTN_SCALE && !finite_in(p, p->scale)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "scale is %g, not finite in %s", p->scale,
                          fattn_dtype_name(fattn_statistics_dtype(p)));
    }
    const double least = p->dtype == FATTN_F64 ? DBL_MIN : (double)FLT_MIN;
    if (p->features & FATTN_SOFTCAP && !(finite_in(p, p->softcap) && p->softcap >= least)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "softcap is %g, not finite and positive in %s",
                          p->softcap, fattn_dtype_name(fattn_statistics_dtype(p)));
    }
    if (p->features & FATTN_DROPOUT && !(p->dropout_p >= 0 && p->dropout_p <= 1)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "dropout_p is %g, not in 0..1", p->dropout_p);
    }
    if (p->features & FATTN_WINDOW && (p->window_left < -1 || p->window_right < -1)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "window_%s is %lld, neither -1 nor a number of keys",
                          p->window_left < -1 ? "left" : "right",
                          (long long)(p->window_left < -1 ? p->window_left : p->window_right));
    }
    const uint64_t both = FATTN_ALIBI | FATTN_BIAS;
    if (p->features & FATTN_ALIBI_BIAS && (p->features & both) != both) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "features has FATTN_ALIBI_BIAS without %s",
                          p->features & FATTN_BIAS ? "FATTN_ALIBI" : "FATTN_BIAS");
    }
    if (p->features & FATTN_ALIBI && p->alibi_batch_stride != 0 &&
        p->alibi_batch_stride < p->heads_q) {
        return fattn_fail(FATTN_INVALID_STRIDE,
                          "alibi_batch_stride is %lld, neither 0 nor at least heads_q, %lld",
                          (long long)p->alibi_batch_stride, (long long)p->heads_q);
    }
    if (p->features & FATTN_DROPOUT) { /* b, h are 32-bit counter words */
        fattn_status status =
            fattn_check_range("batch_offset", p->batch_offset, 0, FATTN_DROPOUT_BATCHES - p->batch,
                              FATTN_INVALID_ARGUMENT);
        if (!status) {
            status = fattn_check_range("head_offset", p->head_offset, 0,
                                       FATTN_DROPOUT_HEADS - p->heads_q, FATTN_INVALID_ARGUMENT);
        }
        if (status) {
            return status;
        }
    }
    return fattn_problem_check_alignment(p);
}

static fattn_status check_outputs(const fattn_problem *p)
{
    const uint32_t forward = FATTN_OUT_O | FATTN_OUT_LSE;
    const uint32_t backward =
        FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS | FATTN_OUT_DSINK;
    const uint32_t legal = p->op == FATTN_FORWARD ? forward : backward;
    if (p->outputs & ~legal) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "outputs has bits 0x%x that are no outputs of %s",
                          (unsigned)(p->outputs & ~legal),
                          p->op == FATTN_FORWARD ? "forward" : "backward");
    }
    if (p->outputs == FATTN_OUT_LSE) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "outputs is FATTN_OUT_LSE alone: forward writes o");
    }
    const struct {
        uint32_t output;
        uint64_t feature;
        const char *text;
    } needs[] = {
        {FATTN_OUT_DBIAS, FATTN_BIAS, "FATTN_OUT_DBIAS without FATTN_BIAS"},
        {FATTN_OUT_DSINK, FATTN_SINK, "FATTN_OUT_DSINK without FATTN_SINK"},
    };
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
        if (p->outputs & needs[i].output && !(p->features & needs[i].feature)) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "outputs has %s", needs[i].text);
        }
    }
    const struct {
        fattn_op op;
        uint64_t feature;
        fattn_status status;
        const char *text;
    } clashes[] = {
        {FATTN_FORWARD, FATTN_DLSE, FATTN_INVALID_ARGUMENT,
         "FATTN_DLSE, an input of backward, in a forward"},
        {FATTN_FORWARD, FATTN_ACCUMULATE, FATTN_INVALID_ARGUMENT, "FATTN_ACCUMULATE in a forward"},
        {FATTN_BACKWARD, FATTN_PAGED, FATTN_UNSUPPORTED,
         "FATTN_PAGED in a backward: pages are forward only"},
        {FATTN_BACKWARD, FATTN_BATCH_INVARIANT, FATTN_UNSUPPORTED,
         "FATTN_BATCH_INVARIANT in a backward: it is forward only"},
        {FATTN_BACKWARD, FATTN_DESCALE, FATTN_UNSUPPORTED,
         "FATTN_DESCALE in a backward: it is forward only"},
    };
    for (size_t i = 0; i < sizeof clashes / sizeof clashes[0]; i++) {
        if (p->op == clashes[i].op && p->features & clashes[i].feature) {
            return fattn_fail(clashes[i].status, "features has %s", clashes[i].text);
        }
    }
    return FATTN_OK;
}

/* --- Normal form ------------------------------------------------------------------------------ */

/* Fills in defaults. Numbers are legal by now, and fields without their bit at their defaults. */
static void fill_options(fattn_problem *p)
{
    const uint64_t f = p->features;
    p->dtype_o = p->dtype_o ? p->dtype_o : p->dtype;
    p->dtype_kv = p->dtype_kv ? p->dtype_kv : p->dtype;
    p->dtype_v = p->dtype_v ? p->dtype_v : p->dtype_kv;
    if (f & FATTN_BIAS && !p->dtype_bias) {
        p->dtype_bias = fattn_statistics_dtype(p);
    }
    if (p->outputs == 0) {
        p->outputs =
            p->op == FATTN_FORWARD ? FATTN_OUT_O : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    }
    if (!(f & FATTN_SCALE)) {
        p->scale = 1 / sqrt((double)p->dim);
    }
    if (f & FATTN_CAUSAL) {
        p->window_right = 0;
    }
    if (!(f & FATTN_CU_SEQLENS_Q)) {
        p->total_q = p->seqlen_q;
    }
    if (!(f & FATTN_CU_SEQLENS_K) || f & FATTN_PAGED) {
        p->total_k = p->seqlen_k;
    }
    if (f & FATTN_PAGED && p->block_table_stride == 0) {
        p->block_table_stride = p->max_pages;
    }
    if (p->dropout_p == 0) {
        p->features &= ~FATTN_DROPOUT;
        p->batch_offset = p->head_offset = 0;
    }
    if (!(p->outputs & FATTN_OUT_DBIAS)) { /* they may be set for a backward */
        memset(p->dbias_stride, 0, sizeof p->dbias_stride);
    }
}

/* Strides of a contiguous (batch, sequence, head, channel) or (batch, head, sequence, channel). The
 * batch stride is -1 if it does not fit. */
static fattn_strides contiguous(fattn_layout layout, bool packed, int64_t rows, int64_t heads,
                                int64_t channels)
{
    fattn_strides s = {.head = channels, .seq = heads * channels}; /* 2^31 * 576: no overflow */
    if (layout == FATTN_BHSD) {
        s = (fattn_strides){.seq = channels, .head = rows * channels};
    }
    if (packed) {
        s.batch = 0;
    } else if (__builtin_mul_overflow(rows * channels, heads, &s.batch) || s.batch > STRIDE_LIMIT) {
        s.batch = -1;
    }
    return s;
}

static fattn_status fill_strides(fattn_problem *p)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    for (int n = 0; n < FATTN_TENSORS; n++) {
        const fattn_tensor *const t = &tensors[n];
        fattn_strides s = {0};
        if (t->used && p->layout == FATTN_STRIDED) {
            s = t->strides;
            s.batch = t->packed ? 0 : s.batch;
        } else if (t->used) {
            s = contiguous(p->layout, t->packed, t->rows, t->heads, t->channels);
        }
        if (s.batch < 0 && p->layout != FATTN_STRIDED) {
            return fattn_fail(
                FATTN_OVERFLOW,
                "%s has %lld x %lld x %lld elements a batch entry: the stride overflows", t->name,
                (long long)t->rows, (long long)t->heads, (long long)t->channels);
        }
        memcpy((char *)p + t->offset, &s, sizeof s);
    }
    p->layout = FATTN_STRIDED;
    return FATTN_OK;
}

static fattn_status check_stride(const char *tensor, const char *axis, int64_t stride)
{
    if (stride < 0) {
        return fattn_fail(FATTN_INVALID_STRIDE, "%s stride of %s is %lld, negative", axis, tensor,
                          (long long)stride);
    }
    if (stride > STRIDE_LIMIT) {
        return fattn_fail(FATTN_OVERFLOW, "%s stride of %s is %lld: bytes overflow 63 bits", axis,
                          tensor, (long long)stride);
    }
    return FATTN_OK;
}

static fattn_status check_strides(const fattn_problem *p)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    for (int n = 0; n < FATTN_TENSORS; n++) {
        const fattn_strides *const s = &tensors[n].strides;
        fattn_status status = check_stride(tensors[n].name, "batch", s->batch);
        status = status ? status : check_stride(tensors[n].name, "seq", s->seq);
        status = status ? status : check_stride(tensors[n].name, "head", s->head);
        if (status) {
            return status;
        }
    }
    static const char *const axes[] = {"batch", "head", "query", "key"};
    const struct {
        const char *name;
        const int64_t *strides;
        int axes;
    } others[] = {{"bias", p->bias_stride, 4},
                  {"dbias", p->dbias_stride, 4},
                  {"mask", p->mask_stride, 4},
                  {"block_mask", p->block_mask_stride, 4},
                  {"k_descale and v_descale", p->descale_stride, 2}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        for (int a = 0; a < others[i].axes; a++) {
            const fattn_status status = check_stride(others[i].name, axes[a], others[i].strides[a]);
            if (status) {
                return status;
            }
        }
    }
    const fattn_status status = check_stride("block_table", "row", p->block_table_stride);
    return status ? status : check_stride("alibi_slopes", "batch", p->alibi_batch_stride);
}

/* The reason names the strides, in elements, and the shape for which they are too small. */
static fattn_status fail_overlap(const fattn_operand *operand)
{
    const fattn_region *const r = &operand->region;
    const int64_t size = fattn_dtype_size(operand->dtype), channels = r->run / size;
    char tail[32] = ")"; /* a tensor's shape also has its channels, whose stride is 1 */
    if (operand->kind == FATTN_OPERAND_TENSOR) {
        snprintf(tail, sizeof tail, ", %lld)", (long long)channels);
    }
    char strides[96], shape[96];
    const int axes = operand->kind == FATTN_OPERAND_TENSOR ? 3 : 4;
    size_t at = 0, to = 0;
    bool set = false;
    for (int a = 0; a < axes; a++) {
        const char *const before = a ? ", " : "";
        at += (size_t)snprintf(strides + at, sizeof strides - at, "%s%lld", before,
                               (long long)(r->stride[a] / size));
        to += (size_t)snprintf(shape + to, sizeof shape - to, "%s%lld", before,
                               (long long)r->extent[a]);
        set = set || r->stride[a] > 0;
    }
    return fattn_fail(FATTN_OVERLAP,
                      "%s overlaps itself: strides (%s)%s let two elements of shape (%s%s share an "
                      "address",
                      operand->name, strides, set ? "" : ", which are not set,", shape, tail);
}

/* Every operand has fewer than 2^63 bytes, and no output overlaps itself. */
static fattn_status check_operands(const fattn_problem *p)
{
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(p, NULL, operands);
    for (int i = 0; i < count; i++) {
        int64_t bytes = 0;
        if (!fattn_region_span(&operands[i].region, &bytes)) {
            return fattn_fail(FATTN_OVERFLOW, "%s spans 2^63 bytes or more", operands[i].name);
        }
        if (operands[i].output && fattn_region_overlaps_itself(&operands[i].region)) {
            return fail_overlap(&operands[i]);
        }
    }
    return FATTN_OK;
}

fattn_status fattn_problem_normalise(const fattn_problem *in, fattn_problem *out)
{
    static fattn_status (*const checks[])(const fattn_problem *) = {
        check_enums, check_sizes, check_options, fattn_problem_check_unused, check_outputs};
    fattn_problem p;
    fattn_status status = fattn_problem_read(&p, in);
    for (size_t i = 0; status == FATTN_OK && i < sizeof checks / sizeof checks[0]; i++) {
        status = checks[i](&p);
    }
    if (status) {
        return status;
    }
    fill_options(&p);
    status = fill_strides(&p);
    status = status ? status : check_strides(&p);
    status = status ? status : check_operands(&p);
    if (status == FATTN_OK) {
        *out = p;
    }
    return status;
}
