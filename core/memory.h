/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The heap. All host memory that fattn allocates comes from these functions, so that tests can make
 * the n-th allocation fail and count the blocks that have not been freed.
 */
#ifndef FATTN_CORE_MEMORY_H
#define FATTN_CORE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define FATTN_MEMORY_ALIGNMENT 256

/* Allocates memory that is aligned for any type; NULL if there is none. Freeing NULL is allowed. */
void *fattn_memory_alloc(size_t bytes);
void fattn_memory_free(void *memory);

/* The same, aligned to FATTN_MEMORY_ALIGNMENT, for tensors and workspaces. */
void *fattn_memory_alloc_aligned(size_t bytes);
void fattn_memory_free_aligned(void *memory);

/* Tests only. Makes the n-th allocation from now on fail, counting from 1, and only that one; with
 * 0 none fails. Returns 1 if the allocation that the previous call named has failed, else 0. */
int fattn_memory_fail_at(int64_t n);

/* The number of blocks that are allocated now. */
int64_t fattn_memory_alive(void);

#endif
