"""Backward in two passes, as schedules that split it run the loss's node: each pass's reads and costs for every functional, through the
operators and explicit graphs, and where the engine cannot be asked which pass runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from passes_support import Passes, watch_passes
from retain_support import forget_losses, retain_any_size
from support import assert_close, make_problem
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce.core import _autograd, _retain

split = pytest.importorskip("torch.distributed.pipelining._backward")

ALL = 1 << 40
LENT = {"retain_in_grad_weight": True}
OWN = {"workspace_limit_bytes": ALL, "retain_in_grad_weight": False}  # a GPU would else lend what holds nearly as much


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    """Layers of any size retain."""
    retain_any_size(monkeypatch)
    yield watch_passes(monkeypatch.setattr)
    monkeypatch.undo()
    forget_losses()


@pytest.fixture(params=["as it is", "loses nodes"])
def losing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of torch before 2.13, too."""
    if request.param == "loses nodes":
        monkeypatch.setattr(_autograd, "LOSES_NODES", True)


class Stage(nn.Module):
    """A body and a head, in one dtype; hidden states of a received input."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device, dtype)
        self.head = nn.Linear(64, 3000, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def two_passes(loss: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """The gradient of x; those of the module's parameters are added to .grad."""
    (gradient,), groups = split.stage_backward_input([loss], None, [x], module.parameters())
    split.stage_backward_weight(module.parameters(), groups)
    return gradient


Loss = Callable[[Stage, Tensor, Tensor], Tensor]


def cross_entropy(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    return flce.linear_cross_entropy(hidden, stage.head.weight, target, bias=stage.head.bias, workspace_limit_bytes=ALL)


def per_token(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    losses, lse = flce.linear_cross_entropy(
        hidden, stage.head.weight, target, bias=stage.head.bias, reduction="none", return_lse=True, workspace_limit_bytes=ALL
    )
    return (losses * torch.linspace(0.5, 1.5, 40, device=hidden.device)).mean() + 1e-3 * lse.square().mean()


def logprobs(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    return -flce.linear_logprobs(hidden, stage.head.weight, target, bias=stage.head.bias, workspace_limit_bytes=ALL).exp().mean()


def entropy(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    chosen, spread = flce.linear_logprobs(
        hidden, stage.head.weight, target, bias=stage.head.bias, return_entropy=True, workspace_limit_bytes=ALL
    )
    return -(chosen + 0.1 * spread).mean()


def distillation(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 3000, (40, 9), generator=generator).to(hidden.device)
    probs = torch.randn(40, 9, generator=generator).softmax(-1).to(hidden.device)
    return flce.linear_topk_distillation(hidden, stage.head.weight, ids, probs, target=target, hard_weight=0.5, workspace_limit_bytes=ALL)


def pipeline(stage: Stage, hidden: Tensor, target: Tensor) -> Tensor:
    return flce.PipelineFusedLoss(stage.head, impl="flce", shift=0, workspace_limit_bytes=ALL)(hidden, target)


FUNCTIONALS: list[Loss] = [cross_entropy, per_token, logprobs, entropy, distillation, pipeline]


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=generator).to(device, dtype).requires_grad_()
    return x, torch.randint(0, 3000, (40,), generator=generator).to(device)


def in_one(stage: Stage, loss: Loss, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The gradients of x and of the parameters by one backward."""
    x, target = inputs(device, dtype)
    return list(torch.autograd.grad(loss(stage, stage(x), target), [x, *stage.parameters()], allow_unused=True))


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("loss", FUNCTIONALS, ids=lambda loss: loss.__name__)
def test_functionals_in_two_passes(device: str, passes: Passes, loss: Loss, bias: bool) -> None:
    if bias and loss is distillation:
        pytest.skip("takes no bias")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the dtype in which a GPU retains
    stage = Stage(device, dtype, bias=bias)
    expected = in_one(stage, loss, dtype, device)
    passes.clear()
    x, target = inputs(device, dtype)
    actual = [two_passes(loss(stage, stage(x), target), x, stage), *(parameter.grad for parameter in stage.parameters())]
    for got, right in zip(actual, expected, strict=True):
        assert_close(got, right, dtype, factor=2.0)
    assert passes.asked() == [(True, False), (False, True)]
    if device == "cpu" or loss is not entropy:  # on a GPU an entropy's gradient needs the logits
        assert passes.multiplications == 6
        assert passes.forwards == 1


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("options", [LENT, OWN], ids=["lent", "own"])
def test_both_passes_read_what_forward_left(device: str, passes: Passes, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Memory is used, not only handed over: without it there are other gradients. The weights' pass writes over lent memory, and returns
    it."""
    memory: list[weakref.ref[Tensor]] = []
    keep = _retain.Retained.keep

    def watch(self: Any, kept: Tensor, **keywords: Any) -> None:
        memory.append(weakref.ref(kept))
        keep(self, kept, **keywords)

    monkeypatch.setattr(_retain.Retained, "keep", watch)
    dtype = torch.bfloat16
    stage = Stage(device, dtype)
    loss_fn = flce.PipelineFusedLoss(stage.head, impl="flce", shift=0, **options)
    gradients = []
    for spoilt in (False, True):
        stage.zero_grad()
        x, target = inputs(device, dtype)
        loss = loss_fn(stage(x), target)
        kept = memory[-1]()
        assert kept is not None
        address = kept.data_ptr()
        if spoilt:
            kept.view(torch.uint8).fill_(0x40)  # 3.0, as fp32 and as bf16
        del kept
        gradients.append((two_passes(loss, x, stage), stage.head.weight.grad))
        assert passes.asked()[-2:] == [(True, False), (False, True)]
        if options is LENT:
            assert [each.overwrites for each in passes.backwards[-2:]] == [False, True]
            assert gradients[-1][1].data_ptr() == address
        else:
            assert memory[-1]() is None  # no longer than the weights' pass
    for right, spoilt in zip(*gradients, strict=True):
        assert (right - spoilt).float().norm() > 0.1 * right.float().norm()


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("loss", [pipeline, entropy], ids=lambda loss: loss.__name__)
def test_nothing_of_a_loss_outlives_its_passes(device: str, loss: Loss) -> None:
    """Memory goes without the garbage collector: after both passes, after one backward, and for a loss without any."""
    stage = Stage(device)
    gc.collect()
    gc.disable()
    try:
        for way in ("two passes", "backward", "grad", "none"):
            x, target = inputs(device)
            hidden = stage(x)
            ends = weakref.ref(hidden)
            value = loss(stage, hidden, target)
            del hidden
            if way == "two passes":
                (gradient,), groups = split.stage_backward_input([value], None, [x], stage.parameters())
                assert ends() is not None
                split.stage_backward_weight(stage.parameters(), groups)
                del groups
            elif way == "backward":
                value.backward()
            elif way == "grad":
                gradient = torch.autograd.grad(value, x)[0]  # noqa: F841  # which a caller keeps
            del value
            assert ends() is None, way
    finally:
        gc.enable()


def test_a_node_is_kept_only_where_a_schedule_may_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(device)
    plain = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    monkeypatch.setattr(_autograd, "LOSES_NODES", True)
    for way in range(4):  # direct calls from the third on
        kept = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
        assert torch.equal(kept, plain), way
        assert kept.grad_fn.name() == "MulBackward0"
        assert not kept._is_view()  # detach_() is refused for a view
        for actual, right in zip(*(torch.autograd.grad(of, (problem.hidden, problem.weight)) for of in (kept, plain)), strict=True):
            assert torch.equal(actual, right)
        plain = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    for name in ("_PIPELINING", "_running_node"):  # not imported, and a torch that has no such name
        with monkeypatch.context() as without:
            without.setattr(_autograd, name, None)
            alone = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
            assert alone.grad_fn.name() != "MulBackward0"


# ── Where the engine cannot be asked ────────────────────


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that does not say what a run is for."""
    monkeypatch.setattr(_autograd, "_will_run", None)


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize(
    "options",
    [{}, {"retain_in_grad_weight": True}, {"workspace_limit_bytes": ALL}, {"accumulate_into_grad": True}],
    ids=["plain", "lent", "own", "accumulating"],
)
def test_without_the_engines_word_gradients_are_right(
    device: str, passes: Passes, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Each pass makes both gradients; none is added to anything twice."""
    stage = Stage(device)
    expected = in_one(stage, cross_entropy, torch.float32, device)
    loss_fn = flce.PipelineFusedLoss(stage.head, impl="flce", shift=0, **options)
    assert ("accumulate_into_grad=True is without effect" in caplog.text) == ("accumulate_into_grad" in options)
    passes.clear()
    for times in (1, 2):
        x, target = inputs(device)
        actual = [two_passes(loss_fn(stage(x), target), x, stage), *(parameter.grad for parameter in stage.parameters())]
        for got, right in zip(actual, [expected[0], *(times * each for each in expected[1:])], strict=True):
            assert_close(got, right, torch.float32, factor=2.0)
    assert passes.asked() == [(True, True)] * 4
    x, target = inputs(device)
    loss_fn(stage(x), target).backward()
    assert_close(stage.head.weight.grad, 3 * expected[-1], torch.float32, factor=2.0)


@pytest.mark.usefixtures("mute")
def test_without_the_engines_word_nothing_is_added_to_a_buffer(device: str) -> None:
    problem = make_problem(device)
    buffer = torch.zeros_like(problem.weight, requires_grad=False)
    for call in (flce.linear_cross_entropy, flce.linear_logprobs):
        with pytest.raises(flce.UnavailableError, match=r"grad_weight_out is given, but torch .* lacks torch._C._will_engine_execute_node"):
            call(problem.hidden, problem.weight, problem.target, grad_weight_out=buffer)  # type: ignore[operator]


# ── Through the operators ───────────────────────────────


class Watching(TorchDispatchMode):
    """Sees operators, as SAC's and FLOP counters do: calls go through the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flce":
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("loss", [cross_entropy, entropy, pipeline], ids=lambda loss: loss.__name__)
def test_operators_in_two_passes(device: str, passes: Passes, loss: Loss) -> None:
    stage = Stage(device)
    expected = in_one(stage, loss, torch.float32, device)
    passes.clear()
    x, target = inputs(device)
    with Watching() as watching:
        value = loss(stage, stage(x), target)
    actual = [two_passes(value, x, stage), *(parameter.grad for parameter in stage.parameters())]
    for got, right in zip(actual, expected, strict=True):
        assert_close(got, right, torch.float32, factor=2.0)
    assert watching.seen == ["flce::linear_cross_entropy"]
    assert passes.asked() == [(True, False), (False, True)]
    if device == "cpu":
        assert passes.multiplications == 6


# ── Explicit backward graphs (backward_requires_autograd=False) ──


class Step(nn.Module):
    """The module that a pipeline of graphs traces of its last stage."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        super().__init__()
        self.stage = stage
        self.loss_fn = flce.PipelineFusedLoss(stage.head, impl="flce", shift=0, **options)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.stage(x), target)


def run_until(graph: torch.fx.GraphModule, values: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
    """The outputs' values, from those that are there: nodes that they need run, each once."""
    needed: set[Any] = set()
    open_nodes = list(outputs)
    while open_nodes:
        node = open_nodes.pop()
        if node not in values and node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    for node in graph.graph.nodes:
        if node in needed:
            args, keywords = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **keywords)
    return [values[node] for node in outputs]


@pytest.mark.parametrize("asks_twice", [False, True])
@pytest.mark.parametrize("options", [LENT, OWN], ids=["lent", "own"])
def test_graphs_in_two_passes(device: str, passes: Passes, asks_twice: bool, options: dict[str, Any]) -> None:
    """Forward, input's and weights' graph of several microbatches in turn. A trace that asks for all gradients at once has one operator,
    which the input's graph runs, and hands on weight's gradient; one that asks twice has two."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the dtype in which a GPU retains
    stage = Stage(device, dtype)
    step = Step(stage, **options)
    names, parameters = zip(*step.named_parameters(), strict=True)

    def joint(x: Tensor, target: Tensor, *given: Tensor) -> Any:
        loss = torch.func.functional_call(step, dict(zip(names, given, strict=True)), (x, target))
        if asks_twice:
            *body, head = given
            through_body = torch.autograd.grad(loss, (x, *body), retain_graph=True)
            return loss.detach(), *through_body, *torch.autograd.grad(loss, head)
        return loss.detach(), *torch.autograd.grad(loss, (x, *given))

    x, target = inputs(device, dtype)
    graph = make_fx(joint, tracing_mode="fake")(x, target, *parameters)
    assert passes.forwards == 0
    *places, result = (node for node in graph.graph.nodes if node.op in ("placeholder", "output"))
    loss, for_input, *for_weights = result.args[0]

    flights = [(x.detach() + 0.1 * i, target.roll(i)) for i in range(3)]
    values = [dict(zip(places, (*flight, *(parameter.detach() for parameter in parameters)), strict=True)) for flight in flights]
    with torch.no_grad():
        losses = [run_until(graph, each, [loss]) for each in values]
        assert passes.asked() == []
        of_inputs = [run_until(graph, each, [for_input]) for each in values]
        of_weights = [run_until(graph, each, for_weights) for each in values]
    assert passes.forwards == 3
    assert passes.asked() == ([(True, False)] * 3 + [(False, True)] * 3 if asks_twice else [(True, True)] * 3)
    assert passes.multiplications == 3 * 6
    for (x, target), value, of_input, of_weight in zip(flights, losses, of_inputs, of_weights, strict=True):
        x.requires_grad_()
        right = step(x, target)
        assert_close(value[0], right.detach(), dtype)
        expected = torch.autograd.grad(right, (x, *parameters))
        for actual, gradient in zip((*of_input, *of_weight), expected, strict=True):
            assert_close(actual, gradient, dtype, factor=2.0)
