/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "cpu": the table of instruction sets, the choice among them, and how runs are divided
 * among threads. Results do not depend on the number of threads: threads take items from counters,
 * and what an item computes depends on its number alone.
 */
#include <assert.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/cpuid.h"
#include "backends/cpu/pages.h"
#include "backends/cpu/team.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/host.h"
#include "core/integer.h"
#include "core/io_model.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/schedule.h"
#include "core/status.h"

/* --- Instruction sets ------------------------------------------------------------------------- */

#define FATTN_CPU_ISA(name) extern const fattn_cpu_isa fattn_cpu_##name;
#include "backends/cpu/isas.inc"
#undef FATTN_CPU_ISA

/* Best first on most processors; order_isas() has the exception. */
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
    const fattn_cpu_isa *isa; /* the best that may be used */
    int order[ISA_COUNT];     /* indices into isas[], best first on this machine */
    /* For each of isas[], what it needs and this machine lacks, as a text to follow "needs"; NULL:
     * it may be used. */
    const char *lacks[ISA_COUNT];
    int64_t fast_memory; /* bytes; read once, since it comes from a file */
    int64_t cores;       /* granted to the process */
    fattn_cpu_team team;
} cpu;

/* The sets that this machine runs, as text: "avx2, scalar". */
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

/* The instruction set whose kernels take what those of `isa` decline, or NULL. */
static const fattn_cpu_isa *base_of(const fattn_cpu_isa *isa)
{
    for (int i = 0; i < ISA_COUNT && isa->base; i++) {
        if (strcmp(isas[i].isa->name, isa->base) == 0) {
            return isas[i].isa;
        }
    }
    return NULL;
}

/* Where vector products of bf16 pairs are slow, avx512bf16 comes after avx512, its base, unless the
 * user asked for it. */
static void order_isas(cpu *device, bool asked)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        device->order[i] = i;
    }
    for (int i = 0; i < ISA_COUNT && !asked && fattn_cpuid_pairs_are_slow(); i++) {
        bool moves = strcmp(isas[i].isa->name, "avx512bf16") == 0;
        for (int n = i; moves && n + 1 < ISA_COUNT; n++) {
            device->order[n] = device->order[n + 1];
            device->order[n + 1] = i;
            moves = isas[device->order[n]].isa != base_of(isas[i].isa);
        }
    }
}

/* Whether `isa` may be used: it is `wanted`, or the base of that, provided that the wanted set runs
 * here. wanted: NULL allows all. */
static bool is_wanted(const fattn_cpu_isa *isa, const char *wanted)
{
    bool found = !wanted || strcmp(wanted, isa->name) == 0;
    for (int i = 0; i < ISA_COUNT && !found; i++) {
        found = strcmp(wanted, isas[i].isa->name) == 0 && base_of(isas[i].isa) == isa &&
                !isas[i].lacks();
    }
    return found;
}

static bool takes_isa(const char *value, char *expected, size_t size)
{
    char names[96];
    snprintf(expected, size, "an instruction set of this build: this machine has %s",
             list_isas(names, sizeof names));
    bool found = false;
    for (int i = 0; i < ISA_COUNT; i++) {
        found = found || strcmp(value, isas[i].isa->name) == 0;
    }
    return found;
}

static const fattn_env_variable isa_variable = {"FATTN_CPU_ISA", takes_isa};

/* FATTN_CPU_ISA and the device option `isa` choose exactly: the named instruction set with its
 * base, and no other. */
static fattn_status choose_isa(cpu *device, const char *option)
{
    const char *const named = fattn_env_own(&isa_variable), *const wanted = named ? named : option;
    for (int i = 0; i < ISA_COUNT; i++) {
        device->lacks[i] = is_wanted(isas[i].isa, wanted) ? isas[i].lacks()
                           : named                        ? "FATTN_CPU_ISA to allow it"
                                                          : "the device's option isa to allow it";
    }
    order_isas(device, wanted != NULL);
    for (int n = 0; n < ISA_COUNT && !device->isa; n++) {
        const int i = device->order[n];
        device->isa = device->lacks[i] ? NULL : isas[i].isa;
    }
    if (!device->isa) {
        char names[128];
        return fattn_fail(named ? FATTN_BAD_ENVIRONMENT : FATTN_UNSUPPORTED,
                          "%s is \"%.64s\": this build and machine have %s",
                          named ? isa_variable.name : "isa", wanted,
                          list_isas(names, sizeof names));
    }
    return FATTN_OK;
}

/* Row i of the device's peaks: those of its instruction set, then those of its base. NULL past the
 * last. */
static const fattn_cpu_peak *peak_of(const cpu *device, int i)
{
    for (const fattn_cpu_isa *isa = device->isa; i >= 0 && isa; isa = base_of(isa)) {
        const fattn_cpu_peak *peak = isa->peaks;
        for (; peak->row.name && i > 0; peak++) {
            i--;
        }
        if (peak->row.name) {
            return peak;
        }
    }
    return NULL;
}

/* --- Progress --------------------------------------------------------------------------------- */

void fattn_cpu_publish(fattn_cpu_progress *progress, int64_t done)
{
    __atomic_store_n(&progress->done, done, __ATOMIC_RELEASE);
}

/* Spins first, since the worker that is waited for has begun its item; then yields, since its
 * thread may have lost its core. */
void fattn_cpu_wait(const fattn_cpu_progress *progress, int64_t done)
{
    for (int spins = 0; __atomic_load_n(&progress->done, __ATOMIC_ACQUIRE) < done; spins++) {
        if (spins > 256) {
            sched_yield();
        } else {
            fattn_cpu_pause();
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

int64_t fattn_cpu_workspace_of_one(int64_t shared, int64_t scratch)
{
    const int64_t own = fattn_cpu_bytes(1, scratch, 1);
    return shared < 0 || own < 0 ? -1 : shared + own;
}

/* What a run needs besides the plan. The workspace holds few_shared bytes for the second kernel,
 * the shared bytes of the first (`shared` counts both), then `scratch` bytes per worker. */
typedef struct layout {
    int64_t few_shared, shared, scratch;
    bool is_brief;
    fattn_cpu_brief brief;
    fattn_cpu_pages pages;
} layout;

/*
 * How many threads a run gets. One thread needs about the longest of three times: that of the
 * products, at a third of the peak; that of the scores, which become weights in vectors however
 * fast products are; and that of the bytes, read from a second-level cache. Waking a sleeping
 * thread takes 2 microseconds of the caller's time, so small problems stay on one thread. Decoding
 * 128 keys, 4.5 microseconds on one thread, gains a tenth from a second one that is awake; 256 keys
 * gain a quarter. Threads that are awake begin within 2 microseconds of the caller.
 */
#define FLOPS_A_NANOSECOND 2           /* per lane and per operation of a lane */
#define SCORES_A_NANOSECOND (1.0 / 32) /* per lane */
#define BYTES_A_NANOSECOND 40
#define WORTH_SHARING 5e3 /* nanoseconds on one thread from which on a problem is shared */
#define WORTH_JOINING 2e3 /* nanoseconds of work per thread */

static int worker_count(const cpu *device, fattn_dtype dtype, int64_t items, double flops,
                        double scores, double bytes)
{
    int i = 0;
    while (!(peak_of(device, i)->row.dtypes & FATTN_DTYPE_BIT(dtype))) {
        i++; /* ends: the peaks of a set and its bases have all types */
    }
    const fattn_cpu_peak *const peak = peak_of(device, i);
    const double products = flops / (FLOPS_A_NANOSECOND * peak->row.lanes * peak->row.flops);
    const double weights = scores / (SCORES_A_NANOSECOND * peak->row.lanes);
    const double time = fmax(fmax(products, weights), bytes / BYTES_A_NANOSECOND);
    int64_t workers = device->team.threads;
    workers = items < workers ? items : workers;
    workers =
        time / WORTH_JOINING < (double)workers ? (int64_t)(time / WORTH_JOINING) + 1 : workers;
    return time < WORTH_SHARING || workers < 1 ? 1 : (int)workers;
}

/* Decides on the number of workers and the size of the workspace. A plan may use all threads of its
 * device; it uses fewer where that is too little work for them. */
static fattn_status plan(fattn_plan *made)
{
    const fattn_cpu_kernel *const kernel = (const fattn_cpu_kernel *)made->kernel;
    fattn_tiling *const t = &made->tiling;
    if (t->workers == 0) {
        const fattn_problem *const p = &made->problem;
        const double flops = fattn_io_flops(p), a_score = 2 * ((double)p->dim + (double)p->dim_v);
        t->workers = worker_count(made->device->impl, p->dtype, t->items, flops,
                                  a_score > 0 ? flops / a_score : 0, t->traffic);
    }
    layout l = {.shared = kernel->shared(&made->problem, t),
                .scratch = kernel->scratch(&made->problem, t)};
    l.is_brief =
        t->workers == 1 && kernel->brief_plan && kernel->brief_plan(&made->problem, t, &l.brief);
    if (made->few) {
        const fattn_cpu_kernel *const few = (const fattn_cpu_kernel *)made->few;
        made->few_tiling.workers = t->workers;
        l.few_shared = few->shared(&made->problem, &made->few_tiling);
        l.scratch = fattn_max64(l.scratch, few->scratch(&made->problem, &made->few_tiling));
        l.shared = l.shared < 0 || l.few_shared < 0 ? -1 : l.shared + l.few_shared;
        t->workspace = fattn_cpu_workspace_of_one(l.shared, l.scratch);
    }
    const int64_t others = fattn_cpu_bytes(t->workers - 1, l.scratch, 1);
    if (t->workspace < 0 || others < 0 ||
        __builtin_add_overflow(t->workspace, others, &t->workspace)) {
        return fattn_fail(FATTN_OVERFLOW, "the workspace of %s overflows 63 bits",
                          made->kernel->name);
    }
    fattn_cpu_pages_plan(&made->problem, t->workers, &l.pages);
    layout *const copy = fattn_memory_alloc(sizeof *copy);
    if (!copy) {
        return fattn_fail_memory(sizeof *copy, "a plan's layout");
    }
    *copy = l;
    made->impl = copy;
    return FATTN_OK;
}

/* A phase of a run, or a whole fattn_merge() or fattn_dropout_mask(): a number of items, and their
 * work. */
typedef struct step {
    void (*work)(const void *of, const fattn_cpu_run *run, void *scratch);
    const void *of;
    fattn_cpu_run run; /* `items` is set by each worker */
    int64_t count;     /* of items */
    fattn_cpu_share share;
    fattn_cpu_deal deal;
} step;

typedef struct steps {
    step step[1 + FATTN_CPU_PHASES]; /* of pages, and phases of both kernels, if there are two */
    char *scratch;                   /* that of worker 0; those of the others follow */
    int64_t size;                    /* of the scratch of a worker; 0: there is none */
} steps;

/* Kernels rely on rounding to nearest and on subnormal numbers, whatever the calling thread has
 * set. Its settings are restored afterwards. */
static void work_step(void *context, int phase, int worker)
{
    steps *const all = context;
    step *const s = &all->step[phase];
    fattn_cpu_items items = fattn_cpu_items_of(&s->deal, worker);
    fattn_cpu_run own = s->run;
    own.items = &items;
    fattn_cpu_arithmetic callers;
    fattn_cpuid_arithmetic_begin(&callers);
    s->work(s->of, &own, all->size ? all->scratch + worker * all->size : NULL);
    fattn_cpuid_arithmetic_end(&callers);
}

/* Runs the first `count` steps one after another. */
static void run_steps(const cpu *device, steps *all, int count, int workers)
{
    int64_t most = 1;
    for (int n = 0; n < count; n++) {
        most = all->step[n].count > most ? all->step[n].count : most;
    }
    fattn_cpu_job job = {.work = work_step,
                         .context = all,
                         .phases = count,
                         .workers = most < workers ? (int)most : workers};
    for (int n = 0; n < count; n++) {
        step *const s = &all->step[n];
        fattn_cpu_deal_out(&s->deal, s->count, job.workers, s->share);
    }
    if (count > 0) {
        fattn_cpu_team_run(&device->team, &job);
    }
}

static void work_phase(const void *phase, const fattn_cpu_run *run, void *scratch)
{
    ((const fattn_cpu_phase *)phase)->work(run, scratch);
}

/* The tiling of a forward run. Lengths may be far below those that were planned for, so the blocks
 * of rows and the parts of keys that no sequence of this run has are left out. If the keys are cut
 * by the lengths of all sequences together (pieces.h), the tiling stays as planned. */
static fattn_tiling tiling_of_run(const fattn_tiling *planned, const fattn_problem *p,
                                  const fattn_buffers *buffers, int64_t rows)
{
    fattn_tiling tiling = *planned;
    if (tiling.pieces) {
        return tiling;
    }
    if (tiling.splits > 1) {
        const int64_t keys = fattn_longest_keys(p, buffers);
        tiling.splits = fattn_schedule_most(&tiling, (keys + tiling.bc - 1) / tiling.bc);
    }
    tiling.q_blocks = fattn_min64(tiling.q_blocks, (rows + tiling.br - 1) / tiling.br);
    tiling.items = tiling.heads * tiling.q_blocks * tiling.splits;
    return tiling;
}

/* Appends those phases of a kernel that have items. */
static void add_steps(steps *all, int *count, const fattn_cpu_kernel *kernel,
                      const fattn_cpu_run *run)
{
    if (kernel->begin) {
        kernel->begin(run);
    }
    for (int i = 0; i < FATTN_CPU_PHASES && kernel->phases[i].work; i++) {
        assert(*count <= FATTN_CPU_PHASES);
        step *const s = &all->step[*count];
        s->work = work_phase;
        s->of = &kernel->phases[i];
        s->run = *run;
        s->count = kernel->phases[i].count(&s->run);
        s->share = kernel->phases[i].share;
        *count += s->count > 0; /* an empty step would still cost a rendezvous of the workers */
    }
}

static void work_pages(const void *pages, const fattn_cpu_run *run, void *scratch)
{
    (void)scratch;
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        fattn_cpu_pages_item(pages, run->problem, run->buffers, item);
    }
}

static void run_items(const fattn_plan *plan, const fattn_buffers *buffers,
                      const fattn_merge_job *onto, void *workspace)
{
    const fattn_problem *const p = &plan->problem;
    const layout *const l = plan->impl;
    const int64_t group = fattn_problem_group(p);
    int64_t fewest, most;
    fattn_query_lengths(p, buffers, &fewest, &most);
    fattn_tiling tiling = plan->tiling, few_tiling;
    if (p->op == FATTN_FORWARD) {
        tiling = tiling_of_run(&plan->tiling, p, buffers, group * most);
    }
    fattn_cpu_run run = {.problem = p,
                         .buffers = buffers,
                         .tiling = &tiling,
                         .onto = onto,
                         .shared = (char *)workspace + l->few_shared};
    steps all;
    all.scratch = (char *)workspace + l->shared;
    all.size = l->scratch;
    int count = 0;
    if (l->pages.items > 0 && !onto) {
        all.step[count++] = (step){.work = work_pages,
                                   .of = &l->pages,
                                   .run = run,
                                   .count = l->pages.items,
                                   .share = FATTN_CPU_SEVERAL};
    }
    if (plan->few && !onto && group * fewest <= plan->few_rows) {
        const int64_t rows = fattn_min64(group * most, plan->few_rows);
        few_tiling = tiling_of_run(&plan->few_tiling, p, buffers, rows);
        run.few_rows = plan->few_rows;
        fattn_cpu_run few = run;
        few.tiling = &few_tiling;
        few.takes_few = true;
        few.shared = workspace;
        add_steps(&all, &count, (const fattn_cpu_kernel *)plan->few, &few);
    }
    if (run.few_rows == 0 || group * most > run.few_rows) {
        add_steps(&all, &count, (const fattn_cpu_kernel *)plan->kernel, &run);
    }
    run_steps(plan->device->impl, &all, count, plan->tiling.workers);
}

static fattn_status run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream)
{
    const fattn_cpu_kernel *const kernel = (const fattn_cpu_kernel *)plan->kernel;
    const fattn_status status = fattn_host_stream_check(stream);
    if (status) {
        return status;
    }
    const layout *const l = plan->impl;
    if (l->is_brief) {
        fattn_cpu_arithmetic callers;
        fattn_cpuid_arithmetic_begin(&callers);
        kernel->brief_run(&l->brief, &plan->problem, buffers, (char *)workspace + l->shared);
        fattn_cpuid_arithmetic_end(&callers);
        return FATTN_OK;
    }
    run_items(plan, buffers, NULL, workspace);
    return FATTN_OK;
}

/* Merges each row when it is finished, while it is in cache. */
static fattn_status run_onto(const fattn_plan *plan, const fattn_buffers *buffers,
                             const fattn_merge_job *job, void *workspace, fattn_stream stream)
{
    if (!((const fattn_cpu_kernel *)plan->kernel)->merges) {
        return fattn_plan_run_then_merge(plan, buffers, job, workspace, stream);
    }
    const fattn_status status = fattn_host_stream_check(stream);
    if (!status) {
        run_items(plan, buffers, job, workspace);
    }
    return status;
}

static void release(fattn_plan *made) { fattn_memory_free(made->impl); }

/* --- Merge, dropout, peaks -------------------------------------------------------------------- */

static void work_merge(const void *job, const fattn_cpu_run *run, void *scratch)
{
    (void)scratch;
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        fattn_cpu_merge_item(job, item);
    }
}

static void work_dropout(const void *args, const fattn_cpu_run *run, void *scratch)
{
    (void)scratch;
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        fattn_cpu_dropout_item(args, item);
    }
}

/* Runs a function of one step, without scratch, that takes about as long as moving `bytes`
 * bytes. */
static fattn_status run_one_step(const cpu *device,
                                 void (*work)(const void *args, const fattn_cpu_run *run,
                                              void *scratch),
                                 const void *args, int64_t items, double bytes, fattn_stream stream)
{
    const fattn_status status = fattn_host_stream_check(stream);
    if (!status) {
        steps all;
        all.size = 0;
        *all.step = (step){.work = work, .of = args, .count = items, .share = FATTN_CPU_SEVERAL};
        run_steps(device, &all, items > 0, worker_count(device, FATTN_F32, items, 0, 0, bytes));
    }
    return status;
}

/* Two states are read and one is written. */
static fattn_status merge(void *impl, const fattn_merge_job *job, fattn_stream stream)
{
    const int64_t items = fattn_cpu_merge_items(job);
    const double rows = (double)job->batch * (double)job->heads * (double)job->seqlen;
    return run_one_step(impl, work_merge, job, items, 12 * rows * (double)(job->dim_v + 1), stream);
}

/* A byte of the mask takes as long as moving ten bytes: the generator makes ten rounds of
 * multiplications. */
static fattn_status dropout_mask(void *impl, const fattn_dropout_args *args, fattn_stream stream)
{
    const int64_t items = fattn_cpu_dropout_items(args);
    const double rows = (double)args->batch * (double)args->heads * (double)args->seqlen_q;
    return run_one_step(impl, work_dropout, args, items, 10 * rows * (double)args->seqlen_k,
                        stream);
}

static const fattn_peak *peak(void *impl, int i)
{
    const fattn_cpu_peak *const found = peak_of(impl, i);
    return found ? &found->row : NULL;
}

/* Defined here because it needs the device; the tables of the units refer to it. */
fattn_status fattn_cpu_peak_measure(void *impl, const fattn_peak *row, const void *data,
                                    int64_t bytes, fattn_peak_reading *reading)
{
    const cpu *const device = impl;
    const fattn_cpu_peak *gauge = peak_of(device, 0);
    for (int i = 1; gauge && !gauge->fed; i++) {
        gauge = peak_of(device, i);
    }
    *reading =
        fattn_cpu_peak_by_all(&device->team, (const fattn_cpu_peak *)row, gauge, data, bytes);
    return FATTN_OK;
}

/* --- The device ------------------------------------------------------------------------------- */

static int count(void) { return 1; }

/* The fast memory that a worker plans with: its core's second-level cache, at most 1 MiB of it. All
 * of the cache is planned for, although keys and values drive some of it out: what they drive out
 * comes back once per tile of keys, which costs less than smaller blocks would. */
static int64_t fast_memory(void)
{
    const int64_t second = fattn_cpuid_cache(2), most = 1 << 20;
    return second == 0 ? most / 4 : second < most ? second : most;
}

static fattn_status open(int ordinal, const fattn_device_options *options, void **impl)
{
    (void)ordinal;
    cpu *const device = fattn_memory_alloc(sizeof *device);
    if (!device) {
        return fattn_fail_memory(sizeof *device, "a CPU device");
    }
    device->isa = NULL;
    fattn_status status = choose_isa(device, options->isa);
    status = status ? status : fattn_cpu_team_open(&device->team, options);
    if (status) {
        fattn_memory_free(device);
        return status;
    }
    device->fast_memory = fast_memory();
    device->cores = fattn_cpu_team_granted();
    *impl = device;
    return FATTN_OK;
}

static void close(void *impl)
{
    cpu *const device = impl;
    fattn_cpu_team_close(&device->team);
    fattn_memory_free(device);
}

static void describe(void *impl, fattn_device_info *info)
{
    const cpu *const device = impl;
    fattn_cpuid_name(info->name, sizeof info->name);
    snprintf(info->isa, sizeof info->isa, "%s", device->isa->name);
    info->units = device->team.threads;
    info->host_memory = 1;
    info->fast_memory = device->fast_memory;
    info->total_memory = fattn_cpuid_memory();
}

/* The limits follow the cores that the process is granted and not the number of workers, on which
 * results may not depend. Parts of the keys send their sums through memory once more. */
static void limits(void *impl, fattn_limits *limits)
{
    const cpu *const device = impl;
    *limits = (fattn_limits){.fast_memory = device->fast_memory,
                             .parallelism = 2 * device->cores,
                             .units = device->cores,
                             .by_lengths = true};
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
    .variable = &isa_variable,
    .count = count,
    .open = open,
    .close = close,
    .describe = describe,
    .limits = limits,
    .kernel = kernel,
    .peak = peak,
    .plan = plan,
    .run = run,
    .run_onto = run_onto,
    .release = release,
    .merge = merge,
    .dropout_mask = dropout_mask,
    .rows = fattn_host_rows,
    .inspect = fattn_host_inspect,
    .reads = fattn_host_reads,
    .alloc = fattn_host_alloc,
    .free = fattn_host_free,
    .copy = fattn_host_copy,
    .copy_rows = fattn_host_copy_rows,
    .stream_create = fattn_host_stream_create,
    .stream_destroy = fattn_host_stream_destroy,
    .stream_synchronize = fattn_host_stream_synchronize,
    .stream_wait = fattn_host_stream_wait,
    .stream_capture = fattn_host_stream_capture,
    .capture_mode = fattn_host_capture_mode,
    .event_create = fattn_host_event_create,
    .event_destroy = fattn_host_event_destroy,
    .event_record = fattn_host_event_record,
    .event_synchronize = fattn_host_event_synchronize,
    .event_elapsed = fattn_host_event_elapsed,
};
