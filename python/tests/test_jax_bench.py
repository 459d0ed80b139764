"""flce.bench with JAX: every contender right at a small shape, and what it refuses."""

from __future__ import annotations

import jax_cases  # noqa: F401  # devices of a CPU, before jax makes its own
import pytest

import flce
from flce import errors

SMALL = {"framework": "jax", "num_tokens": 96, "hidden_size": 32, "vocab_size": 200, "device": "cpu", "rounds": 1}


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "logit_scale": 0.5, "ignored": 0.3}, {"frozen": "weight"}, {"pass_": "forward"}])
def test_everyone_is_right(options: dict[str, object]) -> None:
    result = flce.bench.compare(**SMALL, **options)
    (shape,) = result["shapes"]
    rows = {row["name"]: row for row in shape["rows"]}
    levanter = rows.pop("Levanter, XLA")
    assert levanter["status"] == "skipped" and levanter["reason"]
    assert len(rows) == 5 and {row["status"] for row in rows.values()} == {"ok"}, rows
    wanted = {"loss"} | (set() if "pass_" in options else {"grad_hidden"} | (set() if "frozen" in options else {"grad_weight"}))
    for row in rows.values():
        assert row["errors"].keys() == wanted and max(row["errors"].values()) < 1e-4
        assert row["ms"] > 0 and row["memory_bytes"] >= 0
    assert "floor: " in flce.bench.table(result) and ", XLA" in flce.bench.table(result)


def test_refusals() -> None:
    for options, text in (
        ({"compare": ["liger"]}, "allowed with jax are optax, maxtext, levanter"),
        ({"bias": True}, "bias is given with jax"),
        ({"workspace_limits": [1 << 30]}, "its variants are fixed"),
        ({"framework": "tensorflow"}, "framework is 'tensorflow'"),
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            flce.bench.compare(**(SMALL | options))
