"""Messages between a pipeline's ranks about a call, and each rank's conclusion. This process is one of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.engine import _agreement
from flce.engine._agreement import WHAT, Agreed, Agreement, Call, Stepping, checksum

CPU = torch.device("cpu")
IDS = torch.arange(6)


def call(**changes: Any) -> Call:
    given: dict[str, Any] = {
        "kind": "train_batch",
        "num_micro_batches": 2,
        "lengths": (2, 4),
        "packed_input_ids": IDS,
        "keywords": {"positions": torch.zeros(6)},
        "stepping": Stepping(7, 1, {}, {}),
    }
    return Call(**(given | changes))


def tied(what: int = 3, weight: Tensor | None = None, end: int = 0) -> Stepping:
    return Stepping(7, 1, {end: what}, {} if weight is None else {end: weight})


class Ranks:
    """An agreement of stage 0 with stages 1 and 2, and what the others tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *others: Call | None) -> None:
        self.agreement = Agreement.__new__(Agreement)
        vars(self.agreement).update(
            group=None, ranks=[0, 1, 2], rank=0, device=CPU, stages=[(0,), (1,), (2, 3)], ends=(0, 3), parted=False, _store=None, _calls=0
        )
        self.others = others
        monkeypatch.setattr(_agreement.dist, "all_gather", self.all_gather)

    def all_gather(self, rows: list[Tensor], row: Tensor, group: Any) -> None:
        for place, other in zip(rows, (row, *self.rows(row)), strict=True):
            place.copy_(other)

    def rows(self, row: Tensor) -> list[Tensor]:
        return [torch.zeros_like(row) if other is None else other.row(CPU, (0, 3)) for other in self.others]

    def refusal(self, mine: Call | None = None) -> str:
        def prepare() -> Call:
            if mine is None:
                raise flce.ArgumentError("a wrong argument")
            return mine

        try:
            self.agreement.check_called_alike(prepare, None)
        except Agreed as agreed:
            return str(agreed.error)
        return ""


def test_ranks_called_alike_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch, call(), call()).refusal(call()) == ""
    # Values of keywords may be each rank's own: their names and shapes are compared.
    assert Ranks(monkeypatch, call(keywords={"positions": torch.ones(6)}), call()).refusal(call()) == ""
    flag = {"use_cache": False}
    assert Ranks(monkeypatch, call(keywords=flag), call(keywords=flag)).refusal(call(keywords=flag)) == ""


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        (WHAT[0], {"kind": "eval_batch"}),
        (WHAT[1], {"num_micro_batches": 3}),
        (WHAT[2], {"lengths": (1, 1, 4)}),
        (WHAT[3], {"lengths": (4, 2)}),
        (WHAT[4], {"packed_input_ids": IDS.flip(0)}),
        (WHAT[5], {"keywords": {}}),
        (WHAT[5], {"keywords": {"positions": torch.zeros(5)}}),
        (WHAT[5], {"keywords": {"positions": torch.zeros(6, dtype=torch.int64)}}),
        (WHAT[6], {"stepping": Stepping(8, 1, {}, {})}),
        (WHAT[6], {"stepping": None}),
    ],
)
def test_what_is_not_alike_is_named_with_both_stages(monkeypatch: pytest.MonkeyPatch, what: str, changes: dict[str, Any]) -> None:
    for others, names in (((call(**changes), call()), "stage 0 and stage 1 "), ((call(), call(**changes)), "stage 0 and stages 2 and 3 ")):
        refusal = Ranks(monkeypatch, *others).refusal(call())
        assert refusal.startswith(f"{names}were called with different arguments: ") and what in refusal


def test_a_rank_that_refuses_its_arguments_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch, call(), call()).refusal(None) == "a wrong argument"
    assert Ranks(monkeypatch, None, call()).refusal(call()).startswith("stage 1 refused what it was called with")
    assert Ranks(monkeypatch, call(), None).refusal(call()).startswith("stages 2 and 3 refused what it was called with")


def test_copies_of_a_tied_weight_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.tensor([1.0, 2.0])
    for mine, other, says in (
        (tied(), tied(end=3), ""),
        (tied(4), tied(5, end=3), "differ in requires_grad or options of the optimizer"),
        (tied(), Stepping(7, 1, {}, {}), "differ in requires_grad or options of the optimizer"),
        (tied(weight=weight), tied(weight=weight.clone(), end=3), ""),
        (tied(weight=weight), tied(weight=weight.flip(0), end=3), "differ in values"),
        (tied(weight=weight), tied(end=3), ""),  # compared now and then: not in this call
    ):
        ranks = Ranks(monkeypatch, call(stepping=tied(end=1)), call(stepping=other))
        refusal = ranks.refusal(call(stepping=mine))
        assert says in refusal and bool(says) == bool(refusal), refusal
        assert ranks.agreement.parted == ("values" in says)


def test_a_checksum_is_of_bits_and_their_places() -> None:
    base = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(base) == checksum(base.reshape(3, 1))
    for other in (base.flip(0), base + 1, base[:2], -base, torch.tensor([1.0, 2.0, 3.0 + 2.0**-22])):
        assert checksum(other) != checksum(base)
    for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.bool):
        assert checksum(torch.tensor([0, 1]).to(dtype)) != checksum(torch.tensor([1, 0]).to(dtype))
    assert checksum(torch.tensor([1], dtype=torch.int32)) == 1


def test_a_refusal_is_told_to_the_other_ranks_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    refusing, other = Ranks(monkeypatch, call(), call()), Ranks(monkeypatch, None, call())
    for ranks in (refusing, other):
        ranks.agreement._store = store
    assert refusing.refusal() == "a wrong argument"
    assert store.get("refused 1").decode() == "0 ArgumentError: a wrong argument"
    assert "refused what it was called with: ArgumentError: a wrong argument. Nothing" in other.refusal(call())
    # A difference between the ranks of one pipeline is a refusal, too, for the copies of the pipeline.
    monkeypatch.setattr(_agreement.dist, "all_reduce", lambda *_, **__: None)
    differs = Ranks(monkeypatch, call(num_micro_batches=3), call())
    differs.agreement._store, differs.agreement._calls = store, 1
    with pytest.raises(Agreed, match="the number of microbatches"):
        differs.agreement.check_called_alike(call, CPU)  # type: ignore[arg-type]  # any group
    assert "the number of microbatches" in store.get("refused 2").decode()


def test_values_of_tied_weights_are_compared_where_both_stages_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, call(stepping=tied()), call(stepping=tied(weight=torch.ones(3), end=3)))
    assert ranks.refusal(call(stepping=tied())) == ""
    assert not ranks.agreement.parted


def test_an_agreement_begins_with_copies_that_are_alike() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        agreement = Agreement(dist.group.WORLD, CPU)
        assert (agreement.name, agreement.rank, agreement.parted, agreement.ends) == ("0", 0, False, (0, 0))
    finally:
        dist.destroy_process_group()
