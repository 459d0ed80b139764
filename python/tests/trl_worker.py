"""Two ranks, under torchrun: a model with TRL's fused head on flce, which DDP or FSDP2 wraps. Exits with a failed assertion, or 0; rank 0
prints how many cases passed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from rank_support import default_device, generator, run_main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

import flce

VOCAB_SIZE = 102


def tiny_model() -> Any:
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, attn_implementation="eager"))
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy", "is_top1", "mean_logits"))
    return model


def part_of_loss(model: Any, tokens: torch.Tensor) -> Any:
    """A sum over tokens, as in GRPO's loss: log-probabilities and an entropy bonus."""
    made = model(input_ids=tokens, labels=tokens.masked_fill(tokens < 9, -100), fused_lm_head=True)
    return -(made.log_probs * torch.linspace(0.5, 2, made.log_probs.shape[1])).sum() - 0.1 * made.entropy.sum()


def wrapped(kind: str) -> None:
    own, mine = tiny_model(), tiny_model()
    mine.load_state_dict(copy.deepcopy(own.state_dict()))
    tokens = torch.randint(0, VOCAB_SIZE, (4, 12), generator=generator(7))
    expected = part_of_loss(own, tokens)  # TRL's own function
    expected.backward()
    model = mine
    if kind == "ddp":
        model = DistributedDataParallel(mine)
    else:
        policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if kind == "fsdp bf16" else {}
        for layer in mine.model.layers:
            fully_shard(layer, **policy)
        if kind == "fsdp, embeddings and head apart":
            fully_shard([mine.model.embed_tokens, mine.lm_head])
        fully_shard(mine, **policy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    before = flce.trl.calls()
    with flce.trl.patch():
        for _ in range(2):
            model.zero_grad()
            loss = part_of_loss(model, tokens.chunk(ranks)[rank])
            loss.backward()
    assert flce.trl.calls() == {"fused": before["fused"] + 2, "own": before["own"]}
    total = loss.detach().float()
    dist.all_reduce(total)
    tolerance: dict[str, float] = {"rtol": 3e-2, "atol": 0.2} if kind == "fsdp bf16" else {"rtol": 2e-4, "atol": 2e-5}
    torch.testing.assert_close(total, expected.detach(), **tolerance)
    for (name, parameter), right in zip(mine.named_parameters(), own.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient * ranks, right.grad, **tolerance, msg=lambda m, n=name: f"{kind}, {n}: {m}")


class OfTrainer:
    """The parts of a GKDTrainer that its loss knows."""

    def __init__(self, trainer: Any, teacher: Any) -> None:
        self.compute_loss = trainer.compute_loss.__get__(self)
        self.generalized_jsd_loss, self.teacher_model, self.accelerator, self.beta = trainer.generalized_jsd_loss, teacher, self, 0.5

    def unwrap_model(self, model: Any) -> Any:
        return extract_model_from_parallel(model)


def distilled(kind: str) -> None:
    """GKDTrainer's loss: flce's under DDP, TRL's own under FSDP2."""
    from trl.experimental.gkd import GKDTrainer

    own, mine, teacher = tiny_model(), tiny_model(), tiny_model()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(5)
    tokens = torch.randint(0, VOCAB_SIZE, (4, 12), generator=generator(7))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.masked_fill(tokens < 9, -100)}
    count = (inputs["labels"][:, 1:] != -100).sum()
    expected = OfTrainer(GKDTrainer, teacher).compute_loss(own, inputs, num_items_in_batch=count)
    expected.backward()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model: Any = DistributedDataParallel(mine, find_unused_parameters=True) if kind == "gkd, ddp" else fully_shard(mine)
    before = flce.trl.calls()
    with flce.trl.patch():
        for _ in range(2):
            model.zero_grad()
            part = {name: each.chunk(ranks)[rank] for name, each in inputs.items()}
            loss = OfTrainer(GKDTrainer, teacher).compute_loss(model, part, num_items_in_batch=count)
            loss.backward()
    which = "fused" if kind == "gkd, ddp" else "own"
    assert flce.trl.calls() == {**before, which: before[which] + 2}
    total = loss.detach()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-7)
    for (name, parameter), right in zip(mine.named_parameters(), own.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient * ranks, right.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{kind}, {n}: {m}")


def a_weight_over_ranks() -> None:
    """Given to the function itself, without TRL's gathering."""
    mesh = init_device_mesh(default_device().type, (dist.get_world_size(),))
    weight = distribute_tensor(torch.randn(VOCAB_SIZE, 32), mesh, [Shard(0)])
    try:
        flce.trl.ChunkedLogProbFunction.apply(torch.randn(3, 32), weight, None, torch.arange(3), 1.0, 16)
    except flce.PlacementError as error:
        assert "weight is a DTensor" in str(error), error
    else:
        raise AssertionError("a sharded weight was taken")


def run(kind: str) -> None:
    if kind == "a weight over ranks":
        a_weight_over_ranks()
    elif kind.startswith("gkd"):
        distilled(kind)
    else:
        wrapped(kind)


if __name__ == "__main__":
    kinds = ("ddp", "fsdp", "fsdp, embeddings and head apart", "fsdp bf16", "a weight over ranks", "gkd, ddp", "gkd, fsdp")
    run_main(run, lambda: [(kind,) for kind in kinds])
