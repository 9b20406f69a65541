#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The forecast of `fattn explain --ranks` for 2 to 1024 ranks, as a table for bench/figures:

    bench/scaling.py FATTN > bench/figures/ranks.tsv

The parameters are fitted to two H100 of one machine (docs/DISTRIBUTED.md).
"""

import re
import subprocess
import sys

FITTED = {"fwd": ("690e12", "45e-9"), "bwd": ("600e12", "225e-9")}  # of a GPU: operations a second, seconds a row
LINK = "305e9,5e-6"
PROBLEM = ["--hq", "32", "--hk", "8", "--d", "128", "--causal", "--dtype", "bf16", "--split", "zigzag", "--link", LINK]


def main(fattn):
    version = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    print("# machine: a model, no machine")
    print(f"# versions: link {LINK}, forward {FITTED['fwd']}, backward {FITTED['bwd']} (operations a second, seconds a row)")
    print(f"# commit: {version.stdout.strip()}")
    print("# command: bench/scaling.py build/tools/fattn > bench/figures/ranks.tsv")
    print("dir\ttokens\tscheme\tN\tefficiency")
    for direction, (rate, row) in FITTED.items():
        for tokens in (131072, 1048576):
            for scheme in ("ring", "heads", "both"):
                for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
                    ran = subprocess.run([fattn, "explain", "--dir", direction, "--sq", str(tokens), "--sk", str(tokens),
                                          *PROBLEM, "--rate", rate, "--row", row, "--scheme", scheme, "--ranks",
                                          str(ranks)], capture_output=True, text=True, check=False)
                    found = re.search(r"efficiency +([\d.]+)", ran.stdout)
                    if found:
                        print(f"{direction}\t{tokens}\t{scheme}\t{ranks}\t{found[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
