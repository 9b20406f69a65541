/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares the operand layout of Hopper's matrix units in backends/cuda/wgmma.h with the manual's
 * independent description: swizzled rows, descriptors and fragments.
 */
#include <stdbool.h>
#include <string.h>

#include "backends/cuda/wgmma.h"
#include "tests/tap.h"

/* The manual's swizzle of addresses: bits 7 to 9 are added (xor) to bits 4 to 6. */
static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

static void check_offsets(void)
{
    enum { ROWS = 72, WIDTH = 256 };
    static bool taken[2 * ROWS * WIDTH];
    bool right = true;
    memset(taken, 0, sizeof taken);
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t c = 0; c < WIDTH; c++) {
            /* A panel is what a copy of 64 channels writes: rows of 128 bytes, swizzled. */
            const uint32_t panel = c / 64 * ROWS * 128, at = wgmma_offset(ROWS, r, c);
            right = right && at == panel + swizzled(r * 128 + c % 64 * 2) && !taken[at];
            taken[at] = true;
        }
    }
    tap_check(right, "elements of a tile lie where copies of 64 channels put them, each once");
}

/* A tile has a place for each of its elements, and for the zeros that a copy of whole panels leaves
 * behind them, whatever its width. */
static void check_panels(void)
{
    enum { ROWS = 128 };
    static const uint32_t widths[] = {64, 96, 128, 192, 256};
    bool fits = true, shared = true;
    for (size_t n = 0; n < sizeof widths / sizeof *widths; n++) {
        const uint32_t width = widths[n], panels = WGMMA_PANELS(width);
        fits = fits && panels * 64 >= width && (panels - 1) * 64 < width;
        for (uint32_t r = 0; r < ROWS; r++) {
            fits = fits && wgmma_offset(ROWS, r, width - 1) + 2 <= panels * ROWS * 128;
        }
        /* Queries, keys and values of one stage, each of ROWS rows. */
        const uint32_t bytes = WGMMA_SHARED(width, width, ROWS / 64, ROWS, 1);
        const uint32_t beside = WGMMA_SHARED(0, 0, ROWS / 64, ROWS, 1);
        shared = shared && bytes - beside == 3 * panels * ROWS * 128;
    }
    tap_check(fits, "panels hold the channels of each width");
    tap_check(shared, "shared memory holds whole panels");
}

/* Element (r, c) as a product that sums over channels reads it: the descriptor's start, steps of 16
 * channels, rows of 128 bytes in patterns of eight, and the swizzle. */
static void check_descriptors(void)
{
    enum { ROWS = 128, BASE = 5 * 1024 };
    bool fields = true, found = true;
    const uint64_t d = wgmma_descriptor(BASE, ROWS * 128);
    fields = fields && (d & 0x3fff) == BASE / 16;               /* start */
    fields = fields && (d >> 16 & 0x3fff) == ROWS * 128 / 16;   /* from panel to panel */
    fields = fields && (d >> 32 & 0x3fff) == 1024 / 16;         /* from eight rows to the next */
    fields = fields && d >> 62 == 1 && (d >> 46 & 0xffff) == 0; /* swizzle of 128 bytes */
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t c = 0; c < 64; c++) {
            const uint64_t step = d + c / 16 * WGMMA_CHANNELS;
            const uint32_t start = (uint32_t)(step & 0x3fff) * 16;
            const uint32_t eight = (uint32_t)(step >> 32 & 0x3fff) * 16;
            const uint32_t at = start + r / 8 * eight + r % 8 * 128 + c % 16 * 2;
            found = found && swizzled(at) == BASE + wgmma_offset(ROWS, r, c);
        }
    }
    for (uint32_t r = 0; r < ROWS; r++) { /* sums over rows: 16 rows a step, panels apart */
        for (uint32_t c = 0; c < 128; c++) {
            const uint64_t step = d + r / 16 * WGMMA_ROWS;
            const uint32_t start = (uint32_t)(step & 0x3fff) * 16;
            const uint32_t panel = (uint32_t)(step >> 16 & 0x3fff) * 16;
            const uint32_t eight = (uint32_t)(step >> 32 & 0x3fff) * 16;
            const uint32_t at =
                start + r % 16 / 8 * eight + r % 8 * 128 + c / 64 * panel + c % 64 * 2;
            found = found && swizzled(at) == BASE + wgmma_offset(ROWS, r, c);
        }
    }
    tap_check(fields, "a descriptor has its fields");
    tap_check(found, "steps along channels and rows reach the elements of a tile");
}

/* Sums of dQ in the workspace: each element has a place, rows of 64 channels follow one another,
 * and the lanes of a warp, 8 channels of every other row, write to 32 banks of 4 bytes. */
static void check_sums(void)
{
    enum { ROWS = 96, WIDTH = 128 };
    static bool taken[ROWS * WIDTH];
    bool each = true, banks = true, own = true;
    memset(taken, 0, sizeof taken);
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t c = 0; c < WIDTH; c++) {
            const uint32_t at = wgmma_sum_offset(ROWS, r, c);
            each = each && at < ROWS * WIDTH && at / 64 == c / 64 * ROWS + r && !taken[at];
            taken[at] = true;
        }
    }
    for (int n = 0; n < ROWS / 2; n++) {
        for (int warp = 0; warp < 4; warp++) {
            uint32_t hit = 0;
            for (int lane = 0; lane < 32; lane++) {
                const int t = 32 * warp + lane, channel = wgmma_row(t, n), row = wgmma_column(t, n);
                hit |= UINT32_C(1) << wgmma_sum_offset(ROWS, (uint32_t)row, (uint32_t)channel) % 32;
            }
            banks = banks && hit == UINT32_MAX;
        }
    }
    memset(taken, 0, sizeof taken);
    for (int t = 0; t < 128; t++) { /* their own: four after four of a thread, whatever the rows */
        for (int n = 0; n < 64 * ROWS / 128; n++) {
            const uint32_t r = (uint32_t)wgmma_column(t, n), c = (uint32_t)wgmma_row(t, n);
            const uint32_t at = wgmma_own_sum_offset(ROWS, r, c);
            own = own && at == (uint32_t)((n / 4 * 128 + t) * 4 + n % 4) && !taken[at] &&
                  wgmma_own_sum_offset(ROWS, r, 64 + c) == at + 64 * ROWS;
            taken[at] = true;
        }
    }
    tap_check(own, "sums that a thread adds itself lie four and four together");
    tap_check(each, "each sum of dQ has a place in its row's 64 channels");
    tap_check(banks, "a warp writes its sums of dQ to all banks at once");
}

/* Wideners: each chunk of 16 stored channels of each key is taken once, and its halves come to
 * where products read them. Eight lanes, which shared memory serves at once, access different
 * banks. */
static void check_wideners(int warps)
{
    enum { KEYS = 64, PANELS = 2 };
    static int taken[KEYS][4 * PANELS];
    const int step = warps * WGMMA_WIDENED;
    bool right = true, banks = true;
    memset(taken, 0, sizeof taken);
    for (int n = 0; n < KEYS / step * PANELS * 32 * warps; n += 8) {
        const int first = n / (32 * warps * PANELS) * step, panel = n / (32 * warps) % PANELS;
        uint32_t reads = 0, writes[2] = {0, 0}; /* a bit for each chunk of 128 bytes */
        for (int thread = n; thread < n + 8; thread++) {
            const wgmma_widener own = wgmma_widener_of(thread / 32 % warps, thread % 32);
            const uint32_t r = (uint32_t)(first + own.row), c = (uint32_t)(4 * panel + own.chunk);
            right = right && r < KEYS && own.chunk < 4 && taken[r][c]++ == 0;
            right = right && wgmma_chunk_offset(r, c) ==
                                 (wgmma_chunk_offset(r, c % 4) ^ (uint32_t)panel * 64);
            reads |= UINT32_C(1) << wgmma_chunk_offset(r, c) / 16 % 8;
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t at = wgmma_chunk_offset(r, 2 * (c % 4)) ^ 16 * half;
                right = right && (uint32_t)panel * KEYS * 128 + at ==
                                     wgmma_offset(KEYS, r, 16 * c + 8 * half);
                writes[half] |= UINT32_C(1) << at / 16 % 8;
            }
        }
        banks = banks && reads == 0xff && writes[0] == 0xff && writes[1] == 0xff;
    }
    for (int r = 0; r < KEYS; r++) {
        for (int c = 0; c < 4 * PANELS; c++) {
            right = right && taken[r][c] == 1;
        }
    }
    tap_check(right, "%d warps widen each stored channel once, to where products read it", warps);
    tap_check(banks, "%d warps that widen access all banks, eight lanes at a time", warps);
}

/* Rows and columns of a product, and of the first operand of the next product. */
static void check_fragments(void)
{
    enum { COLUMNS = 128, ELEMENTS = COLUMNS / 2 };
    static int owner[64][COLUMNS];
    bool each = true, quad = true, operand = true;
    memset(owner, 0, sizeof owner);
    for (int t = 0; t < 128; t++) {
        for (int n = 0; n < ELEMENTS; n++) {
            const int r = wgmma_row(t, n), c = wgmma_column(t, n);
            each = each && r >= 0 && r < 64 && c >= 0 && c < COLUMNS && owner[r][c]++ == 0;
            quad = quad && wgmma_row(t ^ 1, n) == r && wgmma_row(t ^ 2, n) == r; /* the row */
            quad = quad && r == wgmma_row(t, n % 4 / 2 * 2);
        }
        /* As pairs, word w of step s is of row g + 8 (w % 2), channel 16 s + 8 (w / 2) + 2 q. */
        for (int s = 0; s < ELEMENTS / 8; s++) {
            for (int w = 0; w < 4; w++) {
                const int n = 8 * s + 2 * w, g = t / 32 * 16 + t % 32 / 4, q = t % 4;
                operand = operand && wgmma_row(t, n) == g + 8 * (w % 2) &&
                          wgmma_row(t, n + 1) == wgmma_row(t, n) &&
                          wgmma_column(t, n) == 16 * s + 8 * (w / 2) + 2 * q &&
                          wgmma_column(t, n + 1) == wgmma_column(t, n) + 1;
            }
        }
    }
    tap_check(each, "each element of a product has one thread");
    tap_check(quad, "four neighbours share their two rows");
    tap_check(operand, "elements of a product, as pairs, are the first operand of the next");
}

int main(void)
{
    check_offsets();
    check_panels();
    check_descriptors();
    check_sums();
    check_wideners(2);
    check_wideners(4);
    check_fragments();
    return tap_done();
}
