/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What nccl.c calls of the runtime: CUDA's, or HIP's with FATTN_RCCL. RCCL has NCCL's functions by
 * the same names, but HIP's runtime has CUDA's by others, which are defined here.
 */
#ifndef FATTN_NCCL_VENDOR_H
#define FATTN_NCCL_VENDOR_H

#ifdef FATTN_RCCL
#include <hip/hip_runtime_api.h>

#define NCCL_LIBRARY "librccl.so.1"

#define cudaError_t hipError_t
#define cudaEvent_t hipEvent_t
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
#define cudaErrorNotReady hipErrorNotReady
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaDeviceGetStreamPriorityRange hipDeviceGetStreamPriorityRange
#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDestroy hipEventDestroy
#define cudaEventQuery hipEventQuery
#define cudaEventRecord hipEventRecord
#define cudaGetDevice hipGetDevice
#define cudaGetErrorString hipGetErrorString
#define cudaSetDevice hipSetDevice
#define cudaStreamCreateWithPriority hipStreamCreateWithPriority
#define cudaStreamDestroy hipStreamDestroy
#define cudaStreamWaitEvent hipStreamWaitEvent
#else
#include <cuda_runtime.h>

#define NCCL_LIBRARY "libnccl.so.2"
#endif

#endif
