#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Which of several runtimes backend hip opens: the newest one that has all of its functions.

usage: hip_libraries.py FATTN STUB

STUB is the runtime of stub/hip, which here is a libamdhip64.so.6. The C library stands for one that does not fit.
"""

import os
import re
import subprocess
import sys
import tempfile

import checks


def info(fattn, folder):
    """What `fattn info` says of backend hip."""
    path = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    ran = subprocess.run([fattn, "info"], env={**os.environ, "LD_LIBRARY_PATH": path, "FATTN_VERBOSE": "1"},
                         capture_output=True, text=True, check=False)
    return "\n".join(line for line in (ran.stdout + ran.stderr).splitlines() if "hip" in line)


def main(fattn, stub):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        other = re.search(r"\S+/libc[-.]\S+", maps.read())[0]
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(stub, os.path.join(folder, "libamdhip64.so.6"))
        said = info(fattn, folder)
        if "hipErrorNotInitialized" in said:
            return checks.skip_all("this processor cannot run the emulator")
        checks.ok("hip:0" in said, f"the newest is absent: {said}")
        os.symlink(other, os.path.join(folder, "libamdhip64.so.7"))
        said = info(fattn, folder)
        checks.ok("hip:0" in said, f"the newest does not fit: {said}")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(*map(os.path.abspath, sys.argv[1:])))
