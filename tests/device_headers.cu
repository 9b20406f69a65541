/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core's headers as a GPU reads them. Nothing here runs: the unit has to compile with nvcc and with
 * clang for AMD's processors, in device code and without the vendors' headers.
 */
#include "core/dtype.h"
#include "core/host_device.h"
#include "core/philox.h"

#if defined(__HIP__)
#define __global__ __attribute__((global))
#endif

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

/* What a thread of a tensor-core tile does: the words of its 2 x 4 patch; and the other two forms. */
extern "C" __global__ void drop(const fattn_dropout dropout, const uint64_t *seed,
                                const uint64_t *offset, int64_t i, int64_t j, uint32_t b,
                                uint32_t h, float *z)
{
    const fattn_dropout run = fattn_dropout_make(dropout.threshold, *seed, *offset);
    const fattn_dropout_rows rows = fattn_dropout_rows_at(i, 0, b, h);
    uint32_t words[4];

    fattn_dropout_words(&run, rows, j, words);
    for (int corner = 0; corner < 8; corner++) {
        z[corner] = fattn_dropout_multiplier(&run, words[corner >> 1], corner & 1);
    }
    z[8] = fattn_dropout_at(&dropout, rows, j);
    fattn_dropout_block(&dropout, rows, j, z + 16);
}
