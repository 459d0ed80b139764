"""Retained memory on a GPU: what the allocator says of the limit, streams, and CUDA graphs of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from retain_support import ALL, LENT, NONE, OWN, Watched, check, gradients_of, loss_of, make
from support import make_problem
from torch import Tensor

import flce


def measured_step(problem: Any, **options: Any) -> int:
    """Bytes at the peak of a step beyond inputs and gradients."""
    problem.hidden.grad = problem.weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(problem, **options).backward()
    return torch.cuda.max_memory_allocated() - before - problem.hidden.nbytes - problem.weight.nbytes


@pytest.mark.gpu
def test_the_limit_holds_for_everything(device: str) -> None:
    num_tokens, hidden_size, vocab_size = 4096, 512, 40000
    problem = make_problem(device, torch.bfloat16, num_tokens=num_tokens, hidden_size=hidden_size, vocab_size=vocab_size)
    least = (64 << 20) + 4 * num_tokens * hidden_size
    small = 3 << 20  # lse, loss, and what the allocator adds: up to 1 MiB a block
    for choice in (None, False):
        measured_step(problem, retain_in_grad_weight=choice)
        assert measured_step(problem, retain_in_grad_weight=choice) <= least + small
        for limit in (least // 2, least, 2 * least, 3 * least):
            assert measured_step(problem, retain_in_grad_weight=choice, workspace_limit_bytes=limit) <= limit + small
            check(problem, (problem.hidden.grad, problem.weight.grad))


@pytest.mark.gpu
class TestCuda:
    def test_another_stream(self, device: str, watched: Watched) -> None:
        problem = make(device, 200)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            problem.hidden.grad = problem.weight.grad = None
            with torch.cuda.stream(stream):
                loss = loss_of(problem)
                loss.backward()
            torch.cuda.current_stream().wait_stream(stream)
            assert watched.take() == [LENT]
            check(problem, (problem.hidden.grad, problem.weight.grad))
            watched.take()
            torch.cuda.synchronize()

    @pytest.mark.parametrize(
        ("options", "used"), [({}, NONE), ({"retain_in_grad_weight": True}, LENT), ({"workspace_limit_bytes": ALL}, OWN)]
    )
    def test_both_passes_in_a_graph(self, device: str, watched: Watched, options: dict[str, Any], used: str) -> None:
        problem = make(device, 200)

        def both() -> tuple[Tensor, ...]:
            return gradients_of(problem, loss_of(problem, **options))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            both()
        torch.cuda.current_stream().wait_stream(stream)
        watched.take()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        assert watched.take() == [used]
        for seed in (1, 2, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                problem.hidden.copy_(torch.randn_like(problem.hidden))
            graph.replay()
            check(problem, captured)

    @pytest.mark.parametrize("options", [{"retain_in_grad_weight": True}, {"workspace_limit_bytes": ALL}], ids=["lent", "own"])
    def test_one_pass_in_a_graph(self, device: str, watched: Watched, options: dict[str, Any]) -> None:
        problem = make(device, 200)
        loss_of(problem, **options).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = loss_of(problem, **options)
        watched.take()
        kept = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                problem.hidden.data.copy_(torch.randn_like(problem.hidden))
            graph.replay()
            torch.cuda.synchronize()
            gradients = gradients_of(problem, loss, retain_graph=True)
            assert watched.take() == [OWN]  # the graph writes there again: it is no gradient's
            check(problem, gradients)
            watched.take()
            kept.append((gradients, [gradient.clone() for gradient in gradients]))
        graph.replay()
        torch.cuda.synchronize()
        for gradients, copies in kept:
            assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # where backward will run too
            loss = loss_of(problem, **options)
        torch.cuda.synchronize()
        backward = torch.cuda.CUDAGraph()
        watched.take()
        with torch.cuda.graph(backward, stream=stream):
            captured = gradients_of(problem, loss, retain_graph=True)
        assert watched.take() == [NONE]
        for _ in range(2):
            backward.replay()
            check(problem, captured)

    def test_compiled_into_graphs(self, device: str, watched: Watched) -> None:
        """torch.compile's own CUDA graphs know of no memory but outputs: nothing is left."""
        torch._dynamo.reset()
        compiled = torch.compile(lambda h, w, t: flce.linear_cross_entropy(h * 1.0, w, t), mode="reduce-overhead")
        problem = make(device, 200)
        for _ in range(5):
            problem.hidden.grad = problem.weight.grad = None
            torch.compiler.cudagraph_mark_step_begin()
            compiled(problem.hidden, problem.weight, problem.target).backward()
            assert set(watched.take()) <= {NONE}
            check(problem, (problem.hidden.grad, problem.weight.grad))
            watched.take()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"retain_in_grad_weight": True}, {"retain_in_grad_weight": False, "workspace_limit_bytes": ALL}], ids=["lent", "own"]
)
def test_the_launches_of_two_passes(device: str, watched: Watched, options: dict[str, Any]) -> None:
    """A schedule that splits backward: each pass launches its gradient's multiplication and computes no logits."""
    problem = make_problem(device, torch.bfloat16, num_tokens=512, hidden_size=512, vocab_size=4096)
    logits = {"forward", "forward_few", "dlogits", "backward_chunks", "hidden_chunks"}
    every = logits | {"grad_hidden", "grad_weight"}

    def launched(step: Any) -> tuple[Any, set[str]]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = step()
            torch.cuda.synchronize()
        names = {event.name for event in profile.events()}
        return result, {role for role in every if any(f"flce_{role}" in name.split("(")[0].split() for name in names)}

    def forward() -> tuple[Tensor, Tensor]:
        hidden = problem.hidden * 1.0
        return hidden, flce.linear_cross_entropy(hidden, problem.weight, problem.target, **options)

    forward()  # compiles outside the profile
    (hidden, loss), of_forward = launched(forward)
    for_hidden, of_input = launched(lambda: torch.autograd.grad(loss, hidden, retain_graph=True)[0])
    for_weight, of_weight = launched(lambda: torch.autograd.grad(loss, problem.weight)[0])
    assert of_forward & logits
    if options.get("workspace_limit_bytes"):  # all of the logits; a gradient's memory has no room for the last 512
        assert of_input == {"grad_hidden"}
        assert of_weight == {"grad_weight"}
    assert "grad_weight" not in of_input
    check(problem, (for_hidden, for_weight))
    assert watched.take()[:2] == ([OWN, LENT] if options["retain_in_grad_weight"] else [OWN, OWN])
