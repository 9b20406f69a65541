# SPDX-License-Identifier: Apache-2.0
"""Which folder may include from which, and which words are allowed where. A room is a folder that has rules of
its own.

usage: rooms.py ROOT
"""

import ast
import os
import re
import sys

import tap

# What of the core the whole tool may use, and what its parts that show, time or judge look at behind the
# public interface.
BASICS = ["core/memory.h", "core/status.h", "core/dtype.h", "core/feature.h", "core/integer.h"]
INSIDE = ["core/backend.h", "core/band.h", "core/host.h", "core/io_model.h", "core/kernel.h", "core/peak.h",
          "core/plan.h", "core/problem.h"]

# folder: folders and files that its files may include, its own being understood. The longest folder that a
# path begins with is its room.
MAY_INCLUDE = {
    "include": [],
    "core": ["include"],
    "core/distributed": ["include", "core"],
    "core/distributed/transports": ["include"],
    "backends/reference": ["include", "core"],
    "backends/cpu": ["include", "core"],
    "backends/gpu": ["include", "core"],
    "backends/cuda": ["include", "core", "backends/gpu"],
    "backends/hip": ["include", "core", "backends/gpu"],
    "tools/terminal": ["include"] + BASICS,
    "tools/npy": ["include"] + BASICS,
    "tools/options": ["include", "tools/terminal"] + BASICS,
    "tools/plot": ["include", "tools/terminal", "core/io_model.h"] + BASICS,
    "tools/ranks": ["include", "core/distributed", "tools/bench", "tools/options", "tools/terminal"] + BASICS + INSIDE,
    "tools/judge": ["include", "backends/reference"] + BASICS + INSIDE,
    "tools/bench": ["include", "tools/options", "tools/terminal", "core/env.h", "backends/cpu/team.h"] + BASICS + INSIDE,
    "tools/run": ["include", "tools/npy", "tools/options", "tools/ranks", "tools/terminal"] + BASICS,
    "tools": ["include", "tools/terminal", "tools/npy", "tools/options", "tools/plot", "tools/judge",
              "tools/bench", "tools/ranks", "tools/run"] + BASICS,
    "python": ["include"],
    "bench": ["include", "examples"],
    "examples": ["include"],
    "tests": ["include", "core", "backends", "tools", "examples"],
    "tests/consumer": ["include"],
}

# Subcommands that may include more than their room.
EXCEPTIONS = {
    r"tools/(explain|info)\.c": INSIDE,
    r"tools/check\.c": INSIDE + ["backends/cpu/team.h"],
    r"tools/bench\.c": INSIDE + ["core/env.h"],
    r"tools/io\.c": INSIDE + ["backends/reference"],
}

# Written by the build: header, and the room that it counts for.
GENERATED = {"core/backends.inc": "core", "backends/cpu/isas.inc": "backends/cpu",
             "backends/cuda/images.inc": "backends/cuda", "backends/hip/images.inc": "backends/hip",
             "tests/page_transport.h": "tests"}

# (forbidden words, where they are allowed, why). Paths are regular expressions; comments and strings are not
# checked.
INTRINSIC = (r"\b_mm\d*_\w+|\b__m\d{2,3}[di]?\b|\b__builtin_(ia32|aarch64)_\w+|"
             r"\bv[a-z]\w*_b?[fsu]\d+\b|\b(b?float|u?int)\d+x\d+(x\d)?_t\b")
WORDS = [
    (INTRINSIC, r"backends/cpu/vec_\w+\.h|tests/.*|bench/.*", "intrinsics live in vec_*.h"),
    (r"<(x86|imm|xmm|emm|zmm|avx\w*)intrin\.h>|<arm_(neon|bf16)\.h>",
     r"backends/cpu/vec_\w+\.h|tests/.*|bench/.*", "intrinsics live in vec_*.h"),
    (r"#\s*pragma\s+omp\b|\bomp_\w+|<omp\.h>",
     r"backends/cpu/team\.c|tests/.*|bench/.*|tools/.*|examples/.*",
     "OpenMP's words live in backends/cpu/team.c"),
    (r"\bpthread_create\b|\bthrd_create\b", r"backends/cpu/pool\.c|core/distributed/transports/mpi\.c|tests/.*|bench/.*|examples/.*|tools/.*",
     "threads are started in backends/cpu/pool.c and transports/mpi.c only"),
    (r"\b__(CUDA|HIP|NVCC|CUDACC|HIPCC)\w*|\b__(device|host|global)__\b|\b(cuda|hip)[A-Z]\w*",
     r"core/host_device\.h|backends/(gpu|cuda|hip)/.*|core/distributed/transports/nccl(\.c|_vendor\.h)|bench/ranks\.c|tests/.*",
     "CUDA and HIP words live in host_device.h and the GPU folders"),
    (r"\b(sched_getaffinity|_SC_NPROCESSORS_\w+)\b", r"backends/cpu/grant\.c|tests/.*|bench/.*",
     "processors are counted in backends/cpu/grant.c, which knows of a container's limit too"),
    (r"\bFATTN_FEATURES_ALL\b", r"core/.*|include/.*|tests/.*|tools/.*",
     "a row names the features that it honours: FATTN_KERNEL_COMMON, FATTN_KERNEL_LAST and single ones"),
    (r"\bgetenv\b", r"core/env\.c|tests/.*|tools/.*|bench/.*", "the environment is read in core/env.c"),
    (r"(?<![\w.>])(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|strndup|asprintf|free)\s*\(",
     r"core/memory\.c|core/distributed/transports/.*|tests/.*|bench/.*|examples/.*|tools/.*", "the library's memory comes from core/memory.c alone"),
    (r"(?<![\w.>])(abort|exit|_Exit|quick_exit)\s*\(", r"tests/.*|tools/.*|bench/.*|examples/.*",
     "the library never ends the program"),
    (r"\bfmaxf?\(\s*\w*(error|worst|differ|\boff)\w*\b", r"(?!tests/).*",
     "fmax() loses an error that is NaN: worst_of() of tests/worst.h keeps it"),
    (r"\b(printf|puts|putchar|perror)\s*\(|\bstdout\b|\bstderr\b",
     r"core/log\.c|tests/.*|tools/.*|bench/.*|examples/.*", "the library prints through core/log.c only"),
]

# What modules of the Python package may import besides the standard library and the package itself. NumPy
# is never imported while the package is: that alone takes longer than importing fattn may.
PYTHON = {
    "python/fattn/torch": ["torch"],
    "python/fattn/flash_attn.py": ["torch"],
    "python/fattn/transformers.py": ["torch", "transformers"],
    "python/fattn/jax.py": ["jax", "numpy"],
}

# The core reads like mathematics on any machine: its template headers may not use the C library's.
TEMPLATES = ("core/online_softmax.h", "core/score.h", "core/philox.h", "core/band.h", "core/dtype.h")


def room_of(path):
    """The room that a path lies in, or None."""
    rooms = [room for room in MAY_INCLUDE if path == room or path.startswith(room + "/")]
    return max(rooms, key=len) if rooms else None


def without_comments(text, keep_strings=True):
    """The text with comments (and strings) blanked, lines kept."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        return token if keep_strings else token[0] + token[-1]
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text,
                  flags=re.S)


def lines_matching(text, pattern):
    for number, line in enumerate(text.split("\n"), 1):
        match = re.search(pattern, line)
        if match:
            yield number, match


def resolve(root, path, name):
    """The path of an #include "name" in path; None when there is no such file."""
    if name in GENERATED:
        return name
    for base in (os.path.dirname(path), "", "include"):
        candidate = os.path.normpath(os.path.join(base, name))
        if os.path.exists(os.path.join(root, candidate)):
            return candidate
    return None


def may_include(path, target):
    room = room_of(path)
    allowed = [room] + MAY_INCLUDE[room] + [d for names in EXCEPTIONS if re.fullmatch(names, path) for d in EXCEPTIONS[names]]
    home = GENERATED.get(target) or room_of(target)
    for place in allowed:
        if place == target or place == home or (home or "").startswith(place + "/"):
            return True
    return False


def includes(root):
    """Every include that is not allowed."""
    for path in tap.files(root):
        if room_of(path) is None:
            yield f"{path}: lies in no folder of MAY_INCLUDE"
            continue
        code = without_comments(tap.read(root, path))
        for number, match in lines_matching(code, r'^\s*#\s*include\s*(?:"([^"]+)"|<(fattn/[^>]+)>)'):
            name = match.group(1) or match.group(2)
            target = resolve(root, path, name)
            if target is None:
                yield f"{path}:{number}: {name} is neither a file of ours nor made by the build"
            elif not may_include(path, target):
                yield f"{path}:{number}: {room_of(path)} may not include {target}"


def circles(may_include):
    """Folders that may include themselves through others, each once."""
    reported = set()
    for start in may_include:
        paths, seen = [(start,)], set()
        while paths:
            path = paths.pop()
            for target in may_include.get(path[-1], []):
                if target == start and not reported & set(path):
                    reported |= set(path)
                    yield " -> ".join(path + (start,))
                elif target in may_include and target not in seen:
                    seen.add(target)
                    paths.append(path + (target,))


def lines_of(root, room):
    """Lines of source that lie in a room, without those of the rooms inside it."""
    return sum(tap.read(root, path).count("\n")
               for path in tap.files(root, tap.SOURCE + (".py",), [room.split("/")[0]])
               if room_of(path) == room)


def table(root):
    """Where the table of folders in docs/DESIGN.md is not what MAY_INCLUDE and the files say. A size may be off by
    a fifth before it has to be written anew."""
    listed = {}
    for number, match in lines_matching(tap.read(root, "docs/DESIGN.md"),
                                        r"^\| `([\w/]+)` \|.*\| ([\d,]+) \|$"):
        listed[match.group(1)] = (number, int(match.group(2).replace(",", "")))
    for room in MAY_INCLUDE:
        lines = lines_of(root, room)
        if room not in listed:
            yield f"docs/DESIGN.md: the table of folders lacks `{room}`, {lines} lines"
        elif abs(listed[room][1] - lines) * 5 > lines:
            yield f"docs/DESIGN.md:{listed[room][0]}: `{room}` has {lines} lines"
    for room, (number, _) in listed.items():
        if room not in MAY_INCLUDE:
            yield f"docs/DESIGN.md:{number}: `{room}` is no folder of tests/lint/rooms.py"


LONG = 600  # lines of a file about which docs/DESIGN.md says why it is one


def long_files(root):
    """Long files that docs/DESIGN.md does not speak of, and those it speaks of that are not long any more."""
    listed = {match.group(1) for _, match in lines_matching(tap.read(root, "docs/DESIGN.md"),
                                                            r"^\| `([\w/]+\.\w+)` \| [^|]+ \|$")}
    for path in tap.files(root, tap.SOURCE + (".py",)):
        lines = tap.read(root, path).count("\n")
        if lines > LONG and path not in listed and not path.startswith("tests/"):
            yield f"{path}: {lines} lines; docs/DESIGN.md does not say why"
        elif path in listed and lines < LONG * 9 // 10:
            yield f"docs/DESIGN.md: {path} has only {lines} lines"


def words(root):
    """Every word outside the files that it is restricted to."""
    for path in tap.files(root):
        text = tap.read(root, path)
        code = without_comments(text, keep_strings=False)
        for pattern, home, why in WORDS:
            if re.fullmatch(home, path):
                continue
            for number, match in lines_matching(code, pattern):
                yield f"{path}:{number}: {match.group(0)}: {why}"


def backend_names(root):
    """Every backend's name in a string of the core: the registry knows them from the build alone."""
    folder = os.path.join(root, "backends")
    names = [n for n in os.listdir(folder) if os.path.isdir(os.path.join(folder, n)) and n != "gpu"]
    if not names:
        return
    pattern = r'"[^"]*\b(' + "|".join(map(re.escape, names)) + r')\b[^"]*"'
    for path in tap.files(root, rooms=["core"]):
        code = re.sub(r"^\s*#\s*include.*", "", without_comments(tap.read(root, path)), flags=re.M)
        for number, match in lines_matching(code, pattern):
            yield f"{path}:{number}: the core names backend {match.group(1)}"


def templates(root):
    """Template headers that include more than they may."""
    allowed = r"<(stddef|stdint|stdbool|string)\.h>"
    for path in TEMPLATES:
        if not os.path.exists(os.path.join(root, path)):
            continue
        for number, match in lines_matching(without_comments(tap.read(root, path)),
                                            r"^\s*#\s*include\s*(<[^>]+>)"):
            if not re.fullmatch(allowed, match.group(1)):
                yield f"{path}:{number}: a template header may not include {match.group(1)}"


def imports(root):
    """Python modules with forbidden imports, or with imports at the top that are too slow there."""
    for path in tap.files(root, (".py",), ["python"]):
        allowed = [name for key, names in PYTHON.items() if path.startswith(key) for name in names]
        for node in ast.parse(tap.read(root, path)).body:
            names = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                     [node.module] if isinstance(node, ast.ImportFrom) else [])
            for name in (n.split(".")[0] for n in names):
                if name not in ("fattn", *allowed, *sys.stdlib_module_names):
                    yield f"{path}:{node.lineno}: imports {name} at its top"


def results(root):
    return [
        ("folders include only what they may", includes(root)),
        ("no folder includes itself through others", circles(MAY_INCLUDE)),
        ("docs/DESIGN.md has the folders and their sizes", table(root)),
        ("docs/DESIGN.md has the long files and why", long_files(root)),
        ("restricted words stay in their files", words(root)),
        ("the core names no backend", backend_names(root)),
        ("template headers need no C library", templates(root)),
        ("Python modules import only what they may", imports(root)),
    ]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
