#!/usr/bin/env python3
"""Puts faults into the Python code that guards everything else, one at a time, and counts those that a test finds.

    tools/python.sh tools/mutants/python.py check            python.toml says nothing of faults that are no more
    tools/python.sh tools/mutants/python.py list [PART…]     the faults
    tools/python.sh tools/mutants/python.py run [PART…]      the faults of these parts, or of all; FLCE_LIBRARY says with which libflce

Faults are made of a module's syntax tree: a comparison at its boundary or reversed, a condition dropped, `and` for `or`, a sign, a number
one off, two arguments swapped, a call left out, None returned. A fixed sample of a module's is taken. Each is tried on a copy of python/,
by a process that is forked from one that has torch in memory, on the tests that python.toml names.

Exit code 1: of a part fewer than nine of ten faults were found, one that is listed as changing nothing was found, or tests fail without a
fault.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("python.toml")
LEAST_SCORE = 0.9

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Fault:
    """A piece of a module's text and what takes its place."""

    where: str  # class and function
    begin: int
    end: int
    piece: str
    instead: str

    def name(self) -> str:
        return f"{self.where}: {' '.join(self.piece.split())} -> {' '.join(self.instead.split())}"


def replaced(node: ast.AST) -> Iterator[ast.AST | str]:
    """Replacements of a node, each a fault."""
    match node:
        case ast.Compare(left, [op], [right]):
            yield ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.Compare(left, ops, comparators):  # a chain: each of its conditions dropped
            yield ast.Compare(left, ops[:-1], comparators[:-1])
            yield ast.Compare(comparators[0], ops[1:], comparators[1:])
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for left_out in range(len(values)):
                rest = values[:left_out] + values[left_out + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(ast.USub(), operand):
            yield operand
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            yield ast.BinOp(left, OPERATIONS[type(op)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.Call(ast.Name("min" | "max"), [_, _]):
            pass
        case ast.Call(func, [first, second, *rest], keywords) if not any(isinstance(a, ast.Starred) for a in (first, second)):
            yield ast.Call(func, [second, first, *rest], keywords)
        case ast.Expr(ast.Call()):
            yield "pass"
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))


# Code that says rather than does: messages, types, documentation.
def passed_over(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(ast.Constant()):
            return True
        case ast.If(ast.Name("TYPE_CHECKING")):
            return True
    return False


def faults_of(text: str) -> list[Fault]:
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, Fault] = {}

    def add(node: Any, instead: ast.AST | str, where: str) -> None:
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        new = instead if isinstance(instead, str) else ast.unparse(ast.fix_missing_locations(instead))
        if isinstance(node, ast.expr):
            new = f"({new})"
        fault = Fault(where, begin, end, text.encode()[begin:end].decode(), new)
        found.setdefault(fault.name(), fault)

    def visit(node: ast.AST, where: str) -> None:
        if passed_over(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where = f"{where}.{node.name}".lstrip(".")
        if where and isinstance(node, ast.If):
            add(node.test, "False", where)
        if where:
            for instead in replaced(node):
                add(node, instead, where)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "op", "ops"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, where)

    visit(ast.parse(text), "")
    return list(found.values())


@dataclass
class Module:
    """A module, and what python.toml says of it."""

    part: str
    path: str
    tests: list[str]
    most: int
    left_out: list[str]  # parts of names of faults that are not tried
    equivalent: dict[str, str]  # names of faults that change nothing, and why

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    def sample(self) -> list[Fault]:
        """Draws faults, the same ones while the code about them is the same."""
        faults = [fault for fault in faults_of(self.text) if not any(word in fault.name() for word in self.left_out)]
        by_chance = sorted(faults, key=lambda fault: hashlib.sha256(fault.name().encode()).digest())
        return sorted(by_chance[: self.most], key=lambda fault: fault.begin)


def modules(parts: list[str]) -> list[Module]:
    listed = tomllib.loads(LIST.read_text())["module"]
    optional: dict[str, Any] = {"left_out": [], "equivalent": {}}
    return [Module(**(optional | module)) for module in listed if not parts or module["part"] in parts]


def check() -> int:
    wrong = 0
    for module in modules([]):
        there = {fault.name() for fault in module.sample()}
        for name in module.equivalent:
            if name not in there:
                print(f"{module.path}: python.toml tells of a fault that is no more, or not in the sample: {name}")
                wrong += 1
        print(f"{module.path}: {len(there)} of {len(faults_of(module.text))} faults")
    return 1 if wrong else 0


class Copy:
    """A copy of python/ in which one module at a time has a fault, beside the rest of the checkout, which tests read."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flce-faults-"))
        shutil.copytree(ROOT / "python", self.folder / "python")
        for beside in ROOT.iterdir():
            if beside.name not in ("python", ".git"):
                (self.folder / beside.name).symlink_to(beside)

    def passes(self, module: Module, fault: Fault | None, limit_s: float) -> bool:
        text = module.text.encode()
        at = self.folder / module.path
        try:
            if fault is not None:
                at.write_bytes(text[: fault.begin] + fault.instead.encode() + text[fault.end :])
            child = os.fork()
            if child == 0:
                status = 1
                try:  # after any outcome, this process goes no further
                    status = self._test(module)
                finally:
                    os._exit(status)
            return self._status(child, limit_s) == 0
        finally:
            at.write_bytes(text)

    def _test(self, module: Module) -> int:
        """Runs the tests in a process of its own."""
        os.setsid()
        os.chdir(self.folder)
        silent = os.open(os.devnull if "VERBOSE" not in os.environ else "/dev/stderr", os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        home = str(self.folder / "python")
        sys.path.insert(0, home)
        os.environ["PYTHONPATH"] = f"{home}:{os.environ.get('PYTHONPATH', '')}"
        os.environ.setdefault("FLCE_CACHE_DIR", str(self.folder / "kernels"))
        import pytest

        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *module.tests]))

    @staticmethod
    def _status(child: int, limit_s: float) -> int:
        """-1 where it takes too long."""
        end = time.monotonic() + limit_s
        status = -1
        while time.monotonic() < end:
            done, how = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(how)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what it started
        if status == -1:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        return status

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def run(parts: list[str]) -> int:
    import pytest  # noqa: F401  # in memory before the first fork
    import torch  # noqa: F401

    began = time.monotonic()
    jobs = int(os.environ.get("JOBS", os.cpu_count() or 1))
    copies: SimpleQueue[Copy] = SimpleQueue()
    for _ in range(jobs):
        copies.put(Copy())

    def passes(module: Module, fault: Fault | None, limit_s: float) -> bool:
        copy = copies.get()
        try:
            return copy.passes(module, fault, limit_s)
        finally:
            copies.put(copy)

    wrong = False
    scores: dict[str, list[int]] = {}  # for each part: found, out of how many, how many change nothing
    with ThreadPoolExecutor(jobs) as pool:
        for module in modules(parts):
            start = time.monotonic()
            if not passes(module, None, 600):
                print(f"{module.path} as it is: its tests do not pass: {' '.join(module.tests)}")
                return 1
            limit_s = 30 + 5 * (time.monotonic() - start)
            sample = module.sample()
            score = scores.setdefault(module.part, [0, 0, 0])
            results = pool.map(lambda fault, module=module, limit_s=limit_s: passes(module, fault, limit_s), sample)
            for fault, survives in zip(sample, results, strict=True):
                why = module.equivalent.get(fault.name())
                if why is None:
                    score[0] += not survives
                    score[1] += 1
                else:
                    score[2] += 1
                if survives and why is None:
                    print(f"not found: {module.path}: {fault.name()}", flush=True)
                elif not survives and why is not None:
                    wrong = True
                    print(f"found, though listed as one that changes nothing: {module.path}: {fault.name()}", flush=True)
            print(f"{module.path}: {time.monotonic() - start:.0f} s", flush=True)
    while not copies.empty():
        copies.get().close()
    for part, (found, of, equivalent) in scores.items():
        print(f"{part:<28} {found} of {of} found, {equivalent} change nothing")
        wrong = wrong or found < LEAST_SCORE * of
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    match sys.argv[1:]:
        case ["check"]:
            return check()
        case ["list", *parts]:
            for module in modules(parts):
                print(*(f"{module.path}: {fault.name()}" for fault in module.sample()), sep="\n")
            return 0
        case ["run", *parts]:
            return run(parts)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
