/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only door to the heap. Everything that fattn allocates on the host passes here, so that tests
 * can make the n-th allocation fail and count what is alive.
 */
#ifndef FATTN_CORE_MEMORY_H
#define FATTN_CORE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define FATTN_MEMORY_ALIGNMENT 256

/* bytes of memory, or NULL. Aligned for any type. */
void *fattn_memory_alloc(size_t bytes);
void fattn_memory_free(void *memory);

/* The same, aligned to FATTN_MEMORY_ALIGNMENT, for tensors and workspaces. */
void *fattn_memory_alloc_aligned(size_t bytes);
void fattn_memory_free_aligned(void *memory);

/* Tests only. The n-th allocation from now on fails, counting from 1, and only that one; 0 lets all
 * pass. Returns whether the previous order has been carried out. */
int fattn_memory_fail_at(int64_t n);

/* Allocations alive now. */
int64_t fattn_memory_alive(void);

#endif
