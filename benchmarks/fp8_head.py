"""A step of a head in 8 bits beside bf16's bare GEMMs (floor6), beside the same GEMMs in FP8 by cuBLASLt, and beside an FP8 head as fast
training runs have it in torch, in one process and in an order drawn anew.

    python3 benchmarks/fp8_head.py [--shape 4096x2048x151936] [--frozen] [--seconds 10] [--out FILE.json]

Each contender runs behind floor6, so that each finds the GPU's clocks as it leaves them. `GEMMs in FP8` are torch._scaled_mm with a scale a
tensor and operands that are already rounded and turned over: products alone. `torch, three products` rounds hidden and weight to e4m3 and
the logits' gradients to e5m2 with fixed scales, keeps bf16 logits, and has the cross entropy in torch.compile. `flce, fixed scales` has the
same scales of hidden and weight. The table has medians: milliseconds, ratios to floor6, peak memory beyond inputs and gradients, and the
error of grad_hidden of 64 tokens to fp64 (of `flce, smoothed` that of a loss without smoothing). With --frozen the weight has no gradient;
`codes` are a weight that is e4m3 already, with a scale a row, and errors are those to the exact layer of bf16's weight; `NVFP4` has drawn
codes, whose errors say nothing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import Layer, add_report_arguments, behind, peak_of, reason, rounds_of, save
from torch import Tensor

import flce

FLOOR = "floor6"
CHECKED = 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Step = Callable[[], Any]


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """a [m, k] times b [n, k] turned over, in bf16."""
    made: Tensor = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return made


def products(layer: Layer, fast: bool) -> Step:
    """The three products of numbers that are in 8 bits already, each operand as its product reads it."""
    one = torch.ones((), device="cuda")
    hidden, weight = layer.hidden.detach().to(E4M3), layer.weight.detach().to(E4M3)
    turned_hidden, turned_weight = hidden.t().contiguous(), weight.t().contiguous()
    dlogits = layer.dlogits.to(E5M2)
    turned = dlogits.t().contiguous()

    def step() -> None:
        scaled_mm(hidden, weight, one, one, fast)
        scaled_mm(dlogits, turned_weight, one, one, fast)
        scaled_mm(turned, turned_hidden, one, one, fast)

    return step


class ThreeProducts(torch.autograd.Function):
    """Logits in bf16 from e4m3 with a fixed scale of each operand, gradients from e5m2 with another."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, w = (hidden / scales[0]).to(E4M3), (weight / scales[1]).to(E4M3)
        ctx.save_for_backward(x, w)
        ctx.scales = scales
        return scaled_mm(x, w, scales[0], scales[1], True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_hidden, of_weight, of_grad = ctx.scales
        rounded = (grad / of_grad).to(E5M2)
        grad_hidden = scaled_mm(rounded, w.t().contiguous(), of_grad, of_weight, False)
        grad_weight = scaled_mm(rounded.t().contiguous(), x.t().contiguous(), of_grad, of_hidden, False)
        return grad_hidden, grad_weight, None


def three_products(layer: Layer) -> Step:
    hidden, weight = layer.hidden.detach(), layer.weight.detach()
    scales = (hidden.abs().max().float() / 448, weight.abs().max().float() / 448, torch.tensor(2.0**-24, device="cuda"))

    @torch.compile
    def loss() -> Tensor:
        return F.cross_entropy(ThreeProducts.apply(layer.hidden, layer.weight, scales).float(), layer.target)

    return lambda: torch.autograd.grad(loss(), (layer.hidden, layer.weight))


def fixed_scales(layer: Layer) -> tuple[float, float]:
    """Scales as three_products has them."""
    hidden, weight = (float(each.detach().abs().max()) / 448 for each in (layer.hidden, layer.weight))
    return hidden, weight


def ours(layer: Layer, fp8: flce.Fp8 | None, limit: int | None = None, label_smoothing: float = 0.0) -> Step:
    """Without a limit as trainers have it: in 64 MiB beside what a token takes, and in grad_weight's memory until that is written."""

    def step() -> tuple[Tensor, ...]:
        loss = flce.linear_cross_entropy(
            layer.hidden,
            layer.weight,
            layer.target,
            fp8=fp8,
            label_smoothing=label_smoothing,
            workspace_limit_bytes=limit,
            retain_in_grad_weight=None if limit is None else False,
        )
        return torch.autograd.grad(loss, (layer.hidden, layer.weight))

    return step


def contenders(layer: Layer) -> dict[str, Callable[[], Step]]:
    every = 1 << 40
    return {
        "GEMMs in FP8": lambda: products(layer, True),
        "GEMMs in FP8, precise": lambda: products(layer, False),
        "torch, three products": lambda: three_products(layer),
        "flce, bf16, all retained": lambda: ours(layer, None, every),
        "flce, fp8, all retained": lambda: ours(layer, flce.Fp8(), every),
        "flce, fp8, by default": lambda: ours(layer, flce.Fp8()),
        "flce, fp8, in 256 MiB": lambda: ours(layer, flce.Fp8(), 256 << 20),
        "flce, e4m3, all retained": lambda: ours(layer, flce.Fp8("e4m3"), every),
        "flce, fixed scales, all retained": lambda: ours(layer, flce.Fp8("e4m3", scales=fixed_scales(layer)), every),
        "flce, smoothed, all retained": lambda: ours(layer, flce.Fp8(), every, label_smoothing=0.1),
    }


def frozen(
    layer: Layer, fp8: flce.Fp8 | None, limit: int | None, weight: Tensor, scale: Tensor | None = None, whole: float | None = None
) -> Step:
    """A step of hidden alone. `scale` and `whole`: of a weight of codes, and of NVFP4's."""

    def step() -> tuple[Tensor, ...]:
        given: dict[str, Any] = {"fp8": fp8, "weight_scale": scale, "weight_tensor_scale": whole, "workspace_limit_bytes": limit}
        return torch.autograd.grad(flce.linear_cross_entropy(layer.hidden, weight, layer.target, **given), (layer.hidden,))

    return step


def contenders_of_frozen(layer: Layer) -> dict[str, Callable[[], Step]]:
    weight = layer.weight.detach()
    scale = weight.float().abs().amax(-1) / 448
    codes = (weight / scale[:, None]).to(E4M3)
    classes, hidden_size = weight.shape
    pairs = torch.randint(0, 256, (classes, hidden_size // 2), dtype=torch.uint8, device="cuda")  # codes of no weight, for the time
    groups = torch.ones(classes, hidden_size // 16, device="cuda").to(E4M3)
    found: dict[str, Callable[[], Step]] = {}
    for way, limit in {"by default": None, "all retained": 1 << 40}.items():
        found |= {
            f"bf16, {way}": functools.partial(frozen, layer, None, limit, weight),
            f"codes, {way}": functools.partial(frozen, layer, None, limit, codes, scale),
            f"NVFP4, {way}": functools.partial(frozen, layer, None, limit, pairs, groups, 0.01),
            f"bf16 in e4m3, {way}": functools.partial(frozen, layer, flce.Fp8("e4m3"), limit, weight),
            f"codes in e4m3, {way}": functools.partial(frozen, layer, flce.Fp8("e4m3"), limit, codes, scale),
        }
    return found


def error_of(gradients: tuple[Tensor, ...], layer: Layer) -> float:
    """Error of grad_hidden of some tokens, to fp64."""
    few = layer.hidden.detach()[:CHECKED].double().requires_grad_()
    loss = F.cross_entropy(few @ layer.weight.detach().double().t(), layer.target[:CHECKED], reduction="sum") / layer.target.numel()
    (right,) = torch.autograd.grad(loss, (few,))
    return float((gradients[0][:CHECKED].double() - right).norm() / right.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x2048x151936", help="tokens x hidden size x classes")
    parser.add_argument("--frozen", action="store_true", help="the weight has no gradient")
    parser.add_argument("--seconds", type=float, default=10, help="time to measure, about (default: 10)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    layer = Layer(*map(int, arguments.shape.split("x")))
    gradients = layer.hidden.nbytes + (0 if arguments.frozen else layer.weight.nbytes)
    steps: dict[str, Step] = {FLOOR: layer.gemms}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in (contenders_of_frozen if arguments.frozen else contenders)(layer).items():
        try:
            step = make()
            made = step()
            rows[name] = {} if made is None else {"error": error_of(made, layer)}
            del made
            rows[name]["memory_bytes"] = peak_of(step) - (gradients if "error" in rows[name] else 0)
            steps[name] = step
        except Exception as error:
            rows[name] = {"reason": reason(error)}
    found = rounds_of(steps, arguments.seconds, behind(steps[FLOOR], steps))
    for name in steps:
        rows.setdefault(name, {})["milliseconds"] = statistics.median(one[name] for one in found)
        rows[name]["ratio"] = rows[name]["milliseconds"] / rows[FLOOR]["milliseconds"]
    for name, row in rows.items():
        print(f"{name:26} { {key: (f'{value:.4g}' if isinstance(value, float) else value) for key, value in row.items()} }", flush=True)
    save(arguments, {"shape": arguments.shape, "rounds": len(found), "rows": rows})


if __name__ == "__main__":
    main()
