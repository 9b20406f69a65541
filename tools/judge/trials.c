/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "tools/judge/trials.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/backend.h"
#include "core/problem.h"
#include "core/status.h"

enum { REPORTED_MAX = 20 };
#define MEDIAN_MAX 1.2

static void print_line(const trials *s, const char *format, va_list arguments)
{
    if (s->progress) {
        s->progress(0, 0);
    }
    fputs(s->prefix, stdout);
    vprintf(format, arguments);
    putchar('\n');
}

/* Prints a line. While jobs run, the caller holds their lock. */
FATTN_PRINTF(2, 3) static void line(const trials *s, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_line(s, format, arguments);
    va_end(arguments);
}

/* -------------------------------------------------------------------------------------------------
 * Rows
 * ---------------------------------------------------------------------------------------------- */

fattn_status trials_open(trials *s, const char *kernel)
{
    const fattn_backend *const backend = s->device->backend;
    const fattn_kernel *row;
    const char *missing = NULL;
    int count = 0;
    while (backend->kernel(s->device->impl, count, &missing) != NULL) {
        count++;
    }
    s->row_count = 0;
    s->one_row = kernel != NULL;
    s->rows = calloc((size_t)count + 1, sizeof *s->rows);
    if (s->rows == NULL) {
        return fattn_fail_memory(((int64_t)count + 1) * (int64_t)sizeof *s->rows,
                                 "the rows of a check");
    }
    for (int i = 0; (row = backend->kernel(s->device->impl, i, &missing)) != NULL; i++) {
        if (kernel == NULL || strcmp(kernel, row->name) == 0) {
            s->rows[s->row_count++] = (trials_row){.kernel = row, .missing = missing};
        }
    }
    if (s->row_count == 0) {
        trials_close(s);
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "backend %s has no kernel \"%s\"; fattn info lists them", backend->name,
                          kernel ? kernel : "");
    }
    return FATTN_OK;
}

void trials_close(trials *s)
{
    free(s->rows);
    s->rows = NULL;
}

/* -------------------------------------------------------------------------------------------------
 * One case
 * ---------------------------------------------------------------------------------------------- */

/* What the signal handler prints if the case kills the process. Composed beforehand, because a
 * handler may not format. */
static _Thread_local char crash_message[256];

static void die(int number)
{
    if (crash_message[0] != '\0' &&
        write(STDOUT_FILENO, crash_message, strlen(crash_message)) < 0) {
        _exit(1);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void catch_signals(void)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    for (size_t n = 0; n < sizeof signals / sizeof *signals; n++) {
        signal(signals[n], die);
    }
}

/* Refusals that differ only in numbers share an index. */
static int reason_index(trials_row *row, const char *text)
{
    char general[sizeof row->reasons->text];
    size_t used = 0;
    for (const char *c = text; *c != '\0' && used + 1 < sizeof general; c++) {
        const bool digit = isdigit((unsigned char)*c) != 0;
        if (!digit || used == 0 || general[used - 1] != '#') {
            general[used++] = (char)(digit ? '#' : *c);
        }
    }
    general[used] = '\0';
    int n = 0;
    while (n < row->reason_count && strcmp(row->reasons[n].text, general) != 0) {
        n++;
    }
    if (n == TRIALS_REASONS) {
        return TRIALS_REASONS - 1;
    }
    if (n == row->reason_count) {
        memcpy(row->reasons[row->reason_count++].text, general, used + 1);
    }
    return n;
}

static void count_pairs(trials_row *row, uint64_t features, bool taken, int why)
{
    for (int a = 0; a < TRIALS_FEATURES; a++) {
        for (int b = a; (features >> a & 1) && b < TRIALS_FEATURES; b++) {
            if (!(features >> b & 1)) {
                continue;
            }
            row->seen[a][b] += taken;
            row->declined_pairs[a][b] += !taken;
            row->why[a][b] = taken ? row->why[a][b] : why;
        }
    }
}

/* The number of key tiles of the longest sequence. */
static int64_t key_tiles(const draw_case *c, const judge_verdict *v)
{
    int64_t longest = 0;
    for (int64_t b = 0; b < c->problem.batch; b++) {
        longest = c->sequences[b].keys > longest ? c->sequences[b].keys : longest;
    }
    return v->bc > 0 ? (longest + v->bc - 1) / v->bc : 0;
}

/* Traits of a run besides its features. */
enum { TRAIT_DEEP, TRAIT_F32, TRAIT_F16, TRAIT_BF16, TRAIT_GROUPED, TRAIT_D };
static const char *const trait_names[TRIALS_TRAITS] = {
    "3+ key tiles", "f32",     "f16",      "bf16",     "grouped heads", "D to 16",
    "D to 32",      "D to 64", "D to 128", "D to 256", "D to 576",
};

static void count_traits(trials_row *row, const draw_case *c, const judge_verdict *v)
{
    const fattn_problem *const p = &c->problem;
    int64_t *const seen = row->traits[p->op == FATTN_BACKWARD];
    int width = 0;
    while (width < 5 && p->dim > INT64_C(16) << width) {
        width++;
    }
    seen[TRAIT_DEEP] += key_tiles(c, v) >= 3;
    seen[TRAIT_F32] += p->dtype == FATTN_F32;
    seen[TRAIT_F16] += p->dtype == FATTN_F16;
    seen[TRAIT_BF16] += p->dtype == FATTN_BF16;
    seen[TRAIT_GROUPED] += p->heads_q > p->heads_k;
    seen[TRAIT_D + width]++;
}

static void report_failure(trials *s, const draw_case *c, const char *kernel,
                           const judge_verdict *v)
{
    if (s->reported++ >= REPORTED_MAX && !s->verbose) {
        return;
    }
    char words[1024];
    draw_describe(c, words, sizeof words);
    line(s, "FAILED %s, tile %lldx%lld, splits %lld", kernel, (long long)v->br, (long long)v->bc,
         (long long)v->splits);
    line(s, "  %s", v->reason);
    line(s, "  %s", words);
    line(s, "  %s --seed %llu --case %lld", s->command, (unsigned long long)c->seed,
         (long long)c->index);
    fflush(stdout);
}

static void add_ratios(judge_ratios *sum, const judge_ratios *more)
{
    sum->count += more->count;
    for (int bin = 0; bin < JUDGE_BINS; bin++) {
        sum->bins[bin] += more->bins[bin];
    }
}

static void count_verdict(trials *s, trials_row *row, const draw_case *c, const judge_verdict *v)
{
    const bool taken = v->outcome != JUDGE_DECLINED;
    const int why = taken ? 0 : reason_index(row, v->reason);
    count_pairs(row, c->problem.features, taken, why);
    if (s->verbose) {
        line(s, "  %-24s %-8s tile %lldx%lld, splits %lld, %lld tiles, error %.3f of its bound%s",
             row->kernel->name,
             taken ? (v->outcome == JUDGE_PASSED ? "passed" : "FAILED") : "declined",
             (long long)v->br, (long long)v->bc, (long long)v->splits, (long long)v->tiles,
             v->worst, v->all_zero ? ", all zero" : "");
    }
    if (!taken) {
        row->declined++;
        row->reasons[why].count++;
        return;
    }
    row->passed += v->outcome == JUDGE_PASSED;
    row->failed += v->outcome == JUDGE_FAILED;
    row->wide += v->tiles > 4;
    row->all_zero += v->all_zero;
    row->excused += v->excused;
    count_traits(row, c, v);
    add_ratios(&row->ratios[c->family], &v->ratios);
    if (v->outcome == JUDGE_FAILED) {
        report_failure(s, c, row->kernel->name, v);
    }
}

/* The state that the threads share. */
typedef struct workers {
    trials *s;
    pthread_mutex_t lock;
    int64_t next;
} workers;

/* line() for a job that does not hold the lock. */
FATTN_PRINTF(2, 3) static void line_of_job(workers *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&w->lock);
    print_line(w->s, format, arguments);
    pthread_mutex_unlock(&w->lock);
    va_end(arguments);
}

static bool any_row_takes(const trials *s, const draw_case *c)
{
    fattn_problem problem;
    char text[256];
    if (fattn_problem_normalise(&c->problem, &problem) != FATTN_OK) {
        return true; /* the judge reports the error */
    }
    for (int n = 0; n < s->row_count; n++) {
        if (!s->rows[n].missing &&
            fattn_kernel_declines(s->rows[n].kernel, &problem, text, sizeof text) == NULL) {
            return true;
        }
    }
    return false;
}

/* What only the reference must support: f64, and types that differ from q's. */
static bool is_optional(const fattn_problem *p)
{
    return p->dtype == FATTN_F64 || (p->dtype_kv && p->dtype_kv != p->dtype) ||
           (p->dtype_v && p->dtype_v != p->dtype) ||
           (p->dtype_bias && p->dtype_bias != p->dtype && p->dtype_bias != FATTN_F32);
}

/* Whether some row of the device honours each feature of the problem. */
static bool features_are_known(const trials *s, const draw_case *c)
{
    uint64_t honoured = 0;
    for (int n = 0; n < s->row_count; n++) {
        honoured |= s->rows[n].kernel->features;
    }
    return !(c->problem.features & ~honoured);
}

/* Every backend supports every valid problem of the features that its rows list, except what
 * is_optional(). */
static bool check_support(workers *w, const draw_case *c)
{
    judge_verdict v = {.outcome = JUDGE_FAILED};
    const fattn_status status = fattn_support(w->s->device, &c->problem);
    if (status == FATTN_OK || is_optional(&c->problem) || w->s->one_row ||
        !features_are_known(w->s, c)) {
        return true;
    }
    snprintf(v.reason, sizeof v.reason, "no row takes it: %s: %s", fattn_status_string(status),
             fattn_last_reason());
    pthread_mutex_lock(&w->lock);
    report_failure(w->s, c, "any", &v);
    pthread_mutex_unlock(&w->lock);
    return false;
}

static judge_outcome judge_rows(workers *w, const draw_case *c)
{
    judge_truth truth = {0};
    judge_outcome outcome = JUDGE_DECLINED;
    for (int n = 0; n < w->s->row_count; n++) {
        trials_row *const row = &w->s->rows[n];
        if (row->missing) {
            continue;
        }
        judge_verdict verdict;
        judge_run(w->s->device, row->kernel, c, &truth, &verdict);
        pthread_mutex_lock(&w->lock);
        count_verdict(w->s, row, c, &verdict);
        pthread_mutex_unlock(&w->lock);
        if (verdict.outcome == JUDGE_FAILED || outcome == JUDGE_DECLINED) {
            outcome = verdict.outcome;
        }
    }
    judge_truth_free(&truth);
    return outcome;
}

static judge_outcome judge_built(workers *w, draw_case *c)
{
    trials *const s = w->s;
    if (s->verbose) {
        char words[1024];
        draw_describe(c, words, sizeof words);
        line_of_job(w, "case %lld: %s", (long long)c->index, words);
    }
    if (!check_support(w, c)) {
        return JUDGE_FAILED;
    }
    const fattn_status status = any_row_takes(s, c) ? draw_save(c) : FATTN_OK;
    if (status != FATTN_OK) {
        line_of_job(w, "FAILED case %lld: the oracle's forward: %s", (long long)c->index,
                    fattn_last_reason());
        return JUDGE_FAILED;
    }
    return judge_rows(w, c);
}

static judge_outcome judge_case(workers *w, int64_t index)
{
    trials *const s = w->s;
    judge_outcome outcome = JUDGE_FAILED;
    draw_case c;
    snprintf(crash_message, sizeof crash_message, "%sDIED: %s --seed %llu --case %lld\n", s->prefix,
             s->command, (unsigned long long)s->seed, (long long)index);
    if (draw_problem(&c, s->seed, index) == 0 && draw_build(&c) == 0) {
        outcome = judge_built(w, &c);
    } else {
        line_of_job(w, "FAILED case %lld: out of memory", (long long)index);
    }
    draw_free(&c);
    crash_message[0] = '\0';
    return outcome;
}

/* -------------------------------------------------------------------------------------------------
 * All cases
 * ---------------------------------------------------------------------------------------------- */

static void *work(void *argument)
{
    workers *const w = argument;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        const int64_t index = w->next < w->s->first + w->s->count ? w->next++ : -1;
        pthread_mutex_unlock(&w->lock);
        if (index < 0) {
            return NULL;
        }
        const judge_outcome outcome = judge_case(w, index);
        pthread_mutex_lock(&w->lock);
        w->s->passed += outcome == JUDGE_PASSED;
        w->s->failed += outcome == JUDGE_FAILED;
        w->s->skipped += outcome == JUDGE_DECLINED;
        if (w->s->progress) {
            w->s->progress(w->s->passed + w->s->failed + w->s->skipped, w->s->count);
        }
        pthread_mutex_unlock(&w->lock);
    }
}

void trials_run(trials *s)
{
    enum { JOBS_MAX = 256 };
    pthread_t threads[JOBS_MAX];
    workers w = {.s = s, .next = s->first};
    int started = 0;
    pthread_mutex_init(&w.lock, NULL);
    catch_signals();
    for (int n = 1; n < s->jobs && n < JOBS_MAX; n++) {
        started += pthread_create(&threads[started], NULL, work, &w) == 0;
    }
    work(&w);
    for (int n = 0; n < started; n++) {
        pthread_join(threads[n], NULL);
    }
    pthread_mutex_destroy(&w.lock);
    if (s->progress) {
        s->progress(0, 0);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Report
 * ---------------------------------------------------------------------------------------------- */

static void report_rows(const trials *s)
{
    line(s, "%-24s %8s %8s %8s %8s %8s %8s", "row", "passed", "failed", "declined", ">4 tiles",
         "all zero", "excused");
    for (int n = 0; n < s->row_count; n++) {
        const trials_row *const r = &s->rows[n];
        if (r->missing) {
            line(s, "%-24s needs %s", r->kernel->name, r->missing);
            continue;
        }
        line(s, "%-24s %8lld %8lld %8lld %8lld %8lld %8lld", r->kernel->name, (long long)r->passed,
             (long long)r->failed, (long long)r->declined, (long long)r->wide,
             (long long)r->all_zero, (long long)r->excused);
    }
    line(s, "(problems; excused: elements beyond f32's range, or reached by NaN and infinities)");
}

static void report_refusals(const trials *s)
{
    for (int n = 0; n < s->row_count; n++) {
        for (int i = 0; i < s->rows[n].reason_count; i++) {
            line(s, "%-24s declined %lld times: %s", s->rows[n].kernel->name,
                 (long long)s->rows[n].reasons[i].count, s->rows[n].reasons[i].text);
        }
    }
}

static int report_medians(const trials *s)
{
    int findings = 0;
    char text[160];
    size_t used = 0;
    for (int f = 0; f < DRAW_FAMILIES; f++) {
        used += (size_t)snprintf(text + used, sizeof text - used, " %8s", draw_family_names[f]);
    }
    line(s, "%-24s%s", "error/comparator's", text);
    for (int n = 0; n < s->row_count; n++) {
        used = 0;
        for (int f = 0; f < DRAW_FAMILIES; f++) {
            const judge_ratios *const ratios = &s->rows[n].ratios[f];
            const double median = judge_median(ratios);
            const bool bad =
                s->count >= TRIALS_ENOUGH && ratios->count >= 200 && median > MEDIAN_MAX;
            used += ratios->count == 0
                        ? (size_t)snprintf(text + used, sizeof text - used, "       - ")
                        : (size_t)snprintf(text + used, sizeof text - used, " %7.2f%c", median,
                                           bad ? '!' : ' ');
            findings += bad;
        }
        if (!s->rows[n].missing) {
            line(s, "%-24s%s", s->rows[n].kernel->name, text);
        }
    }
    line(s, "(medians over the slices of a family; at most %.1f)", MEDIAN_MAX);
    return findings;
}

/* Why a row cannot run a pair of features; NULL if it could. */
static const char *pair_refusal(const trials_row *row, int a, int b)
{
    const uint64_t pair = UINT64_C(1) << a | UINT64_C(1) << b;
    uint64_t of_ops = 0;
    for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        const bool possible = (pair & ~draw_features_of(op)) == 0;
        of_ops |= possible && row->kernel->ops & FATTN_OP_BIT(op);
    }
    return !of_ops                         ? "its ops do not have both"
           : pair & ~row->kernel->features ? "does not honour it"
           : row->declined_pairs[a][b] > 0 ? row->reasons[row->why[a][b]].text
                                           : NULL;
}

static int report_row_pairs(const trials *s, const trials_row *row)
{
    int often = 0, refused = 0, rare = 0;
    for (int a = 0; a < TRIALS_FEATURES; a++) {
        for (int b = a; b < TRIALS_FEATURES; b++) {
            const char *const why = pair_refusal(row, a, b);
            const bool enough = row->seen[a][b] >= TRIALS_PAIR_TIMES;
            often += enough;
            refused += !enough && why != NULL;
            rare += !enough && why == NULL;
            if (s->verbose || (!enough && why == NULL && s->count >= TRIALS_ENOUGH)) {
                line(s, "  %s: %s + %s seen %lld times, refused %lld times%s%s", row->kernel->name,
                     fattn_feature_name(a), fattn_feature_name(b), (long long)row->seen[a][b],
                     (long long)row->declined_pairs[a][b], why ? ": " : "", why ? why : "");
            }
        }
    }
    line(s, "%-24s pairs of features: %d seen at least %d times, %d refused, %d fewer",
         row->kernel->name, often, TRIALS_PAIR_TIMES, refused, rare);
    return s->count >= TRIALS_ENOUGH ? rare : 0;
}

/* Whether the row can run a problem with the feature. */
static bool honours(const fattn_kernel *kernel, int feature)
{
    uint64_t possible = 0;
    for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        possible |= kernel->ops & FATTN_OP_BIT(op) ? draw_features_of(op) : 0;
    }
    return (kernel->features & possible) >> feature & 1;
}

/* How often a row ran each feature that it honours, and how often 3 or more tiles of keys. */
static int report_row_features(const trials *s, const trials_row *row)
{
    const int64_t deep = row->traits[0][TRAIT_DEEP] + row->traits[1][TRAIT_DEEP];
    const bool tiled = row->kernel->tiles[0].bc < 1024; /* false: one tile holds all keys */
    int never = (row->passed + row->failed == 0) + (tiled && deep == 0);
    char text[768] = "";
    size_t used = 0;
    for (int f = 0; f < TRIALS_FEATURES; f++) {
        const int64_t times = row->seen[f][f];
        if (honours(row->kernel, f) && used < sizeof text) {
            used += (size_t)snprintf(text + used, sizeof text - used, ", %s %lld%s",
                                     fattn_feature_name(f), (long long)times, times ? "" : "!");
            never += times == 0;
        }
    }
    line(s, "%-24s 3+ key tiles %lld%s%s", row->kernel->name, (long long)deep, deep ? "" : "!",
         text);
    return s->count >= TRIALS_SOME ? never : 0;
}

/* What the rows of the device ran together, for each op. */
static int report_traits(const trials *s)
{
    int never = 0;
    for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        int64_t sum[TRIALS_TRAITS] = {0};
        bool any = false;
        for (int n = 0; n < s->row_count; n++) {
            const bool runs = !s->rows[n].missing && s->rows[n].kernel->ops & FATTN_OP_BIT(op);
            any = any || runs;
            for (int trait = 0; runs && trait < TRIALS_TRAITS; trait++) {
                sum[trait] += s->rows[n].traits[op == FATTN_BACKWARD][trait];
            }
        }
        char text[512] = "";
        size_t used = 0;
        for (int trait = 0; any && trait < TRIALS_TRAITS; trait++) {
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s %s %lld%s", trait ? "," : "",
                                 trait_names[trait], (long long)sum[trait], sum[trait] ? "" : "!");
            never += sum[trait] == 0;
        }
        line(s, "%-24s%s", op == FATTN_FORWARD ? "forward" : "backward", text);
    }
    return s->count >= TRIALS_SOME && !s->one_row ? never : 0;
}

/* At least a sixth of a row's runs must span more than 4 tiles, unless it takes only few query rows
 * or one tile holds all keys. */
static int report_row_tiles(const trials *s, const trials_row *row)
{
    const int64_t runs = row->passed + row->failed;
    const bool tiled = row->kernel->rows_max == 0 && row->kernel->tiles[0].br < 1024;
    if (s->count < TRIALS_ENOUGH || !tiled || 6 * row->wide >= runs) {
        return 0;
    }
    line(s, "%-24s only %lld of %lld runs span more than 4 tiles", row->kernel->name,
         (long long)row->wide, (long long)runs);
    return 1;
}

trials_findings trials_report(const trials *s)
{
    trials_findings found = {0};
    report_rows(s);
    if (s->reported > REPORTED_MAX && !s->verbose) {
        line(s, "%lld more failures were not printed", (long long)(s->reported - REPORTED_MAX));
    }
    if (s->verbose) {
        report_refusals(s);
    }
    if (s->count == 1) {
        return found; /* the rest is about many problems */
    }
    found.medians = report_medians(s);
    for (int n = 0; n < s->row_count; n++) {
        if (!s->rows[n].missing) {
            found.gaps += report_row_features(s, &s->rows[n]) + report_row_pairs(s, &s->rows[n]) +
                          report_row_tiles(s, &s->rows[n]);
        }
    }
    found.gaps += report_traits(s);
    line(s, "(problems with each feature or property; ! marks none)");
    return found;
}
