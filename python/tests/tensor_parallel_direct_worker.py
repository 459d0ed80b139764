"""One rank of a tensor-parallel group, under torchrun: calls like an earlier one, which go straight to the kernels, on all ranks and on
some of them. Exits with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rank_support import device, run_main, run_named
from tensor_parallel_layouts_worker import Through, asks
from tensor_parallel_support import HIDDEN, TOKENS, Layer, close, leaf, same_on_every_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils.checkpoint import checkpoint

import flce
from flce.call import _call
from flce.core import _autograd, _kernels, _retain
from flce.parallel import _layouts, _parallel, _shards

DIRECT = "LinearCrossEntropyDirectShardBackward"


def is_direct(value: Tensor) -> bool:
    node = _autograd.python_node(value)
    return node is not None and node.name() == DIRECT


def is_odd() -> bool:
    """Whether this is the rank that goes another way than the others."""
    return dist.get_rank() == 1


def raised_by(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """The error of a call that has to be refused."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


class Call:
    """A rank's part of a layer, and calls of it."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, sequence: bool = False, even: int = 0, **options: Any) -> None:
        layer = self.layer = Layer(dtype, even=even)
        self.hidden = leaf(layer.my_tokens(layer.hidden) if sequence else layer.hidden)
        self.weight, self.target = leaf(layer.mine(layer.weight)), layer.target
        self.options = options | {"process_group": layer.group, "sequence_parallel": sequence}

    def value(self, **more: Any) -> Tensor:
        value: Tensor = flce.linear_cross_entropy(self.hidden, self.weight, self.target, **self.options, **more)
        return value

    def gradients(self, value: Tensor, **how: Any) -> tuple[Tensor, ...]:
        upstream = torch.linspace(-1, 2, value.numel()).view(value.shape)
        asked = [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]
        return torch.autograd.grad(value, asked, upstream, **how)

    def step(self) -> tuple[Tensor, ...]:
        value = self.value()
        return value, *self.gradients(value)


def same(these: tuple[Tensor, ...], those: tuple[Tensor, ...]) -> None:
    for one, other in zip(these, those, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@contextmanager
def told() -> Iterator[list[int]]:
    """Counts how often hosts tell each other their numbers."""
    original, times = _parallel.tell_hosts, [0]

    def count(*arguments: Any) -> Any:
        times[0] += 1
        return original(*arguments)

    _parallel.tell_hosts = count
    try:
        yield times
    finally:
        _parallel.tell_hosts = original


# ── The same numbers ────────────────────────────────


def bits(form: tuple[int, ...], dtype: torch.dtype, reduction: str, sequence: bool) -> None:
    """Calls from the second on are direct, tell numbers once, and have the first one's bits."""
    call = Call(dtype, sequence=sequence, reduction=reduction)
    tokens = call.hidden.numel() // HIDDEN
    rows = (tokens * form[0] // TOKENS, *form[1:])
    call.hidden, call.target = leaf(call.hidden.detach().view(*rows, HIDDEN)), call.target.view(form)
    runs = []
    for number in range(4):
        with told() as times:
            runs.append(call.step())
        assert times == [1] and is_direct(runs[-1][0]) == (number > 0), (number, times)
        same(runs[0], runs[-1])
    value = runs[0][0]
    same_on_every_rank(value)
    assert value.shape == (form if reduction == "none" else ())
    whole = flce.linear_cross_entropy(call.layer.hidden.view(*form, HIDDEN), call.layer.weight, call.target, reduction=reduction)
    close(value, whole, dtype)


def other_calls(kind: str) -> None:
    """Other functions, arguments and forms that have direct calls."""
    call = Call()
    function: Callable[..., Any] = flce.linear_cross_entropy
    if kind == "logprobs":
        function = flce.linear_logprobs
    elif kind == "hidden major":
        call.weight = leaf(call.weight.detach().t().contiguous()).t().detach().requires_grad_()
    elif kind == "int32":
        call.target = call.target.int()
    elif kind == "mesh":
        call.options["process_group"] = init_device_mesh(call.hidden.device.type, (dist.get_world_size(),))
    elif kind == "fp32 sum":
        call = Call(torch.bfloat16, reduce_dtype=torch.float32)
    elif kind == "parts":
        call = Call(reduce_grad_hidden=False)
    runs = []
    for _ in range(4):
        value = function(call.hidden, call.weight, call.target, **call.options)
        runs.append((value, *call.gradients(value)))
        same(runs[0], runs[-1])
    assert [is_direct(run[0]) for run in runs] == [False, True, True, True]


def retained(lends: bool, sequence: bool) -> None:
    """Forward leaves backward what it does on the general way, in memory of its own or in the gradient's, and backward takes it."""
    least, choose = _retain.LEAST_WORK, _shards.ShardKernel.choose_retained
    _retain.LEAST_WORK = 1
    if lends and device() == "cpu":
        _shards.ShardKernel.choose_retained = lambda *_, retain_in_grad_weight, **__: _retain.Choice(retain_in_grad_weight, 1)
    try:
        how: dict[str, Any] = {"retain_in_grad_weight": lends, "workspace_limit_bytes": 1 << 30}
        call = Call(torch.bfloat16, sequence=sequence, softcap=20.0 + lends, **how)  # a kernel that has made no choice yet
        runs, left = [], []
        for _ in range(3):
            value = call.value()
            (saved, *_) = _autograd.python_node(value).saved_tensors
            kept = _retain.of(saved)
            left.append(kept is not None and (kept.filled, kept.lent))
            runs.append((value, *call.gradients(value)))
            same(runs[0], runs[-1])
        assert is_direct(runs[-1][0]) and len(set(left)) == 1
        assert left[0] == (True, lends) or device() != "cpu", left
    finally:
        _retain.LEAST_WORK, _shards.ShardKernel.choose_retained = least, choose


def two_in_turn() -> None:
    """Layers of one form, in which this rank's rows begin elsewhere: the first's direct call takes what ranks tell for the second."""
    layer, rank, ranks = Layer(), dist.get_rank(), dist.get_world_size()
    places = []
    for first, second in ((60, 40), (40, 60), (40, 40)):
        bounds = [0, first, *(first + second + 10 * i for i in range(ranks - 1))]
        target = layer.target.clamp(max=bounds[-1] - 1)
        expected = flce.linear_cross_entropy(layer.hidden, layer.weight[: bounds[-1]], target)
        places.append((leaf(layer.weight[bounds[rank] : bounds[rank + 1]]), target, expected))
    hidden = leaf(layer.hidden)
    values: list[Tensor] = []

    def calls() -> None:
        values.clear()
        for weight, target, expected in places:
            loss = flce.linear_cross_entropy(hidden, weight, target, process_group=layer.group)
            values.append(loss)
            close(loss, expected)
        for loss in reversed(values):
            loss.backward()

    assert [asks(calls) for _ in range(3)] == [3, 0, 0]
    assert all(map(is_direct, values))


def threads() -> None:
    """Two threads, each with a group of its own, at one time. (NCCL's groups may not meet on one stream in another order on each rank.)"""
    if device() != "cpu":
        return
    call = Call()
    right = call.step()
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    failures: list[str] = []

    def work(group: Any) -> None:
        try:
            for number in range(8):
                loss = flce.linear_cross_entropy(call.hidden, call.weight, call.target, process_group=group)
                same(right, (loss, *call.gradients(loss)))
                assert is_direct(loss) == (number > 0)
        except Exception as error:
            failures.append(repr(error))

    workers = [threading.Thread(target=work, args=(group,)) for group in groups]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


# ── Autograd ────────────────────────────────────────


def checkpointed(first_is_direct: bool, reentrant: bool) -> None:
    """The first forward goes one way and the one in backward another."""
    call = Call()
    hidden, weight = call.hidden, call.weight

    def step(x: Tensor, w: Tensor) -> Tensor:
        loss: Tensor = flce.linear_cross_entropy((x * 1).view(2, -1, HIDDEN), w, call.target.view(2, -1), **call.options)
        return loss

    step(hidden, weight).backward()
    right = [hidden.grad, weight.grad]
    if first_is_direct:
        assert is_direct(step(hidden, weight))
    else:
        _call.forget()
    hidden.grad = weight.grad = None
    loss = checkpoint(step, hidden, weight, use_reentrant=reentrant)
    if first_is_direct:
        _call.forget()
    elif reentrant:
        step(hidden, weight)  # the first one was without gradients
    loss.backward()
    for tensor, gradient in zip((hidden, weight), right, strict=True):
        assert tensor.grad is not None and gradient is not None and torch.equal(tensor.grad, gradient)


def backward_again() -> None:
    """Several backward passes over one forward, of both gradients, of one at a time, and one to be differentiated."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    loss = call.value()
    assert is_direct(loss)
    with told() as times:
        for _ in range(2):
            same(right[1:], call.gradients(loss, retain_graph=True))
        alone = [torch.autograd.grad(loss, each, torch.tensor(-1.0), retain_graph=True)[0] for each in (call.hidden, call.weight)]
        same(right[1:], tuple(alone))
        kept = call.gradients(loss, create_graph=True)
        same(right[1:], tuple(each.detach() for each in kept))
    assert times == [0]
    assert "no second derivatives" in raised_by(flce.UnsupportedTransformError, kept[0].sum().backward)


def frozen() -> None:
    call = Call()
    both = [call.step() for _ in range(2)][-1]
    for name, gradient in (("hidden", both[2]), ("weight", both[1])):
        getattr(call, name).requires_grad_(False)
        for number in range(3):
            made = call.step()
            assert is_direct(made[0]) == (number > 0)
            same((both[0], gradient), made)
        getattr(call, name).requires_grad_(True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            same((both[0],) * 3, tuple(call.value() for _ in range(3)))
    call.hidden, call.weight = call.hidden.detach(), call.weight.detach()
    for _ in range(3):
        with told() as times:
            value = call.value()
        assert times == [1] and value.grad_fn is None and torch.equal(value, both[0])
    call.hidden.requires_grad_()
    same(both[:2], call.step())


def other_tensors_in_backward() -> None:
    """Saved tensors that a hook gives back, and a weight whose memory was swapped since forward."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    for back in (lambda t: t.clone(), lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), back):
            loss = call.value()
        assert is_direct(loss)
        same(right[1:], call.gradients(loss))
    loss = call.value()
    call.weight.data = torch.cat([call.weight.detach(), call.weight.detach()], dim=1)[:, :HIDDEN]
    same(right[1:], call.gradients(loss))


def other_ways() -> None:
    """Autocast, modes and transforms are no direct calls."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    with torch.autocast(call.hidden.device.type, dtype=torch.bfloat16):
        rounded = call.value()
    assert not is_direct(rounded) and not torch.equal(rounded, right[0])
    with Through():
        assert not is_direct(call.value())
    bias = call.layer.mine(call.layer.bias)
    assert not torch.equal(call.value(bias=bias), right[0])
    same(right, call.step())


def equal_meshes() -> None:
    """Meshes of the same ranks are equal, and may be of different groups."""
    meshes = [init_device_mesh(device(), (dist.get_world_size(),)) for _ in range(2)]
    meshes[1] = init_device_mesh(device(), (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))["tp"]
    call = Call()
    right = [call.step() for _ in range(3)][-1]
    for mesh in (*meshes, *meshes):
        call.options["process_group"] = mesh
        value = [call.value() for _ in range(3)][-1]
        assert _autograd.python_node(value).call[0].parallel.group == mesh.get_group().group_name
        same(right, (value, *call.gradients(value)))


def watched() -> None:
    """Collectives are torch's own functions where a function mode looks on, and with a torch of other names: the bits are the same. While a
    coalescing manager collects a group's collectives, they go through it."""
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*arguments, **(keywords or {}))

    call = Call()
    right = [call.step() for _ in range(2)][-1]
    group = call.options["process_group"]
    with Watch():
        same(right, call.step())
        assert _parallel._short_way(group, call.hidden) is None
    assert any(name.startswith("all_gather") for name in seen), seen
    original, _parallel._OPTIONS = _parallel._OPTIONS, None
    try:
        same(right, call.step())
    finally:
        _parallel._OPTIONS = original
    default_device = has_torch_function((call.hidden,))  # torch.set_default_device is a function mode, too
    assert (_parallel._short_way(group, call.hidden) is None) == default_device
    with dist.distributed_c10d._coalescing_manager(group):
        assert _parallel._short_way(group, call.hidden) is None


def after_an_error(where: str) -> None:
    """A pass that raises takes its frame along: the next one begins with another."""
    call = Call()
    right = [call.step() for _ in range(2)][-1]
    value = call.value()
    assert is_direct(value)
    layout = _autograd.python_node(value).call[1]
    frames = layout.backward[3] if where == "backward" else layout.forward
    before = len(frames)
    name = "run_in" if where == "backward" else "run"
    original = getattr(_kernels.LoadedKernel, name)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    setattr(_kernels.LoadedKernel, name, fail)
    try:
        raised_by(KeyboardInterrupt, lambda: call.gradients(value) if where == "backward" else call.value())
    finally:
        setattr(_kernels.LoadedKernel, name, original)
    assert len(frames) == before - 1
    dist.barrier()
    same(right, call.step())


def run(function: Callable[..., None], *arguments: Any) -> None:
    _layouts.forget()  # makes this call the first of its kind on every rank
    _call.forget()
    run_named(function, *arguments)


FLOATS = (torch.float32, torch.bfloat16)
CASES: list[tuple[Any, ...]] = [
    *((bits, form, dtype, reduction, False) for form, reduction in (((TOKENS,), "mean"), ((12, 4), "none")) for dtype in FLOATS),
    *((bits, (TOKENS,), torch.float32, reduction, sequence) for reduction, sequence in (("sum", False), ("none", True))),
    (bits, (12, 4), torch.bfloat16, "mean", True),
    *((other_calls, kind) for kind in ("logprobs", "hidden major", "int32", "mesh", "fp32 sum", "parts")),
    *((retained, lends, sequence) for lends in (False, True) for sequence in (False, True)),
    (two_in_turn,),
    (threads,),
    *((checkpointed, first, reentrant) for first in (False, True) for reentrant in (False, True)),
    *((function,) for function in (backward_again, frozen, other_tensors_in_backward, other_ways, equal_meshes, watched)),
    *((after_an_error, where) for where in ("forward", "backward")),
]

if __name__ == "__main__":
    run_main(run, lambda: CASES)
