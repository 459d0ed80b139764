"""One rank of several: the stand-in for sentence-transformers' in-batch loss with gather_across_devices, against the package's own. Exits
with a failed assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_support import device, generator, run_main
from sentence_transformers.sentence_transformer import losses
from torch import nn

from flce.compat.sentence_transformers import MultipleNegativesRankingLoss


def equals_the_packages(**options: Any) -> None:
    """Gradients as data parallelism makes them, the average over ranks; losses as they are logged, averaged too."""
    inputs = [torch.randn(9, 16, generator=generator(10 * column + dist.get_rank()), device=device()) for column in range(3)]
    found = []
    for kind in (losses.MultipleNegativesRankingLoss, MultipleNegativesRankingLoss):
        torch.manual_seed(0)
        model = nn.Linear(16, 24, device=device())
        loss = kind(model, gather_across_devices=True, **options).compute_loss_from_embeddings([model(each) for each in inputs], inputs[0])
        loss.backward()
        assert model.weight.grad is not None and model.bias.grad is not None
        numbers = [loss.detach(), model.weight.grad, model.bias.grad]
        for each in numbers:
            dist.all_reduce(each)
        found.append([each / dist.get_world_size() for each in numbers])
    for mine, own in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-6)


BOTH = ("query_to_doc", "doc_to_query")
CASES = [({},), ({"directions": BOTH, "partition_mode": "per_direction"},), ({"directions": BOTH},)]

if __name__ == "__main__":
    run_main(lambda options: equals_the_packages(**options), lambda: CASES)
