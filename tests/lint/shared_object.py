# SPDX-License-Identifier: Apache-2.0
"""libfattn.so exports the functions that fattn.h and distributed.h declare and nothing else, is named as
promised, needs only the C library and OpenMP, and is no larger than packages of it may be.

usage: shared_object.py ROOT SOVERSION [LIBRARY [BYTES]]
"""

import re
import subprocess
import sys

import rooms
import tap

HEADERS = ("include/fattn/fattn.h", "include/fattn/distributed.h")

# libc in its parts (older C libraries keep some of it apart), and the OpenMP of gcc and of clang.
NEEDED = r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux[\w.-]*|libgomp\.so\.1|lib(omp|iomp5)\.so(\.5)?"


def declared(root):
    """Functions that the public headers declare FATTN_API."""
    code = "\n".join(rooms.without_comments(tap.read(root, header)) for header in HEADERS)
    return set(re.findall(r"^FATTN_API\b[^;{]*?\b(\w+)\s*\(", code, flags=re.M))


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def exported(library):
    return {line.split()[-1].split("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines()}


def dynamic(library, tag):
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-d", library))


def loaded(library):
    """Bytes of the file that are loaded: all but the information for debuggers."""
    return sum(int(size, 16) for size in re.findall(r"^\s*LOAD(?:\s+0x\w+){3}\s+(0x\w+)",
                                                     run("readelf", "-lW", library), re.M))


def compare(names, found):
    return ([f"{name} is declared in a public header and not exported" for name in sorted(names - found)] +
            [f"{name} is exported and not declared in a public header" for name in sorted(found - names)])


def results(root, soversion, library=None, most=None):
    names = declared(root)
    yield "public headers declare functions", [] if names else [f"{HEADERS}: no FATTN_API function"]
    if library is None:
        yield "exported symbols", tap.Skip("this build has no shared library")
        return
    yield "exported symbols are the headers'", compare(names, exported(library))
    soname = dynamic(library, "SONAME")
    yield "SONAME", [] if soname == [f"libfattn.so.{soversion}"] else [f"{library}: SONAME is {soname}"]
    yield "needs only libc, libm and OpenMP", [
        f"{library}: needs {name}" for name in dynamic(library, "NEEDED") if not re.fullmatch(NEEDED, name)]
    if most is None:
        yield "size", tap.Skip("this build has more devices than the default")
        return
    size = loaded(library)
    yield f"{size / 1e6:.1f} MB, at most {int(most) / 1e6:.0f}", [] if 0 < size <= int(most) else [
        f"{library}: {size} bytes are loaded, more than {most}"]


if __name__ == "__main__":
    sys.exit(tap.report(results(*sys.argv[1:])))
