/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "hip" on an emulated GPU (stub/hip) with the processor that STUB_HIP_ARCH names. Covers
 * what the sweep over kernels does not: the device and its limits, memory, streams and events,
 * functions other than attention, and that findings of the emulator come back as a status.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/hip/hip.h"
#include "fattn/fattn.h"
#include "tests/tap.h"
#include "tests/worst.h"

static fattn_device *hip, *cpu;

static bool fails(fattn_status status, fattn_status expected, const char *words)
{
    return status == expected && strstr(fattn_last_reason(), words);
}

/* Device memory, filled from the host. */
static void *upload(const void *from, size_t bytes)
{
    void *memory = NULL;
    if (fattn_device_malloc(hip, bytes, &memory) ||
        fattn_device_copy(hip, memory, from, bytes, NULL)) {
        tap_check(false, "uploading: %s", fattn_last_reason());
    }
    return memory;
}

static void download(void *to, void *memory, size_t bytes)
{
    if (fattn_device_copy(hip, to, memory, bytes, NULL) || fattn_stream_synchronize(hip, NULL) ||
        fattn_device_free(hip, memory)) {
        tap_check(false, "downloading: %s", fattn_last_reason());
    }
}

static void check_device(const char *arch)
{
    fattn_device *other = NULL;
    fattn_device_info info = {.struct_size = sizeof info};
    tap_check(fattn_device_get_info(hip, &info) == FATTN_OK && strcmp(info.isa, arch) == 0,
              "the device is %s, asked for %s", info.isa, arch);
    tap_check(info.fast_memory == 65536 && info.units == 4 && !info.host_memory,
              "its attributes are the runtime's");
    tap_check(fails(fattn_device_open("hip:1", &other), FATTN_NO_DEVICE, "hip:1"),
              "there is no second one: %s", fattn_last_reason());
    setenv("STUB_HIP_ARCH", "gfx900", 1);
    tap_check(fails(fattn_device_open("hip", &other), FATTN_UNSUPPORTED, "no code for a device"),
              "a processor without code: %s", fattn_last_reason());
    setenv("STUB_HIP_MISSING", "200", 1); /* what newer runtimes say */
    tap_check(fails(fattn_device_open("hip", &other), FATTN_UNSUPPORTED, "no code for a device"),
              "the same where the runtime says invalid image: %s", fattn_last_reason());
    unsetenv("STUB_HIP_MISSING");
    setenv("STUB_HIP_ARCH", arch, 1);
}

static void check_memory(void)
{
    char bytes[512] = "";
    void *memory = NULL;
    fattn_stream stream = NULL;
    fattn_event *events[2] = {NULL, NULL};
    double milliseconds = -1;
    tap_check(fattn_device_malloc(hip, 256, &memory) == FATTN_OK && (uintptr_t)memory % 256 == 0,
              "memory is aligned");
    tap_check(fails(fattn_device_copy(hip, memory, bytes, 257, NULL), FATTN_DEVICE_ERROR,
                    "hipErrorInvalidValue"),
              "a copy past its end: %s", fattn_last_reason());
    tap_check(fattn_device_free(hip, memory) == FATTN_OK, "it is given back");
    tap_check(fattn_device_malloc(hip, (size_t)1 << 40, &memory) == FATTN_OUT_OF_MEMORY,
              "there is not enough: %s", fattn_last_reason());
    const bool made = fattn_stream_create(hip, &stream) == FATTN_OK &&
                      fattn_event_create(hip, &events[0]) == FATTN_OK &&
                      fattn_event_create(hip, &events[1]) == FATTN_OK;
    tap_check(made && fattn_event_record(events[0], stream) == FATTN_OK &&
                  fattn_event_record(events[1], stream) == FATTN_OK &&
                  fattn_event_elapsed(events[0], events[1], &milliseconds) == FATTN_OK &&
                  milliseconds >= 0,
              "events in a stream");
    fattn_event_destroy(events[0]), fattn_event_destroy(events[1]);
    tap_check(fattn_stream_destroy(hip, stream) == FATTN_OK, "the stream is given up");
}

/* Rectangles that begin at even and odd places, of the same bytes as the CPU's. */
static void check_dropout(void)
{
    enum { B = 2, H = 3, SQ = 37, SK = 75, BYTES = B * H * SQ * SK };
    static uint8_t host[BYTES], device[BYTES];
    for (int n = 0; n < 4; n++) {
        fattn_dropout_args a = {.struct_size = sizeof a, .batch = B, .heads = H, .seqlen_q = SQ};
        a.seqlen_k = SK, a.batch_offset = n, a.head_offset = 7, a.q_offset = 5 * n;
        a.k_offset = 16 * n + n % 2, a.p = 0.3, a.seed = 0x123456789abcdef0u, a.offset = 9;
        a.keep = host;
        const fattn_status expected = fattn_dropout_mask(cpu, &a, NULL);
        memset(device, 7, sizeof device);
        a.keep = upload(device, sizeof device);
        const fattn_status status = fattn_dropout_mask(hip, &a, NULL);
        download(device, a.keep, sizeof device);
        tap_check(!expected && !status && memcmp(host, device, sizeof host) == 0,
                  "dropout at key %d is the CPU's, bit for bit", (int)a.k_offset);
    }
}

/* The first row of either state is empty. */
static void check_merge(void)
{
    enum { S = 5, H = 2, DV = 33, ROWS = S * H };
    static float o[3][ROWS * DV], lse[3][ROWS], expected[ROWS * DV], expected_lse[ROWS];
    for (int n = 0; n < 2 * ROWS * DV; n++) {
        o[n % 2][n / 2] = sinf((float)n);
    }
    for (int n = 0; n < ROWS; n++) {
        lse[0][n] = n == 0 ? -INFINITY : cosf((float)n);
        lse[1][n] = n == ROWS - 1 ? -INFINITY : 3 * sinf((float)n);
    }
    const fattn_strides strides = {S * H * DV, H * DV, DV};
    fattn_merge_args a = {.struct_size = sizeof a, .batch = 1, .heads = H, .seqlen = S};
    a.dim_v = DV, a.o1_stride = a.o2_stride = a.o_stride = strides;
    a.o1 = o[0], a.o2 = o[1], a.lse1 = lse[0], a.lse2 = lse[1], a.o = expected;
    a.lse = expected_lse;
    const fattn_status reference = fattn_merge(cpu, &a, NULL);

    a.o1 = upload(o[0], sizeof o[0]), a.o2 = upload(o[1], sizeof o[1]);
    a.lse1 = upload(lse[0], sizeof lse[0]), a.lse2 = upload(lse[1], sizeof lse[1]);
    a.o = upload(o[2], sizeof o[2]), a.lse = upload(lse[2], sizeof lse[2]);
    const fattn_status status = fattn_merge(hip, &a, NULL);
    download(o[2], a.o, sizeof o[2]), download(lse[2], a.lse, sizeof lse[2]);
    download(o[0], (void *)a.o1, sizeof o[0]), download(o[1], (void *)a.o2, sizeof o[1]);
    download(lse[0], (void *)a.lse1, sizeof lse[0]),
        download(lse[1], (void *)a.lse2, sizeof lse[1]);
    double error = 0;
    for (int n = 0; n < ROWS * DV; n++) {
        error = worst_of(error, fabsf(o[2][n] - expected[n]));
    }
    for (int n = 0; n < ROWS; n++) {
        error = worst_of(error, fabsf(lse[2][n] - expected_lse[n]));
    }
    tap_check(!reference && !status && error <= 1e-6, "merging is the CPU's to %g", error);
}

/* A dbias that is summed over batch and heads, or over rows, in memory that loses atomic additions
 * of floats. */
static void check_fine_grained(int axis, bool accumulate)
{
    enum { B = 2, H = 2, S = 32, D = 64, ELEMENTS = B * H * S * D, ENTRIES = B * H * S * S };
    static uint16_t tensor[ELEMENTS]; /* q k v o dout */
    static float bias[ENTRIES], lse[B * H * S], entries[2][ENTRIES];
    static uint16_t outputs[3][ELEMENTS];
    int (*alloc)(void **pointer, size_t bytes, unsigned flags) = NULL;
    void *const library = dlopen("libamdhip64.so.7", RTLD_NOW), *fine = NULL;
    void *const symbol = library ? dlsym(library, "hipExtMallocWithFlags") : NULL;
    fattn_problem p;
    fattn_buffers host, b;
    memcpy(&alloc, &symbol, sizeof alloc);
    fattn_problem_init(&p);
    fattn_buffers_init(&host);
    p.op = FATTN_BACKWARD, p.dtype = p.dtype_o = FATTN_BF16, p.dtype_bias = FATTN_F32;
    p.features = FATTN_BIAS | (accumulate ? FATTN_ACCUMULATE : 0);
    p.outputs = FATTN_OUT_DBIAS;
    p.batch = B, p.heads_q = p.heads_k = H, p.seqlen_q = p.seqlen_k = S, p.dim = p.dim_v = D;
    const int64_t stride[] = {H * S * S, S * S, S, 1}; /* of pairs */
    memcpy(p.bias_stride, stride, sizeof stride);
    memcpy(p.dbias_stride, stride, sizeof stride);
    p.dbias_stride[axis] = 0;
    for (int n = 0; n < ELEMENTS; n++) {
        tensor[n] = (uint16_t)(0x3e00 + n * 37 % 256 + (n % 3 ? 0x8000 : 0)); /* 0.1 .. 0.5 */
    }
    for (int n = 0; n < ENTRIES; n++) {
        bias[n] = (float)(n % 7) / 8;
        entries[0][n] = entries[1][n] = accumulate ? (float)(n % 5) : -1;
    }
    for (int n = 0; n < B * H * S; n++) {
        lse[n] = logf(S) + 0.4f;
    }
    host.q = host.k = host.v = host.dout = host.o = tensor, host.lse = lse, host.bias = bias;
    host.dq = outputs[0], host.dk = outputs[1], host.dv = outputs[2], host.dbias = entries[0];
    const fattn_status reference = fattn_attention(cpu, &p, &host, NULL);
    b = host;
    b.q = b.k = b.v = b.dout = b.o = upload(tensor, sizeof tensor);
    b.lse = upload(lse, sizeof lse), b.bias = upload(bias, sizeof bias);
    const bool made = alloc && alloc(&fine, sizeof entries[1], 1) == 0 &&
                      !fattn_device_copy(hip, fine, entries[1], sizeof entries[1], NULL);
    b.dbias = fine;
    const fattn_status status = fattn_attention(hip, &p, &b, NULL);
    download(entries[1], fine, sizeof entries[1]);
    (void)fattn_device_free(hip, (void *)b.q);
    (void)fattn_device_free(hip, b.lse), (void)fattn_device_free(hip, (void *)b.bias);
    const int64_t extents[] = {B, H, S, S};
    double error = 0;
    float most = 0;
    for (int n = 0; n < ENTRIES; n++) {
        error = worst_of(error, fabsf(entries[1][n] - entries[0][n]));
        if (n / stride[axis] % extents[axis] == 0) { /* an entry of dbias */
            most = fmaxf(most, fabsf(entries[0][n] - (accumulate ? (float)(n % 5) : 0)));
        }
    }
    tap_check(made && !reference && !status && most > 1e-3f && error <= 0.01 * (double)most,
              "dbias in fine-grained memory, summed over axis %d%s: off by %g of %g: %s", axis,
              accumulate ? " and added" : "", error, (double)most, fattn_last_reason());
    fattn_cache_clear();
    dlclose(library);
}

/* What the runtime answers to questions of ours is no error of the caller's. */
static void check_last_error(void)
{
    enum { ELEMENTS = 16 * 16 };
    static float host[4][ELEMENTS];
    int (*last_error)(void) = NULL;
    void *const library = dlopen("libamdhip64.so.7", RTLD_NOW);
    void *const symbol = library ? dlsym(library, "hipGetLastError") : NULL;
    fattn_problem p;
    fattn_buffers b;
    memcpy(&last_error, &symbol, sizeof last_error);
    fattn_problem_init(&p);
    fattn_buffers_init(&b);
    p.seqlen_q = p.seqlen_k = p.dim = p.dim_v = 16;
    b.q = host[0], b.k = host[1], b.v = host[2], b.o = host[3];
    tap_check(last_error != NULL, "the runtime has a last error");
    if (!last_error) {
        return;
    }
    int last = last_error(); /* a device without code has been opened */
    tap_check(last == 0, "none is left after what came before, but %d", last);
    const fattn_status status = fattn_attention(hip, &p, &b, NULL);
    last = last_error();
    tap_check(status == FATTN_OK && last == 0, "nor by a call on host memory, but %d: %s", last,
              fattn_last_reason());
    fattn_cache_clear();
    dlclose(library);
}

/* Rows of matrix units and the processors that they are for. */
static void check_processors(void)
{
    static const struct {
        int isa, forward, backward; /* rows that run there */
    } expected[] = {{0x906, 0, 0}, {0x90a, 6, 6},  {0x90c, 0, 0},  {0x940, 0, 0},  {0x942, 6, 6},
                    {0x950, 6, 6}, {0x1030, 0, 0}, {0x1100, 6, 4}, {0x1201, 6, 4}, {0x1250, 0, 0}};
    for (size_t n = 0; n < sizeof expected / sizeof *expected; n++) {
        const fattn_gpu_kernel *const tables[] = {fattn_hip_matrix, fattn_hip_matrix_backward};
        int rows[2] = {0, 0};
        for (int t = 0; t < 2; t++) {
            for (const fattn_gpu_kernel *kernel = tables[t]; kernel->row.name; kernel++) {
                rows[t] += fattn_gpu_kernel_runs(kernel, expected[n].isa);
            }
        }
        tap_check(rows[0] == expected[n].forward && rows[1] == expected[n].backward,
                  "gfx%x has %d and %d rows of matrix units", expected[n].isa, rows[0], rows[1]);
    }
}

/* Counts that pass 63 bits, of a ragged batch whose sequences are empty but for a few. */
static void check_counts(void)
{
    fattn_problem p;
    fattn_plan *plan = NULL;
    fattn_problem_init(&p);
    p.op = FATTN_BACKWARD, p.dtype = FATTN_BF16;
    p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.batch = INT64_C(1) << 29, p.heads_q = p.heads_k = 128;
    p.seqlen_q = p.total_q = p.total_k = INT32_MAX;
    p.seqlen_k = 1, p.dim = p.dim_v = 64;
    tap_check(fails(fattn_plan_create(hip, &p, &plan), FATTN_OVERFLOW, "overflows"),
              "rows that cannot be counted: %s", fattn_last_reason());
    fattn_plan_destroy(plan);
}

/* Reads of unallocated memory and of undefined values. */
static void check_faults(void)
{
    enum { ELEMENTS = 64 * 64 };
    static float host[ELEMENTS];
    fattn_problem p;
    fattn_buffers b;
    fattn_problem_init(&p);
    fattn_buffers_init(&b);
    p.batch = p.heads_q = p.heads_k = 1, p.seqlen_q = p.seqlen_k = p.dim = p.dim_v = 64;
    fattn_plan *plan = NULL;
    void *memory = upload(host, sizeof host), *raw = NULL;
    fattn_status status = fattn_plan_create(hip, &p, &plan);
    tap_check(status == FATTN_OK, "a plan");
    b.q = b.k = memory, b.v = host, b.o = upload(host, sizeof host);
    tap_check(
        fails(fattn_execute(plan, &b, NULL, NULL), FATTN_DEVICE_ERROR, "hipErrorLaunchFailure"),
        "values in host memory: %s", fattn_last_reason());
    status = fattn_device_malloc(hip, sizeof host, &raw);
    b.v = raw;
    tap_check(!status && fails(fattn_execute(plan, &b, NULL, NULL), FATTN_DEVICE_ERROR,
                               "hipErrorLaunchFailure"),
              "undefined values: %s", fattn_last_reason());
    b.v = memory;
    tap_check(fattn_execute(plan, &b, NULL, NULL) == FATTN_OK, "and the next launch is well");
    fattn_plan_destroy(plan);
    (void)fattn_device_free(hip, b.o), (void)fattn_device_free(hip, raw);
    tap_check(fattn_device_free(hip, memory) == FATTN_OK, "all is given back");
}

int main(void)
{
    const char *const set = getenv("STUB_HIP_ARCH");
    char arch[16] = "";
    strncpy(arch, set ? set : "gfx942", sizeof arch - 1);
    const fattn_status status = fattn_device_open("hip", &hip);
    if (status == FATTN_NO_DEVICE && strstr(fattn_last_reason(), "hipErrorNotInitialized")) {
        tap_skip_all("this processor cannot run the emulator");
        return 0;
    }
    tap_check(status == FATTN_OK && fattn_device_open("cpu", &cpu) == FATTN_OK, "devices: %s",
              fattn_last_reason());
    if (hip && cpu) {
        check_device(arch);
        check_memory();
        check_dropout();
        check_merge();
        for (int axis = 0; axis < 4; axis++) {
            check_fine_grained(axis, axis % 2);
        }
        check_processors();
        check_last_error();
        check_counts();
        check_faults();
    }
    fattn_device_close(hip);
    fattn_device_close(cpu);
    return tap_done();
}
