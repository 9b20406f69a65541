/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward: a panel of queries against all of its keys. With the forward
 *
 *     x = score(q . k),  p = exp(x - lse),  o = sum_j Z p v_j
 *
 * and delta = sum_c dO_c o_c - dlse, a tile computes
 *
 *     P^T                from S^T = K Q^T and lse
 *     dP^T = V dO^T
 *     dS^T = P^T (Z dP^T - delta)         with respect to x; summed into dBias
 *     dS'  = dS dscore scale              with respect to the dot product
 *     dQ^T += K^T dS'^T                   kept by the panel, written once
 *     dV   += (Z P)^T dO                  added to rows of keys in memory
 *     dK   += dS'^T Q
 *
 * Sums over queries are the same for any number of threads, because panels that add to the same
 * memory do so in the order of their numbers. Such panels form a chain. Each publishes how many key
 * blocks it and all panels before it are done with, and the next one waits for that before it adds.
 * Only the additions wait, so the panels of a chain run side by side, one key block apart. Items
 * are handed out in ascending order, so the first unfinished panel of a chain never waits.
 *
 * A chain is a key/value head of a sequence: all panels that add to the same dK and dV, or to a
 * dBias whose sums stay within a head. If dBias is summed over sequences or heads, all panels are
 * one chain. f32 gradients are summed in their tensors; 16-bit ones in the workspace, and rounded
 * once at the end. If a head has a single panel, that stores them: see stores_keys().
 *
 * This header has what a panel holds and what all tiles share. backward_floats.h and
 * backward_pairs.h have the tiles, backward_run.h a panel's loop over its keys, gradients.h how
 * sums begin and end.
 */
#ifndef FATTN_CPU_BACKWARD_H
#define FATTN_CPU_BACKWARD_H

#include "backends/cpu/gradients.h"
#include "backends/cpu/lone.h"
#include "backends/cpu/soften.h"

typedef struct backward {
    panel panel;
    gradients shared;
    float *dout_t;         /* [dv_pad][br] */
    float *o, *ot;         /* [FV_LANES][dv_pad], [dv_pad][FV_LANES] */
    float *lse, *rest;     /* [br] lse in units of scores: rounded to float, and the rest */
    float *delta;          /* [br] */
    bool some_lone;        /* some row is lone (lone.h) */
    bool some_nonfinite;   /* some row's lse is NaN, or its delta is not finite */
    float *dqt, *dq;       /* [d_pad][br], [FV_LANES][d_pad] */
    prefetch_row *rows;    /* rows to prefetch: [bc + AHEAD br], with pairs [AHEAD br] */
    int64_t share, shares; /* which of the shares of list_rows_ahead() the next tile prefetches */
    float *dpt;            /* [bc][br] dP^T, then dS'^T; with pairs, of one strip */
    float **dpt_rows;      /* [bc] */
    float *ds;             /* [bc][br] and, transposed, [br][bc]; for dbias only */
    float *ds_rows;
    double *dbias_sums; /* [bc] */

    /* Products of floats. q and dout have strides of odd_lines(). */
    float *dout; /* [br][dout_stride]; panel.q is [br][q_stride] */
    int64_t q_stride, dout_stride;
    float **out;               /* [bc] rows of dk or dv */
    const float **weight_rows; /* [bc] weights of a key, from the first row that attends to it */
    float *discarded;          /* the sums of keys past the end go here */

    /* Products of pairs, which need q, dO and k also as pairs of rows, zipped. */
    const bf16_pair **v_rows;                /* [bc] */
    float *q_zipped, *dout_zipped;           /* [br / 2][d_pad], [dv_pad] */
    float *k_zipped, *k_transposed;          /* [bc / 2][d_pad], [d_pad][transposed_stride()] */
    uint16_t *p16, *ds16;                    /* [bc][br] Z P^T, dS^T */
    const bf16_pair **p16_rows, **ds16_rows; /* [bc] */
    const bf16_pair **weights;               /* [bc] rows of one of the two, for a product */
    /* [bc / 2][TILE_GROUP] dS^T of a strip, pairs of keys */
    float *ds_pairs;
    /* [bc][max(d_pad, dv_pad)] what is added to dv or dk */
    float *sums, **sum_rows;
    /* Factors that undo lift(): of dS, and of (Z P)^T dO. */
    float lowered, lowered_dv;
} backward;

/* The factors of a sum, which are applied one after the other. */
typedef struct sum_factors {
    float first, last;
} sum_factors;

/* The scratch that both kinds of products need. Scores and dP are `columns` wide. */
static void backward_layout_both(backward *job, const fattn_problem *p, const fattn_tiling *tiling,
                                 int64_t columns, arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    const int64_t bias = wants(p, FATTN_OUT_DBIAS) ? bc * br : 0;
    panel *const pn = &job->panel;

    panel_layout(pn, p, br, bc, from);
    panel_layout_rows(pn, from);
    job->o = carve(from, FV_LANES * pn->dv_pad, sizeof(float));
    job->ot = carve(from, pn->dv_pad * FV_LANES, sizeof(float));
    job->lse = carve(from, br, sizeof(float));
    job->rest = carve(from, br, sizeof(float));
    job->delta = carve(from, br, sizeof(float));
    job->dqt = carve(from, br * pn->d_pad, sizeof(float));
    job->dq = carve(from, FV_LANES * pn->d_pad, sizeof(float));
    pn->x = carve(from, bc * columns, sizeof(float));
    job->dpt = carve(from, bc * columns, sizeof(float));
    job->dpt_rows = carve(from, bc, sizeof *job->dpt_rows);
    job->ds = carve(from, bias, sizeof(float));
    job->ds_rows = carve(from, bias, sizeof(float));
    job->dbias_sums = carve(from, bias ? bc : 0, sizeof(double));
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* lse in units of scores, in two floats: one would be wrong by up to 2^-24 of lse, and all
 * probabilities of the row with it. */
static void load_lse(backward *job, int64_t r, float natural)
{
    const double exact = (double)natural / job->panel.rule.natural;
    job->lse[r] = (float)exact;
    const double rest = exact - job->lse[r];
    job->rest[r] = rest == rest ? (float)rest : 0; /* infinities and NaN have no rest */
}

/* Loads lse, and dlse into delta. A row whose lse is -inf has no probabilities: it is dead, as rows
 * past the last are, and contributes 0 whatever its dO and dlse are. */
static void load_lse_and_dlse(backward *job)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const float *const lse = pn->run->buffers->lse, *const dlse = pn->run->buffers->dlse;

    pn->ragged = pn->rows < pn->width;
    job->some_lone = false;
    for (int64_t r = 0; r < pn->width; r++) {
        query_row *const row = &pn->row[r];
        const int64_t at = row->dead ? 0 : fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i;
        const float x = row->dead ? 0 : lse[at];
        if (x == -fattn_f32_infinity()) {
            row->dead = pn->ragged = true;
        }
        load_lse(job, r, row->dead ? 0 : x);
        row->lone = row->dead ? -1 : (int32_t)lone_key(pn, r);
        job->some_lone = job->some_lone || row->lone >= 0;
        job->delta[r] = p->features & FATTN_DLSE && !row->dead ? dlse[at] : 0;
    }
}

/* Sets some_nonfinite, once lse and delta are loaded. Such values must not reach hidden pairs,
 * which count as 0: -inf minus NaN, and 0 times an infinity or NaN, are NaN. */
static void find_nonfinite(backward *job)
{
    job->some_nonfinite = false;
    for (int64_t r = 0; r < job->panel.width; r++) {
        job->some_nonfinite = job->some_nonfinite || isnan(job->lse[r]) || !isfinite(job->delta[r]);
    }
}

/* For the lone rows among first .. first + count - 1 whose key is in the tile: if lse differs from
 * the score that the tile computes by no more than rounding explains, the score replaces it
 * (lone.h). x: scores from row `first` on */
static void settle_lone(backward *job, span s, unsigned terms, int64_t first, int64_t count,
                        const float *x, int64_t stride)
{
    const panel *const pn = &job->panel;
    for (int64_t r = first; job->some_lone && r < fattn_min64(first + count, pn->rows); r++) {
        const int64_t j = pn->row[r].lone - s.first, lane = (r - first) % FV_LANES;
        if (pn->row[r].lone < 0 || j < 0 || j >= s.live) {
            continue;
        }
        const fv dot = fv_load(x + j * stride + r - first - lane);
        float score[FV_LANES];
        fv dscore;
        fv_store(score,
                 fattn_score(&pn->rule, terms, dot, pair_at(pn, terms, j, r - lane), &dscore));
        const float difference = fabsf(score[lane] - job->lse[r] - job->rest[r]);
        if (difference <= lone_tolerance(pn, r, pn->row[r].lone, score[lane])) {
            job->lse[r] = score[lane];
            job->rest[r] = 0;
        }
    }
}

/* Sets P and dS of hidden pairs to 0. terms: those of the scores */
INLINE void clear_hidden(unsigned terms, fattn_score_pair pair, fv *weight, fv *ds)
{
    const fv zero = fv_set1(0);
    if (terms & FATTN_SCORE_BIAS) {
        const mv hidden = fv_eq(pair.bias, fv_set1(-INFINITY));
        *weight = fv_select(hidden, zero, *weight);
        *ds = fv_select(hidden, zero, *ds);
    }
    if (terms & FATTN_SCORE_KEEP) {
        *weight = fv_select(pair.keep, *weight, zero);
        *ds = fv_select(pair.keep, *ds, zero);
    }
}

/* to[j stride] += sums[j] for j < n. */
static void add_sums(float *to, int64_t stride, const double *sums, int64_t n)
{
    if (stride == 0) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += sums[j];
        }
        *to += (float)sum;
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        to[j * stride] += (float)sums[j];
    }
}

/* dbias += dS. Consecutive rows that share their entries are first summed in double, and so are
 * keys that share one: equal terms all round the same way, so a float sum of them would be
 * inaccurate. */
static void add_dbias(backward *job, span s)
{
    const panel *const pn = &job->panel;
    const int64_t *const stride = pn->p->dbias_stride;
    const bool shared = stride[2] == 0 || stride[3] == 0;
    const bool sloped = pn->p->features & FATTN_ALIBI_BIAS;
    double *const sums = job->dbias_sums;
    bool fresh = true;
    transpose(job->ds, pn->br, s.padded, pn->width, job->ds_rows, pn->bc);
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const ds = job->ds_rows + r * pn->bc;
        const int64_t at = term_index(pn, stride, r, s.first);
        for (int64_t j = 0; sloped && j < s.live; j++) { /* the forward adds slope bias to x */
            ds[j] *= pn->slope[r];
        }
        float *const to = (float *)pn->run->buffers->dbias + at;
        if (!shared) {
            for (int64_t j = 0; j < s.live; j++) {
                to[j * stride[3]] += ds[j];
            }
            continue;
        }
        for (int64_t j = 0; j < s.live; j++) {
            sums[j] = fresh ? ds[j] : sums[j] + ds[j];
        }
        fresh = r + 1 == pn->rows || term_index(pn, stride, r + 1, s.first) != at;
        if (fresh) {
            add_sums(to, stride[3], sums, s.live);
        }
    }
}

/* Waits until the panel before this one in the chain has added to the keys of the tile or, if keys
 * share an entry of dbias, to all keys. */
static void wait_for_turn(const backward *job, span s, const fattn_cpu_progress *before)
{
    if (before) {
        const bool all = dbias_sums_keys(job->panel.p);
        fattn_cpu_wait(before, all ? INT64_MAX : s.first / job->panel.bc + 1);
    }
}

/* to += factor from */
static void add_row(float *to, const float *from, int64_t n, float factor)
{
    const fv f = fv_set1(factor);
    int64_t c = 0;
    for (; c + FV_LANES <= n; c += FV_LANES) {
        fv_store(to + c, fv_muladd(f, fv_load(from + c), fv_load(to + c)));
    }
    if (c < n) {
        const int part = (int)(n - c);
        const fv sum = fv_muladd(f, fv_load(from + c), fv_load_part(to + c, part));
        fv_store_part(to + c, sum, part);
    }
}

#endif
