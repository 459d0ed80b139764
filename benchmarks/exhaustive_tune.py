"""How far from the best is what the tuner finds: its choice against every combination of some coordinates.

    python3 benchmarks/exhaustive_tune.py --flce build/bin/flce --device cuda --shape 4096xD=768,V=50257,dtype=bf16
        [--limit-s 300] [--out FILE]

For each shape the tuner is run first (--tune-budget-s, in a record of its own). Then every legal combination of --coordinates, the rest as
in the tuner's choice, is checked and timed in interleaved rounds, of which those leave that are far behind and then the slower half; the
quickest few, the cost model's choice and the tuner's are timed in five rounds more. "tuned" and "quickest" are medians of that one run, of
at least five samples each. Kernels are compiled beforehand; --limit-s bounds the rest of a shape's time. The output says how many
combinations there are and how many were timed.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ENOUGH_SAMPLES = 5
MOST_COMBINATIONS = 4096  # the most combinations that a record holds
LEAST_S = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flce", required=True, help="the flce command")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", action="append", required=True, help="num_tokens x spec: 4096xD=768,V=50257,dtype=bf16; may be repeated")
    parser.add_argument(
        "--coordinates", default="grad_weight,grad_hidden,forward", help="of which every combination is measured; all: of all"
    )
    parser.add_argument("--most", type=int, default=MOST_COMBINATIONS, help="combinations, those nearest to the tuner's choice")
    parser.add_argument("--tune-budget-s", type=float, default=60)
    parser.add_argument(
        "--limit-s", type=float, default=300, help="for a shape: the tuner and every combination, without what is compiled before"
    )
    parser.add_argument("--cache-dir", help="of kernels (default: flce's)")
    parser.add_argument("--commit", help="for --out (default: what git says)")
    parser.add_argument("--out", help="JSON")
    return parser.parse_args()


def output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def flce(args, *arguments):
    command = [args.flce, "tune", "--device", args.device, *arguments, "--json"]
    if args.cache_dir:
        command += ["--cache-dir", args.cache_dir]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its progress is ours
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return json.loads(done.stdout)


def samples(candidate):
    return [ms for times in candidate["times_ms"].values() for ms in times]


def measure(args, shape, folder):
    num_tokens, _, spec = shape.partition("x")
    layer = ["--spec", spec, "--num-tokens", num_tokens]
    varied = [] if args.coordinates == "all" else ["--coordinates", args.coordinates]
    begin = time.monotonic()
    compiled = flce(args, "--compile-only", "--spec", spec)
    compile_s = time.monotonic() - begin

    begin = time.monotonic()
    tune_budget = min(args.tune_budget_s, args.limit_s)
    tuned = flce(args, *layer, "--budget-s", str(tune_budget), "--records-dir", os.path.join(folder, "tuned"))
    if not tuned["best_plan"]:
        sys.exit(f"{shape}: the tuner found no plan")
    left = max(LEAST_S, args.limit_s - (time.monotonic() - begin))
    every = flce(
        args,
        *layer,
        *varied,
        "--exhaustive",
        str(args.most),
        "--plan",
        tuned["best_plan"],
        "--budget-s",
        f"{left:.3f}",
        "--records-dir",
        os.path.join(folder, "every"),
    )
    with open(every["record"], encoding="utf-8") as file:
        candidates = {candidate["plan"]: candidate for candidate in json.load(file)["candidates"]}

    good = {plan: samples(candidate) for plan, candidate in candidates.items() if candidate["outcome"] == "ok"}
    medians = {plan: statistics.median(times) for plan, times in good.items() if len(times) >= ENOUGH_SAMPLES}
    choice = tuned["best_plan"]
    row = {
        "shape": shape,
        "spec": spec,
        "num_tokens": tuned["num_tokens"],
        "device": tuned["device"],
        "coordinates": args.coordinates,
        "combinations": every["combinations"],
        "candidates": len(candidates),
        "timed": sum(bool(times) for times in good.values()),
        "outcomes": every["outcomes"],
        "complete": every["complete"],
        "tuned_plan": choice,
        "tuned_ms": medians.get(choice),
        "tuned_complete": tuned["complete"],
        "tune_s": tuned["seconds"],
        "compile_s": compile_s,
        "compiled": compiled["compiled"],
        "seconds": time.monotonic() - begin,
    }
    row["cost_model_ms"] = medians.get(every["default_plan"])
    row["quickest_plan"] = min(medians, key=lambda plan: medians[plan]) if medians else None
    row["quickest_ms"] = medians.get(row["quickest_plan"])
    both = row["tuned_ms"] is not None and row["quickest_ms"] is not None
    row["tuned_to_quickest"] = row["tuned_ms"] / row["quickest_ms"] if both else None
    return row


def text(number, digits):
    return "-" if number is None else f"{number:.{digits}f}"


def main():
    args = parse_arguments()
    rows = []
    print(
        f"{'shape':>44} {'tuned ms':>9} {'quickest':>9} {'ratio':>6} {'cost model':>10} {'timed':>6} {'of':>5} {'tuner s':>8} {'all s':>6}"
    )
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(args, shape, folder)
        rows.append(row)
        print(
            f"{shape:>44} {text(row['tuned_ms'], 4):>9} {text(row['quickest_ms'], 4):>9} {text(row['tuned_to_quickest'], 3):>6} "
            f"{text(row['cost_model_ms'], 4):>10} {row['timed']:>6} {row['combinations']:>5} {row['tune_s']:8.1f} {row['seconds']:6.0f}"
            f"{'' if row['complete'] else '  cut short'}",
            flush=True,
        )
        if args.out:  # after each: a run that is cut off leaves what it has
            gpu = (output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none").splitlines()[0]
            commit = args.commit or output("git", "rev-parse", "--short", "HEAD")
            record = {"date": datetime.date.today().isoformat(), "gpu": gpu, "commit": commit, "rows": rows}
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
