"""A weight of codes and scales: results are those of the dequantised weight, on a CPU to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core import _kernels, _retain
from flce.operators import _codes, _quantized

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FORMATS = ("rows", "column", "number", "blocks", "nvfp4", "nvfp4_alone")
CLASSES, HIDDEN, TOKENS = 301, 144, 50


def quantized(form: str, device: str, classes: int = CLASSES) -> tuple[dict[str, Any], Tensor]:
    """weight, weight_scale and weight_tensor_scale of a call, and the weight that they stand for, in fp32."""
    torch.manual_seed(7)
    if form.startswith("nvfp4"):
        codes = torch.randint(0, 256, (classes, HIDDEN // 2), dtype=torch.uint8)
        scale = (torch.rand(classes, HIDDEN // 16) * 2).to(E4M3)
        given: dict[str, Any] = {"weight": codes, "weight_scale": scale}
        whole = torch.tensor(1.0)
        if form == "nvfp4":
            whole = given["weight_tensor_scale"] = torch.tensor(0.0437)
        numbers = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).long()].view(classes, HIDDEN)
        dense = numbers * (scale.float() * whole).repeat_interleave(16, dim=1)
    else:
        weight = (torch.randn(classes, HIDDEN) * 40).to(E4M3)
        shape = {"rows": (classes,), "column": (classes, 1), "number": (1,), "blocks": (-(-classes // 128), -(-HIDDEN // 128))}[form]
        scale = (0.5 + torch.rand(shape)) / 400
        wide = scale.view(-1, 1) if form == "rows" else scale
        if form == "blocks":
            wide = scale.repeat_interleave(128, 0)[:classes].repeat_interleave(128, 1)[:, :HIDDEN]
        given, dense = {"weight": weight, "weight_scale": scale}, weight.float() * wide
    return {name: each.to(device) for name, each in given.items()}, dense.to(device)


def hidden_of(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    hidden = torch.randn(5, TOKENS // 5, HIDDEN).to(device, dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (5, TOKENS // 5), device=device)
    target[0, 3] = -100
    return hidden, target


def check(made: Any, expected: Any, hidden: Tensor, device: str) -> None:
    """Values and hidden's gradient, to the bit where both are made in one order."""
    made, expected = ((each,) if isinstance(each, Tensor) else each for each in (made, expected))
    assert len(made) == len(expected)
    exact: dict[str, float] = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    total_made, total = torch.zeros((), device=device), torch.zeros((), device=device)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, **exact)
        if other.requires_grad:
            assert one.requires_grad
            total_made, total = total_made + one.sum(), total + other.sum()
    (gradient,) = torch.autograd.grad(total_made, hidden)
    (reference,) = torch.autograd.grad(total, hidden)
    if device == "cpu":
        assert torch.equal(gradient, reference)
    else:
        assert (gradient.float() - reference.float()).norm() <= 4e-3 * reference.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_a_loss_is_that_of_the_dequantised_weight(form: str, dtype: torch.dtype, device: str) -> None:
    given, dense = quantized(form, device)
    hidden, target = hidden_of(dtype, device)
    made = flce.linear_cross_entropy(hidden, given.pop("weight"), target, **given)
    check(made, flce.linear_cross_entropy(hidden, dense.to(dtype), target), hidden, device)


OPTIONS: dict[str, dict[str, Any]] = {
    "numbers": {"softcap": 5.0, "logit_scale": 0.5, "label_smoothing": 0.1, "z_loss": 1e-2, "temperature": 1.5, "shift": 1},
    "outputs": {"return_lse": True, "return_logprobs": True, "return_entropy": True, "return_top1": True, "return_log_sum_sq_probs": True},
    "none": {"reduction": "none", "return_entropy": True},
    "divisor": {"num_valid_tokens": 31, "dft": True},
    "limit": {"workspace_limit_bytes": 8 << 20, "batch_invariant": True},
}


@pytest.mark.parametrize("form", ["blocks", "nvfp4"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_the_same(name: str, form: str, device: str) -> None:
    given, dense = quantized(form, device)
    hidden, target = hidden_of(torch.bfloat16, device)
    options = OPTIONS[name]
    made = flce.linear_cross_entropy(hidden, given.pop("weight"), target, **given, **options)
    check(made, flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target, **options), hidden, device)


@pytest.fixture
def retained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that calls of codes which may retain something leave to backward. Layers of any size are worth it."""
    found: list[int] = []
    bytes_of = _quantized._retained_bytes

    def recorded(*given: Any) -> int:
        found.append(bytes_of(*given))
        return found[-1]

    monkeypatch.setattr(_retain, "LEAST_WORK", 1)
    monkeypatch.setattr(_quantized, "_retained_bytes", recorded)
    return found


@pytest.mark.parametrize("form", ["blocks", "nvfp4"])
def test_a_limit_with_room_spares_backward_logits(form: str, retained: list[int], device: str) -> None:
    given, dense = quantized(form, device)
    weight = given.pop("weight")
    hidden, target = hidden_of(torch.bfloat16, device)
    limited: dict[str, Any] = {"workspace_limit_bytes": 1 << 30, "label_smoothing": 0.1, "return_lse": True}
    made = flce.linear_cross_entropy(hidden, weight, target, **given, **limited)
    check(made, flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target, **limited), hidden, device)
    with torch.no_grad():
        flce.linear_cross_entropy(hidden, weight, target, **given, **limited)
    flce.linear_cross_entropy(hidden, weight, target, **given)
    flce.linear_cross_entropy(hidden, weight, target, **given, workspace_limit_bytes=1 << 30, return_entropy=True)
    assert [size > 0 for size in retained] == [device == "cpu", False, False], "with a gradient, a limit and no entropy"


def test_tensors_of_classes_and_tokens(device: str) -> None:
    given, dense = quantized("rows", device)
    hidden, target = hidden_of(torch.bfloat16, device)
    bias = torch.randn(CLASSES, device=device, dtype=torch.bfloat16).requires_grad_()
    options = {
        "class_offset": torch.randn(CLASSES, device=device),
        "temperature": torch.rand(target.shape, device=device) + 0.5,
        "token_weight": torch.rand(target.shape, device=device),
        "reduction": "weighted_mean",
    }
    made = flce.linear_cross_entropy(hidden, given.pop("weight"), target, bias=bias, **given, **options)
    expected = flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target, bias=bias, **options)
    (gradient,) = torch.autograd.grad(made, bias, retain_graph=True)
    (reference,) = torch.autograd.grad(expected, bias, retain_graph=True)
    torch.testing.assert_close(gradient, reference)
    check(made, expected, hidden, device)


def test_logprobs(device: str) -> None:
    given, dense = quantized("nvfp4", device)
    hidden, target = hidden_of(torch.float16, device)
    made = flce.linear_logprobs(hidden, given.pop("weight"), target, return_entropy=True, **given)
    check(made, flce.linear_logprobs(hidden, dense.to(hidden.dtype), target, return_entropy=True), hidden, device)


@pytest.mark.parametrize("form", ["rows", "blocks", "nvfp4"])
@pytest.mark.parametrize("normalize", ["vocabulary", "support"])
def test_logprobs_of_several_classes(form: str, normalize: str) -> None:
    """On a CPU; a GPU's kernels read single rows of the weight."""
    given, dense = quantized(form, "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    bias = torch.randn(CLASSES, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(0, CLASSES, (*target.shape, 6))
    ids[0, 0, 1], ids[1, 1], ids[2, 0, 3] = -1, -1, ids[2, 0, 4]
    options: dict[str, Any] = {"normalize": normalize, "bias": bias, "softcap": 20.0, "temperature": 0.7}
    options |= {"return_lse": True, "return_entropy": True}
    made = flce.linear_logprobs_at(hidden, given.pop("weight"), ids, **given, **options)
    expected = flce.linear_logprobs_at(hidden, dense.to(hidden.dtype), ids, **options)
    weights = torch.randn(ids.shape)
    for (one, *_), (other, *_) in ((made, expected),):
        gradients = [torch.autograd.grad((each * weights).sum(), (hidden, bias), retain_graph=True) for each in (one, other)]
        assert all(torch.equal(*each) for each in zip(*gradients, strict=True))
    check(made, expected, hidden, "cpu")


def test_logprobs_of_lists_of_classes() -> None:
    given, dense = quantized("nvfp4", "cpu")
    hidden, _ = hidden_of(torch.float16, "cpu")
    rows = hidden.reshape(-1, HIDDEN)
    ids, offsets = torch.randint(0, CLASSES, (70,)), torch.linspace(0, 70, TOKENS + 1).long()
    made = flce.linear_logprobs_at(rows, given.pop("weight"), ids, offsets=offsets, **given)
    check(made, flce.linear_logprobs_at(rows, dense.to(rows.dtype), ids, offsets=offsets), hidden, "cpu")


@pytest.mark.parametrize("form", FORMATS)
def test_the_most_likely_classes(form: str) -> None:
    given, dense = quantized(form, "cpu")
    hidden, _ = hidden_of(torch.bfloat16, "cpu")
    options: dict[str, Any] = {"softcap": 20.0, "temperature": 0.7}
    made = flce.linear_topk(hidden, given.pop("weight"), 9, **given, **options)
    for one, other in zip(made, flce.linear_topk(hidden, dense.to(hidden.dtype), 9, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_named_and_most_likely_classes_on_a_gpu(device: str) -> None:
    given, _ = quantized("rows", device)
    hidden, target = hidden_of(torch.bfloat16, device)
    weight = given.pop("weight")
    for call in (
        lambda: flce.linear_logprobs_at(hidden, weight, target.clamp(min=0)[..., None], **given),
        lambda: flce.linear_topk(hidden, weight, 3, **given),
    ):
        with pytest.raises(flce.PlanError, match="that runs on CPUs"):
            call()


def test_several_hidden_states(device: str) -> None:
    given, dense = quantized("blocks", device)
    hidden, target = hidden_of(torch.bfloat16, device)
    weights = {"loss_weights": [1.0, 0.3], "shift": [1, 2]}
    made = flce.linear_cross_entropy([hidden, hidden * 2], given.pop("weight"), target, **given, **weights)[0]
    check(made, flce.linear_cross_entropy([hidden, hidden * 2], dense.to(hidden.dtype), target, **weights)[0], hidden, device)


def test_bytes_are_codes_too(device: str) -> None:
    given, dense = quantized("rows", device)
    hidden, target = hidden_of(torch.bfloat16, device)
    made = flce.linear_cross_entropy(hidden, given.pop("weight").view(torch.uint8), target, **given)
    check(made, flce.linear_cross_entropy(hidden, dense.to(hidden.dtype), target), hidden, device)


def test_under_autocast_and_without_a_gradient(device: str) -> None:
    given, dense = quantized("rows", device)
    weight = given.pop("weight")
    hidden, target = hidden_of(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        made = flce.linear_cross_entropy(hidden, weight, target, **given)
    expected = flce.linear_cross_entropy(hidden.bfloat16(), dense.bfloat16(), target)
    check(made, expected, hidden, device)
    with torch.no_grad():
        torch.testing.assert_close(flce.linear_cross_entropy(hidden.bfloat16(), weight, target, **given), expected.detach())


def test_a_label_out_of_range_is_reported() -> None:
    given, _ = quantized("rows", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    target[1, 1] = CLASSES
    flce.linear_cross_entropy(hidden, given.pop("weight"), target, **given)
    with pytest.raises(flce.LabelError, match=r"target\[11\] is neither"):
        flce.check_labels()


@pytest.mark.full
def test_a_compiled_call(device: str) -> None:
    given, _ = quantized("blocks", device)
    weight = given.pop("weight")
    hidden, target = hidden_of(torch.bfloat16, device)

    def loss(rows: Tensor) -> Tensor:
        return flce.linear_cross_entropy(rows * 2, weight, target, **given)

    made = torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden)
    check(made, loss(hidden), hidden, device)


_NVFP4 = {"weight": torch.ones(CLASSES, HIDDEN // 2, dtype=torch.uint8), "weight_scale": torch.ones(CLASSES, HIDDEN // 16).to(E4M3)}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "class_weight": ({"class_weight": torch.ones(CLASSES)}, flce.ArgumentError, "class_weight is given with weight_scale"),
    "grad_weight_out": ({"grad_weight_out": torch.ones(CLASSES, HIDDEN)}, flce.ArgumentError, "a quantised weight is frozen"),
    "tensor_scale": ({"weight_tensor_scale": 2.0}, flce.ArgumentError, "it is NVFP4's: multiply weight_scale by it"),
    "scale_shape": ({"weight_scale": torch.ones(7)}, flce.ShapeError, r"weight_scale has shape \[7\]; it must be \[301\]"),
    "scale_dtype": ({"weight_scale": torch.ones(CLASSES).to(E4M3)}, flce.DTypeError, "weight_scale has dtype torch.float8_e4m3fn"),
    "scale_trained": ({"weight_scale": torch.ones(CLASSES).requires_grad_()}, flce.ArgumentError, "weight_scale requires a gradient"),
    "numbers": ({"weight": torch.ones(CLASSES, HIDDEN)}, flce.DTypeError, "codes are torch.float8_e4m3fn or uint8"),
    "columns": ({"weight": torch.ones(HIDDEN, CLASSES).to(E4M3).t()}, flce.ArgumentError, "give weight.contiguous()"),
    "fp32": ({"hidden": torch.ones(5, 10, HIDDEN)}, flce.DTypeError, "it must be bfloat16 or float16"),
    "wide_nvfp4": ({"weight": torch.ones(CLASSES, HIDDEN // 2).to(E4M3)}, flce.DTypeError, "two in a byte"),
    "whole_tensor_scale": ({**_NVFP4, "weight_tensor_scale": torch.tensor(1j)}, flce.DTypeError, "it must be a floating one"),
    "flag_tensor_scale": ({**_NVFP4, "weight_tensor_scale": True}, flce.DTypeError, "it must be a number"),
    "swizzled": (
        {"weight": torch.ones(CLASSES, HIDDEN // 2, dtype=torch.uint8), "weight_scale": torch.ones(384 * 12).to(E4M3)},
        flce.ShapeError,
        "not swizzled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, error, message = REFUSED[name]
    given, _ = quantized("rows", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    with pytest.raises(error, match=message):
        flce.linear_cross_entropy(**({"hidden": hidden, "target": target} | given | change))


@pytest.mark.parametrize(
    ("form", "layer"),
    [("rows", {"weight_dtype": E4M3}), ("blocks", {"weight_dtype": "e4m3", "weight_block": 128}), ("nvfp4", {"weight_dtype": "nvfp4"})],
)
def test_a_warmed_up_kernel_is_the_calls(form: str, layer: dict[str, Any]) -> None:
    kernel = flce.get_kernel(HIDDEN, CLASSES, "bf16", device="cpu", num_tokens=TOKENS, **layer)
    given, _ = quantized(form, "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    before = set(_kernels.all_kernels())
    flce.linear_cross_entropy(hidden, given.pop("weight"), target, **given).backward()
    assert kernel in before and set(_kernels.all_kernels()) == before


def test_a_distillation_does_not_read_codes() -> None:
    given, _ = quantized("rows", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    ids = target.clamp(min=0)[..., None]
    with pytest.raises(flce.ArgumentError, match="weight_scale is given, and linear_topk_distillation does not read codes"):
        flce.linear_topk_distillation(hidden, teacher_ids=ids, teacher_probs=torch.ones(ids.shape), **given)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [E4M3, torch.uint8])
def test_a_layer_without_columns(dtype: torch.dtype) -> None:
    codes, hidden = torch.zeros(CLASSES, 0).to(dtype), torch.zeros(3, 0, dtype=torch.bfloat16)
    for call in (
        lambda: flce.linear_cross_entropy(hidden, codes, torch.zeros(3, dtype=torch.int64), weight_scale=torch.ones(CLASSES)),
        lambda: flce.linear_topk(hidden, codes, 3, weight_scale=torch.ones(CLASSES)),
    ):
        with pytest.raises(flce.ShapeError, match=r"hidden has shape \[3, 0\]; beside weight_scale its last dimension"):
            call()


def test_scales_as_bytes() -> None:
    given, _ = quantized("nvfp4", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    expected = flce.linear_cross_entropy(hidden, target=target, **given)
    given["weight_scale"] = given["weight_scale"].view(torch.uint8)
    assert torch.equal(flce.linear_cross_entropy(hidden, target=target, **given), expected)


@pytest.mark.parametrize("rows", [0, 1, 200])
def test_one_scale_for_a_rank_of_any_number_of_rows(rows: int) -> None:
    for one in (torch.tensor(0.03), torch.tensor([0.03]), torch.tensor([[0.03]])):
        scale = _codes._e4m3_scale(torch.zeros(rows, HIDDEN).to(E4M3), one)
        assert torch.equal(scale.flatten(), torch.full((rows,), 0.03))


def test_what_a_hook_gives_back_is_looked_at(retained: list[int]) -> None:
    given, _ = quantized("rows", "cpu")
    weight = given.pop("weight")
    hidden, target = hidden_of(torch.bfloat16, "cpu")

    def gradient(unpack: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, unpack):
            loss = flce.linear_cross_entropy(hidden, weight, target, **given, workspace_limit_bytes=1 << 30)
        (made,) = torch.autograd.grad(loss, hidden)
        return made

    expected = gradient(lambda each: each)
    assert retained[0] > 0
    large = retained[0]
    apart = gradient(lambda each: torch.stack([each, each], -1)[..., 0] if each.nbytes == large else each)
    assert torch.equal(apart, expected), "the same bytes with gaps between them"
    with pytest.raises(flce.ShapeError, match="changed the tensors of a quantised layer"):
        gradient(lambda each: torch.cat([each, each]) if each.nbytes == large else each)


def test_scales_alone_are_refused() -> None:
    given, _ = quantized("rows", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    with pytest.raises(flce.ArgumentError, match="weight_tensor_scale is given and weight_scale is None"):
        flce.linear_cross_entropy(hidden, given["weight"], target, weight_tensor_scale=1.0)
    with pytest.raises(flce.SpecError, match="multiple of 16"):
        flce.linear_cross_entropy(hidden[..., :136], given["weight"][:, :136].contiguous(), target, weight_scale=given["weight_scale"])


def test_a_width_that_is_dynamic() -> None:
    """Dynamo must not take the codes for another format's."""
    given, _ = quantized("rows", "cpu")
    weight = given.pop("weight")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    rows = hidden.detach().reshape(-1, HIDDEN)
    torch._dynamo.maybe_mark_dynamic(rows, 1)
    call = torch.compile(lambda some: flce.linear_cross_entropy(some, weight, target.reshape(-1), **given), backend="aot_eager")
    assert torch.equal(call(rows), flce.linear_cross_entropy(rows, weight, target.reshape(-1), **given))


def test_scales_of_another_format_in_backward() -> None:
    given, _ = quantized("rows", "cpu")
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    loss = flce.linear_cross_entropy(hidden, given["weight"], target, weight_scale=given["weight_scale"])
    given["weight_scale"].data = quantized("blocks", "cpu")[0]["weight_scale"]
    with pytest.raises(flce.ShapeError, match="between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_for_a_layer_of_one_block(shape: tuple[int, ...]) -> None:
    given, _ = quantized("rows", "cpu", classes=100)
    hidden, target = hidden_of(torch.bfloat16, "cpu")
    some, codes = hidden[..., :64].contiguous(), given["weight"][:, :64].contiguous()
    labels = target.clamp(max=99)
    made = flce.linear_cross_entropy(some, codes, labels, weight_scale=torch.full(shape, 0.01))
    assert torch.equal(made, flce.linear_cross_entropy(some, (codes.float() * 0.01).bfloat16(), labels))
