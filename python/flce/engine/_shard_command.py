"""flce-shard-checkpoint: a checkpoint cut into stages, and back."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import NoReturn

from flce import errors
from flce.engine._shard import merge_checkpoint, shard_checkpoint

DESCRIPTION = """\
Cuts a safetensors checkpoint of Hugging Face's layout into files that each hold one pipeline stage's parameters, or joins such
files again. Stages are those of flce.engine.causal_lm_stage. config.json, the tokenizer and other small files are copied along.
transformers' from_pretrained reads the result in both directions. Prints as JSON what was written."""
EPILOG = """\
examples:
  flce-shard-checkpoint Qwen3-1.7B Qwen3-1.7B-4 --stages 4            cut into four stages, one file each
  flce-shard-checkpoint Qwen3-1.7B Qwen3-1.7B-4 --stages 4 --dry-run  print the stages and their bytes, write nothing
  flce-shard-checkpoint Qwen3-1.7B-4 Qwen3-1.7B-2 --stages 2          cut into another number of stages
  flce-shard-checkpoint Qwen3-1.7B-4 merged --merge                   join to what Qwen3-1.7B had, bit for bit

OUT comes into being whole: a run that fails or is killed leaves none, and the next run removes what it left beside OUT.
exit codes: 0 done, 1 failed (the reason is on stderr), 2 wrong usage, 130 interrupted"""


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
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
    made.add_argument("--max-shard-bytes", type=positive, metavar="BYTES", help="largest file (default: 5000000000); with --merge")
    made.add_argument("--overwrite", action="store_true", help="replace OUT, which stays valid until the new one is complete")
    made.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    return made


def main(argv: list[str] | None = None) -> NoReturn:
    made = parser()
    arguments = made.parse_args(argv)
    common = {name: getattr(arguments, name) for name in ("source", "target", "overwrite", "dry_run")}
    if arguments.merge and arguments.shards_per_stage:
        made.error("--shards-per-stage belongs to --stages")
    if arguments.max_shard_bytes and not arguments.merge:
        made.error("--max-shard-bytes belongs to --merge")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the cleaning up that an exception does
    try:
        if arguments.merge:
            report = merge_checkpoint(max_shard_bytes=arguments.max_shard_bytes or 5 * 10**9, **common)
        else:
            report = shard_checkpoint(num_stages=arguments.stages, shards_per_stage=arguments.shards_per_stage or 1, **common)
    except (errors.FlceError, OSError) as error:
        print(f"flce-shard-checkpoint: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("flce-shard-checkpoint: interrupted; nothing was left behind", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(report, indent=2))
    sys.exit(0)


if __name__ == "__main__":
    main()
