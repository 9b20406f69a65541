/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of FlashAttention and of FlashAttention-2 for the query heads of one kv head. Numbers in
 * the margin are line numbers of the published algorithms (references in tiled.h).
 *
 * The papers have one query head per kv head. With several, the blocks dK~ and dV~ stay in fast
 * memory for all of them: the loop over heads is between the loops over keys and over queries. With
 * FATTN_ACCUMULATE the gradients are added to instead of initialised. Outputs that are not
 * requested are neither computed nor counted. A row with lse = -inf is empty: its P and dS are 0 by
 * definition.
 */
#include <math.h>

#include "backends/reference/tiled_machine.h"
#include "core/dtype.h"
#include "core/integer.h"

static bool is_empty(double lse) { return lse == -(double)INFINITY; }

/* --- What both share -------------------------------------------------------------------------- */

/* dQ, dK, dV = 0 in slow memory. FLASH2 initialises only the keys that no block writes: those
 * allotted to the sequence but unused. */
static void initialise_gradients(machine *c, int64_t b, int64_t h)
{
    const int64_t first = c->schedule == FATTN_IO_FLASH2 ? c->seq.sk : 0;
    const int64_t count = c->seq.slot_k - first;
    for (int64_t g = 0; g < c->group && machine_wants(c, FATTN_OUT_DQ); g++) {
        fattn_machine_select(c, b, h + g);
        fattn_machine_fill(c, &c->dq_state, 0, c->seq.sq, 0);
    }
    if (machine_has(c, FATTN_ACCUMULATE)) return;
    if (machine_wants(c, FATTN_OUT_DK)) fattn_machine_fill(c, &c->dk, first, count, 0);
    if (machine_wants(c, FATTN_OUT_DV)) fattn_machine_fill(c, &c->dv, first, count, 0);
}

static void clear_key_blocks(machine *c, int64_t keys)
{
    if (!c->compute) return;
    for (int64_t n = 0; n < keys * c->p->dim; n++) c->dk_j[n] = 0;
    for (int64_t n = 0; n < keys * c->p->dim_v; n++) c->dv_j[n] = 0;
}

static void write_key_blocks(machine *c, int64_t j, int64_t keys)
{
    const bool add = machine_has(c, FATTN_ACCUMULATE);
    if (machine_wants(c, FATTN_OUT_DK)) {
        (add ? fattn_machine_add : fattn_machine_store)(c, &c->dk, j, keys, c->dk_j);
    }
    if (machine_wants(c, FATTN_OUT_DV)) {
        (add ? fattn_machine_add : fattn_machine_store)(c, &c->dv, j, keys, c->dv_j);
    }
}

static void load_dlse(machine *c, int64_t i, int64_t count)
{
    if (machine_has(c, FATTN_DLSE)) {
        fattn_machine_load(c, &c->dlse, i, count, c->dlse_i);
    } else if (c->compute) {
        for (int64_t r = 0; r < count; r++) c->dlse_i[r] = 0;
    }
}

/* D = rowsum(dO o) - dLSE. */
static void delta_of_rows(machine *c, int64_t count)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < count; r++) {
        double sum = 0;
        for (int64_t n = 0; n < dv; n++) sum += c->dout_i[r * dv + n] * c->o_i[r * dv + n];
        c->delta_i[r] = sum - c->dlse_i[r];
    }
}

/* P = exp(S - lse_i) in place of S, and dV~ += (P Z)^T dO. keep_ij now excludes masked pairs and
 * empty rows from everything that follows. */
static void probabilities(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t n = r * t->keys + k;
            if (is_empty(c->lse_i[r])) c->keep_ij[n] = 0;
            c->s_ij[n] = c->keep_ij[n] == 0 ? 0 : exp(c->s_ij[n] - c->lse_i[r]);
            if (c->keep_ij[n] == 0) continue;
            const double pz = c->s_ij[n] * c->z_ij[n];
            for (int64_t e = 0; e < dv; e++) c->dv_j[k * dv + e] += pz * c->dout_i[r * dv + e];
        }
    }
}

/* dP = Z (dO V^T), dS = P (dP - D). */
static void score_gradients(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t n = r * t->keys + k;
            double dp = 0;
            for (int64_t e = 0; e < dv; e++) dp += c->dout_i[r * dv + e] * c->v_j[k * dv + e];
            c->ds_ij[n] = c->keep_ij[n] == 0 ? 0 : c->s_ij[n] * (c->z_ij[n] * dp - c->delta_i[r]);
        }
    }
}

/* Through the softcap, then dQ += scale dS K and dK~ += scale dS^T Q. */
static void product_gradients(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t d = c->p->dim;
    for (int64_t r = 0; r < t->rows; r++) {
        for (int64_t k = 0; k < t->keys; k++) {
            const int64_t n = r * t->keys + k;
            if (c->keep_ij[n] == 0) continue;
            const double ds = c->p->scale * (c->ds_ij[n] * c->slope_ij[n]);
            for (int64_t e = 0; e < d; e++) {
                c->dq_i[r * d + e] += ds * c->k_j[k * d + e];
                c->dk_j[k * d + e] += ds * c->q_i[r * d + e];
            }
        }
    }
}

/* dSink -= sum over rows of exp(sink - lse) D. The sink is a key whose score has no inputs besides
 * itself, and each row adds it once, not once per tile. */
static void sink_gradient(machine *c, int64_t count)
{
    if (!c->compute) return;
    const double sink = fattn_dtype_load(fattn_statistics_dtype(c->p), c->buf->sink, c->h);
    for (int64_t r = 0; r < count; r++) {
        if (!is_empty(c->lse_i[r])) {
            c->state.dsink[c->h] -= exp(sink - c->lse_i[r]) * c->delta_i[r];
        }
    }
}

static void return_dq(machine *c, int64_t b, int64_t h)
{
    for (int64_t g = 0; g < c->group && machine_wants(c, FATTN_OUT_DQ); g++) {
        fattn_machine_select(c, b, h + g);
        fattn_machine_publish(c, &c->dq_state, &c->dq, c->seq.sq, machine_has(c, FATTN_ACCUMULATE));
    }
}

/* --- FlashAttention --------------------------------------------------------------------------- */

/* Restores (m, l) in slow memory. The contract saves only lse = m + ln l; (m, l) = (lse, 1) is the
 * same state. */
static void prepare_statistics(machine *c, int64_t b, int64_t h)
{
    if (!c->compute) return;
    for (int64_t g = 0; g < c->group; g++) {
        fattn_machine_select(c, b, h + g);
        fattn_machine_publish(c, &c->lse, &c->m, c->seq.sq, false);
        for (int64_t i = 0; i < c->seq.sq; i++) c->state.l[c->l.origin + i] = 1;
    }
}

/* lse_i = m + ln l, so that P = diag(l)^-1 exp(S - m) is exp(S - lse). */
static void load_statistics(machine *c, int64_t i, int64_t count)
{
    fattn_machine_load(c, &c->l, i, count, c->l_i);
    fattn_machine_load(c, &c->m, i, count, c->m_i);
    if (!c->compute) return;
    for (int64_t r = 0; r < count; r++) c->lse_i[r] = c->m_i[r] + log(c->l_i[r]);
}

static void flash1_sink(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const int64_t count = fattn_min64(c->br, c->seq.sq - i);
        fattn_machine_load(c, &c->o, i, count, c->o_i);
        fattn_machine_load(c, &c->dout, i, count, c->dout_i);
        load_dlse(c, i, count);
        load_statistics(c, i, count);
        delta_of_rows(c, count);
        sink_gradient(c, count);
    }
}

static void flash1_tile(machine *c, const tile *t)
{
    const bool wants_dq = machine_wants(c, FATTN_OUT_DQ);
    fattn_machine_load(c, &c->q, t->row, t->rows, c->q_i);                       /* 10 */
    fattn_machine_load(c, &c->o, t->row, t->rows, c->o_i);                       /* 10 */
    fattn_machine_load(c, &c->dout, t->row, t->rows, c->dout_i);                 /* 10 */
    if (wants_dq) fattn_machine_load(c, &c->dq_state, t->row, t->rows, c->dq_i); /* 10 */
    load_statistics(c, t->row, t->rows);                                         /* 10 */
    load_dlse(c, t->row, t->rows);
    fattn_machine_score(c, t);   /* 11, 12 */
    fattn_machine_dropout(c, t); /* 14 */
    probabilities(c, t);         /* 13, 15, 16 */
    delta_of_rows(c, t->rows);   /* 19 */
    score_gradients(c, t);       /* 17, 18, 20 */
    if (machine_wants(c, FATTN_OUT_DBIAS)) fattn_machine_add_dbias(c, t);
    product_gradients(c, t);                                                      /* 21, 22 */
    if (wants_dq) fattn_machine_store(c, &c->dq_state, t->row, t->rows, c->dq_i); /* 21 */
}

/* Algorithm 4. Line 1 is the seed in the buffers; the caller does lines 2, 3 and 4. */
void fattn_tiled_flash1_backward(machine *c, int64_t b, int64_t h)
{
    prepare_statistics(c, b, h);
    fattn_machine_select(c, b, h);
    const int64_t rows = c->seq.sq, keys = c->seq.sk;

    initialise_gradients(c, b, h);              /*  5 */
    for (int64_t j = 0; j < keys; j += c->bc) { /*  6 */
        const int64_t n = fattn_min64(c->bc, keys - j);
        fattn_machine_load(c, &c->k, j, n, c->k_j); /*  7 */
        fattn_machine_load(c, &c->v, j, n, c->v_j); /*  7 */
        clear_key_blocks(c, n);                     /*  8 */
        for (int64_t g = 0; g < c->group; g++) {
            fattn_machine_select(c, b, h + g);
            for (int64_t i = 0; i < rows; i += c->br) { /*  9 */
                const tile t = {i, fattn_min64(c->br, rows - i), j, n};
                if (fattn_machine_sees(c, &t)) flash1_tile(c, &t); /* 10 .. 22 */
            }                                                      /* 23 */
        }
        write_key_blocks(c, j, n); /* 24 */
    }                              /* 25 */
    for (int64_t g = 0; g < c->group && machine_wants(c, FATTN_OUT_DSINK); g++) {
        fattn_machine_select(c, b, h + g);
        flash1_sink(c);
    }
    return_dq(c, b, h); /* 26 */
}

/* --- FlashAttention-2 ------------------------------------------------------------------------- */

/* D = rowsum(dO o) of the selected head, to slow memory. */
static void flash2_delta(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const int64_t count = fattn_min64(c->br, c->seq.sq - i);
        fattn_machine_load(c, &c->o, i, count, c->o_i);
        fattn_machine_load(c, &c->dout, i, count, c->dout_i);
        load_dlse(c, i, count);
        delta_of_rows(c, count);
        fattn_machine_store(c, &c->delta, i, count, c->delta_i);
    }
}

static void flash2_sink(machine *c)
{
    for (int64_t i = 0; i < c->seq.sq; i += c->br) {
        const int64_t count = fattn_min64(c->br, c->seq.sq - i);
        fattn_machine_load(c, &c->lse, i, count, c->lse_i);
        fattn_machine_load(c, &c->delta, i, count, c->delta_i);
        sink_gradient(c, count);
    }
}

/* The algorithm's line 9 also loads O, which nothing reads after line 4, and dQ, which line 15
 * loads again. Here O is not loaded, and dQ only once. */
static void flash2_tile(machine *c, const tile *t)
{
    const bool wants_dq = machine_wants(c, FATTN_OUT_DQ);
    fattn_machine_load(c, &c->q, t->row, t->rows, c->q_i);         /*  9 */
    fattn_machine_load(c, &c->dout, t->row, t->rows, c->dout_i);   /*  9 */
    fattn_machine_load(c, &c->lse, t->row, t->rows, c->lse_i);     /*  9 */
    fattn_machine_load(c, &c->delta, t->row, t->rows, c->delta_i); /*  9 */
    fattn_machine_score(c, t);                                     /* 10 */
    fattn_machine_dropout(c, t);
    probabilities(c, t);   /* 11, 12 */
    score_gradients(c, t); /* 13, 14 */
    if (machine_wants(c, FATTN_OUT_DBIAS)) fattn_machine_add_dbias(c, t);
    if (wants_dq) fattn_machine_load(c, &c->dq_state, t->row, t->rows, c->dq_i);  /* 15 */
    product_gradients(c, t);                                                      /* 15, 16 */
    if (wants_dq) fattn_machine_store(c, &c->dq_state, t->row, t->rows, c->dq_i); /* 15 */
}

/* Algorithm 2, with masks, dropout and skipping as in forward. */
void fattn_tiled_flash2_backward(machine *c, int64_t b, int64_t h)
{
    fattn_machine_select(c, b, h);
    const int64_t rows = c->seq.sq, keys = c->seq.sk;

    initialise_gradients(c, b, h); /*  3 */
    for (int64_t g = 0; g < c->group; g++) {
        fattn_machine_select(c, b, h + g);
        flash2_delta(c); /*  4 */
    }
    for (int64_t j = 0; j < keys; j += c->bc) { /*  5 */
        const int64_t n = fattn_min64(c->bc, keys - j);
        fattn_machine_load(c, &c->k, j, n, c->k_j); /*  6 */
        fattn_machine_load(c, &c->v, j, n, c->v_j); /*  6 */
        clear_key_blocks(c, n);                     /*  7 */
        for (int64_t g = 0; g < c->group; g++) {
            fattn_machine_select(c, b, h + g);
            for (int64_t i = 0; i < rows; i += c->br) { /*  8 */
                const tile t = {i, fattn_min64(c->br, rows - i), j, n};
                if (fattn_machine_sees(c, &t)) flash2_tile(c, &t); /*  9 .. 16 */
            }                                                      /* 17 */
        }
        write_key_blocks(c, j, n); /* 18 */
    }                              /* 19 */
    for (int64_t g = 0; g < c->group && machine_wants(c, FATTN_OUT_DSINK); g++) {
        fattn_machine_select(c, b, h + g);
        flash2_sink(c);
    }
    return_dq(c, b, h); /* 20 */
}
