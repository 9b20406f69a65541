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
 * Messages run on a stream of their own, beside kernels. Opening a transport loads libnccl.so.2,
 * which must be the library that the communicator comes from.
 *
 * With FATTN_RCCL defined the same declarations are those of library fattn_rccl, for AMD GPUs over
 * RCCL (librccl.so.1), whose functions and types have NCCL's names; devices are "hip:0" and so on.
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

/* Opens a transport over all ranks of a communicator, which the caller keeps and which must outlive
 * the transport. stream is the one on which plans of the group compute; NULL is the default stream.
 * Close *transport with fattn_nccl_close(). FATTN_NO_DEVICE if NCCL cannot be loaded. */
FATTN_API fattn_status fattn_nccl_open(ncclComm_t comm, fattn_stream stream,
                                       fattn_transport **transport);

/*
 * Closes a transport. NULL is allowed. After an error of the group the communicator has been
 * aborted (ncclCommAbort), and the caller must not destroy it.
 *
 * NCCL does not tell other ranks that one has failed: they notice by the group's timeout.
 */
FATTN_API void fattn_nccl_close(fattn_transport *transport);

#ifdef __cplusplus
}
#endif
#endif
