"""Prewarming eight models' layers for two architectures, on an empty cache and again on the full one. Needs NVRTC, no GPU.

python benchmarks/prewarm.py build/bin/flce [--device sm_80 --device sm_90a] [--out FILE]

Prints (or writes) one JSON object; the goal on two cores is under 300 s cold and under 2 s warm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = {
    "gpt2": "D=768,V=50257,dtype=bf16,tied",
    "llama-3.2-1b": "D=2048,V=128256,dtype=bf16,tied",
    "llama-3-8b": "D=4096,V=128256,dtype=bf16",
    "mistral-7b": "D=4096,V=32000,dtype=bf16",
    "qwen2.5-7b": "D=3584,V=152064,dtype=bf16",
    "qwen3-1.7b": "D=2048,V=151936,dtype=bf16,tied",
    "gemma-2-2b": "D=2304,V=256000,dtype=bf16,softcap=30,tied",
    "deepseek-v3": "D=7168,V=129280,dtype=bf16",
}


def prewarm(program: Path, devices: list[str], cache: str, pack: Path) -> dict[str, Any]:
    arguments = [argument for spec in MODELS.values() for argument in ("--spec", spec)]
    arguments += [argument for device in devices for argument in ("--device", device)]
    start = time.monotonic()
    done = subprocess.run(
        [str(program), "prewarm", *arguments, "--out", str(pack), "--json"],
        env=os.environ | {"FLCE_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - start
    result = json.loads(done.stdout)
    return {"seconds": round(seconds, 2), "kernel_sets": len(result["items"])} | {
        key: result[key] for key in ("compiled", "hits", "failed")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--device", action="append", dest="devices")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = options.devices or ["sm_80", "sm_90a"]
    with tempfile.TemporaryDirectory() as folder:
        cache, packs = str(Path(folder) / "cache"), [Path(folder) / f"{name}.flcepack" for name in ("cold", "warm")]
        cold = prewarm(options.program, devices, cache, packs[0])
        warm = prewarm(options.program, devices, cache, packs[1])
        report = {
            "what": "flce prewarm --out of eight models' layers, empty cache, then the same again",
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "devices": devices,
            "models": MODELS,
            "cold": cold,
            "warm": warm,
            "pack_bytes": packs[0].stat().st_size,
            "same_pack": packs[0].read_bytes() == packs[1].read_bytes(),
        }
    text = json.dumps(report, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
