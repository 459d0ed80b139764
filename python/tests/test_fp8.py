"""fp8=flce.Fp8(): products of numbers in 8 bits against their definition, in every place that takes it, and refused elsewhere."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_support import Truth, error, truth_of
from retain_support import LENT, NONE, Watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce import errors

FORMS = [flce.Fp8(logits, dlogits) for logits in ("int8", "e4m3") for dlogits in ("e5m2", "e4m3")]
CLASSES, HIDDEN, TOKENS = 501, 64, 90
# Gradients in a dtype are rounded once, and codes near a tie may be either one.
BOUND = {torch.float32: 5e-4, torch.bfloat16: 4e-3, torch.float16: 1e-3}
# A GPU's sums of logits in e4m3: additions are cut off at 2^-13, and codes follow (docs/numerics.md).
CUT_OFF_LOSS, CUT_OFF_GRADIENT = 2**-13 * (8 + 3 * math.sqrt(HIDDEN)), 2e-2


@pytest.fixture(autouse=True)
def has_fp8(device: str) -> None:
    if device == "cpu":
        return
    own = torch.cuda.get_device_capability()
    if own not in {(8, 9), (9, 0), (12, 0), (12, 1)} and not (own >= (8, 9) and os.environ.get("FLCE_PATH") == "cuda_fp8_sm89"):
        pytest.skip("an FP8 head needs a GPU of sm_89, sm_90, sm_120 or sm_121, or a CPU")


def tensors(device: str, dtype: torch.dtype = torch.bfloat16, confident: bool = True) -> tuple[Tensor, nn.Parameter, Tensor]:
    """hidden, weight and target; half of the tokens are more or less sure of their label."""
    torch.manual_seed(5)
    weight = torch.randn(CLASSES, HIDDEN) / 4
    hidden = torch.randn(TOKENS, HIDDEN)
    target = torch.randint(0, CLASSES, (TOKENS,))
    if confident:
        hidden[::2] += weight[target[::2]] * torch.rand(TOKENS // 2, 1) * 4
    target[::11] = -100
    return hidden.to(device, dtype).requires_grad_(), nn.Parameter(weight.to(device, dtype)), target.to(device)


def check(loss: Tensor, hidden: Tensor, weight: Tensor, expected: Truth, bias: Tensor | None = None, cut_off: bool = False) -> None:
    assert error(loss, expected.loss) < (CUT_OFF_LOSS if cut_off else 1e-5)
    loss.backward()
    bound = BOUND[hidden.dtype] + (CUT_OFF_GRADIENT if cut_off else 0)
    assert error(hidden.grad, expected.grad_hidden) < bound  # type: ignore[arg-type]
    assert error(weight.grad, expected.grad_weight) < bound  # type: ignore[arg-type]
    if bias is not None:
        assert error(bias.grad, expected.grad_bias) < bound  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", FORMS)
def test_a_loss_is_that_of_the_definition(fp8: flce.Fp8, dtype: torch.dtype, device: str) -> None:
    if device != "cpu" and dtype != torch.bfloat16:
        pytest.skip("a GPU's are of bf16")
    hidden, weight, target = tensors(device, dtype)
    expected = truth_of(hidden, weight, target, fp8)
    cut_off = device != "cpu" and fp8.logits == "e4m3"
    check(flce.linear_cross_entropy(hidden, weight, target, fp8=fp8), hidden, weight, expected, cut_off=cut_off)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"logit_scale": 0.5, "temperature": 0.7},
        {"z_loss": 1e-2},
        {"class_weight": True},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.2, "class_weight": True, "bias": True, "temperature": 1.3, "logit_scale": -0.5},
        {"bias": True, "softcap": 5.0, "temperature": 1.3},
    ],
)
def test_options_mean_what_they_do_elsewhere(options: dict[str, Any], device: str) -> None:
    hidden, weight, target = tensors(device)
    options = dict(options)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(CLASSES, device=device) + 0.5
    if options.pop("bias", False):
        options["bias"] = torch.randn(CLASSES, device=device, dtype=torch.bfloat16).requires_grad_()
    loss = flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8(), **options)
    check(loss, hidden, weight, truth_of(hidden, weight, target, flce.Fp8(), **options), options.get("bias"))


SCALES = (2.0 / 127, 0.7 / 127)  # hidden states have a deviation of 1 and more, the weight's numbers of a quarter


@pytest.mark.parametrize("scales", [SCALES, (0.01, 0.001), (1.0, 0.05)])
@pytest.mark.parametrize("fp8", FORMS)
def test_scales_that_are_given(fp8: flce.Fp8, scales: tuple[float, float], device: str) -> None:
    """Codes end at the format's largest."""
    hidden, weight, target = tensors(device)
    fp8 = replace(fp8, scales=scales)
    expected = truth_of(hidden, weight, target, fp8)
    cut_off = device != "cpu" and fp8.logits == "e4m3"
    check(flce.linear_cross_entropy(hidden, weight, target, fp8=fp8), hidden, weight, expected, cut_off=cut_off)
    assert error(expected.loss, truth_of(hidden, weight, target, flce.Fp8(fp8.logits)).loss) > 1e-4


def test_a_row_without_numbers_has_no_scale_that_is_given(device: str) -> None:
    hidden, weight, target = tensors(device)
    for none in (math.nan, math.inf):
        with torch.no_grad():
            hidden[1, 3] = none
        losses = flce.linear_cross_entropy(hidden, weight, target, reduction="none", fp8=flce.Fp8(scales=SCALES))
        assert losses[1].isnan() and not losses[2:].isnan().any()


def test_other_scales_compile_nothing(device: str) -> None:
    hidden, weight, target = tensors(device)
    flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8(scales=SCALES)).backward()
    before = flce.cache_statistics()["compiled"]
    for scale in (0.5, 0.25):
        flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8(scales=(scale, 0.5))).backward()
    assert flce.cache_statistics()["compiled"] == before


def test_small_terms_beside_a_large_one_are_in_sums(device: str) -> None:
    """4095 tokens have a probability of 5e-5 for a class that a first token is sure of, and 8190 classes one of 2e-5 beside a likely class.
    Tensor cores cut off what lies 13 bits below a sum: of a single one a sixth would be missing."""
    hidden = torch.zeros(4096, HIDDEN)
    weight = torch.zeros(512, HIDDEN)
    hidden[:, 0] = hidden[0, 1] = hidden[1:, 2] = 1
    weight[5, 1], weight[1, 2] = 12, 10  # logits of class 5 for the first token, and of class 1, the target, for the others
    large_token = (hidden, weight, torch.ones(4096, dtype=torch.int64), 5)
    hidden, weight = torch.zeros(128, HIDDEN), torch.zeros(8192, HIDDEN)
    hidden[:, 1] = weight[:, 0] = 1
    weight[0, 1], weight[7] = 10.5, 0
    large_class = (hidden, weight, torch.full((128,), 7), 0)
    for at, (h, w, target, row) in enumerate((large_token, large_class)):
        operands = h.to(device, torch.bfloat16).requires_grad_(), nn.Parameter(w.to(device, torch.bfloat16))
        expected = truth_of(*operands, target, flce.Fp8())
        flce.linear_cross_entropy(*operands, target.to(device), fp8=flce.Fp8()).backward()
        got, whole = ((operands[1].grad, expected.grad_weight), (operands[0].grad, expected.grad_hidden))[at]
        assert got is not None
        assert abs(float(got[row, 0]) / float(whole[row, 0]) - 1) < 0.03, at


@pytest.mark.gpu
def test_kernels_without_wgmma_have_the_numbers_of_the_definition() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("mma.sync has no FP8 before sm_89")
    # FLCE_PATH is read when flce is loaded.
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "that_of_the_definition or options_mean", __file__]
    done = subprocess.run(tests, env={**os.environ, "FLCE_PATH": "cuda_fp8_sm89"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout, done.stdout[-4000:]


def test_it_is_near_the_exact_layer(device: str) -> None:
    """Within the errors that docs/numerics.md has for random layers."""
    hidden, weight, target = tensors(device, confident=False)
    flce.linear_cross_entropy(hidden, weight, target).backward()
    exact = [hidden.grad, weight.grad]
    for fp8 in FORMS:
        hidden.grad = weight.grad = None
        flce.linear_cross_entropy(hidden, weight, target, fp8=fp8).backward()
        for got, expected in zip((hidden.grad, weight.grad), exact, strict=True):
            assert 1e-4 < error(got, expected) < 6e-2, fp8  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "temperature": 1.3, "bias": True, "z_loss": 1e-2}])
@pytest.mark.parametrize("fp8", FORMS)
def test_entropy(fp8: flce.Fp8, options: dict[str, Any], device: str) -> None:
    """Entropies, of which two thirds have a gradient, too."""
    hidden, weight, target = tensors(device)
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(CLASSES, device=device, dtype=torch.bfloat16).requires_grad_()
    cut_off = device != "cpu" and fp8.logits == "e4m3"
    of_entropy = torch.randn(TOKENS, device=device) / TOKENS
    of_entropy[::3] = 0
    expected = truth_of(hidden, weight, target, fp8, of_entropy=of_entropy, **options)
    loss, entropy = flce.linear_cross_entropy(hidden, weight, target, return_entropy=True, fp8=fp8, **options)
    assert error(entropy, expected.entropy) < (CUT_OFF_LOSS if cut_off else 1e-5)
    loss.backward(retain_graph=True)
    apart = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    torch.autograd.backward((loss, entropy), (torch.ones_like(loss), of_entropy))
    for each, right, before in zip((hidden.grad, weight.grad), (expected.grad_hidden, expected.grad_weight), apart, strict=True):
        assert each is not None and error(each, right) < BOUND[torch.bfloat16] + (CUT_OFF_GRADIENT if cut_off else 0)
        assert before is not None and not torch.equal(each, before)


def test_logprobs_and_outputs(device: str) -> None:
    hidden, weight, target = tensors(device)
    expected = truth_of(hidden, weight, target, flce.Fp8())
    valid = target.cpu() >= 0
    got = flce.linear_logprobs(hidden, weight, target, fp8=flce.Fp8())
    assert error(got.cpu()[valid], expected.logprobs[valid]) < 1e-5
    (-got.sum() / valid.sum()).backward()
    assert error(hidden.grad, expected.grad_hidden) < BOUND[torch.bfloat16]  # type: ignore[arg-type]
    loss, lse, logprobs = flce.linear_cross_entropy(hidden, weight, target, return_lse=True, return_logprobs=True, fp8=flce.Fp8())
    assert error(loss, expected.loss) < 1e-5
    assert error(lse.cpu()[valid], expected.lse[valid]) < 1e-5
    assert torch.equal(logprobs, got)


def results(call: Callable[[Tensor, nn.Parameter, Tensor], Tensor], device: str) -> list[Tensor]:
    """The loss and both gradients of a call."""
    hidden, weight, target = tensors(device)
    loss = call(hidden, weight, target)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def plain(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    return flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8())


def by_loss(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    layer = nn.Linear(HIDDEN, CLASSES, bias=False)
    layer.weight = weight
    return flce.LinearCrossEntropyLoss(layer, impl="flce", shift=0, fp8=flce.Fp8())(hidden[None], target[None])


def by_head(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    head = flce.FusedLMHead(HIDDEN, CLASSES, bias=False, fp8=flce.Fp8(), device="meta")
    head.weight = weight
    loss: Tensor = copy.deepcopy(head.options)["fp8"] == flce.Fp8() and head(hidden, labels=target)
    return loss


def checkpointed(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    loss: Tensor = checkpoint(plain, hidden, weight, target, use_reentrant=False)  # type: ignore[assignment]
    return loss


def compiled(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    torch._dynamo.reset()
    loss: Tensor = torch.compile(plain, fullgraph=True, backend="aot_eager")(hidden, weight, target)
    return loss


def limited(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    return flce.linear_cross_entropy(hidden, weight, target, workspace_limit_bytes=64 << 20, fp8=flce.Fp8())


def of_a_linear(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    layer = nn.Linear(HIDDEN, CLASSES, bias=False, device="meta")
    layer.weight = weight
    return flce.linear_cross_entropy(hidden, layer, target, fp8=flce.Fp8())


def scaled(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    return flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8(scales=SCALES))


def test_scales_under_compile(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for got, each in zip(results(compiled, device), results(scaled, device), strict=True):
        assert torch.equal(got, each)


def test_scales_of_a_loss_and_a_head(device: str) -> None:
    hidden, weight, target = tensors(device)
    expected, fp8 = scaled(hidden, weight, target), flce.Fp8(scales=SCALES)
    head = flce.FusedLMHead(HIDDEN, CLASSES, bias=False, fp8=fp8, device="meta")
    head.weight = weight
    assert torch.equal(head(hidden, labels=target), expected)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, impl="flce", shift=0, fp8=fp8)(hidden[None], target[None]), expected)


@pytest.mark.parametrize("way", [plain, by_loss, by_head, checkpointed, compiled, limited, of_a_linear])
def test_every_way_gives_the_same_bits(way: Callable[[Tensor, nn.Parameter, Tensor], Tensor], device: str) -> None:
    if device != "cpu" and way is limited:
        pytest.skip("a GPU's exponentials have other references where they are retained")
    expected = results(plain, device)
    for got, each in zip(results(way, device), expected, strict=True):
        assert torch.equal(got.to(each.dtype).view(each.shape), each)


@pytest.mark.parametrize("way", [by_loss, compiled])
def test_without_fp8_it_is_another_layer(way: Callable[[Tensor, nn.Parameter, Tensor], Tensor], device: str) -> None:
    hidden, weight, target = tensors(device)
    assert not torch.equal(flce.linear_cross_entropy(hidden, weight, target), way(hidden, weight, target))


def test_grad_weight_out_is_added_to(device: str) -> None:
    hidden, weight, target = tensors(device)
    buffer = torch.ones(CLASSES, HIDDEN, device=device)
    flce.linear_cross_entropy(hidden, weight, target, grad_weight_out=buffer, fp8=flce.Fp8()).backward()
    assert weight.grad is None
    assert error(buffer - 1, truth_of(hidden, weight, target, flce.Fp8()).grad_weight) < BOUND[torch.bfloat16]


LAYER_OPTIONS = [
    {},
    {"bias": True, "softcap": 5.0, "temperature": 1.3, "fp8": flce.Fp8("e4m3", "e4m3")},
    {"bias": True, "label_smoothing": 0.2, "class_weight": True, "fp8": flce.Fp8(scales=SCALES)},
    {"accumulate": True, "entropy": True, "bias": True},
]


def of_layout(columns: bool, options: dict[str, Any], device: str) -> list[Tensor]:
    """The loss and gradients of a weight [V, D], or of the view of a [D, V]; V is a multiple of 8, as a GPU asks for."""
    hidden, whole, target = tensors(device)
    hidden, classes = hidden.detach().requires_grad_(), CLASSES - 5
    target = torch.where(target < classes, target, 3)
    weight = whole.detach()[:classes].clone()
    weight = (weight.t().contiguous().t() if columns else weight).requires_grad_()
    options = {"fp8": flce.Fp8(), **options}
    torch.manual_seed(7)
    of_entropy = torch.randn(TOKENS, device=device) / TOKENS
    bias = torch.randn(classes, device=device, dtype=torch.bfloat16).requires_grad_() if options.pop("bias", False) else None
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(classes, device=device) + 0.5
    buffer = torch.zeros_like(weight, memory_format=torch.preserve_format) if options.pop("accumulate", False) else None
    entropy = options.pop("entropy", False)
    more = {"bias": bias, "return_entropy": entropy, "grad_weight_out": buffer, **options}
    results = flce.linear_cross_entropy(hidden, weight, target, **more)
    loss = results[0] if entropy else results
    (loss + (results[1] @ of_entropy if entropy else 0)).backward()
    grad_weight = weight.grad if buffer is None else buffer
    assert hidden.grad is not None and grad_weight is not None
    assert grad_weight.stride() == weight.stride()
    return [loss.detach(), hidden.grad, grad_weight, *([] if bias is None or bias.grad is None else [bias.grad])]


@pytest.mark.parametrize("options", LAYER_OPTIONS)
def test_a_weight_that_lies_hidden_major(options: dict[str, Any], device: str) -> None:
    """A class's codes are of its own numbers, wherever they lie."""
    rows, columns = of_layout(False, options, device), of_layout(True, options, device)
    for got, expected in zip(columns, rows, strict=True):
        assert torch.equal(got, expected) if device == "cpu" else error(got, expected) < 2**-8


def test_a_hidden_major_weight_of_any_size(device: str) -> None:
    hidden, weight, target = tensors(device)
    turned = weight.detach().t().contiguous().t().requires_grad_()
    if device != "cpu":
        with pytest.raises(errors.PlanError, match=f"layout=hidden_major with rows of {CLASSES}.*leave fp8 out"):
            flce.linear_cross_entropy(hidden, turned, target, fp8=flce.Fp8())
        return
    expected = results(plain, device)
    loss = flce.linear_cross_entropy(hidden, turned, target, fp8=flce.Fp8())
    loss.backward()
    assert torch.equal(loss.detach(), expected[0])
    assert turned.grad is not None and torch.equal(turned.grad, expected[2])


def test_several_hidden_states(device: str) -> None:
    hidden, weight, target = tensors(device)
    losses = flce.linear_cross_entropy([hidden, hidden * 0.5], weight, target, shift=[0, 0], fp8=flce.Fp8())
    expected = truth_of(hidden, weight, target, flce.Fp8())
    assert len(losses) == 2
    assert error(losses[0], expected.loss) < 1e-5


def test_no_valid_token(device: str) -> None:
    hidden, weight, target = tensors(device)
    loss = flce.linear_cross_entropy(hidden, weight, torch.full_like(target, -100), fp8=flce.Fp8())
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not loss.item() and not hidden.grad.any() and not weight.grad.any()


def test_a_kernel_by_name(device: str) -> None:
    kernel = flce.get_kernel(HIDDEN, CLASSES, fp8=flce.Fp8("e4m3", "e4m3"), device=device, num_tokens=TOKENS)
    assert "fp8=e4m3,fp8_dlogits=e4m3" in kernel.explain()
    layer = {"hidden_size": HIDDEN, "vocab_size": CLASSES, "fp8": flce.Fp8("e4m3", "e4m3"), "device": device}
    assert flce.warmup([layer], num_tokens=[TOKENS]) == [kernel]
    given = flce.get_kernel(HIDDEN, CLASSES, fp8=flce.Fp8(scales=(0.25, 1e-3)), device=device, num_tokens=TOKENS)
    assert "fp8=int8,fp8_hidden_scale=0.25,fp8_weight_scale=0.001" in given.explain()
    assert "fp8" not in flce.get_kernel(HIDDEN, CLASSES, device=device, num_tokens=TOKENS).explain()


def test_fp8_is_a_value() -> None:
    assert flce.Fp8() == flce.Fp8("int8", "e5m2", "dynamic") != flce.Fp8("e4m3")
    assert pickle.loads(pickle.dumps(flce.Fp8("e4m3"))) == copy.deepcopy(flce.Fp8("e4m3"))
    assert repr(flce.Fp8()) == "Fp8(logits='int8', dlogits='e5m2', scales='dynamic')"
    for wrong, name in (({"logits": "fp8"}, "logits"), ({"dlogits": "int8"}, "dlogits"), ({"scales": "static"}, "scales")):
        with pytest.raises(errors.ArgumentError, match=f"{name} is '{wrong[name]}'; allowed are"):
            flce.Fp8(**wrong)  # type: ignore[arg-type]
    assert hash(flce.Fp8(scales=[1, 0.5])) == hash(flce.Fp8(scales=(1.0, 0.5)))  # type: ignore[arg-type]
    assert flce.Fp8(scales=(1, 0.5)).scales == (1.0, 0.5) and flce.Fp8(scales=(1, 0.5)) != flce.Fp8()
    not_scales: list[Any] = [
        (1.0,),
        (1.0, 0.0),
        (1.0, math.nan),
        (1.0, math.inf),
        (-1.0, 1.0),
        (True, 1.0),
        (torch.ones(()), 1.0),
        torch.ones(2),
        torch.ones(2).numpy(),
        1.0,
        None,
    ]
    for scales in not_scales:
        with pytest.raises(errors.ArgumentError, match=r"scales is .*'dynamic' and a pair"):
            flce.Fp8(scales=scales)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a word": ({"fp8": "int8"}, errors.ArgumentError, r"fp8 is 'int8'; it must be a flce.Fp8"),
    "label_smoothing": ({"label_smoothing": 0.1, "softcap": 30.0}, errors.SpecError, "label_smoothing is 0.1 with fp8 and a softcap"),
    "batch_invariant": ({"batch_invariant": True}, errors.SpecError, "batch_invariant is True with fp8.*leave batch_invariant or fp8 out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, device: str) -> None:
    hidden, weight, target = tensors(device)
    options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        flce.linear_cross_entropy(hidden, weight, target, **{"fp8": flce.Fp8(), **options})


def test_losses_and_heads_refuse_when_they_are_made() -> None:
    for options, kind, message in REFUSED.values():
        with pytest.raises(kind, match=message):
            flce.FusedLMHead(HIDDEN, CLASSES, **{"fp8": flce.Fp8(), **options})
        with pytest.raises(kind, match=message):
            flce.LinearCrossEntropyLoss(nn.Linear(HIDDEN, CLASSES), shift=0, **{"fp8": flce.Fp8(), **options})


def test_weights_that_are_refused(device: str) -> None:
    hidden, weight, target = tensors(device)
    with pytest.raises(errors.SpecError, match=r"weight_dtype = fp32.*leave fp8 out"):
        flce.linear_cross_entropy(hidden, weight.float(), target, fp8=flce.Fp8())


def test_functions_that_do_not_take_it(device: str) -> None:
    hidden, weight, target = tensors(device)
    ids, probs = target.clamp_min(0)[:, None], torch.ones(TOKENS, 1, device=device)
    calls: list[Callable[..., Any]] = [
        lambda **more: flce.linear_logprobs_at(hidden, weight, ids, **more),
        lambda **more: flce.linear_topk(hidden, weight, 3, **more),
        lambda **more: flce.linear_topk_distillation(hidden, weight, ids, probs, **more),
        lambda **more: flce.linear_divergence(hidden, weight, hidden, weight, **more),
        lambda **more: flce.info_nce(hidden, weight, target, **more),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="fp8"):
            call(fp8=flce.Fp8())


def test_losses_in_plain_torch_refuse_it(device: str) -> None:
    hidden, weight, target = tensors(device)
    layer = nn.Linear(HIDDEN, CLASSES, bias=False)
    layer.weight = weight
    with pytest.raises(errors.ArgumentError, match="fp8 needs impl 'flce'; this loss uses 'pytorch'"):
        flce.LinearCrossEntropyLoss(layer, impl="pytorch", shift=0, fp8=flce.Fp8())(hidden[None], target[None])
    with pytest.raises(errors.ArgumentError, match=r"it must be a flce.Fp8"):
        flce.LinearCrossEntropyLoss(layer, shift=0, fp8=True)
    with pytest.raises(errors.ArgumentError, match=r"it must be a flce.Fp8"):
        flce.FusedLMHead(HIDDEN, CLASSES, fp8="e4m3")


@pytest.mark.parametrize("fp8", [flce.Fp8(), flce.Fp8("e4m3", "e4m3")], ids=["int8", "e4m3"])
def test_a_row_of_enormous_logits_has_a_loss_and_no_gradient(fp8: flce.Fp8) -> None:
    hidden = torch.zeros(1, 8)
    hidden[0, 0] = 2.0**24
    weight = torch.zeros(3, 8)
    weight[1, 0] = weight[1, 1] = weight[0, 2] = 1.0
    hidden.requires_grad_()
    loss = flce.linear_cross_entropy(hidden, weight, torch.tensor([0]), fp8=fp8)
    loss.backward()
    assert abs(float(loss.detach()) - 2.0**24) <= 2.0 and hidden.grad is not None and hidden.grad.isnan().any()


def test_a_weight_in_another_dtype_is_named_with_what_to_do() -> None:
    hidden, weight = torch.randn(5, 64).bfloat16(), torch.randn(50, 64)
    with pytest.raises(flce.SpecError, match=r"as hidden is, with fp8.*keep this layer's parameter in bf16"):
        flce.linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.int64), fp8=flce.Fp8())


def test_the_weights_gradient_holds_exponentials(device: str, watched: Watched) -> None:
    """On a GPU; a second backward has nothing retained."""
    torch.manual_seed(6)
    hidden = torch.randn(TOKENS, HIDDEN).to(device, torch.bfloat16).requires_grad_()
    weight = nn.Parameter((torch.randn(2500, HIDDEN) / 4).to(device, torch.bfloat16))
    target = torch.randint(0, 2500, (TOKENS,), device=device)
    expected = truth_of(hidden, weight, target, flce.Fp8())
    loss = flce.linear_cross_entropy(hidden, weight, target, fp8=flce.Fp8(), retain_in_grad_weight=True)
    assert error(loss, expected.loss) < 1e-5
    for retained in (NONE if device == "cpu" else LENT, NONE):
        gradients = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert watched.take() == [retained]
        for found, each in zip(gradients, (expected.grad_hidden, expected.grad_weight), strict=True):
            assert error(found, each) < BOUND[torch.bfloat16]
