/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plays the blocks of deterministic backward runs on Hopper, in a random order, with the functions
 * of backends/cuda/wgmma_shift.h: every block adds to each tile of dQ once, in the order of the
 * turns, and no run gets stuck, though blocks take their next item before they are through.
 */
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/wgmma_shift.h"
#include "tests/tap.h"

/* Tiles that a block still has to add when it takes its next item. */
#define AHEAD 3

typedef struct player {
    wgmma_shift item, next;
    bool busy, holds; /* item; next */
    int tile, left;
} player;

typedef struct game {
    wgmma_shift_run run;
    int items, taken;
    int spread, least; /* wgmma_shift_apart() */
    player *players;
    int *added; /* [head][tile of queries] */
} game;

static unsigned draw(unsigned *state, unsigned below)
{
    *state = *state * 1664525 + 1013904223;
    return (*state >> 8) % below;
}

static int apart(const game *g, wgmma_shift item)
{
    return wgmma_shift_apart(g->run.q_blocks, item.peers, g->spread, g->least);
}

/* Takes the next item, if there is one that the block may have. */
static bool take(game *g, player *p)
{
    if (g->taken == g->items || p->holds) {
        return false;
    }
    const wgmma_shift next = wgmma_shift_of(g->run, g->taken);
    if (p->busy && !wgmma_shift_may_take(p->item.part, next)) {
        return false;
    }
    g->taken++;
    p->next = next;
    p->holds = true;
    return true;
}

/* Adds to a tile, if it is the block's turn. */
static bool add(game *g, player *p)
{
    const int block = g->run.k_blocks - 1 - (int)(p->item.item % g->run.k_blocks);
    const int head = (int)(p->item.item / g->run.k_blocks);
    const int before = block - p->item.number; /* items of earlier parts */
    int *const added = &g->added[head * g->run.q_blocks + p->tile];
    if (*added !=
        before + wgmma_shift_turn(p->item.number, p->item.peers, apart(g, p->item), p->tile)) {
        return false;
    }
    ++*added;
    p->tile = p->tile + 1 == g->run.q_blocks ? 0 : p->tile + 1;
    p->busy = --p->left > 0;
    return true;
}

/* What the block can do now; whether that was anything. */
static bool move(game *g, player *p)
{
    if (!p->busy) {
        const bool took = take(g, p);
        if (p->holds) {
            p->item = p->next;
            p->holds = false;
            p->busy = true;
            p->tile = p->item.number * apart(g, p->item);
            p->left = g->run.q_blocks;
            return true;
        }
        return took;
    }
    const bool took = p->left <= AHEAD && take(g, p);
    return add(g, p) || took;
}

/* Whether all items get through, each tile having what every item adds. */
static bool play(game *g, unsigned *state)
{
    bool moved = true;
    while (moved) {
        moved = false;
        for (int n = 0; n < g->run.grid; n++) {
            /* some are slow, for a while */
            if (draw(state, 4) == 0) {
                for (unsigned times = draw(state, 8); times > 0; times--) {
                    moved |= move(g, &g->players[n]);
                }
            }
        }
        for (int n = 0; n < g->run.grid && !moved; n++) {
            moved = move(g, &g->players[n]);
        }
    }
    bool through = g->taken == g->items;
    for (int n = 0; n < g->run.heads * g->run.q_blocks; n++) {
        through = through && g->added[n] == g->run.k_blocks;
    }
    return through;
}

int main(void)
{
    enum { RUNS = 3000 };
    unsigned state = 1;
    int shifted = 0, near = 0, wide = 0, stuck = 0;
    for (int n = 0; n < RUNS; n++) {
        game g = {0};
        g.run.grid = 1 + (int)draw(&state, 24);
        g.run.side_by_side = g.run.grid * 3 / 4 > 1 ? g.run.grid * 3 / 4 : 1;
        g.run.q_blocks = 1 + (int)draw(&state, 40);
        g.run.k_blocks = 1 + (int)draw(&state, 20);
        g.run.heads = 1 + (int)draw(&state, 8);
        g.items = g.run.heads * g.run.k_blocks;
        g.spread = 1 + (int)draw(&state, 80);
        g.least = 1 + (int)draw(&state, 2);
        const wgmma_shift first = wgmma_shift_of(g.run, 0);
        if (first.peers == 0) {
            continue;
        }
        g.players = calloc((size_t)g.run.grid, sizeof *g.players);
        g.added = calloc((size_t)(g.run.heads * g.run.q_blocks), sizeof *g.added);
        shifted++;
        near += first.peers > 1 && apart(&g, first) < g.least;
        wide += apart(&g, first) > g.least && apart(&g, first) * first.peers > g.spread;
        stuck += !(g.players && g.added && play(&g, &state));
        free(g.players);
        free(g.added);
    }
    tap_check(shifted > RUNS / 4, "%d of %d runs are shifted", shifted, RUNS);
    tap_check(near == 0, "items of a part begin as far apart as they must");
    tap_check(wide == 0, "and are spread no further than they may");
    tap_check(stuck == 0, "%d of them get stuck or add out of turn", stuck);
    return tap_done();
}
