"""Finds the formula of a model's own loss: the model's forward is replayed on logits of a few rows, and its loss compared with their cross
entropy. The caller's labels are tried, and others beside them, so that a later batch has no padding or masked sequence that was not
tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce import errors
from flce.adapters._shared_rows import SharedRows
from flce.call._heads import LARGE_LOGIT
from flce.call._targets import shift_labels

_MASKS = ("attention_mask", "decoder_attention_mask")
_TOLERANCE = 1e-5  # relative to the loss: both are of the same logits, in fp64
_CLASSES_AT_ONCE = 2048  # labels of a replay: another weight of one of them by a tenth is beyond the tolerance
_MOST_REPLAYS = 256
_INSTEAD = "keep the model's own loss, or, where the cross entropy is what is wanted, say so by hand: shift=1 or shift=0"


class Meaning(NamedTuple):
    """How a model's own loss counts labels."""

    shift: int
    mask: str | None = None  # the argument where whose zeros a label does not count


class _Case(NamedTuple):
    what: str
    changes: dict[str, Any]  # arguments that the model is given instead of the caller's
    labels: Tensor
    aligned: Tensor | None


class _Loss(NamedTuple):
    case: _Case
    own: float
    logits: SharedRows
    beside: list[str]  # outputs that are losses, too


class Question(NamedTuple):
    """A step whose loss is to be understood. `replay` runs the model's own forward, given changed arguments and whether its loss function
    counts; a loss function that does not count gives 0."""

    name: str
    replay: Callable[[Mapping[str, Any], bool], Any]
    asks: bool  # whether the model calls model.loss_function
    arguments: Mapping[str, Any]
    labels: Tensor
    aligned: Tensor | None
    num_items: Tensor | int | None
    ignore_index: int
    decoder: bool  # whether its decoder reads what is made of labels
    shift: int  # the shift that is tried first
    by_hand: bool  # the caller has said so
    special: tuple[int, ...] = ()  # classes that the loss may treat in a way of their own
    # `replay` on logits that classes have in turn, a large and a small one; None: a loss of transformers', for which classes are alike.
    of_classes: Callable[[Mapping[str, Any], bool], Any] | None = None


def find(question: Question) -> tuple[Meaning, Tensor]:
    """The meaning of the model's own loss, and the logits that its forward has made of the output layer's rows. Raises ArgumentError, with
    both numbers, where the loss is no mean of the cross entropies that flce computes."""
    losses = [_loss(question, case) for case in _cases(question)]
    masks = [None, *(name for name in _MASKS if any(name in loss.case.changes for loss in losses))]
    for mask in masks:
        for shift in (question.shift, 1 - question.shift) if question.shift in (0, 1) else (question.shift, 1, 0):
            # A loss of no loss function does not know num_items_in_batch; flce divides by it.
            for count in dict.fromkeys((question.num_items, None)):
                if all(_alike(loss.own, _cross_entropy(question, loss, Meaning(shift, mask), count)) for loss in losses):
                    if question.by_hand:
                        return Meaning(question.shift, mask), losses[0].logits.rows
                    _compare_classes(question, Meaning(shift, mask), count, losses[0].logits.shape[-1])
                    return Meaning(shift, mask), losses[0].logits.rows
    if question.by_hand:
        return Meaning(question.shift), losses[0].logits.rows
    raise _refusal(question, losses)


def logits_in_turn(like: SharedRows) -> SharedRows:
    """Logits of which classes have a large and a small one in turn, at every position, so that no class has nearly the mean loss. The turns
    come in no period, so that a sample of the classes has both."""
    turns = torch.arange(like.shape[-1], device=like.rows.device, dtype=torch.float64) * 0.6180339887 % 1
    return SharedRows(LARGE_LOGIT * (turns < 0.5)[None], torch.zeros_like(like.places), like.dtype)


def _cases(question: Question) -> list[_Case]:
    labels, ignored = question.labels, question.ignore_index
    cases = [_Case("these labels", {}, labels, question.aligned)]
    if labels.dim() != 2 or labels.numel() == 0:
        return cases
    classes = [number for number in dict.fromkeys((*question.special, *range(7))) if number != ignored]
    tokens = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape) % len(classes)
    tokens = torch.tensor(classes, device=labels.device, dtype=labels.dtype)[tokens]
    partly = tokens.clone()
    partly[0, labels.shape[1] // 2 :] = ignored
    cases.append(_changed("labels of which half a sequence is ignored", question, partly))
    if labels.shape[0] > 1:
        partly = partly.clone()
        partly[-1] = ignored
        cases.append(_changed("labels of which a whole sequence is ignored", question, partly))
    for name in _MASKS:
        mask = question.arguments.get(name)
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            padded = mask.clone()
            padded[0, -max(1, labels.shape[1] // 3) :] = 0
            cases.append(_changed(f"labels that count where {name} is 0", question, tokens, {name: padded}))
    return cases


def _compare_classes(question: Question, meaning: Meaning, count: Tensor | int | None, vocab_size: int) -> None:
    """Has the model's own loss count each class as a label; an even sample of them where the batch has few positions. Raises ArgumentError
    where one counts in a way of its own, such as with a weight."""
    of_classes = question.of_classes
    if of_classes is None or question.labels.dim() != 2:
        return
    counts = torch.ones_like(question.labels, dtype=torch.bool)
    if meaning.mask is not None:
        counts &= question.arguments[meaning.mask].to(counts.device) != 0
    if question.aligned is None:
        counts[:, : meaning.shift] = False
    places = counts.flatten().nonzero()[:_CLASSES_AT_ONCE, 0]
    classes = torch.arange(vocab_size, device=places.device, dtype=question.labels.dtype)
    classes = classes[classes != question.ignore_index]
    replays = min(-(-len(classes) // max(len(places), 1)), _MOST_REPLAYS)
    sample = min(len(classes), replays * len(places))
    classes = classes[torch.arange(sample, device=places.device) * len(classes) // max(sample, 1)]

    def losses_of(some: Tensor) -> tuple[float, float]:
        labels = torch.full_like(question.labels, question.ignore_index)
        labels.view(-1)[places[: len(some)]] = some
        loss = _loss(question._replace(replay=of_classes), _changed("labels of each class", question, labels))
        return loss.own, _cross_entropy(question, loss, meaning, count)

    for some in classes.tensor_split(max(replays, 1)):
        if _alike(*(wrong := losses_of(some))):
            continue
        halves: Any = some.tensor_split(2)
        while len(some) > 1 and (differing := [(half, both) for half in halves if not _alike(*(both := losses_of(half)))]):
            some, wrong = differing[0]
            halves = some.tensor_split(2)
        what = f"class {some[0].item()}" if len(some) == 1 else f"one of the classes {some[0].item()} to {some[-1].item()}"
        raise errors.ArgumentError(
            f"{question.name}'s own loss counts {what} in a way of its own, such as with a weight: it is {wrong[0]:.6g} for labels of each "
            f"of these classes, and their cross entropy is {wrong[1]:.6g}; {_INSTEAD}"
        )


def _changed(what: str, question: Question, labels: Tensor, more: Mapping[str, Any] | None = None) -> _Case:
    aligned = None if question.aligned is None else labels
    changes = {"labels": labels, **(more or {})} | ({} if aligned is None else {"shift_labels": aligned})
    if question.decoder:  # not made of these labels, which the model may refuse
        changes["decoder_input_ids"] = torch.zeros_like(labels)
    return _Case(what, changes, labels, aligned)


def _loss(question: Question, case: _Case) -> _Loss:
    outputs = question.replay(case.changes, True)
    loss, logits = outputs.get("loss"), outputs.get("logits")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise errors.ArgumentError(f"the forward of {question.name} gives no loss for labels {list(case.labels.shape)}")
    if not isinstance(logits, SharedRows):
        raise errors.ArgumentError(
            f"the forward of {question.name} does with logits what cannot be followed; it gives a {type(logits).__name__} for them"
        )
    own = float(loss.detach().double())
    if question.asks:  # without what is added to it, which is carried
        own -= float(question.replay(case.changes, False)["loss"].detach().double())
    beside = [name for name, value in outputs.items() if name != "loss" and name.endswith("loss") and isinstance(value, Tensor)]
    return _Loss(case, own, logits, [] if question.asks else beside)


def _targets(question: Question, case: _Case, meaning: Meaning) -> Tensor:
    labels = case.labels
    if meaning.mask is not None:
        mask: Any = case.changes.get(meaning.mask, question.arguments.get(meaning.mask))
        labels = labels.masked_fill(mask.to(labels.device) == 0, question.ignore_index)
    if case.aligned is not None and meaning.shift == 1:
        return case.aligned
    return shift_labels(labels, meaning.shift, ignore_index=question.ignore_index)


def _each(question: Question, loss: _Loss, meaning: Meaning) -> tuple[Tensor, Tensor] | None:
    """Cross entropies of all positions, and which of them count. None where labels are not one for each position."""
    targets, (rows, places) = _targets(question, loss.case, meaning), (loss.logits.rows, loss.logits.places)
    if targets.shape != places.shape:
        return None
    targets = targets.to(rows.device)
    counted = (targets != question.ignore_index) & (targets >= 0) & (targets < rows.shape[-1])
    losses = rows.logsumexp(dim=-1)[places] - rows[places, torch.where(counted, targets, 0)]
    return torch.where(counted, losses, 0.0), counted


def _cross_entropy(question: Question, loss: _Loss, meaning: Meaning, count: Tensor | int | None) -> float:
    found = _each(question, loss, meaning)
    if found is None:
        return math.inf
    return (found[0].sum() / (found[1].sum() if count is None else count)).item()


def _alike(own: float, mine: float) -> bool:
    """A mean over no label is NaN in models, and 0 in flce."""
    return (math.isnan(own) and math.isnan(mine)) or abs(own - mine) <= _TOLERANCE * max(abs(own), abs(mine), 1e-6)


def _refusal(question: Question, losses: list[_Loss]) -> errors.ArgumentError:
    def number(loss: _Loss, shift: int) -> float:
        return _cross_entropy(question, loss, Meaning(shift), question.num_items)

    nearer = min((question.shift, 1 - question.shift), key=lambda shift: sum(not _alike(loss.own, number(loss, shift)) for loss in losses))
    wrong = next((loss for loss in losses if not _alike(loss.own, number(loss, nearer))), losses[0])
    factors = [_factor([(loss.own, number(loss, shift)) for loss in losses]) for shift in (1, 0)]
    if wrong.beside:
        cause = f"it contains {', '.join(wrong.beside)}, with what weight is not known (output_router_logits=False switches routers' off)"
    elif factor := factors[0] or factors[1]:
        cause = f"it is {factor:.4g} times as large"
    elif any(_is_mean_of_sequences(question, losses, shift) for shift in (1, 0)):
        cause = "it is the mean of the sequences' own means"
    elif wrong.case.changes:
        cause = f"it counts {wrong.case.what} in a way of its own"
    else:
        cause = "it is another function of logits and labels, or contains something beside them"
    return errors.ArgumentError(
        f"{question.name}'s own loss for {wrong.case.what} is {wrong.own:.6g} where logits are those of a few rows, and the cross entropy "
        f"of these logits is {number(wrong, 1):.6g} with labels shifted by 1, and {number(wrong, 0):.6g} with none: {cause}; {_INSTEAD}"
    )


def _factor(pairs: list[tuple[float, float]]) -> float | None:
    """The factor by which all first numbers are larger than the second ones; None where it is not one number."""
    ratios = [own / mine for own, mine in pairs if abs(mine) > 1e-6]
    return ratios[0] if ratios and all(abs(ratio - ratios[0]) <= _TOLERANCE * abs(ratios[0]) for ratio in ratios) else None


def _is_mean_of_sequences(question: Question, losses: list[_Loss], shift: int) -> bool:
    for loss in losses:
        found = _each(question, loss, Meaning(shift))
        if found is None or found[0].dim() != 2:
            return False
        means = found[0].sum(dim=1) / found[1].sum(dim=1)
        ways = (means.mean(), means.nanmean(), means.nan_to_num().mean())  # by what a sequence without labels counts
        if not any(_alike(loss.own, way.item()) for way in ways):
            return False
    return True
