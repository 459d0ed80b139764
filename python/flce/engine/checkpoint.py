"""Checkpoints of stages: cut and merged without a model, loaded a stage at a time, written by the ranks that have them; and a training's
state, to go on where it was. docs/engine.md, "Checkpoints"."""

from flce.engine._shard import merge_checkpoint, shard_checkpoint
from flce.engine._stage_files import LoadReport, load_stage
from flce.engine._stage_save import save_stage

__all__ = ["LoadReport", "load_stage", "merge_checkpoint", "save_stage", "shard_checkpoint"]
