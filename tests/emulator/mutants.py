# SPDX-License-Identifier: Apache-2.0
"""The emulator's tests fail if the machine code is wrong: a barrier removed, an offset off by one, inactive lanes
active, rows and columns exchanged, a sum omitted.

usage: mutants.py CHECK_EMULATOR CHECK_LAYER CHECK_MATRIX [OBJDUMP CODE_OBJECT ...]
"""

import os
import re
import subprocess
import sys
import tempfile

import mutate

# (title, kernel, pattern, replacement, which match, the check that must fail)
PROGRAMS = [
    ("a barrier removed", "sum_whole", r"s_barrier( *|_wait .*)", "s_nop 0", 2, "sums through LDS"),
    ("a store one element on", "saxpy", r"(global_store_\w+ .*, off)", r"\1 offset:4", 1, "saxpy"),
    ("a load one element on", "reverse", r"(ds_(?:read|load)_b32 .*)", r"\1 offset:4", 1, "LDS of"),
    ("lanes that should rest", "saxpy", r"s_and_saveexec_b64 (.*), vcc|v_cmpx_gt_i64.*", "s_nop 0", 1, "saxpy"),
    ("a sum forgotten", "saxpy", r"v_fmac_f32(.*)", r"v_mul_f32\1", 1, "saxpy"),
    ("a quotient not mended", "divide", r"v_div_fixup_f32 (.*), (.*), (.*), (.*)", r"v_mov_b32 \1, \2", 1,
     "divisions"),
    ("an atomic on another element", "counts", r"(ds_add_u32 .*)", r"\1 offset:4", 1, "atomics"),
]
LAYERS = [
    ("a chunk of another place", "f16_16", r"(ds_(?:read|load)_b128 (?!.*offset).*)", r"\1 offset:16", 1, "f16_16, "),
]
MATRICES = [
    ("rows and columns exchanged", "f16_16x16x16", r"(v_\w*m[fm][m]?a_\S+ \S+), (\S+), (\S+), (\S+)",
     r"\1, \3, \2, \4", 1, "f16_16x16x16, "),
    ("a product forgotten", "bf16_16x16x16", r"v_\w*m[fm][m]?a_.*", "s_nop 0", 1, "bf16_16x16x16, "),
]


def failures(program, objdump, code_object):
    """The lines of the checks that failed; None when the program did not end as tests do."""
    run = subprocess.run([program, objdump, code_object], capture_output=True, text=True, check=False)
    return re.findall(r"^not ok \d+ - (.*)", run.stdout, re.M) if re.search(r"^1\.\.", run.stdout, re.M) else None


def results(emulator, layer, matrix, objdump, objects):
    for code_object in objects:
        name = os.path.basename(code_object)
        program, mutations = {
            "programs": (emulator, PROGRAMS), "layer": (layer, LAYERS), "matrix": (matrix, MATRICES),
        }.get(re.split(r"[._]", name)[0], (None, []))
        for title, kernel, pattern, replacement, number, check in mutations:
            with tempfile.TemporaryDirectory() as folder:
                liar = os.path.join(folder, "objdump")
                mutate.script(liar, objdump, kernel, pattern, replacement, number)
                failed = failures(program, liar, code_object)
            caught = failed is not None and any(check in line for line in failed)
            yield caught, f"{name}: {title}: {failed[0] if failed else failed}"


def main(emulator, layer, matrix, objdump=None, *objects):
    if objdump is None:
        print("ok 1 - mutants # SKIP no LLVM that compiles and disassembles for AMD GPUs\n1..1")
        return 0
    count, wrong = 0, 0
    for count, (caught, title) in enumerate(results(emulator, layer, matrix, objdump, objects), 1):
        wrong += not caught
        print("ok" if caught else "not ok", count, "-", title.replace("#", ""))
    print(f"1..{count}")
    return int(wrong > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
