"""Workers as forks of one process: their output, exit codes and limits are those of a process of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(dict(os.environ), modules=("json", "no_such_module"))
    yield made
    made.end()


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_output_arguments_and_modules(server: Server, tmp_path: Path) -> None:
    text = "import os, sys\nprint(__name__, sys.argv[1:], 'json' in sys.modules, os.getcwd())\nprint('said', file=sys.stderr)"
    result = server.run([script(tmp_path, text), "2,4"], timeout=30)
    assert result.returncode == 0
    assert result.stdout == f"__main__ ['2,4'] True {os.getcwd()}\n"
    assert result.stderr == "said\n"


def has_ended(pid: int) -> bool:
    """Whether a process has ended. A zombie, which waits to be adopted, counts, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_exit_codes(server: Server, tmp_path: Path, text: str, code: int, says: str) -> None:
    result = server.run([script(tmp_path, text)], timeout=30)
    assert result.returncode == code
    assert says in result.stderr
    assert server.run([script(tmp_path, "print('next')")], timeout=30).stdout == "next\n"


def test_a_worker_that_takes_too_long_is_ended_with_its_ranks(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    text = f"import os, time\nif os.fork() == 0:\n    open({str(path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired):
        server.run([script(tmp_path, text)], timeout=2)
    assert not server.lives()
    until = time.monotonic() + 30
    while not has_ended(int(path.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)
