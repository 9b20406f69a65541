/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the caller's tensors to the packed rows that a rank computes with, and back. In a ring these
 * are the rank's own rows. Where ranks share heads, each *member* of a group of ranks gets the rows
 * of all members for its part of the heads, and sends what it made of them back: all to all.
 */
#include <string.h>

#include "core/distributed/group.h"
#include "core/dtype.h"

enum { TENSORS = 7 };

/* A tensor in its two places. */
typedef struct tensor {
    bool keys;               /* rows are keys */
    int64_t heads, channels; /* heads of a member */
    fattn_dtype dtype;       /* of the share */
    char *share;
    fattn_strides strides;
    char *packed[FATTN_RUNS];
    bool rows_last; /* lse: (B, H, rows), not (B, rows, H, channels) */
    bool sum;       /* packed in f32, to be rounded */
} tensor;

typedef enum place { SHARE, PACKED, STREAM } place;

/* --- Which tensors ---------------------------------------------------------------------------- */

static void add(tensor *list, int *count, bool keys, const fattn_problem *p, void *share,
                const fattn_strides *strides, fattn_dtype dtype, int64_t channels)
{
    list[(*count)++] = (tensor){.keys = keys,
                                .heads = keys ? p->heads_k : p->heads_q,
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
    add(list, count, false, &plan->problem, share, &strides, FATTN_F32, 1);
    list[*count - 1].rows_last = true;
}

/* A place in a block; NULL before there is one. */
static char *inside(char *block, int64_t offset) { return block ? block + offset : NULL; }

static int inputs(const fattn_group_plan *plan, const fattn_buffers *b, tensor *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_keys(plan, plan->rank);
    int count = 0;
    add(list, &count, false, p, (void *)b->q, &l->q, p->dtype, p->dim);
    add(list, &count, true, p, (void *)b->k, &l->k, p->dtype_kv, p->dim);
    add(list, &count, true, p, (void *)b->v, &l->v, p->dtype_v, p->dim_v);
    if (plan->backward) {
        add(list, &count, false, p, b->o, &l->o, p->dtype_o, p->dim_v);
        add(list, &count, false, p, (void *)b->dout, &l->dout, p->dtype_o, p->dim_v);
        add_lse(plan, list, &count, b->lse);
    }
    if (p->features & FATTN_DLSE) {
        add_lse(plan, list, &count, (void *)b->dlse);
    }
    for (int n = 0; n < FATTN_RUNS; n++) {
        char *const packed[TENSORS] = {
            plan->q[n],    inside(plan->own, block.k[n]), inside(plan->own, block.v[n]), plan->o[n],
            plan->dout[n], (char *)plan->lse[n],          (char *)plan->dlse[n],
        };
        for (int t = 0; t < count; t++) {
            list[t].packed[n] = packed[t];
        }
    }
    return count;
}

static int results(const fattn_group_plan *plan, const fattn_buffers *b, tensor *list)
{
    const fattn_problem *const p = &plan->problem, *const l = &plan->local;
    const fattn_block block = fattn_group_block_sums(plan, plan->rank);
    int count = 0;
    if (p->outputs & FATTN_OUT_LSE) {
        add_lse(plan, list, &count, b->lse);
    }
    const int first_sum = count;
    if (p->outputs & FATTN_OUT_O) {
        add(list, &count, false, p, b->o, &l->o, p->dtype_o, p->dim_v);
    }
    if (p->outputs & FATTN_OUT_DQ) {
        add(list, &count, false, p, b->dq, &l->dq, p->dtype, p->dim);
    }
    const int first_key = count;
    if (p->outputs & FATTN_OUT_DK) {
        add(list, &count, true, p, b->dk, &l->dk, p->dtype_kv, p->dim);
    }
    const int first_value = count;
    if (p->outputs & FATTN_OUT_DV) {
        add(list, &count, true, p, b->dv, &l->dv, p->dtype_v, p->dim_v);
    }
    for (int t = 0; t < count; t++) {
        list[t].sum = t >= first_sum;
        for (int n = 0; n < FATTN_RUNS; n++) {
            list[t].packed[n] = t < first_sum     ? (char *)plan->lse[n]
                                : t < first_key   ? (char *)plan->sum[n]
                                : t < first_value ? inside(plan->own_sum, block.k[n])
                                                  : inside(plan->own_sum, block.v[n]);
        }
    }
    return count;
}

/* --- Copying ---------------------------------------------------------------------------------- */

static void round_row(const float *from, fattn_dtype dtype, void *to, int64_t channels)
{
    if (dtype == FATTN_F32) {
        memcpy(to, from, (size_t)channels * sizeof *from);
        return;
    }
    uint16_t *const narrow = to;
    for (int64_t c = 0; c < channels; c++) {
        narrow[c] = dtype == FATTN_F16 ? fattn_f16_from_f32(from[c]) : fattn_bf16_from_f32(from[c]);
    }
}

/* Bytes of all rows of a rank in a stream. */
static int64_t stream_bytes(const fattn_group_plan *plan, const tensor *t, int64_t rank)
{
    int64_t rows = 0;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        rows += fattn_whole_rows(&plan->shares, t->keys, b, rank);
    }
    return rows * t->heads * t->channels * fattn_dtype_size(t->dtype);
}

/* Where row i of one head is. */
typedef struct side {
    char *data;
    int64_t batch, row, head; /* bytes */
} side;

/* A run of rows of a rank in one sequence, in the share, in packed rows, and in a stream. */
typedef struct rows {
    int64_t count, share, packed, packed_step, stream;
} rows;

static side side_of(const fattn_group_plan *plan, const tensor *t, place where, int run,
                    int64_t first_head, char *stream)
{
    const int64_t size = fattn_dtype_size(t->dtype), packed_size = t->sum ? 4 : size;
    if (where == SHARE) {
        return (side){t->share + first_head * t->strides.head * size,
                      plan->ragged ? 0 : t->strides.batch * size, t->strides.seq * size,
                      t->strides.head * size};
    }
    if (where == STREAM) {
        return (side){stream, 0, t->heads * t->channels * size, t->channels * size};
    }
    const int64_t total =
        (t->keys ? fattn_group_keys(plan, plan->rank, run) : fattn_group_queries(plan, run)).rows;
    const int64_t each = plan->ragged ? 0 : total / plan->problem.batch;
    if (t->rows_last) {
        const int64_t length = plan->ragged ? total : each;
        return (side){t->packed[run], each * t->heads * 4, 4, length * 4};
    }
    const int64_t row = t->heads * t->channels * packed_size;
    return (side){t->packed[run], each * row, row, t->channels * packed_size};
}

static void copy_rows(const tensor *t, const rows *r, int64_t b, const side *from, place from_where,
                      const side *to, place to_where)
{
    const int64_t size = fattn_dtype_size(t->dtype);
    const int64_t first[] = {r->share, r->packed, r->stream}, step[] = {1, r->packed_step, 1};
    for (int64_t i = 0; i < r->count; i++) {
        const char *in =
            from->data + b * from->batch + (first[from_where] + i * step[from_where]) * from->row;
        char *out = to->data + b * to->batch + (first[to_where] + i * step[to_where]) * to->row;
        for (int64_t h = 0; h < t->heads; h++, in += from->head, out += to->head) {
            if (t->sum && from_where == PACKED) {
                round_row((const float *)in, t->dtype, out, t->channels);
            } else {
                memcpy(out, in, (size_t)(t->channels * size));
            }
        }
    }
}

/*
 * Copies all rows of a rank (of itself, where one side is its share) for a member's heads, the
 * first of which is first_head. A run of a rank is part of a run of its group: every
 * (step)-th row of it, from some row on.
 */
static void copy(const fattn_group_plan *plan, const tensor *t, int64_t rank, int64_t first_head,
                 place from, place to, char *stream)
{
    const fattn_whole *const shares = &plan->shares, *const group = &plan->whole;
    const int runs = t->keys ? fattn_split_runs(shares->split) : fattn_whole_q_runs(shares);
    const int packed_runs = t->keys ? plan->k_runs : plan->q_runs;
    const int32_t *const starts = t->keys ? plan->local_k : plan->local_q;
    int64_t streamed = 0;
    for (int n = 0; n < runs; n++) {
        const int into = packed_runs == 1 ? 0 : n;
        const side in = side_of(plan, t, from, into, first_head, stream);
        const side out = side_of(plan, t, to, into, first_head, stream);
        int64_t before = 0; /* packed rows of earlier sequences */
        for (int64_t b = 0; b < plan->problem.batch; b++) {
            const fattn_run own = fattn_whole_run(shares, t->keys, b, rank, n);
            const fattn_run whole = fattn_whole_run(group, t->keys, b, plan->rank, into);
            const rows r = {
                .count = own.count,
                .share = (plan->ragged ? starts[b] : 0) +
                         (n ? fattn_whole_run(shares, t->keys, b, rank, 0).count : 0),
                .packed = before + (own.first - whole.first) / whole.stride,
                .packed_step = own.stride / whole.stride,
                .stream = streamed,
            };
            copy_rows(t, &r, b, &in, from, &out, to);
            before += plan->ragged ? whole.count : 0;
            streamed += own.count;
        }
    }
}

/* --- All to all ------------------------------------------------------------------------------- */

int64_t fattn_group_slot(const fattn_group_plan *plan)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    tensor list[2][TENSORS];
    const int counts[] = {inputs(plan, &none, list[0]), results(plan, &none, list[1])};
    int64_t most = 0;
    for (int64_t m = 0; m < plan->members; m++) {
        for (int n = 0; n < 2; n++) {
            int64_t bytes = 0;
            for (int t = 0; t < counts[n]; t++) {
                bytes += stream_bytes(plan, &list[n][t], fattn_group_rank(plan, plan->rank, m));
            }
            most = bytes > most ? bytes : most;
        }
    }
    return (most + 63) / 64 * 64;
}

/* What a member's rows take in a stream of all tensors. */
static int64_t bytes_of(const fattn_group_plan *plan, const tensor *list, int count, int64_t member)
{
    int64_t bytes = 0;
    for (int t = 0; t < count; t++) {
        bytes += stream_bytes(plan, &list[t], fattn_group_rank(plan, plan->rank, member));
    }
    return bytes;
}

/* Sends each member its slot, and fills those of the others. Inputs: this rank's rows go out, those
 * of the other come. Results: the other way round. */
static fattn_status swap(const fattn_group_plan *plan, const tensor *list, int count, bool inward)
{
    const int64_t members = plan->members, own = bytes_of(plan, list, count, plan->member);
    fattn_status status = FATTN_OK;
    for (int64_t d = 1; !status && d < members;) {
        fattn_message messages[FATTN_MESSAGES_MAX];
        int n = 0;
        for (; n + 2 <= FATTN_MESSAGES_MAX && d < members; d++) {
            const int64_t to = (plan->member + d) % members;
            const int64_t from = (plan->member - d + members) % members;
            fattn_group_add_message(messages, &n, fattn_group_rank(plan, plan->rank, to),
                                    FATTN_TAG_MEMBERS, false, plan->outward + to * plan->slot,
                                    inward ? own : bytes_of(plan, list, count, to));
            fattn_group_add_message(messages, &n, fattn_group_rank(plan, plan->rank, from),
                                    FATTN_TAG_MEMBERS, true, plan->inward + from * plan->slot,
                                    inward ? bytes_of(plan, list, count, from) : own);
        }
        status = fattn_group_carry(plan, messages, n);
    }
    return status;
}

/* Copies between shares or packed rows and the slots of all other members. */
static void copy_slots(const fattn_group_plan *plan, const tensor *list, int count, place from,
                       place to)
{
    for (int64_t m = 0; m < plan->members; m++) {
        const bool shares = from == SHARE || to == SHARE;
        const int64_t rank = fattn_group_rank(plan, plan->rank, shares ? plan->member : m);
        char *stream = (to == STREAM ? plan->outward : plan->inward) + m * plan->slot;
        for (int t = 0; m != plan->member && t < count; t++) {
            copy(plan, &list[t], rank, m * list[t].heads, from, to, stream);
            stream += stream_bytes(plan, &list[t], rank);
        }
    }
}

static void copy_own(const fattn_group_plan *plan, const tensor *list, int count, place from,
                     place to)
{
    const int64_t rank = fattn_group_rank(plan, plan->rank, plan->member);
    for (int t = 0; t < count; t++) {
        copy(plan, &list[t], rank, plan->member * list[t].heads, from, to, NULL);
    }
}

/* --- The act ---------------------------------------------------------------------------------- */

fattn_status fattn_group_pack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    tensor list[TENSORS];
    const int count = inputs(plan, b, list);
    copy_own(plan, list, count, SHARE, PACKED);
    if (plan->members == 1) {
        return FATTN_OK;
    }
    copy_slots(plan, list, count, SHARE, STREAM);
    const fattn_status status = swap(plan, list, count, true);
    if (!status) {
        copy_slots(plan, list, count, STREAM, PACKED);
    }
    return status;
}

fattn_status fattn_group_unpack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    tensor list[TENSORS];
    const int count = results(plan, b, list);
    if (plan->members > 1) {
        copy_slots(plan, list, count, PACKED, STREAM);
        const fattn_status status = swap(plan, list, count, false);
        if (status) {
            return status;
        }
        copy_slots(plan, list, count, STREAM, SHARE);
    }
    copy_own(plan, list, count, PACKED, SHARE);
    return FATTN_OK;
}
