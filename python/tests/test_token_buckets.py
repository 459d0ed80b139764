"""Calls are planned for the token bucket of their own number of rows; equal plans share a kernel."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from support import assert_close, make_problem, reference
from torch._dynamo.testing import CompileCounterWithBackend

import flce
from flce.core import _kernels, _native

_sizes = itertools.count(1511)  # vocabularies that no other test has


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that the library is asked for."""
    numbers: list[int] = []
    real = _native.get_kernel

    def get_kernel(session: ctypes.c_void_p, spec: str, limit: int, num_tokens: int) -> ctypes.c_void_p:
        numbers.append(num_tokens)
        return real(session, spec, limit, num_tokens)

    monkeypatch.setattr(_native, "get_kernel", get_kernel)
    return numbers


@pytest.fixture
def short_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few tokens have a plan of their own, as with tuning records: chunks of another size."""
    real = _native.get_kernel

    def get_kernel(session: ctypes.c_void_p, spec: str, limit: int, num_tokens: int) -> ctypes.c_void_p:
        handle = real(session, spec, limit, num_tokens)
        if num_tokens > 256:
            return handle
        text = _native.text(_native.library().flce_kernel_text, handle, _native.TEXT_PLAN)
        fields = dict(field.split("=") for field in text.split(":")[1].split(",") if "=" in field)
        plan = text.replace(f"chunk={fields['chunk']}", f"chunk={int(fields['chunk']) // 2 // 192 * 192}")
        options = _native.KernelOptions(struct_size=ctypes.sizeof(_native.KernelOptions), plan=plan.encode())
        other = ctypes.c_void_p()
        _native.check(_native.library().flce_get_kernel(session, spec.encode(), ctypes.byref(options), ctypes.byref(other)))
        return other

    monkeypatch.setattr(_native, "get_kernel", get_kernel)


def test_buckets_are_the_librarys() -> None:
    assert _native.token_buckets() == (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    numbers = (0, 1, 64, 128, 129, 512, 513, 1024, 5792, 5793, 1 << 40)
    assert [_native.token_bucket(n) for n in numbers] == [4096, 64, 64, 64, 256, 256, 1024, 1024, 4096, 8192, 65536]


@pytest.mark.parametrize("function", ["loss", "logprobs", "operator"])
def test_a_call_asks_for_the_bucket_of_its_rows(device: str, asked: list[int], function: str) -> None:
    vocab_size = next(_sizes)
    for shape, bucket in (((1, 64), [64]), ((129,), [256]), ((100,), []), ((2, 500), [1024]), ((6000,), [8192])):
        hidden = torch.randn(*shape, 24, device=device, requires_grad=True)
        weight = torch.randn(vocab_size, 24, device=device, requires_grad=True)
        target = torch.zeros(shape, dtype=torch.int64, device=device)
        asked.clear()
        for _ in range(3):  # the third is a direct call
            if function == "logprobs":
                flce.linear_logprobs(hidden, weight, target).sum().backward()
            elif function == "loss":
                flce.linear_cross_entropy(hidden, weight, target).backward()
            else:
                rows, rule = (hidden.reshape(-1, 24), weight, target.reshape(-1)), (None, None, None, "", -100, 1, 0)
                torch.ops.flce.linear_cross_entropy(*rows, *rule)[0].backward()
        assert asked == bucket


def test_a_limit_is_for_the_calls_own_number(device: str, asked: list[int]) -> None:
    problem = make_problem(device, num_tokens=100, vocab_size=next(_sizes))
    flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, workspace_limit_bytes=1 << 30).backward()
    assert asked == [100]


def test_buckets_of_one_plan_share_a_kernel(device: str) -> None:
    vocab_size = next(_sizes)
    compiled = flce.cache_statistics()["compiled"]
    kernels = {flce.get_kernel(24, vocab_size, torch.float32, device=device, num_tokens=n) for n in (None, 1, 200, 3000, 4096, 70000)}
    assert len(kernels) == len({kernel.plan for kernel in kernels})
    if device == "cpu":
        assert len(kernels) == 1
        assert flce.cache_statistics()["compiled"] <= compiled + 1


def test_warmup_leaves_nothing_to_find_for_its_numbers(device: str, asked: list[int]) -> None:
    vocab_size = next(_sizes)
    layer = {"hidden_size": 24, "vocab_size": vocab_size, "dtype": torch.float32}
    flce.warmup([layer], device=device, num_tokens=[100, 4096])
    assert asked == [64, 4096]
    flce.warmup([{**layer, "num_tokens": 300}], device=device, num_tokens=4096)
    assert asked == [64, 4096, 256]
    flce.warmup([layer], device=device)
    assert sorted(asked) == sorted(_native.token_buckets())
    asked.clear()
    for num_tokens in (1, 100, 700, 3000):
        problem = make_problem(device, num_tokens=num_tokens, vocab_size=vocab_size)
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target).backward()
    assert asked == []
    flce.warmup([{**layer, "workspace_limit_bytes": 1 << 30}], device=device, num_tokens=(7, 4096))
    assert asked == [7, 4096]
    with pytest.raises(flce.ArgumentError, match="num_tokens is 'few'"):
        flce.warmup([layer], device=device, num_tokens="few")  # type: ignore[arg-type]


def test_forward_and_backward_have_the_plan_of_their_bucket(short_plan: None) -> None:
    vocab_size = 3000 + next(_sizes)
    few, many = (flce.get_kernel(64, vocab_size, torch.float32, device="cpu", num_tokens=n) for n in (100, 4096))
    assert few.plan != many.plan
    assert flce.warmup([{"hidden_size": 64, "vocab_size": vocab_size, "dtype": "fp32"}], device="cpu") == [few, many]
    used: list[Any] = []
    for kernel in (few, many):
        kernel.run = lambda *args, k=kernel: (used.append(k), _kernels.LoadedKernel.run(k, *args))  # type: ignore[method-assign]
    for num_tokens, expected in ((100, few), (600, many)):
        problem = make_problem("cpu", num_tokens=num_tokens, hidden_size=64, vocab_size=vocab_size)
        for _ in range(3):
            loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
            gradients = torch.autograd.grad(loss, (problem.hidden, problem.weight))
        right = torch.autograd.grad(reference(problem.hidden, problem.weight, problem.target)["loss"], (problem.hidden, problem.weight))
        for actual, one in zip(gradients, right, strict=True):
            assert_close(actual, one, torch.float32)
        assert used == [expected] * 6
        used.clear()


def test_changing_numbers_of_tokens_are_one_graph(short_plan: None, asked: list[int]) -> None:
    torch._dynamo.reset()
    vocab_size = next(_sizes)
    counter = CompileCounterWithBackend("aot_eager")

    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend=counter)
    for num_tokens in (70, 200, 900, 3000):
        problem = make_problem("cpu", num_tokens=num_tokens, vocab_size=vocab_size)
        for tensor in (problem.hidden, problem.target):
            torch._dynamo.mark_dynamic(tensor, 0)
        loss = compiled(problem.hidden, problem.weight, problem.target)
        loss.backward()
        assert_close(loss, reference(problem.hidden, problem.weight, problem.target)["loss"], torch.float32)
    assert counter.frame_count == 1
    assert asked == [64, 256, 1024, 4096]


def test_a_capture_that_would_compile_names_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    kernel = flce.get_kernel(24, next(_sizes), torch.float32, device="cpu", num_tokens=64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    key = kernel.key._replace(device=torch.device("cuda", 0), num_tokens=256)
    with pytest.raises(flce.UnavailableError, match=r"with 256 tokens is not loaded yet.*flce\.warmup"):
        _kernels.find(key)


@pytest.mark.gpu
def test_a_graph_is_captured_after_warmup_with_its_number_of_tokens(device: str) -> None:
    vocab_size = next(_sizes)
    layer = {"hidden_size": 64, "vocab_size": vocab_size}
    flce.warmup([layer], device=device, num_tokens=200)
    problem = make_problem(device, torch.bfloat16, num_tokens=200, hidden_size=64, vocab_size=vocab_size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    graph.replay()
    assert torch.equal(loss, flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target))
