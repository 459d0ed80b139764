"""`compare`: the whole measurement as one call."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from flce import errors
from flce.bench import _contenders, _measure, _report
from flce.bench._contenders import Contender
from flce.bench._problem import DTYPES, Problem
from flce.core import _native, checks

SCHEMA = 1
FRAMEWORKS = ("torch", "jax")
_OF_SPEC = {"D": "hidden_size", "V": "vocab_size", "dtype": "dtype", "bias": "bias", "softcap": "softcap", "logit_scale": "logit_scale"}
_WITHOUT_MEANING = {"tied", "layout", "grad_weight_mode"}  # here: the weight is [V, D], its gradient a tensor of its own


def compare(
    *,
    compare: str | Sequence[str | Contender] | None = None,
    framework: str = "torch",
    num_tokens: int | Sequence[int] = 4096,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    spec: str | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    bias: bool | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignored: float = 0.0,
    pass_: str = "forward_backward",
    frozen: str | None = None,
    logit_std: float = 2.0,
    seed: int = 0,
    flce: Sequence[str] = ("default", "all", "none"),
    workspace_limits: Iterable[int] = (),
    rounds: int | None = None,
    seconds: float = 10.0,
    memory: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time, memory and errors of flce and of its peers, at one layer and one or several numbers of tokens.

    Args:
        compare: names out of torch, torch-native, compile, liger, cce, quack, trl (also as one text, separated by commas), or objects of
            `flce.bench.Contender`; with framework "jax" out of optax, maxtext, levanter. One that is not installed or cannot do this
            problem is in the result with the reason. None: all.
        framework: "torch", or "jax": the step under jax.jit, timed by the host's clock over repeated steps, memory by XLA's account.
        num_tokens: rows of hidden, one number or several.
        hidden_size, vocab_size, dtype ("bf16", "fp16", "fp32" or torch's), bias, softcap, logit_scale: the layer. Fields that are left
            out come from spec ("D=2048,V=151936,dtype=bf16", as the flce command takes it) or hf_config (a config.json); one of the two may
            be given. dtype is bf16 on a GPU and fp32 on a CPU where nothing says it.
        device: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.
        ignored: share of the tokens whose target is ignored.
        pass_: "forward_backward", or "forward", which is without gradients.
        frozen: "weight" or "hidden", which then gets no gradient.
        logit_std: standard deviation of the random logits, before scale and cap. Implementations that skip small probabilities
            depend on it.
        flce: its variants: "default", "all" (all logits retained), "none" (nothing retained). All three with jax.
        workspace_limits: bytes; a variant of flce for each. Not with jax.
        rounds: how many; None: as many as `seconds` allow, from 3 to 100.
        seconds: of rounds, for each number of tokens. The reference, compilers and memory come on top.
        memory: False measures none, which on a CPU spares a process for each contender.
        progress: told of each step, in words.

    Returns:
        {"schema", "framework", "context", "shapes"}, ready for JSON: for each number of tokens "problem", "reference", "floor" (the bare
        GEMMs in the same rounds) and "rows". docs/comparing.md describes them.

    Raises:
        ArgumentError (DTypeError, SpecError), UnavailableError: before anything is measured. DeviceError: a contender broke the device.
    """
    layer = _layer(spec, hf_config)
    given = {"hidden_size": hidden_size, "vocab_size": vocab_size, "bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    layer |= {name: value for name, value in given.items() if value is not None}
    for name in ("hidden_size", "vocab_size"):
        if name not in layer:
            raise errors.ArgumentError(f"{name} is missing: give it, or a spec or hf_config that says it")
    device = str(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    kind = _dtype(dtype) if dtype is not None else layer.pop("dtype", "bf16" if device.startswith("cuda") else "fp32")
    layer.pop("dtype", None)
    first = Problem(
        num_tokens=1, **layer, dtype=kind, device=device, ignored=ignored, pass_=pass_, frozen=frozen, logit_std=logit_std, seed=seed
    ).check()
    sizes = [num_tokens] if isinstance(num_tokens, int) else list(num_tokens)
    if not sizes:
        raise errors.ArgumentError("num_tokens is empty; give at least one number of tokens")
    problems = [dataclasses.replace(first, num_tokens=size).check() for size in sizes]
    contenders, measure = _chosen(framework, compare, flce, _limits(workspace_limits), first)
    for name, value, least in (("rounds", rounds, 1), ("seconds", seconds, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= least):
            raise errors.ArgumentError(f"{name} is {value!r}; it must be a number of {least} or more")
    result: dict[str, Any] = {"schema": SCHEMA, "framework": framework, "context": _report.context(device), "shapes": []}
    for problem in problems:

        def told(text: str, tokens: int = problem.num_tokens) -> None:
            if progress is not None:
                progress(f"{tokens} tokens: {text}")

        shape = measure(problem, contenders, rounds=rounds, seconds=seconds, memory=memory, progress=told)
        if problem.on_gpu:
            shape["gpu_after"] = _report.gpu_state(device)
            torch.cuda.empty_cache()
        result["shapes"].append(shape)
    return result


def _chosen(framework: str, compare: Any, flce: Sequence[str], limits: list[tuple[int, str]], first: Problem) -> tuple[Any, Any]:
    """Contenders, and the function that measures them."""
    checks.choice("framework", framework, FRAMEWORKS)
    names = [name for name in compare.split(",") if name] if isinstance(compare, str) else compare
    if framework == "jax":
        if limits:
            raise errors.ArgumentError("workspace_limits are given with jax; its variants are fixed")
        try:
            from flce.bench import _jax
        except ImportError as error:
            raise errors.UnavailableError(f"framework is 'jax', which cannot be imported: {error}") from error
        return _jax.chosen(_jax.NAMES if names is None else names), _jax.measure
    peers = _contenders.chosen(_contenders.NAMES if names is None else names)
    return [*_contenders.flce_variants(flce, limits, first), *peers], _measure.measure


def is_right(result: dict[str, Any]) -> bool:
    """Whether every variant of flce is right, and its first one ran."""
    for shape in result["shapes"]:
        own = [row for row in shape["rows"] if row["compare"] == "flce"]
        if any(row["status"] == "wrong" for row in own) or (own and own[0]["status"] != "ok"):
            return False
    return True


def _dtype(given: str | torch.dtype) -> str:
    for name, dtype in DTYPES.items():
        if given in (name, dtype, str(dtype).removeprefix("torch.")):
            return name
    raise errors.DTypeError(f"dtype is {given}; allowed are {', '.join(DTYPES)} and torch's names of them")


def _limits(given: Iterable[int]) -> list[tuple[int, str]]:
    found = []
    for limit in given:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
            raise errors.ArgumentError(f"workspace_limits has {limit!r}; it must be integers above 0, in bytes")
        found.append((limit, _bytes_text(limit)))
    return found


def _bytes_text(size: int) -> str:
    unit, name = max((unit, name) for unit, name in ((1, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")) if size >= unit)
    return f"{size / unit:.4g} {name}"


def _layer(spec: str | None, hf_config: str | os.PathLike[str] | None) -> dict[str, Any]:
    if spec is not None and hf_config is not None:
        raise errors.ArgumentError("spec and hf_config are both given; give one of them")
    return _of_spec(spec) if spec is not None else _of_config(Path(hf_config)) if hf_config is not None else {}


def _of_spec(spec: str) -> dict[str, Any]:
    """Fields of the problem; a key without a counterpart here is refused."""
    layer: dict[str, Any] = {}
    for item in _native.text(_native.library().flce_spec_text, spec.encode()).split(","):
        key, _, value = item.partition("=")
        if key in _WITHOUT_MEANING:
            continue
        if key not in _OF_SPEC:
            raise errors.ArgumentError(f"spec has {key}, which others do not compute; compared can be {', '.join(_OF_SPEC)}")
        name = _OF_SPEC[key]
        layer[name] = True if name == "bias" else value if name == "dtype" else (int if key in "DV" else float)(value)
    return layer


def _of_config(path: Path) -> dict[str, Any]:
    """Layer of a config.json of transformers: sizes, dtype, bias, cap and scale, as `flce prewarm --hf-config` reads it."""
    try:
        config = path.read_bytes()
    except OSError as error:
        raise errors.ArgumentError(f"hf_config is {os.fspath(path)!r}, which cannot be read: {error}") from error
    try:
        return _of_spec(_native.text(_native.library().flce_hf_config_spec, config))
    except errors.SpecError as error:
        raise errors.ArgumentError(f"hf_config is {os.fspath(path)!r}: {error}") from error
