/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dropout: which pairs (i, j) are dropped, the same on every processor.
 *
 * The pattern is a function of (seed, offset, b, h, i, j) alone, all of them global, so that tiles,
 * threads, shards and backends cannot change it. The random function is Philox4x32-10 (Salmon et
 * al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which maps four counter words under
 * two key words to four random words:
 *
 *     key'  words 0 and 1 of Philox(counter {offset low, offset high, 0, 0}, key seed): once a run
 *     w     Philox(counter {(i >> 4) * 8 + (i & 7), (j >> 4) * 4 + ((j & 7) >> 1), b, h}, key')
 *     bits  the low (j even) or high (j odd) half of w[2 * (bit 3 of i) + (bit 3 of j)]
 *     Z     0 where bits < t, else 65536 / (65536 - t)
 *
 * One call thus serves the patch of rows {i, i + 8} and columns {2c, 2c + 1, 2c + 8, 2c + 9} of a
 * 16 x 16 block: what one thread of a tensor-core tile holds.
 *
 * This is a template header over a vector of queries. Parameters, set before each inclusion:
 *
 *     FATTN_SUFFIX  appended to every name of the instance
 *     uv            vector of uint32_t, with functions (not macros)
 *                     uv_set1(uint32_t)  uv_add(uv, uv)  uv_and(uv, uv)  uv_xor(uv, uv)
 *                     uv_shr(uv, int)                  logical shift to the right
 *                     uv_mulhilo(uv a, uv b, uv *hi)   low words of a * b; high words to *hi
 *     fv            vector of float of as many lanes, with fv_from_bits(uv)
 *
 * Without FATTN_SUFFIX the header needs nothing: uv is a uint32_t, fv a float, and names are as
 * written below. That is the form for plain C and for a GPU thread. Both forms, and several vector
 * forms under different suffixes, may live in one unit, in any order.
 */
#ifndef FATTN_CORE_PHILOX_H
#define FATTN_CORE_PHILOX_H

#include <stdint.h>

#include "core/dtype.h"
#include "core/host_device.h"

/* Positions and indices below these bounds fit counter words of 32 bits; larger ones are refused.
 * The public interface limits key positions to FATTN_DROPOUT_QUERIES too. */
#define FATTN_DROPOUT_QUERIES (INT64_C(1) << 33)
#define FATTN_DROPOUT_KEYS (INT64_C(1) << 34)
#define FATTN_DROPOUT_HEADS (INT64_C(1) << 32)
#define FATTN_DROPOUT_BATCHES (INT64_C(1) << 32)

/* A run's dropout, as kernels use it. */
typedef struct fattn_dropout {
    uint32_t key[2];    /* key' */
    uint32_t threshold; /* t, 0..65536 */
    float multiplier;   /* Z of a kept pair; 0 when nothing is kept */
} fattn_dropout;

/* The column of patches that holds key j, 0 <= j < FATTN_DROPOUT_KEYS; 16 keys on, it is 4 more. */
FATTN_HD uint32_t fattn_dropout_column(int64_t j)
{
    return (uint32_t)((j >> 4) * 4 + ((j & 7) >> 1));
}

#endif

#if defined(FATTN_SUFFIX) || !defined(FATTN_CORE_PHILOX_SCALAR)

#ifdef FATTN_SUFFIX
#define PHILOX_PASTE_EXPANDED(name, suffix) name##suffix
#define PHILOX_PASTE(name, suffix) PHILOX_PASTE_EXPANDED(name, suffix)
#define PHILOX_NAME(name) PHILOX_PASTE(name, FATTN_SUFFIX)
#else
#define FATTN_CORE_PHILOX_SCALAR
#define PHILOX_NAME(name) name

FATTN_HD uint32_t fattn_mulhilo32(uint32_t a, uint32_t b, uint32_t *hi)
{
    const uint64_t product = (uint64_t)a * b;
    *hi = (uint32_t)(product >> 32);
    return (uint32_t)product;
}

/* The scalar vocabulary: macros, which can hide a unit's own names until the #undef below. */
#define uv uint32_t
#define uv_set1(x) (x)
#define uv_add(a, b) ((a) + (b))
#define uv_and(a, b) ((a) & (b))
#define uv_xor(a, b) ((a) ^ (b))
#define uv_shr(a, n) ((a) >> (n))
#define uv_mulhilo(a, b, hi) fattn_mulhilo32(a, b, hi)
#define fv float
#define fv_from_bits(a) fattn_f32_from_bits(a)
#endif

/* Four random words for each lane's four counter words. */
FATTN_HD void PHILOX_NAME(fattn_philox4x32_10)(const uv counter[4], const uint32_t key[2],
                                               uv words[4])
{
    uv c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < 10; round++) {
        uv hi0, hi2;
        const uv lo0 = uv_mulhilo(c0, uv_set1(0xd2511f53u), &hi0);
        const uv lo2 = uv_mulhilo(c2, uv_set1(0xcd9e8d57u), &hi2);
        c0 = uv_xor(uv_xor(hi2, c1), uv_set1(k0));
        c2 = uv_xor(uv_xor(hi0, c3), uv_set1(k1));
        c1 = lo2;
        c3 = lo0;
        k0 += 0x9e3779b9u; /* the Weyl sequence: golden ratio ... */
        k1 += 0xbb67ae85u; /* ... and sqrt(3) - 1, in units of 2^-32 */
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* The rows' part of the counter words. It is the same for every key, so a tile computes it once. */
typedef struct PHILOX_NAME(fattn_dropout_rows) {
    uv row;   /* (i >> 4) * 8 + (i & 7) */
    uv first; /* all ones where bit 3 of i is clear: words 0 and 1; else 0: words 2 and 3 */
    uv b, h;
} PHILOX_NAME(fattn_dropout_rows);

/* Rows i = i0 + di of batch entries b and heads h, all global. 0 <= i < FATTN_DROPOUT_QUERIES, and
 * di < 2^32 - 15, so that adding i0 mod 16 does not wrap. */
FATTN_HD PHILOX_NAME(fattn_dropout_rows)
    PHILOX_NAME(fattn_dropout_rows_at)(int64_t i0, uv di, uv b, uv h)
{
    const uv i = uv_add(di, uv_set1((uint32_t)(i0 & 15))); /* short of a multiple of 16 */
    const uv base = uv_set1((uint32_t)((i0 >> 4) * 8));
    const uv bit3 = uv_and(uv_shr(i, 3), uv_set1(1));
    PHILOX_NAME(fattn_dropout_rows) rows;

    rows.row = uv_add(base, uv_add(uv_and(uv_shr(i, 1), uv_set1(~7u)), uv_and(i, uv_set1(7))));
    rows.first = uv_add(bit3, uv_set1(~0u));
    rows.b = b;
    rows.h = h;
    return rows;
}

/* The four words of the patch that the rows have in a column of patches. Word 2 * (bit 3 of i) +
 * (bit 3 of j) belongs to pair (i, j); its low half is for even j. */
FATTN_HD void PHILOX_NAME(fattn_dropout_patch)(const fattn_dropout *dropout,
                                               PHILOX_NAME(fattn_dropout_rows) rows,
                                               uint32_t column, uv words[4])
{
    const uv counter[4] = {rows.row, uv_set1(column), rows.b, rows.h};
    PHILOX_NAME(fattn_philox4x32_10)(counter, dropout->key, words);
}

/* The same for the patch that holds key j. */
FATTN_HD void PHILOX_NAME(fattn_dropout_words)(const fattn_dropout *dropout,
                                               PHILOX_NAME(fattn_dropout_rows) rows, int64_t j,
                                               uv words[4])
{
    PHILOX_NAME(fattn_dropout_patch)(dropout, rows, fattn_dropout_column(j), words);
}

/* Selects, for each lane, the first or the second word by bit 3 of its row. */
FATTN_HD uv PHILOX_NAME(fattn_dropout_pick)(PHILOX_NAME(fattn_dropout_rows) rows, uv first,
                                            uv second)
{
    return uv_xor(second, uv_and(uv_xor(first, second), rows.first));
}

/* Z of a pair from its word, which is in the low half (odd = 0) or the high half (odd = 1). */
FATTN_HD fv PHILOX_NAME(fattn_dropout_multiplier)(const fattn_dropout *dropout, uv word, int odd)
{
    const uv bits = odd ? uv_shr(word, 16) : uv_and(word, uv_set1(0xffffu));
    const uv difference = uv_add(bits, uv_set1(0u - dropout->threshold)); /* -65536..65535 */
    const uv dropped = uv_shr(difference, 31);
    const uv kept = uv_add(dropped, uv_set1(~0u)); /* 0 or all ones */
    return fv_from_bits(uv_and(kept, uv_set1(fattn_f32_bits(dropout->multiplier))));
}

/* Z of the rows and key j. */
FATTN_HD fv PHILOX_NAME(fattn_dropout_at)(const fattn_dropout *dropout,
                                          PHILOX_NAME(fattn_dropout_rows) rows, int64_t j)
{
    uv words[4];
    PHILOX_NAME(fattn_dropout_words)(dropout, rows, j, words);
    /* chosen, not indexed by j: an indexed array would leave a GPU's registers */
    const uv first = j & 8 ? words[1] : words[0], second = j & 8 ? words[3] : words[2];
    return PHILOX_NAME(fattn_dropout_multiplier)(
        dropout, PHILOX_NAME(fattn_dropout_pick)(rows, first, second), (int)j & 1);
}

/* Z of the rows and the keys j .. j + 15, j a multiple of 16, with a quarter of the Philox calls
 * that 16 single keys would take. */
FATTN_HD void PHILOX_NAME(fattn_dropout_block)(const fattn_dropout *dropout,
                                               PHILOX_NAME(fattn_dropout_rows) rows, int64_t j,
                                               fv multipliers[16])
{
    for (int c = 0; c < 8; c += 2) {
        uv words[4];
        PHILOX_NAME(fattn_dropout_words)(dropout, rows, j + c, words);
        const uv left = PHILOX_NAME(fattn_dropout_pick)(rows, words[0], words[2]);
        const uv right = PHILOX_NAME(fattn_dropout_pick)(rows, words[1], words[3]);
        multipliers[c] = PHILOX_NAME(fattn_dropout_multiplier)(dropout, left, 0);
        multipliers[c + 1] = PHILOX_NAME(fattn_dropout_multiplier)(dropout, left, 1);
        multipliers[c + 8] = PHILOX_NAME(fattn_dropout_multiplier)(dropout, right, 0);
        multipliers[c + 9] = PHILOX_NAME(fattn_dropout_multiplier)(dropout, right, 1);
    }
}

#ifndef FATTN_SUFFIX
#undef uv
#undef uv_set1
#undef uv_add
#undef uv_and
#undef uv_xor
#undef uv_shr
#undef uv_mulhilo
#undef fv
#undef fv_from_bits

/* The dropout of one run. threshold is fattn_dropout_threshold() of the probability. */
FATTN_HD fattn_dropout fattn_dropout_make(uint32_t threshold, uint64_t seed, uint64_t offset)
{
    const uint32_t counter[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    fattn_dropout dropout;

    fattn_philox4x32_10(counter, key, words);
    dropout.key[0] = words[0];
    dropout.key[1] = words[1];
    dropout.threshold = threshold;
    dropout.multiplier = threshold < 65536u ? 65536.0f / (float)(65536u - threshold) : 0.0f;
    return dropout;
}
#endif

#undef PHILOX_NAME
#ifdef FATTN_SUFFIX
#undef PHILOX_PASTE
#undef PHILOX_PASTE_EXPANDED
#endif

#endif
