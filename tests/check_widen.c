/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where threads of mma_e4m3_* read stored bytes and write what they become (mma_widen.h), for every
 * shape: each half chunk goes to the place where the products read it, and neither loads nor stores
 * wait for a bank of shared memory.
 */
#include "backends/cuda/mma_widen.h"
#include "tests/tap.h"

enum { CHUNKS_MAX = 2048, BANKS = 32 };

typedef struct shape {
    int width, rows, keys, tiles, warps, blocks;
} shape;

/* Where the products of mma_terms.cuh find chunk c of row r, in chunks. */
static int place_of(const shape *s, int r, int c)
{
    const int own = s->keys / 4, swizzle = r / own * 2 + r % 2;
    return r * (s->width / 8) + (c ^ swizzle);
}

/* Every half chunk of a tile is widened once, to its place. */
static void check_places(const shape *s)
{
    bool seen[CHUNKS_MAX] = {false};
    const int threads = 32 * s->warps, chunks = s->width / 16, step = threads / chunks;
    int wrong = 0, missing = 0;
    for (int t = 0; t < threads; t++) {
        for (int n = 0; n < s->keys / step; n++) {
            for (int half = 0; half < 2; half++) {
                const int from = mma_widen_from(s->width, threads, t, n, half);
                const int to = mma_widen_to(s->width, s->keys, t, n, half);
                const int r = t / chunks + n * step, c = t % chunks * 2 + from / 8 % 2;
                wrong += from / 16 != n * threads + t || to != 16 * place_of(s, r, c);
                seen[to / 16] = true;
            }
        }
    }
    for (int n = 0; n < s->keys * s->width / 8; n++) {
        missing += !seen[n];
    }
    tap_check(wrong == 0 && missing == 0, "width %d, %d keys: %d misplaced, %d missing", s->width,
              s->keys, wrong, missing);
}

/* The most words of one bank that an access by the threads from `first` on needs. The unit serves
 * as many threads at a time as cover all banks once. */
static int waits(const shape *s, int first, int n, int half, bool stores)
{
    const int bytes = stores ? 16 : 8, together = 4 * BANKS / bytes;
    int words[BANKS] = {0}, most = 0;
    for (int t = first; t < first + together; t++) {
        const int at = stores ? mma_widen_to(s->width, s->keys, t, n, half)
                              : mma_widen_from(s->width, 32 * s->warps, t, n, half);
        for (int b = at / 4; b < (at + bytes) / 4; b++) {
            words[b % BANKS]++;
            most = words[b % BANKS] > most ? words[b % BANKS] : most;
        }
    }
    return most;
}

static void check_banks(const shape *s, bool stores)
{
    const int together = stores ? 8 : 16;
    int most = 0;
    for (int first = 0; first < 32 * s->warps; first += together) {
        for (int n = 0; n < 8; n++) {
            const int words = waits(s, first, n / 2, n % 2, stores);
            most = words > most ? words : most;
        }
    }
    tap_check(most == 1, "width %d, %d keys: %s take a bank %d times", s->width, s->keys,
              stores ? "stores" : "loads", most);
}

int main(void)
{
#define SHAPE(run, features, ...) {__VA_ARGS__},
    static const shape shapes[] = {MMA_WIDEN_SHAPES(SHAPE)};
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
        check_places(&shapes[n]);
        check_banks(&shapes[n], false);
        check_banks(&shapes[n], true);
    }
    return tap_done();
}
