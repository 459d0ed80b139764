"""`linear_topk_distillation` against fp64 with the logits written out, in every way in which torch may call it, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import assert_close
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flce
from flce.call._arguments import check_teacher

VOCAB = 101


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        bias = self.options.get("bias")
        return [self.hidden, self.weight, *([] if bias is None else [bias])]


def make_problem(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    num_tokens: int = 37,
    top_k: int = 6,
    target: bool = False,
    bias: bool = False,
    temperature: bool | float | None = None,
    token_weight: bool = False,
    **options: Any,
) -> Problem:
    """Ids anywhere, some equal, some -1, and every ninth token without any; probabilities that add up to less than 1, some 0."""
    generator = torch.Generator().manual_seed(4321)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype).requires_grad_()

    hidden, weight = normal(num_tokens, 24), normal(VOCAB, 24, scale=0.5)
    ids = torch.randint(-1, VOCAB, (num_tokens, top_k), generator=generator)
    ids[1::3, 1:2] = ids[1::3, :1]
    ids[2::5, 2:3] = -1
    ids[7::9] = -1
    probs = 0.9 * torch.randn(num_tokens, top_k, generator=generator).mul(2).softmax(-1)
    probs[::4, -1] = 0
    if target:
        labels = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
        labels[torch.rand(num_tokens, generator=generator) < 0.25] = -100
        options = {"hard_weight": 0.3, **options, "target": labels.to(device)}
    if bias:
        options["bias"] = normal(VOCAB)
    if temperature is True:
        options["temperature"] = (torch.rand(num_tokens, generator=generator) * 1.5 + 0.5).to(device)
    elif temperature is not None:
        options["temperature"] = temperature
    if token_weight:
        options["token_weight"] = torch.randn(num_tokens, generator=generator).add_(0.5).to(device)
    return Problem(hidden, weight, ids.to(device), probs.to(device), options)


def reference(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    *,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    bias: Tensor | None = None,
    temperature: Tensor | float | None = 1.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    num_valid_tokens: float | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """Reference for flat tokens, in fp64."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if logit_scale is None else logits * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature or 1.0)
    named = (ids >= 0) & (ids < VOCAB)
    valid = (ids != -1).any(-1) if target is None else target != -100
    log_p = logits.log_softmax(-1)
    of_ids = torch.where(named & valid[:, None], log_p.gather(1, torch.where(named, ids, 0)), 0.0)
    loss = -(1 - hard_weight) * (probs.double() * of_ids).sum(-1)
    if target is not None and hard_weight:
        of_target = log_p.gather(1, torch.where(valid, target, 0)[:, None])[:, 0]
        loss = loss - hard_weight * ((1 - label_smoothing) * of_target + label_smoothing * log_p.mean(-1))
    lse = logits.logsumexp(-1)
    rows = torch.ones_like(lse) if token_weight is None else token_weight.double()
    loss = torch.where(valid, (loss + z_loss * lse.square()) * rows, 0.0)
    divisor: Any = {"sum": 1.0, "mean": valid.sum(), "weighted_mean": torch.where(valid, rows, 0.0).sum()}.get(reduction)
    if num_valid_tokens is not None:
        divisor = num_valid_tokens
    entropy = -(log_p.exp() * log_p).sum(-1)
    return {
        "loss": loss if reduction == "none" else loss.sum() / divisor,
        "lse": torch.where(valid, lse, 0.0),
        "entropy": torch.where(valid, entropy, 0.0),
        "teacher_logprobs": of_ids,
    }


def run(problem: Problem, function: Callable[..., Any] | None = None, **options: Any) -> dict[str, Tensor]:
    options = problem.options | options
    function = function or flce.linear_topk_distillation
    result = function(problem.hidden, problem.weight, problem.teacher_ids, problem.teacher_probs, **options)
    names = ["loss"] + [name for name in ("lse", "entropy", "teacher_logprobs") if options.get(f"return_{name}")]
    return dict(zip(names, result if len(names) > 1 else (result,), strict=True))


def upstream_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.device)
        for name, value in outputs.items()
        if name != "teacher_logprobs"
    }


def check(problem: Problem, dtype: torch.dtype, function: Callable[..., Any] | None = None) -> None:
    def leaf(value: Any) -> Any:
        return value.detach().double().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value

    exact_options = {name: leaf(value) for name, value in problem.options.items()}
    exact = Problem(leaf(problem.hidden), leaf(problem.weight), problem.teacher_ids, problem.teacher_probs, exact_options)
    expected = reference(exact.hidden, exact.weight, exact.teacher_ids, exact.teacher_probs, **exact_options)
    actual = run(problem, function)
    for name, value in actual.items():
        assert value.dtype == torch.float32
        assert value.requires_grad == (name != "teacher_logprobs")
        assert_close(value, expected[name], dtype, name, output=True)
    upstream = upstream_of(actual)
    gradients = torch.autograd.grad([actual[name] for name in upstream], problem.leaves(), list(upstream.values()))
    wanted = torch.autograd.grad([expected[name] for name in upstream], exact.leaves(), [g.double() for g in upstream.values()])
    for leaf_of, gradient, right in zip(problem.leaves(), gradients, wanted, strict=True):
        assert gradient.dtype == leaf_of.dtype
        assert_close(gradient, right, dtype, f"gradient of {list(leaf_of.shape)}")


EVERYTHING: dict[str, Any] = {
    "target": True,
    "bias": True,
    "temperature": True,
    "token_weight": True,
    "softcap": 5.0,
    "logit_scale": 0.7,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "return_lse": True,
    "return_entropy": True,
    "return_teacher_logprobs": True,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "top_k": 1},
    {"top_k": 256, "return_teacher_logprobs": True},
    {"target": True},
    {"target": True, "hard_weight": 0.0},
    {"target": True, "hard_weight": 1.0},
    {"temperature": 2.0, "num_valid_tokens": 50.0},
    {"bias": True, "softcap": 5.0},
    EVERYTHING,
    EVERYTHING | {"reduction": "weighted_mean"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_fp64(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(make_problem(device, dtype, **options), dtype)


def test_one_class_is_cross_entropy(device: str) -> None:
    """A teacher that is certain of the target is the target."""
    problem = make_problem(device, target=True, top_k=1)
    labels = problem.options["target"]
    problem.teacher_ids, problem.teacher_probs = labels.clamp(min=0)[:, None], torch.ones(len(labels), 1, device=device)
    expected = flce.linear_cross_entropy(problem.hidden, problem.weight, labels)
    for hard_weight in (0.0, 0.3, 1.0):
        assert_close(run(problem, hard_weight=hard_weight)["loss"], expected, torch.float32, output=True)


def test_order_of_ids_does_not_matter(device: str) -> None:
    problem = make_problem(device)
    turned = Problem(problem.hidden, problem.weight, problem.teacher_ids.flip(-1), problem.teacher_probs.flip(-1))
    assert_close(run(turned)["loss"], run(problem)["loss"], torch.float32, output=True)


def test_leading_dimensions_and_index_types(device: str) -> None:
    problem = make_problem(device, num_tokens=36, target=True, return_teacher_logprobs=True)
    expected = run(problem)
    shaped = Problem(
        problem.hidden.view(4, 9, -1), problem.weight, problem.teacher_ids.int().view(4, 9, -1), problem.teacher_probs.view(4, 9, -1).half()
    )
    shaped.teacher_probs = problem.teacher_probs.double().view(4, 9, -1)
    shaped.options = problem.options | {"target": problem.options["target"].view(4, 9)}
    actual = run(shaped)
    assert torch.equal(actual["loss"], expected["loss"])
    assert torch.equal(actual["teacher_logprobs"].view(36, -1), expected["teacher_logprobs"])
    assert actual["teacher_logprobs"].shape == (4, 9, 6)


def test_shift_moves_the_target_alone(device: str) -> None:
    problem = make_problem(device, num_tokens=36, target=True, reduction="none")
    labels = problem.options["target"].view(4, 9)
    problem.hidden = problem.hidden.detach().view(4, 9, -1)
    problem.teacher_ids, problem.teacher_probs = problem.teacher_ids.view(4, 9, -1), problem.teacher_probs.view(4, 9, -1)
    moved = run(problem, target=flce.shift_labels(labels))["loss"]
    assert torch.equal(run(problem, target=labels, shift=1)["loss"], moved)
    assert not moved[:, -1].any()


def test_no_token(device: str) -> None:
    problem = make_problem(device, num_tokens=0, return_teacher_logprobs=True)
    actual = run(problem)
    assert actual["loss"].item() == 0
    assert actual["teacher_logprobs"].shape == (0, 6)
    assert all(not g.any() for g in torch.autograd.grad(actual["loss"], problem.leaves()))


# ── What a teacher may say ──────────────────────────


def test_ids_out_of_range_are_reported_and_count_as_none(device: str) -> None:
    problem = make_problem(device)
    right = run(problem)["loss"]
    for wrong in (VOCAB, -2, 1 << 40, -(1 << 40)):
        flce.check_labels()
        bad = problem.teacher_ids.clone()
        row, column = ((bad == -1) & (bad != -1).any(-1, keepdim=True)).nonzero()[0].tolist()
        bad[row, column] = wrong
        with_fault = Problem(problem.hidden, problem.weight, bad, problem.teacher_probs, {"return_teacher_logprobs": True})
        actual = run(with_fault)
        torch.autograd.grad(actual["loss"], problem.leaves())
        assert torch.equal(actual["loss"], right)
        assert actual["teacher_logprobs"][row, column] == 0
        with pytest.raises(flce.LabelError) as caught:
            flce.check_labels()
        assert caught.value.row == row
    flce.check_labels()


def test_probabilities_of_any_kind(device: str) -> None:
    problem = make_problem(device, reduction="none")
    row = 2
    named = (problem.teacher_ids[row] >= 0).nonzero()[0].item()
    problem.teacher_probs[row, named] = float("nan")
    loss = run(problem)["loss"]
    assert not loss[row].isfinite()
    assert loss[torch.arange(len(loss), device=device) != row].isfinite().all()
    (gradient,) = torch.autograd.grad(loss.sum(), [problem.hidden])
    assert not gradient[row].isfinite().any()
    assert gradient[torch.arange(len(loss), device=device) != row].isfinite().all()
    # Probabilities at id -1 are not read.
    problem = make_problem(device)
    right = run(problem)["loss"]
    problem.teacher_probs[problem.teacher_ids < 0] = float("nan")
    assert torch.equal(run(problem)["loss"], right)


@pytest.mark.parametrize("target", [False, True])
def test_numbers_that_are_no_probabilities_are_reported_and_their_rows_ignored(device: str, target: bool) -> None:
    flce.check_labels()
    problem = make_problem(device, target=target)
    rows = (problem.teacher_ids >= 0).any(-1)
    rows &= problem.options["target"] != -100 if target else True
    row = int(rows.nonzero()[0])
    ids = problem.teacher_ids.clone()
    ids[row] = -1
    without = Problem(problem.hidden, problem.weight, ids, problem.teacher_probs, dict(problem.options))
    if target:
        without.options["target"] = problem.options["target"].clone().index_fill_(0, torch.tensor(row, device=device), -100)
    right = run(without)["loss"]
    named = int((problem.teacher_ids[row] >= 0).nonzero()[0])
    for value in (-0.5, 1.1, 17.0, float("inf"), -float("inf")):
        problem.teacher_probs[row, named] = value
        assert torch.equal(run(problem)["loss"], right)
        with pytest.raises(flce.LabelError, match=rf"teacher_probs\[{row}\] holds a number that is not from 0 to 1") as caught:
            flce.check_labels()
        assert caught.value.row == row
    problem.teacher_probs[row, named] = 1.0
    problem.teacher_probs = problem.teacher_probs.bfloat16()
    run(problem)
    flce.check_labels()
    problem.teacher_probs = problem.teacher_probs.log()  # for probabilities
    loss = run(problem)["loss"]
    assert target or loss == 0
    with pytest.raises(flce.LabelError):
        flce.check_labels()


def test_impossible_class_with_no_probability(device: str) -> None:
    """0 · log 0 is 0."""
    problem = make_problem(device, bias=True)
    with torch.no_grad():
        problem.options["bias"][5] = -float("inf")
    problem.teacher_ids[0, 0], problem.teacher_probs[0, 0] = 5, 0.0
    problem.teacher_probs[problem.teacher_ids == 5] = 0.0
    assert run(problem)["loss"].isfinite()


# ── What torch does with it ─────────────────────────


@pytest.mark.parametrize("target", [False, True])
def test_opcheck(device: str, target: bool) -> None:
    problem = make_problem(device, bias=True, target=True)
    operators = torch.ops.flce
    options = "z_loss=0.01,teacher_top_k=6,outputs=loss+lse+entropy" + (",hard_weight=0.25" if target else "")
    labels = problem.options["target"]
    rest = (problem.options["bias"], None, None, options, -100, 2 if target else 0, 0)
    rows = (None, None, problem.teacher_ids, problem.teacher_probs)
    torch.library.opcheck(operators.linear_cross_entropy.default, (problem.hidden, problem.weight, labels, *rest, 0, *rows))
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    values, saved, _ = operators.linear_cross_entropy(hidden, weight, labels, *rest, 0, *rows)
    arguments = (torch.ones_like(values), hidden, weight, labels, saved.detach(), *rest, (True, True, True), *rows)
    torch.library.opcheck(
        operators.linear_cross_entropy_backward.default,
        tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments),
    )


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_matches_fp64(device: str, backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flce.linear_topk_distillation, fullgraph=True, backend=backend)
    check(make_problem(device, **options), torch.float32, compiled)
    check(make_problem(device, num_tokens=11, **options), torch.float32, compiled)
    check(make_problem(device, num_tokens=20, **options), torch.float32, compiled)


def test_dispatch_modes(device: str) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    problem = make_problem(device, **EVERYTHING)
    expected = run(problem)
    with Watch():
        actual = run(problem)
    for name, value in expected.items():
        assert torch.equal(actual[name], value)


def test_shapes_without_data() -> None:
    def of(device: str) -> None:
        hidden, weight = torch.zeros(2, 3, 8, device=device), torch.zeros(11, 8, device=device)
        ids, probs = torch.zeros(2, 3, 5, dtype=torch.long, device=device), torch.zeros(2, 3, 5, device=device)
        loss, logprobs = flce.linear_topk_distillation(hidden, weight, ids, probs, return_teacher_logprobs=True)
        assert (loss.shape, logprobs.shape) == ((), (2, 3, 5))

    of("meta")
    with FakeTensorMode():
        of("cpu")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device: str, use_reentrant: bool) -> None:
    problem = make_problem(device, target=True)
    layer = nn.Linear(24, 24, device=device)

    def loss(hidden: Tensor) -> Tensor:
        options = problem.options
        return flce.linear_topk_distillation(layer(hidden), problem.weight, problem.teacher_ids, problem.teacher_probs, **options)

    expected = torch.autograd.grad(loss(problem.hidden), problem.leaves())
    again: Any = checkpoint(loss, problem.hidden, use_reentrant=use_reentrant)
    again.backward()
    for leaf, right in zip(problem.leaves(), expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, right)


def test_backward_again_and_weight_later(device: str) -> None:
    problem = make_problem(device, **EVERYTHING)
    loss = run(problem)["loss"]
    first = torch.autograd.grad(loss, problem.leaves(), retain_graph=True)
    for leaf, right in zip(problem.leaves(), first, strict=True):
        (alone,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        assert torch.equal(alone, right)


def test_gradient_is_added_to_a_buffer(device: str) -> None:
    problem = make_problem(device)
    (expected,) = torch.autograd.grad(run(problem)["loss"], [problem.weight])
    buffer = torch.ones(VOCAB, 24, device=device)
    run(problem, grad_weight_out=buffer)["loss"].backward()
    assert problem.weight.grad is None
    assert_close(buffer - 1, expected, torch.float32, factor=40.0)


def test_two_threads(device: str) -> None:
    problems = [make_problem(device, target=bool(i), num_tokens=20 + i) for i in range(2)]
    expected = [torch.autograd.grad(run(problem)["loss"], problem.leaves()) for problem in problems]
    failures: list[object] = []

    def work(i: int) -> None:
        for _ in range(20):
            gradients = torch.autograd.grad(run(problems[i])["loss"], problems[i].leaves())
            if not all(torch.equal(a, b) for a, b in zip(gradients, expected[i], strict=True)):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_second_derivative_is_refused(device: str) -> None:
    problem = make_problem(device)
    (gradient,) = torch.autograd.grad(run(problem)["loss"], [problem.hidden], create_graph=True)
    with pytest.raises(flce.UnsupportedTransformError):
        gradient.sum().backward()


# ── Refusals ────────────────────────────────────────

REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"teacher_ids": torch.zeros(37, 0, dtype=torch.long), "teacher_probs": torch.zeros(37, 0)}, flce.ShapeError, "K from 1 to 1024"),
    ({"teacher_ids": torch.zeros(37, 1025, dtype=torch.long), "teacher_probs": torch.zeros(37, 1025)}, flce.ShapeError, "K from 1 to 1024"),
    ({"teacher_ids": torch.zeros(36, 6, dtype=torch.long)}, flce.ShapeError, "teacher_ids has shape"),
    ({"teacher_ids": torch.zeros(37, 6)}, flce.DTypeError, "teacher_ids has dtype"),
    ({"teacher_ids": None}, flce.DTypeError, "teacher_ids"),
    ({"teacher_probs": torch.zeros(37, 5)}, flce.ShapeError, "teacher_probs has shape"),
    ({"teacher_probs": torch.zeros(37, 6, dtype=torch.long)}, flce.DTypeError, "teacher_probs has dtype"),
    ({"teacher_probs": torch.zeros(37, 6, requires_grad=True)}, flce.ArgumentError, "teacher_probs requires a gradient"),
    ({"teacher_probs": torch.zeros(37, 6, device="meta")}, flce.PlacementError, "teacher_probs is on meta"),
    ({"teacher_probs": [1.0]}, flce.DTypeError, "teacher_probs is a list"),
    ({"hard_weight": 0.5}, flce.ArgumentError, "target is None"),
    ({"shift": 1}, flce.ArgumentError, "target is None"),
    ({"hard_weight": 1.5, "target": torch.zeros(37, dtype=torch.long)}, flce.SpecError, "hard_weight"),
    ({"hard_weight": "half", "target": torch.zeros(37, dtype=torch.long)}, flce.DTypeError, "hard_weight"),
    ({"target": torch.zeros(36, dtype=torch.long)}, flce.ShapeError, "target has shape"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS, ids=str)
def test_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    problem = make_problem("cpu")
    arguments = {"teacher_ids": problem.teacher_ids, "teacher_probs": problem.teacher_probs} | change
    with pytest.raises(error, match=message):
        flce.linear_topk_distillation(problem.hidden, problem.weight, **arguments)


def test_a_teacher_of_hidden_states_that_are_a_part_has_the_targets_tokens() -> None:
    hidden, ids, probs = torch.zeros(4, 24), torch.zeros(8, 2, dtype=torch.long), torch.zeros(8, 2)
    for target in (ids[:, 0], None):
        assert check_teacher(ids, probs, hidden, target, over_ranks=True) == 2
    with pytest.raises(flce.ShapeError, match=r"teacher_ids has shape \[8, 2\]; it must be target's, .*\[6, 'K'\]"):
        check_teacher(ids, probs, hidden, ids[:6, 0], over_ranks=True)
    with pytest.raises(flce.ShapeError, match=r"teacher_ids has shape \[8, 2\]; it must be hidden's .*\[4, 'K'\]"):
        check_teacher(ids, probs, hidden, ids[:4, 0], over_ranks=False)


def test_kernel_is_found_ahead() -> None:
    kernel = flce.get_kernel(24, VOCAB, torch.float32, device="cpu", teacher_top_k=6)
    assert "teacher_top_k=6" in kernel.spec
    with pytest.raises(flce.SpecError, match="teacher_top_k"):
        flce.get_kernel(24, VOCAB, torch.float32, device="cpu", teacher_top_k=1025)
