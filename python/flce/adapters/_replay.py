"""A model's own forward once more, on what its modules gave in a step: no module runs twice, so nothing that one changes (caches, running
statistics, counters, random numbers, hooks, collectives) is changed twice."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flce import errors
from flce.adapters._methods import put_back
from flce.adapters._shared_rows import SharedRows

# Arguments that a module may get in another form where the model has labels, with the same result.
_OF_NO_ACCOUNT = ("num_items_in_batch", "shift_labels", "return_dict", "use_cache", "ignore_index", "cache", "past_key_values")


class Recording:
    """The calls that a model's forward makes of its modules, while it runs, from the outside: a module inside another's forward is not
    seen. Modules that contain the output layer are part of the forward."""

    def __init__(self, model: Any, head: Any) -> None:
        self.model, self.head = model, head
        self.calls: list[tuple[nn.Module, Any, Any, Any]] = []
        self._depth = 0
        self._left: list[tuple[nn.Module, Any, Any, Any]] | None = None  # calls still to come in a replay
        self._logits: SharedRows | None = None
        self._instead: list[tuple[Any, Any]] = []
        self._labels: Any = None
        self._compares = False
        self.thread = 0  # the thread whose calls are recorded or answered; others' are their own
        self._changed: list[tuple[nn.Module, Any]] = []  # modules that it stands before, and what stood there

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records calls of modules while it runs, or answers them in a replay."""
        inside = {id(module) for module in self.head.modules()} - {id(self.head)}
        holders = {id(module) for module in self.model.modules() if any(each is self.head for each in module.modules())}
        self.thread, before = threading.get_ident(), len(self._changed)  # a replay runs inside the recorded step
        try:
            for module in self.model.modules():
                if module is not self.model and id(module) not in inside:
                    own = module.__dict__.get("_compiled_call_impl")
                    self._changed.append((module, own))
                    through = id(module) in holders
                    module.__dict__["_compiled_call_impl"] = functools.partial(self._call, module, own or module._call_impl, through)
            yield
        finally:
            self.stop(before)

    def stop(self, before: int = 0) -> None:
        """Has modules answer their calls again as they did before so many of them were changed."""
        while len(self._changed) > before:
            module, own = self._changed.pop()
            put_back(module, "_compiled_call_impl", own)

    def _call(self, module: nn.Module, own: Any, through: bool, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return own(*args, **kwargs)
        if self._left is not None:
            return self._answer(module, through, args, kwargs)
        if through:
            return own(*args, **kwargs)
        self._depth += 1
        try:
            outputs = own(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            kept = torch.utils._pytree.tree_map(_without_graph, (args, kwargs, outputs))
            self.calls.append((module, *kept))
        return outputs

    def _answer(self, module: nn.Module, through: bool, args: Any, kwargs: Any) -> Any:
        if module is self.head:
            return self._logits
        if through or any(isinstance(value, SharedRows) for value in (*args, *kwargs.values())):
            return module.forward(*args, **kwargs)  # behind the output layer
        left: Any = self._left
        place = next((i for i, call in enumerate(left) if call[0] is module), None)
        name = next((name for name, each in self.model.named_modules() if each is module), type(module).__name__)
        if place is None:
            raise errors.ArgumentError(f"its forward calls {name} for its loss alone, or behind its output layer")
        _, own_args, own_kwargs, outputs = left.pop(place)
        if self._compares:
            given = dict(enumerate(args)) | kwargs
            without = dict(enumerate(own_args)) | own_kwargs
            for key in given.keys() | without.keys():
                if key not in _OF_NO_ACCOUNT and not str(key).startswith("output_"):
                    self._compare(name, str(key), given.get(key), without.get(key))
        return torch.utils._pytree.tree_map(self._instead_of, outputs)

    def _compare(self, name: str, key: str, given: Any, without: Any) -> None:
        if isinstance(given, Tensor) and isinstance(without, Tensor):
            alike = given is without or (given.shape == without.shape and torch.equal(given, without.to(given.device)))
        elif isinstance(given, Tensor) or isinstance(without, Tensor):
            alike = False
        else:
            return
        if not alike and key == "labels" and isinstance(given, Tensor):
            if isinstance(without, Tensor):
                return  # labels that count for nothing
            raise errors.ArgumentError(f"its forward gives labels to {name} as well, and what that makes of them is not known")
        if not alike:
            raise errors.ArgumentError(
                f"given labels, its forward gives {name} another {key} ({_named(given)}) than without ({_named(without)}): give it what it "
                "makes of labels yourself, such as decoder_input_ids and decoder_attention_mask"
            )

    def _instead_of(self, value: Any) -> Any:
        return next((new for old, new in self._instead if value is old), value)

    @torch.no_grad()
    def replay(
        self, forward: Callable[..., Any], logits: SharedRows, arguments: Mapping[str, Any], changes: Mapping[str, Any] | None = None
    ) -> Any:
        """Result of forward(**arguments) where modules answer as they did and the output layer gives `logits`. `changes` are arguments to
        give instead; without changes, modules must get the same arguments as when they ran. Raises ArgumentError otherwise."""
        changes = changes or {}
        self._left, self._logits, self._compares = list(self.calls), logits, not changes
        self._instead = [(arguments.get(name), value) for name, value in changes.items() if arguments.get(name) is not None]
        devices = sorted({value.device for value in (logits.rows,) if value.is_cuda}, key=str)
        try:
            with self.running(), torch.random.fork_rng(devices=devices):
                return forward(**{**arguments, **changes})
        finally:
            self._left = self._logits = None
            self._instead = []


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _named(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
