#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Doxygen finds everything public documented, without a warning, as a TAP program.

    api_docs.py SOURCES
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

import checks
from checks import ok


def build(sources, folder):
    """Exit status and complaints of a build of the HTML."""
    ran = subprocess.run([os.path.join(sources, "docs/api.sh"), "doxygen", sources, "1.2.3", folder],
                         capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def test_sources(sources, folder):
    status, said = build(sources, folder)
    if said:
        print("#", said.strip().replace("\n", "\n# "))
    ok(status == 0 and not said, "Doxygen has nothing to complain about")
    with open(os.path.join(sources, "include/fattn/fattn.h"), encoding="utf-8") as file:
        header = file.read()
    functions = set(re.findall(r"^FATTN_API [^;(]*?(\w+)\(", header, re.M))
    html = "".join(open(os.path.join(folder, name), encoding="utf-8").read()
                   for name in os.listdir(folder) if re.match(r"group\w+\.html$", name))
    absent = [name for name in functions if not re.search(rf"\b{name}\b", html)]
    if absent:
        print("# absent:", *absent)
    ok(len(functions) > 30 and not absent, "every function is described")


def enumerators(sources):
    """Enumerators without a comment, which old versions of Doxygen do not report."""
    seen = subprocess.run([sys.executable, "docs/doxygen_filter.py", "include/fattn/fattn.h"], cwd=sources,
                          capture_output=True, text=True, check=True).stdout
    bodies = re.findall(r"typedef enum \w+ \{(.*?)\} \w+;", seen, re.S)
    found = [row for body in bodies for row in re.findall(r"(FATTN_\w+)\s*=\s*\d+,?\s*(/\*\*<)?", body)]
    without = [name for name, comment in found if not comment]
    if without:
        print("# without a comment:", *without)
    ok(len(found) > 20 and not without, "every enumerator is described")


# Changes to a copy of the header that must make the build fail: the name that the warning must mention, and the
# comment that is removed.
HARM = [
    ("fattn_execute", r"/\*(?:(?!\*/).)*?\*/\n(?=FATTN_API fattn_status fattn_execute\()"),
    ("page_size", r"(?<=int64_t page_size;) /\*.*?\*/"),
    ("wholes_k", r"(?<=int64_t \*wholes_q, \*wholes_k;) +/\*.*?\*/"),
    ("FATTN_SINK", r"(?<=0x100ull) +/\* sink \*/"),
]


def test_harm(sources, work):
    for name, comment in HARM:
        copy = os.path.join(work, name)
        for part in ("docs", "include"):
            shutil.copytree(os.path.join(sources, part), os.path.join(copy, part))
        path = os.path.join(copy, "include/fattn/fattn.h")
        with open(path, encoding="utf-8") as file:
            header, changes = re.subn(comment, "", file.read(), flags=re.S)
        with open(path, "w", encoding="utf-8") as file:
            file.write(header)
        status, said = build(copy, os.path.join(copy, "api"))
        ok(changes == 1 and status != 0 and name in said, f"{name} without its comment is an error")


def main():
    sources = os.path.abspath(sys.argv[1])
    if shutil.which("doxygen") is None:
        return checks.skip_all("doxygen is not installed")
    with tempfile.TemporaryDirectory() as work:
        test_sources(sources, os.path.join(work, "api"))
        enumerators(sources)
        test_harm(sources, work)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
