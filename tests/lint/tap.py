# SPDX-License-Identifier: Apache-2.0
"""Shared by all lints: walking the sources and reporting findings in TAP.

A lint is a list of (title, findings) pairs: a title with no findings is `ok`, one with findings is
`not ok`, and findings that are a Skip are skipped. Findings are sentences beginning with "file:line:"
or the name of a file.
"""

import hashlib
import os
import re

# The folders with sources.
ROOMS = ("include", "core", "backends", "tools", "python", "tests", "bench", "examples", "cmake")
SOURCE = (".c", ".cpp", ".h", ".cu", ".cuh", ".hip", ".inc")


class Skip(str):
    """Why a check cannot be made on this machine."""


def files(root, endings=SOURCE, rooms=ROOMS):
    """Paths, relative to root, of the files in the rooms with one of the endings, sorted."""
    found = []
    for room in rooms:
        for folder, subfolders, names in os.walk(os.path.join(root, room)):
            subfolders[:] = [s for s in subfolders if s != "__pycache__"]
            found += [os.path.relpath(os.path.join(folder, n), root)
                      for n in names if n.endswith(tuple(endings))]
    return sorted(found)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def digest(root, source):
    """Of the tokens of a source and of those that it includes."""
    seen, todo, hashed = set(), [source], hashlib.sha256()
    while todo:
        path = todo.pop(0)
        if path in seen or not os.path.exists(os.path.join(root, path)):
            continue
        seen.add(path)
        text = read(root, path)
        todo += re.findall(r'^#include "(.*)"', text, re.M)
        text = re.sub(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\])*")', lambda m: m[1] or " ", text, flags=re.S)
        hashed.update(" ".join(text.split()).encode() + b"\0")
    return hashed.hexdigest()[:16]


def report(results):
    """Prints the results as TAP; returns the exit status."""
    results = list(results)
    failed = False
    for number, (title, findings) in enumerate(results, 1):
        if isinstance(findings, Skip):
            print(f"ok {number} - {title} # SKIP {findings}")
            continue
        findings = list(findings)
        failed = failed or bool(findings)
        print(f"{'not ok' if findings else 'ok'} {number} - {title}")
        for finding in findings:
            print(f"# {finding}")
    print(f"1..{len(results)}")
    return 1 if failed or not results else 0
