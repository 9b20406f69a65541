/* SPDX-License-Identifier: Apache-2.0 */
/* What nccl.c calls of HIP's runtime, declared as HIP does, for machines without it. */
#ifndef STUB_HIP_RUNTIME_API_H
#define STUB_HIP_RUNTIME_API_H

typedef enum hipError_t { hipSuccess = 0, hipErrorNotReady = 600 } hipError_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;

#define hipStreamNonBlocking 0x01
#define hipEventDisableTiming 0x2

hipError_t hipGetDevice(int *device);
hipError_t hipSetDevice(int device);
hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest);
hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventQuery(hipEvent_t event);
const char *hipGetErrorString(hipError_t error);

#endif
