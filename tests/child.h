/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work in a process of its own, which may hang or die without taking the test along:
 *
 *     const pid_t child = child_start(60);
 *     if (child == 0) {
 *         _exit(!works());
 *     }
 *     tap_check(child_succeeds(child), "it works");
 */
#ifndef FATTN_TESTS_CHILD_H
#define FATTN_TESTS_CHILD_H

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* fork(). A child that still runs after so many seconds is killed by its own alarm. */
static inline pid_t child_start(unsigned seconds)
{
    fflush(stdout); /* else the child would print it again */
    const pid_t child = fork();
    if (child == 0) {
        alarm(seconds);
    }
    return child;
}

/* Waits for a child. False if it did not exit with status 0, or was never started. */
static inline bool child_succeeds(pid_t child)
{
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

#endif
