#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the plain comments of a public header as Doxygen's, so that the header needs no marks.

    doxygen_filter.py HEADER    what Doxygen is to see, line by line, on standard output

A comment behind code is about that code, about each name in it. One on lines of its own is about what
follows; in a struct or an enum, where what follows has one behind it too, it is a heading. A banner
begins a group. The first comment after the licence is about the file; fattn.h's is the main page.
"""

import os
import re
import sys

STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/', re.S)
BANNER = re.compile(r"/\*[ *]*-{20,}\s*\*\s*(\w.*?)\s*\n[ *]*-{20,} \*/", re.S)
# "const float *o1, *lse1;": what the names have in common, and the names
SEVERAL = re.compile(r"(\s*(?:const )?\w+ )(\**\w+(?:, \**\w+)+);\s*$")


def pieces(text):
    """The text as (is it a comment?, piece), strings being code."""
    code = ""
    done = 0
    for match in STRING_OR_COMMENT.finditer(text):
        code += text[done:match.start()]
        done = match.end()
        if match.group(0).startswith('"'):
            code += match.group(0)
        else:
            yield False, code
            yield True, match.group(0)
            code = ""
    yield False, code + text[done:]


def filtered(text, main_page):
    out = ""
    groups = depth = 0
    found = list(pieces(text))
    seen_first = False
    for i, (is_comment, piece) in enumerate(found):
        if not is_comment:
            depth += piece.count("{") - piece.count("}")
            out += piece
            continue
        line = out[out.rfind("\n") + 1:]
        # In braces: is there a comment behind the next line of code?
        heading = depth > 0 and i + 2 < len(found) and re.match(r"\n[^\n]+$", found[i + 1][1])
        banner = BANNER.match(piece)
        several = SEVERAL.match(line)
        if "SPDX" in piece or (heading and not line.strip()):
            out += piece
        elif banner:
            groups += 1
            out += "/** @} */ " * (groups > 1) + f"/** @defgroup group{groups} {banner.group(1)}\n@{{ */\n"
        elif not seen_first:
            seen_first = True
            out += ("/** @file */ /** @mainpage" if main_page else "/** @file") + piece[2:]
        elif several:
            kind, *names = several.group(1), *several.group(2).split(", ")
            one_line = re.sub(r"\s*\n[ *]*", " ", piece[2:])
            out = out[:len(out) - len(line)] + "".join(f"{kind}{name}; /**<{one_line}" for name in names)
            out += "\n" * piece.count("\n")
        elif line.strip():
            out += "/**<" + piece[2:]
        else:
            out += "/**" + piece[2:]
    return out + "/** @} */\n" * (groups > 0)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        sys.stdout.write(filtered(header.read(), os.path.basename(sys.argv[1]) == "fattn.h"))
