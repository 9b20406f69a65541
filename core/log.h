/* SPDX-License-Identifier: Apache-2.0 */
/* Lines for FATTN_VERBOSE, to stderr or to the caller's callback. */
#ifndef FATTN_CORE_LOG_H
#define FATTN_CORE_LOG_H

#include <stdbool.h>

#include "core/status.h"

/* Whether lines of this level (1 a plan, 2 why rows declined, 3 tensor statistics) are wanted. */
bool fattn_log_wants(int level);

/* Writes one line, to stderr behind "fattn: ". Call it only when fattn_log_wants(level). */
void fattn_log(const char *format, ...) FATTN_PRINTF(1, 2);

#endif
