"""Pipelines of three ranks in which a stage fails in the second batch. The ranks are forks of this process, which imports once; torchrun
would end the others by itself. Prints, as JSON, how the engine of every rank ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from engine_support import ToyStage, batch_of, sft_loss
from torch import Tensor

import flce
from flce.engine import PackedBatch, PipelineEngine

RANKS = 3
# Event, stage, and whether this process keeps the store, as torchrun does; else rank 0 keeps it.
SCENARIOS = (("kill", 0, True), ("kill", 1, True), ("kill", 0, False), ("module", 1, True), ("backward", 1, True), ("loss", 2, True))


class Failing(ToyStage):
    what = ""

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "module":
            raise ValueError("no such layer")
        hidden = super().forward(x, batch)
        if self.what == "backward":
            hidden.register_hook(self.refuse)
        return hidden

    def refuse(self, gradient: Tensor) -> Tensor:
        raise ValueError("no such gradient")


def failing_loss(output: Any, packed_input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> Any:
    raise ValueError("no such loss")


def rank_of_a_pipeline(rank: int, what: str, where: int, answer: Any, gate: tuple[int, int]) -> None:
    os.close(gate[1])
    os.read(gate[0], 1)
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    stage = Failing(rank, RANKS)
    engine = PipelineEngine(stage, None, torch.optim.SGD(stage.parameters(), lr=0.1))
    ids, cu_seqlens = batch_of(0, [3, 4, 5, 6, 7])
    engine.train_batch(ids, cu_seqlens, sft_loss, labels=ids)
    stage.what = what if rank == where else ""
    said = []
    for _ in range(2):
        try:
            engine.train_batch(ids, cu_seqlens, failing_loss if what == "loss" else sft_loss, labels=ids)
        except flce.PipelineError as error:
            said.append((error.stage, str(error)))
    answer.send(said)
    os._exit(3)  # ends like a script that does not catch the error, without waiting for others


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def scenario(what: str, where: int, agent: bool) -> list[Any]:
    """Each rank's errors as [stage, message]; None for a rank that was killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent else None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port if store else free_port()), "WORLD_SIZE": str(RANKS)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
    fork = get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(RANKS)]
    gate = os.pipe()  # no rank begins before all are there, as in forked_ranks: the store's thread holds locks that a fork would keep
    ranks = [fork.Process(target=rank_of_a_pipeline, args=(rank, what, where, pipes[rank][1], gate)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for end in gate:
        os.close(end)
    for process in ranks:
        process.join(timeout=150)
        process.kill()
    return [receiver.recv() if receiver.poll() else None for receiver, _ in pipes]


if __name__ == "__main__":
    print(json.dumps([[*given, scenario(*given)] for given in SCENARIOS]))
    sys.stdout.flush()
    os._exit(0)
