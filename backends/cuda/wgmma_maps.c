/* SPDX-License-Identifier: Apache-2.0 */
/* The tensor maps by which Hopper's kernels copy, and the problems that maps and kernels do not
 * take. */
#include <stddef.h>

#include "backends/cuda/wgmma_rows.h"
#include "backends/gpu/args.h"

#define LENGTH_MAX (1 << 30)
#define STRIDE_MAX (INT64_C(1) << 39) /* elements */

/* Tensor maps cannot have an axis of stride 0. If heads or sequences share data, the map has one
 * head or sequence, which all copy. A copy has many rows, so rows cannot be shared in this way. */
const char *fattn_wgmma_cannot(const fattn_kernel *row, const fattn_problem *p)
{
    const fattn_strides *const copied[] = {&p->q, &p->k, &p->v, &p->dout, &p->dk, &p->dv};
    const int inputs = p->op == FATTN_BACKWARD ? 4 : 3;
    const int count = p->op == FATTN_BACKWARD ? 6 : 3;
    if (p->seqlen_q >= LENGTH_MAX || p->total_q >= LENGTH_MAX || p->seqlen_k >= LENGTH_MAX ||
        p->total_k >= LENGTH_MAX) {
        return "takes fewer than 2^30 queries and keys";
    }
    for (int n = 0; n < count; n++) {
        const fattn_strides *const s = copied[n];
        if (n < inputs && s->seq == 0) {
            return "takes no rows of stride 0";
        }
        if (s->batch >= STRIDE_MAX || s->seq >= STRIDE_MAX || s->head >= STRIDE_MAX) {
            return "takes strides below 2^40 bytes";
        }
    }
    if (!(row->features & MMA_OF_PAIRS) && fattn_score_rule_make(0, p->scale, 0).terms) {
        return "takes only scales above 0";
    }
    return NULL;
}

void fattn_wgmma_axis_add(fattn_gpu_map *map, int64_t extent, int64_t stride, int box)
{
    const bool shared = stride == 0;
    map->extent[map->axes] = shared || extent < 1 ? 1 : (uint64_t)extent;
    map->stride[map->axes - 1] = shared ? 16 : map->bytes * (uint64_t)stride;
    map->box[map->axes] = (uint32_t)box;
    map->axes++;
}

fattn_gpu_map fattn_wgmma_map(size_t buffer, int64_t dim)
{
    fattn_gpu_map map = {
        .buffer = buffer, .bytes = 2, .axes = 1, .extent = {(uint64_t)dim}, .box = {64}};
    return map;
}

/* Appends the axes rows, heads and sequences. Packed rows have one sequence. */
static void add_axes(fattn_gpu_map *map, int64_t rows, int64_t heads, int64_t batch,
                     const fattn_strides *s, int box)
{
    fattn_wgmma_axis_add(map, rows, s->seq, box);
    fattn_wgmma_axis_add(map, heads, s->head, 1);
    fattn_wgmma_axis_add(map, batch, s->batch, 1);
}

fattn_gpu_map fattn_wgmma_keys_map(const fattn_problem *p, size_t buffer, int64_t dim,
                                   const fattn_strides *s, int keys)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_K ? 1 : p->batch;
    fattn_gpu_map map = fattn_wgmma_map(buffer, dim);
    if (p->dtype_kv == FATTN_E4M3) {
        map.bytes = 1;
        map.box[0] = 128;
    }
    if (p->features & FATTN_PAGED) { /* the axes are keys of a page, heads, pages */
        add_axes(&map, p->page_size, p->heads_k, p->num_pages, s,
                 (int)WGMMA_PIECE(p->page_size, keys));
    } else {
        add_axes(&map, p->total_k, p->heads_k, batch, s, keys);
    }
    return map;
}

fattn_gpu_map fattn_wgmma_rows_map(const fattn_problem *p, size_t buffer, int64_t dim,
                                   const fattn_strides *s, int rows)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch;
    fattn_gpu_map map = fattn_wgmma_map(buffer, dim);
    add_axes(&map, p->total_q, p->heads_q, batch, s, rows);
    return map;
}

bool fattn_wgmma_term_is_mapped(const int64_t stride[4], int64_t bytes, int64_t group)
{
    bool maps = stride[3] == 1;
    for (int n = 0; n < 3; n++) {
        maps = maps && stride[n] * bytes % 16 == 0 && stride[n] < STRIDE_MAX / group;
    }
    return maps;
}

fattn_gpu_map fattn_wgmma_term_map(const fattn_problem *p, uint64_t feature)
{
    const bool bias = feature == FATTN_BIAS;
    fattn_gpu_map map =
        fattn_wgmma_map(bias ? offsetof(fattn_buffers, bias) : offsetof(fattn_buffers, mask),
                        p->seqlen_k > 1 ? p->seqlen_k : 1);
    map.optional = true;
    map.bytes = bias ? 2 : 1;
    map.box[0] = 128 / map.bytes;
    return map;
}
