/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn info`: the build, the machine, and what each kernel supports. The support matrix is read
 * from the kernel tables that the planner uses, so it cannot disagree with what runs.
 */
#define _DEFAULT_SOURCE /* the cache sizes of sysconf */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/feature.h"
#include "core/status.h"
#include "tools/commands.h"
#include "tools/options/options.h"
#include "tools/terminal/terminal.h"

/* -------------------------------------------------------------------------------------------------
 * Facts
 * ---------------------------------------------------------------------------------------------- */

#if defined(__clang__)
static const char compiler[] = "clang " __clang_version__;
#elif defined(__GNUC__)
static const char compiler[] = "gcc " __VERSION__;
#else
static const char compiler[] = "unknown";
#endif

#ifdef __OPTIMIZE__
static const bool optimised = true;
#else
static const bool optimised = false;
#endif

#ifdef NDEBUG
static const bool assertions = false;
#else
static const bool assertions = true;
#endif

#ifdef _OPENMP
static const int openmp = _OPENMP; /* the month of its specification, 201511 */
#else
static const int openmp = 0;
#endif

enum { CACHES = 3 };
static const char *const cache_names[CACHES] = {"L1d", "L2", "L3"};

/* Bytes of a cache of this machine, 0 when unknown. */
static int64_t cache_bytes(int i)
{
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static const int names[CACHES] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE,
                                      _SC_LEVEL3_CACHE_SIZE};
    const long bytes = sysconf(names[i]);
    return bytes > 0 ? bytes : 0;
#else
    (void)i;
    return 0;
#endif
}

static const char *const op_names[] = {[FATTN_FORWARD] = "forward", [FATTN_BACKWARD] = "backward"};

static const char *op_name(int bit)
{
    return bit >= FATTN_FORWARD && bit <= FATTN_BACKWARD ? op_names[bit] : NULL;
}

static const char *dtype_name(int bit)
{
    return bit >= FATTN_F32 && bit <= FATTN_E4M3 ? fattn_dtype_name((fattn_dtype)bit) : NULL;
}

/* Opens device `ordinal` of a backend and gets its info. */
static fattn_status open_device(const fattn_backend *backend, int ordinal, fattn_device **device,
                                fattn_device_info *info)
{
    char spec[64];
    snprintf(spec, sizeof spec, "%s:%d", backend->name, ordinal);
    fattn_status status = fattn_device_open(spec, device);
    if (status == FATTN_OK) {
        *info = (fattn_device_info){.struct_size = sizeof *info};
        status = fattn_device_get_info(*device, info);
    }
    if (status != FATTN_OK) {
        fattn_device_close(*device);
        *device = NULL;
    }
    return status;
}

/* A device of a backend, the number-th that is visited. */
typedef struct visited {
    const fattn_backend *backend;
    int ordinal, number;
    const fattn_device *device; /* NULL: it cannot be used; fattn_last_reason() says why */
    const fattn_device_info *info;
} visited;

/* Visits the usable devices of a backend, or (usable false) the others. */
static void each_device(const fattn_backend *backend, bool usable, void (*visit)(const visited *))
{
    const int count = backend->count();
    int number = 0;
    for (int i = 0; i < count; i++) {
        fattn_device *device;
        fattn_device_info info;
        const fattn_status status = open_device(backend, i, &device, &info);
        if ((status == FATTN_OK) == usable) {
            const visited v = {backend, i, number++, device, &info};
            visit(&v);
        }
        fattn_device_close(device);
    }
}

/* Visits the kernels of a device, the first of which has number 0. missing: NULL, or what the
 * device lacks. */
static void each_kernel(const fattn_device *device,
                        void (*visit)(const fattn_kernel *row, const char *missing, int number))
{
    const fattn_kernel *row;
    const char *missing;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        visit(row, missing, i);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Text
 * ---------------------------------------------------------------------------------------------- */

static void print_bytes(int64_t bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    double x = (double)bytes;
    for (; x >= 1024 && unit < 4; unit++) {
        x /= 1024;
    }
    printf("%.4g %s", x, units[unit]);
}

static void text_build(void)
{
    printf("fattn     %s\n", fattn_version());
    printf("build     %s, %s, assertions %s, ", compiler, optimised ? "optimised" : "not optimised",
           assertions ? "on" : "off");
    if (openmp) {
        printf("OpenMP %d\n", openmp);
    } else {
        printf("no OpenMP\n");
    }
    printf("caches    ");
    for (int i = 0; i < CACHES; i++) {
        printf("%s%s ", i ? ", " : "", cache_names[i]);
        if (cache_bytes(i)) {
            print_bytes(cache_bytes(i));
        } else {
            printf("unknown");
        }
    }
    printf("\n");
}

/* The names of the bits that are set, padded to this width. */
static void text_names(uint64_t bits, const char *(*name)(int bit), int width)
{
    int used = 0;
    for (int bit = 0; bit < 64; bit++) {
        if (bits >> bit & 1 && name(bit)) {
            used += printf("%s%s", used ? " " : "", name(bit));
        }
    }
    printf("%*s", used < width ? width - used : 0, "");
}

static void text_kernel(const fattn_kernel *row, const char *missing, int number)
{
    (void)number;
    printf("  %-25s ", row->name);
    text_names(row->ops, op_name, 16);
    printf(" ");
    text_names(row->dtypes, dtype_name, 16);
    printf(" %5" PRId64 "  ", row->dim_max);
    if ((row->features & FATTN_FEATURES_ALL) == FATTN_FEATURES_ALL) {
        printf("all");
    } else if (__builtin_popcountll(row->features) > 10) {
        printf("all but ");
        text_names(FATTN_FEATURES_ALL & ~row->features, fattn_feature_name, 0);
    } else {
        text_names(row->features, fattn_feature_name, 0);
    }
    if (row->dtypes_kv) {
        printf("; k and v %s ", row->caches_alone ? "in" : "also in");
        text_names(row->dtypes_kv, dtype_name, 0);
    }
    if (row->rows_max) {
        printf("; at most %" PRId64 " rows per kv head", row->rows_max);
    }
    if (row->rows_min) {
        printf("; at least %" PRId64 " rows per kv head", row->rows_min);
    }
    if (row->by_name) {
        printf("; by name only");
    }
    if (missing) {
        printf("; not here: needs %s", missing);
    }
    printf("\n");
}

static void text_device(const fattn_device *device, const fattn_device_info *info)
{
    printf("\ndevice    %s:%d  %s\n", info->backend, info->ordinal, info->name);
    printf("          isa %s, %d %s%s, fast memory ", info->isa, info->units,
           info->host_memory ? "thread" : "multiprocessor", info->units == 1 ? "" : "s");
    print_bytes(info->fast_memory);
    if (info->total_memory) {
        printf(", memory ");
        print_bytes(info->total_memory);
    }
    printf("\n  %-25s %-16s %-16s %5s  %s\n", "kernel", "ops", "dtypes", "max D", "features");
    each_kernel(device, text_kernel);
}

static void text_visited(const visited *v)
{
    if (v->device) {
        text_device(v->device, v->info);
    } else {
        printf("\ndevice    %s:%d cannot be used: %s\n", v->backend->name, v->ordinal,
               fattn_last_reason());
    }
}

/* preferred: the device that calls without one get; NULL if there is none. */
static void text(const fattn_device_info *preferred)
{
    const fattn_backend *backend;
    text_build();
    if (preferred) {
        printf("default   %s:%d\n", preferred->backend, preferred->ordinal);
    }
    for (int part = 0; part < 2; part++) {
        for (int b = 0; (backend = fattn_backend_at(b)); b++) {
            each_device(backend, part == 0, text_visited);
            if (part && backend->count() == 0) {
                printf("\ndevice    %s: none present\n", backend->name);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * JSON
 * ---------------------------------------------------------------------------------------------- */

static void json_field(const char *name, const char *value)
{
    printf("\"%s\": ", name);
    tool_json_string(value);
}

static const char *json_bool(bool x) { return x ? "true" : "false"; }

static void json_names(const char *field, uint64_t bits, const char *(*name)(int bit))
{
    bool first = true;
    printf(", \"%s\": [", field);
    for (int bit = 0; bit < 64; bit++) {
        if (bits >> bit & 1 && name(bit)) {
            printf("%s\"%s\"", first ? "" : ", ", name(bit));
            first = false;
        }
    }
    printf("]");
}

static void json_kernel(const fattn_kernel *row, const char *missing, int number)
{
    printf("%s{", number ? ", " : "");
    json_field("name", row->name);
    json_names("ops", row->ops, op_name);
    json_names("dtypes", row->dtypes, dtype_name);
    json_names("dtypes_kv", row->dtypes_kv, dtype_name);
    json_names("features", row->features, fattn_feature_name);
    printf(", \"dim_max\": %" PRId64 ", \"rows_min\": %" PRId64 ", \"rows_max\": %" PRId64,
           row->dim_max, row->rows_min, row->rows_max);
    printf(", \"packs_groups\": %s, \"splits_keys\": %s, \"by_name\": %s",
           json_bool(row->packs_groups), json_bool(row->split != NULL), json_bool(row->by_name));
    printf(", \"tiles\": [");
    for (const fattn_tile *tile = row->tiles; tile->br; tile++) {
        printf("%s[%" PRId64 ", %" PRId64 "]", tile == row->tiles ? "" : ", ", tile->br, tile->bc);
    }
    printf("], ");
    if (missing) {
        json_field("missing", missing);
    } else {
        printf("\"missing\": null");
    }
    printf("}");
}

static void json_device(const fattn_device *device, const fattn_device_info *info)
{
    printf("{\"ordinal\": %d, ", info->ordinal);
    json_field("name", info->name);
    printf(", ");
    json_field("isa", info->isa);
    printf(", \"host_memory\": %s, \"units\": %d, \"fast_memory\": %" PRId64,
           json_bool(info->host_memory), info->units, info->fast_memory);
    printf(", \"total_memory\": %" PRId64 ", \"kernels\": [", info->total_memory);
    each_kernel(device, json_kernel);
    printf("]}");
}

static void json_visited(const visited *v)
{
    printf("%s", v->number ? ", " : "");
    if (v->device) {
        json_device(v->device, v->info);
        return;
    }
    printf("{\"ordinal\": %d, ", v->ordinal);
    json_field("reason", fattn_last_reason());
    printf("}");
}

static void json(const fattn_device_info *preferred)
{
    const fattn_backend *backend;
    printf("{");
    json_field("version", fattn_version());
    printf(", \"build\": {");
    json_field("compiler", compiler);
    printf(", \"optimised\": %s, \"assertions\": %s, \"openmp\": %d}, \"caches\": {",
           json_bool(optimised), json_bool(assertions), openmp);
    for (int i = 0; i < CACHES; i++) {
        printf("%s\"%s\": %" PRId64, i ? ", " : "", cache_names[i], cache_bytes(i));
    }
    printf("}, \"default\": ");
    if (preferred) {
        printf("{");
        json_field("backend", preferred->backend);
        printf(", \"ordinal\": %d}", preferred->ordinal);
    } else {
        printf("null");
    }
    printf(", \"backends\": [");
    for (int b = 0; (backend = fattn_backend_at(b)); b++) {
        printf("%s{", b ? ", " : "");
        json_field("name", backend->name);
        printf(", \"by_name\": %s, \"devices\": [", json_bool(backend->by_name));
        each_device(backend, true, json_visited);
        printf("], \"unusable\": [");
        each_device(backend, false, json_visited);
        printf("]}");
    }
    printf("]}\n");
}

int fattn_tool_info(int argc, char **argv)
{
    bool as_json = false;
    const option table[] = {
        {"json", "one JSON object instead of text", OPTION_SWITCH, .value = &as_json},
        {.name = NULL},
    };
    const option_set set = {
        "info", "The build, this machine's devices and caches, and what each kernel supports.",
        table, NULL};
    const int parsed = options_parse(&set, argc, argv);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    fattn_device *device = NULL;
    fattn_device_info info;
    fattn_device_info_init(&info);
    fattn_status status = fattn_device_open(NULL, &device);
    status = status ? status : fattn_device_get_info(device, &info);
    fattn_device_close(device);
    char reason[512]; /* listing devices replaces it */
    fattn_last_reason_copy(reason, sizeof reason);
    (as_json ? json : text)(status ? NULL : &info);
    return status ? tool_failure(fattn_fail(status, "%s", reason)) : TOOL_OK;
}
