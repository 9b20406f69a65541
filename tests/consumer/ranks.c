/* SPDX-License-Identifier: Apache-2.0 */
/* What a user of an installed fattn_mpi writes: see consumer.c. */
#include <fattn/mpi.h>

int main(void)
{
    fattn_transport *transport; /* MPI is not initialised, which the library says */
    return fattn_mpi_open(MPI_COMM_WORLD, &transport) != FATTN_INVALID_ARGUMENT;
}
