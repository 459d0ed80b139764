import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
close = dist.destroy_process_group
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
).to(device)
input_ids = labels = torch.randint(0, 64, (8, 12), device=device)
hidden, hidden_of_depth = torch.randn(2, 8, 12, 16, device=device)
# %% TRL
pytest.importorskip("trl")
from trl import SFTConfig, SFTTrainer
from trl_support import tokenizer
from datasets import Dataset

flce.unpatch(model)
arguments = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no", "bf16": False}
settings = SFTConfig("sft", use_cpu=device == "cpu", **arguments)
rows = Dataset.from_list([{"input_ids": [1, 2, 3, 4]}] * 4)
trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer())
# %% Pipeline schedules
stages = [
    PipelineStage(module.to(device), number, 2, torch.device(device), group=dist.group.WORLD)
    for number, module in enumerate([torch.nn.Embedding(64, 16), torch.nn.Identity()])
]
last_stage = torch.nn.Module()
last_stage.head, losses = torch.nn.Linear(16, 64, bias=False, device=device), []


class ScheduleZBVZeroBubble(schedules.ScheduleZBVZeroBubble):  # the last stage's rank has the first one, too
    def step(self, **given):
        return super().step(labels, **given)
# %% Sampling masks of prime-rl and SkyRL
from types import SimpleNamespace

lm_head, replay = SimpleNamespace(), SimpleNamespace()  # the trainers' modules
# %% Plain torch
model, head = torch.nn.Embedding(64, 16, device=device), torch.nn.Linear(16, 64, bias=False, device=device)
