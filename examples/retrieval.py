"""Retrieval in small: an encoder is trained on the CPU so that a query finds its document, with flce.info_nce and no matrix of scores.

A document is a bag of words, its query a few of them. Each step a batch's queries meet all of the batch's documents; both directions count,
and the scale of the cosines is learned, as CLIP has it. The same steps run on materialised scores; losses must agree.

With --catalogue a recommender is trained instead: what a user took last meets a sample of a catalogue's items, drawn by their popularity,
whose logarithm is taken off the scores (logQ correction). What it learns is compared with the softmax over the whole catalogue.

    python examples/retrieval.py --steps 200 --batch 4096
    python examples/retrieval.py --catalogue
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce

WORDS, LENGTH, KEPT, DEPTH = 5000, 24, 6, 64
ITEMS, KINDS, SAMPLED = 2000, 20, 256
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(queries: Tensor, documents: Tensor, scale: Tensor) -> Tensor:
    return flce.info_nce(queries, documents, scale=scale, symmetric=True)


def materialised(queries: Tensor, documents: Tensor, scale: Tensor) -> Tensor:
    scores, own = scale * queries @ documents.T, torch.arange(queries.shape[0])
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


class Encoder(nn.Module):
    """Embeddings of bags of words [n, length], normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, DEPTH)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, bags: Tensor) -> Tensor:
        return F.normalize(self.words(bags), dim=1)


def documents_and_queries(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    documents = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return documents, documents[:, torch.randperm(LENGTH, generator=generator)[:KEPT]]


def train(loss_of: Loss, steps: int, batch: int) -> tuple[list[float], float]:
    """Losses, and the share of queries that were not trained on which find their document first among as many."""
    torch.manual_seed(0)
    encoder, generator = Encoder(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        documents, queries = documents_and_queries(batch, generator)
        loss = loss_of(encoder(queries), encoder(documents), encoder.log_scale.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        documents, queries = documents_and_queries(512, generator)
        found = (encoder(queries) @ encoder(documents).T).argmax(1)
    return losses, (found == torch.arange(512)).float().mean().item()


def retrieval(steps: int, batch: int) -> None:
    ways: dict[str, Loss] = {"materialised": materialised, "flce": fused}
    made = {name: train(loss_of, steps, batch) for name, loss_of in ways.items()}
    for name, (losses, share) in made.items():
        print(f"{name:>14}: loss {losses[0]:.4f} to {losses[-1]:.4f}; {share:.0%} of new queries find their document among 512")
    away = max(abs(a - b) for a, b in zip(made["flce"][0], made["materialised"][0], strict=True))
    print(f"losses differ by {away:.1e} at most; scores that did not exist: {batch * batch * 4 / 2**20:.1f} MiB a step")
    if away > 1e-3:
        raise SystemExit("the losses differ")


def catalogue(steps: int, batch: int) -> None:
    """Users of a kind take items of that kind, some kinds and items more often than others."""
    torch.manual_seed(0)
    popularity = torch.arange(1, ITEMS + 1).float().reciprocal()
    kinds = torch.randint(0, KINDS, (ITEMS,))
    by_kind = popularity * F.one_hot(kinds, KINDS).T  # [KINDS, ITEMS]
    by_kind = by_kind / by_kind.sum(1, keepdim=True) * 0.9 + popularity / popularity.sum() * 0.1
    drawn_with = popularity / popularity.sum()
    kept = {}
    for name, corrected in (("as they are", False), ("with logQ", True)):
        users, items = nn.Embedding(KINDS, DEPTH), nn.Embedding(ITEMS, DEPTH)
        optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=1e-2)
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            who = torch.randint(0, KINDS, (batch,), generator=generator)
            took = torch.multinomial(by_kind, batch, replacement=True, generator=generator)[who, torch.arange(batch)]
            sampled = torch.multinomial(drawn_with, SAMPLED, replacement=True, generator=generator)
            shown = torch.cat([took, sampled])
            negative_log_q = -drawn_with[shown].log() if corrected else None
            loss = flce.info_nce(users(who), items(shown), negative_log_q=negative_log_q)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            learned = F.log_softmax(users.weight @ items.weight.T, dim=1)
            kept[name] = F.kl_div(learned, by_kind, reduction="batchmean").item()
        print(f"{name:>12}: {kept[name]:.3f} nats from what users take, over the whole catalogue of {ITEMS}")
    if not kept["with logQ"] < kept["as they are"]:
        raise SystemExit("the correction does not help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--catalogue", action="store_true")
    given = parser.parse_args()
    (catalogue if given.catalogue else retrieval)(given.steps, given.batch)


if __name__ == "__main__":
    main()
