/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the hazard programs. A hazard is a failure that some attention library really had; each
 * has an identifier (a letter for its group and a number) and a test of that name. Hazards that
 * cannot occur here, or need hardware, keep their row, with a reason instead of a function.
 *
 * A *place* is a kernel row that this machine can run, on an open device: by default every row of
 * every backend in host memory, or, with FATTN_BACKEND set, the rows of that backend; with
 * HAZARD_ROW set, the row of that name alone. Most hazards build a case with
 * tools/judge/random_case.h and judge it at every place and with every tile of the row. Hazards
 * that run a case themselves use hazard_run and hazard_execute, or a twin, which handle device
 * memory.
 */
#ifndef FATTN_TESTS_HAZARD_H
#define FATTN_TESTS_HAZARD_H

#include "core/backend.h"
#include "core/plan.h"
#include "core/status.h"
#include "tools/judge/judge.h"

typedef struct hazard {
    const char *id;     /* "hazard_A5" */
    const char *broke;  /* what went wrong elsewhere, in a few words */
    void (*test)(void); /* NULL: skipped */
    const char *skip;   /* why */
} hazard;

/*
 * The body of main. The table ends with a row whose id is NULL. Each hazard has a watchdog.
 *
 *     PROGRAM                  runs all hazards of the table
 *     PROGRAM hazard_X ...     these
 *     PROGRAM -hazard_X ...    all but these
 *
 * A hazard passes if checks were made, none failed, and a row took one of its cases. The row that
 * HAZARD_ROW names may take none: then the hazard is skipped.
 */
int hazard_main(const hazard *table, int argc, char **argv);

#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++)

/* Counts a check of the running hazard and prints the sentence if it fails. Returns holds. */
bool hazard_check(bool holds, const char *format, ...) FATTN_PRINTF(2, 3);

/* Skips the running hazard from within, with a reason. */
void hazard_skip(const char *why);

typedef struct place {
    fattn_device *device;
    const fattn_kernel *kernel;
    const char *backend;
} place;

extern place hazard_places[];
extern int hazard_place_count;

/* Whether the row takes the case; other places are skipped. Not a check, unless planning fails. */
bool hazard_takes(const place *at, const draw_case *c);

/* Whether to skip a place because the case is large and a sanitizer makes it slow, while another
 * place runs the same code. */
bool hazard_spares(const place *at, const draw_case *c);

/* A blank case with these sizes, and sequences of full length. D = Dv. */
draw_case hazard_case(fattn_op op, fattn_dtype dtype, int64_t batch, int64_t heads_q,
                      int64_t heads_k, int64_t rows, int64_t keys, int64_t dim);

/* draw_build. Not a check, unless it fails. */
bool hazard_build(draw_case *c);

/* Saves o and lse of a backward, judges the built case at every place, with every tile and with up
 * to `splits` splits if the row can split keys, and frees it. Messages include `words`. Large cases
 * pass splits = -1: only the planner's tile. */
void hazard_judge(draw_case *c, int splits, const char *format, ...) FATTN_PRINTF(3, 4);

/* hazard_build, then hazard_judge. */
void hazard_judge_drawn(draw_case *c, int splits, const char *format, ...) FATTN_PRINTF(3, 4);

bool hazard_on_host(const place *at); /* kernels read host memory */

/* Whether a sanitizer looks at every access, and finds in a few problems what it finds in many. */
bool hazard_sanitized(void);

/* Whether kernels run on an emulated GPU (stub/hip), instruction by instruction. Hazards that need
 * a large size skip it, because they would take minutes. */
bool hazard_emulated(void);

/* Runs the case at a place on its own images, so that draw_get reads the outputs; copies them if
 * the device has its own memory. wish NULL: the planner's tile. */
fattn_status hazard_run(const place *at, const draw_case *c, const fattn_wish *wish);

/* The same for a plan and arbitrary buffers in host memory. */
fattn_status hazard_execute(const fattn_plan *plan, const fattn_buffers *buffers);

/* A copy of a case's images in device memory. */
typedef struct twin {
    fattn_device *device;
    const draw_case *c;
    unsigned char *bytes[DRAW_IDS]; /* of each image */
    fattn_buffers buffers;          /* pointing to the device memory */
} twin;

/* Allocates and sends. Free it even after a failure. */
fattn_status twin_make(twin *t, fattn_device *device, const draw_case *c);
fattn_status twin_send(const twin *t, fattn_stream stream); /* sends every image */
fattn_status twin_read(const twin *t,
                       fattn_stream stream); /* copies outputs into the case's images; waits */
void twin_free(twin *t);

/* Restores outputs to their state before a run. */
void hazard_clear_outputs(draw_case *c);

/* Copies an image, for comparing runs. The caller frees it. */
unsigned char *hazard_copy(const draw_case *c, draw_id id);
bool hazard_equals(const draw_case *c, draw_id id, const unsigned char *bytes);

#endif
