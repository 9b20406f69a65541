/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's own threads. A pool serves the jobs of any number of callers at a time. A caller
 * posts its job, wakes workers and works itself, and it can finish everything alone. So a pool
 * whose threads could not be created, or get no core, makes a run slower and has no other effect.
 */
#ifndef FATTN_CPU_POOL_H
#define FATTN_CPU_POOL_H

#include "backends/cpu/grant.h"
#include "backends/cpu/job.h"

typedef struct fattn_cpu_pool fattn_cpu_pool;

/* Opens a pool whose workers may run on `cpus` or, if that is empty, where the thread that creates
 * them may run. shared: the one pool of the process, with the processors of whoever opened it
 * first. Threads are created when a job first needs them. */
fattn_status fattn_cpu_pool_open(const fattn_cpu_set *cpus, bool shared, fattn_cpu_pool **opened);

/* Releases a pool. The last release ends its threads. No job may be running. */
void fattn_cpu_pool_close(fattn_cpu_pool *pool);

/* Runs a job with the calling thread and at most job->workers - 1 others. */
void fattn_cpu_pool_run(fattn_cpu_pool *pool, fattn_cpu_job *job);

#endif
