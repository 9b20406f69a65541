/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers that are the same on every machine: SplitMix64 (Steele, Lea and Flood 2014), one
 * stream per purpose. */
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
bool draw_chance(draw_rng *rng, int64_t one_in); /* true with probability 1 / one_in */
double draw_unit(draw_rng *rng);                 /* [0, 1) */
double draw_normal(draw_rng *rng); /* sum of 12 uniforms: exact everywhere, at most 6 in size */

#endif
