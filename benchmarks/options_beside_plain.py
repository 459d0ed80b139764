"""The cost of an option: a layer with it beside the plain layer and the three cuBLAS GEMMs, all in one process and in an order drawn anew.

    python3 benchmarks/options_beside_plain.py [--shape 8192x2304x256000] [--softcap 30] [--seconds 20] [--out FILE.json]
    python3 benchmarks/options_beside_plain.py --classes 64     # linear_logprobs_at of 64 classes a token beside linear_logprobs
    python3 benchmarks/options_beside_plain.py --depths 2       # two hidden states that share the rows beside one that has all
    python3 benchmarks/options_beside_plain.py --contrast --shape 65536x1024x65536    # info_nce with a learned scale, weight as documents

Forward and backward in bf16, each three ways: everything retained (workspace_limit_bytes without a bound), exponentials in the weight
gradient's memory, nothing retained. Each step runs behind the GEMMs, which are timed too, so that every step finds the GPU's clocks as they
leave them. A floor is one pass of the GEMMs behind another. The table has medians: milliseconds, the ratio to the floor, and by how much of
the floor the layer with the option takes longer than the plain one in the same round, with that difference's quartiles. `flce bench`
measures one layer a process: between two processes clocks drift by more than such a difference.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Layer, add_report_arguments, behind, rounds_of, save, timed

import flce

WAYS: dict[str, dict[str, Any]] = {
    "all retained": {"workspace_limit_bytes": 1 << 40, "retain_in_grad_weight": False},
    "in grad_weight's memory": {"retain_in_grad_weight": True},
    "nothing retained": {"retain_in_grad_weight": False},
}
FLOOR = "three GEMMs"


Step = Callable[..., None]  # takes options that say what is retained


def step(layer: Layer, **options: Any) -> None:
    loss = flce.linear_cross_entropy(layer.hidden, layer.weight, layer.target, **options)
    torch.autograd.grad(loss, (layer.hidden, layer.weight))


def steps_of_classes(layer: Layer, count: int) -> tuple[Step, Step]:
    """Steps of the target's log-probability, and of `count` random classes'."""
    rows, vocab_size = layer.hidden.shape[0], layer.weight.shape[0]
    ids = torch.randint(0, vocab_size, (rows, count), device="cuda")
    inputs = (layer.hidden, layer.weight)

    def plain(**options: Any) -> None:
        torch.autograd.grad(flce.linear_logprobs(*inputs, layer.target, **options).sum(), inputs)

    def named(**options: Any) -> None:
        torch.autograd.grad(flce.linear_logprobs_at(*inputs, ids, **options).sum(), inputs)

    return plain, named


def steps_of_depths(layer: Layer, count: int) -> tuple[Step, Step]:
    """Steps of one call, and of its rows as `count` hidden states."""
    hidden = [part.detach().clone().requires_grad_() for part in layer.hidden.chunk(count)]
    targets = list(layer.target.chunk(count))

    def several(**options: Any) -> None:
        loss, _ = flce.linear_cross_entropy(hidden, layer.weight, targets, loss_weights=[1.0] * count, **options)
        torch.autograd.grad(loss, (*hidden, layer.weight))

    return lambda **options: step(layer, **options), several


def steps_of_contrast(layer: Layer) -> tuple[Step, Step]:
    """Steps of the cross entropy, and of the contrastive loss of the same rows with a scale that gets a gradient."""
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)

    def contrast(**options: Any) -> None:
        loss = flce.info_nce(layer.hidden, layer.weight, scale=scale, positives=layer.target, **options)
        torch.autograd.grad(loss, (layer.hidden, layer.weight, scale))

    return lambda **options: step(layer, **options), contrast


def table(rounds: list[dict[str, float]], option: str) -> dict[str, Any]:
    floor = statistics.median(one[FLOOR] for one in rounds)
    rows: dict[str, Any] = {}
    for name in rounds[0]:
        median = statistics.median(one[name] for one in rounds)
        rows[name] = {"milliseconds": median, "ratio": median / floor}
    for way in WAYS:
        differences = [(one[f"{option}, {way}"] - one[f"plain, {way}"]) / floor for one in rounds]
        quartiles = statistics.quantiles(differences, n=4)
        rows[f"{option}, {way}"] |= {"beyond_plain": quartiles[1], "beyond_plain_quartiles": quartiles[::2]}
    return rows


def show(rows: dict[str, Any]) -> None:
    print(f"{'':44} {'ms':>8} {'ratio':>6} {'beyond plain':>13} {'quartiles':>16}")
    for name, row in rows.items():
        more = ""
        if "beyond_plain" in row:
            low, high = row["beyond_plain_quartiles"]
            more = f" {row['beyond_plain']:13.3f} {low:7.3f} {high:7.3f}"
        print(f"{name:44} {row['milliseconds']:8.2f} {row['ratio']:6.3f}{more}")


def compared(arguments: argparse.Namespace, layer: Layer) -> tuple[str, Step, Step]:
    """Name of what is measured, the plain step, and the other one."""
    if arguments.classes:
        return f"{arguments.classes} classes", *steps_of_classes(layer, arguments.classes)
    if arguments.depths:
        return f"{arguments.depths} depths", *steps_of_depths(layer, arguments.depths)
    if arguments.contrast:
        return "info_nce", *steps_of_contrast(layer)
    asked = {"softcap": arguments.softcap, "label_smoothing": arguments.label_smoothing, "z_loss": arguments.z_loss}
    options = {name: value for name, value in asked.items() if value} or {"softcap": 30.0}
    plain = functools.partial(step, layer)
    return " and ".join(f"{name} {value:g}" for name, value in options.items()), plain, functools.partial(plain, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x2304x256000", help="num_tokens x hidden_size x vocab_size")
    parser.add_argument("--softcap", type=float, help="(default: 30, if no other option is asked for)")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--z-loss", type=float, default=0.0)
    parser.add_argument("--classes", type=int, metavar="K", help="measure linear_logprobs_at of K classes a token instead")
    parser.add_argument("--depths", type=int, metavar="N", help="measure N hidden states that share the rows instead")
    parser.add_argument("--contrast", action="store_true", help="measure info_nce instead")
    parser.add_argument("--seconds", type=float, default=20, help="time to measure, about (default: 20)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    layer = Layer(*map(int, arguments.shape.split("x")))
    option, plain, other = compared(arguments, layer)
    steps: dict[str, Callable[[], None]] = {FLOOR: layer.gemms}
    for way, memory in WAYS.items():
        steps[f"plain, {way}"] = functools.partial(plain, **memory)
        steps[f"{option}, {way}"] = functools.partial(other, **memory)
    for _ in range(2):  # compiles and warms up
        for each in steps.values():
            timed(each)
    rounds = rounds_of(steps, arguments.seconds, behind(layer.gemms, steps))
    flce.check_labels()
    rows = table(rounds, option)
    show(rows)
    save(arguments, {"shape": arguments.shape, "rounds": len(rounds), "rows": rows})


if __name__ == "__main__":
    main()
