import copy

from types import SimpleNamespace

import torch
import torch.distributed as dist


dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
pipeline_group = group = dist.group.WORLD
close = dist.destroy_process_group
from qwen3 import CONFIG as config
from qwen3 import make

checkpoint = make()
rank, num_stages, steps, epoch = 0, 1, 200, 0
ids, offsets = torch.randint(0, 64, (10,), device=device), torch.tensor([0, 6, 10], dtype=torch.int32, device=device)
packed_input_ids, cu_seqlens, batches = ids, offsets, [(ids, offsets, ids)]


def loss_fn(output, packed_input_ids, cu_seqlens, labels):
    return output.cross_entropy(labels, shift=1), {}
# %% Stages
model = copy.deepcopy(checkpoint).to(device)
# %% Loss functions
old_logp, loss_mask = torch.zeros(10, device=device), torch.ones(10, device=device)
# %% Generation
# instead of max_new_tokens=256 -> max_new_tokens=3
tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
# %% Checkpoints
# instead of stage=1, num_stages=4 -> stage=0, num_stages=1
# instead of % 100 -> % 40
flce.engine.shard_checkpoint("Qwen3-1.7B", "Qwen3-1.7B-4", 1)
batches = [(ids, offsets)] * 200


def loss_fn(output, packed_input_ids, cu_seqlens):
    return output.cross_entropy(packed_input_ids, shift=1), {}
# %% Interfaces
# instead of max_new_tokens=256 -> max_new_tokens=3
from types import SimpleNamespace

from engine.model_api import Model, from_last_stage
from engine.ppo_interface import PPOActorInterface, PPOCriticInterface
from engine.text import Paragraphs
from engine_ppo import make_model, score
from engine_ppo import prompts as make_prompts

from flce.engine import GenerationConfig

place = SimpleNamespace(rank=0, num_stages=1, device=torch.device(device), group=group)
sizes = SimpleNamespace(hidden_size=16, layers=1, schedule="1f1b")
actor_engine, critic_engine = (make_model(place, sizes, critic=critic, learning_rate=1e-3).module for critic in (False, True))
reference_engine = make_model(place, sizes).module
tokenizer, prompts = make_model(place, sizes).tokenizer, make_prompts(Paragraphs(16), 0, 8)
