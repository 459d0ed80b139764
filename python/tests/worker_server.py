"""Workers that are forks of one process, which has imported torch, transformers and flce: that takes a core 20 s, and each worker would
take them again. One server serves a pytest process, one worker at a time."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

#: modules that most workers import; nothing here computes or starts a thread, since threads are not forked
PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._dynamo.aot_compile",
    "torch._inductor.compile_fx",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "flce.engine",
)


class Server:
    """A process that forks workers; it has imported `modules`, those that there are."""

    def __init__(self, environment: dict[str, str], modules: tuple[str, ...] = PRELOADED) -> None:
        self._environment = environment
        command = [sys.executable, __file__, *modules]
        # A session of its own, so that a worker that takes too long is ended with all that it has forked.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def lives(self) -> bool:
        return self._process.poll() is None

    def fits(self, environment: dict[str, str]) -> bool:
        """Libraries read some variables when they are imported."""
        return environment == self._environment

    def run(self, arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS...`. Raises subprocess.TimeoutExpired after `timeout` seconds; the server has then ended."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            code = self._code(arguments, out, err, timeout)
            return subprocess.CompletedProcess(arguments, code, Path(out.name).read_text(), Path(err.name).read_text())

    def _code(self, arguments: list[str], out: IO[bytes], err: IO[bytes], timeout: float) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps({"arguments": arguments, "directory": os.getcwd(), "out": out.name, "err": err.name}), file=stdin, flush=True)
        if not select.select([stdout], [], [], timeout)[0]:
            self.end()
            raise subprocess.TimeoutExpired(arguments, timeout)
        reply = stdout.readline()
        return int(reply) if reply else self._process.wait() or 1

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_servers: list[Server] = []


def run(arguments: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS...`, a script of this directory, in a fork, or by itself where the environment is not the first one's. Raises
    subprocess.TimeoutExpired after `timeout` seconds."""
    if _servers and not _servers[0].lives():
        _servers.clear()
    if not _servers:
        _servers.append(Server(environment))
        atexit.register(_servers[0].end)
    if _servers[0].fits(environment):
        return _servers[0].run(arguments, timeout)
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def _forked(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for descriptor, name in ((1, "out"), (2, "err")):
        with Path(request[name]).open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    code = 1
    try:
        os.chdir(request["directory"])
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an import's prints are no reply
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(_forked(json.loads(line)), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
