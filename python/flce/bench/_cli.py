"""The command line of `python -m flce.bench`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flce import errors
from flce.bench import _compare, _contenders, _report
from flce.bench._problem import DTYPES, PASSES

DONE, WRONG, USAGE = 0, 1, 2
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DESCRIPTION = """\
Measures flce beside what else computes a linear layer and its cross entropy, at your shape: time, memory and errors
in one table. What is not installed, or cannot do this shape, is a row with the reason."""
_EPILOG = """\
examples:
  python -m flce.bench --num-tokens 8192 --hidden-size 4096 --vocab-size 128256
  python -m flce.bench --compare torch,liger --hf-config config.json --num-tokens 1024,4096,16384 --plot curve.svg
  python -m flce.bench --spec D=2048,V=151936,dtype=bf16 --workspace-limit 128M,512M,2G --json result.json

Every contender takes its turn in each round, the bare GEMMs ("floor") among them. A loss or gradient that is off by
more than rounding explains is marked WRONG and not timed. docs/comparing.md says how it is measured.

exit code: 0 done, 1 flce itself is wrong or cannot run, 2 wrong usage, 130 interrupted"""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a number, or several numbers separated by commas") from error


def _sizes(text: str) -> list[int]:
    found = [re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", part.strip(), re.IGNORECASE) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a size such as 512M or 2G, or several sizes separated by commas")
    return [int(match[1]) * _UNITS[match[2].upper()] for match in found if match]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flce.bench", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", type=_names, metavar="NAMES", help=f"of {','.join(_contenders.NAMES)}; with jax optax,maxtext,levanter (default: all)"
    )
    parser.add_argument("--framework", choices=_compare.FRAMEWORKS, default="torch", help="jax: flce.jax and its peers under jax.jit")
    layer = parser.add_argument_group("the layer")
    layer.add_argument("--num-tokens", "--tokens", type=_numbers, default=[4096], metavar="N[,N…]", help="one number or several (4096)")
    layer.add_argument("--hidden-size", type=int, metavar="D")
    layer.add_argument("--vocab-size", type=int, metavar="V")
    layer.add_argument("--spec", help="D=2048,V=151936,dtype=bf16,…, as the flce command takes it, in place of sizes")
    layer.add_argument("--hf-config", metavar="FILE", help="a model's config.json, in place of sizes")
    layer.add_argument("--dtype", choices=DTYPES, help="of hidden and weight (bf16 on a GPU, fp32 on a CPU)")
    layer.add_argument("--device", help="cuda, cuda:N or cpu (cuda where there is one)")
    layer.add_argument("--bias", action="store_true", default=None)
    layer.add_argument("--softcap", type=float, metavar="C", help="logits become C·tanh(logits / C)")
    layer.add_argument("--logit-scale", type=float, metavar="S", help="logits are multiplied by it")
    layer.add_argument("--ignored", type=float, default=0.0, metavar="SHARE", help="of the tokens, 0 to below 1 (0)")
    layer.add_argument("--logit-std", type=float, default=2.0, metavar="STD", help="of the random logits (2)")
    layer.add_argument("--pass", dest="pass_", choices=PASSES, default=PASSES[0], help="forward: without gradients")
    layer.add_argument("--frozen", choices=("weight", "hidden"), help="which gets no gradient")
    own = parser.add_argument_group("flce")
    variants = list(_contenders.FLCE_VARIANTS)
    own.add_argument("--flce", type=_names, default=variants, metavar="VARIANTS", help=f"of {','.join(variants)} (default: all of them)")
    own.add_argument("--workspace-limit", type=_sizes, default=[], metavar="B[,B…]", help="a variant for each: 256M,1G")
    how = parser.add_argument_group("measuring")
    how.add_argument("--rounds", type=int, help="(default: as many as --seconds allow, 3 to 100)")
    how.add_argument("--seconds", type=float, default=10.0, help="of rounds, for each number of tokens (10)")
    how.add_argument("--no-memory", dest="memory", action="store_false", help="measure no memory: on a CPU it takes processes")
    how.add_argument("--seed", type=int, default=0)
    out = parser.add_argument_group("output: the table on stdout, progress on stderr")
    out.add_argument("--json", metavar="FILE", help="write the result; -: on stdout, in place of the table")
    out.add_argument("--plot", metavar="FILE", help="draw it: .png, .svg or .pdf (needs matplotlib)")
    out.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _check_outputs(given: argparse.Namespace) -> None:
    if given.plot:
        _report.check_plot(given.plot)
    for name in ("json", "plot"):
        path = getattr(given, name)
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise errors.ArgumentError(f"--{name} is {path}, whose folder does not exist")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code; see the help."""
    parser = _parser()
    given = parser.parse_args(arguments)
    options = dict(vars(given))
    began = time.monotonic()

    def progress(text: str) -> None:
        if not given.quiet:
            _report.say(text, began=began, now=time.monotonic())

    files = {name: options.pop(name) for name in ("json", "plot", "quiet")}
    options["workspace_limits"] = options.pop("workspace_limit")
    try:
        _check_outputs(argparse.Namespace(**files))
        result = _compare.compare(**options, progress=progress)
    except (errors.ArgumentError, errors.SpecError, errors.UnavailableError) as error:
        parser.error(str(error))
    except errors.DeviceError as error:
        print(f"flce.bench: error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("flce.bench: interrupted", file=sys.stderr)
        return 130
    result["command"] = ["python", "-m", "flce.bench", *(sys.argv[1:] if arguments is None else arguments)]
    return _write(result, files)


def _write(result: dict[str, Any], files: dict[str, Any]) -> int:
    text = json.dumps(result, indent=1, allow_nan=False, default=str) + "\n"
    if files["json"] == "-":
        sys.stdout.write(text)
    else:
        sys.stdout.write(_report.table(result))
        if files["json"]:
            Path(files["json"]).write_text(text, encoding="utf-8")
    sys.stdout.flush()
    if files["plot"]:
        _report.plot(result, files["plot"])
    return DONE if _compare.is_right(result) else WRONG
