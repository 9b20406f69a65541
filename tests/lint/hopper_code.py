# SPDX-License-Identifier: Apache-2.0
"""The machine code of the kernels of Hopper's own instructions, compiled at full optimisation whatever the
build asks for: products that ptxas did not serialise, as many as the shape has, and from the first to the
last of them no register in memory and no gathering of a warp.

usage: hopper_code.py ROOT NVCC [full]
       hopper_code.py --write ROOT NVCC

The same sources, compiled by the same nvcc with the same flags, are the same code: hopper_code.txt lists what was
compiled and found right, and only what differs from it is compiled again, whole. --write compiles all, judges, and
lists it.

full: of the images of rows wgmma_full_* and wgmma_backward_full_*, which take minutes to compile, each time.

What makes ptxas do otherwise is in docs/notes/hopper-forward.md.
"""

import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile

import tap

SOURCES = ("backends/cuda/kernels/wgmma_forward.cu", "backends/cuda/kernels/wgmma_backward.cu",
           "backends/cuda/kernels/wgmma_forward_e4m3.cu", "backends/cuda/kernels/wgmma_forward_576.cu")
FULL_SOURCES = tuple(f"backends/cuda/kernels/wgmma_{kind}_{width}.cu"
                     for kind in ("full", "backward_full") for width in (64, 128, 256))
LIST = "tests/lint/hopper_code.txt"
HEAD = """\
# Sources of kernels of Hopper's own instructions that hopper_code.py --write has compiled and found right: digests of
# their tokens, and of the lint and the compiler.
"""
# As backends/cuda/meson.build compiles.
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings", "-DFATTN_BUILDING", "-I.", "-Iinclude"]

# Lowest twelve bits of an instruction: products of two tiles, and of registers and a tile.
PRODUCT = (0x9F0, 0xDF0)
BARRED = {0x983: "LDL", 0x387: "STL", 0x948: "WARPSYNC.ALL"}

# Most bytes of registers that a thread may spill, by the part of an entry's name behind the type. Warps that do not
# multiply spill: forward's planner has 32 registers at 64 and 96 channels and 40 in short_128, and backward's other
# warps have 24.
SPILLS = {"e4m3_64": 132, "e4m3_128": 64, "e4m3_256": 64, "e4m3_split_64": 100, "e4m3_split_128": 104,
          "e4m3_split_256": 136, "64": 128, "96": 128, "onto_64": 128, "onto_96": 128, "short_64": 144, "short_128": 56,
          "backward_short_64": 104, "backward_64": 104, "backward_128": 112, "backward_256": 88,
          "backward_ordered_256": 112,
          # Addresses of rows of o, which are stored at the end of an item.
          "576": 312, "pair_576": 312}
# Products that an item ends with: dQ of its last tile, of 128 keys, where dQ is made a tile later.
DEFERRED = {"backward_blocks_64": 8, "backward_softcap_64": 8, "backward_softcap_128": 8}
# Where items are chained, one loop has the products of every tile. Before it there is S^T of a chain's first tile, of 64
# channels, and after it dQ of its last tile.
CHAINED = {"backward_short_64": 4 + 8, "backward_64": 4 + 8}
# Of the rows wgmma_full_*, where what makes scores needs registers between the products. Planners of three warpgroups
# and of three blocks a multiprocessor have 32 registers.
FULL_SPILLS = {"full_64": 200, "full_128": 700, "full_256": 228,
               "softcap_64": 88, "softcap_128": 208, "softcap_256": 136, "alibi_256": 56,
               "bias_64": 224, "bias_128": 128, "bias_256": 136, "mask_64": 120, "mask_256": 44,
               "short_bias_64": 224, "short_bias_128": 64, "short_mask_64": 176,
               "dropout_64": 176, "dropout_256": 148, "blocks_256": 44}
FULL_SPILLS.update({f"backward_{run}_{width}": 104 for width in (64, 128, 256)
                    for run in ("dbias", "alibi", "softcap", "dropout")})
FULL_SPILLS["backward_alibi_128"] = 112
# Where tiles may be left out, the warp that takes items finds out which.
FULL_SPILLS.update({f"backward_{run}_{width}": 200 for width in (64, 128, 256)
                    for run in ("full", "bias", "mask", "blocks")})
FULL_SPILLS.update({"backward_full_128": 1372, "backward_softcap_128": 196, "backward_dropout_128": 172,
                    "backward_dbias_128": 152, "backward_bias_128": 276, "backward_mask_128": 336,
                    "backward_softcap_256": 112, "backward_alibi_256": 112, "backward_dbias_256": 112,
                    "backward_bias_256": 248, "backward_mask_256": 240, "backward_blocks_256": 252,
                    "backward_full_256": 272})


def compile_image(root, nvcc, folder, source, arch="90a", more=()):
    """Machine code, and what the compiler said."""
    ptx, cubin = os.path.join(folder, "a.ptx"), os.path.join(folder, "a.cubin")
    said = ""
    for step in ([*FLAGS, *more, "-ptx", f"-arch=compute_{arch}", "-o", ptx, source],
                 ["-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", "-o", cubin, ptx]):
        done = subprocess.run([nvcc, *step], cwd=root, capture_output=True, text=True, check=False)
        said += done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(said[-2000:])
    with open(cubin, "rb") as file:
        return file.read(), said


def sections(elf):
    """(name, bytes) of each section of a 64-bit ELF file."""
    at, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    table = [struct.unpack_from("<IIQQQQ", elf, at + size * n) for n in range(count)]
    for name, _, _, _, offset, length in table:
        begin = table[names][4] + name
        yield elf[begin:elf.index(b"\0", begin)].decode(), elf[offset:offset + length]


def of_backward(width, queries):
    """Products of a tile: of 128 keys a warpgroup has half, of 64 all, and half of the channels."""
    return (2 * width + 2 * queries + 128) // 16


def shapes(root, full):
    """name: products of a tile of keys, or in backward of queries, by the lists in wgmma.h."""
    text = tap.read(root, "backends/cuda/wgmma.h")
    if full:
        rows = re.findall(r"X\((\w+), [A-Z]\w+, (\d+), \d, (\d+), \d+, \d+\)", text)
        known = {f"{run}_{width}": int(width) // 16 + int(keys) // 16 for run, width, keys in rows}
        runs = re.findall(r"X\((\w+), \w+, (?:true|false), width, (\d+), keys, stages, \w+\)", text)
        for width in re.findall(r"WGMMA_BACKWARD_FULL\(X, (\d+), \d+, \d+, \d+\)", text):
            known.update({f"backward_{run}_{width}": of_backward(int(width), int(queries)) for run, queries in runs})
        return known
    rows = re.findall(r"X\((\w+), (\d+), \d+, \d+, (\d+), \d+\)", text)
    known = {name: int(width) // 16 + int(keys) // 16 for name, width, keys in rows}
    known.update({"onto_" + name: products for name, products in known.items()
                  if not name.startswith(("short_", "split_"))})
    # Where keys are widened, products of weights and 256 values are made in two halves.
    widened = re.findall(r"X\((e4m3_\w+), (\d+), \d+, \d+, (\d+), \d+, \d+\)", text)
    known.update({name: int(width) // 16 + int(keys) // 16 * (1 + (width == "256")) for name, width, keys in widened})
    known.update(halves(text))
    for row in re.findall(r"X\((\w+), (\d+), (\d+), (\d+), \d+\)", text):
        # Where two blocks share an item, deterministic runs have a kernel of their own.
        for kind in ("backward_", "backward_ordered_") if row[1] == "256" else ("backward_",):
            known[kind + row[0]] = of_backward(int(row[1]), int(row[2]))
    return known


def halves(text):
    """Shapes whose warpgroups share rows: half of the products of both. The first has its own scores twice, in its loop
    and for an odd last tile, and the second once. Each multiplies weights and values three times, of 64 keys."""
    rows = re.findall(r"X\((\w+), (\d+), \d+, [12]\)", text)
    return {name: (3 * int(width) // 16 + 6 * 64 // 16) // 2 for name, width in rows}


def expected(shape, products):
    """How many products an entry has, whose loop makes so many for a tile. The first or last tile has code of its own,
    unless items are chained."""
    return products + CHAINED[shape] if shape in CHAINED else 2 * products + DEFERRED.get(shape, 0)


def look(code, products, barred, gap=1 << 30):
    """Findings about an entry's code, which has so many products. gap: so many instructions apart, products are not of
    one loop."""
    words = [struct.unpack_from("<Q", code, n)[0] & 0xFFF for n in range(0, len(code), 16)]
    found = [n for n, word in enumerate(words) if word in PRODUCT]
    if len(found) != products:
        yield f"{len(found)} products, {products} expected"
    for first, last in zip(found, found[1:]):
        for n in range(first, last if last - first < gap else first):
            if words[n] in barred:
                yield f"{barred[words[n]]} at {16 * n:#x}, among the products"


def judges(nvcc):
    """A digest of this lint, with its ceilings and flags, and of the compiler."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    with open(os.path.abspath(__file__), "rb") as file:
        return hashlib.sha256(file.read() + version).hexdigest()[:16]


def listed(text):
    """source: (digest of its tokens, of what judged it) of the list."""
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {source: (tokens, judge) for source, tokens, judge in rows}


def stands(known, source, tokens, judge):
    """Whether the list says that this source was found right by the same lint and compiler."""
    return known.get(source) == (tokens, judge)


def changed(root, nvcc):
    """Of SOURCES those that the list does not stand for."""
    known, judge = listed(tap.read(root, LIST)), judges(nvcc)
    return [source for source in SOURCES if not stands(known, source, tap.digest(root, source), judge)]


def results(root, nvcc, *full):
    if full:
        return judged(root, nvcc, FULL_SOURCES, shapes(root, full))
    sources = changed(root, nvcc)
    if not sources:
        return [("sources, lint and compiler are those that were found right", [])]
    return judged(root, nvcc, sources, shapes_of(root, sources))


def shapes_of(root, sources):
    """Those of SOURCES."""
    known = shapes(root, ())
    return {name: products for name, products in known.items() if source_of(name) in sources}


def source_of(name):
    """The source that has the entries of a shape."""
    return SOURCES[3 if name.endswith("576") else 2 if name.startswith("e4m3_") else name.startswith("backward_")]


def write(root, nvcc):
    found = judged(root, nvcc, SOURCES, shapes_of(root, SOURCES))
    if not any(findings for _, findings in found):
        judge = judges(nvcc)
        lines = [f"{source} {tap.digest(root, source)} {judge}\n" for source in SOURCES]
        with open(os.path.join(root, LIST), "w", encoding="utf-8") as file:
            file.write(HEAD + "".join(lines))
    return found


def judged(root, nvcc, sources, known):
    titles = ("ptxas serialises no product", "registers stay registers", "loops are products and what these need")
    notes, spills, loops, seen = [], [], [], 0
    for source in sources:
        with tempfile.TemporaryDirectory() as folder:
            cubin, said = compile_image(root, nvcc, folder, source)
        notes += [line for line in said.splitlines() if re.search(r"\bC75\d\d\b|setmaxnreg", line)]
        for entry, stored in re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", said, re.S):
            if int(stored) > {**SPILLS, **FULL_SPILLS}.get(re.sub(r"^wgmma_|b?f16_", "", entry), 0):
                spills.append(f"{entry}: {stored} bytes of registers are stored")
        for name, code in sections(cubin):
            entry = re.fullmatch(r"\.text\.(wgmma_(\w+_)?b?f16_(\w+))", name)
            if entry:
                shape = (entry[2] or "") + entry[3]
                barred = {0x948: BARRED[0x948]} if shape in FULL_SPILLS else BARRED
                seen += 1
                gap = 512 if source == SOURCES[3] else 1 << 30
                products = expected(shape, known[shape])
                loops += [f"{entry[1]}: {finding}" for finding in look(code, products, barred, gap)]
    if seen != 2 * len(known):
        loops.append(f"{seen} entries, {2 * len(known)} expected")
    return list(zip(titles, (notes, spills, loops)))


if __name__ == "__main__":
    WRITES = sys.argv[1] == "--write"
    sys.exit(tap.report(write(*sys.argv[2:]) if WRITES else results(*sys.argv[1:])))
