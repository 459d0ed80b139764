"""An fp32 weight under 16-bit hidden states, as autocast has it: the bits of a copy rounded beforehand, within the limit, and found
prewarmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import assert_close
from torch import Tensor

import flce
from flce.core import _kernels, _native

HIDDEN, VOCAB, TOKENS = 512, 20000, 48


def layer(device: str, *, hidden_size: int = HIDDEN, vocab_size: int = VOCAB, num_tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(device)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).to(device).requires_grad_()
    target = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    target[::5] = -100
    return hidden, weight, target.to(device)


def step(hidden: Tensor, weight: Tensor, target: Tensor, **options: object) -> tuple[Tensor, ...]:
    hidden = hidden.detach().requires_grad_()
    loss = flce.linear_cross_entropy(hidden, weight, target, **options)  # type: ignore[arg-type]
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden_major", [False, True])
def test_results_are_those_of_a_rounded_weight(device: str, dtype: torch.dtype, hidden_major: bool) -> None:
    hidden, weight, target = layer(device, hidden_size=72, vocab_size=1003)
    if hidden_major:
        weight = weight.detach().t().contiguous().t().requires_grad_()
    rounded = weight.detach().to(dtype).requires_grad_()
    grad_out = torch.zeros_like(rounded, dtype=torch.float32)
    options = {"retain_in_grad_weight": False, "softcap": 20.0, "label_smoothing": 0.1}
    actual = step(hidden.to(dtype), weight, target, **options)
    # Gradient in fp32 for a rounded weight: added to zeros.
    given = hidden.to(dtype).requires_grad_()
    loss = flce.linear_cross_entropy(given, rounded, target, grad_weight_out=grad_out, **options)  # type: ignore[arg-type]
    loss.backward()
    assert given.grad is not None
    assert actual[2].dtype is torch.float32
    assert actual[2].stride() == weight.stride()
    for a, b in zip(actual, (loss.detach(), given.grad, grad_out), strict=True):
        if device == "cpu":
            assert torch.equal(a, b)
        else:
            assert_close(a, b, dtype)


def test_kernels_round_the_weight_itself(device: str) -> None:
    """A weight whose memory changes between the passes is read by backward as it is then: there is no copy."""
    kernel = flce.get_kernel(72, 1003, torch.bfloat16, device=device, weight_dtype=torch.float32)
    assert kernel.spec == "D=72,V=1003,dtype=bf16,weight_dtype=fp32"
    assert "the weight is fp32 and rounded to bf16" in kernel.explain()
    assert flce.get_kernel(72, 1003, torch.float32, device=device, weight_dtype="fp32").spec == "D=72,V=1003,dtype=fp32"
    narrow = flce.get_kernel(72, 1003, "bf16", device=device, weight_dtype="fp32", grad_weight_dtype="bf16", accumulate=True)
    assert narrow.spec == "D=72,V=1003,dtype=bf16,weight_dtype=fp32,grad_weight_dtype=bf16,grad_weight_mode=accumulate"
    with pytest.raises(flce.SpecError, match="weight_dtype"):
        flce.get_kernel(72, 1003, torch.bfloat16, device=device, weight_dtype=torch.float16)


def test_a_narrow_gradient_may_be_added_to_beside_an_fp32_weight(device: str) -> None:
    hidden, weight, target = layer(device, hidden_size=72, vocab_size=1003)
    wide, narrow = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bfloat16)
    for buffer in (wide, narrow):
        given = hidden.bfloat16().requires_grad_()
        flce.linear_cross_entropy(given, weight, target, grad_weight_out=buffer).backward()
    assert_close(narrow, wide, torch.bfloat16)


# A process of its own: the largest resident set is kept by the system for the whole of one.
PEAK = """
import sys, torch, flce
limit, vocab, hidden_size, tokens = map(int, sys.argv[1:])
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
hidden = torch.zeros(tokens, hidden_size, dtype=torch.bfloat16).requires_grad_()
weight = torch.full((vocab, hidden_size), 1e-3).requires_grad_()
buffer = torch.full_like(weight, 1e-3)  # touched, so that no page of it is new
target = torch.arange(tokens)
def step():
    loss = flce.linear_cross_entropy(hidden, weight, target, workspace_limit_bytes=limit, grad_weight_out=buffer)
    loss.backward()
step()
forget_peak()
before = peak()
step()
print(peak() - before)
"""


def test_the_limit_is_kept_on_a_cpu() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell a process's largest resident set")
    limit, vocab, hidden_size, tokens = 4 << 20, 100_000, 256, 16
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, (limit, vocab, hidden_size, tokens))], check=True, capture_output=True, text=True
    )
    rounded_copy = 2 * vocab * hidden_size
    assert rounded_copy > 10 * limit
    allowance = 4 << 20  # memory of the interpreter and the allocators
    assert int(done.stdout) <= limit + allowance


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [8 << 20, None], ids=["8MiB", "default"])
def test_the_limit_is_kept_on_a_gpu(device: str, limit: int | None) -> None:
    """Qwen3-1.7B's layer, for which a rounded copy would be 622 MB."""
    tokens, hidden_size, vocab_size = 256, 2048, 151936
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.full((vocab_size, hidden_size), 1e-3, device=device).requires_grad_()
    target = torch.arange(tokens, device=device)
    most = (limit or 64 << 20) + 4 * tokens * hidden_size * (limit is None)
    for _ in range(2):  # compiling and loading belong to the first
        weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = flce.linear_cross_entropy(hidden, weight, target, workspace_limit_bytes=limit, retain_in_grad_weight=False)
        forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        backward = torch.cuda.max_memory_allocated() - before
        hidden.grad = None
    outputs = 3 << 20  # loss, lse, and up to 1 MiB by which the allocator rounds each of scratch and gradients up
    assert forward <= most + outputs
    assert backward <= most + outputs + 4 * weight.numel() + 2 * hidden.numel()


STRICT = """
import sys, torch, flce
hidden_size, vocab_size = map(int, sys.argv[1:])
flce.set_strict(True)
hidden = torch.randn(6, hidden_size, requires_grad=True)
weight = torch.nn.Parameter(torch.randn(vocab_size, hidden_size))
buffer = torch.zeros_like(weight)
for options in ({}, {"grad_weight_out": buffer}):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = flce.linear_cross_entropy(hidden, weight, torch.arange(6), **options)
    loss.backward()
print(weight.grad.dtype, flce.cache_statistics()["compiled"])
"""


def command() -> Path:
    """The `flce` beside the library that the package has loaded."""
    library = Path(os.environ.get("FLCE_LIBRARY", _native.library()._name)).resolve()
    return library.parent.parent / "bin" / "flce"


def test_prewarming_a_config_under_autocast_misses_nothing(tmp_path: Path) -> None:
    if not command().exists():
        pytest.skip(f"no {command()}")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 24, "vocab_size": 93, "dtype": "float32", "tie_word_embeddings": True}))
    environment = os.environ | {"FLCE_CACHE_DIR": str(tmp_path / "cache"), "FLCE_NUM_THREADS": str(torch.get_num_threads())}

    def train() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", STRICT, "24", "93"], env=environment, check=False, capture_output=True, text=True)

    def prewarm(*more: str) -> None:
        subprocess.run(
            [command(), "prewarm", "--hf-config", config, "--device", "cpu", *more], env=environment, check=True, capture_output=True
        )

    prewarm()  # the file's own dtype
    assert "CacheMissError" in train().stderr
    prewarm("--autocast", "bf16")
    done = train()
    assert done.stdout.split() == ["torch.float32", "0"], done.stderr


def test_a_trainer_in_bf16_asks_for_the_kernels_of_autocast(tmp_path: Path) -> None:
    """fp32 parameters, bf16 products, which is what `flce prewarm --autocast bf16` compiles."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from flce import huggingface

    config = transformers.LlamaConfig(
        vocab_size=95, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    model = transformers.LlamaForCausalLM(config).float()
    huggingface.return_hidden_states(model)
    tokens = torch.randint(0, 95, (12,), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}] * 4
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
    )
    before = {kernel.spec for kernel in _kernels.all_kernels()}
    loss = huggingface.CausalLMLoss(model, impl="flce")
    transformers.Trainer(model=model, args=arguments, train_dataset=examples, compute_loss_func=loss).train()
    assert {kernel.spec for kernel in _kernels.all_kernels()} - before == {"D=16,V=95,dtype=bf16,weight_dtype=fp32"}
    assert model.lm_head.weight.dtype is torch.float32
