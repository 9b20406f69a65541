/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core/philox.h: the generator against its published vectors and Random123; the dropout map against
 * a second implementation of its definition; the vector form against both; and the statistics of
 * the pattern.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/problem.h"
#include "tests/tap.h"
#include "tools/judge/random.h"

#if defined(__has_include)
#if __has_include(<Random123/philox.h>)
#define HAVE_RANDOM123
#include <Random123/philox.h>
#endif
#endif

/* -------------------------------------------------------------------------------------------------
 * A vector of a length that no processor has. The header is instantiated over it, under a suffix,
 * and then in its scalar form, which has to step around these names.
 * ---------------------------------------------------------------------------------------------- */

enum { LANES = 5 };

typedef struct uv {
    uint32_t lane[LANES];
} uv;

typedef struct fv {
    float lane[LANES];
} fv;

#define EACH_LANE(expression)                                      \
    uv result;                                                     \
    for (int n = 0; n < LANES; n++) result.lane[n] = (expression); \
    return result

static inline uv uv_set1(uint32_t x) { EACH_LANE(x); }
static inline uv uv_add(uv a, uv b) { EACH_LANE(a.lane[n] + b.lane[n]); }
static inline uv uv_and(uv a, uv b) { EACH_LANE(a.lane[n] & b.lane[n]); }
static inline uv uv_xor(uv a, uv b) { EACH_LANE(a.lane[n] ^ b.lane[n]); }
static inline uv uv_shr(uv a, int bits) { EACH_LANE(a.lane[n] >> bits); }

static inline uv uv_mulhilo(uv a, uv b, uv *hi)
{
    for (int n = 0; n < LANES; n++) {
        hi->lane[n] = (uint32_t)(((uint64_t)a.lane[n] * b.lane[n]) >> 32);
    }
    EACH_LANE(a.lane[n] * b.lane[n]);
}

static inline fv fv_from_bits(uv a)
{
    fv x;
    memcpy(&x, &a, sizeof x);
    return x;
}

#define FATTN_SUFFIX _lanes
#include "core/philox.h"
#undef FATTN_SUFFIX
#include "core/philox.h"

/* -------------------------------------------------------------------------------------------------
 * A source of random words
 * ---------------------------------------------------------------------------------------------- */

static uint64_t random_word(void)
{
    static draw_rng rng = {20240229};
    return draw_bits(&rng);
}

/* A number below bound, of random magnitude. */
static int64_t random_index(int64_t bound)
{
    const int64_t index = (int64_t)(random_word() % (uint64_t)bound);
    return index >> (random_word() % 34);
}

/* -------------------------------------------------------------------------------------------------
 * The definition, a second time: in 64-bit integers, by division and remainder
 * ---------------------------------------------------------------------------------------------- */

typedef struct pair {
    int64_t b, h, i, j;
} pair;

static void plain_philox(const uint64_t counter[4], const uint64_t key[2], uint64_t words[4])
{
    const uint64_t two32 = UINT64_C(1) << 32;

    memcpy(words, counter, 4 * sizeof *words);
    for (uint64_t round = 0; round < 10; round++) {
        const uint64_t first = words[0] * UINT64_C(3528531795);
        const uint64_t second = words[2] * UINT64_C(3449720151);
        const uint64_t next[4] = {
            (second / two32) ^ words[1] ^ ((key[0] + round * UINT64_C(2654435769)) % two32),
            second % two32,
            (first / two32) ^ words[3] ^ ((key[1] + round * UINT64_C(3144134277)) % two32),
            first % two32,
        };
        memcpy(words, next, sizeof next);
    }
}

static double plain_multiplier(uint64_t seed, uint64_t offset, int64_t threshold, pair at)
{
    const uint64_t two32 = UINT64_C(1) << 32;
    const uint64_t start[4] = {offset % two32, offset / two32, 0, 0};
    const uint64_t seed_words[2] = {seed % two32, seed / two32};
    uint64_t key[4], words[4];

    plain_philox(start, seed_words, key);
    const uint64_t counter[4] = {
        (uint64_t)(at.i / 16 * 8 + at.i % 8),
        (uint64_t)(at.j / 16 * 4 + at.j % 8 / 2),
        (uint64_t)at.b,
        (uint64_t)at.h,
    };
    plain_philox(counter, key, words);
    const uint64_t word = words[at.i % 16 / 8 * 2 + at.j % 16 / 8];
    const int64_t bits = (int64_t)(at.j % 2 ? word / 65536 : word % 65536);
    const float kept = 65536.0f / (float)(65536 - threshold); /* C for s390x divides in double */
    return bits < threshold ? 0 : (double)kept;
}

/* -------------------------------------------------------------------------------------------------
 * The generator
 * ---------------------------------------------------------------------------------------------- */

static void check_vectors(void)
{
    /* From the list of known answers that accompanies the authors' implementation. */
    static const struct {
        const char *name;
        uint32_t counter[4], key[2], words[4];
    } rows[] = {
        {"zeros (hazard_H6)",
         {0, 0, 0, 0},
         {0, 0},
         {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {"ones",
         {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {"digits of pi",
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        uint32_t words[4];
        uv lanes[4];
        fattn_philox4x32_10(rows[n].counter, rows[n].key, words);
        int right = memcmp(words, rows[n].words, sizeof words) == 0;
        for (int w = 0; w < 4; w++) lanes[w] = uv_set1(rows[n].counter[w]);
        fattn_philox4x32_10_lanes(lanes, rows[n].key, lanes);
        for (int w = 0; w < 4; w++) right &= lanes[w].lane[LANES - 1] == rows[n].words[w];
        tap_check(right, "known answer: %s", rows[n].name);
    }
}

#ifdef HAVE_RANDOM123
static void check_random123(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 200000; n++) {
        uint32_t words[4], state[6];
        for (int w = 0; w < 6; w++) state[w] = (uint32_t)random_word();
        const philox4x32_ctr_t counter = {{state[0], state[1], state[2], state[3]}};
        const philox4x32_key_t key = {{state[4], state[5]}};
        const philox4x32_ctr_t want = philox4x32_R(10, counter, key);
        fattn_philox4x32_10(state, state + 4, words);
        wrong += memcmp(words, want.v, sizeof words) != 0;
    }
    tap_check(wrong == 0, "as Random123 for 200000 random counters and keys");
}
#else
static void check_random123(void)
{
    tap_check(1, "as Random123 # SKIP Random123/philox.h was not there at build time");
}
#endif

/* -------------------------------------------------------------------------------------------------
 * The map
 * ---------------------------------------------------------------------------------------------- */

static fattn_dropout random_dropout(uint64_t *seed, uint64_t *offset, int64_t *threshold)
{
    static const int64_t edges[] = {0, 1, 2, 32768, 65534, 65535, 65536};
    *seed = random_word();
    *offset = (uint64_t)random_index(INT64_MAX);
    *threshold = random_word() % 4 ? (int64_t)(random_word() % 65537) : edges[random_word() % 7];
    return fattn_dropout_make((uint32_t)*threshold, *seed, *offset);
}

static pair random_pair(void)
{
    const pair at = {random_index(FATTN_DROPOUT_BATCHES), random_index(FATTN_DROPOUT_HEADS),
                     random_index(FATTN_DROPOUT_QUERIES), random_index(FATTN_DROPOUT_KEYS)};
    return at;
}

static int64_t differs(const char *form, uint64_t seed, uint64_t offset, int64_t threshold, pair at,
                       float got)
{
    const double want = plain_multiplier(seed, offset, threshold, at);
    if ((double)got == want) return 0;
    printf("# %s: seed %" PRIu64 " offset %" PRIu64 " t %" PRId64 " b %" PRId64 " h %" PRId64
           " i %" PRId64 " j %" PRId64 ": %g, want %g\n",
           form, seed, offset, threshold, at.b, at.h, at.i, at.j, (double)got, want);
    return 1;
}

static void check_scalar(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 200000; n++) {
        uint64_t seed, offset;
        int64_t threshold;
        const fattn_dropout dropout = random_dropout(&seed, &offset, &threshold);
        const pair at = random_pair();
        const uint32_t split = (uint32_t)(random_word() % 1000); /* i = i0 + di in any way */
        const int64_t di = at.i < split ? at.i : split;
        const fattn_dropout_rows rows =
            fattn_dropout_rows_at(at.i - di, (uint32_t)di, (uint32_t)at.b, (uint32_t)at.h);
        float block[16];

        wrong += differs("at", seed, offset, threshold, at, fattn_dropout_at(&dropout, rows, at.j));
        fattn_dropout_block(&dropout, rows, at.j & ~INT64_C(15), block);
        wrong += differs("block", seed, offset, threshold, at, block[at.j & 15]);
    }
    tap_check(wrong == 0, "scalar form: single keys and blocks as defined");
}

static void check_lanes(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 20000; n++) {
        uint64_t seed, offset;
        int64_t threshold;
        const fattn_dropout dropout = random_dropout(&seed, &offset, &threshold);
        const pair first = random_pair();
        const int64_t j0 = first.j & ~INT64_C(15);
        /* Lanes hold rows and heads in any order, as when the heads of a group share a tile. */
        pair at[LANES];
        uv di, b, h;
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t step = n % 2 ? (uint32_t)lane : (uint32_t)(random_word() % 100000);
            at[lane] = first;
            at[lane].i = first.i < FATTN_DROPOUT_QUERIES - 100000 ? first.i + step : first.i;
            at[lane].h = n % 2 ? first.h : random_index(FATTN_DROPOUT_HEADS);
            di.lane[lane] = (uint32_t)(at[lane].i - first.i);
            b.lane[lane] = (uint32_t)at[lane].b;
            h.lane[lane] = (uint32_t)at[lane].h;
        }
        const fattn_dropout_rows_lanes rows = fattn_dropout_rows_at_lanes(first.i, di, b, h);
        const fv single = fattn_dropout_at_lanes(&dropout, rows, first.j);
        fv block[16];
        fattn_dropout_block_lanes(&dropout, rows, j0, block);
        for (int lane = 0; lane < LANES; lane++) {
            wrong += differs("at", seed, offset, threshold, at[lane], single.lane[lane]);
            for (int64_t key = 0; key < 16; key++) {
                at[lane].j = j0 + key;
                wrong += differs("block", seed, offset, threshold, at[lane], block[key].lane[lane]);
            }
        }
    }
    tap_check(wrong == 0, "vector form: single keys and blocks as defined");
}

/* A thread of a tensor-core tile makes one call for its two rows and four columns. */
static void check_patch(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 20000; n++) {
        uint64_t seed, offset;
        int64_t threshold;
        const fattn_dropout dropout = random_dropout(&seed, &offset, &threshold);
        pair at = random_pair();
        const int64_t i0 = at.i & ~INT64_C(8), j0 = at.j & ~INT64_C(9);
        uint32_t words[4];
        fattn_dropout_words(&dropout, fattn_dropout_rows_at(i0, 0, (uint32_t)at.b, (uint32_t)at.h),
                            j0, words);
        for (int corner = 0; corner < 8; corner++) {
            const int down = corner >> 2, right = corner >> 1 & 1, odd = corner & 1;
            at.i = i0 + 8 * down;
            at.j = j0 + 8 * right + odd;
            wrong += differs("patch", seed, offset, threshold, at,
                             fattn_dropout_multiplier(&dropout, words[2 * down + right], odd));
        }
    }
    tap_check(wrong == 0, "one call serves rows i, i + 8 and columns 2c, 2c + 1, 2c + 8, 2c + 9");
}

static void check_threshold(void)
{
    static const struct {
        double p;
        uint32_t threshold;
    } rows[] = {
        {0, 0},
        {0x1p-1074, 1},
        {1e-9, 1},
        {0x1p-17, 1},
        {0x1.8p-16, 2},
        {0x1.4p-15, 3},
        {0.1, 6554},
        {0x1.3ffffffffffffp-15, 2},
        {0.3, 19661},
        {0.5, 32768},
        {1 - 0x1p-16, 65535},
        {1 - 0x1p-18, 65535},
        {1 - 0x1p-53, 65535},
        {1, 65536},
    };
    int right = 1;
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        right &= fattn_dropout_threshold(rows[n].p) == rows[n].threshold;
    }
    tap_check(right, "a probability is rounded to 65536ths; only 0 and 1 become 0 and 1");
}

/* Kept values are scaled by the float nearest to 65536 / (65536 - t). */
static void check_multiplier(void)
{
    int64_t wrong = 0;
    for (uint32_t threshold = 0; threshold < 65536; threshold++) {
        const float z = fattn_dropout_make(threshold, 1, 2).multiplier;
        const double kept = 65536.0 - threshold;
        const double half_ulp = ldexp(1, ilogb((double)z) - 24);
        wrong += !(fabs((double)z * kept - 65536) <= half_ulp * kept); /* products are exact */
    }
    wrong += fattn_dropout_make(65536, 1, 2).multiplier != 0;
    tap_check(wrong == 0, "the multiplier of every threshold is rounded once");
}

/* -------------------------------------------------------------------------------------------------
 * The pattern
 * ---------------------------------------------------------------------------------------------- */

enum { SIDE = 1000 };

/* SIDE x SIDE pairs from (i0, j0) on: 1 kept, 0 dropped. */
static unsigned char *pattern_of(double p, uint64_t seed, uint64_t offset, pair from)
{
    const fattn_dropout dropout = fattn_dropout_make(fattn_dropout_threshold(p), seed, offset);
    unsigned char *const kept = malloc(SIDE * SIDE);

    if (!kept) {
        tap_bail("out of memory");
    }
    for (uint32_t i = 0; i < SIDE; i++) {
        const fattn_dropout_rows rows =
            fattn_dropout_rows_at(from.i, i, (uint32_t)from.b, (uint32_t)from.h);
        for (int64_t j = 0; j < SIDE; j++) {
            kept[i * SIDE + j] = fattn_dropout_at(&dropout, rows, from.j + j) > 0;
        }
    }
    return kept;
}

/* count successes of n trials are within five standard deviations of n * rate. */
static int plausible(int64_t count, int64_t n, double rate)
{
    return fabs((double)count - (double)n * rate) <= 5 * sqrt((double)n * rate * (1 - rate));
}

static void check_rates(void)
{
    static const double ps[] = {1.0 / 65536, 0.01, 0.1, 0.25, 0.5, 0.9, 0.999};
    const pair origin = {0, 0, 0, 0};
    int right = 1;

    for (size_t n = 0; n < sizeof ps / sizeof ps[0]; n++) {
        const double keep_rate = 1 - floor(ps[n] * 65536 + 0.5) / 65536;
        unsigned char *const kept = pattern_of(ps[n], 7, n, origin);
        int64_t total = 0;
        for (int64_t k = 0; k < SIDE * SIDE; k++) total += kept[k];
        for (int64_t line = 0; line < SIDE; line++) {
            int64_t row = 0, column = 0;
            for (int64_t k = 0; k < SIDE; k++) {
                row += kept[line * SIDE + k];
                column += kept[k * SIDE + line];
            }
            /* The normal approximation needs some tens of each outcome per line. */
            if (SIDE * fmin(keep_rate, 1 - keep_rate) > 50) {
                right &= plausible(row, SIDE, keep_rate) && plausible(column, SIDE, keep_rate);
            }
        }
        right &= plausible(total, SIDE * SIDE, keep_rate);
        printf("# p %-10g kept %.6f of 10^6, expected %.6f\n", ps[n], (double)total / (SIDE * SIDE),
               keep_rate);
        free(kept);
    }
    tap_check(right, "as many are kept as the probability says, in all, by row and by column");
}

/* Patterns of different calls agree as often as two independent ones. */
static void check_independence(void)
{
    static const struct {
        const char *name;
        uint64_t seed, offset;
        pair from;
    } others[] = {
        {"the next offset (hazard_H3)", 7, 1, {0, 0, 0, 0}},
        {"offset + 2^32", 7, UINT64_C(1) << 32, {0, 0, 0, 0}},
        {"the next seed", 8, 0, {0, 0, 0, 0}},
        {"seed + 2^32", 7 + (UINT64_C(1) << 32), 0, {0, 0, 0, 0}},
        {"the next batch entry", 7, 0, {1, 0, 0, 0}},
        {"the next head", 7, 0, {0, 1, 0, 0}},
        {"the next row", 7, 0, {0, 0, 1, 0}},
        {"eight rows on", 7, 0, {0, 0, 8, 0}},
        {"sixteen rows on", 7, 0, {0, 0, 16, 0}},
        {"the next key", 7, 0, {0, 0, 0, 1}},
        {"eight keys on", 7, 0, {0, 0, 0, 8}},
        {"sixteen keys on", 7, 0, {0, 0, 0, 16}},
    };
    const pair origin = {0, 0, 0, 0};
    const double p = 0.25;
    unsigned char *const kept = pattern_of(p, 7, 0, origin);

    for (size_t n = 0; n < sizeof others / sizeof others[0]; n++) {
        unsigned char *const other =
            pattern_of(p, others[n].seed, others[n].offset, others[n].from);
        int64_t agreeing = 0;
        for (int64_t k = 0; k < SIDE * SIDE; k++) agreeing += kept[k] == other[k];
        tap_check(plausible(agreeing, SIDE * SIDE, p * p + (1 - p) * (1 - p)), "unrelated: %s",
                  others[n].name);
        free(other);
    }
    free(kept);
}

int main(void)
{
    check_vectors();
    check_random123();
    check_scalar();
    check_lanes();
    check_patch();
    check_threshold();
    check_multiplier();
    check_rates();
    check_independence();
    return tap_done();
}
