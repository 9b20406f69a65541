/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a turn, and moving their rows. */
#include "core/distributed/moves.h"

#include "core/backend.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/status.h"

/* --- Which tensors ---------------------------------------------------------------------------- */

static void add(fattn_moved *list, int *count, fattn_side side, const fattn_problem *p, void *share,
                const fattn_strides *strides, fattn_dtype dtype, int64_t channels)
{
    list[(*count)++] = (fattn_moved){.side = side,
                                     .heads = side == FATTN_KEYS ? p->heads_k : p->heads_q,
                                     .channels = channels,
                                     .dtype = dtype,
                                     .share = share,
                                     .strides = *strides};
}

static void add_lse(const fattn_group_plan *plan, fattn_moved *list, int *count, void *share)
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
static void pack_at(fattn_moved *list, int count, void *first, void *second)
{
    list[count - 1].packed[0] = first;
    list[count - 1].packed[1] = second;
}

int fattn_group_inputs(const fattn_group_plan *plan, const fattn_buffers *b, int64_t turn,
                       fattn_moved *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_keys(plan, plan->group);
    const fattn_packed at = fattn_group_packed_at(plan, turn);
    int count = 0;
    const bool queries = plan->whole.slice == 0;
    const bool saved = plan->saves && plan->backward; /* by forward */
    if (!plan->direct && !saved) {
        add(list, &count, FATTN_QUERIES, p, (void *)b->q, &l->q, p->dtype, p->dim);
        pack_at(list, count, at.q[0], at.q[1]);
    }
    if (!plan->keys_direct && !saved && (turn % plan->sharing == 0 || plan->slices > 1)) {
        add(list, &count, FATTN_KEYS, p, (void *)b->k, &l->k, p->dtype_kv, p->dim);
        pack_at(list, count, inside(at.own, block.k[0]), inside(at.own, block.k[1]));
        add(list, &count, FATTN_KEYS, p, (void *)b->v, &l->v, p->dtype_v, p->dim_v);
        pack_at(list, count, inside(at.own, block.v[0]), inside(at.own, block.v[1]));
    }
    if (plan->backward && !plan->direct && !saved) {
        add(list, &count, FATTN_QUERIES, p, b->o, &l->o, p->dtype_o, p->dim_v);
        pack_at(list, count, at.o[0], at.o[1]);
    }
    if (plan->backward && !plan->direct) {
        add(list, &count, FATTN_QUERIES, p, (void *)b->dout, &l->dout, p->dtype_o, p->dim_v);
        pack_at(list, count, at.dout[0], at.dout[1]);
    }
    if (plan->backward && queries && !saved) {
        add_lse(plan, list, &count, b->lse);
        pack_at(list, count, at.lse[0], at.lse[1]);
    }
    if (p->features & FATTN_DLSE && queries) {
        add_lse(plan, list, &count, (void *)b->dlse);
        pack_at(list, count, at.dlse[0], at.dlse[1]);
    }
    return count;
}

static char *lse_of(const fattn_group_plan *plan, const fattn_packed *at, int run)
{
    return (char *)(plan->together && at->lse[0] ? at->lse[0] + fattn_group_row(plan, run)
                                                 : at->lse[run]);
}

int fattn_group_results(const fattn_group_plan *plan, const fattn_buffers *b, int64_t turn,
                        fattn_moved *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_sums(plan, plan->group);
    const bool queries = fattn_group_ends_turn(plan);
    const fattn_packed at = fattn_group_packed_at(plan, turn);
    char *const own_sum = inside(at.own_sum, plan->whole.slice * plan->own_step);
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
        list[t].sum = t >= first_sum && !plan->single;
        list[t].together = t < first_sum ? plan->together : t < first_key;
        list[t].skipped = t < first_key ? plan->stored_runs : 0;
        for (int n = 0; n < FATTN_RUNS; n++) {
            const int64_t offset = t < first_value ? block.k[n] : block.v[n];
            const bool late = plan->late >= 0 && fattn_group_home_runs(plan, plan->late) >> n & 1;
            list[t].packed[n] = t < first_sum   ? lse_of(plan, &at, n)
                                : t < first_key ? at.sum[n]
                                                : inside(own_sum, offset);
            list[t].plus[n] = t >= first_key && late ? plan->home[plan->late] + offset : NULL;
        }
    }
    return count;
}

/* --- Copying ---------------------------------------------------------------------------------- */

/* The rows of a rank in all sequences. */
static int64_t rows_of(const fattn_group_plan *plan, fattn_side side, int64_t rank)
{
    const int64_t *const before = plan->rows_before[side];
    return plan->ragged ? before[rank + 1] - before[rank]
                        : plan->problem.batch * fattn_whole_rows(&plan->shares, side, 0, rank);
}

int64_t fattn_group_stream_bytes(const fattn_group_plan *plan, const fattn_moved *t, int64_t rank)
{
    const int64_t rows = rows_of(plan, t->side, rank);
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
 * place. In the packed rows of run `into` it takes every packed_step-th row. */
typedef struct rows {
    int64_t batch, count, share, packed, packed_step, stream;
    int into;
} rows;

/* Packed rows from one sequence of a run to the next. */
static int64_t packed_rows(const fattn_group_plan *plan, const fattn_moved *t, int run)
{
    if (plan->ragged) {
        return (t->side == FATTN_KEYS ? fattn_group_keys(plan, plan->group, run)
                                      : fattn_group_queries(plan, run))
            .rows;
    }
    return t->side == FATTN_KEYS ? fattn_group_key_rows(plan, plan->group)
           : t->together         ? fattn_group_query_rows(plan)
                                 : fattn_group_queries(plan, run).longest;
}

/* The strides of rows without gaps, of which a sequence has `length`. */
static fattn_strides strides_of(const fattn_moved *t, int64_t length)
{
    const int64_t row = t->heads * t->channels;
    return t->rows_last ? (fattn_strides){length * row, 1, length}
                        : (fattn_strides){length * row, row, t->channels};
}

/* The rows r of a tensor in one place. */
static side side_of(const fattn_group_plan *plan, const fattn_moved *t, const fattn_spot *at,
                    const rows *r)
{
    if (at->place == FATTN_STREAM) { /* runs follow each other */
        const int64_t before = r->stream * t->heads * t->channels * fattn_dtype_size(t->dtype);
        return (side){at->stream + before, NULL, strides_of(t, r->count), t->dtype};
    }
    side s;
    if (at->place == FATTN_SHARE) {
        const int64_t head = at->first_head * t->strides.head * fattn_dtype_size(t->dtype);
        s = (side){t->share + head, NULL, t->strides, t->dtype};
    } else {
        s = (side){t->packed[r->into], t->plus[r->into],
                   strides_of(t, packed_rows(plan, t, r->into)), t->sum ? FATTN_F32 : t->dtype};
    }
    const int64_t first = at->place == FATTN_SHARE ? r->share : r->packed;
    const int64_t bytes = first * s.strides.seq * fattn_dtype_size(s.dtype);
    s.data += bytes;
    s.plus += s.plus ? bytes : 0;
    s.strides.seq *= at->place == FATTN_PACKED ? r->packed_step : 1;
    return s;
}

typedef fattn_status (*rows_function)(const fattn_group_plan *plan, const fattn_moved *t,
                                      const rows *r, void *context);

/*
 * Calls a function for all rows of a rank (of this rank, if they are in its share), run by run. A
 * run of a rank is part of a run of its group: every packed_step-th row of it, from some row on. If
 * all sequences have the same length, a call has the rows of all.
 */
static fattn_status each_run(const fattn_group_plan *plan, const fattn_moved *t, int64_t rank,
                             rows_function function, void *context)
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
            const fattn_run whole = fattn_whole_run(group, t->side, b, plan->group, into);
            const rows r = {
                .batch = together,
                .count = own.count,
                .share = (plan->ragged ? starts[b] : 0) +
                         (n ? fattn_whole_run(&unsliced, t->side, b, rank, 0).count : 0) +
                         skipped / own.stride,
                .packed = before + (own.first - whole.first) / whole.stride,
                .packed_step = own.stride / whole.stride,
                .stream = streamed,
                .into = into,
            };
            const bool moves = own.count > 0 && t->heads > 0 && !(t->skipped >> n & 1);
            status = moves ? function(plan, t, &r, context) : FATTN_OK;
            before += whole.count;
            streamed += own.count * together;
        }
    }
    return status;
}

static fattn_status move_all(const fattn_group_plan *plan, const fattn_rows_args *jobs, int count)
{
    return plan->device->backend->rows(plan->device->impl, jobs, count, plan->transport.stream);
}

fattn_status fattn_group_move(const fattn_group_plan *plan, const fattn_rows_args *args)
{
    return move_all(plan, args, 1);
}

fattn_status fattn_group_make_copies(fattn_copies *copies)
{
    const int count = copies->count;
    copies->count = 0;
    return count > 0 ? move_all(copies->plan, copies->jobs, count) : FATTN_OK;
}

static fattn_status add_copy(fattn_copies *copies, const fattn_rows_args *args)
{
    const fattn_status status =
        copies->count == FATTN_ROWS_JOBS ? fattn_group_make_copies(copies) : FATTN_OK;
    copies->jobs[copies->count++] = *args;
    return status;
}

typedef struct move {
    fattn_copies *copies;
    int64_t rank;
    fattn_spot from, to;
    int64_t turns; /* 1, or all turns at once */
} move;

/* Elements from the rows of a turn to those of the next one, in the share or packed. */
static int64_t turn_step(const fattn_group_plan *plan, const fattn_moved *t, fattn_place where,
                         const side *s)
{
    const int64_t bytes = t->side == FATTN_KEYS ? plan->key_set_bytes : plan->set_bytes;
    return where == FATTN_SHARE ? t->heads * s->strides.head : bytes / fattn_dtype_size(s->dtype);
}

/* Adds an axis for the turns, in place of one that is not needed. Heads of a row are adjacent, so
 * they count as channels, and turns take the axis of heads. In lse it is rows that are adjacent:
 * they count as channels, and heads take the axis of rows. With lists of rows, which are those of
 * all sequences, turns take the axis of the batch. */
static void add_turns(const fattn_group_plan *plan, const fattn_moved *t, const move *m,
                      const side *from, const side *to, fattn_rows_args *args)
{
    const int64_t turns = t->side == FATTN_KEYS ? m->turns / plan->sharing : m->turns;
    const int64_t to_step = turn_step(plan, t, m->to.place, to);
    const int64_t from_step = turn_step(plan, t, m->from.place, from);
    if (fattn_group_lists_rows(plan)) {
        args->batch = turns;
        args->to_stride.batch = to_step;
        args->from_stride.batch = from_step;
        return;
    }
    if (t->rows_last) {
        args->channels = args->rows;
        args->rows = t->heads;
        args->to_stride.seq = args->to_stride.head;
        args->from_stride.seq = args->from_stride.head;
    }
    args->heads = turns;
    args->to_stride.head = to_step;
    args->from_stride.head = from_step;
}

/* The list of a rank's rows in one place; NULL if there are no lists, and in a message, where rows
 * follow each other. */
static const int32_t *list_of(const fattn_group_plan *plan, const fattn_moved *t, int64_t rank,
                              fattn_place place)
{
    if (!fattn_group_lists_rows(plan) || place == FATTN_STREAM) {
        return NULL;
    }
    return place == FATTN_SHARE ? plan->share_rows[t->side]
                                : plan->packed_rows[t->side] + plan->rows_before[t->side][rank];
}

static fattn_status move_run(const fattn_group_plan *plan, const fattn_moved *t, const rows *r,
                             void *context)
{
    const move *const m = context;
    const side from = side_of(plan, t, &m->from, r), to = side_of(plan, t, &m->to, r);
    const bool whole = from.strides.head == t->channels && to.strides.head == t->channels;
    fattn_rows_args args = {
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
        .to_rows = list_of(plan, t, m->rank, m->to.place),
        .from_rows = list_of(plan, t, m->rank, m->from.place),
    };
    if (m->turns > 1) {
        add_turns(plan, t, m, &from, &to, &args);
    }
    return add_copy(m->copies, &args);
}

fattn_status fattn_group_copy(fattn_copies *copies, const fattn_moved *t, int64_t rank,
                              const fattn_spot *from, const fattn_spot *to, int64_t turns)
{
    const fattn_group_plan *const plan = copies->plan;
    move m = {copies, rank, *from, *to, turns};
    if (fattn_group_lists_rows(plan)) {
        const rows all = {.batch = 1, .count = rows_of(plan, t->side, rank), .packed_step = 1};
        return all.count > 0 && t->heads > 0 ? move_run(plan, t, &all, &m) : FATTN_OK;
    }
    return each_run(plan, t, rank, move_run, &m);
}

/* --- Lists of rows ---------------------------------------------------------------------------- */

bool fattn_group_lists_rows(const fattn_group_plan *plan)
{
    return plan->ragged && plan->members > 1 && plan->whole.ranks == 1;
}

int64_t fattn_group_listed_rows(const fattn_group_plan *plan)
{
    int64_t count = 0;
    for (int s = 0; s < 2; s++) {
        count += rows_of(plan, (fattn_side)s, plan->transport.rank) +
                 plan->rows_before[s][plan->shares.ranks];
    }
    return count;
}

typedef struct lists {
    int32_t *share, *packed; /* share: NULL for another rank */
} lists;

static fattn_status add_to_lists(const fattn_group_plan *plan, const fattn_moved *t, const rows *r,
                                 void *context)
{
    (void)plan, (void)t;
    lists *const l = context;
    for (int64_t i = 0; i < r->count; i++) {
        if (l->share) {
            *l->share++ = (int32_t)(r->share + i);
        }
        *l->packed++ = (int32_t)(r->packed + i * r->packed_step);
    }
    return FATTN_OK;
}

fattn_status fattn_group_list_rows(const fattn_group_plan *plan)
{
    const int64_t count = fattn_group_lists_rows(plan) ? fattn_group_listed_rows(plan) : 0;
    const size_t bytes = (size_t)count * sizeof(int32_t);
    if (count == 0) {
        return FATTN_OK;
    }
    int32_t *const memory = fattn_memory_alloc(bytes);
    if (!memory) {
        return fattn_fail_memory((int64_t)bytes, "lists of rows");
    }
    int32_t *const first = plan->share_rows[FATTN_QUERIES];
    for (int s = 0; s < 2; s++) {
        const fattn_moved t = {.side = (fattn_side)s, .heads = 1};
        int32_t *const share = memory + (plan->share_rows[s] - first);
        lists l = {.packed = memory + (plan->packed_rows[s] - first)};
        for (int64_t m = 0; m < plan->members; m++) {
            l.share = m == plan->member ? share : NULL;
            (void)each_run(plan, &t, fattn_group_rank(plan, plan->group, m), add_to_lists, &l);
        }
    }
    const fattn_stream stream = plan->transport.stream;
    fattn_status status = fattn_device_copy(plan->device, first, memory, bytes, stream);
    status = status ? status : fattn_stream_synchronize(plan->device, stream);
    fattn_memory_free(memory);
    return status;
}

/* --- Listing ---------------------------------------------------------------------------------- */

typedef struct listing {
    fattn_spot at;
    fattn_span_list *list;
} listing;

static fattn_status list_run(const fattn_group_plan *plan, const fattn_moved *t, const rows *r,
                             void *context)
{
    const listing *const l = context;
    const side s = side_of(plan, t, &l->at, r);
    const int64_t size = fattn_dtype_size(s.dtype);
    for (int64_t b = 0; b < r->batch; b++) {
        fattn_span *const span = &l->list->spans[l->list->count++];
        span->data = s.data + b * s.strides.batch * size;
        span->rows = t->rows_last ? t->heads : r->count;
        span->row_bytes = (t->rows_last ? r->count : t->heads * t->channels) * size;
        span->step = (t->rows_last ? s.strides.head : s.strides.seq) * size;
        l->list->bytes += span->rows * span->row_bytes;
    }
    return FATTN_OK;
}

void fattn_group_list(const fattn_group_plan *plan, const fattn_moved *t, int64_t rank,
                      const fattn_spot *at, fattn_span_list *list)
{
    listing l = {*at, list};
    (void)each_run(plan, t, rank, list_run, &l); /* cannot fail */
}
