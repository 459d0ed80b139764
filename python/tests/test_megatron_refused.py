"""Refusals of flce.megatron, by name and with Megatron's own kind of exception."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce

pytest.importorskip("megatron.core", reason="megatron-core is not installed (tools/setup.sh --python)")

import megatron_support as support
from megatron_support import PADDED, Batch, fused_calls, gpt_model, megatron_groups  # noqa: F401  # fixtures

ON_DEVICE = True
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings about missing packages, and about Megatron's later changes


def _bias(model: Any) -> None:
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(PADDED))
    model.output_layer.skip_bias_add = True


def _adapter(model: Any) -> None:
    class LoRA(torch.nn.Module):
        weight = model.output_layer.weight

    model.output_layer = LoRA()


def _deferred(model: Any) -> None:
    model.output_layer.config = copy.copy(model.config)  # config of the output layer alone; other layers have no buffers for it
    model.output_layer.config.defer_embedding_wgrad_compute = True


def _other_forward(model: Any) -> None:
    model.output_layer.forward = lambda *_, **__: None


def _set(path: str, value: Any) -> Any:
    def change(model: Any) -> None:
        *holders, name = path.split(".")
        for holder in holders:
            model = getattr(model, holder)
        setattr(model, name, value)

    return change


def _weight_of(kind: type) -> Any:
    def change(model: Any) -> None:
        model.output_layer.weight = torch.nn.Parameter(model.output_layer.weight.detach().as_subclass(kind))

    return change


class Float8Tensor(Tensor):
    """Like Transformer Engine's, by its name."""


REFUSED: dict[str, tuple[Any, str]] = {
    "bias": (_bias, r"has a bias \(skip_bias_add=True\)"),
    "adapter": (_adapter, "the output layer is a .*LoRA; it must be megatron.core's ColumnParallelLinear"),
    "forward": (_other_forward, "the output layer's forward is replaced by"),
    "forward hook": (lambda model: model.output_layer.register_forward_hook(lambda *_: None), "has hooks after its forward"),
    "backward hook": (
        lambda model: model.output_layer.register_full_backward_hook(lambda *_: None),
        "has hooks after its forward or in its",
    ),
    "fp8": (_weight_of(Float8Tensor), "the output layer's weight is a Float8Tensor; it must be a plain tensor"),
    "fsdp": (lambda model: setattr(model.output_layer.weight, "__fsdp_param__", True), "is sharded by FSDP"),
    "shape": (lambda model: setattr(model.output_layer, "output_size_per_partition", 52), r"has shape \[104, 32\]; it must be \[52, 32\]"),
    "no weight": (lambda model: setattr(model.output_layer, "weight", None), "output_weight is None"),
    "expert": (_set("output_layer.explicit_expert_comm", True), "is an expert's"),
    "gtp": (_set("output_layer.gtp_remat_size", 2), "gtp_remat_size=2"),
    "deferred": (_deferred, "defer_embedding_wgrad_compute is True: it keeps the gradients"),
    "fusion": (
        lambda model: vars(model.config).update(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"),
        "impl is 'linear'",
    ),
    "offloading": (_set("config._cpu_offloading_context", SimpleNamespace(inside_context=True)), "inside Megatron's cpu_offloading"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, fused: list[Any]) -> None:
    change, message = REFUSED[case]
    model = gpt_model()
    change(model)
    with pytest.raises(RuntimeError, match=message) as caught:  # Megatron's own kind of exception
        support.call_with_processor(model, Batch(), flce.megatron.output_processor)
    assert isinstance(caught.value, flce.ArgumentError) and not fused
    with pytest.raises(RuntimeError, match=message):
        Batch().losses(flce.megatron.patch(model))
    assert not fused


def test_fusions_of_megatron_have_the_same_formula(fused: list[Any]) -> None:
    model = flce.megatron.patch(gpt_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"))
    torch.testing.assert_close(Batch().losses(model), Batch().losses(gpt_model()), rtol=1e-5, atol=2e-6)
    assert len(fused) == 1


def test_bad_arguments_are_named() -> None:
    patch, batch, processor = flce.megatron.patch, Batch(), flce.megatron.output_processor
    for options, message in (
        ({"reduction": "mean"}, "reduction is not an option here; allowed are main_grad"),
        ({"main_grad": 1}, "main_grad is 1; it must be True, False or None"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"ignore_index": "x"}, "ignore_index"),
    ):
        with pytest.raises(RuntimeError, match=message):
            patch(gpt_model(), **options)
    with pytest.raises(RuntimeError, match="return_entropy is 1; it must be True or False"):
        flce.megatron.OutputProcessor(return_entropy=1)
    with pytest.raises(RuntimeError, match=r"model is a torch.nn.modules.linear.Linear; it must be megatron.core's GPTModel, Mamba"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="has a compute_language_model_loss of its own"):
        patch(_subclassed(gpt_model(), compute_language_model_loss=lambda *_: None))
    model = gpt_model()
    with pytest.raises(RuntimeError, match="labels is None, and the output processor computes a loss"):
        support.call_with_processor(model, batch, lambda **given: processor(**given | {"labels": None}))
    with pytest.raises(RuntimeError, match="inference_context is given"):
        support.call_with_processor(model, batch, lambda **given: processor(**given | {"inference_context": object()}))
    with pytest.raises(RuntimeError, match=r"labels has shape \[16, 2\] and hidden_states \[16, 2, 32\]; they must be \[batch, sequence\]"):
        support.call_with_processor(model, batch, lambda **given: processor(**given | {"labels": batch.labels.t()}))
    with pytest.raises(RuntimeError, match="compute_language_model_loss is <function"):
        support.call_with_processor(model, batch, lambda **given: processor(**given | {"compute_language_model_loss": lambda *_: None}))
    with pytest.raises(RuntimeError, match="model is not patched here"):
        flce.megatron.mtp_acceptance(model)
    patch(model)
    with pytest.raises(RuntimeError, match="model has mtp_num_layers=None"):
        flce.megatron.mtp_acceptance(model)
    model.config.config_logger_dir = "somewhere"
    with pytest.raises(RuntimeError, match=r"config.config_logger_dir is 'somewhere'"):
        batch.losses(model)
    model.config.config_logger_dir = ""
    model._postprocess = lambda **_: None
    with pytest.raises(RuntimeError, match=r"GPTModel._postprocess has been replaced since"):
        flce.megatron.unpatch(model)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.layers", None)
    model = gpt_model()
    with pytest.raises(flce.UnavailableError, match=r"flce.megatron needs megatron-core"):
        flce.megatron.patch(model)


def _subclassed(model: Any, **methods: Any) -> Any:
    model.__class__ = type("Other", (type(model),), methods)
    return model


def test_wrappers_are_looked_through_and_stages_without_an_output_layer_left_alone() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    model = gpt_model()
    assert isinstance(flce.megatron.patch(Wrapper(Wrapper(model))), Wrapper) and "_flce_tap" in model.__dict__
    first = gpt_model()
    first.post_process = False
    flce.megatron.patch(first)
    assert "_flce_tap" not in first.__dict__
