"""flce.linear_divergence: values, entropies and gradients beside plain arithmetic in fp64, alone and under torch's transformations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from levels import QUICK
from retain_support import forget_losses
from support import GRADIENT_BOUND, OUTPUT_BOUND
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce
from flce.core import _retain
from flce.operators import _divergence

N, STUDENT, TEACHER, V = 37, 64, 104, 1000
BETAS = (0.0, 0.3, 1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"student_bias": True, "teacher_bias": True},
    "logits": {"student_logit_scale": 0.5, "student_softcap": 5.0, "teacher_logit_scale": 0.7, "teacher_softcap": 6.0},
    "temperature": {"temperature": 1.7},
    "all_but_student_bias": {
        "teacher_bias": True, "student_logit_scale": -0.5, "student_softcap": 5.0, "teacher_logit_scale": 0.7, "teacher_softcap": 6.0,
        "temperature": "each", "mask": True, "token_weight": True,
    },
    "everything": {
        "student_bias": True, "teacher_bias": True, "student_logit_scale": 0.5, "student_softcap": 5.0, "teacher_logit_scale": -0.7,
        "teacher_softcap": 6.0, "temperature": "each", "mask": True, "token_weight": True,
    },
}  # fmt: skip


def heads(
    device: str, dtype: torch.dtype, *, hidden_major: bool = False, depth: int = STUDENT, classes: int = V, tokens: int = N
) -> tuple[Tensor, ...]:
    """Student's hidden and weight, teacher's hidden and weight."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for size in (depth, TEACHER):
        made.append(torch.randn(tokens, size, generator=draw).to(device, dtype))
        weight = (2 * size**-0.5 * torch.randn(classes, size, generator=draw)).to(device, dtype)
        made.append(weight.t().contiguous().t() if hidden_major else weight)
    made[0].requires_grad_()
    made[1].requires_grad_()
    return tuple(made)


def given_of(name: str, device: str, dtype: torch.dtype, classes: int = V, tokens: int = N) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(8)
    options = dict(OPTIONS[name])
    for bias in ("student_bias", "teacher_bias"):
        if bias in options:
            options[bias] = torch.randn(classes, generator=draw).to(device, dtype).requires_grad_(bias == "student_bias")
    if options.get("temperature") == "each":
        options["temperature"] = (torch.rand(tokens, generator=draw) + 0.5).to(device)
    if "mask" in options:
        options["mask"] = (torch.rand(tokens, generator=draw) > 0.3).to(device)
        options["token_weight"] = torch.rand(tokens, generator=draw).to(device)
    return options


def logits_of(hidden: Tensor, weight: Tensor, bias: Any, scale: Any, softcap: Any, temperature: Any) -> Tensor:
    logits = (scale or 1) * (hidden.double() @ weight.double().t() + (0 if bias is None else bias.double()))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return logits / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)


def right(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, beta: float, temperature: Any = 1.0,
    mask: Any = None, token_weight: Any = None, **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Divergences and both entropies in fp64."""
    student, teacher = (
        logits_of(h, w, *(given.get(f"{who}_{name}") for name in ("bias", "logit_scale", "softcap")), temperature).log_softmax(-1)
        for who, h, w in (("student", hidden, weight), ("teacher", teacher_hidden, teacher_weight))
    )
    made = of_logs(student, teacher, beta) * (1 if token_weight is None else token_weight.double())
    entropies = [-(each.exp() * each).sum(-1) for each in (student, teacher)]
    kept = 1 if mask is None else mask.double()
    return made * kept, entropies[0] * kept, entropies[1] * kept


def of_logs(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return ((1 - beta) * student.exp() * (student - mixture) + beta * teacher.exp() * (teacher - mixture)).sum(-1)


def close(found: Tensor, expected: Tensor, bound: float, name: str = "") -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


CASES = [
    (beta, name, dtype, hidden_major)
    for beta, name, dtype, hidden_major in itertools.product(BETAS, OPTIONS, (torch.float32, torch.bfloat16, torch.float16), (False, True))
    if not QUICK or name == "everything"
]


@pytest.mark.parametrize(("beta", "name", "dtype", "hidden_major"), CASES)
def test_values_and_gradients_beside_fp64(beta: float, name: str, dtype: torch.dtype, hidden_major: bool, device: str) -> None:
    given = given_of(name, device, dtype)
    inputs = heads(device, dtype, hidden_major=hidden_major)
    made = flce.linear_divergence(*inputs, beta=beta, return_student_entropy=True, return_teacher_entropy=True, **given)
    expected = right(*inputs, beta=beta, **given)
    for found, exact, which in zip(made, expected, ("divergence", "student_entropy", "teacher_entropy"), strict=True):
        close(found, exact, 2 * OUTPUT_BOUND[dtype], which)
    assert not made.student_entropy.requires_grad
    wanted = [inputs[0], inputs[1], *([given["student_bias"]] if "student_bias" in given else [])]
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(9)).to(device)
    gradients = torch.autograd.grad((made.divergence * upstream).sum(), wanted)
    for found, exact in zip(gradients, torch.autograd.grad((expected[0] * upstream.double()).sum(), wanted), strict=True):
        assert found.dtype is dtype and found.stride() == exact.stride()
        close(found, exact.double(), GRADIENT_BOUND[dtype])


def test_central_differences() -> None:
    inputs = heads("cpu", torch.float32)
    direction = torch.randn_like(inputs[0])
    for beta in BETAS:
        step = 1e-2
        there, back = (
            flce.linear_divergence(inputs[0].detach() + sign * step * direction, *inputs[1:], beta=beta, reduction="sum")
            for sign in (1, -1)
        )
        (gradient,) = torch.autograd.grad(flce.linear_divergence(*inputs, beta=beta, reduction="sum"), inputs[0])
        assert (there - back).item() / (2 * step) == pytest.approx((gradient * direction).sum().item(), rel=2e-2)


def test_a_student_that_is_its_teacher(device: str) -> None:
    dtype = torch.bfloat16
    hidden, weight, *_ = heads(device, dtype)
    for beta in BETAS:
        divergence = flce.linear_divergence(hidden, weight, hidden.detach(), weight.detach(), beta=beta)
        assert divergence.abs().max() < 2e-6
        gradients = torch.autograd.grad(divergence.sum(), (hidden, weight))
        assert all(each.abs().max() < 1e-5 for each in gradients)


def test_classes_that_the_heads_rule_out(device: str) -> None:
    """Biases of −inf: at neither head, at the teacher's alone where that is no infinite divergence, at both."""
    dtype = torch.bfloat16
    inputs = heads(device, dtype)
    student, teacher = torch.zeros(V, device=device, dtype=dtype), torch.zeros(V, device=device, dtype=dtype)
    student[:300] = teacher[:400] = float("-inf")
    for beta in (0.0, 0.3):
        made = flce.linear_divergence(*inputs, beta=beta, student_bias=student, teacher_bias=teacher)
        exact = right(*[each[300:] if each.shape[0] == V else each for each in inputs], beta=beta, teacher_bias=teacher[300:])[0]
        if beta == 0:  # plain arithmetic has 0·∞ there
            exact = right(*[each[400:] if each.shape[0] == V else each for each in inputs], beta=0.0)[0]
            log_share = logits_of(inputs[0], inputs[1][300:], None, 1, 0, 1.0).logsumexp(-1) - logits_of(
                inputs[0], inputs[1][400:], None, 1, 0, 1.0
            ).logsumexp(-1)
            close(made, exact + log_share, 1e-5)
        assert made.isfinite().all()
        assert torch.autograd.grad(made.sum(), inputs[0])[0].isfinite().all()
    assert flce.linear_divergence(*inputs, beta=1.0, student_bias=student, teacher_bias=teacher).isposinf().all()


def test_masked_tokens_may_hold_anything(device: str) -> None:
    inputs = heads(device, torch.bfloat16)
    mask = torch.ones(N, dtype=torch.bool, device=device)
    mask[3:7] = False
    expected = flce.linear_divergence(*inputs, beta=0.3, mask=mask, reduction="mean")
    assert expected.item() == pytest.approx(right(*inputs, beta=0.3, mask=mask)[0].sum().item() / mask.sum().item(), rel=1e-4)
    gradients = torch.autograd.grad(expected, inputs[:2])
    with torch.no_grad():
        inputs[0][4], inputs[2][5] = float("nan"), float("inf")
    made = flce.linear_divergence(*inputs, beta=0.3, mask=mask, reduction="mean")
    assert torch.equal(made, expected)
    for found, exact in zip(torch.autograd.grad(made, inputs[:2]), gradients, strict=True):
        assert torch.equal(found, exact)
    weights = torch.where(mask, 0.5, math.nan)
    weighted = flce.linear_divergence(*inputs, beta=0.3, mask=mask, token_weight=weights, reduction="mean")
    assert weighted.item() == pytest.approx(expected.item() / 2)
    none = flce.linear_divergence(*inputs, beta=0.3, mask=torch.zeros_like(mask), reduction="mean")
    assert none == 0 and all((each == 0).all() for each in torch.autograd.grad(none, inputs[:2]))


def test_a_temperature_out_of_range_is_reported(device: str) -> None:
    inputs = heads(device, torch.bfloat16)
    temperature = torch.ones(N, device=device)
    temperature[5] = 0
    assert flce.linear_divergence(*inputs, beta=0.0, temperature=temperature)[5] == 0
    mean = flce.linear_divergence(*inputs, beta=0.0, temperature=temperature, reduction="mean")
    assert mean == flce.linear_divergence(*inputs, beta=0.0, mask=temperature != 0, reduction="mean")
    with pytest.raises(flce.LabelError, match=r"^temperature\[5\] is not between") as caught:
        flce.check_labels()
    assert caught.value.row == 5


def test_a_draft_model_of_fewer_classes(device: str) -> None:
    dtype = torch.bfloat16
    hidden, weight, teacher_hidden, teacher_weight = heads(device, dtype)
    bias = torch.randn(V, device=device, dtype=dtype)
    ids = torch.randperm(V, device=device)[:300]
    made = flce.linear_divergence(
        hidden, weight[:300], teacher_hidden, teacher_weight, beta=0.0, teacher_bias=bias, teacher_ids_map=ids.int()
    )
    close(made, right(hidden, weight[:300], teacher_hidden, teacher_weight[ids], beta=0.0, teacher_bias=bias[ids])[0], 1e-5)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3, 5)])
def test_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    hidden, weight, teacher_hidden, teacher_weight = heads(device, torch.bfloat16, depth=61)
    count = math.prod(shape)
    student, teacher = (each.detach()[:count].reshape(*shape, each.shape[-1]) for each in (hidden, teacher_hidden))
    student.requires_grad_()
    made = flce.linear_divergence(student, weight, teacher, teacher_weight, beta=1.0)
    assert made.shape == shape
    (gradient,) = torch.autograd.grad(made.sum(), student)
    assert gradient.shape == student.shape
    if count:
        close(made.flatten(), right(hidden[:count], weight, teacher_hidden[:count], teacher_weight, beta=1.0)[0], 1e-5)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_of_another_default_dtype(default: torch.dtype, device: str) -> None:
    inputs = [each.detach() for each in heads(device, torch.float32)]
    expected = flce.linear_divergence(*inputs, beta=0.4, temperature=2.0)
    torch.set_default_dtype(default)
    try:
        made = flce.linear_divergence(*inputs, beta=0.4, temperature=2.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(made, expected)


def test_a_hidden_size_of_one(device: str) -> None:
    """[V, 1] lies in memory both ways."""
    hidden, weight, teacher_hidden, teacher_weight = (each.detach() for each in heads(device, torch.float32, hidden_major=True))
    narrow, column = teacher_hidden[:, :1].contiguous(), teacher_weight[:, :1].t().contiguous().t()
    for given in ((hidden, weight, narrow, column), (narrow, column, hidden, weight)):
        close(flce.linear_divergence(*given, beta=0.4), right(*given, beta=0.4)[0], 1e-5)


def test_the_same_bits_twice_and_with_a_limit(device: str) -> None:
    inputs = heads(device, torch.bfloat16)

    def step(**memory: Any) -> tuple[Tensor, ...]:
        made = flce.linear_divergence(*inputs, beta=0.3, **memory)
        return made, *torch.autograd.grad(made.sum(), inputs[:2])

    first = step()
    assert all(map(torch.equal, first, step()))
    for found, expected in zip(step(workspace_limit_bytes=96 << 20), first, strict=True):
        close(found, expected.double(), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("part", [1.0, 0.4])
@pytest.mark.parametrize("beta", BETAS)
def test_retained_logits(beta: float, part: float, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that forward leaves to backward, all or some: the same values, gradients within what fp16's rounding of logits adds; backward
    as often as one likes."""
    monkeypatch.setattr(_divergence, "_LEAST_WORK", 1)
    given = given_of(name, "cuda", dtype)
    inputs = heads("cuda", dtype)
    limit = (320 << 20) + int(part * 4.1 * N * 1024)
    retained: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        retained.append(saved.numel() if saved.dtype is torch.uint8 else 0)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        made = flce.linear_divergence(*inputs, beta=beta, workspace_limit_bytes=limit, **given)
    assert max(retained) >= 0.3 * 4 * N * V
    expected = right(*inputs, beta=beta, **given)[0]
    close(made, expected, 1e-3 if 0 < beta < 1 else 2 * OUTPUT_BOUND[dtype])
    upstream = torch.randn(N, device="cuda")
    gradients = torch.autograd.grad((made * upstream).sum(), inputs[:2], retain_graph=True)
    again = torch.autograd.grad((made * upstream).sum(), inputs[:2])
    for found, same, exact in zip(gradients, again, torch.autograd.grad((expected * upstream.double()).sum(), inputs[:2]), strict=True):
        assert torch.equal(found, same)
        close(found, exact.double(), 2 * GRADIENT_BOUND[dtype] + 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "all_but_student_bias", "everything"])
@pytest.mark.parametrize(
    ("tokens", "classes", "hidden_major"),
    [(397, 3001, False), (130, 200, False), (1300, 20001, False), (4500, 1608, True), (150, 150001, False)],
)
@pytest.mark.parametrize("beta", BETAS)
def test_of_many_tokens(
    beta: float, tokens: int, classes: int, hidden_major: bool, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens enough for kernels that have both heads' products: with nothing retained, some logits and all of them."""
    monkeypatch.setattr(_divergence, "_LEAST_WORK", 1)
    given = given_of(name, "cuda", dtype, classes, tokens)
    inputs = heads("cuda", dtype, classes=classes, tokens=tokens, hidden_major=hidden_major)
    expected = right(*inputs, beta=beta, **given)
    upstream = torch.randn(tokens, device="cuda")
    exact = torch.autograd.grad((expected[0] * upstream.double()).sum(), inputs[:2])
    for part in (0, 0.5, 1.1):
        limit = (320 << 20) + int(part * 4.2 * tokens * classes) if part > 0 else None
        memory: dict[str, Any] = {"workspace_limit_bytes": limit, "retain_in_grad_weight": False}  # lent memory serves one backward
        made = flce.linear_divergence(*inputs, beta=beta, return_student_entropy=True, return_teacher_entropy=True, **memory, **given)
        mixes = part > 0 and 0 < beta < 1  # from rounded logits
        for found, right_one, which in zip(made, expected, ("divergence", "student_entropy", "teacher_entropy"), strict=True):
            close(found, right_one, 1e-3 if mixes and which == "divergence" else 2 * OUTPUT_BOUND[dtype], f"{which}, {part}")
        gradients = torch.autograd.grad((made.divergence * upstream).sum(), inputs[:2], retain_graph=True)
        again = torch.autograd.grad((made.divergence * upstream).sum(), inputs[:2])
        for which, found, same, each in zip(("hidden", "weight"), gradients, again, exact, strict=True):
            bound = GRADIENT_BOUND[dtype] if part == 0 else 2 * GRADIENT_BOUND[dtype] + 1e-3
            # A weight's gradients of 150,001 classes are subnormal numbers of fp16, which are 2^-24 apart.
            apart = 2**-24 * math.sqrt(each.numel()) / float(each.double().norm()) if dtype is torch.float16 else 0.0
            close(found, each.double(), bound + apart, f"gradient of {which}, {part}")
            assert torch.equal(found, same), f"gradient of {which} again, {part}: {(found != same).sum()} of {found.numel()} differ"


MANY = 60001  # classes whose gradient has room for sums of both heads


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Memory that forwards were lent, all of which is NaN at first, as gradients' memory is; layers of any size lend."""
    seen: list[Tensor] = []
    empty_like, keep = torch.empty_like, _retain.Retained.keep

    def watch(self: Any, memory: Tensor, *, lent: bool) -> None:
        seen.append(memory)
        keep(self, memory, lent=lent)

    def poisoned(*given: Any, **named: Any) -> Tensor:
        made = empty_like(*given, **named)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty_like", poisoned)
    monkeypatch.setattr(_retain.Retained, "keep", watch)
    monkeypatch.setattr(_divergence, "_LEAST_WORK", 1)
    forget_losses()
    yield seen
    forget_losses()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("beta", BETAS)
def test_logits_in_the_gradients_memory(beta: float, name: str, dtype: torch.dtype, lent: list[Tensor]) -> None:
    """A forward that is lent the weight's gradient, and one that is not: values, and gradients, within the bounds of retained logits; the
    same bits again; a second backward has nothing retained."""
    given = given_of(name, "cuda", dtype, MANY)
    inputs = heads("cuda", dtype, classes=MANY)
    expected = right(*inputs, beta=beta, **given)[0]
    upstream = torch.randn(N, device="cuda")
    exact = torch.autograd.grad((expected * upstream.double()).sum(), inputs[:2])
    found = []
    for choice in (True, True, False):
        lent.clear()
        made = flce.linear_divergence(*inputs, beta=beta, retain_in_grad_weight=choice, **given)
        assert len(lent) == choice
        gradients = torch.autograd.grad((made * upstream).sum(), inputs[:2], retain_graph=True)
        assert not choice or gradients[1].data_ptr() == lent[0].data_ptr()
        again = torch.autograd.grad((made * upstream).sum(), inputs[:2])
        for each, other, gradient in zip(gradients, again, exact, strict=True):
            close(each, gradient.double(), 2 * GRADIENT_BOUND[dtype] + 1e-3)
            close(other, gradient.double(), 2 * GRADIENT_BOUND[dtype] + 1e-3)
        close(made, expected, 1e-3 if 0 < beta < 1 else 2 * OUTPUT_BOUND[dtype])
        found.append((made.detach(), *gradients))
    assert all(map(torch.equal, *found[:2]))


@pytest.mark.gpu
def test_who_is_lent_the_gradients_memory(lent: list[Tensor]) -> None:
    inputs = heads("cuda", torch.bfloat16, classes=MANY)

    def loss(*given: Tensor, **options: Any) -> Tensor:
        lent.clear()
        return flce.linear_divergence(*(given or inputs), beta=0.3, reduction="sum", **options)

    first = loss()
    assert len(lent) == 1
    second = loss()
    assert not lent, "another waits for its backward"
    gradients = [torch.autograd.grad(each, inputs[:2]) for each in (second, first)]
    for each, other in zip(*gradients, strict=True):
        close(each, other.double(), 1e-2)
    del first, second
    forget_losses()
    only_hidden = torch.autograd.grad(loss(), inputs[0])[0]
    assert len(lent) == 1
    close(only_hidden, gradients[0][0].double(), 1e-2)
    lent.clear()
    forget_losses()
    loss(inputs[0], inputs[1].detach(), *inputs[2:])
    assert not lent, "the weight is frozen"
    with torch.no_grad():
        loss()
    assert not lent
    loss(*heads("cuda", torch.bfloat16, classes=MANY - 1, hidden_major=True), retain_in_grad_weight=True)
    assert not lent, "the gradient is not vocab_major"
    loss(*heads("cuda", torch.float32, classes=MANY), retain_in_grad_weight=True)
    assert not lent


def test_where_nothing_is_lent(device: str) -> None:
    """A gradient too small to hold both heads' sums, or a CPU's: any choice has the same bits."""
    inputs = heads(device, torch.bfloat16)
    made = [flce.linear_divergence(*inputs, beta=0.3, retain_in_grad_weight=choice) for choice in (None, True, False)]
    gradients = [torch.autograd.grad(each.sum(), inputs[:2]) for each in made]
    for values, each in zip(made[1:], gradients[1:], strict=True):
        assert torch.equal(values, made[0]) and all(map(torch.equal, each, gradients[0]))


def test_under_compile_and_checkpointing(device: str) -> None:
    inputs = heads(device, torch.bfloat16)

    def loss(hidden: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
        return flce.linear_divergence(torch.tanh(hidden), weight, *teacher, beta=0.3, temperature=2.0, reduction="mean") * 2

    expected = loss(*inputs)
    gradients = torch.autograd.grad(expected, inputs[:2])
    ways = {
        "compile": lambda: torch.compile(loss, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")(*inputs),
        "checkpoint": lambda: checkpoint(loss, *inputs, use_reentrant=False),
    }
    for way, made in ((way, call()) for way, call in ways.items()):
        assert made.item() == pytest.approx(expected.item(), rel=1e-3), way
        for found, exact in zip(torch.autograd.grad(made, inputs[:2]), gradients, strict=True):
            close(found, exact.double(), 1e-2, way)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    inputs = heads("cuda", torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        made = flce.linear_divergence(*inputs, beta=0.3)
        return made.detach(), *torch.autograd.grad(made.sum(), inputs[:2])

    expected = step()  # detached: a node of autograd that lives on would bring its own stream into the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, expected))


def test_the_student_alone_has_gradients() -> None:
    hidden, weight, teacher_hidden, teacher_weight = heads("cpu", torch.float32)
    trained = torch.nn.Parameter(teacher_weight)
    assert not flce.linear_divergence(hidden.detach(), weight.detach(), teacher_hidden, trained, beta=0.5).requires_grad
    flce.linear_divergence(hidden, weight, teacher_hidden, trained, beta=0.5, reduction="sum").backward()
    assert trained.grad is None and hidden.grad is not None


def test_of_dynamic_shapes() -> None:
    inputs = heads("cpu", torch.float32)
    compiled = torch.compile(lambda *each: flce.linear_divergence(*each, beta=0.3), backend="aot_eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(*inputs), flce.linear_divergence(*inputs, beta=0.3))
