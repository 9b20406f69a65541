/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which threads work for a device, and how many: one interface to the library's own threads, those
 * of OpenMP, and those of the caller.
 */
#ifndef FATTN_CPU_TEAM_H
#define FATTN_CPU_TEAM_H

#include "backends/cpu/pool.h"
#include "fattn/fattn.h"

typedef struct fattn_cpu_team fattn_cpu_team;

/* An OpenMP runtime that the process has loaded. */
typedef struct fattn_cpu_runtime {
    /* Runs body(data) on up to `threads` threads, one of which is the caller. Compilers begin
     * parallel regions with this function (libgomp's manual, "Implementing PARALLEL construct";
     * LLVM's runtime has it, too). */
    void (*region)(void (*body)(void *data), void *data, unsigned threads, unsigned flags);
    /* The number of the calling thread in its region; 0 for the caller of region(). */
    int (*number)(void);
} fattn_cpu_runtime;

struct fattn_cpu_team {
    int threads;      /* the most threads of a job, 1 .. FATTN_THREADS_MAX */
    bool from_openmp; /* `threads` is OpenMP's default */
    fattn_parallel_for parallel_for;
    void *parallel_user;
    fattn_cpu_runtime runtime; /* set if a loaded runtime provides the threads */
    fattn_cpu_pool *pool;      /* set if the library provides the threads, else NULL */
    void (*run)(const fattn_cpu_team *team, fattn_cpu_job *job);
};

/* How many processors the process may keep busy, at least 1. */
int64_t fattn_cpu_team_granted(void);

/* Opens a team. Valid options are assumed, except for `cpus`, which is checked here. */
fattn_status fattn_cpu_team_open(fattn_cpu_team *team, const fattn_device_options *options);
void fattn_cpu_team_close(fattn_cpu_team *team);

/* Runs a job with at most job->workers threads, which must not exceed team->threads. */
void fattn_cpu_team_run(const fattn_cpu_team *team, fattn_cpu_job *job);

#endif
