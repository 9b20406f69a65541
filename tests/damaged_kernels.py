#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Each damage to a kernel for AMD's processors is found: a line of the source is broken, the kernel compiled
again, and `fattn check` on the emulated GPU must fail where it passes with the source as it is.

usage: damaged_kernels.py FATTN CLANG PROCESSOR [FLAG]...
"""
import os
import shutil
import subprocess
import sys
import tempfile

fattn, clang, processor, *flags = sys.argv[1:]
fattn = os.path.abspath(fattn)
root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

# What is wrong, image, kernel row, file, the words that are replaced, and by what.
FORWARD, BACKWARD = ("simt_forward", "simt_forward"), ("simt_backward", "simt_backward")
DAMAGES = [
    ("nothing", *FORWARD, "tile.cuh", "", ""),
    ("a barrier is missing in a product over channels", *FORWARD, "tile.cuh",
     "gpu_dots_put(b_part, b.dtype, s.step[turn] + S::ROWS * GPU_CHANNELS);\n            gpu_sync();",
     "gpu_dots_put(b_part, b.dtype, s.step[turn] + S::ROWS * GPU_CHANNELS);"),
    ("a barrier is missing in a product over keys", *FORWARD, "tile.cuh",
     "gpu_mix_put(part, t.dtype, s.step[turn]);\n            gpu_sync();",
     "gpu_mix_put(part, t.dtype, s.step[turn]);"),
    ("o is not rescaled", *FORWARD, "simt_forward.cuh", "f.o[m][c] *= alpha;", ""),
    ("keys past the window count", *FORWARD, "pairs.cuh", "&& j < keys.past", ""),
    ("the mask is dropped", *FORWARD, "pairs.cuh", "&& gpu_masks_keep(g, t, q, j)", ""),
    ("values come from the next key", *FORWARD, "simt_forward.cuh",
     "gpu_key_at(g, f.pairs.seq, p.v, f.pairs.b, f.hk, j0 + n)",
     "gpu_key_at(g, f.pairs.seq, p.v, f.pairs.b, f.hk, j0 + n + 1)"),
    ("a channel too many is read", *FORWARD, "element.cuh", "quad.word[e] = c + e < t.dim ?",
     "quad.word[e] = c + e <= t.dim ?"),
    ("lanes are summed one too far", *FORWARD, "tile.cuh", "x += gpu_shfl_xor(x, n);", "x += gpu_shfl_xor(x, n / 2);"),
    ("nothing", *BACKWARD, "tile.cuh", "", ""),
    ("delta is forgotten", *BACKWARD, "simt_backward.cuh", "(z * *dp - row.delta)", "(z * *dp)"),
    ("a barrier is missing behind the job", *BACKWARD, "simt_backward.cuh",
     "f.rows = f.pairs.seq.sq * group;\n    }\n    gpu_sync();", "f.rows = f.pairs.seq.sq * group;\n    }"),
    ("the scale is forgotten", *BACKWARD, "simt_backward.cuh", "ds * slope * g.rule.scale", "ds * slope"),
]


def compiled(folder, image, file, words, other):
    """The code object of an image with a change to one of its sources."""
    for name in ("backends", "core", "include"):
        shutil.copytree(os.path.join(root, name), os.path.join(folder, name))
    path = os.path.join(folder, "backends", "gpu", file)
    with open(path, encoding="utf-8") as source:
        text = source.read()
    if text.count(words) != 1 and words:
        return None
    with open(path, "w", encoding="utf-8") as source:
        source.write(text.replace(words, other) if words else text)
    out = os.path.join(folder, "damaged.co")
    own = [f for f in flags if not f.startswith("-I") and f not in (root, os.path.join(root, "include"))]
    subprocess.run([clang, *own, "-I", folder, "-I", os.path.join(folder, "include"), "-Wno-unused",
                    "--offload-arch=" + processor, os.path.join(folder, "backends", "hip", "kernels", image + ".hip"),
                    "-o", out], check=True)
    return out


def outcome(row, code):
    """Exit status of the check, and its last line."""
    ran = subprocess.run([fattn, "check", "--device", "hip", "--kernel", row, "--cases", "60"], capture_output=True,
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
