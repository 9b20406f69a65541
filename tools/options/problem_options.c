/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a problem; see problem_options.h. */
#include "tools/options/problem_options.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "tools/terminal/terminal.h"

static const char *const dtype_words[] = {"f32", "f16", "bf16", "f64", NULL};
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64};
static const char *const layout_words[] = {"bshd", "bhsd", NULL};
static const fattn_layout layouts[] = {FATTN_BSHD, FATTN_BHSD};
static const char *const anchor_words[] = {"bottom-right", "top-left", NULL};
static const fattn_anchor anchors[] = {FATTN_BOTTOM_RIGHT, FATTN_TOP_LEFT};

/* Features that depend on the diagonal, and so on its anchor and on positions. */
#define DIAGONAL (FATTN_CAUSAL | FATTN_WINDOW | FATTN_ALIBI)

typedef enum target { TO_PROBLEM, TO_BUFFERS } target;

static const struct {
    const char *name, *help;
    option_kind kind;
    const char *const *words;
    int64_t min, max;
    uint64_t feature; /* set unless the value is none */
    uint64_t needs;   /* the option has no effect without one of these */
    bool zero_none;   /* 0 means none */
    target target;    /* of numbers: struct and offset of the field */
    size_t offset;
} table[PROBLEM_OPTIONS] = {
#define FIELD(name) .offset = offsetof(fattn_problem, name)
#define SCALAR(name) .target = TO_BUFFERS, .offset = offsetof(fattn_buffers, name)
    [PROBLEM_DTYPE] = {"dtype", "of q, k and v; default: that of q's array, else f32",
                       OPTION_CHOICES, .words = dtype_words},
    [PROBLEM_DTYPE_O] = {"dtype-o", "of o and its gradient: dtype or f32; default dtype",
                         OPTION_CHOICES, .words = dtype_words},
    [PROBLEM_LAYOUT] = {"layout", "order of the axes of all tensors; default bshd", OPTION_CHOICES,
                        .words = layout_words},
    [PROBLEM_CAUSAL] = {"causal", "query i attends to keys up to i + off", OPTION_SWITCHES,
                        .feature = FATTN_CAUSAL},
    [PROBLEM_ANCHOR] = {"anchor",
                        "corner at which the diagonal starts (off);\ndefault bottom-right",
                        OPTION_CHOICES, .words = anchor_words, .needs = DIAGONAL},
    [PROBLEM_WINDOW] = {"window L,R", "keys attended left and right of the diagonal;\n-1: all",
                        OPTION_PAIRS, .feature = FATTN_WINDOW, FIELD(window_left)},
    [PROBLEM_SCALE] = {"scale X", "of the scores; default 1 / sqrt(D)", OPTION_REALS,
                       .feature = FATTN_SCALE, FIELD(scale)},
    [PROBLEM_SOFTCAP] = {"softcap X", "scores become X * tanh(score / X); 0: off", OPTION_REALS,
                         .feature = FATTN_SOFTCAP, .zero_none = true, FIELD(softcap)},
    [PROBLEM_DROPOUT] = {"dropout P", "probability of dropping a weight; 0: none", OPTION_REALS,
                         .feature = FATTN_DROPOUT, .zero_none = true, FIELD(dropout_p)},
    [PROBLEM_Q_OFFSET] = {"q-offset N", "position of the first query in a longer sequence",
                          OPTION_INTEGERS, .feature = FATTN_POSITIONS,
                          .needs = DIAGONAL | FATTN_DROPOUT, SCALAR(q_offset)},
    [PROBLEM_K_OFFSET] = {"k-offset N", "position of the first key", OPTION_INTEGERS,
                          .feature = FATTN_POSITIONS, .needs = DIAGONAL | FATTN_DROPOUT,
                          SCALAR(k_offset)},
    [PROBLEM_WHOLE_Q] = {"whole-q N", "queries in that longer sequence; default: those given",
                         OPTION_INTEGERS, .feature = FATTN_POSITIONS, .needs = DIAGONAL,
                         SCALAR(whole_q)},
    [PROBLEM_WHOLE_K] = {"whole-k N", "keys in that longer sequence", OPTION_INTEGERS,
                         .feature = FATTN_POSITIONS, .needs = DIAGONAL, SCALAR(whole_k)},
    [PROBLEM_BATCH_OFFSET] = {"batch-offset N",
                              "index of the first batch entry in a larger\ndropout pattern",
                              OPTION_INTEGERS, .needs = FATTN_DROPOUT, FIELD(batch_offset)},
    [PROBLEM_HEAD_OFFSET] = {"head-offset N", "index of the first query head in it",
                             OPTION_INTEGERS, .needs = FATTN_DROPOUT, FIELD(head_offset)},
    [PROBLEM_BLOCK_SIZE] = {"block-size M,N", "queries and keys of a block of --block-mask",
                            OPTION_PAIRS, .min = 1, .max = INT64_MAX, .needs = FATTN_BLOCK_MASK,
                            FIELD(block_m)},
    [PROBLEM_DETERMINISTIC] = {"deterministic", "gradients are bitwise equal from run to run",
                               OPTION_SWITCHES, .feature = FATTN_DETERMINISTIC},
    [PROBLEM_BATCH_INVARIANT] = {"batch-invariant", "a row's result depends only on its own inputs",
                                 OPTION_SWITCHES, .feature = FATTN_BATCH_INVARIANT},
    [PROBLEM_ACCUMULATE] = {"accumulate", "gradients, in f32, are added to existing ones",
                            OPTION_SWITCHES, .feature = FATTN_ACCUMULATE},
    [PROBLEM_CHECKED] = {"checked", "validate lengths and tables on GPUs as well", OPTION_SWITCHES,
                         .feature = FATTN_CHECKED},
#undef FIELD
#undef SCALAR
};

void problem_options_rows(problem_options *values, bool single, option *rows)
{
    for (int i = 0; i < PROBLEM_OPTIONS; i++) {
        const bool pair = table[i].kind == OPTION_PAIRS;
        rows[i] = (option){
            .name = table[i].name,
            .help = table[i].help,
            .kind = table[i].kind,
            .value = &values->list[i],
            .words = table[i].words,
            .min = table[i].min,
            .max = table[i].max,
            .length = !single ? 0
                      : pair  ? 2
                              : 1,
        };
    }
}

int problem_options_count(const problem_options *values, int which)
{
    const int count = values->list[which].count;
    return table[which].kind == OPTION_PAIRS ? count / 2 : count;
}

/* Sets one field, or two adjacent fields for a pair. */
static bool set_numbers(int which, const option_list *list, int64_t n, void *field)
{
    if (table[which].kind == OPTION_REALS) {
        *(double *)field = list->reals.at[n];
        return list->reals.at[n] != 0;
    }
    const bool pair = table[which].kind == OPTION_PAIRS;
    int64_t *const numbers = field;
    numbers[0] = list->integers.at[pair ? 2 * n : n];
    if (pair) {
        numbers[1] = list->integers.at[2 * n + 1];
    }
    return true;
}

_Static_assert(offsetof(fattn_problem, window_right) ==
                       offsetof(fattn_problem, window_left) + sizeof(int64_t) &&
                   offsetof(fattn_problem, block_n) ==
                       offsetof(fattn_problem, block_m) + sizeof(int64_t),
               "pairs of fields");

static void set(int which, const option_list *list, int64_t n, fattn_problem *p, fattn_buffers *b)
{
    bool any = true;
    switch (which) {
    case PROBLEM_DTYPE: p->dtype = dtypes[list->choices.at[n]]; break;
    case PROBLEM_DTYPE_O: p->dtype_o = dtypes[list->choices.at[n]]; break;
    case PROBLEM_LAYOUT: p->layout = layouts[list->choices.at[n]]; break;
    case PROBLEM_ANCHOR: p->anchor = anchors[list->choices.at[n]]; break;
    default:
        if (table[which].kind == OPTION_SWITCHES) {
            any = list->choices.at[n];
        } else {
            char *const base = table[which].target == TO_PROBLEM ? (char *)p : (char *)b;
            any =
                set_numbers(which, list, n, base + table[which].offset) || !table[which].zero_none;
        }
    }
    p->features |= any ? table[which].feature : 0;
}

void problem_options_apply(const problem_options *values, const int64_t at[PROBLEM_OPTIONS],
                           fattn_problem *problem, fattn_buffers *buffers)
{
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < PROBLEM_OPTIONS; i++) {
            const bool ready = pass == 0 ? !table[i].needs : problem->features & table[i].needs;
            if (values->list[i].count && ready) {
                set(i, &values->list[i], at[i], problem, buffers);
            }
        }
    }
}

/* The union of the features of all problems. */
static uint64_t features_of(const problem_options *values)
{
    fattn_problem p = {.features = 0};
    fattn_buffers b;
    for (int i = 0; i < PROBLEM_OPTIONS; i++) {
        for (int n = 0; n < problem_options_count(values, i); n++) {
            set(i, &values->list[i], n, &p, &b);
        }
    }
    return p.features;
}

/* "--causal, --window or --alibi" */
static void name_features(uint64_t features, char *text, size_t size)
{
    static const struct {
        uint64_t feature;
        const char *name;
    } names[] = {
        {FATTN_CAUSAL, "--causal"},   {FATTN_WINDOW, "--window"},         {FATTN_ALIBI, "--alibi"},
        {FATTN_DROPOUT, "--dropout"}, {FATTN_BLOCK_MASK, "--block-mask"},
    };
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof names[0] && used < size; i++) {
        if (features & names[i].feature) {
            features &= ~names[i].feature;
            used += (size_t)snprintf(text + used, size - used, "%s%s",
                                     used == 0  ? ""
                                     : features ? ", "
                                                : " or ",
                                     names[i].name);
        }
    }
}

bool problem_options_check(const problem_options *values, const char *command, uint64_t present,
                           bool forward, bool backward)
{
    const uint64_t features = features_of(values) | present;
    for (int i = 0; i < PROBLEM_OPTIONS; i++) {
        if (values->list[i].count && table[i].needs && !(features & table[i].needs)) {
            char names[96];
            name_features(table[i].needs, names, sizeof names);
            tool_usage(command, "--%.*s needs %s", (int)strcspn(table[i].name, " "), table[i].name,
                       names);
            return false;
        }
    }
    const struct {
        uint64_t feature;
        bool fits;
        const char *text;
    } directions[] = {
        {FATTN_DETERMINISTIC, backward, "--deterministic applies only to gradients"},
        {FATTN_ACCUMULATE, backward, "--accumulate applies only to gradients"},
        {FATTN_BATCH_INVARIANT, forward, "--batch-invariant applies only to forward"},
    };
    for (size_t i = 0; i < sizeof directions / sizeof directions[0]; i++) {
        if (features & directions[i].feature && !directions[i].fits) {
            tool_usage(command, "%s", directions[i].text);
            return false;
        }
    }
    return true;
}
