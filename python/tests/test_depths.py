"""Several hidden states on one weight: equal to a call of each, with one backward of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import make_problem
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce.core._kernels import LoadedKernel

D, V = 24, 101
SHAPES = ((2, 5), (9,), (3, 2, 2))
LOSS_WEIGHTS = [1.0, 0.3, -0.5]
REDUCTIONS = ("mean", "sum", "weighted_mean")


def depths(device: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    hidden = [torch.randn(*shape, D, generator=generator).to(device, dtype).requires_grad_() for shape in SHAPES]
    targets = [torch.randint(0, V, shape, generator=generator).to(device) for shape in SHAPES]
    for target in targets:
        target.view(-1)[::3] = -100
    return hidden, targets


def numbers(device: str, least: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [(torch.rand(*shape, generator=generator) + least).to(device) for shape in SHAPES]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logits": {"bias": True, "softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.01},
    "class_weight": {"class_weight": True, "label_smoothing": 0.1},
    "dft": {"dft": True},
    "temperatures": {"temperature": "tensors"},
    "some_temperatures": {"temperature": "some"},
    "counts": {"num_valid_tokens": [3, 4.0, None]},
}


def options_of(name: str, reduction: str, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The options of one call of all depths, and of a call of each."""
    problem = make_problem(device, bias=True, class_weight=True)
    options = dict(OPTIONS[name])
    for tensor in ("bias", "class_weight"):
        if tensor in options:
            options[tensor] = problem.options[tensor]
    if options.get("temperature") == "tensors":
        options["temperature"] = numbers(device, 0.5)
    elif options.get("temperature") == "some":
        options["temperature"] = [numbers(device, 0.5)[0], 2.0, 1.0]
    if reduction == "weighted_mean":
        options["token_weight"] = numbers(device, 0.1)
    if reduction != "mean":
        options.pop("num_valid_tokens", None)
    each = [{key: value[at] if isinstance(value, list) else value for key, value in options.items()} for at in range(len(SHAPES))]
    return {**options, "reduction": reduction}, [{**given, "reduction": reduction} for given in each]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_and_gradients_are_those_of_a_call_each(device: str, name: str, reduction: str) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight
    together, each = options_of(name, reduction, device)
    total, losses = flce.linear_cross_entropy(hidden, weight, targets, loss_weights=LOSS_WEIGHTS, **together)
    expected = [
        flce.linear_cross_entropy(states, weight, target, **given) for states, target, given in zip(hidden, targets, each, strict=True)
    ]
    expected_total = sum(factor * loss for factor, loss in zip(LOSS_WEIGHTS, expected, strict=True))
    assert isinstance(expected_total, Tensor)
    close(total, expected_total)
    for got, right in zip(losses, expected, strict=True):
        close(got, right)
    parameters = [*hidden, weight, *([together["bias"]] if "bias" in together else [])]
    for got, right in zip(torch.autograd.grad(total, parameters), torch.autograd.grad(expected_total, parameters), strict=True):
        close(got, right)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_number_weighs_all_tokens_of_a_depth(device: str, reduction: str) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight

    def gradients_of(token_weight: Any) -> tuple[Tensor, ...]:
        losses = flce.linear_cross_entropy(hidden, weight, targets, token_weight=token_weight, reduction=reduction)
        return *losses, *torch.autograd.grad(sum(loss.sum() for loss in losses), [*hidden, weight])

    tensors = [torch.full(target.shape, factor, device=device) for target, factor in zip(targets, (0.5, 2.0, 0.25), strict=True)]
    for got, right in zip(gradients_of([0.5, tensors[1], 0.25]), gradients_of(tensors), strict=True):
        close(got, right)
    same = [torch.full(target.shape, 2.0, device=device) for target in targets]
    for got, right in zip(gradients_of(2.0), gradients_of(same), strict=True):
        close(got, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_to_plain_arithmetic_in_16_bits(device: str, dtype: torch.dtype) -> None:
    hidden, targets = depths(device, dtype)
    weight = make_problem(device, dtype).weight
    losses = flce.linear_cross_entropy(hidden, weight, targets)
    for loss, states, target in zip(losses, hidden, targets, strict=True):
        logits = states.detach().double() @ weight.detach().double().t()
        torch.testing.assert_close(loss.double(), F.cross_entropy(logits.flatten(0, -2), target.flatten()), rtol=1e-5, atol=1e-5)
    wanted = [each.float() for each in torch.autograd.grad(losses[0] + losses[2], [hidden[0], weight])]
    first, third = (leaf.detach().double().requires_grad_() for leaf in (hidden[0], hidden[2]))
    plain = weight.detach().double().requires_grad_()
    sums = [F.cross_entropy((h @ plain.t()).flatten(0, -2), t.flatten()) for h, t in ((first, targets[0]), (third, targets[2]))]
    for got, right in zip(wanted, torch.autograd.grad(sums[0] + sums[1], [first, plain]), strict=True):
        assert (got - right).norm() <= 4e-3 * right.norm()


def test_outputs_beside_the_losses_have_the_depths_shapes(device: str) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight
    flags = {"return_lse": True, "return_logprobs": True, "return_entropy": True, "return_top1": True}
    losses, *others = flce.linear_cross_entropy(hidden, weight, targets, reduction="none", **flags)
    for at, (states, target) in enumerate(zip(hidden, targets, strict=True)):
        right = flce.linear_cross_entropy(states, weight, target, reduction="none", **flags)
        for got, expected in zip((losses, *others), right, strict=True):
            assert got[at].shape == target.shape
            close(got[at].double(), expected.double())
    (others[2][1].sum() + others[0][0].sum()).backward()
    assert hidden[2].grad is not None and not hidden[2].grad.any() and hidden[1].grad is not None and hidden[1].grad.any()


def test_the_weights_gradient_is_written_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight
    calls = []
    original = LoadedKernel.backward

    def counted(self: LoadedKernel, *args: Any, **keywords: Any) -> Any:
        calls.append(args[0].hidden.shape[0])
        return original(self, *args, **keywords)

    monkeypatch.setattr(LoadedKernel, "backward", counted)
    flce.linear_cross_entropy(hidden, weight, targets, loss_weights=LOSS_WEIGHTS)[0].backward()
    assert calls == [sum(target.numel() for target in targets)]


def test_a_depth_without_a_valid_row_is_0(device: str) -> None:
    hidden, targets = depths(device)
    targets[1].fill_(-100)
    weight = make_problem(device).weight
    losses = flce.linear_cross_entropy(hidden, weight, targets)
    assert losses[1] == 0 and losses[0] > 0
    sum(losses).backward()
    assert hidden[1].grad is not None and not hidden[1].grad.any() and hidden[0].grad is not None and hidden[0].grad.isfinite().all()
    none = flce.linear_cross_entropy(hidden, weight, targets, num_valid_tokens=0)
    assert all(loss == 0 for loss in none)


def test_a_label_past_the_vocabulary_counts_for_nothing_and_is_reported(device: str) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight
    targets[1][1] = V
    losses = flce.linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(flce.LabelError, match=r"target\[11\].*one depth behind the other"):
        flce.check_labels()
    targets[1][1] = -100
    for got, right in zip(losses, flce.linear_cross_entropy(hidden, weight, targets), strict=True):
        close(got, right)


def test_a_depth_predicts_the_label_so_many_positions_on(device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden = [torch.randn(2, 8, D, generator=generator).to(device) for _ in range(3)]
    labels = torch.randint(0, V, (2, 8), generator=generator).to(device)
    weight = make_problem(device).weight.detach()
    losses = flce.linear_cross_entropy(hidden, weight, labels, shift=[1, 2, 3])
    for depth, loss in enumerate(losses):
        logits = hidden[depth][:, : 7 - depth] @ weight.t()
        close(loss, F.cross_entropy(logits.flatten(0, 1), labels[:, 1 + depth :].flatten()))
    packed = [states.flatten(0, 1) for states in hidden]
    ends = torch.tensor([0, 8, 16], device=device)
    for got, right in zip(
        flce.linear_cross_entropy(packed, weight, labels.flatten(), shift=[1, 2, 3], cu_seqlens=ends), losses, strict=True
    ):
        close(got, right)


def test_under_compile_and_checkpoint(device: str) -> None:
    hidden, targets = depths(device)
    weight = make_problem(device).weight

    def total(*states: Tensor) -> Tensor:
        made: Tensor = flce.linear_cross_entropy(list(states), weight, targets, loss_weights=LOSS_WEIGHTS, softcap=5.0)[0]
        return made

    expected = torch.autograd.grad(total(*hidden), [*hidden, weight])
    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for made in (compiled(*hidden), checkpoint(total, *hidden, use_reentrant=False)):
        for got, right in zip(torch.autograd.grad(made, [*hidden, weight]), expected, strict=True):
            close(got, right)


def test_a_head_takes_a_list(device: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(D, V, device=device)
    hidden = [torch.randn(2, 8, D, device=device) for _ in range(2)]
    labels = torch.randint(0, V, (2, 8), device=device)
    head = flce.FusedLMHead.from_linear(layer, shift=[1, 2])
    assert [logits.shape for logits in head(hidden)] == [(2, 8, V)] * 2
    total, losses = head(hidden, labels=labels, loss_weights=[1.0, 0.3])
    for depth, loss in enumerate(losses):
        close(loss, flce.linear_cross_entropy(hidden[depth], layer, labels, shift=1 + depth))
    close(total, losses[0] + 0.3 * losses[1])
    with pytest.raises(flce.ArgumentError, match=r"shift is \[1, 2\]"):
        head(hidden[0], labels=labels)
    with pytest.raises(flce.ArgumentError, match="input is an empty list"):
        head([], labels=labels)
    assert "shift=[1, 2]" in repr(head)


def test_refusals_name_the_depth() -> None:
    hidden, targets = depths("cpu")
    weight = make_problem("cpu").weight
    one = hidden[0]

    def refused(kind: type[Exception], message: str, *rows: Any, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            flce.linear_cross_entropy(*(rows or (hidden, weight, targets)), **options)

    refused(flce.ArgumentError, "hidden is an empty list", [], weight, [])
    refused(flce.ArgumentError, "target has 2 items and hidden has 3", hidden, weight, targets[:2])
    refused(flce.ArgumentError, r"hidden is a list of 2, and target and shift are one for all.*\[1, 2\]", [one, one], weight, targets[0])
    refused(flce.ArgumentError, "shift has 1 items and hidden has 2", [one, one], weight, targets[0], shift=[1])
    refused(flce.ArgumentError, "loss_weights has 2 items and hidden has 3", loss_weights=[1.0, 2.0])
    refused(flce.DTypeError, "loss_weights is a float", loss_weights=1.0)
    refused(flce.ArgumentError, "loss_weights is given with reduction 'none'", loss_weights=LOSS_WEIGHTS, reduction="none")
    refused(flce.ArgumentError, "loss_weights is given and hidden is one tensor", one, weight, targets[0], loss_weights=[1.0])
    refused(flce.ArgumentError, "reduction is 'median'", reduction="median")
    refused(flce.ArgumentError, "num_valid_tokens is given with reduction 'sum'", num_valid_tokens=3, reduction="sum")
    refused(flce.ArgumentError, "a depth has no token_weight", reduction="weighted_mean")
    refused(flce.ArgumentError, "class_weight is given with z_loss=0.1", class_weight=torch.ones(V), z_loss=0.1)
    refused(flce.ShapeError, r"target\[1\] has shape \[2, 5\]", hidden, weight, [targets[0], targets[0], targets[2]])
    refused(flce.DTypeError, r"token_weight\[1\] is a str", token_weight=[None, "2", None])
    refused(flce.ShapeError, r"token_weight\[0\] has shape \[9\]", token_weight=[torch.ones(9), None, None])
    refused(flce.ShapeError, r"hidden\[1\] has shape \[2, 5, 16\]", [one, one[..., :16]], weight, [targets[0]] * 2)
    refused(flce.DTypeError, r"hidden\[1\] has dtype torch.bfloat16", [one, one.bfloat16()], weight, [targets[0]] * 2)
    refused(flce.DTypeError, r"hidden\[1\] is a NoneType", [one, None], weight, [targets[0]] * 2)
    refused(flce.DTypeError, r"target\[0\] is a list", [one], weight, [[1, 2]])
    refused(TypeError, "unexpected keyword argument 'capped'", capped=3)
