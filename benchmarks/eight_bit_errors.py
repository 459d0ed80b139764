"""Errors of an output layer whose products take 8-bit operands, against fp64 on the same bf16 hidden states and weight.

    python3 benchmarks/eight_bit_errors.py [--shape 512x2048x151936] [--deviations 1,4] [--train SECONDS] [--out FILE.json]

Products and sums are exact here (fp64): what is left is the rounding of operands. A recipe rounds some of them (RECIPES): hidden and weight
for the logits; exponentials E of logits, relative to a reference of their row; weight for grad_hidden = E·W; hidden, with the rows' factors
in it, for grad_weight = Eᵀ·H. The target's element of dz is told apart, minus the sum of the others, in bf16 products of its own.

Layers: random ones, whose logits have the deviations that are asked for, and with --train the last layer of a language model that is
trained for so long on the Python sources that this machine has, with a vocabulary of 32768 (a GPU, `tokenizers`).

Errors are norms of differences to norms. Of grad_hidden also for single rows: the median, and the median of rows whose label has a
probability above 0.9. `lost` is the share of a row's exponentials that come to 0, `saturated` the share of rows with one that is too large.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sysconfig
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
LARGEST = {E4M3: 448.0, E5M2: 57344.0, BF16: 3e38}
MANTISSA = {E4M3: 3, E5M2: 2}
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}  # exponents of normal numbers
FIRST_CLASSES = 1536


def rounded(x: Tensor, dtype: torch.dtype, *, stochastic: bool = False) -> Tensor:
    """x in a type and back, cut off at its largest number."""
    x = x.float().clamp(-LARGEST[dtype], LARGEST[dtype])
    if not stochastic:
        return x.to(dtype).float()
    exponent = torch.frexp(x)[1].sub_(1).clamp_(min=LEAST_EXPONENT[dtype]).sub_(MANTISSA[dtype])
    steps = torch.ldexp(x, -exponent)
    return torch.ldexp(steps.add_(torch.rand_like(steps)).floor_(), exponent).clamp_(-LARGEST[dtype], LARGEST[dtype])


def told(x: Tensor, kind: str) -> Tensor:
    """x as an operand tells it: "exact", or "TYPE SCALES". Scales: one for all ("tensor"), of rows, or of 128 neighbours of a row
    ("block"); powers of 2 for floating-point types."""
    x = x.float()
    if kind == "exact":
        return x
    name, _, scales = kind.partition(" ")
    if scales == "block":
        return told(x.reshape(-1, 128), name + " row").reshape(x.shape)
    largest = (x.abs().amax(1, keepdim=True) if scales == "row" else x.abs().amax()).clamp(min=1e-30)
    if name == "int8":
        return torch.round(x * (127 / largest)) * (largest / 127)
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[name]
    scale = torch.exp2(torch.floor(torch.log2(LARGEST[dtype] / largest)))
    return rounded(x * scale, dtype) / scale


def product(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ in fp64."""
    return a.double() @ b.double().t()


@dataclass(frozen=True)
class Recipe:
    """Operands that are rounded, and how."""

    hidden: str = "exact"  # for logits, as `told` takes it
    weight: str = "exact"
    centred: bool = False  # logits without the weight's mean row and the mean hidden state, whose parts are added in fp32
    target: str = "of the product"  # its logit: "beside": in bf16 where lse has the product's; "replaced": in bf16 in lse as well
    e: torch.dtype | None = None
    reference: str = "lse"  # reference of E: "lse", "largest", "target", or "first": the largest of the target and the first classes
    octaves: int = 0  # by which exponentials are above 1 at their reference
    stochastic: bool = False
    turned: int | None = None  # octaves by which rows, each by its own power of 2, are raised before E is transposed for grad_weight
    weight_back: str = "exact"
    hidden_back: str = "exact"


class Layer:
    """Output layer in fp64, and recipes beside it."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        self.hidden, self.weight, self.target = hidden.float(), weight.float(), target
        self.rows = torch.arange(len(target), device=target.device)
        self.logits = product(hidden, weight)
        self.lse = self.logits.logsumexp(1)
        dz = (self.logits - self.lse[:, None]).exp_()
        self.confident = dz[self.rows, target] > 0.9
        self.largest = dz.amax(1)
        dz[self.rows, target] = 0
        dz[self.rows, target] = -dz.sum(1)
        self.grad_hidden = dz @ self.weight.double()
        self.grad_weight = dz.t() @ self.hidden.double()

    def at_target(self, logits: Tensor) -> Tensor:
        return logits[self.rows, self.target]

    def numbers(self) -> dict[str, float]:
        loss = self.lse - self.at_target(self.logits)
        return {
            "loss": float(loss.mean()),
            "loss_largest": float(loss.max()),
            "logits_deviation": float(self.logits.std(1).mean()),
            "confident_rows": float(self.confident.double().mean()),
            "largest_probability_median": float(self.largest.median()),
            "hidden_largest_to_deviation": float(self.hidden.abs().max() / self.hidden.std()),
            "weight_largest_to_deviation": float(self.weight.abs().max() / self.weight.std()),
        }

    def logits_of(self, recipe: Recipe) -> Tensor:
        if recipe.hidden == "exact" and recipe.weight == "exact":
            return self.logits
        if not recipe.centred:
            return product(told(self.hidden, recipe.hidden), told(self.weight, recipe.weight))
        row, state = self.weight.mean(0), self.hidden.mean(0)
        logits = product(told(self.hidden - state, recipe.hidden), told(self.weight - row, recipe.weight))
        return logits + ((self.weight - row).double() @ state.double()) + (self.hidden.double() @ row.double())[:, None]

    def errors(self, recipe: Recipe) -> dict[str, float]:
        logits = self.logits_of(recipe)
        at_target = self.at_target(logits if recipe.target == "of the product" else self.logits).clone()
        if recipe.target == "replaced":
            logits = logits.index_put((self.rows, self.target), at_target)
        lse = logits.logsumexp(1)
        reference = {
            "lse": lambda: lse,
            "largest": lambda: logits.amax(1),
            "target": lambda: at_target,
            "first": lambda: torch.maximum(at_target, logits[:, :FIRST_CLASSES].amax(1)),
        }[recipe.reference]()
        base = (torch.round(reference / math.log(2)) - recipe.octaves) * math.log(2)
        factor = (base - lse).exp()
        e = (logits - base[:, None]).float().exp_()
        e[self.rows, self.target] = 0
        total = e.sum(1, dtype=torch.float64)
        of_target = torch.expm1(at_target - lse) if recipe.target == "beside" else -total * factor
        saturated = lost = 0.0
        if recipe.e is not None:
            saturated = float((e > LARGEST[recipe.e]).any(1).double().mean())
            kept = rounded(e, recipe.e, stochastic=recipe.stochastic)
            lost = float((torch.where(kept == 0, e, 0).sum(1, dtype=torch.float64) / total.clamp(min=1e-300)).mean())
            e = kept
        found = {
            "loss": float(((lse - at_target).mean() / (self.lse - self.at_target(self.logits)).mean() - 1).abs()),
            "lse_rms": float((lse - self.lse).square().mean().sqrt()),
        }
        found |= self.errors_back(recipe, e, factor, of_target)
        return found | {"lost": lost, "saturated": saturated}

    def errors_back(self, recipe: Recipe, e: Tensor, factor: Tensor, of_target: Tensor) -> dict[str, float]:
        """Errors of gradients, of exponentials and their rows' factors."""
        grad_hidden = e.double() @ told(self.weight, recipe.weight_back).double()
        grad_hidden *= factor[:, None]
        grad_hidden += of_target[:, None] * self.weight[self.target].double()
        of_row = (grad_hidden - self.grad_hidden).norm(dim=1) / self.grad_hidden.norm(dim=1)
        if recipe.turned is not None and recipe.e is not None:
            raised = torch.exp2(torch.round(torch.log2(factor)) + recipe.turned)
            e = rounded(e.double() * raised[:, None], recipe.e)
            factor = factor / raised
        back = told(self.hidden * factor.float()[:, None], recipe.hidden_back)
        grad_weight = e.double().t() @ back.double()
        grad_weight.index_add_(0, self.target, of_target[:, None] * self.hidden.double())
        return {
            "grad_hidden": relative(grad_hidden, self.grad_hidden),
            "grad_hidden_row": float(of_row.median()),
            "grad_hidden_confident": float(of_row[self.confident].median()) if self.confident.any() else math.nan,
            "grad_weight": relative(grad_weight, self.grad_weight),
        }


def relative(got: Tensor, true: Tensor) -> float:
    return float((got - true).norm() / true.norm())


LOGITS = {
    "e4m3 logits": Recipe("e4m3 tensor", "e4m3 tensor"),
    "int8 logits": Recipe("int8 row", "int8 row"),
    "bf16 logits": Recipe(),
}
EXPONENTIALS = {
    "E e4m3 of largest": Recipe(e=E4M3, reference="largest", octaves=8),
    "E e5m2 of largest": Recipe(e=E5M2, reference="largest", octaves=15),
    "E e5m2 of target": Recipe(e=E5M2, reference="target"),
    "E e5m2 of first": Recipe(e=E5M2, reference="first", octaves=5),
}


def recipes() -> dict[str, Recipe]:
    e4m3, int8 = LOGITS["e4m3 logits"], LOGITS["int8 logits"]
    replace = dataclasses.replace
    found = {
        "E bf16 of target (the bf16 layer)": Recipe(e=BF16, reference="target"),
        "e4m3 logits alone": e4m3,
        "  its hidden alone": replace(e4m3, weight="exact"),
        "  scales of rows": Recipe("e4m3 row", "e4m3 row"),
        "  scales of blocks": Recipe("e4m3 block", "e4m3 block"),
        "  centred": replace(e4m3, centred=True),
        "  target replaced": replace(e4m3, target="replaced"),
        "  target beside": replace(e4m3, target="beside"),
        "int8 logits alone": int8,
        "  scales of blocks, int8": Recipe("int8 block", "int8 block"),
        "  centred, int8": replace(int8, centred=True),
        "  one scale of the weight": replace(int8, weight="int8 tensor"),
        "E e4m3 of lse": Recipe(e=E4M3, octaves=8),
        "E e4m3 of target": Recipe(e=E4M3, reference="target"),
        "E e4m3 of first": Recipe(e=E4M3, reference="first", octaves=3),
        "E e4m3 of largest, stochastic": replace(EXPONENTIALS["E e4m3 of largest"], stochastic=True),
        **EXPONENTIALS,
        "weight back e4m3": Recipe(weight_back="e4m3 tensor"),
        "hidden back e4m3, of largest": Recipe(reference="largest", hidden_back="e4m3 tensor"),
        "hidden back e4m3, of target": Recipe(reference="target", hidden_back="e4m3 tensor"),
        "hidden back e5m2, of target": Recipe(reference="target", hidden_back="e5m2 tensor"),
    }
    for logits, of_logits in LOGITS.items():
        for exponentials, of_e in EXPONENTIALS.items():
            whole = replace(of_e, hidden=of_logits.hidden, weight=of_logits.weight, weight_back="e4m3 tensor", hidden_back="e4m3 tensor")
            if of_e.reference == "target":
                found[f"{logits}, {exponentials}, turned"] = replace(whole, turned=12)
                whole = replace(whole, hidden_back="e5m2 tensor")
            found[f"{logits}, {exponentials}"] = whole
    return found


def table(name: str, layer: Layer) -> dict[str, Any]:
    found: dict[str, Any] = {"layer": layer.numbers(), "errors": {}}
    print(f"## {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found["layer"].items()))
    print(f"{'':35}loss    lse_rms gh     gh row confid gw     lost    sat")
    for recipe, how in recipes().items():
        e = layer.errors(how)
        found["errors"][recipe] = e
        print(
            f"{recipe:34} {e['loss']:.1e} {e['lse_rms']:.1e} {e['grad_hidden']:.4f} {e['grad_hidden_row']:.4f} "
            f"{e['grad_hidden_confident']:.4f} {e['grad_weight']:.4f} {e['lost']:.1e} {e['saturated']:.3f}",
            flush=True,
        )
    return found


def random_layer(tokens: int, depth: int, classes: int, deviation: float, device: str) -> Layer:
    """Normal hidden states and weight. Labels of half of the tokens are drawn from the layer's own probabilities, the others evenly."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, depth, device=device).bfloat16()
    weight = (torch.randn(classes, depth, device=device) * deviation * depth**-0.5).bfloat16()
    drawn = torch.cat([torch.multinomial((part.float() @ weight.float().t()).softmax(1), 1)[:, 0] for part in hidden.split(256)])
    target = torch.where(torch.rand(tokens, device=device) < 0.5, drawn, torch.randint(0, classes, (tokens,), device=device))
    return Layer(hidden, weight, target)


def tokens_of_sources(megabytes: int, vocab_size: int) -> Tensor:
    """Python sources of this machine's packages, as tokens of a byte-level BPE that is trained on a third of them."""
    from tokenizers import ByteLevelBPETokenizer

    texts: list[str] = []
    size = 0
    roots = {Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent.parent}
    for path in sorted({path for root in roots for path in root.rglob("*.py")}, key=lambda path: zlib.crc32(str(path).encode())):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if 200 < len(text) < 400_000:
            texts.append(text)
            size += len(text)
        if size > megabytes << 20:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[: max(1, len(texts) // 3)], vocab_size=vocab_size, min_frequency=2, show_progress=False)
    tokens = torch.cat([torch.tensor(one.ids, dtype=torch.int32) for one in tokenizer.encode_batch(texts)])
    print(f"{len(texts)} files, {size >> 20} MiB, {len(tokens)} tokens", flush=True)
    return tokens


class Block(torch.nn.Module):
    def __init__(self, depth: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.RMSNorm(depth), torch.nn.RMSNorm(depth)
        self.qkv = torch.nn.Linear(depth, 3 * depth, bias=False)
        self.out = torch.nn.Linear(depth, depth, bias=False)
        self.up = torch.nn.Linear(depth, 4 * depth, bias=False)
        self.down = torch.nn.Linear(4 * depth, depth, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        y = torch.nn.functional.gelu(self.up(self.second(x)))
        z: Tensor = x + self.down(y)
        return z


class Model(torch.nn.Module):
    def __init__(self, vocab_size: int, depth: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, depth)
        self.position = torch.nn.Embedding(length, depth)
        self.blocks = torch.nn.Sequential(*(Block(depth, depth // 64) for _ in range(layers)))
        self.norm = torch.nn.RMSNorm(depth)
        self.head = torch.nn.Linear(depth, vocab_size, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.blocks(self.embedding(x) + self.position.weight[: x.shape[1]]))
        return y


def trained_layer(tokens: Tensor, vocab_size: int, depth: int, seconds: float, device: str, rows: int = 1024) -> Layer:
    torch.manual_seed(0)
    length, batch = 512, 32
    model = Model(vocab_size, depth, 4, length).to(device)
    data = tokens.to(device).long()
    held = data[-64 * (length + 1) :].view(-1, length + 1)
    data = data[: -held.numel()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")

    def loss_of(part: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model.head(model(part[:, :-1]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())

    begin, step = time.monotonic(), 0
    while (spent := time.monotonic() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * max(0.02, 1 - spent / seconds)
        at = torch.randint(0, len(data) - length - 1, (batch, 1), device=device) + torch.arange(length + 1, device=device)
        loss = loss_of(data[at])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if step % 20 == 0:
            loss.item()  # launches do not run ahead
    with torch.no_grad():
        print(f"trained: {step} steps, {spent:.0f} s, loss {float(loss):.3f}, held out {float(loss_of(held[:16])):.3f}", flush=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model(held[:, :-1]).flatten(0, 1).bfloat16()
    pick = torch.randperm(len(hidden), device=device)[:rows]
    return Layer(hidden[pick], model.head.weight.detach().bfloat16(), held[:, 1:].flatten()[pick])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512x2048x151936", help="tokens x hidden size x classes of random layers")
    parser.add_argument("--deviations", default="1,4", help="of random layers' logits")
    parser.add_argument("--train", type=float, default=0, help="seconds to train a model for")
    parser.add_argument("--depth", type=int, default=1024, help="its hidden size")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--megabytes", type=int, default=64, help="of sources")
    parser.add_argument("--tokens", type=Path, help="a file of tokens: read, or with --tokenize written")
    parser.add_argument("--tokenize", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.tokenize:
        torch.save(tokens_of_sources(arguments.megabytes, arguments.vocabulary), arguments.tokens)
        return
    found: dict[str, Any] = {}

    def keep(name: str, layer: Layer) -> None:
        found[name] = table(name, layer)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    if arguments.train:
        tokens = torch.load(arguments.tokens) if arguments.tokens else tokens_of_sources(arguments.megabytes, arguments.vocabulary)
        layer = trained_layer(tokens, arguments.vocabulary, arguments.depth, arguments.train, device)
        keep(f"trained {arguments.depth}x{arguments.vocabulary}", layer)
        del layer
    num_tokens, depth, classes = (int(x) for x in arguments.shape.split("x"))
    for deviation in (float(x) for x in arguments.deviations.split(",") if x):
        keep(f"random {arguments.shape}, deviation {deviation:g}", random_layer(num_tokens, depth, classes, deviation, device))


if __name__ == "__main__":
    main()
