"""One rank of a tensor-parallel group, under torchrun, whose ranks do not make the same call, or make one that is refused. Exits with a
failed assertion, or 0; rank 0 prints how many cases passed.

With an argument it is the name of a case that ends the group: `ranks_die` or `a_group_made_again`.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_support import run_main
from tensor_parallel_support import TOKENS, VOCAB, Layer, leaf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flce
from flce.call import _call
from flce.parallel import _layouts

TIMEOUT_S = 4.0


def said_by_all(text: str) -> list[str]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return [str(one) for one in everyone]


def usual(layer: Layer) -> dict[str, Any]:
    return {"hidden": layer.hidden, "weight": layer.mine(layer.weight), "target": layer.target, "process_group": layer.group}


def refused_by_all(given: dict[str, Any], kind: type[Exception], *parts: str, function: Callable[..., Any] | None = None) -> None:
    """Every rank makes its call and gets the same error of flce's, which none has where it waits for others; the group is as good as
    before."""
    try:
        (function or flce.linear_cross_entropy)(**given)
    except kind as error:
        message = f"{type(error).__name__}: {error}"
    except Exception as error:
        message = f"{type(error).__name__} in place of {kind.__name__}: {error}"
    else:
        message = "nothing was raised"
    everyone = said_by_all(message)
    assert len(set(everyone)) == 1, everyone
    assert message.startswith(f"{kind.__name__}: "), message
    for part in parts:
        assert part in message, (part, message)


def the_group_still_works() -> None:
    """Refusals have left nothing behind."""
    layer = Layer()
    hidden, weight = leaf(layer.hidden), leaf(layer.mine(layer.weight))
    loss = flce.linear_cross_entropy(hidden, weight, layer.target, process_group=layer.group)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    expected = flce.linear_cross_entropy(layer.hidden, layer.weight, layer.target)
    torch.testing.assert_close(loss.detach(), expected)


# ── What differs between ranks ──────────────────────


def differing(name: str, *, later: bool = False) -> None:
    """Rank 1's call differs from the others' in what `name` says. `later`: after one that did not."""
    layer, odd = Layer(), dist.get_rank() == 1
    given = usual(layer)
    if later:
        flce.linear_cross_entropy(**given)
    by_token = torch.ones(TOKENS)
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "labels": ({"target": layer.target.flip(0)}, "target differs"),
        "fewer tokens": ({"hidden": layer.hidden[:40], "target": layer.target[:40]}, "target differs"),
        "label dtype": ({"target": layer.target.int()}, "target differs"),
        "hidden size": ({"hidden": layer.hidden[:, :32], "weight": given["weight"][:, :32]}, "hidden_size differs"),
        "dtype": ({"hidden": layer.hidden.bfloat16(), "weight": given["weight"].bfloat16()}, "hidden's dtype differs"),
        "reduction": ({"reduction": "sum"}, "reduction differs between ranks of the process group: 'mean' on rank 0, 'sum' on 1"),
        "options": ({"softcap": 4.0}, "the options differ"),
        "fp8": ({"fp8": flce.Fp8()}, "the options differ"),
        "outputs": ({"return_entropy": True}, "the options differ"),
        "ignore_index": ({"ignore_index": -1}, "ignore_index differs"),
        "bias": ({"bias": torch.zeros(given["weight"].shape[0])}, "whether bias is given differs"),
        "temperature": ({"temperature": 2.0}, "whether temperature is given differs"),
        "token_weight": ({"token_weight": by_token}, "whether token_weight is given differs"),
        "num_valid_tokens": ({"num_valid_tokens": 7}, "whether num_valid is given differs"),
        "reduce_dtype": ({"reduce_dtype": torch.float32}, "reduce_dtype differs"),
        "vocab_size": ({"vocab_size": 90}, "vocab_size differs between ranks of the process group: None on rank 0, 90 on 1"),
        "vocab_start": ({"vocab_start": 60}, "vocab_start is given on some ranks and None on others: [None, 60"),
        "sequence": ({"sequence_parallel": True, "hidden": layer.my_tokens(layer.hidden)}, "sequence_parallel differs"),
    }
    change, message = changes[name]
    refused_by_all({**given, **(change if odd else {})}, flce.PlacementError, message)


DIFFERING = (
    *("labels", "fewer tokens", "label dtype", "hidden size", "dtype", "reduction", "options", "fp8", "outputs", "ignore_index", "bias"),
    *("temperature", "token_weight", "num_valid_tokens", "reduce_dtype", "vocab_size", "vocab_start", "sequence"),
)


LATER = ("fewer tokens", "hidden size", "dtype", "options", "bias", "vocab_size", "vocab_start", "sequence")


def differing_later(name: str) -> None:
    differing(name, later=True)


def differing_numbers(name: str) -> None:
    """Given on every rank, with other numbers on rank 1."""
    layer, odd = Layer(), dist.get_rank() == 1
    numbers: dict[str, Any] = {"temperature": 0.25, "num_valid_tokens": 7}
    value = numbers[name] * (2 if odd else 1)
    refused_by_all({**usual(layer), name: value}, flce.PlacementError, "differs between ranks 0 and 1", "the same tokens")


def teachers(what: str) -> None:
    layer, odd = Layer(), dist.get_rank() == 1
    given = usual(layer)
    del given["target"]
    given |= {"teacher_ids": layer.teacher_ids, "teacher_probs": layer.teacher_probs}
    if odd and what == "ids":
        given["teacher_ids"] = layer.teacher_ids.flip(0)
    if odd and what == "top_k":
        given |= {"teacher_ids": layer.teacher_ids[:, :3], "teacher_probs": layer.teacher_probs[:, :3]}
    message = {"ids": "teacher_ids differs", "top_k": "the options differ"}[what]
    refused_by_all(given, flce.PlacementError, message, function=flce.linear_topk_distillation)


# ── Where rows begin and end ────────────────────────


def starts(change: int, message: str) -> None:
    layer = Layer()
    start = layer.begin + change * dist.get_rank()
    refused_by_all({**usual(layer), "vocab_start": start}, flce.PlacementError, "vocab_start is [0, ", f"they {message} at label 60")


def sizes(vocab_size: int) -> None:
    refused_by_all({**usual(Layer()), "vocab_size": vocab_size}, flce.ShapeError, f"vocab_size is {vocab_size}", f"from 2 to {VOCAB}")


# ── Arguments ───────────────────────────────────────

BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"process_group": 3}, flce.ArgumentError, "process_group is a int"),
    ({"process_group": "tp"}, flce.ArgumentError, "process_group is a str"),
    ({"process_group": [0, 1]}, flce.ArgumentError, "process_group is a list"),
    ({"process_group": None, "sequence_parallel": True}, flce.ArgumentError, "sequence_parallel is given and process_group is None"),
    ({"process_group": None, "vocab_start": 0}, flce.ArgumentError, "vocab_start is given and process_group is None"),
    ({"process_group": None, "vocab_size": 9}, flce.ArgumentError, "vocab_size is given and process_group is None"),
    ({"process_group": None, "reduce_dtype": torch.float32}, flce.ArgumentError, "reduce_dtype is given and process_group is None"),
    ({"sequence_parallel": 1}, flce.DTypeError, "sequence_parallel is 1"),
    ({"sequence_parallel": None}, flce.DTypeError, "sequence_parallel is None"),
    ({"vocab_start": -1}, flce.ArgumentError, "vocab_start is -1"),
    ({"vocab_start": 2.0}, flce.ArgumentError, "vocab_start is 2.0"),
    ({"vocab_start": True}, flce.ArgumentError, "vocab_start is True"),
    ({"vocab_size": "all"}, flce.ArgumentError, "vocab_size is 'all'"),
    ({"vocab_size": -5}, flce.ArgumentError, "vocab_size is -5"),
    ({"vocab_size": 1 << 70}, flce.ShapeError, f"vocab_size is {1 << 70}"),
    ({"reduce_dtype": "fp32"}, flce.DTypeError, "reduce_dtype is 'fp32'"),
    ({"reduce_dtype": []}, flce.DTypeError, "reduce_dtype is []"),
    ({"reduce_dtype": torch.float64}, flce.DTypeError, "reduce_dtype is torch.float64"),
    ({"reduce_dtype": torch.bfloat16}, flce.DTypeError, "reduce_dtype is torch.bfloat16; with hidden in torch.float32"),
]


def bad_argument(number: int) -> None:
    change, kind, message = BAD_ARGUMENTS[number]
    refused_by_all({**usual(Layer()), **change}, kind, message)


def tokens_that_do_not_divide() -> None:
    layer = Layer()
    target = layer.target[: TOKENS - 1]
    for tokens in (TOKENS // 2, TOKENS // 2 - 1):
        given = {**usual(layer), "hidden": layer.hidden[:tokens], "target": target, "sequence_parallel": True}
        refused_by_all(given, flce.ShapeError, f"target has shape [{TOKENS - 1}]", f"it must be [{tokens * dist.get_world_size()}]")
    given = {**usual(layer), "hidden": layer.hidden[0], "target": layer.target[0], "sequence_parallel": True}
    refused_by_all(given, flce.ShapeError, f"hidden has shape [{layer.hidden.shape[1]}]", "at least one dimension of tokens")


# ── Groups ──────────────────────────────────────────


def group_of_others() -> None:
    """A group that rank 0 is not in, as new_group and as a mesh give it: each of its other ranks goes on without rank 0."""
    layer, ranks = Layer(), dist.get_world_size()
    others = list(range(1, ranks))
    group, mesh = dist.new_group(others), DeviceMesh("cpu", others)
    for given, kind, message in ((group, flce.ArgumentError, "that this rank is in"), (mesh, flce.PlacementError, "this rank is not")):
        try:
            loss = flce.linear_cross_entropy(layer.hidden, layer.weight[:100], layer.target.clamp(max=99), process_group=given)
        except kind as error:
            assert dist.get_rank() == 0 and message in str(error) and "process_group" in str(error), error
        else:
            assert dist.get_rank() > 0 and bool(loss.isfinite())


def mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    refused_by_all({**usual(Layer()), "process_group": mesh}, flce.PlacementError, "['dp', 'tp']", "mesh['tp']")
    loss = flce.linear_cross_entropy(**{**usual(Layer()), "process_group": mesh["tp"]})
    assert bool(loss.isfinite())


def destroyed_group(used: bool) -> None:
    layer = Layer()
    group = dist.new_group(list(range(dist.get_world_size())))
    hidden = leaf(layer.hidden)
    given = {**usual(layer), "hidden": hidden, "process_group": group}
    loss = flce.linear_cross_entropy(**given) if used else None
    dist.destroy_process_group(group)
    refused_by_all(given, flce.PlacementError, "process_group", "is gone, or this process is not in it")
    if loss is not None:
        refused_by_all({}, flce.PlacementError, "is gone", function=loss.backward)


# ── What ends a group ───────────────────────────────


def raised_by(call: Callable[[], Any]) -> str:
    """The error of a call whose peer does not make it: torch's, after the group's timeout. A call that hangs ends with the launcher's."""
    try:
        call()
    except RuntimeError as error:
        assert not isinstance(error, flce.FlceError), error
        return str(error)
    raise AssertionError("a call returned that one rank did not make")


def a_rank_raises(agreed: bool) -> None:
    """Rank 1's own arguments do not fit each other. It raises before its call, and lives on longer than the others wait."""
    layer = Layer()
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    given = {**usual(layer), "process_group": group}
    if agreed:
        flce.linear_cross_entropy(**given)
    if dist.get_rank() == 1:
        try:
            flce.linear_cross_entropy(**{**given, "weight": given["weight"][:, :32]})
        except flce.ShapeError as error:
            assert "weight's hidden_size, 32" in str(error)
        else:
            raise AssertionError("a weight of too few columns was not refused")
    else:
        raised_by(lambda: flce.linear_cross_entropy(**given))
    dist.barrier()


def ranks_die() -> None:
    """Rank 2 before a forward, rank 1 before a backward."""
    layer, rank = Layer(), dist.get_rank()
    pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT_S))
    flce.linear_cross_entropy(**usual(layer))
    if rank == 2:
        os._exit(0)
    raised_by(lambda: flce.linear_cross_entropy(**usual(layer)))
    hidden, weight = leaf(layer.hidden), leaf(layer.weight[100 * rank : 100 * rank + 100])
    loss = flce.linear_cross_entropy(hidden, weight, layer.target.clamp(max=199), process_group=pair)
    if rank == 1:
        os._exit(0)
    raised_by(loss.backward)


def a_group_made_again() -> None:
    """A group under the first one's name, with other rows on rank 0: rank 1's call looks as it did, and its rows begin elsewhere."""
    layer, rank, ranks = Layer(), dist.get_rank(), dist.get_world_size()
    names = []
    for rows in (60, 90):
        # Each group has a store of its own: in the first one's ranks would find each other where they were.
        dist.destroy_process_group()
        place = os.path.join(tempfile.gettempdir(), f"flce-{os.environ['TORCHELASTIC_RUN_ID']}-{rows}")
        store = dist.FileStore(place, ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120))
        names.append(dist.group.WORLD.group_name)
        begin, end = (0, rows) if rank == 0 else (rows, rows + 100)
        whole = leaf(layer.weight[: rows + 100])
        mine = leaf(layer.weight[begin:end])
        target = layer.target % (rows + 100)
        for _ in range(3):  # direct calls from the second on
            loss = flce.linear_cross_entropy(layer.hidden, mine, target, process_group=dist.group.WORLD)
        loss.backward()
        expected = flce.linear_cross_entropy(layer.hidden, whole, target)
        expected.backward()
        assert torch.allclose(loss, expected, rtol=1e-5), (float(loss), float(expected))
        assert mine.grad is not None and whole.grad is not None
        assert torch.allclose(mine.grad, whole.grad[begin:end], atol=1e-6)
        dist.barrier()
        if rank == 0:
            os.remove(place)
    assert names[0] == names[1], names


ENDS: dict[str, Callable[[], None]] = {function.__name__: function for function in (ranks_die, a_group_made_again)}

CASES: list[tuple[Any, ...]] = [
    *((differing, name) for name in DIFFERING),
    *((differing_later, name) for name in LATER),
    *((differing_numbers, name) for name in ("temperature", "num_valid_tokens")),
    *((teachers, what) for what in ("ids", "top_k")),
    (starts, -1, "overlap"),
    (starts, 1, "leave a gap"),
    *((sizes, vocab_size) for vocab_size in (VOCAB + 1, 1 << 40, 0, 1)),
    *((bad_argument, number) for number in range(len(BAD_ARGUMENTS))),
    (tokens_that_do_not_divide,),
    (group_of_others,),
    (mesh_of_two_dimensions,),
    *((destroyed_group, used) for used in (False, True)),
    *((a_rank_raises, agreed) for agreed in (False, True)),
]


def run(function: Callable[..., None], *arguments: Any) -> None:
    _layouts.forget()  # makes this call the first of its kind on every rank
    _call.forget()
    try:
        function(*arguments)
        the_group_still_works()
    except BaseException:
        print(f"failed: {function.__name__}{arguments}", flush=True)
        raise


def end(name: str) -> None:
    # A busy machine may take its time. The longer one is for what nobody waits for in vain.
    timeout = 120 if name == "a_group_made_again" else 3 * TIMEOUT_S
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    torch.set_num_threads(1)
    ENDS[name]()
    print(f"rank {dist.get_rank()} went on", flush=True)
    os._exit(0)  # the rest of the group is not waited for


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ENDS:
        end(sys.argv[1])
    run_main(run, lambda: CASES)
