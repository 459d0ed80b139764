"""Qwen3-1.7B, a checkpoint of a tiny model, in the working folder."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def make() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    model.save_pretrained("Qwen3-1.7B")
    return model


if __name__ == "__main__":
    make()
