"""The problem of a comparison: one output layer and loss, its tensors, and the reference that results are held to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.core import checks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES = ("forward_backward", "forward")
FROZEN = (None, "hidden", "weight")
IGNORE_INDEX = -100
_TILE_BYTES = 256 << 20  # the reference's logits at a time
# Multiply-adds of the reference's four GEMMs up to which it is computed in fp64.
_FP64_WORK = {"cpu": 5e11, "cuda": 5e13}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One output layer and loss: mean cross entropy of softcap(logit_scale · (hidden · weightᵀ + bias)), over targets of which a share
    is ignored. Random data: logits have a standard deviation of logit_std before scale and cap, targets are uniform."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str = "bf16"
    device: str = "cpu"
    bias: bool = False
    softcap: float | None = None
    logit_scale: float | None = None
    ignored: float = 0.0  # share of the tokens
    pass_: str = "forward_backward"
    frozen: str | None = None  # "hidden" or "weight" (with its bias): what gets no gradient
    logit_std: float = 2.0
    seed: int = 0

    def check(self) -> Problem:
        """Itself. Raises ArgumentError naming what is wrong."""
        for name, least in (("num_tokens", 1), ("hidden_size", 1), ("vocab_size", 2)):
            checks.integer(name, getattr(self, name), least)
        for name, allowed in (("dtype", tuple(DTYPES)), ("pass", PASSES), ("frozen", FROZEN)):
            value = getattr(self, "pass_" if name == "pass" else name)
            if value not in allowed:
                raise errors.ArgumentError(f"{name} is {value!r}; allowed are {', '.join(str(each) for each in allowed)}")
        for name, fits, what in (
            ("ignored", lambda x: 0 <= x < 1, "from 0 to below 1"),
            ("logit_std", lambda x: 0 < x < math.inf, "above 0"),
            ("softcap", lambda x: x is None or 0 < x < math.inf, "above 0, or None"),
            ("logit_scale", lambda x: x is None or (math.isfinite(x) and x != 0), "finite and not 0, or None"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not (value is None or isinstance(value, int | float)) or not fits(value):
                raise errors.ArgumentError(f"{name} is {value!r}; it must be a number, {what}")
        self._check_device()
        return self

    def _check_device(self) -> None:
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise errors.ArgumentError(f"device is {self.device!r}; allowed are cpu, cuda and cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise errors.ArgumentError(f"device is {self.device!r}; allowed are cpu, cuda and cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise errors.UnavailableError(f"device is {self.device!r}; torch sees {torch.cuda.device_count()} CUDA devices here")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def trains(self) -> bool:
        return self.pass_ == "forward_backward"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The tensors that get a gradient."""
        if not self.trains:
            return ()
        trained = [] if self.frozen == "hidden" else ["hidden"]
        if self.frozen != "weight":
            trained += ["weight", "bias"] if self.bias else ["weight"]
        return tuple(trained)

    @property
    def upstream(self) -> float:
        """The loss's own gradient. In fp16 the number of tokens, since gradients of a mean would be lost below fp16's smallest number;
        trainers scale their losses for the same reason."""
        return float(self.num_tokens) if self.dtype == "fp16" else 1.0

    def json(self) -> dict[str, Any]:
        """Every field, under the names of `flce.bench.compare`."""
        fields = dataclasses.asdict(self)
        fields["pass"] = fields.pop("pass_")
        return fields


@dataclasses.dataclass(frozen=True)
class Inputs:
    """hidden [N, D], weight [V, D], bias [V] or None, target [N] int64. The first three require gradients as the problem says."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    problem: Problem

    def clear(self) -> None:
        for name in self.problem.wanted:
            getattr(self, name).grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step, by "grad_hidden", …; a missing one is left out."""
        found = {f"grad_{name}": getattr(self, name).grad for name in self.problem.wanted}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def gradient_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.problem.wanted)


def make_inputs(problem: Problem) -> Inputs:
    """Draws a problem's tensors, the same on every call for the same problem and device."""
    device, dtype = torch.device(problem.device), DTYPES[problem.dtype]
    generator = torch.Generator(device=device).manual_seed(problem.seed)

    def normal(*shape: int, scale: float, name: str) -> Tensor:
        made = torch.empty(*shape, device=device, dtype=dtype)
        rows = max(1, (64 << 20) // shape[-1])
        for part in made.split(rows):  # an fp32 copy of the whole weight may not fit beside it
            part.copy_(torch.randn(part.shape, device=device, generator=generator) * scale)
        return made.requires_grad_(name in problem.wanted)

    hidden = normal(problem.num_tokens, problem.hidden_size, scale=1.0, name="hidden")
    weight = normal(problem.vocab_size, problem.hidden_size, scale=problem.logit_std / math.sqrt(problem.hidden_size), name="weight")
    bias = normal(problem.vocab_size, scale=1.0, name="bias") if problem.bias else None
    target = torch.randint(0, problem.vocab_size, (problem.num_tokens,), device=device, generator=generator)
    skipped = min(int(problem.num_tokens * problem.ignored), problem.num_tokens - 1)
    order = torch.randperm(problem.num_tokens, device=device, generator=generator)
    target[order[:skipped]] = IGNORE_INDEX
    return Inputs(hidden, weight, bias, target, problem)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Loss and gradients by logits in `dtype`, a part of the vocabulary at a time; gradients of the loss itself, stored in fp32."""

    dtype: str
    loss: float
    gradients: dict[str, Tensor]


def reference_dtype(problem: Problem) -> torch.dtype:
    """fp64 where its GEMMs take seconds at most, else fp32."""
    work = (4 if problem.trains else 1) * problem.num_tokens * problem.hidden_size * problem.vocab_size
    return torch.float64 if work <= _FP64_WORK["cuda" if problem.on_gpu else "cpu"] else torch.float32


def reference(inputs: Inputs, dtype: torch.dtype | None = None) -> Reference:
    """Two sweeps over the vocabulary: the first for lse and the targets' logits, the second for the gradients."""
    problem = inputs.problem
    dtype = dtype or reference_dtype(problem)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.no_grad():
            return _reference(inputs, dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _reference(inputs: Inputs, dtype: torch.dtype) -> Reference:
    problem = inputs.problem
    hidden, valid = inputs.hidden.to(dtype), inputs.target != IGNORE_INDEX
    count = int(valid.sum())
    size = max(1, min(problem.vocab_size, _TILE_BYTES // (dtype.itemsize * problem.num_tokens)))
    starts = range(0, problem.vocab_size, size)
    lse = torch.full_like(hidden[:, 0], -math.inf)
    right = torch.zeros_like(lse)
    for start in starts:
        logits, _, weight = _tile(inputs, hidden, start, size)
        lse = torch.logaddexp(lse, logits.logsumexp(dim=1))
        mine = (inputs.target >= start) & (inputs.target < start + weight.shape[0])
        picked = logits.gather(1, torch.where(mine, inputs.target - start, 0)[:, None]).squeeze(1)
        right = torch.where(mine, picked, right)
    loss = float(torch.where(valid, lse - right, 0.0).sum()) / count
    gradients: dict[str, Tensor] = {}
    if problem.wanted:
        parts: dict[str, list[Tensor]] = {"weight": [], "bias": []}
        grad_hidden = torch.zeros_like(hidden)
        for start in starts:
            logits, slope, weight = _tile(inputs, hidden, start, size)
            mine = (inputs.target >= start) & (inputs.target < start + weight.shape[0])
            slope *= logits.sub_(lse[:, None]).exp_() - _one_hot(mine, inputs.target - start, logits)
            slope *= (valid / count).to(dtype)[:, None]
            grad_hidden.addmm_(slope, weight)
            if "weight" in problem.wanted:
                parts["weight"].append((slope.t() @ hidden).float())
            if "bias" in problem.wanted:
                parts["bias"].append(slope.sum(0).float())
        whole = {"hidden": grad_hidden.float()} | {name: torch.cat(several) for name, several in parts.items() if several}
        gradients = {f"grad_{name}": whole[name] for name in problem.wanted}
    return Reference("fp64" if dtype == torch.float64 else "fp32", loss, gradients)


def _tile(inputs: Inputs, hidden: Tensor, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, their derivative after the product with the weight, the weight's rows) of classes from start."""
    problem = inputs.problem
    weight = inputs.weight[start : start + size].to(hidden.dtype)
    logits = hidden @ weight.t()
    if inputs.bias is not None:
        logits += inputs.bias[start : start + size].to(hidden.dtype)
    scale = 1.0 if problem.logit_scale is None else problem.logit_scale
    logits *= scale
    slope = torch.full_like(logits, scale)
    if problem.softcap is not None:
        bent = torch.tanh(logits / problem.softcap)
        logits = problem.softcap * bent
        slope *= 1 - bent.square()
    return logits, slope, weight


def _one_hot(mine: Tensor, target: Tensor, like: Tensor) -> Tensor:
    """1 at the target's column of the rows that are `mine`."""
    made = torch.zeros_like(like)
    made.scatter_(1, torch.where(mine, target, 0)[:, None], mine.to(like.dtype)[:, None])
    return made


def relative_error(actual: Tensor, expected: Tensor, scale: float) -> float:
    """‖actual / scale − expected‖ / ‖expected‖, in fp64 and a part at a time."""
    rows = max(1, (8 << 20) // max(1, expected.shape[-1])) if expected.dim() > 1 else 64 << 20
    error, size = 0.0, 0.0
    for got, right in zip(actual.detach().split(rows), expected.split(rows), strict=True):
        wide = right.double()
        error += float((got.double() / scale - wide).square().sum())
        size += float(wide.square().sum())
    return math.sqrt(error) / max(math.sqrt(size), 1e-300)
