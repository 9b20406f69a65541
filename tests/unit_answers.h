/* SPDX-License-Identifier: Apache-2.0 */
/* Assertions about a status and about fattn_last_reason(). */
#ifndef FATTN_TESTS_UNIT_ANSWERS_H
#define FATTN_TESTS_UNIT_ANSWERS_H

#include <criterion/criterion.h>
#include <string.h>

#include "fattn/fattn.h"

/* What a call answered, in the words of a failed assertion. */
#define ANSWERS(call, status)                                              \
    do {                                                                   \
        const fattn_status got_ = (call);                                  \
        cr_assert_eq(got_, status, #call " gives %s, not " #status ": %s", \
                     fattn_status_string(got_), fattn_last_reason());      \
    } while (0)
#define REASON_HAS(words)                                                               \
    cr_assert(strstr(fattn_last_reason(), words) != NULL, "reason \"%s\" lacks \"%s\"", \
              fattn_last_reason(), words)

#endif
