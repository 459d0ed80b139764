"""`flce.info_nce` with a mask: what counts for nothing does so to the last bit, and numbers are any numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_info_nce import masks, ruled_out
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce

N, M, D = 21, 33, 16


def embeddings(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = (F.normalize(torch.randn(count, D, generator=generator), dim=1) for count in (N, M))
    queries, documents = (each.to(device, dtype).requires_grad_() for each in made)
    return queries, documents


def made(queries: Tensor, documents: Tensor, **options: Any) -> tuple[Tensor, ...]:
    loss = flce.info_nce(queries, documents, scale=9.0, **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), [queries, documents])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"documents_per_block": 1}], ids=lambda options: "+".join(options))
def test_where_all_others_are_masked_there_is_nothing_to_learn(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    queries, documents = embeddings(device, dtype)
    same = [torch.full((count,), 7, device=device) for count in (N, M)]
    loss, *gradients = made(queries, documents, mask=(same[0], same[1]), reduction="none", **options)
    assert torch.equal(loss, torch.zeros_like(loss))
    assert not gradients[1][N:].count_nonzero()  # documents that are nobody's positive
    if device == "cpu":
        assert not any(gradient.count_nonzero() for gradient in gradients)
    else:  # scores of backward are added up in another order than forward's
        assert all(gradient.abs().max() < 1e-4 for gradient in gradients)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"documents_per_block": 3}, {"negatives": True}], ids="+".join)
def test_a_mask_of_nothing_changes_no_bit(options: dict[str, Any]) -> None:
    queries, documents = embeddings("cpu")
    if "negatives" in options:
        options = {"negatives": torch.randint(0, M, (N, 5), generator=torch.Generator().manual_seed(2))}
    own = torch.arange(N), torch.arange(M)  # a query's number is its positive's alone
    right = made(queries, documents, **options)
    for mask in ((own[0] - N, own[1]), (own[0], own[1] - M), own):
        for one, other in zip(made(queries, documents, mask=mask, **options), right, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("named", [False, True])
def test_a_masked_document_is_as_if_it_were_not_there(device: str, named: bool) -> None:
    """A document of every query's number, which is nobody's positive, has no part in anything, whatever is in it."""
    queries, documents = embeddings(device)
    numbers = torch.zeros(N, dtype=torch.int64, device=device), torch.full((M,), -1, device=device)
    numbers[1][N + 3] = 0
    rest = torch.arange(M, device=device) != N + 3
    negatives = torch.arange(N, M, device=device).expand(N, M - N)
    right = made(queries, documents[rest], **({"negatives": negatives[:, :-1]} if named else {}))
    with torch.no_grad():
        documents[N + 3] = 1e4
    loss, of_queries, of_documents = made(queries, documents, mask=numbers, **({"negatives": negatives} if named else {}))
    torch.testing.assert_close(loss, right[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(of_queries, right[1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(of_documents[rest], right[2], rtol=1e-4, atol=1e-7)
    assert not of_documents[N + 3].count_nonzero()


def test_numbers_are_any_numbers(device: str) -> None:
    """Equal ones are equal and others are not, however close or far; the dtypes of the two may differ."""
    queries, documents = embeddings(device)
    generator = torch.Generator().manual_seed(4)
    small = [torch.randint(0, 6, (count,), generator=generator).to(device) for count in (N, M)]
    names = torch.tensor([2**63 - 1, 2**63 - 2, 2**32, 0, 1, 2**32 + 1], device=device)
    right = made(queries, documents, mask=(small[0], small[1]))
    for mask in (
        (names[small[0]], names[small[1]]),
        (small[0].int(), small[1].int()),
        (small[0].int(), small[1]),
        [small[0], torch.stack([small[1], small[1]], 1)[:, 0]],
    ):
        for one, other in zip(made(queries, documents, mask=mask), right, strict=True):
            assert torch.equal(one, other)


def test_a_query_that_does_not_count_beside_a_mask(device: str) -> None:
    queries, documents = embeddings(device)
    positives = torch.arange(N, device=device)
    positives[::3] = -100
    mask = masks(N, M, 3, positives, torch.Generator().manual_seed(5), device)
    losses = made(queries, documents, mask=mask, positives=positives, reduction="none")[0]
    assert not losses[::3].count_nonzero()
    scores = 9.0 * queries.detach().double() @ documents.detach().double().T
    scores = scores.masked_fill(ruled_out(*mask, positives), -torch.inf)
    torch.testing.assert_close(losses.double(), F.cross_entropy(scores, positives, reduction="none"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_under_compile_and_checkpoint(device: str, symmetric: bool) -> None:
    queries, documents = embeddings(device)
    mask = masks(N, M, 4, None, torch.Generator().manual_seed(6), device)
    right = made(queries, documents, mask=mask, symmetric=symmetric)

    def loss(queries: Tensor, documents: Tensor, of_queries: Tensor, of_documents: Tensor) -> Tensor:
        return flce.info_nce(queries, documents, scale=9.0, mask=(of_queries, of_documents), symmetric=symmetric)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for value in (compiled(queries, documents, *mask), checkpoint(loss, queries, documents, *mask, use_reentrant=False)):
        for one, other in zip((value.detach(), *torch.autograd.grad(value, [queries, documents])), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """A replay with other numbers masks other pairs: nothing about them is read by the host."""
    queries, documents = embeddings("cuda", dtype)
    mask = masks(N, M, 4, None, torch.Generator().manual_seed(7), "cuda")
    other = masks(N, M, 3, None, torch.Generator().manual_seed(8), "cuda")
    right = made(queries, documents, mask=other)
    made(queries, documents, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = made(queries, documents, mask=mask)
    for numbers, others in zip(mask, other, strict=True):
        numbers.copy_(others)
    graph.replay()
    for one, expected in zip(values, right, strict=True):
        assert torch.equal(one, expected)


LABELS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.zeros(3, 4, dtype=torch.bool), flce.ArgumentError, r"mask is a tensor of shape \[3, 4\]; .* give \(of_queries, of_doc"),
        ({"queries": LABELS}, flce.ArgumentError, r"mask is a dict; give \(of_queries"),
        ((LABELS,), flce.ArgumentError, "mask is a tuple; give"),
        ((LABELS, None), flce.DTypeError, r"mask\[1\] is None"),
        ((LABELS, [1, 2, 3, 4]), flce.DTypeError, r"mask\[1\] is a list"),
        ((LABELS, LABELS), flce.ShapeError, r"mask\[1\] has shape \[3\] .* give .* \[3\] and \[4\]"),
        ((LABELS.float(), torch.zeros(4, dtype=torch.int64)), flce.ShapeError, r"mask\[0\] .* torch.float32; .* int64 or int32"),
        ((LABELS.to("meta"), torch.zeros(4, dtype=torch.int64)), flce.PlacementError, r"mask\[0\] is on meta"),
    ],
    ids=str,
)
def test_refused(mask: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flce.info_nce(torch.zeros(3, 8), torch.zeros(4, 8), mask=mask)
