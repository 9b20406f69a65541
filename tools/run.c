/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn run`: attention on NumPy arrays. Reads .npy files, converts them to types that the library
 * takes, runs forward (and backward), and writes all of the outputs or none.
 *
 * Start at the end: fattn_tool_run() is the list of steps.
 */
#define _POSIX_C_SOURCE 200809L /* unsetenv */

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/dtype.h"
#include "core/integer.h"
#include "core/memory.h"
#include "tools/commands.h"
#include "tools/npy/npy.h"
#include "tools/options/problem_options.h"
#include "tools/ranks/engine.h"
#include "tools/terminal/terminal.h"

enum { LINE = 512 };

enum {
    IN_Q,
    IN_K,
    IN_V,
    IN_BIAS,
    IN_MASK,
    IN_BLOCK_MASK,
    IN_SINK,
    IN_ALIBI,
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

static const struct {
    role role;
    uint64_t feature; /* set if the input is given */
} inputs[INPUTS] = {
    [IN_Q] = {TENSOR, 0},
    [IN_K] = {KEY, 0},
    [IN_V] = {VALUE, 0},
    [IN_BIAS] = {BIAS, FATTN_BIAS},
    [IN_MASK] = {BYTES, FATTN_MASK},
    [IN_BLOCK_MASK] = {BYTES, FATTN_BLOCK_MASK},
    [IN_SINK] = {REAL, FATTN_SINK},
    [IN_ALIBI] = {REAL, FATTN_ALIBI},
    [IN_CU_Q] = {COUNTS, FATTN_CU_SEQLENS_Q},
    [IN_CU_K] = {COUNTS, FATTN_CU_SEQLENS_K},
    [IN_USED_Q] = {COUNTS, FATTN_SEQUSED_Q},
    [IN_USED_K] = {COUNTS, FATTN_SEQUSED_K},
    [IN_START_K] = {COUNTS, FATTN_SEQSTART_K},
    [IN_TABLE] = {COUNTS, FATTN_PAGED},
    [IN_Q_OFFSETS] = {PLACES, FATTN_POSITIONS},
    [IN_K_OFFSETS] = {PLACES, FATTN_POSITIONS},
    [IN_WHOLES_Q] = {PLACES, FATTN_POSITIONS},
    [IN_WHOLES_K] = {PLACES, FATTN_POSITIONS},
    [IN_DO] = {RESULT, 0},
    [IN_DLSE] = {REAL, FATTN_DLSE},
};

static const uint32_t output_bits[OUTPUTS] = {
    [OUT_O] = FATTN_OUT_O,         [OUT_LSE] = FATTN_OUT_LSE, [OUT_DQ] = FATTN_OUT_DQ,
    [OUT_DK] = FATTN_OUT_DK,       [OUT_DV] = FATTN_OUT_DV,   [OUT_DBIAS] = FATTN_OUT_DBIAS,
    [OUT_DSINK] = FATTN_OUT_DSINK,
};

enum { QUERIES, KEYS, SIDES };

/* The rows that this rank has of the queries or of the keys, in all sequences. */
typedef struct share {
    fattn_run *runs;
    int64_t count, rows;
} share;

/* --ranks and what goes with it. */
typedef struct divided {
    bool wanted, any;  /* any: one of the others is given */
    int split, scheme; /* words: all of splits, those of schemes after "auto" */
    double timeout;
    engine engine;
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

/* -------------------------------------------------------------------------------------------------
 * Options
 * ---------------------------------------------------------------------------------------------- */

static const char notes[] =
    "Shapes are those of --layout bshd; bhsd has heads before the sequence axis. f16, f32 and\n"
    "f64 files are converted to --dtype, --dtype-kv and so on. NumPy has no bf16: where that is\n"
    "the type, arrays of u2 (or V2) are read as bf16 bit patterns, and outputs are written as u2.\n"
    "Rows of outputs that belong to no sequence are 0.\n"
    "\n"
    "Outputs are regular files. They replace files that you may write to, and keep their mode. No\n"
    "output may be an input, under any name.\n"
    "If a run is killed while it replaces several files, the next run that reads or writes in\n"
    "their folder completes the replacement. It also removes temporary files (.fattn-*) of runs\n"
    "that were killed earlier.";

static int parse(int argc, char **argv, job *j)
{
    divided *const d = &j->divided;
    const char **const in = j->in_path, **const out = j->out_path;
    const option own[] = {
        {"q FILE.npy", "queries (B, Sq, Hq, D)", OPTION_TEXT, .value = &in[IN_Q]},
        {"k FILE.npy", "keys (B, Sk, Hk, D); Hq is a multiple of Hk", OPTION_TEXT,
         .value = &in[IN_K]},
        {"v FILE.npy", "values (B, Sk, Hk, Dv)", OPTION_TEXT, .value = &in[IN_V]},
        {"o FILE.npy", "output (B, Sq, Hq, Dv)", OPTION_TEXT, .value = &out[OUT_O]},
        {"lse FILE.npy", "output (B, Hq, Sq): ln(sum of exp(scores))", OPTION_TEXT,
         .value = &out[OUT_LSE]},
        {"bias FILE.npy", "added to the scores; broadcast to (B, Hq, Sq, Sk)", OPTION_TEXT,
         .value = &in[IN_BIAS]},
        {"mask FILE.npy", "bool or u8, non-zero keeps;\nbroadcast to (B, Hq, Sq, Sk)", OPTION_TEXT,
         .value = &in[IN_MASK]},
        {"block-mask FILE.npy",
         "bool or u8, one entry per block;\nbroadcast to (B, Hq, ceil(Sq / M), ceil(Sk / N))",
         OPTION_TEXT, .value = &in[IN_BLOCK_MASK]},
        {"sink FILE.npy", "(Hq): logits of an extra key whose value is 0", OPTION_TEXT,
         .value = &in[IN_SINK]},
        {"alibi FILE.npy", "slopes (Hq) or (B, Hq)", OPTION_TEXT, .value = &in[IN_ALIBI]},
        {"alibi-bias", "--alibi's slopes multiply the bias, not the distance", OPTION_SWITCH,
         .value = &j->alibi_bias},
        {"cu-seqlens-q FILE.npy",
         "(B + 1): q and o are packed as (total, Hq, ...),\nlse as (Hq, total)", OPTION_TEXT,
         .value = &in[IN_CU_Q]},
        {"cu-seqlens-k FILE.npy",
         "(B + 1): k and v are packed in the same way; with\n--block-table the lengths alone",
         OPTION_TEXT, .value = &in[IN_CU_K]},
        {"seqused-q FILE.npy", "(B): used rows of each sequence", OPTION_TEXT,
         .value = &in[IN_USED_Q]},
        {"seqused-k FILE.npy", "(B): used keys of each sequence", OPTION_TEXT,
         .value = &in[IN_USED_K]},
        {"seqstart-k FILE.npy", "(B): the first key; those before it are padding", OPTION_TEXT,
         .value = &in[IN_START_K]},
        {"block-table FILE.npy", "(B, max_pages): k, v are (pages, page_size, Hk, ...)",
         OPTION_TEXT, .value = &in[IN_TABLE]},
        {"q-offsets FILE.npy", "(B): --q-offset of each sequence", OPTION_TEXT,
         .value = &in[IN_Q_OFFSETS]},
        {"k-offsets FILE.npy", "(B): --k-offset of each", OPTION_TEXT, .value = &in[IN_K_OFFSETS]},
        {"wholes-q FILE.npy", "(B): --whole-q of each", OPTION_TEXT, .value = &in[IN_WHOLES_Q]},
        {"wholes-k FILE.npy", "(B): --whole-k of each", OPTION_TEXT, .value = &in[IN_WHOLES_K]},
        {"scores FILE.npy",
         "output (B, Hq, Sq, Sk): scores as the softmax sees\nthem; -inf where a pair is not kept",
         OPTION_TEXT, .value = &out[OUT_SCORES]},
        {"probabilities FILE.npy", "output (B, Hq, Sq, Sk): exp(score - lse)", OPTION_TEXT,
         .value = &out[OUT_PROBABILITIES]},
        {"seed N", "of the dropout pattern; default 0", OPTION_UNSIGNED, .value = &j->seed,
         .given = &j->has_seed},
        {"offset N", "of the dropout pattern; default 0", OPTION_UNSIGNED, .value = &j->offset,
         .given = &j->has_offset},
        {"device NAME", "cpu, cuda:1, reference ...; default: FATTN_BACKEND", OPTION_TEXT,
         .value = &j->device},
        {"threads N", "threads of a CPU device; default: FATTN_NUM_THREADS", OPTION_INTEGER,
         .value = &j->threads, .min = 1, .max = 1024},
        {"backward", "compute gradients, after a forward", OPTION_SWITCH, .value = &j->backward},
        {"do FILE.npy", "gradient of o", OPTION_TEXT, .value = &in[IN_DO]},
        {"dlse FILE.npy", "gradient of lse", OPTION_TEXT, .value = &in[IN_DLSE]},
        {"dq FILE.npy", "output, like q", OPTION_TEXT, .value = &out[OUT_DQ]},
        {"dk FILE.npy", "output, like k", OPTION_TEXT, .value = &out[OUT_DK]},
        {"dv FILE.npy", "output, like v", OPTION_TEXT, .value = &out[OUT_DV]},
        {"dbias FILE.npy", "output, like bias, summed over broadcast axes", OPTION_TEXT,
         .value = &out[OUT_DBIAS]},
        {"dsink FILE.npy", "output (Hq)", OPTION_TEXT, .value = &out[OUT_DSINK]},
        {"ranks",
         "divide sequences over the processes that mpirun\nstarted; each reads its rows alone",
         OPTION_SWITCH, .value = &d->wanted},
        {"split", "which rows a rank has; default auto: by the masks", OPTION_CHOICE,
         .value = &d->split, .given = &d->any, .words = engine_splits},
        {"scheme", "how ranks share the work; default ring. explain\n--ranks names the fastest",
         OPTION_CHOICE, .value = &d->scheme, .given = &d->any, .words = engine_schemes + 1},
        {"timeout S", "seconds to wait for other ranks; default 60", OPTION_REAL,
         .value = &d->timeout, .given = &d->any},
    };
    enum { OWN = sizeof own / sizeof own[0] };
    option table[OWN + PROBLEM_OPTIONS + 1] = {{.name = NULL}};
    memcpy(table, own, sizeof own);
    problem_options_rows(&j->options, true, table + OWN);
    const option_set set = {
        "run",
        "Attention on NumPy's .npy files. All outputs appear, or none.",
        table,
        notes,
    };
    return options_parse(&set, argc, argv);
}

static bool given(const job *j, int which) { return problem_options_count(&j->options, which); }

/* Refuses options that exclude each other. */
static bool go_together(const job *j)
{
    const bool ranks = j->divided.wanted, ragged = j->in_path[IN_CU_Q] || j->in_path[IN_CU_K];
    const struct {
        bool given;
        const char *name;
        bool beside;
        const char *other;
    } clashes[] = {
        {ranks, "--ranks",
         j->in_path[IN_BLOCK_MASK] || j->in_path[IN_USED_Q] || j->in_path[IN_USED_K] ||
             j->in_path[IN_START_K] || j->in_path[IN_TABLE] || j->out_path[OUT_SCORES] ||
             j->out_path[OUT_PROBABILITIES] || given(j, PROBLEM_OF(FATTN_ACCUMULATE)),
         "a block mask, seqused, seqstart, pages, scores, probabilities or accumulation"},
        {ranks && ragged, "--ranks and --cu-seqlens-q", j->in_path[IN_BIAS] || j->in_path[IN_MASK],
         "a bias or a mask"},
        {j->in_path[IN_Q_OFFSETS], "--q-offsets", given(j, PROBLEM_Q_OFFSET), "--q-offset"},
        {j->in_path[IN_K_OFFSETS], "--k-offsets", given(j, PROBLEM_K_OFFSET), "--k-offset"},
        {j->in_path[IN_WHOLES_Q], "--wholes-q", given(j, PROBLEM_WHOLE_Q), "--whole-q"},
        {j->in_path[IN_WHOLES_K], "--wholes-k", given(j, PROBLEM_WHOLE_K), "--whole-k"},
    };
    for (size_t i = 0; i < sizeof clashes / sizeof clashes[0]; i++) {
        if (clashes[i].given && clashes[i].beside) {
            tool_usage("run", "%s cannot be combined with %s", clashes[i].name, clashes[i].other);
            return false;
        }
    }
    return true;
}

static bool have_names_of_their_own(const job *j)
{
    for (int a = 0; a < OUTPUTS; a++) {
        for (int b = 0; b < a; b++) {
            if (j->out_path[a] && j->out_path[b] && strcmp(j->out_path[a], j->out_path[b]) == 0) {
                tool_usage("run", "two outputs are named %s", j->out_path[a]);
                return false;
            }
        }
    }
    return true;
}

/* Refuses options that would have no effect. */
static bool consistent(const job *j)
{
    const uint64_t on_diagonal = problem_on_diagonal();
    bool diagonal = j->in_path[IN_ALIBI] && !j->alibi_bias;
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        diagonal = diagonal || (on_diagonal >> bit & 1 && given(j, PROBLEM_FEATURES + bit));
    }
    char offsets_need[96], wholes_need[96];
    problem_feature_options(on_diagonal | FATTN_DROPOUT, offsets_need, sizeof offsets_need);
    problem_feature_options(on_diagonal, wholes_need, sizeof wholes_need);
    const struct {
        bool given;
        const char *name;
        bool present;
        const char *needs;
    } rules[] = {
        {true, "this command", j->in_path[IN_Q] && j->in_path[IN_K] && j->in_path[IN_V],
         "--q, --k and --v"},
        {!j->backward, "this command",
         j->out_path[OUT_O] || j->out_path[OUT_LSE] || j->out_path[OUT_SCORES] ||
             j->out_path[OUT_PROBABILITIES],
         "--o, --lse, --scores or --probabilities"},
        {j->backward, "--backward", j->in_path[IN_DO], "--do"},
        {j->backward, "--backward",
         j->out_path[OUT_DQ] || j->out_path[OUT_DK] || j->out_path[OUT_DV] ||
             j->out_path[OUT_DBIAS] || j->out_path[OUT_DSINK],
         "one of --dq, --dk, --dv, --dbias, --dsink"},
        {j->in_path[IN_DO], "--do", j->backward, "--backward"},
        {j->in_path[IN_DLSE], "--dlse", j->backward, "--backward"},
        {j->out_path[OUT_DQ], "--dq", j->backward, "--backward"},
        {j->out_path[OUT_DK], "--dk", j->backward, "--backward"},
        {j->out_path[OUT_DV], "--dv", j->backward, "--backward"},
        {j->out_path[OUT_DBIAS], "--dbias", j->backward && j->in_path[IN_BIAS],
         "--backward and --bias"},
        {j->out_path[OUT_DSINK], "--dsink", j->backward && j->in_path[IN_SINK],
         "--backward and --sink"},
        {j->alibi_bias, "--alibi-bias", j->in_path[IN_ALIBI] && j->in_path[IN_BIAS],
         "--alibi and --bias"},
        {j->in_path[IN_BLOCK_MASK], "--block-mask", given(j, PROBLEM_BLOCK_SIZE), "--block-size"},
        {j->has_seed, "--seed", given(j, PROBLEM_OF(FATTN_DROPOUT)), "--dropout"},
        {j->divided.any, "--split, --scheme or --timeout", j->divided.wanted, "--ranks"},
        {j->has_offset, "--offset", given(j, PROBLEM_OF(FATTN_DROPOUT)), "--dropout"},
        {j->in_path[IN_Q_OFFSETS] || j->in_path[IN_K_OFFSETS], "--q-offsets or --k-offsets",
         diagonal || given(j, PROBLEM_OF(FATTN_DROPOUT)), offsets_need},
        {j->in_path[IN_WHOLES_Q] || j->in_path[IN_WHOLES_K], "--wholes-q or --wholes-k", diagonal,
         wholes_need},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].given && !rules[i].present) {
            tool_usage("run", "%s needs %s", rules[i].name, rules[i].needs);
            return false;
        }
    }
    const uint64_t present = (j->in_path[IN_ALIBI] ? FATTN_ALIBI : 0) |
                             (j->in_path[IN_BIAS] ? FATTN_BIAS : 0) |
                             (j->in_path[IN_BLOCK_MASK] ? FATTN_BLOCK_MASK : 0);
    return go_together(j) && have_names_of_their_own(j) &&
           problem_options_check(&j->options, "run", present, !j->backward, j->backward);
}

/* -------------------------------------------------------------------------------------------------
 * Reading and converting
 * ---------------------------------------------------------------------------------------------- */

static bool complain(const char *why)
{
    tool_usage("run", "%s", why);
    return false;
}

static bool memory_is_short; /* which is no fault of the user's */

/* What a function of npy.h returned: success, or a complaint. */
static bool succeeded(int failed, const char *why)
{
    memory_is_short = memory_is_short || failed == COMPLAINT_NO_MEMORY;
    return failed == 0 || complain(why);
}

/* Of files and options that cannot be used, or of memory. */
static int exit_status(void) { return memory_is_short ? TOOL_LIBRARY : TOOL_USAGE; }

/* The floating-point dtype of a kind, 0 for integers. */
static fattn_dtype dtype_of(npy_kind kind)
{
    static const fattn_dtype table[NPY_KINDS] = {[NPY_F16] = FATTN_F16,
                                                 [NPY_F32] = FATTN_F32,
                                                 [NPY_F64] = FATTN_F64,
                                                 [NPY_BF16] = FATTN_BF16};
    return table[kind];
}

static npy_kind kind_of(fattn_dtype dtype)
{
    static const npy_kind table[] = {[FATTN_F32] = NPY_F32,
                                     [FATTN_F16] = NPY_F16,
                                     [FATTN_BF16] = NPY_BF16,
                                     [FATTN_F64] = NPY_F64};
    return table[dtype];
}

/* Whether two names are of one file. */
static bool same_file(const char *a, const char *b)
{
    struct stat one, other;
    return stat(a, &one) == 0 && stat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

/* Refuses outputs that cannot be written, before anything is computed. Of ranks, only the first
 * creates files. Outputs replace files, so an output that is also an input would change the next
 * run's inputs. */
static bool check_outputs(const job *j)
{
    const bool creates = !j->divided.wanted || j->divided.engine.transport->rank == 0;
    for (int out = 0; out < OUTPUTS; out++) {
        const char *const path = j->out_path[out];
        char why[LINE];
        const complaint to = {path, why, sizeof why};
        if (path && creates && replacement_check(&to) != 0) {
            return complain(why);
        }
        for (int in = 0; path && in < INPUTS; in++) {
            if (j->in_path[in] && same_file(path, j->in_path[in])) {
                tool_usage("run", "output %s is the file of an input, %s", path, j->in_path[in]);
                return false;
            }
        }
        for (int other = 0; path && other < out; other++) {
            if (j->out_path[other] && same_file(path, j->out_path[other])) {
                tool_usage("run", "outputs %s and %s are one file", j->out_path[other], path);
                return false;
            }
        }
    }
    return true;
}

/* Completes what a killed run left unfinished. This changes files, so it comes first. */
static void recover(const job *j)
{
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i]) {
            replacement_recover(j->in_path[i]);
        }
    }
    for (int i = 0; i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            replacement_recover(j->out_path[i]);
        }
    }
}

/* Inputs of which a rank reads its own rows alone. */
static bool has_rows(const job *j, int input)
{
    const bool extra = input == IN_BIAS || input == IN_MASK;
    return j->divided.wanted &&
           (inputs[input].role <= RESULT || input == IN_DLSE || (extra && j->in[input].rank > 1));
}

/* The type that an input is converted to, once the types of the problem are known. */
static fattn_dtype type_of(const fattn_problem *p, role as)
{
    const fattn_dtype key = p->dtype_kv ? p->dtype_kv : p->dtype;
    switch (as) {
    case TENSOR: return p->dtype;
    case KEY: return key;
    case VALUE: return p->dtype_v ? p->dtype_v : key;
    case RESULT: return p->dtype_o ? p->dtype_o : p->dtype;
    case BIAS: return p->dtype_bias;
    default: return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    }
}

/* Whether its file may hold bf16: where an option gives that type to it or to the whole problem. */
static bool reads_bf16(const job *j, int input)
{
    const role as = inputs[input].role;
    const bool whole = given(j, PROBLEM_DTYPE) && j->problem.dtype == FATTN_BF16;
    return as <= BIAS && (whole || type_of(&j->problem, as) == FATTN_BF16);
}

static bool read_inputs(job *j)
{
    if (!check_outputs(j)) {
        return false;
    }
    for (int i = 0; i < INPUTS; i++) {
        char why[LINE];
        const bool bf16 = reads_bf16(j, i);
        npy_array *const a = &j->in[i];
        if (!j->in_path[i]) {
            continue;
        }
        if (j->divided.wanted &&
            !succeeded(npy_read_shape(j->in_path[i], bf16, a, why, sizeof why), why)) {
            return false;
        }
        if (!has_rows(j, i) && !succeeded(npy_read(j->in_path[i], bf16, a, why, sizeof why), why)) {
            return false;
        }
    }
    return true;
}

static bool convert_real(const char *path, npy_array *a, fattn_dtype to)
{
    const fattn_dtype from = dtype_of(a->kind);
    if (from == to) {
        return true;
    }
    if (!from) {
        char why[LINE];
        snprintf(why, sizeof why, "%s holds %s where floating-point numbers are needed", path,
                 npy_kind_name(a->kind));
        return complain(why);
    }
    npy_array converted;
    char why[LINE];
    if (!succeeded(npy_create(path, kind_of(to), a->rank, a->shape, &converted, why, sizeof why),
                   why)) {
        return false;
    }
    for (int64_t i = 0; i < a->count; i++) {
        fattn_dtype_store(to, converted.data, i, fattn_dtype_load(from, a->data, i));
    }
    npy_free(a);
    *a = converted;
    return true;
}

/* data[i], with values above INT64_MAX as INT64_MAX. */
static int64_t integer_at(const npy_array *a, int64_t i)
{
    switch (a->kind) {
    case NPY_I8: return ((const int8_t *)a->data)[i];
    case NPY_I16: return ((const int16_t *)a->data)[i];
    case NPY_I32: return ((const int32_t *)a->data)[i];
    case NPY_I64: return ((const int64_t *)a->data)[i];
    case NPY_U8: return ((const uint8_t *)a->data)[i];
    case NPY_U16: return ((const uint16_t *)a->data)[i];
    case NPY_U32: return ((const uint32_t *)a->data)[i];
    default: break;
    }
    assert(a->kind == NPY_U64);
    const uint64_t x = ((const uint64_t *)a->data)[i];
    return x < INT64_MAX ? (int64_t)x : INT64_MAX;
}

static bool convert_counts(const char *path, npy_array *a, npy_kind to)
{
    char why[LINE];
    if (a->kind < NPY_I8 || a->kind > NPY_U64) {
        snprintf(why, sizeof why, "%s holds %s where integers are needed", path,
                 npy_kind_name(a->kind));
        return complain(why);
    }
    if (a->kind == to) {
        return true;
    }
    npy_array converted;
    if (!succeeded(npy_create(path, to, a->rank, a->shape, &converted, why, sizeof why), why)) {
        return false;
    }
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t x = integer_at(a, i);
        if (to == NPY_I64) {
            ((int64_t *)converted.data)[i] = x;
            continue;
        }
        if (x < INT32_MIN || x > INT32_MAX) {
            snprintf(why, sizeof why,
                     "%s: element %" PRId64 " is %" PRId64 ", which int32 cannot hold", path, i, x);
            npy_free(&converted);
            return complain(why);
        }
        ((int32_t *)converted.data)[i] = (int32_t)x;
    }
    npy_free(a);
    *a = converted;
    return true;
}

static bool convert_bytes(const char *path, const npy_array *a)
{
    if (a->kind == NPY_BOOL || a->kind == NPY_U8) {
        return true;
    }
    char why[LINE];
    snprintf(why, sizeof why, "%s holds %s where bool or u8 is needed", path,
             npy_kind_name(a->kind));
    return complain(why);
}

static bool convert_input(job *j, int i)
{
    const char *const path = j->in_path[i];
    npy_array *const a = &j->in[i];
    switch (inputs[i].role) {
    case TENSOR:
    case KEY:
    case VALUE:
    case RESULT:
    case BIAS:
    case REAL: return convert_real(path, a, type_of(&j->problem, inputs[i].role));
    case BYTES: return convert_bytes(path, a);
    case COUNTS: return convert_counts(path, a, NPY_I32);
    case PLACES: return convert_counts(path, a, NPY_I64);
    }
    return false;
}

/* All that have been read: rows come later. */
static bool convert_inputs(job *j)
{
    const bool has_dtype = given(j, PROBLEM_DTYPE);
    if (!has_dtype && !dtype_of(j->in[IN_Q].kind)) {
        char why[LINE];
        snprintf(why, sizeof why, "%s holds %s where floating-point numbers are needed",
                 j->in_path[IN_Q], npy_kind_name(j->in[IN_Q].kind));
        return complain(why);
    }
    const fattn_dtype dtype = has_dtype ? j->problem.dtype : dtype_of(j->in[IN_Q].kind);
    const fattn_dtype real = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_dtype bias = dtype_of(j->in[IN_BIAS].kind) == dtype ? dtype : real;

    j->problem.dtype = dtype;
    if (j->in_path[IN_BIAS] && !j->problem.dtype_bias) {
        j->problem.dtype_bias = bias;
    }
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i] && !has_rows(j, i) && !convert_input(j, i)) {
            return false;
        }
    }
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * Shapes
 * ---------------------------------------------------------------------------------------------- */

enum { ANY = -1 };

/* "(2, any, 64)"; ANY prints as "any". */
static void print_shape(char *text, size_t size, int rank, const int64_t *shape)
{
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < rank && used < size; i++) {
        const char *const comma = i ? ", " : "";
        used += (size_t)(shape[i] == ANY
                             ? snprintf(text + used, size - used, "%sany", comma)
                             : snprintf(text + used, size - used, "%s%" PRId64, comma, shape[i]));
    }
    if (used < size) {
        snprintf(text + used, size - used, ")");
    }
}

static bool refuse_shape(const job *j, int input, const char *verb, int rank, const int64_t *wanted,
                         const char *letters)
{
    char has[128], wants[128], why[LINE];
    print_shape(has, sizeof has, j->in[input].rank, j->in[input].shape);
    print_shape(wants, sizeof wants, rank, wanted);
    snprintf(why, sizeof why, "%s: shape %s %s %s = %s", j->in_path[input], has, verb, wants,
             letters);
    return complain(why);
}

/* Whether the array has this shape; ANY matches any length. */
static bool match(const job *j, int input, int rank, const int64_t *wanted, const char *letters)
{
    const npy_array *const a = &j->in[input];
    bool same = a->rank == rank;
    for (int i = 0; same && i < rank; i++) {
        same = wanted[i] == ANY || a->shape[i] == wanted[i];
    }
    return same || refuse_shape(j, input, "is not", rank, wanted, letters);
}

static bool match_vector(const job *j, int input, int64_t length, const char *letters)
{
    return !j->in_path[input] || match(j, input, 1, &length, letters);
}

/* Matches a tensor whose axes (batch or page, sequence or slot, head, channel) are in the order of
 * --layout. Packed tensors have no batch axis and leave *batch alone. */
static bool match_tensor(const job *j, int input, bool packed, const char *const letters[2],
                         int64_t *batch, int64_t *seq, int64_t *head, int64_t *channel)
{
    const bool bhsd = j->problem.layout == FATTN_BHSD;
    const int axis = packed ? 0 : 1, rank = axis + 3; /* axis: the one after batch */
    const int64_t inner[3] = {bhsd ? *head : *seq, bhsd ? *seq : *head, *channel};
    int64_t wanted[4] = {*batch};
    memcpy(wanted + axis, inner, sizeof inner);

    if (!match(j, input, rank, wanted, letters[bhsd])) {
        return false;
    }
    const int64_t *const shape = j->in[input].shape;
    if (!packed) {
        *batch = shape[0];
    }
    *seq = shape[axis + (bhsd ? 1 : 0)];
    *head = shape[axis + (bhsd ? 0 : 1)];
    *channel = shape[axis + 2];
    return true;
}

/* Strides that broadcast an array to four axes as NumPy does: 0 along broadcast axes. */
static bool broadcast(const job *j, int input, const int64_t wanted[4], const char *letters,
                      int64_t stride[4])
{
    const npy_array *const a = &j->in[input];
    const int missing = 4 - a->rank;
    bool fits = missing >= 0;
    int64_t step = 1;
    for (int axis = 3; fits && axis >= 0; axis--) {
        const int64_t length = axis < missing ? 1 : a->shape[axis - missing];
        fits = length == 1 || length == wanted[axis];
        stride[axis] = length == 1 ? 0 : step;
        step *= length; /* at most a->count, or 0 */
    }
    return fits || refuse_shape(j, input, "does not broadcast to", 4, wanted, letters);
}

/* The longest sequence of a cumulative array; the library reports invalid ones. */
static int64_t longest(const npy_array *cu)
{
    const int32_t *const at = cu->data;
    int64_t most = 0;
    for (int64_t i = 1; i < cu->count; i++) {
        const int64_t length = (int64_t)at[i] - at[i - 1];
        most = length > most ? length : most;
    }
    return most;
}

static bool shape_queries(job *j)
{
    static const char *const packed[] = {"(total_q, Hq, D)", "(Hq, total_q, D)"};
    static const char *const dense[] = {"(B, Sq, Hq, D)", "(B, Hq, Sq, D)"};
    fattn_problem *const p = &j->problem;
    const bool cu = j->in_path[IN_CU_Q];
    const int64_t any = ANY;

    p->batch = p->seqlen_q = p->heads_q = p->dim = ANY;
    if (!match_tensor(j, IN_Q, cu, cu ? packed : dense, &p->batch, &p->seqlen_q, &p->heads_q,
                      &p->dim)) {
        return false;
    }
    if (cu) {
        if (!match(j, IN_CU_Q, 1, &any, "(B + 1)")) {
            return false;
        }
        if (j->in[IN_CU_Q].count == 0) {
            const int64_t one = 1;
            return refuse_shape(j, IN_CU_Q, "is shorter than", 1, &one, "(B + 1)");
        }
        p->batch = j->in[IN_CU_Q].count - 1;
        p->total_q = p->seqlen_q;
        p->seqlen_q = longest(&j->in[IN_CU_Q]);
    }
    return true;
}

static bool shape_keys(job *j)
{
    enum { DENSE, PACKED, PAGES };
    static const char *const k_letters[][2] = {
        {"(B, Sk, Hk, D)", "(B, Hk, Sk, D)"},
        {"(total_k, Hk, D)", "(Hk, total_k, D)"},
        {"(pages, page_size, Hk, D)", "(pages, Hk, page_size, D)"},
    };
    static const char *const v_letters[][2] = {
        {"(B, Sk, Hk, Dv)", "(B, Hk, Sk, Dv)"},
        {"(total_k, Hk, Dv)", "(Hk, total_k, Dv)"},
        {"(pages, page_size, Hk, Dv)", "(pages, Hk, page_size, Dv)"},
    };
    fattn_problem *const p = &j->problem;
    const int form = j->in_path[IN_TABLE] ? PAGES : j->in_path[IN_CU_K] ? PACKED : DENSE;
    int64_t batch = form == PAGES ? ANY : p->batch;

    p->seqlen_k = p->heads_k = p->dim_v = ANY;
    if (!match_tensor(j, IN_K, form == PACKED, k_letters[form], &batch, &p->seqlen_k, &p->heads_k,
                      &p->dim) ||
        !match_tensor(j, IN_V, form == PACKED, v_letters[form], &batch, &p->seqlen_k, &p->heads_k,
                      &p->dim_v) ||
        !match_vector(j, IN_CU_K, p->batch + 1, "(B + 1)")) {
        return false;
    }
    if (form == PACKED) {
        p->total_k = p->seqlen_k;
        p->seqlen_k = longest(&j->in[IN_CU_K]);
    }
    if (form == PAGES) {
        const int64_t wanted[2] = {p->batch, ANY};
        if (!match(j, IN_TABLE, 2, wanted, "(B, max_pages)")) {
            return false;
        }
        p->num_pages = batch;
        p->page_size = p->seqlen_k;
        p->max_pages = j->in[IN_TABLE].shape[1];
        /* The capacity of the table, unless lengths are given. If the product wraps, the library
         * refuses max_pages. */
        p->seqlen_k = j->in_path[IN_CU_K]
                          ? longest(&j->in[IN_CU_K])
                          : (int64_t)((uint64_t)p->max_pages * (uint64_t)p->page_size);
    }
    return true;
}

/* The shapes of everything except q, k and v. */
static bool shape_extras(job *j)
{
    static const char *const scores = "(B, Hq, Sq, Sk)";
    fattn_problem *const p = &j->problem;
    const bool cu_q = j->in_path[IN_CU_Q];
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};

    if ((j->in_path[IN_BIAS] && !broadcast(j, IN_BIAS, pairs, scores, p->bias_stride)) ||
        (j->in_path[IN_MASK] && !broadcast(j, IN_MASK, pairs, scores, p->mask_stride))) {
        return false;
    }
    memcpy(p->dbias_stride, p->bias_stride, sizeof p->dbias_stride);
    if (j->in_path[IN_BLOCK_MASK]) {
        const int64_t blocks[4] = {p->batch, p->heads_q, fattn_ceil_div(p->seqlen_q, p->block_m),
                                   fattn_ceil_div(p->seqlen_k, p->block_n)};
        if (!broadcast(j, IN_BLOCK_MASK, blocks, "(B, Hq, ceil(Sq / M), ceil(Sk / N))",
                       p->block_mask_stride)) {
            return false;
        }
    }
    if (j->in_path[IN_ALIBI] && j->in[IN_ALIBI].rank == 2) {
        const int64_t wanted[2] = {p->batch, p->heads_q};
        if (!match(j, IN_ALIBI, 2, wanted, "(B, Hq)")) {
            return false;
        }
        p->alibi_batch_stride = p->heads_q;
    } else if (!match_vector(j, IN_ALIBI, p->heads_q, "(Hq)")) {
        return false;
    }
    if (j->in_path[IN_DO]) {
        static const char *const packed[] = {"(total_q, Hq, Dv)", "(Hq, total_q, Dv)"};
        static const char *const dense[] = {"(B, Sq, Hq, Dv)", "(B, Hq, Sq, Dv)"};
        int64_t batch = p->batch, seq = cu_q ? p->total_q : p->seqlen_q, head = p->heads_q,
                c = p->dim_v;
        if (!match_tensor(j, IN_DO, cu_q, cu_q ? packed : dense, &batch, &seq, &head, &c)) {
            return false;
        }
    }
    if (j->in_path[IN_DLSE]) {
        const int64_t packed[2] = {p->heads_q, p->total_q},
                      dense[3] = {p->batch, p->heads_q, p->seqlen_q};
        if (!match(j, IN_DLSE, cu_q ? 2 : 3, cu_q ? packed : dense,
                   cu_q ? "(Hq, total_q)" : "(B, Hq, Sq)")) {
            return false;
        }
    }
    return match_vector(j, IN_SINK, p->heads_q, "(Hq)") &&
           match_vector(j, IN_USED_Q, p->batch, "(B)") &&
           match_vector(j, IN_USED_K, p->batch, "(B)") &&
           match_vector(j, IN_START_K, p->batch, "(B)") &&
           match_vector(j, IN_Q_OFFSETS, p->batch, "(B)") &&
           match_vector(j, IN_K_OFFSETS, p->batch, "(B)") &&
           match_vector(j, IN_WHOLES_Q, p->batch, "(B)") &&
           match_vector(j, IN_WHOLES_K, p->batch, "(B)");
}

/* -------------------------------------------------------------------------------------------------
 * Outputs and buffers
 * ---------------------------------------------------------------------------------------------- */

/* Sets what follows from the options alone, before any file is read. */
static void apply_options(job *j)
{
    const int64_t first[PROBLEM_OPTIONS] = {0};
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i]) {
            j->problem.features |= inputs[i].feature;
        }
    }
    j->problem.features |= j->alibi_bias ? FATTN_ALIBI_BIAS : 0;
    problem_options_apply(&j->options, first, &j->problem, &j->buffers);
}

/* Reads the output's file as the sum that the gradient is added to. */
static bool read_sum(job *j, int i)
{
    npy_array *const out = &j->out[i], sum;
    const char *const path = j->out_path[i];
    char why[LINE], has[128], wants[128];
    if (!succeeded(npy_read(path, false, &sum, why, sizeof why), why)) {
        return false;
    }
    if (sum.kind != out->kind || sum.rank != out->rank ||
        memcmp(sum.shape, out->shape, sizeof sum.shape) != 0) {
        print_shape(has, sizeof has, sum.rank, sum.shape);
        print_shape(wants, sizeof wants, out->rank, out->shape);
        snprintf(why, sizeof why, "%s: %s of %s cannot be added to, %s of %s can", path, has,
                 npy_kind_name(sum.kind), wants, npy_kind_name(out->kind));
        npy_free(&sum);
        return complain(why);
    }
    npy_free(out);
    *out = sum;
    return true;
}

/* Whether the output needs an array: forward always writes o, and backward reads o and lse. */
static bool computed(const job *j, int output)
{
    return j->out_path[output] || output == OUT_O || (j->backward && output == OUT_LSE);
}

/* Zeroed arrays for everything that forward or backward writes. */
static bool create_outputs(job *j)
{
    static const char *const names[OUTPUTS] = {"o",     "lse",   "dq",     "dk",           "dv",
                                               "dbias", "dsink", "scores", "probabilities"};
    const fattn_problem *const p = &j->problem;
    const npy_kind real = kind_of(type_of(p, REAL)), result = kind_of(type_of(p, RESULT));
    const bool sums = p->features & FATTN_ACCUMULATE;
    const npy_kind kind_q = sums ? real : kind_of(p->dtype);
    const npy_kind kind_k = sums ? real : kind_of(type_of(p, KEY));
    const npy_kind kind_v = sums ? real : kind_of(type_of(p, VALUE));
    const npy_array *const q = &j->in[IN_Q], *const bias = &j->in[IN_BIAS];
    const bool cu_q = j->in_path[IN_CU_Q];

    int64_t o[4];
    memcpy(o, q->shape, sizeof o);
    o[q->rank - 1] = p->dim_v;
    const int64_t rows = j->divided.wanted ? j->divided.share[QUERIES].rows
                         : cu_q            ? p->total_q
                                           : p->seqlen_q;
    const int64_t lse_packed[2] = {p->heads_q, rows};
    const int64_t lse_dense[3] = {p->batch, p->heads_q, rows};
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    const struct {
        npy_kind kind;
        int rank;
        const int64_t *shape;
    } forms[OUTPUTS] = {
        [OUT_O] = {result, q->rank, o},
        [OUT_LSE] = {real, cu_q ? 2 : 3, cu_q ? lse_packed : lse_dense},
        [OUT_DQ] = {kind_q, q->rank, q->shape},
        [OUT_DK] = {kind_k, j->in[IN_K].rank, j->in[IN_K].shape},
        [OUT_DV] = {kind_v, j->in[IN_V].rank, j->in[IN_V].shape},
        [OUT_DBIAS] = {real, bias->rank, bias->shape},
        [OUT_DSINK] = {real, 1, &p->heads_q},
        [OUT_SCORES] = {real, 4, pairs},
        [OUT_PROBABILITIES] = {real, 4, pairs},
    };
    for (int i = 0; i < OUTPUTS; i++) {
        char why[LINE];
        if (!computed(j, i)) {
            continue;
        }
        if (!succeeded(npy_create(names[i], forms[i].kind, forms[i].rank, forms[i].shape,
                                  &j->out[i], why, sizeof why),
                       why)) {
            return false;
        }
        if (j->out[i].count) {
            memset(j->out[i].data, 0, (size_t)j->out[i].count * j->out[i].item);
        }
        const bool is_gradient = i >= OUT_DQ && i <= OUT_DSINK;
        if (sums && is_gradient && !read_sum(j, i)) {
            return false;
        }
    }
    return true;
}

/* The library requires a pointer even to an empty array. */
static void *pointer(const npy_array *a)
{
    static _Alignas(FATTN_MEMORY_ALIGNMENT) unsigned char nothing[FATTN_MEMORY_ALIGNMENT];
    return a->data ? a->data : nothing;
}

static void point(job *j)
{
    fattn_buffers *const b = &j->buffers;
    const void **const in[INPUTS] = {
        [IN_Q] = &b->q,       [IN_K] = &b->k,
        [IN_V] = &b->v,       [IN_BIAS] = &b->bias,
        [IN_SINK] = &b->sink, [IN_DO] = &b->dout,
        [IN_DLSE] = &b->dlse, [IN_ALIBI] = &b->alibi_slopes,
    };
    const uint8_t **const bytes[INPUTS] = {[IN_MASK] = &b->mask, [IN_BLOCK_MASK] = &b->block_mask};
    const int64_t **const places[INPUTS] = {
        [IN_Q_OFFSETS] = &b->q_offsets,
        [IN_K_OFFSETS] = &b->k_offsets,
        [IN_WHOLES_Q] = &b->wholes_q,
        [IN_WHOLES_K] = &b->wholes_k,
    };
    const int32_t **const counts[INPUTS] = {
        [IN_CU_Q] = &b->cu_seqlens_q, [IN_CU_K] = &b->cu_seqlens_k,  [IN_USED_Q] = &b->seqused_q,
        [IN_USED_K] = &b->seqused_k,  [IN_START_K] = &b->seqstart_k, [IN_TABLE] = &b->block_table,
    };
    void **const out[OUTPUTS] = {
        [OUT_O] = &b->o,   [OUT_LSE] = &b->lse,     [OUT_DQ] = &b->dq,      [OUT_DK] = &b->dk,
        [OUT_DV] = &b->dv, [OUT_DBIAS] = &b->dbias, [OUT_DSINK] = &b->dsink};

    for (int i = 0; i < INPUTS; i++) {
        if (!j->in_path[i]) {
            continue;
        }
        if (in[i]) {
            *in[i] = pointer(&j->in[i]);
        }
        if (bytes[i]) {
            *bytes[i] = pointer(&j->in[i]);
        }
        if (counts[i]) {
            *counts[i] = pointer(&j->in[i]);
        }
        if (places[i]) {
            *places[i] = pointer(&j->in[i]);
        }
    }
    for (int i = 0; i < OUTPUTS; i++) {
        if (out[i] && computed(j, i)) {
            *out[i] = pointer(&j->out[i]);
        }
    }
    b->seed = j->seed;
    b->offset = j->offset;
}

/* Arrays are in host memory, which the reference reads whatever device computes o. */
static fattn_status inspect(const job *j, const fattn_problem *forward)
{
    static const struct {
        int output;
        fattn_inspection what;
    } matrices[] = {{OUT_SCORES, FATTN_SCORES}, {OUT_PROBABILITIES, FATTN_PROBABILITIES}};
    fattn_device *device;
    fattn_status status = fattn_device_open("reference", &device);
    for (size_t n = 0; n < sizeof matrices / sizeof matrices[0]; n++) {
        if (status != FATTN_OK || !j->out_path[matrices[n].output]) {
            continue;
        }
        fattn_inspect_args args;
        fattn_inspect_args_init(&args);
        args.what = matrices[n].what;
        args.to = pointer(&j->out[matrices[n].output]);
        status = fattn_inspect(device, forward, &j->buffers, &args);
    }
    fattn_device_close(device);
    return status;
}

/* Rows of all sequences of a side, and the axis of tensors that they are in. */
static int64_t length_of(const job *j, int side)
{
    const fattn_problem *const p = &j->problem;
    return side == QUERIES ? (j->in_path[IN_CU_Q] ? p->total_q : p->seqlen_q)
                           : (j->in_path[IN_CU_K] ? p->total_k : p->seqlen_k);
}

static int axis_of(const job *j, int side)
{
    const bool packed = j->in_path[side == QUERIES ? IN_CU_Q : IN_CU_K];
    return (packed ? 0 : 1) + (j->problem.layout == FATTN_BHSD);
}

/* The rows of an input or output that is divided. Biases that broadcast have one row for all. */
static npy_rows rows_of(const job *j, const npy_array *a, int axis, int side, fattn_run *all)
{
    *all = (fattn_run){0, a->shape[axis], 1};
    const share *const s = &j->divided.share[side];
    return a->shape[axis] == 1 && length_of(j, side) != 1 ? (npy_rows){axis, 1, all}
                                                          : (npy_rows){axis, s->count, s->runs};
}

static int input_axis(const job *j, int i)
{
    return inputs[i].role <= RESULT ? axis_of(j, i == IN_K || i == IN_V ? KEYS : QUERIES)
           : i == IN_DLSE           ? j->in[i].rank - 1
                                    : j->in[i].rank - 2;
}

static fattn_scheme scheme_of(const job *j) { return (fattn_scheme)(j->divided.scheme + 1); }

static bool take_side(job *j, int side)
{
    const int input = side == QUERIES ? IN_CU_Q : IN_CU_K;
    const int32_t *const cu = j->in_path[input] ? j->in[input].data : NULL;
    const int64_t sequences = cu ? j->problem.batch : 1, length = length_of(j, side);
    const fattn_transport *const t = j->divided.engine.transport;
    const bool whole = side == QUERIES && scheme_of(j) == FATTN_SCHEME_REDUCE;
    const fattn_split split = (fattn_split)j->divided.split;
    const int runs = whole ? 1 : fattn_split_runs(split);
    share *const s = &j->divided.share[side];
    s->runs = fattn_memory_alloc((size_t)(sequences * runs + 1) * sizeof *s->runs);
    if (!s->runs) {
        return succeeded(COMPLAINT_NO_MEMORY, "no memory for the rows of a rank");
    }
    for (int64_t b = 0; b < sequences; b++) {
        const int64_t first = cu ? cu[b] : 0, rows = (cu ? cu[b + 1] : length) - first;
        if (first < 0 || rows < 0 || rows > length - first) {
            return complain("lengths of sequences do not fit the rows that there are");
        }
        for (int n = 0; n < runs; n++) {
            fattn_run run = {0, rows, 1};
            if (!whole && fattn_split_get_run(split, rows, t->ranks, t->rank, n, &run)) {
                return complain(fattn_last_reason());
            }
            run.first += first;
            s->runs[s->count++] = run;
            s->rows += run.count;
        }
    }
    return true;
}

/* This rank's rows of everything that is divided. */
static bool read_rows(job *j)
{
    const uint64_t features = j->problem.features;
    if (j->divided.split == 0) {
        const bool causal = features & FATTN_CAUSAL && !(features & FATTN_WINDOW);
        j->divided.split = causal && scheme_of(j) != FATTN_SCHEME_REDUCE ? FATTN_SPLIT_ZIGZAG
                                                                         : FATTN_SPLIT_CONTIGUOUS;
    }
    if (!take_side(j, QUERIES) || !take_side(j, KEYS)) {
        return false;
    }
    for (int i = 0; i < INPUTS; i++) {
        char why[LINE];
        npy_array *const a = &j->in[i];
        if (!j->in_path[i] || !has_rows(j, i)) {
            continue;
        }
        fattn_run all;
        const int side = i == IN_K || i == IN_V ? KEYS : QUERIES;
        const npy_rows rows = rows_of(j, a, input_axis(j, i), side, &all);
        if (!succeeded(npy_read_rows(j->in_path[i], reads_bf16(j, i), &rows, a, why, sizeof why),
                       why)) {
            return false;
        }
        if (!convert_input(j, i)) {
            return false;
        }
    }
    return true;
}

/* Strides of a share's scores, where the whole array's say which axes broadcast. */
static void narrow(const npy_array *part, int64_t stride[4])
{
    int64_t step = 1;
    for (int axis = 3; axis >= 0; axis--) {
        const int own = axis - (4 - part->rank);
        stride[axis] = stride[axis] ? step : 0;
        step *= own < 0 ? 1 : part->shape[own];
    }
}

/* The buffers of a plan, in memory of its device. */
typedef struct placed {
    fattn_buffers buffers;
    fattn_operand_info info[INPUTS + OUTPUTS];
    void *memory[INPUTS + OUTPUTS];
    int count;
} placed;

/* The job's pointer to an operand. */
static void *pointer_at(const fattn_buffers *buffers, int64_t offset)
{
    void *at;
    memcpy(&at, (const char *)buffers + offset, sizeof at);
    return at;
}

/* Outputs are copied too: some are added to, and not every row is written. */
static fattn_status place(const job *j, fattn_device *device, const fattn_problem *problem,
                          placed *to)
{
    int count = 0;
    fattn_status status = fattn_operand_count(problem, &count);
    assert(count <= INPUTS + OUTPUTS);
    for (; status == FATTN_OK && to->count < count; to->count++) {
        fattn_operand_info *const info = &to->info[to->count];
        void **const memory = &to->memory[to->count];
        fattn_operand_info_init(info);
        status = fattn_operand_get_info(problem, to->count, info);
        const void *const from = status ? NULL : pointer_at(&j->buffers, info->offset);
        if (!from || info->bytes == 0) {
            continue;
        }
        const size_t bytes = (size_t)info->bytes;
        status = fattn_device_malloc(device, bytes, memory);
        status = status ? status : fattn_device_copy(device, *memory, from, bytes, NULL);
        memcpy((char *)&to->buffers + info->offset, memory, sizeof *memory);
    }
    return status;
}

static fattn_status take_outputs(const job *j, fattn_device *device, const placed *from)
{
    fattn_status status = FATTN_OK;
    for (int i = 0; status == FATTN_OK && i < from->count; i++) {
        const fattn_operand_info *const info = &from->info[i];
        if (info->written && from->memory[i]) {
            status = fattn_device_copy(device, pointer_at(&j->buffers, info->offset),
                                       from->memory[i], (size_t)info->bytes, NULL);
        }
    }
    return status ? status : fattn_stream_synchronize(device, NULL);
}

/* With --pointer-alignment: fattn_attention() would look at the pointers instead. */
static fattn_status run_plan(const job *j, fattn_device *device, const fattn_problem *problem)
{
    placed p = {.buffers = j->buffers};
    fattn_plan *plan = NULL;
    fattn_status status = fattn_plan_create(device, problem, &plan);
    status = status ? status : place(j, device, problem, &p);
    status = status ? status : fattn_execute(plan, &p.buffers, NULL, NULL);
    status = status ? status : take_outputs(j, device, &p);
    fattn_plan_destroy(plan);
    for (int i = 0; i < p.count; i++) {
        (void)fattn_device_free(device, p.memory[i]);
    }
    return status;
}

static fattn_status attend(const job *j, fattn_device *device, const fattn_problem *problem)
{
    if (!j->divided.wanted) {
        return given(j, PROBLEM_POINTER_ALIGNMENT)
                   ? run_plan(j, device, problem)
                   : fattn_attention(device, problem, &j->buffers, NULL);
    }
    fattn_group group;
    fattn_group_plan *plan;
    fattn_buffers b = j->buffers;
    fattn_group_init(&group);
    group.transport = j->divided.engine.transport;
    group.device = device;
    group.split = (fattn_split)j->divided.split;
    group.scheme = scheme_of(j);
    group.timeout = j->divided.timeout;
    b.cu_seqlens_q = b.cu_seqlens_k = NULL;
    fattn_status status = fattn_group_plan_create(&group, problem, j->buffers.cu_seqlens_q,
                                                  j->buffers.cu_seqlens_k, &plan);
    if (!status) {
        status = fattn_group_execute(plan, &b);
        if (!status) { /* MPI may still use the memory of a plan that failed */
            fattn_group_plan_destroy(plan);
        }
    }
    return status;
}

static fattn_status open_device(const job *j, fattn_device **device)
{
    fattn_device_options options;
    fattn_device_options_init(&options);
    options.threads = j->threads;
    return fattn_device_open_with(j->device, &options, device);
}

static fattn_status compute(job *j)
{
    fattn_problem forward = j->problem, backward = j->problem;
    uint32_t wanted = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        wanted |= j->out_path[i] ? output_bits[i] : 0;
    }
    const uint32_t state = FATTN_OUT_O | FATTN_OUT_LSE;
    forward.op = FATTN_FORWARD;
    forward.features &= ~(FATTN_DLSE | FATTN_ACCUMULATE);
    memset(forward.dbias_stride, 0, sizeof forward.dbias_stride);
    forward.outputs = j->backward ? state : wanted | FATTN_OUT_O;
    backward.op = FATTN_BACKWARD;
    backward.outputs = wanted & ~state;

    fattn_device *device;
    fattn_status status = open_device(j, &device);
    if (status == FATTN_OK) {
        status = attend(j, device, &forward);
    }
    if (status == FATTN_OK && j->backward) {
        status = attend(j, device, &backward);
    }
    if (status == FATTN_OK) {
        status = fattn_stream_synchronize(device, NULL);
    }
    if (status == FATTN_OK) {
        status = inspect(j, &forward);
    }
    fattn_device_close(device);
    fattn_cache_clear();
    return status;
}

static bool write_outputs(const job *j)
{
    replacement staged[OUTPUTS] = {{0}};
    int count = 0;
    char why[LINE];
    bool fine = true;

    for (int i = 0; fine && i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            const int failed =
                npy_stage(j->out_path[i], &j->out[i], &staged[count++], why, sizeof why);
            fine = succeeded(failed, why);
        }
    }
    fine = fine && succeeded(replacement_commit(staged, count, why, sizeof why), why);
    if (!fine) {
        replacement_abandon(staged, count);
    }
    return fine;
}

/* Which rows of an output a rank writes: all on the first where all ranks have the same. */
static npy_rows output_rows(const job *j, int i, fattn_run *all)
{
    const npy_array *const a = &j->out[i];
    const bool first = j->divided.engine.transport->rank == 0;
    const int side = i == OUT_DK || i == OUT_DV ? KEYS : QUERIES;
    const bool same = i == OUT_DSINK || (side == QUERIES && scheme_of(j) == FATTN_SCHEME_REDUCE);
    const int axis = i == OUT_DSINK   ? 0
                     : i == OUT_LSE   ? a->rank - 1
                     : i == OUT_DBIAS ? a->rank - 2
                                      : axis_of(j, side);
    *all = (fattn_run){0, a->shape[axis], 1};
    return same ? (npy_rows){axis, first, all} : rows_of(j, a, axis, side, all);
}

/* Zeros of the whole output, on the first rank. */
static bool stage_whole(const job *j, int i, replacement *staged)
{
    fattn_run all;
    const npy_rows rows = output_rows(j, i, &all);
    npy_array whole = j->out[i];
    char why[LINE];
    if (rows.runs != &all) {
        whole.shape[rows.axis] = length_of(j, i == OUT_DK || i == OUT_DV ? KEYS : QUERIES);
    }
    whole.count = 1;
    for (int axis = 0; axis < whole.rank; axis++) {
        whole.count *= whole.shape[axis];
    }
    return succeeded(npy_stage_zeros(j->out_path[i], &whole, staged, why, sizeof why), why);
}

typedef struct names {
    char of[OUTPUTS][PATH_MAX];
} names;

/* The first rank makes the files, all write their rows into them, and the first puts them in place:
 * all files or none. */
static bool write_divided(const job *j)
{
    const engine *const e = &j->divided.engine;
    const bool first = e->transport->rank == 0;
    replacement staged[OUTPUTS] = {{0}};
    int count = 0;
    char why[LINE];
    names *const all = fattn_memory_alloc((size_t)e->transport->ranks * sizeof *all);
    bool fine = all || succeeded(COMPLAINT_NO_MEMORY, "no memory for the names of files");
    if (all) {
        memset(all, 0, (size_t)e->transport->ranks * sizeof *all);
    }
    for (int i = 0; fine && first && i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            fine = stage_whole(j, i, &staged[count]);
            count += fine;
            snprintf(all->of[i], PATH_MAX, "%s", fine ? staged[count - 1].temporary : "");
        }
    }
    fine = engine_agree(e, fine);
    const fattn_status told = fine ? engine_gather(e, all, sizeof *all) : FATTN_OK;
    fine = fine && (!told || !tool_failure(told)) && engine_agree(e, true);
    for (int i = 0; fine && i < OUTPUTS; i++) {
        fattn_run whole;
        if (j->out_path[i]) {
            const npy_rows rows = output_rows(j, i, &whole);
            fine = succeeded(npy_write_rows(all->of[i], &rows, &j->out[i], why, sizeof why), why);
        }
    }
    fine = engine_agree(e, fine);
    if (fine && first) {
        fine = succeeded(replacement_commit(staged, count, why, sizeof why), why);
    }
    if (!fine) {
        replacement_abandon(staged, count);
    }
    fattn_memory_free(all);
    return engine_agree(e, fine);
}

/* NumPy arrays are f64 by default, and most devices do not support f64. */
static int report(const job *j, fattn_status status)
{
    if (status != FATTN_UNSUPPORTED || given(j, PROBLEM_DTYPE) || j->problem.dtype != FATTN_F64) {
        return tool_failure(status);
    }
    fprintf(stderr, "fattn: %s: %s (%s holds f64; --dtype f32 converts)\n",
            fattn_status_string(status), fattn_last_reason(), j->in_path[IN_Q]);
    return tool_exit_code(status);
}

static bool prepare(job *j)
{
    if (!read_inputs(j) || !convert_inputs(j) || !shape_queries(j) || !shape_keys(j) ||
        !shape_extras(j) || (j->divided.wanted && !read_rows(j)) || !create_outputs(j)) {
        return false;
    }
    if (j->divided.wanted) {
        narrow(&j->in[IN_BIAS], j->problem.bias_stride);
        narrow(&j->in[IN_MASK], j->problem.mask_stride);
        memcpy(j->problem.dbias_stride, j->problem.bias_stride, sizeof j->problem.dbias_stride);
    }
    point(j);
    return true;
}

static int run_alone(job *j)
{
    recover(j);
    if (!prepare(j)) {
        return exit_status();
    }
    const fattn_status status = compute(j);
    return status ? report(j, status) : write_outputs(j) ? TOOL_OK : exit_status();
}

static int run_divided(job *j)
{
    engine *const e = &j->divided.engine;
    fattn_status status = engine_open(e, j->divided.timeout);
    if (status) {
        return tool_failure(status);
    }
    int code = TOOL_OK;
    if (e->transport->rank == 0) {
        recover(j);
    }
    bool fine = engine_agree(e, true) && engine_agree(e, prepare(j));
    if (fine) {
        status = compute(j);
        code = status ? report(j, status) : TOOL_OK;
        fine = status || write_divided(j);
    }
    engine_close(e);
    return fine ? code : exit_status();
}

int fattn_tool_run(int argc, char **argv)
{
    job j = {.divided = {.timeout = 60}};
    memory_is_short = false;
    fattn_problem_init(&j.problem);
    fattn_buffers_init(&j.buffers);
    const int parsed = parse(argc, argv, &j);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (j.threads) {
        unsetenv("FATTN_NUM_THREADS"); /* which would override it, and has not been read yet */
    }
    apply_options(&j);
    const int code = !consistent(&j)    ? TOOL_USAGE
                     : j.divided.wanted ? run_divided(&j)
                                        : run_alone(&j);
    for (int i = 0; i < INPUTS; i++) {
        npy_free(&j.in[i]);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        npy_free(&j.out[i]);
    }
    for (int side = 0; side < SIDES; side++) {
        fattn_memory_free(j.divided.share[side].runs);
    }
    return code;
}
