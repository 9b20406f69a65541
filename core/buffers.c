/* SPDX-License-Identifier: Apache-2.0 */
/* Validation of one run: its pointers, and the lengths and tables behind them. The other half of
 * problem.h is in problem.c. */
#include "core/buffers.h"

#include <stdio.h>
#include <string.h>

#include "core/abi.h"
#include "core/operands.h"
#include "core/philox.h"
#include "core/problem.h"
#include "core/status.h"

#define POSITION_LIMIT \
    (INT64_C(1) << 40) /* offsets and whole lengths: sums stay far inside 63 bits */

void fattn_buffers_init(fattn_buffers *buffers)
{
    memset(buffers, 0, sizeof *buffers);
    buffers->struct_size = sizeof *buffers;
    buffers->whole_q = buffers->whole_k = -1;
}

static void init_buffers(void *to) { fattn_buffers_init(to); }

fattn_status fattn_buffers_read(fattn_buffers *to, const fattn_buffers *from)
{
    static const fattn_abi abi = {
        .name = "fattn_buffers",
        .sizes = {FATTN_ABI_END(fattn_buffers, offset_ptr),
                  FATTN_ABI_END(fattn_buffers, v_descale)},
        .init = init_buffers,
    };
    _Static_assert(sizeof(fattn_buffers) == FATTN_ABI_END(fattn_buffers, v_descale),
                   "the last of the sizes is this library's");
    return fattn_abi_read_grown(to, &abi, from);
}

/* A pointer of a tensor must be a multiple of the problem's pointer_alignment, any other pointer a
 * multiple of its elements' size. */
static fattn_status fail_misaligned(const fattn_operand *operand)
{
    const uintptr_t base = operand->region.base;
    const int64_t given = (int64_t)(base & (~base + 1)); /* the largest power of two dividing it */
    const int64_t bytes = operand->dtype ? fattn_dtype_size(operand->dtype) : operand->alignment;
    if (given < bytes) {
        return fattn_fail(FATTN_MISALIGNED,
                          "%s is %p, not a multiple of %lld bytes, the size of its elements",
                          operand->name, (void *)base, (long long)bytes);
    }
    return fattn_fail(FATTN_MISALIGNED,
                      "%s is %p, not a multiple of %lld bytes, as the plan's pointer_alignment "
                      "promises: this pointer needs a plan with pointer_alignment %lld",
                      operand->name, (void *)base, (long long)operand->alignment, (long long)given);
}

static fattn_status check_pointer(const fattn_operand *operand)
{
    if (fattn_region_is_empty(&operand->region)) {
        return FATTN_OK;
    }
    if (operand->region.base == 0) {
        return operand->optional ? FATTN_OK
                                 : fattn_fail(FATTN_NULL_POINTER, "%s is NULL", operand->name);
    }
    if (operand->region.base % (uintptr_t)operand->alignment) {
        return fail_misaligned(operand);
    }
    int64_t bytes = 0;
    (void)fattn_region_span(&operand->region, &bytes); /* fits: the problem was checked */
    if (operand->region.base > UINTPTR_MAX - (uintptr_t)bytes) {
        return fattn_fail(FATTN_OVERFLOW, "%s is %p: its %lld bytes pass the end of memory",
                          operand->name, (void *)operand->region.base, (long long)bytes);
    }
    return FATTN_OK;
}

/* The reason has the addresses and sizes of both operands, and num_pages if one of them is paged,
 * since a wrong num_pages makes it too large. */
static fattn_status fail_overlap(const fattn_problem *p, const fattn_operand *a,
                                 const fattn_operand *b)
{
    int64_t a_bytes = 0, b_bytes = 0;
    (void)fattn_region_span(&a->region, &a_bytes); /* fits: the problem was checked */
    (void)fattn_region_span(&b->region, &b_bytes);
    const bool keys =
        b->offset == offsetof(fattn_buffers, k) || b->offset == offsetof(fattn_buffers, v);
    const bool paged = p->features & FATTN_PAGED && keys;
    char pages[48] = "";
    if (paged) {
        snprintf(pages, sizeof pages, ", num_pages %lld", (long long)p->num_pages);
    }
    return fattn_fail(FATTN_OVERLAP, "%s overlaps %s: %lld bytes at %p and %lld bytes at %p%s",
                      a->name, b->name, (long long)a_bytes, (void *)a->region.base,
                      (long long)b_bytes, (void *)b->region.base, pages);
}

/* Whether backward takes an operand over from forward. */
static bool is_from_forward(const fattn_operand *operand)
{
    static const size_t offsets[] = {offsetof(fattn_buffers, q), offsetof(fattn_buffers, k),
                                     offsetof(fattn_buffers, v), offsetof(fattn_buffers, o),
                                     offsetof(fattn_buffers, lse)};
    bool is = false;
    for (size_t n = 0; n < sizeof offsets / sizeof offsets[0]; n++) {
        is = is || operand->offset == offsets[n];
    }
    return is;
}

/* rest: without what backward takes over from forward. */
static fattn_status normalise(const fattn_problem *problem, const fattn_buffers *in, bool rest,
                              fattn_buffers *out)
{
    fattn_buffers buffers;
    fattn_status status = fattn_buffers_read(&buffers, in);
    if (status) {
        return status;
    }
    fattn_operand operands[FATTN_OPERANDS_MAX];
    int count = 0;
    for (int n = 0, all = fattn_operands(problem, &buffers, operands); n < all; n++) {
        if (!(rest && is_from_forward(&operands[n]))) {
            operands[count++] = operands[n];
        }
    }
    for (int i = 0; i < count; i++) {
        status = check_pointer(&operands[i]);
        if (status) {
            return status;
        }
    }
    for (int i = 0; i < count; i++) {
        for (int j = 0; operands[i].output && fattn_operand_is_present(&operands[i]) && j < count;
             j++) {
            const bool once = !operands[j].output || j > i;
            if (j != i && once && fattn_operand_is_present(&operands[j]) &&
                fattn_regions_overlap(&operands[i].region, &operands[j].region)) {
                return fail_overlap(problem, &operands[i], &operands[j]);
            }
        }
    }
    *out = buffers;
    return FATTN_OK;
}

fattn_status fattn_buffers_normalise(const fattn_problem *problem, const fattn_buffers *in,
                                     fattn_buffers *out)
{
    return normalise(problem, in, false, out);
}

fattn_status fattn_buffers_normalise_rest(const fattn_problem *problem, const fattn_buffers *in,
                                          fattn_buffers *out)
{
    const fattn_status status = normalise(problem, in, true, out);
    if (!status) {
        out->q = out->k = out->v = out->o = NULL;
        out->lse = NULL;
    }
    return status;
}

fattn_status fattn_buffers_check_apart(const fattn_problem *problem, const fattn_buffers *buffers,
                                       const char *name, const void *memory, int64_t bytes)
{
    const fattn_region whole = {.base = (uintptr_t)memory, .extent = {1, 1, 1, 1}, .run = bytes};
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(problem, buffers, operands);
    for (int i = 0; i < count; i++) {
        if (fattn_operand_is_present(&operands[i]) &&
            fattn_regions_overlap(&operands[i].region, &whole)) {
            return fattn_fail(FATTN_OVERLAP, "%s overlaps %s", operands[i].name, name);
        }
    }
    return FATTN_OK;
}

fattn_status fattn_buffers_check_workspace(const fattn_problem *problem,
                                           const fattn_buffers *buffers, const void *workspace,
                                           int64_t bytes)
{
    return fattn_buffers_check_apart(problem, buffers, "the workspace", workspace, bytes);
}

/* --- The values behind the pointers ----------------------------------------------------------- */

fattn_status fattn_cu_seqlens_check(const char *name, const int32_t *cu, int64_t batch,
                                    int64_t total, int64_t longest)
{
    for (int64_t b = 0; b <= batch; b++) {
        if (cu[b] < 0 || cu[b] > total) {
            return fattn_fail(FATTN_INVALID_DATA, "%s[%lld] is %d, not in 0..%lld", name,
                              (long long)b, (int)cu[b], (long long)total);
        }
        if (b > 0 && cu[b] < cu[b - 1]) {
            return fattn_fail(FATTN_INVALID_DATA, "%s[%lld] is %d, less than the %d before it",
                              name, (long long)b, (int)cu[b], (int)cu[b - 1]);
        }
        if (b > 0 && cu[b] - cu[b - 1] > longest) {
            return fattn_fail(FATTN_INVALID_DATA,
                              "%s[%lld] ends a sequence of %d, longer than the problem's %lld",
                              name, (long long)b, (int)(cu[b] - cu[b - 1]), (long long)longest);
        }
    }
    return FATTN_OK;
}

/* The length of sequence b: seqused[b] if given, else from cu_seqlens if given, else the
 * problem's. */
static int64_t length_of(const int32_t *used, const int32_t *cu, int64_t length, int64_t b)
{
    return used ? used[b] : cu ? cu[b + 1] - cu[b] : length;
}

/* seqused[b] must not exceed the rows or keys that sequence b has in its tensor. */
static fattn_status check_seqused(const char *name, const int32_t *used, const int32_t *cu,
                                  int64_t batch, int64_t length)
{
    for (int64_t b = 0; b < batch; b++) {
        const int64_t own = length_of(NULL, cu, length, b);
        if (used[b] < 0 || used[b] > own) {
            return fattn_fail(FATTN_INVALID_DATA, "%s[%lld] is %d, not in 0..%lld", name,
                              (long long)b, (int)used[b], (long long)own);
        }
    }
    return FATTN_OK;
}

static int64_t queries_of(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    return length_of(p->features & FATTN_SEQUSED_Q ? buf->seqused_q : NULL,
                     p->features & FATTN_CU_SEQLENS_Q ? buf->cu_seqlens_q : NULL, p->seqlen_q, b);
}

static int64_t keys_of(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    return length_of(p->features & FATTN_SEQUSED_K ? buf->seqused_k : NULL,
                     p->features & FATTN_CU_SEQLENS_K ? buf->cu_seqlens_k : NULL, p->seqlen_k, b);
}

/* seqstart_k[b] must be in 0 .. the number of keys that sequence b uses; at the upper end it uses
 * none. */
static fattn_status check_seqstart(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    const int32_t start = buf->seqstart_k[b];
    const int64_t keys = keys_of(p, buf, b);
    return start >= 0 && start <= keys
               ? FATTN_OK
               : fattn_fail(FATTN_INVALID_DATA, "seqstart_k[%lld] is %d, not in 0..%lld",
                            (long long)b, (int)start, (long long)keys);
}

static fattn_status check_lengths(const fattn_problem *p, const fattn_buffers *buf)
{
    const bool packed_q = p->features & FATTN_CU_SEQLENS_Q;
    const bool packed_k = p->features & FATTN_CU_SEQLENS_K;
    const int64_t total_k = p->features & FATTN_PAGED ? INT32_MAX : p->total_k;
    fattn_status status = FATTN_OK;
    if (p->batch == 0) {
        return FATTN_OK;
    }
    if (packed_q) {
        status = fattn_cu_seqlens_check("cu_seqlens_q", buf->cu_seqlens_q, p->batch, p->total_q,
                                        p->seqlen_q);
    }
    if (!status && packed_k) {
        status = fattn_cu_seqlens_check("cu_seqlens_k", buf->cu_seqlens_k, p->batch, total_k,
                                        p->seqlen_k);
    }
    if (!status && p->features & FATTN_SEQUSED_Q) {
        status = check_seqused("seqused_q", buf->seqused_q, packed_q ? buf->cu_seqlens_q : NULL,
                               p->batch, p->seqlen_q);
    }
    if (!status && p->features & FATTN_SEQUSED_K) {
        status = check_seqused("seqused_k", buf->seqused_k, packed_k ? buf->cu_seqlens_k : NULL,
                               p->batch, p->seqlen_k);
    }
    for (int64_t n = 0; !status && p->features & FATTN_SEQSTART_K && n < p->batch; n++) {
        status = check_seqstart(p, buf, n);
    }
    return status;
}

static fattn_status check_block_table(const fattn_problem *p, const fattn_buffers *buf)
{
    for (int64_t b = 0; p->heads_k > 0 && b < p->batch; b++) {
        const fattn_sequence s = fattn_sequence_of(p, buf, b);
        const int64_t start = fattn_start_k(p, buf, b), end = start + s.sk;
        const int64_t pages = start < end ? (end + p->page_size - 1) / p->page_size : 0;
        for (int64_t page = start / p->page_size; page < pages; page++) {
            const int32_t entry = buf->block_table[b * p->block_table_stride + page];
            if (entry < 0 || entry >= p->num_pages) {
                const bool left = p->window_left >= 0 && !(p->features & FATTN_SEQSTART_K);
                return fattn_fail(
                    FATTN_INVALID_DATA, "block_table[%lld][%lld] is %d, not in 0..%lld%s",
                    (long long)b, (long long)page, (int)entry, (long long)p->num_pages - 1,
                    left ? " (FATTN_SEQSTART_K leaves out pages before the window)" : "");
            }
        }
    }
    return FATTN_OK;
}

static fattn_status check_positions(const fattn_problem *p, const fattn_buffers *buf)
{
    const struct {
        const char *name;
        const int64_t *values;
        int64_t value, low;
        const char *range;
    } positions[] = {
        {"q_offset", buf->q_offsets, buf->q_offset, -POSITION_LIMIT, "-2^40..2^40"},
        {"k_offset", buf->k_offsets, buf->k_offset, -POSITION_LIMIT, "-2^40..2^40"},
        {"whole_q", buf->wholes_q, buf->whole_q, -1, "-1..2^40"},
        {"whole_k", buf->wholes_k, buf->whole_k, -1, "-1..2^40"},
    };
    for (size_t i = 0; i < sizeof positions / sizeof positions[0]; i++) {
        for (int64_t b = 0; b < p->batch; b++) {
            const int64_t value = positions[i].values ? positions[i].values[b] : positions[i].value;
            if (value < positions[i].low || value > POSITION_LIMIT) {
                return fattn_fail(FATTN_INVALID_DATA, "%s of sequence %lld is %lld, not in %s",
                                  positions[i].name, (long long)b, (long long)value,
                                  positions[i].range);
            }
        }
    }
    return FATTN_OK;
}

/* With dropout the position of every row and key must fit its counter word (philox.h). */
static fattn_status check_counters(const fattn_problem *p, const fattn_buffers *buf)
{
    for (int64_t b = 0; b < p->batch; b++) {
        const fattn_sequence s = fattn_sequence_of(p, buf, b);
        const struct {
            const char *name, *rows;
            int64_t first, count;
        } sides[] = {{"q_offset", "rows", s.q_position, s.sq},
                     {"k_offset", "keys", s.k_position, s.sk}};
        for (int n = 0; n < 2; n++) {
            if (sides[n].first < 0 || sides[n].first + sides[n].count > FATTN_DROPOUT_QUERIES) {
                return fattn_fail(FATTN_INVALID_DATA,
                                  "%s puts the %lld %s of sequence %lld at positions from %lld on: "
                                  "with dropout positions must be in 0..2^33 - 1",
                                  sides[n].name, (long long)sides[n].count, sides[n].rows,
                                  (long long)b, (long long)sides[n].first);
            }
        }
    }
    return FATTN_OK;
}

fattn_status fattn_buffers_validate(const fattn_problem *p, const fattn_buffers *buf)
{
    fattn_status status = check_lengths(p, buf);
    if (!status && p->features & FATTN_POSITIONS) {
        status = check_positions(p, buf);
    }
    if (!status && p->features & FATTN_PAGED) {
        status = check_block_table(p, buf);
    }
    if (!status && p->features & FATTN_DROPOUT) {
        status = check_counters(p, buf);
    }
    return status;
}

/* --- Sequences -------------------------------------------------------------------------------- */

int64_t fattn_start_k(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    return p->features & FATTN_SEQSTART_K ? buf->seqstart_k[b] : 0;
}

fattn_sequence fattn_sequence_of(const fattn_problem *p, const fattn_buffers *buf, int64_t b)
{
    const bool packed_q = p->features & FATTN_CU_SEQLENS_Q;
    const bool packed_k = p->features & FATTN_CU_SEQLENS_K;
    fattn_sequence s = {
        .sq = queries_of(p, buf, b),
        .sk = keys_of(p, buf, b),
        .slot_k = length_of(NULL, packed_k ? buf->cu_seqlens_k : NULL, p->seqlen_k, b),
        .q_row = packed_q ? buf->cu_seqlens_q[b] : 0,
        .k_row = packed_k && !(p->features & FATTN_PAGED) ? buf->cu_seqlens_k[b] : 0,
        .q_batch = packed_q ? 0 : b,
        .k_batch = packed_k ? 0 : b,
    };
    int64_t whole_q = -1;
    int64_t whole_k = -1;
    if (p->features & FATTN_POSITIONS) {
        s.q_position = buf->q_offsets ? buf->q_offsets[b] : buf->q_offset;
        s.k_position = buf->k_offsets ? buf->k_offsets[b] : buf->k_offset;
        whole_q = buf->wholes_q ? buf->wholes_q[b] : buf->whole_q;
        whole_k = buf->wholes_k ? buf->wholes_k[b] : buf->whole_k;
    }
    s.diagonal = s.q_position - s.k_position;
    if (p->anchor == FATTN_BOTTOM_RIGHT) {
        s.diagonal += (whole_k < 0 ? s.sk : whole_k) - (whole_q < 0 ? s.sq : whole_q);
    }
    const int64_t start = fattn_start_k(p, buf, b); /* becomes key 0 */
    s.sk -= start;
    s.slot_k -= start;
    s.k_row += start;
    s.k_position += start;
    s.diagonal -= start;
    return s;
}

int64_t fattn_longest_keys(const fattn_problem *p, const fattn_buffers *buf)
{
    if (!(p->features & (FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K))) {
        return p->seqlen_k;
    }
    int64_t longest = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t keys = keys_of(p, buf, b);
        longest = keys > longest ? keys : longest;
    }
    return longest;
}

void fattn_query_lengths(const fattn_problem *p, const fattn_buffers *buf, int64_t *fewest,
                         int64_t *most)
{
    *fewest = *most = p->seqlen_q;
    if (!(p->features & (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q))) {
        return;
    }
    *most = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t queries = queries_of(p, buf, b);
        *fewest = queries > 0 && queries < *fewest ? queries : *fewest;
        *most = queries > *most ? queries : *most;
    }
}

int64_t fattn_lse_index(const fattn_problem *p, const fattn_sequence *sequence, int64_t b,
                        int64_t h)
{
    const int64_t first = p->features & FATTN_CU_SEQLENS_Q ? h : b * p->heads_q + h;
    return first * p->total_q + sequence->q_row;
}
