"""Comparison under jax.jit: flce.jax beside what trainers in JAX do. Data, reference and errors are those of torch's comparison."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from torch.utils.dlpack import from_dlpack

import flce
from flce import errors
from flce import jax as fj
from flce.bench import _measure
from flce.bench._problem import IGNORE_INDEX, Inputs, Problem, make_inputs, reference, relative_error

Loss = Callable[[Any, Any, Any], Any]
"""The mean loss of hidden [N, D], weight [V, D] and labels [N]."""
ALL = 1 << 40  # a workspace limit that is none
_TILE_TOKENS = 2048
_SECONDS_A_TURN = 0.1  # a turn repeats a step until it takes that long, since the host's clock times it


class NotComparedError(Exception):
    """A contender that cannot be measured here, with the reason."""


@dataclasses.dataclass(frozen=True)
class Contender:
    key: str  # name in --compare
    name: str  # the row's
    package: str  # on PyPI
    make: Callable[[Problem], Loss]


def _logits(problem: Problem, hidden: Any, weight: Any) -> Any:
    logits = jnp.einsum("nd,vd->nv", hidden, weight, preferred_element_type=jnp.float32)
    if problem.logit_scale is not None:
        logits = logits * problem.logit_scale
    return logits if problem.softcap is None else problem.softcap * jnp.tanh(logits / problem.softcap)


def _flce(**memory: Any) -> Callable[[Problem], Loss]:
    def make(problem: Problem) -> Loss:
        limits = {name: value(problem) if callable(value) else value for name, value in memory.items()}
        return lambda hidden, weight, labels: fj.linear_cross_entropy(
            hidden, weight, labels, softcap=problem.softcap, logit_scale=problem.logit_scale, **limits
        )

    return make


def _optax(problem: Problem) -> Loss:
    """XLA's own fusion of fp32 logits that are there."""
    optax = importlib.import_module("optax")

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        valid = labels != IGNORE_INDEX
        rows = optax.softmax_cross_entropy_with_integer_labels(_logits(problem, hidden, weight), jnp.where(valid, labels, 0))
        return jnp.where(valid, rows, 0.0).sum() / valid.sum()

    return loss


def _tiles(problem: Problem) -> Loss:
    """MaxText's way with num_vocab_tiling: tiles of tokens by scan, whose logits backward computes again."""
    tiles = -(-problem.num_tokens // _TILE_TOKENS)
    if problem.num_tokens % tiles:
        raise NotComparedError(f"takes tiles of one size; {problem.num_tokens} tokens are not {tiles} of them")

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        def of_tile(total: Any, tile: Any) -> Any:
            hidden, labels = tile
            logits = _logits(problem, hidden, weight)
            right = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
            return total + jnp.where(labels != IGNORE_INDEX, jax.nn.logsumexp(logits, axis=1) - right, 0.0).sum(), None

        cut = hidden.reshape(tiles, -1, hidden.shape[1]), labels.reshape(tiles, -1)
        return jax.lax.scan(jax.checkpoint(of_tile), jnp.float32(0), cut)[0] / (labels != IGNORE_INDEX).sum()

    return loss


def _levanter(problem: Problem) -> Loss:
    if problem.logit_scale is not None:
        raise NotComparedError("has no logit_scale")
    kernels = importlib.import_module("levanter.kernels.pallas.fused_cross_entropy_loss")

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return kernels.fused_cross_entropy_loss_and_logsumexp_penalty(
            hidden, jnp.maximum(labels, 0), weight.T, weight=labels != IGNORE_INDEX, logit_soft_cap=problem.softcap, implementation="xla"
        )

    return loss


def _bounded(problem: Problem) -> int:
    """Memory in which torch's call retains nothing."""
    return (64 << 20) + 4 * problem.num_tokens * problem.hidden_size


FLCE = (
    Contender("flce", "flce.jax", "flce", _flce()),
    Contender("flce", "flce.jax, all retained", "flce", _flce(workspace_limit_bytes=ALL)),
    Contender("flce", "flce.jax, 64 MiB + 4·N·D", "flce", _flce(workspace_limit_bytes=_bounded)),
)
PEERS = (
    Contender("optax", "optax, whole logits", "optax", _optax),
    Contender("maxtext", "tiles of tokens, as MaxText has them", "jax", _tiles),
    Contender("levanter", "Levanter, XLA", "levanter", _levanter),
)
NAMES = tuple(peer.key for peer in PEERS)


def chosen(names: Sequence[str]) -> list[Contender]:
    for name in names:
        if name not in (*NAMES, "flce"):
            raise errors.ArgumentError(f"compare has {name!r}; allowed with jax are {', '.join(NAMES)}")
    return [*FLCE, *(peer for peer in PEERS if peer.key in names)]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return flce.__version__ if package == "flce" else None


@dataclasses.dataclass
class Row:
    contender: Contender
    status: str = "ok"
    reason: str = ""
    step: Any = None  # compiled
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    milliseconds: list[float] = dataclasses.field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.status, self.reason, self.step = status, reason, None
        self.milliseconds.clear()


def _compile(row: Row, problem: Problem, arrays: Sequence[Any]) -> None:
    """The step as a program, and its memory by XLA's account: what it takes beside its arguments and results."""
    try:
        loss = row.contender.make(problem)
        places = tuple(i for i, name in enumerate(("hidden", "weight")) if name in problem.wanted)

        def scaled(*given: Any) -> Any:
            return loss(*given) * problem.upstream

        made = jax.jit(jax.value_and_grad(scaled, places) if places else scaled).lower(*arrays).compile()
        row.step, row.memory_bytes = made, int(made.memory_analysis().temp_size_in_bytes)
    except NotComparedError as skipped:
        row.end("skipped", str(skipped))
    except ImportError as missing:
        row.end("skipped", f"not installed: {missing}")
    except Exception as error:
        row.end("failed", _first_line(error))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _check(row: Row, problem: Problem, arrays: Sequence[Any], expected: Any) -> None:
    try:
        made = jax.block_until_ready(row.step(*arrays))
    except Exception as error:
        row.end("failed", _first_line(error))
        return
    value, gradients = made if problem.wanted else (made, ())
    row.errors["loss"] = abs(float(value) / problem.upstream - expected.loss) / abs(expected.loss)
    for name, gradient in zip(problem.wanted, gradients, strict=True):
        row.errors[f"grad_{name}"] = relative_error(from_dlpack(gradient), expected.gradients[f"grad_{name}"], problem.upstream)
    for name, found in row.errors.items():
        bound = (_measure.LOSS_BOUND if name == "loss" else _measure.GRADIENT_BOUND)[problem.dtype]
        if not found <= bound:  # a NaN is wrong too
            row.end("wrong", f"error of {name} {found:.1e}, at most {bound:.0e} allowed")
            return


def _milliseconds(step: Any, arrays: Sequence[Any], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        made = step(*arrays)
    jax.block_until_ready(made)
    return 1e3 * (time.perf_counter() - begin) / repeats


def _floor(problem: Problem, arrays: Sequence[Any]) -> Any:
    """The layer's bare products."""

    def gemms(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = jnp.einsum("nd,vd->nv", hidden, weight)
        made = [logits] if not problem.wanted else []
        made += [jnp.einsum("nv,vd->nd", logits, weight)] if "hidden" in problem.wanted else []
        return made + ([jnp.einsum("nv,nd->vd", logits, hidden)] if "weight" in problem.wanted else [])

    return jax.jit(gemms).lower(*arrays).compile()


def _arrays(inputs: Inputs) -> list[Any]:
    return [jnp.from_dlpack(each.detach()) for each in (inputs.hidden, inputs.weight, inputs.target.int())]


def measure(
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    rounds: int | None,
    seconds: float,
    memory: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """One problem: its entry in the result."""
    if problem.bias:
        raise errors.ArgumentError("bias is given with jax; it is compared with torch alone")
    inputs = make_inputs(problem)
    progress("the reference")
    expected = reference(inputs)
    platform, _, index = problem.device.partition(":")
    rows = [Row(contender) for contender in contenders]
    with jax.default_device(jax.local_devices(backend=platform)[int(index or 0)]):
        arrays = _arrays(inputs)
        for row in rows:
            progress(row.contender.name)
            _compile(row, problem, arrays)
            if row.step is not None:
                _check(row, problem, arrays, expected)
        floors = _turns([row for row in rows if row.step is not None], _floor(problem, arrays), arrays, rounds, seconds)
    return {
        "problem": problem.json(),
        "reference": {"dtype": expected.dtype, "loss": expected.loss},
        "floor": {"gemms": 1 + len(problem.wanted), "flushed_bytes": 0, "rounds": len(floors), **_measure.summary(floors)},
        "rows": [_entry(row, rows, floors, memory) for row in rows],
    }


def _turns(rows: Sequence[Row], floor: Any, arrays: Sequence[Any], rounds: int | None, seconds: float) -> list[float]:
    """Fills the rows' milliseconds. Returns the floor's."""
    steps = [floor, *(row.step for row in rows)]
    repeats = [max(1, round(1e3 * _SECONDS_A_TURN / max(_milliseconds(step, arrays, 1), 1e-3))) for step in steps]
    floors: list[float] = []
    begin = time.monotonic()
    for turn in range(rounds or _measure.MOST_ROUNDS):
        if rounds is None and turn >= _measure.LEAST_ROUNDS and time.monotonic() - begin > seconds:
            break
        floors.append(_milliseconds(floor, arrays, repeats[0]))
        order = list(zip(rows, repeats[1:], strict=True))
        for row, count in order if turn % 2 else reversed(order):
            row.milliseconds.append(_milliseconds(row.step, arrays, count))
    return floors


def _entry(row: Row, rows: Sequence[Row], floors: Sequence[float], memory: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"ms": None, "ms_min": None, "ms_max": None, "spread": None}
    found |= _measure.summary(row.milliseconds) if row.milliseconds else {}
    ms, own = found["ms"], rows[0].milliseconds
    plain = next((each.errors for each in rows if each.contender.key == "optax"), {})
    return {
        "compare": row.contender.key,
        "name": row.contender.name,
        "version": version_of(row.contender.package),
        "status": row.status,
        "reason": row.reason,
        **found,
        "rounds": len(row.milliseconds),
        "to_floor": ms / statistics.median(floors) if ms else None,
        "to_flce": ms / statistics.median(own) if ms and own else None,
        "memory_bytes": row.memory_bytes if memory else None,
        "memory_reason": "",
        "errors": row.errors,
        "errors_to_torch": {name: error / plain[name] for name, error in row.errors.items() if plain.get(name)},
    }
