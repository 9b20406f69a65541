#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""For each processor, the functions that kernel rows of backend hip launch are those of the images in the library,
with as many threads a block as they were compiled for. A function that is missing would be found when a plan is made.

usage: hip_entries.py PROGRAM CODE_OBJECT...

PROGRAM is hip_entries, and a code object IMAGE.PROCESSOR.co.
"""

import os
import subprocess
import sys

import checks

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lint"))
import code_objects  # noqa: E402


def main(program, *paths):
    compiled = {}  # (processor, image): {function: threads}
    for path in paths:
        image, processor, _ = os.path.basename(path).rsplit(".", 2)
        compiled[processor, image] = {kernel[".name"]: kernel[".max_flat_workgroup_size"]
                                      for kernel in code_objects.metadata(path)}
    processors = sorted({processor for processor, _ in compiled})
    ran = subprocess.run([program, *processors], capture_output=True, text=True, check=False)
    checks.ok(ran.returncode == 0, f"every row has plans {ran.stderr.strip()}")
    launched = {}
    for line in ran.stdout.splitlines():
        processor, image, function, threads = line.split()
        launched.setdefault((processor, image), {})[function] = int(threads)
    for (processor, image), functions in sorted(compiled.items()):
        wanted = launched.get((processor, image), {})
        if image == "verbs":  # which no row launches
            continue
        wrong = [f"{name} is not compiled" for name in sorted(wanted.keys() - functions.keys())]
        wrong += [f"nothing launches {name}" for name in sorted(functions.keys() - wanted.keys())]
        wrong += [f"{name} has {functions[name]} threads, and is launched with {wanted[name]}"
                  for name in sorted(wanted.keys() & functions.keys()) if wanted[name] != functions[name]]
        checks.ok(not wrong, f"{len(functions)} functions of {image} for {processor}: {wrong or 'all are launched'}")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
