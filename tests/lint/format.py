# SPDX-License-Identifier: Apache-2.0
"""clang-format 14 decides how C looks; all text is UTF-8 with LF, ends in one newline, and has no tabs
and no spaces at the end of a line.

usage: format.py ROOT
"""

import os
import re
import shutil
import subprocess
import sys

import tap

CODE = (".c", ".cpp", ".h", ".cu", ".cuh", ".hip")
TEXT = tap.SOURCE + (".py", ".md", ".sh", ".build", ".in", ".txt")
WIDTH = 100


def formatter():
    """The pinned version's command, or None."""
    for name in ("clang-format-14", "clang-format"):
        path = shutil.which(name)
        if path and re.search(r"\bversion 14\.", subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=True).stdout):
            return path
    return None


def c_format(root):
    command = formatter()
    if command is None:
        return tap.Skip("no clang-format 14")
    paths = tap.files(root, CODE)
    told = subprocess.run([command, "--dry-run", "--style=file", *paths], cwd=root, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=True).stderr
    lines = {}
    for path, line in re.findall(r"^(\S+?):(\d+):\d+: ", told, re.M):
        lines.setdefault(path, line)
    return [f"{path}:{line}: clang-format would change this" for path, line in lines.items()]


def top_files(root):
    return [n for n in os.listdir(root) if n.endswith(TEXT) and os.path.isfile(os.path.join(root, n))]


def scripts(root):
    """Files whose names have no ending, and which begin with the name of an interpreter."""
    for path in tap.files(root, ("",)):
        if "." not in os.path.basename(path):
            with open(os.path.join(root, path), "rb") as file:
                if file.read(2) == b"#!":
                    yield path


def plain_text(root):
    for path in sorted(top_files(root) + tap.files(root, TEXT, tap.ROOMS + ("docs",)) + list(scripts(root))):
        try:
            text = tap.read(root, path)
        except UnicodeDecodeError:
            yield f"{path}: is not UTF-8"
            continue
        if not text.endswith("\n") or text.endswith("\n\n"):
            yield f"{path}: does not end in one newline"
        for number, line in enumerate(text.split("\n"), 1):
            if re.search(r"[ \t\r]$", line):
                yield f"{path}:{number}: ends in a space"
            if "\t" in line:
                yield f"{path}:{number}: has a tab"
            if path.endswith(CODE) and len(line) > WIDTH:
                yield f"{path}:{number}: is {len(line)} columns wide, {WIDTH} fit"


def results(root):
    return [("C is formatted", c_format(root)), ("text is plain", plain_text(root))]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
