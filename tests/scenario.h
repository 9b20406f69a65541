/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tiny attention problem with any set of features and its buffers: small enough to differentiate
 * numerically, irregular enough that no two axes can be confused.
 */
#ifndef FATTN_TESTS_SCENARIO_H
#define FATTN_TESTS_SCENARIO_H

#include <stdbool.h>

#include "fattn/fattn.h"

/* Traits of a scenario; a set of them has bits 1 << trait. */
typedef enum trait {
    CAUSAL,
    WINDOW,
    TOP_LEFT,
    SCALE,
    SOFTCAP,
    BIAS,
    ALIBI,
    MASK,
    BLOCK_MASK,
    SINK,
    DROPOUT,
    CU_Q,
    CU_K,
    USED_Q,
    USED_K,
    POSITIONS,
    GQA,
    DIM_V, /* Dv != D */
    DLSE,
    ACCUMULATE,
    STRIDED, /* gaps between rows, heads before rows */
    TRAITS
} trait;

extern const char *const trait_names[TRAITS];

typedef enum tensor_id {
    Q,
    K,
    V,
    O,
    LSE,
    DOUT,
    DLSE_IN,
    DQ,
    DK,
    DV,
    DBIAS,
    DSINK,
    BIAS_IN,
    SINK_IN,
    SLOPES,
    TENSORS
} tensor_id;

enum { SCENARIO_BATCH = 2, SCENARIO_ROOM = 1024 };

typedef struct tensor {
    fattn_dtype dtype;
    int64_t count;              /* elements, gaps included */
    double room[SCENARIO_ROOM]; /* elements of dtype */
} tensor;

typedef struct scenario {
    fattn_problem forward, backward; /* normalised */
    fattn_buffers buffers;
    tensor tensors[TENSORS];
    uint8_t mask[SCENARIO_ROOM], block_mask[SCENARIO_ROOM];
    int32_t cu_q[SCENARIO_BATCH + 1], cu_k[SCENARIO_BATCH + 1];
    int32_t used_q[SCENARIO_BATCH], used_k[SCENARIO_BATCH];
    int64_t q_offsets[SCENARIO_BATCH], k_offsets[SCENARIO_BATCH];
} scenario;

/* Bits of bias_flat: axes (batch, head, query, key) along which bias and dbias have stride 0.
 * Outputs begin as 0, or as a pattern with ACCUMULATE. Returns false, and prints why, if the
 * library's validation refuses the scenario. */
bool scenario_create(scenario *s, uint32_t traits, unsigned bias_flat, fattn_dtype dtype,
                     int64_t sq, int64_t sk, uint64_t seed);

double tensor_get(const tensor *t, int64_t n);
void tensor_set(tensor *t, int64_t n, double x);

/* "causal + sink" */
void scenario_name(uint32_t traits, unsigned bias_flat, char *text, size_t size);

/* A number in [-1, 1] from a stream. */
double scenario_random(uint64_t *state);

#endif
