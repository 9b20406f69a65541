# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries are hardened as the build requested: each requested measure is present in the files.

usage: hardening.py MEASURE... -- FILE...     relro now protector fortify landing
"""

import os
import re
import subprocess
import sys

import execstack
import tap


def readelf(option, path):
    return subprocess.run(["readelf", option, "--wide", path], capture_output=True, text=True,
                          check=True).stdout


# measure: (option of readelf, what must be there, what is missing otherwise)
MEASURES = {
    "relro": ("--program-headers", r"^\s*GNU_RELRO\b", "no GNU_RELRO segment"),
    "now": ("--dynamic", r"\(FLAGS(_1)?\).*\b(BIND_)?NOW\b", "symbols are bound late, so that their table stays writable"),
    "protector": ("--dyn-syms", r"\b__stack_chk_(fail|guard)\b", "no function has a canary"),
    "fortify": ("--dyn-syms", r"\b__\w+_chk\b(?<!__stack_chk)", "no call is checked"),
}

# Of objects: the C library's own may lack it, and then no linked file has it.
LANDING = ("--notes", r"\bIBT\b.*\bSHSTK\b", "indirect calls and returns land anywhere")


def lacks(measure, path, read=readelf):
    option, pattern, missing = measure
    return [] if re.search(pattern, read(option, path), re.M) else [f"{path}: {missing}"]


def results(arguments):
    split = arguments.index("--")
    for path in arguments[split + 1:]:
        for name in arguments[:split]:
            if name in MEASURES:
                yield f"{os.path.basename(path)}: {name}", lacks(MEASURES[name], path)
    if "landing" in arguments[:split]:
        objects = sorted({o for path in arguments[split + 1:] for o in execstack.objects_of(path)})
        yield (f"{len(objects)} objects: landing",
               [f for o in objects for f in lacks(LANDING, o)] if objects else ["found no object"])
    if split == 0:
        yield "hardening", tap.Skip("this compiler has none of it")


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1:])))
