/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of FlashAttention and of FlashAttention-2 for one head. Numbers in the margin are line
 * numbers of the published algorithms (references in tiled.h); Tr and Tc are the numbers of blocks
 * of queries and keys. Two additions come from the contract: a sink is an extra key whose value is
 * 0, so rows start from its state instead of an empty one; and rows without any key stay empty.
 */
#include <math.h>

#include "backends/reference/tiled_machine.h"
#include "core/dtype.h"
#include "core/integer.h"

static double sink_of(const machine *c)
{
    if (!machine_has(c, FATTN_SINK)) return -(double)INFINITY;
    return fattn_dtype_load(fattn_statistics_dtype(c->p), c->buf->sink, c->h);
}

static double sum_of_sink(const machine *c)
{
    return c->compute ? fattn_machine_exp(sink_of(c), sink_of(c)) : 0;
}

static double max_of_sink(const machine *c) { return c->compute ? sink_of(c) : 0; }

/* NaN compares false, so m stays as it is; the NaN reappears in l. */
static double larger(double m, double x) { return x > m ? x : m; }

/* --- FlashAttention --------------------------------------------------------------------------- */

/* m~ = rowmax(S), P~ = exp(S - m~) in place of S, l~ = rowsum(P~). */
static void softmax_of_tile(machine *c, const tile *t)
{
    if (!c->compute) return;
    for (int64_t r = 0; r < t->rows; r++) {
        double *const s = c->s_ij + r * t->keys; /* [keys] */
        double m = -(double)INFINITY, l = 0;
        for (int64_t k = 0; k < t->keys; k++) m = larger(m, s[k]);
        for (int64_t k = 0; k < t->keys; k++) {
            s[k] = fattn_machine_exp(s[k], m);
            l += s[k];
        }
        c->m_ij[r] = m;
        c->l_ij[r] = l;
    }
}

/* m_new = max(m, m~), l_new = e^(m - m_new) l + e^(m~ - m_new) l~ and
 * O = (l e^(m - m_new) O + e^(m~ - m_new) (P~ Z) V) / l_new. */
static void merge_tile(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < t->rows; r++) {
        const double m_new = larger(c->m_i[r], c->m_ij[r]);
        const double alpha = fattn_machine_exp(c->m_i[r], m_new);
        const double beta = fattn_machine_exp(c->m_ij[r], m_new);
        const double l_old = alpha * c->l_i[r], l_new = l_old + beta * c->l_ij[r];
        c->m_i[r] = m_new;
        c->l_i[r] = l_new;
        double *const o = c->o_i + r * dv; /* [dv] */
        for (int64_t n = 0; n < dv; n++) o[n] *= l_old;
        for (int64_t k = 0; k < t->keys; k++) {
            if (c->keep_ij[r * t->keys + k] == 0) continue;
            const double p = beta * c->s_ij[r * t->keys + k] * c->z_ij[r * t->keys + k];
            for (int64_t n = 0; n < dv; n++) o[n] += p * c->v_j[k * dv + n];
        }
        if (l_new == 0) continue; /* no key yet: O is 0, or NaN from 0 * NaN */
        for (int64_t n = 0; n < dv; n++) o[n] /= l_new;
    }
}

/* Returns O and, for the contract, lse = m + ln l; a row without any key has o = 0. */
static void return_rows(machine *c)
{
    const int64_t dv = c->p->dim_v;
    for (int64_t i = 0; i < c->seq.sq && c->compute; i++) {
        const double l = c->state.l[i], m = c->state.m[i];
        for (int64_t n = 0; n < dv && l == 0; n++) c->state.o[i * dv + n] = 0;
        if (machine_wants(c, FATTN_OUT_LSE)) {
            fattn_dtype_store(c->lse.dtype, c->lse.base, c->lse.origin + i,
                              l == 0 ? -(double)INFINITY : m + log(l));
        }
    }
    fattn_machine_publish(c, &c->o_state, &c->o, c->seq.sq, false);
}

/* Algorithm 2. Algorithm 1 is the same without lines 1, 11 and 14; Algorithm 5 adds the condition.
 * Line 1 is the seed in the buffers; the caller does lines 2, 4 and 5, the block sizes. */
void fattn_tiled_flash1_forward(machine *c)
{
    const int64_t rows = c->seq.sq, keys = c->seq.sk;

    fattn_machine_fill(c, &c->o_state, 0, rows, 0);        /*  3 */
    fattn_machine_fill(c, &c->l, 0, rows, sum_of_sink(c)); /*  3 */
    fattn_machine_fill(c, &c->m, 0, rows, max_of_sink(c)); /*  3 */
    for (int64_t j = 0; j < keys; j += c->bc) {            /*  6 */
        const int64_t n = fattn_min64(c->bc, keys - j);
        fattn_machine_load(c, &c->k, j, n, c->k_j); /*  7 */
        fattn_machine_load(c, &c->v, j, n, c->v_j); /*  7 */
        for (int64_t i = 0; i < rows; i += c->br) { /*  8 */
            const tile t = {i, fattn_min64(c->br, rows - i), j, n};
            if (!fattn_machine_sees(c, &t)) continue;               /* Algorithm 5 */
            fattn_machine_load(c, &c->q, i, t.rows, c->q_i);        /*  9 */
            fattn_machine_load(c, &c->o_state, i, t.rows, c->o_i);  /*  9 */
            fattn_machine_load(c, &c->l, i, t.rows, c->l_i);        /*  9 */
            fattn_machine_load(c, &c->m, i, t.rows, c->m_i);        /*  9 */
            fattn_machine_score(c, &t);                             /* 10, 11 */
            softmax_of_tile(c, &t);                                 /* 12 */
            fattn_machine_dropout(c, &t);                           /* 14 */
            merge_tile(c, &t);                                      /* 13, 15 */
            fattn_machine_store(c, &c->o_state, i, t.rows, c->o_i); /* 15 */
            fattn_machine_store(c, &c->l, i, t.rows, c->l_i);       /* 16 */
            fattn_machine_store(c, &c->m, i, t.rows, c->m_i);       /* 16 */
        }                                                           /* 17 */
    }                                                               /* 18 */
    return_rows(c);                                                 /* 19 */
}

/* --- FlashAttention-2 ------------------------------------------------------------------------- */

static void start_rows(machine *c, int64_t count)
{
    if (!c->compute) return;
    for (int64_t r = 0; r < count; r++) {
        c->m_i[r] = max_of_sink(c);
        c->l_i[r] = sum_of_sink(c);
    }
    for (int64_t n = 0; n < count * c->p->dim_v; n++) c->o_i[n] = 0;
}

/* m_new = max(m, rowmax(S)), P~ = exp(S - m_new), l = e^(m - m_new) l + rowsum(P~) and
 * O = e^(m - m_new) O + (P~ Z) V: unnormalised. (The paper's line 10 prints the inverse factor.) */
static void add_tile(machine *c, const tile *t)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < t->rows; r++) {
        const double *const s = c->s_ij + r * t->keys; /* [keys] */
        double *const o = c->o_i + r * dv;             /* [dv] */
        double m_new = c->m_i[r];
        for (int64_t k = 0; k < t->keys; k++) m_new = larger(m_new, s[k]);

        const double alpha = fattn_machine_exp(c->m_i[r], m_new);
        c->m_i[r] = m_new;
        c->l_i[r] *= alpha;
        for (int64_t n = 0; n < dv; n++) o[n] *= alpha;
        for (int64_t k = 0; k < t->keys; k++) {
            if (c->keep_ij[r * t->keys + k] == 0) continue;
            const double p = fattn_machine_exp(s[k], m_new);
            const double pz = p * c->z_ij[r * t->keys + k];
            c->l_i[r] += p;
            for (int64_t n = 0; n < dv; n++) o[n] += pz * c->v_j[k * dv + n];
        }
    }
}

/* O = O / l, L = m + ln l. */
static void finish_rows(machine *c, int64_t count)
{
    if (!c->compute) return;
    const int64_t dv = c->p->dim_v;
    for (int64_t r = 0; r < count; r++) {
        const double l = c->l_i[r];
        for (int64_t n = 0; n < dv; n++) c->o_i[r * dv + n] = l == 0 ? 0 : c->o_i[r * dv + n] / l;
        c->lse_i[r] = l == 0 ? -(double)INFINITY : c->m_i[r] + log(l);
    }
}

/* Algorithm 1, with the masks, dropout and skipping that its text describes. */
void fattn_tiled_flash2_forward(machine *c)
{
    const int64_t rows = c->seq.sq, keys = c->seq.sk;

    for (int64_t i = 0; i < rows; i += c->br) { /*  3 */
        const int64_t count = fattn_min64(c->br, rows - i);
        fattn_machine_load(c, &c->q, i, count, c->q_i); /*  4 */
        start_rows(c, count);                           /*  5 */
        for (int64_t j = 0; j < keys; j += c->bc) {     /*  6 */
            const tile t = {i, count, j, fattn_min64(c->bc, keys - j)};
            if (!fattn_machine_sees(c, &t)) continue;        /* section 3.1 */
            fattn_machine_load(c, &c->k, j, t.keys, c->k_j); /*  7 */
            fattn_machine_load(c, &c->v, j, t.keys, c->v_j); /*  7 */
            fattn_machine_score(c, &t);                      /*  8 */
            fattn_machine_dropout(c, &t);
            add_tile(c, &t);                             /*  9, 10 */
        }                                                /* 11 */
        finish_rows(c, count);                           /* 12, 13 */
        fattn_machine_store(c, &c->o, i, count, c->o_i); /* 14 */
        if (machine_wants(c, FATTN_OUT_LSE)) {
            fattn_machine_store(c, &c->lse, i, count, c->lse_i); /* 15 */
        }
    }
}
