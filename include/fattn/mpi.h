/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of fattn/distributed.h over MPI (3 or later): library fattn_mpi, built where MPI is found.
 *
 *     MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
 *     fattn_transport *transport;
 *     fattn_status status = fattn_mpi_open(MPI_COMM_WORLD, &transport);
 *     ...                                             (fattn/distributed.h)
 *     fattn_mpi_close(transport);
 *
 * Messages move while MPI is called. With MPI_THREAD_SERIALIZED or more a thread of the transport
 * calls it beside computation, while its user is within fattn; with less, what is above MPI's eager
 * limit mostly moves at the end of a step. Without MPI_THREAD_MULTIPLE no other thread may call MPI
 * during fattn_group_execute().
 */
#ifndef FATTN_MPI_H
#define FATTN_MPI_H

#include <mpi.h>

#include "fattn/distributed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a transport over all ranks of a communicator, which is duplicated: every rank of it calls
 * this. *transport is for fattn_mpi_close(). MPI_COMM_NULL, which ranks outside of a communicator
 * have, and calls before MPI_Init() or after MPI_Finalize() are FATTN_INVALID_ARGUMENT. */
FATTN_API fattn_status fattn_mpi_open(MPI_Comm comm, fattn_transport **transport);

/*
 * The same for tensors in memory of a device, which an MPI that knows such memory (CUDA-aware, in
 * Open MPI's words) takes as it takes the host's; any other one crashes. `stream` is the one on
 * which plans of the group compute; the device is the group's, and outlives the transport. MPI
 * knows no streams: what a step computes is sent when it is done, and the host waits for that. NULL
 * for device is fattn_mpi_open().
 */
FATTN_API fattn_status fattn_mpi_open_device(MPI_Comm comm, fattn_device *device,
                                             fattn_stream stream, fattn_transport **transport);

/*
 * Gives a transport up; every rank calls it before MPI_Finalize(). NULL is allowed. After a failure
 * the duplicate of the communicator stays until MPI_Finalize(): freeing it would wait for ranks
 * that may be gone. MPI cannot take back messages that are moving. So a plan whose execution failed
 * is destroyed after MPI_Finalize(), or not at all, and the k and v that it was given are freed
 * then. They may be changed before: the others get an error instead of what is sent then.
 *
 * When a rank dies, most launchers end all others at once. Survivors see an error where MPI was
 * started so that it lets them live.
 */
FATTN_API void fattn_mpi_close(fattn_transport *transport);

/* The same for programs that are not compiled with MPI's header: MPI is initialised, if it is not
 * yet, and the ranks are all processes that it started. */
FATTN_API fattn_status fattn_mpi_begin(fattn_transport **transport);

/* Closes that transport and ends MPI. After a failure MPI is not ended, for that would wait for
 * ranks that may be gone: the process then leaves without it, and the launcher ends the others. */
FATTN_API void fattn_mpi_end(fattn_transport *transport);

#ifdef __cplusplus
}
#endif
#endif
