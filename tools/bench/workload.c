/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs for benchmarks; see workload.h. */
#include "tools/bench/workload.h"

#include <string.h>

#include "core/dtype.h"
#include "core/memory.h"
#include "core/status.h"

/* xorshift64*: fast; statistical quality does not matter here. */
static uint64_t draw(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

/* The parameters of a fill function. */
typedef struct source {
    const sweep_case *of;
    fattn_dtype dtype;
    int64_t item, first; /* bytes per element; index of the first element to write */
    bool queries, paged; /* for arrays that come as a query and a key version */
} source;

typedef void fill(void *to, int64_t count, const source *from, uint64_t *state);

static int64_t divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void fill_reals(void *to, int64_t count, const source *from, uint64_t *state)
{
    const fattn_dtype dtype = from->dtype;
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)(int64_t)draw(state) * 0x1p-63;
        if (dtype == FATTN_F32) {
            ((float *)to)[i] = (float)x;
        } else {
            fattn_dtype_store(dtype, to, i, x);
        }
    }
}

static void fill_slopes(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    for (int64_t i = 0; i < count; i++) {
        fattn_dtype_store(from->dtype, to, i, 1.0 / (double)(from->first + i + 1));
    }
}

/* A random mask that keeps 7 of 8 entries. */
static void fill_mask(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)from;
    for (int64_t i = 0; i < count; i++) {
        ((uint8_t *)to)[i] = draw(state) >> 61 != 0;
    }
}

static void fill_blocks(void *to, int64_t count, const source *from, uint64_t *state)
{
    for (int64_t i = 0; i < count; i++) {
        ((uint8_t *)to)[i] = (double)(draw(state) >> 11) * 0x1p-53 < from->of->density;
    }
}

static void fill_zeros(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    memset(to, 0, (size_t)(count * from->item));
}

/* Cumulative sequence lengths. */
static void fill_starts(void *to, int64_t count, const source *from, uint64_t *state)
{
    const fattn_problem *const p = &from->of->problem;
    const int64_t longest = from->queries ? p->seqlen_q : p->seqlen_k;
    (void)state;
    for (int64_t i = 0; i < count; i++) {
        const int64_t n = from->first + i;
        const int64_t start = (n - n / 2) * longest + n / 2 * sweep_length(longest, true, 1);
        ((int32_t *)to)[i] = (int32_t)start;
    }
}

static void fill_used(void *to, int64_t count, const source *from, uint64_t *state)
{
    const sweep_case *const c = from->of;
    const fattn_problem *const p = &c->problem;
    const bool packed =
        p->features & (from->queries ? FATTN_CU_SEQLENS_Q : FATTN_CU_SEQLENS_K) && !from->paged;
    (void)state;
    for (int64_t i = 0; i < count; i++) {
        const int64_t own =
            sweep_length(from->queries ? p->seqlen_q : p->seqlen_k, packed, from->first + i);
        const int64_t used = from->queries ? c->used_q : c->used_k;
        ((int32_t *)to)[i] = (int32_t)(packed && used > own ? own : used);
    }
}

/* First keys of sequences. */
static void fill_first(void *to, int64_t count, const source *from, uint64_t *state)
{
    const sweep_case *const c = from->of;
    (void)state;
    for (int64_t i = 0; i < count; i++) {
        ((int32_t *)to)[i] = (int32_t)sweep_first_key(c, from->first + i);
    }
}

/* Positions of sequences, one function for each array. */
static void fill_places(void *to, int64_t count, const source *from, int which)
{
    for (int64_t i = 0; i < count; i++) {
        ((int64_t *)to)[i] = sweep_place(from->of, which, from->first + i);
    }
}

static void fill_q_offsets(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    fill_places(to, count, from, SWEEP_Q_OFFSETS);
}

static void fill_k_offsets(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    fill_places(to, count, from, SWEEP_K_OFFSETS);
}

static void fill_wholes_q(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    fill_places(to, count, from, SWEEP_WHOLES_Q);
}

static void fill_wholes_k(void *to, int64_t count, const source *from, uint64_t *state)
{
    (void)state;
    fill_places(to, count, from, SWEEP_WHOLES_K);
}

/* A permutation of the pages: n -> (step n) mod pages, with step coprime to pages. */
static void fill_pages(void *to, int64_t count, const source *from, uint64_t *state)
{
    const int64_t pages = from->of->problem.num_pages;
    int64_t step = pages / 2 + 1;
    (void)state;
    while (divisor(step, pages) > 1) {
        step++;
    }
    for (int64_t i = 0; i < count; i++) {
        ((int32_t *)to)[i] = (int32_t)((from->first + i) * step % pages);
    }
}

static const uint64_t seed = UINT64_C(0x9e3779b97f4a7c15), seed_v = UINT64_C(0xd1b54a32d192ed03);

/* Fills device memory piece by piece. */
static fattn_status upload(workload *w, char *to, int64_t count, source from, fill *write,
                           uint64_t state)
{
    enum { PIECE = 1 << 16 };
    const int64_t room = (int64_t)PIECE * 8;
    void *const piece = fattn_memory_alloc((size_t)room);
    fattn_status status = piece ? FATTN_OK : fattn_fail_memory(room, "input for a benchmark");
    for (; status == FATTN_OK && from.first < count; from.first += PIECE) {
        const int64_t left = count - from.first, n = left < PIECE ? left : PIECE;
        write(piece, n, &from, &state);
        status = fattn_device_copy(w->device, to + from.first * from.item, piece,
                                   (size_t)(n * from.item), NULL);
        if (status == FATTN_OK) {
            status = fattn_stream_synchronize(w->device, NULL);
        }
    }
    fattn_memory_free(piece);
    return status;
}

static fattn_status allocate(workload *w, int64_t bytes, char **memory)
{
    void *block = NULL;
    const fattn_status status =
        fattn_device_malloc(w->device, bytes > 0 ? (size_t)bytes : 1, &block);
    if (status == FATTN_OK) {
        w->block[w->blocks++] = block;
    }
    *memory = block;
    return status;
}

/* Rows of q and o, or of k and v with all their pages. */
static int64_t count_rows(const fattn_problem *p)
{
    return p->features & FATTN_CU_SEQLENS_Q ? p->total_q : p->batch * p->seqlen_q;
}

static int64_t count_keys(const fattn_problem *p)
{
    return p->features & FATTN_PAGED          ? p->num_pages * p->page_size
           : p->features & FATTN_CU_SEQLENS_K ? p->total_k
                                              : p->batch * p->seqlen_k;
}

/* A plan exists for the problem, so no product below exceeds 2^63. */
fattn_status workload_create(fattn_device *device, const sweep_case *c, workload *w)
{
    const fattn_problem *const p = &c->problem;
    const uint64_t f = p->features;
    const fattn_dtype real = p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_dtype dtype_o = p->dtype_o ? p->dtype_o : p->dtype;
    const fattn_dtype dtype_bias = p->dtype_bias ? p->dtype_bias : real;
    const fattn_dtype type_k = sweep_dtype_k(p), type_v = sweep_dtype_v(p);
    const bool sums = f & FATTN_ACCUMULATE;
    fill *const sum = sums ? fill_zeros : NULL; /* initial gradients */
    const int64_t rows = p->heads_q * count_rows(p), keys = p->heads_k * count_keys(p);
    const bool backward = p->op == FATTN_BACKWARD;

    /* v begins at a multiple of 256 bytes, as a separate allocation would. */
    const int64_t item_k = fattn_dtype_size(type_k), item_v = fattn_dtype_size(type_v);
    const int64_t k_bytes = (keys * p->dim * item_k + 255) / 256 * 256;
    *w = (workload){.device = device, .keys_bytes = k_bytes + keys * p->dim_v * item_v};
    fattn_buffers *const b = &w->buffers;
    *b = c->buffers;
    b->seed = f & FATTN_DROPOUT ? 1 : 0;

    const struct {
        bool wanted;
        int64_t count;
        fattn_dtype dtype; /* 0: integers of `item` bytes */
        int64_t size;
        fill *write; /* NULL: an output */
        const void **in;
        void **out;
        bool queries;
    } table[] = {
        {true, rows * p->dim, p->dtype, 0, fill_reals, &b->q, NULL, false},
        {true, keys * p->dim, type_k, 0, fill_reals, &b->k, NULL, false},
        {true, rows * p->dim_v, dtype_o, 0, NULL, NULL, &b->o, false},
        {true, rows, real, 0, NULL, NULL, &b->lse, false},
        {backward, rows * p->dim_v, dtype_o, 0, fill_reals, &b->dout, NULL, false},
        {f & FATTN_DLSE, rows, real, 0, fill_reals, &b->dlse, NULL, false},
        {backward, rows * p->dim, sums ? real : p->dtype, 0, sum, NULL, &b->dq, false},
        {backward, keys * p->dim, sums ? real : type_k, 0, sum, NULL, &b->dk, false},
        {backward, keys * p->dim_v, sums ? real : type_v, 0, sum, NULL, &b->dv, false},
        {f & FATTN_BIAS, sweep_bias_count(p), dtype_bias, 0, fill_reals, &b->bias, NULL, false},
        {p->outputs & FATTN_OUT_DBIAS, sweep_bias_count(p), real, 0, sum, NULL, &b->dbias, false},
        {f & FATTN_ALIBI, p->heads_q, real, 0, fill_slopes, &b->alibi_slopes, NULL, false},
        {f & FATTN_SINK, p->heads_q, real, 0, fill_reals, &b->sink, NULL, false},
        {f & FATTN_DESCALE, p->batch * p->heads_k, real, 0, fill_slopes, &b->k_descale, NULL,
         false},
        {f & FATTN_DESCALE, p->batch * p->heads_k, real, 0, fill_slopes, &b->v_descale, NULL,
         false},
        {p->outputs & FATTN_OUT_DSINK, p->heads_q, real, 0, sum, NULL, &b->dsink, false},
        {f & FATTN_MASK, sweep_mask_count(p), 0, 1, fill_mask, (const void **)&b->mask, NULL,
         false},
        {f & FATTN_BLOCK_MASK, f & FATTN_BLOCK_MASK ? sweep_block_count(p) : 0, 0, 1, fill_blocks,
         (const void **)&b->block_mask, NULL, false},
        {f & FATTN_CU_SEQLENS_Q, p->batch + 1, 0, 4, fill_starts, (const void **)&b->cu_seqlens_q,
         NULL, true},
        {f & FATTN_CU_SEQLENS_K, p->batch + 1, 0, 4, fill_starts, (const void **)&b->cu_seqlens_k,
         NULL, false},
        {f & FATTN_SEQUSED_Q, p->batch, 0, 4, fill_used, (const void **)&b->seqused_q, NULL, true},
        {f & FATTN_SEQUSED_K, p->batch, 0, 4, fill_used, (const void **)&b->seqused_k, NULL, false},
        {f & FATTN_SEQSTART_K, p->batch, 0, 4, fill_first, (const void **)&b->seqstart_k, NULL,
         false},
        {f & FATTN_PAGED, p->num_pages, 0, 4, fill_pages, (const void **)&b->block_table, NULL,
         false},
        {c->places[SWEEP_Q_OFFSETS], p->batch, 0, 8, fill_q_offsets, (const void **)&b->q_offsets,
         NULL, false},
        {c->places[SWEEP_K_OFFSETS], p->batch, 0, 8, fill_k_offsets, (const void **)&b->k_offsets,
         NULL, false},
        {c->places[SWEEP_WHOLES_Q], p->batch, 0, 8, fill_wholes_q, (const void **)&b->wholes_q,
         NULL, false},
        {c->places[SWEEP_WHOLES_K], p->batch, 0, 8, fill_wholes_k, (const void **)&b->wholes_k,
         NULL, false},
    };
    _Static_assert(sizeof table / sizeof table[0] <= WORKLOAD_BLOCKS, "room for every operand");
    char *v = NULL;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (!table[i].wanted) {
            continue;
        }
        char *memory;
        const source from = {.of = c,
                             .dtype = table[i].dtype,
                             .item =
                                 table[i].dtype ? fattn_dtype_size(table[i].dtype) : table[i].size,
                             .queries = table[i].queries,
                             .paged = f & FATTN_PAGED && !table[i].queries};
        const bool is_k = table[i].in == &b->k;
        fattn_status status =
            allocate(w, is_k ? w->keys_bytes : table[i].count * from.item, &memory);
        if (status == FATTN_OK && table[i].write) {
            status = upload(w, memory, table[i].count, from, table[i].write, seed);
        }
        if (status != FATTN_OK) {
            return status;
        }
        v = is_k ? memory + k_bytes : v; /* in the same allocation */
        if (table[i].in) {
            *table[i].in = memory;
        } else {
            *table[i].out = memory;
        }
    }
    b->v = v;
    return upload(w, v, keys * p->dim_v, (source){.of = c, .dtype = type_v, .item = item_v},
                  fill_reals, seed_v);
}

void workload_free(workload *w)
{
    while (w->blocks > 0) {
        fattn_device_free(w->device, w->block[--w->blocks]);
    }
}
