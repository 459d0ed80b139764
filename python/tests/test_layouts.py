"""Agreement of ranks on where each one's rows lie in the vocabulary: reasons to ask each other again, and reasons not to. This process is
one of two ranks, and speaks for the other one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flce
from flce.core._frame import Parallel
from flce.parallel import _layouts
from flce.parallel._layouts import Shard, _Facts, agreed_shard

LAYER = (("softcap", 0.0), ("dtype", "float32"))
TOKENS = (("target", ([4], "torch.int64", 7)), ("temperature", None))


def facts(*rows: int, starts: tuple[int, ...] = (), all_rows: int = -1) -> list[_Facts]:
    starts = starts or (-1,) * len(rows)
    return [_Facts(rank, of, start, all_rows, LAYER, TOKENS) for rank, (of, start) in enumerate(zip(rows, starts, strict=True))]


def shards(everyone: list[_Facts], vocab_size: int = -1) -> list[Shard]:
    return [agreed_shard(vocab_size, everyone, rank) for rank in range(len(everyone))]


def test_rows_follow_each_other_in_the_order_of_ranks() -> None:
    assert shards(facts(5, 3, 4)) == [Shard(0, 5, 5, 5, 5, 12), Shard(5, 3, 3, 5, 5, 12), Shard(8, 4, 4, 5, 5, 12)]
    assert shards(facts(5, 3, 4, all_rows=12), 12) == shards(facts(5, 3, 4))
    assert shards(facts(3, 5), 2) == [Shard(0, 3, 2, 2, 5, 2), Shard(3, 5, 0, 2, 5, 2)]
    assert [shard.classes for shard in shards(facts(5, 3, 4), 9)] == [5, 3, 1]
    assert [shard.classes for shard in shards(facts(5, 3, 4), 8)] == [5, 3, 0]
    assert [shard.classes for shard in shards(facts(0, 3), 3)] == [0, 3]


def test_rows_lie_where_vocab_start_says() -> None:
    assert [shard.vocab_start for shard in shards(facts(4, 5, 3, starts=(8, 0, 5)))] == [8, 0, 5]
    assert [shard.classes for shard in shards(facts(4, 5, 3, starts=(8, 0, 5)), 9)] == [1, 5, 3]
    assert [shard.vocab_start for shard in shards(facts(5, 0, 2, starts=(0, 5, 5)))] == [0, 5, 5]


@pytest.mark.parametrize(
    ("everyone", "vocab_size", "error", "says"),
    [
        (facts(5, 3, starts=(0, -1)), -1, flce.PlacementError, r"given on some ranks and None on others: \[0, None\]"),
        (facts(5, 3, starts=(-1, 5)), -1, flce.PlacementError, r"given on some ranks and None on others: \[None, 5\]"),
        (facts(5, 3, starts=(0, 6)), -1, flce.PlacementError, "leave a gap at label 5"),
        (facts(5, 3, starts=(0, 4)), -1, flce.PlacementError, "overlap at label 5"),
        (facts(5, 3, starts=(1, 6)), -1, flce.PlacementError, "leave a gap at label 0"),
        (facts(5, 3, all_rows=9), -1, flce.PlacementError, r"a DTensor of 9 rows on rank 0, .* have \[5, 3\]: 8 in all"),
        (facts(5, 3), 9, flce.ShapeError, "vocab_size is 9; all ranks' weights have 8 rows"),
        (facts(5, 3), 1, flce.ShapeError, "vocab_size is 1; .* must be from 2 to 8"),
        (facts(1, 0), -1, flce.ShapeError, "vocab_size is 1"),
    ],
)
def test_what_makes_no_vocabulary_is_refused_on_every_rank(
    everyone: list[_Facts], vocab_size: int, error: type[Exception], says: str
) -> None:
    for rank in range(len(everyone)):
        with pytest.raises(error, match=says):
            agreed_shard(vocab_size, everyone, rank)


def test_other_layers_and_other_tokens_are_refused_by_name() -> None:
    other = facts(5, 3, 4)
    other[2] = other[2]._replace(layer=(LAYER[0], ("dtype", "bfloat16")))
    with pytest.raises(flce.PlacementError, match=r"dtype differs between ranks .* 'float32' on rank 0, 'bfloat16' on 2"):
        agreed_shard(-1, other, 0)
    other = facts(5, 3, 4)
    other[1] = other[1]._replace(tokens=(("target", ([4], "torch.int64", 8)), TOKENS[1]))
    with pytest.raises(flce.PlacementError, match=r"target differs between ranks 0 and 1 .*\(\[4\] of torch.int64, with other numbers\)"):
        agreed_shard(-1, other, 0)
    other[1] = other[1]._replace(tokens=(TOKENS[0], ("temperature", ([4], "torch.float32", 0))))
    with pytest.raises(flce.PlacementError, match=r"temperature differs .*\(none, \[4\] of torch.float32\)"):
        agreed_shard(-1, other, 0)


def test_contents_tell_tokens_apart() -> None:
    contents = _layouts._contents
    base = torch.tensor([3, 1, 2])
    assert contents("target", base) == contents("target", base.clone()) == ([3], "torch.int64", 3 + 2 + 6)
    for other in (torch.tensor([1, 3, 2]), torch.tensor([3, 1, 1]), base.int(), base.reshape(1, 3), base.float()):
        assert contents("target", other) != contents("target", base)
    assert contents("temperature", torch.tensor([1.0, 1.5])) != contents("temperature", torch.tensor([1.0, 1.25]))
    assert contents("temperature", None) is None
    # Ranks compute these for themselves: only their shapes are compared.
    for name in ("token_weight", "teacher_probs"):
        assert contents(name, torch.tensor([1.0, 1.5])) == contents(name, torch.tensor([1.0, 1.25])) == ([2], "torch.float32", 0)


class Group:
    """Two ranks, of which this one is rank 0."""

    def __init__(self) -> None:
        self.told = self.asked = 0
        self.other_rows = 3
        self.other_knows: dict[int, int] = {}  # changes of the numbers that the other tells, by their place

    def rank(self) -> int:
        return 0

    def tell(self, group: Any, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        self.told += 1
        others = list(mine)
        others[4] = self.other_rows
        for place, change in self.other_knows.items():
            others[place] += change
        return [mine, tuple(others)]

    def ask(self, everyone: list[Any], mine: _Facts, group: Any) -> None:
        self.asked += 1
        self.said = dict(mine.layer)
        everyone[:] = [mine, mine._replace(rank=1, rows=self.other_rows)]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    two = Group()
    monkeypatch.setattr(Group, "current", two, raising=False)
    monkeypatch.setattr(_layouts, "told_by_hosts", two.tell)
    monkeypatch.setattr(_layouts.dist, "all_gather_object", two.ask, raising=False)
    yield two
    _layouts.forget()


def shard_of(rows: int, *, tokens: int = 4, layer: tuple[Any, ...] = LAYER, vocab_size: int = -1, backward: bool = False) -> Shard:
    parallel = Parallel(2, False, -1, vocab_size, -1, None, True, "two")
    given = torch.empty(rows, 8), {"target": torch.zeros(tokens, dtype=torch.int64)}, layer
    return _layouts.shard_of(Group.current, parallel, *given, backward=backward)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "parallel", [Parallel(2, False, -1, -1, -1, None, True, "0"), Parallel(8, True, 7, 63, 64, torch.float32, False, "a b")]
)
def test_texts_of_operators_say_all_of_a_parallel(parallel: Parallel) -> None:
    assert Parallel.of_text(parallel.text()) == parallel and Parallel.of_text("") is None


def test_a_layer_is_asked_for_once(group: Group) -> None:
    assert shard_of(5) == shard_of(5) == Shard(0, 5, 5, 5, 5, 8)
    assert (group.told, group.asked) == (2, 1)
    assert shard_of(6) == Shard(0, 6, 6, 6, 6, 9)  # here the weight is another
    group.other_rows = 4
    assert shard_of(6) == Shard(0, 6, 6, 6, 6, 10)  # there it is
    assert group.asked == 3
    assert shard_of(6, layer=(("softcap", 5.0),)) == Shard(0, 6, 6, 6, 6, 10)
    assert group.said["vocab_size"] is None
    assert shard_of(6, vocab_size=9) == Shard(0, 6, 6, 6, 6, 9)
    assert group.said["vocab_size"] == 9
    with pytest.raises(flce.ShapeError, match="vocab_size is 0"):
        shard_of(6, vocab_size=0)
    assert group.asked == 6
    group.other_rows = 3
    assert shard_of(5) == Shard(0, 5, 5, 5, 5, 8)
    assert group.asked == 6
    _layouts.forget()
    shard_of(5)
    assert group.asked == 7


@pytest.mark.parametrize("place", [0, 1, 2], ids=["another layer", "knows less", "other tokens"])
def test_where_the_other_rank_has_something_else_both_ask(group: Group, place: int) -> None:
    shard_of(5)
    group.other_knows = {place: -1}
    shard_of(5)
    assert group.asked == 2


def test_a_new_layer_is_refused_while_any_rank_captures(group: Group) -> None:
    group.other_knows = {3: 1}
    with pytest.raises(flce.UnavailableError, match="run the call once before the capture"):
        shard_of(5)
    assert group.asked == 0
    group.other_knows = {}
    shard_of(5)
    group.other_knows = {3: 1}
    assert shard_of(5) == Shard(0, 5, 5, 5, 5, 8)


def test_a_backward_asks_where_its_forward_may_have_been_one_of_several(group: Group) -> None:
    shard_of(5)
    assert shard_of(5, backward=True) == Shard(0, 5, 5, 5, 5, 8)
    assert group.told == 1
    shard_of(6)
    assert shard_of(5, backward=True) == Shard(0, 5, 5, 5, 5, 8)
    assert shard_of(6, backward=True) == Shard(0, 6, 6, 6, 6, 9)
    assert (group.told, group.asked) == (4, 2)
