#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Manual pages match the tool's help and format without warnings, as a TAP program.

    manual.py FATTN PAGE...
"""

import os
import re
import shutil
import subprocess
import sys

import checks
from checks import ok, skip

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../docs/BUILDING.md")


def helped(tool, *words):
    return subprocess.run([tool, *words, "--help"], capture_output=True, text=True, check=True).stdout


def source(page):
    """The text of a page, without escapes."""
    with open(page, encoding="utf-8") as file:
        return re.sub(r"\\(f.|[,/&])", "", file.read().replace("\\-", "-"))


def test_page(tool, command, summary, variables, text):
    name = "fattn" + (command and "-" + command)
    ok(f".TH {name.upper()} " in text and f".SH NAME\n{name} - {summary}\n" in text, name + " has a title and a name")
    ok(f".SH SYNOPSIS\n.B fattn\n{command or 'COMMAND'}" in text, name + " has a synopsis")
    words = re.findall(r"^  (--[\w-]+)", helped(tool, command), re.M) if command else ["--version"]
    # Alone on its line, with its argument: help2man takes an explanation that begins with an option for one.
    absent = [word for word in words if not re.search(rf"^(fattn )?{word}\b(?!.*  ).*$", text, re.M)]
    if absent:
        print("# absent:", *absent)
    ok(words and not absent, name + " has every option")
    absent = [name for name in variables if not re.search(rf"^{name}$", text, re.M)]
    if absent:
        print("# absent:", *absent)
    ok(variables and not absent, name + " has every environment variable")
    ok(all(f".SH {section}\n" in text for section in ("DESCRIPTION", "ENVIRONMENT", '"SEE ALSO"')),
       name + " has the other sections")


def test_formatting(page):
    """groff has nothing to complain about."""
    name = "warnings of " + os.path.basename(page)
    if shutil.which("groff") is None:
        skip(name, "groff is not installed")
        return
    ran = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", page], capture_output=True, text=True, check=False)
    if ran.stderr:
        print("#", ran.stderr.replace("\n", "\n# "))
    ok(ran.returncode == 0 and not ran.stderr, name)


def main():
    tool, pages = os.path.abspath(sys.argv[1]), sys.argv[2:]
    if not pages:
        return checks.skip_all("this build has no manual pages")
    commands = dict(re.findall(r"^  (\w+) +(.*)$", helped(tool).split("Commands:\n")[1].split("\n\n")[0], re.M))
    expected = ["fattn.1"] + [f"fattn-{command}.1" for command in sorted(commands)]
    ok(sorted(os.path.basename(page) for page in pages) == sorted(expected), "each command has a page")
    with open(TABLE, encoding="utf-8") as file:
        variables = re.findall(r"^\| `(FATTN_[^`]*)`", file.read(), re.M)
    for page in pages:
        command = os.path.basename(page)[len("fattn"):-len(".1")].lstrip("-")
        summary = commands.get(command, "exact attention: the tool of the fattn library")
        test_page(tool, command, summary.replace("\\", ""), variables, source(page))
        test_formatting(page)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
