/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FATTN_HD opens the definition of a function that C, CUDA and HIP all read. In C it is a plain
 * inline function; in CUDA and HIP it exists on both sides and is always inlined, because a call
 * would force a kernel's state through memory. The attributes are spelled out for HIP, where a
 * build without the vendor's headers has no other name for them.
 */
#ifndef FATTN_CORE_HOST_DEVICE_H
#define FATTN_CORE_HOST_DEVICE_H

#if defined(__HIP__)
#define FATTN_HD \
    static inline __attribute__((host)) __attribute__((device)) __attribute__((always_inline))
#elif defined(__CUDACC__)
#define FATTN_HD static __host__ __device__ __forceinline__
#else
#define FATTN_HD static inline
#endif

#endif
