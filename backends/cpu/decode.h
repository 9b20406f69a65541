/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding: forward for so few rows that memory sets the pace. Both products keep channels in the
 * lanes, and every key and value is read once, in its own type, for all rows of its head. Scores
 * are a dense tile (panel.h).
 *
 * A core keeps memory busy only if it requests data long before it needs them. The hardware
 * prefetchers have more requests in flight than a core may have of its own, provided that the core
 * reads several pages in turn, each in the order of memory. So while a tile is computed, the next
 * one is prefetched into the second-level cache, rows from several places in turn. Where the heads
 * of a key are neighbours in memory, as in BSHD, an item has several heads, which share that order:
 * they are computed one after another for a tile of keys, and each prefetches its share of the next
 * tile of all. The last tile of an item prefetches the first one of the next.
 */
#ifndef FATTN_CPU_DECODE_H
#define FATTN_CPU_DECODE_H

#include "backends/cpu/dots.h"
#include "backends/cpu/parts.h"
#include "backends/cpu/pieces.h"
#include "backends/cpu/soften.h"
#include "core/tiling.h"

#define DECODE_HEADS 8 /* the most heads of an item */
/* the most places that keys, and as many that values, are prefetched from in turn */
#define FETCH_PLACES 8
#define FETCH_PAGE 4096

/* --- Products --------------------------------------------------------------------------------- */

/* Rows of keys or of values, and as many others that are prefetched while these are read. */
typedef struct decode_rows {
    const char *const *at, *const *ahead; /* [count] */
    int64_t count, dim;                   /* how many rows, and their channels */
} decode_rows;

/* x[j][r] = dot(q[r], k[j]) */
typedef struct decode_dots {
    const float *q;   /* as order_queries() has it */
    int64_t q_stride; /* floats per query */
    decode_rows k;
    float *x; /* [k.count][pitch] */
    int64_t pitch;
} decode_dots;

/* o[r] = o[r] alpha[r] + lowered sum_j p[j][r] v[j] */
typedef struct decode_sums {
    const float *alpha; /* [pitch] */
    bool fresh;         /* o is overwritten and not read, as if alpha were 0 */
    float lowered;
    const float *p; /* [v.count][pitch] */
    int64_t pitch;
    decode_rows v;
    float *o; /* [pitch][o_stride] */
    int64_t o_stride;
} decode_sums;

/* The `count` rows from number j on. */
INLINE decode_rows some_rows(decode_rows rows, int64_t j, int64_t count)
{
    rows.at += j;
    rows.ahead += j;
    rows.count = count;
    return rows;
}

/* Channels are loaded some vectors at a time, a block, in the order that costs least: bf16, and
 * e4m3 where it is looked up, are split into the even and the odd channels of two vectors. Queries
 * and o have their channels in the same order. What follows the last block is in order. */
#define BLOCK_MOST 4
INLINE int block_vectors(fattn_dtype dtype) { return dtype == FATTN_E4M3 && FV_BYTES ? 4 : 2; }

INLINE bool splits_channels(fattn_dtype dtype)
{
    return dtype == FATTN_BF16 || (dtype == FATTN_E4M3 && FV_BYTES);
}

/* The channel in lane `lane` of vector u of a block. */
INLINE int channel_of(bool split, int u, int lane)
{
    return split ? u / 2 * 2 * FV_LANES + 2 * lane + u % 2 : u * FV_LANES + lane;
}

/* How many of `dim` channels blocks have. */
INLINE int64_t channels_of_blocks(fattn_dtype dtype, int64_t dim)
{
    const int64_t block = block_vectors(dtype) * FV_LANES;
    return dim / block * block;
}

/* to = the block of channels from c on. */
INLINE void load_block(fattn_dtype dtype, const char *row, int64_t c, fv to[BLOCK_MOST])
{
#if FV_BYTES
    if (dtype == FATTN_E4M3) {
        fv_load_e4m3_block((const uint8_t *)row + c, to);
        return;
    }
#endif
    if (dtype == FATTN_BF16) {
        const uint16_t *const x = (const uint16_t *)(const void *)row + c;
        to[0] = fv_load_bf16_even(x);
        to[1] = fv_load_bf16_odd(x);
    } else {
        to[0] = load_as(dtype, row + c * SIZE_OF(dtype), FV_LANES);
        to[1] = load_as(dtype, row + (c + FV_LANES) * SIZE_OF(dtype), FV_LANES);
    }
}

/* Prefetches the cache lines of `vectors` vectors of channels from c on, except one that begins
 * before them. */
INLINE void prefetch(fattn_dtype dtype, const char *row, int64_t c, int vectors)
{
    const int64_t first = c * SIZE_OF(dtype), bytes = vectors * FV_LANES * SIZE_OF(dtype);
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
        if (bytes >= CACHE_LINE || first % CACHE_LINE == 0) {
            __builtin_prefetch(row + first + at, 0, 2); /* to the second-level cache */
        }
    }
}

/* How many of `pitch` rows a product takes at a time. pitch: a power of two */
INLINE int64_t rows_at_once(int64_t pitch) { return pitch < FV_ND ? pitch : FV_ND; }

/* Adds the products of one vector of channels from c on, of which `part` exist, for the first
 * `live` of nr rows. q: [nr][FV_LANES] */
INLINE void dots_vector(int live, int nr, int part, fattn_dtype dtype, const float *q,
                        decode_rows k, int64_t c, fv *sum)
{
    const int keys = FV_ND / nr;
#pragma GCC unroll 16
    for (int m = 0; m < keys; m++) {
        prefetch(dtype, k.ahead[m], c, 1);
        const fv key = load_as(dtype, k.at[m] + c * SIZE_OF(dtype), part);
#pragma GCC unroll 16
        for (int n = 0; n < live; n++) {
            sum[m * nr + n] = fv_muladd(key, fv_load(q + n * FV_LANES), sum[m * nr + n]);
        }
    }
}

/*
 * to[m][n] = dot(q[n], k[m]) for nr rows and FV_ND / nr keys, and 0 for rows from `live` on. Every
 * loop over sums is unrolled, or compilers would keep the sums in memory. Sums take half of the
 * registers. If two vectors of all rows of q would fill the other half, the first vectors of all
 * keys are multiplied before the second ones.
 * q: [blocks][nr][vectors of a block][FV_LANES], then the remaining vectors, [nr][FV_LANES] each
 */
INLINE void dots_tile(int live, int nr, fattn_dtype dtype, const float *q, decode_rows k, float *to)
{
    const int64_t blocks = channels_of_blocks(dtype, k.dim);
    const int keys = FV_ND / nr, nv = block_vectors(dtype);
    const bool by_half = 2 * nr >= FV_ND && nv == 2;
    fv sum[FV_ND];
#pragma GCC unroll 16
    for (int n = 0; n < FV_ND; n++) {
        sum[n] = fv_set1(0);
    }
    int64_t c = 0;
    for (; c < blocks; c += nv * FV_LANES, q += nr * nv * FV_LANES) {
#pragma GCC unroll 64
        for (int m = 0; m < nv * keys; m++) {
            const int u = by_half ? m / keys : m % nv, j = by_half ? m % keys : m / nv;
            fv key[BLOCK_MOST];
            if (u == 0) {
                prefetch(dtype, k.ahead[j], c, nv);
            }
            load_block(dtype, k.at[j], c, key);
#pragma GCC unroll 16
            for (int n = 0; n < live; n++) {
                fv *const at = &sum[j * nr + n];
                *at = fv_muladd(key[u], fv_load(q + (nv * n + u) * FV_LANES), *at);
            }
        }
    }
    for (; c + FV_LANES <= k.dim; c += FV_LANES, q += nr * FV_LANES) {
        dots_vector(live, nr, FV_LANES, dtype, q, k, c, sum);
    }
    if (c < k.dim) {
        dots_vector(live, nr, (int)(k.dim - c), dtype, q, k, c, sum);
    }
#pragma GCC unroll 16
    for (int n = 0; n < FV_ND; n += FV_LANES) {
        fv_store(to + n, fv_sums(sum + n));
    }
}

/* Dot products of all keys with nr rows from r on, of which `live` exist. */
INLINE void dots(int live, int nr, fattn_dtype dtype, decode_dots d, int64_t r)
{
    const int64_t step = FV_ND / nr;
    for (int64_t j = 0; j < d.k.count; j += step) {
        dots_tile(live, nr, dtype, d.q + r * d.q_stride, some_rows(d.k, j, step),
                  d.x + j * d.pitch + r);
    }
}

/* Keys are summed from zero in groups of this size, and then added to o: rounding errors grow with
 * their number. */
#define MIX_KEYS 64

/* sum = sum_j p[j] v[j] for nr rows and nv vectors of channels from c on: whole blocks, or fewer
 * vectors than a block has, of which one may have only `part` channels. All parameters but `part`
 * are literals. */
INLINE void mix_keys(int nr, int nv, int part, fattn_dtype dtype, decode_sums s, int64_t c, fv *sum)
{
#pragma GCC unroll 16
    for (int n = 0; n < nr * nv; n++) {
        sum[n] = fv_set1(0);
    }
    for (int64_t j = 0; j < s.v.count; j++) {
        fv value[FV_ND + BLOCK_MOST];
        const int block = block_vectors(dtype), whole = nv / block * block;
        prefetch(dtype, s.v.ahead[j], c, nv);
        for (int u = 0; u < whole; u += block) {
            load_block(dtype, s.v.at[j], c + u * FV_LANES, value + u);
        }
        for (int u = whole; u < nv; u++) {
            const char *const from = s.v.at[j] + (c + u * FV_LANES) * SIZE_OF(dtype);
            value[u] = load_as(dtype, from, nv == 1 ? part : FV_LANES);
        }
#pragma GCC unroll 16
        for (int n = 0; n < nr; n++) {
            const fv weight = fv_set1(s.p[j * s.pitch + n]);
            for (int u = 0; u < nv; u++) {
                sum[n * nv + u] = fv_muladd(weight, value[u], sum[n * nv + u]);
            }
        }
    }
}

/* o = alpha o + mix_keys(), where o is multiplied by alpha once. */
INLINE void mix_tile(int nr, int nv, int part, fattn_dtype dtype, decode_sums s, int64_t c)
{
    for (int64_t j = 0; j < s.v.count; j += MIX_KEYS) {
        decode_sums some = s;
        some.p = s.p + j * s.pitch;
        some.v = some_rows(s.v, j, fattn_min64(s.v.count - j, MIX_KEYS));
        fv sum[FV_ND];
        mix_keys(nr, nv, part, dtype, some, c, sum);
        const bool fresh = s.fresh && j == 0;
#pragma GCC unroll 16
        for (int n = 0; n < nr; n++) {
            const fv factor = fv_set1(j == 0 && !fresh ? s.alpha[n] : 1.0f);
            for (int u = 0; u < nv; u++) {
                float *const at = s.o + n * s.o_stride + c + u * FV_LANES;
                const fv part_sum = fv_mul(fv_set1(s.lowered), sum[n * nv + u]);
                fv_store(at, fresh ? part_sum : fv_muladd(fv_load(at), factor, part_sum));
            }
        }
    }
}

/* How many vectors of channels of nr rows there are registers for. */
#define MIX_VECTORS(nr) (FV_ND / (nr) < 8 ? FV_ND / (nr) : 8)

/* All channels of `live` rows from r on, with as many vectors at a time as there are registers for
 * nr rows. live <= nr */
INLINE void mix(int live, int nr, fattn_dtype dtype, decode_sums s, int64_t r)
{
    const int64_t dim = s.v.dim;
    int64_t c = 0;
    s.alpha = s.fresh ? NULL : s.alpha + r;
    s.p += r;
    s.o += r * s.o_stride;
#define WHILE_ROOM(nv)                                                                \
    for (; (nv) <= MIX_VECTORS(nr) && c + (nv)*FV_LANES <= dim; c += (nv)*FV_LANES) { \
        mix_tile(live, nv, FV_LANES, dtype, s, c);                                    \
    }
    WHILE_ROOM(8)
    WHILE_ROOM(4)
    WHILE_ROOM(2)
    WHILE_ROOM(1)
#undef WHILE_ROOM
    if (c < dim) {
        mix_tile(live, 1, (int)(dim - c), dtype, s, c);
    }
}

/* How many of nr rows are mixed at a time: a block of numbers that are looked up is loaded again
 * for the other half of eight rows, since the sums of all eight do not fit the registers. */
INLINE int rows_mixed(fattn_dtype dtype, int nr)
{
    return block_vectors(dtype) > MIX_VECTORS(nr) && nr == 8 ? nr / 2 : nr;
}

INLINE void mix_some(int live, int nr, fattn_dtype dtype, decode_sums s, int64_t r)
{
    const int some = rows_mixed(dtype, nr);
    mix(some < live ? some : live, some, dtype, s, r);
    if (some < live) {
        mix(live - some, some, dtype, s, r + some);
    }
}

/* A function for each type and number of rows: a call that finds no code in cache loads only its
 * own. Up to eight rows are not padded; more are padded to 12 or 16. nr is the pitch of the
 * rows. */
typedef void dots_function(const decode_dots *d);
typedef void mix_function(const decode_sums *s);

#define DECODE_FUNCTIONS(live, nr, type)                  \
    APART void dots_##live##_##type(const decode_dots *d) \
    {                                                     \
        for (int64_t r = 0; r < d->pitch; r += FV_ND) {   \
            dots(live, nr, FATTN_##type, *d, r);          \
        }                                                 \
    }                                                     \
    APART void mix_##live##_##type(const decode_sums *s)  \
    {                                                     \
        for (int64_t r = 0; r < s->pitch; r += FV_ND) {   \
            mix_some(live, nr, FATTN_##type, *s, r);      \
        }                                                 \
    }
#ifdef DECODE_E4M3_ALONE
#define DECODE_TYPES(live, nr) DECODE_FUNCTIONS(live, nr, E4M3)
#define DECODE_TABLE(row, kind) [FATTN_E4M3] = row(kind, E4M3)
#else
#define DECODE_TYPES(live, nr)       \
    DECODE_FUNCTIONS(live, nr, F32)  \
    DECODE_FUNCTIONS(live, nr, F16)  \
    DECODE_FUNCTIONS(live, nr, BF16) \
    DECODE_FUNCTIONS(live, nr, E4M3)
#define DECODE_TABLE(row, kind)                                                                 \
    [FATTN_F32] = row(kind, F32), [FATTN_F16] = row(kind, F16), [FATTN_BF16] = row(kind, BF16), \
    [FATTN_E4M3] = row(kind, E4M3)
#endif
#define DECODE_ROW_OF_4(kind, type) \
    kind##_1_##type, kind##_2_##type, kind##_3_##type, kind##_4_##type
#define DECODE_ROW_OF_8(kind, type) \
    DECODE_ROW_OF_4(kind, type), kind##_5_##type, kind##_6_##type, kind##_7_##type, kind##_8_##type

DECODE_TYPES(1, 1)
DECODE_TYPES(2, 2)
DECODE_TYPES(3, 4)
DECODE_TYPES(4, 4)
#if FV_ND == 4
#define DECODE_ROW(kind, type)      \
    {                               \
        DECODE_ROW_OF_4(kind, type) \
    }
#else
DECODE_TYPES(5, 8)
DECODE_TYPES(6, 8)
DECODE_TYPES(7, 8)
DECODE_TYPES(8, 8)
#if FV_ND == 8
#define DECODE_ROW(kind, type)      \
    {                               \
        DECODE_ROW_OF_8(kind, type) \
    }
#else
DECODE_TYPES(12, 16)
DECODE_TYPES(16, 16)
#define DECODE_ROW(kind, type)                                          \
    {                                                                   \
        DECODE_ROW_OF_8(kind, type), kind##_12_##type, kind##_16_##type \
    }
#endif
#endif

static dots_function *const dots_functions[][10] = {DECODE_TABLE(DECODE_ROW, dots)};
static mix_function *const mix_functions[][10] = {DECODE_TABLE(DECODE_ROW, mix)};

#undef DECODE_TABLE
#undef DECODE_ROW
#undef DECODE_ROW_OF_8
#undef DECODE_ROW_OF_4
#undef DECODE_TYPES
#undef DECODE_FUNCTIONS

/* The index of the function for a number of rows in its table. */
static int64_t listed_at(int64_t rows, int64_t pitch)
{
    const int64_t live = pitch > FV_ND ? FV_ND : rows;
    return live <= 8 ? live - 1 : live <= 12 ? 8 : 9;
}

static dots_function *dots_of(fattn_dtype dtype, int64_t rows, int64_t pitch)
{
    return dots_functions[dtype][listed_at(rows, pitch)];
}

static mix_function *mix_of(fattn_dtype dtype, int64_t rows, int64_t pitch)
{
    return mix_functions[dtype][listed_at(rows, pitch)];
}

/* to = a block of channels in the order of load_block(). */
static void order_block(fattn_dtype dtype, const float *from, float *to)
{
    const bool split = splits_channels(dtype);
    for (int u = 0; u < block_vectors(dtype); u++) {
        for (int lane = 0; lane < FV_LANES; lane++) {
            to[u * FV_LANES + lane] = from[channel_of(split, u, lane)];
        }
    }
}

/* to = the queries in pn->q in the order in which dots_tile() reads them: rows_at_once() rows side
 * by side. */
static void order_queries(const panel *pn, float *to)
{
    const fattn_dtype dtype = pn->p->dtype_kv;
    const int64_t blocks = channels_of_blocks(dtype, pn->p->dim), rows = rows_at_once(pn->pitch);
    const int nv = block_vectors(dtype);
    for (int64_t r = 0; r < pn->pitch; r += rows) {
        const float *const from = pn->q + r * pn->d_pad;
        for (int64_t c = 0; c < blocks; c += nv * FV_LANES) {
            for (int64_t n = 0; n < rows; n++, to += nv * FV_LANES) {
                order_block(dtype, from + n * pn->d_pad + c, to);
            }
        }
        for (int64_t c = blocks; c < pn->d_pad; c += FV_LANES) {
            for (int64_t n = 0; n < rows; n++, to += FV_LANES) {
                fv_store(to, fv_load(from + n * pn->d_pad + c));
            }
        }
    }
}

/* Restores the order of channels in a row of o, which load_block() split into even and odd ones. */
static void order_channels(const fattn_problem *p, int64_t pitch, float *o)
{
    const int64_t blocks = channels_of_blocks(p->dtype_v, p->dim_v);
    const int nv = block_vectors(p->dtype_v);
    const int rows = rows_mixed(p->dtype_v, (int)rows_at_once(pitch));
    if (!splits_channels(p->dtype_v) || MIX_VECTORS(rows) < nv) {
        return;
    }
    for (int64_t c = 0; c < blocks; c += 2 * FV_LANES) {
        float some[2 * FV_LANES];
        memcpy(some, o + c, sizeof some);
        for (int64_t lane = 0; lane < FV_LANES; lane++) {
            o[c + 2 * lane] = some[lane];
            o[c + 2 * lane + 1] = some[FV_LANES + lane];
        }
    }
}

/* How many bytes of a value mix() takes at a time. */
static int64_t mix_bytes(const fattn_problem *p, int64_t pitch)
{
    const int64_t channels = MIX_VECTORS(rows_at_once(pitch)) * FV_LANES;
    return fattn_min64(channels, p->dim_v) * fattn_dtype_size(p->dtype_v);
}

#undef MIX_VECTORS
#undef MIX_KEYS

/* --- Rows of keys ----------------------------------------------------------------------------- */

/* A tile of keys, with the rows of the first head of an item. */
typedef struct decode_tile {
    int64_t block;
    const char **k, **v;      /* [bc] */
    span spans[DECODE_HEADS]; /* of each head; the non-empty ones differ in kind alone */
    int64_t live;
} decode_tile;

/* An item: a piece of the keys, some heads, and a block of their rows. */
typedef struct decode_item {
    const decode_piece *piece;
    int64_t hk, heads, block;
} decode_item;

typedef struct decode {
    forward head[DECODE_HEADS];
    int64_t heads;
    bool alike; /* heads_attend_alike() */
    decode_tile now, next;
    const char **rows; /* [bc] rows of the head that is being computed */
    /* [heads][2][bc] what each head prefetches during its products with keys and with values */
    const char **ahead;
} decode;

/* Whether all heads attend to the same keys: none has a bias, a mask or a block mask of its own. */
static bool heads_attend_alike(const fattn_problem *p)
{
    const bool own_blocks = p->features & FATTN_BLOCK_MASK && p->block_mask_stride[1] != 0;
    return !own_blocks && (!has_hiders(p) || heads_share_hiders(p));
}

/* Whether the heads of one key lie side by side in memory. */
static bool interleaved(const fattn_strides *strides) { return strides->head < strides->seq; }

static bool heads_are_neighbours(const fattn_problem *p)
{
    return interleaved(&p->k) || interleaved(&p->v);
}

/* The most heads of an item: up to DECODE_HEADS if they share pages, else two, so that rows come
 * from twice as many places. */
static int64_t heads_most(const fattn_problem *p)
{
    return fattn_min64(fattn_max64(p->heads_k, 1), heads_are_neighbours(p) ? DECODE_HEADS : 2);
}

/* rows[j] = the address of key first + j. */
static void find_rows(const panel *pn, int64_t first, int64_t live, const void *tensor,
                      fattn_dtype dtype, const fattn_strides *strides, const char **rows)
{
    const fattn_problem *const p = pn->p;
    const int64_t page = p->features & FATTN_PAGED ? p->page_size : INT64_MAX;
    const int64_t step = strides->seq * fattn_dtype_size(dtype);
    for (int64_t j = 0; j < live;) {
        const char *const row = element(tensor, dtype, key_index(pn, strides, first + j));
        const int64_t run = fattn_min64(live - j, page - (pn->start_k + first + j) % page);
        for (int64_t n = 0; n < run; n++) {
            rows[j + n] = row + n * step;
        }
        j += run;
    }
}

/* Sets the rows of the tile's live keys, for the head of pn. */
static void tile_rows(const panel *pn, decode_tile *tile)
{
    const fattn_problem *const p = pn->p;
    find_rows(pn, tile->block * pn->bc, tile->live, pn->run->buffers->k, p->dtype_kv, &p->k,
              tile->k);
    if (p->outputs & FATTN_OUT_O) {
        find_rows(pn, tile->block * pn->bc, tile->live, pn->run->buffers->v, p->dtype_v, &p->v,
                  tile->v);
    }
}

/* Finds the first tile from `block` on that some head attends to. Returns whether there is one. */
static bool find_tile(const decode *d, int64_t block, int64_t end, decode_tile *tile)
{
    tile->live = 0;
    for (; block < end && !tile->live; block++) {
        for (int64_t n = 0; n < d->heads; n++) {
            tile->spans[n] = n > 0 && d->alike
                                 ? tile->spans[0]
                                 : visible_span(&d->head[n].panel, block, STAYS_WHOLE);
            if (tile->spans[n].kind != FATTN_TILE_EMPTY) {
                tile->live = tile->spans[n].live;
            }
        }
        tile->block = block;
    }
    tile_rows(&d->head->panel, tile);
    return tile->live > 0;
}

/* d->rows = the rows of head n, and rows of zeros past the last key. */
static void head_rows(decode *d, int64_t n, fattn_dtype dtype, const fattn_strides *strides,
                      const char **first, int64_t padded)
{
    const panel *const pn = &d->head->panel;
    const int64_t step = n * strides->head * fattn_dtype_size(dtype);
    for (int64_t j = 0; j < d->now.live; j++) {
        d->rows[j] = first[j] + step;
    }
    for (int64_t j = d->now.live; j < padded; j++) {
        d->rows[j] = (const char *)pn->zeros;
    }
}

/* How many tensors are read: k, and v if o is wanted. */
static int64_t kinds_of(const fattn_problem *p) { return p->outputs & FATTN_OUT_O ? 2 : 1; }

/* From how many places of the next tile the keys of a head, or of all heads if they share pages,
 * are prefetched in turn: no two places in one page. A power of two, as the parts of a tile must
 * be. */
static int64_t places_of(const decode *d)
{
    const fattn_problem *const p = d->head->panel.p;
    const int64_t pages = d->next.live * p->k.seq * fattn_dtype_size(p->dtype_kv) / FETCH_PAGE;
    const int64_t turns = heads_are_neighbours(p) ? 1 : d->heads;
    int64_t places = FETCH_PLACES;
    while (places > 1 && (places > pages || places * turns > FETCH_PLACES)) {
        places /= 2;
    }
    return places;
}

/* to[n stride] = from[n]. */
static void lay_rows(const char **to, int64_t stride, const char *const *from, int64_t count)
{
#pragma GCC unroll 8
    for (int64_t n = 0; n < count; n++) {
        to[n * stride] = from[n];
    }
}

/* d->ahead = the rows of the next tile in the order in which they are prefetched: a key and a value
 * from each place in turn, head by head, then the rows after these. Where there are no more, the
 * last rows, or zeros. */
static void list_ahead(decode *d)
{
    const panel *const pn = &d->head->panel;
    const fattn_problem *const p = pn->p;
    const int64_t live = d->next.live, heads = d->heads;
    const int64_t k_step = p->k.head * fattn_dtype_size(p->dtype_kv);
    const int64_t v_step = p->v.head * fattn_dtype_size(p->dtype_v);
    const int64_t places = places_of(d), part = (live + places - 1) / places;
    const int64_t kinds = kinds_of(p), round = kinds * places;
    int64_t step[2 * FETCH_PLACES]; /* from one head to the next */
    for (int64_t n = 0; n < round; n++) {
        step[n] = n & (kinds - 1) ? v_step : k_step;
    }
    for (int64_t n = 0; live < pn->bc && n < heads * kinds * pn->bc; n++) {
        d->ahead[n] = live == 0         ? (const char *)pn->zeros
                      : n & (kinds - 1) ? d->next.v[live - 1]
                                        : d->next.k[live - 1];
    }
    for (int64_t n = 0; n < places; n++) {
        const int64_t first = n * part, count = fattn_min64(part, live - first);
        lay_rows(d->ahead + kinds * n, heads * round, d->next.k + first, count);
        if (kinds == 2) {
            lay_rows(d->ahead + kinds * n + 1, heads * round, d->next.v + first, count);
        }
    }
    for (int64_t j = 0; j < part; j++) {
        const char **at = d->ahead + j * heads * round;
        for (int64_t h = 1; h < heads; h++, at += round) {
            for (int64_t n = 0; n < round; n++) {
                at[round + n] = at[n] + step[n];
            }
        }
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Turns the scores in x into weights, in whole steps. Keys past the last get weight 0. */
static void soften_dense(forward *f, span s)
{
    const panel *const pn = &f->panel;
    const int64_t steps = s.padded / pn->phases;
    const int64_t whole = (steps + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
    fill(pn->x + steps * pn->br, (whole - steps) * pn->br, -INFINITY);
    (void)soften_tile(f, whole, s.kind == FATTN_TILE_PARTIAL || whole > steps, STORED_FLOATS);
}

static void decode_begin(forward *f, int64_t split)
{
    panel *const pn = &f->panel;
    pn->step = pn->phases;
    f->fresh = true;
    state_begin(f, split, false);
    fill(f->l + pn->pitch, pn->width - pn->pitch, 0); /* a sink counts once */
}

/* Prepares queries and o for the first tile. Many parts of a sparse mask have none. */
static void decode_load(forward *f)
{
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    load_queries(pn, pn->run->buffers->q, p->dtype, &p->q, p->dim, pn->q, pn->d_pad);
    order_queries(pn, pn->qt);
    fill(f->o, pn->br * pn->dv_pad, 0);
    f->fresh = false;
}

/* Adds the parts of l, and puts channels in order. A head without tiles has no o yet, and needs one
 * only if it has a sink: nobody reads o of a row whose l is 0. */
static void decode_end(forward *f)
{
    const panel *const pn = &f->panel;
    if (f->fresh) {
        fill(f->o, pn->p->features & FATTN_SINK ? pn->br * pn->dv_pad : 0, 0);
        return;
    }
    for (int64_t step = pn->width / 2; step >= pn->pitch; step /= 2) {
        for (int64_t r = 0; r < step; r++) {
            f->l[r] += f->l[r + step];
            f->lost[r] += f->lost[r + step];
        }
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        order_channels(pn->p, pn->pitch, f->o + r * pn->dv_pad);
    }
}

/* The current tile of keys for head n. */
static void decode_head(decode *d, int64_t n)
{
    forward *const f = &d->head[n];
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const span s = d->now.spans[n];
    const bool values = p->outputs & FATTN_OUT_O;

    if (f->fresh) {
        decode_load(f);
    }
    head_rows(d, n, p->dtype_kv, &p->k, d->now.k, s.padded);
    const char *const *const ahead = d->ahead + n * kinds_of(p) * pn->bc;
    const decode_rows k = {.at = d->rows, .ahead = ahead, .count = s.padded, .dim = p->dim};
    const decode_dots dots = {
        .q = pn->qt, .q_stride = pn->d_pad, .k = k, .x = pn->x, .pitch = pn->pitch};
    dots_of(p->dtype_kv, pn->rows, pn->pitch)(&dots);
    score_tile(pn, s);
    soften_dense(f, s);
    if (!values) {
        return;
    }
    if (p->features & FATTN_DROPOUT) {
        drop_tile(pn, s, false);
    }
    head_rows(d, n, p->dtype_v, &p->v, d->now.v, s.padded);
    const decode_sums sums = {
        .alpha = f->alpha,
        .lowered = f->lowered,
        .p = pn->x,
        .pitch = pn->pitch,
        .v = {.at = d->rows, .ahead = ahead + pn->bc, .count = s.padded, .dim = p->dim_v},
        .o = f->o,
        .o_stride = pn->dv_pad};
    mix_of(p->dtype_v, pn->rows, pn->pitch)(&sums);
}

static void decode_layout(decode *d, int64_t heads, const fattn_problem *p,
                          const fattn_tiling *tiling, arena *from)
{
    strips_layout(d->head, heads, p, tiling->br, tiling->bc, 1, from);
    for (int64_t n = 0; n < heads; n++) {
        d->head[n].o = d->head[n].ot;
    }
    const char ***const lists[] = {&d->now.k, &d->now.v, &d->next.k, &d->next.v, &d->rows};
    d->ahead = carve(from, kinds_of(p) * heads * tiling->bc, sizeof *d->ahead);
    for (size_t n = 0; n < sizeof lists / sizeof lists[0]; n++) {
        *lists[n] = carve(from, tiling->bc, sizeof **lists[n]);
    }
}

static int64_t decode_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    decode d;
    arena from = {0};
    decode_layout(&d, heads_most(p), p, tiling, &from);
    return from.used;
}

/* How many heads an item has: fewer than the most if there would not be enough items for the
 * threads. Results do not depend on it. */
static int64_t heads_of_item(const fattn_cpu_run *run)
{
    const int64_t most = heads_most(run->problem), heads = fattn_max64(run->problem->heads_k, 1);
    const int64_t workers = run->tiling->workers;
    const int64_t all = blocks_of(run) * pieces_of(run)->count;
    const int64_t enough = workers > 1 ? all / (4 * workers) : most;
    const int64_t some = fattn_max64(1, fattn_min64(enough, most));
    const int64_t groups = (heads + some - 1) / some;
    return (heads + groups - 1) / groups;
}

static int64_t decode_count(const fattn_cpu_run *run)
{
    const int64_t each = heads_of_item(run);
    const int64_t groups = (run->problem->heads_k + each - 1) / each;
    return pieces_of(run)->count * groups * run->tiling->q_blocks;
}

/* Item number `item`. The items of a piece are consecutive, and among them the blocks of rows of
 * the same heads. */
static decode_item item_of(const fattn_cpu_run *run, int64_t item)
{
    const int64_t all = run->problem->heads_k, each = heads_of_item(run);
    const int64_t groups = (all + each - 1) / each, blocks = run->tiling->q_blocks;
    const int64_t group = item / blocks, hk = group % groups * each;
    return (decode_item){.piece = &pieces_of(run)->piece[group / groups],
                         .hk = hk,
                         .heads = fattn_min64(each, all - hk),
                         .block = item - group * blocks};
}

/* Sets what an item's last tile prefetches: the first tile of the item that this worker probably
 * gets next, or nothing if that has another number of heads. */
static void find_upcoming(decode *d, const fattn_cpu_run *run)
{
    const int64_t item = fattn_cpu_upcoming(run->items);
    decode_tile *const tile = &d->next;
    panel pn = d->head->panel;
    tile->live = 0;
    if (item >= decode_count(run)) {
        return;
    }
    const decode_item it = item_of(run, item);
    if (it.heads != d->heads ||
        !panel_place(&pn, run, it.piece->b, it.hk, it.block * pn.br, DENSE_TILE)) {
        return;
    }
    for (int64_t block = it.piece->first; block < it.piece->past; block++) {
        const span s = span_of(&pn, block);
        if (s.kind != FATTN_TILE_EMPTY) {
            tile->block = block;
            tile->live = s.live;
            tile_rows(&pn, tile);
            return;
        }
    }
}

/* Some rows of an item, which are computed together: `count` rows from row `at` of its block on. */
typedef struct row_group {
    int64_t at, count;
    bool last; /* of the item */
} row_group;

/* The key blocks, of first .. past - 1, from the first to the last in which query i may attend to a
 * key. Needs heads_share_hiders(). */
static fattn_range blocks_of_query(const panel *pn, int64_t i, int64_t first, int64_t past)
{
    panel one = *pn;
    one.i0 = i;
    one.i1 = i + 1;
    fattn_range keys = fattn_band_row(&pn->band, i);
    keys.first = fattn_max64(keys.first, first * pn->bc);
    keys.past = fattn_min64(keys.past, past * pn->bc);
    for (int by = 0; by < HIDERS; by++) {
        if (has_hider(pn->p, by)) {
            const int64_t row = hider_row(&one, by, hider_rows_of(&one, by), 0);
            keys.first += run_of(pn, by, row, keys.first, keys.past, HIDDEN_RUN, AT_FIRST);
            keys.past -= run_of(pn, by, row, keys.first, keys.past, HIDDEN_RUN, AT_LAST);
        }
    }
    return keys.first < keys.past ? (fattn_range){.first = keys.first / pn->bc,
                                                  .past = (keys.past + pn->bc - 1) / pn->bc}
                                  : (fattn_range){.first = INT64_MAX, .past = 0};
}

/* What some rows cost against some key blocks: reading a key costs about as much as multiplying it
 * with a row, and opening a panel as much as a block. */
static int64_t cost_of_rows(int64_t rows, fattn_range blocks)
{
    return (rows + 1) * (1 + fattn_max64(blocks.past - blocks.first, 0));
}

/*
 * How many rows of the item, from row `at` on, are computed together. Usually all; but an engine
 * may keep the keys of several sequences in one tensor, and hide from each query those of the other
 * sequences, by a bias or a mask. Queries that attend to different keys are then computed one after
 * another, each against its own. If that depended on the head, the result would depend on how many
 * heads an item has, and with that on the number of threads. pn: on all rows of the item
 */
static int64_t rows_together(const panel *pn, const decode_piece *piece, int64_t at)
{
    if (pn->i1 - pn->i0 == 1 || !heads_share_hiders(pn->p)) {
        return pn->rows;
    }
    fattn_range all = {.first = INT64_MAX, .past = 0};
    int64_t rows = 0;
    for (int64_t i = (pn->first + at) / pn->group; i < pn->i1; i++) {
        const int64_t past = fattn_min64((i + 1) * pn->group - pn->first, pn->rows);
        const int64_t more = past - at - rows;
        const fattn_range own = blocks_of_query(pn, i, piece->first, piece->past);
        const fattn_range both = {.first = fattn_min64(all.first, own.first),
                                  .past = fattn_max64(all.past, own.past)};
        if (rows > 0 &&
            cost_of_rows(rows + more, both) > cost_of_rows(rows, all) + cost_of_rows(more, own)) {
            break;
        }
        all = both;
        rows += more;
    }
    return rows;
}

/* Opens the panels of an item's heads on some of its rows. Returns the key blocks that they attend
 * to. */
static fattn_range open_rows(decode *d, const fattn_cpu_run *run, decode_item it, row_group rows)
{
    const decode_piece *const piece = it.piece;
    const int64_t first = it.block * run->tiling->br + rows.at;
    fattn_range blocks = {.first = piece->past, .past = piece->first};
    for (int64_t n = 0; n < d->heads; n++) {
        panel *const pn = &d->head[n].panel;
        (void)panel_place(pn, run, piece->b, it.hk + n, first, DENSE_TILE);
        panel_take(pn, rows.count, DENSE_TILE);
        panel_fill(pn);
        decode_begin(&d->head[n], piece->split);
    }
    for (int64_t n = 0; n < (d->alike ? 1 : d->heads); n++) {
        int64_t begin = piece->first, end = piece->past;
        skip_hidden_blocks(&d->head[n].panel, NULL, 0, &begin, &end);
        blocks.first = fattn_min64(blocks.first, begin);
        blocks.past = fattn_max64(blocks.past, end);
    }
    return blocks;
}

/* Some rows of an item: tile by tile, each for all heads, while the rows of the next tile are
 * prefetched. */
static void decode_row_group(decode *d, const fattn_cpu_run *run, decode_item it, row_group rows)
{
    const decode_piece *const piece = it.piece;
    const fattn_range blocks = open_rows(d, run, it, rows);
    bool more = find_tile(d, blocks.first, blocks.past, &d->next);
    while (more) {
        const decode_tile now = d->next;
        d->next = d->now; /* its arrays receive the tile after the next */
        d->now = now;
        more = find_tile(d, d->now.block + 1, blocks.past, &d->next);
        if (!more && rows.last) {
            find_upcoming(d, run);
        }
        list_ahead(d);
        for (int64_t n = 0; n < d->heads; n++) {
            if (d->now.spans[n].kind != FATTN_TILE_EMPTY) {
                decode_head(d, n);
            }
        }
    }
    for (int64_t n = 0; n < d->heads; n++) {
        decode_end(&d->head[n]);
        if (piece->splits == 1) {
            forward_store(&d->head[n]);
        } else {
            const int64_t block = (it.hk + n) * run->tiling->q_blocks + it.block;
            forward_leave_part(&d->head[n], run, slot_of(piece, block) + piece->split, 0, rows.at);
        }
    }
}

/* An item: its rows, together or in groups. */
static void decode_tiles_of(const fattn_cpu_run *run, decode_item it, void *scratch)
{
    const decode_piece *const piece = it.piece;
    const int64_t row = it.block * run->tiling->br, blocks = run->tiling->q_blocks;
    arena from = {.base = scratch};
    decode d = {.heads = it.heads, .alike = heads_attend_alike(run->problem)};

    decode_layout(&d, d.heads, run->problem, run->tiling, &from);
    panel all = d.head->panel;
    if (!panel_place(&all, run, piece->b, it.hk, row, DENSE_TILE)) {
        return;
    }
    panel_prepare(&all);
    for (row_group rows = {.at = 0}; rows.at < all.rows; rows.at += rows.count) {
        rows.count = rows_together(&all, piece, rows.at);
        rows.last = rows.at + rows.count == all.rows;
        decode_row_group(&d, run, it, rows);
    }
    for (int64_t n = 0; piece->splits > 1 && n < d.heads; n++) {
        const int64_t slot = slot_of(piece, (it.hk + n) * blocks + it.block);
        if (was_last_part(run, slot, piece->splits)) { /* the item no longer needs its scratch */
            const fattn_work work = {.batch = piece->b, .head = it.hk + n, .block = it.block};
            merge_parts(run, work, slot, piece->splits, scratch);
        }
    }
}

/* The most rows of a key/value head. Rows beyond a block form another one, which reads the keys
 * again, from caches. Where the forward kernel computes 32 rows for 17, blocks of 16 and of up to 8
 * rows take 0.7 to 0.8 of its time in f32 and f16. */
#define DECODE_ROWS_MOST (FV_LANES == DECODE_ROWS ? DECODE_ROWS + 8 : DECODE_ROWS)

/* At most so many rows leave a part of forward's vector of 16 empty that counts. */
#define SPARSE_ROWS 12

/* The most keys for which the forward kernel is faster even if it copies the keys, or has few rows.
 * A short prompt has as few keys as rows. If all rows attend to the same keys, the short way
 * (brief.h) may take them. Measured (docs/notes/cpu.md). */
static int64_t keys_of_forward(const fattn_problem *p, int64_t rows)
{
    if (p->seqlen_q == 1 || !fattn_is_banded(p)) {
        return keys_in_place(p) ? rows : 0;
    }
    return keys_in_place(p)      ? 48
           : rows <= SPARSE_ROWS ? rows + rows / 2
           : rows <= DECODE_ROWS ? 2 * rows
                                 : DECODE_ROWS;
}

/* Whether decoding is faster than the forward kernel. Its sums over lanes cost more than arranging
 * queries (forward.h) if there are many rows, and so few keys that memory does not set the pace.
 * With 16 lanes and not too few keys, decoding is still faster in two cases: if forward would copy
 * the keys for rows of a single vector, and if rows leave lanes of that vector empty. */
static bool decode_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    (void)row, (void)limits;
    const int64_t rows = fattn_problem_rows(p);
    const bool copied_or_sparse = !keys_in_place(p) || rows <= SPARSE_ROWS;
    return decode_queries_fit(p) &&
           (rows <= DECODE_ROWS / 2 || p->seqlen_k > 1024 ||
            (FV_LANES == 16 && copied_or_sparse && p->seqlen_k > keys_of_forward(p, rows)));
}

static const fattn_tile decode_tiles[] = {{DECODE_ROWS, 64}, {DECODE_ROWS, 32}, {0, 0}};

/* Scratch, this tile of keys of all heads, the next one, and as much for what hardware prefetchers
 * fetch ahead. */
static int64_t decode_fast_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)row;
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    const int64_t key =
        p->dim * fattn_dtype_size(p->dtype_kv) + p->dim_v * fattn_dtype_size(p->dtype_v);
    return decode_scratch(p, &tiling) + 3 * tile.bc * heads_most(p) * key;
}

#endif
