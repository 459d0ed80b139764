"""Two ranks save and load together; run under torchrun by test_engine_checkpoint_ranks.py with a folder to write to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from rank_support import generator, run_main, run_named
from safetensors.torch import load_file
from torch import Tensor

from flce import errors
from flce.engine import (
    PipelineEngine,
    TrainingParts,
    causal_lm_stage,
    latest_step,
    load_stage,
    load_state,
    merge_checkpoint,
    save_stage,
    save_state,
)
from flce.engine._checkpoint_files import open_checkpoint

CLASSES = (transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel)  # imported here, and not on each rank
ROOT = Path(sys.argv[1])
LENGTHS = (5, 9, 3, 7, 4, 6)
_alone: list[Any] = []


def groups() -> Any:
    """A group of each rank's own: a pipeline of one stage. Every rank makes all of them."""
    if not _alone:
        _alone.extend(dist.new_group([rank]) for rank in range(2))
    return _alone[dist.get_rank()]


def config_of(*, dropout: float = 0.1) -> Any:
    sizes = {"vocab_size": 60, "n_positions": 20, "n_embd": 16, "n_layer": 3, "n_head": 2}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, dtype=torch.float32)


def engine_of(seed: int, *, copies: bool = False, num_layers: int = 3) -> PipelineEngine:
    """Two stages on two ranks; or, with copies, a stage alone on each of two data-parallel ranks."""
    rank = dist.get_rank()
    config = config_of()
    config.n_layer = num_layers
    stage = causal_lm_stage(config, 0 if copies else rank, 1 if copies else 2, seed=seed)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(seed + rank)
    group, data = (groups(), dist.group.WORLD) if copies else (None, None)
    return PipelineEngine(stage, group, optimizer, lr_scheduler=scheduler, data_parallel_group=data).train()


def loss_fn(output: Any, *, packed_input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    return output.cross_entropy(packed_input_ids, shift=1), None


def train(engine: PipelineEngine, first: int, steps: int) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        made = generator(number)
        ids = torch.randint(0, 60, (sum(LENGTHS),), generator=made)
        cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        result = engine.train_batch(ids, cu_seqlens, loss_fn)
        losses.append(result[0].item() if result is not None else 0.0)
    return losses


def bits_of(engine: PipelineEngine) -> list[Tensor]:
    assert engine.optimizer is not None
    moments = [engine.optimizer.state[parameter]["exp_avg_sq"] for parameter in engine.parameters()]
    return [parameter.detach().clone() for parameter in engine.parameters()] + [moment.clone() for moment in moments]


def resume(copies: bool) -> None:
    """An interrupted training equals an uninterrupted one, dropout included."""
    directory = ROOT / f"resume-{copies}"
    whole = engine_of(1, copies=copies)
    train(whole, 0, 2)
    save_state(whole, directory, 2, extra=f"rank {dist.get_rank()}")
    expected = train(whole, 2, 2)
    resumed = engine_of(50, copies=copies)
    restored = load_state(resumed, directory)
    assert (restored.step, restored.extra) == (2, f"rank {dist.get_rank()}")
    assert train(resumed, 2, 2) == expected
    for actual, right in zip(bits_of(resumed), bits_of(whole), strict=True):
        assert torch.equal(actual, right)
    ranks = [(0, 1, rank, 2) if copies else (rank, 2, 0, 1) for rank in range(2)]
    names = {f"rank-{r:02d}-of-{n:02d}.data-{d:02d}-of-{m:02d}.pt" for r, n, d, m in ranks}
    assert {file.name for file in (directory / "step-00000002").iterdir()} == names | {"flce-state.json"}
    other = engine_of(1, copies=not copies)
    try:
        load_state(other, directory)
    except errors.CheckpointError as error:
        assert "num_stages" in str(error)
    else:
        raise AssertionError("loaded a state of another number of stages")


def stages(copies: bool) -> None:
    """Ranks write a checkpoint together that transformers and other numbers of stages read."""
    directory = ROOT / f"stages-{copies}"
    engine = engine_of(3, copies=copies)
    train(engine, 0, 1)
    (stage,) = engine.stages
    save_stage(stage, directory, group=engine.pipeline_group, data_parallel_group=engine.data_parallel_group)
    dist.barrier()
    if copies:
        assert len(list(directory.glob("*.safetensors"))) == 1
    again = causal_lm_stage(directory, stage.stage, stage.num_stages, seed=9)
    report = load_stage(again, directory)
    assert all(f"model-stage-{stage.stage:02d}" in file.name for file in report.files)
    for name, tensor in stage.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stage.state_dict().items())
    if dist.get_rank() == 0:
        merge_checkpoint(directory, ROOT / f"merged-{copies}")
        merged = load_file(ROOT / f"merged-{copies}" / "model.safetensors")
        assert merged.keys() == open_checkpoint(directory).files.keys() - {"lm_head.weight"}
    dist.barrier()


def a_failure_on_one_rank_is_raised_on_all() -> None:
    rank = dist.get_rank()
    engine = engine_of(4)
    directory = ROOT / "failure"
    save_state(engine, directory, 1)

    def refused(call: Any, own: str, failing: int) -> None:
        try:
            call()
        except errors.FlceError as error:
            assert (own if rank == failing else f"another rank failed: rank {failing} of 2") in str(error), error
        else:
            raise AssertionError("no error")

    refused(lambda: save_state(engine, directory, 2, extra=object() if rank == 1 else None), "could not be read again", 1)
    refused(lambda: save_state(engine, directory, -1 if rank == 1 else 2), "step is -1", 1)
    refused(lambda: save_state(engine, directory, 2, keep=0 if rank == 1 else 2), "keep is 0", 1)
    with pytest.raises(errors.ArgumentError, match="ranks save different steps: 2, 3"):
        save_state(engine, directory, 2 + rank)
    assert latest_step(directory) == 1
    dist.barrier()
    file = directory / "step-00000001" / "rank-01-of-02.data-00-of-01.pt"
    if rank == 1:
        file.write_bytes(b"x" * file.stat().st_size)
    with torch.no_grad():
        for name, parameter in engine.stages[0].named_parameters():
            parameter.add_(".mlp." in name)
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    refused(lambda: load_state(engine, directory), "cannot be read", 1)
    assert all(torch.equal(left, right) for left, right in zip(engine.parameters(), before, strict=True))
    target = ROOT / "in-use"
    if rank == 0:
        target.mkdir()
        (target / "papers.txt").write_text("all of it")
    dist.barrier()
    refused(lambda: save_stage(engine.stages, target), "exists and is not empty", 0)
    (stage,) = engine.stages
    if rank == 1:
        stage.register_parameter("odd", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64, device="cpu")))
    refused(lambda: save_stage(stage, ROOT / "odd"), "'odd' of stage 1 is torch.complex64 on cpu; it cannot be saved", 1)
    assert not (ROOT / "odd").exists()
    dist.barrier()


def a_drifted_tied_weight_is_refused_on_all() -> None:
    (stage,) = engine_of(5).stages
    if dist.get_rank() == 1:
        with torch.no_grad():
            stage.tied_weight[0] += 1
    try:
        save_stage(stage, ROOT / "drifted")
    except errors.ArgumentError as error:
        assert "are copies of one weight, and differ" in str(error)
    else:
        raise AssertionError("saved two values of one weight")
    assert not (ROOT / "drifted").exists()


def one_rank_has_both_stages() -> None:
    """Stages of a schedule that has several on a rank, each rank a pipeline by itself."""
    made = [causal_lm_stage(config_of(), stage, 2, seed=6) for stage in range(2)]
    own = ROOT / f"both-{dist.get_rank()}"
    optimizer = torch.optim.SGD([parameter for stage in made for parameter in stage.parameters()], lr=0.1)
    parts = TrainingParts(made, optimizer, pipeline_group=groups())
    save_state(parts, own / "state", 1)
    save_stage(made, own / "stages", group=groups())
    with torch.no_grad():
        for parameter in made[1].parameters():
            parameter.zero_()
    load_state(parts, own / "state")
    fresh = causal_lm_stage(config_of(), 1, 2, seed=6)
    for right in (made[1], fresh):
        load_stage(fresh, own / "stages")
        assert all(torch.equal(left, tensor) for left, tensor in zip(fresh.parameters(), right.parameters(), strict=True))


CASES: list[tuple[Any, ...]] = [
    (resume, False),
    (resume, True),
    (stages, False),
    (stages, True),
    (a_failure_on_one_rank_is_raised_on_all,),
    (a_drifted_tied_weight_is_refused_on_all,),
    (one_rank_has_both_stages,),
]

if __name__ == "__main__":
    run_main(run_named, lambda: CASES)
