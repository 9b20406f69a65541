/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the hazard programs share. A hazard is a failure that some attention library really had;
 * each has an identifier (a letter for its group and a number) and a test of that name. Hazards
 * that cannot arise here, or need hardware, keep their row, with the reason in place of a function.
 *
 * A *place* is a kernel row that this machine can run, on an open device: every backend whose
 * memory is the host's, every instruction set; or, with FATTN_BACKEND in the environment, the rows
 * of that backend alone. Most hazards make a case with tools/judge/random_case.h and have it judged
 * at every place and with every tile of the row's menu. Those that run a case themselves use
 * hazard_run and hazard_execute, or a twin, and so need not know where a device's memory is.
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

/* The body of main: runs the hazards of the table, or those named in argv, each under a watchdog.
 * The table ends with a row whose id is NULL. */
int hazard_main(const hazard *table, int argc, char **argv);

/* Counts a check of the running hazard; when it does not hold, prints the sentence. Returns
 * holds. */
bool hazard_check(bool holds, const char *format, ...) FATTN_PRINTF(2, 3);

/* Passes the running hazard over, from within, and says why. */
void hazard_skip(const char *why);

typedef struct place {
    fattn_device *device;
    const fattn_kernel *kernel;
    const char *backend;
} place;

extern place hazard_places[];
extern int hazard_place_count;

/* Whether the row takes the case; places that do not are passed over. */
bool hazard_takes(const place *at, const draw_case *c);

/* Whether a place is passed over because the case is large, sanitizers make it slow, and what they
 * look for is in lines that another place runs too. */
bool hazard_spares(const place *at, const draw_case *c);

/* A blank case with these sizes, and sequences of full length. D = Dv. */
draw_case hazard_case(fattn_op op, fattn_dtype dtype, int64_t batch, int64_t heads_q,
                      int64_t heads_k, int64_t rows, int64_t keys, int64_t dim);

/* draw_build, reported when it fails. */
bool hazard_build(draw_case *c);

/* Saves o and lse of a backward, judges the built case at every place with every tile, and with up
 * to `splits` splits where the row can cut keys, and frees it. The words say which variant it is.
 * Large cases pass -1: the planner's tile alone. */
void hazard_judge(draw_case *c, int splits, const char *format, ...) FATTN_PRINTF(3, 4);

/* hazard_build and hazard_judge. */
void hazard_judge_drawn(draw_case *c, int splits, const char *format, ...) FATTN_PRINTF(3, 4);

bool hazard_on_host(const place *at); /* kernels read host memory */

/* Whether kernels run on an emulated GPU (stub/hip), instruction by instruction. Hazards whose size
 * cannot be smaller, and that would take minutes there, pass over it. */
bool hazard_emulated(void);

/* Runs the case at a place on the images themselves, so that draw_get reads the outputs; through
 * copies where the device has memory of its own. wish NULL: the planner's tile. */
fattn_status hazard_run(const place *at, const draw_case *c, const fattn_wish *wish);

/* The same for a plan and any buffers in host memory. */
fattn_status hazard_execute(const fattn_plan *plan, const fattn_buffers *buffers);

/* A case's images in a device's own memory. */
typedef struct twin {
    fattn_device *device;
    const draw_case *c;
    unsigned char *bytes[DRAW_IDS]; /* of each image */
    fattn_buffers buffers;          /* pointing there */
} twin;

/* Allocates and sends. Free it even where it failed. */
fattn_status twin_make(twin *t, fattn_device *device, const draw_case *c);
fattn_status twin_send(const twin *t, fattn_stream stream); /* every image */
fattn_status twin_read(const twin *t, fattn_stream stream); /* outputs, into the case's; waits */
void twin_free(twin *t);

/* Puts outputs back to what they were before a run. */
void hazard_clear_outputs(draw_case *c);

/* Copies of an image, to compare runs: the caller frees. */
unsigned char *hazard_copy(const draw_case *c, draw_id id);
bool hazard_equals(const draw_case *c, draw_id id, const unsigned char *bytes);

#endif
