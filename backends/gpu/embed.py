# SPDX-License-Identifier: Apache-2.0
"""Writes a C file that holds a binary file as an array. It is C and not assembly, because a C compiler marks
the object's stack as not executable by itself.

usage: embed.py SYMBOL BINARY OUTPUT
"""

import os
import sys

symbol, binary, output = sys.argv[1:]
with open(output, "w", encoding="utf-8") as file:
    file.write(f"""/* Made by {os.path.basename(__file__)}. */
extern const unsigned char {symbol}[];
__asm__(".pushsection .rodata, \\"a\\"\\n"
        ".globl {symbol}\\n"
        ".hidden {symbol}\\n"
        ".balign 4096\\n"
        "{symbol}:\\n"
        ".incbin \\"{os.path.abspath(binary)}\\"\\n"
        ".popsection\\n");
""")
