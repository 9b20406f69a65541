/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the peaks of a GPU, multiply-adds and memory reads, by the kernels of peaks.cuh
 * (core/peak.h). */
#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "core/memory.h"
#include "core/status.h"

enum {
    LANES = 32,               /* lanes of an instruction, as rates count them for any wave size */
    FMA_LAUNCHES = 8,         /* back to back, so that the launch overhead hardly counts */
    FMA_ROUNDS = 256,         /* takes fewer than 2^20 cycles, beyond which some chips wrap */
    READ_BYTES_MIN = 1 << 30, /* per launch */
};

/* What a measurement uses on the device. */
typedef struct bench {
    void *impl;
    int64_t units;
    void *start, *stop;     /* events */
    uint64_t *out, *cycles; /* cycles of every unit, in device and host memory */
} bench;

static void close(bench *b)
{
    if (b->start) {
        fattn_gpu_event_destroy(b->impl, b->start);
    }
    if (b->stop) {
        fattn_gpu_event_destroy(b->impl, b->stop);
    }
    if (b->out) {
        (void)fattn_gpu_free(b->impl, b->out);
    }
    fattn_memory_free(b->cycles);
}

static fattn_status open(void *impl, bench *b)
{
    fattn_limits limits;
    fattn_gpu_limits(impl, &limits);
    *b = (bench){.impl = impl, .units = limits.units};
    const size_t bytes = (size_t)(b->units + 1) * sizeof *b->out;
    void *out = NULL;
    b->cycles = fattn_memory_alloc(bytes);
    fattn_status status = b->cycles ? FATTN_OK : fattn_fail_memory((int64_t)bytes, "cycles");
    status = status ? status : fattn_gpu_alloc(impl, bytes, &out);
    b->out = out;
    status = status ? status : fattn_gpu_event_create(impl, &b->start);
    return status ? status : fattn_gpu_event_create(impl, &b->stop);
}

/* Times `launches` launches of an entry, after one that warms it up. */
static fattn_status time_launches(const bench *b, const char *entry, fattn_gpu_peak_args *args,
                                  int launches, double *seconds)
{
    double ms = 0;
    args->out = b->out;
    fattn_status status = fattn_gpu_launch(b->impl, entry, args, b->units, FATTN_GPU_PEAK_THREADS);
    status = status ? status : fattn_gpu_event_record(b->impl, b->start, NULL);
    for (int n = 0; !status && n < launches; n++) {
        status = fattn_gpu_launch(b->impl, entry, args, b->units, FATTN_GPU_PEAK_THREADS);
    }
    status = status ? status : fattn_gpu_event_record(b->impl, b->stop, NULL);
    status = status ? status : fattn_gpu_event_elapsed(b->impl, b->start, b->stop, &ms);
    *seconds = 1e-3 * ms;
    return status;
}

/* The cycles that the slowest unit took for the last launch. */
static fattn_status read_cycles(const bench *b, double *cycles)
{
    uint64_t most = 0;
    fattn_status status =
        fattn_gpu_copy(b->impl, b->cycles, b->out, (size_t)b->units * sizeof *b->out, NULL);
    status = status ? status : fattn_gpu_stream_synchronize(b->impl, NULL);
    for (int64_t n = 0; !status && n < b->units; n++) {
        most = b->cycles[n] > most ? b->cycles[n] : most;
    }
    *cycles = (double)most;
    return status;
}

static fattn_status measure_fma(const bench *b, fattn_peak_reading *reading)
{
    fattn_gpu_peak_args args = {.rounds = FMA_ROUNDS, .factor = 0.999f, .summand = 0.001f};
    const double fmas = (double)FATTN_GPU_PEAK_THREADS * FMA_ROUNDS * FATTN_GPU_PEAK_FMAS;
    double seconds, cycles = 0;
    fattn_status status = time_launches(b, "peak_fma", &args, FMA_LAUNCHES, &seconds);
    status = status ? status : read_cycles(b, &cycles);
    if (!status) {
        reading->rate = 2 * fmas * (double)b->units * FMA_LAUNCHES / seconds;
        reading->clock = cycles * FMA_LAUNCHES / seconds;
        reading->issue = fmas / LANES / cycles;
    }
    return status;
}

static fattn_status measure_read(const bench *b, const void *data, int64_t bytes,
                                 fattn_peak_reading *reading)
{
    const int64_t whole = bytes / 16 * 16;
    fattn_gpu_peak_args args = {
        .data = data, .bytes = whole, .rounds = whole ? READ_BYTES_MIN / whole + 1 : 0};
    double seconds;
    const fattn_status status = time_launches(b, "peak_read", &args, 1, &seconds);
    if (!status) {
        *reading = (fattn_peak_reading){.rate = (double)whole * (double)args.rounds / seconds};
    }
    return status;
}

static fattn_status measure(void *impl, const fattn_peak *peak, const void *data, int64_t bytes,
                            fattn_peak_reading *reading)
{
    bench b;
    fattn_status status = open(impl, &b);
    if (!status) {
        status =
            peak->reads_memory ? measure_read(&b, data, bytes, reading) : measure_fma(&b, reading);
    }
    fattn_reason_hold(status);
    close(&b);
    fattn_reason_let();
    return status;
}

/* The peak of matrix units is not measured. */
static const fattn_peak peaks[] = {
    {.name = "fma f32",
     .dtypes = FATTN_GPU_FLOATS,
     .kernels = "simt_",
     .lanes = LANES,
     .flops = 2,
     .measure = measure},
    {.name = "read",
     .reads_memory = true,
     .dtypes = FATTN_GPU_FLOATS,
     .lanes = 4,
     .measure = measure},
};

const fattn_peak *fattn_gpu_peak_at(void *impl, int i)
{
    (void)impl;
    return i < (int)(sizeof peaks / sizeof peaks[0]) ? &peaks[i] : NULL;
}
