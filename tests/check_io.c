/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The traffic model matches the published algorithms: fattn_io_predict() equals the counts of
 * tiled.c to the element, the counts follow a N^2 d^2 / M + b N d, and the planner's closed forms
 * agree with both where they promise to. Large problems are counted without arithmetic, on the same
 * path; check_tiled verifies that arithmetic does not change the counts, and so does this program
 * at one size.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/reference/tiled.h"
#include "core/problem.h"
#include "tests/tap.h"
#include "tests/worst.h"
#include "tools/judge/random_case.h"

static const char *op_name(const fattn_problem *p)
{
    return p->op == FATTN_FORWARD ? "forward" : "backward";
}

/* Whether all counts agree; else `wrong` names the first that does not. */
static bool same_counts(const fattn_io_counts *got, const fattn_io_counts *want, char *wrong,
                        size_t size)
{
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        const fattn_io a = got->tensor[t], b = want->tensor[t];
        if (a.reads != b.reads || a.writes != b.writes) {
            snprintf(
                wrong, size, ": %s is read %.0f and written %.0f times, predicted %.0f and %.0f",
                fattn_io_tensor_name((fattn_io_tensor)t), a.reads, a.writes, b.reads, b.writes);
            return false;
        }
    }
    wrong[0] = '\0';
    return true;
}

static fattn_io_counts counted(const fattn_problem *p, const fattn_buffers *buffers,
                               fattn_io_schedule schedule, fattn_tile tile)
{
    const fattn_tiled_options options = {.schedule = schedule, .tile = tile, .count_only = true};
    fattn_io_counts counts = {0};
    fattn_tiled_run(p, buffers, &options, NULL, &counts);
    return counts;
}

/* One head of n x n, as modified by the caller. */
static fattn_problem square(fattn_op op, int64_t n, int64_t d, uint64_t features)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.seqlen_q = p.seqlen_k = n;
    p.dim = p.dim_v = d;
    p.features = features;
    return p;
}

static void normalise(fattn_problem *p)
{
    if (fattn_problem_normalise(p, p) != FATTN_OK) {
        tap_bail(fattn_last_reason());
    }
}

/* -------------------------------------------------------------------------------------------------
 * Predicted against counted
 * ---------------------------------------------------------------------------------------------- */

/* Random problems with every feature, layout and length, and unaligned tiles. */
static void check_drawn(uint64_t seed, int64_t cases)
{
    char wrong[256] = "";
    int64_t made = 0, drawn = 0;
    bool good = true;
    for (int64_t n = 0; drawn < cases && good; n++) {
        draw_case c;
        fattn_problem p;
        good = draw_problem(&c, seed, n) == 0 && draw_build(&c) == 0 &&
               fattn_problem_normalise(&c.problem, &p) == FATTN_OK;
        /* The papers' algorithms have the features of their rows. */
        const bool honoured = !(c.problem.features & ~FATTN_KERNEL_COMMON);
        drawn += honoured;
        draw_rng rng = draw_stream(seed, n, 99);
        for (int s = 0; honoured && s < FATTN_IO_SCHEDULES && good; s++) {
            const fattn_tile tile = {draw_between(&rng, 1, 90), draw_between(&rng, 1, 90)};
            const fattn_io_counts got = counted(&p, &c.buffers, (fattn_io_schedule)s, tile);
            fattn_io_counts want;
            fattn_io_predict(&p, &c.buffers, (fattn_io_schedule)s, tile, &want);
            char what[128];
            good = same_counts(&got, &want, what, sizeof what);
            if (!good) {
                snprintf(wrong, sizeof wrong,
                         ": case %" PRId64 ", %s, tile %" PRId64 " x %" PRId64 "%s", n,
                         fattn_io_schedule_name((fattn_io_schedule)s), tile.br, tile.bc, what);
            }
            made += good;
        }
        draw_free(&c);
    }
    tap_check(good && made == 3 * cases,
              "%" PRId64 " drawn problems, seed %" PRIu64 ", are predicted%s", cases, seed, wrong);
}

/* Distant windows, huge windows, and windows at each corner, which are rarely drawn. */
static void check_windows(void)
{
    static const int64_t edges[] = {-1, 0, 1, 30, 31, 32, 33, 100, INT64_C(1) << 40, INT64_MAX};
    enum { EDGES = sizeof edges / sizeof edges[0] };
    char wrong[256] = "";
    bool good = true;
    for (int n = 0; n < EDGES * EDGES * 4 && good; n++) {
        fattn_problem p = square(FATTN_FORWARD, 97, 8, FATTN_WINDOW | FATTN_POSITIONS);
        p.window_left = edges[n % EDGES];
        p.window_right = edges[n / EDGES % EDGES];
        p.seqlen_k = n % 3 == 0 ? 40 : 150;
        normalise(&p);
        fattn_buffers buffers;
        fattn_buffers_init(&buffers);
        buffers.q_offset = n % 4 == 1 ? 60 : 0;
        buffers.k_offset = n % 4 == 2 ? 60 : 0;
        const fattn_io_counts got = counted(&p, &buffers, FATTN_IO_FLASH2, (fattn_tile){13, 32});
        fattn_io_counts want;
        fattn_io_predict(&p, &buffers, FATTN_IO_FLASH2, (fattn_tile){13, 32}, &want);
        good = same_counts(&got, &want, wrong, sizeof wrong);
    }
    tap_check(good, "windows of every kind are predicted%s", wrong);
}

/* -------------------------------------------------------------------------------------------------
 * The law
 * ---------------------------------------------------------------------------------------------- */

/* Sizes with Bc | N, Bc <= N / 8 and Br = min(Bc, d), as M = 4 d Bc gives them. */
enum { N_FIRST = 256, N_LAST = 8192, BC_FIRST = 16, SAMPLES_MAX = 512 };

typedef struct sample {
    double quadratic, linear, count; /* N^2 d^2 / M, N d, and the accesses */
} sample;

typedef struct fit {
    double a, b, error; /* largest relative error */
    int samples;
} fit;

/* Least squares of the relative errors (a x + b y) / count - 1. */
static fit fit_of(const sample *samples, int count)
{
    double xx = 0, xy = 0, yy = 0, x1 = 0, y1 = 0;
    for (int n = 0; n < count; n++) {
        const double x = samples[n].quadratic / samples[n].count;
        const double y = samples[n].linear / samples[n].count;
        xx += x * x, xy += x * y, yy += y * y, x1 += x, y1 += y;
    }
    const double determinant = xx * yy - xy * xy;
    fit f = {(x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant, 0, count};
    for (int n = 0; n < count; n++) {
        const double model = f.a * samples[n].quadratic + f.b * samples[n].linear;
        f.error = worst_of(f.error, fabs(model / samples[n].count - 1));
    }
    return f;
}

/* FlashAttention gets the paper's tile. FlashAttention-2's forward reads the keys once per query
 * block, so Br must grow with M: Br = Bc. */
static fattn_tile tile_of(const fattn_problem *p, fattn_io_schedule schedule, int64_t m)
{
    fattn_tile tile = fattn_io_paper_tile(p, m);
    if (schedule == FATTN_IO_FLASH2) tile.br = tile.bc;
    return tile;
}

static void check_law(fattn_io_schedule schedule, fattn_op op)
{
    static sample samples[SAMPLES_MAX];
    char wrong[256] = "";
    bool good = true;
    int count = 0;
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    for (int64_t n = N_FIRST; n <= N_LAST; n *= 2) {
        for (int64_t d = 32; d <= 128; d += 32) {
            for (int64_t bc = BC_FIRST; bc <= n / 8; bc *= 2) {
                fattn_problem p = square(op, n, d, 0);
                normalise(&p);
                const int64_t m = 4 * d * bc;
                const fattn_tile tile = tile_of(&p, schedule, m);
                const bool paper =
                    tile.bc == bc && (schedule == FATTN_IO_FLASH2 || tile.br == (bc < d ? bc : d));
                const fattn_io_counts got = counted(&p, &buffers, schedule, tile);
                fattn_io_counts want;
                fattn_io_predict(&p, &buffers, schedule, tile, &want);
                good = good && paper && same_counts(&got, &want, wrong, sizeof wrong);
                const double nd = (double)(n * d);
                const fattn_io total = fattn_io_total(&got);
                samples[count++] = (sample){nd * nd / (double)m, nd, total.reads + total.writes};
            }
        }
    }
    const char *const name = fattn_io_schedule_name(schedule);
    const char *const direction = op == FATTN_FORWARD ? "forward" : "backward";
    tap_check(good, "%s %s, N %d..%d, d 32..128: predicted%s", name, direction, N_FIRST, N_LAST,
              wrong);
    const fit f = fit_of(samples, count);
    tap_check(f.error <= 0.05, "%s %s: %.2f N^2 d^2 / M + %.2f N d within %.1f %% over %d sizes",
              name, direction, f.a, f.b, 100 * f.error, f.samples);
}

/* The total as one reads it off the paper: line 3 writes O, l, m; line 6 reads K and V; lines 8, 12
 * and 13 read Q, O, l, m and write O, l, m for each of the Tc blocks of keys. */
static void check_by_hand(void)
{
    const double n = 256, d = 32, tc = 8;
    fattn_problem p = square(FATTN_FORWARD, 256, 32, 0);
    normalise(&p);
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    const fattn_tile tile = fattn_io_paper_tile(&p, 4096);
    const fattn_io_counts counts = counted(&p, &buffers, FATTN_IO_FLASH1, tile);
    const fattn_io total = fattn_io_total(&counts);
    tap_check(tile.br == 32 && tile.bc == 32, "M = 4096, d = 32 make tiles of 32 x 32");
    tap_check(total.reads == 2 * n * d + tc * (2 * n * d + 2 * n) &&
                  total.writes == (1 + tc) * (n * d + 2 * n),
              "Algorithm 1 at N 256, d 32, M 4096: %.0f reads, %.0f writes", total.reads,
              total.writes);

    /* Standard attention: S, P each written and read once. */
    const fattn_io_counts standard = counted(&p, &buffers, FATTN_IO_STANDARD, tile);
    const fattn_io all = fattn_io_total(&standard);
    tap_check(all.reads == 3 * n * d + 2 * n * n && all.writes == n * d + 2 * n * n,
              "Algorithm 0: %.0f reads, %.0f writes", all.reads, all.writes);
    const fattn_tile large = fattn_io_paper_tile(&p, 100001);
    tap_check(large.br == 32 && large.bc == 782, "Br is bounded by d, and Bc rounded up");
}

/* -------------------------------------------------------------------------------------------------
 * The planner's closed forms
 * ---------------------------------------------------------------------------------------------- */

static double predicted_bytes(const fattn_problem *p, fattn_io_schedule schedule, fattn_tile tile)
{
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    fattn_io_counts counts;
    fattn_io_predict(p, &buffers, schedule, tile, &counts);
    return fattn_io_counts_bytes(p, &counts);
}

/* The kind-th of many kinds of problems. */
static fattn_problem planned(int kind, fattn_op op)
{
    static const int64_t lengths[] = {1, 5, 64, 100, 257, 1000};
    static const int64_t windows[] = {-1, 0, 7, 64, 300};
    fattn_problem p = square(op, lengths[kind % 6], 24, FATTN_WINDOW);
    p.seqlen_k = lengths[kind / 6 % 6];
    p.dim_v = 40;
    p.batch = 2, p.heads_q = 6, p.heads_k = 2;
    p.window_left = windows[kind / 36 % 5];
    p.window_right = windows[kind / 180 % 5];
    p.anchor = kind / 900 % 2 ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    normalise(&p);
    return p;
}
enum { KINDS = 1800 };

/* Exact if outer blocks are a multiple of inner ones. Otherwise the estimate is right on
 * average. */
static void check_plans(fattn_op op)
{
    double worst = 0, sum = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        const fattn_problem p = planned(kind, op);
        const bool forward = op == FATTN_FORWARD;
        const fattn_tile exact = forward ? (fattn_tile){96, 32} : (fattn_tile){32, 96};
        const fattn_tile rough = forward ? (fattn_tile){24, 64} : (fattn_tile){64, 24};
        const double want = predicted_bytes(&p, FATTN_IO_FLASH2, exact);
        const double got = fattn_io_plan_bytes(&p, exact.br, exact.bc, false);
        worst = worst_of(worst, fabs(got / want - 1));
        sum += fattn_io_plan_bytes(&p, rough.br, rough.bc, false) /
               predicted_bytes(&p, FATTN_IO_FLASH2, rough);
    }
    const char *const name = op == FATTN_FORWARD ? "forward" : "backward";
    tap_check(worst <= 1e-12, "%s plans of nested tiles are predicted: %.1e off", name, worst);
    tap_check(fabs(sum / KINDS - 1) <= 0.03, "%s plans of other tiles are on average: %.3f", name,
              sum / KINDS);
}

static void check_standard(fattn_op op)
{
    bool good = true;
    for (int kind = 0; kind < KINDS; kind++) {
        const fattn_problem p = planned(kind, op);
        const double want = predicted_bytes(&p, FATTN_IO_STANDARD, (fattn_tile){2000, 1});
        good = good && fabs(fattn_io_standard_bytes(&p) / want - 1) <= 1e-12;
    }
    tap_check(good, "%s of standard attention is predicted in closed form",
              op == FATTN_FORWARD ? "forward" : "backward");
}

static bool sees(const fattn_problem *p, int64_t i, int64_t j)
{
    const int64_t off = p->anchor == FATTN_BOTTOM_RIGHT ? p->seqlen_k - p->seqlen_q : 0;
    const int64_t distance = j - (i + off);
    return (p->window_left < 0 || distance >= -p->window_left) &&
           (p->window_right < 0 || distance <= p->window_right);
}

/* Counts pairs, and the rows and keys that have any, one by one. */
static void check_pairs(void)
{
    bool flops = true, bound = true, ordered = true;
    for (int kind = 0; kind < KINDS; kind++) {
        const fattn_problem p = planned(kind, FATTN_FORWARD);
        double pairs = 0, rows = 0, keys = 0;
        for (int64_t i = 0; i < p.seqlen_q; i++) {
            bool any = false;
            for (int64_t j = 0; j < p.seqlen_k; j++) {
                any = any || sees(&p, i, j);
                pairs += sees(&p, i, j);
            }
            rows += any;
        }
        for (int64_t j = 0; j < p.seqlen_k; j++) {
            bool any = false;
            for (int64_t i = 0; i < p.seqlen_q && !any; i++) any = sees(&p, i, j);
            keys += any;
        }
        const double heads_q = 2 * 6, heads_k = 2 * 2, n = (double)p.seqlen_q;
        const double least = 4 * (heads_q * (rows * 24 + n * 40 + n) + heads_k * keys * (24 + 40));
        flops = flops && fattn_io_flops(&p) == heads_q * pairs * 2 * (24 + 40);
        bound = bound && fattn_io_lower_bound_bytes(&p) == least;
        ordered = ordered && least <= fattn_io_plan_bytes(&p, 96, 32, false) * (1 + 1e-12);
    }
    tap_check(flops, "flops are those of the pairs inside the window");
    tap_check(bound, "the lower bound reads what is seen and writes every output");
    tap_check(ordered, "no plan moves less than the lower bound");
}

/* G heads of a group as rows of one block read keys and values once. */
static void check_packed(void)
{
    fattn_problem p = square(FATTN_FORWARD, 1, 64, 0);
    p.heads_q = 8, p.heads_k = 1, p.seqlen_k = 4096;
    normalise(&p);
    const double keys = 4096 * 128 * 4, rows = 8 * 128 * 4;
    tap_check(fattn_io_plan_bytes(&p, 8, 64, true) == keys + rows,
              "a packed group reads keys once");
    tap_check(fattn_io_plan_bytes(&p, 8, 64, false) == 8 * keys + rows,
              "an unpacked one once a head");

    /* Three heads in blocks of eight rows: r is position r / 3, and a block begins between
     * positions. */
    fattn_problem causal = square(FATTN_FORWARD, 500, 64, FATTN_CAUSAL);
    causal.heads_q = 3, causal.heads_k = 1;
    normalise(&causal);
    double seen = 0;
    for (int64_t r = 0; r < 1500; r += 8) {
        const int64_t last = (r + 7 < 1500 ? r + 7 : 1499) / 3, end = (last / 64 + 1) * 64;
        seen += (double)(end < 500 ? end : 500);
    }
    const double want = 4 * (seen * 128 + 1500 * 128);
    const double got = fattn_io_plan_bytes(&causal, 8, 64, true);
    tap_check(fabs(got / want - 1) < 0.005, "packed causal blocks: %.4f of what they read",
              got / want);
}

/* Broadcast tensors count once, and shared pages at most once each. */
static void check_shared(void)
{
    fattn_problem p = square(FATTN_FORWARD, 10, 4, 0);
    p.layout = FATTN_STRIDED;
    p.batch = 3, p.heads_q = p.heads_k = 2;
    p.q = p.o = (fattn_strides){80, 8, 4};
    p.k = (fattn_strides){0, 8, 4};
    p.v = (fattn_strides){0, 4, 0};
    normalise(&p);
    const double q = 3 * 2 * 10 * 4, k = 2 * 10 * 4, v = 10 * 4;
    tap_check(fattn_io_lower_bound_bytes(&p) == 4 * (2 * q + k + v),
              "broadcast inputs are read once");

    fattn_problem paged = square(FATTN_FORWARD, 1, 4, FATTN_PAGED);
    paged.batch = 16, paged.seqlen_k = 64;
    paged.page_size = 16, paged.num_pages = 8, paged.max_pages = 4;
    normalise(&paged);
    tap_check(fattn_io_lower_bound_bytes(&paged) == 4 * (16 * 4 * 2 + 2 * 8 * 16 * 4),
              "shared pages are read once");
}

/* Each tensor's own type counts. */
static void check_mixed(void)
{
    fattn_problem p = square(FATTN_FORWARD, 10, 4, 0);
    p.dtype_v = FATTN_F16;
    normalise(&p);
    const double each = 10 * 4;
    tap_check(fattn_io_lower_bound_bytes(&p) == 4 * 3 * each + 2 * each, "values of 16 bits");
    p.dtype_kv = FATTN_F16, p.dtype_v = FATTN_F32;
    normalise(&p);
    tap_check(fattn_io_lower_bound_bytes(&p) == 4 * 3 * each + 2 * each, "keys of 16 bits");
}

/* The largest legal lengths, with more heads than memory could hold, give finite, ordered
 * results. */
static void check_huge(fattn_op op)
{
    const double most = 0x1p31 - 1, heads = 0x1p40;
    fattn_problem p = square(op, 64, 64, FATTN_CAUSAL);
    normalise(&p);
    p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = (INT64_C(1) << 31) - 1;
    p.batch = p.heads_q = p.heads_k = INT64_C(1) << 20;
    const double least = fattn_io_lower_bound_bytes(&p), standard = fattn_io_standard_bytes(&p);
    const double plan = fattn_io_plan_bytes(&p, 128, 64, false);
    const double products = op == FATTN_FORWARD ? 2 : 5;
    const double flops = products * 2 * 64 * heads * most * (most + 1) / 2;
    tap_check(0 < least && least < plan && plan < standard && standard < 1e36,
              "%s of 2^31 x 2^31 and 2^40 heads moves %.2e, %.2e or %.2e bytes", op_name(&p), least,
              plan, standard);
    tap_check(fabs(fattn_io_flops(&p) / flops - 1) < 1e-12, "and takes %.3e flops", flops);
}

int main(int argc, char **argv)
{
    const int64_t cases = argc > 1 ? strtoll(argv[1], NULL, 10) : 300;
    check_by_hand();
    check_drawn(20260101, cases);
    check_windows();
    for (int op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        check_law(FATTN_IO_FLASH1, (fattn_op)op);
        check_law(FATTN_IO_FLASH2, (fattn_op)op);
        check_plans((fattn_op)op);
        check_standard((fattn_op)op);
        check_huge((fattn_op)op);
    }
    check_pairs();
    check_packed();
    check_shared();
    check_mixed();
    return tap_done();
}
