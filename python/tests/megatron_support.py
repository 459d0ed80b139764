"""Tiny GPTModels of megatron-core, a training step of them, and callers of what newer versions of the package call. On the CPU, or where
rank_support says."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import rank_support
import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.megatron import _head

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about missing packages: Transformer Engine, Apex
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper, roll_tensor
    from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: F401  # for tests
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, PADDED, HIDDEN, SEQUENCE, BATCH = 101, 104, 32, 16, 2
HAS_HOOK = "output_processor" in inspect.signature(GPTModel.forward).parameters


@contextlib.contextmanager
def megatron_on_cpu(**sizes: int) -> Iterator[None]:
    """Megatron's groups over the process group that there is, and what it asks of CUDA answered for a CPU: the device that it allocates on,
    where tests run on one, and a generator for dropout, of which there is none here."""
    current_device = torch.cuda.current_device
    if rank_support.device() == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device = current_device
        MTPLossLoggingHelper.tracker.clear()


def gpt_model(*, tied: bool = False, depths: int = 0, seed: int = 0, **config: Any) -> Any:
    """Makes a model with the same weights for the same seed, on every number of tensor-parallel ranks."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mtp_num_layers": depths or None,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "bias_dropout_fusion": False,
        **config,
    }
    torch.manual_seed(seed)
    made, spec = TransformerConfig(**settings), get_gpt_layer_local_spec()
    heads = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False) if depths else None
    # Torch's norm refuses sequence parallel, in which nobody adds up its weights' gradients: those are each rank's here.
    with mock.patch.object(
        WrappedTorchNorm, "__new__", lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(hidden_size, eps)
    ):
        return GPTModel(
            made,
            spec,
            vocab_size=PADDED,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            mtp_block_spec=heads,
            share_embeddings_and_output_weights=tied,
        )


class Batch:
    """Tokens, and a loss_mask with some of them out."""

    def __init__(self, seed: int = 1) -> None:
        make = rank_support.generator(seed)
        self.tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=make)
        self.labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=make)
        self.positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        self.attention_mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        self.loss_mask = (torch.rand(BATCH, SEQUENCE, generator=make) > 0.3).float()
        self.labels[:, -1] = self.labels[:, 0]

    def losses(self, model: Any, **keywords: Any) -> Tensor:
        made: Tensor = model(self.tokens, self.positions, self.attention_mask, labels=self.labels, loss_mask=self.loss_mask, **keywords)
        return made

    def masked_mean(self, losses: Tensor) -> Tensor:
        return (losses * self.loss_mask).sum() / self.loss_mask.sum()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def same_gradients(mine: Any, own: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    got, right = gradients(mine), gradients(own)
    assert got.keys() == right.keys() and got
    for name, gradient in right.items():
        torch.testing.assert_close(got[name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def copied(model: Any, **settings: Any) -> Any:
    """A second model with the weights of `model`; Megatron's cannot be copied, since they hold process groups."""
    made = gpt_model(**settings)
    made.load_state_dict(model.state_dict())
    return made


def call_with_processor(model: Any, batch: Batch, processor: Any, *, context: Any = None, scale: Any = None) -> Any:
    """GPTModel.forward(output_processor=..., output_processor_context=...). The installed package's where it takes one. Else what that of
    Megatron-LM d98e8a6 does: after the decoder the processor is called in place of the output layer, with these keywords."""
    if HAS_HOOK and scale is None:
        return batch.losses(model, output_processor=processor, output_processor_context=context)

    def postprocess(**given: Any) -> Any:
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        passed = ("hidden_states", "labels", "loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input")
        more = ("inference_context", "packed_seq_params", "runtime_gather_output")
        return processor(
            **{name: given[name] for name in (*passed, *more)},
            output_layer=model.output_layer,
            output_weight=weight,
            context=context,
            compute_language_model_loss=model.compute_language_model_loss,
            scale_logits=scale or (lambda logits: logits),
            config=model.config,
        )

    model.__dict__["_postprocess"] = postprocess
    try:
        return batch.losses(model)
    finally:
        del model.__dict__["_postprocess"]


def process_mtp_loss(
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Any,
    config: Any,
    cp_group: Any = None,
    tp_group: Any = None,
    scale_logits_fn: Any = None,
) -> tuple[Tensor, list[float]]:
    """Stands for Megatron-LM d98e8a6's function of this name where the installed package has none. It asks for each depth's logits, a
    scale, a loss, and how many largest logits are the label's; over tensor-parallel ranks from each rank's own maximum. Returns hidden
    states, which carry the losses, and the numbers of hits."""
    main, *heads = hidden_states.chunk(1 + config.mtp_num_layers)
    hits = []
    for head in heads:
        logits, _ = output_layer(head, weight=output_weight, runtime_gather_output=runtime_gather_output)
        logits = logits if scale_logits_fn is None else scale_logits_fn(logits)
        labels, _ = roll_tensor(labels, cp_group=cp_group)
        loss_mask, count = roll_tensor(loss_mask, cp_group=cp_group)
        losses = compute_language_model_loss(labels, logits) * loss_mask
        if tp_group is not None and tp_group.size() > 1 and not output_layer.gather_output:
            largest, where = logits.max(dim=-1)
            both = [[torch.empty_like(one) for _ in range(tp_group.size())] for one in (largest, where)]
            for everyone, one in zip(both, (largest, where), strict=True):
                dist.all_gather(everyone, one, group=tp_group)
            winner = torch.stack(both[0]).argmax(0)
            found = winner * logits.size(-1) + torch.stack(both[1]).gather(0, winner[None])[0]
        else:
            found = torch.argmax(logits, dim=-1)
        hits.append(float(((found == labels.t()) & loss_mask.t().bool()).sum()))
        main = MTPLossAutoScaler.apply(main, config.mtp_loss_scaling_factor / config.mtp_num_layers * losses / count)
    return main, hits


HAS_PROCESS_MTP_LOSS = hasattr(multi_token_prediction, "process_mtp_loss")


# ── Fixtures ────────────────────────────────────────


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group(rank_support.one_rank_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_on_cpu():
            yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def megatron_groups() -> Iterator[None]:
    """One rank, for the tests of a file."""
    with group_of_one():
        yield


@pytest.fixture(autouse=True, name="fused")
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every call of flce's function."""
    MTPLossLoggingHelper.tracker.clear()
    calls: list[dict[str, Any]] = []
    function = flce.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(_head, "linear_cross_entropy", counted)
    return calls
