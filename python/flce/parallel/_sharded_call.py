"""A call whose weight is a shard: DTensors become the parts that this rank has, a sharded dimension of hidden comes first, and the call
goes the way of every other."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call import _call
from flce.call._checks import is_dtensor
from flce.call._targets import check_tensors
from flce.core import _kernels
from flce.core._frame import PLAIN_TYPES, CallOptions, Parallel
from flce.core._kernel_key import OF_CLASSES
from flce.parallel import _direct_shard, _shards

_kernels.find_shard = _shards.find_for
_call.direct_shard = _direct_shard.DirectShard
_OF_CLASSES = (*OF_CLASSES, "class_group", "grad_weight_out")


def run(
    parallel: Parallel,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: CallOptions,
    *,
    num_valid_tokens: Tensor | float | None = None,
    **given: Any,
) -> Any:
    """Runs `_call.run` for a layer over ranks, with its other tensors: those of _OF_CLASSES lie over ranks as the weight does, all others
    have a number for every token."""
    if _is_plain(hidden, weight, target, given) and num_valid_tokens is None and not parallel.sequence:
        return _call.run(hidden, weight, target, over_ranks(options, parallel), **given)
    check_tensors(hidden=hidden, weight=weight, target=target)
    hidden, dimension = _local_hidden(hidden, target, parallel)
    if is_dtensor(weight):
        parallel = parallel._replace(all_rows=weight.shape[0])
    classes = {name: given.pop(name) for name in _OF_CLASSES if name in given}
    of_tokens = local_rows(parallel, target=target, **given)
    if dimension:
        hidden = hidden.movedim(dimension, 0)
        of_tokens = {name: row.movedim(dimension, 0) if isinstance(row, Tensor) else row for name, row in of_tokens.items()}
    made: Any = _call.run(
        hidden,
        _local_shard("weight", weight, parallel),
        options=over_ranks(options, parallel),
        num_valid_tokens=num_valid_tokens,
        **{name: _local_shard(name, tensor, parallel) for name, tensor in classes.items() if tensor is not None},
        **of_tokens,
    )
    if not dimension:
        return made
    outputs = [output.movedim(0, dimension) if output.dim() else output for output in (made if isinstance(made, tuple) else (made,))]
    return tuple(outputs) if isinstance(made, tuple) else outputs[0]


def _is_plain(hidden: Tensor, weight: Tensor, target: Tensor, given: dict[str, Any]) -> bool:
    """Whether a call has plain tensors alone, none of which lies over ranks in a way of its own."""
    plain = type(hidden) in PLAIN_TYPES and type(weight) in PLAIN_TYPES and type(target) in PLAIN_TYPES
    return plain and all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in given.values())


def over_ranks(options: CallOptions, parallel: Parallel) -> CallOptions:
    """The options of a call with its `Parallel`, the same object for the same two."""
    return _with_parallel(options, parallel) if not torch.compiler.is_compiling() else replace(options, parallel=parallel)


@functools.lru_cache(maxsize=1024)
def _with_parallel(options: CallOptions, parallel: Parallel) -> CallOptions:
    return replace(options, parallel=parallel)


def local_rows(parallel: Parallel, **given: Any) -> dict[str, Any]:
    """Tensors that every rank has for all tokens, by name, as plain tensors."""
    return {name: _local_whole(name, tensor, parallel) for name, tensor in given.items()}


def _local_hidden(hidden: Tensor, target: Tensor, parallel: Parallel) -> tuple[Tensor, int]:
    """This rank's hidden states, and the dimension of which they are a part with sequence parallel."""
    if not is_dtensor(hidden):
        return hidden, _sequence_dimension(hidden, target, parallel)
    placements = hidden.placements  # type: ignore[attr-defined]
    of_group = _mesh_dimension("hidden", hidden, parallel)
    placement = placements[of_group]
    if placement.is_shard() and not parallel.sequence:
        raise errors.PlacementError(
            f"hidden is a DTensor with placements {list(placements)}; pass sequence_parallel=True for tokens that lie over the ranks of "
            "process_group"
        )
    if parallel.sequence and not placement.is_shard():
        raise errors.PlacementError(
            f"hidden is a DTensor with placements {list(placements)} and sequence_parallel is True; over the ranks of process_group it "
            "must be Shard of a dimension of tokens"
        )
    if placement.is_partial():
        raise errors.PlacementError("hidden is a DTensor with a Partial placement; redistribute it to Replicate or Shard first")
    of_gradient = placements
    if not parallel.reduce_grad_hidden:
        from torch.distributed.tensor import Partial

        of_gradient = [Partial() if i == of_group else each for i, each in enumerate(placements)]
    local: Tensor = hidden.to_local(grad_placements=of_gradient)  # type: ignore[attr-defined]
    if not parallel.sequence:
        return local, 0
    dimension = int(placement.dim) % hidden.dim()
    if dimension == hidden.dim() - 1:
        raise errors.PlacementError(f"hidden is a DTensor with placements {list(placements)}: its hidden_size may not be sharded")
    return local, dimension


def _sequence_dimension(hidden: Tensor, target: Tensor, parallel: Parallel) -> int:
    """The dimension of target of which hidden has this rank's part."""
    tokens = hidden.shape[:-1]
    if not parallel.sequence or parallel.ranks == 1 or len(tokens) != target.dim():
        return 0
    for dimension, (mine, all_of_them) in enumerate(zip(tokens, target.shape, strict=True)):
        others = tokens[:dimension] + tokens[dimension + 1 :] == target.shape[:dimension] + target.shape[dimension + 1 :]
        if mine * parallel.ranks == all_of_them and others:
            return dimension
    return 0


def _local_shard(name: str, tensor: Tensor, parallel: Parallel) -> Any:
    """This rank's rows of what lies over the ranks of the process group."""
    if not is_dtensor(tensor):
        return tensor
    placements = tensor.placements  # type: ignore[attr-defined]
    placement = placements[_mesh_dimension(name, tensor, parallel)]
    others = [other for other in placements if other is not placement]
    if type(placement).__name__ != "Shard" or placement.dim != 0 or any(not other.is_replicate() for other in others):
        raise errors.PlacementError(
            f"{name} is a DTensor with placements {list(placements)}; over the ranks of process_group it must be Shard(0), and Replicate "
            "over all others (unshard what FSDP has sharded: run inside the module's forward)"
        )
    return tensor.to_local(grad_placements=placements)  # type: ignore[attr-defined]


def _local_whole(name: str, tensor: Any, parallel: Parallel) -> Any:
    """A tensor that every rank has whole, as a plain one."""
    if not isinstance(tensor, Tensor) or not is_dtensor(tensor):
        return tensor
    placements = tensor.placements  # type: ignore[attr-defined]
    if not placements[_mesh_dimension(name, tensor, parallel)].is_replicate():
        raise errors.PlacementError(
            f"{name} is a DTensor with placements {list(placements)}; over the ranks of process_group it must be Replicate: each "
            "has it for all tokens"
        )
    return tensor.to_local()  # type: ignore[attr-defined]


def _mesh_dimension(name: str, tensor: Any, parallel: Parallel) -> int:
    """The dimension of the DTensor's mesh whose ranks are the process group's."""
    mesh = tensor.device_mesh
    for dimension in range(mesh.ndim):
        if mesh.get_group(dimension).group_name == parallel.group:
            return dimension
    raise errors.PlacementError(
        f"{name} is a DTensor over {mesh}, none of whose dimensions is the process_group; give the group of the mesh that it lies over, "
        "such as mesh['tp'].get_group()"
    )
