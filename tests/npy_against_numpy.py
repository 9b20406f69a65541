#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The .npy reader and writer against NumPy, as a TAP program.

    npy_against_numpy.py CHECK_NPY

NumPy writes every dtype, byte order, storage order and format version; `check_npy cat` reads the file
and writes another, which NumPy reads again: same dtype (in little-endian order), same bits. Files of
other dtypes must be refused, and so must files that NumPy refuses.
"""

import os
import subprocess
import sys
import tempfile

import checks
from checks import ok

try:
    import numpy as np
    from numpy.lib import format as npy_format
except ImportError:
    sys.exit(checks.skip_all("NumPy is not installed"))

CODES = ["f2", "f4", "f8", "b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
SHAPES = [(), (1,), (7,), (0,), (3, 5), (4, 0, 2), (2, 3, 4), (1, 2, 3, 1, 2, 1, 3, 2), (300, 70)]
VERSIONS = [(1, 0), (2, 0), (3, 0)]


def bits(array):
    """The array's bytes in C order, little-endian."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


def draw(rng, dtype, shape):
    """Any bit pattern, NaN and denormals included; only 0 and 1 in booleans."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, size, dtype=np.uint8).tobytes()
    return np.frombuffer(raw, dtype).reshape(shape)


class Folder:
    def __init__(self, check_npy, path):
        self.check_npy = check_npy
        self.source = os.path.join(path, "in.npy")
        self.target = os.path.join(path, "out.npy")

    def write(self, array, version=None):
        with open(self.source, "wb") as file:
            npy_format.write_array(file, array, version=version)

    def cat(self, *options):
        """Exit status and standard error of the program, and its output if there is one."""
        if os.path.exists(self.target):
            os.remove(self.target)
        ran = subprocess.run([self.check_npy, "cat", *options, self.source, self.target],
                             capture_output=True, text=True, check=False)
        read = np.load(self.target) if os.path.exists(self.target) else None
        return ran.returncode, ran.stderr, read

    def refused(self, *options):
        status, sentence, read = self.cat(*options)
        fine = (status == 2 and read is None and sentence.count("\n") == 1
                and sentence.startswith(self.source + ": "))
        if not fine:
            print("# exit", status, repr(sentence))
        return fine


def same(folder, array, version):
    folder.write(array, version)
    status, sentence, read = folder.cat()
    fine = (status == 0 and read is not None and read.shape == array.shape
            and read.dtype == array.dtype.newbyteorder("<") and bits(read) == bits(array))
    if not fine:
        print("# shape", array.shape, "exit", status, sentence.strip())
    return fine


def test_exchange(folder, rng):
    """Every shape in version 1. Others differ in their headers alone: a third of the shapes, by dtype another."""
    for number, code in enumerate(CODES):
        for mark in "<>":
            for version in VERSIONS:
                fine = True
                for shape in SHAPES if version == (1, 0) else SHAPES[(number + version[0]) % 3::3]:
                    array = draw(rng, np.dtype(mark + code), shape)
                    fine &= same(folder, array, version)
                    if len(shape) > 1:  # otherwise the same file
                        fine &= same(folder, np.asfortranarray(array), version)
                ok(fine, f"{mark}{code}, version {version[0]}, C and Fortran order")


def check_patterns(folder, values, kind, arrays):
    """Numbers that NumPy has no type for, from integers and from raw bytes."""
    raw = values.view(f"V{values.itemsize}")
    bytes_of = raw.dtype.str  # |V1 or |V2
    for name, array in [*arrays, (bytes_of, raw), (f"Fortran {bytes_of}", np.asfortranarray(raw))]:
        folder.write(array)
        status, _, read = folder.cat(f"--{kind}")
        ok(status == 0 and read is not None and read.dtype == values.dtype and np.array_equal(read, values),
           f"{kind} as {name}")
    folder.write(raw)
    ok(folder.refused(), f"raw bytes are refused unless they are {kind}")


def test_bf16(folder, rng):
    values = draw(rng, np.dtype("<u2"), (6, 9))
    check_patterns(folder, values, "bf16", [("<u2", values), (">u2", values.astype(">u2"))])
    floats = draw(rng, np.dtype("<f4"), (6, 9))
    folder.write(floats)
    status, _, read = folder.cat("--bf16")
    ok(status == 0 and read.dtype == np.dtype("<f4"), "the bf16 flag leaves f4 alone")


def test_e4m3(folder, rng):
    values = draw(rng, np.dtype("u1"), (6, 9))
    check_patterns(folder, values, "e4m3", [("|u1", values)])


def test_refusals(folder):
    for array in [np.zeros(3, "c8"), np.zeros(3, "U4"), np.zeros(3, "S4"), np.zeros(3, "M8[s]"),
                  np.zeros(3, "f4,i4"), np.array([None, 1], object), np.zeros(3, np.longdouble),
                  np.zeros((1,) * 9, "f4"), np.zeros(3, [("\u00e9", "f4")])]:
        folder.write(array)
        ok(folder.refused(), f"{array.dtype.descr} of rank {array.ndim} is refused")


def test_corpus(folder, corpus):
    """Files that NumPy cannot read are refused here too; files that both read give the same bits."""
    read_by_both = refused_by_both = 0
    for name in sorted(os.listdir(corpus)):
        with open(os.path.join(corpus, name), "rb") as file, open(folder.source, "wb") as copy:
            copy.write(file.read())
        try:
            theirs = np.load(folder.source)
        except Exception:  # NumPy lets errors of the tokenizer through: of any class
            theirs = None
        status, _, ours = folder.cat()
        if status == 0:
            if theirs is None or ours.shape != theirs.shape or bits(ours) != bits(theirs):
                ok(False, f"{name} is read as NumPy reads it")
            read_by_both += 1
        elif theirs is None:
            refused_by_both += 1
    ok(read_by_both > 10, f"{read_by_both} files of the corpus are read as NumPy reads them")
    ok(refused_by_both > 40, f"{refused_by_both} files of the corpus are refused by both")


def main():
    corpus = os.path.join(os.path.dirname(os.path.abspath(__file__)), "npy_corpus")
    rng = np.random.default_rng(20240607)
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(sys.argv[1], path)
        test_exchange(folder, rng)
        test_bf16(folder, rng)
        test_e4m3(folder, rng)
        test_refusals(folder)
        test_corpus(folder, corpus)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
