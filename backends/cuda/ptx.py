# SPDX-License-Identifier: Apache-2.0
"""Copies a PTX file without some of its entries.

usage: ptx.py PATTERN PTX OUTPUT

Entries whose names match the regular expression PATTERN are left out.
"""

import re
import sys

pattern, ptx, output = sys.argv[1:]
with open(ptx, encoding="utf-8") as file:
    text = file.read()
# An entry ends with the first brace at the beginning of a line.
entry = re.compile(r"^\.visible \.entry (\w+)\(.*?^}\n", re.M | re.S)
with open(output, "w", encoding="utf-8") as file:
    file.write(entry.sub(lambda found: "" if re.search(pattern, found[1]) else found[0], text))
