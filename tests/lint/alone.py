# SPDX-License-Identifier: Apache-2.0
"""Headers of backends/cpu compile alone, as an editor reads them: in plain C without a flag, and with the
vocabulary and the flags of the first instruction set; those about pairs only if it has them. Vocabularies are read
with their own flags only, and those of another processor with clang and what .clangd says of them.

usage: alone.py ROOT COMPILER... -- [ISA=FLAGS]...
"""

import os
import re
import shutil
import subprocess
import sys

import tap

FOLDER = "backends/cpu"


def vocabulary(name):
    return re.fullmatch(r"vec_(?!math|scalar).*\.h", name) is not None


def complaints(root, compiler, flags, name):
    """What the compiler says of a header that it is given as a source."""
    done = subprocess.run(
        compiler + ["-fsyntax-only", "-x", "c", "-std=c11", "-Wall", "-Wundef", "-Wno-unused", "-Werror",
                    "-I", root, "-I", os.path.join(root, "include"), *flags, f"{FOLDER}/{name}"],
        cwd=root, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    first = re.search(r"^\S+?:\d+.*error: .*", done.stderr, re.M)
    return [f"{FOLDER}/{name} alone: " + (first[0] if first else "the compiler failed")]


def foreign(root):
    """(name, flags) of headers that .clangd has parsed for a processor of its own."""
    names = sorted(os.listdir(os.path.join(root, FOLDER)))
    for fragment in tap.read(root, ".clangd").split("\n---\n"):
        path = re.search(r"^  PathMatch: (.*)$", fragment, re.M)
        added = re.search(r"^  Add: \[(.*)\]$", fragment, re.M)
        if path and added and "--target=" in added[1]:
            yield from ((n, added[1].split(", ")) for n in names if re.fullmatch(path[1], f"{FOLDER}/{n}"))


def as_an_editor(root):
    """What clang says of those headers, or why it is not asked."""
    clang = next((c for c in ("clang-14", "clang-22", "clang") if shutil.which(c)), None)
    if clang is None:
        return tap.Skip("no clang")
    found = list(foreign(root))
    missing = {f[len("-isystem"):] for _, flags in found for f in flags if f.startswith("-isystem")}
    missing = sorted(folder for folder in missing if not os.path.isdir(folder))
    if missing:
        return tap.Skip(f"no {missing[0]}")
    if not found:
        return [".clangd: names no header of another processor"]
    return [c for n, flags in found for c in complaints(root, [clang], flags, n)]


def results(root, compiler, isas):
    names = sorted(n for n in os.listdir(os.path.join(root, FOLDER)) if n.endswith(".h"))
    vocabularies = [n for n in names if vocabulary(n)]
    yield "headers alone", [c for n in names if n not in vocabularies for c in complaints(root, compiler, [], n)]
    for number, isa in enumerate(isas):
        word, flags = isa.split("=", 1)
        flags = flags.split(" ")
        read = [n for n in vocabularies if any(n in f for f in flags)]
        has_pairs = word == "amx" or word.endswith("bf16")
        read += [n for n in names if number == 0 and n not in vocabularies and (has_pairs or "pair" not in n)]
        yield f"headers as {word}", [c for n in read for c in complaints(root, compiler, flags, n)]


if __name__ == "__main__":
    SPLIT = sys.argv.index("--")
    sys.exit(tap.report([*results(sys.argv[1], sys.argv[2:SPLIT], sys.argv[SPLIT + 1:]),
                         ("headers of other processors as .clangd has it", as_an_editor(sys.argv[1]))]))
