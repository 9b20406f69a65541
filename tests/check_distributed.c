/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Problems divided over ranks, on paper: shares hold every row once, every pair is computed once,
 * every message that is sent is received in the same step, and the forecast adds up.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/distributed/forecast.h"
#include "core/distributed/group.h"
#include "core/problem.h"
#include "tests/tap.h"

enum { LENGTH = 23, RANKS = 5 };

static fattn_problem problem_of(int64_t rows, int64_t keys, int64_t left, int64_t right)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.seqlen_q = rows, p.seqlen_k = keys;
    p.dim = p.dim_v = 8;
    p.features = FATTN_WINDOW;
    p.window_left = left, p.window_right = right;
    if (fattn_problem_normalise(&p, &p)) {
        tap_bail(fattn_last_reason());
    }
    return p;
}

static bool keeps(const fattn_problem *p, int64_t sq, int64_t sk, int64_t i, int64_t j)
{
    const int64_t off = p->anchor == FATTN_BOTTOM_RIGHT ? sk - sq : 0;
    const int64_t at = j - (i + off);
    return (p->window_left < 0 || at >= -p->window_left) &&
           (p->window_right < 0 || at <= p->window_right);
}

/* --- Shares ----------------------------------------------------------------------------------- */

static bool rows_are_held_once(fattn_split split, int64_t length, int64_t ranks)
{
    int held[LENGTH] = {0};
    for (int64_t r = 0; r < ranks; r++) {
        int64_t rows = 0;
        for (int n = 0; n < fattn_split_runs(split); n++) {
            const fattn_run run = fattn_split_run(split, length, ranks, r, n);
            for (int64_t i = 0; i < run.count; i++) {
                held[run.first + i * run.stride]++;
            }
            rows += run.count;
        }
        if (rows != fattn_split_rows(split, length, ranks, r)) {
            return false;
        }
    }
    for (int64_t i = 0; i < length; i++) {
        if (held[i] != 1) {
            return false;
        }
    }
    return true;
}

static void check_shares(void)
{
    for (fattn_split split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        bool good = true;
        for (int64_t length = 0; length <= LENGTH; length++) {
            for (int64_t ranks = 1; ranks <= RANKS; ranks++) {
                good = good && rows_are_held_once(split, length, ranks);
            }
        }
        tap_check(good, "%s: every row has one holder", fattn_split_names[split]);
    }
}

/* --- Pairs ------------------------------------------------------------------------------------ */

typedef struct seen {
    unsigned char times[LENGTH][LENGTH];
} seen;

/* Marks the pairs of a piece; returns how many. */
static double mark(const fattn_piece *piece, seen *s)
{
    double pairs = 0;
    for (int64_t i = 0; i < piece->q.count; i++) {
        for (int64_t j = 0; j < piece->k.count; j++) {
            if (piece->low <= j - i && j - i <= piece->high) {
                s->times[piece->q.first + i * piece->q.stride]
                        [piece->k.first + j * piece->k.stride]++;
                pairs++;
            }
        }
    }
    return pairs;
}

/* Goes through the ring as ranks do, and marks the pairs of sequence b that they compute. */
static bool walk(const fattn_whole *whole, const fattn_ring *ring, int64_t b, seen *s)
{
    const int runs = fattn_split_runs(whole->split);
    bool counts = true;
    for (int64_t r = 0; r < whole->ranks; r++) {
        for (int64_t step = 0; step <= ring->last_step; step++) {
            for (int lane = 0; lane < FATTN_LANES; lane++) {
                const int64_t owner = fattn_ring_owner(ring, lane, r, step);
                for (int n = 0; owner >= 0 && n < runs * runs; n++) {
                    const fattn_piece piece =
                        fattn_piece_of(whole, b, r, n / runs, owner, n % runs);
                    counts = mark(&piece, s) == fattn_piece_pairs(&piece) && counts;
                }
            }
        }
    }
    return counts;
}

static bool pairs_are_right(const fattn_whole *whole)
{
    fattn_ring ring;
    bool good = fattn_ring_make(whole, &ring) == FATTN_OK;
    for (int64_t b = 0; good && b < whole->problem->batch; b++) {
        seen s;
        memset(&s, 0, sizeof s);
        good = walk(whole, &ring, b, &s);
        const int64_t sq = fattn_whole_q(whole, b), sk = fattn_whole_k(whole, b);
        for (int64_t i = 0; i < LENGTH; i++) {
            for (int64_t j = 0; j < LENGTH; j++) {
                const bool wanted = i < sq && j < sk && keeps(whole->problem, sq, sk, i, j);
                good = good && s.times[i][j] == wanted;
            }
        }
    }
    fattn_ring_free(&ring);
    return good;
}

static void check_pairs(void)
{
    static const int64_t lengths[][2] = {{23, 23}, {7, 20}, {20, 7}, {1, 23}, {3, 2}, {16, 16}};
    static const int64_t windows[][2] = {{-1, -1}, {-1, 0}, {0, 0},  {3, 0},  {2, 4},
                                         {0, -1},  {-1, 2}, {9, 11}, {40, 40}};
    for (fattn_split split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        int wrong = 0, problems = 0;
        for (size_t n = 0; n < sizeof lengths / sizeof lengths[0]; n++) {
            for (size_t w = 0; w < sizeof windows / sizeof windows[0]; w++) {
                for (int64_t ranks = 1; ranks <= RANKS; ranks++) {
                    fattn_problem p =
                        problem_of(lengths[n][0], lengths[n][1], windows[w][0], windows[w][1]);
                    p.anchor = n % 2 ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
                    const fattn_whole whole = {.problem = &p, .split = split, .ranks = ranks};
                    wrong += !pairs_are_right(&whole);
                    problems++;
                }
            }
        }
        tap_check(wrong == 0, "%s: every pair that is seen is computed once, in %d of %d problems",
                  fattn_split_names[split], problems - wrong, problems);
    }
}

static void check_ragged(void)
{
    static const int32_t cu_q[] = {0, 5, 5, 28, 29}, cu_k[] = {0, 7, 9, 20, 43};
    for (fattn_split split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        bool good = true;
        for (int64_t ranks = 1; ranks <= RANKS; ranks++) {
            fattn_problem p = problem_of(23, 23, -1, 0);
            p.batch = 4;
            const fattn_whole whole = {
                .problem = &p, .cu_q = cu_q, .cu_k = cu_k, .split = split, .ranks = ranks};
            good = pairs_are_right(&whole) && good;
        }
        tap_check(good, "%s: so it is in a ragged batch", fattn_split_names[split]);
    }
}

/* --- Messages --------------------------------------------------------------------------------- */

/* How often `from` sends to `to` in a step, less how often `to` expects that. */
static bool messages_match(const fattn_ring *ring, int lane, int64_t step)
{
    int blocks[RANKS][RANKS] = {{0}}, sums[RANKS][RANKS] = {{0}};
    for (int64_t r = 0; r < ring->ranks; r++) {
        const fattn_ring_messages m = fattn_ring_step(ring, lane, r, step);
        if (m.send_to >= 0) {
            blocks[r][m.send_to]++;
        }
        if (m.receive_from >= 0) {
            blocks[m.receive_from][r]--;
        }
        if (m.gradient_to >= 0) {
            sums[r][m.gradient_to]++;
        }
        if (m.gradient_from >= 0) {
            sums[m.gradient_from][r]--;
        }
        if (m.home_from >= 0) {
            sums[m.home_from][r]--;
        }
    }
    for (int64_t a = 0; a < ring->ranks; a++) {
        for (int64_t b = 0; b < ring->ranks; b++) {
            if (blocks[a][b] || sums[a][b]) {
                return false;
            }
        }
    }
    return true;
}

/* Every block that a rank needs arrives, no block goes further than the last rank that needs it,
 * and its gradients come home once. */
static bool blocks_go_where_needed(const fattn_whole *whole, const fattn_ring *ring)
{
    for (int64_t owner = 0; owner < whole->ranks; owner++) {
        int home = 0;
        for (int64_t step = 0; step <= ring->last_step + 1; step++) {
            for (int lane = 0; lane < FATTN_LANES; lane++) {
                home += fattn_ring_step(ring, lane, owner, step).home_from >= 0;
            }
        }
        int ways = 0;
        for (int lane = 0; lane < FATTN_LANES; lane++) {
            const int64_t hops = ring->reach[lane][owner];
            const int64_t last = fattn_ring_neighbour(ring, lane, owner, hops);
            ways += hops > 0;
            if (hops > 0 && !fattn_whole_has_pairs(whole, last, owner)) {
                return false;
            }
        }
        if (home != ways) {
            return false;
        }
    }
    return true;
}

static void check_messages(void)
{
    static const int64_t windows[][2] = {{-1, -1}, {-1, 0}, {3, 0}, {6, 5}, {0, -1}, {12, 12}};
    bool match = true, needed = true;
    int64_t steps = 0;
    for (fattn_split split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        for (size_t w = 0; w < sizeof windows / sizeof windows[0]; w++) {
            for (int64_t ranks = 1; ranks <= RANKS; ranks++) {
                const fattn_problem p = problem_of(23, 23, windows[w][0], windows[w][1]);
                const fattn_whole whole = {.problem = &p, .split = split, .ranks = ranks};
                fattn_ring ring;
                if (fattn_ring_make(&whole, &ring)) {
                    tap_bail(fattn_last_reason());
                }
                for (int64_t step = 0; step <= ring.last_step + 1; step++, steps++) {
                    match = match && messages_match(&ring, FATTN_UP, step) &&
                            messages_match(&ring, FATTN_DOWN, step);
                }
                needed = needed && blocks_go_where_needed(&whole, &ring);
                fattn_ring_free(&ring);
            }
        }
    }
    tap_check(match, "what is sent in a step is received in it, in %lld steps", (long long)steps);
    tap_check(needed, "blocks go as far as they are needed, and their gradients home");
}

/* A window of two parts reaches two neighbours, on whichever side. */
static void check_neighbours(void)
{
    static const struct {
        int64_t left, right, up, down;
    } cases[] = {{10, 0, 1, 0}, {11, 0, 2, 0}, {10, 10, 1, 1}, {0, 20, 0, 2}, {-1, 0, 3, 0}};
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        const fattn_problem p = problem_of(80, 80, cases[n].left, cases[n].right);
        const fattn_whole whole = {.problem = &p, .split = FATTN_SPLIT_CONTIGUOUS, .ranks = 8};
        fattn_ring ring;
        if (fattn_ring_make(&whole, &ring)) {
            tap_bail(fattn_last_reason());
        }
        const int32_t up = ring.reach[FATTN_UP][4], down = ring.reach[FATTN_DOWN][4];
        tap_check(up == cases[n].up && down == cases[n].down,
                  "window %lld,%lld: the block of rank 4 of 8 goes %d up and %d down",
                  (long long)cases[n].left, (long long)cases[n].right, up, down);
        fattn_ring_free(&ring);
    }
}

/* --- Balance and forecast --------------------------------------------------------------------- */

static fattn_forecast forecast_of(const fattn_whole *whole, fattn_scheme scheme, double bandwidth)
{
    const fattn_speed speed = {.flops = 1e12, .bandwidth = bandwidth, .latency = 1e-6};
    fattn_forecast f;
    if (fattn_forecast_make(whole, scheme, &speed, &f)) {
        tap_bail(fattn_last_reason());
    }
    return f;
}

static void check_balance(void)
{
    bool exact = true;
    for (int64_t ranks = 1; ranks <= 1024; ranks *= 2) {
        const fattn_problem p = problem_of(1 << 20, 1 << 20, -1, 0);
        const fattn_whole whole = {.problem = &p, .split = FATTN_SPLIT_ZIGZAG, .ranks = ranks};
        const double all = (double)(1 << 20) * ((1 << 20) + 1) / 2;
        const fattn_forecast f = forecast_of(&whole, FATTN_SCHEME_RING, 1e12);
        exact = exact && f.least_pairs == all / (double)ranks && f.most_pairs == f.least_pairs;
    }
    tap_check(exact, "under zigzag all of up to 1024 ranks have exactly the same number of pairs");
}

/* Heads in turns over two ranks: besides the larger of computing and transfers, a turn's share of
 * both is all that there is, whichever is the larger. Where links are fast, there are fewer turns.
 */
static void check_exchange(const fattn_whole *eight)
{
    fattn_whole whole = *eight;
    whole.ranks = 2;
    double worst = 0;
    int wrong = 0;
    for (double bandwidth = 1e6; bandwidth < 1e13; bandwidth *= 2) {
        const fattn_speed speed = {.flops = 1e12, .bandwidth = bandwidth};
        fattn_forecast f;
        if (fattn_forecast_make(&whole, FATTN_SCHEME_HEADS, &speed, &f) || f.turns > 4) {
            tap_bail(fattn_last_reason());
        }
        const double most = f.computing > f.transferring ? f.computing : f.transferring;
        const double over = (f.seconds - most) / (f.computing + f.transferring);
        const bool fast = f.transferring <= 0.033 * f.computing;
        wrong += f.turns != (fast ? 2 : 4);
        worst = f.turns == 4 && over > worst ? over : worst;
    }
    tap_check(wrong == 0, "2 turns where links are fast, else 4");
    tap_check(worst > 0.05 && worst < 0.126, "4 turns: %.3f of both are not side by side", worst);
    for (int most = 4; most >= 1; most /= 2) {
        fattn_speed speed = {.flops = 1e12, .bandwidth = 1e8};
        fattn_forecast f;
        if (fattn_forecast_make(&whole, FATTN_SCHEME_HEADS, &speed, &f)) {
            tap_bail(fattn_last_reason());
        }
        speed.latency = f.computing / (2.1 * most);
        const int64_t turns = fattn_scheme_turns(&whole, FATTN_SCHEME_HEADS, &speed, 0);
        tap_check(turns == most, "%d turns if these compute for 2.1 latencies: %lld", most,
                  (long long)turns);
    }
    static const struct {
        fattn_op op;
        double units;
        int64_t turns;
    } few[] = {{FATTN_FORWARD, 0, 4},  {FATTN_FORWARD, 20, 4},  {FATTN_FORWARD, 40, 2},
               {FATTN_FORWARD, 99, 1}, {FATTN_BACKWARD, 20, 2}, {FATTN_BACKWARD, 40, 1}};
    bool right = true;
    for (size_t n = 0; n < sizeof few / sizeof few[0]; n++) {
        const fattn_speed speed = {.flops = 1e12, .bandwidth = 1e8, .units = few[n].units};
        fattn_problem p = problem_of(6144, 6144, -1, -1); /* 48 tiles a head */
        p.op = few[n].op;
        p.heads_q = 8, p.heads_k = 4, p.dim = p.dim_v = 64;
        whole.problem = &p;
        const int64_t turns = fattn_scheme_turns(&whole, FATTN_SCHEME_HEADS, &speed, 0);
        right = right && turns == few[n].turns;
    }
    tap_check(right, "a turn has two tiles for each multiprocessor");
    static const struct {
        int64_t heads_q, heads_k, ranks, wanted, turns;
    } cases[] = {{8, 8, 2, 3, 2},  {8, 8, 2, 4, 4},  {8, 8, 2, 100, 4}, {32, 8, 8, 4, 4},
                 {32, 8, 8, 3, 2}, {32, 8, 4, 5, 4}, {8, 8, 2, 1, 1},   {24, 4, 4, 4, 3}};
    const fattn_speed any = {.flops = 1e12, .bandwidth = 1e9};
    right = true;
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        fattn_problem p = *eight->problem;
        p.heads_q = cases[n].heads_q, p.heads_k = cases[n].heads_k;
        whole.problem = &p, whole.ranks = cases[n].ranks;
        right = right && fattn_scheme_turns(&whole, FATTN_SCHEME_HEADS, &any, cases[n].wanted) ==
                             cases[n].turns;
    }
    const fattn_problem small = problem_of(64, 64, -1, -1);
    fattn_problem p = small;
    p.heads_q = p.heads_k = 8;
    whole.problem = &p, whole.ranks = 2;
    tap_check(right && fattn_scheme_turns(&whole, FATTN_SCHEME_HEADS, &any, 0) == 1 &&
                  fattn_scheme_turns(&whole, FATTN_SCHEME_RING, &any, 4) == 1,
              "turns divide a rank's heads, and small exchanges are one");
}

/* Whatever the link, forward and backward take the same turns if forward saves what backward needs.
 * Then half of dout, dq, dk and dv of a rank's rows travel; else also q, k, v, o and lse. */
static void check_saving(const fattn_whole *eight)
{
    const double row = 8 * 8 * 4; /* of all heads, in each of these tensors */
    fattn_whole whole = *eight;
    fattn_problem p = *eight->problem;
    whole.problem = &p, whole.ranks = 2;
    bool alike = true, exact = true, fewest = true;
    for (double bandwidth = 1e6; bandwidth < 1e13; bandwidth *= 2) {
        int64_t turns[2][2];
        double bytes[2] = {0, 0};
        for (int n = 0; n < 4; n++) {
            whole.saves = n / 2;
            p.op = n % 2 ? FATTN_BACKWARD : FATTN_FORWARD;
            p.outputs = n % 2 ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV : FATTN_OUT_O;
            const fattn_forecast f = forecast_of(&whole, FATTN_SCHEME_HEADS, bandwidth);
            turns[n / 2][n % 2] = f.turns;
            bytes[n / 2] = f.most_bytes;
            fewest = fewest && (n < 3 || (f.turns == 1) == (f.transferring <= 0.011 * f.computing));
        }
        const double rows = (double)p.seqlen_q / 2;
        alike = alike && turns[1][0] == turns[1][1];
        exact = exact && bytes[1] == rows / 2 * 4 * row &&
                bytes[0] == rows / 2 * (8 * row + 8 * sizeof(float));
    }
    const fattn_speed slow = {.flops = 1e12, .bandwidth = 1e9};
    fattn_whole pair = whole;
    fattn_problem few = *whole.problem;
    few.heads_k = 2;
    pair.problem = &few, pair.ranks = 4;
    fattn_forecast both[2];
    for (int n = 0; n < 2; n++) {
        pair.saves = n;
        exact = exact && !fattn_forecast_make(&pair, FATTN_SCHEME_BOTH, &slow, &both[n]);
    }
    tap_check(both[0].most_bytes == both[1].most_bytes && both[0].turns == both[1].turns,
              "only an exchange of all heads saves anything");
    tap_check(alike, "what is saved takes the same turns in forward and backward");
    tap_check(exact, "and is not exchanged again");
    tap_check(fewest, "in one turn where links are fast");
}

/* Where ranks have one run of queries, half of them leave their own block's keys until gradients go
 * home. Transfers take 0.3 of the time of kernels here, and in no step longer than those. */
static void check_halves(void)
{
    const fattn_split splits[] = {FATTN_SPLIT_CONTIGUOUS, FATTN_SPLIT_STRIPED};
    fattn_problem p = problem_of(1 << 16, 1 << 16, -1, -1);
    p.op = FATTN_BACKWARD;
    p.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    for (size_t n = 0; n < sizeof splits / sizeof splits[0]; n++) {
        const fattn_whole whole = {.problem = &p, .split = splits[n], .ranks = 4};
        const fattn_forecast at_1 = forecast_of(&whole, FATTN_SCHEME_RING, 1);
        const double bandwidth = at_1.transferring / (0.3 * at_1.computing);
        const fattn_forecast f = forecast_of(&whole, FATTN_SCHEME_RING, bandwidth);
        tap_check(f.transferring > 0.29 * f.computing && f.seconds < 1.0001 * f.computing,
                  "backward, %s: all transfers, %.3f of computing, go beside it: %.3f",
                  fattn_split_names[splits[n]], f.transferring / f.computing,
                  f.seconds / f.computing);
    }
}

/* Bytes count what travels: types of keys and values, and gradients and results that are wanted. */
static void check_bytes(void)
{
    enum { RANK_ROWS = 64, HEADS = 8, DIM = 8 };
    const double q = RANK_ROWS * HEADS * DIM * 2, lse = RANK_ROWS * HEADS * 4; /* bf16; f32 */
    static const struct {
        const char *what;
        fattn_op op;
        uint32_t outputs;
        fattn_dtype dtype_kv, dtype_v;
        double ring, heads; /* sent by a rank: q's by a hop of the ring; by an exchange of all */
        double lse;         /* and lse's by an exchange */
    } cases[] = {
        {"one type", FATTN_FORWARD, FATTN_OUT_O, 0, 0, 2, 4, 0},
        {"lse", FATTN_FORWARD, FATTN_OUT_O | FATTN_OUT_LSE, 0, 0, 2, 4, 1},
        {"f32 values", FATTN_FORWARD, FATTN_OUT_O, FATTN_BF16, FATTN_F32, 3, 5, 0},
        {"f32 keys", FATTN_FORWARD, FATTN_OUT_O, FATTN_F32, FATTN_F32, 4, 6, 0},
        {"dq", FATTN_BACKWARD, FATTN_OUT_DQ, 0, 0, 2, 6, 1},
        {"dv", FATTN_BACKWARD, FATTN_OUT_DV, 0, 0, 2 + 2, 6, 1},
        {"dk and dv", FATTN_BACKWARD, FATTN_OUT_DK | FATTN_OUT_DV, 0, 0, 2 + 4, 7, 1},
        {"dk of f32 keys", FATTN_BACKWARD, FATTN_OUT_DK, FATTN_F32, FATTN_BF16, 3 + 2, 8, 1},
    };
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        fattn_problem p;
        fattn_problem_init(&p);
        p.op = cases[n].op, p.outputs = cases[n].outputs;
        p.dtype = FATTN_BF16, p.dtype_kv = cases[n].dtype_kv, p.dtype_v = cases[n].dtype_v;
        p.heads_q = p.heads_k = HEADS, p.dim = p.dim_v = DIM;
        p.seqlen_q = p.seqlen_k = 8 * RANK_ROWS;
        if (fattn_problem_normalise(&p, &p)) {
            tap_bail(fattn_last_reason());
        }
        const fattn_whole whole = {.problem = &p, .split = FATTN_SPLIT_CONTIGUOUS, .ranks = 8};
        const double ring = forecast_of(&whole, FATTN_SCHEME_RING, 1e9).most_bytes;
        const double heads = forecast_of(&whole, FATTN_SCHEME_HEADS, 1e9).most_bytes;
        const double kept = 7.0 / 8; /* that an exchange of all sends on */
        tap_check(ring == 7 * cases[n].ring * q &&
                      heads == kept * (cases[n].heads * q + cases[n].lse * lse),
                  "bytes of %s: %.0f in a ring, %.0f of heads", cases[n].what, ring, heads);
    }
}

static void check_forecast(void)
{
    fattn_problem p = problem_of(1 << 16, 1 << 16, -1, 0);
    p.heads_q = p.heads_k = 8;
    const fattn_whole whole = {.problem = &p, .split = FATTN_SPLIT_ZIGZAG, .ranks = 8};
    const fattn_forecast fast = forecast_of(&whole, FATTN_SCHEME_RING, 1e15);
    const fattn_forecast slow = forecast_of(&whole, FATTN_SCHEME_RING, 1e6);
    tap_check(fast.seconds > 0 && fast.efficiency > 0.999 && fast.efficiency < 1.000001,
              "with a fast link the ring computes all the time: %.6f", fast.efficiency);
    tap_check(slow.seconds >= slow.transferring && slow.seconds < 1.2 * slow.transferring,
              "with a slow one it waits for transfers: %.4g of %.4g s", slow.transferring,
              slow.seconds);
    tap_check(fast.most_bytes == 7.0 * 8192 * 8 * 16 * 4, "a block makes 7 hops: %.0f bytes",
              fast.most_bytes);
    /* 7 steps with 8192 rows of the last rank, whose queries all keys of others precede. */
    fattn_forecast merging;
    const fattn_speed slowly = {.flops = 1e30, .bandwidth = 1e30, .row = 1};
    const bool made = !fattn_forecast_make(&whole, FATTN_SCHEME_RING, &slowly, &merging);
    tap_check(made && fabs(merging.seconds - 7 * 8192) < 1,
              "merging counts the rows of each step: %.0f", merging.seconds);
    /* Of the two runs of rank 0, rank 1 needs the first, and sends its gradients back: half of what
     * rank 0 sends and, in f32, gets. */
    fattn_whole pair = whole;
    pair.ranks = 2;
    const fattn_forecast half = forecast_of(&pair, FATTN_SCHEME_RING, 1e9);
    tap_check(half.least_bytes * 2 == half.most_bytes,
              "a run that nobody needs stays: %.0f of %.0f", half.least_bytes, half.most_bytes);
    const fattn_forecast heads = forecast_of(&whole, FATTN_SCHEME_HEADS, 1e6);
    const fattn_forecast best = forecast_of(&whole, FATTN_SCHEME_AUTO, 1e6);
    tap_check(best.seconds <= heads.seconds && best.seconds <= slow.seconds &&
                  best.seconds <= forecast_of(&whole, FATTN_SCHEME_BOTH, 1e6).seconds,
              "the choice falls on the fastest: %s", fattn_scheme_names[best.scheme]);
    check_exchange(&whole);
    check_saving(&whole);
    p.heads_k = 1;
    const fattn_speed speed = {.flops = 1e12, .bandwidth = 1e9};
    fattn_forecast f;
    tap_check(fattn_forecast_make(&whole, FATTN_SCHEME_HEADS, &speed, &f) == FATTN_UNSUPPORTED,
              "one key/value head is not divided: %s", fattn_last_reason());
    fattn_problem decode = problem_of(1, 1 << 20, -1, 0);
    const fattn_whole few = {.problem = &decode, .split = FATTN_SPLIT_CONTIGUOUS, .ranks = 4};
    const fattn_forecast reduce = forecast_of(&few, FATTN_SCHEME_AUTO, 1e9);
    tap_check(reduce.scheme == FATTN_SCHEME_REDUCE && reduce.steps == 2 &&
                  reduce.most_pairs == 1 << 18,
              "one query is computed on all ranks at once, and merged in two rounds");
}

/* The scheme that two ranks choose whose transport carries device memory, or not. */
static fattn_scheme chosen(int64_t length, int64_t heads_k, fattn_op op, bool device_memory)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op, p.dtype = FATTN_BF16, p.features |= FATTN_CAUSAL;
    p.outputs = op == FATTN_BACKWARD ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV : FATTN_OUT_O;
    p.heads_q = 32, p.heads_k = heads_k, p.dim = p.dim_v = 128;
    p.seqlen_q = p.seqlen_k = length;
    fattn_group group;
    fattn_group_init(&group);
    fattn_group_plan plan = {
        .transport = {.ranks = 2, .device_memory = device_memory, .spans = device_memory},
        .scheme = FATTN_SCHEME_AUTO};
    plan.speed = fattn_group_speed(&group, &plan.transport);
    plan.shares = (fattn_whole){.problem = &plan.problem, .split = FATTN_SPLIT_ZIGZAG, .ranks = 2};
    if (fattn_problem_normalise(&p, &plan.problem) || fattn_group_choose_scheme(&plan)) {
        tap_bail(fattn_last_reason());
    }
    return plan.scheme;
}

/* An exchange of heads was faster than a ring on two H200 at these lengths, but for backward of 8
 * key heads at 131,072 tokens. On CPUs merging is not counted. */
static void check_choice(void)
{
    const int64_t k = 1024;
    int wrong = 0;
    for (int64_t length = 32 * k; length <= 256 * k; length *= 2) {
        for (int64_t heads = 8; heads <= 32; heads *= 4) {
            wrong += chosen(length, heads, FATTN_FORWARD, true) != FATTN_SCHEME_HEADS;
            wrong += chosen(length, heads, FATTN_BACKWARD, true) != FATTN_SCHEME_HEADS;
        }
    }
    tap_check(wrong == 0 && chosen(128 * k, 32, FATTN_FORWARD, false) == FATTN_SCHEME_RING,
              "two GPUs exchange heads, two CPUs form a ring: %d of 16 choices are wrong", wrong);
    const fattn_transport copies = {.device_memory = 1}, spans = {.device_memory = 1, .spans = 1};
    const fattn_transport host = {.spans = 1};
    fattn_group group;
    fattn_group_init(&group);
    tap_check(fattn_group_speed(&group, &copies).units > 0 &&
                  fattn_group_speed(&group, &spans).units == 0 &&
                  fattn_group_speed(&group, &host).units == 0,
              "GPUs wait at the end of a turn where rows are copied to messages");
}

/* Whether two ranks, whose devices have memory of their own, take a ragged batch of two sequences.
 * The first has 5 queries and 5 keys, the second 9 queries and so many keys. */
static bool takes_ragged(fattn_scheme scheme, uint64_t features, int64_t window, int32_t keys)
{
    const int32_t cu_q[] = {0, 5, 14}, cu_k[] = {0, 5, 5 + keys};
    fattn_problem p;
    fattn_problem_init(&p);
    p.features = features | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.batch = 2, p.heads_q = p.heads_k = 4, p.dim = p.dim_v = 8;
    p.seqlen_q = p.seqlen_k = 9, p.total_q = 14, p.total_k = cu_k[2];
    p.window_left = window;
    p.dropout_p = features & FATTN_DROPOUT ? 0.5 : 0;
    fattn_group_plan plan = {
        .transport = {.ranks = 2, .device_memory = true}, .scheme = scheme, .ragged = true};
    plan.shares = (fattn_whole){.problem = &plan.problem,
                                .cu_q = cu_q,
                                .cu_k = cu_k,
                                .split = FATTN_SPLIT_ZIGZAG,
                                .ranks = 2,
                                .all_queries = scheme == FATTN_SCHEME_REDUCE};
    if (fattn_problem_normalise(&p, &plan.problem)) {
        tap_bail(fattn_last_reason());
    }
    return fattn_group_check_scheme(&plan) == FATTN_OK;
}

static void check_ragged_on_devices(void)
{
    const fattn_scheme ring = FATTN_SCHEME_RING, heads = FATTN_SCHEME_HEADS;
    const fattn_scheme reduce = FATTN_SCHEME_REDUCE;
    const uint64_t causal = FATTN_CAUSAL, window = FATTN_WINDOW;
    tap_check(takes_ragged(ring, 0, -1, 7) && takes_ragged(ring, causal, -1, 9) &&
                  takes_ragged(reduce, 0, -1, 7),
              "a ring takes ragged batches with the same bounds in all sequences");
    tap_check(!takes_ragged(ring, causal, -1, 7) && !takes_ragged(ring, window, 3, 9) &&
                  !takes_ragged(ring, FATTN_ALIBI, -1, 9) &&
                  !takes_ragged(ring, FATTN_DROPOUT, -1, 9) && !takes_ragged(reduce, causal, -1, 9),
              "and no others: %s", fattn_last_reason());
    tap_check(takes_ragged(heads, causal, -1, 7) && takes_ragged(heads, window, 3, 9) &&
                  takes_ragged(heads, FATTN_ALIBI | FATTN_DROPOUT, -1, 9),
              "an exchange of heads takes all");
}

/* A gradient that is not wanted has no strides. That must not keep the other tensors from being
 * sent as they are. */
static void check_spans(void)
{
    static const uint32_t wanted[] = {FATTN_OUT_DQ, FATTN_OUT_DK, FATTN_OUT_DV,
                                      FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV};
    int right = 0;
    for (size_t n = 0; n < sizeof wanted / sizeof wanted[0]; n++) {
        fattn_problem p;
        fattn_problem_init(&p);
        p.op = FATTN_BACKWARD, p.dtype = FATTN_F32, p.outputs = wanted[n];
        p.heads_q = p.heads_k = 4, p.dim = p.dim_v = 8;
        p.seqlen_q = p.seqlen_k = 64;
        fattn_group_plan plan = {.transport = {.ranks = 2, .spans = true},
                                 .scheme = FATTN_SCHEME_HEADS,
                                 .turns = 1,
                                 .sharing = 1,
                                 .slices = 1};
        plan.shares = (fattn_whole){.split = FATTN_SPLIT_CONTIGUOUS, .ranks = 2};
        if (fattn_group_describe(&plan, &p, NULL, NULL)) {
            tap_bail(fattn_last_reason());
        }
        right += plan.span_rule == FATTN_ALL_SPANS;
    }
    tap_check(right == 4, "rows are sent as they are whichever gradients are wanted: %d of 4",
              right);
}

int main(void)
{
    check_shares();
    check_pairs();
    check_ragged();
    check_messages();
    check_neighbours();
    check_balance();
    check_bytes();
    check_forecast();
    check_halves();
    check_choice();
    check_ragged_on_devices();
    check_spans();
    return tap_done();
}
