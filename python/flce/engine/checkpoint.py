"""Checkpoints of stages: cut and merged without a model, loaded a stage at a time, written by the ranks that have them; and a training's
state, to go on where it was. docs/engine.md, "Checkpoints"."""

from flce.engine._shard import merge_checkpoint, shard_checkpoint
from flce.engine._stage_files import LoadReport, load_stage
from flce.engine._stage_save import save_stage
from flce.engine._training_state import RestoredState, TrainingParts, latest_step, load_state, save_state

__all__ = [
    "LoadReport",
    "RestoredState",
    "TrainingParts",
    "latest_step",
    "load_stage",
    "load_state",
    "merge_checkpoint",
    "save_stage",
    "save_state",
    "shard_checkpoint",
]
