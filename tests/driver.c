/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/driver.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

static driver found;

static const struct {
    const char *name;
    size_t at;
} symbols[] = {
    {"cuCtxCreate_v2", offsetof(driver, context_create)},
    {"cuCtxDestroy_v2", offsetof(driver, context_destroy)},
    {"cuCtxSetCurrent", offsetof(driver, context_set)},
    {"cuCtxGetCurrent", offsetof(driver, context_get)},
    {"cuDevicePrimaryCtxRetain", offsetof(driver, primary_retain)},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(driver, primary_release)},
    {"cuStreamCreate", offsetof(driver, stream_create)},
    {"cuStreamDestroy_v2", offsetof(driver, stream_destroy)},
    {"cuStreamBeginCapture_v2", offsetof(driver, capture_begin)},
    {"cuStreamEndCapture", offsetof(driver, capture_end)},
    {"cuGraphInstantiateWithFlags", offsetof(driver, graph_make)},
    {"cuGraphLaunch", offsetof(driver, graph_launch)},
    {"cuGraphExecDestroy", offsetof(driver, graph_exec_destroy)},
    {"cuGraphDestroy", offsetof(driver, graph_destroy)},
    {"stub_cuda_owns", offsetof(driver, stub_owns)},
    {"stub_cuda_follows", offsetof(driver, stub_follows)},
};

const driver *driver_open(void)
{
    stub_cuda *(*state)(void) = NULL;
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        return NULL;
    }
    for (size_t n = 0; n < sizeof symbols / sizeof symbols[0]; n++) {
        void *const symbol = dlsym(library, symbols[n].name);
        memcpy((char *)&found + symbols[n].at, &symbol, sizeof symbol);
    }
    void *const control = dlsym(library, "stub_cuda_state");
    memcpy(&state, &control, sizeof state);
    found.stub = state ? state() : NULL;
    return &found;
}
