"""Peers that flce.compat stands in for, and readers of both signatures.

A peer's is read from the source of its installed package, without importing it (most need a GPU or triton), or, where no release has the
function, from a declaration here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flce.compat import cce, liger, prime_rl, quack, sentence_transformers, skyrl, torchtune, verl

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = "(required)"
_OF_THE_INSTANCE = ("self", "cls", "ctx")


class Argument(NamedTuple):
    name: str
    kind: str  # name of a kind of inspect.Parameter
    default: Any = REQUIRED


def of_callable(function: Callable[..., Any]) -> list[Argument]:
    """The arguments of a function, or of a class's constructor."""
    parameters = inspect.signature(function).parameters.values()
    defaults = [REQUIRED if p.default is p.empty else getattr(p.default, "__name__", p.default) for p in parameters]
    arguments = [Argument(p.name, p.kind.name, default) for p, default in zip(parameters, defaults, strict=True)]
    return arguments[arguments[:1] != [] and arguments[0].name in _OF_THE_INSTANCE :]


def of_source(source: str, name: str) -> list[Argument]:
    """The arguments of `name`, a function, "Class.method" or a dataclass, defined at the top level of `source`."""
    module = ast.parse(source)
    *classes, last = name.split(".")
    body: list[ast.stmt] = module.body
    for each in classes:
        body = _last(body, each, ast.ClassDef).body
    found = _last(body, last, (ast.FunctionDef, ast.ClassDef))
    constants = {
        target.id: statement.value
        for statement in module.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }

    def value(node: ast.expr | None) -> Any:
        if isinstance(node, ast.Name) and node.id in constants:
            node = constants[node.id]
        if isinstance(node, ast.Name):
            return node.id
        return REQUIRED if node is None else ast.literal_eval(node)

    if isinstance(found, ast.ClassDef):
        fields = [statement for statement in found.body if isinstance(statement, ast.AnnAssign)]
        return [Argument(ast.unparse(field.target), "POSITIONAL_OR_KEYWORD", value(field.value)) for field in fields]
    return _of_definition(found.args, value)


def _of_definition(given: ast.arguments, value: Callable[[ast.expr | None], Any]) -> list[Argument]:
    named = [(each, "POSITIONAL_ONLY") for each in given.posonlyargs] + [(each, "POSITIONAL_OR_KEYWORD") for each in given.args]
    defaults: list[ast.expr | None] = [None] * (len(named) - len(given.defaults)) + list(given.defaults)
    arguments = [Argument(each.arg, kind, value(default)) for (each, kind), default in zip(named, defaults, strict=True)]
    if given.vararg is not None:
        arguments.append(Argument(given.vararg.arg, "VAR_POSITIONAL"))
    arguments += [Argument(each.arg, "KEYWORD_ONLY", value(d)) for each, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        arguments.append(Argument(given.kwarg.arg, "VAR_KEYWORD"))
    return arguments[arguments[:1] != [] and arguments[0].name in _OF_THE_INSTANCE :]


def _last(body: list[ast.stmt], name: str, kinds: Any) -> Any:
    """Overloads come before what they are of."""
    found = [statement for statement in body if isinstance(statement, kinds) and statement.name == name]
    if not found:
        raise LookupError(f"there is no {name}")
    return found[-1]


def versions() -> dict[str, str]:
    """Each package of tools/peers.txt and its version."""
    lines = (ROOT / "tools/peers.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def installed(package: str) -> importlib.metadata.Distribution | None:
    """The package's distribution in .tools/peers, or else wherever this interpreter finds it."""
    for folder in ([str(ROOT / ".tools/peers")], sys.path):
        for distribution in importlib.metadata.Distribution.discover(name=package, path=folder):
            return distribution
    return None


class StandIn(NamedTuple):
    function: Callable[..., Any]
    package: str  # PyPI's, or the repository and commit that the declaration below is of
    file: str  # in the package; "" for the declaration
    name: str

    @property
    def label(self) -> str:
        return f"{self.package.split('@')[0]}:{self.name}"


_MODULE = "liger_kernel/transformers/fused_linear_cross_entropy.py"
_FUNCTIONAL = "liger_kernel/transformers/functional.py"
RELEASED = [
    StandIn(liger.LigerFusedLinearCrossEntropyLoss.__init__, "liger-kernel", _MODULE, "LigerFusedLinearCrossEntropyLoss.__init__"),
    StandIn(liger.LigerFusedLinearCrossEntropyLoss.forward, "liger-kernel", _MODULE, "LigerFusedLinearCrossEntropyLoss.forward"),
    StandIn(liger.liger_fused_linear_cross_entropy, "liger-kernel", _FUNCTIONAL, "liger_fused_linear_cross_entropy"),
    StandIn(liger.CrossEntropyOutput, "liger-kernel", _FUNCTIONAL, "CrossEntropyOutput"),
    StandIn(
        liger.LigerFusedLinearCrossEntropyFunction.apply,
        "liger-kernel",
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        "LigerFusedLinearCrossEntropyFunction.forward",
    ),
    StandIn(
        liger.LigerFusedLinearJSD.__init__, "liger-kernel", "liger_kernel/transformers/fused_linear_jsd.py", "LigerFusedLinearJSD.__init__"
    ),
    StandIn(
        liger.LigerFusedLinearJSD.forward, "liger-kernel", "liger_kernel/transformers/fused_linear_jsd.py", "LigerFusedLinearJSD.forward"
    ),
    StandIn(liger.liger_fused_linear_jsd, "liger-kernel", _FUNCTIONAL, "liger_fused_linear_jsd"),
    StandIn(
        liger.LigerFusedLinearJSDFunction.apply,
        "liger-kernel",
        "liger_kernel/ops/fused_linear_jsd.py",
        "LigerFusedLinearJSDFunction.forward",
    ),
    StandIn(quack.chunked_linear_cross_entropy, "quack-kernels", "quack/linear_cross_entropy.py", "chunked_linear_cross_entropy"),
    StandIn(
        sentence_transformers.MultipleNegativesRankingLoss.__init__,
        "sentence-transformers",
        "sentence_transformers/sentence_transformer/losses/multiple_negatives_ranking.py",
        "MultipleNegativesRankingLoss.__init__",
    ),
    StandIn(verl.linear_cross_entropy, "verl", "verl/utils/kernel/linear_cross_entropy.py", "LinearCrossEntropy.forward"),
]

_CCE = "apple/ml-cross-entropy@d42911f"  # 25.6.4
_TORCHTUNE = "pytorch/torchtune@bd2a0fc"
_VERL = "verl-project/verl@c8bb9d4"
_PRIME_RL = "PrimeIntellect-ai/prime-rl@2893045"
_SKYRL = "kvnloo/SkyRL@dfd9f3d"  # a fork with NovaSky-AI/SkyRL's open pull requests up to #2241
DECLARED = [
    StandIn(cce.linear_cross_entropy, _CCE, "", "linear_cross_entropy"),
    StandIn(cce.LinearCrossEntropy.__init__, _CCE, "", "LinearCrossEntropy.__init__"),
    StandIn(cce.LinearCrossEntropy.forward, _CCE, "", "LinearCrossEntropy.forward"),
    StandIn(cce.VocabParallelOptions, _CCE, "", "VocabParallelOptions"),
    StandIn(cce.VocabParallelOptions.from_vocab, _CCE, "", "VocabParallelOptions.from_vocab"),
    StandIn(cce.compute_z_loss, _CCE, "", "compute_z_loss"),
    StandIn(torchtune.LinearCrossEntropyLoss.__init__, _TORCHTUNE, "", "LinearCrossEntropyLoss.__init__"),
    StandIn(torchtune.LinearCrossEntropyLoss.set_model_output, _TORCHTUNE, "", "LinearCrossEntropyLoss.set_model_output"),
    StandIn(torchtune.LinearCrossEntropyLoss.forward, _TORCHTUNE, "", "LinearCrossEntropyLoss.forward"),
    StandIn(torchtune.LinearCrossEntropyLoss.apply_compile_strategy, _TORCHTUNE, "", "LinearCrossEntropyLoss.apply_compile_strategy"),
    StandIn(torchtune.LinearCrossEntropyLoss.patch_tp_plan, _TORCHTUNE, "", "LinearCrossEntropyLoss.patch_tp_plan"),
    StandIn(verl.linear_topk_log_probs, _VERL, "", "linear_topk_log_probs"),
    StandIn(prime_rl.FusedOutputLinear.__init__, _PRIME_RL, "", "FusedOutputLinear.__init__"),
    StandIn(prime_rl.FusedOutputLinear.forward, _PRIME_RL, "", "FusedOutputLinear.forward"),
    StandIn(skyrl.SampleSupportScores, _SKYRL, "", "SampleSupportScores"),
    StandIn(skyrl.sample_support_scores, _SKYRL, "", "sample_support_scores"),
]
DECLARATIONS = """
def linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False, filter_eps="auto",
    accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True, impl="cce", vocab_parallel_options=None,
): ...

class LinearCrossEntropy:
    def __init__(
        self, ignore_index=-100, softcap=None, reduction="mean", shift=0, filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False,
        filter_e_grad=True, filter_c_grad=True, impl="cce", return_lse=False,
    ): ...
    def forward(self, e, c, targets, bias=None): ...

class VocabParallelOptions:
    start: int
    stop: int
    group: object = None
    reduce_e_grad: bool = True
    def from_vocab(cls, vocab_size, group=None, reduce_e_grad=True): ...

def compute_z_loss(lse, targets=None, shift=False, ignore_index=-100, reduction="mean"): ...

class LinearCrossEntropyLoss:
    def __init__(self, num_output_chunks=8, ignore_index=-100, tp_enabled=False, mask_ignored_tokens=True): ...
    def set_model_output(self, model): ...
    def forward(self, outputs, targets): ...
    def apply_compile_strategy(self, *args, **kwargs): ...
    def patch_tp_plan(self, tp_plan): ...

def linear_topk_log_probs(hidden, weight, topk_ids, temperature=1.0, dist_process_group=None, chunk_size=None): ...

class FusedOutputLinear:
    def __init__(self, in_features, out_features, chunk_size): ...
    def forward(self, hidden_states, labels=None, temperature=None, sampling_mask=None): ...

class SampleSupportScores:
    logprobs: object
    entropy: object
    valid_mask: object

def sample_support_scores(
    logits_or_hidden, sampled_ids, support_ids, *, vocab_start_index, vocab_end_index, tp_group, compute_entropy=False,
    entropy_requires_grad=False, lm_head_weight=None, temperature=1.0, chunk_size=None,
): ...
"""
