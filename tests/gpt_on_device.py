#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""examples/gpt.c gives the same losses on another device as on the CPU.

usage: gpt_on_device.py GPT BACKEND
"""
import os
import re
import subprocess
import sys

import checks

gpt, backend = sys.argv[1:]
licence = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "LICENSE")
small = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "80", "--batch", "2", "--steps", "4",
         "--every", "1", "--sample", "0"]


def losses(device):
    """The losses of a run, or None if there is no such device."""
    ran = subprocess.run([gpt, *small, licence], capture_output=True, check=False,
                         env={**os.environ, "FATTN_BACKEND": device, "OMP_NUM_THREADS": "2"})
    if ran.returncode == 3 and b"hipErrorNotInitialized" in ran.stderr:
        return None
    found = [float(loss) for loss in re.findall(rb"^ *\d+ +(\d+\.\d{6}) ", ran.stdout, re.M)]
    print("#", device, found, " ".join(ran.stderr.decode().split("\n")), flush=True)
    return found


there = losses(backend)
if there is None:
    sys.exit(checks.skip_all("this processor cannot run the emulator"))
here = losses("cpu")
same = len(here) == len(there) == 4 and max(abs(a - b) for a, b in zip(here, there)) <= 1e-5
checks.ok(same, "the same losses to 1e-5, 4 steps")
sys.exit(checks.done())
