/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the subcommands of `fattn` share: how they are called and how they end.
 *
 * A subcommand gets its own name in argv[0] and its options after it, prints results to stdout and
 * everything else to stderr, frees what it allocated and returns its exit code; it never calls
 * exit().
 */
#ifndef FATTN_TOOLS_TOOL_H
#define FATTN_TOOLS_TOOL_H

#include <stdint.h>

#include "core/status.h"
#include "fattn/fattn.h"

/* Exit codes, as `fattn --help` documents them. */
enum {
    TOOL_OK = 0,
    TOOL_FAILED = 1, /* a check or a benchmark found a failure */
    TOOL_USAGE = 2,  /* wrong options or input files */
    TOOL_LIBRARY = 3 /* the device or the library failed, or memory ran out */
};

int fattn_tool_info(int argc, char **argv);
int fattn_tool_run(int argc, char **argv);
int fattn_tool_check(int argc, char **argv);
int fattn_tool_explain(int argc, char **argv);
int fattn_tool_bench(int argc, char **argv);
int fattn_tool_io(int argc, char **argv);

/* Prints "fattn <command>: " and the sentence as one line on stderr; returns TOOL_USAGE. */
int tool_usage(const char *command, const char *format, ...) FATTN_PRINTF(2, 3);

/* Prints "fattn: <status>: <fattn_last_reason()>" as one line on stderr; returns TOOL_LIBRARY. */
int tool_failure(fattn_status status);

/* Processors that this process may run on: those of its affinity, where the system has one. */
int tool_processors(void);

/* A bar on stderr, where that is a terminal: done of count are behind us. Whoever prints while it
 * is there clears it first. */
void tool_progress(int64_t done, int64_t count);
void tool_progress_clear(void);

/* Writes text as a JSON string, quotes included. */
void tool_json_string(const char *text);

#endif
