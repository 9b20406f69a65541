# SPDX-License-Identifier: Apache-2.0
"""Constants of fattn.h can be read without a compiler: bits are bare literals, enumerators numbers.

Generators of bindings (cffi, SWIG, and scripts that look for #define) evaluate no casts, shifts or macros.

usage: constants.py ROOT
"""

import re
import sys

import rooms
import tap

HEADER = "include/fattn/fattn.h"
LITERAL = {"feature": r"0x([0-9a-f]+)ull", "output": r"0x([0-9a-f]+)u"}
GUARDS = {"FATTN_H", "FATTN_API"}


def in_header(root):
    """Values of the header's macros, guards excepted."""
    code = rooms.without_comments(tap.read(root, HEADER))
    return {name: value.strip() for name, value in re.findall(r"^#define (FATTN_\w+)[ \t]*(.*(?:\\\n.*)*)$", code, re.M)
            if name not in GUARDS}


def check_bits(kind, values):
    findings, seen = [], 0
    for name, value in values.items():
        match = re.fullmatch(LITERAL[kind], value)
        if not match:
            findings.append(f"{HEADER}: {name} is {value}, not {LITERAL[kind]}")
            continue
        bit = int(match.group(1), 16)
        if name == "FATTN_FEATURES_ALL":
            continue
        if bit & (bit - 1) or not bit or bit & seen:
            findings.append(f"{HEADER}: {name} is {value}, no bit of its own")
        seen |= bit
    if kind == "feature" and values.get("FATTN_FEATURES_ALL") != f"0x{seen:x}ull":
        findings.append(f"{HEADER}: FATTN_FEATURES_ALL is {values.get('FATTN_FEATURES_ALL')}, not 0x{seen:x}ull")
    return findings


def results(root):
    code = rooms.without_comments(tap.read(root, HEADER))
    macros = in_header(root)
    outputs = {name: value for name, value in macros.items() if name.startswith("FATTN_OUT_")}
    features = {name: value for name, value in macros.items() if name not in outputs}
    bodies = re.findall(r"typedef enum \w+ \{(.*?)\}", code, re.S)
    rows = [row.split("=") for body in bodies for row in body.split(",") if row.strip()]
    return [
        ("fattn.h has bits and enumerators", [] if len(features) > 20 and len(outputs) > 5 and len(rows) > 20 else
         [f"{HEADER}: {len(features)} features, {len(outputs)} outputs, {len(rows)} enumerators"]),
        ("features are literals of 64 bits", check_bits("feature", features)),
        ("outputs are literals of 32 bits", check_bits("output", outputs)),
        ("enumerators are numbers", [f"{HEADER}: enumerator {' = '.join(row).strip()}" for row in rows
                                     if len(row) != 2 or not re.fullmatch(r"\d+", row[1].strip())]),
    ]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
