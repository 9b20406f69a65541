/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ranks/world.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/distributed/forecast.h"
#include "core/memory.h"
#include "core/status.h"

fattn_split split_for(const fattn_problem *p)
{
    const bool window = p->features & FATTN_WINDOW;
    fattn_problem masks = {.window_left = window ? p->window_left : -1,
                           .window_right = window ? p->window_right : -1};
    if (p->features & FATTN_CAUSAL) {
        masks.window_right = 0;
    }
    return fattn_split_choose(&masks);
}

#ifdef __APPLE__
#define LIBRARY "libfattn_mpi.0.dylib"
#else
#define LIBRARY "libfattn_mpi.so.0"
#endif

enum { TAG = 0 };

fattn_status world_open(world *w, double timeout)
{
    fattn_status (*begin)(fattn_transport **) = NULL;
    void *const library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL); /* MPI opens parts of its own */
    void *const found = library ? dlsym(library, "fattn_mpi_begin") : NULL;
    void *const end = found ? dlsym(library, "fattn_mpi_end") : NULL;
    memset(w, 0, sizeof *w);
    if (!end) {
        const char *const why = dlerror();
        return fattn_fail(FATTN_UNSUPPORTED, "no MPI: %s", why ? why : LIBRARY);
    }
    memcpy(&begin, &found, sizeof begin);
    memcpy(&w->end, &end, sizeof w->end);
    w->timeout = timeout;
    return begin(&w->transport);
}

void world_close(world *w)
{
    if (w->transport) {
        w->end(w->transport);
    }
    memset(w, 0, sizeof *w);
}

fattn_status world_gather(const world *w, void *all, int64_t bytes)
{
    const fattn_transport *const t = w->transport;
    fattn_status status = FATTN_OK;
    for (int32_t d = 1; !status && d < t->ranks; d++) {
        const int32_t to = (t->rank + d) % t->ranks, from = (t->rank - d + t->ranks) % t->ranks;
        const fattn_message messages[] = {
            {to, TAG, 0, 0, (char *)all + t->rank * bytes, bytes, NULL},
            {from, TAG, 1, 0, (char *)all + from * bytes, bytes, NULL},
        };
        status = t->start(t->user, messages, 2);
        status = status ? status : t->wait(t->user, messages, 2, w->timeout);
    }
    return status;
}

bool world_agree(const world *w, bool fine)
{
    const int32_t ranks = w->transport->ranks;
    bool *const all = fattn_memory_alloc((size_t)ranks);
    fattn_status status = all ? FATTN_OK : fattn_fail_memory(ranks, "the answers of ranks");
    int32_t failed = 0;
    if (!status) {
        all[w->transport->rank] = fine;
        status = world_gather(w, all, 1);
    }
    while (!status && failed < ranks && all[failed]) {
        failed++;
    }
    fattn_memory_free(all);
    if (fine && status) {
        fprintf(stderr, "fattn: %s: %s\n", fattn_status_string(status), fattn_last_reason());
    } else if (fine && failed < ranks) {
        fprintf(stderr, "fattn: rank %d has failed\n", failed);
    }
    return fine && !status && failed == ranks;
}
