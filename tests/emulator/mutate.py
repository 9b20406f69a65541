# SPDX-License-Identifier: Apache-2.0
"""A disassembler that plants faults: it runs the real one and changes instructions of one kernel in its output, so that
the emulator executes wrong machine code. `script` writes a script that replaces llvm-objdump by it.

usage: mutate.py OBJDUMP KERNEL PATTERN REPLACEMENT NUMBER -d FILE

PATTERN is a regular expression for a whole instruction, REPLACEMENT what becomes of it (with \\1 ...),
NUMBER which of the matches, from 1; 0 is all of them. Fails when there is no such match.
"""

import os
import re
import shlex
import subprocess
import sys


def script(path, objdump, kernel, pattern, replacement, number):
    """Writes an executable that takes the place of objdump."""
    words = [sys.executable, os.path.abspath(__file__), objdump, kernel, pattern, replacement, str(number)]
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nexec " + " ".join(shlex.quote(w) for w in words) + ' "$@"\n')
    os.chmod(path, 0o755)


def mutated(text, kernel, pattern, replacement, number):
    """The disassembly with its matches replaced, and how many there were."""
    current, seen, lines = "", 0, []
    for line in text.split("\n"):
        label = re.fullmatch(r"[0-9a-f]+ <(.*)>:", line)
        current = label.group(1) if label else current
        code, mark, comment = line.partition("//")
        match = current == kernel and line.startswith("\t") and re.fullmatch(pattern, code.strip())
        if match:
            seen += 1
            if number in (0, seen):
                line = "\t" + match.expand(replacement) + " " + mark + comment
        lines.append(line)
    return "\n".join(lines), seen


def main(objdump, kernel, pattern, replacement, number, *arguments):
    text = subprocess.run([objdump, *arguments], capture_output=True, text=True, check=True).stdout
    text, seen = mutated(text, kernel, pattern, replacement, int(number))
    if kernel in text and seen < max(1, int(number)):
        print(f"{kernel} has {seen} of {pattern}", file=sys.stderr)
        return 1
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
