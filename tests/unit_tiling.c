/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing tiles and parts of keys, and which rows decline: pure functions, tested with imaginary
 * devices and kernels. */
#include <criterion/criterion.h>
#include <string.h>

#include "backends/cpu/cost.h"
#include "core/feature.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "core/schedule.h"
#include "core/tiling.h"
#include "tests/unit_answers.h"

static int64_t square_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)row;
    return 4 * (tile.br * tile.bc + (tile.br + 2 * tile.bc) * p->dim);
}

static int64_t partial_bytes(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    (void)row;
    return t->splits > 1 ? t->splits * p->batch * p->heads_q * p->seqlen_q * (p->dim_v + 2) * 4 : 0;
}

static int64_t endless_bytes(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    (void)row, (void)p, (void)t;
    return -1;
}

static fattn_split_cost by_thousands(const fattn_kernel *row, const fattn_problem *p,
                                     const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 1024, .pieces = limits->parallelism};
}

static fattn_split_cost by_256(const fattn_kernel *row, const fattn_problem *p,
                               const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 256, .pieces = limits->parallelism};
}

static fattn_split_cost by_256_evenly(const fattn_kernel *row, const fattn_problem *p,
                                      const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 256, .units = limits->units};
}

static const fattn_tile menu[] = {{32, 32}, {64, 64}, {128, 64}, {256, 128}, {0, 0}};

static fattn_kernel imaginary(void)
{
    return (fattn_kernel){.name = "imaginary",
                          .ops = FATTN_OP_BIT(FATTN_FORWARD),
                          .dtypes = FATTN_DTYPE_BIT(FATTN_F32),
                          .features = FATTN_FEATURES_ALL & ~FATTN_SINK & ~FATTN_BIAS,
                          .dim_max = 128,
                          .rows_max = 1024,
                          .tiles = menu,
                          .split = by_thousands,
                          .fast_bytes = square_bytes,
                          .workspace = partial_bytes};
}

static fattn_problem normal(int64_t sq, int64_t sk, int64_t dim)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.heads_q = 8;
    p.heads_k = 2;
    p.seqlen_q = sq;
    p.seqlen_k = sk;
    p.dim = p.dim_v = dim;
    ANSWERS(fattn_problem_normalise(&p, &p), FATTN_OK);
    return p;
}

Test(tiling, the_largest_tile_that_fits)
{
    const fattn_kernel k = imaginary();
    const fattn_problem p = normal(1000, 3000, 64);
    const fattn_wish none = {.splits = 0};
    const struct {
        int64_t fast, br, bc;
    } cases[] = {{1 << 30, 256, 128},
                 {128 << 10, 128, 64},
                 {80 << 10, 64, 64},
                 {40 << 10, 32, 32},
                 {1, 32, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fattn_limits limits = {cases[i].fast, 1, 0, 0, false};
        fattn_tiling t;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, cases[i].br, "%lld fast bytes: br %lld", (long long)cases[i].fast,
                     (long long)t.br);
        cr_assert_eq(t.bc, cases[i].bc);
        cr_assert_eq(t.q_blocks, (1000 + t.br - 1) / t.br);
        cr_assert_eq(t.k_blocks, (3000 + t.bc - 1) / t.bc);
        cr_assert_eq(t.items, 8 * t.q_blocks);
        cr_assert_eq(t.splits, 1);
        cr_assert_eq(t.workspace, 0);
        cr_assert_gt(t.traffic, 0);
    }
}

/* The CPU's cost of tiles, for a kernel that does not pack groups. */
static double cost_of(const fattn_problem *p, const fattn_limits *limits, fattn_tile tile,
                      fattn_cpu_blocks blocks)
{
    fattn_problem single = *p;
    single.heads_k = p->heads_q;
    return fattn_cpu_cost(&single, limits, tile, blocks);
}

/* Blocks that take the time of ten rows more than their own, or of a hundred. */
static double ten(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                  fattn_tile tile)
{
    (void)row;
    return cost_of(p, limits, tile, (fattn_cpu_blocks){.extra_rows = 10});
}
static double ten_in_order(const fattn_kernel *row, const fattn_problem *p,
                           const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    return cost_of(p, limits, tile, (fattn_cpu_blocks){.extra_rows = 10, .in_order = true});
}
static double hundred(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                      fattn_tile tile)
{
    (void)row;
    return cost_of(p, limits, tile, (fattn_cpu_blocks){.extra_rows = 100});
}

/* Blocks are small enough to keep all units busy, and no smaller than their fixed cost
 * justifies. */
Test(tiling, units_share_blocks)
{
    fattn_kernel k = imaginary();
    const fattn_wish none = {.splits = 0};
    const struct {
        int64_t sq, units;
        double (*cost)(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                       fattn_tile tile);
        int64_t br;
    } cases[] = {{256, 16, ten, 64},     {256, 16, hundred, 128},    {256, 4, hundred, 256},
                 {100000, 16, ten, 256}, {100000, 16, hundred, 256}, {256, 0, ten, 256},
                 {256, 16, NULL, 256}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fattn_limits limits = {1 << 30, 1, 0, cases[i].units, false};
        const fattn_problem p = normal(cases[i].sq, 3000, 64);
        fattn_tiling t;
        k.cost = cases[i].cost;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, cases[i].br, "case %zu: br %lld", i, (long long)t.br);
    }
}

/* If blocks of a head wait for one another, one key tile apart, many blocks gain little when tiles
 * are few. */
Test(tiling, blocks_in_order_wait)
{
    fattn_kernel k = imaginary();
    const fattn_wish none = {.splits = 0};
    const struct {
        int64_t sq, sk;
        bool in_order;
        int64_t br;
    } cases[] = {{128, 32, false, 64}, {128, 32, true, 128}, {128, 4096, true, 64}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fattn_limits limits = {1 << 30, 1, 0, 16, false};
        const fattn_problem p = normal(cases[i].sq, cases[i].sk, 64);
        fattn_tiling t;
        k.cost = cases[i].in_order ? ten_in_order : ten;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, cases[i].br, "case %zu: br %lld", i, (long long)t.br);
    }
}

/* Two spellings of one mask are one problem and get one plan. */
Test(tiling, causal_is_a_window)
{
    fattn_kernel k = imaginary();
    const fattn_wish none = {.splits = 0};
    const fattn_limits limits = {1 << 30, 1, 1 << 22, 16, false};
    k.cost = hundred;
    for (int64_t sq = 100; sq < 5000; sq += 100) {
        fattn_problem causal = normal(sq, 3000, 64), window = causal;
        fattn_tiling a, b;
        causal.features = FATTN_CAUSAL;
        window.features = FATTN_WINDOW, window.window_right = 0;
        ANSWERS(fattn_problem_normalise(&causal, &causal), FATTN_OK);
        ANSWERS(fattn_problem_normalise(&window, &window), FATTN_OK);
        ANSWERS(fattn_tiling_choose(&causal, &limits, &k, &none, &a), FATTN_OK);
        ANSWERS(fattn_tiling_choose(&window, &limits, &k, &none, &b), FATTN_OK);
        cr_assert_eq(a.br, b.br, "%lld rows: br %lld, of the window %lld", (long long)sq,
                     (long long)a.br, (long long)b.br);
        cr_assert_eq(a.together, b.together);
    }
}

/* A mask or bias may be causal, which a plan cannot know. Its blocks are those of a causal mask. */
Test(tiling, a_mask_or_bias_may_be_causal)
{
    fattn_kernel k = imaginary();
    const fattn_wish none = {.splits = 0};
    const fattn_limits limits = {1 << 30, 1, 1 << 22, 16, false};
    const uint64_t features[] = {FATTN_MASK, FATTN_BIAS};
    k.cost = hundred;
    for (int64_t sq = 100; sq < 5000; sq += 100) {
        fattn_problem causal = normal(sq, 3000, 64);
        fattn_tiling a, b;
        causal.features = FATTN_CAUSAL;
        ANSWERS(fattn_problem_normalise(&causal, &causal), FATTN_OK);
        ANSWERS(fattn_tiling_choose(&causal, &limits, &k, &none, &a), FATTN_OK);
        for (size_t i = 0; i < sizeof features / sizeof features[0]; i++) {
            fattn_problem masked = normal(sq, 3000, 64);
            masked.features = features[i];
            ANSWERS(fattn_problem_normalise(&masked, &masked), FATTN_OK);
            ANSWERS(fattn_tiling_choose(&masked, &limits, &k, &none, &b), FATTN_OK);
            cr_assert_eq(b.br, a.br, "%lld rows, feature %zu: br %lld, causal %lld", (long long)sq,
                         i, (long long)b.br, (long long)a.br);
        }
    }
}

/* Keys and values of one of 8 heads of 3000 keys are 3000 * 2 * 64 * 4 bytes, 1.5 MB. */
Test(tiling, a_shared_cache_spares_slow_memory)
{
    const fattn_kernel k = imaginary();
    const fattn_problem p = normal(1000, 3000, 64);
    const fattn_wish none = {.splits = 0};
    const double ends = 8 * 1000.0 * 2 * 64 * 4, keys = 8 * 3000.0 * 2 * 64 * 4;
    const struct {
        int64_t parallelism, cache;
        double walks; /* of 32 blocks of 32 rows */
    } cases[] = {{4, 0, 32}, {4, 1 << 20, 8}, {31, 1 << 20, 2}, {4, 4 << 20, 1}, {64, 4 << 20, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fattn_limits limits = {1, cases[i].parallelism, cases[i].cache, 0, false};
        fattn_tiling t;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, 32);
        cr_assert_float_eq(t.traffic, ends + cases[i].walks * keys, 1, "case %zu: %g", i,
                           t.traffic);
    }
}

Test(tiling, keys_are_split_when_queries_are_few)
{
    fattn_kernel k = imaginary();
    const fattn_wish none = {.splits = 0};
    const fattn_limits limits = {1 << 20, 64, 0, 0, false};
    fattn_problem p = normal(1, 65536, 64);
    fattn_tiling t;
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
    cr_assert_eq(t.splits, 8);
    cr_assert_eq(t.split_blocks * t.splits, t.k_blocks);
    cr_assert_eq(t.items, 64);
    cr_assert_gt(t.workspace, 0);

    p.features |= FATTN_BATCH_INVARIANT;
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
    cr_assert_eq(t.splits, 1);
    p.features = 0;
    k.packs_groups = true; /* 4 heads per block: a quarter of the items */
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
    cr_assert_eq(t.splits, 32);

    /* For any requested number: no part is empty and all keys are covered. */
    for (int64_t keys = 0; keys < 2000; keys += 37) {
        for (int64_t splits = 1; splits < 40; splits++) {
            const fattn_wish wish = {.splits = splits};
            p = normal(1, keys, 64);
            ANSWERS(fattn_tiling_choose(&p, &limits, &k, &wish, &t), FATTN_OK);
            cr_assert(t.splits >= 1 && t.splits <= splits);
            cr_assert(t.splits * t.split_blocks >= t.k_blocks);
            cr_assert((t.splits - 1) * t.split_blocks < t.k_blocks || t.k_blocks == 0);
        }
    }
}

/* Where runs cut keys by lengths, one sequence of a large batch may have all parts, and there are
 * fewer than two parts for each piece of work, besides a part for each head, whatever the batch. */
Test(tiling, lengths_cut_large_batches)
{
    fattn_kernel k = imaginary();
    k.packs_groups = true;
    k.split = by_256;
    const fattn_limits limits = {1 << 20, 64, 0, 0, true};
    const fattn_wish none = {.splits = 0}, four = {.splits = 4};
    fattn_problem p = normal(1, 65536, 64);
    fattn_tiling t;
    for (p.batch = 1; p.batch <= 10000; p.batch *= 10) {
        p.features = FATTN_SEQUSED_K;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.pieces, 64);
        cr_assert_eq(t.splits, 32, "batch %lld: %lld parts", (long long)p.batch,
                     (long long)t.splits);
        cr_assert_leq(t.items, 2 * p.batch + 2 * 64);

        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &four, &t), FATTN_OK);
        cr_assert_eq(t.pieces, 0, "a wish is for each sequence");
        cr_assert_eq(t.items, 4 * 2 * p.batch);
        p.features |= FATTN_BATCH_INVARIANT;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.pieces, 0);
        p.features = 0;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.pieces, 0, "all have one length");
        cr_assert_eq(t.splits, p.batch == 1 ? 32 : p.batch == 10 ? 4 : 1);
    }
}

/* A memory-bound row gets few rounds, and the last one is nearly full. */
Test(tiling, even_splits_fill_rounds)
{
    fattn_kernel k = imaginary();
    k.packs_groups = true;
    k.split = by_256_evenly;
    const fattn_wish none = {.splits = 0};
    const fattn_limits limits = {1 << 20, 264, 0, 132, false};
    const struct {
        int64_t batch, keys, items;
    } cases[] = {{1, 131072, 132},   {4, 32768, 128},     {64, 2048, 128}, {66, 65536, 132},
                 {100, 65536, 1000}, {1000, 65536, 2000}, {1, 256, 2},     {3, 0, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fattn_problem p = normal(1, cases[i].keys, 64);
        fattn_tiling t;
        p.batch = cases[i].batch;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.items, cases[i].items, "batch %lld: %lld items", (long long)p.batch,
                     (long long)t.items);
    }
}

/* A plan for long sequences splits a shorter one like a plan for exactly that length: into parts at
 * most a quarter longer, and into one where that plan has one, except for a few keys at the
 * limit. */
Test(tiling, lengths_are_cut_as_if_planned_for)
{
    for (int even = 0; even < 2; even++) {
        fattn_kernel k = imaginary();
        k.packs_groups = true;
        k.split = even ? by_256_evenly : by_256;
        const fattn_wish tile = {.tile = {32, 32}};
        const fattn_limits limits = {1 << 20, 264, 0, 132, false};
        fattn_problem p = normal(1, 131072, 64);
        fattn_tiling all, just;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &tile, &all), FATTN_OK);
        cr_assert_gt(all.splits, 60);
        for (int64_t keys = 32; keys <= 131072; keys += 32 * (1 + keys / 256)) {
            p = normal(1, keys, 64);
            ANSWERS(fattn_tiling_choose(&p, &limits, &k, &tile, &just), FATTN_OK);
            const fattn_parts parts = fattn_schedule_parts(&all, 0, just.k_blocks);
            const int64_t count = fattn_parts_count(&parts);
            cr_assert_leq(4 * parts.size, 5 * just.split_blocks + 4, "%lld keys: parts of %lld",
                          (long long)keys, (long long)parts.size);
            cr_assert(just.splits > 1 || count == 1 || keys < 3 * 256, "%lld keys: %lld parts",
                      (long long)keys, (long long)count);
        }
        const fattn_parts whole = fattn_schedule_parts(&all, 0, all.k_blocks);
        cr_assert_eq(fattn_parts_count(&whole), all.splits);
    }
}

static double four_rounds(const fattn_kernel *row, const fattn_problem *p,
                          const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    const fattn_cpu_blocks blocks = {.extra_rows = 20, .large = 256, .rounds = 4};
    return cost_of(p, limits, tile, blocks);
}

/* The largest tile needs this many blocks per unit even if tiles are compared by cost. */
Test(tiling, rounds_for_the_largest_tile)
{
    static const fattn_tile rising[] = {{32, 128}, {256, 128}, {0, 0}};
    fattn_kernel k = imaginary();
    k.tiles = rising;
    k.cost = four_rounds;
    const fattn_wish none = {.splits = 0};
    for (int64_t rows = 383; rows <= 384; rows++) {
        const fattn_problem p = normal(rows, 100, 64); /* of eight heads */
        const fattn_limits limits = {1 << 30, 1, 0, 3, false};
        fattn_tiling t;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, rows < 384 ? 32 : 256, "%lld rows: br %lld", (long long)rows,
                     (long long)t.br);
    }
}

/* The first tile needs this many blocks per unit; otherwise the next one that fits is taken. */
Test(tiling, rounds_for_the_first_tile)
{
    static const fattn_tile falling[] = {{256, 128}, {128, 64}, {32, 32}, {0, 0}};
    fattn_kernel k = imaginary();
    k.tiles = falling;
    k.cost = four_rounds;
    const fattn_wish none = {.splits = 0};
    const struct {
        int64_t fast, rows, br;
    } cases[] = {{1 << 30, 384, 256}, {1 << 30, 383, 128}, {128 << 10, 384, 128}, {1, 384, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fattn_problem p = normal(cases[i].rows, 100, 64); /* of eight heads */
        const fattn_limits limits = {cases[i].fast, 1, 0, 3, false};
        fattn_tiling t;
        ANSWERS(fattn_tiling_choose(&p, &limits, &k, &none, &t), FATTN_OK);
        cr_assert_eq(t.br, cases[i].br, "%lld rows, %lld fast bytes: br %lld",
                     (long long)cases[i].rows, (long long)cases[i].fast, (long long)t.br);
    }
}

/* A problem that only tiles of 64 rows are for. */
static int64_t bytes_of_64(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    return tile.br == 64 ? square_bytes(row, p, tile) : -1;
}

Test(tiling, tiles_of_other_problems)
{
    fattn_kernel k = imaginary();
    const fattn_limits limits = {1 << 20, 64, 0, 0, false};
    const fattn_problem p = normal(1000, 1000, 64);
    const fattn_wish any = {.tile = {0, 0}}, other = {.tile = {128, 64}};
    fattn_tiling t;
    k.fast_bytes = bytes_of_64;
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &any, &t), FATTN_OK);
    cr_assert_eq(t.br, 64);
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &other, &t), FATTN_UNSUPPORTED);
    REASON_HAS("128,64");
    k.must_fit = true;
    cr_assert(fattn_kernel_fits(&k, &p, 1 << 20));
    cr_assert_not(fattn_kernel_fits(&k, &p, 0));
}

Test(tiling, refusals)
{
    fattn_kernel k = imaginary();
    const fattn_limits limits = {1 << 20, 64, 0, 0, false};
    const fattn_problem p = normal(100, 100, 64);
    fattn_tiling t;
    const fattn_wish odd = {.tile = {33, 32}};
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &odd, &t), FATTN_UNSUPPORTED);
    REASON_HAS("33,32");
    const fattn_wish known = {.tile = {64, 64}};
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &known, &t), FATTN_OK);
    cr_assert_eq(t.br, 64);
    k.workspace = endless_bytes;
    ANSWERS(fattn_tiling_choose(&p, &limits, &k, &known, &t), FATTN_OVERFLOW);
}

Test(kernel, declines_with_a_reason)
{
    fattn_kernel k = imaginary();
    char text[256];
    fattn_problem p = normal(10, 10, 64);
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p.features = FATTN_SINK | FATTN_BIAS | FATTN_CAUSAL;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), "does not honour bias sink");
    p.features = 0, p.op = FATTN_BACKWARD;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), "computes no backward");
    k.ops = 0, p.op = FATTN_FORWARD;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), "computes no forward");
    k = imaginary(), p.dtype = FATTN_BF16;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), "takes no bf16");
    p = normal(10, 10, 129);
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "129"));
    p = normal(257, 10, 64);
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "1028"));
    p = normal(10, 10, 64), k.rows_min = 40; /* four heads of ten rows */
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    k.rows_min = 41;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text),
                     "takes at least 41 query rows per key/value head, not 40");
    p.features = FATTN_BATCH_INVARIANT;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text), "rows may not count");
    k.rows_min = 0;

    p = normal(10, 10, 64), p.batch = 3; /* of eight heads in two groups, ten rows each */
    cr_assert_eq(fattn_kernel_rows(&k, &p), 10);
    cr_assert_eq(fattn_kernel_blocks(&k, &p), 3 * p.heads_q);
    k.packs_groups = true;
    cr_assert_eq(fattn_kernel_rows(&k, &p), 40);
    cr_assert_eq(fattn_kernel_blocks(&k, &p), 3 * p.heads_k * 2, "tiles of 32 rows");
    k.packs_groups = false;
    p.batch = INT64_MAX / 3;
    cr_assert_eq(fattn_kernel_blocks(&k, &p), INT64_MAX);
    p.batch = 0;
    cr_assert_eq(fattn_kernel_blocks(&k, &p), 0);

    p = normal(10, 10, 64), p.dim_v = k.dim_max + 1;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "dim_v 129"));
    p.dim_v = k.dim_max;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p = normal(10, 10, 64), p.dtype_o = FATTN_BF16;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    k.own_dtype_o = true;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "dtype_o bf16"));
    p = normal(10, 10, 64), p.features = FATTN_DROPOUT, p.dropout_p = 0.75;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    k.dropout_max = 0.5;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "0.75"));

    k.features |= FATTN_BIAS;
    p = normal(10, 10, 64), p.features = FATTN_BIAS | FATTN_DETERMINISTIC;
    p.dtype_bias = FATTN_F32;
    p.outputs = FATTN_OUT_DQ | FATTN_OUT_DBIAS; /* a bias for all heads */
    p.dbias_stride[0] = 400, p.dbias_stride[2] = 10, p.dbias_stride[3] = 1;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    k.adds_dbias = true;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text),
                     "sums dbias over an axis in any order");
    p.outputs = FATTN_OUT_DQ;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text), "dbias is not wanted");
    p.outputs |= FATTN_OUT_DBIAS, p.dbias_stride[1] = 100;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text), "nothing is summed");
    p.dbias_stride[1] = 0, p.features = FATTN_BIAS;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text), "any order will do");
    cr_assert_str_eq(fattn_feature_name(0), "causal");
    cr_assert_str_eq(fattn_feature_name(20), "checked");
    cr_assert_null(fattn_feature_name(FATTN_FEATURE_COUNT));
}

Test(feature, rows_are_in_the_order_of_bits)
{
    fattn_problem p;
    char text[64];
    fattn_problem_init(&p);
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        const fattn_feature *const row = fattn_feature_row(bit);
        cr_assert_eq(row->bit, UINT64_C(1) << bit, "%s", row->name);
        for (const fattn_feature_field *field = row->fields; field->name; field++) {
            const bool real = field->kind == FATTN_FIELD_REAL;
            cr_assert(real ? fattn_feature_real(&p, field) == (double)field->usual
                           : fattn_feature_integer(&p, field) == field->usual,
                      "%s: fattn_problem_init() gives another default", field->name);
        }
    }
    p.window_left = 128, p.softcap = 0.5, p.chunk = 8192;
    cr_assert_str_eq(fattn_feature_value(&p, 1, text, sizeof text), "(128,-1)");
    cr_assert_str_eq(fattn_feature_value(&p, 3, text, sizeof text), "(0.5)");
    cr_assert_str_eq(fattn_feature_value(&p, 23, text, sizeof text), "(8192)");
    cr_assert_str_eq(fattn_feature_value(&p, 0, text, sizeof text), "");
    cr_assert_str_eq(fattn_feature_value(&p, 23, text, 4), "(81");
}

Test(kernel, fits_or_need_not)
{
    fattn_kernel k = imaginary();
    const fattn_problem p = normal(10, 10, 64);
    const int64_t least = k.fast_bytes(&k, &p, menu[0]);
    cr_assert(fattn_kernel_fits(&k, &p, 0));
    k.must_fit = true;
    cr_assert(fattn_kernel_fits(&k, &p, least));
    cr_assert_not(fattn_kernel_fits(&k, &p, least - 1));
}

Test(kernel, rows_begin_where_it_needs_them)
{
    fattn_kernel k = imaginary();
    k.align = 16; /* four floats */
    k.ops = FATTN_OP_BIT(FATTN_FORWARD) | FATTN_OP_BIT(FATTN_BACKWARD);
    fattn_problem p = normal(10, 10, 64);
    char text[256];
    const fattn_strides even = {.batch = 64, .seq = 8, .head = 4};
    p.q = p.k = p.v = p.dout = even;
    p.pointer_alignment = 16;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p.v.head = 6;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "those of v"));
    p.v = even, p.dout.seq = 7;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text), "forward has no dout");
    p.op = FATTN_BACKWARD;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "those of dout"));
    p.dout = even, p.pointer_alignment = 8;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "16 bytes"));
}

Test(kernel, rows_of_each_type_begin_where_it_needs_them)
{
    fattn_kernel k = imaginary();
    k.align = 16, k.dtypes_kv = FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_F32);
    fattn_problem p = normal(10, 10, 64);
    char text[256];
    const fattn_strides fours = {.batch = 64, .seq = 8, .head = 4};
    const fattn_strides eights = {.batch = 64, .seq = 16, .head = 8};
    p.q = p.k = p.v = fours, p.dtype_v = FATTN_F16;
    p.pointer_alignment = 16;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "those of v"));
    p.v = eights;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p.v = fours, p.dtype_kv = FATTN_F16, p.dtype_v = FATTN_F32;
    cr_assert_not_null(strstr(fattn_kernel_declines(&k, &p, text, sizeof text), "those of k"));
    p.k = eights;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
}

Test(kernel, types_of_keys_and_values)
{
    fattn_kernel k = imaginary();
    fattn_problem p = normal(10, 10, 64);
    char text[256];
    const char *const e4m3_v = "takes no q, k and v in f32, f32 and e4m3";
    const char *const e4m3_k = "takes no q, k and v in f32, e4m3 and f32";
    p.dtype_v = FATTN_E4M3;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), e4m3_v);
    k.dtypes_kv = FATTN_DTYPE_BIT(FATTN_F16);
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), e4m3_v);
    p.dtype_kv = FATTN_E4M3, p.dtype_v = FATTN_F32;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), e4m3_k);
    k.dtypes_kv = FATTN_DTYPE_BIT(FATTN_E4M3);
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p.dtype_v = FATTN_E4M3;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    k.caches_alone = true;
    cr_assert_null(fattn_kernel_declines(&k, &p, text, sizeof text));
    p.dtype_kv = FATTN_F32;
    cr_assert_str_eq(fattn_kernel_declines(&k, &p, text, sizeof text), e4m3_v);
}
