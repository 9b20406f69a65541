/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helpers of the examples: exit on an error, copies to and from a device, test numbers; and
 * attention of one query in plain C, to compare with.
 *
 * The programs run on the device that FATTN_BACKEND names ("cpu", "cuda:1" ...), or else on the
 * best one; ring runs on the CPU. A device may have its own memory, so arrays exist twice: on the
 * host, where they are filled and compared, and on the device, where fattn works. On a CPU both are
 * the same kind of memory.
 */
#ifndef FATTN_EXAMPLES_EXAMPLE_H
#define FATTN_EXAMPLES_EXAMPLE_H

#include <fattn/fattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* On failure ends the program with fattn's error message. */
static inline void must(fattn_status status)
{
    if (status != FATTN_OK) {
        fprintf(stderr, "%s: %s\n", fattn_status_string(status), fattn_last_reason());
        exit(EXIT_FAILURE);
    }
}

/* Allocates device memory. */
static inline void *reserve(fattn_device *device, size_t bytes)
{
    void *memory = NULL;
    must(fattn_device_malloc(device, bytes, &memory));
    return memory;
}

/* Copies between host and device in either direction, and waits for completion. */
static inline void copy(fattn_device *device, void *to, const void *from, size_t bytes)
{
    must(fattn_device_copy(device, to, from, bytes, NULL));
    must(fattn_stream_synchronize(device, NULL));
}

/* A copy of a host array on the device. */
static inline void *upload(fattn_device *device, const void *host, size_t bytes)
{
    void *const memory = reserve(device, bytes);
    copy(device, memory, host, bytes);
    return memory;
}

/* Numbers between -1 and 1, the same in every run. */
static inline void fill(float *x, int64_t count, uint32_t seed)
{
    for (int64_t n = 0; n < count; n++) {
        seed = seed * 1664525u + 1013904223u; /* Knuth's linear congruence; high bits are random */
        x[n] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* One query over the first `keys` keys: o = sum_j exp(x_j) v_j / sum_j exp(x_j) with
 * x_j = q k_j / sqrt(dim). Keys and values are `stride` elements apart. Returns the lse. */
static inline double attend(const float *q, const float *k, const float *v, int64_t keys,
                            int64_t dim, int64_t stride, double *o)
{
    double sum = 0.0;
    for (int64_t c = 0; c < dim; c++) {
        o[c] = 0.0;
    }
    for (int64_t j = 0; j < keys; j++) {
        double x = 0.0;
        for (int64_t c = 0; c < dim; c++) {
            x += (double)q[c] * (double)k[j * stride + c];
        }
        const double weight = exp(x / sqrt((double)dim)); /* |x| <= dim: exp stays in range */
        sum += weight;
        for (int64_t c = 0; c < dim; c++) {
            o[c] += weight * (double)v[j * stride + c];
        }
    }
    for (int64_t c = 0; c < dim; c++) {
        o[c] /= sum;
    }
    return log(sum);
}

/* The larger of worst and |a - b|; a NaN is kept. */
static inline double further(double worst, double a, double b)
{
    const double distance = fabs(a - b);
    return distance <= worst ? worst : distance > worst ? distance : NAN;
}

/* Prints the error of a result and returns main()'s exit status. */
static inline int judge(const fattn_device *device, const char *what, double error, double allowed)
{
    fattn_device_info info;
    fattn_device_info_init(&info);
    must(fattn_device_get_info(device, &info));
    const int good = error <= allowed; /* false for NaN */
    printf("%s (%s): %s differs by %.1e, %.1e is allowed: %s\n", info.name, info.backend, what,
           error, allowed, good ? "good" : "BAD");
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
