/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hopper's own instructions, sm_90a: barriers in shared memory (mbarrier), the copy engine (TMA)
 * and the products of a warpgroup, that is, of 128 threads (wgmma). All of them are in this header,
 * except griddepcontrol (vendor.h) and additions of several floats (mma_sm80.cuh).
 *
 * Copies and products are asynchronous. An mbarrier counts arrivals and bytes: its phase completes
 * when the number of threads that it was made for have arrived, and all bytes that they have
 * announced have landed. The parity of phases alternates between 0 and 1. A wait for the phase
 * before the first returns at once.
 *
 * Products of a warpgroup complete in the order in which they were issued, in groups. Until its
 * group is complete, nothing may touch a product's registers. The compiler does not know this: it
 * must see wgmma_fence() before a product, and wgmma_settle() of its accumulators after the wait.
 */
#ifndef FATTN_CUDA_WGMMA_SM90_CUH
#define FATTN_CUDA_WGMMA_SM90_CUH

#include "backends/cuda/mma_sm80.cuh"
#include "backends/cuda/wgmma.h"

/* --- Warpgroups ------------------------------------------------------------------------------- */

/* The number of the warpgroup. The shuffle tells the compiler that it is uniform over the warp;
 * without that, registers cannot be reallocated. */
GPU_DEVICE int wgmma_group(void) { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); }

/* All warpgroups begin with the same number of registers. Each sets its own number once: producers
 * give up registers, consumers take more (setmaxnreg). */
template <int N> GPU_DEVICE void wgmma_give_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> GPU_DEVICE void wgmma_take_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* Named barriers of the block, 1 .. 15, for `threads` threads, of which some wait and others only
 * arrive. */
GPU_DEVICE void wgmma_named_sync(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

GPU_DEVICE void wgmma_named_arrive(int number, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* A named barrier that returns whether `own` is true in all of its threads. */
GPU_DEVICE bool wgmma_named_all(int number, int threads, bool own)
{
    int all;
    asm volatile("{ .reg .pred own, all; "
                 "setp.ne.s32 own, %3, 0; "
                 "barrier.cta.red.and.pred all, %1, %2, own; "
                 "selp.s32 %0, 1, 0, all; }"
                 : "=r"(all)
                 : "r"(number), "r"(threads), "r"((int)own)
                 : "memory");
    return __all_sync(0xffffffffu, all); /* tells the compiler that it is uniform over the warp */
}

/* How many blocks of a resident launch are assumed to run at the same time: three quarters, so that
 * other work may hold the rest of the multiprocessors. If other work holds more of them, a
 * deterministic run whose items are shifted (wgmma_shift.h) waits until it ends. */
GPU_DEVICE int wgmma_side_by_side(void) { return max((int)gpu_blocks() * 3 / 4, 1); }

/* --- Clusters --------------------------------------------------------------------------------- */

/* The block's number in its cluster. */
GPU_DEVICE int wgmma_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Waits for all threads of the cluster. */
GPU_DEVICE void wgmma_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

/* The block's own shared memory. (An emulator replaces this function.) */
GPU_DEVICE char *wgmma_own_memory(char *shared) { return shared; }

/* The cluster address of the place in block `rank` that corresponds to `at` in this block. */
GPU_DEVICE uint32_t wgmma_address_in(int rank, uint32_t at)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

/* --- Barriers in shared memory ---------------------------------------------------------------- */

GPU_DEVICE void wgmma_barrier_make(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mma_shared(barrier)), "r"(arrivals)
                 : "memory");
}

/* Makes new barriers visible to TMA and to the cluster. */
GPU_DEVICE void wgmma_barriers_made(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

GPU_DEVICE void wgmma_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mma_shared(barrier)) : "memory");
}

/* Arrives at the same barrier of another block of the cluster, to tell it that this thread has read
 * something. It does not release writes to the cluster, since that would wait for all of the
 * thread's writes, including those to global memory. */
GPU_DEVICE void wgmma_arrive_in(int rank, uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                     wgmma_address_in(rank, mma_shared(barrier)))
                 : "memory");
}

/* Arrives, and announces bytes. */
GPU_DEVICE void wgmma_arrive_expect_tx(uint64_t *barrier, int bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mma_shared(barrier)),
        "r"(bytes)
        : "memory");
}

GPU_DEVICE bool wgmma_try(uint32_t barrier, int phase)
{
    uint32_t ended;
    asm volatile("{ .reg .pred ended; "
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2; "
                 "selp.u32 %0, 1, 0, ended; }"
                 : "=r"(ended)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return ended != 0;
}

/* For builds with WGMMA_SHAKE, which search for missing synchronisation between roles: threads are
 * delayed at random, by up to four microseconds, and a tile's stage is filled with NaN before a
 * copy to it. */
GPU_DEVICE void wgmma_shake(void)
{
#ifdef WGMMA_SHAKE
    const unsigned dice = (unsigned)clock64() * 2654435761u >> 16;
    if (dice % 8 == 0) {
        __nanosleep(dice / 8 % 4096);
    }
#endif
}

GPU_DEVICE void wgmma_poison(uint32_t at, int bytes)
{
#ifdef WGMMA_SHAKE
    for (int n = 0; n < bytes; n += 4) {
        mma_put(at + n, UINT32_MAX);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    (void)at, (void)bytes;
#endif
}

/* Waits until the phase has ended. */
GPU_DEVICE void wgmma_await(uint64_t *barrier, int phase)
{
    wgmma_shake();
    while (!wgmma_try(mma_shared(barrier), phase)) {}
}

/* --- Copies ----------------------------------------------------------------------------------- */

/* A tensor map, a kernel parameter that describes a tensor to TMA. */
typedef struct alignas(64) wgmma_map {
    uint8_t bytes[128];
} wgmma_map;

/* Prefetches the map itself. */
GPU_DEVICE void wgmma_prefetch(const wgmma_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* L2 policies of copies: evict last, or evict first. */
#define WGMMA_EVICT_LAST UINT64_C(0x14f0000000000000)
#define WGMMA_EVICT_FIRST UINT64_C(0x12f0000000000000)

/* Begins to copy a box, whose bytes are counted by the barrier when they land. Elements outside the
 * tensor become zeros. */
GPU_DEVICE void wgmma_copy(uint32_t to, const wgmma_map *map, uint64_t *barrier, int c0, int c1,
                           int c2, int c3, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(mma_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
                 : "memory");
}

GPU_DEVICE void wgmma_copy(uint32_t to, const wgmma_map *map, uint64_t *barrier, int c0, int c1,
                           int c2, int c3, int c4, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
                 "l"(map), "r"(mma_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
                 "l"(policy)
                 : "memory");
}

/* Multicasts a box to both blocks of a cluster: to the same place and the same barrier in each. */
GPU_DEVICE void wgmma_copy_to_both(uint32_t to, const wgmma_map *map, uint64_t *barrier, int c0,
                                   int c1, int c2, int c3, uint64_t policy)
{
    const uint16_t blocks = 3;
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
        "l"(map), "r"(mma_shared(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks),
        "l"(policy)
        : "memory");
}

/* The same for contiguous bytes; address and size are multiples of 16. */
GPU_DEVICE void wgmma_copy_bytes(uint32_t to, const void *from, int bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(mma_shared(barrier))
                 : "memory");
}

/* Begins to copy bytes of shared memory to block `rank` of the cluster, whose barrier counts them
 * when they land. */
GPU_DEVICE void wgmma_send(int rank, uint32_t to, uint32_t from, int bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(wgmma_address_in(rank, to)),
                 "r"(from), "r"(bytes), "r"(wgmma_address_in(rank, mma_shared(barrier)))
                 : "memory");
}

/* The same for a number. */
GPU_DEVICE void wgmma_send_number(int rank, int *to, int x, uint64_t *barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     wgmma_address_in(rank, mma_shared(to))),
                 "r"(x), "r"(wgmma_address_in(rank, mma_shared(barrier)))
                 : "memory");
}

/* Begins to add floats of shared memory to floats of global memory, as a bulk group of this thread
 * (cp.reduce.async.bulk). */
GPU_DEVICE void wgmma_add(float *to, uint32_t from, int bytes, uint64_t policy)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 "
                 "[%0], [%1], %2, %3;" ::"l"(to),
                 "r"(from), "r"(bytes), "l"(policy)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* The same, but the floats are stored instead of added. */
GPU_DEVICE void wgmma_replace(float *to, uint32_t from, int bytes, uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
        "r"(from), "r"(bytes), "l"(policy)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Begins to store a box of shared memory, as a bulk group of this thread. Elements outside the
 * tensor are not stored. */
GPU_DEVICE void wgmma_store_box(const wgmma_map *map, uint32_t from, int c0, int c1, int c2, int c3)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's groups have read shared memory. */
GPU_DEVICE void wgmma_await_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until this thread's groups are complete, and their writes visible to it. */
GPU_DEVICE void wgmma_await_added(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* An acquire load of a word of global memory that other blocks write: what they wrote before it is
 * visible after this. */
GPU_DEVICE int32_t wgmma_peek(const int32_t *from)
{
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

/* Makes this thread's stores to shared memory visible to copies and products (the async proxy). */
GPU_DEVICE void wgmma_publish(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Stores 16 bytes of zeros. */
GPU_DEVICE void wgmma_zero(uint32_t to)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

GPU_DEVICE void wgmma_put(uint32_t to, float x)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

/* Stores four words to an address aligned to 16. */
GPU_DEVICE void wgmma_put_four(uint32_t to, const uint32_t x[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

GPU_DEVICE uint32_t wgmma_get_half(uint32_t from)
{
    uint32_t x;
    asm volatile("{ .reg .b16 half; ld.shared.u16 half, [%1]; cvt.u32.u16 %0, half; }"
                 : "=r"(x)
                 : "r"(from)
                 : "memory");
    return x;
}

/* Stores four 8 x 8 matrices (stmatrix). Lanes 8 n .. 8 n + 7 give the addresses of the rows of
 * matrix n. */
GPU_DEVICE void wgmma_put_matrices(uint32_t to, const uint32_t x[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/* Stores four 8 x 8 matrices, each transposed (stmatrix). Lanes 8 n .. 8 n + 7 give the addresses
 * of the rows of matrix n. */
GPU_DEVICE void wgmma_put_transposed(uint32_t to, const uint32_t x[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/* A compiler barrier: values are read from memory again where they are needed. For producer
 * threads, which have few registers. */
GPU_DEVICE void wgmma_forget(void) { asm volatile("" ::: "memory"); }

/* x in a register of its own, so that the compiler does not load it again at each use. */
GPU_DEVICE float wgmma_own(float x)
{
    asm volatile("" : "+f"(x));
    return x;
}

/* --- Products --------------------------------------------------------------------------------- */

GPU_DEVICE void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/* Ends a group of products (wgmma.commit_group). */
GPU_DEVICE void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most N groups are incomplete. */
template <int N> GPU_DEVICE void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving reads of these accumulators before the wait. */
template <int N> GPU_DEVICE void wgmma_settle(float c[N][4])
{
    GPU_UNROLL
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
    }
}

/* Operand lists of asm statements, in steps of 16 columns: accumulators that are added to
 * (WGMMA_SUMS), accumulators that are set (WGMMA_NEW), and operand numbers (WGMMA_LIST). */
#define WGMMA_EIGHT(c, n)                                                            \
    "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[(n) + 1][0]), \
        "+f"(c[(n) + 1][1]), "+f"(c[(n) + 1][2]), "+f"(c[(n) + 1][3])
#define WGMMA_NEW(c, n)                                                              \
    "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3]), "=f"(c[(n) + 1][0]), \
        "=f"(c[(n) + 1][1]), "=f"(c[(n) + 1][2]), "=f"(c[(n) + 1][3])
/* clang-format off */
#define WGMMA_NEW_1(c) WGMMA_NEW(c, 0)
#define WGMMA_NEW_2(c) WGMMA_NEW_1(c), WGMMA_NEW(c, 2)
#define WGMMA_NEW_3(c) WGMMA_NEW_2(c), WGMMA_NEW(c, 4)
#define WGMMA_NEW_4(c) WGMMA_NEW_3(c), WGMMA_NEW(c, 6)
#define WGMMA_NEW_5(c) WGMMA_NEW_4(c), WGMMA_NEW(c, 8)
#define WGMMA_NEW_6(c) WGMMA_NEW_5(c), WGMMA_NEW(c, 10)
#define WGMMA_NEW_7(c) WGMMA_NEW_6(c), WGMMA_NEW(c, 12)
#define WGMMA_NEW_8(c) WGMMA_NEW_7(c), WGMMA_NEW(c, 14)
#define WGMMA_NEW_9(c) WGMMA_NEW_8(c), WGMMA_NEW(c, 16)
#define WGMMA_NEW_10(c) WGMMA_NEW_9(c), WGMMA_NEW(c, 18)
#define WGMMA_NEW_11(c) WGMMA_NEW_10(c), WGMMA_NEW(c, 20)
#define WGMMA_NEW_12(c) WGMMA_NEW_11(c), WGMMA_NEW(c, 22)
#define WGMMA_NEW_13(c) WGMMA_NEW_12(c), WGMMA_NEW(c, 24)
#define WGMMA_NEW_14(c) WGMMA_NEW_13(c), WGMMA_NEW(c, 26)
#define WGMMA_NEW_15(c) WGMMA_NEW_14(c), WGMMA_NEW(c, 28)
#define WGMMA_NEW_16(c) WGMMA_NEW_15(c), WGMMA_NEW(c, 30)
#define WGMMA_SUMS_1(c) WGMMA_EIGHT(c, 0)
#define WGMMA_SUMS_2(c) WGMMA_SUMS_1(c), WGMMA_EIGHT(c, 2)
#define WGMMA_SUMS_3(c) WGMMA_SUMS_2(c), WGMMA_EIGHT(c, 4)
#define WGMMA_SUMS_4(c) WGMMA_SUMS_3(c), WGMMA_EIGHT(c, 6)
#define WGMMA_SUMS_5(c) WGMMA_SUMS_4(c), WGMMA_EIGHT(c, 8)
#define WGMMA_SUMS_6(c) WGMMA_SUMS_5(c), WGMMA_EIGHT(c, 10)
#define WGMMA_SUMS_7(c) WGMMA_SUMS_6(c), WGMMA_EIGHT(c, 12)
#define WGMMA_SUMS_8(c) WGMMA_SUMS_7(c), WGMMA_EIGHT(c, 14)
#define WGMMA_SUMS_9(c) WGMMA_SUMS_8(c), WGMMA_EIGHT(c, 16)
#define WGMMA_SUMS_10(c) WGMMA_SUMS_9(c), WGMMA_EIGHT(c, 18)
#define WGMMA_SUMS_11(c) WGMMA_SUMS_10(c), WGMMA_EIGHT(c, 20)
#define WGMMA_SUMS_12(c) WGMMA_SUMS_11(c), WGMMA_EIGHT(c, 22)
#define WGMMA_SUMS_13(c) WGMMA_SUMS_12(c), WGMMA_EIGHT(c, 24)
#define WGMMA_SUMS_14(c) WGMMA_SUMS_13(c), WGMMA_EIGHT(c, 26)
#define WGMMA_SUMS_15(c) WGMMA_SUMS_14(c), WGMMA_EIGHT(c, 28)
#define WGMMA_SUMS_16(c) WGMMA_SUMS_15(c), WGMMA_EIGHT(c, 30)
#define WGMMA_LIST_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_LIST_2 WGMMA_LIST_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_LIST_3 WGMMA_LIST_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_LIST_4 WGMMA_LIST_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_LIST_5 WGMMA_LIST_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_LIST_6 WGMMA_LIST_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_LIST_7 WGMMA_LIST_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_LIST_8 WGMMA_LIST_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_LIST_9 WGMMA_LIST_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_LIST_10 WGMMA_LIST_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_LIST_11 WGMMA_LIST_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_LIST_12 WGMMA_LIST_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_LIST_13 WGMMA_LIST_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_LIST_14 WGMMA_LIST_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_LIST_15 WGMMA_LIST_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_LIST_16 WGMMA_LIST_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
/* clang-format on */

/*
 * A product of a warpgroup: 64 rows, N columns, summed over 16 16-bit elements. It is added to the
 * accumulators c or, if `add` is false, replaces them.
 *
 *     tiles()           a and b are descriptors; channels are summed over
 *     transposed_a()    a is transposed: channels are the product's rows, a's rows are summed over
 *     transposed_b()    b is transposed: its rows are summed over
 *     transposed_ab()   both are
 *     pairs()           a is in registers; the rows of b are summed over
 *     new_..            replaces the accumulators, which need not be initialised
 */
template <class T, int N> struct wgmma_product;
#define WGMMA_SET(type, n, groups, o0, o1, transposes)                                          \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                \
                 " {" WGMMA_LIST_##groups "}, %" #o0 ", %" #o1 ", add, 1, 1, " transposes "; }" \
                 : WGMMA_NEW_##groups(c)                                                        \
                 : "l"(a), "l"(b))
#define WGMMA_ADD(type, n, groups, o0, o1, transposes)                                          \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                \
                 " {" WGMMA_LIST_##groups "}, %" #o0 ", %" #o1 ", add, 1, 1, " transposes "; }" \
                 : WGMMA_SUMS_##groups(c)                                                       \
                 : "l"(a), "l"(b))
#define WGMMA_PRODUCT(tag, type, n, groups, o0, o1, o2, o3, o4, o5)                            \
    template <> struct wgmma_product<tag, n> {                                                 \
        GPU_DEVICE void tiles(float (*c)[4], uint64_t a, uint64_t b, bool add)                 \
        {                                                                                      \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #o2 ", 0; "                    \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type       \
                         " {" WGMMA_LIST_##groups "}, %" #o0 ", %" #o1 ", add, 1, 1, 0, 0; }"  \
                         : WGMMA_SUMS_##groups(c)                                              \
                         : "l"(a), "l"(b), "r"((int)add));                                     \
        }                                                                                      \
        GPU_DEVICE void new_tiles(float (*c)[4], uint64_t a, uint64_t b)                       \
        {                                                                                      \
            WGMMA_SET(type, n, groups, o0, o1, "0, 0");                                        \
        }                                                                                      \
        GPU_DEVICE void new_transposed_a(float (*c)[4], uint64_t a, uint64_t b)                \
        {                                                                                      \
            WGMMA_SET(type, n, groups, o0, o1, "1, 0");                                        \
        }                                                                                      \
        GPU_DEVICE void transposed_a(float (*c)[4], uint64_t a, uint64_t b)                    \
        {                                                                                      \
            WGMMA_ADD(type, n, groups, o0, o1, "1, 0");                                        \
        }                                                                                      \
        GPU_DEVICE void transposed_b(float (*c)[4], uint64_t a, uint64_t b)                    \
        {                                                                                      \
            WGMMA_ADD(type, n, groups, o0, o1, "0, 1");                                        \
        }                                                                                      \
        GPU_DEVICE void transposed_ab(float (*c)[4], uint64_t a, uint64_t b)                   \
        {                                                                                      \
            WGMMA_ADD(type, n, groups, o0, o1, "1, 1");                                        \
        }                                                                                      \
        GPU_DEVICE void pairs(float (*c)[4], const uint32_t a[4], uint64_t b, bool add)        \
        {                                                                                      \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #o5 ", 0; "                    \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type       \
                         " {" WGMMA_LIST_##groups "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3    \
                                                  "}, %" #o4 ", add, 1, 1, 1; }"               \
                         : WGMMA_SUMS_##groups(c)                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)); \
        }                                                                                      \
    };
#define WGMMA_PRODUCTS(n, ...)                      \
    WGMMA_PRODUCT(mma_bf16, "bf16", n, __VA_ARGS__) \
    WGMMA_PRODUCT(mma_f16, "f16", n, __VA_ARGS__)
WGMMA_PRODUCTS(32, 2, 16, 17, 18, 19, 20, 21)
WGMMA_PRODUCTS(64, 4, 32, 33, 34, 35, 36, 37)
WGMMA_PRODUCTS(96, 6, 48, 49, 50, 51, 52, 53)
WGMMA_PRODUCTS(112, 7, 56, 57, 58, 59, 60, 61)
WGMMA_PRODUCTS(128, 8, 64, 65, 66, 67, 68, 69)
WGMMA_PRODUCTS(192, 12, 96, 97, 98, 99, 100, 101)
WGMMA_PRODUCTS(256, 16, 128, 129, 130, 131, 132, 133)

/* The minimum of unsigned 16-bit numbers in each half. */
GPU_DEVICE uint32_t wgmma_smaller_halves(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("min.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

/* In each half, all bits set if the bf16 of a is not less than that of b, or else 0. */
GPU_DEVICE uint32_t wgmma_not_less(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

/* Multiplies each number of a pair of type T by 1 if the top bit of its half of x is set, or by 0
 * if not, so that NaN stays NaN. */
template <class T> GPU_DEVICE uint32_t wgmma_drop_halves(uint32_t pair, uint32_t x)
{
    constexpr bool IS_BF16 = (int)T::DTYPE == (int)FATTN_BF16;
    uint32_t ones;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(ones) : "r"(x));
    ones &= IS_BF16 ? 0x3f803f80u : 0x3c003c00u;
    if (IS_BF16) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(ones));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(ones));
    }
    return pair;
}

/* Returns x, and keeps the compiler from testing its bits before this point. Otherwise it tests all
 * of them at once, for all uses, and keeps each result in a register of its own. */
GPU_DEVICE uint32_t wgmma_anew(uint32_t x)
{
    asm volatile("" : "+r"(x)::"memory");
    return x;
}

/* The largest of three signed numbers. */
GPU_DEVICE int wgmma_larger(int a, int b, int c) { return __vimax3_s32(a, b, c); }

#endif
