"""`PipelineEngine`: training, evaluation and forward passes of a model in pipeline stages, on packed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce import errors
from flce.core import checks
from flce.engine import _generate, _losses, _microbatches, _schedules, _setup, _step, _transport
from flce.engine._agreement import Agreed, Call, Stepping
from flce.engine._microbatches import Microbatch
from flce.engine._output import HeadOutput, check_output, compute_output, head_options_of, vocab_size_of
from flce.engine._stage import Stage


class PipelineEngine:
    """A model in pipeline stages, of which this rank has one or more.

        engine = PipelineEngine(stage, pipeline_group, optimizer, lr_scheduler=scheduler)
        result = engine.train_batch(packed_input_ids, cu_seqlens, loss_fn, labels=labels)
        if engine.is_last:
            loss, stats = result

    Every rank of the pipeline makes one and calls the same methods with the same batch: packed_input_ids [T] int64 or int32, on any device,
    and cu_seqlens [B + 1] int32 or int64 from 0 to T, without empty sequences. A difference is found before anything is computed. A batch
    is cut into microbatches of whole sequences, in its order, whose largest number of tokens is the least possible.

    Args:
        stage: this rank's `Stage`, or several in the order of their numbers for a schedule that has several on a rank.
        pipeline_group: the ranks of this pipeline, in the order of their stages; None: all ranks.
        optimizer: of this rank's parameters, tied weight included, and of no others; needed for `train_batch` alone.
        data_parallel_group: the ranks that have copies of this rank's stages. Gradients are reduced over them, once a batch.
        lr_scheduler: stepped behind the optimizer, without a metric (torch's ReduceLROnPlateau is refused).
        schedule: "1f1b", "gpipe"; with several stages a rank, r, R + r, … on rank r of R, "interleaved_1f1b", "interleaved_zero_bubble".
        num_micro_batches: of a batch, where a call does not say; None: the number of stages.
        normalize: "micro_batches": a batch's loss is the mean of its microbatches' losses, and gradients are averaged over data-parallel
            ranks. "tokens": losses are weighed by what they count, over data-parallel ranks too; see `train_batch`.
        max_grad_norm: gradients of all stages together are scaled to at most this 2-norm, and `last_grad_norm` has what it was;
            float("inf") measures without scaling. None: neither.
        nonfinite: what becomes of a batch with a loss (or a norm) that is not finite, which all ranks agree on before the optimizer steps:
            "raise" PipelineError, or "skip" the step and log it. Parameters stay as they were either way.
        head_options: workspace_limit_bytes, retain_in_grad_weight, batch_invariant of `flce.linear_cross_entropy`, for every microbatch.
        memory_limit_bytes: the most memory that the losses of all microbatches in flight take together, as `flce.MemoryBudget` has it.
        device: where the stages are; None: where their first parameter is.

    Attributes:
        stages, is_first, is_last: of this rank. last_grad_norm: float or None. version_steps: what `set_version_steps` was given, or None.

    Raises:
        ArgumentError: for arguments that do not fit, on this rank, on another one of its pipeline, or between ranks. PipelineError: where
        copies of a parameter differ, or another data-parallel copy of the pipeline could not be made. No rank waits for one that raised,
        unless it was given a wrong group.
        After a rank has failed, every call raises PipelineError: make another engine, on new process groups.
    """

    def __init__(
        self,
        stage: Stage | Sequence[Stage],
        pipeline_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        lr_scheduler: Any = None,
        schedule: str = "1f1b",
        num_micro_batches: int | None = None,
        normalize: str = "micro_batches",
        max_grad_norm: float | None = None,
        nonfinite: str = "raise",
        head_options: Mapping[str, Any] | None = None,
        memory_limit_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _setup.check_torch()
        self.pipeline_group = _setup.group_of("pipeline_group", dist.group.WORLD if pipeline_group is None else pipeline_group)
        self.data_parallel_group: dist.ProcessGroup | None = None
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.last_grad_norm: float | None = None
        self.version_steps: int | None = None
        refused: Exception | None = None
        try:
            if data_parallel_group is not None:
                self.data_parallel_group = _setup.group_of("data_parallel_group", data_parallel_group)
            self.stages = _setup.stages_of(stage)
            self.num_stages = self.stages[0].num_stages
            self.schedule = checks.choice("schedule", schedule, tuple(_schedules.SCHEDULES))
            number = self.num_stages if num_micro_batches is None else num_micro_batches
            self.num_micro_batches = checks.integer("num_micro_batches", number, 1)
            self.normalize = checks.choice("normalize", normalize, ("micro_batches", "tokens"))
            self.nonfinite = checks.choice("nonfinite", nonfinite, ("raise", "skip"))
            self.max_grad_norm = _setup.norm(max_grad_norm)
            self.device = _setup.device_of(self.stages, device)
            self._head_options = head_options_of(head_options, memory_limit_bytes)
        except Exception as error:  # the other ranks hear of it first
            refused = error
        self._agreement, self._tied = _setup.meet(self, refused)
        self._modules = [_transport.StageModule(stage, self._own) for stage in self.stages]
        self._made: dict[tuple[bool, int], Any] = {}
        self._microbatches: list[Microbatch] = []
        self._failure: tuple[BaseException, _transport.StageModule | None] | None = None
        self._failed: str | None = None

    @property
    def is_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so gets results."""
        return any(stage.is_last for stage in self.stages)

    @property
    def training(self) -> bool:
        return self.stages[0].training

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages."""
        for stage in self.stages:
            yield from stage.parameters()

    def train(self, mode: bool = True) -> PipelineEngine:
        """Puts this rank's stages into training mode."""
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> PipelineEngine:
        """Puts this rank's stages into evaluation mode."""
        return self.train(False)

    def set_version_steps(self, version_steps: int) -> None:
        """Sets the number for the learning-rate scheduler, which is stepped as lr_scheduler.step(version_steps) after a batch from now on:
        in reinforcement learning one version of a policy takes several optimizer steps. ArgumentError where the scheduler's step takes no
        such argument."""
        _step.check_scheduler(self.lr_scheduler, checks.integer("version_steps", version_steps, 0))
        self.version_steps = version_steps

    def train_batch(
        self,
        packed_input_ids: Tensor,
        cu_seqlens: Tensor,
        loss_fn: _losses.LossFunction,
        *,
        num_micro_batches: int | None = None,
        token_count: _losses.TokenCount = None,
        rows: Mapping[str, str] | None = None,
        **loss_fn_kwargs: Any,
    ) -> tuple[Tensor, list[Any]] | None:
        """One step of the optimizer on a batch.

        loss_fn(output, packed_input_ids=…, cu_seqlens=…, **kwargs) → (loss, stats) is called on the last stage for each microbatch: output
        a `HeadOutput`, packed_input_ids [T_i] int64, cu_seqlens [B_i + 1] int32 from 0, loss a scalar with a gradient.

        Args:
            num_micro_batches: of this batch; at most its number of sequences.
            token_count: with normalize="tokens": what a microbatch's loss is a mean over. A function of (packed_input_ids, cu_seqlens,
                **kwargs) that returns the number for a microbatch, or a tensor [B] of each sequence's. None: tokens that have a target one
                row on, by the keyword `labels` or else `loss_mask` (docs/engine.md). A loss that scores labels with another shift, or is a
                mean over weights, needs it.
            loss_fn_kwargs: for loss_fn. Tensors are split by their first dimension: T, as tokens are; T - B, as those tokens are that have
                a next one in their sequence; B, as sequences are. All else is given to each microbatch as it is.
            rows: what the rows of keywords are whose shape does not say it, by name: "token", "target", "sequence", or "none", which gives
                the tensor to each microbatch whole.

        Returns:
            (loss, stats) on the last stage: the batch's loss on this data-parallel rank, a detached fp32 scalar, and what loss_fn returned
            beside each loss, its tensors detached, in order; None on other stages. Gradients are cleared behind the optimizer's step.
        """
        return self._batch(True, packed_input_ids, cu_seqlens, loss_fn, num_micro_batches, token_count, rows, loss_fn_kwargs)

    def eval_batch(
        self,
        packed_input_ids: Tensor,
        cu_seqlens: Tensor,
        loss_fn: _losses.LossFunction,
        *,
        num_micro_batches: int | None = None,
        token_count: _losses.TokenCount = None,
        rows: Mapping[str, str] | None = None,
        **loss_fn_kwargs: Any,
    ) -> tuple[Tensor, list[Any]] | None:
        """Runs `train_batch` without gradients and without a step. Parameters and their gradients are left alone; whether the stages are in
        evaluation mode is the caller's."""
        return self._batch(False, packed_input_ids, cu_seqlens, loss_fn, num_micro_batches, token_count, rows, loss_fn_kwargs)

    def forward(
        self,
        packed_input_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        output: str = "logits",
        labels: Tensor | None = None,
        temperature: float = 1.0,
        num_micro_batches: int | None = None,
    ) -> Tensor | None:
        """The last stage's results for a batch, packed in the batch's order; None on other stages. Without gradients.

        Args:
            output: "logits" [T, V] of hidden's dtype; "logprobs" [T] fp32 of the next token, or of `labels` [T] (not shifted), 0 where
                there is none; "entropy" [T] fp32; "values" [T] fp32 of a critic; "hidden" [T, D] behind the final norm. Logits are made for
                "logits" alone.
            temperature: for "logprobs" and "entropy".
        """
        keywords = {} if labels is None else {"labels": labels}
        kind = f"forward {output} {temperature}"
        results: list[Tensor] = []

        def compute(hidden: Tensor, number: int) -> None:
            microbatch = self._microbatches[number]
            given = microbatch.kwargs.get("labels", microbatch.input_ids)
            results.append(compute_output(self._output(hidden, microbatch), output, given, temperature))

        with self._watching(), torch.no_grad():
            check = functools.partial(check_output, self.stages, output, labels, temperature)
            self._prepare(kind, packed_input_ids, cu_seqlens, num_micro_batches, keywords, dict.fromkeys(keywords, "token"), check=check)
            self._run(False, compute)
            return torch.cat(results) if self.is_last else None

    __call__ = forward

    generate = _generate.generate

    def check_usable(self) -> None:
        """PipelineError where a call has failed before."""
        if self._failed is not None:
            raise errors.PipelineError(
                "this engine has failed and cannot go on; make another one, on new process groups (torch.distributed.new_group), as "
                f"exchanges of the old ones are unfinished. It failed with: {self._failed}"
            )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Wraps everything that ranks do together: an agreed error is raised as it is; anything else ends the engine, and others are
        told."""
        self.check_usable()
        self._failure = None
        try:
            yield
        except Agreed as agreed:
            raise agreed.error from agreed.error.__cause__
        except Exception as error:
            raised = self._reason(error)
            self._failed = str(raised)
            raise raised from error
        except BaseException as error:
            self._failed = f"{self._agreement.says(self._agreement.rank)} was interrupted: {type(error).__name__}"
            self._agreement.tell(self.stages[0].stage, self._failed)
            raise
        finally:
            for module in self._modules:
                module.microbatches, module.finish = [], None
            self._microbatches = []

    @contextmanager
    def _own(self, module: _transport.StageModule | None = None) -> Iterator[None]:
        """Wraps this rank's own computing: that of a stage's pass, or outside of them."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or (error, module)
            raise

    def _reason(self, error: Exception) -> errors.PipelineError:
        if self._failure is None:
            return self._agreement.reason(error)
        own, module = self._failure
        stage = self.stages[0].stage if module is None else module.stage.stage
        where = "" if module is None else f" on {module.microbatches[module.number]}"
        while isinstance(own, RuntimeError) and own.__cause__ is not None and "ailed to run" in str(own):  # torch's words round it
            own = own.__cause__
        message = f"stage {stage} failed{where}: {type(own).__name__}: {own}"
        self._agreement.tell(stage, message)
        return errors.PipelineError(message, stage)

    def _prepare(
        self,
        kind: str,
        packed_input_ids: Tensor,
        cu_seqlens: Tensor,
        num_micro_batches: int | None,
        keywords: Mapping[str, Any],
        rows: Mapping[str, str] | None,
        token_count: _losses.TokenCount | bool = False,
        check: Callable[[], Any] = lambda: None,
    ) -> list[int] | None:
        """Cuts the batch, and sees that every rank was called with the same. Returns the microbatches' counted tokens, where asked for."""
        counts: list[int] | None = None
        train = kind.startswith("train")
        wanted = self.num_micro_batches if num_micro_batches is None else num_micro_batches

        def prepare() -> Call:
            nonlocal counts
            check()
            lengths = _microbatches.lengths_of(packed_input_ids, cu_seqlens)
            self._check_within(packed_input_ids, lengths)
            starts = _microbatches.cut(lengths, wanted)
            kinds = _microbatches.kinds_of(keywords, lengths, rows or {})
            self._microbatches = _microbatches.split(packed_input_ids, lengths, starts, self.device, keywords, kinds)
            self._schedule(train, wanted)
            if not isinstance(token_count, bool):
                counts = _losses.counts_of(token_count, self._microbatches, lengths, kinds, vocab_size_of(self.stages))
            stepping = _setup.stepping_of(self) if train else Stepping()
            # Version steps decide a stage's learning rate.
            return Call(f"{kind} {self.version_steps}", wanted, lengths, packed_input_ids, keywords, stepping)

        self._agreement.check_called_alike(prepare, self.data_parallel_group if train else None)
        return counts

    def _check_within(self, packed_input_ids: Tensor, lengths: Sequence[int]) -> None:
        positions = [stage.max_positions for stage in self.stages if stage.max_positions is not None]
        _microbatches.check_within(packed_input_ids, lengths, self._agreement.num_embeddings, min(positions, default=None))

    def _batch(
        self, train: bool, ids: Tensor, cu_seqlens: Tensor, loss_fn: Any, number: int | None, token_count: Any, rows: Any, kwargs: Any
    ) -> tuple[Tensor, list[Any]] | None:
        """`train_batch` and `eval_batch`."""
        by_tokens = self.normalize == "tokens"

        def check() -> None:
            if train:
                _step.check(self)
            if token_count is not None and not by_tokens:
                raise errors.ArgumentError(f'token_count is for normalize="tokens"; this engine was made with {self.normalize!r}')
            if not callable(loss_fn):
                raise errors.DTypeError(f"loss_fn is a {type(loss_fn).__name__}; it must be a function")

        with self._watching(), torch.set_grad_enabled(train):
            kind = "train_batch" if train else "eval_batch"
            counts = self._prepare(kind, ids, cu_seqlens, number, kwargs, rows, token_count if by_tokens else False, check)
            total = 0 if counts is None else _step.total_of(self, counts, train)
            self._losses = _losses.Losses(loss_fn, list(self._microbatches), counts, token_count is not None, total)
            if train:
                _step.clear_gradients(self)
            self._run(train, None if train else self._loss_of)
            if train:
                _step.finish(self, self._losses)
            return self._losses.result() if self.is_last else None

    def _schedule(self, train: bool, num_micro_batches: int) -> Any:
        """torch's schedule for this many microbatches, kept: its stages hold what it set up at its first step."""
        key = (train, num_micro_batches)
        if key not in self._made:
            stages = [_transport.EngineStage(module, self.device, self.pipeline_group) for module in self._modules]
            self._made[key] = _schedules.make(self.schedule, stages, num_micro_batches, self._loss_of if train else None)
        return self._made[key]

    def _run(self, train: bool, finish: Callable[[Tensor, int], Any] | None) -> None:
        for module in self._modules:
            module.microbatches, module.finish = self._microbatches, finish
        numbers = torch.arange(len(self._microbatches))  # inputs on the rank of the first stage, targets on all
        self._schedule(train, len(numbers)).step(*([numbers] if self.is_first else []), target=numbers, return_outputs=False)

    def _output(self, hidden: Tensor, microbatch: Microbatch) -> HeadOutput:
        last = next(stage for stage in self.stages if stage.is_last)
        return HeadOutput.of(last, hidden, microbatch.batch.cu_seqlens, self._head_options)

    def _loss_of(self, hidden: Tensor, number: Tensor | int) -> Tensor:
        """torch's loss_fn; the target is a microbatch's number."""
        microbatch = self._microbatches[int(number)]
        with next(module for module in self._modules if module.stage.is_last).noting():
            return self._losses.add(self._output(hidden, microbatch), microbatch)
