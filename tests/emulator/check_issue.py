# SPDX-License-Identifier: Apache-2.0
"""The model of issue.py agrees with results worked out by hand."""

import sys

import issue

CDNA, RDNA = issue.PROCESSORS["gfx942"], issue.PROCESSORS["gfx1100"]
MFMA = [f"v_mfma_f32_32x32x8_f16 a[{n}:{n + 15}], v[0:1], v[2:3], a[{n}:{n + 15}]" for n in (0, 16, 32, 48)]
WMMA = [f"v_wmma_f32_16x16x16_f16 v[{n}:{n + 7}], v[100:107], v[108:115], v[{n}:{n + 7}]" for n in (0, 8, 16, 24)]
SUMS = [f"v_fma_f32 v{20 + n}, v{60 + n}, v1, v2" for n in range(32)]
READ = ["ds_read_b128 v[0:3], v99", "s_waitcnt lgkmcnt(0)"]


def share(body, processor=CDNA, registers=128, threads=256):
    return issue.estimate(body, processor, registers, 0, threads).modelled


# What is said, the share of cycles in which matrix units work, and what it is to be.
LAWS = [
    ("products that depend on nothing follow each other", share(MFMA), 1),
    ("so do those that add to one sum", share(MFMA[:1] * 4), 1),
    ("vector instructions run beside them, of one wave", share([MFMA[0]] + SUMS[:7], registers=512), 1),
    ("and take over where there are more: 32 of 4 + 9 * 4 cycles", share([MFMA[0]] + SUMS[:9], registers=512), 32 / 40),
    ("a wave that waits for its sums waits 16 cycles more, and reads for 4",
     share([MFMA[0], "v_add_f32_e32 v3, 1.0, v3", "v_accvgpr_read_b32 v2, a0"], registers=512), 32 / 52),
    ("two waves fill each other's gaps", share(MFMA[:1] + ["v_accvgpr_read_b32 v9, a0"], registers=256), 1),
    ("16 transcendentals take 256 cycles, and 4 products 16 to issue",
     share(MFMA + ["v_exp_f32_e32 v9, v9"] * 16), 128 / 272),
    ("a wave alone waits for LDS, 8 cycles of each of 4 SIMDs and 64, then for 2 turns to wait and multiply",
     share(READ + MFMA[:1], registers=512), 32 / 104),
    ("on RDNA products and vector instructions take turns", share(WMMA + SUMS, RDNA), 128 / 160),
    ("waves of a work-group meet at barriers", share(MFMA + ["s_barrier"] + SUMS[:16], threads=512), 1),
]

for number, (title, found, expected) in enumerate(LAWS, 1):
    near = abs(found - expected) < 0.03
    print("ok" if near else "not ok", number, "-", f"{title}: {found:.3f}, by hand {expected:.3f}")
print(f"1..{len(LAWS)}")
sys.exit(any(abs(found - expected) >= 0.03 for _, found, expected in LAWS))
