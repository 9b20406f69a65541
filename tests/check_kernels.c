/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares every kernel row of every backend of this machine, or of the one that FATTN_BACKEND
 * names, with the oracle, on the random problems of `fattn check`. No kernel row escapes this test.
 *
 * usage: check_kernels [CASES [SEED]]
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "tests/device.h"
#include "tools/judge/trials.h"

static void check_backend(const char *name, int64_t cases, uint64_t seed)
{
    char command[64];
    trials t = {.prefix = "# ", .command = command, .seed = seed, .count = cases, .jobs = 4};
    snprintf(command, sizeof command, "fattn check --device %s", name);
    if (fattn_device_open(name, &t.device) != FATTN_OK || trials_open(&t, NULL) != FATTN_OK) {
        tap_check(false, "%s: %s", name, fattn_last_reason());
        fattn_device_close(t.device);
        return;
    }
    trials_run(&t);
    const trials_findings found = trials_report(&t);
    for (int n = 0; n < t.row_count; n++) {
        const trials_row *const row = &t.rows[n];
        char title[128];
        snprintf(title, sizeof title, "%s %s", name, row->kernel->name);
        if (row->missing) {
            tap_skip(title, row->missing);
        } else if (row->passed + row->failed == 0 && cases < TRIALS_SOME) {
            tap_skip(title, "none of so few problems is for it");
        } else {
            tap_check(row->failed == 0 && row->passed > 0, "%s: %lld of %lld cases fail", title,
                      (long long)row->failed, (long long)(row->passed + row->failed));
        }
    }
    tap_check(t.failed == 0, "%s: %lld of %lld cases fail, seed %llu", name, (long long)t.failed,
              (long long)cases, (unsigned long long)seed);
    tap_check(found.medians == 0, "%s: %d medians of errors are too large", name, found.medians);
    tap_check(found.gaps == 0, "%s: %d gaps in what the cases cover", name, found.gaps);
    trials_close(&t);
    fattn_device_close(t.device);
}

int main(int argc, char **argv)
{
    const int64_t cases = argc > 1 ? strtoll(argv[1], NULL, 10) : TRIALS_ENOUGH;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const char *const named = device_named();
    const fattn_backend *backend;
    if (device_absent(named)) {
        return 0;
    }
    setenv("FATTN_NUM_THREADS", "1", 0); /* cases already run in parallel */
    for (int i = 0; (backend = fattn_backend_at(i)) != NULL; i++) {
        if (named && strcmp(named, backend->name) != 0) {
            continue;
        }
        if (backend->count() > 0) {
            check_backend(backend->name, cases, seed);
        } else {
            tap_skip(backend->name, "no such device");
        }
    }
    return tap_done();
}
