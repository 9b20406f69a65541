#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the tool that the documents print, as a TAP program: each has to succeed, and to print what
stands below it.

    documented.py FATTN ROOT

Lengths of `bench` and numbers of cases are reduced, so that no command takes much longer than a second. Commands for a
GPU, for ranks of MPI or with a placeholder are not run.
"""

import glob
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import checks
from checks import ok

COMMAND = r"((?:FATTN_\w+=\S+ )*)(?:build/tools/)?fattn ([a-z]+(?: [^`\n]*)?)"
# Not run: other devices, and words such as NAME or <name>.
UNFIT = re.compile(r"cuda|hip|<|(^| )[A-Z]+\b")


def alone(text):
    """Commands that are lines of their own, each with the lines that it prints: indented, or between fences."""
    text = text.replace("\\\n", " ")
    for found in re.finditer(rf"^( {{4,}}){COMMAND}$", text, re.M):
        after = re.match(rf"\n((?:{found[1]} +[^\n]*\n)+)|\n\n```\n(.*?)^```$", text[found.end():], re.S | re.M)
        shown = (after[1] or after[2]).splitlines() if after else []
        yield found[2], found[3].split("  # ")[0], [line.strip() for line in shown]


def in_sentences(text):
    """Commands in back quotes, if an option of theirs has a value; those without one are names of subcommands."""
    for found in re.finditer(rf"`{COMMAND}`", re.sub(r"\n(?=\S)", " ", text)):
        if re.search(r" --\S+ [^-\s]|--paper", found[2]):
            yield found[1], found[2], []


def reduced(command):
    command = re.sub(r"--cases \d+", "--cases 3", command)
    if command.startswith("bench"):
        command = re.sub(r"(--s[qk]) \S+", r"\1 64", command) + " --reps 1"
        command += "" if "--sq" in command else " --sq 64"
    if "--plot" in command and not shutil.which("gnuplot"):
        command = re.sub(r" --plot( \S+)?", "", command)
    return command


def same(shown, printed):
    """Whether the printed lines hold those of the document, which may leave out some. Numbers that follow from caches
    may differ: in those of traffic and of ranks always, in those of a tile, work and workspace together."""
    blank = lambda line: re.sub(r"[\d.]+(e[+-]?\d+)?", "N", line)
    tiled = any(line.startswith("tile ") and line in printed for line in shown)
    varies = ("traffic", "memory", "plan") + (() if tiled else ("tile ", "work ", "workspace "))
    blanks = {blank(line) for line in printed}
    missing = [line for line in shown
               if (blank(line) not in blanks if line.startswith(varies) else line not in printed)]
    for line in missing:
        print("# not printed:", line)
    return not missing


def write_array(path, *shape):
    head = repr({"descr": "<f4", "fortran_order": False, "shape": shape})
    head += " " * (117 - len(head)) + "\n"
    count = 1
    for length in shape:
        count *= length
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(4 * count))


def main(tool, root):
    pages = [os.path.join(root, "README.md"), *sorted(glob.glob(os.path.join(root, "docs", "*.md")))]
    done = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, heads in ("q", 4), ("k", 2), ("v", 2):
            write_array(os.path.join(folder, name + ".npy"), 1, 8, heads, 16)
        for page in pages:
            with open(page, encoding="utf-8") as file:
                text = file.read()
            for variables, command, shown in [*alone(text), *in_sentences(text)]:
                if UNFIT.search(command) or UNFIT.search(variables) or (variables, command) in done:
                    continue
                done.add((variables, command))
                env = {**os.environ, **dict(word.split("=", 1) for word in variables.split())}
                ran = subprocess.run([tool, *reduced(command).split()], cwd=folder, env=env, capture_output=True,
                                     text=True, check=False)
                passed = (0, 1) if "--case " in command else (0,)  # NUMERICS.md shows problems that fail
                fine = ran.returncode in passed and same(shown, [line.strip() for line in ran.stdout.splitlines()])
                if ran.returncode not in passed:
                    print("#", ran.returncode, ran.stderr.strip())
                ok(fine, f"{os.path.basename(page)}: {variables}fattn {' '.join(command.split())}"[:100])
    ok(len(done) > 8, "commands were found")
    return checks.done()


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1]), sys.argv[2]))
