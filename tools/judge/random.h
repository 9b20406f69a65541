/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers that are the same on every machine: SplitMix64 (Steele, Lea and Flood 2014), a
 * stream for each purpose. */
#ifndef FATTN_TOOLS_RANDOM_H
#define FATTN_TOOLS_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct draw_rng {
    uint64_t state;
} draw_rng;

draw_rng draw_stream(uint64_t seed, int64_t index, uint64_t purpose);
uint64_t draw_bits(draw_rng *rng);
int64_t draw_between(draw_rng *rng, int64_t low, int64_t high); /* both included */
bool draw_chance(draw_rng *rng, int64_t one_in);                /* true once in one_in times */
double draw_unit(draw_rng *rng);                                /* [0, 1) */
double draw_normal(draw_rng *rng); /* twelve uniforms: exact everywhere, and never beyond 6 */

#endif
