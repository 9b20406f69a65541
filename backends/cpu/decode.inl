/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two matrix products for few rows, where lanes of queries would be mostly empty: channels are
 * in the lanes, and every key and value is read once, in its own type, for all rows. The rest of
 * decoding is forward.inl.
 */
#define DECODE_ROWS 16   /* most rows of a key/value head for which this pays */
#define DECODE_VECTORS 4 /* of values that a tile of sums holds for each of up to four rows */

/* Up to FV_LANES channels from c on: `part` of them, zeros in the other lanes. */
INLINE fv load_as(fattn_dtype dtype, const void *row, int64_t c, int part)
{
    if (dtype == FATTN_F32) {
        const float *const x = (const float *)row + c;
        return part == FV_LANES ? fv_load(x) : fv_load_part(x, part);
    }
    const uint16_t *x = (const uint16_t *)row + c;
    uint16_t some[FV_LANES] = {0};
    if (part < FV_LANES) {
        memcpy(some, x, (size_t)part * sizeof *x);
        x = some;
    }
    return dtype == FATTN_F16 ? fv_load_f16(x) : fv_load_bf16(x);
}

/* to[k * stride + n] = dot(q[n], k[k]) for nr rows and FV_ND / nr keys. */
INLINE void dots_tile(int nr, fattn_dtype dtype, const float *q, int64_t q_stride,
                      const void *const *k, int64_t dim, float *to, int64_t stride)
{
    const int64_t whole = dim / FV_LANES * FV_LANES;
    fv sum[FV_ND];
    float out[FV_ND];
    for (int n = 0; n < FV_ND; n++) {
        sum[n] = fv_set1(0);
    }
    for (int64_t c = 0; c < dim; c += FV_LANES) {
        const int part = c < whole ? FV_LANES : (int)(dim - whole);
        fv row[4];
        for (int n = 0; n < nr; n++) {
            row[n] = fv_load(q + n * q_stride + c);
        }
        for (int m = 0; m < FV_ND / nr; m++) {
            const fv key = load_as(dtype, k[m], c, part);
            for (int n = 0; n < nr; n++) {
                sum[m * nr + n] = fv_muladd(key, row[n], sum[m * nr + n]);
            }
        }
    }
    for (int n = 0; n < FV_ND; n += FV_LANES) {
        fv_store(out + n, fv_sums(sum + n));
    }
    for (int m = 0; m < FV_ND / nr; m++) {
        for (int n = 0; n < nr; n++) {
            to[m * stride + n] = out[m * nr + n];
        }
    }
}

INLINE void dots(int nr, fattn_dtype dtype, const float *q, int64_t q_stride, const void *const *k,
                 int64_t keys, int64_t dim, float *to, int64_t stride)
{
    for (int64_t j = 0; j < keys; j += FV_ND / nr) {
        dots_tile(nr, dtype, q, q_stride, k + j, dim, to + j * stride, stride);
    }
}

/* o[n] = o[n] alpha[n] + sum_j p[j][n] v[j] for nr rows and nv vectors of channels from c on. */
/* Keys that are summed from zero before they join o: rounding errors grow with their number. */
#define MIX_KEYS 64

INLINE void mix_keys(int nr, int nv, int part, fattn_dtype dtype, const float *p, int64_t p_stride,
                     const void *const *v, int64_t keys, int64_t c, fv sum[4][DECODE_VECTORS])
{
    for (int n = 0; n < nr; n++) {
        for (int u = 0; u < nv; u++) {
            sum[n][u] = fv_set1(0);
        }
    }
    for (int64_t j = 0; j < keys; j++) {
        fv value[DECODE_VECTORS];
        for (int u = 0; u < nv; u++) {
            value[u] = load_as(dtype, v[j], c + u * FV_LANES, part);
        }
        for (int n = 0; n < nr; n++) {
            const fv weight = fv_set1(p[j * p_stride + n]);
            for (int u = 0; u < nv; u++) {
                sum[n][u] = fv_muladd(weight, value[u], sum[n][u]);
            }
        }
    }
}

INLINE void mix_tile(int nr, int nv, int part, fattn_dtype dtype, const float *alpha,
                     const float *p, int64_t p_stride, const void *const *v, int64_t keys,
                     int64_t c, float *o, int64_t o_stride)
{
    for (int64_t j = 0; j < keys; j += MIX_KEYS) {
        fv sum[4][DECODE_VECTORS];
        mix_keys(nr, nv, part, dtype, p + j * p_stride, p_stride, v + j,
                 fattn_min64(keys - j, MIX_KEYS), c, sum);
        for (int n = 0; n < nr; n++) {
            const fv factor = fv_set1(j == 0 ? alpha[n] : 1.0f);
            for (int u = 0; u < nv; u++) {
                float *const at = o + n * o_stride + c + u * FV_LANES;
                fv_store(at, fv_muladd(fv_load(at), factor, sum[n][u]));
            }
        }
    }
}

INLINE void mix(int nr, fattn_dtype dtype, const float *alpha, const float *p, int64_t p_stride,
                const void *const *v, int64_t keys, int64_t dim, float *o, int64_t o_stride)
{
    int64_t c = 0;
    for (; c + DECODE_VECTORS * FV_LANES <= dim; c += DECODE_VECTORS * FV_LANES) {
        mix_tile(nr, DECODE_VECTORS, FV_LANES, dtype, alpha, p, p_stride, v, keys, c, o, o_stride);
    }
    for (; c < dim; c += FV_LANES) {
        const int part = (int)fattn_min64(dim - c, FV_LANES);
        mix_tile(nr, 1, part, dtype, alpha, p, p_stride, v, keys, c, o, o_stride);
    }
}

/* Calls `call` with literal numbers of rows and a literal type: four, two or one row at a time. */
#define DECODE_TYPES(call, nr)                    \
    switch (dtype) {                              \
    case FATTN_F16: call(nr, FATTN_F16); break;   \
    case FATTN_BF16: call(nr, FATTN_BF16); break; \
    default: call(nr, FATTN_F32); break;          \
    }
#define DECODE_EACH(call)            \
    for (int64_t r = 0; r < rows;) { \
        if (rows - r >= 4) {         \
            DECODE_TYPES(call, 4)    \
            r += 4;                  \
        } else if (rows - r >= 2) {  \
            DECODE_TYPES(call, 2)    \
            r += 2;                  \
        } else {                     \
            DECODE_TYPES(call, 1)    \
            r += 1;                  \
        }                            \
    }

/* x[j][r] = dot(q[r], k[j]). q: [rows][dp], padded with zeros; k: [keys] rows of dim channels */
static void decode_scores(fattn_dtype dtype, const float *q, int64_t q_stride, int64_t rows,
                          const void *const *k, int64_t keys, int64_t dim, float *x,
                          int64_t x_stride)
{
#define CALL(nr, type) dots(nr, type, q + r * q_stride, q_stride, k, keys, dim, x + r, x_stride)
    DECODE_EACH(CALL)
#undef CALL
}

/* o[r] = o[r] alpha[r] + sum_j p[j][r] v[j]. o: [rows][dvp]; v: [keys] rows of dim channels */
static void decode_mix(fattn_dtype dtype, const float *alpha, const float *p, int64_t p_stride,
                       int64_t rows, const void *const *v, int64_t keys, int64_t dim, float *o,
                       int64_t o_stride)
{
#define CALL(nr, type) \
    mix(nr, type, alpha + r, p + r, p_stride, v, keys, dim, o + r * o_stride, o_stride)
    DECODE_EACH(CALL)
#undef CALL
}

#undef MIX_KEYS
#undef DECODE_EACH
#undef DECODE_TYPES
