/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layer over matrix units (backends/hip/matrix.cuh) as attention uses it: S^T = K Q^T, and with
 * S as it is in registers O^T = V^T S^T, through tiles in local memory, by one wave.
 */
#include "backends/hip/vendor.h"

#include "backends/hip/matrix.cuh"

enum { KEYS = 64, WIDTH = 64 };

/* q, k, v: [SIDE], [KEYS] and [KEYS] rows of WIDTH. s: [SIDE][KEYS]. o: [SIDE][WIDTH]. of_s: the
 * largest and the sum of each row of s, [2][SIDE]. */
struct arguments {
    float *s, *o, *of_s;
    const uint16_t *q, *k, *v;
};

template <int SIDE> GPU_DEVICE void fill(const arguments &a, uint16_t *q, uint16_t *k, uint16_t *v)
{
    typedef matrix_fill<WIDTH, KEYS, GPU_WAVE> keys;
    typedef matrix_fill<WIDTH, SIDE, GPU_WAVE> queries;
    typedef matrix_transposed_fill<SIDE, WIDTH, KEYS, GPU_WAVE> values;
    GPU_UNROLL
    for (int n = 0; n < keys::COUNT; n++) {
        const int row = keys::row(n), chunk = keys::chunk();
        matrix_put(k + matrix_row_at<WIDTH>(row, chunk), matrix_get(a.k + row * WIDTH + 8 * chunk));
    }
    GPU_UNROLL
    for (int n = 0; n < queries::COUNT; n++) {
        const int row = queries::row(n), chunk = queries::chunk();
        matrix_put(q + matrix_row_at<WIDTH>(row, chunk), matrix_get(a.q + row * WIDTH + 8 * chunk));
    }
    GPU_UNROLL
    for (int n = 0; n < values::COUNT; n++) {
        matrix_four rows[4];
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            rows[e] = matrix_get(a.v + (values::row(n) + e) * WIDTH + 8 * values::chunk(n));
        }
        matrix_put_transposed<KEYS>(v, values::chunk(n), values::place(n), rows);
    }
}

template <class T, int SIDE> GPU_DEVICE void attend(const arguments &a)
{
    typedef matrix<SIDE> M;
    enum { EIGHTS = KEYS * SIDE / GPU_WAVE / 8 }; /* of a lane's elements of s */
    GPU_SHARED alignas(16) uint16_t q[SIDE * WIDTH], k[KEYS * WIDTH], v[KEYS * WIDTH];
    float largest = -1e30f, sum = 0, x[KEYS / SIDE * M::SUMS];
    const int column = matrix_column<SIDE>();
    fill<SIDE>(a, q, k, v);
    gpu_sync();
    GPU_UNROLL
    for (int t = 0; t < KEYS / SIDE; t++) {
        typename M::sums s = {};
        GPU_UNROLL
        for (int step = 0; step < WIDTH / M::DEPTH; step++) {
            const matrix_operand keys = matrix_load<SIDE, matrix_row_at<WIDTH>>(k, t * SIDE, step);
            const matrix_operand query = matrix_load<SIDE, matrix_row_at<WIDTH>>(q, 0, step);
            matrix_multiply<T, SIDE>(keys, query, s);
        }
        GPU_UNROLL
        for (int r = 0; r < M::SUMS; r++) {
            a.s[column * KEYS + t * SIDE + matrix_row<SIDE>(r)] = s[r];
            x[t * M::SUMS + r] = s[r];
            largest = gpu_max(largest, s[r]);
            sum += s[r];
        }
    }
    a.of_s[column] = matrix_column_max<SIDE>(largest);
    a.of_s[SIDE + column] = matrix_column_sum<SIDE>(sum);
    matrix_operand weights[EIGHTS];
    GPU_UNROLL
    for (int n = 0; n < EIGHTS; n++) {
        uint32_t pair[4];
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            pair[e] = n % 2 ? T::pack(x[8 * n + 2 * e], x[8 * n + 2 * e + 1])
                            : T::pack_weights(x[8 * n + 2 * e], x[8 * n + 2 * e + 1]);
        }
        weights[n] = matrix_as_operand(pair);
    }
    GPU_UNROLL
    for (int t = 0; t < WIDTH / SIDE; t++) {
        typename M::sums o = {};
        GPU_UNROLL
        for (int n = 0; n < EIGHTS; n++) {
            const matrix_operand values = matrix_load<SIDE, matrix_column_at<KEYS>>(v, t * SIDE, n);
            matrix_multiply<T, SIDE>(values, weights[n], o);
        }
        GPU_UNROLL
        for (int r = 0; r < M::SUMS; r++) {
            a.o[column * WIDTH + t * SIDE + matrix_row<SIDE>(r)] = o[r];
        }
    }
}

#define ATTEND(name, type, side) \
    GPU_KERNEL(GPU_WAVE, 1) name(const GPU_PARAM arguments a) { attend<type, side>(a); }
ATTEND(f16_16, matrix_f16, 16)
ATTEND(bf16_16, matrix_bf16, 16)
#if MATRIX_MFMA
ATTEND(f16_32, matrix_f16, 32)
ATTEND(bf16_32, matrix_bf16, 32)
#endif
