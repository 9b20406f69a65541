#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the one block of C of a page, which has to be shorter than so many lines.

    page_code.py PAGE LINES
"""

import re
import sys


def main(page, most):
    with open(page, encoding="utf-8") as file:
        blocks = re.findall(r"^```c\n(.*?)^```$", file.read(), flags=re.S | re.M)
    if len(blocks) != 1 or blocks[0].count("\n") >= int(most):
        return f"{page} has {len(blocks)} blocks of C, of {[b.count(chr(10)) for b in blocks]} lines"
    sys.stdout.write(blocks[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
