"""A pipeline engine for packed batches: train, evaluate, forward and generate over torch.distributed.pipelining, with flce on the last
stage. docs/engine.md has how to use it."""

import importlib
from typing import TYPE_CHECKING, Any

from flce.engine._output import HeadOutput
from flce.engine._packed import KVCache, PackedBatch
from flce.engine._plan import StagePlan, plan_stages
from flce.engine._sampling import GenerationConfig
from flce.engine._shard import merge_checkpoint, shard_checkpoint
from flce.engine._stage import Stage
from flce.engine._stage_files import LoadReport, load_stage
from flce.engine._stage_save import save_stage
from flce.engine._training_state import RestoredState, TrainingParts, latest_step, load_state, save_state
from flce.engine.causal_lm import CausalLMStage, causal_lm_stage

if TYPE_CHECKING:
    from flce.engine._generate import Generated
    from flce.engine._pipeline_engine import PipelineEngine

# Imported when they are first asked for: torch.distributed.pipelining takes longer to import than the rest of torch, and checkpoints do
# without it.
_LATER = {"Generated": "_generate", "PipelineEngine": "_pipeline_engine"}

__all__ = [
    "CausalLMStage",
    "Generated",
    "GenerationConfig",
    "HeadOutput",
    "KVCache",
    "LoadReport",
    "PackedBatch",
    "PipelineEngine",
    "RestoredState",
    "Stage",
    "StagePlan",
    "TrainingParts",
    "causal_lm_stage",
    "latest_step",
    "load_stage",
    "load_state",
    "merge_checkpoint",
    "plan_stages",
    "save_stage",
    "save_state",
    "shard_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"flce.engine.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
