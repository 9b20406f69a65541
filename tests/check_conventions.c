/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle compared with values worked out by hand: which pairs are kept, what an empty row
 * gives, where a page is, what stays untouched. check_gradients covers gradients; this program
 * covers every choice of the contract that differentiation cannot reveal. Problems are in double
 * precision with D = Dv = 1 unless a test says otherwise. hazard_<id> marks failures that other
 * attention libraries had.
 */
#include <math.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/problem.h"
#include "tests/strip.h"
#include "tests/tap.h"
#include "tests/worst.h"

enum { ROOM = 4096 };
static const double inf = (double)INFINITY, untouched = 777;

static fattn_problem p;
static fattn_buffers buf;
static double q[ROOM], k[ROOM], v[ROOM], o[ROOM], lse[ROOM], dout[ROOM], dlse[ROOM], dq[ROOM],
    dk[ROOM], dv[ROOM], dbias[ROOM], dsink[ROOM], bias[ROOM], sink[ROOM], slopes[ROOM];
static uint8_t mask[ROOM], block_mask[ROOM];

static void fill(double *array, double x)
{
    for (int n = 0; n < ROOM; n++) array[n] = x;
}

/* Distinct numbers in (-1, 1) without a regular pattern. */
static void scatter(double *array, int salt)
{
    for (int n = 0; n < 256; n++) array[n] = sin(1.7 * n + 0.9 * salt);
    for (int n = 256; n < ROOM; n++) array[n] = -array[n - 251] / 2;
}

/* A problem of one sequence and one head; inputs scattered, outputs untouched. */
static void begin(fattn_op op, int64_t sq, int64_t sk, uint64_t features)
{
    static double *const inputs[] = {q, k, v, dout, dlse, bias, sink, slopes};
    static double *const outputs[] = {o, lse, dq, dk, dv, dbias, dsink};
    for (int n = 0; n < 8; n++) scatter(inputs[n], n);
    for (int n = 0; n < 7; n++) fill(outputs[n], untouched);
    memset(mask, 1, sizeof(mask));
    memset(block_mask, 1, sizeof(block_mask));
    fattn_problem_init(&p);
    fattn_buffers_init(&buf);
    p.op = op;
    p.dtype = FATTN_F64;
    p.seqlen_q = sq, p.seqlen_k = sk;
    p.dim = p.dim_v = 1;
    p.features = features;
    p.pointer_alignment = 1;
    p.block_m = p.block_n = 1;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    if (op == FATTN_BACKWARD)
        p.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV |
                    (features & FATTN_BIAS ? FATTN_OUT_DBIAS : 0) |
                    (features & FATTN_SINK ? FATTN_OUT_DSINK : 0);
    buf.q = q, buf.k = k, buf.v = v, buf.o = o, buf.lse = lse, buf.dout = dout, buf.dlse = dlse;
    buf.dq = dq, buf.dk = dk, buf.dv = dv, buf.dbias = dbias, buf.dsink = dsink;
    buf.bias = bias, buf.sink = sink, buf.alibi_slopes = slopes;
    buf.mask = mask, buf.block_mask = block_mask;
}

/* p in its normal form, or false with the reason printed. */
static bool normalise(fattn_problem *normal)
{
    strip_problem(&p);
    if (fattn_problem_normalise(&p, normal) == FATTN_OK &&
        fattn_buffers_normalise(normal, &buf, &buf) == FATTN_OK &&
        fattn_buffers_validate(normal, &buf) == FATTN_OK)
        return true;
    printf("# refused: %s\n", fattn_last_reason());
    return false;
}

static bool execute(void)
{
    fattn_problem normal;
    return normalise(&normal) && fattn_naive_execute(&normal, &buf) == FATTN_OK;
}

/* Executes p forward, then backward on the resulting o and lse. */
static bool execute_both(void)
{
    const fattn_problem backward = p;
    p.op = FATTN_FORWARD;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    p.features &= ~(FATTN_DLSE | FATTN_ACCUMULATE);
    const bool done = execute();
    p = backward;
    return done && execute();
}

static bool all_are(const double *array, int64_t from, int64_t to, double x)
{
    for (int64_t n = from; n < to; n++)
        if (!(array[n] == x)) return false;
    return true;
}

static bool all_near(const double *got, const double *want, int64_t count, double tolerance)
{
    for (int64_t n = 0; n < count; n++)
        if (!(fabs(got[n] - want[n]) <= tolerance)) return false;
    return true;
}

static bool near(double got, double want)
{
    return fabs(got - want) <= 1e-12 * fmax(1, fabs(want));
}

/* -------------------------------------------------------------------------------------------------
 * Number formats
 * ---------------------------------------------------------------------------------------------- */

/* Neighbouring numbers, their midpoint and its neighbours, for every finite pattern from 0 up. */
static bool rounds_to_nearest_even(fattn_dtype dtype, unsigned infinity)
{
    for (unsigned n = 0; n + 1 < infinity; n++) {
        const uint16_t bits[] = {(uint16_t)n, (uint16_t)(n + 1)};
        const double low = fattn_naive_load(bits, dtype, 0),
                     high = fattn_naive_load(bits, dtype, 1);
        const double middle = low + (high - low) / 2, even = n % 2 == 0 ? low : high;
        if (!(low < high)) return false;
        if (fattn_naive_round(low, dtype) != low || fattn_naive_round(-low, dtype) != -low)
            return false;
        if (fattn_naive_round(middle, dtype) != even) return false;
        if (fattn_naive_round(nextafter(middle, low), dtype) != low) return false;
        if (fattn_naive_round(-nextafter(middle, high), dtype) != -high) return false;
    }
    return true;
}

static bool overflows_at(fattn_dtype dtype, double largest, double limit)
{
    return fattn_naive_round(largest, dtype) == largest && fattn_naive_round(limit, dtype) == inf &&
           fattn_naive_round(nextafter(limit, 0), dtype) == largest &&
           fattn_naive_round(-limit, dtype) == -inf &&
           fattn_naive_round(1.1 * limit, dtype) == inf && fattn_naive_round(1e300, dtype) == inf &&
           fattn_naive_round(inf, dtype) == inf && isnan(fattn_naive_round((double)NAN, dtype)) &&
           signbit(fattn_naive_round(-0.0, dtype)) && fattn_naive_round(1e-300, dtype) == 0;
}

static void check_formats(void)
{
    const uint16_t f16[] = {0x3c00, 0x0001, 0x0400, 0x7bff, 0xc000, 0x3555};
    const double f16_values[] = {1, 0x1p-24, 0x1p-14, 65504, -2, 1365.0 / 4096};
    bool good = true;
    for (int n = 0; n < 6; n++) good = good && fattn_naive_load(f16, FATTN_F16, n) == f16_values[n];
    tap_check(good, "f16 is read by its definition");
    good = true;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const uint16_t half = (uint16_t)bits;
        const uint32_t whole = bits << 16;
        float x;
        memcpy(&x, &whole, sizeof(x));
        const double got = fattn_naive_load(&half, FATTN_BF16, 0);
        good = good && (isnan(x) ? isnan(got) : got == (double)x);
    }
    tap_check(good, "bf16 is the upper half of an f32");
    tap_check(rounds_to_nearest_even(FATTN_F16, 0x7c00), "f16 rounds to nearest even");
    tap_check(rounds_to_nearest_even(FATTN_BF16, 0x7f80), "bf16 rounds to nearest even");
    tap_check(overflows_at(FATTN_F16, 65504, 65520), "f16 overflows from 65520");
    tap_check(overflows_at(FATTN_BF16, 0x1.fep127, 0x1.ffp127), "bf16 overflows from 0x1.ffp127");
    tap_check(overflows_at(FATTN_F32, 0x1.fffffep127, 0x1.ffffffp127),
              "f32 overflows as IEEE says");
}

/* Outputs are rounded once, from double, whatever their type. */
static void check_output_rounding(void)
{
    static uint16_t halves[4][ROOM];
    const double factor = 1.0 / 3;
    begin(FATTN_FORWARD, 5, 7, 0);
    p.dtype = FATTN_F16;
    p.dim = 3, p.dim_v = 4;
    for (int n = 0; n < ROOM; n++) {
        halves[0][n] = fattn_f16_from_f64(q[n]);
        halves[1][n] = fattn_f16_from_f64(k[n]);
        halves[2][n] = fattn_f16_from_f64(v[n] * factor);
    }
    buf.q = halves[0], buf.k = halves[1], buf.v = halves[2], buf.o = halves[3];
    fattn_problem normal;
    fattn_naive r;
    bool good = execute() && normalise(&normal) && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        for (int n = 0; n < 5 * 4; n++) good = good && halves[3][n] == fattn_f16_from_f64(r.o[n]);
        for (int n = 0; n < 5; n++) good = good && ((float *)lse)[n] == (float)r.lse[n];
        fattn_naive_free(&r);
    }
    tap_check(good, "o in f16 and lse in f32 are the double results rounded once");
    p.dtype_o = FATTN_F32;
    buf.o = o;
    good = execute() && normalise(&normal) && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        for (int n = 0; n < 5 * 4; n++) good = good && ((float *)o)[n] == (float)r.o[n];
        fattn_naive_free(&r);
    }
    tap_check(good, "o may be f32 with f16 inputs");
}

/* -------------------------------------------------------------------------------------------------
 * Dropout
 * ---------------------------------------------------------------------------------------------- */

/* Known answers published with Random123 (kat_vectors, philox4x32 10). */
static void check_philox(void)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int n = 0; n < 3; n++) {
        uint32_t words[4];
        fattn_naive_philox(known[n].counter, known[n].key, words);
        tap_check(memcmp(words, known[n].words, sizeof(words)) == 0, "hazard_H6: Philox, vector %d",
                  n);
    }
    uint32_t key[2];
    fattn_naive_dropout_key(0, 0, key);
    tap_check(key[0] == 0x6627e8d5 && key[1] == 0xe169c58d, "the dropout key is words 0 and 1");
    fattn_naive_dropout_key(UINT64_C(0x85a308d3243f6a88), UINT64_C(0x0370734413198a2e), key);
    uint32_t words[4];
    fattn_naive_philox((const uint32_t[]){0x13198a2e, 0x03707344, 0, 0},
                       (const uint32_t[]){0x243f6a88, 0x85a308d3}, words);
    tap_check(key[0] == words[0] && key[1] == words[1], "seed is the key, offset the counter");
}

/* Eight pairs of a 16 x 16 block share a call: rows i, i + 8, columns j, j + 1, j + 8, j + 9. */
static void check_dropout_map(void)
{
    uint32_t key[2], words[4];
    fattn_naive_dropout_key(42, 3, key);
    /* Block (2, 5): rows 32.., columns 80..; i = 35, j = 84: row word 2 * 8 + 3, column word 5 * 4
     * + 2. */
    fattn_naive_philox((const uint32_t[]){19, 22, 6, 9}, key, words);
    static const struct {
        int64_t i, j;
        int word, shift;
    } pairs[] = {{35, 84, 0, 0}, {35, 85, 0, 16}, {35, 92, 1, 0}, {35, 93, 1, 16},
                 {43, 84, 2, 0}, {43, 85, 2, 16}, {43, 92, 3, 0}, {43, 93, 3, 16}};
    for (int n = 0; n < 8; n++) {
        const int64_t bits = words[pairs[n].word] >> pairs[n].shift & 0xffff;
        const double above = fattn_naive_dropout(key, bits + 1, 6, 9, pairs[n].i, pairs[n].j);
        const double below = fattn_naive_dropout(key, bits, 6, 9, pairs[n].i, pairs[n].j);
        tap_check(above == 0 && below == 65536.0 / (double)(65536 - bits),
                  "hazard_H6: dropout of pair (%lld, %lld) is the %s half of word %d",
                  (long long)pairs[n].i, (long long)pairs[n].j, pairs[n].shift ? "high" : "low",
                  pairs[n].word);
    }
    tap_check(fattn_naive_dropout_threshold(0) == 0 && fattn_naive_dropout_threshold(1) == 65536 &&
                  fattn_naive_dropout_threshold(1e-9) == 1 &&
                  fattn_naive_dropout_threshold(1 - 1e-9) == 65535 &&
                  fattn_naive_dropout_threshold(0.5) == 32768 &&
                  fattn_naive_dropout_threshold(1.5 / 65536) == 2,
              "the dropout threshold is rounded and clamped");
}

/* Recovers the multipliers Z of problem p from o (sq x sk): scores are 0, v is one-hot. */
static bool recover_z(double *z)
{
    const int64_t sk = p.seqlen_k;
    p.dim_v = sk;
    fill(q, 0);
    fill(v, 0);
    for (int64_t j = 0; j < sk; j++) v[j * sk + j] = 1;
    if (!execute()) return false;
    for (int64_t n = 0; n < p.seqlen_q * sk; n++) z[n] = o[n] * (double)sk;
    return true;
}

static void check_dropout(void)
{
    static double whole[ROOM], part[ROOM];
    uint32_t key[2];
    begin(FATTN_FORWARD, 40, 48, FATTN_DROPOUT);
    p.dropout_p = 0.25;
    p.batch_offset = 3, p.head_offset = 8;
    buf.seed = 99, buf.offset = 7;
    bool good = recover_z(whole);
    fattn_naive_dropout_key(99, 7, key);
    double kept = 0;
    for (int64_t i = 0; good && i < 40; i++)
        for (int64_t j = 0; j < 48; j++) {
            const double z = fattn_naive_dropout(key, 16384, 3, 8, i, j);
            good = good && near(whole[i * 48 + j], z);
            kept += z != 0;
        }
    tap_check(good, "o is dropped where the map says");
    tap_check(fabs(kept / (40 * 48) - 0.75) < 0.03, "a quarter is dropped: %.3f kept",
              kept / (40 * 48));

    begin(FATTN_FORWARD, 9, 11, FATTN_DROPOUT | FATTN_POSITIONS);
    p.dropout_p = 0.25;
    p.batch_offset = 3, p.head_offset = 8;
    const uint64_t seed = 99, offset = 7, next = 8;
    buf.seed_ptr = &seed, buf.offset_ptr = &offset;
    buf.q_offset = 13, buf.k_offset = 21;
    good = recover_z(part);
    for (int64_t n = 0; n < 9 * 11; n++)
        good = good && near(part[n], whole[(13 + n / 11) * 48 + 21 + n % 11]);
    tap_check(good, "hazard_H6: a shard drops what the whole drops; seed and offset by pointer");
    buf.offset_ptr = &next;
    static double other[ROOM];
    tap_check(recover_z(other) && memcmp(other, part, 9 * 11 * sizeof(double)) != 0,
              "hazard_H3: the next offset drops something else");

    begin(FATTN_FORWARD, 3, 4, FATTN_DROPOUT);
    p.dropout_p = 1;
    good = execute() && all_are(o, 0, 3, 0) && isfinite(lse[0]);
    tap_check(good, "p = 1 drops everything and leaves lse alone");
}

/* -------------------------------------------------------------------------------------------------
 * Which pairs are kept
 * ---------------------------------------------------------------------------------------------- */

/* The kept pairs of p as "110/111", one group per row. Scores are 0 and v is one-hot, so o shows
 * them. */
static const char *kept_pairs(void)
{
    static char text[ROOM];
    const int64_t sk = p.seqlen_k;
    char *end = text;
    p.dim_v = sk;
    fill(q, 0);
    fill(v, 0);
    for (int64_t j = 0; j < sk; j++) v[j * sk + j] = 1;
    if (!execute()) return "failed";
    for (int64_t i = 0; i < p.seqlen_q; i++) {
        int64_t count = 0;
        for (int64_t j = 0; j < sk; j++) count += o[i * sk + j] != 0;
        for (int64_t j = 0; j < sk; j++) {
            const double x = o[i * sk + j];
            *end++ = x == 0 ? '0' : near(x, 1 / (double)count) ? '1' : '?';
        }
        *end++ = '/';
        if (lse[i] != (count > 0 ? log((double)count) : -inf)) return "lse";
    }
    end[-1] = 0;
    return text;
}

static void check_anchor_tables(void)
{
    static const struct {
        fattn_anchor anchor;
        uint64_t features;
        int64_t sq, sk, left, right;
        const char *kept;
    } table[] = {
        {FATTN_BOTTOM_RIGHT, FATTN_CAUSAL, 3, 3, -1, -1, "100/110/111"},
        {FATTN_TOP_LEFT, FATTN_CAUSAL, 3, 3, -1, -1, "100/110/111"},
        {FATTN_BOTTOM_RIGHT, FATTN_CAUSAL, 2, 5, -1, -1, "11110/11111"},
        {FATTN_TOP_LEFT, FATTN_CAUSAL, 2, 5, -1, -1, "10000/11000"},
        {FATTN_BOTTOM_RIGHT, FATTN_CAUSAL, 5, 2, -1, -1, "00/00/00/10/11"},
        {FATTN_TOP_LEFT, FATTN_CAUSAL, 5, 2, -1, -1, "10/11/11/11/11"},
        {FATTN_BOTTOM_RIGHT, FATTN_CAUSAL, 1, 4, -1, -1, "1111"},
        {FATTN_TOP_LEFT, FATTN_CAUSAL, 1, 4, -1, -1, "1000"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 4, 4, 1, 0, "1000/1100/0110/0011"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 4, 4, 0, 0, "1000/0100/0010/0001"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 4, 4, 1, 2, "1110/1111/0111/0011"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 4, 4, 1, -1, "1111/1111/0111/0011"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 4, 4, -1, 1, "1100/1110/1111/1111"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 2, 5, 1, 1, "00111/00011"},
        {FATTN_TOP_LEFT, FATTN_WINDOW, 2, 5, 1, 1, "11000/11100"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW, 5, 2, 1, 0, "00/00/00/10/11"},
        {FATTN_TOP_LEFT, FATTN_WINDOW, 5, 2, 1, 0, "10/11/01/00/00"},
        {FATTN_BOTTOM_RIGHT, FATTN_WINDOW | FATTN_CAUSAL, 3, 3, 1, 5, "100/110/011"},
        {FATTN_BOTTOM_RIGHT, 0, 2, 3, -1, -1, "111/111"},
    };
    for (size_t n = 0; n < sizeof(table) / sizeof(table[0]); n++) {
        begin(FATTN_FORWARD, table[n].sq, table[n].sk, table[n].features);
        p.anchor = table[n].anchor;
        p.window_left = table[n].left, p.window_right = table[n].right;
        const char *const got = kept_pairs();
        tap_check(strcmp(got, table[n].kept) == 0, "hazard_L1: %s%s%s %lld x %lld keeps %s, got %s",
                  table[n].anchor == FATTN_TOP_LEFT ? "top-left" : "bottom-right",
                  table[n].features & FATTN_CAUSAL ? " causal" : "",
                  table[n].features & FATTN_WINDOW ? " window" : "", (long long)table[n].sq,
                  (long long)table[n].sk, table[n].kept, got);
    }
}

/* Every small window, computed as a range of columns per row instead of a condition on a
 * distance. */
static void check_windows(void)
{
    for (int anchor = FATTN_BOTTOM_RIGHT; anchor <= FATTN_TOP_LEFT; anchor++)
        for (int64_t sq = 1; sq <= 5; sq++)
            for (int64_t sk = 1; sk <= 5; sk++) {
                bool good = true;
                for (int64_t left = -1; left <= 6; left++)
                    for (int64_t right = -1; right <= 6; right++) {
                        char want[64], *end = want;
                        for (int64_t i = 0; i < sq; i++) {
                            const int64_t centre = anchor == FATTN_TOP_LEFT ? i : sk - (sq - i);
                            const int64_t first = left < 0 ? 0 : centre - left;
                            const int64_t last = right < 0 ? sk - 1 : centre + right;
                            for (int64_t j = 0; j < sk; j++)
                                *end++ = '0' + (first <= j && j <= last);
                            *end++ = '/';
                        }
                        end[-1] = 0;
                        begin(FATTN_FORWARD, sq, sk, FATTN_WINDOW);
                        p.anchor = (fattn_anchor)anchor;
                        p.window_left = left, p.window_right = right;
                        good = good && strcmp(kept_pairs(), want) == 0;
                    }
                tap_check(good, "hazard_L2: all windows, %s, %lld x %lld",
                          anchor == FATTN_TOP_LEFT ? "top-left" : "bottom-right", (long long)sq,
                          (long long)sk);
            }
}

/* Llama 4's chunked attention, drawn. */
static void check_chunks(void)
{
    begin(FATTN_FORWARD, 5, 5, FATTN_CHUNK);
    p.chunk = 2;
    tap_check(strcmp(kept_pairs(), "11000/11000/00110/00110/00001") == 0, "chunks of two keys");
    p.features |= FATTN_CAUSAL;
    tap_check(strcmp(kept_pairs(), "10000/11000/00100/00110/00001") == 0, "causal ones");
    p.chunk = 3, p.features = FATTN_CHUNK | FATTN_WINDOW, p.window_left = 1, p.window_right = 1;
    tap_check(strcmp(kept_pairs(), "11000/11100/01100/00011/00011") == 0, "beside a window");
    p.chunk = 9, p.features = FATTN_CHUNK;
    tap_check(strcmp(kept_pairs(), "11111/11111/11111/11111/11111") == 0, "one chunk of all keys");

    begin(FATTN_FORWARD, 2, 5, FATTN_CHUNK);
    p.chunk = 2;
    tap_check(strcmp(kept_pairs(), "00110/00001") == 0, "two new tokens see their own chunks");
    p.anchor = FATTN_TOP_LEFT;
    tap_check(strcmp(kept_pairs(), "11000/11000") == 0, "top-left, they are the first ones");
    begin(FATTN_FORWARD, 4, 2, FATTN_CHUNK);
    p.chunk = 2;
    tap_check(strcmp(kept_pairs(), "00/00/11/11") == 0, "queries before key 0 see nothing");

    begin(FATTN_FORWARD, 3, 4, FATTN_CHUNK | FATTN_POSITIONS);
    p.chunk = 3, p.anchor = FATTN_TOP_LEFT;
    buf.q_offset = 4, buf.k_offset = 1; /* keys 1 2 3 4, rows 4 5 6; 3 4 5 are one chunk */
    tap_check(strcmp(kept_pairs(), "0011/0011/0000") == 0, "a shard's chunks are the whole's");
    buf.q_offset = -2, buf.k_offset = -2;
    tap_check(strcmp(kept_pairs(), "1100/1100/0011") == 0, "also before position 0");
}

static void check_masks(void)
{
    begin(FATTN_FORWARD, 3, 4, FATTN_MASK);
    memcpy(mask, (const uint8_t[]){1, 0, 255, 0, 0, 0, 0, 0, 2, 1, 1, 0}, 12);
    p.mask_stride[2] = 4, p.mask_stride[3] = 1;
    tap_check(strcmp(kept_pairs(), "1010/0000/1110") == 0, "a mask keeps where it is not 0");
    p.mask_stride[2] = 0;
    tap_check(strcmp(kept_pairs(), "1010/1010/1010") == 0, "a mask of keys serves every query");
    p.mask_stride[2] = 4, p.mask_stride[3] = 0;
    tap_check(strcmp(kept_pairs(), "1111/0000/1111") == 0, "a mask of queries serves every key");

    begin(FATTN_FORWARD, 3, 5, FATTN_BLOCK_MASK | FATTN_CAUSAL);
    p.block_m = 2, p.block_n = 3;
    memcpy(block_mask, (const uint8_t[]){1, 0, 0, 9}, 4);
    p.block_mask_stride[2] = 2, p.block_mask_stride[3] = 1;
    tap_check(strcmp(kept_pairs(), "11100/11100/00011") == 0,
              "a block mask holds for local blocks");

    /* Keys 3.. of head 1 in entry 1 only: axes 0 and 1 of the mask. */
    begin(FATTN_FORWARD, 1, 4, FATTN_MASK);
    p.batch = 2, p.heads_q = 2;
    memset(mask, 0, 16);
    for (int n = 0; n < 4; n++) mask[n * 4 + n] = 1;
    p.mask_stride[0] = 8, p.mask_stride[1] = 4, p.mask_stride[3] = 1;
    p.heads_k = 1;
    for (int n = 0; n < ROOM; n++) v[n] = n;
    tap_check(execute() && o[0] == 0 && o[1] == 1 && o[2] == 6 && o[3] == 7,
              "masks have a batch and a head axis");
}

/* A shard of rows 2.. of 4 and keys 1.. of 6 keeps the same pairs as the whole. */
static void check_shards(void)
{
    for (int anchor = FATTN_BOTTOM_RIGHT; anchor <= FATTN_TOP_LEFT; anchor++) {
        begin(FATTN_FORWARD, 4, 6, FATTN_WINDOW);
        p.anchor = (fattn_anchor)anchor;
        p.window_left = 2, p.window_right = 0;
        char whole[64], want[64], *end = want;
        snprintf(whole, sizeof(whole), "%s", kept_pairs());
        for (int i = 2; i < 4; i++) {
            memcpy(end, whole + i * 7 + 1, 4);
            end[4] = '/';
            end += 5;
        }
        end[-1] = 0;
        begin(FATTN_FORWARD, 2, 4, FATTN_WINDOW | FATTN_POSITIONS);
        p.anchor = (fattn_anchor)anchor;
        p.window_left = 2, p.window_right = 0;
        buf.q_offset = 2, buf.k_offset = 1, buf.whole_q = 4, buf.whole_k = 6;
        tap_check(strcmp(kept_pairs(), want) == 0, "a shard keeps what the whole keeps, %s",
                  anchor == FATTN_TOP_LEFT ? "top-left" : "bottom-right");
        const int64_t two = 2, one = 1, four = 4, six = 6;
        buf.q_offsets = &two, buf.k_offsets = &one, buf.wholes_q = &four, buf.wholes_k = &six;
        buf.q_offset = buf.k_offset = 100, buf.whole_q = buf.whole_k = 50;
        tap_check(strcmp(kept_pairs(), want) == 0, "arrays of positions replace the scalars, %s",
                  anchor == FATTN_TOP_LEFT ? "top-left" : "bottom-right");
    }
}

/* -------------------------------------------------------------------------------------------------
 * The score, the softmax
 * ---------------------------------------------------------------------------------------------- */

/* With one pair and no sink, lse is the score. */
static void check_score(void)
{
    begin(FATTN_FORWARD, 1, 1, 0);
    p.dim = 4;
    const double dot = q[0] * k[0] + q[1] * k[1] + q[2] * k[2] + q[3] * k[3];
    tap_check(execute() && near(lse[0], dot / 2) && o[0] == v[0], "scale defaults to 1 / sqrt(D)");
    p.features = FATTN_SCALE;
    p.scale = -3;
    tap_check(execute() && near(lse[0], -3 * dot), "hazard_A15: a negative scale");
    p.scale = 0;
    tap_check(execute() && lse[0] == 0, "hazard_A15: scale 0");
    p.features = FATTN_SCALE | FATTN_SOFTCAP;
    p.scale = 100, p.softcap = 15;
    tap_check(execute() && near(lse[0], 15 * tanh(100 * dot / 15)),
              "hazard_A16: softcap of the score");
    p.features |= FATTN_BIAS | FATTN_ALIBI | FATTN_POSITIONS;
    buf.q_offset = 9, buf.k_offset = 2; /* i + off - j = 7 */
    bias[0] = 40;
    slopes[0] = 0.25;
    tap_check(execute() && near(lse[0], 15 * tanh(100 * dot / 15) + 40 - 0.25 * 7),
              "bias and ALiBi come after the softcap");
    p.features = FATTN_ALIBI | FATTN_SCALE;
    p.seqlen_k = 3, p.scale = 0;
    tap_check(execute() && near(lse[0], log(1 + exp(-0.25) + exp(-0.5))),
              "ALiBi counts from the last key");
    p.anchor = FATTN_TOP_LEFT;
    p.seqlen_q = 2;
    tap_check(execute() && near(lse[0], log(1 + exp(-0.25) + exp(-0.5))) &&
                  near(lse[1], log(1 + 2 * exp(-0.25))),
              "ALiBi counts from the first key, top-left, both ways");
    p.batch = 2, p.heads_q = 2, p.heads_k = 1, p.alibi_batch_stride = 2;
    p.seqlen_q = 1, p.seqlen_k = 2;
    for (int n = 0; n < 4; n++) slopes[n] = n;
    bool good = execute();
    for (int n = 0; n < 4; n++) good = good && near(lse[n], log(1 + exp(-n)));
    tap_check(good, "ALiBi slopes by batch entry and head");

    begin(FATTN_BACKWARD, 1, 2, FATTN_ALIBI | FATTN_BIAS | FATTN_ALIBI_BIAS | FATTN_SCALE);
    p.scale = 0, p.bias_stride[3] = p.dbias_stride[3] = 1;
    slopes[0] = 0.25, bias[0] = 8, bias[1] = -4;
    dout[0] = 1, v[0] = 3, v[1] = 1;
    good = execute_both();
    const double p0 = exp(2) / (exp(2) + exp(-1)), ds = p0 * (1 - p0) * (v[0] - v[1]);
    tap_check(good && near(lse[0], log(exp(2) + exp(-1))) && near(dbias[0], 0.25 * ds) &&
                  near(dbias[1], -0.25 * ds),
              "slopes multiply the bias, and its gradient");
}

/* The maximum is taken after scaling, so nothing overflows unnecessarily. */
static void check_softmax(void)
{
    static const double shifts[] = {-1e5, -2.45e5, -1e6, 1e5};
    static double want[ROOM];
    begin(FATTN_FORWARD, 3, 5, FATTN_BIAS);
    fill(bias, 0);
    bool good = execute();
    memcpy(want, o, sizeof(want));
    const double first = lse[0];
    for (int n = 0; n < 4; n++) {
        fill(bias, shifts[n]);
        good = good && execute() && all_near(o, want, 3, 1e-9) &&
               fabs(lse[0] - (first + shifts[n])) < 1e-9;
    }
    tap_check(good, "hazard_A4: a constant added to every score shifts lse alone");

    begin(FATTN_FORWARD, 2, 3, FATTN_BIAS);
    static const float lowest[] = {-3.40282347e38f, -3.40282347e38f, -3.40282347e38f};
    p.dtype = FATTN_F32;
    float rows[3][8] = {{1, 2}, {0}, {3, 6, 9}}, out[8], sums[8];
    buf.q = rows[0], buf.k = rows[1], buf.v = rows[2], buf.o = out, buf.lse = sums,
    buf.bias = lowest;
    p.bias_stride[3] = 1;
    tap_check(execute() && out[0] == 6 && sums[0] == -0x1p126f,
              "hazard_A14: a row of -FLT_MAX is a uniform row, clamped to -2^126");

    begin(FATTN_FORWARD, 1, 2, FATTN_SINK | FATTN_SCALE);
    p.scale = 0;
    sink[0] = log(2);
    v[0] = 8, v[1] = 4;
    tap_check(execute() && near(o[0], 3) && near(lse[0], log(4)),
              "a sink is a key whose value is 0");
    p.features |= FATTN_DROPOUT;
    p.dropout_p = 0.5;
    tap_check(execute() && near(lse[0], log(4)), "a sink is never dropped");
    p.features = FATTN_SINK | FATTN_SCALE;
    sink[0] = -inf;
    tap_check(execute() && near(o[0], 6) && near(lse[0], log(2)), "a sink of -inf is no sink");

    begin(FATTN_FORWARD, 1, 1, 0);
    p.heads_q = 6, p.heads_k = 3;
    good = execute();
    for (int h = 0; h < 6; h++) good = good && o[h] == v[h / 2] && near(lse[h], q[h] * k[h / 2]);
    tap_check(good, "hazard_D11: query head h reads kv head h / G");
}

static void check_not_finite(void)
{
    begin(FATTN_FORWARD, 3, 4, 0);
    q[1] = (double)NAN;
    tap_check(execute() && isfinite(o[0]) && isnan(o[1]) && isnan(lse[1]) && isfinite(o[2]),
              "hazard_A9: NaN in a row of q makes that row NaN");
    begin(FATTN_FORWARD, 3, 4, FATTN_CAUSAL | FATTN_SCALE);
    p.scale = 1;
    p.anchor = FATTN_TOP_LEFT;
    k[1] = (double)NAN;
    tap_check(execute() && isfinite(o[0]) && isfinite(lse[0]) && isnan(o[1]) && isnan(lse[2]),
              "hazard_A9: NaN in a key shows wherever the key is kept");
    k[1] = 0, v[1] = inf;
    tap_check(execute() && isfinite(o[0]) && o[1] == inf && isfinite(lse[1]),
              "infinity in v shows in o alone");
    v[1] = 0, k[1] = inf;
    q[1] = 1, q[2] = -1;
    tap_check(execute() && isnan(o[1]) && isnan(lse[1]) && isfinite(o[2]) && isfinite(lse[2]),
              "a score of +inf is NaN, a score of -inf is a key that is not there");
    begin(FATTN_FORWARD, 1, 3, FATTN_BIAS);
    p.bias_stride[3] = 1;
    fill(q, 0);
    bias[0] = -inf, bias[1] = 0, bias[2] = -inf;
    tap_check(execute() && o[0] == v[1] && lse[0] == 0, "hazard_A3: a bias of -inf removes a key");
    bias[1] = (double)NAN;
    tap_check(execute() && isnan(o[0]) && isnan(lse[0]), "hazard_A9: NaN beside -inf stays NaN");
}

/* -------------------------------------------------------------------------------------------------
 * Nothing to attend to
 * ---------------------------------------------------------------------------------------------- */

/* Row 1 of 3 x 4 attends to nothing; NaN in its dO and dLSE must not spread. */
static void check_empty_row(uint64_t features, const char *cause)
{
    begin(FATTN_BACKWARD, 3, 4, features | FATTN_DLSE | FATTN_SINK);
    p.mask_stride[2] = p.bias_stride[2] = p.dbias_stride[2] = p.block_mask_stride[2] = 4;
    p.mask_stride[3] = p.bias_stride[3] = p.dbias_stride[3] = p.block_mask_stride[3] = 1;
    memset(mask + 4, 0, 4);
    memset(block_mask + 4, 0, 4);
    if (features & FATTN_BIAS) bias[4] = bias[5] = bias[6] = bias[7] = -inf;
    sink[0] = -inf;
    dout[1] = dlse[1] = (double)NAN;
    bool good = execute_both() && o[1] == 0 && lse[1] == -inf && dq[1] == 0;
    for (int n = 0; n < 4; n++)
        good = good && isfinite(dk[n]) && isfinite(dv[n]) && fabs(dk[n]) > 0 && fabs(dv[n]) > 0;
    good = good && isfinite(dq[0]) && isfinite(dq[2]) && dsink[0] == 0;
    if (features & FATTN_BIAS) good = good && all_are(dbias, 4, 8, 0) && fabs(dbias[0]) > 0;
    tap_check(good, "hazard_A1: a row emptied by %s is 0, and out of every gradient", cause);
}

static void check_empty_rows(void)
{
    check_empty_row(FATTN_MASK, "a mask");
    check_empty_row(FATTN_BLOCK_MASK, "a block mask");
    check_empty_row(FATTN_BIAS, "a bias of -inf");
    check_empty_row(FATTN_MASK | FATTN_BIAS, "a mask and a bias");

    begin(FATTN_BACKWARD, 4, 2, FATTN_CAUSAL | FATTN_DLSE);
    dout[0] = dlse[1] = (double)NAN;
    tap_check(execute_both() && all_are(o, 0, 2, 0) && all_are(lse, 0, 2, -inf) &&
                  all_are(dq, 0, 2, 0) && isfinite(dk[0]) && isfinite(dv[0]),
              "hazard_A1: causal rows above the keys are empty");

    begin(FATTN_BACKWARD, 2, 3, FATTN_MASK | FATTN_SINK | FATTN_DLSE);
    p.mask_stride[2] = 3, p.mask_stride[3] = 1;
    memset(mask, 0, 3);
    sink[0] = 0.75;
    dlse[1] = 0, dout[1] = 0;
    tap_check(execute_both() && o[0] == 0 && lse[0] == 0.75 && dq[0] == 0 &&
                  near(dsink[0], dlse[0]),
              "a row with nothing but a sink has o = 0, lse = sink, and dLSE goes to the sink");
}

static void check_empty_problems(void)
{
    begin(FATTN_BACKWARD, 3, 0, 0);
    tap_check(execute_both() && all_are(o, 0, 3, 0) && all_are(lse, 0, 3, -inf) &&
                  all_are(dq, 0, 3, 0) && dk[0] == untouched && o[3] == untouched,
              "hazard_E3: Sk = 0 gives o = 0, lse = -inf, dq = 0");
    begin(FATTN_BACKWARD, 3, 0, FATTN_SINK | FATTN_DLSE);
    tap_check(execute_both() && all_are(o, 0, 3, 0) && all_are(lse, 0, 3, sink[0]) &&
                  near(dsink[0], dlse[0] + dlse[1] + dlse[2]),
              "Sk = 0 with a sink gives lse = sink");
    begin(FATTN_BACKWARD, 0, 4, FATTN_BIAS | FATTN_SINK);
    p.dbias_stride[3] = 1;
    tap_check(execute_both() && all_are(dk, 0, 4, 0) && all_are(dv, 0, 4, 0) &&
                  all_are(dbias, 0, 4, 0) && dsink[0] == 0 && dk[4] == untouched,
              "hazard_E3: Sq = 0 gives dk = dv = 0, dsink = 0 and a dbias of 0");
    begin(FATTN_BACKWARD, 3, 4, FATTN_BIAS | FATTN_SINK);
    p.batch = 0, p.heads_q = 2;
    p.dbias_stride[1] = 4, p.dbias_stride[3] = 1;
    tap_check(execute_both() && all_are(dbias, 0, 8, 0) && all_are(dsink, 0, 2, 0) &&
                  o[0] == untouched && dq[0] == untouched && dbias[8] == untouched,
              "hazard_E3: B = 0 gives dsink = 0 and a broadcast dbias of 0");
    begin(FATTN_BACKWARD, 3, 4, 0);
    p.heads_q = 0, p.heads_k = 2;
    tap_check(execute_both() && all_are(dk, 0, 8, 0) && all_are(dv, 0, 8, 0) && dq[0] == untouched,
              "hazard_E3: no query heads give dk = dv = 0");
}

/* -------------------------------------------------------------------------------------------------
 * Lengths and places
 * ---------------------------------------------------------------------------------------------- */

/* Packed sequences, including empty ones, give the same results as alone. */
static void check_packed(void)
{
    static const int32_t cu_q[] = {0, 0, 3, 3, 8}, cu_k[] = {2, 5, 9, 11, 11};
    static double packed_o[ROOM], packed_lse[ROOM], packed_dk[ROOM];
    begin(FATTN_BACKWARD, 5, 4, FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_CAUSAL);
    p.batch = 4, p.heads_q = 2, p.heads_k = 1;
    p.total_q = 10, p.total_k = 12;
    buf.cu_seqlens_q = cu_q, buf.cu_seqlens_k = cu_k;
    bool good = execute_both() && all_are(o, 16, 20, untouched) && all_are(lse, 8, 10, untouched) &&
                all_are(lse, 18, 20, untouched) && all_are(dq, 16, 20, untouched) &&
                all_are(dk, 0, 2, untouched) && dk[11] == untouched && all_are(dk, 2, 5, 0);
    tap_check(good, "hazard_E2: rows of no sequence are untouched, keys without queries get 0");
    tap_check(good && all_are(o, 6, 16, 0) && all_are(lse, 13, 18, -inf),
              "hazard_E1: rows of a sequence without keys are 0");
    memcpy(packed_o, o, sizeof(o));
    memcpy(packed_lse, lse, sizeof(lse));
    memcpy(packed_dk, dk, sizeof(dk));
    begin(FATTN_BACKWARD, 3, 4, FATTN_CAUSAL);
    p.heads_q = 2, p.heads_k = 1;
    buf.k = k + 5, buf.v = v + 5;
    good = execute_both() && memcmp(o, packed_o, 6 * sizeof(double)) == 0 &&
           memcmp(lse, packed_lse, 3 * sizeof(double)) == 0 &&
           memcmp(lse + 3, packed_lse + 10, 3 * sizeof(double)) == 0 &&
           memcmp(dk, packed_dk + 5, 4 * sizeof(double)) == 0;
    tap_check(good, "a packed sequence is what it is alone; lse is (Hq, total_q)");
}

/* Keys before the first one are masked and their memory is not read: NaN there does not spread, and
 * distances, biases and dropout stay as they are. */
static void check_left_padding(void)
{
    enum { SQ = 4, SK = 7 };
    static const int32_t starts[] = {3, 7, 0};
    static double masked[5][ROOM];
    double *const results[] = {o, lse, dq, dk, dv};
    bool good = true;
    for (int padded = 0; padded < 2; padded++) {
        begin(FATTN_BACKWARD, SQ, SK,
              (padded ? FATTN_SEQSTART_K : FATTN_MASK) | FATTN_CAUSAL | FATTN_BIAS | FATTN_ALIBI |
                  FATTN_DROPOUT);
        p.batch = 3;
        p.dropout_p = 0.25;
        p.bias_stride[2] = SK, p.bias_stride[3] = 1;
        p.dbias_stride[2] = SK, p.dbias_stride[3] = 1;
        p.mask_stride[0] = SK, p.mask_stride[3] = 1;
        buf.seqstart_k = padded ? starts : NULL;
        for (int b = 0; b < 3; b++)
            for (int j = 0; j < starts[b]; j++) {
                mask[b * SK + j] = 0;
                k[b * SK + j] = padded ? NAN : 0, v[b * SK + j] = padded ? INFINITY : 0;
            }
        good = execute_both() && good;
        for (int n = 0; n < 5 && !padded; n++) memcpy(masked[n], results[n], sizeof masked[n]);
    }
    for (int n = 0; n < 5; n++) good = good && memcmp(masked[n], results[n], sizeof masked[n]) == 0;
    tap_check(good && all_are(dk, 0, 3, 0) && all_are(dv, SK, 2 * SK, 0) && dk[3] != 0 &&
                  all_are(lse, SQ, 2 * SQ, -inf),
              "keys before seqstart_k are hidden, and their memory is not read");
    static const int32_t table[] = {-9, 1};
    begin(FATTN_FORWARD, 2, 4, FATTN_SEQSTART_K | FATTN_PAGED);
    p.page_size = 2, p.num_pages = 2, p.max_pages = 2;
    const int32_t two = 2;
    buf.block_table = table, buf.seqstart_k = &two;
    tap_check(execute() && lse[0] > -inf, "a page before seqstart_k has no entry in the table");
}

/* A window that keeps the first tokens of a sequence, as README.md has it: results over disjoint
 * keys, of which the second keeps the diagonal of the whole sequence. */
static void check_first_tokens(int64_t sq)
{
    enum { SK = 9, FIRST = 2, LEFT = 3 };
    static double want[ROOM], window_o[ROOM], window_lse[ROOM];
    const int32_t first = FIRST;
    bool good = true;
    begin(FATTN_FORWARD, sq, SK, FATTN_MASK);
    p.mask_stride[2] = SK, p.mask_stride[3] = 1;
    for (int64_t i = 0; i < sq; i++)
        for (int64_t j = 0, at = i + SK - sq; j < SK; j++)
            mask[i * SK + j] = j <= at && (j < FIRST || at - j <= LEFT);
    good = execute() && good;
    memcpy(want, o, sizeof o);

    begin(FATTN_FORWARD, sq, SK, FATTN_CAUSAL | FATTN_WINDOW | FATTN_SEQSTART_K);
    p.window_left = LEFT;
    buf.seqstart_k = &first;
    good = execute() && good;
    memcpy(window_o, o, sizeof o);
    memcpy(window_lse, lse, sizeof lse);

    begin(FATTN_FORWARD, sq, SK, FATTN_CAUSAL | FATTN_POSITIONS | FATTN_SEQUSED_K);
    buf.whole_k = SK;
    buf.seqused_k = &first;
    good = execute() && good;
    for (int64_t i = 0; i < sq; i++) {
        const double weight = exp(window_lse[i]), other = exp(lse[i]);
        good = good && near((weight * window_o[i] + other * o[i]) / (weight + other), want[i]);
    }
    tap_check(good, "%d rows: a window and the first tokens, merged", (int)sq);
}

/* Poison past seqused does not spread; dk and dv there are 0, or unchanged when accumulating. */
static void check_seqused(void)
{
    static const int32_t used_q[] = {2}, used_k[] = {3};
    static double want[3][ROOM];
    begin(FATTN_BACKWARD, 2, 3, FATTN_CAUSAL | FATTN_DLSE);
    bool good = execute_both();
    memcpy(want[0], o, sizeof(o));
    memcpy(want[1], dk, sizeof(dk));
    memcpy(want[2], dq, sizeof(dq));
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        begin(FATTN_BACKWARD, 4, 5, FATTN_CAUSAL | FATTN_DLSE | FATTN_SEQUSED_Q | FATTN_SEQUSED_K);
        if (accumulate) p.features |= FATTN_ACCUMULATE;
        buf.seqused_q = used_q, buf.seqused_k = used_k;
        for (int n = 2; n < 4; n++) q[n] = dout[n] = dlse[n] = (double)NAN;
        for (int n = 3; n < 5; n++) k[n] = v[n] = n == 3 ? (double)NAN : inf;
        if (accumulate) dk[3] = -0.0;
        const double past = accumulate ? untouched : 0, before = accumulate ? untouched : 0;
        good = good && execute_both() && memcmp(o, want[0], 2 * sizeof(double)) == 0;
        for (int n = 0; n < 3; n++) good = good && near(dk[n], before + want[1][n]);
        for (int n = 0; n < 2; n++) good = good && near(dq[n], before + want[2][n]);
        good = good && (accumulate ? signbit(dk[3]) && dk[3] == 0 : dk[3] == 0) && dk[4] == past &&
               all_are(dv, 3, 5, past) && dk[5] == untouched && all_are(o, 2, 4, untouched) &&
               all_are(lse, 2, 4, untouched) && all_are(dq, 2, 4, untouched);
        tap_check(good, "hazard_A10: past seqused nothing is read, dk and dv are %s",
                  accumulate ? "left, the rest added" : "0");
    }
}

static void check_accumulate(void)
{
    static double first[5][ROOM];
    double *const outputs[] = {dq, dk, dv, dbias, dsink};
    const uint64_t features = FATTN_BIAS | FATTN_SINK;
    begin(FATTN_BACKWARD, 2, 3, features);
    p.dbias_stride[3] = 1; /* reduced over batch, heads and queries */
    bool good = execute_both();
    for (int n = 0; n < 5; n++) memcpy(first[n], outputs[n], sizeof(dq));
    p.features = features | FATTN_ACCUMULATE;
    good = good && execute();
    for (int n = 0; n < 5; n++)
        for (int c = 0; c < 3; c++)
            good = good && (first[n][c] == untouched ? outputs[n][c] == untouched
                                                     : near(outputs[n][c], 2 * first[n][c]));
    tap_check(good, "accumulate adds to every gradient");
    begin(FATTN_FORWARD, 2, 3, 0);
    p.outputs = FATTN_OUT_O;
    tap_check(execute() && o[0] != untouched && lse[0] == untouched, "lse is written when wanted");
    begin(FATTN_BACKWARD, 2, 3, features);
    p.outputs = FATTN_OUT_DV;
    tap_check(execute_both() && dv[0] != untouched && dq[0] == untouched && dk[0] == untouched &&
                  dbias[0] == untouched && dsink[0] == untouched,
              "hazard_F11: only the gradients that are wanted are written");
}

/* Keys in shuffled pages; unused table entries point outside of memory. */
static void check_pages(int64_t page_size)
{
    enum { SK = 7, PAGES = 16 };
    static double pages_k[ROOM], pages_v[ROOM], want[ROOM];
    const int32_t used[] = {SK, 4};
    int32_t table[2][PAGES + 1];
    begin(FATTN_FORWARD, 3, SK, FATTN_CAUSAL | FATTN_SEQUSED_K);
    p.batch = 2, p.heads_q = 2, p.heads_k = 2, p.dim_v = 2;
    buf.seqused_k = used;
    bool good = execute();
    memcpy(want, o, sizeof(o));

    fill(o, untouched);
    fill(pages_k, (double)NAN);
    fill(pages_v, (double)NAN);
    for (int b = 0; b < 2; b++)
        for (int n = 0; n <= PAGES; n++) table[b][n] = INT32_MIN;
    for (int64_t b = 0; b < 2; b++)
        for (int64_t j = 0; j < used[b]; j++) {
            const int64_t page = (5 * (j / page_size) + 3 + 2 * b) % PAGES;
            const int64_t slot = page * page_size + j % page_size; /* (page, slot, head, channel) */
            table[b][j / page_size] = (int32_t)page;
            for (int64_t h = 0; h < 2; h++) {
                pages_k[slot * 2 + h] = k[(b * SK + j) * 2 + h];
                for (int64_t c = 0; c < 2; c++)
                    pages_v[(slot * 2 + h) * 2 + c] = v[((b * SK + j) * 2 + h) * 2 + c];
            }
        }
    p.features |= FATTN_PAGED;
    p.page_size = page_size;
    p.num_pages = PAGES;
    p.max_pages = PAGES, p.block_table_stride = PAGES + 1;
    buf.k = pages_k, buf.v = pages_v, buf.block_table = table[0];
    good = good && execute() && memcmp(o, want, sizeof(o)) == 0;
    tap_check(good, "hazard_E9: pages of %lld keys are the contiguous keys", (long long)page_size);
}

/* All orders of the axes, with gaps; then broadcast inputs. */
static void check_strides(void)
{
    static double want[ROOM], from[3][ROOM];
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    begin(FATTN_FORWARD, 3, 4, 0);
    p.batch = 2, p.heads_q = p.heads_k = 2, p.dim = p.dim_v = 3;
    bool good = execute();
    memcpy(want, o, sizeof(o));
    for (int n = 0; n < 3; n++) memcpy(from[n], n == 0 ? q : n == 1 ? k : v, sizeof(q));
    for (int order = 0; order < 6; order++) {
        double *const to[] = {q, k, v};
        fattn_strides *const strides[] = {&p.q, &p.k, &p.v, &p.o};
        p.layout = FATTN_STRIDED;
        for (int n = 0; n < 4; n++) { /* o uses the order after that of the inputs */
            const int64_t extent[3] = {2, n == 0 || n == 3 ? 3 : 4, 2};
            int64_t stride[3], room = 4; /* a gap after the channels */
            for (int axis = 2; axis >= 0; axis--) {
                const int which = orders[n == 3 ? (order + 1) % 6 : order][axis];
                stride[which] = room;
                room = room * extent[which] + axis;
            }
            *strides[n] = (fattn_strides){stride[0], stride[1], stride[2]};
        }
        for (int n = 0; n < 3; n++) {
            fill(to[n], (double)NAN);
            for (int64_t b = 0; b < 2; b++)
                for (int64_t s = 0; s < (n == 0 ? 3 : 4); s++)
                    for (int64_t h = 0; h < 2; h++)
                        memcpy(to[n] + b * strides[n]->batch + s * strides[n]->seq +
                                   h * strides[n]->head,
                               from[n] + ((b * (n == 0 ? 3 : 4) + s) * 2 + h) * 3,
                               3 * sizeof(double));
        }
        fill(o, untouched);
        good = good && execute();
        int64_t written = 0;
        for (int n = 0; n < ROOM; n++) written += o[n] != untouched;
        for (int64_t n = 0; n < 2 * 3 * 2 * 3; n++) {
            const int64_t b = n / 18, s = n / 6 % 3, h = n / 3 % 2;
            good = good && o[b * p.o.batch + s * p.o.seq + h * p.o.head + n % 3] == want[n];
        }
        tap_check(good && written == 36, "hazard_C4: axes in order %d, with gaps", order);
    }
    begin(FATTN_FORWARD, 2, 3, 0);
    p.batch = 2, p.heads_q = p.heads_k = 2;
    p.layout = FATTN_STRIDED;
    p.k.seq = p.v.seq = 1; /* one k and v for all entries and heads */
    p.q.batch = 4, p.q.seq = 2, p.q.head = 1;
    p.o = p.q;
    good = execute();
    const double o_first = o[3], q_last = q[3];
    begin(FATTN_FORWARD, 1, 3, 0);
    q[0] = q_last;
    tap_check(good && execute() && o[0] == o_first, "hazard_C3: k and v with stride 0");
}

/* -------------------------------------------------------------------------------------------------
 * What the accuracy bound is made of
 * ---------------------------------------------------------------------------------------------- */

/* q = 2, k = (1, 1), v = (3, -1), scale -1: x = -2 twice, p = (1/2, 1/2), and the rest on paper. */
static void check_absolute_sums(void)
{
    fattn_problem normal;
    fattn_naive r;
    begin(FATTN_FORWARD, 1, 2, FATTN_SCALE);
    p.scale = -1;
    q[0] = 2, k[0] = k[1] = 1, v[0] = 3, v[1] = -1;
    bool good = normalise(&normal) && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.o[0], 1) && near(r.a_o[0], 2) && near(r.lse[0], log(2) - 2) &&
               near(r.lse_scale[0], 2) && near(r.x_max[0], 2) && r.dq == NULL && r.a_dq == NULL;
        fattn_naive_free(&r);
    }
    tap_check(good, "forward: sums of absolute values by hand");

    /* |scale| sum |q k| + |bias| + |ALiBi| = 2 + 1.5 + 0.5 * 1 at key 0, the farther one */
    begin(FATTN_FORWARD, 1, 2, FATTN_SCALE | FATTN_BIAS | FATTN_ALIBI | FATTN_SINK);
    p.scale = -1;
    q[0] = 2, k[0] = k[1] = 1, bias[0] = 1.5, slopes[0] = -0.5, sink[0] = -3;
    good = normalise(&normal) && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.lse_scale[0], 4) && near(r.x_max[0], 4);
        fattn_naive_free(&r);
    }
    sink[0] = -5;
    good = good && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.lse_scale[0], 5);
        fattn_naive_free(&r);
    }
    tap_check(good, "the scale of lse by hand: every summand, and the sink");

    begin(FATTN_FORWARD, 1, 1, FATTN_SINK | FATTN_MASK);
    sink[0] = 9;
    mask[0] = 0;
    good = normalise(&normal) && fattn_naive_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.x_max[0], 9);
        fattn_naive_free(&r);
    }
    tap_check(good, "x_max takes lse in");

    begin(FATTN_BACKWARD, 1, 2, FATTN_SCALE | FATTN_BIAS | FATTN_DLSE | FATTN_SINK);
    p.scale = -1;
    q[0] = 2, k[0] = k[1] = 1, v[0] = 3, v[1] = -1, dout[0] = 1, dlse[0] = 0.5;
    fill(bias, 0);
    p.dbias_stride[3] = 1;
    sink[0] = -inf;
    good = normalise(&normal) && fattn_naive_run_pure(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        /* delta = 1 - 0.5, absolute 1 + 0.5; dS = p (3 - 0.5, -1 - 0.5), absolute p (3 + 1.5, 1
         * + 1.5) */
        good = near(r.dbias[0], 1.25) && near(r.dbias[1], -0.75) && near(r.a_dbias[0], 2.25);
        good = good && near(r.dq[0], -0.5) && near(r.a_dq[0], 3.5);
        good = good && near(r.dk[0], -2.5) && near(r.dk[1], 1.5) && near(r.a_dk[0], 4.5);
        good = good && near(r.dv[0], 0.5) && near(r.a_dv[0], 0.5) && r.dsink[0] == 0;
        fattn_naive_free(&r);
    }
    tap_check(good, "backward: sums of absolute values by hand");

    sink[0] = -2; /* as heavy as either key: p = 1/3 each, o = 2/3, delta = 1/6, absolute 7/6 */
    good = normalise(&normal) && fattn_naive_run_pure(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.dsink[0], -1.0 / 18) && near(r.a_dsink[0], 7.0 / 18);
        fattn_naive_free(&r);
    }
    tap_check(good, "dsink and its sum of absolute values by hand");

    p.features = FATTN_SCALE | FATTN_SOFTCAP;
    p.outputs = FATTN_OUT_DQ;
    p.softcap = 2; /* x = -2 capped: t = tanh(-1); dS = p (2, -2), absolute p (4, 2) */
    const double t = tanh(1);
    good = normalise(&normal) && fattn_naive_run_pure(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = near(r.dk[0], -2 * (1 - t * t)) && near(r.a_dk[0], 4 * (1 + t * t)) &&
               near(r.x_max[0], 2);
        fattn_naive_free(&r);
    }
    tap_check(good, "the softcap's derivative and its absolute value by hand");
}

/* Given o and lse are used as they are; the pure run does not read them. */
static void check_given_state(void)
{
    fattn_problem normal;
    fattn_naive given, pure;
    begin(FATTN_BACKWARD, 2, 3, 0);
    bool good = normalise(&normal) && fattn_naive_run_pure(&normal, &buf, &pure) == FATTN_OK;
    for (int n = 0; n < 2; n++) o[n] = pure.o[n], lse[n] = pure.lse[n] + log(2);
    good = good && fattn_naive_run(&normal, &buf, &given) == FATTN_OK;
    good = good && all_near(given.o, o, 2, 0) && all_near(given.lse, lse, 2, 0);
    for (int n = 0; n < 2; n++) good = good && near(given.dq[n], pure.dq[n] / 2);
    for (int n = 0; n < 3; n++) good = good && near(given.dv[n], pure.dv[n] / 2);
    tap_check(good, "backward takes lse as it is given");
    fattn_naive_free(&given);
    o[0] += 1;
    good = good && fattn_naive_run(&normal, &buf, &given) == FATTN_OK;
    double shift = 0; /* dq_0 moves by -scale * dO * sum_j P_j k_j */
    for (int n = 0; n < 3; n++) shift -= dout[0] * exp(q[0] * k[n] - lse[0]) * k[n];
    tap_check(good && near(given.dq[0], pure.dq[0] / 2 + shift), "backward takes o as it is given");
    fattn_naive_free(&given);
    fattn_naive_free(&pure);
}

/* Every allocation may fail, without a leak or output; the call succeeds once none fails. */
static void check_memory(void)
{
    const int64_t alive = fattn_memory_alive();
    fattn_problem normal;
    fattn_naive r;
    begin(FATTN_BACKWARD, 3, 4, FATTN_BIAS | FATTN_SINK);
    bool good = normalise(&normal);
    int64_t failures = 0;
    for (int which = 0; which < 3; which++) {
        fattn_status status = FATTN_OUT_OF_MEMORY;
        for (int64_t n = 1; good && status != FATTN_OK && n < 100; n++) {
            memset(&r, 0, sizeof(r));
            fattn_memory_fail_at(n);
            status = which == 0   ? fattn_naive_run(&normal, &buf, &r)
                     : which == 1 ? fattn_comparator_run(&normal, &buf, &r)
                                  : fattn_naive_execute(&normal, &buf);
            fattn_memory_fail_at(0);
            if (status == FATTN_OK) {
                fattn_naive_free(&r);
            } else {
                failures++;
                good = status == FATTN_OUT_OF_MEMORY && r.o == NULL && r.memory == NULL &&
                       dq[0] == untouched;
            }
            good = good && fattn_memory_alive() == alive;
        }
        good = good && status == FATTN_OK;
    }
    tap_check(good && failures == 9, "%lld failing allocations, each an error and nothing else",
              (long long)failures);
    normal.seqlen_q = normal.seqlen_k = normal.heads_q = INT64_C(1) << 40;
    tap_check(fattn_naive_run(&normal, &buf, &r) == FATTN_OUT_OF_MEMORY && r.memory == NULL,
              "hazard_B10: sizes that overflow are out of memory");
}

/* -------------------------------------------------------------------------------------------------
 * Mixed types
 * ---------------------------------------------------------------------------------------------- */

enum { MIXED_ROWS = 3, MIXED_KEYS = 5, MIXED_DIM = 4 };

/* q and o in f32, k in f16, v in bf16 give what the same numbers in f32 give; the gradients of k
 * and v are rounded to their types. */
static void check_mixed(const char *backend, fattn_op op)
{
    static const fattn_dtype types[2][2] = {{FATTN_F32, FATTN_F32}, {FATTN_F16, FATTN_BF16}};
    _Alignas(16) static float wide_k[MIXED_KEYS * MIXED_DIM], wide_v[MIXED_KEYS * MIXED_DIM];
    _Alignas(16) static float queries[MIXED_ROWS * MIXED_DIM], weights[MIXED_ROWS * MIXED_DIM];
    _Alignas(16) static uint16_t half_k[MIXED_KEYS * MIXED_DIM], half_v[MIXED_KEYS * MIXED_DIM];
    _Alignas(16) static float out[MIXED_ROWS * MIXED_DIM], sums[MIXED_ROWS + 1];
    _Alignas(16) static float grad_q[2][MIXED_ROWS * MIXED_DIM];
    _Alignas(16) static float grads[2][2][MIXED_KEYS * MIXED_DIM]; /* of k and v, by problem */
    float results[2][MIXED_ROWS * MIXED_DIM];
    bool good = true;
    for (int n = 0; n < MIXED_KEYS * MIXED_DIM; n++) {
        wide_k[n] = (float)(n % 7 - 3) / 8, wide_v[n] = (float)(n % 11 - 5) / 16;
        half_k[n] = fattn_f16_from_f64((double)wide_k[n]);
        half_v[n] = fattn_bf16_from_f64((double)wide_v[n]);
    }
    for (int n = 0; n < MIXED_ROWS * MIXED_DIM; n++) {
        queries[n] = (float)(n % 5) / 3, weights[n] = (float)(n % 3) - 0.75F;
    }
    fattn_device *device = NULL;
    good = fattn_device_open(backend, &device) == FATTN_OK;
    for (int mixed = 0; good && mixed < 2; mixed++) {
        fattn_problem t;
        fattn_buffers b;
        fattn_problem_init(&t);
        fattn_buffers_init(&b);
        t.seqlen_q = MIXED_ROWS, t.seqlen_k = MIXED_KEYS, t.dim = t.dim_v = MIXED_DIM;
        t.dtype_kv = types[mixed][0], t.dtype_v = types[mixed][1];
        t.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
        b.q = queries, b.o = out, b.lse = sums, b.dout = weights;
        b.k = mixed ? (const void *)half_k : wide_k, b.v = mixed ? (const void *)half_v : wide_v;
        b.dq = grad_q[mixed], b.dk = grads[mixed][0], b.dv = grads[mixed][1];
        good = fattn_attention(device, &t, &b, NULL) == FATTN_OK;
        t.op = FATTN_BACKWARD, t.outputs = 0;
        if (good && op == FATTN_BACKWARD) {
            good = fattn_attention(device, &t, &b, NULL) == FATTN_OK;
        }
        memcpy(results[mixed], out, sizeof out);
    }
    double worst = 0;
    for (int n = 0; n < MIXED_ROWS * MIXED_DIM; n++) {
        worst = worst_of(worst, fabs((double)(results[0][n] - results[1][n])));
        worst = worst_of(worst, fabs((double)(grad_q[0][n] - grad_q[1][n])));
    }
    for (int n = 0; op == FATTN_BACKWARD && n < MIXED_KEYS * MIXED_DIM; n++) {
        for (int input = 0; input < 2; input++) {
            const fattn_dtype dtype = types[1][input];
            const double rounded = fattn_naive_round((double)grads[0][input][n], dtype);
            const double given = fattn_naive_load(grads[1][input], dtype, n);
            worst = worst_of(worst, fabs(rounded - given));
        }
    }
    fattn_device_close(device);
    tap_check(good && worst <= 0x1p-22,
              "%s: %s of mixed types is that of the same numbers, to %g%s%s", backend,
              op == FATTN_FORWARD ? "forward" : "backward", worst, good ? "" : ": ",
              good ? "" : fattn_last_reason());
}

/* k and v in e4m3, divided by factors of their sequence and head, give what the numbers themselves
 * give in f32. All codes of e4m3 but NaN are there. */
static void check_descaled(const char *backend)
{
    enum { BATCH = 2, HEADS = 2, KEYS = 16, DIM = 8, NUMBERS = BATCH * KEYS * HEADS * DIM };
    static float wide[2][NUMBERS], queries[BATCH * HEADS * DIM];
    static uint8_t codes[2][NUMBERS];
    static const float factors[2][BATCH * HEADS] = {{0.125F, 3, 0.75F, 1}, {2, 0.3F, 1, -5}};
    float results[2][BATCH * HEADS * DIM], sums[2][BATCH * HEADS];
    for (int n = 0; n < NUMBERS; n++) {
        const int head = n / (KEYS * HEADS * DIM) * HEADS + n / DIM % HEADS;
        for (int input = 0; input < 2; input++) {
            const int code = (n * (2 * input + 1) + n / 256) % 256;
            codes[input][n] = (uint8_t)(code % 128 == 127 ? 0 : code);
            wide[input][n] =
                factors[input][head] * (float)fattn_naive_load(codes[input], FATTN_E4M3, n);
        }
    }
    for (int n = 0; n < BATCH * HEADS * DIM; n++) {
        queries[n] = (float)(n % 5 - 2) / 256;
    }
    fattn_device *device = NULL;
    bool good = fattn_device_open(backend, &device) == FATTN_OK;
    for (int stored = 0; good && stored < 2; stored++) {
        fattn_problem t;
        fattn_buffers b;
        fattn_problem_init(&t);
        fattn_buffers_init(&b);
        t.batch = BATCH, t.heads_q = t.heads_k = HEADS;
        t.seqlen_q = 1, t.seqlen_k = KEYS, t.dim = t.dim_v = DIM;
        t.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
        t.pointer_alignment = 1;
        b.q = queries, b.o = results[stored], b.lse = sums[stored];
        b.k = wide[0], b.v = wide[1];
        if (stored) {
            t.features = FATTN_DESCALE;
            t.dtype_kv = FATTN_E4M3;
            t.descale_stride[0] = HEADS, t.descale_stride[1] = 1;
            b.k = codes[0], b.v = codes[1];
            b.k_descale = factors[0], b.v_descale = factors[1];
        }
        good = fattn_attention(device, &t, &b, NULL) == FATTN_OK;
    }
    double worst = 0;
    for (int n = 0; good && n < BATCH * HEADS * DIM; n++) {
        const double x = (double)results[0][n], scale = 448 * 5;
        worst = worst_of(worst, fabs(x - (double)results[1][n]) / scale);
    }
    for (int n = 0; good && n < BATCH * HEADS; n++) {
        const double x = (double)sums[0][n];
        worst = worst_of(worst, fabs(x - (double)sums[1][n]) / (1 + fabs(x)));
    }
    fattn_device_close(device);
    tap_check(good && worst <= 0x1p-20,
              "%s: a cache in e4m3 with factors gives what its numbers give, to %g%s%s", backend,
              worst, good ? "" : ": ", good ? "" : fattn_last_reason());
}

static void check_mixed_refusals(void)
{
    fattn_problem t, normal;
    fattn_problem_init(&t);
    t.dim = t.dim_v = 8;
    t.dtype_v = FATTN_F16;
    tap_check(fattn_problem_normalise(&t, &normal) == FATTN_OK && normal.dtype_kv == FATTN_F32 &&
                  normal.dtype_v == FATTN_F16,
              "dtype_v alone leaves k as q");
    t.dtype_kv = FATTN_BF16, t.dtype_v = FATTN_DTYPE_DEFAULT;
    tap_check(fattn_problem_normalise(&t, &normal) == FATTN_OK && normal.dtype_v == FATTN_BF16,
              "dtype_v is dtype_kv by default");
    t.dtype_kv = FATTN_F64;
    tap_check(fattn_problem_normalise(&t, &normal) == FATTN_INVALID_ARGUMENT,
              "f64 does not mix: %s", fattn_last_reason());
    t.dtype_kv = (fattn_dtype)9;
    tap_check(fattn_problem_normalise(&t, &normal) == FATTN_INVALID_ARGUMENT, "no dtype: %s",
              fattn_last_reason());
}

/* -------------------------------------------------------------------------------------------------
 * The comparator
 * ---------------------------------------------------------------------------------------------- */

static void check_comparator(void)
{
    static uint16_t thirds[8], zeros[8];
    fattn_problem normal;
    fattn_naive r;
    begin(FATTN_FORWARD, 1, 3, 0);
    p.dtype = FATTN_BF16;
    p.dtype_o = FATTN_F32;
    thirds[0] = fattn_bf16_from_f64(1); /* v = (1, 0, 0), p = 1/3 */
    buf.q = buf.k = zeros, buf.v = thirds;
    bool good = normalise(&normal) && fattn_comparator_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = r.o[0] == fattn_naive_round(1.0 / 3, FATTN_BF16);
        fattn_naive_free(&r);
    }
    tap_check(good, "comparator: probabilities are rounded to the input dtype");
    thirds[0] = fattn_bf16_from_f64(1.0 / 3);
    normal.dtype_o = FATTN_BF16;
    good = good && fattn_comparator_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = r.o[0] != 0 && r.o[0] == fattn_naive_round(r.o[0], FATTN_BF16);
        fattn_naive_free(&r);
    }
    tap_check(good, "comparator: o is rounded to its dtype");

    begin(FATTN_BACKWARD, 2, 3, FATTN_BIAS | FATTN_SINK | FATTN_DLSE);
    fill(bias, -inf);
    sink[0] = -inf;
    fill(dlse, (double)NAN);
    good =
        execute_both() && normalise(&normal) && fattn_comparator_run(&normal, &buf, &r) == FATTN_OK;
    if (good) {
        good = all_are(r.o, 0, 2, 0) && all_are(r.dq, 0, 2, 0) && all_are(r.dk, 0, 3, 0) &&
               all_are(r.dv, 0, 3, 0) && all_are(r.dbias, 0, 1, 0) && r.dsink[0] == 0;
        fattn_naive_free(&r);
    }
    tap_check(good, "comparator: empty rows are out of every gradient");
}

int main(void)
{
    check_formats();
    check_output_rounding();
    check_philox();
    check_dropout_map();
    check_dropout();
    check_anchor_tables();
    check_windows();
    check_chunks();
    check_masks();
    check_shards();
    check_score();
    check_softmax();
    check_not_finite();
    check_empty_rows();
    check_empty_problems();
    check_packed();
    check_left_padding();
    for (int sq = 1; sq <= 9; sq += 4) check_first_tokens(sq);
    check_seqused();
    check_accumulate();
    for (int64_t page_size = 1; page_size <= 8; page_size++) check_pages(page_size);
    check_strides();
    check_absolute_sums();
    check_given_state();
    check_memory();
    check_comparator();
    check_mixed("reference", FATTN_FORWARD);
    check_mixed("reference", FATTN_BACKWARD);
    check_mixed("cpu", FATTN_FORWARD);
    check_mixed_refusals();
    check_descaled("reference");
    check_descaled("cpu");
    return tap_done();
}
