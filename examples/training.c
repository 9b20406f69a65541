/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training: forward, a loss, backward, a step of gradient descent, repeated. The parameters are q,
 * k and v themselves, and o should approach a target.
 *
 * The gradients are checked by the loss: over a step it changes by the length of the step times the
 * mean of the slopes at both ends, up to third order. It must also fall.
 */
#include <string.h>

#include "example.h"

enum { B = 2, S = 96, H = 4, D = 32, N = B * S * H * D, STEPS = 20 };
static const double RATE = 0.2;

enum { Q, K, V, PARAMETERS };
static float parameter[PARAMETERS][N], gradient[PARAMETERS][N], previous[PARAMETERS][N];
static float o[N], target[N], dout[N];

/* On the device. dout is like o, lse (B, H, S); each gradient is like its tensor. */
static fattn_device *device;
static fattn_plan *forward, *backward;
static float *parameter_device[PARAMETERS], *gradient_device[PARAMETERS];
static float *o_device, *dout_device, *lse_device;

static void make_plans(void)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.batch = B, problem.heads_q = problem.heads_k = H;
    problem.seqlen_q = problem.seqlen_k = S, problem.dim = problem.dim_v = D;
    problem.features = FATTN_CAUSAL;

    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE; /* backward needs lse */
    must(fattn_plan_create(device, &problem, &forward));

    problem.op = FATTN_BACKWARD;
    problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    must(fattn_plan_create(device, &problem, &backward));
}

static void make_memory(void)
{
    for (int p = 0; p < PARAMETERS; p++) {
        parameter_device[p] = reserve(device, sizeof parameter[p]);
        gradient_device[p] = reserve(device, sizeof gradient[p]);
    }
    o_device = reserve(device, sizeof o);
    dout_device = reserve(device, sizeof dout);
    lse_device = reserve(device, B * H * S * sizeof(float));
}

/* The buffers of both directions; each uses its own. */
static fattn_buffers buffers_of_both(void)
{
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = parameter_device[Q];
    buffers.k = parameter_device[K];
    buffers.v = parameter_device[V];
    buffers.o = o_device;
    buffers.lse = lse_device;
    buffers.dout = dout_device;
    buffers.dq = gradient_device[Q];
    buffers.dk = gradient_device[K];
    buffers.dv = gradient_device[V];
    return buffers;
}

/* Forward on the parameters; returns the loss, |o - target|^2 / 2. */
static double run_forward(const fattn_buffers *buffers)
{
    for (int p = 0; p < PARAMETERS; p++) {
        copy(device, parameter_device[p], parameter[p], sizeof parameter[p]);
    }
    must(fattn_execute(forward, buffers, NULL, NULL));
    copy(device, o, o_device, sizeof o);
    double loss = 0.0;
    for (int n = 0; n < N; n++) {
        dout[n] = o[n] - target[n]; /* d loss / d o */
        loss += 0.5 * (double)dout[n] * (double)dout[n];
    }
    return loss;
}

/* Backward, from dout to the gradients. */
static void run_backward(const fattn_buffers *buffers)
{
    copy(device, dout_device, dout, sizeof dout);
    must(fattn_execute(backward, buffers, NULL, NULL));
    for (int p = 0; p < PARAMETERS; p++) {
        memcpy(previous[p], gradient[p], sizeof gradient[p]);
        copy(device, gradient[p], gradient_device[p], sizeof gradient[p]);
    }
}

/* parameter -= rate gradient */
static void step(double rate)
{
    for (int p = 0; p < PARAMETERS; p++) {
        for (int n = 0; n < N; n++) {
            parameter[p][n] -= (float)(rate * (double)gradient[p][n]);
        }
    }
}

/* The slope of the loss along the last step, -previous, at the middle of the step. */
static double middle_slope(void)
{
    double slope = 0.0;
    for (int p = 0; p < PARAMETERS; p++) {
        for (int n = 0; n < N; n++) {
            slope -= (double)previous[p][n] * ((double)previous[p][n] + (double)gradient[p][n]) / 2;
        }
    }
    return slope;
}

int main(void)
{
    for (int p = 0; p < PARAMETERS; p++) {
        fill(parameter[p], N, (uint32_t)p);
    }
    fill(target, N, 9);
    must(fattn_device_open(NULL, &device));
    make_plans();
    make_memory();
    const fattn_buffers buffers = buffers_of_both();

    double worst = 0.0, loss = run_forward(&buffers);
    run_backward(&buffers);
    for (int n = 1; n <= STEPS; n++) {
        step(RATE);
        const double next = run_forward(&buffers);
        run_backward(&buffers);
        printf("step %2d: loss %.2f\n", n, next);
        worst = !(next < loss) ? NAN : further(worst, (next - loss) / (RATE * middle_slope()), 1.0);
        loss = next;
    }
    const int status = judge(device, "the loss's change from RATE times its slope", worst, 5e-3);

    for (int p = 0; p < PARAMETERS; p++) {
        must(fattn_device_free(device, parameter_device[p]));
        must(fattn_device_free(device, gradient_device[p]));
    }
    must(fattn_device_free(device, o_device));
    must(fattn_device_free(device, dout_device));
    must(fattn_device_free(device, lse_device));
    fattn_plan_destroy(forward);
    fattn_plan_destroy(backward);
    fattn_device_close(device);
    return status;
}
