/* SPDX-License-Identifier: Apache-2.0 */
/* User interface of the subcommands of `fattn`: exit codes, error messages, a progress bar. */
#ifndef FATTN_TOOLS_TERMINAL_H
#define FATTN_TOOLS_TERMINAL_H

#include <stdint.h>

#include "core/status.h"
#include "fattn/fattn.h"

/* Exit codes, as `fattn --help` documents them. */
enum {
    TOOL_OK = 0,
    TOOL_FAILED = 1, /* a check or a benchmark found a failure */
    TOOL_USAGE = 2,  /* wrong options, FATTN_ variables or files */
    TOOL_LIBRARY = 3 /* the device or the library failed or does not support the request */
};

/* Prints "fattn <command>: " and the sentence as one line on stderr; returns TOOL_USAGE. */
int tool_usage(const char *command, const char *format, ...) FATTN_PRINTF(2, 3);

/* The exit code for a status: TOOL_USAGE if the request is wrong on every device (the statuses
 * below FATTN_UNSUPPORTED) or the environment is wrong, else TOOL_LIBRARY. */
int tool_exit_code(fattn_status status);

/* Prints "fattn: <status>: <fattn_last_reason()>" as one line on stderr; returns its exit code. */
int tool_failure(fattn_status status);

/* Draws a progress bar on stderr, `done` of `count`, if stderr is a terminal. A count of 0 clears
 * it. Clear it before printing anything else. */
void tool_progress(int64_t done, int64_t count);
void tool_progress_clear(void);

/* Writes text as a JSON string, quotes included. */
void tool_json_string(const char *text);

#endif
