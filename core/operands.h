/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The list of a run's operands: which pointers a problem needs, the bytes behind each, how they
 * must be aligned and which of them are written. Validation, copies between host and device
 * (staging.c), the public fattn_operand_info and the tensor statistics of FATTN_VERBOSE=3 use this
 * list.
 */
#ifndef FATTN_CORE_OPERANDS_H
#define FATTN_CORE_OPERANDS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/region.h"
#include "fattn/fattn.h"

#define FATTN_OPERANDS_MAX 32

/* What the axes of an operand are. */
typedef enum fattn_operand_kind {
    FATTN_OPERAND_TENSOR, /* (batch, sequence, head, channel) */
    FATTN_OPERAND_SCORES, /* (batch, head, query, key) */
    FATTN_OPERAND_LSE,    /* (batch, head, query), contiguous */
    FATTN_OPERAND_TABLE,  /* (batch, entry) */
    FATTN_OPERAND_VECTOR
} fattn_operand_kind;

typedef struct fattn_operand {
    const char *name;
    size_t offset;       /* of the pointer in fattn_buffers */
    fattn_dtype dtype;   /* of the elements; 0 for integers */
    fattn_region region; /* base is the pointer, 0 without buffers */
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

/* For a fast check of the pointers in each run: the operands that are not empty, outputs first.
 * fattn_pointers_make() is called once per plan. */
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

/* Whether the pointers of a run are certainly valid: not NULL, aligned, and no output within the
 * span of another operand. If false they may still be valid: spans may interleave without sharing a
 * byte, and fattn_buffers_normalise() decides. */
bool fattn_pointers_are_valid(const fattn_pointers *pointers, const fattn_buffers *buffers);

/* Whether no operand's span shares a byte with other memory. */
bool fattn_pointers_avoid(const fattn_pointers *pointers, const fattn_buffers *buffers,
                          const void *memory, size_t bytes);

#endif
