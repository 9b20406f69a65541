/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies the caller's tensors to the packed rows that a rank computes with, and the results back.
 * In FATTN_SCHEME_RING these are the rank's own rows. If ranks share heads, each *member* of a
 * group of ranks gets the rows of all members for its part of the heads, and returns the results:
 * an all-to-all exchange.
 */
#include "core/backend.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/integer.h"

enum { TENSORS = 7 };

/* A tensor, as a share in the caller's memory and as packed rows. */
typedef struct tensor {
    fattn_side side;         /* rows are queries or keys */
    int64_t heads, channels; /* heads of a member */
    fattn_dtype dtype;       /* of the share */
    char *share;
    fattn_strides strides;
    char *packed[FATTN_RUNS];
    bool rows_last;               /* lse: (B, H, rows), not (B, rows, H, channels) */
    bool sum;                     /* the packed rows are f32, and are rounded into the share */
    bool together;                /* in the packed rows both runs of a sequence are adjacent */
    unsigned skipped;             /* bit n: run n is not copied */
    const char *plus[FATTN_RUNS]; /* NULL, or f32 rows like `packed` that are added to it */
} tensor;

/* Where rows are: in the caller's tensor, packed, or in the bytes of a message. */
typedef enum place { SHARE, PACKED, STREAM } place;

/* --- Which tensors ---------------------------------------------------------------------------- */

static void add(tensor *list, int *count, fattn_side side, const fattn_problem *p, void *share,
                const fattn_strides *strides, fattn_dtype dtype, int64_t channels)
{
    list[(*count)++] = (tensor){.side = side,
                                .heads = side == FATTN_KEYS ? p->heads_k : p->heads_q,
                                .channels = channels,
                                .dtype = dtype,
                                .share = share,
                                .strides = *strides};
}

static void add_lse(const fattn_group_plan *plan, tensor *list, int *count, void *share)
{
    const fattn_problem *const p = &plan->local;
    const int64_t total = plan->ragged ? p->total_q : p->seqlen_q;
    const fattn_strides strides = {.batch = p->heads_q * total, .seq = 1, .head = total};
    add(list, count, FATTN_QUERIES, &plan->problem, share, &strides, FATTN_F32, 1);
    list[*count - 1].rows_last = true;
}

/* block + offset; NULL if block is NULL, while only sizes are computed. */
static char *inside(char *block, int64_t offset) { return block ? block + offset : NULL; }

/* Sets where the runs of the last tensor of a list are packed. */
static void pack_at(tensor *list, int count, void *first, void *second)
{
    list[count - 1].packed[0] = first;
    list[count - 1].packed[1] = second;
}

/* Lists the inputs of a turn; results() lists its results. Turns that share a key/value head get
 * its keys with the first of them, and return its gradients with the last. If keys are cut into
 * slices, queries are packed for the first slice of a turn, and keys for each. */
static int inputs(const fattn_group_plan *plan, const fattn_buffers *b, int64_t turn, tensor *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_keys(plan, plan->rank);
    char *const own = plan->own;
    int count = 0;
    const bool queries = plan->whole.slice == 0;
    if (!plan->direct) {
        add(list, &count, FATTN_QUERIES, p, (void *)b->q, &l->q, p->dtype, p->dim);
        pack_at(list, count, plan->q[0], plan->q[1]);
    }
    if (!plan->keys_direct && (turn % plan->sharing == 0 || plan->slices > 1)) {
        add(list, &count, FATTN_KEYS, p, (void *)b->k, &l->k, p->dtype_kv, p->dim);
        pack_at(list, count, inside(own, block.k[0]), inside(own, block.k[1]));
        add(list, &count, FATTN_KEYS, p, (void *)b->v, &l->v, p->dtype_v, p->dim_v);
        pack_at(list, count, inside(own, block.v[0]), inside(own, block.v[1]));
    }
    if (plan->backward && !plan->direct) {
        add(list, &count, FATTN_QUERIES, p, b->o, &l->o, p->dtype_o, p->dim_v);
        pack_at(list, count, plan->o[0], plan->o[1]);
        add(list, &count, FATTN_QUERIES, p, (void *)b->dout, &l->dout, p->dtype_o, p->dim_v);
        pack_at(list, count, plan->dout[0], plan->dout[1]);
    }
    if (plan->backward && queries) {
        add_lse(plan, list, &count, b->lse);
        pack_at(list, count, plan->lse[0], plan->lse[1]);
    }
    if (p->features & FATTN_DLSE && queries) {
        add_lse(plan, list, &count, (void *)b->dlse);
        pack_at(list, count, plan->dlse[0], plan->dlse[1]);
    }
    return count;
}

static char *lse_of(const fattn_group_plan *plan, int run)
{
    return (char *)(plan->together && plan->lse[0] ? plan->lse[0] + fattn_group_row(plan, run)
                                                   : plan->lse[run]);
}

static int results(const fattn_group_plan *plan, const fattn_buffers *b, int64_t turn, tensor *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_sums(plan, plan->rank);
    const bool queries = fattn_group_ends_turn(plan);
    char *const own_sum = fattn_group_own_sum(plan);
    int count = 0;
    if (queries && p->outputs & FATTN_OUT_LSE) {
        add_lse(plan, list, &count, b->lse);
    }
    const int first_sum = count;
    if (queries && p->outputs & FATTN_OUT_O) {
        add(list, &count, FATTN_QUERIES, p, b->o, &l->o, p->dtype_o, p->dim_v);
    }
    if (queries && p->outputs & FATTN_OUT_DQ) {
        add(list, &count, FATTN_QUERIES, p, b->dq, &l->dq, p->dtype, p->dim);
    }
    const int first_key = count;
    const bool keys = turn % plan->sharing == plan->sharing - 1;
    if (keys && p->outputs & FATTN_OUT_DK) {
        add(list, &count, FATTN_KEYS, p, b->dk, &l->dk, p->dtype_kv, p->dim);
    }
    const int first_value = count;
    if (keys && p->outputs & FATTN_OUT_DV) {
        add(list, &count, FATTN_KEYS, p, b->dv, &l->dv, p->dtype_v, p->dim_v);
    }
    for (int t = 0; t < count; t++) {
        list[t].sum = t >= first_sum;
        list[t].together = t < first_sum ? plan->together : t < first_key;
        list[t].skipped = t < first_key ? plan->done : 0;
        for (int n = 0; n < FATTN_RUNS; n++) {
            const int64_t at = t < first_value ? block.k[n] : block.v[n];
            const bool late = plan->late >= 0 && fattn_group_home_runs(plan, plan->late) >> n & 1;
            list[t].packed[n] = t < first_sum   ? lse_of(plan, n)
                                : t < first_key ? (char *)plan->sum[n]
                                                : inside(own_sum, at);
            list[t].plus[n] = t >= first_key && late ? plan->home[plan->late] + at : NULL;
        }
    }
    return count;
}

/* --- Copying ---------------------------------------------------------------------------------- */

/* Bytes of all rows of a rank in a message; tensors begin at multiples of 64. */
static int64_t stream_bytes(const fattn_group_plan *plan, const tensor *t, int64_t rank)
{
    int64_t rows = 0;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        rows += fattn_whole_rows(&plan->shares, t->side, b, rank);
    }
    return (rows * t->heads * t->channels * fattn_dtype_size(t->dtype) + 63) / 64 * 64;
}

/* One side of a copy: the address and layout of its rows. */
typedef struct side {
    char *data;
    const char *plus; /* NULL, or f32 rows that are added */
    fattn_strides strides;
    fattn_dtype dtype;
} side;

/* A run of rows of a rank, of one sequence or of all: how many rows, and its first row in each
 * place. In the packed rows it takes every packed_step-th row. */
typedef struct rows {
    int64_t batch, count, share, packed, packed_step, stream;
} rows;

/* Packed rows from one sequence of a run to the next. */
static int64_t packed_rows(const fattn_group_plan *plan, const tensor *t, int run)
{
    if (plan->ragged) {
        return (t->side == FATTN_KEYS ? fattn_group_keys(plan, plan->rank, run)
                                      : fattn_group_queries(plan, run))
            .rows;
    }
    return t->side == FATTN_KEYS ? fattn_group_key_rows(plan, plan->rank)
           : t->together         ? fattn_group_query_rows(plan)
                                 : fattn_group_queries(plan, run).longest;
}

static side side_of(const fattn_group_plan *plan, const tensor *t, place where, int run,
                    int64_t first_head, char *stream, int64_t stream_rows)
{
    const int64_t row = t->heads * t->channels, size = fattn_dtype_size(t->dtype);
    if (where == SHARE) {
        return (side){t->share + first_head * t->strides.head * size, NULL, t->strides, t->dtype};
    }
    if (where == STREAM) {
        return (side){stream, NULL, {stream_rows * row, row, t->channels}, t->dtype};
    }
    const int64_t length = packed_rows(plan, t, run);
    const fattn_strides rows_last = {length * t->heads, 1, length};
    return (side){t->packed[run], t->plus[run],
                  t->rows_last ? rows_last : (fattn_strides){length * row, row, t->channels},
                  t->sum ? FATTN_F32 : t->dtype};
}

/* Moves a side to the first row of r, and makes its stride that of r's rows. */
static void advance(side *s, place where, const rows *r)
{
    const int64_t first[] = {r->share, r->packed, r->stream};
    const int64_t bytes = first[where] * s->strides.seq * fattn_dtype_size(s->dtype);
    s->data += bytes;
    s->plus += s->plus ? bytes : 0;
    s->strides.seq *= where == PACKED ? r->packed_step : 1;
}

static fattn_status move_rows(const fattn_group_plan *plan, const tensor *t, const rows *r,
                              side from, place from_where, side to, place to_where)
{
    const bool whole = from.strides.head == t->channels && to.strides.head == t->channels;
    advance(&from, from_where, r);
    advance(&to, to_where, r);
    const fattn_rows_args args = {
        .batch = r->batch,
        .rows = r->count,
        .heads = whole ? 1 : t->heads,
        .channels = whole ? t->heads * t->channels : t->channels,
        .to = to.data,
        .from = from.data,
        .plus = (const float *)from.plus,
        .to_stride = to.strides,
        .from_stride = from.strides,
        .dtype_to = to.dtype,
        .dtype_from = from.dtype,
    };
    return fattn_group_move(plan, &args);
}

/*
 * Copies all rows of a rank (of this rank, if one side is its share) for the heads of a member,
 * which begin at first_head. A run of a rank is part of a run of its group: every packed_step-th
 * row of it, from some row on. If all sequences have the same length, one copy moves them all.
 */
static fattn_status copy(const fattn_group_plan *plan, const tensor *t, int64_t rank,
                         int64_t first_head, place from, place to, char *stream)
{
    const fattn_whole *const shares = &plan->shares, *const group = &plan->whole;
    fattn_whole unsliced = *shares;
    unsliced.slices = 1;
    const int runs =
        t->side == FATTN_KEYS ? fattn_split_runs(shares->split) : fattn_whole_q_runs(shares);
    const int packed_runs = t->side == FATTN_KEYS ? plan->k_runs : plan->q_runs;
    const int32_t *const starts = t->side == FATTN_KEYS ? plan->local_k : plan->local_q;
    const int64_t batch = plan->problem.batch, together = plan->ragged ? 1 : batch;
    fattn_status status = FATTN_OK;
    int64_t streamed = 0;
    for (int n = 0; n < runs; n++) {
        const int into = packed_runs == 1 ? 0 : n;
        int64_t before = 0; /* packed rows of earlier sequences */
        for (int64_t b = 0; !status && b < batch; b += together) {
            const fattn_run own = fattn_whole_run(shares, t->side, b, rank, n);
            const int64_t skipped =
                own.first - fattn_whole_run(&unsliced, t->side, b, rank, n).first;
            const fattn_run whole = fattn_whole_run(group, t->side, b, plan->rank, into);
            const rows r = {
                .batch = together,
                .count = own.count,
                .share = (plan->ragged ? starts[b] : 0) +
                         (n ? fattn_whole_run(&unsliced, t->side, b, rank, 0).count : 0) +
                         skipped / own.stride,
                .packed = before + (own.first - whole.first) / whole.stride,
                .packed_step = own.stride / whole.stride,
                .stream = streamed,
            };
            const side in = side_of(plan, t, from, into, first_head, stream, own.count);
            const side out = side_of(plan, t, to, into, first_head, stream, own.count);
            const bool moves = own.count > 0 && !(t->skipped >> n & 1);
            status = moves ? move_rows(plan, t, &r, in, from, out, to) : FATTN_OK;
            before += whole.count;
            streamed += own.count * together;
        }
    }
    return status;
}

/* --- All to all ------------------------------------------------------------------------------- */

/* What members exchange of a turn. */
typedef enum kind { INPUTS, RESULTS } kind;
static int tensors_of(const fattn_group_plan *plan, const fattn_buffers *b, kind what, int64_t turn,
                      tensor *list)
{
    return what == INPUTS ? inputs(plan, b, turn, list) : results(plan, b, turn, list);
}

/* Their bytes in a message, for a member's rows; 0 if there is no such turn. */
static int64_t bytes_of(const fattn_group_plan *plan, kind what, int64_t turn, int64_t member)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    tensor list[TENSORS];
    int64_t bytes = 0;
    const bool there = turn >= 0 && turn < plan->turns;
    const int count = there ? tensors_of(plan, &none, what, turn, list) : 0;
    for (int t = 0; t < count; t++) {
        bytes += stream_bytes(plan, &list[t], fattn_group_rank(plan, plan->rank, member));
    }
    return bytes;
}

/* The most bytes over all turns and members: turns that share keys exchange different tensors. */
static int64_t most_bytes(const fattn_group_plan *plan, kind what)
{
    int64_t most = 0;
    for (int64_t m = 0; m < plan->members; m++) {
        for (int64_t turn = 0; turn < plan->turns; turn++) {
            most = fattn_max64(most, bytes_of(plan, what, turn, m));
        }
    }
    return most;
}

/*
 * A message of exchange x has the results of turn x - 2 and, after them, the inputs of turn x.
 * Even and odd exchanges have separate memory, because one is travelling while the other is read or
 * written. Results that have arrived stay until the end, one turn after another; the inputs that
 * came with them are no longer needed when the next results overwrite them.
 */
fattn_slots fattn_group_slots(const fattn_group_plan *plan)
{
    if (plan->members == 1) {
        return (fattn_slots){0, 0, 0};
    }
    const int64_t in = most_bytes(plan, INPUTS), out = most_bytes(plan, RESULTS);
    const int64_t last = (plan->turns - 1) / 2; /* exchange 2 last has inputs, 2 last + 2 none */
    return (fattn_slots){out, plan->turns > 2 ? in + out : fattn_max64(in, out),
                         last * out + fattn_max64(in, out)};
}

static char *outward_at(const fattn_group_plan *plan, int64_t exchange, int64_t member)
{
    return plan->outward[exchange % 2] + member * plan->slots.outward;
}

static char *inward_at(const fattn_group_plan *plan, int64_t exchange, int64_t member)
{
    const int64_t before = exchange < 2 ? 0 : (exchange - 2) / 2;
    return plan->inward[exchange % 2] + member * plan->slots.inward + before * plan->slots.results;
}

/* The first head, of queries or of keys, that a member computes in a turn. Without other members
 * the buffers already begin at the turn's heads. */
static int64_t first_head(const fattn_group_plan *plan, const tensor *t, int64_t turn,
                          int64_t member)
{
    if (plan->members == 1) {
        return 0;
    }
    return t->side == FATTN_KEYS ? member * plan->heads_k + turn / plan->sharing * t->heads
                                 : member * plan->heads_q + turn * t->heads;
}

/* Copies the listed tensors of a turn between a message and the share (this rank's rows) or the
 * packed rows (the member's rows). */
static fattn_status copy_stream(const fattn_group_plan *plan, const tensor *list, int count,
                                int64_t turn, int64_t member, place from, place to, char *stream)
{
    const bool shares = from == SHARE || to == SHARE;
    const int64_t rank = fattn_group_rank(plan, plan->rank, shares ? plan->member : member);
    fattn_status status = FATTN_OK;
    for (int t = 0; !status && t < count; t++) {
        status =
            copy(plan, &list[t], rank, first_head(plan, &list[t], turn, member), from, to, stream);
        stream += stream_bytes(plan, &list[t], rank);
    }
    return status;
}

static fattn_status copy_own(const fattn_group_plan *plan, const tensor *list, int count,
                             place from, place to)
{
    const int64_t rank = fattn_group_rank(plan, plan->rank, plan->member);
    fattn_status status = FATTN_OK;
    for (int t = 0; !status && t < count; t++) {
        const int64_t head = first_head(plan, &list[t], plan->turn, plan->member);
        status = copy(plan, &list[t], rank, head, from, to, NULL);
    }
    return status;
}

fattn_status fattn_group_load_inputs(const fattn_group_plan *plan, const fattn_buffers *b,
                                     int64_t turn)
{
    tensor list[TENSORS];
    const int count = turn < plan->turns ? inputs(plan, b, turn, list) : 0;
    fattn_status status = FATTN_OK;
    for (int64_t m = 0; !status && count && m < plan->members; m++) {
        if (m != plan->member) {
            status = copy_stream(plan, list, count, turn, m, SHARE, STREAM,
                                 outward_at(plan, turn, m) + bytes_of(plan, RESULTS, turn - 2, m));
        }
    }
    return status;
}

fattn_status fattn_group_load_results(const fattn_group_plan *plan, int64_t turn)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    tensor list[TENSORS];
    const int count = turn >= 0 ? results(plan, &none, turn, list) : 0;
    fattn_status status = FATTN_OK;
    for (int64_t m = 0; !status && count && m < plan->members; m++) {
        char *const slot =
            m == plan->member ? inward_at(plan, turn + 2, m) : outward_at(plan, turn + 2, m);
        status = copy_stream(plan, list, count, turn, m, PACKED, STREAM, slot);
    }
    return status;
}

fattn_status fattn_group_store_results(const fattn_group_plan *plan, const fattn_buffers *b)
{
    fattn_status status = FATTN_OK;
    for (int64_t turn = 0; turn < plan->turns; turn++) {
        tensor list[TENSORS];
        const int count = results(plan, b, turn, list);
        for (int64_t m = 0; !status && m < plan->members; m++) {
            status = copy_stream(plan, list, count, turn, m, STREAM, SHARE,
                                 inward_at(plan, turn + 2, m));
        }
    }
    return status;
}

/* Appends the messages of exchange x to the member `distance` up, and from the one as far down. */
static void add_exchange(const fattn_group_plan *plan, int64_t x, int64_t distance,
                         fattn_message *messages, int *count)
{
    const int64_t members = plan->members, own = plan->member;
    const int64_t to = (own + distance) % members, from = (own - distance + members) % members;
    const int64_t sent = bytes_of(plan, RESULTS, x - 2, to) + bytes_of(plan, INPUTS, x, own);
    const int64_t received = bytes_of(plan, RESULTS, x - 2, own) + bytes_of(plan, INPUTS, x, from);
    fattn_group_add_message(messages, count, fattn_group_rank(plan, plan->rank, to),
                            FATTN_TAG_MEMBERS, FATTN_SEND, outward_at(plan, x, to), sent);
    fattn_group_add_message(messages, count, fattn_group_rank(plan, plan->rank, from),
                            FATTN_TAG_MEMBERS, FATTN_RECEIVE, inward_at(plan, x, from), received);
}

/* As many members as have room in the group of messages of a computing step. */
static int64_t members_beside(const fattn_group_plan *plan)
{
    return fattn_ring_room(&plan->ring, plan->gradients) / 2;
}

void fattn_group_begin_exchange(const fattn_group_plan *plan, int64_t exchange,
                                fattn_message *messages, int *count)
{
    for (int64_t d = 1; d < plan->members && d <= members_beside(plan); d++) {
        add_exchange(plan, exchange, d, messages, count);
    }
}

/* Carries the messages of an exchange with the members from `distance` on. */
static fattn_status carry_from(const fattn_group_plan *plan, int64_t exchange, int64_t distance)
{
    fattn_status status = FATTN_OK;
    while (!status && distance < plan->members) {
        fattn_message messages[FATTN_MESSAGES_MAX];
        int count = 0;
        for (; count + 2 <= FATTN_MESSAGES_MAX && distance < plan->members; distance++) {
            add_exchange(plan, exchange, distance, messages, &count);
        }
        status = fattn_group_carry(plan, messages, count);
    }
    return status;
}

fattn_status fattn_group_end_exchange(const fattn_group_plan *plan, int64_t exchange)
{
    return carry_from(plan, exchange, 1 + members_beside(plan));
}

fattn_status fattn_group_exchange(const fattn_group_plan *plan, int64_t exchange)
{
    return carry_from(plan, exchange, 1);
}

/* --- Packing ---------------------------------------------------------------------------------- */

fattn_status fattn_group_move(const fattn_group_plan *plan, const fattn_rows_args *args)
{
    return plan->device->backend->rows(plan->device->impl, args, plan->transport.stream);
}

fattn_status fattn_group_pack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    tensor list[TENSORS];
    const int count = inputs(plan, b, plan->turn, list);
    fattn_status status = copy_own(plan, list, count, SHARE, PACKED);
    for (int64_t m = 0; !status && m < plan->members; m++) {
        if (m != plan->member) {
            status = copy_stream(plan, list, count, plan->turn, m, STREAM, PACKED,
                                 inward_at(plan, plan->turn, m) +
                                     bytes_of(plan, RESULTS, plan->turn - 2, plan->member));
        }
    }
    return status;
}

fattn_status fattn_group_unpack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    tensor list[TENSORS];
    const int count = results(plan, b, plan->turn, list);
    return copy_own(plan, list, count, PACKED, SHARE);
}
