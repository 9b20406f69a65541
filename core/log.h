/* SPDX-License-Identifier: Apache-2.0 */
/* The lines that FATTN_VERBOSE asks for, to stderr or to the caller's callback. */
#ifndef FATTN_CORE_LOG_H
#define FATTN_CORE_LOG_H

#include <stdbool.h>

#include "core/status.h"

/* Whether FATTN_VERBOSE asks for lines of this level: 1 plans, 2 why kernels were not chosen, 3
 * tensor statistics. */
bool fattn_log_wants(int level);

/* Writes one line; on stderr it begins with "fattn: ". Call it only if fattn_log_wants(level). */
void fattn_log(const char *format, ...) FATTN_PRINTF(1, 2);

#endif
