"""Losses for trainers: an output layer's weight is borrowed, never registered, and looked up at each call."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn

from flce import errors
from flce.budget import MemoryBudget
from flce.call import _arguments, _chunked, _depths, _formats, _heads
from flce.call._checks import OLDEST_GPU
from flce.call._options import check_options, of_kind, temperature_number
from flce.call._targets import check_ignore_index, check_tensors, targets_of
from flce.core import _native, checks
from flce.core._frame import Parallel
from flce.core._once import say_once
from flce.functional import linear_cross_entropy
from flce.parallel import _parallel

IMPLEMENTATIONS = ("auto", "flce", "torch_compile", "pytorch")
_OF_FLCE = of_kind("kernels", "ranks")  # the others compute whole layers, in chunks of chunk_size
# Options of what is trained on. None of them is in the loss that a model of transformers gives by itself.
OF_TRAINING = of_kind("training")


@runtime_checkable
class FusedOutputLoss(Protocol):
    """Protocol of a loss that contains the output layer, as a trainer uses it."""

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """The loss of hidden_states [batch, sequence, hidden_size] against labels [batch, sequence], unshifted: of flce's losses those that
        are made with shift=1."""
        ...

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [batch, sequence, vocab_size], for evaluation and generation."""
        ...


class LossOptions(dict[str, Any]):
    """Options of a loss. A copy shares the process group, which cannot be copied: the same ranks make the copy's calls."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LossOptions:
        return LossOptions({name: value if name == "process_group" else copy.deepcopy(value, memo) for name, value in self.items()})


def with_budget(options: Mapping[str, Any]) -> LossOptions:
    """Options of `flce.linear_cross_entropy`: a memory_limit_bytes is a MemoryBudget that the loss's calls share."""
    made = LossOptions(options)
    limit = made.pop("memory_limit_bytes", None)
    if limit is not None:
        made["workspace_limit_bytes"] = MemoryBudget(limit)
    return made


def _why_not_flce() -> str | None:
    """Why "auto" does not choose flce on this machine; None if it does. On a CPU flce is the quicker one (docs/performance.md)."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"{torch.cuda.get_device_name()} is older than sm_80"
    try:
        _native.library()
    except errors.UnavailableError as error:
        return str(error)
    return None


class LinearCrossEntropyLoss:
    """Cross entropy of an output layer on hidden states, in the form in which trainers call it: loss(hidden_states, labels).

    Args:
        output_embeddings: a module with `.weight` [V, D] and perhaps `.bias` [V], such as `model.get_output_embeddings()`. Read at each
            call: an optimizer's step, a replaced parameter and `model.to(...)` are seen. A function that returns the module, such as
            `model.get_output_embeddings` itself, is called each time: a replaced module (`resize_token_embeddings`) is seen, too. Nothing
            is registered anywhere. The module may carry peft's LoRA: adapters are computed with it and get their gradients (a copy of the
            weight is made for them); adapters of another kind are refused. A quantised layer of torchao or compressed-tensors is read as it
            is, by impl "flce", where `flce.linear_cross_entropy` reads it.
        impl: "flce"; "pytorch" (chunks of chunk_size tokens, checkpointed); "torch_compile" (the same, a chunk compiled); "auto" takes
            flce, on a GPU as on a CPU, and "pytorch" where the GPU is older than sm_80 or libflce cannot be had, and for hidden states on
            other devices or in float64; it logs why, once. `actual_impl` says what was taken.
        chunk_size: tokens whose logits "pytorch" and "torch_compile" hold at a time.
        compile: compile the chunk of "pytorch" too.
        shift: 1 for labels as a tokenizer gives them (position t predicts label t + 1), 0 for targets that are aligned already. It has no
            default: a `FusedOutputLoss` is called with unshifted labels, and flce's functions take aligned ones. For several hidden states
            (multi-token prediction) a list of one each: [1, 2].
        options: softcap, logit_scale, label_smoothing, z_loss, class_weight, temperature (a number), dft, reduction ("mean"),
            batch_invariant and fp8 (with flce alone), workspace_limit_bytes, retain_in_grad_weight, as in `flce.linear_cross_entropy`. Also
            process_group, sequence_parallel, vocab_start, vocab_size, reduce_dtype and reduce_grad_hidden, for a layer whose rows lie over
            ranks, with flce alone. memory_limit_bytes is the most memory that all calls which wait for their backward take together: a
            `flce.MemoryBudget` of the loss's own.

    Raises:
        ArgumentError, SpecError: for an unknown impl or option, or a value out of its range. UnavailableError (an ImportError): for an impl
            asked
        for by name that is not there.
    """

    head_is_compared = False  # with the model's own logits, by who made the loss: its forward may then be any

    def __init__(
        self,
        output_embeddings: nn.Module | Callable[[], nn.Module],
        impl: str = "auto",
        chunk_size: int = 4096,
        ignore_index: int = -100,
        compile: bool = False,
        *,
        shift: int | Sequence[int],
        **options: Any,
    ) -> None:
        checks.choice("impl", impl, IMPLEMENTATIONS)
        for each in shift if _depths.are_several(shift) else [shift]:  # type: ignore[union-attr]
            check_options(options, each)
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise errors.ArgumentError(f"chunk_size is {chunk_size!r}; it must be an integer of 1 or more")
        checks.flag("compile", compile)
        self._output_embeddings = output_embeddings
        if not isinstance(_heads.weight_of(self.output_embeddings), Tensor):
            raise errors.ArgumentError(
                f"output_embeddings is a {type(self.output_embeddings).__name__} without a weight; "
                "it must be a module with .weight [V, D], such as "
                "model.get_output_embeddings()"
            )
        self.requested_impl = impl
        self.chunk_size = chunk_size
        self.ignore_index = check_ignore_index(ignore_index)
        self.compile = compile
        self.shift: Any = shift
        self.options = with_budget(options)
        self.actual_impl = self._choose(impl)
        if parallel_of(options) is not None and self.actual_impl != "flce":
            raise errors.ArgumentError(f"process_group needs impl 'flce'; this loss uses {self.actual_impl!r}")
        self._compiled: _chunked.ChunkLoss | None = None

    @staticmethod
    def _choose(impl: str) -> str:
        if impl == "auto":
            reason = _why_not_flce()
            if reason is None:
                return "flce"
            say_once(f"flce: LinearCrossEntropyLoss(impl='auto') uses 'pytorch': {reason}")
            return "pytorch"
        if impl == "flce":
            _native.library()
        if impl == "torch_compile" and not torch._dynamo.is_dynamo_supported():  # type: ignore[attr-defined]
            raise errors.UnavailableError("impl is 'torch_compile', which torch does not support on this platform and Python")
        return impl

    @property
    def output_embeddings(self) -> Any:
        """The module that the loss reads, as it is now."""
        given: Any = self._output_embeddings
        return given() if isinstance(given, (types.FunctionType, types.MethodType, functools.partial)) else given

    @property
    def weight(self) -> Tensor:
        """[V, D]; without what an adapter adds."""
        weight: Tensor = _heads.weight_of(self.output_embeddings)
        return weight

    @property
    def bias(self) -> Tensor | None:
        return _heads.bias_of(self.output_embeddings)

    def operands(self, hidden_states: Tensor, *, dropout: bool = True) -> _heads.Operands:
        """(hidden, weight, bias) whose product are the logits, before logit_scale and softcap, with the output layer as it is now. An
        adapter's columns are appended to hidden and weight; dropout=False leaves the adapter's dropout out."""
        fp8 = self.options.get("fp8")
        return _heads.operands(self.output_embeddings, hidden_states, dropout=dropout, applied=self._applied(), fp8=fp8)

    def _applied(self) -> tuple[float, float] | None:
        return None if self.head_is_compared else _heads.scale_and_cap(self.options)

    @overload
    def __call__(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        num_valid_tokens: Tensor | float | None = None,
        temperature: Tensor | float | None = None,
        token_weight: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        grad_weight_out: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        hidden_states: Sequence[Tensor],
        labels: Tensor | Sequence[Tensor],
        *,
        num_valid_tokens: Any = None,
        temperature: Any = None,
        token_weight: Any = None,
        cu_seqlens: Any = None,
        grad_weight_out: Tensor | None = None,
        loss_weights: Sequence[float] | None = None,
    ) -> tuple[Any, ...]: ...
    def __call__(
        self,
        hidden_states: Any,
        labels: Any,
        *,
        num_valid_tokens: Any = None,
        temperature: Any = None,
        token_weight: Any = None,
        cu_seqlens: Any = None,
        grad_weight_out: Tensor | None = None,
        loss_weights: Sequence[float] | None = None,
    ) -> Any:
        """hidden_states [..., S, D], labels [..., S]; the keywords are those of `flce.linear_cross_entropy`, and a temperature given here
        takes the place of the option. bf16 or fp16 hidden states may meet an fp32 weight. A list of hidden states, with one tensor of
        labels or a list, gives what that function gives for several: a tuple of losses, or with loss_weights (sum, losses)."""
        if _depths.are_several(hidden_states):
            of_depths = {"num_valid_tokens": num_valid_tokens, "temperature": temperature, "token_weight": token_weight}
            return self._of_several(hidden_states, labels, of_depths | {"cu_seqlens": cu_seqlens}, grad_weight_out, loss_weights)
        if loss_weights is not None or _depths.are_several(self.shift):
            given = "loss_weights is given" if loss_weights is not None else f"shift is {self.shift}"
            raise errors.ArgumentError(f"{given} and hidden_states is one tensor; it has a number for each of several hidden states")
        hidden_states, weight, bias = self.operands(hidden_states)
        common: dict[str, Any] = {
            **self.options,
            "bias": bias,
            "ignore_index": self.ignore_index,
            "num_valid_tokens": num_valid_tokens,
            "temperature": self.options.get("temperature") if temperature is None else temperature,
            "token_weight": token_weight,
        }
        impl = self._impl_for(hidden_states)
        if impl == "flce":
            try:
                loss: Tensor = linear_cross_entropy(
                    hidden_states, weight, labels, shift=self.shift, cu_seqlens=cu_seqlens, grad_weight_out=grad_weight_out, **common
                )
                return loss
            except errors.UnavailableError as error:
                impl = self._fall_back(error)
        if isinstance(weight, _formats.Codes):
            _formats.refuse_codes("the output layer's weight", weight, f"which impl 'flce' alone reads, and this loss uses {impl!r}")
        if grad_weight_out is not None:
            raise errors.ArgumentError(f"grad_weight_out needs impl 'flce'; this loss uses {impl!r}")
        for name, value in (
            ("batch_invariant", self.options.get("batch_invariant", False)),
            ("fp8", self.options.get("fp8")),
            ("process_group", self.options.get("process_group")),
        ):
            if value:
                raise errors.ArgumentError(f"{name} needs impl 'flce'; this loss uses {impl!r}")
        common = {name: value for name, value in common.items() if name not in _OF_FLCE}
        common["temperature"] = _check_for_chunks(hidden_states, weight, labels, **common)
        if self.shift or cu_seqlens is not None:
            labels = targets_of(labels, self.shift, ignore_index=self.ignore_index, cu_seqlens=cu_seqlens)
        return _chunked.chunked_linear_cross_entropy(
            hidden_states, weight, labels, chunk_size=self.chunk_size, function=self._chunk_function(), **common
        )

    def _of_several(
        self, states: Sequence[Tensor], labels: Any, of_depths: dict[str, Any], grad_weight_out: Tensor | None, loss_weights: Any
    ) -> Any:
        """Losses of several hidden states: one call with flce, and a call for each in plain torch."""
        _depths.check_stated(states, labels, self.shift)
        of_depths = {"shift": self.shift, **of_depths}
        each = _depths.split_options(dict(of_depths), len(states))
        if self._impl_for(states[0]) == "flce":
            if of_depths["temperature"] is None:
                of_depths["temperature"] = self.options.get("temperature")
            hidden, weight, bias = self._operands_of_several(states)
            common = {**self.options, "bias": bias, "ignore_index": self.ignore_index, "grad_weight_out": grad_weight_out, **of_depths}
            try:
                return linear_cross_entropy(hidden, weight, labels, loss_weights=loss_weights, **common)
            except errors.UnavailableError as error:
                self._fall_back(error)
        reduction = self.options.get("reduction", "mean")
        weights = _depths.check_weights(loss_weights, reduction, len(states))
        targets = _depths.of_each("target", labels, len(states))
        losses = []
        for hidden_states, target, of_depth in zip(states, targets, each, strict=True):
            loss = self.with_shift(of_depth.pop("shift") or 0)
            losses.append(LinearCrossEntropyLoss.__call__(loss, hidden_states, target, grad_weight_out=grad_weight_out, **of_depth))
        if weights is None:
            return tuple(losses)
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)), tuple(losses)

    def _operands_of_several(self, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """`operands` of several hidden states, which have one weight. An adapter's columns are made for all rows together."""
        for at, hidden_states in enumerate(states):
            check_tensors(**{f"hidden_states[{at}]": hidden_states})
            _depths.check_alike(at, hidden_states, states[0])
        rows = torch.cat([hidden_states.reshape(-1, hidden_states.shape[-1]) for hidden_states in states])
        hidden, weight, bias = self.operands(rows)
        if hidden is rows:
            return list(states), weight, bias
        parts = hidden.split([hidden_states.shape[:-1].numel() for hidden_states in states])
        return [part.reshape(*given.shape[:-1], -1) for part, given in zip(parts, states, strict=True)], weight, bias

    def _fall_back(self, error: errors.UnavailableError) -> str:
        """Has "auto" take plain torch from now on; raises the error where another implementation was asked for."""
        if self.requested_impl != "auto" or self.options.get("process_group") is not None:
            raise error
        say_once(f"flce: LinearCrossEntropyLoss(impl='auto') falls back to 'pytorch': {error}")
        self.actual_impl = "pytorch"
        return self.actual_impl

    def _impl_for(self, hidden_states: Any) -> str:
        """Implementation that computes this call: "auto" does not take flce for hidden states that flce refuses and "pytorch" takes."""
        if self.requested_impl == "auto" and self.actual_impl == "flce" and isinstance(hidden_states, Tensor):
            device, dtype = hidden_states.device, hidden_states.dtype
            if device.type not in _arguments.DEVICE_TYPES or dtype == torch.float64:
                say_once(f"flce: LinearCrossEntropyLoss(impl='auto') uses 'pytorch' for hidden states in {dtype} on {device.type}")
                return "pytorch"
        return self.actual_impl

    def _chunk_function(self) -> _chunked.ChunkLoss:
        if not self.compile and self.actual_impl != "torch_compile":
            return _chunked.chunk_loss
        if self._compiled is None:
            self._compiled = torch.compile(_chunked.chunk_loss)
        return self._compiled

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., V] with the weight as it is now, logit_scale and softcap applied, no temperature, in hidden's dtype."""
        if self.options.get("process_group") is not None:
            raise errors.PlacementError(
                "forward_logits is of a whole output layer, and this one lies over process_group: compute each rank's logits, such as "
                "F.linear(hidden, weight), and gather them along the last dimension"
            )
        logits = self.operands(hidden_states).logits()
        return _chunked.transform_logits(logits, self.options.get("logit_scale"), self.options.get("softcap"))

    def with_shift(self, shift: int) -> LinearCrossEntropyLoss:
        """Returns this loss for labels that are shifted by `shift`; options are shared."""
        if shift == self.shift:
            return self
        other = copy.copy(self)
        other.shift = shift
        return other

    def with_ignore_index(self, ignore_index: int) -> LinearCrossEntropyLoss:
        """Returns this loss with another label that counts for nothing; options are shared."""
        other = copy.copy(self)
        other.ignore_index = check_ignore_index(ignore_index)
        return other

    def without_training_options(self) -> LinearCrossEntropyLoss:
        """The mean cross entropy of the same logits, as an evaluation reports it: without label_smoothing, z_loss, class_weight and the
        like."""
        other = copy.copy(self)
        other.options = LossOptions({name: value for name, value in self.options.items() if name not in OF_TRAINING})
        return other

    def num_valid(self, labels: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Divisor of the mean: how many labels the loss counts, after the shift, an int64 scalar on labels' device, not waited for;
        with class_weight the sum of their class weights, fp32. Where the layer lies over ranks, labels past its end count as well, unless
        vocab_size says where that is; `check_labels` reports them. Raises ArgumentError for class weights that lie over ranks."""
        if _depths.are_several(self.shift):
            raise errors.ArgumentError(f"shift is {self.shift}, and one target is counted; count each depth's with_shift(...)")
        targets = targets_of(labels, self.shift, ignore_index=self.ignore_index, cu_seqlens=cu_seqlens)
        end = _heads.shape_of(self.output_embeddings)[0] if self.options.get("process_group") is None else self.options.get("vocab_size")
        counted = (targets != self.ignore_index) & (targets >= 0)
        counted = counted if end is None else counted & (targets < end)
        class_weight = self.options.get("class_weight")
        if class_weight is None:
            return counted.sum()
        if self.options.get("process_group") is not None:
            raise errors.ArgumentError(
                "class_weight lies over process_group, and the labels' weights are added up here: give normalize_by or num_valid_tokens "
                "the sum of all valid labels' class weights, as a scalar tensor"
            )
        return torch.where(counted, class_weight.float().to(targets.device)[torch.where(counted, targets, 0)], 0.0).sum()

    def __repr__(self) -> str:
        vocab_size, hidden_size = _heads.shape_of(self.output_embeddings)
        return (
            f"{type(self).__name__}(impl={self.actual_impl!r}, vocab_size={vocab_size}, hidden_dim={hidden_size}, "
            f"chunk_size={self.chunk_size}, compile={self.compile})"
        )


def parallel_of(options: Mapping[str, Any]) -> Parallel | None:
    """The ranks over which a loss's layer lies, from its options."""
    return _parallel.asked(**{name: value for name, value in options.items() if name in of_kind("ranks")})


def _check_for_chunks(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    temperature: Tensor | float | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    num_valid_tokens: Tensor | float | None = None,
    z_loss: float = 0.0,
    **_: Any,
) -> Tensor | float | None:
    """Raises where the chunked implementation would compute something else than flce, or nothing. Returns the temperature to divide by."""
    rows = temperature if isinstance(temperature, Tensor) else None
    optional = {"bias": bias, "class_weight": class_weight, "temperature": rows, "token_weight": token_weight}
    check_tensors(hidden=hidden, weight=weight, target=target, **optional)
    _arguments.check_shapes(hidden, weight, target)
    if class_weight is not None:
        _arguments.check_classes("class_weight", class_weight, weight.shape[0], hidden.device)
    _arguments.check_token_weight(token_weight, reduction, target)
    _arguments.check_one_divisor(num_valid_tokens, class_weight, z_loss)
    if rows is None:
        return temperature_number(temperature)
    _arguments.check_temperature(rows, target)
    return rows


def extract_hidden_states(outputs: Any) -> Tensor:
    """The last hidden states in what a model returned: a tensor, the first tensor of a tuple, or of a mapping (a Hugging Face output)
    last_hidden_state, else the last of hidden_states. Raises ArgumentError naming what is there."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("last_hidden_state")
        if found is None and outputs.get("hidden_states"):
            found = outputs["hidden_states"][-1]
        if isinstance(found, Tensor):
            return found
        raise errors.ArgumentError(
            f"outputs has {', '.join(outputs)}, but neither last_hidden_state nor hidden_states: "
            "call the model with output_hidden_states=True, or "
            "prepare it with flce.huggingface.return_hidden_states"
        )
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise errors.ArgumentError(
        f"outputs is a {type(outputs).__name__}; allowed are a tensor, a tuple that begins with one, a Hugging Face output"
    )
