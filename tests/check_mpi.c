/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups over MPI: drawn problems against the undivided one, a rank that gives up, before or after
 * its messages start, one that falls silent, and one that comes late. Started by mpiexec; rank 0
 * prints TAP.
 *
 *     mpiexec -n RANKS check_mpi [PROBLEMS]
 *
 * FATTN_BACKEND names a device with memory of its own, which MPI has to know; then drawn problems
 * alone are run.
 */
#define _POSIX_C_SOURCE 199309L /* nanosleep */
#include <time.h>

#include "fattn/mpi.h"
#include "tests/divided.h"
#include "tests/tap.h"

#ifdef __SANITIZE_ADDRESS__
/* MPI's plugins stay loaded, so that LeakSanitizer can say whose a leak is (mpi_leaks.supp). */
int dlclose(void *handle);
int dlclose(void *handle)
{
    (void)handle;
    return 0;
}
#endif

static int rank, ranks;

/* Whether it is so on every rank. */
static bool all(bool here)
{
    int mine = here, least = 0;
    MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return least;
}

static void check(bool here, const char *what)
{
    const bool everywhere = all(here);
    if (!here) {
        printf("# rank %d: %s\n", rank, fattn_last_reason());
    }
    if (rank == 0) {
        tap_check(everywhere, "%d ranks: %s", ranks, what);
    }
}

static bool problem_is_right(const fattn_transport *transport, int64_t index)
{
    divided d;
    divided_share share = {0};
    char text[256] = "", what[256];
    divided_draw(&d, 11, index, ranks);
    bool good = divided_solve(&d, 11, index) == FATTN_OK;
    good = good && divided_run(&d, transport, 60, &share) == FATTN_OK;
    snprintf(text, sizeof text, "%s", good ? "" : fattn_last_reason());
    good = good && divided_is_right(&d, ranks, rank, &share, text, sizeof text);
    if (!good) {
        divided_describe(&d, what, sizeof what);
        printf("# case %lld: %s\n#   %s\n", (long long)index, text, what);
    }
    divided_share_free(&share);
    divided_free(&d);
    return good;
}

static void check_results(int problems)
{
    fattn_transport *transport = NULL;
    fattn_device *device = NULL;
    fattn_status status = device_named() ? fattn_device_open(NULL, &device) : FATTN_OK;
    status = status ? status : fattn_mpi_open_device(MPI_COMM_WORLD, device, NULL, &transport);
    check(!status && !transport->device_memory == !device, "a transport is opened");
    if (!all(!status)) {
        return;
    }
    int right = 0;
    for (int n = 0; n < problems; n++) {
        right += problem_is_right(transport, n);
    }
    fattn_mpi_close(transport);
    fattn_device_close(device);
    check(right == problems && problems > 0, "drawn problems are right");
}

/* The last rank executes without tensors, or does not come at all. The share is to be freed after
 * MPI_Finalize(). *broken: the transport, whose memory stays */
static void check_fault(bool silent, divided_share *share, fattn_transport **broken)
{
    const bool last = rank == ranks - 1;
    fattn_transport *transport = NULL;
    fattn_group group;
    divided d;
    int64_t index = 0;
    memset(share, 0, sizeof *share);
    do {
        divided_draw(&d, 3, ++index, 1);
    } while (d.scheme != FATTN_SCHEME_RING || d.problem.seqlen_q < 20 || d.problem.seqlen_k < 20 ||
             d.problem.features & (FATTN_CAUSAL | FATTN_WINDOW));
    divided_solve(&d, 3, index);
    fattn_status status = fattn_mpi_open(MPI_COMM_WORLD, &transport);
    fattn_group_init(&group);
    group.transport = transport;
    if (!status && last && !silent) {
        fattn_buffers none;
        fattn_buffers_init(&none);
        group.split = d.split;
        status = fattn_group_plan_create(&group, &d.problem, d.ragged ? d.cu_q : NULL,
                                         d.ragged ? d.cu_k : NULL, &share->plan);
        status = status ? status : fattn_group_execute(share->plan, &none);
        check(status == FATTN_NULL_POINTER, "one gives up, and the others hear which and why");
    } else if (!status && !last) {
        status = divided_run(&d, transport, silent ? 1 : 60, share);
        char what[64];
        snprintf(what, sizeof what,
                 silent ? "rank %d did not answer in 1 s" : "rank %d gave up: q is NULL",
                 ranks - 1);
        /* Of several that wait, one may hear of another's timeout first. */
        check((status == FATTN_RANK_LOST || (silent && status == FATTN_RANK_TIMEOUT)) &&
                  strstr(fattn_last_reason(), what),
              silent ? "one is silent, and the others do not wait for ever"
                     : "one gives up, and the others hear which and why");
    } else {
        check(!status, "one is silent, and the others do not wait for ever");
    }
    fattn_mpi_close(transport);
    *broken = transport;
    divided_free(&d);
}

/* Rank 0 cannot start all messages of a group: what rank 1 sends then does not come to where the
 * first of them would have put it. *broken: the transport, whose memory stays */
static void check_half_started(fattn_transport **broken)
{
    enum { BYTES = 64 };
    static char data[BYTES]; /* of rank 1: what is sent */
    const fattn_message halves[] = {{1, 3, 1, 0, data, BYTES, NULL},
                                    {ranks, 3, 0, 0, data, BYTES, NULL}};
    const fattn_message sent = {0, 3, 0, 0, data, BYTES, NULL};
    fattn_transport *t = NULL;
    bool right = fattn_mpi_open(MPI_COMM_WORLD, &t) == FATTN_OK;
    if (!all(right)) {
        check(right, "a transport is opened");
        return;
    }
    memset(data, rank, sizeof data);
    if (rank == 0) {
        right = t->start(t->user, halves, 2) == FATTN_RANK_LOST;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 1) {
        right = !t->start(t->user, &sent, 1) && !t->wait(t->user, &sent, 1, 60);
    }
    for (int n = 0; n < 3; n++) { /* messages move while MPI is called */
        MPI_Barrier(MPI_COMM_WORLD);
    }
    check(right && data[0] == rank && data[BYTES - 1] == rank,
          "messages that could not all be started are not received");
    fattn_mpi_close(t);
    *broken = t;
}

/* Rank 0 gives up between start() and wait(), as the library does if it cannot compute. Nobody
 * sends what all of them wait for. *broken: the transport, whose memory stays */
static void check_given_up(fattn_transport **broken)
{
    enum { BYTES = 64 };
    static char data[BYTES];
    const fattn_message never = {(rank + 1) % ranks, 3, 1, 0, data, BYTES, NULL};
    fattn_transport *t = NULL;
    bool right = fattn_mpi_open(MPI_COMM_WORLD, &t) == FATTN_OK;
    if (!all(right)) {
        check(right, "a transport is opened");
        return;
    }
    right = t->start(t->user, &never, 1) == FATTN_OK;
    if (rank == 0) {
        t->abort(t->user, "it cannot compute");
    }
    const double begin = MPI_Wtime();
    right = t->wait(t->user, &never, 1, 30) == FATTN_RANK_LOST && right;
    right = right && MPI_Wtime() - begin < 10;
    check(right, "a rank that gives up does not wait for messages itself");
    fattn_mpi_close(t);
    *broken = t;
}

/* The transport of a rank that comes late to its third group of messages, the first one that is not
 * for planning; then its messages arrive before it waits for them. */
static struct {
    fattn_transport real;
    int groups;
} late;

static void sleep_once(void)
{
    const struct timespec time = {.tv_sec = 1, .tv_nsec = 500000000};
    if (late.groups == 3) {
        nanosleep(&time, NULL);
    }
}

static fattn_status start_late(void *user, const fattn_message *messages, int count)
{
    late.groups++;
    sleep_once();
    return late.real.start(user, messages, count);
}

static fattn_status wait_late(void *user, const fattn_message *messages, int count, double seconds)
{
    sleep_once();
    return late.real.wait(user, messages, count, seconds);
}

/* Rank 0 does not wait for the last one, and its caller has other data in its keys and values when
 * that one comes. (Of more than two ranks, those before the last one may be done by then.) Their
 * messages are above the size that MPI copies at once. */
static void check_reuse(divided_share *share, fattn_transport **broken)
{
    const bool last = rank == ranks - 1;
    const int tokens = 512 * ranks;
    divided d;
    memset(&d, 0, sizeof d);
    fattn_problem_init(&d.problem);
    d.problem.features = FATTN_CAUSAL; /* the last rank receives alone */
    d.problem.seqlen_q = d.problem.seqlen_k = d.cu_q[1] = d.cu_k[1] = tokens;
    d.problem.dim = d.problem.dim_v = 64;
    d.problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    d.split = FATTN_SPLIT_CONTIGUOUS, d.scheme = FATTN_SCHEME_RING;
    fattn_status status = divided_solve(&d, 3, 1);
    status = status ? status : fattn_mpi_open(MPI_COMM_WORLD, broken);
    char text[256] = "";
    bool good = all(!status);
    if (good) {
        fattn_transport transport = late.real = **broken;
        transport.start = last ? start_late : transport.start;
        transport.wait = last ? wait_late : transport.wait;
        status = divided_run(&d, &transport, rank == 0 ? 0.5 : 60, share);
        good = status ? status == FATTN_RANK_TIMEOUT || status == FATTN_RANK_LOST
                      : divided_is_right(&d, ranks, rank, share, text, sizeof text);
    }
    for (int id = DIVIDED_K; rank == 0 && share->at[0] && id <= DIVIDED_V; id++) {
        memset(share->at[id], 0x42, (size_t)divided_count(&d, (divided_id)id) / (size_t)ranks * 4);
    }
    check(good,
          "one is late, another one has given up and reuses its memory: none has wrong results");
    fattn_mpi_close(*broken);
    divided_free(&d);
}

/* Whether the last byte of a message arrives, within a minute, while this thread does not call
 * MPI. */
static bool arrives(const volatile char *last, char expected)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    for (int n = 0; n < 6000 && *last != expected; n++) {
        nanosleep(&nap, NULL);
    }
    return *last == expected;
}

/* Messages so large that MPI does not send them before they are received. */
static void check_progress(void)
{
    enum { BYTES = 16 << 20 };
    fattn_transport *t = NULL;
    char *const data = calloc(2, BYTES);
    const fattn_message messages[] = {
        {(rank + 1) % ranks, 3, 0, 0, data, BYTES, NULL},
        {(rank + ranks - 1) % ranks, 3, 1, 0, data + BYTES, BYTES, NULL},
    };
    if (!data) {
        tap_bail("out of memory");
    }
    memset(data, rank + 1, BYTES);
    bool moves = all(fattn_mpi_open(MPI_COMM_WORLD, &t) == FATTN_OK);
    if (moves) {
        const fattn_status status = t->start(t->user, messages, 2);
        moves = !status && arrives(data + 2 * BYTES - 1, (char)(messages[1].peer + 1));
        moves = !status && t->wait(t->user, messages, 2, 60) == FATTN_OK && moves;
    }
    check(moves, "messages move while nobody waits for them");
    fattn_mpi_close(t);
    free(data);
}

int main(int argc, char **argv)
{
    int provided = 0;
    fattn_transport *none = NULL;
    const bool early = fattn_mpi_open(MPI_COMM_WORLD, &none) == FATTN_INVALID_ARGUMENT && !none;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    check(early && fattn_mpi_open(MPI_COMM_NULL, &none) == FATTN_INVALID_ARGUMENT && !none,
          "no communicator, and no MPI yet");
    if (provided >= MPI_THREAD_SERIALIZED && !device_named()) {
        check_progress();
    }
    check_results(argc > 1 ? atoi(argv[1]) : 50);
    divided_share shares[3];
    static fattn_transport *broken[5];
    memset(shares, 0, sizeof shares);
    if (!device_named()) {
        check_fault(false, &shares[0], &broken[0]);
        check_fault(true, &shares[1], &broken[1]);
        check_half_started(&broken[2]);
        check_given_up(&broken[3]);
        check_reuse(&shares[2], &broken[4]);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    for (int n = 0; n < 3; n++) {
        divided_share_free(&shares[n]);
    }
    fattn_cache_clear();
    return rank == 0 ? tap_done() : 0;
}
