/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interface between cpu.c and the units of kernels. A unit is isa_tmpl.c or pairs_tmpl.c,
 * compiled for one instruction set. cpu.c owns the runs: a run is a sequence of phases, and a phase
 * is a number of items that workers take one after another until none are left. The units own the
 * arithmetic.
 */
#ifndef FATTN_CPU_H
#define FATTN_CPU_H

#include "backends/cpu/deal.h"
#include "backends/cpu/peak.h"
#include "core/kernel.h"
#include "core/merge.h"

/* One execution of a plan, as a worker sees it. */
typedef struct fattn_cpu_run {
    const fattn_problem *problem;
    const fattn_buffers *buffers;
    const fattn_tiling *tiling;
    const fattn_merge_job *onto; /* what the results are merged with, or NULL (store.h) */
    /* Sequences with at most so many rows per key/value head belong to the plan's second kernel; 0:
     * there is no second kernel. */
    int64_t few_rows;
    bool takes_few; /* this run is the second kernel's and takes only those sequences */
    char *shared;   /* workspace that all workers share; its contents are arbitrary at first */
    fattn_cpu_items *items; /* of this phase; NULL while they are being counted */
} fattn_cpu_run;

/* The items of a phase are independent of each other, or wait for lower ones with fattn_cpu_wait().
 * Phases run one after another. work() takes items until none are left. scratch is the worker's
 * own; its contents are arbitrary at first. */
typedef struct fattn_cpu_phase {
    int64_t (*count)(const fattn_cpu_run *run);
    void (*work)(const fattn_cpu_run *run, void *scratch);
    fattn_cpu_share share; /* how many items a worker has of its own (deal.h) */
} fattn_cpu_phase;

#define FATTN_CPU_PHASES 3

/* The features that kernels support unless their row takes some out. */
#define FATTN_CPU_FEATURES (FATTN_KERNEL_LAST | FATTN_SEQSTART_K | FATTN_ALIBI_BIAS)

struct decode_dots;
struct decode_sums;

/* A plan for few keys (brief.h): everything that does not change from run to run, side by side in
 * memory, because a run that comes after much other work finds nothing in cache. */
typedef struct fattn_cpu_brief {
    /* The functions of decode.h for these types and numbers of rows. */
    void (*dots)(const struct decode_dots *);
    void (*mix)(const struct decode_sums *);
    int64_t group, rows, pitch; /* of a key/value head (panel.h) */
    /* The first key, the number of keys, and that number rounded up to whole steps of dots(). */
    int64_t first, count, padded;
    int64_t k, v, q, o, x, zeros; /* their offsets in scratch, in bytes */
    int64_t d_pad, dv_pad;        /* D and Dv rounded up to vectors */
    int64_t k_bytes;              /* of a key; this and the distances below are in bytes */
    int64_t k_row, v_row;         /* from one to the next */
    int64_t q_row, o_row;         /* from a head of the group to the next one */
    int64_t q_wrap, o_wrap;       /* from the last head of the group to the next query */
    int64_t q_group, k_head, v_head, o_group; /* from a key/value head to the next one */
    float unit, natural;                      /* of the score rule (core/score.h) */
} fattn_cpu_brief;

typedef struct fattn_cpu_kernel {
    fattn_kernel row;
    bool merges; /* its runs merge their results with fattn_cpu_run.onto */
    /* Bytes of workspace: scratch of one worker, and what all workers share; -1 if they overflow.
     * Multiples of 64. Pure functions. */
    int64_t (*scratch)(const fattn_problem *problem, const fattn_tiling *tiling);
    int64_t (*shared)(const fattn_problem *problem, const fattn_tiling *tiling);
    /* Initialises the shared part on the caller's thread before the first phase; NULL: nothing to
     * do. */
    void (*begin)(const fattn_cpu_run *run);
    fattn_cpu_phase phases[FATTN_CPU_PHASES]; /* unused ones, at the end, have no work function */
    /* For plans that need neither items nor workers: brief_plan() says whether a plan is such a one
     * and fills in `brief`, and brief_run() does a whole run on the caller's thread. Both are NULL
     * in kernels that have no such plans. */
    bool (*brief_plan)(const fattn_problem *problem, const fattn_tiling *tiling,
                       fattn_cpu_brief *brief);
    void (*brief_run)(const fattn_cpu_brief *brief, const fattn_problem *problem,
                      const fattn_buffers *buffers, void *scratch);
} fattn_cpu_kernel;

/* The only global of a unit: fattn_cpu_scalar, ... Kernels are listed best first. */
typedef struct fattn_cpu_isa {
    const char *name;
    const char *base; /* the instruction set whose kernels take what these decline; or NULL */
    const fattn_cpu_kernel *kernels;
    int kernel_count;
    const fattn_cpu_peak *peaks; /* peak.h; the last has no name */
} fattn_cpu_isa;

/* a * b * c bytes, rounded up to 256; -1 if that exceeds 2^62 or a factor is negative. */
int64_t fattn_cpu_bytes(int64_t a, int64_t b, int64_t c);

/* Workspace of a run with one worker: what is shared, and its scratch; -1 on overflow. plan() in
 * cpu.c adds the scratch of the other workers, whose number changes nothing but the size of the
 * workspace. */
int64_t fattn_cpu_workspace_of_one(int64_t shared, int64_t scratch);

/* A counter that one worker advances and others wait for. Each has a cache line of its own, against
 * false sharing. */
typedef struct fattn_cpu_progress {
    _Alignas(64) int64_t done;
} fattn_cpu_progress;

void fattn_cpu_publish(fattn_cpu_progress *progress, int64_t done);
void fattn_cpu_wait(const fattn_cpu_progress *progress, int64_t done);

/* The items of fattn_merge() and of fattn_dropout_mask(): how many there are, and the work of one.
 * The public functions keep the number of rows below 2^62. */
int64_t fattn_cpu_merge_items(const fattn_merge_job *job);
void fattn_cpu_merge_item(const fattn_merge_job *job, int64_t item);
int64_t fattn_cpu_dropout_items(const fattn_dropout_args *args);
void fattn_cpu_dropout_item(const fattn_dropout_args *args, int64_t item);

#endif
