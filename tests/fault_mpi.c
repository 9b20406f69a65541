/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of MPI, one of which fails (faults.h). Nobody ends MPI, which would wait for the dead:
 * rank_faults.py ends the processes, whose ids it is told. */
#include "fattn/mpi.h"
#include "tests/faults.h"

int main(int argc, char **argv)
{
    int provided = 0, rank = 0;
    fattn_transport *transport = NULL;
    divided d;
    if (argc != 5) {
        return 2;
    }
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("rank %d pid %ld\n", rank, (long)getpid());
    fault_problem(&d, atoi(argv[4]));
    if (fattn_mpi_open(MPI_COMM_WORLD, &transport)) {
        return 2;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    fault_run(&d, transport, argv, 0);
    for (;;) {
        pause();
    }
}
