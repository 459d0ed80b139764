"""TRL's trainers on flce's kernels: `patch` puts flce where TRL computes an output layer's log-probabilities, `unpatch` takes it back.

TRL >= 1.15 gives models a fused head (`trl.trainer.utils.add_fused_lm_head`). SFTTrainer, DPOTrainer, GRPOTrainer, RLOOTrainer, KTOTrainer
and the experimental AsyncGRPOTrainer compute their losses from that head's numbers for a token: log-probability, entropy, log Σp², mean
logit, and whether the label is the likeliest token. All of it comes from one function of TRL's, ChunkedLogProbFunction, in whose place
flce's is put. DistillationTrainer (TRL >= 1.16) has another, ChunkedDivergenceFunction, of two models' heads, and the experimental
AsyncDistillationTrainer one for a teacher's likeliest tokens, `_chunked_jsd_loss`; both are replaced as well. The experimental GKDTrainer
computes its divergence from whole logits, in a method, `compute_loss`, in whose place flce's is put.

These parts stay TRL's own:

- users of the model's logits: `compute_loss_func`, label smoothing, `compute_metrics`, and the experimental trainers A2PO, CPO, GOLD,
  IW-OPD, Online DPO, ORPO, SDFT, SDPO, ServerDistillation and TPO;
- a reward model's head, which has no vocabulary.
"""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

from flce import errors
from flce.core import _locks, _native
from flce.trl import _divergence, _gkd, _own
from flce.trl._divergence import ChunkedDivergenceFunction
from flce.trl._log_probs import ChunkedLogProbFunction
from flce.trl._own import TemperatureError, calls

__all__ = ["ChunkedDivergenceFunction", "ChunkedLogProbFunction", "Patched", "TemperatureError", "calls", "patch", "unpatch"]

_lock = _locks.new_lock()
_stand_ins = (
    (_own.LOG_PROBS, ChunkedLogProbFunction),
    (_own.TWO_HEADS, ChunkedDivergenceFunction),
    (_own.DIVERGENCE, _divergence.chunked_jsd_loss),
    (_own.GKD, _gkd.compute_loss),
)
_places: set[tuple[Any, str]] = set()  # names of modules and classes that hold a stand-in; empty: TRL is not patched


class Patched:
    """Handle that `patch` returns. `with flce.trl.patch():` unpatches at its end, unless TRL was patched before it began."""

    def __init__(self, made: bool) -> None:
        self._made = made

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._made:
            unpatch()

    def __repr__(self) -> str:
        return f"flce.trl.patch(): {len(_places)} names of TRL, {calls()}"


def patch(*modules: ModuleType) -> Patched:
    """Has TRL's trainers compute log-probabilities, entropies and losses with flce: those that exist already, and those made later.

    Every name in TRL's modules that holds ChunkedLogProbFunction gets flce's; `modules` are others, of your own, that imported it by name.
    AsyncDistillationTrainer's function and GKDTrainer's method are replaced where these trainers have been imported; after a later import
    call patch once more. Called again it changes nothing else. Losses and gradients are TRL's to rounding; logits of 16-bit models are not
    rounded. Any thread may call it: a call of the output layer that runs meanwhile ends with the function that it began with.

    Returns an object for `with`, at whose end TRL is as it was. Raises UnavailableError without TRL >= 1.15 or without libflce,
    ArgumentError for a TRL whose function has another form, DTypeError for what is no module. Nothing has changed then.
    """
    for module in modules:
        if not isinstance(module, ModuleType):
            raise errors.DTypeError(f"modules has a {type(module).__name__}; it takes modules that imported TRL's functions by name")
    with _lock:
        _native.library()
        found = [(place, place.own(), stand_in) for place, stand_in in _stand_ins]
        made = not _places
        for place, own, stand_in in found:
            if own is not None:
                for holder in {*_own.modules_of_trl(), *modules, *place.holders()}:
                    _replace(holder, own, stand_in)
        return Patched(made)


def unpatch() -> None:
    """Takes `patch` back, in modules imported since then as well. Modules that are not patched stay as they are."""
    with _lock:
        for place, stand_in in _stand_ins:
            for holder in {*_own.modules_of_trl(), *(holder for holder, _ in _places)}:
                _replace(holder, stand_in, place.known)
        _places.clear()


def _replace(holder: Any, old: object, new: object) -> None:
    for name in [name for name, value in list(vars(holder).items()) if value is old]:
        setattr(holder, name, new)
        _places.add((holder, name))
