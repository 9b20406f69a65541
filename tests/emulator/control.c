/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control: branches, barriers, the end of a wave, waits and hints. A load has its value as soon as
 * it is issued here, so waits have no effect.
 */
#include <string.h>

#include "tests/emulator/machine.h"

/* emu_row.data of a branch: the condition. */
enum { ALWAYS, SCC0, SCC1, VCCZ, VCCNZ, EXECZ, EXECNZ };

static void jump(emu_wave *w, const emu_instr *in)
{
    w->next = w->group->machine->code + in->target;
}

/* A mask of lanes is known to be non-zero if it has a known 1, known to be zero if no bit is
 * unknown. */
static void check_mask(emu_wave *w, const emu_instr *in)
{
    const uint64_t all = all_lanes(w), def = pair(w->s_def + S_VCC) & all;
    if (def != all && (pair(w->s + S_VCC) & def) == 0) emu_undefined(w, in, "VCC of a branch");
}

static void run_branch(emu_wave *w, const emu_instr *in)
{
    const int64_t condition = in->row->data;
    if ((condition == SCC0 || condition == SCC1) && w->s_def[S_SCC] == 0)
        emu_undefined(w, in, "SCC of a branch");
    if (condition == VCCZ || condition == VCCNZ) check_mask(w, in);
    const bool zero[] = {
        [ALWAYS] = true,
        [SCC0] = w->s[S_SCC] == 0,
        [SCC1] = w->s[S_SCC] != 0,
        [VCCZ] = (pair(w->s + S_VCC) & all_lanes(w)) == 0,
        [VCCNZ] = (pair(w->s + S_VCC) & all_lanes(w)) != 0,
        [EXECZ] = exec_mask(w) == 0,
        [EXECNZ] = exec_mask(w) != 0,
    };
    if (zero[condition]) jump(w, in);
}

/* An address in registers: of an instruction of this kernel, otherwise a fault. */
static void jump_to(emu_wave *w, const emu_instr *in, uint64_t address, uint64_t def)
{
    const emu_machine *const m = w->group->machine;
    if (def != ~UINT64_C(0)) emu_undefined(w, in, "the target of a jump");
    for (int n = 0; n < m->length; n++)
        if (m->base + m->code[n].address == address) {
            w->next = m->code + n;
            return;
        }
    emu_fault(w, in, "jumps out of the kernel");
}

static void run_setpc(emu_wave *w, const emu_instr *in)
{
    uint64_t def;
    const uint64_t address = emu_scalar_read(w, &in->src[0], &def);
    jump_to(w, in, address, def);
}

static void run_swappc(emu_wave *w, const emu_instr *in)
{
    uint64_t def;
    const uint64_t address = emu_scalar_read(w, &in->src[0], &def);
    emu_scalar_write(w, in, &in->dst[0], w->group->machine->base + in[1].address, ~UINT64_C(0));
    jump_to(w, in, address, def);
}

static void run_end(emu_wave *w, const emu_instr *in)
{
    (void)in;
    w->state = ENDED;
}

static void run_barrier(emu_wave *w, const emu_instr *in)
{
    (void)in;
    w->state = AT_BARRIER;
}

/* In two parts on gfx12: the wait opens after all waves' signals. Running on in between would gain
 * nothing, but a wait without its signal would hang. */
static void run_signal(emu_wave *w, const emu_instr *in)
{
    (void)in;
    w->signalled = true;
}

static void run_barrier_wait(emu_wave *w, const emu_instr *in)
{
    if (!w->signalled) {
        emu_fault(w, in, "waits at a barrier that it did not signal");
        return;
    }
    w->signalled = false;
    w->state = AT_BARRIER;
}

static void run_trap(emu_wave *w, const emu_instr *in) { emu_fault(w, in, "traps"); }

static void run_nothing(emu_wave *w, const emu_instr *in)
{
    (void)w;
    (void)in;
}

/* s_setreg and s_getreg name hwreg(HW_REG_MODE, offset, bits). The kernels may change how
 * f32 subnormals are treated; the emulator keeps them always, which is the mode it asks
 * of the descriptor. */
static void run_setreg(emu_wave *w, const emu_instr *in)
{
    if (strstr(in->text, "HW_REG_MODE") == NULL && strstr(in->text, "HW_REG_WAVE_MODE") == NULL)
        emu_fault(w, in, "sets a hardware register that is not known");
}

#define ROW(name, form, run, class, data)                    \
    {                                                        \
        name, form, run, class, NULL, NULL, data, HALF_ALONE \
    }
#define HINT(name) ROW(name, "*", run_nothing, EMU_WAIT, 0)

static const emu_row rows[] = {
    ROW("s_branch", "=u", run_branch, EMU_BRANCH, ALWAYS),
    ROW("s_cbranch_scc0", "=u", run_branch, EMU_BRANCH, SCC0),
    ROW("s_cbranch_scc1", "=u", run_branch, EMU_BRANCH, SCC1),
    ROW("s_cbranch_vccz", "=u", run_branch, EMU_BRANCH, VCCZ),
    ROW("s_cbranch_vccnz", "=u", run_branch, EMU_BRANCH, VCCNZ),
    ROW("s_cbranch_execz", "=u", run_branch, EMU_BRANCH, EXECZ),
    ROW("s_cbranch_execnz", "=u", run_branch, EMU_BRANCH, EXECNZ),
    ROW("s_setpc_b64", "=q", run_setpc, EMU_BRANCH, 0),
    ROW("s_swappc_b64", "q=q", run_swappc, EMU_BRANCH, 0),
    ROW("s_endpgm", "*", run_end, EMU_BRANCH, 0),
    ROW("s_trap", "*", run_trap, EMU_BRANCH, 0),
    ROW("s_barrier", "*", run_barrier, EMU_BARRIER, 0),
    ROW("s_barrier_signal", "*", run_signal, EMU_BARRIER, 0),
    ROW("s_barrier_wait", "*", run_barrier_wait, EMU_BARRIER, 0),
    ROW("s_setreg_b32", "*", run_setreg, EMU_WAIT, 0),
    ROW("s_setreg_imm32_b32", "*", run_setreg, EMU_WAIT, 0),
    ROW("s_denorm_mode", "*", run_nothing, EMU_WAIT, 0),
    HINT("s_nop"),
    HINT("v_nop"),
    HINT("s_code_end"),
    HINT("s_sleep"),
    HINT("s_setprio"),
    HINT("s_sethalt"),
    HINT("s_waitcnt"),
    HINT("s_waitcnt_depctr"),
    HINT("s_waitcnt_vscnt"),
    HINT("s_waitcnt_vmcnt"),
    HINT("s_waitcnt_lgkmcnt"),
    HINT("s_wait_idle"),
    HINT("s_wait_alu"),
    HINT("s_wait_event"),
    HINT("s_wait_loadcnt"),
    HINT("s_wait_storecnt"),
    HINT("s_wait_dscnt"),
    HINT("s_wait_kmcnt"),
    HINT("s_wait_loadcnt_dscnt"),
    HINT("s_wait_storecnt_dscnt"),
    HINT("s_wait_samplecnt"),
    HINT("s_wait_bvhcnt"),
    HINT("s_wait_expcnt"),
    HINT("s_delay_alu"),
    HINT("s_clause"),
    HINT("s_inst_prefetch"),
    HINT("s_set_inst_prefetch_distance"),
    HINT("s_prefetch_inst"),
    HINT("s_prefetch_inst_pc_rel"),
    HINT("s_sendmsg"),
    HINT("s_icache_inv"),
    HINT("s_ttracedata"),
    HINT("buffer_gl0_inv"),
    HINT("buffer_gl1_inv"),
    HINT("buffer_wbl2"),
    HINT("buffer_inv"),
    HINT("buffer_invl2"),
    HINT("buffer_wbinvl1"),
    HINT("buffer_wbinvl1_vol"),
    HINT("s_dcache_wb"),
    HINT("s_dcache_inv"),
    HINT("global_wb"),
    HINT("global_inv"),
    HINT("global_wbinv"),
    HINT("global_prefetch_b8"),
    HINT("s_prefetch_data"),
};

const emu_table emu_control_table = {rows, sizeof rows / sizeof *rows};
