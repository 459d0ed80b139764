"""One rank of a tensor-parallel group, under torchrun: DTensors, and masking, compilation, tied embeddings and tensor parallel together, as
trainers have them. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import device, generator, run_main
from tensor_parallel_support import HIDDEN, TOKENS, Layer, close, leaf, same_on_every_rank
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import flce

MESH: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    if not MESH:
        MESH.append(init_device_mesh(device(), (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return MESH[0]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def whole_loss(layer: Layer, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """loss, gradient of hidden, gradient of weight, of the whole layer in plain torch."""
    hidden, weight = leaf(layer.hidden), leaf(layer.weight)
    loss = F.cross_entropy(F.linear(hidden, weight).float(), layer.target, ignore_index=-100, **options)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def shard_loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    loss: Tensor = flce.linear_cross_entropy(hidden, weight, target, **options)
    return loss


# ── DTensors ────────────────────────────────────────


def placements(hidden_kind: str, in_graph: bool) -> None:
    """A Shard(0) weight with hidden states that are plain, replicated or sharded by tokens; gradients have their inputs' placements."""
    layer = Layer()
    expected, grad_hidden, grad_weight = whole_loss(layer)
    weight = distribute_tensor(layer.weight, mesh(), [Shard(0)]).requires_grad_()
    sequence = hidden_kind == "sharded"
    hidden: Tensor = {
        "plain": lambda: layer.hidden.clone(),
        "replicated": lambda: distribute_tensor(layer.hidden, mesh(), [Replicate()]),
        "sharded": lambda: distribute_tensor(layer.hidden, mesh(), [Shard(0)]),
    }[hidden_kind]().requires_grad_()
    function = compiled(shard_loss) if in_graph else shard_loss
    group = mesh().get_group()
    loss = function(hidden, weight, layer.target, process_group=group, sequence_parallel=sequence)
    loss.backward()
    same_on_every_rank(loss)
    close(loss, expected)
    made = weight.grad
    assert isinstance(made, DTensor) and list(made.placements) == [Shard(0)]
    close(made.full_tensor(), grad_weight)
    if hidden_kind == "plain":
        close(hidden.grad, grad_hidden)
    else:
        assert isinstance(hidden, DTensor) and isinstance(hidden.grad, DTensor) and hidden.grad.placements == hidden.placements
        close(hidden.grad.full_tensor(), grad_hidden)


def batches_of_sequences() -> None:
    """hidden [B, S, D] with Shard(1), as sequence parallel has it in batch-first models; labels whole."""
    layer = Layer()
    shape = (3, TOKENS // 3)
    expected, grad_hidden, _ = whole_loss(layer)
    hidden = distribute_tensor(layer.hidden.view(*shape, HIDDEN), mesh(), [Shard(1)]).requires_grad_()
    weight = distribute_tensor(layer.weight, mesh(), [Shard(0)])
    target = distribute_tensor(layer.target.view(shape), mesh(), [Replicate()])
    loss = compiled(shard_loss)(hidden, weight, target, process_group=mesh(), sequence_parallel=True)
    loss.backward()
    close(loss, expected)
    assert isinstance(hidden.grad, DTensor)
    close(hidden.grad.full_tensor().view(-1, HIDDEN), grad_hidden)


def refused_placements() -> None:
    layer = Layer(even=200)
    group = mesh().get_group()
    whole = distribute_tensor(layer.weight, mesh(), [Replicate()])
    columns = distribute_tensor(layer.weight, mesh(), [Shard(1)])
    shard = distribute_tensor(layer.weight, mesh(), [Shard(0)])
    by_tokens = distribute_tensor(layer.hidden, mesh(), [Shard(0)])
    by_width = distribute_tensor(layer.hidden, mesh(), [Shard(1)])
    targets = distribute_tensor(layer.target, mesh(), [Shard(0)])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weight": shard}, "process_group"),
        ({"weight": whole, "process_group": group}, "Shard(0)"),
        ({"weight": columns, "process_group": group}, "Shard(0)"),
        ({"weight": shard, "hidden": by_tokens, "process_group": group}, "sequence_parallel=True"),
        ({"weight": shard, "hidden": by_width, "process_group": group, "sequence_parallel": True}, "hidden_size"),
        ({"weight": shard, "target": targets, "process_group": group}, "Replicate"),
    ]
    for given, message in cases:
        try:
            flce.linear_cross_entropy(**{"hidden": layer.hidden, "target": layer.target, **given})
        except flce.PlacementError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")


# ── A language model with masking, compilation, tied embeddings and tensor parallel ─────────


class TinyModel(nn.Module):
    """An embedding whose table is also the output layer, sharded by rows or whole."""

    def __init__(self, layer: Layer, *, whole: bool) -> None:
        super().__init__()
        self.start = 0 if whole else layer.begin
        self.table = nn.Parameter((layer.weight if whole else layer.mine(layer.weight)).clone())
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            self.mix.weight.copy_(torch.randn(HIDDEN, HIDDEN, generator=generator(5)) / 8)

    def states(self, tokens: Tensor) -> Tensor:
        """A rank has the embeddings of its own rows, and zeros for the others."""
        mine = tokens - self.start
        here = (mine >= 0) & (mine < self.table.shape[0])
        rows = F.embedding(torch.where(here, mine, 0), self.table) * here.unsqueeze(-1)
        return rows


class _SumOverRanks(torch.autograd.Function):
    """Megatron's reduce_from_tensor_model_parallel_region: the sum going forward, the identity going back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        rows = rows.clone()
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def tied(in_graph: bool, masked: float) -> None:
    """The table's gradient is the sum of its two uses. The loss alone is compiled with the mixing layer; masking by where(), as a trainer
    does, inside the graph."""
    layer = Layer()
    tokens = layer.target.clamp(min=0)
    mask = torch.rand(TOKENS, generator=generator(1)) >= masked

    def last_stage(model: TinyModel, states: Tensor, target: Tensor, keep: Tensor, **parallel: Any) -> Tensor:
        labels = torch.where(keep, target, -100)
        hidden = torch.tanh(model.mix(states))
        loss: Tensor = flce.linear_cross_entropy(hidden, model.table, labels, **parallel)
        return loss

    whole, mine = TinyModel(layer, whole=True), TinyModel(layer, whole=False)
    expected = last_stage(whole, whole.states(tokens), layer.target, mask)
    expected.backward()
    function = compiled(last_stage) if in_graph else last_stage
    loss = function(mine, _SumOverRanks.apply(mine.states(tokens)), layer.target, mask, process_group=layer.group)
    loss.backward()
    close(loss, expected)
    assert whole.table.grad is not None and mine.table.grad is not None
    close(mine.table.grad, layer.mine(whole.table.grad))
    close(mine.mix.weight.grad, whole.mix.weight.grad)


def dynamic_number_of_tokens() -> None:
    """One graph for batches of several lengths: no recompilation after the second."""
    layer = Layer()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(shard_loss, fullgraph=True, backend=counter, dynamic=True)
    shard = leaf(layer.mine(layer.weight))
    for tokens in (48, 40, 24, 17, 33):
        hidden = leaf(layer.hidden[:tokens])
        right = leaf(layer.hidden[:tokens])
        loss = function(hidden, shard, layer.target[:tokens].clone(), process_group=layer.group)
        loss.backward()
        expected = F.cross_entropy(F.linear(right, layer.weight), layer.target[:tokens], ignore_index=-100)
        expected.backward()
        close(loss, expected)
        close(hidden.grad, right.grad)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations"


def masked_by_weight() -> None:
    """Masking by token weights and a count of the whole batch, inside the graph."""
    layer = Layer()
    weights = (torch.arange(TOKENS) % 3).float()
    count = torch.tensor(100.0)

    def step(hidden: Tensor, weight: Tensor, **parallel: Any) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy(hidden, weight, layer.target, token_weight=weights, num_valid_tokens=count, **parallel)
        return loss

    whole_hidden, whole = leaf(layer.hidden), leaf(layer.weight)
    expected = step(whole_hidden, whole)
    expected.backward()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = compiled(step)(hidden, shard, process_group=layer.group)
    loss.backward()
    close(loss, expected)
    close(hidden.grad, whole_hidden.grad)


def shifted_labels_in_the_graph() -> None:
    layer = Layer()
    hidden, target = layer.hidden.view(2, -1, HIDDEN), layer.target.view(2, -1)
    expected = flce.linear_cross_entropy(hidden, layer.weight, target, shift=1)
    shard = leaf(layer.mine(layer.weight))
    loss = compiled(shard_loss)(hidden, shard, target, shift=1, process_group=layer.group)
    loss.backward()
    close(loss, expected)


def several_outputs_in_the_graph() -> None:
    layer = Layer()
    flags: dict[str, Any] = {"return_entropy": True, "return_top1": True, "return_lse": True, "reduction": "none"}
    expected = flce.linear_cross_entropy(layer.hidden, layer.weight, layer.target, **flags)
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    got = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")(
        hidden, shard, layer.target, process_group=layer.group, **flags
    )
    (got[0].sum() + got[2].sum()).backward()
    assert torch.equal(got[3], expected[3])
    for mine, right in zip(got[:3], expected[:3], strict=True):
        close(mine, right)


def checkpointed_in_the_graph() -> None:
    layer = Layer()
    expected, grad_hidden, grad_weight = whole_loss(layer)
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))

    def step(x: Tensor, w: Tensor) -> Tensor:
        loss: Tensor = checkpoint(shard_loss, x, w, layer.target, process_group=layer.group, use_reentrant=False)
        return loss

    loss = compiled(step)(hidden, shard)
    loss.backward()
    close(loss, expected)
    close(hidden.grad, grad_hidden)
    close(shard.grad, layer.mine(grad_weight))


def everything_ignored_in_the_graph() -> None:
    layer = Layer()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = compiled(shard_loss)(hidden, shard, torch.full_like(layer.target, -100), process_group=layer.group)
    loss.backward()
    assert float(loss) == 0 and hidden.grad is not None and shard.grad is not None
    assert not hidden.grad.any() and not shard.grad.any()


def bf16_and_inductor() -> None:
    """Compiles with torch's default compiler, in bf16, through a compiled layer before the loss."""
    layer = Layer(torch.bfloat16)
    mix = torch.eye(HIDDEN, dtype=torch.bfloat16)

    def step(hidden: Tensor, weight: Tensor, **parallel: Any) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy(F.silu(hidden @ mix), weight, layer.target, **parallel)
        return loss

    whole_hidden, whole = leaf(layer.hidden), leaf(layer.weight)
    expected = step(whole_hidden, whole)
    expected.backward()
    hidden, shard = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = torch.compile(step, fullgraph=True)(hidden, shard, process_group=layer.group)
    loss.backward()
    close(loss, expected, torch.bfloat16)
    close(hidden.grad, whole_hidden.grad, torch.bfloat16)


def parallelized_module(in_graph: bool) -> None:
    """A head that torch's parallelize_module has sharded, through the loss for trainers, with an optimizer's step."""
    layer = Layer(even=200)
    head = nn.Linear(HIDDEN, layer.weight.shape[0], bias=False)
    with torch.no_grad():
        head.weight.copy_(layer.weight)
    whole = copy.deepcopy(head)
    head = parallelize_module(head, mesh(), ColwiseParallel())
    loss_fn, right = (
        flce.LinearCrossEntropyLoss(head, process_group=mesh().get_group(), shift=0),
        flce.LinearCrossEntropyLoss(whole, shift=0),
    )
    function = torch.compile(loss_fn.__call__, backend="aot_eager") if in_graph else loss_fn
    mine, theirs = torch.optim.SGD(head.parameters(), lr=0.5), torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(3):
        loss, expected = function(layer.hidden, layer.target), right(layer.hidden, layer.target)
        close(loss, expected)
        loss.backward()
        expected.backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    full = head.weight.full_tensor()  # type: ignore[operator]
    close(full, whole.weight)


CASES: list[tuple[Any, ...]] = [
    *((placements, kind, flag) for kind in ("plain", "replicated", "sharded") for flag in (False, True)),
    (batches_of_sequences,),
    (refused_placements,),
    *((tied, flag, masked) for flag in (False, True) for masked in (0.0, 0.4)),
    (dynamic_number_of_tokens,),
    (masked_by_weight,),
    (shifted_labels_in_the_graph,),
    (several_outputs_in_the_graph,),
    (checkpointed_in_the_graph,),
    (everything_ignored_in_the_graph,),
    (bf16_and_inductor,),
    *((parallelized_module, flag) for flag in (False, True)),
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
