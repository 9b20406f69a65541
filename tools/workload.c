/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs for benchmarks; see workload.h. */
#include "tools/workload.h"

#include <string.h>

#include "core/dtype.h"
#include "core/memory.h"
#include "core/status.h"

/* xorshift64*: fast, and good enough for numbers that nobody looks at. */
static uint64_t draw(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

typedef void fill(void *to, int64_t count, fattn_dtype dtype, uint64_t *state);

static void fill_reals(void *to, int64_t count, fattn_dtype dtype, uint64_t *state)
{
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)(int64_t)draw(state) * 0x1p-63;
        if (dtype == FATTN_F32) {
            ((float *)to)[i] = (float)x;
        } else {
            fattn_dtype_store(dtype, to, i, x);
        }
    }
}

static void fill_slopes(void *to, int64_t count, fattn_dtype dtype, uint64_t *state)
{
    (void)state;
    for (int64_t i = 0; i < count; i++) {
        fattn_dtype_store(dtype, to, i, 1.0 / (double)(i + 1));
    }
}

/* Seven of eight are kept. */
static void fill_mask(void *to, int64_t count, fattn_dtype dtype, uint64_t *state)
{
    (void)dtype;
    for (int64_t i = 0; i < count; i++) {
        ((uint8_t *)to)[i] = draw(state) >> 61 != 0;
    }
}

/* Copies what fill writes to device memory, a piece at a time. */
static fattn_status upload(workload *w, char *to, int64_t count, int64_t item, fattn_dtype dtype,
                           fill *write)
{
    enum { PIECE = 1 << 16 };
    const int64_t room = (int64_t)PIECE * 8;
    void *const piece = fattn_memory_alloc((size_t)room);
    uint64_t state = UINT64_C(0x9e3779b97f4a7c15);
    fattn_status status = piece ? FATTN_OK : fattn_fail_memory(room, "input for a benchmark");
    for (int64_t i = 0; status == FATTN_OK && i < count; i += PIECE) {
        const int64_t n = count - i < PIECE ? count - i : PIECE;
        write(piece, n, dtype, &state);
        status = fattn_device_copy(w->device, to + i * item, piece, (size_t)(n * item), NULL);
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

/* The plan was made before, so no product below passes 2^63. */
fattn_status workload_create(fattn_device *device, const sweep_case *c, workload *w)
{
    const fattn_problem *const p = &c->problem;
    const int64_t item = fattn_dtype_size(p->dtype);
    const fattn_dtype real = p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const int64_t real_item = fattn_dtype_size(real);
    const int64_t rows = p->batch * p->heads_q * p->seqlen_q,
                  keys = p->batch * p->heads_k * p->seqlen_k;
    const bool backward = p->op == FATTN_BACKWARD;

    /* v begins at a multiple of 256 bytes, as an allocation of its own would. */
    const int64_t k_bytes = (keys * p->dim * item + 255) / 256 * 256;
    *w = (workload){.device = device, .keys_bytes = k_bytes + keys * p->dim_v * item};
    fattn_buffers *const b = &w->buffers;
    fattn_buffers_init(b);
    b->seed = p->features & FATTN_DROPOUT ? 1 : 0;

    const struct {
        bool wanted;
        int64_t count, item;
        fattn_dtype dtype;
        fill *write; /* NULL: an output */
        const void **in;
        void **out;
    } table[] = {
        {true, rows * p->dim, item, p->dtype, fill_reals, &b->q, NULL},
        {true, w->keys_bytes / item, item, p->dtype, fill_reals, &b->k, NULL},
        {true, rows * p->dim_v, item, p->dtype, NULL, NULL, &b->o},
        {true, rows, real_item, real, NULL, NULL, &b->lse},
        {backward, rows * p->dim_v, item, p->dtype, fill_reals, &b->dout, NULL},
        {backward, rows * p->dim, item, p->dtype, NULL, NULL, &b->dq},
        {backward, keys * p->dim, item, p->dtype, NULL, NULL, &b->dk},
        {backward, keys * p->dim_v, item, p->dtype, NULL, NULL, &b->dv},
        {c->bias, sweep_bias_count(p), real_item, real, fill_reals, &b->bias, NULL},
        {c->alibi, p->heads_q, real_item, real, fill_slopes, &b->alibi_slopes, NULL},
        {c->mask, sweep_mask_count(p), 1, 0, fill_mask, (const void **)&b->mask, NULL},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (!table[i].wanted) {
            continue;
        }
        char *memory;
        fattn_status status = allocate(w, table[i].count * table[i].item, &memory);
        if (status == FATTN_OK && table[i].write) {
            status =
                upload(w, memory, table[i].count, table[i].item, table[i].dtype, table[i].write);
        }
        if (status != FATTN_OK) {
            return status;
        }
        if (table[i].in) {
            *table[i].in = memory;
        } else {
            *table[i].out = memory;
        }
    }
    b->v = (const char *)b->k + k_bytes;
    return FATTN_OK;
}

void workload_free(workload *w)
{
    while (w->blocks > 0) {
        fattn_device_free(w->device, w->block[--w->blocks]);
    }
}
