"""flce.trl in the place of AsyncDistillationTrainer's divergence: TRL's own function beside it, and the trainer itself."""

from __future__ import annotations

import logging
import queue
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flce

pytest.importorskip("trl", minversion="1.15")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # experimental
    import trl.experimental.async_distillation.async_distillation_trainer as trl_async
    from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
    from trl.experimental.async_distillation.async_rollout_worker import RolloutSample

import trl_support
from datasets import Dataset

import flce.trl

OWN = trl_async._chunked_jsd_loss


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # everything is tiny
    yield
    torch.set_num_threads(threads)
    flce.trl.unpatch()
    assert trl_async._chunked_jsd_loss is OWN


def problem(num_tokens: int = 21, top_k: int = 5, vocab_size: int = 47, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Candidates of a random teacher, some of them padding, one of them twice."""
    make = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    teacher_logps, ids = normal(num_tokens, vocab_size).mul(2).log_softmax(-1).topk(top_k)
    mask = torch.rand(num_tokens, top_k, generator=make) < 0.8
    mask[:, 0] = True
    return {
        "hidden_valid": normal(num_tokens, 24).to(dtype).requires_grad_(),
        "lm_head_weight": normal(vocab_size, 24).mul(0.4).to(dtype).requires_grad_(),
        "lm_head_bias": None,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "target_ids": torch.where(mask, ids, -1),
        "teacher_target_logps": torch.where(mask, teacher_logps, -torch.inf),
        "valid_candidate_mask": mask,
        "beta": 0.0,
        "temperature": 1.0,
        "add_tail_bucket": True,
        "teacher_id_idx": None,
        "num_teachers": 1,
        "chunk_size": 8,
    }


def results(function: Any, given: dict[str, Any]) -> list[Tensor]:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items() if getattr(value, "requires_grad", False)}
    outputs = function(*{**given, **leaves}.values())
    (1.7 * outputs[0]).backward()
    assert not any(output.requires_grad for output in outputs[1:])
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves.values())]


def fused(given: dict[str, Any]) -> list[Tensor]:
    before = flce.trl.calls()
    with flce.trl.patch():
        assert trl_async._chunked_jsd_loss is not OWN
        made = results(trl_async._chunked_jsd_loss, given)
    assert flce.trl.calls() == {"fused": before["fused"] + 1, "own": before["own"]}
    return made


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 2e-5) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 1.0, "temperature": 0.7},
        {"beta": 0.4, "logit_scale": 0.5, "final_logit_softcapping": 3.0},
        {"add_tail_bucket": False, "temperature": 1.4},
        {"beta": 0.4, "add_tail_bucket": False},
        {"teacher_id_idx": torch.arange(21) % 2, "num_teachers": 3},
        {"lm_head_bias": torch.linspace(-1, 1, 47).requires_grad_()},
    ],
    ids=["forward", "reverse", "capped", "no_tail", "mixed_no_tail", "teachers", "bias"],
)
def test_sums_and_gradients_are_those_of_trl(options: dict[str, Any]) -> None:
    given = {**problem(), **options}
    assert_same(fused(given), results(OWN, given))


def test_sixteen_bit_layers_are_computed_as_in_trl() -> None:
    given = problem(dtype=torch.bfloat16)
    made, expected = fused(given), results(OWN, given)
    assert_same(made[:5], expected[:5])
    assert_same(made[5:], expected[5:], 1e-2)  # rounded once, TRL's in every chunk
    mixed = {**given, "lm_head_weight": given["lm_head_weight"].detach().float().requires_grad_()}
    assert_same(fused(mixed)[:5], results(OWN, mixed)[:5])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_sums_are_the_same(mode: Any) -> None:
    given = problem()
    with mode(), flce.trl.patch():
        made, expected = trl_async._chunked_jsd_loss(*given.values()), OWN(*given.values())
    assert not made[0].requires_grad
    assert_same(list(made), list(expected))


def test_what_is_frozen_gets_no_gradient() -> None:
    given = problem()
    given["lm_head_weight"].requires_grad_(False)
    assert_same(fused(given), results(OWN, given))
    frozen = {**given, "hidden_valid": given["hidden_valid"].detach()}
    with flce.trl.patch():
        assert not trl_async._chunked_jsd_loss(*frozen.values())[0].requires_grad


def test_a_class_twice_and_a_sure_student() -> None:
    given = problem(top_k=3)
    given["target_ids"][:, 2] = given["target_ids"][:, 0]
    given["hidden_valid"] = (6 * given["hidden_valid"].detach()).requires_grad_()
    assert_same(fused(given), results(OWN, given), 1e-4)


def test_too_many_classes_are_trls_own(caplog: pytest.LogCaptureFixture) -> None:
    given = problem(top_k=1100, vocab_size=1200)
    before = flce.trl.calls()
    with caplog.at_level(logging.WARNING, "flce"), flce.trl.patch():
        assert_same(results(trl_async._chunked_jsd_loss, given), results(OWN, given), 0)
    assert flce.trl.calls() == {"fused": before["fused"], "own": before["own"] + 1}
    assert "more than 1024 classes" in caplog.text


def test_a_class_that_the_student_lacks_is_refused_as_in_trl() -> None:
    given = problem()
    given["target_ids"][3, 0] = 47
    with pytest.raises(RuntimeError):
        OWN(*given.values())
    with flce.trl.patch(), pytest.raises(flce.ArgumentError, match="target_ids has class 47; the student has 47"):
        trl_async._chunked_jsd_loss(*given.values())


def test_another_function_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(hidden: Tensor) -> Tensor:
        return hidden

    monkeypatch.setattr(flce.trl._own.DIVERGENCE, "known", None)
    monkeypatch.setattr(trl_async, "_chunked_jsd_loss", other)
    with caplog.at_level(logging.WARNING, "flce"), flce.trl.patch() as patched:
        assert trl_async._chunked_jsd_loss is other and re.search("[56] names", repr(patched))
    assert "_chunked_jsd_loss takes hidden; hidden_valid, lm_head_weight" in caplog.text
    monkeypatch.undo()


class Rollouts:
    """Stands for the worker that asks a student's and a teacher's server: samples that a teacher model here has scored."""

    def __init__(self, teacher: Any, samples: int, top_k: int) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        make = torch.Generator().manual_seed(2)
        for index in range(samples):
            ids = torch.randint(0, trl_support.WORDS, (8 + index % 5,), generator=make)
            with torch.no_grad():
                logps, classes = teacher(ids[None]).logits[0].log_softmax(-1).topk(top_k)
            completion = (torch.arange(len(ids)) >= 3).long()
            first = torch.full((1, top_k), -1)  # a token's numbers are from the position before it
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=ids.numpy(),
                    completion_mask=completion.numpy(),
                    teacher_topk_ids=torch.cat([first, classes[:-1]]).numpy(),
                    teacher_topk_logprobs=np.concatenate([np.full((1, top_k), -np.inf, np.float32), logps[:-1].numpy()]),
                    model_version=0,
                    metrics={},
                    teacher_id="teacher",
                    prompt_id=index,
                )
            )

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        list(iterator)


def trainer(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        **{**trl_support.OF_A_RUN, "per_device_train_batch_size": 1},
        **{"token_budget": 0, "max_staleness": 100, "teacher_server_urls": {"teacher": "http://127.0.0.1:9"}},
        "model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"},
        **options,
    }
    return AsyncDistillationTrainer(
        trl_support.saved(folder / "model"),
        AsyncDistillationConfig(output_dir=str(folder), **given),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in trl_support.TEXTS]}),
        processing_class=trl_support.tokenizer(),
        rollout_worker=Rollouts(trl_support.model(seed=1), 12, 4),
        weight_transfer=NoTransfer(),
    )


@pytest.mark.filterwarnings("ignore")
def test_ten_steps_are_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_async, "get_peak_flops_per_device", lambda *_: None)  # asks for a GPU's name
    expected = trl_support.train(trainer(tmp_path / "own"))
    before = flce.trl.calls()
    with flce.trl.patch():
        actual = trl_support.train(trainer(tmp_path / "flce"))
    assert flce.trl.calls() == {"fused": before["fused"] + trl_support.STEPS, "own": before["own"]}
    trl_support.compare(actual, expected)
