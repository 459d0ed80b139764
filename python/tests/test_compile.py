"""torch.library's own checks, torch.compile without graph breaks or recompilation, and CUDA graphs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support import make_problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._triton import has_triton

import flce
from flce.core import _frame

CALLS = [("", 2), ("softcap=5,outputs=loss+lse+logprobs+entropy", 0), ("z_loss=0.01,outputs=loss+lse", 1)]


class Symbolic(int):
    """A number of tokens as torch 2.11 has it in a graph of any size: arithmetic with a bool is a TypeError."""

    def __mul__(self, other: int) -> Symbolic:
        return self._checked(other, int(self) * other)

    def __add__(self, other: int) -> Symbolic:
        return self._checked(other, int(self) + other)

    __rmul__, __radd__ = __mul__, __add__

    @staticmethod
    def _checked(other: int, result: int) -> Symbolic:
        if isinstance(other, bool):
            raise TypeError("BooleanAtom not allowed in this context.")
        return Symbolic(result)


@pytest.mark.parametrize("options", ["", "outputs=loss+entropy+logprobs,dft", "label_smoothing=0.1", "teacher_top_k=3"])
@pytest.mark.parametrize("shard_class_weight", [False, True])
def test_sizes_of_symbolic_numbers(options: str, shard_class_weight: bool) -> None:
    outputs = _frame.outputs_of(options, shard_class_weight=shard_class_weight)
    for size_of in (outputs.saved_size, lambda n: outputs.shape((n,), n, 1)):
        assert size_of(Symbolic(7)) == size_of(7)


@pytest.mark.parametrize(("options", "reduction"), CALLS)
def test_opcheck_forward(device: str, options: str, reduction: int) -> None:
    problem = make_problem(device, bias=True)
    arguments = (problem.hidden, problem.weight, problem.target, problem.options["bias"], None, None, options, -100, reduction, 0)
    torch.library.opcheck(torch.ops.flce.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)])
def test_opcheck_backward(device: str, wanted: tuple[bool, bool, bool]) -> None:
    problem = make_problem(device, bias=True)
    bias = problem.options["bias"].detach()
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    _, saved, _ = torch.ops.flce.linear_cross_entropy(hidden, weight, problem.target, bias, None, None, "", -100, 2, 0)
    upstream = torch.ones((), device=device)
    arguments = (upstream, hidden, weight, problem.target, saved, bias, None, None, "", -100, 2, 0, wanted)
    torch.library.opcheck(torch.ops.flce.linear_cross_entropy_backward.default, arguments)


def test_opcheck_hidden_major_weight(device: str) -> None:
    problem = make_problem(device)
    weight = problem.weight.detach().t().contiguous().requires_grad_().t()
    torch.library.opcheck(
        torch.ops.flce.linear_cross_entropy.default, (problem.hidden, weight, problem.target, None, None, None, "", -100, 2, 0)
    )


@pytest.mark.parametrize("way", ["function", "loss", "head"])
def test_a_layer_in_one_graph(way: str) -> None:
    """A layer's class and quantisation are looked at while the graph is traced."""
    problem = make_problem("cpu", torch.float32)
    linear = torch.nn.Linear(problem.weight.shape[1], problem.weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(problem.weight.detach().clone())
    head = flce.FusedLMHead.from_linear(linear)
    losses: dict[str, Any] = {
        "function": flce.linear_cross_entropy,
        "loss": flce.LinearCrossEntropyLoss(linear, shift=0),
        "head": lambda hidden, _, target: head(hidden, target),
    }
    call = losses[way]
    given = (problem.hidden, problem.target) if way == "loss" else (problem.hidden, linear, problem.target)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


def step(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    loss, lse = flce.linear_cross_entropy(hidden, weight, labels, shift=1, softcap=30.0, return_lse=True, **options)
    return loss, lse


def run(function: Any, num_tokens: int, device: str) -> list[Tensor]:
    problem = make_problem(device, num_tokens=4 * num_tokens)
    hidden, labels = problem.hidden.view(4, num_tokens, -1), problem.target.view(4, num_tokens)
    loss, lse = function(hidden, problem.weight, labels)
    (loss + 1e-3 * lse.square().sum()).backward()
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    return [loss.detach(), lse.detach(), problem.hidden.grad, problem.weight.grad]


def test_compile_fullgraph_with_changing_tokens(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for index, num_tokens in enumerate((8, 12, 30, 7)):
        for actual, expected in zip(run(compiled, num_tokens, device), run(step, num_tokens, device), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        # The second size makes the dimension dynamic, as for any torch code; after that nothing compiles again.
        assert counter.frame_count == min(index + 1, 2)


def test_compile_with_dynamic_tokens_compiles_once(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend=counter)
    for num_tokens in (9, 20, 33):
        problem = make_problem(device, num_tokens=num_tokens)
        for tensor in (problem.hidden, problem.target):
            torch._dynamo.mark_dynamic(tensor, 0)
        loss = compiled(problem.hidden, problem.weight, problem.target)
        assert torch.equal(loss, flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target))
        loss.backward()
    assert counter.frame_count == 1


def test_explain_finds_no_graph_break(device: str) -> None:
    torch._dynamo.reset()
    problem = make_problem(device, class_weight=True, class_offset=True, bias=True)
    found = torch._dynamo.explain(flce.linear_cross_entropy)(
        problem.hidden, problem.weight, problem.target, num_valid_tokens=problem.target.numel(), **problem.options
    )
    assert found.graph_break_count == 0
    names = [str(node.target) for graph in found.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any("flce.linear_cross_entropy" in name for name in names)


def test_a_buffer_for_the_weights_gradient_is_refused_by_name(device: str) -> None:
    torch._dynamo.reset()
    problem = make_problem(device)
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="grad_weight_out is for eager mode"):
        compiled(problem.hidden, problem.weight, problem.target, grad_weight_out=torch.zeros_like(problem.weight))


def test_an_import_compiles_nothing_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.tensor

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend=counter)
    problem = make_problem(device, bias=True)
    compiled(problem.hidden, problem.weight, problem.target, **problem.options)
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    compiled(problem.hidden, problem.weight, problem.target, **problem.options)
    assert counter.frame_count == 1


def test_compile_with_autocast_and_packed_sequences(device: str) -> None:
    torch._dynamo.reset()

    def packed(hidden: Tensor, weight: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: Tensor = flce.linear_cross_entropy(hidden, weight, labels, shift=1, cu_seqlens=cu_seqlens)
        return loss

    problem = make_problem(device, num_tokens=16)
    cu_seqlens = torch.tensor([0, 3, 4, 4, 14], device=device)
    arguments = (problem.hidden, problem.weight, problem.target, cu_seqlens)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(f(*arguments), (problem.hidden, problem.weight)) for f in (packed, compiled)]
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("calls_before", [0, 3])
def test_traced_by_jit(device: str, calls_before: int) -> None:
    """Deprecated in torch, but a trace that does not hold the call would be wrong without a word."""
    problem = make_problem(device)
    hidden, weight, target = problem.hidden.detach(), problem.weight.detach(), problem.target
    for _ in range(calls_before):
        flce.linear_cross_entropy(hidden, weight, target)
    traced = torch.jit.trace(lambda h: flce.linear_cross_entropy(h, weight, target), (hidden,), check_trace=False)
    assert torch.equal(traced(2 * hidden), flce.linear_cross_entropy(2 * hidden, weight, target))


@pytest.mark.full
def test_compile_with_inductor(device: str) -> None:
    if device == "cuda" and not has_triton():
        pytest.skip("inductor needs Triton on a GPU")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    for actual, expected in zip(run(compiled, 8, device), run(step, 8, device), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
class TestCudaGraph:
    @pytest.mark.parametrize("calls_before", [1, 3])  # after three, the captured one is direct
    def test_forward_and_backward_are_captured(self, calls_before: int) -> None:
        problem = make_problem("cuda", torch.bfloat16, num_tokens=64, hidden_size=64, vocab_size=1000)
        hidden, weight, target = problem.hidden, problem.weight, problem.target
        offsets = torch.tensor([0, 24, 64], device="cuda", dtype=torch.int32)

        def both() -> tuple[Tensor, Tensor, Tensor]:
            loss = flce.linear_cross_entropy(hidden, weight, target, shift=1, cu_seqlens=offsets)
            return (loss, *torch.autograd.grad(loss, (hidden, weight)))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(calls_before):
                both()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                hidden.copy_(torch.randn_like(hidden))
                target.copy_(torch.randint(-1, 1000, target.shape).clamp(min=-100).cuda())
            graph.replay()
            for actual, expected in zip(captured, both(), strict=True):
                assert torch.equal(actual, expected)

    def test_capture_of_an_unknown_kernel_says_what_to_do(self) -> None:
        problem = make_problem("cuda", torch.bfloat16, hidden_size=72)
        with pytest.raises(flce.UnavailableError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)

    def test_a_layer_is_first_used_by_a_graph_of_torch_compile(self) -> None:
        """torch.compile's graphs account for all memory that is left in their pool: what a new kernel keeps has to be elsewhere."""
        if not has_triton():
            pytest.skip("inductor needs Triton on a GPU")
        torch._dynamo.reset()
        compiled = torch.compile(lambda h, w, t: flce.linear_cross_entropy(h * 1.0, w, t), mode="reduce-overhead")
        for vocab_size in (1237, 1239):  # layers that no other test has
            problem = make_problem("cuda", torch.bfloat16, num_tokens=200, hidden_size=64, vocab_size=vocab_size, ignored=0.0)
            results = []
            for _ in range(4):  # a run before, a capture, replays
                problem.hidden.grad = problem.weight.grad = None
                torch.compiler.cudagraph_mark_step_begin()
                loss = compiled(problem.hidden, problem.weight, problem.target)
                loss.backward()
                results.append([value.clone() for value in (loss, problem.hidden.grad, problem.weight.grad)])
            eager = flce.linear_cross_entropy(problem.hidden * 1.0, problem.weight, problem.target, retain_in_grad_weight=False)
            expected = [eager, *torch.autograd.grad(eager, (problem.hidden, problem.weight))]
            for result in results:
                assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
            flce.check_labels()
            problem.target[7] = vocab_size
            torch.compiler.cudagraph_mark_step_begin()
            compiled(problem.hidden, problem.weight, problem.target)
            with pytest.raises(flce.LabelError):
                flce.check_labels()

    @pytest.mark.skipif(
        not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"), reason="this torch's use_mem_pool takes every thread's memory"
    )
    @pytest.mark.parametrize("inside", ["mem_pool", "side stream"])
    def test_what_a_kernel_keeps_is_in_the_allocators_own_pool(self, inside: str) -> None:
        pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
        vocab_size = 1241 if inside == "mem_pool" else 1243
        with torch.cuda.use_mem_pool(pool) if inside == "mem_pool" else torch.cuda.stream(stream):
            kernel = flce.get_kernel(64, vocab_size, torch.bfloat16, device="cuda")
        address = kernel.invalid_label.data_ptr()
        segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= address < s["address"] + s["total_size"]]
        assert [tuple(segment["segment_pool_id"]) for segment in segments] == [(0, 0)]
        assert kernel.float_like.data_ptr() == address  # templates take no memory of their own

    def test_another_stream(self) -> None:
        problem = make_problem("cuda", torch.bfloat16, num_tokens=256, hidden_size=256, vocab_size=4000)
        expected = torch.autograd.grad(flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target), problem.hidden)[0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = flce.linear_cross_entropy(problem.hidden * 1.0, problem.weight, problem.target)
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(problem.hidden.grad, expected)  # type: ignore[arg-type]
