/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hazards of group M: failures of the tests themselves. Here the judge is tested: a backend that
 * wraps the oracle corrupts one thing after another in its results, and the judge must notice each.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/problem.h"
#include "tests/hazard.h"
#include "tests/strip.h"

/* -------------------------------------------------------------------------------------------------
 * A backend that can be told to err
 * ---------------------------------------------------------------------------------------------- */

typedef void spoiler(const fattn_plan *plan, const fattn_buffers *buffers, char *workspace);

static const fattn_backend *honest;
static const fattn_kernel *honest_row;
static fattn_backend spoilt;
static spoiler *spoil;

static fattn_status run_spoilt(const fattn_plan *plan, const fattn_buffers *buffers,
                               void *workspace, fattn_stream stream)
{
    fattn_plan own = *plan;
    own.kernel = honest_row; /* may be embedded in a larger struct */
    const fattn_status status = honest->run(&own, buffers, workspace, stream);
    if (status == FATTN_OK && spoil != NULL) {
        spoil(plan, buffers, workspace);
    }
    return status;
}

/* A workspace, so that a test can write outside it. */
static int64_t some_workspace(const fattn_kernel *row, const fattn_problem *problem,
                              const fattn_tiling *tiling)
{
    (void)row, (void)problem;
    (void)tiling;
    return 512;
}

static fattn_kernel spoilt_row;

static const fattn_kernel *only_row(void *impl, int i, const char **missing)
{
    (void)impl;
    *missing = NULL;
    return i == 0 ? &spoilt_row : NULL;
}

static fattn_device spoilt_device(fattn_device *reference)
{
    const char *missing = NULL;
    honest = reference->backend;
    honest_row = honest->kernel(reference->impl, 0, &missing);
    spoilt_row = *honest_row;
    spoilt_row.workspace = some_workspace;
    spoilt = *honest;
    spoilt.run = run_spoilt;
    spoilt.kernel = only_row;
    return (fattn_device){.backend = &spoilt, .impl = reference->impl, .references = 1};
}

static fattn_device *open_reference(void)
{
    fattn_device *device = NULL;
    hazard_check(fattn_device_open("reference", &device) == FATTN_OK, "%s", fattn_last_reason());
    return device;
}

/* The judge's verdict on a run corrupted in this way; its reason is in *v. */
static judge_outcome judge_spoilt(draw_case *c, spoiler *how, judge_verdict *v)
{
    fattn_device *const reference = open_reference();
    judge_truth truth = {0};
    memset(v, 0, sizeof *v);
    if (reference != NULL && draw_save(c) == FATTN_OK) {
        fattn_device device = spoilt_device(reference);
        spoil = how;
        judge_run(&device, &spoilt_row, c, &truth, v);
        spoil = NULL;
        hazard_check(device.references == 1, "a plan kept its device");
    }
    judge_truth_free(&truth);
    fattn_device_close(reference);
    return v->outcome;
}

/* Elements to corrupt: the first row of the first head of o, lse, dv. */
static float *first_o(const fattn_buffers *buffers) { return buffers->o; }

static void spoil_nan(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    first_o(b)[1] = NAN;
}

static void spoil_infinity(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    first_o(b)[1] = INFINITY;
}

static void spoil_number(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    for (int64_t n = 0; n < p->problem.seqlen_q * p->problem.dim_v; n++) {
        first_o(b)[n] = isfinite(first_o(b)[n]) ? first_o(b)[n] : 0;
    }
}

static void spoil_slightly(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    first_o(b)[1] += 2e-5f;
}

static void spoil_zeros(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)w;
    memset(b->o, 0, (size_t)(p->problem.seqlen_q * p->problem.dim_v) * sizeof(float));
}

static void spoil_unwritten(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    memset(first_o(b) + 3, 0xff, sizeof(float));
}

static void spoil_before(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    ((unsigned char *)b->o)[-1] ^= 1;
}

static void spoil_after(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)w;
    ((unsigned char *)b->o)[p->problem.seqlen_q * p->problem.dim_v * 4] ^= 1;
}

static void spoil_lse(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    ((float *)b->lse)[0] += 1e-4f;
}

static void spoil_lse_class(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    ((float *)b->lse)[0] = -INFINITY;
}

static void spoil_input(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    float *q;
    memcpy(&q, &b->q, sizeof q); /* a kernel that writes where it should read */
    q[0] += 1;
}

static void spoil_workspace_after(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)b;
    w[512] ^= 1;
}

static void spoil_workspace_before(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)b;
    w[-1] ^= 1;
}

static void spoil_by_workspace(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p;
    first_o(b)[1] +=
        w[0] == 0x3c ? 1e-7f : 0; /* within the bound, but it depends on the workspace's contents */
}

static void spoil_gradient(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)p, (void)w;
    ((float *)b->dv)[1] *= 1.001f;
}

static void spoil_gradient_row(const fattn_plan *p, const fattn_buffers *b, char *w)
{
    (void)w;
    memset(b->dk, 0, (size_t)p->problem.dim * sizeof(float));
}

/* -------------------------------------------------------------------------------------------------
 * The judge
 * ---------------------------------------------------------------------------------------------- */

static draw_case ordinary(fattn_op op)
{
    draw_case c = hazard_case(op, FATTN_F32, 1, 1, 1, 9, 21, 8);
    c.twice = true;
    hazard_build(&c);
    return c;
}

typedef struct mutation {
    spoiler *how;
    const char *what, *words; /* words that the judge's reason must contain */
} mutation;

static void check_noticed(fattn_op op, const mutation mutations[], size_t count)
{
    judge_verdict v;
    draw_case c = ordinary(op);
    hazard_check(judge_spoilt(&c, NULL, &v) == JUDGE_PASSED, "an honest run fails: %s", v.reason);
    draw_free(&c);
    for (size_t m = 0; m < count; m++) {
        c = ordinary(op);
        const judge_outcome outcome = judge_spoilt(&c, mutations[m].how, &v);
        hazard_check(outcome == JUDGE_FAILED, "%s: not noticed", mutations[m].what);
        hazard_check(strstr(v.reason, mutations[m].words) != NULL, "%s: \"%s\"", mutations[m].what,
                     v.reason);
        draw_free(&c);
    }
}

/* NaN where the oracle has a number, and a number where it has NaN. */
static void m1(void)
{
    static const mutation mutations[] = {
        {spoil_nan, "a NaN in o", "o[0,0,0,1] is NaN"},
        {spoil_infinity, "an infinity in o", "o[0,0,0,1] is inf"},
        {spoil_lse_class, "an empty row", "lse[0,0,0,0] is -inf"},
    };
    check_noticed(FATTN_FORWARD, mutations, sizeof mutations / sizeof *mutations);
    judge_verdict v;
    for (int what = 0; what < 2; what++) {
        draw_case c = ordinary(FATTN_FORWARD);
        c.family = DRAW_WILD;
        draw_set(&c, DRAW_Q, draw_at(&c, DRAW_Q, 0, 4, 0, 2), NAN);
        const judge_outcome outcome = judge_spoilt(&c, what ? spoil_number : NULL, &v);
        hazard_check(outcome == (what ? JUDGE_FAILED : JUDGE_PASSED), "NaN expected, %s: %s",
                     what ? "a number given" : "NaN given", v.reason);
        draw_free(&c);
    }
}

/* Errors just above the bound in o, lse and gradients; and bytes that must not change. */
static void m2(void)
{
    static const mutation forward[] = {
        {spoil_slightly, "2e-5 in one element", "o[0,0,0,1]"},
        {spoil_lse, "1e-4 in one lse", "lse[0,0,0]"},
        {spoil_unwritten, "an element that was not written", "was not written"},
        {spoil_before, "a byte before o", "o: byte"},
        {spoil_after, "a byte after o", "o: byte"},
        {spoil_input, "an input", "q: byte"},
        {spoil_workspace_after, "a byte after the workspace", "byte after"},
        {spoil_workspace_before, "a byte before the workspace", "byte before"},
        {spoil_by_workspace, "a result that depends on the workspace", "between two runs"},
    };
    static const mutation backward[] = {
        {spoil_gradient, "a thousandth in one gradient", "dv[0,0,0,1]"},
        {spoil_gradient_row, "a row of zeros in a gradient", "dk[0,0,0"},
    };
    check_noticed(FATTN_FORWARD, forward, sizeof forward / sizeof *forward);
    check_noticed(FATTN_BACKWARD, backward, sizeof backward / sizeof *backward);
}

/* Every dtype and op of each row is drawn. */
static void m3(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        const fattn_kernel *const row = hazard_places[n].kernel;
        uint32_t seen = 0;
        /* Few problems have a cache of a type that some rows take alone. */
        const int64_t cases = row->caches_alone ? 30000 : 1500;
        for (int64_t index = 0; index < cases; index++) {
            draw_case c;
            fattn_problem p;
            char text[256];
            if (draw_problem(&c, 1, index) == 0) {
                p = c.problem;
                p.layout = FATTN_BSHD; /* strides have not been drawn yet */
                p.outputs &= ~(uint32_t)FATTN_OUT_DBIAS;
                if (p.features & FATTN_PAGED) {
                    p.max_pages = p.seqlen_k, p.num_pages = 1;
                }
                if (fattn_problem_normalise(&p, &p) == FATTN_OK &&
                    fattn_kernel_declines(row, &p, text, sizeof text) == NULL) {
                    seen |= 1u << (2 * (int)p.dtype + (p.op == FATTN_BACKWARD));
                }
            }
            draw_free(&c);
        }
        for (int d = FATTN_F32; d <= FATTN_F64; d++) {
            for (int op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
                const bool takes = row->dtypes & FATTN_DTYPE_BIT(d) && row->ops & FATTN_OP_BIT(op);
                hazard_check(!takes || seen >> (2 * d + (op == FATTN_BACKWARD)) & 1,
                             "%s: %s %s is never drawn", row->name,
                             fattn_dtype_name((fattn_dtype)d),
                             op == FATTN_FORWARD ? "forward" : "backward");
            }
        }
    }
}

/* All families are drawn, and inputs have the properties that their names promise. */
static void m5(void)
{
    int64_t count[DRAW_FAMILIES] = {0};
    for (int64_t index = 0; index < 2000; index++) {
        draw_case c;
        if (draw_problem(&c, 5, index) == 0) {
            count[c.family]++;
        }
        draw_free(&c);
    }
    for (int f = 0; f < DRAW_FAMILIES; f++) {
        hazard_check(count[f] >= 60, "%s is drawn %lld times in 2000", draw_family_names[f],
                     (long long)count[f]);
        static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};
        EACH (o, ops) {
            draw_case c = hazard_case(ops[o], FATTN_F32, 2, 2, 1, 33, 130, 16);
            c.family = (draw_family)f;
            hazard_judge_drawn(&c, 2, "family %s", draw_family_names[f]);
        }
    }
}

/* Lengths whose whole matrix is too large to check: few rows with many keys, and the reverse. */
static void m6(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 3, 200000, 8);
    hazard_judge_drawn(&c, -1, "200000 keys");
    c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, 1, 1, 3, 50000, 8);
    hazard_judge_drawn(&c, -1, "backward, 50000 keys");
    c = hazard_case(FATTN_BACKWARD, FATTN_F32, 1, 1, 1, 50000, 3, 8);
    hazard_judge_drawn(&c, -1, "backward, 50000 rows");
}

static void m7(void)
{
    judge_verdict v;
    draw_case c = ordinary(FATTN_FORWARD);
    hazard_check(judge_spoilt(&c, spoil_zeros, &v) == JUDGE_FAILED, "zeros pass");
    draw_free(&c);

    /* All values are far below the bound, so only counting zeros can detect the fault. */
    c = ordinary(FATTN_FORWARD);
    for (int64_t n = 0; n < 21 * 8; n++) {
        draw_set(&c, DRAW_V, n, n % 8 == 7 ? 1e6 : 0.1);
    }
    hazard_check(judge_spoilt(&c, spoil_zeros, &v) == JUDGE_FAILED,
                 "zeros beside large values pass");
    draw_free(&c);
}

/* -------------------------------------------------------------------------------------------------
 * M4: every option counts
 * ---------------------------------------------------------------------------------------------- */

typedef struct option_flip {
    const char *name;
    uint64_t needs; /* features that must be set */
    uint64_t flips; /* features that are toggled */
    void (*change)(draw_case *c);
} option_flip;

static void other_anchor(draw_case *c) { c->problem.anchor = FATTN_TOP_LEFT; }
static void other_scale(draw_case *c) { c->problem.scale *= 1.5; }
static void other_chunk(draw_case *c) { c->problem.chunk = 4; }
static void other_positions(draw_case *c) { c->buffers.q_offset += 2, c->buffers.k_offset += 2; }
static void other_softcap(draw_case *c) { c->problem.softcap *= 1.5; }
static void other_dropout(draw_case *c) { c->problem.dropout_p = 0.7; }
static void other_left(draw_case *c) { c->problem.window_left = 1; }
static void other_right(draw_case *c) { c->problem.window_right = 1; }
static void other_block_m(draw_case *c) { c->problem.block_m = 5; }
static void other_block_n(draw_case *c) { c->problem.block_n = 5; }
static void other_batch_offset(draw_case *c) { c->problem.batch_offset = 3; }
static void other_head_offset(draw_case *c) { c->problem.head_offset = 3; }
static void other_seed(draw_case *c) { c->buffers.seed++; }
static void other_offset(draw_case *c) { c->buffers.offset++; }
static void other_q_offset(draw_case *c) { c->buffers.q_offset += 3; }
static void other_k_offset(draw_case *c) { c->buffers.k_offset += 3; }
static void other_whole_q(draw_case *c) { c->buffers.whole_q = c->problem.seqlen_q + 3; }
static void other_whole_k(draw_case *c) { c->buffers.whole_k = c->problem.seqlen_k + 3; }

static void other_used_q(draw_case *c) { draw_set(c, DRAW_USED_Q, 1, 5); }
static void other_used_k(draw_case *c) { draw_set(c, DRAW_USED_K, 1, 5); }
static void other_start_k(draw_case *c) { draw_set(c, DRAW_START_K, 1, 4); }
static void other_k_descale(draw_case *c) { draw_set(c, DRAW_K_DESCALE, 1, 3); }
static void other_v_descale(draw_case *c) { draw_set(c, DRAW_V_DESCALE, 1, 3); }
static void other_descales(draw_case *c) { c->problem.descale_stride[0] = 0; }
static void other_bias(draw_case *c) { c->problem.bias_stride[0] = 0; }
static void other_mask(draw_case *c) { c->problem.mask_stride[1] = 0; }
static void other_block_mask(draw_case *c) { c->problem.block_mask_stride[3] = 0; }

static const option_flip flips[] = {
    {"causal", 0, FATTN_CAUSAL, NULL},
    {"window", 0, FATTN_WINDOW, NULL},
    {"window_left", FATTN_WINDOW, 0, other_left},
    {"window_right", FATTN_WINDOW, 0, other_right},
    {"anchor", FATTN_CAUSAL, 0, other_anchor},
    {"anchor of alibi", FATTN_ALIBI, 0, other_anchor},
    {"scale", 0, FATTN_SCALE, NULL},
    {"scale's value", FATTN_SCALE, 0, other_scale},
    {"chunk", 0, FATTN_CHUNK, NULL},
    {"chunk's size", FATTN_CHUNK, 0, other_chunk},
    {"positions of chunks", FATTN_CHUNK | FATTN_POSITIONS, 0, other_positions},
    {"softcap", 0, FATTN_SOFTCAP, NULL},
    {"softcap's value", FATTN_SOFTCAP, 0, other_softcap},
    {"bias", 0, FATTN_BIAS, NULL},
    {"bias_stride", FATTN_BIAS, 0, other_bias},
    {"alibi", 0, FATTN_ALIBI, NULL},
    {"mask", 0, FATTN_MASK, NULL},
    {"mask_stride", FATTN_MASK, 0, other_mask},
    {"block_mask", 0, FATTN_BLOCK_MASK, NULL},
    {"block_mask_stride", FATTN_BLOCK_MASK, 0, other_block_mask},
    {"block_m", FATTN_BLOCK_MASK, 0, other_block_m},
    {"block_n", FATTN_BLOCK_MASK, 0, other_block_n},
    {"sink", 0, FATTN_SINK, NULL},
    {"dropout", 0, FATTN_DROPOUT, NULL},
    {"dropout_p", FATTN_DROPOUT, 0, other_dropout},
    {"seed", FATTN_DROPOUT, 0, other_seed},
    {"offset", FATTN_DROPOUT, 0, other_offset},
    {"batch_offset", FATTN_DROPOUT, 0, other_batch_offset},
    {"head_offset", FATTN_DROPOUT, 0, other_head_offset},
    {"q_offset", FATTN_POSITIONS | FATTN_CAUSAL, 0, other_q_offset},
    {"k_offset", FATTN_POSITIONS | FATTN_CAUSAL, 0, other_k_offset},
    {"q_offset of dropout", FATTN_POSITIONS | FATTN_DROPOUT, 0, other_q_offset},
    {"k_offset of dropout", FATTN_POSITIONS | FATTN_DROPOUT, 0, other_k_offset},
    {"whole_q", FATTN_POSITIONS | FATTN_CAUSAL, 0, other_whole_q},
    {"whole_k", FATTN_POSITIONS | FATTN_CAUSAL, 0, other_whole_k},
    {"seqused_q", FATTN_SEQUSED_Q, 0, other_used_q},
    {"seqused_k", FATTN_SEQUSED_K, 0, other_used_k},
    {"alibi_bias", FATTN_ALIBI | FATTN_BIAS, FATTN_ALIBI_BIAS, NULL},
    {"seqstart_k", FATTN_SEQSTART_K, 0, other_start_k},
    {"descale", 0, FATTN_DESCALE, NULL},
    {"k_descale", FATTN_DESCALE, 0, other_k_descale},
    {"v_descale", FATTN_DESCALE, 0, other_v_descale},
    {"descale_stride", FATTN_DESCALE, 0, other_descales},
    {"dlse", 0, FATTN_DLSE, NULL},
    {"accumulate", 0, FATTN_ACCUMULATE, NULL},
};

/* A case with an operand for every option; c.problem.features selects among them. */
static draw_case equipped(fattn_op op)
{
    draw_case c = hazard_case(op, FATTN_F32, 2, 4, 2, 12, 15, 8);
    fattn_problem *const p = &c.problem;
    p->features = FATTN_BIAS | FATTN_ALIBI | FATTN_MASK | FATTN_BLOCK_MASK | FATTN_SINK |
                  FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_POSITIONS | FATTN_DROPOUT |
                  FATTN_SEQSTART_K |
                  (op == FATTN_BACKWARD ? FATTN_DLSE | FATTN_ACCUMULATE : FATTN_DESCALE);
    p->descale_stride[0] = 2, p->descale_stride[1] = 1;
    p->block_m = p->block_n = 2;
    p->dropout_p = 0.3;
    c.seed_value = 11, c.offset_value = 22;
    hazard_build(&c);
    p->window_left = 4, p->window_right = 2;
    p->scale = 0.7, p->softcap = 1.5;
    p->chunk = 5;
    for (int64_t h = 0; h < 4; h++) { /* a sink that is never -inf */
        draw_set(&c, DRAW_SINK, h, 1);
    }
    for (int64_t n = 0; n < 2 * 4 * 12 * 15; n++) { /* a bias that differs along every axis */
        draw_rng rng = draw_stream(5, n, 0);
        draw_set(&c, DRAW_BIAS, draw_at(&c, DRAW_BIAS, n / 720, n / 180 % 4, n / 15 % 12, n % 15),
                 draw_normal(&rng));
    }
    for (int64_t n = 0; n < 2 * 4 * 6 * 8; n++) { /* blocks that differ along every axis */
        draw_rng rng = draw_stream(4, n, 0);
        draw_set(&c, DRAW_BLOCK_MASK,
                 draw_at(&c, DRAW_BLOCK_MASK, n / 192, n / 48 % 4, n / 8 % 6, n % 8),
                 draw_chance(&rng, 2));
    }
    return c;
}

/* The bits of every output, from the same initial contents. */
static uint64_t outputs_of(const place *at, draw_case *c, fattn_status *status)
{
    static const draw_id outputs[] = {DRAW_O, DRAW_LSE, DRAW_DQ, DRAW_DK, DRAW_DV};
    uint64_t hash = UINT64_C(14695981039346656037);
    const bool backward = c->problem.op == FATTN_BACKWARD;
    for (int n = 0; n < c->image_count; n++) {
        if (c->images[n].output) {
            memset(c->images[n].bytes, 0x3f, (size_t)c->images[n].size); /* numbers near 1 */
        }
    }
    draw_case asked = *c;
    strip(&asked.problem, &asked.buffers);
    *status = hazard_run(at, &asked, NULL);
    EACH (o, outputs) {
        if (!c->tensors[outputs[o]].present || backward != (outputs[o] >= DRAW_DQ)) {
            continue;
        }
        const draw_image *const image = &c->images[c->tensors[outputs[o]].image];
        for (int64_t n = 0; n < image->size; n++) {
            hash = (hash ^ image->bytes[n]) * UINT64_C(1099511628211);
        }
    }
    return hash;
}

/* o and lse with the given options. */
static void save(draw_case *c)
{
    draw_case asked = *c;
    strip(&asked.problem, &asked.buffers);
    hazard_check(draw_save(&asked) == FATTN_OK, "%s", fattn_last_reason());
}

static void check_flip(const place *at, fattn_op op, const option_flip *flip)
{
    draw_case c = equipped(op);
    if ((flip->needs | flip->flips) & ~draw_features_of(op)) {
        draw_free(&c);
        return;
    }
    c.problem.features = flip->needs;
    save(&c);
    fattn_status first = FATTN_OK, second = FATTN_OK;
    const uint64_t before = outputs_of(at, &c, &first);
    c.problem.features ^= flip->flips;
    if (flip->change != NULL) {
        flip->change(&c);
    }
    save(&c);
    const uint64_t after = outputs_of(at, &c, &second);
    hazard_check(first == FATTN_OK || first == FATTN_UNSUPPORTED, "%s: %s", flip->name,
                 fattn_last_reason());
    hazard_check(first != FATTN_OK || second == FATTN_UNSUPPORTED ||
                     (second == FATTN_OK && before != after),
                 "%s, %s: %s changes nothing (%s)", at->kernel->name,
                 op == FATTN_FORWARD ? "forward" : "backward", flip->name,
                 second ? fattn_last_reason() : "silently");
    draw_free(&c);
}

/* Each option either changes the result, forward and backward, on every row, or is refused. */
static void m4(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
            for (size_t f = 0; f < sizeof flips / sizeof *flips; f++) {
                check_flip(&hazard_places[n], op, &flips[f]);
            }
        }
    }
}

static const hazard table[] = {
    {"hazard_M1", "NaN in the reference made the assertion pass", m1, NULL},
    {"hazard_M2", "fmax(NaN, 0) hid every error", m2, NULL},
    {"hazard_M3", "a dtype was commented out of the list of cases", m3, NULL},
    {"hazard_M4", "only one value of an option was ever covered", m4, NULL},
    {"hazard_M5", "inputs were Gaussian only", m5, NULL},
    {"hazard_M6", "large shapes never ran", m6, NULL},
    {"hazard_M7", "outputs of mostly zeros compared equal", m7, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
