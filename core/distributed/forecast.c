/* SPDX-License-Identifier: Apache-2.0 */
#include "core/distributed/forecast.h"

#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/status.h"

const char *const fattn_scheme_names[] = {"auto", "ring", "heads", "both", "reduce", NULL};

fattn_split fattn_split_choose(const fattn_problem *p)
{
    return p->window_right >= 0 && p->window_left < 0 ? FATTN_SPLIT_ZIGZAG : FATTN_SPLIT_CONTIGUOUS;
}

/* --- Sizes ------------------------------------------------------------------------------------ */

static double flops_of_pair(const fattn_problem *p)
{
    const double d = (double)p->dim, dv = (double)p->dim_v;
    return p->op == FATTN_FORWARD ? 2 * (d + dv) : 2 * (3 * d + 2 * dv);
}

/* Rows of a rank over the batch: rank 0 stands for all. */
static double rows_of(const fattn_whole *whole, int64_t (*length)(const fattn_whole *, int64_t))
{
    const int64_t kinds = fattn_whole_kinds(whole);
    double rows = 0;
    for (int64_t b = 0; b < kinds; b++) {
        rows += (double)fattn_split_rows(whole->split, length(whole, b), whole->ranks, 0);
    }
    return kinds == 1 ? rows * (double)whole->problem->batch : rows;
}

/* Keys, or queries, of one run of a rank, over the batch. */
static double rows_of_run(const fattn_whole *whole, fattn_side side, int64_t rank, int run)
{
    const int64_t kinds = fattn_whole_kinds(whole);
    double rows = 0;
    for (int64_t b = 0; b < kinds; b++) {
        rows += (double)fattn_whole_run(whole, side, b, rank, run).count;
    }
    return kinds == 1 ? rows * (double)whole->problem->batch : rows;
}

/* Bytes of a key and its value in all heads, with k_size and v_size bytes per element. */
static double bytes_of_key(const fattn_problem *p, int64_t k_size, int64_t v_size)
{
    return (double)p->heads_k * (double)(p->dim * k_size + p->dim_v * v_size);
}

static double bytes_of_inputs(const fattn_problem *p)
{
    return bytes_of_key(p, fattn_dtype_size(p->dtype_kv), fattn_dtype_size(p->dtype_v));
}

/* The same for the gradients that are wanted, in f32. */
static double bytes_of_sums(const fattn_problem *p)
{
    return bytes_of_key(p, p->outputs & FATTN_OUT_DK ? 4 : 0, p->outputs & FATTN_OUT_DV ? 4 : 0);
}

/* --- The ring --------------------------------------------------------------------------------- */

/* A rank on its way through the steps. */
typedef struct walker {
    double start, end; /* of the step */
    double computing, transferring, pairs, sent;
    double last_work;        /* seconds of computing in the last step that has blocks */
    double keys[FATTN_RUNS]; /* of its own, by runs */
} walker;

/* Adds what a rank does in a step, and computes when the step ends from when it starts on each
 * rank. */
static void walk(const fattn_whole *whole, const fattn_ring *ring, const fattn_speed *speed,
                 int64_t rank, int64_t step, walker *walkers)
{
    const fattn_problem *const p = whole->problem;
    const double size = bytes_of_inputs(p), sum_size = bytes_of_sums(p);
    walker *const w = &walkers[rank];
    double begin = w->start, in = 0, out = 0, pairs = 0, rows = 0;
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        const fattn_ring_messages m = fattn_ring_step(ring, lane, rank, step);
        const int64_t owner = fattn_ring_owner(ring, lane, rank, step);
        const int64_t held = step == 0 ? rank : owner;
        const struct {
            int64_t peer, owner;
            double size, *into;
            int64_t hops;
        } messages[] = {
            {m.send_to, held, size, &out, step + 1},
            {m.receive_from, fattn_ring_owner(ring, lane, rank, step + 1), size, &in, step + 1},
            {m.gradient_to, fattn_ring_owner(ring, lane, rank, step - 1), sum_size, &out, step - 1},
            {m.gradient_from, owner, sum_size, &in, step - 1},
            {m.home_from, rank, sum_size, &in, ring->reach[lane][rank]},
        };
        for (size_t n = 0; n < sizeof messages / sizeof messages[0]; n++) {
            const int64_t of = messages[n].owner;
            if (messages[n].peer >= 0 && messages[n].size > 0) {
                const unsigned runs =
                    (n < 2 ? fattn_ring_keys : fattn_ring_sums)(ring, lane, of, messages[n].hops);
                for (int run = 0; run < FATTN_RUNS; run++) {
                    *messages[n].into +=
                        runs >> run & 1 ? walkers[of].keys[run] * messages[n].size : 0;
                }
                begin = walkers[messages[n].peer].start > begin ? walkers[messages[n].peer].start
                                                                : begin;
            }
        }
        for (int n = 0, runs = fattn_whole_q_runs(whole); n < runs; n++) {
            const int64_t of = fattn_ring_work(ring, lane, rank, step, n, runs, sum_size > 0);
            const double own = of >= 0 ? fattn_whole_run_pairs(whole, rank, n, of) : 0;
            pairs += own * (double)p->heads_q;
            rows += own > 0 && of != rank ? rows_of_run(whole, FATTN_QUERIES, rank, n) : 0;
        }
    }
    const double most = in > out ? in : out;
    const double transfer = most > 0 ? speed->latency + most / speed->bandwidth : 0;
    const double work = pairs * flops_of_pair(p) / speed->flops + rows * speed->row;
    const double worked = w->start + work, moved = begin + transfer;
    w->end = most > 0 && moved > worked ? moved : worked;
    w->computing += work;
    w->last_work = step == ring->last_step ? work : w->last_work;
    w->transferring += transfer;
    w->pairs += pairs;
    w->sent += out;
}

static void take_walker(fattn_forecast *f, const walker *w)
{
    f->least_pairs = w->pairs < f->least_pairs ? w->pairs : f->least_pairs;
    f->most_pairs = w->pairs > f->most_pairs ? w->pairs : f->most_pairs;
    f->least_bytes = w->sent < f->least_bytes ? w->sent : f->least_bytes;
    f->most_bytes = w->sent > f->most_bytes ? w->sent : f->most_bytes;
    f->computing = w->computing > f->computing ? w->computing : f->computing;
    f->transferring = w->transferring > f->transferring ? w->transferring : f->transferring;
    f->seconds = w->end > f->seconds ? w->end : f->seconds;
}

/* What fits into the last computing step of a turn's ring: the seconds that the rank with the least
 * work computes, and the number of peers whose messages fit into that step's group. */
typedef struct room {
    double seconds, peers;
} room;

static fattn_status foretell_ring(const fattn_whole *whole, const fattn_speed *speed,
                                  fattn_forecast *f, room *found)
{
    fattn_ring ring;
    fattn_status status = fattn_ring_make(whole, &ring);
    if (status) {
        return status;
    }
    const size_t bytes = (size_t)whole->ranks * sizeof(walker);
    walker *const walkers = fattn_memory_alloc(bytes);
    if (!walkers) {
        fattn_ring_free(&ring);
        return fattn_fail_memory((int64_t)bytes, "a forecast");
    }
    memset(walkers, 0, bytes);
    for (int64_t r = 0; r < whole->ranks; r++) {
        for (int n = 0; n < fattn_split_runs(whole->split); n++) {
            walkers[r].keys[n] = rows_of_run(whole, FATTN_KEYS, r, n);
        }
    }
    const bool gradients = fattn_split_has_sums(whole->problem);
    const int64_t rounds = ring.last_step + (gradients ? 2 : 1);
    for (int64_t step = 0; step < rounds; step++) {
        for (int64_t r = 0; r < whole->ranks; r++) {
            walk(whole, &ring, speed, r, step, walkers);
        }
        for (int64_t r = 0; r < whole->ranks; r++) {
            walkers[r].start = walkers[r].end;
        }
    }
    f->steps = ring.last_step + 1;
    f->least_pairs = f->least_bytes = INFINITY;
    *found = (room){walkers[0].last_work, fattn_ring_room(&ring, gradients) / 2};
    for (int64_t r = 0; r < whole->ranks; r++) {
        const double work = walkers[r].last_work;
        take_walker(f, &walkers[r]);
        found->seconds = work < found->seconds ? work : found->seconds;
    }
    fattn_memory_free(walkers);
    fattn_ring_free(&ring);
    return FATTN_OK;
}

/* --- Heads, alone or within a ring ------------------------------------------------------------ */

/* The most ranks that can share the heads: a divisor of the ranks and of the key/value heads, and
 * at most `limit`. */
static int64_t head_ranks(const fattn_whole *whole, int64_t limit)
{
    int64_t most = 1;
    for (int64_t n = 2; n <= limit && n <= whole->problem->heads_k; n++) {
        if (whole->ranks % n == 0 && whole->problem->heads_k % n == 0) {
            most = n;
        }
    }
    return most;
}

/* Bytes of a rank's rows of q and of o, over the batch, in all heads. */
static double bytes_of_q(const fattn_whole *whole)
{
    const fattn_problem *const p = whole->problem;
    return rows_of(whole, fattn_whole_q) *
           (double)(p->heads_q * p->dim * fattn_dtype_size(p->dtype));
}

static double bytes_of_o(const fattn_whole *whole)
{
    const fattn_problem *const p = whole->problem;
    return rows_of(whole, fattn_whole_q) *
           (double)(p->heads_q * p->dim_v * fattn_dtype_size(p->dtype_o));
}

/* The same for lse. */
static double bytes_of_lse(const fattn_whole *whole)
{
    return rows_of(whole, fattn_whole_q) * (double)whole->problem->heads_q * 4;
}

/* Bytes of inputs that a rank would exchange for its rows if it kept none; and of results. */
static double exchanged_inputs(const fattn_whole *whole)
{
    const fattn_problem *const p = whole->problem;
    const double keys = rows_of(whole, fattn_whole_k), lse = bytes_of_lse(whole);
    const double dlse = p->features & FATTN_DLSE ? lse : 0;
    if (whole->saves && p->op == FATTN_BACKWARD) {
        return bytes_of_o(whole) + dlse; /* dout and dlse */
    }
    return bytes_of_q(whole) + keys * bytes_of_inputs(p) +
           (p->op == FATTN_BACKWARD ? 2 * bytes_of_o(whole) + lse + dlse : 0);
}

static double exchanged_results(const fattn_whole *whole)
{
    const fattn_problem *const p = whole->problem;
    const int64_t k_size = fattn_dtype_size(p->dtype_kv), v_size = fattn_dtype_size(p->dtype_v);
    const uint32_t outputs = p->outputs;
    return (outputs & FATTN_OUT_O ? bytes_of_o(whole) : 0) +
           (outputs & FATTN_OUT_LSE ? bytes_of_lse(whole) : 0) +
           (outputs & FATTN_OUT_DQ ? bytes_of_q(whole) : 0) +
           rows_of(whole, fattn_whole_k) * bytes_of_key(p, outputs & FATTN_OUT_DK ? k_size : 0,
                                                        outputs & FATTN_OUT_DV ? v_size : 0);
}

bool fattn_scheme_can_turn(fattn_scheme scheme, int64_t heads_q, int64_t heads_k, int64_t turns)
{
    if (turns == 1 || heads_k == 0 || heads_k % turns == 0) {
        return true;
    }
    return scheme != FATTN_SCHEME_BOTH && turns % heads_k == 0 &&
           heads_q / heads_k % (turns / heads_k) == 0;
}

/* Seconds that one rank would need for the undivided problem. */
static double seconds_alone(const fattn_whole *whole, const fattn_speed *speed)
{
    fattn_whole one = *whole;
    one.split = FATTN_SPLIT_CONTIGUOUS;
    one.ranks = 1;
    return fattn_whole_pairs(&one, 0, 0) * (double)whole->problem->heads_q *
           flops_of_pair(whole->problem) / speed->flops;
}

/* How many tiles a GPU divides a problem into, over all heads. A tile has 128 rows of queries, in
 * backward of keys. Under a causal mask the largest has twice the work of the mean. The last tile
 * of a sequence is half full on average. */
static double tiles_of(const fattn_problem *p)
{
    const bool keys = p->op == FATTN_BACKWARD, ragged = p->features & FATTN_CU_SEQLENS_Q;
    const int64_t q = ragged ? p->total_q + 64 * p->batch : p->batch * p->seqlen_q;
    const int64_t k = ragged ? p->total_k + 64 * p->batch : p->batch * p->seqlen_k;
    return (double)(keys ? k * p->heads_k : q * p->heads_q) / 128;
}

/* How many turns pay if a rank exchanges `bytes` with the other `members` - 1. Nothing hides the
 * first exchange and the last one: the more turns there are, the shorter these two. But kernels run
 * slower while transfers do, and at the end of a turn multiprocessors are idle. So there are no
 * more turns than it takes to make these two exchanges about a hundredth of computing
 * (docs/notes/distributed.md). There are at least two; or, if forward saves what it exchanges, one
 * if that suffices, else at least four. But a turn exchanges at least 1 MiB, computes for at least
 * twice the latency of a message, and has work for all multiprocessors. */
static int64_t turns_that_pay(const fattn_whole *whole, const fattn_speed *speed, double bytes,
                              int64_t members)
{
    enum { MOST = 8, LEAST = 1 << 20 };
    const double share = (double)(members - 1) / (double)members;
    const double transfer = bytes * share / speed->bandwidth;
    const double computing = seconds_alone(whole, speed) / (double)whole->ranks;
    const double turns = computing > 0 ? ceil(transfer / (0.011 * computing)) : MOST;
    const double fewest = !whole->saves ? 2 : turns <= 1 ? 1 : 4;
    double most = fmin(fmin(MOST, bytes / LEAST), computing / (2 * speed->latency));
    if (speed->units > 0) {
        most = fmin(most, tiles_of(whole->problem) / (double)whole->ranks / (2 * speed->units));
    }
    return (int64_t)fmin(fmax(turns, fewest), most);
}

/* Only FATTN_SCHEME_HEADS saves rows. */
static fattn_whole whole_in(const fattn_whole *whole, fattn_scheme scheme)
{
    fattn_whole in = *whole;
    in.saves = whole->saves && scheme == FATTN_SCHEME_HEADS;
    return in;
}

fattn_whole fattn_whole_to_choose_by(const fattn_whole *whole, fattn_problem *problem)
{
    fattn_whole by = *whole;
    if (whole->saves) {
        *problem = *whole->problem;
        problem->op = FATTN_BACKWARD;
        problem->outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        problem->features &= ~FATTN_DLSE;
        by.problem = problem;
    }
    return by;
}

int64_t fattn_scheme_turns(const fattn_whole *given, fattn_scheme scheme, const fattn_speed *speed,
                           int64_t wanted)
{
    fattn_problem problem;
    const fattn_whole in = whole_in(given, scheme);
    const fattn_whole by = fattn_whole_to_choose_by(&in, &problem), *const whole = &by;
    const int64_t members =
        fattn_scheme_declines(whole, scheme) ? 1 : fattn_scheme_members(whole, scheme);
    const fattn_problem *const p = whole->problem;
    const int64_t heads_q = p->heads_q / members, heads_k = p->heads_k / members;
    if (members == 1) {
        return 1;
    }
    if (wanted == 0) {
        const double bytes = exchanged_inputs(whole) + exchanged_results(whole);
        wanted = turns_that_pay(whole, speed, bytes, members);
        /* Gradients of a key that several turns share would be summed in f32. */
        wanted = fattn_split_has_sums(p) ? fattn_min64(wanted, heads_k) : wanted;
    }
    int64_t turns = fattn_max64(1, fattn_min64(wanted, heads_q));
    while (!fattn_scheme_can_turn(scheme, heads_q, heads_k, turns)) {
        turns--;
    }
    return turns;
}

/* The inputs of the first turn and the results of the last one travel while nothing is computed.
 * All others travel during the last computing step of a turn's ring, as far as its group of
 * messages has room. */
static fattn_status foretell_heads(const fattn_whole *whole, fattn_scheme scheme,
                                   const fattn_speed *speed, fattn_forecast *f)
{
    const int64_t share = fattn_scheme_members(whole, scheme);
    const int64_t turns = fattn_scheme_turns(whole, scheme, speed, 0);
    fattn_problem part = *whole->problem;
    part.heads_q /= share * turns;
    part.heads_k = fattn_max64(1, part.heads_k / (share * turns));
    fattn_whole group = *whole;
    group.problem = &part;
    group.ranks = whole->ranks / share;
    fattn_speed own = *speed;
    own.row /= (double)(share * turns); /* of its heads */
    room found;
    const fattn_status status = foretell_ring(&group, &own, f, &found);
    if (status) {
        return status;
    }
    const double gone = (double)(share - 1) / (double)share / (double)turns;
    const double in = exchanged_inputs(whole) * gone;
    const double out = exchanged_results(whole) * gone;
    const double first = speed->latency + in / speed->bandwidth;
    const double last = speed->latency + out / speed->bandwidth;
    const double others = (double)(share - 1);
    const double fits = found.peers < others ? found.peers / others : 1;
    double seconds = first + last, transferring = first + last;
    for (int64_t turn = 0; turn < turns; turn++) {
        const double bytes = (turn + 1 < turns ? in : 0) + (turn > 0 ? out : 0);
        const double transfer = bytes > 0 ? speed->latency + bytes / speed->bandwidth : 0;
        const double waits = transfer * fits - found.seconds;
        seconds += f->seconds + (waits > 0 ? waits : 0) + transfer * (1 - fits);
        transferring += transfer;
    }
    f->head_ranks = share;
    f->turns = turns;
    f->least_pairs *= (double)turns;
    f->most_pairs *= (double)turns;
    f->least_bytes = f->least_bytes * (double)turns + (in + out) * (double)turns;
    f->most_bytes = f->most_bytes * (double)turns + (in + out) * (double)turns;
    f->computing *= (double)turns;
    f->transferring = f->transferring * (double)turns + transferring;
    f->seconds = seconds;
    return FATTN_OK;
}

/* --- One reduction ---------------------------------------------------------------------------- */

static void foretell_reduction(const fattn_whole *whole, const fattn_speed *speed,
                               fattn_forecast *f)
{
    const fattn_problem *const p = whole->problem;
    int64_t rounds = 0;
    for (int64_t n = 1; n < whole->ranks; n *= 2) {
        rounds++;
    }
    f->steps = rounds;
    f->least_pairs = INFINITY;
    for (int64_t owner = 0; owner < whole->ranks; owner++) {
        double pairs = 0;
        for (int64_t rank = 0; rank < whole->ranks; rank++) {
            pairs += fattn_whole_pairs(whole, rank, owner) * (double)p->heads_q;
        }
        f->least_pairs = pairs < f->least_pairs ? pairs : f->least_pairs;
        f->most_pairs = pairs > f->most_pairs ? pairs : f->most_pairs;
    }
    const double rows = (double)(whole->cu_q ? p->total_q : p->batch * p->seqlen_q);
    const double bytes = rows * (double)p->heads_q * (double)(p->dim_v + 1) * 4;
    f->least_bytes = f->most_bytes = bytes * (double)rounds;
    f->computing =
        f->most_pairs * flops_of_pair(p) / speed->flops + rows * speed->row * (double)rounds;
    f->transferring = (speed->latency + bytes / speed->bandwidth) * (double)rounds;
    f->seconds = f->computing + f->transferring;
}

/* --- Choosing --------------------------------------------------------------------------------- */

const char *fattn_scheme_declines(const fattn_whole *whole, fattn_scheme scheme)
{
    const int64_t most = head_ranks(whole, whole->ranks);
    const int64_t some = head_ranks(whole, whole->ranks - 1);
    if (scheme == FATTN_SCHEME_HEADS && (whole->ranks == 1 || most < whole->ranks)) {
        return "takes 2 ranks or more, whose number divides that of the key/value heads";
    }
    if (scheme == FATTN_SCHEME_BOTH && some == 1) {
        return "takes a number of ranks that has a divisor in common with the key/value heads, "
               "besides 1 and itself";
    }
    if (scheme == FATTN_SCHEME_REDUCE && whole->problem->op != FATTN_FORWARD) {
        return "is forward only";
    }
    return NULL;
}

int64_t fattn_scheme_members(const fattn_whole *whole, fattn_scheme scheme)
{
    return scheme == FATTN_SCHEME_HEADS  ? whole->ranks
           : scheme == FATTN_SCHEME_BOTH ? head_ranks(whole, whole->ranks - 1)
                                         : 1;
}

static fattn_status foretell(const fattn_whole *given, fattn_scheme scheme,
                             const fattn_speed *speed, fattn_forecast *f)
{
    const fattn_whole in = whole_in(given, scheme), *const whole = &in;
    const char *const why = fattn_scheme_declines(whole, scheme);
    if (why) {
        return fattn_fail(FATTN_UNSUPPORTED, "scheme \"%s\" %s", fattn_scheme_names[scheme], why);
    }
    room found;
    *f = (fattn_forecast){.scheme = scheme, .head_ranks = 1, .turns = 1};
    fattn_status status = FATTN_OK;
    switch (scheme) {
    case FATTN_SCHEME_HEADS:
    case FATTN_SCHEME_BOTH: status = foretell_heads(whole, scheme, speed, f); break;
    case FATTN_SCHEME_REDUCE: foretell_reduction(whole, speed, f); break;
    default: {
        fattn_whole ring = *whole;
        fattn_whole_set_halves(&ring);
        status = foretell_ring(&ring, speed, f, &found);
    }
    }
    const double both = (double)whole->ranks * f->seconds;
    f->efficiency = f->seconds > 0 ? seconds_alone(whole, speed) / both : 1;
    return status;
}

bool fattn_scheme_reduces(fattn_op op, int64_t queries, int64_t ranks)
{
    return op == FATTN_FORWARD && queries < ranks;
}

/* Whether FATTN_SCHEME_AUTO may choose a scheme. */
static bool offered(const fattn_whole *whole, fattn_scheme scheme)
{
    const fattn_problem *const p = whole->problem;
    return !fattn_scheme_declines(whole, scheme) &&
           (scheme == FATTN_SCHEME_REDUCE) ==
               fattn_scheme_reduces(p->op, p->seqlen_q, whole->ranks);
}

fattn_status fattn_forecast_make(const fattn_whole *whole, fattn_scheme scheme,
                                 const fattn_speed *speed, fattn_forecast *forecast)
{
    fattn_problem problem;
    const fattn_whole by = fattn_whole_to_choose_by(whole, &problem);
    fattn_scheme best = scheme;
    double least = INFINITY;
    for (fattn_scheme s = FATTN_SCHEME_RING; !scheme && s <= FATTN_SCHEME_REDUCE; s++) {
        fattn_forecast f;
        if (!offered(whole, s)) {
            continue;
        }
        const fattn_status status = foretell(s == FATTN_SCHEME_REDUCE ? whole : &by, s, speed, &f);
        if (status) {
            return status;
        }
        if (best == FATTN_SCHEME_AUTO || f.seconds < least) {
            best = s;
            least = f.seconds;
        }
    }
    return foretell(whole, best, speed, forecast);
}
