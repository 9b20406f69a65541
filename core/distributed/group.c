/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions of groups and their plans. To make a plan, a rank checks its arguments, the
 * ranks compare what they were given, and everything that an execution needs is planned and
 * allocated. */
#include "core/distributed/group.h"

#include <string.h>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/hash.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/status.h"

void fattn_transport_init(fattn_transport *transport)
{
    memset(transport, 0, sizeof *transport);
    transport->struct_size = sizeof *transport;
}

fattn_status fattn_transport_fail(fattn_status status, const char *reason)
{
    return fattn_fail(status, "%s", reason ? reason : "a transport failed");
}

static const double usual_timeout = 60;

void fattn_group_init(fattn_group *group)
{
    memset(group, 0, sizeof *group);
    group->struct_size = sizeof *group;
    group->split = FATTN_SPLIT_CONTIGUOUS;
    group->scheme = FATTN_SCHEME_RING;
    group->timeout = usual_timeout;
}

/* --- Checks ----------------------------------------------------------------------------------- */

/* Reads the group and its transport. If this fails, the other ranks cannot be told. */
static fattn_status read_group(const fattn_group *group, fattn_group *g, fattn_transport *t)
{
    fattn_status status = fattn_abi_read(g, sizeof *g, group, "fattn_group");
    if (!status && !g->transport) {
        status = fattn_fail(FATTN_NULL_POINTER, "transport of fattn_group is NULL");
    }
    status = status ? status : fattn_abi_read(t, sizeof *t, g->transport, "fattn_transport");
    if (status) {
        return status;
    }
    if (!t->start || !t->wait || !t->abort) {
        return fattn_fail(FATTN_NULL_POINTER, "%s of fattn_transport is NULL",
                          !t->start  ? "start"
                          : !t->wait ? "wait"
                                     : "abort");
    }
    if (t->ranks < 1 || t->ranks > FATTN_RANKS_MAX || t->rank < 0 || t->rank >= t->ranks) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "fattn_transport has rank %d of %d", t->rank,
                          t->ranks);
    }
    return FATTN_OK;
}

static fattn_status check_choices(const fattn_group *g, const fattn_transport *t)
{
    if (!fattn_split_runs(g->split)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "split is %d, no fattn_split", (int)g->split);
    }
    if (g->scheme < FATTN_SCHEME_AUTO || g->scheme > FATTN_SCHEME_REDUCE) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "scheme is %d, no fattn_scheme", (int)g->scheme);
    }
    if (!t->device_memory && t->stream) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "stream of fattn_transport is set, but "
                                                  "device_memory is not");
    }
    if (g->turns < 0) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "turns is %lld, below 0", (long long)g->turns);
    }
    if (g->memory < 0) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "memory is %lld, below 0", (long long)g->memory);
    }
    if (g->saves != 0 && g->saves != 1) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "saves is %d, neither 0 nor 1", (int)g->saves);
    }
    if (g->saves && g->memory > 0) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "saves and memory are set: with a limit of memory, forward and backward "
                          "may take different numbers of turns");
    }
    if (!(g->timeout > 0)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "timeout is %g, not above 0", g->timeout);
    }
    return fattn_group_check_speed(g);
}

static fattn_status check_features(const fattn_problem *p)
{
    const uint64_t packed = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    const char *why = NULL;
    if (p->features & ~FATTN_GROUP_FEATURES) {
        why = "groups do not support block masks, seqused, seqstart, pages, positions, chunks, "
              "descales, accumulation, batch invariance and FATTN_CHECKED";
    } else if (p->dtype == FATTN_F64 || p->dtype_kv == FATTN_E4M3 || p->dtype_v == FATTN_E4M3) {
        why = "groups do not support f64 and e4m3";
    } else if (p->features & packed && (p->features & packed) != packed) {
        why = "groups support a ragged batch only with both cu_seqlens";
    }
    return why ? fattn_fail(FATTN_UNSUPPORTED, "%s", why) : FATTN_OK;
}

static fattn_status check_lengths(const fattn_problem *p, const int32_t *cu_q, const int32_t *cu_k)
{
    if (!cu_q || !cu_k) {
        return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", cu_q ? "cu_seqlens_k" : "cu_seqlens_q");
    }
    const fattn_status status =
        fattn_cu_seqlens_check("cu_seqlens_q", cu_q, p->batch, p->total_q, p->seqlen_q);
    return status ? status
                  : fattn_cu_seqlens_check("cu_seqlens_k", cu_k, p->batch, p->total_k, p->seqlen_k);
}

/* --- Agreement -------------------------------------------------------------------------------- */

void fattn_group_add_message(fattn_message *messages, int *count, int64_t peer, int tag,
                             fattn_direction direction, void *data, int64_t bytes)
{
    if (bytes > 0) {
        messages[(*count)++] = (fattn_message){(int32_t)peer, tag, direction, 0, data, bytes, NULL};
    }
}

fattn_status fattn_group_carry(const fattn_group_plan *plan, const fattn_message *messages,
                               int count)
{
    const fattn_transport *const t = &plan->transport;
    fattn_status status = count ? t->start(t->user, messages, count) : FATTN_OK;
    return status || !count ? status : t->wait(t->user, messages, count, plan->timeout);
}

fattn_status fattn_group_gather(const fattn_group_plan *plan, void *all, int64_t bytes)
{
    const int32_t rank = plan->transport.rank, ranks = plan->transport.ranks;
    fattn_status status = FATTN_OK;
    for (int32_t d = 1; !status && d < ranks;) {
        fattn_message messages[FATTN_MESSAGES_MAX] = {{0}}; /* gcc 14 warns otherwise */
        int count = 0;
        for (; count + 2 <= FATTN_MESSAGES_MAX && d < ranks; d++) {
            const int32_t to = (rank + d) % ranks, from = (rank - d + ranks) % ranks;
            fattn_group_add_message(messages, &count, to, FATTN_TAG_GATHER, FATTN_SEND,
                                    (char *)all + rank * bytes, bytes);
            fattn_group_add_message(messages, &count, from, FATTN_TAG_GATHER, FATTN_RECEIVE,
                                    (char *)all + from * bytes, bytes);
        }
        status = fattn_group_carry(plan, messages, count);
    }
    return status;
}

static uint64_t hash(uint64_t seed, const void *data, size_t bytes)
{
    const unsigned char *const byte = data;
    for (size_t n = 0; n < bytes; n++) {
        seed = fattn_hash_step(seed, byte[n]);
    }
    return seed;
}

/* The hash of everything in which ranks must agree. */
static uint64_t hash_of(const fattn_group_plan *plan)
{
    fattn_problem p = plan->problem;
    p.pointer_alignment = 0;
    p.bias_stride[2] = p.mask_stride[2] = 0; /* rows are the rank's own, broadcast or not */
    const int64_t more[] = {plan->shares.split, plan->shares.ranks, plan->scheme,
                            plan->memory > 0,   plan->wanted,       plan->shares.saves};
    const size_t lengths = (size_t)(p.batch + 1) * sizeof(int32_t);
    uint64_t h = hash(FATTN_HASH_BEGIN, &p, sizeof p);
    h = hash(h, more, sizeof more);
    if (plan->ragged) {
        h = hash(h, plan->shares.cu_q, lengths);
        h = hash(h, plan->shares.cu_k, lengths);
    }
    return h;
}

/* What a rank sends when ranks compare: a small message, because it is freed after errors of the
 * transport (fattn_transport.wait). Lengths are separate from the hash so that the reason can name
 * them: they are what usually differs. */
typedef struct answer {
    uint64_t what, status, span_rule;
    int64_t seqlen_q, seqlen_k;
} answer;
_Static_assert(sizeof(answer) <= FATTN_MESSAGE_SMALL, "an answer is a small message");

/* An all-gather of host memory through device memory. */
static fattn_status gather_through(const fattn_group_plan *plan, void *there, void *all,
                                   int64_t bytes)
{
    const fattn_transport *const t = &plan->transport;
    const size_t size = (size_t)(bytes * t->ranks);
    fattn_status status = fattn_device_copy(plan->device, there, all, size, t->stream);
    status = status ? status : fattn_group_gather(plan, there, bytes);
    status = status ? status : fattn_device_copy(plan->device, all, there, size, t->stream);
    return status ? status : fattn_stream_synchronize(plan->device, t->stream);
}

/* An all-gather of host memory, in the memory that the transport carries. Tells all ranks of an
 * error. */
static fattn_status compare(const fattn_group_plan *plan, void *all, int64_t bytes)
{
    const fattn_transport *const t = &plan->transport;
    const fattn_status status = t->device_memory ? gather_through(plan, plan->answers, all, bytes)
                                                 : fattn_group_gather(plan, all, bytes);
    if (status) {
        t->abort(t->user, fattn_last_reason());
    }
    return status;
}

/* The largest of the ranks' numbers, none of which is negative. */
static fattn_status most_of_ranks(const fattn_group_plan *plan, int64_t own, int64_t *most)
{
    const int32_t ranks = plan->transport.ranks;
    int64_t *const all = fattn_memory_alloc((size_t)ranks * sizeof *all);
    *most = 0;
    if (!all) {
        plan->transport.abort(plan->transport.user, "no memory to compare plans");
        return fattn_fail_memory(ranks * (int64_t)sizeof *all, "a group");
    }
    all[plan->transport.rank] = own;
    const fattn_status status = compare(plan, all, sizeof *all);
    for (int32_t r = 0; !status && r < ranks; r++) {
        *most = fattn_max64(*most, all[r]);
    }
    fattn_memory_free(all);
    return status;
}

/* In device memory the number of turns depends on whether transports take spans. Some GPUs of a
 * process may be in reach of each other, and others not: then none takes them. */
static fattn_status agree_on_spans(fattn_group_plan *plan, const fattn_group *g)
{
    fattn_transport *const t = &plan->transport;
    int64_t without = 0;
    const fattn_status status = most_of_ranks(plan, !t->spans, &without);
    t->spans = t->spans && !without;
    plan->speed = fattn_group_speed(g, t);
    return status;
}

static fattn_status fail_disagreement(const answer *all, int32_t other, int32_t own)
{
    const answer *const a = &all[other], *const b = &all[own];
    const bool queries = a->seqlen_q != b->seqlen_q;
    if (!queries && a->seqlen_k == b->seqlen_k) {
        return fattn_fail(FATTN_RANKS_DISAGREE, "rank %d describes another problem than rank %d",
                          other, own);
    }
    return fattn_fail(FATTN_RANKS_DISAGREE,
                      "rank %d describes another problem than rank %d: %s is %lld, not %lld", other,
                      own, queries ? "seqlen_q" : "seqlen_k",
                      (long long)(queries ? a->seqlen_q : a->seqlen_k),
                      (long long)(queries ? b->seqlen_q : b->seqlen_k));
}

/* Fails on all ranks if one of them has failed or was given another problem. A rank that failed
 * itself keeps its own reason. Ranks also agree on the spans that all of them can send. */
static fattn_status agree(fattn_group_plan *plan, fattn_status own, uint64_t what)
{
    const int32_t ranks = plan->transport.ranks, rank = plan->transport.rank;
    answer *const all = fattn_memory_alloc((size_t)ranks * sizeof *all);
    if (!all) {
        plan->transport.abort(plan->transport.user, "no memory to compare problems");
        return own ? own : fattn_fail_memory((int64_t)ranks * (int64_t)sizeof *all, "a group");
    }
    all[rank] =
        (answer){what, own, plan->span_rule, plan->problem.seqlen_q, plan->problem.seqlen_k};
    fattn_reason_hold(own);
    fattn_status status = compare(plan, all, sizeof *all);
    for (int32_t r = 0; !status && !own && r < ranks; r++) {
        if (all[r].status) {
            status = fattn_fail(FATTN_RANK_LOST, "rank %d cannot plan: %s", r,
                                fattn_status_string((fattn_status)all[r].status));
        } else if (all[r].what != what) {
            status = fail_disagreement(all, r, rank);
        }
        if (all[r].span_rule < (uint64_t)plan->span_rule) {
            plan->span_rule = (fattn_span_rule)all[r].span_rule;
        }
    }
    fattn_reason_let();
    fattn_memory_free(all);
    return own ? own : status;
}

/* --- Shares ----------------------------------------------------------------------------------- */

/* Counts the rows of the ranks in all sequences, which tells the size of their messages. */
static void count_rows(const fattn_group_plan *plan, fattn_side side)
{
    int64_t *const before = plan->rows_before[side];
    before[0] = 0;
    for (int64_t rank = 0; rank < plan->shares.ranks; rank++) {
        before[rank + 1] = before[rank];
        for (int64_t b = 0; b < plan->problem.batch; b++) {
            before[rank + 1] += fattn_whole_rows(&plan->shares, side, b, rank);
        }
    }
}

/* Computes where this rank's shares begin in packed tensors. */
static void begin_shares(const fattn_group_plan *plan)
{
    const fattn_whole *const w = &plan->shares;
    if (plan->members > 1) {
        count_rows(plan, FATTN_QUERIES);
        count_rows(plan, FATTN_KEYS);
    }
    plan->local_q[0] = plan->local_k[0] = 0;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        const int64_t q = fattn_whole_rows(w, FATTN_QUERIES, b, plan->transport.rank);
        const int64_t k = fattn_whole_rows(w, FATTN_KEYS, b, plan->transport.rank);
        plan->local_q[b + 1] = plan->local_q[b] + (int32_t)q;
        plan->local_k[b + 1] = plan->local_k[b] + (int32_t)k;
    }
}

/* Allocates the arrays of a ragged batch, with copies of the lengths, as one block. */
static fattn_status make_arrays(fattn_group_plan *plan, const int32_t *cu_q, const int32_t *cu_k)
{
    const int64_t n = plan->problem.batch + 1, ranks = plan->shares.ranks + 1;
    const int64_t bytes = n * (int64_t)(4 * sizeof(int64_t) + 6 * sizeof(int32_t)) +
                          2 * ranks * (int64_t)sizeof(int64_t);
    int64_t *const longs = fattn_memory_alloc((size_t)bytes);
    if (!longs) {
        return fattn_fail_memory(bytes, "lengths");
    }
    int32_t *const ints = (int32_t *)(longs + 4 * n + 2 * ranks);
    plan->q_offsets = longs;
    plan->k_offsets = longs + n;
    plan->wholes_q = longs + 2 * n;
    plan->wholes_k = longs + 3 * n;
    plan->rows_before[FATTN_QUERIES] = longs + 4 * n;
    plan->rows_before[FATTN_KEYS] = longs + 4 * n + ranks;
    plan->cu_q = ints;
    plan->cu_k = ints + n;
    plan->local_q = ints + 2 * n;
    plan->local_k = ints + 3 * n;
    memcpy(ints + 4 * n, cu_q, (size_t)n * sizeof *ints);
    memcpy(ints + 5 * n, cu_k, (size_t)n * sizeof *ints);
    plan->shares.cu_q = ints + 4 * n;
    plan->shares.cu_k = ints + 5 * n;
    return FATTN_OK;
}

/* The problem of the rank's own shares, against which its buffers are checked. */
static fattn_status make_local(fattn_group_plan *plan, const fattn_problem *problem)
{
    const fattn_whole *const w = &plan->shares;
    fattn_problem p;
    const fattn_status status = fattn_problem_read(&p, problem);
    if (status) {
        return status;
    }
    p.seqlen_q = p.seqlen_k = 0;
    for (int64_t b = 0; b < fattn_whole_kinds(w); b++) {
        const int64_t q = fattn_whole_rows(w, FATTN_QUERIES, b, plan->transport.rank);
        const int64_t k = fattn_whole_rows(w, FATTN_KEYS, b, plan->transport.rank);
        p.seqlen_q = fattn_max64(p.seqlen_q, q);
        p.seqlen_k = fattn_max64(p.seqlen_k, k);
    }
    if (plan->ragged) {
        begin_shares(plan);
        p.total_q = plan->local_q[p.batch];
        p.total_k = plan->local_k[p.batch];
    }
    return fattn_problem_normalise(&p, &plan->local);
}

/* --- Plans of pieces -------------------------------------------------------------------------- */

/* Makes room for another piece: twice as much as before if there is none. */
static fattn_status make_room(fattn_group_plan *plan)
{
    const int64_t count = plan->piece_count;
    if (count & (count - 1)) {
        return FATTN_OK; /* there is room up to a power of two */
    }
    const int64_t bytes = (count ? 2 * count : 1) * (int64_t)sizeof *plan->pieces;
    fattn_group_piece *const more = fattn_memory_alloc((size_t)bytes);
    if (!more) {
        return fattn_fail_memory(bytes, "the plans of a group's pieces");
    }
    if (count > 0) {
        memcpy(more, plan->pieces, (size_t)count * sizeof *more);
    }
    fattn_memory_free(plan->pieces);
    plan->pieces = more;
    return FATTN_OK;
}

static fattn_status add_piece(fattn_group_plan *plan, const fattn_problem *p, int64_t *workspace)
{
    for (int64_t n = 0; n < plan->piece_count; n++) {
        if (memcmp(&plan->pieces[n].problem, p, sizeof *p) == 0) {
            return FATTN_OK;
        }
    }
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    fattn_status status = make_room(plan);
    fattn_group_piece *const piece = status ? NULL : &plan->pieces[plan->piece_count];
    status = status ? status : fattn_plan_create(plan->device, p, &piece->plan);
    if (!status) {
        piece->problem = *p;
        plan->piece_count++;
        status = fattn_plan_get_info(piece->plan, &info);
        *workspace = fattn_max64(*workspace, info.workspace_bytes);
    }
    return status;
}

static void set_slice(fattn_group_plan *plan, int64_t slice)
{
    plan->shares.slices = plan->whole.slices = plan->slices;
    plan->shares.slice = plan->whole.slice = slice;
}

static fattn_status make_pieces(fattn_group_plan *plan, int64_t *workspace)
{
    const int most_runs = plan->q_runs * plan->k_runs;
    /* With dropout pieces of different turns differ in head_offset. */
    const int64_t turns = plan->problem.features & FATTN_DROPOUT ? plan->turns : 1;
    const int64_t most = (int64_t)plan->rounds * FATTN_LANES * most_runs;
    fattn_status status = FATTN_OK;
    for (int64_t n = 0; !status && n < turns * plan->slices * most; n++) {
        const int64_t of = n % most, round = of / most_runs;
        fattn_visit visit;
        fattn_problem p;
        fattn_buffers buffers;
        plan->turn = n / most / plan->slices;
        set_slice(plan, n / most % plan->slices);
        if (fattn_group_visit(plan, (int)(round % FATTN_LANES), round / FATTN_LANES,
                              (int)(of % most_runs), &visit) &&
            fattn_group_has_piece(plan, &visit)) {
            fattn_group_make_piece(plan, &visit, &p, &buffers);
            status = add_piece(plan, &p, workspace);
            plan->together = plan->together || (n == 0 && visit.q_run == FATTN_BOTH);
            plan->merges = plan->merges || !fattn_group_is_first(plan, visit.owner, visit.k_run);
        }
    }
    plan->turn = 0;
    set_slice(plan, 0);
    return status;
}

/* --- Groups of members ------------------------------------------------------------------------ */

/* The rows of a group's members together are the group's share when the problem is divided over
 * groups. So members have neighbouring parts; if rows are striped, ranks that are as far apart as
 * there are groups. */
int64_t fattn_group_rank(const fattn_group_plan *plan, int64_t group, int64_t member)
{
    return plan->shares.split == FATTN_SPLIT_STRIPED ? member * plan->whole.ranks + group
                                                     : group * plan->members + member;
}

/* Forms the groups of ranks that share heads. plan->problem is undivided here; make_own() divides
 * its heads later. */
static void form_groups(fattn_group_plan *plan)
{
    const int64_t rank = plan->transport.rank;
    plan->members = fattn_scheme_declines(&plan->shares, plan->scheme)
                        ? 1
                        : fattn_scheme_members(&plan->shares, plan->scheme);
    /* Halves of sequences of unlike lengths have unlike bounds, and kernels of devices with memory
     * of their own take one bound for all sequences. */
    if (plan->members == 1 && !(plan->ragged && plan->transport.device_memory)) {
        fattn_whole_set_halves(&plan->shares);
    }
    plan->whole = plan->shares;
    plan->whole.ranks = plan->shares.ranks / plan->members;
    const bool striped = plan->shares.split == FATTN_SPLIT_STRIPED;
    plan->group = striped ? rank % plan->whole.ranks : rank / plan->members;
    plan->member = striped ? rank / plan->whole.ranks : rank % plan->members;
    if (plan->whole.ranks == 1) {
        plan->whole.split = FATTN_SPLIT_CONTIGUOUS; /* all rows in their order */
    }
    plan->q_runs = fattn_whole_q_runs(&plan->whole);
    plan->k_runs = fattn_split_runs(plan->whole.split);
    plan->direct = plan->members == 1 && !plan->ragged && plan->shares.split == plan->whole.split;
}

static bool is_packed(const fattn_strides *s, int64_t rows, int64_t heads, int64_t channels,
                      int64_t batch)
{
    const fattn_strides packed = fattn_group_packed(rows, heads, channels);
    return (s->batch == packed.batch || batch == 1) && s->seq == packed.seq &&
           (s->head == packed.head || heads == 1);
}

/* Whether the rank's own keys and values can be sent from the caller's tensors, because they are
 * laid out like a block. */
static bool lies_as_block(const fattn_group_plan *plan)
{
    const fattn_problem *const l = &plan->local;
    return plan->direct && plan->turns == 1 && plan->slices == 1 &&
           is_packed(&l->k, l->seqlen_k, l->heads_k, l->dim, l->batch) &&
           is_packed(&l->v, l->seqlen_k, l->heads_k, l->dim_v, l->batch);
}

/* Reduces plan->problem to this rank's heads, and gives it the strides of the rank's own bias and
 * mask, which are not packed. */
static void make_own(fattn_group_plan *plan)
{
    fattn_problem *const p = &plan->problem;
    memcpy(p->bias_stride, plan->local.bias_stride, sizeof p->bias_stride);
    memcpy(p->mask_stride, plan->local.mask_stride, sizeof p->mask_stride);
    memcpy(p->dbias_stride, plan->local.dbias_stride, sizeof p->dbias_stride);
    plan->heads_q = p->heads_q /= plan->members;
    plan->heads_k = p->heads_k /= plan->members;
    p->head_offset += p->features & FATTN_DROPOUT ? plan->member * p->heads_q : 0;
}

/* The caller's strides describe this rank's share, so the undivided problem gets a contiguous
 * layout instead. Bias and mask stay broadcast along axes whose stride is 0. */
static void forget_strides(fattn_problem *p)
{
    /* Unsigned, since the sizes have not been validated: those that overflow are refused later. */
    const uint64_t rows = (uint64_t)fattn_max64(p->seqlen_q, 1);
    const uint64_t keys = (uint64_t)fattn_max64(p->seqlen_k, 1);
    const uint64_t full[] = {(uint64_t)p->heads_q * rows * keys, rows * keys, keys, 1};
    p->layout = FATTN_BSHD;
    p->q = p->k = p->v = p->o = p->dout = p->dq = p->dk = p->dv = (fattn_strides){0};
    for (int axis = 0; axis < 4; axis++) {
        p->bias_stride[axis] = p->bias_stride[axis] ? (int64_t)full[axis] : 0;
        p->mask_stride[axis] = p->mask_stride[axis] ? (int64_t)full[axis] : 0;
        p->dbias_stride[axis] = p->dbias_stride[axis] ? (int64_t)full[axis] : 0;
    }
}

/* --- Describing ------------------------------------------------------------------------------- */

/* Checks everything about the arguments that does not need the other ranks. */
fattn_status fattn_group_describe(fattn_group_plan *plan, const fattn_problem *problem,
                                  const int32_t *cu_q, const int32_t *cu_k)
{
    fattn_problem *const p = &plan->problem, whole;
    fattn_status status = fattn_problem_read(&whole, problem);
    if (status) {
        return status;
    }
    forget_strides(&whole);
    status = fattn_problem_normalise(&whole, p);
    status = status ? status : check_features(p);
    if (status) {
        return status;
    }
    plan->features = problem->features;
    plan->shares.problem = p;
    plan->ragged = p->features & FATTN_CU_SEQLENS_Q;
    plan->backward = p->op == FATTN_BACKWARD;
    plan->gradients = fattn_split_has_sums(p);
    if (!plan->ragged && (cu_q || cu_k)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "cu_seqlens are given, but the problem has no FATTN_CU_SEQLENS_Q");
    }
    if (plan->ragged) {
        status = check_lengths(p, cu_q, cu_k);
        status = status ? status : make_arrays(plan, cu_q, cu_k);
    }
    if (status) {
        return status;
    }
    status = fattn_group_choose_scheme(plan);
    if (status) {
        return status;
    }
    form_groups(plan);
    plan->wanted = fattn_scheme_turns(&plan->shares, plan->scheme, &plan->speed, plan->wanted);
    status = fattn_group_check_scheme(plan);
    status = status ? status : make_local(plan, problem);
    plan->span_rule = status ? FATTN_NO_SPANS : fattn_group_span_rule(plan);
    return status;
}

/* --- Turns ------------------------------------------------------------------------------------ */

static void destroy_pieces(fattn_group_plan *plan)
{
    for (int64_t n = 0; n < plan->piece_count; n++) {
        fattn_plan_destroy(plan->pieces[n].plan);
    }
    fattn_memory_free(plan->pieces);
    plan->pieces = NULL;
    plan->piece_count = 0;
}

/* Plans pieces and memory for `all` turns. Up to heads_q turns divide the heads. A multiple of
 * heads_q means one turn for each head, and the factor is the number of slices of keys. */
static fattn_status size_up(fattn_group_plan *plan, int64_t all)
{
    fattn_problem *const p = &plan->problem;
    const int64_t turns = all > plan->heads_q && plan->heads_q > 0 ? plan->heads_q : all;
    destroy_pieces(plan);
    plan->turns = turns;
    plan->slices = all / turns;
    plan->together = false;
    set_slice(plan, 0);
    plan->sharing = fattn_max64(1, turns / fattn_max64(plan->heads_k, 1));
    p->heads_q = plan->heads_q / turns;
    p->heads_k = plan->heads_k * plan->sharing / turns;
    const fattn_status made = fattn_group_make_sets(plan);
    if (made) {
        return made;
    }
    plan->keys_direct = lies_as_block(plan);
    plan->slots = fattn_group_slots(plan);
    plan->merges = plan->whole.all_queries; /* FATTN_SCHEME_REDUCE merges with other ranks */
    plan->workspace_bytes = 0;
    const fattn_status status = make_pieces(plan, &plan->workspace_bytes);
    fattn_group_lay_out(plan);
    return status;
}

static bool may_take_turns(const fattn_group_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    return plan->scheme == FATTN_SCHEME_RING
               ? !plan->ragged && p->batch == 1 && !(p->outputs & FATTN_OUT_DBIAS)
               : plan->members > 1;
}

/* The most slices of keys: with 16 nearly all memory is memory that slices do not reduce. */
enum { SLICES_MAX = 16 };

static bool can_turn(const fattn_group_plan *plan, int64_t turns)
{
    const int64_t heads = fattn_max64(plan->heads_q, 1), slices = turns / heads;
    return turns <= heads
               ? fattn_scheme_can_turn(plan->scheme, plan->heads_q, plan->heads_k, turns)
               : turns % heads == 0 && slices <= SLICES_MAX && (slices & (slices - 1)) == 0;
}

static fattn_status fail_limit(const fattn_group_plan *plan)
{
    return fattn_fail(FATTN_OUT_OF_MEMORY,
                      "the plan of a group needs at least %lld bytes, and memory is %lld",
                      (long long)plan->bytes, (long long)plan->memory);
}

/* Finds the fewest turns, at least those wanted, with which the plan fits its limit of memory. */
fattn_status fattn_group_size(fattn_group_plan *plan)
{
    make_own(plan);
    const bool may = may_take_turns(plan);
    const bool slices = may && plan->scheme == FATTN_SCHEME_RING && plan->direct;
    const int64_t most = may ? plan->heads_q * (slices ? SLICES_MAX : 1) : 1;
    const int64_t first = may ? fattn_max64(plan->wanted, plan->others) : 1;
    fattn_status status = fattn_ring_make(&plan->whole, &plan->ring);
    plan->rounds = (int)plan->ring.last_step + (plan->gradients ? 2 : 1);
    bool fits = false;
    for (int64_t turns = first; !status && !fits && turns <= fattn_max64(most, 1); turns++) {
        if (can_turn(plan, turns)) {
            status = size_up(plan, turns);
            fits = plan->memory == 0 || plan->bytes <= plan->memory;
        }
    }
    return status || fits ? status : fail_limit(plan);
}

/* All ranks take as many turns as the one that needs the most. */
static fattn_status join_turns(fattn_group_plan *plan)
{
    const int64_t all_turns = plan->turns * plan->slices;
    int64_t turns;
    fattn_status status = most_of_ranks(plan, all_turns, &turns);
    if (status || turns == all_turns) {
        return status;
    }
    status = size_up(plan, turns);
    return status || plan->bytes <= plan->memory ? status : fail_limit(plan);
}

/* Copies the lengths of all pieces to a device that has its own memory. */
static fattn_status send_lengths(const fattn_group_plan *plan)
{
    const int64_t numbers = fattn_group_cu_count(plan) * (plan->problem.batch + 1);
    const size_t bytes = (size_t)numbers * sizeof *plan->device_cu;
    const fattn_stream stream = plan->transport.stream;
    if (!plan->device_cu) {
        return FATTN_OK;
    }
    int32_t *const cu = fattn_memory_alloc(bytes);
    if (!cu) {
        return fattn_fail_memory((int64_t)bytes, "lengths");
    }
    fattn_group_write_cu(plan, cu);
    fattn_status status = fattn_device_copy(plan->device, plan->device_cu, cu, bytes, stream);
    status = status ? status : fattn_stream_synchronize(plan->device, stream);
    fattn_memory_free(cu);
    return status;
}

static fattn_status reserve(fattn_group_plan *plan)
{
    const fattn_status status =
        fattn_device_malloc(plan->device, (size_t)plan->bytes, &plan->memory_at);
    if (status) {
        return status;
    }
    fattn_group_lay_out(plan);
    const int64_t span_bytes = fattn_group_span_bytes(plan);
    plan->span_memory = span_bytes ? fattn_memory_alloc((size_t)span_bytes) : NULL;
    if (span_bytes && !plan->span_memory) {
        return fattn_fail_memory(span_bytes, "the spans of messages");
    }
    fattn_status made = fattn_group_list_rows(plan);
    if (made) {
        return made;
    }
    if (plan->transport.device_memory) {
        made = send_lengths(plan);
        made = made ? made : fattn_event_create(plan->device, &plan->finished);
        return made ? made : fattn_group_make_streams(plan);
    }
    /* Kernels branch on scores past the last key before they mask them. Without this valgrind would
     * report branches on memory that was never written. */
    memset(plan->workspace[0], 0, (size_t)plan->workspace_bytes);
    fattn_group_clear_gaps(plan);
    return FATTN_OK;
}

static fattn_status open_device(fattn_group_plan *plan, fattn_device *device)
{
    const fattn_transport *const t = &plan->transport;
    fattn_device_info info;
    fattn_device_info_init(&info);
    fattn_status status = fattn_device_acquire(&device);
    if (status) {
        return status;
    }
    plan->device = device;
    status = fattn_device_get_info(device, &info);
    if (!status && !info.host_memory != !!t->device_memory) {
        status = fattn_fail(FATTN_UNSUPPORTED,
                            "device %s computes in %s memory, and the transport carries %s memory",
                            info.backend, info.host_memory ? "host" : "device",
                            t->device_memory ? "device" : "host");
    }
    return status || !t->device_memory
               ? status
               : fattn_device_malloc(device, (size_t)t->ranks * sizeof(answer), &plan->answers);
}

void fattn_group_begin_plan(const fattn_group *g, const fattn_transport *t, fattn_group_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->transport = *t;
    plan->timeout = g->timeout > 0 ? g->timeout : usual_timeout; /* for telling others of errors */
    plan->scheme = g->scheme;
    plan->speed = fattn_group_speed(g, t);
    plan->late = -1;
    plan->memory = g->memory;
    plan->wanted = g->turns;
    plan->turns = plan->sharing = plan->slices = 1;
    plan->shares = (fattn_whole){.split = g->split,
                                 .ranks = t->ranks,
                                 .all_queries = g->scheme == FATTN_SCHEME_REDUCE,
                                 .saves = g->saves};
}

/* Decides about turns and memory, about which ranks must agree if memory is limited, and
 * allocates. */
static fattn_status size_and_reserve(fattn_group_plan *plan)
{
    fattn_status status = fattn_group_size(plan);
    if (plan->memory > 0) {
        status = agree(plan, status, 0);
        status = status ? status : join_turns(plan);
    }
    return agree(plan, status ? status : reserve(plan), 0);
}

fattn_status fattn_group_plan_create(const fattn_group *group, const fattn_problem *problem,
                                     const int32_t *cu_seqlens_q, const int32_t *cu_seqlens_k,
                                     fattn_group_plan **plan)
{
    fattn_group g;
    fattn_transport t;
    if (plan) {
        *plan = NULL;
    }
    fattn_status status = read_group(group, &g, &t);
    fattn_group_plan *const made = status ? NULL : fattn_memory_alloc(sizeof *made);
    if (status) {
        return status;
    }
    if (!made) {
        t.abort(t.user, "no memory for the plan of a group");
        return fattn_fail_memory(sizeof *made, "the plan of a group");
    }
    fattn_group_begin_plan(&g, &t, made);
    status = open_device(made, g.device);
    if (status && t.device_memory) { /* without device memory ranks cannot compare */
        t.abort(t.user, fattn_last_reason());
    } else if (t.device_memory) {
        status = agree_on_spans(made, &g);
    }
    if (!status || !t.device_memory) { /* else the others have been told */
        status = status ? status : check_choices(&g, &t);
        if (!status && !(plan && problem)) {
            status = fattn_fail(FATTN_NULL_POINTER, "%s is NULL", plan ? "problem" : "plan");
        }
        status = status ? status : fattn_group_describe(made, problem, cu_seqlens_q, cu_seqlens_k);
        status = agree(made, status, status ? 0 : hash_of(made));
    }
    status = status ? status : size_and_reserve(made);
    if (status) {
        fattn_reason_hold(status);
        fattn_group_plan_destroy(made);
        fattn_reason_let();
        return status;
    }
    *plan = made;
    return FATTN_OK;
}

void fattn_group_plan_destroy(fattn_group_plan *plan)
{
    if (!plan) {
        return;
    }
    if (plan->finished) {
        (void)fattn_event_synchronize(plan->finished);
        fattn_event_destroy(plan->finished);
    }
    fattn_group_drop_streams(plan);
    destroy_pieces(plan);
    fattn_memory_free(plan->packed);
    fattn_memory_free(plan->span_memory);
    fattn_memory_free(plan->q_offsets);
    fattn_ring_free(&plan->ring);
    fattn_device_free(plan->device, plan->memory_at);
    fattn_device_free(plan->device, plan->answers);
    fattn_device_drop(plan->device);
    fattn_memory_free(plan);
}

int64_t fattn_group_plan_bytes(const fattn_group_plan *plan) { return plan ? plan->bytes : 0; }

int64_t fattn_group_plan_saved_bytes(const fattn_group_plan *plan)
{
    return plan && plan->saves ? plan->saved_bytes : 0;
}
