"""The in-batch contrastive loss of sentence-transformers (`sentence_transformers.sentence_transformer.losses.MultipleNegativesRankingLoss`)
on flce's kernels, without the matrix of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flce import errors
from flce.contrastive import info_nce

__all__ = ["MultipleNegativesRankingLoss", "cos_sim", "dot_score"]

_BOTH_WAYS = ("query_to_doc", "doc_to_query")
_HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
_CITATION = """
@misc{oord2018representation,
  title = {Representation Learning with Contrastive Predictive Coding},
  author = {A{\\"a}ron van den Oord and Yazhe Li and Oriol Vinyals},
  year = {2018},
  eprint = {1807.03748},
  archivePrefix = {arXiv},
}
"""


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosines of a [N, D] and b [M, D]: [N, M]. The loss makes them without this function, whose name says which scores it takes."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def dot_score(a: Tensor, b: Tensor) -> Tensor:
    """Products of a [N, D] and b [M, D]: [N, M]; see `cos_sim`."""
    return a @ b.T


class MultipleNegativesRankingLoss(nn.Module):
    """−log softmax of each anchor's score with its positive among all documents of the batch: arguments and results of the peer's class,
    without its [batch, batch · documents] matrices. similarity_fct: cos_sim or dot_score, this module's or the peer's.

    Embeddings of 16 bits are computed with in fp32, as the peer does (`flce.info_nce` takes them as they are, in less time); under autocast
    products are in its dtype.

    Refused by name, with an ArgumentError when the loss is made: other similarity functions, hardness_mode with a strength, and directions
    with query_to_query or doc_to_doc, which leave pairs out. Keep the peer's class for these.

    gather_across_devices: every rank's documents for every anchor; the loss is the mean over all ranks' anchors, with gradients that data
    parallelism, which averages them, makes those of the mean. Ranks have as many anchors each.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale is {scale!r}; it must be above 0")
        if partition_mode not in ("joint", "per_direction"):
            raise ValueError(f"partition_mode is {partition_mode!r}; allowed are 'joint' and 'per_direction'")
        self.directions = tuple(directions)
        if set(self.directions) - set(_BOTH_WAYS) or "query_to_doc" not in self.directions:
            raise errors.ArgumentError(
                f"directions is {self.directions}; flce has ('query_to_doc',) and {_BOTH_WAYS}, and others leave pairs out of their "
                "softmax: keep sentence_transformers' own loss for them"
            )
        if hardness_mode not in _HARDNESS or not hardness_strength >= 0:
            raise ValueError(
                f"hardness_mode is {hardness_mode!r} with strength {hardness_strength!r}; allowed are {_HARDNESS} and 0 or more"
            )
        if hardness_mode is not None and hardness_strength != 0:
            raise errors.ArgumentError(
                f"hardness_mode is {hardness_mode!r} with strength {hardness_strength}, which weighs each pair by its score; keep "
                "sentence_transformers' own loss for it"
            )
        self.cosines = _is_cosine(similarity_fct)
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of the columns anchor, positive and any number of negatives; labels are not read."""
        return self.compute_loss_from_embeddings([self.model(column)["sentence_embedding"] for column in sentence_features], labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of [batch, D] for each column."""
        if len(embeddings) < 2:
            raise ValueError(f"there are {len(embeddings)} columns of embeddings; the loss takes two or more")
        # The peer computes in fp32 what a model gives in 16 bits.
        wide = [each.float() if each.dtype in (torch.bfloat16, torch.float16) else each for each in embeddings]
        anchors, *documents = (F.normalize(each, dim=1) for each in wide) if self.cosines else wide
        if documents[0].shape[0] < anchors.shape[0]:
            raise errors.ShapeError(f"there are {documents[0].shape[0]} positives of {anchors.shape[0]} anchors; each has one of its own")
        over_ranks = self.gather_across_devices and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        options: dict[str, Any] = {"scale": self.scale, "process_group": dist.group.WORLD if over_ranks else None}
        loss = self._loss(anchors, documents[0], torch.cat(documents), options)
        if over_ranks:
            loss = loss + (dist.get_world_size() - 1) * (loss - loss.detach())
        return loss

    def _loss(self, anchors: Tensor, positives: Tensor, documents: Tensor, options: dict[str, Any]) -> Tensor:
        if set(self.directions) == {"query_to_doc"}:
            return info_nce(anchors, documents, **options)
        if self.partition_mode == "per_direction":
            return info_nce(anchors, documents, symmetric=True, **options)
        # One softmax over both ways, whose losses are of the same positive score.
        there = info_nce(anchors, documents, reduction="none", **options)
        back = info_nce(positives[: anchors.shape[0]], anchors, reduction="none", **options)
        return torch.logaddexp(there, back).mean()

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, as a model card has them."""
        return {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
        }

    @property
    def citation(self) -> str:
        return _CITATION

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale


def _is_cosine(similarity_fct: Any) -> bool:
    module, name = getattr(similarity_fct, "__module__", ""), getattr(similarity_fct, "__name__", "")
    known = similarity_fct in (cos_sim, dot_score) or module.partition(".")[0] == "sentence_transformers"
    if not known or name not in ("cos_sim", "dot_score"):
        raise errors.ArgumentError(
            f"similarity_fct is {name or similarity_fct!r}; flce has cos_sim and dot_score: keep sentence_transformers' own loss for others"
        )
    return bool(name == "cos_sim")
