/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a check of a plain C test program: each that does not hold is printed as a remark, and
 * the check, one line of TAP, fails if one of its parts did. */
#ifndef FATTN_TESTS_EXPECT_H
#define FATTN_TESTS_EXPECT_H

#include <stdbool.h>

#include "core/status.h"

/* Begins a check. Remarks begin with its name, which must last. */
void expect_begin(const char *check);

/* Prints the sentence if it does not hold. Returns holds. */
bool expect(bool holds, const char *format, ...) FATTN_PRINTF(2, 3);

bool expect_ok(fattn_status status, const char *what);

/* Whether all parts since expect_begin() hold. */
bool expect_held(void);

/* Whether the last error message has these words. */
bool expect_says(const char *words);

#endif
