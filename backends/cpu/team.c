/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/team.h"

#include <sched.h>
#include <stddef.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#include <dlfcn.h>
#endif

#include "core/env.h"
#include "core/fork.h"
#include "core/status.h"

/* --- How many threads ------------------------------------------------------------------------- */

#ifdef _OPENMP
/* Adds the processors of the process. If OpenMP binds threads, the affinity of a thread is only its
 * own place, so the places are combined. */
static void add_allowed(fattn_cpu_set *set)
{
    const int places = omp_get_proc_bind() == omp_proc_bind_false ? 0 : omp_get_num_places();
    for (int place = 0; place < places; place++) {
        int ids[1024];
        const int count = omp_get_place_num_procs(place);
        if (count > 0 && count <= (int)(sizeof ids / sizeof ids[0])) {
            omp_get_place_proc_ids(place, ids);
            for (int i = 0; i < count; i++) {
                fattn_cpu_set_add(set, ids[i]);
            }
        }
    }
    if (fattn_cpu_set_count(set) == 0) {
        fattn_cpu_set_allowed(set);
    }
}

/* OpenMP's count of processors when this library was loaded. libgomp takes its number of threads
 * from the count when it is loaded itself, usually at the same time; omp_get_num_procs() follows
 * the affinity of the calling thread. */
static int counted_at_load;

__attribute__((constructor)) static void count_processors(void)
{
    counted_at_load = omp_get_num_procs();
}

/* OpenMP's number of threads. If that is merely its count of processors, and not what
 * OMP_NUM_THREADS says, at most what the process is granted: OpenMP does not know of control
 * groups, nor of an affinity that has changed since it was loaded. */
static int64_t default_threads(const fattn_env *env)
{
    const int64_t said = omp_get_max_threads(), granted = fattn_cpu_team_granted();
    const bool counted = said == omp_get_num_procs() || said == counted_at_load;
    return counted && said != env->openmp_threads && granted < said ? granted : said;
}

/* Whether a parallel region would have only one thread, because the caller is inside of one and
 * OpenMP nests no deeper. The other threads of the caller's region are busy anyway. */
static bool is_nested(const fattn_cpu_team *team)
{
    return team->from_openmp && omp_in_parallel() &&
           omp_get_active_level() >= omp_get_max_active_levels();
}
#else
static void add_allowed(fattn_cpu_set *set) { fattn_cpu_set_allowed(set); }

static int64_t default_threads(const fattn_env *env)
{
    (void)env;
    return fattn_cpu_team_granted();
}

static bool is_nested(const fattn_cpu_team *team)
{
    (void)team;
    return false;
}
#endif

int64_t fattn_cpu_team_granted(void)
{
    fattn_cpu_set set = {{0}};
    add_allowed(&set);
    return fattn_cpu_granted(&set);
}

/* --- Which threads ---------------------------------------------------------------------------- */

static void run_alone(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    (void)team;
    fattn_cpu_job_run_alone(job);
}

static void run_own(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    fattn_cpu_pool_run(team->pool, job);
}

/* Works on a board until its job is over: all phases. A thread that finds no item left in a phase
 * waits for the items that others have begun. */
static void work_off(fattn_cpu_board *board, int worker)
{
    for (int spins = 0; !fattn_cpu_board_over(board);) {
        if (fattn_cpu_board_work(board, worker) != FATTN_CPU_REFUSED) {
            spins = 0;
        } else if (++spins > 1000) {
            sched_yield();
        } else {
            fattn_cpu_pause();
        }
    }
}

typedef struct visitors {
    fattn_cpu_board board;
    atomic_bool owned; /* one thread has become the owner, even if a loop passes index 0 twice */
} visitors;

static void visit(void *context, int64_t index)
{
    visitors *const v = context;
    const bool owner = index == 0 && !atomic_exchange(&v->owned, true);
    work_off(&v->board, owner ? FATTN_CPU_OWNER : index > 0 ? (int)index : 1);
}

/* Relies on nothing but that parallel_for() returns after all calls have. They may come in any
 * order, one after another in one thread, or not at all: the caller finishes what is left. */
static void run_callers(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    visitors v = {.board.job = NULL};
    fattn_cpu_board_post(&v.board, job);
    team->parallel_for(team->parallel_user, job->workers, visit, &v);
    work_off(&v.board, FATTN_CPU_OWNER);
}

#ifdef _OPENMP
static void run_openmp(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    fattn_cpu_board board = {.job = NULL};
    /* Its OpenMP threads are the parent's, and waiting for them would never end. */
    if (fattn_fork_is_child()) {
        run_alone(team, job);
        return;
    }
    fattn_cpu_board_post(&board, job);
#pragma omp parallel num_threads(job->workers)
    work_off(&board, omp_get_thread_num());
}

static fattn_status open_openmp(fattn_cpu_team *team)
{
    team->run = run_openmp;
    return FATTN_OK;
}
#else
typedef struct joined {
    fattn_cpu_board board;
    int (*number)(void);
} joined;

/* The runtime numbers its threads in the same way in each region, so a thread finds its scratch,
 * and what it read last, in its cache. */
static void join(void *data)
{
    joined *const j = data;
    work_off(&j->board, j->number());
}

static void run_loaded(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    joined j = {.number = team->runtime.number};
    if (fattn_fork_is_child()) {
        run_alone(team, job);
        return;
    }
    fattn_cpu_board_post(&j.board, job);
    team->runtime.region(join, &j, (unsigned)job->workers, 0);
}

/* A build that links no OpenMP runtime uses one that the process has loaded, such as PyTorch's. */
static fattn_status open_openmp(fattn_cpu_team *team)
{
    static const char *const names[] = {"libgomp.so.1", "libiomp5.so", "libomp.so.5", "libomp.so"};
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        void *const runtime = dlopen(names[n], RTLD_LAZY | RTLD_NOLOAD); /* never closed */
        void *const region = runtime ? dlsym(runtime, "GOMP_parallel") : NULL;
        void *const number = runtime ? dlsym(runtime, "omp_get_thread_num") : NULL;
        if (region && number) {
            memcpy(&team->runtime.region, &region, sizeof region);
            memcpy(&team->runtime.number, &number, sizeof number);
            team->run = run_loaded;
            return FATTN_OK;
        }
    }
    return fattn_fail(
        FATTN_UNSUPPORTED,
        "engine is FATTN_ENGINE_OPENMP: this build links none, and the process loaded none");
}
#endif

void fattn_cpu_team_run(const fattn_cpu_team *team, fattn_cpu_job *job)
{
    (job->workers > 1 && !is_nested(team) ? team->run : run_alone)(team, job);
}

/* --- Opening ---------------------------------------------------------------------------------- */

static fattn_status open_pool(fattn_cpu_team *team, const fattn_device_options *options,
                              const fattn_cpu_set *cpus)
{
    const bool shared = !options->threads && !options->cpus;
    team->run = run_own;
    return fattn_cpu_pool_open(cpus, shared, &team->pool);
}

fattn_status fattn_cpu_team_open(fattn_cpu_team *team, const fattn_device_options *options)
{
    const fattn_env *env = NULL;
    fattn_cpu_set cpus = {{0}};
    fattn_status status = fattn_env_get(&env);
    if (status) {
        return status;
    }
    if (options->cpus && !fattn_cpu_set_parse(&cpus, options->cpus)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "cpus is \"%.64s\", not a list of processors such as 0-3,8, below %d",
                          options->cpus, FATTN_CPU_SET_SIZE);
    }
    if (options->cpus && !fattn_cpu_set_exists(&cpus)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "cpus is \"%.64s\": this machine has none of them", options->cpus);
    }
    int64_t threads = env->threads       ? env->threads
                      : options->threads ? options->threads
                      : options->cpus    ? fattn_cpu_set_count(&cpus)
                                         : default_threads(env);
    *team = (fattn_cpu_team){
        .threads = (int)(threads < FATTN_THREADS_MAX ? threads : FATTN_THREADS_MAX),
        .from_openmp = !env->threads && !options->threads && !options->cpus,
        .parallel_for = options->parallel_for,
        .parallel_user = options->parallel_user,
    };
    if (team->parallel_for) {
        team->run = run_callers;
        return FATTN_OK;
    }
    if (options->engine == FATTN_ENGINE_OPENMP) {
        return open_openmp(team);
    }
    if (!options->cpus) {
        add_allowed(&cpus);
    }
    return open_pool(team, options, &cpus);
}

void fattn_cpu_team_close(fattn_cpu_team *team)
{
    if (team->pool) {
        fattn_cpu_pool_close(team->pool);
    }
}
