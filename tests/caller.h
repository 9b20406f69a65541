/* SPDX-License-Identifier: Apache-2.0 */
/* What a C++ caller writes; the headers suite compiles it. Every default has a name, bits combine
 * to the types of their fields, and the caller may define FATTN_API. */
#ifndef FATTN_TESTS_CALLER_H
#define FATTN_TESTS_CALLER_H

#define FATTN_API __attribute__((visibility("hidden")))
#include "fattn/fattn.h"

static_assert(sizeof(FATTN_CAUSAL) == sizeof(uint64_t), "~bit has all other bits of features");
static_assert(~FATTN_CAUSAL == UINT64_MAX - 1, "and is unsigned");
static_assert(sizeof(FATTN_OUT_O) == sizeof(uint32_t), "outputs likewise");

inline fattn_problem caller_problem()
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.dtype_o = FATTN_DTYPE_DEFAULT;
    p.dtype_bias = FATTN_DTYPE_DEFAULT;
    p.features = FATTN_CAUSAL | FATTN_BIAS;
    p.features &= ~FATTN_BIAS;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    return p;
}

#endif
