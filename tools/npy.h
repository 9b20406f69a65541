/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NumPy's .npy files, versions 1 to 3: how the `fattn` tool takes and gives tensors.
 *
 * Input files are hostile until proved otherwise: a file is either read whole or refused with one
 * sentence, and nothing is allocated before the file is known to hold what its header announces.
 * Output files appear whole or not at all, several of them together where one call makes several
 * (tools/replacement.h).
 *
 * Functions that can fail return 0 or -1. On failure results are untouched, and `why` holds one
 * line that begins with the path, cut to why_size bytes and always terminated.
 */
#ifndef FATTN_TOOLS_NPY_H
#define FATTN_TOOLS_NPY_H

#include <stddef.h>
#include <stdint.h>

#include "tools/replacement.h"

enum { NPY_RANK_MAX = 8 };

/* What an element is. bf16 is unknown to NumPy and travels as <u2, or as the raw bytes |V2. */
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
    NPY_KINDS
} npy_kind;

/* An array in this machine's byte order, contiguous in C order (the last axis is adjacent). */
typedef struct npy_array {
    npy_kind kind;
    int rank;                    /* 0..NPY_RANK_MAX; 0 is a scalar: one element */
    int64_t shape[NPY_RANK_MAX]; /* [rank], each 0 or more; 0 past rank */
    int64_t count;               /* elements: the product of the shape */
    size_t item;                 /* bytes an element */
    void *data;                  /* [count], aligned for tensors; NULL when count is 0 */
} npy_array;

/* "f16", "i64" and so on. Static. */
const char *npy_kind_name(npy_kind kind);

/* Makes *out an array of this shape whose contents are undefined. name stands in for the path in
 * the reason: "o", or the file that the array is meant for. */
int npy_create(const char *name, npy_kind kind, int rank, const int64_t *shape, npy_array *out,
               char *why, size_t why_size);

/* Reads a regular file. Either byte order and either storage order is converted. as_bf16 reads
 * arrays of u2 and V2 as NPY_BF16 and leaves other dtypes what they are; without it V2 is
 * refused. */
int npy_read(const char *path, int as_bf16, npy_array *out, char *why, size_t why_size);

/* Frees the data of an array made here and empties it. An array of zero bytes may be freed too. */
void npy_free(npy_array *array);

/* Writes version 1.0, little-endian, C order; bf16 as <u2. Replaces a regular file, or the one that
 * a symbolic link points to, and refuses to replace anything else, such as a device. */
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
 * The process should ignore SIGXFSZ, so that a limit on file sizes is an error here instead of its
 * death.
 */
int npy_stage(const char *path, const npy_array *array, replacement *staged, char *why,
              size_t why_size);

#endif
