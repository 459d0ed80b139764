"""How a packed batch is cut, how keywords are split with it, and what torch's names are that the engine relies on."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_support import ToyStage, batch_of
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

import flce
from flce.engine import PipelineEngine, _schedules, _transport
from flce.engine._agreement import checksum
from flce.engine._microbatches import cut, kinds_of, lengths_of, split

VERSION = f"torch {torch.__version__}"


def least_largest(lengths: list[int], count: int) -> int:
    """The least largest sum over all cuts into `count` runs."""
    inner = itertools.combinations(range(1, len(lengths)), count - 1)
    return min(max(sum(lengths[a:b]) for a, b in itertools.pairwise((0, *starts, len(lengths)))) for starts in inner)


def test_cuts_have_the_least_largest_microbatch() -> None:
    draw = random.Random(0)
    for _ in range(300):
        lengths = [draw.choice((1, 2, 3, 5, 8, 40)) for _ in range(draw.randint(1, 9))]
        for count in range(1, len(lengths) + 1):
            starts = cut(lengths, count)
            assert len(starts) == count + 1
            assert (starts[0], starts[-1]) == (0, len(lengths))
            assert all(a < b for a, b in itertools.pairwise(starts))  # in the batch's order, none empty
            assert max(sum(lengths[a:b]) for a, b in itertools.pairwise(starts)) == least_largest(lengths, count)


def test_a_sequence_longer_than_a_share_is_a_microbatch() -> None:
    assert cut([2, 3, 100, 1, 2, 3], 3) == (0, 2, 3, 6)
    assert cut([100, 1, 1], 2) == (0, 1, 3)


def test_a_thousand_sequences_are_cut_at_once() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(1, 4096) for _ in range(4096)]
    starts = cut(lengths, 64)
    assert max(sum(lengths[a:b]) for a, b in itertools.pairwise(starts)) < sum(lengths) / 64 + 4096


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_microbatches_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(flce.ArgumentError, match=r"num_micro_batches is .*; it must be an integer of 1 or more"):
        cut([1, 2], count)


def test_fewer_sequences_than_microbatches_are_refused_with_the_numbers() -> None:
    with pytest.raises(flce.ArgumentError, match=r"the batch has 3 sequences, which are fewer than its 4 microbatches"):
        cut([5, 5, 5], 4)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 3, 9], "from 0 to 9; it must go from 0 to packed_input_ids' 10 tokens"),
        ([1, 3, 10], "from 1 to 10"),
        ([10], "1 elements"),
        ([0, 6, 3, 10], "sequence 1 -3 tokens"),
        ([0, 3, 3, 10], "sequence 1 0 tokens; every sequence must have one or more"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(cu_seqlens: list[int], message: str) -> None:
    with pytest.raises(flce.ArgumentError, match=message):
        lengths_of(torch.zeros(10, dtype=torch.int64), torch.tensor(cu_seqlens))


def test_ids_and_bounds_of_other_types_are_refused() -> None:
    ids, cu_seqlens = batch_of(0, [2, 3])
    with pytest.raises(flce.DTypeError, match=r"packed_input_ids has dtype torch\.float32"):
        lengths_of(ids.float(), cu_seqlens)
    with pytest.raises(flce.DTypeError, match="cu_seqlens is a list"):
        lengths_of(ids, cu_seqlens.tolist())
    with pytest.raises(flce.ShapeError, match=r"packed_input_ids has shape \[1, 5\]"):
        lengths_of(ids[None], cu_seqlens)


def test_keywords_are_split_with_their_sequences() -> None:
    lengths = [3, 1, 4, 2]
    ids, _ = batch_of(0, lengths)
    given = {
        "token": torch.arange(10.0),
        "wide": torch.arange(20).view(10, 2),
        "target": torch.tensor([0, 1, 20, 21, 22, 30]),  # sequence · 10 + place
        "sequence": torch.arange(4),
        "number": 0.5,
        "scalar": torch.tensor(7.0),
        "words": ["a", "b"],
    }
    kinds = kinds_of(given, lengths, {})
    first, second = split(ids.int(), lengths, (0, 2, 4), torch.device("cpu"), given, kinds)
    assert first.input_ids.dtype == torch.int64
    assert torch.equal(torch.cat([first.input_ids, second.input_ids]), ids)
    assert first.batch.cu_seqlens.tolist() == [0, 3, 4]
    assert second.batch.cu_seqlens.tolist() == [0, 4, 6]
    assert second.batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert first.kwargs["token"].tolist() == [0, 1, 2, 3]
    assert second.kwargs["wide"].tolist() == given["wide"][4:].tolist()  # type: ignore[index]
    assert first.kwargs["target"].tolist() == [0, 1]
    assert second.kwargs["target"].tolist() == [20, 21, 22, 30]
    assert second.kwargs["sequence"].tolist() == [2, 3]
    for one in (first, second):
        assert (one.kwargs["number"], one.kwargs["words"], float(one.kwargs["scalar"])) == (0.5, ["a", "b"], 7.0)
    assert str(second) == "microbatch 1 (sequences 2 to 3)"


def test_keywords_whose_kind_is_not_clear_have_to_be_named() -> None:
    lengths = [2, 2, 2]  # three sequences, three targets
    kind_of = lambda value, **rows: kinds_of({"x": value}, lengths, rows)["x"]  # noqa: E731
    with pytest.raises(flce.ArgumentError, match=r"x has shape \[3\], .* fits target \(3\) and sequence \(3\) alike: say what"):
        kind_of(torch.zeros(3))
    assert kind_of(torch.zeros(3), x="target") == "target"
    assert kind_of(torch.zeros(3), x="sequence") == "sequence"
    with pytest.raises(flce.ArgumentError, match=r"x has shape \[5\], .* is none of token \(6\) and target \(3\)"):
        kind_of(torch.zeros(5))
    assert kind_of(torch.zeros(5), x="none") == "none"
    with pytest.raises(flce.ShapeError, match=r"x has shape \[3\]; with rows\['x'\] 'token' its first dimension must be 6"):
        kind_of(torch.zeros(3), x="token")
    with pytest.raises(flce.ShapeError, match="no tensor but a float"):
        kind_of(0.5, x="token")
    with pytest.raises(flce.ArgumentError, match=r"rows\['x'\] is 'tokens'; allowed are 'token', 'target', 'sequence', 'none'"):
        kind_of(torch.zeros(6), x="tokens")
    with pytest.raises(flce.ArgumentError, match="rows names 'y', and no such keyword is given"):
        kind_of(torch.zeros(6), y="token")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_checksum_sees_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    values = (torch.arange(1, 2001, dtype=torch.float32) / 7).to(dtype)
    if dtype == torch.bool:
        values[1::2] = False
    changed, swapped = values.clone(), values.clone()
    changed.view(torch.uint8)[1999] ^= 1
    swapped[[3, 1000]] = values[[1000, 3]]
    assert int(checksum(values)) == int(checksum(values.clone()))
    assert int(checksum(values)) != int(checksum(changed))
    assert int(checksum(values)) != int(checksum(swapped))


@pytest.mark.parametrize("schedule", _schedules.SCHEDULES)
def test_where_stages_lie_in_each_schedule(schedule: str) -> None:
    single = schedule in _schedules.SINGLE
    count = 4 if single else 8
    lie = [_schedules.stages_of(schedule, rank, 4, count) for rank in range(4)]
    assert sorted(itertools.chain(*lie)) == list(range(count))
    assert (lie[0][0], lie[3][-1]) == (0, count - 1)
    for rank, stages in enumerate(lie):
        _schedules.check_placement(schedule, stages, count, rank, 4)
    for stages, number, rank, ranks in ((lie[1], count, 0, 4), (lie[0], count + 1, 0, 4), ((0,) if not single else (0, 1), 2, 0, 1)):
        with pytest.raises(
            flce.ArgumentError, match=f"schedule '{schedule}' takes {'one stage' if single else 'two or more stages'} a rank"
        ):
            _schedules.check_placement(schedule, stages, number, rank, ranks)
    with pytest.raises(flce.ArgumentError, match=r"stage: rank 0 of 1 was given stages \[0, 1\] of 2"):
        _schedules.check_placement(schedule, (0, 1), 2, 0, 1)  # two stages of one rank would send to themselves


def test_names_of_torch_that_the_engine_relies_on_are_there() -> None:
    """Names that are public for overriding alone: engine/_transport.py and engine/_agreement.py say why."""
    gone = f"{VERSION}: engine/_transport.py relies on it"
    for name in (
        "get_fwd_recv_ops",
        "get_bwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_send_ops",
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
    ):
        assert callable(getattr(PipelineStage, name)), f"{gone}: {name}"
    first = next(iter(list(inspect.signature(_PipelineStageBase.forward_one_chunk).parameters)[1:]))
    assert first == "fwd_chunk_id", gone
    made = inspect.getsource(_PipelineStageBase.__init__)
    for name in ("args_recv_info", "grad_recv_info", _transport._STATES, "bwd_cache", "stage_index_to_group_rank", "group_rank"):
        assert f"self.{name}" in made, f"{gone}: {name}"
    assert "self.buffer" in inspect.getsource(_RecvInfo), gone
    assert "return_outputs" in inspect.signature(schedules.Schedule1F1B.step).parameters, gone
    assert callable(distributed_c10d._get_default_store), f"{VERSION}: engine/_agreement.py relies on it"


def test_a_torch_that_nothing_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(_transport, "_STATES", "_renamed")
        ids, cu_seqlens = batch_of(0, [3, 4])
        engine = PipelineEngine(ToyStage(0, 1))
        said = f"torch {re.escape(torch.__version__)} has a torch.distributed.pipelining that .* does not know.*its stages have no _renamed"
        with pytest.raises(flce.UnavailableError, match=said):
            engine.forward(ids, cu_seqlens)
        monkeypatch.undo()
        assert engine.forward(ids, cu_seqlens) is not None
    finally:
        dist.destroy_process_group()


def test_a_shape_check_of_torch_that_is_not_replaced_is_seen() -> None:
    """Lists the checks that this torch has: a new one would refuse microbatches of different sizes."""
    known = {"_validate_fwd_input", "_validate_fwd_outputs", "_validate_stage_tensors", "_validate_inferred_metadata"}
    found = {name for name in dir(PipelineStage) if name.startswith("_validate")}
    assert found <= known, f"{VERSION}: see EngineStage of engine/_transport.py about {sorted(found - known)}"
