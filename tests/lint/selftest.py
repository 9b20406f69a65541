# SPDX-License-Identifier: Apache-2.0
"""Every lint finds its planted violation, and nothing in the same tree without it.

usage: selftest.py
"""

import os
import shutil
import subprocess
import sys
import tempfile

import alone
import code_objects
import constants
import cuda_code
import environment
import execstack
import features
import figures
import format as formatting
import hardening
import headers
import hopper_code
import instructions
import links
import rooms
import shared_object
import spdx
import tally
import tap

SPDX_C = "/* SPDX-License-Identifier: Apache-2.0 */\n"

EDITOR = """\
If:
  PathMatch: backends/cpu/vec_a.*\\.h
CompileFlags:
  Add: [--target=aarch64-linux-gnu, -isystem/usr/aarch64-linux-gnu/include]
"""

TWIN = "bool {}_differ(const fattn_problem {}p)\n{{\n    return p{}features & ({});\n}}\n"

# title, lint(root) -> findings, a tidy tree, a tree with the violation planted (path: text)
TREES = [
    ("core includes a backend", rooms.includes,
     {"core/a.c": '#include "core/a.h"\n#include "fattn/fattn.h"\n#include "core/backends.inc"\n',
      "core/a.h": "", "include/fattn/fattn.h": '#include "fattn/version.h"\n', "include/fattn/version.h": ""},
     {"core/a.c": '#include "backends/cpu/b.h"\n', "backends/cpu/b.h": ""}),
    ("a backend includes another", rooms.includes,
     {"backends/cpu/a.c": '#include "a.h"\n#include "core/c.h"\n#include "backends/cpu/isas.inc"\n',
      "backends/cpu/a.h": "", "core/c.h": ""},
     {"backends/cpu/a.c": '#include "../reference/b.h"\n', "backends/reference/b.h": ""}),
    ("include/ includes core", rooms.includes,
     {"include/fattn/fattn.h": '#include <stddef.h>\n'},
     {"include/fattn/fattn.h": '#include "core/a.h"\n', "core/a.h": ""}),
    ("cuda includes gpu, cpu does not", rooms.includes,
     {"backends/cuda/a.c": '#include "backends/gpu/g.h"\n', "backends/gpu/g.h": ""},
     {"backends/cpu/a.c": '#include "backends/gpu/g.h"\n', "backends/gpu/g.h": ""}),
    ("a tool without an exception looks inside", rooms.includes,
     {"tools/check.c": '#include "core/kernel.h"\n', "core/kernel.h": ""},
     {"tools/run.c": '#include "core/kernel.h"\n', "core/kernel.h": ""}),
    ("a part of the tool that does not judge sees the oracle", rooms.includes,
     {"tools/judge/a.c": '#include "backends/reference/naive.h"\n', "backends/reference/naive.h": ""},
     {"tools/info.c": '#include "backends/reference/naive.h"\n', "backends/reference/naive.h": ""}),
    ("two folders that include each other", lambda root: rooms.circles(
        {room: text.split() for room, text in ((r, tap.read(root, r)) for r in ("a", "b", "c"))}),
     {"a": "b c", "b": "c", "c": ""}, {"a": "b", "b": "c", "c": "b"}),
    ("a folder that has grown", lambda root: (f for f in rooms.table(root) if "`core` has" in f),
     {"core/a.h": "\n" * 100, "docs/DESIGN.md": "| `core` | C | none | 90 |\n"},
     {"core/a.h": "\n" * 100, "docs/DESIGN.md": "| `core` | C | none | 70 |\n"}),
    ("a folder that the table lacks", lambda root: (f for f in rooms.table(root) if "`core`" in f),
     {"core/a.h": "\n", "docs/DESIGN.md": "| `core` | C | none | 1 |\n"},
     {"core/a.h": "\n", "docs/DESIGN.md": "| `gore` | C | none | 1 |\n"}),
    ("a long file without a reason", rooms.long_files,
     {"core/a.c": "\n" * 601, "tests/b.c": "\n" * 700, "docs/DESIGN.md": "| `core/a.c` | one act |\n"},
     {"core/a.c": "\n" * 601, "docs/DESIGN.md": "| `core/b.c` | one act |\n"}),
    ("a reason for a file that is long no more", rooms.long_files,
     {"core/a.c": "\n" * 560, "docs/DESIGN.md": "| `core/a.c` | one act |\n"},
     {"core/a.c": "\n" * 530, "docs/DESIGN.md": "| `core/a.c` | one act |\n"}),
    ("a feature that makes sequences differ for the device alone", features.check_twins,
     {"backends/cuda/wgmma.c": TWIN.format("fattn_wgmma_sequences", "*", "->", "FATTN_A | FATTN_B"),
      "backends/gpu/sequence.cuh": TWIN.format("gpu_sequences", "&", ".", "FATTN_B |\n        FATTN_A")},
     {"backends/cuda/wgmma.c": TWIN.format("fattn_wgmma_sequences", "*", "->", "FATTN_A | FATTN_B"),
      "backends/gpu/sequence.cuh": TWIN.format("gpu_sequences", "&", ".", "FATTN_B | FATTN_A | FATTN_C")}),
    ("a feature that a table of the documents does not show as it is", features.check,
     {"core/feature.c": '{NAMES(FATTN_CAUSAL, "causal"), .option = "causal"},\n{NAMES(FATTN_PAGED, "paged")},\n'
                        '{NAMES(FATTN_SEQSTART_K, "s")}, {NAMES(FATTN_ALIBI_BIAS, "a")},\n',
      "core/kernel.h": "#define FATTN_KERNEL_COMMON (FATTN_CAUSAL | FATTN_PAGED)\n"
                       "#define FATTN_KERNEL_LAST (FATTN_KERNEL_COMMON | FATTN_SEQSTART_K)\n",
      "backends/gpu/gpu.h": "#define FATTN_GPU_LEAN (FATTN_CAUSAL)\n#define FATTN_KERNEL_NOT_BACKWARD (FATTN_PAGED)\n"
                            "#define FATTN_GPU_BACKWARD_LEAN (FATTN_GPU_LEAN)\n",
      "backends/cpu/cpu.h": "#define FATTN_CPU_FEATURES (FATTN_KERNEL_LAST)\n",
      "docs/DESIGN.md": features.HEADING + "\n|---|---|---|---|---|---|---|\n"
                        "| `FATTN_CAUSAL` | `--causal` | yes | yes | yes | yes | yes |\n"
                        "| `FATTN_PAGED` |  | forward | forward | forward | forward | - |\n"
                        "| `FATTN_SEQSTART_K` |  | yes | yes | yes | - | - |\n"
                        "| `FATTN_ALIBI_BIAS` |  | yes | - | - | - | - |\n"},
     {"core/feature.c": '{NAMES(FATTN_CAUSAL, "causal")},\n{NAMES(FATTN_PAGED, "paged")},\n'
                        '{NAMES(FATTN_SEQSTART_K, "s")}, {NAMES(FATTN_ALIBI_BIAS, "a")},\n',
      "core/kernel.h": "#define FATTN_KERNEL_COMMON (FATTN_CAUSAL | FATTN_PAGED)\n"
                       "#define FATTN_KERNEL_LAST (FATTN_KERNEL_COMMON | FATTN_SEQSTART_K)\n",
      "backends/gpu/gpu.h": "#define FATTN_GPU_LEAN (FATTN_CAUSAL)\n#define FATTN_KERNEL_NOT_BACKWARD (FATTN_PAGED)\n"
                            "#define FATTN_GPU_BACKWARD_LEAN (FATTN_GPU_LEAN)\n",
      "backends/cpu/cpu.h": "#define FATTN_CPU_FEATURES (FATTN_KERNEL_LAST)\n",
      "docs/DESIGN.md": features.HEADING + "\n|---|---|---|---|---|---|---|\n"
                        "| `FATTN_CAUSAL` | `--causal` | yes | yes | yes | yes | yes |\n"}),
    ("an example includes core", rooms.includes,
     {"examples/a.c": "#include <fattn/fattn.h>\n", "include/fattn/fattn.h": ""},
     {"examples/a.c": '#include "core/a.h"\n', "core/a.h": ""}),
    ("an include that is no file", rooms.includes,
     {"core/a.c": '/* #include "nowhere.h" */\n'},
     {"core/a.c": '#include "nowhere.h"\n'}),
    ("intrinsics outside vec_*.h", rooms.words,
     {"backends/cpu/vec_a.h": "__m256 x = _mm256_setzero_ps();\n"},
     {"backends/cpu/a.c": "__m256 x = _mm256_setzero_ps();\n"}),
    ("Arm's intrinsics outside vec_*.h", rooms.words,
     {"backends/cpu/vec_a.h": "float32x4_t x = vdupq_n_f32(1);\n"},
     {"backends/cpu/a.c": "y = vfmaq_lane_f32(y, x, a, 0);\n"}),
    ("an intrinsics header outside vec_*.h", rooms.words,
     {"backends/cpu/vec_a.h": "#include <immintrin.h>\n"}, {"core/a.h": "#include <immintrin.h>\n"}),
    ("OpenMP outside team.c", rooms.words,
     {"backends/cpu/team.c": "#pragma omp parallel\n"},
     {"backends/cpu/a.c": "#pragma omp parallel\n"}),
    ("a thread outside pool.c", rooms.words,
     {"backends/cpu/pool.c": "pthread_create(&t, 0, f, 0);\n"},
     {"backends/cpu/team.c": "pthread_create(&t, 0, f, 0);\n"}),
    ("a thread in the core", rooms.words,
     {"core/a.c": "pthread_mutex_lock(&m); /* pthread_create */\n"}, {"core/a.c": "pthread_create(&t, 0, f, 0);\n"}),
    ("CUDA words in the core", rooms.words,
     {"core/host_device.h": "#ifdef __CUDACC__\n#endif\n"}, {"core/a.h": "#ifdef __CUDACC__\n#endif\n"}),
    ("getenv outside env.c", rooms.words,
     {"core/env.c": 'getenv("X");\n'}, {"backends/cpu/a.c": 'getenv("X");\n'}),
    ("malloc outside memory.c", rooms.words,
     {"core/memory.c": "malloc(1);\n", "core/a.c": "backend->free(p); my_free(p);\n"},
     {"core/plan.c": "free(p);\n"}),
    ("fmax() of errors in a test", rooms.words,
     {"tests/a.c": "worst = worst_of(worst, error), most = fmax(most, x);\n"},
     {"tests/a.c": "worst = fmax(worst, error);\n"}),
    ("abort in the library", rooms.words,
     {"core/a.c": "// abort()\nassert(x);\n"}, {"core/a.c": "abort();\n"}),
    ("printing outside log.c", rooms.words,
     {"core/a.c": 'snprintf(text, 4, "printf()");\n'}, {"core/a.c": 'printf("x");\n'}),
    ("a Python module imports another library at its top", rooms.imports,
     {"python/fattn/a.py": "import os\nfrom fattn import _c\n\ndef f():\n    import numpy\n",
      "python/fattn/torch.py": "import torch\n"},
     {"python/fattn/a.py": "from numpy import array\n"}),
    ("the core names a backend", rooms.backend_names,
     {"core/a.c": '/* "reference" */ char *s = "cpus";\n', "backends/reference/a.c": "", "backends/cpu/b.c": ""},
     {"core/a.c": 'char *s = "the reference backend";\n', "backends/reference/a.c": ""}),
    ("a template header with math.h", rooms.templates,
     {"core/score.h": "#include <stdint.h>\n"}, {"core/score.h": "#include <math.h>\n"}),
    ("a bit that is an expression", lambda root: constants.check_bits("output", constants.in_header(root)),
     {"include/fattn/fattn.h": "#define FATTN_H\n#define FATTN_OUT_A 0x1u\n#define FATTN_OUT_B 0x2u /* b */\n"},
     {"include/fattn/fattn.h": "#define FATTN_OUT_A 0x1u\n#define FATTN_OUT_B (1u << 1)\n"}),
    ("a bit that two constants have", lambda root: constants.check_bits("output", constants.in_header(root)),
     {"include/fattn/fattn.h": "#define FATTN_OUT_A 0x1u\n#define FATTN_OUT_B 0x2u\n"},
     {"include/fattn/fattn.h": "#define FATTN_OUT_A 0x1u\n#define FATTN_OUT_B 0x3u\n"}),
    ("a bit that is missing among all", lambda root: constants.check_bits("feature", constants.in_header(root)),
     {"include/fattn/fattn.h": "#define FATTN_A 0x1ull\n#define FATTN_B 0x2ull\n#define FATTN_FEATURES_ALL 0x3ull\n"},
     {"include/fattn/fattn.h": "#define FATTN_A 0x1ull\n#define FATTN_B 0x2ull\n#define FATTN_FEATURES_ALL 0x1ull\n"}),
    ("an undocumented variable", lambda root: flat(environment.results(root)),
     {"core/env.c": 'f("FATTN_A"); /* "FATTN_B" */\n', "docs/BUILDING.md": "| `FATTN_A=n` | x |\n"},
     {"core/env.c": 'f("FATTN_A"), f("FATTN_B");\n', "docs/BUILDING.md": "| `FATTN_A` | x |\n`FATTN_B`\n"}),
    ("a documented variable that is not read", lambda root: flat(environment.results(root)),
     {"core/env.c": 'f("FATTN_A");\n', "docs/BUILDING.md": "| `FATTN_A` | x |\n"},
     {"core/env.c": 'f("FATTN_A");\n', "docs/BUILDING.md": "| `FATTN_A` | x |\n| `FATTN_B` | x |\n"}),
    ("a backend's undocumented variable", lambda root: flat(environment.results(root)),
     {"core/env.c": 'f("FATTN_A");\n', "backends/cpu/a.c": 'fattn_env_variable v = {"FATTN_B", x};\n',
      "docs/BUILDING.md": "| `FATTN_A` | x |\n| `FATTN_B` | x |\n"},
     {"core/env.c": 'f("FATTN_A");\n', "backends/cpu/a.c": 'fattn_env_variable v = {"FATTN_B", x};\n',
      "docs/BUILDING.md": "| `FATTN_A` | x |\n"}),
    ("a header that needs another before it", lambda root: flat(alone.results(root, CC, [])),
     {"backends/cpu/a.h": "#include <stdint.h>\nint64_t x;\n"}, {"backends/cpu/a.h": "int64_t x;\n"}),
    ("a header of another processor with this one's words", alone.as_an_editor,
     {".clangd": EDITOR, "backends/cpu/vec_a.h": "#include <arm_neon.h>\nextern float32x4_t x;\n"},
     {".clangd": EDITOR, "backends/cpu/vec_a.h": "#include <immintrin.h>\nextern __m128 x;\n"}),
    ("no header of another processor", alone.as_an_editor,
     {".clangd": EDITOR, "backends/cpu/vec_a.h": "extern int x;\n"},
     {".clangd": EDITOR, "backends/cpu/vec_b.h": "extern int x;\n"}),
    ("no SPDX line in C", spdx.missing,
     {"core/a.c": SPDX_C, "tools/x": "not a script\n"}, {"core/a.c": "int x;\n"}),
    ("no SPDX line in a script", spdx.missing,
     {"tools/x": "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n"}, {"tools/x": "#!/bin/sh\n"}),
    ("the SPDX line is another's", spdx.missing,
     {"core/meson.build": "# SPDX-License-Identifier: Apache-2.0\n"},
     {"core/meson.build": "# SPDX-License-Identifier: MIT\n"}),
    ("a link to a file that is not there", links.broken_links,
     {"README.md": "[a](docs/a.md#one-two) `[b](no.md)` [c](https://a.org/no.md)\n", "docs/a.md": "# One `two`\n[r](../README.md)\n"},
     {"README.md": "[a](docs/b.md)\n", "docs/a.md": "# One\n"}),
    ("a picture that is not there", links.broken_links,
     {"README.md": "![a](a.svg)\n", "a.svg": ""}, {"README.md": "![a](a.svg)\n"}),
    ("a link out of the tree", links.broken_links,
     {"docs/a.md": "[r](..)\n"}, {"docs/a.md": "[r](../../a.md)\n"}),
    ("a link to a heading that is not there", links.broken_links,
     {"docs/a.md": "[x](#b-1) [y](b.md#2-x-y)\n# B\n# B\n", "docs/b.md": "## 2 X, y\n"},
     {"docs/a.md": "[y](b.md#2-x-y)\n", "docs/b.md": "```\n## 2 X, y\n```\n"}),
    ("a link to a second heading of the same name", links.broken_links,
     {"a.md": "[x](#b-1)\n# B\n# B\n"}, {"a.md": "[x](#b-1)\n# B\n"}),
    ("a row with a cell too many", links.broken_tables,
     {"a.md": "| a | b |\n|---|:-:|\n| `c \\| d` | |\n"}, {"a.md": "| a | b |\n|---|---|\n| `c | d` | |\n"}),
    ("a row with a cell too few", links.broken_tables,
     {"a.md": "| a | b |\n|---|---|\n| c | d |\n"}, {"a.md": "| a | b |\n|---|---|\n| c |\n"}),
    ("a head with other columns than its rule", links.broken_tables,
     {"a.md": "| a |\n|---|\n"}, {"a.md": "| a |\n|---|---|\n"}),
    ("a table without a rule", links.broken_tables,
     {"a.md": "```\n| a |\n| b |\n```\n"}, {"a.md": "| a |\n| b |\n"}),
    ("a table that a line divides", links.broken_tables,
     {"a.md": "| a |\n|---|\n| b |\n"}, {"a.md": "| a |\n|---|\ntext\n| b |\n\n"}),
    ("a space at the end of a script's line", formatting.plain_text,
     {"tools/a": "#!/bin/sh\nls\n", "tests/corpus/b": "data \n"}, {"tools/a": "#!/bin/sh\nls \n"}),
    ("a space at the end of a line", formatting.plain_text,
     {"docs/a.md": "a\n"}, {"docs/a.md": "a \n"}),
    ("a tab", formatting.plain_text, {"core/a.c": "int x;\n"}, {"core/a.c": "\tint x;\n"}),
    ("no newline at the end", formatting.plain_text, {"a.md": "a\n"}, {"a.md": "a"}),
    ("a line too wide", formatting.plain_text,
     {"core/a.c": "/* " + 94 * "x" + " */\n"}, {"core/a.c": "/* " + 95 * "x" + " */\n"}),
    ("C that is not formatted", formatting.c_format,
     {"core/a.c": "int f(int a) { return a; }\n"}, {"core/a.c": "int f( int a ) {return a;}\n"}),
]


def figures_case():
    """The tree's own documents pass; one digit changed in a table, and a picture that is missing, are found."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ("bench/figures", "docs/pictures"):
            shutil.copytree(os.path.join(TOP, path), os.path.join(folder, path))
        for path in ("README.md", "docs/PERFORMANCE.md", "docs/DISTRIBUTED.md"):
            shutil.copy(os.path.join(TOP, path), os.path.join(folder, path))
        sound = figures.stale(folder)
        performance = os.path.join(folder, "docs/PERFORMANCE.md")
        with open(performance, encoding="utf-8") as file:
            text = file.read()
        with open(performance, "w", encoding="utf-8") as file:
            file.write(text.replace("**1.", "**2.", 1))
        changed = figures.stale(folder)
        os.remove(os.path.join(folder, "docs/pictures/cpu.svg"))
        missing = figures.stale(folder)
    wrong = [f"sound documents: {line}" for line in sound]
    wrong += [] if len(changed) == 1 and "PERFORMANCE.md" in changed[0] else [f"a changed digit: {changed}"]
    return wrong + ([] if len(missing) == 2 else [f"a missing picture: {missing}"])


def flat(results):
    return [finding for _, findings in results for finding in findings]


def plant(folder, files):
    for path, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(folder, path)) or folder, exist_ok=True)
        with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
            file.write(text)


def findings_in(lint, files):
    with tempfile.TemporaryDirectory() as folder:
        plant(folder, files)
        if os.path.exists(os.path.join(TOP, ".clang-format")):
            shutil.copy(os.path.join(TOP, ".clang-format"), folder)
        found = lint(folder)
        return found if isinstance(found, tap.Skip) else list(found)


def judge(tidy, planted):
    """What is wrong with a lint that says these two things."""
    if isinstance(planted, tap.Skip):
        return planted
    return ([f"found in the tidy twin: {f}" for f in tidy] +
            ([] if planted else ["did not find the planted violation"]))


def compiled(folder, name, text, *flags):
    """Compiles text to folder/name."""
    source = os.path.join(folder, name + ".c")
    with open(source, "w", encoding="utf-8") as file:
        file.write(text)
    out = os.path.join(folder, name)
    subprocess.run(CC + [*flags, "-o", out, source], check=True, capture_output=True)
    return out


def header_case(folder):
    plant(folder, {"good.h": "static inline int f(int a) { return a; }\n",
                   "bad.h": "size_t missing_include(void);\n", "warns.h": "int f();\n"})
    found = {n: headers.compile_alone(folder, "c11", CC, n) for n in ("good.h", "bad.h", "warns.h")}
    yield "a header that needs another first", judge(found["good.h"], found["bad.h"])
    yield "a header that warns", judge(found["good.h"], found["warns.h"])


def stack_case(folder):
    code = "int main(void) { return 0; }\n"
    blob = '__asm__(".section .note.GNU-stack,\\"x\\",@progbits\\n.text\\n");\n'
    yield "an object that asks for an executable stack", judge(
        execstack.object_file(compiled(folder, "good.o", code, "-c")),
        execstack.object_file(compiled(folder, "bad.o", blob + code, "-c")))
    bare = os.path.join(folder, "bare.o")
    subprocess.run(["objcopy", "--remove-section=.note.GNU-stack", os.path.join(folder, "good.o"), bare],
                   check=True)
    yield "an object without the section", judge([], execstack.object_file(bare))
    yield "a program with an executable stack", judge(
        execstack.image(compiled(folder, "good", code)),
        execstack.image(compiled(folder, "bad", code, "-Wl,-z,execstack")))


def hardening_case(folder):
    code = ("#include <stdio.h>\n#include <string.h>\nvoid f(char *, int);\nvoid f(char *to, int n)\n"
            "{ char a[64]; snprintf(a, n, \"%s\", to); memcpy(to, a, 64); }\n")
    flags = ("-shared", "-fPIC", "-O2", "-U_FORTIFY_SOURCE")
    hard = compiled(folder, "hard.so", code, *flags, "-D_FORTIFY_SOURCE=2", "-fstack-protector-strong",
                    "-Wl,-z,relro", "-Wl,-z,now")
    soft = compiled(folder, "soft.so", code, *flags, "-fno-stack-protector", "-Wl,-z,norelro", "-Wl,-z,lazy")
    for name, measure in hardening.MEASURES.items():
        yield f"a library without hardening: {name}", judge(hardening.lacks(measure, hard),
                                                            hardening.lacks(measure, soft))

    def notes(text):
        return hardening.lacks(hardening.LANDING, "a.o", lambda option, path: text)
    yield "an object without landing pads", judge(notes("  Properties: x86 feature: IBT, SHSTK\n"),
                                                  notes("  Properties: x86 feature: IBT\n"))


def library_case(folder):
    plant(folder, {"include/fattn/distributed.h": "", "include/fattn/fattn.h":
                   "FATTN_API int a(void);\nFATTN_API const char *\nb(int x);\n/* FATTN_API int c(void); */\n"})
    good = compiled(folder, "good.so", "int a(void) { return 0; } int b(int x) { return x; }\n",
                    "-shared", "-fPIC", "-Wl,-soname,libfattn.so.0", "-Wl,--no-as-needed", "-lm")
    more = compiled(folder, "more.so", "int a(void) { return 0; } int b(int x) { return x; } int c;\n",
                    "-shared", "-fPIC")
    less = compiled(folder, "less.so", "int a(void) { return 0; }\n", "-shared", "-fPIC",
                    "-Wl,--no-as-needed", "-lutil", "-Wl,-soname,libfattn.so.1")
    def says(library):
        return [list(findings) for _, findings in list(shared_object.results(folder, "0", library))[:4]]
    tidy = says(good)
    yield "a symbol that leaks", judge(tidy[1], says(more)[1])
    yield "a function that is not exported", judge(tidy[1], says(less)[1])
    yield "no SONAME", judge(tidy[2], says(more)[2])
    yield "another SONAME", judge(tidy[2], says(less)[2])
    other = compiled(folder, "other.so", "int x;\n", "-shared", "-fPIC", "-Wl,-soname,libother.so.1")
    needy = compiled(folder, "needy.so", "int y;\n", "-shared", "-fPIC", "-Wl,--no-as-needed", other)
    yield "a library that needs another", judge(tidy[3], says(needy)[3])
    large = compiled(folder, "large.so", "const char a[1 << 20] = {1};\n", "-shared", "-fPIC", "-g")
    def sized(library):
        return list(list(shared_object.results(folder, "0", library, 1 << 20))[4][1])
    yield "a library that is too large", judge(sized(good), sized(large))


def instruction_case(folder):
    """One object of each sort; then disassemblies, which need no compiler."""
    objdump = shutil.which("objdump")
    machine = subprocess.run(CC + ["-dumpmachine"], check=True, capture_output=True, text=True).stdout
    plain, avx = 'void f(void) { __asm__("paddd %xmm0, %xmm1"); }\n', 'void f(void) { __asm__("vzeroupper"); }\n'
    title = "AVX in an object for every processor"
    if not objdump or not machine.startswith("x86_64"):
        yield title, tap.Skip("no objdump of x86")
    else:
        def says(lint, flags, name, text):
            path = compiled(folder, name, text, "-c")
            allowed = instructions.extensions("x86_64", flags)
            return list(lint("x86_64", allowed, path, instructions.disassemble(objdump, [path])[path]))
        yield title, judge(says(instructions.foreign, [], "plain.o", plain),
                           says(instructions.foreign, [], "avx.o", avx))
        yield "kernels that are not what they are named", judge(
            says(instructions.unused, ["-mavx2", "-mfma"], "avx.o", avx),
            says(instructions.unused, ["-mavx2", "-mfma"], "plain.o", plain))

    def disassembly(*code):
        return {"f": [f"   {4 * n:x}:\t{line}" for n, line in enumerate(code)]}
    def uses(family, flags, text):
        return list(instructions.foreign(family, instructions.extensions(family, flags), "a.o", disassembly(text)))
    for family, flags, more, text in (
            ("x86_64", ["-mavx2"], ["-mavx512f"], "62 f1 7c 48 58 c0 \tvaddps %zmm0,%zmm0,%zmm0"),
            ("x86_64", ["-mavx2"], ["-mavx512f"], "65 62 f1 7c 48 58 00 \tvaddps %gs:(%rax),%zmm0,%zmm0"),
            ("x86_64", ["-mavx2"], ["-mavx512f"], "c5 f8 92 c8 \tkmovw  %eax,%k1"),
            ("x86_64", ["-mavx2", "-mavx512f"], ["-mavx512bf16"], "62 f2 6e 48 52 d9 \tvdpbf16ps %zmm1,%zmm2,%zmm3"),
            ("aarch64", [], ["-march=armv8.2-a+bf16"], "2e40fc00 \tbfdot\tv0.4s, v0.8h, v0.8h")):
        yield f"code for {more[0]} without it", judge(uses(family, flags + more, text), uses(family, flags, text))

    def loop(family, *more):
        text = {"x86_64": "c4 \tvfmadd231ps %zmm1,%zmm2,%zmm3", "aarch64": "4f \tfmla\tv1.4s, v2.4s, v3.s[0]"}[family]
        jump = {"x86_64": "75 \tjne    0 <f>", "aarch64": "54 \tb.ne\t0 <f>"}[family]
        return list(instructions.spills(family, "a.o", disassembly(*[text] * 8, *more, jump)))
    for family, tidy, planted in (("x86_64", "62 \tvmovups (%rbp),%zmm1", "62 \tvmovaps %zmm1,-0x50(%rbp)"),
                                  ("x86_64", "48 \tmov    0x8(%rsp),%rax", "62 \tvaddps 0x40(%rsp),%zmm1,%zmm2"),
                                  ("aarch64", "3d \tldr\tq1, [x1]", "ad \tstp\tq1, q2, [sp, #32]")):
        yield f"a spill: {planted.split()[1]}", judge(loop(family, tidy), loop(family, planted))
    yield "kernels without a loop of products", judge(
        loop("x86_64"), list(instructions.spills("x86_64", "a.o", disassembly("90 \tnop"))))


def code_object_case(folder):
    """A kernel that a compiler made, where there is one; then what metadata and disassembly may say."""
    source = os.path.join(folder, "k.hip")
    with open(source, "w", encoding="utf-8") as file:
        file.write('extern "C" __attribute__((global)) void k(int *a, int n) {\n'
                   "    volatile int x[99]; x[n] = a[n]; a[0] = x[a[1]]; }\n")
    clang, title = shutil.which("clang++-22"), "a kernel with memory of its own"
    if not clang or not shutil.which("ld.lld-22"):
        yield title, tap.Skip("no clang++-22 and lld-22")
    else:
        subprocess.run([clang, "-x", "hip", "--offload-arch=gfx942", "--cuda-device-only", "-nogpuinc", "-nogpulib",
                        "--no-gpu-bundle-output", source, "-o", source + ".co"], check=True)
        kernels = code_objects.metadata(source + ".co")
        calm = [{**kernel, ".private_segment_fixed_size": 0} for kernel in kernels]
        yield title, judge(list(code_objects.spills("k", calm)), list(code_objects.spills("k", kernels)))

    def kernel(name, local, registers):
        return list(code_objects.heights("a.co", [{".name": name, ".group_segment_fixed_size": local,
                                                   ".vgpr_count": registers}]))
    yield "a kernel of too many registers", judge(kernel("simt_forward_64", 35840, 264),
                                                  kernel("simt_forward_64", 35840, 265))
    yield "a kernel of too much LDS", judge(kernel("merge", 1024, 64), kernel("merge", 1025, 64))

    def loop(*more):
        body = ["v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1]"] * 48 + list(more)
        code = [(4 * n, text, None) for n, text in enumerate(body)] + [(4 * len(body), "s_branch 65472", 0)]
        return {"simt_forward_64": code}
    moves = ["v_readlane_b32 s0, v1, 2"] * 5
    yield "a loop that moves values", judge(list(code_objects.busy("a.co", loop(*moves[:4]))),
                                            list(code_objects.busy("a.co", loop(*moves))))
    none = {"simt_forward_64": [(0, "s_endpgm", None)]}
    yield "a kernel without a loop of products", judge(list(code_objects.busy("a.co", loop())),
                                                       list(code_objects.busy("a.co", none)))
    name, count = "matrix_lean_bf16_128", code_objects.tile_products("matrix_lean_bf16_128", 64) // (32 * 32 * 8)

    def tiles(*body):
        code = [(4 * n, text, None) for n, text in enumerate(body)] + [(4 * len(body), "s_cbranch_scc0 65472", 0)]
        return list(code_objects.matrices("a.co", [{".name": name, ".wavefront_size": 64}], {name: code}))
    products = ["v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]"] * count
    yield "a loop that makes a product too few", judge(tiles(*products), tiles(*products[1:]))
    yield "a loop on matrix units that moves values", judge(tiles(*products, *moves),
                                                           tiles(*products, *moves, *moves))

    def counting(*body):
        texts = ["global_store_dword v[0:1], v2, off", *body, "s_barrier", "global_atomic_add_x2 v[0:1], v[2:3], off"]
        return list(code_objects.counts("a.gfx942.co", {"a": [(4 * n, text, None) for n, text in enumerate(texts)]}))
    yield "a count before what is counted is there", judge(counting("s_waitcnt vmcnt(0)"), counting("s_nop 0"))
    yield "reads of 2 bytes", judge(list(code_objects.narrow("a.co", loop("ds_read_b128 v[0:3], v4"))),
                                    list(code_objects.narrow("a.co", loop("ds_read_u16 v0, v4"))))


def cuda_code_cases():
    """(title, complaint) of the figures of CUDA entries, and of what they are of."""
    rows = {"mma_a": {"80": (128, 4, 64), "90": (120, 0, 64)}}
    def found(*figures):
        return list(cuda_code.judge("mma", "80", {"mma_a": figures}, rows))
    yield "an entry of too many registers", judge(found(128, 4, 64), found(129, 4, 64))
    yield "an entry that spills more", judge(found(100, 4, 64), found(100, 5, 64))
    yield "an entry with products twice", judge(found(128, 0, 64), found(128, 0, 128))
    yield "an entry that is not listed", judge(found(1, 0, 0), list(cuda_code.judge("mma", "80", {"b": (1, 0, 0)}, rows)))

    def digest(source, header):
        with tempfile.TemporaryDirectory() as root:
            for path, text in (("backends/cuda/kernels/a.cu", source), ("core/b.h", header)):
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            return tap.digest(root, cuda_code.kernels("a"))
    source = '#include "core/b.h"\nint x; /* one */\n'
    first, same = digest(source, "int b;\n"), digest(source.replace("one", "another"), "int  b; // two\n")
    yield "a changed header of an image", judge([] if first == same else ["comments count"],
                                               ["changed"] if digest(source, "int c;\n") != first else [])


def report_case():
    """A lint that finds nothing to look at, or something wrong, fails."""
    def status(results):
        done = subprocess.run([sys.executable, "-c", f"import tap, sys; sys.exit(tap.report({results!r}))"],
                              capture_output=True, cwd=os.path.dirname(os.path.abspath(__file__)), check=False)
        return done.returncode
    expected = [([], 1), ([("a", ["wrong"])], 1), ([("a", ["wrong"]), ("b", [])], 1), ([("a", [])], 0)]
    return [f"{results!r}: exit status {status(results)}" for results, want in expected if status(results) != want]


def tally_case():
    """Programs whose results are easily miscounted."""
    expected = [
        ("OK", "ok 1 - a\nok 2 - b # SKIP no GPU\n1..2\n", [1, 0, 1]),
        ("FAIL", "ok 1 - a\nnot ok 2 - b\n1..2\n", [1, 1, 0]),
        ("ERROR", "ok 1 - a\n", [1, 1, 0]),
        ("TIMEOUT", "", [0, 1, 0]),
        ("SKIP", "", [0, 1, 0]),
        ("SKIP", "1..0 # SKIP no GPU\n", [0, 0, 1]),
        ("OK", "not ok 1 - a # TODO\n1..1\n", [0, 1, 0]),
        ("OK", "# ok so far\nok 1\n", [1, 0, 0]),
    ]
    for result, out, want in expected:
        totals, _ = tally.tally([{"name": "x", "result": result, "stdout": out}])
        if totals != want:
            yield f"{result} {out!r}: counted {totals}, not {want}"


def hopper_case():
    product, of_registers, load, store, gather, other = 0x9F0, 0xDF0, 0x983, 0x387, 0x948, 0x221

    def found(*words, products=2):
        code = b"".join((0x12345000 | word).to_bytes(16, "little") for word in words)
        return list(hopper_code.look(code, products, hopper_code.BARRED))
    tidy = found(load, product, other, of_registers, store)
    yield "a product too few", judge(tidy, found(product, other))
    yield "a third product too few", judge(found(product, other, of_registers, product, products=3),
                                           found(product, other, of_registers, products=3))
    for title, word in (("a load", load), ("a store", store), ("a gathering", gather)):
        yield f"{title} among products", judge(tidy, found(product, word, product))
    known = hopper_code.listed("# a.cu 1 2\nb.cu 3 4\n")
    yield "other sources than those that were read", judge([] if hopper_code.stands(known, "b.cu", "3", "4") else ["b.cu"],
                                                          ["b.cu"] if not hopper_code.stands(known, "b.cu", "3", "5")
                                                          and not hopper_code.stands(known, "a.cu", "1", "2") else [])


def results():
    for title, lint, tidy, planted in TREES:
        yield title, judge(findings_in(lint, tidy), findings_in(lint, planted))
    for case in (header_case, stack_case, hardening_case, library_case, instruction_case,
                 code_object_case):
        with tempfile.TemporaryDirectory() as folder:
            yield from case(folder)
    yield from hopper_case()
    yield from cuda_code_cases()
    yield "the report fails when it should", report_case()
    yield "the tally counts what failed", tally_case()
    yield "a table or picture that is not what was measured", figures_case()


TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CC = sys.argv[1:] or ["cc"]

if __name__ == "__main__":
    sys.exit(tap.report(results()))
