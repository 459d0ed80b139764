"""One rank under torchrun: a shard of what is asked of an output layer beside the cross entropy of one hidden state. Exits with a failed
assertion, or 0; rank 0 prints how many cases passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_support import device, generator, run_main
from tensor_parallel_support import HIDDEN, TOKENS, VOCAB, Layer, close, leaf, same_on_every_rank
from tensor_parallel_worker import compare
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import flce


def distillation(hard_weight: float) -> None:
    layer = Layer()

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None, mine: Any, **more: Any) -> Any:
        taught = (layer.teacher_ids, layer.teacher_probs)
        settings = {"target": layer.target, "hard_weight": hard_weight, "bias": bias, "return_lse": True}
        return flce.linear_topk_distillation(hidden, weight, *taught, **settings, **more)

    compare(layer, call, bias=True)


def distillation_over_tokens(form: str) -> None:
    """Each rank has a part of hidden, and all of what the teacher says."""
    layer = Layer()
    shape = (3, TOKENS // 3) if form == "second dimension" else (TOKENS,)
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    rows: list[Any] = [layer.target.view(shape), layer.teacher_ids.view(*shape, -1), layer.teacher_probs.view(*shape, -1)]
    given = [distribute_tensor(row, mesh, [Replicate()]) for row in rows] if form == "DTensors" else rows
    whole, weight = leaf(layer.hidden.view(*shape, -1)), leaf(layer.weight)
    part, shard = leaf(whole.detach().chunk(dist.get_world_size(), len(shape) - 1)[dist.get_rank()]), leaf(layer.mine(layer.weight))
    over = {"process_group": mesh, "sequence_parallel": True}
    for hard_weight in (None, 0.3):
        pairs = [{} if hard_weight is None else {"target": target, "hard_weight": hard_weight} for target in (rows[0], given[0])]
        expected = flce.linear_topk_distillation(whole, weight, *rows[1:], **pairs[0])
        loss = flce.linear_topk_distillation(part, shard, *given[1:], **pairs[1], **over)
        close(loss, expected)
        right = torch.autograd.grad(expected, (whole, weight))
        got = torch.autograd.grad(loss, (part, shard))
        close(got[0], right[0].chunk(dist.get_world_size(), len(shape) - 1)[dist.get_rank()])
        close(got[1], layer.mine(right[1]))


def logprobs_at(sequence: bool, normalize: str = "vocabulary") -> None:
    """Classes that a token names, of which each rank has some; equal ones, and tokens that name none."""
    layer = Layer()
    ids = layer.teacher_ids.clone()
    ids[2::5, 3] = ids[2::5, 0]
    ids[4::9] = -1

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None, mine: Any, **more: Any) -> Any:
        flags = {"return_lse": True, "return_entropy": True, "temperature": layer.temperature, "softcap": 4.0}
        return flce.linear_logprobs_at(hidden, weight, ids, bias=bias, normalize=normalize, **flags, **more)

    compare(layer, call, sequence=sequence, bias=True)


def logprobs_at_lists(normalize: str) -> None:
    layer = Layer()
    lengths = torch.arange(TOKENS) % 4
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = layer.target.clamp(min=0).repeat_interleave(lengths)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None, mine: Any, **more: Any) -> Any:
        return flce.linear_logprobs_at(hidden, weight, ids, offsets=offsets, normalize=normalize, **more)

    compare(layer, call)


def several_depths(sequence: bool) -> None:
    """Hidden states of two depths on one weight, as a call of each over the whole layer has it."""
    layer, ranks = Layer(), dist.get_world_size()
    halves = [(layer.hidden[:32], layer.target[:32]), (layer.hidden[32:], layer.target[32:])]
    whole, mine = leaf(layer.weight), leaf(layer.mine(layer.weight))
    apart = [flce.linear_cross_entropy(hidden, whole, target, softcap=5.0) for hidden, target in halves]
    (apart[0] - 0.3 * apart[1]).backward()
    targets = [target for _, target in halves]
    for sizes in ({}, {"vocab_size": VOCAB}):
        hidden = [leaf(states.chunk(ranks)[dist.get_rank()] if sequence else states) for states, _ in halves]
        mine.grad = None
        total, losses, lse = flce.linear_cross_entropy(
            hidden,
            mine,
            targets,
            loss_weights=[1.0, -0.3],
            softcap=5.0,
            return_lse=True,
            process_group=layer.group,
            sequence_parallel=sequence,
            **sizes,
        )
        total.backward()
        for loss, right in zip(losses, apart, strict=True):
            close(loss, right)
        assert whole.grad is not None and [numbers.shape for numbers in lse] == [target.shape for target in targets]
        close(mine.grad, layer.mine(whole.grad))
    try:
        flce.linear_cross_entropy([layer.hidden], mine, [layer.target], process_group=layer.group, class_weight=torch.ones(mine.shape[0]))
    except flce.ArgumentError as error:
        assert "lies over ranks" in str(error), error
    else:
        raise AssertionError("class weights over ranks were not refused")


def divergence(beta: float, dtype: torch.dtype, form: str) -> None:
    """Two heads over ranks, beside the same call of the whole layer."""
    even = 192 if form == "hidden-major" else 0  # the library's quick kernels read rows of a multiple of 8
    layer, teacher = Layer(dtype, even=even), Layer(dtype, seed=5, even=even)
    options: dict[str, Any] = {"beta": beta, "return_student_entropy": True, "return_teacher_entropy": True}
    biased = form == "everything"
    if biased:
        options |= {"temperature": layer.temperature, "student_softcap": 5.0, "teacher_logit_scale": 0.7, "mask": layer.target >= 0}
    turned = form == "hidden-major"

    def call(mine: Callable[[Tensor], Tensor], **more: Any) -> tuple[Any, list[Tensor]]:
        given = [layer.hidden, *(mine(each) for each in (layer.weight, layer.bias))]
        hidden, weight, bias = (each.clone().requires_grad_() for each in given)
        as_read = weight.t().contiguous().t() if turned else weight
        of_teacher = mine(teacher.weight).t().contiguous().t() if turned else mine(teacher.weight)
        biases = {"student_bias": bias, "teacher_bias": mine(teacher.bias)} if biased else {}
        made = flce.linear_divergence(hidden, as_read, teacher.hidden, of_teacher, **biases, **options, **more)
        (made.divergence * layer.token_weight).sum().backward()
        return made, [hidden, weight, *([bias] if biased else [])]

    expected, whole = call(lambda tensor: tensor)
    found, parts = call(layer.mine, process_group=layer.group)
    same_on_every_rank(*found, parts[0].grad)
    for got, right in zip(found, expected, strict=True):
        close(got, right)
    close(parts[0].grad, whole[0].grad, dtype)
    for part, right in zip(parts[1:], whole[1:], strict=True):
        assert right.grad is not None
        close(part.grad, layer.mine(right.grad), dtype)


def divergence_of_few_classes(of_rank: int) -> None:
    """Ranks without a class or with one, and rows that pad the vocabulary."""
    layer, teacher = Layer(), Layer(seed=5)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    classes = layer.weight.shape[0] - 20
    rows = slice(rank * of_rank, None if rank == ranks - 1 else (rank + 1) * of_rank)
    parts = (layer.weight[rows], teacher.weight[rows])
    for beta in (0.0, 0.4):
        expected = flce.linear_divergence(layer.hidden, layer.weight[:classes], teacher.hidden, teacher.weight[:classes], beta=beta)
        hidden = layer.hidden.clone().requires_grad_()
        found = flce.linear_divergence(hidden, parts[0], teacher.hidden, parts[1], beta=beta, process_group=layer.group, vocab_size=classes)
        found.sum().backward()
        same_on_every_rank(found, hidden.grad)
        close(found, expected)


def given_on_some_ranks(warm: bool) -> None:
    """Arguments of one rank alone are refused on all, also where ranks have agreed on the layer without them."""
    layer, teacher, first = Layer(), Layer(seed=5), dist.get_rank() == 0
    heads = (layer.hidden, layer.mine(layer.weight))

    def divergence_of(**given: Any) -> Any:
        return flce.linear_divergence(*heads, teacher.hidden, layer.mine(teacher.weight), beta=0.4, process_group=layer.group, **given)

    def top_k_of(**given: Any) -> Any:
        return flce.linear_topk(*heads, 3, process_group=layer.group, **given)

    for call, names in ((top_k_of, ("temperature", "bias")), (divergence_of, ("temperature", "student_bias", "teacher_bias", "mask"))):
        if warm:
            call()
        for name in names:
            value = {"temperature": 2.0, "mask": layer.target >= 0}.get(name, layer.mine(layer.bias))
            try:
                call(**({name: value} if first else {}))
            except flce.PlacementError as error:
                assert "between ranks" in str(error), error
            else:
                raise AssertionError(f"{name} of one rank was taken")


def quantized(form: str) -> None:
    """Codes whose scales begin with a rank's own first row, beside the dequantised weight of the whole layer."""
    layer = Layer(torch.bfloat16)
    if form == "nvfp4":
        codes = torch.randint(0, 256, (VOCAB, HIDDEN // 2), generator=generator(9)).to(torch.uint8)
        scale = layer.weight[:, :4].abs().to(torch.float8_e4m3fn)
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        numbers = torch.stack([codes & 15, codes >> 4], dim=-1).view(VOCAB, HIDDEN).long()
        dense = torch.where(numbers < 8, 1.0, -1.0) * table[numbers % 8] * (scale.float() * 0.3).repeat_interleave(16, 1)
    else:
        codes, scale = (layer.weight * 100).to(torch.float8_e4m3fn), layer.class_weight / 50
        dense = codes.float() * scale[:, None]
    more: dict[str, Any] = {"weight_tensor_scale": 0.3} if form == "nvfp4" else {}
    options: dict[str, Any] = {
        "temperature": layer.temperature,
        "token_weight": layer.token_weight,
        "reduction": "weighted_mean",
        "return_entropy": True,
        "return_lse": True,
    }
    whole, hidden = leaf(layer.hidden), leaf(layer.hidden)
    expected = flce.linear_cross_entropy(whole, dense.bfloat16(), layer.target, bias=layer.bias, **options)
    part = codes[layer.begin : layer.end]
    over = {"bias": layer.mine(layer.bias), "process_group": layer.group, "weight_scale": scale[layer.begin : layer.end]}
    found = flce.linear_cross_entropy(hidden, part, layer.target, **over, **more, **options)
    for got, right in zip(found, expected, strict=True):
        close(got, right)
    for made in (expected, found):
        (made[0] + made[1].sum() - 0.3 * made[2].sum()).backward()
    same_on_every_rank(*found, hidden.grad)
    close(hidden.grad, whole.grad, torch.bfloat16)
    if not layer.hidden.is_cuda:
        classes_of_codes(layer, dense.bfloat16(), part, over | more)


def classes_of_codes(layer: Layer, dense: Tensor, part: Tensor, over: dict[str, Any]) -> None:
    """Log-probabilities of named classes, and the most likely ones, of codes; `over`: what a call is told of ranks and scales."""
    ids = torch.randint(0, VOCAB, (*layer.target.shape, 5), generator=generator(10))
    for normalize in ("vocabulary", "support"):
        whole, hidden = leaf(layer.hidden), leaf(layer.hidden)
        expected = flce.linear_logprobs_at(whole, dense, ids, bias=layer.bias, normalize=normalize)
        found = flce.linear_logprobs_at(hidden, part, ids, normalize=normalize, **over)
        for made in (expected, found):
            (made * torch.arange(1, 6)).sum().backward()
        same_on_every_rank(found, hidden.grad)
        close(found, expected)
        close(hidden.grad, whole.grad, torch.bfloat16)
    most, right = flce.linear_topk(layer.hidden, part, 7, **over), flce.linear_topk(layer.hidden, dense, 7, bias=layer.bias)
    same_on_every_rank(*most)
    close(most.logprobs, right.logprobs)
    assert torch.equal(most.ids, right.ids)


def top_k(k: int, dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    options: dict[str, Any] = {"temperature": layer.temperature, "softcap": 5.0}
    expected = flce.linear_topk(layer.hidden, layer.weight, k, bias=layer.bias, **options)
    found = flce.linear_topk(layer.hidden, layer.mine(layer.weight), k, bias=layer.mine(layer.bias), process_group=layer.group, **options)
    same_on_every_rank(*found)
    close(found.lse, expected.lse)
    close(found.logprobs, expected.logprobs)
    # Equal logits lie on several ranks: the smaller class comes first.
    hidden, weight = torch.ones_like(layer.hidden), torch.ones_like(layer.weight)
    weight[::3] = 2
    ties = flce.linear_topk(hidden, layer.mine(weight), k, process_group=layer.group)
    order = weight[:, 0].sort(descending=True, stable=True).indices[:k]
    assert torch.equal(ties.ids, order.expand_as(ties.ids))


CASES: list[tuple[Any, ...]] = [
    *((divergence, beta, torch.float32, form) for beta in (0.0, 0.4, 1.0) for form in ("plain", "everything", "hidden-major")),
    *((divergence, beta, torch.bfloat16, "everything") for beta in (0.0, 0.4, 1.0)),
    *((divergence_of_few_classes, of_rank) for of_rank in (0, 1)),
    *((given_on_some_ranks, warm) for warm in (False, True)),
    *((top_k, k, dtype) for k in (1, 64, 150) for dtype in (torch.float32, torch.bfloat16)),
    *((quantized, form) for form in ("e4m3", "nvfp4")),
    *((distillation, share) for share in (0.0, 0.4)),
    *((distillation_over_tokens, form) for form in ("plain", "second dimension", "DTensors")),
    *((function, sequence) for function in (logprobs_at, several_depths) for sequence in (False, True)),
    *((logprobs_at, sequence, "support") for sequence in (False, True)),
    *((logprobs_at_lists, normalize) for normalize in ("vocabulary", "support")),
]

if __name__ == "__main__":
    run_main(lambda function, *arguments: function(*arguments), lambda: CASES)
