/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ceiling of a benchmark: which peak loop of the device limits a case, its rate just before
 * each repetition, and whether the loop itself can be believed (core/peak.h).
 */
#ifndef FATTN_TOOLS_CEILING_H
#define FATTN_TOOLS_CEILING_H

#include "core/peak.h"
#include "tools/sweep.h"

typedef struct ceiling {
    fattn_device *device;
    const fattn_peak *peak;  /* NULL: the backend has none */
    double share;            /* of the units' rates together that the processors have: 1 or less */
    fattn_peak_reading best; /* the reading with the most instructions a cycle so far */
} ceiling;

/* The first peak that limits the case, run by the row of this name. Arithmetic limits forward and
 * backward, reading keys and values limits decoding. */
ceiling ceiling_of(fattn_device *device, const fattn_device_info *about, const sweep_case *c,
                   const char *kernel);

/* Measures the loop on all of the device's units, but counts no more of them than there are
 * processors: those that share one each measure all of it, in turn. data is what a decoding kernel
 * reads. */
fattn_status ceiling_measure(ceiling *ceil, const void *data, int64_t bytes,
                             fattn_peak_reading *reading);

/* Prints the loop beside what the clock allows on stderr, measuring on for a while when they are
 * apart. False when a fused loop stays over 3 % from a whole number of instructions a cycle. */
bool ceiling_check(ceiling *ceil, const char *device_word);

#endif
