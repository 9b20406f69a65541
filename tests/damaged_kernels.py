#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Each damage to a kernel for AMD's processors is found: a line of the source is broken, the kernel compiled
again, and `fattn check` on the emulated GPU must fail where it passes with the source as it is.

usage: damaged_kernels.py FATTN CLANG PROCESSOR [FLAG]...
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

fattn, clang, processor, *flags = sys.argv[1:]
fattn = os.path.abspath(fattn)
root = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

# What is wrong, image, kernel row, file of backends/, the words that are replaced, and by what.
FORWARD, BACKWARD = ("simt_forward", "simt_forward"), ("simt_backward", "simt_backward")
UNIT = "wmma" if processor.startswith("gfx1") else "mfma"
LEAN, FULL = ("matrix_forward", UNIT + "_lean_128"), ("matrix_forward", UNIT + "_full_128")
GRADIENTS = ("matrix_backward", UNIT + "_backward_lean_128")
SIMT = [
    ("nothing", *FORWARD, "gpu/tile.cuh", "", ""),
    ("a barrier is missing in a product over channels", *FORWARD, "gpu/tile.cuh",
     "gpu_dots_put(b_part, b.dtype, s.step[turn] + S::ROWS * GPU_CHANNELS);\n            gpu_sync();",
     "gpu_dots_put(b_part, b.dtype, s.step[turn] + S::ROWS * GPU_CHANNELS);"),
    ("a barrier is missing in a product over keys", *FORWARD, "gpu/tile.cuh",
     "gpu_mix_put(part, t.dtype, s.step[turn]);\n            gpu_sync();",
     "gpu_mix_put(part, t.dtype, s.step[turn]);"),
    ("o is not rescaled", *FORWARD, "gpu/simt_forward.cuh", "f.o[m][c] *= alpha;", ""),
    ("keys past the window count", *FORWARD, "gpu/simt_forward.cuh", "&& j < keys.past", ""),
    ("the mask is dropped", *FORWARD, "gpu/pairs.cuh", "&& gpu_masks_keep(g, t, q, j)", ""),
    ("values come from the next key", *FORWARD, "gpu/simt_forward.cuh",
     "gpu_key_at(g, pairs.seq, p.v, pairs.b, job.hk, j0 + n)",
     "gpu_key_at(g, pairs.seq, p.v, pairs.b, job.hk, j0 + n + 1)"),
    ("a channel too many is read", *FORWARD, "gpu/element.cuh", "quad.word[e] = c + e < t.dim ?",
     "quad.word[e] = c + e <= t.dim ?"),
    ("lanes are summed one too far", *FORWARD, "gpu/tile.cuh", "x += gpu_shfl_xor(x, n);",
     "x += gpu_shfl_xor(x, n / 2);"),
    ("nothing", *BACKWARD, "gpu/tile.cuh", "", ""),
    ("delta is forgotten", *BACKWARD, "gpu/simt_backward.cuh", "(z * *dp - row.delta)", "(z * *dp)"),
    ("a barrier is missing behind the job", *BACKWARD, "gpu/simt_backward.cuh",
     "f.rows = f.pairs.seq.sq * group;\n    }\n    gpu_sync();", "f.rows = f.pairs.seq.sq * group;\n    }"),
    ("the scale is forgotten", *BACKWARD, "gpu/simt_backward.cuh", "ds * slope * g.rule.scale", "ds * slope"),
]
MATRIX = [
    ("nothing", *LEAN, "hip/matrix.cuh", "", ""),
    ("a barrier is missing behind the keys", *LEAN, "hip/matrix_forward.cuh",
     "gpu_sync(); /* and everyone is through with the values before */", ""),
    ("a barrier is missing behind the values", *LEAN, "hip/matrix_forward.cuh",
     "gpu_sync(); /* and everyone is through with the keys */", ""),
    ("rows of sums change places", *LEAN, "hip/matrix.cuh",
     "return MATRIX_MFMA ? 4 * group : MATRIX_WMMA == 11 ? group : 8 * group;",
     "return MATRIX_MFMA ? 4 * (1 - group) : MATRIX_WMMA == 11 ? 1 - group : 8 * (1 - group);"),
    ("weights and values are in different orders", *LEAN, "hip/matrix.cuh",
     "8 * (four % GROUPS) + 4 * (four / GROUPS) + i % 4 : i;", "4 * four + i % 4 : i ^ 1;"),
    ("o is not rescaled", *LEAN, "hip/matrix_forward.cuh", "rows.o[t] *= alpha;", ""),
    ("tiles begin a key too late", *LEAN, "hip/matrix_forward.cuh", "t.first + j0 * t.step;",
     "t.first + (j0 + 1) * t.step;"),
    ("keys past the last count", *LEAN, "hip/matrix_terms.cuh", "first <= j && j < past ? score", "first <= j ? score"),
    ("nothing", *FULL, "hip/matrix.cuh", "", ""),
    ("the mask is dropped", *FULL, "hip/matrix_terms.cuh", "mask[rows.mask + key * p.mask_stride[3]] ? score",
     "mask ? score"),
    ("nothing", *GRADIENTS, "hip/matrix.cuh", "", ""),
    ("a barrier is missing before gradients of queries", *GRADIENTS, "hip/matrix_backward.cuh",
     "        gpu_sync();\n        /* (dQ first", "        /* (dQ first"),
    ("a barrier is missing behind a tile", *GRADIENTS, "hip/matrix_backward.cuh",
     "        gpu_sync();\n        now = next;", "        now = next;"),
    ("delta is forgotten", *GRADIENTS, "hip/matrix_backward.cuh", "p * (patch_get(dp[t], e) - delta)",
     "p * patch_get(dp[t], e)"),
    ("keys past the band count", *GRADIENTS, "hip/matrix_backward.cuh", "from <= e & e <= to", "e <= to"),
]
DAMAGES = MATRIX + (SIMT if UNIT == "mfma" else [])


def thin(text):
    """A header with one shape of each list, that of 128 channels, so that few kernels are compiled."""
    def one(shapes):
        return re.search(r" {4}X\(128,[^)]*\)", shapes.group(0)).group(0) + "\n"
    return re.sub(r"( {4}X\(.*\n)+", one, text)


def compiled(folder, image, file, words, other):
    """The code object of an image with a change to one of its sources."""
    for name in ("backends", "core", "include"):
        shutil.copytree(os.path.join(root, name), os.path.join(folder, name))

    def rewrite(name, change):
        path = os.path.join(folder, "backends", name)  # or a whole path
        with open(path, encoding="utf-8") as source:
            text = source.read()
        with open(path, "w", encoding="utf-8") as source:
            source.write(change(text))
        return text
    if rewrite(file, lambda text: text.replace(words, other) if words else text).count(words) != 1 and words:
        return None
    for name in glob.glob(os.path.join(folder, "backends", "hip", "matrix*.h")):
        rewrite(name, thin)
    out = os.path.join(folder, "damaged.co")
    own = [f for f in flags if not f.startswith("-I") and f not in (root, os.path.join(root, "include"))]
    subprocess.run([clang, *own, "-I", folder, "-I", os.path.join(folder, "include"), "-Wno-unused",
                    "--offload-arch=" + processor, os.path.join(folder, "backends", "hip", "kernels", image + ".hip"),
                    "-o", out], check=True)
    return out


def outcome(row, code):
    """Exit status of the check, and its last line."""
    cases = "60" if row.startswith("simt") else "200"  # of which a kernel of one type takes a quarter
    ran = subprocess.run([fattn, "check", "--device", "hip", "--kernel", row, "--cases", cases], capture_output=True,
                         text=True, check=False, env={**os.environ, "STUB_HIP_OBJECT": code, "STUB_HIP_ARCH": processor})
    return ran.returncode, (ran.stdout.strip().split("\n") or [""])[-1]


failures = 0
for number, (title, image, row, file, words, other) in enumerate(DAMAGES, 1):
    with tempfile.TemporaryDirectory() as work:
        code = compiled(os.path.join(work, "tree"), image, file, words, other)
        status, last = outcome(row, code) if code else (-1, f"{file} has no {words!r}, or several")
    good = status == (1 if words else 0)
    failures += not good
    print("ok" if good else "not ok", number, "-", f"{row}: {title}: {last}", flush=True)
print(f"1..{len(DAMAGES)}")
sys.exit(failures != 0)
