#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""AMD's own runtime on a machine without an AMD GPU: backend hip loads it, calls it, and reports that there is
no device. Without a runtime, such as Debian's libamdhip64-5, it reports that. Skipped if there is a device.

usage: amd_runtime.py FATTN
"""

import re
import subprocess
import sys

import checks

FIND = """
import ctypes, sys
for name in ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"):
    try:
        hip = ctypes.CDLL(name)
    except OSError:
        continue
    count = ctypes.c_int(0)
    status = hip.hipInit(0) or hip.hipGetDeviceCount(ctypes.byref(count))
    print(name, count.value if status == 0 else 0)
    break
"""


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def reason_to_skip(fattn):
    """The reason to skip, or None; and the runtime's name."""
    if not re.search(r"^device +hip", run(fattn, "info").stdout, re.M):
        return "this build has no backend hip", ""
    found = run(sys.executable, "-c", FIND).stdout.split()
    if not found:
        return None, ""
    return ("there is an AMD GPU" if found[1] != "0" else None), found[0]


def results_without(fattn):
    check = run(fattn, "check", "--device", "hip", "--cases", "1")
    said = check.stderr.strip()
    yield check.returncode == 3 and "no runtime: libamdhip64.so.7:" in said, f"check names the newest runtime: {said}"


def results(fattn, library):
    info = run(fattn, "info")
    yield info.returncode == 0 and "hip: none present" in info.stdout, f"info sees no device through {library}"
    check = run(fattn, "check", "--device", "hip", "--cases", "1")
    said = check.stderr.strip()
    yield check.returncode == 3 and "FATTN_NO_DEVICE" in said and "no runtime" not in said, f"check: {said}"
    check = run(fattn, "check", "--device", "cpu", "--cases", "20")
    yield check.returncode == 0, "the CPU is as it was"


def main(fattn):
    why, library = reason_to_skip(fattn)
    if why:
        return checks.skip_all(why)
    for good, title in results(fattn, library) if library else results_without(fattn):
        checks.ok(good, title)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
