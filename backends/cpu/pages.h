/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages of outputs. Memory that a program has just allocated gets a page when it is first
 * written to. If heads are adjacent in memory, a page has rows of several heads. Workers compute
 * several heads at a time, in backward and where sequences are short, and would write to a new page
 * at the same time: the operating system would then clear a page for each of them, and throw away
 * all but one. So a phase before all others makes the pages; each worker takes others.
 */
#ifndef FATTN_CPU_PAGES_H
#define FATTN_CPU_PAGES_H

#include "backends/cpu/cpu.h"

#define FATTN_CPU_PAGED_OUTPUTS 3 /* dq, dk and dv; or o */

/* Part of a plan. */
typedef struct fattn_cpu_pages {
    int64_t items; /* of the phase; 0: there is no such phase */
    struct {
        size_t offset;     /* of the pointer in fattn_buffers */
        int64_t bytes;     /* of the whole tensor */
        int64_t row_bytes; /* of all heads of a row */
        bool keys;         /* rows are keys, not queries */
    } output[FATTN_CPU_PAGED_OUTPUTS];
} fattn_cpu_pages;

/* Finds the outputs of a plan for whose pages workers would wait. */
void fattn_cpu_pages_plan(const fattn_problem *problem, int64_t workers, fattn_cpu_pages *pages);

/* Makes the pages of an item. */
void fattn_cpu_pages_item(const fattn_cpu_pages *pages, const fattn_problem *problem,
                          const fattn_buffers *buffers, int64_t item);

#endif
