/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For the tables of vector instructions: how their rows run, and the rules for which results are
 * defined.
 */
#ifndef FATTN_TESTS_EMULATOR_VECTOR_H
#define FATTN_TESTS_EMULATOR_VECTOR_H

#include "tests/emulator/machine.h"

/* emu_row.data of a vector instruction: which halves of the result are defined. */
typedef enum def_rule {
    DEF_ALL,    /* the result is defined in the lanes where all sources are */
    DEF_HALVES, /* each half by itself: packed and bitwise operations */
    DEF_AND,    /* the same, and a known zero makes the result known */
    DEF_AND_OR,
    DEF_SHIFT_LEFT,
    DEF_SHIFT_OR,
    DEF_SHIFT_RIGHT,
    DEF_SHIFT_ARITHMETIC,
    DEF_PACK,     /* source 0 becomes the low half, source 1 the high one */
    DEF_SELECT,   /* source 2 chooses */
    DEF_PERM,     /* source 2 chooses bytes */
    DEF_FIELD,    /* bits of source 0 at source 1, source 2 of them */
    DEF_INSERT,   /* source 0 chooses bits */
    DEF_SUM,      /* of 64 bits: the low register needs no high one */
    DEF_ALIGN_16, /* both sources shifted right together */
} def_rule;

void emu_vector_run(emu_wave *w, const emu_instr *in);
void emu_vector_compare_exec(emu_wave *w, const emu_instr *in);

#endif
