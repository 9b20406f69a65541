/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests how `fattn check` reports its cases. This program replaces the judge, so that each check
 * can make kernels pass or fail.
 */
#define _POSIX_C_SOURCE 200809L /* dup, setenv */

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/tap.h"
#include "tools/commands.h"
#include "tools/judge/judge.h"
#include "tools/judge/trials.h"
#include "tools/terminal/terminal.h"

static judge_outcome outcome;
static double median;

void judge_truth_free(judge_truth *truth) { (void)truth; }

double judge_median(const judge_ratios *ratios) { return ratios->count ? median : 0; }

void judge_run(fattn_device *device, const fattn_kernel *kernel, const draw_case *c,
               judge_truth *truth, judge_verdict *verdict)
{
    (void)device, (void)kernel, (void)c, (void)truth;
    *verdict = (judge_verdict){.outcome = outcome, .ratios = {.count = 10}};
}

static int out;

/* What is printed until show_output() is not TAP. */
static bool hide_output(void)
{
    const int nowhere = open("/dev/null", O_WRONLY);
    fflush(stdout);
    out = dup(STDOUT_FILENO);
    const bool hidden = out >= 0 && nowhere >= 0 && dup2(nowhere, STDOUT_FILENO) >= 0;
    close(nowhere);
    return hidden;
}

static void show_output(void)
{
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
}

/* The exit status of `fattn check` over this many cases, of one row or of all. */
static int check_rows(const char *row, const char *cases, const char *more)
{
    char *argv[11] = {"check", "--device", "cpu", "--jobs", "1", "--cases", (char *)cases};
    int argc = 7;
    if (row) {
        argv[argc++] = "--kernel";
        argv[argc++] = (char *)row;
    }
    if (more) {
        argv[argc++] = (char *)more;
    }
    if (!hide_output()) {
        return -1;
    }
    const int code = fattn_tool_check(argc, argv);
    show_output();
    return code;
}

static int check(const char *cases, const char *more)
{
    return check_rows("scalar_decode", cases, more);
}

static atomic_int calls, overlapping;

static void progress(int64_t done, int64_t count)
{
    (void)done, (void)count;
    overlapping += atomic_fetch_add(&calls, 1) != 0;
    for (int i = 0; i < 3; i++) {
        sched_yield();
    }
    calls--;
}

/* Of many jobs that print each case. */
static void check_progress(void)
{
    trials s = {.command = "",
                .prefix = "",
                .count = 300,
                .jobs = 8,
                .verbose = true,
                .progress = progress};
    const bool ran = fattn_device_open("cpu", &s.device) == FATTN_OK &&
                     trials_open(&s, "scalar_decode") == FATTN_OK && hide_output();
    if (ran) {
        trials_run(&s);
        show_output();
        trials_close(&s);
    }
    fattn_device_close(s.device);
    tap_check(ran && overlapping == 0, "calls of progress never overlap");
}

int main(void)
{
    setenv("FATTN_CPU_ISA", "scalar", 1);
    outcome = JUDGE_PASSED;
    tap_check(check("500", NULL) == TOOL_OK, "gaps in what was covered are no failure");
    tap_check(check("500", "--insist") == TOOL_FAILED, "but with --insist they are");
    tap_check(check_rows(NULL, "500", NULL) == TOOL_OK && /* no case of the judge's has 3 tiles */
                  check_rows(NULL, "500", "--insist") == TOOL_FAILED,
              "nor are they in what all rows covered together");
    tap_check(check("50", "--insist") == TOOL_OK, "too few cases say nothing about gaps");
    outcome = JUDGE_FAILED;
    tap_check(check("50", NULL) == TOOL_FAILED, "a failed case is a failure");
    outcome = JUDGE_PASSED;
    median = 1.3;
    tap_check(check("4000", NULL) == TOOL_FAILED, "so are errors that are too large together");
    median = 0;
    check_progress();
    return tap_done();
}
