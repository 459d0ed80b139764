"""Forward + backward of the output layer on the CPU: flce (through its C ABI) against eager PyTorch, in one process, repetitions
interleaved.

    OMP_NUM_THREADS=2 python benchmarks/cpu_vs_torch.py --library build/lib/libflce.so [--shape 1024x2048x50257]
        [--dtypes fp32,bf16] [--retain none]
                                                        [--out FILE]

Prints a table; --out writes JSON with the CPU, the commit and the date.
"""

import argparse
import ctypes
import datetime
import json
import platform
import subprocess
import sys
import time

import torch

DTYPES = {"fp32": (torch.float32, 0x220), "bf16": (torch.bfloat16, 0x410), "fp16": (torch.float16, 0x210)}
INT64, FP32, CPU = 0x040, 0x220, 1
GRAD_WEIGHT = 1  # FLCE_RETAINED_GRAD_WEIGHT


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 2),
        ("strides", ctypes.c_int64 * 2),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
    ]


P = ctypes.POINTER(Tensor)
COMMON = [
    ("struct_size", ctypes.c_size_t),
    ("hidden", P),
    ("weight", P),
    ("bias", P),
    ("class_weight", P),
    ("target", P),
    ("ignore_index", ctypes.c_int64),
    ("reduction", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
    ("num_valid", P),
]

RETAINED = [("retained", ctypes.c_void_p), ("retained_bytes", ctypes.c_size_t),
            ("retained_place", ctypes.c_int32), ("reserved_2", ctypes.c_int32)]


class ForwardArgs(ctypes.Structure):
    _fields_ = COMMON + [(name, P) for name in ("loss", "z_loss", "lse", "logprobs", "entropy", "invalid_label")] + RETAINED


class BackwardArgs(ctypes.Structure):
    _fields_ = (
        COMMON
        + [
            (name, P)
            for name in (
                "lse",
                "entropy",
                "grad_loss",
                "grad_lse",
                "grad_logprob",
                "grad_entropy",
                "grad_hidden",
                "grad_weight",
                "grad_bias",
            )
        ]
        + RETAINED
    )


class SessionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("cache_dir", ctypes.c_char_p),
        ("scratch_bytes", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("no_disk_cache", ctypes.c_int32),
    ]


def view(t):
    shape, strides = list(t.shape) + [0, 0], list(t.stride()) + [0, 0]
    code = INT64 if t.dtype == torch.int64 else next(c for d, c in DTYPES.values() if d == t.dtype)
    return Tensor(t.data_ptr(), code, t.dim(), (ctypes.c_int64 * 2)(*shape[:2]), (ctypes.c_int64 * 2)(*strides[:2]), CPU, 0)


class Flce:
    MEAN = 2

    def __init__(self, library, spec, threads, plan):
        self.lib = ctypes.CDLL(library)
        self.lib.flce_last_error.restype = ctypes.c_char_p
        session, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        options = SessionOptions(ctypes.sizeof(SessionOptions), b"cpu", None, 0, threads, 1)
        self.check(self.lib.flce_session_create(ctypes.byref(options), ctypes.byref(session)))

        class KernelOptions(ctypes.Structure):
            _fields_ = [("struct_size", ctypes.c_size_t), ("plan", ctypes.c_char_p), ("scratch_bytes", ctypes.c_int64)]

        chosen = KernelOptions(ctypes.sizeof(KernelOptions), plan.encode() if plan else None, 0)
        self.check(self.lib.flce_get_kernel(session, spec.encode(), ctypes.byref(chosen), ctypes.byref(self.kernel)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.flce_last_error().decode())

    def text(self, which):
        buffer = ctypes.create_string_buffer(1 << 16)
        self.check(self.lib.flce_kernel_text(self.kernel, which, buffer, len(buffer), None))
        return buffer.value.decode()

    def workspace_bytes(self, tokens):
        size = ctypes.c_size_t()
        self.check(self.lib.flce_kernel_workspace_bytes(self.kernel, ctypes.c_int64(tokens), 2, ctypes.byref(size)))
        return size.value

    def lendable_bytes(self, tokens):
        """Bytes of grad_weight in which forward may leave logits to backward."""
        size = ctypes.c_size_t()
        self.check(self.lib.flce_kernel_retained_bytes(self.kernel, ctypes.c_int64(tokens), 1, ctypes.byref(size)))
        return size.value

    def bind(self, hidden, weight, target, retain=False):
        """Returns forward and backward of these tensors, and what they write. `retain`: logits wait for backward in grad_weight's
        memory."""
        tokens = hidden.shape[0]
        size = self.workspace_bytes(tokens)
        out = {
            "loss": torch.zeros(()),
            "lse": torch.empty(tokens),
            "grad_hidden": torch.empty_like(hidden),
            "grad_weight": torch.empty_like(weight),
            "workspace": torch.zeros(size + 256, dtype=torch.uint8),
        }
        start = (out["workspace"].data_ptr() + 255) // 256 * 256
        views = {k: view(v) for k, v in out.items() if k != "workspace"}
        views |= {"hidden": view(hidden), "weight": view(weight), "target": view(target)}
        common = {k: ctypes.pointer(views[k]) for k in ("hidden", "weight", "target", "lse")} | {
            "ignore_index": -100,
            "reduction": self.MEAN,
        }
        if retain:
            lent = self.lendable_bytes(tokens)
            common |= {"retained": out["grad_weight"].data_ptr(), "retained_bytes": lent, "retained_place": GRAD_WEIGHT}
        forward = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), loss=ctypes.pointer(views["loss"]), **common)
        backward = BackwardArgs(
            struct_size=ctypes.sizeof(BackwardArgs),
            grad_hidden=ctypes.pointer(views["grad_hidden"]),
            grad_weight=ctypes.pointer(views["grad_weight"]),
            **common,
        )

        def call(function, args):
            self.check(function(self.kernel, ctypes.byref(args), ctypes.c_void_p(start), ctypes.c_size_t(size), None))

        return (lambda: call(self.lib.flce_kernel_forward, forward)), (lambda: call(self.lib.flce_kernel_backward, backward)), out


def timed(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gflops(units, shape, seconds):
    """Rate of `units` times N*D*V operations."""
    n, d, v = shape
    return round(units * n * d * v / seconds * 1e-9, 1)


def compare(args, name, shape):
    n, d, v = shape
    dtype, _ = DTYPES[name]
    torch.manual_seed(0)
    hidden = torch.randn(n, d).to(dtype).requires_grad_()
    weight = (torch.randn(v, d) * (2.0 / d**0.5)).to(dtype).requires_grad_()
    target = torch.randint(0, v, (n,))
    flce = Flce(args.library, f"D={d},V={v},dtype={name}", args.threads, args.plan)
    forward, backward, out = flce.bind(hidden.detach(), weight.detach(), target, args.retain == "grad_weight")
    state = {}

    def eager_forward():
        hidden.grad = weight.grad = None
        state["loss"] = torch.nn.functional.cross_entropy(hidden @ weight.T, target)

    best = {}
    for _ in range(args.repeats):
        for key, step in (
            ("flce_forward", forward),
            ("flce_backward", backward),
            ("torch_forward", eager_forward),
            ("torch_backward", lambda: state["loss"].backward()),
        ):
            best[key] = min(best.get(key, 1e9), timed(step))
    result = {
        "dtype": name,
        "shape": list(shape),
        "threads": args.threads,
        "plan": flce.text(2),
        "retain": args.retain,
        "workspace_bytes": flce.workspace_bytes(n),
    }
    result |= {f"{key}_s": round(value, 4) for key, value in best.items()}
    ours, theirs = best["flce_forward"] + best["flce_backward"], best["torch_forward"] + best["torch_backward"]
    result |= {
        "flce_s": round(ours, 4),
        "torch_s": round(theirs, 4),
        "ratio": round(ours / theirs, 4),
        "flce_gflops": gflops(8 if args.retain == "none" else 6, shape, ours),
        "torch_gflops": gflops(6, shape, theirs),
        "difference": {
            "loss": abs(out["loss"].item() - state["loss"].item()),
            "grad_hidden": relative(out["grad_hidden"], hidden.grad),
            "grad_weight": relative(out["grad_weight"], weight.grad),
        },
    }
    return result


def cpu_model():
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/lib/libflce.so")
    parser.add_argument("--shape", default="1024x2048x50257", help="N x D x V")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plan", default="")
    parser.add_argument(
        "--retain",
        choices=("grad_weight", "none"),
        default="grad_weight",
        help="logits wait for backward in grad_weight's memory, or are computed again",
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = tuple(int(x) for x in args.shape.split("x"))
    results = [compare(args, name, shape) for name in args.dtypes.split(",")]
    for r in results:
        print(
            f"{r['dtype']}: flce {r['flce_forward_s']:.3f} + {r['flce_backward_s']:.3f} = {r['flce_s']:.3f} s "
            f"({r['flce_gflops']} GFLOP/s), "
            f"torch {r['torch_forward_s']:.3f} + {r['torch_backward_s']:.3f} = {r['torch_s']:.3f} s, ratio {r['ratio']:.3f}, "
            f"workspace {r['workspace_bytes'] / 2**20:.1f} MiB, differences {r['difference']}",
            file=sys.stderr,
        )
    record = {
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "command": "benchmarks/cpu_vs_torch.py",
        "results": results,
    }
    if args.out:
        with open(args.out, "w") as file:
            json.dump(record, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
