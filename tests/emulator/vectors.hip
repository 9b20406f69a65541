/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every row of vectors.inc that this processor has; out[row][lane] is what the row gave. */
#include "tests/emulator/device.h"

#if GFX12
#define WAIT "s_wait_dscnt 0x0"
#else
#define WAIT "s_waitcnt lgkmcnt(0)"
#endif

enum { ALL = 1, NINE = GFX9, LATE = !GFX9, NEW = GFX950, RDNA3 = !GFX9 && !GFX12, RDNA4 = GFX12 };
enum { FIRST = __COUNTER__ + 1 };

#define V32(where, text, a, b, c, result)                          \
    {                                                              \
        constexpr int row = __COUNTER__ - FIRST;                   \
        if constexpr (where) {                                     \
            unsigned d = 0xabcd1234;                               \
            asm volatile(text : "+v"(d) : "v"(a), "v"(b), "v"(c)); \
            out[row * 64 + lane] = d;                              \
        }                                                          \
    }

#define V64(where, text, a, b, c, result)                                          \
    {                                                                              \
        constexpr int row = __COUNTER__ - FIRST;                                   \
        if constexpr (where) {                                                     \
            unsigned long long d = 0;                                              \
            asm volatile(text                                                      \
                         : "+v"(d)                                                 \
                         : "v"((unsigned long long)a), "v"((unsigned long long)b), \
                           "v"((unsigned long long)c));                            \
            out[row * 64 + lane] = d;                                              \
        }                                                                          \
    }

#define LANE(where, text, from)                                                                \
    {                                                                                          \
        constexpr int row = __COUNTER__ - FIRST;                                               \
        if constexpr (where) {                                                                 \
            unsigned d = 5000 + lane, x = 1000 + lane;                                         \
            const unsigned other = (lane * 5 + 3) % WAVE;                                      \
            asm volatile(text                                                                  \
                         : "+v"(d), "+v"(x)                                                    \
                         : "v"(4 * other), "v"(other % 16), "s"(0x89abcdef), "s"(0x01234567)); \
            out[row * 64 + lane] = d;                                                          \
        }                                                                                      \
    }

KERNEL vectors(unsigned long long *out)
{
    const int lane = thread();
#include "tests/emulator/vectors.inc"
}
