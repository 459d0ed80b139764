"""`flce bench` on the GPU over the shapes of well-known output layers, with the cuBLAS floor of the same run; optionally recorded in a
file.

    python3 benchmarks/gpu_shapes.py --flce build/bin/flce [--shape 4096x2048x151936] [--dtypes bf16,fp16,fp32] [--plan TEXT] [--out FILE]

Prints a table of times and ratios to the floor (three GEMMs by cuBLAS); --out writes JSON with the GPU, the driver, the commit and the
date.
"""

import argparse
import datetime
import json
import subprocess
import sys

SHAPES = ["4096x2048x151936", "4096x4096x128256", "8192x4096x128256", "8192x2304x256000", "3000x2560x50257"]


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flce", required=True, help="the flce command")
    parser.add_argument("--shape", action="append", help="num_tokens x hidden_size x vocab_size; may be repeated")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--options", default="", help="more of the spec, after D, V and dtype: bias,softcap=30")
    parser.add_argument("--plan", help="plan text instead of the planner's choice")
    parser.add_argument("--seconds", default="3")
    parser.add_argument("--out")
    args = parser.parse_args()

    rows = []
    print(
        f"{'shape':>20} {'dtype':>5} {'fwd ms':>8} {'floor':>7} {'ratio':>6} "
        f"{'fwd+bwd ms':>11} {'floor':>7} {'ratio':>6} {'workspace MiB':>14}"
    )
    for shape in args.shape or SHAPES:
        n, d, v = shape.split("x")
        for dtype in args.dtypes.split(","):
            spec = f"D={d},V={v},dtype={dtype}" + (f",{args.options}" if args.options else "")
            command = [args.flce, "bench", "--spec", spec, "--num-tokens", n, "--device", "cuda", "--seconds", args.seconds, "--json"]
            if args.plan:
                command += ["--plan", args.plan]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\n{done.stderr}")
            row = json.loads(done.stdout)
            row.update(shape=shape, dtype=dtype, spec=spec)
            rows.append(row)
            times = []
            for name in ("forward", "forward_backward"):
                time, floor = row[f"{name}_ms"], row[f"floor_{name}_ms"]
                times += [time, floor or float("nan"), time / floor if floor else float("nan")]
            print(
                f"{shape:>20} {dtype:>5} {times[0]:8.3f} {times[1]:7.3f} {times[2]:6.2f} {times[3]:11.3f} {times[4]:7.3f} {times[5]:6.2f} "
                f"{row['workspace_bytes'] / 2**20:14.1f}",
                flush=True,
            )
    if args.out:
        gpu = (output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "unknown").splitlines()[0]
        record = {
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "commit": output("git", "rev-parse", "--short", "HEAD"),
            "rows": rows,
        }
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
