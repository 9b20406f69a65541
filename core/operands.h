/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operands of a run, from one table: which pointers a problem needs, the bytes behind each, how
 * they must be aligned and which of them are written. Validation, staging between host and device,
 * and the tensor statistics of FATTN_VERBOSE=3 all walk this list.
 */
#ifndef FATTN_CORE_OPERANDS_H
#define FATTN_CORE_OPERANDS_H

#include <stdbool.h>
#include <stddef.h>

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
} fattn_operand;

/* Whether there are bytes behind the pointer. */
static inline bool fattn_operand_is_present(const fattn_operand *operand)
{
    return operand->region.base && !fattn_region_is_empty(&operand->region);
}

/* Writes the operands of a normalised problem; buffers may be NULL. Returns how many. */
int fattn_operands(const fattn_problem *problem, const fattn_buffers *buffers,
                   fattn_operand operands[FATTN_OPERANDS_MAX]);

/* What a run has to check of its pointers, made when its plan is: the operands behind which there
 * are bytes, outputs first. */
typedef struct fattn_pointers {
    int count, outputs;
    struct {
        size_t offset;   /* in fattn_buffers */
        uintptr_t bytes; /* from the first to one past the last */
        uintptr_t rest;  /* alignment - 1 */
        bool optional;
    } of[FATTN_OPERANDS_MAX];
} fattn_pointers;

void fattn_pointers_make(const fattn_problem *problem, fattn_pointers *pointers);

/* Whether addresses alone show that the pointers of a run are good: present, aligned, and no output
 * within the span of another operand. False does not say that they are bad: spans may interleave
 * without sharing a byte. */
bool fattn_pointers_hold(const fattn_pointers *pointers, const fattn_buffers *buffers);

/* Whether they show that no operand shares a byte with some other memory. */
bool fattn_pointers_avoid(const fattn_pointers *pointers, const fattn_buffers *buffers,
                          const void *memory, size_t bytes);

#endif
