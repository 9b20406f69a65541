/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/run/job.h"

#include "core/memory.h"
#include "tools/terminal/terminal.h"

const job_input job_inputs[INPUTS] = {
    [IN_Q] = {TENSOR, 0},
    [IN_K] = {KEY, 0},
    [IN_V] = {VALUE, 0},
    [IN_BIAS] = {BIAS, FATTN_BIAS},
    [IN_MASK] = {BYTES, FATTN_MASK},
    [IN_BLOCK_MASK] = {BYTES, FATTN_BLOCK_MASK},
    [IN_SINK] = {REAL, FATTN_SINK},
    [IN_ALIBI] = {REAL, FATTN_ALIBI},
    [IN_K_DESCALE] = {REAL, FATTN_DESCALE},
    [IN_V_DESCALE] = {REAL, FATTN_DESCALE},
    [IN_CU_Q] = {COUNTS, FATTN_CU_SEQLENS_Q},
    [IN_CU_K] = {COUNTS, FATTN_CU_SEQLENS_K},
    [IN_USED_Q] = {COUNTS, FATTN_SEQUSED_Q},
    [IN_USED_K] = {COUNTS, FATTN_SEQUSED_K},
    [IN_START_K] = {COUNTS, FATTN_SEQSTART_K},
    [IN_TABLE] = {COUNTS, FATTN_PAGED},
    [IN_Q_OFFSETS] = {PLACES, FATTN_POSITIONS},
    [IN_K_OFFSETS] = {PLACES, FATTN_POSITIONS},
    [IN_WHOLES_Q] = {PLACES, FATTN_POSITIONS},
    [IN_WHOLES_K] = {PLACES, FATTN_POSITIONS},
    [IN_DO] = {RESULT, 0},
    [IN_DLSE] = {REAL, FATTN_DLSE},
};

static bool memory_is_short; /* which is no fault of the user's */

void job_init(job *j)
{
    *j = (job){.divided = {.timeout = 60}};
    memory_is_short = false;
    fattn_problem_init(&j->problem);
    fattn_buffers_init(&j->buffers);
}

void job_free(job *j)
{
    for (int i = 0; i < INPUTS; i++) {
        npy_free(&j->in[i]);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        npy_free(&j->out[i]);
    }
    for (int side = 0; side < SIDES; side++) {
        fattn_memory_free(j->divided.share[side].runs);
    }
}

void job_recover(const job *j)
{
    for (int i = 0; i < INPUTS; i++) {
        if (j->in_path[i]) {
            replacement_recover(j->in_path[i]);
        }
    }
    for (int i = 0; i < OUTPUTS; i++) {
        if (j->out_path[i]) {
            replacement_recover(j->out_path[i]);
        }
    }
}

bool job_given(const job *j, int which) { return problem_options_count(&j->options, which); }

bool job_complain(const char *why)
{
    tool_usage("run", "%s", why);
    return false;
}

bool job_succeeded(int failed, const char *why)
{
    memory_is_short = memory_is_short || failed == COMPLAINT_NO_MEMORY;
    return failed == 0 || job_complain(why);
}

int job_exit_status(void) { return memory_is_short ? TOOL_LIBRARY : TOOL_USAGE; }

npy_kind job_kind_of(fattn_dtype dtype)
{
    static const npy_kind table[] = {[FATTN_F32] = NPY_F32,
                                     [FATTN_F16] = NPY_F16,
                                     [FATTN_BF16] = NPY_BF16,
                                     [FATTN_F64] = NPY_F64,
                                     [FATTN_E4M3] = NPY_E4M3};
    return table[dtype];
}

fattn_dtype job_type_of(const fattn_problem *p, role as)
{
    const fattn_dtype key = p->dtype_kv ? p->dtype_kv : p->dtype;
    switch (as) {
    case TENSOR: return p->dtype;
    case KEY: return key;
    case VALUE: return p->dtype_v ? p->dtype_v : key;
    case RESULT: return p->dtype_o ? p->dtype_o : p->dtype;
    case BIAS: return p->dtype_bias;
    default: return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    }
}
