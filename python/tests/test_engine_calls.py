"""What an engine's calls refuse before anything is computed, and leave as it was: one process, one stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_support import ToyStage, batch_of

import flce
from flce.engine import PipelineEngine


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LENGTHS = [3, 4, 5, 6]
IDS, CU_SEQLENS = batch_of(0, LENGTHS)


def made(**options: Any) -> PipelineEngine:
    stage = ToyStage(0, 1)
    return PipelineEngine(stage, None, torch.optim.SGD(stage.parameters(), lr=0.1), num_micro_batches=2, **options)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"temperature": 0.5}, 'temperature is 0.5; it is for output="logprobs" and "entropy", and output is \'logits\''),
        ({"temperature": 2, "output": "hidden"}, "and output is 'hidden'"),
        ({"labels": IDS}, "labels are for output=\"logprobs\"; output is 'logits'"),
        ({"labels": IDS, "output": "entropy"}, "output is 'entropy'"),
        ({"labels": IDS[:, None], "output": "logprobs"}, r"labels has shape \[18, 1\]"),
        ({"labels": IDS.float(), "output": "logprobs"}, r"labels is a torch\.float32 tensor; it must be an int64 or int32 tensor"),
        ({"labels": IDS.tolist(), "output": "logprobs"}, "labels is a list"),
        ({"temperature": 0, "output": "logprobs"}, r"temperature is 0; it must be between 2\^-100 and 2\^100"),
        ({"temperature": float("nan"), "output": "entropy"}, "temperature is nan"),
        ({"temperature": torch.ones(18), "output": "logprobs"}, "temperature is a Tensor; it must be a number"),
    ],
)
def test_forward_refuses_what_its_output_would_not_show(keywords: dict[str, Any], says: str) -> None:
    engine = made()
    with pytest.raises(flce.ArgumentError, match=says):
        engine.forward(IDS, CU_SEQLENS, **keywords)
    assert engine.forward(IDS, CU_SEQLENS, output="logprobs", labels=IDS.int(), temperature=2).shape == IDS.shape  # type: ignore[union-attr]
