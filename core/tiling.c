/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tiling.h"

#include "core/dtype.h"
#include "core/integer.h"
#include "core/io_model.h"
#include "core/problem.h"
#include "core/status.h"

/* The cost of a tile: by the kernel's own function, or else bytes of traffic. */
static double cost_of(const fattn_problem *problem, const fattn_limits *limits,
                      const fattn_kernel *kernel, fattn_tile tile)
{
    return kernel->cost ? kernel->cost(kernel, problem, limits, tile)
                        : fattn_io_plan_bytes(problem, tile.br, tile.bc, kernel->packs_groups);
}

/* The cheapest tile among those that fit fast memory; the smallest if none fits. The tile of a
 * batch-invariant problem must not depend on lengths or batch, and costs do: it is the first tile
 * that would fit with long sequences. */
static fattn_tile pick_tile(const fattn_problem *p, const fattn_limits *limits,
                            const fattn_kernel *kernel)
{
    const bool by_cost = !(p->features & FATTN_BATCH_INVARIANT);
    fattn_problem judged = *p;
    if (!by_cost) {
        judged.seqlen_q = judged.seqlen_k = 1 << 20;
    }
    const fattn_tile *best = NULL;
    int64_t best_bytes = INT64_MAX;
    double best_cost = 0;
    for (const fattn_tile *tile = kernel->tiles; tile->br; tile++) {
        const int64_t bytes = kernel->fast_bytes(kernel, &judged, *tile);
        if (bytes < 0) {
            continue;
        }
        const double cost = by_cost ? cost_of(p, limits, kernel, *tile) : 0;
        const bool fits = bytes <= limits->fast_memory;
        const bool best_fits = best_bytes <= limits->fast_memory;
        if (!best || (fits ? !best_fits || cost < best_cost : !best_fits && bytes < best_bytes)) {
            best = tile;
            best_bytes = bytes;
            best_cost = cost;
        }
    }
    return *best;
}

static bool has_tile(const fattn_kernel *kernel, const fattn_problem *p, fattn_tile wanted)
{
    const fattn_tile *menu = kernel->tiles;
    while (menu->br && (menu->br != wanted.br || menu->bc != wanted.bc)) {
        menu++;
    }
    return menu->br && kernel->fast_bytes(kernel, p, *menu) >= 0;
}

/* The number of parts for a kernel that memory bounds. Its pieces take equal time, and units
 * compute them in rounds, of which the last should be full. A round costs `extra` key blocks
 * besides its own, and so does merging. */
static int64_t pick_even_splits(int64_t units, int64_t extra, const fattn_tiling *tiling)
{
    enum { ROUNDS = 8 }; /* with more rounds it hardly matters whether the last one is full */
    int64_t best = 1, best_cost = INT64_MAX;
    for (int64_t rounds = 0; rounds <= ROUNDS && tiling->items <= ROUNDS * units; rounds++) {
        const int64_t wanted = fattn_min64(rounds * units / tiling->items, tiling->k_blocks);
        const int64_t blocks = fattn_ceil_div(tiling->k_blocks, wanted < 1 ? 1 : wanted);
        const int64_t splits = blocks ? fattn_ceil_div(tiling->k_blocks, blocks) : 1;
        const int64_t taken = fattn_ceil_div(tiling->items * splits, units);
        const int64_t cost = taken * (blocks + extra) + (splits > 1 ? extra : 0);
        if (cost < best_cost) {
            best = splits;
            best_cost = cost;
        }
    }
    return best;
}

/* The number of pieces into which a run cuts the keys of all sequences (tiling.h), or 0. */
static int64_t pick_pieces(const fattn_problem *problem, const fattn_limits *limits,
                           const fattn_kernel *kernel, const fattn_wish *wish)
{
    const bool differ = problem->features & (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |
                                             FATTN_SEQUSED_Q | FATTN_SEQUSED_K);
    const bool knows = kernel->by_lengths || (limits->by_lengths && kernel->rows_max);
    if (!knows || !kernel->split || !differ || wish->splits ||
        problem->features & FATTN_BATCH_INVARIANT) {
        return 0;
    }
    return kernel->split(kernel, problem, limits).pieces;
}

/* The number of parts into which keys are cut: enough pieces of work, each with enough keys to pay
 * for itself. If runs cut keys by the lengths of all sequences, one may get all parts. */
static int64_t pick_splits(const fattn_limits *limits, const fattn_kernel *kernel,
                           const fattn_problem *problem, const fattn_tiling *tiling)
{
    if (!kernel->split || problem->features & FATTN_BATCH_INVARIANT || tiling->items == 0) {
        return 1;
    }
    const fattn_split_cost cost = kernel->split(kernel, problem, limits);
    if (cost.units && !tiling->pieces) {
        return pick_even_splits(cost.units, fattn_ceil_div(cost.keys, tiling->bc), tiling);
    }
    const int64_t items = tiling->pieces ? tiling->items / problem->batch : tiling->items;
    return fattn_min64(fattn_ceil_div(cost.pieces, items), problem->seqlen_k / cost.keys);
}

/*
 * The number of key blocks n for which one part costs as much as `splits` parts; for fewer,
 * pick_even_splits() makes one part. Units need `taken` rounds for undivided blocks of rows and
 * `more` for their parts; a round costs `extra` besides its key blocks, and merging costs `extra`:
 *
 *     taken (n + extra) = more (n / splits + extra) + extra
 */
static int64_t even_whole_blocks(int64_t units, int64_t extra, int64_t blocks, int64_t splits,
                                 int64_t k_blocks)
{
    const double taken = (double)fattn_ceil_div(blocks, units);
    const double more = (double)fattn_ceil_div(blocks * splits, units);
    const double saved = taken - more / (double)splits; /* a block */
    const double costs = (more - taken + 1) * (double)extra;
    const double most = (double)(k_blocks - 1);
    return costs < saved * most ? (int64_t)(costs / saved) : k_blocks - 1;
}

/* Sets how sequences that are shorter than the plan's longest are cut: into about as many parts as
 * a plan for their length would have. `blocks` is the number of blocks of rows. */
static void cut_by_lengths(const fattn_limits *limits, const fattn_kernel *kernel,
                           const fattn_problem *problem, int64_t blocks, fattn_tiling *t)
{
    const int64_t some = t->k_blocks / t->splits; /* key blocks per part of the longest sequence */
    t->part_blocks = t->whole_blocks = 1;
    if (t->splits == 1) {
        return;
    }
    const fattn_split_cost cost = kernel->split(kernel, problem, limits);
    const int64_t least = fattn_ceil_div(cost.keys, t->bc);
    if (cost.units) {
        t->whole_blocks = even_whole_blocks(cost.units, least, blocks, t->splits, t->k_blocks);
    } else {
        t->part_blocks = fattn_min64(least < 1 ? 1 : least, some);
    }
}

/* Bytes that every block of a head reads: keys and values in forward; q, dout and f32 dq in
 * backward. */
static double walked_bytes(const fattn_problem *p)
{
    const double dims = (double)(p->dim + p->dim_v);
    const double element = (double)fattn_dtype_size(p->dtype);
    const double group = (double)fattn_problem_group(p);
    return p->op == FATTN_FORWARD
               ? (double)p->seqlen_k * (double)(p->dim * fattn_dtype_size(p->dtype_kv) +
                                                p->dim_v * fattn_dtype_size(p->dtype_v))
               : (double)p->seqlen_q * group * (dims * element + (double)p->dim * sizeof(float));
}

/* The number of heads whose items alternate (schedule.h). That pays if some rows may attend to more
 * keys than others: under a causal mask, or a mask or bias. All heads, or as many as fit half of
 * the shared cache, in groups of equal size. */
static int64_t pick_together(const fattn_problem *p, const fattn_limits *limits, int64_t heads)
{
    const bool differ =
        p->window_right >= 0 || p->features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK);
    int64_t together = differ && heads > 1 ? heads : 1;
    while (together > 1 && (double)together * walked_bytes(p) > (double)limits->shared_cache / 2) {
        together = fattn_ceil_div(together, 2);
    }
    return together;
}

/*
 * Slow-memory bytes of a run. With a shared cache, the blocks of a head that run at the same time
 * read its keys and values from slow memory only once. If the heads that are at work fit half of
 * the cache, that holds for all blocks of a head: later ones find the keys in the cache. Such
 * blocks together move as much as one large block.
 */
static double traffic_of(const fattn_problem *p, const fattn_limits *limits,
                         const fattn_kernel *kernel, const fattn_tiling *t)
{
    const bool forward = p->op == FATTN_FORWARD;
    const int64_t blocks = forward ? t->q_blocks : t->k_blocks;
    int64_t together = 1;
    if (limits->shared_cache > 0 && blocks > 0) {
        const double heads = (double)(limits->parallelism / blocks + 1);
        const bool fits = heads * walked_bytes(p) <= (double)limits->shared_cache / 2;
        together = fits ? blocks : fattn_min64(blocks, limits->parallelism);
    }
    return fattn_io_plan_bytes(p, forward ? t->br * together : t->br,
                               forward ? t->bc : t->bc * together, kernel->packs_groups);
}

static fattn_status fail_overflow(const fattn_kernel *kernel)
{
    return fattn_fail(FATTN_OVERFLOW, "the workspace or work list of %s overflows 63 bits",
                      kernel->name);
}

fattn_status fattn_tiling_choose(const fattn_problem *problem, const fattn_limits *limits,
                                 const fattn_kernel *kernel, const fattn_wish *wish,
                                 fattn_tiling *tiling)
{
    if (wish->tile.br && !has_tile(kernel, problem, wish->tile)) {
        return fattn_fail(FATTN_UNSUPPORTED, "kernel %s has no tile %lld,%lld", kernel->name,
                          (long long)wish->tile.br, (long long)wish->tile.bc);
    }
    const fattn_tile tile = wish->tile.br ? wish->tile : pick_tile(problem, limits, kernel);
    fattn_tiling t = {.br = tile.br, .bc = tile.bc, .workers = wish->workers};
    t.q_blocks = fattn_ceil_div(fattn_kernel_rows(kernel, problem), t.br);
    t.k_blocks = fattn_ceil_div(problem->seqlen_k, t.bc);
    t.heads = problem->batch * fattn_kernel_heads(kernel, problem);
    if (__builtin_mul_overflow(t.heads, t.q_blocks, &t.items)) {
        return fail_overflow(kernel);
    }
    const int64_t blocks = t.items;
    t.pieces = pick_pieces(problem, limits, kernel, wish);

    int64_t splits = wish->splits ? wish->splits : pick_splits(limits, kernel, problem, &t);
    splits = splits < 1 ? 1 : splits;
    t.split_blocks = fattn_ceil_div(t.k_blocks, splits);
    t.splits = t.split_blocks ? fattn_ceil_div(t.k_blocks, t.split_blocks) : 1;
    const bool overflow = __builtin_mul_overflow(t.items, t.splits, &t.items);
    if (!overflow) {
        cut_by_lengths(limits, kernel, problem, blocks, &t);
        t.items = t.pieces ? fattn_min64(t.items, blocks + 2 * t.pieces) : t.items;
    }
    t.together = t.splits > 1 ? 1 : pick_together(problem, limits, t.heads);

    t.workspace = overflow ? -1 : kernel->workspace(kernel, problem, &t);
    if (t.workspace < 0) {
        return fail_overflow(kernel);
    }
    t.traffic = traffic_of(problem, limits, kernel, &t);
    *tiling = t;
    return FATTN_OK;
}
