/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ragged batch: sequences of different lengths are packed without padding, and cu_seqlens gives
 * their starts. One of them is empty. Then every row is computed again in plain C.
 */
#include "example.h"

enum { B = 5, H = 4, D = 40, TOTAL = 17 + 200 + 0 + 1 + 93, LONGEST = 200 };

/* Sequence b has rows starts[b] to starts[b + 1] - 1. */
static const int32_t starts[B + 1] = {0, 17, 217, 217, 218, 311};

static float q[TOTAL][H][D], k[TOTAL][H][D], v[TOTAL][H][D], o[TOTAL][H][D];

/* The largest difference between o and attention within each sequence in plain C. */
static double error_of_o(void)
{
    double worst = 0.0, row[D];
    for (int b = 0; b < B; b++) {
        const int32_t first = starts[b];
        for (int32_t i = first; i < starts[b + 1]; i++) {
            for (int h = 0; h < H; h++) {
                attend(q[i][h], k[first][h], v[first][h], i - first + 1, D, H * D, row);
                for (int c = 0; c < D; c++) {
                    worst = further(worst, (double)o[i][h][c], row[c]);
                }
            }
        }
    }
    return worst;
}

int main(void)
{
    fill(&q[0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0], sizeof v / sizeof(float), 3);

    fattn_device *device;
    must(fattn_device_open(NULL, &device));

    /* The problem holds the sizes that determine memory. Lengths are data, and a plan serves any
     * lengths that fit. */
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = B, problem.heads_q = problem.heads_k = H;
    problem.seqlen_q = problem.seqlen_k = LONGEST;
    problem.total_q = problem.total_k = TOTAL;
    problem.dim = problem.dim_v = D;
    problem.features = FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    fattn_plan *plan;
    must(fattn_plan_create(device, &problem, &plan));

    void *const q_device = upload(device, q, sizeof q);
    void *const k_device = upload(device, k, sizeof k);
    void *const v_device = upload(device, v, sizeof v);
    void *const o_device = reserve(device, sizeof o);
    int32_t *const starts_device = upload(device, starts, sizeof starts);
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q_device, buffers.k = k_device, buffers.v = v_device;
    buffers.o = o_device;
    buffers.cu_seqlens_q = buffers.cu_seqlens_k = starts_device;

    must(fattn_execute(plan, &buffers, NULL, NULL));
    copy(device, o, o_device, sizeof o);
    const int status = judge(device, "o", error_of_o(), 1e-5);

    fattn_plan_destroy(plan);
    void *const all[] = {q_device, k_device, v_device, o_device, starts_device};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        must(fattn_device_free(device, all[n]));
    }
    fattn_device_close(device);
    return status;
}
