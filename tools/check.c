/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn check`: compares the kernels of a device with the reference on random problems. */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "backends/cpu/team.h"
#include "tools/commands.h"
#include "tools/judge/trials.h"
#include "tools/options/options.h"
#include "tools/terminal/terminal.h"

static void list(uint64_t seed, int64_t first, int64_t count)
{
    for (int64_t index = first; index < first + count; index++) {
        draw_case c;
        char words[1024];
        if (draw_problem(&c, seed, index) == 0) {
            draw_describe(&c, words, sizeof words);
            printf("%" PRId64 ": %s\n", index, words);
        }
        draw_free(&c);
    }
}

static int64_t default_jobs(void)
{
    const int64_t processors = fattn_cpu_team_granted();
    return processors > 16 ? 16 : processors;
}

/* The command's options. */
typedef struct request {
    const char *device, *kernel;
    int64_t cases, single, jobs; /* jobs 0: the default */
    uint64_t seed;
    bool listing, verbose, one, insist, counted; /* one, counted: --case, --cases is given */
} request;

/* Returns what options_parse() returns. */
static int parse(int argc, char **argv, request *r)
{
    const option table[] = {
        {"device SPEC", "cpu, reference, cuda:1 ...; default FATTN_BACKEND, else the best present",
         OPTION_TEXT, .value = &r->device},
        {"cases N", "how many problems; default 1000", OPTION_INTEGER, .value = &r->cases, .min = 1,
         .max = INT64_C(1) << 40, .given = &r->counted},
        {"seed S", "which problems; default 1", OPTION_UNSIGNED, .value = &r->seed},
        {"case I", "only the I-th problem, in detail", OPTION_INTEGER, .value = &r->single,
         .min = 0, .max = INT64_C(1) << 40, .given = &r->one},
        {"kernel ROW", "only this row of the device's table; default: every row", OPTION_TEXT,
         .value = &r->kernel},
        {"jobs N", "cases judged in parallel; default: one per processor granted, at most 16",
         OPTION_INTEGER, .value = &r->jobs, .min = 1, .max = 256},
        {"insist", "gaps in coverage are failures, not notes", OPTION_SWITCH, .value = &r->insist},
        {"list", "print the problems and run nothing", OPTION_SWITCH, .value = &r->listing},
        {"verbose", "print every problem, every refusal and every pair of features", OPTION_SWITCH,
         .value = &r->verbose},
        {.name = NULL},
    };
    const option_set set = {
        .command = "check",
        .summary =
            "Generates random problems from a seed and compares every kernel of a device with the\n"
            "reference in double precision. The last line is `N passed, N failed, N skipped`;\n"
            "for a failure it prints the command that reproduces it.\n"
            "\n"
            "Before that it prints three tables. The first counts, for each kernel, the problems\n"
            "that it passed, failed and does not take (declined); of those that ran, how many had\n"
            "more than 4 tiles of scores a head, and how many had results that are all zero and\n"
            "test little; and elements that were not judged (excused). The second has errors\n"
            "divided by those of the plain formula in f32, by kinds of inputs. The third counts\n"
            "the problems with each feature and each pair of features; ! marks none.",
        .table = table,
    };
    return options_parse(&set, argc, argv);
}

/* Refuses options that would have no effect. */
static bool consistent(const request *r)
{
    if (r->one && r->counted) {
        tool_usage("check", "--case is one problem and takes no --cases");
        return false;
    }
    if (r->listing && (r->device || r->kernel || r->jobs || r->insist || r->verbose)) {
        tool_usage("check", "--list runs nothing and takes no --%s",
                   r->device   ? "device"
                   : r->kernel ? "kernel"
                   : r->jobs   ? "jobs"
                   : r->insist ? "insist"
                               : "verbose");
        return false;
    }
    return true;
}

/* Prints what was found. Returns the number of failures. */
static int64_t report(const trials *s, bool insist)
{
    const trials_findings found = trials_report(s);
    if (found.gaps) {
        printf("%d gaps in what the cases cover, marked above%s\n", found.gaps,
               insist ? "" : ": no fault of a kernel; more --cases close them");
    }
    if (found.medians) {
        printf("%d medians of errors are too large, marked above\n", found.medians);
    }
    const int64_t failures = s->failed + found.medians + (insist ? found.gaps : 0);
    printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " skipped\n", s->passed, failures,
           s->skipped);
    return failures;
}

static int judge(const request *r, int64_t first, int64_t count)
{
    const int64_t jobs = r->jobs ? r->jobs : r->one ? 1 : default_jobs();
    if (jobs > 1) { /* cases run in parallel, so a thread for each is enough */
        setenv("FATTN_NUM_THREADS", "1", 0);
    }
    const bool verbose = r->verbose || r->one;
    trials s = {.prefix = "",
                .seed = r->seed,
                .first = first,
                .count = count,
                .jobs = (int)jobs,
                .verbose = verbose,
                .progress = verbose ? NULL : tool_progress};
    fattn_status status = fattn_device_open(r->device, &s.device);
    if (status) {
        return tool_failure(status);
    }
    fattn_device_info info = {.struct_size = sizeof info};
    status = fattn_device_get_info(s.device, &info);
    status = status ? status : trials_open(&s, r->kernel);
    if (status) {
        fattn_device_close(s.device);
        return tool_failure(status);
    }
    char command[128];
    snprintf(command, sizeof command, "fattn check --device %s",
             r->device ? r->device : info.backend);
    s.command = command;
    printf("device %s (%s), seed %" PRIu64 ", cases %" PRId64 "..%" PRId64 "\n", info.backend,
           info.isa, r->seed, first, first + count - 1);
    trials_run(&s);
    const int64_t failures = report(&s, r->insist);
    trials_close(&s);
    fattn_device_close(s.device);
    return failures > 0 ? TOOL_FAILED : TOOL_OK;
}

int fattn_tool_check(int argc, char **argv)
{
    request r = {.cases = 1000, .seed = 1};
    const int parsed = parse(argc, argv, &r);
    if (parsed) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (!consistent(&r)) {
        return TOOL_USAGE;
    }
    const int64_t first = r.one ? r.single : 0, count = r.one ? 1 : r.cases;
    if (!r.listing) {
        return judge(&r, first, count);
    }
    list(r.seed, first, count);
    return TOOL_OK;
}
