"""Does the steps of a page's Dockerfile without docker: image.py PAGE CONTEXT WORK_DIR ENVIRONMENT

A stage is a folder, in which absolute paths of the file lie, with a copy of ENVIRONMENT as its Python. COPY copies as docker's does: of a
folder its contents. CONTEXT is filled with what the steps take from a project of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pages import only_block

TRAIN = """import torch, flce
hidden, weight = torch.randn(4, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
flce.linear_cross_entropy(hidden, weight, torch.randint(0, 1000, (4,))).backward()
counted = flce.cache_statistics()
assert counted["compiled"] == 0 and counted["tiers"]["packs"]["hits"] > 0, counted
"""
CONFIG = {"hidden_size": 128, "vocab_size": 512, "dtype": "float32", "tie_word_embeddings": False, "model_type": "qwen3"}
MANIFEST = {"specs": ["D=64,V=1000,dtype=fp32"], "hf_configs": ["models/qwen3/config.json"], "devices": ["cpu", "sm_80"]}


def fill(context: Path) -> None:
    (context / "models/qwen3").mkdir(parents=True)
    (context / "models/qwen3/config.json").write_text(json.dumps(CONFIG))
    (context / "kernels.json").write_text(json.dumps(MANIFEST))
    (context / "train.py").write_text(TRAIN)


class Stage:
    def __init__(self, root: Path, environment: Path) -> None:
        self.root = root
        (root / "tmp").mkdir(parents=True)
        shutil.copytree(environment, root / "venv", symlinks=True)
        for script in (root / "venv/bin").glob("pip*"):  # their first line is the interpreter's path
            script.write_text(script.read_text().replace(str(environment), str(root / "venv")))
        self.variables = {"PATH": f"{root / 'venv/bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(root / "venv")}

    def inside(self, text: str) -> str:
        """The text with absolute paths of the stage."""
        text = re.sub(r"(^|[\s\"'=(:])/(?=[a-z])", rf"\g<1>{self.root}/", text)
        return re.sub(r"\bfind / ", f"find {self.root} ", text)

    def run(self, command: str) -> None:
        subprocess.run(["bash", "-euc", command], cwd=self.root, env=os.environ | self.variables, check=True)

    def copy(self, sources: list[Path], to: str, mode: str | None) -> None:
        target = Path(self.inside(to))
        if to.endswith("/") or len(sources) > 1:
            target.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            copied = Path(shutil.copy(source, target))
            if mode:
                copied.chmod(int(mode, 8))


def act(dockerfile: str, context: Path, work: Path, environment: Path) -> None:
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    lines = [line for line in dockerfile.split("\n") if not line.lstrip().startswith("#")]
    for step in re.sub(r"\\\n\s*", "", "\n".join(lines)).split("\n"):
        word, _, rest = step.partition(" ")
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            stage = stages[name] = Stage(work / name, environment)
            continue
        if not word:
            continue
        assert stage is not None, step
        print(step, flush=True)
        if word == "RUN":
            stage.run(stage.inside(rest))
        elif word == "COPY":
            flags = dict(flag[2:].split("=", 1) for flag in rest.split() if flag.startswith("--"))
            *names, to = [name for name in rest.split() if not name.startswith("--")]
            origin = stages[flags["from"]].root if "from" in flags else context
            sources = [path for name in names for path in origin.glob(name.lstrip("/"))]
            assert len(sources) >= len(names), f"{step}: nothing is there"
            stage.copy(sources, to, flags.get("chmod"))
        elif word == "ENV":
            stage.variables |= dict(pair.split("=", 1) for pair in stage.inside(rest).split())
        elif word == "CMD":
            arguments = [stage.inside(argument) for argument in json.loads(rest)]
            subprocess.run(arguments, cwd="/", env=os.environ | stage.variables, check=True)
        else:
            raise SystemExit(f"{step}: a step that image.py does not know")


if __name__ == "__main__":
    page, context, work, environment = (Path(argument) for argument in sys.argv[1:])
    fill(context)
    act(only_block(page, "dockerfile"), context, work, environment)
