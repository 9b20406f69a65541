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

int fattn_tool_check(int argc, char **argv)
{
    const char *device = NULL, *kernel = NULL;
    int64_t cases = 1000, single = -1, jobs = 0;
    uint64_t seed = 1;
    bool listing = false, verbose = false, one = false, insist = false, counted = false;
    const option table[] = {
        {"device SPEC", "cpu, reference, cuda:1 ...; default FATTN_BACKEND, else the best present",
         OPTION_TEXT, .value = &device},
        {"cases N", "how many problems; default 1000", OPTION_INTEGER, .value = &cases, .min = 1,
         .max = INT64_C(1) << 40, .given = &counted},
        {"seed S", "which problems; default 1", OPTION_UNSIGNED, .value = &seed},
        {"case I", "only the I-th problem, in detail", OPTION_INTEGER, .value = &single, .min = 0,
         .max = INT64_C(1) << 40, .given = &one},
        {"kernel ROW", "only this row of the device's table; default: every row", OPTION_TEXT,
         .value = &kernel},
        {"jobs N", "cases judged in parallel; default: one per processor granted, at most 16",
         OPTION_INTEGER, .value = &jobs, .min = 1, .max = 256},
        {"insist", "gaps in what the cases cover are failures, not notes", OPTION_SWITCH,
         .value = &insist},
        {"list", "print the problems and run nothing", OPTION_SWITCH, .value = &listing},
        {"verbose", "print every problem, every refusal and every pair of features", OPTION_SWITCH,
         .value = &verbose},
        {.name = NULL},
    };
    const option_set set = {
        .command = "check",
        .summary =
            "Draws problems from a seed and judges every kernel row of a device against the\n"
            "reference in double precision. The last line is `N passed, N failed, N skipped`;\n"
            "a failure prints the command that shows it again.",
        .table = table,
    };
    const int parsed = options_parse(&set, argc, argv);
    if (parsed) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (one && counted) {
        return tool_usage("check", "--case is one problem and takes no --cases");
    }
    if (listing && (device || kernel || jobs || insist || verbose)) {
        return tool_usage("check", "--list runs nothing and takes no --%s",
                          device   ? "device"
                          : kernel ? "kernel"
                          : jobs   ? "jobs"
                          : insist ? "insist"
                                   : "verbose");
    }
    const int64_t first = one ? single : 0, count = one ? 1 : cases;
    if (listing) {
        list(seed, first, count);
        return TOOL_OK;
    }
    if (jobs == 0) {
        jobs = one ? 1 : default_jobs();
    }
    if (jobs > 1) { /* cases run in parallel, so a thread for each is enough */
        setenv("FATTN_NUM_THREADS", "1", 0);
    }

    trials s = {.prefix = "",
                .seed = seed,
                .first = first,
                .count = count,
                .jobs = (int)jobs,
                .verbose = verbose || one,
                .progress = verbose || one ? NULL : tool_progress};
    fattn_status status = fattn_device_open(device, &s.device);
    if (status) {
        return tool_failure(status);
    }
    fattn_device_info info = {.struct_size = sizeof info};
    status = fattn_device_get_info(s.device, &info);
    status = status ? status : trials_open(&s, kernel);
    if (status) {
        fattn_device_close(s.device);
        return tool_failure(status);
    }
    char command[128];
    snprintf(command, sizeof command, "fattn check --device %s", device ? device : info.backend);
    s.command = command;
    printf("device %s (%s), seed %" PRIu64 ", cases %" PRId64 "..%" PRId64 "\n", info.backend,
           info.isa, seed, first, first + count - 1);
    trials_run(&s);
    const trials_findings found = trials_report(&s);
    if (found.gaps) {
        printf("%d gaps in what the cases cover, marked above%s\n", found.gaps,
               insist ? "" : ": no fault of a kernel; more --cases close them");
    }
    if (found.medians) {
        printf("%d medians of errors are too large, marked above\n", found.medians);
    }
    const int64_t failures = s.failed + found.medians + (insist ? found.gaps : 0);
    printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " skipped\n", s.passed, failures,
           s.skipped);
    const bool failed = failures > 0;
    trials_close(&s);
    fattn_device_close(s.device);
    return failed ? TOOL_FAILED : TOOL_OK;
}
