/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ceiling of a benchmark: which peak loop of the device limits a case, its rate just before
 * each repetition, and whether the loop itself runs at the speed that the clock allows
 * (core/peak.h).
 */
#ifndef FATTN_TOOLS_CEILING_H
#define FATTN_TOOLS_CEILING_H

#include "core/peak.h"
#include "tools/bench/sweep.h"

typedef struct ceiling {
    fattn_device *device;
    const fattn_peak *peak;  /* NULL: the backend has none */
    int64_t processors;      /* how many a CPU device may keep busy; control groups may limit it */
    double share;            /* processors / units, at most 1 */
    fattn_peak_reading best; /* the reading with the most instructions per cycle so far */
} ceiling;

/* The first peak that limits the case on the kernel of this name. Arithmetic limits forward and
 * backward; reading keys and values limits decoding. */
ceiling ceiling_of(fattn_device *device, const fattn_device_info *about, const sweep_case *c,
                   const char *kernel);

/* Measures the loop on all of the device's units. The rate counts at most as many units as there
 * are processors: units that share a processor would each report all of it. data: what a decoding
 * kernel reads. */
fattn_status ceiling_measure(ceiling *ceil, const void *data, int64_t bytes,
                             fattn_peak_reading *reading);

/* Prints the loop's rate next to what the clock allows on stderr, and measures again for a while if
 * they differ. False if a fused loop stays over 3 % from a whole number of instructions per
 * cycle. */
bool ceiling_check(ceiling *ceil, const char *device_word);

#endif
