/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs of `fattn run`: read from files, and converted to types that the library takes. */
#define _POSIX_C_SOURCE 200809L /* stat */

#include "tools/run/job.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/dtype.h"
#include "tools/terminal/terminal.h"

/* The floating-point dtype of a kind, 0 for integers. */
static fattn_dtype dtype_of(npy_kind kind)
{
    static const fattn_dtype table[NPY_KINDS] = {[NPY_F16] = FATTN_F16,
                                                 [NPY_F32] = FATTN_F32,
                                                 [NPY_F64] = FATTN_F64,
                                                 [NPY_BF16] = FATTN_BF16,
                                                 [NPY_E4M3] = FATTN_E4M3};
    return table[kind];
}

/* Whether two names are of one file. */
static bool same_file(const char *a, const char *b)
{
    struct stat one, other;
    return stat(a, &one) == 0 && stat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

/* Refuses outputs that cannot be written, before anything is computed. Of ranks, only the first
 * creates files. Outputs replace files, so an output that is also an input would change the next
 * run's inputs. */
static bool check_outputs(const job *j)
{
    const bool creates = !j->divided.wanted || j->divided.world.transport->rank == 0;
    for (int out = 0; out < OUTPUTS; out++) {
        const char *const path = j->out_path[out];
        char why[LINE];
        const complaint to = {path, why, sizeof why};
        if (path && creates && replacement_check(&to) != 0) {
            return job_complain(why);
        }
        for (int in = 0; path && in < INPUTS; in++) {
            if (j->in_path[in] && same_file(path, j->in_path[in])) {
                tool_usage("run", "output %s is the file of an input, %s", path, j->in_path[in]);
                return false;
            }
        }
        for (int other = 0; path && other < out; other++) {
            if (j->out_path[other] && same_file(path, j->out_path[other])) {
                tool_usage("run", "outputs %s and %s are one file", j->out_path[other], path);
                return false;
            }
        }
    }
    return true;
}

bool job_has_rows(const job *j, int input)
{
    const bool extra = input == IN_BIAS || input == IN_MASK;
    return j->divided.wanted && (job_inputs[input].role <= RESULT || input == IN_DLSE ||
                                 (extra && j->in[input].rank > 1));
}

npy_kind job_pattern(const job *j, int input)
{
    const role as = job_inputs[input].role;
    const bool whole = job_given(j, PROBLEM_DTYPE) && j->problem.dtype == FATTN_BF16;
    const fattn_dtype own = as <= BIAS ? job_type_of(&j->problem, as) : FATTN_DTYPE_DEFAULT;
    return own == FATTN_E4M3                            ? NPY_E4M3
           : own == FATTN_BF16 || (as <= BIAS && whole) ? NPY_BF16
                                                        : NPY_F16;
}

bool job_read(job *j)
{
    if (!check_outputs(j)) {
        return false;
    }
    for (int i = 0; i < INPUTS; i++) {
        char why[LINE];
        const npy_kind as = job_pattern(j, i);
        npy_array *const a = &j->in[i];
        if (!j->in_path[i]) {
            continue;
        }
        if (j->divided.wanted &&
            !job_succeeded(npy_read_shape(j->in_path[i], as, a, why, sizeof why), why)) {
            return false;
        }
        if (!job_has_rows(j, i) &&
            !job_succeeded(npy_read(j->in_path[i], as, a, why, sizeof why), why)) {
            return false;
        }
    }
    return true;
}

static bool convert_real(const char *path, npy_array *a, fattn_dtype to)
{
    const fattn_dtype from = dtype_of(a->kind);
    if (from == to) {
        return true;
    }
    if (!from) {
        char why[LINE];
        snprintf(why, sizeof why, "%s holds %s where floating-point numbers are needed", path,
                 npy_kind_name(a->kind));
        return job_complain(why);
    }
    npy_array converted;
    char why[LINE];
    if (!job_succeeded(
            npy_create(path, job_kind_of(to), a->rank, a->shape, &converted, why, sizeof why),
            why)) {
        return false;
    }
    for (int64_t i = 0; i < a->count; i++) {
        fattn_dtype_store(to, converted.data, i, fattn_dtype_load(from, a->data, i));
    }
    npy_free(a);
    *a = converted;
    return true;
}

/* data[i], with values above INT64_MAX as INT64_MAX. */
static int64_t integer_at(const npy_array *a, int64_t i)
{
    switch (a->kind) {
    case NPY_I8: return ((const int8_t *)a->data)[i];
    case NPY_I16: return ((const int16_t *)a->data)[i];
    case NPY_I32: return ((const int32_t *)a->data)[i];
    case NPY_I64: return ((const int64_t *)a->data)[i];
    case NPY_U8: return ((const uint8_t *)a->data)[i];
    case NPY_U16: return ((const uint16_t *)a->data)[i];
    case NPY_U32: return ((const uint32_t *)a->data)[i];
    default: break;
    }
    assert(a->kind == NPY_U64);
    const uint64_t x = ((const uint64_t *)a->data)[i];
    return x < INT64_MAX ? (int64_t)x : INT64_MAX;
}

static bool convert_counts(const char *path, npy_array *a, npy_kind to)
{
    char why[LINE];
    if (a->kind < NPY_I8 || a->kind > NPY_U64) {
        snprintf(why, sizeof why, "%s holds %s where integers are needed", path,
                 npy_kind_name(a->kind));
        return job_complain(why);
    }
    if (a->kind == to) {
        return true;
    }
    npy_array converted;
    if (!job_succeeded(npy_create(path, to, a->rank, a->shape, &converted, why, sizeof why), why)) {
        return false;
    }
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t x = integer_at(a, i);
        if (to == NPY_I64) {
            ((int64_t *)converted.data)[i] = x;
            continue;
        }
        if (x < INT32_MIN || x > INT32_MAX) {
            snprintf(why, sizeof why,
                     "%s: element %" PRId64 " is %" PRId64 ", which int32 cannot hold", path, i, x);
            npy_free(&converted);
            return job_complain(why);
        }
        ((int32_t *)converted.data)[i] = (int32_t)x;
    }
    npy_free(a);
    *a = converted;
    return true;
}

static bool convert_bytes(const char *path, const npy_array *a)
{
    if (a->kind == NPY_BOOL || a->kind == NPY_U8) {
        return true;
    }
    char why[LINE];
    snprintf(why, sizeof why, "%s holds %s where bool or u8 is needed", path,
             npy_kind_name(a->kind));
    return job_complain(why);
}

bool job_convert_input(job *j, int i)
{
    const char *const path = j->in_path[i];
    npy_array *const a = &j->in[i];
    switch (job_inputs[i].role) {
    case TENSOR:
    case KEY:
    case VALUE:
    case RESULT:
    case BIAS:
    case REAL: return convert_real(path, a, job_type_of(&j->problem, job_inputs[i].role));
    case BYTES: return convert_bytes(path, a);
    case COUNTS: return convert_counts(path, a, NPY_I32);
    case PLACES: return convert_counts(path, a, NPY_I64);
    }
    return false;
}

bool job_convert(job *j)
{
    const bool has_dtype = job_given(j, PROBLEM_DTYPE);
    if (!has_dtype && !dtype_of(j->in[IN_Q].kind)) {
        char why[LINE];
        snprintf(why, sizeof why, "%s holds %s where floating-point numbers are needed",
                 j->in_path[IN_Q], npy_kind_name(j->in[IN_Q].kind));
        return job_complain(why);
    }
    const fattn_dtype dtype = has_dtype ? j->problem.dtype : dtype_of(j->in[IN_Q].kind);
    const fattn_dtype real = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_dtype bias = dtype_of(j->in[IN_BIAS].kind) == dtype ? dtype : real;

    j->problem.dtype = dtype;
    if (j->in_path[IN_BIAS] && !j->problem.dtype_bias) {
        j->problem.dtype_bias = bias;
    }
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i] && !job_has_rows(j, i) && !job_convert_input(j, i)) {
            return false;
        }
    }
    return true;
}
