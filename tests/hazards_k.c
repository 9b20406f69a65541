/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group K: processors and compilers. */
#define _DEFAULT_SOURCE /* syscall numbers, alarm() */

#include <string.h>

#include "tests/child.h"
#include "tests/hazard.h"

#if defined(__linux__) && defined(__x86_64__)
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "backends/cpu/cpuid.h"

/* From now on the system refuses this process what AMX takes: arch_prctl(ARCH_REQ_XCOMP_PERM). */
static bool refuse_tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023 };
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH_REQ_XCOMP_PERM, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* With AMX refused, its rows are missing for that reason, and others compute. Prints what is not
 * so. */
static bool does_without_tiles(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_BF16, 1, 1, 1, 128, 256, 64);
    fattn_device *device = NULL;
    const fattn_kernel *row;
    const char *missing = NULL;
    bool good = fattn_device_open("cpu", &device) == FATTN_OK && draw_build(&c) == 0;
    for (int n = 0; good && (row = device->backend->kernel(device->impl, n, &missing)); n++) {
        const bool tiles = strncmp(row->name, "amx_", 4) == 0;
        if (tiles && (missing == NULL || strstr(missing, "permission") == NULL)) {
            printf("# %s lacks %s\n", row->name, missing ? missing : "nothing");
            good = false;
        }
    }
    good = good && fattn_attention(device, &c.problem, &c.buffers, NULL) == FATTN_OK;
    fattn_cache_clear();
    fattn_device_close(device);
    draw_free(&c);
    fflush(stdout);
    return good;
}

static void k2(void)
{
    if (fattn_cpuid_amx() != NULL) {
        hazard_skip("needs a processor with AMX, and leave to use it");
        return;
    }
    const pid_t child = child_start(60);
    if (child == 0) {
        _exit(!refuse_tiles() || !does_without_tiles());
    }
    hazard_check(child_succeeds(child), "AMX is used where the system refuses it, or nothing is");
}
#else
static void k2(void) { hazard_skip("needs Linux and a processor with AMX"); }
#endif

/* Waves of 32 and of 64 lanes, and dimensions that are multiples of neither: lengths around a wave,
 * D = 192 with Dv = 128. */
static void k4(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const int64_t dims[][2] = {{192, 128}, {128, 192}, {72, 40}, {32, 96}, {256, 256}};
    static const int64_t lengths[][2] = {{31, 33}, {33, 63}, {63, 65}, {65, 129}, {97, 161}};
    if (hazard_on_host(&hazard_places[0])) {
        hazard_skip("kernels of the host have no waves");
        return;
    }
    EACH (d, dims) {
        EACH (t, dtypes) {
            for (int o = 0; o < 2; o++) {
                const fattn_op op = o ? FATTN_BACKWARD : FATTN_FORWARD;
                const int64_t *const length = lengths[(d + t) % 5];
                draw_case c = hazard_case(op, dtypes[t], 1, 2, 1, length[0], length[1], dims[d][0]);
                c.problem.dim_v = dims[d][1];
                c.problem.features = d % 2 ? FATTN_CAUSAL : 0;
                hazard_judge_drawn(&c, 2, "D %lld, Dv %lld, %lld rows, %lld keys",
                                   (long long)dims[d][0], (long long)dims[d][1],
                                   (long long)length[0], (long long)length[1]);
            }
        }
    }
}

static const hazard table[] = {
    {"hazard_K1", "an instruction set was chosen when the program was compiled", NULL,
     "stage baseline runs on processors that lack them (docs/TESTING.md)"},
    {"hazard_K2", "AMX was used without asking the system for leave", k2, NULL},
    {"hazard_K3", "AVX-512 found its way into generic objects", NULL,
     "lint/instructions.py disassembles every object"},
    {"hazard_K4", "a wave of 64 lanes was taken for one of 32", k4, NULL},
    {"hazard_K5", "a compiler made a kernel slower", NULL,
     "`fattn info` names the compiler, and lint/code_objects.py reads what it made"},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
