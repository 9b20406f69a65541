/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TAP for plain C test programs: one line per check, and the count at the end. For programs that
 * must run unchanged under valgrind, under qemu and on other processors.
 */
#ifndef FATTN_TESTS_TAP_H
#define FATTN_TESTS_TAP_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static int tap_count, tap_failures;

#if defined(__GNUC__)
static inline void tap_check(bool passed, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
#endif

static inline void tap_check(bool passed, const char *format, ...)
{
    va_list arguments;
    printf("%s %d - ", passed ? "ok" : "not ok", ++tap_count);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
    tap_failures += !passed;
}

/* A single check is skipped, with a reason. */
static inline void tap_skip(const char *name, const char *why)
{
    printf("ok %d - %s # SKIP %s\n", ++tap_count, name, why);
    fflush(stdout);
}

/* The whole program is skipped, with a reason. */
static inline void tap_skip_all(const char *why)
{
    printf("1..0 # SKIP %s\n", why);
    fflush(stdout);
}

/* Ends a program that cannot go on: it has no memory, no thread, no problem to test with. */
static inline _Noreturn void tap_bail(const char *why)
{
    printf("Bail out! %s\n", why);
    exit(1);
}

/* The result of main: 0 if every check passed. A program without checks fails. */
static inline int tap_done(void)
{
    printf("1..%d\n", tap_count);
    return tap_failures != 0 || tap_count == 0;
}

#endif
