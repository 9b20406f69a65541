/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drivers that lack something: a function, devices, the file itself. A driver is opened once, so
 * each is tried in a process of its own, by this program with two arguments; the drivers are copies
 * of the stub (stub/) with a function renamed.
 */
#define _GNU_SOURCE /* dladdr, setenv, mkdtemp */

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/environment.h"
#include "tests/folder.h"
#include "tests/scene.h"

/* Driver functions that backend "cuda" requires. */
static const char *const functions[] = {
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxEnablePeerAccess",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyAsync",
    "cuMemcpy2DAsync_v2",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamGetCtx",
    "cuStreamWaitEvent",
    "cuStreamGetCaptureInfo",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime",
};

/* Without a usable driver: asking for it by name or by FATTN_BACKEND is an error that says why, the
 * device count is 0, and "auto" takes the next backend. */
static void expect_no_driver(const char *why)
{
    fattn_device *device = NULL;
    expect(fattn_device_count("cuda") == 0, "%d devices", fattn_device_count("cuda"));
    static const char *const specs[] = {"cuda", "cuda:1", NULL};
    set_environment("FATTN_BACKEND", "cuda");
    EACH (n, specs) {
        const fattn_status status = fattn_device_open(specs[n], &device);
        expect(status == FATTN_NO_DEVICE && !device && expect_says(why), "%s, expected \"%s\": %s",
               fattn_status_string(status), why, fattn_last_reason());
    }
    set_environment("FATTN_BACKEND", NULL);
    fattn_device_info info = {.struct_size = sizeof info};
    expect_ok(fattn_device_open("auto", &device), "auto");
    expect_ok(fattn_device_get_info(device, &info), "auto");
    expect(strcmp(info.backend, "cpu") == 0, "auto takes %s", info.backend);
    fattn_device_close(device);
}

/* Exit statuses of a child that finds the system's driver, and of one that this machine runs only
 * through the emulator of this program. */
enum { ANOTHER_DRIVER = 77, FOREIGN = 126 };

/* A row that needs tensor maps reports that the driver has none. */
static void expect_no_maps(const char *why)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_problem problem = scene_problem(FORWARD);
    stub->capability = 90;
    set_environment("FATTN_KERNEL", "wgmma_64");
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    const fattn_status status = fattn_plan_create(device, &problem, &plan);
    expect(status == FATTN_UNSUPPORTED && expect_says(why), "%s, expected \"%s\": %s",
           fattn_status_string(status), why, fattn_last_reason());
    set_environment("FATTN_KERNEL", NULL);
    expect_ok(fattn_plan_create(device, &problem, &plan), "another row");
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* Where a driver does not say how many blocks it holds, a resident grid has one a unit. */
static void expect_one_a_unit(void)
{
    stub->held = 2;
    const unsigned blocks = scene_resident_blocks(scene_resident, 9);
    expect(blocks == 4, "%u blocks", blocks);
}

/* Runs the check that this process's second argument names. */
static int be_child(const char *what, const char *why)
{
    expect_begin(what);
    const driver *const library = driver_open();
    stub = library ? library->stub : NULL;
    if (strcmp(what, "no driver") == 0 && library) {
        return ANOTHER_DRIVER;
    }
    if (strcmp(what, "no devices") == 0 && expect(stub != NULL, "no stub")) {
        stub->devices = 0;
    } else if (strcmp(what, "no start") == 0 && expect(stub != NULL, "no stub")) {
        stub->fail_at = 1, stub->fail_with = STUB_OLD_DRIVER;
    }
    if (strcmp(what, "no maps") == 0 && expect(stub != NULL, "no stub")) {
        expect_no_maps(why);
    } else if (strcmp(what, "no count") == 0 && expect(stub != NULL, "no stub")) {
        expect_one_a_unit();
    } else {
        expect_no_driver(why);
    }
    return !expect_held();
}

/* Runs this program again, with a folder searched first for libcuda.so.1. Returns its exit status,
 * 0 for success. */
static int run_child(const char *program, const char *folder, const char *what, const char *why)
{
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        setenv("LD_LIBRARY_PATH", folder, 1);
        execl(program, program, what, why, (char *)NULL);
        _exit(errno == ENOEXEC ? FOREIGN : 127);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

/* The bytes of a file; the caller frees. */
static char *read_file(const char *path, size_t *size)
{
    enum { MOST = 1 << 22 };
    char *const bytes = malloc(MOST);
    FILE *const file = fopen(path, "rb");
    *size = bytes && file ? fread(bytes, 1, MOST, file) : 0;
    if (file) {
        fclose(file);
    }
    return bytes;
}

static bool write_file(const char *path, const char *bytes, size_t size)
{
    FILE *const file = fopen(path, "wb");
    const bool written = file && fwrite(bytes, 1, size, file) == size;
    return file && fclose(file) == 0 && written;
}

/* Renames a symbol throughout the file, so that it is not found. */
static int hide(char *bytes, size_t size, const char *name, char first)
{
    const size_t length = strlen(name);
    int found = 0;
    for (size_t at = 1; at + length < size; at++) {
        const bool here = bytes[at - 1] == '\0' && bytes[at + length] == '\0' &&
                          memcmp(bytes + at + 1, name + 1, length - 1) == 0;
        if (here) {
            bytes[at] = first;
            found++;
        }
    }
    return found;
}

static void check_drivers(const char *program, const char *stub_path)
{
    const bool maps = scene_begin_hopper(); /* the build has a row that needs them */
    scene_end_hopper();
    char folder[FOLDER_PATH], path[FOLDER_PATH + 16], home[4096];
    size_t size = 0;
    char *const bytes = read_file(stub_path, &size);
    if (!folder_make(folder, "check_cuda_drivers") || !size) {
        tap_check(false, "a folder for drivers is made");
        free(bytes);
        return;
    }
    snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    if (run_child(program, folder, "no driver", "no driver") == FOREIGN) {
        tap_skip("drivers that lack something", "an emulated program starts no other");
        rmdir(folder);
        free(bytes);
        return;
    }
    EACH (n, functions) {
        const bool hidden = hide(bytes, size, functions[n], 'X') > 0;
        tap_check(hidden && write_file(path, bytes, size) &&
                      run_child(program, folder, "a missing function", functions[n]) == 0,
                  "a driver without %s is too old, and its name is said", functions[n]);
        hide(bytes, size, functions[n], 'c');
    }
    static const char *const map_functions[] = {"cuTensorMapEncodeTiled",
                                                "cuTensorMapReplaceAddress"};
    EACH (n, map_functions) {
        const bool hidden = hide(bytes, size, map_functions[n], 'X') > 0;
        if (maps) {
            tap_check(hidden && write_file(path, bytes, size) &&
                          run_child(program, folder, "no maps", "a driver with tensor maps") == 0,
                      "a driver without %s runs other rows", map_functions[n]);
        } else {
            tap_skip("a driver without tensor maps", "this build has no row that needs them");
        }
        hide(bytes, size, map_functions[n], 'c');
    }
    if (scene_resident_blocks(scene_resident, 1) == 1) {
        const char *const asked = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        const bool hidden = hide(bytes, size, asked, 'X') > 0;
        tap_check(hidden && write_file(path, bytes, size) &&
                      run_child(program, folder, "no count", "") == 0,
                  "a driver without %s has one block a multiprocessor", asked);
        hide(bytes, size, asked, 'c');
    } else {
        tap_skip("a driver that does not count blocks", "this build has no resident grid");
    }
    tap_check(write_file(path, bytes, 10) &&
                  run_child(program, folder, "no library", "no driver") == 0,
              "a file that is no library is no driver");
    free(bytes);
    remove(path);
    snprintf(home, sizeof home, "%s", stub_path);
    *strrchr(home, '/') = '\0';
    tap_check(run_child(program, home, "no devices", "cuInit failed with 100") == 0,
              "a driver without devices");
    tap_check(run_child(program, home, "no start", "cuInit failed with 222") == 0,
              "a driver that does not start");
    const int absent = run_child(program, folder, "no driver", "no driver");
    if (absent == ANOTHER_DRIVER) {
        tap_skip("no driver at all", "this system has one");
    } else {
        tap_check(absent == 0, "no driver at all");
    }
    tap_check(rmdir(folder) == 0, "no other file is left behind");
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        return be_child(argv[1], argv[2]);
    }
    Dl_info self;
    if (scene_lacks_stub()) {
        return tap_done();
    }
    const int located = dladdr((void *)(uintptr_t)stub, &self);
    tap_check(located != 0, "the stub's file is known");
    if (located) {
        check_drivers(argv[0], self.dli_fname);
    }
    return tap_done();
}
