"""Loss, extra outputs and gradients against fp64, over dtypes, options, reductions and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Problem, assert_close, check, in_double, make_problem, reference
from torch import Tensor

import flce
from flce.core import _kernels, _retain

pytestmark = [pytest.mark.first_and_direct, pytest.mark.pairwise]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 0.7},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "class_weight": {"class_weight": True},
    "class_offset": {"class_offset": True, "softcap": 5.0},
    "class_offset alone": {"class_offset": True, "logit_scale": 0.7},
    "class_offset and bias": {"class_offset": True, "bias": True, "label_smoothing": 0.1, "class_weight": True, "token_weight": True},
    "class_offset and all but dft": {
        **{"class_offset": True, "bias": True, "softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1, "z_loss": 1e-2},
        **{"class_weight": True, "temperature": True, "token_weight": True},
    },
    "temperature": {"temperature": True},
    "temperature for all": {"temperature": 0.6},
    "token_weight": {"token_weight": True},
    "dft": {"dft": True, "reduction": "sum"},  # its gradients over the number of tokens are below what fp16 holds
    "all": {
        **{"bias": True, "softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1, "z_loss": 1e-2, "class_weight": True},
        **{"temperature": True, "token_weight": True, "dft": True},
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_option_matches_fp64(device: str, dtype: torch.dtype, name: str) -> None:
    check(make_problem(device, dtype, **OPTIONS[name]), dtype)


EXTRA: list[tuple[str, ...]] = [
    (),
    ("lse",),
    ("logprobs", "entropy"),
    ("lse", "logprobs", "entropy"),
    ("top1",),
    ("log_sum_sq_probs",),
    ("lse", "logprobs", "entropy", "top1", "log_sum_sq_probs"),
]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("extra", EXTRA, ids="+".join)
def test_reduction_and_extra_outputs_match_fp64(device: str, reduction: str, extra: tuple[str, ...]) -> None:
    problem = make_problem(device, softcap=5.0, z_loss=1e-2)
    check(problem, torch.float32, reduction=reduction, **{f"return_{name}": True for name in extra})


@pytest.mark.parametrize("num_tokens,hidden_size,vocab_size", [(1, 8, 2), (5, 8, 3), (129, 64, 1000), (7, 5, 123), (300, 40, 257)])
def test_shape_matches_fp64(device: str, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
    check(make_problem(device, num_tokens=num_tokens, hidden_size=hidden_size, vocab_size=vocab_size, ignored=0.0), torch.float32)


@pytest.mark.parametrize("count", [50, 12.5, torch.tensor(50), torch.tensor(50, dtype=torch.int32), torch.tensor([12.5])])
def test_mean_over_a_given_number(device: str, count: Any) -> None:
    count = count.to(device) if isinstance(count, Tensor) else count
    check(make_problem(device, z_loss=1e-2), torch.float32, num_valid_tokens=count)


def test_batched_shapes_keep_their_form(device: str) -> None:
    problem = make_problem(device, num_tokens=24)
    hidden, target = problem.hidden.view(2, 3, 4, 24), problem.target.view(2, 3, 4)
    loss, lse, entropy = flce.linear_cross_entropy(hidden, problem.weight, target, reduction="none", return_lse=True, return_entropy=True)
    expected = reference(hidden, problem.weight, target, reduction="none")
    for actual, name in ((loss, "loss"), (lse, "lse"), (entropy, "entropy")):
        assert_close(actual, expected[name], torch.float32, name, output=True)
    assert torch.equal(loss == 0, target == -100)


def test_fp32_weight_under_bf16_hidden_gets_fp32_gradient(device: str) -> None:
    problem = make_problem(device, torch.bfloat16)
    weight = problem.weight.detach().float().requires_grad_()
    loss = flce.linear_cross_entropy(problem.hidden, weight, problem.target)
    gradients = torch.autograd.grad(loss, (problem.hidden, weight))
    exact = in_double(Problem(problem.hidden, weight.detach().bfloat16().requires_grad_(), problem.target))
    expected = reference(exact.hidden, exact.weight, exact.target)["loss"]
    assert_close(loss, expected, torch.bfloat16, "loss", output=True)
    wanted = torch.autograd.grad(expected, (exact.hidden, exact.weight))
    assert gradients[1].dtype == torch.float32
    assert_close(gradients[0], wanted[0], torch.bfloat16, "hidden")
    assert_close(gradients[1], wanted[1], torch.bfloat16, "weight")
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float())  # not a rounded one, widened


def test_hidden_major_weight_is_taken_as_it_lies(device: str) -> None:
    problem = make_problem(device)
    stored = problem.weight.detach().t().contiguous().requires_grad_()
    loss = flce.linear_cross_entropy(problem.hidden, stored.t(), problem.target)
    gradient = torch.autograd.grad(loss, stored)[0]
    assert gradient.is_contiguous()
    expected = reference(problem.hidden, stored.t(), problem.target)["loss"]
    assert_close(gradient, torch.autograd.grad(expected, stored)[0], torch.float32)


def test_int32_target(device: str) -> None:
    problem = make_problem(device)
    problem.target = problem.target.int()
    check(problem, torch.float32)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_tokens(device: str, reduction: str) -> None:
    problem = make_problem(device, num_tokens=0)
    loss, lse = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction=reduction, return_lse=True)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert lse.shape == (0,)
    (loss.sum() + lse.sum()).backward()
    assert problem.hidden.grad is not None and problem.hidden.grad.shape == (0, 24)
    assert problem.weight.grad is not None and not problem.weight.grad.any()


def test_every_row_ignored_is_zero(device: str) -> None:
    problem = make_problem(device)
    problem.target.fill_(-100)
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    loss.backward()
    assert loss.item() == 0.0
    assert not problem.hidden.grad.any() and not problem.weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("ignore_index", [-1, 3, 1000])
def test_ignore_index_may_be_anything(device: str, ignore_index: int) -> None:
    check(make_problem(device, ignore_index=ignore_index), torch.float32)


def test_same_bits_every_time(device: str) -> None:
    problem = make_problem(device, torch.bfloat16, num_tokens=200, hidden_size=64, vocab_size=3000)
    results = []
    for _ in range(3):
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
        results.append((loss, *torch.autograd.grad(loss, (problem.hidden, problem.weight))))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize(("least_work", "num_tokens"), [(1, 512), (1 << 40, 504)], ids=["retaining", "computing again"])
def test_workspace_limit_is_kept(device: str, monkeypatch: pytest.MonkeyPatch, least_work: int, num_tokens: int) -> None:
    """Scratch of each pass, and what forward leaves to backward in memory of its own, together."""
    problem = make_problem(device, torch.float32, num_tokens=num_tokens, hidden_size=64, vocab_size=20000)
    limit = 4 << 20
    scratch, retained = [], []
    run, keep = _kernels.LoadedKernel.run, _retain.Retained.keep

    def watch_run(self: Any, function: Any, address: int, size: int) -> None:
        scratch.append(size)
        run(self, function, address, size)

    def watch_keep(self: Any, memory: Tensor, *, lent: bool) -> None:
        retained.append(0 if lent else memory.nbytes)
        keep(self, memory, lent=lent)

    kernel = flce.get_kernel(64, 20000, torch.float32, device=device, workspace_limit_bytes=limit, num_tokens=num_tokens)
    default = flce.get_kernel(64, 20000, torch.float32, device=device)
    monkeypatch.setattr(_retain, "LEAST_WORK", least_work)
    monkeypatch.setattr(_kernels.LoadedKernel, "run", watch_run)
    monkeypatch.setattr(_retain.Retained, "keep", watch_keep)
    for choice in (None, False):
        check(problem, torch.float32, workspace_limit_bytes=limit, retain_in_grad_weight=choice)
    assert len(scratch) >= 4
    assert bool(retained) == (kernel.retains and least_work == 1)
    assert max(scratch) + max(retained, default=0) <= limit
    assert kernel.workspace_bytes(num_tokens) <= limit < default.workspace_bytes(num_tokens)


@pytest.mark.parametrize("change", ["a wrong row", "not 0", "nan", "rounded to bf16"])
def test_what_the_comparison_of_these_tests_finds(change: str) -> None:
    right = torch.randn(1000, 64, dtype=torch.float64)
    right[3] = 0
    got = right.float()
    assert_close(got, right, torch.float32)
    if change == "a wrong row":
        got[7] *= 1 + 1e-5  # 3e-7 of the whole
    elif change == "not 0":
        got[3, 2] = 1e-12
    elif change == "nan":
        got[5, 5] = torch.nan
    else:
        got = got.bfloat16().float()
    with pytest.raises(AssertionError, match="of a row" if change == "a wrong row" else "not 0" if change == "not 0" else "of the whole"):
        assert_close(got, right, torch.float32)
