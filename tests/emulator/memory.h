/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by memory and LDS instructions: conversion between bytes and registers, and atomic
 * operations.
 */
#ifndef FATTN_TESTS_EMULATOR_MEMORY_H
#define FATTN_TESTS_EMULATOR_MEMORY_H

#include "tests/emulator/machine.h"

/* emu_row.data of a load or store: bytes per lane, and how they map to a register. */
enum {
    MEM_BYTES = 0xff,
    MEM_SIGN = 0x100,  /* bytes and halves are extended by their sign */
    MEM_D16 = 0x200,   /* 16 bits of the register, which keeps its others */
    MEM_HIGH = 0x400,  /* those are the high half */
    MEM_SPACE = 0x800, /* and above: free for the family */
};

typedef enum atomic_op {
    ATOMIC_ADD,
    ATOMIC_SUB,
    ATOMIC_RSUB,
    ATOMIC_SMIN,
    ATOMIC_UMIN,
    ATOMIC_SMAX,
    ATOMIC_UMAX,
    ATOMIC_AND,
    ATOMIC_OR,
    ATOMIC_XOR,
    ATOMIC_INC,
    ATOMIC_DEC,
    ATOMIC_SWAP,
    ATOMIC_CMPSWAP,
    ATOMIC_FADD,
    ATOMIC_FMIN,
    ATOMIC_FMAX,
    ATOMIC_PK_F16,
    ATOMIC_PK_BF16,
} atomic_op;

/* The new value of `bytes` bytes whose old value is `old`. */
uint64_t emu_atomic(atomic_op op, int bytes, uint64_t old, uint64_t x, uint64_t compare);

typedef struct emu_transfer {
    int dwords;
    uint32_t d[4][LANES];
    uint64_t undef[4][2]; /* lanes whose half is not defined */
} emu_transfer;

void emu_transfer_begin(emu_transfer *t, int64_t data);
/* A lane's bytes come from p; def, which may be NULL, says which of them are defined. */
void emu_transfer_load(emu_transfer *t, int64_t data, int lane, const uint8_t *p,
                       const uint8_t *def);
/* To the destination, in the lanes of mask. */
void emu_transfer_write(emu_wave *w, const emu_instr *in, const emu_transfer *t, uint64_t mask);
/* A lane's bytes of register `reg` go to p; their definedness to def, unless NULL. Returns whether
 * all are defined. */
bool emu_transfer_store(const emu_wave *w, int reg, int64_t data, int lane, uint8_t *p,
                        uint8_t *def);

/* A register or a pair of them in a lane, and whether it is defined. */
uint64_t emu_lane_value(const emu_wave *w, const emu_operand *o, int lane, bool *def);

/* lds.c: a lane's bytes of LDS, or NULL after a fault; `write` and `atomic` are for the race
 * check. */
uint8_t *emu_lds_at(emu_wave *w, const emu_instr *in, int lane, uint32_t address, int bytes,
                    bool write, bool atomic, uint8_t **def);

#endif
