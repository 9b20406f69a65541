/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* madvise */
#include "backends/cpu/pages.h"

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/integer.h"
#include "core/operands.h"

enum {
    PAGE = 4096,        /* bytes; pages may also be larger */
    ITEM = 64 * PAGE,   /* bytes of an item */
    LEAST = 256 * PAGE, /* bytes; smaller blocks are mostly used again, with their pages */
    MOST_KEYS = 512     /* in forward; workers seldom meet where there are more */
};

/* Whether an output has pages with rows of several heads, and no gaps between its rows, where pages
 * would be the caller's. */
static bool shares_pages(const fattn_operand *output)
{
    const fattn_region *const r = &output->region;
    const int64_t heads = r->extent[2];
    int64_t span;
    return output->kind == FATTN_OPERAND_TENSOR && heads > 1 && r->stride[2] < PAGE &&
           fattn_region_span(r, &span) && span >= LEAST &&
           span == r->extent[0] * r->extent[1] * heads * r->run;
}

void fattn_cpu_pages_plan(const fattn_problem *problem, int64_t workers, fattn_cpu_pages *pages)
{
    const uint64_t others = FATTN_ACCUMULATE | FATTN_SEQUSED_Q | FATTN_SEQUSED_K;
    *pages = (fattn_cpu_pages){.items = 0};
    const bool meet = problem->op == FATTN_BACKWARD || problem->seqlen_k <= MOST_KEYS;
    if (workers == 1 || !meet || problem->features & others) {
        return; /* sums have their pages already, and rows that are not used need none */
    }
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(problem, NULL, operands);
    for (int i = 0, n = 0; i < count; i++) {
        const fattn_region *const r = &operands[i].region;
        if (operands[i].output && shares_pages(&operands[i])) {
            pages->output[n].offset = operands[i].offset;
            pages->output[n].row_bytes = r->extent[2] * r->run;
            pages->output[n].bytes = r->extent[0] * r->extent[1] * pages->output[n].row_bytes;
            pages->output[n].keys = operands[i].offset == offsetof(fattn_buffers, dk) ||
                                    operands[i].offset == offsetof(fattn_buffers, dv);
            pages->items += fattn_ceil_div(pages->output[n++].bytes, ITEM);
        }
    }
}

/* Has the system make the pages of a range, whose contents stay as they are. (A program would take
 * two faults a page: a read gets a page of zeros that all share, and only a write gets its own.)
 * Linux before 5.14 and other systems make pages when they are written to. */
static void make_pages(const char *first, int64_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    const uintptr_t before = (uintptr_t)first % (uintptr_t)sysconf(_SC_PAGESIZE);
    (void)madvise((char *)(uintptr_t)(first - before), (size_t)bytes + before, MADV_POPULATE_WRITE);
#else
    (void)first, (void)bytes;
#endif
}

void fattn_cpu_pages_item(const fattn_cpu_pages *pages, const fattn_problem *problem,
                          const fattn_buffers *buffers, int64_t item)
{
    int n = 0;
    for (; item * ITEM >= pages->output[n].bytes; n++) {
        item -= fattn_ceil_div(pages->output[n].bytes, ITEM);
    }
    const int32_t *const cu = pages->output[n].keys ? buffers->cu_seqlens_k : buffers->cu_seqlens_q;
    const int64_t rows = pages->output[n].bytes / pages->output[n].row_bytes;
    const int64_t used = cu ? fattn_min64(cu[problem->batch], rows) : rows;
    const int64_t past = fattn_min64((item + 1) * ITEM, used * pages->output[n].row_bytes);
    const char *output;
    memcpy(&output, (const char *)buffers + pages->output[n].offset, sizeof output);
    if (item * ITEM < past) {
        make_pages(output + item * ITEM, past - item * ITEM);
    }
}
