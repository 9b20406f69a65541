/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are threads, one of which fails (faults.h). */
#define _POSIX_C_SOURCE 200809L /* threads.h, faults.h */

#include "examples/threads.h"
#include "tests/faults.h"

enum { RANKS = 3 };

static char **arguments;
static threads all;
static divided problem;

static void *run_rank(void *context)
{
    const fattn_transport transport = threads_transport(&all, *(const int *)context);
    fault_run(&problem, &transport, arguments, 3 * atof(arguments[3]));
    return NULL;
}

int main(int argc, char **argv)
{
    static const int numbers[RANKS] = {0, 1, 2};
    pthread_t thread[RANKS];
    if (argc != 5) {
        return 2;
    }
    arguments = argv;
    setvbuf(stdout, NULL, _IOLBF, 0);
    fault_problem(&problem, atoi(argv[4]));
    threads_make(&all, RANKS);
    for (int r = 0; r < RANKS; r++) {
        if (pthread_create(&thread[r], NULL, run_rank, (void *)&numbers[r])) {
            return 2;
        }
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(thread[r], NULL);
    }
    return 0;
}
