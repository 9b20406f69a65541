#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`fattn io` from the outside: its numbers hang together, and it refuses what it cannot do.

usage: tool_io.py FATTN
"""
import json
import subprocess
import sys

fattn = sys.argv[1]
count = failures = 0


def check(passed, what):
    global count, failures
    count += 1
    failures += not passed
    print(f"{'ok' if passed else 'not ok'} {count} - {what}", flush=True)


def io(*arguments):
    run = subprocess.run([fattn, "io", *arguments], capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


def rows(*arguments):
    code, out, _ = io(*arguments, "--json")
    return [json.loads(line) for line in out.splitlines()] if code == 0 else []


sweep = ["--n", "256,512", "--d", "32,64", "--m", "4096,20000"]
table = rows(*sweep)
check(len(table) == 48, "a row for each combination")
check(all(r["total"] == r["predicted"] == r["reads"] + r["writes"] for r in table),
      "every row is predicted")
check(all(r["total"] == r["standard"] for r in table if r["schedule"] == "standard"),
      "the column of standard attention is that of its rows")
check(all(r["total"] >= r["lower_bound"] for r in table), "no row is below the lower bound")

code, out, _ = io(*sweep)
lines = [line.split("\t") for line in out.splitlines()]
names = lines[0]
same = all(float(cell) == float(row[name]) for row, line in zip(table, lines[1:])
           for name, cell in zip(names, line) if name not in ("schedule", "dir", "law"))
check(code == 0 and len(lines) == 49 and same, "columns and JSON agree")

small = ["--n", "200", "--d", "16", "--m", "1000", "--density", "1,0.4", "--block", "24", "--causal"]
check(rows(*small) == rows(*small, "--execute") != [], "arithmetic changes no count")
sparse = {r["density"]: r["total"] for r in rows(*small) if r["schedule"] == "flash1"
          and r["dir"] == "fwd"}
check(len(sparse) == 2 and sparse[min(sparse)] < 0.7 * sparse[1], "a block mask saves traffic")

paper = {r["schedule"]: r for r in rows("--paper") if "tensor" not in r}
for schedule in ("standard", "flash1"):
    row = paper.get(schedule, {"gb": 0, "paper_gb": 1})
    check(abs(row["gb"] / row["paper_gb"] - 1) < 0.06,
          f"{schedule} moves {row['gb']:.2f} GB where the paper measured {row['paper_gb']}")
code, out, _ = io("--paper")
check(code == 0 and "40.27 GB   measured in the paper: 40.3 GB" in out, "the table for readers")

for wrong in (["--density", "2"], ["--density", "nan"], ["--n", "0"], ["--m", "x"],
              ["--schedule", "flash3"], ["--block", "-1"], ["5"]):
    code, out, err = io(*wrong)
    check(code == 2 and out == "" and len(err.splitlines()) == 1, f"refused: {' '.join(wrong)}")
check(io("--help")[0] == 0, "there is help")

print(f"1..{count}")
sys.exit(failures != 0)
