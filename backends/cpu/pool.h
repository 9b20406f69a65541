/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's own threads. A pool serves the jobs of any number of callers at a time: a caller
 * posts its job, wakes workers and works itself, and can finish everything alone. So a pool whose
 * threads could not be made, or do not get a core, is slower and nothing else.
 */
#ifndef FATTN_CPU_POOL_H
#define FATTN_CPU_POOL_H

#include "backends/cpu/grant.h"
#include "backends/cpu/job.h"

typedef struct fattn_cpu_pool fattn_cpu_pool;

/* A pool whose workers may run on these processors; on those of the thread that makes them where
 * the set is empty. shared: the process's one, whose set is that of whoever opened it first.
 * Threads are made when a job first wants them. */
fattn_status fattn_cpu_pool_open(const fattn_cpu_set *cpus, bool shared, fattn_cpu_pool **opened);

/* Releases the pool; the last release ends its threads. No job may be running. */
void fattn_cpu_pool_close(fattn_cpu_pool *pool);

/* Runs a job with the calling thread and at most job->workers - 1 others. */
void fattn_cpu_pool_run(fattn_cpu_pool *pool, fattn_cpu_job *job);

#endif
