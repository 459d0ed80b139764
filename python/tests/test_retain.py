"""Logits that forward leaves to backward: their place and use, that they are never stale, and that nobody has their memory longer than
needed."""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from retain_support import ALL, LENT, NONE, OWN, Loss, Watched, check, compiled_loss, gradients_of, loss_of, make
from support import assert_close, in_double, reference
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce
from flce.core import _autograd, _kernels, _native, _retain


@pytest.mark.parametrize("way", ["eager", "aot_eager", "inductor"], indirect=True)
def test_a_plain_step_lends_the_gradients_memory(device: str, watched: Watched, way: Loss) -> None:
    problem = make(device)
    for step in range(4):  # direct calls from the third
        problem.hidden.grad = problem.weight.grad = None
        loss = way(problem)
        memory = watched.memory[-1]()
        assert memory is not None
        assert len(watched.memory) == step + 1
        address = memory.data_ptr()
        del memory
        loss.backward()
        assert watched.take() == [LENT]
        assert problem.weight.grad.data_ptr() == address  # autograd took it, nobody copied it
        check(problem, (problem.hidden.grad, problem.weight.grad))
        watched.take()


def test_several_alive_do_not_lend(device: str, watched: Watched, way: Loss) -> None:
    problems = [make(device, num_tokens) for num_tokens in (40, 40, 24)]

    def gpipe() -> list[str]:
        losses = [way(problem) for problem in problems]
        for problem, loss in zip(problems, losses, strict=True):
            check_later.append((problem, gradients_of(problem, loss)))
        return watched.take()

    def one_at_a_time() -> list[str]:
        for problem in problems:
            check_later.append((problem, gradients_of(problem, way(problem))))
        return watched.take()

    check_later: list[Any] = []
    assert gpipe() == [LENT, NONE, NONE]  # nobody could know
    assert gpipe() == [NONE] * 3
    assert one_at_a_time() == [NONE, LENT, LENT]
    assert one_at_a_time() == [LENT] * 3
    assert gpipe() == [LENT, NONE, NONE]
    for problem, gradients in check_later:
        check(problem, gradients)


def test_the_caller_may_say_so(device: str, watched: Watched, way: Loss) -> None:
    problem = make(device)
    plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    watched.take()
    losses = [way(problem, retain_in_grad_weight=choice) for choice in (True, True, None)]
    for loss in losses:
        check(problem, gradients_of(problem, loss), plain)
    assert watched.take() == [LENT, LENT, NONE]
    alone = [gradients_of(problem, way(problem, retain_in_grad_weight=choice)) for choice in (None, False, None)]
    assert [used for used in watched.take() if used == LENT] == [LENT]  # the first still has the three before it
    for gradients in alone:
        check(problem, gradients, plain)
    with pytest.raises(flce.ArgumentError, match=r"retain_in_grad_weight is .often.; allowed are True, False and None"):
        loss_of(problem, retain_in_grad_weight="often")


def test_compiled_code_gets_memory_too(device: str, watched: Watched) -> None:
    problem = make(device, num_tokens=200)
    loss = compiled_loss("aot_eager")(problem, workspace_limit_bytes=ALL)
    check(problem, gradients_of(problem, loss))
    assert watched.take()[0] == OWN
    assert watched.alive() == 0  # a holder of lse


def test_a_limit_buys_memory(device: str, watched: Watched) -> None:
    problem = make(device, num_tokens=200)  # more tokens than hidden_size: the gradient's memory holds a part only
    seen = []
    for limit in (ALL, 4 << 20, 400_000):
        try:
            kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device, workspace_limit_bytes=limit, num_tokens=200)
        except flce.PlanError:
            continue
        most, lendable = kernel.retained_bytes(200), kernel.retained_bytes(200, in_grad_weight=True)
        workspace = max(kernel.workspace_bytes(200, backward=which) for which in (False, True))
        assert 0 < lendable < most
        left = min(most, limit - workspace)
        for choice in (None, False):
            loss = loss_of(problem, workspace_limit_bytes=limit, retain_in_grad_weight=choice)
            expected = OWN if left > lendable or choice is False else LENT
            memory = watched.memory[-1]()
            assert memory is not None
            assert memory.nbytes == (lendable if expected == LENT else left // 16 * 16)
            del memory
            gradients = gradients_of(problem, loss)
            assert watched.take() == [expected]
            seen.append(expected)
            del loss
            check(problem, gradients, gradients_of(problem, loss_of(problem, workspace_limit_bytes=limit)))
            watched.take()
    assert OWN in seen
    assert watched.alive() == 0


def test_a_limit_below_the_default_is_kept(device: str, watched: Watched) -> None:
    problem = make(device, num_tokens=600)
    limit = 4 * 600 * 64 + (4 << 20)
    kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device, workspace_limit_bytes=limit, num_tokens=600)
    assert kernel is not flce.get_kernel(64, 3000, torch.bfloat16, device=device)
    assert kernel is flce.get_kernel(64, 3000, torch.bfloat16, device=device, workspace_limit_bytes=limit + 1, num_tokens=600)
    assert kernel.workspace_bytes(600) <= limit
    loss = loss_of(problem, workspace_limit_bytes=limit, retain_in_grad_weight=False)
    check(problem, gradients_of(problem, loss_of(problem, workspace_limit_bytes=limit)), gradients_of(problem, loss))
    with pytest.raises(flce.PlanError, match=rf"workspace limit of {4 * 600 * 64} bytes .*too small.*the smallest that works is \d+"):
        loss_of(problem, workspace_limit_bytes=4 * 600 * 64)


def test_memory_of_its_own_serves_any_number_of_backwards(device: str, watched: Watched) -> None:
    problem = make(device)
    loss = loss_of(problem, workspace_limit_bytes=ALL, retain_in_grad_weight=False)
    first = gradients_of(problem, loss, retain_graph=True)
    second = gradients_of(problem, loss)
    assert watched.take() == [OWN, OWN]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    check(problem, second)


@pytest.fixture(params=["as it is", "other last bits"])
def saved_bits(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lse of a forward that retains: on a GPU its last bits are not those of one that does not. The second makes it so on a CPU."""
    if request.param == "as it is":
        return
    if device != "cpu":
        pytest.skip("a GPU's are other ones as they are")
    monkeypatch.setattr(flce.get_kernel(64, 3000, torch.bfloat16, device=device), "retaining_changes_saved", True)
    run = _kernels.LoadedKernel.run

    def other_bits(self: Any, function: Any, args_address: int, size: int) -> None:
        run(self, function, args_address, size)
        args: Any = _native.call_arguments().forward.from_address(args_address)
        if function is self.forward_function and args.retained:
            lse = _native.TensorView.from_address(args.lse)
            values = (ctypes.c_float * lse.rows).from_address(lse.data)
            values[:] = [value * (1 + 1e-6) for value in values]

    monkeypatch.setattr(_kernels.LoadedKernel, "run", other_bits)


@pytest.mark.usefixtures("saved_bits")
def test_a_further_backward_computes_again(device: str, watched: Watched, way: Loss) -> None:
    problem = make(device)
    plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    watched.take()
    with functorch_config.patch(donated_buffer=False):  # torch's own condition for a second backward of compiled code
        loss = way(problem)
        first = gradients_of(problem, loss, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = gradients_of(problem, loss, retain_graph=True)
    third = gradients_of(problem, loss)
    assert watched.take() == [LENT, NONE, NONE]
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))  # the first ones are the caller's
    for gradients in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    assert_close(first[0], plain[0], torch.bfloat16)
    check(problem, second)


def test_gradients_one_by_one(device: str, watched: Watched) -> None:
    """Zero-bubble schedules ask for hidden's first, and for weight's after other microbatches."""
    problem = make(device)
    hidden = problem.hidden * 1.0  # a layer's output: the engine is asked about the node of another function
    loss = flce.linear_cross_entropy(hidden, problem.weight, problem.target)
    for_hidden = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    again = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    for_weight = torch.autograd.grad(loss, problem.weight, retain_graph=True)[0]
    assert watched.take() == [OWN, OWN, LENT]
    assert torch.equal(for_hidden, again)
    check(problem, (for_hidden, for_weight))
    watched.take()
    kept = for_weight.clone()
    last = torch.autograd.grad(loss, hidden)[0]
    assert watched.take() == [NONE]
    assert torch.equal(for_weight, kept)
    check(problem, (last, for_weight))


def test_a_loss_without_backward_frees_its_memory(device: str, watched: Watched, way: Loss) -> None:
    problem = make(device)
    for _ in range(3):
        loss = way(problem)
        assert watched.alive() == 1
        del loss
        assert watched.alive() == 0
    losses = [way(problem), way(problem)]
    del losses
    way(problem)
    check(problem, gradients_of(problem, way(problem)))
    assert watched.take()[0] == LENT


def test_no_gradient_no_memory(device: str, watched: Watched, way: Loss) -> None:
    problem = make(device)
    with torch.no_grad():
        way(problem, workspace_limit_bytes=ALL)
    problem.weight.requires_grad_(False)
    frozen = torch.autograd.grad(way(problem), problem.hidden)[0]
    assert watched.take() == [NONE]
    assert watched.memory == []
    with_memory = torch.autograd.grad(way(problem, workspace_limit_bytes=ALL), problem.hidden)[0]
    assert watched.take() == [OWN]
    problem.weight.requires_grad_(True)
    check(problem, (frozen, gradients_of(problem, loss_of(problem))[1]))
    assert_close(with_memory, frozen, torch.bfloat16)


def test_grad_weight_out_does_not_lend(device: str, watched: Watched) -> None:
    problem = make(device)
    for limit, expected in ((None, NONE), (ALL, OWN)):
        buffer = torch.zeros_like(problem.weight, requires_grad=False)
        loss = loss_of(problem, grad_weight_out=buffer, workspace_limit_bytes=limit, retain_in_grad_weight=True)
        loss.backward()
        assert watched.take() == [expected]
        check(problem, (problem.hidden.grad, buffer))
        problem.hidden.grad = None
        watched.take()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device: str, watched: Watched, use_reentrant: bool) -> None:
    problem = make(device)
    for _ in range(3):
        problem.hidden.grad = problem.weight.grad = None
        loss = checkpoint(
            lambda h, w: flce.linear_cross_entropy(torch.clone(h), w, problem.target),
            problem.hidden,
            problem.weight,
            use_reentrant=use_reentrant,
        )
        assert watched.alive() == 0  # the first forward's is thrown away with what it saved
        loss.backward()
        assert watched.take() == [LENT]
        check(problem, (problem.hidden.grad, problem.weight.grad))
        watched.take()


@pytest.mark.usefixtures("saved_bits")
def test_hooks_on_saved_tensors_leave_it_behind(device: str, watched: Watched) -> None:
    problem = make(device)
    plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    watched.take()
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            loss = loss_of(problem)
        assert watched.alive() == 0
        gradients = gradients_of(problem, loss)
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
        assert watched.take() == [NONE]
    check(problem, plain)


@pytest.mark.usefixtures("saved_bits")
def test_tensors_in_another_place(device: str, watched: Watched) -> None:
    problem = make(device)
    plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    watched.take()
    loss = loss_of(problem)
    problem.weight.data = problem.weight.data.clone()
    gradients = gradients_of(problem, loss)
    assert watched.take() == [NONE]
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    check(problem, gradients)


def test_a_tensor_changed_in_place_is_noticed(device: str, watched: Watched) -> None:
    for name in ("hidden", "weight"):
        problem = make(device)
        loss = loss_of(problem)
        with torch.no_grad():
            getattr(problem, name).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert watched.take() == []


def test_exceptions_end_a_loss(device: str, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(device)
    run = _kernels.LoadedKernel.run

    def fail(self: Any, *args: Any) -> None:
        raise flce.DeviceError("on purpose")

    monkeypatch.setattr(_kernels.LoadedKernel, "run", fail)
    with pytest.raises(flce.DeviceError):
        loss_of(problem)
    assert watched.alive() == 0
    monkeypatch.setattr(_kernels.LoadedKernel, "run", run)
    loss = loss_of(problem)
    assert watched.alive() == 1
    monkeypatch.setattr(_kernels.LoadedKernel, "run", fail)
    with pytest.raises(flce.DeviceError):
        gradients_of(problem, loss, retain_graph=True)
    monkeypatch.setattr(_kernels.LoadedKernel, "run", run)
    watched.take()
    check(problem, gradients_of(problem, loss))  # remains of the failed backward are not read
    assert watched.take()[0] == NONE


def test_an_interrupt_anywhere_leaves_nothing(device: str, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt before each line of the module in turn, until a forward gets through."""
    problem = make(device)
    kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device, num_tokens=problem.hidden.shape[0])
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_value))
    for interrupted in range(200):
        lines = 0

        def trace(frame: Any, event: str, argument: Any, last: int = interrupted) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != _retain.__file__:
                return None
            if event == "line" and frame.f_code.co_name != "__del__":
                lines += 1
                if lines > last:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        loss = None
        sys.settrace(trace)
        try:
            loss = loss_of(problem)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if loss is not None:
            break
        assert not kernel.alive.losses
        assert watched.alive() == 0
    assert 20 < interrupted < 199
    assert not ignored
    assert loss is not None
    check(problem, gradients_of(problem, loss))
    assert watched.take()[0] == LENT


def test_a_copy_has_none_of_it(device: str, watched: Watched) -> None:
    problem = make(device)
    loss = loss_of(problem)
    saved = _autograd.python_node(loss).saved_tensors[0]
    assert _retain.of(saved) is not None
    assert _retain.of(copy.deepcopy(saved)) is None
    head = torch.nn.Linear(64, 3000, bias=False)
    head.weight = torch.nn.Parameter(problem.weight.detach())
    copied = copy.deepcopy(flce.LinearCrossEntropyLoss(head, impl="flce", shift=0, retain_in_grad_weight=True))
    copied(problem.hidden, problem.target).backward()
    assert watched.take() == [LENT]


def test_threads(device: str, watched: Watched) -> None:
    problem = make(device)
    plain = gradients_of(problem, loss_of(problem, retain_in_grad_weight=False))
    watched.take()
    failures: list[str] = []
    finished: list[int] = []

    def work() -> None:
        for _ in range(10):
            hidden, weight = (t.detach().clone().requires_grad_() for t in (problem.hidden, problem.weight))
            loss = flce.linear_cross_entropy(hidden, weight, problem.target)
            for actual, expected in zip(torch.autograd.grad(loss, (hidden, weight)), plain, strict=True):
                try:
                    assert_close(actual, expected, torch.bfloat16)
                    assert device == "cuda" or torch.equal(actual, expected)
                except AssertionError as error:
                    failures.append(str(error))
        finished.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(finished) == 4
    assert watched.alive() == 0
    assert not flce.get_kernel(64, 3000, torch.bfloat16, device=device).alive.losses


def test_backwards_of_one_loss_in_several_threads(device: str, watched: Watched) -> None:
    problem = make(device)
    loss = loss_of(problem)
    results: list[tuple[Tensor, ...]] = []
    threads = [threading.Thread(target=lambda: results.append(gradients_of(problem, loss, retain_graph=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert sorted(watched.take()) == [LENT, NONE, NONE, NONE]
    for gradients in results:
        check(problem, gradients)


def test_compiled_with_changing_tokens_and_two_losses(device: str, watched: Watched) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def both(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        first = flce.linear_cross_entropy(hidden, weight, target)
        loss: Tensor = first + flce.linear_cross_entropy(hidden * 0.5, weight, target, softcap=5.0)
        return loss

    for num_tokens in (24, 40, 72):
        problem = make(device, num_tokens)
        gradients = gradients_of(problem, both(problem.hidden, problem.weight, problem.target))
        exact = in_double(problem)
        halves = [
            reference(exact.hidden * scale, exact.weight, exact.target, softcap=cap)["loss"] for scale, cap in ((1.0, None), (0.5, 5.0))
        ]
        for actual, expected in zip(gradients, gradients_of(exact, halves[0] + halves[1]), strict=True):
            assert_close(actual, expected, torch.bfloat16)
    assert LENT in watched.take()


@pytest.mark.parametrize(("limit", "choice", "used"), [(0, _retain.ALWAYS, LENT), (ALL, _retain.NEVER, OWN)])
def test_opcheck(device: str, watched: Watched, limit: int, choice: int, used: str) -> None:
    problem = make(device)
    arguments = (problem.hidden, problem.weight, problem.target, None, None, None, "outputs=loss+lse", -100, 0, limit, choice)
    torch.library.opcheck(torch.ops.flce.linear_cross_entropy.default, arguments)
    assert used in watched.take()


def test_a_weight_that_lies_hidden_major_does_not_lend(device: str, watched: Watched) -> None:
    problem = make(device)
    problem.weight = problem.weight.detach().t().contiguous().t().requires_grad_()
    check(problem, gradients_of(problem, loss_of(problem, retain_in_grad_weight=True)))
    assert watched.take()[0] == NONE
    check(problem, gradients_of(problem, loss_of(problem, workspace_limit_bytes=ALL)))
    assert watched.take()[0] == OWN


def test_an_fp32_weight_under_autocast(device: str, watched: Watched) -> None:
    problem = make(device)
    hidden, weight = (t.detach().float().requires_grad_() for t in (problem.hidden, problem.weight))
    results = []
    for choice in (None, False):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = flce.linear_cross_entropy(hidden, weight, problem.target, retain_in_grad_weight=choice)
        results.append(torch.autograd.grad(loss, (hidden, weight)))
    assert watched.take() == [NONE if device == "cuda" else LENT, NONE]  # a GPU rounds the weight in chunks, and retains nothing
    for lent, plain in zip(*results, strict=True):
        assert lent.dtype == torch.float32
        assert_close(lent, plain, torch.bfloat16)


def test_a_teachers_classes(device: str, watched: Watched) -> None:
    problem = make(device)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 3000, (40, 9), generator=generator)
    ids[:, 3] = ids[:, 2]
    ids[::2, 0] = problem.target[::2].cpu().clamp(min=0)
    probs = torch.randn(40, 9, generator=generator).softmax(-1)
    for target, hard_weight in ((problem.target, 0.5), (None, 0.0)):
        options: dict[str, Any] = {"target": target, "hard_weight": hard_weight}
        results = []
        for lend, limit in ((False, None), (True, None), (False, ALL)):
            memory: dict[str, Any] = {"retain_in_grad_weight": lend, "workspace_limit_bytes": limit}
            loss = flce.linear_topk_distillation(problem.hidden, problem.weight, ids.to(device), probs.to(device), **options, **memory)
            results.append(gradients_of(problem, loss))
        assert watched.take() == [NONE, LENT, OWN]
        for gradients in results[1:]:
            for got, plain in zip(gradients, results[0], strict=True):
                assert_close(got, plain, torch.bfloat16, factor=2.0 if device == "cuda" else 1.0)


def test_small_layers_retain_nothing(device: str) -> None:
    problem = make(device)
    kernel = flce.get_kernel(64, 3000, torch.bfloat16, device=device)
    assert not kernel.choose_retained(40, workspace_limit_bytes=ALL).size
    if kernel.retains:
        assert kernel.choose_retained(1 << 20, workspace_limit_bytes=ALL).size
    loss = loss_of(problem)
    assert _retain.of(_autograd.python_node(loss).saved_tensors[0]) is None
