/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps of an inference engine: prompts and single tokens of several requests are attended to in
 * one call, over a paged cache. Requests come and go, a long prompt comes in two chunks, and one
 * plan serves all steps: batch, lengths and rows of its problem are the most that a step may have.
 * Every row is computed again in plain C.
 */
#include "example.h"

enum { MOST = 4, ROWS = 96, LONGEST = 160 };  /* requests and rows of a step; keys of each */
enum { HQ = 8, HK = 2, D = 64, STEPS = 4 };   /* heads, channels */
enum { PAGE = 16, COLUMNS = LONGEST / PAGE }; /* tokens per page, pages per request */
enum { PAGES = MOST * COLUMNS };

/* New tokens of each request in each step. Request 0 has a prompt of 50 tokens and decodes after
 * that; request 1 comes later, in two chunks of 60; request 2 leaves after one step; request 3
 * comes in step 2. */
static const int32_t arrivals[STEPS][MOST] = {
    {50, 0, 17, 0}, {1, 60, 0, 0}, {1, 60, 0, 33}, {1, 1, 0, 1}};

static float q[ROWS][HQ][D], o[ROWS][HQ][D];
static float k[MOST][LONGEST][HK][D], v[MOST][LONGEST][HK][D]; /* of requests, in order */

static fattn_device *device;
typedef float page[PAGE][HK][D];
static page *k_cache, *v_cache; /* [PAGES], on the device */

/* The data of a step, on the host: rows and keys of each request, and its pages. */
static int32_t starts[MOST + 1], used[MOST], table[MOST][COLUMNS];
static int32_t next_page;

/* Appends a token to the cache of a request, on a new page if the last one is full. */
static void append(int b)
{
    const int32_t t = used[b]++;
    if (t % PAGE == 0) {
        table[b][t / PAGE] = next_page++;
    }
    copy(device, k_cache[table[b][t / PAGE]][t % PAGE], k[b][t], sizeof k[b][t]);
    copy(device, v_cache[table[b][t / PAGE]][t % PAGE], v[b][t], sizeof v[b][t]);
}

static fattn_plan *make_plan(void)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = MOST, problem.heads_q = HQ, problem.heads_k = HK;
    problem.seqlen_q = problem.total_q = ROWS, problem.seqlen_k = LONGEST;
    problem.dim = problem.dim_v = D;
    problem.page_size = PAGE, problem.num_pages = PAGES, problem.max_pages = COLUMNS;
    problem.features = FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_K | FATTN_PAGED;
    fattn_plan *plan;
    must(fattn_plan_create(device, &problem, &plan));
    return plan;
}

/* The largest difference between o and attention in plain C. The rows of a request are its last
 * tokens, and each attends to all keys up to its own. */
static double error_of_step(void)
{
    double worst = 0.0, row[D];
    for (int b = 0; b < MOST; b++) {
        for (int32_t at = starts[b]; at < starts[b + 1]; at++) {
            const int32_t keys = used[b] - (starts[b + 1] - 1 - at);
            for (int h = 0; h < HQ; h++) {
                const int hk = h / (HQ / HK);
                attend(q[at][h], k[b][0][hk], v[b][0][hk], keys, D, HK * D, row);
                for (int c = 0; c < D; c++) {
                    worst = further(worst, (double)o[at][h][c], row[c]);
                }
            }
        }
    }
    return worst;
}

int main(void)
{
    fill(&q[0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0][0], sizeof v / sizeof(float), 3);

    must(fattn_device_open(NULL, &device));
    fattn_plan *const plan = make_plan();
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    must(fattn_plan_get_info(plan, &info));
    k_cache = reserve(device, PAGES * sizeof *k_cache);
    v_cache = reserve(device, PAGES * sizeof *v_cache);
    void *const workspace = reserve(device, (size_t)info.workspace_bytes);
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = upload(device, q, sizeof q), buffers.o = reserve(device, sizeof o);
    buffers.k = k_cache, buffers.v = v_cache;
    int32_t *const starts_device = reserve(device, sizeof starts);
    int32_t *const used_device = reserve(device, sizeof used);
    int32_t *const table_device = reserve(device, sizeof table);
    buffers.cu_seqlens_q = starts_device, buffers.seqused_k = used_device;
    buffers.block_table = table_device;

    double worst = 0.0;
    for (int step = 0; step < STEPS; step++) {
        for (int b = 0; b < MOST; b++) {
            for (int32_t n = 0; n < arrivals[step][b]; n++) {
                append(b);
            }
            starts[b + 1] = starts[b] + arrivals[step][b]; /* none: the request has no rows */
        }
        copy(device, starts_device, starts, sizeof starts);
        copy(device, used_device, used, sizeof used);
        copy(device, table_device, table, sizeof table);
        must(fattn_execute(plan, &buffers, workspace, NULL));
        copy(device, o, buffers.o, sizeof o);
        worst = further(worst, error_of_step(), 0.0);
    }
    const int status = judge(device, "o of all steps", worst, 1e-5);

    fattn_plan_destroy(plan);
    void *const all[] = {k_cache,   v_cache,       workspace,   (void *)buffers.q,
                         buffers.o, starts_device, used_device, table_device};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        must(fattn_device_free(device, all[n]));
    }
    fattn_device_close(device);
    return status;
}
