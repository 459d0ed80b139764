"""Output layers that torchao, compressed-tensors and bitsandbytes have quantised, by the packages themselves: losses are those of the
weight that each package dequantises, on a CPU to the bit. tools/setup.sh --trainers fetches them into .tools/quantisers, which PYTHONPATH
names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.call import _formats

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
CLASSES, HIDDEN, TOKENS = 384, 256, 24
MISSING = "tools/setup.sh --trainers fetches it into .tools/quantisers"


def linear(classes: int = CLASSES) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(HIDDEN, classes, dtype=torch.bfloat16)


def hidden_and_target() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    target = torch.randint(0, CLASSES, (2, TOKENS // 2))
    target[0, 3] = -100
    return torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.bfloat16).requires_grad_(), target


# ── The packages ────────────────────────────────────


def of_torchao(form: str) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization", reason=MISSING)
        from torchao.float8 import inference
        from torchao.prototype.mx_formats import inference_workflow, nvfp4_tensor
        from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs as Float8Kwargs
    granularity = {"rows": "PerRow", "whole": "PerTensor", "groups": "PerGroup"}
    head = nn.Sequential(linear())
    if form in granularity:
        kind = getattr(quantization, granularity[form])
        quantization.quantize_(head, quantization.Float8WeightOnlyConfig(granularity=kind(128) if form == "groups" else kind()))
    elif form == "nvfp4":
        quantization.quantize_(head, inference_workflow.NVFP4WeightOnlyConfig())
    elif form == "int8":
        quantization.quantize_(head, quantization.Int8WeightOnlyConfig())
    elif form == "e5m2":
        quantization.quantize_(head, quantization.Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2))
    else:
        weight = head[0].weight.detach()
        activations = nvfp4_tensor.QuantizeTensorToNVFP4Kwargs() if form == "activations" else None

        def rounding(kwargs: Any) -> Any:
            """The tensor of Float8DynamicActivationFloat8WeightConfig, which a CPU has not."""
            return quantization.Float8Tensor.from_hp(weight, mm_config=inference.Float8MMConfig(), act_quant_kwargs=kwargs)

        made = {
            "blocks": lambda: quantization.Float8Tensor.from_hp(weight, granularity=quantization.PerBlock([128, 128])),
            "small blocks": lambda: quantization.Float8Tensor.from_hp(weight, granularity=quantization.PerBlock([64, 64])),
            "plain nvfp4": lambda: nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight),
            "rounded rows": lambda: rounding(Float8Kwargs()),
            "rounded whole": lambda: rounding(Float8Kwargs(granularity=quantization.PerTensor())),
            "activations": lambda: nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight, act_quant_kwargs=activations),
        }[form]()
        head[0].weight = nn.Parameter(made, requires_grad=False)
    return head[0]


def of_compressed(preset: str, *, inputs: bool = False, classes: int = CLASSES) -> nn.Linear:
    """A layer with scales of its weight's largest numbers, compressed."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=MISSING)
    from compressed_tensors.compressors import compress_module

    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    if not inputs:
        scheme.input_activations = None
    head = linear(classes)
    quantization.initialize_module_for_quantization(head, scheme)
    weight, of_scale = head.weight.detach().float().abs(), head.weight_scale.detach()
    rows, columns = weight.shape
    most = 448.0
    if scheme.weights.strategy == "tensor_group":
        head.weight_global_scale.data.fill_(448 * 6 / weight.max())
        weight, most = weight * head.weight_global_scale, 6.0
    if scheme.weights.strategy == "block":
        padded = torch.zeros(-(-rows // 128) * 128, columns)
        padded[:rows] = weight
        largest = padded.view(-1, 128, columns // 128, 128).amax((1, 3))
    elif scheme.weights.strategy == "tensor":
        largest = weight.max().reshape(1)
    else:
        largest = weight.view(rows, of_scale.shape[1], -1).amax(2)
    head.weight_scale.data = (largest / most).to(torch.float8_e4m3fn if most == 6 else of_scale.dtype).to(of_scale.dtype)
    compress_module(head)
    return head


def of_bitsandbytes(form: str) -> nn.Linear:
    module = pytest.importorskip("bitsandbytes.nn", reason=MISSING)
    plain = linear()
    if form == "int8":
        head = module.Linear8bitLt(HIDDEN, CLASSES, has_fp16_weights=False)
    else:
        head = module.Linear4bit(HIDDEN, CLASSES, quant_type=form, compute_dtype=torch.bfloat16)
    head.load_state_dict(plain.state_dict())
    return head.to("cpu")  # type: ignore[no-any-return]  # quantises


def dense_of(head: nn.Linear) -> Tensor:
    """The weight that the package itself makes of it."""
    if hasattr(head, "quantization_scheme"):
        from compressed_tensors.compressors import decompress_module

        head = copy.deepcopy(head)
        decompress_module(head)
        return head.weight.detach()
    return head.weight.dequantize()


HEADS: dict[str, Callable[[], nn.Linear]] = {
    "torchao rows": lambda: of_torchao("rows"),
    "torchao whole": lambda: of_torchao("whole"),
    "torchao blocks": lambda: of_torchao("blocks"),
    "torchao nvfp4": lambda: of_torchao("nvfp4"),
    "torchao plain nvfp4": lambda: of_torchao("plain nvfp4"),
    "compressed channel": lambda: of_compressed("FP8_DYNAMIC"),
    "compressed tensor": lambda: of_compressed("FP8"),
    "compressed block": lambda: of_compressed("FP8_BLOCK", classes=CLASSES),
    "compressed nvfp4": lambda: of_compressed("NVFP4A16"),
}


# ── What is read ────────────────────────────────────


@pytest.mark.parametrize("kind", HEADS)
def test_losses_are_those_of_the_dequantised_weight(kind: str) -> None:
    head = HEADS[kind]()
    hidden, target = hidden_and_target()
    dense = dense_of(head)
    expected = flce.linear_cross_entropy(hidden, dense, target, bias=head.bias, shift=1)
    (gradient,) = torch.autograd.grad(expected, hidden)
    fused = flce.FusedLMHead.from_linear(head, shift=1)
    assert set(fused.state_dict()) == set(head.state_dict())
    made = {
        "loss": flce.LinearCrossEntropyLoss(head, shift=1)(hidden, target),
        "head": fused(hidden, labels=target),
        "function": flce.linear_cross_entropy(hidden, head, target, shift=1),
        "several": flce.LinearCrossEntropyLoss(head, shift=[1, 1])([hidden, hidden], target, loss_weights=[0.5, 0.5])[0],
    }
    if not hasattr(head, "quantization_scheme"):
        made["tensor"] = flce.linear_cross_entropy(hidden, head.weight, target, bias=head.bias, shift=1)
    for name, loss in made.items():
        torch.testing.assert_close(loss, expected, rtol=1e-6 if name == "several" else 0, atol=0)
        (other,) = torch.autograd.grad(loss, hidden)
        if name == "several":
            assert (other.float() - gradient.float()).norm() <= 4e-3 * gradient.float().norm()
        else:
            assert torch.equal(other, gradient), name
    logprobs = flce.linear_logprobs(hidden, head, target)
    assert torch.equal(logprobs, flce.linear_logprobs(hidden, dense, target, bias=head.bias))
    logits = nn.functional.linear(hidden, dense, head.bias)
    for made_logits in (fused(hidden), flce.LinearCrossEntropyLoss(head, shift=1).forward_logits(hidden)):
        assert made_logits.requires_grad and (made_logits - logits).abs().max() <= 2**-7 * logits.abs().max()
        (other,) = torch.autograd.grad(made_logits.float().square().sum(), hidden)
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), hidden, retain_graph=True)
        assert (other.float() - gradient.float()).norm() <= 2e-2 * gradient.float().norm()


def test_a_fused_head_that_is_quantised_in_place() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason=MISSING)
    model = nn.Sequential(flce.FusedLMHead.from_linear(linear(), shift=1, softcap=20.0))
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    hidden, target = hidden_and_target()
    expected = flce.linear_cross_entropy(hidden, dense_of(model[0]), target, bias=model[0].bias, shift=1, softcap=20.0)
    assert torch.equal(model[0](hidden, labels=target), expected)


def test_ragged_blocks_of_compressed_tensors() -> None:
    head = of_compressed("FP8_BLOCK", classes=CLASSES - 60)
    hidden, target = hidden_and_target()
    target = target.clamp(max=CLASSES - 61)
    expected = flce.linear_cross_entropy(hidden, dense_of(head), target, bias=head.bias)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target), expected)


def test_a_decompressed_layer_is_its_weight() -> None:
    """transformers decompresses a model at its first forward."""
    head = of_compressed("FP8_DYNAMIC")
    hidden, target = hidden_and_target()
    expected = flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target)
    from compressed_tensors.compressors import decompress_module

    decompress_module(head)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target), expected)


@pytest.mark.parametrize("kind", ["torchao rows", "torchao nvfp4", "compressed channel", "compressed nvfp4"])
def test_a_compiled_call(kind: str) -> None:
    head = HEADS[kind]()
    hidden, target = hidden_and_target()
    loss = flce.LinearCrossEntropyLoss(head, shift=0)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    made, expected = compiled(hidden, target), loss(hidden, target)
    assert torch.equal(made, expected)
    assert torch.equal(torch.autograd.grad(made, hidden)[0], torch.autograd.grad(expected, hidden)[0])


@pytest.mark.parametrize("kind", ["torchao rows", "compressed nvfp4"])
def test_no_copy_of_the_weight_is_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HEADS[kind]()
    hidden, target = hidden_and_target()
    monkeypatch.setattr(_formats.Codes, "numbers", None)  # a function that makes numbers of codes, for logits alone
    if not hasattr(head, "quantization_scheme"):
        monkeypatch.setattr(type(head.weight), "dequantize", None)
    flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target).backward()


def of_static() -> nn.Linear:
    head = of_compressed("FP8", inputs=True)
    head.input_scale.data.fill_(0.01)  # type: ignore[operator,union-attr]
    return head


ROUNDING: dict[str, tuple[Callable[[], nn.Linear], flce.Fp8]] = {
    "torchao": (lambda: of_torchao("rounded rows"), flce.Fp8("e4m3")),
    "compressed": (lambda: of_compressed("FP8_DYNAMIC", inputs=True), flce.Fp8("e4m3")),
    "compressed static": (of_static, flce.Fp8("e4m3", scales=(0.010009765625, None))),
}


@pytest.mark.parametrize("kind", ROUNDING)
def test_layers_that_round_hidden_states(kind: str) -> None:
    """Results of the layer's own forward: torchao's in bf16 with scales of bf16, compressed-tensors' in fp32 of a copy whose weight is
    decompressed to bf16. With fp8 they are missed by 0.4 of what the weight alone misses them by, or less."""
    make, fp8 = ROUNDING[kind]
    head, (hidden, target) = make(), hidden_and_target()
    own, rows = copy.deepcopy(head), hidden.detach()
    if kind != "torchao":
        from compressed_tensors.compressors import decompress_module

        decompress_module(own)
        with pytest.raises(flce.ArgumentError, match="as losses with fp8 do where it is compressed"):
            flce.LinearCrossEntropyLoss(own, shift=0, fp8=fp8)(hidden, target)
        own, rows = own.float(), rows.float()
    logits, dense = own(rows).float(), dense_of(head)
    alone = nn.functional.linear(hidden.float(), dense.float(), head.bias.float())
    fused, loss = (made(head, shift=0, reduction="none", fp8=fp8) for made in (flce.FusedLMHead.from_linear, flce.LinearCrossEntropyLoss))
    for of_head in (fused(hidden), loss.forward_logits(hidden)):
        assert (of_head - logits).norm() <= 0.4 * (alone - logits).norm()
    expected, without = (torch.log_softmax(each, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0] for each in (logits, alone))
    made = flce.linear_logprobs(hidden, head, target, fp8=fp8)
    assert (made - expected)[target >= 0].norm() <= 0.4 * (without - expected)[target >= 0].norm()
    assert torch.equal(fused(hidden, labels=target), -made) and torch.equal(loss(hidden, target), -made)
    compiled = torch.compile(lambda *given: flce.linear_logprobs(*given, fp8=fp8), backend="aot_eager", fullgraph=True)
    if kind != "compressed static":
        assert torch.equal(compiled(hidden, head, target), made)
        return
    with pytest.raises(Exception, match="input_scale, one number, is to be compared with fp8's"):
        compiled(hidden, head, target)


@pytest.mark.parametrize("kind", ROUNDING)
def test_a_patched_model_of_a_layer_that_rounds_hidden_states(kind: str) -> None:
    make, fp8 = ROUNDING[kind]
    head = make()
    model, inputs = model_with(head)
    flce.patch(model, fp8=fp8)
    losses = [model(**inputs).loss for _ in range(2)]
    if kind == "torchao":
        head.weight.act_quant_kwargs = None
    else:
        head.quantization_enabled = False
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], model(**inputs).loss)


def model_with(head: nn.Linear) -> tuple[Any, dict[str, Tensor]]:
    """A causal LM with this output layer, and what it is called with."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=CLASSES, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    head.bias = None
    model.lm_head = head
    _, target = hidden_and_target()
    return model, {"input_ids": target.clamp(min=0), "labels": target}


@pytest.mark.parametrize("kind", ["torchao rows", "torchao nvfp4", "compressed channel", "compressed nvfp4"])
def test_a_patched_model(kind: str) -> None:
    head = HEADS[kind]()
    model, inputs = model_with(head)
    flce.patch(model)
    losses = [model(**inputs).loss for _ in range(2)]
    losses[0].backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    flce.unpatch(model)
    model.lm_head = nn.Linear(HIDDEN, CLASSES, bias=False)
    model.lm_head.weight = nn.Parameter(dense_of(head), requires_grad=False)
    flce.patch(model)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], model(**inputs).loss)


def test_stand_ins_that_take_a_weight() -> None:
    head = HEADS["torchao rows"]()
    head.bias = None
    hidden, target = hidden_and_target()
    rows, labels, dense = hidden.flatten(0, 1), target.flatten(), dense_of(head)
    from flce.compat import cce, liger, quack, torchtune, verl

    def of_torchtune(weight: Tensor) -> Tensor:
        model = nn.Module()
        model.output = nn.Linear(HIDDEN, CLASSES, bias=False, device="meta")
        model.output.weight = nn.Parameter(weight, requires_grad=False)
        loss = torchtune.LinearCrossEntropyLoss()
        loss.set_model_output(model)
        return loss(rows, labels)

    calls: dict[str, Callable[[Tensor], Any]] = {
        "liger": lambda weight: liger.LigerFusedLinearCrossEntropyLoss()(weight, rows, labels),
        "cce": lambda weight: cce.linear_cross_entropy(rows, weight, labels),
        "quack": lambda weight: quack.chunked_linear_cross_entropy(rows, weight, labels),
        "torchtune": of_torchtune,
        "verl": lambda weight: verl.linear_cross_entropy(rows, weight, labels.clamp(min=0), 1.0, "none")[0].sum(),
    }
    for name, call in calls.items():
        assert torch.equal(call(head.weight), call(dense)), name


def test_trl_takes_a_weight() -> None:
    pytest.importorskip("trl", reason="tools/setup.sh --trainers fetches it")
    from flce.trl import _log_probs

    head = HEADS["torchao rows"]()
    hidden, target = hidden_and_target()
    rows, labels = hidden.flatten(0, 1), target.flatten().clamp(min=0)
    made, expected = (
        _log_probs.ChunkedLogProbFunction.apply(rows, weight, head.bias, labels, 1.0, 256) for weight in (head.weight, dense_of(head))
    )
    for name, one, other in zip(("logprobs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"), made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0 if name != "mean_logits" else 1e-4, atol=0 if name != "mean_logits" else 1e-5)


# ── What is refused ─────────────────────────────────

REFUSED: dict[str, tuple[Callable[[], nn.Linear], str]] = {
    "torchao groups": (lambda: of_torchao("groups"), r"Float8Tensor whose block_size is \[1, 128\].*weight\.dequantize\(\)"),
    "torchao small blocks": (lambda: of_torchao("small blocks"), r"whose block_size is \[64, 64\]"),
    "torchao e5m2": (lambda: of_torchao("e5m2"), "whose qdata is torch.float8_e5m2"),
    "torchao int8": (lambda: of_torchao("int8"), r"Int8Tensor.*a quantised tensor.*weight\.dequantize\(\).*filter_fn"),
    "torchao activations": (lambda: of_torchao("activations"), "act_quant_kwargs.*act_quant_kwargs = None"),
    "torchao rounded whole": (lambda: of_torchao("rounded whole"), r"granularity=PerTensor\(\).*as no flce.Fp8 does"),
    "compressed inputs": (lambda: of_compressed("FP8_DYNAMIC", inputs=True), "input_activations.*quantization_enabled = False"),
    "compressed int4": (lambda: of_compressed("W4A16"), r"int of 4 bits by group.*decompress_module\(layer\)"),
    "compressed int8": (lambda: of_compressed("W8A8"), r"int of 8 bits by channel.*decompress_module\(layer\)"),
    "bitsandbytes int8": (lambda: of_bitsandbytes("int8"), r"Int8Params.*int8_vectorwise_dequant\(weight\.CB, weight\.SCB\)"),
    "bitsandbytes nf4": (lambda: of_bitsandbytes("nf4"), r"Params4bit.*It is nf4.*dequantize_4bit\(weight, weight\.quant_state\)"),
    "bitsandbytes fp4": (lambda: of_bitsandbytes("fp4"), "Params4bit.*It is fp4"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_formats_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    head, (hidden, target) = make(), hidden_and_target()
    calls = [
        lambda: flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target),
        lambda: flce.LinearCrossEntropyLoss(head, shift=0).forward_logits(hidden),
    ]
    if type(head) is nn.Linear:
        calls += [
            lambda: flce.linear_cross_entropy(hidden, head, target),
            lambda: flce.FusedLMHead.from_linear(head)(hidden, labels=target),
        ]
    if not kind.startswith("compressed"):
        calls.append(lambda: flce.linear_cross_entropy(hidden, head.weight, target))
    for call in calls:
        own = kind.startswith("bits") and call is not calls[-1]  # a loss sees the layer's class before its weight
        with pytest.raises(flce.ArgumentError, match=f"forward of its own|{message}" if own else message):
            call()


def test_the_words_of_a_refusal_work() -> None:
    hidden, target = hidden_and_target()
    head = of_torchao("activations")
    head.weight.act_quant_kwargs = None
    expected = flce.linear_cross_entropy(hidden, head.weight.dequantize(), target, bias=head.bias)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target), expected)
    head = of_compressed("FP8_BLOCK", inputs=True)
    head.quantization_enabled = False
    expected = flce.linear_cross_entropy(hidden, dense_of(head), target, bias=head.bias)
    assert torch.equal(flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target), expected)


@pytest.mark.parametrize("kind", ["torchao rows", "compressed nvfp4"])
def test_other_functions(kind: str) -> None:
    head, (hidden, target) = HEADS[kind](), hidden_and_target()
    dense, ids = dense_of(head), target.clamp(min=0)[..., None]
    for one, other in zip(flce.linear_topk(hidden, head, 5), flce.linear_topk(hidden, dense, 5, bias=head.bias), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(flce.linear_logprobs_at(hidden, head, ids), flce.linear_logprobs_at(hidden, dense, ids, bias=head.bias))
    for call in (
        lambda: flce.linear_topk_distillation(hidden, head, ids, torch.ones(ids.shape)),
        lambda: flce.LinearCrossEntropyLoss(head, "pytorch", shift=0)(hidden, target),
    ):
        with pytest.raises(flce.ArgumentError, match="is quantised"):
            call()


def test_an_adapter_over_a_quantised_layer() -> None:
    peft = pytest.importorskip("peft")
    head, (hidden, target) = HEADS["compressed channel"](), hidden_and_target()
    model = peft.get_peft_model(nn.Sequential(head), peft.LoraConfig(target_modules=["0"]))
    layer = model.base_model.model[0]
    with pytest.raises(flce.ArgumentError, match=r"quantised and carries a LoRA adapter \(default\)"):
        flce.LinearCrossEntropyLoss(layer, shift=0)(hidden, target)
    with model.disable_adapter():
        assert torch.equal(
            flce.LinearCrossEntropyLoss(layer, shift=0)(hidden, target), flce.LinearCrossEntropyLoss(head, shift=0)(hidden, target)
        )
