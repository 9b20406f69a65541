/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two memories and the operations on a tile of scores: see tiled_machine.h.
 *
 * Counting and computing share one path: each function counts first and then, unless the machine
 * only counts, does what it counted.
 */
#include "backends/reference/tiled_machine.h"

#include <math.h>

#include "core/dtype.h"
#include "core/integer.h"

/* -------------------------------------------------------------------------------------------------
 * Slow memory
 * ---------------------------------------------------------------------------------------------- */

static int64_t index_of(const matrix *a, int64_t row)
{
    if (a->pages == NULL) return a->origin + row * a->pitch;
    return a->origin + a->pages[row / a->page_size] * a->page_pitch + row % a->page_size * a->pitch;
}

static void count_reads(machine *c, fattn_io_tensor name, int64_t rows, int64_t width)
{
    c->counts->tensor[name].reads += (double)rows * (double)width;
}

static void count_writes(machine *c, fattn_io_tensor name, int64_t rows, int64_t width)
{
    c->counts->tensor[name].writes += (double)rows * (double)width;
}

void fattn_machine_load(machine *c, const matrix *a, int64_t first, int64_t count, double *fast)
{
    count_reads(c, a->name, count, a->width);
    if (!c->compute) return;
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = index_of(a, first + n);
        for (int64_t w = 0; w < a->width; w++) {
            fast[n * a->width + w] = fattn_dtype_load(a->dtype, a->base, at + w);
        }
    }
}

void fattn_machine_store(machine *c, const matrix *a, int64_t first, int64_t count,
                         const double *fast)
{
    count_writes(c, a->name, count, a->width);
    if (!c->compute) return;
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = index_of(a, first + n);
        for (int64_t w = 0; w < a->width; w++) {
            fattn_dtype_store(a->dtype, a->base, at + w, fast[n * a->width + w]);
        }
    }
}

static void add_element(fattn_dtype dtype, void *array, int64_t at, double x)
{
    fattn_dtype_store(dtype, array, at, fattn_dtype_load(dtype, array, at) + x);
}

void fattn_machine_add(machine *c, const matrix *a, int64_t first, int64_t count,
                       const double *fast)
{
    count_reads(c, a->name, count, a->width);
    count_writes(c, a->name, count, a->width);
    if (!c->compute) return;
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = index_of(a, first + n);
        for (int64_t w = 0; w < a->width; w++) {
            add_element(a->dtype, a->base, at + w, fast[n * a->width + w]);
        }
    }
}

void fattn_machine_fill(machine *c, const matrix *a, int64_t first, int64_t count, double value)
{
    count_writes(c, a->name, count, a->width);
    if (!c->compute) return;
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = index_of(a, first + n);
        for (int64_t w = 0; w < a->width; w++) fattn_dtype_store(a->dtype, a->base, at + w, value);
    }
}

void fattn_machine_publish(machine *c, const matrix *state, const matrix *out, int64_t rows,
                           bool add)
{
    if (!c->compute) return;
    for (int64_t n = 0; n < rows; n++) {
        const int64_t from = index_of(state, n), to = index_of(out, n);
        for (int64_t w = 0; w < out->width; w++) {
            const double x = fattn_dtype_load(state->dtype, state->base, from + w);
            if (add) {
                add_element(out->dtype, out->base, to + w, x);
            } else {
                fattn_dtype_store(out->dtype, out->base, to + w, x);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Tensors over pairs: bias, mask, block mask, dbias
 * ---------------------------------------------------------------------------------------------- */

static int64_t pair_index(const machine *c, const int64_t stride[4], int64_t i, int64_t j)
{
    return c->b * stride[0] + c->h * stride[1] + i * stride[2] + j * stride[3];
}

/* Distinct rows (columns) of a tensor within a tile: 1 along a broadcast axis. */
static int64_t own_rows(const int64_t stride[4], const tile *t)
{
    return stride[2] != 0 ? t->rows : fattn_min64(t->rows, 1);
}

static int64_t own_keys(const int64_t stride[4], const tile *t)
{
    return stride[3] != 0 ? t->keys : fattn_min64(t->keys, 1);
}

/* Loads the entries of a tile and broadcasts them to [rows][keys]. */
static void load_pairs(machine *c, fattn_io_tensor name, const void *base, fattn_dtype dtype,
                       const int64_t stride[4], const tile *t, double *fast)
{
    count_reads(c, name, own_rows(stride, t), own_keys(stride, t));
    if (!c->compute) return;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t at = pair_index(c, stride, t->row + r, t->key + k);
            fast[r * t->keys + k] = dtype != 0 ? fattn_dtype_load(dtype, base, at)
                                               : (double)((const uint8_t *)base)[at];
        }
    }
}

void fattn_machine_add_dbias(machine *c, const tile *t)
{
    const int64_t *const stride = c->p->dbias_stride;
    count_reads(c, FATTN_IO_DBIAS, own_rows(stride, t), own_keys(stride, t));
    count_writes(c, FATTN_IO_DBIAS, own_rows(stride, t), own_keys(stride, t));
    if (!c->compute) return;

    /* The tile is summed in fast memory, first over the keys, then over the rows. */
    const int64_t rows = own_rows(stride, t), keys = own_keys(stride, t);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < keys; k++) {
            double sum = 0;
            for (int64_t rr = r; rr < (rows == 1 ? t->rows : r + 1); rr++) {
                for (int64_t kk = k; kk < (keys == 1 ? t->keys : k + 1); kk++) {
                    sum += c->ds_ij[rr * t->keys + kk];
                }
            }
            add_element(fattn_statistics_dtype(c->p), c->buf->dbias,
                        pair_index(c, stride, t->row + r, t->key + k), sum);
        }
    }
}

/* Whether any pair of the tile is in the window. The distances j - (i + off) range from the lower
 * left corner's to the upper right corner's. */
static bool window_sees(const machine *c, const tile *t)
{
    const int64_t least = t->key - (t->row + t->rows - 1 + c->seq.diagonal);
    const int64_t most = t->key + t->keys - 1 - (t->row + c->seq.diagonal);
    return (c->p->window_left < 0 || most >= -c->p->window_left) &&
           (c->p->window_right < 0 || least <= c->p->window_right);
}

/* Whether the block mask keeps any pair of the tile. Reads the entries that the tile touches. */
static bool block_mask_sees(machine *c, const tile *t)
{
    const int64_t bm = c->p->block_m, bn = c->p->block_n;
    const int64_t top = t->row / bm, bottom = (t->row + t->rows - 1) / bm;
    const int64_t left = t->key / bn, right = (t->key + t->keys - 1) / bn;
    const tile blocks = {top, bottom - top + 1, left, right - left + 1};
    const int64_t *const stride = c->p->block_mask_stride;
    count_reads(c, FATTN_IO_BLOCK_MASK, own_rows(stride, &blocks), own_keys(stride, &blocks));

    bool any = false;
    for (int64_t i = top; i <= bottom; i++) {
        for (int64_t j = left; j <= right; j++) {
            any = any || c->buf->block_mask[pair_index(c, stride, i, j)] != 0;
        }
    }
    if (!any || !c->compute) return any;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t at = pair_index(c, stride, (t->row + r) / bm, (t->key + k) / bn);
            c->keep_ij[r * t->keys + k] = c->buf->block_mask[at] != 0;
        }
    }
    return true;
}

bool fattn_machine_sees(machine *c, const tile *t)
{
    if (c->schedule == FATTN_IO_FLASH2 && !window_sees(c, t)) return false;
    if (machine_has(c, FATTN_BLOCK_MASK)) return block_mask_sees(c, t);
    if (c->compute) {
        for (int64_t n = 0; n < t->rows * t->keys; n++) c->keep_ij[n] = 1;
    }
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * Scores: x = cap(scale q.k) + bias - slope |i + off - j|, kept where all masks say so
 * ---------------------------------------------------------------------------------------------- */

void fattn_machine_product(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t d = c->p->dim;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            double dot = 0;
            for (int64_t n = 0; n < d; n++) dot += c->q_i[r * d + n] * c->k_j[k * d + n];
            c->s_ij[r * t->keys + k] = c->p->scale * dot;
            c->slope_ij[r * t->keys + k] = 1;
        }
    }
}

void fattn_machine_cap(machine *c, const tile *t)
{
    if (!machine_has(c, FATTN_SOFTCAP) || !c->compute) return;
    for (int64_t n = 0; n < t->rows * t->keys; n++) {
        const double y = tanh(c->s_ij[n] / c->p->softcap);
        c->s_ij[n] = c->p->softcap * y;
        c->slope_ij[n] = 1 - y * y;
    }
}

/* A finite bias stays finite in f32 log2 units, as the contract demands except for f64 problems. */
static double clamp_bias(const machine *c, double bias)
{
    if (c->p->dtype == FATTN_F64 || !isfinite(bias)) return bias;
    return bias < -0x1p126 ? -0x1p126 : bias > 0x1p126 ? 0x1p126 : bias;
}

void fattn_machine_bias(machine *c, const tile *t)
{
    if (!machine_has(c, FATTN_BIAS)) return;
    load_pairs(c, FATTN_IO_BIAS, c->buf->bias, c->p->dtype_bias, c->p->bias_stride, t, c->bias_ij);
    if (!c->compute) return;
    for (int64_t n = 0; n < t->rows * t->keys; n++) {
        const double bias = clamp_bias(c, c->bias_ij[n]);
        if (bias == -(double)INFINITY) { /* equivalent to a mask */
            c->keep_ij[n] = 0;
            c->s_ij[n] = bias;
        } else {
            c->s_ij[n] += bias;
        }
    }
}

void fattn_machine_alibi(machine *c, const tile *t)
{
    if (!machine_has(c, FATTN_ALIBI) || !c->compute) return;
    const double slope = fattn_dtype_load(fattn_statistics_dtype(c->p), c->buf->alibi_slopes,
                                          c->b * c->p->alibi_batch_stride + c->h);
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t distance = t->row + r + c->seq.diagonal - (t->key + k);
            c->s_ij[r * t->keys + k] -= slope * fabs((double)distance);
        }
    }
}

static bool in_window(const machine *c, int64_t i, int64_t j)
{
    const int64_t distance = j - (i + c->seq.diagonal);
    return (c->p->window_left < 0 || distance >= -c->p->window_left) &&
           (c->p->window_right < 0 || distance <= c->p->window_right);
}

void fattn_machine_mask(machine *c, const tile *t)
{
    const bool masked = machine_has(c, FATTN_MASK);
    if (masked) {
        load_pairs(c, FATTN_IO_MASK, c->buf->mask, 0, c->p->mask_stride, t, c->mask_ij);
    }
    if (!c->compute) return;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t n = r * t->keys + k;
            if (!in_window(c, t->row + r, t->key + k) || (masked && c->mask_ij[n] == 0)) {
                c->keep_ij[n] = 0;
            }
            if (c->keep_ij[n] == 0) c->s_ij[n] = -(double)INFINITY;
        }
    }
}

void fattn_machine_score(machine *c, const tile *t)
{
    fattn_machine_product(c, t);
    fattn_machine_cap(c, t);
    fattn_machine_bias(c, t);
    fattn_machine_alibi(c, t);
    fattn_machine_mask(c, t);
}

void fattn_machine_dropout(machine *c, const tile *t)
{
    if (!c->compute) return;
    const uint32_t b = (uint32_t)(c->b + c->p->batch_offset);
    const uint32_t h = (uint32_t)(c->h + c->p->head_offset);
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t i = t->row + r + c->seq.q_position;
        const bool drops = machine_has(c, FATTN_DROPOUT);
        fattn_dropout_rows rows = {0};
        if (drops) rows = fattn_dropout_rows_at(i, 0, b, h);
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t j = t->key + k + c->seq.k_position;
            const bool kept = drops && fattn_dropout_at(&c->dropout, rows, j) != 0;
            c->z_ij[r * t->keys + k] = !drops ? 1 : kept ? c->z_kept : 0;
        }
    }
}

double fattn_machine_exp(double x, double m) { return exp(m == -(double)INFINITY ? x : x - m); }
