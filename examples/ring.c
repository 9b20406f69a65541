/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training with the sequence divided over ranks. Each rank holds a zigzag share of the rows of q, k
 * and v, runs forward, a loss, backward and a step of gradient descent on its own rows, and the
 * ranks exchange keys and gradients in a ring. Ranks are threads here (threads.h); with fattn/mpi.h
 * they would be processes, and nothing else would change. They compute on the CPU, whatever
 * FATTN_BACKEND says, because their tensors are arrays of the program.
 *
 * The losses must fall, and be those of the same training on one device.
 */
#define _POSIX_C_SOURCE 200809L /* threads.h */

#include "example.h"
#include "threads.h"

enum { S = 200, H = 4, HK = 2, D = 32, RANKS = 3, STEPS = 8 };
static const double RATE = 0.2;

enum { Q, K, V, TARGET, TENSORS };
static float whole[TENSORS][S * H * D]; /* (S, heads, D); keys and values use less of it */

static int heads(int tensor) { return tensor == K || tensor == V ? HK : H; }

/* A rank: its transport, and its share of the tensors. */
typedef struct rank {
    pthread_t thread;
    fattn_device *device; /* the same for all ranks */
    fattn_transport transport;
    int64_t rows;
    _Alignas(16) float x[TENSORS][S * H * D], gradient[TENSORS][S * H * D]; /* as plans expect */
    _Alignas(16) float o[S * H * D], dout[S * H * D], lse[H * S];
    double loss[STEPS];
} rank;

/* Copies the rows of a share. They are its runs, one after another. */
static void take_share(rank *r)
{
    for (int n = 0; n < fattn_split_runs(FATTN_SPLIT_ZIGZAG); n++) {
        fattn_run run;
        must(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, S, r->transport.ranks, r->transport.rank, n,
                                 &run));
        for (int t = 0; t < TENSORS; t++) {
            const int64_t row = (int64_t)heads(t) * D;
            memcpy(r->x[t] + r->rows * row, whole[t] + run.first * row,
                   (size_t)(run.count * row) * sizeof(float));
        }
        r->rows += run.count;
    }
}

/* The undivided problem, which all ranks describe alike. */
static fattn_problem problem_of(fattn_op op)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.op = op;
    problem.features = FATTN_CAUSAL;
    problem.heads_q = H, problem.heads_k = HK;
    problem.seqlen_q = problem.seqlen_k = S;
    problem.dim = problem.dim_v = D;
    problem.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                          : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    return problem;
}

/* Half the squared distance of o from the target, summed over a rank's rows; dout is o - target. */
static double loss_of(rank *r)
{
    double loss = 0;
    for (int64_t n = 0; n < r->rows * H * D; n++) {
        r->dout[n] = r->o[n] - r->x[TARGET][n];
        loss += 0.5 * (double)r->dout[n] * (double)r->dout[n];
    }
    return loss;
}

static void descend(rank *r)
{
    for (int t = Q; t <= V; t++) {
        for (int64_t n = 0; n < r->rows * heads(t) * D; n++) {
            r->x[t][n] -= (float)RATE * r->gradient[t][n];
        }
    }
}

static void *train(void *context)
{
    rank *const r = context;
    fattn_group group;
    fattn_group_plan *forward, *backward;
    fattn_group_init(&group);
    group.transport = &r->transport;
    group.device = r->device;
    group.split = FATTN_SPLIT_ZIGZAG; /* equal work under a causal mask */
    const fattn_problem forward_problem = problem_of(FATTN_FORWARD);
    const fattn_problem backward_problem = problem_of(FATTN_BACKWARD);
    must(fattn_group_plan_create(&group, &forward_problem, NULL, NULL, &forward));
    must(fattn_group_plan_create(&group, &backward_problem, NULL, NULL, &backward));

    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = r->x[Q], buffers.k = r->x[K], buffers.v = r->x[V];
    buffers.o = r->o, buffers.lse = r->lse, buffers.dout = r->dout;
    buffers.dq = r->gradient[Q], buffers.dk = r->gradient[K], buffers.dv = r->gradient[V];
    for (int step = 0; step < STEPS; step++) {
        must(fattn_group_execute(forward, &buffers));
        r->loss[step] = loss_of(r);
        must(fattn_group_execute(backward, &buffers));
        descend(r);
    }
    fattn_group_plan_destroy(forward);
    fattn_group_plan_destroy(backward);
    return NULL;
}

/* Trains on this number of ranks, and adds up their losses. */
static void train_on(fattn_device *device, int ranks, double loss[STEPS])
{
    static rank all[RANKS];
    static threads all_ranks;
    threads_make(&all_ranks, ranks);
    all_ranks.device = device;
    for (int r = 0; r < ranks; r++) {
        all[r] = (rank){.device = device, .transport = threads_transport(&all_ranks, r)};
        take_share(&all[r]);
        if (pthread_create(&all[r].thread, NULL, train, &all[r])) {
            exit(EXIT_FAILURE);
        }
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(all[r].thread, NULL);
        for (int step = 0; step < STEPS; step++) {
            loss[step] = (r ? loss[step] : 0) + all[r].loss[step];
        }
    }
    threads_free(&all_ranks);
}

int main(void)
{
    fattn_device *device;
    double one[STEPS], divided[STEPS];
    for (int t = 0; t < TENSORS; t++) {
        fill(whole[t], (int64_t)S * heads(t) * D, (uint32_t)t + 1);
    }
    must(fattn_device_open("cpu", &device));
    train_on(device, 1, one);
    train_on(device, RANKS, divided);
    fattn_device_close(device);
    int right = 1;
    for (int step = 0; step < STEPS; step++) {
        printf("step %d: loss %.6f on one device, %.6f on %d ranks\n", step, one[step],
               divided[step], RANKS);
        right = right && fabs(one[step] - divided[step]) <= 1e-5 * one[step] &&
                (step == 0 || divided[step] < divided[step - 1]);
    }
    return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
