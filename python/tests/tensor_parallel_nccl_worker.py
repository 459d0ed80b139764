"""The only rank of a group over NCCL, under torchrun on a GPU: a call over a shard, which is the whole layer, captured in a CUDA graph and
played again with other numbers. Exits with a failed assertion, or 0; prints how many cases passed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flce

HIDDEN, VOCAB, TOKENS = 512, 30011, 700


class Step:
    """Inputs that stay where they are, and a step over them."""

    def __init__(self, **options: Any) -> None:
        self.hidden = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        self.weight = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        self.target = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        self.options = options

    def fill(self, seed: int) -> None:
        make = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            self.hidden.normal_(generator=make)
            self.weight.normal_(std=HIDDEN**-0.5, generator=make)
            self.target.random_(0, VOCAB, generator=make)
            self.target[::9] = -100

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        loss = flce.linear_cross_entropy(self.hidden, self.weight, self.target, **self.options)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        return loss.detach(), grad_hidden, grad_weight


def played_again(sequence: bool, wide: bool) -> None:
    group = {"process_group": dist.group.WORLD, "sequence_parallel": sequence}
    step = Step(**group, **({"reduce_dtype": torch.float32} if wide else {}))
    step.fill(1)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step.run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step.run()
    for seed in (2, 3):
        step.fill(seed)
        graph.replay()
        replayed = [tensor.clone() for tensor in made]
        for got, right in zip(replayed, step.run(), strict=True):
            assert torch.equal(got, right), "a replay and an eager call differ"
        whole = Step()
        whole.fill(seed)
        for got, right in zip(replayed, whole.run(), strict=True):
            error, size = float((got.double() - right.double()).norm()), float(right.double().norm())
            assert error <= 1e-2 * size, f"off by {error / size:.2e} from the whole layer"


def first_call_while_capturing() -> None:
    step = Step(process_group=dist.group.WORLD, label_smoothing=0.25)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step.run()
    except flce.UnavailableError as error:
        assert "run the call once" in str(error), error
    else:
        raise AssertionError("a first call was captured")


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    cases = [(sequence, wide) for sequence in (False, True) for wide in (False, True)]
    for case in cases:
        played_again(*case)
    first_call_while_capturing()
    print(f"{len(cases) + 1} cases passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
