"""flce.trl: TRL's own trainers with flce in ChunkedLogProbFunction's place, and as they come."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_support
import torch
from torch import Tensor, nn

import flce

pytest.importorskip("trl", minversion="1.15")
peft = pytest.importorskip("peft")

import trl.kernels  # noqa: E402
import trl.kernels.chunked_logprob  # noqa: E402
import trl.trainer.utils  # noqa: E402
import trl_support  # noqa: E402
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as OwnDivergence  # noqa: E402
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS  # noqa: E402
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Own  # noqa: E402

import flce.trl  # noqa: E402
from flce.core import _once  # noqa: E402

Fused = flce.trl.ChunkedLogProbFunction
PLACES = ((trl.kernels, "ChunkedLogProbFunction"), (trl.kernels.chunked_logprob, "ChunkedLogProbFunction"))
PLACES = (*PLACES, (trl.trainer.utils, "_ChunkedLogProbFunction"))


def held() -> set[Any]:
    return {getattr(module, name) for module, name in PLACES}


def called() -> dict[str, int]:
    return flce.trl.calls()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # everything is tiny
    yield
    torch.set_num_threads(threads)
    flce.trl.unpatch()
    assert held() == {Own}


# The function


def arguments(
    num_tokens: int = 19, hidden_size: int = 24, vocab_size: int = 53, bias: bool = True, dtype: torch.dtype = torch.float32
) -> Any:
    make = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(num_tokens, hidden_size, generator=make), torch.randn(vocab_size, hidden_size, generator=make)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=make)
    given = [hidden.to(dtype), 0.3 * weight.to(dtype), torch.randn(vocab_size, generator=make).to(dtype) if bias else None]
    device = rank_support.device()
    return [None if tensor is None else tensor.to(device).requires_grad_() for tensor in given], targets.to(device)


def results(function: Any, tensors: list[Any], targets: Tensor, *options: Any) -> list[Tensor | None]:
    """Outputs, then gradients."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    outputs = function.apply(*leaves, targets, *options)
    upstream = torch.linspace(-1, 2, targets.numel(), device=targets.device)
    total = (outputs[0] * upstream).sum()
    if outputs[1] is not None:
        total = total + (outputs[1] * upstream.flip(0)).sum()
    total.backward()
    return [*outputs, *(None if leaf is None else leaf.grad for leaf in leaves)]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 2e-5) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ((1.0, 16), True),
        ((0.7, 64, None, 0.25), False),
        ((1.3, 16, 5.0, 2.0), True),
        ((1, 32, 30.0), False),
        ((0.9, 16, None, 1.5, ("log_probs",)), True),
        ((0.9, 16, None, 1.5, ("log_probs", "entropy")), True),
        ((0.9, 16, 4.0, 1.5, ("is_top1", "mean_logits")), True),
        ((0.9, 16, None, 1.5, ("log_sum_sq_probs",)), False),
    ],
)
def test_outputs_and_gradients_are_those_of_trl(options: tuple[Any, ...], bias: bool) -> None:
    tensors, targets = arguments(bias=bias)
    before = called()
    assert_same(results(Fused, tensors, targets, *options), results(Own, tensors, targets, *options))
    assert called() == {"fused": before["fused"] + 1, "own": before["own"]}


def test_arguments_are_those_of_trl() -> None:
    flce.trl._own.LOG_PROBS.own()  # compares them
    assert OPTIONAL_OUTPUTS == flce.trl._own.OPTIONAL_OUTPUTS


@pytest.mark.parametrize("num_tokens", [0, 1, 9000])
def test_any_number_of_tokens(num_tokens: int) -> None:
    tensors, targets = arguments(num_tokens, hidden_size=13, vocab_size=37)
    assert_same(results(Fused, tensors, targets, 0.8, 16), results(Own, tensors, targets, 0.8, 16), 2e-3)


def test_sixteen_bit_logits_are_not_rounded() -> None:
    tensors, targets = arguments(64, 32, 211, dtype=torch.bfloat16)
    exact = results(Own, [tensor.detach().double().requires_grad_() for tensor in tensors], targets, 0.8, 64)
    own, fused = results(Own, tensors, targets, 0.8, 64), results(Fused, tensors, targets, 0.8, 64)
    for name, a, b, c in zip(("logprobs", "entropy", "log_sum_sq_probs", "mean_logits"), exact, own, fused, strict=False):
        assert a is not None and b is not None and c is not None
        assert (c - a).abs().max() < (1e-5 if name != "entropy" else 2e-5)
        assert (c - a).abs().max() < (b - a).abs().max() / 10
    for a, b, c in zip(exact[5:], own[5:], fused[5:], strict=True):
        assert a is not None and b is not None and c is not None
        assert c.dtype == torch.bfloat16
        assert (c.double() - a).norm() < 1.05 * (b.double() - a).norm()


def test_a_tie_is_top1_for_the_first_class_alone() -> None:
    device = rank_support.device()
    weight = torch.tensor([[1.0, 0.0], [3.0, 1.0], [3.0, 1.0], [0.0, 0.0]], device=device)
    hidden = torch.tensor([[1.0, 1.0]], device=device).expand(4, 2).contiguous()
    targets = torch.arange(4, device=device)
    own = Own.apply(hidden, weight, None, targets, 1.0, 2)[4]
    assert Fused.apply(hidden, weight, None, targets, 1.0, 2)[4].tolist() == own.tolist() == [False, True, False, False]


def test_a_target_outside_the_vocabulary_counts_for_nothing() -> None:
    tensors, targets = arguments(4)
    targets = torch.tensor([3, -100, -1, 53], device=targets.device)
    made = results(Fused, tensors, targets, 1.0, 16)
    assert made[0] is not None and made[4] is not None and made[5] is not None
    assert made[0][1:].tolist() == [0, 0, 0] and not made[4][1:].any() and made[5][1:].abs().max() == 0
    with pytest.raises(flce.LabelError):
        flce.check_labels()


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 2)])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[int, ...]) -> None:
    tensors, targets = arguments()
    for i in frozen:
        tensors[i].requires_grad_(False)
    made = results(Fused, tensors, targets, 0.9, 16)
    assert [i for i, gradient in enumerate(made[5:]) if gradient is None] == list(frozen)
    assert_same(made, results(Own, tensors, targets, 0.9, 16))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_without_gradients_the_numbers_are_the_same(mode: Any, softcap: float | None) -> None:
    tensors, targets = arguments()
    with mode():
        outputs = Fused.apply(*tensors, targets.int(), 0.9, 16, softcap)
        assert not any(output.requires_grad for output in outputs)
        assert_same(list(outputs), list(Own.apply(*tensors, targets, 0.9, 16, softcap)))


def test_autocast_computes_in_its_dtype() -> None:
    tensors, targets = arguments(64, 32, 101)
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        fused, own = results(Fused, tensors, targets, 0.8, 64), results(Own, tensors, targets, 0.8, 64)
    assert_same(fused[:4], own[:4], 5e-2)  # TRL's own function rounds its logits
    rounded = [tensor.detach().bfloat16().float().requires_grad_() for tensor in tensors]
    assert_same(fused[:3], results(Own, rounded, targets, 0.8, 64)[:3])
    assert [gradient.dtype for gradient in fused[5:] if gradient is not None] == [torch.float32] * 3


def test_a_sixteen_bit_weight_beside_fp32_hidden_states() -> None:  # cast_lm_head_to_fp32 of a head that is not fp32
    (hidden, weight, bias), targets = arguments()
    tensors = [hidden, weight.detach().bfloat16().requires_grad_(), bias.detach().double().requires_grad_()]
    assert_same(results(Fused, tensors, targets, 0.9, 16), results(Own, tensors, targets, 0.9, 16))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_traces_it() -> None:
    tensors, targets = arguments()
    compiled = torch.compile(lambda *given: Fused.apply(*given), fullgraph=True, backend="aot_eager")
    stand_in = types.SimpleNamespace(apply=compiled)
    assert_same(results(stand_in, tensors, targets, 0.9, 16), results(Own, tensors, targets, 0.9, 16))


def test_what_flce_does_not_compute_is_trls_own(caplog: pytest.LogCaptureFixture) -> None:
    _once.said.clear()
    tensors, targets = arguments(dtype=torch.float64)
    before = called()
    with caplog.at_level(logging.WARNING, "flce"):
        for _ in range(2):
            assert_same(results(Fused, tensors, targets, 0.9, 16), results(Own, tensors, targets, 0.9, 16), 0)
        single, _ = arguments()
        for options in ((0.9, 16, None, 0.0), (0.9, 16, 0.0, 1.0)):
            assert_same(results(Fused, single, targets, *options), results(Own, single, targets, *options), 0)
        weight = nn.Parameter(single[1].detach().clone())
        weight.ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed's ZeRO-3 marks a parameter
        Fused.apply(single[0], weight, single[2], targets, 0.9, 16)[0].sum().backward()
    assert called() == {"fused": before["fused"], "own": before["own"] + 5}
    said = [record.getMessage() for record in caplog.records if record.name == "flce"]
    assert len(said) == 4  # each once
    for message, part in zip(said, ("float64", "logit_scale is 0", "final_logit_softcapping is 0", "ZeRO-3"), strict=True):
        assert "TRL's own ChunkedLogProbFunction" in message and part in message


def test_bad_input_is_refused_by_name_with_trls_exceptions() -> None:
    (hidden, weight, bias), targets = arguments()
    for wrong, what in (
        ((hidden[:, :-1], weight, bias, targets), "hidden"),
        ((hidden, weight, bias[:-1], targets), "bias"),
        ((hidden, weight, bias, targets[:-1]), "target"),
        ((hidden, weight, bias, targets.float()), "target"),
    ):
        if hidden.device.type == "cpu":  # not all of it is an error on a GPU
            with pytest.raises(RuntimeError):
                Own.apply(*wrong, 1.0, 16)
        with pytest.raises(RuntimeError, match=what) as caught:
            Fused.apply(*wrong, 1.0, 16)
        assert isinstance(caught.value, flce.ArgumentError)
    for function in (Own, Fused):
        with pytest.raises(ZeroDivisionError):
            function.apply(hidden, weight, bias, targets, 0.0, 16)
    with pytest.raises(flce.DTypeError, match=r"weight has dtype torch\.int8"):  # quantised: TRL reads the integers as they lie
        Fused.apply(hidden, (10 * weight.detach()).to(torch.int8), bias, targets, 1.0, 16)


# Patching


def test_patch_and_unpatch_put_every_name_and_take_it_back() -> None:
    mine = types.ModuleType("mine")
    mine.Mine = Own  # type: ignore[attr-defined]
    flce.trl.patch()
    assert held() == {Fused} and mine.Mine is Own
    flce.trl.patch(mine)  # once more
    assert held() == {Fused} and mine.Mine is Fused
    flce.trl.unpatch()
    assert held() == {Own} and mine.Mine is Own
    flce.trl.unpatch()
    assert held() == {Own}
    with pytest.raises(flce.DTypeError, match="modules has a str"):
        flce.trl.patch("trl")  # type: ignore[arg-type]


def test_with_takes_back_what_it_put() -> None:
    with pytest.raises(KeyError), flce.trl.patch() as outer:
        with flce.trl.patch():
            assert held() == {Fused}
        assert held() == {Fused} and re.search("[567] names", repr(outer))
        raise KeyError
    assert held() == {Own}
    flce.trl.patch()
    with flce.trl.patch():
        pass
    assert held() == {Fused}


def test_a_name_that_is_imported_later_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    later = types.ModuleType("trl.imported_later")
    with flce.trl.patch():
        monkeypatch.setitem(sys.modules, later.__name__, later)
        later.Name = trl.kernels.ChunkedLogProbFunction  # type: ignore[attr-defined]
    assert later.Name is Own  # type: ignore[attr-defined]


def test_threads_patch_and_unpatch_together() -> None:
    failures: list[BaseException] = []
    tensors, targets = arguments()

    def work(index: int) -> None:
        try:
            for i in range(10):
                flce.trl.patch() if (i + index) % 2 else flce.trl.unpatch()
                trl.trainer.utils._ChunkedLogProbFunction.apply(*tensors, targets, 1.0, 16)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    flce.trl.unpatch()
    assert held() == {Own}


def test_another_trl_is_refused_by_name_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: type[Exception], match: str) -> None:
        monkeypatch.setattr(flce.trl._own.LOG_PROBS, "known", None)
        with pytest.raises(kind, match=match):
            flce.trl.patch()
        assert flce.trl._own.LOG_PROBS.known is None and not flce.trl._places

    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "trl", None)
        refused(flce.UnavailableError, r"flce\.trl needs TRL, .*pip install 'trl>=1\.15'")
    with monkeypatch.context() as patches:
        patches.setattr(trl, "__version__", "1.14.2")
        refused(flce.UnavailableError, r"TRL is 1\.14\.2; flce\.trl takes 1\.15 and newer")
    with monkeypatch.context() as patches:
        patches.setattr(trl.kernels.chunked_logprob, "OPTIONAL_OUTPUTS", (*OPTIONAL_OUTPUTS, "top2"))
        refused(flce.ArgumentError, "OPTIONAL_OUTPUTS is")
    with monkeypatch.context() as patches:
        patches.setattr(Own, "forward", staticmethod(lambda ctx, hidden, weight, labels: None))
        refused(flce.ArgumentError, r"takes ctx, hidden, weight, labels; ctx, hidden, weight, bias, targets")
    with monkeypatch.context() as patches:
        patches.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)
        refused(flce.ArgumentError, r"trl\.trainer\.utils has no name for ChunkedLogProbFunction")


# Trainers


@pytest.mark.parametrize(
    ("trainer", "options", "fused"),
    [
        ("sft", {}, 10),
        ("sft", {"loss_type": "dft", "gradient_accumulation_steps": 2}, 20),
        ("sft", {"gradient_checkpointing": True, "packing": True, "max_length": 16}, 10),
        ("sft", {"kind": "cohere"}, 10),
        ("dpo", {}, 20),  # policy and reference
        ("dpo", {"kind": "gemma2", "learning_rate": 0.02}, 20),
        ("grpo", {}, 20),
        ("rloo", {}, 30),
        ("kto", {}, 40),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_ten_steps_are_those_of_trl(trainer: str, options: dict[str, Any], fused: int, tmp_path: Path) -> None:
    make = trl_support.TRAINERS[trainer]
    before = called()
    expected = trl_support.train(make(tmp_path / "own", **options))
    assert called() == before
    with flce.trl.patch():
        actual = trl_support.train(make(tmp_path / "flce", **options))
    assert called() == {"fused": before["fused"] + fused, "own": before["own"]}
    trl_support.compare(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["flce", "trl"])
def test_flce_patch_of_a_model_that_sft_trains_says_where_to_go(
    first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_once, "said", set())
    expected = trl_support.train(trl_support.sft(tmp_path / "own"))
    if first == "flce":
        made = trl_support.model
        monkeypatch.setattr(trl_support, "model", lambda **options: flce.patch(made(**options)))
    trainer = trl_support.sft(tmp_path / "patched")
    if first == "trl":
        flce.patch(trainer.model)
    caplog.clear()
    trl_support.compare(trl_support.train(trainer), expected)
    said = [record.getMessage() for record in caplog.records if record.name == "flce"]
    assert len(said) == 1 and "flce.trl.patch()" in said[0]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_made_before_is_patched_too(tmp_path: Path) -> None:
    trainer = trl_support.sft(tmp_path)
    before = called()["fused"]
    flce.trl.patch()
    trl_support.train(trainer)
    assert called()["fused"] == before + trl_support.STEPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_divergence_of_whole_softmaxes(beta: float, tmp_path: Path) -> None:
    """DistillationTrainer: ten steps are TRL's own within fp32 rounding."""
    expected = trl_support.train(trl_support.distillation(tmp_path / "own", beta=beta))
    before = called()
    with flce.trl.patch():
        actual = trl_support.train(trl_support.distillation(tmp_path / "flce", beta=beta))
    assert called() == {"fused": before["fused"] + trl_support.STEPS, "own": before["own"]}
    trl_support.compare(actual, expected)


def test_the_divergences_arguments_are_trls() -> None:
    """All twelve of them, values and gradients, beside TRL's own function; and what stays TRL's."""
    draw = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(21, 16, generator=draw), torch.randn(21, 24, generator=draw)
    weight, of_teacher = torch.randn(64, 16, generator=draw), torch.randn(70, 24, generator=draw)  # padded further
    biases = torch.randn(64, generator=draw), torch.randn(70, generator=draw)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for beta, formula in ((0.0, ()), (0.4, (1.5, 0.7, 5.0, 0.6, 6.0)), (1.0, (0.5,))):
            made = []
            for function in (OwnDivergence, flce.trl.ChunkedDivergenceFunction):
                leaves = [each.to(dtype).requires_grad_() for each in (student, weight, biases[0])]
                fixed = [each.to(dtype) for each in (teacher, of_teacher, biases[1])]
                divergence, entropy = function.apply(*leaves, *fixed, beta, *formula)
                assert not entropy.requires_grad
                made.append((divergence, entropy, *torch.autograd.grad((divergence * torch.arange(21)).sum(), leaves)))
            for found, expected in zip(*made[::-1], strict=True):
                assert (found - expected).norm() <= bound * expected.norm() and found.dtype is expected.dtype
    turned = weight.t().contiguous().t().requires_grad_(), of_teacher.t().contiguous().t()
    for of_student, of_other in ((turned[0], of_teacher), (weight, turned[1]), turned):  # however the weights lie
        made = [
            function.apply(student, of_student, None, teacher, of_other, None, 0.4)
            for function in (OwnDivergence, flce.trl.ChunkedDivergenceFunction)
        ]
        assert torch.allclose(made[0][0], made[1][0], rtol=1e-5)
    before = called()
    large = (30 * biases[0], 30 * biases[1])
    for beta, dtype in ((1e-8, torch.float32), (0.3, torch.bfloat16)):  # a mixture without digits; biases that bfloat16 would round
        rows = [each.to(dtype) for each in (student, weight, teacher, of_teacher)]
        made = [
            function.apply(*rows[:2], large[0], *rows[2:], large[1], beta)
            for function in (OwnDivergence, flce.trl.ChunkedDivergenceFunction)
        ]
        assert torch.equal(made[0][0], made[1][0])
    assert called()["own"] == before["own"] + 2
    before = called()
    flce.trl.ChunkedDivergenceFunction.apply(student.double(), weight.double(), None, teacher.double(), of_teacher.double(), None, 0.0)
    flce.trl.ChunkedDivergenceFunction.apply(student, weight, None, teacher.bfloat16(), of_teacher.bfloat16(), None, 0.0)
    assert called()["own"] == before["own"] + 2


@pytest.mark.filterwarnings("ignore")
def test_adapters_train_and_one_on_the_head_raises_as_in_trl(tmp_path: Path) -> None:
    def make(folder: str, *modules: str, **more: Any) -> Any:
        torch.manual_seed(5)
        adapter = peft.LoraConfig(r=2, target_modules=list(modules), task_type="CAUSAL_LM", init_lora_weights=False, **more)
        return trl_support.sft(tmp_path / folder, peft_config=adapter, learning_rate=0.01)

    expected = trl_support.train(make("own", "q_proj", "v_proj"))
    whole = trl_support.train(make("own whole", "q_proj", modules_to_save=["lm_head"]))
    before = called()["fused"]
    with flce.trl.patch():
        actual = trl_support.train(make("flce", "q_proj", "v_proj"))
        trl_support.compare(trl_support.train(make("flce whole", "q_proj", modules_to_save=["lm_head"])), whole)
        with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
            make("head", "lm_head")
    assert called()["fused"] == before + 2 * trl_support.STEPS
    assert any("lm_head.modules_to_save" in name for name in whole.gradients[0])
    assert all("lora" in name for name in actual.gradients[0])  # the head is frozen
    trl_support.compare(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_without_labels_gives_a_zero_with_gradients() -> None:
    model = trl_support.model()
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy", "is_top1"))
    with flce.trl.patch():
        made = model(torch.arange(12).view(2, 6), labels=torch.full((2, 6), -100), fused_lm_head=True)
        made.loss.backward()
    assert made.loss.item() == 0
    assert all(parameter.grad is not None and parameter.grad.abs().max() == 0 for parameter in model.parameters())


@pytest.mark.nightly("examples/trl_grpo.py")
def test_the_example_takes_less_memory_with_flce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # freed memory goes back to the system, and a peak shows
    example = Path(__file__).resolve().parent.parent.parent / "examples" / "trl_grpo.py"
    command = [sys.executable, str(example), "--tiny", "--shape", "1x32x16384", "--length", "32", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    losses = [[float(loss) for loss in run.split()] for run in re.findall(r"losses ((?:-?[\d.]+ )+)", result.stdout)]
    assert len(losses) == 2 and len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    own, fused = map(float, re.findall(r"([\d.]+) MiB at their peak", result.stdout))
    assert fused < own / 2
    assert re.search(r"flce computed \d+ calls of the output layer, TRL's own function 0 ", result.stdout)
