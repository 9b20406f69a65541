/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with its score matrix in memory; see materialised.h. */
#include "tools/bench/materialised.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "tools/bench/sweep.h"

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 }; /* values of cblas.h */

bool materialised_open(materialised *m, char *why, int size)
{
    static const char name[] = "libopenblas.so.0";
    *m = (materialised){.library = dlopen(name, RTLD_NOW | RTLD_LOCAL)};
    if (!m->library) {
        snprintf(why, (size_t)size, "%s is not installed", name);
        return false;
    }
    void *const sgemm = dlsym(m->library, "cblas_sgemm");
    void *const set_threads = dlsym(m->library, "openblas_set_num_threads");
    memcpy(&m->sgemm, &sgemm, sizeof sgemm);
    memcpy(&m->set_threads, &set_threads, sizeof set_threads);
    if (!sgemm || !set_threads) {
        snprintf(why, (size_t)size, "%s lacks cblas_sgemm or openblas_set_num_threads", name);
        materialised_close(m);
        return false;
    }
    return true;
}

void materialised_close(materialised *m)
{
    if (m->library) {
        dlclose(m->library);
    }
    *m = (materialised){0};
}

bool materialised_prepare(materialised *m, const fattn_problem *p, int threads, char *why, int size)
{
    const int64_t elements = p->batch * p->seqlen_q * p->heads_q * p->dim_v;
    const int64_t widest = INT32_MAX / (p->heads_q > 0 ? p->heads_q : 1);
    const bool floats =
        p->dtype == FATTN_F32 && sweep_dtype_k(p) == FATTN_F32 && sweep_dtype_v(p) == FATTN_F32;
    if (p->op != FATTN_FORWARD || !floats || p->features & ~FATTN_CAUSAL || p->seqlen_q > widest ||
        p->seqlen_k > widest || p->dim > 256 || p->dim_v > 256) {
        snprintf(why, (size_t)size,
                 "it computes f32 forward without bias, mask, alibi, softcap, dropout");
        return false;
    }
    m->scores_bytes = p->seqlen_q * p->seqlen_k * 4;
    m->scores = fattn_memory_alloc_aligned((size_t)m->scores_bytes + 1);
    m->o = fattn_memory_alloc_aligned((size_t)elements * 4 + 1);
    if (!m->scores || !m->o) {
        snprintf(why, (size_t)size, "out of memory for its score matrix");
        materialised_release(m);
        return false;
    }
    m->threads = threads;
    m->set_threads(threads);
    return true;
}

void materialised_release(materialised *m)
{
    fattn_memory_free_aligned(m->scores);
    fattn_memory_free_aligned(m->o);
    m->scores = m->o = NULL;
}

/* 2^x for x <= 0 with a relative error of 2e-6, in a form that compilers vectorise: x = n + f with
 * f in -0.5..0.5; 2^f by its Taylor polynomial ln(2)^k / k!; n added to the exponent. */
static float exp2_of(float x)
{
    const float magic = 0x1.8p23f; /* adding it leaves round(x) in the low bits */
    x = x < -126.0f ? -126.0f : x;
    const float shifted = x + magic, f = x - (shifted - magic);
    float y = 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    int32_t n, bits;
    memcpy(&n, &shifted, sizeof n);
    memcpy(&bits, &y, sizeof bits);
    bits += (int32_t)((uint32_t)n << 23);
    memcpy(&y, &bits, sizeof y);
    return y;
}

enum { LANES = 16 };

/* Softmax over the first `keys` entries; the others become 0. x is in log2 units. The sums have one
 * partial result per lane: a single sum has a fixed order, which forbids vectors. */
static void softmax(float *x, int64_t keys, int64_t length)
{
    float most[LANES], sum[LANES] = {0};
    int64_t j = 0;
    for (int l = 0; l < LANES; l++) {
        most[l] = -INFINITY;
    }
    for (; j + LANES <= keys; j += LANES) {
        for (int l = 0; l < LANES; l++) {
            most[l] = x[j + l] > most[l] ? x[j + l] : most[l];
        }
    }
    float max = -INFINITY;
    for (; j < keys; j++) {
        max = x[j] > max ? x[j] : max;
    }
    for (int l = 0; l < LANES; l++) {
        max = most[l] > max ? most[l] : max;
    }
    for (j = 0; j + LANES <= keys; j += LANES) {
        for (int l = 0; l < LANES; l++) {
            x[j + l] = exp2_of(x[j + l] - max);
            sum[l] += x[j + l];
        }
    }
    float total = 0;
    for (; j < keys; j++) {
        x[j] = exp2_of(x[j] - max);
        total += x[j];
    }
    for (int l = 0; l < LANES; l++) {
        total += sum[l];
    }
    const float inverse = keys > 0 ? 1 / total : 0;
    for (j = 0; j < keys; j++) {
        x[j] *= inverse;
    }
    memset(x + keys, 0, (size_t)(length - keys) * sizeof *x);
}

static void run_head(const materialised *m, const fattn_problem *p, const float *q, const float *k,
                     const float *v, float *o)
{
    const bool bhsd = p->layout == FATTN_BHSD;
    const int sq = (int)p->seqlen_q, sk = (int)p->seqlen_k, d = (int)p->dim, dv = (int)p->dim_v;
    const int q_heads = bhsd ? 1 : (int)p->heads_q, k_heads = bhsd ? 1 : (int)p->heads_k;
    const float scale = (float)(1.4426950408889634 / sqrt((double)p->dim)); /* log2(e) / sqrt(D) */
    const int64_t diagonal = p->anchor == FATTN_TOP_LEFT ? 0 : (int64_t)sk - sq;

    m->sgemm(ROW_MAJOR, NO_TRANS, TRANS, sq, sk, d, scale, q, d * q_heads, k, d * k_heads, 0,
             m->scores, sk);
#pragma omp parallel for schedule(static) num_threads(m->threads)
    for (int i = 0; i < sq; i++) {
        const int64_t before = p->features & FATTN_CAUSAL ? i + diagonal + 1 : sk;
        const int64_t keys = before < 0 ? 0 : before > sk ? sk : before;
        softmax(m->scores + (int64_t)i * sk, keys, sk);
    }
    m->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, sq, dv, sk, 1, m->scores, sk, v, dv * k_heads, 0, o,
             dv * q_heads);
}

/* Offset of the first row of (batch b, head h) in a contiguous tensor. */
static int64_t head_at(const fattn_problem *p, int64_t b, int64_t h, int64_t heads, int64_t seq,
                       int64_t channels)
{
    return p->layout == FATTN_BHSD ? (b * heads + h) * seq * channels
                                   : (b * seq * heads + h) * channels;
}

void materialised_run(materialised *m, const fattn_problem *p, const fattn_buffers *buf)
{
    const int64_t group = p->heads_k ? p->heads_q / p->heads_k : 1;
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads_q; h++) {
            run_head(
                m, p, (const float *)buf->q + head_at(p, b, h, p->heads_q, p->seqlen_q, p->dim),
                (const float *)buf->k + head_at(p, b, h / group, p->heads_k, p->seqlen_k, p->dim),
                (const float *)buf->v + head_at(p, b, h / group, p->heads_k, p->seqlen_k, p->dim_v),
                m->o + head_at(p, b, h, p->heads_q, p->seqlen_q, p->dim_v));
        }
    }
}

double materialised_difference(const materialised *m, const fattn_problem *p, const float *o)
{
    const int64_t count = p->batch * p->heads_q * p->seqlen_q * p->dim_v;
    double most = 0;
    for (int64_t i = 0; i < count; i++) {
        const double difference = fabs((double)m->o[i] - (double)o[i]);
        most = !(difference <= most) ? difference : most;
    }
    return most;
}
