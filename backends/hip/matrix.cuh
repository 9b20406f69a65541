/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AMD's matrix instructions, as forward uses them: it adapts to the layout of each. (patch.cuh, for
 * backward, hides the differences.) They are MFMA on gfx90a, gfx942 and gfx950, in waves of 64
 * lanes, and WMMA on gfx11 and gfx12, in waves of 32. A wave multiplies SIDE rows of A by SIDE
 * columns of B, and accumulates in SIDE x SIDE floats. SIDE is 16, or 32 on MFMA.
 *
 * Operands. k is the summed index. Lane l holds OWN consecutive k of row (A) or column (B) l %
 * SIDE. The GROUPS lanes of a row hold DEPTH k together, group l / SIDE those from OWN (l / SIDE)
 * on. So an operand whose k are contiguous in memory is loaded 16 bytes at a time. On gfx11 one
 * lane holds all k, and the two halves of a wave hold the same. If hardware has another order of k,
 * or half the depth, k is permuted in both operands, which does not change the sum.
 *
 * Sums (accumulators). Lane l holds SUMS rows of column l % SIDE: sum r is row matrix_row<SIDE>(r).
 *
 * Sums as operands. A lane's sums of one column, rounded, are k of column l % SIDE of an operand B
 * (or of row l % SIDE of an operand A). From 8 sums, matrix_as_operand() makes an operand of DEPTH
 * k. These k are rows in another order: row i is at k = matrix_place<SIDE>(i), and the other
 * operand must have the same order. Four rows from a multiple of 4 on stay together.
 *
 *              SIDE  GROUPS  OWN  DEPTH  SUMS  row of sum r              place of row i of DEPTH
 *     MFMA     32    2       8    16     16    8 (r / 4) + 4 g + r % 4   8 (i / 4 % 2) + 4 (i / 8)
 *     MFMA     16    4       8    32     4     4 g + r                   8 (i / 4 % 4) + 4 (i / 16)
 *     gfx12    16    2       8    16     8     8 g + r                   i
 *     gfx11    16    1       16   16     8     2 r + l / 16              i
 *
 * with g = l / SIDE; i % 4 is to be added to the places of MFMA. DEPTH rows are half a tile of
 * sums, two tiles, or one.
 */
#ifndef FATTN_HIP_MATRIX_CUH
#define FATTN_HIP_MATRIX_CUH

#include "backends/gpu/element.cuh"

#if !MATRIX_MFMA && !MATRIX_WMMA
#error "a processor without matrix units that are known"
#endif

/* Instructions per product. */
#if MATRIX_MFMA && !defined(__gfx950__)
#define MATRIX_STEPS 2
#else
#define MATRIX_STEPS 1
#endif

template <int side> struct matrix {
    enum {
        SIDE = side,
        GROUPS = MATRIX_WMMA == 11 ? 1 : GPU_WAVE / side,
        OWN = MATRIX_WMMA == 11 ? 16 : 8,
        DEPTH = OWN * GROUPS,
        SUMS = side * side / GPU_WAVE
    };
    typedef float sums __attribute__((ext_vector_type(SUMS)));
};

/* Two elements per word, the first in its lower half. */
typedef uint32_t matrix_operand __attribute__((ext_vector_type(matrix<16>::OWN / 2)));

typedef uint32_t matrix_four __attribute__((ext_vector_type(4)));
typedef uint32_t matrix_two __attribute__((ext_vector_type(2)));
typedef float matrix_pair __attribute__((ext_vector_type(2)));
typedef float matrix_floats __attribute__((ext_vector_type(4)));

/* Read again at each use, so that values computed from it do not occupy registers in between. */
GPU_DEVICE uint32_t matrix_thread(void) { return (uint32_t)gpu_thread_anew(); }
GPU_DEVICE int matrix_lane(void) { return matrix_thread() % GPU_WAVE; }

/* --- Layout of elements ----------------------------------------------------------------------- */

/* The row of the lane's first sum; the distance of sum r's row from that; and the row of sum r. */
template <int SIDE> GPU_DEVICE int matrix_row_first(void)
{
    const int group = matrix_thread() % GPU_WAVE / SIDE;
    return MATRIX_MFMA ? 4 * group : MATRIX_WMMA == 11 ? group : 8 * group;
}

template <int SIDE> GPU_DEVICE constexpr int matrix_row_step(int r)
{
    return MATRIX_MFMA ? 4 * (GPU_WAVE / SIDE) * (r / 4) + r % 4 : MATRIX_WMMA == 11 ? 2 * r : r;
}

template <int SIDE> GPU_DEVICE int matrix_row(int r)
{
    return matrix_row_first<SIDE>() + matrix_row_step<SIDE>(r);
}

/* Column of the lane's sums, and row or column of its operands. */
template <int SIDE> GPU_DEVICE int matrix_column(void) { return matrix_thread() % SIDE; }

/* First k of the lane's operands. */
template <int SIDE> GPU_DEVICE int matrix_own(void)
{
    return matrix<SIDE>::GROUPS == 1 ? 0 : matrix_thread() % GPU_WAVE / SIDE * matrix<SIDE>::OWN;
}

/* The k at which row i of sums is found in the operands that they become; and the inverse. Both
 * also work beyond DEPTH. */
template <int SIDE> GPU_DEVICE int matrix_place(int i)
{
    enum { GROUPS = matrix<SIDE>::GROUPS, DEPTH = matrix<SIDE>::DEPTH };
    const int four = i % DEPTH / 4;
    return MATRIX_MFMA ? i / DEPTH * DEPTH + 8 * (four % GROUPS) + 4 * (four / GROUPS) + i % 4 : i;
}

template <int SIDE> GPU_DEVICE int matrix_placed(int k)
{
    enum { GROUPS = matrix<SIDE>::GROUPS, DEPTH = matrix<SIDE>::DEPTH };
    const int four = k % DEPTH / 4;
    return MATRIX_MFMA ? k / DEPTH * DEPTH + 4 * (four / 2 + four % 2 * GROUPS) + k % 4 : k;
}

/* --- Types ------------------------------------------------------------------------------------ */

/* Selects four bytes of two words: numbers 4 .. 7 are those of x, 0 .. 3 those of y. */
GPU_DEVICE uint32_t matrix_bytes(uint32_t x, uint32_t y, uint32_t which)
{
    return __builtin_amdgcn_perm(x, y, which);
}

/* The lower halves of two words, and the upper ones. */
GPU_DEVICE uint32_t matrix_lower(uint32_t first, uint32_t second)
{
    return matrix_bytes(second, first, 0x05040100);
}

GPU_DEVICE uint32_t matrix_upper(uint32_t first, uint32_t second)
{
    return matrix_bytes(second, first, 0x07060302);
}

/*
 * A 16-bit type. pack(): rounds two floats to a pair, to nearest. pack_weights(): the same for
 * weights, which are not negative, and whose NaN may be lost, since their sum keeps it. step(): one
 * instruction, with 4, 8 or 16 elements per lane. Weights are scaled by 2^LIFT, so that small ones
 * stay normal numbers.
 */
struct matrix_f16 {
    enum { LIFT = 7 };
    static constexpr fattn_dtype DTYPE = FATTN_F16;
    typedef _Float16 four __attribute__((ext_vector_type(4)));
    typedef _Float16 eight __attribute__((ext_vector_type(8)));
    typedef _Float16 sixteen __attribute__((ext_vector_type(16)));

    GPU_DEVICE uint32_t pack(float lo, float hi)
    {
        return gpu_f16_from_f32(lo) | (uint32_t)gpu_f16_from_f32(hi) << 16;
    }
    GPU_DEVICE uint32_t pack_weights(float lo, float hi) { return pack(lo, hi); }
#if MATRIX_MFMA
    GPU_DEVICE auto step(four a, four b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
    }
    GPU_DEVICE auto step(four a, four b, matrix<32>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
    }
#endif
#if defined(__gfx950__)
    GPU_DEVICE auto step(eight a, eight b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, 0, 0, 0);
    }
    GPU_DEVICE auto step(eight a, eight b, matrix<32>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, c, 0, 0, 0);
    }
#elif MATRIX_WMMA == 11
    GPU_DEVICE auto step(sixteen a, sixteen b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
    }
#elif MATRIX_WMMA == 12
    GPU_DEVICE auto step(eight a, eight b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
    }
#endif
};

struct matrix_bf16 {
    enum { LIFT = 0 };
    static constexpr fattn_dtype DTYPE = FATTN_BF16;
    typedef short four __attribute__((ext_vector_type(4)));
#if defined(__gfx950__)
    typedef __bf16 eight __attribute__((ext_vector_type(8)));
#else
    typedef short eight __attribute__((ext_vector_type(8)));
#endif
    typedef short sixteen __attribute__((ext_vector_type(16)));

#if defined(__gfx950__)
    GPU_DEVICE uint32_t pack(float lo, float hi)
    {
        typedef float floats __attribute__((ext_vector_type(2)));
        typedef __bf16 two __attribute__((ext_vector_type(2)));
        const floats pair = {lo, hi};
        return __builtin_bit_cast(uint32_t, __builtin_convertvector(pair, two));
    }
    GPU_DEVICE uint32_t pack_weights(float lo, float hi) { return pack(lo, hi); }
#else
    GPU_DEVICE uint32_t pack(float lo, float hi)
    {
        return gpu_bf16_from_f32(lo) | (uint32_t)gpu_bf16_from_f32(hi) << 16;
    }
    /* Rounds ties away from zero. */
    GPU_DEVICE uint32_t pack_weights(float lo, float hi)
    {
        return matrix_upper(fattn_f32_bits(lo) + 0x8000u, fattn_f32_bits(hi) + 0x8000u);
    }
#endif
#if MATRIX_MFMA
    GPU_DEVICE auto step(four a, four b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
    }
    GPU_DEVICE auto step(four a, four b, matrix<32>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0);
    }
#endif
#if defined(__gfx950__)
    GPU_DEVICE auto step(eight a, eight b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, 0, 0, 0);
    }
    GPU_DEVICE auto step(eight a, eight b, matrix<32>::sums c)
    {
        return __builtin_amdgcn_mfma_f32_32x32x16_bf16(a, b, c, 0, 0, 0);
    }
#elif MATRIX_WMMA == 11
    GPU_DEVICE auto step(sixteen a, sixteen b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
    }
#elif MATRIX_WMMA == 12
    GPU_DEVICE auto step(eight a, eight b, matrix<16>::sums c)
    {
        return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
    }
#endif
};

/* --- Products --------------------------------------------------------------------------------- */

/* c += A B, summed over DEPTH k. */
template <class T, int SIDE>
GPU_DEVICE void matrix_multiply(matrix_operand a, matrix_operand b, typename matrix<SIDE>::sums &c)
{
#if MATRIX_STEPS == 2
    typedef typename T::four four;
    const matrix_two a_lo = a.lo, a_hi = a.hi, b_lo = b.lo, b_hi = b.hi;
    c = T::step(__builtin_bit_cast(four, a_lo), __builtin_bit_cast(four, b_lo), c);
    c = T::step(__builtin_bit_cast(four, a_hi), __builtin_bit_cast(four, b_hi), c);
#elif MATRIX_WMMA == 11
    typedef typename T::sixteen sixteen;
    c = T::step(__builtin_bit_cast(sixteen, a), __builtin_bit_cast(sixteen, b), c);
#else
    typedef typename T::eight eight;
    c = T::step(__builtin_bit_cast(eight, a), __builtin_bit_cast(eight, b), c);
#endif
}

/* Tells the compiler how to interleave loads and products of the code before it: N products, each
 * with EACH operands from LDS, which are loaded AHEAD products before. By itself, the compiler
 * either loads all operands first and runs out of registers, or loads each when it is needed and
 * stalls. */
template <int N, int AHEAD, int EACH = 1> GPU_DEVICE void matrix_pace(void)
{
    enum {
        PRODUCTS = MATRIX_STEPS,
        LOADS = MATRIX_WMMA == 11 ? 2 * EACH : EACH,
        IS_PRODUCT = 8,
        IS_LOAD = 0x100
    };
    __builtin_amdgcn_sched_group_barrier(IS_LOAD, AHEAD * LOADS, 0);
    GPU_UNROLL
    for (int n = 0; n < N - AHEAD; n++) {
        __builtin_amdgcn_sched_group_barrier(IS_PRODUCT, PRODUCTS, 0);
        __builtin_amdgcn_sched_group_barrier(IS_LOAD, LOADS, 0);
    }
    __builtin_amdgcn_sched_group_barrier(IS_PRODUCT, AHEAD * PRODUCTS, 0);
}

/* x of lane l ^ n; n is 16 or 32. */
GPU_DEVICE uint32_t matrix_across(uint32_t x, int n)
{
    if (GPU_WAVE == 32) {
#if !MATRIX_MFMA
        return (uint32_t)__builtin_amdgcn_permlanex16((int)x, (int)x, 0x76543210, (int)0xfedcba98,
                                                      false, false);
#endif
    }
    return (uint32_t)__builtin_amdgcn_ds_bpermute((matrix_lane() ^ n) * 4, (int)x);
}

GPU_DEVICE float matrix_across(float x, int n)
{
    return fattn_f32_from_bits(matrix_across(fattn_f32_bits(x), n));
}

/* x of lane n of the wave. */
GPU_DEVICE int64_t matrix_from(int64_t x, int n)
{
    const uint32_t low = (uint32_t)__builtin_amdgcn_ds_bpermute(4 * n, (int)x);
    const uint32_t high = (uint32_t)__builtin_amdgcn_ds_bpermute(4 * n, (int)(x >> 32));
    return (int64_t)((uint64_t)high << 32 | low);
}

/* Whether x is true in any lane of the wave. */
GPU_DEVICE bool matrix_any(bool x)
{
#if GPU_WAVE == 64
    return __builtin_amdgcn_ballot_w64(x) != 0;
#else
    return __builtin_amdgcn_ballot_w32(x) != 0;
#endif
}

/* The maximum, and the sum, over the lanes of a column. All of these lanes get it. */
template <int SIDE> GPU_DEVICE float matrix_column_max(float x)
{
    GPU_UNROLL
    for (int n = SIDE; n < GPU_WAVE; n *= 2) {
        x = gpu_max(x, matrix_across(x, n));
    }
    return x;
}

template <int SIDE> GPU_DEVICE float matrix_column_sum(float x)
{
    GPU_UNROLL
    for (int n = SIDE; n < GPU_WAVE; n *= 2) {
        x += matrix_across(x, n);
    }
    return x;
}

/* Makes an operand of DEPTH rows of sums. pair[n] has the lane's sums 2 n and 2 n + 1, rounded, in
 * ascending order of rows. On gfx11 each half of the wave has every other row. */
GPU_DEVICE matrix_operand matrix_as_operand(const uint32_t pair[4])
{
    matrix_operand x;
#if MATRIX_WMMA == 11
    const uint32_t even = matrix_lane() < 16 ? 0x01000504 : 0x05040100, odd = even + 0x02020202;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const uint32_t other = matrix_across(pair[n], 16);
        x[2 * n] = matrix_bytes(pair[n], other, even);
        x[2 * n + 1] = matrix_bytes(pair[n], other, odd);
    }
#else
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        x[n] = pair[n];
    }
#endif
    return x;
}

/* --- Tiles in LDS ----------------------------------------------------------------------------- */

/*
 * A tile consists of chunks of 8 elements (16 bytes), and a line of MATRIX_LINE chunks covers all
 * banks. LDS serves as many lanes at a time as a line has chunks, without conflicts if they access
 * different places of a line. So the chunks of a line are swizzled by the row.
 */
#if defined(__gfx950__)
#define MATRIX_LINE 16
#else
#define MATRIX_LINE 8
#endif

/* Index of the first element of a chunk (8 elements) in a swizzled tile in LDS. A row has WIDTH
 * elements of k, a multiple of 64. Threads write 16 bytes each, row by row, and read several rows
 * at a time. */
template <int WIDTH> GPU_DEVICE int matrix_row_at(int row, int chunk)
{
    enum { CHUNKS = WIDTH / 8, ROWS = CHUNKS < MATRIX_LINE ? MATRIX_LINE / CHUNKS : 1 };
    return ((row * CHUNKS + chunk) ^ row / ROWS % (MATRIX_LINE / ROWS)) * 8;
}

/* The same for a transposed tile, whose rows have N elements of k, 16 or more. Threads fill it with
 * 8 bytes each: 8 adjacent threads have every eighth row, the next 8 the other halves of their
 * chunks, and the next 16 the rows 64 further, or the next chunk. */
template <int N> GPU_DEVICE int matrix_column_at(int row, int chunk)
{
    enum { CHUNKS = N / 8, ROWS = CHUNKS < MATRIX_LINE ? MATRIX_LINE / CHUNKS : 1 };
    const int read = row / ROWS % (ROWS == 4 ? 2 : MATRIX_LINE / ROWS);
    const int filled = MATRIX_LINE == 8 ? row / 8 % 8 : row / 8 % 8 * 2 + row / 64 % 2;
    return ((row * CHUNKS + chunk) ^ read ^ filled) * 8;
}

/* Load and store 16 bytes, at multiples of 16. */
GPU_DEVICE matrix_four matrix_get(const uint16_t *from) { return *(const matrix_four *)from; }
GPU_DEVICE void matrix_put(uint16_t *to, matrix_four x) { *(matrix_four *)to = x; }

/*
 * AT(row, chunk), for either kind of tile, is linear over xor in the bits of row and chunk. So the
 * address of a lane's access can be split into a part that depends on the lane (lane_at), and a
 * part that is the same for all lanes, which is a constant and needs no register. The bits of the
 * latter below the size of a line are xored, and the rest is added. The two parts of a row, or of a
 * chunk, must have no bits in common.
 */
template <int (*AT)(int, int), class Element>
GPU_DEVICE Element *matrix_at(Element *tile, int lane_at, int row, int chunk)
{
    const int all = 2 * AT(row, chunk), low = all % (16 * MATRIX_LINE);
    return (Element *)((char *)tile + (2 * lane_at ^ low) + (all - low));
}

/* The lane's part (lane_at) of the address of its operands. */
template <int SIDE, int (*AT)(int, int)> GPU_DEVICE int matrix_reads(void)
{
    return AT(matrix_column<SIDE>(), matrix_own<SIDE>() / 8);
}

/* The operand of rows row .. row + SIDE - 1 of a tile, row being a multiple of SIDE, and of DEPTH k
 * from step * DEPTH on. lane_at: matrix_reads(). */
template <int SIDE, int (*AT)(int, int)>
GPU_DEVICE matrix_operand matrix_load(const uint16_t *tile, int lane_at, int row, int step)
{
    const int chunk = step * matrix<SIDE>::DEPTH / 8;
#if MATRIX_WMMA == 11
    matrix_operand x;
    x.lo = matrix_get(matrix_at<AT>(tile, lane_at, row, chunk));
    x.hi = matrix_get(matrix_at<AT>(tile, lane_at, row, chunk + 1));
    return x;
#else
    return matrix_get(matrix_at<AT>(tile, lane_at, row, chunk));
#endif
}

template <int SIDE, int (*AT)(int, int)>
GPU_DEVICE matrix_operand matrix_load(const uint16_t *tile, int row, int step)
{
    return matrix_load<SIDE, AT>(tile, matrix_reads<SIDE, AT>(), row, step);
}

/* matrix_put_sums() stores an operand of sums of column c (matrix_as_operand) to row c of a tile of
 * SIDE rows, as its k from step * DEPTH on. matrix_get_sums() reads eight of these in the order of
 * the original rows. */
template <int SIDE, int (*AT)(int, int)>
GPU_DEVICE void matrix_put_sums(uint16_t *tile, int step, matrix_operand x)
{
    const int column = matrix_column<SIDE>();
#if MATRIX_WMMA == 11
    const int half = matrix_lane() / 16;
    const matrix_four lo = x.lo, hi = x.hi;
    matrix_put(tile + AT(column, 2 * step + half), half ? hi : lo);
#else
    matrix_put(tile + AT(column, (step * matrix<SIDE>::DEPTH + matrix_own<SIDE>()) / 8), x);
#endif
}

template <int SIDE, int (*AT)(int, int)>
GPU_DEVICE matrix_four matrix_get_sums(const uint16_t *tile, int row, int chunk)
{
    const int lo = matrix_place<SIDE>(8 * chunk), hi = matrix_place<SIDE>(8 * chunk + 4);
    matrix_four x;
    x.lo = *(const matrix_two *)(tile + AT(row, lo / 8) + lo % 8);
    x.hi = *(const matrix_two *)(tile + AT(row, hi / 8) + hi % 8);
    return x;
}

/* Orders the wave's own accesses to LDS. */
GPU_DEVICE void matrix_wave_sync(void)
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

/* --- From global memory to LDS ---------------------------------------------------------------- */

/* THREADS threads fill a tile of N rows of WIDTH elements, 16 bytes of a row at a time. A thread
 * has chunk matrix_fill::chunk() of rows row(0), row(1), .. row(COUNT - 1). */
template <int WIDTH, int N, int THREADS> struct matrix_fill {
    enum { CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS, COUNT = N / STEP };
    static_assert(THREADS % CHUNKS == 0 && N % STEP == 0, "every thread has as much");
    matrix_four x[COUNT];

    GPU_DEVICE int chunk(void) { return matrix_thread() % CHUNKS; }
    GPU_DEVICE int row(int n) { return matrix_thread() / CHUNKS + n * STEP; }
};

/* The same for a tile that is transposed: WIDTH rows of N elements, those of a row in the order of
 * matrix_place<SIDE>(). A thread has COUNT blocks of 4 rows, from row(n) on, by 8 channels, from
 * 8 * chunk(n) on. */
template <int SIDE, int WIDTH, int N, int THREADS> struct matrix_transposed_fill {
    enum { LINES = WIDTH / 64, COUNT = WIDTH * N / 32 / THREADS };
    static_assert(WIDTH * N % (32 * THREADS) == 0, "every thread has as much");
    matrix_four x[COUNT][4];

    /* Eight adjacent threads have adjacent channels; the next eight have the other half of a chunk
     * of k. */
    GPU_DEVICE int chunk(int n) { return matrix_thread() % 8 + number(n) % LINES * 8; }
    GPU_DEVICE int place(int n) { return number(n) / LINES * 8 + matrix_thread() / 8 % 2 * 4; }
    GPU_DEVICE int row(int n) { return matrix_placed<SIDE>(place(n)); }
    GPU_DEVICE int number(int n) { return (n * THREADS + matrix_thread()) / 16; }
};

/* Stores channels 8 chunk .. 8 chunk + 7 of four rows to a transposed tile, as eight rows with four
 * adjacent k from k on. The first version takes the thread's part of the address (lane_at). */
template <int N>
GPU_DEVICE void matrix_put_transposed(uint16_t *tile, int lane_at, const matrix_four x[4])
{
    GPU_UNROLL
    for (int c = 0; c < 8; c++) {
        const int w = c / 2;
        const matrix_two four =
            c % 2 ? matrix_two{matrix_upper(x[0][w], x[1][w]), matrix_upper(x[2][w], x[3][w])}
                  : matrix_two{matrix_lower(x[0][w], x[1][w]), matrix_lower(x[2][w], x[3][w])};
        *(matrix_two *)matrix_at<matrix_column_at<N>>(tile, lane_at, c, 0) = four;
    }
}

template <int N>
GPU_DEVICE void matrix_put_transposed(uint16_t *tile, int chunk, int k, const matrix_four x[4])
{
    matrix_put_transposed<N>(tile, matrix_column_at<N>(8 * chunk, k / 8) + k % 8, x);
}

#endif
