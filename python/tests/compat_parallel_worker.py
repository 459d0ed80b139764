"""One rank of a tensor-parallel group, under torchrun: the stand-ins of flce.compat over slices of a vocabulary against formulas of the
whole layer in fp64. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compat_support import DTYPES, HeadModel, Layer, make_layer
from levels import QUICK, in_turn
from rank_support import device, generator, run_main
from support import assert_close
from tensor_parallel_support import same_on_every_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import flce
from flce.compat import cce, skyrl, verl
from flce.compat.torchtune import LinearCrossEntropyLoss
from flce.core import _once

MESH: list[DeviceMesh] = []
# Rows of a rank where slices are equal. Ranks agree once for each shape of a slice, so slices of 63 classes must not have this size.
ROWS = 24


def mesh() -> DeviceMesh:
    if not MESH:
        MESH.append(init_device_mesh(device(), (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return MESH[0]


def layer_of(dtype: torch.dtype = torch.float32, **sizes: Any) -> Layer:
    return make_layer(device(), dtype, **sizes)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def summed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    total = tensor.detach().float().clone()
    dist.all_reduce(total)
    return total


def gradient(tensor: Tensor | None) -> Tensor:
    assert tensor is not None and tensor.grad is not None
    return tensor.grad


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, *, output: bool = False, factor: float = 1.0) -> None:
    assert_close(actual, expected, dtype, output=output, factor=factor)


# ── cut-cross-entropy ───────────────────────────────


def sliced(layer: Layer, options: cce.VocabParallelOptions) -> Layer:
    """The layer with this rank's slice of the classes."""
    rows = slice(options.start, options.stop)
    return Layer(leaf(layer.hidden), leaf(layer.weight[rows]), layer.target, None if layer.bias is None else leaf(layer.bias[rows]))


def cut_cross_entropy(dtype: torch.dtype, reduction: str, shift: int, bias: bool, summed_on_the_way: bool) -> None:
    """Loss, lse and z-loss, with ignored rows and slices that differ by a row."""
    layer = layer_of(dtype, shape=(3, 9), vocab_size=63, bias=bias)
    exact = layer.in_double()
    logits, target = exact.logits(5.0), layer.target
    if shift:
        logits, target = logits[:, :-shift], target[:, shift:]
    right = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction)
    right = right.view(target.shape) if reduction == "none" else right
    right_lse = torch.where(target != -100, logits.logsumexp(-1), 0.0)
    right_z_loss = right_lse[target != -100].square().mean()
    (right.sum() + 0.1 * right_z_loss).backward()

    options = cce.VocabParallelOptions.from_vocab(63, reduce_e_grad=summed_on_the_way)
    mine = sliced(layer, options)
    how: dict[str, Any] = {"softcap": 5.0, "reduction": reduction, "shift": shift, "return_lse": True}
    loss, lse = cce.linear_cross_entropy(mine.hidden, mine.weight, layer.target, mine.bias, **how, vocab_parallel_options=options)
    z_loss = cce.compute_z_loss(lse, layer.target, shift)
    for value, wanted in ((loss, right), (lse, right_lse), (z_loss, right_z_loss)):
        assert value.dtype is torch.float32 and value.shape == wanted.shape
        close(value, wanted, dtype, output=True)
        same_on_every_rank(value)
    (loss.sum() + 0.1 * z_loss).backward()
    grad_hidden = gradient(mine.hidden)
    assert grad_hidden.dtype is dtype and grad_hidden.shape == layer.hidden.shape
    if summed_on_the_way:
        same_on_every_rank(grad_hidden)
        close(grad_hidden, gradient(exact.hidden), dtype)
    else:
        total = summed(grad_hidden)
        assert (total - grad_hidden.float()).norm() > 0.1 * total.norm()
        # Each of the ranks has rounded its part.
        assert_close(total, gradient(exact.hidden), dtype, factor=2.0)
    close(gradient(mine.weight), gradient(exact.weight)[options.start : options.stop], dtype)
    if bias:
        close(gradient(mine.bias), gradient(exact.bias)[options.start : options.stop], dtype)


def a_sum_in_fp32() -> None:
    """Ranks' parts of e's gradient that are large and cancel: added up before they are rounded."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = layer_of(torch.bfloat16, ignore_index=None, vocab_size=ROWS * ranks)
    with torch.no_grad():
        layer.weight.add_(64.0)  # shifts every class: the softmax's gradient, which adds up to 0, does not feel it
    exact = layer.in_double()
    F.cross_entropy(exact.logits(), layer.target, reduction="sum").backward()
    options = cce.VocabParallelOptions(ROWS * rank, ROWS * (rank + 1), dist.group.WORLD)
    mine = sliced(layer, options)
    loss = cce.linear_cross_entropy(mine.hidden, mine.weight, layer.target, reduction="sum", vocab_parallel_options=options)
    loss.backward()
    rounded = leaf(layer.hidden)
    how: dict[str, Any] = {"reduction": "sum", "process_group": dist.group.WORLD}
    flce.linear_cross_entropy(rounded, mine.weight, layer.target, **how).backward()
    error, without = ((gradient(e).double() - gradient(exact.hidden)).norm() for e in (mine.hidden, rounded))
    # A GPU rounds the logits' gradients to 16 bits, too, which no sum mends.
    assert error < (0.5 if device() == "cpu" else 0.9) * without, (error, without)


def nothing_to_predict() -> None:
    layer = layer_of(torch.float32)
    layer.target.fill_(-100)
    options = cce.VocabParallelOptions.from_vocab(63)
    mine = sliced(layer, options)
    loss = cce.linear_cross_entropy(mine.hidden, mine.weight, layer.target, vocab_parallel_options=options)
    assert bool(loss.isnan())
    loss.backward()
    assert not gradient(mine.hidden).any() and not gradient(mine.weight).any()


def vocabularies_that_share_slices() -> None:
    """Layers of 61 to 64 classes: ranks whose slice is as large as before do not take it for the same layer."""
    for vocab_size in (64, 63, 62, 61):
        layer = layer_of(vocab_size=vocab_size)
        options = cce.VocabParallelOptions.from_vocab(vocab_size)
        mine = sliced(layer, options)
        loss = cce.linear_cross_entropy(mine.hidden, mine.weight, layer.target, vocab_parallel_options=options)
        close(loss, F.cross_entropy(layer.in_double().logits(), layer.target), torch.float32, output=True)


def slices_that_do_not_fit() -> None:
    layer = layer_of(bias=True)
    options = cce.VocabParallelOptions.from_vocab(63, dist.group.WORLD)
    mine, twice = sliced(layer, options), cce.VocabParallelOptions(0, 7)
    assert mine.bias is not None

    def call(c: Tensor, bias: Tensor | None, options: cce.VocabParallelOptions) -> Any:
        return cce.linear_cross_entropy(layer.hidden, c, layer.target, bias, vocab_parallel_options=options)

    refused(ValueError, "c has shape", lambda: call(mine.weight[1:], mine.bias, options))
    refused(ValueError, "c has shape", lambda: call(layer.weight, layer.bias, options))
    refused(ValueError, "bias has shape", lambda: call(mine.weight, layer.bias, options))
    refused(flce.PlacementError, "overlap", lambda: call(layer.weight[:7], None, twice))


def cce_in_a_graph() -> None:
    layer = layer_of(ignore_index=None)
    keep = torch.rand(33, generator=generator(2)) < 0.6
    options = cce.VocabParallelOptions.from_vocab(63)
    exact = layer.in_double()
    right = F.cross_entropy(exact.logits(), torch.where(keep, layer.target, -100))
    right.backward()
    mine = sliced(layer, options)

    def step(e: Tensor, c: Tensor) -> Any:
        return cce.linear_cross_entropy(e * 1.0, c, torch.where(keep, layer.target, -100), vocab_parallel_options=options)

    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(mine.hidden, mine.weight)
    loss.backward()
    close(loss, right, torch.float32, output=True)
    close(gradient(mine.hidden), gradient(exact.hidden), torch.float32)
    close(gradient(mine.weight), gradient(exact.weight)[options.start : options.stop], torch.float32)


def one_rank() -> None:
    """A group of this rank alone, whose slice is the whole vocabulary."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone: Any = groups[dist.get_rank()]
    layer = layer_of()
    options = cce.VocabParallelOptions.from_vocab(63, alone)
    assert (options.start, options.stop) == (0, 63)
    for reduce_e_grad in (True, False):
        options.reduce_e_grad = reduce_e_grad
        loss = cce.linear_cross_entropy(layer.hidden, layer.weight, layer.target, vocab_parallel_options=options)
        right = cce.linear_cross_entropy(layer.hidden, layer.weight, layer.target)
        close(loss, right.detach(), torch.float32, output=True)
        for one, other in zip(*(torch.autograd.grad(each, layer.leaves()) for each in (loss, right)), strict=True):
            close(one, other, torch.float32)
    target = layer.target.clamp(min=0)
    mine, whole = (verl.linear_cross_entropy(layer.hidden, layer.weight, target, 1.0, "none", group) for group in (alone, None))
    for value, expected in zip(mine, whole, strict=True):
        close(value, expected.detach(), torch.float32, output=True)


# ── verl ────────────────────────────────────────────


def verl_logprobs(dtype: torch.dtype, reduction: str, in_graph: bool) -> None:
    """Equal slices, another upstream gradient for each row, and hidden's gradient as this rank's part."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = layer_of(dtype, shape=(3, 7), ignore_index=None, vocab_size=ROWS * ranks)
    exact = layer.in_double()
    log_softmax = exact.logits(temperature=0.7).flatten(0, -2).log_softmax(-1)
    right = log_softmax.gather(1, layer.target.flatten()[:, None])[:, 0]
    right_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    right = {"none": right, "sum": right.sum(), "mean": right.mean()}[reduction]
    upstream = torch.randn(21, generator=generator(9))
    wanted: Any = upstream if reduction == "none" else torch.ones(())
    ((right * wanted).sum() + (right_entropy * upstream.flip(0)).sum()).backward()
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    hidden, weight = leaf(layer.hidden), leaf(layer.weight[rows])

    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        return verl.linear_cross_entropy(hidden * 1.0, weight, target, 0.7, reduction, dist.group.WORLD)

    function = torch.compile(step, fullgraph=True, backend="aot_eager") if in_graph else step
    logprobs, entropy = function(hidden, weight, layer.target)
    for value, expected in ((logprobs, right), (entropy, right_entropy)):
        assert_close(value, expected, dtype, output=True, factor=4.0)
        same_on_every_rank(value)
    ((logprobs * wanted).sum() + (entropy * upstream.flip(0)).sum()).backward()
    part = gradient(hidden)
    total = summed(part)
    assert (total - part.float()).norm() > 0.1 * total.norm()
    assert part.dtype is dtype and part.shape == layer.hidden.shape
    assert_close(total, gradient(exact.hidden), dtype, factor=2.0)
    close(gradient(weight), gradient(exact.weight)[rows], dtype)


def verl_top_k(dtype: torch.dtype) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = layer_of(dtype, shape=(3, 7), ignore_index=None, vocab_size=ROWS * ranks)
    ids = torch.randint(0, ROWS * ranks, (3, 7, 5), generator=generator(4))
    upstream = torch.randn(3, 7, 5, generator=generator(9))
    exact = layer.in_double()
    right = exact.logits(temperature=0.7).log_softmax(-1).gather(-1, ids)
    (right * upstream).sum().backward()
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    hidden, weight = leaf(layer.hidden), leaf(layer.weight[rows])
    logprobs = verl.linear_topk_log_probs(hidden, weight, ids, 0.7, dist.group.WORLD)
    assert_close(logprobs, right, dtype, output=True, factor=4.0)
    same_on_every_rank(logprobs)
    (logprobs * upstream).sum().backward()
    assert_close(summed(gradient(hidden)), gradient(exact.hidden), dtype, factor=2.0)
    close(gradient(weight), gradient(exact.weight)[rows], dtype)

    def of_others() -> Tensor:
        return verl.linear_topk_log_probs(hidden, weight, ids + ROWS, 0.7, dist.group.WORLD)

    if hidden.is_cuda:  # nobody waits for ids there
        of_others()
        refused(flce.LabelError, "", flce.check_labels)
    else:
        refused(ValueError, f"not in [0, {ROWS * ranks})", of_others)


def verl_refusals() -> None:
    layer = layer_of(ignore_index=None)

    def call(rows: int, group: Any) -> Any:
        return verl.linear_cross_entropy(layer.hidden, layer.weight[:rows], layer.target, 1.0, "none", group)

    refused(ValueError, "dist_process_group is a object", lambda: call(11, object()))
    refused(flce.PlacementError, "leave a gap", lambda: call(11 + dist.get_rank(), dist.group.WORLD))


# ── SkyRL ───────────────────────────────────────────


def skyrl_scores(dtype: torch.dtype) -> None:
    """Sets whose classes lie on one rank, on several or nowhere, and sampled tokens in them and outside."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = layer_of(dtype, shape=(3, 7), ignore_index=None, vocab_size=ROWS * ranks)
    support = torch.randint(0, ROWS * ranks, (3, 7, 3), generator=generator(4), dtype=torch.int32)
    support[0, :, 0], support[1, :2], support[2, 2, 2] = layer.target[0], -1, -1
    members, valid, exact = support >= 0, (support >= 0).any(-1), layer.in_double()
    logits = exact.logits(temperature=0.7)
    kept = torch.where(members, logits.gather(-1, support.clamp(min=0).long()), torch.where(valid, -torch.inf, 0.0)[..., None])
    right = torch.where(valid, logits.gather(-1, layer.target[..., None]).squeeze(-1) - kept.logsumexp(-1), 0.0)
    log_softmax = torch.where(members, kept.log_softmax(-1), 0.0)
    right_entropy = -torch.where(members, log_softmax.exp() * log_softmax, 0.0).sum(-1)
    upstream = torch.randn(3, 7, generator=generator(9))
    ((right + right_entropy) * upstream).sum().backward()
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    hidden, weight = leaf(layer.hidden), leaf(layer.weight[rows])
    part: dict[str, Any] = {"vocab_start_index": rows.start, "vocab_end_index": rows.stop, "tp_group": dist.group.WORLD}
    made = skyrl.sample_support_scores(
        hidden,
        layer.target,
        support,
        lm_head_weight=weight,
        temperature=0.7,
        compute_entropy=True,
        entropy_requires_grad=True,
        **part,
    )
    assert made.entropy is not None and torch.equal(made.valid_mask, valid)
    for value, expected in ((made.logprobs, right), (made.entropy, right_entropy)):
        assert_close(value, expected, dtype, output=True, factor=4.0)
        same_on_every_rank(value)
    ((made.logprobs + made.entropy) * upstream).sum().backward()
    assert_close(summed(gradient(hidden)), gradient(exact.hidden), dtype, factor=2.0)
    close(gradient(weight), gradient(exact.weight)[rows], dtype)


# ── torchtune ───────────────────────────────────────


def torchtunes_own() -> list[str]:
    """Output layers that were called as they are, as was said."""
    return [about for about in _once.said if about.startswith("LinearCrossEntropyLoss: the output layer")]


def tune(layer: Layer, style: ColwiseParallel | None = None, **options: Any) -> tuple[Any, Any]:
    """A loss and its model, whose output layer lies over ranks as the loss's plan says."""
    model, loss = HeadModel(layer.weight, layer.bias), LinearCrossEntropyLoss(tp_enabled=True, **options)
    plan: Any = loss.patch_tp_plan({"output": None})
    parallelize_module(model, mesh(), {"output": style or plan["output"]})
    loss.set_model_output(model)
    return loss, model


def states(layer: Layer, kind: str) -> Tensor:
    """The layer's hidden states as a model returns them, a leaf."""
    hidden, rank = layer.hidden.detach(), dist.get_rank()
    if kind == "part":
        return leaf(hidden.chunk(dist.get_world_size(), 1)[rank])
    if kind == "whole":
        return leaf(hidden)
    placement = {"Shard(1)": Shard(1), "Shard(2)": Shard(2), "Replicate": Replicate()}[kind]
    return distribute_tensor(hidden, mesh(), [placement]).requires_grad_()


def check_tune(
    loss: Any, layer: Layer, kind: str, parameters: list[Any], dtype: torch.dtype = torch.float32, *, scale: float = 1.0
) -> None:
    """`parameters`: the output layer's, weight and bias."""
    exact = layer.in_double()
    right = F.cross_entropy(scale * exact.logits().flatten(0, -2), layer.target.flatten(), ignore_index=-100)
    right.backward()
    hidden = states(layer, kind)
    with loss_parallel():
        value = loss(hidden, layer.target)
        value.backward()
    assert type(value) is Tensor and value.dtype is torch.float32 and value.shape == ()
    close(value, right, dtype, output=True)
    same_on_every_rank(value)
    for parameter, wanted in zip(parameters, [exact.weight, *([] if exact.bias is None else [exact.bias])], strict=True):
        made = parameter.grad
        assert isinstance(made, DTensor) and list(made.placements) == [Shard(0)] and made.device_mesh == mesh()
        close(made.full_tensor(), gradient(wanted), dtype)
        parameter.grad = None
    made, wanted_hidden = gradient(hidden), gradient(exact.hidden)
    if isinstance(hidden, DTensor):
        assert isinstance(made, DTensor) and made.placements == hidden.placements
        made = made.full_tensor()
    elif kind == "part":
        wanted_hidden = wanted_hidden.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    close(made, wanted_hidden, dtype, factor=max(1.0, dist.get_world_size() / 4))  # each rank's part is rounded, and each sum


def torchtune_head(dtype: torch.dtype, kind: str, bias: bool, length: int = 8) -> None:
    """The kernel reads the shard: the layer is not called. A sequence of 9 is no multiple of the number of ranks."""
    layer = layer_of(dtype, shape=(3, length), bias=bias)
    loss, model = tune(layer)
    check_tune(loss, layer, kind, list(model.output.parameters()), dtype)
    assert not torchtunes_own()


def torchtune_in_a_graph(kind: str) -> None:
    """Masking inside the graph."""
    layer = layer_of(shape=(3, 8), ignore_index=None, bias=True)
    loss, model = tune(layer)
    keep = torch.rand(3, 8, generator=generator(2)) < 0.6

    def step(outputs: Tensor, targets: Tensor) -> Any:
        return loss(outputs, torch.where(keep, targets, -100))

    function = torch.compile(step, fullgraph=True, backend="aot_eager")
    layer.target = torch.where(keep, layer.target, -100)
    for _ in range(2):
        check_tune(function, layer, kind, list(model.output.parameters()))
    assert not torchtunes_own()


def torchtune_tied() -> None:
    layer = layer_of(shape=(3, 8))
    model = nn.Module()
    model.embedding = nn.Embedding(63, 41, _weight=layer.weight.detach())
    parallelize_module(model, mesh(), {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))})
    tied: Any = type("TiedLinear", (), {})()
    tied.tied_module = model.embedding
    model.output = tied
    loss = LinearCrossEntropyLoss(tp_enabled=True)
    loss.set_model_output(model)
    check_tune(loss, layer, "Shard(1)", [model.embedding.weight])


def torchtune_hooked(kind: str) -> None:
    """A hook of somebody's own changes logits: the layer is called, as its ColwiseParallel has it."""
    layer = layer_of(shape=(3, 8), bias=True)
    loss, model = tune(layer, num_output_chunks=3)
    model.output.register_forward_hook(lambda module, args, output: output * 0.5)
    check_tune(loss, layer, kind, list(model.output.parameters()), scale=0.5)
    assert torchtunes_own()


def torchtune_enabled_later() -> None:
    layer = layer_of(shape=(3, 8))
    loss, model = tune(layer)
    loss.tp_enabled = False
    refused(flce.PlacementError, "tp_enabled is False", lambda: loss(layer.hidden, layer.target))
    loss.tp_enabled = True
    check_tune(loss, layer, "Shard(1)", [model.output.weight])
    layer.target.fill_(-100)
    value = loss(layer.hidden, layer.target)
    value.backward()
    assert value.item() == 0 and not gradient(model.output.weight).full_tensor().any()  # type: ignore[attr-defined]


def torchtune_refusals() -> None:
    layer = layer_of(shape=(3, 8))
    whole = LinearCrossEntropyLoss(tp_enabled=True)
    whole.set_model_output(HeadModel(layer.weight))
    refused(flce.PlacementError, "has a Parameter as its weight", lambda: whole(layer.hidden, layer.target))
    loss, model = tune(layer, ColwiseParallel(input_layouts=Shard(1), use_local_output=True))
    check_tune(loss, layer, "Shard(1)", [model.output.weight])
    model.output.register_forward_hook(lambda module, args, output: output * 1.0)
    refused(flce.PlacementError, "use_local_output=False", lambda: loss(layer.hidden, layer.target))
    plain = LinearCrossEntropyLoss()
    plain.set_model_output(HeadModel(layer.weight))
    refused(flce.PlacementError, "outputs is a DTensor", lambda: plain(states(layer, "Shard(1)"), layer.target))


FLAGS = (False, True)
CASES: list[tuple[Any, ...]] = [
    *in_turn([(cut_cross_entropy, *how) for how in itertools.product(DTYPES, ("mean",), (0, 1), FLAGS, FLAGS)], 5),
    *((cut_cross_entropy, torch.float32, reduction, 2, True, True) for reduction in ("sum", "none")),
    *((function,) for function in (a_sum_in_fp32, nothing_to_predict, vocabularies_that_share_slices, slices_that_do_not_fit)),
    *(() if QUICK else ((cce_in_a_graph,), *((torchtune_in_a_graph, kind) for kind in ("Shard(1)", "part")))),
    (one_rank,),
    *((verl_logprobs, *how) for how in itertools.product(DTYPES, ("none", "mean"), (False,))),
    *((verl_logprobs, torch.float32, *how) for how in (("sum", False), ("none", True))),
    *((verl_top_k, dtype) for dtype in DTYPES),
    (verl_refusals,),
    *((skyrl_scores, dtype) for dtype in DTYPES),
    *((torchtune_head, *how) for how in itertools.product(DTYPES, ("Shard(1)", "part"), FLAGS)),
    *((torchtune_head, torch.float32, kind, True, 9) for kind in ("Shard(1)", "Shard(2)", "Replicate", "whole")),
    *((torchtune_hooked, kind) for kind in ("Shard(1)", "part", "whole")),
    *((function,) for function in (torchtune_tied, torchtune_enabled_later, torchtune_refusals)),
]


def run(function: Callable[..., None], *arguments: Any) -> None:
    torch._dynamo.reset()
    try:
        function(*arguments)
    except BaseException:
        print(f"failed: {function.__name__}{arguments}", flush=True)
        raise


if __name__ == "__main__":
    run_main(run, lambda: CASES)
