"""get_kernel, warmup, explain, and that warming up is enough."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import assert_close, make_problem, reference
from torch._subclasses.fake_tensor import FakeTensorMode

import flce
from flce.core import _kernels, _memory, _native


def test_kernel_describes_itself(device: str) -> None:
    kernel = flce.get_kernel(64, 1000, torch.float32, device=device, softcap=30.0, bias=True, return_entropy=True)
    assert kernel.spec == "D=64,V=1000,dtype=fp32,bias,softcap=30,outputs=loss+entropy"
    assert kernel.plan.startswith("cpu:" if device == "cpu" else "cuda_")
    assert kernel.workspace_bytes(100, backward=False) <= kernel.workspace_bytes(100)
    assert kernel.spec in kernel.explain()
    explanation = kernel.explanation()
    assert explanation["plan"] == kernel.plan
    assert explanation["reasons"]
    for name in ("fp32", "float32"):
        assert flce.get_kernel(64, 1000, name, device=device, softcap=30, bias=True, return_entropy=True) is kernel


def test_explain_says_what_a_step_takes(device: str) -> None:
    text = flce.explain(64, 1000, torch.float32, device=device, num_tokens=100)
    kernel = flce.get_kernel(64, 1000, torch.float32, device=device, num_tokens=100)
    assert (
        f"workspace at 100 tokens: forward {kernel.workspace_bytes(100, backward=False)} bytes, backward {kernel.workspace_bytes(100)}"
        in text
    )


def test_explain_says_what_is_retained(device: str) -> None:
    kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device)
    layer = {"device": device, "num_tokens": 1 << 20}
    most, lendable = kernel.retained_bytes(1 << 20), kernel.retained_bytes(1 << 20, in_grad_weight=True)
    workspace = max(kernel.workspace_bytes(1 << 20, backward=which) for which in (False, True))
    for limit in (None, 1 << 40, workspace + most // 2):
        text = flce.explain(64, 3000, torch.bfloat16, workspace_limit_bytes=limit, **layer)
        allowed = 0 if limit is None else min(most, limit - workspace)
        expected = f"retained at 1048576 tokens: up to {most} bytes of which this limit allows {allowed}, or what fits in {lendable} bytes"
        assert (expected in text) == kernel.retains
    assert "retained at" not in flce.explain(64, 3000, torch.bfloat16, device=device, num_tokens=8)


_sizes = itertools.count(211)

CALLS: list[tuple[dict[str, Any], dict[str, Any], torch.dtype]] = [
    ({}, {}, torch.float32),
    ({"softcap": 7.0, "return_lse": True}, {"softcap": 7.0, "return_lse": True}, torch.bfloat16),
    ({"bias": True}, {"label_smoothing": 0.1, "bias": True}, torch.float32),
]


@pytest.mark.parametrize(("layer", "call", "dtype"), [(c | extra, c, dtype) for extra, c, dtype in CALLS], ids=["plain", "softcap", "bias"])
def test_nothing_is_left_to_compile_after_warmup(device: str, layer: dict[str, Any], call: dict[str, Any], dtype: torch.dtype) -> None:
    problem = make_problem(device, dtype, hidden_size=48, vocab_size=77, **call)
    (kernel,) = flce.warmup([{"hidden_size": 48, "vocab_size": 77, "dtype": dtype} | layer], num_tokens=[37], device=device)
    known = len(_kernels.all_kernels())
    result = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **problem.options)
    (result[0] if isinstance(result, tuple) else result).backward()
    assert len(_kernels.all_kernels()) == known
    assert kernel in _kernels.all_kernels()


def test_memory_that_a_kernel_keeps_is_made_in_nobodys_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, modes and default devices are a thread's own, as far as a CPU can show it."""
    waited_for = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited_for.append(device)))
    seen: list[Any] = []

    def make() -> torch.Tensor:
        seen.append(threading.get_ident())
        return torch.empty(3)

    cuda = torch.device("cuda", 0)
    with torch.inference_mode(), torch.device("meta"):
        tensor = _memory.make_once(cuda, make)
    assert seen[0] != threading.get_ident()
    assert not tensor.is_inference()
    assert tensor.device.type == "cpu"
    assert waited_for == [cuda]

    def fail() -> torch.Tensor:
        raise torch.OutOfMemoryError("on purpose")

    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        _memory.make_once(cuda, fail)


def test_a_kernel_made_in_inference_mode_reports_labels(device: str) -> None:
    problem = make_problem(device, hidden_size=40, vocab_size=79, ignored=0.0)
    problem.target[5] = 79
    with torch.inference_mode():
        kernel = flce.get_kernel(40, 79, torch.float32, device=device, num_tokens=problem.hidden.shape[0])
    assert not kernel.invalid_label.is_inference()
    assert not kernel.float_like.is_inference()
    flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target).backward()
    with pytest.raises(flce.LabelError):
        flce.check_labels()
    flce.check_labels()


def test_a_kernel_is_looked_up_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ in what is checked of them alone, their reduction here, ask the library no more."""
    problem = make_problem(device, torch.float32, num_tokens=12, hidden_size=40, vocab_size=77)
    asked = []
    get_kernel = _native.get_kernel
    monkeypatch.setattr(_native, "get_kernel", lambda *args: asked.append(args) or get_kernel(*args))
    for reduction in ("mean", "sum", "none", "mean"):
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction=reduction)
    assert len(asked) == 1


def test_concurrent_first_use_gives_one_kernel(device: str) -> None:
    found: list[flce.Kernel] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        found.append(flce.get_kernel(56, 333, torch.float32, device=device))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("name", ["hidden_major", "accumulate", "bias", "class_weight", "class_offset"])
def test_flags_that_are_no_flags(name: str) -> None:
    with pytest.raises(flce.DTypeError, match=f"{name} is 'no'; it must be True or False"):
        flce.get_kernel(64, 10, torch.float32, device="cpu", **{name: "no"})


@pytest.mark.parametrize("num_tokens", [-1, "8", 8.0])
def test_a_number_of_tokens_that_is_none(num_tokens: Any) -> None:
    with pytest.raises(flce.ArgumentError, match=f"num_tokens is {num_tokens!r}; it must be an integer"):
        flce.get_kernel(64, 10, torch.float32, device="cpu", workspace_limit_bytes=1 << 30, num_tokens=num_tokens)


def no_mode() -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize("mode", [no_mode, torch.no_grad, torch.inference_mode, FakeTensorMode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("calls", ["first", "direct"])
def test_a_kernel_first_made_under_a_mode_is_like_any_other(device: str, mode: Any, calls: str) -> None:
    flce.check_labels()
    vocab_size = next(_sizes)  # a size whose kernel nobody has made
    problem = make_problem(device, vocab_size=vocab_size, ignored=0.0)
    known = len(_kernels.all_kernels())
    with mode():
        flce.get_kernel(24, vocab_size, torch.float32, device=device, num_tokens=problem.hidden.shape[0])
        assert len(_kernels.all_kernels()) == known + 1
    wrong = problem.target.clone()
    wrong[7] = vocab_size
    for inside in (mode if mode is not FakeTensorMode else no_mode, no_mode):
        with inside():
            for _ in range(3 if calls == "direct" else 1):
                flce.linear_cross_entropy(problem.hidden, problem.weight, wrong)
        with pytest.raises(flce.LabelError, match=r"target\[7\]"):  # outside, and once
            flce.check_labels()
        flce.check_labels()
    with torch.inference_mode():
        flce.linear_cross_entropy(problem.hidden, problem.weight, wrong)
        with pytest.raises(flce.LabelError):
            flce.check_labels()
    for _ in range(3):
        gradients = torch.autograd.grad(
            flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target), (problem.hidden, problem.weight)
        )
    expected = torch.autograd.grad(reference(problem.hidden, problem.weight, problem.target)["loss"], (problem.hidden, problem.weight))
    for actual, right in zip(gradients, expected, strict=True):
        assert_close(actual, right, torch.float32)


@pytest.mark.gpu
def test_check_labels_waits_for_every_stream(device: str) -> None:
    problem = make_problem(device, ignored=0.0)
    wrong = problem.target.clone()
    wrong[7] = 101
    flce.linear_cross_entropy(problem.hidden, problem.weight, wrong)
    with pytest.raises(flce.LabelError):
        flce.check_labels()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # cycles: the call behind it has not run when check_labels begins
            flce.linear_cross_entropy(problem.hidden, problem.weight, wrong if stream is streams[1] else problem.target)
    with pytest.raises(flce.LabelError, match=r"target\[7\]"):
        flce.check_labels()
    flce.check_labels()


def test_a_kernel_shows_what_users_ask() -> None:
    kernel = flce.get_kernel(64, 100, torch.float32, device="cpu")
    public = {"device", "spec", "plan", "explain", "explanation", "workspace_bytes", "retained_bytes", "choose_retained"}
    for shown in (dir(flce.Kernel), dir(kernel)):
        assert {name for name in shown if not name.startswith("_")} == public
    assert isinstance(kernel, flce.Kernel) and kernel.device == torch.device("cpu")


def test_explain_says_that_a_hidden_size_is_padded() -> None:
    said = "hidden_size 60 is no multiple of 8: a call copies hidden and weight with zeros for columns 60 to 63"
    assert said in flce.explain(60, 100, "fp32", device="cpu")
    assert "no multiple" not in flce.explain(64, 100, "fp32", device="cpu")


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (lambda: flce.warmup({"hidden_size": 64}), flce.ArgumentError, r"layers is a dict; it must be a list"),  # type: ignore[arg-type]
        (lambda: flce.warmup(3), flce.ArgumentError, r"layers is a int; it must be a list"),  # type: ignore[arg-type]
        (lambda: flce.warmup(["D=64"]), flce.ArgumentError, r"a layer is a str; it must be a mapping"),  # type: ignore[list-item]
        (lambda: flce.warmup([{"hidden": 64}]), flce.ArgumentError, r"a layer has 'hidden'; allowed are hidden_size, vocab_size"),
        (lambda: flce.warmup([{"hidden_size": 64}]), flce.ArgumentError, r"a layer has no vocab_size"),
        (lambda: flce.explain(64, 100, colour=1), flce.ArgumentError, r"a layer has 'colour'"),
        (
            lambda: flce.get_kernel(64, 100, device="tpu"),
            flce.PlacementError,
            r"device is 'tpu'; allowed are cpu, cuda.*flce explain --device h100",
        ),
        (lambda: flce.get_kernel(64, 100, device=3.5), flce.PlacementError, r"device is 3\.5"),  # type: ignore[arg-type]
        (lambda: flce.get_kernel(64, 100, []), flce.DTypeError, r"dtype is \[\]"),  # type: ignore[arg-type]
    ],
)
def test_layers_of_another_form(work: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        work()


def test_bad_layers() -> None:
    with pytest.raises(flce.SpecError, match="V"):
        flce.get_kernel(64, 1, torch.float32, device="cpu")
    with pytest.raises(flce.DTypeError, match=r"dtype is torch\.float64; allowed are torch\.bfloat16"):
        flce.get_kernel(64, 10, torch.float64, device="cpu")
    with pytest.raises(flce.PlanError):
        flce.get_kernel(64, 10, torch.float32, device="cpu", workspace_limit_bytes=16)


def test_a_child_process_finds_locks_open_that_another_thread_held() -> None:
    budget = flce.MemoryBudget(1 << 30)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "flce"]
    kinds = (type(threading.Lock()), type(threading.RLock()))
    owners = [budget, *(module for module in modules if isinstance(getattr(module, "_lock", None), kinds))]
    assert len(owners) > 2  # and each lock of a module has this name
    assert all(name == "_lock" for module in modules for name, value in vars(module).items() if isinstance(value, kinds))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for owner in owners:
                stack.enter_context(owner._lock)
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        try:
            os._exit(sum(not owner._lock.acquire(blocking=False) for owner in owners))
        finally:
            os._exit(100)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
