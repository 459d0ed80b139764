"""The output layer of a Megatron model: its factors and options, the stand-in for its logits, and their loss."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flce import errors
from flce.adapters._methods import standing_in
from flce.call import _checks
from flce.call._checks import is_dtensor
from flce.call._heads import kind_of
from flce.call._options import check_options, taken_by
from flce.call._targets import check_ignore_index
from flce.core._once import say_once
from flce.functional import linear_cross_entropy

_OPTIONS = frozenset(taken_by("megatron"))
_OWN_FUSIONS = ("native", "te")  # config.cross_entropy_fusion_impl's cross entropies of logits, whose formula is flce's
_INSTEAD = "leave that out, or keep Megatron's own loss"


def core(module: str) -> Any:
    """A module of megatron.core. Imported when a model is at hand: it takes seconds, and need not be installed. Raises UnavailableError."""
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ModuleNotFoundError as error:
        raise errors.UnavailableError(f"flce.megatron needs megatron-core (tested with 0.16.1): {error}") from error


class Settings(NamedTuple):
    """A caller's choices for the loss."""

    options: dict[str, Any]  # options of flce.linear_cross_entropy
    main_grad: bool | None


def settings_of(main_grad: Any, options: Mapping[str, Any]) -> Settings:
    """Raises ArgumentError, DTypeError, SpecError."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise errors.ArgumentError(f"{unknown[0]} is not an option here; allowed are main_grad, {', '.join(sorted(_OPTIONS))}")
    check_options({name: value for name, value in options.items() if name in taken_by("losses")}, 0)
    check_ignore_index(options.get("ignore_index", -100))
    if main_grad is not None and not isinstance(main_grad, bool):
        raise errors.DTypeError(f"main_grad is {main_grad!r}; it must be True, False or None (as the layer's gradient_accumulation_fusion)")
    return Settings(dict(options), main_grad)


# ── Logits that are not made ────────────────────────


class UnmadeLogits:
    """Stands for logits [s, b, v] between an output layer and the loss. They can be scaled, and asked for the largest class once their loss
    is computed; any other use is an ArgumentError."""

    def __init__(self, layer: Any, hidden: Tensor, weight: Tensor, scale: float = 1.0) -> None:
        self.layer, self.hidden, self.weight, self.scale = layer, hidden, weight, scale
        self.top1: Tensor | None = None  # [s, b] int64, of the whole vocabulary
        self.vocab_start = 0

    def __mul__(self, factor: Any) -> UnmadeLogits:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise errors.ArgumentError(
                f"logits are multiplied by a {type(factor).__name__}; flce makes no logits, and scales by numbers alone"
            )
        return UnmadeLogits(self.layer, self.hidden, self.weight, self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> UnmadeLogits:
        return self * (1.0 / divisor if isinstance(divisor, (int, float)) else divisor)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """[s, b]: the class of the largest logit of the whole vocabulary."""
        if dim not in (-1, 2) or keepdim or self.top1 is None:
            raise errors.ArgumentError(
                f"argmax(dim={dim}, keepdim={keepdim}) of logits that flce does not make; it has that of the last dimension, for a depth "
                "of multi-token prediction, after the loss"
            )
        return self.top1

    def size(self, dim: int) -> int:
        if dim not in (-1, 2):
            raise errors.ArgumentError(f"size({dim}) of logits that flce does not make; it has that of the last dimension")
        return int(self.weight.shape[0])

    def max(self, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Enough to find the rank that has the largest logit, as Megatron does for an argmax over ranks: 1 and this rank's row of it where
        it is here, 0 and 0 elsewhere. The logit's own value is not known."""
        top1 = self.argmax(dim) - self.vocab_start
        here = (top1 >= 0) & (top1 < self.weight.shape[0])
        return here.float(), torch.where(here, top1, 0)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.argmax and args and isinstance(args[0], cls):
            return args[0].argmax(*args[1:], **(kwargs or {}))
        name = getattr(function, "__name__", repr(function))
        raise errors.ArgumentError(f"torch's {name} of logits that flce does not make: {_INSTEAD}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.ArgumentError(f".{name} of logits that flce does not make: {_INSTEAD}")


def defer(layer: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[UnmadeLogits, None]:
    """Stands for the forward of a ColumnParallelLinear."""
    if weight is None:
        weight = layer.weight
    check_weight(layer, weight)
    assert weight is not None
    gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
    if gathers and layer.tp_group.size() > 1:
        name = "parallel_output=False" if runtime_gather_output is None else f"runtime_gather_output={runtime_gather_output}"
        raise errors.ArgumentError(
            f"{name} gathers logits of all tensor-parallel ranks, and a loss is computed of this rank's; have parallel_output=True and "
            "leave runtime_gather_output out where labels are given"
        )
    return UnmadeLogits(layer, input_, weight), None


def call_deferring(layer: Any, hidden: Tensor, **keywords: Any) -> UnmadeLogits:
    """Calls the output layer as a module, so that the hooks before its forward run: DistributedDataParallel waits there for parameters that
    it gathers (overlap_param_gather)."""
    check_layer(layer)
    with standing_in(layer, "forward", types.MethodType(defer, layer)):
        logits, _ = layer(hidden, **keywords)
    made: UnmadeLogits = logits
    return made


class DeferringLayer:
    """The output layer, as a function of which a caller wants logits."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor, **keywords: Any) -> tuple[UnmadeLogits, None]:
        return call_deferring(self._layer, hidden, **keywords), None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


# ── What is understood ──────────────────────────────


def check_layer(layer: Any) -> None:
    """Raises ArgumentError where the layer computes something else than hidden · weightᵀ of this rank's rows, or is told something that
    this loss does not do."""
    known = core("tensor_parallel.layers").ColumnParallelLinear
    own = isinstance(layer, known) and all(getattr(type(layer), name) is getattr(known, name) for name in ("forward", "_forward_impl"))
    if not own:
        raise errors.ArgumentError(
            f"the output layer is a {kind_of(layer)}; it must be megatron.core's ColumnParallelLinear. Leave the output layer out of "
            "LoRA's and other adapters' and of quantisation's target modules"
        )
    replaced = layer.__dict__.get("forward")
    if replaced is not None and getattr(replaced, "__module__", None) not in (__name__, f"{__package__}._patch"):
        raise errors.ArgumentError(f"the output layer's forward is replaced by {replaced!r}: {_INSTEAD}")
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise errors.ArgumentError(
            "the output layer has hooks after its forward or in its backward, which expect logits (torch's FSDP2 shards parameters in "
            f"one): {_INSTEAD}"
        )
    if layer.bias is not None:
        raise errors.ArgumentError(
            f"the output layer has a bias (skip_bias_add={layer.skip_bias_add}); GPTModel's has none, and what becomes of this one is not "
            "known"
        )
    if layer.explicit_expert_comm:
        raise errors.ArgumentError("the output layer is an expert's (is_expert=True), whose collectives are another layer's")
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise errors.PlacementError(f"the output layer's weight is sharded among ranks (gtp_remat_size={layer.gtp_remat_size}): {_INSTEAD}")
    _check_config(layer.config)


def check_weight(layer: Any, weight: Any) -> None:
    """Raises ArgumentError, ShapeError, PlacementError where the weight is not this rank's rows, as numbers that kernels read."""
    if not isinstance(weight, Tensor):
        raise errors.ArgumentError(
            f"output_weight is {weight!r}, and the output layer has no weight of its own; pass the shared embedding's"
        )
    expected = (layer.output_size_per_partition, layer.input_size)
    if weight.shape != expected:
        raise errors.ShapeError(f"output_weight has shape {list(weight.shape)}; it must be {list(expected)}, this rank's rows of the layer")
    if is_dtensor(weight) or hasattr(weight, "__fsdp_param__"):
        raise errors.PlacementError(f"the output layer's weight is sharded by FSDP; {_INSTEAD}")
    if type(weight) not in (Tensor, nn.Parameter):
        raise errors.ArgumentError(
            f"the output layer's weight is a {type(weight).__name__}; it must be a plain tensor in fp32, bf16 or fp16, which fp8 and fp4 "
            "parameters are not"
        )


def _check_config(config: Any) -> None:
    if config.defer_embedding_wgrad_compute:
        raise errors.ArgumentError(
            "config.defer_embedding_wgrad_compute is True: it keeps the gradients of all micro-batches' logits for the end of a step, and "
            "here there are none. Set it to False"
        )
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl not in _OWN_FUSIONS:
        raise errors.ArgumentError(
            f"config.cross_entropy_fusion_impl is {config.cross_entropy_fusion_impl!r}, which is not known to be a cross entropy of "
            f"logits; allowed are {', '.join(map(repr, _OWN_FUSIONS))}, in whose place flce's is computed; or set "
            "cross_entropy_loss_fusion=False"
        )
    offloading = getattr(config, "_cpu_offloading_context", None)
    if offloading is not None and getattr(offloading, "inside_context", False) is True:
        raise errors.ArgumentError(
            "the output layer is inside Megatron's cpu_offloading of activations; have it end before the output layer"
        )


def check_hidden(hidden: Any, labels: Any, layer: Any) -> None:
    if not isinstance(labels, Tensor):
        raise errors.DTypeError(f"labels is a {type(labels).__name__}; it must be a tensor [batch, sequence]")
    ranks = layer.tp_group.size() if layer.sequence_parallel else 1
    if hidden.dim() != 3 or labels.dim() != 2 or (hidden.shape[1], hidden.shape[0] * ranks) != tuple(labels.shape):
        part = f", of which hidden_states has 1/{ranks} (sequence parallel)" if ranks > 1 else ""
        raise errors.ShapeError(
            f"labels has shape {list(labels.shape)} and hidden_states {list(hidden.shape)}; they must be [batch, sequence] and "
            f"[sequence, batch, hidden_size]{part}"
        )


# ── The loss ────────────────────────────────────────


def loss_of(
    logits: UnmadeLogits,
    labels: Tensor,
    settings: Settings,
    *,
    return_entropy: bool = False,
    return_top1: bool = False,
    weights: dict[int, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """(loss, …) [b, s] fp32: unreduced, as compute_language_model_loss gives it. labels [b, s], of the whole vocabulary. `weights`: of
    losses that share a weight and its main_grad, by the weight's id: autograd then gets one dummy for all of them."""
    layer, hidden, weight = logits.layer, logits.hidden, logits.weight
    check_hidden(hidden, labels, layer)
    given: dict[str, Any] = dict(settings.options)
    buffer = main_grad_for(layer, weight, hidden, settings.main_grad)
    if buffer is not None:
        known = {} if weights is None else weights
        if id(weight) not in known:
            known[id(weight)] = MainGrad.apply(weight)
        weight = known[id(weight)]
    group, logits.vocab_start = layer.tp_group, 0
    if group.size() > 1 or "vocab_size" in given:
        logits.vocab_start = group.rank() * weight.shape[0]
        given |= {"process_group": group, "vocab_start": logits.vocab_start, "sequence_parallel": layer.sequence_parallel}
        given["reduce_grad_hidden"] = layer.sequence_parallel or not layer.disable_grad_reduce
    elif "reduce_dtype" in given:
        del given["reduce_dtype"]  # one rank has the whole sum
    made = linear_cross_entropy(
        hidden,
        weight,
        labels.transpose(0, 1),
        reduction="none",
        logit_scale=None if logits.scale == 1.0 else logits.scale,
        return_entropy=return_entropy,
        return_top1=return_top1,
        grad_weight_out=buffer,
        **given,
    )
    outputs = list(made) if isinstance(made, tuple) else [made]
    if return_top1:
        logits.top1 = outputs[-1].contiguous()
    return tuple(output.transpose(0, 1).contiguous() for output in outputs)


class MainGrad(torch.autograd.Function):
    """The weight of a loss that adds its gradient to weight.main_grad by itself. Autograd gets a dummy of the weight's shape in its place,
    so that what waits for the weight's gradient (DistributedDataParallel's hooks, which start a bucket's reduction) runs, and
    weight.grad_added_to_main_grad tells it that there is nothing to add. Where the hook adds all the same (zero_out_wgrad: the embedding's
    gradient comes by the same way) the dummy is 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if gradient is not None or not hasattr(weight, "grad_added_to_main_grad"):
            return gradient  # autograd.grad() was asked for it, and nothing was added; or nobody waits
        weight.grad_added_to_main_grad = True
        make: Callable[..., Tensor] = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight, memory_format=torch.contiguous_format)


def main_grad_for(layer: Any, weight: Tensor, hidden: Tensor, choice: bool | None) -> Tensor | None:
    """The buffer that backward adds the weight's gradient to; None where autograd takes it."""
    wanted = layer.gradient_accumulation_fusion if choice is None else choice
    if not wanted or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        if choice:
            raise errors.ArgumentError(
                f"main_grad is True and the output layer's weight has {buffer!r} for main_grad; wrap the model in Megatron's "
                "DistributedDataParallel before the first step, which sets it, or leave main_grad out"
            )
        return None
    try:
        _checks.check_grad_weight_out(buffer, hidden, weight)
    except errors.ArgumentError as error:
        if choice:
            raise
        say_once(f"flce.megatron: the output layer's gradient goes through autograd, not to main_grad directly: {error}")
        return None
    return buffer
