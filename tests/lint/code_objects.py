# SPDX-License-Identifier: Apache-2.0
"""What the kernels for AMD's processors need, read from the code objects that the library holds: nothing in
memory of a thread's own, registers and LDS (shared memory) below ceilings, loops of products that do
products, those on matrix units exactly a tile's, and waits for what a block stored before it is counted.

usage: code_objects.py OBJDUMP [CODE_OBJECT]...

OBJDUMP is an llvm-objdump that knows these processors; - stands for none. No code object: no backend hip.
"""

import bisect
import functools
import os
import re
import struct
import subprocess
import sys

import tap

# Beginning of a kernel's name: most bytes of LDS, and most vector registers, those for
# accumulators included. The first that fits counts.
CEILINGS = [
    ("matrix_backward", 60416, 416),
    ("matrix_", 49408, 352),  # 48 KB, and a flag of gpu_any()
    ("simt_decode", 22528, 256),
    ("simt_forward", 35840, 264),
    ("simt_backward_keys", 36864, 288),
    ("simt_backward_queries", 36864, 272),
    ("simt_backward_bias", 36864, 224),
    ("simt_backward_rows", 0, 80),
    ("simt_backward_lone", 0, 96),
    ("combine_rows", 0, 224),  # 32 floats of parts are on their way at once
    ("combine", 0, 176),
    ("rows_", 0, 104),  # whole rows of o and dO are on their way at once
    ("dq_", 0, 80),
    ("", 1024, 64),
]

# Kernels that multiply tiles, and the fewest products of a loop that does.
TILED = r"simt_(decode|forward|backward_(keys|queries|bias))"
PRODUCTS = 96

# Products an instruction, by what matches; those that issue two say so twice.
PRODUCT = [(r"v_pk_fma\w*_f32", 2), (r"v_(dual_)?fm(a|ac|aak|amk)_f32", 1)]
# Values that wait in lanes of another register, or among the accumulators.
MOVE = r"v_(read|write)lane|v_accvgpr_(read|write)"
MOVES = 11  # at most one of so many instructions
NARROW = ("ds_read_i16", "ds_read_u16", "ds_load_i16", "ds_load_u16")

# Kernels that count in memory how many blocks are done, the instruction that does, and, by what a processor is
# called, the wait for all that a wave stored.
COUNTED = r"simt_decode"
COUNT = r"\w+_atomic_add_(x2|u64) "
STORED = [("gfx9", r"s_waitcnt .*vmcnt\(0\)"), ("gfx12", r"s_wait_storecnt(_dscnt)? 0x0"),
          ("gfx1", r"s_waitcnt_vscnt null, 0x0")]

# Images that have no kernels: those on matrix units, for processors without the units that they are for.
EMPTY = r"/matrix_\w+\.(gfx906|gfx908|gfx1030|gfx1250)\.co$"

# Kernels on matrix units: their names, the header and the list there of their shapes, X(width, rows, keys,
# ...), for waves of 64 and of 32, and how many products of rows, keys and width a wave makes of a tile.
MATRIX = r"v_(?:mfma|wmma)_f32_(\d+)x(\d+)x(\d+)"
HEADERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "backends", "hip")
SHAPES = [
    (r"matrix_(?:lean|full)_b?f16_(\d+)", "matrix.h", {64: "MATRIX_MFMA_SHAPES", 32: "MATRIX_WMMA_SHAPES"},
     lambda lanes, rows, keys, _: 2 * lanes // 2 * keys),  # of two products, for half as many rows as lanes
    (r"matrix_backward_(?:lean|full)_b?f16_(\d+)", "matrix_backward.h",
     {64: "MATRIX_BACKWARD_MFMA", 32: "MATRIX_BACKWARD_WMMA"},
     lambda _, rows, keys, waves: 5 * rows * keys // waves),  # of five, its part of the tile
]


class Reader:
    """MessagePack, of which metadata is made."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        size = struct.calcsize(form)
        value, = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def value(self):
        tag = self.take("B")
        if tag < 0x80 or tag >= 0xe0:
            return tag if tag < 0x80 else tag - 256
        if tag < 0x90:
            return {self.value(): self.value() for _ in range(tag & 15)}
        if tag < 0xa0:
            return [self.value() for _ in range(tag & 15)]
        if tag < 0xc0:
            return self.take(f"{tag & 31}s").decode()
        scalars = {0xcc: "B", 0xcd: ">H", 0xce: ">I", 0xcf: ">Q", 0xd0: "b", 0xd1: ">h", 0xd2: ">i", 0xd3: ">q"}
        sizes = {0xd9: "B", 0xda: ">H", 0xdb: ">I", 0xdc: ">H", 0xdd: ">I", 0xde: ">H", 0xdf: ">I"}
        if tag in scalars:
            return self.take(scalars[tag])
        if tag in sizes:
            size = self.take(sizes[tag])
            return (self.take(f"{size}s").decode() if tag < 0xdc else
                    [self.value() for _ in range(size)] if tag < 0xde else
                    {self.value(): self.value() for _ in range(size)})
        return {0xc0: None, 0xc2: False, 0xc3: True}[tag]


def metadata(path):
    """The kernels of a code object: dictionaries."""
    with open(path, "rb") as file:
        data = file.read()
    headers, = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    for n in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, headers + n * size)
        end = offset + length
        while kind == 4 and offset < end:  # notes
            name, body, sort = struct.unpack_from("<III", data, offset)
            offset += 12
            owner = data[offset:offset + name].rstrip(b"\0")
            offset += -(-name // 4) * 4
            if (owner, sort) == (b"AMDGPU", 32):
                return Reader(data[offset:offset + body]).value()["amdhsa.kernels"]
            offset += -(-body // 4) * 4
    return []


def disassemble(objdump, path):
    """Per function: (address, instruction, address that it jumps to or None)."""
    text = subprocess.run([objdump, "-d", path], capture_output=True, text=True,
                          check=True).stdout
    functions, code, begin = {}, [], 0
    for line in text.split("\n"):
        if not line[:1].isspace():
            head = re.match(r"([0-9a-f]+) <(.*)>:", line)
            if head:
                begin, code = int(head.group(1), 16), functions.setdefault(head.group(2), [])
            continue
        instruction, comment, rest = line.strip().partition("// ")
        if comment:
            to = "branch" in instruction and re.search(r"<[^>]*?(?:\+0x([0-9a-f]+))?>$", line)
            code.append((int(rest.partition(":")[0], 16), instruction.rstrip(),
                         begin + int(to.group(1) or "0", 16) if to else None))
    return functions


def between(code, ranges):
    """The instructions of each range of addresses, both ends included."""
    addresses, texts = [at for at, _, _ in code], [text for _, text, _ in code]
    for first, last in ranges:
        yield texts[bisect.bisect_left(addresses, first):bisect.bisect_right(addresses, last)]


def loops(code):
    """The instructions of each innermost loop."""
    found = [(to, at) for at, _, to in code if to is not None and to <= at]
    return between(code, [(start, end) for start, end in found if not any(
        start <= s and e <= end and (s, e) != (start, end) for s, e in found)])


def spans(code):
    """The instructions of each loop, the shortest first."""
    found = {(to, at) for at, _, to in code if to is not None and to <= at}
    return between(code, sorted(found, key=lambda span: (span[1] - span[0], span)))


def tile_products(name, lanes):
    """How many products a wave of the kernel makes of a tile, or None for another kernel."""
    for pattern, header, lists, count in SHAPES:
        match = re.fullmatch(pattern, name)
        if match:
            with open(os.path.join(HEADERS, header), encoding="utf-8") as file:
                text = re.search(rf"#define {lists[lanes]}\(X\)((?:.*\\\n)*.*)", file.read()).group(1)
            shapes = {width: map(int, sizes) for width, *sizes in re.findall(r"X\((\d+), (\d+), (\d+), (\d+)", text)}
            return count(lanes, *shapes[match.group(1)]) * int(match.group(1))
    return None


# The same instructions come again and again: each text is matched once.
@functools.cache
def products_of(text):
    return sum(len(re.findall(pattern, text)) * count for pattern, count in PRODUCT)


@functools.cache
def matrix_products_of(text):
    sizes = re.match(MATRIX, text)
    return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) if sizes else 0


@functools.cache
def moves(text):
    return re.match(MOVE, text) is not None


def products(body):
    return sum(map(products_of, body))


def spills(path, kernels):
    for kernel in kernels:
        for field in (".vgpr_spill_count", ".private_segment_fixed_size"):
            if kernel[field]:
                yield f"{path}: {kernel['.name']}: {field[1:]} is {kernel[field]}"


def heights(path, kernels):
    for kernel in kernels:
        _, lds, registers = next(row for row in CEILINGS if kernel[".name"].startswith(row[0]))
        for field, most in ((".group_segment_fixed_size", lds), (".vgpr_count", registers)):
            if kernel[field] > most:
                yield f"{path}: {kernel['.name']}: {field[1:]} is {kernel[field]}, more than {most}"


def busy(path, functions):
    """Loops of products that move values about, and kernels of tiles without such loops."""
    for name, code in functions.items():
        tiled = [body for body in loops(code) if products(body) >= PRODUCTS]
        if re.match(TILED, name) and not tiled:
            yield f"{path}: {name}: has no loop of products"
        for body in tiled:
            moving = [text for text in body if moves(text)]
            if MOVES * len(moving) > len(body):
                yield f"{path}: {name}: {len(moving)} of {len(body)} instructions move values, such as {moving[0]}"


def matrices(path, kernels, functions):
    """Kernels on matrix units without a loop that makes exactly the products of a tile, or whose loop moves
    values about."""
    for kernel in kernels:
        name = kernel[".name"]
        wanted = tile_products(name, kernel[".wavefront_size"])
        if wanted is None:
            continue
        made = {}
        for body in spans(functions[name]):
            made.setdefault(sum(map(matrix_products_of, body)), body)
        if wanted not in made:
            yield f"{path}: {name}: no loop makes the {wanted} products of a tile, but {sorted(made)}"
            continue
        moving = sum(map(moves, made[wanted]))
        if MOVES * moving > len(made[wanted]):
            yield f"{path}: {name}: {moving} of {len(made[wanted])} instructions move values"


def narrow(path, functions):
    for name, code in functions.items():
        reads = [text for _, text, _ in code if text.startswith(NARROW)]
        if reads:
            yield f"{path}: {name}: {len(reads)} reads of 2 bytes of LDS, such as {reads[0]}"


def counts(path, functions):
    """Blocks that may be counted before what they stored is there: before the barrier that the counting thread
    has come from, each wave is to wait for its stores."""
    for name, code in functions.items():
        texts = [text for _, text, _ in code]
        counting = [n for n, text in enumerate(texts) if re.match(COUNT, text)]
        if re.match(COUNTED, name) and not counting:
            yield f"{path}: {name}: counts no blocks"
        for n in counting:
            wait = next(wait for name, wait in STORED if f".{name}" in path)
            before = iter(texts[n::-1])
            next((text for text in before if text.startswith("s_barrier")), None)
            last = next((text for text in before if re.match(wait, text) or re.match(r"(global|flat)_store", text)), "")
            if not re.match(wait, last):
                yield f"{path}: {name}: does not wait for {last or 'stores'} before blocks are counted"


def results(objdump, *paths):
    titles = ("no kernel spills", "registers and LDS", "loops of products", "LDS is read in words",
              "loops on matrix units", "blocks are counted when they are done")
    if not paths:
        return [(title, tap.Skip("this build has no backend hip")) for title in titles]
    kernels = {path: metadata(path) for path in paths}
    code = {} if objdump == "-" else {path: disassemble(objdump, path) for path in paths}
    def each(lint, read):
        return ([f for path in read for f in lint(os.path.basename(path), read[path])] if read else
                tap.Skip("there is no llvm-objdump for AMD's processors"))
    return [
        (f"{titles[0]}: {sum(map(len, kernels.values()))} of them",
         [f"{path}: no kernels" for path in paths if not kernels[path] and not re.search(EMPTY, path)] +
         each(spills, kernels)),
        (titles[1], each(heights, kernels)),
        (titles[2], each(busy, code)),
        (titles[3], each(narrow, code)),
        (titles[4], each(lambda path, both: matrices(path, *both), {p: (kernels[p], code[p]) for p in code})),
        (titles[5], each(counts, code)),
    ]


if __name__ == "__main__":
    sys.exit(tap.report(results(*sys.argv[1:])))
