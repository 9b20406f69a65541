#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Brings measurements into the documents: draws the pictures of docs/pictures (SVG) and writes the tables of
README.md, docs/PERFORMANCE.md and docs/DISTRIBUTED.md from bench/figures, where bench/measure leaves them.

usage: publish.py [--check] [ROOT]

A table stands between lines "<!-- table NAME -->" and "<!-- end -->". With --check nothing is written: the
exit status is 1 if a document or picture differs from the measurements. Needs nothing but Python.
"""
import math
import os
import re
import sys

INK, GRID, PAPER = "#24292f", "#d0d7de", "#ffffff"
COLOURS = ["#c0392b", "#2c6fbb"]
PEERS = {"cudnn": "cuDNN", "flash": "FlashAttention-2"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 250, 170, 44, 10, 28, 34  # of a panel, and its margins


def read(path):
    """Rows of a table as dictionaries, with numbers converted. Lines that begin with # describe the whole table."""
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
    rows = [dict(zip(lines[0], line)) for line in lines[1:]]
    for row in rows:
        row["N"] = int(row["N"])
    return rows


def source(path):
    """The source of a table: machine, versions, commit, command."""
    with open(path, encoding="utf-8") as file:
        said = dict(line[2:].rstrip("\n").split(": ", 1) for line in file if re.match(r"# \w+: ", line))
    return [f"{said['machine']}; {said['versions']}; commit {said['commit']}:", "", "    " + said["command"]]


def length_word(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def number(row, column):
    """A cell as a number, or None where nothing was measured."""
    return float(row[column]) if row.get(column, "-") != "-" else None


# --- Pictures ---------------------------------------------------------------------------------------------

def step_of(largest):
    """A round distance between grid lines, about four of them."""
    raw = largest / 4
    power = 10 ** math.floor(math.log10(raw))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= raw)


def words(x, y, text, anchor="middle", size=11, weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}" fill="{INK}">{text}</text>')


def panel(x, y, title, curves):
    """Ratios over N, N in powers of two; a heavy line at 1. curves[name] = [(N, ratio)], in order of colours."""
    lengths = sorted({n for points in curves.values() for n, _ in points})
    largest = max(value for points in curves.values() for _, value in points)
    step = step_of(max(largest, 1.2))
    top = step * math.ceil(max(largest, 1.2) / step)
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(n, value):
        share = lengths.index(n) / max(1, len(lengths) - 1)
        return x + LEFT + inner_w * share, y + TOP + inner_h * (1 - value / top)

    def line(value, colour, width):
        level = at(lengths[0], value)[1]
        return (f'<line x1="{x + LEFT}" y1="{level:.1f}" x2="{x + WIDTH - RIGHT}" y2="{level:.1f}" '
                f'stroke="{colour}" stroke-width="{width}"/>')
    out = [words(x + LEFT + inner_w / 2, y + 18, title, size=12, weight="bold")]
    for count in range(round(top / step) + 1):
        out.append(line(count * step, GRID, 1))
        out.append(words(x + LEFT - 5, at(lengths[0], count * step)[1] + 4, f"{count * step:g}", "end", 10))
    out.append(line(1, INK, 1.5))
    out += [words(at(n, 0)[0], y + HEIGHT - BOTTOM + 15, length_word(n), size=10) for n in lengths]
    for colour, points in zip(COLOURS, curves.values()):
        spots = [at(n, value) for n, value in sorted(points)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{colour}"/>' for px, py in spots]
    return out


def picture(title, unit, rows):
    """rows: lists of (title, curves), drawn below one another."""
    width, height = max(len(row) for row in rows) * WIDTH + 10, len(rows) * HEIGHT + 62
    names = list(dict.fromkeys(name for row in rows for _, curves in row for name in curves))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
           f'height="{height}" font-family="sans-serif">',
           f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
           words(10, 20, title, "start", 14, "bold"), words(10, 38, unit, "start", 11)]
    x = width - 10
    for name, colour in reversed(list(zip(names, COLOURS))):
        x -= 7 * len(name) + 42
        out.append(f'<line x1="{x}" y1="34" x2="{x + 18}" y2="34" stroke="{colour}" stroke-width="3"/>')
        out.append(words(x + 22, 38, name, "start", 11))
    for level, row in enumerate(rows):
        for column, (name, curves) in enumerate(row):
            out += panel(column * WIDTH, 50 + level * HEIGHT, name, curves)
    return "\n".join(out + ["</svg>", ""])


def points(rows, peer, **wanted):
    """(N, fattn's rate divided by the peer's) of the selected rows."""
    return [(row["N"], number(row, "/" + peer)) for row in rows
            if all(row[key] == value for key, value in wanted.items()) and number(row, "/" + peer)]


def gpu_picture(figures, name, direction):
    rows = read(os.path.join(figures, f"cuda-{name}.tsv"))
    panels = [[(f"d {d}, {mask}", {word: points(rows, peer, dir=direction, d=d, mask=mask)
                                   for peer, word in PEERS.items() if "/" + peer in rows[0]})
               for d in ("64", "128", "256")] for mask in ("full", "causal")]
    return picture(f"H100, {name}, bf16", "fattn's rate over the other's, by sequence length", panels)


def cpu_picture(figures):
    panels = []
    for dtype in ("f32", "bf16"):
        rows = read(os.path.join(figures, f"cpu-{dtype}.tsv"))
        panels.append([(f"{dtype}, {word}, {mask}",
                        {f"d {d}": points(rows, "flash", dir=direction, d=d, mask=mask) for d in ("64", "128")})
                       for direction, word in (("fwd", "forward"), ("bwd", "backward"))
                       for mask in ("full", "causal")])
    return picture("CPU, 16 cores", "fattn's rate over PyTorch's, by sequence length", panels)


def ranks_picture(figures):
    rows = read(os.path.join(figures, "ranks.tsv"))
    panels = [[(f"{length_word(int(tokens))} tokens, {word}",
                {names: [(row["N"], number(row, "efficiency")) for row in rows
                         if (row["dir"], row["tokens"]) == (direction, tokens) and row["scheme"] in schemes]
                 for names, schemes in (("ring", ("ring",)), ("heads in a ring", ("both",)))})
               for direction, word in (("fwd", "forward"), ("bwd", "backward"))]
              for tokens in ("131072", "1048576")]
    return picture("Prediction of a model", "efficiency, by ranks", panels)


PICTURES = {
    "ranks.svg": ranks_picture,
    "cpu.svg": cpu_picture,
    "cuda-forward.svg": lambda figures: gpu_picture(figures, "forward", "fwd"),
    "cuda-backward.svg": lambda figures: gpu_picture(figures, "backward", "bwd"),
}


# --- Tables -----------------------------------------------------------------------------------------------

def markdown(head, rows):
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def digits_of(text):
    """A rate with three digits, or with those of the measurement if they are fewer."""
    known = len(text.replace(".", "").lstrip("0"))
    return f"{float(text):#.{min(3, known)}g}".rstrip(".")


def ratios(path, peer):
    """A row for each direction, d and mask, a column for each length: TFLOP/s, and in brackets the ratio to the peer; if
    the rate is not known, only the ratio."""
    rows, lines = read(path), []
    lengths = sorted({row["N"] for row in rows})
    for direction, d, mask in dict.fromkeys((row["dir"], row["d"], row["mask"]) for row in rows):
        cells = []
        for n in lengths:
            row = next(r for r in rows if (r["dir"], r["d"], r["mask"], r["N"]) == (direction, d, mask, n))
            rate, ratio = number(row, "fattn"), f"{number(row, '/' + peer):.2f}"
            cells.append(ratio if rate is None else f"{digits_of(row['fattn'])} ({ratio})")
        word = {"fwd": "forward", "bwd": "backward"}[direction]
        lines.append([f"{word}, d {d}" + (", causal" if mask == "causal" else ""), *cells])
    return markdown(["", *map(length_word, lengths)], lines)


def summary(figures):
    """Geometric mean, least and largest of the ratios of fattn's rate to a peer's, over all points of a picture."""
    def cell(name, direction, peer):
        found = [number(row, "/" + peer) for row in read(os.path.join(figures, name + ".tsv"))
                 if row["dir"] == direction and number(row, "/" + peer)]
        if not found:
            return "-"
        mean = math.exp(sum(map(math.log, found)) / len(found))
        return f"**{mean:.2f}** ({min(found):.2f} to {max(found):.2f})"
    lines = [["H100, bf16", PEERS[peer], cell("cuda-forward", "fwd", peer), cell("cuda-backward", "bwd", peer)]
             for peer in PEERS]
    lines += [[f"16 cores of a Xeon with AMX, {dtype}", "PyTorch",
               *(cell("cpu-" + dtype, way, "flash") for way in ("fwd", "bwd"))] for dtype in ("f32", "bf16")]
    return markdown(["on", "compared with", "forward", "backward"], lines)


def ranks_table(figures):
    """Forward / backward, of 8, 64 and 1024 ranks."""
    rows, lines = read(os.path.join(figures, "ranks.tsv")), []
    cell = {(row["dir"], row["tokens"], row["scheme"], row["N"]): row["efficiency"] for row in rows}
    for tokens in ("131072", "1048576"):
        for ranks in (8, 64, 1024):
            pairs = [[cell.get((way, tokens, scheme, ranks)) for way in ("fwd", "bwd")]
                     for scheme in ("ring", "heads", "both")]
            lines.append([f"{int(tokens):,}", f"{ranks:,}", *(" / ".join(p) if all(p) else "" for p in pairs)])
    return markdown(["tokens", "ranks", "ring, forward / backward", "heads", "both"], lines)


TABLES = {
    "ranks": ranks_table,
    "summary": summary,
    "cpu-f32": lambda figures: ratios(os.path.join(figures, "cpu-f32.tsv"), "flash"),
    "cpu-bf16": lambda figures: ratios(os.path.join(figures, "cpu-bf16.tsv"), "flash"),
    "cuda-forward": lambda figures: ratios(os.path.join(figures, "cuda-forward.tsv"), "cudnn"),
    "cuda-backward": lambda figures: ratios(os.path.join(figures, "cuda-backward.tsv"), "flash"),
}
TABLES.update({"source " + name: lambda figures, name=name: source(os.path.join(figures, name + ".tsv"))
               for name in list(TABLES) if name != "summary"})


def filled(text, figures):
    """A document with its tables rewritten."""
    def table(match):
        return "\n".join([match.group(1), *TABLES[match.group(2)](figures), "<!-- end -->"])
    return re.sub(r"(<!-- table ([\w -]+) -->)\n.*?<!-- end -->", table, text, flags=re.S)


def main():
    arguments = sys.argv[1:]
    check = "--check" in arguments
    roots = [argument for argument in arguments if argument != "--check"]
    root = roots[0] if roots else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    figures = os.path.join(root, "bench", "figures")
    wanted = {os.path.join("docs", "pictures", name): draw(figures) for name, draw in PICTURES.items()}
    for name in ("README.md", os.path.join("docs", "PERFORMANCE.md"), os.path.join("docs", "DISTRIBUTED.md")):
        with open(os.path.join(root, name), encoding="utf-8") as file:
            wanted[name] = filled(file.read(), figures)
    stale = 0
    for name, text in wanted.items():
        path, old = os.path.join(root, name), None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                old = file.read()
        if check and old != text:
            print(f"{name} is not what bench/figures gives: run bench/publish.py", file=sys.stderr)
            stale = 1
        elif old != text:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
