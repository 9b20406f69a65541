/* SPDX-License-Identifier: Apache-2.0 */
/* A device, a small forward to run on it (2 x 3 queries on 2 x 4 keys), and the log. */
#ifndef FATTN_TESTS_UNIT_SMALL_H
#define FATTN_TESTS_UNIT_SMALL_H

#include <math.h>
#include <stdbool.h>

#include "tests/unit_answers.h"

static inline fattn_device *unit_device(const char *spec)
{
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open(spec, &device), FATTN_OK);
    return device;
}

static inline fattn_problem small_problem(void)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.batch = 2;
    p.seqlen_q = 3;
    p.seqlen_k = 4;
    p.dim = p.dim_v = 8;
    return p;
}

static _Alignas(16) float small_arrays[4][256]; /* q, k, v, o */

static inline fattn_buffers small_buffers(void)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    for (int i = 0; i < 256; i++) {
        small_arrays[0][i] = sinf((float)i);
        small_arrays[1][i] = cosf((float)i);
        small_arrays[2][i] = (float)i;
        small_arrays[3][i] = NAN;
    }
    b.q = small_arrays[0], b.k = small_arrays[1], b.v = small_arrays[2], b.o = small_arrays[3];
    return b;
}

/* Whether the run has written o, and nothing else. */
static inline bool small_written(void)
{
    const float *const o = small_arrays[3];
    return !isnan(o[0]) && !isnan(o[47]) && isnan(o[48]);
}

/* Lines of the log. */
static char small_logged[8192];

/* Callback of fattn_set_log_callback(); user: small_arrays. */
static inline void small_log(void *user, const char *line)
{
    cr_assert_eq(user, small_arrays);
    strncat(small_logged, line, sizeof small_logged - strlen(small_logged) - 2);
    strcat(small_logged, "\n");
}

#endif
