/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core's headers as a GPU reads them. Nothing here runs: the unit has to compile with nvcc and,
 * without the vendor's headers, with clang for AMD's processors. Each kernel is one thread's work.
 */
#include "core/band.h"
#include "core/dtype.h"
#include "core/host_device.h"
#include "core/philox.h"

#if defined(__HIP__)
#define __global__ __attribute__((global))
#define exp2f __builtin_exp2f
#define log2f __builtin_log2f
#define fmaf __builtin_fmaf
#endif

#include "backends/gpu/scalar.h"
#include "core/online_softmax.h"
#include "core/score.h"

/* What a tile is, by window and by block mask. */
extern "C" __global__ void classify(fattn_band band, fattn_block_mask mask, int64_t i, int64_t j,
                                    int *kinds)
{
    kinds[0] = fattn_band_tile(&band, i, i + 64, j, j + 64);
    kinds[1] = fattn_block_mask_tile(&mask, i, i + 64, j, j + 64);
}

/* Every conversion, there and back, of one element. */
extern "C" __global__ void convert(const double *in, float *f32, uint16_t *f16, uint16_t *bf16,
                                   uint8_t *e4m3)
{
    f32[0] = fattn_f32_from_f64(in[0]);
    f16[0] = fattn_f16_from_f64(in[0]);
    bf16[0] = fattn_bf16_from_f64(in[0]);
    e4m3[0] = fattn_e4m3_from_f64(in[0]);

    f16[1] = fattn_f16_from_f32(f32[0]);
    bf16[1] = fattn_bf16_from_f32(f32[0]);
    e4m3[1] = fattn_e4m3_from_f32(f32[0]);

    f32[1] = fattn_f16_to_f32(f16[0]);
    f32[2] = fattn_bf16_to_f32(bf16[0]);
    f32[3] = fattn_e4m3_to_f32(e4m3[0]);
}

/* The multipliers of a thread's 2 x 4 patch of a tensor-core tile, from one call; then the other
 * two forms. seed and offset in device memory, as a captured graph has them. */
extern "C" __global__ void drop(uint32_t threshold, const uint64_t *seed, const uint64_t *offset,
                                int64_t i, int64_t j, uint32_t b, uint32_t h, float *z)
{
    const fattn_dropout dropout = fattn_dropout_make(threshold, *seed, *offset);
    const fattn_dropout_rows rows = fattn_dropout_rows_at(i, 0, b, h);
    uint32_t words[4];

    fattn_dropout_words(&dropout, rows, j, words);
    for (int corner = 0; corner < 8; corner++) {
        z[corner] = fattn_dropout_multiplier(&dropout, words[corner >> 1], corner & 1);
    }
    z[8] = fattn_dropout_at(&dropout, rows, j);
    fattn_dropout_block(&dropout, rows, j, z + 16);
}

/* A row of dot products against values of one channel, in two parts that are merged. */
extern "C" __global__ void attend(const float *dot, const float *bias, const float *v, int64_t keys,
                                  fattn_score_rule rule, float sink, float *o, float *lse)
{
    const float unit = (float)FATTN_LOG2E;
    fattn_softmax state[2] = {fattn_softmax_sink(sink), fattn_softmax_empty()};
    float sum[2] = {0, 0};

    for (int part = 0; part < 2; part++) {
        for (int64_t j = part * keys / 2; j < (part + 1) * keys / 2; j++) {
            const fattn_score_pair pair = {bias[j], 0.5f, (float)(keys - j), j != 3};
            float dscore;
            const float x =
                fattn_score(&rule, rule.terms | FATTN_SCORE_KEEP, dot[j], pair, &dscore);
            const float alpha = fattn_softmax_raise(&state[part], x, unit);
            const float p = fattn_softmax_weight(x, unit, fattn_softmax_base(state[part]));
            fattn_softmax_add(&state[part], p);
            sum[part] = alpha * sum[part] + p * dscore * v[j];
        }
    }
    float alpha, beta;
    fattn_softmax_merge(&state[0], state[1], unit, &alpha, &beta);
    *o = (alpha * sum[0] + beta * sum[1]) * fattn_softmax_normaliser(state[0]);
    *lse = fattn_softmax_lse(state[0], rule.natural);
}
