"""`linear_topk`: the most likely classes of every token, without the logits in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce import errors
from flce.call import _formats, _heads, _spec_text
from flce.call._arguments import check_inputs, check_temperature, refuse_dtensor, refuse_tangent
from flce.call._checks import DTYPES, HIDDEN_MULTIPLE
from flce.call._targets import check_tensors
from flce.core import _autograd, checks
from flce.core._frame import is_hidden_major
from flce.operators import _codes, _topk
from flce.parallel import _parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MOST_TOP_K = 256


class TopK(NamedTuple):
    """Results of `linear_topk`."""

    logprobs: Tensor
    ids: Tensor
    lse: Tensor


def linear_topk(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    k: int,
    *,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: Tensor | float | None = None,
    batch_invariant: bool = False,
    process_group: ProcessGroup | DeviceMesh | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    workspace_limit_bytes: Any = None,
    weight_scale: Tensor | None = None,
    weight_tensor_scale: Tensor | float | None = None,
) -> TopK:
    """The k classes of the largest logits of every token and their log-probabilities under the softmax of softcap(logit_scale · (hidden ·
    weightᵀ + bias)) / temperature over the whole vocabulary, without the logits in memory. No gradient: a teacher's side of
    `linear_topk_distillation`.

    Args:
        hidden: [..., D], as in `linear_cross_entropy`. On a GPU kernels need cuBLASLt, which torch brings.
        weight: [V, D] of hidden's dtype, or a plain torch.nn.Linear, as there.
        k: 1 to 256, and no more than V.
        bias, logit_scale, softcap: as there. temperature: a number, 2^-100 to 2^100, or [...] fp32. A token whose temperature is out of
            this range has log-probabilities and lse of 0 and ids of -1, and `check_labels` reports it.
        batch_invariant: a token's results have the same bits in whichever batch it is; on a CPU, a PlanError elsewhere.
        process_group, vocab_start, vocab_size: as there, for a vocabulary that lies over ranks: weight and bias are this rank's part, plain
            tensors; results are the same bits on every rank.
        workspace_limit_bytes: the most memory beyond inputs and results. None: 64 MiB. A D that is no multiple of 8 costs a copy of the
            weight beside it.
        weight_scale, weight_tensor_scale: as there, for a weight of codes; on a CPU, a PlanError elsewhere.

    Returns:
        TopK(logprobs [..., k] fp32, ids [..., k] int64, lse [...] fp32): the largest logit first, of equal logits the smaller class. A
        token with a NaN among its logits has NaN log-probabilities.

    Raises:
        As `linear_cross_entropy`.
    """
    if _autograd.transforms is not None and not torch.compiler.is_compiling() and _autograd.transforms() is not None:
        raise errors.UnsupportedTransformError("flce.linear_topk is called under a transform of torch.func, which it does not have")
    read, bias = _heads.of_linear(weight, bias, reads_codes=True) if isinstance(weight, nn.Module) else (weight, bias)
    codes = _formats.codes_of(read, weight_scale, weight_tensor_scale)
    k = int(checks.integer("k", k, 1))
    asked = _parallel.asked(process_group=process_group, vocab_start=vocab_start, vocab_size=vocab_size)
    beside = {"bias": bias, **({"temperature": temperature} if isinstance(temperature, Tensor) else {})}
    if codes is not None:
        _codes.check_plain(hidden, codes, beside, over_ranks=asked is not None)
        hidden, _, bias = _autocast(hidden, codes.weight, bias)
        layer = _Layer(*_codes.as_kernels_read(hidden, *codes[:3]))
        seen = hidden.new_empty(1).expand(layer.weight.shape[0], hidden.shape[-1])  # the dequantised weight, as checks see it
    else:
        _check_plain(hidden, read, beside, over_ranks=asked is not None)
        hidden, seen, bias = _autocast(hidden, read, bias)
        layer = _Layer(seen, None, None)
    tokens = hidden.shape[:-1]
    target = torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    for name, given in {"weight": seen, "bias": bias}.items():
        if given is not None and given.dtype is not hidden.dtype and hidden.dtype in DTYPES:
            how = _formats.WITH_SCALES if _formats.are_codes(given.dtype) else f"convert it with {name}.to({hidden.dtype})"
            raise errors.DTypeError(f"{name} has dtype {given.dtype}; it must be hidden's: {how}")
    check_inputs(hidden, seen, target, {"bias": bias})
    if seen.shape[1] == 0:
        raise errors.ShapeError(f"weight has shape {list(seen.shape)}; its hidden_size must be 1 or more")
    if k > MOST_TOP_K or (asked is None and k > seen.shape[0]):
        classes = "all ranks' classes" if asked is not None else f"the {seen.shape[0]} classes"
        raise errors.ArgumentError(f"k is {k}; it must be from 1 to {MOST_TOP_K}, and no more than {classes}")
    options = _spec_text.spec_text(("lse",), logit_scale=logit_scale, softcap=softcap, batch_invariant=batch_invariant)
    with torch.no_grad():
        rows, layer = _padded(hidden, layer)
        logprobs, ids, lse = _topk.run(
            rows,
            *layer,
            target.reshape(-1),
            bias,
            _temperatures(temperature, target),
            f"{options},top_k={k}",
            k,
            _spec_text.workspace_limit(workspace_limit_bytes),
            "" if asked is None else asked.text(),
        )
    return TopK(logprobs.view(*tokens, k), ids.view(*tokens, k), lse.view(tokens))


class _Layer(NamedTuple):
    """A weight as the operator takes it."""

    weight: Tensor
    weight_scale: Tensor | None
    weight_tensor_scale: Tensor | None


def _check_plain(hidden: Tensor, weight: Any, others: dict[str, Any], *, over_ranks: bool) -> None:
    check_tensors(hidden=hidden, weight=weight, **others)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor is None:
            raise errors.DTypeError(f"{name} is None; it must be a tensor")
        refuse_tangent(name, tensor)
    for name, given in {"hidden": hidden, "weight": weight, **others}.items():
        refuse_dtensor(name, given, over_ranks=over_ranks)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device_type = hidden.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    hidden, weight = (each.to(dtype) if each.dtype in DTYPES else each for each in (hidden, weight))
    return hidden, weight, bias.to(dtype) if bias is not None and bias.dtype in DTYPES else bias


def _padded(hidden: Tensor, layer: _Layer) -> tuple[Tensor, _Layer]:
    """[N, D] and [V, D], with zeros up to a multiple of eight columns."""
    hidden = hidden.detach().reshape(-1, hidden.shape[-1])
    weight = layer.weight.detach()
    missing = -hidden.shape[1] % HIDDEN_MULTIPLE
    if not missing or layer.weight_scale is not None:
        return hidden, layer._replace(weight=weight)
    wide = F.pad(weight.t(), (0, 0, 0, missing)).t() if is_hidden_major(weight) else F.pad(weight, (0, missing))
    return F.pad(hidden, (0, missing)), layer._replace(weight=wide)


def _temperatures(given: Tensor | float | None, target: Tensor) -> Tensor | None:
    """[N] fp32."""
    if given is None:
        return None
    if isinstance(given, Tensor):
        if given.shape != target.shape:
            raise errors.ShapeError(
                f"temperature has shape {list(given.shape)}; it must be hidden's without the last, {list(target.shape)}"
            )
        check_temperature(given, target)
        return given.reshape(-1)
    number = _spec_text.number("temperature", given)
    if not checks.LEAST_TEMPERATURE <= number <= checks.MOST_TEMPERATURE:
        raise errors.ArgumentError(f"temperature is {given}; it must be from 2^-100 to 2^100")
    return None if number == 1 else torch.full((target.numel(),), number, dtype=torch.float32, device=target.device)
