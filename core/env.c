/* SPDX-License-Identifier: Apache-2.0 */
#include "core/env.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/log.h"
#include "core/status.h"

#define VALUE_MAX 128 /* bytes of a value, the terminator included */

#define DIGITS(number) TEXT(number)
#define TEXT(token) #token

static pthread_once_t once = PTHREAD_ONCE_INIT;
static fattn_env env;
static char texts[2][VALUE_MAX]; /* copies: the process may change its environment later */
static char error[320];          /* the reason of FATTN_BAD_ENVIRONMENT, or empty */
static char unknown_names[256];  /* FATTN_* names that are not in the tables, truncated */
static int warned;               /* atomic: a line about unknown_names was logged */

extern char **environ;

/* A whole decimal number in low..high. */
static bool parse_number(const char *text, int64_t low, int64_t high, const char **end,
                         int64_t *number)
{
    char *stop = NULL;
    errno = 0;
    const long long value = strtoll(text, &stop, 10);
    if (stop == text || errno || value < low || value > high || text[0] < '0' || text[0] > '9') {
        return false;
    }
    *end = stop;
    *number = value;
    return true;
}

static bool read_count(const char *text, void *field)
{
    const char *end = NULL;
    return parse_number(text, 1, INT64_C(1) << 40, &end, field) && !*end;
}

static bool read_threads(const char *text, void *field)
{
    const char *end = NULL;
    return parse_number(text, 1, FATTN_THREADS_MAX, &end, field) && !*end;
}

static bool read_verbose(const char *text, void *field)
{
    const char *end = NULL;
    int64_t level = 0;
    if (!parse_number(text, 0, 3, &end, &level) || *end) {
        return false;
    }
    *(int *)field = (int)level;
    return true;
}

static bool read_tile(const char *text, void *field)
{
    fattn_tile *const tile = field;
    const char *end = NULL;
    return parse_number(text, 1, INT64_C(1) << 20, &end, &tile->br) && *end == ',' &&
           parse_number(end + 1, 1, INT64_C(1) << 20, &end, &tile->bc) && !*end;
}

static bool read_text(const char *text, void *field, char *copy)
{
    const size_t length = strlen(text);
    if (length == 0 || length >= VALUE_MAX) {
        return false;
    }
    memcpy(copy, text, length + 1);
    *(const char **)field = copy;
    return true;
}

static bool read_backend(const char *text, void *field) { return read_text(text, field, texts[0]); }

static bool read_kernel(const char *text, void *field) { return read_text(text, field, texts[1]); }

static const struct {
    const char *name;
    bool (*read)(const char *text, void *field);
    void *field;
    const char *expected;
} variables[] = {
    {"FATTN_BACKEND", read_backend, &env.backend, "a device's name"},
    {"FATTN_KERNEL", read_kernel, &env.kernel, "the name of a kernel"},
    {"FATTN_TILE", read_tile, &env.tile, "br,bc"},
    {"FATTN_NUM_THREADS", read_threads, &env.threads,
     "a number of threads, 1 to " DIGITS(FATTN_THREADS_MAX)},
    {"FATTN_SRAM", read_count, &env.sram, "a number of bytes, 1 or more"},
    {"FATTN_SPLITS", read_count, &env.splits, "a number of splits, 1 or more"},
    {"FATTN_VERBOSE", read_verbose, &env.verbose, "0, 1, 2 or 3"},
};

/* The backends' own variables. */
#define OWN_MAX 8
static struct {
    const fattn_env_variable *variable;
    const char *value; /* NULL when unset */
    char text[VALUE_MAX];
} own[OWN_MAX];

const char *fattn_env_own(const fattn_env_variable *variable)
{
    const char *value = NULL;
    for (int i = 0; i < OWN_MAX; i++) {
        value = own[i].variable == variable ? own[i].value : value;
    }
    return value;
}

static bool is_variable(const char *name, size_t length)
{
    for (int i = 0; i < OWN_MAX; i++) {
        const fattn_env_variable *const variable = own[i].variable;
        if (variable && strlen(variable->name) == length &&
            !strncmp(variable->name, name, length)) {
            return true;
        }
    }
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        if (strlen(variables[i].name) == length && !strncmp(variables[i].name, name, length)) {
            return true;
        }
    }
    return false;
}

/* Lists FATTN_* names that no table has, so that a misspelt one is not ignored silently. */
static void find_unknown_names(void)
{
    static const char prefix[] = "FATTN_";
    size_t used = 0;
    unknown_names[0] = '\0';
    for (char **at = environ; at && *at && used < sizeof unknown_names; at++) {
        const size_t length = strcspn(*at, "=");
        if (strncmp(*at, prefix, sizeof prefix - 1) == 0 && !is_variable(*at, length)) {
            used += (size_t)snprintf(unknown_names + used, sizeof unknown_names - used, "%s%.*s",
                                     used ? ", " : "", (int)length, *at);
        }
    }
}

static void set_error(const char *name, const char *text, const char *expected)
{
    snprintf(error, sizeof error, "%s is \"%.100s\", not %s", name, text, expected);
}

static void read_own(void)
{
    memset(own, 0, sizeof own);
    for (int i = 0; i < OWN_MAX && fattn_backend_at(i); i++) {
        const fattn_env_variable *const variable = fattn_backend_at(i)->variable;
        const char *const text = variable ? getenv(variable->name) : NULL;
        own[i].variable = variable;
        char expected[128] = "a word";
        if (text && (!read_text(text, &own[i].value, own[i].text) ||
                     !variable->takes(text, expected, sizeof expected))) {
            set_error(variable->name, text, expected);
            return;
        }
    }
    assert(!fattn_backend_at(OWN_MAX));
}

/* The number before the first comma of OMP_NUM_THREADS: that of the outermost parallel region. */
static int64_t read_openmp_threads(void)
{
    const char *const text = getenv("OMP_NUM_THREADS");
    const char *end = NULL;
    int64_t number = 0;
    return text && parse_number(text + strspn(text, " "), 1, INT32_MAX, &end, &number) ? number : 0;
}

static void read_environment(void)
{
    memset(&env, 0, sizeof env);
    env.openmp_threads = read_openmp_threads();
    error[0] = '\0';
    warned = 0;
    read_own();
    find_unknown_names();
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        const char *const text = getenv(variables[i].name);
        if (text && !variables[i].read(text, variables[i].field)) {
            set_error(variables[i].name, text, variables[i].expected);
            return;
        }
    }
}

fattn_status fattn_env_get(const fattn_env **result)
{
    pthread_once(&once, read_environment);
    *result = &env;
    if (unknown_names[0] && env.verbose >= 1 &&
        !__atomic_exchange_n(&warned, 1, __ATOMIC_RELAXED)) {
        fattn_log("the environment has %s, which this library does not know", unknown_names);
    }
    return error[0] ? fattn_fail(FATTN_BAD_ENVIRONMENT, "%s", error) : FATTN_OK;
}

void fattn_env_reload(void)
{
    pthread_once(&once, read_environment);
    read_environment();
}
