/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public structs as a fuzz target. Bytes become a fattn_problem and its fattn_buffers, or the
 * arguments of a merge or a dropout mask. Every call must succeed, or refuse with a printable
 * reason and untouched outputs; and it must touch no byte outside the structs and operands: each
 * struct is a heap block of struct_size bytes, and each operand one of its exact size.
 *
 * tools/test --stage fuzz builds it with clang and libFuzzer. With -DFATTN_FUZZ_REPLAY it is a
 * plain TAP program that runs each file, or each file of each folder, that it is given.
 */
#define _XOPEN_SOURCE 700

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/feature.h"
#include "core/memory.h"
#include "fattn/fattn.h"
#include "tests/fuzz_replay.h"
#include "tests/random.h"

enum { OPERANDS = 32, ROOM = 1 << 16 };
#define COST 65536.0 /* products of an attention that is computed */

static void require(int holds, const char *law, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken: %s: %s\n", law, what);
    abort();
}

/* --- Bytes ------------------------------------------------------------------------------------ */

typedef struct source {
    const uint8_t *bytes;
    size_t size, at;
} source;

static unsigned next(source *s) { return s->at < s->size ? s->bytes[s->at++] : 0; }

static uint64_t next_word(source *s)
{
    uint64_t word = 0;
    for (int n = 0; n < 8; n++) word = word << 8 | next(s);
    return word;
}

/* A small number, an edge of a type or of the library's limits, or any number. */
static uint64_t next_integer(source *s)
{
    static const int64_t edges[] = {-1,
                                    INT64_MIN,
                                    INT64_MAX,
                                    INT64_MAX / 2,
                                    INT64_MAX / 8,
                                    INT64_MAX / 8 + 1,
                                    INT32_MAX,
                                    (int64_t)INT32_MAX + 1,
                                    INT64_C(1) << 33,
                                    INT64_C(1) << 40,
                                    INT64_C(1) << 62,
                                    256,
                                    576,
                                    577,
                                    65536,
                                    -2};
    const unsigned kind = next(s);
    if (kind < 224) return kind % 32;
    return kind < 254 ? (uint64_t)edges[kind % 16] : next_word(s);
}

static double next_real(source *s)
{
    static const double edges[] = {0,   -0.0,     1,         -1,     0.5,    0.1,      1e-9, 1e300,
                                   NAN, INFINITY, -INFINITY, 1e-320, 3.5e38, 0x1p-149, 2,    30};
    const unsigned kind = next(s);
    if (kind < 240) return edges[kind % 16];
    const uint64_t word = next_word(s);
    double real;
    memcpy(&real, &word, sizeof real);
    return real;
}

/* --- Structs ---------------------------------------------------------------------------------- */

typedef enum kind { WORD64, WORD32, REAL, POINTER } kind;

typedef struct field {
    size_t offset;
    kind kind;
} field;

#define F(type, name, kind)        \
    {                              \
        offsetof(type, name), kind \
    }
#define P(name) F(fattn_problem, name, WORD64)
#define P3(name) P(name.batch), P(name.seq), P(name.head)
#define P4(name) P(name[0]), P(name[1]), P(name[2]), P(name[3])

static const field problem_fields[] = {
    P(struct_size),
    F(fattn_problem, op, WORD32),
    F(fattn_problem, dtype, WORD32),
    F(fattn_problem, dtype_o, WORD32),
    F(fattn_problem, dtype_bias, WORD32),
    F(fattn_problem, dtype_kv, WORD32),
    F(fattn_problem, dtype_v, WORD32),
    F(fattn_problem, layout, WORD32),
    F(fattn_problem, anchor, WORD32),
    P(features),
    F(fattn_problem, outputs, WORD32),
    F(fattn_problem, reserved, WORD32),
    P(batch),
    P(heads_q),
    P(heads_k),
    P(seqlen_q),
    P(seqlen_k),
    P(dim),
    P(dim_v),
    P(total_q),
    P(total_k),
    P(page_size),
    P(num_pages),
    P(max_pages),
    P(block_table_stride),
    P3(q),
    P3(k),
    P3(v),
    P3(o),
    P3(dout),
    P3(dq),
    P3(dk),
    P3(dv),
    F(fattn_problem, scale, REAL),
    F(fattn_problem, softcap, REAL),
    F(fattn_problem, dropout_p, REAL),
    P(window_left),
    P(window_right),
    P4(bias_stride),
    P4(mask_stride),
    P4(block_mask_stride),
    P4(dbias_stride),
    P(block_m),
    P(block_n),
    P(alibi_batch_stride),
    P(batch_offset),
    P(head_offset),
    P(pointer_alignment),
};

#define B(name) F(fattn_buffers, name, WORD64)
#define BP(name) F(fattn_buffers, name, POINTER)

static const field buffers_fields[] = {
    B(struct_size),
    BP(q),
    BP(k),
    BP(v),
    BP(o),
    BP(lse),
    BP(dout),
    BP(dlse),
    BP(dq),
    BP(dk),
    BP(dv),
    BP(dbias),
    BP(dsink),
    BP(bias),
    BP(mask),
    BP(block_mask),
    BP(alibi_slopes),
    BP(sink),
    BP(cu_seqlens_q),
    BP(cu_seqlens_k),
    BP(seqused_q),
    BP(seqused_k),
    BP(block_table),
    B(q_offset),
    B(k_offset),
    B(whole_q),
    B(whole_k),
    BP(q_offsets),
    BP(k_offsets),
    BP(wholes_q),
    BP(wholes_k),
    B(seed),
    B(offset),
    BP(seed_ptr),
    BP(offset_ptr),
    BP(seqstart_k),
    BP(k_descale),
    BP(v_descale),
};

#define M(name) F(fattn_merge_args, name, WORD64)
#define M3(name) M(name.batch), M(name.seq), M(name.head)

static const field merge_fields[] = {
    M(struct_size), M(batch),      M(heads),      M(seqlen),
    M(dim_v),       M3(o1_stride), M3(o2_stride), M3(o_stride),
};

#define D(name) F(fattn_dropout_args, name, WORD64)

static const field dropout_fields[] = {
    D(struct_size),  D(batch),       D(heads),    D(seqlen_q), D(seqlen_k),
    D(batch_offset), D(head_offset), D(q_offset), D(k_offset), F(fattn_dropout_args, p, REAL),
    D(seed),         D(offset),
};

/* Changes one field. A pointer becomes NULL, or the previous one in the struct. */
static void mutate(source *s, void *record, const field *fields, size_t count)
{
    const field f = fields[next(s) % count];
    char *const at = (char *)record + f.offset;
    if (f.kind == REAL) {
        const double real = next_real(s);
        memcpy(at, &real, sizeof real);
    } else if (f.kind == WORD64) {
        const uint64_t word = next_integer(s);
        memcpy(at, &word, sizeof word);
    } else if (f.kind == WORD32) {
        const uint32_t word = (uint32_t)next_integer(s);
        memcpy(at, &word, sizeof word);
    } else {
        memset(at, 0, sizeof(void *));
    }
}

/* The caller's struct, in a block that ends after struct_size bytes. */
static void *exact(const void *record, size_t size)
{
    size_t given = 0;
    memcpy(&given, record, sizeof given);
    const size_t room = given < sizeof given ? sizeof given : given > ROOM ? size : given;
    char *const block = calloc(1, room);
    if (!block) abort();
    memcpy(block, record, room < size ? room : size);
    return block;
}

/* --- Attention -------------------------------------------------------------------------------- */

/* Numbers that a feature may not leave at 0. */
static void choose_sizes(source *s, fattn_problem *p, const fattn_feature_field *numbers)
{
    for (; numbers->name; numbers++) {
        const int64_t size = next(s) % 8;
        if (numbers->low > 0) {
            memcpy((char *)p + numbers->offset, &size, sizeof size);
        }
    }
}

/* Sets features one by one, so that the fuzzer finds each; a feature brings what it requires. */
static void choose_features(source *s, fattn_problem *p)
{
    for (unsigned n = next(s) % 6; n > 0; n--) {
        const int number = next(s) % FATTN_FEATURE_COUNT;
        const uint64_t bit = UINT64_C(1) << number;
        p->features |= bit;
        switch (bit) {
        case FATTN_WINDOW: p->window_left = next(s) % 8, p->window_right = next(s) % 8; break;
        case FATTN_SCALE: p->scale = next_real(s); break;
        case FATTN_SOFTCAP: p->softcap = 1 + next(s) % 8; break;
        case FATTN_DROPOUT: p->dropout_p = next(s) / 255.0; break;
        case FATTN_BIAS: p->bias_stride[2] = p->seqlen_k, p->bias_stride[3] = 1; break;
        case FATTN_ALIBI_BIAS: p->features |= FATTN_ALIBI | FATTN_BIAS; break;
        case FATTN_MASK: p->mask_stride[2] = p->seqlen_k, p->mask_stride[3] = 1; break;
        case FATTN_BLOCK_MASK: p->block_m = 1 + next(s) % 8, p->block_n = 1 + next(s) % 8; break;
        case FATTN_CU_SEQLENS_Q: p->total_q = next(s) % 40; break;
        case FATTN_CU_SEQLENS_K: p->total_k = next(s) % 40; break;
        case FATTN_PAGED:
            p->page_size = 1 + next(s) % 8, p->num_pages = next(s) % 8;
            p->max_pages = (p->seqlen_k + p->page_size - 1) / p->page_size;
            break;
        default: choose_sizes(s, p, fattn_feature_row(number)->fields); break;
        }
    }
}

static void choose_problem(source *s, fattn_problem *p)
{
    static const fattn_dtype types[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64};
    fattn_problem_init(p);
    const unsigned flags = next(s);
    p->op = flags & 1 ? FATTN_BACKWARD : FATTN_FORWARD;
    p->dtype = types[flags >> 1 & 3];
    p->layout = flags & 8 ? FATTN_BHSD : FATTN_BSHD;
    p->anchor = flags & 16 ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
    p->batch = next(s) % 4;
    p->heads_k = 1 + next(s) % 2, p->heads_q = p->heads_k * (1 + next(s) % 3);
    p->seqlen_q = next(s) % 20, p->seqlen_k = next(s) % 40;
    p->dim = 1 + next(s) % 20, p->dim_v = flags & 32 ? p->dim : 1 + next(s) % 20;
    choose_features(s, p);
    if (flags & 64) { /* all outputs */
        p->outputs = p->op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                            : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        p->outputs |= p->op == FATTN_BACKWARD && p->features & FATTN_BIAS ? FATTN_OUT_DBIAS : 0;
        p->outputs |= p->op == FATTN_BACKWARD && p->features & FATTN_SINK ? FATTN_OUT_DSINK : 0;
    }
    for (unsigned n = flags & 128 ? next(s) % 8 : 0; n > 0; n--) {
        mutate(s, p, problem_fields, sizeof problem_fields / sizeof *problem_fields);
    }
}

/* The operands of a run, and the previous contents of outputs. */
typedef struct arrays {
    fattn_operand_info info[OPERANDS];
    char *block[OPERANDS], *before[OPERANDS];
    int count;
} arrays;

static void fill(source *s, const fattn_operand_info *info, char *block)
{
    const int64_t count = info->bytes / info->element_bytes;
    const unsigned style = next(s);
    uint64_t state = style;
    int64_t sum = 0;
    for (int64_t n = 0; n < count; n++) {
        char *const at = block + n * info->element_bytes;
        const int integers = info->dtype == FATTN_DTYPE_DEFAULT && info->element_bytes > 1;
        const int ascending = strncmp(info->name, "cu_", 3) == 0;
        int64_t value = (int64_t)(random_next(&state) >> 33) % 5;
        if (integers && ascending) value = n == 0 ? style % 2 : (sum += value);
        if (integers && style >= 240) value = (int64_t)next_integer(s);
        if (info->dtype == FATTN_F32) {
            const float real = style == 255 ? NAN : style == 254 ? INFINITY : (float)value - 2;
            memcpy(at, &real, sizeof real);
        } else if (info->dtype == FATTN_F64) {
            const double real = style == 255 ? NAN : (double)value - 2;
            memcpy(at, &real, sizeof real);
        } else if (integers) {
            memcpy(at, &value, (size_t)info->element_bytes); /* little-endian or garbage: both do */
        } else {
            memset(at, info->element_bytes == 1 ? (int)(value & 1) : 0x3c,
                   (size_t)info->element_bytes);
        }
    }
}

/* False, with nothing allocated, if operands are too large. */
static int allocate(source *s, const fattn_problem *p, fattn_buffers *b, arrays *a)
{
    int64_t all = 0;
    require(fattn_operand_count(p, &a->count) == FATTN_OK && a->count <= OPERANDS,
            "operands can be counted", fattn_last_reason());
    for (int n = 0; n < a->count; n++) {
        fattn_operand_info_init(&a->info[n]);
        require(fattn_operand_get_info(p, n, &a->info[n]) == FATTN_OK, "and described",
                fattn_last_reason());
        all += a->info[n].bytes < ROOM ? a->info[n].bytes : ROOM;
    }
    for (int n = 0; n < a->count && all < ROOM; n++) {
        const fattn_operand_info *const info = &a->info[n];
        const size_t bytes = (size_t)info->bytes;
        const size_t alignment =
            info->alignment < (int64_t)sizeof(void *) ? sizeof(void *) : (size_t)info->alignment;
        void *block = NULL;
        a->block[n] = a->before[n] = NULL;
        if (bytes == 0 || (!info->required && next(s) % 2)) continue;
        if (posix_memalign(&block, alignment, bytes)) abort();
        a->block[n] = block;
        fill(s, info, block);
        if (info->written && !(a->before[n] = malloc(bytes))) abort();
        if (info->written) memcpy(a->before[n], block, bytes);
        memcpy((char *)b + info->offset, &block, sizeof block);
    }
    return all < ROOM;
}

static void release(arrays *a)
{
    for (int n = 0; n < a->count; n++) {
        free(a->block[n]);
        free(a->before[n]);
    }
}

static void check_refusal(fattn_status status)
{
    const char *const reason = fattn_last_reason();
    if (status == FATTN_OK) return;
    require(strncmp(fattn_status_string(status), "FATTN_", 6) == 0, "a status has a name", reason);
    require(*reason != '\0', "a refusal has a reason", fattn_status_string(status));
    for (const char *c = reason; *c; c++) {
        require(*c >= ' ' && *c <= '~', "a reason is printable", reason);
    }
}

static void check_untouched(fattn_status status, const arrays *a)
{
    for (int n = 0; n < a->count && status != FATTN_OK; n++) {
        require(!a->before[n] || !memcmp(a->before[n], a->block[n], (size_t)a->info[n].bytes),
                "a refusal leaves outputs alone", a->info[n].name);
    }
}

/* By a plan and by one call, on one device. */
static void run(const char *backend, const fattn_problem *p, const fattn_buffers *b,
                const arrays *a, int small)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    void *workspace = NULL;
    fattn_plan_info info;
    char text[256];
    fattn_plan_info_init(&info);
    require(fattn_device_open(backend, &device) == FATTN_OK, "a device opens", fattn_last_reason());
    fattn_status status = fattn_plan_create(device, p, &plan);
    check_refusal(status);
    require(status == fattn_support(device, p), "support says what a plan says",
            fattn_last_reason());
    require(!status == (plan != NULL), "a plan or a reason", fattn_last_reason());
    if (plan) {
        require(fattn_plan_get_info(plan, &info) == FATTN_OK, "a plan can be asked", "");
        (void)fattn_plan_describe(plan, text, sizeof text);
        if (small &&
            posix_memalign(&workspace, 256, (size_t)info.workspace_bytes + !info.workspace_bytes)) {
            abort();
        }
        if (small) memset(workspace, 0xff, (size_t)info.workspace_bytes);
        status = fattn_execute(plan, b, info.workspace_bytes ? workspace : NULL, NULL);
        check_refusal(status);
        check_untouched(status, a);
        free(workspace);
    }
    const fattn_status again = fattn_attention(device, p, b, NULL);
    check_refusal(again);
    if (status) { /* else outputs were written by the first door */
        check_untouched(again, a);
    } else {
        require(again == FATTN_OK, "what a plan does, one call does", fattn_last_reason());
    }
    fattn_plan_destroy(plan);
    fattn_cache_clear();
    fattn_device_close(device);
}

static void attend(source *s)
{
    fattn_problem p;
    fattn_buffers b;
    arrays a = {.count = 0};
    choose_problem(s, &p);
    fattn_buffers_init(&b);
    void *const problem = exact(&p, sizeof p);
    int count = 0;
    const fattn_status legal = fattn_operand_count(problem, &count);
    check_refusal(legal);
    int small = 0;
    if (legal == FATTN_OK) {
        const double pairs = (double)(p.batch + 1) * (double)(p.heads_q + 1) *
                             (double)(p.seqlen_q + 1) * (double)(p.seqlen_k + 1);
        small = pairs * (double)(p.dim + p.dim_v) <= COST && allocate(s, problem, &b, &a);
        a.count = small ? a.count : 0;
        if (p.features & FATTN_DROPOUT) b.seed = next(s);
        if (p.features & FATTN_POSITIONS) b.q_offset = next(s) % 8, b.k_offset = next(s) % 8;
    }
    for (unsigned n = next(s) % 4; n > 0; n--) {
        mutate(s, &b, buffers_fields, sizeof buffers_fields / sizeof *buffers_fields);
    }
    void *const buffers = exact(&b, sizeof b);
    run(next(s) % 4 ? "cpu" : "reference", problem, buffers, &a, small);
    release(&a);
    free(problem);
    free(buffers);
}

/* --- Merge and dropout mask ------------------------------------------------------------------- */

static int64_t reach(int64_t extent, int64_t stride)
{
    return extent > 0 ? (extent - 1) * stride : 0;
}

/* Bytes of a state's o; 0 where they are too many, or the arguments no good. */
static size_t bytes_of(const fattn_merge_args *a, const fattn_strides *t)
{
    const int64_t sizes[] = {a->batch, a->heads, a->seqlen, a->dim_v, t->batch, t->head, t->seq};
    for (int n = 0; n < 7; n++) {
        if (sizes[n] < 0 || sizes[n] > 1000) return 0;
    }
    if (!a->batch || !a->heads || !a->seqlen) return 0;
    const int64_t last =
        reach(a->batch, t->batch) + reach(a->heads, t->head) + reach(a->seqlen, t->seq);
    return last < ROOM ? (size_t)(last + a->dim_v) * sizeof(float) : 0;
}

static void *block_of(size_t bytes)
{
    void *const block = bytes ? malloc(bytes) : NULL;
    if (bytes && !block) abort();
    if (block) memset(block, 0x3f, bytes);
    return block;
}

static void merge(source *s, const char *backend)
{
    fattn_merge_args a;
    fattn_merge_args_init(&a);
    a.batch = 1 + next(s) % 3, a.heads = 1 + next(s) % 3, a.seqlen = next(s) % 8,
    a.dim_v = 1 + next(s) % 8;
    a.o_stride = (fattn_strides){a.seqlen * a.heads * a.dim_v, a.heads * a.dim_v, a.dim_v};
    a.o1_stride = a.o2_stride = a.o_stride;
    for (unsigned n = next(s) % 4; n > 0; n--) {
        mutate(s, &a, merge_fields, sizeof merge_fields / sizeof *merge_fields);
    }
    const size_t o1 = bytes_of(&a, &a.o1_stride), o2 = bytes_of(&a, &a.o2_stride),
                 o = bytes_of(&a, &a.o_stride);
    const size_t rows = o1 && o2 && o ? (size_t)(a.batch * a.heads * a.seqlen) : 0;
    const int good = rows > 0 && rows < ROOM;
    float *const places[] = {block_of(good ? o1 : 0),       block_of(good ? o2 : 0),
                             block_of(good ? o : 0),        block_of(good ? rows * 4 : 0),
                             block_of(good ? rows * 4 : 0), block_of(good ? rows * 4 : 0)};
    a.o1 = places[0], a.o2 = places[1], a.o = places[2];
    a.lse1 = places[3], a.lse2 = places[4], a.lse = places[5];
    const unsigned empty = next(s); /* states without a key, and pointers that are missing */
    if (good && empty & 1) places[3][0] = -INFINITY;
    if (good && empty & 2) places[4][0] = -INFINITY;
    if (empty >= 250) a.lse2 = NULL;
    void *const args = exact(&a, sizeof a);
    fattn_device *device = NULL;
    require(fattn_device_open(backend, &device) == FATTN_OK, "a device opens", fattn_last_reason());
    check_refusal(fattn_merge(device, args, NULL));
    fattn_device_close(device);
    for (int n = 0; n < 6; n++) free(places[n]);
    free(args);
}

static void drop(source *s, const char *backend)
{
    fattn_dropout_args a;
    fattn_dropout_args_init(&a);
    a.batch = next(s) % 3, a.heads = next(s) % 3, a.seqlen_q = next(s) % 20,
    a.seqlen_k = next(s) % 40;
    a.p = next_real(s), a.seed = next(s);
    for (unsigned n = next(s) % 4; n > 0; n--) {
        mutate(s, &a, dropout_fields, sizeof dropout_fields / sizeof *dropout_fields);
    }
    const int64_t sizes[] = {a.batch, a.heads, a.seqlen_q, a.seqlen_k};
    double bytes = 1;
    for (int n = 0; n < 4; n++) bytes *= sizes[n] < 0 ? 0 : (double)sizes[n];
    a.keep = block_of(bytes < ROOM ? (size_t)bytes : 0);
    void *const args = exact(&a, sizeof a);
    fattn_device *device = NULL;
    require(fattn_device_open(backend, &device) == FATTN_OK, "a device opens", fattn_last_reason());
    check_refusal(fattn_dropout_mask(device, args, NULL));
    fattn_device_close(device);
    free(a.keep);
    free(args);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    source s = {bytes, size, 0};
    static int prepared;
    if (!prepared) {
        prepared = 1;
        setenv("FATTN_NUM_THREADS", "1", 1);
        setenv("FATTN_CPU_ISA", "scalar", 1);
    }
    const unsigned what = next(&s);
    if (what < 224) {
        attend(&s);
    } else if (what < 240) {
        merge(&s, what % 2 ? "cpu" : "reference");
    } else {
        drop(&s, what % 2 ? "cpu" : "reference");
    }
    require(fattn_memory_alive() == 0, "no memory is left alive", "");
    return 0;
}
