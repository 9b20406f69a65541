/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group L: semantics that users get wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/hazard.h"

enum { LENGTH_MAX = 6 };

/* Which keys each row attends to: q is 0 and v the identity, so o[i][j] is not 0 if i attends to
 * j. */
static bool visible(const place *at, const draw_case *c, char seen[LENGTH_MAX][LENGTH_MAX + 1])
{
    draw_case t = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, c->problem.seqlen_q,
                              c->problem.seqlen_k, LENGTH_MAX);
    t.problem.features = c->problem.features, t.problem.anchor = c->problem.anchor;
    t.problem.window_left = c->problem.window_left,
    t.problem.window_right = c->problem.window_right;
    bool good = hazard_build(&t) && hazard_takes(at, &t);
    for (int64_t n = 0; good && n < t.problem.seqlen_q * LENGTH_MAX; n++) {
        draw_set(&t, DRAW_Q, n, 0);
    }
    for (int64_t n = 0; good && n < t.problem.seqlen_k * LENGTH_MAX; n++) {
        draw_set(&t, DRAW_V, n, n / LENGTH_MAX == n % LENGTH_MAX);
    }
    good = good && hazard_check(hazard_run(at, &t, NULL) == FATTN_OK, "%s", fattn_last_reason());
    memset(seen, 0, LENGTH_MAX * (LENGTH_MAX + 1));
    for (int64_t i = 0; good && i < t.problem.seqlen_q; i++) {
        for (int64_t j = 0; j < t.problem.seqlen_k; j++) {
            seen[i][j] = draw_get(&t, DRAW_O, i * LENGTH_MAX + j) != 0 ? 'x' : '.';
        }
    }
    draw_free(&t);
    return good;
}

static draw_case masked(int64_t rows, int64_t keys, uint64_t features, fattn_anchor anchor,
                        int64_t left, int64_t right)
{
    draw_case c;
    draw_blank(&c, 0);
    c.problem.seqlen_q = rows, c.problem.seqlen_k = keys;
    c.problem.features = features, c.problem.anchor = anchor;
    c.problem.window_left = left, c.problem.window_right = right;
    return c;
}

/* Tables that a reader can check by eye. */
static void l1(void)
{
    static const struct {
        fattn_anchor anchor;
        int64_t rows, keys;
        const char *seen[5];
    } expected[] = {
        {FATTN_BOTTOM_RIGHT, 2, 5, {"xxxx.", "xxxxx"}},
        {FATTN_TOP_LEFT, 2, 5, {"x....", "xx..."}},
        {FATTN_BOTTOM_RIGHT, 5, 2, {"..", "..", "..", "x.", "xx"}},
        {FATTN_TOP_LEFT, 5, 2, {"x.", "xx", "xx", "xx", "xx"}},
        {FATTN_BOTTOM_RIGHT, 3, 3, {"x..", "xx.", "xxx"}},
        {FATTN_TOP_LEFT, 3, 3, {"x..", "xx.", "xxx"}},
    };
    EACH (e, expected) {
        for (int n = 0; n < hazard_place_count; n++) {
            char seen[LENGTH_MAX][LENGTH_MAX + 1];
            const draw_case c = masked(expected[e].rows, expected[e].keys, FATTN_CAUSAL,
                                       expected[e].anchor, -1, -1);
            for (int64_t i = 0; visible(&hazard_places[n], &c, seen) && i < expected[e].rows; i++) {
                hazard_check(strcmp(seen[i], expected[e].seen[i]) == 0,
                             "%s: table %zu, row %lld sees %s, expected %s",
                             hazard_places[n].kernel->name, e, (long long)i, seen[i],
                             expected[e].seen[i]);
            }
        }
    }
    fattn_problem p;
    fattn_problem_init(&p);
    hazard_check(p.anchor == FATTN_BOTTOM_RIGHT, "bottom-right is not the default");
}

/* keep = -left <= j - (i + off) <= right, closed, -1 unbounded; causal makes right 0. */
static void check_window(const place *at, const draw_case *c)
{
    char seen[LENGTH_MAX][LENGTH_MAX + 1];
    const fattn_problem *const p = &c->problem;
    if (!visible(at, c, seen)) {
        return;
    }
    const int64_t off = p->anchor == FATTN_BOTTOM_RIGHT ? p->seqlen_k - p->seqlen_q : 0;
    const int64_t right = p->features & FATTN_CAUSAL ? 0 : p->window_right;
    for (int64_t i = 0; i < p->seqlen_q; i++) {
        for (int64_t j = 0; j < p->seqlen_k; j++) {
            const int64_t distance = j - (i + off);
            const bool keep = (p->window_left < 0 || distance >= -p->window_left) &&
                              (right < 0 || distance <= right);
            hazard_check(
                (seen[i][j] == 'x') == keep,
                "%s: %lld x %lld, window (%lld, %lld), features 0x%llx, anchor %d: row %lld %s "
                "key %lld",
                at->kernel->name, (long long)p->seqlen_q, (long long)p->seqlen_k,
                (long long)p->window_left, (long long)p->window_right,
                (unsigned long long)p->features, (int)p->anchor, (long long)i,
                keep ? "misses" : "sees", (long long)j);
        }
    }
}

static void l2(void)
{
    static const int64_t sizes[][2] = {{1, 1}, {1, 6}, {6, 1}, {3, 5}, {5, 3}, {6, 6}};
    EACH (s, sizes) {
        for (int64_t left = -1; left <= LENGTH_MAX; left++) {
            for (int64_t right = -1; right <= LENGTH_MAX; right++) {
                for (int more = 0; more < 4; more++) {
                    const draw_case c = masked(
                        sizes[s][0], sizes[s][1], FATTN_WINDOW | (more & 1 ? FATTN_CAUSAL : 0),
                        more & 2 ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT, left, right);
                    for (int n = 0; n < hazard_place_count; n++) {
                        check_window(&hazard_places[n], &c);
                    }
                }
            }
        }
    }
    static const int64_t bad[][2] = {{-2, 0}, {0, -2}, {INT64_MIN, 3}};
    EACH (b, bad) {
        draw_case c = masked(3, 3, FATTN_WINDOW, FATTN_BOTTOM_RIGHT, bad[b][0], bad[b][1]);
        c.problem.dim = c.problem.dim_v = 4;
        const fattn_status status = fattn_support(hazard_places[0].device, &c.problem);
        hazard_check(status == FATTN_INVALID_ARGUMENT, "window (%lld, %lld): %s",
                     (long long)bad[b][0], (long long)bad[b][1], fattn_status_string(status));
    }
}

/* A plan prints every size with its name, and both contiguous layouts are the same tensors. */
static void l3(void)
{
    static const fattn_layout layouts[] = {FATTN_BSHD, FATTN_BHSD};
    for (int n = 0; n < hazard_place_count; n++) {
        double o[2][3 * 5 * 4 * 8];
        EACH (l, layouts) {
            draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 3, 4, 2, 5, 7, 8);
            c.problem.layout = layouts[l];
            fattn_plan *plan = NULL;
            if (!hazard_build(&c) || !hazard_takes(&hazard_places[n], &c) ||
                fattn_plan_create_with(hazard_places[n].device, &c.problem,
                                       hazard_places[n].kernel->name, NULL, &plan) != FATTN_OK) {
                draw_free(&c);
                continue;
            }
            char words[8192];
            static const char *const names[] = {"B 3",  "Hq 4", "Hk 2", "Sq 5",
                                                "Sk 7", "D 8",  "Dv 8"};
            fattn_plan_describe(plan, words, sizeof words);
            EACH (name, names) {
                hazard_check(strstr(words, names[name]) != NULL, "%s: the plan does not say %s",
                             hazard_places[n].kernel->name, names[name]);
            }
            /* The same values, tensor by tensor, whatever the layout. */
            for (draw_id id = DRAW_Q; id <= DRAW_V; id++) {
                const int64_t rows = id == DRAW_Q ? 5 : 7, heads = id == DRAW_Q ? 4 : 2;
                for (int64_t m = 0; m < 3 * rows * heads * 8; m++) {
                    draw_rng rng = draw_stream(3, m, id);
                    draw_set(&c, id,
                             draw_at(&c, id, m / (rows * heads * 8), m / (heads * 8) % rows,
                                     m / 8 % heads, m % 8),
                             draw_normal(&rng));
                }
            }
            hazard_check(hazard_execute(plan, &c.buffers) == FATTN_OK, "%s", fattn_last_reason());
            for (int64_t m = 0; m < 3 * 5 * 4 * 8; m++) {
                o[l][m] = draw_get(&c, DRAW_O,
                                   draw_at(&c, DRAW_O, m / 160, m / 32 % 5, m / 8 % 4, m % 8));
            }
            fattn_plan_destroy(plan);
            draw_free(&c);
            hazard_check(l == 0 || memcmp(o[0], o[1], sizeof o[0]) == 0, "%s: layouts disagree",
                         hazard_places[n].kernel->name);
        }
    }
}

/* Hides key j from all rows, by the bias or else the mask, and writes x to one of its channels. */
static void hide_key(draw_case *c, int64_t j, draw_id id, double x)
{
    const bool biased = c->problem.features & FATTN_BIAS;
    const draw_id by = biased ? DRAW_BIAS : DRAW_MASK;
    for (int64_t n = 0; n < c->problem.batch * c->problem.heads_q * c->problem.seqlen_q; n++) {
        const int64_t h = n / c->problem.seqlen_q, i = n % c->problem.seqlen_q;
        draw_set(c, by, draw_at(c, by, 0, h, i, j), biased ? -(double)INFINITY : 0);
    }
    for (int64_t hk = 0; hk < c->problem.heads_k; hk++) {
        draw_set(c, id, draw_at(c, id, 0, j, hk, j % c->problem.dim), x);
    }
}

/* Prefill and decoding. */
static draw_case biased(fattn_op op, fattn_dtype dtype, int64_t rows, int64_t keys)
{
    draw_case c = hazard_case(op, dtype, 1, rows == 1 ? 3 : 1, 1, rows, keys, 64);
    c.problem.features = FATTN_BIAS;
    c.problem.dtype_bias = rows % 2 ? dtype : FATTN_F32;
    return c;
}

static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};

/* NaN and infinities in hidden keys: every third key, the last fifth, and those of whole tiles. */
static void l4(void)
{
    static const uint64_t others[] = {0, FATTN_ALIBI, FATTN_SOFTCAP, FATTN_CAUSAL, FATTN_MASK};
    static const double wild[] = {NAN, INFINITY, -INFINITY};
    const int64_t most = hazard_emulated() ? 100 : 528; /* from 513 keys on tiles are looked at */
    EACH (d, dtypes) {
        EACH (o, others) {
            const int64_t step = hazard_emulated() ? 69 : others[o] ? 264 : 132;
            for (int64_t rows = 1; rows < most; rows += step) {
                draw_case c = biased(FATTN_FORWARD, dtypes[d], rows, most);
                c.problem.features |= others[o];
                c.problem.softcap = others[o] == FATTN_SOFTCAP ? 20 : 0;
                const bool built = hazard_build(&c);
                for (int64_t j = 0; built && j < c.problem.seqlen_k; j++) {
                    if (j % 3 == 1 || j >= most * 4 / 5 || (j >= 128 && j < 256)) {
                        hide_key(&c, j, DRAW_K, wild[j / 3 % 3]);
                    }
                }
                if (built) {
                    hazard_judge(&c, 2, "%lld rows, features %llx", (long long)rows,
                                 (unsigned long long)others[o]);
                } else {
                    draw_free(&c);
                }
            }
        }
    }
}

/* A bias that sequences share, of which each head hides another number of keys: what one head hides
 * must not be skipped for another. */
static void l4_heads(void)
{
    enum { ROWS = 70, KEYS = 528, HEADS = 3 };
    EACH (d, dtypes) {
        draw_case c = hazard_case(FATTN_FORWARD, dtypes[d], 2, HEADS, HEADS, ROWS, KEYS, 64);
        const int64_t stride[4] = {0, ROWS * KEYS, KEYS, 1};
        c.problem.features = FATTN_BIAS;
        c.problem.dtype_bias = dtypes[d];
        memcpy(c.problem.bias_stride, stride, sizeof stride);
        if (!hazard_build(&c)) {
            draw_free(&c);
            continue;
        }
        for (int64_t n = 0; n < HEADS * ROWS * KEYS; n++) {
            const int64_t h = n / KEYS / ROWS, j = n % KEYS;
            draw_rng rng = draw_stream(17, n, DRAW_BIAS);
            draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, 0, h, n / KEYS % ROWS, j),
                     j < 60 + 130 * h ? draw_normal(&rng) : -(double)INFINITY);
        }
        hazard_judge(&c, 2, "a bias of %d heads", HEADS);
    }
}

/* Rows that begin and end with -inf, or with 0, and differ between, one of them earlier than the
 * others: what a single row has must not be taken for hidden or unbiased, nor what lies between two
 * runs of one number. The odd row is the first, the last or the middle one. Both runs are longer
 * than a vector, among the first 64 keys too. The same with a mask, of whose keys the rows see only
 * the outer or only the others. */
enum { ODD_ROWS = 71, ODD_KEYS = 203 };

static void check_odd_row(int odd, bool masks, bool hides, fattn_dtype dtype)
{
    static const int begin[2][3] = {{28, 30, 34}, {20, 24, 40}};
    const double outer = masks ? !hides : hides ? -(double)INFINITY : 0;
    const draw_id id = masks ? DRAW_MASK : DRAW_BIAS;
    draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 1, 1, ODD_ROWS, ODD_KEYS, 64);
    const int64_t stride[4] = {0, 0, ODD_KEYS, 1};
    c.problem.features = masks ? FATTN_MASK : FATTN_BIAS;
    c.problem.dtype_bias = masks ? FATTN_DTYPE_DEFAULT : dtype;
    memcpy(masks ? c.problem.mask_stride : c.problem.bias_stride, stride, sizeof stride);
    if (!hazard_build(&c)) {
        draw_free(&c);
        return;
    }
    for (int64_t n = 0; n < ODD_ROWS * ODD_KEYS; n++) {
        const int64_t i = n / ODD_KEYS, j = n % ODD_KEYS;
        const int *const from = begin[i == odd];
        draw_set(&c, id, draw_at(&c, id, 0, 0, i, j),
                 j < from[0] || j >= from[2] ? outer
                 : masks                     ? hides
                 : j < from[1]               ? 3
                                             : -2);
    }
    hazard_judge(&c, 2, "row %d alone has its %s, %g outside", odd, masks ? "mask" : "bias", outer);
}

static void l4_rows(void)
{
    const int kinds = hazard_emulated() ? 1 : 2; /* no GPU takes a mask for ranges */
    for (int masks = 0; masks < kinds; masks++) {
        for (int hides = 0; hides < 2; hides++) {
            for (int odd = 0; odd < ODD_ROWS; odd += ODD_ROWS / 2) {
                EACH (d, dtypes) {
                    check_odd_row(odd, masks, hides, dtypes[d]);
                }
            }
        }
    }
}

enum { PLAIN_ROWS = 66, PLAIN_KEYS = 576, PLAIN_HEADS = 2 };

/* A case with a bias or a mask whose rows begin at multiples of 16 bytes, which kernels read in
 * another way: the first of so many draws. heads: each has one of its own. */
static bool build_aligned(draw_case *c, fattn_dtype dtype, uint64_t feature, int64_t dim,
                          bool heads)
{
    const int64_t stride[4] = {0, heads ? PLAIN_ROWS * PLAIN_KEYS : 0, PLAIN_KEYS, 1};
    for (uint64_t n = 0; n < 200; n++) {
        *c = hazard_case(FATTN_FORWARD, dtype, 1, PLAIN_HEADS, 1, PLAIN_ROWS, PLAIN_KEYS, dim);
        c->seed += n;
        c->problem.features = feature;
        c->problem.dtype_bias = feature == FATTN_BIAS ? dtype : FATTN_DTYPE_DEFAULT;
        memcpy(feature == FATTN_BIAS ? c->problem.bias_stride : c->problem.mask_stride, stride,
               sizeof stride);
        const draw_tensor *const t = &c->tensors[feature == FATTN_BIAS ? DRAW_BIAS : DRAW_MASK];
        if (hazard_build(c) && t->stride[3] == 1 &&
            (t->offset | t->stride[1] * t->size | t->stride[2] * t->size) % 16 == 0) {
            return true;
        }
        draw_free(c);
    }
    return hazard_check(false, "no draw is aligned");
}

/* Masks, and biases that are masks: 0 where a row sees a key, and -inf elsewhere. Tiles where all
 * is seen are not read, and what one row of one head has there must not be lost: another number, or
 * a key that is hidden. Keys are hidden behind a causal mask, before one that a padded sequence
 * begins at, and between two. */
static void l4_plain(void)
{
    static const int64_t widths[] = {64, 128, 200};
    const bool few = hazard_emulated() || hazard_on_host(&hazard_places[0]);
    for (int n = 0; n < (few ? 6 : 36); n++) {
        const fattn_dtype dtype = dtypes[n % 3];
        const uint64_t feature = n / 3 % 2 ? FATTN_MASK : FATTN_BIAS;
        const draw_id id = feature == FATTN_BIAS ? DRAW_BIAS : DRAW_MASK;
        const int kind = (n + n / 6) % 3, padded = n % 4 < 2 ? 150 : 0, gap = n % 5 < 2 ? 240 : 0;
        const int64_t odd[3] = {kind % PLAIN_HEADS, 3 + 20 * (n % 4), 160 + 57 * (n % 5)};
        draw_case c;
        if (!build_aligned(&c, dtype, feature, widths[n % 5 % 3], kind > 0)) {
            continue;
        }
        for (int64_t e = 0; e < (kind ? PLAIN_HEADS : 1) * PLAIN_ROWS * PLAIN_KEYS; e++) {
            const int64_t h = e / PLAIN_KEYS / PLAIN_ROWS, i = e / PLAIN_KEYS % PLAIN_ROWS;
            const int64_t j = e % PLAIN_KEYS;
            const bool alone = kind && h == odd[0] && i == odd[1] && j == odd[2];
            const bool hidden = j < padded || (j >= 250 && j < 250 + gap);
            const bool seen = !hidden && j <= i + PLAIN_KEYS - PLAIN_ROWS;
            const double bias = alone ? 4 : seen ? 0 : -(double)INFINITY;
            draw_set(&c, id, draw_at(&c, id, 0, h, i, j),
                     feature == FATTN_BIAS ? bias : seen && !alone);
        }
        hazard_judge(&c, 2, "%d padded, %d between, kind %d, dtype %d, feature %llx", padded, gap,
                     kind, (int)dtype, (unsigned long long)feature);
    }
    /* No sequence has a bias that all would share. */
    draw_case none =
        hazard_case(FATTN_FORWARD, FATTN_F16, 0, PLAIN_HEADS, 1, PLAIN_ROWS, PLAIN_KEYS, 64);
    none.problem.features = FATTN_BIAS | FATTN_CU_SEQLENS_Q;
    none.problem.dtype_bias = FATTN_F16;
    if (!hazard_build(&none)) {
        draw_free(&none);
        return;
    }
    for (int axis = 0; axis < 2; axis++) {
        none.problem.bias_stride[axis] = none.tensors[DRAW_BIAS].stride[axis] = 0;
    }
    hazard_judge(&none, 0, "an empty batch");
}

/* A row that sees the first keys of the second 64 alone, under a window that begins a few keys
 * before them. The bias is misaligned by as many numbers: 16 bytes of it, from a multiple of 16 on,
 * hold those hidden keys and these. */
static void l4_ends(void)
{
    enum { FIRST = 64, WINDOW = 144 };
    bool met[9] = {false};
    for (int m = 0; m < 180; m++) {
        const int ahead = 1 + m / 3 % 3;
        const int64_t keys = FIRST - ahead + WINDOW;
        draw_case c = hazard_case(FATTN_BACKWARD, dtypes[m % 3], 1, 1, 1, 1, keys, 64);
        c.seed = (uint64_t)m;
        c.problem.features = FATTN_BIAS | FATTN_WINDOW;
        c.problem.window_left = WINDOW - 1, c.problem.window_right = -1;
        c.problem.dtype_bias = dtypes[m % 3];
        const bool built = hazard_build(&c);
        draw_tensor *const bias = &c.tensors[DRAW_BIAS];
        if (!built || met[m % 9] || (bias->offset / bias->size - ahead) % (16 / bias->size)) {
            draw_free(&c);
            continue;
        }
        for (int axis = 0; axis < 3; axis++) { /* each has one entry */
            c.problem.bias_stride[axis] = bias->stride[axis] = 256;
        }
        for (int64_t j = 0; j < keys; j++) {
            const bool seen = j >= FIRST && j < FIRST - ahead + 16 / bias->size;
            draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, 0, 0, 0, j),
                     seen ? 0.5 : -(double)INFINITY);
        }
        met[m % 9] = true;
        hazard_judge(&c, 0, "%d keys before it, dtype %d", ahead, (int)dtypes[m % 3]);
    }
    for (int n = 0; n < 9; n++) {
        hazard_check(met[n], "no bias of dtype %d is misaligned by %d", (int)dtypes[n % 3],
                     1 + n / 3);
    }
}

/* How names of rows of backend cuda begin that leave out more tiles than others do. */
static const char f32_rows[] = "bf16x3_full", backward_rows[] = "wgmma_backward_full",
                  forward_rows[] = "wgmma_full";

/* Several sequences whose keys one tensor holds: the keys that query i sees, as inference engines
 * say with a bias or a mask. */
typedef enum apart { IN_ORDER, BACKWARDS, BY_PAIRS, BY_TURNS, ONE_SEES_ALL, SOME_SEE_NONE } apart;

static bool sees_own(apart kind, int64_t i, int64_t j, int64_t rows, int64_t keys)
{
    const int64_t own = j * rows / keys;
    switch (kind) {
    case BACKWARDS: return own == rows - 1 - i;
    case BY_PAIRS: return own / 2 == i / 2;
    case BY_TURNS: return j % rows == i;
    case ONE_SEES_ALL: return own == i || i == rows / 2;
    case SOME_SEE_NONE: return own == i && i % 3 != 1;
    default: return own == i;
    }
}

static void hide_others(draw_case *c, apart kind)
{
    const fattn_problem *const p = &c->problem;
    const bool bias = p->features & FATTN_BIAS;
    const int64_t rows = p->seqlen_q, keys = p->seqlen_k;
    for (int64_t n = 0; n < rows * keys; n++) {
        const bool sees = sees_own(kind, n / keys, n % keys, rows, keys);
        const draw_id id = bias ? DRAW_BIAS : DRAW_MASK;
        draw_set(c, id, draw_at(c, id, 0, 0, n / keys, n % keys),
                 bias ? sees ? (double)(n % 3) / 2 : -(double)INFINITY : sees);
    }
}

/* A forward whose heads share the bias or mask. Some have queries of several rows, which blocks of
 * 16 rows cut in two. */
static bool build_apart(draw_case *c, int64_t queries, fattn_dtype dtype, uint64_t features)
{
    const int64_t keys = hazard_emulated() ? 300 : 1300, heads = queries % 2 ? 3 : 4;
    const bool bias = features & FATTN_BIAS;
    for (uint64_t seed = 0; seed < 100; seed++) {
        *c =
            hazard_case(FATTN_FORWARD, dtype, 1, heads, queries % 2 ? 1 : heads, queries, keys, 64);
        c->seed = seed;
        c->problem.features = features;
        c->problem.dtype_bias = bias ? dtype : FATTN_DTYPE_DEFAULT;
        draw_tensor *const t = &c->tensors[bias ? DRAW_BIAS : DRAW_MASK];
        if (hazard_build(c) && t->stride[2] != 0 && t->stride[3] != 0) {
            (bias ? c->problem.bias_stride : c->problem.mask_stride)[1] = t->stride[1] = 0;
            return true;
        }
        draw_free(c);
    }
    return hazard_check(false, "no draw has a row for each query");
}

static void l4_apart(void)
{
    static const uint64_t features[] = {FATTN_BIAS, FATTN_MASK, FATTN_BIAS | FATTN_SINK,
                                        FATTN_MASK | FATTN_WINDOW,
                                        FATTN_BIAS | FATTN_ALIBI | FATTN_ALIBI_BIAS};
    int n = 0;
    EACH (f, features) {
        if (features[f] & FATTN_ALIBI_BIAS && !hazard_on_host(&hazard_places[0])) {
            continue;
        }
        for (int kind = IN_ORDER; kind <= SOME_SEE_NONE; kind++, n++) {
            const int64_t queries = 2 + (5 * n) % 14;
            draw_case c;
            if (build_apart(&c, queries, dtypes[n % 3], features[f])) {
                hide_others(&c, (apart)kind);
                hazard_judge(&c, 3, "%lld queries, kind %d, features %llx, dtype %d",
                             (long long)queries, kind, (unsigned long long)features[f],
                             (int)dtypes[n % 3]);
            }
        }
    }
}

static bool begins(const fattn_kernel *row, const char *with)
{
    return strncmp(row->name, with, strlen(with)) == 0;
}

/* Whether tiles that a bias or a mask hides are not multiplied, wherever they are. */
static bool skips(const place *at)
{
    return strcmp(at->backend, "cpu") == 0 || begins(at->kernel, f32_rows) ||
           begins(at->kernel, backward_rows);
}

static bool has_row(fattn_device *device, const char *beginning)
{
    const fattn_kernel *row;
    const char *missing;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        if (begins(row, beginning)) {
            return true;
        }
    }
    return false;
}

/* Were these rows renamed, l5() would pass without them. A build may be without Hopper's. */
static void check_names(fattn_device *device)
{
    const bool hopper = has_row(device, "wgmma_");
    const char *const names[] = {f32_rows, backward_rows, forward_rows};
    for (int n = 0; n < (hopper ? 3 : 1); n++) {
        hazard_check(has_row(device, names[n]), "no row's name begins with %s", names[n]);
    }
}

/* A NaN among the values of such tiles has no effect; times a weight of 0 it would be a NaN. Tiles
 * of all rows end at multiples of 384 keys. */
static void check_skipped(const place *at, fattn_op op, fattn_dtype dtype, uint64_t feature,
                          int64_t rows)
{
    const int64_t keys = hazard_on_host(at) ? 1160 : 2312; /* more than 32 tiles */
    const draw_id out = op == FATTN_FORWARD ? DRAW_O : DRAW_DQ;
    draw_case c = biased(op, dtype, rows, keys);
    const int64_t heads = c.problem.heads_q, dim = c.problem.dim;
    c.problem.features = feature;
    c.problem.dtype_bias = feature == FATTN_BIAS ? c.problem.dtype_bias : FATTN_DTYPE_DEFAULT;
    bool good = !hazard_spares(at, &c) && hazard_build(&c) && draw_save(&c) == FATTN_OK &&
                hazard_takes(at, &c);
    for (int64_t j = 0; good && j < keys; j++) {
        if (j / 384 % 2) {
            hide_key(&c, j, DRAW_V, NAN);
        }
    }
    good = good && hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t m = 0; good && m < rows * heads * dim; m++) {
        const int64_t n = draw_at(&c, out, 0, m / dim / heads, m / dim % heads, m % dim);
        good =
            hazard_check(isfinite(draw_get(&c, out, n)), "%s: %lld rows: a hidden tile is computed",
                         at->kernel->name, (long long)rows);
    }
    draw_free(&c);
}

/* wgmma_full_* computes rows by 64, in items of up to 192. The first NEAR rows of an item skip a
 * key tile that only later rows of the item attend to. */
#define NEAR 128
static bool skips_near(const place *at) { return begins(at->kernel, forward_rows); }

/* On a GPU hidden tiles at the end of a row's keys are not multiplied, and in backward those at the
 * beginning of a key's queries, as under a causal mask: a NaN there, among values or dO, has no
 * effect on rows, or keys, further than a tile away, or, if they are near, on the first ones. */
static void check_causal_bias(const place *at, fattn_op op, fattn_dtype dtype, bool near)
{
    enum { KEYS = 640, DIM = 64 };          /* up to 512 keys may be computed whole */
    const fattn_wish whole = {.splits = 1}; /* rows of mma.c compute the first tile of a part */
    const bool forward = op == FATTN_FORWARD;
    const int64_t nans = near ? KEYS - NEAR : 64, far = near ? NEAR : 256;
    draw_case c = biased(op, dtype, KEYS, KEYS);
    c.problem.dtype_bias = near ? dtype : c.problem.dtype_bias;
    bool good = !hazard_spares(at, &c) && hazard_build(&c) && hazard_takes(at, &c);
    for (int64_t n = 0; good && n < KEYS * KEYS; n++) {
        const int64_t i = n / KEYS, j = n % KEYS;
        if (j > i) {
            draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, 0, 0, i, j), -(double)INFINITY);
        }
    }
    good = good && draw_save(&c) == FATTN_OK;
    for (int64_t n = 0; good && n < nans * DIM; n++) {
        const int64_t row = n / DIM + (forward ? KEYS - nans : 0);
        const draw_id id = forward ? DRAW_V : DRAW_DOUT;
        draw_set(&c, id, draw_at(&c, id, 0, row, 0, n % DIM), NAN);
    }
    const fattn_wish *const wish = at->kernel->split ? &whole : NULL;
    good = good && hazard_check(hazard_run(at, &c, wish) == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t n = 0; good && n < far * DIM; n++) {
        const int64_t row = n / DIM + (forward ? 0 : KEYS - far);
        const draw_id id = forward ? DRAW_O : DRAW_DV;
        good = hazard_check(isfinite(draw_get(&c, id, draw_at(&c, id, 0, row, 0, n % DIM))),
                            "%s, dtype %d: row %lld is reached by a hidden tile", at->kernel->name,
                            (int)dtype, (long long)row);
    }
    draw_free(&c);
}

static void check_hidden(const place *at, fattn_op op, fattn_dtype dtype)
{
    if (!hazard_on_host(at)) {
        check_causal_bias(at, op, dtype, false);
    }
    if (skips_near(at) && op == FATTN_FORWARD) {
        check_causal_bias(at, op, dtype, true);
    }
    for (int64_t rows = 1; rows <= 141 && skips(at); rows += 70) {
        check_skipped(at, op, dtype, FATTN_BIAS, rows);
        check_skipped(at, op, dtype, FATTN_MASK, rows);
    }
}

static void l5(void)
{
    if (strcmp(hazard_places[0].backend, "cuda") == 0) {
        check_names(hazard_places[0].device);
    }
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (d, dtypes) {
            check_hidden(&hazard_places[n], FATTN_FORWARD, dtypes[d]);
            check_hidden(&hazard_places[n], FATTN_BACKWARD, dtypes[d]);
        }
    }
}

/* Decoding does not multiply a row with the keys of other sequences: a NaN among their values would
 * reach it, times a weight of 0. */
static void l5_apart(void)
{
    if (!hazard_on_host(&hazard_places[0])) {
        hazard_skip("GPUs multiply the rows of a tile together");
        return;
    }
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        if (!strstr(at->kernel->name, "_decode") || strcmp(at->backend, "cpu") != 0) {
            continue;
        }
        EACH (d, dtypes) {
            draw_case c;
            if (!build_apart(&c, 4, dtypes[d], FATTN_BIAS)) {
                continue;
            }
            bool good = draw_save(&c) == FATTN_OK && hazard_takes(at, &c);
            const int64_t keys = c.problem.seqlen_k, heads = c.problem.heads_q;
            hide_others(&c, IN_ORDER);
            for (int64_t h = 0; h < c.problem.heads_k; h++) {
                draw_set(&c, DRAW_V, draw_at(&c, DRAW_V, 0, keys / 8, h, 0), NAN);
            }
            good = good &&
                   hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
            for (int64_t m = 0; good && m < 4 * heads; m++) {
                const double x =
                    draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, m / heads, m % heads, 0));
                good = hazard_check(isnan(x) == (m < heads), "%s: row %lld is %g", at->kernel->name,
                                    (long long)(m / heads), x);
            }
            draw_free(&c);
        }
    }
}

/* What a pattern leaves of tiles of 64 queries and 128 keys, or 64: documents of unlike lengths, a
 * band, some at random, or those of the first keys; in each nobody sees one tile of keys. */
typedef enum pattern { DOCUMENTS, BAND, SCATTERED, FIRST_KEYS, PATTERNS } pattern;

static bool is_left(pattern kind, int64_t head, int64_t queries, int64_t keys)
{
    draw_rng rng = draw_stream(41, queries * 64 + keys, (int)head);
    return keys != 2 && (kind == DOCUMENTS   ? (queries + 1) / 3 == keys / 2
                         : kind == BAND      ? queries - keys >= 0 && queries - keys < 2
                         : kind == SCATTERED ? draw_chance(&rng, 3)
                                             : keys == 0);
}

/* Backward of masks, biases and block masks that leave a few tiles: the others may be skipped, and
 * none may be visited twice. In a tile that is hidden otherwise one pair is kept. Rows begin at
 * multiples of 16 bytes, so that kernels for one feature take them. */
static void l5_backward(void)
{
    enum { ROWS = 260, KEYS = 464, HEADS = 2 };
    static const uint64_t features[] = {FATTN_MASK, FATTN_BIAS, FATTN_BLOCK_MASK};
    static const int64_t dims[] = {64, 128, 256};
    const int64_t most = hazard_places[0].kernel->dim_max;
    if (hazard_emulated()) {
        hazard_skip("large, and tiles between others are not left out there");
        return;
    }
    for (int n = 0; n < 24; n += hazard_on_host(&hazard_places[0]) ? 5 : 1) {
        const uint64_t feature = features[n % 3];
        const bool blocks = feature == FATTN_BLOCK_MASK, own = n / 12;
        const pattern kind = (pattern)(n / 3 % PATTERNS);
        const draw_id id = blocks ? DRAW_BLOCK_MASK : n % 3 ? DRAW_BIAS : DRAW_MASK;
        const int64_t dim = hazard_place_count == 1 && most <= 256 ? most : dims[n / 3 % 3];
        const int64_t tile = blocks && dim > 128 ? 64 : 128, batch = 1 + n / 3 % 2;
        const int64_t m = blocks ? 64 : 1, k = blocks ? tile : 1;
        const int64_t r = (ROWS + m - 1) / m, s = (KEYS + k - 1) / k;
        const int64_t stride[4] = {0, own ? r * s : 0, s, 1}; /* heads have their own, or share */
        draw_case c = hazard_case(FATTN_BACKWARD, n % 2 ? FATTN_F16 : FATTN_BF16, batch, HEADS,
                                  own ? HEADS : 1, ROWS, KEYS, dim);
        c.problem.features = feature;
        c.problem.dtype_bias = id == DRAW_BIAS ? c.problem.dtype : FATTN_DTYPE_DEFAULT;
        c.problem.block_m = blocks ? m : 0, c.problem.block_n = blocks ? k : 0;
        c.problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        memcpy(blocks            ? c.problem.block_mask_stride
               : id == DRAW_BIAS ? c.problem.bias_stride
                                 : c.problem.mask_stride,
               stride, sizeof stride);
        if (!hazard_build(&c)) {
            draw_free(&c);
            continue;
        }
        for (int64_t e = 0; e < (own ? HEADS : 1) * ROWS * KEYS; e++) {
            const int64_t j = e % KEYS, i = e / KEYS % ROWS, h = e / KEYS / ROWS;
            const bool alone = !blocks && i == 70 && j == 300; /* a key that nobody else sees */
            const bool left = alone || is_left(kind, h, i / 64, j / tile);
            if (i % m == 0 && j % k == 0) {
                draw_set(&c, id, draw_at(&c, id, 0, h, i / m, j / k),
                         id != DRAW_BIAS ? left
                         : left          ? 0.25
                                         : -(double)INFINITY);
            }
        }
        hazard_judge(&c, -1, "%d channels, features %llx, pattern %d", (int)dim,
                     (unsigned long long)feature, (int)kind);
    }
}

/* A case whose rows each attend to one key, lone(i): by a window, a mask, a bias, or as the only
 * one. Entries of q and k are 0 or `large`, so that scores are about 100. */
typedef enum lone_kind {
    LONE_WINDOW,
    LONE_KEY,
    LONE_MASK,
    LONE_BIAS,
    LONE_ALIBI,
    LONE_KINDS
} lone_kind;

static int64_t lone_key(const draw_case *c, int64_t i) { return i * 7 % c->problem.seqlen_k; }

static draw_case lone_rows(lone_kind kind, fattn_dtype dtype, int64_t dim)
{
    static const uint64_t features[] = {FATTN_WINDOW, 0, FATTN_MASK, FATTN_BIAS,
                                        FATTN_MASK | FATTN_ALIBI};
    draw_case c = hazard_case(FATTN_BACKWARD, dtype, 1, 1, 1, kind == LONE_KEY ? 4 : 61,
                              kind == LONE_KEY ? 1 : 61, dim);
    c.problem.features = features[kind];
    if (kind == LONE_WINDOW) {
        c.problem.window_left = c.problem.window_right = 0;
    }
    if (kind == LONE_BIAS) {
        c.problem.dtype_bias = FATTN_F32;
    }
    return c;
}

static void fill_lone(draw_case *c, lone_kind kind)
{
    const fattn_problem *const p = &c->problem;
    for (draw_id id = DRAW_Q; id <= DRAW_K; id++) {
        const int64_t rows = id == DRAW_Q ? p->seqlen_q : p->seqlen_k;
        for (int64_t n = 0; n < rows * p->dim; n++) {
            draw_rng rng = draw_stream(11, n, id);
            draw_set(c, id, draw_at(c, id, 0, n / p->dim, 0, n % p->dim),
                     (4 + draw_normal(&rng)) * 10 / sqrt(sqrt((double)p->dim)) / 4);
        }
    }
    for (int64_t n = 0; kind >= LONE_MASK && n < p->seqlen_q * p->seqlen_k; n++) {
        const int64_t i = n / p->seqlen_k, j = n % p->seqlen_k;
        const bool kept = j == lone_key(c, i);
        const draw_id id = kind == LONE_BIAS ? DRAW_BIAS : DRAW_MASK;
        draw_set(c, id, draw_at(c, id, 0, 0, i, j),
                 id == DRAW_MASK ? kept
                 : kept          ? 0.25
                                 : -(double)INFINITY);
    }
}

/* dV of key j is the plain sum of its rows' dO, rounded once: sums of four numbers of few bits. */
static bool is_plain_sum(const draw_case *c, lone_kind kind, int64_t j, int64_t channel)
{
    double sum = 0;
    for (int64_t i = 0; i < c->problem.seqlen_q; i++) {
        const int64_t key = kind == LONE_WINDOW ? i : lone_key(c, i);
        sum += key == j ? draw_get(c, DRAW_DOUT, draw_at(c, DRAW_DOUT, 0, i, 0, channel)) : 0;
    }
    return draw_get(c, DRAW_DV, draw_at(c, DRAW_DV, 0, j, 0, channel)) == sum;
}

/* lse from the forward at the same place, or from the oracle, is rounded. */
static void check_lone(const place *at, lone_kind kind, int64_t dim, fattn_dtype dtype)
{
    draw_case c = lone_rows(kind, dtype, dim);
    bool good = hazard_build(&c) && hazard_takes(at, &c);
    if (good) {
        fill_lone(&c, kind);
        for (int64_t n = 0; n < c.problem.seqlen_q * dim; n++) {
            const int64_t to = draw_at(&c, DRAW_DOUT, 0, n / dim, 0, n % dim);
            draw_set(&c, DRAW_DOUT, to, (double)(n * 37 % 61 - 30) / 32);
        }
        good = draw_save(&c) == FATTN_OK &&
               hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    }
    for (int64_t n = 0; good && n < c.problem.seqlen_k * dim; n++) {
        good = hazard_check(is_plain_sum(&c, kind, n / dim, n % dim),
                            "%s, dtype %d, kind %d, dim %lld: dV is not the sum of dO",
                            at->kernel->name, (int)dtype, (int)kind, (long long)dim);
    }
    draw_free(&c);
}

static void l6(void)
{
    static const int64_t dims[] = {64, 128, 256};
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        for (int kind = 0; kind < LONE_KINDS && strcmp(at->backend, "reference") != 0; kind++) {
            EACH (c, dims) {
                EACH (d, dtypes) {
                    check_lone(at, (lone_kind)kind, dims[c], dtypes[d]);
                }
            }
        }
    }
}

/* The gradient of a bias that hides a pair is 0, whatever is in the key. */
static void check_hidden_dbias(const place *at, fattn_dtype dtype, int64_t rows)
{
    static const double wild[] = {NAN, INFINITY, -INFINITY};
    draw_case c = biased(FATTN_BACKWARD, dtype, rows, 100);
    c.problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS;
    bool good = hazard_build(&c);
    for (int64_t j = 1; good && j < c.problem.seqlen_k; j += 3) {
        hide_key(&c, j, DRAW_K, wild[j / 3 % 3]);
    }
    good = good && draw_save(&c) == FATTN_OK && hazard_takes(at, &c) &&
           hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    for (int64_t n = 0; good && n < rows * c.problem.seqlen_k; n++) {
        const int64_t i = n % rows, j = n / rows;
        const double x = draw_get(&c, DRAW_DBIAS, draw_at(&c, DRAW_DBIAS, 0, 0, i, j));
        good = j % 3 != 1 || hazard_check(x == 0, "%s, dtype %d: dBias of hidden key %lld is %g",
                                          at->kernel->name, (int)dtype, (long long)j, x);
    }
    draw_free(&c);
}

static void l7(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (d, dtypes) {
            check_hidden_dbias(&hazard_places[n], dtypes[d], 67);
            check_hidden_dbias(&hazard_places[n], dtypes[d], 66);
        }
    }
}

/* A query that is no number makes NaN of the gradients of all values, whose weights are multiplied
 * by 0 where dropout drops them. */
static void l8(void)
{
    for (int n = 0; n < 6; n++) {
        draw_case c = hazard_case(FATTN_BACKWARD, dtypes[n % 3], 1, 2, 1, 70, 3, 16);
        c.problem.features = FATTN_DROPOUT | (n / 3 ? FATTN_BIAS : 0);
        c.problem.dropout_p = 0.9;
        c.problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        if (hazard_build(&c)) {
            draw_set(&c, DRAW_Q, draw_at(&c, DRAW_Q, 0, 5, 1, 3), NAN);
            hazard_judge(&c, 0, "dtype %d, case %d", (int)c.problem.dtype, n);
        }
    }
}

/* Seven heads leave rows of a tile of 128 without a query. What is in memory there has no say in
 * the bits of others: the judge runs each case twice. */
static void l9(void)
{
    for (int n = 0; n < 24; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, dtypes[n % 3], 1, 7, 1, 18, 23, 16);
        c.problem.features = FATTN_SOFTCAP | (n / 3 % 2 ? FATTN_ALIBI : 0);
        c.problem.softcap = 30;
        c.twice = true;
        hazard_judge_drawn(&c, 0, "dtype %d, case %d", (int)c.problem.dtype, n);
    }
}

/* A row whose lse and delta are NaN, because the bias of a pair that it sees is, leaves the pairs
 * that it does not see alone: by a mask, a bias of -inf, or a band. Not on GPUs (NUMERICS 8). */
static bool hides_from(const draw_case *c, int64_t i, int64_t j)
{
    return c->problem.features & FATTN_CAUSAL ? j > i : j % 3 == 1;
}

enum { WILD_LENGTH = 67, WILD_ROW = 5 };

static void check_wild_row(const place *at, uint64_t hidden_by, fattn_dtype dtype)
{
    draw_case c = biased(FATTN_BACKWARD, dtype, WILD_LENGTH, WILD_LENGTH);
    c.problem.features |= hidden_by;
    c.problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS;
    bool good = hazard_build(&c) && hazard_takes(at, &c);
    for (int64_t n = 0; good && n < WILD_LENGTH * WILD_LENGTH; n++) {
        const int64_t i = n / WILD_LENGTH, j = n % WILD_LENGTH;
        const bool hidden = hides_from(&c, i, j);
        draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, 0, 0, i, j),
                 !hidden_by && hidden ? -(double)INFINITY : 0.25);
        if (hidden_by & FATTN_MASK) {
            draw_set(&c, DRAW_MASK, draw_at(&c, DRAW_MASK, 0, 0, i, j), !hidden);
        }
    }
    if (good) {
        draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, 0, 0, WILD_ROW, 2), NAN);
        good = draw_save(&c) == FATTN_OK &&
               hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    }
    for (int64_t j = 0; good && j < WILD_LENGTH; j++) {
        const double x = draw_get(&c, DRAW_DBIAS, draw_at(&c, DRAW_DBIAS, 0, 0, WILD_ROW, j));
        const double k = draw_get(&c, DRAW_DK, draw_at(&c, DRAW_DK, 0, j, 0, 3));
        const double v = draw_get(&c, DRAW_DV, draw_at(&c, DRAW_DV, 0, j, 0, 3));
        const bool hidden = hides_from(&c, WILD_ROW, j);
        good = hazard_check(
            hidden ? x == 0 && isfinite(k) && isfinite(v) : isnan(x) && isnan(k) && isnan(v),
            "%s, dtype %d, features %llx: %s key %lld has %g, %g, %g", at->kernel->name, (int)dtype,
            (unsigned long long)hidden_by, hidden ? "hidden" : "seen", (long long)j, x, k, v);
    }
    draw_free(&c);
}

static void l10(void)
{
    static const uint64_t features[] = {FATTN_MASK, 0, FATTN_CAUSAL, FATTN_MASK | FATTN_ALIBI};
    if (!hazard_on_host(&hazard_places[0])) {
        hazard_skip("GPUs do not promise it");
        return;
    }
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (f, features) {
            EACH (d, dtypes) {
                check_wild_row(&hazard_places[n], features[f], dtypes[d]);
            }
        }
    }
}

/* A case in which the keys at both ends, wherever kernels begin, score 0, and the one in the middle
 * so much that it weighs up to 2^7 times as much, which need not make it the reference. The other
 * weights are below 2^-40. All values are 1. */
static double large_score(int64_t i) { return 3 + (double)(i * 29 % 64) / 32; }

static void fill_peaked(draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    for (int64_t n = 0; n < p->seqlen_q * p->dim; n++) {
        const int64_t i = n / p->dim, e = n % p->dim;
        draw_set(c, DRAW_Q, draw_at(c, DRAW_Q, 0, i, 0, e), e == 0 ? large_score(i) : e == 1);
    }
    for (int64_t n = 0; n < p->seqlen_k * p->dim; n++) {
        const int64_t j = n / p->dim, e = n % p->dim;
        const bool middle = j == p->seqlen_k / 2, end = j == 0 || j == p->seqlen_k - 1;
        const double low = middle || end ? 0 : -30;
        draw_set(c, DRAW_K, draw_at(c, DRAW_K, 0, j, 0, e), e == 0 ? middle : e == 1 ? low : 0);
        draw_set(c, DRAW_V, draw_at(c, DRAW_V, 0, j, 0, e), 1);
    }
    for (int64_t n = 0; n < p->seqlen_q * p->seqlen_k; n++) {
        const int64_t i = n / p->seqlen_k, j = n % p->seqlen_k;
        if (p->features & FATTN_MASK) {
            draw_set(c, DRAW_MASK, draw_at(c, DRAW_MASK, 0, 0, i, j), 1);
        }
        if (p->features & FATTN_BIAS) {
            draw_set(c, DRAW_BIAS, draw_at(c, DRAW_BIAS, 0, 0, i, j), 0);
        }
    }
    if (p->features & FATTN_SINK) {
        draw_set(c, DRAW_SINK, 0, 0);
    }
}

/* Where all values are equal, o is the same, however few bits weights have when they multiply
 * values. Rounded and divided by the sum of exact weights, it would be off by up to 2^-9. Kernels
 * may leave it at that for keys with a small part of the weight. lse is of exact weights. Not of
 * 256 channels on Hopper (NUMERICS, "Values"). */
static bool sums_exact_weights(const char *row)
{
    return strncmp(row, "wgmma_", 6) == 0 && strstr(row, "_256");
}

static void l11(void)
{
    static const uint64_t features[] = {0, FATTN_MASK, FATTN_BIAS, FATTN_SINK};
    enum { KINDS = sizeof features / sizeof features[0] };
    const int cases = KINDS * 24;
    for (int m = 0; m < hazard_place_count * cases; m += hazard_emulated() ? 13 : 1) {
        const place *const at = &hazard_places[m / cases];
        const uint64_t feature = features[m / 24 % KINDS];
        const fattn_wish parts = {.splits = m / 2 % 2 ? 3 : 0};
        draw_case c = hazard_case(FATTN_FORWARD, dtypes[m / 4 % 3], 1, 1, 1, m % 2 ? 3 : 64, 400,
                                  m / 12 % 2 ? 128 : 64);
        c.problem.features |= feature | FATTN_SCALE;
        c.problem.scale = 1;
        c.problem.dtype_o = FATTN_F32;
        bool good = !sums_exact_weights(at->kernel->name) &&
                    (at->kernel->split || parts.splits == 0) && hazard_build(&c) &&
                    hazard_takes(at, &c);
        if (good) {
            fill_peaked(&c);
            good = hazard_check(hazard_run(at, &c, &parts) == FATTN_OK, "%s", fattn_last_reason());
        }
        for (int64_t i = 0; good && i < c.problem.seqlen_q; i++) {
            const double sum = exp(large_score(i)) + 2, all = sum + (feature == FATTN_SINK);
            const double o = draw_get(&c, DRAW_O, draw_at(&c, DRAW_O, 0, i, 0, 7));
            const double lse = draw_get(&c, DRAW_LSE, draw_at(&c, DRAW_LSE, 0, i, 0, 0));
            good = hazard_check(fabs(o - sum / all) < 0x1p-12 && fabs(lse - log(all)) < 0x1p-18,
                                "%s, dtype %d, feature %llx, dim %lld, parts %lld, row %lld: "
                                "o %.7g, not %.7g; lse %.7g, not %.7g",
                                at->kernel->name, (int)c.problem.dtype, (unsigned long long)feature,
                                (long long)c.problem.dim, (long long)parts.splits, (long long)i, o,
                                sum / all, lse, log(all));
        }
        draw_free(&c);
    }
}

/* --- ALiBi where its numbers are large -------------------------------------------------------- */

enum { SLOPED_ROWS = 24, SLOPED_KEYS = 64, SLOPED_DIM = 64 };

/* Scores of the next two hazards are what ALiBi and a bias make of them: q and k are 0, v and dout
 * are 1. */
static struct sloped {
    _Alignas(16) uint16_t q[SLOPED_ROWS * SLOPED_DIM], k[SLOPED_KEYS * SLOPED_DIM],
        v[SLOPED_KEYS * SLOPED_DIM];
    _Alignas(16) uint16_t dq[SLOPED_ROWS * SLOPED_DIM], dk[SLOPED_KEYS * SLOPED_DIM];
    _Alignas(16) uint16_t dv[SLOPED_KEYS * SLOPED_DIM];
    _Alignas(16) float o[SLOPED_ROWS * SLOPED_DIM], dout[SLOPED_ROWS * SLOPED_DIM],
        lse[SLOPED_ROWS];
    _Alignas(16) float bias[SLOPED_ROWS * SLOPED_KEYS], slope;
    _Alignas(16) int32_t table[(1 << 24) / SLOPED_KEYS + 1]; /* all pages are the first */
} sloped;

static fattn_problem sloped_problem(fattn_op op, fattn_dtype dtype, int64_t rows, int64_t keys)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.dtype = dtype;
    p.dtype_o = FATTN_F32;
    p.seqlen_q = rows, p.seqlen_k = keys;
    p.dim = p.dim_v = SLOPED_DIM;
    p.features = FATTN_ALIBI;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    for (int n = 0; n < SLOPED_KEYS * SLOPED_DIM; n++) {
        sloped.v[n] = dtype == FATTN_F16 ? 0x3c00 : 0x3f80;
    }
    for (int n = 0; n < SLOPED_ROWS * SLOPED_DIM; n++) {
        sloped.dout[n] = 1;
    }
    return p;
}

/* Whether the place takes the problem and has run it. */
static bool sloped_runs(const place *at, const fattn_problem *p)
{
    fattn_plan *plan = NULL;
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = sloped.q, b.k = sloped.k, b.v = sloped.v, b.o = sloped.o, b.lse = sloped.lse;
    b.alibi_slopes = &sloped.slope;
    b.block_table = p->features & FATTN_PAGED ? sloped.table : NULL;
    b.bias = p->features & FATTN_BIAS ? sloped.bias : NULL;
    if (p->op == FATTN_BACKWARD) {
        b.dout = sloped.dout, b.dq = sloped.dq, b.dk = sloped.dk, b.dv = sloped.dv;
    }
    const fattn_status made = fattn_plan_create_with(at->device, p, at->kernel->name, NULL, &plan);
    const bool ran =
        made == FATTN_OK && hazard_check(hazard_execute(plan, &b) == FATTN_OK, "%s: %s",
                                         at->kernel->name, fattn_last_reason());
    fattn_plan_destroy(plan);
    return ran;
}

static const fattn_dtype sloped_dtypes[] = {FATTN_F16, FATTN_BF16};

/* Rows that see the four keys before them, of so many that f32 cannot count them. All keys are one,
 * by stride 0, or all pages, for rows that take no such stride. The oracle would visit them all. */
static void l12(void)
{
    static const int64_t rows[] = {1, SLOPED_ROWS},
                         keys[] = {1 << 10, (1 << 24) + 2, (1 << 24) + 5};
    const double lse = log(1 + exp(-1) + exp(-2) + exp(-3));
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        for (int c = 0; strcmp(at->backend, "reference") != 0 && c < 2 * 2 * 2 * 3; c++) {
            fattn_problem p =
                sloped_problem(FATTN_FORWARD, sloped_dtypes[c % 2], rows[c / 2 % 2], keys[c / 8]);
            p.features |= FATTN_WINDOW;
            p.window_left = 3, p.window_right = 0;
            if (c / 4 % 2) {
                p.features |= FATTN_PAGED;
                p.page_size = SLOPED_KEYS, p.num_pages = 1;
                p.max_pages = p.block_table_stride = (p.seqlen_k + SLOPED_KEYS - 1) / SLOPED_KEYS;
            } else {
                p.layout = FATTN_STRIDED;
                p.q.seq = p.o.seq = SLOPED_DIM;
            }
            sloped.slope = 1;
            const bool ran = sloped_runs(at, &p);
            for (int i = 0; ran && i < p.seqlen_q; i++) {
                hazard_check(fabs(sloped.lse[i] - lse) < 1e-5,
                             "%s, %lld keys%s: lse of row %d is %g", at->kernel->name,
                             (long long)p.seqlen_k, p.features & FATTN_PAGED ? " in pages" : "", i,
                             sloped.lse[i]);
            }
        }
    }
}

/* Whether n gradients of 16 bits are all x, or 0 of either sign. */
static bool sloped_are(const uint16_t *gradients, int n, uint16_t x)
{
    bool are = true;
    for (int m = 0; m < n; m++) {
        are = are && (x ? gradients[m] : gradients[m] & 0x7fff) == x;
    }
    return are;
}

/* What a row of one key at distance 0 comes to. Of the keys, those at the end are such a key. */
static bool sloped_is_right(const fattn_problem *p)
{
    enum { HIDDEN = (SLOPED_KEYS - SLOPED_ROWS) * SLOPED_DIM };
    bool right = true;
    if (p->op == FATTN_BACKWARD) {
        return sloped_are(sloped.dq, SLOPED_ROWS * SLOPED_DIM, 0) &&
               sloped_are(sloped.dk, SLOPED_KEYS * SLOPED_DIM, 0) &&
               sloped_are(sloped.dv, HIDDEN, 0) &&
               sloped_are(sloped.dv + HIDDEN, SLOPED_ROWS * SLOPED_DIM, sloped.v[0]);
    }
    for (int n = 0; n < SLOPED_ROWS * SLOPED_DIM; n++) {
        right = right && sloped.o[n] == 1 && sloped.lse[n / SLOPED_DIM] == 0;
    }
    return right;
}

/* Rows whose bias hides all keys but the one at distance 0. Others would score +inf. */
static void l13(void)
{
    sloped.slope = -1e37f;
    for (int n = 0; n < SLOPED_ROWS * SLOPED_KEYS; n++) {
        const int row = n / SLOPED_KEYS, j = n % SLOPED_KEYS;
        sloped.bias[n] = j == row + SLOPED_KEYS - SLOPED_ROWS ? 0 : -INFINITY;
    }
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        for (int c = 0; c < 2 * 2; c++) {
            fattn_problem p = sloped_problem(c / 2 ? FATTN_BACKWARD : FATTN_FORWARD,
                                             sloped_dtypes[c % 2], SLOPED_ROWS, SLOPED_KEYS);
            p.features |= FATTN_BIAS;
            p.bias_stride[2] = SLOPED_KEYS, p.bias_stride[3] = 1;
            for (int i = 0; p.op == FATTN_BACKWARD && i < SLOPED_ROWS * SLOPED_DIM; i++) {
                sloped.o[i] = 1, sloped.lse[i / SLOPED_DIM] = 0;
            }
            hazard_check(!sloped_runs(at, &p) || sloped_is_right(&p), "%s is wrong in %s",
                         at->kernel->name, p.op == FATTN_BACKWARD ? "backward" : "forward");
        }
    }
}

static const hazard table[] = {
    {"hazard_L1", "causal anchored to the other corner", l1, NULL},
    {"hazard_L2", "windows off by one, negative sizes, rows that see nothing", l2, NULL},
    {"hazard_L3", "heads and sequence exchanged without an error", l3, NULL},
    {"hazard_L4", "NaN came through a bias of -inf", l4, NULL},
    {"hazard_L4_heads", "a head loses keys that another's bias hides", l4_heads, NULL},
    {"hazard_L4_rows", "a row loses keys, or its bias, that others hide or lack", l4_rows, NULL},
    {"hazard_L4_plain", "what one row has where others see all was lost", l4_plain, NULL},
    {"hazard_L4_ends", "a key behind a multiple of 64 was taken for hidden", l4_ends, NULL},
    {"hazard_L4_apart", "queries met keys of other sequences in one cache", l4_apart, NULL},
    {"hazard_L5", "tiles that a bias or a mask hides were computed", l5, NULL},
    {"hazard_L5_apart", "rows were multiplied with keys of other sequences", l5_apart, NULL},
    {"hazard_L5_backward", "a tile of queries was skipped, or visited twice", l5_backward, NULL},
    {"hazard_L6", "a row of one key had a probability of almost 1", l6, NULL},
    {"hazard_L7", "dBias of pairs that a bias hides was NaN", l7, NULL},
    {"hazard_L8", "dropout hid a NaN from the gradient of values", l8, NULL},
    {"hazard_L9", "padding rows of a tile changed the bits of real rows", l9, NULL},
    {"hazard_L10", "a row of NaN reached keys that it does not see", l10, NULL},
    {"hazard_L11", "a key with nearly all the weight lost a part of it", l11, NULL},
    {"hazard_L12", "ALiBi took positions for floats", l12, NULL},
    {"hazard_L13", "a slope that overflows met a bias of -inf", l13, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
