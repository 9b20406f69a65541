/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which threads work for a CPU device, and how many: the options of fattn_device_open_with(), the
 * caller's own loop, OpenMP, the limits of affinity and control groups, and problems too small to
 * share.
 */
#define _GNU_SOURCE /* mkdtemp, sched_setaffinity */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#else
#include <dlfcn.h>
#endif

#include "backends/cpu/deal.h"
#include "backends/cpu/grant.h"
#include "backends/cpu/team.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tests/attend.h"
#include "tests/environment.h"
#include "tests/folder.h"
#include "tests/tap.h"

enum { THREADS = 4 };

static uint64_t expected; /* by one thread */
static long extra;        /* threads of the process that are not ours: sanitizers start some */

static void make_problem(attend *a) { attend_make(a, FATTN_BACKWARD, 6, 150, 150, 32); }

/* A processor that this program may use. */
static int usable_cpu(void)
{
    fattn_cpu_set set = {{0}};
    int cpu = 0;
    fattn_cpu_set_allowed(&set);
    while (cpu < FATTN_CPU_SET_SIZE - 1 && !(set.bits[cpu / 64] >> cpu % 64 & 1)) {
        cpu++;
    }
    return cpu < FATTN_CPU_SET_SIZE - 1 ? cpu : 0;
}

static fattn_device_options make_options(void)
{
    fattn_device_options options;
    fattn_device_options_init(&options);
    return options;
}

/* The result of a device with these options; 0 if it cannot be opened. */
static uint64_t compute(const fattn_device_options *options)
{
    attend a;
    fattn_device *device = NULL;
    uint64_t hash = 0;
    make_problem(&a);
    if (fattn_device_open_with("cpu", options, &device) == FATTN_OK) {
        hash = attend_with(&a, device);
        hash = attend_with(&a, device) == hash ? hash : 0;
    }
    fattn_cache_clear();
    fattn_device_close(device);
    attend_free(&a);
    return hash;
}

/* --- The caller's loop ------------------------------------------------------------------------ */

typedef void (*loop_body)(void *context, int64_t i);

/* How a loop orders its calls. */
typedef enum order { FORWARDS, BACKWARDS, HALF, NONE, THREADED, ORDERS } order;
static const char *const order_names[] = {"forwards", "backwards", "one in two", "none at all",
                                          "on threads"};

typedef struct loop {
    order order;
    atomic_int calls;   /* of the loop */
    atomic_long counts; /* sum of the counts that it was given */
    pthread_t caller;   /* the thread that calls the library */
    atomic_int strange; /* calls of the loop on other threads */
} loop;

typedef struct share {
    loop_body body;
    void *context;
    int64_t i;
} share;

static void *run_share(void *of)
{
    const share *const s = of;
    s->body(s->context, s->i);
    return NULL;
}

static void run_on_threads(int64_t count, loop_body body, void *context)
{
    pthread_t threads[64];
    share shares[64];
    for (int64_t i = 0; i < count; i++) {
        shares[i] = (share){body, context, i};
        if (pthread_create(&threads[i], NULL, run_share, &shares[i]) != 0) {
            tap_bail("no thread");
        }
    }
    for (int64_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void parallel_for(void *user, int64_t count, loop_body body, void *context)
{
    loop *const l = user;
    atomic_fetch_add(&l->calls, 1);
    atomic_fetch_add(&l->counts, (long)count);
    atomic_fetch_add(&l->strange, !pthread_equal(pthread_self(), l->caller));
    if (l->order == THREADED) {
        run_on_threads(count, body, context);
        return;
    }
    for (int64_t n = 0; n < count && l->order != NONE; n++) {
        const int64_t i = l->order == BACKWARDS ? count - 1 - n : n;
        if (l->order != HALF || i % 2 == 1) {
            body(context, i);
        }
    }
}

static void check_loops(void)
{
    for (int o = 0; o < ORDERS; o++) {
        loop l = {.order = (order)o, .caller = pthread_self()};
        fattn_device_options options = make_options();
        options.threads = THREADS;
        options.parallel_for = parallel_for;
        options.parallel_user = &l;
        const long before = process_threads_are(1 + extra) ? process_tasks() : -1;
        const uint64_t hash = compute(&options);
        tap_check(hash == expected, "a caller's loop, %s: the bits of one thread", order_names[o]);
        tap_check(atomic_load(&l.calls) == 4 && atomic_load(&l.counts) == 4 * THREADS,
                  "it is called %d times, for %ld bodies", atomic_load(&l.calls),
                  atomic_load(&l.counts));
        tap_check(atomic_load(&l.strange) == 0, "on the thread that calls the library");
        tap_check(process_threads_are(1 + extra) && process_tasks() == before,
                  "no other thread is made");
    }
}

/* --- Threads of the process ------------------------------------------------------------------- */

/* A line of a thread's status, "" if absent. */
static void read_status(const char *task, const char *field, char *value, size_t size)
{
    char path[512], line[8192];
    snprintf(path, sizeof path, "/proc/self/task/%.300s/status", task);
    FILE *const file = fopen(path, "r");
    value[0] = '\0';
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, field, strlen(field)) == 0 && line[strlen(field)] == ':') {
            line[strcspn(line, "\n")] = '\0';
            snprintf(value, size, "%.200s", line + strlen(field) + 2);
        }
    }
    if (file) {
        fclose(file);
    }
}

/* Counts the library's running threads; those bound to usable_cpu(); and those that do not block
 * the program's signals. */
static int count_own(int *bound, int *open)
{
    DIR *const folder = opendir("/proc/self/task");
    char cpu[16];
    snprintf(cpu, sizeof cpu, "%d", usable_cpu());
    int count = 0;
    *bound = *open = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
        char value[256];
        read_status(entry->d_name, "Name", value, sizeof value);
        if (strcmp(value, "fattn") == 0) {
            const unsigned long long user = 1ull << (SIGUSR1 - 1) | 1ull << (SIGINT - 1) |
                                            1ull << (SIGALRM - 1) | 1ull << (SIGCHLD - 1);
            count++;
            read_status(entry->d_name, "Cpus_allowed_list", value, sizeof value);
            *bound += strcmp(value, cpu) == 0;
            read_status(entry->d_name, "SigBlk", value, sizeof value);
            *open += (strtoull(value, NULL, 16) & user) != user;
        }
    }
    if (folder) {
        closedir(folder);
    }
    return count;
}

/* --- OpenMP ----------------------------------------------------------------------------------- */

static int units_of_default(void)
{
    fattn_device *device = NULL;
    fattn_device_info info = {.struct_size = sizeof info};
    const bool known = fattn_device_open("cpu", &device) == FATTN_OK &&
                       fattn_device_get_info(device, &info) == FATTN_OK;
    fattn_device_close(device);
    return known ? info.units : 0;
}

/* A job whose workers wait for each other, and look at their numbers. */
typedef struct roll {
    int (*number)(void);
    atomic_int come, wrong;
} roll;

static void call_roll(void *context, int phase, int worker)
{
    roll *const r = context;
    (void)phase;
    if (r->number() != worker) {
        atomic_fetch_add(&r->wrong, 1);
    }
    atomic_fetch_add(&r->come, 1);
    for (int i = 0; atomic_load(&r->come) < THREADS && i < 10000; i++) {
        usleep(100); /* nobody comes once a worker has left */
    }
}

/* Whether workers have the numbers that threads of OpenMP have. */
static bool numbers_are_kept(int (*number)(void))
{
    fattn_device_options options = make_options();
    fattn_cpu_team team;
    options.threads = THREADS;
    options.engine = FATTN_ENGINE_OPENMP;
    if (fattn_cpu_team_open(&team, &options)) {
        return false;
    }
    bool right = true;
    for (int n = 0; n < 3; n++) {
        roll r = {.number = number};
        fattn_cpu_job job = {.work = call_roll, .context = &r, .phases = 1, .workers = THREADS};
        fattn_cpu_team_run(&team, &job);
        right = right && atomic_load(&r.come) == THREADS && atomic_load(&r.wrong) == 0;
    }
    fattn_cpu_team_close(&team);
    return right;
}

#ifdef _OPENMP
/* All threads of a region call at once; no other thread helps. */
static bool computes_inside(fattn_device *device)
{
    atomic_int right = 0;
    long before = 0, after = 0;
#pragma omp parallel num_threads(2)
    {
#pragma omp barrier
#pragma omp master
        before = process_status("Threads");
#pragma omp barrier
        attend a;
        make_problem(&a);
        atomic_fetch_add(&right, attend_with(&a, device) == expected);
        attend_free(&a);
#pragma omp barrier
#pragma omp master
        after = process_status("Threads");
    }
    return atomic_load(&right) == 2 && after <= before; /* OpenMP may end idle ones */
}

/* The program's role when OpenMP binds its threads: the library's threads may run on all of
 * OpenMP's places, not only on that of the thread that creates them. */
static int run_bound(void)
{
    attend a;
    make_problem(&a);
    fattn_cpu_set places = {{0}};
    char list[256];
    int bound = 0, open = 0, own = 0, right = 0;
    for (int place = 0; place < omp_get_num_places(); place++) {
        int ids[1024];
        omp_get_place_proc_ids(place, ids);
        for (int i = 0; i < omp_get_place_num_procs(place); i++) {
            fattn_cpu_set_add(&places, ids[i]);
        }
    }
    (void)attend_with(&a, NULL);
    for (int n = 0; n < 10000 && own == 0; n++) {
        usleep(1000);
        own = count_own(&bound, &open);
    }
    DIR *const folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
        fattn_cpu_set set = {{0}};
        read_status(entry->d_name, "Name", list, sizeof list);
        if (strcmp(list, "fattn") == 0) {
            read_status(entry->d_name, "Cpus_allowed_list", list, sizeof list);
            right += fattn_cpu_set_parse(&set, list) && memcmp(&set, &places, sizeof set) == 0;
        }
    }
    if (folder) {
        closedir(folder);
    }
    fattn_cache_clear();
    attend_free(&a);
    return own != 1 || right != 1;
}

static void check_bound(void)
{
    char command[8192], self[512], places[6 * 1024] = "";
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    fattn_cpu_set set = {{0}};
    fattn_cpu_set_allowed(&set); /* named one by one: OpenMP's own "cores" needs /sys */
    for (int cpu = 0; cpu < 1024; cpu++) {
        const size_t used = strlen(places);
        if (set.bits[cpu / 64] >> cpu % 64 & 1) {
            snprintf(places + used, sizeof places - used, "%s{%d}", used ? "," : "", cpu);
        }
    }
    if (length <= 0) {
        tap_skip("threads that OpenMP binds", "no /proc");
        return;
    }
    self[length] = '\0';
    snprintf(command, sizeof command,
             "FATTN_BACKEND=cpu FATTN_NUM_THREADS=2 OMP_PROC_BIND=true OMP_PLACES='%s' '%s' bound",
             places, self);
    const int status = system(command);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 126) {
        tap_skip("threads that OpenMP binds", "an emulated program cannot be started again");
        return;
    }
    tap_check(status == 0, "where OpenMP binds threads, ours have all of its places");
    snprintf(command, sizeof command,
             "unset FATTN_NUM_THREADS OMP_NUM_THREADS; "
             "FATTN_BACKEND=cpu OMP_PROC_BIND=true OMP_PLACES='%s' '%s' number %d",
             places, self, (int)fattn_cpu_granted(&set));
    tap_check(system(command) == 0, "and the default number is that of its places");
}

/* The program's role when its affinity shrinks to one processor after OpenMP has counted them.
 * own: what it passes to omp_set_num_threads(), or 0 */
static int run_narrowed(int units, int own)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(usable_cpu(), &set);
    if (sched_setaffinity(0, sizeof set, &set)) {
        return 125;
    }
    if (own > 0) {
        omp_set_num_threads(own);
    }
    return units_of_default() != units;
}

/* Runs this program in that role. variable: what OMP_NUM_THREADS is, or "" */
static int narrowed(const char *variable, int units, int own)
{
    char command[1024], self[512], assignment[64] = "";
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) {
        return 126;
    }
    self[length] = '\0';
    if (variable[0]) {
        snprintf(assignment, sizeof assignment, "OMP_NUM_THREADS='%s'", variable);
    }
    snprintf(command, sizeof command,
             "unset FATTN_NUM_THREADS OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES; "
             "FATTN_BACKEND=cpu %s '%s' narrowed %d %d",
             assignment, self, units, own);
    const int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void check_narrowed(void)
{
    fattn_cpu_set set = {{0}};
    fattn_cpu_set_allowed(&set);
    const int all = (int)fattn_cpu_set_count(&set);
    char number[32];
    if (all < 2 || usable_cpu() >= CPU_SETSIZE) {
        tap_skip("a smaller affinity after OpenMP counted processors", "there is one processor");
        return;
    }
    const int status = narrowed("", 1, 0);
    if (status >= 125) {
        tap_skip("a smaller affinity after OpenMP counted processors", "it cannot be set here");
        return;
    }
    tap_check(status == 0, "a processor of %d left: one thread, whatever OpenMP had counted", all);
    snprintf(number, sizeof number, "%d", all);
    tap_check(narrowed(number, all, 0) == 0, "OMP_NUM_THREADS that equals the count is kept");
    snprintf(number, sizeof number, " %d,1", all + 1);
    tap_check(narrowed(number, all + 1, 0) == 0, "OMP_NUM_THREADS above the count is kept");
    tap_check(narrowed("", all + 1, all + 1) == 0, "omp_set_num_threads() is kept");
}

static void check_openmp(void)
{
    check_bound();
    check_narrowed();
    fattn_device_options options = make_options();
    options.threads = THREADS;
    options.engine = FATTN_ENGINE_OPENMP;
    tap_check(compute(&options) == expected, "OpenMP's threads: the bits of one thread");
    tap_check(numbers_are_kept(omp_get_thread_num), "OpenMP's threads have its numbers");
    const int before = omp_get_max_threads();
    omp_set_num_threads(3);
    tap_check(units_of_default() == 3, "OpenMP's number is the default");
    fattn_device *device = NULL;
    bool right = fattn_device_open("cpu", &device) == FATTN_OK;
    omp_set_num_threads(1);
    fattn_device_info info = {.struct_size = sizeof info};
    right = right && fattn_device_get_info(device, &info) == FATTN_OK;
    tap_check(right && info.units == 3, "a device keeps the number it was opened with");
    tap_check(right && computes_inside(device), "inside a parallel region callers work alone");
    fattn_cache_clear();
    fattn_device_close(device);
    omp_set_num_threads(before);
}
#else
static int run_bound(void) { return 1; }

static void *symbol_of(void *library, const char *name, void *function)
{
    void *const symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol;
}

static void check_openmp(void)
{
    fattn_device *device = NULL;
    fattn_device_options options = make_options();
    options.engine = FATTN_ENGINE_OPENMP;
    tap_check(fattn_device_open_with("cpu", &options, &device) == FATTN_UNSUPPORTED && !device,
              "a build without OpenMP says so");
    void *const runtime = dlopen("libgomp.so.1", RTLD_LAZY);
    if (!runtime) {
        tap_skip("a loaded runtime of OpenMP", "there is none");
        return;
    }
    int (*limit)(void) = NULL, (*number)(void) = NULL;
    const bool has = symbol_of(runtime, "omp_get_thread_limit", &limit) &&
                     symbol_of(runtime, "omp_get_thread_num", &number);
    options.threads = THREADS;
    tap_check(compute(&options) == expected && has && limit() >= THREADS,
              "a loaded runtime of OpenMP: the bits of one thread");
    tap_check(has && numbers_are_kept(number), "its threads have its numbers");
    tap_check(process_threads_are(THREADS + extra), "its threads stay, as ours would not");
}
#endif

/* --- Options ---------------------------------------------------------------------------------- */

static bool answers(const char *spec, const fattn_device_options *options, fattn_status status,
                    const char *word)
{
    fattn_device *device = NULL;
    const fattn_status got = fattn_device_open_with(spec, options, &device);
    const bool right = got == status && (status ? !device : device != NULL) &&
                       (!status || strstr(fattn_last_reason(), word));
    if (!right) {
        printf("# %s, not %s: %s\n", fattn_status_string(got), fattn_status_string(status),
               fattn_last_reason());
    }
    fattn_device_close(device);
    return right;
}

static void check_wrong_options(void)
{
    const struct {
        fattn_device_options options;
        fattn_status status;
        const char *word;
    } cases[] = {
        {{.threads = -1}, FATTN_INVALID_ARGUMENT, "threads"},
        {{.threads = 1025}, FATTN_INVALID_ARGUMENT, "threads"},
        {{.engine = (fattn_engine)3}, FATTN_INVALID_ARGUMENT, "engine"},
        {{.reserved = 1}, FATTN_INVALID_ARGUMENT, "reserved"},
        {{.parallel_user = &expected}, FATTN_INVALID_ARGUMENT, "parallel_user"},
        {{.parallel_for = parallel_for, .engine = FATTN_ENGINE_OWN},
         FATTN_INVALID_ARGUMENT,
         "engine"},
        {{.parallel_for = parallel_for, .cpus = "0"}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.engine = FATTN_ENGINE_OPENMP, .cpus = "0"}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.cpus = ""}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.cpus = "0-"}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.cpus = "3-1"}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.cpus = "0,,1"}, FATTN_INVALID_ARGUMENT, "cpus"},
        {{.cpus = "8192"}, FATTN_INVALID_ARGUMENT, "below 8192"},
        {{.cpus = "8190-8191"}, FATTN_INVALID_ARGUMENT, "none of them"},
        {{.isa = "nonsense"}, FATTN_UNSUPPORTED, "nonsense"},
    };
    bool right = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fattn_device_options options = cases[i].options;
        options.struct_size = sizeof options;
        right = answers("cpu", &options, cases[i].status, cases[i].word) && right;
    }
    fattn_device_options unset = {.struct_size = 0};
    right = answers("cpu", &unset, FATTN_INVALID_STRUCT, "struct_size") && right;
    tap_check(right, "options that are wrong are refused, with a reason");
}

static void check_foreign_options(void)
{
    const struct {
        fattn_device_options options;
        const char *word;
    } cases[] = {
        {{.threads = 1}, "threads"},
        {{.isa = "scalar"}, "isa"},
        {{.cpus = "0"}, "cpus"},
        {{.engine = FATTN_ENGINE_OWN}, "engine"},
        {{.parallel_for = parallel_for}, "parallel_for"},
    };
    bool right = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fattn_device_options options = cases[i].options;
        options.struct_size = sizeof options;
        right = answers("reference", &options, FATTN_UNSUPPORTED, cases[i].word) && right;
    }
    const fattn_device_options none = make_options();
    right = answers("reference", &none, FATTN_OK, "") && right;
    right = answers("reference", NULL, FATTN_OK, "") && right;
    tap_check(right, "a backend without options refuses all but defaults");
}

static bool info_with(const fattn_device_options *options, fattn_device_info *info)
{
    fattn_device *device = NULL;
    info->struct_size = sizeof *info;
    const bool known = fattn_device_open_with("cpu", options, &device) == FATTN_OK &&
                       fattn_device_get_info(device, info) == FATTN_OK;
    fattn_device_close(device);
    return known;
}

/* Of each allocation of a device that fails: how much was wanted, which for the threads is more
 * than a pthread_t each. */
static void check_memory(void)
{
    fattn_device_options options = make_options();
    bool right = true, threads = false;
    options.threads = THREADS;
    for (int64_t n = 1; n < 20; n++) {
        fattn_device *device = NULL;
        fattn_memory_fail_at(n);
        const fattn_status status = fattn_device_open_with("cpu", &options, &device);
        if (!fattn_memory_fail_at(0)) {
            fattn_device_close(device);
            break;
        }
        long long bytes = 0;
        char what[64] = "";
        right =
            right && status == FATTN_OUT_OF_MEMORY &&
            sscanf(fattn_last_reason(), "no memory for %lld bytes of %63[^\n]", &bytes, what) == 2;
        if (strcmp(what, "a device's threads") == 0) {
            threads = true;
            right = right && bytes >= FATTN_THREADS_MAX * (int64_t)sizeof(pthread_t);
        }
    }
    tap_check(right && threads, "a device without memory says how much it lacks");
}

static void check_options(void)
{
    fattn_device_options options = make_options();
    fattn_device_info info;
    options.isa = "scalar";
    options.threads = 5;
    tap_check(info_with(&options, &info) && strcmp(info.isa, "scalar") == 0 && info.units == 5,
              "an instruction set and a number of threads");
    set_environment("FATTN_NUM_THREADS", "2");
    tap_check(info_with(&options, &info) && info.units == 2, "FATTN_NUM_THREADS overrides it");
    set_environment("FATTN_NUM_THREADS", NULL);
    options.isa = "nonsense";
    set_environment("FATTN_CPU_ISA", "scalar");
    tap_check(info_with(&options, &info) && strcmp(info.isa, "scalar") == 0,
              "FATTN_CPU_ISA overrides it");
    set_environment("FATTN_CPU_ISA", NULL);
    const char *const sets[] = {"scalar", "avx2", "avx512",  "avx512bf16",
                                "amx",    "neon", "neonbf16"};
    bool exact = true;
    for (size_t n = 0; n < sizeof sets / sizeof *sets; n++) {
        options.isa = sets[n];
        exact = exact && (!info_with(&options, &info) || strcmp(info.isa, sets[n]) == 0);
    }
    tap_check(exact, "an instruction set that the machine lacks is refused");
    options = make_options();
    char cpus[32];
    snprintf(cpus, sizeof cpus, "%d,8189-8191", usable_cpu());
    options.cpus = cpus;
    tap_check(info_with(&options, &info) && info.units == 4, "as many threads as processors");
    set_environment("FATTN_NUM_THREADS", "1025");
    tap_check(answers("cpu", NULL, FATTN_BAD_ENVIRONMENT, "FATTN_NUM_THREADS"),
              "more threads than there may be");
    set_environment("FATTN_NUM_THREADS", NULL);
}

/* --- The library's own threads ---------------------------------------------------------------- */

static void check_own(void)
{
    fattn_device_options options = make_options();
    attend a;
    fattn_device *device = NULL;
    char cpu[16];
    snprintf(cpu, sizeof cpu, "%d", usable_cpu());
    options.threads = THREADS;
    options.cpus = cpu;
    make_problem(&a);
    bool right = fattn_device_open_with("cpu", &options, &device) == FATTN_OK &&
                 process_threads_are(1 + extra);
    tap_check(right, "no thread is made before there is work");
    right = attend_with(&a, device) == expected;
    tap_check(right && process_threads_are(THREADS + extra), "then there are %d", THREADS);
    int bound = 0, open = 0, own = 0;
    for (int n = 0; n < 10000 && own < THREADS - 1; n++) {
        usleep(1000); /* on a busy machine they start late */
        own = count_own(&bound, &open);
    }
    tap_check(own == THREADS - 1 && bound == own, "%d of them are where they may be", bound);
    tap_check(own == THREADS - 1 && open == 0, "no signal is delivered to them");
    fattn_cache_clear();
    fattn_device_close(device);
    tap_check(process_threads_are(1 + extra), "they end with their device");
    attend_free(&a);
}

/* Devices without options of their own share one pool, as large as the largest needs. */
static void check_shared(void)
{
    fattn_device *devices[2] = {NULL, NULL};
    attend a;
    bool right = true;
    make_problem(&a);
    for (int i = 0; i < 2; i++) {
        set_environment("FATTN_NUM_THREADS", i ? "4" : "3");
        right = fattn_device_open("cpu", &devices[i]) == FATTN_OK && right;
    }
    set_environment("FATTN_NUM_THREADS", NULL);
    for (int i = 0; i < 2; i++) {
        right = right && attend_with(&a, devices[i]) == expected;
        tap_check(right && process_threads_are(3 + i + extra), "device %d of two: %d threads", i,
                  3 + i);
    }
    fattn_cache_clear();
    fattn_device_close(devices[1]);
    tap_check(attend_with(&a, devices[0]) == expected && process_threads_are(4 + extra),
              "they stay while one of the devices does");
    fattn_cache_clear();
    fattn_device_close(devices[0]);
    tap_check(process_threads_are(1 + extra), "and end with the last");
    attend_free(&a);
}

/* --- Small problems --------------------------------------------------------------------------- */

static int planned(fattn_device *device, int64_t heads, int64_t rows, int64_t keys)
{
    attend a;
    fattn_plan *plan = NULL;
    attend_make(&a, FATTN_FORWARD, heads, rows, keys, 64);
    const bool made = fattn_plan_create(device, &a.problem, &plan) == FATTN_OK;
    const int workers = made ? plan->tiling.workers : -1;
    fattn_plan_destroy(plan);
    attend_free(&a);
    return workers;
}

/* The smallest problem that is shared is one for a few threads, however many there are. */
static void check_joining(void)
{
    enum { MANY = 64 };
    fattn_device_options options = make_options();
    fattn_device *device = NULL;
    options.threads = MANY;
    if (fattn_device_open_with("cpu", &options, &device)) {
        tap_bail(fattn_last_reason());
    }
    int workers = 1;
    for (int64_t keys = 1; workers == 1 && keys < 100000; keys += 1 + keys / 16) {
        workers = planned(device, MANY, 1, keys);
    }
    tap_check(workers > 1 && workers < MANY / 4, "the smallest problem of many: %d of %d threads",
              workers, MANY);
    fattn_device_close(device);
}

static void check_small(void)
{
    fattn_device_options options = make_options();
    fattn_device *device = NULL;
    attend a;
    options.threads = THREADS;
    if (fattn_device_open_with("cpu", &options, &device)) {
        tap_bail(fattn_last_reason());
    }
    tap_check(planned(device, 8, 1, 16) == 1, "decoding 16 keys is for one thread");
    tap_check(planned(device, 8, 512, 512) == THREADS, "512 rows of 512 keys are for all");
    int last = 1;
    bool rising = true;
    for (int64_t rows = 1; rows <= 512; rows *= 2) {
        const int workers = planned(device, 8, rows, rows);
        rising = rising && workers >= last && workers <= THREADS;
        last = workers;
    }
    tap_check(rising, "larger problems have more threads, up to the device's");
    attend_make(&a, FATTN_FORWARD, 8, 1, 16, 64);
    const bool right = attend_with(&a, device) != 0;
    tap_check(right && process_threads_are(1 + extra), "a small problem makes no thread");
    attend_free(&a);
    fattn_cache_clear();
    fattn_device_close(device);
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Whether a worker, without any other, takes items `first` and `second`, and then all others, each
 * once. */
static bool takes(int64_t count, int workers, fattn_cpu_share most, int worker, int first,
                  int second)
{
    fattn_cpu_deal deal;
    int times[64] = {0};
    int64_t item, taken = 0;
    fattn_cpu_deal_out(&deal, count, workers, most);
    fattn_cpu_items items = fattn_cpu_items_of(&deal, worker);
    bool right = fattn_cpu_upcoming(&items) == first;
    while (fattn_cpu_take(&items, &item) && item < 64) {
        right = right && (taken != 0 || item == first) && (taken != 1 || item == second);
        times[item]++;
        taken++;
    }
    for (int64_t i = 0; i < count; i++) {
        right = right && times[i] == 1;
    }
    return right && taken == count && fattn_cpu_upcoming(&items) == count &&
           !fattn_cpu_take(&items, &item);
}

typedef struct dealt {
    fattn_cpu_deal deal;
    atomic_int times[1000];
} dealt;

static void take_all(void *context, int64_t worker)
{
    dealt *const d = context;
    fattn_cpu_items items = fattn_cpu_items_of(&d->deal, (int)worker);
    for (int64_t item; fattn_cpu_take(&items, &item);) {
        atomic_fetch_add(&d->times[item], 1);
    }
}

static bool are_taken_once(int64_t count, int workers, int come)
{
    dealt d = {.deal.count = 0};
    bool right = true;
    fattn_cpu_deal_out(&d.deal, count, workers, FATTN_CPU_SEVERAL);
    run_on_threads(come, take_all, &d);
    for (int64_t i = 0; i < count; i++) {
        right = right && atomic_load(&d.times[i]) == 1;
    }
    return right;
}

static void check_items(void)
{
    tap_check(takes(10, 4, FATTN_CPU_SEVERAL, 2, 2, 6) && takes(10, 4, FATTN_CPU_SEVERAL, 3, 3, 7),
              "alike items: a worker begins with those of its number");
    tap_check(takes(4, 4, FATTN_CPU_ONE, 3, 3, 0), "one each: with the one of its number");
    tap_check(takes(5, 4, FATTN_CPU_ONE, 3, 0, 1) && takes(33, 4, FATTN_CPU_SEVERAL, 3, 0, 1) &&
                  takes(4, 4, FATTN_CPU_NONE, 3, 0, 1),
              "of more than its share, or none: in ascending order");
    tap_check(takes(3, 8, FATTN_CPU_SEVERAL, 7, 1, 2) && takes(1, 8, FATTN_CPU_ONE, 0, 0, 0) &&
                  takes(0, 8, FATTN_CPU_SEVERAL, 5, 0, 0),
              "fewer items than workers");
    tap_check(takes(60, 64, FATTN_CPU_SEVERAL, 63, 31, 0), "more workers than there are shares");
    bool right = true;
    for (int n = 0; n < 50; n++) {
        right = right && are_taken_once(1000, 200, 6) && are_taken_once(17, 6, 6) &&
                are_taken_once(40, 8, 5);
    }
    tap_check(right, "threads take each item once, also those of workers that do not come");
}

/* --- Peaks ------------------------------------------------------------------------------------ */

/* All threads measure a peak at once; a loop with a single thread must not wait for others. */
static bool measures(const fattn_device_options *options)
{
    static float data[1 << 18];
    fattn_device *device = NULL;
    if (fattn_device_open_with("cpu", options, &device)) {
        return false;
    }
    bool right = true;
    const fattn_peak *peak;
    for (int i = 0; (peak = device->backend->peak(device->impl, i)) != NULL; i++) {
        fattn_peak_reading reading;
        right = peak->measure(device->impl, peak, data, sizeof data, &reading) == FATTN_OK &&
                reading.rate > 0 && reading.rate < 1e18 && right;
        right = right && (peak->reads_memory || (reading.clock > 1e6 && reading.clock < 1e11));
    }
    fattn_device_close(device);
    return right;
}

static void check_peaks(void)
{
    loop l = {.order = FORWARDS};
    fattn_device_options options = make_options();
    options.threads = 2;
    tap_check(measures(&options), "peaks are measured on two threads");
    options.parallel_for = parallel_for;
    options.parallel_user = &l;
    tap_check(measures(&options), "and by a loop that has one");
}

/* --- Processors granted to the process -------------------------------------------------------- */

static void check_sets(void)
{
    const struct {
        const char *list;
        int64_t count; /* -1: none */
    } cases[] = {{"0", 1},         {"0-3", 4}, {"0-3,2-5", 6}, {"7,1,7", 2}, {"8191", 1},
                 {"0-8191", 8192}, {"", -1},   {"-1", -1},     {"1-", -1},   {"a", -1},
                 {"1 ", -1},       {"1,", -1}, {"8192", -1},   {"5-4", -1}};
    bool right = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fattn_cpu_set set = {{0}};
        const bool parsed = fattn_cpu_set_parse(&set, cases[i].list);
        right = right && parsed == (cases[i].count >= 0) &&
                (!parsed || fattn_cpu_set_count(&set) == cases[i].count);
    }
    tap_check(right, "lists of processors");
}

static void write_file(const char *root, const char *path, const char *text)
{
    char name[2 * FOLDER_PATH];
    snprintf(name, sizeof name, "%s%s", root, path);
    for (char *at = name + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        (void)mkdir(name, 0700);
        *at = '/';
    }
    FILE *const file = fopen(name, "w");
    if (!file || fputs(text, file) < 0 || fclose(file)) {
        tap_bail(name);
    }
}

/* A process's groups, and the available control group files. */
static void check_quota(const char *title, const char *groups, const char *const files[][2],
                        int64_t cpus)
{
    char root[FOLDER_PATH], command[FOLDER_PATH + 16];
    if (!folder_make(root, "check_team")) {
        tap_bail(root);
    }
    write_file(root, "/proc/self/cgroup", groups);
    for (int i = 0; files[i][0]; i++) {
        write_file(root, files[i][0], files[i][1]);
    }
    const int64_t found = fattn_cpu_quota(root);
    tap_check(found == cpus, "%s: %d processors, %d found", title, (int)cpus, (int)found);
    snprintf(command, sizeof command, "rm -r '%s'", root);
    if (system(command) != 0) {
        tap_bail(command);
    }
}

static void check_grants(void)
{
    check_sets();
    check_quota("no groups", "", (const char *const[][2]){{NULL, NULL}}, 0);
    check_quota(
        "no limit", "0::/a/b\n",
        (const char *const[][2]){{"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"}, {NULL, NULL}}, 0);
    check_quota(
        "a limit", "0::/a/b\n",
        (const char *const[][2]){{"/sys/fs/cgroup/a/b/cpu.max", "250000 100000\n"}, {NULL, NULL}},
        3);
    check_quota("less than a parent's limit", "0::/a/b\n",
                (const char *const[][2]){{"/sys/fs/cgroup/a/b/cpu.max", "200000 100000\n"},
                                         {"/sys/fs/cgroup/a/cpu.max", "800000 100000\n"},
                                         {NULL, NULL}},
                2);
    check_quota("a parent's limit", "0::/a/b\n",
                (const char *const[][2]){{"/sys/fs/cgroup/a/b/cpu.max", "800000 100000\n"},
                                         {"/sys/fs/cgroup/a/cpu.max", "200000 100000\n"},
                                         {NULL, NULL}},
                2);
    check_quota(
        "inside a container", "0::/../../elsewhere\n",
        (const char *const[][2]){{"/sys/fs/cgroup/cpu.max", "50000 100000\n"}, {NULL, NULL}}, 1);
    check_quota("the first version", "5:memory:/m\n4:cpu,cpuacct:/a\n",
                (const char *const[][2]){{"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000\n"},
                                         {"/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"},
                                         {NULL, NULL}},
                4);
    check_quota("the first version without a limit", "4:cpuacct,cpu:/\n",
                (const char *const[][2]){{"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                                         {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"},
                                         {NULL, NULL}},
                0);
    check_quota("another's limit", "4:cpuset:/a\n",
                (const char *const[][2]){{"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000\n"},
                                         {"/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"},
                                         {NULL, NULL}},
                0);
    tap_check(fattn_cpu_team_granted() >= 1, "the process is granted %d processors",
              (int)fattn_cpu_team_granted());
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "number") == 0) {
        return units_of_default() != atoi(argv[2]);
    }
    if (argc > 1 && strcmp(argv[1], "bound") == 0) {
        return run_bound();
    }
#ifdef _OPENMP
    if (argc > 3 && strcmp(argv[1], "narrowed") == 0) {
        return run_narrowed(atoi(argv[2]), atoi(argv[3]));
    }
#endif
    fattn_device_options options = make_options();
    extra = process_extra();
    options.threads = 1;
    expected = compute(&options);
    tap_check(expected != 0 && process_threads_are(1 + extra), "one thread");
    options.threads = THREADS;
    tap_check(compute(&options) == expected, "the library's threads: the bits of one thread");
    options.engine = FATTN_ENGINE_OWN;
    tap_check(compute(&options) == expected, "and by name");
    check_own();
    check_shared();
    check_small();
    check_joining();
    check_items();
    check_loops();
    check_wrong_options();
    check_foreign_options();
    check_options();
    check_memory();
    check_peaks();
    check_grants();
    check_openmp(); /* last, because its threads remain */
    return tap_done();
}
