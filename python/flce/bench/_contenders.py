"""Contenders beside flce: each implementation by its own public function."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce import errors
from flce.bench._problem import IGNORE_INDEX, Inputs, Problem

Loss = Callable[[Inputs], Tensor]
"""The mean loss of the inputs' valid targets, with an autograd graph where something gets a gradient."""
ALL = 1 << 40  # a workspace limit that is none


class NotComparedError(Exception):
    """A contender that cannot be measured here, with the reason."""


class Contender:
    """One row of the table. A subclass names itself, says what it lacks, and makes its loss."""

    name: str  # the row's
    key: str  # its name in --compare
    package = "torch"  # on PyPI
    repository = ""  # where no release on PyPI will do
    lacks: frozenset[str] = frozenset()  # out of "bias", "softcap", "logit_scale", "cpu"

    def version(self) -> str | None:
        """Version of the installed package; None where it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def make(self, problem: Problem) -> Loss:
        """Raises ImportError, or NotComparedError with a reason."""
        raise NotImplementedError

    def prepare(self, problem: Problem) -> Loss:
        """`make`, with with what is not there or not supported as NotComparedError."""
        for what in ("bias", "softcap", "logit_scale"):
            if what in self.lacks and getattr(problem, what):
                raise NotComparedError(f"has no {what}")
        if "cpu" in self.lacks and not problem.on_gpu:
            raise NotComparedError("needs a CUDA device")
        if self.version() is None:
            raise NotComparedError(f"not installed: pip install {self.repository or self.package}")
        try:
            return self.make(problem)
        except ImportError as error:
            raise NotComparedError(f"cannot be imported: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _imported(module: str, name: str) -> Any:
    """A peer's function. Raises ImportError."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    return found


class Flce(Contender):
    """flce.linear_cross_entropy under one choice of memory."""

    key = package = "flce"

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = options

    def version(self) -> str:
        return flce.__version__

    def make(self, problem: Problem) -> Loss:
        options = {**self.options, "softcap": problem.softcap, "logit_scale": problem.logit_scale, "ignore_index": IGNORE_INDEX}
        return lambda given: flce.linear_cross_entropy(given.hidden, given.weight, given.target, bias=given.bias, **options)


FLCE_VARIANTS = {
    "default": Flce("flce"),
    "all": Flce("flce, all retained", workspace_limit_bytes=ALL, retain_in_grad_weight=False),
    "none": Flce("flce, nothing retained", retain_in_grad_weight=False),
}


def flce_under(limit: int, text: str) -> Flce:
    return Flce(f"flce, limit {text}", workspace_limit_bytes=limit, retain_in_grad_weight=False)


def _plain(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    """Logits in the inputs' dtype, scale and cap in that dtype, the loss in fp32: what causal models of transformers compute."""
    scale, cap = problem.logit_scale, problem.softcap

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        if scale is not None:
            logits = logits * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX)

    return run


class Torch(Contender):
    """F.linear, then F.cross_entropy of the logits in fp32."""

    key, name = "torch", "torch"

    def version(self) -> str:
        return torch.__version__

    def make(self, problem: Problem) -> Loss:
        run = _plain(problem)
        return lambda given: run(given.hidden, given.weight, given.bias, given.target)


class TorchFused(Torch):
    """F.linear_cross_entropy of torch 2.13 and newer, in chunks as its options choose them."""

    name = "torch, F.linear_cross_entropy"
    lacks = frozenset({"softcap", "logit_scale"})

    def make(self, problem: Problem) -> Loss:
        function, options = getattr(F, "linear_cross_entropy", None), getattr(torch.nn, "LinearCrossEntropyOptions", None)
        if function is None or options is None:
            raise NotComparedError(f"not in torch {torch.__version__}: 2.13 and newer have it")
        if self.key == "torch" and _why_not_native(problem) is None:
            raise NotComparedError("torch's native kernel takes the call here: see torch-native")
        chosen = options()
        return lambda given: function(
            given.hidden, given.weight, given.target, linear_bias=given.bias, ignore_index=IGNORE_INDEX, options=chosen
        )


def _why_not_native(problem: Problem) -> str | None:
    """Why F.linear_cross_entropy does not take the kernel that torch 2.15 has for it in CuTe DSL; None where it does."""
    try:
        importlib.import_module("torch._native.ops.linear_cross_entropy")
        dsl: Any = importlib.import_module("torch._native.cutedsl_utils")
    except ImportError:
        return f"not in torch {torch.__version__}: 2.15 and newer have it"
    if not problem.on_gpu:
        return "needs a CUDA device"
    if problem.dtype not in ("bf16", "fp16"):
        return f"takes bf16 and fp16; this is {problem.dtype}"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < (8, 0):
        return f"needs sm_80 or newer; this is sm_{capability[0]}{capability[1]}"
    if not dsl.runtime_available() or not dsl._version_is_ok():
        known = ", ".join(sorted(map(str, dsl._CUTEDSL_REQUIRED_VERSIONS)))
        return f"needs apache-tvm-ffi and nvidia-cutlass-dsl in one of the versions {known}; there is {dsl.runtime_version()}"
    return "is turned off by TORCH_DISABLE_NATIVE_JIT" if dsl.check_native_jit_disabled() else None


class TorchNative(TorchFused):
    """F.linear_cross_entropy with torch's own kernel."""

    key, name = "torch-native", "torch, native kernel"

    def make(self, problem: Problem) -> Loss:
        reason = _why_not_native(problem)
        if reason is not None:
            raise NotComparedError(reason)
        return super().make(problem)


class Compiled(Torch):
    """torch.compile of what "torch" computes, for the shapes that it is given."""

    key, name = "compile", "torch.compile"

    def make(self, problem: Problem) -> Loss:
        run = torch.compile(_plain(problem), dynamic=False)
        return lambda given: run(given.hidden, given.weight, given.bias, given.target)


class Liger(Contender):
    key, name, package = "liger", "liger", "liger-kernel"
    lacks = frozenset({"cpu", "logit_scale"})

    def make(self, problem: Problem) -> Loss:
        function = _imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

        options = {} if problem.softcap is None else {"softcap": problem.softcap}
        return lambda given: function(
            given.hidden, given.weight, given.target, bias=given.bias, ignore_index=IGNORE_INDEX, reduction="mean", **options
        )


class Cce(Contender):
    key, name, package = "cce", "cce", "cut-cross-entropy"
    repository = "'cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy.git'"
    lacks = frozenset({"cpu", "logit_scale"})

    def make(self, problem: Problem) -> Loss:
        function = _imported("cut_cross_entropy", "linear_cross_entropy")

        options: dict[str, Any] = {} if problem.softcap is None else {"softcap": problem.softcap}
        if problem.bias and "bias" not in inspect.signature(function).parameters:
            raise NotComparedError(f"has no bias in version {self.version()}; install {self.repository}")

        def run(given: Inputs) -> Tensor:
            more = options if given.bias is None else {**options, "bias": given.bias}
            loss: Tensor = function(given.hidden, given.weight, given.target, ignore_index=IGNORE_INDEX, **more)
            return loss

        return run


class Quack(Contender):
    key, name, package = "quack", "quack", "quack-kernels"
    lacks = frozenset({"cpu", "bias", "softcap", "logit_scale"})

    def make(self, problem: Problem) -> Loss:
        function = _imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy")

        if problem.num_tokens % 8:
            raise NotComparedError(f"takes a multiple of 8 tokens; there are {problem.num_tokens}")
        return lambda given: function(given.hidden, given.weight, given.target, ignore_index=IGNORE_INDEX, reduction="mean")


class Trl(Contender):
    """ChunkedLogProbFunction, from which TRL's trainers make their losses: the mean of the valid tokens' log-probabilities, of valid tokens
    alone on a GPU, as SFTTrainer does it."""

    key, name, package = "trl", "trl", "trl"
    chunk_size = 32768  # vocabulary columns: what TRL 1.16's trainers pass

    def make(self, problem: Problem) -> Loss:
        function = _imported("trl.kernels", "ChunkedLogProbFunction")
        arguments: dict[str, Any] = {
            "temperature": 1.0,
            "chunk_size": self.chunk_size,
            "final_logit_softcapping": problem.softcap,
            "logit_scale": 1.0 if problem.logit_scale is None else problem.logit_scale,
            "outputs": (),
        }
        _, *names = inspect.signature(function.forward).parameters
        unknown = [name for name in names[4:] if name not in arguments]
        if names[:4] != ["hidden", "weight", "bias", "targets"] or unknown:
            raise NotComparedError(f"trl {self.version()}: ChunkedLogProbFunction takes {', '.join(names)}, which is not what 1.16 takes")
        rest = [arguments[name] for name in names[4:]]

        def run(given: Inputs) -> Tensor:
            mask = given.target != IGNORE_INDEX
            if given.hidden.is_cuda:
                hidden, target = given.hidden[mask], given.target[mask]
                logprobs = function.apply(hidden, given.weight, given.bias, target, *rest)[0]
            else:
                made = function.apply(given.hidden, given.weight, given.bias, given.target.clamp(min=0), *rest)
                logprobs = made[0].masked_fill(~mask, 0)
            loss: Tensor = -logprobs.sum() / mask.sum().clamp(min=1)
            return loss

        return run


PEERS: tuple[Contender, ...] = (Torch(), TorchFused(), TorchNative(), Compiled(), Liger(), Cce(), Quack(), Trl())
NAMES = tuple(dict.fromkeys(peer.key for peer in PEERS))
"""What may be compared, in the order of the table."""


def chosen(names: Sequence[str | Contender]) -> list[Contender]:
    """Contenders of each name; an object stands for itself. Raises ArgumentError for a name that there is not."""
    found: list[Contender] = []
    for name in names:
        if isinstance(name, Contender):
            found.append(name)
            continue
        mine = [peer for peer in PEERS if peer.key == name]
        if not mine and name != "flce":  # flce is always there
            raise errors.ArgumentError(f"compare has {name!r}; allowed are {', '.join(NAMES)}")
        found += [peer for peer in mine if peer not in found]
    return found


def flce_variants(names: Sequence[str], limits: Sequence[tuple[int, str]], problem: Problem) -> list[Contender]:
    """Variants by name, and one for each limit (bytes, and how it is written). Without gradients nothing is retained and one is left."""
    for name in names:
        if name not in FLCE_VARIANTS:
            raise errors.ArgumentError(f"flce has {name!r}; allowed are {', '.join(FLCE_VARIANTS)}")
    if not problem.wanted:
        return [FLCE_VARIANTS["default"]]
    return [*(FLCE_VARIANTS[name] for name in dict.fromkeys(names)), *(flce_under(*limit) for limit in dict(limits).items())]


def by_name(name: str) -> Contender | None:
    """The contender of that row; None for one that is not of this module."""
    return next((each for each in (*FLCE_VARIANTS.values(), *PEERS) if each.name == name), None)
