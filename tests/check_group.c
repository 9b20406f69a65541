/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks that are threads: drawn problems against the undivided one, the same bits in
 * every run, and what becomes of the others when a rank errs, falls silent or disagrees.
 *
 *     check_group [PROBLEMS [SEED]]
 *
 * PROBLEMS: for each number of ranks, a sixth of them are drawn; for one rank, a tenth.
 * FATTN_BACKEND names a device with memory of its own, which ranks share.
 */
#define _POSIX_C_SOURCE 200809L /* threads.h */

#include "core/distributed/group.h"
#include "core/distributed/needs.h"
#include "core/plan.h"
#include "examples/threads.h"
#include "tests/device.h"
#include "tests/divided.h"
#include "tests/tap.h"
#include <stdatomic.h>

enum { RANKS = 3 }; /* where any number does */

typedef struct rank_run {
    pthread_t thread;
    const divided *problem;
    threads *all;
    int rank;
    double timeout;
    int silent; /* never calls the library */
    fattn_status status;
    char reason[512];
    divided_share share;
} rank_run;

static void *run_rank(void *context)
{
    rank_run *const r = context;
    fattn_transport transport = threads_transport(r->all, r->rank);
    transport.device_memory = device_named() != NULL;
    if (!r->silent) {
        r->status = divided_run(r->problem, &transport, r->timeout, &r->share);
        fattn_last_reason_copy(r->reason, sizeof r->reason);
    }
    return NULL;
}

/* Runs a problem a rank; they are the same one, except where ranks are to disagree. */
static void run_ranks(const divided *problems[], threads *all, int ranks, double timeout,
                      int silent, rank_run *runs)
{
    for (int r = 0; r < ranks; r++) {
        runs[r] = (rank_run){.problem = problems[r],
                             .all = all,
                             .rank = r,
                             .timeout = timeout,
                             .silent = r == silent};
        if (pthread_create(&runs[r].thread, NULL, run_rank, &runs[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(runs[r].thread, NULL);
    }
}

static void free_ranks(rank_run *runs, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        divided_share_free(&runs[r].share);
    }
}

/* --- Results ---------------------------------------------------------------------------------- */

static bool same_bits(const divided *d, const rank_run *a, const rank_run *b, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        for (int id = 0; id < DIVIDED_IDS; id++) {
            const size_t bytes = (size_t)divided_count(d, (divided_id)id) * 4;
            if (memcmp(a[r].share.at[id], b[r].share.at[id], bytes) != 0) {
                return false;
            }
        }
        if (memcmp(a[r].share.dsink, b[r].share.dsink, sizeof a[r].share.dsink) != 0) {
            return false;
        }
    }
    return true;
}

static int64_t most_bytes(const rank_run *runs, int ranks)
{
    int64_t most = 0;
    for (int r = 0; r < ranks; r++) {
        const int64_t bytes = fattn_group_plan_bytes(runs[r].share.plan);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Whether the most that a rank's plan holds, or that there is none in so little memory, is what was
 * foretold. Not where each rank has strides of its own. */
static bool needs_are_right(const divided *d, const rank_run *runs, int ranks, bool refused,
                            char *text, size_t size)
{
    const fattn_problem p = divided_local(d, ranks, 0);
    const fattn_group_plan *const plan = runs[0].share.plan;
    fattn_group group;
    fattn_group_needs needs;
    fattn_group_init(&group);
    group.split = d->split;
    group.scheme = d->scheme;
    group.memory = d->memory;
    group.turns = d->turns;
    group.saves = d->saves && d->memory == 0;
    if (d->strided || p.outputs & FATTN_OUT_DBIAS) {
        return true;
    }
    const fattn_status status = fattn_group_foresee(&group, ranks, &p, d->ragged ? d->cu_q : NULL,
                                                    d->ragged ? d->cu_k : NULL, &needs);
    if (status || refused) {
        snprintf(text, size, "foretold: %.200s", status ? fattn_last_reason() : "a plan");
        return refused && status == FATTN_OUT_OF_MEMORY;
    }
    const int64_t bytes = most_bytes(runs, ranks);
    snprintf(text, size, "plans hold %lld bytes in %lld turns, %lld in %lld were foretold",
             (long long)bytes, (long long)(plan->turns * plan->slices), (long long)needs.plan,
             (long long)(needs.turns * needs.slices));
    return needs.plan == bytes && needs.workspace <= bytes && needs.turns == plan->turns &&
           needs.slices == plan->slices && needs.saved == fattn_group_plan_saved_bytes(plan);
}

static bool problem_is_right(uint64_t seed, int64_t index, int ranks, bool twice)
{
    divided d;
    char text[256] = "";
    divided_draw(&d, seed, index, ranks);
    bool good = divided_solve(&d, seed, index) == FATTN_OK;
    snprintf(text, sizeof text, "%s", good ? "" : fattn_last_reason());
    const divided *const problems[THREADS_MAX] = {&d, &d, &d, &d, &d, &d, &d, &d};
    rank_run runs[2][THREADS_MAX];
    for (int n = 0; good && n < 1 + twice; n++) {
        threads all;
        threads_make(&all, ranks);
        run_ranks((const divided **)problems, &all, ranks, 60, -1, runs[n]);
        for (int r = 0; good && r < ranks; r++) {
            good = runs[n][r].status == FATTN_OK;
            snprintf(text, sizeof text, "%.250s", good ? "" : runs[n][r].reason);
            good = good && divided_is_right(&d, ranks, r, &runs[n][r].share, text, sizeof text);
        }
        threads_free(&all);
        if (n == 1 && good && !same_bits(&d, runs[0], runs[1], ranks)) {
            snprintf(text, sizeof text, "two runs differ");
            good = false;
        }
        good = good && (n > 0 || needs_are_right(&d, runs[0], ranks, false, text, sizeof text));
        if (n == 1) {
            free_ranks(runs[1], ranks);
        }
        if (n == twice || !good) {
            free_ranks(runs[0], ranks);
        }
    }
    if (!good) {
        char what[256];
        divided_describe(&d, what, sizeof what);
        printf("# seed %llu case %lld on %d ranks: %s\n#   %s\n", (unsigned long long)seed,
               (long long)index, ranks, text, what);
    }
    divided_free(&d);
    return good;
}

static void check_results(int64_t problems, uint64_t seed)
{
    static const int numbers[] = {1, 2, 3, 4, 5, 6, 8};
    const size_t all = sizeof numbers / sizeof numbers[0];
    /* An emulated GPU is slow, and what is the device's own does not depend on the ranks. */
    for (size_t i = 0; i < (device_named() ? 4 : all); i++) {
        const int ranks = numbers[i];
        int64_t right = 0;
        const int64_t count = ranks == 1 ? problems / 10 : problems / 6;
        for (int64_t n = 0; n < count; n++) {
            right += problem_is_right(seed, n * 8 + ranks, ranks, n % 4 == 0);
        }
        tap_check(right == count && count > 0, "%d ranks: %lld of %lld drawn problems are right",
                  ranks, (long long)right, (long long)count);
    }
}

/* --- Pieces ----------------------------------------------------------------------------------- */

typedef struct planner {
    pthread_t thread;
    fattn_transport transport;
    fattn_op op;
    int64_t gap; /* elements between a rank's sequences of keys */
    fattn_group_plan *plan;
} planner;

/* A causal square of two sequences over 4 ranks, zigzag. */
static void *run_planner(void *context)
{
    planner *const r = context;
    fattn_group group;
    fattn_problem p;
    fattn_group_init(&group);
    group.transport = &r->transport;
    group.split = FATTN_SPLIT_ZIGZAG;
    fattn_problem_init(&p);
    p.op = r->op;
    p.features = FATTN_CAUSAL;
    p.layout = FATTN_STRIDED;
    p.batch = 2, p.heads_q = 4, p.heads_k = 2, p.dim = p.dim_v = 16;
    p.seqlen_q = p.seqlen_k = 64;
    const fattn_strides q = {16 * 4 * 16, 4 * 16, 16}, k = {16 * 2 * 16 + r->gap, 2 * 16, 16};
    p.q = p.o = p.dq = p.dout = q;
    p.k = p.v = p.dk = p.dv = k;
    p.outputs = r->op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                       : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    if (fattn_group_plan_create(&group, &p, NULL, NULL, &r->plan)) {
        printf("# %s\n", fattn_last_reason());
    }
    return NULL;
}

/* Pieces of a step that a rank has. */
static int pieces_of(const fattn_group_plan *plan, int64_t step)
{
    int pieces = 0;
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        for (int n = 0; n < plan->q_runs * plan->k_runs; n++) {
            fattn_visit visit;
            pieces += fattn_group_visit(plan, lane, step, n, &visit) &&
                      fattn_group_has_piece(plan, &visit);
        }
    }
    return pieces;
}

/* --- The scheme ------------------------------------------------------------------------------- */

typedef struct chooser {
    pthread_t thread;
    fattn_transport transport;
    fattn_group group;
    const fattn_problem *problem;
    fattn_scheme chosen; /* FATTN_SCHEME_AUTO: none */
} chooser;

static void *run_chooser(void *context)
{
    chooser *const c = context;
    fattn_group_plan *plan;
    c->group.transport = &c->transport;
    if (fattn_group_plan_create(&c->group, c->problem, NULL, NULL, &plan)) {
        printf("# %s\n", fattn_last_reason());
    }
    c->chosen = fattn_group_plan_scheme(plan);
    fattn_group_plan_destroy(plan);
    return NULL;
}

/* The scheme that all ranks choose; -1 if they differ. */
static int chosen(const fattn_group *group, const fattn_problem *p, int ranks)
{
    enum { MOST = 8 };
    chooser all[MOST];
    threads all_ranks;
    bool alike = true;
    threads_make(&all_ranks, ranks);
    for (int r = 0; r < ranks; r++) {
        all[r] =
            (chooser){.transport = threads_transport(&all_ranks, r), .group = *group, .problem = p};
        if (pthread_create(&all[r].thread, NULL, run_chooser, &all[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(all[r].thread, NULL);
        alike = alike && all[r].chosen == all[0].chosen;
    }
    threads_free(&all_ranks);
    return alike ? (int)all[0].chosen : -1;
}

static void check_choices(void)
{
    static const struct {
        const char *what;
        int ranks;
        fattn_split split;
        uint64_t features;
        int64_t queries, heads_k;
        double bandwidth;
        fattn_scheme best;
    } all[] = {
        {"contiguous shares, causal", 2, FATTN_SPLIT_CONTIGUOUS, FATTN_CAUSAL, 4096, 8, 1e12,
         FATTN_SCHEME_HEADS},
        {"zigzag shares, causal", 2, FATTN_SPLIT_ZIGZAG, FATTN_CAUSAL, 4096, 8, 1e12,
         FATTN_SCHEME_RING},
        {"contiguous shares, causal, a bias", 2, FATTN_SPLIT_CONTIGUOUS, FATTN_CAUSAL | FATTN_BIAS,
         4096, 8, 1e12, FATTN_SCHEME_RING},
        {"contiguous shares, causal, one key head", 2, FATTN_SPLIT_CONTIGUOUS, FATTN_CAUSAL, 4096,
         1, 1e12, FATTN_SCHEME_RING},
        {"four ranks, a slow link", 4, FATTN_SPLIT_CONTIGUOUS, 0, 4096, 8, 1e8, FATTN_SCHEME_HEADS},
        {"four ranks, a fast link", 4, FATTN_SPLIT_CONTIGUOUS, 0, 4096, 8, 1e13, FATTN_SCHEME_RING},
        {"six ranks, two key heads", 6, FATTN_SPLIT_CONTIGUOUS, FATTN_CAUSAL, 4092, 2, 1e12,
         FATTN_SCHEME_BOTH},
        /* With these links it matters that backward exchanges less if forward saves rows. */
        {"zigzag shares, causal, a slower link", 2, FATTN_SPLIT_ZIGZAG, FATTN_CAUSAL, 4096, 8,
         1.6e9, FATTN_SCHEME_RING},
        {"four ranks, a slower link", 4, FATTN_SPLIT_CONTIGUOUS, 0, 4096, 8, 1e9,
         FATTN_SCHEME_BOTH},
        {"a query for four ranks", 4, FATTN_SPLIT_CONTIGUOUS, 0, 1, 8, 1e12, FATTN_SCHEME_HEADS},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        fattn_group group;
        fattn_problem p;
        fattn_group_init(&group);
        group.scheme = FATTN_SCHEME_AUTO;
        group.split = all[i].split;
        group.rate = 1e12;
        group.bandwidth = all[i].bandwidth;
        fattn_problem_init(&p);
        p.features = all[i].features;
        p.heads_q = 8, p.heads_k = all[i].heads_k;
        p.seqlen_q = all[i].queries;
        p.seqlen_k = all[i].queries == 1 ? 4096 : all[i].queries;
        p.dim = p.dim_v = 64;
        const int found = chosen(&group, &p, all[i].ranks);
        tap_check(found == (int)all[i].best, "scheme for %s: %d", all[i].what, found);
        group.saves = 1;
        int found_of[2];
        for (int op = 0; op < 2; op++) {
            p.op = op ? FATTN_BACKWARD : FATTN_FORWARD;
            p.outputs = op ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV : FATTN_OUT_O;
            found_of[op] = chosen(&group, &p, all[i].ranks);
        }
        tap_check(found_of[0] == found_of[1] && found_of[0] > 0,
                  "and where rows are saved, the same for forward and backward: %d", found_of[0]);
    }
}

/* A launch more a step is a tail more; a copy of the keys is a pass over memory. */
static void check_pieces(fattn_op op)
{
    enum { PLANNERS = 4 };
    planner all[PLANNERS];
    threads all_ranks;
    int64_t steps = 0, pieces = 0;
    bool copies = false;
    threads_make(&all_ranks, PLANNERS);
    for (int r = 0; r < PLANNERS; r++) {
        all[r] =
            (planner){.transport = threads_transport(&all_ranks, r), .op = op, .gap = 8 * (r == 3)};
        if (pthread_create(&all[r].thread, NULL, run_planner, &all[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < PLANNERS; r++) {
        pthread_join(all[r].thread, NULL);
    }
    for (int r = 0; r < PLANNERS; r++) {
        const fattn_group_plan *const plan = all[r].plan;
        for (int64_t step = 0; plan && step < plan->rounds; step++) {
            steps++;
            pieces += pieces_of(plan, step);
        }
        copies = copies || !plan || (plan->at.own != NULL) != (r == 3);
    }
    tap_check(pieces == steps && steps == PLANNERS * (op == FATTN_FORWARD ? 4 : 5),
              "%s: %lld pieces in %lld steps of a zigzag ring under a causal mask",
              op == FATTN_FORWARD ? "forward" : "backward", (long long)pieces, (long long)steps);
    tap_check(!copies, "and a rank's own keys are copied where they have gaps alone");
    for (int r = 0; r < PLANNERS; r++) {
        fattn_group_plan_destroy(all[r].plan);
    }
    threads_free(&all_ranks);
}

/* --- Turns ------------------------------------------------------------------------------------ */

/* With a byte less than the last plan took, heads take more turns, and then keys more slices, until
 * none can. */
static bool turns_are_right(fattn_scheme scheme, int64_t index, int ranks, int *tried, int *plans)
{
    divided d;
    divided_draw(&d, 21, index, ranks);
    const fattn_problem *const p = &d.problem;
    const bool ring = scheme == FATTN_SCHEME_RING;
    if (d.scheme != scheme || p->seqlen_q < 30 || p->seqlen_k < 30 ||
        (ring && (d.ragged || p->batch != 1 || p->outputs & FATTN_OUT_DBIAS || p->heads_k != 2)) ||
        (!ring && p->heads_k == (scheme == FATTN_SCHEME_BOTH ? 2 : ranks))) {
        return true;
    }
    d.turns = 1;
    const divided *const problems[THREADS_MAX] = {&d, &d, &d, &d, &d, &d, &d, &d};
    rank_run runs[THREADS_MAX];
    threads all;
    bool good = divided_solve(&d, 21, index) == FATTN_OK;
    (*tried)++;
    bool refused = false;
    for (int n = 0; good && !refused; n++) {
        threads_make(&all, ranks);
        run_ranks((const divided **)problems, &all, ranks, 60, -1, runs);
        threads_free(&all);
        refused = runs[0].status == FATTN_OUT_OF_MEMORY || runs[0].status == FATTN_RANK_LOST;
        *tried -= refused && n == 1; /* its kernels want more memory for fewer heads */
        *plans += !refused && n > 0;
        for (int r = 0; r < ranks; r++) {
            char text[256] = "";
            good =
                good && (refused ? n > 0 && (runs[r].status == FATTN_OUT_OF_MEMORY ||
                                             runs[r].status == FATTN_RANK_LOST)
                                 : !runs[r].status && divided_is_right(&d, ranks, r, &runs[r].share,
                                                                       text, sizeof text));
            if (!good) {
                printf("# turns, case %lld, run %d: %s %s\n", (long long)index, n, runs[r].reason,
                       text);
                break;
            }
        }
        const int64_t bytes = refused ? 0 : most_bytes(runs, ranks);
        char text[256];
        good = good && (n == 0 || bytes <= d.memory);
        if (good && !needs_are_right(&d, runs, ranks, refused, text, sizeof text)) {
            printf("# turns, case %lld, run %d: %s\n", (long long)index, n, text);
            good = false;
        }
        d.memory = bytes - 1;
        free_ranks(runs, ranks);
    }
    divided_free(&d);
    return good;
}

/* most: problems of those that are drawn */
static void check_turns(fattn_scheme scheme, int most)
{
    /* In a ring that is more plans than heads of keys have turns: a problem has 2 of them. */
    const int least = scheme == FATTN_SCHEME_RING ? 2 : 1;
    int right = 0, tried = 0, plans = 0, drawn = 0;
    while (drawn < 1200 && tried < most) {
        right += turns_are_right(scheme, drawn, 2 + drawn % 3, &tried, &plans);
        drawn++;
    }
    tap_check(right == drawn && tried >= (most < 16 ? most : 16) && plans > least * tried,
              "scheme %d: %d of %d problems are right in less memory, with %d plans", (int)scheme,
              right - (drawn - tried), tried, plans);
}

/* A causal problem of one sequence that is not drawn, in a ring. */
static divided causal(fattn_op op, int64_t heads, int tokens)
{
    divided d;
    memset(&d, 0, sizeof d);
    fattn_problem_init(&d.problem);
    d.problem.op = op;
    d.problem.features = FATTN_CAUSAL;
    d.problem.anchor = FATTN_BOTTOM_RIGHT;
    d.problem.heads_q = d.problem.heads_k = heads;
    d.problem.seqlen_q = d.problem.seqlen_k = d.cu_q[1] = d.cu_k[1] = tokens;
    d.problem.dim = d.problem.dim_v = 32;
    d.problem.pointer_alignment = 2;
    d.problem.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                            : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    d.split = FATTN_SPLIT_ZIGZAG, d.scheme = FATTN_SCHEME_RING;
    return d;
}

/* A single head takes slices of keys as soon as it has too little memory. Every number of slices
 * gives the right results. With so many keys for each query each number takes less memory than the
 * one before. */
static void check_single_head(fattn_op op, fattn_split split, int ranks)
{
    divided d = causal(op, 1, 2048);
    d.problem.seqlen_q = d.cu_q[1] = 64;
    d.split = split;
    const divided *const problems[THREADS_MAX] = {&d, &d, &d, &d};
    bool good = divided_solve(&d, 1, 1) == FATTN_OK, refused = false;
    int64_t seen = 0; /* numbers of slices, which are powers of two */
    char text[256] = "";
    while (good && !refused) {
        rank_run runs[THREADS_MAX];
        threads all;
        threads_make(&all, ranks);
        run_ranks((const divided **)problems, &all, ranks, 60, -1, runs);
        refused = runs[0].status == FATTN_OUT_OF_MEMORY || runs[0].status == FATTN_RANK_LOST;
        for (int r = 0; r < ranks && !refused && good; r++) {
            snprintf(text, sizeof text, "%.250s", runs[r].reason);
            good = !runs[r].status &&
                   divided_is_right(&d, ranks, r, &runs[r].share, text, sizeof text);
        }
        seen |= good && !refused ? runs[0].share.plan->slices : 0;
        d.memory = refused || !good ? 0 : most_bytes(runs, ranks) - 1;
        free_ranks(runs, ranks);
        threads_free(&all);
    }
    tap_check(good && seen == (1 | 2 | 4 | 8 | 16),
              "%s, split %d, %d ranks: one head in any number of slices is right: %lld %s",
              op == FATTN_FORWARD ? "forward" : "backward", (int)split, ranks, (long long)seen,
              good ? "" : text);
    divided_free(&d);
}

/* --- Unusual problems ------------------------------------------------------------------------- */

static void check_unusual(divided *d, const char *what)
{
    const divided *const problems[THREADS_MAX] = {d, d, d};
    char text[256] = "";
    rank_run runs[RANKS];
    threads all;
    bool good = divided_solve(d, 1, 1) == FATTN_OK;
    snprintf(text, sizeof text, "%s", good ? "" : fattn_last_reason());
    threads_make(&all, RANKS);
    run_ranks((const divided **)problems, &all, RANKS, 60, -1, runs);
    for (int r = 0; r < RANKS && good; r++) {
        snprintf(text, sizeof text, "%.250s", runs[r].reason);
        good = !runs[r].status && divided_is_right(d, RANKS, r, &runs[r].share, text, sizeof text);
    }
    tap_check(good, "%s, scheme %d, split %d is right: %s", what, (int)d->scheme, (int)d->split,
              good ? "" : text);
    free_ranks(runs, RANKS);
    threads_free(&all);
    divided_free(d);
}

/* Each on three ranks: no sequence, dsink alone, and dropout with a seed and no probability. */
static void check_unusual_problems(void)
{
    for (int scheme = FATTN_SCHEME_RING; scheme <= FATTN_SCHEME_REDUCE; scheme++) {
        const fattn_scheme s = scheme == FATTN_SCHEME_BOTH ? FATTN_SCHEME_RING : scheme;
        const fattn_op op = scheme == FATTN_SCHEME_BOTH ? FATTN_BACKWARD : FATTN_FORWARD;
        divided d = causal(op, 3, 40);
        d.scheme = s;
        d.problem.batch = 0;
        check_unusual(&d, "a batch of no sequences");
        d = causal(op, 3, 40);
        d.scheme = s;
        d.problem.features |= FATTN_DROPOUT;
        d.seed = 5, d.offset = 7;
        check_unusual(&d, "dropout of probability 0 with a seed");
    }
    for (int n = 0; n < 6; n++) {
        divided d = causal(FATTN_BACKWARD, 3, 40);
        d.split = (fattn_split)(FATTN_SPLIT_CONTIGUOUS + n / 2);
        d.scheme = n % 2 ? FATTN_SCHEME_HEADS : FATTN_SCHEME_RING;
        d.problem.features |= FATTN_SINK;
        d.problem.outputs = FATTN_OUT_DSINK;
        check_unusual(&d, "dsink alone");
    }
}

/* A bias that is the same for all rows: one rank has it once, and the others have it for each of
 * their rows. */
static void check_broadcast(void)
{
    divided a = causal(FATTN_FORWARD, 2, 24), b;
    const int64_t full[] = {2 * 24 * 24, 24 * 24, 24, 1};
    rank_run runs[RANKS];
    threads all;
    a.problem.features |= FATTN_BIAS;
    memcpy(a.problem.bias_stride, full, sizeof full);
    a.problem.bias_stride[2] = 0;
    bool good = divided_solve(&a, 1, 1) == FATTN_OK;
    b = a;
    b.problem.bias_stride[2] = full[2];
    b.bias = divided_memory((size_t)full[0] * sizeof *b.bias);
    for (int64_t n = 0; n < full[0]; n++) {
        b.bias[n] = a.bias[n / full[1] * full[1] + n % full[2]];
    }
    const divided *problems[RANKS] = {&b, &a, &b};
    threads_make(&all, RANKS);
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    char text[256] = "";
    for (int r = 0; r < RANKS && good; r++) {
        snprintf(text, sizeof text, "%.250s", runs[r].reason);
        good = !runs[r].status && divided_is_right(&a, RANKS, r, &runs[r].share, text, sizeof text);
    }
    tap_check(good, "a bias that one rank broadcasts along its rows is right: %s",
              good ? "" : text);
    free_ranks(runs, RANKS);
    threads_free(&all);
    free(b.bias);
    divided_free(&a);
}

/* --- Memory ----------------------------------------------------------------------------------- */

/* The process's allocator here: sums up what large blocks take. */
enum { LARGE = 1 << 20, HEADER = 64 };
static atomic_llong large_bytes;

static void *allocate(void *user, size_t bytes)
{
    (void)user;
    int64_t *const at = malloc(bytes + HEADER);
    if (!at) {
        return NULL;
    }
    *at = bytes > LARGE ? (int64_t)bytes : 0;
    atomic_fetch_add(&large_bytes, *at);
    return (char *)at + HEADER;
}

static void release(void *user, void *memory)
{
    (void)user;
    int64_t *const at = (int64_t *)((char *)memory - HEADER);
    atomic_fetch_sub(&large_bytes, *at);
    free(at);
}

typedef struct saver {
    fattn_transport transport;
    fattn_group_plan *plans[2];
    pthread_t thread;
} saver;

/* The problem of docs/DISTRIBUTED.md's table: a million tokens over two ranks. */
static fattn_problem million(fattn_group *group, const fattn_transport *transport, int op)
{
    fattn_problem p;
    fattn_group_init(group);
    group->transport = transport;
    group->split = FATTN_SPLIT_ZIGZAG;
    group->memory = op ? 1450000000 : 650000000;
    fattn_problem_init(&p);
    p.op = op ? FATTN_BACKWARD : FATTN_FORWARD;
    p.dtype = FATTN_BF16;
    p.features = FATTN_CAUSAL;
    p.batch = 1, p.heads_q = 32, p.heads_k = 8, p.dim = p.dim_v = 128;
    p.seqlen_q = p.seqlen_k = 1 << 20;
    p.outputs = op ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV : FATTN_OUT_O | FATTN_OUT_LSE;
    return p;
}

static void *run_saver(void *context)
{
    saver *const r = context;
    for (int op = 0; op < 2; op++) {
        fattn_group group;
        const fattn_problem p = million(&group, &r->transport, op);
        if (fattn_group_plan_create(&group, &p, NULL, NULL, &r->plans[op])) {
            printf("# %s\n", fattn_last_reason());
        }
    }
    return NULL;
}

/* What plans say that they hold is what was allocated, and a tenth of the tensors at most. */
static void check_memory(void)
{
    const double tensors = (double)(1 << 19) * 128 * 2 * (4 * 32 + 4 * 8);
    saver all[2];
    threads all_ranks;
    threads_make(&all_ranks, 2);
    const long long before = atomic_load(&large_bytes);
    for (int r = 0; r < 2; r++) {
        all[r] = (saver){.transport = threads_transport(&all_ranks, r)};
        if (pthread_create(&all[r].thread, NULL, run_saver, &all[r])) {
            tap_bail("no thread");
        }
    }
    int64_t bytes = 0;
    bool planned = true;
    for (int r = 0; r < 2; r++) {
        pthread_join(all[r].thread, NULL);
        for (int op = 0; op < 2; op++) {
            planned = planned && all[r].plans[op];
            bytes += fattn_group_plan_bytes(all[r].plans[op]);
            printf("# rank %d, %s: %.3f GB\n", r, op ? "backward" : "forward",
                   1e-9 * (double)fattn_group_plan_bytes(all[r].plans[op]));
        }
    }
    const double share = 1 + (double)bytes / 2 / tensors;
    const long long taken = atomic_load(&large_bytes) - before;
    tap_check(planned && share <= 1.1,
              "a million tokens: plans and tensors of a rank are %.3f of the tensors", share);
    tap_check(llabs(taken - (long long)bytes) < 16 << 20,
              "plans hold %lld bytes, and %lld were allocated", (long long)bytes, taken);
    fattn_group_needs needs[2];
    int64_t foretold = 0;
    for (int op = 0; op < 2; op++) {
        fattn_group group;
        const fattn_problem p = million(&group, NULL, op);
        planned = planned && !fattn_group_foresee(&group, 2, &p, NULL, NULL, &needs[op]);
        foretold += planned ? 2 * needs[op].plan : 0;
    }
    tap_check(llabs(taken - (long long)foretold) < 16 << 20 &&
                  needs[1].tensors == (int64_t)tensors + 4 * 32 * (1 << 19),
              "and %lld bytes of plans were foretold, beside %lld of tensors and lse",
              (long long)foretold, (long long)needs[1].tensors);
    for (int r = 0; r < 4; r++) {
        fattn_group_plan_destroy(all[r / 2].plans[r % 2]);
    }
    threads_free(&all_ranks);
}

/* --- Faults ----------------------------------------------------------------------------------- */

static void check_disagreement(void)
{
    divided a, b;
    threads all;
    rank_run runs[RANKS];
    divided_draw(&a, 1, 1, 1);
    divided_solve(&a, 1, 1);
    b = a;
    b.problem.features |= FATTN_SCALE;
    b.problem.scale = 0.77;
    const divided *problems[RANKS] = {&a, &a, &b};
    threads_make(&all, RANKS);
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[0].status == FATTN_RANKS_DISAGREE && runs[1].status == FATTN_RANKS_DISAGREE &&
                  runs[2].status == FATTN_RANKS_DISAGREE && strstr(runs[0].reason, "rank 2"),
              "a rank with another problem: %s", runs[0].reason);
    free_ranks(runs, RANKS);
    divided longer = a;
    longer.problem.seqlen_k++;
    problems[2] = &longer;
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[0].status == FATTN_RANKS_DISAGREE && strstr(runs[0].reason, "seqlen_k is ") &&
                  strstr(runs[2].reason, "rank 0 describes another problem than rank 2: seqlen_k"),
              "a rank with another length: %s", runs[0].reason);
    free_ranks(runs, RANKS);
    divided keeper = a;
    keeper.saves = !a.saves;
    problems[2] = &keeper;
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[0].status == FATTN_RANKS_DISAGREE && runs[2].status == FATTN_RANKS_DISAGREE,
              "a rank that alone saves: %s", runs[0].reason);
    free_ranks(runs, RANKS);
    for (int n = 0; n < 3; n++) { /* refused before the problem is read */
        divided c = a;
        c.memory = -(n == 0), c.turns = -(n == 1), c.split = n == 2 ? (fattn_split)7 : a.split;
        problems[2] = &c;
        run_ranks(problems, &all, RANKS, 60, -1, runs);
        tap_check(runs[2].status == FATTN_INVALID_ARGUMENT && runs[0].status == FATTN_RANK_LOST &&
                      strstr(runs[0].reason, "rank 2 cannot plan") &&
                      !strcmp(runs[0].reason, runs[1].reason),
                  "a rank with a wrong argument: %s; the others: %s", runs[2].reason,
                  runs[0].reason);
        free_ranks(runs, RANKS);
    }
    problems[2] = &b;
    b.problem.features |= FATTN_BATCH_INVARIANT;
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[2].status == FATTN_UNSUPPORTED && runs[0].status == FATTN_RANK_LOST,
              "a rank that cannot plan: %s; the others: %s", runs[2].reason, runs[0].reason);
    free_ranks(runs, RANKS);
    b.problem.features = FATTN_ALIBI;
    b.problem.scale = b.problem.softcap = b.problem.dropout_p = 0;
    b.problem.window_left = b.problem.window_right = -1;
    b.problem.head_offset = 0;
    b.problem.total_q = b.problem.total_k = 0;
    b.ragged = false;
    b.split = FATTN_SPLIT_STRIPED;
    problems[0] = problems[1] = &b;
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[0].status == FATTN_UNSUPPORTED && runs[2].status == FATTN_UNSUPPORTED,
              "ALiBi over striped rows: %s", runs[0].reason);
    free_ranks(runs, RANKS);
    problems[0] = problems[1] = problems[2] = &a;
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(!runs[0].status && !runs[1].status && !runs[2].status,
              "and the group is good for the next problem");
    free_ranks(runs, RANKS);
    threads_free(&all);
    divided_free(&a);
}

/* Problems that differ in the lengths of two sequences alone. */
static void check_lengths(void)
{
    divided a, b;
    threads all;
    rank_run runs[RANKS];
    int64_t index = 0;
    do {
        divided_draw(&a, 1, ++index, 1);
    } while (!a.ragged || a.problem.batch < 2 || a.cu_q[1] == 0 ||
             a.cu_q[2] - a.cu_q[1] >= a.problem.seqlen_q);
    divided_solve(&a, 1, index);
    b = a;
    b.cu_q[1]--;
    const divided *problems[RANKS] = {&a, &a, &b};
    threads_make(&all, RANKS);
    run_ranks(problems, &all, RANKS, 60, -1, runs);
    tap_check(runs[0].status == FATTN_RANKS_DISAGREE && runs[2].status == FATTN_RANKS_DISAGREE,
              "a rank with other lengths: %s", runs[0].reason);
    free_ranks(runs, RANKS);
    threads_free(&all);
    divided_free(&a);
}

static void check_silence(void)
{
    divided d;
    threads all;
    rank_run runs[RANKS];
    struct timespec begin, end;
    divided_draw(&d, 1, 1, 1);
    divided_solve(&d, 1, 1);
    const divided *problems[RANKS] = {&d, &d, &d};
    threads_make(&all, RANKS);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    run_ranks(problems, &all, RANKS, 0.2, 1, runs);
    clock_gettime(CLOCK_MONOTONIC, &end);
    bool named = end.tv_sec - begin.tv_sec < 10;
    for (int r = 0; r < RANKS; r += 2) { /* the first to lose patience tells the other */
        named = named && strstr(runs[r].reason, "rank 1 did not answer in 0.2 s") &&
                (runs[r].status == FATTN_RANK_TIMEOUT || runs[r].status == FATTN_RANK_LOST);
    }
    tap_check(named, "a rank that is silent: %s", runs[2].reason);
    free_ranks(runs, RANKS);
    threads_free(&all);
    divided_free(&d);
}

/* A transport whose n-th group of messages fails: its rank gives up there, and tells the others or
 * not. */
typedef struct faulty {
    fattn_transport real;
    int left;
    bool mute;
} faulty;

static fattn_status start_faulty(void *user, const fattn_message *messages, int count)
{
    faulty *const f = user;
    return f->left-- == 0 ? fattn_transport_fail(FATTN_RANK_LOST, "the test says so")
                          : f->real.start(f->real.user, messages, count);
}

static fattn_status wait_faulty(void *user, const fattn_message *messages, int count,
                                double seconds)
{
    faulty *const f = user;
    return f->real.wait(f->real.user, messages, count, seconds);
}

static void abort_faulty(void *user, const char *reason)
{
    faulty *const f = user;
    if (!f->mute) {
        f->real.abort(f->real.user, reason);
    }
}

typedef struct faulty_run {
    rank_run run;
    int left;
    bool mute;
} faulty_run;

static void *run_faulty(void *context)
{
    faulty_run *const r = context;
    faulty f = {threads_transport(r->run.all, r->run.rank), r->left, r->mute};
    fattn_transport transport = f.real;
    transport.user = &f, transport.start = start_faulty, transport.wait = wait_faulty;
    transport.abort = abort_faulty;
    r->run.status = divided_run(r->run.problem, &transport, r->run.timeout, &r->run.share);
    fattn_last_reason_copy(r->run.reason, sizeof r->run.reason);
    return NULL;
}

/* Rank 1 fails in its n-th group of messages. Whether it got through instead, or all had an error
 * that says what there is to say. */
typedef enum outcome { WRONG, THROUGH, FAILED } outcome;

static outcome run_failure(const divided *d, int n, bool mute)
{
    threads all;
    faulty_run runs[RANKS];
    threads_make(&all, RANKS);
    for (int r = 0; r < RANKS; r++) {
        runs[r] = (faulty_run){{.problem = d, .all = &all, .rank = r, .timeout = mute ? 0.1 : 30},
                               r == 1 ? n : -1,
                               mute && r == 1};
        if (pthread_create(&runs[r].run.thread, NULL, run_faulty, &runs[r])) {
            tap_bail("no thread");
        }
    }
    bool through = true, failed = true, named = false;
    for (int r = 0; r < RANKS; r++) {
        const rank_run *const run = &runs[r].run;
        pthread_join(run->thread, NULL);
        through = through && !run->status;
        failed = failed && (run->status == FATTN_RANK_LOST || run->status == FATTN_RANK_TIMEOUT);
        failed = failed &&
                 (mute || r == 1 || strcmp(run->reason, "rank 1 gave up: the test says so") == 0);
        named = named || strstr(run->reason, mute ? "did not answer" : "rank 1 gave up");
    }
    for (int r = 0; r < RANKS; r++) {
        divided_share_free(&runs[r].run.share);
    }
    threads_free(&all);
    return through ? THROUGH : failed && named ? FAILED : WRONG;
}

/* For every n until it gets through; in a brief run a rank is silent in every third. Without masks
 * every rank has messages with it in each group. */
static void check_failures(fattn_op op, fattn_scheme scheme, bool brief)
{
    divided d;
    int failures = 0;
    int64_t index = 0;
    do {
        divided_draw(&d, 3, ++index, RANKS);
    } while (d.problem.op != op || d.scheme != scheme || d.problem.seqlen_q < 20 ||
             d.problem.seqlen_k < 20 || d.problem.features & (FATTN_CAUSAL | FATTN_WINDOW));
    d.turns = 6;
    divided_solve(&d, 3, index);
    outcome last = FAILED;
    while (last == FAILED && failures < 40) {
        last = run_failure(&d, failures, false);
        failures += last == FAILED;
    }
    bool good = last == THROUGH && failures >= 3;
    for (int n = 0; good && n < failures; n += brief ? 3 : 1) {
        good = run_failure(&d, n, true) == FAILED;
    }
    tap_check(good,
              "%s, scheme %d: a rank failed in each of %d groups of messages, and said so or not",
              op == FATTN_FORWARD ? "forward" : "backward", (int)scheme, failures);
    divided_free(&d);
}

/* --- Time ------------------------------------------------------------------------------------- */

/* A transport that notes how long its rank computes beside each group of messages. */
typedef struct timed {
    fattn_transport real;
    int count;
    double started, beside[64];
} timed;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static fattn_status start_timed(void *user, const fattn_message *messages, int count)
{
    timed *const t = user;
    t->started = now();
    return t->real.start(t->real.user, messages, count);
}

static fattn_status wait_timed(void *user, const fattn_message *messages, int count, double seconds)
{
    timed *const t = user;
    t->beside[t->count++] = now() - t->started;
    return t->real.wait(t->real.user, messages, count, seconds);
}

static void abort_timed(void *user, const char *reason)
{
    timed *const t = user;
    t->real.abort(t->real.user, reason);
}

typedef struct timed_run {
    rank_run run;
    timed t;
} timed_run;

static void *run_timed(void *context)
{
    timed_run *const r = context;
    r->t.real = threads_transport(r->run.all, r->run.rank);
    fattn_transport transport = r->t.real;
    transport.user = &r->t, transport.start = start_timed, transport.wait = wait_timed;
    transport.abort = abort_timed;
    r->run.status = divided_run(r->run.problem, &transport, r->run.timeout, &r->run.share);
    return NULL;
}

/* In a zigzag ring's backward every group of messages has kernels beside it, also the last one,
 * which carries gradients home; in an exchange of heads all but the first one and the last. Before
 * them two groups compare plans. */
static void check_overlap(fattn_scheme scheme, int groups, int tokens)
{
    const bool ring = scheme == FATTN_SCHEME_RING;
    divided d = causal(FATTN_BACKWARD, ring ? 1 : 8, tokens);
    threads all;
    timed_run runs[2];
    d.scheme = scheme;
    d.turns = 4;
    const bool solved = !divided_solve(&d, 1, 1);
    threads_make(&all, 2);
    for (int r = 0; r < 2; r++) {
        runs[r] = (timed_run){.run = {.problem = &d, .all = &all, .rank = r, .timeout = 60}};
        if (pthread_create(&runs[r].run.thread, NULL, run_timed, &runs[r])) {
            tap_bail("no thread");
        }
    }
    bool good = solved;
    double least = 1;
    for (int r = 0; r < 2; r++) {
        pthread_join(runs[r].run.thread, NULL);
        const timed *const t = &runs[r].t;
        good = good && !runs[r].run.status && t->count == groups;
        for (int n = ring ? 2 : 3; good && n < t->count - !ring; n++) {
            least = t->beside[n] < least ? t->beside[n] : least;
        }
        divided_share_free(&runs[r].run.share);
    }
    tap_check(good && least > 1e-5,
              "scheme %d: kernels run beside messages in %d groups: %.3g ms at least", (int)scheme,
              groups, least * 1e3);
    threads_free(&all);
    divided_free(&d);
}

/* --- Arguments -------------------------------------------------------------------------------- */

static void check_arguments(void)
{
    threads all;
    threads_make(&all, 1);
    fattn_transport transport = threads_transport(&all, 0);
    fattn_group group;
    fattn_problem p;
    fattn_group_plan *plan = NULL;
    fattn_run run;
    fattn_group_init(&group);
    fattn_problem_init(&p);
    p.seqlen_q = p.seqlen_k = 8, p.dim = p.dim_v = 4;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_NULL_POINTER,
              "no transport: %s", fattn_last_reason());
    group.transport = &transport;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, NULL) == FATTN_NULL_POINTER,
              "no plan: %s", fattn_last_reason());
    group.timeout = 0;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_INVALID_ARGUMENT,
              "no time: %s", fattn_last_reason());
    group.timeout = 1;
    tap_check(fattn_group_plan_create(&group, NULL, NULL, NULL, &plan) == FATTN_NULL_POINTER,
              "no problem: %s", fattn_last_reason());
    group.split = (fattn_split)7;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_INVALID_ARGUMENT,
              "no such split: %s", fattn_last_reason());
    group.split = FATTN_SPLIT_STRIPED;
    group.scheme = (fattn_scheme)5;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_INVALID_ARGUMENT,
              "no scheme: %s", fattn_last_reason());
    group.scheme = FATTN_SCHEME_AUTO;
    group.bandwidth = -1;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_INVALID_ARGUMENT,
              "no speed: %s", fattn_last_reason());
    group.bandwidth = 0;
    group.scheme = FATTN_SCHEME_HEADS;
    tap_check(fattn_group_plan_create(&group, &p, NULL, NULL, &plan) == FATTN_UNSUPPORTED && !plan,
              "heads of one rank: %s", fattn_last_reason());
    group.scheme = FATTN_SCHEME_RING;
    p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.total_q = p.total_k = 8;
    static const int32_t cu[] = {0, 9};
    tap_check(fattn_group_plan_create(&group, &p, cu, cu, &plan) == FATTN_INVALID_DATA,
              "lengths beyond the problem: %s", fattn_last_reason());
    tap_check(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, 10, 4, 4, 0, &run) == FATTN_INVALID_ARGUMENT,
              "no such rank: %s", fattn_last_reason());
    tap_check(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, 10, 0, 0, 0, &run) ==
                      FATTN_INVALID_ARGUMENT &&
                  strstr(fattn_last_reason(), "ranks is 0, not in 1..65536"),
              "no ranks: %s", fattn_last_reason());
    tap_check(fattn_split_get_run((fattn_split)9, 10, 4, 0, 0, &run) == FATTN_INVALID_ARGUMENT &&
                  strstr(fattn_last_reason(), "split is 9"),
              "no split: %s", fattn_last_reason());
    p.features = 0, p.total_q = p.total_k = 0;
    fattn_buffers b;
    fattn_buffers_init(&b);
    tap_check(!fattn_group_plan_create(&group, &p, NULL, NULL, &plan) &&
                  fattn_group_plan_bytes(plan) > 0 &&
                  fattn_group_execute(plan, &b) == FATTN_NULL_POINTER,
              "no tensors: %s", fattn_last_reason());
    fattn_group_plan_destroy(plan);
    threads_free(&all);
}

int main(int argc, char **argv)
{
    const fattn_host_allocator counting = {sizeof counting, allocate, release, NULL};
    const int problems = argc > 1 ? atoi(argv[1]) : 200;
    const bool brief = problems < 16;
    if (device_absent(device_named())) {
        return 0;
    }
    tap_check(!fattn_set_host_allocator(&counting), "memory is counted");
    check_results(problems, argc > 2 ? (uint64_t)atoi(argv[2]) : 1);
    if (device_named()) { /* the rest is the same on any */
        fattn_cache_clear();
        return tap_done();
    }
    check_pieces(FATTN_FORWARD);
    check_pieces(FATTN_BACKWARD);
    check_choices();
    check_turns(FATTN_SCHEME_RING, brief ? problems / 2 : problems);
    check_turns(FATTN_SCHEME_HEADS, brief ? problems / 2 : problems);
    check_unusual_problems();
    check_broadcast();
    for (int split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        check_single_head(FATTN_FORWARD, (fattn_split)split, 4);
        check_single_head(FATTN_BACKWARD, (fattn_split)split, 3);
    }
    check_memory();
    check_disagreement();
    check_lengths();
    check_silence();
    check_failures(FATTN_FORWARD, FATTN_SCHEME_RING, brief);
    check_failures(FATTN_FORWARD, FATTN_SCHEME_HEADS, brief);
    check_failures(FATTN_FORWARD, FATTN_SCHEME_REDUCE, brief);
    check_failures(FATTN_BACKWARD, FATTN_SCHEME_RING, brief);
    check_failures(FATTN_BACKWARD, FATTN_SCHEME_HEADS, brief);
    check_overlap(FATTN_SCHEME_RING, 4, brief ? 256 : 512);
    check_overlap(FATTN_SCHEME_HEADS, 8, brief ? 128 : 512);
    check_arguments();
    fattn_cache_clear();
    return tap_done();
}
