/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes and reasons, and variables of the environment. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/env.h"
#include "core/status.h"
#include "tests/environment.h"
#include "tests/unit_answers.h"

Test(status, every_code_has_its_name)
{
#define NAMED(code) \
    {               \
        code, #code \
    }
    static const struct {
        fattn_status status;
        const char *name;
    } all[] = {
        NAMED(FATTN_OK),
        NAMED(FATTN_INVALID_ARGUMENT),
        NAMED(FATTN_INVALID_STRUCT),
        NAMED(FATTN_INVALID_SHAPE),
        NAMED(FATTN_INVALID_STRIDE),
        NAMED(FATTN_NULL_POINTER),
        NAMED(FATTN_MISALIGNED),
        NAMED(FATTN_OVERLAP),
        NAMED(FATTN_OVERFLOW),
        NAMED(FATTN_INVALID_DATA),
        NAMED(FATTN_UNSUPPORTED),
        NAMED(FATTN_NO_DEVICE),
        NAMED(FATTN_UNKNOWN_DEVICE),
        NAMED(FATTN_DEVICE_ERROR),
        NAMED(FATTN_OUT_OF_MEMORY),
        NAMED(FATTN_BAD_ENVIRONMENT),
        NAMED(FATTN_RANK_LOST),
        NAMED(FATTN_RANK_TIMEOUT),
        NAMED(FATTN_RANKS_DISAGREE),
    };
#undef NAMED
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        cr_assert_str_eq(fattn_status_string(all[i].status), all[i].name);
    }
    cr_assert_str_eq(fattn_status_string((fattn_status)-1), "unknown fattn_status");
    cr_assert_str_eq(fattn_version(), FATTN_VERSION_STRING);
    cr_assert_str_eq(fattn_last_reason(), "");
}

Test(env, bad_values_are_errors_that_name_them)
{
    static const char *const bad[][2] = {
        {"FATTN_VERBOSE", "4"},
        {"FATTN_VERBOSE", "yes"},
        {"FATTN_VERBOSE", ""},
        {"FATTN_NUM_THREADS", "0"},
        {"FATTN_NUM_THREADS", "-1"},
        {"FATTN_NUM_THREADS", "4x"},
        {"FATTN_NUM_THREADS", " 4"},
        {"FATTN_TILE", "64"},
        {"FATTN_TILE", "64,0"},
        {"FATTN_TILE", "64,32,1"},
        {"FATTN_SRAM", "1e6"},
        {"FATTN_SPLITS", "0"},
        {"FATTN_SRAM", "99999999999999999999999"},
        {"FATTN_KERNEL", ""},
        {"FATTN_CPU_ISA", ""},
        {"FATTN_CPU_ISA", "nonsense"}, /* of a backend that is not opened */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        set_environment(bad[i][0], bad[i][1]);
        fattn_device *device = (fattn_device *)(uintptr_t)1;
        ANSWERS(fattn_device_open("reference", &device), FATTN_BAD_ENVIRONMENT);
        cr_assert_null(device);
        REASON_HAS(bad[i][0]);
        REASON_HAS(bad[i][1]);
        set_environment(bad[i][0], NULL);
    }
    char longest[200];
    memset(longest, 'x', sizeof longest);
    longest[199] = '\0';
    set_environment("FATTN_BACKEND", longest);
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open(NULL, &device), FATTN_BAD_ENVIRONMENT);
}

Test(env, values_are_read)
{
    set_environment("FATTN_TILE", "64,32");
    set_environment("FATTN_NUM_THREADS", "7");
    set_environment("FATTN_SRAM", "1048576");
    set_environment("FATTN_SPLITS", "3");
    set_environment("FATTN_CPU_ISA", "scalar");
    const fattn_env *env = NULL;
    ANSWERS(fattn_env_get(&env), FATTN_OK);
    cr_assert_eq(env->tile.br, 64);
    cr_assert_eq(env->tile.bc, 32);
    cr_assert_eq(env->threads, 7);
    cr_assert_eq(env->sram, 1048576);
    cr_assert_eq(env->splits, 3);
    cr_assert_null(env->kernel);
    const char *isa = NULL;
    for (int i = 0; fattn_backend_at(i); i++) {
        const fattn_env_variable *const variable = fattn_backend_at(i)->variable;
        if (variable && strcmp(variable->name, "FATTN_CPU_ISA") == 0) {
            isa = fattn_env_own(variable);
        }
    }
    cr_assert_not_null(isa);
    cr_assert_str_eq(isa, "scalar");
}

static void count_strangers(void *user, const char *line)
{
    int *const told = user;
    told[0] += strstr(line, "FATTN_NUM_THREAD") != NULL && strstr(line, "FATTN_BAKEND") != NULL;
    told[1] += strstr(line, "FATTN_TILE") != NULL || strstr(line, "MY_FATTN") != NULL;
    for (const char *c = line; *c; c++) {
        told[2] += *c < ' ' || *c > '~';
    }
}

/* OpenMP's own variable: never an error, and a count of processors where it is no number. */
Test(env, number_of_openmp_is_that_of_the_outermost_region)
{
    static const struct {
        const char *text;
        int64_t number;
    } said[] = {{"8", 8}, {" 8", 8}, {"8,2", 8},     {"8, 2", 8},
                {"", 0},  {"0", 0},  {"several", 0}, {"99999999999", 0}};
    for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
        set_environment("OMP_NUM_THREADS", said[i].text);
        const fattn_env *env = NULL;
        ANSWERS(fattn_env_get(&env), FATTN_OK);
        cr_expect_eq(env->openmp_threads, said[i].number, "%s", said[i].text);
    }
    set_environment("OMP_NUM_THREADS", NULL);
}

Test(env, misspelt_names_are_told_once)
{
    int told[3] = {0};
    fattn_device *device = NULL;
    fattn_set_log_callback(count_strangers, told);
    setenv("FATTN_NUM_THREAD", "4", 1);
    setenv("FATTN_BAKEND\033", "cpu", 1);
    setenv("MY_FATTN_THING", "1", 1);
    set_environment("FATTN_TILE", "64,64");
    ANSWERS(fattn_device_open("reference", &device), FATTN_OK);
    fattn_device_close(device);
    cr_assert_eq(told[0], 0, "not at FATTN_VERBOSE 0");
    set_environment("FATTN_VERBOSE", "1");
    for (int n = 0; n < 3; n++) {
        ANSWERS(fattn_device_open("reference", &device), FATTN_OK);
        fattn_device_close(device);
    }
    cr_assert(told[0] == 1 && told[1] == 0 && told[2] == 0, "told %d times, %d known, %d controls",
              told[0], told[1], told[2]);
    unsetenv("FATTN_NUM_THREAD");
    unsetenv("FATTN_BAKEND\033");
    set_environment("FATTN_VERBOSE", NULL);
    fattn_set_log_callback(NULL, NULL);
}

/* Cleaning up calls what cleans up after its own failure. */
Test(status, a_hold_inside_another_does_not_end_it)
{
    (void)fattn_fail(FATTN_OVERLAP, "the first failure");
    fattn_reason_hold(FATTN_OVERLAP);
    (void)fattn_fail(FATTN_OVERFLOW, "the second");
    fattn_reason_hold(FATTN_OVERFLOW);
    fattn_reason_let();
    fattn_reason_hold(FATTN_OK);
    fattn_reason_let();
    (void)fattn_fail(FATTN_OVERFLOW, "the third");
    fattn_reason_let();
    cr_assert_str_eq(fattn_last_reason(), "the first failure");

    fattn_reason_hold(FATTN_OK); /* keeps nothing: what is held inside it is */
    (void)fattn_fail(FATTN_OVERFLOW, "the fourth");
    fattn_reason_hold(FATTN_OVERFLOW);
    (void)fattn_fail(FATTN_OVERLAP, "the fifth");
    fattn_reason_let();
    cr_assert_str_eq(fattn_last_reason(), "the fourth");
    (void)fattn_fail(FATTN_OVERLAP, "the sixth");
    fattn_reason_let();
    cr_assert_str_eq(fattn_last_reason(), "the sixth");
}

Test(status, reasons_are_printable)
{
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open("cp\033[2Ju\n\x9b\x7f", &device), FATTN_UNKNOWN_DEVICE);
    REASON_HAS("cp?[2Ju???");
    for (const char *c = fattn_last_reason(); *c; c++) {
        cr_assert(*c >= ' ' && *c <= '~');
    }
}
