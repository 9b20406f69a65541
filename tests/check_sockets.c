/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport that docs/DISTRIBUTED.md shows: ranks are processes with a socket to each other
 * one.
 * Drawn problems against the undivided one, and a rank that is killed.
 */
#include "tests/page_transport.h" /* from the page */

#include <signal.h>
#include <unistd.h>

#include "tests/child.h"
#include "tests/divided.h"
#include "tests/tap.h"

enum { RANKS = 4, PROBLEMS = 40, SECONDS = 100 /* of a rank; its messages have fewer */ };

static int problems_right(const fattn_transport *t)
{
    int right = 0;
    for (int64_t n = 0; n < PROBLEMS; n++) {
        divided d;
        divided_share share = {0};
        char text[256] = "";
        divided_draw(&d, 17, n, t->ranks);
        bool good = !divided_solve(&d, 17, n) && !divided_run(&d, t, 60, &share);
        good = good && divided_is_right(&d, t->ranks, t->rank, &share, text, sizeof text);
        right += good;
        if (!good) {
            printf("# rank %d, case %lld: %s %s\n", t->rank, (long long)n, text,
                   fattn_last_reason());
        }
        divided_share_free(&share);
        divided_free(&d);
    }
    return right;
}

/* Rank 1 is killed before it plans. */
static bool error_is_told(const fattn_transport *t)
{
    divided d;
    divided_share share = {0};
    divided_draw(&d, 1, 1, 1);
    if (divided_solve(&d, 1, 1) || (t->rank == 1 && kill(getpid(), SIGKILL))) {
        return false;
    }
    const fattn_status status = divided_run(&d, t, 30, &share);
    divided_share_free(&share);
    divided_free(&d);
    return status == FATTN_RANK_LOST && strstr(fattn_last_reason(), " is gone");
}

/* Exit statuses of ranks: 0 where all was as it should. */
static int run(int ranks, bool dies)
{
    int ends[RANKS][RANKS], wrong = 0;
    pid_t pids[RANKS];
    for (int a = 0; a < ranks; a++) {
        ends[a][a] = -1;
        for (int b = 0; b < a; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) {
                return -1;
            }
            ends[a][b] = pair[0], ends[b][a] = pair[1];
        }
    }
    for (int r = 0; r < ranks; r++) {
        pids[r] = child_start(SECONDS);
        if (pids[r] == 0) {
            sockets s = {.rank = r, .ranks = ranks};
            memcpy(s.fd, ends[r], (size_t)ranks * sizeof s.fd[0]);
            for (int n = 0; n < ranks * ranks;
                 n++) { /* so that a process that dies closes its own */
                if (n / ranks != r && n / ranks != n % ranks) {
                    close(ends[n / ranks][n % ranks]);
                }
            }
            const fattn_transport t = sockets_transport(&s);
            const bool good = dies ? error_is_told(&t) : problems_right(&t) == PROBLEMS;
            fflush(stdout);
            _exit(!good);
        }
    }
    for (int n = 0; n < ranks * ranks; n++) {
        if (n / ranks != n % ranks) {
            close(ends[n / ranks][n % ranks]);
        }
    }
    for (int r = 0; r < ranks; r++) {
        wrong += !child_succeeds(pids[r]) && !(dies && r == 1);
    }
    return wrong;
}

int main(void)
{
    for (int ranks = 2; ranks <= RANKS; ranks++) {
        tap_check(run(ranks, false) == 0, "%d ranks: %d drawn problems are right", ranks, PROBLEMS);
    }
    tap_check(run(3, true) == 0, "a rank is killed, and the others hear of it");
    return tap_done();
}
