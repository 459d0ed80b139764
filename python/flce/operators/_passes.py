"""Passes of kernels whose calls are filled in by name: of a layer, or of this rank's part of one and the merge of all ranks'."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.core import _frame, _kernel_key, _kernels, _native
from flce.core._frame import Parallel, is_hidden_major
from flce.core._kernel_key import KernelKey
from flce.parallel import _layouts, _parallel

IGNORED = -100
Rule = tuple[int, int]  # ignore_index and reduction
_EACH: Rule = (IGNORED, _native.REDUCTION_NONE)
_OF_MERGE = ("target", "temperature", "token_weight", "num_valid", "teacher_ids", "teacher_probs")
SUMS, MIXTURE = 0, 1  # walks of a divergence over ranks, FLCE_WALK_...


class Codes(NamedTuple):
    """Form of a weight that is no numbers."""

    format: str  # e4m3 or nvfp4
    block: int  # rows and columns that have a scale; 0: a row has one, or a group


def codes_of(scale: Tensor | None, tensor_scale: Tensor | None) -> Codes | None:
    """The form of a weight with these scales; None for numbers."""
    if scale is None:
        return None
    return Codes("nvfp4", 0) if tensor_scale is not None else Codes("e4m3", 128 if scale.dim() == 2 else 0)


class Place(NamedTuple):
    """This rank's place among those that share a vocabulary."""

    parallel: Parallel
    group: Any
    shard: _layouts.Shard


def place_of(
    parallel: str,
    hidden: Tensor,
    weight: Tensor,
    of_tokens: dict[str, Tensor | None],
    options: str,
    there: Mapping[str, bool],
    *,
    backward: bool = False,
) -> Place | None:
    """None where the weight is whole. All ranks call at the same time; `options`, shapes, `of_tokens` and `there`, whether an argument is
    given, have to be the same on all."""
    given = Parallel.of_text(parallel)
    if given is None:
        return None
    group = given.resolved()
    given_there = ((f"whether {name} is given", is_there) for name, is_there in there.items())
    layer = (("hidden_size", hidden.shape[1]), ("hidden's dtype", str(hidden.dtype)), ("the options", options), *given_there)
    return Place(given, group, _layouts.shard_of(group, given, weight, of_tokens, layer, backward=backward))


def kernel_of(
    hidden: Tensor,
    weight: Tensor,
    options: str,
    workspace_limit_bytes: int,
    place: Place | None,
    *,
    bias: bool,
    temperature: bool,
    class_offset: bool = False,
    token_weight: bool = False,
    codes: Codes | None = None,
) -> _kernels.LoadedKernel:
    dtype = weight.dtype if codes is None else hidden.dtype
    key = KernelKey(
        device=hidden.device,
        hidden_size=hidden.shape[1],
        vocab_size=weight.shape[0],
        dtype=hidden.dtype,
        hidden_major=codes is None and is_hidden_major(weight),
        weight_dtype=dtype,
        grad_weight_dtype=dtype,
        accumulate=False,
        bias=bias,
        class_weight=False,
        class_offset=class_offset,
        class_groups=False,
        temperature=temperature,
        token_weight=token_weight,
        options=options,
        workspace_limit_bytes=workspace_limit_bytes,
        num_tokens=_kernel_key.planned_tokens(hidden.shape[0], workspace_limit_bytes),
        weight_format="" if codes is None else codes.format,
        weight_block=0 if codes is None else codes.block,
    )
    if place is not None:
        # A hidden-major weight's rows are as long as it has classes, so that ranks' kernels may differ.
        alone, shard = key.hidden_major, place.shard
        key = key._replace(
            vocab_size=max(shard.classes if alone else shard.most_classes, 1),
            padded_vocab_size=max(shard.rows if alone else shard.most_rows, 1),
            whole_vocab_size=shard.vocab_size,
        )
    return _kernels.find(key)


def as_read(tensors: Mapping[str, Tensor | None], weight: Tensor) -> dict[str, Tensor]:
    """Tensors by name, without gaps. A weight that is the view of a [D, V] is that."""
    hidden_major = is_hidden_major(weight)
    made = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            turned = hidden_major and name in ("weight", "teacher_weight")
            made[name] = _frame._aligned(tensor.t().contiguous() if turned else tensor.contiguous())
    return made


def run(kernel: _kernels.LoadedKernel, args: Any, function: Any, tensors: Mapping[str, Tensor], size: int, rule: Rule = _EACH) -> None:
    """One pass with these tensors, which lie without gaps but may be parts of others."""
    views = {name: _view(kernel, _frame.DTYPE_CODES[each.dtype], each.data_ptr(), tuple(each.shape)) for name, each in tensors.items()}
    args.struct_size, args.ignore_index, args.reduction = ctypes.sizeof(args), *rule
    for name, view in views.items():
        setattr(args, name, ctypes.addressof(view))
    kernel.run(function, ctypes.addressof(args), size)


def forward(
    kernel: _kernels.LoadedKernel,
    place: Place | None,
    read: dict[str, Tensor],
    written: dict[str, Tensor],
    *,
    retained: Tensor | None = None,
    lent: bool = False,
    walk: int = SUMS,
    rule: Rule = _EACH,
) -> None:
    """Forward, and over ranks the merge of all ranks' sums. A second walk reads what the first has written. `lent`: `retained` is memory of
    the weight's gradient."""
    num_tokens = read["target"].shape[0]
    args = _native.call_arguments().forward()
    _retain_in(args, retained, lent)
    word = _view(kernel, _native.UINT64, kernel.invalid_label.data_ptr(), ())
    size = kernel.workspace_bytes(num_tokens, backward=False)
    if place is None:
        args.invalid_label = ctypes.addressof(word)
        run(kernel, args, kernel.forward_function, read | written, size, rule)
        return
    args.vocab_start, args.walk = place.shard.vocab_start, walk
    fields = _native.partial_sum_fields(kernel._handle)
    mine = kernel.new_floats((fields, num_tokens))
    again = {name: each for name, each in written.items() if walk == MIXTURE and name.endswith("lse")}
    run(kernel, args, kernel.forward_function, read | again | {"partial_sums": mine}, size, rule)
    everyone = _parallel.gathered(place.group, mine, place.parallel.ranks)
    merge = _native.call_arguments().merge()
    merge.invalid_label, merge.walk = ctypes.addressof(word), walk
    of_merge = {name: read[name] for name in _OF_MERGE if name in read} | written | {"all_partial_sums": everyone}
    size = _native.workspace_bytes(kernel._handle, num_tokens, _native.MERGE)
    run(kernel, merge, kernel._library.flce_kernel_merge, of_merge, size, rule)


def _retain_in(args: Any, retained: Tensor | None, lent: bool) -> None:
    if retained is not None and retained.numel():
        args.retained, args.retained_bytes = retained.data_ptr(), retained.nbytes
        args.retained_place = _native.RETAINED_GRAD_WEIGHT if lent else _native.RETAINED_OWN


def backward(
    kernel: _kernels.LoadedKernel,
    place: Place | None,
    read: dict[str, Tensor],
    made: dict[str, Tensor],
    retained: Tensor | None,
    *,
    lent: bool = False,
    rule: Rule = _EACH,
) -> None:
    """Backward; over ranks grad_hidden is the sum of all ranks'. `lent`: forward's."""
    args = _native.call_arguments().backward()
    _retain_in(args, retained, lent)
    if place is not None:
        args.vocab_start = place.shard.vocab_start
    run(kernel, args, kernel.backward_function, read | made, kernel.workspace_bytes(read["target"].shape[0]), rule)
    if place is not None and "grad_hidden" in made:
        _parallel.start_sum(place.group, made["grad_hidden"], place.parallel)[1].wait()


def _view(kernel: _kernels.LoadedKernel, dtype: int, address: int, shape: tuple[int, ...]) -> _native.TensorView:
    on_gpu = kernel.key.device.type == "cuda"
    view = _native.TensorView()
    view.data, view.dtype, view.ndim = address, dtype, len(shape)
    view.rows, view.columns = (*shape, 0, 0)[:2]
    view.row_stride, view.column_stride = (view.columns if len(shape) == 2 else 1), 1
    view.device_type, view.device_index = (_native.CUDA if on_gpu else _native.CPU), kernel.key.device.index or 0
    return view


def define(schemas: Mapping[str, str], module: str, ways: Mapping[str, str]) -> bool:
    """Defines operators by name, with the functions `<way>_kernel` and `<way>_fake` of a module. Operators are the process's and stay, as
    `_op._define` has it; False where they are there."""
    if hasattr(torch.ops.flce, next(iter(schemas))):
        return False
    library = vars(torch.ops.flce)["_library"]
    for name, schema in schemas.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            library.impl(name, of_module(module, f"{ways[name]}_kernel"), key)
        torch.library.register_fake(f"flce::{name}", of_module(module, f"{ways[name]}_fake"), lib=library)
    return True


def of_module(module: str, name: str) -> Callable[..., Any]:
    """The function of this name that the module has when it is called."""

    def called(*args: Any, **named: Any) -> Any:
        return getattr(sys.modules[module], name)(*args, *named.values())

    return called
