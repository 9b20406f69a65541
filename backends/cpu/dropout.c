/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_dropout_mask() on the CPU, with the generator that the kernels use. */
#include "backends/cpu/cpu.h"
#include "core/integer.h"
#include "core/philox.h"
#include "core/problem.h"

#define ITEM_ROWS 64 /* rows of a head per item */

int64_t fattn_cpu_dropout_items(const fattn_dropout_args *a)
{
    return a->batch * a->heads * fattn_ceil_div(a->seqlen_q, ITEM_ROWS);
}

void fattn_cpu_dropout_item(const fattn_dropout_args *a, int64_t item)
{
    const int64_t blocks = fattn_ceil_div(a->seqlen_q, ITEM_ROWS);
    const int64_t h = item / blocks % a->heads, b = item / blocks / a->heads;
    const int64_t first = item % blocks * ITEM_ROWS;
    const int64_t begin = a->k_offset, end = begin + a->seqlen_k;
    const fattn_dropout dropout =
        fattn_dropout_make(fattn_dropout_threshold(a->p), a->seed, a->offset);

    for (int64_t i = first; i < a->seqlen_q && i < first + ITEM_ROWS; i++) {
        const fattn_dropout_rows row =
            fattn_dropout_rows_at(a->q_offset, (uint32_t)i, (uint32_t)(a->batch_offset + b),
                                  (uint32_t)(a->head_offset + h));
        uint8_t *const keep = a->keep + ((b * a->heads + h) * a->seqlen_q + i) * a->seqlen_k;
        for (int64_t block = begin / 16 * 16; block < end; block += 16) {
            float z[16];
            fattn_dropout_block(&dropout, row, block, z);
            for (int64_t j = block < begin ? begin : block; j < end && j < block + 16; j++) {
                keep[j - begin] = z[j - block] != 0;
            }
        }
    }
}
