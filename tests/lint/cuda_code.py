# SPDX-License-Identifier: Apache-2.0
"""The machine code of the mma.sync and multiply-add kernels for sm_80 and sm_90: registers, instructions
that reach a thread's own memory (spills) and products of tensor cores of each entry, below what
cuda_code.txt lists. Kernels of Hopper's own instructions have hopper_code.py.

usage: cuda_code.py ROOT NVCC [CUBIN]...
       cuda_code.py --write ROOT NVCC CUBIN...

CUBINs are those of a build with full optimisation, all of whose entries are judged. Without them the list
stands for sources that are those it was made from, whatever their comments say. Of an image whose sources
are others, a few entries are compiled for sm_80 and judged; - stands for no NVCC. --write lists the images
anew of which it is given the CUBINs of both architectures, from a build with -Dcuda-archs=80,90.
"""

import os
import re
import struct
import subprocess
import sys
import tempfile

import hopper_code
import tap

LIST = "tests/lint/cuda_code.txt"
ARCHS = ("80", "90")
IMAGES = ("bf16x3_backward", "bf16x3_forward", "mma_backward", "mma_decode", "mma_decode_e4m3", "mma_forward",
          "mma_forward_e4m3", "simt_backward", "simt_forward", "simt_wide")

# Of an image whose sources have changed: lists of shapes that are cut to these before it is compiled. Images that
# have no such list take a minute and are left to optimised builds.
SAMPLES = {
    "mma_forward": {"MMA_SHAPES(X)": "X(lean, 0, 128, 128, 64, 2, 2, 4, 2) X(full, MMA_ANY, 128, 128, 64, 2, 2, 4, 2)"},
    "mma_decode": {"MMA_DECODE_SHAPES(X)": "X(128, 16, 4, 3)", "MMA_DECODE_WIDE_SHAPES(X)": ""},
    "mma_decode_e4m3": {"MMA_DECODE_E4M3_SHAPES(X)": "X(128, 32, 4, 3)", "MMA_DECODE_E4M3_WIDE_SHAPES(X)": "",
                        "MMA_DECODE_E4M3_FULL_SHAPES(X)": ""},
    "mma_forward_e4m3": {"MMA_WIDEN_SHAPES(X)": "X(e4m3, 0, 128, 128, 64, 2, 4, 2)"},
    "mma_backward": {"MMA_BACKWARD_SHAPES(X)": "X(128, 64, 128)", "MMA_RUNS_OF_ONE(Y, ...)": ""},
    "bf16x3_forward": {"BF16X3_SHAPES(X)": "X(forward, 0, 128, 128, 64, 1, 8, 1) X(full, MMA_ANY, 128, 64, 32, 1, 4, 2)"},
    "bf16x3_backward": {"BF16X3_BACKWARD_SHAPES(X)": "X(64, 32, 128, 8, 2, 2, 1)"},
}

# Lowest twelve bits of an instruction: products of tensor cores, loads and stores of a thread's own memory.
PRODUCT, LOCAL = 0x23C, (0x983, 0x387)

HEAD = """\
# Entries of the CUDA kernels that are not Hopper's own, by cuda_code.py --write: for sm_80 and for sm_90 registers,
# loads and stores of a thread's own memory (spills), and products of tensor cores, in the code of nvcc {}.
# A line of an image has the digest of its sources.
"""


def kernels(image):
    return f"backends/cuda/kernels/{image}.cu"


def registers(parts):
    """name: registers of each function, by attributes 2f of .nv.info: a symbol and a number."""
    info, at, found = parts[".nv.info"], 0, {}
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (4, 0x2F):
            symbol, number = struct.unpack_from("<II", info, at + 4)
            name, = struct.unpack_from("<I", parts[".symtab"], 24 * symbol)
            found[parts[".strtab"][name:].split(b"\0", 1)[0].decode()] = number
        at += 4 + (size if form == 4 else 0)
    return found


def entries(elf):
    """name: (registers, loads and stores of own memory, products) of the kernels in a cubin."""
    parts, found = dict(hopper_code.sections(elf)), {}
    for name, number in registers(parts).items():
        words = [word & 0xFFF for word, in struct.iter_unpack("<H14x", parts[".text." + name])]
        found[name] = (number, sum(word in LOCAL for word in words), words.count(PRODUCT))
    return found


def listed(text):
    """image: (digest, {entry: figures for each of ARCHS}) of the list."""
    images = {}
    for line in text.splitlines():
        words = line.split()
        if line.startswith("image "):
            rows = {}
            images[words[1]] = (words[2], rows)
        elif not line.startswith("#"):
            figures = list(map(int, words[1:]))
            rows[words[0]] = dict(zip(ARCHS, (tuple(figures[:3]), tuple(figures[3:]))))
    return images


def judge(image, arch, found, rows):
    """Findings about entries of an image for an architecture."""
    for name, figures in found.items():
        if name not in rows:
            yield f"{image}: {name} is not in {LIST}"
            continue
        for what, has, most in zip(("registers", "loads and stores of own memory", "products"),
                                   figures, rows[name][arch]):
            if has > most:
                yield f"{image}: {name}, sm_{arch}: {has} {what}, {most} are listed"


def compile_sample(root, nvcc, image):
    """Entries of a part of an image, and notes of ptxas about its code."""
    lists = "".join(f"#undef {macro.split('(')[0]}\n#define {macro} {shapes}\n"
                    for macro, shapes in SAMPLES[image].items())
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "sample.cu")
        with open(source, "w", encoding="utf-8") as file:
            file.write(f'#include "backends/cuda/vendor.h"\n#include "backends/cuda/mma_widen.h"\n{lists}'
                       f'#include "backends/cuda/kernels/{image}.cu"\n')
        cubin, said = hopper_code.compile_image(root, nvcc, folder, source, "80", ["-DFATTN_BAND_CHUNKS=0"])
    return entries(cubin), [line for line in said.splitlines() if re.search(r"\bC75\d\d\b", line)]


def results(root, nvcc, *cubins):
    images = listed(tap.read(root, LIST))
    found = []
    for path in cubins:
        image, arch, _ = os.path.basename(path).split(".")
        if image in images and arch in ARCHS:
            with open(path, "rb") as file:
                found += judge(image, arch, entries(file.read()), images[image][1])
    changed = [image for image in IMAGES if image not in images or images[image][0] != tap.digest(root, kernels(image))]
    every = ("entries of this build stay below the list",
             found if cubins else tap.Skip("this build is not fully optimised"))
    title = "sources are those of the list, or a sample of their entries stays below it"
    samples = [image for image in changed if image in SAMPLES and image in images]
    if samples and nvcc == "-":
        return [every, (title, tap.Skip(f"changed, and there is no nvcc: {' '.join(samples)}"))]
    found = [f"{image} is not in {LIST}" for image in changed if image not in images]
    for image in samples:
        some, notes = compile_sample(root, nvcc, image)
        found += notes + list(judge(image, "80", some, images[image][1]))
        found += [] if len(some) > 1 else [f"{image}: the sample has no entry"]
    words = f" (a sample of {', '.join(samples)})" if samples else ""
    left = [image for image in changed if image not in SAMPLES and image in images]
    words += f" (changed, left to optimised builds: {', '.join(left)})" if left else ""
    return [every, (title + words, found)]


def write(root, nvcc, *cubins):
    """Lists the entries of a build's images, and keeps those of others."""
    version = re.search(r"release ([\d.]+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True,
                                                            check=True).stdout)[1]
    paths = {tuple(os.path.basename(path).split(".")[:2]): path for path in cubins}
    images = listed(tap.read(root, LIST))
    for image in IMAGES:
        if all((image, arch) in paths for arch in ARCHS):
            rows = {}
            for arch in ARCHS:
                with open(paths[image, arch], "rb") as file:
                    for name, figures in entries(file.read()).items():
                        rows.setdefault(name, {})[arch] = figures
            images[image] = (tap.digest(root, kernels(image)), rows)
    lines = [HEAD.format(version)]
    for image, (sources, rows) in sorted(images.items()):
        lines.append(f"image {image} {sources}\n")
        lines += [" ".join(map(str, (name, *row["80"], *row["90"]))) + "\n" for name, row in sorted(rows.items())]
    with open(os.path.join(root, LIST), "w", encoding="utf-8") as file:
        file.write("".join(lines))


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(*sys.argv[2:])
    else:
        sys.exit(tap.report(results(*sys.argv[1:])))
