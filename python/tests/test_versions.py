"""The numbers of docs/versions.md and CHANGELOG.md are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flce
from flce.bench import _compare
from flce.core import _native

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/versions.md").read_text(encoding="utf-8")


def number(file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"))
    assert found is not None, f"{pattern} in {file}"
    return found[1]


def test_versions_agree() -> None:
    version = flce.__version__
    assert number("pyproject.toml", r'\nversion = "(.*)"') == version
    assert number("CMakeLists.txt", r"project\(flce VERSION (\S+)") == version
    assert f"version, {version}" in PAGE and f"libflce.so.{version.split('.')[0]}`" in PAGE
    assert number("CHANGELOG.md", r"\n## \[(.*?)\]") == version


def test_abi_version_agrees() -> None:
    abi = number("runtime/include/flce/flce.h", r"#define FLCE_ABI_VERSION (\d+)")
    assert abi == str(_native.ABI_VERSION)
    assert f"ABI version, {abi} |" in PAGE
    assert f"ABI version {abi})" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("row", "file", "pattern"),
    [
        ("cache entries", "cache/artifact_format.hpp", r"kArtifactSchema = (\d+)"),
        ("packs", "cache/pack_format.hpp", r"kPackSchema = (\d+)"),
        ("tuning records (", "records/record_json.cpp", r"kSchema = (\d+)"),
    ],
)
def test_schemas_agree(row: str, file: str, pattern: str) -> None:
    assert re.search(rf"\| {re.escape(row)}.*? \| {number(file, pattern)} \|", PAGE)


def test_schema_of_comparisons_agrees() -> None:
    assert f"| JSON of `flce.bench` | {_compare.SCHEMA} (" in PAGE


@pytest.mark.parametrize(
    ("name", "file", "pattern"),
    [
        ("Python", "pyproject.toml", r"requires-python = .>=([0-9.]+)"),
        ("torch", "pyproject.toml", r"torch>=([0-9.]+)"),
    ],
)
def test_supported_versions_agree(name: str, file: str, pattern: str) -> None:
    assert f"| {name} | {number(file, pattern)} and newer" in PAGE


def test_supported_llvm_agrees() -> None:
    least = number("cmake/flce_dependencies.cmake", r"LLVM_VERSION_MAJOR LESS (\d+)")
    assert f"| LLVM | {least} and newer" in PAGE
