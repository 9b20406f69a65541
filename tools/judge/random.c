/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/judge/random.h"

#include <math.h>

uint64_t draw_bits(draw_rng *rng)
{
    uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

draw_rng draw_stream(uint64_t seed, int64_t index, uint64_t purpose)
{
    draw_rng rng = {seed};
    rng.state = draw_bits(&rng) + (uint64_t)index;
    rng.state = draw_bits(&rng) + purpose;
    rng.state = draw_bits(&rng);
    return rng;
}

int64_t draw_between(draw_rng *rng, int64_t low, int64_t high)
{
    return low + (int64_t)(draw_bits(rng) % (uint64_t)(high - low + 1));
}

bool draw_chance(draw_rng *rng, int64_t one_in) { return draw_between(rng, 1, one_in) == 1; }

double draw_unit(draw_rng *rng) { return ldexp((double)(draw_bits(rng) >> 11), -53); }

double draw_normal(draw_rng *rng)
{
    int64_t sum = 0;
    for (int word = 0; word < 3; word++) {
        const uint64_t bits = draw_bits(rng);
        sum += (int64_t)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                         (bits >> 48));
    }
    return ldexp((double)(sum - 6 * 65535), -16);
}
