/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of fattn/distributed.h over NCCL (2.14 or later): library fattn_nccl, for NVIDIA GPUs.
 *
 *     ncclCommInitRank(&comm, ranks, id, rank);       (the rank's GPU is the current one)
 *     fattn_device_open("cuda:0", &group.device);     (the same GPU)
 *     fattn_transport *transport;
 *     fattn_status status = fattn_nccl_open(comm, stream, &transport);
 *     ...                                             (fattn/distributed.h)
 *     fattn_nccl_close(transport);
 *
 * Messages go on a stream of their own, beside kernels. The library that holds NCCL, libnccl.so.2,
 * is opened when a transport is: the one that the communicator comes from.
 *
 * With FATTN_RCCL these are the functions of library fattn_rccl, for AMD's GPUs over RCCL
 * (librccl.so.1), whose functions and types have NCCL's names; devices are "hip:0" and so on.
 */
#ifndef FATTN_NCCL_H
#define FATTN_NCCL_H

#ifdef FATTN_RCCL
#include <rccl/rccl.h>
#else
#include <nccl.h>
#endif

#include "fattn/distributed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a transport over all ranks of a communicator, which is the caller's and outlives it. stream
 * is the one on which plans of the group compute; NULL is the default one. *transport is for
 * fattn_nccl_close(). */
FATTN_API fattn_status fattn_nccl_open(ncclComm_t comm, fattn_stream stream,
                                       fattn_transport **transport);

/*
 * Gives a transport up. NULL is allowed. After an error of the group the communicator has been
 * aborted, and is not to be destroyed.
 *
 * NCCL tells nobody that a rank has given up, so the others learn of it by the group's timeout.
 */
FATTN_API void fattn_nccl_close(fattn_transport *transport);

#ifdef __cplusplus
}
#endif
#endif
