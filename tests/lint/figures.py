# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of the documents are what the measurements in bench/figures give.

usage: figures.py ROOT
"""

import os
import subprocess
import sys

import tap


def stale(root):
    """What bench/publish.py --check complains of."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "publish.py")
    done = subprocess.run([sys.executable, script, "--check", root], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).splitlines()
    return said or ([f"{script} ended with {done.returncode}"] if done.returncode else [])


def results(root):
    return [("documents show what was measured", stale(root))]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
