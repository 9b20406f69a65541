#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Every damage to a kernel for AMD's processors is detected: the script breaks a line of the source, recompiles the
kernel, and `fattn check` on the emulated GPU must fail, though it passes with the original source.

usage: damaged_kernels.py FATTN CLANG PROCESSOR [FLAG]...
       damaged_kernels.py --texts PROCESSOR            whether each line to be broken is in its source, once
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

only_texts = sys.argv[1] == "--texts"
fattn, clang, processor, *flags = ["", "", *sys.argv[2:]] if only_texts else sys.argv[1:]
fattn = os.path.abspath(fattn)
root = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

# The fault, image, kernel row, file of backends/, the text that is replaced, and its replacement.
FORWARD, BACKWARD = ("simt_forward", "simt_forward"), ("simt_backward", "simt_backward")
UNIT = "wmma" if processor.startswith("gfx1") else "mfma"
LEAN, FULL = ("matrix_forward", UNIT + "_lean_128"), ("matrix_forward", UNIT + "_full_128")
GRADIENTS = ("matrix_backward", UNIT + "_backward_lean_128")
GRADIENTS_FULL = ("matrix_backward", UNIT + "_backward_full_128")
SIMT = [
    ("nothing", *FORWARD, "gpu/tile.cuh", "", ""),
    ("a barrier is missing in a product over channels", *FORWARD, "gpu/tile.cuh",
     "gpu_dots_put(b_part, b, s.step[stage] + S::ROWS * GPU_CHANNELS);\n            gpu_sync();",
     "gpu_dots_put(b_part, b, s.step[stage] + S::ROWS * GPU_CHANNELS);"),
    ("a barrier is missing in a product over keys", *FORWARD, "gpu/tile.cuh",
     "gpu_mix_put(part, t, s.step[stage]);\n            gpu_sync();",
     "gpu_mix_put(part, t, s.step[stage]);"),
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
    ("the scale is forgotten", *BACKWARD, "gpu/simt_backward.cuh", "ds * dscore * g.rule.scale", "ds * dscore"),
]
ROWS_OF_SUMS = ("return MATRIX_MFMA ? 4 * group : MATRIX_WMMA == 11 ? group : 8 * group;",
                "return MATRIX_MFMA ? 4 * (1 - group) : MATRIX_WMMA == 11 ? 1 - group : 8 * (1 - group);")
ROWS_OF_PATCHES = (("8 * (m >> 2) + (m & 3)", "8 * (3 - (m >> 2)) + (m & 3)") if UNIT == "mfma" else
                   ("8 * (m & 1) + (m >> 1)", "8 * (1 - (m & 1)) + (m >> 1)"))
MATRIX = [
    ("nothing", *LEAN, "hip/matrix.cuh", "", ""),
    ("a barrier is missing behind the keys", *LEAN, "hip/matrix_forward.cuh",
     "gpu_sync(); /* the keys are stored, and all threads have read the values of the last tile */", ""),
    ("a barrier is missing behind the values", *LEAN, "hip/matrix_forward.cuh",
     "gpu_sync(); /* the values are stored, and all threads have read the keys */", ""),
    ("rows of sums change places", *LEAN, "hip/matrix.cuh", *ROWS_OF_SUMS),
    ("weights and values are in different orders", *LEAN, "hip/matrix.cuh",
     "8 * (four % GROUPS) + 4 * (four / GROUPS) + i % 4 : i;", "4 * four + i % 4 : i ^ 1;"),
    ("o is not rescaled", *LEAN, "hip/matrix_forward.cuh", "rows.o[t] *= alpha;", ""),
    ("tiles begin a key too late", *LEAN, "hip/matrix_forward.cuh", "t.first + j0 * t.step;",
     "t.first + (j0 + 1) * t.step;"),
    ("keys past the last count", *LEAN, "hip/matrix_terms.cuh", "first <= j && j < past ? score", "first <= j ? score"),
    ("nothing", *FULL, "hip/matrix.cuh", "", ""),
    ("the mask is dropped", *FULL, "hip/matrix_terms.cuh", "mask[rows.mask + key * p.mask_stride[3]] ? score",
     "mask ? score"),
    ("rows of sums change places", *FULL, "hip/matrix.cuh", *ROWS_OF_SUMS),
    ("o is not rescaled", *FULL, "hip/matrix_forward.cuh", "rows.o[t] *= alpha;", ""),
    ("a barrier is missing behind the values", *FULL, "hip/matrix_forward.cuh",
     "gpu_sync(); /* the values are stored, and all threads have read the keys */", ""),
    ("a bias is the next key's", *FULL, "hip/matrix_terms.cuh",
     "bias(rows.bias + key * stride))", "bias(rows.bias + (key + 1) * stride))"),
    ("dropout is another key's", *FULL, "hip/matrix_terms.cuh", "t.seq.k_position + j) != 0", "t.seq.k_position + j + 1) != 0"),
]
# Code that both kinds of kernels share.
BACKWARD_SHARED = [
    ("a barrier is missing before gradients of queries", "hip/matrix_backward.cuh",
     "        gpu_sync();\n        /* dQ comes first", "        /* dQ comes first"),
    ("a barrier is missing behind a tile", "hip/matrix_backward.cuh",
     "        gpu_sync();\n        now = next;", "        now = next;"),
    ("rows of patches change places", "hip/patch.cuh", *ROWS_OF_PATCHES),
    ("halves of dS change places", "hip/patch.cuh", "& 1 ? 0x03020706 : 0x05040100", "& 1 ? 0x05040100 : 0x03020706"),
    ("queries are a row further on", "hip/matrix_backward.cuh", "p.q.head + i0 * p.q.seq;",
     "p.q.head + (i0 + 1) * p.q.seq;"),
    ("lse and delta are a row further on", "hip/matrix_backward.cuh", "visit.head * p.total_q + i0;\n    t.by_quads",
     "visit.head * p.total_q + i0 + 1;\n    t.by_quads"),
    ("values come from the next key", "hip/matrix_backward.cuh", "gpu_key_at(g, seq, p.v, job.b, job.hk, job.j0);",
     "gpu_key_at(g, seq, p.v, job.b, job.hk, job.j0 + 1);"),
    ("gradients of keys are not scaled", "hip/matrix_backward.cuh", "fmaf(sum, factor, x[e])", "x[e] + sum"),
]
BACKWARD_OWN = [
    (GRADIENTS, "probabilities are not divided by their sum", "hip/matrix_backward.cuh", "job.unit, -lse[e / 4][e % 4])", "job.unit, 0)"),
    (GRADIENTS, "delta is forgotten", "hip/matrix_backward.cuh", "p * (patch_get(dp[t], e) - delta[e / 4][e % 4])",
     "p * patch_get(dp[t], e)"),
    (GRADIENTS, "keys past the band count", "hip/matrix_backward.cuh", "from <= e & e <= to", "e <= to"),
    (GRADIENTS_FULL, "probabilities are not divided by their sum", "hip/matrix_backward.cuh", "g.rule.unit, -s.lse()[r])",
     "g.rule.unit, 0)"),
    (GRADIENTS_FULL, "delta is forgotten", "hip/matrix_backward.cuh", "(z * *dp - s.delta()[r])", "(z * *dp)"),
    (GRADIENTS_FULL, "keys past the band count", "gpu/pairs.cuh", "&& j < keys.past && gpu", "&& gpu"),
    (GRADIENTS_FULL, "the mask is dropped", "gpu/pairs.cuh", "&& gpu_masks_keep(g, t, q, j)", ""),
    (GRADIENTS_FULL, "dropout is forgotten", "hip/matrix_backward.cuh", "*x = p * (z != 0 ? 1 : 0);", "*x = p;"),
    (GRADIENTS_FULL, "the slope of the cap is forgotten", "hip/matrix_backward.cuh", "*dp = ds * dscore;", "*dp = ds;"),
    (GRADIENTS_FULL, "gradients of the bias are the next key's", "hip/matrix_backward.cuh",
     "matrix_store_dbias(g, t, q, j, ds);", "matrix_store_dbias(g, t, q, j + 1, ds);"),
]
for kind in (GRADIENTS, GRADIENTS_FULL):
    MATRIX.append(("nothing", *kind, "hip/matrix.cuh", "", ""))
    MATRIX += [(title, *kind, *change) for title, *change in BACKWARD_SHARED]
    MATRIX += [(title, *kind, *change) for own, title, *change in BACKWARD_OWN if own == kind]
DAMAGES = MATRIX + (SIMT if UNIT == "mfma" else [])


def thin(text):
    """A header with only the shape for 128 channels of each list, so that few kernels are compiled."""
    def one(shapes):
        return re.search(r" {4}X\(128,[^)]*\)", shapes.group(0)).group(0) + "\n"
    return re.sub(r"( {4}X\(.*\n)+", one, text)


def alone(text, row):
    """The entries of an image, without the row's other variant."""
    other = "full" if "_lean_" in row else "lean"
    return re.sub(rf"MATRIX_ENTRY\(matrix_(backward_)?{other}_[^\n\\]*", "", text)


def compiled(folder, image, row, file, words, other):
    """The code object of an image, with one of its sources changed."""
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
    rewrite(f"hip/kernels/{image}.hip", lambda text: alone(text, row))
    out = os.path.join(folder, "damaged.co")
    own = [f for f in flags if not f.startswith("-I") and f not in (root, os.path.join(root, "include"))]
    subprocess.run([clang, *own, "-I", folder, "-I", os.path.join(folder, "include"), "-w",
                    "--offload-arch=" + processor, os.path.join(folder, "backends", "hip", "kernels", image + ".hip"),
                    "-o", out], check=True)
    return out


def outcome(row, code):
    """Exit status of the check, and its last line."""
    # One dtype is drawn a quarter of the time, and a single feature rarely.
    cases = "60" if row.startswith("simt") else "600" if "_backward_full_" in row else "200"
    ran = subprocess.run([fattn, "check", "--device", "hip", "--kernel", row, "--cases", cases], capture_output=True,
                         text=True, check=False, env={**os.environ, "STUB_HIP_OBJECT": code, "STUB_HIP_ARCH": processor})
    return ran.returncode, (ran.stdout.strip().split("\n") or [""])[-1]


def lost_texts():
    """Prints the lines to be broken that are not in their source, or are there several times. Returns how many."""
    lost = 0
    for title, _, _, file, words, _ in DAMAGES:
        with open(os.path.join(root, "backends", file), encoding="utf-8") as source:
            if words and source.read().count(words) != 1:
                print(f"# {title}: {file} has no {words!r}, or several")
                lost += 1
    return lost


if only_texts:
    lost = lost_texts()
    print("not ok" if lost else "ok", "1 -", f"{len(DAMAGES)} lines to be broken are in the kernels' sources")
    print("1..1")
    sys.exit(lost != 0)
failures = 0
for number, (title, image, row, file, words, other) in enumerate(DAMAGES, 1):
    with tempfile.TemporaryDirectory() as work:
        code = compiled(os.path.join(work, "tree"), image, row, file, words, other)
        status, last = outcome(row, code) if code else (-1, f"{file} has no {words!r}, or several")
    good = status == (1 if words else 0)
    failures += not good
    print("ok" if good else "not ok", number, "-", f"{row}: {title}: {last}", flush=True)
print(f"1..{len(DAMAGES)}")
sys.exit(failures != 0)
