/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a problem; see problem_options.h. */
#include "tools/options/problem_options.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "tools/terminal/terminal.h"

static const char *const dtype_words[] = {"f32", "f16", "bf16", "f64", NULL};
static const char *const cache_words[] = {"f32", "f16", "bf16", "f64", "e4m3", NULL};
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64, FATTN_E4M3};
static const char *const layout_words[] = {"bshd", "bhsd", NULL};
static const fattn_layout layouts[] = {FATTN_BSHD, FATTN_BHSD};
static const char *const anchor_words[] = {"bottom-right", "top-left", NULL};
static const fattn_anchor anchors[] = {FATTN_BOTTOM_RIGHT, FATTN_TOP_LEFT};

typedef enum target { TO_PROBLEM, TO_BUFFERS } target;

typedef struct problem_option {
    const char *name, *help;
    option_kind kind;
    const char *const *words;
    int64_t min, max;
    uint64_t feature; /* set unless the value is none */
    uint64_t needs;   /* the option has no effect without one of these */
    bool diagonal;    /* a feature that depends on the diagonal suffices too */
    bool zero_none;   /* 0 means none */
    target target;    /* of numbers: struct and offset of the field */
    size_t offset;
    const char *without_arrays; /* help in commands that read no arrays, if it differs */
} problem_option;

/* The options that do not belong to a feature. */
static const problem_option table[PROBLEM_OPTIONS] = {
#define FIELD(name) .offset = offsetof(fattn_problem, name)
#define SCALAR(name) .target = TO_BUFFERS, .offset = offsetof(fattn_buffers, name)
    [PROBLEM_DTYPE] = {"dtype", "of q, k and v; default: that of q's array", OPTION_CHOICES,
                       .words = dtype_words, .without_arrays = "of q, k and v; default f32"},
    [PROBLEM_DTYPE_KV] = {"dtype-kv", "of k, v and their gradients; default dtype", OPTION_CHOICES,
                          .words = cache_words},
    [PROBLEM_DTYPE_V] = {"dtype-v", "of v and its gradient; default dtype-kv", OPTION_CHOICES,
                         .words = cache_words},
    [PROBLEM_DTYPE_O] = {"dtype-o", "of o and its gradient: dtype or f32; default dtype",
                         OPTION_CHOICES, .words = dtype_words},
    [PROBLEM_DTYPE_BIAS] = {"dtype-bias",
                            "of the bias; default: dtype if its array has that,\nelse f32",
                            OPTION_CHOICES, .words = dtype_words, .needs = FATTN_BIAS,
                            .without_arrays = "of the bias; default f32"},
    [PROBLEM_LAYOUT] = {"layout", "order of the axes of all tensors; default bshd", OPTION_CHOICES,
                        .words = layout_words},
    [PROBLEM_ANCHOR] =
        {"anchor",
         "where the diagonal starts: off is Sk - Sq with\nbottom-right, the default, or else 0",
         OPTION_CHOICES, .words = anchor_words, .diagonal = true},
    [PROBLEM_Q_OFFSET] = {"q-offset N", "position of the first query in a longer sequence",
                          OPTION_INTEGERS, .feature = FATTN_POSITIONS, .diagonal = true,
                          .needs = FATTN_DROPOUT, SCALAR(q_offset)},
    [PROBLEM_K_OFFSET] = {"k-offset N", "position of the first key", OPTION_INTEGERS,
                          .feature = FATTN_POSITIONS, .diagonal = true, .needs = FATTN_DROPOUT,
                          SCALAR(k_offset)},
    [PROBLEM_WHOLE_Q] = {"whole-q N", "queries in that longer sequence; default: those given",
                         OPTION_INTEGERS, .feature = FATTN_POSITIONS, .diagonal = true,
                         SCALAR(whole_q)},
    [PROBLEM_WHOLE_K] = {"whole-k N", "keys in that longer sequence", OPTION_INTEGERS,
                         .feature = FATTN_POSITIONS, .diagonal = true, SCALAR(whole_k)},
    [PROBLEM_BATCH_OFFSET] = {"batch-offset N",
                              "index of the first batch entry in a larger\ndropout pattern",
                              OPTION_INTEGERS, .needs = FATTN_DROPOUT, FIELD(batch_offset)},
    [PROBLEM_HEAD_OFFSET] = {"head-offset N", "index of the first query head in it",
                             OPTION_INTEGERS, .needs = FATTN_DROPOUT, FIELD(head_offset)},
    [PROBLEM_BLOCK_SIZE] = {"block-size M,N", "queries and keys of a block of --block-mask",
                            OPTION_PAIRS, .min = 1, .max = INT64_MAX, .needs = FATTN_BLOCK_MASK,
                            FIELD(block_m)},
    [PROBLEM_POINTER_ALIGNMENT] = {"pointer-alignment N",
                                   "what the plan may rely on: tensors begin at multiples\n"
                                   "of N bytes, a power of two up to 4096; default 16",
                                   OPTION_INTEGERS, .min = 1, .max = 4096,
                                   FIELD(pointer_alignment)},
#undef FIELD
#undef SCALAR
};

uint64_t problem_on_diagonal(void)
{
    uint64_t features = 0;
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        features |= fattn_feature_row(bit)->on_diagonal ? UINT64_C(1) << bit : 0;
    }
    return features;
}

/* The option of a feature: its first numbers, or a switch. */
static problem_option feature_option(int bit)
{
    const fattn_feature *const feature = fattn_feature_row(bit);
    const fattn_feature_field *const field = feature->fields;
    problem_option o = {.name = feature->option ? feature->option : "",
                        .help = feature->help,
                        .kind = OPTION_SWITCHES,
                        .feature = UINT64_C(1) << bit,
                        .zero_none = feature->zero_is_none,
                        .offset = field->offset};
    if (feature->option && feature->values) {
        o.kind = field->kind == FATTN_FIELD_REAL ? OPTION_REALS
                 : feature->values == 2          ? OPTION_PAIRS
                                                 : OPTION_INTEGERS;
    }
    return o;
}

static problem_option option_of(int which)
{
    problem_option o = which >= PROBLEM_FEATURES && which < PROBLEM_ANCHOR
                           ? feature_option(which - PROBLEM_FEATURES)
                           : table[which];
    o.needs |= o.diagonal ? problem_on_diagonal() : 0;
    return o;
}

void problem_options_rows(problem_options *values, bool single, option *rows)
{
    for (int i = 0; i < PROBLEM_OPTIONS; i++) {
        const problem_option o = option_of(i);
        const bool pair = o.kind == OPTION_PAIRS;
        rows[i] = (option){
            .name = o.name,
            .help = !single && o.without_arrays ? o.without_arrays : o.help,
            .kind = o.kind,
            .value = &values->list[i],
            .words = o.words,
            .min = o.min,
            .max = o.max,
            .length = !single ? 0
                      : pair  ? 2
                              : 1,
        };
    }
}

int problem_options_count(const problem_options *values, int which)
{
    const int count = values->list[which].count;
    return option_of(which).kind == OPTION_PAIRS ? count / 2 : count;
}

/* Sets one field, or two adjacent fields for a pair. */
static bool set_numbers(option_kind kind, const option_list *list, int64_t n, void *field)
{
    if (kind == OPTION_REALS) {
        *(double *)field = list->reals.at[n];
        return list->reals.at[n] != 0;
    }
    const bool pair = kind == OPTION_PAIRS;
    int64_t *const numbers = field;
    numbers[0] = list->integers.at[pair ? 2 * n : n];
    if (pair) {
        numbers[1] = list->integers.at[2 * n + 1];
    }
    return numbers[0] != 0;
}

_Static_assert(offsetof(fattn_problem, window_right) ==
                       offsetof(fattn_problem, window_left) + sizeof(int64_t) &&
                   offsetof(fattn_problem, block_n) ==
                       offsetof(fattn_problem, block_m) + sizeof(int64_t),
               "pairs of fields");

static void set(int which, const option_list *list, int64_t n, fattn_problem *p, fattn_buffers *b)
{
    const problem_option o = option_of(which);
    bool any = true;
    switch (which) {
    case PROBLEM_DTYPE: p->dtype = dtypes[list->choices.at[n]]; break;
    case PROBLEM_DTYPE_KV: p->dtype_kv = dtypes[list->choices.at[n]]; break;
    case PROBLEM_DTYPE_V: p->dtype_v = dtypes[list->choices.at[n]]; break;
    case PROBLEM_DTYPE_BIAS: p->dtype_bias = dtypes[list->choices.at[n]]; break;
    case PROBLEM_DTYPE_O: p->dtype_o = dtypes[list->choices.at[n]]; break;
    case PROBLEM_LAYOUT: p->layout = layouts[list->choices.at[n]]; break;
    case PROBLEM_ANCHOR: p->anchor = anchors[list->choices.at[n]]; break;
    default:
        if (o.kind == OPTION_SWITCHES) {
            any = list->choices.at[n];
        } else {
            char *const base = o.target == TO_PROBLEM ? (char *)p : (char *)b;
            any = set_numbers(o.kind, list, n, base + o.offset) || !o.zero_none;
        }
    }
    p->features |= any ? o.feature : 0;
}

void problem_options_apply(const problem_options *values, const int64_t at[PROBLEM_OPTIONS],
                           fattn_problem *problem, fattn_buffers *buffers)
{
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < PROBLEM_OPTIONS; i++) {
            const uint64_t needs = option_of(i).needs;
            const bool ready = pass == 0 ? !needs : problem->features & needs;
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

const char *problem_feature_options(uint64_t features, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int bit = 0; bit < FATTN_FEATURE_COUNT && used < size; bit++) {
        if (features >> bit & 1) {
            features &= ~(UINT64_C(1) << bit);
            const char *const between = used == 0 ? "" : features ? ", " : " or ";
            used += (size_t)snprintf(text + used, size - used, "%s--%s", between,
                                     fattn_feature_name(bit));
        }
    }
    for (char *c = text; *c; c++) {
        *c = *c == '_' ? '-' : *c;
    }
    return text;
}

bool problem_options_check(const problem_options *values, const char *command, uint64_t present,
                           bool forward, bool backward)
{
    const uint64_t features = features_of(values) | present;
    for (int i = 0; i < PROBLEM_OPTIONS; i++) {
        const problem_option o = option_of(i);
        if (values->list[i].count && o.needs && !(features & o.needs)) {
            char names[96];
            tool_usage(command, "--%.*s needs %s", (int)strcspn(o.name, " "), o.name,
                       problem_feature_options(o.needs, names, sizeof names));
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

fattn_problem problem_forward_of(const fattn_problem *backward)
{
    fattn_problem p = *backward;
    p.op = FATTN_FORWARD;
    p.features &= ~(FATTN_DLSE | FATTN_DETERMINISTIC | FATTN_ACCUMULATE);
    memset(p.dbias_stride, 0, sizeof p.dbias_stride);
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    return p;
}
