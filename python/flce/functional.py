"""`linear_cross_entropy`, `linear_logprobs`, `linear_logprobs_at` and `linear_topk_distillation`: the functions that most callers, and all
else here, use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn

from flce import errors
from flce.call import _call, _depths, _formats, _heads, _named
from flce.call._arguments import check_ids, check_one_divisor, check_teacher
from flce.call._options import call_options, parameters_of, taken_by, way_of
from flce.call._spec_text import is_support, number
from flce.call._targets import check_ignore_index, check_tensors, refuse_impossible_teachers, targets_of
from flce.operators import _codes
from flce.parallel import _parallel, _sharded_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.call import _signatures
    from flce.core._frame import CallOptions

    _Head: TypeAlias = Tensor | nn.Linear


_Function = TypeVar("_Function", bound=Callable[..., Any])
_PLACES = ("cross_entropy", "logprobs", "logprobs_at", "topk_distillation")
_SCALES = ("weight_scale", "weight_tensor_scale")
_NO_CODES = "does not read codes"
_WAYS = {place: {name: way_of(name) for name in taken_by(place)} for place in _PLACES}


def _signed(function: _Function) -> _Function:
    """Gives the function a signature with the options that the table has for it."""
    place = function.__name__.removeprefix("linear_")
    before = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = inspect.Signature([*before, *parameters_of(place)])  # type: ignore[attr-defined]
    return function


class _Given:
    """A caller's options by the ways that they go."""

    def __init__(self, place: str, weight: _Head, given: dict[str, Any]) -> None:
        ways = _WAYS[place]
        self.place, self.given = place, given
        self.options: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self.ranks: dict[str, Any] = {}
        for name, value in given.items():
            way = ways.get(name)
            if way is None and name in _SCALES:
                raise errors.ArgumentError(f"{name} is given, and linear_{place} {_NO_CODES}: give the weight that the codes stand for")
            if way is None:
                raise TypeError(f"linear_{place}() got an unexpected keyword argument {name!r}")
            getattr(self, way)[name] = value
        read: Any = weight
        fp8 = self.options.get("fp8")
        if isinstance(weight, nn.Module):
            read, self.tensors["bias"] = _heads.of_linear(weight, self.tensors.get("bias"), reads_codes=True, fp8=fp8)
        scale, tensor_scale = (self.tensors.pop(name, None) for name in _SCALES)
        self.codes = _formats.codes_of(read, scale, tensor_scale, fp8)
        if self.codes is not None and "weight_scale" not in ways:
            _formats.refuse_codes("weight", self.codes, f"and linear_{place} {_NO_CODES}")
        self.weight: Tensor = read if self.codes is None else self.codes.weight
        self.parallel = _parallel.asked(**self.ranks) if self.ranks else None
        if not isinstance(self.tensors.get("temperature"), Tensor):
            self.options["temperature"] = self.tensors.pop("temperature", None)
        self.shift, self.cu_seqlens = self.options.pop("shift", 0), self.tensors.pop("cu_seqlens", None)
        self.ignore_index = self.options.get("ignore_index", -100)

    def moves_target(self) -> bool:
        return type(self.shift) is not int or self.shift != 0 or self.cu_seqlens is not None

    def run(self, hidden: Tensor, target: Tensor, *, remembers: bool = False, **more: Any) -> Any:
        """`more`: options of the function itself. `remembers`: the function asks `_call.again` first, with all that it was given."""
        if self.moves_target():
            target = targets_of(target, self.shift, ignore_index=self.ignore_index, cu_seqlens=self.cu_seqlens)
        options = call_options(**self.options, **more)
        if self.codes is not None:
            return _codes.run(self.parallel, hidden, self.codes, target, options, **self.tensors)
        if self.parallel is None:
            made = _call.run(hidden, self.weight, target, options, **self.tensors)
        else:
            made = _sharded_call.run(self.parallel, hidden, self.weight, target, options, **self.tensors)
        if remembers:
            self._remember(options)
        return made

    def _remember(self, options: CallOptions) -> None:
        if torch.compiler.is_compiling() or self.moves_target() or any(each is not None for each in self.tensors.values()):
            return
        if self.parallel is None:
            _call.remember(self.place, self.given, options)
        elif not self.parallel.sequence:
            _call.remember(self.place, self.given, _sharded_call.over_ranks(options, self.parallel))


@overload
def linear_cross_entropy(hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyAlone]) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyWithLse]
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyWithLogprobs]
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyWithEntropy]
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyWithTop1]
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyWithLogSumSqProbs]
) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.CrossEntropyOrMore]
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(
    hidden: Sequence[Tensor], weight: _Head, target: Tensor | Sequence[Tensor], **options: Unpack[_signatures.CrossEntropyOfSeveral]
) -> tuple[Any, ...]: ...
@_signed
def linear_cross_entropy(hidden: Any, weight: _Head, target: Any, **options: Any) -> Any:
    """Cross entropy of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature against target, plus z_loss · lse² a token,
    without the logits in memory.

    Args:
        hidden: [..., D] fp32, bf16 or fp16, on the CPU or a CUDA device. Made contiguous if it is not. D not a multiple of 8 is padded (a
            copy of hidden and weight). Or a list of such tensors, for several losses of one weight: see below.
        weight: [V, D], of hidden's dtype, or fp32 beside 16-bit hidden states (kernels round it as they read it, within the limit; its
            gradient is fp32). The view `w.t()` of a contiguous [D, V] is taken as it lies. Or a plain torch.nn.Linear, whose weight and
            bias are taken; layers of other classes, and with hooks, are an ArgumentError. A tensor of torchao, and a layer of torchao or
            compressed-tensors, is read as codes and scales where it is in a format of the next lines, and else refused by name.
        weight_scale: weight is then codes, and frozen: [V, D] of torch.float8_e4m3fn (or uint8) with scales of rows [V], of blocks
            [ceil(V / 128), ceil(D / 128)] or one; or NVFP4, uint8 [V, D / 2] (the even column in the low half) with scales of
            torch.float8_e4m3fn (or uint8) [V, D / 16], not swizzled, and weight_tensor_scale, one number (None: 1). hidden is bf16 or fp16,
            D a multiple of 16. Results are those of `(codes * scales).to(hidden.dtype)`. Not with class_weight or grad_weight_out.
        target: [...] int64 or int32. Rows that hold ignore_index, and rows out of [0, V) (see `check_labels`), count for nothing.
        bias: [V].
        class_offset: [V] fp32, bf16 or fp16 (computed with in fp32), added to the logits behind the softcap and before the temperature:
            logit adjustment, log Q of sampled classes, a vocabulary mask. −inf rules a class out. Its gradient is made in fp32,
            by one multiplication more where there is a softcap or the weight's gradient has 16 bits.
        reduction: "none" gives [...], 0 for ignored rows; "sum", "mean" and "weighted_mean" a scalar. All fp32. "mean" divides by the
            number of valid rows, "weighted_mean" by the sum of their token_weight; with class_weight cross entropies are divided by the sum
            of these, each times its class's weight, and z-losses as without. With no valid row, loss and gradients are 0.
        num_valid_tokens: divisor of "mean": a number or a one-element tensor (fp32, int32, int64) on hidden's device, such as the count of
            all microbatches. None: the count of this call, made on the device. With class_weight this call's divisor is the sum of valid
            rows' class weights, and z_loss has another one, so that a number beside both is an ArgumentError.
        shift: 0 for targets that are aligned already, 1 for labels as a tokenizer gives them: position t predicts target[t + shift] of the
            same sequence, and the last `shift` positions of each are ignored. Sequences lie along target's last dimension, or, with
            cu_seqlens [num_sequences + 1], one behind the other in the flattened target; that dimension, or the flattened target, is 0 or
            at least `shift` long. A flattened target [N] with a shift and no cu_seqlens is an ArgumentError.
        logit_scale, softcap, label_smoothing, z_loss, class_weight: numbers, and [V] for class_weight, with torch's meaning of smoothing
            and weights.
        return_lse, return_logprobs, return_entropy: also return lse, the target's log-probability, the softmax's entropy (nats): [...]
            fp32, 0 for ignored rows, differentiable.
        temperature: logits are divided by it. A number, 2^-100 to 2^100, or [...] fp32, a row's own, which gets no gradient. A row whose
            temperature is out of this range counts as ignored, and `check_labels` reports it.
        token_weight: [...] of a real dtype (computed with in fp32): a row's loss, z_loss included, is multiplied by it. It belongs to the
            row as hidden does, so `shift` does not move it. Ignored rows may hold anything. It gets no gradient: where one is wanted,
            multiply the losses of reduction="none".
        dft: a row's loss is multiplied by the target's probability, which counts as a constant (dynamic fine-tuning, arXiv 2508.05629).
        batch_invariant: a row's loss (reduction "none"), lse, log-probability and entropy, and its row of hidden's gradient where the
            gradient from above is the same, have the same bits for every number of rows, every place of the row among them, and all
            contents of the others. On a CPU and, with bf16, on a Hopper GPU; elsewhere a PlanError. On a GPU nothing is left to backward,
            which computes logits again.
        fp8: a flce.Fp8: products of numbers in 8 bits, which take about 0.6 of the time on a Hopper GPU and change gradients by some
            percent (docs/python.md). Also on GPUs of sm_89, sm_120 and sm_121, and on a CPU. weight_scale goes with Fp8("e4m3") and a scale
            a row. Not with an fp32 weight beside 16-bit hidden states, batch_invariant, or label_smoothing under a softcap: an
            error says so.
        return_top1, return_log_sum_sq_probs: also return the class of the largest logit (the first of equal ones), int64, -1 for ignored
            rows, and log Σ p² over the softmax, fp32, 0 for ignored rows: [...], not differentiable.
        workspace_limit_bytes: the most memory that this call takes beyond its inputs, outputs and their gradients, in forward and backward:
            scratch, backward's fp32 sum of hidden's gradient (4·N·D bytes), and memory that spares backward the logits. None: 64 MiB +
            4·N·D, with nothing left to backward. Every loss that waits for its backward holds its own memory, unless this is a
            `flce.MemoryBudget`, which limits all of its calls together. Any number is allowed: memory beyond the useful amount is not
            taken.
        retain_in_grad_weight: whether forward may already allocate weight's gradient and leave logits there for backward. None: where one
            loss at a time waits for its backward, as far as was seen so far, and not while a CUDA graph is captured. On a GPU gradients are
            rounded once more where they come from retained logits; on a CPU their bits are the same.
        grad_weight_out: [V, D] of weight's dtype or fp32: backward adds weight's gradient to it, and autograd gets none for weight
            (`weight.grad` itself, or a trainer's main_grad). Contiguous (where weight is the view `w.t()` of a contiguous [D, V]: such a
            view), at a multiple of 16 bytes, D a multiple of 8; a slice of a flat buffer will do, rows or columns of a larger tensor will
            not. Eager mode only; hooks on the weight's gradient do not run. `torch.autograd.grad` of a weight that is a leaf, or of the
            leaf that weight is a view of, returns the gradient and leaves this buffer alone.
        process_group: the ranks over which the vocabulary lies, a ProcessGroup or a DeviceMesh of one dimension; None: weight is whole.
            weight, bias, class_weight and class_offset are then this rank's part, plain tensors or DTensors with Shard(0), of any number of
            rows; target and all else of tokens is the same on every rank. All ranks call together. Outputs are the same bits on every rank;
            hidden's gradient is the sum over ranks, weight's is this rank's part. See docs/tensor-parallel.md.
        sequence_parallel: hidden is this rank's part of the tokens: in one dimension, target's size is hidden's times the number of ranks.
            hidden is gathered in forward and again in backward, and its gradient is this rank's part.
        vocab_start: the label of weight's first row. None: the rows of lower ranks, added up, as ranks tell each other before each
            forward.
        vocab_size: classes of the whole layer; rows at and past it are padding and get no gradient. None: all ranks' rows.
        reduce_dtype: hidden's dtype (None) or torch.float32: in which the ranks' parts of hidden's gradient are made and added up.
        reduce_grad_hidden: False leaves this rank's part of hidden's gradient as it is, and backward without a collective, for trainers
            whose own layer before this one adds up the ranks' parts (Megatron's copy-to-region). A DTensor hidden gets a Partial gradient.
            Not with sequence_parallel or reduce_dtype.

    Several hidden states on one weight (multi-token prediction, deep supervision): hidden is a list, target a list of targets or one that
    all have, and rows of all of them are one call, so that weight is read and its gradient written once. num_valid_tokens,
    temperature, token_weight, shift and cu_seqlens are one for all, or a list. One target takes a list of shifts: [1, 2] where depth d
    predicts the label 1 + d positions on, [0, 0] where all predict the same.
    Hidden states are local tensors; with sequence_parallel their tokens lie in one dimension. class_weight and a mean go with z_loss or
    process_group in calls of one hidden state alone.
        loss_weights: a number for each hidden state.

    Returns:
        loss, or (loss, lse, logprobs, entropy, top1, log_sum_sq_probs) with those that were asked for. Of several hidden states each of
        these is a tuple with one for each; without a flag that tuple is returned. With loss_weights the sum of losses, each times its
        weight, comes first: (sum, losses), or (sum, losses, lse, ...).

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: naming the argument and what is allowed, before anything runs.
        SpecError, PlanError: an option out of its range; a limit that is too small.
        UnsupportedTransformError: under vmap and other torch.func transforms; on a second, forward-mode or batched derivative.
        UnavailableError, CompileError, DeviceError: the kernel cannot be had or run.
    """
    value = None if torch.compiler.is_compiling() else _call.again("cross_entropy", options, hidden, weight, target)
    if value is not None:
        return value
    loss_weights = options.pop("loss_weights", None)
    if _depths.are_several(hidden):
        return _of_several(hidden, weight, target, options, loss_weights)
    if loss_weights is not None:
        raise errors.ArgumentError("loss_weights is given and hidden is one tensor; it has a number for each of several hidden states")
    given = _Given("cross_entropy", weight, options)
    check_one_divisor(given.tensors.get("num_valid_tokens"), given.tensors.get("class_weight"), options.get("z_loss"))
    return given.run(hidden, target, remembers=True, return_loss=True)


def cross_entropy_of_groups(hidden: Tensor, weight: Tensor, target: Tensor, groups: tuple[Tensor, Tensor] | None, **options: Any) -> Any:
    """`linear_cross_entropy` where a class counts for nothing for rows of its own group, unless it is the target. `groups`: numbers of
    rows [N] and of weight's classes [V], int32, those below 0 of no group; None: there are none."""
    given = _Given("cross_entropy", weight, options)
    if groups is not None:
        given.tensors["row_group"], given.tensors["class_group"] = groups
    return given.run(hidden, target, return_loss=True)


def _of_several(hidden: Sequence[Tensor], weight: _Head, target: Any, options: dict[str, Any], loss_weights: Any) -> Any:
    """`linear_cross_entropy` of several hidden states: one call of all rows, and the depths' losses of the rows' losses."""
    reduction = options.pop("reduction", "mean")
    _depths.check_stated(hidden, target, options.get("shift"))
    each = _depths.split_options(options, len(hidden))
    given = _Given("cross_entropy", weight, options)
    depths = _depths.Depths(hidden, target, each, given.parallel, given.ignore_index)
    weights = _depths.check_weights(loss_weights, reduction, len(hidden))
    _depths.check_divisors(each, reduction, given.tensors.get("class_weight"), options.get("z_loss"), given.parallel)
    for name, value in depths.row_numbers().items():
        (given.tensors if isinstance(value, Tensor) else given.options)[name] = value
    made = given.run(depths.hidden, depths.target, return_loss=True, reduction="none")
    rows, *others = made if isinstance(made, tuple) else (made,)
    losses = depths.losses(depths.split(rows), reduction, given.weight, given.tensors.get("class_weight"))
    total = () if weights is None else (sum(w * loss for w, loss in zip(weights, losses, strict=True)),)
    values = (*total, losses, *(depths.split(other) for other in others))
    return values[0] if len(values) == 1 else values


@overload
def linear_logprobs(hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.LogprobsAlone]) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.LogprobsWithEntropy]
) -> tuple[Tensor, ...]: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.LogprobsWithTop1]
) -> tuple[Tensor, ...]: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.LogprobsWithLogSumSqProbs]
) -> tuple[Tensor, ...]: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: _Head, target: Tensor, **options: Unpack[_signatures.LogprobsOrMore]
) -> Tensor | tuple[Tensor, ...]: ...
@_signed
def linear_logprobs(hidden: Tensor, weight: _Head, target: Tensor, **options: Any) -> Any:
    """log p(target) of every token, with p the softmax of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature, without the
    logits in memory.

    Args:
        All as in `linear_cross_entropy`: hidden [..., D], weight [V, D], target [...] int64 or int32, bias [V], temperature a number or
        [...] fp32, batch_invariant for the same bits in whichever batch a token is.

    Returns:
        log-probabilities [...] fp32, 0 for ignored rows, differentiable; or (log-probabilities, entropy, top1, log_sum_sq_probs) with those
        that were asked for. The entropy (nats) is differentiable too.

    Raises:
        As `linear_cross_entropy`.
    """
    value = None if torch.compiler.is_compiling() else _call.again("logprobs", options, hidden, weight, target)
    if value is not None:
        return value
    return _Given("logprobs", weight, options).run(hidden, target, remembers=True, return_logprobs=True, reduction="none")


@overload
def linear_logprobs_at(hidden: Tensor, weight: _Head, ids: Tensor, **options: Unpack[_signatures.LogprobsAtAlone]) -> Tensor: ...
@overload
def linear_logprobs_at(
    hidden: Tensor, weight: _Head, ids: Tensor, **options: Unpack[_signatures.LogprobsAtWithLse]
) -> tuple[Tensor, ...]: ...
@overload
def linear_logprobs_at(
    hidden: Tensor, weight: _Head, ids: Tensor, **options: Unpack[_signatures.LogprobsAtWithEntropy]
) -> tuple[Tensor, ...]: ...
@overload
def linear_logprobs_at(
    hidden: Tensor, weight: _Head, ids: Tensor, **options: Unpack[_signatures.LogprobsAtOrMore]
) -> Tensor | tuple[Tensor, ...]: ...
@_signed
def linear_logprobs_at(hidden: Tensor, weight: _Head, ids: Tensor, **options: Any) -> Any:
    """log p of several classes of every token, with p the softmax of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature over
    the whole vocabulary, or over these classes alone, without the logits in memory.

    Args:
        ids: [..., K] int64 or int32, K from 1 to 1024: classes in any order, -1 for none. Equal ids are places of their own, whose
            gradients add up. Another number outside the vocabulary counts as none, and `check_labels` reports its row. With offsets [M].
        normalize: "vocabulary", or "support" for the softmax over a token's own ids, each as often as it is named: a sampler's top-k or
            top-p set, replayed in training. Of the weight these rows alone are read then; lse and entropy are the set's too.
        offsets: [N + 1] int32 or int64, for lists of different lengths: token i has ids[offsets[i]:offsets[i + 1]]. hidden is [N, D] then.
        max_ids: with offsets, as many as a token may have. None: as many as the longest list has, for which a GPU is waited for. Where a
            list is longer, or offsets are none, a CPU raises, and on a GPU the row counts as ignored and `check_labels` reports it.
        return_lse, return_entropy: as in `linear_cross_entropy`, 0 for tokens that name no class.
        The others as there.

    Returns:
        log-probabilities [..., K] fp32 (with offsets [M]), 0 at no class, differentiable; or (log-probabilities, lse, entropy) with those
        that were asked for.

    Raises:
        As `linear_cross_entropy`.
    """
    given = _Given("logprobs_at", weight, options)
    offsets, max_ids = given.tensors.pop("offsets", None), given.options.pop("max_ids", None)
    support = is_support(given.options.pop("normalize", "vocabulary"))
    lists = None
    if offsets is not None:
        lists = _named.lists_of(ids, offsets, max_ids)
        if given.parallel is None and isinstance(hidden, Tensor) and hidden.shape[:-1] != lists.ids.shape[:1]:
            raise errors.ShapeError(
                f"offsets has shape {list(offsets.shape)} and hidden {list(hidden.shape)}; they must be [N + 1] and [N, D]"
            )
        ids = lists.ids
    elif max_ids is not None:
        raise errors.ArgumentError("max_ids is given without offsets; ids [..., K] say themselves how many they are")
    check_tensors(hidden=hidden, ids=ids)
    if ids is None:
        raise errors.DTypeError("ids is None; it must be a tensor")
    if given.parallel is not None:
        ids = _sharded_call.local_rows(given.parallel, ids=ids)["ids"]
    top_k = check_ids("ids", ids, hidden, None, over_ranks=given.parallel is not None)
    target = torch.where((ids != _named.NONE).any(-1), 0, given.ignore_index)
    given.tensors |= {"teacher_ids": ids, "teacher_probs": torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)}
    made = given.run(hidden, target, return_loss=True, reduction="none", teacher_top_k=top_k, support=support, named_logprobs=True)
    named = made[0] if lists is None else lists.of_each_id(made[0])
    return (named, *made[1:]) if len(made) > 1 else named


@overload
def linear_topk_distillation(
    hidden: Tensor, weight: _Head, teacher_ids: Tensor, teacher_probs: Tensor, **options: Unpack[_signatures.DistillationAlone]
) -> Tensor: ...
@overload
def linear_topk_distillation(
    hidden: Tensor, weight: _Head, teacher_ids: Tensor, teacher_probs: Tensor, **options: Unpack[_signatures.DistillationWithLse]
) -> tuple[Tensor, ...]: ...
@overload
def linear_topk_distillation(
    hidden: Tensor, weight: _Head, teacher_ids: Tensor, teacher_probs: Tensor, **options: Unpack[_signatures.DistillationWithEntropy]
) -> tuple[Tensor, ...]: ...
@overload
def linear_topk_distillation(
    hidden: Tensor,
    weight: _Head,
    teacher_ids: Tensor,
    teacher_probs: Tensor,
    **options: Unpack[_signatures.DistillationWithTeacherLogprobs],
) -> tuple[Tensor, ...]: ...
@overload
def linear_topk_distillation(
    hidden: Tensor, weight: _Head, teacher_ids: Tensor, teacher_probs: Tensor, **options: Unpack[_signatures.DistillationOrMore]
) -> Tensor | tuple[Tensor, ...]: ...
@_signed
def linear_topk_distillation(hidden: Tensor, weight: _Head, teacher_ids: Tensor, teacher_probs: Tensor, **options: Any) -> Any:
    """hard_weight · CE(target) + (1 − hard_weight) · (−Σ_k q_k·log p(id_k)) of every token, with q the teacher's probabilities of its K
    most likely classes and p the softmax of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature: forward KL divergence from a
    sparse teacher up to the teacher's entropy, without the logits in memory.

    Args:
        teacher_ids: [..., K] int64 or int32, K from 1 to 1024: classes in any order, -1 for none. Probabilities of equal ids add up.
            Another number outside the vocabulary counts as none, and `check_labels` reports its row.
        teacher_probs: [..., K] of a floating dtype (computed with in fp32), with no gradient. Taken as they are: they need not add up to 1,
            so the mass beyond the top K is left out (divide by their sum for another meaning). 0 adds nothing, also where p is 0; a NaN
            makes its row's loss and gradients NaN. A row with a negative one (a log-probability) or one above 1 counts as ignored, and
            `check_labels` reports it. Probabilities at id -1 are not read.
        target: [...] int64 or int32, as in `linear_cross_entropy`. Rows that are ignored there count for nothing here, the teacher's part
            included; with hard_weight 0 a target says no more than this. None: rows whose ids are all -1 are ignored, all others take part.
        hard_weight: 0 to 1, the share of the target's cross entropy (label_smoothing included). It needs a target where it is not 0.
        shift, cu_seqlens: move the target, as in `linear_cross_entropy`. A teacher's numbers at a position are about the same position's
            softmax, so that teacher_ids and teacher_probs stay where they are.
        return_lse, return_entropy: as there. return_teacher_logprobs: also return log p(id_k), [..., K] fp32, 0 at no class and for ignored
            rows, not differentiable.
        The others as in `linear_cross_entropy`. A temperature divides these logits alone: teacher_probs are at it already, as
            `linear_topk` of this temperature has them. Multiply the loss by its square where that is wanted. z_loss is added, and
            token_weight multiplies the whole.

    Returns:
        loss, or (loss, lse, entropy, teacher_logprobs) with those that were asked for.

    Raises:
        As `linear_cross_entropy`.
    """
    given = _Given("topk_distillation", weight, options)
    rows = {"target": given.tensors.pop("target", None), "teacher_ids": teacher_ids, "teacher_probs": teacher_probs}
    if given.parallel is not None:
        rows = _sharded_call.local_rows(given.parallel, **rows)
    target, ids, probs = rows["target"], rows["teacher_ids"], rows["teacher_probs"]
    top_k = check_teacher(ids, probs, hidden, target, over_ranks=given.parallel is not None)
    if target is None:
        target = _rows_with_a_class(ids, given)
    elif given.moves_target():
        target = targets_of(target, given.shift, ignore_index=given.ignore_index, cu_seqlens=given.cu_seqlens)
    given.shift, given.cu_seqlens = 0, None
    target = refuse_impossible_teachers(target, ids, probs, given.ignore_index)
    given.tensors |= {"teacher_ids": ids, "teacher_probs": probs}
    return given.run(hidden, target, return_loss=True, teacher_top_k=top_k)


def _rows_with_a_class(teacher_ids: Tensor, given: _Given) -> Tensor:
    """A target that says which rows take part, by any class."""
    hard_weight = given.options.get("hard_weight", 0.0)
    if number("hard_weight", hard_weight) != 0:
        raise errors.ArgumentError(f"hard_weight is {hard_weight!r} and target is None; give a target or leave hard_weight at 0")
    if given.moves_target():
        raise errors.ArgumentError("shift and cu_seqlens move a target, and target is None; the teacher's classes stay where they are")
    ignored = check_ignore_index(given.ignore_index)
    return torch.where((teacher_ids != -1).any(-1), 1 if ignored == 0 else 0, ignored)
