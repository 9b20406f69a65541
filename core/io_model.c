/* SPDX-License-Identifier: Apache-2.0 */
/* Names and sizes of what the I/O model counts. */
#include "core/io_model.h"

#include "core/dtype.h"
#include "core/integer.h"
#include "core/problem.h"

const char *fattn_io_tensor_name(fattn_io_tensor tensor)
{
    static const char *const names[FATTN_IO_TENSORS] = {
        [FATTN_IO_Q] = "q",
        [FATTN_IO_K] = "k",
        [FATTN_IO_V] = "v",
        [FATTN_IO_O] = "o",
        [FATTN_IO_L] = "l",
        [FATTN_IO_M] = "m",
        [FATTN_IO_LSE] = "lse",
        [FATTN_IO_DELTA] = "delta",
        [FATTN_IO_DOUT] = "dout",
        [FATTN_IO_DLSE] = "dlse",
        [FATTN_IO_DQ] = "dq",
        [FATTN_IO_DK] = "dk",
        [FATTN_IO_DV] = "dv",
        [FATTN_IO_BIAS] = "bias",
        [FATTN_IO_DBIAS] = "dbias",
        [FATTN_IO_MASK] = "mask",
        [FATTN_IO_BLOCK_MASK] = "block_mask",
        [FATTN_IO_S] = "S",
        [FATTN_IO_C] = "C",
        [FATTN_IO_P] = "P",
        [FATTN_IO_Z] = "Z",
        [FATTN_IO_R] = "R",
        [FATTN_IO_DP] = "dP",
        [FATTN_IO_DS] = "dS",
    };
    return names[tensor];
}

const char *fattn_io_schedule_name(fattn_io_schedule schedule)
{
    static const char *const names[FATTN_IO_SCHEDULES] = {
        [FATTN_IO_STANDARD] = "standard",
        [FATTN_IO_FLASH1] = "flash1",
        [FATTN_IO_FLASH2] = "flash2",
    };
    return names[schedule];
}

fattn_io fattn_io_total(const fattn_io_counts *counts)
{
    fattn_io total = {0, 0};
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        total.reads += counts->tensor[t].reads;
        total.writes += counts->tensor[t].writes;
    }
    return total;
}

double fattn_io_element_bytes(const fattn_problem *p, fattn_io_tensor tensor)
{
    switch (tensor) {
    case FATTN_IO_O:
    case FATTN_IO_DOUT: return (double)fattn_dtype_size(p->dtype_o);
    case FATTN_IO_L:
    case FATTN_IO_M:
    case FATTN_IO_LSE:
    case FATTN_IO_DELTA:
    case FATTN_IO_DLSE:
    case FATTN_IO_DBIAS: return (double)fattn_dtype_size(fattn_statistics_dtype(p));
    case FATTN_IO_K: return (double)fattn_dtype_size(p->dtype_kv);
    case FATTN_IO_V: return (double)fattn_dtype_size(p->dtype_v);
    case FATTN_IO_DQ: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype));
    case FATTN_IO_DK: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype_kv));
    case FATTN_IO_DV: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype_v));
    case FATTN_IO_BIAS: return (double)fattn_dtype_size(p->dtype_bias);
    case FATTN_IO_MASK:
    case FATTN_IO_BLOCK_MASK:
    case FATTN_IO_Z: return 1;
    default: return (double)fattn_dtype_size(p->dtype);
    }
}

double fattn_io_counts_bytes(const fattn_problem *problem, const fattn_io_counts *counts)
{
    double bytes = 0;
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        const double size = fattn_io_element_bytes(problem, (fattn_io_tensor)t);
        bytes += size * (counts->tensor[t].reads + counts->tensor[t].writes);
    }
    return bytes;
}

fattn_tile fattn_io_paper_tile(const fattn_problem *problem, int64_t fast_elements)
{
    const int64_t d = fattn_ceil_div(problem->dim + problem->dim_v, 2);
    const int64_t bc = fattn_max64(1, fattn_ceil_div(fast_elements, 4 * d));
    return (fattn_tile){fattn_min64(bc, d), bc};
}
