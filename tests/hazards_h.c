/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group H: dropout and random numbers. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "core/dtype.h"
#include "tests/hazard.h"

static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};

/* Number of queries and keys, and D: several tiles of any kernel. */
enum { LENGTH = 144, CHANNELS = 64, MASK = 2 * 2 * LENGTH * LENGTH };

static draw_case dropping(fattn_op op, fattn_dtype dtype, double p)
{
    draw_case c = hazard_case(op, dtype, 2, 2, 2, LENGTH, LENGTH, CHANNELS);
    c.problem.features = FATTN_DROPOUT;
    c.problem.dropout_p = p;
    c.seed_value = UINT64_C(0x0123456789abcdef), c.offset_value = UINT64_C(0xfedcba9876543210);
    return c;
}

static void h1(void)
{
    static const double probabilities[] = {0, 1e-9, 0.1, 0.5, 0.9, 0.99999999, 1};
    EACH (o, ops) {
        EACH (p, probabilities) {
            EACH (t, dtypes) {
                draw_case c = hazard_case(ops[o], dtypes[t], 2, 4, 2, 37, 69, 16);
                c.problem.features = FATTN_DROPOUT | FATTN_CAUSAL;
                c.problem.dropout_p = probabilities[p];
                hazard_judge_drawn(&c, 2, "p = %g", probabilities[p]);
            }
        }
    }
    for (int n = 0; n < 6; n++) { /* a NaN is one where its pair is dropped, too */
        draw_case c = hazard_case(ops[n % 2], dtypes[n / 2], 2, 2, 2, 1, 69, 16);
        c.problem.features = FATTN_DROPOUT;
        c.problem.dropout_p = 0.5;
        if (hazard_build(&c)) {
            draw_set(&c, DRAW_Q, draw_at(&c, DRAW_Q, 1, 0, 1, 3), NAN);
            hazard_judge(&c, 2, "a query with a NaN");
        }
    }
    static const double bad[] = {-0.1, 1.0000001, NAN, INFINITY};
    EACH (p, bad) {
        draw_case c = dropping(FATTN_FORWARD, FATTN_F32, bad[p]);
        const fattn_status status = fattn_support(hazard_places[0].device, &c.problem);
        hazard_check(status == FATTN_INVALID_ARGUMENT, "p = %g: %s", bad[p],
                     fattn_status_string(status));
        draw_free(&c);
    }
}

/*
 * Inputs that reveal the mask: q = 0, so every probability is 1 / LENGTH, and row s of v has
 * 2^(s / CHANNELS) in channel s % CHANNELS and zeros elsewhere. o[i][c] is then a sum of powers of
 * 2, one for each kept key among c, c + CHANNELS .., times a factor. In backward dO is that matrix,
 * and dv[j] shows which queries are kept.
 */
static void expose_mask(draw_case *c)
{
    static const draw_id tensors[] = {DRAW_Q, DRAW_V, DRAW_DOUT};
    EACH (t, tensors) {
        for (int64_t n = 0; c->tensors[tensors[t]].present && n < 4 * LENGTH * CHANNELS; n++) {
            const int64_t d = n % CHANNELS, s = n / CHANNELS % LENGTH;
            const int64_t h = n / CHANNELS / LENGTH % 2, b = n / CHANNELS / LENGTH / 2;
            const bool on = t > 0 && s % CHANNELS == d;
            draw_set(c, tensors[t], draw_at(c, tensors[t], b, s, h, d),
                     on ? ldexp(1, (int)(s / CHANNELS)) : 0);
        }
    }
}

static bool kept(const draw_case *c, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const bool forward = c->problem.op == FATTN_FORWARD;
    const draw_id id = forward ? DRAW_O : DRAW_DV;
    const int64_t shown = forward ? j : i;
    const double sum = draw_get(c, id, draw_at(c, id, b, forward ? i : j, h, shown % CHANNELS));
    return lround(sum * LENGTH * (1 - c->problem.dropout_p)) >> shown / CHANNELS & 1;
}

/* The mask that a place uses, [2][2][LENGTH][LENGTH]; NULL if it declines. */
static uint8_t *mask_of(const place *at, fattn_op op, fattn_dtype dtype, double p, uint64_t offset)
{
    draw_case c = dropping(op, dtype, p);
    uint8_t *mask = NULL;
    c.offset_value = offset;
    if (hazard_build(&c) && hazard_takes(at, &c)) {
        expose_mask(&c);
        hazard_check(draw_save(&c) == FATTN_OK, "%s", fattn_last_reason());
        hazard_check(hazard_run(at, &c, NULL) == FATTN_OK, "%s", fattn_last_reason());
        mask = malloc(MASK);
        for (int64_t n = 0; mask != NULL && n < MASK; n++) {
            mask[n] = kept(&c, n / (2 * LENGTH * LENGTH), n / (LENGTH * LENGTH) % 2,
                           n / LENGTH % LENGTH, n % LENGTH);
        }
    }
    draw_free(&c);
    return mask;
}

/* The definition, by the oracle's own Philox. */
static uint8_t *mask_defined(const fattn_dropout_args *a)
{
    const size_t size = (size_t)(a->batch * a->heads * a->seqlen_q * a->seqlen_k);
    uint8_t *const mask = malloc(size);
    uint32_t key[2];
    fattn_naive_dropout_key(a->seed, a->offset, key);
    const int64_t threshold = fattn_naive_dropout_threshold(a->p);
    for (int64_t n = 0; mask != NULL && n < (int64_t)size; n++) {
        const int64_t j = n % a->seqlen_k, i = n / a->seqlen_k % a->seqlen_q;
        const int64_t h = n / a->seqlen_k / a->seqlen_q % a->heads;
        const int64_t b = n / a->seqlen_k / a->seqlen_q / a->heads;
        mask[n] = fattn_naive_dropout(key, threshold, b + a->batch_offset, h + a->head_offset,
                                      i + a->q_offset, j + a->k_offset) != 0;
    }
    return mask;
}

/* Whether the row takes such a dropout problem; then it must reveal its mask. */
static bool drops(const fattn_kernel *row, fattn_op op, fattn_dtype dtype)
{
    return row->ops & FATTN_OP_BIT(op) && row->dtypes & FATTN_DTYPE_BIT(dtype) &&
           row->features & FATTN_DROPOUT && (row->rows_max == 0 || row->rows_max >= LENGTH);
}

static void h2(void)
{
    const fattn_dropout_args args = {.struct_size = sizeof args,
                                     .batch = 2,
                                     .heads = 2,
                                     .seqlen_q = LENGTH,
                                     .seqlen_k = LENGTH,
                                     .p = 0.3,
                                     .seed = UINT64_C(0x0123456789abcdef),
                                     .offset = 77};
    uint8_t *const defined = mask_defined(&args);
    int taken[2] = {0, 0};
    for (int n = 0; defined != NULL && n < hazard_place_count; n++) {
        for (int m = 0; m < 6; m++) {
            const int o = m % 2, t = m / 2;
            uint8_t *const mask =
                mask_of(&hazard_places[n], ops[o], dtypes[t], args.p, args.offset);
            taken[o] += mask != NULL;
            hazard_check(mask != NULL || !drops(hazard_places[n].kernel, ops[o], dtypes[t]),
                         "%s: no mask of %s in %s", hazard_places[n].kernel->name,
                         o == 0 ? "forward" : "backward", fattn_dtype_name(dtypes[t]));
            hazard_check(mask == NULL || memcmp(mask, defined, MASK) == 0,
                         "%s: the mask of %s in %s is another one", hazard_places[n].kernel->name,
                         o == 0 ? "forward" : "backward", fattn_dtype_name(dtypes[t]));
            free(mask);
        }
    }
    hazard_check(taken[0] > 0 && taken[1] > 0, "no row drops out");
    free(defined);
}

/* The first that the place takes. */
static fattn_dtype dtype_of(const place *at)
{
    return at->kernel->dtypes & FATTN_DTYPE_BIT(FATTN_F32) ? FATTN_F32 : FATTN_BF16;
}

/* Another offset gives another mask, the same one the same: about p of the entries differ. */
static void h3(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        const fattn_dtype dtype = dtype_of(&hazard_places[n]);
        uint8_t *const first = mask_of(&hazard_places[n], FATTN_FORWARD, dtype, 0.5, 5);
        uint8_t *const again = mask_of(&hazard_places[n], FATTN_FORWARD, dtype, 0.5, 5);
        uint8_t *const next = mask_of(&hazard_places[n], FATTN_FORWARD, dtype, 0.5, 6);
        if (first != NULL && again != NULL && next != NULL) {
            int64_t differ = 0, dropped = 0;
            for (int64_t m = 0; m < MASK; m++) {
                differ += first[m] != next[m];
                dropped += !first[m];
            }
            const double share = (double)differ / MASK;
            hazard_check(memcmp(first, again, MASK) == 0, "%s: not reproducible",
                         hazard_places[n].kernel->name);
            hazard_check(fabs(share - 0.5) < 0.05 && fabs((double)dropped / MASK - 0.5) < 0.05,
                         "%s: %g of the mask differs at the next offset, %lld dropped",
                         hazard_places[n].kernel->name, share, (long long)dropped);
        }
        free(first);
        free(again);
        free(next);
    }
}

/* seed and offset by value and by pointer give the same bits; a plan reads the pointers in each
 * run. */
static void h4(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        draw_case c = dropping(FATTN_FORWARD, dtype_of(&hazard_places[n]), 0.4);
        if (!hazard_build(&c) || !hazard_takes(&hazard_places[n], &c)) {
            draw_free(&c);
            continue;
        }
        uint64_t seed = c.seed_value, offset = c.offset_value;
        fattn_plan *plan = NULL;
        hazard_check(fattn_plan_create_with(hazard_places[n].device, &c.problem,
                                            hazard_places[n].kernel->name, NULL,
                                            &plan) == FATTN_OK &&
                         hazard_execute(plan, &c.buffers) == FATTN_OK,
                     "%s", fattn_last_reason());
        unsigned char *const o = hazard_copy(&c, DRAW_O);
        c.buffers.seed = c.buffers.offset = 0;
        c.buffers.seed_ptr = &seed, c.buffers.offset_ptr = &offset;
        for (int step = 0; step < 3; step++) {
            offset = c.offset_value + (uint64_t)(step % 2);
            hazard_check(hazard_execute(plan, &c.buffers) == FATTN_OK, "%s", fattn_last_reason());
            hazard_check(hazard_equals(&c, DRAW_O, o) == (step % 2 == 0),
                         "%s: a pointer to offset + %d", hazard_places[n].kernel->name, step % 2);
        }
        fattn_plan_destroy(plan);
        free(o);
        draw_free(&c);
    }
}

/* fattn_dropout_mask, whose output is in device memory, copied to `bytes` on the host. */
static fattn_status dropout_mask(fattn_device *device, const fattn_dropout_args *args,
                                 uint8_t *bytes, size_t size)
{
    fattn_dropout_args a = *args;
    void *memory = NULL;
    fattn_status status = fattn_device_malloc(device, size, &memory);
    a.keep = memory;
    status = status ? status : fattn_device_copy(device, memory, bytes, size, NULL);
    status = status ? status : fattn_dropout_mask(device, &a, NULL);
    status = status ? status : fattn_device_copy(device, bytes, memory, size, NULL);
    status = status ? status : fattn_stream_synchronize(device, NULL);
    fattn_device_free(device, memory);
    return status;
}

/* fattn_dropout_mask of every backend matches the definition, for any rectangle. */
static void h6(void)
{
    draw_rng rng = draw_stream(6, 6, 6);
    for (int round = 0; round < 60; round++) {
        fattn_dropout_args a = {.struct_size = sizeof a};
        a.batch = draw_between(&rng, 0, 2), a.heads = draw_between(&rng, 1, 3);
        a.seqlen_q = draw_between(&rng, 1, 70), a.seqlen_k = draw_between(&rng, 1, 70);
        a.batch_offset = draw_between(&rng, 0, 9), a.head_offset = draw_between(&rng, 0, 9);
        a.q_offset = draw_chance(&rng, 3) ? INT64_C(5000000001) : draw_between(&rng, 0, 50);
        a.k_offset = draw_chance(&rng, 3) ? INT64_C(5000000007) : draw_between(&rng, 0, 50);
        a.p = draw_unit(&rng);
        a.seed = draw_bits(&rng), a.offset = draw_bits(&rng);
        const size_t size = (size_t)(a.batch * a.heads * a.seqlen_q * a.seqlen_k);
        uint8_t *const defined = mask_defined(&a), *const mask = malloc(size + 1);
        for (int n = 0; mask != NULL && n < hazard_place_count; n++) {
            memset(mask, 0xee, size + 1);
            hazard_check(dropout_mask(hazard_places[n].device, &a, mask, size + 1) == FATTN_OK,
                         "%s", fattn_last_reason());
            hazard_check(memcmp(mask, defined, size) == 0 && mask[size] == 0xee,
                         "%s: round %d: not the definition", hazard_places[n].backend, round);
        }
        free(defined);
        free(mask);
    }
    /* Kernels use the same mask, across splits of batch, heads, rows and keys. */
    for (int64_t shift = 0; shift < 40; shift += 13) {
        for (int m = 0; m < 6; m++) {
            draw_case c = hazard_case(ops[m % 2], dtypes[m / 2], 2, 2, 1, 35, 41, 8);
            c.problem.features = FATTN_DROPOUT | FATTN_POSITIONS;
            c.problem.dropout_p = 0.5;
            c.problem.batch_offset = shift, c.problem.head_offset = 2 * shift;
            for (int b = 0; b < 2; b++) {
                c.sequences[b].q_offset = shift, c.sequences[b].k_offset = 3 * shift;
            }
            hazard_judge_drawn(&c, 3, "shift %lld", (long long)shift);
        }
    }
}

static const hazard table[] = {
    {"hazard_H1", "backward was wrong with dropout", h1, NULL},
    {"hazard_H2", "forward and backward dropped different entries", h2, NULL},
    {"hazard_H3", "the same mask at every call", h3, NULL},
    {"hazard_H4", "a wild pointer to the generator's state", h4, NULL},
    {"hazard_H6", "the mask depended on tiles, backend or batch split", h6, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
