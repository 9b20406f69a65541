# SPDX-License-Identifier: Apache-2.0
"""The environment variables that core/env.c reads, for itself or a backend, are those that docs/BUILDING.md
documents.

usage: environment.py ROOT
"""

import re
import sys

import rooms
import tap

CODE = "core/env.c"
TABLE = "docs/BUILDING.md"


def read_names(root):
    """Variables named in the strings of core/env.c, and those that backends have of their own."""
    code = rooms.without_comments(tap.read(root, CODE))
    for path in tap.files(root, (".c",), ("backends",)):
        own = r"fattn_env_variable \w+ = \{(.*?)\}"
        code += "".join(re.findall(own, tap.read(root, path), re.S))
    return set(re.findall(r'"(FATTN_[A-Z0-9_]+)"', code))


def table_names(root):
    """Variables in the first column of the table: rows such as | `FATTN_TILE` | ... |."""
    return set(re.findall(r"^\|\s*`(FATTN_[A-Z0-9_]+)[^`]*`\s*\|", tap.read(root, TABLE), flags=re.M))


def results(root):
    code, table = read_names(root), table_names(root)
    return [
        ("env.c reads variables", [] if code else [f"{CODE}: names no FATTN_* variable"]),
        ("every variable is documented",
         [f"{CODE}: {name} is missing from the table of {TABLE}" for name in sorted(code - table)]),
        ("every documented variable exists",
         [f"{TABLE}: {name} is not read by {CODE}" for name in sorted(table - code)]),
    ]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
