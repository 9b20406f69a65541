# SPDX-License-Identifier: Apache-2.0
"""Bundles code objects, one for each processor, into an image from which the runtime picks one.

The format is that of clang-offload-bundler, which not every installation of clang has: a magic word and
the number of entries; the offset, size, length of name and name of each; and then the code objects. A
runtime expects the first entry to be the host's, which is empty.

usage: bundle.py OUTPUT PROCESSOR... -- CODE_OBJECT...
"""

import struct
import sys

ALIGN = 4096  # of code objects, as the loader maps them

output, *words = sys.argv[1:]
split = words.index("--")
entries = [("host-x86_64-unknown-linux-gnu-", b"")]
for processor, path in zip(words[:split], words[split + 1:], strict=True):
    with open(path, "rb") as file:
        entries.append((f"hipv4-amdgcn-amd-amdhsa--{processor}", file.read()))

header = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
body = b""
size = len(header) + sum(24 + len(name) for name, _ in entries)
begin = -(-size // ALIGN) * ALIGN
for name, code in entries:
    offset = begin + len(body)
    header += struct.pack("<QQQ", offset, len(code), len(name)) + name.encode()
    body += code + bytes(-len(code) % ALIGN)
with open(output, "wb") as file:
    file.write(header + bytes(begin - len(header)) + body)
