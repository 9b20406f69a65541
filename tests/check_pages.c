/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages of memory on a CPU: those of outputs that a program has just allocated are made once
 * (backends/cpu/pages.h), those that no row needs are not made, and large blocks of the library ask
 * for huge ones. Also how much memory gradients are summed in.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, mincore */

#include <fattn/fattn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/tap.h"

enum { BATCH = 2, ROWS = 512, HEADS = 16, DIM = 64, INPUTS = 4, GRADIENTS = 3 };

#define ROW_BYTES ((int64_t)HEADS * DIM * 4)
#define BYTES (BATCH * ROWS * ROW_BYTES)

static fattn_device *device;
static fattn_buffers buffers;

static void must(fattn_status status)
{
    if (status) {
        tap_bail(fattn_last_reason());
    }
}

/* Memory without pages. */
static void *fresh(int64_t bytes)
{
    void *const memory =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        tap_bail("no memory");
    }
    return memory;
}

static void *inputs(void)
{
    float *const x = fresh(BYTES);
    for (int64_t i = 0; i < BYTES / 4; i++) {
        x[i] = (float)((i * 2654435761) % 1000) / 1000 - 0.5f;
    }
    return x;
}

static fattn_problem problem(fattn_op op)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.dtype = FATTN_F32;
    p.features = FATTN_CAUSAL;
    p.batch = BATCH;
    p.heads_q = p.heads_k = HEADS;
    p.seqlen_q = p.seqlen_k = ROWS;
    p.dim = p.dim_v = DIM;
    return p;
}

static int64_t faults(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

/* Runs a plan twice: into memory that has pages, and then into memory that has none. Returns the
 * number of page faults of the second run. */
static int64_t run(const fattn_problem *p, int64_t bytes, void *workspace)
{
    fattn_plan *plan;
    int64_t before = 0;
    must(fattn_plan_create(device, p, &plan));
    for (int n = 0; n < 2; n++) {
        buffers.o = p->op == FATTN_FORWARD ? fresh(bytes) : buffers.o;
        buffers.dq = fresh(bytes);
        buffers.dk = fresh(bytes);
        buffers.dv = fresh(bytes);
        before = faults();
        must(fattn_execute(plan, &buffers, workspace, NULL));
    }
    fattn_plan_destroy(plan);
    return faults() - before;
}

/* How many pages of a range exist. */
static int64_t present(const void *first, int64_t bytes)
{
    static unsigned char exists[BYTES / 1024];
    const int64_t page = sysconf(_SC_PAGESIZE);
    int64_t count = 0;
    if (mincore((void *)(uintptr_t)first, (size_t)bytes, exists)) {
        tap_bail("mincore");
    }
    for (int64_t n = 0; n < bytes / page; n++) {
        count += exists[n] & 1;
    }
    return count;
}

/* Linux 5.14 and newer, but not all of its emulators. A sanitizer's memory has faults, too. */
static bool makes_pages(void)
{
#if defined(MADV_POPULATE_WRITE) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    return madvise(fresh(1), 1, MADV_POPULATE_WRITE) == 0;
#else
    return false;
#endif
}

static void check_faults(fattn_op op, void *workspace)
{
    const fattn_problem p = problem(op);
    const int64_t outputs = op == FATTN_FORWARD ? 1 : GRADIENTS;
    const int64_t pages = outputs * BYTES / sysconf(_SC_PAGESIZE);
    const int64_t made = run(&p, BYTES, workspace);
    tap_check(made <= pages + pages / 32, "%s of %lld new pages: %lld page faults",
              op == FATTN_FORWARD ? "o" : "gradients", (long long)pages, (long long)made);
}

/* The second half of a packed batch's rows belongs to no sequence. */
static void check_packed(void *workspace)
{
    const int32_t cu[] = {0, ROWS / 2, ROWS};
    fattn_problem p = problem(FATTN_BACKWARD);
    p.features |= FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.total_q = p.total_k = BATCH * ROWS;
    buffers.cu_seqlens_q = buffers.cu_seqlens_k = cu;
    run(&p, BYTES, workspace);
    buffers.cu_seqlens_q = buffers.cu_seqlens_k = NULL;
    const int64_t found = present((char *)buffers.dq + BYTES / 2, BYTES / 2);
    tap_check(found == 0, "rows of no sequence: %lld pages made", (long long)found);
}

/* Between two sequences of gradients is memory that is not the library's to use. */
static void check_gap(void *workspace)
{
    const fattn_strides strides = {
        .batch = BATCH * ROWS * HEADS * DIM, .seq = HEADS * DIM, .head = DIM};
    fattn_problem p = problem(FATTN_BACKWARD);
    p.layout = FATTN_STRIDED;
    p.q = p.k = p.v = p.o = p.dout = strides;
    p.q.batch = p.k.batch = p.v.batch = p.o.batch = p.dout.batch = ROWS * HEADS * DIM;
    p.dq = p.dk = p.dv = strides;
    run(&p, 2 * BYTES, workspace);
    const int64_t found = present((char *)buffers.dk + BYTES / 2, BYTES / 2);
    tap_check(found == 0, "between two sequences: %lld pages made", (long long)found);
}

/* Whether the mapping that holds an address asks for huge pages. */
static bool wants_huge_pages(const void *address)
{
    FILE *const maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool here = false, wants = false;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long first, past;
        if (sscanf(line, "%lx-%lx ", &first, &past) == 2) {
            here = (unsigned long)(uintptr_t)address >= first &&
                   (unsigned long)(uintptr_t)address < past;
        }
        wants = wants || (here && strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " hg"));
    }
    if (maps) {
        fclose(maps);
    }
    return wants;
}

static void check_huge_pages(void)
{
    const int64_t sizes[] = {1 << 20, 64 << 20};
    for (int n = 0; n < 2; n++) {
        void *block;
        must(fattn_device_malloc(device, (size_t)sizes[n], &block));
        const bool wants = wants_huge_pages((char *)block + sizes[n] / 2);
        tap_check(wants == (n == 1), "%lld bytes of the device's memory %s for huge pages",
                  (long long)sizes[n], wants ? "ask" : "do not ask");
        must(fattn_device_free(device, block));
    }
}

static int64_t workspace_of(int64_t rows)
{
    fattn_problem p = problem(FATTN_BACKWARD);
    fattn_plan *plan;
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    p.batch = 1;
    p.seqlen_q = p.seqlen_k = rows;
    must(fattn_plan_create(device, &p, &plan));
    must(fattn_plan_get_info(plan, &info));
    fattn_plan_destroy(plan);
    return info.workspace_bytes;
}

/* Rows of dk and dv that are 4 KiB apart are summed in the workspace, if that takes at most 64 MiB
 * (backends/cpu/gradients.h). */
static void check_sums(void)
{
    const int64_t some = workspace_of(4096), many = workspace_of(65536),
                  sums = 2 * 4096 * ROW_BYTES;
    tap_check(some > sums, "a workspace of %lld bytes has the sums of 4096 keys", (long long)some);
    tap_check(many < 64 << 20, "for 65536 keys it has %lld bytes", (long long)many);
}

int main(void)
{
    fattn_device_options options;
    fattn_device_options_init(&options);
    options.threads = 4;
    must(fattn_device_open_with("cpu", &options, &device));
    fattn_buffers_init(&buffers);
    void *const x[INPUTS] = {inputs(), inputs(), inputs(), inputs()};
    buffers.q = x[0], buffers.k = x[1], buffers.v = x[2], buffers.dout = x[3];
    buffers.o = fresh(BYTES), buffers.lse = fresh(BYTES);
    void *workspace;
    must(fattn_device_malloc(device, 32 << 20, &workspace));
    memset(workspace, 0, 32 << 20);
    if (makes_pages()) {
        check_faults(FATTN_FORWARD, workspace);
        check_faults(FATTN_BACKWARD, workspace);
    } else {
        tap_skip("pages that are made once",
                 "this system does not make pages ahead, or has a sanitizer");
    }
    check_packed(workspace);
    check_gap(workspace);
    check_sums();
    if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) == 0) {
        check_huge_pages();
    } else {
        tap_skip("huge pages", "this system has none");
    }
    must(fattn_device_free(device, workspace));
    fattn_device_close(device);
    return tap_done();
}
