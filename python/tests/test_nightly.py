"""Full-length cases that `make test-full` has in a small form only: more steps, classes, trainers, schedules and ranks.

`make test-nightly` runs them; docs/training.md has the table of runs."""

# ruff: noqa: E402  # imports come after what skips without transformers

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_support import cases_passed
from torch import Tensor
from torch.distributed.pipelining import schedules

import flce

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import test_causal_lms as classes
import test_huggingface as with_trainer
from causal_lm_support import VOCAB_SIZE, class_names, tiny_causal_lm

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
STEPS = 30


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.enable()  # torchtitan's Trainer takes over the garbage collector


# ── transformers ──────────────────────────


def batches() -> Iterator[dict[str, Tensor]]:
    for step in range(5):
        tokens = torch.randint(3, VOCAB_SIZE - 3, (2, 10 + 5 * (step % 2)), generator=torch.Generator().manual_seed(20 + step))
        labels = tokens.clone()
        labels[step % 2, : 2 + step] = -100
        yield {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("name", [name for name in class_names() if name not in {**classes.NOT_SMALL, **classes.REFUSED}])
def test_five_batches_of_every_causal_lm_are_its_own(name: str) -> None:
    """Loss and every gradient of batches of two shapes, each from the same weights, which a step of the model's own then moves."""
    own = tiny_causal_lm(name, routers=name not in classes.WITHOUT_ROUTERS)
    mine = flce.patch(copy.deepcopy(own))
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    for inputs in batches():
        mine.load_state_dict(own.state_dict())
        losses = []
        for model in (own, mine):
            model.zero_grad()
            losses.append(classes.seeded(model, **inputs).loss)
            losses[-1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        classes.check_gradients(mine, own)
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(("accumulation", "bf16"), [(1, False), (3, False), (2, True)], ids=str)
def test_thirty_steps_of_transformers_trainer_are_its_own(tmp_path: Path, kind: str, accumulation: int, bf16: bool) -> None:
    own = with_trainer.tiny_model(kind)
    mine = flce.patch(copy.deepcopy(own))
    given = {"bf16": bf16, "max_steps": STEPS, "learning_rate": 1e-3}
    expected, expected_eval = with_trainer.train(own, tmp_path / "own", accumulation, **given)
    losses, evaluated = with_trainer.train(mine, tmp_path / "flce", accumulation, **given)
    near = 2e-2 if bf16 else 2e-4
    assert len(losses) == STEPS and losses == pytest.approx(expected, rel=near)
    assert evaluated == pytest.approx(expected_eval, rel=near) and expected_eval < expected[0]


# ── TRL ─────────────────────────

TRL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"kind": "gemma2", "learning_rate": 0.0005},
    {"kind": "cohere"},
    {"gradient_accumulation_steps": 2},
    {"gradient_checkpointing": True},
    {"max_grad_norm": 0.1},
    {"optim": "adamw_torch", "adam_epsilon": 1e-3},
]


@pytest.mark.parametrize("options", TRL_OPTIONS, ids=str)
@pytest.mark.parametrize("trainer", ["sft", "dpo", "grpo", "rloo", "kto"])
def test_thirty_steps_are_those_of_trl(trainer: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.15")
    import trl_support

    given = {"max_steps": STEPS, "learning_rate": 0.002, **options}
    make = trl_support.TRAINERS[trainer]
    expected = trl_support.train(make(tmp_path / "own", **given))
    before = flce.trl.calls()
    with flce.trl.patch():
        actual = trl_support.train(make(tmp_path / "flce", **given))
    after = flce.trl.calls()
    assert after["own"] == before["own"] and after["fused"] >= before["fused"] + STEPS
    trl_support.compare(actual, expected, STEPS)


@pytest.mark.parametrize(
    "options", [{"loss_type": "dft"}, {"packing": True, "max_length": 16}, {"loss_type": "dft", "kind": "gemma2"}], ids=str
)
def test_thirty_steps_of_sft_are_those_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    test_thirty_steps_are_those_of_trl("sft", options, tmp_path)


# ── torchtitan and Megatron-LM ────────────


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["default", "partial_dtensor"])
@pytest.mark.parametrize("batch", [4, 12])
def test_fifteen_steps_are_those_of_torchtitan(tied: bool, backend: str, batch: int) -> None:
    for name in ("torchtitan", "spmd_types", "tensorboard"):
        pytest.importorskip(name)
    import test_torchtitan as titan

    with titan.group_of_one():
        settings: dict[str, Any] = {"training__steps": 15, "training__global_batch_size": batch}
        if backend != "default":
            settings["parallelism__spmd_backend"] = backend
        own = titan.Run(titan.config(model={"tied": tied}, **settings))
        chosen = titan.config(model={"tied": tied}, **settings)
        chosen.loss = titan.fused_loss(chosen.loss)
        with titan.calls_of_flce() as calls:
            fused = titan.Run(chosen)
        assert len(calls) == 15 * batch // 4 and len(own.losses) == 15
        titan.compare(own, fused)


@pytest.mark.parametrize(("tied", "depths"), itertools.product((False, True), (0, 1, 2)))
def test_twenty_batches_are_those_of_megatron(tied: bool, depths: int) -> None:
    pytest.importorskip("megatron.core")
    import megatron_support as support

    with support.group_of_one():
        settings = {"tied": tied, "depths": depths, "num_layers": 2}
        own = support.gpt_model(**settings)
        mine = flce.megatron.patch(support.copied(own, **settings))
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
        for step in range(20):
            mine.load_state_dict(own.state_dict())
            batch, losses = support.Batch(seed=step), []
            for model in (own, mine):
                model.zero_grad()
                losses.append(batch.losses(model))
                batch.masked_mean(losses[-1]).backward()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=2e-6)
            support.same_gradients(mine, own)
            optimizer.step()


# ── Pipelines ─────────────────────────────


def test_every_schedule_with_more_microbatches_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_TEST_MICROBATCHES", "8")
    cases = 12 * len([name for name in schedules.__all__ if name.startswith("Schedule")])
    assert cases_passed("schedules_worker.py", "2,4") == {2: cases, 4: cases}
