"""Facts about a language model of transformers and a call of it: the kind of the call, the names of its loss, and everything beside the
output layer's weight that may change its logits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flce import errors

# Numbers of a config, or of a model, that its forward changes logits by, read at each call.
_LOGIT_NUMBERS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_scaling",
)
_OF_DEEPSPEED = ("ds_", "applied_pre_backward_")  # counts that ZeRO-3 keeps in modules


def losses_beside(outputs: Mapping[str, Any]) -> list[str]:
    """Names of outputs that are losses beside the loss itself; a number 0 is none."""
    return [name for name, value in outputs.items() if name != "loss" and name.endswith("loss") and isinstance(value, Tensor)]


def kind_of(model: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names of a call's arguments, whether it trains, and whether it has several sequences: calls alike in these are compared once."""
    names = [name if not isinstance(value, bool) else f"{name}={value}" for name, value in arguments.items() if value is not None]
    tokens = next((value for value in arguments.values() if isinstance(value, Tensor) and value.dim() > 1), None)
    # A word, and no comparison of sizes: where a compiler has a symbol for the size, the branch is what it guards.
    sequences = "several" if tokens is not None and tokens.shape[0] > 1 else "one"
    return (model.training, sequences, *names)


def named_arguments(model: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by the names that the model's forward gives them; a forward of (*args, **kwargs) hands them on to its base class's. Raises
    ArgumentError where no forward names them."""
    if not args:
        return {}
    for each in type(model).__mro__:
        if "forward" not in each.__dict__:
            continue
        signature = inspect.signature(each.__dict__["forward"])
        if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            return dict(list(signature.bind_partial(model, *args).arguments.items())[1:])
    raise errors.ArgumentError(
        f"the forward of {type(model).__name__} does not name its arguments; call the model with names (input_ids=…)"
    )


def labels_of_nothing(model: Any, arguments: Mapping[str, Any]) -> Tensor | None:
    """Labels that count for nothing, where a caller has none, so that the model asks for its loss. An encoder's tokens are not those of
    labels."""
    tokens: Any = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or has_encoder(model):
        return None
    return torch.full(tokens.shape[:2], -100, dtype=torch.int64, device=tokens.device)


def has_encoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def reads_labels(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a decoder reads what the model makes of labels."""
    return has_encoder(model) and all(arguments.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def calls_loss_function(model: Any) -> bool:
    """Whether the model's forward, or one that it calls by super(), asks model.loss_function for its loss."""
    forwards = [c.__dict__["forward"] for c in type(model).__mro__ if "forward" in c.__dict__ and c is not nn.Module]
    for code in [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]:
        if code is None or "loss_function" in code.co_names:
            return code is not None
        if "__class__" not in code.co_freevars:
            break
    return False


def name_of_loss(function: Any) -> str:
    """Name of a loss function that is transformers' own; another's name says nothing."""
    code = getattr(function, "__code__", None)
    defining = sys.modules.get("transformers.loss.loss_utils")
    is_own = code is not None and defining is not None and code.co_filename == defining.__file__
    return str(function.__name__) if is_own else ""


def logit_numbers(model: Any) -> tuple[Any, ...]:
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    values = [getattr(holder, name, None) for holder in (config, model) for name in _LOGIT_NUMBERS]
    return tuple([value if isinstance(value, (int, float)) else None for value in values])


def holders(model: Any, head: Any) -> tuple[nn.Module, ...]:
    """The model and the modules in it that contain the output layer, whose forwards may change its logits."""
    places = [name.split(".") for name, module in model.named_modules(remove_duplicate=False) if module is head]
    names = dict.fromkeys(".".join(place[:length]) for place in places for length in range(len(place)))
    return tuple(model.get_submodule(name) for name in names)


def beside(head: Any, holders: tuple[Any, ...]) -> tuple[Any, ...]:
    """Everything that may change the output layer's logits beside its weight: hooks; numbers, tensors, buffers and frozen parameters of the
    layer and of the modules that contain it; and numbers of these modules' configs. A tensor that is written to counts as another one."""
    configs = [config for each in holders if (config := getattr(each, "config", None)) is not None]
    configs += [each.get_text_config() for each in configs if hasattr(each, "get_text_config")]
    numbers, tensors = [], [*head.buffers()]
    for place in (*{id(each): each for each in configs}.values(), *holders, *head.modules()):
        for name, value in getattr(place, "__dict__", {}).items():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, (int, float)) and name != "training" and not name.startswith(_OF_DEEPSPEED):
                numbers.append((name, value))
    for each in holders:
        tensors += [value for value in (*each._buffers.values(), *each._parameters.values()) if not (value is None or value.requires_grad)]
    versions = [(id(each), 0 if each.is_inference() else each._version) for each in tensors]
    return tuple(head._forward_hooks), tuple(head._forward_pre_hooks), tuple(head._backward_pre_hooks), tuple(versions), tuple(numbers)


def special_classes(model: Any, vocab_size: int) -> tuple[int, ...]:
    """Classes to which a loss function may give a meaning of their own: those that the config names, and the last one."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "get_text_config", lambda: config)()]
    named = [value for each in configs for name, value in vars(each).items() if name.endswith("_token_id")] if config is not None else []
    listed = [number for value in named for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
    return tuple(dict.fromkeys(number for number in (*listed, vocab_size - 1) if 0 <= number < vocab_size))
