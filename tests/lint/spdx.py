# SPDX-License-Identifier: Apache-2.0
"""Every source file states its licence in its first lines, in its comment style.

usage: spdx.py ROOT
"""

import os
import sys

import tap

LICENCE = "SPDX-License-Identifier: Apache-2.0"

# ending: the line that says it
STYLES = [
    (tap.SOURCE, f"/* {LICENCE} */"),
    ((".py", ".sh", ".bash", "meson.build", "meson_options.txt", ".cmake.in", "CMakeLists.txt"), f"# {LICENCE}"),
]
TOP = ["meson.build", "meson_options.txt", "tools/demo", "tools/test", "tools/wheel", ".ci/run"]


def is_script(root, path):
    """An executable without an ending, which begins with #!."""
    if "." in os.path.basename(path):
        return False
    with open(os.path.join(root, path), "rb") as file:
        return file.read(2) == b"#!"


def style_of(root, path):
    for endings, line in STYLES:
        if path.endswith(tuple(endings)):
            return line
    return f"# {LICENCE}" if is_script(root, path) else None


def missing(root):
    paths = tap.files(root, endings=("",)) + [p for p in TOP if os.path.exists(os.path.join(root, p))]
    for path in sorted(set(paths)):
        line = style_of(root, path)
        if line is None:
            continue
        # An interpreter line may come first.
        if line not in tap.read(root, path).split("\n")[:2]:
            yield f"{path}: does not begin with {line}"


def results(root):
    return [("files begin with an SPDX line", missing(root))]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
