"""Contrastive losses: `flce.info_nce` against whole scores in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_support import cases_passed
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce

N, D = 37, 24
LIMITED = {"workspace_limit_bytes": 1 << 20}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative to gradients' largest value
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "more documents": {"extra": 12, "scale": 20.0},
    "learned scale": {"extra": 5, "scale": "tensor"},
    "positives": {"positives": True, "scale": 5.0},
    "shared positives": {"positives": "shared", "scale": "tensor", "symmetric": True},
    "drawn": {"extra": 30, "drawn": True, "scale": 7.0},
    "drawn and learned": {"extra": 3, "drawn": True, "scale": "tensor", "symmetric": True},
    "both ways": {"symmetric": True, "scale": 30.0},
    "other depth": {"depth": 13, "drawn": True, "symmetric": True},
    "blocks": {"extra": 12, "scale": "tensor", "drawn": True, "per_block": 7},
    "blocks of one": {"scale": "tensor", "positives": "shared", "symmetric": True, "per_block": 1},
    "negatives": {"extra": 12, "scale": 9.0, "negatives": 5},
    "drawn negatives": {"extra": 8, "scale": "tensor", "drawn": True, "positives": "shared", "negatives": 40, "depth": 13},
    "masked": {"extra": 12, "scale": 9.0, "groups": 5},
    "masked both ways": {"scale": "tensor", "positives": "shared", "symmetric": True, "groups": 9},
    "masked blocks": {"scale": 5.0, "extra": 12, "drawn": True, "per_block": 7, "groups": 3},
    "masked blocks of one": {"scale": "tensor", "symmetric": True, "per_block": 1, "groups": 4},
    "masked negatives": {"extra": 12, "scale": 9.0, "positives": True, "negatives": 12, "groups": 4},
    "one block": {"scale": 30.0, "positives": True, "depth": 13, "per_block": N},
}


def masks(
    queries: int, documents: int, groups: int, positives: Tensor | None, generator: torch.Generator, device: str
) -> tuple[Tensor, Tensor]:
    """Numbers of so many groups, far apart, some below 0; every other query has its positive's."""
    of_queries, of_documents = (torch.randint(-2, groups, (count,), generator=generator) for count in (queries, documents))
    own = torch.arange(queries) if positives is None else positives.cpu().clamp(min=0)
    of_queries[::2] = of_documents[own[::2]]
    far = [torch.where(each < 0, each, each << 55) for each in (of_queries, of_documents)]
    return far[0].to(device), far[1].to(device)


def ruled_out(of_rows: Tensor, of_classes: Tensor, positives: Tensor) -> Tensor:
    """The pairs of a mask, as a matrix."""
    same = (of_rows[:, None] == of_classes) & (of_rows[:, None] >= 0)
    return same.scatter(1, positives.clamp(min=0)[:, None].to(same.device), False)


class Problem:
    """Normalised embeddings and the options of a form; `scale` of one element where it is learned."""

    def __init__(self, device: str, dtype: torch.dtype, extra: int = 0, depth: int = D, **form: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.queries = F.normalize(torch.randn(N, depth, generator=generator), dim=1).to(device, dtype).requires_grad_()
        documents = torch.randn(N + extra, depth, generator=generator)
        self.documents = F.normalize(documents, dim=1).to(device, dtype).requires_grad_()
        self.options: dict[str, Any] = {"symmetric": form.get("symmetric", False)}
        if "per_block" in form:
            self.options["documents_per_block"] = form["per_block"]
        self.scale = form.get("scale", 1.0)
        if self.scale == "tensor":
            self.scale = torch.tensor([14.3], device=device, requires_grad=True)
        if form.get("positives"):
            positives = torch.randperm(N, generator=generator)
            positives = positives // 2 if form["positives"] == "shared" else positives
            positives[::5] = -100
            self.options["positives"] = positives.to(device)
        if "negatives" in form:  # some of them none, some the positive, some twice
            negatives = torch.randint(0, N + extra, (N, form["negatives"]), generator=generator)
            negatives[::3, 1] = -1
            negatives[1::4, 2] = negatives[1::4, 0]
            negatives[:, 3] = self.options.get("positives", torch.arange(N)).cpu().clamp(min=-1)
            self.options["negatives"] = negatives.to(device)
        if "groups" in form:
            self.options["mask"] = masks(N, N + extra, form["groups"], self.options.get("positives"), generator, device)
        if form.get("drawn"):
            self.options["negative_log_q"] = -torch.log(torch.rand(N + extra, generator=generator) * 1e-3).to(device)

    def inputs(self) -> list[Tensor]:
        return [self.queries, self.documents, *([self.scale] if isinstance(self.scale, Tensor) else [])]

    def loss(self, **more: Any) -> Tensor:
        return flce.info_nce(self.queries, self.documents, scale=self.scale, **self.options, **more)

    def right(self, reduction: str) -> tuple[Tensor, list[Tensor]]:
        """The loss and gradients of whole scores in fp64, for `losses` that are multiplied by 1, 2, … where there is no reduction."""
        inputs = [tensor.detach().double().requires_grad_() for tensor in self.inputs()]
        queries, documents, scale = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else self.scale
        positives = self.options.get("positives", torch.arange(N, device=queries.device))
        scores = scale * queries @ documents.T
        scores = scores + self.options.get("negative_log_q", torch.zeros(1)).to(scores)
        of_queries, of_documents = self.options.get("mask", (-torch.ones(N), -torch.ones(documents.shape[0])))
        scores = scores.masked_fill(ruled_out(of_queries, of_documents, positives).to(scores.device), -torch.inf)
        if "negatives" in self.options:
            positive, negatives = positives.clamp(min=0)[:, None], self.options["negatives"]
            others = torch.where((negatives >= 0) & (negatives != positive), scores.gather(1, negatives.clamp(min=0)), -torch.inf)
            named = torch.cat([scores.gather(1, positive), others], 1)
            losses = torch.where(positives >= 0, -named.log_softmax(1)[:, 0], 0.0)
        else:
            losses = F.cross_entropy(scores, positives, reduction="none")
        if self.options["symmetric"]:
            rows = torch.where(positives >= 0, torch.arange(N, device=queries.device), -100)
            own = positives.clamp(min=0).to(of_documents.device)
            others = ruled_out(of_documents[own], of_queries, rows).to(scores.device)
            back = (scale * documents[positives.clamp(min=0)] @ queries.T).masked_fill(others, -torch.inf)
            back = F.cross_entropy(back, rows, reduction="none")
            losses = (losses + back) / 2
        count = (positives >= 0).sum()
        loss = losses if reduction == "none" else losses.sum() / (count if reduction == "mean" else 1)
        return loss.detach(), list(torch.autograd.grad(weighted(loss), inputs))


def weighted(loss: Tensor) -> Tensor:
    return loss if loss.dim() == 0 else (loss * torch.arange(1, loss.shape[0] + 1, device=loss.device)).sum()


def close(got: Tensor, right: Tensor, tolerance: float) -> None:
    assert (got.double() - right).abs().max() <= tolerance * max(right.abs().max().item(), 1e-2)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.pairwise
def test_equals_whole_scores(device: str, dtype: torch.dtype, form: str, reduction: str) -> None:
    problem = Problem(device, dtype, **FORMS[form])
    right, gradients = problem.right(reduction)
    loss = problem.loss(reduction=reduction)
    assert loss.dtype == torch.float32 and loss.shape == right.shape
    close(loss, right, 2e-6)
    got = torch.autograd.grad(weighted(loss), problem.inputs())
    for one, other, tensor in zip(got, gradients, problem.inputs(), strict=True):
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        close(one, other, TOLERANCES[dtype] if tensor.dim() > 1 else max(2e-5, TOLERANCES[dtype] / 4))


def test_negatives_at_fault_are_none_and_reported(device: str) -> None:
    problem = Problem(device, torch.float32)
    negatives = torch.tensor([[1, 2, 3]], device=device).repeat(N, 1)
    right = problem.loss(negatives=negatives[:, 1:], reduction="none")
    for fault in (-2, N):
        negatives[5, 0] = fault
        negatives[6, 0] = -1
        assert torch.equal(problem.loss(negatives=negatives, reduction="none")[5:7], right[5:7])
        with pytest.raises(flce.LabelError) as error:
            flce.check_labels()
        assert error.value.row == 5


def test_a_positive_at_fault_is_reported_beside_negatives(device: str) -> None:
    problem = Problem(device, torch.float32)
    negatives = torch.tensor([[1, 2, 3]], device=device).repeat(N, 1)
    for fault in (-1, -7, N):
        positives = torch.arange(N, device=device)
        positives[5] = fault
        problem.options["positives"] = positives
        assert problem.loss(negatives=negatives).isfinite()
        with pytest.raises(flce.LabelError) as error:
            flce.check_labels()
        assert error.value.row == 5


@pytest.mark.parametrize("named", [False, True])
def test_a_query_that_does_not_count_may_hold_anything(device: str, named: bool) -> None:
    problem = Problem(device, torch.float32, scale="tensor")
    positives = torch.arange(N, device=device)
    positives[1] = -100
    more = {"negatives": torch.tensor([[1, 2, 3]], device=device).repeat(N, 1)} if named else {}
    problem.options["positives"] = positives
    expected = torch.autograd.grad(problem.loss(**more), problem.inputs())
    with torch.no_grad():
        problem.queries[1] = torch.nan
    for got, wanted in zip(torch.autograd.grad(problem.loss(**more), problem.inputs()), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("blocks", [{}, {"per_block": 7}], ids=["", "blocks"])
def test_frozen_sides_and_scale(device: str, blocks: dict[str, int]) -> None:
    """Each has its gradient where the others have none."""
    for alone in range(3):
        problem = Problem(device, torch.float32, scale="tensor", extra=5, **blocks)
        gradients = problem.right("mean")[1]
        for at, tensor in enumerate(problem.inputs()):
            tensor.requires_grad_(at == alone)
        (got,) = torch.autograd.grad(problem.loss(), problem.inputs()[alone])
        close(got, gradients[alone], 2e-5)
    with torch.no_grad():
        assert not problem.loss().requires_grad


@pytest.mark.parametrize("per_block", [None, 1])
def test_nothing_counts(device: str, per_block: int | None) -> None:
    problem = Problem(device, torch.float32, scale="tensor")
    positives = torch.full((N,), -100, device=device)
    options = {"symmetric": True, "documents_per_block": per_block}
    loss = flce.info_nce(problem.queries, problem.documents, scale=problem.scale, positives=positives, **options)
    gradients = torch.autograd.grad(loss, problem.inputs())
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_faults_of_tensors_are_reported(device: str) -> None:
    problem = Problem(device, torch.float32)
    positives = torch.arange(N, device=device)
    positives[3] = N
    flce.check_labels()
    flce.info_nce(problem.queries, problem.documents, positives=positives, symmetric=True)
    with pytest.raises(flce.LabelError, match=rf"target\[3\]|{N}"):
        flce.check_labels()
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        given = torch.tensor(scale, device=device)
        assert flce.info_nce(problem.queries, problem.documents, scale=given) == 0
        with pytest.raises(flce.LabelError, match="temperature"):
            flce.check_labels()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_one_document(device: str, reduction: str) -> None:
    """The last batch of an epoch may be one pair."""
    queries, documents = (torch.randn(1, D, device=device, requires_grad=True) for _ in range(2))
    more = torch.cat([documents, torch.randn(4, D, device=device)])
    loss = flce.info_nce(queries, documents, reduction=reduction, symmetric=True)
    gradients = torch.autograd.grad(loss.sum(), (queries, documents))
    assert loss.shape == ((1,) if reduction == "none" else ()) and loss.sum() == 0 and not any(each.any() for each in gradients)
    both = flce.info_nce(queries, more, symmetric=True)
    torch.testing.assert_close(both, flce.info_nce(queries, more) / 2)
    scale = torch.tensor(3.0, device=device, requires_grad=True)
    for blocks in ({}, {"documents_per_block": 1}):
        (none,) = torch.autograd.grad(flce.info_nce(queries.detach(), documents.detach(), scale=scale, **blocks), scale)
        assert none == 0
    assert flce.info_nce(queries[:0], documents, symmetric=True) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_documents_keep_24_bits(device: str, dtype: torch.dtype) -> None:
    """In 16 bits, under autocast too, and where they are beyond what fp16 holds."""
    negative_log_q = -torch.log(torch.rand(512, device=device) * 1e-4)
    right = F.cross_entropy(negative_log_q.double().expand(4, -1), torch.arange(4, device=device))
    queries, documents = torch.zeros(4, 8, device=device), torch.zeros(512, 8, device=device)
    for scale in (1.0, 1e-4):
        plain = flce.info_nce(queries.to(dtype), documents.to(dtype), negative_log_q=negative_log_q, scale=scale)
        with torch.autocast(device, dtype):
            cast = flce.info_nce(queries, documents, negative_log_q=negative_log_q, scale=scale)
        for loss in (plain, cast):
            torch.testing.assert_close(loss.double(), right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("above", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("blocks", [{}, {"documents_per_block": 1}], ids=["", "blocks"])
def test_what_reaches_a_query_that_is_left_out(device: str, blocks: dict[str, int], above: float) -> None:
    problem = Problem(device, torch.float32, scale="tensor", positives=True)
    out = problem.options["positives"] < 0
    made = []
    for number in (0.0, above):
        upstream = torch.where(out, number, 1.0)
        made.append(torch.autograd.grad(problem.loss(reduction="none", **blocks), problem.inputs(), upstream))
    for got, right in zip(made[1], made[0], strict=True):
        assert got.abs().max() > 0
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("per_block", [None, N])
def test_a_scale_that_is_none_has_no_gradient(device: str, per_block: int | None) -> None:
    problem = Problem(device, torch.float32)
    for number in (0.0, -3.0, float("nan"), float("inf"), 1e-40):
        scale = torch.tensor(number, device=device, requires_grad=True)
        loss = flce.info_nce(problem.queries, problem.documents, scale=scale, documents_per_block=per_block)
        assert loss == 0 and torch.autograd.grad(loss, scale)[0] == 0
        with pytest.raises(flce.LabelError):
            flce.check_labels()


@pytest.mark.parametrize("blocks", [{}, {"per_block": 1}], ids=["", "blocks"])
def test_transforms_and_derivatives_are_refused_by_name(device: str, blocks: dict[str, int]) -> None:
    problem = Problem(device, torch.float32, scale="tensor", **blocks)
    queries, documents, scale = (tensor.detach() for tensor in problem.inputs())

    def loss(given: Tensor) -> Tensor:
        return flce.info_nce(queries, documents, scale=given, **problem.options)

    for transform in (torch.func.grad(lambda given: loss(given).sum()), torch.func.vmap(loss)):
        with pytest.raises(flce.UnsupportedTransformError):
            transform(scale)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scale, torch.ones_like(scale))
        for given in ({"scale": dual}, {"negative_log_q": dual.expand(N)}):
            with pytest.raises(flce.UnsupportedTransformError, match="tangent"):
                flce.info_nce(queries, documents, **problem.options, **given)
        with pytest.raises(flce.UnsupportedTransformError):
            dual = torch.autograd.forward_ad.make_dual(queries, queries)
            flce.info_nce(dual, documents, scale=problem.scale, **problem.options)
    (gradient,) = torch.autograd.grad(problem.loss(), problem.queries, create_graph=True)
    with pytest.raises(flce.UnsupportedTransformError, match="second derivatives"):
        gradient.square().sum().backward()


def test_blocks_are_for_eager_mode_and_plain_tensors(device: str) -> None:
    problem = Problem(device, torch.float32, scale="tensor", per_block=1)
    right = torch.autograd.grad(problem.loss(), problem.inputs())
    again = checkpoint(problem.loss, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, problem.inputs()), right))
    with pytest.raises(Exception, match="documents_per_block is for eager mode"):
        torch.compile(problem.loss, backend="eager", fullgraph=True)()
    with FlopCounterMode(display=False), pytest.raises(flce.ArgumentError, match="plain tensors in eager mode"):
        problem.loss()


def test_a_limit_that_blocks_keep(device: str) -> None:
    """Each block's kernel has the limit."""
    problem = Problem(device, torch.float32, extra=12, per_block=7)
    for one, other in zip(*(torch.autograd.grad(problem.loss(**more), problem.inputs()) for more in ({}, LIMITED)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    with pytest.raises(flce.PlanError):
        problem.loss(workspace_limit_bytes=1)


@pytest.mark.parametrize("symmetric", [False, True])
def test_under_compile_and_checkpoint(device: str, symmetric: bool) -> None:
    problem = Problem(device, torch.float32, extra=3, scale="tensor", drawn=True)
    problem.options["symmetric"] = symmetric
    right = torch.autograd.grad(problem.loss(), problem.inputs())

    def loss(queries: Tensor, documents: Tensor, scale: Tensor) -> Tensor:
        return flce.info_nce(queries, documents, scale=scale, **problem.options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for value in (compiled(*problem.inputs()), checkpoint(loss, *problem.inputs(), use_reentrant=False)):
        for one, other in zip(torch.autograd.grad(value, problem.inputs()), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_no_scores_in_memory(device: str) -> None:
    """Runs within a limit that whole scores, 64 MiB, would break."""
    rows, limit = 4096, 8 << 20
    queries, documents = (F.normalize(torch.randn(rows, 16, device=device), dim=1).requires_grad_() for _ in range(2))
    loss = flce.info_nce(queries, documents, scale=20.0, workspace_limit_bytes=limit)
    loss.backward()
    right = F.cross_entropy(20.0 * queries.detach() @ documents.detach().T, torch.arange(rows, device=device))
    torch.testing.assert_close(loss.detach(), right, rtol=1e-5, atol=1e-5)


GOOD = {"queries": torch.zeros(3, 8), "documents": torch.zeros(4, 8)}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"queries": torch.zeros(3)}, flce.ShapeError, r"queries has shape \[3\]"),
        ({"queries": None}, flce.DTypeError, "queries is None"),
        ({"documents": [torch.zeros(3, 8)]}, flce.DTypeError, "documents is a list"),
        ({"queries": torch.zeros(3, 8, dtype=torch.int64)}, flce.DTypeError, "queries has dtype torch.int64"),
        ({"documents": torch.zeros(4, 16)}, flce.ShapeError, r"queries has \[3, 8\].*documents \[4, 16\]"),
        ({"documents": torch.zeros(4, 8, dtype=torch.bfloat16)}, flce.ShapeError, "dtype and device are one"),
        ({"documents": torch.zeros(2, 8)}, flce.ShapeError, "documents has 2 rows and queries 3, and positives is None"),
        ({"positives": torch.zeros(4, dtype=torch.int64)}, flce.ShapeError, r"positives has shape \[4\]"),
        ({"positives": torch.zeros(3)}, flce.ShapeError, "positives has shape .* torch.float32"),
        ({"scale": 0}, flce.ArgumentError, r"scale is 0; it must be from 2\^-100 to 2\^100"),
        ({"scale": 1e-38}, flce.ArgumentError, "scale is 1e-38"),
        ({"documents": torch.zeros(0, 8), "positives": torch.full((3,), -100)}, flce.ShapeError, "one document or more"),
        ({"positives": torch.zeros(3, dtype=torch.int64, device="meta")}, flce.PlacementError, "positives is on meta"),
        ({"negative_log_q": torch.zeros(4, device="meta")}, flce.PlacementError, "negative_log_q is on meta"),
        ({"scale": torch.ones((), device="meta")}, flce.PlacementError, "scale is on meta"),
        ({"scale": torch.ones(1).to_sparse()}, flce.ArgumentError, "scale is a tensor of layout"),
        ({"negative_log_q": torch.zeros(4, requires_grad=True)}, flce.ArgumentError, "negative_log_q requires a gradient"),
        ({"scale": float("inf")}, flce.ArgumentError, "scale is inf"),
        ({"scale": float("nan")}, flce.ArgumentError, "scale is nan"),
        ({"scale": True}, flce.DTypeError, "scale is a bool"),
        ({"scale": None}, flce.DTypeError, "scale is a NoneType"),
        ({"scale": torch.ones(2)}, flce.ShapeError, r"scale has shape \[2\]"),
        ({"scale": torch.ones((), dtype=torch.int64)}, flce.ShapeError, "scale has shape .* torch.int64"),
        ({"negative_log_q": torch.zeros(3)}, flce.ShapeError, r"negative_log_q has shape \[3\]"),
        ({"negative_log_q": torch.zeros(4, dtype=torch.int64)}, flce.ShapeError, "torch.int64"),
        ({"symmetric": 1}, flce.DTypeError, "symmetric is 1"),
        ({"reduction": "weighted_mean"}, flce.ArgumentError, "reduction is 'weighted_mean'; allowed are 'none', 'sum', 'mean'"),
        ({"documents_per_block": 0}, flce.ArgumentError, "documents_per_block is 0"),
        ({"documents_per_block": 3}, flce.ShapeError, "documents has 4 rows and documents_per_block is 3; it must be a multiple of it"),
        ({"documents_per_block": 4, "symmetric": True}, flce.ShapeError, "queries has 3 rows .* multiple of it with symmetric"),
        ({"documents_per_block": 2, "retain_in_grad_weight": True}, flce.ArgumentError, "nothing is left to backward"),
        ({"documents_per_block": 2, "workspace_limit_bytes": flce.MemoryBudget(1 << 20)}, flce.ArgumentError, "is a MemoryBudget"),
        ({"documents_per_block": 2, "queries": torch.zeros(3, 8, device="meta")}, flce.ShapeError, "on meta"),
        ({"negatives": torch.zeros(3, 2)}, flce.ShapeError, "negatives has shape .* torch.float32"),
        ({"negatives": torch.zeros(2, 2, dtype=torch.int64)}, flce.ShapeError, r"negatives has shape \[2, 2\]"),
        ({"negatives": torch.zeros(3, dtype=torch.int64)}, flce.ShapeError, r"negatives has shape \[3\]"),
        ({"negatives": torch.zeros(3, 1024, dtype=torch.int64)}, flce.ShapeError, "K from 1 to 1023"),
        ({"negatives": [[1], [2], [3]]}, flce.DTypeError, "negatives is a list"),
        ({"negatives": torch.zeros(3, 2, dtype=torch.int64, device="meta")}, flce.PlacementError, "negatives is on meta"),
        ({"negatives": torch.zeros(3, 2, dtype=torch.int64), "symmetric": True}, flce.ArgumentError, "negatives is given with symmetric"),
        (
            {"negatives": torch.zeros(3, 2, dtype=torch.int64), "documents_per_block": 2},
            flce.ArgumentError,
            "negatives is given with documents_per_block",
        ),
        ({"process_group": "data"}, flce.ArgumentError, "process_group is a str"),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_refused(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flce.info_nce(**{**GOOD, **given})


def test_over_ranks() -> None:
    assert cases_passed("info_nce_worker.py", "2,3") == {2: 22, 3: 22}


@pytest.mark.full
def test_over_four_ranks() -> None:
    assert cases_passed("info_nce_worker.py", "4") == {4: 22}
