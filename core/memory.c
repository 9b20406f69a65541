/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* madvise */
#include "core/memory.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/abi.h"
#include "core/status.h"

static fattn_host_allocator allocator; /* allocate NULL: malloc and free */

static atomic_int_least64_t alive;
static atomic_int_least64_t countdown; /* allocations until the one that fails; <= 0: none */
static atomic_int carried_out;

static int must_fail(void)
{
    if (atomic_load_explicit(&countdown, memory_order_relaxed) <= 0) {
        return 0;
    }
    if (atomic_fetch_sub(&countdown, 1) != 1) {
        return 0;
    }
    atomic_store(&carried_out, 1);
    return 1;
}

void *fattn_memory_alloc(size_t bytes)
{
    const size_t size = bytes ? bytes : 1;
    void *const memory = must_fail()          ? NULL
                         : allocator.allocate ? allocator.allocate(allocator.user, size)
                                              : malloc(size);
    if (memory) {
        atomic_fetch_add_explicit(&alive, 1, memory_order_relaxed);
    }
    return memory;
}

void fattn_memory_free(void *memory)
{
    if (memory) {
        atomic_fetch_sub_explicit(&alive, 1, memory_order_relaxed);
        if (allocator.release) {
            allocator.release(allocator.user, memory);
        } else {
            free(memory);
        }
    }
}

/*
 * Asks for huge pages for a large block, because the system takes 0.2 to 2 microseconds for each
 * small page when it is first written to. malloc() of glibc and musl maps blocks of this size by
 * themselves, so no other block of the process gets huge pages. Where there are none nothing
 * changes.
 */
static void prefer_huge_pages(void *block, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    const size_t large = 33 << 20; /* glibc raises the size from which it maps to 32 MiB at most */
    const size_t huge = 2 << 20;
    if (!allocator.allocate && bytes >= large) {
        const size_t before = -(uintptr_t)block % huge;
        (void)madvise((char *)block + before, (bytes - before) / huge * huge, MADV_HUGEPAGE);
    }
#else
    (void)block, (void)bytes;
#endif
}

/* The word before the aligned block holds the pointer that the allocator returned. */
void *fattn_memory_alloc_aligned(size_t bytes)
{
    const size_t slack = FATTN_MEMORY_ALIGNMENT + sizeof(void *);
    if (bytes > SIZE_MAX - slack) {
        return NULL;
    }
    void *const whole = fattn_memory_alloc(bytes + slack);
    if (!whole) {
        return NULL;
    }
    const uintptr_t first = (uintptr_t)whole + sizeof(void *);
    const uintptr_t mask = FATTN_MEMORY_ALIGNMENT - 1;
    void **const block = (void **)((first + mask) & ~mask);
    block[-1] = whole;
    prefer_huge_pages(block, bytes);
    return block;
}

void fattn_memory_free_aligned(void *memory)
{
    if (memory) {
        fattn_memory_free(((void **)memory)[-1]);
    }
}

int fattn_memory_fail_at(int64_t n)
{
    atomic_store(&countdown, n);
    return atomic_exchange(&carried_out, 0);
}

int64_t fattn_memory_alive(void) { return atomic_load(&alive); }

void fattn_host_allocator_init(fattn_host_allocator *to)
{
    *to = (fattn_host_allocator){.struct_size = sizeof *to};
}

fattn_status fattn_set_host_allocator(const fattn_host_allocator *given)
{
    fattn_host_allocator wanted;
    memset(&wanted, 0, sizeof wanted);
    const fattn_status status =
        given ? fattn_abi_read(&wanted, sizeof wanted, given, "fattn_host_allocator") : FATTN_OK;
    if (status) {
        return status;
    }
    if (given && (!wanted.allocate || !wanted.release)) {
        return fattn_fail(FATTN_NULL_POINTER, "fattn_host_allocator->%s is NULL",
                          wanted.allocate ? "release" : "allocate");
    }
    const int64_t blocks = fattn_memory_alive();
    if (blocks) {
        return fattn_fail(
            FATTN_INVALID_ARGUMENT,
            "%lld blocks of the present allocator are in use: set one before all other calls",
            (long long)blocks);
    }
    allocator = wanted;
    return FATTN_OK;
}
