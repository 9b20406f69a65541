/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "core/backend.h"
#include "core/env.h"
#include "core/status.h"

#define FATTN_BACKEND(name) extern const fattn_backend fattn_backend_##name;
#include "core/backends.inc"
#undef FATTN_BACKEND

#define FATTN_BACKEND(name) &fattn_backend_##name,
static const fattn_backend *const backends[] = {
#include "core/backends.inc"
};
#undef FATTN_BACKEND
#define BACKEND_COUNT ((int)(sizeof backends / sizeof backends[0]))

const fattn_backend *fattn_backend_at(int i)
{
    return i >= 0 && i < BACKEND_COUNT ? backends[i] : NULL;
}

const fattn_backend *fattn_backend_oracle(void)
{
    int i = 0;
    while (!backends[i]->by_name || !backends[i]->host_memory) {
        i++;
    }
    return backends[i];
}

const char *fattn_backend_name(int i)
{
    const fattn_backend *const backend = fattn_backend_at(i);
    return backend ? backend->name : NULL;
}

static const fattn_backend *find(const char *name, size_t length)
{
    for (int i = 0; i < BACKEND_COUNT; i++) {
        if (strlen(backends[i]->name) == length && memcmp(backends[i]->name, name, length) == 0) {
            return backends[i];
        }
    }
    return NULL;
}

int fattn_device_count(const char *name)
{
    const fattn_backend *const backend = name ? find(name, strlen(name)) : NULL;
    return backend ? backend->count() : 0;
}

/* Writes the names of this build's backends, as in "cpu, reference". */
static const char *list_names(char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < BACKEND_COUNT && used < size; i++) {
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", backends[i]->name);
    }
    return text;
}

/* The digits after "name:", below 10^6; -1 for anything else. */
static int parse_ordinal(const char *digits)
{
    int value = 0;
    if (!*digits || strlen(digits) > 6) {
        return -1;
    }
    for (; *digits; digits++) {
        if (*digits < '0' || *digits > '9') {
            return -1;
        }
        value = 10 * value + (*digits - '0');
    }
    return value;
}

fattn_status fattn_backend_find(const char *spec, const fattn_backend **backend, int *ordinal)
{
    const fattn_env *env = NULL;
    const fattn_status status = fattn_env_get(&env);
    if (status) {
        return status;
    }
    const char *const source = spec ? "device" : "FATTN_BACKEND";
    if (!spec) {
        spec = env->backend ? env->backend : "auto";
    }
    if (strcmp(spec, "auto") == 0) {
        *backend = NULL;
        return FATTN_OK;
    }
    const size_t length = strcspn(spec, ":");
    const fattn_backend *const found = find(spec, length);
    const int number = spec[length] ? parse_ordinal(spec + length + 1) : 0;
    if (!found || number < 0) {
        char names[128];
        return fattn_fail(FATTN_UNKNOWN_DEVICE,
                          "%s is \"%.64s\": this build has auto and, with or without :number, %s",
                          source, spec, list_names(names, sizeof names));
    }
    const int count = found->count();
    if (number >= count && count > 0) { /* a backend without devices says why when it is opened */
        return fattn_fail(FATTN_NO_DEVICE, "%s is \"%.64s\": backend %s has %d device%s", source,
                          spec, found->name, count, count == 1 ? "" : "s");
    }
    *backend = found;
    *ordinal = number;
    return FATTN_OK;
}
