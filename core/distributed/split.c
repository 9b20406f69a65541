/* SPDX-License-Identifier: Apache-2.0 */
#include "core/distributed/split.h"

#include <assert.h>
#include <stddef.h>

#include "core/integer.h"
#include "core/status.h"

#define UNBOUNDED \
    (INT64_C(1) << 50) /* larger than any difference of rows: offsets are at most 2^40 */

const char *const fattn_split_names[] = {"auto", "contiguous", "zigzag", "striped", NULL};

int fattn_split_runs(fattn_split split)
{
    return split == FATTN_SPLIT_ZIGZAG                                       ? 2
           : split == FATTN_SPLIT_CONTIGUOUS || split == FATTN_SPLIT_STRIPED ? 1
                                                                             : 0;
}

fattn_status fattn_split_get_run(fattn_split split, int64_t length, int64_t ranks, int64_t rank,
                                 int which, fattn_run *run)
{
    if (!run) {
        return fattn_fail(FATTN_NULL_POINTER, "run is NULL");
    }
    if (!fattn_split_runs(split)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "split is %d, no fattn_split", (int)split);
    }
    const struct {
        const char *name;
        int64_t value, low, high;
    } numbers[] = {{"length", length, 0, INT32_MAX},
                   {"ranks", ranks, 1, FATTN_RANKS_MAX},
                   {"rank", rank, 0, fattn_max64(ranks, 1) - 1},
                   {"which", which, 0, fattn_split_runs(split) - 1}};
    for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++) {
        const fattn_status status =
            fattn_check_range(numbers[n].name, numbers[n].value, numbers[n].low, numbers[n].high,
                              FATTN_INVALID_ARGUMENT);
        if (status) {
            return status;
        }
    }
    *run = fattn_split_run(split, length, ranks, rank, which);
    return FATTN_OK;
}

/* Part n of `parts` of a sequence. length * parts < 2^31 * 2^21 fits. */
static fattn_run part(int64_t length, int64_t parts, int64_t n)
{
    const int64_t first = length * n / parts;
    return (fattn_run){.first = first, .count = length * (n + 1) / parts - first, .stride = 1};
}

fattn_run fattn_split_run(fattn_split split, int64_t length, int64_t ranks, int64_t rank, int which)
{
    assert(rank >= 0 && rank < ranks && which < fattn_split_runs(split));
    if (split == FATTN_SPLIT_ZIGZAG) {
        return part(length, 2 * ranks, which ? 2 * ranks - 1 - rank : rank);
    }
    if (split == FATTN_SPLIT_STRIPED) {
        return (fattn_run){rank, rank < length ? (length - rank + ranks - 1) / ranks : 0, ranks};
    }
    return part(length, ranks, rank);
}

int64_t fattn_split_rows(fattn_split split, int64_t length, int64_t ranks, int64_t rank)
{
    int64_t rows = 0;
    for (int n = 0; n < fattn_split_runs(split); n++) {
        rows += fattn_split_run(split, length, ranks, rank, n).count;
    }
    return rows;
}

int64_t fattn_whole_q(const fattn_whole *whole, int64_t b)
{
    return whole->cu_q ? whole->cu_q[b + 1] - whole->cu_q[b] : whole->problem->seqlen_q;
}

int64_t fattn_whole_k(const fattn_whole *whole, int64_t b)
{
    return whole->cu_k ? whole->cu_k[b + 1] - whole->cu_k[b] : whole->problem->seqlen_k;
}

int fattn_whole_q_runs(const fattn_whole *whole)
{
    return whole->all_queries ? 1 : whole->halves ? 2 : fattn_split_runs(whole->split);
}

bool fattn_split_has_sums(const fattn_problem *p)
{
    return p->op == FATTN_BACKWARD && p->outputs & (FATTN_OUT_DK | FATTN_OUT_DV);
}

void fattn_whole_set_halves(fattn_whole *whole)
{
    const fattn_problem *const p = whole->problem;
    whole->halves = whole->ranks > 1 && !whole->all_queries && fattn_split_has_sums(p) &&
                    fattn_split_runs(whole->split) == 1;
}

/* Slice n begins at row ceil(count * n / slices). There are few slices, so the product fits. */
static fattn_run slice_of(const fattn_whole *whole, fattn_run run)
{
    const int64_t slices = whole->slices, rows = run.count;
    const int64_t first = (rows * whole->slice + slices - 1) / slices;
    run.first += first * run.stride;
    run.count = (rows * (whole->slice + 1) + slices - 1) / slices - first;
    return run;
}

fattn_run fattn_whole_run(const fattn_whole *whole, fattn_side side, int64_t b, int64_t rank, int n)
{
    if (side == FATTN_QUERIES && whole->all_queries) {
        return (fattn_run){0, fattn_whole_q(whole, b), 1};
    }
    if (side == FATTN_QUERIES && whole->halves) {
        fattn_run run =
            fattn_split_run(whole->split, fattn_whole_q(whole, b), whole->ranks, rank, 0);
        const int64_t first = run.count / 2;
        run.first += n ? first * run.stride : 0;
        run.count = n ? run.count - first : first;
        return run;
    }
    const int64_t length = side == FATTN_KEYS ? fattn_whole_k(whole, b) : fattn_whole_q(whole, b);
    const fattn_run run = fattn_split_run(whole->split, length, whole->ranks, rank, n);
    return side == FATTN_KEYS && whole->slices > 1 ? slice_of(whole, run) : run;
}

int64_t fattn_whole_rows(const fattn_whole *whole, fattn_side side, int64_t b, int64_t rank)
{
    const int runs =
        side == FATTN_KEYS ? fattn_split_runs(whole->split) : fattn_whole_q_runs(whole);
    int64_t rows = 0;
    for (int n = 0; n < runs; n++) {
        rows += fattn_whole_run(whole, side, b, rank, n).count;
    }
    return rows;
}

int64_t fattn_whole_kinds(const fattn_whole *whole)
{
    return whole->cu_q || whole->cu_k ? whole->problem->batch
                                      : fattn_min64(whole->problem->batch, 1);
}

/*
 * Query i of run q is at row q.first + i * stride, key j of run k at k.first + j * stride. A window
 * keeps -left <= key - (row + off) <= right. So j - i is between (base - left) / stride and
 * (base + right) / stride, with base = off + q.first - k.first.
 */
fattn_piece fattn_piece_of(const fattn_whole *whole, int64_t b, int64_t rank, int q_run,
                           int64_t owner, int k_run)
{
    const fattn_problem *const p = whole->problem;
    const int64_t sq = fattn_whole_q(whole, b), sk = fattn_whole_k(whole, b);
    const fattn_run q = fattn_whole_run(whole, FATTN_QUERIES, b, rank, q_run);
    const fattn_run k = fattn_whole_run(whole, FATTN_KEYS, b, owner, k_run);
    const int64_t off = p->anchor == FATTN_BOTTOM_RIGHT ? sk - sq : 0;
    const int64_t base = off + q.first - k.first;
    fattn_piece piece = {q, k, -UNBOUNDED, UNBOUNDED};
    if (p->window_left >= 0) {
        piece.low = -fattn_floor_div(fattn_min64(p->window_left, UNBOUNDED) - base, q.stride);
    }
    if (p->window_right >= 0) {
        piece.high = fattn_floor_div(base + fattn_min64(p->window_right, UNBOUNDED), q.stride);
    }
    return piece;
}

/* The sum of min(max(y, 0), m) over all y <= x. */
static double ramp(int64_t x, int64_t m)
{
    const double up = x <= 0 ? 0 : (double)fattn_min64(x, m);
    return up * (up + 1) / 2 + (x > m ? (double)(x - m) * (double)m : 0);
}

/* The number of pairs with j - i <= high: row i has min(max(i + high + 1, 0), keys) of them. */
static double pairs_up_to(const fattn_piece *piece, int64_t high)
{
    const int64_t bound = fattn_min64(fattn_max64(high, -piece->q.count), piece->k.count);
    return ramp(piece->q.count + bound, piece->k.count) - ramp(bound, piece->k.count);
}

double fattn_piece_pairs(const fattn_piece *piece)
{
    if (piece->q.count == 0 || piece->k.count == 0 || piece->low > piece->high) {
        return 0;
    }
    return pairs_up_to(piece, piece->high) - pairs_up_to(piece, piece->low - 1);
}

double fattn_whole_run_pairs(const fattn_whole *whole, int64_t rank, int q_run, int64_t owner)
{
    const int64_t kinds = fattn_whole_kinds(whole);
    double pairs = 0;
    for (int64_t b = 0; b < kinds; b++) {
        for (int n = 0; n < fattn_split_runs(whole->split); n++) {
            const fattn_piece piece = fattn_piece_of(whole, b, rank, q_run, owner, n);
            pairs += fattn_piece_pairs(&piece);
        }
    }
    return kinds == 1 ? pairs * (double)whole->problem->batch : pairs;
}

double fattn_whole_pairs(const fattn_whole *whole, int64_t rank, int64_t owner)
{
    double pairs = 0;
    for (int n = 0; n < fattn_whole_q_runs(whole); n++) {
        pairs += fattn_whole_run_pairs(whole, rank, n, owner);
    }
    return pairs;
}

bool fattn_whole_has_pairs(const fattn_whole *whole, int64_t rank, int64_t owner)
{
    return fattn_whole_pairs(whole, rank, owner) > 0;
}
