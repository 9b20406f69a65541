/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts: where keys are split, each item leaves {m, l, o} of its rows in the workspace, and a
 * second phase merges those of a block in ascending order.
 */

/* Floats that one part leaves behind: m, l, o of each strip. */
static int64_t part_size(const fattn_problem *p, const fattn_tiling *tiling)
{
    return tiling->br * (2 + vectors_of(p->dim_v) * FV_LANES);
}

static int64_t forward_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    if (tiling->splits == 1) {
        return 0;
    }
    return fattn_cpu_bytes(tiling->items, part_size(p, tiling), sizeof(float));
}

/* Where a part has strip n. */
static float *part_of(const forward *f, float *part, int64_t n)
{
    return part + n * f->panel.br * (2 + f->panel.dvp);
}

static void forward_keep_part(const forward *f, float *part)
{
    const panel *const pn = &f->panel;
    memcpy(part, f->m, (size_t)pn->br * sizeof(float));
    memcpy(part + pn->br, f->l, (size_t)pn->br * sizeof(float));
    memcpy(part + 2 * pn->br, f->o, (size_t)(pn->rows * pn->dvp) * sizeof(float));
}

/* Leaves strip n of a part where the merge finds it, or writes its results. part: of the item */
static void forward_end(forward *f, const fattn_cpu_run *run, int64_t item, int64_t n)
{
    if (run->tiling->splits > 1) {
        float *const parts = (float *)run->shared;
        const int64_t size = part_size(run->problem, run->tiling);
        forward_keep_part(f, part_of(f, parts + item * size, n));
    } else {
        forward_store(f);
    }
}

/* --- Merging ---------------------------------------------------------------------------------- */

/* {m, l, o} of the panel becomes that of both; other: m, l, o of a part. */
static void merge_part(forward *f, const float *other)
{
    const panel *const pn = &f->panel;
    const float *const m = other, *const l = m + pn->br, *const o = l + pn->br;
    float *const alpha = f->alpha, *const beta = pn->at;

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        fattn_softmax state = state_load(f, r);
        const fattn_softmax part = {.m = fv_load(m + r), .l = fv_load(l + r)};
        fv a, b;
        fattn_softmax_merge(&state, part, fv_set1(pn->rule.unit), &a, &b);
        state_store(f, r, state);
        fv_store(alpha + r, a);
        fv_store(beta + r, b);
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        const fv a = fv_set1(alpha[r]), b = fv_set1(beta[r]);
        for (int64_t c = 0; c < pn->dvp; c += FV_LANES) {
            float *const at = f->o + r * pn->dvp + c;
            fv_store(at, fv_fma(b, fv_load(o + r * pn->dvp + c), fv_mul(a, fv_load(at))));
        }
    }
}

static void merge_block(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_tiling *const tiling = run->tiling;
    const int64_t size = part_size(run->problem, tiling), first = item * tiling->splits;
    const fattn_work work = fattn_schedule_item(tiling, run->problem->heads_k, first);
    float *const shared = (float *)run->shared;
    arena from = {.base = scratch};
    forward strips[STRIPS];
    const int64_t room = block_layout(strips, run->problem, tiling, 1, &from);
    const int64_t count = forward_open(strips, room, run, work);

    panel_prepare(&strips->panel);
    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        const panel *const pn = &f->panel;
        const float *const parts = part_of(f, shared + first * size, n);
        memcpy(f->m, parts, (size_t)pn->br * sizeof(float));
        memcpy(f->l, parts + pn->br, (size_t)pn->br * sizeof(float));
        memcpy(f->o, parts + 2 * pn->br, (size_t)(pn->rows * pn->dvp) * sizeof(float));
        for (int64_t split = 1; split < tiling->splits; split++) {
            merge_part(f, parts + split * size);
        }
        forward_store(f);
    }
}

static void merge_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, merge_block);
}

static int64_t merge_count(const fattn_cpu_run *run)
{
    return run->tiling->splits > 1 ? run->tiling->items / run->tiling->splits : 0;
}
