/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plain attention: describe the problem, make a plan, run it. The problem is causal, with two query
 * heads per head of keys and values. Then every row is computed again in plain C.
 */
#include "example.h"

enum { B = 2, S = 300, HQ = 4, HK = 2, D = 64 };

static float q[B][S][HQ][D], k[B][S][HK][D], v[B][S][HK][D], o[B][S][HQ][D];

/* The largest difference between o and attention in plain C. */
static double error_of_o(void)
{
    double worst = 0.0, row[D];
    for (int b = 0; b < B; b++) {
        for (int i = 0; i < S; i++) {
            for (int h = 0; h < HQ; h++) {
                const int kv = h / (HQ / HK);
                attend(q[b][i][h], k[b][0][kv], v[b][0][kv], i + 1, D, HK * D, row);
                for (int c = 0; c < D; c++) {
                    worst = further(worst, (double)o[b][i][h][c], row[c]);
                }
            }
        }
    }
    return worst;
}

int main(void)
{
    fill(&q[0][0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0][0], sizeof v / sizeof(float), 3);

    fattn_device *device;
    must(fattn_device_open(NULL, &device));

    /* What to compute. fattn_problem_init() has set everything else: forward, f32, (batch,
     * sequence, head, channel), scores scaled by 1 / sqrt(D). */
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = B;
    problem.heads_q = HQ, problem.heads_k = HK;
    problem.seqlen_q = problem.seqlen_k = S;
    problem.dim = problem.dim_v = D;
    problem.features = FATTN_CAUSAL;

    /* A plan is made once and can be run any number of times. */
    fattn_plan *plan;
    must(fattn_plan_create(device, &problem, &plan));

    fattn_plan_info info;
    fattn_plan_info_init(&info);
    must(fattn_plan_get_info(plan, &info));
    printf("kernel %s, tiles of %lld queries by %lld keys, %lld bytes of workspace\n", info.kernel,
           (long long)info.br, (long long)info.bc, (long long)info.workspace_bytes);
    void *const workspace = reserve(device, (size_t)info.workspace_bytes);

    /* The arrays. */
    void *const q_device = upload(device, q, sizeof q);
    void *const k_device = upload(device, k, sizeof k);
    void *const v_device = upload(device, v, sizeof v);
    void *const o_device = reserve(device, sizeof o);
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q_device, buffers.k = k_device, buffers.v = v_device;
    buffers.o = o_device;

    must(fattn_execute(plan, &buffers, workspace, NULL));
    copy(device, o, o_device, sizeof o);
    const int status = judge(device, "o", error_of_o(), 1e-5);

    fattn_plan_destroy(plan);
    void *const all[] = {q_device, k_device, v_device, o_device, workspace};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        must(fattn_device_free(device, all[n]));
    }
    fattn_device_close(device);
    return status;
}
