"""flce.compat.torchtune: the loss on a model whose output layer it takes."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat_support import DTYPES, HeadModel, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from flce.compat.torchtune import LinearCrossEntropyLoss
from flce.core import _once

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(device: str = "cpu", dtype: torch.dtype = torch.float32, *, bias: bool = True, **options: Any) -> tuple[Any, Any, Layer]:
    """A loss, its model, and the layer of that model's own parameters."""
    layer = make_layer(device, dtype, shape=(3, 9), bias=bias)
    model = HeadModel(layer.weight, layer.bias)
    loss = LinearCrossEntropyLoss(**options)
    loss.set_model_output(model)
    return loss, model, Layer(layer.hidden, model.output.weight, layer.target, model.output.bias)


def expected(layer: Layer, ignore_index: int = -100) -> Tensor:
    return F.cross_entropy(layer.logits().flatten(0, -2), layer.target.flatten(), ignore_index=ignore_index)


def check(loss: Any, layer: Layer, dtype: torch.dtype) -> None:
    value = loss(layer.hidden, layer.target)
    exact = layer.in_double()
    right = expected(exact, loss.ignore_index)
    assert value.dtype is torch.float32 and value.shape == ()
    assert_close(value, right, dtype, "loss", output=True)
    check_gradients([value], [right], layer, exact)


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 6])
def test_the_mean_over_valid_tokens(device: str, dtype: torch.dtype, bias: bool, ignore_index: int) -> None:
    loss, model, layer = make(device, dtype, bias=bias, ignore_index=ignore_index)
    layer.target[layer.target == -100] = ignore_index
    assert model.skip_output_layer is True
    check(loss, layer, dtype)


@pytest.mark.parametrize("options", [{"num_output_chunks": n} for n in (1, 3, 27, 100)] + [{"mask_ignored_tokens": False}], ids=str)
def test_chunks_and_masks_change_nothing(device: str, options: dict[str, Any]) -> None:
    loss, _, layer = make(device)
    other, _, _ = make(device, **options)
    assert torch.equal(loss(layer.hidden, layer.target), other(layer.hidden, layer.target))


def test_the_output_layer_is_read_at_each_call(device: str) -> None:
    loss, model, layer = make(device)
    with torch.no_grad():
        model.output.weight.mul_(0.5)
    check(loss, layer, torch.float32)
    model.output.weight = nn.Parameter(torch.randn_like(layer.weight))
    check(loss, Layer(layer.hidden, model.output.weight, layer.target, model.output.bias), torch.float32)
    model.output = nn.Linear(layer.weight.shape[1], layer.weight.shape[0], bias=False, device=device)
    check(loss, Layer(layer.hidden, model.output.weight, layer.target, None), torch.float32)


def test_its_state_holds_the_output_layer(device: str) -> None:
    loss, model, _ = make(device)
    assert list(loss.state_dict()) == ["linear_projection.weight", "linear_projection.bias"]
    assert loss.linear_projection is model.output


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_has_an_output_layer_of_its_own(device: str, way: str) -> None:
    loss, model, layer = make(device)
    other = copy.deepcopy(loss) if way == "copied" else pickle.loads(pickle.dumps(loss))
    assert torch.equal(other(layer.hidden, layer.target), loss(layer.hidden, layer.target))
    assert other.linear_projection is not model.output


def test_before_it_has_a_model() -> None:
    with pytest.raises(AttributeError, match="set_model_output"):
        LinearCrossEntropyLoss()(torch.randn(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))


@dtypes
def test_with_no_valid_token_it_is_0_and_so_are_gradients(device: str, dtype: torch.dtype) -> None:
    loss, _, layer = make(device, dtype)
    layer.target.fill_(-100)
    value = loss(layer.hidden, layer.target)
    assert value.item() == 0.0 and value.device == layer.target.device
    value.backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in layer.leaves())


class Tied:
    """Stands for torchtune's TiedLinear: no module, and the weight is another's."""

    def __init__(self, tied_module: nn.Module) -> None:
        self.tied_module = tied_module

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tied_module.weight)


Tied.__name__ = "TiedLinear"


def test_a_tied_output_layer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(device, shape=(3, 9))
    model = nn.Module()
    model.embedding = nn.Embedding(63, 41, _weight=layer.weight.detach())
    model.output = Tied(model.embedding)
    loss = LinearCrossEntropyLoss()
    loss.set_model_output(model)
    monkeypatch.setattr(Tied, "__call__", None)  # the kernel reads the weight
    check(loss, Layer(layer.hidden, model.embedding.weight, layer.target, None), torch.float32)
    assert not loss.state_dict()


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


@pytest.mark.parametrize("chunks", [1, 4, 100])
def test_an_output_layer_that_is_more_than_a_product_is_called(device: str, chunks: int) -> None:
    loss, model, layer = make(device, num_output_chunks=chunks)
    model.output = Scaled(41, 63, device=device)
    monkey = Layer(layer.hidden, model.output.weight, layer.target, model.output.bias)
    exact = monkey.in_double()
    value = loss(layer.hidden, layer.target)
    right = F.cross_entropy(0.5 * exact.logits().flatten(0, -2), layer.target.flatten())
    torch.testing.assert_close(value, right.float())
    for one, other in zip(torch.autograd.grad(value, monkey.leaves()), torch.autograd.grad(right, exact.leaves()), strict=True):
        torch.testing.assert_close(one, other.float())
    layer.target.fill_(-100)
    assert loss(layer.hidden, layer.target).item() == 0.0


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_hooks_of_the_output_layer_run(
    device: str, forward: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_once, "said", set())
    loss, model, layer = make(device)
    ran: list[str] = []
    if forward:
        model.output.register_forward_hook(lambda module, args, output: output * 0.5)
    else:
        model.output.register_full_backward_hook(lambda module, inputs, outputs: ran.append("backward"))
    with caplog.at_level(logging.WARNING, logger="flce"):
        value = loss(layer.hidden, layer.target)
        loss(layer.hidden, layer.target)
    logits = layer.logits().flatten(0, -2) * (0.5 if forward else 1.0)
    torch.testing.assert_close(value, F.cross_entropy(logits, layer.target.flatten()))
    value.backward()
    assert bool(ran) != forward
    assert [record.getMessage() for record in caplog.records if "output layer Linear has hooks" in record.getMessage()] == [
        caplog.messages[0]
    ]


def test_lora_of_peft_trains(device: str) -> None:
    peft = pytest.importorskip("peft")
    loss, model, layer = make(device, bias=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["output"]))
    head = adapted.base_model.model.output
    value = loss(layer.hidden, layer.target)
    right = F.cross_entropy(head(layer.hidden).flatten(0, -2), layer.target.flatten())
    torch.testing.assert_close(value, right)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(parameters) == 2
    for one, other in zip(torch.autograd.grad(value, parameters), torch.autograd.grad(right, parameters), strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_without_breaks_masks_and_computes_the_same(device: str) -> None:
    loss, _, layer = make(device)
    assert loss.apply_compile_strategy(backend="eager") is loss
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual, right = compiled(layer.hidden, layer.target), loss(layer.hidden, layer.target)
    assert torch.equal(actual, right)
    for one, other in zip(torch.autograd.grad(actual, layer.leaves()), torch.autograd.grad(right, layer.leaves()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("key", ["output", "decoder.output"])
def test_a_plan_of_tensor_parallelism(key: str) -> None:
    loss = LinearCrossEntropyLoss()
    plan = {"tok_embeddings": None, key: None}
    assert loss.patch_tp_plan(plan) is plan
    style = plan[key]
    assert isinstance(style, ColwiseParallel)
    assert style.input_layouts == (Shard(1),) and style.output_layouts == (Shard(-1),) and style.use_local_output is False
    assert loss.tp_requires_loss_parallel_ctx_manager is True
    with pytest.raises(KeyError, match="output"):
        loss.patch_tp_plan({"norm": None})
