"""flce.linear_topk: classes, log-probabilities and lse beside a sort of fp64 logits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from levels import QUICK
from support import OUTPUT_BOUND
from torch import Tensor

import flce

N, D, V = 37, 64, 1000
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "logits": {"logit_scale": -0.7, "softcap": 5.0},
    "temperature": {"temperature": 1.7},
    "everything": {"bias": True, "logit_scale": 0.5, "softcap": 5.0, "temperature": "each"},
}


def layer(device: str, dtype: torch.dtype, *, hidden_major: bool = False, tokens: int = N, depth: int = D, classes: int = V) -> Any:
    draw = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, depth, generator=draw).to(device, dtype)
    weight = (2 * depth**-0.5 * torch.randn(classes, depth, generator=draw)).to(device, dtype)
    return hidden, weight.t().contiguous().t() if hidden_major else weight


def given_of(name: str, device: str, dtype: torch.dtype, classes: int = V) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(8)
    options = dict(OPTIONS[name])
    if "bias" in options:
        options["bias"] = torch.randn(classes, generator=draw).to(device, dtype)
    if options.get("temperature") == "each":
        options["temperature"] = (torch.rand(N, generator=draw) + 0.5).to(device)
    return options


def logits_of(
    hidden: Tensor, weight: Tensor, *, bias: Any = None, logit_scale: float = 1.0, softcap: float = 0.0, temperature: Any = 1.0
) -> Tensor:
    logits = logit_scale * (hidden.double() @ weight.double().t() + (0 if bias is None else bias.double()))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return logits / (temperature.double()[..., None] if isinstance(temperature, Tensor) else temperature)


def check(made: Any, logits: Tensor, k: int, dtype: torch.dtype) -> None:
    """Classes whose logits are closer than a rounding may change places: what has to be right is each class's own log-probability, that
    they are in order, and that no other class is above the last one."""
    logits = logits.detach()
    bound = 4 * OUTPUT_BOUND[dtype] * max(1.0, float(logits[logits.isfinite()].abs().max()))
    logprobs = logits.log_softmax(-1)
    assert made.logprobs.dtype is torch.float32 and made.ids.dtype is torch.int64 and made.lse.dtype is torch.float32
    assert made.logprobs.shape == made.ids.shape == (*logits.shape[:-1], k) and made.lse.shape == logits.shape[:-1]
    assert not made.logprobs.requires_grad
    ids = made.ids
    assert bool(((ids >= 0) & (ids < logits.shape[-1])).all())
    assert bool((ids.sort(-1).values.diff(dim=-1) > 0).all()), "a class is there twice"
    assert float((made.logprobs - logprobs.gather(-1, ids)).abs().max()) <= bound
    assert float((made.lse - logits.logsumexp(-1)).abs().max()) <= bound
    assert bool((made.logprobs.diff(dim=-1) <= 0).all())
    exact = logprobs.topk(k).values
    assert float((made.logprobs - exact).abs().max()) <= bound, "another class is above"


CASES = [
    (k, name, dtype, hidden_major)
    for k, name, dtype, hidden_major in itertools.product(
        (1, 7, 64, 256), OPTIONS, (torch.float32, torch.bfloat16, torch.float16), (False, True)
    )
    if not QUICK or name == "everything"
]


@pytest.mark.parametrize(("k", "name", "dtype", "hidden_major"), CASES)
def test_classes_beside_fp64(k: int, name: str, dtype: torch.dtype, hidden_major: bool, device: str) -> None:
    given = given_of(name, device, dtype)
    hidden, weight = layer(device, dtype, hidden_major=hidden_major)
    check(flce.linear_topk(hidden, weight, k, **given), logits_of(hidden, weight, **given), k, dtype)


@pytest.mark.parametrize(
    ("tokens", "classes", "k"), [(1, 2, 2), (3, 256, 256), (5, 257, 256), (300, 5003, 33), (17, 20000, 64), (2, 4099, 1)]
)
def test_shapes(tokens: int, classes: int, k: int, device: str) -> None:
    hidden, weight = layer(device, torch.bfloat16, tokens=tokens, classes=classes)
    check(flce.linear_topk(hidden, weight, k), logits_of(hidden, weight), k, torch.bfloat16)


def exact_layer(logits: Tensor, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose product is `logits` [N, V] of small integers, exactly."""
    tokens = logits.shape[0]
    hidden = torch.zeros(tokens, -(-tokens // 8) * 8)
    hidden[:, :tokens] = torch.eye(tokens)
    weight = torch.zeros(logits.shape[1], hidden.shape[1])
    weight[:, :tokens] = logits.t()
    return hidden.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 31, 64, 255])
def test_of_equal_logits_the_smaller_class_comes_first(k: int, dtype: torch.dtype, device: str) -> None:
    classes = 4000
    draw = torch.Generator().manual_seed(3)
    rows = torch.stack(
        [
            torch.zeros(classes),  # all equal
            torch.arange(classes).float() % 7,
            torch.randint(0, 3, (classes,), generator=draw).float(),
            (torch.arange(classes) >= classes - 3).float(),  # the largest come last
            torch.arange(classes).float().div(16).floor(),  # rising all the way
            -torch.arange(classes).float().div(16).floor(),
            torch.where(torch.arange(classes) % 2 == 0, 0.0, -0.0),
        ]
    )
    made = flce.linear_topk(*exact_layer(rows, device, dtype), k)
    order = rows.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(made.ids.cpu(), order)
    assert torch.allclose(made.logprobs.cpu(), rows.log_softmax(-1).gather(-1, order), atol=1e-4)


@pytest.mark.parametrize("classes", [1000, 9001, 20000])
@pytest.mark.parametrize("k", [1, 8, 48, 64, 200])
def test_any_rows_among_many_tokens(k: int, classes: int, device: str) -> None:
    """Tokens enough for bounds from the first columns, whatever those are: equal, without order, in order, far apart."""
    draw = torch.Generator().manual_seed(5)
    number = torch.arange(classes).float()
    any_order = torch.randint(-250, 250, (classes,), generator=draw).float()
    few = torch.where(torch.rand(classes, generator=draw) < 60 / classes, any_order, -math.inf)
    rows = torch.stack(
        [
            torch.full((classes,), 3.0),
            number % 2,
            any_order,
            (number * 256 / classes).floor(),
            -(number * 256 / classes).floor(),
            any_order.sort().values,
            torch.where(number == 33, 2.0**100, any_order),  # one far above the others
            torch.where(number == 33, -(2.0**100), any_order),
            torch.exp2((any_order / 4).round()),  # all sizes
            -torch.exp2((any_order / 4).round()),
            (number >= classes - 30).float(),
            ((number > 1400) & (number < 1500)).float(),
            any_order * 2.0**-130,  # below the least normal number, in part
            few.nan_to_num(neginf=-(2.0**120)),
        ]
    )
    hidden, weight = exact_layer(rows, device, torch.bfloat16)
    tokens = torch.arange(610) % rows.shape[0]
    made = flce.linear_topk(hidden[tokens.to(device)], weight, k)
    order = rows.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    wrong = (made.ids.cpu() != order[tokens]).any(-1)
    assert not bool(wrong.any()), f"rows {tokens[wrong].unique().tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_logits_and_nan(dtype: torch.dtype, device: str) -> None:
    hidden, weight = layer(device, dtype, tokens=4)
    bias = torch.full((V,), -math.inf, device=device, dtype=dtype)
    bias[[5, 400, 700]] = 0.0
    made = flce.linear_topk(hidden, weight, 8, bias=bias)
    assert torch.equal(made.ids[:, :3].sort().values, torch.tensor([5, 400, 700], device=device).expand(4, 3))
    assert torch.equal(made.ids[:, 3:], torch.tensor([0, 1, 2, 3, 4], device=device).expand(4, 5))
    assert bool(made.logprobs[:, :3].isfinite().all()) and bool((made.logprobs[:, 3:] == -math.inf).all())
    hidden[2] = math.nan
    made = flce.linear_topk(hidden, weight, 8)
    assert bool(made.logprobs[2].isnan().all()) and bool(made.lse[2].isnan())
    assert bool(made.logprobs[[0, 1, 3]].isfinite().all()) and bool(((made.ids >= 0) & (made.ids < V)).all())


@pytest.mark.parametrize("k", [3, 64])
def test_many_tokens_with_few_classes_that_count(k: int, device: str) -> None:
    """Tokens enough for several lists a row; all but some classes are left out, at the end, in the middle, or nowhere."""
    hidden, weight = layer(device, torch.bfloat16, tokens=700, depth=64, classes=9001)
    for kept in (slice(8000, 8040), slice(4000, 4070), slice(0, 9001, 150), slice(None)):
        bias = torch.full((9001,), -math.inf, device=device, dtype=torch.bfloat16)
        bias[kept] = 0.5
        made = flce.linear_topk(hidden, weight, k, bias=bias)
        logits = logits_of(hidden, weight, bias=bias)
        order = logits.sort(dim=-1, descending=True, stable=True)
        finite = order.values[:, :k].isfinite()
        exact = logits.log_softmax(-1).gather(-1, made.ids)
        assert bool((made.logprobs.isfinite() == finite).all()) and bool((made.logprobs - exact)[finite].abs().max() < 1e-3)
        assert torch.equal(made.ids[~finite], order.indices[:, :k][~finite])


def test_forms_of_arguments(device: str) -> None:
    hidden, weight = layer(device, torch.bfloat16, tokens=6)
    expected = flce.linear_topk(hidden, weight, 5, temperature=2.0)
    for found in (
        flce.linear_topk(hidden.view(2, 3, D), weight, 5, temperature=torch.full((2, 3), 2.0, device=device)),
        flce.linear_topk(hidden.repeat_interleave(2, 0)[::2].requires_grad_(), weight.requires_grad_(), 5, temperature=2.0),
    ):
        assert torch.equal(found.ids.view(6, 5), expected.ids) and torch.equal(found.logprobs.view(6, 5), expected.logprobs)
        assert not found.lse.requires_grad
    linear = torch.nn.Linear(D, V, device=device, dtype=torch.bfloat16)
    made = flce.linear_topk(hidden, linear, 3)
    assert torch.equal(made.ids, flce.linear_topk(hidden, linear.weight, 3, bias=linear.bias).ids)
    narrow = flce.linear_topk(hidden[:, :13].float(), weight[:, :13].float(), 4)
    check(narrow, logits_of(hidden[:, :13], weight[:, :13]), 4, torch.float32)
    none = flce.linear_topk(hidden[:0], weight, 5)
    assert none.ids.shape == (0, 5) and none.lse.shape == (0,)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_of_another_default_dtype(default: torch.dtype, device: str) -> None:
    hidden, weight = layer(device, torch.float32)
    expected = flce.linear_topk(hidden, weight, 5, temperature=2.0)
    torch.set_default_dtype(default)
    try:
        made = flce.linear_topk(hidden, weight, 5, temperature=2.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(made.ids, expected.ids) and torch.equal(made.lse, expected.lse)


def test_under_autocast(device: str) -> None:
    hidden, weight = layer(device, torch.float32)
    linear = torch.nn.Linear(D, V, device=device)
    given = [each.detach().bfloat16() for each in (hidden, linear.weight, linear.bias)]
    expected = flce.linear_topk(*given[:2], 5, bias=given[2])
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(flce.linear_topk(hidden, linear, 5).ids, expected.ids)
        with pytest.raises(flce.DTypeError, match="float64"):
            flce.linear_topk(hidden.double(), weight.double(), 5)


def test_a_temperature_out_of_range_is_reported(device: str) -> None:
    hidden, weight = layer(device, torch.bfloat16, tokens=5)
    temperature = torch.ones(5, device=device)
    temperature[3] = 0.0
    made = flce.linear_topk(hidden, weight, 4, temperature=temperature)
    assert made.ids[3].tolist() == [-1] * 4 and made.logprobs[3].tolist() == [0.0] * 4 and made.lse[3] == 0
    with pytest.raises(flce.LabelError, match=r"^temperature\[3\] is not between"):
        flce.check_labels()


def test_numbers_of_numpy_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    hidden, weight = layer("cpu", torch.float32, tokens=5)
    assert torch.equal(flce.linear_topk(hidden, weight, numpy.int64(3)).ids, flce.linear_topk(hidden, weight, 3).ids)


def test_same_bits_in_any_batch() -> None:
    hidden, weight = layer("cpu", torch.bfloat16)
    whole = flce.linear_topk(hidden, weight, 9, batch_invariant=True)
    for part in (slice(0, 1), slice(5, 30)):
        made = flce.linear_topk(hidden[part], weight, 9, batch_invariant=True)
        assert torch.equal(made.ids, whole.ids[part]) and torch.equal(made.logprobs, whole.logprobs[part])


@pytest.mark.full
def test_compiled(device: str) -> None:
    hidden, weight = layer(device, torch.bfloat16)
    compiled = torch.compile(lambda h: flce.linear_topk(h, weight, 6), fullgraph=True, backend="aot_eager")
    expected = flce.linear_topk(hidden, weight, 6)
    assert torch.equal(compiled(hidden).ids, expected.ids)
    assert torch.equal(compiled(hidden[:11]).logprobs, flce.linear_topk(hidden[:11], weight, 6).logprobs)
    of_any = torch.compile(lambda h, k: flce.linear_topk(h, weight, k).ids, fullgraph=True, backend="aot_eager")
    for k in (3, 4, 5):
        assert torch.equal(of_any(hidden, k), flce.linear_topk(hidden, weight, k).ids)


@pytest.mark.gpu
def test_in_a_cuda_graph(device: str) -> None:
    hidden, weight = layer(device, torch.bfloat16)
    expected = flce.linear_topk(hidden, weight, 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = flce.linear_topk(hidden, weight, 6)
    graph.replay()
    assert torch.equal(made.ids, expected.ids) and torch.equal(made.lse, expected.lse)


def test_feeds_a_distillation(device: str) -> None:
    """The teacher's side and the student's: with the same head forward KL's gradient is 0 but for the classes left out."""
    hidden, weight = layer(device, torch.float32)
    made = flce.linear_topk(hidden, weight, 256)
    student = hidden.clone().requires_grad_()
    probs = made.logprobs.exp()
    flce.linear_topk_distillation(student, weight, made.ids, probs / probs.sum(-1, keepdim=True), reduction="sum").backward()
    assert student.grad is not None and float(student.grad.abs().max()) < 0.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, flce.ArgumentError, "k is 0"),
        ({"k": 257}, flce.ArgumentError, "from 1 to 256"),
        ({"k": 1001}, flce.ArgumentError, "1000 classes"),
        ({"k": 2.0}, flce.ArgumentError, "k is 2.0"),
        ({"weight": torch.zeros(V, D)}, flce.DTypeError, "weight.to"),
        ({"bias": torch.zeros(V)}, flce.DTypeError, "bias.to"),
        ({"weight": torch.zeros(V, 0, dtype=torch.bfloat16)}, flce.ShapeError, "weight"),
        ({"temperature": torch.ones(N).to_sparse()}, flce.ArgumentError, "dense"),
        ({"weight": torch.zeros(D, V, dtype=torch.bfloat16)}, flce.ShapeError, "transposed"),
        ({"temperature": 0.0}, flce.ArgumentError, "temperature"),
        ({"temperature": torch.ones(N)[:, None]}, flce.ShapeError, "temperature has shape .* hidden's without the last"),
        ({"softcap": -1.0}, flce.SpecError, "softcap"),
        ({"vocab_start": 0}, flce.ArgumentError, "process_group"),
        ({"workspace_limit_bytes": 1000}, flce.PlanError, "bytes"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight = layer("cpu", torch.bfloat16)
    given = {"weight": weight, "k": 3} | arguments
    with pytest.raises(error, match=message):
        flce.linear_topk(hidden, given.pop("weight"), given.pop("k"), **given)
