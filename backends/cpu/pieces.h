/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a decoding run has to do, listed before its threads begin: parts of the keys of sequences,
 * cut by the lengths of all, so that every thread works on a long one among short ones
 * (docs/DESIGN.md).
 */
#ifndef FATTN_CPU_PIECES_H
#define FATTN_CPU_PIECES_H

#include "backends/cpu/parts.h"
#include "core/tiling.h"

/* A part of the keys of a sequence, or all of them, for all of its heads and rows. */
typedef struct decode_piece {
    int64_t b;
    int64_t first, past;   /* key blocks */
    int64_t split, splits; /* which part it is, of how many */
    int64_t slot;          /* of the first part of head 0's first rows, where there are several */
} decode_piece;

/*
 * What a run has to do, listed before it begins: each sequence with rows, cut by the lengths of
 * all. The list depends on the plan and the lengths alone, and so do the results. It follows the
 * slots that parts leave their results in, and a counter for each slot: that of a block's first
 * part counts how many parts are there.
 */
typedef struct decode_pieces {
    int64_t count;
    decode_piece piece[];
} decode_pieces;

/* The slots that a run may need. Where runs cut keys by lengths, items are, besides parts, blocks
 * of rows (core/tiling.h). */
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

/* Blocks of rows of all heads of a sequence. */
static int64_t blocks_of(const fattn_cpu_run *run)
{
    return run->problem->heads_k * run->tiling->q_blocks;
}

/* Where a block of a sequence in several parts has its first one; the others follow. */
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

/* Whether this is the last part of a block, which has so many from `slot` on. */
static bool leaves_last(const fattn_cpu_run *run, int64_t slot, int64_t parts)
{
    return __atomic_fetch_add(counter_of(run, slot), 1, __ATOMIC_ACQ_REL) == parts - 1;
}

/* Lists the sequences that have rows, and returns their key blocks. */
static int64_t list_sequences(const fattn_cpu_run *run, decode_pieces *list)
{
    const fattn_problem *const p = run->problem;
    const bool differ =
        p->features & (FATTN_VALIDATED | FATTN_POSITIONS); /* lengths are read, or positions */
    int64_t blocks = 0;
    list->count = 0;
    panel pn;
    pn.br = run->tiling->br * run->tiling->q_blocks;
    fattn_parts keys = {0};
    for (int64_t b = 0; b < p->batch && p->heads_k > 0; b++) {
        if (differ || b == 0) {
            if (!panel_place(&pn, run, b, 0, 0, false)) {
                continue;
            }
            keys = parts_of(run->tiling, &pn, &pn); /* of any head: all see the same keys */
        }
        list->piece[list->count++] =
            (decode_piece){.b = b, .first = keys.first, .past = keys.past, .splits = 1};
        blocks += keys.past - keys.first;
    }
    return blocks;
}

/* Parts that so many key blocks are cut into, of `all` that the run has. As many as are pieces of
 * all keys, rounded up: sequences of several parts have more than a piece, so that there are fewer
 * of these than pieces, and fewer than two parts for each piece. */
static int64_t parts_worth(const fattn_cpu_run *run, int64_t blocks, int64_t all)
{
    const int64_t most = fattn_schedule_most(run->tiling, blocks);
    if (!run->pieces || most == 1) {
        return most;
    }
    return fattn_min64(most, fattn_ceil_div(blocks * run->pieces, all * blocks_of(run)));
}

/* Lists what there is to do. Sequences are listed first, and take the places of their parts from
 * the last one back: none has a place below its own number. */
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
