# SPDX-License-Identifier: Apache-2.0
"""Headers compile alone: nothing before them, no warning, in every language that may include them.

usage: headers.py ROOT LANGUAGE COMPILER... -- HEADER...
       headers.py ROOT LANGUAGE - -- HEADER...    where the compiler is to be looked for

HEADER is relative to ROOT. Compilers that a machine lacks are skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import tap

STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wundef", "-Wshadow", "-Werror"]

# language: (compilers to look for, ending of the file that includes the header, flags)
LANGUAGES = {
    "c99": ((), ".c", ["-c", "-std=c99", "-Wstrict-prototypes"] + STRICT),
    "c11": ((), ".c", ["-c", "-std=c11", "-Wstrict-prototypes"] + STRICT),
    "c++11": (("c++", "g++", "clang++"), ".cpp", ["-c", "-std=c++11"] + STRICT),
    "c++17": (("c++", "g++", "clang++"), ".cpp", ["-c", "-std=c++17"] + STRICT),
    "cuda": (("nvcc", "/usr/local/cuda/bin/nvcc"), ".cu",
             ["-c", "-std=c++17", "-arch=sm_80", "-Werror", "all-warnings", "-Xcompiler",
              "-Wall,-Wextra,-Wshadow,-Werror"]),
}

# To assembler: AMD's linker may be missing where its compiler is not. Processors of either width.
for name, arch in {"hip64": "gfx942", "hip32": "gfx1100"}.items():
    LANGUAGES[name] = (("clang++-22", "amdclang++"), ".hip",
                       ["-x", "hip", "-std=c++17", "--offload-arch=" + arch, "--cuda-device-only",
                        "-nogpuinc", "-nogpulib", "-S", "-O1"] + STRICT)


def compiler_for(language):
    for name in LANGUAGES[language][0]:
        path = shutil.which(name)
        if path:
            return [path]
    return None


def compile_alone(root, language, compiler, header):
    """Findings for one header."""
    _, ending, flags = LANGUAGES[language]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "alone" + ending)
        with open(source, "w", encoding="utf-8") as file:
            file.write(f'#include "{os.path.join(root, header)}"\nint alone(void);\nint alone(void) {{ return 0; }}\n')
        done = subprocess.run(
            compiler + flags + ["-I", root, "-I", os.path.join(root, "include"), source,
                                "-o", os.path.join(folder, "alone.o")],
            capture_output=True, text=True, check=False)
    if done.returncode == 0 and not done.stderr.strip():
        return []
    return [f"{header}: {line}" for line in (done.stdout + done.stderr).splitlines()] or [
        f"{header}: the compiler failed and said nothing"]


def results(root, language, compiler, headers):
    if compiler == ["-"]:
        compiler = compiler_for(language)
    for header in headers:
        title = f"{header} as {language}"
        if compiler is None:
            yield title, tap.Skip(f"no compiler for {language}")
        else:
            yield title, compile_alone(root, language, compiler, header)


if __name__ == "__main__":
    SPLIT = sys.argv.index("--")
    sys.exit(tap.report(results(sys.argv[1], sys.argv[2], sys.argv[3:SPLIT], sys.argv[SPLIT + 1:])))
