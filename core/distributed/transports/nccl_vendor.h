/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The runtime that nccl.c calls: CUDA's, or HIP's with FATTN_RCCL. RCCL's functions have NCCL's
 * names, but those of HIP's runtime differ from CUDA's, and are mapped here.
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
