/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* _SC_PHYS_PAGES */

#include "backends/cpu/cpuid.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *fattn_cpuid_scalar(void) { return NULL; }

/* The first line of a file below Linux's description of the caches of core 0. */
static int read_cache(int index, const char *field, char *line, int size)
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, field);
    FILE *const file = fopen(path, "r");
    if (!file) { return 0; }
    const int read = fgets(line, size, file) != NULL;
    fclose(file);
    return read;
}

int64_t fattn_cpuid_cache(int level)
{
    char line[32];
    for (int index = 0; read_cache(index, "level", line, sizeof line); index++) {
        int found = 0;
        long long size = 0;
        char unit = 'K';
        if (sscanf(line, "%d", &found) != 1 || found != level) { continue; }
        if (!read_cache(index, "type", line, sizeof line) || line[0] == 'I') { continue; }
        if (read_cache(index, "size", line, sizeof line) &&
            sscanf(line, "%lld%c", &size, &unit) >= 1 && size > 0 && size < 1 << 20) {
            return (int64_t)size << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0);
        }
    }
    return 0;
}

int64_t fattn_cpuid_memory(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (int64_t)pages * size : 0;
}

void fattn_cpuid_name(char *name, size_t size)
{
    char line[256];
    FILE *const file = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "CPU");
    while (file && fgets(line, sizeof line, file)) {
        const char *const colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " "));
            break;
        }
    }
    if (file) { fclose(file); }
}
