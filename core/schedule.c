/* SPDX-License-Identifier: Apache-2.0 */
#include "core/schedule.h"

fattn_work fattn_schedule_item(const fattn_tiling *tiling, int64_t heads, int64_t item)
{
    const int64_t block = item / tiling->splits, head = block / tiling->q_blocks;
    return (fattn_work){
        .batch = head / heads,
        .head = head % heads,
        .block = tiling->q_blocks - 1 - block % tiling->q_blocks,
        .split = item % tiling->splits,
    };
}

void fattn_schedule_keys(const fattn_tiling *tiling, int64_t split, int64_t *first, int64_t *past)
{
    const int64_t begin = split * tiling->split_blocks, end = begin + tiling->split_blocks;
    *first = begin < tiling->k_blocks ? begin : tiling->k_blocks;
    *past = end < tiling->k_blocks ? end : tiling->k_blocks;
}
