/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What cpu.c and the units of kernels, isa_tmpl.c and pairs_tmpl.c, know of each other. cpu.c owns
 * the runs: a run is a sequence of phases, a phase a number of items, which workers take until
 * there are none. The units own the arithmetic.
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
    int64_t pieces; /* that decoding cuts the keys of all sequences into (core/tiling.h), or 0 */
    const fattn_merge_job *onto; /* what results are merged with, or NULL (store.h) */
    /* Sequences of at most so many rows of a key/value head belong to the plan's second kernel; 0:
     * there is none. */
    int64_t few_rows;
    bool takes_few; /* this run is that kernel's, and has those alone */
    char *shared;   /* of the workspace, what all workers see; contents are arbitrary at first */
    fattn_cpu_items *items; /* of this phase; NULL while they are counted */
} fattn_cpu_run;

/* Items of a phase are independent, or wait for lower ones by fattn_cpu_wait(); phases follow one
 * another. work() takes items until there are none. scratch is the worker's own, with arbitrary
 * contents at first. */
typedef struct fattn_cpu_phase {
    int64_t (*count)(const fattn_cpu_run *run);
    void (*work)(const fattn_cpu_run *run, void *scratch);
    fattn_cpu_share share; /* how its items are dealt */
} fattn_cpu_phase;

#define FATTN_CPU_PHASES 3

/* What kernels honour, but for what a row takes out. */
#define FATTN_CPU_FEATURES (FATTN_KERNEL_LAST | FATTN_SEQSTART_K | FATTN_ALIBI_BIAS)

struct decode_dots;
struct decode_sums;

/* What a run of few keys needs to know (brief.h): everything that does not depend on the run, side
 * by side, because such a run finds nothing in cache when it comes after much other work. */
typedef struct fattn_cpu_brief {
    void (*dots)(const struct decode_dots *); /* of decode.h, for the types and the pitch */
    void (*mix)(const struct decode_sums *);
    int64_t group, rows, pitch;   /* of a key/value head */
    int64_t first, count, padded; /* keys, and as many with those that fill a last step */
    int64_t k, v, q, o, x, zeros; /* where they lie in scratch */
    int64_t d_pad, dv_pad;        /* D and Dv rounded up to vectors */
    int64_t k_bytes;              /* of a key */
    int64_t k_row, v_row;         /* from one to the next */
    int64_t q_row, o_row;         /* from a head of the group to the next one */
    int64_t q_wrap, o_wrap;       /* from its last head to the first of the next query */
    int64_t q_group, k_head, v_head, o_group; /* from a key/value head to the next one */
    float unit, natural;                      /* of the score rule */
} fattn_cpu_brief;

typedef struct fattn_cpu_kernel {
    fattn_kernel row;
    bool merges; /* its runs merge their results with fattn_cpu_run.onto */
    /* Bytes of workspace: of one worker, and of all together (-1: too many). Multiples of 64.
     * Pure. */
    int64_t (*scratch)(const fattn_problem *problem, const fattn_tiling *tiling);
    int64_t (*shared)(const fattn_problem *problem, const fattn_tiling *tiling);
    /* Sets what workers share, on the caller's thread, before the first phase; NULL: nothing. */
    void (*begin)(const fattn_cpu_run *run);
    fattn_cpu_phase phases[FATTN_CPU_PHASES]; /* those without a work function are over at once */
    /* A plan whose runs need no items, but are done at once on the caller's thread: brief_plan says
     * whether it is one, brief_run does a run. Both are NULL where none is. */
    bool (*brief_plan)(const fattn_problem *problem, const fattn_tiling *tiling,
                       fattn_cpu_brief *brief);
    void (*brief_run)(const fattn_cpu_brief *brief, const fattn_problem *problem,
                      const fattn_buffers *buffers, void *scratch);
} fattn_cpu_kernel;

/* The only global of a unit: fattn_cpu_scalar, ... Rows best first. */
typedef struct fattn_cpu_isa {
    const char *name;
    const char
        *base; /* the instruction set whose rows follow, where these leave problems; or NULL */
    const fattn_cpu_kernel *kernels;
    int kernel_count;
    const fattn_cpu_peak *peaks; /* peak.h; the last has no name */
} fattn_cpu_isa;

/* a * b * c bytes, rounded up to 256; -1 when that passes 2^62 or a factor is -1. */
int64_t fattn_cpu_bytes(int64_t a, int64_t b, int64_t c);

/* Workspace of a run with one worker: what is shared, and its scratch; -1 on overflow. Planning
 * adds the other workers'. Their number changes the size of the workspace and nothing else. */
int64_t fattn_cpu_workspace_of_one(int64_t shared, int64_t scratch);

/* A counter that one worker advances and others wait for; a cache line each, or they disturb each
 * other. */
typedef struct fattn_cpu_progress {
    _Alignas(64) int64_t done;
} fattn_cpu_progress;

void fattn_cpu_publish(fattn_cpu_progress *progress, int64_t done);
void fattn_cpu_wait(const fattn_cpu_progress *progress, int64_t done);

/* The items of fattn_merge() and of fattn_dropout_mask(), and what one of them does. The public
 * functions keep the number of rows below 2^62. */
int64_t fattn_cpu_merge_items(const fattn_merge_job *job);
void fattn_cpu_merge_item(const fattn_merge_job *job, int64_t item);
int64_t fattn_cpu_dropout_items(const fattn_dropout_args *args);
void fattn_cpu_dropout_item(const fattn_dropout_args *args, int64_t item);

#endif
