"""Stand-ins for losses that training code already calls: each has its peer's names, signature and results, and flce's kernels.

from flce.compat.liger import LigerFusedLinearCrossEntropyLoss

No peer is imported, and a module here is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flce.compat import cce, liger, prime_rl, quack, sentence_transformers, skyrl, torch, torchtune, verl

__all__ = ["cce", "liger", "prime_rl", "quack", "sentence_transformers", "skyrl", "torch", "torchtune", "verl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"flce.compat.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
