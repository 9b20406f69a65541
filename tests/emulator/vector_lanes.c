/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector instructions that read or write values of other lanes, and their table; also v_swap, which
 * writes both operands, and v_bitop3, which may ignore some of its sources.
 */
#include <string.h>

#include "tests/emulator/vector.h"

static int lane_source(emu_wave *w, const emu_instr *instr, int source)
{
    uint64_t def;
    const uint64_t lane = emu_scalar_read(w, &instr->src[source], &def);
    if ((uint32_t)def != UINT32_MAX) emu_undefined(w, instr, "the number of a lane");
    return (int)(lane & (uint64_t)(w->lanes - 1));
}

static void read_lane(emu_wave *w, const emu_instr *instr, int lane)
{
    uint32_t room[2 * LANES];
    const emu_view view = emu_vector_read(w, instr, 0, room);
    const uint64_t def =
        (lane_in(view.def[0], lane) ? 0xffff : 0) | (lane_in(view.def[1], lane) ? 0xffff0000 : 0);
    emu_scalar_write(w, instr, &instr->dst[0], view.v[lane], def);
}

static void run_readfirstlane(emu_wave *w, const emu_instr *instr)
{
    const uint64_t exec = exec_mask(w);
    int lane = 0;
    while (exec != 0 && !lane_in(exec, lane)) lane++;
    read_lane(w, instr, lane);
}

static void run_readlane(emu_wave *w, const emu_instr *instr)
{
    read_lane(w, instr, lane_source(w, instr, 1));
}

static void run_writelane(emu_wave *w, const emu_instr *instr)
{
    uint64_t def;
    const int lane = lane_source(w, instr, 1), reg = instr->dst[0].reg;
    w->v[reg][lane] = (uint32_t)emu_scalar_read(w, &instr->src[0], &def);
    for (int half = 0; half < 2; half++) {
        const uint64_t known = (def >> 16 * half & 0xffff) == 0xffff;
        w->v_def[reg][half] = (w->v_def[reg][half] & ~(UINT64_C(1) << lane)) | known << lane;
    }
}

/* Writes to each lane of EXEC the value of lane from[] of source 0. An inactive source lane counts
 * if `inactive`; otherwise the reader keeps its value, or gets 0 with bound_ctrl. */
static void move_lanes(emu_wave *w, const emu_instr *instr, const int *from, bool inactive)
{
    uint32_t room[2 * LANES], d[LANES];
    const emu_view view = emu_vector_read(w, instr, 0, room);
    const uint64_t exec = exec_mask(w);
    uint64_t mask = 0, def[2] = {0, 0};
    for (int l = 0; l < w->lanes; l++) {
        const bool there = inactive || lane_in(exec, from[l]);
        const uint64_t bit = UINT64_C(1) << l;
        d[l] = there ? view.v[from[l]] : 0;
        if (there || instr->mod.bound_ctrl) mask |= bit;
        for (int half = 0; half < 2; half++)
            if (!there || lane_in(view.def[half], from[l])) def[half] |= bit;
    }
    emu_vector_write(w, instr->dst[0].reg, d, mask & exec, def[0], def[1]);
}

/* data: 16 to take from the other row of a pair. */
static void run_permlane16(emu_wave *w, const emu_instr *instr)
{
    uint64_t def[2];
    const uint64_t low = emu_scalar_read(w, &instr->src[1], &def[0]) & UINT32_MAX;
    const uint64_t selector = low | emu_scalar_read(w, &instr->src[2], &def[1]) << 32;
    int from[LANES];
    for (int l = 0; l < w->lanes; l++)
        from[l] = ((l & ~15) ^ (int)instr->row->data) | (int)(selector >> 4 * (l & 15) & 15);
    if ((uint32_t)(def[0] & def[1]) != UINT32_MAX) emu_undefined(w, instr, "a lane selector");
    move_lanes(w, instr, from, instr->mod.op_sel & 1);
}

static void run_permlane16_var(emu_wave *w, const emu_instr *instr)
{
    uint32_t room[2 * LANES];
    const emu_view selector = emu_vector_read(w, instr, 1, room);
    int from[LANES];
    for (int l = 0; l < w->lanes; l++)
        from[l] = ((l & ~15) ^ (int)instr->row->data) | (int)(selector.v[l] & 15);
    if ((selector.def[0] & exec_mask(w)) != exec_mask(w))
        emu_undefined(w, instr, "a lane selector");
    move_lanes(w, instr, from, instr->mod.op_sel & 1);
}

static void run_permlane64(emu_wave *w, const emu_instr *instr)
{
    int from[LANES];
    for (int l = 0; l < w->lanes; l++) from[l] = w->lanes == 64 ? l ^ 32 : l;
    move_lanes(w, instr, from, true);
}

/* Blocks of `data` lanes: odd ones of the first register change places with even
 * ones of the second. */
static void run_permlane_swap(emu_wave *w, const emu_instr *instr)
{
    const int x = instr->dst[0].reg, y = instr->dst[1].reg, block = (int)instr->row->data;
    for (int l = 0; l < w->lanes; l++) {
        if (l / block % 2 == 1 || !lane_in(exec_mask(w), l) || !lane_in(exec_mask(w), l + block))
            continue;
        const uint32_t keep = w->v[x][l + block];
        w->v[x][l + block] = w->v[y][l];
        w->v[y][l] = keep;
        for (int half = 0; half < 2; half++) {
            uint64_t *const p = &w->v_def[x][half], *const q = &w->v_def[y][half];
            const uint64_t differ = (*p >> (l + block) ^ *q >> l) & 1;
            *p ^= differ << (l + block);
            *q ^= differ << l;
        }
    }
}

static void run_swap(emu_wave *w, const emu_instr *instr)
{
    const int x = instr->dst[0].reg, y = instr->dst[1].reg;
    const uint64_t exec = exec_mask(w);
    uint32_t keep[LANES];
    const uint64_t def[2] = {w->v_def[x][0], w->v_def[x][1]};
    memcpy(keep, w->v[x], sizeof keep);
    emu_vector_write(w, x, w->v[y], exec, w->v_def[y][0], w->v_def[y][1]);
    emu_vector_write(w, y, keep, exec, def[0], def[1]);
}

/* Any function of three bits: bit 4 a + 2 b + c of a constant is its value. Sources that it ignores
 * need not be defined. */
static void run_bitop3(emu_wave *w, const emu_instr *instr)
{
    uint32_t room[3][2 * LANES], d[LANES] = {0};
    uint64_t def[2] = {~UINT64_C(0), ~UINT64_C(0)};
    const uint32_t *x[3];
    const uint32_t truth = instr->mod.bitop3;
    static const uint8_t ones_of[3] = {0xf0, 0xcc, 0xaa}; /* where each source is 1 */
    for (int s = 0; s < 3; s++) {
        const emu_view view = emu_vector_read(w, instr, s, room[s]);
        const int shift = 4 >> s;
        const bool matters = ((truth & ones_of[s]) >> shift) != (truth & (uint8_t)~ones_of[s]);
        for (int half = 0; half < 2 && matters; half++) def[half] &= view.def[half];
        x[s] = view.v;
    }
    for (int k = 0; k < 8; k++) {
        if (!(truth >> k & 1)) continue;
        for (int l = 0; l < w->lanes; l++)
            d[l] |= (k & 4 ? x[0][l] : ~x[0][l]) & (k & 2 ? x[1][l] : ~x[1][l]) &
                    (k & 1 ? x[2][l] : ~x[2][l]);
    }
    emu_vector_write(w, instr->dst[0].reg, d, exec_mask(w), def[0], def[1]);
}

/* ---- the table ------------------------------------------------------------------------------- */

#define SPECIAL(name, form, run, data)                     \
    {                                                      \
        name, form, run, EMU_VALU, NULL, NULL, data, false \
    }

static const emu_row rows[] = {
    SPECIAL("v_bitop3_b32", "u=uuu", run_bitop3, 0),
    SPECIAL("v_readfirstlane_b32", "s=u", run_readfirstlane, 0),
    SPECIAL("v_readlane_b32", "s=uu", run_readlane, 0),
    SPECIAL("v_writelane_b32", "u=uu", run_writelane, 0),
    SPECIAL("v_permlane16_b32", "u=uuu", run_permlane16, 0),
    SPECIAL("v_permlanex16_b32", "u=uuu", run_permlane16, 16),
    SPECIAL("v_permlane16_var_b32", "u=uu", run_permlane16_var, 0),
    SPECIAL("v_permlanex16_var_b32", "u=uu", run_permlane16_var, 16),
    SPECIAL("v_permlane64_b32", "u=u", run_permlane64, 0),
    SPECIAL("v_permlane32_swap_b32", "uu=", run_permlane_swap, 32),
    SPECIAL("v_permlane16_swap_b32", "uu=", run_permlane_swap, 16),
    SPECIAL("v_swap_b32", "uu=", run_swap, 0),
};

const emu_table emu_lanes_table = {rows, sizeof rows / sizeof *rows};
