"""flce-shard-checkpoint: a checkpoint cut into stages, and back."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from typing import Any, NoReturn

from flce import errors
from flce.engine import _shard
from flce.engine._checkpoint_files import open_checkpoint

DESCRIPTION = """\
Cuts a safetensors checkpoint of Hugging Face's layout into files that each hold one pipeline stage's parameters, or joins such
files again. Stages are those of flce.engine.causal_lm_stage. config.json, the tokenizer and other small files are copied along.
transformers' from_pretrained reads the result in both directions."""
EPILOG = """\
examples:
  flce-shard-checkpoint Qwen3-1.7B Qwen3-1.7B-4 --stages 4            cut into four stages, one file each
  flce-shard-checkpoint Qwen3-1.7B Qwen3-1.7B-4 --stages 4 --dry-run  print the stages and their bytes, write nothing
  flce-shard-checkpoint Qwen3-1.7B-4 Qwen3-1.7B-2 --stages 2          cut into another number of stages
  flce-shard-checkpoint Qwen3-1.7B-4 merged --merge                   join to what Qwen3-1.7B had, bit for bit

OUT comes into being whole: a run that fails or is killed leaves none, and the next run removes what it left beside OUT.
Memory is a few MiB beside Python and torch, however large the checkpoint is.
exit codes: 0 done, 1 failed (the reason is on stderr), 2 wrong usage, 130 interrupted"""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size(text: str) -> int:
    """Bytes of "5GB", "500 MiB" or "1000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", text.strip().upper())
    if match is None or match[2] not in UNITS or int(float(match[1]) * UNITS[match[2]]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 5GB, 500MiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2]])


def positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "flce-shard-checkpoint", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("source", metavar="IN", help="folder with model.safetensors, or with an index and the files that it names")
    made.add_argument("target", metavar="OUT", help="folder to make")
    kind = made.add_mutually_exclusive_group(required=True)
    kind.add_argument("--stages", type=positive, metavar="N", help="cut IN into N stages; IN may be whole or cut into another number")
    kind.add_argument("--merge", action="store_true", help="join IN, which is cut into stages")
    made.add_argument("--shards-per-stage", type=positive, metavar="K", help="files of a stage (default: 1); with --stages")
    made.add_argument("--max-shard-size", type=size, metavar="SIZE", help="largest file, as in 5GB (the default) or 500MiB; with --merge")
    made.add_argument("--overwrite", action="store_true", help="replace OUT, which stays valid until the new one is complete")
    made.add_argument("--verify", action="store_true", help="read OUT again before it gets its name, and compare SHA-256 digests")
    made.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    made.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return made


class Progress:
    """A bar of tqdm's where it is installed and stderr is a terminal, else a line every five seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: Any = None
        self._done = 0
        self._told = time.monotonic()

    def __call__(self, what: str, count: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what, self._done = what, 0
            self._bar = _bar(what, total)
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._told > 5:
            self._told = time.monotonic()
            print(f"{what}: {readable(self._done)} of {readable(total)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(what: str, total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, file=sys.stderr)


def readable(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def text_of(report: dict[str, Any], *, dry_run: bool) -> str:
    lines = [f"{'would write' if dry_run else 'wrote'} {report['target']}: {len(report['files'])} files, {readable(report['total_bytes'])}"]
    for stage in report.get("stages", ()):
        first, last = stage["layers"]
        files = sum(file["stage"] == stage["stage"] for file in report["files"])
        lines.append(
            f"  stage {stage['stage']}: layers {first} to {last}, {stage['tensors']} tensors, {stage['bytes']} bytes "
            f"({readable(stage['bytes'])}) in {files} file{'s' if files > 1 else ''}"
        )
    lines += [f"  {copy} is a copy of {origin}, which is tied to it" for copy, origin in report.get("copies", {}).items()]
    if report["copied"]:
        lines.append(f"  copied along: {', '.join(report['copied'])}")
    if report["left_behind"]:
        lines.append(f"  left behind: {', '.join(report['left_behind'])}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    source = open_checkpoint(arguments.source)
    if arguments.merge:
        conversion = _shard.plan_merging(source, arguments.max_shard_size or 5 * 10**9)
    else:
        conversion = _shard.plan_sharding(source, arguments.stages, arguments.shards_per_stage or 1)
    if not arguments.dry_run:
        progress = None if arguments.quiet else Progress()
        try:
            _shard.write(conversion, arguments.target, overwrite=arguments.overwrite, verify=arguments.verify, progress=progress)
        finally:
            if progress is not None:
                progress.close()
    return conversion.report(arguments.target) | {"dry_run": arguments.dry_run, "verified": arguments.verify and not arguments.dry_run}


def main(argv: list[str] | None = None) -> NoReturn:
    made = parser()
    arguments = made.parse_args(argv)
    if arguments.merge and arguments.shards_per_stage:
        made.error("--shards-per-stage belongs to --stages")
    if arguments.max_shard_size and not arguments.merge:
        made.error("--max-shard-size belongs to --merge")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the cleaning up that an exception does
    try:
        report = run(arguments)
    except (errors.FlceError, OSError) as error:
        print(f"flce-shard-checkpoint: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("flce-shard-checkpoint: interrupted; nothing was left behind", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(report, indent=2) if arguments.json else text_of(report, dry_run=arguments.dry_run))
    sys.exit(0)


if __name__ == "__main__":
    main()
