/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding as a straightforward loop, compiled with -Ofast -march=native, with which lengths.c
 * compares the library. The number of channels is a literal. */
#include <math.h>

#include "plain_decode.h"

#define PLAIN(D)                                                              \
    static void plain_##D(const plain *p, long h, float *restrict s)          \
    {                                                                         \
        const float *restrict const q = p->q + h * (D);                       \
        const float *restrict const k = p->k + h / (p->hq / p->hk) * p->head; \
        const float *restrict const v = p->v + h / (p->hq / p->hk) * p->head; \
        float m = -INFINITY, l = 0, o[D] = {0};                               \
        for (long j = 0; j < p->keys; j++) {                                  \
            float x = 0;                                                      \
            for (int c = 0; c < (D); c++) x += q[c] * k[j * p->seq + c];      \
            s[j] = x * p->scale;                                              \
            m = s[j] > m ? s[j] : m;                                          \
        }                                                                     \
        for (long j = 0; j < p->keys; j++) {                                  \
            s[j] = expf(s[j] - m);                                            \
            l += s[j];                                                        \
        }                                                                     \
        for (long j = 0; j < p->keys; j++) {                                  \
            for (int c = 0; c < (D); c++) o[c] += s[j] * v[j * p->seq + c];   \
        }                                                                     \
        for (int c = 0; c < (D); c++) p->o[h * (D) + c] = o[c] / l;           \
    }
PLAIN(64)
PLAIN(128)

void plain_decode(const plain *p)
{
    static float scores[PLAIN_KEYS];
    for (long h = 0; h < p->hq; h++) {
        (p->dim == 64 ? plain_64 : plain_128)(p, h, scores);
    }
}
