"""The vocabulary over the ranks of a process group: what a caller says of it, and the collectives of a call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import has_torch_function

from flce import errors
from flce.core import checks
from flce.core._frame import Parallel
from flce.core._kernel_key import DTYPE_NAMES
from flce.parallel import _mailbox

if dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:  # nothing is one

    class ProcessGroup:  # type: ignore[no-redef]
        """A group of ranks."""

    class DeviceMesh:  # type: ignore[no-redef]
        """Ranks in several dimensions."""


# torch 2.13 has other names for these two, and warns of the old ones. A torch without distributed has neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def asked(
    process_group: Any = None,
    sequence_parallel: Any = False,
    vocab_start: Any = None,
    vocab_size: Any = None,
    reduce_dtype: Any = None,
    reduce_grad_hidden: Any = True,
) -> Parallel | None:
    """The ranks that a caller's arguments describe; None where the weight is whole. Raises ArgumentError, DTypeError."""
    unsaid = process_group is None and sequence_parallel is False and vocab_start is None and vocab_size is None and reduce_dtype is None
    if unsaid and reduce_grad_hidden is True:
        return None
    others = {"vocab_start": vocab_start, "vocab_size": vocab_size, "reduce_dtype": reduce_dtype}
    for name, flag in (("sequence_parallel", sequence_parallel), ("reduce_grad_hidden", reduce_grad_hidden)):
        checks.flag(name, flag)
    if process_group is None:
        flags = {"sequence_parallel": sequence_parallel or None, "reduce_grad_hidden": None if reduce_grad_hidden else False}
        for name, value in {**flags, **others}.items():
            if value is not None:
                raise errors.ArgumentError(f"{name} is given and process_group is None; it says how a weight lies over a group's ranks")
        return None
    group = group_of(process_group)
    for name in ("vocab_start", "vocab_size"):
        if others[name] is not None:
            checks.integer(name, others[name], 0, ", or None")
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype in DTYPE_NAMES):
        raise errors.DTypeError(f"reduce_dtype is {reduce_dtype!r}; allowed are torch.bfloat16, torch.float16, torch.float32 and None")
    if not reduce_grad_hidden:
        for name, value in (("sequence_parallel", sequence_parallel or None), ("reduce_dtype", reduce_dtype)):
            if value is not None:
                raise errors.ArgumentError(
                    f"{name} is {value!r} and reduce_grad_hidden is False; it says how the ranks' parts are added up"
                )
    start, size = (-1 if value is None else value for value in (vocab_start, vocab_size))
    return Parallel(group.size(), sequence_parallel, start, size, -1, reduce_dtype, reduce_grad_hidden, group.group_name)


def group_of(given: Any, name: str = "process_group") -> Any:
    """A ProcessGroup from what a caller has: one, or a DeviceMesh of one dimension."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ["unnamed"] * given.ndim
            raise errors.PlacementError(
                f"{name} is a DeviceMesh of dimensions {list(names)}; it must have one: take that of the tensor-parallel ranks, "
                "such as mesh['tp']"
            )
        if given.get_coordinate() is None:
            raise errors.PlacementError(f"process_group is a {given}, in which this rank is not; only its ranks make the call")
        given = given.get_group()
    if not isinstance(given, ProcessGroup):
        raise errors.ArgumentError(
            f"{name} is a {type(given).__name__}; it must be a torch.distributed ProcessGroup that this rank is in, or a DeviceMesh"
        )
    return given


# ── Between hosts ───────────────────────────────────

_hosts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # groups made by `_between_hosts`, by the caller's group
_mailboxes: weakref.WeakKeyDictionary[Any, _mailbox.Mailbox | None] = weakref.WeakKeyDictionary()  # by group; None: on several machines
_made: dict[str, int] = {}  # how many of a group's name


def told_by_hosts(group: Any, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Every rank's numbers of 64 bits, in the order of ranks; each rank gives equally many. Waits for the other ranks and for no device."""
    return tell_hosts(group, numbers)()


def tell_hosts(group: Any, numbers: Sequence[int]) -> Callable[[], list[tuple[int, ...]]]:
    """`told_by_hosts` in two steps: tells, and returns the function that waits for the others' numbers, to be called once."""
    if group not in _mailboxes:
        by_gloo = functools.partial(_told_by_gloo, group)
        made = _mailbox.open_between(by_gloo, group.rank(), group.size(), _timeout_of(group).total_seconds())
        if made is not None:
            weakref.finalize(group, made.leave)
        _mailboxes[group] = made
    mailbox = _mailboxes[group]
    return _begin_by_gloo(group, numbers) if mailbox is None or len(numbers) > _mailbox.MOST else mailbox.begin(numbers)


def _told_by_gloo(group: Any, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return _begin_by_gloo(group, numbers)()


def _begin_by_gloo(group: Any, numbers: Sequence[int]) -> Callable[[], list[tuple[int, ...]]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    everyone = mine.new_empty(group.size() * len(numbers))
    work = _between_hosts(group)._allgather_base(everyone, mine)

    def wait() -> list[tuple[int, ...]]:
        work.wait()
        return [tuple(one) for one in everyone.view(-1, len(numbers)).tolist()]

    return wait


def _between_hosts(group: Any) -> Any:
    """A group with collectives of the host's memory: `group`, or for one of NCCL's alone a gloo backend beside it, made at its first
    call."""
    if _has_host_memory(group):
        return group
    made = _hosts.get(group)
    if made is None:
        number = _made[group.group_name] = _made.get(group.group_name, 0) + 1
        store = dist.distributed_c10d.PrefixStore(f"flce/{group.group_name}/{number}", dist.distributed_c10d._get_default_store())
        made = _hosts[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), _timeout_of(group))
    return made


def _has_host_memory(group: Any) -> bool:
    return torch.device("cpu") in group._device_types


def _timeout_of(group: Any) -> Any:
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    return next((found._timeout for found in options if found is not None), dist.distributed_c10d.default_pg_timeout)


# ── Collectives ─────────────────────────────────────


def _made_once() -> Any:
    """Options for the two collectives of every step, so that these do without the Python of torch's functions: the name of a group's
    all-gather, its options on the current stream, and those of a sum that is waited for later. None where this torch has other names."""
    try:
        c10d: Any = dist.distributed_c10d
        gather, add = c10d.AllgatherOptions(), c10d.AllreduceOptions()
        gather.asyncOp, add.asyncOp, add.reduceOp = False, True, dist.ReduceOp.SUM
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"
        return (name, gather, add) if hasattr(ProcessGroup, name) and hasattr(c10d._world, "pg_coalesce_state") else None
    except AttributeError:
        return None


_OPTIONS = _made_once()


def _short_way(group: Any, tensor: Tensor) -> Any:
    """`_OPTIONS`; None where torch's own function has more to do: a function mode looks on, or a coalescing manager collects the calls."""
    if _OPTIONS is None or has_torch_function((tensor,)) or group in dist.distributed_c10d._world.pg_coalesce_state:
        return None
    return _OPTIONS


def gathered(group: Any, part: Tensor, ranks: int) -> Tensor:
    """All ranks' parts along dimension 0, in the order of ranks. On the current stream, where no other stream has to be waited for."""
    part = part.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    way = _short_way(group, part)
    if way is None:
        _all_gather(whole, part, group=group)
    elif (work := getattr(group, way[0])(whole, part, way[1])) is not None:
        work.wait()  # a backend that has not waited itself
    return whole


def start_gather(group: Any, part: Tensor, ranks: int) -> tuple[Tensor, Any]:
    """Starts to gather all ranks' parts along dimension 0. Returns them, and the work to wait for before they are read."""
    part = part.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    return whole, _all_gather(whole, part, group=group, async_op=True)


def start_sum(group: Any, gradient: Tensor, parallel: Parallel) -> tuple[Tensor, Any]:
    """Adds up the ranks' gradients [N, D], in place; with sequence parallel this rank's rows of the sum. Returns them, and the work to wait
    for before they are read."""
    if not parallel.sequence:
        way = _short_way(group, gradient)
        return gradient, dist.all_reduce(gradient, group=group, async_op=True) if way is None else group.allreduce([gradient], way[2])
    mine = gradient.new_empty((gradient.shape[0] // parallel.ranks, gradient.shape[1]))
    return mine, _reduce_scatter(mine, gradient, group=group, async_op=True)
