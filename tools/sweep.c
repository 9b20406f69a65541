/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a sweep and the combinations of their values; see sweep.h. */
#include "tools/sweep.h"

#include <string.h>

static const char *const dir_words[] = {"fwd", "bwd", "decode", "plan", NULL};
static const char *const dtype_words[] = {"f32", "f16", "bf16", "f64", NULL};
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64};
static const char *const layout_words[] = {"bshd", "bhsd", NULL};
static const fattn_layout layouts[] = {FATTN_BSHD, FATTN_BHSD};

void sweep_options(sweep *s, option *rows)
{
    const int64_t most = INT64_MAX;
    const option table[] = {
        {"device NAME", "cpu, cuda:1, reference ...; default: FATTN_BACKEND", OPTION_WORDS,
         .value = &s->device},
        {"dir", "default fwd; decode is fwd with few queries", OPTION_CHOICES, .value = &s->dir,
         .words = dir_words},
        {"dtype", "default f32", OPTION_CHOICES, .value = &s->dtype, .words = dtype_words},
        {"b N", "batch; default 1", OPTION_INTEGERS, .value = &s->b, .min = 0, .max = most},
        {"hq N", "query heads; default 8", OPTION_INTEGERS, .value = &s->hq, .min = 0, .max = most},
        {"hk N", "key/value heads; default hq", OPTION_INTEGERS, .value = &s->hk, .min = 0,
         .max = most},
        {"sq N", "queries; default 1024, decode 1", OPTION_INTEGERS, .value = &s->sq, .min = 0,
         .max = most},
        {"sk N", "keys; default sq, decode 16384", OPTION_INTEGERS, .value = &s->sk, .min = 0,
         .max = most},
        {"d N", "dimension of queries and keys; default 128", OPTION_INTEGERS, .value = &s->d,
         .min = 1, .max = most},
        {"dv N", "dimension of values; default d", OPTION_INTEGERS, .value = &s->dv, .min = 1,
         .max = most},
        {"causal", "bottom-right; default 0", OPTION_SWITCHES, .value = &s->causal},
        {"layout", "default bshd", OPTION_CHOICES, .value = &s->layout, .words = layout_words},
        {"kernel NAME", "a row of the device's table; all: each that takes\nthe problem",
         OPTION_WORDS, .value = &s->kernel},
        {"bias", "f32 (1, Hq, Sq, Sk)", OPTION_SWITCHES, .value = &s->bias},
        {"mask", "(B, 1, Sq, Sk), an eighth masked at random", OPTION_SWITCHES, .value = &s->mask},
        {"alibi", "slopes (Hq)", OPTION_SWITCHES, .value = &s->alibi},
        {"softcap X", "0: none", OPTION_REALS, .value = &s->softcap},
        {"dropout P", "0: none", OPTION_REALS, .value = &s->dropout},
        {"threads N", "threads of the device", OPTION_INTEGERS, .value = &s->threads, .min = 1,
         .max = 1 << 20},
    };
    _Static_assert(sizeof table / sizeof table[0] == SWEEP_OPTIONS, "a row for every option");
    memcpy(rows, table, sizeof table);
}

/* Axes in the order of the options: the last varies fastest. */
enum {
    DEVICE,
    DIR,
    DTYPE,
    B,
    HQ,
    HK,
    SQ,
    SK,
    D,
    DV,
    CAUSAL,
    LAYOUT,
    KERNEL,
    BIAS,
    MASK,
    ALIBI,
    SOFTCAP,
    DROPOUT,
    THREADS,
    AXES
};
_Static_assert((int)AXES == (int)SWEEP_OPTIONS, "an axis for every option");

static void counts(const sweep *s, int64_t count[AXES])
{
    const int given[AXES] = {
        [DEVICE] = s->device.count,
        [DIR] = s->dir.count,
        [DTYPE] = s->dtype.count,
        [B] = s->b.count,
        [HQ] = s->hq.count,
        [HK] = s->hk.count,
        [SQ] = s->sq.count,
        [SK] = s->sk.count,
        [D] = s->d.count,
        [DV] = s->dv.count,
        [CAUSAL] = s->causal.count,
        [LAYOUT] = s->layout.count,
        [KERNEL] = s->kernel.count,
        [BIAS] = s->bias.count,
        [MASK] = s->mask.count,
        [ALIBI] = s->alibi.count,
        [SOFTCAP] = s->softcap.count,
        [DROPOUT] = s->dropout.count,
        [THREADS] = s->threads.count,
    };
    for (int axis = 0; axis < AXES; axis++) {
        count[axis] = given[axis] ? given[axis] : 1;
    }
}

int64_t sweep_count(const sweep *s)
{
    int64_t count[AXES], product = 1;
    counts(s, count);
    for (int axis = 0; axis < AXES; axis++) {
        /* Cut off where nobody waits for the end. */
        product *= product < INT64_C(1) << 50 ? count[axis] : 1;
    }
    return product;
}

/* The value of a list at this index, or what it is by default. */
static int64_t integer(const option_integers *list, int64_t index, int64_t preset)
{
    return list->count ? list->at[index] : preset;
}

static double real(const option_reals *list, int64_t index)
{
    return list->count ? list->at[index] : 0;
}
static int choice(const option_choices *list, int64_t index)
{
    return list->count ? list->at[index] : 0;
}

static const char *word(const option_words *list, int64_t index)
{
    return list->count ? list->at[index] : NULL;
}

static void shape(const sweep *s, const int64_t at[AXES], sweep_case *c)
{
    fattn_problem *const p = &c->problem;
    const bool decode = c->dir == SWEEP_DECODE;
    p->batch = integer(&s->b, at[B], 1);
    p->heads_q = integer(&s->hq, at[HQ], 8);
    p->heads_k = integer(&s->hk, at[HK], p->heads_q);
    p->seqlen_q = integer(&s->sq, at[SQ], decode ? 1 : 1024);
    p->seqlen_k = integer(&s->sk, at[SK], decode ? 16384 : p->seqlen_q);
    p->dim = integer(&s->d, at[D], 128);
    p->dim_v = integer(&s->dv, at[DV], p->dim);
}

static void features(const sweep *s, const int64_t at[AXES], sweep_case *c)
{
    fattn_problem *const p = &c->problem;
    p->softcap = real(&s->softcap, at[SOFTCAP]);
    p->dropout_p = real(&s->dropout, at[DROPOUT]);
    c->causal = choice(&s->causal, at[CAUSAL]);
    c->bias = choice(&s->bias, at[BIAS]);
    c->mask = choice(&s->mask, at[MASK]);
    c->alibi = choice(&s->alibi, at[ALIBI]);
    p->features = (c->causal ? FATTN_CAUSAL : 0) | (c->bias ? FATTN_BIAS : 0) |
                  (c->mask ? FATTN_MASK : 0) | (c->alibi ? FATTN_ALIBI : 0) |
                  (p->softcap != 0 ? FATTN_SOFTCAP : 0) | (p->dropout_p != 0 ? FATTN_DROPOUT : 0);

    /* Where a product passes 2^63 it wraps here, and the library refuses the lengths themselves. */
    const uint64_t sq = (uint64_t)p->seqlen_q, sk = (uint64_t)p->seqlen_k;
    const int64_t plane = (int64_t)(sq * sk);
    const int64_t bias[4] = {0, plane, p->seqlen_k, 1}, mask[4] = {plane, 0, p->seqlen_k, 1};
    if (c->bias) {
        memcpy(p->bias_stride, bias, sizeof bias);
    }
    if (c->mask) {
        memcpy(p->mask_stride, mask, sizeof mask);
    }
}

void sweep_at(const sweep *s, int64_t n, sweep_case *c)
{
    int64_t at[AXES];
    counts(s, at);
    for (int axis = AXES - 1; axis >= 0; axis--) {
        const int64_t radix = at[axis];
        at[axis] = n % radix;
        n /= radix;
    }
    *c = (sweep_case){
        .device = word(&s->device, at[DEVICE]),
        .kernel = word(&s->kernel, at[KERNEL]),
        .dir = (sweep_dir)choice(&s->dir, at[DIR]),
        .dir_word = dir_words[choice(&s->dir, at[DIR])],
        .dtype = dtype_words[choice(&s->dtype, at[DTYPE])],
        .threads = integer(&s->threads, at[THREADS], 0),
    };
    fattn_problem_init(&c->problem);
    c->problem.op = c->dir == SWEEP_BWD ? FATTN_BACKWARD : FATTN_FORWARD;
    c->problem.dtype = dtypes[choice(&s->dtype, at[DTYPE])];
    c->problem.layout = layouts[choice(&s->layout, at[LAYOUT])];
    shape(s, at, c);
    features(s, at, c);
}

int64_t sweep_bias_count(const fattn_problem *p) { return p->heads_q * p->seqlen_q * p->seqlen_k; }
int64_t sweep_mask_count(const fattn_problem *p) { return p->batch * p->seqlen_q * p->seqlen_k; }

double sweep_flops(const sweep_case *c)
{
    const fattn_problem *const p = &c->problem;
    const double sq = (double)p->seqlen_q, sk = (double)p->seqlen_k;
    const double seen = !c->causal ? sq * sk : sk >= sq ? sq * sk - sq * sq / 2 : sk * sk / 2;
    /* Forward: QK' and PV. Backward: QK' again, dO V', P' dO, dS K, dS' Q. */
    const double channels = p->op == FATTN_FORWARD ? (double)p->dim + (double)p->dim_v
                                                   : 3.0 * (double)p->dim + 2.0 * (double)p->dim_v;
    return 2 * (double)p->batch * (double)p->heads_q * seen * channels;
}

const char *sweep_mask_word(const sweep_case *c)
{
    static const char *const words[] = {"none", "causal", "mask", "causal+mask"};
    return words[(c->causal ? 1 : 0) + (c->mask ? 2 : 0)];
}
