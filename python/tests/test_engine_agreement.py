"""Messages between a pipeline's ranks about a call, and each rank's conclusion. This process is one of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce
from flce.engine import _agreement
from flce.engine._agreement import Agreed, Agreement, Call, Stepping, checksum

IDS = torch.arange(6)
REFUSED = ("ArgumentError: a wrong argument", {}, Stepping())


def call(**changes: Any) -> Call:
    given: dict[str, Any] = {
        "kind": "train_batch",
        "num_micro_batches": 2,
        "lengths": (2, 4),
        "packed_input_ids": IDS,
        "keywords": {"positions": torch.zeros(6)},
        "stepping": Stepping(7, 1),
    }
    return Call(**(given | changes))


class Ranks:
    """An agreement of stage 0 with stages 1 and 2, and what the others tell; copies: what data-parallel ranks tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *others: Call | None, copies: tuple[Any, ...] = ()) -> None:
        self.agreement = Agreement.__new__(Agreement)
        vars(self.agreement).update(group="pipeline", ranks=[0, 1, 2], rank=0, stages=[(0,), (1,), (2, 3)], _store=None)
        told = [REFUSED if other is None else (None, other.facts(), other.stepping) for other in others]
        self.said: dict[Any, Any] = {}  # by this rank, to each group

        def gather(group: Any, own: Any) -> list[Any]:
            self.said[group] = own
            return [own, *(told if group == "pipeline" else copies)]

        monkeypatch.setattr(_agreement, "gather", gather)

    def refusal(self, mine: Call | None = None, copies: Any = None) -> str:
        def prepare() -> Call:
            if mine is None:
                raise flce.ArgumentError("a wrong argument")
            return mine

        try:
            self.agreement.check_called_alike(prepare, copies)
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
        ("the call and its options", {"kind": "eval_batch"}),
        ("the number of microbatches", {"num_micro_batches": 3}),
        ("the number of sequences", {"lengths": (1, 1, 4)}),
        ("cu_seqlens", {"lengths": (4, 2)}),
        ("packed_input_ids", {"packed_input_ids": IDS.flip(0)}),
        ("the keywords", {"keywords": {}}),
        ("the keywords", {"keywords": {"positions": torch.zeros(5)}}),
        ("the keywords", {"keywords": {"positions": torch.zeros(6, dtype=torch.int64)}}),
        ("normalize, max_grad_norm or nonfinite", {"stepping": Stepping(8, 1)}),
        ("normalize, max_grad_norm or nonfinite", {"stepping": Stepping()}),
    ],
)
def test_what_is_not_alike_is_named_with_both_stages(monkeypatch: pytest.MonkeyPatch, what: str, changes: dict[str, Any]) -> None:
    for others, names in (((call(**changes), call()), "stage 0 and stage 1 "), ((call(), call(**changes)), "stage 0 and stages 2 and 3 ")):
        refusal = Ranks(monkeypatch, *others).refusal(call())
        assert refusal.startswith(f"{names}were called with different arguments: ") and what in refusal


def test_a_rank_that_refuses_its_arguments_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch, call(), call()).refusal(None) == "a wrong argument"
    said = "refused what it was called with: ArgumentError: a wrong argument. Nothing was computed"
    assert Ranks(monkeypatch, None, call()).refusal(call()) == f"stage 1 {said}"
    assert Ranks(monkeypatch, call(), None).refusal(call()) == f"stages 2 and 3 {said}"


def test_settings_of_a_tied_weights_copies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for mine, other, differs in ((3, 3, False), (3, 4, True), (3, None, True), (None, None, False)):
        ranks = Ranks(monkeypatch, call(), call(stepping=Stepping(7, 1, other)))
        refusal = ranks.refusal(call(stepping=Stepping(7, 1, mine)))
        assert ("of stage 0 and of stage 3 differ in requires_grad or options of the optimizer" in refusal) == differs == bool(refusal)


def test_copies_of_a_pipeline_hear_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = (None, [1, 1, 1])
    assert Ranks(monkeypatch, call(), call(), copies=(alike,)).refusal(call(), "copies") == ""
    parted = Ranks(monkeypatch, call(), call(), copies=(alike, (None, [1, 1, 2]))).refusal(call(), "copies")
    assert "data-parallel copies are stepped otherwise" in parted
    refused = Ranks(monkeypatch, call(), call(), copies=(("no such label", [1, 1, 1]),)).refusal(call(), "copies")
    assert refused == "another data-parallel rank refused its batch: no such label. Nothing was computed"
    own = Ranks(monkeypatch, call(num_micro_batches=3), call(), copies=(alike,)).refusal(call(), "copies")
    assert "the number of microbatches" in own


def test_a_rank_tells_why_it_refuses_and_keeps_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline's ranks and its copies hear the reason; whatever copies say besides, it is this rank's error."""
    for other in ((None, [1, 1, 1]), ("no such label", [1, 1, 1]), (None, [1, 1, 2])):
        ranks = Ranks(monkeypatch, call(), call(), copies=(other,))
        assert ranks.refusal(None, "copies") == "a wrong argument"
        assert ranks.said["pipeline"] == (REFUSED[0], {}, Stepping(0, 0, None))
        assert ranks.said["copies"] == ("a wrong argument", [0, 1, 1])
    ranks = Ranks(monkeypatch, call(), call(), copies=((None, [1, 1, 1]),))
    ranks.refusal(call(), "copies")
    assert ranks.said["pipeline"][0] is None and ranks.said["copies"] == (None, [1, 1, 1])


def test_a_checksum_is_of_bits_and_their_places() -> None:
    base = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(base) == checksum(base.reshape(3, 1))
    for other in (base.flip(0), base + 1, base[:2], -base, torch.tensor([1.0, 2.0, 3.0 + 2.0**-22])):
        assert checksum(other) != checksum(base)
    for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.bool):
        assert checksum(torch.tensor([0, 1]).to(dtype)) != checksum(torch.tensor([1, 0]).to(dtype))
    assert checksum(torch.tensor([1], dtype=torch.int32)) == 1


def test_the_first_failure_is_what_ranks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch).agreement
    said = "stage 0 could not exchange data with another stage, which is gone or does not answer"
    error = ranks.reason(RuntimeError("Connection closed\nby peer"))  # without a store
    assert (error.stage, str(error)) == (None, f"{said} (seen by stage 0: Connection closed)")
    ranks._store = dist.HashStore()
    ranks.tell(1, "stage 1 failed: ValueError: no such layer")
    ranks.tell(2, "stage 2 failed")
    error = ranks.reason(RuntimeError("Connection closed"))
    assert (error.stage, str(error)) == (1, "stage 1 failed: ValueError: no such layer (seen by stage 0: Connection closed)")
    ranks._store = dist.HashStore()
    assert ranks.reason(RuntimeError("Connection closed")).stage is None
