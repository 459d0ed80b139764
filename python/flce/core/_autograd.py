"""Questions to torch's autograd engine: which gradients a run of it is for, how long a node lives, and who watches.

Schedules that split backward (zero bubble, ZBV, DualPipeV) run the loss's node twice, once for the stage's input and once for the weights,
and tell it nothing. The engine knows, and has no public name for it. All private names of torch that answers depend on stand here, and
test_engine.py pins what each of them has to do.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# Whether this run of the engine will execute a node; raises RuntimeError outside of backward, and for a leaf whose gradient
# autograd.grad() was asked for.
_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)
# The node that this thread's engine is running.
_running_node: Any = getattr(torch._C, "_current_autograd_node", None)

# Probes for observers of an operator before its kernel: dispatch modes, torch.jit.trace, transforms of torch.func. None: this torch does
# not say.
dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
tracing_state: Any = getattr(torch._C, "_get_tracing_state", lambda: None)
transforms: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
# Whether autocast is on for any kind of device; taken for on where this torch does not say.
any_autocast: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# Whether a node that was made in Python dies with the C++ graph above it, though its Python object is held: in torch before 2.13.
# stage_backward_input drops that graph and stage_backward_weight begins at the node.
LOSES_NODES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
UNKNOWN = (
    f"torch {torch.__version__} lacks torch._C._will_engine_execute_node, by which flce learns whether backward() or "
    "torch.autograd.grad() asks for the weight's gradient"
)
_PIPELINING = "torch.distributed.pipelining"


def is_eager() -> bool:
    """Whether a tensor's numbers may be looked at: nobody traces, watches or transforms the operators."""
    if torch.compiler.is_compiling() or transforms is None or dispatch_modes is None:
        return False
    return not dispatch_modes() and transforms() is None and tracing_state() is None


def knows_what_is_wanted() -> bool:
    """Whether the engine can be asked. If not, every backward computes all gradients, and none may be added to anything unasked."""
    return _will_run is not None


def wanted_gradients(ctx: Any, *, bias: bool = True) -> list[bool]:
    """Whether this run of the engine uses the gradients of hidden, weight, bias (if there is a `bias`) and class_offset. needs_input_grad
    says what forward's inputs required; a schedule that runs backward for activations first and for weights later asks for less each
    time."""
    wanted = list(ctx.needs_input_grad[:4])
    if _will_run is None or sum(wanted) < 2:
        return wanted
    # One edge a tensor input, in order: a missing bias has none, but is not wanted either.
    places = [i for i in range(4) if bias or i != 2]
    for i, (node, _) in zip(places, ctx.next_functions, strict=False):
        if wanted[i] and node is not None:
            try:
                wanted[i] = _will_run(node)
            except RuntimeError:
                pass  # the engine refuses to answer for a leaf that autograd.grad() was asked for
    return wanted


def is_asked_for_by_grad(node: Any) -> bool:
    """Whether autograd.grad() was asked for the gradient of the leaf at `node`, or of the leaf that the functions from `node` on take (a
    view's, say). Such a gradient is a result, and not to be added to anything. Schedules that split backward ask for weights' gradients in
    this way."""
    if _will_run is None:
        return False
    while node is not None and not hasattr(node, "variable"):
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    if node is None:
        return False
    try:
        _will_run(node)
    except RuntimeError:
        return True  # the engine refuses to answer for such a leaf alone
    return False


def keep_node(output: Tensor) -> Tensor:
    """`output` of a node made in Python, where this torch's split backward would lose that node: the same numbers from a C++ node, which
    owns it. The gradient that this C++ node hands on holds the C++ node in turn. A schedule keeps that gradient from the input's pass to
    the weights', and in any other backward it is gone at once."""
    # Compilers are asked for first: Dynamo guards the length of sys.modules where code looks into it, and each import compiles anew.
    if torch.compiler.is_compiling() or _PIPELINING not in sys.modules or _running_node is None or type(output) is not Tensor:
        return output
    owner = output.grad_fn
    if owner is None:
        return output
    kept = output * 1
    assert kept.grad_fn is not None
    kept.grad_fn.register_hook(_hold_running_node)
    return kept


def python_node(output: Tensor) -> Any:
    """The node made in Python that `output` comes from, as it is or through `keep_node`."""
    node: Any = output.grad_fn
    return node if node is None or isinstance(node, BackwardCFunction) else node.next_functions[0][0]


def _hold_running_node(grad_inputs: Any, grad_outputs: Any) -> None:
    gradient = grad_inputs[0]
    if gradient is not None:
        gradient._flce_node = _running_node()
