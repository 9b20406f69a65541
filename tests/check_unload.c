/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program loads the library, computes and unloads it, 300 times, with the library's threads
 * awake, asleep and ended.
 *
 * usage: check_unload LIBRARY
 */
#define _DEFAULT_SOURCE /* usleep */

#include <dlfcn.h>
#include <unistd.h>

#include "tests/attend.h"
#include "tests/tap.h"

enum { ROUNDS = 300, HEADS = 8, ROWS = 100, DIM = 32, COUNT = HEADS * ROWS * DIM };

/* The library functions in use. */
typedef struct library {
    void *handle;
    void (*problem_init)(fattn_problem *problem);
    void (*buffers_init)(fattn_buffers *buffers);
    fattn_status (*attention)(fattn_device *device, const fattn_problem *problem,
                              const fattn_buffers *buffers, fattn_stream stream);
    void (*cache_clear)(void);
} library;

static bool load(library *l, const char *path)
{
    l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) {
        printf("# %s\n", dlerror());
        return false;
    }
    *(void **)&l->problem_init = dlsym(l->handle, "fattn_problem_init");
    *(void **)&l->buffers_init = dlsym(l->handle, "fattn_buffers_init");
    *(void **)&l->attention = dlsym(l->handle, "fattn_attention");
    *(void **)&l->cache_clear = dlsym(l->handle, "fattn_cache_clear");
    return l->problem_init && l->buffers_init && l->attention && l->cache_clear;
}

static fattn_status attend_by(const library *l, const float *in, float *o)
{
    fattn_problem problem;
    fattn_buffers buffers;
    l->problem_init(&problem);
    problem.heads_q = problem.heads_k = HEADS;
    problem.seqlen_q = problem.seqlen_k = ROWS;
    problem.dim = problem.dim_v = DIM;
    l->buffers_init(&buffers);
    buffers.q = buffers.k = buffers.v = in;
    buffers.o = o;
    return l->attention(NULL, &problem, &buffers, NULL);
}

int main(int argc, char **argv)
{
    static float in[COUNT], o[COUNT], first[COUNT];
    if (argc != 2) {
        return 1;
    }
    setenv("FATTN_BACKEND", "cpu", 1);
    setenv("FATTN_NUM_THREADS", "2", 1);
    for (int i = 0; i < COUNT; i++) {
        in[i] = (float)(i % 61 - 30) / 61;
    }
    int rounds = 0;
    bool few = true;
    for (bool right = true; right && rounds < ROUNDS; rounds += right) {
        library l;
        right = load(&l, argv[1]) && attend_by(&l, in, rounds ? o : first) == FATTN_OK;
        right = right && (rounds == 0 || memcmp(o, first, sizeof o) == 0);
        if (rounds % 3 == 0 && right) {
            l.cache_clear(); /* ends the threads, too */
        } else if (rounds % 3 == 1) {
            usleep(200); /* they sleep */
        }
        few = few && (!right || rounds % 3 == 0 || process_threads_are(2));
        right = right && dlclose(l.handle) == 0;
    }
    tap_check(rounds == ROUNDS, "loaded and unloaded %d times of %d", rounds, ROUNDS);
    tap_check(few, "two threads");
    return tap_done();
}
