/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches: the initial state of a work-group, the order in which its waves run, and the report.
 * Initial registers follow "Initial Kernel Execution State" of LLVM's AMDGPU guide.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/machine.h"
#include "tests/random.h"

const char *const emu_class_names[EMU_CLASSES] = {
    "salu", "smem", "valu", "trans", "matrix", "lds", "vmem", "atomic", "barrier", "branch", "wait",
};

const char *emu_host_reason(void)
{
#if defined(__x86_64__) && defined(__FMA__) && defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return "the emulator is built for AVX2 and FMA, which this processor lacks";
#endif
    return NULL;
}

/* ---- findings -------------------------------------------------------------------------------- */

static void describe(const emu_wave *w, const emu_instr *in, char *text, size_t size,
                     const char *format, va_list arguments)
{
    const emu_group *const g = w->group;
    char what[256];
    vsnprintf(what, sizeof what, format, arguments);
    const char *line = in->text == NULL ? "" : in->text;
    line += strspn(line, " \t");
    const char *const comment = strstr(line, "//");
    size_t length = comment == NULL ? strcspn(line, "\n") : (size_t)(comment - line);
    while (length > 0 && line[length - 1] == ' ') length--;
    snprintf(text, size, "%s, work-group %u,%u,%u, wave %d, %#x \"%.*s\": %s",
             emu_kernel_describe(g->machine->kernel)->name, g->id[0], g->id[1], g->id[2], w->index,
             in->address, (int)length, line, what);
}

/* Counts a finding, and describes it if it is the first. */
#define FINDING(name, member)                                                                    \
    void name(emu_wave *w, const emu_instr *in, const char *format, ...)                         \
    {                                                                                            \
        emu_report *const report = w->group->machine->report;                                    \
        if (report->member++ != 0) return;                                                       \
        va_list arguments;                                                                       \
        va_start(arguments, format);                                                             \
        describe(w, in, report->member##_text, sizeof report->member##_text, format, arguments); \
        va_end(arguments);                                                                       \
    }

FINDING(emu_undefined, undefined)
FINDING(emu_race, race)

void emu_fault(emu_wave *w, const emu_instr *in, const char *format, ...)
{
    emu_report *const report = w->group->machine->report;
    w->state = FAULTED;
    if (report->fault) return;
    report->fault = true;
    va_list arguments;
    va_start(arguments, format);
    describe(w, in, report->fault_text, sizeof report->fault_text, format, arguments);
    va_end(arguments);
}

const char *emu_report_text(const emu_report *report)
{
    return report->fault            ? report->fault_text
           : report->undefined != 0 ? report->undefined_text
           : report->race != 0      ? report->race_text
                                    : "";
}

const uint32_t *emu_exec_lanes(emu_wave *w)
{
    const uint64_t exec = exec_mask(w);
    if (exec != w->exec_expanded) {
        for (int l = 0; l < LANES; l++) w->exec_lane[l] = lane_in(exec, l) ? UINT32_MAX : 0;
        w->exec_expanded = exec;
    }
    return w->exec_lane;
}

/* ---- the start of a work-group --------------------------------------------------------------- */

/* Offsets in a kernel's descriptor. */
enum {
    DESCRIPTOR_LDS = 0,
    DESCRIPTOR_SCRATCH = 4,
    DESCRIPTOR_RSRC1 = 48,
    DESCRIPTOR_RSRC2 = 52,
    DESCRIPTOR_PROPERTIES = 56,
};

static uint32_t word_at(const uint8_t *p)
{
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The dispatch packet, as far as kernels read it. */
typedef struct packet {
    uint16_t header, setup;
    uint16_t block[3], reserved;
    uint32_t grid[3]; /* work-items */
    uint32_t private_size, group_size;
    uint64_t kernel, kernarg, reserved2, signal;
} packet;

typedef struct launch_state {
    emu_machine machine;
    packet packet;
    uint8_t *kernarg;
    size_t kernarg_size;
    int vgprs[2];  /* used of each file: v and a */
    uint8_t *room; /* registers of all waves */
} launch_state;

static void set_scalar(emu_wave *w, int reg, uint32_t value)
{
    w->s[reg] = value;
    w->s_def[reg] = UINT32_MAX;
}

static void set_scalar_pair(emu_wave *w, int reg, uint64_t value)
{
    set_scalar(w, reg, (uint32_t)value);
    set_scalar(w, reg + 1, (uint32_t)(value >> 32));
}

static void start_scalars(const launch_state *s, emu_wave *w)
{
    const emu_group *const g = w->group;
    const uint8_t *const d = emu_kernel_descriptor(g->machine->kernel);
    const uint32_t rsrc2 = word_at(d + DESCRIPTOR_RSRC2),
                   properties = word_at(d + DESCRIPTOR_PROPERTIES);
    const bool ttmp_ids =
        strncmp(emu_object_arch(emu_kernel_object(g->machine->kernel)), "gfx12", 5) == 0;
    const struct {
        bool on;
        int registers;
        uint64_t value;
    } user[] = {
        {properties & 1, 4, 0},                                 /* scratch buffer */
        {properties & 2, 2, (uintptr_t)&s->packet},             /* dispatch packet */
        {properties & 4, 2, 0},                                 /* queue */
        {properties & 8, 2, (uintptr_t)s->kernarg},             /* arguments */
        {properties & 16, 2, 0},                                /* dispatch id */
        {properties & 32, 2, 0},                                /* flat scratch */
        {properties & 64, 1, (uint32_t)s->machine.scratch_size} /* bytes of it */
    };
    int reg = 0;
    for (size_t n = 0; n < sizeof user / sizeof *user; n++) {
        if (!user[n].on) continue;
        if (user[n].registers == 1)
            set_scalar(w, reg, (uint32_t)user[n].value);
        else
            set_scalar_pair(w, reg, user[n].value);
        reg += user[n].registers;
    }
    reg = (int)(rsrc2 >> 1 & 31); /* all user registers, preloaded arguments included */
    for (int axis = 0; axis < 3; axis++)
        if (rsrc2 >> (7 + axis) & 1) set_scalar(w, reg++, g->id[axis]);
    if (ttmp_ids) {
        set_scalar(w, S_TTMP + 9, g->id[0]);
        set_scalar(w, S_TTMP + 7, g->id[1] | g->id[2] << 16);
    }
    /* Apertures: far from any host address. */
    set_scalar_pair(w, S_SHARED_BASE, UINT64_C(0xfffe0000) << 32);
    set_scalar_pair(w, S_SHARED_LIMIT, UINT64_C(0xfffe0000) << 32 | UINT32_MAX);
    set_scalar_pair(w, S_PRIVATE_BASE, UINT64_C(0xfffd0000) << 32);
    set_scalar_pair(w, S_PRIVATE_LIMIT, UINT64_C(0xfffd0000) << 32 | UINT32_MAX);
}

enum { POISON = 0xa5 };

static void start_wave(const launch_state *s, emu_wave *w)
{
    const emu_launch *const launch = s->machine.launch;
    const uint32_t threads = launch->block[0] * launch->block[1] * launch->block[2];
    const uint32_t first = (uint32_t)(w->index * w->lanes);
    const uint32_t live =
        threads - first < (uint32_t)w->lanes ? threads - first : (uint32_t)w->lanes;
    w->state = RUNNING;
    w->signalled = false;
    w->next = s->machine.code;
    w->steps = 0;
    memset(w->s, POISON, sizeof w->s);
    memset(w->s_def, 0, sizeof w->s_def);
    for (int file = 0; file < 2; file++) {
        const size_t from = file == 0 ? 0 : AGPR0, count = (size_t)s->vgprs[file];
        memset(w->v[from], POISON, count * sizeof *w->v);
        memset(w->v_def[from], 0, count * sizeof *w->v_def);
    }
    set_scalar_pair(w, S_EXEC, live == 64 ? ~UINT64_C(0) : (UINT64_C(1) << live) - 1);
    set_scalar(w, S_SCC, 0);
    start_scalars(s, w);
    /* v0: the work-item's coordinates side by side, ten bits each */
    for (uint32_t l = 0; l < live; l++) {
        const uint32_t n = first + l, x = n % launch->block[0], yz = n / launch->block[0];
        w->v[0][l] = x | yz % launch->block[1] << 10 | yz / launch->block[1] << 20;
    }
    w->v_def[0][0] = w->v_def[0][1] = all_lanes(w);
    memset(w->scratch_def, 0, (size_t)s->machine.scratch_size * LANES);
}

static void start_group(launch_state *s)
{
    emu_group *const g = &s->machine.group;
    memset(g->lds, POISON, g->lds_size);
    memset(g->lds_def, 0, g->lds_size);
    g->epoch++;
    for (int n = 0; n < g->waves; n++) start_wave(s, &g->wave[n]);
}

/* ---- running --------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *state) { return random_next(state) >> 33; }

/* Reports each instruction to the caller before it runs. */
static void run_traced(emu_wave *w, const emu_instr *in)
{
    const emu_launch *const launch = w->group->machine->launch;
    launch->trace(launch->trace_to, in->address);
    in->run(w, in);
}

static void run_wave(emu_wave *w, uint64_t budget)
{
    emu_machine *const m = w->group->machine;
    const uint32_t *const id = w->group->id;
    const bool traced = m->launch->trace != NULL && (w->index | id[0] | id[1] | id[2]) == 0;
    while (w->state == RUNNING && budget-- > 0) {
        const emu_instr *const in = w->next++;
        m->count[in - m->code]++;
        w->steps++;
        (traced ? run_traced : in->run)(w, in);
    }
}

/* Opens the barrier when no wave is left running; false when all have ended. */
static bool open_barrier(emu_group *g)
{
    int waiting = 0;
    for (int n = 0; n < g->waves; n++) {
        if (g->wave[n].state == RUNNING || g->wave[n].state == FAULTED) return true;
        waiting += g->wave[n].state == AT_BARRIER;
    }
    g->epoch++;
    for (int n = 0; n < g->waves; n++)
        if (g->wave[n].state == AT_BARRIER) g->wave[n].state = RUNNING;
    return waiting > 0;
}

static void run_group(emu_machine *m, uint64_t *random)
{
    const emu_launch *const launch = m->launch;
    const uint64_t limit =
        launch->max_instructions == 0 ? UINT64_C(1) << 40 : launch->max_instructions;
    emu_group *const g = &m->group;
    do {
        const bool shuffled = launch->schedule == EMU_SHUFFLED;
        const int turns = g->waves;
        for (int turn = 0; turn < turns && !m->report->fault; turn++) {
            const int n = shuffled                           ? (int)(draw(random) % (uint64_t)turns)
                          : launch->schedule == EMU_REVERSED ? turns - 1 - turn
                                                             : turn;
            emu_wave *const w = &g->wave[n];
            run_wave(w, shuffled ? 1 + draw(random) % 32 : limit - w->steps);
            if (w->state == RUNNING && w->steps >= limit)
                emu_fault(w, w->next, "has run %llu instructions", (unsigned long long)w->steps);
        }
    } while (!m->report->fault && open_barrier(g));
}

/* The n-th work-group of the schedule. */
static uint64_t group_in_order(const emu_launch *launch, uint64_t n, uint64_t groups,
                               uint64_t stride)
{
    if (launch->schedule == EMU_FORWARD) return n;
    if (launch->schedule == EMU_REVERSED) return groups - 1 - n;
    return (n * stride + launch->seed % groups) % groups;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

static void run_grid(launch_state *s)
{
    const emu_launch *const launch = s->machine.launch;
    const uint64_t groups = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
    uint64_t random = launch->seed, stride = 1 + draw(&random) % (groups + 1);
    while (common_divisor(stride, groups) != 1) stride++;
    for (uint64_t n = 0; n < groups && !s->machine.report->fault; n++) {
        const uint64_t id = group_in_order(launch, n, groups, stride);
        uint32_t *const at = s->machine.group.id;
        at[0] = (uint32_t)(id % launch->grid[0]);
        at[1] = (uint32_t)(id / launch->grid[0] % launch->grid[1]);
        at[2] = (uint32_t)(id / launch->grid[0] / launch->grid[1]);
        start_group(s);
        run_group(&s->machine, &random);
    }
}

/* ---- the launch ------------------------------------------------------------------------------ */

static bool refuse(emu_report *report, const char *why)
{
    report->fault = true;
    snprintf(report->fault_text, sizeof report->fault_text, "%s", why);
    return false;
}

/* The arguments that the launch fills in, not the caller. */
static uint64_t hidden_value(const emu_launch *launch, const char *kind)
{
    const int axis = kind[strlen(kind) - 1] - 'x';
    if (strncmp(kind, "hidden_block_count_", 19) == 0) return launch->grid[axis];
    if (strncmp(kind, "hidden_group_size_", 18) == 0) return launch->block[axis];
    if (strcmp(kind, "hidden_grid_dims") == 0) return 3;
    if (strcmp(kind, "hidden_dynamic_lds_size") == 0) return launch->dynamic_lds;
    return 0; /* offsets, remainders of a grid of whole work-groups, services that are not there */
}

/* A copy of the arguments with hidden ones filled in; bytes that were not given stay undefined. */
static bool make_kernarg(launch_state *s)
{
    const emu_launch *const launch = s->machine.launch;
    const emu_kernel_info *const info = emu_kernel_describe(s->machine.kernel);
    s->kernarg_size = ((size_t)info->kernarg_size + 64) & ~(size_t)63;
    s->kernarg = calloc(1, s->kernarg_size);
    if (s->kernarg == NULL || !emu_memory_add(s->machine.memory, s->kernarg, s->kernarg_size, true))
        return refuse(s->machine.report, "no memory for the arguments");
    for (int n = 0; n < info->arguments; n++) {
        const emu_argument *const a = &info->argument[n];
        const size_t end = (size_t)(a->offset + a->size);
        if (a->hidden) {
            const uint64_t value = hidden_value(launch, a->kind);
            memcpy(s->kernarg + a->offset, &value, (size_t)(a->size < 8 ? a->size : 8));
        } else if (end > launch->kernarg_size) {
            return refuse(s->machine.report, "fewer bytes of arguments than the kernel takes");
        } else {
            memcpy(s->kernarg + a->offset, (const uint8_t *)launch->kernarg + a->offset,
                   (size_t)a->size);
        }
        emu_memory_define(s->machine.memory, s->kernarg + a->offset, (size_t)a->size);
    }
    return true;
}

static void count_registers(launch_state *s)
{
    s->vgprs[0] = 1;
    for (int n = 0; n < s->machine.length; n++)
        for (const emu_instr *in = &s->machine.code[n]; in != NULL; in = in->second) {
            const emu_operand *const list[] = {in->dst, in->src};
            for (int which = 0; which < 2; which++)
                for (int k = 0; k < (which == 0 ? MAX_DST : MAX_SRC); k++) {
                    const emu_operand *const o = &list[which][k];
                    if (o->kind != VECTOR) continue;
                    const int file = o->reg >= AGPR0, end = o->reg - file * AGPR0 + o->count;
                    if (end > s->vgprs[file]) s->vgprs[file] = end;
                }
        }
}

static bool make_group(launch_state *s)
{
    emu_machine *const m = &s->machine;
    emu_group *const g = &m->group;
    const emu_kernel_info *const info = emu_kernel_describe(m->kernel);
    const emu_object *const object = emu_kernel_object(m->kernel);
    const uint64_t threads =
        (uint64_t)m->launch->block[0] * m->launch->block[1] * m->launch->block[2];
    const int lanes = emu_object_wave(object);
    if (threads == 0 || threads > (uint64_t)info->max_threads)
        return refuse(m->report,
                      "more work-items in a work-group than the kernel is built for, or none");
    g->machine = m;
    g->waves = (int)((threads + (uint64_t)lanes - 1) / (uint64_t)lanes);
    g->lds_size = (uint32_t)info->lds_size + m->launch->dynamic_lds;
    const bool large = strcmp(emu_object_arch(object), "gfx950") == 0;
    if (g->lds_size > (large ? 160u : 64u) * 1024)
        return refuse(m->report, "more LDS than there is");
    m->lds_banks = large ? 64 : 32;
    m->flushes_halves = strcmp(emu_object_arch(object), "gfx90a") == 0;
    const size_t registers = VGPRS * sizeof *g->wave->v, flags = VGPRS * sizeof *g->wave->v_def;
    const size_t scratch = (size_t)m->scratch_size * LANES;
    const size_t each = registers + flags + 2 * scratch;
    g->lds = malloc(g->lds_size + 16);
    g->lds_def = malloc(g->lds_size + 16);
    g->touch = calloc(g->lds_size / 4 + 2, sizeof *g->touch);
    s->room = malloc(each * (size_t)g->waves);
    m->count = calloc((size_t)m->length + 1, sizeof *m->count);
    if (!g->lds || !g->lds_def || !g->touch || !s->room || !m->count)
        return refuse(m->report, "no memory for a work-group");
    for (int n = 0; n < g->waves; n++) {
        emu_wave *const w = &g->wave[n];
        uint8_t *const room = s->room + each * (size_t)n;
        w->group = g;
        w->lanes = lanes;
        w->index = n;
        w->v = (uint32_t(*)[LANES])(void *)room;
        w->v_def = (uint64_t(*)[2])(void *)(room + registers);
        w->scratch = room + registers + flags;
        w->scratch_def = w->scratch + scratch;
    }
    return true;
}

/* Supported modes: round to nearest, keep subnormals of all types. */
static bool check_mode(const emu_machine *m)
{
    const uint32_t rsrc1 = word_at(emu_kernel_descriptor(m->kernel) + DESCRIPTOR_RSRC1);
    if ((rsrc1 >> 12 & 15) != 0) return refuse(m->report, "the kernel does not round to nearest");
    if ((rsrc1 >> 16 & 3) != 3)
        return refuse(m->report, "the kernel flushes f32 subnormals, which is not emulated");
    return true;
}

static void finish_report(const emu_machine *m)
{
    for (int n = 0; n < m->length; n++) m->report->executed[m->code[n].row->class] += m->count[n];
}

bool emu_launch_run(emu_kernel *kernel, const emu_launch *launch, emu_memory *memory,
                    emu_report *report)
{
    memset(report, 0, sizeof *report);
    if (!emu_kernel_decode(kernel, report->fault_text, sizeof report->fault_text)) {
        report->fault = true;
        return false;
    }
    if (launch->grid[0] == 0 || launch->grid[1] == 0 || launch->grid[2] == 0)
        return refuse(report, "a grid without work-groups");
    launch_state *const s = calloc(1, sizeof *s);
    if (s == NULL) return refuse(report, "no memory for a launch");
    emu_machine *const m = &s->machine;
    *m = (emu_machine){.launch = launch, .kernel = kernel, .memory = memory, .report = report};
    m->code = emu_kernel_code(kernel, &m->length);
    size_t image_size;
    void *const image = emu_object_image(emu_kernel_object(kernel), &image_size);
    m->base = (uintptr_t)image;
    m->scratch_size = emu_kernel_describe(kernel)->scratch_size;
    s->packet =
        (packet){.setup = 3,
                 .block = {(uint16_t)launch->block[0], (uint16_t)launch->block[1],
                           (uint16_t)launch->block[2]},
                 .grid = {launch->grid[0] * launch->block[0], launch->grid[1] * launch->block[1],
                          launch->grid[2] * launch->block[2]}};
    const bool ready = check_mode(m) && make_group(s) && make_kernarg(s);
    if (ready) {
        count_registers(s);
        emu_memory_add(memory, image, image_size, false);
        emu_memory_add(memory, &s->packet, sizeof s->packet, false);
        run_grid(s);
        finish_report(m);
        emu_memory_remove(memory, &s->packet);
        emu_memory_remove(memory, image);
    }
    emu_memory_remove(memory, s->kernarg);
    free(s->kernarg);
    free(m->count);
    free(s->room);
    free(m->group.touch);
    free(m->group.lds_def);
    free(m->group.lds);
    free(s);
    return ready && !report->fault && report->undefined == 0 && report->race == 0;
}
