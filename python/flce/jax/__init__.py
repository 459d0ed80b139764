"""flce for JAX: the output layer's linear + cross-entropy under jax.jit, jax.grad, jax.vmap and over a mesh, without logits in memory.

    import flce.jax

    loss, gradients = jax.value_and_grad(lambda h, w: flce.jax.linear_cross_entropy(h, w, labels, shift=1), argnums=(0, 1))(hidden, weight)

Kernels, plans, caches and records are those of `flce`. Calls are traced for jax's default device (`jax.default_device`), a CPU or a CUDA
GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flce import errors
from flce.call import _spec_text
from flce.core import checks
from flce.jax import _calls, _contrastive, _depths, _layer, _library, _mesh, _rows, _targets
from flce.jax._library import check_labels

__all__ = ["check_labels", "info_nce", "linear_cross_entropy", "linear_logprobs", "linear_logprobs_at", "linear_topk_distillation"]

_IGNORED = -100


with contextlib.suppress(errors.UnavailableError):  # the first call tells it
    _library.library()  # handlers for executables that another process has compiled


def _outputs(**flags: bool) -> tuple[str, ...]:
    for name, flag in flags.items():
        checks.flag(f"return_{name}", flag)
    return tuple(name for name in _calls.OUTPUTS if flags.get(name))


def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    weight_layout: str = "vocab_major",
    bias: Any = None,
    class_offset: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    class_weight: Any = None,
    temperature: Any = 1.0,
    token_weight: Any = None,
    num_valid_tokens: Any = None,
    dft: bool = False,
    batch_invariant: bool = False,
    shift: int | Sequence[int] = 0,
    cu_seqlens: Any = None,
    loss_weights: Sequence[float] | None = None,
    return_lse: bool = False,
    return_logprobs: bool = False,
    return_entropy: bool = False,
    return_top1: bool = False,
    workspace_limit_bytes: int | None = None,
    axis_name: str | None = None,
) -> Any:
    """Cross entropy of softcap(logit_scale · (hidden · weightᵀ + bias)) / temperature against labels, plus z_loss · lse² a token, without
    the logits in memory.

    Args:
        hidden: [..., D] float32, bfloat16 or float16. D not a multiple of 8 is padded (a copy of hidden and weight). Or a list of such
            arrays, for several losses of one weight: see below.
        weight: [V, D] with weight_layout "vocab_major", [D, V] with "hidden_major" (a Flax kernel); of hidden's dtype, or float32 beside
            16-bit hidden states (kernels round it as they read it; its gradient is float32). Nothing is guessed from its shape.
        labels: [...] int32 or int64. Rows that hold ignore_index, and rows out of [0, V) (see `check_labels`), count for nothing.
        bias: [V].
        reduction: "none" gives [...], 0 for ignored rows; "sum", "mean" and "weighted_mean" a scalar. All float32. "mean" divides by
            num_valid_tokens, or where that is None by the number of valid rows; "weighted_mean" by the sum of valid rows' token_weight;
            with class_weight cross entropies are divided by the sum of these, each times its class's weight, and z-losses as without.
            Where the divisor is 0, loss and gradients are 0.
        label_smoothing, z_loss, logit_scale, softcap, class_weight: numbers, and [V] for class_weight, with torch's meaning of smoothing
            and weights. A gradient of class_weight is an ArgumentError.
        class_offset: [V], added to the logits behind the softcap and before the temperature; −inf rules a class out. For its gradient,
            which is made in float32, backward computes the logits once more.
        temperature: logits are divided by it: a number, 2^-100 to 2^100, or [...] float32. A row whose temperature is out of this range
            counts as ignored, and `check_labels` reports it. A gradient of it is an ArgumentError.
        token_weight: [...]; a row's loss, z_loss included, is multiplied by it. `shift` does not move it.
        dft: a row's loss is multiplied by its label's probability, which counts as a constant (dynamic fine-tuning, arXiv 2508.05629).
        batch_invariant: a row's loss (reduction "none"), lse, log-probability and entropy, and its row of hidden's gradient where the
            gradient from above is the same, have the same bits in whichever batch it is. On a CPU and, with bfloat16, on a Hopper GPU;
            elsewhere a PlanError.
        shift: 0 for labels that are aligned already, 1 for labels as a tokenizer gives them: position t predicts labels[..., t + shift].
        cu_seqlens: [num_sequences + 1] int32 or int64, offsets of packed sequences in the flattened labels, which shift then does not
            cross. Labels past the last sequence are ignored. Where it does not begin with 0, or decreases, a CPU raises outside of jit;
            else all rows count as ignored, and `check_labels` reports it.
        return_lse, return_logprobs, return_entropy: also return lse, the label's log-probability, the softmax's entropy (nats): [...]
            float32, 0 for ignored rows, differentiable.
        return_top1: also return the class of the largest logit, [...] int32, -1 for ignored rows.
        workspace_limit_bytes: the most memory that this call takes beyond its arrays and their gradients, in forward and backward, what
            forward leaves to backward included. None: 64 MiB + 4·N·D, and for backward as much as the weight's gradient has: XLA owns that
            gradient's memory, so that it cannot be lent as in torch. Over a mesh the limit is on all tokens' calls together.
        axis_name: inside of jax.shard_map, the axis over which the vocabulary lies: weight and bias are this device's part, of equal size
            on all; hidden and labels are the same on all of them. Outputs are the same bits on all of them; hidden's gradient is the
            sum over them. Not with return_top1.

    Several hidden states on one weight (multi-token prediction, deep supervision): hidden is a list, labels a list of labels or one that
    all have, and rows of all of them are one call, so that weight is read and its gradient written once. num_valid_tokens, temperature,
    token_weight, shift and cu_seqlens are one for all, or a list. One array of labels takes a list of shifts: [1, 2] where depth d predicts
    the label 1 + d positions on, [0, 0] where all predict the same.
        loss_weights: a number for each hidden state.

    Returns:
        loss, or (loss, lse, logprobs, entropy, top1) with those that were asked for. Of several hidden states each of these is a tuple with
        one for each; without a flag that tuple is returned. With loss_weights the sum of losses, each times its weight, comes first: (sum,
        losses), or (sum, losses, lse, ...).

    Raises:
        ShapeError, DTypeError, ArgumentError: naming the argument, while the call is traced.
        SpecError, PlanError: an option out of its range; a limit that is too small.
        UnavailableError, CompileError, DeviceError: the kernel cannot be had. What fails when the call runs is an error of XLA's with
        flce's message.
    """
    outputs = _outputs(loss=True, lse=return_lse, logprobs=return_logprobs, entropy=return_entropy, top1=return_top1)
    return _cross_entropy(
        hidden,
        weight,
        labels,
        outputs=outputs,
        bias=bias,
        class_weight=class_weight,
        class_offset=class_offset,
        reduction=reduction,
        token_weight=token_weight,
        num_valid_tokens=num_valid_tokens,
        shift=shift,
        cu_seqlens=cu_seqlens,
        loss_weights=loss_weights,
        weight_layout=weight_layout,
        ignore_index=ignore_index,
        temperature=temperature,
        dft=dft,
        batch_invariant=batch_invariant,
        workspace_limit_bytes=workspace_limit_bytes,
        axis_name=axis_name,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
    )


def linear_logprobs(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    weight_layout: str = "vocab_major",
    bias: Any = None,
    class_offset: Any = None,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: Any = 1.0,
    batch_invariant: bool = False,
    shift: int = 0,
    cu_seqlens: Any = None,
    return_entropy: bool = False,
    return_top1: bool = False,
    workspace_limit_bytes: int | None = None,
    axis_name: str | None = None,
) -> Any:
    """log p(label) of every token, of one hidden state. Arguments and errors are those of `linear_cross_entropy`.

    Returns:
        log-probabilities [...] float32, 0 for ignored rows, differentiable; or (log-probabilities, entropy, top1) with those that were
        asked for.
    """
    if _depths.are_several(hidden):
        raise errors.DTypeError(f"hidden is a {type(hidden).__name__}; it must be an array: linear_cross_entropy takes several")
    return _cross_entropy(
        hidden,
        weight,
        labels,
        outputs=_outputs(logprobs=True, entropy=return_entropy, top1=return_top1),
        bias=bias,
        class_offset=class_offset,
        shift=shift,
        cu_seqlens=cu_seqlens,
        weight_layout=weight_layout,
        ignore_index=ignore_index,
        temperature=temperature,
        batch_invariant=batch_invariant,
        workspace_limit_bytes=workspace_limit_bytes,
        axis_name=axis_name,
        logit_scale=logit_scale,
        softcap=softcap,
    )


def _cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    outputs: tuple[str, ...],
    bias: Any,
    class_offset: Any,
    shift: Any,
    cu_seqlens: Any,
    weight_layout: str,
    ignore_index: int,
    temperature: Any,
    reduction: str = "none",
    class_weight: Any = None,
    token_weight: Any = None,
    num_valid_tokens: Any = None,
    loss_weights: Any = None,
    **options: Any,
) -> Any:
    if "top1" in outputs and options["axis_name"] is not None:
        raise errors.ArgumentError("return_top1 is given with axis_name; a part of the vocabulary does not know its place in the whole")
    of_rows = {"shift": shift, "cu_seqlens": cu_seqlens, "temperature": temperature, "token_weight": token_weight,
               "num_valid_tokens": num_valid_tokens}  # fmt: skip
    also = ("lse",) if _targets.has_two_divisors(reduction, class_weight, options.get("z_loss")) else ()
    several = _depths.are_several(hidden)
    given = _depths.of_each(hidden, labels, of_rows) if several else [{"hidden": hidden, "labels": labels, **of_rows}]
    shifts = [of_depth.pop("shift") for of_depth in given]
    weights = _depths.check_weights(loss_weights, reduction, hidden)
    for_all = {
        "weight": _layer.array("weight", weight),
        **_layer.arrays_of(bias=bias, class_weight=class_weight, class_offset=class_offset),
    }
    each = []
    for at, of_depth in enumerate(given):
        of = f"[{at}]" if several else ""
        _targets.check_reduction(reduction, of_depth["token_weight"], of_depth["num_valid_tokens"], of)
        _targets.check_one_divisor(of_depth["num_valid_tokens"], class_weight, options.get("z_loss"))
        checked = _layer.checked(weight_layout, ignore_index, of=of, **for_all, **of_depth)
        each.append({name: array for name, array in checked.items() if name not in for_all})

    def run(arrays: tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]) -> tuple[Any, ...]:
        for_all, each = arrays
        joined = _depths.Joined(each)
        target = joined.joined(
            _targets.shifted(of_depth["labels"], by, ignore_index, of_depth.get("cu_seqlens"))
            for of_depth, by in zip(each, shifts, strict=True)
        )
        rows = _rows.results_of(
            for_all | joined.rows(), target, (*outputs, *also), weight_layout=weight_layout, ignore_index=ignore_index, **options
        )  # fmt: skip
        made = [_targets.outputs(part, outputs, reduction, of_depth) for part, of_depth in zip(joined.split(rows), each, strict=True)]
        if not several:
            return made[0]
        losses, *others = zip(*made, strict=True)
        return (*(() if weights is None else (_depths.weighted_sum(weights, losses),)), losses, *others)

    like: list[Any] = [tuple(_rows_like(name, reduction, of_depth["hidden"]) for name in outputs) for of_depth in each]
    in_order = (*(() if weights is None else (None,)), *zip(*like, strict=True)) if several else like[0]
    return _mesh.run_in_auto_mode(run, (for_all, each), in_order)


def _rows_like(name: str, reduction: str, rows: jax.Array) -> jax.Array | None:
    """The array as whose rows an output lies; None for a scalar."""
    return None if name == "loss" and reduction != "none" else rows


def linear_topk_distillation(
    hidden: Any,
    weight: Any,
    teacher_ids: Any,
    teacher_probs: Any,
    *,
    labels: Any = None,
    hard_weight: float = 0.0,
    weight_layout: str = "vocab_major",
    bias: Any = None,
    class_offset: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: Any = 1.0,
    token_weight: Any = None,
    num_valid_tokens: Any = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_teacher_logprobs: bool = False,
    batch_invariant: bool = False,
    workspace_limit_bytes: int | None = None,
    axis_name: str | None = None,
) -> Any:
    """hard_weight · CE(labels) + (1 − hard_weight) · (−Σ_k q_k·log p(id_k)) of every token, with q the teacher's probabilities of its K
    most likely classes.

    Args:
        teacher_ids: [..., K] int32 or int64, K from 1 to 1024: classes in any order, -1 for none. Probabilities of equal ids add up.
        teacher_probs: [..., K], computed with in float32, taken as they are. A row with a negative one (a log-probability) or one above 1
            counts as ignored, and `check_labels` reports it. A gradient of them is an ArgumentError.
        labels: [...] int32 or int64, aligned. Rows that are ignored there count for nothing. None: rows whose ids are all -1 are ignored.
        hard_weight: 0 to 1, the share of the labels' cross entropy. It needs labels where it is not 0.
        return_teacher_logprobs: also return log p(id_k), [..., K] float32, 0 at no class and for ignored rows, without a gradient.
        The others as in `linear_cross_entropy`.

    Returns:
        loss, or (loss, lse, entropy, teacher_logprobs) with those that were asked for.
    """
    _targets.check_reduction(reduction, token_weight, num_valid_tokens)
    if labels is None and hard_weight:
        raise errors.ArgumentError(f"hard_weight is {hard_weight!r} and labels is None; give labels or leave hard_weight at 0")
    outputs = _outputs(loss=True, lse=return_lse, entropy=return_entropy)
    wanted = (*outputs, *(("teacher_logprobs",) if return_teacher_logprobs else ()))
    arrays = _layer.checked(
        weight_layout, ignore_index, hidden=hidden, weight=weight, bias=bias, temperature=temperature, token_weight=token_weight,
        class_offset=class_offset, num_valid_tokens=num_valid_tokens, teacher_ids=teacher_ids, teacher_probs=teacher_probs,
        **({} if labels is None else {"labels": labels}),
    )  # fmt: skip

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        ids, probs = arrays["teacher_ids"], arrays["teacher_probs"]
        target = arrays.get("labels")
        if target is None:
            target = _targets.rows_with_a_class(ids, ignore_index)
        rows = _rows.results_of(
            arrays,
            _targets.without_impossible_teachers(target, ids, probs, ignore_index),
            outputs,
            weight_layout=weight_layout,
            ignore_index=ignore_index,
            batch_invariant=batch_invariant,
            workspace_limit_bytes=workspace_limit_bytes,
            axis_name=axis_name,
            hard_weight=hard_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        return _targets.outputs(rows, wanted, reduction, arrays)

    return _mesh.run_in_auto_mode(run, arrays, tuple(_rows_like(name, reduction, arrays["hidden"]) for name in wanted))


def linear_logprobs_at(
    hidden: Any,
    weight: Any,
    ids: Any,
    *,
    normalize: str = "vocabulary",
    weight_layout: str = "vocab_major",
    bias: Any = None,
    class_offset: Any = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: Any = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    batch_invariant: bool = False,
    workspace_limit_bytes: int | None = None,
    axis_name: str | None = None,
) -> Any:
    """log p of several classes of every token, with p the softmax over the whole vocabulary, or over these classes alone.

    Args:
        normalize: "vocabulary", or "support" for the softmax over a token's own ids, each as often as it is named; lse and entropy too.
        ids: [..., K] int32 or int64, K from 1 to 1024: classes in any order, -1 for none. Equal ids are places of their own, whose
            gradients add up. Another number outside the vocabulary counts as none, and `check_labels` reports its row.
        The others as in `linear_cross_entropy`; lse and entropy are 0 for tokens that name no class.

    Returns:
        log-probabilities [..., K] float32, 0 at no class, differentiable; or (log-probabilities, lse, entropy) with those that were asked
        for.
    """
    outputs = _outputs(loss=True, lse=return_lse, entropy=return_entropy)
    wanted = ("teacher_logprobs", *outputs[1:])
    arrays = _layer.checked(
        weight_layout, _IGNORED, hidden=hidden, weight=weight, bias=bias, class_offset=class_offset, temperature=temperature, ids=ids
    )

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        ids = arrays.pop("ids")
        rows = _rows.results_of(
            arrays | {"teacher_ids": ids, "teacher_probs": jnp.zeros(ids.shape, jnp.float32)},
            _targets.rows_with_a_class(ids, _IGNORED),
            outputs,
            named=True,
            support=_spec_text.is_support(normalize),
            weight_layout=weight_layout,
            ignore_index=_IGNORED,
            batch_invariant=batch_invariant,
            workspace_limit_bytes=workspace_limit_bytes,
            axis_name=axis_name,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        return _targets.outputs(rows, wanted, "none", arrays)

    return _mesh.run_in_auto_mode(run, arrays, (arrays["hidden"],) * len(wanted))


def info_nce(
    queries: Any,
    documents: Any,
    *,
    scale: Any = 1.0,
    positives: Any = None,
    negatives: Any = None,
    negative_log_q: Any = None,
    mask: Any = None,
    symmetric: bool = False,
    reduction: str = "mean",
    workspace_limit_bytes: int | None = None,
) -> Any:
    """−log softmax(scale · queries · documentsᵀ + negative_log_q) of every query at its positive document, without the [N, M] scores.

    Args:
        queries: [N, D] float32, bfloat16 or float16. Embeddings are taken as they are: normalise them before, where cosines are wanted.
        documents: [M, D] of the same dtype. All of them are in each query's softmax. Both get gradients.
        scale: a number from 2^-100 to 2^100, or an array of one element, which gets a gradient. Where an array is out of this range every
            query counts as ignored, and `check_labels` reports it.
        positives: [N] int32 or int64, the row of documents that belongs to each query; -100 for a query that counts for nothing. None: row
            i for query i.
        negatives: [N, K] int32 or int64, K from 1 to 1023: the rows of documents that a query meets beside its positive, instead of all
            of them; -1 for none, and one that is the query's positive is left out. Only rows that are named are read. Another number
            outside the documents counts as none, and `check_labels` reports it. Not with symmetric.
        negative_log_q: [M], finite, without a gradient: −log of the probability that a document was drawn with, added to its scores. Kept
            to 24 bits in 16-bit dtypes.
        mask: (of_queries, of_documents), [N] and [M] int32 or int64: a document whose number is the query's counts for nothing in that
            query's softmax, unless it is the query's positive, and with symmetric a query in a document's. Below 0 none is equal.
        symmetric: the mean of this loss and of that of each positive document among all queries, which takes no negative_log_q.
        reduction: "none" gives [N], 0 for ignored queries; "sum" and "mean" a scalar, float32. "mean" divides by the queries that count.
        workspace_limit_bytes: as in `linear_cross_entropy`; with symmetric each of the two losses has this limit.

    Over a mesh under jit queries stay where they are, and documents are gathered for both passes.

    Returns:
        The loss.
    """
    checks.flag("symmetric", symmetric)
    of_queries = {"positives": positives, "negatives": negatives}
    arrays = _layer.arrays_of(queries=queries, documents=documents, negative_log_q=negative_log_q, **of_queries)
    _contrastive.check(
        arrays["queries"], arrays["documents"], scale, arrays.get("positives"), arrays.get("negative_log_q"), reduction
    )  # fmt: skip
    arrays |= _contrastive.check_mask(mask, arrays["queries"], arrays["documents"])
    if "negatives" in arrays:
        _contrastive.check_negatives(arrays["negatives"], arrays["queries"].shape[0], symmetric)
    arrays["scale"] = jnp.asarray(scale, jnp.float32).reshape(())

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array]:
        return (_info_nce(arrays, symmetric, reduction, workspace_limit_bytes),)

    return _mesh.run_in_auto_mode(run, arrays, (_rows_like("loss", reduction, arrays["queries"]),))


def _info_nce(arrays: dict[str, jax.Array], symmetric: bool, reduction: str, workspace_limit_bytes: int | None) -> jax.Array:
    rows, classes, added, number = arrays["queries"], arrays["documents"], arrays.get("negative_log_q"), arrays["scale"]
    temperature, numbers = 1 / jax.lax.stop_gradient(number), [arrays.get(name) for name in ("of_queries", "of_documents")]
    forth, back = _contrastive.alone(rows, arrays.get("positives"), classes.shape[0])

    def one_way(rows: jax.Array, classes: jax.Array, target: jax.Array, *of_each: Any) -> jax.Array:
        if classes.shape[0] == 1:  # nothing to tell the positive from
            return jnp.zeros(target.shape if reduction == "none" else (), jnp.float32)
        if "negatives" in arrays:
            ids = _contrastive.named(target, arrays["negatives"], classes.shape[0], *of_each)
            found: jax.Array = linear_logprobs_at(
                rows, classes, ids, normalize="support", temperature=temperature, workspace_limit_bytes=workspace_limit_bytes
            )
            return _contrastive.reduced(-found[:, 0], target, classes.shape[0], number, reduction)
        inputs = {"hidden": rows, "weight": classes, "temperature": jnp.broadcast_to(temperature, target.shape)}
        if of_each[0] is not None:
            inputs |= _contrastive.groups_of(*of_each)
        made = _rows.results_of(
            inputs, target, ("loss",), weight_layout="vocab_major", ignore_index=_IGNORED, axis_name=None,
            workspace_limit_bytes=workspace_limit_bytes,
        )  # fmt: skip
        return _targets.outputs(made, ("loss",), reduction, {})[0]

    scaled, wide = _contrastive.watched(rows, number), classes
    if added is not None:
        more = jax.lax.stop_gradient(added.astype(jnp.float32) / number)
        scaled, wide = _contrastive.with_added(scaled, classes, more)
    loss = one_way(scaled, wide, forth, *numbers)
    if not symmetric:
        return loss

    def own(each: Any) -> Any:
        return each[: rows.shape[0]] if "positives" not in arrays else each[jnp.clip(forth, 0, classes.shape[0] - 1)]

    exchanged = (None, None) if numbers[1] is None else (own(numbers[1]), numbers[0])
    return (loss + one_way(_contrastive.watched(own(classes), number), rows, back, *exchanged)) / 2
