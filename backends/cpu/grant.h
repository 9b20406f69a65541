/* SPDX-License-Identifier: Apache-2.0 */
/* The processors that this process may use: those in the affinity of its threads, and as much of
 * their time as control groups grant it. */
#ifndef FATTN_CPU_GRANT_H
#define FATTN_CPU_GRANT_H

#include <stdbool.h>
#include <stdint.h>

/* Processors 0 .. FATTN_CPU_SET_SIZE - 1: more than Linux can number. */
#define FATTN_CPU_SET_SIZE 8192

typedef struct fattn_cpu_set {
    uint64_t bits[FATTN_CPU_SET_SIZE / 64];
} fattn_cpu_set;

void fattn_cpu_set_add(fattn_cpu_set *set, int64_t cpu);
int64_t fattn_cpu_set_count(const fattn_cpu_set *set);

/* Adds the processors in a list such as "0-3,8". Returns false if it is not such a list. */
bool fattn_cpu_set_parse(fattn_cpu_set *set, const char *list);

/* Whether the machine has any of them, or does not say which processors it has. */
bool fattn_cpu_set_exists(const fattn_cpu_set *set);

/* Adds the processors that this thread may run on, and those that the process's first thread may
 * run on: either thread may be bound to a few where the other is not. Adds none if the system does
 * not say. */
void fattn_cpu_set_allowed(fattn_cpu_set *set);

/* The same, of this thread alone. */
void fattn_cpu_set_own(fattn_cpu_set *set);

/* How many processors' full time the control groups of the process grant, rounded up; 0 if they do
 * not limit it. root: "", or the folder in which tests keep their own /proc and /sys */
int64_t fattn_cpu_quota(const char *root);

/* How many of the processors in `allowed` (all, if it is empty) the process may keep busy under its
 * control groups; at least 1. */
int64_t fattn_cpu_granted(const fattn_cpu_set *allowed);

#endif
