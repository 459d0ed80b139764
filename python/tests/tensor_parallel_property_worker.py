"""One rank of a tensor-parallel group, under torchrun: calls of random layers, options and shards against the same call of the whole layer.
Exits with a failed assertion, or 0; rank 0 prints how many cases passed.

Every rank draws the same cases, of one seed. The options come from a few sets, since each other combination is another kernel.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from levels import in_turn
from rank_support import device, generator, run_main
from tensor_parallel_support import close, leaf, same_on_every_rank
from torch import Tensor

import flce
from flce.core import _retain

CASES = 40
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "none", "z_loss": 1e-2, "label_smoothing": 0.1},
    {"softcap": 5.0, "logit_scale": 0.6, "return_lse": True, "return_logprobs": True},
    {"return_entropy": True, "return_top1": True, "return_log_sum_sq_probs": True, "reduction": "sum"},
    {"dft": True, "batch_invariant": True},
)


@dataclass
class Case:
    """One drawn case."""

    seed: int
    tokens: int
    hidden_size: int
    dtype: torch.dtype
    cuts: list[int]  # rows at which ranks' parts begin, and the end of the last
    padding: int  # the last rows, which are not classes
    ignored: float  # share of the tokens
    options: dict[str, Any]
    by_class: bool  # bias and class weights
    by_token: bool  # temperatures and token weights
    sequence: bool
    wide: bool  # hidden's gradient is added up in fp32
    starts: bool  # vocab_start is given
    limit: int | None
    retain: bool | None
    least_work: int  # from which forward retains


def draw(number: int, ranks: int) -> Case:
    choose = random.Random(1000 * ranks + number)
    rows = choose.choice((7, 64, 203, 500))
    cuts = sorted(choose.randint(0, rows) for _ in range(ranks - 1))
    if choose.random() < 0.25:  # a rank has no row
        cuts[0] = choose.choice((0, cuts[-1]))
        cuts.sort()
    padding = choose.randint(1, rows - 2) if choose.random() < 0.25 else 0
    case = Case(
        seed=number,
        tokens=ranks * choose.choice((1, 5, 24, 170)),
        hidden_size=choose.choice((8, 40, 64)),
        dtype=choose.choice(DTYPES),
        cuts=[0, *cuts, rows],
        padding=padding,
        ignored=choose.choice((0.0, 0.3, 0.3, 1.0)),
        options=choose.choice(OPTIONS),
        by_class=choose.random() < 0.3,
        by_token=choose.random() < 0.3,
        sequence=choose.random() < 0.5,
        wide=choose.random() < 0.5,
        starts=choose.random() < 0.3,
        limit=choose.choice((None, None, 4 << 20, 64 << 20)),
        retain=choose.choice((None, False, True)),
        least_work=choose.choice((1, 1 << 62)),
    )
    if device() != "cpu" and case.dtype is not torch.bfloat16:  # there invariance takes bf16
        case.options = {name: value for name, value in case.options.items() if name != "batch_invariant"}
    return case


class Tensors:
    """A case's whole tensors, the same on every rank."""

    def __init__(self, case: Case) -> None:
        make = generator(case.seed)
        rows, classes = case.cuts[-1], case.cuts[-1] - case.padding
        self.hidden = torch.randn(case.tokens, case.hidden_size, generator=make).to(case.dtype)
        self.weight = (2.0 / case.hidden_size**0.5 * torch.randn(rows, case.hidden_size, generator=make)).to(case.dtype)
        self.bias, self.class_weight = torch.randn(rows, generator=make).to(case.dtype), torch.rand(rows, generator=make) + 0.5
        self.target = torch.randint(0, classes, (case.tokens,), generator=make)
        self.target[torch.rand(case.tokens, generator=make) < case.ignored] = -100
        self.temperature, self.token_weight = torch.rand(case.tokens, generator=make) + 0.5, torch.rand(case.tokens, generator=make)
        self.upstream = torch.randn(case.tokens, generator=make)
        self.class_offset = torch.randn(rows, generator=make)
        self.classes = classes


def call(case: Case, tensors: Tensors, hidden: Tensor, weight: Tensor, bias: Tensor, offset: Tensor, begin: int, **more: Any) -> Any:
    """Outputs; backward has run from a sum of all that are differentiable."""
    given: dict[str, Any] = {**case.options, "workspace_limit_bytes": case.limit, "retain_in_grad_weight": case.retain, **more}
    if case.by_class:
        given |= {"bias": bias, "class_offset": offset, "class_weight": tensors.class_weight[begin : begin + weight.shape[0]].clone()}
    if case.by_token:
        given |= {"temperature": tensors.temperature, "token_weight": tensors.token_weight}
    made = flce.linear_cross_entropy(hidden, weight, tensors.target, **given)
    outputs = made if isinstance(made, tuple) else (made,)
    parts = [part * tensors.upstream if part.dim() else part for part in outputs if part.requires_grad]
    torch.stack([part.sum() for part in parts]).sum().backward()
    return outputs


def compare(number: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = draw(number, ranks)
    tensors = Tensors(case)
    _retain.LEAST_WORK = case.least_work
    begin, end = case.cuts[rank : rank + 2]
    of_classes = (tensors.weight, tensors.bias, tensors.class_offset)
    whole = [leaf(tensors.hidden), *(leaf(each[: tensors.classes]) for each in of_classes)]
    expected = call(case, tensors, *whole, 0)
    hidden = leaf(tensors.hidden.chunk(ranks)[rank] if case.sequence else tensors.hidden)
    mine = [hidden, *(leaf(each[begin:end]) for each in of_classes)]
    more: dict[str, Any] = {"process_group": dist.group.WORLD, "sequence_parallel": case.sequence}
    more |= {"vocab_start": begin} if case.starts else {}
    more |= {"vocab_size": tensors.classes} if case.padding else {}
    more |= {"reduce_dtype": torch.float32} if case.wide else {}
    got = call(case, tensors, *mine, begin, **more)
    for one, right in zip(got, expected, strict=True):
        same_on_every_rank(one)
        if one.dtype is torch.int64:
            assert torch.equal(one, right)
        else:
            close(one, right, case.dtype)
    gradients = [tensor.grad for tensor in mine]
    right_hidden, right_weight, *right_classes = (tensor.grad for tensor in whole)
    assert right_hidden is not None and right_weight is not None
    if not case.sequence:
        same_on_every_rank(*(gradient for gradient in gradients[:1] if gradient is not None))
    sequence_part = right_hidden.chunk(ranks)[rank] if case.sequence else right_hidden
    close_to(gradients[0], sequence_part, right_hidden, case.dtype)
    close_to(gradients[1], padded(right_weight, case.padding)[begin:end], right_weight, case.dtype)
    for got_one, right in zip(gradients[2:], right_classes, strict=True):
        if right is not None:
            close_to(got_one, padded(right, case.padding)[begin:end], right, case.dtype)


def padded(gradient: Tensor, rows: int) -> Tensor:
    """Padding gets no gradient."""
    return torch.cat([gradient, gradient.new_zeros(rows, *gradient.shape[1:])])


def close_to(got: Tensor | None, right: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
    """A rank's part: by the size of the whole gradient, since a part of it may be next to nothing."""
    assert got is not None and got.shape == right.shape and got.dtype is right.dtype
    bound = (2e-5 if dtype is torch.float32 else 1e-2) * float(whole.double().norm())
    error = float((got.double() - right.double()).norm())
    assert error <= bound, f"off by {error:.2e}, {bound:.2e} allowed"


def run(number: int) -> None:
    try:
        compare(number)
    except BaseException:
        print(f"failed: {draw(number, dist.get_world_size())}", flush=True)
        raise


if __name__ == "__main__":
    run_main(run, lambda: in_turn([(number,) for number in range(CASES)], 4))
