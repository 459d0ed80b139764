"""Output layers: what a module that stands for one multiplies hidden states by. Layers that carry a LoRA adapter of peft are understood;
peft itself is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flce import errors
from flce.call import _formats
from flce.call._formats import Codes
from flce.core import _zero3

# The largest logit of a row whose head is compared with its own forward: large enough that a cap shows at any scale of the weight.
LARGE_LOGIT = 1000.0
# Share of a row's largest logit by which two products of the same numbers may differ: fp32 (products in TF32 included), 16 bits.
TOLERANCES = {torch.float32: 2e-3, torch.float64: 1e-6}
TOLERANCE_16 = 3e-2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Packages whose hooks gather a layer's weight and leave alone what it computes.
_GATHERERS = ("torch.distributed.", "deepspeed.")
INSTEAD = (
    "Give the weight that its forward multiplies by as a tensor, flce.linear_cross_entropy(hidden, weight, labels), with a scale and a cap "
    "as logit_scale and softcap; have a flce.FusedLMHead in its place, in whose forward the loss is computed; or take that off the layer"
)
PLAIN = (1.0, 0.0)  # logit_scale and softcap that change nothing


class Operands(NamedTuple):
    """logits = hidden · weightᵀ + bias."""

    hidden: Tensor  # [..., D + r], r the ranks of all adapters together
    weight: Any  # [V, D + r], a tensor or Codes
    bias: Tensor | None  # [V]

    def logits(self) -> Tensor:
        """[..., V] in hidden's dtype, before logit_scale and softcap."""
        dtype = self.hidden.dtype
        if isinstance(self.weight, Codes):
            return self.weight.logits(self.hidden, self.bias)
        return F.linear(self.hidden, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


def operands(head: Any, hidden: Tensor, *, dropout: bool = True, applied: tuple[float, float] | None = None, fp8: Any = None) -> Operands:
    """The product that `head`, a module with .weight [V, D] and perhaps .bias [V], makes of hidden [..., D], read from it now.

    A LoRA layer makes hidden · weightᵀ + scaling · dropout(hidden) · Aᵀ · Bᵀ, which is one product of [hidden, scaling · dropout(hidden) ·
    Aᵀ] and [weight, B]: nothing is merged, so a 16-bit weight does not swallow what the adapter adds. It takes a copy of the weight, V · (D
    + r) elements. dropout=False leaves the adapter's dropout out. `applied`: the logit_scale and softcap of a caller who does not compare
    the product with the head's own forward, which must then be one that is known to be it. `fp8`: the loss's, as which a quantised layer
    may round hidden states. Raises ArgumentError for another forward, for adapters of another kind, and for a layer with parameters of its
    own beside weight and bias; PlacementError for a weight that is not here.
    """
    _refuse_unknown_adapter(head)
    base: Any = head.get_base_layer() if _is_adapter(head) else head
    weight, bias = _formats.held_weight(base), getattr(base, "bias", None)
    adapters = _active_adapters(head)
    _refuse_unused_parameters(base, weight, bias)
    _refuse_ungathered(head, adapters)
    if applied is not None and not _is_plain(head) and (why := why_weight_is_made(head) or why_no_product(head, applied, fp8)) is not None:
        raise errors.ArgumentError(f"the output layer is a {kind_of(head)} that {why}. {INSTEAD}")
    codes = _formats.of_layer("the output layer", base, fp8)
    if codes is not None:
        check_place("the output layer's weight", codes.weight, hidden)
        if adapters:
            raise errors.ArgumentError(
                f"the output layer is quantised and carries a LoRA adapter ({adapters[0]}), whose columns have no codes: leave the output "
                "layer out of target_modules, or dequantise it"
            )
        return Operands(hidden, codes, bias)
    check_weight("the output layer's weight", weight, hidden)
    if not adapters:
        return Operands(hidden, weight, bias)
    added = []
    for name in adapters:
        a, b = head.lora_A[name], head.lora_B[name]
        given = hidden.to(a.weight.dtype)
        added.append((a(head.lora_dropout[name](given) if dropout else given) * head.scaling[name], b.weight))
        if b.bias is not None:
            more = b.bias * head.scaling[name]
            bias = more if bias is None else bias + more.to(bias.dtype)
    return Operands(*with_products(hidden, weight, added), bias)


def with_products(hidden: Tensor, weight: Tensor, added: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(hidden, weight) whose product is hidden · weightᵀ and, added to it, that of each pair (reduced [..., r], B [V, r]): further columns
    of both, in the dtypes of hidden and weight. It takes a copy of the weight."""
    hiddens = [hidden, *(reduced.to(hidden.dtype) for reduced, _ in added)]
    return joined(hiddens, -1), joined([weight, *(b.to(weight.dtype) for _, b in added)], 1)


def _layers(head: Any) -> list[nn.Module]:
    """`head`, and the layer that it hands a call on to where torch.compile or peft has wrapped one."""
    head = getattr(head, "_modules", {}).get("_orig_mod", head)
    layer: Any = head.get_base_layer() if _is_adapter(head) else head
    if _is_of_peft(head, "AuxiliaryTrainingWrapper"):
        layer = next((module for module in head.modules() if module._parameters.get("weight") is head.weight), head)
    return [each for each in dict.fromkeys((head, layer)) if isinstance(each, nn.Module)]  # other objects compute nothing


def _is_plain(head: Any) -> bool:
    """Whether `head` is an nn.Linear of which nothing more has to be asked, as at most calls."""
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    return not (head._forward_pre_hooks or head._forward_hooks or head._backward_pre_hooks or head._backward_hooks)


def why_weight_is_made(head: Any) -> str | None:
    """Why the head's weight, as it lies, is not the factor of its forward, or is another tensor at each read; None where it is the
    factor."""
    for layer in _layers(head):
        for hook in layer._forward_pre_hooks.values():
            if str(getattr(hook, "__module__", "")).startswith("torch.nn.utils."):
                return f"has its weight made before each forward by a hook ({type(hook).__qualname__}) and is out of date in between"
        if parametrize.is_parametrized(layer):
            names = ", ".join(layer.parametrizations)  # type: ignore[arg-type]
            return f"computes its {names} each time it is read (torch.nn.utils.parametrize)"
    return None


def why_hooked(head: Any) -> str | None:
    """Names a hook of the head that may compute something; None where it has none. Hooks that gather a weight compute nothing."""
    for layer in _layers(head):
        for _, hook in hooks_of(layer):
            hook = getattr(hook, "func", hook)  # the function inside a functools.partial
            if not str(getattr(hook, "__module__", "")).startswith(_GATHERERS):
                return f"has hooks ({getattr(hook, '__qualname__', type(hook).__qualname__)})"
    return None


def hooks_of(layer: Any) -> list[tuple[str, Any]]:
    """Hooks that run with a call of the layer or its backward, each with the name of where it stands."""
    return [(name, hook) for name in _HOOKS for hook in getattr(layer, name).values()]


def why_no_product(head: Any, applied: tuple[float, float] = PLAIN, fp8: Any = None) -> str | None:
    """Why the forward of `head` is not known to be hidden · weightᵀ + bias, with the logit_scale and softcap that the caller applies; None
    where it is: nn.Linear's, also where torch.compile, peft or accelerate has wrapped it, a FusedLMHead's, and modules that hold a weight
    alone (an nn.Embedding too). Hooks that gather a weight compute nothing."""
    layers = _layers(head)
    if (hooked := why_hooked(head)) is not None:
        return f"{hooked}, which would not run"
    if not layers:
        return None
    holder: Any = layers[-1]
    forward = vars(holder).get("_old_forward", vars(holder).get("forward"))  # accelerate leaves the one that it wraps
    forward = getattr(forward, "__func__", forward) or type(holder).forward
    if forward in (nn.Linear.forward, nn.Embedding.forward) or getattr(forward, "__name__", "") == "_forward_unimplemented":
        return None
    if _formats.is_forward_of_compressed(forward):
        return _formats.why_more(holder, fp8)
    if getattr(forward, "__module__", "") == "flce.lm_head":
        own = scale_and_cap(holder.options)
        return None if own == applied else f"has logit_scale {own[0]} and softcap {own[1]}, where {applied[0]} and {applied[1]} are given"
    return f"has a forward of its own ({getattr(forward, '__qualname__', forward)}), which may be more than hidden · weightᵀ + bias"


def scale_and_cap(options: Mapping[str, Any]) -> tuple[float, float]:
    scale, cap = options.get("logit_scale"), options.get("softcap")
    return (1.0 if scale is None else float(scale), 0.0 if cap is None else float(cap))


def check_weight(name: str, weight: Any, hidden: Tensor) -> None:
    """Raises ArgumentError, PlacementError for a weight whose numbers are not there to be multiplied by hidden."""
    if not isinstance(weight, Tensor):
        raise errors.ArgumentError(f"{name} is a {type(weight).__name__}; it must be a tensor [vocab_size, hidden_size]")
    _formats.refuse_quantised(name, weight)
    _formats.refuse_foreign(name, weight)
    if weight.dtype not in _DTYPES:
        raise errors.ArgumentError(
            f"{name} has dtype {weight.dtype}, as of a quantised layer; it must be float32, bfloat16 or float16. Codes are given to "
            "flce.linear_cross_entropy with weight_scale"
        )
    check_place(name, weight, hidden)


def check_place(name: str, weight: Tensor, hidden: Tensor) -> None:
    """Raises PlacementError where the weight's memory is not at hidden's."""
    if weight.is_meta and not hidden.is_meta:
        raise errors.PlacementError(
            f"{name} is on meta, where it has no numbers: accelerate's offload keeps them elsewhere until the layer's own forward. Keep "
            "the output layer on the device of its hidden states (device_map), or call the layer and take a loss of its logits"
        )
    if weight.device != hidden.device:
        raise errors.PlacementError(f"{name} is on {weight.device}; it must be on hidden's device, {hidden.device}")


def kind_of(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _refuse_unused_parameters(layer: Any, weight: Any, bias: Any) -> None:
    """Raises ArgumentError where the module that holds `weight` has another parameter that takes a gradient, such as a scale for each
    token. The product does not contain it: at a value that does nothing yet no logit shows it, and it would never get a gradient."""
    if type(layer) is nn.Linear:
        return
    holder = next((module for module in layer.modules() if module._parameters.get("weight") is weight), None)
    others = holder.named_parameters() if holder is not None and weight is not None else ()
    for name, parameter in others:
        if parameter.requires_grad and parameter is not weight and parameter is not bias:
            raise errors.ArgumentError(
                f"the output layer is a {kind_of(holder)} with a parameter {name} "
                f"{list(parameter.shape)} beside its weight and bias, which would get no gradient: keep the model's own loss"
            )


def probe_rows(hidden: Tensor, logits: Tensor) -> Tensor:
    """hidden [..., 1, D] and its logits [..., 1, V] → [..., 2, D]: the row, and the same so long that its largest logit is LARGE_LOGIT."""
    wide = hidden.float()
    largest = logits.detach().float().abs().amax(dim=-1, keepdim=True)
    longest = torch.finfo(hidden.dtype).max / 16 / wide.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    factor = torch.minimum(LARGE_LOGIT / largest.clamp(min=1e-12), longest)
    return joined([hidden, (wide * factor).to(hidden.dtype)], -2)


def joined(parts: list[Tensor], dimension: int) -> Tensor:
    """torch.cat of one dtype, also under autocast to the other 16-bit dtype, which torch's own refuses."""
    device_type = parts[0].device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return torch.cat(parts, dim=dimension)
    with torch.autocast(device_type, enabled=False):
        return torch.cat(parts, dim=dimension)


@contextmanager
def without_graph() -> Iterator[None]:
    """no_grad beside a step under autocast, whose cache of cast weights would keep those that are cast without a graph for the step."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


@contextmanager
def without_dropout(head: Any) -> Iterator[None]:
    """Has the dropouts inside `head`, an adapter's among them, drop nothing."""
    dropouts = [module for module in head.modules() if isinstance(module, nn.Dropout) and module.training]
    for module in dropouts:
        module.training = False
    try:
        yield
    finally:
        for module in dropouts:
            module.training = True


@without_graph()
def forward_is_product(head: Any, hidden: Tensor) -> bool:
    """Whether two rows settle that the head's own forward makes of hidden [T, D] what `operands` says: the last one, and the same so long
    that a cap shows. False where a weight of zeros, or a hidden state that is not finite, shows nothing. Raises ArgumentError where they
    differ."""
    if (why := why_weight_is_made(head)) is not None:
        raise errors.ArgumentError(f"the output layer is a {kind_of(head)} that {why}. {INSTEAD}")
    if why_no_product(head) is None:
        return True
    if not len(hidden):
        return False
    with without_dropout(head):
        last = hidden.detach()[-1:]
        rows = probe_rows(last, operands(head, last).logits())
        own, plain = head(rows), operands(head, rows).logits()
    return _settles(head, own, plain)


def _settles(head: Any, own: Any, plain: Tensor) -> bool:
    what = f"the forward of the output layer, a {kind_of(head)},"
    if not isinstance(own, Tensor) or own.shape != plain.shape:
        given = list(own.shape) if isinstance(own, Tensor) else type(own).__name__
        raise errors.ArgumentError(f"{what} gives {given} for two rows; it must give logits {list(plain.shape)}")
    if not bool(plain.isfinite().all()):
        return False
    own, wide = own.double(), plain.double()
    largest = torch.maximum(own.abs(), wide.abs()).amax(dim=-1, keepdim=True).clamp(min=1e-30)
    difference = ((own - wide).abs() / largest).amax().item()
    if not difference <= TOLERANCES.get(plain.dtype, TOLERANCE_16):
        raise errors.ArgumentError(
            f"{what} differs from hidden · weightᵀ + bias by {difference:.2g} of the largest logit. State what comes behind the product as "
            "the stage's logit_scale and softcap, or have the loss function call the layer on output.hidden"
        )
    return bool(plain.abs().amax() > 0.5 * LARGE_LOGIT)


def refuse_fsdp1(head: Any) -> None:
    """Raises ArgumentError where FSDP 1 has the layer in a unit of its own, which shows no whole weight."""
    if any(each.__name__ == "FullyShardedDataParallel" for module in head.modules() for each in type(module).__mro__):
        raise errors.ArgumentError(
            "the output layer is in a unit of its own of FSDP 1 (FullyShardedDataParallel): have auto_wrap_policy leave it to the unit "
            "that holds the whole model, or take FSDP2 (fully_shard; accelerate: fsdp_version 2)"
        )


def refuse_other_steps(head: Any) -> None:
    """Raises ArgumentError for what the layer does in a training step and no product of its weight shows: dropout of its own, hooks on
    the gradient of its output, which has no logits here, and a parametrization that goes on with every reading of the weight."""
    dropouts = [name for name, module in head.named_modules() if isinstance(module, nn.Dropout) and module.p > 0 and "lora_" not in name]
    parametrizations = [
        type(each).__name__ for module in head.modules() for listed in getattr(module, "parametrizations", {}).values() for each in listed
    ]
    what = None
    if dropouts:
        what = f"a dropout inside ({dropouts[0]}), which would be left out: have it before the output layer"
    elif head._backward_pre_hooks:
        what = "a full backward pre-hook, which would be given no gradient of logits: have a hook on the hidden states or the weight"
    elif "_SpectralNorm" in parametrizations:
        what = "a spectral norm, whose estimate goes on each time that the weight is read: remove the parametrization"
    if what is not None:
        raise errors.ArgumentError(f"the output layer, a {type(head).__name__}, has {what}")


def _refuse_ungathered(head: Any, adapters: list[str]) -> None:
    """Raises PlacementError where ZeRO-3 has not gathered what the product is read from."""
    named = {"weight": weight_of(head), "bias": bias_of(head)}
    for name in adapters:
        named |= {f"lora_B.{name}.{part}": parameter for part, parameter in head.lora_B[name].named_parameters()}
    for name, parameter in named.items():
        how = {"instead": _zero3.OF_ADAPTER} if adapters else {}
        _zero3.refuse_ungathered(f"the output layer's {name}", parameter, **how)


def of_linear(layer: Any, bias: Tensor | None = None, *, reads_codes: bool = False, fp8: Any = None) -> tuple[Any, Tensor | None]:
    """Weight and bias of a plain nn.Linear that a caller gives for a weight. Raises ArgumentError, PlacementError for layers that compute
    something else, whose hooks would not run, or whose weight is not here. With `reads_codes` a quantised layer's weight may be Codes."""
    if type(layer) is not nn.Linear:
        raise errors.ArgumentError(
            f"weight is a {kind_of(layer)}; it must be a tensor [vocab_size, hidden_size] or a plain torch.nn.Linear. A FusedLMHead is "
            "called with labels; for a layer with a LoRA adapter there is flce.LinearCrossEntropyLoss"
        )
    for name in ("weight", "bias"):
        _zero3.refuse_ungathered(name, getattr(layer, name, None))
    codes = _formats.of_layer("weight", layer, fp8)
    if codes is None or not reads_codes:
        _formats.refuse_codes("weight", codes)
        _formats.refuse_quantised("weight", layer.weight)
    if (why := why_weight_is_made(layer) or why_no_product(layer, fp8=fp8)) is not None:
        raise errors.ArgumentError(f"weight is a Linear that {why}. {INSTEAD}")
    if bias is not None:
        raise errors.ArgumentError(
            "bias is given, and weight is a Linear, whose bias is taken; give its weight and bias, or the layer alone"
        )
    weight: Any = layer.weight if codes is None else codes
    if weight.shape != (layer.out_features, layer.in_features):
        raise errors.PlacementError(
            f"weight is a Linear of [{layer.out_features}, {layer.in_features}] whose weight has shape {list(weight.shape)}: it lies over "
            "ranks and is not gathered here"
        )
    return weight, layer.bias


def weight_of(head: Any) -> Any:
    """The head's weight [V, D], without adapters, or what holds its codes; None where it has none."""
    return _formats.held_weight(head.get_base_layer() if _is_adapter(head) else head)


def is_compressed(head: Any) -> bool:
    """Whether the head's weight is what compressed-tensors has compressed, which its own forward cannot read."""
    return _formats.is_compressed(head.get_base_layer() if _is_adapter(head) else head)


def shape_of(head: Any) -> torch.Size:
    """[V, D] of the head's weight, without adapters, also where ZeRO-3 has not gathered it. Raises PlacementError for one that lies over
    ranks in a way that does not tell."""
    weight = weight_of(head)
    shape = _zero3.whole_shape(weight)
    base: Any = head.get_base_layer() if _is_adapter(head) else head
    if weight is getattr(base, "weight_packed", None) and len(shape) == 2:
        shape = torch.Size((shape[0], getattr(base, "in_features", 2 * shape[1])))
    if len(shape) != 2:
        raise errors.PlacementError(
            f"the output layer's weight has shape {list(shape)}; it must be [vocab_size, hidden_size]: it lies over ranks and is not "
            "gathered here"
        )
    return shape


def bias_of(head: Any) -> Tensor | None:
    bias: Tensor | None = getattr(head.get_base_layer() if _is_adapter(head) else head, "bias", None)
    return bias


def _is_adapter(head: Any) -> bool:
    """Whether `head` is a layer that peft wraps round another (a BaseTunerLayer)."""
    return _is_of_peft(head, "BaseTunerLayer")


def _is_of_peft(head: Any, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith("peft.") for c in type(head).__mro__)


def _active_adapters(head: Any) -> list[str]:
    if not _is_adapter(head) or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def _refuse_unknown_adapter(head: Any) -> None:
    if not _is_adapter(head):
        return
    kind = kind_of(head)
    instead = (
        "supported on an output layer are plain LoRA and modules_to_save. Leave the output layer out of target_modules, name it in "
        "modules_to_save, or "
        "keep the model's own loss"
    )
    if not (kind.startswith("peft.tuners.lora.") and type(head).__name__ == "Linear" and isinstance(head.get_base_layer(), nn.Linear)):
        raise errors.ArgumentError(f"the output layer is a {kind} over a {type(head.get_base_layer()).__qualname__}; {instead}")
    variants = getattr(head, "lora_variant", {})
    special = [name for name in head.active_adapters if name in variants or getattr(head, "use_dora", {}).get(name)]
    if special and not head.disable_adapters and not head.merged:
        variant = type(variants[special[0]]).__name__ if special[0] in variants else "DoRA"
        raise errors.ArgumentError(f"the output layer's adapter {special[0]!r} is LoRA of a special kind ({variant}); {instead}")
    if head.merged and head.disable_adapters:
        raise errors.ArgumentError("the output layer's adapters are merged and disabled; unmerge them before they are disabled")
