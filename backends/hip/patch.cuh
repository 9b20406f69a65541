/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of patches, for backward. A patch is an accumulator tile whose layout depends on the
 * size of a wave alone, not on the matrix instructions that compute it (matrix.cuh). Elements of
 * operands have 16 bits. With D = GPU_WAVE / 2, the depth of a step (its number of k),
 *
 *     a patch    has D rows by 16 columns of floats: lane l has rows 8 (l / 16) .. + 7 of column
 *                l % 16
 *     an operand has 16 columns by D elements: lane l has elements 8 (l / 16) .. + 7 of column
 *                l % 16
 *
 * So a patch, rounded, is an operand, and its rows are the operand's depth. The layouts of the
 * instructions' own accumulators differ. They are brought to that of a patch by the choice of the
 * rows that an instruction is given:
 *
 *     MFMA (waves of 64)    two products; lane group g has rows 4 g .. + 3 of both, and row m of
 *                           product t is row 8 (m / 4) + 4 t + m % 4 of the patch. An instruction
 *                           of depth 16 instead of 32 takes half of the 8 elements: any order of
 *                           the depth is correct if it is the same on both sides.
 *     WMMA of gfx12         lane group g has rows 8 g .. + 7
 *     WMMA of gfx11         lane group g has rows g, g + 2 ..; row m is row 8 (m % 2) + m / 2. Both
 *                           lane groups must hold all 16 elements of an operand.
 *
 * Tiles in LDS are rows of chunks of 8 elements. They are swizzled within lines of MATRIX_LINE
 * chunks, so that rows and columns that are read or written together are in different banks.
 */
#ifndef FATTN_HIP_PATCH_CUH
#define FATTN_HIP_PATCH_CUH

#include "backends/hip/matrix.cuh"

#define PATCH_DEPTH (GPU_WAVE / 2)
#define PATCH_PARTS (MATRIX_MFMA ? 2 : 1)

typedef typename matrix<16>::sums patch_part;

typedef struct patch {
    patch_part part[PATCH_PARTS];
} patch;

/* The operand that supplies the rows of a patch. */
typedef struct patch_rows {
    matrix_operand part[PATCH_PARTS];
} patch_rows;

/* A lane's 8 elements of a rounded patch, two in each word. */
typedef matrix_four patch_packed;

/* The thread's number, unsigned so that divisions by constants are cheap. Waves of 32 have fewer
 * registers and read it again at each use, so that values computed from it do not occupy
 * registers. */
GPU_DEVICE uint32_t patch_thread(void)
{
    return (uint32_t)(MATRIX_MFMA ? gpu_thread() : gpu_thread_anew());
}

GPU_DEVICE int patch_column(void) { return (int)(patch_thread() % 16); }
GPU_DEVICE int patch_row(void) { return (int)(patch_thread() % GPU_WAVE / 16 * 8); }

GPU_DEVICE float patch_get(const patch &x, int e)
{
    return x.part[e * PATCH_PARTS / 8][e % (8 / PATCH_PARTS)];
}

GPU_DEVICE void patch_set(patch &x, int e, float value)
{
    x.part[e * PATCH_PARTS / 8][e % (8 / PATCH_PARTS)] = value;
}

GPU_DEVICE void patch_clear(patch &x)
{
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        patch_set(x, e, 0);
    }
}

/* Called between steps of a product: limits how many operands the compiler loads ahead, so that it
 * has registers for them. The distance has never been timed. */
GPU_DEVICE void patch_pause(int step)
{
    if (step % (MATRIX_MFMA ? 4 : MATRIX_WMMA == 12 ? 2 : 1) == 0) {
        __builtin_amdgcn_sched_barrier(0);
    }
}

/* Tells the compiler how to interleave loads and products of the code before it: LOADS loads, each
 * for PRODUCTS products, issued AHEAD loads before they are used. Callers pass 4, which has never
 * been timed. */
template <int LOADS, int AHEAD, int PRODUCTS> GPU_DEVICE void patch_pace(void)
{
    enum { IS_PRODUCT = 8, IS_LOAD = 0x100 };
    __builtin_amdgcn_sched_group_barrier(IS_LOAD, AHEAD, 0);
    GPU_UNROLL
    for (int n = 0; n < LOADS - AHEAD; n++) {
        __builtin_amdgcn_sched_group_barrier(IS_PRODUCT, PRODUCTS * MATRIX_STEPS, 0);
        __builtin_amdgcn_sched_group_barrier(IS_LOAD, 1, 0);
    }
    __builtin_amdgcn_sched_group_barrier(IS_PRODUCT, AHEAD * PRODUCTS * MATRIX_STEPS, 0);
}

/* Called after products: the compiler must issue them before the code that follows. Otherwise it
 * may delay them to their first use, while their operands occupy registers. */
GPU_DEVICE void patch_finish(patch &x)
{
    GPU_UNROLL
    for (int n = 0; n < PATCH_PARTS; n++) {
        asm volatile("" : "+v"(x.part[n]));
    }
}

/* c += a b */
template <class T> GPU_DEVICE void patch_add(patch &c, const patch_rows &a, matrix_operand b)
{
    GPU_UNROLL
    for (int n = 0; n < PATCH_PARTS; n++) {
        matrix_multiply<T, 16>(a.part[n], b, c.part[n]);
    }
}

/* --- Tiles in LDS ----------------------------------------------------------------------------- */

/*
 * The swizzle: a number that is xored to the index of a chunk in a row of CHUNKS chunks. It is
 * linear in the bits of the row, with a hex digit for each, the lowest bit first. Reads take 16
 * rows of a patch at a time, which differ in bits 0, 1, 3 and 4 (half of them at a time if a line
 * has 8 chunks), or 16 adjacent rows. Writes take four rows and two chunks (patch_squares), or
 * every second row and two chunks (patch_store). docs/notes/hip.md has the remaining bank
 * conflicts.
 */
template <int CHUNKS> GPU_DEVICE int patch_swizzle(int row)
{
    enum { PART = MATRIX_LINE / (CHUNKS < MATRIX_LINE ? CHUNKS : MATRIX_LINE) }; /* rows per line */
    const int of_8 = PART == 1 ? 0x16412 : PART == 2 ? 0x01520 : 0x05300;
    const int of_16 = PART == 1 ? 0x84a12 : PART == 2 ? 0x24a10 : 0x25800;
    int x = 0;
    GPU_UNROLL
    for (int bit = 0; bit < 5; bit++) {
        x ^= (row >> bit & 1) * ((MATRIX_LINE == 16 ? of_16 : of_8) >> 4 * bit & 15);
    }
    return x;
}

/* The index in a tile of the first element of chunk `chunk` of row `row`, for arguments that depend
 * on the thread. */
template <int CHUNKS> GPU_DEVICE int patch_place(int row, int chunk)
{
    return ((row * CHUNKS + chunk) ^ patch_swizzle<CHUNKS>(row)) * 8;
}

/* The place `rows` and `chunks` further. These are compile-time constants that have no bits in
 * common with the row and chunk of `place`, so that little is left to compute. */
template <int CHUNKS> GPU_DEVICE int patch_further(int place, int rows, int chunks)
{
    enum { INSIDE = MATRIX_LINE - 1 };
    const int inside = (chunks & INSIDE) ^ (rows * CHUNKS & INSIDE) ^ patch_swizzle<CHUNKS>(rows);
    return (place ^ inside * 8) + ((rows * CHUNKS & ~INSIDE) + (chunks & ~INSIDE)) * 8;
}

GPU_DEVICE matrix_four patch_chunk(const uint16_t *tile, int place)
{
    return *(const matrix_four *)(tile + place);
}

/* The lane's first place for loads of an operand whose columns are the 16 rows from `row` on. */
template <int CHUNKS> GPU_DEVICE int patch_columns_place(int row, int chunk)
{
#if MATRIX_WMMA == 11
    return patch_place<CHUNKS>(row + patch_column(), chunk);
#else
    return patch_place<CHUNKS>(row + patch_column(), chunk + (patch_row() >> 3));
#endif
}

/* The lane's first place for loads of operands that supply the rows of patches. */
template <int CHUNKS> GPU_DEVICE int patch_rows_place(int chunk)
{
    const int m = patch_column();
#if MATRIX_WMMA == 11
    return patch_place<CHUNKS>(8 * (m & 1) + (m >> 1), chunk);
#elif MATRIX_WMMA == 12
    return patch_place<CHUNKS>(m, chunk + (patch_row() >> 3));
#else
    return patch_place<CHUNKS>(8 * (m >> 2) + (m & 3), chunk + (patch_row() >> 3));
#endif
}

/* Loads an operand `rows` and `chunks` further than `place`. */
template <int CHUNKS>
GPU_DEVICE matrix_operand patch_load(const uint16_t *tile, int place, int rows, int chunks)
{
#if MATRIX_WMMA == 11
    const matrix_four a = patch_chunk(tile, patch_further<CHUNKS>(place, rows, chunks));
    const matrix_four b = patch_chunk(tile, patch_further<CHUNKS>(place, rows, chunks + 1));
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return patch_chunk(tile, patch_further<CHUNKS>(place, rows, chunks));
#endif
}

template <int CHUNKS>
GPU_DEVICE patch_rows patch_load_rows(const uint16_t *tile, int place, int rows, int chunks)
{
    patch_rows a;
    GPU_UNROLL
    for (int n = 0; n < PATCH_PARTS; n++) {
        a.part[n] = patch_load<CHUNKS>(tile, place, rows + 4 * n, chunks);
    }
    return a;
}

/* --- From patches to operands ----------------------------------------------------------------- */

/* Rounds a patch. ANY: it may hold any NaN. Otherwise it holds only those NaN that arithmetic on
 * 16-bit inputs makes, and uses T::pack_weights(), which is faster but may lose other NaN. */
template <class T, bool ANY> GPU_DEVICE patch_packed patch_pack(const patch &x)
{
    patch_packed y;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const float lo = patch_get(x, 2 * n), hi = patch_get(x, 2 * n + 1);
        y[n] = ANY ? T::pack(lo, hi) : T::pack_weights(lo, hi);
    }
    return y;
}

GPU_DEVICE matrix_operand patch_as_operand(patch_packed x)
{
#if MATRIX_WMMA == 11
    const bool upper = patch_row() != 0;
    matrix_operand y;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const uint32_t other = matrix_across(x[n], 16);
        y[n] = upper ? other : x[n];
        y[4 + n] = upper ? x[n] : other;
    }
    return y;
#else
    return x;
#endif
}

/* patch_store() writes a patch to a row-major tile, two columns at a time: adjacent lanes exchange
 * halves, and even columns write even rows. patch_store_place(): the place of row
 * patch_row() + column % 2 and of the pair that has the column. */
template <int CHUNKS> GPU_DEVICE int patch_store_place(int column)
{
    return patch_place<CHUNKS>(patch_row() + (column & 1), column >> 3) + (column & 6);
}

template <int CHUNKS>
GPU_DEVICE void patch_store(uint16_t *tile, int place, int chunks, patch_packed x)
{
    const uint32_t halves = patch_column() & 1 ? 0x03020706 : 0x05040100;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const uint32_t other = __builtin_amdgcn_update_dpp(0, x[n], 0xb1, 0xf, 0xf, true);
        *(uint32_t *)(tile + patch_further<CHUNKS>(place, 2 * n, chunks)) =
            matrix_bytes(other, x[n], halves);
    }
}

/* --- Staging ---------------------------------------------------------------------------------- */

/* Rows in memory: `live` rows of `dim` channels exist. */
typedef struct patch_source {
    const uint16_t *from;
    int64_t stride;
    int dim, live;
} patch_source;

/* Whether patch_squares can load rows: by four channels, with a stride below 2^23 elements, so that
 * byte offsets in the at most 128 rows of a tile are below 2^31. */
GPU_DEVICE bool patch_loads_by_quads(const fattn_gpu_args &g, unsigned quads, int64_t stride,
                                     int64_t dim)
{
    return g.quads & quads && dim % 4 == 0 && (uint64_t)stride >> 23 == 0;
}

/* A tile of ROWS by WIDTH channels in the registers of THREADS threads, between its load and its
 * store. A thread has squares of four rows by four channels, which it can store as they are or
 * transposed. */
template <int ROWS, int WIDTH, int THREADS> struct patch_squares {
    enum { HIGH = ROWS / 4, STEP = THREADS / HIGH * 4, EACH = (WIDTH + STEP - 1) / STEP };
    static_assert(THREADS % HIGH == 0 && ROWS <= 128, "a thread's squares are of the same rows");
    matrix_two word[EACH][4];

    static GPU_MEMBER int row() { return (int)(patch_thread() % HIGH * 4); }
    static GPU_MEMBER int channel(int n)
    {
        return (int)(patch_thread() % THREADS / HIGH * 4) + n * STEP;
    }
    static GPU_MEMBER bool exists(int n) { return STEP <= WIDTH || channel(n) < WIDTH; }

    /* Loads the squares. For rows and channels that do not exist, and for threads without a square,
     * it loads other ones. If rows cannot be read `by_quads` it sets zeros, so that the registers
     * are free before. */
    GPU_MEMBER void fetch(const patch_source &t, bool by_quads)
    {
        if (!by_quads) {
            GPU_UNROLL
            for (int n = 0; n < 4 * EACH; n++) {
                word[n / 4][n % 4] = 0;
            }
            return;
        }
        const int r = row(), c = channel(0) & (WIDTH - 1), stride = (int)t.stride;
        const bool whole = is_whole(t);
        const uint32_t first = (uint32_t)(r * stride + c) * 2;
        GPU_UNROLL
        for (int n = 0; n < 4 * EACH; n++) {
            const int e = n % 4, further = n / 4 * STEP;
            if (whole) {
                word[n / 4][e] = at(t.from + e * t.stride + further, first);
            } else {
                const int below = smaller(r + e, t.live - 1),
                          right = smaller(c + further, t.dim - 4);
                word[n / 4][e] = at(t.from, (uint32_t)(below * stride + right) * 2);
            }
        }
    }

    /* Zeroes what was fetched past the live rows and dim channels. */
    GPU_MEMBER void zero_outside(const patch_source &t)
    {
        if (!is_whole(t)) {
            GPU_UNROLL
            for (int n = 0; n < 4 * EACH; n++) {
                const bool exists = row() + n % 4 < t.live && channel(n / 4) < t.dim;
                word[n / 4][n % 4] = exists ? word[n / 4][n % 4] : matrix_two{0, 0};
            }
        }
    }

    static GPU_MEMBER bool is_whole(const patch_source &t)
    {
        return t.live >= ROWS && t.dim == WIDTH;
    }
    static GPU_MEMBER int smaller(int a, int b) { return a < b ? a : b; }
    static GPU_MEMBER matrix_two at(const uint16_t *from, uint32_t offset)
    {
        return *(const matrix_two *)((const char *)from + offset);
    }

    GPU_MEMBER void put_rows(uint16_t *tile) const
    {
        const int place = patch_place<WIDTH / 8>(row(), channel(0) >> 3) + (channel(0) & 4);
        GPU_UNROLL
        for (int n = 0; n < 4 * EACH; n++) {
            if (exists(n / 4)) {
                *(matrix_two *)(tile + patch_further<WIDTH / 8>(place, n % 4, n / 4 * STEP / 8)) =
                    word[n / 4][n % 4];
            }
        }
    }

    GPU_MEMBER void put_columns(uint16_t *tile) const
    {
        const int place = patch_place<ROWS / 8>(channel(0), row() >> 3) + (row() & 4);
        GPU_UNROLL
        for (int n = 0; n < 4 * EACH; n++) {
            const matrix_two *const from = word[n / 4];
            const int pair = n % 4 / 2;
            const matrix_two lower = {matrix_lower(from[0][pair], from[1][pair]),
                                      matrix_lower(from[2][pair], from[3][pair])};
            const matrix_two upper = {matrix_upper(from[0][pair], from[1][pair]),
                                      matrix_upper(from[2][pair], from[3][pair])};
            if (exists(n / 4)) {
                *(matrix_two *)(tile + patch_further<ROWS / 8>(place, n / 4 * STEP + n % 4, 0)) =
                    n % 2 ? upper : lower;
            }
        }
    }
};

/* Copies rows of any alignment, an element at a time: calls put(row, channel, element). */
template <int ROWS, int WIDTH, int THREADS, class Put>
GPU_DEVICE void patch_copy_misaligned(const patch_source &t, Put put)
{
    GPU_ROLLED
    for (uint32_t n = patch_thread(); n < ROWS * WIDTH; n += THREADS) {
        const int r = (int)(n / WIDTH), c = (int)(n % WIDTH);
        put(r, c, r < t.live && c < t.dim ? t.from[r * t.stride + c] : (uint16_t)0);
    }
}

template <int WIDTH> GPU_DEVICE uint16_t *patch_element(uint16_t *tile, int row, int c)
{
    return tile + patch_place<WIDTH / 8>(row, c >> 3) + (c & 7);
}

#endif
