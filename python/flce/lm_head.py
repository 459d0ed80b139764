"""An output layer that computes the loss inside its own forward, where wrappers have gathered its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce import errors
from flce.call import _chunked, _formats, _heads
from flce.call._checks import is_dtensor
from flce.call._depths import are_several
from flce.call._options import check_options, taken_by
from flce.call._targets import check_ignore_index, check_tensors
from flce.core import _zero3
from flce.functional import linear_cross_entropy
from flce.loss import parallel_of, with_budget

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.call import _signatures

_OF_CALL = frozenset(taken_by("cross_entropy")) - {"bias", "shift", "ignore_index"}
_KEPT = ("in_features", "out_features", "training")


class FusedLMHead(nn.Linear):
    """An nn.Linear, by its parameters and its state_dict, that is also called with labels.

    head(hidden) gives logits; head(hidden, labels=labels) gives the loss of `flce.linear_cross_entropy`, without logits in memory. The loss
    is computed in the module's forward: FSDP2 and DeepSpeed's ZeRO-3 gather the weight before it, DDP's and their hooks see its gradient,
    and mixed precision is theirs. Called in any other way, a weight that lies over ranks is refused with PlacementError.

    Args:
        in_features, out_features, bias, device, dtype: as of nn.Linear. With process_group out_features counts this rank's rows, unless the
            weight is a DTensor.
        shift: 0 for targets that are aligned already, as those of an nn.Linear's logits are; 1 for labels as a tokenizer gives them
            (position t predicts label t + 1). For several hidden states (multi-token prediction) a list of one each: [1, 2].
        ignore_index: the label that counts for nothing.
        options: those of `flce.LinearCrossEntropyLoss`: softcap, logit_scale, label_smoothing, z_loss, class_weight, temperature (a
            number), dft, reduction, batch_invariant, fp8 (of the loss; logits are the layer's), workspace_limit_bytes,
            memory_limit_bytes, retain_in_grad_weight, process_group and what goes with it. class_weight is a buffer: it moves with the
            module, and is not in its state_dict, which is an nn.Linear's.

    Raises ArgumentError, SpecError for an option that there is not, or a value out of its range.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        shift: int | Sequence[int] = 0,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        for each in shift if are_several(shift) else [shift]:  # type: ignore[union-attr]
            check_options(options, each)
        parallel_of(options)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.shift = shift
        self.ignore_index = check_ignore_index(ignore_index)
        self.options = with_budget(options)
        class_weight = self.options.pop("class_weight", None)
        check_tensors(class_weight=class_weight)
        self.register_buffer("class_weight", class_weight, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, shift: int | Sequence[int] = 0, ignore_index: int = -100, **options: Any) -> FusedLMHead:
        """Makes a FusedLMHead of a plain layer, with the parameters of `linear`, not copies of them: a tied embedding stays tied, and an
        optimizer that has them goes on. `model.set_output_embeddings(FusedLMHead.from_linear(model.get_output_embeddings()))`. Raises
        ArgumentError for a layer that is not a plain nn.Linear: adapters and sharded layers compute something else. A quantised layer of
        torchao or compressed-tensors is read as it is, where `flce.linear_cross_entropy` reads it."""
        if type(linear) is not nn.Linear:
            raise errors.ArgumentError(
                f"linear is a {_heads.kind_of(linear)}; from_linear takes a plain torch.nn.Linear. For a layer with a LoRA adapter use "
                "flce.LinearCrossEntropyLoss(layer), which reads adapters"
            )
        if (why := _heads.why_weight_is_made(linear) or _heads.why_no_product(linear, fp8=options.get("fp8"))) is not None:
            raise errors.ArgumentError(f"linear is a Linear that {why}; make the FusedLMHead before what changes the layer")
        made = cls(1, 1, False, "meta", shift=shift, ignore_index=ignore_index, **options)
        for name in _KEPT:
            setattr(made, name, getattr(linear, name))
        made._take_parameters(linear)
        return made

    def _take_parameters(self, linear: nn.Linear) -> None:
        """Has weight and bias of `linear`; of a layer of compressed-tensors all that its weight lies in, and what says how."""
        if _formats.of_layer("linear", linear, self.options.get("fp8")) is None:
            self.weight, self.bias = linear.weight, linear.bias
            return
        del self.weight
        for name, parameter in linear._parameters.items():
            self.register_parameter(name, parameter)
        for name in _formats.STATE:
            if name in vars(linear):
                setattr(self, name, vars(linear)[name])

    @overload
    def forward(self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallAlone]) -> Tensor: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallWithLse]
    ) -> tuple[Tensor, ...]: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallWithLogprobs]
    ) -> tuple[Tensor, ...]: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallWithEntropy]
    ) -> tuple[Tensor, ...]: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallWithTop1]
    ) -> tuple[Tensor, ...]: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallWithLogSumSqProbs]
    ) -> tuple[Tensor, ...]: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor | None = None, **of_call: Unpack[_signatures.HeadCallOrMore]
    ) -> Tensor | tuple[Tensor, ...]: ...
    @overload
    def forward(self, input: Sequence[Tensor], labels: Any = None, **of_call: Any) -> tuple[Any, ...]: ...
    def forward(self, input: Any, labels: Any = None, **of_call: Any) -> Any:
        """Logits [..., V] of hidden states [..., S, D], with logit_scale and softcap applied and no temperature; of a weight that lies over
        process_group this rank's. With labels [..., S] the loss, or a tuple that begins with it. A list of hidden states gives a tuple of
        logits, or with labels, one tensor or a list, what `flce.linear_cross_entropy` gives for several.

        of_call: for the loss: num_valid_tokens, temperature, token_weight, class_offset, cu_seqlens, grad_weight_out, loss_weights and the
        return_ flags of `flce.linear_cross_entropy`, whose errors it raises. A temperature takes the place of the option.
        """
        several = are_several(input)
        if several and not input:
            raise errors.ArgumentError("input is an empty list; give at least one hidden state")
        weight = self._gathered(input[0] if several else input)
        if labels is None:
            if of_call:
                raise errors.ArgumentError(f"{min(of_call)} is given without labels; it is a loss's")
            made = tuple(self._logits(each, weight) for each in (input if several else [input]))
            return made if several else made[0]
        if unknown := [name for name in of_call if name not in _OF_CALL]:
            raise errors.ArgumentError(
                f"{min(unknown)} is given with labels; a call's are {', '.join(sorted(_OF_CALL))}; shift and ignore_index are the head's, "
                "given where it is made"
            )
        given = {"class_weight": self.class_weight, **self.options, **of_call}
        if of_call.get("temperature") is None:
            given["temperature"] = self.options.get("temperature")
        return linear_cross_entropy(input, weight, labels, bias=self.bias, shift=self.shift, ignore_index=self.ignore_index, **given)

    def _logits(self, input: Tensor, weight: Any) -> Tensor:
        codes = isinstance(weight, _formats.Codes)
        logits = weight.logits(input, self.bias) if codes else F.linear(input, weight, self.bias)
        return _chunked.transform_logits(logits, self.options.get("logit_scale"), self.options.get("softcap"))

    if TYPE_CHECKING:
        __call__ = forward

    def _gathered(self, input: Tensor) -> Any:
        """The weight, whole as far as this rank is to have it; of a quantised one its codes."""
        for name in ("weight", "bias"):
            _zero3.refuse_ungathered(name, getattr(self, name, None))
        codes = _formats.of_layer("the head", self, self.options.get("fp8"))
        if codes is not None:
            _heads.check_place("weight", codes.weight, input)
            return codes
        weight = self.weight
        _formats.refuse_quantised("weight", weight)
        if not is_dtensor(weight) and weight.shape != (self.out_features, self.in_features):
            raise errors.PlacementError(
                f"weight has shape {list(weight.shape)} where this head has [{self.out_features}, {self.in_features}]: it lies over ranks "
                "and is not gathered here. Call the head as a module, head(hidden, labels=...), inside the forward of what wraps it"
            )
        if is_dtensor(weight) and self.options.get("process_group") is None:
            placements = list(weight.placements)  # type: ignore[attr-defined]
            raise errors.PlacementError(
                f"weight is a DTensor with placements {placements}. FSDP2 gathers it where the head is called as a module; for tensor "
                "parallel give process_group"
            )
        _heads.check_weight("weight", weight, input)
        return weight

    def extra_repr(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "process_group")
        return f"{super().extra_repr()}, shift={self.shift}{more}"
