#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`fattn io` from the outside: its numbers are consistent, and it refuses invalid requests.

usage: tool_io.py FATTN
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import checks
from checks import ok

fattn = sys.argv[1]


def io(*arguments):
    run = subprocess.run([fattn, "io", *arguments], capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


def rows(*arguments):
    code, out, _ = io(*arguments, "--json")
    return [json.loads(line) for line in out.splitlines()] if code == 0 else []


sweep = ["--sq", "256,512", "--d", "32,64", "--m", "4096,20000"]
table = rows(*sweep)
ok(len(table) == 48, "a row for each combination")
ok(all(r["total"] == r["predicted"] == r["reads"] + r["writes"] for r in table),
   "every row is predicted")
ok(all(r["total"] == r["standard"] for r in table if r["schedule"] == "standard"),
   "the column of standard attention is that of its rows")
ok(all(r["total"] >= r["lower_bound"] for r in table), "no row is below the lower bound")

code, out, _ = io(*sweep)
lines = [line.split("\t") for line in out.splitlines()]
names = lines[0]
same = all(float(cell) == float(row[name]) for row, line in zip(table, lines[1:])
           for name, cell in zip(names, line) if name not in ("schedule", "dir", "law"))
ok(code == 0 and len(lines) == 49 and same, "columns and JSON agree")

small = ["--sq", "200", "--d", "16", "--m", "1000", "--density", "1,0.4", "--block-size", "24,24", "--causal"]
ok(rows(*small) == rows(*small, "--execute") != [], "arithmetic changes no count")
sparse = {r["density"]: r["total"] for r in rows(*small) if r["schedule"] == "flash1"
          and r["dir"] == "fwd"}
ok(len(sparse) == 2 and sparse[min(sparse)] < 0.7 * sparse[1], "a block mask saves traffic")

constants = {("standard", "fwd"): 4, ("standard", "bwd"): 7, ("flash1", "fwd"): 12, ("flash1", "bwd"): 20,
             ("flash2", "fwd"): 8, ("flash2", "bwd"): 16}
laws = rows("--sq", "8192", "--m", "4096,1048576")
ok(all(r["lower_bound"] <= r["law"] <= r["total"] for r in table + laws), "laws are between the lower bound and the counts")
ok(len(laws) == 12 and all(0.96 < r["law"] / r["total"] <= 1 for r in laws if r["m"] == 4096) and
   all(r["law"] == constants[r["schedule"], r["dir"]] * r["n"] ** 2 * (r["schedule"] == "standard" or r["d"] ** 2 / r["m"])
       for r in laws if r["m"] == 4096), "and have their constants")

paper = {r["schedule"]: r for r in rows("--paper") if "tensor" not in r}
for schedule in ("standard", "flash1"):
    row = paper.get(schedule, {"gb": 0, "paper_gb": 1})
    ok(abs(row["gb"] / row["paper_gb"] - 1) < 0.06,
       f"{schedule} moves {row['gb']:.2f} GB where the paper measured {row['paper_gb']}")
code, out, _ = io("--paper")
ok(code == 0 and "40.27 GB   measured in the paper: 40.3 GB" in out, "the table for readers")

for wrong in (["--density", "2"], ["--density", "nan"], ["--sq", "0"], ["--m", "x"],
              ["--schedule", "flash3"], ["--block-size", "-1,4"], ["--block-size", "8,8"], ["--n", "5"],
              ["--paper", "--sq", "5"], ["--paper", "--causal"], ["--paper", "--m", "16384"], ["5"]):
    code, out, err = io(*wrong)
    ok(code == 2 and out == "" and len(err.splitlines()) == 1, f"refused: {' '.join(wrong)}")
ok(io("--help")[0] == 0, "there is help")


def lines_of(svg):
    """Texts in a picture, and the number of lines with at least three points."""
    texts = ["".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    paths = [path.get("d", "") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    return texts, sum(path.lstrip().startswith("M") and path.count("L") == 2 for path in paths)


def draw(name, *arguments):
    """The texts of the picture and its lines; None if it was refused."""
    code, out, err = io("--plot", name, *arguments)
    if code != 0 or err or not out.startswith("schedule"):
        print("#", code, err)
        return [], 0
    return lines_of(xml.etree.ElementTree.parse(name).getroot())


with tempfile.TemporaryDirectory() as folder:
    svg, png = os.path.join(folder, "it's.svg"), os.path.join(folder, "a.png")
    if shutil.which("gnuplot"):
        texts, lines = draw(svg, "--sq", "256,512,1024")
        wanted = ("forward, d 64, density 1", "backward, d 64, density 1", "flash2, M 98304", "standard")
        ok(all(text in texts for text in wanted) and lines >= 16, "a picture along N has its lines and their names")
        texts, _ = draw(svg)
        ok("M: elements of fast memory" in texts and "forward, N 4096, d 64, density 1" in texts
           and {"4096", "1048576"} < set(texts), "by default along M")
        heights = [text for text in texts if text.endswith("M") and text[:-1].isdigit()]
        ok(len(heights) >= 4 and heights[:len(heights) // 2] == heights[len(heights) // 2:], "the panels share their axes")
        texts, _ = draw(svg, "--sq", "512", "--m", "4096", "--d", "32,64,128", "--schedule", "flash1", "--dir", "bwd")
        ok("d: head dimension" in texts and "standard" not in texts, "another axis, one schedule, one direction")
        with open(png if io("--plot", png)[0] == 0 else os.devnull, "rb") as file:
            head = file.read(24)
        ok(head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">2I", head[16:]) == (1320, 560), "a PNG")
    else:
        ok(io("--plot", svg)[0] == 2, "without gnuplot there is no picture")
    left = sorted(os.listdir(folder))
    nowhere = {**os.environ, "PATH": folder}
    for why, name, more, environment in (
            ("neither in .png nor in .svg", "a.jpg", [], None), ("not installed", "b.png", [], nowhere),
            ("No such file", "no/b.png", [], None), ("takes no --plot", "b.png", ["--paper"], None)):
        if why == "No such file" and not shutil.which("gnuplot"):
            continue
        run = subprocess.run([os.path.abspath(fattn), "io", "--plot", os.path.join(folder, name), *more],
                             capture_output=True, text=True, env=environment)
        ok(run.returncode == 2 and run.stdout == "" and why in run.stderr and run.stderr.count("\n") == 1
           and sorted(os.listdir(folder)) == left, f"refused: --plot {name} {' '.join(more)}: {why}")

sys.exit(checks.done())
