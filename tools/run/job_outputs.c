/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs of `fattn run`: their arrays, the buffers of the library, and their files. */
#include "tools/run/job.h"

#include <stdio.h>
#include <string.h>

#include "core/memory.h"

/* Reads the output's file as the sum that the gradient is added to. */
static bool read_sum(job *j, int i)
{
    npy_array *const out = &j->out[i], sum;
    const char *const path = j->out_path[i];
    char why[LINE], has[128], wants[128];
    if (!job_succeeded(npy_read(path, NPY_F32, &sum, why, sizeof why), why)) {
        return false;
    }
    if (sum.kind != out->kind || sum.rank != out->rank ||
        memcmp(sum.shape, out->shape, sizeof sum.shape) != 0) {
        job_print_shape(has, sizeof has, sum.rank, sum.shape);
        job_print_shape(wants, sizeof wants, out->rank, out->shape);
        snprintf(why, sizeof why, "%s: %s of %s cannot be added to, %s of %s can", path, has,
                 npy_kind_name(sum.kind), wants, npy_kind_name(out->kind));
        npy_free(&sum);
        return job_complain(why);
    }
    npy_free(out);
    *out = sum;
    return true;
}

/* Whether the output needs an array: forward always writes o, and backward reads o and lse. */
static bool computed(const job *j, int output)
{
    return j->out_path[output] || output == OUT_O || (j->backward && output == OUT_LSE);
}

bool job_create_outputs(job *j)
{
    static const char *const names[OUTPUTS] = {"o",     "lse",   "dq",     "dk",           "dv",
                                               "dbias", "dsink", "scores", "probabilities"};
    const fattn_problem *const p = &j->problem;
    const npy_kind real = job_kind_of(job_type_of(p, REAL)),
                   result = job_kind_of(job_type_of(p, RESULT));
    const bool sums = p->features & FATTN_ACCUMULATE;
    const npy_kind kind_q = sums ? real : job_kind_of(p->dtype);
    const npy_kind kind_k = sums ? real : job_kind_of(job_type_of(p, KEY));
    const npy_kind kind_v = sums ? real : job_kind_of(job_type_of(p, VALUE));
    const npy_array *const q = &j->in[IN_Q], *const bias = &j->in[IN_BIAS];
    const bool cu_q = j->in_path[IN_CU_Q];

    int64_t o[4];
    memcpy(o, q->shape, sizeof o);
    o[q->rank - 1] = p->dim_v;
    const int64_t rows = j->divided.wanted ? j->divided.share[QUERIES].rows
                         : cu_q            ? p->total_q
                                           : p->seqlen_q;
    const int64_t lse_packed[2] = {p->heads_q, rows};
    const int64_t lse_dense[3] = {p->batch, p->heads_q, rows};
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    const struct {
        npy_kind kind;
        int rank;
        const int64_t *shape;
    } forms[OUTPUTS] = {
        [OUT_O] = {result, q->rank, o},
        [OUT_LSE] = {real, cu_q ? 2 : 3, cu_q ? lse_packed : lse_dense},
        [OUT_DQ] = {kind_q, q->rank, q->shape},
        [OUT_DK] = {kind_k, j->in[IN_K].rank, j->in[IN_K].shape},
        [OUT_DV] = {kind_v, j->in[IN_V].rank, j->in[IN_V].shape},
        [OUT_DBIAS] = {real, bias->rank, bias->shape},
        [OUT_DSINK] = {real, 1, &p->heads_q},
        [OUT_SCORES] = {real, 4, pairs},
        [OUT_PROBABILITIES] = {real, 4, pairs},
    };
    for (int i = 0; i < OUTPUTS; i++) {
        char why[LINE];
        if (!computed(j, i)) {
            continue;
        }
        if (!job_succeeded(npy_create(names[i], forms[i].kind, forms[i].rank, forms[i].shape,
                                      &j->out[i], why, sizeof why),
                           why)) {
            return false;
        }
        if (j->out[i].count) {
            memset(j->out[i].data, 0, (size_t)j->out[i].count * j->out[i].item);
        }
        const bool is_gradient = i >= OUT_DQ && i <= OUT_DSINK;
        if (sums && is_gradient && !read_sum(j, i)) {
            return false;
        }
    }
    return true;
}

void *job_pointer(const npy_array *a)
{
    static _Alignas(FATTN_MEMORY_ALIGNMENT) unsigned char nothing[FATTN_MEMORY_ALIGNMENT];
    return a->data ? a->data : nothing;
}

void job_point(job *j)
{
    fattn_buffers *const b = &j->buffers;
    const void **const in[INPUTS] = {
        [IN_Q] = &b->q,
        [IN_K] = &b->k,
        [IN_V] = &b->v,
        [IN_BIAS] = &b->bias,
        [IN_SINK] = &b->sink,
        [IN_DO] = &b->dout,
        [IN_DLSE] = &b->dlse,
        [IN_ALIBI] = &b->alibi_slopes,
        [IN_K_DESCALE] = &b->k_descale,
        [IN_V_DESCALE] = &b->v_descale,
    };
    const uint8_t **const bytes[INPUTS] = {[IN_MASK] = &b->mask, [IN_BLOCK_MASK] = &b->block_mask};
    const int64_t **const places[INPUTS] = {
        [IN_Q_OFFSETS] = &b->q_offsets,
        [IN_K_OFFSETS] = &b->k_offsets,
        [IN_WHOLES_Q] = &b->wholes_q,
        [IN_WHOLES_K] = &b->wholes_k,
    };
    const int32_t **const counts[INPUTS] = {
        [IN_CU_Q] = &b->cu_seqlens_q, [IN_CU_K] = &b->cu_seqlens_k,  [IN_USED_Q] = &b->seqused_q,
        [IN_USED_K] = &b->seqused_k,  [IN_START_K] = &b->seqstart_k, [IN_TABLE] = &b->block_table,
    };
    void **const out[OUTPUTS] = {
        [OUT_O] = &b->o,   [OUT_LSE] = &b->lse,     [OUT_DQ] = &b->dq,      [OUT_DK] = &b->dk,
        [OUT_DV] = &b->dv, [OUT_DBIAS] = &b->dbias, [OUT_DSINK] = &b->dsink};

    for (int i = 0; i < INPUTS; i++) {
        if (!j->in_path[i]) {
            continue;
        }
        if (in[i]) {
            *in[i] = job_pointer(&j->in[i]);
        }
        if (bytes[i]) {
            *bytes[i] = job_pointer(&j->in[i]);
        }
        if (counts[i]) {
            *counts[i] = job_pointer(&j->in[i]);
        }
        if (places[i]) {
            *places[i] = job_pointer(&j->in[i]);
        }
    }
    for (int i = 0; i < OUTPUTS; i++) {
        if (out[i] && computed(j, i)) {
            *out[i] = job_pointer(&j->out[i]);
        }
    }
    b->seed = j->seed;
    b->offset = j->offset;
}

bool job_write(const job *j)
{
    replacement staged[OUTPUTS] = {{0}};
    int count = 0;
    char why[LINE];
    bool fine = true;

    for (int i = 0; fine && i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            const int failed =
                npy_stage(j->out_path[i], &j->out[i], &staged[count++], why, sizeof why);
            fine = job_succeeded(failed, why);
        }
    }
    fine = fine && job_succeeded(replacement_commit(staged, count, why, sizeof why), why);
    if (!fine) {
        replacement_abandon(staged, count);
    }
    return fine;
}
