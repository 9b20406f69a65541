/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Standard attention, op by op: the baseline for FlashAttention. Every op reads its operands from
 * slow memory and writes its result there, including N x N matrices. Numbers in the margin are the
 * lines of Algorithms 0 (forward) and 3 (backward) of the first paper, which omits masks and
 * dropout. An op processes blocks of br rows. The operand that all rows need (K, V, or the gradient
 * that they add to) stays in fast memory meanwhile: a tile is br rows of all keys.
 *
 * Scale is part of the product, as in matrix libraries. Softcap, bias, ALiBi, masking (window, mask
 * and block mask together) and dropout are separate ops if the problem has them. Backward follows
 * Algorithm 3: delta is rowsum(P dP), not rowsum(dO o).
 */
#include <math.h>

#include "backends/reference/tiled_machine.h"
#include "core/dtype.h"
#include "core/integer.h"

/* The tile of rows i .. i + br and all keys. */
static tile rows_from(const machine *c, int64_t i)
{
    const tile t = {i, fattn_min64(c->br, c->seq.sq - i), 0, c->seq.sk};
    return t;
}

/* --- Forward ---------------------------------------------------------------------------------- */

static void op_product(machine *c)
{
    fattn_machine_load(c, &c->k, 0, c->seq.sk, c->k_j);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->q, i, t.rows, c->q_i);
        fattn_machine_product(c, &t);
        fattn_machine_store(c, &c->S, i, t.rows, c->s_ij);
    }
}

/* An elementwise op on scores; may work in place. */
static void op_scores(machine *c, void (*change)(machine *, const tile *), const matrix *from,
                      const matrix *to)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, from, i, t.rows, c->s_ij);
        change(c, &t);
        fattn_machine_store(c, to, i, t.rows, c->s_ij);
    }
}

static void hide(machine *c, const tile *t)
{
    if (t->keys > 0 && !fattn_machine_sees(c, t)) { /* the block mask hides these rows entirely */
        for (int64_t n = 0; n < t->rows * t->keys && c->compute; n++) c->keep_ij[n] = 0;
    }
    fattn_machine_mask(c, t);
}

static void softmax_rows(machine *c, const tile *t)
{
    if (!c->compute) return;
    const bool has_sink = machine_has(c, FATTN_SINK);
    const double sink = has_sink
                            ? fattn_dtype_load(fattn_statistics_dtype(c->p), c->buf->sink, c->h)
                            : -(double)INFINITY;
    for (int64_t r = 0; r < t->rows; r++) {
        double *const s = c->s_ij + r * t->keys; /* [keys] */
        double m = sink;
        for (int64_t k = 0; k < t->keys; k++) m = s[k] > m ? s[k] : m;
        double l = fattn_machine_exp(sink, m);
        for (int64_t k = 0; k < t->keys; k++) {
            s[k] = fattn_machine_exp(s[k], m);
            l += s[k];
        }
        for (int64_t k = 0; k < t->keys; k++) s[k] = l == 0 ? 0 : s[k] / l;
        c->lse_i[r] = l == 0 ? -(double)INFINITY : m + log(l);
    }
}

static void op_softmax(machine *c, const matrix *from)
{
    const bool writes_lse = c->p->op == FATTN_FORWARD && machine_wants(c, FATTN_OUT_LSE);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, from, i, t.rows, c->s_ij);
        softmax_rows(c, &t);
        fattn_machine_store(c, &c->P, i, t.rows, c->s_ij);
        if (writes_lse) fattn_machine_store(c, &c->lse, i, t.rows, c->lse_i);
    }
}

static void op_dropout(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->P, i, t.rows, c->s_ij);
        fattn_machine_dropout(c, &t);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) c->s_ij[n] *= c->z_ij[n];
        fattn_machine_store(c, &c->R, i, t.rows, c->s_ij);
        fattn_machine_store(c, &c->Z, i, t.rows, c->z_ij);
    }
}

/* The operand of P V and of its gradients: P after dropout. */
static const matrix *dropped(const machine *c)
{
    return machine_has(c, FATTN_DROPOUT) ? &c->R : &c->P;
}

static void op_output(machine *c)
{
    const int64_t dv = c->p->dim_v;
    fattn_machine_load(c, &c->v, 0, c->seq.sk, c->v_j);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, dropped(c), i, t.rows, c->s_ij);
        for (int64_t r = 0; r < t.rows && c->compute; r++) {
            double *const o = c->o_i + r * dv; /* [dv] */
            for (int64_t n = 0; n < dv; n++) o[n] = 0;
            for (int64_t k = 0; k < t.keys; k++) {
                const double p = c->s_ij[r * t.keys + k];
                for (int64_t n = 0; n < dv; n++) o[n] += p * c->v_j[k * dv + n];
            }
        }
        fattn_machine_store(c, &c->o, i, t.rows, c->o_i);
    }
}

/* Forward up to the probabilities, and the matrices that backward needs: C, P, Z, R. */
static void attend(machine *c)
{
    const matrix *scores = &c->S;
    op_product(c); /* 1 */
    if (machine_has(c, FATTN_SOFTCAP)) {
        op_scores(c, fattn_machine_cap, scores, &c->C);
        scores = &c->C;
    }
    if (machine_has(c, FATTN_BIAS)) {
        op_scores(c, fattn_machine_bias, scores, &c->S);
        scores = &c->S;
    }
    if (machine_has(c, FATTN_ALIBI)) {
        op_scores(c, fattn_machine_alibi, scores, &c->S);
        scores = &c->S;
    }
    if (machine_has(c, FATTN_MASK | FATTN_BLOCK_MASK) || c->p->window_left >= 0 ||
        c->p->window_right >= 0) {
        op_scores(c, hide, scores, &c->S);
        scores = &c->S;
    }
    op_softmax(c, scores); /* 2 */
    if (machine_has(c, FATTN_DROPOUT)) op_dropout(c);
}

void fattn_tiled_standard_forward(machine *c)
{
    attend(c);
    op_output(c); /* 3 */
}

/* --- Backward --------------------------------------------------------------------------------- */

/* A gradient of the kv head, [sk][width] in fast memory. The first query head stores it; the others
 * add to it. */
static void write_keys(machine *c, const matrix *state, bool first, const double *fast)
{
    (first ? fattn_machine_store : fattn_machine_add)(c, state, 0, c->seq.sk, fast);
}

/* sum[k][..] += a[r][k] * rows[r][..] over the rows of a tile; and the transposed use below. */
static void add_products(const machine *c, const tile *t, const double *a, const double *rows,
                         int64_t width, double *sum)
{
    if (!c->compute) return;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const double x = a[r * t->keys + k];
            for (int64_t n = 0; n < width; n++) sum[k * width + n] += x * rows[r * width + n];
        }
    }
}

static void clear(const machine *c, double *fast, int64_t count)
{
    for (int64_t n = 0; n < count && c->compute; n++) fast[n] = 0;
}

static void op_dv(machine *c, bool first)
{
    clear(c, c->dv_j, c->seq.sk * c->p->dim_v);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, dropped(c), i, t.rows, c->s_ij);
        fattn_machine_load(c, &c->dout, i, t.rows, c->dout_i);
        add_products(c, &t, c->s_ij, c->dout_i, c->p->dim_v, c->dv_j);
    }
    write_keys(c, &c->dv_state, first, c->dv_j);
}

static void op_dp(machine *c)
{
    const int64_t dv = c->p->dim_v;
    fattn_machine_load(c, &c->v, 0, c->seq.sk, c->v_j);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dout, i, t.rows, c->dout_i);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) {
            const int64_t r = n / t.keys, k = n % t.keys;
            c->ds_ij[n] = 0;
            for (int64_t e = 0; e < dv; e++) {
                c->ds_ij[n] += c->dout_i[r * dv + e] * c->v_j[k * dv + e];
            }
        }
        fattn_machine_store(c, &c->dP, i, t.rows, c->ds_ij);
    }
}

static void op_dropout_gradient(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dP, i, t.rows, c->ds_ij);
        fattn_machine_load(c, &c->Z, i, t.rows, c->z_ij);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) c->ds_ij[n] *= c->z_ij[n];
        fattn_machine_store(c, &c->dP, i, t.rows, c->ds_ij);
    }
}

/* delta = rowsum(P dP) - dLSE, dS = P (dP - delta). The sink has no dP. */
static void softmax_gradient(machine *c, const tile *t)
{
    if (!c->compute) return;
    const bool wants_dsink = machine_wants(c, FATTN_OUT_DSINK);
    const double sink =
        !wants_dsink ? 0 : fattn_dtype_load(fattn_statistics_dtype(c->p), c->buf->sink, c->h);
    for (int64_t r = 0; r < t->rows; r++) {
        const double *const p = c->s_ij + r * t->keys; /* [keys] */
        double *const ds = c->ds_ij + r * t->keys;     /* [keys] */
        double delta = -c->dlse_i[r];
        for (int64_t k = 0; k < t->keys; k++) delta += p[k] == 0 ? 0 : p[k] * ds[k];
        for (int64_t k = 0; k < t->keys; k++) ds[k] = p[k] == 0 ? 0 : p[k] * (ds[k] - delta);
        if (wants_dsink && c->lse_i[r] != -(double)INFINITY) {
            c->state.dsink[c->h] -= exp(sink - c->lse_i[r]) * delta;
        }
    }
}

static void op_softmax_gradient(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->P, i, t.rows, c->s_ij);
        fattn_machine_load(c, &c->dP, i, t.rows, c->ds_ij);
        clear(c, c->dlse_i, t.rows);
        if (machine_has(c, FATTN_DLSE)) fattn_machine_load(c, &c->dlse, i, t.rows, c->dlse_i);
        if (machine_wants(c, FATTN_OUT_DSINK)) {
            fattn_machine_load(c, &c->lse, i, t.rows, c->lse_i);
        }
        softmax_gradient(c, &t);
        fattn_machine_store(c, &c->dS, i, t.rows, c->ds_ij);
    }
}

static void op_dbias(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dS, i, t.rows, c->ds_ij);
        fattn_machine_add_dbias(c, &t);
    }
}

/* Multiplies by the derivative of the softcap, 1 - (C / softcap)^2. */
static void op_cap_gradient(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dS, i, t.rows, c->ds_ij);
        fattn_machine_load(c, &c->C, i, t.rows, c->s_ij);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) {
            const double y = c->s_ij[n] / c->p->softcap;
            c->ds_ij[n] = c->ds_ij[n] == 0 ? 0 : c->ds_ij[n] * (1 - y * y);
        }
        fattn_machine_store(c, &c->dS, i, t.rows, c->ds_ij);
    }
}

static void op_dq(machine *c)
{
    const int64_t d = c->p->dim;
    fattn_machine_load(c, &c->k, 0, c->seq.sk, c->k_j);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dS, i, t.rows, c->ds_ij);
        clear(c, c->dq_i, t.rows * d);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) {
            const int64_t r = n / t.keys, k = n % t.keys;
            for (int64_t e = 0; e < d; e++) {
                c->dq_i[r * d + e] += c->p->scale * c->ds_ij[n] * c->k_j[k * d + e];
            }
        }
        fattn_machine_store(c, &c->dq_state, i, t.rows, c->dq_i);
    }
    fattn_machine_publish(c, &c->dq_state, &c->dq, c->seq.sq, machine_has(c, FATTN_ACCUMULATE));
}

static void op_dk(machine *c, bool first)
{
    clear(c, c->dk_j, c->seq.sk * c->p->dim);
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const tile t = rows_from(c, i);
        fattn_machine_load(c, &c->dS, i, t.rows, c->ds_ij);
        fattn_machine_load(c, &c->q, i, t.rows, c->q_i);
        for (int64_t n = 0; n < t.rows * t.keys && c->compute; n++) c->ds_ij[n] *= c->p->scale;
        add_products(c, &t, c->ds_ij, c->q_i, c->p->dim, c->dk_j);
    }
    write_keys(c, &c->dk_state, first, c->dk_j);
}

/* Recomputes C, P, Z and R of forward, uncounted. */
static void restore(machine *c)
{
    if (!c->compute) return;
    fattn_io_counts nowhere = {0};
    fattn_io_counts *const counts = c->counts;
    c->counts = &nowhere;
    attend(c);
    c->counts = counts;
}

static void backward_head(machine *c, bool first)
{
    const uint32_t need_ds = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS | FATTN_OUT_DSINK;
    restore(c);
    if (machine_wants(c, FATTN_OUT_DV)) op_dv(c, first); /* 1 */
    if (!machine_wants(c, need_ds)) return;
    op_dp(c); /* 2 */
    if (machine_has(c, FATTN_DROPOUT)) op_dropout_gradient(c);
    op_softmax_gradient(c); /* 3 */
    if (machine_wants(c, FATTN_OUT_DBIAS)) op_dbias(c);
    if (!machine_wants(c, FATTN_OUT_DQ | FATTN_OUT_DK)) return;
    if (machine_has(c, FATTN_SOFTCAP)) op_cap_gradient(c);
    if (machine_wants(c, FATTN_OUT_DQ)) op_dq(c);        /* 4 */
    if (machine_wants(c, FATTN_OUT_DK)) op_dk(c, first); /* 5 */
}

/* Copies a gradient of the kv head out; allotted but unused keys get 0. */
static void return_keys(machine *c, const matrix *state, const matrix *out)
{
    const bool add = machine_has(c, FATTN_ACCUMULATE);
    fattn_machine_publish(c, state, out, c->seq.sk, add);
    if (!add) fattn_machine_fill(c, out, c->seq.sk, c->seq.slot_k - c->seq.sk, 0);
}

void fattn_tiled_standard_backward(machine *c, int64_t b, int64_t h)
{
    for (int64_t g = 0; g < c->group; g++) {
        fattn_machine_select(c, b, h + g);
        backward_head(c, g == 0);
    }
    if (machine_wants(c, FATTN_OUT_DK)) return_keys(c, &c->dk_state, &c->dk);
    if (machine_wants(c, FATTN_OUT_DV)) return_keys(c, &c->dv_state, &c->dv);
}
