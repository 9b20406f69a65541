/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A block of the tensor-core forward: its shared memory, the mapping of a thread's elements to
 * rows and keys, how dot products become scores with every feature, and dropout.
 *
 * The two products of a tile may have its keys in any order, as long as it is the same in both.
 * Column 8 n + 2 t + e of the fragments is key OWN t + 2 n + e of the tile. So the OWN keys of lane
 * t of a quad are adjacent. Their bias and mask are read 16 bytes at a time, and one call of
 * dropout's generator serves several of them. Hopper's products have keys in order (IN_ORDER):
 * column c is key c. There a call of the generator also serves several of a thread's keys.
 *
 * Terms, the type of parameter s, describes the item and its rows: mma_scratch, or wgmma_tile_terms
 * in Hopper's kernels.
 */
#ifndef FATTN_CUDA_MMA_TERMS_CUH
#define FATTN_CUDA_MMA_TERMS_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"

/* The variant of a forward kernel that is compiled for these features of MMA_OF_PAIRS. */
GPU_DEVICE constexpr mma_variant mma_variant_of(uint64_t features)
{
    return features == 0 ? MMA_LEAN : features == MMA_ANY ? MMA_EVERYTHING : MMA_ONE_OF_PAIRS;
}

/* T: mma_f16, mma_bf16 or mma_f32. W: channels of q, k and v, padded. M: tiles of 16 rows per warp.
 * BN: keys of a tile. FEATURES: the one of MMA_OF_PAIRS that the run has, 0, or MMA_ANY. Unless it
 * is MMA_ANY, rows of q, k and v begin at multiples of 16 bytes. */
template <class T, int W, int M, int WARPS, int BN, uint64_t FEATURES, int STAGES = 2>
struct mma_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    static constexpr mma_variant VARIANT = mma_variant_of(FEATURES);
    static_assert((BN & (BN - 1)) == 0, "every key of a tile has a number below 2^31");
    enum {
        WIDTH = W,
        TILES = M,
        WARP_TILES = M, /* distance from a warp's rows to the next warp's, in tiles of 16 */
        ROWS = 16 * M * WARPS,
        THREADS = 32 * WARPS,
        KEYS = BN,
        OWN = BN / 4,  /* keys of a tile that a lane has of each row */
        NEXT = 4,      /* distance from 16 columns to the next 16, in keys */
        RING = STAGES, /* pipeline stages: tiles of keys, and of values, in shared memory */
        IN_ORDER = false,
        FIRST_WARP = 0 /* the first warp that multiplies */
    };
};

#define MMA_LEFTMOST (-1024) /* bound of first_key and past_key: more than a tile has rows */

/* The item that a block works on. Keys and tiles of keys are below 2^31. */
typedef struct mma_item {
    int64_t number;
    gpu_pairs pairs;
    int64_t hk, group;
    int64_t i0, i1;            /* queries i0 .. i1 - 1 */
    int offset, rows, split;   /* row 0 is query i0 of head `offset` of the group */
    int parts;                 /* how many parts its rows have, if blocks of decoding count them */
    float z_kept;              /* Z of a pair that dropout keeps; pairs.dropout has 1 instead */
    bool whole;                /* its part is the only one */
    bool bias_rows, mask_rows; /* contiguous along keys, with rows aligned to 16 bytes */
    int keys;                  /* of the sequence */
    int first_key, past_key;   /* keys in the band of query i0, clamped to MMA_LEFTMOST .. keys */
    int block, past;           /* tiles of keys block .. past - 1 of the part */
    int full, full_past;       /* those whose pairs are all inside the band */
    const void *k, *v;         /* key 0, unless keys are paged */
    const void *staged;        /* the staged bias or mask: row 0 at key 0 */
} mma_item;

/* Tiles in shared memory, aligned to eight rows of 16 bytes. */
template <class S, int PLANES = S::type::PLANES> struct mma_tiles {
    alignas(128) uint16_t q[S::ROWS * S::WIDTH]; /* at the end, o is staged here */
    typename S::type::element k[S::RING][S::KEYS * S::WIDTH], v[S::RING][S::KEYS * S::WIDTH];
};

/* The terms of each row; a row that does not exist has those of another one. In kernels for a bias
 * alone or a mask alone, its tile is staged in shared memory. */
template <class S, uint64_t FEATURES = S::KNOWN> struct mma_row_terms {
};
template <class S> struct mma_row_terms<S, MMA_ANY> {
    const char *bias[S::ROWS], *mask[S::ROWS]; /* at key 0 */
    gpu_f2 alibi[S::ROWS];                     /* slope, and distance from query i0 */
};
template <class S> struct mma_row_terms<S, FATTN_ALIBI> {
    gpu_f2 alibi[S::ROWS];
};
template <class S> struct mma_row_terms<S, FATTN_BIAS> {
    alignas(16) uint16_t staged[S::ROWS * S::KEYS];
};
template <class S> struct mma_row_terms<S, FATTN_MASK> {
    alignas(16) uint8_t staged[S::ROWS * S::KEYS];
};

/* Shared memory. The item is here because accumulators leave no registers for it. */
template <class S> struct mma_scratch : mma_tiles<S>, mma_row_terms<S> {
    mma_item item;
    const uint8_t *scan; /* the item's bytes from the scan (scan.h), or NULL */
    uint32_t kept[S::type::PLANES == 1 ? MMA_KEPT_WORDS : 1]; /* a bit for each tile: not hidden */
};

/* --- Which row, which key --------------------------------------------------------------------- */

/* The row of the tile that a thread holds as half h of its m-th tile of 16 rows. */
template <class S> GPU_DEVICE int mma_row(int m, int h)
{
    return ((mma_warp() - S::FIRST_WARP) * S::WARP_TILES + m) * 16 + mma_lane() / 4 + 8 * h;
}

/* Query and head of row r of the tile, relative to query i0 and to the group's first head. */
GPU_DEVICE gpu_query mma_query_from(const mma_item &w, int r)
{
    const uint32_t n = (uint32_t)(w.offset + r), group = (uint32_t)w.group;
    gpu_query q;
    q.i = (int32_t)(group == 1 ? n : n / group);
    q.h = (int32_t)(n - (uint32_t)q.i * group);
    return q;
}

GPU_DEVICE gpu_query mma_query(const mma_item &w, int r)
{
    gpu_query q = mma_query_from(w, r);
    q.i += (int32_t)w.i0;
    q.h = r < w.rows ? q.h + (int32_t)(w.hk * w.group) : -1;
    return q;
}

/* Keys first .. past - 1. */
typedef struct mma_range {
    int first, past;
} mma_range;

/* The keys in the band of query i0 + i of an item, as fattn_band_row() gives them: those of query
 * i0, shifted by i and clamped to the keys that exist. */
template <class Item> GPU_DEVICE mma_range mma_band_row(const Item &w, int i)
{
    mma_range keys;
    keys.first = min(max(w.first_key, -i), w.keys - i) + i;
    keys.past = min(max(w.past_key, -i), w.keys - i) + i;
    return keys;
}

/* The element of q or o where row r begins. */
GPU_DEVICE int64_t mma_row_at(const mma_item &w, const fattn_strides &stride, int r)
{
    const gpu_query q = mma_query_from(w, r);
    return gpu_query_at(w.pairs.seq, stride, w.i0, w.hk * w.group) + q.i * stride.seq +
           q.h * stride.head;
}

/* Calls visit(m, h) for the thread's rows. */
template <class S, class Visit> GPU_DEVICE void mma_each_row(Visit visit)
{
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        visit(n / 2, n % 2);
    }
}

/* The first of the thread's keys in the tile, and the distance of its j-th key from that. */
template <class S> GPU_DEVICE int mma_own(void)
{
    return mma_lane() % 4 * (S::IN_ORDER ? 2 : (int)S::OWN);
}

template <class S> GPU_DEVICE constexpr int mma_behind(int j)
{
    return S::IN_ORDER ? j / 2 * 8 + j % 2 : j;
}

/* Calls visit(score, j) for the scores of the thread's j-th keys in row (m, h). */
template <class S, class Visit>
GPU_DEVICE void mma_each(int m, int h, float x[S::TILES][S::KEYS / 8][4], Visit visit)
{
    GPU_UNROLL
    for (int j = 0; j < S::OWN; j++) {
        visit(x[m][j / 2][2 * h + j % 2], j);
    }
}

/* Address of chunk c of key r in a tile. The eight keys that ldmatrix reads as one matrix are
 * OWN t + 2 n + e for all t and e. The swizzle gives each of them four banks of its own. */
template <class S> GPU_DEVICE uint32_t mma_key_place(uint32_t tile, int r, int c)
{
    const int swizzle = r / S::OWN * 2 + r % 2;
    return tile + 2 * S::WIDTH * r + ((c ^ swizzle) << 4);
}

/* The lane's first address in a tile, as b_at of mma_dots() and of mma_mix(). */
template <class S> GPU_DEVICE uint32_t mma_key_rows(const void *tile)
{
    const int lane = mma_lane(), r = lane % 8, n = lane / 16;
    return mma_key_place<S>(mma_shared(tile), r / 2 * S::OWN + 2 * n + r % 2, lane / 8 % 2);
}

template <class S> GPU_DEVICE uint32_t mma_key_columns(const void *tile)
{
    const int lane = mma_lane(), r = lane % 8, n = lane / 8 % 2;
    return mma_key_place<S>(mma_shared(tile), r / 2 * S::OWN + 2 * n + r % 2, lane / 16);
}

/* --- Loads of a tile's terms ------------------------------------------------------------------ */

/* Sets up the terms of row r. It is query q; q.h is -1 if the row does not exist. */
template <class S, class Terms>
GPU_DEVICE void mma_begin_row(const fattn_gpu_args &g, Terms &s, gpu_query q, int r)
{
    const fattn_problem &p = g.problem;
    const mma_item &w = s.item;
    gpu_query near = q;
    if (q.h < 0) {
        near.i = (int32_t)w.i0;
        near.h = (int32_t)(w.hk * w.group);
    }
    if constexpr (S::KNOWN == MMA_ANY) {
        if (p.features & FATTN_BIAS) {
            const int64_t size = p.dtype_bias == FATTN_F32 ? 4 : 2;
            s.bias[r] =
                (const char *)g.buffers.bias + gpu_term_at(w.pairs, p.bias_stride, near, 0) * size;
        }
        if (p.features & FATTN_MASK) {
            s.mask[r] = (const char *)g.buffers.mask + gpu_term_at(w.pairs, p.mask_stride, near, 0);
        }
    }
    if constexpr (S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI) {
        if (p.features & FATTN_ALIBI) {
            const float *const slopes = (const float *)g.buffers.alibi_slopes;
            s.alibi[r].x = slopes[w.pairs.b * p.alibi_batch_stride + near.h];
            s.alibi[r].y = (float)(int)(near.i - w.i0);
        }
    }
}

/* Whether a tensor of elements of `size` bytes is contiguous along keys, with rows that are aligned
 * to 16 bytes. */
GPU_DEVICE bool mma_are_rows(const void *data, const int64_t stride[4], int size)
{
    bool aligned = (uintptr_t)data % 16 == 0 && stride[3] == 1;
    for (int n = 0; n < 3; n++) {
        aligned = aligned && stride[n] * size % 16 == 0;
    }
    return aligned;
}

/* Prefetches the bias of tile `block`, if that is before `past`, to L2. (A mask is smaller, and
 * heads usually share it.) */
template <class S, class Terms>
GPU_DEVICE void mma_prefetch_bias(const fattn_gpu_args &g, const Terms &s, int block, int past)
{
    if constexpr (S::KNOWN == MMA_ANY) {
        const int j0 = (int)((unsigned)block * S::KEYS); /* of tile `past` perhaps 2^31 */
        const int64_t column = j0 + mma_lane() % 4 * S::OWN,
                      size = g.problem.dtype_bias == FATTN_F32 ? 4 : 2;
        if (block < past && g.problem.features & FATTN_BIAS && s.item.bias_rows &&
            fattn_tile_is_whole(j0, S::KEYS, s.item.keys)) {
            mma_each_row<S>(
                [&](int m, int h) { mma_prefetch(s.bias[mma_row<S>(m, h)] + column * size); });
        }
    }
}

/* Loads the thread's elements of a row of a bias or mask, in the tile that begins with key j0. They
 * have SIZE bytes each and are `step` bytes apart; past the last key they are 0. row: the address
 * at key 0. ROWS: they are adjacent, aligned, and all exist. */
template <class S, int SIZE, bool ROWS>
GPU_DEVICE void mma_fetch(const char *row, int64_t step, int j0, int keys,
                          uint32_t words[S::OWN * SIZE / 4])
{
    const int own = j0 + mma_own<S>();
    const char *const from = row + own * step;
    if (ROWS && S::IN_ORDER) { /* pairs */
        GPU_UNROLL
        for (int j = 0; j < S::OWN; j += 2) {
            const char *const at = from + mma_behind<S>(j) * SIZE;
            if constexpr (SIZE == 4) {
                const gpu_u2 two = __ldg((const gpu_u2 *)at);
                words[j] = two.x, words[j + 1] = two.y;
            } else if constexpr (SIZE == 2) {
                words[j / 2] = __ldg((const uint32_t *)at);
            } else {
                const uint32_t two = __ldg((const uint16_t *)at);
                words[j / 4] = j % 4 ? words[j / 4] | two << 16 : two;
            }
        }
    } else if (ROWS) {
        if constexpr (S::OWN * SIZE == 4) {
            words[0] = __ldg((const uint32_t *)from);
        } else if constexpr (S::OWN * SIZE == 8) {
            const gpu_u2 two = __ldg((const gpu_u2 *)from);
            words[0] = two.x, words[1] = two.y;
        }
        GPU_UNROLL
        for (int n = 0; n + 4 <= S::OWN * SIZE / 4; n += 4) {
            const gpu_u4 four = __ldg((const gpu_u4 *)(from + 4 * n));
            words[n] = four.x, words[n + 1] = four.y;
            words[n + 2] = four.z, words[n + 3] = four.w;
        }
    } else {
        GPU_UNROLL
        for (int j = 0; j < S::OWN; j++) {
            const char *const at = from + mma_behind<S>(j) * step;
            const uint32_t bits = own + mma_behind<S>(j) >= keys ? 0
                                  : SIZE == 4                    ? *(const uint32_t *)at
                                  : SIZE == 2                    ? *(const uint16_t *)at
                                                                 : *(const uint8_t *)at;
            const int n = j * SIZE / 4, shift = j * SIZE % 4 * 8;
            words[n] = shift ? words[n] | bits << shift : bits;
        }
    }
}

/* Kernels for a bias alone or a mask alone copy its tiles one ahead. Each warp copies the rows that
 * it uses, to a tile laid out as in mma_sm80.cuh. This loads the lane's elements of row (m, h). */
template <class S, class E>
GPU_DEVICE void mma_staged_get(const mma_scratch<S> &s, int m, int h,
                               uint32_t words[S::OWN * sizeof(E) / 4])
{
    enum { CHUNKS = S::OWN * sizeof(E) / 16 };
    static_assert(CHUNKS * 16 == S::OWN * sizeof(E), "a lane's own are whole chunks");
    GPU_UNROLL
    for (int n = 0; n < CHUNKS; n++) {
        const int c = mma_lane() % 4 * CHUNKS + n;
        mma_get<4>(mma_place<S::KEYS * sizeof(E) / 2>(mma_shared(s.staged), mma_row<S>(m, h), c),
                   words + 4 * n);
    }
}

/* Begins to copy the warp's rows of the tile that begins with key j0. Elements E have these strides
 * and are contiguous along keys; elements that do not exist become zeros. aligned: rows begin at
 * multiples of 16 bytes. */
template <class S, class E>
GPU_DEVICE void mma_stage_rows(const mma_item &w, const int64_t stride[4], bool aligned, int j0,
                               uint32_t staged)
{
    enum { CHUNK = 16 / sizeof(E), CHUNKS = S::KEYS / CHUNK, STEP = GPU_WAVE / CHUNKS };
    enum { PITCH = S::KEYS * sizeof(E) / 2 }; /* as of 16-bit elements */
    const int lane = mma_lane(), c = lane % CHUNKS, j = j0 + c * CHUNK;
    const int top = mma_warp() * S::WARP_TILES * 16, r0 = top + lane / CHUNKS;
    const int bytes = min(max(w.keys - j, 0), (int)CHUNK) * (int)sizeof(E);
    const E *const from = (const E *)w.staged + j;
    __syncwarp(); /* all lanes have read the tile before */
    if (w.group == 1 && aligned) {
        const E *row = from + r0 * stride[2];
        GPU_UNROLL
        for (int n = 0; n < S::TILES * 16; n += STEP, row += STEP * stride[2]) {
            mma_copy(mma_place<PITCH>(staged, r0 + n, c), row, r0 + n < w.rows ? bytes : 0);
        }
        return;
    }
    GPU_ROLLED
    for (int r = r0; r < top + S::TILES * 16; r += STEP) {
        const gpu_query q = mma_query_from(w, r);
        const E *const row = from + q.h * stride[1] + q.i * stride[2];
        const uint32_t to = mma_place<PITCH>(staged, r, c);
        const int there = r < w.rows ? bytes : 0;
        if (aligned) {
            mma_copy(to, row, there);
        } else {
            mma_copy_misaligned(to, row, there);
        }
    }
}

/* Stages tile `block` in kernels for a bias alone or a mask alone, if the tile is before `past`. */
template <class S, class Terms>
GPU_DEVICE void mma_stage(const fattn_gpu_args &g, const Terms &s, int block, int past)
{
    const fattn_problem &p = g.problem;
    const mma_item &w = s.item;
    if constexpr (S::KNOWN == FATTN_BIAS) {
        if (block < past) {
            mma_stage_rows<S, uint16_t>(w, p.bias_stride, w.bias_rows, block * S::KEYS,
                                        mma_shared(s.staged));
            mma_commit();
        }
    }
    if constexpr (S::KNOWN == FATTN_MASK) {
        if (block < past) {
            mma_stage_rows<S, uint8_t>(w, p.mask_stride, w.mask_rows, block * S::KEYS,
                                       mma_shared(s.staged));
            mma_commit();
        }
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* Coefficients of P in mma_cap() for |y| < BELOW: C0 + C1 z + C2 z^2 ... Hopper's backward uses
 * mma_cap_near too. */
struct mma_cap_nearest {
    static constexpr float BELOW = 0.16f;
    static constexpr float C0 = -0.33331832f;
    static constexpr float C1 = 0.13143143f;
};
struct mma_cap_near {
    static constexpr float BELOW = 0.3f;
    static constexpr float C0 = -0.33333286129924045f;
    static constexpr float C1 = 0.1332387352065708f;
    static constexpr float C2 = -0.0511326762267774f;
};
struct mma_cap_wide {
    static constexpr float BELOW = 0.5f;
    static constexpr float C0 = -0.3333331108469964f;
    static constexpr float C1 = 0.1333047649126389f;
    static constexpr float C2 = -0.05338711063578141f;
    static constexpr float C3 = 0.01798874440669957f;
};

/*
 * x = softcap tanh(x / softcap) of scaled dot products, as in core/score.h but in fewer steps, with
 * a relative error of 2^-21. With y = x / softcap and z = y^2, tanh(y) = y (1 + z P(z)), where P
 * interpolates (tanh(y) / y - 1) / z at Chebyshev nodes. If all of a warp's |y| are small, P has
 * degree 2 and is evaluated in powers of the dot product itself (mma_cap_near); in Hopper's kernels
 * it has degree 1 if they are smaller still (mma_cap_nearest). Otherwise P has degree 3
 * (mma_cap_wide), and beyond its range tanh is computed by an exponential. Batch-invariant problems
 * always take this path, because the others depend on all rows of the warp. All these P are good to
 * 6e-8. Sets bound to an upper bound of each row's scores among the thread's own.
 */
template <class S>
GPU_DEVICE void mma_cap(const fattn_gpu_args &g, float x[S::TILES][S::KEYS / 8][4],
                        float bound[S::TILES][2])
{
    const fattn_score_rule &rule = g.rule;
    const bool alone = !S::IN_ORDER && g.problem.features & FATTN_BATCH_INVARIANT;
    const float pace = rule.scale * rule.reciprocal, square = pace * pace;
    const float c3 = mma_cap_near::C2 * square * square * square * rule.scale;
    const float c2 = mma_cap_near::C1 * square * square * rule.scale;
    const float c1 = mma_cap_near::C0 * square * rule.scale;
    bool near = fabsf(pace) > 0x1p-20f && !alone; /* powers of pace do not underflow */
    bool nearest = S::IN_ORDER && near;
    mma_each_row<S>([&](int m, int h) {
        float even = 0, odd = 0;
        mma_each<S>(m, h, x, [&](float &score, int j) {
            float &largest = j % 2 ? odd : even;
            largest = gpu_max(largest, fabsf(score));
        });
        bound[m][h] = gpu_max(even, odd);
        near = near && bound[m][h] * fabsf(pace) < mma_cap_near::BELOW;
        nearest = nearest && bound[m][h] * fabsf(pace) < mma_cap_nearest::BELOW;
        bound[m][h] *= fabsf(rule.scale);
    });
    if (S::IN_ORDER && __all_sync(0xffffffffu, nearest)) {
        const float b2 = mma_cap_nearest::C1 * square * square * rule.scale;
        const float b1 = mma_cap_nearest::C0 * square * rule.scale;
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) {
                const float z = score * score;
                score *= fmaf(fmaf(b2, z, b1), z, rule.scale);
            });
        });
        return;
    }
    if (__all_sync(0xffffffffu, near)) {
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) {
                const float z = score * score;
                score *= fmaf(fmaf(fmaf(c3, z, c2), z, c1), z, rule.scale);
            });
        });
        return;
    }
    mma_each_row<S>([&](int m, int h) {
        mma_each<S>(m, h, x, [&](float &score, int) {
            const float y = score * pace, z = y * y;
            float poly = fmaf(mma_cap_wide::C3, z, mma_cap_wide::C2);
            poly = fmaf(poly, z, mma_cap_wide::C1);
            poly = fmaf(poly, z, mma_cap_wide::C0);
            const float small = score * rule.scale * fmaf(poly, z, 1.0f);
            const float below = mma_reciprocal(1 + mma_exp2(fabsf(y) * (float)(2 * FATTN_LOG2E)));
            const float large = copysignf(fmaf(-2 * rule.cap, below, rule.cap), y);
            score = fabsf(y) < mma_cap_wide::BELOW ? small : large;
        });
    });
}

/* Whether a 16-bit bias in these words is -inf. */
template <int WORDS, int DTYPE> GPU_DEVICE bool mma_bias_hides(const uint32_t *words)
{
    const uint32_t none = DTYPE == FATTN_F16 ? 0xfc00 : 0xff80;
    uint32_t least = words[0];
    GPU_UNROLL
    for (int n = 1; n < WORDS; n++) {
        least = mma_smaller<DTYPE>(least, words[n]);
    }
    return (least & 0xffff) == none || least >> 16 == none;
}

/* Whether one of a row's biases has an absolute value of 2^126 or more, or is infinite. For bf16,
 * adding 3 to the exponent then carries into the sign bit. f16 has no other large values than
 * infinities, and the test is for -inf. */
template <class S, int DTYPE> GPU_DEVICE bool mma_bias_large(const uint32_t *words)
{
    if (DTYPE == FATTN_F32) {
        float largest = 0;
        GPU_UNROLL
        for (int j = 0; j < S::OWN; j++) {
            largest = gpu_max(largest, fabsf(fattn_f32_from_bits(words[j])));
        }
        return largest >= 0x1p126f;
    }
    if (DTYPE == FATTN_F16) {
        return mma_bias_hides<S::OWN / 2, FATTN_F16>(words);
    }
    uint32_t largest = 0;
    GPU_UNROLL
    for (int n = 0; n < S::OWN / 2 && DTYPE == FATTN_BF16; n++) {
        largest = mma_bf16_larger(largest, words[n]);
    }
    return (largest + 0x01800180u) & 0x80008000u;
}

/* The j-th of a row of biases. */
template <int DTYPE> GPU_DEVICE float mma_bias_at(const uint32_t *words, int j)
{
    if constexpr (DTYPE == FATTN_F32) {
        return fattn_f32_from_bits(words[j]);
    } else {
        return gpu_widen((fattn_dtype)DTYPE, (uint16_t)(words[j / 2] >> j % 2 * 16));
    }
}

/* factor x + bias, or an infinite bias itself: -inf hides the pair, whatever x is. */
GPU_DEVICE float mma_biased(float x, float factor, float bias)
{
    const float sum = fmaf(x, factor, fattn_score_clamp(bias));
    return fabsf(bias) == fattn_f32_infinity() ? bias : sum;
}

/* x = factor x + bias, for a row. A finite bias is clamped to the range that the formula allows. */
template <class S, int DTYPE>
GPU_DEVICE void mma_add_bias(const uint32_t *words, float factor, int m, int h,
                             float x[S::TILES][S::KEYS / 8][4])
{
    if (mma_bias_large<S, DTYPE>(words)) {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            score = mma_biased(score, factor, mma_bias_at<DTYPE>(words, j));
        });
    } else {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            score = fmaf(score, factor, mma_bias_at<DTYPE>(words, j));
        });
    }
}

/* The same for all of the thread's rows. The loads of two rows are in flight at a time. */
template <class S, int DTYPE, bool ROWS, class Terms>
GPU_DEVICE void mma_bias(const fattn_gpu_args &g, const Terms &s, int j0, float factor,
                         float x[S::TILES][S::KEYS / 8][4])
{
    enum { SIZE = DTYPE == FATTN_F32 ? 4 : 2 };
    const int64_t step = ROWS ? (int64_t)SIZE : g.problem.bias_stride[3] * SIZE;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        uint32_t words[2][S::OWN * SIZE / 4];
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            mma_fetch<S, SIZE, ROWS>(s.bias[mma_row<S>(m, h)], step, j0, s.item.keys, words[h]);
        }
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            mma_add_bias<S, DTYPE>(words[h], factor, m, h, x);
        }
    }
}

template <class S, int DTYPE, class Terms>
GPU_DEVICE void mma_bias_of(const fattn_gpu_args &g, const Terms &s, int j0, float factor,
                            float x[S::TILES][S::KEYS / 8][4])
{
    if (s.item.bias_rows && fattn_tile_is_whole(j0, S::KEYS, s.item.keys)) {
        mma_bias<S, DTYPE, true>(g, s, j0, factor, x);
    } else {
        mma_bias<S, DTYPE, false>(g, s, j0, factor, x);
    }
}

/* The same for a bias of any dtype. */
template <class S, class Terms>
GPU_DEVICE void mma_bias_any(const fattn_gpu_args &g, const Terms &s, int j0, float factor,
                             float x[S::TILES][S::KEYS / 8][4])
{
    switch (g.problem.dtype_bias) {
    case FATTN_BF16: mma_bias_of<S, FATTN_BF16>(g, s, j0, factor, x); break;
    case FATTN_F16: mma_bias_of<S, FATTN_F16>(g, s, j0, factor, x); break;
    default: mma_bias_of<S, FATTN_F32>(g, s, j0, factor, x);
    }
}

/* x = factor x + bias, of row (m, h); words: biases of q's type. Unlike mma_add_bias() it does not
 * clamp large finite biases: mma_bounded() follows. */
template <class S>
GPU_DEVICE void mma_bias_words(const uint32_t *words, float factor, int m, int h,
                               float x[S::TILES][S::KEYS / 8][4])
{
    if (mma_bias_hides<S::OWN / 2, S::type::DTYPE>(words)) {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            const float bias = mma_bias_at<S::type::DTYPE>(words, j);
            score = bias == -fattn_f32_infinity() ? bias : fmaf(score, factor, bias);
        });
    } else {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            score = fmaf(score, factor, mma_bias_at<S::type::DTYPE>(words, j));
        });
    }
}

/* The same for a bias staged in shared memory. (Hopper's kernels for a bias alone or a mask alone
 * do not call this, and have an mma_alibi() of their own.) */
template <class S>
GPU_DEVICE void mma_bias_staged(const mma_scratch<S> &s, float factor,
                                float x[S::TILES][S::KEYS / 8][4])
{
    mma_each_row<S>([&](int m, int h) {
        uint32_t words[S::OWN / 2];
        mma_staged_get<S, uint16_t>(s, m, h, words);
        mma_bias_words<S>(words, factor, m, h, x);
    });
}

/* Clamps finite scores with a bias to +-2^126, if a row's largest score is beyond that. Otherwise
 * it makes no difference: scores below -2^126 have a weight of 0. */
template <class S>
GPU_DEVICE void mma_bounded(float x[S::TILES][S::KEYS / 8][4], float largest[S::TILES][2])
{
    bool beyond = false;
    mma_each_row<S>([&](int m, int h) {
        const float size = fabsf(largest[m][h]);
        beyond = beyond || (size >= 0x1p126f && size < fattn_f32_infinity());
    });
    if (__any_sync(0xffffffffu, beyond)) {
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) { score = fattn_score_bias(score); });
            largest[m][h] = fattn_score_bias(largest[m][h]);
        });
    }
}

/* The distance of the item's query i0 and key j. Integers are subtracted, so that distances up to
 * 2^24 are exact at any position. */
GPU_DEVICE float mma_distance(const mma_item &w, int j)
{
    return (float)(w.i0 + w.pairs.band.diagonal - j);
}

/* x = factor x - slope distance. It is fused, so that the -inf of a pair that a bias hides stays,
 * even if slope * distance overflows. */
template <class S>
GPU_DEVICE void mma_alibi(const mma_scratch<S> &s, int j0, float factor,
                          float x[S::TILES][S::KEYS / 8][4])
{
    const float item = mma_distance(s.item, j0 + mma_own<S>());
    mma_each_row<S>([&](int m, int h) {
        const gpu_f2 row = s.alibi[mma_row<S>(m, h)];
        const float first = item + row.y;
        mma_each<S>(m, h, x, [&](float &score, int j) {
            score = fmaf(-row.x, fabsf(first - (float)mma_behind<S>(j)), score * factor);
        });
    });
}

/* Sets scores to -inf where the bytes of a mask are 0. */
template <class S>
GPU_DEVICE void mma_keep_bytes(const uint32_t words[2 * S::TILES][S::OWN / 4],
                               float x[S::TILES][S::KEYS / 8][4])
{
    mma_each_row<S>([&](int m, int h) {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            const uint32_t word = words[2 * m + h][j / 4];
            score = word & 0xffu << j % 4 * 8 ? score : -fattn_f32_infinity();
        });
    });
}

template <class S, bool ROWS, class Terms>
GPU_DEVICE void mma_mask(const fattn_gpu_args &g, const Terms &s, int j0,
                         float x[S::TILES][S::KEYS / 8][4])
{
    const int64_t step = ROWS ? 1 : g.problem.mask_stride[3];
    uint32_t words[2 * S::TILES][S::OWN / 4];
    mma_each_row<S>([&](int m, int h) {
        const char *const row = s.mask[mma_row<S>(m, h)];
        mma_fetch<S, 1, ROWS>(row, step, j0, s.item.keys, words[2 * m + h]);
    });
    mma_keep_bytes<S>(words, x);
}

template <class S, class Terms>
GPU_DEVICE void mma_mask_any(const fattn_gpu_args &g, const Terms &s, int j0,
                             float x[S::TILES][S::KEYS / 8][4])
{
    if (s.item.mask_rows && fattn_tile_is_whole(j0, S::KEYS, s.item.keys)) {
        mma_mask<S, true>(g, s, j0, x);
    } else {
        mma_mask<S, false>(g, s, j0, x);
    }
}

/* The same for a mask staged in shared memory. */
template <class S>
GPU_DEVICE void mma_mask_staged(const mma_scratch<S> &s, float x[S::TILES][S::KEYS / 8][4])
{
    uint32_t words[2 * S::TILES][S::OWN / 4];
    mma_each_row<S>([&](int m, int h) { mma_staged_get<S, uint8_t>(s, m, h, words[2 * m + h]); });
    mma_keep_bytes<S>(words, x);
}

/* A word with bits 0 .. n - 1 set. */
GPU_DEVICE uint32_t mma_bits_below(int n)
{
    return n >= 32 ? UINT32_MAX : (1u << (n < 0 ? 0 : n)) - 1;
}

/* Sets scores of a row to `other` if the bit of their key is 0. For rare cases. */
template <class S>
GPU_DEVICE void mma_select(uint32_t bits, float other, int m, int h,
                           float x[S::TILES][S::KEYS / 8][4])
{
    mma_each<S>(m, h, x, [&](float &score, int j) { score = bits >> j & 1 ? score : other; });
}

/* A bit for each of the thread's keys: whether the block mask keeps it in row r. */
template <class S, class Terms>
GPU_DEVICE uint32_t mma_block_bits(const fattn_gpu_args &g, const Terms &s, int j0, int r)
{
    const bool one = !S::IN_ORDER && g.problem.block_n % S::OWN == 0; /* all are in one block */
    const int own = j0 + mma_own<S>();
    const gpu_query q = mma_query(s.item, r);
    uint32_t bits = 0;
    GPU_ROLLED
    for (int j = 0; j < (one ? 1 : (int)S::OWN); j++) {
        const int key = own + mma_behind<S>(j);
        if (q.h >= 0 && key < s.item.keys) {
            bits |= (uint32_t)gpu_block_keeps(g, s.item.pairs, q, key) << j;
        }
    }
    return one && bits ? UINT32_MAX : bits;
}

/* Turns dot products in x into scores, term by term. Nothing is read for pairs that do not exist.
 * Kernels for a softcap alone get `bound` from mma_cap(). */
template <class S, class Terms>
GPU_DEVICE void mma_terms(const fattn_gpu_args &g, const Terms &s, int j0,
                          float x[S::TILES][S::KEYS / 8][4], float bound[S::TILES][2])
{
    float factor = g.rule.terms & FATTN_SCORE_SCALE ? g.rule.scale : 1; /* not yet applied to x */
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        mma_cap<S>(g, x, bound);
        factor = 1;
    }
    if constexpr (S::KNOWN == FATTN_BIAS) {
        mma_bias_staged<S>(s, factor, x);
        factor = 1;
    } else if constexpr (S::KNOWN == MMA_ANY) {
        if (g.problem.features & FATTN_BIAS) {
            mma_bias_any<S>(g, s, j0, factor, x);
            factor = 1;
        }
    }
    if constexpr (S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI) {
        if (mma_has<S>(g, FATTN_ALIBI)) {
            mma_alibi<S>(s, j0, factor, x);
            factor = 1;
        }
    }
    if (factor != 1) {
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) { score *= factor; });
        });
    }
    if constexpr (S::KNOWN == FATTN_MASK) {
        mma_mask_staged<S>(s, x);
    } else if constexpr (S::KNOWN == MMA_ANY) {
        if (g.problem.features & FATTN_MASK) {
            mma_mask_any<S>(g, s, j0, x);
        }
    }
    if (mma_has<S>(g, FATTN_BLOCK_MASK)) {
        mma_each_row<S>([&](int m, int h) {
            const uint32_t bits = mma_block_bits<S>(g, s, j0, mma_row<S>(m, h));
            mma_select<S>(bits, -fattn_f32_infinity(), m, h, x);
        });
    }
}

/* Sets scores of pairs outside the band to -inf. */
template <class S, class Terms>
GPU_DEVICE void mma_apply_band(const Terms &s, int j0, float x[S::TILES][S::KEYS / 8][4])
{
    const int column = j0 + mma_own<S>();
    mma_each_row<S>([&](int m, int h) {
        const mma_range keys = mma_band_row(s.item, mma_query_from(s.item, mma_row<S>(m, h)).i);
        const uint32_t bits =
            mma_bits_below(keys.past - column) & ~mma_bits_below(keys.first - column);
        mma_select<S>(bits, -fattn_f32_infinity(), m, h, x);
    });
}

/* Turns dot products in x into scores, in lean kernels. */
template <class S, class Terms>
GPU_DEVICE void mma_score(const fattn_gpu_args &g, const Terms &s, bool partial, int j0,
                          float x[S::TILES][S::KEYS / 8][4])
{
    if (g.rule.terms) { /* a scale that cannot be folded into the unit */
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) { score *= g.rule.scale; });
        });
    }
    if (partial) {
        mma_apply_band<S>(s, j0, x);
    }
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* A bit for each of the thread's keys: whether dropout keeps it for query q. For tiles at any
 * position. */
template <class S>
GPU_DEVICE uint32_t mma_dropout_bits(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q,
                                     int j0)
{
    const int own = j0 + mma_own<S>();
    uint32_t bits = 0;
    GPU_ROLLED
    for (int j = 0; j < S::OWN && q.h >= 0; j += 2) {
        float z[2];
        gpu_drop<2>(g, t, q, own + mma_behind<S>(j), z);
        bits |= (uint32_t)((z[0] != 0) | (z[1] != 0) << 1) << j;
    }
    return bits;
}

/* Sets weights in x that dropout drops to 0. o is multiplied by Z at the end, because weights times
 * Z might overflow. If the tile is aligned to the generator's 16 x 16 patches and all rows are of
 * one head, a call of the generator serves eight of a thread's pairs: two adjacent keys and the two
 * 8 further, of two rows. */
template <class S, class Terms>
GPU_DEVICE void mma_drop(const fattn_gpu_args &g, const Terms &s, int j0,
                         float x[S::TILES][S::KEYS / 8][4])
{
    const gpu_pairs &t = s.item.pairs;
    const int64_t row = t.seq.q_position + s.item.i0, key = t.seq.k_position + j0;
    if (S::OWN < 16 || s.item.group != 1 || row % 16 || key % 16) {
        mma_each_row<S>([&](int m, int h) {
            const gpu_query q = mma_query(s.item, mma_row<S>(m, h));
            mma_select<S>(mma_dropout_bits<S>(g, t, q, j0), 0, m, h, x);
        });
        return;
    }
    /* The shift loses no bit: dropout_max of the kernel rows keeps the threshold below 65536. */
    const uint32_t threshold = t.dropout.threshold << 16;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        const gpu_query q = mma_query(s.item, mma_row<S>(m, 0)); /* its bit 3 is clear */
        const fattn_dropout_rows rows = fattn_dropout_rows_at(
            t.seq.q_position, (uint32_t)q.i, (uint32_t)(g.problem.batch_offset + t.b),
            (uint32_t)(g.problem.head_offset + (q.h < 0 ? 0 : q.h)));
        GPU_UNROLL
        for (int n = 0; n < S::OWN / 16 * 4; n++) {
            const int j = S::IN_ORDER ? 4 * n : n / 4 * 16 + n % 4 * 2;
            uint32_t words[4];
            fattn_dropout_words(&t.dropout, rows, key + mma_own<S>() + mma_behind<S>(j), words);
            GPU_UNROLL
            for (int e = 0; e < 8; e++) {
                const int right = e / 4, below = e / 2 % 2, odd = e % 2;
                const uint32_t word = words[2 * below + right];
                float *const weight = &x[m][j / 2 + (S::IN_ORDER ? 1 : 4) * right][2 * below + odd];
                *weight = (odd ? word : word << 16) < threshold ? 0 : *weight;
            }
        }
    }
}

/* --- A row's sums ----------------------------------------------------------------------------- */

/* The maximum, and the sum, over the quad of lanes that share a row. (gpu_team_max<4>() and
 * gpu_team_sum<4>() would do the same, but ptxas makes longer code of their loops.) */
GPU_DEVICE float mma_quad_max(float x)
{
    x = gpu_max(x, gpu_shfl_xor(x, 1));
    return gpu_max(x, gpu_shfl_xor(x, 2));
}

GPU_DEVICE float mma_quad_sum(float x)
{
    x += gpu_shfl_xor(x, 1);
    return x + gpu_shfl_xor(x, 2);
}

/* By how much a row's maximum may exceed its reference, in log2 units. */
#define MMA_MARGIN 8.0f

/* x rounded to type T. */
template <class T> GPU_DEVICE float mma_rounded(float x)
{
    return gpu_widen((fattn_dtype)T::DTYPE, (uint16_t)T::pack(x, 0));
}

/*
 * The rounding error that the sum of a row's weights has because p rounds them to 16 bits, counted
 * for one weight of each of the quad's threads: that of its largest score. l sums weights that are
 * not rounded. If one key dominates the row, o would have the relative error of its weight. So o is
 * divided by l plus this; lse is computed from l alone. 0 with dropout, which may have dropped the
 * weight.
 */
template <class S> GPU_DEVICE float mma_rounding(const fattn_gpu_args &g, float weight)
{
    if (S::type::PLANES > 1 || mma_has<S>(g, FATTN_DROPOUT)) {
        return 0;
    }
    /* Only a score that was clamped afterwards has a weight beyond the margin. */
    weight = fminf(weight, (float)(1 << ((int)MMA_MARGIN + S::type::LIFT)));
    return mma_quad_sum(mma_rounded<typename S::type>(weight) - weight);
}

/* The factor for o of a part, so that its later division by l divides by l + added. share:
 * 1 / (l + added). */
GPU_DEVICE float mma_part_factor(float l, float share, float added)
{
    return added == 0 ? 1 : l * share;
}

#endif
