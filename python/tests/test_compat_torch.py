"""flce.compat.torch against torch's own functions in fp64, and in torch's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat_support import Layer, make_layer
from torch import Tensor, nn

from flce import functional
from flce.compat.torch import _in_two_steps, linear_cross_entropy

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
VALUE = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 2e-3), torch.bfloat16: (5e-2, 5e-2)}
GRADIENT = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative to the largest element
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
OPTIONS = getattr(nn, "LinearCrossEntropyOptions", None)
of_torch_2_13 = pytest.mark.skipif(OPTIONS is None, reason="torch has no linear_cross_entropy")


def expected(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, weight: Tensor | None = None, **options: Any
) -> Tensor:
    """linear and cross_entropy, in the inputs' dtype."""
    classes = linear_weight.shape[:-1]
    logits = F.linear(input, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten())
    return F.cross_entropy(logits.reshape(*input.shape[:-1], *classes), target, weight, **options)


def check(dtype: torch.dtype, *tensors: Tensor, weight: Tensor | None = None, function: Any = linear_cross_entropy, **options: Any) -> None:
    """Value and gradients of (input, linear_weight, target, linear_bias)."""
    input, linear_weight, target, *bias = tensors
    actual = function(input, linear_weight, target, linear_bias=bias[0] if bias else None, weight=weight, **options)
    options = {name: value for name, value in options.items() if value is not None and name != "options"}
    exact = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]
    right = expected(*exact, weight=None if weight is None else weight.double(), **options)
    assert actual.dtype == dtype
    assert actual.shape == right.shape
    atol, rtol = VALUE[dtype]
    torch.testing.assert_close(actual.double(), right, atol=atol, rtol=rtol, equal_nan=True)
    upstream = torch.randn(right.shape, generator=torch.Generator().manual_seed(3)).to(actual)
    leaves, right_leaves = [t for t in tensors if t.requires_grad], [t for t in exact if t.requires_grad]
    gradients = torch.autograd.grad(actual, leaves, upstream)
    for one, other in zip(gradients, torch.autograd.grad(right, right_leaves, upstream.double()), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0, atol=GRADIENT[dtype] * max(other.abs().max().item(), 1e-3))


def as_tensors(layer: Layer, dtype: torch.dtype) -> list[Tensor]:
    return [
        t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t
        for t in (layer.hidden, layer.weight, layer.target, layer.bias)
    ]


def class_weights(device: str, dtype: torch.dtype, classes: int = 63) -> Tensor:
    return (torch.rand(classes, generator=torch.Generator().manual_seed(2)) + 0.5).to(device, dtype)


@dtypes
@reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_class_indices(device: str, dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool) -> None:
    tensors = as_tensors(make_layer(device, bias=True), dtype)
    weight = class_weights(device, dtype) if weighted else None
    check(dtype, *tensors, weight=weight, reduction=reduction, label_smoothing=smoothing)


@dtypes
@reductions
def test_without_a_batch_dimension(device: str, dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, target, bias = as_tensors(make_layer(device, bias=True, ignore_index=None), dtype)
    check(dtype, hidden[0].detach().requires_grad_(), weight, target[0], bias, reduction=reduction)


@dtypes
@pytest.mark.parametrize("ignore_index", [None, -100, -7, 0, 5, 63, 10**6])
@reductions
def test_ignored_rows_may_hold_anything(device: str, dtype: torch.dtype, ignore_index: int | None, reduction: str) -> None:
    tensors = as_tensors(make_layer(device, bias=True, ignore_index=-100 if ignore_index is None else ignore_index), dtype)
    check(dtype, *tensors, weight=class_weights(device, dtype), ignore_index=ignore_index, reduction=reduction)


@dtypes
@reductions
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_with_no_valid_row(device: str, dtype: torch.dtype, reduction: str, weighted: bool) -> None:
    hidden, weight, target, bias = as_tensors(make_layer(device, bias=True), dtype)
    target.fill_(-100)
    loss = linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, reduction=reduction, weight=class_weights(device, dtype) if weighted else None
    )
    assert bool(loss.isnan().all()) == (reduction == "mean")
    assert reduction == "mean" or not loss.any()
    gradients = torch.autograd.grad(loss.sum(), [hidden, weight, bias])
    assert not any(gradient.any() for gradient in gradients)


def test_a_mean_over_class_weights_of_0_is_nan(device: str) -> None:
    layer = make_layer(device)
    loss = linear_cross_entropy(layer.hidden, layer.weight, layer.target, weight=torch.zeros(63, device=device))
    assert bool(loss.isnan()) and bool(expected(layer.hidden, layer.weight, layer.target, weight=torch.zeros(63, device=device)).isnan())


@dtypes
@reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_class_probabilities_with_their_gradient(device: str, dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool) -> None:
    hidden, linear_weight, target, bias = as_tensors(make_layer(device, bias=True), dtype)
    probabilities = torch.softmax(torch.randn(target.shape[0], 63), -1).to(device, dtype).requires_grad_()
    weight = class_weights(device, dtype) if weighted else None
    check(dtype, hidden, linear_weight, probabilities, bias, weight=weight, reduction=reduction, label_smoothing=smoothing)
    one = probabilities[0].detach().requires_grad_()
    check(dtype, hidden[0].detach().requires_grad_(), linear_weight, one, bias, weight=weight, reduction=reduction)


@dtypes
@reductions
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_k_dimensional_losses(device: str, dtype: torch.dtype, reduction: str, probabilities: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in ((5, 4), (7, 2, 3, 4), (7, 2, 3))
    )
    target = torch.randint(0, 7, (5, 2, 3), generator=generator).to(device)
    if probabilities:
        target = torch.softmax(torch.randn(5, 7, 2, 3, generator=generator), 1).to(device, dtype).requires_grad_()
    else:
        target[0] = -100
    check(dtype, hidden, weight, target, bias, weight=class_weights(device, dtype, 7), reduction=reduction)


@of_torch_2_13
@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"batch_chunk_size": 4}, {"acc_policy": "accurate"}, {"chunking_method": "aspect_ratio:2"}], ids=str
)
def test_options_change_nothing_and_allow_a_second_backward(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert OPTIONS is not None
    tensors = as_tensors(make_layer(device, bias=True), dtype)
    check(dtype, *tensors, options=OPTIONS(**options))
    hidden, weight, target, bias = tensors
    loss = linear_cross_entropy(hidden, weight, target, linear_bias=bias, options=OPTIONS(**options))
    for one, other in zip(*(torch.autograd.grad(loss, [hidden, weight, bias], retain_graph=True) for _ in range(2)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [False, pytest.param(True, marks=of_torch_2_13)], ids=["", "options"])
@reductions
def test_first_derivatives_in_fp64(options: bool, reduction: str) -> None:
    hidden, weight, target, bias = as_tensors(make_layer(shape=(4,), hidden_size=3, vocab_size=5, bias=True), torch.float64)
    given = OPTIONS() if options and OPTIONS is not None else None

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction=reduction, options=given)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


LAYER = (torch.randn(4, 3), torch.randn(2, 3), torch.tensor([0, 1, 0, 1]))
ERRORS: list[tuple[type[Exception], str, tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = [
    (RuntimeError, "expected input with dimensionality 1 or 2, got 3", (torch.randn(1, 4, 3), *LAYER[1:]), {}),
    (RuntimeError, "expected linear_weight with dimensionality at least 2, got 1", (LAYER[0], torch.randn(3), LAYER[2]), {}),
    (
        RuntimeError,
        "expected equal input and linear_weight last dimensions (in_features), got 3 and 4, respectively",
        (LAYER[0], torch.randn(2, 4), LAYER[2]),
        {},
    ),
    (
        RuntimeError,
        "ignore_index cannot be specified when target contains probabilities",
        (*LAYER[:2], torch.rand(4, 2)),
        {"ignore_index": -100},
    ),
    (
        RuntimeError,
        "K-dimensional loss defined by linear_weight shape (2, 4, 3) requires batched input, (N, 3), got unbatched input with shape (3,)",
        (torch.randn(3), torch.randn(2, 4, 3), torch.zeros(4, dtype=torch.int64)),
        {},
    ),
    (RuntimeError, "expected linear_bias shape (2,), got (3,)", LAYER, {"linear_bias": torch.randn(3)}),
    (
        RuntimeError,
        "Expected floating point type for target with class probabilities",
        (*LAYER[:2], torch.zeros(4, 2, dtype=torch.int64)),
        {},
    ),
    (ValueError, "Expected input batch_size (4) to match target batch_size (5).", (*LAYER[:2], torch.zeros(5, dtype=torch.int64)), {}),
    (ValueError, "batchmean is not a valid value for reduction", LAYER, {"reduction": "batchmean"}),
    (ValueError, "weighted_mean is not a valid value for reduction", LAYER, {"reduction": "weighted_mean"}),
    (RuntimeError, "label_smoothing must be between 0.0 and 1.0", LAYER, {"label_smoothing": 1.5}),
    (IndexError, "Target 2 is out of bounds", (*LAYER[:2], torch.tensor([0, 1, 2, 1])), {}),
]


@pytest.mark.parametrize("function", [linear_cross_entropy, _in_two_steps], ids=["adapter", "older torch"])
@pytest.mark.parametrize(("kind", "message", "tensors", "options"), ERRORS, ids=[message[:40] for _, message, _, _ in ERRORS])
def test_errors_are_those_of_torch(
    function: Any, kind: type[Exception], message: str, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        function(*tensors, **options)
    assert message in str(caught.value)


@dtypes
@reductions
def test_what_an_older_torch_gets(device: str, dtype: torch.dtype, reduction: str) -> None:
    """Where torch has no such function, what flce has no kernel for takes two steps."""
    tensors = as_tensors(make_layer(device, bias=True), dtype)
    check(dtype, *tensors, function=_in_two_steps, reduction=reduction, label_smoothing=0.1)
    hidden, weight, _, bias = tensors
    probabilities = torch.softmax(torch.randn(33, 63), -1).to(device, dtype).requires_grad_()
    check(dtype, hidden, weight, probabilities, bias, function=_in_two_steps, reduction=reduction)


@of_torch_2_13
def test_in_the_place_of_torchs_function(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.LinearCrossEntropyLoss calls it, and what is handed back reaches torch's own."""
    computed: list[str] = []
    of_flce = functional.linear_cross_entropy

    def count(*args: Any, **kwargs: Any) -> Any:
        computed.append("flce")
        return of_flce(*args, **kwargs)

    monkeypatch.setattr(functional, "linear_cross_entropy", count)
    monkeypatch.setattr(F, "linear_cross_entropy", linear_cross_entropy)
    hidden, target = torch.randn(9, 5, device=device), torch.randint(0, 7, (9,), device=device)
    for options, by_flce in (({}, True), ({"out_features": (2,)}, False), ({"dtype": torch.float64}, False), ({"bias": True}, True)):
        computed.clear()
        loss = nn.LinearCrossEntropyLoss(5, 7, label_smoothing=0.1, device=device, **options)
        labels = target[:, None].expand(9, 2) if "out_features" in options else target
        given = hidden.to(options.get("dtype", torch.float32))
        logits = loss.linear(given).unflatten(-1, (7, 2)) if "out_features" in options else loss.linear(given)
        torch.testing.assert_close(loss(given, labels), F.cross_entropy(logits, labels, label_smoothing=0.1))
        assert computed == ["flce"] * by_flce


def test_transforms_and_forward_mode_reach_torch(device: str) -> None:
    layer = make_layer(device, ignore_index=None)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, layer.weight.detach(), layer.target)

    hidden = layer.hidden.detach()
    right = torch.autograd.grad(loss(layer.hidden), layer.hidden)[0]
    torch.testing.assert_close(torch.func.grad(loss)(hidden), right)
    tangent = torch.ones_like(hidden)
    torch.testing.assert_close(torch.func.jvp(loss, (hidden,), (tangent,))[1], (right * tangent).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = loss(torch.autograd.forward_ad.make_dual(hidden, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, (right * tangent).sum())


def test_plain_calls_have_flces_kernel(device: str) -> None:
    layer = make_layer(device, bias=True)
    loss = linear_cross_entropy(layer.hidden, layer.weight, layer.target, linear_bias=layer.bias, reduction="sum")
    assert loss.grad_fn is not None and "LinearCrossEntropy" in loss.grad_fn.name()
