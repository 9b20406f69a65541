/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of `fattn run`: files of inputs and outputs, the problem that follows from their shapes
 * and from the options, and with --ranks the rows that this process has. tools/run.c calls the
 * steps in order.
 */
#ifndef FATTN_TOOLS_JOB_H
#define FATTN_TOOLS_JOB_H

#include "tools/npy/npy.h"
#include "tools/options/problem_options.h"
#include "tools/ranks/world.h"

enum {
    IN_Q,
    IN_K,
    IN_V,
    IN_BIAS,
    IN_MASK,
    IN_BLOCK_MASK,
    IN_SINK,
    IN_ALIBI,
    IN_K_DESCALE,
    IN_V_DESCALE,
    IN_CU_Q,
    IN_CU_K,
    IN_USED_Q,
    IN_USED_K,
    IN_START_K,
    IN_TABLE,
    IN_Q_OFFSETS,
    IN_K_OFFSETS,
    IN_WHOLES_Q,
    IN_WHOLES_K,
    IN_DO,
    IN_DLSE,
    INPUTS
};
enum {
    OUT_O,
    OUT_LSE,
    OUT_DQ,
    OUT_DK,
    OUT_DV,
    OUT_DBIAS,
    OUT_DSINK,
    OUT_SCORES,
    OUT_PROBABILITIES,
    OUTPUTS
};

/* The type that an input is converted to. */
typedef enum role {
    TENSOR, /* the problem's dtype; this and the next three have rows that ranks divide */
    KEY,    /* dtype_kv */
    VALUE,  /* dtype_v */
    RESULT, /* the dtype of o */
    BIAS,   /* dtype_bias; by default the problem's dtype if the file has it, else as REAL */
    REAL,   /* f32, or f64 in an f64 problem */
    BYTES,  /* bool or u8 */
    COUNTS, /* int32 */
    PLACES  /* int64 */
} role;

typedef struct job_input {
    role role;
    uint64_t feature; /* set if the input is given */
} job_input;

extern const job_input job_inputs[INPUTS];

enum { QUERIES, KEYS, SIDES };

/* The rows that this rank has of the queries or of the keys, in all sequences. */
typedef struct share {
    fattn_run *runs;
    int64_t count, rows;
} share;

/* --ranks and what goes with it. */
typedef struct divided {
    bool wanted, any;  /* any: one of the others is given */
    int split, scheme; /* their numbers; 0: auto */
    double timeout;
    world world;
    share share[SIDES];
} divided;

typedef struct job {
    const char *in_path[INPUTS];   /* NULL: not given */
    const char *out_path[OUTPUTS]; /* NULL: not wanted */
    const char *device;
    bool backward, has_seed, has_offset, alibi_bias;
    uint64_t seed, offset;
    int64_t threads; /* 0: the device's default */
    problem_options options;
    divided divided;

    npy_array in[INPUTS], out[OUTPUTS];
    fattn_problem problem;
    fattn_buffers buffers;
} job;

enum { LINE = 512 }; /* of an error message */

/* --- Errors ----------------------------------------------------------------------------------- */

/* Prints why the run cannot go on, and returns false, which is what a step returns then. */
bool job_complain(const char *why);

/* Handles the result of a function of npy.h: prints `why` if it failed. Returns whether it
 * succeeded. */
bool job_succeeded(int failed, const char *why);

/* The exit status after a step has failed: for files and options that cannot be used, or for lack
 * of memory. */
int job_exit_status(void);

/* --- Options ---------------------------------------------------------------------------------- */

void job_init(job *j);
void job_free(job *j);

/* Returns what options_parse() returns. */
int job_parse(int argc, char **argv, job *j);

/* Prints why and returns false if options exclude each other or would have no effect. */
bool job_check(const job *j);

/* Sets the fields that follow from the options alone, before any file is read. */
void job_apply_options(job *j);

/* Whether an option of problem_options.h is given. */
bool job_given(const job *j, int which);

/* --- Inputs ----------------------------------------------------------------------------------- */

/* Completes the replacements of files that killed runs left unfinished. This changes files, so it
 * comes first. */
void job_recover(const job *j);

/* Reads inputs; with --ranks not those of which each rank reads only its own rows
 * (job_has_rows()). */
bool job_read(job *j);
bool job_has_rows(const job *j, int input);

/* The type whose bit patterns an input's file may hold (npy_read()): that of the input, or of the
 * whole problem, if an option gives it. */
npy_kind job_pattern(const job *j, int input);

/* Converts all inputs that have been read. */
bool job_convert(job *j);
bool job_convert_input(job *j, int input);

/* The type that an input is converted to, once the types of the problem are known. */
fattn_dtype job_type_of(const fattn_problem *p, role as);
npy_kind job_kind_of(fattn_dtype dtype);

/* Checks that the shapes of the inputs match, and derives lengths and strides of the problem. */
bool job_shape(job *j);

/* Writes a shape, as in "(2, any, 64)"; "any" stands for a negative length. */
void job_print_shape(char *text, size_t size, int rank, const int64_t *shape);

/* --- Outputs ---------------------------------------------------------------------------------- */

/* Zeroed arrays for everything that forward or backward writes; with FATTN_ACCUMULATE the sums
 * that gradients are added to. */
bool job_create_outputs(job *j);

/* Points the buffers to the arrays. */
void job_point(job *j);

/* The library requires a pointer even to an empty array. */
void *job_pointer(const npy_array *a);

/* Writes all files, or none. */
bool job_write(const job *j);

/* --- --ranks ---------------------------------------------------------------------------------- */

fattn_scheme job_scheme(const job *j);

/* Reads this rank's rows of every input that is divided. */
bool job_read_rows(job *j);

/* Sets the strides of this rank's share of tensors over pairs. The strides of the whole arrays say
 * which axes broadcast. */
void job_narrow(job *j);

/* The first rank creates the files, all ranks write their rows into them, and the first rank
 * renames them into place: all files or none. */
bool job_write_rows(const job *j);

#endif
