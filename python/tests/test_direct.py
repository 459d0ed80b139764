"""Direct calls, the third of a kind and later: the same bits as the first, and another way wherever something differs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import assert_close, make_problem, reference
from torch import Tensor

import flce
from flce import functional
from flce.call import _call
from flce.call._direct import DirectCall

pytest.importorskip("torch._C._dynamo.guards", reason="direct calls need torch's tensor guards")
DIRECT = "LinearCrossEntropyDirectBackward"


def make_direct(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The loss of a direct call."""
    for _ in range(3):
        loss = flce.linear_cross_entropy(hidden, weight, target, **options)
    assert loss.grad_fn is not None
    assert loss.grad_fn.name() == DIRECT
    return loss


def is_direct(loss: Tensor) -> bool:
    return loss.grad_fn is not None and loss.grad_fn.name() == DIRECT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("form", [(37,), (4, 9), (2, 3, 5), (0,), (3, 0)], ids=str)
def test_bits_are_those_of_the_first_call(device: str, dtype: torch.dtype, reduction: str, form: tuple[int, ...]) -> None:
    problem = make_problem(device, dtype, num_tokens=max(1, torch.Size(form).numel()))
    hidden = problem.hidden.detach()[: torch.Size(form).numel()].reshape(*form, 24).requires_grad_()
    target = problem.target[: torch.Size(form).numel()].reshape(form)
    if form == (4, 9):
        target = target.int()

    def run() -> tuple[Tensor, ...]:
        loss = flce.linear_cross_entropy(hidden, problem.weight, target, reduction=reduction)
        upstream = torch.linspace(-1, 2, loss.numel(), device=device).view(loss.shape)
        return loss, *torch.autograd.grad(loss, (hidden, problem.weight), upstream)

    runs = [run() for _ in range(4)]
    assert not is_direct(runs[0][0])
    assert is_direct(runs[1][0])
    assert is_direct(runs[-1][0])
    assert [value.shape for value in runs[0]] == [target.shape if reduction == "none" else (), hidden.shape, problem.weight.shape]
    for later in runs[1:]:
        for first, value in zip(runs[0], later, strict=True):
            assert first.shape == value.shape
            assert first.dtype == value.dtype
            assert torch.equal(first, value)


def test_a_weight_that_lies_hidden_major(device: str) -> None:
    problem = make_problem(device)
    weight = problem.weight.detach().t().contiguous().t().requires_grad_()
    loss = make_direct(problem.hidden, weight, problem.target)
    gradients = torch.autograd.grad(loss, (problem.hidden, weight))
    assert gradients[1].stride() == weight.stride()
    expected = torch.autograd.grad(reference(problem.hidden, problem.weight, problem.target)["loss"], (problem.hidden, problem.weight))
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_close(actual, wanted, torch.float32)


def test_another_number_of_tokens_and_other_options(device: str) -> None:
    """Sizes and options take turns; each gets its own result."""
    problem = make_problem(device)
    for _ in range(4):
        for num_tokens in (37, 5):
            for softcap in (None, 2.0):
                hidden, target = problem.hidden[:num_tokens], problem.target[:num_tokens]
                loss = flce.linear_cross_entropy(hidden, problem.weight, target, softcap=softcap)
                assert_close(loss, reference(hidden, problem.weight, target, softcap=softcap)["loss"], torch.float32, output=True)
    assert is_direct(loss)


@pytest.mark.parametrize(
    ("replace", "error"),
    [
        (lambda h, w, t: (h[:, :16], w, t), flce.ShapeError),
        (lambda h, w, t: (h, w, t[:-1]), flce.ShapeError),
        (lambda h, w, t: (h.double(), w, t), flce.DTypeError),
        (lambda h, w, t: (h, w.half(), t), flce.DTypeError),
        (lambda h, w, t: (h, w, t.float()), flce.DTypeError),
        (lambda h, w, t: (h, w.to("meta"), t), flce.PlacementError),
        (lambda h, w, t: (h, w, t.to("meta")), flce.PlacementError),
        (lambda h, w, t: (h.detach().to_sparse(), w, t), flce.ArgumentError),
        (lambda h, w, t: (h, w.detach().to_sparse_csr(), t), flce.ArgumentError),
        (lambda h, w, t: (torch.nested.nested_tensor([h.detach()[:3], h.detach()[3:]]), w, t), flce.ArgumentError),
        (lambda h, w, t: (h.tolist(), w, t), flce.DTypeError),
        (lambda h, w, t: (h, w, None), flce.DTypeError),
    ],
)
def test_arguments_are_still_checked(device: str, replace: Callable[..., Any], error: type[Exception]) -> None:
    problem = make_problem(device)
    make_direct(problem.hidden, problem.weight, problem.target)
    with pytest.raises(error):
        flce.linear_cross_entropy(*replace(problem.hidden, problem.weight, problem.target))


@pytest.mark.parametrize(
    "options",
    [{"softcap": [1]}, {"softcap": torch.tensor(2.0)}, {"z_loss": torch.tensor(0.0)}, {"reduction": "both"}, {"workspace_limit_bytes": -1}],
)
def test_options_are_still_checked(device: str, options: dict[str, Any]) -> None:
    problem = make_problem(device)
    make_direct(problem.hidden, problem.weight, problem.target)
    with pytest.raises(flce.FlceError):
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **options)


@pytest.mark.parametrize("name", ["bias", "class_weight", "class_offset", "temperature", "token_weight", "num_valid_tokens"])
def test_a_plain_call_that_is_known_is_not_taken_for_one_with_a_tensor(device: str, name: str) -> None:
    problem = make_problem(device, torch.float32)
    sizes = {
        "bias": problem.weight.shape[:1],
        "class_weight": problem.weight.shape[:1],
        "class_offset": problem.weight.shape[:1],
        "num_valid_tokens": (),
    }
    given = {name: torch.rand(sizes.get(name, problem.target.shape), device=device) + 0.5}
    expected = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **given)
    _call.forget()
    plain = make_direct(problem.hidden, problem.weight, problem.target)
    for _ in range(3):
        assert torch.equal(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **given), expected)
    assert not torch.equal(plain, expected)
    assert torch.equal(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target), plain)


@pytest.mark.parametrize("options", [{}, {"reduction": "none", "softcap": 2.0}], ids=str)
def test_options_of_a_known_call_are_not_read_again(device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(device)
    loss = make_direct(problem.hidden, problem.weight, problem.target, **options)

    def read(**given: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(functional, "call_options", read)
    assert torch.equal(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **options), loss)
    with pytest.raises(AssertionError):
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **options, z_loss=0.5)


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ({"z_loss": 1.0}, {"z_loss": True}),
        ({"z_loss": 1.0}, {"z_loss": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"shift": 0}, {"shift": False}),
        ({"shift": 0}, {"shift": 1}),
        ({"temperature": 1.0}, {"temperature": torch.tensor(1.0)}),
        ({}, {"num_valid_tokens": 7}),
        ({}, {"num_valid_tokens": 7.5}),
        ({"num_valid_tokens": None}, {"num_valid_tokens": 7.0}),
        ({"bias": None}, {"bias": 0.0}),
        ({"reduction": "sum"}, {"reduction": ["sum"]}),
        ({"process_group": None}, {"process_group": "sum"}),
        ({"loss_weights": None}, {"loss_weights": 1.0}),
        ({"softcap": None, "logit_scale": 2.0}, {"softcap": 2.0, "logit_scale": None}),
    ],
    ids=str,
)
def test_options_alike_are_read_as_in_a_first_call(device: str, known: dict[str, Any], other: dict[str, Any]) -> None:
    problem = make_problem(device)

    def outcome() -> Any:
        try:
            return flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target.view(1, -1)[0], **other).tolist()
        except (flce.FlceError, TypeError) as error:
            return repr(error)

    first = outcome()
    _call.forget()
    make_direct(problem.hidden, problem.weight, problem.target, **known)
    assert outcome() == first


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_a_call_behind_several_hidden_states(device: str, options: dict[str, Any]) -> None:
    """Several hidden states are one call of their own options, which are no caller's."""
    problem = make_problem(device)
    parts = list(problem.hidden.detach().chunk(2)), problem.weight, list(problem.target.chunk(2))
    for _ in range(4):
        flce.linear_cross_entropy(*parts, **options)
        flce.linear_cross_entropy(*parts, num_valid_tokens=3.0, **options)
    hidden = problem.hidden.detach()
    loss = flce.linear_cross_entropy(hidden, problem.weight, problem.target, **options)
    _call.forget()
    assert loss.shape == () and torch.equal(loss, flce.linear_cross_entropy(hidden, problem.weight, problem.target, **options))


def test_several_hidden_states_after_a_known_call(device: str) -> None:
    problem = make_problem(device)
    loss = make_direct(problem.hidden, problem.weight, problem.target)
    both, losses = flce.linear_cross_entropy([problem.hidden] * 2, problem.weight, [problem.target] * 2, loss_weights=[1.0, 2.0])
    assert len(losses) == 2
    assert_close(both.detach(), 3 * loss.detach().double(), problem.hidden.dtype)


def test_hidden_of_another_layout(device: str) -> None:
    problem = make_problem(device)
    expected = make_direct(problem.hidden, problem.weight, problem.target)
    strided = torch.cat([problem.hidden, problem.hidden], dim=1)[:, :24]
    assert torch.equal(flce.linear_cross_entropy(strided, problem.weight, problem.target), expected)
    memory = torch.cat([problem.hidden.new_zeros(1), problem.hidden.reshape(-1)])
    misaligned = memory[1:].view(problem.hidden.shape)
    loss = flce.linear_cross_entropy(misaligned, problem.weight, problem.target)
    assert torch.equal(loss, expected)
    wanted = torch.autograd.grad(expected, (problem.hidden, problem.weight))
    for actual, value in zip(torch.autograd.grad(loss, (misaligned, problem.weight)), wanted, strict=True):
        assert torch.equal(actual, value)


@pytest.mark.parametrize(
    "back", [lambda t: t.clone(), lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t], ids=["copied", "strided"]
)
def test_hooks_on_saved_tensors(device: str, back: Callable[[Tensor], Tensor]) -> None:
    problem = make_problem(device)
    plain = torch.autograd.grad(make_direct(problem.hidden, problem.weight, problem.target), (problem.hidden, problem.weight))
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: back(t.to(device))):
            loss = make_direct(problem.hidden, problem.weight, problem.target)
        for actual, expected in zip(torch.autograd.grad(loss, (problem.hidden, problem.weight)), plain, strict=True):
            assert torch.equal(actual, expected)


def test_weight_data_that_is_swapped_between_the_passes(device: str) -> None:
    problem = make_problem(device)
    loss = make_direct(problem.hidden, problem.weight, problem.target)
    torch.autograd.grad(loss, (problem.hidden, problem.weight), retain_graph=True)
    memory = torch.cat([problem.weight.detach(), problem.weight.detach()], dim=1)
    expected = torch.autograd.grad(loss, (problem.hidden, problem.weight), retain_graph=True)
    problem.weight.data = memory[:, :24]  # equal numbers, elsewhere and strided
    for actual, wanted in zip(torch.autograd.grad(loss, (problem.hidden, problem.weight)), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_negated_views(device: str) -> None:
    """Tensors whose memory holds their negative, as the imaginary part of a conjugate does."""
    problem = make_problem(device)

    made = make_direct(problem.hidden, problem.weight, problem.target)
    expected = torch.autograd.grad(made, (problem.hidden, problem.weight), retain_graph=True)
    for name in ("hidden", "weight"):
        view = torch._neg_view(-getattr(problem, name).detach())
        assert view.is_neg()
        arguments = {"hidden": problem.hidden, "weight": problem.weight, "target": problem.target} | {name: view}
        assert torch.equal(flce.linear_cross_entropy(**arguments), made)
    bias = torch.randn(101, device=device)
    with_bias = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, bias=bias)
    assert torch.equal(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, bias=torch._neg_view(-bias)), with_bias)
    for _ in range(3):
        target, count = torch._neg_view(-problem.target), torch._neg_view(torch.tensor(-28.0, device=device))
        assert torch.equal(flce.linear_cross_entropy(problem.hidden, problem.weight, target), made)
        with_count = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, num_valid_tokens=count)
        assert torch.equal(with_count, flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, num_valid_tokens=28.0))
        assert with_count > 0
    upstream = torch._neg_view(torch.tensor(-1.0, device=device))
    for actual, wanted in zip(torch.autograd.grad(made, (problem.hidden, problem.weight), upstream), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_one_tensor_as_hidden_and_weight(device: str) -> None:
    problem = make_problem(device, num_tokens=101)
    both = problem.hidden
    for _ in range(4):
        loss = flce.linear_cross_entropy(both, both, problem.target)
        gradient = torch.autograd.grad(loss, both)[0]
        expected = reference(both, both, problem.target)["loss"]
        assert_close(loss, expected, torch.float32, output=True)
        assert_close(gradient, torch.autograd.grad(expected, both)[0], torch.float32)


def test_frozen_tensors_and_no_grad(device: str) -> None:
    problem = make_problem(device)
    both = torch.autograd.grad(make_direct(problem.hidden, problem.weight, problem.target), (problem.hidden, problem.weight))
    for name, other, expected in (("hidden", "weight", both[1]), ("weight", "hidden", both[0])):
        getattr(problem, name).requires_grad_(False)
        loss = make_direct(problem.hidden, problem.weight, problem.target)
        assert torch.equal(torch.autograd.grad(loss, getattr(problem, other))[0], expected)
        getattr(problem, name).requires_grad_(True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            values = [flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target) for _ in range(3)]
        assert all(torch.equal(value, loss) and not value.requires_grad for value in values)
    assert is_direct(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target))


def test_create_graph_after_a_direct_backward(device: str) -> None:
    problem = make_problem(device)
    loss = make_direct(problem.hidden, problem.weight, problem.target)
    plain = torch.autograd.grad(loss, problem.hidden, retain_graph=True)[0]
    gradient = torch.autograd.grad(loss, problem.hidden, create_graph=True)[0]
    assert torch.equal(gradient, plain)
    with pytest.raises(flce.UnsupportedTransformError, match="no second derivatives"):
        gradient.sum().backward()


def test_modes_and_transforms_go_another_way(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    problem = make_problem(device)
    make_direct(problem.hidden, problem.weight, problem.target)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    assert "flce.linear_cross_entropy.default" in seen
    with pytest.raises(flce.UnsupportedTransformError):
        torch.func.vmap(lambda _: flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target))(torch.ones(2, device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        rounded = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    hidden, weight = (tensor.detach().bfloat16() for tensor in (problem.hidden, problem.weight))
    assert_close(rounded, reference(hidden, weight, problem.target)["loss"], torch.bfloat16, output=True)
    assert not torch.equal(rounded, flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target))


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_mode_is_refused(device: str, requires_grad: bool, with_gradient: bool) -> None:
    problem = make_problem(device)
    hidden = problem.hidden.detach().requires_grad_(requires_grad)
    weight = problem.weight.detach()
    with nullcontext() if with_gradient else torch.no_grad():
        for _ in range(3):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
                with pytest.raises(flce.UnsupportedTransformError, match="forward-mode"):
                    flce.linear_cross_entropy(dual, weight, problem.target)
            flce.linear_cross_entropy(hidden, weight, problem.target)


def test_nothing_is_kept_alive(device: str) -> None:
    import weakref

    problem = make_problem(device)
    make_direct(problem.hidden, problem.weight, problem.target).backward()
    references = [weakref.ref(tensor) for tensor in (problem.hidden, problem.weight, problem.target)]
    del problem
    assert [reference() for reference in references] == [None] * 3


def test_threads_share_a_direct_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(device, num_tokens=64, vocab_size=300)
    made = []
    original = DirectCall.__init__
    monkeypatch.setattr(DirectCall, "__init__", lambda self, *args: (made.append(self), original(self, *args))[1])
    make_direct(problem.hidden, problem.weight, problem.target)
    scales = [0.5, 1.0, 2.0, 4.0]
    expected = []
    for scale in scales:
        hidden = (problem.hidden.detach() * scale).requires_grad_()
        loss = flce.linear_cross_entropy(hidden, problem.weight, problem.target)
        expected.append((loss.item(), *torch.autograd.grad(loss, (hidden, problem.weight))))
    failures: list[float] = []
    done: list[float] = []

    def work(scale: float, right: tuple[Any, ...]) -> None:
        hidden = (problem.hidden.detach() * scale).requires_grad_()
        for _ in range(25):
            loss = flce.linear_cross_entropy(hidden, problem.weight, problem.target)
            gradients = torch.autograd.grad(loss, (hidden, problem.weight))
            if loss.item() != right[0] or not all(torch.equal(a, b) for a, b in zip(gradients, right[1:], strict=True)):
                failures.append(scale)
        done.append(scale)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(scales, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(done) == scales
    assert len(made) == 1
