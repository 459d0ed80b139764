"""Forward and backward on a GPU with the plan for 4096 tokens, beside the plan for the call's own token bucket, which Python's calls get.

    python3 benchmarks/token_buckets.py --flce build/bin/flce [--layer 2048x151936] [--num-tokens 64,256] [--rounds 10] [--out FILE]

Plans are those of `flce explain`: with tuning records where there are some, --no-records by the cost model alone. A row of the table is a
number of tokens; "ratio" is the time of the bucket's plan over that of the plan for 4096 tokens, 1 where they are the same plan, which is
timed once. All plans are compiled first, in parallel; with --turns 2 plans are timed in turns, which takes twice as long. A forward retains
what the weight's gradient has room for, as in Python. --out writes JSON with the GPU, the driver, the commit and the date.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

LAYERS = ["2048x151936", "4096x128256"]
TOKENS = [64, 129, 256, 512, 1024, 2048, 4096, 8192, 16384]


def output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def answer(environment, *command):
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def measure(args, spec, num_tokens, plans, environment):
    """Milliseconds of forward and backward by plan."""
    times = {plan: [] for plan in plans}
    common = ["--num-tokens", str(num_tokens), "--device", args.device, "--rounds", str(args.rounds), "--no-floor", "--retain", args.retain]
    for _ in range(args.turns if len(plans) > 1 else 1):
        for plan, measured in times.items():
            row = answer(environment, args.flce, "bench", "--spec", spec, "--plan", plan, *common)
            measured.append(row["forward_backward_ms"])
    return {plan: statistics.median(measured) for plan, measured in times.items()}


def prewarm(args, layers, tokens, environment):
    command = [args.flce, "prewarm", "--device", args.device]
    for spec in layers:
        command += ["--spec", spec]
    for num_tokens in [*tokens, 4096]:
        command += ["--num-tokens", str(num_tokens)]
    answer(environment, *command)


def compare(args, spec, num_tokens, environment):
    def plan_of(tokens):
        return answer(environment, args.flce, "explain", "--spec", spec, "--device", args.device, "--num-tokens", str(tokens))["plan"]

    typical, own = plan_of(4096), plan_of(num_tokens)
    times = measure(args, spec, num_tokens, list(dict.fromkeys((typical, own))), environment)
    return {"spec": spec, "num_tokens": num_tokens, "plan_4096": typical, "plan": own, "ms_4096": times[typical], "ms": times[own]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flce", required=True, help="the flce command")
    parser.add_argument("--layer", action="append", help="hidden_size x vocab_size; may be repeated")
    parser.add_argument("--num-tokens", help="separated by commas")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=1, help="how often two plans are timed in turns")
    parser.add_argument("--retain", default="grad_weight", help="as for flce bench; none for a plan that retains nothing")
    parser.add_argument("--no-records", action="store_true", help="plans of the cost model alone")
    parser.add_argument("--out")
    args = parser.parse_args()
    environment = os.environ | ({"FLCE_NO_RECORDS": "1"} if args.no_records else {})
    tokens = [int(n) for n in args.num_tokens.split(",")] if args.num_tokens else TOKENS

    began, rows = time.monotonic(), []
    print(f"{'layer':>12} {'tokens':>7} {'plan for 4096, ms':>18} {'bucket plan, ms':>16} {'ratio':>6}")
    specs = {layer: "D={},V={},dtype={}".format(*layer.split("x"), args.dtype) for layer in args.layer or LAYERS}
    prewarm(args, specs.values(), tokens, environment)
    for layer, spec in specs.items():
        for num_tokens in tokens:
            row = compare(args, spec, num_tokens, environment)
            rows.append(row)
            same = "  (one plan)" if row["plan"] == row["plan_4096"] else ""
            ratio = row["ms"] / row["ms_4096"]
            print(f"{layer:>12} {num_tokens:7} {row['ms_4096']:18.3f} {row['ms']:16.3f} {ratio:6.3f}{same}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    if args.out:
        gpu = (output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none").splitlines()[0]
        record = {
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "commit": output("git", "rev-parse", "--short", "HEAD"),
            "command": " ".join(["python3", *sys.argv]),
            "rows": rows,
        }
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
