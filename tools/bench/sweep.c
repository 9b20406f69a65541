/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a sweep and the combinations of their values; see sweep.h. */
#define _POSIX_C_SOURCE 200809L /* unsetenv */

#include "tools/bench/sweep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/band.h"
#include "core/dtype.h"
#include "core/env.h"
#include "core/feature.h"
#include "core/kernel.h"
#include "core/status.h"
#include "tools/terminal/terminal.h"

static const char *const dir_words[] = {"fwd", "bwd", "decode", "plan", NULL};
static const char *const explained_words[] = {"fwd", "bwd", "decode", NULL};
static const double density_default = 0.5;
static const int64_t block_default = 128;

/* The axes, in the order of the options; the last varies fastest. */
enum {
    DEVICE,
    DIR,
    B,
    HQ,
    HK,
    SQ,
    SK,
    D,
    DV,
    PROBLEM, /* PROBLEM_OPTIONS axes */
    BIAS = PROBLEM + PROBLEM_OPTIONS,
    MASK,
    BLOCK_MASK,
    DENSITY,
    ALIBI,
    ALIBI_BIAS,
    SINK,
    DESCALE,
    CU_Q,
    CU_K,
    USED_Q,
    USED_K,
    START_K,
    PAGE_SIZE,
    Q_OFFSETS,
    K_OFFSETS,
    WHOLES_Q,
    WHOLES_K,
    LSE,
    SCORES,
    PROBABILITIES,
    DLSE,
    DBIAS,
    DSINK,
    KERNEL,
    THREADS,
    AXES
};
_Static_assert((int)AXES == (int)SWEEP_OPTIONS, "an axis for every option");

void sweep_options(sweep *s, sweep_use use)
{
    const bool runs = use == SWEEP_RUNS;
    const int64_t most = INT64_MAX;
    const option own[] = {
        [DEVICE] = {"device NAME", "cpu, cuda:1, reference ...; default: FATTN_BACKEND",
                    OPTION_WORDS, .value = &s->device},
        [DIR] = {"dir",
                 runs ? "default fwd; decode is fwd with few queries, plan only plans"
                      : "default fwd; decode is fwd with few queries",
                 OPTION_CHOICES, .value = &s->dir, .words = runs ? dir_words : explained_words},
        [B] = {"b N", "batch; default 1", OPTION_INTEGERS, .value = &s->b, .min = 0, .max = most},
        [HQ] = {"hq N", "query heads; default 8", OPTION_INTEGERS, .value = &s->hq, .min = 0,
                .max = most},
        [HK] = {"hk N", "key/value heads; default hq", OPTION_INTEGERS, .value = &s->hk, .min = 0,
                .max = most},
        [SQ] = {"sq N", "queries; default 1024, decode 1", OPTION_INTEGERS, .value = &s->sq,
                .min = 0, .max = most},
        [SK] = {"sk N", "keys; default sq, decode 16384", OPTION_INTEGERS, .value = &s->sk,
                .min = 0, .max = most},
        [D] = {"d N", "dimension of queries and keys; default 128", OPTION_INTEGERS, .value = &s->d,
               .min = 1, .max = most},
        [DV] = {"dv N", "dimension of values; default d", OPTION_INTEGERS, .value = &s->dv,
                .min = 1, .max = most},
        [BIAS] = {"bias", "(1, Hq, Sq, Sk)", OPTION_SWITCHES, .value = &s->bias},
        [MASK] = {"mask", "(B, 1, Sq, Sk), an eighth masked at random", OPTION_SWITCHES,
                  .value = &s->mask},
        [BLOCK_MASK] = {"block-mask",
                        "(1, 1, ceil(Sq / M), ceil(Sk / N)), at random;\n--block-size is 128,128",
                        OPTION_SWITCHES, .value = &s->block_mask},
        [DENSITY] = {"density P", "share of blocks kept; default 0.5", OPTION_REALS,
                     .value = &s->density},
        [ALIBI] = {"alibi", "slopes (Hq)", OPTION_SWITCHES, .value = &s->alibi},
        [ALIBI_BIAS] = {"alibi-bias", "slopes multiply the bias instead of distances",
                        OPTION_SWITCHES, .value = &s->alibi_bias},
        [SINK] = {"sink", "(Hq): logits of an extra key whose value is 0", OPTION_SWITCHES,
                  .value = &s->sink},
        [DESCALE] = {"descale", "(B, Hk): what the stored k and v are multiplied by",
                     OPTION_SWITCHES, .value = &s->descale},
        [CU_Q] = {"cu-seqlens-q", "packed queries; every second sequence is half as long",
                  OPTION_SWITCHES, .value = &s->cu_seqlens_q},
        [CU_K] = {"cu-seqlens-k", "packed keys, in the same way", OPTION_SWITCHES,
                  .value = &s->cu_seqlens_k},
        [USED_Q] = {"seqused-q N", "used rows of every sequence", OPTION_INTEGERS,
                    .value = &s->seqused_q, .min = 0, .max = INT32_MAX},
        [USED_K] = {"seqused-k N", "used keys of every sequence", OPTION_INTEGERS,
                    .value = &s->seqused_k, .min = 0, .max = INT32_MAX},
        [START_K] = {"seqstart-k N", "first key of every sequence; those before it are padding",
                     OPTION_INTEGERS, .value = &s->seqstart_k, .min = 0, .max = INT32_MAX},
        [PAGE_SIZE] = {"page-size N", "paged keys, N per page, in random order; 0: not paged",
                       OPTION_INTEGERS, .value = &s->page_size, .min = 0, .max = most},
        [Q_OFFSETS] = {"q-offsets", "an array: every second sequence's is half of --q-offset",
                       OPTION_SWITCHES, .value = &s->places[SWEEP_Q_OFFSETS]},
        [K_OFFSETS] = {"k-offsets", "the same for --k-offset", OPTION_SWITCHES,
                       .value = &s->places[SWEEP_K_OFFSETS]},
        [WHOLES_Q] = {"wholes-q", "the same for --whole-q", OPTION_SWITCHES,
                      .value = &s->places[SWEEP_WHOLES_Q]},
        [WHOLES_K] = {"wholes-k", "the same for --whole-k", OPTION_SWITCHES,
                      .value = &s->places[SWEEP_WHOLES_K]},
        [LSE] = {"lse", "forward also writes lse", OPTION_SWITCHES, .value = &s->lse},
        [SCORES] = {"scores",
                    runs ? "also fattn_inspect(), which writes them on one thread"
                         : "also the size of the scores that fattn_inspect() writes",
                    OPTION_SWITCHES, .value = &s->scores},
        [PROBABILITIES] = {"probabilities", "the same for probabilities", OPTION_SWITCHES,
                           .value = &s->probabilities},
        [DLSE] = {"dlse", "backward also reads the gradient of lse", OPTION_SWITCHES,
                  .value = &s->dlse},
        [DBIAS] = {"dbias", "backward also writes dbias", OPTION_SWITCHES, .value = &s->dbias},
        [DSINK] = {"dsink", "backward also writes dsink", OPTION_SWITCHES, .value = &s->dsink},
        [KERNEL] = {"kernel NAME", "a row of the device's table; all: each that takes\nthe problem",
                    OPTION_WORDS, .value = &s->kernel},
        [THREADS] = {"threads N", "threads of a CPU device", OPTION_INTEGERS, .value = &s->threads,
                     .min = 1, .max = 1024},
    };
    memcpy(s->rows, own, sizeof own);
    problem_options_rows(&s->problem, false, s->rows + PROBLEM);
}

/* -------------------------------------------------------------------------------------------------
 * Options without effect
 * ---------------------------------------------------------------------------------------------- */

bool sweep_has(const sweep *s, sweep_dir dir)
{
    bool found = s->dir.count == 0 && dir == SWEEP_FWD;
    for (int i = 0; i < s->dir.count; i++) {
        found = found || s->dir.at[i] == (int)dir;
    }
    return found;
}

static bool any(const option_choices *list)
{
    bool found = false;
    for (int i = 0; i < list->count; i++) {
        found = found || list->at[i];
    }
    return found;
}

static bool any_number(const option_integers *list)
{
    bool found = false;
    for (int i = 0; i < list->count; i++) {
        found = found || list->at[i] != 0;
    }
    return found;
}

bool sweep_inspects(const sweep *s) { return any(&s->scores) || any(&s->probabilities); }

bool sweep_check(const sweep *s, const char *command)
{
    const bool backward = sweep_has(s, SWEEP_BWD),
               forward = s->dir.count > backward || !s->dir.count;
    const bool inspects = sweep_has(s, SWEEP_FWD) || sweep_has(s, SWEEP_DECODE);
    const problem_options *const p = &s->problem;
    const struct {
        bool given;
        const char *name;
        bool present;
        const char *needs;
    } rules[] = {
        {any(&s->places[SWEEP_Q_OFFSETS]), "--q-offsets", p->list[PROBLEM_Q_OFFSET].count,
         "--q-offset"},
        {any(&s->places[SWEEP_K_OFFSETS]), "--k-offsets", p->list[PROBLEM_K_OFFSET].count,
         "--k-offset"},
        {any(&s->places[SWEEP_WHOLES_Q]), "--wholes-q", p->list[PROBLEM_WHOLE_Q].count,
         "--whole-q"},
        {any(&s->places[SWEEP_WHOLES_K]), "--wholes-k", p->list[PROBLEM_WHOLE_K].count,
         "--whole-k"},
        {any(&s->scores), "--scores", inspects, "--dir fwd or decode"},
        {any(&s->probabilities), "--probabilities", inspects, "--dir fwd or decode"},
        {any(&s->alibi_bias), "--alibi-bias", any(&s->alibi) && any(&s->bias),
         "--alibi and --bias"},
        {s->density.count, "--density", any(&s->block_mask), "--block-mask"},
        {s->lse.count, "--lse", forward, "a forward --dir"},
        {s->dlse.count, "--dlse", backward, "--dir bwd"},
        {s->dbias.count, "--dbias", backward && any(&s->bias), "--dir bwd and --bias"},
        {s->dsink.count, "--dsink", backward && any(&s->sink), "--dir bwd and --sink"},
        {any(&s->cu_seqlens_k), "--cu-seqlens-k", !any_number(&s->page_size),
         "keys that are not paged"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].given && !rules[i].present) {
            tool_usage(command, "%s needs %s", rules[i].name, rules[i].needs);
            return false;
        }
    }
    for (int i = 0; i < s->density.count; i++) {
        if (!(s->density.at[i] >= 0 && s->density.at[i] <= 1)) {
            tool_usage(command, "--density: %g is not in 0..1", s->density.at[i]);
            return false;
        }
    }
    return problem_options_check(&s->problem, command,
                                 (any(&s->bias) ? FATTN_BIAS : 0) |
                                     (any(&s->alibi) ? FATTN_ALIBI : 0) |
                                     (any(&s->alibi_bias) ? FATTN_ALIBI_BIAS : 0) |
                                     (any(&s->block_mask) ? FATTN_BLOCK_MASK : 0),
                                 forward, backward);
}

/* -------------------------------------------------------------------------------------------------
 * Combinations
 * ---------------------------------------------------------------------------------------------- */

static void counts(const sweep *s, int64_t count[AXES])
{
    for (int axis = 0; axis < AXES; axis++) {
        const bool problem = axis >= PROBLEM && axis < PROBLEM + PROBLEM_OPTIONS;
        const int *const list = s->rows[axis].value; /* whose first member is its length */
        const int given = problem ? problem_options_count(&s->problem, axis - PROBLEM)
                          : list  ? *list
                                  : 0; /* not an option of this command */
        count[axis] = given ? given : 1;
    }
}

int64_t sweep_count(const sweep *s)
{
    int64_t count[AXES], product = 1;
    counts(s, count);
    for (int axis = 0; axis < AXES; axis++) {
        /* Stops growing far beyond what anyone runs, so that it does not overflow. */
        product *= product < INT64_C(1) << 50 ? count[axis] : 1;
    }
    return product;
}

/* The value of a list at this index; for an empty list the default, here and in the next two. */
static int64_t integer(const option_integers *list, int64_t index, int64_t preset)
{
    return list->count ? list->at[index] : preset;
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

int64_t sweep_length(int64_t longest, bool packed, int64_t b)
{
    return packed && b % 2 ? longest - longest / 2 : longest;
}

/* A product beyond 2^63 wraps, here and below; the library then refuses the lengths themselves. */
static int64_t times(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

static int64_t blocks(int64_t length, int64_t side) { return length / side + (length % side != 0); }

static int64_t total(int64_t batch, int64_t longest)
{
    return (int64_t)((uint64_t)times(batch - batch / 2, longest) +
                     (uint64_t)times(batch / 2, sweep_length(longest, true, 1)));
}

static void ragged(const sweep *s, const int64_t at[AXES], sweep_case *c)
{
    fattn_problem *const p = &c->problem;
    const int64_t page = integer(&s->page_size, at[PAGE_SIZE], 0);
    if (choice(&s->cu_seqlens_q, at[CU_Q])) {
        p->features |= FATTN_CU_SEQLENS_Q;
        p->total_q = total(p->batch, p->seqlen_q);
    }
    if (choice(&s->cu_seqlens_k, at[CU_K])) {
        p->features |= FATTN_CU_SEQLENS_K;
        p->total_k = total(p->batch, p->seqlen_k);
    }
    c->used_q = integer(&s->seqused_q, at[USED_Q], 0);
    c->used_k = integer(&s->seqused_k, at[USED_K], 0);
    c->start_k = integer(&s->seqstart_k, at[START_K], 0);
    p->features |= (s->seqused_q.count ? FATTN_SEQUSED_Q : 0) |
                   (s->seqused_k.count ? FATTN_SEQUSED_K : 0) |
                   (s->seqstart_k.count ? FATTN_SEQSTART_K : 0) | (page ? FATTN_PAGED : 0);
    if (page) {
        p->page_size = page;
        p->max_pages = blocks(p->seqlen_k, page);
        p->num_pages = times(p->batch, p->max_pages);
    }
}

static void tensors(const sweep *s, const int64_t at[AXES], sweep_case *c)
{
    fattn_problem *const p = &c->problem;
    const int64_t plane = times(p->seqlen_q, p->seqlen_k);
    const int64_t bias[4] = {0, plane, p->seqlen_k, 1}, mask[4] = {plane, 0, p->seqlen_k, 1};
    const bool dbias = choice(&s->dbias, at[DBIAS]), backward = c->dir == SWEEP_BWD;

    if (choice(&s->bias, at[BIAS])) {
        p->features |= FATTN_BIAS;
        memcpy(p->bias_stride, bias, sizeof bias);
        memcpy(p->dbias_stride, bias, dbias ? sizeof bias : 0);
    }
    if (choice(&s->mask, at[MASK])) {
        p->features |= FATTN_MASK;
        memcpy(p->mask_stride, mask, sizeof mask);
    }
    p->features |= (choice(&s->alibi, at[ALIBI]) ? FATTN_ALIBI : 0) |
                   (choice(&s->alibi_bias, at[ALIBI_BIAS]) ? FATTN_ALIBI_BIAS : 0) |
                   (choice(&s->sink, at[SINK]) ? FATTN_SINK : 0) |
                   (choice(&s->descale, at[DESCALE]) ? FATTN_DESCALE : 0) |
                   (choice(&s->block_mask, at[BLOCK_MASK]) ? FATTN_BLOCK_MASK : 0) |
                   (backward && choice(&s->dlse, at[DLSE]) ? FATTN_DLSE : 0);
    if (p->features & FATTN_DESCALE) {
        p->descale_stride[0] = p->heads_k, p->descale_stride[1] = 1;
    }
    if (!backward && choice(&s->lse, at[LSE])) {
        p->outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    }
    const bool dsink = backward && p->features & FATTN_SINK && choice(&s->dsink, at[DSINK]);
    const bool given = backward && p->features & FATTN_BIAS && dbias;
    if (dsink || given) {
        p->outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | (dsink ? FATTN_OUT_DSINK : 0) |
                     (given ? FATTN_OUT_DBIAS : 0);
    }
}

static void block_mask(const sweep *s, const int64_t at[AXES], sweep_case *c)
{
    fattn_problem *const p = &c->problem;
    if (!(p->features & FATTN_BLOCK_MASK)) {
        return;
    }
    c->density = s->density.count ? s->density.at[at[DENSITY]] : density_default;
    p->block_m = p->block_m ? p->block_m : block_default;
    p->block_n = p->block_n ? p->block_n : block_default;
    p->block_mask_stride[2] = blocks(p->seqlen_k, p->block_n);
    p->block_mask_stride[3] = 1;
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
        .threads = integer(&s->threads, at[THREADS], 0),
        .density = 1,
    };
    fattn_problem_init(&c->problem);
    fattn_buffers_init(&c->buffers);
    c->problem.op = c->dir == SWEEP_BWD ? FATTN_BACKWARD : FATTN_FORWARD;
    shape(s, at, c);
    ragged(s, at, c);
    tensors(s, at, c);
    problem_options_apply(&s->problem, at + PROBLEM, &c->problem, &c->buffers);
    block_mask(s, at, c);
    for (int i = 0; i < SWEEP_PLACES; i++) {
        c->places[i] = choice(&s->places[i], at[Q_OFFSETS + i]);
    }
    if (c->dir == SWEEP_FWD || c->dir == SWEEP_DECODE) {
        c->inspected[FATTN_SCORES] = choice(&s->scores, at[SCORES]);
        c->inspected[FATTN_PROBABILITIES] = choice(&s->probabilities, at[PROBABILITIES]);
    }
}

/* -------------------------------------------------------------------------------------------------
 * What a case holds
 * ---------------------------------------------------------------------------------------------- */

bool sweep_all_kernels(const sweep_case *c) { return c->kernel && strcmp(c->kernel, "all") == 0; }

fattn_status sweep_open(const sweep_case *c, fattn_device **device)
{
    const fattn_problem *const p = &c->problem;
    if (c->used_q > p->seqlen_q || c->used_k > p->seqlen_k) {
        const bool keys = c->used_q <= p->seqlen_q;
        return fattn_fail(FATTN_INVALID_DATA, "seqused_%c is %" PRId64 ", not in 0..%" PRId64,
                          keys ? 'k' : 'q', keys ? c->used_k : c->used_q,
                          keys ? p->seqlen_k : p->seqlen_q);
    }
    fattn_device_options options;
    fattn_device_options_init(&options);
    if (c->threads) {
        unsetenv("FATTN_NUM_THREADS"); /* which would override it */
        fattn_env_reload();
        options.threads = c->threads;
    }
    return fattn_device_open_with(c->device, &options, device);
}

int64_t sweep_place(const sweep_case *c, int which, int64_t b)
{
    const fattn_buffers *const buf = &c->buffers;
    const int64_t scalars[SWEEP_PLACES] = {buf->q_offset, buf->k_offset, buf->whole_q,
                                           buf->whole_k};
    return sweep_length(scalars[which], c->places[which], b);
}

int64_t sweep_bias_count(const fattn_problem *p) { return p->heads_q * p->seqlen_q * p->seqlen_k; }
int64_t sweep_mask_count(const fattn_problem *p) { return p->batch * p->seqlen_q * p->seqlen_k; }
int64_t sweep_block_count(const fattn_problem *p)
{
    return blocks(p->seqlen_q, p->block_m) * blocks(p->seqlen_k, p->block_n);
}

/* How many queries and keys sequence b has. Padding before its first key counts as keys. */
static void lengths(const sweep_case *c, int64_t b, int64_t *sq, int64_t *sk)
{
    const fattn_problem *const p = &c->problem;
    *sq = sweep_length(p->seqlen_q, p->features & FATTN_CU_SEQLENS_Q, b);
    *sk = sweep_length(p->seqlen_k, p->features & FATTN_CU_SEQLENS_K, b);
    *sq = p->features & FATTN_SEQUSED_Q && c->used_q < *sq ? c->used_q : *sq;
    *sk = p->features & FATTN_SEQUSED_K && c->used_k < *sk ? c->used_k : *sk;
}

int64_t sweep_first_key(const sweep_case *c, int64_t b)
{
    int64_t sq, sk;
    lengths(c, b, &sq, &sk);
    return c->start_k < sk ? c->start_k : sk;
}

/* Pairs of sequence b that its band keeps: row by row where that is no formula. */
static double pairs_of(const sweep_case *c, int64_t b)
{
    fattn_problem p = c->problem;
    p.window_right = p.features & FATTN_CAUSAL ? 0 : p.window_right;
    int64_t rows, keys;
    lengths(c, b, &rows, &keys);
    const int64_t first = sweep_first_key(c, b);
    const double sq = (double)rows, sk = (double)(keys - first);
    if (!fattn_is_banded(&p)) {
        return sq * sk;
    }
    const fattn_reach reach = fattn_band_reach(&p);
    if (reach.left < 0 && reach.right == 0 && !(p.features & FATTN_POSITIONS) &&
        p.anchor != FATTN_TOP_LEFT) {
        return sk >= sq ? sq * sk - sq * sq / 2 : sk * sk / 2;
    }
    const int64_t k_offset = sweep_place(c, SWEEP_K_OFFSETS, b);
    fattn_sequence s = {.sq = rows,
                        .sk = keys,
                        .diagonal = sweep_place(c, SWEEP_Q_OFFSETS, b) - k_offset,
                        .k_position = k_offset};
    if (p.anchor != FATTN_TOP_LEFT) {
        const int64_t whole_q = sweep_place(c, SWEEP_WHOLES_Q, b);
        const int64_t whole_k = sweep_place(c, SWEEP_WHOLES_K, b);
        s.diagonal += (whole_k < 0 ? keys : whole_k) - (whole_q < 0 ? rows : whole_q);
    }
    const fattn_band band = fattn_band_of(&p, &s);
    double pairs = 0;
    for (int64_t i = 0; i < rows; i++) {
        fattn_range seen = fattn_band_row(&band, i);
        seen.first = seen.first < first ? first : seen.first;
        pairs += seen.first < seen.past ? (double)(seen.past - seen.first) : 0;
    }
    return pairs;
}

double sweep_flops(const sweep_case *c)
{
    const fattn_problem *const p = &c->problem;
    /* Packed sequences have two lengths: full at even b, half at odd b. */
    const double odd = (double)(p->batch / 2), even = (double)p->batch - odd;
    const double pairs = even * pairs_of(c, 0) + (odd > 0 ? odd * pairs_of(c, 1) : 0);
    /* Forward: QK' and PV. Backward: QK' again, dO V', P' dO, dS K, dS' Q. */
    const double channels = p->op == FATTN_FORWARD ? (double)p->dim + (double)p->dim_v
                                                   : 3.0 * (double)p->dim + 2.0 * (double)p->dim_v;
    return 2 * (double)p->heads_q * pairs * c->density * channels;
}

fattn_dtype sweep_dtype_k(const fattn_problem *p) { return p->dtype_kv ? p->dtype_kv : p->dtype; }
fattn_dtype sweep_dtype_v(const fattn_problem *p)
{
    return p->dtype_v ? p->dtype_v : sweep_dtype_k(p);
}

int64_t sweep_key_bytes(const fattn_problem *p)
{
    return p->dim * fattn_dtype_size(sweep_dtype_k(p)) +
           p->dim_v * fattn_dtype_size(sweep_dtype_v(p));
}

double sweep_unread_bytes(const sweep_case *c)
{
    const fattn_problem *const p = &c->problem;
    double keys = 0;
    for (int64_t b = 0; b < 2; b++) {
        const int64_t own = sweep_length(p->seqlen_k, p->features & FATTN_CU_SEQLENS_K, b);
        const double count = (double)(b ? p->batch / 2 : p->batch - p->batch / 2);
        int64_t sq, sk;
        lengths(c, b, &sq, &sk);
        keys += count * (double)(own - sk + sweep_first_key(c, b));
    }
    return keys * (double)p->heads_k * (double)sweep_key_bytes(p);
}
