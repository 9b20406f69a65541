/* SPDX-License-Identifier: Apache-2.0 */
/* The features of a case in words, for rows of `bench`; see sweep.h. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/dtype.h"
#include "core/feature.h"
#include "core/status.h"
#include "tools/bench/sweep.h"

const char *sweep_mask_word(const sweep_case *c)
{
    static const char *const words[] = {"none", "causal", "mask", "causal+mask"};
    return words[(c->problem.features & FATTN_CAUSAL ? 1 : 0) +
                 (c->problem.features & FATTN_MASK ? 2 : 0)];
}

typedef struct sentence {
    char *text;
    size_t size, used;
} sentence;

FATTN_PRINTF(2, 3) static void say(sentence *s, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int put = vsnprintf(s->text + s->used, s->size - s->used, format, arguments);
    va_end(arguments);
    const size_t room = s->size - s->used - 1;
    s->used += (size_t)put < room ? (size_t)put : room;
}

/* Appends the value of a feature in brackets. */
static void say_value(sentence *s, const sweep_case *c, int bit)
{
    const fattn_problem *const p = &c->problem;
    char value[64];
    switch (UINT64_C(1) << bit) {
    case FATTN_SEQUSED_Q: say(s, "(%" PRId64 ")", c->used_q); break;
    case FATTN_SEQUSED_K: say(s, "(%" PRId64 ")", c->used_k); break;
    case FATTN_SEQSTART_K: say(s, "(%" PRId64 ")", c->start_k); break;
    case FATTN_BLOCK_MASK:
        say(s, "(%" PRId64 "x%" PRId64 ",%g)", p->block_m, p->block_n, c->density);
        break;
    case FATTN_POSITIONS:
        say(s, "(%" PRId64 ",%" PRId64 ")", c->buffers.q_offset, c->buffers.k_offset);
        break;
    case FATTN_BIAS:
        say(s, "%s%s", p->dtype_bias ? "_" : "",
            p->dtype_bias ? fattn_dtype_name(p->dtype_bias) : "");
        break;
    default: say(s, "%s", fattn_feature_value(p, bit, value, sizeof value));
    }
}

void sweep_words(const sweep_case *c, char *text, size_t size)
{
    const fattn_problem *const p = &c->problem;
    sentence s = {text, size, 0};
    const struct {
        bool has;
        const char *word;
    } others[] = {
        {p->layout == FATTN_BHSD, "bhsd"},
        {p->anchor == FATTN_TOP_LEFT, "top_left"},
        {p->op == FATTN_FORWARD && p->outputs & FATTN_OUT_LSE, "lse"},
        {p->outputs & FATTN_OUT_DBIAS, "dbias"},
        {p->outputs & FATTN_OUT_DSINK, "dsink"},
        {p->dtype_o && p->dtype_o != p->dtype, "o_f32"},
        {c->places[SWEEP_Q_OFFSETS], "q_offsets"},
        {c->places[SWEEP_K_OFFSETS], "k_offsets"},
        {c->places[SWEEP_WHOLES_Q], "wholes_q"},
        {c->places[SWEEP_WHOLES_K], "wholes_k"},
    };
    text[0] = '\0';
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        if (p->features & ~(FATTN_CAUSAL | FATTN_MASK) & UINT64_C(1) << bit) {
            say(&s, "%s%s", s.used ? "+" : "", fattn_feature_name(bit));
            say_value(&s, c, bit);
        }
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        if (others[i].has) {
            say(&s, "%s%s", s.used ? "+" : "", others[i].word);
        }
    }
    if (p->pointer_alignment != 16) {
        say(&s, "%saligned(%" PRId64 ")", s.used ? "+" : "", p->pointer_alignment);
    }
    const fattn_dtype k = sweep_dtype_k(p), v = sweep_dtype_v(p);
    if (k != p->dtype) {
        say(&s, "%skv_%s", s.used ? "+" : "", fattn_dtype_name(k));
    }
    if (v != k) {
        say(&s, "%sv_%s", s.used ? "+" : "", fattn_dtype_name(v));
    }
    if (!s.used) {
        say(&s, "-");
    }
}
