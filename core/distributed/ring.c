/* SPDX-License-Identifier: Apache-2.0 */
#include "core/distributed/ring.h"

#include <string.h>

#include "core/integer.h"
#include "core/memory.h"
#include "core/status.h"

/*
 * How many hops a block makes up and down: it goes round the ring except for the widest gap of
 * ranks that do not need it. `needed[d]` is whether the rank d hops up needs it. Of several widest
 * gaps the one that is furthest up is skipped.
 */
static void reach_of(const bool *needed, int64_t ranks, int32_t *up, int32_t *down)
{
    int64_t past = ranks, widest = 0, gap = 0; /* the gap is past - widest .. past - 1 */
    for (int64_t d = 1; d < ranks; d++) {
        gap = needed[d] ? 0 : gap + 1;
        if (gap > 0 && gap >= widest) {
            widest = gap;
            past = d + 1;
        }
    }
    *up = (int32_t)(past - widest - 1);
    *down = (int32_t)(ranks - past);
}

/* Whether a rank's queries have pairs with a run of an owner's keys. */
static bool has_pairs(const fattn_whole *whole, int64_t rank, int64_t owner, int k_run)
{
    const int64_t kinds = fattn_whole_kinds(whole);
    for (int64_t b = 0; b < kinds; b++) {
        for (int n = 0; n < fattn_whole_q_runs(whole); n++) {
            const fattn_piece piece = fattn_piece_of(whole, b, rank, n, owner, k_run);
            if (fattn_piece_pairs(&piece) > 0) {
                return true;
            }
        }
    }
    return false;
}

enum { ARRAYS = FATTN_LANES * (1 + 2 * FATTN_RUNS) }; /* reach, near and far */

static void find_runs(const fattn_whole *whole, const fattn_ring *ring, int64_t owner, int lane,
                      int run, int32_t *near, int32_t *far)
{
    *near = 0, *far = -1;
    for (int32_t d = 1; d <= ring->reach[lane][owner] && run < fattn_split_runs(whole->split);
         d++) {
        if (has_pairs(whole, fattn_ring_neighbour(ring, lane, owner, d), owner, run)) {
            *near = *near ? *near : d;
            *far = d;
        }
    }
}

unsigned fattn_ring_keys(const fattn_ring *ring, int lane, int64_t owner, int64_t hops)
{
    unsigned runs = ring->trims ? 0 : 3;
    for (int n = 0; n < FATTN_RUNS; n++) {
        runs |= ring->far[lane][n][owner] >= hops ? 1u << n : 0;
    }
    return runs;
}

unsigned fattn_ring_sums(const fattn_ring *ring, int lane, int64_t owner, int64_t hops)
{
    unsigned runs = ring->trims ? 0 : 3;
    for (int n = 0; n < FATTN_RUNS; n++) {
        const int32_t near = ring->near[lane][n][owner];
        runs |= near > 0 && near <= hops ? 1u << n : 0;
    }
    return runs;
}

fattn_status fattn_ring_make(const fattn_whole *whole, fattn_ring *ring)
{
    const int64_t ranks = whole->ranks;
    const size_t bytes = (size_t)ranks * (ARRAYS * sizeof(int32_t) + sizeof(bool));
    int32_t *const reach = fattn_memory_alloc(bytes);
    memset(ring, 0, sizeof *ring);
    if (!reach) {
        return fattn_fail_memory((int64_t)bytes, "the schedule of a ring");
    }
    int32_t *const runs = reach + FATTN_LANES * ranks; /* [lane][run][near, far][ranks] */
    bool *const needed = (bool *)(reach + ARRAYS * ranks);
    ring->ranks = ranks;
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        ring->reach[lane] = reach + lane * ranks;
        for (int n = 0; n < FATTN_RUNS; n++) {
            ring->near[lane][n] = runs + (lane * FATTN_RUNS + n) * 2 * ranks;
            ring->far[lane][n] = ring->near[lane][n] + ranks;
        }
    }
    for (int64_t owner = 0; owner < ranks; owner++) {
        for (int64_t d = 0; d < ranks; d++) {
            needed[d] =
                !whole->all_queries && fattn_whole_has_pairs(whole, (owner + d) % ranks, owner);
        }
        reach_of(needed, ranks, &reach[owner], &reach[ranks + owner]);
        for (int lane = 0; lane < FATTN_LANES; lane++) {
            ring->longest[lane] = fattn_max64(ring->longest[lane], ring->reach[lane][owner]);
            for (int n = 0; n < FATTN_RUNS; n++) {
                int32_t *const near = runs + (lane * FATTN_RUNS + n) * 2 * ranks + owner;
                find_runs(whole, ring, owner, lane, n, near, near + ranks);
            }
        }
    }
    /* To send runs separately keys and values of a run must each be contiguous, and they may take
     * two messages instead of one: too many for a group if both lanes are used. */
    ring->trims = (whole->cu_q || whole->problem->batch == 1) &&
                  (ring->longest[FATTN_UP] == 0 || ring->longest[FATTN_DOWN] == 0);
    ring->last_step = fattn_max64(ring->longest[FATTN_UP], ring->longest[FATTN_DOWN]);
    return FATTN_OK;
}

void fattn_ring_free(fattn_ring *ring)
{
    fattn_memory_free((void *)ring->reach[FATTN_UP]);
    memset(ring, 0, sizeof *ring);
}

int64_t fattn_ring_neighbour(const fattn_ring *ring, int lane, int64_t rank, int64_t hops)
{
    const int64_t to = (rank + (lane == FATTN_UP ? hops : -hops)) % ring->ranks;
    return to < 0 ? to + ring->ranks : to;
}

int64_t fattn_ring_owner(const fattn_ring *ring, int lane, int64_t rank, int64_t step)
{
    if (step == 0) {
        return lane == FATTN_UP ? rank : -1;
    }
    const int64_t owner = fattn_ring_neighbour(ring, lane, rank, -step);
    return step > 0 && step <= ring->reach[lane][owner] ? owner : -1;
}

int64_t fattn_ring_work(const fattn_ring *ring, int lane, int64_t rank, int64_t step, int q_run,
                        int q_runs, bool gradients)
{
    const bool waits = gradients && ring->last_step > 0 && q_runs > 1 && q_run == 0;
    if (waits && lane == FATTN_UP && (step == 0 || step == ring->last_step + 1)) {
        return step == 0 ? -1 : rank;
    }
    return fattn_ring_owner(ring, lane, rank, step);
}

fattn_ring_messages fattn_ring_step(const fattn_ring *ring, int lane, int64_t rank, int64_t step)
{
    fattn_ring_messages m = {-1, -1, -1, -1, -1};
    const int64_t own_reach = ring->reach[lane][rank];
    const int64_t owner = step == 0 ? rank : fattn_ring_owner(ring, lane, rank, step);
    const int64_t next = fattn_ring_owner(ring, lane, rank, step + 1);
    if (owner >= 0 && step < ring->reach[lane][owner]) {
        m.send_to = fattn_ring_neighbour(ring, lane, rank, 1);
    }
    if (next >= 0) {
        m.receive_from = fattn_ring_neighbour(ring, lane, rank, -1);
    }
    if (step >= 2) {
        const int64_t before = fattn_ring_owner(ring, lane, rank, step - 1);
        if (before >= 0) {
            m.gradient_to = step - 1 < ring->reach[lane][before]
                                ? fattn_ring_neighbour(ring, lane, rank, 1)
                                : before;
        }
        if (owner >= 0) {
            m.gradient_from = fattn_ring_neighbour(ring, lane, rank, -1);
        }
        if (own_reach >= 1 && step == own_reach + 1) {
            m.home_from = fattn_ring_neighbour(ring, lane, rank, own_reach);
        }
    }
    return m;
}

int fattn_ring_room(const fattn_ring *ring, bool gradients)
{
    return FATTN_MESSAGES_MAX - (gradients && ring->last_step > 0 ? 6 : 0);
}
