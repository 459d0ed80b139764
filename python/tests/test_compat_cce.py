"""flce.compat.cce: losses, lse and gradients against their formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compat_support import DTYPES, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import flce
from flce.compat.cce import LinearCrossEntropy, LinearCrossEntropyImpl, VocabParallelOptions, compute_z_loss, linear_cross_entropy

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def expected(
    layer: Layer, ignore_index: int = -100, softcap: float | None = None, reduction: str = "mean", shift: int = 0
) -> tuple[Tensor, Tensor]:
    logits, target = layer.logits(softcap), layer.target
    if shift:
        logits, target = logits[..., :-shift, :], target[..., shift:]
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction)
    lse = torch.where(target != ignore_index, logits.logsumexp(-1), 0.0)
    return loss.view(target.shape) if reduction == "none" else loss, lse


@dtypes
@reductions
@pytest.mark.parametrize("shape", [(33,), (3, 9), (2, 2, 5)], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 3, True])
def test_losses_lse_and_gradients(device: str, dtype: torch.dtype, reduction: str, shape: tuple[int, ...], shift: int) -> None:
    """Upstream gradients go to loss and lse, or to one of them alone; after a shift e's gradient is whole."""
    layer = make_layer(device, dtype, shape=shape, bias=True)
    exact, options = layer.in_double(), {"reduction": reduction, "shift": shift}
    for used in ([0, 1], [0], [1]):
        actual = linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, return_lse=True, **options)
        right = expected(exact, reduction=reduction, shift=int(shift))
        for value, wanted, name in zip(actual, right, ("loss", "lse"), strict=True):
            assert value.dtype is torch.float32
            assert_close(value, wanted, dtype, name, output=True)
        check_gradients([actual[i] for i in used], [right[i] for i in used], layer, exact)
    alone = linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, **options)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, actual[0])


@pytest.mark.parametrize("shift", [1, 3])
def test_the_last_positions_predict_nothing(device: str, shift: int) -> None:
    layer = make_layer(device, shape=(2, 8), ignore_index=None)
    linear_cross_entropy(layer.hidden, layer.weight, layer.target, shift=shift).sum().backward()
    assert layer.hidden.grad is not None and layer.hidden.grad.shape == layer.hidden.shape
    assert not layer.hidden.grad[:, -shift:].any()
    assert bool(layer.hidden.grad[:, :-shift].any(-1).all())


@dtypes
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 7])
def test_softcap_bias_and_ignored_classes(device: str, dtype: torch.dtype, softcap: float | None, bias: bool, ignore_index: int) -> None:
    layer = make_layer(device, dtype, bias=bias, ignore_index=ignore_index)
    actual = linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, ignore_index, softcap, return_lse=True)
    exact = layer.in_double()
    right = expected(exact, ignore_index, softcap)
    for value, wanted in zip(actual, right, strict=True):
        assert_close(value, wanted, dtype, output=True)
    check_gradients(actual, right, layer, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [252, 256])
@pytest.mark.parametrize("hidden_size", [507, 512])
@pytest.mark.parametrize("vocab_size", [123, 128])
def test_no_less_accurate_than_two_steps(device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
    layer, steps = (make_layer(device, dtype, shape=(num_tokens,), hidden_size=hidden_size, vocab_size=vocab_size) for _ in range(2))
    exact = layer.in_double()
    loss, lse = linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction="none", return_lse=True)
    logits = F.linear(steps.hidden, steps.weight).float()
    in_steps = F.cross_entropy(logits, steps.target, reduction="none")
    right, right_lse = expected(exact, reduction="none")
    more, more_in_gradients = {torch.float32: (1e-5, 5e-4), torch.float16: (1e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2)}[dtype]
    assert (loss - right).abs().max() <= (in_steps - right).abs().max() + more
    valid = layer.target != -100
    assert (lse - right_lse).abs().max() <= ((logits.logsumexp(-1) - right_lse) * valid).abs().max() + 1e-5
    for value in (loss, in_steps, right):
        value.sum().backward()
    for leaf, other, wanted in zip(layer.leaves(), steps.leaves(), exact.leaves(), strict=True):
        assert leaf.grad is not None and other.grad is not None and wanted.grad is not None
        assert (leaf.grad - wanted.grad).abs().max() <= (other.grad - wanted.grad).abs().max() + more_in_gradients


@reductions
def test_with_no_valid_row_the_mean_is_nan(device: str, reduction: str) -> None:
    layer = make_layer(device, bias=True)
    layer.target.fill_(-100)
    loss, lse = linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, reduction=reduction, return_lse=True)
    assert bool(loss.isnan().any()) == (reduction == "mean")
    assert not lse.any()
    loss.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in layer.leaves())


def test_valid_rows_that_a_shift_takes_away_do_not_count(device: str) -> None:
    layer = make_layer(device, shape=(1, 4), ignore_index=None)
    layer.target[:, 1:] = -100
    assert bool(linear_cross_entropy(layer.hidden, layer.weight, layer.target, shift=1).isnan())
    assert not linear_cross_entropy(layer.hidden, layer.weight, layer.target).isnan()


IMPLEMENTATIONS = ["CCE", "TORCH_COMPILE", "CCE_KAHAN_FULL_C", "CCE_KAHAN_FULL_E", "CCE_EXACT", "CCE_KAHAN_FULL_C_FULL_E", "CCE_KAHAN_FULL"]


def test_every_implementation_is_the_same_one(device: str) -> None:
    layer = make_layer(device, torch.bfloat16)
    assert [impl.name for impl in LinearCrossEntropyImpl] == IMPLEMENTATIONS
    expected = linear_cross_entropy(layer.hidden, layer.weight, layer.target)
    for impl in LinearCrossEntropyImpl:
        for given in (impl, impl.name.lower()):
            assert torch.equal(linear_cross_entropy(layer.hidden, layer.weight, layer.target, impl=given), expected)
    with pytest.raises(NotImplementedError, match="cce_fast"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, impl="cce_fast")


def test_filters_and_accumulators_change_nothing(device: str) -> None:
    layer = make_layer(device, torch.bfloat16)
    options: list[dict[str, Any]] = [{}, {"filter_eps": None}, {"filter_eps": 1e-3}, {"filter_eps": "high", "accum_e_fp32": True}]
    options += [{"accum_c_fp32": True, "filter_e_grad": False, "filter_c_grad": False}]
    all_gradients = []
    for each in options:
        loss = linear_cross_entropy(layer.hidden, layer.weight, layer.target, **each)
        all_gradients.append(torch.autograd.grad(loss, layer.leaves()))
    for gradients in all_gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, all_gradients[0], strict=True))
    with pytest.raises(RuntimeError, match="filter_eps"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, filter_eps="low")


def test_the_module_is_the_function(device: str) -> None:
    layer = make_layer(device, shape=(2, 9), bias=True)
    options: dict[str, Any] = {"ignore_index": 5, "softcap": 4.0, "reduction": "none", "shift": 2, "return_lse": True, "impl": "cce_exact"}
    module, function = (
        LinearCrossEntropy(**options)(layer.hidden, layer.weight, layer.target, layer.bias),
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, layer.bias, **options),
    )
    assert all(torch.equal(one, other) for one, other in zip(module, function, strict=True))
    assert isinstance(LinearCrossEntropy()(layer.hidden, layer.weight, layer.target), Tensor)


@dtypes
@pytest.mark.parametrize("shift", [0, 2])
def test_a_z_loss_beside_the_loss(device: str, dtype: torch.dtype, shift: int) -> None:
    layer = make_layer(device, dtype, shape=(3, 9))
    exact = layer.in_double()

    def total(loss: Tensor, lse: Tensor) -> Tensor:
        return loss + 0.1 * compute_z_loss(lse, layer.target, shift)

    actual = total(*linear_cross_entropy(layer.hidden, layer.weight, layer.target, shift=shift, return_lse=True))
    loss, lse = expected(exact, shift=shift)
    valid = layer.target[..., shift:] != -100
    right = loss + 0.1 * lse[valid].square().mean()
    assert_close(actual, right, dtype, output=True)
    check_gradients([actual], [right], layer, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compute_z_loss(dtype: torch.dtype) -> None:
    lse, targets = torch.randn(3, 7, dtype=dtype), torch.randint(0, 5, (3, 9))
    valid = targets[:, 2:] != 4
    squares = lse.square()
    torch.testing.assert_close(compute_z_loss(lse), squares.mean())
    torch.testing.assert_close(compute_z_loss(lse, reduction="sum"), squares.sum())
    assert torch.equal(compute_z_loss(lse, reduction="none"), squares)
    torch.testing.assert_close(compute_z_loss(lse, targets, 2, 4), squares[valid].mean())
    torch.testing.assert_close(compute_z_loss(lse, targets, 2, 4, "sum"), squares[valid].sum())
    per_position = compute_z_loss(lse, targets, 2, 4, "none")
    assert per_position.shape == lse.shape and per_position.dtype is dtype
    torch.testing.assert_close(per_position, torch.where(valid, squares, 0.0))
    torch.testing.assert_close(compute_z_loss(lse[:, :-1], targets[:, :-2], True), lse[:, :-1].square().mean())
    with pytest.raises(ValueError, match="reduction"):
        compute_z_loss(lse, reduction="weighted_mean")
    with pytest.raises(ValueError, match="lse has shape"):
        compute_z_loss(lse, targets)


def test_what_is_refused() -> None:
    layer = make_layer(shape=(2, 9))
    for shift in (-1, 9, 20):
        with pytest.raises(ValueError, match="shift"):
            linear_cross_entropy(layer.hidden, layer.weight, layer.target, shift=shift)
    with pytest.raises(ValueError, match="bias"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, torch.zeros(62))
    for reduction in ("batchmean", "weighted_mean"):
        with pytest.raises(ValueError, match=reduction):
            linear_cross_entropy(layer.hidden, layer.weight, layer.target, reduction=reduction)
    with pytest.raises(TypeError, match="bias is a int"):  # where older releases had ignore_index
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, -100)
    with pytest.raises(flce.ArgumentError, match="init_process_group"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, vocab_parallel_options=VocabParallelOptions(0, 63))


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("place", range(4))
def test_dtensors_are_value_errors(one_rank: None, place: int) -> None:
    layer = make_layer(bias=True)
    tensors: list[Any] = [layer.hidden, layer.weight, layer.target, layer.bias]
    tensors[place] = distribute_tensor(tensors[place].detach(), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=("e", "c", "targets", "bias")[place] + " is a DTensor"):
        linear_cross_entropy(*tensors)


def test_slices_of_a_vocabulary(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert VocabParallelOptions.from_vocab(10) == VocabParallelOptions(0, 10, None, True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    slices = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        options = VocabParallelOptions.from_vocab(10, None, False)
        assert options.reduce_e_grad is False
        slices.append((options.start, options.stop))
    assert slices == [(0, 3), (3, 6), (6, 8), (8, 10)]
