/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host half of a GPU backend, in plain C, shared by the vendors: a vendor brings a table of
 * driver functions, images of compiled kernels and a list of kernel rows, and gets the verbs of a
 * backend's table. Everything is loaded when a device is opened or a plan is made, so that a run
 * does nothing but launch: it can be captured into a graph.
 *
 * A new vendor, as hip/ is one:
 *
 *     vendor.h       its words for those that cuda/vendor.h explains, but for those marked as
 *                    another's alone; and a variable `fattn_target`, where attributes of a device
 *                    do not tell its instruction set
 *     kernels/       images "verbs", "simt_forward" and "simt_backward", whose entries headers here
 *                    have, and its own; each entry has one parameter, fattn_gpu_args
 *     <vendor>_api.c a fattn_gpu_api over its driver and a fattn_gpu_vendor; with FATTN_GPU_VERBS
 *                    they make a fattn_backend
 *     meson.build    compiles and embeds the images; backends/meson.build has its name
 */
#ifndef FATTN_GPU_H
#define FATTN_GPU_H

#include "backends/gpu/gpu_api.h"
#include "core/backend.h"

/* One launch of a run. */
typedef struct fattn_gpu_shape {
    char entry[48]; /* name of the function */
    /* The function that is taken where the image has no `entry`, and its dynamic shared memory:
     * images that a driver compiles from PTX have only the entries for every feature. "": none. */
    char general[48];
    int general_shared;
    /* The function in its place where rows are merged with those of other keys, or "": it has a
     * third parameter, a fattn_merge_job. */
    char onto[48];
    int64_t blocks; /* 0: not launched. A kernel loops where there are more than a grid holds */
    int threads;    /* a block */
    int shared;     /* bytes of dynamic shared memory a block */
    bool early;     /* the kernel waits by itself for what the stream holds before it */
    bool resident;  /* no more blocks than run at a time: they take their work from a counter */
    int cluster;    /* blocks of a cluster, of which a grid has whole ones; 0: none */
    bool merges;    /* the kernel merges parts: what follows is not launched */
} fattn_gpu_shape;

typedef struct fattn_gpu_kernel fattn_gpu_kernel;

/* A phase says what it launches for a plan of the row. Pure. Phases of a run follow one another. */
typedef void fattn_gpu_phase(const fattn_gpu_kernel *kernel, const fattn_problem *problem,
                             const fattn_tiling *tiling, fattn_gpu_shape *shape);

#define FATTN_GPU_PHASES 6

/* A row whose kernels copy by tensor maps describes them, and returns how many there are: the maps
 * of an image's second parameter. Pure. */
#define FATTN_GPU_MAPS 5
typedef int fattn_gpu_maps(const fattn_gpu_kernel *kernel, const fattn_problem *problem,
                           const fattn_tiling *tiling, fattn_gpu_map maps[FATTN_GPU_MAPS]);

struct fattn_gpu_kernel {
    fattn_kernel row;      /* the first: its own functions find the rest by fattn_gpu_kernel_of() */
    const char *image;     /* that has its functions */
    int isa, isa_past;     /* the least that it needs, and the first it does not know; 0: any */
    bool (*runs)(int isa); /* which of those in between it is for; NULL: all */
    const char *needs;     /* the same in words, or NULL */
    fattn_gpu_phase *phases[FATTN_GPU_PHASES];
    fattn_gpu_maps *maps; /* NULL where it has none */

    /* What tells a row from its family, as the family's functions read it; 0 and NULL where they do
     * not ask. */
    int width;       /* channels to which rows of tiles are padded */
    int threads;     /* of a block */
    int shared;      /* bytes of shared memory of a block, where these are one number */
    const char *run; /* which of the image's functions: a part of their names */
};

static inline const fattn_gpu_kernel *fattn_gpu_kernel_of(const fattn_kernel *row)
{
    return (const fattn_gpu_kernel *)row;
}

/* fast_bytes of rows that say `shared`. */
int64_t fattn_gpu_shared_bytes(const fattn_kernel *row, const fattn_problem *problem,
                               fattn_tile tile);

/* Whether code for an instruction set runs the kernel. */
bool fattn_gpu_kernel_runs(const fattn_gpu_kernel *kernel, int isa);

/* What lean forward kernels on matrix units honour. The rest, terms of single pairs and sinks, is
 * for full ones. */
#define FATTN_GPU_LEAN                                                                         \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |     \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | FATTN_DETERMINISTIC | \
     FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* What backward ones do not, and what their lean ones honour; FATTN_DETERMINISTIC takes another way
 * of adding. */
#define FATTN_GPU_NOT_BACKWARD (FATTN_PAGED | FATTN_BATCH_INVARIANT)
#define FATTN_GPU_BACKWARD_LEAN                                                        \
    ((FATTN_GPU_LEAN & ~(FATTN_GPU_NOT_BACKWARD | FATTN_DETERMINISTIC)) | FATTN_DLSE | \
     FATTN_ACCUMULATE)

/* Types of rows on matrix units, and of rows of multiply-adds. */
#define FATTN_GPU_HALVES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))
#define FATTN_GPU_FLOATS (FATTN_DTYPE_BIT(FATTN_F32) | FATTN_GPU_HALVES)

/* The largest probability of dropout for kernels that multiply weights of 16 bits: beyond it the
 * few pairs that are kept may be too small beside the others. */
#define FATTN_GPU_DROPOUT_MAX 0.99

/* Rows for any GPU (simt.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_gpu_simt[];

/* What parts of the keys cost: each must be worth writing and merging o. */
fattn_split_cost fattn_gpu_split(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_limits *limits);

/* What every forward kernel shares that packs groups and splits keys (parts.cuh): the workspace for
 * the parts, -1 on overflow, and the phase that merges them, an entry "combine" of its image. */
int64_t fattn_gpu_parts_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                  const fattn_tiling *tiling);
fattn_gpu_phase fattn_gpu_combine;

/* The same of decoding, whose blocks count behind the parts which of them are done; and whether the
 * last one of a block of rows, of so many threads, merges what all have left. */
int64_t fattn_gpu_decode_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                   const fattn_tiling *tiling);
bool fattn_gpu_merges(const fattn_problem *problem, const fattn_tiling *tiling, int threads);

/* What backward kernels share that add to dQ in a workspace (backward.c): its bytes, -1 on
 * overflow, and what runs before and after them, entries of their image for the row's width. */
int64_t fattn_gpu_backward_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                     const fattn_tiling *tiling);
fattn_gpu_phase fattn_gpu_backward_clear, fattn_gpu_backward_rows, fattn_gpu_backward_dq,
    fattn_gpu_backward_sink;

/* Entries of a dbias that is summed over axes, and in stride[] how they would lie without gaps; 0
 * where each entry is a pair's own, or there are none; -1 on overflow. A row whose kernels add to
 * them in its workspace has them at the end of it. */
int64_t fattn_gpu_sums(const fattn_problem *problem, int64_t stride[4]);

/* Compiled kernels, embedded as bytes. */
typedef struct fattn_gpu_image {
    const char *name;
    const void *bytes;
} fattn_gpu_image;

typedef struct fattn_gpu_vendor {
    const char *name;       /* of the backend */
    const char *isa_format; /* "sm_%d", for the number of an instruction set */
    const char *targets;    /* what the images were compiled for: "sm_80 sm_90" */
    /* The driver, opened at the first call; NULL, and in *why a sentence, where there is none. */
    const fattn_gpu_api *(*api)(const char **why);
    /* The number of a device's instruction set. version: what the driver says, 10 * major + minor;
     * module: image "verbs" as the device has loaded it. A result of the driver's. */
    int (*isa)(gpu_module module, int version, int *isa);
    const fattn_gpu_kernel *const *tables; /* of kernel rows, best first; ends with NULL */
    const fattn_gpu_image *images;
    int image_count;
} fattn_gpu_vendor;

/* Blocks of a launch that wants so many, of so many threads each; kernels loop over more. */
unsigned fattn_gpu_grid(const fattn_gpu_api *api, int64_t blocks, int threads);

int fattn_gpu_count(const fattn_gpu_vendor *vendor);
fattn_status fattn_gpu_open(const fattn_gpu_vendor *vendor, int ordinal, void **impl);

/* The rest of a backend's table. */
void fattn_gpu_close(void *impl);
void fattn_gpu_describe(void *impl, fattn_device_info *info);
void fattn_gpu_limits(void *impl, fattn_limits *limits);
const fattn_kernel *fattn_gpu_kernel_at(void *impl, int i, const char **missing);
const fattn_peak *fattn_gpu_peak_at(void *impl, int i);
fattn_status fattn_gpu_plan(fattn_plan *plan);
fattn_status fattn_gpu_run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                           fattn_stream stream);
fattn_status fattn_gpu_run_onto(const fattn_plan *plan, const fattn_buffers *buffers,
                                const fattn_merge_job *job, void *workspace, fattn_stream stream);
void fattn_gpu_release(fattn_plan *plan);
/* Launches an entry of image "verbs" on the default stream. */
fattn_status fattn_gpu_launch(void *impl, const char *entry, void *args, int64_t blocks,
                              int threads);
fattn_status fattn_gpu_merge(void *impl, const fattn_merge_job *job, fattn_stream stream);
fattn_status fattn_gpu_rows(void *impl, const fattn_rows_args *args, fattn_stream stream);
fattn_status fattn_gpu_dropout_mask(void *impl, const fattn_dropout_args *args,
                                    fattn_stream stream);
bool fattn_gpu_reads(void *impl, const void *pointer);
fattn_status fattn_gpu_alloc(void *impl, size_t bytes, void **memory);
fattn_status fattn_gpu_free(void *impl, void *memory);
fattn_status fattn_gpu_copy(void *impl, void *dst, const void *src, size_t bytes,
                            fattn_stream stream);
fattn_status fattn_gpu_stream_create(void *impl, fattn_stream *stream);
fattn_status fattn_gpu_stream_destroy(void *impl, fattn_stream stream);
fattn_status fattn_gpu_stream_synchronize(void *impl, fattn_stream stream);
fattn_status fattn_gpu_stream_wait(void *impl, fattn_stream stream, void *event);
fattn_status fattn_gpu_stream_capture(void *impl, fattn_stream stream, uint64_t *capture);
fattn_status fattn_gpu_capture_mode(void *impl, int *mode);
fattn_status fattn_gpu_event_create(void *impl, void **event);
void fattn_gpu_event_destroy(void *impl, void *event);
fattn_status fattn_gpu_event_record(void *impl, void *event, fattn_stream stream);
fattn_status fattn_gpu_event_synchronize(void *impl, void *event);
fattn_status fattn_gpu_event_elapsed(void *impl, void *start, void *stop, double *milliseconds);
fattn_status fattn_gpu_reach(void *impl, void *other);

/* The fields of a backend's table that vendors share: all but its name, count and open. */
#define FATTN_GPU_VERBS                                                                       \
    .close = fattn_gpu_close, .describe = fattn_gpu_describe, .limits = fattn_gpu_limits,     \
    .kernel = fattn_gpu_kernel_at, .peak = fattn_gpu_peak_at, .plan = fattn_gpu_plan,         \
    .run = fattn_gpu_run, .run_onto = fattn_gpu_run_onto, .release = fattn_gpu_release,       \
    .merge = fattn_gpu_merge, .dropout_mask = fattn_gpu_dropout_mask, .rows = fattn_gpu_rows, \
    .inspect = fattn_inspect_refuse, .reads = fattn_gpu_reads, .alloc = fattn_gpu_alloc,      \
    .free = fattn_gpu_free, .copy = fattn_gpu_copy, .stream_create = fattn_gpu_stream_create, \
    .stream_destroy = fattn_gpu_stream_destroy,                                               \
    .stream_synchronize = fattn_gpu_stream_synchronize, .stream_wait = fattn_gpu_stream_wait, \
    .stream_capture = fattn_gpu_stream_capture, .capture_mode = fattn_gpu_capture_mode,       \
    .event_create = fattn_gpu_event_create, .event_destroy = fattn_gpu_event_destroy,         \
    .event_record = fattn_gpu_event_record, .event_synchronize = fattn_gpu_event_synchronize, \
    .event_elapsed = fattn_gpu_event_elapsed, .reach = fattn_gpu_reach

#endif
