/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operands of a run, from one table: which pointers a problem needs, the bytes behind each, how
 * they must be aligned and which of them are written. Validation, staging between host and device,
 * and the tensor statistics of FATTN_VERBOSE=3 all walk this list.
 */
#ifndef FATTN_CORE_OPERANDS_H
#define FATTN_CORE_OPERANDS_H

#include "core/region.h"
#include "fattn/fattn.h"

#define FATTN_OPERANDS_MAX 32

/* How an operand's region is to be read as an array. */
typedef enum fattn_operand_kind {
    FATTN_OPERAND_TENSOR, /* (batch, sequence, head, channel) */
    FATTN_OPERAND_SCORES, /* (batch, head, query, key) */
    FATTN_OPERAND_LSE,    /* (batch, head, query), one after another */
    FATTN_OPERAND_TABLE,  /* (batch, entry) */
    FATTN_OPERAND_VECTOR
} fattn_operand_kind;

typedef struct fattn_operand {
    const char *name;
    size_t offset;       /* of the pointer in fattn_buffers */
    fattn_dtype dtype;   /* of the elements; 0 for integers */
    fattn_region region; /* base is the pointer, 0 where there are no buffers */
    int64_t alignment;   /* bytes */
    fattn_operand_kind kind;
    bool output;
    bool optional; /* may be NULL */
    bool tensor;   /* one of q k v o and their gradients: the promised pointer alignment holds */
} fattn_operand;

/* Writes the operands of a normalised problem; buffers may be NULL. Returns how many. */
int fattn_operands(const fattn_problem *problem, const fattn_buffers *buffers,
                   fattn_operand operands[FATTN_OPERANDS_MAX]);

#endif
