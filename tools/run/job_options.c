/* SPDX-License-Identifier: Apache-2.0 */
/* The options of `fattn run`, and which of them go together. */
#include "tools/run/job.h"

#include <string.h>

#include "tools/terminal/terminal.h"

static const char notes[] =
    "Shapes are those of --layout bshd; bhsd has heads before the sequence axis. f16, f32 and\n"
    "f64 files are converted to --dtype, --dtype-kv and so on. NumPy has no bf16: where that is\n"
    "the type, arrays of u2 (or V2) are read as bf16 bit patterns, and outputs are written as u2.\n"
    "Likewise k and v in e4m3 are read from arrays of u1 (or V1), or converted to the nearest.\n"
    "Rows of outputs that belong to no sequence are 0.\n"
    "\n"
    "Outputs are regular files. They replace files that you may write to, and keep their mode. No\n"
    "output may be an input, under any name.\n"
    "If a run is killed while it replaces several files, the next run that reads or writes in\n"
    "their folder completes the replacement. It also removes temporary files (.fattn-*) of runs\n"
    "that were killed earlier.";

int job_parse(int argc, char **argv, job *j)
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
        {"k-descale FILE.npy", "what the stored k is multiplied by: (), (Hk) or (B, Hk)",
         OPTION_TEXT, .value = &in[IN_K_DESCALE]},
        {"v-descale FILE.npy", "the same for v, in the same shape", OPTION_TEXT,
         .value = &in[IN_V_DESCALE]},
        {"alibi-bias", "slopes of --alibi multiply the bias, not the distance", OPTION_SWITCH,
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
         .value = &d->split, .given = &d->any, .words = fattn_split_names},
        {"scheme", "how ranks share the work; default auto: the fastest", OPTION_CHOICE,
         .value = &d->scheme, .given = &d->any, .words = fattn_scheme_names},
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
             j->in_path[IN_START_K] || j->in_path[IN_TABLE] || j->in_path[IN_K_DESCALE] ||
             j->out_path[OUT_SCORES] || j->out_path[OUT_PROBABILITIES] ||
             job_given(j, PROBLEM_OF(FATTN_ACCUMULATE)),
         "a block mask, seqused, seqstart, pages, descales, scores, probabilities or accumulation"},
        {ranks && ragged, "--ranks and --cu-seqlens-q", j->in_path[IN_BIAS] || j->in_path[IN_MASK],
         "a bias or a mask"},
        {j->in_path[IN_Q_OFFSETS], "--q-offsets", job_given(j, PROBLEM_Q_OFFSET), "--q-offset"},
        {j->in_path[IN_K_OFFSETS], "--k-offsets", job_given(j, PROBLEM_K_OFFSET), "--k-offset"},
        {j->in_path[IN_WHOLES_Q], "--wholes-q", job_given(j, PROBLEM_WHOLE_Q), "--whole-q"},
        {j->in_path[IN_WHOLES_K], "--wholes-k", job_given(j, PROBLEM_WHOLE_K), "--whole-k"},
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

bool job_check(const job *j)
{
    const uint64_t on_diagonal = problem_on_diagonal();
    bool diagonal = j->in_path[IN_ALIBI] && !j->alibi_bias;
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        diagonal = diagonal || (on_diagonal >> bit & 1 && job_given(j, PROBLEM_FEATURES + bit));
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
        {j->in_path[IN_K_DESCALE], "--k-descale", j->in_path[IN_V_DESCALE], "--v-descale"},
        {j->in_path[IN_V_DESCALE], "--v-descale", j->in_path[IN_K_DESCALE], "--k-descale"},
        {j->in_path[IN_BLOCK_MASK], "--block-mask", job_given(j, PROBLEM_BLOCK_SIZE),
         "--block-size"},
        {j->has_seed, "--seed", job_given(j, PROBLEM_OF(FATTN_DROPOUT)), "--dropout"},
        {j->divided.any, "--split, --scheme or --timeout", j->divided.wanted, "--ranks"},
        {j->has_offset, "--offset", job_given(j, PROBLEM_OF(FATTN_DROPOUT)), "--dropout"},
        {j->in_path[IN_Q_OFFSETS] || j->in_path[IN_K_OFFSETS], "--q-offsets or --k-offsets",
         diagonal || job_given(j, PROBLEM_OF(FATTN_DROPOUT)), offsets_need},
        {j->in_path[IN_WHOLES_Q] || j->in_path[IN_WHOLES_K], "--wholes-q or --wholes-k", diagonal,
         wholes_need},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].given && !rules[i].present) {
            tool_usage("run", "%s needs %s", rules[i].name, rules[i].needs);
            return false;
        }
    }
    if (!(j->divided.timeout > 0)) {
        tool_usage("run", "--timeout is above 0");
        return false;
    }
    const uint64_t present = (j->in_path[IN_ALIBI] ? FATTN_ALIBI : 0) |
                             (j->in_path[IN_BIAS] ? FATTN_BIAS : 0) |
                             (j->in_path[IN_BLOCK_MASK] ? FATTN_BLOCK_MASK : 0);
    return go_together(j) && have_names_of_their_own(j) &&
           problem_options_check(&j->options, "run", present, !j->backward, j->backward);
}

void job_apply_options(job *j)
{
    const int64_t first[PROBLEM_OPTIONS] = {0};
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i]) {
            j->problem.features |= job_inputs[i].feature;
        }
    }
    j->problem.features |= j->alibi_bias ? FATTN_ALIBI_BIAS : 0;
    problem_options_apply(&j->options, first, &j->problem, &j->buffers);
}
