/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group K: processors and compilers. */
#include "tests/hazard.h"

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
    {"hazard_K2", "AMX was used without asking the system for leave", NULL,
     "cpuid.c asks, and a refusal makes the instruction set absent"},
    {"hazard_K3", "AVX-512 found its way into generic objects", NULL,
     "lint/instructions.py disassembles every object"},
    {"hazard_K4", "a wave of 64 lanes was taken for one of 32", k4, NULL},
    {"hazard_K5", "a compiler made a kernel slower", NULL,
     "`fattn info` names the compiler, and lint/code_objects.py reads what it made"},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
