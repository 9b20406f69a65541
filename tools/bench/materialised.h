/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer of `bench --peer materialised`: attention without fattn, with the whole score matrix in
 * memory. OpenBLAS computes S = Q K' and O = P V, with a softmax between them.
 */
#ifndef FATTN_TOOLS_MATERIALISED_H
#define FATTN_TOOLS_MATERIALISED_H

#include <stdbool.h>
#include <stdint.h>

#include "fattn/fattn.h"

typedef struct materialised {
    void *library;
    /* cblas_sgemm of OpenBLAS; integers are 32-bit */
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                  const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
    void (*set_threads)(int threads);
    int threads;
    float *scores; /* [Sq][Sk], one head at a time */
    float *o;      /* like the problem's o */
    int64_t scores_bytes;
} materialised;

/* Loads OpenBLAS at run time. Returns false, with the reason in why, if it is absent. */
bool materialised_open(materialised *m, char *why, int size);
void materialised_close(materialised *m);

/* Allocates for a problem: f32, forward, no feature except causal. Returns false, with why, for
 * others. */
bool materialised_prepare(materialised *m, const fattn_problem *p, int threads, char *why,
                          int size);
void materialised_release(materialised *m);

/* Computes m->o from q, k and v in host memory. */
void materialised_run(materialised *m, const fattn_problem *p, const fattn_buffers *b);

/* Largest difference between m->o and o. */
double materialised_difference(const materialised *m, const fattn_problem *p, const float *o);

#endif
