"""flce.FusedLMHead: an nn.Linear that is also called with labels."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import cases_passed
from torch import Tensor, nn

import flce
from flce.compat.cce import VocabParallelOptions

D, V = 32, 101


def data(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 11, D, generator=make).to(device, dtype).requires_grad_()
    labels = torch.randint(0, V, (3, 11), generator=make).to(device)
    labels[1, 4:7] = -100
    return hidden, labels


def linear(device: str, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(D, V, bias=bias, device=device, dtype=dtype)


def right_loss(layer: nn.Linear, hidden: Tensor, labels: Tensor, shift: int = 1) -> Tensor:
    logits = layer(hidden).float()[:, : hidden.shape[1] - shift]
    return F.cross_entropy(logits.reshape(-1, V), labels[:, shift:].reshape(-1), ignore_index=-100)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_logits_and_loss_of_the_same_parameters(device: str, bias: bool, shift: int) -> None:
    layer = linear(device, bias=bias)
    head = flce.FusedLMHead.from_linear(layer, shift=shift)
    hidden, labels = data(device)
    assert torch.equal(head(hidden), layer(hidden))
    loss = head(hidden, labels=labels)
    expected = right_loss(layer, hidden, labels, shift)
    torch.testing.assert_close(loss, expected)
    parameters = [hidden, *layer.parameters()]
    for got, right in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


def test_in_the_place_of_a_linear_it_learns_the_same_token() -> None:
    """Targets that were aligned with an nn.Linear's logits stay so."""
    hidden, labels = data("cpu")
    for head in (flce.FusedLMHead(D, V), flce.FusedLMHead.from_linear(linear("cpu"))):
        expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
        torch.testing.assert_close(head(hidden, labels=labels), expected)
        torch.testing.assert_close(head(hidden.flatten(0, 1), labels=labels.flatten()), expected)


def test_it_is_a_linear_by_its_state() -> None:
    head = flce.FusedLMHead(D, V, dtype=torch.bfloat16, softcap=20.0, shift=1)
    plain = nn.Linear(D, V, dtype=torch.bfloat16)
    assert list(head.state_dict()) == list(plain.state_dict()) and head.bias is not None
    head.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(head.state_dict(), strict=True)
    assert torch.equal(head.weight, plain.weight) and isinstance(head, nn.Linear)
    assert "softcap=20.0" in repr(head) and "shift=1" in repr(head)


def test_class_weights_move_with_the_module(device: str) -> None:
    """Class weights are a buffer, as in nn.CrossEntropyLoss; the saved state stays an nn.Linear's."""
    weights = torch.linspace(0.5, 2.0, V, device="cpu")
    head = flce.FusedLMHead(D, V, device="cpu", class_weight=weights)
    assert head.to("meta").class_weight.is_meta  # type: ignore[union-attr]
    layer = linear(device)
    head = flce.FusedLMHead.from_linear(layer, shift=0, class_weight=weights).to(device)
    assert list(head.state_dict()) == ["weight"] and list(head.parameters()) == [layer.weight]
    hidden, labels = data(device)
    expected = F.cross_entropy(layer(hidden).flatten(0, 1), labels.flatten(), weights.to(device))
    torch.testing.assert_close(head(hidden, labels=labels), expected)
    torch.testing.assert_close(copy.deepcopy(head)(hidden, labels=labels), expected)
    with pytest.raises(flce.DTypeError, match="class_weight is a list"):
        flce.FusedLMHead(D, V, class_weight=[1.0] * V)


def test_copies_share_the_process_group() -> None:
    """The group itself cannot be copied; a model that holds one is, for an average of its weights or a reference model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        weights = torch.ones(V)
        head = flce.FusedLMHead(D, V, process_group=group, class_weight=weights)
        losses = [
            kind(head, shift=1, process_group=group, class_weight=weights) for kind in (flce.LinearCrossEntropyLoss, flce.PipelineFusedLoss)
        ]
        for copied in copy.deepcopy([head, *losses]):
            assert copied.options["process_group"] is group
        assert copy.deepcopy(losses[0]).options["class_weight"] is not weights
        cut = VocabParallelOptions(0, V, group)
        assert copy.deepcopy(cut) == cut and copy.deepcopy(cut).group is group
    finally:
        dist.destroy_process_group()


def test_parameters_are_shared_not_copied() -> None:
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(V, D), "head": linear("cpu")})
    model["head"].weight = model["embedding"].weight
    model["head"].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model["head"] = flce.FusedLMHead.from_linear(model["head"])
    assert model["head"].weight is model["embedding"].weight and model["head"].bias is None and not model["head"].training
    assert len(list(model.parameters())) == 1
    before = model["embedding"].weight.detach().clone()
    _, labels = data("cpu")
    model["head"](model["embedding"](labels.clamp(min=0)), labels=labels).backward()
    optimizer.step()
    assert not torch.equal(model["head"].weight, before)


def test_options_and_outputs(device: str) -> None:
    layer = linear(device)
    head = flce.FusedLMHead.from_linear(layer, shift=0, softcap=5.0, logit_scale=0.7, temperature=2.0, reduction="none")
    hidden, labels = data(device)
    logits = 5.0 * torch.tanh(0.7 * layer(hidden) / 5.0)
    torch.testing.assert_close(head(hidden), logits)
    loss, logprobs = head(hidden, labels=labels, return_logprobs=True)
    expected = F.cross_entropy((logits / 2.0).movedim(-1, 1), labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs, -expected, rtol=1e-4, atol=1e-5)
    cooler = head(hidden, labels=labels, temperature=1.0)
    torch.testing.assert_close(cooler, F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-100))


def test_copied_pickled_and_compiled(device: str) -> None:
    head = flce.FusedLMHead.from_linear(linear(device), z_loss=1e-3)
    hidden, labels = data(device)
    expected = head(hidden, labels=labels)
    twin = copy.deepcopy(head)
    assert twin.weight is not head.weight and torch.equal(twin(hidden, labels=labels), expected)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(hidden, labels=labels), expected)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, labels=labels), expected)
    torch.testing.assert_close(compiled(hidden), head(hidden))


def test_loss_takes_the_gradient_buffer_of_a_call(device: str) -> None:
    head = flce.FusedLMHead.from_linear(linear(device))
    hidden, labels = data(device)
    main_grad = torch.ones(V, D, device=device)
    head(hidden, labels=labels, grad_weight_out=main_grad).backward()
    assert head.weight.grad is None
    (expected,) = torch.autograd.grad(head(hidden, labels=labels), [head.weight])
    torch.testing.assert_close(main_grad - 1, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_functions_take_a_linear(device: str, bias: bool) -> None:
    layer = linear(device, bias=bias)
    hidden, labels = data(device)
    given: dict[str, Any] = {"bias": layer.bias}
    ids = labels.clamp(min=0).unsqueeze(-1)
    probs = torch.ones_like(ids, dtype=torch.float32)
    for function, others in (
        (flce.linear_cross_entropy, (labels,)),
        (flce.linear_logprobs, (labels,)),
        (flce.linear_topk_distillation, (ids, probs)),
    ):
        assert torch.equal(function(hidden, layer, *others), function(hidden, layer.weight, *others, **given)), function
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, layer, labels), flce.linear_cross_entropy(hidden, layer, labels))


def ungathered() -> nn.Linear:
    layer = linear("cpu")
    layer.weight.data = torch.zeros(0)
    return layer


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Other(D, V), flce.ArgumentError, "Other"),
        (lambda: flce.FusedLMHead(D, V), flce.ArgumentError, "called with labels"),
        (lambda: hooked(), flce.ArgumentError, "hooks"),
        (lambda: ungathered(), flce.PlacementError, "not gathered"),
    ],
    ids=["subclass", "fused", "hooks", "ungathered"],
)
def test_layers_that_are_no_weight(make: Any, kind: type[Exception], message: str) -> None:
    hidden, labels = data("cpu")
    for function in (flce.linear_cross_entropy, flce.linear_logprobs):
        with pytest.raises(kind, match=message):
            function(hidden, make(), labels)
    with pytest.raises(flce.ArgumentError, match="bias is given"):
        flce.linear_cross_entropy(hidden, linear("cpu"), labels, bias=torch.zeros(V))


class Other(nn.Linear):
    """An output layer of somebody else's."""


def hooked() -> nn.Linear:
    layer = linear("cpu")
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: flce.FusedLMHead(D, V, softcup=3.0), flce.ArgumentError, "softcup is not an option"),
        (lambda: flce.FusedLMHead(D, V, softcap=-1.0), flce.SpecError, "softcap is -1.0"),
        (lambda: flce.FusedLMHead(D, V, shift=-1), flce.ArgumentError, "shift is -1"),
        (lambda: flce.FusedLMHead(D, V, ignore_index=1.5), flce.FlceError, "ignore_index"),
        (lambda: flce.FusedLMHead(D, V, sequence_parallel=True), flce.ArgumentError, "process_group is None"),
        (lambda: flce.FusedLMHead.from_linear(Other(D, V)), flce.ArgumentError, "Other"),
        (lambda: flce.FusedLMHead.from_linear(nn.Embedding(V, D)), flce.ArgumentError, "plain torch.nn.Linear"),  # type: ignore[arg-type]
        (lambda: flce.FusedLMHead.from_linear(hooked()), flce.ArgumentError, "hooks"),
        (
            lambda: flce.FusedLMHead(D, V)(torch.zeros(2, D), token_weight=torch.ones(2)),
            flce.ArgumentError,
            "token_weight is given without",
        ),
        (lambda: flce.FusedLMHead(D, V)(torch.zeros(2, D + 8), labels=torch.zeros(2, dtype=torch.int64)), flce.ShapeError, "hidden_size"),
    ],
    ids=range(10),
)
def test_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("with_labels", [False, True])
def test_a_weight_that_is_not_gathered_is_refused(with_labels: bool) -> None:
    """ZeRO-3 leaves a parameter of no element where it has sharded it, FSDP1 a view of its flat part."""
    hidden, labels = data("cpu")
    for shape in ((0,), (V * D // 2,), (V // 2, D)):
        head = flce.FusedLMHead(D, V, bias=False)
        head.weight.data = torch.zeros(shape)
        with pytest.raises(flce.PlacementError, match=re.escape(f"weight has shape {list(shape)} where this head has [{V}, {D}]")):
            head(hidden, labels=labels if with_labels else None)


def test_wrapped_over_two_ranks() -> None:
    assert cases_passed("lm_head_worker.py", "2") == {2: 8}


@pytest.mark.full
def test_fsdp_and_rows_over_ranks_together() -> None:
    assert cases_passed("lm_head_mesh_worker.py", "4") == {4: 1}
