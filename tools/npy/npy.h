/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NumPy's .npy files, versions 1 to 3: the tensors that `fattn run` reads and writes.
 *
 * Input files are untrusted: a file is either read whole or refused with one sentence, and nothing
 * is allocated before the file is known to hold as much data as its header announces. Output files
 * appear whole or not at all; several outputs of one run appear together
 * (tools/npy/replacement.h).
 *
 * Functions that can fail return 0 or -1, or COMPLAINT_NO_MEMORY. On failure results are untouched,
 * and `why` holds one line that begins with the path, cut to why_size bytes and always terminated.
 */
#ifndef FATTN_TOOLS_NPY_H
#define FATTN_TOOLS_NPY_H

#include <stddef.h>
#include <stdint.h>

#include "fattn/distributed.h"
#include "tools/npy/complaint.h"
#include "tools/npy/replacement.h"

enum { NPY_RANK_MAX = 8 };

/* The type of an element. NumPy has no bf16 and no e4m3: they are stored as <u2 and |u1, or as the
 * raw bytes |V2 and |V1. */
typedef enum npy_kind {
    NPY_F16,
    NPY_F32,
    NPY_F64,
    NPY_BOOL, /* a byte, false when zero */
    NPY_I8,
    NPY_I16,
    NPY_I32,
    NPY_I64,
    NPY_U8,
    NPY_U16,
    NPY_U32,
    NPY_U64,
    NPY_BF16,
    NPY_E4M3,
    NPY_KINDS
} npy_kind;

/* An array in this machine's byte order, contiguous in C order (the last axis is adjacent). */
typedef struct npy_array {
    npy_kind kind;
    int rank;                    /* 0..NPY_RANK_MAX; 0 is a scalar: one element */
    int64_t shape[NPY_RANK_MAX]; /* [rank], each 0 or more; 0 past rank */
    int64_t count;               /* elements: the product of the shape */
    size_t item;                 /* bytes per element */
    void *data;                  /* [count], aligned for tensors; NULL when count is 0 */
} npy_array;

/* "f16", "i64" and so on. Static. */
const char *npy_kind_name(npy_kind kind);

/* Makes *out an array of this shape with undefined contents. Error messages begin with name: "o",
 * or the file that the array is meant for. */
int npy_create(const char *name, npy_kind kind, int rank, const int64_t *shape, npy_array *out,
               char *why, size_t why_size);

/* Reads a regular file, converting from either byte order and either storage order. With `as`
 * NPY_BF16, arrays of u2 and V2 are read as that, with NPY_E4M3 those of u1 and V1; other kinds
 * have no effect. Other dtypes are left alone, and raw bytes are refused. */
int npy_read(const char *path, npy_kind as, npy_array *out, char *why, size_t why_size);

/* Reads only the type and the shape; data stays NULL. */
int npy_read_shape(const char *path, npy_kind as, npy_array *out, char *why, size_t why_size);

/* Rows of an array along an axis: those of `runs`, one run after another. */
typedef struct npy_rows {
    int axis;
    int64_t count;         /* of runs */
    const fattn_run *runs; /* within the array */
} npy_rows;

/* Reads only these rows: along the axis *out has as many rows as the runs. Fortran order is
 * refused. */
int npy_read_rows(const char *path, npy_kind as, const npy_rows *rows, npy_array *out, char *why,
                  size_t why_size);

/* Frees the data and empties the array. Zeroed arrays may be freed as well. */
void npy_free(npy_array *array);

/* Writes version 1.0, little-endian, C order; bf16 as <u2, e4m3 as |u1. Replaces a regular file, or
 * the one that a symbolic link points to, and refuses to replace anything else, such as a
 * device. */
int npy_write(const char *path, const npy_array *array, char *why, size_t why_size);

/*
 * The same in two phases, for outputs that must appear together:
 *
 *     replacement staged[2] = {{0}};
 *     if (npy_stage("o.npy", &o, &staged[0], why, size) ||
 *         npy_stage("lse.npy", &lse, &staged[1], why, size) ||
 *         replacement_commit(staged, 2, why, size)) {
 *         replacement_abandon(staged, 2);
 *     }
 *
 * The process should ignore SIGXFSZ, so that exceeding a file size limit is an error here rather
 * than a fatal signal.
 */
int npy_stage(const char *path, const npy_array *array, replacement *staged, char *why,
              size_t why_size);

/* Stages a file of this array's type and shape whose data is 0: processes that share a file system
 * then write rows of it under its temporary name. */
int npy_stage_zeros(const char *path, const npy_array *array, replacement *staged, char *why,
                    size_t why_size);
int npy_write_rows(const char *temporary, const npy_rows *rows, const npy_array *array, char *why,
                   size_t why_size);

#endif
