"""flce.compat.liger: every loss, metric and gradient against its formula in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat_support import DTYPES, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor

from flce.compat.liger import (
    CrossEntropyOutput,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDFunction,
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
METRICS = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def expected(
    layer: Layer,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    use_token_scaling: bool = False,
    **_: Any,
) -> CrossEntropyOutput:
    """Outputs in the layer's fp64."""
    logits = layer.logits(softcap)
    valid = layer.target != ignore_index
    class_weight = None if ce_weight is None else ce_weight.double()
    cross_entropy = F.cross_entropy(
        logits, layer.target, class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    lse = logits.logsumexp(-1)
    z_loss = torch.where(valid, lse_square_scale * lse.square(), 0.0)
    safe = torch.where(valid, layer.target, 0)
    if use_token_scaling:
        probability = (logits.gather(1, safe[:, None])[:, 0] - lse).exp().detach()
        cross_entropy, z_loss = cross_entropy * probability, z_loss * probability
    tokens = torch.where(valid, logits.argmax(-1), -1)
    accuracy = ((tokens == layer.target) & valid).double()
    count = valid.sum()
    if reduction == "none":
        return CrossEntropyOutput(cross_entropy + z_loss, z_loss.detach(), accuracy, tokens)
    accuracy = accuracy.sum() / count
    if reduction == "sum":
        return CrossEntropyOutput((cross_entropy + z_loss).sum(), z_loss.sum().detach(), accuracy, tokens)
    by = count if class_weight is None else (class_weight[safe] * valid).sum()
    count = count.clamp(min=1)
    return CrossEntropyOutput(
        cross_entropy.sum() / by.clamp(min=1e-9) + z_loss.sum() / count, z_loss.sum().detach() / count, accuracy, tokens
    )


def check(layer: Layer, dtype: torch.dtype, **options: Any) -> None:
    actual = liger_fused_linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, **options, **METRICS)
    assert isinstance(actual, CrossEntropyOutput)
    exact = layer.in_double()
    right = expected(exact, **options)
    assert actual.loss.dtype == torch.float32
    assert_close(actual.loss, right.loss, dtype, "loss", output=True)
    assert_close(actual.z_loss, right.z_loss, dtype, "z_loss", output=True, factor=2.0)
    assert actual.token_accuracy is not None and right.token_accuracy is not None
    torch.testing.assert_close(actual.token_accuracy, right.token_accuracy.float())
    assert actual.predicted_tokens is not None and actual.predicted_tokens.dtype is torch.int64
    assert torch.equal(actual.predicted_tokens, right.predicted_tokens)
    assert not any(metric.requires_grad for metric in (actual.z_loss, actual.token_accuracy, actual.predicted_tokens) if metric is not None)
    check_gradients([actual.loss], [right.loss], layer, exact)


def class_weights(device: str, vocab_size: int = 63) -> Tensor:
    return (torch.rand(vocab_size, generator=torch.Generator().manual_seed(2)) + 0.5).to(device)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"lse_square_scale": 1e-2},
    {"use_token_scaling": True},
    {"lse_square_scale": 1e-2, "label_smoothing": 0.2, "softcap": 5.0, "use_token_scaling": True},
]


@dtypes
@reductions
@pytest.mark.parametrize("weighted", [False, True], ids=["", "ce_weight"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_losses_metrics_and_gradients(device: str, dtype: torch.dtype, reduction: str, weighted: bool, options: dict[str, Any]) -> None:
    """Upstream gradients differ from 1, and from row to row with "none"."""
    layer = make_layer(device, dtype, bias=True)
    check(layer, dtype, reduction=reduction, ce_weight=class_weights(device) if weighted else None, **options)


@dtypes
@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 42])
def test_predicted_tokens_with_any_ignored_class(device: str, dtype: torch.dtype, ignore_index: int) -> None:
    layer = make_layer(device, dtype, ignore_index=ignore_index)
    assert int((layer.target == ignore_index).sum()) > 3
    for reduction in ("mean", "none"):
        check(layer, dtype, reduction=reduction, ignore_index=ignore_index)


@dtypes
@pytest.mark.parametrize(("num_tokens", "hidden_size", "vocab_size"), [(188, 31, 123), (256, 256, 1024)])
def test_large_logits_of_weights_that_are_all_positive(
    device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.rand(vocab_size, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    target = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(device)
    layer = Layer(hidden, weight, target, None)
    tolerance = {"atol": 1e-5, "rtol": 5e-4} if dtype is torch.float32 else {"atol": 5e-3, "rtol": 5e-2}
    exact = layer.in_double()
    loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)
    right = expected(exact).loss
    torch.testing.assert_close(loss, right.float(), **tolerance)
    loss.backward()
    right.backward()
    for leaf, wanted in zip(layer.leaves(), exact.leaves(), strict=True):
        torch.testing.assert_close(leaf.grad, wanted.grad.to(dtype), **tolerance)


@pytest.mark.parametrize("z_loss", [False, True])
@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("scaling", [False, True])
def test_what_is_returned_is_what_was_asked_for(device: str, z_loss: bool, accuracy: bool, tokens: bool, scaling: bool) -> None:
    layer = make_layer(device)
    flags = {"return_z_loss": z_loss, "return_token_accuracy": accuracy, "return_predicted_tokens": tokens}
    options = {"lse_square_scale": 1e-2, "use_token_scaling": scaling}
    right = expected(layer.in_double(), **options)
    module = LigerFusedLinearCrossEntropyLoss(**options, **flags)(layer.weight, layer.hidden, layer.target)
    function = liger_fused_linear_cross_entropy(layer.hidden, layer.weight, layer.target, **options, **flags)
    if not any(flags.values()):
        assert isinstance(module, Tensor) and isinstance(function, Tensor)
        assert torch.equal(module, function)
        return
    for output in (module, function):
        assert isinstance(output, CrossEntropyOutput)
        for asked, name in ((True, "loss"), (z_loss, "z_loss"), (accuracy, "token_accuracy"), (tokens, "predicted_tokens")):
            value, wanted = getattr(output, name), getattr(right, name)
            assert (value is not None) == asked
            if asked:
                torch.testing.assert_close(value, wanted.to(value.dtype))


def test_apply_takes_its_arguments_by_position(device: str) -> None:
    layer = make_layer(device, bias=True)
    arguments = (layer.hidden, layer.weight, layer.target, layer.bias, class_weights(device), -100, 1e-2, 0.1, "sum", 5.0)
    asked = LigerFusedLinearCrossEntropyFunction.apply(*arguments, True, torch.float32, True, True, True)
    right = expected(layer.in_double(), class_weights(device), -100, 1e-2, 0.1, "sum", 5.0, True)
    for value, wanted in zip(asked, (right.loss, right.z_loss, right.token_accuracy, right.predicted_tokens), strict=True):
        assert value is not None
        torch.testing.assert_close(value, wanted.to(value.dtype))
    loss, *others = LigerFusedLinearCrossEntropyFunction.apply(*arguments)
    assert others == [None, None, None]
    loss.backward()
    assert torch.equal(loss, LigerFusedLinearCrossEntropyFunction.apply(*arguments, False, None, False, False, False, None, None, 4)[0])


@dtypes
@reductions
def test_with_no_valid_row(device: str, dtype: torch.dtype, reduction: str) -> None:
    layer = make_layer(device, dtype, bias=True)
    layer.target.fill_(-100)
    output = liger_fused_linear_cross_entropy(
        layer.hidden,
        layer.weight,
        layer.target,
        layer.bias,
        reduction=reduction,
        lse_square_scale=0.1,
        ce_weight=class_weights(device),
        **METRICS,
    )
    assert isinstance(output, CrossEntropyOutput) and output.z_loss is not None and output.token_accuracy is not None
    assert not output.loss.any() and not output.z_loss.any()
    assert bool(output.token_accuracy.isnan().all()) == (reduction != "none")
    assert output.predicted_tokens is not None and bool((output.predicted_tokens == -1).all())
    output.loss.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in layer.leaves())


@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accum_dtype_under_autocast(device: str, dtype: torch.dtype, accum_dtype: torch.dtype | None) -> None:
    layer = make_layer(device, bias=True)
    with torch.autocast(device, dtype=dtype):
        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)(layer.weight, layer.hidden, layer.target, layer.bias)
        loss.backward()
    exact = layer.in_double()
    expected(exact).loss.backward()
    for leaf, right in zip(layer.leaves(), exact.leaves(), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is torch.float32
        assert_close(leaf.grad, right.grad, dtype, factor=3.0)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16])
def test_accum_dtype_changes_nothing(device: str, accum_dtype: torch.dtype) -> None:
    layer = make_layer(device, torch.bfloat16)
    gradients = [
        torch.autograd.grad(LigerFusedLinearCrossEntropyLoss(accum_dtype=each)(layer.weight, layer.hidden, layer.target), layer.leaves())
        for each in (None, accum_dtype)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": -0.1}, {"label_smoothing": 1.1}, {"reduction": "batchmean"}, {"softcap": 0.0}, {"softcap": -1.0}],
    ids=str,
)
def test_the_constructor_asserts(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=next(iter(options))):
        LigerFusedLinearCrossEntropyLoss(**options)


@pytest.mark.parametrize("ce_weight", [torch.ones(62), torch.ones(63, dtype=torch.int64)], ids=["length", "dtype"])
def test_class_weights_that_do_not_fit(ce_weight: Tensor) -> None:
    layer = make_layer()
    with pytest.raises(AssertionError, match="ce_weight"):
        liger_fused_linear_cross_entropy(layer.hidden, layer.weight, layer.target, ce_weight=ce_weight)
    with pytest.raises(AssertionError, match="ce_weight"):
        LigerFusedLinearCrossEntropyLoss(ce_weight=ce_weight)(layer.weight, layer.hidden, layer.target)


def test_a_reduction_of_flce_alone_is_refused() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="reduction is 'weighted_mean'"):
        liger_fused_linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction="weighted_mean")


def test_class_weights_may_be_of_any_floating_dtype(device: str) -> None:
    layer = make_layer(device, torch.bfloat16)
    losses = [
        liger_fused_linear_cross_entropy(layer.hidden, layer.weight, layer.target, ce_weight=class_weights(device).bfloat16().to(dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def jsd(student: Layer, teacher: Layer, labels: Tensor | None, beta: float, temperature: float = 1.0, ignore_index: int = -100) -> Tensor:
    """Mean of the divergences in fp64."""
    of_student, of_teacher = (layer.logits(temperature=temperature).log_softmax(-1) for layer in (student, teacher))
    of_teacher = of_teacher.detach()
    if beta == 0:
        rows = of_teacher.exp() * (of_teacher - of_student)
    elif beta == 1:
        rows = of_student.exp() * (of_student - of_teacher)
    else:
        mixture = torch.logaddexp(of_teacher + math.log(beta), of_student + math.log(1 - beta))
        rows = beta * of_teacher.exp() * (of_teacher - mixture) + (1 - beta) * of_student.exp() * (of_student - mixture)
    counts = torch.ones(rows.shape[0], dtype=torch.bool) if labels is None else labels != ignore_index
    return rows.sum(-1)[counts.to(rows.device)].sum() / counts.sum().clamp(min=1)


@dtypes
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("labelled", [False, True])
def test_divergence_of_two_heads(dtype: torch.dtype, beta: float, labelled: bool, device: str) -> None:
    student, teacher = make_layer(device, dtype), make_layer(device, dtype, hidden_size=57)
    teacher.hidden.data.mul_(0.7)
    exact, of_teacher = student.in_double(), teacher.in_double()
    labels = student.target if labelled else None
    given = (student.hidden, student.weight, teacher.hidden, teacher.weight)
    right = jsd(exact, of_teacher, labels, beta, 1.7)
    for loss in (
        liger_fused_linear_jsd(*given, labels, beta, temperature=1.7),
        LigerFusedLinearJSD(beta, temperature=1.7)(*given, labels),
        LigerFusedLinearJSDFunction.apply(*given, labels, beta, -100, 1.7, torch.float32, "nvidia-triton", "default"),
    ):
        assert loss.dtype is torch.float32 and loss.dim() == 0
        assert_close(loss, right, dtype, "divergence", output=True, factor=4.0)
    check_gradients([loss], [right], student, exact)
    assert teacher.hidden.grad is None and teacher.weight.grad is None


def test_divergence_of_nothing_and_of_other_ignored_labels(device: str) -> None:
    student, teacher = make_layer(device), make_layer(device, hidden_size=57)
    given = (student.hidden, student.weight, teacher.hidden, teacher.weight)
    loss = liger_fused_linear_jsd(*given, torch.full_like(student.target, -100))
    assert loss == 0 and not torch.autograd.grad(loss, student.hidden)[0].any()
    labels = student.target.clamp(min=0)
    labels[::3] = 7
    right = jsd(student.in_double(), teacher.in_double(), labels, 0.5, ignore_index=7)
    assert_close(liger_fused_linear_jsd(*given, labels, ignore_index=7), right, torch.float32, "divergence", output=True, factor=4.0)
    with pytest.raises(AssertionError, match="shift_labels has shape"):
        liger_fused_linear_jsd(*given, labels[:-1])
    with pytest.raises(AssertionError, match="temperature is 0"):
        LigerFusedLinearJSD(temperature=0)
