"""torchtitan's loss of an output layer, without logits in memory.

    python -m torchtitan.train --module llama3 --config llama3_8b --override.imports flce.torchtitan.fused_loss

`FusedLoss` is a ChunkedLossWrapper: the trainer gives it the output layer and hidden states. Like the wrapper it runs forward and backward
of the output layer at once, while FSDP2 has the weight gathered, and hands the decoder its gradient when the trainer calls backward.
Importing this module imports torchtitan.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd  # type: ignore[import-untyped,import-not-found,unused-ignore]
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
)
from torchtitan.config import derive, override  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torchtitan.distributed.spmd_types import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    current_spmd_mesh,
    spmd_mesh_size,
)
from torchtitan.distributed.utils import get_spmd_backend  # type: ignore[import-untyped,import-not-found,unused-ignore]

from flce import errors
from flce.adapters._methods import standing_in
from flce.call._depths import check_alike
from flce.call._heads import hooks_of, kind_of, with_products
from flce.call._options import check_options, taken_by
from flce.functional import linear_cross_entropy

__all__ = ["FusedLoss", "fused_loss"]

_OPTIONS = taken_by("torchtitan")
_OF_CALL = ("self", "pred", "labels", "global_valid_tokens", "global_loss_token_counts")
_INSTEAD = "keep torchtitan's own ChunkedLossWrapper for this model, or give it a plain torchtitan Linear as lm_head"


class FusedLoss(ChunkedLossWrapper):
    """Cross entropy of the output layer on hidden states [..., D] against aligned labels [...], as `(loss, {})`.

    loss is the sum over valid tokens, fp32, divided by global_valid_tokens where the trainer gives it. `num_chunks` changes nothing: no
    chunk of logits is made, and the sequence may have any length.

    The output layer is called as a module once a call, with its forward replaced for that call, so that FSDP2 gathers the weight and
    reduces its gradient. Backward of the output layer has run when the loss is returned (where gradients are enabled and hidden or the
    output layer wants one): `loss.backward()` must reach it with a gradient of 1, as torchtitan's trainer and schedules do; another is an
    error then, as scaling it would leave the output layer's gradient as it is.

    Multi-token prediction (torchtitan after 0.3.0): with a loss_fn of MTPLoss.Config hidden states and labels are tuples, one of each for
    every depth. The labels are each depth's own, as torchtitan's decoder prepares them: nothing is shifted here. The loss is the first
    depth's and mtp_scale times the mean of the others'. All depths' rows are one call of the output layer.

    Tensor parallel: with spmd_backend "spmd_types" (weight: this rank's rows) and "partial_dtensor" (weight: a DTensor, Shard(0)) no rank
    has other ranks' logits. Loss and gradients are placed as torchtitan's own are.

    Config, beside ChunkedLossWrapper's (whose loss_fn must be CrossEntropyLoss or the MTPLoss of tuples):
        z_loss: adds z_loss · lse² a token. label_smoothing: 0 to 1.
        logit_scale, softcap: logits are softcap · tanh(logit_scale · logits / softcap). None: those of the output layer, which has some
            where it is a SoftCappedLinear.
        workspace_limit_bytes: as of `flce.linear_cross_entropy`.

    Raises, at construction: ValueError for an option out of its range and for another loss_fn. At a call: AssertionError without an output
    layer (as ChunkedLossWrapper), and flce's errors, which are ValueErrors and RuntimeErrors: ArgumentError for an output layer that is
    more than a product (float8, an unknown forward, hooks), PlacementError for a weight that is not gathered.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc,name-defined,unused-ignore]
        z_loss: float = 0.0
        """Adds z_loss * logsumexp(logits)^2 to a token's loss."""

        label_smoothing: float = 0.0
        """Smooths targets, with torch's meaning."""

        logit_scale: float | None = None
        """Multiplies logits, before softcap. None: the lm_head's own."""

        softcap: float | None = None
        """Caps logits: softcap * tanh(logits / softcap). None: the lm_head's own."""

        workspace_limit_bytes: int | None = None
        """The most memory that a call takes beyond inputs, outputs and gradients. None: flce's default."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        """`compile_config` changes nothing: the kernels are compiled."""
        if not _is_known(type(config.loss_fn)):
            raise errors.ArgumentError(
                f"loss_fn is a {type(config.loss_fn).__qualname__}; FusedLoss computes CrossEntropyLoss alone, and the MTPLoss of "
                "torchtitan after 0.3.0. Keep ChunkedLossWrapper for another loss, or compute it from flce.linear_logprobs"
            )
        self.options = {name: getattr(config, name) for name in _OPTIONS}
        check_options(self.options, 0)
        super().__init__(config)
        for name, parameter in inspect.signature(type(self.loss_fn).__call__).parameters.items():
            if name not in _OF_CALL and parameter.kind is not parameter.VAR_KEYWORD:
                raise errors.ArgumentError(
                    f"this torchtitan's {type(self.loss_fn).__name__} is called with {name}, which FusedLoss does not know; keep "
                    "torchtitan's own ChunkedLossWrapper"
                )

    def __call__(
        self,
        pred: Tensor | tuple[Tensor, ...],
        labels: Tensor | tuple[Tensor, ...],
        global_valid_tokens: Any = None,
        *,
        global_loss_token_counts: Any = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """pred: hidden states [..., D]; labels [...], -100 for tokens that do not count; with MTPLoss a tuple of each.
        global_valid_tokens: a number or a scalar tensor; global_loss_token_counts, by which newer trainers call it: a tensor [depths], of
        which those below 1 count as 1. Other arguments (positions) change nothing, as with CrossEntropyLoss."""
        del loss_inputs
        head = self.lm_head
        assert head is not None, "the loss has no output layer; call set_lm_head(model.lm_head) before the first call"
        check_head(head)
        hidden, targets = self._depths(pred, labels)
        rows = Rows(targets, self._weights(len(hidden)), _count_of(global_valid_tokens, global_loss_token_counts, len(hidden)))
        wanted = [*hidden, *head.parameters()]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)
        with spmd.no_typecheck():
            made = self._trained(head, hidden, rows) if trains else self._evaluated(head, hidden, rows)
        return made, {}

    def _depths(self, pred: Any, labels: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each depth's hidden states and labels."""
        several = isinstance(pred, tuple)
        if several != isinstance(labels, tuple) or not (several or (isinstance(pred, Tensor) and isinstance(labels, Tensor))):
            raise errors.DTypeError(f"pred is a {kind_of(pred)} and labels a {kind_of(labels)}; both are tensors, or both tuples of them")
        if not self._weighs_depths:
            if several:
                raise errors.ArgumentError(
                    f"pred is a tuple of {len(pred)} and loss_fn is CrossEntropyLoss, which does not say how depths are weighed; take "
                    "MTPLoss.Config of torchtitan's DeepSeek-V3 as loss_fn"
                )
            return (pred,), (labels,)
        if not several or len(pred) != len(labels) or len(pred) < 2:
            has = f"{len(pred)} hidden states and {len(labels)} labels" if several else "one tensor of each"
            raise errors.ArgumentError(f"MTPLoss is called with {has}; it takes tuples of at least two hidden states, with labels for each")
        for at, (states, targets) in enumerate(zip(pred, labels, strict=True)):
            check_alike(at, states, pred[0])
            if states.shape[:-1] != targets.shape:
                raise errors.ShapeError(
                    f"labels[{at}] has shape {list(targets.shape)} and pred[{at}] {list(states.shape)}; tokens are the same"
                )
        return pred, labels

    @property
    def _weighs_depths(self) -> bool:
        return hasattr(self.loss_fn, "mtp_scale")

    def _weights(self, depths: int) -> list[float]:
        """A factor for each depth's sum."""
        return [1.0, *[self.loss_fn.mtp_scale / (depths - 1)] * (depths - 1)] if depths > 1 else [1.0]

    def _evaluated(self, head: Any, hidden: tuple[Tensor, ...], rows: Rows) -> Tensor:
        """Evaluates without FSDP2's hooks, which await a backward that does not come."""
        sharded = isinstance(head, FSDPModule)
        if sharded:
            head.unshard()
        try:
            with torch.no_grad():
                return self._loss(head, hidden, rows)
        finally:
            if sharded:
                head.reshard()

    def _trained(self, head: Any, hidden: tuple[Tensor, ...], rows: Rows) -> Tensor:
        # A leaf also of a frozen decoder's hidden states: FSDP2 reduces gradients once those of the inputs are there.
        leaves = [states.detach().requires_grad_() for states in hidden]
        computed: list[Tensor] = []

        def forward(*given: Tensor) -> Tensor:
            computed.append(self._loss(head, given, rows))
            return computed[0]

        with _kept_gathered(head), standing_in(head, "forward", forward):
            head(*leaves).backward()
        gradients = [leaf.grad for leaf in leaves]
        assert all(gradient is not None for gradient in gradients)
        loss: Tensor = _Handed.apply(computed[0].detach(), _anchor(hidden), len(hidden), *hidden, *gradients)
        return loss

    def _loss(self, head: Any, states: tuple[Tensor, ...], rows: Rows) -> Tensor:
        # One depth keeps its shape, and several lie behind each other in one dimension.
        hidden = states[0] if len(states) == 1 else torch.cat([each.reshape(-1, each.shape[-1]) for each in states])
        product = product_of(head, hidden)
        options = {name: value for name, value in self.options.items() if value is not None}
        for name in ("logit_scale", "softcap"):
            own = getattr(product, name)
            if own is not None and options.setdefault(name, own) != own:
                raise errors.ArgumentError(
                    f"{name} is {options[name]} and the output layer, a {kind_of(head)}, has one of {own}; leave it out of the loss's "
                    "config"
                )
        target, of_rows = rows.joined()
        over_ranks = _over_ranks(head, product)
        loss: Tensor = linear_cross_entropy(
            product.hidden, product.weight, target, bias=product.bias, ignore_index=IGNORE_INDEX, **options, **of_rows, **over_ranks
        )
        return loss


# ── Sums over depths ────────────────────────────────


class Rows(NamedTuple):
    """Rows of one call, whose loss is Σ weights[d] · Σ losses of depth d's rows / count."""

    labels: tuple[Tensor, ...]
    weights: list[float]
    count: Any
    """Tokens of the step: None for a sum, one number, or a tensor with one for each depth."""

    def joined(self) -> tuple[Tensor, dict[str, Any]]:
        """Labels of all rows, and the options of `flce.linear_cross_entropy` that add their losses up."""
        of_depths = isinstance(self.count, Tensor) and self.count.numel() > 1
        divided = {"reduction": "sum"} if self.count is None or of_depths else {"num_valid_tokens": self.count}
        if len(self.labels) == 1:
            return self.labels[0], divided
        rows = [
            torch.full((labels.numel(),), weight, device=labels.device) for weight, labels in zip(self.weights, self.labels, strict=True)
        ]
        if of_depths:
            rows = [row / count for row, count in zip(rows, self.count.unbind(), strict=True)]
        return torch.cat([labels.reshape(-1) for labels in self.labels]), {"token_weight": torch.cat(rows), **divided}


def _count_of(one: Any, each: Any, depths: int) -> Any:
    """The count of `Rows`. `one`: global_valid_tokens, in whose place newer trainers give a tensor [depths]; `each`: that tensor, by
    name."""
    if one is not None and each is not None:
        raise errors.ArgumentError("global_valid_tokens and global_loss_token_counts are both given; a loss is divided by one of them")
    count = one if each is None else each
    is_vector = isinstance(count, Tensor) and count.dim() > 0
    if is_vector and list(count.shape) != [depths]:
        raise errors.ShapeError(f"the step's token counts have shape {list(count.shape)} and there are {depths} depths; each has its own")
    if each is not None and depths > 1 and not is_vector:
        raise errors.ShapeError(f"global_loss_token_counts is one number and there are {depths} depths; each has its own")
    return count.clamp_min(1) if is_vector else count


def _is_known(config: type) -> bool:
    """Whether the loss of this config is computed here: CrossEntropyLoss, or the MTPLoss that weighs tuples of cross entropies. The one of
    torchtitan 0.3.0 shifts labels itself, of logits that its DeepSeek-V3 always makes."""
    if config is CrossEntropyLoss.Config:
        return True
    named = config.__module__.startswith("torchtitan.") and config.__qualname__ == "MTPLoss.Config"
    return named and issubclass(config, CrossEntropyLoss.Config)


# ── The trainer's backward ──────────────────────────


class _Handed(torch.autograd.Function):
    """The loss, whose backward hands hidden states the gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor | None, depths: int, *hidden_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*hidden_and_gradients[depths:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        gradients = ctx.saved_tensors
        message = (
            "the loss of flce.torchtitan.FusedLoss has a gradient other than 1, and the output layer's gradient is already made: "
            "call backward on the loss itself, and scale through global_valid_tokens"
        )
        if given.is_cuda:
            torch._assert_async((given == 1).all(), message)  # type: ignore[attr-defined,unused-ignore]
        elif given.device.type == "cpu" and bool(given != 1):
            raise errors.ArgumentError(message)
        return None, None, None, *gradients, *(None for _ in gradients)


def _anchor(hidden: tuple[Tensor, ...]) -> Tensor | None:
    """A zero with a gradient: added to a loss of frozen hidden states, it lets backward be called on that loss."""
    if any(states.requires_grad for states in hidden):
        return None
    return torch.zeros((), device=hidden[0].device, requires_grad=True)


# ── The output layer ────────────────────────────────


class Product(NamedTuple):
    """logits = softcap(logit_scale · (hidden · weightᵀ + bias))."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    logit_scale: float | None = None
    softcap: float | None = None


def check_head(head: Any) -> None:
    """Raises ArgumentError for an output layer whose logits are not known to be a `product_of` it."""
    if not isinstance(head, nn.Module):
        raise errors.DTypeError(f"lm_head is a {type(head).__name__}; it must be a module")
    for name, hook in hooks_of(head):
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
            which = getattr(hook, "__qualname__", hook)
            raise errors.ArgumentError(
                f"lm_head has a hook that is not FSDP2's ({which}, in {name}), which would meet a loss in place of logits; remove it, "
                "or keep torchtitan's own ChunkedLossWrapper"
            )
    own = vars(head).get("forward")
    if own is not None and getattr(own, "__qualname__", "") != "Module.parallelize.<locals>.forward_with_redistribution":
        raise errors.ArgumentError(f"lm_head has a forward of its own ({getattr(own, '__qualname__', own)}); {_INSTEAD}")
    if not (_is_linear(type(head)) or _is_lora(head) or _is_capped(head)):
        raise errors.ArgumentError(
            f"lm_head is a {kind_of(head)}, whose logits are not known to be a product of hidden and its weight; {_INSTEAD} (float8, mx "
            "and nvfp4 converters: leave lm_head out, with filter_fqns or fqns)"
        )


def product_of(head: Any, hidden: Tensor) -> Product:
    """The factors that `head` multiplies, read from it now.

    A LoRA layer makes hidden · weightᵀ + scaling · (hidden · Aᵀ) · Bᵀ, which is one product of [hidden, scaling · hidden · Aᵀ] and
    [weight, B]. It takes a copy of the weight.
    """
    if _is_capped(head):
        return Product(hidden, head.weight, head.bias, head.output_multiplier, head.output_soft_cap_temp)
    if not _is_lora(head):
        return Product(hidden, head.weight, head.bias)
    added = [(head.lora_a(hidden) * head._lora_scaling, head.lora_b.weight)]
    return Product(*with_products(hidden, head.weight, added), head.bias)


def _is_linear(kind: type) -> bool:
    return issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward


def _forward_class(head: Any) -> tuple[type, type]:
    """The class that defines the layer's forward, and the next one that does."""
    owners = [each for each in type(head).__mro__ if "forward" in vars(each)]
    return owners[0], owners[1]


def _is_lora(head: Any) -> bool:
    """Whether `head` is a LoRA layer of torchtitan.components.lora over a plain Linear."""
    if not isinstance(head, nn.Linear) or type(head).forward.__module__ != "torchtitan.components.lora":
        return False
    plain = _forward_class(head)[1] is nn.Linear
    parts = [getattr(head, name, None) for name in ("lora_a", "lora_b")]
    return (
        plain and hasattr(head, "_lora_scaling") and all(isinstance(p, nn.Linear) and _is_linear(type(p)) and p.bias is None for p in parts)
    )


def _is_capped(head: Any) -> bool:
    owner = _forward_class(head)[0]
    return owner.__name__ == "SoftCappedLinear" and owner.__module__ == "torchtitan.models.muse_glimmer.model"


# ── Where the weight lies ───────────────────────────


@contextlib.contextmanager
def _kept_gathered(head: Any) -> Iterator[None]:
    """FSDP2 gathers the weight now, and not in the module's own hook: what that leaves for the next module to wait for is not there for a
    CUDA graph's capture. A weight that shares its FSDP2 unit with the decoder's norm stays gathered for the norm's backward."""
    shared = isinstance(head, FSDPModule) and len(head._get_fsdp_state()._modules) > 1
    if isinstance(head, FSDPModule):
        head.unshard()
    if shared:
        head.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        if shared:
            head.set_reshard_after_backward(True, recurse=False)


def _over_ranks(head: Any, product: Product) -> dict[str, Any]:
    """The keywords that say how the vocabulary lies over the tensor-parallel ranks."""
    weight, whole = product.weight, head.out_features
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        if get_spmd_backend() == "full_dtensor" or mesh.mesh_dim_names != ("tp",):
            raise errors.PlacementError(
                f"lm_head's weight is a DTensor over {mesh} with placements {list(weight.placements)} (spmd_backend "
                f"{get_spmd_backend()!r}); FusedLoss takes spmd_backend 'spmd_types', and 'partial_dtensor' with the weight over 'tp' alone"
            )
        return {"process_group": mesh}
    if isinstance(product.hidden, DTensor):
        raise errors.PlacementError(
            f"hidden states are a DTensor with placements {list(product.hidden.placements)} and lm_head's weight is whole; FusedLoss takes "
            "spmd_backend 'spmd_types' and 'partial_dtensor'"
        )
    ranks = spmd_mesh_size("tp")
    if ranks == 1 and weight.shape[0] == whole:
        return {}
    if ranks == 1 or weight.shape[0] == whole:
        raise errors.PlacementError(
            f"lm_head's weight has {weight.shape[0]} of {whole} rows on each of {ranks} tensor-parallel ranks; its rows must lie over them "
            "(state_shardings of its sharding_config), and the loss be called in the trainer's train_context, which says who they are"
        )
    # A replicated activation's gradient is Partial in spmd_types: what made it replicated adds up the ranks' parts.
    return {"process_group": current_spmd_mesh().get_group("tp"), "reduce_grad_hidden": False}


# ── The config ──────────────────────────────────────


@override(target=BaseLoss.Config, description="flce: cross entropy without logits")  # type: ignore[untyped-decorator,unused-ignore]
def fused_loss(cfg: Any, **options: Any) -> FusedLoss.Config:
    """The factory for `--override.imports flce.torchtitan.fused_loss`, also with options:
    `'flce.torchtitan.fused_loss={"z_loss": 1e-4}'`. A config function may call it too: `config.loss = fused_loss(config.loss)`.

    Takes ChunkedLossWrapper.Config, CrossEntropyLoss.Config and the MTPLoss.Config of torchtitan after 0.3.0. Raises ValueError for another
    loss, TypeError for an unknown option.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TypeError(f"fused_loss got {unknown[0]!r}; its options are {', '.join(_OPTIONS)}")
    if _is_known(type(cfg)):
        return FusedLoss.Config(loss_fn=cfg, **options)
    if type(cfg) not in (ChunkedLossWrapper.Config, FusedLoss.Config):
        raise errors.ArgumentError(
            f"loss is a {type(cfg).__qualname__}; fused_loss replaces ChunkedLossWrapper.Config, CrossEntropyLoss.Config and, of "
            "torchtitan after 0.3.0, MTPLoss.Config"
        )
    made: FusedLoss.Config = derive(cfg, FusedLoss.Config, **options)
    return made
