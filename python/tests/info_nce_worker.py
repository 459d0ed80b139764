"""One rank of several: `flce.info_nce` of this rank's queries and documents against all of them in one process. Exits with a failed
assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_support import device, generator, run_main
from torch.distributed.device_mesh import init_device_mesh

import flce

N, D = 11, 24


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(got, right, rtol=2e-5, atol=2e-6)


def numbers_of(queries: int, documents: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of so many groups, some below 0."""
    of_queries, of_documents = (
        torch.randint(-1, groups, (count,), generator=generator(seed), device=device()) for count, seed in ((queries, 6), (documents, 7))
    )
    return of_queries << 40, of_documents << 40


def equals_one_process(uneven: bool, symmetric: bool, learned: bool, drawn: bool, positives: bool, named: int = 0, groups: int = 0) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    of_rank = [N + 3 + (4 * other if uneven else 0) for other in range(ranks)]
    start, total = sum(of_rank[:rank]), sum(of_rank)
    queries = F.normalize(torch.randn(N * ranks, D, generator=generator(1), device=device()), dim=1)
    documents = F.normalize(torch.randn(total, D, generator=generator(2), device=device()), dim=1)
    of_queries = torch.randint(0, total, (N * ranks,), generator=generator(3), device=device())
    of_queries[::4] = -100
    if not positives:
        of_queries = torch.cat([torch.arange(N) + sum(of_rank[:other]) for other in range(ranks)]).to(device())
    negative_log_q = torch.rand(total, generator=generator(4), device=device()) * 9 if drawn else None
    negatives = torch.randint(-1, total, (N * ranks, named), generator=generator(5), device=device()) if named else None
    scale: Any = torch.tensor(13.0, device=device(), requires_grad=True) if learned else 13.0
    both = [tensor.requires_grad_() for tensor in (queries, documents)]
    whole = [*both, *([scale] if learned else [])]
    mask = numbers_of(N * ranks, total, groups) if groups else None
    of_all = {"negative_log_q": negative_log_q, "symmetric": symmetric, "negatives": negatives, "mask": mask}
    right = flce.info_nce(*both, scale=scale, positives=of_queries, **of_all)
    gradients = torch.autograd.grad(right, whole)

    of_mine, of_documents = slice(rank * N, (rank + 1) * N), slice(start, start + of_rank[rank])
    mine = [queries.detach()[of_mine].requires_grad_(), documents.detach()[of_documents].requires_grad_()]
    options = {
        "positives": of_queries[of_mine] if positives else None,
        "negatives": negatives[of_mine] if negatives is not None else None,
        "negative_log_q": negative_log_q[of_documents] if negative_log_q is not None else None,
        "mask": (mask[0][of_mine], mask[1][of_documents]) if mask is not None else None,
        "symmetric": symmetric,
        "process_group": init_device_mesh(device(), (ranks,)) if uneven else dist.group.WORLD,
    }
    loss = flce.info_nce(*mine, scale=scale, **options)
    close(loss, right)
    got = list(torch.autograd.grad(loss, [*mine, *([scale] if learned else [])]))
    if learned:
        dist.all_reduce(got[2])
        close(got[2], gradients[2])
    close(got[0], gradients[0][of_mine])
    close(got[1], gradients[1][of_documents])
    rows = flce.info_nce(*mine, scale=scale, **options, reduction="none")
    assert rows.shape == (N * ranks,)
    close(rows.sum() / (of_queries >= 0).sum(), right)


def has_the_bits_of_one_process(dtype: torch.dtype, reduction: str, symmetric: bool, drawn: bool, uneven: bool, groups: int = 0) -> None:
    """Bits of one batch, of this process alone and of 2, 3, 4, 6 or 12 ranks."""
    ranks, rank, pairs, block = dist.get_world_size(), dist.get_rank(), 24, 2
    total = pairs if symmetric else 2 * pairs
    of_rank = [total // ranks] * ranks
    if uneven:
        of_rank = [total - block * (ranks - 2), *[block] * (ranks - 2), 0]
    queries = F.normalize(torch.randn(pairs, D, generator=generator(1), device=device()), dim=1).to(dtype).requires_grad_()
    documents = F.normalize(torch.randn(total, D, generator=generator(2), device=device()), dim=1).to(dtype).requires_grad_()
    positives = None if symmetric else torch.randint(0, total, (pairs,), generator=generator(3), device=device())
    negative_log_q = torch.rand(total, generator=generator(4), device=device()) * 9 if drawn else None
    scale = torch.tensor(13.0, device=device(), requires_grad=True)
    options = {"symmetric": symmetric, "reduction": reduction, "documents_per_block": block}
    mask = numbers_of(pairs, total, groups) if groups else None
    right = flce.info_nce(queries, documents, scale=scale, positives=positives, negative_log_q=negative_log_q, mask=mask, **options)
    above = torch.rand(right.shape, generator=generator(5), device=device())
    whole = torch.autograd.grad(right, [queries, documents, scale], above)
    assert all(gradient.count_nonzero() for gradient in whole)

    start = sum(of_rank[:rank])
    mine, of_documents = slice(rank * pairs // ranks, (rank + 1) * pairs // ranks), slice(start, start + of_rank[rank])
    inputs = [queries.detach()[mine].requires_grad_(), documents.detach()[of_documents].requires_grad_(), scale]
    loss = flce.info_nce(
        *inputs[:2],
        scale=scale,
        positives=None if positives is None else positives[mine],
        negative_log_q=None if negative_log_q is None else negative_log_q[of_documents],
        mask=None if mask is None else (mask[0][mine], mask[1][of_documents]),
        process_group=dist.group.WORLD,
        **options,
    )
    got = torch.autograd.grad(loss, inputs, above)
    dist.all_reduce(got[2])
    for one, other in zip((loss, *got), (right, whole[0][mine], whole[1][of_documents], whole[2]), strict=True):
        assert torch.equal(one, other), (one, other)


def large_numbers_of_documents() -> None:
    """Numbers beyond fp16's largest on one rank alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    total, scale = 3 * ranks, 1e-4
    negative_log_q = torch.rand(total, generator=generator(4), device=device()) * 2
    negative_log_q[0] = 9.0
    queries, documents = (torch.zeros(total, 8, device=device(), dtype=torch.float16) for _ in range(2))
    mine = slice(3 * rank, 3 * rank + 3)
    group = dist.group.WORLD
    loss = flce.info_nce(queries[mine], documents[mine], scale=scale, negative_log_q=negative_log_q[mine], process_group=group)
    close(loss, flce.info_nce(queries, documents, scale=scale, negative_log_q=negative_log_q))


def refused_on_every_rank() -> None:
    """Differences between ranks, and a fault of one, are errors on all of them."""
    first = dist.get_rank() == 0
    queries, documents = (torch.zeros(N, D, device=device()) for _ in range(2))
    positives, numbers = torch.zeros(N, dtype=torch.int64, device=device()), torch.zeros(N, device=device())
    alone = [documents[:3], documents]
    dtypes = (torch.float32, torch.bfloat16)
    for given, says in (
        ({"queries": documents[: N - first]}, "queries differs .* rows"),
        ({"queries": torch.zeros(N, D + 8 * first), "documents": torch.zeros(N, D + 8 * first)}, "D differs"),
        ({"positives": positives if first else None}, "positives differs"),
        ({"negative_log_q": numbers if first else None}, "negative_log_q differs"),
        ({"negatives": positives[:, None].repeat(1, 3 + first)}, r"negatives differs .*0 for none"),
        ({"negatives": positives[:, None] if first else None}, "negatives differs"),
        ({"mask": (positives, positives) if first else None}, "mask differs"),
        ({"symmetric": first}, "symmetric differs"),
        ({"reduction": "sum" if first else "mean"}, r"reduction differs .*\(is \['sum', 'mean'"),
        ({"scale": 2.0 if first else 3.5, "documents_per_block": 1}, r"scale differs .*\(is \[2.0, 3.5"),
        ({"scale": torch.tensor(2.0) if first else 2.0}, "scale"),
        ({name: torch.zeros(N, D, dtype=dtypes[first]) for name in ("queries", "documents")}, "dtype differs .*float32"),
        ({"documents_per_block": 1 if first else 11}, r"documents_per_block differs .*\(is \[1, .*11\], 0 for none"),
        ({"documents_per_block": 1 if first else None}, "documents_per_block differs"),
        ({"documents_per_block": 2 if first else 1}, "it must be a multiple" if first else r"ranks \[0\] of process_group have refused"),
        ({"queries": torch.zeros(N, D, requires_grad=first)}, "queries' gradient differs"),
        ({"documents": torch.zeros(N, D, requires_grad=first)}, "documents' gradient differs"),
        ({"scale": torch.tensor(2.0, requires_grad=first)}, "scale's gradient differs"),
        ({"documents": alone[not first]}, "documents has 3 rows" if first else r"ranks \[0\] of process_group have refused"),
        ({"scale": -1.0 if first else 1.0}, "scale is -1.0" if first else r"ranks \[0\] of process_group have refused"),
        ({"positives": positives, "symmetric": True}, "positives is given with symmetric"),
    ):
        try:
            flce.info_nce(**{"queries": queries, "documents": documents, **given}, process_group=dist.group.WORLD)
        except flce.FlceError as error:
            assert re.search(says, str(error)), error
        else:
            raise AssertionError(f"{says} was not said")


def one_rank_has_no_documents() -> None:
    """Queries whose positives lie elsewhere."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    queries, documents = (torch.randn(rows, D, generator=generator(seed), device=device()) for rows, seed in ((N * ranks, 1), (7, 2)))
    positives = torch.arange(N * ranks, device=device()) % 7
    right = flce.info_nce(queries, documents, positives=positives)
    mine = slice(rank * N, (rank + 1) * N)
    documents = documents if rank == 0 else documents[:0]
    close(flce.info_nce(queries[mine], documents, positives=positives[mine], process_group=dist.group.WORLD), right)


def whole_and_in_blocks_of_a_rank() -> None:
    """Two calls whose kernels have the same key, and are of different kinds."""
    ranks = dist.get_world_size()
    queries, documents = (F.normalize(torch.randn(N, D, generator=generator(seed), device=device()), dim=1) for seed in (1, 2))
    one = {"process_group": dist.group.WORLD, "reduction": "sum"}
    for _ in range(2):
        whole = flce.info_nce(queries, documents, **one)
        close(flce.info_nce(queries, documents, documents_per_block=N, **one), whole)
    assert ranks > 1 and whole > 0


CASES: list[tuple[Any, ...]] = [
    (whole_and_in_blocks_of_a_rank,),
    *((equals_one_process, uneven, symmetric, uneven, symmetric, False) for uneven in (False, True) for symmetric in (False, True)),
    *((equals_one_process, uneven, False, learned, True, True) for uneven, learned in ((False, True), (True, False), (True, True))),
    *((equals_one_process, uneven, False, learned, learned, True, 9) for uneven, learned in ((False, False), (True, True))),
    *((equals_one_process, uneven, symmetric, uneven, uneven, False, 0, 4) for uneven, symmetric in ((False, True), (True, False))),
    (equals_one_process, True, False, False, False, True, 9, 4),
    (has_the_bits_of_one_process, torch.bfloat16, "mean", False, False, True, 3),
    (has_the_bits_of_one_process, torch.float32, "none", True, False, False, 5),
    *(
        (has_the_bits_of_one_process, dtype, reduction, symmetric, drawn, uneven)
        for dtype, reduction, symmetric, drawn, uneven in (
            (torch.float32, "mean", False, False, False),
            (torch.float32, "none", True, False, False),
            (torch.bfloat16, "mean", True, True, False),
            (torch.float16, "sum", False, True, True),
        )
    ),
    (one_rank_has_no_documents,),
    (large_numbers_of_documents,),
    (refused_on_every_rank,),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: CASES)
