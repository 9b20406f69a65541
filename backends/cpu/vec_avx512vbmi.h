/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary of vec_avx512.h, with lookups in tables of bytes. */
#ifndef FATTN_CPU_VEC_AVX512VBMI_H
#define FATTN_CPU_VEC_AVX512VBMI_H

#include "backends/cpu/vec_vbmi.h"

#endif
