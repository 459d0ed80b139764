"""The key by which a call's kernel is found, and its text as a Spec."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flce.core import _native

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OF_CLASSES = ("bias", "class_weight", "class_offset")
OPTIONAL_INPUTS = (*OF_CLASSES, "temperature", "token_weight")  # flags of a Spec, and tensors of its calls
FLAGS = (*OF_CLASSES, "class_groups", "temperature", "token_weight")


class KernelKey(NamedTuple):
    """Key by which a kernel is found: the device, the Spec's fields, and the memory and number of tokens that the kernel is planned for."""

    device: torch.device
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    hidden_major: bool
    weight_dtype: torch.dtype  # dtype, or fp32: the weight is rounded as kernels read it
    grad_weight_dtype: torch.dtype
    accumulate: bool
    bias: bool
    class_weight: bool
    class_offset: bool
    class_groups: bool
    temperature: bool
    token_weight: bool
    options: str
    workspace_limit_bytes: int  # 0: the default
    num_tokens: int  # the call's number with a limit, else its token bucket (`planned_tokens`)
    # The next two are a shard's; vocab_size is then the most classes that a rank has.
    whole_vocab_size: int = 0  # 0: the weight is whole
    padded_vocab_size: int = 0  # the most rows that a rank has
    grad_hidden_dtype: torch.dtype | None = None  # None: dtype
    weight_format: str = ""  # e4m3 or nvfp4: the weight is codes, whatever weight_dtype says
    weight_block: int = 0

    def hidden_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.hidden_size * self.dtype.itemsize

    def spec(self) -> str:
        parts = [f"D={self.hidden_size}", f"V={self.vocab_size}", f"dtype={DTYPE_NAMES[self.dtype]}"]
        if self.whole_vocab_size:
            parts += [f"padded_vocab_size={self.padded_vocab_size}", f"whole_vocab_size={self.whole_vocab_size}"]
        if self.grad_hidden_dtype not in (None, self.dtype):
            parts.append(f"grad_hidden_dtype={DTYPE_NAMES[self.grad_hidden_dtype]}")
        if self.hidden_major:
            parts.append("layout=hidden_major")
        if self.weight_format:
            parts.append(f"weight_dtype={self.weight_format}")
        elif self.weight_dtype != self.dtype:
            parts.append(f"weight_dtype={DTYPE_NAMES[self.weight_dtype]}")
        if self.weight_block:
            parts.append(f"weight_block={self.weight_block}")
        if self.grad_weight_dtype != self.weight_dtype:
            parts.append(f"grad_weight_dtype={DTYPE_NAMES[self.grad_weight_dtype]}")
        if self.accumulate:
            parts.append("grad_weight_mode=accumulate")
        parts += [name for name in FLAGS if getattr(self, name)]
        if self.options:
            parts.append(self.options)
        return ",".join(parts)


def planned_tokens(num_tokens: int, workspace_limit_bytes: int) -> int:
    """KernelKey.num_tokens of a call. A limit holds for its number of tokens; without one, calls of a bucket share a kernel."""
    return num_tokens if workspace_limit_bytes else _native.token_bucket(num_tokens)
