# SPDX-License-Identifier: Apache-2.0
"""Headers of backends/cpu compile alone, as an editor reads them: in plain C without a flag, and with the
vocabulary and the flags of the first instruction set. Vocabularies are read with their own flags only.

usage: alone.py ROOT COMPILER... -- [ISA=FLAGS]...
"""

import os
import re
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


def results(root, compiler, isas):
    names = sorted(n for n in os.listdir(os.path.join(root, FOLDER)) if n.endswith(".h"))
    vocabularies = [n for n in names if vocabulary(n)]
    yield "headers alone", [c for n in names if n not in vocabularies for c in complaints(root, compiler, [], n)]
    for number, isa in enumerate(isas):
        word, flags = isa.split("=", 1)
        flags = flags.split(" ")
        read = [n for n in vocabularies if any(n in f for f in flags)]
        read += [n for n in names if number == 0 and n not in vocabularies]
        yield f"headers as {word}", [c for n in read for c in complaints(root, compiler, flags, n)]


if __name__ == "__main__":
    SPLIT = sys.argv.index("--")
    sys.exit(tap.report(results(sys.argv[1], sys.argv[2:SPLIT], sys.argv[SPLIT + 1:])))
