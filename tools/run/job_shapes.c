/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of inputs, from which the lengths of the problem follow. */
#include "tools/run/job.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/integer.h"

enum { ANY = -1 };

void job_print_shape(char *text, size_t size, int rank, const int64_t *shape)
{
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < rank && used < size; i++) {
        const char *const comma = i ? ", " : "";
        used += (size_t)(shape[i] == ANY
                             ? snprintf(text + used, size - used, "%sany", comma)
                             : snprintf(text + used, size - used, "%s%" PRId64, comma, shape[i]));
    }
    if (used < size) {
        snprintf(text + used, size - used, ")");
    }
}

static bool refuse_shape(const job *j, int input, const char *verb, int rank, const int64_t *wanted,
                         const char *letters)
{
    char has[128], wants[128], why[LINE];
    job_print_shape(has, sizeof has, j->in[input].rank, j->in[input].shape);
    job_print_shape(wants, sizeof wants, rank, wanted);
    snprintf(why, sizeof why, "%s: shape %s %s %s = %s", j->in_path[input], has, verb, wants,
             letters);
    return job_complain(why);
}

/* Whether the array has this shape; ANY matches any length. */
static bool match(const job *j, int input, int rank, const int64_t *wanted, const char *letters)
{
    const npy_array *const a = &j->in[input];
    bool same = a->rank == rank;
    for (int i = 0; same && i < rank; i++) {
        same = wanted[i] == ANY || a->shape[i] == wanted[i];
    }
    return same || refuse_shape(j, input, "is not", rank, wanted, letters);
}

static bool match_vector(const job *j, int input, int64_t length, const char *letters)
{
    return !j->in_path[input] || match(j, input, 1, &length, letters);
}

/* Matches a tensor whose axes (batch or page, sequence or slot, head, channel) are in the order of
 * --layout. Packed tensors have no batch axis and leave *batch alone. */
static bool match_tensor(const job *j, int input, bool packed, const char *const letters[2],
                         int64_t *batch, int64_t *seq, int64_t *head, int64_t *channel)
{
    const bool bhsd = j->problem.layout == FATTN_BHSD;
    const int axis = packed ? 0 : 1, rank = axis + 3; /* axis: the one after batch */
    const int64_t inner[3] = {bhsd ? *head : *seq, bhsd ? *seq : *head, *channel};
    int64_t wanted[4] = {*batch};
    memcpy(wanted + axis, inner, sizeof inner);

    if (!match(j, input, rank, wanted, letters[bhsd])) {
        return false;
    }
    const int64_t *const shape = j->in[input].shape;
    if (!packed) {
        *batch = shape[0];
    }
    *seq = shape[axis + (bhsd ? 1 : 0)];
    *head = shape[axis + (bhsd ? 0 : 1)];
    *channel = shape[axis + 2];
    return true;
}

/* Strides that broadcast an array to four axes as NumPy does: 0 along broadcast axes. */
static bool broadcast(const job *j, int input, const int64_t wanted[4], const char *letters,
                      int64_t stride[4])
{
    const npy_array *const a = &j->in[input];
    const int missing = 4 - a->rank;
    bool fits = missing >= 0;
    int64_t step = 1;
    for (int axis = 3; fits && axis >= 0; axis--) {
        const int64_t length = axis < missing ? 1 : a->shape[axis - missing];
        fits = length == 1 || length == wanted[axis];
        stride[axis] = length == 1 ? 0 : step;
        step *= length; /* at most a->count, or 0 */
    }
    return fits || refuse_shape(j, input, "does not broadcast to", 4, wanted, letters);
}

/* The longest sequence of a cumulative array; the library reports invalid ones. */
static int64_t longest(const npy_array *cu)
{
    const int32_t *const at = cu->data;
    int64_t most = 0;
    for (int64_t i = 1; i < cu->count; i++) {
        const int64_t length = (int64_t)at[i] - at[i - 1];
        most = length > most ? length : most;
    }
    return most;
}

static bool shape_queries(job *j)
{
    static const char *const packed[] = {"(total_q, Hq, D)", "(Hq, total_q, D)"};
    static const char *const dense[] = {"(B, Sq, Hq, D)", "(B, Hq, Sq, D)"};
    fattn_problem *const p = &j->problem;
    const bool cu = j->in_path[IN_CU_Q];
    const int64_t any = ANY;

    p->batch = p->seqlen_q = p->heads_q = p->dim = ANY;
    if (!match_tensor(j, IN_Q, cu, cu ? packed : dense, &p->batch, &p->seqlen_q, &p->heads_q,
                      &p->dim)) {
        return false;
    }
    if (cu) {
        if (!match(j, IN_CU_Q, 1, &any, "(B + 1)")) {
            return false;
        }
        if (j->in[IN_CU_Q].count == 0) {
            const int64_t one = 1;
            return refuse_shape(j, IN_CU_Q, "is shorter than", 1, &one, "(B + 1)");
        }
        p->batch = j->in[IN_CU_Q].count - 1;
        p->total_q = p->seqlen_q;
        p->seqlen_q = longest(&j->in[IN_CU_Q]);
    }
    return true;
}

static bool shape_keys(job *j)
{
    enum { DENSE, PACKED, PAGES };
    static const char *const k_letters[][2] = {
        {"(B, Sk, Hk, D)", "(B, Hk, Sk, D)"},
        {"(total_k, Hk, D)", "(Hk, total_k, D)"},
        {"(pages, page_size, Hk, D)", "(pages, Hk, page_size, D)"},
    };
    static const char *const v_letters[][2] = {
        {"(B, Sk, Hk, Dv)", "(B, Hk, Sk, Dv)"},
        {"(total_k, Hk, Dv)", "(Hk, total_k, Dv)"},
        {"(pages, page_size, Hk, Dv)", "(pages, Hk, page_size, Dv)"},
    };
    fattn_problem *const p = &j->problem;
    const int form = j->in_path[IN_TABLE] ? PAGES : j->in_path[IN_CU_K] ? PACKED : DENSE;
    int64_t batch = form == PAGES ? ANY : p->batch;

    p->seqlen_k = p->heads_k = p->dim_v = ANY;
    if (!match_tensor(j, IN_K, form == PACKED, k_letters[form], &batch, &p->seqlen_k, &p->heads_k,
                      &p->dim) ||
        !match_tensor(j, IN_V, form == PACKED, v_letters[form], &batch, &p->seqlen_k, &p->heads_k,
                      &p->dim_v) ||
        !match_vector(j, IN_CU_K, p->batch + 1, "(B + 1)")) {
        return false;
    }
    if (form == PACKED) {
        p->total_k = p->seqlen_k;
        p->seqlen_k = longest(&j->in[IN_CU_K]);
    }
    if (form == PAGES) {
        const int64_t wanted[2] = {p->batch, ANY};
        if (!match(j, IN_TABLE, 2, wanted, "(B, max_pages)")) {
            return false;
        }
        p->num_pages = batch;
        p->page_size = p->seqlen_k;
        p->max_pages = j->in[IN_TABLE].shape[1];
        /* The capacity of the table, unless lengths are given. If the product wraps, the library
         * refuses max_pages. */
        p->seqlen_k = j->in_path[IN_CU_K]
                          ? longest(&j->in[IN_CU_K])
                          : (int64_t)((uint64_t)p->max_pages * (uint64_t)p->page_size);
    }
    return true;
}

/* --k-descale and --v-descale: for all of k and v, for each head, or for each sequence and head. */
static bool shape_descales(job *j)
{
    static const char *const letters[] = {"()", "(Hk)", "(B, Hk)"};
    fattn_problem *const p = &j->problem;
    const int64_t wanted[2] = {p->batch, p->heads_k};
    if (!j->in_path[IN_K_DESCALE]) {
        return true;
    }
    const int rank = j->in[IN_K_DESCALE].rank < 2 ? j->in[IN_K_DESCALE].rank : 2;
    p->descale_stride[0] = rank == 2 ? p->heads_k : 0;
    p->descale_stride[1] = rank >= 1;
    return match(j, IN_K_DESCALE, rank, wanted + 2 - rank, letters[rank]) &&
           match(j, IN_V_DESCALE, rank, wanted + 2 - rank, letters[rank]);
}

/* The shapes of everything except q, k and v. */
static bool shape_extras(job *j)
{
    static const char *const scores = "(B, Hq, Sq, Sk)";
    fattn_problem *const p = &j->problem;
    const bool cu_q = j->in_path[IN_CU_Q];
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};

    if ((j->in_path[IN_BIAS] && !broadcast(j, IN_BIAS, pairs, scores, p->bias_stride)) ||
        (j->in_path[IN_MASK] && !broadcast(j, IN_MASK, pairs, scores, p->mask_stride))) {
        return false;
    }
    memcpy(p->dbias_stride, p->bias_stride, sizeof p->dbias_stride);
    if (j->in_path[IN_BLOCK_MASK]) {
        const int64_t blocks[4] = {p->batch, p->heads_q, fattn_ceil_div(p->seqlen_q, p->block_m),
                                   fattn_ceil_div(p->seqlen_k, p->block_n)};
        if (!broadcast(j, IN_BLOCK_MASK, blocks, "(B, Hq, ceil(Sq / M), ceil(Sk / N))",
                       p->block_mask_stride)) {
            return false;
        }
    }
    if (j->in_path[IN_ALIBI] && j->in[IN_ALIBI].rank == 2) {
        const int64_t wanted[2] = {p->batch, p->heads_q};
        if (!match(j, IN_ALIBI, 2, wanted, "(B, Hq)")) {
            return false;
        }
        p->alibi_batch_stride = p->heads_q;
    } else if (!match_vector(j, IN_ALIBI, p->heads_q, "(Hq)")) {
        return false;
    }
    if (j->in_path[IN_DO]) {
        static const char *const packed[] = {"(total_q, Hq, Dv)", "(Hq, total_q, Dv)"};
        static const char *const dense[] = {"(B, Sq, Hq, Dv)", "(B, Hq, Sq, Dv)"};
        int64_t batch = p->batch, seq = cu_q ? p->total_q : p->seqlen_q, head = p->heads_q,
                c = p->dim_v;
        if (!match_tensor(j, IN_DO, cu_q, cu_q ? packed : dense, &batch, &seq, &head, &c)) {
            return false;
        }
    }
    if (j->in_path[IN_DLSE]) {
        const int64_t packed[2] = {p->heads_q, p->total_q},
                      dense[3] = {p->batch, p->heads_q, p->seqlen_q};
        if (!match(j, IN_DLSE, cu_q ? 2 : 3, cu_q ? packed : dense,
                   cu_q ? "(Hq, total_q)" : "(B, Hq, Sq)")) {
            return false;
        }
    }
    return shape_descales(j) && match_vector(j, IN_SINK, p->heads_q, "(Hq)") &&
           match_vector(j, IN_USED_Q, p->batch, "(B)") &&
           match_vector(j, IN_USED_K, p->batch, "(B)") &&
           match_vector(j, IN_START_K, p->batch, "(B)") &&
           match_vector(j, IN_Q_OFFSETS, p->batch, "(B)") &&
           match_vector(j, IN_K_OFFSETS, p->batch, "(B)") &&
           match_vector(j, IN_WHOLES_Q, p->batch, "(B)") &&
           match_vector(j, IN_WHOLES_K, p->batch, "(B)");
}

bool job_shape(job *j) { return shape_queries(j) && shape_keys(j) && shape_extras(j); }
