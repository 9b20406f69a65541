/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_getaffinity */

#include "backends/cpu/grant.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* --- Sets of processors ----------------------------------------------------------------------- */

void fattn_cpu_set_add(fattn_cpu_set *set, int64_t cpu)
{
    if (cpu >= 0 && cpu < FATTN_CPU_SET_SIZE) {
        set->bits[cpu / 64] |= UINT64_C(1) << cpu % 64;
    }
}

int64_t fattn_cpu_set_count(const fattn_cpu_set *set)
{
    int64_t count = 0;
    for (int i = 0; i < FATTN_CPU_SET_SIZE / 64; i++) {
        count += __builtin_popcountll(set->bits[i]);
    }
    return count;
}

/* Parses a decimal number below FATTN_CPU_SET_SIZE. Returns what follows it, or NULL if there is
 * none. */
static const char *parse_cpu(const char *text, int64_t *cpu)
{
    const char *const first = text;
    *cpu = 0;
    for (; *text >= '0' && *text <= '9' && *cpu < FATTN_CPU_SET_SIZE; text++) {
        *cpu = 10 * *cpu + (*text - '0');
    }
    return text > first && *cpu < FATTN_CPU_SET_SIZE ? text : NULL;
}

bool fattn_cpu_set_parse(fattn_cpu_set *set, const char *list)
{
    for (;; list++) {
        int64_t first, last;
        list = parse_cpu(list, &first);
        last = first;
        if (list && *list == '-') {
            list = parse_cpu(list + 1, &last);
        }
        if (!list || last < first) {
            return false;
        }
        for (int64_t cpu = first; cpu <= last; cpu++) {
            fattn_cpu_set_add(set, cpu);
        }
        if (*list != ',') {
            return *list == '\0';
        }
    }
}

/* Adds the processors of the machine. If the kernel's list cannot be read, adds as many as the C
 * library counts. */
static void add_online(fattn_cpu_set *set)
{
    char list[256];
    FILE *const file = fopen("/sys/devices/system/cpu/online", "r");
    const bool known = file && fscanf(file, "%255s", list) == 1 && fattn_cpu_set_parse(set, list);
    if (file) {
        fclose(file);
    }
    const long counted = known ? 0 : sysconf(_SC_NPROCESSORS_CONF);
    for (long cpu = 0; cpu < counted && cpu < FATTN_CPU_SET_SIZE; cpu++) {
        fattn_cpu_set_add(set, cpu);
    }
}

bool fattn_cpu_set_exists(const fattn_cpu_set *set)
{
    fattn_cpu_set online = {{0}};
    add_online(&online);
    bool found = fattn_cpu_set_count(&online) == 0;
    for (int n = 0; n < FATTN_CPU_SET_SIZE / 64; n++) {
        found = found || (set->bits[n] & online.bits[n]);
    }
    return found;
}

#ifdef __linux__
/* Adds the processors that a thread may run on. thread: 0 is the calling thread */
static void add_affinity(fattn_cpu_set *set, pid_t thread)
{
    union {
        cpu_set_t first; /* the system's type, which may be smaller */
        uint64_t bits[FATTN_CPU_SET_SIZE / 64];
    } mask;
    memset(&mask, 0, sizeof mask);
    if (sched_getaffinity(thread, sizeof mask, &mask.first) == 0) {
        for (int cpu = 0; cpu < FATTN_CPU_SET_SIZE; cpu++) {
            if (CPU_ISSET_S(cpu, sizeof mask, &mask.first)) {
                fattn_cpu_set_add(set, cpu);
            }
        }
    }
}

void fattn_cpu_set_own(fattn_cpu_set *set) { add_affinity(set, 0); }

void fattn_cpu_set_allowed(fattn_cpu_set *set)
{
    add_affinity(set, 0);
    add_affinity(set, getpid());
}
#else
void fattn_cpu_set_own(fattn_cpu_set *set) { (void)set; }

void fattn_cpu_set_allowed(fattn_cpu_set *set) { (void)set; }
#endif

/* --- Control groups --------------------------------------------------------------------------- */

enum { PATH_SIZE = 1024 };

/* Reads at most two numbers from a file that holds nothing else. Returns how many there were. */
static int read_numbers(const char *path, long long numbers[2])
{
    FILE *const file = fopen(path, "r");
    const int read = file ? fscanf(file, "%lld %lld", &numbers[0], &numbers[1]) : 0;
    if (file) {
        fclose(file);
    }
    return read;
}

/* The fewest processors that the group at `path` below `mount`, or one of its parents, grants; 0 if
 * none sets a limit. A container may not see the path of its group; its own group is then at the
 * root, where this search ends. Shortens `path`. */
static int64_t quota_of(const char *mount, char *path, bool second_version)
{
    int64_t least = 0;
    for (;;) {
        char file[2 * PATH_SIZE];
        long long numbers[2] = {-1, -1};
        if (second_version) { /* "200000 100000", or "max 100000" */
            snprintf(file, sizeof file, "%s%s/cpu.max", mount, path);
            (void)read_numbers(file, numbers);
        } else {
            long long period[2] = {-1, -1};
            snprintf(file, sizeof file, "%s%s/cpu.cfs_quota_us", mount, path);
            (void)read_numbers(file, numbers);
            snprintf(file, sizeof file, "%s%s/cpu.cfs_period_us", mount, path);
            (void)read_numbers(file, period);
            numbers[1] = period[0];
        }
        if (numbers[0] > 0 && numbers[1] > 0) {
            const int64_t cpus = (numbers[0] - 1) / numbers[1] + 1;
            least = least && least < cpus ? least : cpus;
        }
        char *const end = strrchr(path, '/');
        if (!end) {
            return least;
        }
        *end = '\0';
    }
}

/* Whether a list such as "cpu,cpuacct" has "cpu" in it. */
static bool names_cpu(const char *list)
{
    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
        if (strncmp(list, "cpu", 3) == 0 && (list[3] == '\0' || list[3] == ',')) {
            return true;
        }
    }
    return false;
}

/* Lines of /proc/self/cgroup are "0::/path" in version 2 of control groups and
 * "4:cpu,cpuacct:/path" in version 1, whose folder is also reachable as "cpu". */
int64_t fattn_cpu_quota(const char *root)
{
    char name[PATH_SIZE], line[PATH_SIZE];
    int64_t least = 0;
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    FILE *const file = fopen(name, "r");
    while (file && fgets(line, sizeof line, file)) {
        char *const controllers = strchr(line, ':');
        char *const path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) {
            continue;
        }
        line[strcspn(line, "\n")] = '\0';
        *path = '\0';
        const bool second_version = controllers[1] == '\0';
        if (second_version || names_cpu(controllers + 1)) {
            char mount[PATH_SIZE];
            snprintf(mount, sizeof mount, "%.900s/sys/fs/cgroup%s", root,
                     second_version ? "" : "/cpu");
            const int64_t cpus = quota_of(mount, path + 1, second_version);
            least = cpus && (!least || cpus < least) ? cpus : least;
        }
    }
    if (file) {
        fclose(file);
    }
    return least;
}

int64_t fattn_cpu_granted(const fattn_cpu_set *allowed)
{
    const int64_t count = fattn_cpu_set_count(allowed), quota = fattn_cpu_quota("");
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    const int64_t cpus = count ? count : online > 0 ? online : 1;
    return quota && quota < cpus ? quota : cpus;
}
