"""torchtune's `LinearCrossEntropyLoss` on flce's kernels."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flce import errors, functional
from flce.call import _heads
from flce.call._checks import is_dtensor
from flce.core._once import say_once

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(nn.Module):
    """The mean cross entropy of a model's output layer on outputs [B, S, D] against targets [B, S], which are aligned already.

    Args:
        num_output_chunks: into how many parts tokens are divided where the output layer is called as a module (see `forward`); kernels need
            none.
        tp_enabled: the output layer's weight is a DTensor whose rows lie over ranks (`patch_tp_plan`). It may also be set later.
        mask_ignored_tokens: taken, and changes nothing: ignored rows have no loss either way, and on a GPU cost nothing.
    """

    def __init__(
        self, num_output_chunks: int = 8, ignore_index: int = -100, tp_enabled: bool = False, mask_ignored_tokens: bool = True
    ) -> None:
        super().__init__()
        self.linear_projection: Any = None
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.tp_enabled = tp_enabled
        self.mask_ignored_tokens = mask_ignored_tokens
        self._model: weakref.ref[Any] | None = None

    def set_model_output(self, model: Any) -> None:
        """Has `model` return hidden states, and takes its output layer. Like torchtune's, this loss then lists that layer among its
        submodules."""
        model.skip_output_layer = True
        self.linear_projection = model.output
        self._model = weakref.ref(model)

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> LinearCrossEntropyLoss:
        """Compiles nothing: the kernels are compiled."""
        return self

    def patch_tp_plan(self, tp_plan: dict[str, Any]) -> dict[str, Any]:
        """`tp_plan` with the output layer divided by columns, for a sequence-sharded input."""
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel

        key = next((key for key in ("output", "decoder.output") if key in tp_plan), None)
        if key is None:
            raise KeyError(f"tp_plan has the keys {sorted(tp_plan)}; it must have 'output' or 'decoder.output'")
        tp_plan[key] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        return tp_plan

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        return True

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of valid tokens' losses over their number, fp32; 0, with gradients of 0, where there is none.

        The output layer's weight and bias are read now. A layer that is more than a product (hooks, LoRA layers of torchtune) is called as
        it is, for 1 / num_output_chunks of the tokens at a time.

        With tp_enabled outputs are a DTensor over the mesh of the output layer's weight, or a plain tensor, whole or this rank's part of
        the sequence; targets are whole. The loss is the same on every rank.
        """
        projection = self._projection()
        over_ranks: dict[str, Any] = {}
        if self.tp_enabled:
            outputs, over_ranks = _over_ranks(projection, outputs, targets)
        else:
            _refuse_dtensors(projection, outputs)
        operands = _operands(projection, outputs)
        if operands is None:
            return self._through_module(projection, outputs, targets, **over_ranks)
        hidden, weight, bias = operands
        loss: Tensor = functional.linear_cross_entropy(hidden, weight, targets, bias=bias, ignore_index=self.ignore_index, **over_ranks)
        return loss

    def _projection(self) -> Any:
        model = None if self._model is None else self._model()
        if model is not None and model.output is not self.linear_projection:
            self.linear_projection = model.output
        if self.linear_projection is None:
            raise AttributeError("the loss has no output layer; call set_model_output(model) before the first forward")
        return self.linear_projection

    def _through_module(
        self, projection: Any, outputs: Tensor, targets: Tensor, process_group: Any = None, sequence_parallel: bool = False
    ) -> Tensor:
        """`process_group`: the mesh of the output layer, whose logits may then be a DTensor."""
        if process_group is None:
            hidden, labels, divided = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), 0
        else:  # the layer's own hooks expect sequences
            hidden, labels, divided = _replicated(outputs, process_group, sequence_parallel), targets, targets.dim() - 1

        def chunk_loss(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = projection(hidden)
            if process_group is not None:
                logits = _whole_logits(logits, projection)
            return nn.functional.cross_entropy(
                logits.float().flatten(0, -2), labels.flatten(), ignore_index=self.ignore_index, reduction="sum"
            )

        chunks = min(max(self.num_output_chunks, 1), max(hidden.shape[divided], 1))
        parts = zip(hidden.tensor_split(chunks, divided), labels.tensor_split(chunks, divided), strict=True)
        losses = [checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / (labels != self.ignore_index).sum().clamp(min=1)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own output layer and is of no model."""
        return {**self.__dict__, "_model": None}


def _operands(projection: Any, hidden: Tensor) -> _heads.Operands | None:
    """The factors that the output layer multiplies; None where only calling it tells."""
    if _is_tied(projection):
        return _heads.Operands(hidden, projection.tied_module.weight, None)
    if not issubclass(type(projection), nn.Module):
        return None
    base: Any = projection.get_base_layer() if _heads._is_adapter(projection) else projection
    hooked = any(not _is_of_colwise(hook) for _, hook in _heads.hooks_of(projection))
    if hooked or _heads.why_weight_is_made(projection) or type(base).forward is not nn.Linear.forward or "forward" in vars(projection):
        about = f"LinearCrossEntropyLoss: the output layer {type(projection).__qualname__}"
        why = "has hooks" if hooked else "is more than a linear layer"
        say_once(f"{about} {why}; it is called as it is and makes logits, a part at a time", about)
        return None
    return _heads.operands(projection, hidden)


def _is_tied(projection: Any) -> bool:
    return type(projection).__name__ == "TiedLinear" and isinstance(getattr(projection, "tied_module", None), nn.Module)


def _is_of_colwise(hook: Any) -> bool:
    """Whether ColwiseParallel has put this hook on the layer: it changes how inputs and outputs lie over ranks, and no value."""
    cells = getattr(hook, "__closure__", None) or ()
    if getattr(hook, "__module__", "") != "torch.distributed.tensor._api" or not cells:
        return False
    from torch.distributed.tensor.parallel import ColwiseParallel

    own = (ColwiseParallel._prepare_input_fn, ColwiseParallel._prepare_output_fn)
    inner = [cell.cell_contents.func for cell in cells if isinstance(cell.cell_contents, functools.partial)]
    return len(inner) == 1 and inner[0] in own


# ── An output layer whose rows lie over ranks ───────


def _weight_of(projection: Any) -> Any:
    """Weight of the layer; None where it has none of its own."""
    return projection.tied_module.weight if _is_tied(projection) else _heads.weight_of(projection)


def _refuse_dtensors(projection: Any, outputs: Tensor) -> None:
    for name, tensor in (("outputs", outputs), ("the output layer's weight", _weight_of(projection))):
        if is_dtensor(tensor):
            raise errors.PlacementError(
                f"{name} is a DTensor and tp_enabled is False; it must be True where the vocabulary lies over ranks"
            )


def _over_ranks(projection: Any, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """outputs as flce takes them, and what it has to be told of ranks."""
    weight = _weight_of(projection)
    if not is_dtensor(weight):
        kind = "has no weight" if weight is None else f"has a {type(weight).__name__} as its weight"
        raise errors.PlacementError(
            f"tp_enabled is True and the output layer, a {type(projection).__name__}, {kind}; it must be a DTensor with Shard(0), as "
            "parallelize_module makes it of the plan that patch_tp_plan returns"
        )
    if _heads._is_adapter(projection):
        raise errors.PlacementError(
            "tp_enabled is True and the output layer carries an adapter of peft; leave the output layer out of the adapter's target_modules"
        )
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise errors.PlacementError(
            f"the output layer's weight is a DTensor over a mesh of {mesh.ndim} dimensions; it must lie over the tensor-parallel ranks "
            "alone: unshard what FSDP has sharded"
        )
    sequence = outputs.shape[:-1] != targets.shape
    if is_dtensor(outputs):
        if outputs.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            raise errors.PlacementError("outputs is a DTensor over a mesh of several dimensions; it must lie over the output layer's")
        placement = outputs.placements[0]  # type: ignore[attr-defined]
        dimension = placement.dim if placement.is_shard() else -1
        sequence = 0 <= dimension < targets.dim() and targets.shape[dimension] % mesh.size() == 0
        if not sequence:
            outputs = _replicated(outputs, mesh, False)
    return outputs, {"process_group": mesh, "sequence_parallel": sequence}


def _replicated(outputs: Tensor, mesh: Any, sequence: bool) -> Tensor:
    """Whole on every rank, as a DTensor. `sequence`: a plain tensor is this rank's part of the next to last dimension."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(outputs, DTensor):
        outputs = DTensor.from_local(outputs, mesh, [Shard(outputs.dim() - 2) if sequence else Replicate()])
    return outputs.redistribute(placements=[Replicate()])


def _whole_logits(logits: Any, projection: Any) -> Tensor:
    whole: Tensor = logits.full_tensor() if is_dtensor(logits) else logits
    classes = _weight_of(projection).shape[0]
    if whole.shape[-1] != classes:
        raise errors.PlacementError(
            f"the output layer, a {type(projection).__name__}, returns {whole.shape[-1]} of {classes} classes; it must return a DTensor: "
            "ColwiseParallel(..., use_local_output=False)"
        )
    return whole
