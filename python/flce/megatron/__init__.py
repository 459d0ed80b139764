"""Megatron-LM's language models on flce's kernels: the loss of a GPTModel without its logits.

flce.megatron.patch(model)                                                   # megatron-core 0.16 and newer, multi-token prediction too
model(tokens, position_ids, attention_mask, labels=labels, output_processor=flce.megatron.output_processor)      # where forward takes one
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from flce import errors
from flce.core import checks
from flce.megatron import _head, _patch
from flce.megatron._patch import mtp_acceptance, patch, unpatch

__all__ = ["OutputProcessor", "mtp_acceptance", "output_processor", "patch", "process_mtp_loss", "unpatch"]


class OutputProcessor:
    """The object that `GPTModel.forward(output_processor=...)` calls in place of its output layer and its loss.

    Args:
        main_grad: backward adds the weight's gradient to weight.main_grad, and gives autograd a dummy of the weight's shape for
            DistributedDataParallel's hooks. None: where the layer's gradient_accumulation_fusion is on and kernels can write main_grad
            (contiguous, at a multiple of 16 bytes); True: always, without Apex and Transformer Engine; False: never.
        return_entropy: return (loss, entropy), each [b, s].
        options: of `flce.linear_cross_entropy`: ignore_index, softcap, label_smoothing, z_loss, temperature (a number), dft,
            batch_invariant, workspace_limit_bytes, retain_in_grad_weight, reduce_dtype, and vocab_size: classes of the whole layer. Rows at
            and past it, the padding of Megatron's vocabulary, then have no probability; without it they are classes like any other, as in
            Megatron's loss.

    Raises ArgumentError, DTypeError, SpecError for an unknown option, or one out of its range.
    """

    def __init__(self, *, main_grad: bool | None = None, return_entropy: bool = False, **options: Any) -> None:
        checks.flag("return_entropy", return_entropy)
        self.return_entropy = return_entropy
        self.settings = _head.settings_of(main_grad, options)

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        runtime_gather_output: bool | None = None,
        compute_language_model_loss: Any = None,
        scale_logits: Any = None,
        **others: Any,
    ) -> Any:
        """The loss [b, s] fp32, unreduced and unmasked, as GPTModel gives it: the caller applies its loss_mask. -loss are
        log-probabilities.

        Args:
            hidden_states: [s, b, h]; with sequence parallel this rank's [s / ranks, b, h]; of packed sequences [t, 1, h].
            output_layer: GPTModel's ColumnParallelLinear. Hooks before its forward run.
            output_weight: [v / ranks, h]: the shared embedding's weight. None: the layer's own.
            labels: [b, s] int64, aligned already, of the whole vocabulary, the same on every tensor-parallel rank; under context parallel
                this rank's part, as hidden_states are.
            scale_logits: what is done to logits before the loss (muP): a multiplication by a number.
            others: taken and not needed.

        Raises ArgumentError and its kinds, which are RuntimeErrors as Megatron's own, naming what is not understood.
        """
        if inference_context is not None:
            raise errors.ArgumentError(
                "inference_context is given: the output processor is for training; call forward without it for logits"
            )
        if labels is None:
            raise errors.ArgumentError("labels is None, and the output processor computes a loss; call forward without it for logits")
        _patch.check_loss(compute_language_model_loss)
        logits: Any = _head.call_deferring(output_layer, hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        if scale_logits is not None:
            logits = scale_logits(logits)
        made = _head.loss_of(logits, labels, self.settings, return_entropy=self.return_entropy)
        return made if self.return_entropy else made[0]

    def process_mtp_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for megatron.core's `multi_token_prediction.process_mtp_loss` (newer than 0.16), with its arguments: that function runs,
        and the logits of the heads of multi-token prediction are not made. Losses, their scale, and what is logged of them, acceptance
        counts among it, are Megatron's. A model calls it before an output processor, and finds it by its module's name:

            megatron.core.models.gpt.gpt_model.process_mtp_loss = flce.megatron.process_mtp_loss

        `patch(model)` does the same for one model. Raises UnavailableError where megatron.core has no such function; else as a call.
        """
        peer = getattr(_head.core("transformer.multi_token_prediction"), "process_mtp_loss", None)
        if peer is None:
            raise errors.UnavailableError(
                f"megatron.core {_head.core('package_info').__version__} has no process_mtp_loss, which a model's own code does there: "
                "call flce.megatron.patch(model)"
            )
        if getattr(peer, "__module__", "").startswith("flce."):
            raise errors.ArgumentError(
                "multi_token_prediction.process_mtp_loss of megatron.core is flce's, which calls it; replace the name in the model's "
                "module (megatron.core.models.gpt.gpt_model) alone"
            )
        given = inspect.signature(peer).bind(*args, **kwargs).arguments
        _patch.check_loss(given["compute_language_model_loss"])
        layer = _head.DeferringLayer(given["output_layer"])
        weights: dict[int, Tensor] = {}

        def loss_of_depth(labels: Tensor, logits: Any) -> Tensor:
            return _head.loss_of(logits, labels, self.settings, return_top1=True, weights=weights)[0]

        return peer(**given | {"output_layer": layer, "compute_language_model_loss": loss_of_depth})


output_processor = OutputProcessor()
process_mtp_loss = output_processor.process_mtp_loss
