/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a user of an installed fattn writes. Built by the consumer test through pkg-config, CMake
 * and as a Meson subproject, with nothing but what each of them says about compiling and linking.
 */
#include <fattn/fattn.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef _OPENMP
#error "compiling a caller with -fopenmp is not the library's to ask for"
#endif

int main(void)
{
    if (strcmp(fattn_version(), FATTN_VERSION_STRING) != 0) {
        fprintf(stderr, "library %s, header %s\n", fattn_version(), FATTN_VERSION_STRING);
        return 1;
    }

    /* One query that is orthogonal to both of two keys sees their mean. */
    const float q[1] = {0.0f};
    const float k[2] = {1.0f, -3.0f};
    const float v[4] = {1.0f, 2.0f, 5.0f, -4.0f}; /* [keys][dim_v] */
    float o[2] = {-1.0f, -1.0f};
    float lse = -1.0f;

    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.seqlen_q = 1;
    problem.seqlen_k = 2;
    problem.dim = 1;
    problem.dim_v = 2;
    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;

    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q;
    buffers.k = k;
    buffers.v = v;
    buffers.o = o;
    buffers.lse = &lse;

    if (fattn_attention(NULL, &problem, &buffers, NULL) != FATTN_OK) {
        fprintf(stderr, "%s\n", fattn_last_reason());
        return 1;
    }
    fattn_cache_clear();
    if (!(fabsf(o[0] - 3.0f) < 1e-6f && fabsf(o[1] + 1.0f) < 1e-6f &&
          fabsf(lse - logf(2.0f)) < 1e-6f)) {
        fprintf(stderr, "o = %g, %g, not 3, -1; lse = %g, not ln 2\n", o[0], o[1], lse);
        return 1;
    }
    puts("consumer: ok");
    return 0;
}
