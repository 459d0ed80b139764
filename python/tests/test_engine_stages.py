"""Stages, run one after another in one process, against transformers' own model run sequence by sequence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from engine_stage_support import LENGTHS, MODELS, logits_of, model_of, near, own, packed, run, stages_of

from flce import errors
from flce.engine import PackedBatch, _attention


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_compute_what_the_model_does_for_each_sequence(name: str) -> None:
    tied = MODELS.index(name) % 2 == 0
    model = model_of(name, tie_word_embeddings=tied)
    ids, batch = packed(LENGTHS)
    expected_hidden, expected = own(model, ids, LENGTHS)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    for num_stages in (1, 2, 3):
        stages = stages_of(model, num_stages)
        hidden = run(stages, ids, batch)
        near(hidden, expected_hidden)
        assert [stage.tied_weight is not None for stage in stages] == [
            tied and num_stages > 1 and s in (0, num_stages - 1) for s in range(num_stages)
        ]
        logits = logits_of(stages, hidden)
        near(logits, expected)
        (logits * weights).sum().backward()
        gradients: dict[str, Tensor] = {}
        for stage in stages:
            for key, parameter in stage.named_parameters():
                if parameter is stage.tied_weight:
                    key = stage.plan.names.embedding
                gradients[key] = gradients.get(key, torch.zeros(())) + parameter.grad
        parameters = dict(model.named_parameters())
        assert gradients.keys() == parameters.keys()
        for key, parameter in parameters.items():
            scale = max(1.0, parameter.grad.abs().max().item())
            near(gradients[key] / scale, parameter.grad / scale)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_a_stages_state_dict_is_a_part_of_the_models(name: str, tied: bool) -> None:
    model = model_of(name, tie_word_embeddings=tied)
    whole = model.state_dict()
    for num_stages in (1, 2, 4):
        parts = [stage.state_dict() for stage in stages_of(model, num_stages)]
        names = [key for part in parts for key in part]
        assert sorted(names) == sorted(whole)
        for part in parts:
            for key, value in part.items():
                assert torch.equal(value, whole[key]), key
        plan = stages_of(model, num_stages)[0].plan
        for stage, part in enumerate(parts):
            assert all(stage in plan.stages_of(key) for key in part)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "gpt2"])
def test_checkpointed_layers_give_the_same_gradients(name: str) -> None:
    model = model_of(name)
    ids, batch = packed(LENGTHS)
    kept: list[list[Tensor]] = []
    for asked in ("no", "the stage", "the model"):
        if asked == "the model":
            model.activation_checkpointing_enable() if hasattr(
                model, "activation_checkpointing_enable"
            ) else model.gradient_checkpointing_enable()
        stages = stages_of(model, 2)
        for stage in stages:
            stage.gradient_checkpointing = asked == "the stage"
        calls: list[int] = []
        norm = next(part for part in stages[1].layers[0].modules() if "Norm" in type(part).__name__)
        norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        run(stages, ids, batch).square().sum().backward()
        assert len(calls) == (1 if asked == "no" else 2)
        kept.append([p.grad for stage in stages for key, p in stage.named_parameters() if key != "lm_head.weight"])
    for others in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], others, strict=True))


def test_dropout_is_drawn_in_training_mode_and_again_in_checkpointed_layers() -> None:
    model = model_of("gpt2", attn_pdrop=0.3, embd_pdrop=0.2, resid_pdrop=0.2)
    ids, batch = packed(LENGTHS)
    (stage,) = stages_of(model, 1)

    def grads(checkpointing: bool) -> tuple[Tensor, Tensor]:
        stage.gradient_checkpointing = checkpointing
        stage.zero_grad()
        torch.manual_seed(7)
        hidden = stage(ids, batch)
        hidden.square().sum().backward()
        return hidden.detach(), stage.transformer.wte.weight.grad

    (plain, plain_grad), (again, again_grad) = grads(False), grads(True)
    assert torch.equal(plain, again) and torch.equal(plain_grad, again_grad)
    assert not torch.equal(stage(ids, batch), stage(ids, batch))
    near(stage.eval()(ids, batch), own(model.eval(), ids, LENGTHS)[0])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}}, "has rope_type 'dynamic'"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
    ],
)
def test_what_stages_do_not_compute_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.ArgumentError, match=says):
        stages_of(model_of(name, **change), 2)


@pytest.mark.parametrize("kernel", ["_flash", "_torch", "_torch without groups"])
def test_varlen_kernels_are_given_what_the_model_asks_for(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the kernels on the CPU by their documents; a GPU's test runs them."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any) -> Tensor:
        scale = options.get("scale", options.get("softmax_scale"))
        left, right = options["window_size"]
        causal = options.get("causal", False) or right == 0
        assert causal and max_q == max_k == int(cu_q.diff().max()) and cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k)
        groups, outputs = q.shape[1] // k.shape[1], []
        assert options.get("enable_gqa", groups > 1) == (groups > 1)
        for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end].repeat_interleave(groups, 1)) * scale
            if options.get("softcap"):
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            i, j = torch.arange(end - start)[:, None], torch.arange(end - start)[None]
            hidden = (j > i) | ((j < i - left) if left >= 0 else False)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hij,jhd->ihd", weights, v[start:end].repeat_interleave(groups, 1)))
        return torch.cat(outputs)

    def of_torch_2_11(q: Tensor, k: Tensor, *more: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        assert q.shape[1] == k.shape[1]
        return varlen(q, k, *more, scale=scale, window_size=window_size)

    of_torch = functools.partial(_attention._without_groups, of_torch_2_11) if kernel.endswith("groups") else varlen
    monkeypatch.setattr(_attention, "_varlen_kernel", lambda query, maths: getattr(_attention, kernel.split()[0]))
    monkeypatch.setattr(_attention, "_flash_attn", lambda: varlen)
    monkeypatch.setattr(_attention, "_torch_varlen", lambda: of_torch)
    for name in ("qwen3", "mistral-window", *(["gemma2"] if kernel == "_flash" else [])):
        model = model_of(name)
        ids, batch = packed(LENGTHS)
        near(run(stages_of(model, 2), ids, batch), own(model, ids, LENGTHS)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gpt2"])
def test_varlen_attention_of_a_gpu_is_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernel for packed sequences in bf16, against the model in fp32, and as near as attention sequence by sequence."""
    model = model_of(name, **({"n_embd": 32} if name == "gpt2" else {"head_dim": 8}))
    ids, _ = packed(LENGTHS)
    expected = own(model, ids, LENGTHS)[0].cuda()
    chosen = _attention._varlen_kernel
    used: list[Any] = []
    monkeypatch.setattr(_attention, "_varlen_kernel", lambda query, maths: used.append(chosen(query, maths)) or used[-1])
    errors_of = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(_attention, "_varlen_kernel", lambda query, maths: None)
        stages = stages_of(model, 2, dtype=torch.bfloat16, device=torch.device("cuda"))
        hidden = run(stages, ids.cuda(), PackedBatch.of(LENGTHS, torch.device("cuda")))
        errors_of.append((hidden.float() - expected).abs().max().item())
        hidden.float().square().sum().backward()
        inner = [(n, p) for stage in stages for n, p in stage.named_parameters() if not n.startswith("lm_head")]
        assert not [n for n, p in inner if p.grad is None or not p.grad.isfinite().all()]
    assert used and all(one is not None for one in used)
    assert errors_of[0] < 0.25 and errors_of[0] < 3 * errors_of[1] + 1e-2, errors_of


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2-scales"])
def test_stages_in_16_bits_and_under_autocast_stay_near_the_model(name: str) -> None:
    model = model_of(name).eval()
    ids, batch = packed(LENGTHS)
    expected = own(model, ids, LENGTHS)[0]
    stages = stages_of(model, 2, dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for stage in stages for p in stage.parameters())
    hidden = run(stages, ids, batch)
    assert hidden.dtype == torch.bfloat16 and stages[0].dtype == torch.bfloat16
    near(hidden.float(), expected, 0.25)
    hidden.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stages[0].parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = run(stages_of(model, 2), ids, batch)
    assert hidden.dtype == torch.float32
    near(hidden, expected, 0.25)


def test_inputs_that_do_not_fit_are_refused() -> None:
    stages = stages_of(model_of("llama"), 2)
    ids, batch = packed([3, 2])
    with pytest.raises(errors.ShapeError, match=r"x has shape \[4\]; stage 0 of 2 takes \[5\]"):
        stages[0](ids[:4], batch)
    with pytest.raises(errors.ShapeError, match=r"stage 1 of 2 takes \[5, 16\]"):
        stages[1](ids, batch)
    with pytest.raises(errors.DTypeError, match="token ids"):
        stages[0](ids.float(), batch)
    gpt2 = stages_of(model_of("gpt2"), 1)
    with pytest.raises(errors.ArgumentError, match="has 41 tokens; the model has learned positions of 40"):
        gpt2[0](*packed([3, 41]))
    assert gpt2[0](*packed([40])).shape == (40, 16)


def test_an_empty_sequence_goes_through_and_an_empty_batch_is_refused() -> None:
    model = model_of("qwen3")
    stages = stages_of(model, 2)
    ids, batch = packed([3, 0, 2])
    near(run(stages, ids, batch), own(model, ids, [3, 2])[0])
    with pytest.raises(errors.ShapeError, match="batch has no tokens"):
        run(stages, *packed([]))
