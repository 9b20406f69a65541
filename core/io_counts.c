/* SPDX-License-Identifier: Apache-2.0 */
#include "core/io_counts.h"

#include "core/band.h"
#include "core/problem.h"

static bool wants(const fattn_io_head *a, uint32_t output) { return (a->p->outputs & output) != 0; }

static bool has(const fattn_io_head *a, uint64_t feature)
{
    return (a->p->features & feature) != 0;
}

static void reads(fattn_io_head *a, fattn_io_tensor tensor, double elements)
{
    a->counts->tensor[tensor].reads += elements;
}

static void writes(fattn_io_head *a, fattn_io_tensor tensor, double elements)
{
    a->counts->tensor[tensor].writes += elements;
}

/* --- Tensors over pairs ----------------------------------------------------------------------- */

double fattn_io_entries(const fattn_io_visits *v, const int64_t stride[4])
{
    if (stride[2] != 0) {
        return stride[3] != 0 ? v->pairs : v->rows;
    }
    return stride[3] != 0 ? v->keys : v->tiles;
}

static void score_counts(fattn_io_head *a)
{
    if (has(a, FATTN_BIAS)) {
        reads(a, FATTN_IO_BIAS, fattn_io_entries(&a->v, a->p->bias_stride));
    }
    if (has(a, FATTN_MASK)) {
        reads(a, FATTN_IO_MASK, fattn_io_entries(&a->v, a->p->mask_stride));
    }
    reads(a, FATTN_IO_BLOCK_MASK, a->v.entries);
}

static void dbias_counts(fattn_io_head *a)
{
    if (!wants(a, FATTN_OUT_DBIAS)) {
        return;
    }
    reads(a, FATTN_IO_DBIAS, fattn_io_entries(&a->v, a->p->dbias_stride));
    writes(a, FATTN_IO_DBIAS, fattn_io_entries(&a->v, a->p->dbias_stride));
}

double fattn_io_dbias_elements(const fattn_problem *p)
{
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    double elements = 1;
    for (int axis = 0; axis < 4; axis++) {
        elements *= p->dbias_stride[axis] != 0 ? (double)pairs[axis] : 1;
    }
    return elements;
}

/* --- FlashAttention --------------------------------------------------------------------------- */

/* O is initialised, and read and written again at each of the Tc key blocks; with l, m and Q that
 * is Tc (3 N d + 4 N) beside K, V and the first 3 N d. */
static void flash1_forward(fattn_io_head *a)
{
    score_counts(a);
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_O, a->v.rows * a->dv);
    reads(a, FATTN_IO_L, a->v.rows);
    reads(a, FATTN_IO_M, a->v.rows);
    writes(a, FATTN_IO_O, (a->n + a->v.rows) * a->dv);
    writes(a, FATTN_IO_L, a->n + a->v.rows);
    writes(a, FATTN_IO_M, a->n + a->v.rows);
}

/* A query head's part of backward; key_counts() has the part of its kv head. */
static void flash1_backward(fattn_io_head *a)
{
    const double sink = wants(a, FATTN_OUT_DSINK) ? a->n : 0, rows = a->v.rows + sink;
    score_counts(a);
    dbias_counts(a);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_O, rows * a->dv);
    reads(a, FATTN_IO_DOUT, rows * a->dv);
    reads(a, FATTN_IO_L, rows);
    reads(a, FATTN_IO_M, rows);
    if (has(a, FATTN_DLSE)) {
        reads(a, FATTN_IO_DLSE, rows);
    }
    if (!wants(a, FATTN_OUT_DQ)) {
        return;
    }
    reads(a, FATTN_IO_DQ, a->v.rows * a->d);
    writes(a, FATTN_IO_DQ, (a->n + a->v.rows) * a->d);
}

/* --- FlashAttention-2 ------------------------------------------------------------------------- */

static void flash2_forward(fattn_io_head *a)
{
    score_counts(a);
    reads(a, FATTN_IO_Q, a->n * a->d);
    reads(a, FATTN_IO_K, a->v.keys * a->d);
    reads(a, FATTN_IO_V, a->v.keys * a->dv);
    writes(a, FATTN_IO_O, a->n * a->dv);
    if (wants(a, FATTN_OUT_LSE)) {
        writes(a, FATTN_IO_LSE, a->n);
    }
}

static void flash2_backward(fattn_io_head *a)
{
    const double sink = wants(a, FATTN_OUT_DSINK) ? a->n : 0;
    score_counts(a);
    dbias_counts(a);
    reads(a, FATTN_IO_O, a->n * a->dv);
    reads(a, FATTN_IO_DOUT, (a->n + a->v.rows) * a->dv);
    if (has(a, FATTN_DLSE)) {
        reads(a, FATTN_IO_DLSE, a->n);
    }
    writes(a, FATTN_IO_DELTA, a->n);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_LSE, a->v.rows + sink);
    reads(a, FATTN_IO_DELTA, a->v.rows + sink);
    if (!wants(a, FATTN_OUT_DQ)) {
        return;
    }
    reads(a, FATTN_IO_DQ, a->v.rows * a->d);
    writes(a, FATTN_IO_DQ, (a->n + a->v.rows) * a->d);
}

/* dK or dV of a kv head. `cleared` keys of those that it has room for are set to 0 first. */
static void key_gradient(fattn_io_head *a, fattn_io_tensor tensor, double width)
{
    const double cleared = a->schedule == FATTN_IO_FLASH2 ? a->slot_k - a->k : a->slot_k;
    writes(a, tensor, a->k * width);
    if (has(a, FATTN_ACCUMULATE)) {
        reads(a, tensor, a->k * width);
    } else {
        writes(a, tensor, cleared * width);
    }
}

static void key_counts(fattn_io_head *a)
{
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    if (wants(a, FATTN_OUT_DK)) {
        key_gradient(a, FATTN_IO_DK, a->d);
    }
    if (wants(a, FATTN_OUT_DV)) {
        key_gradient(a, FATTN_IO_DV, a->dv);
    }
}

/* --- Standard attention ----------------------------------------------------------------------- */

/* Elementwise ops between the (capped) scores and softmax. */
static int score_ops(const fattn_problem *p)
{
    const bool masked = (p->features & (FATTN_MASK | FATTN_BLOCK_MASK)) != 0 || fattn_is_banded(p);
    return ((p->features & FATTN_BIAS) != 0) + ((p->features & FATTN_ALIBI) != 0) + masked;
}

/* Bias, mask and block mask are read, and dbias is written, in bands of br rows by all keys. */
static void standard_forward(fattn_io_head *a)
{
    const double nn = a->n * a->k, ops = score_ops(a->p);
    const bool capped = has(a, FATTN_SOFTCAP), drops = has(a, FATTN_DROPOUT);
    score_counts(a);
    reads(a, FATTN_IO_Q, a->n * a->d);
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    writes(a, FATTN_IO_O, a->n * a->dv);
    if (wants(a, FATTN_OUT_LSE)) {
        writes(a, FATTN_IO_LSE, a->n);
    }

    /* Each op reads what the one before wrote: the product S, the cap C, the others S again. */
    writes(a, FATTN_IO_S, nn * (1 + ops));
    reads(a, FATTN_IO_S, nn * (1 + ops));
    if (capped) {
        writes(a, FATTN_IO_C, nn);
        reads(a, FATTN_IO_C, nn);
    }
    writes(a, FATTN_IO_P, nn);
    reads(a, FATTN_IO_P, nn); /* by dropout, or by P V */
    if (!drops) {
        return;
    }
    writes(a, FATTN_IO_Z, nn);
    writes(a, FATTN_IO_R, nn);
    reads(a, FATTN_IO_R, nn);
}

static void standard_key_gradient(fattn_io_head *a, fattn_io_tensor tensor, double elements)
{
    writes(a, tensor, elements);
    if (!a->first) {
        reads(a, tensor, elements);
    }
}

static void standard_backward(fattn_io_head *a)
{
    const double nn = a->n * a->k;
    const bool drops = has(a, FATTN_DROPOUT);
    if (wants(a, FATTN_OUT_DV)) {
        reads(a, drops ? FATTN_IO_R : FATTN_IO_P, nn);
        reads(a, FATTN_IO_DOUT, a->n * a->dv);
        standard_key_gradient(a, FATTN_IO_DV, a->k * a->dv);
    }
    if (!wants(a, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS | FATTN_OUT_DSINK)) {
        return;
    }
    reads(a, FATTN_IO_DOUT, a->n * a->dv);
    reads(a, FATTN_IO_V, a->k * a->dv);
    writes(a, FATTN_IO_DP, drops ? 2 * nn : nn);
    reads(a, FATTN_IO_DP, drops ? 2 * nn : nn);
    if (drops) {
        reads(a, FATTN_IO_Z, nn);
    }
    reads(a, FATTN_IO_P, nn);
    writes(a, FATTN_IO_DS, nn);
    if (has(a, FATTN_DLSE)) {
        reads(a, FATTN_IO_DLSE, a->n);
    }
    if (wants(a, FATTN_OUT_DSINK)) {
        reads(a, FATTN_IO_LSE, a->n);
    }
    if (wants(a, FATTN_OUT_DBIAS)) {
        reads(a, FATTN_IO_DS, nn);
    }
    dbias_counts(a);
    if (has(a, FATTN_SOFTCAP) && wants(a, FATTN_OUT_DQ | FATTN_OUT_DK)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_C, nn);
        writes(a, FATTN_IO_DS, nn);
    }
    if (wants(a, FATTN_OUT_DQ)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_K, a->k * a->d);
        writes(a, FATTN_IO_DQ, a->n * a->d);
    }
    if (wants(a, FATTN_OUT_DK)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_Q, a->n * a->d);
        standard_key_gradient(a, FATTN_IO_DK, a->k * a->d);
    }
}

/* dK and dV of keys past the used ones are set to 0, once per kv head. */
static void standard_key_counts(fattn_io_head *a)
{
    const double unused = has(a, FATTN_ACCUMULATE) ? 0 : a->slot_k - a->k;
    if (wants(a, FATTN_OUT_DK)) {
        writes(a, FATTN_IO_DK, unused * a->d);
    }
    if (wants(a, FATTN_OUT_DV)) {
        writes(a, FATTN_IO_DV, unused * a->dv);
    }
}

/* --- By schedule ------------------------------------------------------------------------------ */

typedef void formula(fattn_io_head *head);

static const struct {
    formula *forward, *backward; /* of a query head */
    formula *backward_keys;      /* of a kv head */
} formulas[FATTN_IO_SCHEDULES] = {
    [FATTN_IO_STANDARD] = {standard_forward, standard_backward, standard_key_counts},
    [FATTN_IO_FLASH1] = {flash1_forward, flash1_backward, key_counts},
    [FATTN_IO_FLASH2] = {flash2_forward, flash2_backward, key_counts},
};

void fattn_io_count_queries(fattn_io_head *head)
{
    const bool forward = head->p->op == FATTN_FORWARD;
    (forward ? formulas[head->schedule].forward : formulas[head->schedule].backward)(head);
}

void fattn_io_count_keys(fattn_io_head *head)
{
    if (head->p->op == FATTN_BACKWARD) {
        formulas[head->schedule].backward_keys(head);
    }
}
