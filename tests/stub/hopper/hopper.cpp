/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the Hopper kernels (wgmma_forward.cuh, wgmma_backward.cuh), and those of mma.sync that
 * decode (mma_decode.cuh) or are for caches in e4m3 (mma_widen.cuh), on the host, from their
 * source: the words of wgmma_sm90.cuh and mma_sm80.cuh are defined here by what the manual of the
 * instruction set says they do. The stub driver calls it for every launch.
 *
 * The threads of a block, or of a cluster of blocks, are fibers. The lanes of a warp stay together
 * as long as they do the same. The order in which warps run is random, and a warp may sleep for
 * long where it has to wait; copies end at random times and in any order; a product is made at the
 * earliest or at the latest moment that the waits allow. Shared memory is full of NaN or, in other
 * launches, of large numbers at first, and so is the place of a tile before each copy. So a role
 * that does not wait for another gives wrong numbers, what was in memory before tells runs apart,
 * and roles that wait for each other are noticed: nothing moves.
 *
 * What is not modelled: fences, the distinction of proxies, the cost of anything.
 */
#include <cmath>
#include <csetjmp>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

extern "C" {
#include "tests/stub/stub_cuda.h"
}

/* --- Fibers ----------------------------------------------------------------------------------- */

enum {
    THREADS_MAX = 512,
    CLUSTER_MAX = 2,
    FIBERS_MAX = THREADS_MAX * CLUSTER_MAX,
    STACK = 256 << 10,
    STACK_SHIFT = 320, /* from one fiber's stack to the next, or all would share a cache's sets */
    STACK_SHIFTS = 200,
    SHARED_MAX = 232448,
    PATIENCE = 20000
};

struct index3 {
    unsigned x;
};

struct product {
    bool tiles, a_transposed, b_transposed, add, f16;
    int columns, group;
    float (*c)[4];
    const uint32_t *a;
    uint64_t a_at, b_at;
};

/* Of a thread, by cp.async. */
struct async_copy {
    uint32_t to;
    const void *from;
    int bytes, group; /* bytes: how many exist, of 16 */
};

struct fiber {
    jmp_buf here;
    ucontext_t start;
    std::vector<char> stack;
    bool started, ended;
    const void *word; /* NULL, or what it waits for: that this word changes in the bits of mask */
    uint32_t mask, value;
    index3 thread;
    int group; /* of products, that is open */
    std::vector<product> products;
    int async_group; /* of copies, that is open */
    std::vector<async_copy> async;
};

struct meeting { /* of a warp, a warpgroup, or of a numbered barrier's threads */
    int arrived, turn;
};

/* By a map, or of bytes that lie one after the other: to shared memory or from there. What comes
 * from there is stored, or added as floats. sent: what comes from shared memory itself. */
struct copy {
    stub_map map;
    uint32_t to, barrier;
    int at[5], delay;
    const void *from;
    float *sums;
    bool replaces; /* they are stored instead */
    bool stores;   /* a box of shared memory, by the map */
    int bytes, thread;
    std::vector<char> sent;
};

static struct {
    std::vector<fiber> fibers;
    jmp_buf scheduler;
    int running, threads, together, sleep[FIBERS_MAX / 32]; /* together: blocks of a cluster */
    meeting warps[FIBERS_MAX / 32], warpgroups[FIBERS_MAX / 128], barriers[CLUSTER_MAX][16];
    meeting cluster;
    bool denied[16], agreed[16]; /* what threads say at barriers, and what came of it */
    uint32_t words[FIBERS_MAX];
    bool any, said; /* of a block that is asking, and what the last one heard */
    std::vector<copy> copies;
    int64_t registers[CLUSTER_MAX]; /* that no warpgroup holds */
    uint64_t dice, moves;
    uint32_t shared_bytes, shared_base;
    bool converts; /* whether there is an instruction for e4m3 */
    int garbage;   /* each byte of memory that nobody has written, in the launch */
    bool failed;
    unsigned block, blocks;
    void (*kernel)(void **parameters);
    void **parameters;
} m;

static unsigned draw(unsigned below)
{
    m.dice = m.dice * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (unsigned)(m.dice >> 33) % below;
}

/* The running thread's block in its cluster. */
static int rank_of_running(void) { return m.running / m.threads; }

__attribute__((format(printf, 1, 2))) static void fail(const char *words, ...)
{
    if (!m.failed) {
        va_list list;
        va_start(list, words);
        fprintf(stderr, "emulated Hopper, block %u, thread %d: ", m.block, m.running);
        vfprintf(stderr, words, list);
        fprintf(stderr, "\n");
        va_end(list);
    }
    m.failed = true;
}

static void yield(void)
{
    if (_setjmp(m.fibers[(size_t)m.running].here) == 0) {
        _longjmp(m.scheduler, 1);
    }
}

/* Waits while the bits of mask are those of value in a word of 32 bits. The scheduler looks at the
 * word by itself: switching to each of a thousand fibers took most of the time. */
static void wait_while(const void *word, uint32_t mask, uint32_t value)
{
    fiber &f = m.fibers[(size_t)m.running];
    f.word = word, f.mask = mask, f.value = value;
    yield();
    f.word = NULL;
}

static bool waits(const fiber &f)
{
    uint32_t now;
    if (!f.word) {
        return false;
    }
    memcpy(&now, f.word, sizeof now);
    return (now & f.mask) == f.value;
}

static void enter(void)
{
    m.kernel(m.parameters);
    m.fibers[(size_t)m.running].ended = true;
    m.moves++;
    _longjmp(m.scheduler, 1);
}

static void resume(int thread)
{
    fiber &f = m.fibers[(size_t)thread];
    m.running = thread;
    if (_setjmp(m.scheduler) == 0) {
        if (f.started) {
            _longjmp(f.here, 1);
        }
        f.started = true;
        setcontext(&f.start);
    }
}

/* Waits for `threads` in all, of which this is one. `last` is called once all are there. */
template <class Last> static void meet(meeting &of, int threads, const Last &last)
{
    const int turn = of.turn;
    m.moves++;
    if (++of.arrived == threads) {
        last();
        of.arrived = 0;
        of.turn++;
        return;
    }
    wait_while(&of.turn, UINT32_MAX, (uint32_t)turn);
}

/* --- CUDA's words, and vendor.h --------------------------------------------------------------- */

#define FATTN_CUDA_VENDOR_H
#define FATTN_CUDA_MMA_SM80_CUH
#define FATTN_CUDA_WGMMA_SM90_CUH
#define GPU_KERNEL(threads, blocks) extern "C" void
#define GPU_CLUSTER(blocks)
#define GPU_PARAM
#define GPU_DEVICE static inline
#define GPU_UNROLL
#define GPU_ROLLED
#define GPU_WAVE 32
#define GPU_SHARED static
#define __shared__
#define threadIdx m.fibers[(size_t)m.running].thread

typedef struct gpu_f2 {
    float x, y;
} gpu_f2;
typedef struct gpu_f4 {
    float x, y, z, w;
} gpu_f4;
typedef struct gpu_u2 {
    uint32_t x, y;
} gpu_u2;
typedef struct gpu_u4 {
    uint32_t x, y, z, w;
} gpu_u4;

/* Of a block. */
enum { SHARED_ROOM = (SHARED_MAX + 2048) / 1024 * 1024 };

alignas(1024) char shared[CLUSTER_MAX * SHARED_ROOM];

/* Where a block's memory begins: for Hopper's own kernels no multiple of what the swizzle wants. */
enum { SHARED_UNALIGNED = 1040, SHARED_ALIGNED = 1024 };

static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static float __int_as_float(int x)
{
    float y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static int __float_as_int(float x)
{
    int y;
    memcpy(&y, &x, sizeof y);
    return y;
}

/* What the unit makes is 0x7fffffff where it is no number; a host keeps an operand's sign. */
static float multiply_add(float a, float b, float c)
{
    const float y = fmaf(a, b, c);
    return std::isnan(y) ? __int_as_float(0x7fffffff) : y;
}
#define fmaf multiply_add

/* The word that lane `from` of the warp gives. */
static uint32_t exchange(uint32_t word, int from)
{
    const int warp = m.running / 32;
    m.words[m.running] = word;
    meet(m.warps[warp], 32, [] {});
    const uint32_t got = m.words[warp * 32 + from];
    meet(m.warps[warp], 32, [] {}); /* before the words are given anew */
    return got;
}

static uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int n)
{
    return exchange(x, m.running % 32 ^ n);
}
static uint32_t __shfl_up_sync(uint32_t, uint32_t x, int n)
{
    const int lane = m.running % 32;
    return exchange(x, lane < n ? lane : lane - n);
}
static int __shfl_sync(uint32_t, int x, int lane) { return (int)exchange((uint32_t)x, lane); }
static uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return exchange(x, lane); }
static uint64_t __shfl_sync(uint32_t, unsigned long long x, int lane)
{
    const uint64_t high = exchange((uint32_t)(x >> 32), lane);
    return high << 32 | exchange((uint32_t)x, lane);
}
static bool __any_sync(uint32_t, bool x)
{
    const int warp = m.running / 32;
    bool any = false;
    m.words[m.running] = x;
    meet(m.warps[warp], 32, [] {});
    for (int n = 0; n < 32; n++) {
        any = any || m.words[warp * 32 + n];
    }
    meet(m.warps[warp], 32, [] {});
    return any;
}
static uint32_t __ballot_sync(uint32_t, int x)
{
    const int warp = m.running / 32;
    uint32_t bits = 0;
    m.words[m.running] = x != 0;
    meet(m.warps[warp], 32, [] {});
    for (int n = 0; n < 32; n++) {
        bits |= m.words[warp * 32 + n] << n;
    }
    meet(m.warps[warp], 32, [] {});
    return bits;
}
static int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static int __popcll(uint64_t x) { return __builtin_popcountll(x); }

static int __popc(uint32_t x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clzll(int64_t x) { return x ? __builtin_clzll((uint64_t)x) : 64; }
static bool __all_sync(uint32_t lanes, bool x) { return !__any_sync(lanes, !x); }
template <class Add> static int reduce(int x, int first, const Add &add)
{
    const int warp = m.running / 32;
    m.words[m.running] = (uint32_t)x;
    meet(m.warps[warp], 32, [] {});
    for (int n = 0; n < 32; n++) {
        first = add(first, (int)m.words[warp * 32 + n]);
    }
    meet(m.warps[warp], 32, [] {});
    return first;
}

static int __reduce_add_sync(uint32_t, int x)
{
    return reduce(x, 0, [](int a, int b) { return a + b; });
}

static int __reduce_max_sync(uint32_t, int x)
{
    return reduce(x, x, [](int a, int b) { return max(a, b); });
}
template <class Word> static Word atomicAdd(Word *at, Word x)
{
    const Word before = *at;
    *at += x;
    return before;
}
static unsigned atomicOr(unsigned *at, unsigned x)
{
    const unsigned before = *at;
    *at |= x;
    return before;
}
#define __syncwarp() meet(m.warps[m.running / 32], 32, [] {})

static int gpu_thread(void) { return m.running % m.threads; }
static int gpu_thread_anew(void) { return gpu_thread(); }
static int64_t gpu_uniform(int64_t x) { return x; }
static int gpu_threads(void) { return m.threads; }
static int64_t gpu_block(void) { return m.block + (unsigned)rank_of_running(); }
static int64_t gpu_blocks(void) { return m.blocks; }
static void gpu_sync(void)
{
    meet(m.barriers[rank_of_running()][0], m.threads, [] {});
    if (draw(256) == 0) { /* threads behind a barrier need not go on at once */
        m.sleep[m.running / 32] = (int)draw(300);
        yield();
    }
}
/* For all threads of the block, whether any says so. */
static bool gpu_any(bool x)
{
    m.any = m.any || x;
    meet(m.barriers[rank_of_running()][0], m.threads, [] { m.said = m.any, m.any = false; });
    const bool said = m.said;
    gpu_sync();
    return said;
}
/* Blocks run one after the other. */
static void gpu_sync_memory(void) { gpu_sync(); }
static uint64_t gpu_peek(const uint64_t *from) { return *from; }
static void gpu_poke(uint64_t *to, uint64_t x) { *to = x; }
static void gpu_compare_and_swap(uint64_t *at, uint64_t from, uint64_t to)
{
    *at = *at == from ? to : *at;
}
static uint64_t gpu_count(uint64_t *at) { return (*at)++; }
static float gpu_shfl_xor(float x, int n)
{
    return __int_as_float((int)exchange((uint32_t)__float_as_int(x), m.running % 32 ^ n));
}
static float gpu_shfl(float x, int lane)
{
    return __int_as_float((int)exchange((uint32_t)__float_as_int(x), lane));
}
static void gpu_await_earlier(void) {}
static void gpu_admit_later(void) {}
static float gpu_max(float a, float b) { return fmaxf(a, b); }

static float gpu_f16_to_f32(uint16_t x)
{
    const int sign = x >> 15, exponent = x >> 10 & 31, fraction = x & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                                      : ldexpf((float)fraction, -24);
    return sign ? -size : size;
}

/* To the nearest, ties to even. */
static uint16_t gpu_f16_from_f32(float x)
{
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = fabsf(x);
    if (std::isnan(x)) {
        return 0x7fff;
    }
    if (size >= 65520) {
        return sign | 0x7c00;
    }
    int exponent;
    (void)frexpf(size, &exponent);
    const int unit = max(exponent - 11, -24);
    return sign |
           (uint16_t)(size == 0 ? 0 : (int)nearbyintf(ldexpf(size, -unit)) + (unit + 24) * 1024);
}

/* --- mma_sm80.cuh ----------------------------------------------------------------------------- */

#include "backends/cuda/mma.h"
#include "backends/gpu/element.cuh"
#include "backends/gpu/sequence.cuh"

static uint16_t bf16_from_f32(float x)
{
    const uint32_t bits = (uint32_t)__float_as_int(x);
    return std::isnan(x) ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* 2^x, subnormal results 0. */
static float mma_exp2(float x)
{
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0 : y;
}

/* c += A B of a warp. */
static void multiply_warp(fattn_dtype dtype, float c[4], const uint32_t a[4], const uint32_t b[2])
{
    static struct {
        uint32_t a[4], b[2];
    } all[FIBERS_MAX];
    const int first = m.running / 32 * 32, lane = m.running % 32;
    memcpy(all[m.running].a, a, sizeof all[0].a);
    memcpy(all[m.running].b, b, sizeof all[0].b);
    meet(m.warps[m.running / 32], 32, [] {});
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4, column = lane % 4 * 2 + e % 2;
        double sum = (double)c[e];
        for (int k = 0; k < 16; k++) {
            const int t = k % 8 / 2, half = k % 2 * 16;
            const uint32_t x = all[first + 4 * row + t].a[e / 2 + k / 8 * 2] >> half;
            const uint32_t y = all[first + 4 * column + t].b[k / 8] >> half;
            sum += (double)gpu_widen(dtype, (uint16_t)x) * (double)gpu_widen(dtype, (uint16_t)y);
        }
        c[e] = (float)sum;
    }
    meet(m.warps[m.running / 32], 32, [] {}); /* before these are given anew */
}

#define MMA_TYPE(name, dtype, lift, from)                                                        \
    struct name {                                                                                \
        typedef uint16_t element;                                                                \
        enum { DTYPE = dtype, LIFT = lift, PLANES = 1 };                                         \
        static uint32_t pack(float lo, float hi) { return (uint32_t)from(hi) << 16 | from(lo); } \
        static float weight(float x, float unit, float base)                                     \
        {                                                                                        \
            const float shift = base * unit - LIFT;                                              \
            return mma_exp2(fmaf(x, unit, -shift));                                              \
        }                                                                                        \
        static void multiply(float c[4], const uint32_t a[4], const uint32_t b[2])               \
        {                                                                                        \
            multiply_warp(dtype, c, a, b);                                                       \
        }                                                                                        \
    }
MMA_TYPE(mma_f16, FATTN_F16, 7, gpu_f16_from_f32);
MMA_TYPE(mma_bf16, FATTN_BF16, 0, bf16_from_f32);

static int mma_lane(void) { return m.running % 32; }
static int mma_warp(void) { return gpu_thread() / 32; }
template <class S> static bool mma_has(const fattn_gpu_args &g, uint64_t feature)
{
    return ((S::KNOWN == MMA_ANY ? g.problem.features : S::KNOWN) & feature) != 0;
}
template <class T> static T __ldg(const T *from) { return *from; }
static void mma_prefetch(const void *) {}
static void mma_commit(void) { m.fibers[(size_t)m.running].async_group++; }
template <int PITCH> static uint32_t mma_place(uint32_t tile, int row, int chunk);
static constexpr bool mma_is_lean(mma_variant v) { return v <= MMA_ORDERED; }

static uint16_t half_word(uint32_t words, int n) { return (uint16_t)(words >> 16 * n); }

/* The larger of pairs of bf16, without their signs. */
static uint32_t mma_bf16_larger(uint32_t a, uint32_t b)
{
    const int lo = max(half_word(a, 0) & 0x7fff, half_word(b, 0) & 0x7fff);
    const int hi = max(half_word(a, 1) & 0x7fff, half_word(b, 1) & 0x7fff);
    return (uint32_t)(hi << 16 | lo);
}

/* The smaller of pairs; of a NaN and a number, the number. */
template <int DTYPE> static uint32_t mma_smaller(uint32_t a, uint32_t b)
{
    uint32_t least = 0;
    for (int n = 0; n < 2; n++) {
        const float x = gpu_widen((fattn_dtype)DTYPE, half_word(a, n));
        const float y = gpu_widen((fattn_dtype)DTYPE, half_word(b, n));
        least |= (uint32_t)(x <= y || std::isnan(y) ? half_word(a, n) : half_word(b, n)) << 16 * n;
    }
    return least;
}
static int32_t mma_peek(const int32_t *from)
{
    yield();
    return *from;
}
static int32_t wgmma_peek(const int32_t *from) { return mma_peek(from); }
static void mma_poke(int32_t *to, int32_t x)
{
    *to = x;
    m.moves++;
}
static void mma_fence(void) {}
static void mma_add_four(float *to, const float x[4])
{
    for (int e = 0; e < 4; e++) {
        to[e] += x[e];
    }
}
template <int N> static void mma_get(uint32_t from, uint32_t x[N]);
static void mma_add_one(float *to, float x) { *to += x; }
static float mma_reciprocal(float x) { return 1 / x; }
static char *wgmma_own_memory(char *) { return shared + rank_of_running() * SHARED_ROOM; }
static uint32_t mma_shared(const void *p)
{
    return (uint32_t)((const char *)p - wgmma_own_memory(shared)) + m.shared_base;
}

/* --- wgmma_sm90.cuh --------------------------------------------------------------------------- */

#include "backends/cuda/wgmma.h"

/* An address in another block of the cluster has the block's number above these bits. */
enum { RANK_AT = 24 };

/* What lies at an address of shared memory. */
static char *at_shared(uint32_t at, uint32_t bytes)
{
    const int named = (int)(at >> RANK_AT);
    char *const memory = named ? shared + (named - 1) * SHARED_ROOM : wgmma_own_memory(shared);
    at &= (1u << RANK_AT) - 1;
    if (at < m.shared_base || at + bytes > m.shared_base + m.shared_bytes) {
        fail("address %u of shared memory, of which there are %u bytes", at - m.shared_base,
             m.shared_bytes);
        return shared;
    }
    return memory + (at - m.shared_base);
}

template <int N> static void mma_get(uint32_t from, uint32_t x[N])
{
    memcpy(x, at_shared(from, 4 * N), 4 * N);
}

static int wgmma_group(void) { return __shfl_sync(0xffffffffu, gpu_thread() / 128, 0); }

template <int N> static void wgmma_give_registers(void)
{
    meet(m.warpgroups[m.running / 128], 128,
         [] { m.registers[rank_of_running()] += 128 * (65536 / m.threads / 8 * 8 - N); });
}

template <int N> static void wgmma_take_registers(void)
{
    const int more = 128 * (N - 65536 / m.threads / 8 * 8);
    if (m.running % 128 == 0) {
        int64_t &registers = m.registers[rank_of_running()];
        while (registers < more) {
            yield();
        }
        registers -= more;
    }
    meet(m.warpgroups[m.running / 128], 128, [] {});
}

/* They run one after the other. */
static int wgmma_side_by_side(void) { return 1; }

static void wgmma_named_sync(int number, int threads)
{
    meet(m.barriers[rank_of_running()][number], threads, [] {});
}

static void wgmma_named_arrive(int number, int threads)
{
    meeting &of = m.barriers[rank_of_running()][number];
    m.moves++;
    if (++of.arrived == threads) {
        of.arrived = 0;
        of.turn++;
    }
}

static int wgmma_rank(void) { return rank_of_running(); }

static void wgmma_cluster_sync(void)
{
    meet(m.cluster, m.threads * m.together, [] {});
}

static uint32_t wgmma_address_in(int rank, uint32_t at)
{
    if (rank < 0 || rank >= m.together) {
        fail("block %d of a cluster of %d", rank, m.together);
    }
    return at | (uint32_t)(rank + 1) << RANK_AT;
}

static bool wgmma_named_all(int number, int threads, bool own)
{
    m.denied[number] = m.denied[number] || !own;
    meet(m.barriers[rank_of_running()][number], threads, [number] {
        m.agreed[number] = !m.denied[number];
        m.denied[number] = false;
    });
    return m.agreed[number];
}

/* A barrier: arrivals that a phase needs and that it still lacks, bytes that it lacks, and the
 * number of the phase. */
struct barrier {
    uint16_t needs : 12, phase : 4, lacks;
    int32_t bytes;
};
static_assert(sizeof(barrier) == 8, "of one word");
enum { PHASE_AT = 12 }; /* the bit of a barrier's first word */

static void settle_barrier(barrier *b)
{
    m.moves++;
    if (b->lacks == 0 && b->bytes == 0) {
        b->phase++;
        b->lacks = b->needs;
    }
}

static void wgmma_barrier_make(uint64_t *word, int arrivals)
{
    barrier *const b = (barrier *)word;
    b->needs = (uint16_t)arrivals & 0xfff, b->lacks = (uint16_t)arrivals, b->phase = 0;
    b->bytes = 0;
}

static void wgmma_barriers_made(void) {}

static void wgmma_arrive_expect_tx(uint64_t *word, int bytes)
{
    barrier *const b = (barrier *)word;
    if (b->lacks == 0) {
        fail("more arrivals than a barrier takes");
        return;
    }
    b->bytes += bytes;
    b->lacks--;
    settle_barrier(b);
}

static void wgmma_arrive(uint64_t *word) { wgmma_arrive_expect_tx(word, 0); }

static void wgmma_arrive_in(int rank, uint64_t *word)
{
    wgmma_arrive((uint64_t *)at_shared(wgmma_address_in(rank, mma_shared(word)), 8));
}

static void wgmma_await(uint64_t *word, int phase)
{
    const barrier *const b = (const barrier *)word;
    if (draw(64) == 0) {
        m.sleep[m.running / 32] = (int)draw(100);
    }
    if ((b->phase & 1) == phase) {
        wait_while(b, 1u << PHASE_AT, (uint32_t)phase << PHASE_AT);
    }
    m.moves++;
}

static void wgmma_poison(uint32_t at, int bytes)
{
    memset(at_shared(at, (uint32_t)bytes), m.garbage, (size_t)bytes);
}

typedef struct alignas(64) wgmma_map {
    uint8_t bytes[128];
} wgmma_map;

static void wgmma_prefetch(const wgmma_map *) {}

#define WGMMA_EVICT_LAST 0
#define WGMMA_EVICT_FIRST 0

static int copy_delay(void) { return (int)(draw(2) ? draw(30) : draw(500)); }

/* barrier: its address, as that of the tile in this or another block. */
static void begin_copy(uint32_t to, const wgmma_map *map, uint32_t barrier, uint32_t axes, int c0,
                       int c1, int c2, int c3, int c4)
{
    copy c = {};
    c.thread = m.running;
    memcpy(&c.map, map, sizeof c.map);
    c.to = to;
    c.barrier = barrier;
    c.at[0] = c0, c.at[1] = c1, c.at[2] = c2, c.at[3] = c3, c.at[4] = c4;
    c.delay = copy_delay();
    if (c.map.axes != axes || to % 128) {
        fail("a copy of %u axes by a map of %u, to %u", axes, c.map.axes, to);
    }
    m.copies.push_back(c);
}

static void wgmma_copy(uint32_t to, const wgmma_map *map, uint64_t *word, int c0, int c1, int c2,
                       int c3, int)
{
    begin_copy(to, map, mma_shared(word), 4, c0, c1, c2, c3, 0);
}

/* Each block's part comes at a time of its own. */
static void wgmma_copy_to_both(uint32_t to, const wgmma_map *map, uint64_t *word, int c0, int c1,
                               int c2, int c3, int)
{
    for (int rank = 0; rank < 2; rank++) {
        begin_copy(wgmma_address_in(rank, to), map, wgmma_address_in(rank, mma_shared(word)), 4, c0,
                   c1, c2, c3, 0);
    }
}

static void wgmma_copy(uint32_t to, const wgmma_map *map, uint64_t *word, int c0, int c1, int c2,
                       int c3, int c4, int)
{
    begin_copy(to, map, mma_shared(word), 5, c0, c1, c2, c3, c4);
}

static void wgmma_copy_bytes(uint32_t to, const void *from, int bytes, uint64_t *word)
{
    copy c = {};
    c.to = to, c.from = from, c.bytes = bytes, c.thread = m.running;
    c.barrier = mma_shared(word);
    c.delay = copy_delay();
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) {
        fail("a copy of %d bytes from %p to %u", bytes, from, to);
    }
    m.copies.push_back(c);
}

/* From shared memory of this block, which is read at once, or when the copy ends. */
static void wgmma_send(int rank, uint32_t to, uint32_t from, int bytes, uint64_t *word)
{
    copy c = {};
    c.to = wgmma_address_in(rank, to), c.bytes = bytes, c.thread = m.running;
    c.barrier = wgmma_address_in(rank, mma_shared(word));
    c.delay = copy_delay();
    if (to % 16 || from % 16 || bytes % 16) {
        fail("a copy of %d bytes from %u to %u", bytes, from, to);
    }
    const char *const at = at_shared(from, (uint32_t)bytes);
    if (draw(2)) {
        c.sent.assign(at, at + bytes);
    } else {
        c.from = at;
    }
    m.copies.push_back(c);
}

static void wgmma_send_number(int rank, int *to, int x, uint64_t *word)
{
    copy c = {};
    c.to = wgmma_address_in(rank, mma_shared(to)), c.bytes = sizeof x, c.thread = m.running;
    c.barrier = wgmma_address_in(rank, mma_shared(word));
    c.delay = copy_delay();
    c.sent.assign((const char *)&x, (const char *)(&x + 1));
    m.copies.push_back(c);
}

static void begin_addition(float *to, uint32_t from, int bytes, bool replaces)
{
    copy c = {};
    c.to = from, c.sums = to, c.bytes = bytes, c.thread = m.running;
    c.replaces = replaces;
    c.delay = copy_delay();
    if (from % 16 || (uintptr_t)to % 16 || bytes % 16) {
        fail("an addition of %d bytes at %u to %p", bytes, from, (void *)to);
    }
    m.copies.push_back(c);
}

static void wgmma_add(float *to, uint32_t from, int bytes, uint64_t)
{
    begin_addition(to, from, bytes, false);
}

static void wgmma_replace(float *to, uint32_t from, int bytes, uint64_t)
{
    begin_addition(to, from, bytes, true);
}

static void wgmma_store_box(const wgmma_map *map, uint32_t from, int c0, int c1, int c2, int c3)
{
    begin_copy(from, map, 0, 4, c0, c1, c2, c3, 0);
    m.copies.back().stores = true;
}

static void wgmma_await_added(void)
{
    for (size_t n = 0; n < m.copies.size();) {
        const copy &c = m.copies[n];
        if ((c.sums || c.stores) && c.thread == m.running) {
            yield();
            n = 0;
        } else {
            n++;
        }
    }
}

static void wgmma_await_read(void) { wgmma_await_added(); }

/* Bits 4 to 6 of an address change with bits 7 to 9. */
static uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

/* What has been added is NaN from then on: nobody may add it again. */
static void end_addition(const copy &c)
{
    char *const from = at_shared(c.to, (uint32_t)c.bytes);
    for (int n = 0; n < c.bytes / 4; n++) {
        float x;
        memcpy(&x, from + 4 * n, 4);
        c.sums[n] = c.replaces ? x : c.sums[n] + x;
    }
    memset(from, 0xff, (size_t)c.bytes);
    m.moves++;
}

static void end_copy(const copy &c)
{
    m.running = c.thread; /* whose block's addresses these are */
    if (c.sums) {
        end_addition(c);
        return;
    }
    if (c.from || !c.sent.empty()) {
        memcpy(at_shared(c.to, (uint32_t)c.bytes), c.from ? c.from : c.sent.data(),
               (size_t)c.bytes);
        barrier *const b = (barrier *)at_shared(c.barrier, 8);
        b->bytes -= c.bytes;
        settle_barrier(b);
        return;
    }
    const stub_map &map = c.map;
    int rows = 1;
    for (uint32_t n = 1; n < map.axes; n++) {
        rows *= (int)map.box[n];
    }
    for (int r = 0; r < rows; r++) {
        bool inside = true;
        char *from = (char *)map.address;
        for (int n = 1, rest = r; n < (int)map.axes; rest /= (int)map.box[n], n++) {
            const int64_t x = c.at[n] + rest % (int)map.box[n];
            inside = inside && x >= 0 && x < (int64_t)map.extent[n];
            from += x * (int64_t)map.stride[n - 1];
        }
        for (uint32_t e = 0; e < map.box[0]; e++) {
            const int64_t x = c.at[0] + (int)e;
            const bool exists = inside && x >= 0 && x < (int64_t)map.extent[0];
            const uint32_t at = swizzled(c.to + (uint32_t)r * 128 + map.bytes * e);
            uint16_t value = 0;
            if (c.stores) {
                if (exists) {
                    memcpy(from + map.bytes * x, at_shared(at, map.bytes), map.bytes);
                }
                value = 0xffff; /* as what has been added */
            } else if (exists) {
                memcpy(&value, from + map.bytes * x, map.bytes);
            }
            memcpy(at_shared(at, map.bytes), &value, map.bytes);
        }
    }
    if (c.stores) {
        m.moves++;
        return;
    }
    barrier *const b = (barrier *)at_shared(c.barrier, 8);
    b->bytes -= rows * (int)(map.box[0] * map.bytes);
    settle_barrier(b);
}

static void wgmma_publish(void) {}
static void wgmma_zero(uint32_t to) { memset(at_shared(to, 16), 0, 16); }
static uint32_t wgmma_get_half(uint32_t from)
{
    uint16_t x;
    memcpy(&x, at_shared(from, 2), 2);
    return x;
}
/* Lane 4 i + j gets elements 2 j and 2 j + 1 of row i of each matrix. */
static void mma_load(uint32_t x[4], uint32_t at)
{
    const int lane = mma_lane();
    for (int n = 0; n < 4; n++) {
        const uint32_t row = exchange(at, 8 * n + lane / 4);
        memcpy(&x[n], at_shared(row + (uint32_t)(lane % 4 * 4), 4), 4);
    }
}

/* From here on no thread may read what was there. */
static void mma_copy(uint32_t to, const void *from, int bytes)
{
    fiber &f = m.fibers[(size_t)m.running];
    if (to % 16 || (bytes && (uintptr_t)from % 16)) {
        fail("a copy from %p to %u", from, to);
    }
    memset(at_shared(to, 16), m.garbage, 16);
    f.async.push_back({to, from, bytes, f.async_group});
    m.moves++;
}
static void mma_copy_by(uint64_t, uint32_t to, const void *from, int bytes)
{
    mma_copy(to, from, bytes);
}
static uint64_t mma_read_once(void) { return 0; }

/* Copies of the groups before the last N have landed, and perhaps others. */
template <int N> static void mma_wait(void)
{
    fiber &f = m.fibers[(size_t)m.running];
    const int past = draw(4) ? f.async_group - N : f.async_group;
    if (draw(64) == 0) {
        m.sleep[m.running / 32] = (int)draw(100);
        yield();
    }
    for (const async_copy &c : f.async) {
        if (c.group < past) {
            memset(at_shared(c.to, 16), 0, 16);
            memcpy(at_shared(c.to, 16), c.from, (size_t)c.bytes);
        }
    }
    while (!f.async.empty() && f.async.front().group < past) {
        f.async.erase(f.async.begin());
    }
    m.moves++;
}

/* Of other kernels, which are not here. */
template <class E> static void mma_copy_misaligned(uint32_t, const E *, int) { abort(); }

static uint32_t mma_f16_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t y = 0;
    for (int n = 0; n < 2; n++) {
        const double product =
            (double)gpu_f16_to_f32(half_word(a, n)) * (double)gpu_f16_to_f32(half_word(b, n));
        const double sum = product + (double)gpu_f16_to_f32(half_word(c, n));
        y |= (uint32_t)gpu_f16_from_f32((float)sum) << 16 * n;
    }
    return y;
}

#define MMA_CONVERTS_E4M3 m.converts
static uint32_t mma_f16_from_e4m3(uint16_t two)
{
    const uint32_t low = gpu_f16_from_f32(fattn_e4m3_to_f32((uint8_t)two));
    return (uint32_t)gpu_f16_from_f32(fattn_e4m3_to_f32((uint8_t)(two >> 8))) << 16 | low;
}

static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t y = 0;
    for (int n = 0; n < 4; n++) {
        y |= (uint32_t)(bytes >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
    }
    return y;
}

static uint32_t wgmma_smaller_halves(uint32_t a, uint32_t b)
{
    const uint32_t high = (uint32_t)min((int)(a >> 16), (int)(b >> 16));
    return high << 16 | (uint32_t)min((int)(a & 0xffff), (int)(b & 0xffff));
}
static uint32_t wgmma_not_less(uint32_t a, uint32_t b)
{
    uint32_t c = 0;
    for (int n = 0; n < 32; n += 16) {
        const uint32_t x = (a >> n & 0xffff) << 16, y = (b >> n & 0xffff) << 16;
        c |= (__int_as_float((int)x) >= __int_as_float((int)y)) * 0xffffu << n;
    }
    return c;
}
static uint32_t __vcmpgeu2(uint32_t a, uint32_t b)
{
    return (a >> 16 >= b >> 16) * 0xffff0000u | ((a & 0xffff) >= (b & 0xffff)) * 0xffffu;
}

template <class T> static uint32_t wgmma_drop_halves(uint32_t pair, uint32_t x)
{
    uint32_t product = 0;
    for (int n = 0; n < 2; n++) {
        const uint16_t half = half_word(pair, n);
        const bool kept = x >> (16 * n + 15) & 1;
        const bool finite = std::isfinite(gpu_widen((fattn_dtype)T::DTYPE, half));
        product |= (kept ? half : finite ? 0u : 0x7fffu) << 16 * n;
    }
    return product;
}
static uint32_t wgmma_anew(uint32_t x) { return x; }

static void wgmma_put(uint32_t to, float x) { memcpy(at_shared(to, 4), &x, 4); }

static void wgmma_put_four(uint32_t to, const uint32_t x[4]) { memcpy(at_shared(to, 16), x, 16); }

/* Lane 4 i + j has elements 2 j and 2 j + 1 of row i of each matrix, which become rows. */
static void wgmma_put_matrices(uint32_t to, const uint32_t x[4])
{
    const int lane = mma_lane();
    for (int n = 0; n < 4; n++) {
        const uint32_t row = exchange(to, 8 * n + lane / 4);
        memcpy(at_shared(row + (uint32_t)(lane % 4 * 4), 4), &x[n], 4);
    }
}

static void wgmma_put_transposed(uint32_t to, const uint32_t x[4])
{
    const int lane = mma_lane();
    for (int n = 0; n < 4; n++) {
        for (int e = 0; e < 2; e++) {
            const uint32_t row = exchange(to, 8 * n + lane % 4 * 2 + e);
            const uint16_t half = (uint16_t)(x[n] >> 16 * e);
            memcpy(at_shared(row + (uint32_t)(lane / 4 * 2), 2), &half, 2);
        }
    }
}

static void mma_put(uint32_t to, uint32_t x) { memcpy(at_shared(to, 4), &x, 4); }

/* Lanes 8 n .. 8 n + 7 say where the rows of matrix n are; lane 4 i + j gets elements 2 j and
 * 2 j + 1 of its column i. */
static void mma_load_transposed(uint32_t x[4], uint32_t at)
{
    const int lane = mma_lane();
    for (int n = 0; n < 4; n++) {
        x[n] = 0;
        for (int e = 0; e < 2; e++) {
            const uint32_t row = exchange(at, 8 * n + lane % 4 * 2 + e);
            uint16_t half;
            memcpy(&half, at_shared(row + (uint32_t)(lane / 4 * 2), 2), 2);
            x[n] |= (uint32_t)half << 16 * e;
        }
    }
}
/* Of kernels that are not here. */
template <int SIZE> static void mma_copy_small(uint32_t, const void *, int) { abort(); }

#include "backends/cuda/mma_products.cuh"

static void wgmma_forget(void) {}
static float wgmma_own(float x) { return x; }

/* --- Products --------------------------------------------------------------------------------- */

static float element(uint32_t at, bool f16)
{
    uint16_t x;
    memcpy(&x, at_shared(swizzled(at), 2), sizeof x);
    return f16 ? gpu_f16_to_f32(x) : __int_as_float((int)((uint32_t)x << 16));
}

static float half_of(uint32_t pair, int which, bool f16)
{
    const uint16_t x = (uint16_t)(pair >> 16 * which);
    return f16 ? gpu_f16_to_f32(x) : __int_as_float((int)((uint32_t)x << 16));
}

enum { ROWS = 64, COLUMNS = 256, DEPTH = 16 };

/* sums = a b. Most of the arithmetic, in a file that is compiled with little optimisation. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))
#endif
static void
multiply_rows(const float a[ROWS][DEPTH], const float b[DEPTH][COLUMNS], int columns,
              float sums[ROWS][COLUMNS])
{
    for (int r = 0; r < ROWS; r++) {
        float *const row = sums[r];
        memset(row, 0, sizeof sums[r]);
        for (int k = 0; k < DEPTH; k++) {
            const float left = a[r][k];
            for (int c = 0; c < columns; c++) {
                row[c] += left * b[k][c];
            }
        }
    }
}

/* Product n of each of a warpgroup's threads, which say the same but for their registers. */
static void multiply(int warpgroup, size_t n)
{
    static float a[ROWS][DEPTH], b[DEPTH][COLUMNS], sums[ROWS][COLUMNS];
    fiber *const fibers = &m.fibers[(size_t)warpgroup * 128];
    const product &p = fibers[0].products[n];
    for (int t = 0; t < 128; t++) {
        const product &own = fibers[t].products[n];
        if (own.tiles != p.tiles || own.add != p.add || own.columns != p.columns ||
            own.b_at != p.b_at || (p.tiles && own.a_at != p.a_at)) {
            fail("threads of a warpgroup that do not say the same");
        }
        for (int w = 0; w < 8 && !p.tiles; w++) { /* halves of four words */
            const int row = t / 32 * 16 + t % 32 / 4 + w / 2 % 2 * 8;
            a[row][t % 4 * 2 + w % 2 + w / 4 * 8] = half_of(own.a[w / 2], w % 2, p.f16);
        }
    }
    const auto start = [](uint64_t d) { return (uint32_t)(d & 0x3fff) * 16; };
    const auto panel = [](uint64_t d) { return (uint32_t)(d >> 16 & 0x3fff) * 16; };
    const auto eight = [](uint64_t d) { return (uint32_t)(d >> 32 & 0x3fff) * 16; };
    if (p.b_at >> 62 != 1 || (p.tiles && p.a_at >> 62 != 1)) {
        fail("a descriptor of another swizzle");
    }
    for (uint32_t k = 0; k < DEPTH; k++) {
        for (uint32_t r = 0; r < ROWS && p.tiles; r++) {
            const uint32_t at = p.a_transposed ? k / 8 * eight(p.a_at) + k % 8 * 128 + 2 * r
                                               : r / 8 * eight(p.a_at) + r % 8 * 128 + 2 * k;
            a[r][k] = element(start(p.a_at) + at, p.f16);
        }
        for (uint32_t c = 0; c < (uint32_t)p.columns; c++) {
            const uint32_t at = !p.b_transposed ? c / 8 * eight(p.b_at) + c % 8 * 128 + 2 * k
                                                : k / 8 * eight(p.b_at) + k % 8 * 128 +
                                                      c / 64 * panel(p.b_at) + c % 64 * 2;
            b[k][c] = element(start(p.b_at) + at, p.f16);
        }
    }
    multiply_rows(a, b, p.columns, sums);
    for (int t = 0; t < 128; t++) {
        const product &own = fibers[t].products[n];
        for (int e = 0; e < p.columns / 2; e++) {
            float *const c = &own.c[e / 4][e % 4];
            const int row = t / 32 * 16 + t % 32 / 4 + e % 4 / 2 * 8;
            *c = (p.add ? *c : 0) + sums[row][e / 4 * 8 + t % 4 * 2 + e % 2];
        }
    }
}

/* Makes the products of the groups before `past`. */
static void make_products(int warpgroup, int past)
{
    fiber *const fibers = &m.fibers[(size_t)warpgroup * 128];
    size_t count = 0;
    while (count < fibers[0].products.size() && fibers[0].products[count].group < past) {
        count++;
    }
    for (int t = 0; t < 128; t++) {
        if (fibers[t].products.size() != fibers[0].products.size()) {
            fail("threads of a warpgroup with unlike products");
            return;
        }
    }
    for (size_t n = 0; n < count; n++) {
        multiply(warpgroup, n);
    }
    for (int t = 0; t < 128; t++) {
        std::vector<product> &all = fibers[t].products;
        all.erase(all.begin(), all.begin() + (std::ptrdiff_t)count);
    }
}

static void wgmma_fence(void) {}

static void wgmma_commit(void)
{
    const int warpgroup = m.running / 128;
    const int group = ++m.fibers[(size_t)m.running].group;
    meet(m.warpgroups[warpgroup], 128, [&] {
        if (draw(2)) {
            make_products(warpgroup, group);
        }
    });
}

template <int N> static void wgmma_wait(void)
{
    const int warpgroup = m.running / 128, group = m.fibers[(size_t)m.running].group - N;
    int &sleep = m.sleep[m.running / 32];
    meet(m.warps[m.running / 32], 32, [&] { sleep = draw(4) ? 0 : (int)draw(100); });
    if (sleep > 0) {
        yield();
    }
    meet(m.warpgroups[warpgroup], 128, [&] { make_products(warpgroup, group); });
}

template <int N> static void wgmma_settle(float[N][4]) {}

template <class T, int N> struct wgmma_product {
    enum { F16 = (int)T::DTYPE == (int)FATTN_F16 };
    static void tiles(float (*c)[4], uint64_t a, uint64_t b, bool add)
    {
        begin({true, false, false, add, F16, N, 0, c, NULL, a, b});
    }
    static void new_tiles(float (*c)[4], uint64_t a, uint64_t b) { tiles(c, a, b, false); }
    static void transposed_a(float (*c)[4], uint64_t a, uint64_t b)
    {
        begin({true, true, false, true, F16, N, 0, c, NULL, a, b});
    }
    static void new_transposed_a(float (*c)[4], uint64_t a, uint64_t b)
    {
        begin({true, true, false, false, F16, N, 0, c, NULL, a, b});
    }
    static void transposed_b(float (*c)[4], uint64_t a, uint64_t b)
    {
        begin({true, false, true, true, F16, N, 0, c, NULL, a, b});
    }
    static void transposed_ab(float (*c)[4], uint64_t a, uint64_t b)
    {
        begin({true, true, true, true, F16, N, 0, c, NULL, a, b});
    }
    static void pairs(float (*c)[4], const uint32_t a[4], uint64_t b, bool add)
    {
        begin({false, false, true, add, F16, N, 0, c, a, 0, b});
    }
    static void begin(product p)
    {
        fiber &f = m.fibers[(size_t)m.running];
        p.group = f.group;
        f.products.push_back(p);
    }
};

static int wgmma_larger(int a, int b, int c) { return max(max(a, b), c); }

/* --- The kernels ------------------------------------------------------------------------------ */

#include "backends/cuda/kernels/wgmma_backward.cu"
#include "backends/cuda/kernels/wgmma_backward_full_128.cu"
#include "backends/cuda/kernels/wgmma_backward_full_256.cu"
#include "backends/cuda/kernels/wgmma_backward_full_64.cu"
#include "backends/cuda/kernels/wgmma_forward.cu"
#define clear clear_full
#include "backends/cuda/kernels/wgmma_full_128.cu"
#include "backends/cuda/kernels/wgmma_full_256.cu"
#include "backends/cuda/kernels/wgmma_full_64.cu"
#undef clear
#define combine combine_e4m3
#define combine_rows combine_rows_e4m3
#include "backends/cuda/kernels/mma_decode_e4m3.cu"
#undef MMA_ENTRY
#undef MMA_WIDE
#undef combine
#undef combine_rows
#define combine combine_decode
#define combine_rows combine_rows_decode
#include "backends/cuda/kernels/mma_decode.cu"
#undef MMA_ENTRY
#undef combine
#undef combine_rows
#define combine combine_forward_e4m3
#define combine_rows combine_rows_forward_e4m3
#include "backends/cuda/kernels/mma_forward_e4m3.cu"
#undef combine
#undef combine_rows
#define clear clear_e4m3
#define combine combine_of_e4m3
#define combine_rows combine_rows_of_e4m3
#undef WGMMA_CUT_KERNELS
#define WGMMA_CUT_KERNELS /* those of wgmma_forward.cu */
#include "backends/cuda/kernels/wgmma_forward_e4m3.cu"
#undef clear
#undef combine
#undef combine_rows
#define clear clear_576
#define combine combine_576
#define combine_rows combine_rows_576
#include "backends/cuda/kernels/wgmma_forward_576.cu"
#undef clear
#undef combine
#undef combine_rows

template <class Maps, void (*KERNEL)(const fattn_gpu_args, const Maps)>
static void run_mapped(void **with)
{
    KERNEL(*(const fattn_gpu_args *)with[0], *(const Maps *)with[1]);
}

template <void (*KERNEL)(const fattn_gpu_args)> static void run_plain(void **with)
{
    KERNEL(*(const fattn_gpu_args *)with[0]);
}

template <void (*KERNEL)(const fattn_gpu_args, const wgmma_maps, const fattn_merge_job)>
static void run_merging(void **with)
{
    KERNEL(*(const fattn_gpu_args *)with[0], *(const wgmma_maps *)with[1],
           *(const fattn_merge_job *)with[2]);
}

#define HOPPER_TOGETHER(name, maps, blocks)     \
    {                                           \
#name, run_mapped < maps, name>, blocks \
    }
#define HOPPER_MAPPED(name, maps) HOPPER_TOGETHER(name, maps, 1)
#define HOPPER_PLAIN(name)       \
    {                            \
#name, run_plain < name> \
    }
#define HOPPER_MERGING(name)       \
    {                              \
#name, run_merging < name> \
    }
#define HOPPER_FORWARD(name, ...)                                                  \
    HOPPER_MERGING(wgmma_onto_f16_##name), HOPPER_MERGING(wgmma_onto_bf16_##name), \
        HOPPER_ALONE(name)
#define HOPPER_ALONE(name, ...) \
    HOPPER_MAPPED(wgmma_f16_##name, wgmma_maps), HOPPER_MAPPED(wgmma_bf16_##name, wgmma_maps),
#define HOPPER_WIDENED(name, ...)                     \
    HOPPER_MAPPED(wgmma_f16_##name, wgmma_e4m3_maps), \
        HOPPER_MAPPED(wgmma_bf16_##name, wgmma_e4m3_maps),
#define HOPPER_HALVES(name, width, width_v, blocks)               \
    HOPPER_TOGETHER(wgmma_f16_##name, wgmma_halves_maps, blocks), \
        HOPPER_TOGETHER(wgmma_bf16_##name, wgmma_halves_maps, blocks),
#define HOPPER_FULL(run, features, width, ...)                 \
    HOPPER_MAPPED(wgmma_##run##_f16_##width, wgmma_full_maps), \
        HOPPER_MAPPED(wgmma_##run##_bf16_##width, wgmma_full_maps),
#define HOPPER_BACKWARD(name, ...)                                 \
    HOPPER_MAPPED(wgmma_backward_f16_##name, wgmma_backward_maps), \
        HOPPER_MAPPED(wgmma_backward_bf16_##name, wgmma_backward_maps), HOPPER_ROWS(name)
#define HOPPER_DECODE_OF(run, width, keys)                 \
    HOPPER_PLAIN(mma_decode_##run##_f16_##width##_##keys), \
        HOPPER_PLAIN(mma_decode_##run##_bf16_##width##_##keys),
#define HOPPER_DECODE_BOTH(width, keys, ...) \
    HOPPER_DECODE_OF(lean, width, keys) HOPPER_DECODE_OF(full, width, keys)
#define HOPPER_DECODE_ALONE(width, keys, ...) HOPPER_DECODE_OF(wide, width, keys)
#define HOPPER_DECODE(width, keys, ...) HOPPER_PLAIN(mma_decode_e4m3_##width##_##keys),
#define HOPPER_DECODE_WIDE(width, keys, ...) HOPPER_PLAIN(mma_decode_e4m3_wide_##width##_##keys),
#define HOPPER_DECODE_FULL(width, keys, ...) HOPPER_PLAIN(mma_decode_e4m3_full_##width##_##keys),
#define HOPPER_E4M3(run, features, width, rows, keys, ...) \
    HOPPER_PLAIN(mma_##run##_##width##_##rows##x##keys),
#define HOPPER_ROWS(name)                                             \
    HOPPER_PLAIN(wgmma_list_##name), HOPPER_PLAIN(wgmma_rows_##name), \
        HOPPER_PLAIN(wgmma_dq_##name), HOPPER_PLAIN(wgmma_sink_##name),
#define HOPPER_BACKWARD_FULL(run, features, dbias, width, ...)                         \
    HOPPER_TOGETHER(wgmma_backward_##run##_f16_##width, wgmma_backward_full_maps,      \
                    WGMMA_BACKWARD_BLOCKS(width)),                                     \
        HOPPER_TOGETHER(wgmma_backward_##run##_bf16_##width, wgmma_backward_full_maps, \
                        WGMMA_BACKWARD_BLOCKS(width)),
#define HOPPER_PAIR_OF(name) HOPPER_TOGETHER(name, wgmma_backward_maps, 2)
#define HOPPER_PAIR(name, ...)                                                             \
    HOPPER_PAIR_OF(wgmma_backward_f16_##name), HOPPER_PAIR_OF(wgmma_backward_bf16_##name), \
        HOPPER_PAIR_OF(wgmma_backward_f16_ordered_##name),                                 \
        HOPPER_PAIR_OF(wgmma_backward_bf16_ordered_##name), HOPPER_ROWS(name)
static const struct {
    const char *name;
    void (*kernel)(void **parameters);
    int together = 1; /* blocks of a cluster */
} kernels[] = {
    WGMMA_SHAPES(HOPPER_FORWARD) WGMMA_SPLIT_SHAPES(HOPPER_ALONE) WGMMA_E4M3_SHAPES(HOPPER_WIDENED)
        WGMMA_E4M3_SPLIT_SHAPES(HOPPER_WIDENED) WGMMA_SHORT_SHAPES(HOPPER_ALONE)
            WGMMA_HALVES_SHAPES(HOPPER_HALVES) WGMMA_HALVES_SPLIT_SHAPES(HOPPER_HALVES)
                WGMMA_BACKWARD_SHAPES(HOPPER_BACKWARD) WGMMA_BACKWARD_PAIRS(HOPPER_PAIR)
                    WGMMA_BACKWARD_FULL_64(HOPPER_BACKWARD_FULL) HOPPER_ROWS(full_64)
                        WGMMA_BACKWARD_FULL_128(HOPPER_BACKWARD_FULL) HOPPER_ROWS(full_128)
                            WGMMA_BACKWARD_FULL_256(HOPPER_BACKWARD_FULL) HOPPER_ROWS(full_256)
                                HOPPER_PLAIN(wgmma_clear_dbias),
    HOPPER_PLAIN(wgmma_scan_full_64),
    HOPPER_PLAIN(wgmma_scan_full_128),
    HOPPER_PLAIN(wgmma_scan_full_256),
    WGMMA_FULL_64(HOPPER_FULL) WGMMA_FULL_128(HOPPER_FULL) WGMMA_FULL_256(HOPPER_FULL)
        HOPPER_PLAIN(wgmma_scan_64_128),
    HOPPER_PLAIN(wgmma_scan_64_64),
    HOPPER_PLAIN(wgmma_scan_128_128),
    HOPPER_PLAIN(wgmma_scan_128_64),
    HOPPER_PLAIN(wgmma_scan_256_64),
    HOPPER_PLAIN(wgmma_cut_lengths),
    HOPPER_PLAIN(wgmma_merge_cut),
    HOPPER_PLAIN(wgmma_blocks_64),
    HOPPER_PLAIN(wgmma_blocks_128),
    HOPPER_PLAIN(wgmma_blocks_256),
    MMA_DECODE_SHAPES(HOPPER_DECODE_BOTH) MMA_DECODE_WIDE_SHAPES(HOPPER_DECODE_ALONE)
        MMA_DECODE_E4M3_SHAPES(HOPPER_DECODE) MMA_DECODE_E4M3_WIDE_SHAPES(HOPPER_DECODE_WIDE)
            MMA_DECODE_E4M3_FULL_SHAPES(HOPPER_DECODE_FULL) MMA_WIDEN_SHAPES(HOPPER_E4M3)
                HOPPER_PLAIN(mma_scan_32),
    HOPPER_PLAIN(mma_scan_64),
    HOPPER_PLAIN(clear),
    HOPPER_PLAIN(combine),
    HOPPER_PLAIN(combine_rows)};

/* --- Launches --------------------------------------------------------------------------------- */

static void begin_cluster(void)
{
    m.fibers.resize((size_t)m.threads * (size_t)m.together);
    memset(shared, m.garbage, sizeof shared);
    memset(m.sleep, 0, sizeof m.sleep);
    memset(m.warps, 0, sizeof m.warps);
    memset(m.warpgroups, 0, sizeof m.warpgroups);
    memset(m.barriers, 0, sizeof m.barriers);
    m.cluster = {};
    m.copies.clear();
    memset(m.registers, 0, sizeof m.registers);
    for (int t = 0; t < m.threads * m.together; t++) {
        fiber &f = m.fibers[(size_t)t];
        f.stack.resize(STACK + STACK_SHIFTS * STACK_SHIFT);
        f.started = f.ended = false;
        f.word = NULL;
        f.thread.x = (unsigned)(t % m.threads);
        f.group = f.async_group = 0;
        f.products.clear();
        f.async.clear();
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.data();
        f.start.uc_stack.ss_size = (size_t)(STACK + t % STACK_SHIFTS * STACK_SHIFT);
        f.start.uc_link = NULL;
        makecontext(&f.start, enter, 0);
    }
}

static void run_copies(void)
{
    for (size_t n = 0; n < m.copies.size();) {
        if (m.copies[n].delay-- > 0) {
            n++;
            continue;
        }
        const copy c = m.copies[n];
        m.copies.erase(m.copies.begin() + (std::ptrdiff_t)n);
        end_copy(c);
    }
}

static void run_cluster(void)
{
    const int warps = m.threads * m.together / 32;
    uint64_t moves = m.moves;
    int alive = m.threads;
    begin_cluster();
    for (int still = 0; alive && !m.failed; still++) {
        alive = 0;
        const int first = (int)draw((unsigned)warps);
        for (int n = 0; n < warps; n++) {
            const int warp = (first + n) % warps;
            if (m.sleep[warp] > 0) {
                m.sleep[warp]--;
                alive++;
                continue;
            }
            for (int t = 32 * warp; t < 32 * warp + 32; t++) {
                const fiber &f = m.fibers[(size_t)t];
                if (!f.ended && !waits(f)) {
                    resume(t);
                }
                alive += !f.ended;
            }
        }
        run_copies();
        still = moves == m.moves ? still : 0;
        moves = m.moves;
        if (still > PATIENCE) {
            fail("all threads wait");
        }
    }
    bool waited = m.copies.empty();
    for (const fiber &f : m.fibers) {
        waited = waited && f.async.empty();
    }
    if (!m.failed && !waited) {
        fail("copies that nobody waited for");
    }
}

extern "C" int stub_cuda_run(const char *entry, unsigned blocks, unsigned threads,
                             unsigned shared_bytes, void **parameters)
{
    m.kernel = NULL;
    for (size_t n = 0; n < sizeof kernels / sizeof kernels[0]; n++) {
        if (strcmp(entry, kernels[n].name) == 0) {
            m.kernel = kernels[n].kernel;
            m.together = kernels[n].together;
        }
    }
    if (!m.kernel || threads > THREADS_MAX) {
        fprintf(stderr, "emulated Hopper: no kernel %s of %u threads\n", entry, threads);
        return STUB_LAUNCH_FAILED;
    }
    m.threads = (int)threads;
    m.blocks = blocks;
    m.shared_bytes = shared_bytes;
    m.parameters = parameters;
    m.garbage = draw(2) ? 0xff : 0x5f;
    m.converts = draw(2);
    m.shared_base = strncmp(entry, "mma_", 4) == 0 ? SHARED_ALIGNED : SHARED_UNALIGNED;
    m.failed = false;
    m.running = 0;
    if (blocks % (unsigned)m.together) {
        fail("%u blocks in clusters of %d", blocks, m.together);
    }
    for (m.block = 0; m.block < blocks && !m.failed; m.block += (unsigned)m.together) {
        run_cluster();
    }
    return m.failed ? STUB_LAUNCH_FAILED : 0;
}
