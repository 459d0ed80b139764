"""One rank of a tensor-parallel group, under torchrun: an FP8 head over shards against its definition. Exits with a failed assertion, or 0;
rank 0 prints how many cases passed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fp8_support import Truth, error, truth_of
from rank_support import device, run_main
from tensor_parallel_support import HIDDEN, VOCAB, Layer, leaf, same_on_every_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import flce

FORMS = [flce.Fp8(logits, dlogits) for logits in ("int8", "e4m3") for dlogits in ("e5m2", "e4m3")]
# A rank's part of hidden's gradient is rounded to the dtype, and so is their sum.
BOUND = {torch.float32: 5e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# A GPU's sums of logits in e4m3 are cut off at 2^-13, and codes follow (docs/numerics.md).
CUT_OFF = 2e-2
OPTIONS: dict[str, Any] = {"softcap": 3.0, "temperature": 1.3, "z_loss": 1e-2}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.2, "temperature": 1.3, "logit_scale": -0.5}


def on_gpu() -> bool:
    return device() != "cpu"


def bound(dtype: torch.dtype, fp8: flce.Fp8 | None = None) -> float:
    return BOUND[dtype] + (CUT_OFF if on_gpu() and fp8 is not None and fp8.logits == "e4m3" else 0)


def defined(layer: Layer, target: Tensor, fp8: flce.Fp8, **more: Any) -> Truth:
    with torch.device("cpu"):
        return truth_of(layer.hidden, layer.weight, target, fp8, **more)


def loss_bound(fp8: flce.Fp8) -> float:
    return 4e-3 if on_gpu() and fp8.logits == "e4m3" else 1e-5


def check(layer: Layer, loss: Tensor, hidden: Tensor, shard: Tensor, expected: Truth, fp8: flce.Fp8, *, sequence: bool = False) -> None:
    """Backward of a loss whose hidden states and shard are leaves."""
    same_on_every_rank(loss)
    assert error(loss, expected.loss) < loss_bound(fp8), (fp8, float(loss.detach()), float(expected.loss))
    loss.backward()
    assert hidden.grad is not None and shard.grad is not None
    right = expected.grad_hidden
    if sequence:
        right = layer.my_tokens(right)
    else:
        same_on_every_rank(hidden.grad)
    assert error(hidden.grad, right) < bound(layer.hidden.dtype, fp8)
    assert error(shard.grad, layer.mine(expected.grad_weight)) < bound(layer.hidden.dtype, fp8)


def forms(fp8: flce.Fp8, dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group, fp8=fp8)
    check(layer, loss, hidden, shard, defined(layer, layer.target, fp8), fp8)


def options(sequence: bool, reduce_dtype: torch.dtype | None, given: dict[str, Any]) -> None:
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    bias, class_weight = layer.bias, layer.class_weight
    expected = defined(layer, layer.target, fp8, bias=bias, class_weight=class_weight, **given)
    hidden = leaf(layer.my_tokens(layer.hidden) if sequence else layer.hidden)
    shard, mine = leaf(layer.mine(layer.weight)), leaf(layer.mine(bias))
    over = {"process_group": layer.group, "sequence_parallel": sequence, "reduce_dtype": reduce_dtype}
    of_classes = {"bias": mine, "class_weight": layer.mine(class_weight)}
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, fp8=fp8, **given, **of_classes, **over)
    check(layer, loss, hidden, shard, expected, fp8, sequence=sequence)
    assert error(mine.grad, layer.mine(expected.grad_bias)) < bound(torch.bfloat16)  # type: ignore[arg-type]


def logprobs() -> None:
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    expected, valid = defined(layer, layer.target, fp8), layer.target >= 0
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    made = flce.linear_logprobs(hidden, shard, layer.target, process_group=layer.group, fp8=fp8)
    assert error(made[valid], expected.logprobs[valid.cpu()]) < 1e-5
    check(layer, -made.sum() / valid.sum(), hidden, shard, expected, fp8)


def limited(limit: int) -> None:
    """Retained in part, or not at all."""
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group, fp8=fp8, workspace_limit_bytes=limit)
    check(layer, loss, hidden, shard, defined(layer, layer.target, fp8), fp8)


def dtensors() -> None:
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    sizes = {"shape": layer.weight.shape, "stride": layer.weight.stride(), "run_check": False}
    shard = DTensor.from_local(layer.mine(layer.weight), mesh, [Shard(0)], **sizes).requires_grad_()
    hidden = DTensor.from_local(layer.hidden, mesh, [Replicate()], run_check=False).requires_grad_()
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, process_group=mesh, fp8=fp8)
    loss.backward()
    expected = defined(layer, layer.target, fp8)
    assert error(loss, expected.loss) < loss_bound(fp8)
    assert isinstance(hidden.grad, DTensor) and isinstance(shard.grad, DTensor) and shard.grad.placements == shard.placements
    assert error(hidden.grad.to_local(), expected.grad_hidden) < bound(torch.bfloat16)
    assert error(shard.grad.to_local(), layer.mine(expected.grad_weight)) < bound(torch.bfloat16)


def by_call(hidden: Tensor, shard: nn.Parameter, layer: Layer) -> Tensor:
    return flce.linear_cross_entropy(hidden, shard, layer.target, process_group=layer.group, fp8=flce.Fp8())


def by_loss(hidden: Tensor, shard: nn.Parameter, layer: Layer) -> Tensor:
    head = nn.Linear(HIDDEN, shard.shape[0], bias=False)
    head.weight = shard
    return flce.LinearCrossEntropyLoss(head, impl="flce", shift=0, process_group=layer.group, fp8=flce.Fp8())(hidden, layer.target)


def by_head(hidden: Tensor, shard: nn.Parameter, layer: Layer) -> Tensor:
    head = flce.FusedLMHead(HIDDEN, shard.shape[0], bias=False, process_group=layer.group, fp8=flce.Fp8(), device="meta")
    head.weight = shard
    loss: Tensor = head(hidden, labels=layer.target)
    return loss


def checkpointed(hidden: Tensor, shard: nn.Parameter, layer: Layer) -> Tensor:
    loss: Tensor = checkpoint(by_call, hidden, shard, layer, use_reentrant=False)  # type: ignore[assignment]
    return loss


def compiled(hidden: Tensor, shard: nn.Parameter, layer: Layer) -> Tensor:
    torch._dynamo.reset()

    def call(hidden: Tensor, shard: Tensor, target: Tensor) -> Tensor:
        return flce.linear_cross_entropy(hidden, shard, target, process_group=layer.group, fp8=flce.Fp8())

    loss: Tensor = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, shard, layer.target)
    return loss


def ways(way: Callable[[Tensor, nn.Parameter, Layer], Tensor]) -> None:
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    hidden, shard = leaf(layer.hidden), nn.Parameter(layer.mine(layer.weight))
    loss = way(hidden, shard, layer)
    check(layer, loss, hidden, shard, defined(layer, layer.target, fp8), fp8)


def gradients_are_added() -> None:
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8()
    shard = leaf(layer.mine(layer.weight))
    buffer = torch.ones(shard.shape)
    flce.linear_cross_entropy(
        leaf(layer.hidden), shard, layer.target, process_group=layer.group, grad_weight_out=buffer, fp8=fp8
    ).backward()
    assert shard.grad is None
    expected = layer.mine(defined(layer, layer.target, fp8).grad_weight)
    assert error(buffer - 1, expected) < bound(torch.bfloat16)


def columns() -> None:
    """A rank's weight is the view of a [D, P], P a multiple of 8 as GPUs ask for. The last classes are padding without numbers."""
    layer, fp8, ranks = Layer(torch.bfloat16), flce.Fp8(), dist.get_world_size()
    rows = -(-VOCAB // (8 * ranks)) * 8
    first = rows * dist.get_rank()
    classes = min(VOCAB - first, rows)
    mine = torch.full((rows, HIDDEN), torch.nan, dtype=torch.bfloat16)
    mine[:classes] = layer.weight[first : first + classes]
    hidden, shard = leaf(layer.hidden), mine.t().contiguous().t().requires_grad_()
    over: dict[str, Any] = {"process_group": layer.group, "vocab_start": first, "vocab_size": VOCAB}
    loss = flce.linear_cross_entropy(hidden, shard, layer.target, fp8=fp8, **over)
    loss.backward()
    same_on_every_rank(loss, hidden.grad)  # type: ignore[arg-type]
    assert hidden.grad is not None and shard.grad is not None
    expected = defined(layer, layer.target, fp8)
    assert error(loss, expected.loss) < loss_bound(fp8)
    assert error(hidden.grad, expected.grad_hidden) < bound(torch.bfloat16)
    assert error(shard.grad[:classes], expected.grad_weight[first : first + classes]) < bound(torch.bfloat16)
    assert not shard.grad[classes:].any()


def ranks_without_classes(rows: str) -> None:
    """One rank has every class, and the others none, or rows of padding without numbers; then all tokens are ignored."""
    layer, fp8, rank = Layer(torch.bfloat16), flce.Fp8(), dist.get_rank()
    mine = layer.weight if rank == 0 else layer.weight[:0]
    if rows == "padding":
        mine = torch.cat([mine, torch.full((5, HIDDEN), torch.nan, dtype=mine.dtype)])
    sizes = {"vocab_start": 0 if rank == 0 else VOCAB + 5 * rank, "vocab_size": VOCAB} if rows == "padding" else {}
    for target in (layer.target, torch.full_like(layer.target, -100)):
        hidden, shard = leaf(layer.hidden), leaf(mine)
        loss = flce.linear_cross_entropy(hidden, shard, target, process_group=layer.group, fp8=fp8, **sizes)
        loss.backward()
        same_on_every_rank(loss, hidden.grad)  # type: ignore[arg-type]
        assert hidden.grad is not None and shard.grad is not None and not shard.grad[0 if rank else VOCAB :].any()
        if bool((target < 0).all()):
            assert not loss.item() and not hidden.grad.any() and not shard.grad.any()
            continue
        expected = defined(layer, target, fp8)
        assert error(loss, expected.loss) < loss_bound(fp8)
        assert error(hidden.grad, expected.grad_hidden) < bound(torch.bfloat16)
        if rank == 0:
            assert error(shard.grad[:VOCAB], expected.grad_weight) < bound(torch.bfloat16)


def frozen_codes(given: dict[str, Any], scales: Any = "dynamic") -> None:
    """A weight that is e4m3 already: hidden and the bias have gradients."""
    layer, fp8 = Layer(torch.bfloat16), flce.Fp8("e4m3", scales=scales)
    scale = layer.weight.float().abs().amax(-1) / 400
    codes, bias = (layer.weight / scale[:, None]).to(torch.float8_e4m3fn), layer.bias
    with torch.device("cpu"):
        expected = truth_of(layer.hidden, codes, layer.target, fp8, bias=bias, weight_scale=scale, **given)
    hidden, mine = leaf(layer.hidden), leaf(layer.mine(bias))
    of_classes = {"weight_scale": layer.mine(scale), "bias": mine}
    loss = flce.linear_cross_entropy(hidden, layer.mine(codes), layer.target, process_group=layer.group, fp8=fp8, **given, **of_classes)
    same_on_every_rank(loss)
    assert error(loss, expected.loss) < loss_bound(fp8)
    loss.backward()
    assert hidden.grad is not None and mine.grad is not None
    assert error(hidden.grad, expected.grad_hidden) < bound(torch.bfloat16, fp8)
    assert error(mine.grad, layer.mine(expected.grad_bias)) < bound(torch.bfloat16, fp8)


def refused(given: dict[str, Any], message: str) -> None:
    """Every rank raises before anything is sent, and the group goes on."""
    layer = Layer(torch.bfloat16)
    try:
        flce.linear_cross_entropy(layer.hidden, layer.mine(layer.weight), layer.target, process_group=layer.group, fp8=flce.Fp8(), **given)
    except flce.SpecError as refusal:
        assert message in str(refusal) and re.search("leave .*fp8.* out", str(refusal)), refusal
    else:
        raise AssertionError(f"{given} was taken")
    by_call(layer.hidden, nn.Parameter(layer.mine(layer.weight)), layer)


CASES: list[tuple[Any, ...]] = [
    *((forms, fp8, torch.bfloat16) for fp8 in FORMS),
    *((forms, fp8, torch.bfloat16 if on_gpu() else dtype) for fp8, dtype in ((FORMS[0], torch.float32), (FORMS[3], torch.float16))),
    *((options, sequence, dtype, OPTIONS) for sequence in (False, True) for dtype in (None, torch.float32)),
    *((options, sequence, None, SMOOTHED) for sequence in (False, True)),
    (logprobs,),
    *((limited, limit) for limit in (16 << 20, 64 << 20)),
    (dtensors,),
    *((ways, way) for way in (by_loss, by_head, checkpointed, compiled)),
    (gradients_are_added,),
    *((frozen_codes, given) for given in ({}, SMOOTHED)),
    (frozen_codes, {}, (0.004, None)),
    (columns,),
    *((ranks_without_classes, rows) for rows in ("none", "padding")),
    (refused, {"batch_invariant": True}, "batch_invariant"),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: CASES)
