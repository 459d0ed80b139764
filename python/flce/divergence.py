"""`linear_divergence`: the divergence of a student's and a teacher's whole softmaxes, from their hidden states and output layers."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flce import errors
from flce.call import _formats, _spec_text
from flce.call._arguments import check_classes, refuse_dtensor, refuse_tangent
from flce.call._checks import DTYPES, HIDDEN_MULTIPLE
from flce.call._options import OPTIONS, retain_choice
from flce.call._targets import check_tensors
from flce.core import _autograd, checks
from flce.core._frame import is_hidden_major
from flce.core._retain import Retain
from flce.operators import _divergence
from flce.parallel import _parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_REDUCTIONS = ("none", "sum", "mean")
LEAST_MIXTURE = 2.0**-10  # distance of a beta that is neither 0 nor 1 from both


class Divergence(NamedTuple):
    """Results of `linear_divergence` where an entropy is asked for too; None for what was not."""

    divergence: Tensor
    student_entropy: Tensor | None
    teacher_entropy: Tensor | None


def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: Tensor | float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_logit_scale: float | None = None,
    student_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "none",
    return_student_entropy: bool = False,
    return_teacher_entropy: bool = False,
    teacher_ids_map: Tensor | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    workspace_limit_bytes: Any = None,
    retain_in_grad_weight: bool | None = None,
) -> Tensor | Divergence:
    """Divergence of the softmaxes p (student's) and q (teacher's) of every token over the whole vocabulary, without either [N, V] in
    memory: KL(q ‖ p) at a beta of 0, KL(p ‖ q) at 1, and between them (1 − beta) · KL(p ‖ m) + beta · KL(q ‖ m) with the mixture
    m = (1 − beta) · p + beta · q (Agarwal et al., arXiv 2306.13649, with the roles of beta that TRL gives them). Gradients go to the
    student alone.

    Args:
        student_hidden: [..., D_s] fp32, bf16 or fp16, on the CPU or a CUDA device. On a GPU kernels need cuBLASLt, which torch brings.
        student_weight: [V, D_s] of the same dtype, or the view `w.t()` of a [D_s, V]; V is at least 2.
        teacher_hidden: [..., D_t], with the student's leading dimensions, dtype and device. It may not require a gradient.
        teacher_weight: [V, D_t], lying in memory as student_weight does. It gets no gradient, even where it is a parameter.
        beta: 0, 1, or from 2^-10 to 1 - 2^-10; closer to an end fp32 has no digits for a mixture.
        temperature: both heads' logits are divided by it: a number or [...], 2^-100 to 2^100. A token whose tensor element is out of this
            range counts as masked, and `check_labels` reports it. The divergence is not multiplied by its square.
        student_bias, teacher_bias: [V], of the heads' dtype.
        student_logit_scale to teacher_softcap: as logit_scale and softcap of `linear_cross_entropy`, for each head.
        mask: [...] bool, True where a token counts. Others have a divergence and entropies of 0, and their gradients are 0, whatever their
            hidden states hold.
        token_weight: [...] of a floating dtype; a token's divergence is multiplied by it. It may require a gradient. What it has at
            masked tokens is not read.
        reduction: "none" gives [...], "sum" and "mean" a scalar; "mean" divides by the number of tokens that count. All fp32.
        return_student_entropy, return_teacher_entropy: also return the entropy of p, of q, [...] fp32 in nats, without a gradient.
        teacher_ids_map: [V] int64 or int32, the teacher's class of each student's class, for draft models with a smaller vocabulary
            (EAGLE-3): q is then the softmax over these classes alone. The teacher's rows for them are copied; teacher_bias is of all the
            teacher's classes. On a CPU a class that the teacher does not have is an ArgumentError, on a GPU torch's own device assert.
        workspace_limit_bytes: the most memory beyond the call's tensors and their gradients, in forward and in backward, what forward
            leaves to backward included: 4 bytes for each logit of one head, which spare a GPU's backward (but under torch.compile) the
            products of both. None: 64 MiB and 4 bytes for each element of student_hidden, and nothing is left to backward beyond the
            weight's gradient's own memory.
        retain_in_grad_weight: whether a GPU's forward may already allocate student_weight's gradient: it makes wider products there, and
            leaves logits to backward. None: where one divergence at a time waits for its backward, as far as was seen so far, and not
            while a CUDA graph is captured. Never under torch.compile, over ranks and in fp32, for a student_weight that is the view of a
            [D_s, V], and where the gradient's memory is too small to be worth it. Values and gradients differ in their last bits, and those
            of retained logits as docs/numerics.md has it.

    Returns:
        The divergence; with an entropy asked for `Divergence(divergence, student_entropy, teacher_entropy)`.

    Raises:
        As `linear_cross_entropy`.
    """
    for name, flag in (("return_student_entropy", return_student_entropy), ("return_teacher_entropy", return_teacher_entropy)):
        checks.flag(name, flag)
    _check_beta(beta)
    if reduction not in _REDUCTIONS:
        raise errors.ArgumentError(f"reduction is {reduction!r}; allowed are {', '.join(map(repr, _REDUCTIONS))}")
    if _autograd.transforms is not None and not torch.compiler.is_compiling() and _autograd.transforms() is not None:
        raise errors.UnsupportedTransformError("flce.linear_divergence is called under a transform of torch.func, which it does not have")
    tensors = {
        "student_hidden": student_hidden,
        "student_weight": student_weight,
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight,
    }
    others = {"student_bias": student_bias, "teacher_bias": teacher_bias, "temperature": temperature, "teacher_ids_map": teacher_ids_map}
    asked = _parallel.asked(process_group=process_group, vocab_start=vocab_start, vocab_size=vocab_size)
    _check_tensors(tensors, others | {"mask": mask, "token_weight": token_weight}, over_ranks=asked is not None)
    if asked is not None and teacher_ids_map is not None:
        raise errors.ArgumentError(
            "teacher_ids_map is given with process_group: a class of the student's may be another rank's of the teacher's; gather the "
            "teacher's rows of this rank's classes, and leave teacher_ids_map out"
        )
    if teacher_ids_map is not None:
        teacher_weight, teacher_bias = _mapped(teacher_ids_map, student_weight, teacher_weight, teacher_bias)
        tensors["teacher_weight"] = teacher_weight
    _check_heads(tensors, student_bias, teacher_bias, fewest=2 if asked is None else 0)
    tokens = student_hidden.shape[:-1]
    per_token = _per_token(tokens, student_hidden.device, temperature=temperature, mask=mask, token_weight=token_weight)
    options = _options(
        teacher_hidden.shape[-1], beta, student_logit_scale, student_softcap, teacher_logit_scale, teacher_softcap, teacher_bias is not None
    )
    retain = _retaining(retain_choice(retain_in_grad_weight).choice, student_weight, (student_hidden, student_bias))
    divergence, _, entropies, _ = _divergence.run(
        *_padded(student_hidden, student_weight),
        *_padded(teacher_hidden, teacher_weight.detach()),
        None if mask is None else torch.where(mask.reshape(-1), 0, _divergence.IGNORED),
        student_bias,
        None if teacher_bias is None else teacher_bias.detach(),
        per_token.get("temperature"),
        options,
        _spec_text.workspace_limit(workspace_limit_bytes),
        "" if asked is None else asked.text(),
        is_mixture(beta),
        retain.bits(),
    )
    divergence = divergence.view(tokens)
    counted = _counted(mask, temperature)
    if "token_weight" in per_token:
        weights = per_token["token_weight"].view(tokens)
        divergence = divergence * (weights if counted is None else torch.where(counted, weights, 0.0))
    if reduction != "none":
        divergence = divergence.sum()
        if reduction == "mean":
            divergence = divergence / (max(math.prod(tokens), 1) if counted is None else counted.sum().clamp_min(1))
    if not return_student_entropy and not return_teacher_entropy:
        return divergence
    student, teacher = (each.view(tokens) for each in entropies.unbind(0))
    return Divergence(divergence, student if return_student_entropy else None, teacher if return_teacher_entropy else None)


def _retaining(choice: int, weight: Tensor, others: tuple[Tensor | None, ...]) -> Retain:
    """Room for forward to leave logits to backward."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return Retain()
    gradient = any(each is not None and each.requires_grad for each in (weight, *others))
    return Retain(choice, gradient=gradient, weight=weight.requires_grad)


def _check_number(name: str, given: Any, least: float, most: float) -> None:
    if not isinstance(given, numbers.Real):
        raise errors.DTypeError(f"{name} is a {type(given).__name__}; it must be a number")
    if not least <= float(given) <= most:
        raise errors.ArgumentError(f"{name} is {given}; it must be from {least:g} to {most:g}")


def _check_beta(given: Any) -> None:
    _check_number("beta", given, 0.0, 1.0)
    if not is_mixture(given) and given not in (0, 1):
        raise errors.ArgumentError(f"beta is {given}; it must be 0, 1, or from 2^-10 to 1 - 2^-10: closer to an end take the end itself")


def is_mixture(beta: float) -> bool:
    """Whether a mixture of this beta has digits in fp32."""
    return LEAST_MIXTURE <= beta <= 1 - LEAST_MIXTURE


def _check_tensors(heads: dict[str, Tensor], others: dict[str, Any], over_ranks: bool) -> None:
    """Refuses what is no local, dense tensor, and tangents that would be dropped."""
    for name, given in heads.items():
        if given is None:
            raise errors.DTypeError(f"{name} is None; it must be a tensor")
    tensors = heads | {name: given for name, given in others.items() if name.endswith(("_bias", "_map")) or isinstance(given, Tensor)}
    check_tensors(**tensors)
    for name, given in tensors.items():
        refuse_dtensor(name, given, over_ranks)
        if given is not None and name != "token_weight":
            refuse_tangent(name, given)


def _counted(mask: Tensor | None, temperature: Any) -> Tensor | None:
    """Tokens that count; None where all do."""
    if not isinstance(temperature, Tensor):
        return mask
    in_range = (temperature >= checks.LEAST_TEMPERATURE) & (temperature <= checks.MOST_TEMPERATURE)
    return in_range if mask is None else mask & in_range


def _mapped(ids: Tensor, student_weight: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The teacher's head over the student's classes."""
    if student_weight.dim() != 2 or teacher_weight.dim() != 2:
        shapes = f"{list(student_weight.shape)} and {list(teacher_weight.shape)}"
        raise errors.ShapeError(f"student_weight and teacher_weight have shapes {shapes}; they must be [V, D]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise errors.DTypeError(f"teacher_ids_map has dtype {ids.dtype}; allowed are int64 and int32")
    if ids.shape != student_weight.shape[:1]:
        raise errors.ShapeError(f"teacher_ids_map has shape {list(ids.shape)}; it must be [V], [{student_weight.shape[0]}]")
    if ids.device != teacher_weight.device:
        raise errors.PlacementError(f"teacher_ids_map is on {ids.device}; it must be on teacher_weight's device, {teacher_weight.device}")
    classes = teacher_weight.shape[0]
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and bool(((ids < 0) | (ids >= classes)).any()):
        raise errors.ArgumentError(f"teacher_ids_map has a class that is not in [0, {classes}), which are the teacher's")
    if teacher_bias is not None:
        check_classes("teacher_bias", teacher_bias, classes, teacher_weight.device)
    turned = is_hidden_major(student_weight)
    with torch.no_grad():
        rows = teacher_weight.t().index_select(1, ids).t() if turned else teacher_weight.index_select(0, ids)
        return rows, None if teacher_bias is None else teacher_bias.index_select(0, ids)


def _check_heads(tensors: dict[str, Tensor], student_bias: Tensor | None, teacher_bias: Tensor | None, fewest: int) -> None:
    """`fewest`: classes that a weight has to have."""
    student = tensors["student_hidden"]
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dtype is not student.dtype:
            how = "dequantise it" if _formats.are_codes(tensor.dtype) else f"convert it with {name}.to({student.dtype})"
            allowed = f"student_hidden's, {student.dtype}: {how}"
            if tensor is student:
                allowed = "float32, bfloat16, float16"
            raise errors.DTypeError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}")
        if tensor.device != student.device or tensor.device.type not in ("cpu", "cuda"):
            raise errors.PlacementError(f"{name} is on {tensor.device}; it must be on student_hidden's device, a CPU or a CUDA GPU")
    for who in ("student", "teacher"):
        hidden, weight = tensors[f"{who}_hidden"], tensors[f"{who}_weight"]
        if weight.dim() != 2 or weight.shape[0] < fewest or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or weight.shape[1] == 0:
            raise errors.ShapeError(
                f"{who}_hidden has shape {list(hidden.shape)} and {who}_weight {list(weight.shape)}; they must be [..., D] and [V, D], "
                "of at least 2 classes"
            )
    teacher, weight = tensors["teacher_hidden"], tensors["student_weight"]
    if teacher.shape[:-1] != student.shape[:-1]:
        raise errors.ShapeError(
            f"teacher_hidden has shape {list(teacher.shape)}; it must be [..., D_t] with student_hidden's leading dimensions, "
            f"{list(student.shape[:-1])}"
        )
    if teacher.requires_grad:
        raise errors.ArgumentError("teacher_hidden requires a gradient, and only the student gets one; detach it")
    if tensors["teacher_weight"].shape[0] != weight.shape[0]:
        raise errors.ShapeError(
            f"teacher_weight has {tensors['teacher_weight'].shape[0]} classes and student_weight {weight.shape[0]}; they must be the same "
            "classes (slice off rows that only pad a vocabulary), or teacher_ids_map says which they are"
        )
    # A branch each: the tracer of torch.compile does not compare two symbolic answers. One row or column lies in both ways.
    apart = [each for each in (tensors["teacher_weight"], weight) if min(each.shape) > 1]
    if len({"[D, V]" if is_hidden_major(each) else "[V, D]" for each in apart}) > 1:
        raise errors.ArgumentError(
            "teacher_weight and student_weight lie in memory in different ways, one as [V, D] and one as the view of a [D, V]; copy them: "
            "student_weight.contiguous() and teacher_weight.contiguous()"
        )
    for name, bias in (("student_bias", student_bias), ("teacher_bias", teacher_bias)):
        if bias is not None:
            check_classes(name, bias, weight.shape[0], student.device)
            if bias.dtype is not student.dtype:
                raise errors.DTypeError(f"{name} has dtype {bias.dtype}; it must be student_hidden's, {student.dtype}")


def _per_token(tokens: torch.Size, device: torch.device, *, temperature: Any, mask: Any, token_weight: Any) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, given in (("temperature", temperature), ("mask", mask), ("token_weight", token_weight)):
        if not isinstance(given, Tensor):
            continue
        if given.shape != tokens:
            raise errors.ShapeError(f"{name} has shape {list(given.shape)}; it must be student_hidden's without the last, {list(tokens)}")
        if given.device != device:
            raise errors.PlacementError(f"{name} is on {given.device}; it must be on student_hidden's device, {device}")
        if name == "mask":
            if given.dtype is not torch.bool:
                raise errors.DTypeError(f"mask has dtype {given.dtype}; it must be bool, True where a token counts")
        elif not given.dtype.is_floating_point:
            raise errors.DTypeError(f"{name} has dtype {given.dtype}; it must be a floating dtype")
        else:
            made[name] = given.reshape(-1).float()
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise errors.ArgumentError("temperature requires a gradient; it has none here, detach it")
    else:
        _check_number("temperature", temperature, 2.0**-100, 2.0**100)
        if temperature != 1:
            made["temperature"] = torch.full((tokens.numel(),), float(temperature), dtype=torch.float32, device=device)
    for name, given in (("mask", mask), ("token_weight", token_weight)):
        if given is not None and not isinstance(given, Tensor):
            raise errors.DTypeError(f"{name} is a {type(given).__name__}; it must be a tensor")
    return made


def _options(
    teacher_hidden_size: int,
    beta: float,
    logit_scale: float | None,
    softcap: float | None,
    teacher_logit_scale: float | None,
    teacher_softcap: float | None,
    teacher_bias: bool,
) -> str:
    """The part of the kernel's Spec beside sizes and dtypes."""
    for name, value in (("student_logit_scale", logit_scale), ("student_softcap", softcap)):  # a Spec has no student
        option = OPTIONS[name.removeprefix("student_")]
        if value is not None and option.allows is not None and not option.allows(_spec_text.number(name, value)):
            raise errors.SpecError(f"{name} is {value}; it must be {option.allowed}")
    padded = -(-teacher_hidden_size // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
    parts = [_spec_text.spec_text(("loss",), logit_scale=logit_scale, softcap=softcap), f"teacher_hidden_size={padded}"]
    for name, value, default in (
        ("divergence_beta", beta, 0.0),
        ("teacher_logit_scale", teacher_logit_scale, 1.0),
        ("teacher_softcap", teacher_softcap, 0.0),
    ):
        if value is not None and (number := _spec_text.number(name, value)) != default:
            parts.append(f"{name}={number!r}")
    if teacher_bias:
        parts.append("teacher_bias")
    return ",".join([*(part for part in parts if part), "outputs=loss+lse+entropy"])


def _padded(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, D] and [V, D], with zeros up to a multiple of eight columns."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    missing = -hidden.shape[1] % HIDDEN_MULTIPLE
    if not missing:
        return hidden, weight
    wide = F.pad(weight.t(), (0, 0, 0, missing)).t() if is_hidden_major(weight) else F.pad(weight, (0, missing))
    return F.pad(hidden, (0, missing)), wide
