#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The tool's response to wrong usage, as a TAP program: exit status, one line on stderr, no file left behind.

    tool_usage.py FATTN
"""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile

import checks
from checks import ok

try:
    import numpy as np
except ImportError:
    sys.exit(checks.skip_all("NumPy is not installed"))

QKV = "--q q.npy --k k.npy --v v.npy --o out.npy"
BACKWARD = "--q q.npy --k k.npy --v v.npy --backward --do o.npy --dq dq.npy"

# command line, exit status, part of the line on stderr
REFUSED = [
    ("", 2, None),
    ("flash", 2, 'no command "flash"'),
    ("run --frob", 2, 'unknown option "--frob"'),
    ("run q.npy", 2, 'unknown argument "q.npy"'),
    ("run -q q.npy", 2, 'unknown argument "-q"'),
    ("run --q", 2, "--q needs a value"),
    ("run --q --k k.npy", 2, "--q needs a value"),
    ("run --q a --q b", 2, "--q is given twice"),
    ("run --causal=2", 2, '--causal: "2" is not one of 0, 1'),
    ("run --causal=0,1", 2, '--causal: "0,1" has 2 values where 1 are needed'),
    ("run --backward=1", 2, "--backward takes no value"),
    ("run --scale 1,2", 2, '--scale: "1,2" has 2 values where 1 are needed'),
    ("run --scale 1e", 2, '--scale: "1e" is not a number'),
    ("run --scale=", 2, '--scale: "" is not a number'),
    ("run --window 3", 2, '--window: "3" has 1 values where 2 are needed'),
    ("run --window 3,x", 2, '--window: "x" is not an integer'),
    ("run --window 3,99999999999999999999", 2, "--window"),
    ("run --seed -1", 2, '--seed: "-1" is not an integer between 0'),
    ("run --anchor left", 2, '--anchor: "left" is not one of bottom-right, top-left'),
    ("run --dtype f8", 2, "one of f32, f16, bf16, f64"),
    ("run --dtype e4m3", 2, "one of f32, f16, bf16, f64"),
    ("run --q q.npy", 2, "needs --q, --k and --v"),
    ("run --q q.npy --k k.npy --v v.npy", 2, "needs --o, --lse, --scores or --probabilities"),
    (f"run {QKV} --lse out.npy", 2, "two outputs are named out.npy"),
    (f"run {QKV} --dq dq.npy", 2, "--dq needs --backward"),
    (f"run {QKV} --backward --dq dq.npy", 2, "--backward needs --do"),
    (f"run {QKV} --backward --do o.npy", 2, "--backward needs one of --dq"),
    (f"run {BACKWARD} --dbias db.npy", 2, "--dbias needs --backward and --bias"),
    (f"run {BACKWARD} --dsink ds.npy", 2, "--dsink needs --backward and --sink"),
    (f"run {QKV} --k-descale f4.npy", 2, "--k-descale needs --v-descale"),
    (f"run {QKV} --v-descale f4.npy", 2, "--v-descale needs --k-descale"),
    (f"run {QKV} --seed 3", 2, "--seed needs --dropout"),
    (f"run {QKV} --anchor top-left", 2, "--anchor needs --causal, --window"),
    (f"run {QKV} --causal=0 --anchor top-left", 2, "--anchor needs --causal, --window"),
    (f"run {QKV} --q-offset 3", 2, "--q-offset needs --causal, --window, --alibi"),
    (f"run {QKV} --whole-k 9 --dropout 0.5", 2, "--whole-k needs --causal, --window"),
    (f"run {QKV} --q-offsets i4.npy", 2, "--q-offsets or --k-offsets needs --causal"),
    (f"run {QKV} --causal --q-offset 1 --q-offsets i4.npy", 2, "--q-offsets cannot be combined with --q-offset"),
    (f"run {QKV} --causal --wholes-k i4.npy", 2, "i4.npy: shape (3) is not (2) = (B)"),
    (f"run {QKV} --batch-offset 1", 2, "--batch-offset needs --dropout"),
    (f"run {QKV} --block-size 4,4", 2, "--block-size needs --block-mask"),
    (f"run {QKV} --deterministic", 2, "--deterministic applies only to gradients"),
    (f"run {QKV} --accumulate", 2, "--accumulate applies only to gradients"),
    (f"run {BACKWARD} --batch-invariant", 2, "--batch-invariant applies only to forward"),
    (f"run {BACKWARD} --accumulate", 2, "dq.npy"),
    (f"run {BACKWARD.replace('dq.npy', 'wide.npy')} --accumulate", 2,
     "wide.npy: (2, 7, 2, 9) of f32 cannot be added to, (2, 5, 4, 8) of f32 can"),
    (f"run {QKV} --alibi-bias", 2, "--alibi-bias needs --alibi and --bias"),
    (f"run {QKV} --seqstart-k i4.npy", 2, "i4.npy: shape (3) is not (2) = (B)"),
    (f"run {QKV} --block-mask mask.npy", 2, "--block-mask needs --block-size"),
    (f"run {QKV} --block-size 0,4", 2, '--block-size: "0" is not between 1 and'),
    (f"run {QKV.replace('q.npy', 'absent.npy', 1)}", 2, "absent.npy"),
    (f"run {QKV.replace('q.npy', 'text.npy', 1)}", 2, "text.npy"),
    (f"run {QKV.replace('q.npy', 'short.npy', 1)}", 2, "short.npy"),
    (f"run {QKV.replace('q.npy', 'i4.npy', 1)}", 2, "i4.npy holds i32 where floating-point numbers are needed"),
    (f"run {QKV.replace('k.npy', 'i4.npy', 1)} --dtype f32", 2, "i4.npy holds i32"),
    (f"run {QKV.replace('q.npy', 'vector.npy', 1)}", 2,
     "vector.npy: shape (7) is not (any, any, any, any) = (B, Sq, Hq, D)"),
    (f"run {QKV.replace('k.npy', 'wide.npy', 1)}", 2,
     "wide.npy: shape (2, 7, 2, 9) is not (2, any, any, 8) = (B, Sk, Hk, D)"),
    (f"run {QKV.replace('v.npy', 'q.npy', 1)}", 2, "q.npy: shape (2, 5, 4, 8) is not (2, 7, 2, any) = (B, Sk, Hk, Dv)"),
    (f"run {BACKWARD.replace('o.npy', 'q.npy')}", 2, "q.npy: shape (2, 5, 4, 8) is not (2, 5, 4, 6)"),
    (f"run {QKV} --bias vector.npy --sink vector.npy", 2, "vector.npy: shape (7) is not (4) = (Hq)"),
    (f"run {QKV} --bias bias.npy", 2, "bias.npy: shape (3, 7) does not broadcast to (2, 4, 5, 7) = (B, Hq, Sq, Sk)"),
    (f"run {QKV} --bias deep.npy", 2, "deep.npy: shape (1, 1, 1, 1, 1) does not broadcast"),
    (f"run {QKV} --mask q.npy", 2, "q.npy holds f32 where bool or u8 is needed"),
    (f"run {QKV} --alibi bias.npy", 2, "bias.npy: shape (3, 7) is not (2, 4) = (B, Hq)"),
    (f"run {QKV} --seqused-k q.npy", 2, "q.npy holds f32 where integers are needed"),
    (f"run {QKV} --seqused-k big.npy", 2, "big.npy: element 1 is 2147483648, which int32 cannot hold"),
    (f"run {QKV} --seqused-k i4.npy", 2, "i4.npy: shape (3) is not (2) = (B)"),
    (f"run {QKV} --cu-seqlens-q i4.npy", 2, "q.npy: shape (2, 5, 4, 8) is not (any, any, any) = (total_q, Hq, D)"),
    (f"run {QKV.replace('out.npy', 'no/folder/out.npy')}", 2, "no/folder/out.npy"),
    (f"run {QKV.replace('out.npy', '/dev/stdout')}", 2, "/dev/stdout: is not a regular file with a name"),
    (f"run {QKV} --lse no/folder/lse.npy", 2, "no/folder/lse.npy"),
    (f"run {QKV} --device quantum", 3, "fattn: FATTN_UNKNOWN_DEVICE: "),
    (f"run {QKV} --softcap -2", 2, "fattn: FATTN_INVALID_ARGUMENT: "),
    (f"run {QKV} --window=-2,0", 2, "window_left is -2"),
    (f"run {QKV} --dropout 1.5", 2, "dropout_p is 1.5"),
    (f"run {QKV} --dropout 0 --seed 3", 2, "seed"),
    (f"run {QKV} --chunk 0", 2, "chunk is 0"),
    (f"run {QKV.replace('q.npy', 'three.npy', 1)}", 2, "heads_q is 3, not a multiple of heads_k, 2"),
    (f"run {QKV} --scale nan", 2, "fattn: FATTN_INVALID_ARGUMENT: "),
    (f"run {QKV} --pointer-alignment 3", 2, "pointer_alignment is 3, not a power of two"),
    (f"run {QKV} --pointer-alignment 8192", 2, '--pointer-alignment: "8192" is not between 1 and 4096'),
    (f"run {QKV} --seqused-k used.npy", 2, "fattn: FATTN_INVALID_DATA: "),
    (f"run {QKV} --dtype f64 --device cpu", 3, "fattn: FATTN_UNSUPPORTED: "),
    ("run --q f8.npy --k k.npy --v v.npy --o out.npy --device cpu", 3, "(f8.npy holds f64; --dtype f32 converts)"),
    ("run --q copy.npy --k k.npy --v v.npy --o copy.npy", 2, "output copy.npy is the file of an input, copy.npy"),
    ("run --q copy.npy --k k.npy --v v.npy --o out.npy --lse ./soft.npy", 2,
     "output ./soft.npy is the file of an input, copy.npy"),
    ("run --q copy.npy --k k.npy --v v.npy --o hard.npy", 2, "output hard.npy is the file of an input, copy.npy"),
    ("run --q q.npy --k k.npy --v v.npy --o soft.npy --lse hard.npy", 2, "outputs soft.npy and hard.npy are one file"),
    (f"run {QKV} --device reference --threads 2", 3, "threads"),
    (f"run {QKV} --threads 1025", 2, '--threads: "1025" is not between 1 and 1024'),
    ("check --case 3 --cases 5", 2, "--case is one problem and takes no --cases"),
    ("check --list --device cpu", 2, "--list runs nothing and takes no --device"),
    ("check --list --jobs 2", 2, "--list runs nothing and takes no --jobs"),
    ("check --list --insist", 2, "--list runs nothing and takes no --insist"),
    ("bench --device reference --threads 2", 3, "threads"),
    ("explain --device reference --threads 2", 3, "threads"),
    ("info --jso", 2, 'unknown option "--jso"'),
    ("bench --sq 12,x", 2, '--sq: "x" is not an integer'),
    ("bench --sq 12,,13", 2, '--sq: "" is not an integer'),
    ("bench --sq -1", 2, '--sq: "-1" is not between 0 and'),
    ("bench --sq 0", 2, "--sq is 0: without queries there is nothing to measure"),
    ("bench --b 1,0 --dir plan,fwd", 2, "--b is 0: without queries"),
    ("bench --hq 0 --dir bwd", 2, "--hq is 0: without queries"),
    ("bench --seqused-q 5,0 --dir decode", 2, "--seqused-q is 0: without queries"),
    ("bench --ranks --sq 0", 2, "--sq is 0: without queries"),
    ("bench --dir sideways", 2, "one of fwd, bwd, decode, plan"),
    ("bench --causal=2", 2, '--causal: "2" is not one of 0, 1'),
    ("bench --threads 0", 2, '--threads: "0" is not between 1'),
    ("bench --sq " + ",".join(["1"] * 33), 2, "--sq: a list has at most 32 values"),
    ("bench --device " + "x" * 64, 2, "--device: a list has at most"),
    ("bench --peer me", 2, "one of none, materialised"),
    ("bench --peer materialised --dir plan", 2, "--peer has nothing to run in --dir plan"),
    ("bench --window 3", 2, '--window: "3" is not pairs, as in --window L,R'),
    ("bench --anchor top-left", 2, "--anchor needs --causal, --window"),
    ("bench --causal=0 --anchor top-left", 2, "--anchor needs --causal, --window"),
    ("bench --density 0.5", 2, "--density needs --block-mask"),
    ("bench --block-mask --density 1.5", 2, "--density: 1.5 is not in 0..1"),
    ("bench --block-size 4,4", 2, "--block-size needs --block-mask"),
    ("bench --deterministic", 2, "--deterministic applies only to gradients"),
    ("bench --dir bwd --batch-invariant", 2, "--batch-invariant applies only to forward"),
    ("bench --dlse", 2, "--dlse needs --dir bwd"),
    ("bench --dir bwd --dbias", 2, "--dbias needs --dir bwd and --bias"),
    ("bench --dir bwd --dsink", 2, "--dsink needs --dir bwd and --sink"),
    ("bench --dir bwd --lse", 2, "--lse needs a forward --dir"),
    ("bench --dtype-bias f32", 2, "--dtype-bias needs --bias"),
    (f"run {QKV} --dtype-bias f32", 2, "--dtype-bias needs --bias"),
    (f"run {QKV} --dtype-kv f8", 2, "--dtype-kv: \"f8\" is not one of f32, f16, bf16, f64"),
    (f"run {QKV} --dtype-v f64", 2, "f64 does not mix"),
    ("bench --causal --q-offsets", 2, "--q-offsets needs --q-offset"),
    ("bench --causal --wholes-k", 2, "--wholes-k needs --whole-k"),
    ("bench --dir bwd,plan --scores", 2, "--scores needs --dir fwd or decode"),
    ("bench --ranks --timeout 0", 2, "--timeout is above 0"),
    ("run --q a --k b --v c --o d --ranks --timeout -1", 2, "--timeout is above 0"),
    ("run --q a --k b --v c --o d --ranks --timeout nan", 2, "--timeout is above 0"),
    ("bench --ranks --kernel naive", 2, "--ranks cannot be combined with --kernel"),
    ("bench --ranks --dir plan", 2, "--ranks cannot be combined with --kernel, --scores, --probabilities or --dir plan"),
    ("explain --dir plan", 2, '--dir: "plan" is not one of fwd, bwd, decode'),
    ("explain --dir bwd --probabilities", 2, "--probabilities needs --dir fwd or decode"),
    ("explain --ranks 4 --link 4e9 --rate 1 --device cpu", 2, "--ranks cannot be combined with --device"),
    ("explain --ranks 4 --link 4e9 --rate 1 --threads 2", 2, "--ranks cannot be combined with --device, --kernel, --threads"),
    ("bench --page-size 16 --cu-seqlens-k", 2, "--cu-seqlens-k needs keys that are not paged"),
    ("explain --ranks 0", 2, '--ranks: "0" is not between 1'),
    ("explain --ranks 4", 2, "--ranks needs --link and --rate"),
    ("explain --link 4e9", 2, "--link, --rate, --row, --scheme, --split, --memory and --saves need --ranks"),
    ("explain --ranks 4 --link 4e9,1,1 --rate 1e12", 2, "--link is a bandwidth above 0"),
    ("explain --ranks 4 --link 4e9 --rate -1", 2, "--rate is above 0"),
    ("explain --ranks 4 --link 4e9 --rate 1 --row -1", 2, "--row is 0 or above"),
    ("explain --ranks 4 --link 4e9 --rate 1 --memory 9999 --saves", 2, "--saves cannot be combined with --memory"),
    ("bench --saves", 2, "--scheme, --split, --timeout and --saves need --ranks"),
    ("explain --ranks 4 --link 4e9 --rate 1 --memory 0", 2, '--memory: "0" is not between 1'),
    ("explain --ranks 4 --link 4e9 --rate 1 --split odd", 2, "one of auto, contiguous"),
    ("explain --ranks 4 --link 4e9 --rate 1 --scheme heads --hk 3 --hq 3", 3, 'scheme "heads" takes'),
    ("explain --ranks 4 --link 4e9 --rate 1 --causal --whole-q 9", 3, "groups do not support positions"),
    ("explain --ranks 4 --link 4e9 --rate 1 --block-mask", 3, "groups do not support block_mask"),
    ("explain --ranks 4 --link 4e9 --rate 1 --dir bwd --accumulate", 3, "groups do not support accumulate"),
    ("explain --ranks 4 --link 4e9 --rate 1 --batch-invariant", 3, "groups do not support batch_invariant"),
    ("explain --ranks 4 --link 4e9 --rate 1 --checked", 3, "groups do not support checked"),
    ("explain --anchor top-left", 2, "--anchor needs --causal, --window"),
    ("explain --seqused-k -1", 2, '--seqused-k: "-1" is not between 0'),
    ("explain --seqused-k 2000 --sq 1024", 2, "seqused_k is 2000, not in 0..1024"),
    ("bench --seqused-q 2000 --sk 3000 --cu-seqlens-q", 2, "seqused_q is 2000, not in 0..1024"),
    ("explain --pointer-alignment 24", 2, "pointer_alignment is 24, not a power of two"),
    ("bench --pointer-alignment 24", 2, "pointer_alignment is 24, not a power of two"),
    ("bench --reps 0", 2, '--reps: "0" is not between 1'),
    ("bench --hq 3 --hk 2", 2, "fattn: FATTN_INVALID_SHAPE: "),
    ("bench --kernel fast", 2, 'has no kernel "fast"'),
    ("explain --d 577", 2, "fattn: FATTN_INVALID_SHAPE: dim is 577"),
    ("explain --dtype f64 --device cpu", 3, "fattn: FATTN_UNSUPPORTED: "),
    ("explain --hq 3 --hk 2", 2, "heads_q is 3, not a multiple of heads_k, 2"),
    ("check --kernel fast", 2, 'has no kernel "fast"'),
]


def make_files(folder):
    rng = np.random.default_rng(3)
    real = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    arrays = {
        "q": real(2, 5, 4, 8), "k": real(2, 7, 2, 8), "v": real(2, 7, 2, 6), "o": real(2, 5, 4, 6),
        "three": real(2, 5, 3, 8),
        "wide": real(2, 7, 2, 9), "vector": real(7), "bias": real(3, 7), "deep": real(1, 1, 1, 1, 1),
        "mask": np.ones((2, 4, 1, 1), bool), "i4": np.arange(3, dtype=np.int32),
        "f8": np.ones((2, 5, 4, 8)), "big": np.array([1, 2 ** 31]), "used": np.array([8, 3]),
    }
    for name, array in arrays.items():
        np.save(os.path.join(folder, name + ".npy"), array)
    with open(os.path.join(folder, "q.npy"), "rb") as whole, open(os.path.join(folder, "short.npy"), "wb") as cut:
        cut.write(whole.read()[:-1])
    with open(os.path.join(folder, "text.npy"), "w", encoding="ascii") as text:
        text.write("attention\n")
    np.save(os.path.join(folder, "copy.npy"), arrays["q"])
    os.symlink("copy.npy", os.path.join(folder, "soft.npy"))
    os.link(os.path.join(folder, "copy.npy"), os.path.join(folder, "hard.npy"))


def start(tool, folder, line, **environment):
    return subprocess.run([tool, *line.split()], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})


def test_refusals(tool, folder):
    before = sorted(os.listdir(folder))
    for line, status, holds in REFUSED:
        ran = start(tool, folder, line)
        fine = ran.returncode == status and ran.stdout == ""
        if holds is not None:
            fine = fine and ran.stderr.count("\n") == 1 and holds in ran.stderr and ran.stderr.startswith("fattn")
        left = sorted(os.listdir(folder))
        if not fine or left != before:
            print("# exit", ran.returncode, repr(ran.stderr), set(left) - set(before))
        ok(fine and left == before, ("fattn " + line)[:100])


def test_help(tool, folder):
    for line in ("--help", "-h", "run --help", "run --q x --help", "bench --help", "info --help", "explain --help",
                 "check --help", "io --help"):
        ran = start(tool, folder, line)
        ok(ran.returncode == 0 and ran.stderr == "" and "Usage: fattn" in ran.stdout, "fattn " + line)
    for line, arrays in (("run", True), ("bench", False), ("explain", False)):
        ok(("that of q's array" in start(tool, folder, line + " --help").stdout) == arrays,
           f"the help of {line} speaks of arrays if it reads some")
    codes = start(tool, folder, "--help").stdout
    ok(all(re.search(rf"^  {n}  ", codes, re.M) for n in range(4)), "--help documents the exit statuses")
    ran = start(tool, folder, "--version")
    ok(re.fullmatch(r"fattn \d+\.\d+\.\d+\n", ran.stdout) and ran.returncode == 0, "fattn --version")


def test_full_output(tool, folder):
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "w", encoding="ascii") as full:
        ran = subprocess.run([tool, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    ok(ran.returncode == 3 and "standard output cannot be written" in ran.stderr, "a full standard output is an error")


def test_info(tool, folder):
    about = json.loads(start(tool, folder, "info --json").stdout)
    text = start(tool, folder, "info").stdout
    rows = [row for backend in about["backends"] for device in backend["devices"] for row in device["kernels"]]
    ok(len(rows) > 0 and all(row["name"] in text for row in rows), "info and info --json list the same kernels")
    ok(all(row["ops"] and row["dtypes"] and row["tiles"] and row["dim_max"] > 0 for row in rows),
       "every kernel has ops, dtypes, tiles and a largest dimension")
    ok(text.count("; by name only") == sum(row["by_name"] for row in rows), "info and info --json tell the same conditions")
    ok(about["version"] in start(tool, folder, "--version").stdout, "info knows the version")
    ok("default   reference:0\n" in start(tool, folder, "info", FATTN_BACKEND="reference").stdout,
       "info tells the default device")
    ran = start(tool, folder, "info --json", FATTN_BACKEND="tpu")
    ok(ran.returncode == 3 and 'FATTN_BACKEND is "tpu"' in ran.stderr and json.loads(ran.stdout)["default"] is None,
       "info lists what there is, and fails where FATTN_BACKEND names no device")


COLUMNS = ("device kernel dir dtype mask B Hq Hk Sq Sk D Dv median_ms gflops gbytes_s ceiling ratio "
           "workspace_bytes fed cpu features").split()

# options of a problem, the name in bench's output, the directions that have it
FEATURES = [
    ("--window 3,0 --anchor top-left", "window(3,0)+top_left", "fwd,bwd"),
    ("--scale 0.25 --softcap 20", "scale(0.25)+softcap(20)", "fwd,bwd"),
    ("--bias --alibi --dropout 0.25", "bias+alibi+dropout(0.25)", "fwd,bwd"),
    ("--dtype bf16 --bias --dtype-bias bf16 --dtype-o f32", "bias_bf16+o_f32", "fwd,bwd"),
    ("--dtype-kv f16 --dtype-v bf16", "kv_f16+v_bf16", "fwd,bwd"),
    ("--dtype f16 --dtype-v f32 --bias --dtype-bias bf16", "bias_bf16+v_f32", "fwd,decode"),
    ("--dtype-kv bf16 --page-size 16 --seqused-k 33", "seqused_k(33)+paged(16)+kv_bf16", "fwd,decode"),
    ("--dtype bf16 --dtype-kv e4m3 --descale --page-size 16", "paged(16)+descale+kv_e4m3", "fwd,decode"),
    ("--bias --sink --dbias --dsink --dlse", "bias+sink+dlse+dbias+dsink", "bwd"),
    ("--block-mask --block-size 8,16 --density 0.25", "block_mask(8x16,0.25)", "fwd,bwd"),
    ("--cu-seqlens-q --cu-seqlens-k", "cu_seqlens_q+cu_seqlens_k", "fwd,bwd"),
    ("--cu-seqlens-q --seqused-q 20 --seqused-k 40", "cu_seqlens_q+seqused_q(20)+seqused_k(40)", "fwd,bwd"),
    ("--bias --alibi --alibi-bias", "bias+alibi+alibi_bias", "fwd"),
    ("--seqstart-k 20 --causal --lse", "seqstart_k(20)+lse", "fwd,decode"),
    ("--page-size 16 --seqused-k 33 --lse", "seqused_k(33)+paged(16)+lse", "fwd,decode"),
    ("--page-size 7 --batch-invariant --layout bhsd", "paged(7)+batch_invariant+bhsd", "fwd"),
    ("--q-offset 5 --k-offset 2 --whole-k 90 --causal", "positions(5,2)", "fwd,bwd"),
    ("--q-offset 8 --k-offset 2 --whole-q 40 --whole-k 90 --q-offsets --k-offsets --wholes-q --wholes-k --causal",
     "positions(8,2)+q_offsets+k_offsets+wholes_q+wholes_k", "fwd,bwd"),
    ("--deterministic --accumulate --mask", "accumulate+deterministic", "bwd"),
    ("--checked", "checked", "fwd,bwd"),
    ("--pointer-alignment 4", "aligned(4)", "fwd,bwd"),
]


def test_bench(tool, folder):
    sweep = "bench --device reference --sq 4,8 --causal=0,1 --hq 2 --d 4 --reps 1 --dir fwd,bwd"
    ran = start(tool, folder, sweep)
    rows = [line.split("\t") for line in ran.stdout.splitlines()]
    ok(ran.returncode == 0 and rows[0] == COLUMNS, "bench begins with its header")
    ok(len(rows) == 9 and all(len(row) == len(COLUMNS) for row in rows), "bench prints every combination")
    ran = start(tool, folder, sweep + " --json")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    ok([list(line) for line in lines] == [COLUMNS] * 8, "JSON lines have the same columns")
    ok([[str(line[name]) for name in COLUMNS[:12]] for line in lines] == [row[:12] for row in rows[1:]],
       "and the same cases in the same order")
    ok({(line["Sq"], line["mask"], line["dir"]) for line in lines} ==
       {(s, m, d) for s in (4, 8) for m in ("none", "causal") for d in ("fwd", "bwd")}, "no combination is missing")
    halves = {(l["Sq"], l["dir"], l["mask"]): l["gflops"] * l["median_ms"] for l in lines}
    ok(all(abs(halves[s, d, "causal"] / halves[s, d, "none"] - 0.5) < 1e-3 for s in (4, 8) for d in ("fwd", "bwd")),
       "causal flops count as half")
    ran = start(tool, folder, "bench --dir decode --device cpu --threads 1,2 --sk 512 --hq 2 --reps 1 --json")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    ok([line["device"] for line in lines] == ["cpu@1", "cpu@2"] and all(line["ceiling"] > 0 for line in lines),
       "--threads is in the device column, and decoding on a CPU has a ceiling")
    ok(all(line["Sq"] == 1 for line in lines), "decoding has one query by default")
    for line, count in (("--sk 0 --sq 64", 1), ("--sq 0 --dir plan", 2)):  # o is written; a plan is made
        ran = start(tool, folder, f"bench {line} --device cpu --hq 1 --d 16 --reps 3")
        ok(ran.returncode == 0 and ran.stdout.count("\n") == 1 + count, f"bench {line} measures something")
    ran = start(tool, folder, "bench --device cpu,reference --sq 64 --hq 1 --d 16 --reps 3 --json")
    fed, none = [json.loads(line)["fed"] for line in ran.stdout.splitlines()]
    measured = json.loads(ran.stdout.splitlines()[0])["kernel"].startswith(("avx", "amx"))
    ok(none is None and (fed > 0 if measured else fed is None), f"a core's share of its products is one: {fed}")
    ok(not measured or abs(fed - 0.95) < 0.001 or ("cores are shared" in ran.stderr) == (fed < 0.95),
       "and a small one is spoken of")


def on_terminal(tool, line):
    """What a terminal shows of both outputs; None without pseudo-terminals."""
    try:
        reader, terminal = pty.openpty()
    except OSError:  # a bare chroot has no /dev/pts
        return None
    process = subprocess.Popen([tool, *line.split()], stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(reader)
    process.wait()
    return shown.decode()


def test_progress(tool):
    for line, count in (("check --device reference --cases 40 --kernel tiled_flash2", 40),
                        ("io --sq 64,128 --m 4096", 12), ("io --paper", 6),
                        ("bench --device reference --sq 4,8 --hq 1 --d 4 --reps 1", 2)):
        shown = on_terminal(tool, line)
        if shown is None:
            checks.skip(line, "there is no terminal")
            continue
        bars = re.findall(r"\[#* *\] (\d+)/(\d+)", shown)
        ok(bars and all(int(n) == count for _, n in bars) and len({done for done, _ in bars}) >= min(count, 6)
           and shown.rsplit("]", 1)[1].count("\033[K"), f"fattn {line} shows how far it is, and clears that")


def test_features(tool, folder):
    """bench and explain support all options of run; the library validates the lengths and tables of bench."""
    for options, words, dirs in FEATURES:
        line = f" --device reference --b 3 --hq 4 --hk 2 --sq 33 --sk 50 --d 16 --dir {dirs} {options}"
        ran = start(tool, folder, "bench --reps 1 --json" + line)
        rows = [json.loads(row) for row in ran.stdout.splitlines()]
        fine = ran.returncode == 0 and [row["features"] for row in rows] == [words] * len(dirs.split(","))
        if not fine:
            print("#", ran.returncode, ran.stdout, ran.stderr)
        ok(fine, "bench " + options)
        ran = start(tool, folder, "explain" + line)
        mixed = [word for word in words.split("+") if re.match("kv_|v_", word)]
        plain = [re.sub(r"\(.*|_bf16", "", word) for word in words.split("+") if word not in mixed]
        plain = [word for word in plain if not re.match("[qk]_offsets|wholes_[qk]", word)]  # nor the plan's
        own = {"top_left", "bhsd", "lse", "dbias", "dsink", "o_f32", "aligned"}  # no feature, but the problem's shape
        ok(ran.returncode == 0 and all(word in ran.stdout for word in plain if word not in own)
           and (not mixed or re.search(r"in \w+ \(k in \w+, v in \w+\) on", ran.stdout)), "explain " + options)
    ran = start(tool, folder, "bench --device reference --hq 2 --sq 8 --d 4 --window 0,0,1,0,-1,-1 --reps 1 --json")
    pairs = [row["gflops"] * row["median_ms"] * 1e6 / (2 * 2 * 8) for row in map(json.loads, ran.stdout.splitlines())]
    ok([round(n, 2) for n in pairs] == [8, 15, 64], f"windows count their pairs: {pairs}")
    ran = start(tool, folder, "bench --device reference --hq 2 --sq 8 --d 4 --seqstart-k 0,3,9 --reps 1 --json")
    pairs = [row["gflops"] * row["median_ms"] * 1e6 / (2 * 2 * 8) for row in map(json.loads, ran.stdout.splitlines())]
    ok([round(n, 2) for n in pairs] == [64, 40, 0], f"keys before the first one make no pairs: {pairs}")


def test_ranks(tool):
    """explain --ranks takes what groups support."""
    line = "explain --ranks 4 --link 4e9 --rate 1e12 "
    for options in ("--bias --mask", "--bias --alibi --alibi-bias", "--cu-seqlens-q --cu-seqlens-k --sink", "--softcap 9",
                    "--dir bwd --causal --dropout 0.1 --deterministic --dlse"):
        ran = start(tool, None, line + options)
        ok(ran.returncode == 0 and "over 4 ranks" in ran.stdout, f"{line}{options} {ran.stderr.strip()}")


def test_places(tool):
    """Positions of each sequence: half of the scalar for every second one."""
    line = "bench --device reference --b 2 --hq 2 --sq 8 --sk 40 --d 4 --causal --q-offset 4 --k-offset 8 --reps 1 --json"
    ran = start(tool, None, line + " --whole-q 8 --whole-k 40 --q-offsets=0,1 --k-offsets=0,1 --wholes-k=0,1")
    pairs = [row["gflops"] * row["median_ms"] * 1e6 / (2 * 2 * 8) for row in map(json.loads, ran.stdout.splitlines())]
    row = lambda off: sum(min(max(i + off + 1, 0), 40) for i in range(8))
    expected = [row(28) + row(28 - 2 * q + 4 * k - 20 * w) for q in (0, 1) for k in (0, 1) for w in (0, 1)]
    ok([round(n) for n in pairs] == expected, f"pairs are counted sequence by sequence: {pairs}, {expected}")
    # The query sees no key at -16384, and half of them at -8192.
    ran = start(tool, None, "bench --device cpu --threads 1 --dir decode --b 2 --causal --q-offset -16384 --q-offsets=0,1 "
                "--reps 5 --json")
    none, half = [json.loads(line)["median_ms"] for line in ran.stdout.splitlines()]
    ok(half > 3 * none, f"the library gets them: {none:.3g} and {half:.3g} ms")


def test_matrices(tool):
    """Scores and probabilities are rows of their own in bench, and lines in explain."""
    line = "--device reference --sq 6 --sk 9 --hq 2 --d 4 --scores --probabilities=0,1"
    ran = start(tool, None, f"bench {line} --dir fwd,bwd --reps 3 --json")
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    names = ["naive", "inspect:scores", "naive", "inspect:scores", "inspect:probabilities", "naive", "naive"]
    ok(ran.returncode == 0 and [row["kernel"] for row in rows] == names and all(row["median_ms"] > 0 for row in rows),
       "bench times scores and probabilities")
    ran = start(tool, None, "explain " + line)
    ok(re.findall(r"^  inspect +(.*) in f32, computed in f64", ran.stdout, re.M) ==
       ["scores: 1 x 2 x 6 x 9"] * 2 + ["probabilities: 1 x 2 x 6 x 9"], "explain speaks of them")


def test_density(tool):
    ran = start(tool, None, "explain --device reference --sq 64 --hq 1 --d 4 --block-mask --density 0,0.25,1")
    flops = [float(n) for n in re.findall(r"^  density .* ([\d.e+]+) flops$", ran.stdout, re.M)]
    ok(len(flops) == 3 and flops[0] == 0 and abs(flops[1] / flops[2] - 0.25) < 1e-3, f"explain --density: {flops}")


def test_all_kernels(tool):
    """explain --kernel all: the plan of each kernel that takes the problem, and why others do not."""
    about = json.loads(start(tool, None, "info --json").stdout)
    rows = next(b for b in about["backends"] if b["name"] == "cpu")["devices"][0]["kernels"]
    ran = start(tool, None, "explain --device cpu --sq 64 --kernel all")
    planned = re.findall(r"^forward .* kernel (\w+)$", ran.stdout, re.M)
    declined = re.findall(r"for the problem: (\w+) ", ran.stderr)
    ok(ran.returncode == 0 and "scalar_forward" in planned and "scalar_decode" in declined and
       sorted(planned + declined) == sorted(row["name"] for row in rows), f"explain --kernel all: {planned}, not {declined}")
    ran = start(tool, None, "explain --device cpu --dtype f64 --kernel all")
    ok(ran.returncode == 3 and ran.stdout == "", "explain --kernel all fails where no kernel takes the problem")


def test_plans(tool, folder):
    """What a run plans: a workspace for as many threads as the device has, kernels for pointers as aligned as promised."""
    rng = np.random.default_rng(1)
    for name, rows in (("one", 1), ("long", 16384)):
        np.save(os.path.join(folder, name + ".npy"), rng.standard_normal((1, rows, 1, 64)).astype(np.float32))

    def planned(*words):
        """The line that a run prints about its plan."""
        line = "run --q one.npy --k long.npy --v long.npy --o out.npy --device cpu".split()
        return subprocess.run([tool, *line, *words], cwd=folder, capture_output=True, text=True, check=True,
                              env={**os.environ, "FATTN_VERBOSE": "1", "FATTN_NUM_THREADS": "2"}).stderr
    plans = [planned("--threads", threads) for threads in ("1", "8")]
    ok("fattn: plan " in plans[0] and plans[0] != plans[1], f"run --threads: {plans}")
    plans = [planned("--pointer-alignment", bytes_) for bytes_ in ("2", "4")]
    ok([re.search("pointer alignment ([0-9]+)", plan)[1] for plan in plans] == ["2", "4"], f"run --pointer-alignment: {plans}")
    said = start(tool, None, "explain --device cpu --threads 1,8 --dir decode").stdout
    one, eight = [int(n) for n in re.findall(r"workspace +(\d+) bytes", said)]
    ok(0 < one < eight, f"explain --threads: {one} and {eight} bytes of workspace")


SPIN = "import os\nos.sched_setaffinity(0, {int(os.environ['WHERE'])})\nprint(flush=True)\nwhile True: pass"


def test_crowd(tool, folder):
    """Threads that share a processor with each other or with other programs."""
    if not hasattr(os, "sched_setaffinity"):
        return
    core = min(os.sched_getaffinity(0))
    line = [tool, *"bench --device cpu --sq 128 --hq 4 --d 64 --reps 9 --json --threads".split()]

    def pinned(threads):
        return subprocess.run([*line, str(threads)], capture_output=True, text=True, check=False,
                              preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    one, four = json.loads(pinned(1).stdout), pinned(4)
    row = json.loads(four.stdout)
    ok(row["ceiling"] < 2 * one["ceiling"], f"four threads on one processor have its ceiling: {row['ceiling']:.4g}"
       f" after {one['ceiling']:.4g}")
    ok("4 threads share 1 processor:" in four.stderr and row["cpu"] < 1.1, "and that is said")
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN], env={**os.environ, "WHERE": str(core)},
                                 stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for spinner in spinners:
            spinner.stdout.readline()  # it spins
        busy = pinned(1)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()
    cpu = json.loads(busy.stdout)["cpu"]
    ok(cpu < 0.9 and "the machine is busy: in 1 of 1 rows" in busy.stderr, f"a busy machine is noticed: {cpu}")


def test_peer(tool, folder):
    """A peer that cannot run is an error, never skipped silently."""
    fake = os.path.join(folder, "fake")
    os.mkdir(fake)
    with open(os.path.join(fake, "libopenblas.so.0"), "w", encoding="ascii") as file:
        file.write("no library\n")
    line = [tool, *"bench --peer materialised --device cpu --sq 16 --reps 1".split()]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": fake})
    ok(ran.returncode == 3 and ran.stdout == "" and "no peer materialised" in ran.stderr, "without OpenBLAS bench fails")
    ran = subprocess.run([*line, "--dtype", "f16"], capture_output=True, text=True, check=False)
    ok(ran.returncode != 0 and "peer" in ran.stderr, "where the peer takes no case too")
    ran = subprocess.run([*line, "--dtype-v", "f16"], capture_output=True, text=True, check=False)
    ok(ran.returncode != 0 and "peer:" not in ran.stdout and "peer" in ran.stderr, "nor one of mixed types")
    for sk in ("7", "40"):
        for anchor in ("bottom-right", "top-left"):
            more = [*line, "--sk", sk, "--causal", "--anchor", anchor]
            ran = subprocess.run(more, capture_output=True, text=True, check=False)
            if "no peer materialised" in ran.stderr:
                checks.skip(f"{sk} keys, {anchor}: the peer's result", "there is no OpenBLAS")
            else:
                ok(ran.returncode == 0 and "differ" not in ran.stderr, f"{sk} keys, {anchor}: the peer has fattn's result")


def test_table(tool):
    shown = on_terminal(tool, "bench --device cpu --sq 64 --hq 2 --d 16 --reps 3 --window 7,0 --dir fwd,decode")
    if shown is None:
        checks.skip("a table for people", "there is no terminal")
        return
    rows = [re.sub(r".*\x1b\[K", "", line).rstrip() for line in shown.splitlines()]
    rows = [row for row in rows if row.startswith(("problem ", "fwd ", "decode "))]
    ok("\t" not in shown and len(rows) == 3 and rows[1].startswith("fwd f32 B1 H2/2 64x64 D16 window(7,0) ")
       and all(unit in rows[1] for unit in (" ms ", " GFLOP/s ", " % ", " of ")) and " GB/s " in rows[2],
       "on a terminal bench prints a table for people")


def main():
    tool = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        make_files(folder)
        test_refusals(tool, folder)
        test_help(tool, folder)
        test_full_output(tool, folder)
        test_info(tool, folder)
        test_bench(tool, folder)
        test_features(tool, folder)
        test_ranks(tool)
        test_places(tool)
        test_matrices(tool)
        test_density(tool)
        test_all_kernels(tool)
        test_plans(tool, folder)
        test_crowd(tool, folder)
        test_peer(tool, folder)
        test_table(tool)
        test_progress(tool)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
