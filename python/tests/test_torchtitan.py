"""flce.torchtitan with torchtitan's own Trainer, models, parallelisms and config system."""

# ruff: noqa: E402  # imports come after what skips without torchtitan, and prepares it

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

for _name in ("torchtitan", "spmd_types", "tensorboard"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: tools/setup.sh --trainers fetches tools/trainers.txt")

import titan_support

titan_support.prepare()
from test_pipeline import launch
from titan_support import IS_OLD_TORCH, SEQUENCE, VOCAB, Run, calls_of_flce, compare, tiny, with_its_own_loss
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.config import ConfigManager, OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear

import flce
from flce.torchtitan import FusedLoss, fused_loss

HERE = Path(__file__).resolve().parent
D = 32
DEVICE = rank_support.device()


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A group of this process alone, as torchrun would make it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    dist.init_process_group(rank_support.one_rank_backend())
    torch.autograd.set_multithreading_enabled(False)  # torchtitan's own start of the ranks does this
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        gc.enable()  # the Trainer takes over the garbage collector
        torch.set_num_threads(threads)
        dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def config(**settings: Any) -> Any:
    made = tiny(**settings.pop("model", {}))
    for path, value in settings.items():
        section, name = path.split("__")
        setattr(getattr(made, section), name, value)
    return made


def linear(*, bias: bool = False) -> Any:
    torch.manual_seed(1)
    head = Linear.Config(in_features=D, out_features=VOCAB, bias=bias).build()
    nn.init.normal_(head.weight)
    return head.to(DEVICE)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 12, D, generator=make).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (2, 12), generator=make).to(DEVICE)
    labels[0, 3:7] = -100
    return hidden, labels


def loss_of(head: Any, **options: Any) -> FusedLoss:
    loss: FusedLoss = FusedLoss.Config(**options).build()
    loss.set_lm_head(head)
    return loss


# ── With the Trainer ────────────────────────────────


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": {"tied": True}},
        {"training__global_batch_size": 8},
        {"parallelism__fsdp_reshard_after_forward": "always"},
        {"parallelism__spmd_backend": "partial_dtensor"},
        {"compile__enable": True, "compile__components": ["loss"], "compile__backend": "eager"},
    ],
    ids=str,
)
def test_trainer_goes_the_same_way(settings: dict[str, Any]) -> None:
    own = Run(with_its_own_loss(config(**settings)))
    assert type(own.trainer.loss_fn) is (CrossEntropyLoss if IS_OLD_TORCH else ChunkedLossWrapper)
    chosen = config(**settings)
    chosen.override.imports = ["flce.torchtitan.fused_loss"]
    with calls_of_flce() as calls:
        fused = Run(chosen)
    assert type(fused.trainer.loss_fn) is FusedLoss
    assert len(calls) == (6 if "training__global_batch_size" in settings else 3)
    compare(own, fused)


def test_validation_between_steps() -> None:
    from torchtitan.components.validate import Validator

    def validated(chosen: Any) -> Any:
        chosen.validator = Validator.Config(enable=True, freq=1, steps=2, dataloader=titan_support._parts().Tokens.Config())
        return chosen

    own = Run(with_its_own_loss(validated(config())))
    chosen = validated(config())
    chosen.loss = fused_loss(chosen.loss)
    with calls_of_flce() as calls:
        fused = Run(chosen)
    assert len(calls) == 9 and len(own.validated) == 3
    torch.testing.assert_close(torch.tensor(fused.validated), torch.tensor(own.validated), rtol=1e-5, atol=1e-6)
    compare(own, fused)
    weight = fused.trainer.loss_fn.lm_head.weight
    assert weight.shape == (VOCAB, 256)


def test_sixteen_bit_parameters() -> None:
    """bf16 parameters and fp32 reduction, torchtitan's default: close to the whole in fp32, and no further than its own loss is."""
    exact = Run(with_its_own_loss(config()))
    own = Run(with_its_own_loss(config(training__mixed_precision_param="bfloat16")))
    chosen = config(training__mixed_precision_param="bfloat16")
    chosen.loss = fused_loss(chosen.loss)
    fused = Run(chosen)

    def error(run: Run) -> float:
        right = exact.gradients[0]["lm_head.weight"]
        return float((run.gradients[0]["lm_head.weight"] - right).norm() / right.norm())

    assert error(fused) < 1.1 * error(own) + 1e-4
    torch.testing.assert_close(torch.tensor(fused.losses), torch.tensor(own.losses), rtol=5e-3, atol=0)


def test_command_line() -> None:
    """--module, --config and the one option."""
    chosen = ["--module", "titan_support", "--config", "tiny", "--override.imports"]
    parsed = ConfigManager().parse_args([*chosen, 'flce.torchtitan.fused_loss={"z_loss": 1e-4, "workspace_limit_bytes": 100000000}'])
    lines = apply_overrides(parsed.override, parsed)
    assert len(lines) == 1 and "flce.torchtitan.fused_loss" in lines[0]
    assert type(parsed.loss) is FusedLoss.Config
    assert parsed.loss.z_loss == 1e-4 and parsed.loss.num_chunks == 4 and parsed.loss.loss_fn.global_vocab_size == VOCAB
    assert parsed.to_dict()["loss"]["z_loss"] == 1e-4
    plain = tiny()
    plain.loss = CrossEntropyLoss.Config()
    apply_overrides(OverrideConfig(imports=["flce.torchtitan.fused_loss"]), plain)
    assert type(plain.loss) is FusedLoss.Config
    with pytest.raises(TypeError, match="fused_loss got 'zloss'; its options are z_loss"):
        fused_loss(plain.loss, zloss=1.0)
    with pytest.raises(ValueError, match="loss is a MSELoss"):
        fused_loss(MSELoss.Config())


@pytest.mark.nightly("python/flce/torchtitan", "python/flce/parallel", "python/tests/test_torchtitan", "python/tests/torchtitan")
def test_ranks() -> None:
    """FSDP2, tensor parallel and pipelines on two ranks."""
    assert rank_support.cases_passed("torchtitan_worker.py", "2") == {2: 14}


@pytest.mark.nightly("examples/torchtitan_style.py")
def test_example_trains_and_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # freed memory goes back to the system, and a peak shows
    output = launch(str(HERE.parent.parent / "examples" / "torchtitan_style.py"), "--tiny", "--steps", "3")
    memory = {name: float(mib) for name, mib in re.findall(r"^ *(\w+): losses .* ([\d.]+) MiB at the peak", output, re.MULTILINE)}
    assert memory.keys() == {"CrossEntropyLoss", "ChunkedLossWrapper", "FusedLoss"}
    assert memory["FusedLoss"] < memory["CrossEntropyLoss"] / 2


# ── By itself ───────────────────────────────────────


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [None, 7, "tensor"])
def test_loss_and_gradients(bias: bool, count: Any) -> None:
    hidden, labels = data()
    if count == "tensor":
        count = torch.tensor(9, device=DEVICE)
    heads = [linear(bias=bias) for _ in range(2)]
    own = ChunkedLossWrapper.Config(num_chunks=4).build()
    own.set_lm_head(heads[0])
    results = []
    for loss, head in ((own, heads[0]), (loss_of(heads[1], num_chunks=5), heads[1])):  # 12 tokens are not divisible by 5
        leaf = hidden.detach().requires_grad_()
        value, metrics = loss(leaf * 1.0, labels, count, positions=labels)
        value.backward()
        assert metrics == {} and value.dtype == torch.float32 and value.dim() == 0
        results.append([value.detach(), leaf.grad, *(p.grad for p in head.parameters())])
    for got, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_options() -> None:
    hidden, labels = data()
    head = linear()
    loss = loss_of(head, z_loss=1e-3, label_smoothing=0.1, logit_scale=0.5, softcap=20.0)
    value, _ = loss(hidden, labels, 10)
    logits = 20.0 * torch.tanh(0.5 * head(hidden) / 20.0)
    flat = logits.flatten(0, 1)
    right = F.cross_entropy(flat, labels.flatten(), reduction="sum", label_smoothing=0.1)
    right = (right + 1e-3 * (flat.logsumexp(-1) ** 2)[labels.flatten() != -100].sum()) / 10
    torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="softcap"):
        loss_of(head, softcap=-1.0)
    with pytest.raises(ValueError, match=r"loss_fn is a MSELoss\.Config; FusedLoss computes CrossEntropyLoss alone"):
        loss_of(head, loss_fn=MSELoss.Config())


def test_a_capped_head_of_torchtitan() -> None:
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    hidden, labels = data()
    for cap in (15.0, None):
        torch.manual_seed(1)
        head = SoftCappedLinear.Config(in_features=D, out_features=VOCAB, output_multiplier=0.7, output_soft_cap_temp=cap).build()
        nn.init.normal_(head.to(DEVICE).weight)
        value, _ = loss_of(head)(hidden, labels, 3)
        right = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / 3
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"logit_scale is 0.5 and the output layer, a .*SoftCappedLinear, has one of 0.7"):
        loss_of(head, logit_scale=0.5)(hidden, labels)


def test_lora_on_the_head() -> None:
    """torchtitan's converter adapts every linear layer, the output layer too."""
    from torchtitan.components.lora import LoRAConverter

    converters = [LoRAConverter.Config(rank=4)]
    backend = {"parallelism__spmd_backend": "partial_dtensor"}  # spmd_types makes frozen parameters anew, and they train (0.3.0)
    own = Run(with_its_own_loss(config(model={"converters": converters}, **backend)))
    chosen = config(model={"converters": converters}, **backend)
    chosen.loss = fused_loss(chosen.loss)
    with calls_of_flce() as calls:
        fused = Run(chosen)
    assert calls == [(4, SEQUENCE, 256 + 4)] * 3
    assert "lm_head.lora_b.weight" in fused.gradients[0] and "lm_head.weight" not in fused.gradients[0]
    assert "lm_head.lora_a.weight" in fused.gradients[1] and fused.gradients[1]["lm_head.lora_a.weight"].abs().sum() > 0
    compare(own, fused)


def test_what_is_frozen() -> None:
    hidden, labels = data()
    head = linear()
    head.weight.requires_grad_(False)
    value, _ = loss_of(head)(hidden, labels)
    value.backward()
    assert hidden.grad is not None and head.weight.grad is None
    head.weight.requires_grad_(True)
    value, _ = loss_of(head)(hidden.detach(), labels)
    value.backward()  # the trainer's, which must not fail
    expected = torch.autograd.grad(F.cross_entropy(head(hidden.detach()).flatten(0, 1), labels.flatten(), reduction="sum"), head.weight)
    torch.testing.assert_close(head.weight.grad, expected[0], rtol=1e-4, atol=1e-4)
    head.weight.grad = None
    with torch.no_grad():
        value, _ = loss_of(head)(hidden, labels)
    assert not value.requires_grad and head.weight.grad is None


def test_labels_that_do_not_count() -> None:
    hidden, labels = data()
    value, _ = loss_of(linear())(hidden, torch.full_like(labels, -100), torch.tensor(5, device=DEVICE))
    value.backward()
    assert float(value.detach()) == 0 and hidden.grad is not None and not hidden.grad.any()


@pytest.mark.skipif(DEVICE != "cpu", reason="an assertion on the device, which ends all of the process's work there")
def test_another_gradient_than_one_is_refused() -> None:
    hidden, labels = data()
    value, _ = loss_of(linear())(hidden, labels)
    with pytest.raises(flce.ArgumentError, match="gradient other than 1"):
        (value / 2).backward()


def test_heads_that_are_refused() -> None:
    hidden, labels = data()

    class Other(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / 2

    def refused(head: Any, message: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=message):
            loss_of(head)(hidden, labels)

    refused(None, "call set_lm_head", AssertionError)
    refused(Other(Linear.Config(in_features=D, out_features=VOCAB)), "lm_head is a .*Other, whose logits are not known")
    head = linear()
    head.register_forward_hook(lambda *_: None)
    refused(head, "lm_head has a hook that is not FSDP2's")
    head = linear()
    head.forward = lambda x: x
    refused(head, "lm_head has a forward of its own")
    head = linear()
    head.weight = nn.Parameter(head.weight[:100].detach())
    refused(head, r"lm_head's weight has 100 of 510 rows", flce.PlacementError)
    refused(nn.LayerNorm(D), "lm_head is a .*LayerNorm")
    head = linear()
    with pytest.raises(flce.ShapeError, match="hidden"):
        loss_of(head)(hidden[..., :8], labels)
    assert "forward" not in vars(head)  # unchanged, also after an error
