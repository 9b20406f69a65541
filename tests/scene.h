/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the programs check_cuda_*, which test the host half of backend "cuda" on a driver
 * without a GPU (stub/) and read the stub's record of calls and launches. Run them with the stub's
 * folder in LD_LIBRARY_PATH.
 *
 * A scene is a device of the stub with a plan and what it takes to run it.
 */
#ifndef FATTN_TESTS_SCENE_H
#define FATTN_TESTS_SCENE_H

#include "fattn/fattn.h"
#include "tests/driver.h"
#include "tests/expect.h"
#include "tests/tap.h"

#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++)

extern const driver *cuda;
extern stub_cuda *stub;

/* Opens the stub, with no variable of fattn's set. False if libcuda.so.1 is another driver. */
bool scene_begin(void);

/* The same for main(): a failed check where it is missing. */
static inline bool scene_lacks_stub(void)
{
    const bool found = scene_begin();
    if (!found) {
        tap_check(false, "libcuda.so.1 is the stub: LD_LIBRARY_PATH names its folder");
    }
    return !found;
}

typedef enum work { FORWARD, BACKWARD, DECODE, WORKS } work;

extern const char *const scene_works[WORKS]; /* their names */

enum { OPERAND = 1 << 17, OPERANDS = 10 }; /* bytes of room for each operand, and how many */

extern char scene_memory[OPERANDS * OPERAND]; /* of the host */

typedef struct scene {
    const char *spec;
    fattn_device *device;
    fattn_problem problem;
    fattn_plan *plan;
    fattn_buffers buffers;
    void *operands, *workspace;
    int64_t workspace_bytes;
    fattn_stream stream;
    fattn_event *events[2];
    int64_t launches; /* of the stub before the act */
} scene;

/* Each takes several launches: a causal square with grouped heads, and one query with split
 * keys. */
fattn_problem scene_problem(work w);

/* Operands side by side in memory of OPERANDS * OPERAND bytes. */
fattn_buffers scene_buffers(char *memory);

void scene_open(scene *s);

/* Memory for the operands of the scene's problem, a stream and a plan with its workspace. */
void scene_set_up_problem(scene *s);

/* The same of a problem above with more features, on a device that is opened if it is not. */
void scene_set_up(scene *s, work w, uint64_t features);
void scene_tear_down(scene *s);

/* What a scene can do once it is set up. Each succeeds only if something was launched. */
fattn_status scene_run(scene *s);
fattn_status scene_run_allocating(scene *s); /* without a workspace */
fattn_status scene_merge(scene *s);
fattn_status scene_dropout_mask(scene *s);
fattn_status scene_launched(const scene *s, fattn_status status);

/* Calls of a driver function in the stub's log. */
int scene_calls(const char *function);

/* The blocks of the row's kernel of keys, in backward, whose grid is resident, for so many items; 0
 * where the build or the device has no such row. scene_resident is one that most builds have. */
unsigned scene_resident_blocks(const char *row, int64_t items);
extern const char scene_resident[];

/* Makes the stub a device of capability 9.0, on which plans take a row with tensor maps. False
 * where the build has no such row. End it in any case. */
bool scene_begin_hopper(void);
void scene_end_hopper(void);

#endif
