"""torchtitan's own Trainer, on the CPU unless rank_support says otherwise: its modules see "cpu" as the device type then, and a config
function gives it a tiny Llama 3 and random tokens. `prepare` comes before any other import of torchtitan."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import rank_support
import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

SEQUENCE, BATCH, VOCAB = 16, 4, 510
# torchtitan 0.3.0 with torch 2.11 misses a name, which only spmd_backend="full_dtensor" has a use for, and backward of its
# ChunkedLossWrapper ends the process.
IS_OLD_TORCH = not hasattr(fsdp, "DataParallelMeshDims")


class _Unused(types.ModuleType):
    """Stands in for Triton, whose wheel takes a gigabyte, while torchtitan's kernels of expert parallel are imported: they can be
    decorated, and not launched."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)


class _Cpu(types.ModuleType):
    """torch.cpu, with what the Trainer asks of a device about its memory. It asks nothing more of the device than that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(_: Any = None) -> str:
        return "cpu"

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_properties(_: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    @staticmethod
    def memory_stats(_: Any = None) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats(_: Any = None) -> None:
        pass

    empty_cache = reset_peak_memory_stats


@functools.cache
def prepare() -> None:
    if IS_OLD_TORCH:
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[misc, unused-ignore]
    from torchtitan.tools import utils

    if rank_support.device() == "cpu":
        utils.device_type, utils.device_module = "cpu", _Cpu("cpu")
        utils.get_local_device = lambda: torch.device("cpu")
    if importlib.util.find_spec("triton") is None:
        import torchtitan.distributed.pipeline_parallel  # torch's own look for Triton comes first, and finds none

        triton: Any = _Unused("triton")
        triton.language = _Unused("triton.language")
        names = ("triton", "triton.language")
        sys.modules.update(zip(names, (triton, triton.language), strict=True))
        try:
            import torchtitan.distributed.minimal_async_ep  # noqa: F401
        finally:
            for name in names:
                del sys.modules[name]


@functools.cache
def _parts() -> Any:
    """A dataloader and a tokenizer: classes of torchtitan's, so they are made when it is there."""
    prepare()
    from dataclasses import dataclass

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        """Random tokens of a seed that tells ranks and steps apart; some labels do not count."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.rank, self.shape = dp_rank, (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            make = torch.Generator().manual_seed(11 + self.rank)
            while True:
                with torch.device("cpu"):  # the Trainer moves them
                    tokens = torch.randint(0, VOCAB, (self.shape[0], self.shape[1] + 1), generator=make)
                    labels = tokens[:, 1:].clone()
                    labels[torch.rand(self.shape, generator=make) < 0.3] = -100
                    positions = torch.arange(self.shape[1]).expand(self.shape).contiguous()
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCAB

    return types.SimpleNamespace(Tokens=Tokens, Tokenizer=Tokenizer)


def model_spec(*, layers: int = 2, tied: bool = False, converters: Any = None) -> Any:
    """torchtitan's debug Llama 3, smaller, with the attention that runs on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", converters=converters)
    config = spec.model
    config.vocab_size = config.lm_head.out_features = config.tok_embeddings.num_embeddings = VOCAB
    config.layers = config.layers[:layers]
    config.enable_weight_tying = tied
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def tiny(**model: Any) -> Any:
    """A config function of torchtitan's: `--module titan_support --config tiny`. Everything in fp32, and nothing clipped."""
    parts = _parts()
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    config = Trainer.Config(
        model_spec=model_spec(**model),
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB)),
        tokenizer=parts.Tokenizer.Config(),
        dataloader=parts.Tokens.Config(),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        training=TrainingConfig(
            local_batch_size=BATCH, seq_len=SEQUENCE, steps=3, max_norm=1e9, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
    )
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.warmup_steps = 0
    config.metrics.log_freq = 1
    config.debug.seed = 5
    config.comm.trace_buf_size = 0
    config.dump_folder = tempfile.gettempdir()  # nothing is written
    config.activation_checkpoint = None
    return config


def with_its_own_loss(config: Any) -> Any:
    """torchtitan's: of chunks, or of whole logits where this torch has no other."""
    from torchtitan.components.loss import CrossEntropyLoss

    if IS_OLD_TORCH:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    return config


@functools.cache
def loss_of_depths() -> Any:
    """torchtitan's MTPLoss where it takes tuples (after 0.3.0); else a class of that name and signature, which cannot be called."""
    prepare()
    from dataclasses import dataclass

    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.deepseek_v3.mtp import MTPLoss

    if issubclass(MTPLoss, CrossEntropyLoss):
        return MTPLoss

    class StandIn(CrossEntropyLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(CrossEntropyLoss.Config):
            mtp_scale: float = 0.3

        def __init__(self, config: Config, **others: Any) -> None:
            super().__init__(config, **others)
            self.mtp_scale = config.mtp_scale

        def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any = None, **loss_inputs: Any) -> Any:
            raise AssertionError("FusedLoss computes the loss itself")

    StandIn.Config.__module__, StandIn.Config.__qualname__ = MTPLoss.Config.__module__, MTPLoss.Config.__qualname__
    return StandIn


class Run:
    """Numbers that the Trainer logged, and its remains."""

    def __init__(self, config: Any) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.validated: list[float] = []
        self.trainer: Any = config.build()
        for module in (module for part in self.trainer.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):  # a scaled sum, torchtitan's factor of 1, is not among gloo's reductions
                module.set_force_sum_reduction_for_comms(True)
        if self.trainer.parallel_dims.pp_enabled:
            self.trainer.pp_schedule.step = functools.partial(step_of_whole_batch, self.trainer.pp_schedule.step)
        processor = self.trainer.metrics_processor
        processor.log = self._log
        processor.log_validation = lambda loss, step: self.validated.append(loss)
        self._step = self.trainer.optimizers.step
        self.trainer.optimizers.step = self._note_gradients
        try:
            self._train(config)
        finally:
            self.trainer.close()

    def _train(self, config: Any) -> None:
        """The loop of Trainer.train, which itself needs a newer torch than 2.13 after its first step (torch.distributed.set_timeout)."""
        data = self.trainer.batch_generator(self.trainer.dataloader)
        for _ in range(config.training.steps):
            self.trainer.step += 1
            self.trainer.train_step(data)
            if config.validator.enable and self.trainer.validator.should_validate(self.trainer.step):
                self.trainer.validator.validate(self.trainer.model_parts, self.trainer.step)

    def _log(self, step: int, loss: float, largest: float, grad_norm: float, **_: Any) -> None:
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)

    def _note_gradients(self) -> None:
        named = [item for part in self.trainer.model_parts for item in part.named_parameters()]
        self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})
        self._step()


def step_of_whole_batch(step: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **others: Any) -> None:
    """A schedule's step as torchtitan calls it, which hands over microbatches, with a torch whose schedules split the batch themselves
    (2.13)."""
    inputs = [torch.cat(parts) for parts in zip(*(arg_mbs or []), strict=True)]
    named = {name: torch.cat([microbatch[name] for microbatch in kwarg_mbs]) for name in kwarg_mbs[0]}
    step(*inputs, target=None if target_mbs is None else torch.cat(target_mbs), **others, **named)


def whole(tensor: Any) -> Tensor:
    made: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return made.detach().clone()


@contextlib.contextmanager
def calls_of_flce() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of hidden states that flce's function was called with."""
    import flce.torchtitan as adapter

    own, made = adapter.linear_cross_entropy, []

    def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(tuple(hidden.shape))
        return own(hidden, *args, **kwargs)

    adapter.linear_cross_entropy = counted
    try:
        yield made
    finally:
        adapter.linear_cross_entropy = own


def compare(own: Run, fused: Run) -> None:
    """Losses, gradient norms and every gradient of every step, in fp32."""
    torch.testing.assert_close(torch.tensor(fused.losses), torch.tensor(own.losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(fused.grad_norms), torch.tensor(own.grad_norms), rtol=1e-4, atol=1e-6)
    assert len(fused.gradients) == len(own.gradients) > 0
    for got, right in zip(fused.gradients, own.gradients, strict=True):
        assert got.keys() == right.keys()
        for name, gradient in right.items():
            torch.testing.assert_close(got[name], gradient, rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
