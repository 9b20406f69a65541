/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `fattn` command: runs a subcommand, or lists all of them. Each subcommand is one file.
 */
#define _POSIX_C_SOURCE 200809L /* SIGXFSZ */

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "tools/commands.h"
#include "tools/terminal/terminal.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", fattn_tool_info, "devices, instruction sets, caches and what each kernel supports"},
    {"run", fattn_tool_run, "attention on .npy files, forward or backward"},
    {"check", fattn_tool_check, "a device's kernels against the reference, on random problems"},
    {"explain", fattn_tool_explain, "how a problem would be computed, and why"},
    {"bench", fattn_tool_bench, "speed, as a share of what the machine can do"},
    {"io", fattn_tool_io, "slow-memory traffic: counted, predicted and bounded"},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *out)
{
    fprintf(out, "Usage: fattn COMMAND [OPTION ...]\n\n"
                 "Exact attention: describes devices, runs, checks, explains and measures it.\n\n"
                 "Commands:\n");
    for (int i = 0; i < COMMANDS; i++) {
        fprintf(out, "  %-9s %s\n", commands[i].name, commands[i].summary);
    }
    fprintf(out, "\n"
                 "  fattn COMMAND --help   the options of a command\n"
                 "  fattn --version        the version of the library\n"
                 "\n"
                 "Exit status:\n"
                 "  0  success\n"
                 "  1  a check or a benchmark found a failure\n"
                 "  2  wrong options, FATTN_ variables or files\n"
                 "  3  the device or the library failed, or does not support what was asked\n");
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return TOOL_USAGE;
    }
    const char *const name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_help(stdout);
        return TOOL_OK;
    }
    if (strcmp(name, "--version") == 0) {
        printf("fattn %s\n", fattn_version());
        return TOOL_OK;
    }
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(name, commands[i].name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    fprintf(stderr, "fattn: no command \"%s\"; fattn --help lists them\n", name);
    return TOOL_USAGE;
}

int main(int argc, char **argv)
{
#ifdef SIGXFSZ
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is then an error of write() */
#endif
    const int code = dispatch(argc, argv);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "fattn: standard output cannot be written\n");
        return code == TOOL_OK ? TOOL_LIBRARY : code;
    }
    return code;
}
