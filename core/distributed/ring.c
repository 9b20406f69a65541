/* SPDX-License-Identifier: Apache-2.0 */
#include "core/distributed/ring.h"

#include <string.h>

#include "core/band.h"
#include "core/memory.h"
#include "core/status.h"

/*
 * How far a block has to go up and down: everything but the widest gap of ranks that do not need
 * it. `needed[d]` is whether the rank d hops up needs it. Of equal gaps the one that is furthest up
 * is left out.
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

fattn_status fattn_ring_make(const fattn_whole *whole, fattn_ring *ring)
{
    const int64_t ranks = whole->ranks;
    const size_t bytes = (size_t)ranks * (FATTN_LANES * sizeof(int32_t) + sizeof(bool));
    int32_t *const reach = fattn_memory_alloc(bytes);
    memset(ring, 0, sizeof *ring);
    if (!reach) {
        return fattn_fail_memory((int64_t)bytes, "the schedule of a ring");
    }
    bool *const needed = (bool *)(reach + FATTN_LANES * ranks);
    ring->ranks = ranks;
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        ring->reach[lane] = reach + lane * ranks;
    }
    for (int64_t owner = 0; owner < ranks; owner++) {
        for (int64_t d = 0; d < ranks; d++) {
            needed[d] = !whole->all_queries && fattn_whole_meet(whole, (owner + d) % ranks, owner);
        }
        reach_of(needed, ranks, &reach[owner], &reach[ranks + owner]);
        for (int lane = 0; lane < FATTN_LANES; lane++) {
            ring->longest[lane] = fattn_max64(ring->longest[lane], ring->reach[lane][owner]);
        }
    }
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
