/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn run --ranks`: which rows a rank has, reads and writes. */
#define _POSIX_C_SOURCE 200809L /* PATH_MAX */

#include "tools/run/job.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "tools/terminal/terminal.h"

/* The rows of all sequences of a side; axis_of() is their axis in tensors. */
static int64_t length_of(const job *j, int side)
{
    const fattn_problem *const p = &j->problem;
    return side == QUERIES ? (j->in_path[IN_CU_Q] ? p->total_q : p->seqlen_q)
                           : (j->in_path[IN_CU_K] ? p->total_k : p->seqlen_k);
}

static int axis_of(const job *j, int side)
{
    const bool packed = j->in_path[side == QUERIES ? IN_CU_Q : IN_CU_K];
    return (packed ? 0 : 1) + (j->problem.layout == FATTN_BHSD);
}

/* The rows of an input or output that is divided. Biases that broadcast have one row for all. */
static npy_rows rows_of(const job *j, const npy_array *a, int axis, int side, fattn_run *all)
{
    *all = (fattn_run){0, a->shape[axis], 1};
    const share *const s = &j->divided.share[side];
    return a->shape[axis] == 1 && length_of(j, side) != 1 ? (npy_rows){axis, 1, all}
                                                          : (npy_rows){axis, s->count, s->runs};
}

static int input_axis(const job *j, int i)
{
    return job_inputs[i].role <= RESULT ? axis_of(j, i == IN_K || i == IN_V ? KEYS : QUERIES)
           : i == IN_DLSE               ? j->in[i].rank - 1
                                        : j->in[i].rank - 2;
}

fattn_scheme job_scheme(const job *j) { return (fattn_scheme)j->divided.scheme; }

static bool take_side(job *j, int side)
{
    const int input = side == QUERIES ? IN_CU_Q : IN_CU_K;
    const int32_t *const cu = j->in_path[input] ? j->in[input].data : NULL;
    const int64_t sequences = cu ? j->problem.batch : 1, length = length_of(j, side);
    const fattn_transport *const t = j->divided.world.transport;
    const bool whole = side == QUERIES && job_scheme(j) == FATTN_SCHEME_REDUCE;
    const fattn_split split = (fattn_split)j->divided.split;
    const int runs = whole ? 1 : fattn_split_runs(split);
    share *const s = &j->divided.share[side];
    s->runs = fattn_memory_alloc((size_t)(sequences * runs + 1) * sizeof *s->runs);
    if (!s->runs) {
        return job_succeeded(COMPLAINT_NO_MEMORY, "no memory for the rows of a rank");
    }
    for (int64_t b = 0; b < sequences; b++) {
        const int64_t first = cu ? cu[b] : 0, rows = (cu ? cu[b + 1] : length) - first;
        if (first < 0 || rows < 0 || rows > length - first) {
            return job_complain("the lengths in cu_seqlens do not match the rows of the tensors");
        }
        for (int n = 0; n < runs; n++) {
            fattn_run run = {0, rows, 1};
            if (!whole && fattn_split_get_run(split, rows, t->ranks, t->rank, n, &run)) {
                return job_complain(fattn_last_reason());
            }
            run.first += first;
            s->runs[s->count++] = run;
            s->rows += run.count;
        }
    }
    return true;
}

bool job_read_rows(job *j)
{
    const int64_t ranks = j->divided.world.transport->ranks;
    const fattn_op op = j->backward ? FATTN_BACKWARD : FATTN_FORWARD;
    if (job_scheme(j) == FATTN_SCHEME_AUTO &&
        fattn_scheme_reduces(op, j->problem.seqlen_q, ranks)) {
        j->divided.scheme = FATTN_SCHEME_REDUCE;
    }
    if (j->divided.split == 0) {
        j->divided.split =
            job_scheme(j) == FATTN_SCHEME_REDUCE ? FATTN_SPLIT_CONTIGUOUS : split_for(&j->problem);
    }
    if (!take_side(j, QUERIES) || !take_side(j, KEYS)) {
        return false;
    }
    for (int i = 0; i < INPUTS; i++) {
        char why[LINE];
        npy_array *const a = &j->in[i];
        if (!j->in_path[i] || !job_has_rows(j, i)) {
            continue;
        }
        fattn_run all;
        const int side = i == IN_K || i == IN_V ? KEYS : QUERIES;
        const npy_rows rows = rows_of(j, a, input_axis(j, i), side, &all);
        if (!job_succeeded(
                npy_read_rows(j->in_path[i], job_pattern(j, i), &rows, a, why, sizeof why), why)) {
            return false;
        }
        if (!job_convert_input(j, i)) {
            return false;
        }
    }
    return true;
}

/* Replaces the strides of a whole array by those of this rank's part. Axes of stride 0 stay so. */
static void narrow(const npy_array *part, int64_t stride[4])
{
    int64_t step = 1;
    for (int axis = 3; axis >= 0; axis--) {
        const int own = axis - (4 - part->rank);
        stride[axis] = stride[axis] ? step : 0;
        step *= own < 0 ? 1 : part->shape[own];
    }
}

void job_narrow(job *j)
{
    narrow(&j->in[IN_BIAS], j->problem.bias_stride);
    narrow(&j->in[IN_MASK], j->problem.mask_stride);
    memcpy(j->problem.dbias_stride, j->problem.bias_stride, sizeof j->problem.dbias_stride);
}

/* The rows of an output that this rank writes. If all ranks have the same rows, the first writes
 * all of them. */
static npy_rows output_rows(const job *j, int i, fattn_run *all)
{
    const npy_array *const a = &j->out[i];
    const bool first = j->divided.world.transport->rank == 0;
    const int side = i == OUT_DK || i == OUT_DV ? KEYS : QUERIES;
    const bool same = i == OUT_DSINK || (side == QUERIES && job_scheme(j) == FATTN_SCHEME_REDUCE);
    const int axis = i == OUT_DSINK   ? 0
                     : i == OUT_LSE   ? a->rank - 1
                     : i == OUT_DBIAS ? a->rank - 2
                                      : axis_of(j, side);
    *all = (fattn_run){0, a->shape[axis], 1};
    return same ? (npy_rows){axis, first, all} : rows_of(j, a, axis, side, all);
}

/* Creates the file of the whole output, filled with zeros; called on the first rank. */
static bool stage_whole(const job *j, int i, replacement *staged)
{
    fattn_run all;
    const npy_rows rows = output_rows(j, i, &all);
    npy_array whole = j->out[i];
    char why[LINE];
    if (rows.runs != &all) {
        whole.shape[rows.axis] = length_of(j, i == OUT_DK || i == OUT_DV ? KEYS : QUERIES);
    }
    whole.count = 1;
    for (int axis = 0; axis < whole.rank; axis++) {
        whole.count *= whole.shape[axis];
    }
    return job_succeeded(npy_stage_zeros(j->out_path[i], &whole, staged, why, sizeof why), why);
}

typedef struct names {
    char of[OUTPUTS][PATH_MAX];
} names;

bool job_write_rows(const job *j)
{
    const world *const w = &j->divided.world;
    const bool first = w->transport->rank == 0;
    replacement staged[OUTPUTS] = {{0}};
    int count = 0;
    char why[LINE];
    names *const all = fattn_memory_alloc((size_t)w->transport->ranks * sizeof *all);
    bool fine = all || job_succeeded(COMPLAINT_NO_MEMORY, "no memory for the names of files");
    if (all) {
        memset(all, 0, (size_t)w->transport->ranks * sizeof *all);
    }
    for (int i = 0; fine && first && i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            fine = stage_whole(j, i, &staged[count]);
            count += fine;
            snprintf(all->of[i], PATH_MAX, "%s", fine ? staged[count - 1].temporary : "");
        }
    }
    fine = world_agree(w, fine);
    const fattn_status told = fine ? world_gather(w, all, sizeof *all) : FATTN_OK;
    fine = fine && (!told || !tool_failure(told)) && world_agree(w, true);
    for (int i = 0; fine && i < OUTPUTS; i++) {
        fattn_run whole;
        if (j->out_path[i]) {
            const npy_rows rows = output_rows(j, i, &whole);
            fine =
                job_succeeded(npy_write_rows(all->of[i], &rows, &j->out[i], why, sizeof why), why);
        }
    }
    fine = world_agree(w, fine);
    if (fine && first) {
        fine = job_succeeded(replacement_commit(staged, count, why, sizeof why), why);
    }
    if (!fine) {
        replacement_abandon(staged, count);
    }
    fattn_memory_free(all);
    return world_agree(w, fine);
}
