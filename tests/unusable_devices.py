#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The tool on a machine with unusable GPUs: those of the stub driver (stub/), the first of which are too old for the
code of this build. Run with the stub's folder in LD_LIBRARY_PATH.

    unusable_devices.py FATTN
"""

import json
import os
import subprocess
import sys

import checks
from checks import ok


def start(tool, old, *words, **environment):
    """Runs the tool with this many of the stub's two devices too old."""
    variables = {**os.environ, "STUB_CUDA_OLD": str(old), **environment}
    return subprocess.run([tool, *words], env=variables, capture_output=True, text=True, check=False)


def test_info(tool, old):
    ran = start(tool, old, "info")
    lines = [line for line in ran.stdout.splitlines() if line.startswith("device ")]
    usable = [n for n, line in enumerate(lines) if "cannot be used" not in line and "none present" not in line]
    ok(ran.returncode == 0 and usable == list(range(len(usable))), f"{old} too old: info prints usable devices first")
    refused = [line for line in lines if "cannot be used" in line]
    ok(len(refused) == old and all("no code for a device of version 5.2" in line for line in refused),
       f"{old} too old: info says of {len(refused)} devices why they cannot be used")
    cuda, = (b for b in json.loads(start(tool, old, "info", "--json").stdout)["backends"] if b["name"] == "cuda")
    ok([d["ordinal"] for d in cuda["unusable"]] == list(range(old)) and
       [d["ordinal"] for d in cuda["devices"]] == list(range(old, 2)), f"{old} too old: info --json tells them apart")


def test_auto(tool):
    ran = start(tool, 2, "check", "--cases", "5", FATTN_VERBOSE="1")
    ok(ran.returncode == 0, "check runs where no GPU can be used")
    ran = start(tool, 2, "check", "--device", "cuda", "--cases", "5")
    ok(ran.returncode == 3 and "FATTN_UNSUPPORTED" in ran.stderr, "check --device cuda fails there")
    ran = start(tool, 2, "explain", FATTN_VERBOSE="1")
    ok(ran.returncode == 0 and ran.stderr.count("auto skips cuda:") == 2, "explain takes the CPU, and says why")


def test_nothing(tool):
    ran = start(tool, 0, "info", FATTN_VERBOSE="much")
    ok(ran.returncode == 2 and "FATTN_VERBOSE" in ran.stderr, "info fails where the environment is wrong")


def main(tool):
    for old in range(3):
        test_info(tool, old)
    test_auto(tool)
    test_nothing(tool)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
