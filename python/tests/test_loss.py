"""LinearCrossEntropyLoss: one meaning for every implementation, a borrowed weight, and what it says when it falls back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_close
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce import loss as loss_module
from flce.core import _once

IMPLEMENTATIONS = ["flce", "pytorch", "torch_compile"]
B, S, D, V = 3, 12, 16, 50


def batch(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(B, S, D, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (B, S), device=device)
    labels[0, 5:] = -100
    return hidden, labels


def expected_loss(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden.double(), head.weight.double(), None if head.bias is None else head.bias.double())
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients(device: str, impl: str, bias: bool) -> None:
    head = nn.Linear(D, V, bias=bias, device=device)
    loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, chunk_size=7, shift=1)
    hidden, labels = batch(device)
    loss = loss_fn(hidden, labels)
    parameters = [hidden, *head.parameters()]
    gradients = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(expected_loss(head, hidden, labels), parameters)
    assert_close(loss, expected_loss(head, hidden, labels), torch.float32, output=True)
    for actual, right in zip(gradients, wanted, strict=True):
        assert_close(actual, right, torch.float32)


OPTION_SETS: list[dict[str, Any]] = [
    {"softcap": 5.0, "logit_scale": 0.5},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"reduction": "sum"},
    {"reduction": "none", "z_loss": 1e-2},
    {"shift": 0},
    {"ignore_index": 3},
    {"class_weight": torch.linspace(0.5, 2.0, V), "label_smoothing": 0.1, "z_loss": 1e-2},
]


@pytest.mark.parametrize("options", OPTION_SETS, ids=lambda options: "+".join(options))
def test_implementations_agree(device: str, options: dict[str, Any]) -> None:
    head = nn.Linear(D, V, device=device)
    hidden, labels = batch(device)
    labels[1, 3] = V + 4  # out of range: ignored by all
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    results = []
    for impl in ("flce", "pytorch"):
        loss = flce.LinearCrossEntropyLoss(head, impl=impl, chunk_size=10, **{"shift": 1, **options})(hidden, labels)
        results.append((loss, *torch.autograd.grad(loss.sum(), [hidden, *head.parameters()])))
    for actual, right in zip(*results, strict=True):
        assert_close(actual, right, torch.float32)
    with pytest.raises(flce.LabelError):
        flce.check_labels()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[:2])
def test_given_count_and_every_label_ignored(device: str, impl: str) -> None:
    head = nn.Linear(D, V, device=device)
    loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, shift=1)
    hidden, labels = batch(device)
    valid = loss_fn.num_valid(labels)
    assert valid.item() == (labels[:, 1:] != -100).sum().item()
    assert loss_fn(hidden, labels, num_valid_tokens=2 * valid).item() == pytest.approx(loss_fn(hidden, labels).item() / 2, rel=1e-6)
    loss = loss_fn(hidden, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[:2])
def test_weight_is_looked_up_at_each_call(device: str, impl: str) -> None:
    head = nn.Linear(D, V, bias=False, device=device)
    loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, shift=1)
    hidden, labels = batch(device)

    def check() -> None:
        assert_close(loss_fn(hidden, labels), expected_loss(head, hidden, labels), torch.float32, output=True)
        torch.testing.assert_close(loss_fn.forward_logits(hidden), F.linear(hidden, head.weight))

    check()
    loss_fn(hidden, labels).backward()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    check()
    head.weight = nn.Parameter(torch.randn(V, D, device=device))
    check()
    head.to(torch.bfloat16)
    rounded = hidden.detach().bfloat16()
    # Plain torch rounds logits to bf16.
    factor = 1.0 if impl == "flce" else 200.0
    assert_close(loss_fn(rounded, labels), expected_loss(head, rounded, labels), torch.bfloat16, output=True, factor=factor)


def test_bf16_hidden_with_fp32_weight(device: str) -> None:
    head = nn.Linear(D, V, bias=False, device=device)
    hidden, labels = batch(device, torch.bfloat16)
    for impl in ("flce", "pytorch"):
        head.weight.grad = None
        loss_fn = flce.LinearCrossEntropyLoss(head, impl=impl, shift=1)
        loss = loss_fn(hidden, labels)
        loss.backward()
        rounded = copy.deepcopy(head).bfloat16()
        assert_close(loss, expected_loss(rounded, hidden, labels), torch.bfloat16, output=True, factor=1.0 if impl == "flce" else 200.0)
        if impl == "flce":
            wanted = torch.autograd.grad(expected_loss(rounded, hidden, labels), rounded.weight)[0]
            assert_close(head.weight.grad, wanted, torch.bfloat16)
        assert head.weight.grad is not None
        assert loss_fn.forward_logits(hidden).dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operator's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_pytorch_holds_one_chunk_of_logits(device: str) -> None:
    head = nn.Linear(D, 4000, bias=False, device=device)
    hidden, labels = batch(device)
    loss_fn = flce.LinearCrossEntropyLoss(head, impl="pytorch", chunk_size=5, shift=1)
    with LargestTensor() as largest:
        loss_fn(hidden, labels).backward()
    assert largest.numel == max(5 * 4000, D * 4000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss_fn(hidden, labels)
    assert max(saved, default=0) <= D * 4000


def test_compile_option_compiles_the_chunk(device: str) -> None:
    head = nn.Linear(D, V, device=device)
    hidden, labels = batch(device)
    loss_fn = flce.LinearCrossEntropyLoss(head, impl="pytorch", compile=True, shift=1)
    assert loss_fn(hidden, labels).item() == pytest.approx(expected_loss(head, hidden, labels).item(), rel=1e-5)
    assert loss_fn.actual_impl == "pytorch"
    assert "compile=True" in repr(loss_fn)


def test_nothing_is_registered() -> None:
    head = nn.Linear(D, V)
    trainer = nn.Module()
    trainer.loss = flce.LinearCrossEntropyLoss(head, shift=1)  # type: ignore[assignment]
    assert not list(trainer.state_dict())
    assert isinstance(trainer.loss, flce.FusedOutputLoss)


def test_auto_takes_flce_on_a_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "flce"):
        losses = [flce.LinearCrossEntropyLoss(nn.Linear(D, V), shift=1), flce.PipelineFusedLoss(nn.Linear(D, V), shift=1)]
        hidden, labels = batch("cpu")
        losses[0](hidden, labels).backward()
    assert [loss.actual_impl for loss in losses] == ["flce", "flce"]
    assert not caplog.records


def no_library() -> None:
    raise flce.UnavailableError("libflce.so is not there")


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (lambda monkeypatch: monkeypatch.setattr(loss_module._native, "library", no_library), "libflce.so is not there"),
        (old_gpu, "Tesla T4 is older than sm_80"),
    ],
    ids=["no library", "old GPU"],
)
def test_auto_says_once_what_it_falls_back_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arrange: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    monkeypatch.setattr(_once, "said", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arrange(monkeypatch)
    with caplog.at_level(logging.WARNING, "flce"):
        losses = [flce.LinearCrossEntropyLoss(nn.Linear(D, V), shift=1) for _ in range(2)]
    assert [loss.actual_impl for loss in losses] == ["pytorch", "pytorch"]
    assert [record.message for record in caplog.records] == [f"flce: LinearCrossEntropyLoss(impl='auto') uses 'pytorch': {reason}"]


def test_auto_computes_what_flce_refuses_in_plain_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_once, "said", set())
    head = nn.Linear(D, V, dtype=torch.float64)
    hidden, labels = batch("cpu", torch.float64)
    loss_fn = flce.LinearCrossEntropyLoss(head, shift=1)
    with caplog.at_level(logging.WARNING, "flce"):
        losses = [loss_fn(hidden, labels) for _ in range(2)]
    assert [record.message for record in caplog.records] == [
        "flce: LinearCrossEntropyLoss(impl='auto') uses 'pytorch' for hidden states in torch.float64 on cpu"
    ]
    assert losses[0].item() == pytest.approx(expected_loss(head, hidden, labels).item(), rel=1e-6)
    assert loss_fn.actual_impl == "flce"  # for the next hidden states
    with pytest.raises(flce.DTypeError, match=r"hidden has dtype torch\.float64"):
        flce.LinearCrossEntropyLoss(head, impl="flce", shift=1)(hidden, labels)


def test_auto_falls_back_at_the_first_call_and_an_explicit_choice_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_once, "said", set())
    monkeypatch.setattr(loss_module, "_why_not_flce", lambda: None)

    def unavailable(*_: Any, **__: Any) -> None:
        raise flce.UnavailableError("no NVRTC")

    monkeypatch.setattr(loss_module, "linear_cross_entropy", unavailable)
    hidden, labels = batch("cpu")
    loss_fn = flce.LinearCrossEntropyLoss(nn.Linear(D, V), shift=1)
    assert loss_fn.actual_impl == "flce"
    with caplog.at_level(logging.WARNING, "flce"):
        loss_fn(hidden, labels)
    assert loss_fn.actual_impl == "pytorch"
    assert "falls back to 'pytorch': no NVRTC" in caplog.text
    with pytest.raises(ImportError, match="no NVRTC"):
        flce.LinearCrossEntropyLoss(nn.Linear(D, V), impl="flce", shift=1)(hidden, labels)


def test_an_explicit_impl_without_the_library_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module._native, "library", no_library)
    with pytest.raises(ImportError, match=r"libflce\.so is not there"):
        flce.LinearCrossEntropyLoss(nn.Linear(D, V), impl="flce", shift=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"impl": "triton"}, r"impl is 'triton'; allowed are 'auto', 'flce', 'torch_compile', 'pytorch'"),
        ({"softcaps": 1.0}, r"softcaps is not an option"),
        ({"reduction": "average"}, r"reduction is 'average'"),
        ({"chunk_size": 0}, r"chunk_size is 0"),
        ({"compile": "no"}, r"compile is 'no'; it must be True or False"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flce.LinearCrossEntropyLoss(nn.Linear(D, V), shift=1, **arguments)


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("softcap", -1.0, flce.SpecError),
        ("softcap", "30", flce.SpecError),
        ("label_smoothing", 1.5, flce.SpecError),
        ("z_loss", float("nan"), flce.SpecError),
        ("logit_scale", 0.0, flce.SpecError),
        ("shift", -1, flce.ArgumentError),
        ("shift", 1.0, flce.ArgumentError),
        ("chunk_size", "4096", flce.ArgumentError),
        ("reduction", ["mean"], flce.ArgumentError),
        ("temperature", 0.0, flce.ArgumentError),
        ("temperature", "hot", flce.DTypeError),
        ("ignore_index", 1.0, flce.DTypeError),
        ("workspace_limit_bytes", True, flce.ArgumentError),
        ("retain_in_grad_weight", 1, flce.ArgumentError),
    ],
)
def test_values_that_no_impl_takes(impl: str, option: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"{option} is "):
        flce.LinearCrossEntropyLoss(nn.Linear(8, 11), impl=impl, **{"shift": 1, option: value})


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
def test_tensors_that_no_impl_takes(device: str, impl: str) -> None:
    loss = flce.LinearCrossEntropyLoss(nn.Linear(16, 32, device=device), impl=impl, class_weight=torch.ones(3, device=device), shift=1)
    plain = flce.LinearCrossEntropyLoss(loss.output_embeddings, impl=impl, shift=1)
    hidden, labels = torch.randn(2, 5, 16, device=device), torch.zeros(2, 5, dtype=torch.long, device=device)
    for arguments, kind, name in (
        ((hidden[..., :8], labels), flce.ShapeError, "hidden"),
        ((hidden, labels[:1]), flce.ShapeError, "target"),
        ((hidden, labels.float()), flce.DTypeError, "target"),
        ((hidden, None), flce.DTypeError, "target"),
    ):
        with pytest.raises(kind, match=f"{name} (has|is)"):
            plain(*arguments)
    with pytest.raises(flce.ShapeError, match=r"class_weight has shape \[3\]"):
        loss(hidden, labels)


@pytest.mark.parametrize("impl", ["flce", "pytorch"])
@pytest.mark.parametrize("count", [0, -3, -0.5])
def test_a_count_of_zero_or_less_gives_zero(device: str, impl: str, count: float) -> None:
    loss = flce.LinearCrossEntropyLoss(nn.Linear(16, 32, device=device), impl=impl, shift=1)
    hidden = torch.randn(2, 5, 16, device=device, requires_grad=True)
    labels = torch.arange(10, device=device).view(2, 5)
    value = loss(hidden, labels, num_valid_tokens=torch.tensor(count, device=device))
    value.backward()
    assert value.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_labels_that_are_counted(device: str) -> None:
    """Counts labels by the kernels' rule: not ignored, and in the vocabulary."""
    loss = flce.LinearCrossEntropyLoss(nn.Linear(16, 32, device=device), impl="pytorch", shift=0)
    assert loss.num_valid(torch.tensor([0, 31, -100, 32, -7], device=device)).item() == 2


def test_output_embeddings_without_a_weight() -> None:
    with pytest.raises(flce.ArgumentError, match=r"output_embeddings is a ReLU without a weight.*get_output_embeddings"):
        flce.LinearCrossEntropyLoss(nn.ReLU(), shift=1)


class Scaled(nn.Linear):
    """An output layer whose logits are three times its product."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * super().forward(input)


def replaced() -> nn.Linear:
    head = nn.Linear(D, V)
    head.forward = lambda input: 3.0 * F.linear(input, head.weight, head.bias)  # type: ignore[method-assign]
    return head


def hooked() -> nn.Linear:
    head = nn.Linear(D, V)
    head.register_forward_hook(lambda module, given, output: 3.0 * output)
    return head


def quantised(module: str, name: str, dtype: torch.dtype) -> nn.Linear:
    """A layer with a weight of a class of that name, as bitsandbytes and torchao make it."""
    kind: Any = type(name, (nn.Parameter,), {"__module__": module})
    head = nn.Linear(D, V)
    weight = torch.zeros(V * D // 2, 1, dtype=dtype) if name == "Params4bit" else torch.zeros(V, D, dtype=dtype)
    head.weight = torch.Tensor._make_subclass(kind, weight, False)  # type: ignore[assignment]
    return head


def offloaded() -> nn.Linear:
    offload: Callable[..., nn.Linear] = pytest.importorskip("accelerate").cpu_offload
    return offload(nn.Linear(D, V), execution_device=torch.device("cpu"))


NO_PRODUCTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(D, V)), flce.ArgumentError, "hook.*WeightNorm"),
    "spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(D, V)), flce.ArgumentError, "hook.*SpectralNorm"),
    "prune": (lambda: prune.l1_unstructured(nn.Linear(D, V), "weight", 0.5), flce.ArgumentError, "hook.*L1Unstructured"),
    "new weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, V)), flce.ArgumentError, "Parametrized"),
    "new spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, V)), flce.ArgumentError, "Parametrized"),
    "scaled": (lambda: Scaled(D, V), flce.ArgumentError, "Scaled"),
    "replaced": (replaced, flce.ArgumentError, "forward of its own"),
    "hooked": (hooked, flce.ArgumentError, "hooks"),
    "8 bit": (lambda: quantised("bitsandbytes.nn.modules", "Int8Params", torch.int8), flce.ArgumentError, "Int8Params.*llm_int8_skip"),
    "4 bit": (lambda: quantised("bitsandbytes.nn.modules", "Params4bit", torch.uint8), flce.ArgumentError, "Params4bit.*llm_int8_skip"),
    "torchao": (lambda: quantised("torchao.quantization", "Int8Tensor", torch.float32), flce.ArgumentError, "Int8Tensor.*filter_fn"),
    "offloaded": (offloaded, flce.PlacementError, "is on meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NO_PRODUCTS)
def test_output_layers_that_are_more_than_their_weight(kind: str) -> None:
    """Each entry that reads a module's weight refuses it by name, in forward_logits and in plain torch as well."""
    make, error, message = NO_PRODUCTS[kind]
    head, (hidden, labels) = make(), batch("cpu")
    if message.startswith("hook"):
        head(hidden)  # a trainer's earlier call
    for call in (
        lambda: flce.LinearCrossEntropyLoss(head, "flce", shift=1)(hidden, labels),
        lambda: flce.LinearCrossEntropyLoss(head, "pytorch", shift=1)(hidden, labels),
        lambda: flce.LinearCrossEntropyLoss(lambda: head, shift=1).forward_logits(hidden),
        lambda: flce.PipelineFusedLoss(head, shift=1)(hidden, labels),
        lambda: flce.linear_cross_entropy(hidden, head, labels),
        lambda: flce.linear_logprobs(hidden, head, labels),
        lambda: flce.FusedLMHead.from_linear(head)(hidden, labels=labels),
        lambda: flce.FusedLMHead.from_linear(head)(hidden),
    ):
        with pytest.raises(error, match=message):
            call()


def test_output_layers_that_are_their_weight(device: str) -> None:
    """A subclass, a compiled layer, a tied embedding, a module that holds a weight, one that hands its call on."""

    class Named(nn.Linear):
        """A Linear by another name."""

    class Holder(nn.Module):
        """A weight and nothing else."""

        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    plain = Named(D, V, bias=False, device=device)
    embedding, dispatched = nn.Embedding(V, D, device=device), copy.deepcopy(plain)
    embedding.weight = plain.weight
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(dispatched, accelerate.hooks.AlignDevicesHook())
    hidden, labels = batch(device)
    for head in (plain, torch.compile(plain), embedding, Holder(plain.weight), dispatched):
        for impl in ("flce", "pytorch"):
            loss = flce.LinearCrossEntropyLoss(head, impl, shift=1)(hidden, labels)
            assert_close(loss, expected_loss(plain, hidden, labels), torch.float32, output=True)
    loss_fn = flce.LinearCrossEntropyLoss(plain, "flce", shift=1)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    assert_close(compiled(hidden, labels), loss_fn(hidden, labels), torch.float32, output=True)


def test_a_fused_head_has_the_scale_and_cap_of_its_loss() -> None:
    head, (hidden, labels) = flce.FusedLMHead(D, V, softcap=5.0, shift=1), batch("cpu")
    torch.testing.assert_close(flce.PipelineFusedLoss(head, shift=1, softcap=5.0)(hidden, labels), head(hidden, labels=labels))
    with pytest.raises(flce.ArgumentError, match=r"FusedLMHead that has logit_scale 1\.0 and softcap 5\.0, where 1\.0 and 0\.0 are given"):
        flce.LinearCrossEntropyLoss(head, shift=1)(hidden, labels)


def test_repr() -> None:
    loss_fn = flce.LinearCrossEntropyLoss(nn.Linear(128, 500), impl="pytorch", chunk_size=2048, shift=1)
    assert repr(loss_fn) == "LinearCrossEntropyLoss(impl='pytorch', vocab_size=500, hidden_dim=128, chunk_size=2048, compile=False)"


def test_extract_hidden_states() -> None:
    hidden = torch.zeros(2, 3, 4)
    for outputs in (
        hidden,
        (hidden, None),
        [hidden],
        {"last_hidden_state": hidden},
        {"logits": torch.ones(1), "hidden_states": (torch.ones(1), hidden)},
    ):
        assert flce.extract_hidden_states(outputs) is hidden
    with pytest.raises(flce.ArgumentError, match="outputs has logits, but neither last_hidden_state nor hidden_states"):
        flce.extract_hidden_states({"logits": hidden})
    with pytest.raises(flce.ArgumentError, match="outputs is a NoneType"):
        flce.extract_hidden_states(None)
