/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose threads work for a device, and how many: one interface for those of OpenMP, of the caller
 * and of the library.
 */
#ifndef FATTN_CPU_TEAM_H
#define FATTN_CPU_TEAM_H

#include "backends/cpu/pool.h"
#include "fattn/fattn.h"

typedef struct fattn_cpu_team fattn_cpu_team;

/* A runtime of OpenMP that the process has loaded. */
typedef struct fattn_cpu_runtime {
    /* Runs body(data) on so many threads, or fewer, of which the caller is one: how compilers begin
     * a parallel region (libgomp's manual, "Implementing PARALLEL construct"; LLVM's runtime has
     * it, too). */
    void (*region)(void (*body)(void *data), void *data, unsigned threads, unsigned flags);
    int (*number)(void); /* of the calling thread in its region; the caller of region() has 0 */
} fattn_cpu_runtime;

struct fattn_cpu_team {
    int threads;      /* that a job may have, 1 .. FATTN_THREADS_MAX */
    bool from_openmp; /* the number is what OpenMP said */
    fattn_parallel_for parallel_for;
    void *parallel_user;
    fattn_cpu_runtime runtime; /* whose threads they are; NULL functions: nobody's */
    fattn_cpu_pool *pool;      /* of OWN threads, else NULL */
    void (*run)(const fattn_cpu_team *team, fattn_cpu_job *job);
};

/* Processors that the process may keep busy, 1 or more. */
int64_t fattn_cpu_team_granted(void);

/* options are valid. */
fattn_status fattn_cpu_team_open(fattn_cpu_team *team, const fattn_device_options *options);
void fattn_cpu_team_close(fattn_cpu_team *team);

/* Goes through a job with at most job->workers threads, which are no more than team->threads. */
void fattn_cpu_team_run(const fattn_cpu_team *team, fattn_cpu_job *job);

#endif
