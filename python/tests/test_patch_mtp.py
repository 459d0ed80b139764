"""transformers' layers of multi-token prediction beside a patched model, and their training by flce. They are a model of their own
(MtpModel), which drafts tokens for generate(use_mtp=True), and shares embedding and output layer with the causal LM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from causal_lm_support import VOCAB_SIZE
from torch import Tensor

import flce

layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(layers, "MtpModel"):
    pytest.skip("this transformers has no MtpModel", allow_module_level=True)

DEPTHS = 2


def models() -> tuple[Any, Any]:
    """A causal LM whose config names layers of multi-token prediction, and these layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        num_nextn_predict_layers=DEPTHS,
        pad_token_id=0,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    mtp = layers.MtpModel(model, DEPTHS)
    # Experts of these layers lie in memory as they were allocated until a checkpoint is read.
    with torch.no_grad():
        for parameter in {id(p): p for p in (*model.parameters(), *mtp.parameters())}.values():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return model, mtp


def tokens() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB_SIZE, (1, 12), generator=make), torch.arange(12)[None]


def drafted(model: Any, mtp: Any) -> tuple[Tensor, Tensor]:
    ids, positions = tokens()
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        candidates, logits, _ = mtp(ids, hidden, None, positions, None)
    return candidates, logits


def test_drafts_beside_a_patched_model_are_as_before() -> None:
    model, mtp = models()
    ids, _ = tokens()
    right, before = model(ids, labels=ids).loss, drafted(model, mtp)
    flce.patch(model.train())
    outputs = model(ids, labels=ids)
    torch.testing.assert_close(outputs.loss, right)
    assert outputs.logits is None
    for got, expected in zip(drafted(model, mtp), before, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_layers_by_themselves_are_refused() -> None:
    with pytest.raises(flce.ArgumentError, match="model is a MtpModel whose output embeddings are none"):
        flce.patch(models()[1])


def hidden_states(model: Any, mtp: Any) -> list[Tensor]:
    """The decoder's and each depth's: depth d reads the token d positions on, in place of a drafted one."""
    ids, positions = tokens()
    states = [model.get_decoder()(ids).last_hidden_state]
    for depth in range(DEPTHS):
        following = F.pad(ids, (0, 1 + depth))[:, 1 + depth :]
        states.append(mtp.forward_layer(depth, states[-1], positions + 1 + depth, None, input_ids=following))
    return states


@pytest.mark.parametrize("form", ["loss", "head"])
def test_main_model_and_layers_train_on_one_output_layer(form: str) -> None:
    model, mtp = models()
    ids, _ = tokens()
    shifts, weights = [1, 2, 3], [1.0, 0.15, 0.15]
    parameters = {id(p): p for p in (*model.parameters(), *mtp.parameters())}
    right = torch.zeros(())
    for weight, shift, states in zip(weights, shifts, hidden_states(model, mtp), strict=True):
        right = right + weight * F.cross_entropy(model.lm_head(states)[0], flce.shift_labels(ids, shift)[0])
    expected = torch.autograd.grad(right, list(parameters.values()), allow_unused=True)
    if form == "loss":
        loss: Any = flce.LinearCrossEntropyLoss(model.get_output_embeddings, shift=shifts)
    else:
        loss = model.lm_head = mtp.shared_head = flce.FusedLMHead.from_linear(model.lm_head, shift=shifts)
    total, losses = loss(hidden_states(model, mtp), ids, loss_weights=weights)
    assert len(losses) == 1 + DEPTHS
    torch.testing.assert_close(total, right)
    for got, gradient in zip(torch.autograd.grad(total, list(parameters.values()), allow_unused=True), expected, strict=True):
        assert (got is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)
    assert sum(gradient is not None for gradient in expected) > len(expected) / 2
