/* SPDX-License-Identifier: Apache-2.0 */
/* Test data that are the same on every machine. What `fattn check` draws has streams of its own, in
 * tools/judge/random.h. */
#ifndef FATTN_TESTS_RANDOM_H
#define FATTN_TESTS_RANDOM_H

#include <stdint.h>

/* Knuth's 64-bit linear congruential generator, of whose numbers the upper bits are good enough.
 * Returns the next state. */
static inline uint64_t random_next(uint64_t *state)
{
    return *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

#endif
