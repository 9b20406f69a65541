/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group E: variable length, empty, paged. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/hazard.h"

static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};

#define PACKED (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K)

/* A packed case of these lengths; keys NULL: as many as rows. */
static draw_case packed(fattn_op op, fattn_dtype dtype, int64_t batch, const int64_t rows[],
                        const int64_t keys[], int64_t heads_q, int64_t heads_k, int64_t dim)
{
    int64_t longest_q = 0, longest_k = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t k = keys ? keys[b] : rows[b];
        longest_q = rows[b] > longest_q ? rows[b] : longest_q;
        longest_k = k > longest_k ? k : longest_k;
    }
    draw_case c = hazard_case(op, dtype, batch, heads_q, heads_k, longest_q, longest_k, dim);
    c.problem.features = PACKED;
    for (int64_t b = 0; b < batch; b++) {
        c.sequences[b].rows = c.sequences[b].own_rows = rows[b];
        c.sequences[b].keys = c.sequences[b].own_keys = keys ? keys[b] : rows[b];
    }
    return c;
}

static void e1(void)
{
    static const int64_t rows[] = {5, 9, 3}, keys[] = {0, 40, 0};
    EACH (o, ops) {
        draw_case c = packed(ops[o], FATTN_F32, 3, rows, keys, 2, 1, 16);
        hazard_judge_drawn(&c, 4, "sequences without keys");
    }
}

static void e2(void)
{
    static const int64_t rows[] = {0, 1208, 840, 0};
    draw_case c = packed(FATTN_FORWARD, FATTN_F32, 4, rows, NULL, 1, 1, 2);
    c.problem.features |= FATTN_CAUSAL;
    hazard_judge_drawn(&c, -1, "0, 0, 1208, 2048, 2048");
    for (uint64_t seed = 0; seed < 30; seed++) {
        draw_rng rng = draw_stream(2, (int64_t)seed, 0);
        int64_t lengths[2][8];
        for (int b = 0; b < 8; b++) {
            lengths[0][b] = draw_chance(&rng, 2) ? 0 : draw_between(&rng, 1, 40);
            lengths[1][b] = draw_chance(&rng, 2) ? 0 : draw_between(&rng, 1, 40);
        }
        c = packed(ops[seed % 2], FATTN_F32, 8, lengths[0], lengths[1], 2, 2, 8);
        hazard_judge_drawn(&c, 2, "seed %llu", (unsigned long long)seed);
    }
}

/* With more than 512 items, Hopper's rows list the sequences, the longest first. They find that of
 * an item among up to 32 at once, and where there are more, among every 32nd before that. */
static void e2_many(void)
{
    enum { MOST = 70 };
    static const struct {
        fattn_op op;
        int64_t batch, heads, longest;
        uint64_t features;
    } cases[] = {{FATTN_FORWARD, MOST, 8, 20, 0},
                 {FATTN_FORWARD, MOST, 8, 70, FATTN_CAUSAL},
                 {FATTN_FORWARD, 5, 128, 30, FATTN_CAUSAL},
                 {FATTN_FORWARD, 33, 16, 9, FATTN_ALIBI},
                 {FATTN_FORWARD, 40, 13, 20, FATTN_SEQUSED_K},
                 {FATTN_BACKWARD, MOST, 8, 70, FATTN_CAUSAL},
                 {FATTN_BACKWARD, 33, 16, 9, FATTN_ALIBI},
                 {FATTN_BACKWARD, 40, 13, 20, FATTN_SEQUSED_Q | FATTN_SEQUSED_K},
                 {FATTN_BACKWARD, 5, 128, 30, FATTN_DETERMINISTIC}};
    EACH (n, cases) {
        draw_rng rng = draw_stream(2, (int64_t)n, 1);
        int64_t rows[MOST], keys[MOST];
        for (int64_t b = 0; b < cases[n].batch; b++) {
            rows[b] = draw_chance(&rng, 4) ? 0 : draw_between(&rng, 1, cases[n].longest / 2);
            keys[b] = draw_chance(&rng, 6) ? 0 : draw_between(&rng, 1, cases[n].longest / 2);
        }
        const int64_t longest = cases[n].batch / 2;
        rows[longest] = keys[longest] = cases[n].longest;
        draw_case c = packed(cases[n].op, FATTN_BF16, cases[n].batch, rows, keys, cases[n].heads,
                             cases[n].heads, 8);
        c.problem.features |= cases[n].features;
        for (int64_t b = 0; b < cases[n].batch; b++) {
            c.sequences[b].keys /= cases[n].features & FATTN_SEQUSED_K ? 1 + b % 3 : 1;
            c.sequences[b].rows /= cases[n].features & FATTN_SEQUSED_Q ? 1 + b % 2 : 1;
        }
        hazard_judge_drawn(&c, -1, "case %d", (int)n);
    }
}

/* Decoding over long sequences among short ones. NVIDIA's GPUs cut them by the lengths of all, and
 * take long parts first. */
static void decode_among(fattn_dtype cache)
{
    enum { MOST = 70 };
    static const struct {
        int64_t batch, heads_q, heads_k, rows, left, right;
        uint64_t features;
        int64_t used; /* keys of a sequence at most; 0: any number */
    } cases[] = {{MOST, 3, 3, 1, -1, -1, 0, 0},
                 {12, 6, 3, 1, -1, -1, 0, 0},
                 {2, 4, 1, 1, -1, -1, 0, 0}, /* more parts than sequences */
                 {33, 1, 1, 4, -1, -1, FATTN_CAUSAL, 0},
                 {12, 4, 2, 3, 2000, 100, FATTN_WINDOW, 0},
                 {20, 2, 1, 1, -1, -1, FATTN_SEQUSED_K, 0},
                 {MOST, 3, 3, 1, -1, -1, FATTN_SEQUSED_K, 256}}; /* none is cut */
    EACH (n, cases) {
        draw_rng rng = draw_stream(2, (int64_t)n, 3);
        const int64_t batch = cases[n].batch;
        int64_t rows[MOST] = {0}, keys[MOST] = {0};
        for (int64_t b = 0; b < batch; b++) {
            rows[b] = draw_between(&rng, cases[n].rows == 1, cases[n].rows);
            keys[b] = draw_chance(&rng, 6) ? 0 : draw_between(&rng, 1, 300);
        }
        keys[1] = 9000;
        if (batch > 2) {
            keys[2] = 4097, keys[5] = 8192, keys[6] = 6100, keys[11] = 3070;
        }
        draw_case c = packed(FATTN_FORWARD, FATTN_F16, batch, rows, keys, cases[n].heads_q,
                             cases[n].heads_k, 64);
        c.problem.features |= cases[n].features;
        c.problem.window_left = cases[n].left, c.problem.window_right = cases[n].right;
        c.problem.dtype_kv = c.problem.dtype_v = cache;
        for (int64_t b = 0; b < batch; b++) {
            int64_t *const own = &c.sequences[b].keys;
            *own /= cases[n].features & FATTN_SEQUSED_K ? 1 + b % 3 : 1;
            *own = cases[n].used && *own > cases[n].used ? cases[n].used - b % 3 : *own;
        }
        hazard_judge_drawn(&c, -1, "%s, case %d", cache == FATTN_F16 ? "f16" : "e4m3", (int)n);
    }
}

static void e2_decode(void)
{
    decode_among(FATTN_F16);
    decode_among(FATTN_E4M3);
}

/* Some long sequences among others. Hopper's rows that split keys cut them into more parts than
 * those of others, and take the largest parts first. */
static void cut_among(fattn_dtype cache)
{
    enum { MOST = 40 };
    static const struct {
        int64_t batch, heads_q, heads_k, longest, rows;
        uint64_t features;
    } cases[] = {{16, 2, 1, 4400, 1, 0},
                 {5, 128, 1, 5100, 1, FATTN_SEQUSED_K},
                 {20, 64, 1, 4200, 3, FATTN_CAUSAL},
                 {MOST, 4, 2, 1500, 40, FATTN_CAUSAL | FATTN_SEQUSED_Q},
                 {33, 3, 1, 640, 1, 0}}; /* an odd number of rows */
    EACH (n, cases) {
        draw_rng rng = draw_stream(2, (int64_t)n, 2);
        int64_t rows[MOST], keys[MOST];
        for (int64_t b = 0; b < cases[n].batch; b++) {
            rows[b] = draw_chance(&rng, 6) ? 0 : draw_between(&rng, 1, cases[n].rows);
            keys[b] = draw_chance(&rng, 6) ? 0 : draw_between(&rng, 1, 200);
        }
        for (int64_t b = 1; b < 4; b++) { /* of different lengths */
            rows[b * cases[n].batch / 4] = cases[n].rows;
            keys[b * cases[n].batch / 4] = cases[n].longest - 70 * b + 70;
        }
        draw_case c = packed(FATTN_FORWARD, FATTN_F16, cases[n].batch, rows, keys, cases[n].heads_q,
                             cases[n].heads_k, 16);
        c.problem.features |= cases[n].features;
        c.problem.dtype_kv = c.problem.dtype_v = cache;
        for (int64_t b = 0; b < cases[n].batch; b++) {
            c.sequences[b].keys -=
                cases[n].features & FATTN_SEQUSED_K ? c.sequences[b].keys / 5 : 0;
            c.sequences[b].rows /= cases[n].features & FATTN_SEQUSED_Q ? 1 + b % 2 : 1;
        }
        hazard_judge_drawn(&c, -1, "%s, case %d", cache == FATTN_F16 ? "f16" : "e4m3", (int)n);
    }
}

static void e2_cut(void)
{
    cut_among(FATTN_F16);
    cut_among(FATTN_E4M3);
}

/* One long sequence among short ones and empty ones, whose lengths are multiples of a tile, one
 * more and one less: kernels count the tiles that a packed batch has, not those of its longest
 * sequence. */
static void e2_tiles(void)
{
    static const int64_t lengths[][8] = {{300, 0, 1, 128, 0, 0, 64, 127},
                                         {0, 129, 63, 65, 257, 0, 1, 0}};
    static const uint64_t features[] = {FATTN_CAUSAL, FATTN_DETERMINISTIC, FATTN_ALIBI};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_BF16};
    EACH (n, lengths) {
        EACH (f, features) {
            EACH (d, dtypes) {
                EACH (o, ops) {
                    if (ops[o] == FATTN_FORWARD && features[f] & FATTN_DETERMINISTIC) {
                        continue;
                    }
                    const int64_t group = f % 2 ? 1 : 3;
                    draw_case c = packed(ops[o], dtypes[d], 8, lengths[n],
                                         f % 2 ? lengths[1 - n] : NULL, 2 * group, 2, 8);
                    c.problem.features |= features[f];
                    hazard_judge_drawn(&c, 0, "lengths %d, features 0x%llx", (int)n,
                                       (unsigned long long)c.problem.features);
                }
            }
        }
    }
}

static void e3(void)
{
    static const int64_t sizes[][4] = {/* batch, heads, rows, keys */
                                       {2, 2, 5, 0}, {2, 2, 0, 5}, {0, 2, 5, 5}, {2, 0, 5, 5},
                                       {2, 2, 0, 0}, {0, 0, 0, 0}, {1, 1, 1, 0}, {0, 2, 0, 5}};
    EACH (o, ops) {
        EACH (s, sizes) {
            for (int more = 0; more < 2; more++) {
                const int64_t *const z = sizes[s];
                draw_case c = hazard_case(ops[o], FATTN_F32, z[0], z[1], z[1], z[2], z[3], 8);
                c.problem.features = more ? FATTN_SINK | FATTN_BIAS | FATTN_CAUSAL : 0;
                c.tensors[DRAW_BIAS].flat[0] = c.tensors[DRAW_DBIAS].flat[0] = true;
                c.problem.outputs = ops[o] == FATTN_FORWARD ? c.problem.outputs
                                    : more ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV |
                                                 FATTN_OUT_DBIAS | FATTN_OUT_DSINK
                                           : 0;
                hazard_judge_drawn(&c, 2, "B %lld, H %lld, Sq %lld, Sk %lld", (long long)z[0],
                                   (long long)z[1], (long long)z[2], (long long)z[3]);
            }
        }
    }
}

static void e4(void)
{
    static const int64_t rows[] = {1, 0, 1, 1, 0, 0, 1}, keys[] = {20, 3, 0, 65, 0, 7, 1};
    static const int64_t few[] = {0, 0, 1, 0, 0, 1, 0};
    EACH (o, ops) {
        draw_case c = packed(ops[o], FATTN_F32, 7, rows, keys, 4, 2, 16);
        hazard_judge_drawn(&c, 4, "one row at most");
        c = packed(ops[o], FATTN_F32, 7, few, few, 8, 1, 16);
        hazard_judge_drawn(&c, 4, "fewer tokens than sequences");
    }
}

static void e5(void)
{
    static const int64_t rows[] = {0, 33, 0, 7}, keys[] = {70, 12, 0, 9};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        draw_case c = packed(FATTN_BACKWARD, FATTN_F32, 4, rows, keys, 4, 2, 24);
        c.problem.features |= accumulate ? FATTN_ACCUMULATE : 0;
        hazard_judge_drawn(&c, 0, "accumulate %d", accumulate);
    }
}

static void e6(void)
{
    static const int64_t nobody[] = {0, 0, 0};
    EACH (o, ops) {
        draw_case c = packed(ops[o], FATTN_F16, 3, nobody, NULL, 2, 1, 8);
        hazard_judge_drawn(&c, 2, "three empty sequences");
    }
    static const int64_t dims[][2] = {{0, 8}, {8, 0}};
    EACH (d, dims) {
        fattn_problem p;
        fattn_problem_init(&p);
        p.seqlen_q = p.seqlen_k = 4, p.dim = dims[d][0], p.dim_v = dims[d][1];
        const fattn_status status = fattn_support(hazard_places[0].device, &p);
        hazard_check(status == FATTN_INVALID_SHAPE, "D %lld, Dv %lld: %s", (long long)p.dim,
                     (long long)p.dim_v, fattn_status_string(status));
    }
}

/* Copies every operand so that it ends (or begins) at the end of mapped memory, runs, and copies
 * the outputs back. */
static void run_guarded(const place *at, const draw_case *c, bool end)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct {
        unsigned char *base;
        size_t bytes;
    } maps[DRAW_IDS] = {{NULL, 0}};
    draw_case guarded = *c;
    for (int id = 0; id < DRAW_IDS; id++) {
        const draw_tensor *const t = &c->tensors[id];
        int64_t last = 0;
        for (int axis = 0; t->present && axis < 4; axis++) {
            last = t->extent[axis] == 0 || last < 0
                       ? -1
                       : last + (t->extent[axis] - 1) * t->stride[axis];
        }
        if (!t->present || last < 0) {
            continue;
        }
        const size_t size = (size_t)((last + 1) * t->size);
        const size_t inside = (size + page - 1) / page * page;
        maps[id].bytes = inside + 2 * page;
        maps[id].base =
            mmap(NULL, maps[id].bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (!hazard_check(maps[id].base != MAP_FAILED, "no memory for guards")) {
            maps[id].base = NULL;
            continue;
        }
        mprotect(maps[id].base, page, PROT_NONE);
        mprotect(maps[id].base + page + inside, page, PROT_NONE);
        unsigned char *const start = maps[id].base + page + (end ? inside - size : 0);
        memcpy(start, c->images[t->image].bytes + t->offset, size);
        draw_point(&guarded.buffers, (draw_id)id, start);
    }
    hazard_check(hazard_run(at, &guarded, NULL) == FATTN_OK, "%s: %s", at->kernel->name,
                 fattn_last_reason());
    for (int id = 0; id < DRAW_IDS; id++) {
        if (maps[id].base != NULL) {
            munmap(maps[id].base, maps[id].bytes);
        }
    }
}

/* On devices that read host memory, an access outside an operand ends this program. On others each
 * operand has its own allocation of its exact size, and a sanitizer detects any access outside it
 * (docs/TESTING.md). Pointers are aligned only to an element. */
static void e7(void)
{
    for (int64_t index = 0; index < (hazard_sanitized() ? 60 : 250); index++) {
        draw_case c;
        if (draw_problem(&c, 7, index) != 0) {
            continue;
        }
        c.problem.pointer_alignment = 1;
        c.packed = false; /* an operand needs its own allocation for a guard at its end */
        if (hazard_build(&c) && draw_save(&c) == FATTN_OK) {
            for (int n = 0; n < hazard_place_count; n++) {
                if (!hazard_takes(&hazard_places[n], &c)) {
                    continue;
                }
                if (!hazard_on_host(&hazard_places[n])) {
                    hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s: %s",
                                 hazard_places[n].kernel->name, fattn_last_reason());
                    continue;
                }
                run_guarded(&hazard_places[n], &c, true);
                run_guarded(&hazard_places[n], &c, false);
            }
        }
        draw_free(&c);
    }
}

/* A run with invalid data fails with FATTN_INVALID_DATA and writes nothing. A device with its own
 * memory validates data only with FATTN_CHECKED; without it, invalid data does no harm. */
static void check_refused(draw_case *c, const char *what)
{
    for (int n = 0; n < hazard_place_count; n++) {
        c->problem.features &= ~FATTN_CHECKED;
        if (!hazard_takes(&hazard_places[n], c)) {
            continue;
        }
        if (!hazard_on_host(&hazard_places[n])) {
            hazard_check(hazard_run(&hazard_places[n], c, NULL) == FATTN_OK, "%s: %s: %s",
                         hazard_places[n].kernel->name, what, fattn_last_reason());
            c->problem.features |= FATTN_CHECKED;
        }
        unsigned char *const before = hazard_copy(c, DRAW_O);
        const fattn_status status = hazard_run(&hazard_places[n], c, NULL);
        hazard_check(status == FATTN_INVALID_DATA, "%s: %s: %s", hazard_places[n].kernel->name,
                     what, fattn_status_string(status));
        hazard_check(hazard_equals(c, DRAW_O, before), "%s: %s: outputs were written",
                     hazard_places[n].kernel->name, what);
        free(before);
    }
}

static draw_case paged(int64_t rows, int64_t keys, int64_t page_size)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 2, 2, 1, rows, keys, 16);
    c.problem.features = FATTN_PAGED | FATTN_SEQUSED_K;
    c.problem.page_size = page_size;
    c.page_slack = 3;
    return c;
}

static void e8(void)
{
    static const double entries[] = {-1, 1e6, INT32_MAX, INT32_MIN};
    EACH (e, entries) {
        draw_case c = paged(3, 40, 16);
        if (hazard_build(&c)) {
            draw_set(&c, DRAW_TABLE, 1, entries[e]);
            check_refused(&c, "a page out of range");
        }
        draw_free(&c);
    }
    static const double used[] = {41, -1, INT32_MAX};
    EACH (u, used) {
        draw_case c = paged(3, 40, 16);
        if (hazard_build(&c)) {
            draw_set(&c, DRAW_USED_K, 1, used[u]);
            check_refused(&c, "more keys than there is room for");
        }
        draw_free(&c);
    }
}

static void e9(void)
{
    for (int64_t keys = 1; keys <= 17; keys++) {
        draw_case c = paged(1, keys, 16);
        hazard_judge_drawn(&c, 3, "%lld keys in pages of 16", (long long)keys);
    }
}

static void e10(void)
{
    static const uint64_t queries[] = {0, FATTN_CU_SEQLENS_Q, FATTN_SEQUSED_Q,
                                       FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q};
    static const uint64_t keys[] = {0, FATTN_CU_SEQLENS_K, FATTN_SEQUSED_K,
                                    FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K};
    static const int64_t pages[] = {0, 1, 7, 16, 100};
    EACH (q, queries) {
        EACH (k, keys) {
            EACH (p, pages) {
                draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 3, 2, 1, 4, 90, 8);
                c.problem.features =
                    queries[q] | keys[k] | (pages[p] ? FATTN_PAGED : 0) | FATTN_CAUSAL;
                c.problem.page_size = pages[p];
                for (int64_t b = 0; b < 3; b++) {
                    draw_sequence *const s = &c.sequences[b];
                    s->own_rows = queries[q] & FATTN_CU_SEQLENS_Q ? 4 - b : 4;
                    s->own_keys = keys[k] & FATTN_CU_SEQLENS_K ? 90 - 40 * b : 90;
                    s->rows = queries[q] & FATTN_SEQUSED_Q ? s->own_rows - 1 : s->own_rows;
                    s->keys = keys[k] & FATTN_SEQUSED_K ? s->own_keys - 9 : s->own_keys;
                }
                hazard_judge_drawn(&c, 4, "features 0x%llx, pages of %lld",
                                   (unsigned long long)c.problem.features, (long long)pages[p]);
            }
        }
    }
}

static void e11(void)
{
    static const int64_t rows[] = {3, 60, 17}, keys[] = {200, 1, 33};
    EACH (o, ops) {
        for (int room = 0; room < 2; room++) {
            draw_case c = packed(ops[o], FATTN_F32, 3, rows, keys, 2, 2, 8);
            c.problem.seqlen_q = 500, c.problem.seqlen_k = 600; /* maxima far above every length */
            if (room) {
                c.problem.features = FATTN_SEQUSED_Q | FATTN_SEQUSED_K;
                for (int b = 0; b < 3; b++) {
                    c.sequences[b].own_rows = 500, c.sequences[b].own_keys = 600;
                }
            }
            hazard_judge_drawn(&c, 3, "ragged, room %d", room);
        }
    }
}

/* A slow run fails by the watchdog of hazard_main. */
static void e12(void)
{
    static const int64_t rows[] = {0, 300, 0, 0, 1}, keys[] = {300, 0, 0, 1, 0};
    EACH (o, ops) {
        draw_case c = packed(ops[o], FATTN_F32, 5, rows, keys, 4, 1, 8);
        c.problem.features |= FATTN_WINDOW;
        c.problem.window_left = c.problem.window_right = 0;
        hazard_judge_drawn(&c, 6, "nothing but empty tiles");
    }
}

static void e13(void)
{
    static const int64_t lengths[] = {5, 6, 7};
    static const struct {
        draw_id id;
        int64_t at;
        double value;
    } wrong[] = {{DRAW_CU_Q, 0, -1}, {DRAW_CU_Q, 1, 0},         {DRAW_CU_Q, 3, 1000},
                 {DRAW_CU_K, 2, 3},  {DRAW_CU_K, 3, INT32_MIN}, {DRAW_USED_Q, 1, -3},
                 {DRAW_USED_K, 2, 8}};
    EACH (w, wrong) {
        draw_case c = packed(FATTN_FORWARD, FATTN_F32, 3, lengths, NULL, 1, 1, 8);
        c.problem.features |= FATTN_SEQUSED_Q | FATTN_SEQUSED_K;
        if (hazard_build(&c)) {
            if (wrong[w].id == DRAW_CU_Q && wrong[w].at == 1) { /* decreasing */
                draw_set(&c, DRAW_CU_Q, 0, draw_get(&c, DRAW_CU_Q, 1) + 1);
            } else {
                draw_set(&c, wrong[w].id, wrong[w].at, wrong[w].value);
            }
            check_refused(&c, draw_name(wrong[w].id));
        }
        draw_free(&c);
    }
}

/* A plan keeps a copy of the problem: later changes by the caller have no effect. */
static void e14(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 9, 9, 8);
        c.problem.features = FATTN_CAUSAL;
        if (!hazard_build(&c) || !hazard_takes(&hazard_places[n], &c)) {
            draw_free(&c);
            continue;
        }
        hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                     fattn_last_reason());
        unsigned char *const o = hazard_copy(&c, DRAW_O);
        fattn_problem copy = c.problem;
        fattn_plan *plan = NULL;
        hazard_check(fattn_plan_create_with(hazard_places[n].device, &copy,
                                            hazard_places[n].kernel->name, NULL, &plan) == FATTN_OK,
                     "%s", fattn_last_reason());
        memset(&copy, 0xff, sizeof copy);
        hazard_clear_outputs(&c);
        hazard_check(hazard_execute(plan, &c.buffers) == FATTN_OK && hazard_equals(&c, DRAW_O, o),
                     "%s: a copied problem lost its flags: %s", hazard_places[n].kernel->name,
                     fattn_last_reason());
        fattn_plan_destroy(plan);
        free(o);
        draw_free(&c);
    }
}

static const hazard table[] = {
    {"hazard_E1", "writes outside for sequences without keys", e1, NULL},
    {"hazard_E2", "sequences without queries hung the kernel", e2, NULL},
    {"hazard_E2_many", "of many sequences one was lost, or computed twice", e2_many, NULL},
    {"hazard_E2_decode", "a part of a long sequence was lost among short ones", e2_decode, NULL},
    {"hazard_E2_cut", "parts of one sequence were merged with those of another", e2_cut, NULL},
    {"hazard_E2_tiles", "a tile of a packed sequence was lost, or computed twice", e2_tiles, NULL},
    {"hazard_E3", "division by a size that is 0", e3, NULL},
    {"hazard_E4", "one query at most, and fewer tokens than sequences", e4, NULL},
    {"hazard_E5", "empty queries left garbage in dk and dv", e5, NULL},
    {"hazard_E6", "empty tensors were launched", e6, NULL},
    {"hazard_E7", "operands were read past their end", e7, NULL},
    {"hazard_E8", "a block table was read out of range", e8, NULL},
    {"hazard_E9", "fewer keys than a page went to the wrong kernel", e9, NULL},
    {"hazard_E10", "packed, paged and split at once", e10, NULL},
    {"hazard_E11", "the maximum length was used for the actual one", e11, NULL},
    {"hazard_E12", "empty tiles deadlocked", e12, NULL},
    {"hazard_E13", "a negative length became a huge one", e13, NULL},
    {"hazard_E14", "a copied descriptor lost its causal flag", e14, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
