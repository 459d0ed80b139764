"""Draws time against memory as an SVG: flce's curve, a panel for each shape, from a file of benchmarks/budget_table.py. Points of others
come from a file of `python -m flce.bench --json`.

    python3 benchmarks/draw_budget.py benchmarks/results/h200-2026-11-22-curve.json --out docs/budget-h200.svg
    python3 benchmarks/draw_budget.py benchmarks/results/h200-2026-11-22-curve.json --shape 4096x2048x151936 \\
        --beside benchmarks/results/h200-2026-11-23-compare.json --out docs/time-against-memory.svg

The same files give the same bytes. A contender without a time or without its memory is left out.
"""

import argparse
import collections
import json
import math
from typing import NamedTuple

NAMES = {"liger": "Liger", "cce": "CCE", "quack": "QuACK", "trl": "TRL"}
STYLE = """
text{font:13px sans-serif;fill:#1f2328}.small{font-size:12px}.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#ffffff}.grid{stroke:#d1d9e0}.floor{stroke:#59636e;stroke-dasharray:4 3}
.flce{stroke:#0969da;stroke-width:2;fill:none}.dot{fill:#0969da}.peer{fill:#bc4c00}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.paper{fill:#0d1117}.grid{stroke:#3d444d}.floor{stroke:#9198a1}
.flce{stroke:#4493f8}.dot{fill:#4493f8}.peer{fill:#f0883e}}
"""


class Point(NamedTuple):
    name: str
    mib: float
    ratio: float


def curves(record):
    """The points of each shape, of a step with at least 1024 tokens."""
    found = collections.defaultdict(list)
    for row in record["benchmarks"]:
        shape, _, name = row["run_name"].split("/", 2)  # names may have slashes: 1/8 retained
        if row["name"].endswith("/forward_backward") and "ratio" in row and int(shape.split("x")[0]) >= 1024:
            found[shape].append(Point(name, row["bytes_beyond"] / 2**20, row["ratio"]))
    return found


def others(record, shape):
    for compared in record["shapes"]:
        problem = compared["problem"]
        if shape == f"{problem['num_tokens']}x{problem['hidden_size']}x{problem['vocab_size']}":
            for row in compared["rows"]:
                if row["compare"] != "flce" and row["to_floor"] and row["memory_bytes"]:
                    yield Point(NAMES.get(row["name"], row["name"]), row["memory_bytes"] / 2**20, row["to_floor"])


class Panel:
    """Both axes are logarithmic."""

    def __init__(self, left, width, top, height, points, lowest, highest):
        self.left, self.width, self.top, self.height = left, width, top, height
        self.x_range = min(p.mib for p in points) / 1.7, max(p.mib for p in points) * 2.5
        self.y_range = lowest, highest

    def x(self, mib):
        low, high = self.x_range
        return self.left + self.width * math.log(mib / low) / math.log(high / low)

    def y(self, ratio):
        low, high = self.y_range
        return self.top + self.height * (1 - math.log(ratio / low) / math.log(high / low))

    def text(self, x, y, text, style="", shift=(0, 4)):
        return f'<text x="{x + shift[0]:.1f}" y="{y + shift[1]:.1f}" class="{style}">{text}</text>'

    def axes(self, title, y_labels):
        right, bottom = self.left + self.width, self.top + self.height
        yield self.text(self.left + self.width / 2, self.top, title, "middle", (0, -10))
        low, high = self.y_range
        for ratio in (1, 1.5, 2, 3, 4, 5) if high > 2 else (1, 1.1, 1.2, 1.3, 1.4):
            if low < ratio < high:
                style = "floor" if ratio == 1 else "grid"
                yield f'<line x1="{self.left}" x2="{right}" y1="{self.y(ratio):.1f}" y2="{self.y(ratio):.1f}" class="{style}"/>'
                if y_labels:
                    yield self.text(self.left, self.y(ratio), f"{ratio} \u00d7", "small end", (-6, 4))
        low, high = self.x_range
        for mib in (1, 10, 100, 1000, 10000):
            if low < mib < high:
                yield f'<line x1="{self.x(mib):.1f}" x2="{self.x(mib):.1f}" y1="{self.top}" y2="{bottom}" class="grid"/>'
                yield self.text(self.x(mib), bottom, f"{mib:,}", "small middle", (0, 16))

    def flce(self, points):
        """The retained part grows along the line; the diamond is the part that the weight gradient's own memory holds."""
        line = sorted((p for p in points if p.name.endswith("retained")), key=lambda point: point.mib)
        yield '<polyline class="flce" points="' + " ".join(f"{self.x(p.mib):.1f},{self.y(p.ratio):.1f}" for p in line) + '"/>'
        yield from (f'<circle cx="{self.x(p.mib):.1f}" cy="{self.y(p.ratio):.1f}" r="3.5" class="dot"/>' for p in line)
        for p in points:
            if p.name == "in grad_weight":
                yield f'<path d="M{self.x(p.mib):.1f} {self.y(p.ratio):.1f}m0-7l7 7l-7 7l-7-7z" class="dot"/>'

    def labels(self, points):
        at = {point.name: (self.x(point.mib), self.y(point.ratio)) for point in points}
        yield self.text(*at["nothing retained"], "flce, nothing retained", "end", (-10, 4))
        yield self.text(*at["in grad_weight"], "flce, default", "end", (-12, 4))
        yield self.text(*at["all retained"], "flce, all retained", "middle", (0, 20))

    def peers(self, points):
        for p in points:
            yield f'<rect x="{self.x(p.mib) - 4.5:.1f}" y="{self.y(p.ratio) - 4.5:.1f}" width="9" height="9" class="peer"/>'
            yield self.text(self.x(p.mib), self.y(p.ratio), p.name, "", (8, -6))


def drawing(gpu, shapes, beside):
    single = len(shapes) == 1
    everything = [p for points in shapes.values() for p in points] + [p for points in beside.values() for p in points]
    lowest, highest = (0.85 if single else 0.94), max(p.ratio for p in everything) * 1.15
    width, height, top = (600, 300, 56) if single else (180, 220, 56)
    whole = 62 + (width + 18) * len(shapes), top + height + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" height="{whole[1]}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{whole[0]}" height="{whole[1]}" rx="8" class="paper"/>',
        f'<text x="{whole[0] / 2}" y="20" class="middle">Forward + backward in bf16 on an {gpu}, to three bare cuBLAS GEMMs</text>',
        f'<text x="{whole[0] / 2}" y="{whole[1] - 10}" class="small middle">MiB beyond inputs and gradients</text>',
    ]
    for index, (shape, points) in enumerate(shapes.items()):
        peers = beside.get(shape, [])
        panel = Panel(52 + (width + 18) * index, width, top, height, [*points, *peers], lowest, highest)
        tokens, hidden_size, vocab_size = shape.split("x")
        title = f"{tokens} tokens, hidden size {hidden_size}, {vocab_size} classes" if single else shape.replace("x", "\u00d7")
        parts += [*panel.axes(title, index == 0), *panel.flce(points), *panel.peers(peers), *(panel.labels(points) if single else [])]
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="of benchmarks/budget_table.py")
    parser.add_argument("--shape", help="that shape alone")
    parser.add_argument("--beside", help="of python -m flce.bench --json")
    parser.add_argument("--out", required=True, help="an .svg")
    args = parser.parse_args()
    with open(args.file, encoding="utf-8") as file:
        record = json.load(file)
    shapes = {shape: points for shape, points in curves(record).items() if args.shape in (None, shape)}
    beside = {}
    if args.beside:
        with open(args.beside, encoding="utf-8") as file:
            compared = json.load(file)
        beside = {shape: list(others(compared, shape)) for shape in shapes}
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(drawing(record["context"]["gpu"], shapes, beside))


if __name__ == "__main__":
    main()
