/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host half of a GPU backend, in plain C, shared by the vendors. A vendor supplies a table of
 * driver functions, images of compiled kernels and a list of kernel rows. In return it gets the
 * functions of a backend's table. Everything is loaded when a device is opened or a plan is made; a
 * run only launches, so it can be captured into a graph.
 *
 * What a new vendor writes (hip/ is an example):
 *
 *     vendor.h       its definitions of the words that cuda/vendor.h explains, except those marked
 *                    for another vendor alone; and a variable `fattn_target`, if the attributes of
 *                    a device do not tell its instruction set
 *     kernels/       images "verbs", "simt_forward" and "simt_backward", whose entries are in
 *                    headers here, and images of its own; an entry has one parameter,
 *                    fattn_gpu_args
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
    /* The function to launch if the image has no `entry`, and its dynamic shared memory; "": none.
     * Images that a driver compiles from PTX lack the entries for single features. */
    char general[48];
    int general_shared;
    /* The function to launch instead if o and lse are merged with those of other keys, or "". It
     * has a third parameter, a fattn_merge_job. */
    char onto[48];
    int64_t blocks; /* 0: not launched. A kernel loops if there are more than a grid holds */
    int threads;    /* per block */
    int shared;     /* bytes of dynamic shared memory per block */
    bool early;     /* programmatic dependent launch: the kernel itself waits for earlier work */
    bool resident;  /* launch no more blocks than run at a time; they loop over their work */
    int cluster;    /* blocks per cluster, of which a resident grid has whole ones; 0: none */
    bool merges;    /* the kernel merges parts itself: the phases after it are not launched */
} fattn_gpu_shape;

typedef struct fattn_gpu_kernel fattn_gpu_kernel;

/* A phase describes one launch of a plan's run. It is pure. Phases run one after another. */
typedef void fattn_gpu_phase(const fattn_gpu_kernel *kernel, const fattn_problem *problem,
                             const fattn_tiling *tiling, fattn_gpu_shape *shape);

#define FATTN_GPU_PHASES 6

/* Describes the tensor maps of a row whose kernels copy by TMA, and returns how many there are. The
 * kernels get them as their second parameter. Pure. */
#define FATTN_GPU_MAPS 7
typedef int fattn_gpu_maps(const fattn_gpu_kernel *kernel, const fattn_problem *problem,
                           const fattn_tiling *tiling, fattn_gpu_map maps[FATTN_GPU_MAPS]);

struct fattn_gpu_kernel {
    fattn_kernel row;      /* first, so that fattn_gpu_kernel_of() finds the rest */
    const char *image;     /* the image that has its functions */
    int isa, isa_past;     /* it runs from instruction set isa on, before isa_past; 0: no bound */
    bool (*runs)(int isa); /* which instruction sets between these it runs on; NULL: all */
    const char *needs;     /* the same in words, or NULL */
    fattn_gpu_phase *phases[FATTN_GPU_PHASES];
    fattn_gpu_maps *maps; /* NULL if it has none */

    /* Parameters that tell rows of one file apart, for the functions of that file; 0 and NULL where
     * these do not read them. */
    int width;       /* channels to which rows of tiles are padded */
    int threads;     /* per block */
    int shared;      /* bytes of shared memory per block, if they depend on the row alone */
    const char *run; /* the part of entry names that says which variant this is */
};

static inline const fattn_gpu_kernel *fattn_gpu_kernel_of(const fattn_kernel *row)
{
    return (const fattn_gpu_kernel *)row;
}

/* fast_bytes of rows that set `shared`. */
int64_t fattn_gpu_shared_bytes(const fattn_kernel *row, const fattn_problem *problem,
                               fattn_tile tile);

/* Whether the kernel runs on an instruction set. */
bool fattn_gpu_kernel_runs(const fattn_gpu_kernel *kernel, int isa);

/* The features of lean forward kernels on matrix units. Full kernels have the others too: terms of
 * single pairs, and sinks. */
#define FATTN_GPU_LEAN                                                                         \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |     \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | FATTN_DETERMINISTIC | \
     FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* Those of lean backward kernels. FATTN_DETERMINISTIC needs other kernels, which add to dQ in a
 * fixed order. */
#define FATTN_GPU_BACKWARD_LEAN                                                           \
    ((FATTN_GPU_LEAN & ~(FATTN_KERNEL_NOT_BACKWARD | FATTN_DETERMINISTIC)) | FATTN_DLSE | \
     FATTN_ACCUMULATE)

/* Dtypes of kernels on matrix units, of SIMT kernels, and of k and v in SIMT's forward. */
#define FATTN_GPU_HALVES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))
#define FATTN_GPU_FLOATS (FATTN_DTYPE_BIT(FATTN_F32) | FATTN_GPU_HALVES)
#define FATTN_GPU_CACHES (FATTN_GPU_FLOATS | FATTN_DTYPE_BIT(FATTN_E4M3))

/* The largest dropout probability of kernels that round weights to 16 bits. Beyond it, the weights
 * of the few pairs that are kept may be too small beside those of the others. */
#define FATTN_GPU_DROPOUT_MAX 0.99

/* SIMT rows, which run on any GPU (simt.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_gpu_simt[];

/* How finely keys are split. A part must have enough keys to pay for writing and merging its o. */
fattn_split_cost fattn_gpu_split(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_limits *limits);

/* For every forward kernel that packs groups and splits keys (parts.cuh): the workspace for the
 * parts, -1 on overflow, and the phase that merges them, an entry "combine" of its image. */
int64_t fattn_gpu_parts_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                  const fattn_tiling *tiling);
fattn_gpu_phase fattn_gpu_combine;

/* The same workspace for decoding kernels: behind the parts, they count how many blocks of each
 * head have finished. fattn_gpu_merges() says whether the last of these blocks, of `threads`
 * threads, merges all parts, so that no second kernel is needed. */
int64_t fattn_gpu_decode_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                   const fattn_tiling *tiling);
bool fattn_gpu_merges(const fattn_problem *problem, const fattn_tiling *tiling, int threads);

/* For backward kernels that add to dQ in a workspace (backward.c): its bytes, -1 on overflow, and
 * the phases before and after them, entries of their image for the row's width. */
int64_t fattn_gpu_backward_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                     const fattn_tiling *tiling);
fattn_gpu_phase fattn_gpu_backward_clear, fattn_gpu_backward_rows, fattn_gpu_backward_dq,
    fattn_gpu_backward_sink;

/* How many entries a dbias has that is summed over axes, and in stride[] its strides if it had no
 * gaps. 0 if there is no dbias or no axis is summed over, -1 on overflow. Kernels that sum in the
 * workspace have these entries at the end of it. */
int64_t fattn_gpu_dbias_sums(const fattn_problem *problem, int64_t stride[4]);

/* Compiled kernels, embedded as bytes. */
typedef struct fattn_gpu_image {
    const char *name;
    const void *bytes;
} fattn_gpu_image;

typedef struct fattn_gpu_vendor {
    const char *name;       /* of the backend */
    const char *isa_format; /* "sm_%d", for the number of an instruction set */
    const char *targets;    /* what the images were compiled for: "sm_80 sm_90" */
    /* The driver, which the first call opens; NULL if there is none, and *why says why. */
    const fattn_gpu_api *(*api)(const char **why);
    /* Finds the number of a device's instruction set. module: the loaded image "verbs"; version:
     * 10 * major + minor, from the driver. Returns a result of the driver. */
    int (*isa)(gpu_module module, int version, int *isa);
    const fattn_gpu_kernel *const *tables; /* of kernel rows, best first; ends with NULL */
    const fattn_gpu_image *images;
    int image_count;
} fattn_gpu_vendor;

/* The size of a grid for `blocks` blocks of `threads` threads. It is smaller if a launch cannot
 * have that many; kernels loop. */
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
fattn_status fattn_gpu_rows(void *impl, const fattn_rows_args *jobs, int count,
                            fattn_stream stream);
fattn_status fattn_gpu_dropout_mask(void *impl, const fattn_dropout_args *args,
                                    fattn_stream stream);
bool fattn_gpu_reads(void *impl, const void *pointer);
fattn_status fattn_gpu_alloc(void *impl, size_t bytes, void **memory);
fattn_status fattn_gpu_free(void *impl, void *memory);
fattn_status fattn_gpu_copy(void *impl, void *dst, const void *src, size_t bytes,
                            fattn_stream stream);
fattn_status fattn_gpu_copy_rows(void *impl, const fattn_row_copy *copy, fattn_stream stream);
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
fattn_status fattn_gpu_reach(void *impl, void *other, bool *direct);

/* The fields of a backend's table that vendors share: all but its name, count and open. */
#define FATTN_GPU_VERBS                                                                       \
    .close = fattn_gpu_close, .describe = fattn_gpu_describe, .limits = fattn_gpu_limits,     \
    .kernel = fattn_gpu_kernel_at, .peak = fattn_gpu_peak_at, .plan = fattn_gpu_plan,         \
    .run = fattn_gpu_run, .run_onto = fattn_gpu_run_onto, .release = fattn_gpu_release,       \
    .merge = fattn_gpu_merge, .dropout_mask = fattn_gpu_dropout_mask, .rows = fattn_gpu_rows, \
    .inspect = fattn_inspect_refuse, .reads = fattn_gpu_reads, .alloc = fattn_gpu_alloc,      \
    .free = fattn_gpu_free, .copy = fattn_gpu_copy, .copy_rows = fattn_gpu_copy_rows,         \
    .stream_create = fattn_gpu_stream_create, .stream_destroy = fattn_gpu_stream_destroy,     \
    .stream_synchronize = fattn_gpu_stream_synchronize, .stream_wait = fattn_gpu_stream_wait, \
    .stream_capture = fattn_gpu_stream_capture, .capture_mode = fattn_gpu_capture_mode,       \
    .event_create = fattn_gpu_event_create, .event_destroy = fattn_gpu_event_destroy,         \
    .event_record = fattn_gpu_event_record, .event_synchronize = fattn_gpu_event_synchronize, \
    .event_elapsed = fattn_gpu_event_elapsed, .reach = fattn_gpu_reach

#endif
