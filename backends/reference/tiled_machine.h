/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machine that tiled_*.c program: slow memory, fast memory, and counters of the traffic between
 * them. Private to those files; tiled.h explains its purpose.
 */
#ifndef FATTN_REFERENCE_TILED_MACHINE_H
#define FATTN_REFERENCE_TILED_MACHINE_H

#include "backends/reference/tiled.h"
#include "core/philox.h"
#include "core/problem.h"

/* A matrix of one head in slow memory. Row n begins `pitch` elements after row n - 1, or in a
 * page. */
typedef struct matrix {
    fattn_io_tensor name;
    fattn_dtype dtype;
    void *base;
    int64_t origin; /* index of row 0 (paged: of slot 0 of page 0) */
    int64_t width;  /* elements per row, contiguous */
    int64_t pitch;
    const int32_t *pages; /* NULL, or the page of rows n * page_size .. */
    int64_t page_size, page_pitch;
} matrix;

/* Queries row .. row + rows and keys key .. key + keys. Only standard attention has empty tiles. */
typedef struct tile {
    int64_t row, rows, key, keys;
} tile;

/* A program works on one head at a time. In backward the G heads of a kv head share dk and dv; each
 * has its own part of the state (dq, l, m, delta), chosen by fattn_machine_select(). */
typedef struct machine {
    const fattn_problem *p;
    const fattn_buffers *buf;
    fattn_io_schedule schedule;
    int64_t br, bc, group;
    bool compute; /* false: count only */
    fattn_io_counts *counts;
    fattn_dropout dropout;
    double z_kept; /* Z of a pair that dropout keeps */

    fattn_sequence seq;
    int64_t b, h;

    /* Slow memory: the caller's tensors. */
    matrix q, k, v, o, lse, dout, dlse, dq, dk, dv;
    /* Slow memory: the workspace, all double. */
    matrix o_state, l, m;         /* FLASH1; o_state also STANDARD */
    matrix dq_state, delta;       /* backward */
    matrix dk_state, dv_state;    /* STANDARD */
    matrix S, C, P, Z, R, dP, dS; /* STANDARD */
    struct {
        double *o, *l, *m, *dq, *delta, *dk, *dv, *S, *C, *P, *Z, *R, *dP, *dS;
        double *dsink; /* [hq] */
    } state;

    /* Fast memory. Blocks of queries [br][..] and of keys [bc][..]. */
    double *q_i, *o_i, *dout_i, *dq_i;            /* [br][d or dv] */
    double *k_j, *v_j, *dk_j, *dv_j;              /* [bc][d or dv] */
    double *l_i, *m_i, *lse_i, *delta_i, *dlse_i; /* [br] */
    double *l_ij, *m_ij;                          /* [br]: statistics of one tile */
    /* Tiles [br][bc], densely [rows][keys]. */
    double *s_ij;     /* scores (-inf if masked), then probabilities */
    double *keep_ij;  /* 1 or 0 */
    double *slope_ij; /* derivative of the softcap */
    double *z_ij;     /* dropout multiplier */
    double *bias_ij, *mask_ij;
    double *ds_ij; /* dP, then dS */
} machine;

/* Selects head h of sequence b, and its part of the state. */
void fattn_machine_select(machine *c, int64_t b, int64_t h);

/* --- Between the memories: every function here counts ----------------------------------------- */

/* Copies rows first .. first + count into or out of fast memory, [count][width]. */
void fattn_machine_load(machine *c, const matrix *a, int64_t first, int64_t count, double *fast);
void fattn_machine_store(machine *c, const matrix *a, int64_t first, int64_t count,
                         const double *fast);
/* Reads, adds and writes back, rounding once. */
void fattn_machine_add(machine *c, const matrix *a, int64_t first, int64_t count,
                       const double *fast);
/* Writes one value to all rows. */
void fattn_machine_fill(machine *c, const matrix *a, int64_t first, int64_t count, double value);

/* False if the whole tile is hidden by the block mask or, for FLASH2, by the window. Otherwise sets
 * keep_ij from the block mask. */
bool fattn_machine_sees(machine *c, const tile *t);

/* The score, one op at a time on s_ij; fattn_machine_score() does all. Reads bias and masks. */
void fattn_machine_product(machine *c, const tile *t);
void fattn_machine_cap(machine *c, const tile *t);
void fattn_machine_bias(machine *c, const tile *t);
void fattn_machine_alibi(machine *c, const tile *t);
void fattn_machine_mask(machine *c, const tile *t);
void fattn_machine_score(machine *c, const tile *t);

/* dbias += ds_ij, summed over the axes that are broadcast. */
void fattn_machine_add_dbias(machine *c, const tile *t);

/* --- On the chip or outside the algorithm: nothing is counted --------------------------------- */

/* z_ij of a tile. */
void fattn_machine_dropout(machine *c, const tile *t);

/* exp(x - m), and 0 for m = x = -inf, the maximum of nothing; NaN stays NaN. */
double fattn_machine_exp(double x, double m);

/* Rounds a state into the caller's tensor, or adds it with FATTN_ACCUMULATE (gradients). */
void fattn_machine_publish(machine *c, const matrix *state, const matrix *out, int64_t rows,
                           bool add);

static inline bool machine_wants(const machine *c, uint32_t output)
{
    return (c->p->outputs & output) != 0;
}

static inline bool machine_has(const machine *c, uint64_t feature)
{
    return (c->p->features & feature) != 0;
}

/* --- The programs ----------------------------------------------------------------------------- */

/* One query head. */
void fattn_tiled_flash1_forward(machine *c);
void fattn_tiled_flash2_forward(machine *c);
void fattn_tiled_standard_forward(machine *c);
/* The query heads h .. h + group of one kv head. */
void fattn_tiled_flash1_backward(machine *c, int64_t b, int64_t h);
void fattn_tiled_flash2_backward(machine *c, int64_t b, int64_t h);
void fattn_tiled_standard_backward(machine *c, int64_t b, int64_t h);

#endif
