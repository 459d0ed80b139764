"""Draws what benchmarks/budget_table.py has measured: time against bytes, a point a plan, the floor as a line.

    python3 benchmarks/draw_budget.py benchmarks/results/h100-2026-11-21-budget.json --out docs/budget-h100.svg

Needs matplotlib. Records of `flce bench` by number of tokens and strategy (h100-2026-11-21-retain.json) are drawn as well.
"""

import argparse
import collections
import json
import re
from typing import NamedTuple

import matplotlib.pyplot as plt


class Point(NamedTuple):
    shape: str
    name: str
    bytes_beyond: float
    ratio: float


def from_benchmarks(record):
    for row in record["benchmarks"]:
        shape, _, name = row["run_name"].split("/", 2)  # names may have slashes: 1/8 retained
        few = int(shape.split("x")[0]) < 1024
        if row["name"].endswith("/forward_backward") and "ratio" in row and not few:
            yield Point(shape, name, row["bytes_beyond"], row["ratio"])


def from_results(record):
    """Rows of an earlier form, which lack bytes: 64 MiB + 4·N·D beside what is retained, all of it two bytes a logit."""
    names = {"all": "all retained", "grad_weight": "in grad_weight", "none": "nothing retained"}
    seen = set()
    for row in record["results"]:
        sizes = dict(re.findall(r"\b(D|V)=(\d+)", row["spec"]))
        n, d, v = row["num_tokens"], int(sizes["D"]), int(sizes["V"])
        name = "accumulated" if "accumulate" in row["spec"] else names[row["retain"]]
        if n < 1024 or (n, d, v, name) in seen:
            continue
        seen.add((n, d, v, name))
        beyond = (64 << 20) + 4 * n * d + (2 * n * v if row["retain"] == "all" else 0)
        yield Point(f"{n}x{d}x{v}", name, beyond, row["ratio_forward_backward"])


def draw(points, title, path):
    shapes = collections.defaultdict(list)
    for point in points:
        shapes[point.shape].append(point)
    figure, panels = plt.subplots(1, len(shapes), figsize=(3.2 * len(shapes), 3.6), sharey=True, squeeze=False)
    for panel, (shape, mine) in zip(panels[0], shapes.items(), strict=True):
        mine.sort(key=lambda point: (point.bytes_beyond, -point.ratio))
        panel.axhline(1.0, color="0.4", linewidth=1)
        panel.axhline(8 / 6, color="0.7", linewidth=1, linestyle=":")
        for point in mine:
            panel.plot(
                point.bytes_beyond / 2**20, point.ratio, "o", color="tab:red" if point.name == "accumulated" else "tab:blue", markersize=5
            )
            panel.annotate(point.name, (point.bytes_beyond / 2**20, point.ratio), textcoords="offset points", xytext=(6, 3), fontsize=7)
        panel.set_xscale("log")
        panel.set_xlim(min(p.bytes_beyond for p in mine) / 2**20 / 1.6, max(p.bytes_beyond for p in mine) / 2**20 * 6)
        panel.set_title(shape, fontsize=9)
        panel.set_xlabel("MiB beyond inputs and gradients", fontsize=8)
        panel.tick_params(labelsize=8)
    panels[0][0].set_ylabel("forward + backward, to three cuBLAS GEMMs", fontsize=8)
    panels[0][0].set_ylim(0.95, max(p.ratio for p in points) + 0.05)
    figure.suptitle(f"{title}; lines: the floor, and 8/6 of it (logits computed twice)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--out", required=True, help="an .svg")
    args = parser.parse_args()
    with open(args.file, encoding="utf-8") as file:
        record = json.load(file)
    plt.switch_backend("svg")
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "flce"
    points = list(from_benchmarks(record) if "benchmarks" in record else from_results(record))
    gpu = record["context"]["gpu"] if "context" in record else record["device"]
    draw(points, gpu, args.out)


if __name__ == "__main__":
    main()
