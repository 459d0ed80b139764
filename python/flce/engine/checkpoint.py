"""Checkpoints of stages."""

from flce.engine._shard import merge_checkpoint, shard_checkpoint

__all__ = ["merge_checkpoint", "shard_checkpoint"]
