"""Uses of the package as a module by notebooks and tools: everything imported from it, listed, documented, imported a second time."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import flce


def run(program: str) -> None:
    """Runs a program in a process of its own, in which torchtitan is not installed."""
    before = "import sys; sys.modules |= dict.fromkeys(('torchtitan', 'spmd_types'))"
    done = subprocess.run([sys.executable, "-c", f"{before}\n{textwrap.dedent(program)}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_everything_is_listed_where_a_trainer_is_not_installed() -> None:
    run("""
        import inspect, pydoc, flce
        assert not hasattr(flce, "torchtitan") and hasattr(flce, "trl")
        assert {"linear_cross_entropy", "patch", "engine"} <= {name for name, _ in inspect.getmembers(flce)}
        assert "linear_cross_entropy" in pydoc.render_doc(flce)
        try:
            flce.torchtitan
        except AttributeError as error:
            assert "flce.torchtitan cannot be imported" in str(error) and isinstance(error.__cause__, ImportError)
        names = {}
        exec("from flce import *", names)
        assert set(flce.__all__) <= names.keys()
    """)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'linear'"):
        flce.linear  # noqa: B018


@pytest.mark.nightly
def test_imported_a_second_time() -> None:
    """Imports the package beside remains of the first import, and alone."""
    run("""
        import gc, torch, flce
        hidden, weight, target = torch.randn(6, 16, requires_grad=True), torch.randn(20, 16), torch.randint(0, 20, (6,))
        first, loss = flce, flce.linear_cross_entropy(hidden, weight, target)
        (right,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        for held in (True, False):
            for name in [name for name in sys.modules if name.split(".")[0] == "flce"]:
                del sys.modules[name]
            del flce
            gc.collect()
            import flce
            assert flce is not first
            compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
            for function in (flce.linear_cross_entropy, flce.linear_cross_entropy, compiled):
                (gradient,) = torch.autograd.grad(function(hidden, weight, target), hidden)
                assert torch.allclose(gradient, right)
            if held:
                assert torch.equal(torch.autograd.grad(loss, hidden)[0], right)
                first.linear_cross_entropy(hidden, weight, target).backward()
                first = loss = None
    """)


def private_names(text: str) -> list[str]:
    """Names of flce outside of flce.engine that begin with an underscore, in imports and behind `flce.`."""
    used: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            used += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            used += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            used.append(ast.unparse(node))
    ours = [name for name in used if name.startswith((".", "flce.")) and not name.startswith("flce.engine.")]
    return [name for name in ours if any(part.startswith("_") for part in name.split("."))]


def test_the_engine_uses_public_names_of_the_package() -> None:
    files = list((Path(flce.__file__).parent / "engine").glob("*.py"))
    assert {file.name: private_names(file.read_text()) for file in files} == {file.name: [] for file in files}
    for text in (
        "from flce.call._heads import weight_of",
        "from flce import _heads",
        "import flce.core._native",
        "flce.core._native.library()",
    ):
        assert private_names(text), text
    assert private_names("from .._heads import weight_of")


# ── Floors (docs/python-design.md) ──────────────────

FLOORS = (
    {"core", "errors", "budget", "fp8"},
    {"call"},
    {"parallel"},
    {"operators"},
    {"functional", "contrastive", "divergence", "topk", "loss", "lm_head", "pipeline", "kernels", "jobs", "plans", "jax", "_command"},
    {"adapters", "compat", "huggingface", "megatron", "torchtitan", "trl"},
    {"engine"},
    {"bench"},
)
TOP = {"", "__main__"}  # the package itself, which has names of every floor


def read_imports(package: Path) -> dict[str, set[str]]:
    """Modules of a package, and which of them each imports, in functions too. Imports for type checkers alone are left out."""
    files = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {module: {name for name in imported_by(file.read_text(), files) if name != module} for module, file in files.items()}


def imported_by(text: str, modules: Container[str]) -> Iterator[str]:
    tree = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            inside = name.removeprefix("flce").lstrip(".") if name.split(".")[0] == "flce" else None
            while inside is not None and inside not in modules:
                inside = inside.rpartition(".")[0]
            if inside is not None:
                yield inside


def floor_of(module: str) -> int:
    first = module.split(".")[0]
    return len(FLOORS) if first in TOP else next(number for number, floor in enumerate(FLOORS) if first in floor)


def upward(imports: dict[str, set[str]]) -> list[str]:
    # The package's own names are of every floor: the engine and adapters of trainers may have them, nothing below.
    return [
        f"{module} imports {name}"
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if floor_of(name) > floor_of(module) and not (name == "" and floor_of(module) >= floor_of("adapters"))
    ]


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, in order; empty where none do."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        found = [] if module in done else next(filter(None, (visit(name, [*way, module]) for name in sorted(imports[module] - {""}))), [])
        done.add(module)
        return found

    return next(filter(None, (visit(module, []) for module in sorted(imports))), [])


def test_floors_point_one_way() -> None:
    imports = read_imports(Path(flce.__file__).parent)
    assert upward(imports) == []
    assert circle(imports) == []
    imports["core._frame"].add("call._call")
    assert upward(imports) == ["core._frame imports call._call"]
    assert {"core._frame", "call._call"} <= set(circle(imports))
