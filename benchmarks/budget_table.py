"""Time against memory of output layers on a GPU: every strategy and some budgets, to the three GEMMs by cuBLAS of the same run.

    python3 benchmarks/budget_table.py --flce build/bin/flce [--shape 4096x2048x151936] [--minutes 8] [--out FILE]
    python3 benchmarks/budget_table.py --flce build/bin/flce --options [--case softcap]

With --options the layers are those of options: what a softcap, a bias, label smoothing, z-loss, class weights, a policy's outputs and a
frozen head cost, everything retained (under a limit that has room for it), in the weight gradient's memory, and computed again.

Takes at most --minutes: what there is no time for any more is named, and the exit code is 1. Writes Google Benchmark's JSON (default:
benchmarks/results/GPU-DATE-budget.json): medians, with spread, ratios, bytes beyond inputs and gradients, clocks and power while it ran,
and the errors of all outputs against fp64 (`flce check` on the same layer) beside the times. benchmarks/draw_budget.py draws it.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

SHAPES = ["4096x2048x151936", "4096x4096x128256", "8192x4096x128256", "8192x2304x256000", "3000x2560x50257"]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


class Case(NamedTuple):
    name: str
    shape: str
    spec: str
    options: tuple[str, ...]  # options of flce bench and flce check
    bench_only: tuple[str, ...] = ()
    checked: bool = False  # whether its errors are looked at too


def cases(shapes):
    for shape in shapes:
        n, d, v = (int(size) for size in shape.split("x"))
        spec = f"D={d},V={v},dtype=bf16"
        most = 2 * n * v
        yield Case("all retained", shape, spec, ("--retain", "all"), checked=True)
        yield Case("in grad_weight", shape, spec, ("--retain", "grad_weight"), checked=True)
        yield Case("nothing retained", shape, spec, ("--retain", "none"), checked=True)
        yield Case("accumulated", shape, f"{spec},grad_weight_mode=accumulate", ("--retain", "none"), checked=True)
        for eighths in (1, 2, 4, 6):
            yield Case(f"{eighths}/8 retained", shape, spec, ("--retain", str(most * eighths // 8)))
        yield Case("3/4 of the tokens ignored", shape, spec, ("--retain", "none"), ("--ignored", "0.75", "--no-floor"))
    yield Case("few tokens", "64x4096x128256", "D=4096,V=128256,dtype=bf16", ("--retain", "none"))


OPTION_LAYERS = [
    ("plain", "4096x2048x151936", ""),
    ("bias", "4096x2048x151936", ",bias"),
    ("label smoothing", "4096x2048x151936", ",label_smoothing=0.1"),
    ("z-loss", "4096x2048x151936", ",z_loss=0.0001"),
    ("class weights", "4096x2048x151936", ",class_weight"),
    ("teacher of 64 classes", "4096x2048x151936", ",teacher_top_k=64"),
    ("plain", "8192x2304x256000", ""),
    ("softcap", "8192x2304x256000", ",softcap=30"),
    ("plain", "8192x4096x151936", ""),
    ("logprobs", "8192x4096x151936", ",outputs=logprobs"),
    ("policy", "8192x4096x151936", ",temperature,outputs=logprobs+entropy+top1"),
]
FROZEN_SHAPES = ["4096x2048x151936", "4096x4096x128256", "8192x4096x151936"]


def option_cases():
    all_retained = ("--workspace-limit", "16G")
    for name, shape, options in OPTION_LAYERS:
        _, d, v = shape.split("x")
        spec = f"D={d},V={v},dtype=bf16{options}"
        yield Case(f"{name}, all retained", shape, spec, all_retained, checked=bool(options))
        yield Case(f"{name}, in grad_weight", shape, spec, ("--retain", "grad_weight"))
        yield Case(f"{name}, nothing retained", shape, spec, ("--retain", "none"))
    for shape in FROZEN_SHAPES:
        _, d, v = shape.split("x")
        spec = f"D={d},V={v},dtype=bf16"
        yield Case("batch-invariant", shape, f"{spec},batch_invariant", ("--retain", "none"), checked=True)
        yield Case("frozen head, all retained", shape, spec, all_retained, ("--frozen", "weight"))
        yield Case("frozen head, nothing retained", shape, spec, ("--retain", "none"), ("--frozen", "weight"))


def output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def watched(command, limit):
    """Runs it; its JSON, and the medians of (SM clock in MHz, power in W, temperature) while the GPU was at work."""
    samples = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + limit
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
                raise TimeoutError
            line = (output(*QUERY) or "").splitlines()
            if line:
                samples.append([float(x) if x.replace(".", "", 1).isdigit() else 0.0 for x in line[0].replace(" ", "").split(",")])
            time.sleep(0.2)
        text, errors = process.communicate()
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}\n{errors}")
    busy = sorted(samples, key=lambda sample: sample[1])[len(samples) // 2 :]  # the GPU is idle while inputs are made
    medians = [statistics.median(column) for column in zip(*busy, strict=True)] if busy else [0.0, 0.0, 0.0]
    return json.loads(text), medians


def measured(flce, case, seconds, limit):
    n = case.shape.split("x")[0]
    layer = ["--spec", case.spec, "--num-tokens", n, "--device", "cuda", *case.options, "--json"]
    found, (clock, power, temperature) = watched([flce, "bench", *layer, *case.bench_only, "--seconds", str(seconds)], limit)
    common = {
        "plan": found["plan"],
        "bytes_beyond": found["workspace_bytes"] + found["retained_bytes"],
        "sm_clock_mhz": clock,
        "power_w": power,
        "temperature_c": temperature,
    }
    for key in ("share_of_copy_bandwidth", "ratio_ignored_forward", "ratio_ignored_forward_backward"):
        if found.get(key) is not None:
            common[key] = found[key]
    rows = []
    for part in ("forward", "forward_backward"):
        row = {
            "name": f"{case.shape}/bf16/{case.name}/{part}",
            "run_name": f"{case.shape}/bf16/{case.name}",
            "run_type": "aggregate",
            "aggregate_name": "median",
            "repetitions": found["rounds"],
            "iterations": found["rounds"],
            "real_time": found[f"{part}_ms"],
            "cpu_time": found[f"{part}_ms"],
            "time_unit": "ms",
            "spread": found[f"{part}_ms_spread"],
        }
        if found.get(f"floor_{part}_ms"):
            row["floor"] = found[f"floor_{part}_ms"]
            row["ratio"] = found[f"{part}_ms"] / found[f"floor_{part}_ms"]
        rows.append(row | common)
    return rows


def errors(flce, case, limit):
    n = case.shape.split("x")[0]
    found, _ = watched([flce, "check", "--spec", case.spec, "--num-tokens", n, "--device", "cuda", *case.options, "--json"], limit)
    return {name: {"error": o["error"], "bound": o["bound"]} for name, o in found["outputs"].items()}


def context(args):
    gpu = (output("nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader") or "").splitlines()
    name, driver, power, clock = (part.strip() for part in gpu[0].split(",")) if gpu else ("unknown", "", "", "")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "executable": os.path.basename(args.flce),
        "num_cpus": os.cpu_count(),
        "host": platform.machine(),
        "library_build_type": "release",
        "gpu": name,
        "driver": driver,
        "power_limit": power,
        "max_sm_clock": clock,
        "commit": args.commit or output("git", "-C", ROOT, "describe", "--always", "--dirty"),
        "how": " ".join(
            ["benchmarks/budget_table.py --flce build/bin/flce", f"--minutes {args.minutes:g} --seconds {args.seconds:g}"]
            + [f"--shape {shape}" for shape in args.shape or []]
            + [f"--case '{case}'" for case in args.case or []]
            + ["--options"] * args.options
            + ["--no-errors"] * args.no_errors
        ),
    }


def default_path(about):
    gpu = about["gpu"].lower().replace("nvidia ", "").split(" ")[0]
    return os.path.join(ROOT, "benchmarks", "results", f"{gpu}-{about['date'][:10]}-budget.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flce", required=True, help="the flce command")
    parser.add_argument("--shape", action="append", help="num_tokens x hidden_size x vocab_size; may be repeated")
    parser.add_argument("--case", action="append", help="begins the names of what is measured; may be repeated (default: everything)")
    parser.add_argument("--options", action="store_true", help="the layers of options, of all shapes or those of --shape")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, a case")
    parser.add_argument("--no-errors", action="store_true", help="times only")
    parser.add_argument("--commit", help="what it is of, where this is no clone (default: git describe)")
    parser.add_argument("--out")
    args = parser.parse_args()

    end = time.monotonic() + 60 * args.minutes
    about = context(args)
    rows, late = [], []
    print(
        f"{'shape':>18} {'case':<31} {'MiB beyond':>10} {'fwd ms':>8} {'ratio':>6} {'both ms':>8} {'ratio':>6}  "
        "errors (grad_hidden, grad_weight)"
    )
    chosen = option_cases() if args.options else cases(args.shape or SHAPES)
    for case in chosen:
        if args.options and args.shape and case.shape not in args.shape:
            continue
        if args.case and not case.name.startswith(tuple(args.case)):
            continue
        try:
            forward, both = measured(args.flce, case, args.seconds, max(end - time.monotonic(), 0.1))
            found = errors(args.flce, case, max(end - time.monotonic(), 0.1)) if case.checked and not args.no_errors else {}
        except TimeoutError:
            late.append(f"{case.shape} {case.name}")
            continue
        both["errors"] = found
        rows += [forward, both]
        nan = float("nan")
        ratios = [
            row.get("ratio", row.get(f"ratio_ignored_{part}", nan)) for row, part in ((forward, "forward"), (both, "forward_backward"))
        ]
        shown = " ".join(f"{found[name]['error']:.2e}" for name in ("grad_hidden", "grad_weight") if name in found)
        print(
            f"{case.shape:>18} {case.name:<31} {both['bytes_beyond'] / 2**20:10.1f} {forward['real_time']:8.3f} {ratios[0]:6.3f} "
            f"{both['real_time']:8.3f} {ratios[1]:6.3f}  {shown}",
            flush=True,
        )
    path = args.out or default_path(about)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"context": about, "benchmarks": rows}, file, indent=1)
        file.write("\n")
    print(path)
    if late:
        sys.exit("no time was left for: " + "; ".join(late))


if __name__ == "__main__":
    main()
