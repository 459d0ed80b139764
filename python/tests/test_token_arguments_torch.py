"""Torch's ways with calls that have temperature, token_weight, dft, top1 and log_sum_sq_probs, and with linear_logprobs: compilers, hooks,
checkpoints, threads, and refusals by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from levels import QUICK
from support import OUTPUTS, Problem, assert_close, check, in_double, make_problem, reference
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flce
from flce.call._direct import DirectCall
from flce.call._options import call_options
from flce.core import _autograd, _kernels

FUNCTIONS = ["linear_cross_entropy", "linear_logprobs"]
ROWS = {
    "linear_cross_entropy": {"temperature": True, "token_weight": True, "dft": True, "reduction": "weighted_mean"},
    "linear_logprobs": {"temperature": True},
}
EXTRA = {function: {f"return_{name}": True for name in names[1:]} for function, names in OUTPUTS.items()}


def make(device: str, function: str, **options: Any) -> Problem:
    return make_problem(device, **(ROWS[function] | EXTRA[function] | options))


def call(problem: Problem, function: str, **options: Any) -> Any:
    return getattr(flce, function)(problem.hidden, problem.weight, problem.target, **(problem.options | options))


def total(outputs: Any) -> Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([(i + 1) * output.sum() for i, output in enumerate(outputs) if output.is_floating_point()]).sum()


def gradients(problem: Problem, outputs: Any, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total(outputs), (problem.hidden, problem.weight), **options)


def all_equal(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ── Operators and compilers ─────────────────────────

OPCHECKS = [
    ("outputs=logprobs", 0, False),
    ("outputs=logprobs+entropy+top1+log_sum_sq_probs", 0, False),
    ("dft,outputs=loss+logprobs", 3, True),
    ("dft,z_loss=0.01,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs", 2, True),
]


@pytest.mark.parametrize(("options", "reduction", "weighted"), OPCHECKS)
def test_opcheck(device: str, options: str, reduction: int, weighted: bool) -> None:
    problem = make_problem(device, bias=True, temperature=True, token_weight=weighted)
    rows = (problem.options["temperature"], problem.options.get("token_weight"))
    rest = (problem.options["bias"], None, None, options, -100, reduction, 0)
    operators = torch.ops.flce
    torch.library.opcheck(operators.linear_cross_entropy.default, (problem.hidden, problem.weight, problem.target, *rest, 0, *rows))
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    values, saved, _ = operators.linear_cross_entropy(hidden, weight, problem.target, *rest, 0, *rows)
    arguments = (torch.ones_like(values), hidden, weight, problem.target, saved.detach(), *rest, (True, True, True), *rows)
    torch.library.opcheck(
        operators.linear_cross_entropy_backward.default,
        tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments),
    )


def _compiled(function: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(getattr(flce, function), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("number", [None, 0.6], ids=["rows", "number"])
def test_compiled_matches_fp64(device: str, function: str, number: float | None) -> None:
    options = {} if number is None else {"temperature": number}
    check(make(device, function, **options), torch.float32, function, _compiled(function))
    check(make_problem(device, temperature=number), torch.float32, function, _compiled(function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_by_inductor(device: str, function: str) -> None:
    torch._dynamo.reset()
    check(make(device, function), torch.float32, function, torch.compile(getattr(flce, function), fullgraph=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_with_changing_tokens(device: str, function: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(flce, function), fullgraph=True, backend=counter)
    for index, num_tokens in enumerate((9, 20, 33)):
        check(make(device, function, num_tokens=num_tokens), torch.float32, function, compiled)
        assert counter.frame_count == min(index + 1, 2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_dispatch_modes(device: str, function: str) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    problem = make(device, function)
    expected = call(problem, function)
    with Watch():
        actual = call(problem, function)
    assert all_equal(actual, expected)
    assert all_equal(gradients(problem, actual), gradients(problem, expected))


@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_shapes_without_data(mode: str) -> None:
    def run(device: str) -> None:
        hidden, weight = torch.zeros(2, 3, 8, device=device), torch.zeros(11, 8, device=device)
        target, rows = torch.zeros(2, 3, dtype=torch.long, device=device), torch.ones(2, 3, device=device)
        outputs = flce.linear_logprobs(hidden, weight, target, temperature=rows, **EXTRA["linear_logprobs"])
        assert [output.shape for output in outputs] == [(2, 3)] * 4
        assert [output.dtype for output in outputs] == [torch.float32, torch.float32, torch.int64, torch.float32]
        loss, top1 = flce.linear_cross_entropy(hidden, weight, target, token_weight=rows, dft=True, temperature=0.5, return_top1=True)
        assert (loss.shape, top1.shape) == ((), (2, 3))

    if mode == "meta":
        run("meta")
    else:
        with FakeTensorMode():
            run("cpu")


# ── Autograd ────────────────────────────────────────


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device: str, function: str, use_reentrant: bool) -> None:
    problem = make(device, function)

    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        return total(getattr(flce, function)(hidden, weight, problem.target, **problem.options))

    expected = torch.autograd.grad(block(problem.hidden, problem.weight), (problem.hidden, problem.weight))
    checkpoint(block, problem.hidden, problem.weight, use_reentrant=use_reentrant).backward()
    assert all_equal((problem.hidden.grad, problem.weight.grad), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "back", [lambda t: t.clone(), lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t], ids=["copied", "strided"]
)
def test_hooks_on_saved_tensors(device: str, function: str, back: Callable[[Tensor], Tensor]) -> None:
    problem = make(device, function)
    expected = gradients(problem, call(problem, function))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: back(t.to(device))):
        outputs = call(problem, function)
    assert all_equal(gradients(problem, outputs), expected)


def test_a_hook_that_gives_back_another_form_is_refused(device: str) -> None:
    problem = make_problem(device, temperature=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t[:5] if t.data_ptr() == problem.options["temperature"].data_ptr() else t
    ):
        logprobs = call(problem, "linear_logprobs")
    with pytest.raises(flce.ShapeError, match=r"temperature has shape \[5\]; it must be \[37\] \(in backward"):
        logprobs.sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "plain"])
def test_second_backward_and_second_derivative(device: str, function: str, rows: bool) -> None:
    problem = make(device, function) if rows else make_problem(device)
    for _ in range(3):  # the later ones are direct where there are no rows
        outputs = call(problem, function)
        first = gradients(problem, outputs, retain_graph=True)
        assert all_equal(gradients(problem, outputs, retain_graph=True), first)
        again = gradients(problem, outputs, create_graph=True)
        assert all_equal(again, first)
        with pytest.raises(flce.UnsupportedTransformError, match="no second derivatives"):
            again[0].sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inplace_change_of_a_temperature_is_noticed(device: str, function: str) -> None:
    problem = make(device, function)
    outputs = call(problem, function)
    problem.options["temperature"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(problem, outputs)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device: str, function: str, dtype: torch.dtype) -> None:
    problem = make(device, function)
    with torch.autocast(device, dtype=dtype):
        outputs = call(problem, function)
    rounded = Problem(
        *(tensor.detach().to(dtype).requires_grad_() for tensor in (problem.hidden, problem.weight)), problem.target, problem.options
    )
    exact = in_double(rounded)
    expected = reference(exact.hidden, exact.weight, exact.target, **exact.options)
    for name, output in zip(OUTPUTS[function], outputs, strict=True):
        if name != "top1":
            assert_close(output, expected[name], dtype, name, output=True)
    wanted = total(
        tuple(expected[name] if outputs[i].requires_grad else expected[name].detach() for i, name in enumerate(OUTPUTS[function]))
    )
    for actual, right in zip(gradients(problem, outputs), torch.autograd.grad(wanted, (exact.hidden, exact.weight)), strict=True):
        assert_close(actual, right, dtype)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_threads(device: str, function: str) -> None:
    problem = make(device, function, num_tokens=64, vocab_size=700)
    cases = []
    for factor in (0.5, 2.0):
        rows = {"temperature": problem.options["temperature"] * factor}
        outputs = call(problem, function, **rows)
        cases.append((rows, [*outputs, *gradients(problem, outputs)]))
    failures: list[int] = []
    done: list[int] = []

    def work(index: int) -> None:
        rows, expected = cases[index]
        for _ in range(15):
            outputs = call(problem, function, **rows)
            if not all_equal([*outputs, *gradients(problem, outputs)], expected):
                failures.append(index)
        done.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(done) == [0, 1]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_grad(device: str, function: str) -> None:
    problem = make(device, function)
    expected = call(problem, function)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = call(problem, function)
        assert all_equal(outputs, expected)
        assert not any(output.requires_grad for output in outputs)


def test_gradients_of_the_weight_are_added_to_a_buffer(device: str) -> None:
    for function in FUNCTIONS:
        problem = make(device, function)
        expected = gradients(problem, call(problem, function))
        buffer = torch.ones_like(problem.weight, requires_grad=False)
        total(call(problem, function, grad_weight_out=buffer)).backward()
        assert problem.weight.grad is None
        assert_close(buffer - 1, expected[1], torch.float32, factor=3)


def test_direct_calls_of_logprobs(device: str) -> None:
    problem = make_problem(device, num_tokens=36)
    hidden, target = problem.hidden.view(4, 9, 24).detach().requires_grad_(), problem.target.view(4, 9)
    upstream = torch.randn(4, 9, device=device)
    runs = []
    for _ in range(4):
        logprobs = flce.linear_logprobs(hidden, problem.weight, target)
        runs.append((logprobs, *torch.autograd.grad(logprobs, (hidden, problem.weight), upstream)))
    assert [_autograd.python_node(run[0]).name() == "LinearCrossEntropyDirectBackward" for run in runs] == [False, True, True, True]
    assert all(all_equal(run, runs[0]) for run in runs[1:])
    # One layer with other outputs or a temperature is another call.
    assert isinstance(flce.linear_logprobs(hidden, problem.weight, target, return_entropy=True), tuple)
    halved = flce.linear_logprobs(hidden, problem.weight, target, temperature=2.0)
    expected = reference(hidden, problem.weight, target, temperature=2.0)["logprobs"]
    assert_close(halved, expected, torch.float32, output=True)
    assert flce.linear_cross_entropy(hidden, problem.weight, target).shape == ()


def test_a_ratio_of_policies(device: str) -> None:
    """PPO's and GRPO's objective: gradients of a clipped ratio with an entropy bonus."""
    problem = make_problem(device, temperature=True)
    advantage, old = torch.randn(37, device=device), torch.randn(37, device=device) - 4
    mask = (problem.target != -100).float()

    def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
        ratio = torch.exp(0.1 * (logprobs - old.to(logprobs.dtype)))
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return ((clipped + 0.01 * entropy) * mask).sum() / mask.sum()

    actual = torch.autograd.grad(objective(*call(problem, "linear_logprobs", return_entropy=True)), (problem.hidden, problem.weight))
    exact = in_double(problem)
    expected = reference(exact.hidden, exact.weight, exact.target, **exact.options)
    wanted = torch.autograd.grad(objective(expected["logprobs"], expected["entropy"]), (exact.hidden, exact.weight))
    for value, right in zip(actual, wanted, strict=True):
        assert_close(value, right, torch.float32, factor=2)


# ── Kernels by name, losses ─────────────────────────


def test_kernels_are_found_by_name(device: str) -> None:
    problem = make_problem(device, temperature=True, token_weight=True)
    common: dict[str, Any] = {"device": device, "dtype": torch.float32, "num_tokens": problem.hidden.shape[0]}
    named = [
        flce.get_kernel(24, 101, temperature=True, return_loss=False, return_logprobs=True, return_top1=True, **common),
        flce.get_kernel(24, 101, temperature=True, token_weight=True, dft=True, return_log_sum_sq_probs=True, **common),
    ]
    before = len(_kernels.all_kernels())
    flce.linear_logprobs(problem.hidden, problem.weight, problem.target, temperature=0.5, return_top1=True)
    flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, dft=True, return_log_sum_sq_probs=True, **problem.options)
    assert len(_kernels.all_kernels()) == before
    assert "outputs=logprobs+top1" in named[0].spec and "temperature" in named[0].spec
    assert all(key in named[1].spec for key in ("temperature", "token_weight", "dft", "outputs=loss+logprobs+log_sum_sq_probs"))


@pytest.mark.pairwise
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "weighted_mean"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1, "class_weight": True}], ids=["plain", "others"])
@pytest.mark.parametrize("temperature", [0.7, "rows", "faulty rows"])
def test_implementations_agree(device: str, reduction: str, options: dict[str, Any], temperature: Any) -> None:
    head = nn.Linear(16, 50, device=device)
    hidden = torch.randn(3, 12, 16, device=device, requires_grad=True)
    labels = torch.randint(0, 50, (3, 12), device=device)
    labels[0, 5:] = -100
    if "class_weight" in options:
        options = options | {"class_weight": torch.linspace(0.5, 2, 50, device=device)}
    rows = temperature if temperature == 0.7 else torch.rand(3, 12, device=device) + 0.5
    if temperature == "faulty rows":
        rows[1, 2], rows[2, 3] = 0, torch.nan
    results = []
    # Each graph of inductor takes seconds: one for a number, one for each option of rows.
    compiles = not QUICK and (reduction == "mean" if temperature == 0.7 else reduction in ("none", "weighted_mean"))
    for impl in ("flce", "pytorch", "torch_compile") if compiles else ("flce", "pytorch"):
        loss_fn = flce.LinearCrossEntropyLoss(
            head, impl=impl, chunk_size=10, dft=True, reduction=reduction, temperature=2.0, shift=1, **options
        )
        loss = loss_fn(hidden, labels, temperature=rows, token_weight=torch.arange(36, device=device).view(3, 12) % 4)
        results.append((loss, *torch.autograd.grad(loss.sum(), [hidden, *head.parameters()])))
    for other in results[1:]:
        for actual, right in zip(other, results[0], strict=True):
            assert_close(actual, right, torch.float32, factor=2)
    if temperature == "faulty rows":
        with pytest.raises(flce.LabelError):
            flce.check_labels()


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_a_temperature_is_an_option_of_losses(device: str, impl: str) -> None:
    head = nn.Linear(16, 50, bias=False, device=device)
    hidden, labels = torch.randn(3, 12, 16, device=device), torch.randint(0, 50, (3, 12), device=device)
    for kind in (flce.LinearCrossEntropyLoss, flce.PipelineFusedLoss):
        loss = kind(head, shift=1, impl=impl, temperature=0.5)(hidden, labels)
        expected = reference(hidden, head.weight, flce.shift_labels(labels), temperature=0.5)["loss"]
        assert_close(loss, expected, torch.float32, output=True)
        weighted = kind(head, shift=1, impl=impl, reduction="weighted_mean")(hidden, labels, token_weight=torch.ones_like(labels))
        assert_close(weighted, reference(hidden, head.weight, flce.shift_labels(labels))["loss"], torch.float32, output=True)


# ── Refusals ────────────────────────────────────────

N = 37
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": 0}, flce.ArgumentError, r"temperature is 0.0; it must be between 2\^-100 and 2\^100"),
    ({"temperature": -0.5}, flce.ArgumentError, r"temperature is -0.5"),
    ({"temperature": float("nan")}, flce.ArgumentError, r"temperature is nan"),
    ({"temperature": float("inf")}, flce.ArgumentError, r"temperature is inf"),
    ({"temperature": 2.0**101}, flce.ArgumentError, r"temperature is 2\.5.*e\+30"),
    ({"temperature": 2.0**-101}, flce.ArgumentError, r"temperature is 3\.9.*e-31"),
    ({"temperature": 1e39}, flce.ArgumentError, r"temperature is 1e\+39"),
    ({"temperature": 1e-39}, flce.ArgumentError, r"temperature is 1e-39"),
    ({"temperature": "hot"}, flce.DTypeError, r"temperature is a str; it must be a number or a float32 tensor of target's shape"),
    ({"temperature": [1.0] * N}, flce.DTypeError, r"temperature is a list"),
    ({"temperature": 1j}, flce.DTypeError, r"temperature is a complex"),
    ({"temperature": torch.ones(N - 1)}, flce.ShapeError, r"temperature has shape \[36\]; it must be target's, \[37\]"),
    ({"temperature": torch.ones(())}, flce.ShapeError, r"temperature has shape \[\]"),
    ({"temperature": torch.ones(N, dtype=torch.bfloat16)}, flce.DTypeError, r"temperature has dtype torch.bfloat16.*float32"),
    ({"temperature": torch.ones(N, dtype=torch.float64)}, flce.DTypeError, r"temperature has dtype torch.float64"),
    ({"temperature": torch.ones(N, dtype=torch.complex64)}, flce.DTypeError, r"temperature has dtype torch.complex64"),
    ({"temperature": torch.ones(N, device="meta")}, flce.PlacementError, r"temperature is on meta; it must be on hidden's device, cpu"),
    ({"temperature": torch.ones(N, requires_grad=True)}, flce.ArgumentError, r"temperature requires a gradient.*detach"),
    ({"temperature": torch.ones(N).to_sparse()}, flce.ArgumentError, r"temperature is a tensor of layout torch.sparse_coo"),
]
REFUSED_WEIGHTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"token_weight": 2.0}, flce.DTypeError, r"token_weight is a float; it must be a tensor"),
    ({"token_weight": torch.ones(N, 1)}, flce.ShapeError, r"token_weight has shape \[37, 1\]; it must be target's, \[37\]"),
    ({"token_weight": torch.ones(N, dtype=torch.complex64)}, flce.DTypeError, r"token_weight has dtype torch.complex64; it must be real"),
    ({"token_weight": torch.ones(N, device="meta")}, flce.PlacementError, r"token_weight is on meta"),
    (
        {"token_weight": torch.ones(N, requires_grad=True)},
        flce.ArgumentError,
        r"token_weight requires a gradient.*multiply the losses of reduction='none'",
    ),
    ({"reduction": "weighted_mean"}, flce.ArgumentError, r"reduction is 'weighted_mean' and token_weight is None"),
    (
        {"reduction": "weighted_mean", "token_weight": torch.ones(N), "num_valid_tokens": 3},
        flce.ArgumentError,
        r"num_valid_tokens is given with reduction 'weighted_mean'; only 'mean'",
    ),
]


@pytest.mark.parametrize(
    ("changes", "kind", "message"), REFUSED + REFUSED_WEIGHTS + [({"dft": 1}, flce.DTypeError, r"dft is 1; it must be")]
)
@pytest.mark.parametrize("impl", [*FUNCTIONS, "pytorch"])
def test_refused_by_name(impl: str, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    if impl == "linear_logprobs" and "temperature" not in changes:
        pytest.skip("not an argument of linear_logprobs")
    problem = make_problem("cpu")
    if impl != "pytorch":
        for before in ({}, {"dft": True}) if "dft" in changes else ({},):  # memories of other calls change nothing
            for _ in range(3):
                getattr(flce, impl)(problem.hidden, problem.weight, problem.target, **before)
        with pytest.raises(kind, match=message):
            getattr(flce, impl)(problem.hidden, problem.weight, problem.target, **changes)
        return
    head = nn.Linear(24, 101)
    options = {name: changes[name] for name in ("reduction", "dft") if name in changes}
    if "num_valid_tokens" in changes:
        pytest.skip("looked at by the functions")
    with pytest.raises(kind, match=message):
        loss = flce.LinearCrossEntropyLoss(head, impl="pytorch", shift=0, **options)
        loss(problem.hidden, problem.target, **{name: value for name, value in changes.items() if name not in options})


def test_a_buffer_in_their_memory_is_refused() -> None:
    problem = make_problem("cpu")
    buffer = torch.zeros(101, 24)
    for name in ("temperature", "token_weight"):
        with pytest.raises(flce.ArgumentError, match=f"grad_weight_out shares memory with {name}"):
            call(problem, "linear_cross_entropy", grad_weight_out=buffer, **{name: buffer.view(-1)[100:137]})


def test_sharded_rows(tmp_path: Path) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        problem = make_problem("cpu")
        for name in ("temperature", "token_weight"):
            rows = distribute_tensor(torch.ones(37), mesh, [Shard(0)])
            with pytest.raises(flce.PlacementError, match=rf"{name} is a DTensor with placements \[Shard\(dim=0\)\]"):
                call(problem, "linear_cross_entropy", **{name: rows})
    finally:
        torch.distributed.destroy_process_group()


def test_transforms_are_refused(device: str) -> None:
    problem = make_problem(device, temperature=True)
    with pytest.raises(flce.UnsupportedTransformError):
        torch.func.vmap(lambda h: flce.linear_logprobs(h, problem.weight, problem.target))(problem.hidden[None])
    logprobs = call(problem, "linear_logprobs")
    with pytest.raises(flce.UnsupportedTransformError, match="cannot be batched"):
        torch.autograd.grad(logprobs, problem.hidden, torch.eye(37, device=device), is_grads_batched=True)


def test_direct_calls_exist_where_they_are_said_to(device: str) -> None:
    problem = make_problem(device)
    plain = flce.get_kernel(24, 101, torch.float32, device=device)
    logprobs = flce.get_kernel(24, 101, torch.float32, device=device, return_loss=False, return_logprobs=True)
    with_rows = flce.get_kernel(24, 101, torch.float32, device=device, temperature=True)
    for kernel, fits in ((plain, True), (logprobs, True), (with_rows, False)):
        assert DirectCall.fits(kernel, problem.hidden, problem.weight, problem.target, call_options()) is fits
