# SPDX-License-Identifier: Apache-2.0
"""No stack is executable. One object without a .note.GNU-stack section (an assembler file, an embedded
blob) is enough to make the stack of every program that loads the library so.

usage: execstack.py FILE...     programs, shared libraries, and Meson's folders of objects beside them
"""

import glob
import os
import re
import subprocess
import sys

import tap


def readelf(option, path):
    return subprocess.run(["readelf", option, "--wide", path], capture_output=True, text=True,
                          check=True).stdout


def image(path):
    """Findings for a program or a shared library."""
    header = re.search(r"^\s*GNU_STACK\s.*\s([R ][W ][E ])\s+0x", readelf("--program-headers", path), flags=re.M)
    if header is None:
        return [f"{path}: has no GNU_STACK header, so the system chooses"]
    return [f"{path}: the stack is executable ({header.group(1).strip()})"] if "E" in header.group(1) else []


def object_file(path):
    """Findings for a relocatable object."""
    note = re.search(r"\s\.note\.GNU-stack\s+PROGBITS\s+\S+\s+\S+\s+\S+\s+\S+\s+(\S*X\S*)?",
                     readelf("--section-headers", path))
    if note is None:
        return [f"{path}: has no .note.GNU-stack section"]
    return [f"{path}: asks for an executable stack"] if note.group(1) else []


def objects_of(path):
    """The objects that Meson compiled for the targets in the build folder that path lies in."""
    top = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(os.path.join(top, "meson-info")):
        if top == os.path.dirname(top):
            return []
        top = os.path.dirname(top)
    return sorted(glob.glob(os.path.join(top, "**", "*.p", "*.o"), recursive=True))


def results(paths):
    objects = sorted({o for path in paths for o in objects_of(path)})
    for path in paths:
        yield os.path.basename(path), image(path)
    yield (f"{len(objects)} objects",
           [f for o in objects for f in object_file(o)] if objects else ["found no object"])


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1:])))
