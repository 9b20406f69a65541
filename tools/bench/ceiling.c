/* SPDX-License-Identifier: Apache-2.0 */
/* Ceilings, measured and checked; see ceiling.h. */
#include "tools/bench/ceiling.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backends/cpu/team.h"
#include "core/backend.h"

static bool limits(const fattn_peak *peak, const sweep_case *c, const char *kernel)
{
    return peak->reads_memory == (c->dir == SWEEP_DECODE) &&
           peak->dtypes & FATTN_DTYPE_BIT(c->problem.dtype) &&
           (!peak->kernels || strncmp(kernel, peak->kernels, strlen(peak->kernels)) == 0);
}

ceiling ceiling_of(fattn_device *device, const fattn_device_info *about, const sweep_case *c,
                   const char *kernel)
{
    fattn_limits granted = {0};
    if (about->host_memory) {
        device->backend->limits(device->impl, &granted);
    }
    const int64_t processors = granted.units ? granted.units : fattn_cpu_team_granted();
    const bool crowded = about->host_memory && about->units > processors;
    ceiling ceil = {.device = device,
                    .processors = processors,
                    .share = crowded ? (double)processors / (double)about->units : 1};
    const fattn_peak *row;
    for (int i = 0; !ceil.peak && (row = device->backend->peak(device->impl, i)); i++) {
        if (limits(row, c, kernel)) {
            ceil.peak = row;
        }
    }
    return ceil;
}

fattn_status ceiling_measure(ceiling *ceil, const void *data, int64_t bytes,
                             fattn_peak_reading *reading)
{
    const fattn_status status =
        ceil->peak->measure(ceil->device->impl, ceil->peak, data, bytes, reading);
    if (!ceil->peak->reads_memory) {
        reading->rate *= ceil->share;
    }
    if (status == FATTN_OK && !(reading->issue <= ceil->best.issue)) {
        ceil->best = *reading;
    }
    return status;
}

/* Instructions per cycle of an undisturbed loop: one per port, or one every few cycles. */
static double ports(const ceiling *ceil)
{
    const double issue = ceil->best.issue;
    return issue >= 0.75 || !(issue > 0) ? fmax(1, round(issue)) : 1 / round(1 / issue);
}

static bool within(const ceiling *ceil)
{
    const double share = ceil->best.issue / ports(ceil);
    return share >= 0.97 && share <= 1.03;
}

bool ceiling_check(ceiling *ceil, const char *device_word)
{
    enum {
        MORE = 200
    }; /* measurements of about a millisecond: other work may take the core for a while */
    const fattn_peak *const peak = ceil->peak;
    const bool fused = peak->flops > 1;
    if (peak->reads_memory) {
        return true;
    }
    for (int i = 0; i < MORE && fused && !within(ceil); i++) {
        fattn_peak_reading reading = {0};
        if (ceil->best.issue > ports(ceil)) {
            ceil->best.issue = 0; /* the clock measurement was disturbed */
        }
        if (ceiling_measure(ceil, NULL, 0, &reading) != FATTN_OK) {
            return false;
        }
    }
    const double clock = ceil->best.clock * 1e-9, share = ceil->best.issue / ports(ceil);
    const double allowed = ports(ceil) * peak->lanes * peak->flops * clock;
    fprintf(stderr, "%s: %s: %.1f GFLOP/s a unit; ", device_word, peak->name, share * allowed);
    fprintf(stderr, "%.3g ports x %d lanes x %d x %.3f GHz = %.1f; %.3f of it%s\n", ports(ceil),
            peak->lanes, peak->flops, clock, allowed, share,
            within(ceil) ? ""
            : fused      ? ", NOT within 3 %"
                         : " (nothing is fused)");
    return within(ceil) || !fused;
}
