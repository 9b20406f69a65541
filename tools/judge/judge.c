/* SPDX-License-Identifier: Apache-2.0 */
/* In three parts: running a row on its own device memory, the accuracy bound, and bytes that must
 * not change. */
#include "tools/judge/judge.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/status.h"

static void fail(judge_verdict *v, const char *format, ...) FATTN_PRINTF(2, 3);

/* Records a failure. Only the first one is reported. */
static void fail(judge_verdict *v, const char *format, ...)
{
    if (v->outcome == JUDGE_FAILED) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(v->reason, sizeof v->reason, format, arguments);
    va_end(arguments);
    v->outcome = JUDGE_FAILED;
}

static void fail_status(judge_verdict *v, const char *what, fattn_status status)
{
    fail(v, "%s: %s: %s", what, fattn_status_string(status), fattn_last_reason());
}

/* -------------------------------------------------------------------------------------------------
 * Running
 * ---------------------------------------------------------------------------------------------- */

enum { WORKSPACE_RING = 0xa5 };

/* The images of one run: on the device, and as copied back. */
typedef struct copy {
    fattn_device *device;
    const draw_case *c;
    unsigned char *device_bytes[DRAW_IDS], *bytes[DRAW_IDS];
    unsigned char *workspace; /* with a ring on both sides; NULL: none is passed */
    fattn_buffers buffers;
} copy;

static void copy_free(copy *k)
{
    for (int n = 0; n < DRAW_IDS; n++) {
        fattn_device_free(k->device, k->device_bytes[n]);
        free(k->bytes[n]);
    }
    fattn_device_free(k->device, k->workspace);
}

static fattn_status copy_to_device(copy *k, fattn_device *device, const draw_case *c)
{
    memset(k, 0, sizeof *k);
    k->device = device;
    k->c = c;
    k->buffers = c->buffers;
    fattn_status status = FATTN_OK;
    for (int n = 0; n < c->image_count && status == FATTN_OK; n++) {
        const size_t size = (size_t)c->images[n].size;
        void *memory = NULL;
        status = fattn_device_malloc(device, size, &memory);
        k->device_bytes[n] = memory;
        k->bytes[n] = malloc(size);
        if (status == FATTN_OK && k->bytes[n] == NULL) {
            status = fattn_fail_memory((int64_t)size, "an image");
        }
        if (status == FATTN_OK) {
            status = fattn_device_copy(device, memory, c->images[n].bytes, size, NULL);
        }
    }
    for (int id = 0; id < DRAW_IDS; id++) {
        const draw_tensor *const t = &c->tensors[id];
        if (t->present && status == FATTN_OK) {
            draw_point(&k->buffers, (draw_id)id, k->device_bytes[t->image] + t->offset);
        }
    }
    return status;
}

static fattn_status copy_from_device(copy *k)
{
    fattn_status status = fattn_stream_synchronize(k->device, NULL);
    for (int n = 0; n < k->c->image_count && status == FATTN_OK; n++) {
        status = fattn_device_copy(k->device, k->bytes[n], k->device_bytes[n],
                                   (size_t)k->c->images[n].size, NULL);
    }
    return status ? status : fattn_stream_synchronize(k->device, NULL);
}

/* Creates a workspace full of `fill`: its contents on entry must not matter. */
static fattn_status copy_add_workspace(copy *k, size_t bytes, int fill)
{
    const size_t size = bytes + 2 * DRAW_RING;
    unsigned char *const image = malloc(size);
    void *memory = NULL;
    if (image == NULL) {
        return fattn_fail_memory((int64_t)size, "the image of a workspace");
    }
    memset(image, WORKSPACE_RING, size);
    memset(image + DRAW_RING, fill, bytes);
    fattn_status status = fattn_device_malloc(k->device, size, &memory);
    k->workspace = memory;
    if (status == FATTN_OK) {
        status = fattn_device_copy(k->device, memory, image, size, NULL);
    }
    if (status == FATTN_OK) {
        status = fattn_stream_synchronize(k->device, NULL);
    }
    free(image);
    return status;
}

static fattn_status check_workspace_ring(const copy *k, size_t bytes, judge_verdict *v)
{
    unsigned char ring[2 * DRAW_RING];
    fattn_status status = fattn_device_copy(k->device, ring, k->workspace, DRAW_RING, NULL);
    if (status == FATTN_OK) {
        status = fattn_device_copy(k->device, ring + DRAW_RING, k->workspace + DRAW_RING + bytes,
                                   DRAW_RING, NULL);
    }
    if (status == FATTN_OK) {
        status = fattn_stream_synchronize(k->device, NULL);
    }
    for (int n = 0; n < 2 * DRAW_RING && status == FATTN_OK; n++) {
        if (ring[n] != WORKSPACE_RING) {
            fail(v, "a byte %s the workspace of %zu bytes changed",
                 n < DRAW_RING ? "before" : "after", bytes);
            break;
        }
    }
    return status;
}

/* Runs the plan once, from the case's images to k->bytes. The caller frees k. */
static fattn_status execute(const fattn_plan *plan, const draw_case *c, int fill, copy *k,
                            judge_verdict *v)
{
    const size_t workspace = (size_t)plan->tiling.workspace;
    const bool given = workspace > 0 && !c->without_workspace;
    fattn_status status = copy_to_device(k, plan->device, c);
    if (status == FATTN_OK && given) {
        status = copy_add_workspace(k, workspace, fill);
    }
    if (status == FATTN_OK) {
        status = fattn_execute(plan, &k->buffers, given ? k->workspace + DRAW_RING : NULL, NULL);
    }
    if (status == FATTN_OK) {
        status = copy_from_device(k);
    }
    if (status == FATTN_OK && given) {
        status = check_workspace_ring(k, workspace, v);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * The truth
 * ---------------------------------------------------------------------------------------------- */

void judge_truth_free(judge_truth *truth)
{
    fattn_naive_free(&truth->exact);
    fattn_naive_free(&truth->plain);
    truth->known = false;
}

static fattn_status find_truth(const draw_case *c, judge_truth *truth)
{
    if (truth->known) {
        return FATTN_OK;
    }
    const fattn_problem spelled = draw_spelled(c);
    fattn_status status = fattn_problem_normalise(&spelled, &truth->problem);
    if (status == FATTN_OK) {
        status = fattn_buffers_normalise(&truth->problem, &c->buffers, &truth->buffers);
    }
    if (status == FATTN_OK) {
        status = fattn_naive_run(&truth->problem, &truth->buffers, &truth->exact);
    }
    if (status == FATTN_OK) {
        status = fattn_comparator_run(&truth->problem, &truth->buffers, &truth->plain);
    }
    if (status != FATTN_OK) {
        judge_truth_free(truth);
    }
    truth->known = status == FATTN_OK;
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * The accuracy bound
 * ---------------------------------------------------------------------------------------------- */

typedef struct format {
    int digits, exponent_min, exponent_max; /* of normal numbers: 2^exponent_min .. < 2^(max + 1) */
} format;

static format format_of(fattn_dtype dtype)
{
    switch (dtype) {
    case FATTN_F16: return (format){11, -14, 15};
    case FATTN_BF16: return (format){8, -126, 127};
    case FATTN_F64: return (format){53, -1022, 1023};
    default: return (format){24, -126, 127};
    }
}

/* The spacing of a dtype's numbers around x. */
static double ulp(fattn_dtype dtype, double x)
{
    const format f = format_of(dtype);
    int exponent = 0;
    frexp(x, &exponent); /* |x| in [1/2, 1) 2^exponent */
    return ldexp(1,
                 (exponent - 1 > f.exponent_min ? exponent - 1 : f.exponent_min) - (f.digits - 1));
}

/* The terms of the tolerance, relative to A: u by input dtype, the amount per unit of X, and the
 * factor on the comparator's error. f64 is the oracle's own format, so the f32 comparator is no
 * measure there; rounding a few thousand summands is. */
typedef struct slack {
    double u, x, comparator;
    double cut; /* of x, the truncation by tensor cores */
} slack;

static slack slack_of(const fattn_problem *p)
{
    const double factor = p->op == FATTN_FORWARD ? 2 : 3;
    const double cut = 0x1p-24 * (double)(1 + (p->dim + 15) / 16);
    switch (fattn_naive_dtype_operand(p)) {
    case FATTN_F16: return (slack){0x1p-11, 0x1p-22 + cut, factor, cut};
    case FATTN_BF16: return (slack){0x1p-8, 0x1p-22 + cut, factor, cut};
    case FATTN_F64: return (slack){0x1p-44, 0x1p-50, 0, 0};
    default: return (slack){0x1p-22, 0x1p-22, factor, 0};
    }
}

/* Below the normal range every step of a sum rounds to a multiple of 2^-149, whatever the sum's
 * size. */
static double underflow(const fattn_problem *p)
{
    const int64_t group = p->heads_k ? p->heads_q / p->heads_k : 0;
    return p->dtype == FATTN_F64 ? 0 : 0x1p-150 * (double)(group * p->seqlen_q + p->seqlen_k);
}

/* An output that is judged slice by slice. (n0, n1) numbers the slices, each rows x columns. The
 * oracle stores them densely in this order. */
typedef struct output {
    draw_id id;
    uint32_t bit;
    const double *exact, *plain;
    const double *a; /* [n0][n1] */
    int64_t extent[4];
} output;

typedef struct trial {
    const draw_case *c;
    const judge_truth *truth;
    const copy *k;
    unsigned char *expected
        [DRAW_IDS]; /* images of outputs before the run; judged elements are then copied in */
    bool *nonfinite_v, *nonfinite; /* [b][hk]: v, or any input, has a value that is not finite */
    bool accumulate;
    double largest; /* over all expected values */
    judge_verdict *v;
} trial;

static double load(const trial *t, draw_id id, int64_t at)
{
    const draw_tensor *const tensor = &t->c->tensors[id];
    return fattn_naive_load(t->k->bytes[tensor->image] + tensor->offset + at * tensor->size,
                            tensor->dtype, 0);
}

/* Whether an element still has the initial bits of outputs. */
static bool unwritten(const trial *t, draw_id id, int64_t at)
{
    const draw_tensor *const tensor = &t->c->tensors[id];
    const unsigned char *const bytes =
        t->k->bytes[tensor->image] + tensor->offset + at * tensor->size;
    for (int64_t n = 0; n < tensor->size; n++) {
        if (bytes[n] != 0xff) {
            return false;
        }
    }
    return true;
}

/* Records that the run may change this element. */
static void mark(trial *t, draw_id id, int64_t at)
{
    const draw_tensor *const tensor = &t->c->tensors[id];
    const int64_t place = tensor->offset + at * tensor->size;
    memcpy(t->expected[tensor->image] + place, t->k->bytes[tensor->image] + place,
           (size_t)tensor->size);
}

static int64_t at_of(const trial *t, const output *out, const int64_t n[4])
{
    const bool scores = out->id == DRAW_DBIAS;
    return out->id == DRAW_DSINK ? n[1]
           : scores              ? draw_at(t->c, out->id, n[0], n[1], n[2], n[3])
                                 : draw_at(t->c, out->id, n[0], n[2], n[1], n[3]);
}

static const char *class_name(double x)
{
    return isnan(x) ? "NaN" : isinf(x) ? (x > 0 ? "inf" : "-inf") : "finite";
}

static bool same_class(double a, double b)
{
    return isnan(a) ? isnan(b) : isinf(a) ? a == b : isfinite(b);
}

/* Undoes overflow in the final rounding: an infinity in place of a value near the largest number
 * becomes a finite number again. */
static double unsaturated(double got, double exact, fattn_dtype dtype)
{
    const double edge = ldexp(1, format_of(dtype).exponent_max) * 2;
    const bool saturated = isinf(got) && isfinite(exact) && fabs(exact) > 0.99 * edge;
    return saturated ? copysign(fmax(edge, fabs(exact)), got) : got;
}

/* Whether non-finite inputs allow non-finite values in the slice where f64 has none. */
static bool may_be_nonfinite(const trial *t, const output *out, const int64_t n[4])
{
    const fattn_problem *const p = &t->truth->problem;
    if (out->id == DRAW_LSE) {
        return false;
    }
    if (out->id == DRAW_DBIAS || out->id == DRAW_DSINK) {
        bool any = false;
        for (int64_t m = 0; m < p->batch * p->heads_k; m++) {
            any |= t->nonfinite[m];
        }
        return any;
    }
    const bool of_keys = out->id == DRAW_DK || out->id == DRAW_DV;
    const int64_t hk = of_keys ? n[1] : n[1] / (p->heads_q / p->heads_k);
    return (p->op == FATTN_FORWARD ? t->nonfinite_v : t->nonfinite)[n[0] * p->heads_k + hk];
}

/* True if both are finite, so that the error counts. Otherwise compares their classes. */
static bool comparable(trial *t, const output *out, const int64_t n[4], double got, double exact,
                       double plain)
{
    if (isfinite(got) && isfinite(exact)) {
        return true;
    }
    if (same_class(got, exact)) {
        return false;
    }
    const bool out_of_range = isfinite(exact) && !isfinite(plain);
    const bool excusable = !isfinite(got) && may_be_nonfinite(t, out, n);
    if (out_of_range || excusable) {
        t->v->excused++;
        return false;
    }
    fail(t->v, "%s[%lld,%lld,%lld,%lld] is %s, expected %s (%.9g)", draw_name(out->id),
         (long long)n[0], (long long)n[1], (long long)n[2], (long long)n[3], class_name(got),
         class_name(exact), exact);
    return false;
}

/* Errors below `least` count as equal: half a unit of the output's final rounding, or the
 * truncation by tensor cores if that is larger. Otherwise a comparator that happens to be exact, as
 * for a row with all its weight on one key, would make every error look large. */
static void count_ratio(judge_ratios *ratios, double error, double plain, double least)
{
    if (error == 0 && plain == 0) {
        return;
    }
    const double steps = 16 * log2(fmax(error, least) / fmax(plain, least));
    const double bin = floor(steps + 0.5) + JUDGE_ONE;
    ratios->bins[bin < 0 ? 0 : bin >= JUDGE_BINS ? JUDGE_BINS - 1 : (int)bin]++;
    ratios->count++;
}

double judge_median(const judge_ratios *ratios)
{
    int64_t below = 0;
    for (int n = 0; n < JUDGE_BINS; n++) {
        below += ratios->bins[n];
        if (2 * below >= ratios->count && ratios->count > 0) {
            return exp2((n - JUDGE_ONE) / 16.0);
        }
    }
    return NAN;
}

/*
 * X of a slice: the largest X over the (batch, head) pairs that it sums over. X bounds |x| computed
 * from absolute products, because the rounding errors of a dot product are proportional to that. It
 * matters in forward too: a score, its difference from the row's reference and the product with the
 * unit are each rounded, by 2^-24 X, which changes a probability by that fraction
 * (docs/NUMERICS.md). The comparator's own error shows this on average, but not in every small
 * slice.
 */
static double x_of(const trial *t, const output *out, const int64_t n[4])
{
    const fattn_problem *const p = &t->truth->problem;
    const int64_t group = p->heads_k ? p->heads_q / p->heads_k : 0;
    int64_t b0 = n[0], b1 = n[0] + 1, h0 = n[1], h1 = n[1] + 1;
    if (out->id == DRAW_DK || out->id == DRAW_DV) {
        h0 = n[1] * group, h1 = h0 + group;
    }
    if (out->id == DRAW_DSINK || (out->id == DRAW_DBIAS && out->extent[0] == 1)) {
        b0 = 0, b1 = p->batch;
    }
    if (out->id == DRAW_DBIAS && out->extent[1] == 1) {
        h0 = 0, h1 = p->heads_q;
    }
    double x = 0;
    for (int64_t b = b0; b < b1; b++) {
        for (int64_t h = h0; h < h1; h++) {
            x = fmax(x, t->truth->exact.x_max[b * p->heads_q + h]);
        }
    }
    return x;
}

/* Statistics of a slice. */
typedef struct tally {
    double error, plain, largest, initial; /* maxima */
    double got, exact;                     /* where the error is largest */
    int64_t at[4], entries;
} tally;

/* Rows of a slice with expected values; *owned also counts the rows that must be zero. */
static int64_t rows_of(const trial *t, const output *out, int64_t b, int64_t *owned)
{
    const draw_sequence *const s = &t->c->sequences[b];
    switch (out->id) {
    case DRAW_DBIAS:
    case DRAW_DSINK: return *owned = out->extent[2];
    case DRAW_DK:
    case DRAW_DV: *owned = t->accumulate ? s->keys : s->own_keys; return s->keys;
    default: return *owned = s->rows;
    }
}

static void judge_element(trial *t, const output *out, const int64_t n[4], int64_t dense, tally *y)
{
    const fattn_dtype dtype = t->c->tensors[out->id].dtype;
    const int64_t at = at_of(t, out, n);
    const double initial = t->accumulate ? draw_get(t->c, out->id, at) : 0;
    const double exact = out->exact[dense] + initial;
    const double plain =
        initial == 0 ? out->plain[dense] : fattn_naive_round(out->plain[dense] + initial, dtype);
    const double got = unsaturated(load(t, out->id, at), exact, dtype);
    mark(t, out->id, at);
    if (unwritten(t, out->id, at)) {
        fail(t->v, "%s[%lld,%lld,%lld,%lld] was not written", draw_name(out->id), (long long)n[0],
             (long long)n[1], (long long)n[2], (long long)n[3]);
        return;
    }
    y->entries++;
    if (!comparable(t, out, n, got, exact, plain)) {
        return;
    }
    const double error = fabs(got - exact);
    if (!(error <= y->error)) {
        y->error = error, y->got = got, y->exact = exact;
        memcpy(y->at, n, sizeof y->at);
    }
    y->plain = isfinite(plain) ? fmax(y->plain, fabs(plain - exact)) : y->plain;
    y->largest = fmax(y->largest, fabs(exact));
    y->initial = fmax(y->initial, fabs(initial));
}

/* The error of o when probabilities are rounded to bf16 for the products. Those below bf16's normal
 * range, relative to the row's largest, count as 0, like other 16-bit operands. On a CPU,
 * batch-invariant rows also lose products below that range. */
static double probability_underflow(const trial *t, const output *out, int64_t b, int64_t h)
{
    const fattn_problem *const p = &t->truth->problem;
    if (fattn_naive_dtype_operand(p) != FATTN_BF16 || out->id != DRAW_O) {
        return 0;
    }
    const int64_t keys = t->c->sequences[b].keys, hk = h / (p->heads_q / p->heads_k);
    double largest = 0;
    for (int64_t j = t->c->sequences[b].start; j < keys; j++) {
        for (int64_t channel = 0; channel < p->dim_v; channel++) {
            const double v = fabs(draw_get(t->c, DRAW_V, draw_at(t->c, DRAW_V, b, j, hk, channel)));
            largest = isfinite(v) ? fmax(largest, v) : largest;
        }
    }
    if (p->features & FATTN_DESCALE) {
        const int64_t at = b * p->descale_stride[0] + hk * p->descale_stride[1];
        largest *= fabs(draw_get(t->c, DRAW_V_DESCALE, at));
    }
    const bool alone = p->features & FATTN_BATCH_INVARIANT && t->k->device->backend->host_memory;
    return 0x1p-126 * (double)keys * (largest + alone);
}

/* The largest finite value of an input with the heads of q or of k. */
static double largest_of(const trial *t, draw_id id, int64_t heads, int64_t dim)
{
    double largest = 0;
    for (int64_t b = 0; b < t->truth->problem.batch; b++) {
        const draw_sequence *const s = &t->c->sequences[b];
        const bool of_rows = id == DRAW_Q || id == DRAW_DOUT;
        const int64_t first = of_rows ? 0 : s->start, rows = of_rows ? s->rows : s->keys;
        for (int64_t n = first * heads * dim; n < rows * heads * dim; n++) {
            const int64_t at = draw_at(t->c, id, b, n / (heads * dim), n / dim % heads, n % dim);
            const double x = fabs(draw_get(t->c, id, at));
            largest = isfinite(x) ? fmax(largest, x) : largest;
        }
    }
    return largest;
}

/* The same for gradients on GPUs. Each pair in the sum may lose a probability below the normal
 * range, and a dS below it, since atomic additions flush subnormal numbers to 0. In f16 both are
 * operands of products, and rounded to multiples of 2^-24 below 2^-14. */
static double gradient_underflow(const trial *t, const output *out)
{
    const fattn_problem *const p = &t->truth->problem;
    const bool wide = p->dtype == FATTN_F32 || p->dtype == FATTN_F64;
    const bool on_host = t->k->device->backend->host_memory;
    if (wide || on_host || p->op != FATTN_BACKWARD || p->batch == 0) {
        return 0;
    }
    const double dout = largest_of(t, DRAW_DOUT, p->heads_q, p->dim_v);
    const double v = largest_of(t, DRAW_V, p->heads_k, p->dim_v);
    const double z = p->features & FATTN_DROPOUT ? 1 / (1 - fmin(p->dropout_p, 0.999)) : 1;
    const double ds = 1 + 2 * z * (double)p->dim_v * dout * v;
    const double rows = (double)(p->heads_q / p->heads_k * p->seqlen_q);
    const double all = (double)(p->batch * p->heads_q * p->seqlen_q) * (double)p->seqlen_k;
    const double scale = fabs(p->scale), half = p->dtype == FATTN_F16 ? 0x1p-25 : 0;
    switch (out->id) {
    case DRAW_DV: return (0x1p-126 + half) * rows * z * dout;
    case DRAW_DK:
        return (0x1p-126 * ds + half) * rows * scale * largest_of(t, DRAW_Q, p->heads_q, p->dim);
    case DRAW_DQ:
        return (0x1p-126 * ds + half) * (double)p->seqlen_k * scale *
               largest_of(t, DRAW_K, p->heads_k, p->dim);
    case DRAW_DBIAS: return 0x1p-126 * ds * all;
    default: return 0;
    }
}

/* How many entries of the first `rows` rows are wrongly 0: their exact values are above `noise`,
 * the slice's bound without the comparator's part, so neither cancellation nor underflow explains
 * the zero, and the comparator's values are not 0. */
static int64_t count_zeros(const trial *t, const output *out, int64_t n0, int64_t n1, int64_t rows,
                           double noise)
{
    const fattn_dtype dtype = t->c->tensors[out->id].dtype;
    int64_t zeros = 0, n[4] = {n0, n1, 0, 0};
    for (n[2] = 0; n[2] < rows; n[2]++) {
        for (n[3] = 0; n[3] < out->extent[3]; n[3]++) {
            const int64_t dense =
                ((n0 * out->extent[1] + n1) * out->extent[2] + n[2]) * out->extent[3] + n[3];
            const int64_t at = at_of(t, out, n);
            const double initial = t->accumulate ? draw_get(t->c, out->id, at) : 0;
            const double exact = out->exact[dense] + initial;
            zeros += load(t, out->id, at) == 0 && out->plain[dense] + initial != 0 &&
                     fabs(exact) > noise && fattn_naive_round(exact, dtype) != 0;
        }
    }
    return zeros;
}

static void judge_slice(trial *t, const output *out, int64_t n0, int64_t n1)
{
    const fattn_dtype dtype = t->c->tensors[out->id].dtype;
    const slack s = slack_of(&t->truth->problem);
    const double x = x_of(t, out, (const int64_t[4]){n0, n1, 0, 0});
    tally y = {0};
    int64_t owned = 0;
    const int64_t rows = rows_of(t, out, n0, &owned);
    int64_t n[4] = {n0, n1, 0, 0};
    for (n[2] = 0; n[2] < owned; n[2]++) {
        for (n[3] = 0; n[3] < out->extent[3]; n[3]++) {
            const int64_t dense =
                ((n0 * out->extent[1] + n1) * out->extent[2] + n[2]) * out->extent[3] + n[3];
            if (n[2] < rows) {
                judge_element(t, out, n, dense, &y);
                continue;
            }
            const int64_t at = at_of(t, out, n);
            mark(t, out->id, at);
            if (!(load(t, out->id, at) == 0)) {
                fail(t->v, "%s[%lld,%lld,%lld,%lld] is %g, expected 0 past seqused_k",
                     draw_name(out->id), (long long)n0, (long long)n1, (long long)n[2],
                     (long long)n[3], load(t, out->id, at));
            }
        }
    }
    const double a = out->a[n0 * out->extent[1] + n1] + y.initial;
    double noise = (s.u + s.x * x) * a + underflow(&t->truth->problem);
    double tolerance = s.comparator * y.plain + ulp(dtype, y.largest) + noise;
    int64_t zeros = count_zeros(t, out, n0, n1, rows, noise);
    const bool sparse = y.entries >= 16 && 4 * zeros > y.entries;
    if (!(y.error <= tolerance) || sparse) {
        const double lost = probability_underflow(t, out, n0, n1) +
                            gradient_underflow(t, out); /* slow to compute */
        tolerance += lost, noise += lost;
        zeros = sparse ? count_zeros(t, out, n0, n1, rows, noise) : zeros;
    }
    if (!(y.error <= tolerance)) {
        fail(t->v,
             "%s[%lld,%lld,%lld,%lld] is %.9g, expected %.9g: error %.3g, tolerance %.3g "
             "(comparator %.3g, A %.3g, X %.3g)",
             draw_name(out->id), (long long)y.at[0], (long long)y.at[1], (long long)y.at[2],
             (long long)y.at[3], y.got, y.exact, y.error, tolerance, y.plain, a, x);
    }
    if (y.entries >= 16 && 4 * zeros > y.entries) {
        fail(t->v, "%s[%lld,%lld]: %lld of %lld entries are wrongly 0", draw_name(out->id),
             (long long)n0, (long long)n1, (long long)zeros, (long long)y.entries);
    }
    t->v->worst = fmax(t->v->worst, tolerance > 0 ? y.error / tolerance : 0);
    t->largest = fmax(t->largest, y.largest);
    count_ratio(&t->v->ratios, y.error, y.plain, fmax(ulp(dtype, y.largest) / 2, s.cut * x * a));
}

/* The largest error of the scores of row i of query head h if subnormal f16 inputs count as 0, as
 * they may. */
static double score_underflow(const trial *t, int64_t b, int64_t h, int64_t i)
{
    const fattn_problem *const p = &t->truth->problem;
    const int64_t hk = h / (p->heads_q / p->heads_k);
    double most = 0;
    const draw_sequence *const sequence = &t->c->sequences[b];
    for (int64_t j = sequence->start; p->dtype == FATTN_F16 && j < sequence->keys; j++) {
        double lost = 0;
        for (int64_t c = 0; c < p->dim; c++) {
            const double q = fabs(draw_get(t->c, DRAW_Q, draw_at(t->c, DRAW_Q, b, i, h, c)));
            const double k = fabs(draw_get(t->c, DRAW_K, draw_at(t->c, DRAW_K, b, j, hk, c)));
            lost += q < 0x1p-14 || k < 0x1p-14 ? q * k : 0;
        }
        most = isfinite(lost) ? fmax(most, lost) : most;
    }
    return fabs(p->scale) * most;
}

/* lse has its own bound, row by row. */
static void judge_lse(trial *t, const output *out)
{
    const fattn_problem *const p = &t->truth->problem;
    const double unit = (p->dtype == FATTN_F64 ? 0x1p-52 : 0x1p-24) * (8 + (double)p->dim / 2);
    int64_t n[4] = {0};
    for (n[0] = 0; n[0] < p->batch; n[0]++) {
        for (n[1] = 0; n[1] < p->heads_q; n[1]++) {
            for (n[2] = 0; n[2] < t->c->sequences[n[0]].rows; n[2]++) {
                const int64_t dense = (n[0] * p->heads_q + n[1]) * p->seqlen_q + n[2];
                const int64_t at = at_of(t, out, n);
                const double got = load(t, DRAW_LSE, at), exact = out->exact[dense];
                mark(t, DRAW_LSE, at);
                const int64_t hk = n[1] / (p->heads_q / p->heads_k);
                if (!comparable(t, out, n, got, exact, out->plain[dense]) ||
                    t->nonfinite[n[0] * p->heads_k +
                                 hk]) { /* with softcap an infinite score has no bound */
                    continue;
                }
                double tolerance = unit * t->truth->exact.lse_scale[dense] +
                                   ulp(t->c->tensors[out->id].dtype, exact) / 2;
                const double error = fabs(got - exact);
                if (!(error <= tolerance)) {
                    tolerance += score_underflow(t, n[0], n[1], n[2]); /* slow to compute */
                }
                t->v->worst = fmax(t->v->worst, error / tolerance);
                t->largest = fmax(t->largest, fabs(exact));
                if (!(error <= tolerance)) {
                    fail(t->v,
                         "lse[%lld,%lld,%lld] is %.9g, expected %.9g: error %.3g, tolerance %.3g",
                         (long long)n[0], (long long)n[1], (long long)n[2], got, exact, error,
                         tolerance);
                }
            }
        }
    }
}

static void judge_outputs(trial *t)
{
    const fattn_naive *const e = &t->truth->exact, *const f = &t->truth->plain;
    const int64_t b = e->batch, hq = e->heads_q, hk = e->heads_k;
    const int64_t *const x = e->bias_extent;
    const output outputs[] = {
        {DRAW_O, FATTN_OUT_O, e->o, f->o, e->a_o, {b, hq, e->sq, e->dim_v}},
        {DRAW_LSE, FATTN_OUT_LSE, e->lse, f->lse, NULL, {b, hq, e->sq, 1}},
        {DRAW_DQ, FATTN_OUT_DQ, e->dq, f->dq, e->a_dq, {b, hq, e->sq, e->dim}},
        {DRAW_DK, FATTN_OUT_DK, e->dk, f->dk, e->a_dk, {b, hk, e->sk, e->dim}},
        {DRAW_DV, FATTN_OUT_DV, e->dv, f->dv, e->a_dv, {b, hk, e->sk, e->dim_v}},
        {DRAW_DBIAS, FATTN_OUT_DBIAS, e->dbias, f->dbias, e->a_dbias, {x[0], x[1], x[2], x[3]}},
        {DRAW_DSINK, FATTN_OUT_DSINK, e->dsink, f->dsink, e->a_dsink, {1, hq, 1, 1}},
    };
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
        const output *const out = &outputs[i];
        if (!(t->truth->problem.outputs & out->bit)) {
            continue;
        }
        if (out->id == DRAW_LSE) {
            judge_lse(t, out);
            continue;
        }
        for (int64_t n0 = 0; n0 < out->extent[0]; n0++) {
            for (int64_t n1 = 0; n1 < out->extent[1]; n1++) {
                judge_slice(t, out, n0, n1);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * What must not change
 * ---------------------------------------------------------------------------------------------- */

static const char *owner(const draw_case *c, int image)
{
    for (int id = 0; id < DRAW_IDS; id++) {
        if (c->tensors[id].present && c->tensors[id].image == image) {
            return draw_name((draw_id)id);
        }
    }
    return "an unused image";
}

static void check_untouched(trial *t)
{
    for (int n = 0; n < t->c->image_count; n++) {
        const draw_image *const image = &t->c->images[n];
        const unsigned char *const expected = image->output ? t->expected[n] : image->bytes;
        if (memcmp(expected, t->k->bytes[n], (size_t)image->size) == 0) {
            continue;
        }
        int64_t byte = 0;
        while (expected[byte] == t->k->bytes[n][byte]) {
            byte++;
        }
        fail(t->v, "%s: byte %lld of its %lld bytes changed, but belongs to no element to write",
             owner(t->c, n), (long long)byte, (long long)image->size);
    }
}

static void compare_runs(const draw_case *c, const copy *first, const copy *second,
                         judge_verdict *v)
{
    for (int n = 0; n < c->image_count; n++) {
        if (memcmp(first->bytes[n], second->bytes[n], (size_t)c->images[n].size) != 0) {
            fail(v, "%s differs bitwise between two runs", owner(c, n));
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Judging
 * ---------------------------------------------------------------------------------------------- */

static bool has_nonfinite(const draw_case *c, draw_id id, int64_t b, int64_t h)
{
    const draw_tensor *const t = &c->tensors[id];
    const bool of_keys = id == DRAW_K || id == DRAW_V;
    const int64_t rows = of_keys ? c->sequences[b].keys : c->sequences[b].rows;
    for (int64_t s = of_keys ? c->sequences[b].start : 0; t->present && s < rows; s++) {
        for (int64_t channel = 0; channel < t->extent[3]; channel++) {
            if (!isfinite(draw_get(c, id, draw_at(c, id, b, s, h, channel)))) {
                return true;
            }
        }
    }
    return false;
}

static void find_nonfinite(trial *t)
{
    const fattn_problem *const p = &t->c->problem;
    for (int64_t b = 0; t->c->family == DRAW_WILD && b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            const int64_t hk = h / (p->heads_q / p->heads_k), slice = b * p->heads_k + hk;
            t->nonfinite_v[slice] |= has_nonfinite(t->c, DRAW_V, b, hk);
            t->nonfinite[slice] |= t->nonfinite_v[slice] || has_nonfinite(t->c, DRAW_K, b, hk) ||
                                   has_nonfinite(t->c, DRAW_Q, b, h) ||
                                   has_nonfinite(t->c, DRAW_DOUT, b, h);
        }
    }
}

static void judge_copy(const draw_case *c, const judge_truth *truth, const copy *k,
                       judge_verdict *verdict)
{
    const size_t slices = (size_t)(c->problem.batch * c->problem.heads_k) + 1;
    trial t = {.c = c, .truth = truth, .k = k, .v = verdict};
    t.accumulate = (c->problem.features & FATTN_ACCUMULATE) != 0;
    t.nonfinite_v = calloc(slices, sizeof *t.nonfinite_v);
    t.nonfinite = calloc(slices, sizeof *t.nonfinite);
    bool complete = t.nonfinite_v != NULL && t.nonfinite != NULL;
    for (int n = 0; n < c->image_count; n++) {
        if (c->images[n].output) {
            t.expected[n] = malloc((size_t)c->images[n].size);
            complete = complete && t.expected[n] != NULL;
        }
        if (t.expected[n] != NULL) {
            memcpy(t.expected[n], c->images[n].bytes, (size_t)c->images[n].size);
        }
    }
    if (complete) {
        find_nonfinite(&t);
        judge_outputs(&t);
        check_untouched(&t);
        verdict->all_zero = t.largest == 0;
    } else {
        fail(verdict, "the judge ran out of memory");
    }
    for (int n = 0; n < c->image_count; n++) {
        free(t.expected[n]);
    }
    free(t.nonfinite_v);
    free(t.nonfinite);
}

/* The tile that the case requests from the row's list; {0, 0} leaves the choice to the planner. */
static fattn_tile requested_tile(const fattn_kernel *kernel, int wish)
{
    int entries = 0;
    while (kernel->tiles[entries].br != 0) {
        entries++;
    }
    return wish == 0 || entries == 0 ? (fattn_tile){0, 0} : kernel->tiles[(wish - 1) % entries];
}

static fattn_status make_plan(fattn_device *device, const fattn_kernel *kernel, const draw_case *c,
                              fattn_plan **plan)
{
    if (kernel == NULL) {
        return fattn_plan_create(device, &c->problem, plan);
    }
    fattn_wish wish = {.tile = requested_tile(kernel, c->tile)};
    const bool invariant = (c->problem.features & FATTN_BATCH_INVARIANT) != 0;
    if (kernel->split && c->problem.op == FATTN_FORWARD && !invariant) {
        wish.splits = c->splits;
    }
    return fattn_plan_create_with(device, &c->problem, kernel->name, &wish, plan);
}

static void describe_plan(const fattn_plan *plan, judge_verdict *verdict)
{
    const fattn_tiling *const t = &plan->tiling;
    verdict->br = t->br, verdict->bc = t->bc, verdict->splits = t->splits;
    verdict->tiles = t->q_blocks * t->k_blocks;
    if (t->workspace % 256 != 0) {
        fail(verdict, "the plan's workspace is %lld bytes, no multiple of 256",
             (long long)t->workspace);
    }
}

void judge_run(fattn_device *device, const fattn_kernel *kernel, const draw_case *c,
               judge_truth *truth, judge_verdict *verdict)
{
    memset(verdict, 0, sizeof *verdict);
    fattn_plan *plan = NULL;
    fattn_status status = make_plan(device, kernel, c, &plan);
    if (status == FATTN_UNSUPPORTED) {
        verdict->outcome = JUDGE_DECLINED;
        snprintf(verdict->reason, sizeof verdict->reason, "%s", fattn_last_reason());
        return;
    }
    if (status != FATTN_OK) {
        fail_status(verdict, "plan", status);
        return;
    }
    describe_plan(plan, verdict);
    status = find_truth(c, truth);
    if (status != FATTN_OK) {
        fail_status(verdict, "oracle", status);
        fattn_plan_destroy(plan);
        return;
    }
    copy first, second;
    status = execute(plan, c, 0xff, &first, verdict);
    if (status != FATTN_OK) {
        fail_status(verdict, "execute", status);
    } else {
        judge_copy(c, truth, &first, verdict);
    }
    const bool repeatable = c->problem.op == FATTN_FORWARD || device->backend->host_memory ||
                            c->problem.features & FATTN_DETERMINISTIC;
    if (status == FATTN_OK && c->twice && repeatable) {
        status = execute(plan, c, 0x3c, &second, verdict);
        if (status != FATTN_OK) {
            fail_status(verdict, "execute again", status);
        } else {
            compare_runs(c, &first, &second, verdict);
        }
        copy_free(&second);
    }
    copy_free(&first);
    fattn_plan_destroy(plan);
}
