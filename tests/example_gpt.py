#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""examples/gpt.c from the outside, on the licence of this project: fattn and materialised attention give the same
losses, a checkpoint continues, and invalid input is refused.

usage: example_gpt.py GPT [STEPS]

Curves have 100 steps, or STEPS of them; with few, checkpoints and texts are shorter too.
"""
import os
import re
import subprocess
import sys
import tempfile

import checks
from checks import ok

gpt = os.path.abspath(sys.argv[1])
length = int(sys.argv[2]) if len(sys.argv) > 2 else 100
saved_at, ended_at, drawn = (15, 40, 200) if length >= 100 else (6, 16, 60)
licence = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "LICENSE")
small = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "48", "--batch", "2", "--every", "1"]
# Threads that spin while they wait are slow on a busy machine.
os.environ.update(OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")


def run(*arguments, **settings):
    return subprocess.run([gpt, *arguments], capture_output=True, check=False, env={**os.environ, **settings})


def losses(ran):
    """{step: loss} of a run that succeeded."""
    if ran.returncode != 0:
        print("#", ran.stderr)
        return {}
    rows = re.findall(rb"^ *(\d+) +(\d+\.\d{6}) +\d+ +(\d+\.\d\d) MB$", ran.stdout, re.M)
    return {int(step): float(loss) for step, loss, _ in rows}


def written(ran):
    """The text that the model generated: everything after the line with the time."""
    return ran.stdout.split(b" s\n", 1)[-1]


def differ(one, other, bound):
    """Whether two curves have different steps, or differ by more than bound anywhere."""
    return one.keys() != other.keys() or not one or max(abs(one[n] - other[n]) for n in one) > bound


def test_curves():
    for name, more in (("small", small), ("four heads of 3", [*small, "--heads", "4", "--width", "12"])):
        fused = losses(run(*more, "--steps", str(length), "--sample", "0", licence))
        plain = losses(run(*more, "--steps", str(length), "--sample", "0", "--materialised", licence))
        ok(not differ(fused, plain, 1e-4) and len(fused) == length, f"{name}: the same losses to 1e-4, {length} steps")
        ok(fused and fused[length] < fused[1] - 0.005 * length, f"{name}: it learns")
        other = losses(run(*more, "--steps", str(length), "--sample", "0", "--seed", "2", licence))
        ok(differ(fused, other, 1e-2), f"{name}: another seed has another curve")


def test_ranks():
    one = losses(run(*small, "--steps", str(length), "--sample", "0", licence))
    for ranks in ("2", "3"):
        many = run(*small, "--steps", str(length), "--sample", "20", "--ranks", ranks, licence)
        ok(not differ(one, losses(many), 1e-4) and len(written(many)) == 21,
           f"{ranks} ranks, of which each has a share of every sequence: the same losses to 1e-4")
    refused(["--ranks", "2", "--materialised", licence], 2, "not divided over ranks")


def test_threads_and_devices():
    one, three = (run(*small, "--steps", "20", "--sample", "50", licence, OMP_NUM_THREADS=n) for n in "13")
    ok(losses(one) == losses(three) and len(losses(one)) == 20 and written(one) == written(three),
       "any number of threads gives the same losses and text")
    other = run(*small, "--steps", "20", "--sample", "0", licence, FATTN_BACKEND="reference")
    ok(b"fattn on reference" in other.stdout and not differ(losses(one), losses(other), 1e-4),
       "FATTN_BACKEND chooses the device, with the same losses to 1e-4")
    unknown = run(licence, FATTN_BACKEND="quantum")
    ok(unknown.returncode == 3 and b"FATTN_UNKNOWN_DEVICE" in unknown.stderr, "an unknown device is not replaced")


def test_checkpoint(folder):
    half, end = os.path.join(folder, "half"), os.path.join(folder, "end")
    whole = run(*small, "--steps", str(ended_at), "--sample", str(drawn), "--save", end, licence)
    first = run(*small, "--steps", str(saved_at), "--sample", "0", "--save", half, licence)
    again = os.path.join(folder, "again")
    rest = run("--load", half, "--batch", "2", "--every", "1", "--steps", str(ended_at), "--sample", str(drawn),
               "--save", again, licence)
    joined = {**losses(first), **losses(rest)}
    ok(not differ(losses(whole), joined, 0) and len(joined) == ended_at, "a checkpoint continues with the same losses")
    ok(written(rest) == written(whole), "and writes the same")
    with open(end, "rb") as one, open(again, "rb") as other:
        ok(one.read() == other.read(), "and ends with the same weights")
    wrong = [("--load", half, "--width", "32", licence), ("--load", half, licence + ".absent")]
    with open(half, "rb") as file:
        good = file.read()
    damaged = {"cut": good[:-1], "long": good + b"x", "header": good[:20], "other": b"X" + good[1:], "empty": b"",
               "layers": good[:8] + b"\xff" * 8 + good[16:], "heads": good[:16] + b"\5" + good[17:],
               "step": good[:48 + 7] + b"\x80" + good[48 + 8:], "no characters": good[:40] + bytes(8) + good[48:]}
    for name, content in damaged.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
        wrong.append(("--load", os.path.join(folder, name)))
    for arguments in wrong:
        refused(arguments, 2, None)
    with open(os.path.join(folder, "foreign"), "w", encoding="utf-8") as file:
        file.write("characters that no licence has: ~" * 9)
    refused(("--load", half, os.path.join(folder, "foreign")), 2, "which the checkpoint's text did not hold")
    refused(("--steps", "0", *small, "--save", os.path.join(folder, "no", "folder"), licence), 2, "no/folder")


def test_sampling(folder):
    saved = os.path.join(folder, "saved")
    trained = run(*small, "--steps", "30", "--sample", str(drawn), "--save", saved, licence)
    loaded = run("--load", saved, "--sample", str(drawn))
    text = written(trained)
    with open(licence, "rb") as file:
        ok(len(text) == drawn + 1 and set(text) <= set(file.read()), f"{drawn} characters of the text's are written")
    ok(loaded.returncode == 0 and loaded.stdout.endswith(text), "a checkpoint writes without a text")
    ok(run("--load", saved, "--sample", str(drawn), "--seed", "9").stdout[-drawn:] != text[-drawn:], "a seed changes it")
    ok(written(run(*small, "--steps", "1", "--sample", "0", licence)) == b"\n", "or nothing")


def refused(arguments, status, holds):
    ran = run(*arguments)
    line = ran.stderr.decode()
    fine = ran.returncode == status and line.count("\n") == 1 and line.startswith("gpt: ")
    if not fine or (holds and holds not in line):
        print("# exit", ran.returncode, repr(line))
    ok(fine and (holds is None or holds in line), "refused: " + " ".join(arguments[-3:])[-80:])


def test_refusals(folder):
    for name, content in (("empty", b""), ("binary", b"text\0more"), ("short", b"text"), ("elf", b"\x7fELF" * 100)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    at = lambda name: os.path.join(folder, name)
    refused([at("absent")], 2, "absent: No such file or directory")
    refused([at("empty")], 2, "empty: this file is empty")
    refused([at("short")], 2, "short: 4 characters are too few for a context of")
    refused([at("binary")], 2, "binary: byte 4 is 0x00: this is not a text file")
    refused([at("elf")], 2, "elf: byte 0 is 0x7f: this is not a text file")
    refused([folder], 2, "Is a directory")
    refused([], 2, "needs the name of a text file")
    refused(["--frob", licence], 2, 'unknown argument "--frob"')
    refused([licence, licence], 2, "unknown argument")
    refused([licence, "--steps"], 2, "--steps needs a value")
    refused([licence, "--load"], 2, "--load needs a value")
    for option, value in (("--steps", "-1"), ("--steps", "1.5"), ("--steps", "x"), ("--steps", ""), ("--width", "0"),
                          ("--layers", "65"), ("--batch", "1e9"), ("--rate", "nan"), ("--seed", "5z")):
        refused([option, value, licence], 2, option + " needs an integer between")
    refused(["--heads", "3", licence], 2, "options: there is no model of 3 layers, 3 heads, width 128")
    refused(["--width", "512", "--heads", "1", licence], 2, "no model of 3 layers, 1 heads, width 512")
    ran = run("--help")
    ok(ran.returncode == 0 and b"usage: gpt" in ran.stdout and ran.stderr == b"", "there is help")


test_curves()
test_ranks()
test_threads_and_devices()
with tempfile.TemporaryDirectory() as place:
    test_checkpoint(place)
with tempfile.TemporaryDirectory() as place:
    test_sampling(place)
    test_refusals(place)
sys.exit(checks.done())
