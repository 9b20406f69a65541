/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every row of vectors.inc that this processor has; out[row][lane] is what the row gave. */
#include "tests/emulator/device.h"

#if GFX12
#define WAIT "s_wait_dscnt 0x0"
#else
#define WAIT "s_waitcnt lgkmcnt(0)"
#endif

/* As wide as the wave; its bit as the result. */
#if GFX9
#define VCC "vcc"
#else
#define VCC "vcc_lo"
#endif
#define SELECT "v_cndmask_b32 %0, 0, 1, " VCC

enum { ALL = 1, NINE = GFX9, LATE = !GFX9, NEW = GFX950, RDNA3 = !GFX9 && !GFX12, RDNA4 = GFX12 };
enum { FIRST = __COUNTER__ + 1 };

#define V32(where, text, a, b, c, result)                                  \
    {                                                                      \
        constexpr int row = __COUNTER__ - FIRST;                           \
        if constexpr (where) {                                             \
            unsigned d = 0xabcd1234;                                       \
            asm volatile(text : "+v"(d) : "v"(a), "v"(b), "v"(c) : "vcc"); \
            out[row * 64 + lane] = d;                                      \
        }                                                                  \
    }

#define V64(where, text, a, b, c, result)                                                 \
    {                                                                                     \
        constexpr int row = __COUNTER__ - FIRST;                                          \
        if constexpr (where) {                                                            \
            unsigned long long d = 0;                                                     \
            asm volatile(text                                                             \
                         : "+v"(d)                                                        \
                         : "v"((unsigned long long)a), "v"((unsigned long long)b),        \
                           "v"((unsigned long long)c), "v"((unsigned)b), "v"((unsigned)c) \
                         : "vcc");                                                        \
            out[row * 64 + lane] = d;                                                     \
        }                                                                                 \
    }

#define SCALAR(where, text, type, begin, a, b)                                 \
    {                                                                          \
        constexpr int row = __COUNTER__ - FIRST;                               \
        if constexpr (where) {                                                 \
            type d = begin;                                                    \
            unsigned scc;                                                      \
            asm volatile("s_cmp_eq_u32 0, 0\n" text "\ns_cselect_b32 %1, 1, 0" \
                         : "+s"(d), "=&s"(scc)                                 \
                         : "s"((type)a), "s"((type)b), "s"((unsigned)b)        \
                         : "scc");                                             \
            out[row * 64 + lane] = lane == 0 ? d : scc;                        \
        }                                                                      \
    }
#define S32(where, text, a, b, result, scc) SCALAR(where, text, unsigned, 0xabcd1234, a, b)
#define S64(where, text, a, b, result, scc) SCALAR(where, text, unsigned long long, 0, a, b)

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
