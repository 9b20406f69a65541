# SPDX-License-Identifier: Apache-2.0
"""Links of Markdown files lead somewhere, and their tables have as many cells in each row.

usage: links.py ROOT

Checked are links to files and folders of this tree, and to headings, by GitHub's rule for their names.
Addresses of other sites are not.
"""

import os
import re
import sys

import tap

LINK = re.compile(r"\]\(<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
IMAGE = re.compile(r"<(?:img|source)\b[^>]*\bsrc(?:set)?=\"([^\"\s]+)")
NAME = re.compile(r"<a\b[^>]*\b(?:name|id)=\"([^\"]+)\"")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
CELL = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"^\s*:?-+:?\s*$")


def pages(root):
    """Markdown files, those beside the rooms included."""
    top = [name for name in os.listdir(root) if name.endswith(".md")]
    return sorted(top + tap.files(root, endings=(".md",), rooms=tap.ROOMS + ("docs",)))


def lines(text):
    """(number, line) of what is not a fenced block."""
    fence = None
    for number, line in enumerate(text.split("\n"), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark.group(1).startswith(fence) and not line.strip(" `~"):
                fence = None
        elif mark:
            fence = mark.group(1)
        else:
            yield number, line


def without_code(line):
    """The line without what stands between equal runs of backticks."""
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", line)


def anchor(heading):
    """The name that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(text):
    found, counts = set(), {}
    for _, line in lines(text):
        found.update(NAME.findall(line))
        heading = HEADING.match(line)
        if heading:
            name = anchor(heading.group(1))
            again = counts.get(name, 0)
            counts[name] = again + 1
            found.add(f"{name}-{again}" if again else name)
    return found


def fault(root, page, target):
    """What is wrong with a link, or None."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target):
        return None
    path, _, name = target.partition("#")
    place = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
    if place.startswith("..") or not os.path.exists(os.path.join(root, place)):
        return f"{place} does not exist"
    if name and place.endswith(".md") and name not in anchors(tap.read(root, place)):
        return f"{place} has no heading #{name}"
    return None


def broken_links(root):
    for page in pages(root):
        for number, line in lines(tap.read(root, page)):
            plain = without_code(line)
            for target in LINK.findall(plain) + REFERENCE.findall(plain) + IMAGE.findall(plain):
                why = fault(root, page, target)
                if why:
                    yield f"{page}:{number}: {target}: {why}"


def cells(line):
    """Cells of a row. A bar ends a cell even between backticks, unless a backslash precedes it."""
    row = line.strip()
    row = row[1:] if row.startswith("|") else row
    row = row[:-1] if row.endswith("|") and not row.endswith("\\|") else row
    return CELL.split(row)


def broken_tables(root):
    for page in pages(root):
        width = row = 0  # columns of the table, or 0; rows so far
        last = -1
        for number, line in lines(tap.read(root, page)):
            if not re.match(r" {0,3}\|", line):
                if row == 1:
                    yield f"{page}:{last}: a row without a table"
                row = 0
                continue
            row = row + 1 if number == last + 1 and row else 1
            last = number
            found = cells(line)
            if row == 1:
                width = len(found)
            elif row == 2 and not all(RULE.match(c) for c in found):
                yield f"{page}:{number}: a table without |---| below its head"
            elif len(found) != width:
                yield f"{page}:{number}: {len(found)} cells, but {width} columns"


def results(root):
    return [("links of documents lead somewhere", broken_links(root)),
            ("rows of tables have as many cells as columns", broken_tables(root))]


if __name__ == "__main__":
    sys.exit(tap.report(results(sys.argv[1])))
