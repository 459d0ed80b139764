"""The fp64 reference that results are held to, random problems, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.call._direct import DirectCall
from flce.core import _kernels

# docs/numerics.md: the largest ‖error‖ / ‖expected‖ of a whole tensor. Outputs are fp32, of inputs in fp32 and in 16 bits;
# gradients have a dtype.
OUTPUT_BOUND = {torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
GRADIENT_BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Bound of a row, whose expected norm counts as no less than the rows' root mean square: a wrong row of many is lost in the whole.
ROW_FACTOR = 4.0


@dataclass
class Problem:
    """One call's tensors and options."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    options: dict[str, Any] = field(default_factory=dict)


def make_problem(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    num_tokens: int = 37,
    hidden_size: int = 24,
    vocab_size: int = 101,
    ignored: float = 0.25,
    bias: bool = False,
    class_weight: bool = False,
    temperature: bool | float | None = None,
    token_weight: bool = False,
    class_offset: bool = False,
    **options: Any,
) -> Problem:
    """Random tensors; `temperature` True: one for each token. `class_offset`: some classes that are no target are ruled out, too, but for a
    loss of all classes."""
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype).requires_grad_()

    hidden, weight = normal(num_tokens, hidden_size), normal(vocab_size, hidden_size, scale=0.5)
    target = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    target[torch.rand(num_tokens, generator=generator) < ignored] = options.get("ignore_index", -100)
    if bias:
        options["bias"] = normal(vocab_size)
    if class_weight:
        options["class_weight"] = (torch.rand(vocab_size, generator=generator) + 0.5).to(device)
    if temperature is True:
        options["temperature"] = (torch.rand(num_tokens, generator=generator) * 1.5 + 0.5).to(device)
    elif temperature is not None:
        options["temperature"] = temperature
    if token_weight:
        options["token_weight"] = torch.randn(num_tokens, generator=generator).add_(0.5).to(device)
    if class_offset:
        offsets = torch.randn(vocab_size, generator=generator)
        if not options.get("label_smoothing"):
            ruled_out = torch.ones(vocab_size, dtype=torch.bool)
            ruled_out[target[target >= 0]] = False
            ruled_out[::3] = False
            offsets[ruled_out] = -torch.inf
        options["class_offset"] = offsets.to(device).requires_grad_()
    return Problem(hidden, weight, target.to(device), options)


def in_double(problem: Problem) -> Problem:
    """Copies a problem's numbers to fp64 leaves, whose reference gradients are not rounded to the problem's dtype."""

    def leaf(value: Any) -> Any:
        return (
            value.detach().double().requires_grad_(value.requires_grad)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )

    return Problem(
        leaf(problem.hidden), leaf(problem.weight), problem.target, {name: leaf(value) for name, value in problem.options.items()}
    )


def reference_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float | None, softcap: float | None) -> Tensor:
    """[..., V] in fp64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if logit_scale is not None:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_valid_tokens: Tensor | float | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    temperature: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    dft: bool = False,
    class_offset: Tensor | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """loss, lse, logprobs, entropy and log_sum_sq_probs in fp64 with the logits written out, 0 in ignored rows; differentiable. And top1,
    -1 there."""
    logits = reference_logits(hidden, weight, bias, logit_scale, softcap)
    if class_offset is not None:
        logits = logits + class_offset.double()
    vocab_size = weight.shape[0]
    flat = logits.reshape(-1, vocab_size)
    labels = target.reshape(-1).long()
    valid = (labels != ignore_index) & (labels >= 0) & (labels < vocab_size)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1).double()
        right = (temperature > 0) & temperature.isfinite()
        valid, flat = valid & right, flat / torch.where(right, temperature, 1.0)[:, None]
    elif temperature is not None:
        flat = flat / temperature
    safe = torch.where(valid, labels, 0)
    weights = torch.ones(vocab_size, dtype=torch.float64, device=hidden.device) if class_weight is None else class_weight.double()
    lse = flat.logsumexp(-1)
    log_softmax = flat - lse[:, None]
    logprobs = log_softmax.gather(1, safe[:, None])[:, 0]
    finite = log_softmax.masked_fill(log_softmax == -torch.inf, 0)  # 0 · ∞ counts as 0
    entropy = -(log_softmax.exp() * finite).sum(-1)
    hard = -weights[safe] * logprobs
    smooth = -(finite * weights).sum(-1) / vocab_size
    zero = torch.zeros_like(lse)
    row_weights = torch.ones_like(zero) if token_weight is None else token_weight.reshape(-1).double()
    factor = torch.where(valid, row_weights * (logprobs.detach().exp() if dft else 1.0), 0.0)
    cross_entropy = torch.where(valid, (1 - label_smoothing) * hard + label_smoothing * smooth, zero) * factor
    z_part = torch.where(valid, z_loss * lse.square(), zero) * factor
    shape = target.shape
    if reduction == "none":
        loss = (cross_entropy + z_part).view(shape)
    elif reduction == "sum":
        loss = (cross_entropy + z_part).sum()
    elif num_valid_tokens is not None:
        loss = (cross_entropy + z_part).sum() / float(num_valid_tokens)
    elif not bool(valid.any()):
        loss = (cross_entropy + z_part).sum() * 0
    else:
        counted = row_weights if reduction == "weighted_mean" else torch.ones_like(zero)
        by_class, by_row = (torch.where(valid, counted * each, zero).sum() for each in (weights[safe], 1.0))
        loss = cross_entropy.sum() / by_class + z_part.sum() / by_row
    per_token = {"lse": lse, "logprobs": logprobs, "entropy": entropy, "log_sum_sq_probs": (2 * log_softmax).logsumexp(-1)}
    outputs = {name: torch.where(valid, value, zero).view(shape) for name, value in per_token.items()}
    return {"loss": loss, "top1": torch.where(valid, flat.argmax(-1), -1).view(shape)} | outputs


def assert_close(
    actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype, what: str = "", *, output: bool = False, factor: float = 1.0
) -> None:
    """Error within `factor` times the bound of a gradient in `dtype`, or of an `output` of inputs in `dtype`, as a whole and by rows.
    Exactly 0 where that is expected (rows of ignored tokens)."""
    assert actual is not None and expected is not None, what
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    bound = factor * (OUTPUT_BOUND if output else GRADIENT_BOUND)[dtype]
    right = expected.detach().double()
    error = actual.detach().double() - right
    assert not error[right == 0].any(), f"{what}: not 0 where 0 is right"
    rows = right.shape[-1] if right.dim() > 1 else 1
    size, errors = (tensor.reshape(-1, rows).norm(dim=-1) for tensor in (right, error))
    whole = (errors.norm() / size.norm().clamp(min=1e-30)).item()
    assert whole <= bound, f"{what}: error {whole:.3g} of the whole, {bound:.3g} allowed"
    mean = size.norm() / size.numel() ** 0.5
    row = (errors / size.clamp(min=mean).clamp(min=1e-30)).max().item()
    assert row <= ROW_FACTOR * bound, f"{what}: error {row:.3g} of a row, {ROW_FACTOR * bound:.3g} allowed"


OUTPUTS = {  # outputs of each function, in the order in which it returns them
    "linear_cross_entropy": ("loss", "lse", "logprobs", "entropy", "top1", "log_sum_sq_probs"),
    "linear_logprobs": ("logprobs", "entropy", "top1", "log_sum_sq_probs"),
}


def leaves(problem: Problem) -> dict[str, Tensor]:
    found = {"hidden": problem.hidden, "weight": problem.weight}
    return found | {name: problem.options[name] for name in ("bias", "class_offset") if name in problem.options}


def check(problem: Problem, dtype: torch.dtype, function: str = "linear_cross_entropy", call: Any = None, **options: Any) -> None:
    """Forward and backward of flce's `function` (or of `call`, which is that in another way), with an upstream gradient that differs from
    output to output and row to row."""
    options = problem.options | options
    result = (call or getattr(flce, function))(problem.hidden, problem.weight, problem.target, **options)
    exact = in_double(problem)
    expected = reference(exact.hidden, exact.weight, exact.target, **(options | exact.options))
    first, *rest = OUTPUTS[function]
    outputs = [first] + [name for name in rest if options.get(f"return_{name}")]
    actual = dict(zip(outputs, result if len(outputs) > 1 else (result,), strict=True))
    generator = torch.Generator().manual_seed(7)
    upstream = {}
    for name, value in actual.items():
        if name == "top1":
            assert torch.equal(value, expected[name])
            continue
        assert value.dtype == torch.float32
        assert_close(value, expected[name], dtype, name, output=True)
        assert value.requires_grad == (name != "log_sum_sq_probs")
        if value.requires_grad:
            upstream[name] = torch.randn(value.shape, generator=generator).to(value.device)
    tensors = leaves(problem)
    gradients = torch.autograd.grad([actual[name] for name in upstream], list(tensors.values()), list(upstream.values()))
    wanted = torch.autograd.grad(
        [expected[name] for name in upstream], list(leaves(exact).values()), [g.double() for g in upstream.values()]
    )
    for (name, leaf), gradient, right in zip(tensors.items(), gradients, wanted, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_close(gradient, right, dtype, f"gradient of {name}")


def spy_on_backward(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Will hold, for each run of a kernel's backward, whether it makes hidden's and weight's gradients."""
    computed: list[tuple[bool, bool]] = []
    by_kernel, directly = _kernels.LoadedKernel.backward, DirectCall.backward

    def kernel_backward(
        self: Any, given: Any, saved: Any, grad: Any, grad_hidden: Any, grad_weight: Any, *others: Any, **keywords: Any
    ) -> None:
        computed.append((grad_hidden is not None, grad_weight is not None))
        by_kernel(self, given, saved, grad, grad_hidden, grad_weight, *others, **keywords)

    def direct_backward(self: Any, *tensors: Any) -> Any:
        gradients = directly(self, *tensors)
        computed.append((gradients[0] is not None, gradients[1] is not None))
        return gradients

    monkeypatch.setattr(_kernels.LoadedKernel, "backward", kernel_backward)
    monkeypatch.setattr(DirectCall, "backward", direct_backward)
    return computed
