#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Bash completion of fattn's command line, as a TAP program.

    completion.py FATTN COMPLETION.bash
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile

import checks
from checks import ok

# Calls the completion as bash does, for each line that it reads, and prints what it offers.
ASK = """
source "$1"
tool=$2
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    _fattn "$tool"
    echo "${COMPREPLY[*]}"
done
"""

# command line up to the cursor, the exact completions
OFFERS = [
    ("fattn be", "bench"),
    ("fattn --v", "--version"),
    ("fattn nothing --", ""),
    ("fattn run --dt", "--dtype --dtype-kv --dtype-v --dtype-o --dtype-bias"),
    ("fattn run --dtype ", "f32 f16 bf16 f64"),
    ("fattn run --dtype=b", "bf16"),
    ("fattn run --anchor top", "top-left"),
    ("fattn run --scale ", ""),
    ("fattn run --causal --cu", "--cu-seqlens-q --cu-seqlens-k"),
    ("fattn run --q a.npy --k b.npy --q", "--q-offsets --q-offset"),
    ("fattn run --q ", "folder"),
    ("fattn run --q folder/", "folder/q.npy"),
    ("fattn run --q=folder/", "folder/q.npy"),
    ("fattn bench --dir fwd,dec", "fwd,decode"),
    ("fattn bench --dir=fwd,dec", "fwd,decode"),
    ("fattn bench --json --js", ""),
    ("fattn bench --device refer", "reference reference:0"),
    ("fattn bench --device reference:", "0"),
    ("fattn bench --device=reference:", "0"),
    ("fattn bench --device cpu,reference:", "0"),
    ("fattn bench --device reference --kernel n", "naive"),
    ("fattn bench --device=reference:0 --kernel naive,n", "naive,naive"),
]


def ask(tool, script, folder, lines):
    ran = subprocess.run(["bash", "--norc", "-c", ASK, "ask", script, tool], input="\n".join(lines) + "\n",
                         cwd=folder, capture_output=True, text=True, check=False)
    if ran.stderr:
        print("#", ran.stderr.replace("\n", "\n# "))
    answers = ran.stdout.split("\n")[:-1]
    if ran.returncode or ran.stderr or len(answers) != len(lines):
        answers = ["it failed"] * len(lines)
    return answers


def test_offers(tool, script, folder):
    answers = ask(tool, script, folder, [line for line, _ in OFFERS])
    for (line, expected), answer in zip(OFFERS, answers):
        if answer != expected:
            print(f"# {line!r}: {answer!r} instead of {expected!r}")
        ok(answer == expected, line)


def output(tool, *words):
    return subprocess.run([tool, *words], capture_output=True, text=True, check=True).stdout


def test_all(tool, script, folder):
    """Nothing that the tool has is missing."""
    listed = re.search(r"Commands:\n(.*?)\n\n", output(tool, "--help"), re.S)[1]
    commands = re.findall(r"^  (\w+)", listed, re.M)
    answer, = ask(tool, script, folder, ["fattn "])
    ok(len(commands) >= 6 and answer.split() == ["--help", "--version"] + commands, "every command is offered")
    for command, answer in zip(commands, ask(tool, script, folder, [f"fattn {c} --" for c in commands])):
        options = re.findall(r"^  (--[\w-]+)", output(tool, command, "--help"), re.M)
        ok(options and answer.split() == options, f"every option of {command} is offered")
    backends = json.loads(output(tool, "info", "--json"))["backends"]
    kernels = {row["name"] for b in backends for device in b["devices"] for row in device["kernels"]}
    answer, = ask(tool, script, folder, ["fattn bench --kernel "])
    ok(set(answer.split()) == kernels, "every kernel is offered")


def test_keys(tool, script, folder):
    """The same by the tab key, in a bash with a pseudo-terminal."""
    keys = "fattn bench --device reference:\t--dir dec\t--dtype=b\t"
    path = os.path.dirname(tool) + os.pathsep + os.environ["PATH"]
    typed = f"source '{script}'\n{keys}\x01echo 'is <\x05>'\nexit\n"
    try:
        shell, terminal = pty.openpty()
    except OSError as error:  # a bare chroot has no /dev/pts
        ok(True, f"the tabulator key completes # SKIP {error}")
        return
    os.write(shell, typed.encode())
    ran = subprocess.run(["bash", "--norc", "--noprofile", "-i"], cwd=folder, stdin=terminal, capture_output=True,
                         text=True, check=False, timeout=60,
                         env={**os.environ, "PATH": path, "TERM": "dumb", "INPUTRC": os.devnull})
    os.close(terminal)
    os.close(shell)
    expected = "is <fattn bench --device reference:0 --dir decode --dtype=bf16 >"
    if expected not in ran.stdout:
        print("#", repr(ran.stdout), repr(ran.stderr))
    ok(expected in ran.stdout, "the tabulator key completes")


def main():
    tool, script = (os.path.abspath(path) for path in sys.argv[1:])
    if shutil.which("bash") is None:
        return checks.skip_all("bash is not installed")
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "folder"))
        for name in ("folder/q.npy", "folder/q.txt"):
            with open(os.path.join(folder, name), "wb"):
                pass
        test_offers(tool, script, folder)
        test_all(tool, script, folder)
        test_keys(tool, script, folder)
    return checks.done()


if __name__ == "__main__":
    sys.exit(main())
