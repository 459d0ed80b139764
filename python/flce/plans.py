"""One plan on every rank: `plan_digest`, and `check_same_plans` before the first step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from flce import errors
from flce.core import _kernels, _native
from flce.core._kernels import Kernel

_DIGEST_BYTES = 32


def plan_digest(kernels: Iterable[Kernel]) -> str:
    """SHA-256, 64 hexadecimal digits, of the specs and plans of `kernels` in any order, and of the version of the code they were generated
    by."""
    handles = [kernel._handle for kernel in _checked(kernels)]
    array = (ctypes.c_void_p * len(handles))(*(handle.value for handle in handles))
    return _native.text(_native.library().flce_plan_digest, array, len(handles))


def _checked(kernels: Any) -> list[Kernel]:
    several = list(kernels) if isinstance(kernels, Iterable) else [kernels]
    for each in several:
        if not isinstance(each, Kernel):
            raise errors.DTypeError(f"kernels has a {type(each).__name__}; it must be several flce.Kernel, as flce.warmup returns them")
    return several


def check_same_plans(kernels: Iterable[Kernel] | None = None, *, group: dist.ProcessGroup | None = None) -> str:
    """Compares the digest of `kernels` (None: all that this process has) between the ranks of `group`, and returns it. Every rank calls it,
    once its kernels are there (`flce.warmup`) and before the first step.

    Raises PlanMismatchError, on every rank alike, naming the ranks and their plans where one differs. Without torch.distributed there is
    nothing to compare with."""
    mine = list(_kernels.all_kernels() if kernels is None else _checked(kernels))
    digest = plan_digest(mine)
    if not (dist.is_available() and dist.is_initialized()):
        return digest
    world = dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    gathered = [torch.empty(_DIGEST_BYTES, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(gathered, own, group=group)
    digests = [bytes(other.tolist()).hex() for other in gathered]
    # All ranks have the same list, so all of them go on, or all of them go on to the next collective.
    if len(set(digests)) == 1:
        return digest
    plans: list[list[tuple[str, str]]] = [[] for _ in range(world)]
    dist.all_gather_object(plans, sorted({(kernel.spec, kernel.plan) for kernel in mine}), group=group)
    raise _mismatch(digests, plans)


def _mismatch(digests: list[str], plans: list[list[tuple[str, str]]]) -> errors.PlanMismatchError:
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    # Every rank is held against the largest group of ranks with one plan.
    most = max(ranks.values(), key=len)
    common = set(plans[most[0]])
    lines = [f"ranks would compute with different plans; {_named(most)}: {_listed(plans[most[0]])}"]
    for digest, others in ranks.items():
        if others is most:
            continue
        differing = [entry for entry in plans[others[0]] if entry not in common]
        missing = sorted({spec for spec, _ in common} - {spec for spec, _ in plans[others[0]]})
        text = _listed(differing) if differing else "the same plans of other kernels' versions" if not missing else ""
        if missing:
            text += f"{'; ' if text else ''}no kernel for {', '.join(missing)}"
        lines.append(f"{_named(others)} ({digest[:12]}): {text}")
    lines.append("give all ranks the same tuning records (FLCE_RECORDS_DIR), limits and version of flce")
    return errors.PlanMismatchError("\n".join(lines), ranks)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _listed(plans: list[tuple[str, str]]) -> str:
    return "; ".join(f"{spec} with {plan}" for spec, plan in plans) or "no kernels"
