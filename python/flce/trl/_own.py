"""TRL's own functions: looked at before flce stands in for them, called where flce does not compute a layer."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call._checks import DTYPES, OLDEST_GPU
from flce.core import _locks
from flce.core._once import say_once

OLDEST = (1, 15)  # the oldest TRL that is taken
TESTED = "1.16.0"
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_UTILS = "trl.trainer.utils"

_lock = _locks.new_lock()
_calls: Counter[str] = Counter()


class TemperatureError(errors.SpecError, ZeroDivisionError):
    """A temperature of 0, by which TRL's own functions divide."""


class Place:
    """A function of TRL's that flce stands in for."""

    def __init__(
        self,
        module: str,
        name: str,
        parameters: str,
        *,
        experimental: bool = False,
        since: tuple[int, int] = OLDEST,
        of_head: bool = False,
        of_class: str | None = None,
        forms: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.name, self.parameters = module, name, parameters.split()
        self.experimental = experimental  # only where TRL's user has imported it; another form than the expected is left alone
        self.since = since  # the oldest TRL that has it
        self.of_head = of_head  # the fused head's function
        self.of_class = of_class  # the class whose method it is
        self.forms = forms or {}  # `form_of` this method and of others of the class that it calls, whose arithmetic is known
        self.known: Any = None

    def holders(self) -> list[Any]:
        """Owners of the function under its name, beside modules that import it."""
        return [] if self.of_class is None or self.known is None else [getattr(sys.modules[self.module], self.of_class)]

    def own(self) -> Any:
        """The function. None where the module of an experimental one is not imported or has another form, and in a TRL before it. Raises
        UnavailableError without TRL or with one that is too old, ArgumentError where the function is not the one that is stood in for."""
        if self.known is None:
            with _lock:
                if self.known is None:
                    version = trl_version()
                    if _numbers_of(version) < self.since:
                        return None
                    self.known = self._experimental() if self.experimental else self._checked(version)
        return self.known

    def _experimental(self) -> Any:
        if self.module not in sys.modules:
            return None
        try:
            return self._checked(trl_version())
        except errors.ArgumentError as error:
            say_once(f"flce.trl: {error}")
            return None

    def _checked(self, version: str) -> Any:
        try:
            module, utils = importlib.import_module(self.module), importlib.import_module(_UTILS)
        except ImportError as error:
            raise errors.UnavailableError(f"TRL {version}'s fused head cannot be imported: {error}") from error
        holder: Any = module if self.of_class is None else getattr(module, self.of_class, None)
        own = getattr(holder, self.name, None)
        found = [] if own is None else [*inspect.signature(getattr(own, "forward", own)).parameters]
        expected = [*(["ctx"] if isinstance(own, type) else []), *self.parameters]
        if found != expected:
            taken = ", ".join(found) or "nothing"
            raise _not_this_trl(version, f"{self.module}.{self.name} takes {taken}; {', '.join(expected)} are expected")
        for name, form in self.forms.items():
            if form_of(getattr(holder, name, None)) != form:
                raise _not_this_trl(version, f"{self.module}.{self.of_class}.{name} has another body than that of {TESTED}")
        if self.of_head:
            optional = tuple(getattr(module, "OPTIONAL_OUTPUTS", ()))
            if optional != OPTIONAL_OUTPUTS:
                raise _not_this_trl(version, f"{self.module}.OPTIONAL_OUTPUTS is {optional}; {OPTIONAL_OUTPUTS} is expected")
            if not any(value is own for value in vars(utils).values()):
                raise _not_this_trl(version, f"{_UTILS} has no name for {self.name}, which add_fused_lm_head is to call")
        return own


LOG_PROBS = Place(
    "trl.kernels.chunked_logprob",
    "ChunkedLogProbFunction",
    "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs",
    of_head=True,
)
TWO_HEADS = Place(
    "trl.kernels.chunked_divergence",
    "ChunkedDivergenceFunction",
    "student_hidden student_weight student_bias teacher_hidden teacher_weight teacher_bias beta temperature student_logit_scale "
    "student_final_logit_softcapping teacher_logit_scale teacher_final_logit_softcapping",
    since=(1, 16),
)
DIVERGENCE = Place(
    "trl.experimental.async_distillation.async_distillation_trainer",
    "_chunked_jsd_loss",
    "hidden_valid lm_head_weight lm_head_bias logit_scale final_logit_softcapping target_ids teacher_target_logps valid_candidate_mask "
    "beta temperature add_tail_bucket teacher_id_idx num_teachers chunk_size",
    experimental=True,
)
GKD = Place(
    "trl.experimental.gkd.gkd_trainer",
    "compute_loss",
    "self model inputs return_outputs num_items_in_batch",
    experimental=True,
    of_class="GKDTrainer",
    forms={"compute_loss": "c6ee977d486c476e", "generalized_jsd_loss": "20d14431bc7e956a"},
)


def form_of(function: Callable[..., Any] | None) -> str | None:
    """A digest of what a function's source does, without comments and its docstring; None where there is no source."""
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    if ast.get_docstring(tree.body[0]) is not None:
        del tree.body[0].body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def trl_version() -> str:
    """Raises UnavailableError without TRL, or with one that is too old."""
    try:
        version: str = importlib.import_module("trl").__version__
    except ImportError as error:
        raise errors.UnavailableError(f"flce.trl needs TRL, which cannot be imported: {error}. pip install 'trl>=1.15'") from error
    if _numbers_of(version) < OLDEST:
        raise errors.UnavailableError(
            f"TRL is {version}; flce.trl takes {'.'.join(map(str, OLDEST))} and newer, whose trainers have a fused head. Install one, or "
            "have the model compute its loss without logits with flce.patch(model)"
        )
    return version


def _numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _not_this_trl(version: str, difference: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"TRL {version} is not one that flce.trl knows: {difference}. TRL's own function stays in its place. Tested is {TESTED}"
    )


def modules_of_trl() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "trl" and isinstance(module, ModuleType)]


def check_temperature(temperature: Any) -> None:
    if isinstance(temperature, (int, float)) and temperature == 0:
        raise TemperatureError(f"temperature is {temperature}; it must be above 0. For greedy scores take is_top1")


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype in which TRL computes logits."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def as_read(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """`parameter` as flce takes it beside hidden states of `dtype`. An fp32 one stays: kernels round it as they read it. A tensor without a
    floating dtype, such as a quantised weight, stays as it is and is refused."""
    if parameter.dtype in (dtype, torch.float32) or parameter.dtype not in (*DTYPES, torch.float64):
        return parameter
    return parameter.to(dtype)


def computes(what: str, hidden: Tensor, weight: Tensor, numbers: dict[str, float | None], also: str | None = None) -> bool:
    """Whether flce computes this layer; if not, logs once why TRL's own function does. `numbers`: of the logits' formula, by name. `also`:
    another reason against it."""
    reason = why_own(hidden, weight, numbers) or also
    count(fused=reason is None)
    if reason is not None:
        say_once(f"flce.trl: TRL's own {what} computes this output layer: {reason}")
    return reason is None


def why_own(hidden: Tensor, weight: Tensor, numbers: dict[str, float | None]) -> str | None:
    if hasattr(weight, "ds_id"):
        return "its weight is divided by DeepSpeed's ZeRO-3, and TRL's function gathers it once more in backward"
    device = hidden.device
    if device.type not in ("cpu", "cuda"):
        return f"hidden states are on {device}, and flce computes on CPUs and CUDA devices"
    if compute_dtype(hidden) is torch.float64:
        return "hidden states are in torch.float64, and flce computes in float32, bfloat16 and float16"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)  # torch.compile reads these properties while it traces
        if (gpu.major, gpu.minor) < OLDEST_GPU:
            return f"{gpu.name} is older than sm_80"
    for name, number in numbers.items():
        if isinstance(number, (int, float)) and number == 0:
            return f"{name} is 0, which TRL gives a meaning of its own"
    return None


def calls() -> dict[str, int]:
    """How many calls of an output layer flce computed ("fused"), and how many it left to TRL's own function ("own"), since the process
    began. Calls inside torch.compile are not counted."""
    return {kind: _calls[kind] for kind in ("fused", "own")}


def count(*, fused: bool) -> None:
    if not torch.compiler.is_compiling():
        with _lock:
            _calls["fused" if fused else "own"] += 1
