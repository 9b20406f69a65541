/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Included first by every header of the kernels: the vector vocabulary of the unit, the formulas of
 * core over these vectors, and how functions are compiled. Parameters, for which vec.h has defaults
 * where a header is read alone:
 *
 *     FATTN_ISA    the instruction set's name, a word
 *     FATTN_VEC    the header with its vocabulary, in quotes
 */
#ifndef FATTN_CPU_UNIT_H
#define FATTN_CPU_UNIT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "backends/cpu/vec.h"

#define FATTN_SUFFIX _fv
#include "core/philox.h"
#undef FATTN_SUFFIX
#include "core/online_softmax.h"
#include "core/philox.h"
#include "core/score.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __has_attribute
#if __has_attribute(noclone)
#define NOCLONE __attribute__((noclone))
#endif
#endif
#ifndef NOCLONE
#define NOCLONE
#endif
/* A function that is not inlined: variables of its callers would take registers that its loops
 * need. */
#define APART static __attribute__((noinline))
#define PASTE_EXPANDED(a, b) a##b
#define PASTE(a, b) PASTE_EXPANDED(a, b)
#define STRING_EXPANDED(a) #a
#define STRING(a) STRING_EXPANDED(a)
#define KERNEL_NAME(kernel) STRING(FATTN_ISA) "_" kernel
#define CACHE_LINE 64 /* bytes */

#endif
