# SPDX-License-Identifier: Apache-2.0
"""Objects hold instructions of the processors that they are for. An instruction set's objects may use
the extensions that its flags name, and its kernels do; all others run on the oldest processor of their
family. The loops of the products keep their sums in registers.

usage: instructions.py OBJDUMP FAMILY OWN LOOPS FILE [ISA=FLAGS]...

OBJDUMP is a program, FAMILY Meson's word for the processors, OWN an extension that the compiler was told
to use everywhere, LOOPS the compiler if it is one whose loops have been read; - stands for none of them.
The objects are those of the build folder that FILE lies in; targets named after an ISA have its flags.
"""

import os
import re
import subprocess
import sys

import execstack
import tap

# What a line of a disassembly looks like that uses an extension; where an encoding is told by its first
# byte, by that (after prefixes for segments and addresses).
FIRST = r"\t(?:(?:26|2e|36|3e|64|65|67) )*"
EXTENSIONS = {
    "x86_64": {
        "AVX": FIRST + r"c[45] ",
        "AVX-512": FIRST + r"62 |%k[0-7]",
        "AVX-512 BF16": r"\tv(dpbf16ps|cvtne2?ps2?bf16)",
        "AMX": r"%tmm|\t(ldtilecfg|sttilecfg|tilerelease)",
    },
    "aarch64": {
        "BF16": r"\tbf(dot|mmla|mlal|cvt)",
        "SVE": r"\b[zp]\d+[./]",
    },
}

# The flags that allow them.
FLAGS = {
    "AVX": r"-mavx2?",
    "AVX-512": r"-mavx512\w+",
    "AVX-512 BF16": r"-mavx512bf16",
    "AMX": r"-mamx\S+",
    "BF16": r"-march=\S+\+bf16\b\S*",
}

# Backward jumps, multiplications that add, and vectors on the stack.
JUMP = {"x86_64": r"j\w+\s+([0-9a-f]+) <", "aarch64": r"(?:b|b\.\w+|cbn?z|tbn?z)\s(?:.*,\s*)?([0-9a-f]+) <"}
PRODUCT = {"x86_64": r"vf(madd|nmadd)\d+ps|vdpbf16ps|tdpbf16ps", "aarch64": r"(fmla|bfmmla|bfdot)\s+v"}
ON_STACK = {"x86_64": r"(?=.*%[xyz]mm).*(\(%rsp|-0x[0-9a-f]+\(%rbp\))", "aarch64": r"(ld|st)[pr]\s+[qd]\d.*\[sp"}


def disassemble(objdump, paths):
    """Per object, per function: the lines of its instructions."""
    text = subprocess.run([objdump, "-d", "--wide", *paths], capture_output=True, text=True, check=True).stdout
    found = {path: {} for path in paths}
    functions, lines = {}, []
    for line in text.split("\n"):
        if line.endswith(">:"):
            lines = functions.setdefault(line.split("<", 1)[1][:-2], [])
        elif line.startswith(" ") and line.count("\t") >= 2:
            lines.append(line)
        elif ":     file format " in line:
            functions = found[line.split(":     file format ")[0]]
    return found


def extensions(family, flags):
    """What these flags of the compiler allow."""
    return [name for name in EXTENSIONS[family] if any(re.fullmatch(FLAGS.get(name, "-"), f) for f in flags)]


def isa_of(path, isas):
    """The instruction set that an object is compiled for, by the name of its target; "" for none."""
    match = re.search(r"_([^_]+?)(\.a)?\.p$", os.path.basename(os.path.dirname(path)))
    return match.group(1) if match and match.group(1) in isas else ""


def foreign(family, allowed, path, functions):
    """Uses of extensions that are not allowed."""
    for name in [name for name in EXTENSIONS[family] if name not in allowed]:
        for function, lines in functions.items():
            hits = [line for line in lines if re.search(EXTENSIONS[family][name], line)]
            if hits:
                yield f"{path}: {function}: {len(hits)} of {name}, such as{hits[0].split(':', 1)[1]}"


def unused(family, allowed, path, functions):
    """Extensions that kernels are compiled for and do not use."""
    for name in allowed:
        if not any(re.search(EXTENSIONS[family][name], line) for lines in functions.values() for line in lines):
            yield f"{path}: has nothing of {name}"


def loops(family, lines):
    """The instructions of each innermost loop."""
    code = [(int(line.split(":")[0], 16), line.split("\t", 2)[2]) for line in lines]
    number = {address: n for n, (address, _) in enumerate(code)}
    spans = []
    for n, (address, text) in enumerate(code):
        jump = re.match(JUMP[family], text)
        start = number.get(int(jump.group(1), 16)) if jump else None
        if start is not None and start <= n:
            spans.append((start, n))
    for start, end in spans:
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in spans):
            yield [text for _, text in code[start:end + 1]]


def spills(family, path, functions):
    """Vectors on the stack in loops at least half of which are multiplications that add."""
    seen = 0
    for function, lines in functions.items():
        for body in loops(family, lines):
            products = sum(bool(re.match(PRODUCT[family], text)) for text in body)
            if products < 8 or 2 * products < len(body):
                continue
            seen += 1
            stack = [text for text in body if re.match(ON_STACK[family], text)]
            if stack:
                yield f"{path}: {function}: {len(stack)} of {len(body)} on the stack, such as {stack[0]}"
    if not seen:
        yield f"{path}: has no loop of products"


def results(objdump, family, own, read, file, *isas):
    isas = dict(isa.split("=", 1) for isa in isas)
    titles = ("objects use what they may", "kernels use what they are for", "products stay in registers")
    why = ("there is no objdump" if objdump == "-" else
           f"nothing is known about {family}" if family not in EXTENSIONS else
           f"everything is compiled for {own}" if own != "-" else None)
    if why:
        return [(title, tap.Skip(why)) for title in titles]
    # Benchmarks may be compiled for this machine alone.
    code = disassemble(objdump, [o for o in execstack.objects_of(file) if f"{os.sep}bench{os.sep}" not in o])
    allowed = {path: extensions(family, isas.get(isa_of(path, isas), "").split()) for path in code}
    kernels = [path for path in code if "fattn_cpu_" in path]
    return [
        (f"{titles[0]}: {len(code)}",
         [f for path in code for f in foreign(family, allowed[path], path, code[path])] if kernels else ["no kernels"]),
        (titles[1], [f for path in kernels for f in unused(family, allowed[path], path, code[path])]),
        (titles[2], tap.Skip("another compiler's loops have not been read") if read == "-" else
         [f for path in kernels if isa_of(path, isas) != "scalar" for f in spills(family, path, code[path])]),
    ]


if __name__ == "__main__":
    sys.exit(tap.report(results(*sys.argv[1:])))
