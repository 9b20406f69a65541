/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding: two sequences grow by one token at a time. Each token's key and value go into a paged
 * cache, and its query attends to all keys so far. One plan serves all steps, because lengths and
 * the page table are data. At the end the outputs must equal those of one causal forward over the
 * whole sequences.
 */
#include "example.h"

enum { B = 2, T = 100, HQ = 8, HK = 2, D = 64 };     /* sequences, tokens, heads, channels */
enum { PAGE = 16, COLUMNS = (T + PAGE - 1) / PAGE }; /* tokens per page, pages per sequence */
enum { PAGES = B * COLUMNS };

static float q[B][T][HQ][D], k[B][T][HK][D], v[B][T][HK][D];
static float decoded[B][T][HQ][D], whole[B][T][HQ][D];

static fattn_device *device;

/* The cache on the device, and the page table there and on the host. */
typedef float page[PAGE][HK][D];
static page *k_cache, *v_cache; /* [PAGES] */
static int32_t *table_device, *used_device;
static int32_t table[B][COLUMNS], used[B], next_page;

/* Appends token t to sequence b, on a new page if the last one is full. */
static void append(int b, int t)
{
    const int32_t column = used[b] / PAGE, slot = used[b] % PAGE;
    if (slot == 0) {
        table[b][column] = next_page++;
    }
    copy(device, k_cache[table[b][column]][slot], k[b][t], sizeof k[b][t]);
    copy(device, v_cache[table[b][column]][slot], v[b][t], sizeof v[b][t]);
    used[b]++;
}

static fattn_problem common_problem(void)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = B, problem.heads_q = HQ, problem.heads_k = HK;
    problem.seqlen_k = T, problem.dim = problem.dim_v = D;
    return problem;
}

static void decode(void)
{
    fattn_problem problem = common_problem();
    problem.seqlen_q = 1; /* seqlen_k is the greatest length of a sequence */
    problem.features = FATTN_PAGED | FATTN_SEQUSED_K;
    problem.page_size = PAGE, problem.num_pages = PAGES, problem.max_pages = COLUMNS;
    fattn_plan *plan;
    must(fattn_plan_create(device, &problem, &plan));

    float(*const q_device)[HQ][D] = reserve(device, B * sizeof *q_device);
    float(*const o_device)[HQ][D] = reserve(device, B * sizeof *o_device);
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q_device, buffers.k = k_cache, buffers.v = v_cache, buffers.o = o_device;
    buffers.block_table = table_device, buffers.seqused_k = used_device;

    for (int t = 0; t < T; t++) {
        for (int b = 0; b < B; b++) {
            append(b, t);
            copy(device, q_device[b], q[b][t], sizeof q[b][t]);
        }
        copy(device, table_device, table, sizeof table);
        copy(device, used_device, used, sizeof used);
        must(fattn_execute(plan, &buffers, NULL, NULL));
        for (int b = 0; b < B; b++) {
            copy(device, decoded[b][t], o_device[b], sizeof decoded[b][t]);
        }
    }
    fattn_plan_destroy(plan);
    must(fattn_device_free(device, q_device));
    must(fattn_device_free(device, o_device));
}

/* All tokens at once, by the call that makes its own plan and accepts memory of host or device. */
static void forward(void)
{
    fattn_problem problem = common_problem();
    problem.seqlen_q = T;
    problem.features = FATTN_CAUSAL;

    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q, buffers.k = k, buffers.v = v, buffers.o = whole;
    must(fattn_attention(device, &problem, &buffers, NULL));
}

int main(void)
{
    fill(&q[0][0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0][0], sizeof v / sizeof(float), 3);

    must(fattn_device_open(NULL, &device));
    k_cache = reserve(device, PAGES * sizeof *k_cache);
    v_cache = reserve(device, PAGES * sizeof *v_cache);
    table_device = reserve(device, sizeof table);
    used_device = reserve(device, sizeof used);

    decode();
    forward();
    double worst = 0.0;
    for (int64_t n = 0; n < B * T * HQ * D; n++) {
        worst = further(worst, (double)(&decoded[0][0][0][0])[n], (double)(&whole[0][0][0][0])[n]);
    }
    const int status = judge(device, "decoding from causal attention", worst, 1e-5);

    must(fattn_device_free(device, k_cache));
    must(fattn_device_free(device, v_cache));
    must(fattn_device_free(device, table_device));
    must(fattn_device_free(device, used_device));
    fattn_cache_clear();
    fattn_device_close(device);
    return status;
}
