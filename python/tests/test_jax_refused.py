"""flce.jax: arguments that are refused, labels out of range, and environments that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
import pytest
from jax_cases import plain

import flce.jax as fj
from flce import errors
from flce.budget import MemoryBudget


def test_arguments_are_refused_by_name() -> None:
    case = cases.case()
    hidden, weight, labels = case.hidden, case.weight, case.labels
    loss = fj.linear_cross_entropy
    refused: list[tuple[type[Exception], str, Any]] = [
        (errors.ShapeError, "weight_layout='hidden_major'", lambda: loss(hidden, weight.T, labels)),
        (errors.ShapeError, r"labels has shape \[36\]", lambda: loss(hidden, weight, labels[1:])),
        (errors.ShapeError, "bias has shape", lambda: loss(hidden, weight, labels, bias=case.bias[1:])),
        (errors.ShapeError, "temperature has shape", lambda: loss(hidden, weight, labels, temperature=case.temperature[1:])),
        (errors.ShapeError, "token_weight has shape", lambda: loss(hidden, weight, labels, token_weight=case.token_weight[1:])),
        (errors.DTypeError, "labels has dtype float32", lambda: loss(hidden, weight, labels * 1.0)),
        (errors.DTypeError, "hidden has dtype int32", lambda: loss(labels, weight, labels)),
        (errors.DTypeError, "weight has dtype bfloat16", lambda: loss(hidden, weight.astype(jnp.bfloat16), labels)),
        (errors.DTypeError, "float8_e4m3fn.*dequantise the weight", lambda: loss(hidden, weight.astype(jnp.float8_e4m3fn), labels)),
        (errors.DTypeError, "weight is a str", lambda: loss(hidden, "weight", labels)),
        (errors.ArgumentError, "weight_layout is 'auto'", lambda: loss(hidden, weight, labels, weight_layout="auto")),
        (errors.ArgumentError, "reduction is 'max'", lambda: loss(hidden, weight, labels, reduction="max")),
        (errors.ArgumentError, "token_weight is None", lambda: loss(hidden, weight, labels, reduction="weighted_mean")),
        (errors.ArgumentError, "temperature is 0.0", lambda: loss(hidden, weight, labels, temperature=0.0)),
        (errors.ArgumentError, "workspace_limit_bytes is -1", lambda: loss(hidden, weight, labels, workspace_limit_bytes=-1)),
        (
            errors.ArgumentError,
            "workspace_limit_bytes is a MemoryBudget",
            lambda: loss(hidden, weight, labels, workspace_limit_bytes=MemoryBudget(1 << 30)),
        ),
        (errors.ArgumentError, "axis_name is 'x'", lambda: loss(hidden, weight, labels, axis_name="x")),
        (errors.ArgumentError, "ignore_index is 2147483648", lambda: loss(hidden, weight, labels, ignore_index=2**31)),
        (errors.ArgumentError, "ignore_index is None", lambda: loss(hidden, weight, labels, ignore_index=None, shift=1)),
        (errors.ArgumentError, "beyond int32", lambda: loss(hidden, weight, np.full(37, 2**32 + 3))),
        (errors.DTypeError, "labels is None", lambda: loss(hidden, weight, None)),
        (errors.DTypeError, "hidden is None", lambda: loss(None, weight, labels)),
        (errors.DTypeError, "labels is a list", lambda: loss(hidden, weight, [[1, 2], [3]])),
        (errors.DTypeError, "return_lse is 'no'", lambda: loss(hidden, weight, labels, return_lse="no")),
        (errors.DTypeError, "token_weight has dtype complex64", lambda: loss(hidden, weight, labels, token_weight=1j * case.token_weight)),
        (errors.ArgumentError, "temperature is 1000", lambda: loss(hidden, weight, labels, temperature=10**400)),
        (errors.ArgumentError, "num_valid_tokens is -3", lambda: loss(hidden, weight, labels, num_valid_tokens=-3)),
        (errors.ArgumentError, "num_valid_tokens is nan", lambda: loss(hidden, weight, labels, num_valid_tokens=float("nan"))),
        (
            errors.ArgumentError,
            "there is none here",
            lambda: jax.vmap(lambda h: loss(h, weight, labels, axis_name="x"), axis_name="x")(hidden[None]),
        ),
        (errors.SpecError, "label_smoothing", lambda: loss(hidden, weight, labels, label_smoothing=2.0)),
        (errors.PlanError, "too small", lambda: loss(hidden, weight, labels, workspace_limit_bytes=100)),
        (errors.ShapeError, "ids has shape", lambda: fj.linear_logprobs_at(hidden, weight, labels)),
        (
            errors.ArgumentError,
            r"stop_gradient\(temperature\)",
            lambda: jax.grad(lambda t: loss(hidden, weight, labels, temperature=t))(2.0),
        ),
        (
            errors.UnsupportedTransformError,
            "no second derivatives",
            lambda: jax.grad(lambda h: (jax.grad(plain(case))(h, weight) ** 2).sum())(hidden),
        ),
        (TypeError, "forward-mode", lambda: jax.jvp(lambda h: loss(h, weight, labels), (hidden,), (hidden,))),
        (ValueError, "flce_forward", lambda: jax.export.export(jax.jit(plain(case)))(hidden, weight)),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def test_labels_out_of_range_are_told() -> None:
    case = cases.case()
    fj.check_labels()
    wrong = case.labels.at[5].set(301).at[9].set(-3)
    loss = fj.linear_cross_entropy(case.hidden, case.weight, wrong)
    assert loss == fj.linear_cross_entropy(case.hidden, case.weight, case.labels.at[5].set(-100).at[9].set(-100))
    with pytest.raises(errors.LabelError, match=r"labels\[5\]") as caught:
        fj.check_labels()
    assert caught.value.row == 5
    fj.check_labels()  # once
    # Kernels' faults are told one a check.
    for options in ({"softcap": 3.0}, {"softcap": 3.0, "z_loss": 1e-3}):
        fj.linear_cross_entropy(case.hidden, case.weight, wrong, **options)
    for _ in range(2):
        with pytest.raises(errors.LabelError):
            fj.check_labels()
    fj.check_labels()


def test_one_token_and_none() -> None:
    case = cases.case((2, 5))
    one = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels[1, 1], return_lse=True)[0]  # noqa: E731
    right = lambda hidden: fj.linear_cross_entropy(hidden, case.weight, case.labels[1:, 1])  # noqa: E731
    assert one(case.hidden[1, 1]) == right(case.hidden[1:, 1])
    assert jnp.array_equal(jax.grad(one)(case.hidden[1, 1]), jax.grad(right)(case.hidden[1:, 1])[0])
    for shift in (0, 1):
        none = lambda weight: fj.linear_cross_entropy(case.hidden[:, :0], weight, case.labels[:, :0], shift=shift)  # noqa: B023, E731
        loss, gradient = jax.value_and_grad(none)(case.weight)
        assert loss == 0 and not gradient.any()


@pytest.mark.nightly
def test_more_kernels_than_words() -> None:
    """Faults of kernels beyond the thousandth share a word. In a process of its own, whose kernels they are."""
    program = """
import flce, flce.jax, jax.numpy as jnp
from flce.jax import _library
for tokens in range(1, 1100):
    _library.kernel(_library.CPU, "D=16,V=40,dtype=fp32", 1 << 28, tokens)
flce.jax.linear_cross_entropy(jnp.ones((9, 16)), jnp.ones((40, 16)), jnp.full(9, 40), workspace_limit_bytes=1 << 29)
try:
    flce.jax.check_labels()
except flce.LabelError as error:
    assert "labels[0]" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_strict_mode_and_one_cache_with_torch(tmp_path: Path) -> None:
    """A kernel that torch's call has compiled is there for JAX's of the same layer; another is a miss that names the command."""
    environment = os.environ | {"FLCE_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    of_torch = """
import torch, flce
hidden, weight = torch.ones(4, 72, requires_grad=True), torch.ones(91, 72)
flce.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), softcap=9.0).backward()
"""
    of_jax = """
import jax, flce.jax, jax.numpy as jnp
hidden, weight, labels = jnp.ones((4, 72)), jnp.ones((91, 72)), jnp.zeros(4, jnp.int32)
print(jax.grad(lambda h: flce.jax.linear_cross_entropy(h, weight, labels, softcap=9.0))(hidden).shape)
try:
    flce.jax.linear_cross_entropy(hidden, weight, labels, z_loss=1e-3)
except flce.CacheMissError as error:
    print(error)
"""
    for program, strict in ((of_torch, "0"), (of_jax, "1")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment | {"FLCE_STRICT": strict}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    shape, miss = done.stdout.strip().split("\n")
    assert shape == "(4, 72)" and "flce prewarm --spec 'D=72,V=91,dtype=fp32,z_loss=0.001' --device " in miss


def test_a_library_that_was_built_without_xlas_headers(tmp_path: Path) -> None:
    (tmp_path / "libflce.so").symlink_to(Path(os.environ["FLCE_LIBRARY"]).resolve())
    program = """
import flce.jax, jax.numpy as jnp
try:
    flce.jax.linear_cross_entropy(jnp.ones((3, 8)), jnp.ones((5, 8)), jnp.zeros(3, jnp.int32))
except flce.UnavailableError as error:
    assert "FLCE_XLA_INCLUDE" in str(error), error
else:
    raise SystemExit("no error")
"""
    environment = os.environ | {"FLCE_LIBRARY": str(tmp_path / "libflce.so")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_torch_and_without_jax() -> None:
    """Each stands alone: flce.jax where torch is not installed, and the rest of the package without jax."""
    of_jax = """
        import sys
        sys.modules["torch"] = None
        import flce, flce.jax, jax.numpy as jnp
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()  # jax.distributed.initialize may come later
        assert flce.jax.linear_cross_entropy(jnp.ones((3, 8)), jnp.ones((5, 8)), jnp.zeros(3, jnp.int32)) > 0
        try:
            flce.linear_cross_entropy
        except AttributeError as error:
            assert "needs torch" in str(error) and "flce.jax" in str(error), error
        else:
            sys.exit("no error")
        import pydoc
        assert "ArgumentError" in pydoc.render_doc(flce) and "engine" not in dir(flce) and not hasattr(flce, "engine")
        names = {}
        exec("from flce import *", names)
        assert "ArgumentError" in names
    """
    of_torch = """
        import sys
        import flce, torch
        flce.linear_cross_entropy(torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3, dtype=torch.int64))
        assert "jax" not in sys.modules and "flce.jax" not in sys.modules
    """
    for program in (of_jax, of_torch):
        text = "\n".join(line.removeprefix("        ") for line in program.split("\n"))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
