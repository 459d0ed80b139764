"""The operator flce::linear_topk, which has no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flce.operators import _passes

_GIVEN = "Tensor hidden, Tensor weight, Tensor? weight_scale, Tensor? weight_tensor_scale, Tensor target, Tensor? bias, Tensor? temperature"
_SCHEMAS = {
    "linear_topk": f"({_GIVEN}, str options, int k, int workspace_limit_bytes, str parallel) -> (Tensor logprobs, Tensor ids, Tensor lse)"
}


def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, scale, tensor_scale, target, bias, temperature, options, k, workspace_limit_bytes, parallel = given
    of_tokens = {"target": target, "temperature": temperature}
    there = {"bias": bias is not None, "temperature": temperature is not None}
    place = _passes.place_of(parallel, hidden, weight, of_tokens, options, there)
    kernel = _passes.kernel_of(hidden, weight, options, workspace_limit_bytes, place, codes=_passes.codes_of(scale, tensor_scale), **there)
    num_tokens = hidden.shape[0]
    logprobs, lse = kernel.new_floats((num_tokens, k)), kernel.new_floats(num_tokens)
    ids = hidden.new_empty((num_tokens, k), dtype=torch.int64)
    layer = {"weight": weight, "weight_scale": scale, "weight_tensor_scale": tensor_scale, "bias": bias}
    read = _passes.as_read({"hidden": hidden, **layer, **of_tokens}, weight)
    _passes.forward(kernel, place, read, {"top_logprobs": logprobs, "top_ids": ids, "lse": lse})
    return logprobs, ids, lse


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, k = given[0], given[8]
    shape = (hidden.shape[0], k)
    return (
        hidden.new_empty(shape, dtype=torch.float32),
        hidden.new_empty(shape, dtype=torch.int64),
        hidden.new_empty(hidden.shape[0], dtype=torch.float32),
    )


_passes.define(_SCHEMAS, __name__, {"linear_topk": "_forward"})
run: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.flce.linear_topk.default
