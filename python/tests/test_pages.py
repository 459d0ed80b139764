"""The code blocks of README.md, CONTRIBUTING.md and docs/ run, as they stand there.

Blocks of a page share one namespace or folder and run in order. pages/<page>.py and pages/<page>.sh have what a block takes for granted,
in cells `# %% <heading>` that run before the first block under it; the cell before all others runs first. A cell may say what is smaller
here: `# instead of 151936 -> 1009`. In Python it is so on a CPU alone, in commands everywhere. `make X` looks whether there is such a
target, and `pip install .` whether there is such an extra: tests/ways does what they and `python -m build` do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flce
from flce import _command

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests/ways"))
import pages

pytestmark = pytest.mark.full
CELLS = Path(__file__).parent / "pages"
SHELL = """
set -euo pipefail
make() { command make -C "$ROOT" -n "$@" >make.log; }
python() { [[ $* == "-m build"* ]] || command python "$@"; }
pip() {
    [[ ${2:-} == .* ]] || return 0
    (cd "$ROOT" && python -m pip install --no-deps --no-build-isolation --dry-run "$2") >pip.log 2>&1 || { cat pip.log >&2; return 1; }
    ! grep 'does not provide' pip.log >&2
}
"""


# Pages whose commands take a quarter of a minute and more: they start a process for each kernel set, contender or stage.
LONG = {"cache", "comparing", "engine", "prewarm", "tuning"}


def pages_with(language: str) -> list[Any]:
    found = [page for page in pages.PAGES if any(block.language == language for block in pages.blocks(page))]
    long = LONG if language == "sh" else set()
    if language == "python":
        found = [page for page in found if page.stem != "jax"]  # test_jax_page.py runs these, where jax is
    return [pytest.param(page, id=page.stem, marks=pytest.mark.nightly if page.stem in long else ()) for page in found]


class Cells:
    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        first, *rest = re.split(r"^# %% (.*)\n", text, flags=re.MULTILINE)
        self.texts = {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
        self.unused = set(self.texts) - {""}

    def take(self, heading: str) -> str:
        """The code to run before a block under this heading: once."""
        here = heading in self.unused
        self.unused.discard(heading)
        return self.texts[heading] if here else ""

    def smaller(self, text: str, heading: str) -> str:
        for there, here in re.findall(r"^# instead of (.*) -> (.*)$", self.texts[""] + self.texts.get(heading, ""), re.MULTILINE):
            text = text.replace(there, here)
        return text


def blocks_of(page: Path, language: str) -> list[pages.Block]:
    return [block for block in pages.blocks(page) if block.language == language and not block.not_run]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(page, device, tmp_path, monkeypatch)


def run_python(page: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(pages.ROOT / "examples"), str(CELLS)])
    cells = Cells(CELLS / f"{page.stem}.py")
    names: dict[str, Any] = {"__name__": "__page__", "device": device, "flce": flce}
    try:
        exec(compile(cells.texts[""], f"pages/{page.stem}.py", "exec"), names)
        for block in blocks_of(page, "python"):
            exec(compile(cells.take(block.heading), f"pages/{page.stem}.py, {block.heading}", "exec"), names)
            text = cells.smaller(block.text, block.heading)
            if device == "cpu":
                text = text.replace('"cuda"', '"cpu"').replace(".cuda()", "")
            # Lines are those of the page.
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
    finally:
        names.get("close", lambda: None)()
    assert not cells.unused, f"{page.stem} has no block under these headings"


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_run(page: Path, tmp_path: Path) -> None:
    cells = Cells(CELLS / f"{page.stem}.sh")
    parts = [SHELL, cells.texts[""]]
    for block in blocks_of(page, "sh"):
        parts += [cells.take(block.heading), f"# {block}", cells.smaller(block.text, block.heading)]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("python", sys.executable), ("flce", _command.path()), ("flce-shard-checkpoint", "")):
        run = command or f"{sys.executable} -m flce.engine._shard_command"
        (programs / name).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        (programs / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if not re.match("FLCE_(CACHE|RECORDS|STRICT|NO_)", name)}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "ROOT": str(pages.ROOT), "PAGES": str(CELLS)}
    environment |= {"FLCE_CACHE_DIR": str(tmp_path / "cache"), "FLCE_RECORDS_DIR": str(tmp_path / "records")}
    script = "\n".join(parts) + "\n"
    ran = subprocess.run(["bash", "-xc", script], cwd=work, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    assert not cells.unused, f"{page.stem} has no block under these headings"


def test_manifest_is_understood(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(pages.only_block(pages.ROOT / "docs/prewarm.md", "json"))
    (tmp_path / "layer.json").write_text('{"D": 64, "V": 500}')
    (tmp_path / "models/qwen3").mkdir(parents=True)
    (tmp_path / "models/qwen3/config.json").write_text('{"hidden_size": 64, "vocab_size": 500, "model_type": "qwen3"}')
    command = [_command.path(), "prewarm", "--manifest", tmp_path / "kernels.json", "--check", "--json"]
    ran = subprocess.run(command, env=os.environ | {"FLCE_CACHE_DIR": str(tmp_path / "cache")}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert {missing["device"] for missing in json.loads(ran.stdout)["missing"]} == {"sm_90a", "NVIDIA A100"}


def test_every_block_is_of_a_kind_that_runs() -> None:
    every = [block for page in pages.PAGES for block in pages.blocks(page)]
    unknown = [str(block) for block in every if block.language not in pages.LANGUAGES]
    assert not unknown, f"neither commands nor a drawing, and not fenced with one of {pages.LANGUAGES}: {unknown}"
    left_out = [f"{block}: {block.not_run}" for block in every if block.not_run]
    print("not run:", *left_out, sep="\n")
    assert len(left_out) == 9, left_out  # a small number: a block that needs something is given it in pages/


def test_blocks_are_found_as_they_are_marked(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    fenced = "# A\n\n<!-- not run: a reason -->\n```python\nx = 1\n```\n\n"
    page.write_text(fenced + "    A=1 flce info\n\n    flce ls\n\n## B\n\n    x = 1\n\n    a ─▶ b\n")
    found = [(block.line, block.heading, block.language, block.text, block.not_run) for block in pages.blocks(page)]
    assert found[:2] == [(5, "A", "python", "x = 1", "a reason"), (8, "A", "sh", "A=1 flce info\n\nflce ls", None)]
    assert found[2:] == [(14, "B", "text", "x = 1\n\na ─▶ b", None)]
