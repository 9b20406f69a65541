/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pieces of a decoding run: parts of the keys of sequences. They are listed before the threads
 * begin. Keys are cut by the lengths of all sequences, so that no thread is left alone with a long
 * sequence among short ones (docs/DESIGN.md).
 */
#ifndef FATTN_CPU_PIECES_H
#define FATTN_CPU_PIECES_H

#include "backends/cpu/parts.h"
#include "core/tiling.h"

/* A piece: a part of the keys of a sequence, or all of them, for all of its heads and rows. */
typedef struct decode_piece {
    int64_t b;
    int64_t first, past;   /* key blocks */
    int64_t split, splits; /* which part of the sequence it is, and of how many */
    /* If there are several parts: the slot of part 0 of head 0's first block of rows. */
    int64_t slot;
} decode_piece;

/*
 * The list of pieces: each sequence with rows, cut by the lengths of all. The list, and with it the
 * results, depends on the plan and the lengths alone. In shared memory it lies behind the slots for
 * the results of parts and a counter for each slot. The counter of a block's first part counts how
 * many parts are done.
 */
typedef struct decode_pieces {
    int64_t count;
    decode_piece piece[];
} decode_pieces;

/* The most slots that a run may need. Where runs cut keys by lengths, the tiling counts blocks of
 * rows as items besides parts (core/tiling.h). */
static int64_t slots_most(const fattn_tiling *tiling)
{
    const int64_t blocks = tiling->heads * tiling->q_blocks;
    return tiling->splits == 1                       ? 0
           : tiling->items < blocks * tiling->splits ? tiling->items - blocks
                                                     : tiling->items;
}

static int64_t bytes_before_pieces(const fattn_problem *p, const fattn_tiling *tiling)
{
    const int64_t size = part_size(p, tiling) * (int64_t)sizeof(float) + (int64_t)sizeof(int32_t);
    return fattn_cpu_bytes(slots_most(tiling), size, 1);
}

static int64_t decode_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    const int64_t most = p->heads_k ? tiling->items / p->heads_k : 0;
    const int64_t before = bytes_before_pieces(p, tiling);
    const int64_t pieces = fattn_cpu_bytes(most + 1, sizeof(decode_piece), 1);
    return before < 0 || pieces < 0 ? -1 : fattn_cpu_bytes(before + pieces, 1, 1);
}

static decode_pieces *pieces_of(const fattn_cpu_run *run)
{
    const int64_t before = bytes_before_pieces(run->problem, run->tiling);
    return (decode_pieces *)(void *)(run->shared + before);
}

/* How many blocks of rows all heads of a sequence have. */
static int64_t blocks_of(const fattn_cpu_run *run)
{
    return run->problem->heads_k * run->tiling->q_blocks;
}

/* The slot of the first part of a block of rows; the slots of its other parts follow. */
static int64_t slot_of(const decode_piece *piece, int64_t block)
{
    return piece->slot + block * piece->splits;
}

static int32_t *counter_of(const fattn_cpu_run *run, int64_t slot)
{
    const int64_t size = part_size(run->problem, run->tiling);
    float *const past = (float *)(void *)run->shared + slots_most(run->tiling) * size;
    return (int32_t *)(void *)past + slot;
}

/* Counts a finished part. Returns whether it was the last of the `parts` parts of a block, from
 * `slot` on. */
static bool was_last_part(const fattn_cpu_run *run, int64_t slot, int64_t parts)
{
    return __atomic_fetch_add(counter_of(run, slot), 1, __ATOMIC_ACQ_REL) == parts - 1;
}

/* Lists the sequences that have rows, one piece each. Returns how many key blocks they have. */
static int64_t list_sequences(const fattn_cpu_run *run, decode_pieces *list)
{
    const fattn_problem *const p = run->problem;
    const bool differ =
        p->features & (FATTN_VALIDATED | FATTN_POSITIONS); /* lengths or positions are data */
    int64_t blocks = 0;
    list->count = 0;
    panel pn;
    pn.br = run->tiling->br * run->tiling->q_blocks;
    fattn_parts keys = {0};
    for (int64_t b = 0; b < p->batch && p->heads_k > 0; b++) {
        if (differ || b == 0) {
            if (!panel_place(&pn, run, b, 0, 0, ROWS_IN_LANES)) {
                continue;
            }
            keys = parts_of(run->tiling, &pn, &pn); /* of any head: all attend to the same keys */
        }
        list->piece[list->count++] =
            (decode_piece){.b = b, .first = keys.first, .past = keys.past, .splits = 1};
        blocks += keys.past - keys.first;
    }
    return blocks;
}

/* How many parts a sequence with `blocks` key blocks is cut into, of `all` that the run has: its
 * share of the pieces, rounded up. A sequence of several parts has more keys than a piece, so there
 * are fewer of these sequences than pieces, and fewer than two parts per piece. */
static int64_t parts_worth(const fattn_cpu_run *run, int64_t blocks, int64_t all)
{
    const int64_t most = fattn_schedule_most(run->tiling, blocks);
    if (!run->tiling->pieces || most == 1) {
        return most;
    }
    return fattn_min64(most, fattn_ceil_div(blocks * run->tiling->pieces, all * blocks_of(run)));
}

/* Lists the pieces of a run. Sequences are listed first. They are then replaced by their parts in
 * place, from the last sequence back to the first: no part is moved to a place below the number of
 * its sequence. */
static void begin_pieces(const fattn_cpu_run *run)
{
    decode_pieces *const list = pieces_of(run);
    const int64_t blocks = list_sequences(run, list), sequences = list->count;
    int64_t slots = 0;
    list->count = 0;
    for (int64_t n = 0; n < sequences; n++) {
        decode_piece *const all = &list->piece[n];
        const int64_t keys = all->past - all->first;
        const int64_t size = fattn_ceil_div(keys, parts_worth(run, keys, blocks));
        all->splits = size ? fattn_ceil_div(keys, size) : 1;
        all->slot = slots;
        list->count += all->splits;
        for (int64_t block = 0; all->splits > 1 && block < blocks_of(run); block++) {
            *counter_of(run, slot_of(all, block)) = 0;
        }
        slots += all->splits > 1 ? all->splits * blocks_of(run) : 0;
    }
    for (int64_t n = sequences - 1, to = list->count; to > n + 1; n--) {
        const decode_piece all = list->piece[n];
        const int64_t size = fattn_ceil_div(all.past - all.first, all.splits);
        for (int64_t split = all.splits; split-- > 0;) {
            decode_piece *const piece = &list->piece[--to];
            *piece = all;
            piece->split = split;
            piece->first = all.first + split * size;
            piece->past = fattn_min64(piece->first + size, all.past);
        }
    }
}

#endif
