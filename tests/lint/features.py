# SPDX-License-Identifier: Apache-2.0
"""The table of features in docs/DESIGN.md is what the table in core/feature.c and the kernel rows say, and sets of
features that host and device code each have to write for themselves are the same.

usage: features.py ROOT [--write]

--write puts the table there.
"""

import os
import re
import sys

import rooms
import tap

DOCUMENT = "docs/DESIGN.md"
HEADING = "| feature | option of `fattn run` | `reference` | `cpu` | GPUs: SIMT | matrix units, full | lean |"

# Where sets of features have names, and the expressions of the columns.
SETS = ("core/kernel.h", "backends/gpu/gpu.h", "backends/cpu/cpu.h")
COLUMNS = ("FATTN_KERNEL_LAST | FATTN_SEQSTART_K | FATTN_ALIBI_BIAS", "FATTN_CPU_FEATURES", "FATTN_KERNEL_LAST",
           "FATTN_KERNEL_COMMON", "FATTN_GPU_LEAN | FATTN_GPU_BACKWARD_LEAN")

# A question about a problem's features, in C for the host and in C++ for the device.
TWINS = (("backends/cuda/wgmma.c", "fattn_wgmma_sequences_differ"), ("backends/gpu/sequence.cuh", "gpu_sequences_differ"))


def features(root):
    """(constant, option) of each row of the feature table, in the order of the bits."""
    code = rooms.without_comments(tap.read(root, "core/feature.c"))
    found = list(re.finditer(r'\{NAMES\((FATTN_\w+), "\w+"\)', code))
    ends = [match.start() for match in found[1:]] + [len(code)]
    for match, end in zip(found, ends):
        option = re.search(r'\.option = "([^"]+)"', code[match.end():end])
        yield match[1], option[1] if option else None


def sets(root, bits):
    """name: bits of each set of features that has a name."""
    values = dict(bits)
    for path in SETS:
        code = rooms.without_comments(tap.read(root, path)).replace("\\\n", " ")
        for name, text in re.findall(r"^#define (FATTN_\w+)[ \t]+(\([^\n]*\))[ \t]*$", code, re.M):
            if set(re.findall(r"[A-Z]\w+", text)) <= set(values):
                values[name] = eval(text, {}, values)  # | & ~ and brackets mean the same in Python
    return values


def expected(root):
    """The lines of the table."""
    rows = list(features(root))
    values = sets(root, {name: 1 << bit for bit, (name, _) in enumerate(rows)})
    backward = ~values["FATTN_KERNEL_NOT_BACKWARD"]
    yield HEADING
    yield "|---" * (HEADING.count("|") - 1) + "|"
    for name, option in rows:
        bit, cells = values[name], []
        for column in COLUMNS:
            has = eval(column, {}, values) & bit
            cells.append("-" if not has else "yes" if backward & bit else "forward")
        option = f"`--{option}`" if option else ""
        yield f"| `{name}` | {option} | " + " | ".join(cells) + " |"


def check(root):
    lines, wanted = tap.read(root, DOCUMENT).split("\n"), list(expected(root))
    if HEADING not in lines:
        return [f"{DOCUMENT}: has no table of features"]
    at = lines.index(HEADING)
    return [f"{DOCUMENT}:{at + n + 1}: {lines[at + n:at + n + 1]}, not {line}"
            for n, line in enumerate(wanted) if lines[at + n:at + n + 1] != [line]]


def asked(root, path, name):
    """The features that a function asks for."""
    body = re.search(r"\b" + name + r"\(const fattn_problem [*&]p\)\s*\{\s*return p(?:->|\.)features & \(([\w\s|]+)\);",
                     rooms.without_comments(tap.read(root, path)))
    return set(re.findall(r"\w+", body[1])) if body else set()


def check_twins(root):
    (path, name), (other, twin) = TWINS
    ours, theirs = asked(root, path, name), asked(root, other, twin)
    if not ours or not theirs:
        yield f"{path}, {other}: {name}() and {twin}() are not found"
    for word in sorted(ours ^ theirs):
        yield f"{path if word in ours else other}: {word} is in {name if word in ours else twin}() alone"


def write(root):
    text = tap.read(root, DOCUMENT)
    table = re.compile(re.escape(HEADING) + r"\n(\|.*\n)+")
    with open(os.path.join(root, DOCUMENT), "w", encoding="utf-8") as file:
        file.write(table.sub(lambda _: "\n".join(expected(root)) + "\n", text))


if __name__ == "__main__":
    if sys.argv[2:] == ["--write"]:
        write(sys.argv[1])
    sys.exit(tap.report([("the table of features is true", check(sys.argv[1])),
                         ("host and device agree on which sequences differ", check_twins(sys.argv[1]))]))
