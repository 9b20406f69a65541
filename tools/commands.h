/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The subcommands of `fattn`, each in a file of its name. A subcommand gets its own name in argv[0]
 * and its options after it, prints results to stdout and everything else to stderr, frees what it
 * allocated and returns its exit code (tools/terminal/terminal.h); it never calls exit().
 */
#ifndef FATTN_TOOLS_COMMANDS_H
#define FATTN_TOOLS_COMMANDS_H

int fattn_tool_info(int argc, char **argv);
int fattn_tool_run(int argc, char **argv);
int fattn_tool_check(int argc, char **argv);
int fattn_tool_explain(int argc, char **argv);
int fattn_tool_bench(int argc, char **argv);
int fattn_tool_io(int argc, char **argv);

#endif
