/* SPDX-License-Identifier: Apache-2.0 */
/* What the x86 vocabularies share. */
#ifndef FATTN_CPU_VEC_X86_H
#define FATTN_CPU_VEC_X86_H

#include <immintrin.h>

#include "backends/cpu/vec_math.h"

#endif
