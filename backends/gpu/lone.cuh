/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lone rows: rows of backward that attend to one key. Their probability is 1, but 2^(x - lse) is
 * not quite 1: the score x is computed again, perhaps in another order, and lse was rounded.
 * Kernels that keep P in floats lower the lse of such a row by more than rounding may have raised
 * it, and clamp every P to 1 (docs/NUMERICS.md, section 3; backends/cpu/lone.h does the same on
 * CPUs).
 *
 * Where P is rounded to 16 bits before it is used, as on tensor cores, it is 1 without this.
 */
#ifndef FATTN_GPU_LONE_CUH
#define FATTN_GPU_LONE_CUH

#include "backends/gpu/pairs.cuh"
#include "backends/gpu/team.cuh"

/* Whether a bias or mask may leave a row one key although its band has several. */
GPU_DEVICE bool gpu_hides_keys(const fattn_problem &p)
{
    return p.features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK);
}

/* The only key in the band of query i, or -1 if there are none or several. For runs without bias
 * and masks. */
GPU_DEVICE int32_t gpu_band_key(const gpu_pairs &t, int32_t i)
{
    const fattn_range keys = fattn_band_row(&t.band, i);
    return keys.past - keys.first == 1 ? (int32_t)keys.first : -1;
}

/* The only key that query q attends to, or -1 if there are none or several. All threads of a wave
 * must call it, for one query. */
GPU_DEVICE int32_t gpu_lone_key(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q)
{
    const unsigned terms = (g.rule.terms & FATTN_SCORE_BIAS) | FATTN_SCORE_KEEP;
    const fattn_range keys = fattn_band_row(&t.band, q.i);
    int32_t key = -1;
    float count = 0;
    for (int64_t first = keys.first; first < keys.past && count < 2; first += GPU_WAVE) {
        const int64_t j = first + gpu_thread() % GPU_WAVE;
        bool sees = j < keys.past;
        if (sees) {
            const fattn_score_pair pair = gpu_pair(g, t, terms, q, j);
            sees = pair.keep && pair.bias != -fattn_f32_infinity();
        }
        key = sees ? (int32_t)j : key;
        count += gpu_team_sum<GPU_WAVE>(sees ? 1.0f : 0.0f);
    }
    key = gpu_team_max<GPU_WAVE>(key);
    return count == 1 ? key : -1;
}

/* By how much to lower the lse of query q, which attends to `key` alone, in log2 units: four times
 * the error by which lse and the score, computed twice, may differ. 0 if key is -1, or if lse
 * covers more than that key: a sink, or keys of other shards. lse: natural. TEAM adjacent threads
 * must call it for one query. */
template <int TEAM>
GPU_DEVICE float gpu_lone_margin(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q,
                                 int32_t key, float lse)
{
    const fattn_problem &p = g.problem;
    const gpu_tensor query = gpu_tensor_of(g, g.buffers.q, p.dtype, FATTN_GPU_QUADS_Q, p.dim);
    const gpu_tensor keys = gpu_tensor_of(g, g.buffers.k, p.dtype, FATTN_GPU_QUADS_K, p.dim);
    float dot = 0, products = 0; /* products: the sum of their absolute values */
    if (key >= 0) {
        const int64_t q_at = gpu_query_at(t.seq, p.q, q.i, q.h);
        const int64_t k_at = gpu_key_at(g, t.seq, p.k, t.b, fattn_quotient(q.h, g.group), key);
        for (int c = 4 * (gpu_thread() % TEAM); c < query.dim; c += 4 * TEAM) {
            float x[4], y[4];
            gpu_load_quad(query, q_at, c, x);
            gpu_load_quad(keys, k_at, c, y);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                dot = fmaf(x[e], y[e], dot);
                products += fv_abs(x[e] * y[e]);
            }
        }
    }
    dot = gpu_team_sum<TEAM>(dot);
    products = gpu_team_sum<TEAM>(products);
    if (key < 0) {
        return 0;
    }
    float dscore;
    const fattn_score_pair pair = gpu_pair(g, t, g.rule.terms, q, key);
    const float x = fattn_score(&g.rule, g.rule.terms, dot, pair, &dscore) * g.rule.unit;
    const float terms = fv_abs(fattn_score_clamp(pair.bias)) + fv_abs(pair.slope * pair.distance);
    const float size = fv_abs(x) + (float)FATTN_LOG2E * (fv_abs(g.rule.scale) * products + terms);
    const float rounding = 0x1p-24f * (4 + (float)query.dim / 32) * size;
    const bool alone = fv_abs(x - lse * (float)FATTN_LOG2E) <= rounding;
    return alone && rounding < fattn_f32_infinity() ? 4 * rounding : 0;
}

#endif
