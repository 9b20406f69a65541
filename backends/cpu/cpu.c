/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "cpu": the table of instruction sets, the choice among them, and the only threads of the
 * library. Results do not depend on the number of threads: they take items from a counter, and what
 * an item computes depends on its number alone.
 */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "backends/cpu/cpu.h"
#include "backends/cpu/cpuid.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/host.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/schedule.h"
#include "core/status.h"

/* --- Instruction sets ------------------------------------------------------------------------- */

#define FATTN_CPU_ISA(name) extern const fattn_cpu_isa fattn_cpu_##name;
#include "backends/cpu/isas.inc"
#undef FATTN_CPU_ISA

/* Best first on most processors. */
#define FATTN_CPU_ISA(name) {&fattn_cpu_##name, fattn_cpuid_##name},
static const struct {
    const fattn_cpu_isa *isa;
    const char *(*lacks)(void);
} isas[] = {
#include "backends/cpu/isas.inc"
};
#undef FATTN_CPU_ISA
#define ISA_COUNT ((int)(sizeof isas / sizeof isas[0]))

/* An open device. */
typedef struct cpu {
    const fattn_cpu_isa *isa;     /* the best that may be used */
    int order[ISA_COUNT];         /* of isas[], best first on this one */
    const char *lacks[ISA_COUNT]; /* why one may not: what follows "needs"; NULL when it may */
    int64_t fast_memory;          /* bytes; asked once, because the answer lies in a file */
    int64_t cores;                /* of the machine */
} cpu;

/* "avx2, scalar": what this machine runs. */
static const char *list_isas(char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ISA_COUNT && used < size; i++) {
        if (!isas[i].lacks()) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "",
                                     isas[i].isa->name);
        }
    }
    return text;
}

/* Slow products of pairs come after those of floats: the two neighbours change places. */
static void order_isas(cpu *device)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        device->order[i] = i;
    }
    for (int i = 0; i + 1 < ISA_COUNT && fattn_cpuid_pairs_are_slow(); i++) {
        if (strcmp(isas[i].isa->name, "avx512bf16") == 0) {
            device->order[i] = i + 1;
            device->order[i + 1] = i;
        }
    }
}

/* FATTN_CPU_ISA is an exact choice: the named instruction set and no other. */
static fattn_status choose_isa(cpu *device, const char *wanted)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        const bool other = wanted && strcmp(wanted, isas[i].isa->name) != 0;
        device->lacks[i] = other ? "FATTN_CPU_ISA to allow it" : isas[i].lacks();
    }
    order_isas(device);
    for (int n = 0; n < ISA_COUNT && !device->isa; n++) {
        const int i = device->order[n];
        device->isa = device->lacks[i] ? NULL : isas[i].isa;
    }
    if (!device->isa) {
        char names[128];
        return fattn_fail(FATTN_BAD_ENVIRONMENT,
                          "FATTN_CPU_ISA is \"%.64s\": this build and machine have %s", wanted,
                          list_isas(names, sizeof names));
    }
    return FATTN_OK;
}

/* --- Threads ---------------------------------------------------------------------------------- */

#define THREADS_MAX 4096

static int threads_wanted(void)
{
    const fattn_env *env = NULL;
    (void)fattn_env_get(&env); /* a bad environment was reported when the plan was made */
    int64_t wanted = env->threads;
#ifdef _OPENMP
    if (!wanted) {
        wanted = omp_get_max_threads();
    }
    return wanted < THREADS_MAX ? (int)wanted : THREADS_MAX;
#else
    (void)wanted;
    return 1;
#endif
}

/* Items, and what takes them until there are none. */
typedef struct step {
    void (*work)(fattn_cpu_items *items, const void *job, void *scratch);
    const void *job;
    fattn_cpu_items items;
} step;

bool fattn_cpu_take(fattn_cpu_items *items, int64_t *item)
{
    *item = atomic_fetch_add_explicit(&items->next, 1, memory_order_relaxed);
    return *item < items->count;
}

int64_t fattn_cpu_upcoming(const fattn_cpu_items *items)
{
    return atomic_load_explicit(&items->next, memory_order_relaxed);
}

/* Works at a step until it has no items left, then, together with its team, if it has one, at the
 * next. Kernels count on rounding to nearest and on subnormal numbers, whatever the caller has set;
 * the caller finds everything as it was. */
static void work_off(step *steps, int count, bool team, void *scratch)
{
    fattn_cpu_arithmetic callers;
    fattn_cpuid_arithmetic_begin(&callers);
    for (int n = 0; n < count; n++) {
        if (team && n > 0) {
#ifdef _OPENMP
#pragma omp barrier
#endif
        }
        steps[n].work(&steps[n].items, steps[n].job, scratch);
    }
    fattn_cpuid_arithmetic_end(&callers);
}

/* Runs steps one after another. Thread t has `size` bytes from scratch + t * size on. */
static void spread(step *steps, int count, int threads, char *scratch, int64_t size)
{
    int64_t most = 0;
    for (int n = 0; n < count; n++) {
        most = steps[n].items.count > most ? steps[n].items.count : most;
        atomic_init(&steps[n].items.next, 0);
    }
#ifdef _OPENMP
    const int team = most < threads ? (int)most : threads;
    if (team > 1) {
#pragma omp parallel num_threads(team)
        work_off(steps, count, true, scratch + omp_get_thread_num() * size);
        return;
    }
#else
    (void)threads, (void)size;
#endif
    if (most > 0) {
        work_off(steps, count, false, scratch);
    }
}

void fattn_cpu_publish(fattn_cpu_progress *progress, int64_t done)
{
    __atomic_store_n(&progress->done, done, __ATOMIC_RELEASE);
}

/* Whoever is waited for is at work, so a short while is spent looking; but it may have lost its
 * core. */
void fattn_cpu_wait(const fattn_cpu_progress *progress, int64_t done)
{
    for (int looks = 0; __atomic_load_n(&progress->done, __ATOMIC_ACQUIRE) < done; looks++) {
        if (looks > 256) {
            sched_yield();
        }
    }
}

/* --- Runs ------------------------------------------------------------------------------------- */

int64_t fattn_cpu_bytes(int64_t a, int64_t b, int64_t c)
{
    const int64_t limit = INT64_C(1) << 62;
    int64_t bytes;
    if (a < 0 || b < 0 || c < 0 || __builtin_mul_overflow(a, b, &bytes) ||
        __builtin_mul_overflow(bytes, c, &bytes) || bytes > limit - 256) {
        return -1;
    }
    return (bytes + 255) / 256 * 256;
}

int64_t fattn_cpu_workspace(int64_t shared, int64_t scratch, int64_t items)
{
    const int64_t threads = threads_wanted();
    const int64_t workers = items < 1 ? 1 : items < threads ? items : threads;
    const int64_t own = fattn_cpu_bytes(workers, scratch, 1);
    return shared < 0 || own < 0 ? -1 : shared + own;
}

/* How a plan's workspace is laid out. */
typedef struct layout {
    int64_t shared, scratch; /* bytes of all workers together, and of each */
    int64_t room;            /* workers that there is scratch for */
} layout;

typedef struct job {
    fattn_cpu_run run;
    const fattn_cpu_phase *phase;
} job;

static void work_phase(fattn_cpu_items *items, const void *of, void *scratch)
{
    const job *const j = of;
    (void)items; /* run knows them */
    j->phase->work(&j->run, scratch);
}

/* The plan's tiling without the parts that no sequence of the run has: lengths may be far below
 * those that were planned for. */
static fattn_tiling tiling_of_run(const fattn_plan *plan, const fattn_buffers *buffers)
{
    fattn_tiling tiling = plan->tiling;
    if (tiling.splits > 1) {
        const int64_t keys = fattn_longest_keys(&plan->problem, buffers);
        const int64_t most = fattn_schedule_most(&tiling, (keys + tiling.bc - 1) / tiling.bc);
        tiling.items = tiling.items / tiling.splits * most;
        tiling.splits = most;
    }
    return tiling;
}

static fattn_status run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream)
{
    const fattn_cpu_kernel *const kernel = (const fattn_cpu_kernel *)plan->kernel;
    const layout *const l = plan->impl;
    const int wanted = threads_wanted();
    const int threads = wanted < l->room ? wanted : (int)l->room; /* fewer than at planning? */
    const fattn_status status = fattn_host_stream_check(stream);
    if (status) {
        return status;
    }
    const fattn_tiling tiling = tiling_of_run(plan, buffers);
    job jobs[FATTN_CPU_PHASES];
    step steps[FATTN_CPU_PHASES];
    int count = 0;
    for (int i = 0; i < FATTN_CPU_PHASES && kernel->phases[i].work; i++) {
        job *const j = &jobs[count];
        step *const s = &steps[count];
        *j = (job){.run = {.problem = &plan->problem,
                           .buffers = buffers,
                           .tiling = &tiling,
                           .threads = threads,
                           .shared = workspace,
                           .items = &s->items},
                   .phase = &kernel->phases[i]};
        *s = (step){.work = work_phase, .job = j, .items.count = j->phase->count(&j->run)};
        count += s->items.count > 0; /* a step costs a barrier */
    }
    spread(steps, count, threads, (char *)workspace + l->shared, l->scratch);
    return FATTN_OK;
}

static fattn_status plan(fattn_plan *made)
{
    const fattn_cpu_kernel *const kernel = (const fattn_cpu_kernel *)made->kernel;
    layout *const l = fattn_memory_alloc(sizeof *l);
    if (!l) {
        return fattn_fail_memory(sizeof *l, "a plan's layout");
    }
    l->shared = kernel->shared(&made->problem, &made->tiling);
    l->scratch = kernel->scratch(&made->problem, &made->tiling);
    l->room = (made->tiling.workspace - l->shared) / l->scratch;
    made->impl = l;
    return FATTN_OK;
}

static void release(fattn_plan *made) { fattn_memory_free(made->impl); }

/* --- Merge, dropout, peaks -------------------------------------------------------------------- */

/* Items of FATTN_CPU_VERB_ROWS rows of one head. The doors keep batch * heads * rows below 2^62. */
static int64_t verb_items(int64_t batch, int64_t heads, int64_t rows)
{
    return batch * heads * ((rows + FATTN_CPU_VERB_ROWS - 1) / FATTN_CPU_VERB_ROWS);
}

static void work_merge(fattn_cpu_items *items, const void *args, void *scratch)
{
    (void)scratch;
    for (int64_t item; fattn_cpu_take(items, &item);) {
        fattn_cpu_merge_rows(args, item);
    }
}

static fattn_status merge(void *impl, const fattn_merge_args *args, fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    if (!status) {
        step all = {.work = work_merge,
                    .job = args,
                    .items.count = verb_items(args->batch, args->heads, args->seqlen)};
        spread(&all, 1, threads_wanted(), NULL, 0);
    }
    return status;
}

static void work_dropout(fattn_cpu_items *items, const void *args, void *scratch)
{
    (void)scratch;
    for (int64_t item; fattn_cpu_take(items, &item);) {
        fattn_cpu_dropout_rows(args, item);
    }
}

static fattn_status dropout_mask(void *impl, const fattn_dropout_args *args, fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    if (!status) {
        step all = {.work = work_dropout,
                    .job = args,
                    .items.count = verb_items(args->batch, args->heads, args->seqlen_q)};
        spread(&all, 1, threads_wanted(), NULL, 0);
    }
    return status;
}

static const fattn_peak *peak(void *impl, int i)
{
    const fattn_cpu_peak *const peaks = ((const cpu *)impl)->isa->peaks;
    for (int n = 0; n < i && peaks->row.name; n++) {
        if (!peaks[n].row.name) {
            return NULL;
        }
    }
    return i >= 0 && peaks[i].row.name ? &peaks[i].row : NULL;
}

/* Each worker's rate, added up. */
static void measure_compute(const cpu *device, const fattn_cpu_peak *peak,
                            fattn_peak_reading *reading)
{
    const fattn_cpu_peak *gauge = device->isa->peaks;
    int workers = 1;
    while (gauge->row.name && !gauge->fed) {
        gauge++;
    }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads_wanted())
#endif
    {
        fattn_peak_reading own = {0};
        fattn_cpu_peak_compute(peak, gauge->fed ? gauge : NULL, &own);
        /* Neither a critical section nor a reduction: the lock of the one, and of the other where
         * clang compiles it, would be a symbol that the library exports. */
#ifdef _OPENMP
#pragma omp atomic
#endif
        reading->rate += own.rate;
#ifdef _OPENMP
#pragma omp atomic
#endif
        reading->clock += own.clock;
#ifdef _OPENMP
#pragma omp atomic
#endif
        reading->issue += own.issue;
#ifdef _OPENMP
#pragma omp atomic
#endif
        reading->fed += own.fed;
#ifdef _OPENMP
#pragma omp single nowait
        workers = omp_get_num_threads();
#endif
    }
    reading->clock /= workers;
    reading->issue /= workers;
    reading->fed /= workers;
}

/* Moves an edge of the time that all workers took together. */
static void stretch(_Atomic double *edge, double to, bool later)
{
    double at = atomic_load(edge);
    while ((later ? to > at : to < at) && !atomic_compare_exchange_weak(edge, &at, to)) {}
}

/* All bytes in the time from the first worker's beginning to the last one's end. Rates added up
 * would promise more than the memory has: who ends early has read while others waited for it, and
 * leaves them the rest. */
static void measure_read(const fattn_cpu_peak *peak, const void *data, int64_t bytes,
                         fattn_peak_reading *reading)
{
    _Atomic double begun = INFINITY, ended = 0;
    double total = 0;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads_wanted())
#endif
    {
        int worker = 0, team = 1;
#ifdef _OPENMP
        worker = omp_get_thread_num();
        team = omp_get_num_threads();
#endif
        (void)fattn_cpu_peak_read(peak, worker, team, data, bytes, true);
#ifdef _OPENMP
#pragma omp barrier
#endif
        const fattn_cpu_passes own = fattn_cpu_peak_read(peak, worker, team, data, bytes, false);
        stretch(&begun, own.begun, false);
        stretch(&ended, own.ended, true);
#ifdef _OPENMP
#pragma omp atomic
#endif
        total += own.bytes;
    }
    reading->rate = total > 0 ? total / (ended - begun) : 0;
}

fattn_status fattn_cpu_peak_measure(void *impl, const fattn_peak *row, const void *data,
                                    int64_t bytes, fattn_peak_reading *reading)
{
    const fattn_cpu_peak *const peak = (const fattn_cpu_peak *)row;
    *reading = (fattn_peak_reading){0};
    if (row->reads_memory) {
        measure_read(peak, data, bytes, reading);
    } else {
        measure_compute(impl, peak, reading);
    }
    return FATTN_OK;
}

/* --- The device ------------------------------------------------------------------------------- */

static int count(void) { return 1; }

/* What a worker plans with: its core's second-level cache, all of it, because what keys and values
 * drive out comes back once a tile of them, and that costs less than smaller blocks; but no more
 * than a thread is to take. */
static int64_t fast_memory(void)
{
    const int64_t second = fattn_cpuid_cache(2), most = 1 << 20;
    return second == 0 ? most / 4 : second < most ? second : most;
}

static fattn_status open(int ordinal, void **impl)
{
    (void)ordinal;
    const fattn_env *env = NULL;
    fattn_status status = fattn_env_get(&env);
    if (status) {
        return status;
    }
    cpu *const device = fattn_memory_alloc(sizeof *device);
    if (!device) {
        return fattn_fail_memory(sizeof *device, "a CPU device");
    }
    device->isa = NULL;
    status = choose_isa(device, env->cpu_isa);
    if (status) {
        fattn_memory_free(device);
        return status;
    }
    device->fast_memory = fast_memory();
    device->cores = fattn_cpuid_cores();
    *impl = device;
    return FATTN_OK;
}

static void close(void *impl) { fattn_memory_free(impl); }

static void describe(void *impl, fattn_device_info *info)
{
    const cpu *const device = impl;
    fattn_cpuid_name(info->name, sizeof info->name);
    snprintf(info->isa, sizeof info->isa, "%s", device->isa->name);
    info->units = threads_wanted();
    info->host_memory = 1;
    info->fast_memory = device->fast_memory;
    info->total_memory = fattn_cpuid_memory();
}

/* Parts and blocks for the cores that the machine has, not for the workers there happen to be:
 * results may not depend on those. Parts cost a trip of their sums through memory. */
static void limits(void *impl, fattn_limits *limits)
{
    const cpu *const device = impl;
    *limits = (fattn_limits){.fast_memory = device->fast_memory,
                             .parallelism = 2 * device->cores,
                             .split_keys = 512,
                             .units = device->cores};
}

static const fattn_kernel *kernel(void *impl, int i, const char **missing)
{
    const cpu *const device = impl;
    for (int n = 0; n < ISA_COUNT; n++) {
        const int which = device->order[n];
        const fattn_cpu_isa *const isa = isas[which].isa;
        if (i >= 0 && i < isa->kernel_count) {
            *missing = device->lacks[which];
            return &isa->kernels[i].row;
        }
        i -= isa->kernel_count;
    }
    return NULL;
}

const fattn_backend fattn_backend_cpu = {
    .name = "cpu",
    .host_memory = true,
    .count = count,
    .open = open,
    .close = close,
    .describe = describe,
    .limits = limits,
    .kernel = kernel,
    .peak = peak,
    .plan = plan,
    .run = run,
    .release = release,
    .merge = merge,
    .dropout_mask = dropout_mask,
    .reads = fattn_host_reads,
    .alloc = fattn_host_alloc,
    .free = fattn_host_free,
    .copy = fattn_host_copy,
    .stream_create = fattn_host_stream_create,
    .stream_destroy = fattn_host_stream_destroy,
    .stream_synchronize = fattn_host_stream_synchronize,
    .event_create = fattn_host_event_create,
    .event_destroy = fattn_host_event_destroy,
    .event_record = fattn_host_event_record,
    .event_elapsed = fattn_host_event_elapsed,
};
