"""Generation over the stages of a pipeline.

The prompts are cut into microbatches. Every rank goes through the same slots in the same order: position 0 of each microbatch, which is its
prompts, then position 1 of each, a token of every sequence, and so on. In a slot a stage receives, computes and sends on, and does not wait
until its message is received. With equally many microbatches and stages, each stage has one microbatch to work on, and the pipeline is
filled once, not for each token.

torch's schedules run a batch from the first stage to the last and end there; here the first stage's input at position p + 1 is the last
stage's output at position p. A schedule called for each position would fill and drain the pipeline for each token.

Messages for a microbatch of n sequences at position p:

    hidden states   stage s -> s + 1            [tokens, hidden_size]
    answer          last stage -> first         [n] int64: the next token; LEFT for a sequence that has ended, NOT_FINITE for one without
                                                a next token
    answer          first stage -> 1 -> … -> the last but one, before the hidden states of p + 1

An answer says which sequences leave the batch, so that every stage knows the shape of the next message before it comes.

No order of these can wait for itself. The first stage posts the receive of an answer right after it has sent the hidden states: with two
stages both ranks have the one order hidden states, answer, hidden states, answer between them, which NCCL asks for. With more stages, each
pair of ranks has one direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce import errors
from flce.engine import _microbatches
from flce.engine._agreement import Agreed, Call, Stepping
from flce.engine._output import HeadOutput, vocab_size_of
from flce.engine._packed import PackedBatch
from flce.engine._sampling import GenerationConfig, Sampler
from flce.engine._stage import Stage
from flce.engine._transport import computed, through_host

if TYPE_CHECKING:
    from flce.engine._pipeline_engine import PipelineEngine

_LEFT, _NOT_FINITE = -1, -2


class Generated(NamedTuple):
    """Continuations of B prompts.

    tokens: [B, L] int64, the new tokens of each; L is the longest's number, and the rest is padded behind its end.
    logprobs: [B, L] fp32, the log-probability (nats) of each new token under the model's softmax at the config's temperature, before
        min_new_tokens, top_k and top_p, as `logprobs` of a training pass gives it. 0 where padded.
    lengths: [B] int64, new tokens of each, the one that ends it among them.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor


def generate(
    engine: PipelineEngine,
    packed_input_ids: Tensor,
    cu_seqlens: Tensor,
    tokenizer: Any = None,
    gconfig: GenerationConfig | None = None,
    *,
    num_micro_batches: int | None = None,
    seed: int | None = None,
) -> Generated | None:
    """Continues the batch's sequences, with a cache of keys and values on each stage. Every rank gives the same prompts and options. It
    runs in evaluation mode without gradients; the stages' modes are restored afterwards.

    Args:
        tokenizer: its `eos_token_id` ends sequences and its `pad_token_id` pads, where gconfig has none. None: gconfig's alone.
        gconfig: None: GenerationConfig().
        num_micro_batches: None: the engine's, or the number of prompts where that is less.
        seed: of sampling. One seed gives a sequence one noise with any number of stages and microbatches. None: drawn from torch's
            generator of the CPU on the last stage.

    Returns `Generated` on the last stage, None on others. Raises ArgumentError: arguments that nothing can be generated from, with name and
    value. PipelineError: logits of a sequence are not finite (the engine goes on afterwards), or a stage has failed.
    """
    stage = engine.stages[0]
    made: list[_Pipeline] = []

    def prepare() -> Call:
        if len(engine.stages) > 1:
            raise errors.ArgumentError(
                f"this rank has {len(engine.stages)} stages; generate needs one stage a rank, as schedules '1f1b' and 'gpipe' have it"
            )
        config = GenerationConfig() if gconfig is None else gconfig
        if not isinstance(config, GenerationConfig):
            of = f" of {type(gconfig).__module__}" if type(gconfig).__module__ != "builtins" else ""
            raise errors.DTypeError(f"gconfig is a {type(gconfig).__name__}{of}; it must be a flce.engine.GenerationConfig or None")
        ends, pad = config.special_tokens(tokenizer)
        lengths = _microbatches.lengths_of(packed_input_ids, cu_seqlens)
        number = min(engine.num_micro_batches, len(lengths)) if num_micro_batches is None else num_micro_batches
        # Balanced by what the caches hold.
        starts = _microbatches.cut([length + config.max_new_tokens for length in lengths], number)
        _check(stage, lengths, config, ends, seed)
        engine._check_within(packed_input_ids, lengths)
        cut = _microbatches.split(packed_input_ids, lengths, starts, engine.device, {}, {})
        parts = [_Part(part, stage, config) for part in cut]
        made.append(_Pipeline(engine, config, ends, pad, seed, parts))
        return Call(f"generate {config} {ends} {pad} {seed}", number, lengths, packed_input_ids, {}, Stepping())

    with engine._watching(), torch.no_grad(), _evaluation(stage):
        engine._agreement.check_called_alike(prepare, None)
        return made[0].run()


def _check(stage: Stage, lengths: Sequence[int], config: GenerationConfig, ends: Sequence[int], seed: Any) -> None:
    """ArgumentError, DTypeError for what cannot be generated. The last stage alone knows the vocabulary."""
    context = getattr(getattr(stage, "config", None), "max_position_embeddings", None)
    longest = max(lengths)
    if context is not None and longest + config.max_new_tokens > context:
        raise errors.ArgumentError(
            f"sequence {lengths.index(longest)} has {longest} tokens, and max_new_tokens is {config.max_new_tokens}; together they must "
            f"be at most {context}, the model's max_position_embeddings"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise errors.DTypeError(f"seed is {seed!r}; it must be an integer or None")
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise errors.ArgumentError(f"seed is {seed}; it must have 64 bits")
    if not stage.is_last:
        return
    vocab_size = vocab_size_of((stage,))
    if vocab_size is None:
        raise errors.ArgumentError(
            "the last stage's head has one row, a critic's value, or no weight [V, D]; generate needs a head with a row for each token"
        )
    outside = [token for token in ends if token >= vocab_size]
    if outside:
        raise errors.ArgumentError(f"eos_token_id is {outside[0]}; it must be 0 to {vocab_size - 1}, the head's vocabulary")
    if len(set(ends)) == vocab_size:
        raise errors.ArgumentError(f"eos_token_id has all {vocab_size} tokens of the vocabulary; at least one must not end a sequence")


@contextmanager
def _evaluation(stage: nn.Module) -> Iterator[None]:
    """Dropout off; each module's mode afterwards is what it was."""
    modes = [(module, module.training) for module in stage.modules()]
    stage.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Part:
    """Sequences that go through the stages together.

    sequences: numbers of those that have not ended; `numbers` has them on the device. tokens: [T] int64, what the first stage embeds in
    the next slot, and lengths how many of them are each sequence's. answer: the first stage's receive of the next tokens. sent: what has
    been sent and perhaps not received.
    """

    def __init__(self, part: _microbatches.Microbatch, stage: Stage, config: GenerationConfig) -> None:
        self.number, self.sequences = part.number, list(part.sequences)
        self.numbers = torch.tensor(self.sequences, dtype=torch.int64, device=part.input_ids.device)
        self.tokens, self.lengths = part.input_ids, list(part.batch.lengths)
        self.cache = stage.new_cache(len(self.lengths), max(self.lengths) + config.max_new_tokens)
        self.answer: tuple[Any, Tensor] | None = None
        self.sent: list[tuple[Any, Tensor]] = []


class _Pipeline:
    """One call's way through the slots, on one rank."""

    def __init__(
        self, engine: PipelineEngine, config: GenerationConfig, ends: tuple[int, ...], pad: int, seed: int | None, parts: list[_Part]
    ) -> None:
        self._stage, self._group, self._device, self._own = engine.stages[0], engine.pipeline_group, engine.device, engine._own
        self._through_host = through_host(self._device, self._group)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._config, self._parts, self._head_options = config, parts, engine._head_options
        self._ends = torch.tensor(ends, dtype=torch.int64, device=self._device)
        if seed is None:  # torch.manual_seed decides
            seed = int(torch.randint((1 << 63) - 1, ()).item()) if self._stage.is_last else 0
        self._sampler = Sampler(config, ends, seed)
        shape = (sum(len(part.sequences) for part in parts), config.max_new_tokens if self._stage.is_last else 0)
        self._tokens = torch.full(shape, pad, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._lengths = torch.zeros(shape[0], dtype=torch.int64, device=self._device)
        self._failure: errors.PipelineError | None = None

    def run(self) -> Generated | None:
        """Through all slots. Raises what all ranks raise alike where logits were not finite."""
        for position in range(self._config.max_new_tokens + 1):
            for part in self._parts:
                if part.sequences and position and not self._stage.is_last:
                    self._learn(part, position - 1)
                if part.sequences and position < self._config.max_new_tokens:
                    self._pass(part, position)
        for part in self._parts:
            self._settle(part)
        if self._failure is not None:
            raise Agreed(self._failure)
        if not self._stage.is_last:
            return None
        longest = int(self._lengths.max())
        return Generated(self._tokens[:, :longest].contiguous(), self._logprobs[:, :longest].contiguous(), self._lengths)

    def _pass(self, part: _Part, position: int) -> None:
        """Runs a slot: the stage on the message of the stage before, and the result to the stage behind."""
        stage = self._stage
        shape = (sum(part.lengths), stage.hidden_size)
        x = part.tokens if stage.is_first else self._received(*self._receive(shape, stage.dtype, stage.stage - 1))
        with self._own():
            y = self._compute(part, x, position)
        if not stage.is_last:
            self._send(part, y, stage.stage + 1)
            if stage.is_first:
                part.answer = self._receive((len(part.sequences),), torch.int64, stage.num_stages - 1)
            return
        if not stage.is_first:
            self._settle(part)
            self._send(part, y, 0)
        with self._own():
            told: list[int] = y.tolist()
        self._take(part, y, told, position)

    def _compute(self, part: _Part, x: Tensor, position: int) -> Tensor:
        """The stage's hidden states [T, hidden_size]; the last stage's answer [n]."""
        stage = self._stage
        if self._failure is not None and stage.is_last:  # messages under way are received and answered, so that none is left behind
            return torch.full((len(part.sequences),), _LEFT, device=self._device)
        batch = PackedBatch.of(part.lengths, self._device, part.cache)
        hidden = computed(stage, x, batch, f"microbatch {part.number}")
        return self._choose(part, hidden[batch.cu_seqlens[1:].long() - 1], position) if stage.is_last else hidden

    def _choose(self, part: _Part, hidden: Tensor, position: int) -> Tensor:
        """The answer to a microbatch whose sequences' last rows are hidden [n, hidden_size]."""
        stage = self._stage
        output = HeadOutput.of(stage, hidden, None, self._head_options)
        tokens = self._sampler(output.logits().float(), part.numbers, position)
        logprobs = output.logprobs(tokens.clamp(min=0), self._config.temperature, shift=0)
        self._tokens[part.numbers, position], self._logprobs[part.numbers, position] = tokens, logprobs
        self._lengths[part.numbers] += 1
        over = torch.isin(tokens, self._ends) if position + 1 < self._config.max_new_tokens else torch.ones_like(tokens, dtype=torch.bool)
        return torch.where(tokens < 0, _NOT_FINITE, torch.where(over, _LEFT, tokens))

    def _learn(self, part: _Part, position: int) -> None:
        """Takes the answer to a position, which comes from the last stage by way of the first."""
        stage = self._stage
        posted = part.answer if stage.is_first else self._receive((len(part.sequences),), torch.int64, stage.stage - 1)
        assert posted is not None
        answer = self._received(*posted)
        told: list[int] = answer.tolist()
        self._settle(part)
        if stage.stage + 1 < stage.num_stages - 1:
            self._send(part, answer, stage.stage + 1)
        self._take(part, answer, told, position)

    def _take(self, part: _Part, answer: Tensor, told: list[int], position: int) -> None:
        """Lets those leave that the answer, on the device and on the host, gives no token: all where one's logits were not finite."""
        with self._own():
            which = [str(part.sequences[place]) for place, token in enumerate(told) if token == _NOT_FINITE]
            if which:
                last = self._stage.num_stages - 1
                self._failure = errors.PipelineError(
                    f"stage {last}: logits of sequence{'s' * (len(which) > 1)} {', '.join(which)} for new token {position + 1} are NaN or "
                    f"infinite, in microbatch {part.number}; nothing is returned",
                    last,
                )
            stays = [] if which else [place for place, token in enumerate(told) if token >= 0]
            if len(stays) < len(told):
                chosen = torch.tensor(stays, dtype=torch.int64, device=answer.device)
                part.sequences = [part.sequences[place] for place in stays]
                part.numbers, answer = part.numbers[chosen], answer[chosen]
                if stays:
                    part.cache.select(chosen)
                else:
                    del part.cache
            part.tokens, part.lengths = answer, [1] * len(stays)

    def _send(self, part: _Part, tensor: Tensor, stage: int) -> None:
        tensor = (tensor.cpu() if self._through_host else tensor).contiguous()
        part.sent.append((dist.isend(tensor, self._ranks[stage], group=self._group), tensor))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> tuple[Any, Tensor]:
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if self._through_host else self._device)
        return dist.irecv(buffer, self._ranks[stage], group=self._group), buffer

    def _received(self, work: Any, buffer: Tensor) -> Tensor:
        work.wait()
        return buffer.to(self._device)

    def _settle(self, part: _Part) -> None:
        """Waits for a microbatch's sends. They have long been received when its next slot comes."""
        for work, _ in part.sent:
            work.wait()
        part.sent.clear()
