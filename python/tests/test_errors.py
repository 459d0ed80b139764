"""Every refusal: its type, and that it names the argument and what is allowed."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import make_problem
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flce
from flce import errors
from flce.call import _arguments
from flce.core import _native
from flce.trl import _own

pytestmark = pytest.mark.first_and_direct


def call(device: str = "cpu", **changes: Any) -> Any:
    problem = make_problem(device)
    arguments: dict[str, Any] = {"hidden": problem.hidden, "weight": problem.weight, "target": problem.target} | changes
    return flce.linear_cross_entropy(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("target"), **arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hidden": torch.zeros(37, 32)}, flce.ShapeError, r"hidden has shape \[37, 32\].*hidden_size, 24"),
        ({"hidden": torch.zeros(())}, flce.ShapeError, r"hidden has shape \[\]; its last dimension must be weight's hidden_size, 24"),
        ({"hidden": torch.zeros(36, 24)}, flce.ShapeError, r"target has shape \[37\].*\[36\]"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.float64)}, flce.DTypeError, r"hidden has dtype torch.float64; allowed"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.long)}, flce.DTypeError, r"hidden has dtype"),
        ({"weight": torch.zeros(24)}, flce.ShapeError, r"weight has shape \[24\].*vocab_size, hidden_size"),
        ({"weight": torch.zeros(101, 24, dtype=torch.bfloat16)}, flce.DTypeError, r"weight has dtype torch.bfloat16.*float32"),
        ({"weight": torch.zeros(101, 24, device="meta")}, flce.PlacementError, r"weight is on meta.*hidden's device, cpu"),
        ({"weight": torch.zeros(1, 24)}, flce.SpecError, r"V"),
        ({"target": torch.zeros(37, dtype=torch.long, device="meta")}, flce.PlacementError, r"target is on meta.*hidden's device, cpu"),
        ({"target": torch.zeros(37)}, flce.DTypeError, r"target has dtype torch.float32; allowed are int64 and int32"),
        ({"bias": torch.zeros(100)}, flce.ShapeError, r"bias has shape \[100\].*\[101\]"),
        ({"bias": torch.zeros(101, dtype=torch.long)}, flce.DTypeError, r"bias has dtype"),
        ({"class_weight": torch.zeros(3)}, flce.ShapeError, r"class_weight has shape"),
        ({"class_offset": torch.zeros(3)}, flce.ShapeError, r"class_offset has shape"),
        ({"class_weight": torch.zeros(101, requires_grad=True)}, flce.ArgumentError, r"class_weight requires a gradient"),
        ({"hidden": [[0.0] * 24] * 37}, flce.DTypeError, r"hidden is a list; it must be a tensor"),
        ({"target": None}, flce.DTypeError, r"target is a NoneType; it must be a tensor"),
        ({"bias": [0.0] * 101}, flce.DTypeError, r"bias is a list; it must be a tensor"),
        (
            {"weight": torch.eye(101, 24).to_sparse()},
            flce.ArgumentError,
            r"weight is a tensor of layout torch.sparse_coo; it must be dense",
        ),
        ({"ignore_index": None}, flce.DTypeError, r"ignore_index is a NoneType; it must be an integer"),
        ({"ignore_index": 1.5}, flce.DTypeError, r"ignore_index is a float"),
        ({"ignore_index": 2**64}, flce.ArgumentError, r"ignore_index is 18446744073709551616; it must fit 64 bits"),
        ({"reduction": ["mean"]}, flce.ArgumentError, r"reduction is \['mean'\]"),
        ({"num_valid_tokens": "many"}, flce.DTypeError, r"num_valid_tokens is a str"),
        ({"num_valid_tokens": -1}, flce.ArgumentError, r"num_valid_tokens is -1.0; it must be a finite number of 0 or more"),
        ({"num_valid_tokens": torch.tensor(1j)}, flce.DTypeError, r"num_valid_tokens has dtype torch.complex64"),
        ({"shift": 1, "cu_seqlens": [0, 37]}, flce.DTypeError, r"cu_seqlens is a list"),
        ({"shift": 1, "cu_seqlens": torch.zeros(0, dtype=torch.long)}, flce.ArgumentError, r"cu_seqlens has shape \[0\]"),
        ({"workspace_limit_bytes": 2**64}, flce.ArgumentError, r"workspace_limit_bytes is 18446744073709551616"),
        ({"reduction": "average"}, flce.ArgumentError, r"reduction is 'average'; allowed are 'none', 'sum', 'mean'"),
        ({"num_valid_tokens": torch.ones(2)}, flce.ShapeError, r"num_valid_tokens has shape \[2\]"),
        ({"num_valid_tokens": torch.ones((), device="meta")}, flce.PlacementError, r"num_valid_tokens is on meta"),
        ({"num_valid_tokens": 3, "reduction": "sum"}, flce.ArgumentError, r"num_valid_tokens.*only 'mean'"),
        (
            {"num_valid_tokens": 3, "class_weight": torch.ones(101), "z_loss": 0.1},
            flce.ArgumentError,
            r"num_valid_tokens is given with class_weight and z_loss=0\.1: the mean divides",
        ),
        ({"shift": -1}, flce.ArgumentError, r"shift is -1"),
        ({"shift": 1, "cu_seqlens": torch.zeros(3)}, flce.ArgumentError, r"cu_seqlens has shape \[3\] and dtype"),
        ({"shift": 1, "cu_seqlens": torch.zeros(3, dtype=torch.long, device="meta")}, flce.PlacementError, r"cu_seqlens is on meta"),
        ({"softcap": -1.0}, flce.SpecError, r"softcap"),
        ({"softcap": torch.ones(())}, flce.DTypeError, r"softcap is a Tensor"),
        ({"label_smoothing": 1.5}, flce.SpecError, r"label_smoothing"),
        ({"z_loss": -0.1}, flce.SpecError, r"z_loss"),
        ({"logit_scale": 0.0}, flce.SpecError, r"logit_scale"),
        ({"workspace_limit_bytes": 0}, flce.ArgumentError, r"workspace_limit_bytes is 0"),
        ({"workspace_limit_bytes": 16}, flce.PlanError, r"16"),
        ({"workspace_limit_bytes": True}, flce.ArgumentError, r"workspace_limit_bytes is True"),
        ({"retain_in_grad_weight": 1}, flce.ArgumentError, r"retain_in_grad_weight is 1; allowed are True, False and None"),
        ({"grad_weight_out": torch.zeros(3, 24)}, flce.ShapeError, r"grad_weight_out has shape"),
        ({"grad_weight_out": torch.zeros(101, 24, dtype=torch.bfloat16)}, flce.DTypeError, r"grad_weight_out has dtype"),
        ({"grad_weight_out": torch.zeros(101, 24, requires_grad=True)}, flce.ArgumentError, r"grad_weight_out requires a gradient"),
        (
            {"grad_weight_out": torch.zeros(24, 101).t()},
            flce.ArgumentError,
            r"grad_weight_out has strides \[1, 101\]; they must be \[24, 1\]",
        ),
    ],
)
def test_bad_argument(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, flce.FlceError)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"ignore_index": 1}, {"ignore_index": 1.0}),
        ({"ignore_index": True}, {"ignore_index": 1.0}),
        ({"ignore_index": 1}, {"ignore_index": Decimal(1)}),
        ({"retain_in_grad_weight": True}, {"retain_in_grad_weight": 1}),
        ({"retain_in_grad_weight": False}, {"retain_in_grad_weight": 0.0}),
        ({"workspace_limit_bytes": 1 << 30}, {"workspace_limit_bytes": 2.0**30}),
        ({"softcap": 30.0}, {"softcap": Decimal(30)}),
        ({"logit_scale": 2.0}, {"logit_scale": 2 + 0j}),
        ({"label_smoothing": 0.5}, {"label_smoothing": Decimal("0.5")}),
        ({"z_loss": 1.0}, {"z_loss": Decimal(1)}),
    ],
    ids=str,
)
def test_equal_values_of_other_types_stay_refused(good: dict[str, Any], bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(flce.ArgumentError, match=f"{name} is "):
        call(**bad)
    problem = make_problem("cpu", ignored=0.0)
    for _ in range(4):  # remembered, then direct
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **good)
    with pytest.raises(flce.ArgumentError, match=f"{name} is "):
        flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, **bad)


def test_documented_bases() -> None:
    assert issubclass(flce.ArgumentError, ValueError)
    assert issubclass(flce.DTypeError, TypeError)
    assert issubclass(flce.LabelError, IndexError)
    assert issubclass(flce.UnavailableError, ImportError)
    assert issubclass(flce.UnsupportedTransformError, NotImplementedError)


def every_error() -> list[Exception]:
    """One of each class, those of adapters too."""
    more: dict[str, tuple[Any, ...]] = {"PlanMismatchError": ({"a": [0], "b": [1, 2]},), "PipelineError": (3,), "LabelError": (5,)}
    kinds = [
        kind for module in (errors, _own) for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, flce.FlceError)
    ]
    return [kind("said", *more.get(kind.__name__, ())) for kind in kinds]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_goes_through_a_process_pool(error: Exception) -> None:
    """Errors come back unchanged, with attributes and notes, and so does a copy."""
    error.add_note("in rank 3") if hasattr(error, "add_note") else None
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), pickle.loads(pickle.dumps(error, protocol=1))):
        assert type(again) is type(error) and str(again) == "said" and again.args == error.args and vars(again) == vars(error)


def label_out_of_range() -> None:
    flce.linear_cross_entropy(torch.ones(4, 8), torch.ones(11, 8), torch.tensor([0, 1, 11, 2]))
    flce.check_labels()


@pytest.mark.full
@pytest.mark.another_process
def test_a_label_error_of_a_worker_reaches_its_parent() -> None:
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        pytest.raises(flce.LabelError, match=r"target\[2\]") as caught,
    ):
        pool.submit(label_out_of_range).result(timeout=300)
    assert caught.value.row == 2


def test_a_transposed_weight_is_said_to_be_one() -> None:
    with pytest.raises(flce.ShapeError, match=r"weight has shape \[24, 101\], which looks transposed: give weight\.t\(\)"):
        call(weight=torch.zeros(24, 101))
    with pytest.raises(flce.ShapeError) as caught:
        call(weight=torch.zeros(101, 25))
    assert "transposed" not in str(caught.value)


def test_what_a_head_is_called_with() -> None:
    head = flce.FusedLMHead(24, 101, bias=False)
    problem = make_problem("cpu")
    for name in ("shift", "ignore_index", "bias", "colour"):
        with pytest.raises(flce.ArgumentError, match=rf"{name} is given with labels; a call's are .*softcap"):
            head(problem.hidden, labels=problem.target, **{name: 0})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((1,), torch.int32), ((1, 1), torch.float32), ((1, 1, 1), torch.float64), ((), torch.bfloat16)],
    ids=str,
)
def test_a_count_is_any_tensor_of_one_element(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    problem = make_problem(device)
    given = (problem.hidden, problem.weight, problem.target)
    loss = flce.linear_cross_entropy(*given, num_valid_tokens=torch.full(shape, 7, dtype=dtype, device=device))
    right = flce.linear_cross_entropy(*given, num_valid_tokens=7)
    assert torch.equal(loss, right)
    assert torch.equal(torch.autograd.grad(loss, problem.hidden)[0], torch.autograd.grad(right, problem.hidden)[0])


HIDDEN, WEIGHT, TARGET = torch.zeros(2, 3, 16), torch.zeros(20, 16), torch.zeros(2, 3, dtype=torch.int64)
LAYER = {"hidden_size": 16, "vocab_size": 20, "dtype": "fp32", "device": "cpu"}
TEACHER = {"teacher_ids": TARGET[..., None], "teacher_probs": torch.ones(2, 3, 1)}
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (flce.linear_cross_entropy, {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET}),
    (flce.linear_logprobs, {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET}),
    (flce.linear_topk_distillation, {"hidden": HIDDEN, "weight": WEIGHT, **TEACHER}),
    (flce.shift_labels, {"labels": TARGET}),
    (flce.get_kernel, LAYER),
    (flce.explain, LAYER),
    (flce.warmup, {"layers": [LAYER], "num_tokens": 8}),
    (flce.plan_digest, {"kernels": []}),
    (flce.check_same_plans, {"kernels": []}),
    (flce.missing, {"specs": "D=16,V=20,dtype=fp32", "devices": ["x86-64-v3"]}),
]


@pytest.mark.parametrize(("function", "given"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_arguments_of_another_kind_are_refused_by_flce(function: Callable[..., Any], given: dict[str, Any], tmp_path: Path) -> None:
    """Each in turn; what is taken is another test's."""
    given = given | ({"cache_dir": tmp_path} if function is flce.missing else {})
    for name in inspect.signature(function).parameters.keys() - {"layer"}:
        for value in (None, "x", 3.5, -1, [], torch.zeros(2), object()):
            with contextlib.suppress(flce.FlceError):
                function(**{**given, name: value})


def test_unsupported_device() -> None:
    with pytest.raises(flce.PlacementError, match="device is meta; allowed are cpu and cuda"):
        flce.get_kernel(8, 11, torch.float32, device="meta")
    with FakeTensorMode(), pytest.raises(flce.PlacementError, match="hidden is on xpu:0; allowed are cpu and cuda"):
        shapes = {"hidden": (4, 8), "weight": (11, 8), "target": (4,)}
        hidden, weight, target = (torch.zeros(shape, device="xpu:0") for shape in shapes.values())
        flce.linear_cross_entropy(hidden, weight, target.long())


def test_meta_tensors_give_shapes() -> None:
    hidden, weight = torch.zeros(2, 3, 8, device="meta"), torch.zeros(11, 8, device="meta")
    target = torch.zeros(2, 3, dtype=torch.long, device="meta")
    loss, lse = flce.linear_cross_entropy(hidden, weight, target, return_lse=True, shift=1)
    assert (loss.shape, lse.shape) == ((), (2, 3))


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transform_of_torch_func(device: str, transform: str) -> None:
    problem = make_problem(device)

    def loss(hidden: Tensor) -> Any:
        return flce.linear_cross_entropy(hidden, problem.weight, problem.target)

    hidden = problem.hidden.detach()
    with pytest.raises(flce.UnsupportedTransformError, match="vmap"):
        if transform == "vmap":
            torch.func.vmap(loss)(hidden.expand(2, *hidden.shape))
        elif transform == "grad":
            torch.func.grad(loss)(hidden)
        else:
            torch.func.jvp(loss, (hidden,), (torch.ones_like(hidden),))


def test_vmap_of_the_operator(device: str) -> None:
    problem = make_problem(device)
    hidden = problem.hidden.detach().expand(2, 37, 24)

    def operator(one: Tensor) -> Any:
        return torch.ops.flce.linear_cross_entropy(one, problem.weight.detach(), problem.target, None, None, None, "", -100, 2, 0)

    with pytest.raises(flce.UnsupportedTransformError, match="vmap"):
        torch.func.vmap(operator)(hidden)


def test_batched_upstream_gradients(device: str) -> None:
    problem = make_problem(device, num_tokens=8)
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction="none")
    with pytest.raises(flce.UnsupportedTransformError, match="cannot be batched"):
        torch.autograd.grad(loss, problem.hidden, torch.eye(8, device=device), is_grads_batched=True)


def test_forward_mode(device: str) -> None:
    problem = make_problem(device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(problem.hidden, torch.ones_like(problem.hidden))
        with pytest.raises(flce.UnsupportedTransformError, match="forward-mode"):
            flce.linear_cross_entropy(dual, problem.weight, problem.target)


@pytest.mark.parametrize("dispatched", [False, True])
def test_second_derivative(device: str, dispatched: bool) -> None:
    problem = make_problem(device)
    if dispatched:
        loss = torch.ops.flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target, None, None, None, "", -100, 2, 0)[0]
    else:
        loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    plain = torch.autograd.grad(loss, problem.hidden, retain_graph=True)[0]
    gradient = torch.autograd.grad(loss, problem.hidden, create_graph=True)[0]  # allowed: nobody has differentiated it yet
    assert torch.equal(gradient, plain)
    with pytest.raises(flce.UnsupportedTransformError, match="no second derivatives"):
        gradient.square().sum().backward()


def test_label_out_of_range_is_ignored_and_reported(device: str) -> None:
    problem = make_problem(device, ignored=0.0)
    flce.check_labels()
    problem.target[20] = 101
    problem.target[9] = -7
    loss = flce.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    loss.backward()
    with pytest.raises(flce.LabelError, match=r"target\[9\].*labels are 0 to 100.*shift_labels makes of labels") as caught:
        flce.check_labels()
    assert caught.value.row == 9
    flce.check_labels()  # reported once
    as_ignored = problem.target.clone()
    as_ignored[[9, 20]] = -100
    assert torch.equal(loss, flce.linear_cross_entropy(problem.hidden, problem.weight, as_ignored))
    flce.check_labels()


def test_sharded_tensor(tmp_path: Path) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        problem = make_problem("cpu")
        weight = distribute_tensor(problem.weight.detach(), mesh, [Shard(0)])
        with pytest.raises(flce.PlacementError, match=r"weight is a DTensor with placements \[Shard\(dim=0\)\].*full_tensor"):
            flce.linear_cross_entropy(problem.hidden, weight, problem.target)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.another_process
def test_missing_library_is_said_where_it_is_needed() -> None:
    code = (
        "import flce, torch\n"
        "try:\n"
        "    flce.linear_cross_entropy(torch.zeros(4, 8), torch.zeros(11, 8), torch.zeros(4, dtype=torch.long))\n"
        "except flce.UnavailableError as error:\n"
        "    print(error)\n"
    )
    environment = os.environ | {"FLCE_LIBRARY": "/nonexistent/libflce.so"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "/nonexistent/libflce.so" in result.stdout
    assert "FLCE_LIBRARY" in result.stdout


def test_a_missing_library_keeps_no_calls_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_library", None)
    monkeypatch.setattr(_native, "_load_error", "libflce cannot be loaded")
    held = []

    def call_in_vain() -> None:
        tensor = torch.zeros(4)
        held.append(weakref.ref(tensor))
        with pytest.raises(flce.UnavailableError, match="cannot be loaded"):
            _native.library()

    for _ in range(3):
        call_in_vain()
    gc.collect()
    assert not any(of_call() is not None for of_call in held)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int flce_abi_version(void) { return 1; }", "has ABI version 1; this package needs"),
        ("int another_library;", "is not libflce"),
    ],
)
def test_library_of_another_abi_is_refused(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libflce.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    monkeypatch.setenv("FLCE_LIBRARY", str(library))
    with pytest.raises(flce.UnavailableError, match=message):
        _native._load()


@pytest.mark.another_process
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FLCE_LIBRARY", b"/nonexistent/\xff.so"),
        pytest.param("FLCE_NUM_THREADS", b"\xff", marks=pytest.mark.nightly),
        pytest.param("FLCE_SIGNING_KEY", b"/nonexistent/\xff.pem", marks=pytest.mark.nightly),
        pytest.param("FLCE_CACHE_REMOTE", b"ftp://\xff", marks=pytest.mark.nightly),
    ],
)
def test_a_name_that_is_no_utf8_is_shown(variable: str, value: bytes) -> None:
    code = "import flce\ntry:\n    flce.get_kernel(8, 11, 'fp32', device='cpu')\nexcept flce.UnavailableError as error:\n    print(error)\n"
    environment = os.environb | {variable.encode(): value, b"PYTHONIOENCODING": b"utf-8"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert value.decode(errors="backslashreplace") in result.stdout


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_gradient_buffer_in_an_inputs_memory(device: str, name: str) -> None:
    whole = torch.zeros(101 + 37, 24, device=device)
    hidden, weight = whole[:37], whole[37:]
    buffer = whole[: weight.shape[0]] if name == "hidden" else weight.detach()
    target = torch.zeros(37, dtype=torch.long, device=device)
    if name == "hidden":
        weight = weight.clone()
    with pytest.raises(flce.ArgumentError, match=rf"grad_weight_out shares memory with {name}"):
        flce.linear_cross_entropy(hidden, weight.requires_grad_(), target, grad_weight_out=buffer)


@pytest.mark.parametrize("name", ["softcap", "temperature", "num_valid_tokens"])
def test_any_real_number_is_taken(name: str) -> None:
    assert torch.equal(call(**{name: Fraction(5, 2)}), call(**{name: 2.5}))


def test_a_number_of_tokens_beside_class_weights_is_the_divisor_of_cross_entropies() -> None:
    class_weight = torch.rand(101)
    added = call(class_weight=class_weight, reduction="sum")
    torch.testing.assert_close(call(class_weight=class_weight, num_valid_tokens=4), added / 4)


LAYER_TENSORS = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET}
WHOLE: dict[str, dict[str, Tensor]] = {  # tensors of a call that may not lie over ranks, by its function's name
    "linear_cross_entropy": {**LAYER_TENSORS, "bias": torch.zeros(20), "class_weight": torch.ones(20), "class_offset": torch.ones(20)},
    "linear_topk_distillation": {**LAYER_TENSORS, **TEACHER},
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, given in WHOLE.items() for name in given])
def test_a_tensor_that_lies_over_ranks_is_refused_without_a_group(function: str, name: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = WHOLE[function]
        over_ranks = DTensor.from_local(given[name], init_device_mesh("cpu", (1,)))
        with pytest.raises(flce.PlacementError, match=f"{name} is a DTensor"):
            getattr(flce, function)(**{**given, name: over_ranks})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_zero3_has_not_gathered_is_refused(name: str) -> None:
    given = {"weight": WEIGHT, "bias": torch.zeros(20)}
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_status, parameter.ds_shape = "NOT_AVAILABLE", given[name].shape
    with pytest.raises(flce.PlacementError, match=rf"{name} is a parameter \[20.*ZeRO-3.*ds_status NOT_AVAILABLE"):
        flce.linear_cross_entropy(HIDDEN, target=TARGET, **{**given, name: parameter})


def test_hidden_states_of_sequence_parallel_are_a_part_of_the_targets_tokens() -> None:
    hidden, target = torch.zeros(2, 3, 16), torch.zeros(4, 3, dtype=torch.int64)
    _arguments.check_shapes(hidden, WEIGHT, target, sequence_ranks=2)
    _arguments.check_shapes(hidden[:, 0], WEIGHT, target[:, 0], sequence_ranks=2)
    with pytest.raises(flce.ShapeError, match=r"target has shape \[2, 3\]; with sequence_parallel over 2 ranks .* it must be \[4, 3\]"):
        _arguments.check_shapes(hidden, WEIGHT, target[:2], sequence_ranks=2)
    with pytest.raises(flce.ShapeError, match=r"hidden has shape \[16\]; with sequence_parallel over 2 ranks it must be"):
        _arguments.check_shapes(hidden[0, 0], WEIGHT, target[0, 0], sequence_ranks=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_said_by_flce() -> None:
    for ask in (lambda: flce.explain(64, 1000, device="cuda"), lambda: flce.get_kernel(64, 1000, device="cuda:0")):
        with pytest.raises(flce.UnavailableError, match="torch sees no GPU here"):
            ask()


def test_the_abi_version_is_one_number() -> None:
    root = Path(__file__).resolve().parents[2]
    number = _native.ABI_VERSION
    for page, says in (
        ("runtime/include/flce/flce.h", f"#define FLCE_ABI_VERSION {number}\n"),
        ("docs/versions.md", f"| ABI version, {number} |"),
        ("CHANGELOG.md", f"ABI version {number})"),
    ):
        assert says in (root / page).read_text(encoding="utf-8"), page
