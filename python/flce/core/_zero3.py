"""Parameters that DeepSpeed's ZeRO-3 divides over ranks: whole while their module's own forward or backward runs. At other times they have
no elements, or memory of the whole shape that a gathering is still filling, which nothing but their status shows. DeepSpeed is not
imported."""

from __future__ import annotations

from typing import Any

import torch

from flce import errors

_INSTEAD = (
    "Compute the loss in the output layer's own forward, for which ZeRO-3 gathers it: flce.patch(model) for a model of transformers, or a "
    "flce.FusedLMHead in the layer's place, called as head(hidden, labels=...). Or have the call and its backward inside "
    "`with deepspeed.zero.GatheredParameters([layer.weight]):`, the bias in the list as well"
)

OF_ADAPTER = (
    "ZeRO-3 gathers the layers of an adapter one by one, and the loss reads them together: leave the output layer out of the "
    "adapter's target_modules (modules_to_save may name it), or keep the model's own loss"
)


def is_divided(tensor: Any) -> bool:
    """Whether ZeRO-3 has the parameter, gathered now or not."""
    return hasattr(tensor, "ds_status")


def whole_shape(tensor: Any) -> torch.Size:
    """The shape of the parameter when it is gathered."""
    shape: torch.Size = tensor.ds_shape if is_divided(tensor) else tensor.shape
    return shape


def refuse_ungathered(name: str, tensor: Any, when: str = "", instead: str = _INSTEAD) -> None:
    """Raises PlacementError for a parameter of ZeRO-3 whose memory is not, or not yet, its whole; `instead` says what to do."""
    if torch.compiler.is_compiling() or not is_divided(tensor):
        return
    status = getattr(tensor.ds_status, "name", str(tensor.ds_status))
    if status != "AVAILABLE":
        raise errors.PlacementError(
            f"{name} is a parameter {list(whole_shape(tensor))} that DeepSpeed's ZeRO-3 has divided over ranks, and it is not gathered "
            f"here (ds_status {status}){when}. {instead}"
        )


def refuse_gradient_memory(what: str, tensor: Any) -> None:
    """Raises ArgumentError where backward is to add a parameter's gradient to memory that ZeRO-3 never reduces."""
    if is_divided(tensor):
        raise errors.ArgumentError(
            f"{what} adds to weight.grad in the kernel, and DeepSpeed's ZeRO-3 has this weight: it takes gradients in hooks of autograd's, "
            "which do not run, so this one would be lost. Leave it at False"
        )
