/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares band.h with a loop over pairs, for every small window, diagonal, length, tile and some
 * chunks; and checks that the work list of schedule.h holds every block of every part exactly once.
 */
#include <stdlib.h>
#include <string.h>

#include "core/band.h"
#include "core/schedule.h"
#include "tests/random.h"
#include "tests/tap.h"

/* --- Bands ------------------------------------------------------------------------------------ */

/* The chunk of a key, by steps from a key that begins one. */
static int64_t chunk_of(const fattn_band *band, int64_t j)
{
    int64_t begin = -(int64_t)band->key_place, chunk = 0;
    for (; begin > j; begin -= band->chunk) chunk--;
    for (; begin + band->chunk <= j; begin += band->chunk) chunk++;
    return chunk;
}

/* The contract's definition: j exists, -left <= j - (i + off) <= right, and j and i + off are of
 * one chunk. */
static bool keeps(const fattn_band *band, int64_t i, int64_t j)
{
    const int64_t at = j - (i + band->diagonal);
    if (band->chunk && chunk_of(band, j) != chunk_of(band, i + band->diagonal)) {
        return false;
    }
    return j >= 0 && j < band->keys && (band->left < 0 || at >= -band->left) &&
           (band->right < 0 || at <= band->right);
}

static bool row_is_right(const fattn_band *band, int64_t i, int64_t limit)
{
    const fattn_range keys = fattn_band_row(band, i);
    for (int64_t j = 0; j < limit; j++) {
        if (keeps(band, i, j) != (j >= keys.first && j < keys.past)) {
            return false;
        }
    }
    return keys.first >= 0 && keys.past <= band->keys;
}

/* Full and empty are promises. Partial is always allowed, but must not be the only answer. */
static bool tile_is_right(const fattn_band *band, const int64_t at[4], int64_t counts[3])
{
    bool all = true, any = false;
    for (int64_t i = at[0]; i < at[1]; i++) {
        for (int64_t j = at[2]; j < at[3]; j++) {
            any = any || keeps(band, i, j);
            all = all && keeps(band, i, j);
        }
    }
    const fattn_tile_kind kind = fattn_band_tile(band, at[0], at[1], at[2], at[3]);
    counts[kind]++;
    const fattn_range keys = fattn_band_rows(band, at[0], at[1]);
    const bool seen = keys.first < at[3] && keys.past > at[2];
    if (kind == FATTN_TILE_FULL) {
        return all && seen;
    }
    if (kind == FATTN_TILE_EMPTY) {
        return !any;
    }
    return !all && seen;
}

/* Every row that sees a key of the tile is in the range, and no row outside of it. */
static bool queries_are_right(const fattn_band *band, int64_t rows, const int64_t at[4],
                              int64_t *fewer)
{
    const int64_t j1 = fattn_min64(at[3], band->keys);
    if (at[2] >= j1) {
        return true;
    }
    const fattn_range queries = fattn_band_queries(band, rows, at[2], j1);
    *fewer += queries.first > 0 || queries.past < rows;
    for (int64_t i = 0; i < rows; i++) {
        bool any = false;
        for (int64_t j = at[2]; j < j1; j++) {
            any = any || keeps(band, i, j);
        }
        if (any != (i >= queries.first && i < queries.past)) {
            return false;
        }
    }
    return queries.first >= 0 && queries.past <= rows;
}

static void check_bands(int64_t chunk, int64_t position)
{
    enum { ROWS = 5, KEYS = 7 };
    int64_t bands = 0, wrong_rows = 0, tiles = 0, wrong_tiles = 0, counts[3] = {0};
    int64_t wrong_queries = 0, fewer = 0;
    for (int64_t keys = 0; keys <= KEYS; keys++) {
        for (int64_t n = 0; n < 16 * 8 * 8; n++) {
            const fattn_problem p = {
                .window_left = n / 16 % 8 - 1, .window_right = n / 128 - 1, .chunk = chunk};
            const fattn_sequence sequence = {
                .sk = keys, .diagonal = n % 16 - 8, .k_position = position};
            const fattn_band band = fattn_band_of(&p, &sequence);
            bands++;
            for (int64_t i = 0; i < ROWS; i++) {
                wrong_rows += !row_is_right(&band, i, KEYS + 2);
            }
            for (int64_t t = 0; t < 4 * 4 * 4 * 4; t++) {
                const int64_t i0 = t % 4, j0 = t / 16 % 4 * 2;
                const int64_t at[4] = {i0, i0 + 1 + t / 4 % 4, j0, j0 + 1 + t / 64};
                tiles++;
                wrong_tiles += !tile_is_right(&band, at, counts);
                wrong_queries += !queries_are_right(&band, ROWS, at, &fewer);
            }
        }
    }
    tap_check(wrong_rows == 0, "rows of %lld bands, chunk %lld from %lld on: %lld wrong",
              (long long)bands, (long long)chunk, (long long)position, (long long)wrong_rows);
    tap_check(wrong_tiles == 0, "%lld tiles: %lld wrong", (long long)tiles, (long long)wrong_tiles);
    tap_check(counts[FATTN_TILE_EMPTY] > tiles / 10 && counts[FATTN_TILE_FULL] > tiles / 1000,
              "%lld empty, %lld full", (long long)counts[FATTN_TILE_EMPTY],
              (long long)counts[FATTN_TILE_FULL]);
    tap_check(wrong_queries == 0 && fewer > tiles / 10, "their queries: %lld wrong, %lld not all",
              (long long)wrong_queries, (long long)fewer);
}

static void check_far(void)
{
    const int64_t far = INT64_C(1) << 41, end = INT64_MAX;
    const fattn_band open = {.keys = 100, .diagonal = far, .left = end, .right = end};
    const fattn_range all = fattn_band_row(&open, 0);
    tap_check(all.first == 0 && all.past == 100, "the widest window far away sees every key");
    const fattn_band back = {.keys = 100, .diagonal = -far, .left = end, .right = end};
    const fattn_range also = fattn_band_row(&back, 5);
    tap_check(also.first == 0 && also.past == 100, "and on the other side");
    const fattn_band past = {.keys = 100, .diagonal = far, .left = 10, .right = 0};
    tap_check(fattn_band_tile(&past, 0, 64, 0, 100) == FATTN_TILE_EMPTY,
              "a narrow one there sees none");
    const fattn_problem p = {.window_left = -1, .window_right = -1, .chunk = 64};
    const fattn_sequence shard = {.sq = 10, .sk = 100, .k_position = -far - 1};
    const fattn_band cut = fattn_band_of(&p, &shard); /* key 0 is the last of its chunk */
    const fattn_range one = fattn_band_row(&cut, 0), next = fattn_band_row(&cut, 1);
    tap_check(one.first == 0 && one.past == 1 && next.first == 1 && next.past == 65,
              "chunks are those of positions, also below 0");
    const fattn_problem most = {.window_left = -1, .window_right = -1, .chunk = INT32_MAX};
    const fattn_sequence last = {.sk = INT32_MAX, .k_position = INT32_MAX - 1};
    const fattn_band wide = fattn_band_of(&most, &last); /* key 0 is the last of its chunk */
    const fattn_range rest = fattn_band_row(&wide, INT32_MAX - 1);
    const fattn_range rows = fattn_band_queries(&wide, INT32_MAX, INT32_MAX - 1, INT32_MAX);
    tap_check(rest.first == 1 && rest.past == INT32_MAX && rows.first == 1 &&
                  rows.past == INT32_MAX,
              "the largest chunk, row and key");
}

/* Tiles near the last key of all, where sums do not fit 32 bits. */
static void check_whole_tiles(void)
{
    int64_t wrong = 0, whole = 0, tiles = 0;
    for (int32_t width = 16; width <= 256; width *= 2) {
        for (int32_t less = 0; less < 600; less++) {
            const int32_t keys = INT32_MAX - less;
            for (int64_t j0 = (keys / width - 3) * (int64_t)width; j0 < keys; j0 += width) {
                const bool exists = j0 + width <= keys;
                wrong += (fattn_tile_is_whole((int32_t)j0, width, keys) != 0) != exists;
                whole += exists;
                tiles++;
            }
        }
    }
    tap_check(wrong == 0 && whole > 0 && whole < tiles,
              "%lld of %lld tiles near key 2^31 are whole: %lld wrong", (long long)whole,
              (long long)tiles, (long long)wrong);
}

static void check_block_masks(void)
{
    enum { SIDE = 4 };
    int64_t wrong = 0, tiles = 0;
    for (int64_t n = 0; n < 20000; n++) {
        uint8_t mask[SIDE * SIDE];
        for (int k = 0; k < SIDE * SIDE; k++) {
            mask[k] = (uint8_t)((n * 2654435761u >> k & 1) * (unsigned)(n % 3 + 1));
        }
        const fattn_block_mask m = {.mask = mask,
                                    .stride_i = n % 5 ? SIDE : 0,
                                    .stride_j = n % 7 ? 1 : 0,
                                    .rows = 1 + n % 3,
                                    .keys = 1 + n / 3 % 4};
        const int64_t i0 = n % 3, j0 = n / 5 % 3;
        const int64_t i1 = fattn_min64(SIDE * m.rows, i0 + 1 + n / 11 % 6);
        const int64_t j1 = fattn_min64(SIDE * m.keys, j0 + 1 + n / 13 % 6);
        bool any = false, all = true;
        for (int64_t i = i0; i < i1; i++) {
            for (int64_t j = j0; j < j1; j++) {
                const bool kept = mask[i / m.rows * m.stride_i + j / m.keys * m.stride_j] != 0;
                any = any || kept;
                all = all && kept;
            }
        }
        const fattn_tile_kind expected = !any  ? FATTN_TILE_EMPTY
                                         : all ? FATTN_TILE_FULL
                                               : FATTN_TILE_PARTIAL;
        if (i0 < i1 && j0 < j1) {
            tiles++;
            wrong += fattn_block_mask_tile(&m, i0, i1, j0, j1) != expected;
        }
    }
    tap_check(wrong == 0 && tiles > 10000, "%lld tiles under block masks: %lld wrong",
              (long long)tiles, (long long)wrong);
}

/* --- The work list ---------------------------------------------------------------------------- */

/* Every item occurs once; within a head, or interleaved heads, the last rows come first. */
static void check_schedule(void)
{
    enum { BATCH = 3, HEADS = 4, BLOCKS = 5, SPLITS = 3, ITEMS = BATCH * HEADS * BLOCKS * SPLITS };
    fattn_tiling tiling = {
        .q_blocks = BLOCKS, .heads = BATCH * HEADS, .splits = SPLITS, .items = ITEMS};
    for (tiling.together = 1; tiling.together <= tiling.heads; tiling.together++) {
        bool seen[BATCH][HEADS][BLOCKS][SPLITS];
        int64_t twice = 0, light_first = 0, before = -1, turn = -1;
        memset(seen, 0, sizeof seen);
        for (int64_t n = 0; n < ITEMS; n++) {
            const fattn_work w = fattn_schedule_item(&tiling, HEADS, n);
            bool *const here = &seen[w.batch][w.head][w.block][w.split];
            const int64_t turn_before = turn;
            turn = (w.batch * HEADS + w.head) / tiling.together;
            twice += *here;
            light_first += turn < turn_before || (turn == turn_before && w.block > before);
            *here = true;
            before = w.block;
        }
        tap_check(twice == 0, "%d items are all different, %d heads together", ITEMS,
                  (int)tiling.together);
        tap_check(light_first == 0, "last rows come first");
    }
}

/* Equally likely numbers of low .. high. */
static int64_t drawn(int64_t low, int64_t high)
{
    static uint64_t state = 20240229;
    return low + (int64_t)((random_next(&state) >> 33) % (uint64_t)(high - low + 1));
}

/* For any keys that a row attends to: every key block is in exactly one part, only a row without
 * keys has an empty part, and there are at most fattn_schedule_most() parts, which never
 * decreases. */
static void check_parts(void)
{
    enum { BLOCKS = 40 };
    int64_t wrong = 0, empty = 0, missing = 0, over = 0, falls = 0, whole = 0;
    for (int64_t n = 0; n < 5000; n++) {
        fattn_tiling tiling = {
            .k_blocks = BLOCKS, .split_blocks = drawn(1, BLOCKS), .whole_blocks = 1};
        tiling.splits = (BLOCKS + tiling.split_blocks - 1) / tiling.split_blocks;
        if (tiling.splits > 1) {
            tiling.whole_blocks = drawn(1, BLOCKS - 1);
        }
        tiling.part_blocks = drawn(1, BLOCKS / tiling.splits);
        const int64_t from = drawn(0, BLOCKS), to = drawn(0, BLOCKS);
        const fattn_parts parts = fattn_schedule_parts(&tiling, from, to);
        const int64_t count = fattn_parts_count(&parts);
        int keys[BLOCKS] = {0};
        for (int64_t split = 0; split < tiling.splits; split++) {
            int64_t first, past;
            const bool there = fattn_schedule_keys(&parts, split, &first, &past);
            missing += there != (split < count);
            empty += there && first >= past && from < to;
            for (int64_t block = first; block < past; block++) {
                keys[block]++;
            }
        }
        for (int64_t block = 0; block < BLOCKS; block++) {
            wrong += keys[block] != (from <= block && block < to);
        }
        missing += fattn_parts_are_one(&parts) != (count == 1);
        over += count > fattn_schedule_most(&tiling, to > from ? to - from : 0);
        over += count > tiling.splits || count < 1;
        falls += fattn_schedule_most(&tiling, to) > fattn_schedule_most(&tiling, to + 1);
        whole += to - from <= tiling.whole_blocks && count != 1;
    }
    tap_check(wrong == 0, "every key block that a row sees belongs to one part");
    tap_check(empty == 0 && missing == 0, "no part is empty, and as many exist as are counted");
    tap_check(over == 0 && falls == 0, "parts are at most so many, and never fewer of more keys");
    tap_check(whole == 0, "a row that sees few keys has one part");
}

int main(void)
{
    static const int64_t chunks[][2] = {{0, 0}, {1, 0}, {2, 1}, {3, 0}, {3, -4}, {5, 13}};
    for (size_t n = 0; n < sizeof chunks / sizeof chunks[0]; n++) {
        check_bands(chunks[n][0], chunks[n][1]);
    }
    check_far();
    check_whole_tiles();
    check_block_masks();
    check_schedule();
    check_parts();
    return tap_done();
}
