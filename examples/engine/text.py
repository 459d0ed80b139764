"""Real text for examples: this project's documentation as packed batches of paragraphs."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.model_api import Data

ROOT = Path(__file__).resolve().parent.parent.parent


class ByteTokenizer:
    """A token for each byte of UTF-8, and the end of a text: no file, no training."""

    vocab_size = 257
    eos_token_id = 256
    pad_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class Paragraphs:
    """Paragraphs of README.md, CONTRIBUTING.md and docs/, each with its end of text, cut to `length` tokens.

    Every tenth one is held out: `batch` gives the others, the same ones for the same step, `held_out` those."""

    def __init__(self, length: int, shortest: int = 32) -> None:
        tokenizer = ByteTokenizer()
        files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
        found = [part for path in files for part in path.read_text(encoding="utf-8").split("\n\n") if len(part) >= shortest]
        tokens = [[*tokenizer.encode(part), tokenizer.eos_token_id][:length] for part in found]
        self.training = [part for i, part in enumerate(tokens) if i % 10]
        self.others = tokens[::10]

    def batch(self, step: int, num_sequences: int) -> Data:
        generator = torch.Generator().manual_seed(step)
        chosen = torch.randint(0, len(self.training), (num_sequences,), generator=generator).tolist()
        return packed([self.training[i] for i in chosen])

    def held_out(self, num_sequences: int) -> Data:
        return packed(self.others[:num_sequences])


def packed(sequences: list[list[int]]) -> Data:
    """packed_input_ids [T] int64, cu_seqlens [B + 1] int32."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    return {"packed_input_ids": ids, "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()}
