#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The bound that instruction issue puts on the use of matrix units by the kernels for AMD's processors. Runs a
forward and a backward on the emulated GPU of each processor, follows a wave, and lets emulator/issue.py replay one
iteration of the loop that multiplies matrices. Prints the table of docs/notes/hip.md, an upper bound without
measurements, and fails if a kernel falls below its threshold.

usage: issue_bound.py FATTN OBJDUMP [CODE_OBJECT]...      (of one image and processor each: image.gfx942.co)
"""

import os
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "lint"), os.path.join(HERE, "emulator")]

import code_objects  # noqa: E402
import issue  # noqa: E402
import tap  # noqa: E402

# A wave of the first work-group makes several rounds of its loop, all of whole tiles.
LENGTH, DIM = 512, 128

# What is wanted: the least share of cycles in which matrix units work, by direction and processor.
FLOORS = {("forward", "gfx942"): 0.60}
CONFLICTS = 1.1  # the most cycles of LDS, of those without bank conflicts


@dataclass
class Launch:
    kernel: str
    trace: list      # addresses
    threads: int
    local: int       # bytes of LDS
    conflicts: float


def write_array(path, rng, *shape):
    """Of bf16 bit patterns near 1, both signs."""
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    count = 1
    for n in shape:
        count *= n
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode())
        file.write(struct.pack(f"<{count}H", *(rng.choice((0x3e80, 0xbe80)) + rng.randrange(256) for _ in range(count))))


def traced(fattn, processor, backward):
    """The launches that the library makes for a problem."""
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(1)
        options = []
        for name in ("q", "k", "v", "do")[:4 if backward else 3]:
            write_array(os.path.join(folder, name), rng, 1, LENGTH, 1, DIM)
            options += ["--" + name, os.path.join(folder, name)]
        for name in ("dq", "dk", "dv") if backward else ("o",):
            options += ["--" + name, os.path.join(folder, name)]
        trace = os.path.join(folder, "trace")
        run = subprocess.run([fattn, "run", *options, *(["--backward"] if backward else []), "--dtype", "bf16",
                              "--device", "hip"], capture_output=True, text=True, check=False,
                             env={**os.environ, "STUB_HIP_ARCH": processor, "STUB_HIP_TRACE": trace})
        if run.returncode:
            raise RuntimeError(run.stderr or run.stdout)
        launches = []
        with open(trace, encoding="ascii") as file:
            for line in file:
                word, *rest = line.split()
                if word == "kernel":
                    launches.append(Launch(rest[0], [], 0, 0, 1.0))
                elif word == "end":
                    threads, local, cycles, ideal = map(int, rest)
                    launches[-1].threads, launches[-1].local = threads, local
                    launches[-1].conflicts = cycles / ideal if ideal else 1.0
                else:
                    launches[-1].trace.append(int(word, 16))
        return launches


def rounds(trace, multiplies):
    """Rounds of the loop that runs most matrix instructions, from one of them to itself: lists of addresses.
    Longer ones than most are dropped: an outer loop came between."""
    times = Counter(a for a in trace if a in multiplies)
    shares = Counter()
    for count in times.values():
        shares[count] += count
    usual = shares.most_common(1)[0][0]
    mark = next(a for a in trace if times[a] == usual)
    at = [n for n, a in enumerate(trace) if a == mark]
    pieces = [trace[a:b] for a, b in zip(at, at[1:])]
    length = sorted(map(len, pieces))[len(pieces) // 2] if pieces else 0
    return [p for p in pieces if len(p) <= 1.2 * length]


def estimates(fattn, objdump, processor, paths):
    """(direction, launch, metadata, rounds, Estimate) of each kernel that multiplies matrices."""
    kernels = [(k, path) for path in paths for k in code_objects.metadata(path)]
    code = {}
    seen = set()
    for direction in ("forward", "backward"):
        for launch in traced(fattn, processor, direction == "backward"):
            for kernel, path in kernels:
                if kernel[".name"] == launch.kernel and path not in code:
                    code[path] = {at: text for body in code_objects.disassemble(objdump, path).values() for at, text, _ in body}
            # Images may have kernels of the same name.
            kernel, texts = next(((k, code[path]) for k, path in kernels if k[".name"] == launch.kernel and
                                  all(at in code[path] for at in launch.trace)), (None, {}))
            multiplies = {at for at in launch.trace if kernel and issue.MATRIX.match(texts[at])}
            if not multiplies or launch.kernel in seen:
                continue
            seen.add(launch.kernel)
            # The first round may be of a tile at an edge, and the last.
            pieces = rounds(launch.trace, multiplies)
            whole = pieces[len(pieces) // 3:][:2]
            body = [texts[at] for piece in whole for at in piece]
            if not body:
                raise RuntimeError(f"{launch.kernel} on {processor}: no loop multiplies matrices")
            found = issue.estimate(body, issue.PROCESSORS[processor], kernel[".vgpr_count"], launch.local,
                                   launch.threads, launch.conflicts)
            yield direction, launch, kernel, len(whole), found


HEAD = ("kernel", "processor", "matrix", "vector", "of it slow", "LDS", "reads and writes", "waves",
        "registers", "local memory", "conflicts", "bound", "modelled")


def row(processor, launch, kernel, count, e):
    per = lambda x: f"{x / count:.0f}"
    return (f"`{launch.kernel}`", processor, f"{per(e.matrix)} ({per(e.matrices)})", per(e.vector), per(e.slow), per(e.lds),
            f"{per(e.counts['lds'])} + {per(e.counts['memory'])}", str(e.waves), str(kernel[".vgpr_count"]),
            str(launch.local), f"{launch.conflicts:.2f}", f"{100 * e.ideal:.0f} %", f"{100 * e.modelled:.0f} %")


def findings(direction, processor, launch, kernel, e):
    floor = FLOORS.get((direction, processor), 0)
    if e.ideal < floor:
        yield f"{launch.kernel}: matrix units work {e.ideal:.2f} of the time, less than {floor}"
    if launch.conflicts > CONFLICTS:
        yield f"{launch.kernel}: bank conflicts make LDS take {launch.conflicts:.2f} times as long"
    for what in (".vgpr_spill_count", ".private_segment_fixed_size"):
        if kernel[what]:
            yield f"{launch.kernel}: {what[1:]} is {kernel[what]}"


def results(fattn, objdump, *paths):
    print("# | " + " | ".join(HEAD) + " |")
    print("# |" + "---|" * len(HEAD))
    for processor in issue.PROCESSORS:
        own = [p for p in paths if p.endswith(f".{processor}.co")]
        title = f"loops of matrix products on {processor}"
        if not own:
            yield title, tap.Skip("the library has no code for it")
            continue
        found, complaints = 0, []
        for direction, launch, kernel, count, e in estimates(fattn, objdump, processor, own):
            found += 1
            print("# | " + " | ".join(row(processor, launch, kernel, count, e)) + " |", flush=True)
            complaints += findings(direction, processor, launch, kernel, e)
        yield f"{title}: {found} kernels", complaints if found else tap.Skip("no kernel multiplies matrices")


if __name__ == "__main__":
    sys.exit(tap.report(results(*sys.argv[1:])))
