"""Two ranks, under torchrun: torchtitan's own Trainer, trained with its own ChunkedLossWrapper and with flce's, under FSDP2,
tensor parallel and pipelines; and its model with tensor parallel of spmd_types, by hand. Exits with a failed assertion, or 0; rank 0 prints
how many cases passed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import titan_support
import torch
import torch.distributed as dist
from rank_support import default_device, generator, run_main
from titan_support import BATCH, SEQUENCE, VOCAB, Run, calls_of_flce, compare, tiny, whole, with_its_own_loss
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flce


def configured(settings: dict[str, Any], model: dict[str, Any]) -> Any:
    config = tiny(**model)
    for path, value in settings.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    return config


def trained(*, layers: int = 2, tied: bool = False, calls: int = 3, unchunked: bool = False, **settings: Any) -> None:
    """Runs the same steps with both losses. torchtitan's default backend, spmd_types, takes no FSDP2 of several ranks with torch 2.13.
    `unchunked`: the reference is torchtitan's loss of whole logits."""
    from torchtitan.components.loss import CrossEntropyLoss

    settings = {name.replace("__", "."): value for name, value in settings.items()} | {"parallelism.spmd_backend": "partial_dtensor"}
    model = {"layers": layers, "tied": tied}
    config = configured(settings, model)
    config = with_its_own_loss(config)
    if unchunked:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    own = Run(config)
    config = configured(settings, model)
    config.override.imports = ["flce.torchtitan.fused_loss"]
    with calls_of_flce() as made:
        fused = Run(config)
    last = fused.trainer.loss_fn.lm_head is not None
    assert len(made) == (calls if last else 0), made
    compare(own, fused)


def parallel_model(config: Any, backend: str) -> tuple[Any, Any]:
    """torchtitan's model with random weights that lie over two tensor-parallel ranks, up to its hidden states."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend=backend)
    dims.build_mesh()
    set_spmd_backend(backend)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    torch.manual_seed(3)
    model = model_config.build()
    with torch.no_grad():
        for module in model.modules():
            module._init_self_buffers(buffer_device=None)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.parallelize(dims)
    model._skip_lm_head = True
    return dims, model


def spmd_types(*, sequence_parallel: bool, typechecking: bool = False, backend: str = "spmd_types", depths: bool = False) -> None:
    """Weights as plain tensors, which the Trainer of this torch cannot shard: its model, made parallel, and both losses. `depths`: the
    loss of two hidden states, beside torchtitan's of whole logits, which lie over the ranks."""
    import spmd_types as spmd
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context

    config = configured({"parallelism.tensor_parallel_degree": 2, "parallelism.enable_sequence_parallel": sequence_parallel}, {})
    dims, model = parallel_model(config, backend)
    inputs, labels = next(iter(titan_support._parts().Tokens(None, dp_rank=0, seq_len=SEQUENCE, local_batch_size=BATCH)))
    inputs, labels = {name: tensor.to(default_device()) for name, tensor in inputs.items()}, labels.to(default_device())
    count = (labels != -100).sum()
    if typechecking:
        annotate_input_spmd_types(dims, inputs["input"], labels, {"positions": inputs["positions"]})
    context = get_spmd_context(parallel_dims=dims, spmd_typechecking=typechecking)
    results = []
    if depths:
        losses: Any = (WholeDepths(model), flce.torchtitan.fused_loss(titan_support.loss_of_depths().Config(mtp_scale=0.3)).build())
    else:
        losses = (config.loss.build(), flce.torchtitan.fused_loss(config.loss).build())
    for loss in losses:
        loss.set_lm_head(model.lm_head)
        if backend == "spmd_types":
            assert model.lm_head.weight.shape[0] == VOCAB // 2 and type(model.lm_head.weight) is torch.nn.Parameter
        model.zero_grad()
        with context(), calls_of_flce() as made:
            hidden = model(inputs["input"], positions=inputs["positions"])
            assert isinstance(hidden, DTensor) == (backend == "partial_dtensor")
            if depths:
                hidden = (hidden, hidden.square())
            value, metrics = loss(hidden, (labels, flce.shift_labels(labels, 1)) if depths else labels, count)
            with spmd.no_typecheck():
                value.backward()
        results.append((value.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}))
        assert metrics == {} and len(made) == len(results) - 1
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    for name, right in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], right, rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    if depths:
        return
    with torch.no_grad(), context():
        hidden = model(inputs["input"], positions=inputs["positions"])
    try:
        loss(hidden, labels, count)  # outside of what says who the ranks are
    except flce.PlacementError as error:
        assert "255 of 510 rows" in str(error), error
    else:
        raise AssertionError("this rank's rows were taken for the whole layer")


class WholeDepths:
    """The loss of two hidden states from torchtitan's own loss of whole logits."""

    def __init__(self, model: Any) -> None:
        from torchtitan.components.loss import CrossEntropyLoss

        self.head, self.loss = model.lm_head, CrossEntropyLoss.Config(global_vocab_size=VOCAB).build()

    def set_lm_head(self, head: Any) -> None:
        assert head is self.head

    def __call__(self, hidden: Any, labels: Any, count: Any) -> Any:
        flat = [(self.head(states), targets) for states, targets in zip(hidden, labels, strict=True)]
        sums = [self.loss(logits, targets, count)[0] for logits, targets in flat]
        return sums[0] + 0.3 * sums[1], {}


def unit_of_its_own(*, depths: bool = False) -> None:
    """An output layer that FSDP2 shards by itself, and resharding before its backward: two steps, a validation between them. `depths`: of
    two hidden states."""
    torch.manual_seed(2)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16))
    model.lm_head = torch.nn.Linear(16, VOCAB, bias=False)
    right = copy.deepcopy(model)
    model.forward = model[0].forward  # up to the output layer
    fully_shard(model.lm_head, reshard_after_forward=True)
    fully_shard(model)
    for module in (model, model.lm_head):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    hidden = torch.randn(4, 6, 16, generator=generator(3))
    labels = torch.randint(0, VOCAB, (4, 6), generator=generator(4))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    config = flce.torchtitan.FusedLoss.Config()
    if depths:
        config.loss_fn = titan_support.loss_of_depths().Config(mtp_scale=0.3)
    loss = config.build()
    loss.set_lm_head(model.lm_head)
    once = right[0](hidden)
    expected = torch.nn.functional.cross_entropy(right.lm_head(once).flatten(0, 1), labels.flatten())
    if depths:
        expected = expected + 0.3 * torch.nn.functional.cross_entropy(right.lm_head(once.square()).flatten(0, 1), labels.flatten())
    expected.backward()

    def loss_here() -> torch.Tensor:
        states, targets = model(hidden[mine]), labels[mine]
        made: torch.Tensor = loss(*(((states, states.square()), (targets, targets)) if depths else (states, targets)), torch.tensor(24))[0]
        return made

    for _ in range(2):
        model.zero_grad()
        value = loss_here()
        value.backward()
        total = value.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach())
        for got, parameter in zip(model.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), parameter.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            seen = loss_here()
        torch.testing.assert_close(seen, value.detach())
        assert hasattr(model.lm_head.weight, "full_tensor")  # sharded again
        model.reshard()  # undoes FSDP2's gathering of a root that no backward follows


DATA = {"parallelism__data_parallel_shard_degree": 2}
TENSOR = {"parallelism__tensor_parallel_degree": 2}
STAGES = {"parallelism__pipeline_parallel_degree": 2}
CASES: list[tuple[Any, ...]] = [  # a first step of a schedule calls the loss once more, to learn the gradient's shape
    (trained, DATA),
    (trained, DATA | {"parallelism__fsdp_reshard_after_forward": "always", "tied": True}),
    (trained, TENSOR),
    (trained, TENSOR | {"parallelism__enable_sequence_parallel": False}),
    (trained, STAGES | {"layers": 4, "calls": 13}),
    (trained, STAGES | {"parallelism__pipeline_parallel_schedule": "GPipe", "layers": 4, "calls": 13}),
    # torchtitan's ChunkedLossWrapper leaves the last norm without a gradient there (torch 2.13), and flce does not.
    (trained, STAGES | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble", "layers": 6, "calls": 13, "unchunked": True}),
    (unit_of_its_own,),
    (spmd_types, {"sequence_parallel": True}),
    (spmd_types, {"sequence_parallel": False}),
    (spmd_types, {"sequence_parallel": True, "typechecking": True}),
    (unit_of_its_own, {"depths": True}),
    (spmd_types, {"sequence_parallel": True, "depths": True}),
    (spmd_types, {"sequence_parallel": True, "depths": True, "backend": "partial_dtensor"}),
]


def run(function: Callable[..., None], settings: dict[str, Any] | None = None) -> None:
    try:
        function(**(settings or {}))
    except BaseException:
        print(f"failed: {function.__name__}({settings})", flush=True)
        raise


def prepare() -> None:
    torch.autograd.set_multithreading_enabled(False)  # torchtitan's own start of the ranks does this
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    titan_support.prepare()
    # 20 s of a core, once and not by each rank. The thread that pyarrow starts here is jemalloc's, which is made for forks.
    import torchtitan.trainer  # noqa: F401

    run_main(run, lambda: CASES, prepare=prepare)
