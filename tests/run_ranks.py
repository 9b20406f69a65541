#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`fattn run --ranks` under mpiexec against `fattn run`, as a TAP program.

    run_ranks.py FATTN MPIEXEC FOLDER

FOLDER holds libfattn_mpi. Skipped where MPIEXEC cannot start processes, and without NumPy.
"""

import os
import re
import subprocess
import sys
import tempfile

import checks
from checks import ok
from mpi_ranks import ENVIRONMENT

try:
    import numpy as np
except ImportError:
    sys.exit(checks.skip_all("NumPy is not installed"))


class Runs:
    def __init__(self, fattn, mpiexec, library, folder):
        self.fattn, self.mpiexec, self.folder = fattn, mpiexec, folder
        self.environment = {**os.environ, **ENVIRONMENT, "LD_LIBRARY_PATH": library, "FATTN_NUM_THREADS": "1"}

    def path(self, name):
        return os.path.join(self.folder, name + ".npy")

    def save(self, **arrays):
        for name, array in arrays.items():
            np.save(self.path(name), array)

    def run(self, ranks, inputs, outputs, *options, prefix=()):
        """Exit status, words on standard error, and outputs, of which each run has its own files."""
        words = [self.fattn, "run"]
        for name in inputs:
            words += ["--" + name.replace("_", "-"), self.path(name)]
        for name in outputs:
            words += ["--" + name, self.path(f"{name}-{ranks}")]
        if ranks:
            words = [self.mpiexec, "-n", str(ranks), *prefix, *words, "--ranks"]
        ran = subprocess.run([*words, *options], env=self.environment, capture_output=True, text=True, timeout=100,
                             check=False, stdin=subprocess.DEVNULL)
        made = {}
        for name in outputs:
            file = self.path(f"{name}-{ranks}")
            if os.path.exists(file):
                made[name] = np.load(file)
                os.remove(file)
        return ran.returncode, ran.stderr + ran.stdout, made

    def compare(self, what, inputs, outputs, options=(), own=(), counts=(2, 3), tolerance=2e-5):
        status, words, wanted = self.run(0, inputs, outputs, *options)
        fine = status == 0
        for ranks in counts:
            status, words, got = self.run(ranks, inputs, outputs, *options, *own)
            fine = fine and status == 0 and all(
                got[n].dtype == wanted[n].dtype and got[n].shape == wanted[n].shape and
                np.allclose(got[n], wanted[n], tolerance, tolerance) for n in outputs)
            if not fine:
                print("#", ranks, status, words.strip().replace("\n", "\n# "), list(got))
                break
        ok(fine and all(w.any() for w in wanted.values()), what)


def check_results(runs, rng):
    def draw(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    gradients = ("o", "lse", "dq", "dk", "dv")
    runs.save(q=draw(2, 4, 37, 8), k=draw(2, 2, 41, 8), v=draw(2, 2, 41, 6), do=draw(2, 4, 37, 6),
              dlse=draw(2, 4, 37), sink=draw(4))
    both = ("q", "k", "v", "do", "dlse", "sink")
    for split in ("zigzag", "contiguous", "striped"):
        runs.compare(f"forward and backward, {split}", both, (*gradients, "dsink"),
                     ("--backward", "--causal", "--layout", "bhsd"), ("--split", split))
    runs.compare("to f16", ("q", "k", "v"), ("o", "lse"), ("--dtype", "f16", "--layout", "bhsd"), tolerance=3e-3)
    runs.save(q=draw(1, 30, 6, 8), k=draw(1, 30, 6, 8), v=draw(1, 30, 6, 8))
    runs.compare("heads", ("q", "k", "v"), ("o",), (), ("--scheme", "heads"))
    runs.save(q=draw(1, 3, 6, 8))
    runs.compare("few queries, reduced", ("q", "k", "v"), ("o", "lse"), (), ("--scheme", "reduce"))
    runs.save(q=draw(1, 1, 6, 8), do=draw(1, 1, 6, 8))
    runs.compare("fewer queries than ranks", ("q", "k", "v"), ("o", "lse"), (), ())
    runs.compare("the same with backward", ("q", "k", "v", "do"), gradients, ("--backward",), ())
    runs.save(q=draw(50, 2, 8), k=draw(60, 2, 8), v=draw(60, 2, 8), do=draw(50, 2, 8),
              cu_seqlens_q=np.array([0, 20, 20, 47]), cu_seqlens_k=np.array([0, 30, 33, 58]))
    runs.compare("ragged", ("q", "k", "v", "do", "cu_seqlens_q", "cu_seqlens_k"), gradients,
                 ("--backward", "--causal"))
    runs.save(q=draw(2, 20, 2, 8), k=draw(2, 22, 2, 8), v=draw(2, 22, 2, 8), do=draw(2, 20, 2, 8),
              bias=draw(2, 20, 22), mask=rng.random((22,)) < 0.7)
    runs.compare("bias and mask", ("q", "k", "v", "do", "bias", "mask"), (*gradients, "dbias"), ("--backward",))
    runs.save(bias=draw(2, 1, 1, 22), q=draw(2, 20, 2, 8).astype(">f8"))
    runs.compare("a bias for all rows, f64 of another byte order", ("q", "k", "v", "bias"), ("o", "lse"),
                 ("--dtype", "f32"))


def check_refusals(runs, rng):
    def refused(what, words, inputs, *options):
        status, said, made = runs.run(2, inputs, ("o",), *options)
        fine = status != 0 and words in said and not made
        print("#", said.strip().splitlines()[0] if said.strip() else "")
        ok(fine, what)

    runs.save(q=rng.standard_normal((1, 8, 2, 4), np.float32))
    for name in "kv":
        np.save(runs.path(name), np.asfortranarray(rng.standard_normal((1, 8, 2, 4), np.float32)))
    refused("Fortran order", "Fortran order", ("q", "k", "v"))
    os.remove(runs.path("sink"))
    refused("a missing file", "cannot be opened", ("q", "k", "v", "sink"))
    refused("scores", "--ranks cannot be combined with", ("q", "k", "v"), "--scores", runs.path("s"))
    status, said, _ = runs.run(0, ("q", "k", "v"), ("o",), "--split", "zigzag")
    ok(status == 2 and "needs --ranks" in said, "--split alone")
    ok(not [f for f in os.listdir(runs.folder) if f.startswith(".fattn")], "no temporary file is left")


def check_bench(runs):
    """A line for each case, with a forecast beside each time."""
    words = [runs.mpiexec, "-n", "2", runs.fattn, "bench", "--ranks", "--sq", "64,65", "--dir", "fwd,bwd", "--causal",
             "--hq", "2", "--d", "16", "--reps", "2"]
    ran = subprocess.run(words, env=runs.environment, capture_output=True, text=True, timeout=100, check=False,
                         stdin=subprocess.DEVNULL)
    head, *rows = [line.split("\t") for line in ran.stdout.splitlines()] or [[]]
    columns = [dict(zip(head, row)) for row in rows]
    ok(ran.returncode == 0 and len(rows) == 4 and
       all(c["ranks"] == "2" and c["split"] == "zigzag" and float(c["median_ms"]) > 0 and float(c["forecast_ms"]) > 0 and
           int(c["plan_bytes"]) > 0 for c in columns), "bench --ranks: 4 lines")
    # (As one more rank: mpiexec may bind each to a processor, of which plans depend.)
    told = [subprocess.run([runs.mpiexec, "-n", "1", runs.fattn, "explain", "--ranks", "2", "--link", "1e9", "--rate", "1e9",
                            "--sq", c["Sq"], "--dir", c["dir"], "--causal", "--hq", "2", "--d", "16", "--scheme",
                            c["scheme"]], env=runs.environment, capture_output=True, text=True,
                           check=False).stdout for c in columns if c["Sq"] == "64"]
    bytes_ = [c["plan_bytes"] for c in columns if c["Sq"] == "64"]
    ok(len(told) == 2 and all(f"and {b} of its plan" in t for t, b in zip(told, bytes_)),
       f"explain --ranks foretells what plans hold: {' and '.join(bytes_)} bytes")
    ran = subprocess.run([*words, "--scheme", "heads", "--saves"], env=runs.environment, capture_output=True, text=True,
                         timeout=100, check=False, stdin=subprocess.DEVNULL)
    ok(ran.returncode == 0 and ran.stdout.count("\theads\t") == 4, "bench --ranks --saves: 4 lines of heads")
    ran = subprocess.run([*words, "--mask"], env=runs.environment, capture_output=True, text=True, timeout=100,
                         check=False, stdin=subprocess.DEVNULL)
    ok(ran.returncode != 0 and "--ranks does not measure problems with mask" in ran.stderr, "bench --ranks with a mask")
    alone = subprocess.run([runs.fattn, "bench", "--scheme", "ring"], capture_output=True, text=True, check=False)
    ok(alone.returncode == 2 and "need --ranks" in alone.stderr, "bench --scheme alone")


def check_memory(runs, rng):
    """Four ranks read a quarter of keys and values each."""
    keys = 98304
    runs.save(q=rng.standard_normal((1, 1, 4, 32), np.float32), k=np.ones((1, keys, 4, 32), np.float32),
              v=np.ones((1, keys, 4, 32), np.float32))
    # (One write: print() makes several on a terminal, which mpiexec's is, and those of ranks mix.)
    measure = [sys.executable, "-c", "import os, resource, subprocess, sys; s = subprocess.run(sys.argv[1:]).returncode; "
               "os.write(1, b'peak %d\\n' % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(s)"]
    status, said, made = runs.run(4, ("q", "k", "v"), ("o",), "--scheme", "reduce", prefix=measure)
    peaks = [int(n) / 1024 for n in re.findall(r"peak (\d+)", said)]
    ok(status == 0 and len(peaks) == 4 and max(peaks) < 96 and np.allclose(made["o"], 1),
       f"96 MiB of keys and values on 4 ranks of {max(peaks, default=0):.0f} MiB")


def main(fattn, mpiexec, library):
    environment = {**os.environ, **ENVIRONMENT}
    for ranks in "234":
        started = subprocess.run([mpiexec, "-n", ranks, "true"], env=environment, capture_output=True, timeout=60,
                                 check=False, stdin=subprocess.DEVNULL)
        if started.returncode:
            return checks.skip_all(f"{mpiexec} cannot start {ranks} processes here")
    with tempfile.TemporaryDirectory() as folder:
        runs, rng = Runs(fattn, mpiexec, library, folder), np.random.default_rng(5)
        check_results(runs, rng)
        check_refusals(runs, rng)
        check_bench(runs)
        check_memory(runs, rng)
    return checks.done()


sys.exit(main(*sys.argv[1:]))
