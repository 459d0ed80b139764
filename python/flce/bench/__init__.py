"""A user's choices at a shape of their own: time, memory and errors of flce, torch, torch.compile, Liger, CCE, QuACK and TRL, those that
are installed.

    python -m flce.bench --compare torch,compile,liger,cce,quack,trl --num-tokens 4096 --hidden-size 2048 --vocab-size 151936
    result = flce.bench.compare(num_tokens=4096, hidden_size=2048, vocab_size=151936)

docs/comparing.md says how it measures.
"""

from flce.bench._compare import compare, is_right
from flce.bench._contenders import NAMES, Contender, NotComparedError
from flce.bench._problem import Inputs, Problem
from flce.bench._report import plot, table

__all__ = ["NAMES", "Contender", "Inputs", "NotComparedError", "Problem", "compare", "is_right", "plot", "table"]
