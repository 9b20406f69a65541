/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sharded keys: each shard of the keys gives its own o and lse, and fattn_merge() combines them
 * into those of all keys, as for machines that share a long context. The whole is causal, so each
 * shard is told the position of its keys. Then every row is computed again in plain C.
 */
#include "example.h"

enum { B = 2, S = 256, H = 3, D = 64, SHARDS = 3 };

/* Shard n has keys bounds[n] to bounds[n + 1] - 1. */
static const int64_t bounds[SHARDS + 1] = {0, 100, 101, S};

static float q[B][S][H][D], k[B][S][H][D], v[B][S][H][D], o[B][S][H][D], lse[B][H][S];

static fattn_device *device;
static float *q_device, *k_device, *v_device;

/* o (B, S, H, D) and lse (B, H, S) of some keys, on the device. */
typedef struct state {
    float *o, *lse;
} state;

static state make_state(void)
{
    return (state){reserve(device, sizeof o), reserve(device, sizeof lse)};
}

static void free_state(state s)
{
    must(fattn_device_free(device, s.o));
    must(fattn_device_free(device, s.lse));
}

/* Attention over keys first to end - 1. A row that attends to none of them gets o = 0, lse =
 * -inf. */
static void attend_shard(int64_t first, int64_t end, state out)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = B, problem.heads_q = problem.heads_k = H;
    problem.seqlen_q = S, problem.seqlen_k = end - first;
    problem.dim = problem.dim_v = D;
    problem.features = FATTN_CAUSAL | FATTN_POSITIONS;
    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;

    /* Shards are slices of a longer tensor here, so the batch stride is larger than the shard. */
    problem.layout = FATTN_STRIDED;
    problem.q = problem.k = problem.v = problem.o =
        (fattn_strides){.batch = S * H * D, .seq = H * D, .head = D};

    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q_device;
    buffers.k = k_device + first * H * D;
    buffers.v = v_device + first * H * D;
    buffers.o = out.o, buffers.lse = out.lse;
    buffers.k_offset = first; /* position of the shard in the whole */
    buffers.whole_q = buffers.whole_k = S;
    must(fattn_attention(device, &problem, &buffers, NULL));
}

/* into = merge of into and more. */
static void merge(state into, state more)
{
    const fattn_strides stride = {.batch = S * H * D, .seq = H * D, .head = D};
    const fattn_merge_args args = {
        .struct_size = sizeof args,
        .batch = B,
        .heads = H,
        .seqlen = S,
        .dim_v = D,
        .o1 = into.o,
        .lse1 = into.lse,
        .o2 = more.o,
        .lse2 = more.lse,
        .o = into.o,
        .lse = into.lse,
        .o1_stride = stride,
        .o2_stride = stride,
        .o_stride = stride,
    };
    must(fattn_merge(device, &args, NULL));
}

/* The largest difference of o and lse from attention over all keys in plain C. */
static double error(void)
{
    double worst = 0.0, row[D];
    for (int b = 0; b < B; b++) {
        for (int i = 0; i < S; i++) {
            for (int h = 0; h < H; h++) {
                const double lse_of_row =
                    attend(q[b][i][h], k[b][0][h], v[b][0][h], i + 1, D, H * D, row);
                worst = further(worst, (double)lse[b][h][i], lse_of_row);
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

    must(fattn_device_open(NULL, &device));
    q_device = upload(device, q, sizeof q);
    k_device = upload(device, k, sizeof k);
    v_device = upload(device, v, sizeof v);

    const state all = make_state(), part = make_state();
    attend_shard(bounds[0], bounds[1], all);
    for (int n = 1; n < SHARDS; n++) {
        attend_shard(bounds[n], bounds[n + 1], part);
        merge(all, part);
    }
    copy(device, o, all.o, sizeof o);
    copy(device, lse, all.lse, sizeof lse);
    const int status = judge(device, "o or lse", error(), 1e-5);

    free_state(all);
    free_state(part);
    must(fattn_device_free(device, q_device));
    must(fattn_device_free(device, k_device));
    must(fattn_device_free(device, v_device));
    fattn_cache_clear();
    fattn_device_close(device);
    return status;
}
