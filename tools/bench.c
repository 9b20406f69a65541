/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn bench`: the speed of kernels as a share of the machine's ceiling. Each repetition runs the
 * ceiling's loop, the kernel and, if requested, the peer, one after the other, so that all see the
 * same machine load. The medians over the repetitions are reported.
 */
#define _POSIX_C_SOURCE 200809L /* isatty */

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/dtype.h"
#include "core/host.h"
#include "core/plan.h"
#include "core/status.h"
#include "tools/bench/bench.h"
#include "tools/bench/ceiling.h"
#include "tools/bench/materialised.h"
#include "tools/bench/workload.h"
#include "tools/commands.h"
#include "tools/ranks/bench_ranks.h"
#include "tools/terminal/terminal.h"

enum { REPS_MIN = 5 };
static const double budget_s = 1.0;   /* per case, unless --reps is given */
static const double slice_ms = 5.0;   /* shortest repetition */
static const double ratio_max = 1.02; /* a higher share of the ceiling is implausible */
static const double cpu_min = 0.9;    /* of the processors that the threads can use */
static const double fed_min = 0.95;   /* 1.00 on an unshared core; 0.83 to 0.93 if shared */

static const char *const peer_words[] = {"none", "materialised", NULL};

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* -------------------------------------------------------------------------------------------------
 * Output
 * ---------------------------------------------------------------------------------------------- */

/* A column: its name and its value, either a number (NAN: none) or a text. */
typedef struct cell {
    const char *name, *text;
    double number;
    const char *format;
} cell;

static void print_cell(const bench *b, const cell *c, bool first)
{
    if (b->json) {
        printf("%s\"%s\": ", first ? "{" : ", ", c->name);
        if (c->text) {
            tool_json_string(c->text);
            return;
        }
    } else {
        printf("%s", first ? "" : "\t");
        if (c->text) {
            printf("%s", c->text);
            return;
        }
    }
    if (isfinite(c->number)) {
        printf(c->format, c->number);
    } else {
        printf("%s", b->json ? "null" : "-");
    }
}

/* TSV and JSON for programs: every column. */
static void print_columns(bench *b, const bench_row *row, const char *words)
{
    const fattn_problem *const p = &row->of->problem;
    const cell cells[] = {
        {"device", row->device, 0, NULL},
        {"kernel", row->kernel, 0, NULL},
        {"dir", row->dir, 0, NULL},
        {"dtype", fattn_dtype_name(p->dtype), 0, NULL},
        {"mask", sweep_mask_word(row->of), 0, NULL},
        {"B", NULL, (double)p->batch, "%.0f"},
        {"Hq", NULL, (double)p->heads_q, "%.0f"},
        {"Hk", NULL, (double)p->heads_k, "%.0f"},
        {"Sq", NULL, (double)p->seqlen_q, "%.0f"},
        {"Sk", NULL, (double)p->seqlen_k, "%.0f"},
        {"D", NULL, (double)p->dim, "%.0f"},
        {"Dv", NULL, (double)p->dim_v, "%.0f"},
        {"median_ms", NULL, row->median_ms, "%.6g"},
        {"gflops", NULL, row->gflops, "%.5g"},
        {"gbytes_s", NULL, row->gbytes_s, "%.5g"},
        {"ceiling", NULL, row->ceiling, "%.5g"},
        {"ratio", NULL, row->ratio, "%.4f"},
        {"workspace_bytes", NULL, (double)row->workspace, "%.0f"},
        {"fed", NULL, row->fed, "%.3f"},
        {"cpu", NULL, row->cpu, "%.3f"},
        {"features", words, 0, NULL},
    };
    enum { CELLS = sizeof cells / sizeof cells[0] };
    for (int i = 0; i < CELLS && !b->json && !b->header; i++) {
        printf("%s%s", i ? "\t" : "", cells[i].name);
    }
    printf("%s", b->json || b->header ? "" : "\n");
    for (int i = 0; i < CELLS; i++) {
        print_cell(b, &cells[i], i == 0);
    }
    printf("%s\n", b->json ? "}" : "");
}

/* A number, right-aligned, or a dash for NAN. */
static void print_number(const char *format, int width, double number, const char *unit)
{
    char text[64] = "-";
    if (isfinite(number)) {
        snprintf(text, sizeof text, format, number);
    }
    printf("  %*s%s", width, text, isfinite(number) ? unit : "");
}

/* For terminals: a readable line with the problem, its time and its share of the ceiling. */
static void print_line(bench *b, const bench_row *row, const char *words)
{
    const fattn_problem *const p = &row->of->problem;
    const bool decode = row->of->dir == SWEEP_DECODE;
    const char *const mask = sweep_mask_word(row->of);
    char problem[512];
    const int used =
        snprintf(problem, sizeof problem,
                 "%s %s B%" PRId64 " H%" PRId64 "/%" PRId64 " %" PRId64 "x%" PRId64 " D%" PRId64,
                 row->dir, fattn_dtype_name(p->dtype), p->batch, p->heads_q, p->heads_k,
                 p->seqlen_q, p->seqlen_k, p->dim);
    snprintf(problem + used, sizeof problem - (size_t)used, "%s%s%s%s",
             strcmp(mask, "none") ? " " : "", strcmp(mask, "none") ? mask : "",
             strcmp(words, "-") ? " " : "", strcmp(words, "-") ? words : "");
    if (!b->header) {
        printf("%-44s  %-24s  %-8s  %12s  %17s  %7s  %5s  %s\n", "problem", "kernel", "device",
               "time", "rate", "ceiling", "fed", "processors");
    }
    printf("%-44s  %-24s  %-8s", problem, row->kernel, row->device);
    print_number("%.4g", 9, row->median_ms, " ms");
    print_number("%.5g", 9, decode ? row->gbytes_s : row->gflops, decode ? " GB/s   " : " GFLOP/s");
    print_number("%.1f", 5, 100 * row->ratio, " %");
    print_number("%.2f", 5, row->fed, "");
    print_number("%.2f", 6, row->cpu, "");
    if (isfinite(row->cpu) && row->cpu_wanted > 0) {
        printf(" of %.0f", row->cpu_wanted);
    }
    putchar('\n');
}

void bench_report(bench *b, const bench_row *row)
{
    char words[256];
    sweep_words(row->of, words, sizeof words);
    tool_progress_clear();
    if (b->people && !b->json) {
        print_line(b, row, words);
    } else {
        print_columns(b, row, words);
    }
    fflush(stdout);
    b->header = true;
    b->rows++;
    b->shared += row->fed < fed_min;
    b->starved += row->cpu < cpu_min * row->cpu_wanted;
    if (row->ratio > ratio_max && !row->exempt) {
        fprintf(stderr, "fattn bench: %s %s: a ratio of %.3f is above %.2f\n", row->kernel,
                row->dir, row->ratio, ratio_max);
        b->failed = true;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Timing
 * ---------------------------------------------------------------------------------------------- */

/* What is timed: a plan on its buffers, or the peer if plan is NULL. */
typedef struct subject {
    const fattn_plan *plan;
    const workload *work;
    void *workspace;
    materialised *peer;
    const fattn_problem *problem;
    fattn_event *start, *stop;
    int64_t calls; /* per repetition */
    double seconds[BENCH_REPS_MAX], ratio[BENCH_REPS_MAX], cpu[BENCH_REPS_MAX];
} subject;

/* CPU time of all threads of the process. */
static double cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Times `calls` calls. *seconds is the time of one, *processors CPU time over wall time. */
static fattn_status repeat(const subject *s, int64_t calls, double *seconds, double *processors)
{
    double ms = 0;
    const double wall = fattn_host_seconds(), cpu = cpu_now();
    fattn_status status = fattn_event_record(s->start, NULL);
    for (int64_t i = 0; status == FATTN_OK && i < calls; i++) {
        if (s->plan) {
            status = fattn_execute(s->plan, &s->work->buffers, s->workspace, NULL);
        } else {
            materialised_run(s->peer, s->problem, &s->work->buffers);
        }
    }
    if (status == FATTN_OK) {
        status = fattn_event_record(s->stop, NULL);
    }
    if (status == FATTN_OK) {
        status = fattn_event_elapsed(s->start, s->stop, &ms);
    }
    *seconds = ms * 1e-3 / (double)calls;
    *processors = (cpu_now() - cpu) / (fattn_host_seconds() - wall);
    return status;
}

/* Warms up and chooses how many calls fill a repetition. *seconds: the time of one repetition. */
static fattn_status calibrate(subject *s, double *seconds)
{
    double once = 0, processors;
    fattn_status status = repeat(s, 1, &once, &processors);
    if (status == FATTN_OK) {
        status = repeat(s, 1, &once, &processors);
    }
    const double calls = ceil(slice_ms * 1e-3 / (once > 1e-7 ? once : 1e-7));
    s->calls = calls < 1 ? 1 : (int64_t)calls;
    *seconds = once * (double)s->calls;
    return status;
}

static int repetitions(const bench *b, double seconds)
{
    if (b->reps) {
        return (int)b->reps;
    }
    const double fit = budget_s / seconds;
    return fit < REPS_MIN ? REPS_MIN : fit > BENCH_REPS_MAX ? BENCH_REPS_MAX : (int)fit;
}

/* Every input read once and every output written once, for the actual lengths. */
static double least_bytes(const sweep_case *c, const fattn_plan_info *info)
{
    return info->lower_bound_bytes - sweep_unread_bytes(c);
}

/* Work of a call in the unit of its ceiling: bytes for decoding, else flops. */
static double work_of(const sweep_case *c, const fattn_plan_info *info)
{
    return c->dir == SWEEP_DECODE ? least_bytes(c, info) : sweep_flops(c);
}

/* All repetitions of the kernel and of the peer, if any. */
static fattn_status time_subjects(const bench *b, const sweep_case *c, const fattn_plan_info *info,
                                  ceiling *ceil, subject *const subjects[], int count, int *reps,
                                  fattn_peak_reading *reached)
{
    double total = 0, rates[BENCH_REPS_MAX], fed[BENCH_REPS_MAX];
    fattn_status status = FATTN_OK;
    for (int s = 0; status == FATTN_OK && s < count; s++) {
        double seconds;
        status = calibrate(subjects[s], &seconds);
        total += seconds;
    }
    *reps = repetitions(b, total);
    for (int r = 0; status == FATTN_OK && r < *reps; r++) {
        const workload *const w = subjects[0]->work;
        fattn_peak_reading reading = {.rate = NAN};
        if (ceil->peak) {
            status = ceiling_measure(ceil, w->buffers.k, w->keys_bytes, &reading);
        }
        rates[r] = reading.rate;
        fed[r] = reading.fed > 0 ? reading.fed : NAN;
        for (int s = 0; status == FATTN_OK && s < count; s++) {
            status = repeat(subjects[s], subjects[s]->calls, &subjects[s]->seconds[r],
                            &subjects[s]->cpu[r]);
            subjects[s]->ratio[r] = work_of(c, info) / subjects[s]->seconds[r] / rates[r];
        }
    }
    if (status == FATTN_OK) {
        *reached = (fattn_peak_reading){.rate = bench_median(rates, *reps),
                                        .fed = bench_median(fed, *reps)};
    }
    return status;
}

static void report_subject(bench *b, const char *device_word, const fattn_device_info *about,
                           const char *kernel, const sweep_case *c, const fattn_plan_info *info,
                           subject *s, int reps, const fattn_peak_reading *reached,
                           int64_t workspace)
{
    const double seconds = bench_median(s->seconds, reps);
    const int64_t threads =
        s->plan && info->work_items < about->units ? info->work_items : about->units;
    const bench_row row = {
        .device = device_word,
        .kernel = kernel,
        .dir = c->dir_word,
        .of = c,
        .median_ms = 1e3 * seconds,
        .gflops = 1e-9 * sweep_flops(c) / seconds,
        .gbytes_s = 1e-9 * least_bytes(c, info) / seconds,
        .ceiling = 1e-9 * reached->rate,
        .ratio = isnan(reached->rate) ? NAN : bench_median(s->ratio, reps),
        .fed = reached->fed,
        .cpu = about->host_memory ? bench_median(s->cpu, reps) : NAN,
        .cpu_wanted = (double)(threads < b->processors ? threads : b->processors),
        .workspace = workspace,
        .exempt = !s->plan || c->dir == SWEEP_DECODE,
    };
    bench_report(b, &row);
}

/* -------------------------------------------------------------------------------------------------
 * A case
 * ---------------------------------------------------------------------------------------------- */

/* Backward needs the o and lse of these inputs. */
static fattn_status run_forward(fattn_device *device, const sweep_case *c, const workload *w)
{
    const fattn_problem forward = problem_forward_of(&c->problem);
    const fattn_status status = fattn_attention(device, &forward, &w->buffers, NULL);
    fattn_cache_clear();
    return status;
}

/* Whether the peer takes the case; prints why not. check_peer() has made sure that OpenBLAS
 * loads. */
static bool prepare_peer(bench *b, const sweep_case *c, const fattn_device_info *info,
                         materialised *peer)
{
    char why[160] = "it needs a device that reads host memory";
    if (b->peer == 0) {
        return false;
    }
    if (info->host_memory && materialised_open(peer, why, sizeof why)) {
        if (materialised_prepare(peer, &c->problem, info->units, why, sizeof why)) {
            b->peers++;
            return true;
        }
        materialised_close(peer);
    }
    tool_progress_clear();
    fprintf(stderr, "fattn bench: no peer materialised: %s\n", why);
    return false;
}

static void check_ceiling(bench *b, const char *device_word, ceiling *ceil)
{
    char line[128];
    snprintf(line, sizeof line, "%s %s\n", device_word, ceil->peak ? ceil->peak->name : "");
    if (!ceil->peak || strstr(b->checked, line)) {
        return;
    }
    tool_progress_clear();
    b->failed |= !ceiling_check(ceil, device_word);
    const size_t used = strlen(b->checked);
    snprintf(b->checked + used, sizeof b->checked - used, "%s", line);
}

/* Times fattn_inspect() for each matrix that the case asks for, and prints a row for each. */
static fattn_status time_inspection(bench *b, fattn_device *device, const char *device_word,
                                    const sweep_case *c, const workload *w)
{
    static const char *const names[] = {
        [FATTN_SCORES] = "inspect:scores", [FATTN_PROBABILITIES] = "inspect:probabilities"};
    const fattn_problem *const p = &c->problem;
    fattn_status status = FATTN_OK;
    for (int what = FATTN_SCORES; what <= FATTN_PROBABILITIES && !status; what++) {
        double seconds[BENCH_REPS_MAX];
        fattn_inspect_args args;
        int64_t bytes = p->dtype == FATTN_F64 ? 8 : 4;
        const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
        if (!c->inspected[what]) {
            continue;
        }
        for (int axis = 0; axis < 4 && !status; axis++) {
            if (__builtin_mul_overflow(bytes, extent[axis], &bytes)) {
                status = fattn_fail(FATTN_OVERFLOW, "a matrix of scores exceeds 2^63 bytes");
            }
        }
        fattn_inspect_args_init(&args);
        args.what = (fattn_inspection)what;
        status = status ? status : fattn_device_malloc(device, (size_t)bytes, &args.to);
        int reps = 1;
        for (int r = 0; r < reps && !status; r++) {
            const double start = fattn_host_seconds();
            status = fattn_inspect(device, p, &w->buffers, &args);
            seconds[r] = fattn_host_seconds() - start;
            reps = r == 0 ? repetitions(b, fmax(seconds[0], 1e-9)) : reps;
        }
        fattn_device_free(device, args.to);
        if (!status) {
            const bench_row row = {.device = device_word,
                                   .kernel = names[what],
                                   .dir = c->dir_word,
                                   .of = c,
                                   .median_ms = 1e3 * bench_median(seconds, reps),
                                   .gflops = NAN,
                                   .gbytes_s = NAN,
                                   .ceiling = NAN,
                                   .ratio = NAN,
                                   .fed = NAN,
                                   .cpu = NAN,
                                   .exempt = true};
            bench_report(b, &row);
        }
    }
    return status;
}

static fattn_status bench_plan_of(bench *b, fattn_device *device, const fattn_device_info *about,
                                  const char *device_word, const sweep_case *c, fattn_plan *plan)
{
    fattn_plan_info info = {.struct_size = sizeof info};
    fattn_status status = fattn_plan_get_info(plan, &info);
    workload w = {0};
    materialised peer = {0};
    subject kernel = {.plan = plan, .work = &w},
            other = {.peer = &peer, .work = &w, .problem = &c->problem};
    subject *const subjects[] = {&kernel, &other};
    int count = 1, reps = 0;
    fattn_peak_reading reached = {0};
    ceiling ceil = ceiling_of(device, about, c, info.kernel);
    b->processors = ceil.processors;

    if (status == FATTN_OK) {
        status = workload_create(device, c, &w);
    }
    if (status == FATTN_OK) {
        status = fattn_device_malloc(device, (size_t)info.workspace_bytes, &kernel.workspace);
    }
    if (status == FATTN_OK) {
        status = fattn_event_create(device, &kernel.start);
    }
    if (status == FATTN_OK) {
        status = fattn_event_create(device, &kernel.stop);
    }
    if (status == FATTN_OK && c->dir == SWEEP_BWD) {
        status = run_forward(device, c, &w);
    }
    if (status == FATTN_OK) {
        other.start = kernel.start;
        other.stop = kernel.stop;
        count += prepare_peer(b, c, about, &peer);
        status = time_subjects(b, c, &info, &ceil, subjects, count, &reps, &reached);
    }
    if (status == FATTN_OK) {
        report_subject(b, device_word, about, info.kernel, c, &info, &kernel, reps, &reached,
                       info.workspace_bytes);
        check_ceiling(b, device_word, &ceil);
    }
    if (status == FATTN_OK && count > 1) {
        report_subject(b, device_word, about, "peer:materialised", c, &info, &other, reps, &reached,
                       peer.scores_bytes);
        const double apart = materialised_difference(&peer, &c->problem, w.buffers.o);
        if (!(apart < 1e-4)) {
            fprintf(stderr, "fattn bench: %s and its peer differ by %g\n", info.kernel, apart);
            b->failed = true;
        }
    }
    if (status == FATTN_OK) {
        status = time_inspection(b, device, device_word, c, &w);
    }
    materialised_release(&peer);
    materialised_close(&peer);
    fattn_event_destroy(kernel.start);
    fattn_event_destroy(kernel.stop);
    fattn_device_free(device, kernel.workspace);
    workload_free(&w);
    return status;
}

/* Runs the case on one kernel; NULL means the planner's choice. may_decline: skip a kernel that
 * does not take the problem instead of failing. */
static fattn_status bench_kernel(bench *b, fattn_device *device, const fattn_device_info *about,
                                 const char *device_word, const sweep_case *c, const char *kernel,
                                 bool may_decline)
{
    fattn_plan *plan;
    fattn_status status = fattn_plan_create_with(device, &c->problem, kernel, NULL, &plan);
    if (status == FATTN_UNSUPPORTED && may_decline) {
        tool_progress_clear();
        fprintf(stderr, "fattn bench: %s\n", fattn_last_reason());
        return FATTN_OK;
    }
    if (status == FATTN_OK) {
        status = bench_plan_of(b, device, about, device_word, c, plan);
        fattn_plan_destroy(plan);
    }
    return status;
}

static fattn_status bench_all(bench *b, fattn_device *device, const fattn_device_info *about,
                              const char *device_word, const sweep_case *c)
{
    fattn_status status = FATTN_OK;
    const fattn_kernel *row;
    const char *missing;
    for (int i = 0;
         status == FATTN_OK && (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        status = bench_kernel(b, device, about, device_word, c, row->name, true);
    }
    return status;
}

static fattn_status bench_case(bench *b, const sweep_case *c)
{
    fattn_device *device = NULL;
    fattn_device_info about = {.struct_size = sizeof about};
    fattn_status status = sweep_open(c, &device);
    if (status == FATTN_OK) {
        status = fattn_device_get_info(device, &about);
    }
    if (status == FATTN_OK) {
        char word[OPTION_WORD_MAX + 32];
        const int used = snprintf(word, sizeof word, "%s", c->device ? c->device : about.backend);
        if (c->threads) {
            snprintf(word + used, sizeof word - (size_t)used, "@%" PRId64, c->threads);
        }
        if (c->dir == SWEEP_PLAN) {
            status = bench_plan(b, device, word, c);
        } else if (sweep_all_kernels(c)) {
            status = bench_all(b, device, &about, word, c);
        } else {
            status = bench_kernel(b, device, &about, word, c, c->kernel, false);
        }
    }
    fattn_device_close(device);
    return status;
}

static const char notes[] =
    "Lists of values are separated by commas; every combination is measured. A terminal gets\n"
    "readable rows, a file or pipe tab-separated columns. --threads N appends @N to the device.\n"
    "\n"
    "  gflops    matrix products only; a causal square counts as half, windows pair by pair\n"
    "  gbytes_s  every input read once and every output written once\n"
    "  ceiling   GFLOP/s of a loop of multiply-adds; for decode, GB/s of reading k and v. Counts\n"
    "            at most as many units as there are processors. stderr compares it with the rate\n"
    "            that the clock allows\n"
    "  ratio     gflops (decode: gbytes_s) over the ceiling measured just before; the median\n"
    "  fed       share of the ceiling that products reach whose operands come from the L1 cache:\n"
    "            1.00 on an unshared core, 0.83 to 0.93 if other work uses its second thread;\n"
    "            ratio then drops by more\n"
    "  cpu       CPU time over wall time. If it is below the number of threads, the machine was\n"
    "            busy, and time and ratio understate the kernel; a note at the end says so\n"
    "  features  the other features of the problem\n"
    "\n"
    "--scores and --probabilities add rows that time fattn_inspect(), which is not part of\n"
    "attention.\n"
    "\n"
    "--dir plan measures creating a plan, and what a cached fattn_attention() adds to\n"
    "fattn_execute(); ceiling is then the time budget in ms.\n"
    "\n"
    "The benchmark fails (exit status 1) if a ratio is above 1.02 (except for decode, whose reads\n"
    "can outrun a plain read, and plan), if the ceiling's loop is over 3 % from a whole number of\n"
    "instructions per cycle, or if the peer's result differs.";

/* Prints, once at the end, why figures of this run are doubtful. */
static void warn(const bench *b, const sweep *s)
{
    int64_t most = 0;
    for (int i = 0; i < s->threads.count; i++) {
        most = s->threads.at[i] > most ? s->threads.at[i] : most;
    }
    if (b->processors && most > b->processors) {
        fprintf(stderr,
                "fattn bench: %" PRId64 " threads share %" PRId64
                " processor%s: ceilings count no more units\n",
                most, b->processors, b->processors == 1 ? "" : "s");
    }
    if (b->starved) {
        fprintf(stderr,
                "fattn bench: the machine is busy: in %" PRId64 " of %" PRId64 " rows threads got "
                "less than %.0f %% of the processors that they can use\n",
                b->starved, b->rows, 100 * cpu_min);
    }
    if (b->shared) {
        fprintf(stderr,
                "fattn bench: cores are shared: in %" PRId64 " of the rows above, other work used "
                "part of them (fed below %.2f)\n",
                b->shared, fed_min);
    }
}

/* Runs all cases. A case that shows a failure sets b->failed and still returns TOOL_OK. */
static int bench_sweep(bench *b, const sweep *s)
{
    const int64_t count = sweep_count(s);
    for (int64_t n = 0; n < count; n++) {
        sweep_case c;
        sweep_at(s, n, &c);
        tool_progress(n, count);
        const fattn_status status = bench_case(b, &c);
        tool_progress_clear();
        if (status != FATTN_OK) {
            return tool_failure(status);
        }
    }
    return TOOL_OK;
}

/* Before anything is measured: whether the peer can be loaded and has something to run. */
static int check_peer(const bench *b, const sweep *s)
{
    materialised peer;
    char why[160];
    if (b->peer == 0) {
        return TOOL_OK;
    }
    for (int i = 0; i < s->dir.count; i++) {
        if (s->dir.at[i] == SWEEP_PLAN) {
            return tool_usage("bench", "--peer has nothing to run in --dir plan");
        }
    }
    if (!materialised_open(&peer, why, sizeof why)) {
        tool_usage("bench", "no peer materialised: %s", why);
        return TOOL_LIBRARY;
    }
    materialised_close(&peer);
    return TOOL_OK;
}

/* Refuses problems without queries, which leave nothing to time. With --dir plan alone they are
 * allowed: making a plan for them is work like any other. */
static int check_queries(const sweep *s)
{
    const struct {
        const char *name;
        const option_integers *list;
    } counts[] = {
        {"--b", &s->b}, {"--hq", &s->hq}, {"--sq", &s->sq}, {"--seqused-q", &s->seqused_q}};
    if (!sweep_has(s, SWEEP_FWD) && !sweep_has(s, SWEEP_BWD) && !sweep_has(s, SWEEP_DECODE)) {
        return TOOL_OK;
    }
    for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
        for (int i = 0; i < counts[n].list->count; i++) {
            if (counts[n].list->at[i] == 0) {
                return tool_usage("bench", "%s is 0: without queries there is nothing to measure",
                                  counts[n].name);
            }
        }
    }
    return TOOL_OK;
}

int fattn_tool_bench(int argc, char **argv)
{
    sweep s;
    bench b;
    memset(&s, 0, sizeof s);
    memset(&b, 0, sizeof b);
    sweep_options(&s, SWEEP_RUNS);
    bench_ranks ranks;
    memset(&ranks, 0, sizeof ranks);
    const option own[] = {
        {"peer", "also time OpenBLAS with the score matrix in memory", OPTION_CHOICE,
         .value = &b.peer, .words = peer_words},
        {"reps N", "repetitions; default: as many as fit about a second", OPTION_INTEGER,
         .value = &b.reps, .min = 1, .max = BENCH_REPS_MAX},
        {"json", "one JSON object per row", OPTION_SWITCH, .value = &b.json},
    };
    enum { OWN = sizeof own / sizeof own[0] };
    _Static_assert(OWN + BENCH_RANKS_OPTIONS <= SWEEP_MORE, "room after the sweep's options");
    memcpy(s.rows + SWEEP_OPTIONS, own, sizeof own);
    bench_ranks_rows(&ranks, s.rows + SWEEP_OPTIONS + OWN);
    const option_set set = {
        "bench", "Kernels as a share of the machine's ceiling, measured in the same repetition.",
        s.rows, notes};
    const int parsed = options_parse(&set, argc, argv);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    b.people = isatty(STDOUT_FILENO);
    if (ranks.wanted ? b.peer || b.json : ranks.any) {
        return tool_usage("bench", ranks.wanted
                                       ? "--ranks cannot be combined with --peer or --json"
                                       : "--scheme, --split, --timeout and --saves need --ranks");
    }
    if (!(ranks.timeout > 0)) {
        return tool_usage("bench", "--timeout is above 0");
    }
    if (ranks.wanted && (s.kernel.count || sweep_inspects(&s) || sweep_has(&s, SWEEP_PLAN))) {
        return tool_usage("bench",
                          "--ranks cannot be combined with --kernel, --scores, --probabilities or "
                          "--dir plan");
    }
    int code = sweep_check(&s, "bench") ? check_queries(&s) : TOOL_USAGE;
    if (code == TOOL_OK && ranks.wanted) {
        return bench_ranks_run(&ranks, &s, b.reps);
    }
    code = code == TOOL_OK ? check_peer(&b, &s) : code;
    if (code == TOOL_OK) {
        code = bench_sweep(&b, &s);
        warn(&b, &s);
    }
    if (code == TOOL_OK && b.peer && b.peers == 0) {
        fprintf(stderr, "fattn bench: the peer ran none of the cases\n");
        b.failed = true;
    }
    return code == TOOL_OK && b.failed ? TOOL_FAILED : code;
}
