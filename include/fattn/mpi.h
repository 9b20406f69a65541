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
 * Messages move only while a thread is inside an MPI call. With MPI_THREAD_SERIALIZED or more the
 * transport has a thread that calls MPI during computation, while the caller is inside fattn. With
 * less, messages above MPI's eager limit mostly move at the end of a step. Unless MPI was
 * initialised with MPI_THREAD_MULTIPLE, no other thread may call MPI during
 * fattn_group_plan_create() and fattn_group_execute().
 */
#ifndef FATTN_MPI_H
#define FATTN_MPI_H

#include <mpi.h>

#include "fattn/distributed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a transport over all ranks of a communicator, for tensors in host memory. The communicator
 * is duplicated, so every rank of it must call this. Close *transport with fattn_mpi_close().
 * FATTN_INVALID_ARGUMENT for MPI_COMM_NULL, which ranks outside of a communicator have, and before
 * MPI_Init() or after MPI_Finalize(). */
FATTN_API fattn_status fattn_mpi_open(MPI_Comm comm, fattn_transport **transport);

/*
 * The same for tensors in device memory. It needs an MPI that accepts pointers to device memory
 * ("CUDA-aware" in Open MPI); any other MPI crashes. `device` is the group's device and must
 * outlive the transport; with NULL this is fattn_mpi_open(). `stream` is the one on which plans of
 * the group compute. MPI has no streams, so the host waits until a step is computed before it sends
 * the step's messages.
 */
FATTN_API fattn_status fattn_mpi_open_device(MPI_Comm comm, fattn_device *device,
                                             fattn_stream stream, fattn_transport **transport);

/*
 * Closes a transport; every rank calls it before MPI_Finalize(). NULL is allowed. After a failure
 * the duplicate of the communicator stays until MPI_Finalize(), because freeing it would wait for
 * ranks that may be gone. MPI cannot cancel messages that are moving. So after a failed execution
 * destroy the plan, and free the k and v that it was given, only after MPI_Finalize(), or not at
 * all. You may change them before that: other ranks get an error instead of the new data.
 *
 * When a rank dies, most launchers end all others at once. If the launcher lets them live, they get
 * an error.
 */
FATTN_API void fattn_mpi_close(fattn_transport *transport);

/* Opens a transport over all processes that MPI started (MPI_COMM_WORLD), for programs that are not
 * compiled with MPI's header. Initialises MPI if that has not been done. Close *transport with
 * fattn_mpi_end(). */
FATTN_API fattn_status fattn_mpi_begin(fattn_transport **transport);

/* Closes a transport of fattn_mpi_begin() and finalises MPI. After a failure it does not finalise
 * MPI, because that would wait for ranks that may be gone: the process then exits without, and the
 * launcher ends the others. */
FATTN_API void fattn_mpi_end(fattn_transport *transport);

#ifdef __cplusplus
}
#endif
#endif
