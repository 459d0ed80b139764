"""flce.info_nce beside what else computes a contrastive loss, and beside the bare GEMMs of its arithmetic, in one process and in an order
drawn anew.

    python3 benchmarks/info_nce.py [--shape 65536x65536x1024] [--forms plain,learned,symmetric,both] [--seconds 20] [--out FILE.json]
    python3 benchmarks/info_nce.py --inf-cl FOLDER      # a folder that has Inf-CL's package `inf_cl`, 25 kB of Python
    python3 benchmarks/info_nce.py --shape 256x256x256 --device cpu --seconds 0   # tries the script; its times say nothing

A shape is queries x documents x dimensions. Forward and backward in bf16 of row i's query and document i, each step behind the floor, so
that every step finds the GPU's clocks as it leaves them. A form says whether the scale is learned (learned, both) and whether documents
look for their queries too (symmetric, both).

Floors are torch.matmul's products alone, a stretch of queries at a time, in whose bf16 scores the whole [N, M] never exists. One way has
2·N·M·D operations for forward's scores, as many for those that backward computes again, and 4·N·M·D for two gradients: "GEMMs". Symmetric
flce is two ways, each with scores and gradients of its own, so its "GEMMs" are twice as many. "GEMMs of one walk" are those of an
arithmetic that takes both ways' sums from the same scores, as many as one way has; flce has no such arithmetic.

Peers: torch's cross entropy of whole scores (a bf16 product, then fp32), torch.compile of it, GradCache's loss as sentence-transformers'
CachedMultipleNegativesRankingLoss computes it (some queries at a time, each with a backward of its own; dot products, all in bf16),
Inf-CL's kernels, and open_clip's ClipLoss, whose scores are bf16. The table has medians: milliseconds, ratios to floors, peak memory
beyond inputs and their gradients, and errors relative to fp32 scores: of the loss, of the scale's gradient, and of gradients of 64 queries
and 64 documents. Positives have a score of log M, so that the loss is near 1.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import add_report_arguments, peak_of, reason, rounds_of, save, timed
from torch import Tensor

import flce

FLOOR, RETAINED_FLOOR, ONE_WALK = "GEMMs", "GEMMs, scores of backward left out", "GEMMs of one walk"
FORMS = {"plain": (False, False), "learned": (True, False), "symmetric": (False, True), "both": (True, True)}
CHECKED = 64
STRETCH_BYTES = 1 << 30
Result = tuple[Tensor, list[Tensor]]  # a loss, and gradients of queries, documents and a learned scale


@dataclass
class Batch:
    """Normalised embeddings of pairs, of documents that belong to no query beyond the N-th, and what the scores are multiplied by."""

    queries: Tensor
    documents: Tensor
    scale: Tensor | float
    symmetric: bool

    @classmethod
    def drawn(cls, shape: str, scale: float, device: str, form: str) -> Batch:
        count, documents, size = map(int, shape.split("x"))
        learned, symmetric = FORMS[form]
        torch.manual_seed(0)
        of_documents = torch.randn(documents, size, device=device)
        cosine = min(math.log(documents) / scale, 0.9)
        of_queries = of_documents[:count] + math.sqrt(cosine**-2 - 1) * torch.randn(count, size, device=device)
        queries, documents = (F.normalize(each, dim=1).bfloat16().requires_grad_() for each in (of_queries, of_documents))
        return cls(queries, documents, torch.tensor(scale, device=device, requires_grad=True) if learned else scale, symmetric)

    def inputs(self) -> list[Tensor]:
        return [self.queries, self.documents, *([self.scale] if isinstance(self.scale, Tensor) else [])]

    def number(self) -> float:
        return self.scale.item() if isinstance(self.scale, Tensor) else self.scale

    def positives(self) -> Tensor:
        return torch.arange(len(self.queries), device=self.queries.device)

    def gradients(self, loss: Tensor) -> Result:
        return loss.detach(), list(torch.autograd.grad(loss, self.inputs()))


# ── What is measured ────────────────────────────────


def fused(**options: Any) -> Callable[[Batch], Result]:
    def run(batch: Batch) -> Result:
        return batch.gradients(flce.info_nce(batch.queries, batch.documents, scale=batch.scale, symmetric=batch.symmetric, **options))

    return run


def loss_of_scores(queries: Tensor, documents: Tensor, scale: Tensor | float, symmetric: bool) -> Tensor:
    """Cross entropy of whole scores in fp32, of products in bf16."""
    scores = scale * (queries @ documents.T).float()
    positives = torch.arange(len(queries), device=queries.device)
    loss = F.cross_entropy(scores, positives)
    return (loss + F.cross_entropy(scores[:, : len(queries)].T, positives)) / 2 if symmetric else loss


def whole(compiled: bool) -> Callable[[Batch], Result]:
    loss = torch.compile(loss_of_scores) if compiled else loss_of_scores
    return lambda batch: batch.gradients(loss(batch.queries, batch.documents, batch.scale, batch.symmetric))


def grad_cache(rows: int) -> Callable[[Batch], Result]:
    """Computes a loss of `rows` queries at a time with sentence-transformers' arithmetic, and its backward before the next. Scores, their
    logsumexp and the sums of documents' gradients are in the embeddings' dtype. The package's scale is a number; a learned one is a further
    input."""

    def run(batch: Batch) -> Result:
        inputs = [each.detach().requires_grad_() for each in batch.inputs()]
        queries, documents, scale = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else batch.scale
        count, losses = len(queries), []
        for begin in range(0, count, rows):
            own = batch.positives()[begin : begin + rows]
            scores = queries[own] @ documents.T * scale
            log_z = torch.logsumexp(scores, dim=1)
            if batch.symmetric:
                log_z = (log_z + torch.logsumexp((queries @ documents[own].T).T * scale, dim=1)) / 2
            positive = scores[torch.arange(len(own), device=own.device), own]
            loss = (log_z - positive).mean() * len(own) / count
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(), [each.grad for each in inputs if each.grad is not None]

    return run


def inf_cl(folder: str | None) -> Callable[[Batch], Result]:
    """Inf-CL's kernels on one GPU, which are its cal_flash_loss: cal_inf_loss has the same without a process group, but for a learned
    scale, whose gradient it always sums over ranks. Kernels read fp32 copies, in heads whose sizes are powers of two."""
    if folder is not None:
        sys.path.insert(0, folder)
    package = importlib.import_module("inf_cl")

    def run(batch: Batch) -> Result:
        head = math.gcd(batch.queries.shape[1], 256)
        one = lambda rows, classes: package.cal_flash_loss(rows, classes, batch.positives(), batch.scale, head).mean()  # noqa: E731
        loss = one(batch.queries, batch.documents)
        if batch.symmetric:
            loss = (loss + one(batch.documents[: len(batch.queries)], batch.queries)) / 2
        return batch.gradients(loss)

    return run


def clip_loss(queries: Tensor, documents: Tensor, scale: Tensor | float) -> Tensor:
    """The arithmetic of open_clip's ClipLoss on one GPU, which computes the scores of each way."""
    labels = torch.arange(len(queries), device=queries.device)
    ways = (scale * queries @ documents.T, scale * documents @ queries.T)
    return (F.cross_entropy(ways[0], labels) + F.cross_entropy(ways[1], labels)) / 2


def open_clip(own: Callable[..., Tensor] | None) -> Callable[[Batch], Result]:
    def run(batch: Batch) -> Result:
        if not batch.symmetric:
            raise ValueError("ClipLoss is symmetric")
        if batch.queries.shape != batch.documents.shape:
            raise ValueError("ClipLoss has a document for each query")
        return batch.gradients((own or clip_loss)(batch.queries, batch.documents, batch.scale))

    return run


def open_clips_own() -> Callable[..., Tensor] | None:
    try:
        made: Callable[..., Tensor] = importlib.import_module("open_clip.loss").ClipLoss()
    except ImportError:
        return None
    return made


def contenders(folder: str | None) -> dict[str, Callable[[], Callable[[Batch], Result]]]:
    """Makers of each step. A maker raises where its package is missing."""
    return {
        "flce": fused,
        "flce in 1 GiB": lambda: fused(workspace_limit_bytes=1 << 30),
        "flce all retained": lambda: fused(workspace_limit_bytes=1 << 40),
        "flce in blocks of 8192": lambda: fused(documents_per_block=8192),  # has the same bits on every number of ranks
        "torch": lambda: whole(compiled=False),
        "torch.compile": lambda: whole(compiled=True),
        "GradCache of 32 rows": lambda: grad_cache(32),  # the package's default
        "GradCache of 1024 rows": lambda: grad_cache(1024),
        "Inf-CL": lambda: inf_cl(folder),
        "ClipLoss": lambda: open_clip(open_clips_own()),
    }


# ── Floors ──────────────────────────────────────────


class Gemms:
    """Products of one way, a stretch of queries at a time."""

    def __init__(self, batch: Batch) -> None:
        self.queries, self.documents = batch.queries.detach(), batch.documents.detach()
        count, size = self.queries.shape
        rows = max(1, min(count, STRETCH_BYTES // (2 * len(self.documents))))
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": self.queries.device}
        self.scores = torch.empty(rows, len(self.documents), **like)
        self.dscores = torch.randn(rows, len(self.documents), **like)
        self.grad_queries, self.grad_documents = torch.empty(rows, size, **like), torch.zeros(len(self.documents), size, **like)
        self.stretches = [slice(begin, min(begin + rows, count)) for begin in range(0, count, rows)]

    def of_scores(self, stretch: slice) -> None:
        rows = self.queries[stretch]
        torch.mm(rows, self.documents.T, out=self.scores[: len(rows)])

    def forward(self) -> None:
        for stretch in self.stretches:
            self.of_scores(stretch)

    def backward(self, scores_again: bool) -> None:
        for stretch in self.stretches:
            if scores_again:
                self.of_scores(stretch)
            rows = self.queries[stretch]
            dscores = self.dscores[: len(rows)]
            torch.mm(dscores, self.documents, out=self.grad_queries[: len(rows)])
            self.grad_documents.addmm_(dscores.T, rows, beta=0 if stretch.start == 0 else 1)

    def run(self, ways: int, scores_again: bool = True) -> None:
        for _ in range(ways):
            self.forward()
            self.backward(scores_again)


def floors(batch: Batch) -> dict[str, Callable[[], Any]]:
    gemms, ways = Gemms(batch), 2 if batch.symmetric else 1
    made = {FLOOR: lambda: gemms.run(ways), RETAINED_FLOOR: lambda: gemms.run(ways, scores_again=False)}
    return {**made, ONE_WALK: lambda: gemms.run(1)} if batch.symmetric else made


def operations(batch: Batch) -> dict[str, int]:
    """Operations of each floor."""
    once, ways = batch.queries.shape[0] * batch.documents.shape[0] * batch.queries.shape[1], 2 if batch.symmetric else 1
    return {FLOOR: ways * 8 * once, RETAINED_FLOOR: ways * 6 * once, **({ONE_WALK: 8 * once} if batch.symmetric else {})}


# ── What is right ───────────────────────────────────


class Way:
    """Exact numbers of one way: each row's log Σ exp, its loss, and the mean score of its softmax, in fp32 rows of scores."""

    def __init__(self, rows: Tensor, classes: Tensor, scale: float) -> None:
        self.rows, self.classes, self.scale = rows, classes, scale
        step = max(1, STRETCH_BYTES // (4 * len(classes)))
        parts = [self._of(begin, rows[begin : begin + step]) for begin in range(0, len(rows), step)]
        self.lse, self.own, self.mean = (torch.cat(each).double() for each in zip(*parts, strict=True))
        self.loss = (self.lse - self.scale * self.own).mean()
        self.grad_scale = (self.mean - self.own).mean()

    def _of(self, begin: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = rows @ self.classes.T
        lse = (self.scale * scores).logsumexp(1)
        mean = ((self.scale * scores - lse[:, None]).exp_() * scores).sum(1)
        return lse, scores.diagonal(begin).clone(), mean

    def grad_rows(self, some: Tensor) -> Tensor:
        probs = (self.scale * self.rows[some] @ self.classes.T - self.lse[some, None]).exp()
        return self.scale / len(self.rows) * (probs @ self.classes.double() - self.classes[some])

    def grad_classes(self, some: Tensor) -> Tensor:
        probs = (self.scale * self.classes[some] @ self.rows.T - self.lse).exp()
        own = torch.where((some < len(self.rows))[:, None], self.rows[some.clamp(max=len(self.rows) - 1)], 0)
        return self.scale / len(self.rows) * (probs @ self.rows.double() - own)


class Exact:
    """The loss and sampled rows of its gradients."""

    def __init__(self, batch: Batch) -> None:
        queries, documents = batch.queries.detach().float(), batch.documents.detach().float()
        ways = [Way(queries, documents, batch.number())]
        make = torch.Generator().manual_seed(1)
        self.of_queries, self.of_documents = (
            torch.randperm(len(each), generator=make)[:CHECKED].to(each.device) for each in (queries, documents)
        )
        grads = [(ways[0].grad_rows(self.of_queries), ways[0].grad_classes(self.of_documents))]
        if batch.symmetric:
            ways.append(Way(documents[: len(queries)], queries, batch.number()))
            drawn = self.of_documents < len(queries)
            of_documents = torch.zeros_like(grads[0][1])
            of_documents[drawn] = ways[1].grad_rows(self.of_documents[drawn])
            grads.append((ways[1].grad_classes(self.of_queries), of_documents))
        self.grads = [sum(each) / len(ways) for each in zip(*grads, strict=True)]
        self.loss = sum(way.loss for way in ways) / len(ways)
        self.grad_scale = sum(way.grad_scale for way in ways) / len(ways)

    def errors(self, result: Result) -> dict[str, float]:
        loss, grads = result
        some = {"grad_queries": grads[0][self.of_queries], "grad_documents": grads[1][self.of_documents]}
        found = {"loss": float((loss.double() - self.loss).abs() / self.loss)}
        for (name, got), right in zip(some.items(), self.grads, strict=True):
            found[name] = float((got.double() - right).norm() / right.norm())
        if len(grads) > 2:
            found["grad_scale"] = float((grads[2].double() - self.grad_scale).abs() / self.grad_scale.abs())
        return found


# ── Measuring ───────────────────────────────────────


def milliseconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        return timed(step)
    begin = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begin)


def time_of(name: str, steps: dict[str, Callable[[], Any]], rows: dict[str, Any], device: str) -> float:
    """Milliseconds of a step behind the floor. A step that has no room is left out from then on."""
    steps[RETAINED_FLOOR]()
    try:
        return milliseconds(steps[name], device)
    except torch.OutOfMemoryError as error:
        rows[name]["reason"] = reason(error)
        del steps[name]
        torch.cuda.empty_cache()
        return math.nan


def measured(form: str, arguments: argparse.Namespace) -> dict[str, Any]:
    batch = Batch.drawn(arguments.shape, arguments.scale, arguments.device, form)
    exact, rows = Exact(batch), {}
    gradients = sum(each.numel() * each.element_size() for each in batch.inputs())
    steps: dict[str, Callable[[], Any]] = dict(floors(batch))
    makers = contenders(arguments.inf_cl)
    for name in arguments.contenders.split(",") if arguments.contenders else makers:
        try:
            made = makers[name]()
            rows[name] = {"errors": exact.errors(made(batch))}
            run = lambda made=made: made(batch)  # noqa: E731
            if arguments.device == "cuda":
                rows[name]["memory_bytes"] = peak_of(run) - gradients
            steps[name] = run
        except Exception as error:
            rows[name] = {"reason": reason(error)}
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    found = rounds_of(steps, arguments.seconds, lambda name: time_of(name, steps, rows, arguments.device))
    for name in steps:
        rows.setdefault(name, {})["milliseconds"] = statistics.median(one[name] for one in found)
    for name, count in operations(batch).items():
        rows[name]["operations"] = count
    for name, row in rows.items():
        if "milliseconds" in row:
            row["ratio"] = row["milliseconds"] / rows[FLOOR]["milliseconds"]
            if ONE_WALK in rows:
                row["ratio to one walk"] = row["milliseconds"] / rows[ONE_WALK]["milliseconds"]
        shown = {key: (f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items()}
        print(f"{form:10} {name:36} {shown}", flush=True)
    return {"learned scale": FORMS[form][0], "symmetric": FORMS[form][1], "rounds": len(found), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="65536x65536x1024", help="queries x documents x dimensions")
    parser.add_argument("--forms", default=",".join(FORMS), help="names, separated by commas")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--contenders", help="names, separated by commas (default: all)")
    parser.add_argument("--inf-cl", help="the folder that has Inf-CL's package, where PYTHONPATH has not")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=20, help="time to measure a form, about (default: 20)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device")
    own = "its own" if open_clips_own() is not None else "written out, open_clip is not installed"
    forms: dict[str, Any] = {}
    for form in arguments.forms.split(","):
        forms[form] = measured(form, arguments)
        # After each, so that a run that is cut short leaves some.
        save(arguments, {"shape": arguments.shape, "scale": arguments.scale, "ClipLoss": own, "forms": forms})


if __name__ == "__main__":
    main()
