"""The code blocks of docs/jax.md, as test_pages runs those of the other pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_pages


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_pages.run_python(test_pages.pages.ROOT / "docs" / "jax.md", "cpu", tmp_path, monkeypatch)
