from types import SimpleNamespace

import torch
import torch.distributed as dist

dtype = torch.float32 if device == "cpu" else torch.bfloat16
torch.manual_seed(0)


def rows(*shape):
    return torch.randn(*shape, 16, device=device, dtype=dtype)


def numbers(*shape):
    return torch.randint(0, 50, shape, device=device)


def linear():
    return torch.nn.Linear(16, 50, bias=False, device=device, dtype=dtype)


dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
hidden, weight, labels, target = rows(4, 12).requires_grad_(), rows(50).requires_grad_(), numbers(4, 12), numbers(4, 12)


def close():
    flce.set_strict(None)
    dist.destroy_process_group()
# %% A frozen weight in an inference format
hidden = rows(4, 12).bfloat16().requires_grad_()
quantised_head = torch.nn.Linear(16, 50, bias=False, dtype=torch.bfloat16, device=device)
codes, scale = rows(50).to(torch.float8_e4m3fn), torch.rand(50, device=device)
pairs = torch.randint(0, 256, (50, 8), dtype=torch.uint8, device=device)
groups, whole = torch.rand(50, 1, device=device).to(torch.float8_e4m3fn), torch.tensor(0.1, device=device)
# %% Reinforcement learning and distillation
hidden, labels = rows(4, 12).requires_grad_(), numbers(4, 12)
head, old_head, old_hidden = linear(), linear(), rows(4, 12)
advantages, importance = torch.randn(4, 1, device=device), torch.rand(4, 12, device=device)
mask = flce.shift_labels(labels) != -100
rollouts = [(rows(n), numbers(n)) for n in (3, 1, 7)]
packed_hidden, packed_targets = torch.cat([h for h, _ in rollouts]), torch.cat([t for _, t in rollouts])
model = SimpleNamespace(get_output_embeddings=lambda: head)
# %% In a pipeline
from torch.distributed.pipelining import PipelineStage, schedules

stage_module = torch.nn.Module()
stage_module.embedding, stage_module.head = torch.nn.Embedding(50, 16, device=device, dtype=dtype), linear()
stage_module.forward = lambda ids: stage_module.embedding(ids)
labels, losses = numbers(8, 12), []
stage = PipelineStage(stage_module, 0, 1, torch.device(device), group=group)


class Schedule1F1B(schedules.Schedule1F1B):  # the last stage is the first one, too
    def step(self, **given):
        return super().step(labels, **given)


rank = first = last = 0
# %% As a module
# instead of vocab_size, bias=False, softcap=30.0) -> vocab_size, bias=False, softcap=30.0).to(hidden)
from transformers import LlamaConfig, LlamaForCausalLM

hidden_size, vocab_size, labels = 16, 50, numbers(4, 12)
sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, **sizes)).to(device, dtype)
model, self, hidden = llama, SimpleNamespace(), rows(4, 12)
# %% The vocabulary over ranks
head, shard, hidden, labels = linear(), rows(50).requires_grad_(), rows(24).requires_grad_(), numbers(24)
# %% With transformers
model = LlamaForCausalLM(llama.config).to(device, dtype)
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out", use_cpu=device == "cpu", report_to=[])
# %% Before a run
# instead of D=4096,V=128256,dtype=bf16 -> D=64,V=500,dtype=bf16
# instead of num_tokens=[8192], budget_s=30 -> num_tokens=[16], budget_s=3
# instead of "h100" -> "cpu"
import json
from pathlib import Path

Path("config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 500, "dtype": "float32", "model_type": "qwen3"}))
# %% Environment
# instead of "hidden_size": 4096, "vocab_size": 128256 -> "hidden_size": 64, "vocab_size": 500
