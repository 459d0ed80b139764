"""Two ranks, under torchrun: models that DeepSpeed's ZeRO-3 divides over them, with flce. Exits with a failed assertion, or 0; rank 0
prints how many cases passed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from peft import LoraConfig, get_peft_model
from rank_support import run_main, run_named
from torch import Tensor, nn
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM

import flce
import flce.loss

D, V, RANKS, MICRO_BATCHES, STEPS = 32, 102, 2, 2, 3
# Treats these small models as large ones: nothing stays gathered between the modules that use it.
STRICT = dict.fromkeys(("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"), 0)
Losses = Callable[[Any, Tensor, Tensor], Any]


def settings(*, strict: bool = True, bf16: bool = False, micro_batches: int = MICRO_BATCHES) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, **({f"stage3_{name}": value for name, value in STRICT.items()} if strict else {})},
    }


def engine_of(model: Any, **given: Any) -> Any:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, optimizer=SGD(parameters, lr=0.1, momentum=0.9), config=settings(**given))[0]


def llama(tied: bool = False, seed: int = 2) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, initializer_range=0.2, use_cache=False, tie_word_embeddings=tied, attn_implementation="eager")
    return LlamaForCausalLM(config).train()


class Body(nn.Module):
    """Hidden states, with labels the loss of a FusedLMHead."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.head = flce.FusedLMHead(D, V, softcap=5.0, shift=1)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, hidden_states: bool = False) -> Any:
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        return hidden if hidden_states else self.head(hidden, labels=labels)


class Outside(Body):
    """Its output layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)


def body(seed: int = 4) -> Body:
    torch.manual_seed(seed)
    return Body()


def micro_batch(step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, V, (2, 12), generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
    labels = tokens.clone()
    labels[rank, : 3 + index] = -100
    return tokens, labels


def loss_of_llama(model: Any, tokens: Tensor, labels: Tensor) -> Any:
    return model(input_ids=tokens, labels=labels).loss


def loss_of_body(model: Any, tokens: Tensor, labels: Tensor) -> Any:
    return model(tokens, labels)


@dataclass
class Run:
    """Losses of each micro-batch of this rank, gradients before each step, and parameters after the last."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(engine: Any, loss_of: Losses) -> Run:
    run, rank = Run(), dist.get_rank()
    named = dict(engine.module.named_parameters())
    for step in range(STEPS):
        for index in range(MICRO_BATCHES):
            loss = loss_of(engine, *micro_batch(step, index, rank))
            run.losses.append(loss.detach().float())
            engine.backward(loss)
            if index == MICRO_BATCHES - 1:
                run.gradients.append({name: safe_get_full_grad(each).float() for name, each in named.items() if each.requires_grad})
            engine.step()
    run.parameters = {name: safe_get_full_fp32_param(each).clone() for name, each in named.items() if each.requires_grad}
    return run


def train_alone(model: Any, loss_of: Losses) -> Run:
    """All ranks' micro-batches in this process, without ZeRO; the losses are this rank's."""
    run = Run()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            for rank in range(RANKS):
                loss = loss_of(model, *micro_batch(step, index, rank))
                (loss / (RANKS * MICRO_BATCHES)).backward()
                if rank == dist.get_rank():
                    run.losses.append(loss.detach())
        run.gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
        optimizer.step()
    run.parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    return run


def compare(made: Run, expected: Run, what: str, *, bf16: bool = False) -> None:
    near = 6e-2 if bf16 else 5e-6
    assert len(made.losses) == len(expected.losses) == STEPS * MICRO_BATCHES
    torch.testing.assert_close(made.losses, expected.losses, rtol=near, atol=0.0)
    assert len(made.gradients) == len(expected.gradients) == STEPS
    for mine, right in [*zip(made.gradients, expected.gradients, strict=True), (made.parameters, expected.parameters)]:
        assert mine.keys() == right.keys() and mine
        for name, value in mine.items():
            away, size = (value - right[name]).norm().item(), right[name].norm().item()
            assert away <= near * size and size > 1e-3, f"{what}, {name}: {away} of {size}"


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """How many calls of the losses reach flce, and that they make no logits."""
    calls, own = [0], flce.loss.linear_cross_entropy

    def count(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return own(*arguments, **options)

    flce.loss.linear_cross_entropy = count  # type: ignore[assignment]
    try:
        yield calls
    finally:
        flce.loss.linear_cross_entropy = own


@contextlib.contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for part in parts:
            assert part in str(error), (part, error)
    else:
        raise AssertionError(f"nothing was refused: {parts}")


def a_patched_model(tied: bool, strict: bool, late: bool) -> None:
    """Loss, every gradient and every parameter are the unpatched model's under ZeRO-3, and those of one process without it. `late`: the
    model is patched when DeepSpeed has it already."""
    own = train(engine_of(llama(tied), strict=strict), loss_of_llama)
    compare(own, train_alone(llama(tied), loss_of_llama), f"unpatched, tied={tied}")
    model = llama(tied)
    if not late:
        flce.patch(model)
    engine = engine_of(model, strict=strict)
    if late:
        flce.patch(engine.module)
    given: list[Any] = []

    def loss_of(engine: Any, tokens: Tensor, labels: Tensor) -> Any:
        outputs = engine(input_ids=tokens, labels=labels)
        given.append((outputs.logits, model.lm_head.weight.shape))
        return outputs.loss

    with counted() as calls:
        mine = train(engine, loss_of)
    assert calls == [STEPS * MICRO_BATCHES]
    compare(mine, own, f"patched, tied={tied}, strict={strict}")
    assert all(logits is None for logits, _ in given)
    assert not strict or {tuple(shape) for _, shape in given} == {(0,)}  # divided again when its forward is over


def a_patched_model_in_bf16(tied: bool) -> None:
    runs = [train(engine_of(model, bf16=True), loss_of_llama) for model in (llama(tied), flce.patch(llama(tied)))]
    compare(runs[1], runs[0], "bf16", bf16=True)


def evaluation_without_logits(tied: bool) -> None:
    whole = llama(tied).eval()
    engine = engine_of(flce.patch(llama(tied), evaluation_logits=False))
    engine.eval()
    tokens, labels = micro_batch(0, 1, dist.get_rank())
    with torch.no_grad(), counted() as calls:
        for _ in range(2):
            outputs = engine(input_ids=tokens, labels=labels)
            assert outputs.logits is None
            torch.testing.assert_close(outputs.loss, loss_of_llama(whole, tokens, labels))
        torch.testing.assert_close(engine(input_ids=tokens).logits, whole(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    assert calls == [2]


def a_model_made_divided() -> None:
    """No rank has ever had the whole model under deepspeed.zero.Init."""
    whole = llama()
    with deepspeed.zero.Init(config_dict_or_path=settings(micro_batches=1)):
        model = llama()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            model.load_state_dict(whole.state_dict())
    engine = engine_of(flce.patch(model))
    compare(train(engine, loss_of_llama), train_alone(whole, loss_of_llama), "zero.Init")


def a_fused_head(strict: bool) -> None:
    whole = body()
    engine = engine_of(copy.deepcopy(whole), strict=strict)
    compare(train(engine, loss_of_body), train_alone(whole, loss_of_body), f"FusedLMHead, strict={strict}")
    tokens, labels = micro_batch(9, 0, dist.get_rank())
    torch.testing.assert_close(engine(tokens), whole(tokens), rtol=1e-4, atol=1e-5)
    head = engine.module.head
    if strict:
        for given in (None, labels):
            with refused(flce.PlacementError, f"weight is a parameter {[V, D]}", "ZeRO-3", "GatheredParameters", "FusedLMHead"):
                head.forward(engine(tokens, hidden_states=True), labels=given)


def outside_of_the_forward() -> None:
    """A divided weight in a call of a function or a loss: refused by name before anything is computed."""
    module = engine_of(Outside()).module
    head, weight, bias = module.head, module.head.weight, module.head.bias
    tokens, labels = micro_batch(0, 0, 0)
    hidden = torch.randn(2, 12, D, requires_grad=True)
    whole = torch.randn(V, D)
    teacher = (tokens[..., None], torch.ones(2, 12, 1))
    pipeline = flce.PipelineFusedLoss(head, shift=1)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("weight", lambda: flce.linear_cross_entropy(hidden, weight, labels, shift=1)),
        ("weight", lambda: flce.linear_cross_entropy(hidden, head, labels, shift=1)),
        ("bias", lambda: flce.linear_cross_entropy(hidden, whole, labels, bias=bias)),
        ("weight", lambda: flce.linear_cross_entropy(hidden, weight, labels, process_group=dist.group.WORLD)),
        ("weight", lambda: flce.linear_logprobs(hidden, weight, labels)),
        ("weight", lambda: flce.linear_topk_distillation(hidden, weight, *teacher)),
        ("the output layer's weight", lambda: flce.LinearCrossEntropyLoss(head, shift=1)(hidden, labels)),
        ("the output layer's weight", lambda: flce.LinearCrossEntropyLoss(head, impl="pytorch", shift=1)(hidden, labels)),
        ("the output layer's weight", lambda: flce.LinearCrossEntropyLoss(head, shift=1).forward_logits(hidden)),
        ("the output layer's weight", lambda: pipeline(hidden, labels)),
    ]
    for name, call in calls:
        with refused(flce.PlacementError, f"{name} is a parameter", "ZeRO-3", "NOT_AVAILABLE", "GatheredParameters", "FusedLMHead"):
            call()
    with refused(flce.ArgumentError, "accumulate_into_grad=True", "ZeRO-3"):
        flce.PipelineFusedLoss(head, accumulate_into_grad=True, shift=1)(hidden, labels)
    assert weight.grad is None
    # The weight's shape, asked for alone, is the whole weight's.
    assert int(pipeline.normalize_by(labels)) == int((labels[:, 1:] != -100).sum())  # type: ignore[arg-type]
    assert f"vocab_size={V}, hidden_dim={D}" in repr(pipeline)


def a_gathering_under_way() -> None:
    """A weight of the whole shape that is being filled is refused, also where calls with it went before."""
    module = engine_of(Outside()).module
    weight = module.head.weight
    labels, hidden = micro_batch(0, 0, 0)[1], torch.randn(2, 12, D, requires_grad=True)
    with deepspeed.zero.GatheredParameters([weight]):
        expected = [flce.linear_cross_entropy(hidden, weight, labels) for _ in range(3)][-1].detach()
    gathering = weight.all_gather_coalesced([weight])
    assert weight.ds_status is ZeroParamStatus.INFLIGHT
    with refused(flce.PlacementError, "ZeRO-3", "INFLIGHT"):
        flce.linear_cross_entropy(hidden, weight, labels)
    gathering.wait()
    assert torch.equal(flce.linear_cross_entropy(hidden, weight, labels), expected)
    weight.partition()


def gathered_by_the_caller(kind: str) -> None:
    """Follows the errors' advice: the call and its backward inside GatheredParameters."""
    whole = body()
    model = copy.deepcopy(whole)
    engine = engine_of(model)
    head, weight, bias = model.head, model.head.weight, model.head.bias
    loss_fn = flce.PipelineFusedLoss(head, softcap=5.0, shift=1)

    def loss_outside(hidden: Tensor, labels: Tensor) -> Tensor:
        if kind == "loss":
            return loss_fn(hidden, labels)
        return flce.linear_cross_entropy(hidden, weight, labels, bias=bias, shift=1, softcap=5.0)

    tokens, labels = micro_batch(0, 0, dist.get_rank())
    expected = [whole(*micro_batch(0, 0, rank)) for rank in range(RANKS)]
    (sum(expected) / RANKS).backward()
    for _ in range(MICRO_BATCHES):  # one micro-batch each time; the gradient of the average
        hidden = engine(tokens, hidden_states=True)
        with deepspeed.zero.GatheredParameters([weight, bias]):
            loss = loss_outside(hidden, labels)
            engine.backward(loss)
        torch.testing.assert_close(loss, expected[dist.get_rank()])
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    for (name, mine), right in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_grad(mine), right.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    engine.step()
    hidden = engine(tokens, hidden_states=True)
    with deepspeed.zero.GatheredParameters([weight, bias]):
        loss = loss_outside(hidden, labels)
    with refused(flce.PlacementError, "in backward", "ZeRO-3", "NOT_AVAILABLE"):
        loss.backward()


def a_loss_of_the_trainers() -> None:
    """return_hidden_states has the loss computed outside of the forward."""
    engine = engine_of(flce.huggingface.return_hidden_states(llama()))
    loss_fn = flce.huggingface.CausalLMLoss(engine.module)
    tokens, labels = micro_batch(0, 0, dist.get_rank())
    with refused(flce.PlacementError, "the output layer's weight", "ZeRO-3", "flce.patch(model)"):
        loss_fn(engine(input_ids=tokens), labels)


def an_adapter_on_the_head() -> None:
    """ZeRO-3 gathers its layers one by one, and the loss reads several at a time: refused."""
    model = get_peft_model(flce.patch(llama()), LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    engine = engine_of(model)
    with refused(flce.PlacementError, "the output layer's", "ZeRO-3", "modules_to_save"):
        loss_of_llama(engine, *micro_batch(0, 0, dist.get_rank()))


def an_adapter_elsewhere(saved: list[str]) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=saved, init_lora_weights=False)
    runs = []
    for model in (llama(), flce.patch(llama())):
        torch.manual_seed(6)
        runs.append(train(engine_of(get_peft_model(model, lora)), loss_of_llama))
    compare(runs[1], runs[0], "LoRA")


CASES: list[tuple[Any, ...]] = [
    *((a_patched_model, tied, True, tied) for tied in (False, True)),
    (evaluation_without_logits, False),
    (a_model_made_divided,),
    (a_fused_head, True),
    (outside_of_the_forward,),
    (a_gathering_under_way,),
    *((gathered_by_the_caller, kind) for kind in ("function", "loss")),
    (a_loss_of_the_trainers,),
    (an_adapter_on_the_head,),
]
NIGHTLY: list[tuple[Any, ...]] = [
    *(
        (a_patched_model, *flags)
        for flags in itertools.product((False, True), repeat=3)
        if flags not in ((False, True, False), (True,) * 3)
    ),
    *((a_patched_model_in_bf16, tied) for tied in (False, True)),
    (evaluation_without_logits, True),
    (a_fused_head, False),
    *((an_adapter_elsewhere, saved) for saved in ([], ["lm_head"])),
]


def prepare() -> None:
    # DeepSpeed would compile an operator for all-reduces in shared memory; gloo does it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")


if __name__ == "__main__":
    run_main(run_named, lambda: NIGHTLY if "nightly" in sys.argv else CASES, prepare=prepare)
