/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FATTN_BENCH_PLAIN_DECODE_H
#define FATTN_BENCH_PLAIN_DECODE_H

#define PLAIN_KEYS 4096 /* at most */

/* One query of each of hq heads, which share hk of keys. */
typedef struct plain {
    long hq, hk, keys, dim; /* dim: 64 or 128 */
    const float *q;         /* [hq][dim] */
    const float *k, *v;     /* key j of head h at h * head + j * seq */
    long head, seq;
    float *o; /* [hq][dim] */
    float scale;
} plain;

void plain_decode(const plain *p);

#endif
