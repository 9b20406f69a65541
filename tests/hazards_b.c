/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hazards of group B: index width, sizes and launch limits. A tensor that spans more than 2^31
 * elements occupies a few pages of a reserved range of addresses: huge strides, few elements,
 * little memory.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */

#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include "core/dtype.h"
#include "tests/hazard.h"

#define FAR (INT64_C(1) << 31)

__extension__ typedef __int128 wide;

/* -------------------------------------------------------------------------------------------------
 * Far strides
 * ---------------------------------------------------------------------------------------------- */

static void point_strides(draw_case *c, draw_id id)
{
    fattn_problem *const p = &c->problem;
    const int64_t *const s = c->tensors[id].stride;
    const fattn_strides strides = {.batch = s[0], .seq = s[1], .head = s[2]};
    switch (id) {
    case DRAW_Q: p->q = strides; break;
    case DRAW_K: p->k = strides; break;
    case DRAW_V: p->v = strides; break;
    case DRAW_O: p->o = strides; break;
    case DRAW_DOUT: p->dout = strides; break;
    case DRAW_DQ: p->dq = strides; break;
    case DRAW_DK: p->dk = strides; break;
    case DRAW_DV: p->dv = strides; break;
    case DRAW_BIAS: memcpy(p->bias_stride, s, sizeof p->bias_stride); break;
    case DRAW_MASK: memcpy(p->mask_stride, s, sizeof p->mask_stride); break;
    case DRAW_DBIAS: memcpy(p->dbias_stride, s, sizeof p->dbias_stride); break;
    default: break;
    }
}

/* Moves an operand to its own range of addresses, with this stride along `axis`. Returns false,
 * with the operand unchanged, if the machine cannot reserve the addresses. */
static bool stretch(draw_case *c, draw_id id, int axis, int64_t stride)
{
    draw_tensor *const t = &c->tensors[id];
    const draw_tensor old = *t;
    const int64_t *const e = t->extent;
    t->stride[axis] = stride;
    int64_t last = 0;
    for (int a = 0; a < 4; a++) {
        last += (e[a] - 1) * t->stride[a];
    }
    const size_t bytes = (size_t)((last + 1) * t->size) + 4096;
    void *const memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        *t = old;
        return false;
    }
    const unsigned char *const from = c->images[old.image].bytes + old.offset;
    t->image = c->image_count++;
    t->offset = 0;
    c->images[t->image] = (draw_image){
        .bytes = memory, .size = (int64_t)bytes, .output = c->images[old.image].output};
    for (int64_t n = 0; n < e[0] * e[1] * e[2] * e[3]; n++) {
        const int64_t at[4] = {n / (e[1] * e[2] * e[3]), n / (e[2] * e[3]) % e[1], n / e[3] % e[2],
                               n % e[3]};
        int64_t source = 0, target = 0;
        for (int a = 0; a < 4; a++) {
            source += at[a] * old.stride[a], target += at[a] * t->stride[a];
        }
        memcpy((unsigned char *)memory + target * t->size, from + source * t->size,
               (size_t)t->size);
    }
    draw_point(&c->buffers, id, memory);
    point_strides(c, id);
    return true;
}

static void drop(draw_case *c, int images)
{
    for (int n = images; n < c->image_count; n++) {
        munmap(c->images[n].bytes, (size_t)c->images[n].size);
        c->images[n].bytes = NULL;
    }
    draw_free(c);
}

static bool equal_outputs(const draw_case *a, const draw_case *b)
{
    const bool forward = a->problem.op == FATTN_FORWARD;
    for (int id = forward ? DRAW_O : DRAW_DQ; id <= (forward ? DRAW_LSE : DRAW_DSINK); id++) {
        const int64_t *const e = a->tensors[id].extent;
        for (int64_t n = 0; a->tensors[id].present && n < e[0] * e[1] * e[2] * e[3]; n++) {
            int64_t at[4] = {n / (e[1] * e[2] * e[3]), n / (e[2] * e[3]) % e[1], n / e[3] % e[2],
                             n % e[3]};
            int64_t x = 0, y = 0;
            for (int axis = 0; axis < 4; axis++) {
                x += at[axis] * a->tensors[id].stride[axis];
                y += at[axis] * b->tensors[id].stride[axis];
            }
            if (draw_get(a, (draw_id)id, x) != draw_get(b, (draw_id)id, y)) {
                return false;
            }
        }
    }
    return true;
}

/* Two built copies of one case, the second stretched along `axis` of one operand: the same bits. */
static void compare_stretched(draw_case *near, draw_case *far, draw_id id, int axis, int64_t stride)
{
    const int images = far->image_count;
    hazard_check(draw_save(near) == FATTN_OK && draw_save(far) == FATTN_OK, "%s",
                 fattn_last_reason());
    if (hazard_check(stretch(far, id, axis, stride), "no addresses for %s", draw_name(id))) {
        for (int n = 0; n < hazard_place_count; n++) {
            if (!hazard_takes(&hazard_places[n], near)) {
                continue;
            }
            const fattn_status a = hazard_run(&hazard_places[n], near, NULL);
            const fattn_status b = hazard_run(&hazard_places[n], far, NULL);
            hazard_check(a == FATTN_OK && b == FATTN_OK && equal_outputs(near, far),
                         "%s: %s with stride %lld along axis %d: %s", hazard_places[n].kernel->name,
                         draw_name(id), (long long)stride, axis, fattn_last_reason());
        }
    }
    drop(far, images);
    draw_free(near);
}

static draw_case strided(fattn_op op, uint64_t features)
{
    draw_case c = hazard_case(op, FATTN_F32, 3, 2, 2, 5, 7, 8);
    c.problem.layout = FATTN_STRIDED;
    c.problem.features = features;
    c.problem.outputs |= op == FATTN_FORWARD ? 0
                         : features & FATTN_BIAS
                             ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS
                             : 0;
    hazard_build(&c);
    return c;
}

static void stretch_each(fattn_op op, uint64_t features, const draw_id ids[], int count, int axes,
                         int64_t reach)
{
    for (int n = 0; n < count; n++) {
        for (int axis = 0; axis < axes; axis++) {
            draw_case near = strided(op, features), far = strided(op, features);
            const int64_t stride = reach / (near.tensors[ids[n]].extent[axis] - 1) + 1;
            compare_stretched(&near, &far, ids[n], axis, stride);
        }
    }
}

static void b1(void)
{
    static const draw_id forward[] = {DRAW_Q, DRAW_K, DRAW_V, DRAW_O};
    static const draw_id backward[] = {DRAW_O, DRAW_DOUT, DRAW_DQ, DRAW_DK, DRAW_DV};
    stretch_each(FATTN_FORWARD, 0, forward, 4, 3, FAR);
    stretch_each(FATTN_BACKWARD, 0, backward, 5, 3, FAR);
}

static void b4(void)
{
    static const draw_id dout[] = {DRAW_DOUT};
    stretch_each(FATTN_BACKWARD, 0, dout, 1, 3, INT64_C(9728) * 225304);
}

static void b7(void)
{
    static const draw_id inputs[] = {DRAW_BIAS, DRAW_MASK}, outputs[] = {DRAW_DBIAS};
    stretch_each(FATTN_FORWARD, FATTN_BIAS | FATTN_MASK, inputs, 2, 4, FAR);
    stretch_each(FATTN_BACKWARD, FATTN_BIAS | FATTN_MASK, inputs, 2, 4, FAR);
    stretch_each(FATTN_BACKWARD, FATTN_BIAS, outputs, 1, 4, FAR);
}

/* The token at which the offset passes 2^31 exactly, and its neighbours. */
static void b14(void)
{
    static const draw_id ids[] = {DRAW_Q, DRAW_K, DRAW_V, DRAW_O};
    EACH (n, ids) {
        draw_case near = hazard_case(FATTN_FORWARD, FATTN_F16, 1, 1, 1, 514, 514, 4);
        draw_case far = hazard_case(FATTN_FORWARD, FATTN_F16, 1, 1, 1, 514, 514, 4);
        near.problem.layout = far.problem.layout = FATTN_STRIDED;
        if (hazard_build(&near) && hazard_build(&far)) {
            compare_stretched(&near, &far, ids[n], 1, FAR / 512);
        }
    }
}

/* Sequences that begin more than a million tokens into packed tensors. */
static void b5(void)
{
    for (int o = 0; o < 2; o++) {
        const fattn_op op = o ? FATTN_BACKWARD : FATTN_FORWARD;
        draw_case near = hazard_case(op, FATTN_F32, 2, 1, 1, 9, 9, 2);
        near.problem.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        near.lead = 1280000;
        hazard_judge_drawn(&near, -1, "1.28 million tokens");
    }
}

/* -------------------------------------------------------------------------------------------------
 * Many small ones
 * ---------------------------------------------------------------------------------------------- */

/* Whether to skip the running hazard: this many work-groups or bytes take minutes. */
static bool too_many(void)
{
    const bool many = hazard_emulated();
    if (many) {
        hazard_skip("its size is the hazard, and too large for an emulated device");
    }
    return many;
}

static void b2(void)
{
    if (too_many()) {
        return;
    }
    draw_case c = hazard_case(FATTN_BACKWARD, FATTN_F32, 15000, 1, 1, 2, 2, 4);
    c.problem.features = FATTN_CAUSAL;
    hazard_judge_drawn(&c, 0, "batch 15000");
}

static const uint16_t *bf16_of(const draw_case *c, draw_id id)
{
    const draw_tensor *const t = &c->tensors[id];
    return (const uint16_t *)(c->images[t->image].bytes + t->offset);
}

/* With one key o = v, dv = dO and dq = dk = 0, so no oracle with a gigabyte is needed. */
static void b3(void)
{
    const int64_t entries = INT64_C(8300) * 16 * 128;
    if (too_many()) {
        return;
    }
    draw_case c = hazard_case(FATTN_BACKWARD, FATTN_BF16, 8300, 16, 16, 1, 1, 128);
    c.family = DRAW_CONSTANT;
    if (!hazard_build(&c)) {
        draw_free(&c);
        return;
    }
    const draw_tensor *const o = &c.tensors[DRAW_O];
    memcpy(c.images[o->image].bytes + o->offset, bf16_of(&c, DRAW_V), (size_t)(entries * 2));
    for (int64_t n = 0; n < 8300 * 16; n++) {
        draw_set(&c, DRAW_LSE, n, 0);
    }
    const double q = draw_get(&c, DRAW_Q, 0), k = draw_get(&c, DRAW_K, 0);
    const uint16_t *const dout = bf16_of(&c, DRAW_DOUT), *const dv = bf16_of(&c, DRAW_DV),
                          *const dq = bf16_of(&c, DRAW_DQ), *const dk = bf16_of(&c, DRAW_DK),
                          tiny = fattn_bf16_from_f32(1e-20f); /* magnitudes, and NaN, in order */
    c.problem.features = FATTN_SCALE;
    c.problem.scale = 1e-30 / (q * k); /* every score is negligible, as lse shows */
    for (int n = 0; n < hazard_place_count; n++) {
        if (!hazard_takes(&hazard_places[n], &c) || hazard_places[n].kernel->by_name ||
            strcmp(hazard_places[n].backend, "reference") == 0 ||
            hazard_spares(&hazard_places[n], &c)) {
            continue;
        }
        hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                     fattn_last_reason());
        int64_t wrong = 0;
        for (int64_t at = 0; at < entries; at++) {
            wrong += dv[at] != dout[0] || (dq[at] & 0x7fff) > tiny || (dk[at] & 0x7fff) > tiny;
        }
        hazard_check(wrong == 0, "%s: %lld gradients are wrong", hazard_places[n].kernel->name,
                     (long long)wrong);
    }
    draw_free(&c);
}

static void b6(void)
{
    static const int64_t counts[] = {65535, 65536, 65537};
    if (too_many()) {
        return;
    }
    EACH (n, counts) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, counts[n], 1, 1, 1, 2, 2);
        hazard_judge_drawn(&c, -1, "batch %lld", (long long)counts[n]);
        c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, counts[n], counts[n], 1, 1, 2);
        hazard_judge_drawn(&c, -1, "%lld heads", (long long)counts[n]);
    }
}

static void b8(void)
{
    static const int64_t lengths[] = {32767, 32768, 32769};
    EACH (n, lengths) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 2, lengths[n], 2);
        hazard_judge_drawn(&c, 2, "%lld keys", (long long)lengths[n]);
        c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, 1, 1, lengths[n], 2, 2);
        hazard_judge_drawn(&c, 0, "%lld rows", (long long)lengths[n]);
    }
}

/* The stride of an axis with one entry is never used and causes no refusal. */
static void b9(void)
{
    draw_case near = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 2, 1, 6, 20, 8);
    draw_case far = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 2, 1, 6, 20, 8);
    near.problem.layout = far.problem.layout = FATTN_STRIDED;
    if (hazard_build(&near) && hazard_build(&far)) {
        const int64_t huge = INT64_C(1) << 59;
        far.problem.q.batch = far.problem.k.batch = far.problem.v.batch = far.problem.o.batch =
            huge;
        for (int n = 0; n < hazard_place_count; n++) {
            if (hazard_takes(&hazard_places[n], &near)) {
                const fattn_status a = hazard_run(&hazard_places[n], &near, NULL);
                const fattn_status b = hazard_run(&hazard_places[n], &far, NULL);
                hazard_check(a == FATTN_OK && b == FATTN_OK && equal_outputs(&near, &far), "%s: %s",
                             hazard_places[n].kernel->name, fattn_last_reason());
            }
        }
    }
    draw_free(&near);
    draw_free(&far);
}

/* -------------------------------------------------------------------------------------------------
 * Absurd sizes
 * ---------------------------------------------------------------------------------------------- */

enum { DECLINED = -2 };

/* Bytes of workspace, -1 for FATTN_OVERFLOW, or DECLINED. */
static int64_t workspace_of(const place *at, fattn_op op, int64_t batch, int64_t heads,
                            int64_t rows, int64_t keys, int64_t dim)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op, p.batch = batch, p.heads_q = p.heads_k = heads;
    p.seqlen_q = rows, p.seqlen_k = keys, p.dim = p.dim_v = dim;
    p.layout = FATTN_STRIDED;
    p.dq = p.dk = p.dv =
        (fattn_strides){.batch = rows * heads * dim, .seq = heads * dim, .head = dim};
    p.dk = p.dv = (fattn_strides){.batch = keys * heads * dim, .seq = heads * dim, .head = dim};
    p.o = p.dq;
    fattn_plan *plan = NULL;
    const fattn_wish wish = {.tile = at->kernel->tiles[0]};
    const fattn_status status =
        fattn_plan_create_with(at->device, &p, at->kernel->name, &wish, &plan);
    const int64_t bytes = status == FATTN_OK         ? plan->tiling.workspace
                          : status == FATTN_OVERFLOW ? -1
                                                     : DECLINED;
    hazard_check(status == FATTN_OK || status == FATTN_OVERFLOW || status == FATTN_UNSUPPORTED,
                 "%s: %s: %s", at->kernel->name, fattn_status_string(status), fattn_last_reason());
    fattn_plan_destroy(plan);
    return bytes;
}

/* With enough work for every thread the workspace grows linearly with the batch. So its size for a
 * large batch follows from two smaller ones in 128 bits, or it is an overflow. Sizes are rounded up
 * to 256. */
static void check_growth(const place *at, fattn_op op, int64_t heads, int64_t rows, int64_t keys,
                         int64_t dim)
{
    enum { ONE = 500000 };
    const int64_t one = workspace_of(at, op, ONE, heads, rows, keys, dim);
    const int64_t two = workspace_of(at, op, 2 * ONE, heads, rows, keys, dim);
    if (one < 0 || two < 0) {
        return;
    }
    for (int64_t batch = 4 * ONE; batch < FAR; batch *= 3) {
        const int64_t bytes = workspace_of(at, op, batch, heads, rows, keys, dim);
        if (bytes == DECLINED) {
            return;
        }
        const wide expected = one + (wide)(two - one) * (batch - ONE) / ONE;
        const wide tensor = (wide)batch * heads * (rows > keys ? rows : keys) * dim * 4;
        const bool over = expected > ((wide)1 << 62) || tensor > ((wide)1 << 62);
        const wide error = expected > bytes ? expected - bytes : bytes - expected;
        hazard_check(bytes == -1 ? over : bytes >= 0 && error <= expected / 1000 + 4096,
                     "%s: batch %lld: %lld bytes, expected about %.6g", at->kernel->name,
                     (long long)batch, (long long)bytes, (double)expected);
    }
}

static void b10(void)
{
    static const int64_t heads[] = {1, 64}, rows[] = {1, 4096, 1000000}, dims[] = {1, 64, 256};
    for (int n = 0; n < hazard_place_count; n++) {
        EACH (h, heads) {
            EACH (r, rows) {
                EACH (d, dims) {
                    check_growth(&hazard_places[n], FATTN_FORWARD, heads[h], rows[r], rows[r],
                                 dims[d]);
                    check_growth(&hazard_places[n], FATTN_BACKWARD, heads[h], rows[r], rows[r],
                                 dims[d]);
                }
            }
        }
    }
    /* Sizes that do not fit 63 bits are refused before anything else happens. */
    fattn_problem p;
    fattn_problem_init(&p);
    p.batch = p.heads_q = p.heads_k = p.seqlen_q = p.seqlen_k = FAR - 1;
    p.dim = p.dim_v = 256;
    const fattn_status status = fattn_support(hazard_places[0].device, &p);
    hazard_check(status == FATTN_OVERFLOW, "2^31 of everything: %s", fattn_status_string(status));
}

/* With one key o = v, dv = dO and dq = dk = 0. */
static void check_only_keys(const place *at, draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    const bool forward = p->op == FATTN_FORWARD;
    const draw_id got = forward ? DRAW_O : DRAW_DV, want = forward ? DRAW_V : DRAW_DOUT;
    hazard_clear_outputs(c);
    hazard_check(hazard_run(at, c, NULL) == FATTN_OK, "%s", fattn_last_reason());
    int64_t wrong = 0;
    for (int64_t n = 0; n < p->batch * p->dim; n++) {
        const bool right = fabs(draw_get(c, got, n) - draw_get(c, want, n)) <= 1e-5;
        wrong += !(right && (forward || (fabs(draw_get(c, DRAW_DQ, n)) <= 1e-5 &&
                                         fabs(draw_get(c, DRAW_DK, n)) <= 1e-5)));
    }
    hazard_check(wrong == 0, "%s, batch %lld: %lld elements of %s are wrong", at->kernel->name,
                 (long long)p->batch, (long long)wrong, draw_name(got));
}

/* Elsewhere rows were padded to 128 and channels to 32, and problems failed in which the product of
 * these and the batch was just above 2^31. Below, at and above it, without the memory of one. */
static void b13(void)
{
    enum { DIM = 4, MOST = (1 << 19) + 1 }; /* 2^19 x 128 x 32 = 2^31 */
    if (too_many()) {
        return;
    }
    for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
        draw_case c = hazard_case(op, FATTN_F32, MOST, 1, 1, 1, 1, DIM);
        const bool built = hazard_build(&c);
        for (int64_t b = 0; built && op == FATTN_BACKWARD && b < MOST; b++) {
            double x = 0;
            for (int64_t n = b * DIM; n < (b + 1) * DIM; n++) {
                x += draw_get(&c, DRAW_Q, n) * draw_get(&c, DRAW_K, n);
                draw_set(&c, DRAW_O, n, draw_get(&c, DRAW_V, n));
            }
            draw_set(&c, DRAW_LSE, b, x / 2); /* the scale is 1 / sqrt(DIM) */
        }
        for (int64_t batch = MOST - 2; built && batch <= MOST; batch++) {
            c.problem.batch = batch;
            for (int n = 0; n < hazard_place_count; n++) {
                if (strcmp(hazard_places[n].backend, "reference") != 0 &&
                    !hazard_spares(&hazard_places[n], &c) && hazard_takes(&hazard_places[n], &c)) {
                    check_only_keys(&hazard_places[n], &c);
                }
            }
        }
        draw_free(&c);
    }
}

/* 2^32 pairs of which a window keeps the diagonal. o is v, and lse the score of the diagonal, where
 * the mask, whose last entry is 4 GiB after its first, keeps it. */
static void b12(void)
{
    enum { LENGTH = 65536, KEPT = 997 };
    if (too_many()) {
        return;
    }
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, LENGTH, LENGTH, 1);
    c.problem.features = FATTN_WINDOW;
    c.problem.window_left = c.problem.window_right = 0;
    unsigned char *const mask = mmap(NULL, (size_t)LENGTH * LENGTH, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!hazard_check(mask != MAP_FAILED, "no addresses for 2^32 bytes") || !hazard_build(&c)) {
        draw_free(&c);
        return;
    }
    const int64_t strides[4] = {0, 0, LENGTH, 1};
    memcpy(c.problem.mask_stride, strides, sizeof strides);
    c.problem.features |= FATTN_MASK;
    c.buffers.mask = mask;
    for (int64_t i = 0; i < LENGTH; i += KEPT) {
        mask[i * LENGTH + i] = 1;
    }
    for (int n = 0; n < hazard_place_count; n++) {
        if (strcmp(hazard_places[n].backend, "reference") == 0 ||
            !hazard_takes(&hazard_places[n], &c)) {
            continue;
        }
        hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                     fattn_last_reason());
        int64_t wrong = 0;
        for (int64_t i = 0; i < LENGTH; i++) {
            const double o = draw_get(&c, DRAW_O, i), lse = draw_get(&c, DRAW_LSE, i);
            const double x = draw_get(&c, DRAW_Q, i) * draw_get(&c, DRAW_K, i);
            const double v = draw_get(&c, DRAW_V, i);
            const bool near =
                fabs(o - v) <= 1e-6 * fabs(v) && fabs(lse - x) <= 1e-5 * (1 + fabs(x));
            wrong += i % KEPT == 0 ? !near : o != 0 || lse != -(double)INFINITY;
        }
        hazard_check(wrong == 0, "%s: %lld rows are wrong", hazard_places[n].kernel->name,
                     (long long)wrong);
    }
    munmap(mask, (size_t)LENGTH * LENGTH);
    draw_free(&c);
}

static const hazard table[] = {
    {"hazard_B1", "32-bit offsets into tensors above 2^31 elements", b1, NULL},
    {"hazard_B2", "offsets into partial gradients overflowed with the batch", b2, NULL},
    {"hazard_B3", "a product was taken in 32 bits before it was widened", b3, NULL},
    {"hazard_B4", "dO with an outer stride above 2^31 corrupted gradients", b4, NULL},
    {"hazard_B5", "packed tensors of a million tokens", b5, NULL},
    {"hazard_B6", "more than 65535 heads: the launch failed unnoticed", b6, NULL},
    {"hazard_B7", "offsets into bias and mask were cut to 32 bits", b7, NULL},
    {"hazard_B8", "NaN for lengths around 2^15", b8, NULL},
    {"hazard_B9", "a guard refused an unused batch stride", b9, NULL},
    {"hazard_B10", "the workspace's size overflowed", b10, NULL},
    {"hazard_B11", "rows times columns overflowed int on a CPU", NULL,
     "no size is an int here: the sanitizer stage runs B1 to B14 under UBSan"},
    {"hazard_B12", "the index of a score overflowed", b12, NULL},
    {"hazard_B13", "a padded product failed just above 2^31", b13, NULL},
    {"hazard_B14", "token times stride passed 2^31 in the middle of a tensor", b14, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
