"""flce.bench: its numbers are right, a contender that cannot be measured is a row with the reason, and wrong results are found."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor

import flce
from flce import bench
from flce.bench import _cli, _compare, _contenders, _measure, _problem

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_tokens": 40, "hidden_size": 32, "vocab_size": 301, "device": "cpu"}
QUICK: dict[str, Any] = {"rounds": 3, "memory": False}
ARGUMENTS = [
    "--num-tokens",
    "40",
    "--hidden-size",
    "32",
    "--vocab-size",
    "301",
    "--device",
    "cpu",
    "--rounds",
    "3",
    "--no-memory",
    "--quiet",
]
ROW = {
    *("compare", "name", "version", "status", "reason", "ms", "ms_min", "ms_max", "spread", "rounds", "to_floor", "to_flce"),
    *("memory_bytes", "memory_reason", "errors", "errors_to_torch"),
}


class Own(bench.Contender):
    """A contender of the tests' own: what `loss` computes."""

    key = "own"

    def __init__(self, name: str, loss: Callable[[bench.Inputs], Tensor]) -> None:
        self.name, self.loss = name, loss

    def make(self, problem: bench.Problem) -> Callable[[bench.Inputs], Tensor]:
        return self.loss


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for shape in result["shapes"] for row in shape["rows"]}


def test_command_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "result.json", tmp_path / "plot.png"
    options = ["--bias", "--softcap", "5", "--logit-scale", "0.5", "--ignored", "0.25", "--workspace-limit", "8M,32M"]
    code = _cli.main([*ARGUMENTS, *options, "--compare", "torch,liger,trl", "--json", str(written), "--plot", str(drawn)])
    table = capsys.readouterr().out
    assert code == 0, table
    result = json.loads(written.read_text())
    assert result["schema"] == 1 and result["command"][:3] == ["python", "-m", "flce.bench"]
    assert {"date", "flce", "libflce", "commit", "torch", "python", "cpu", "cpu_threads"} <= result["context"].keys()
    (shape,) = result["shapes"]
    assert shape["problem"]["pass"] == "forward_backward" and shape["problem"]["softcap"] == 5
    assert shape["reference"]["dtype"] == "fp64"
    assert shape["floor"]["gemms"] == 3 and shape["floor"]["rounds"] == 3 and shape["floor"]["ms"] > 0
    rows = rows_of(result)
    assert [*rows][:5] == ["flce", "flce, all retained", "flce, nothing retained", "flce, limit 8 MiB", "flce, limit 32 MiB"]
    for name in [*[*rows][:5], "torch", "trl"]:
        row = rows[name]
        assert row.keys() == ROW
        assert row["status"] == "ok", row
        assert row["rounds"] == 3 and row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["to_floor"] == pytest.approx(row["ms"] / shape["floor"]["ms"])
        assert row["to_flce"] == pytest.approx(row["ms"] / rows["flce"]["ms"])
        assert row["errors"].keys() == {"loss", "grad_hidden", "grad_weight", "grad_bias"}
        assert all(0 <= error < 3e-6 for error in row["errors"].values()), row
        assert row["errors_to_torch"]["grad_weight"] == pytest.approx(row["errors"]["grad_weight"] / rows["torch"]["errors"]["grad_weight"])
        assert name in table
    assert rows["trl"]["version"] in table and rows["flce"]["version"] == flce.__version__
    assert rows["liger"]["status"] == "skipped" and rows["liger"]["ms"] is None
    assert "liger: has no logit_scale" in table
    assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.stat().st_size > 10_000


def test_several_numbers_of_tokens_are_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench.compare(**SMALL | {"num_tokens": [16, 40]}, compare="torch", flce=["default"], **QUICK)
    assert [shape["problem"]["num_tokens"] for shape in result["shapes"]] == [16, 40]
    drawn = tmp_path / "plot.svg"
    bench.plot(result, drawn)
    text = drawn.read_text()
    assert text.lstrip().startswith("<?xml") and text.count('id="axes_') == 2
    table = bench.table(result)
    assert table.count("floor: 3 GEMMs, torch.mm") == 2 and re.search(r"^40 +flce ", table, re.MULTILINE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("options", "gemms"), [({}, 3), ({"frozen": "weight"}, 2), ({"frozen": "hidden"}, 2), ({"pass_": "forward"}, 1)])
def test_passes_and_frozen_parts(dtype: str, options: dict[str, Any], gemms: int) -> None:
    result = bench.compare(**SMALL, dtype=dtype, compare=["torch"], bias=True, ignored=0.5, **options, **QUICK)
    assert result["shapes"][0]["floor"]["gemms"] == gemms
    rows = rows_of(result)
    wanted = {"loss", "grad_hidden", "grad_weight", "grad_bias"}
    if options.get("pass_"):
        wanted = {"loss"}
        assert [name for name in rows if name.startswith("flce")] == ["flce"]
    elif options.get("frozen"):
        wanted -= {"grad_hidden"} if options["frozen"] == "hidden" else {"grad_weight", "grad_bias"}
    for name in ("flce", "torch"):
        row = rows[name]
        assert row["status"] == "ok" and row["ms"] > 0, row
        assert row["errors"].keys() == wanted
        assert row["errors"]["loss"] < 1e-2
        assert all(error < 1e-2 for error in row["errors"].values()), row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_equals_the_tests_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_problem, "_TILE_BYTES", 8 * 40 * 70)  # 70 classes at a time in fp64, or 140
    problem = _problem.Problem(40, 32, 301, "bf16", bias=True, softcap=2.0, logit_scale=0.7, ignored=0.3).check()
    inputs = _problem.make_inputs(problem)
    found = _problem.reference(inputs, dtype)
    assert found.dtype == ("fp64" if dtype == torch.float64 else "fp32")
    assert int((inputs.target == -100).sum()) == 12
    leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in ("hidden", "weight", "bias")}
    right = support.reference(leaves["hidden"], leaves["weight"], inputs.target, bias=leaves["bias"], softcap=2.0, logit_scale=0.7)["loss"]
    right.backward()
    assert found.loss == pytest.approx(right.item(), rel=1e-6)
    for name, leaf in leaves.items():
        assert _problem.relative_error(found.gradients[f"grad_{name}"], leaf.grad, 1.0) < 1e-6
        assert _problem.relative_error(3 * leaf.grad, leaf.grad, 1.0) == pytest.approx(2.0)


def test_torchs_native_kernel_is_compared_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follows torch 2.15's native function: the row says why it cannot run, and a call that it takes is not measured twice."""
    chunks, native = (_contenders.by_name(name) for name in ("torch, F.linear_cross_entropy", "torch, native kernel"))
    assert chunks is not None and native is not None and native.key == "torch-native" and "torch-native" in _contenders.NAMES

    def reason(contender: bench.Contender, **changed: Any) -> str:
        of = {"num_tokens": 8, "hidden_size": 8, "vocab_size": 9, "dtype": "bf16", "device": "cuda", **changed}
        with pytest.raises(_contenders.NotComparedError) as caught:
            contender.prepare(bench.Problem(**of))
        return str(caught.value)

    names = ("torch._native.ops.linear_cross_entropy", "torch._native.cutedsl_utils")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    assert reason(native) == f"not in torch {torch.__version__}: 2.15 and newer have it"
    dsl = types.SimpleNamespace(_CUTEDSL_REQUIRED_VERSIONS={"4.6.2"}, runtime_version=lambda: None, check_native_jit_disabled=lambda: False)
    dsl.runtime_available = dsl._version_is_ok = lambda: False
    for name in names:
        monkeypatch.setitem(sys.modules, name, dsl)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason(native, device="cpu") == "needs a CUDA device"
    assert reason(native, dtype="fp32") == "takes bf16 and fp16; this is fp32"
    assert reason(native, softcap=3.0) == "has no softcap"
    assert reason(native) == "needs sm_80 or newer; this is sm_75"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reason(native) == "needs apache-tvm-ffi and nvidia-cutlass-dsl in one of the versions 4.6.2; there is None"
    dsl.runtime_available = dsl._version_is_ok = lambda: True
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        assert reason(chunks) == "torch's native kernel takes the call here: see torch-native"
        assert callable(native.prepare(bench.Problem(8, 8, 9, device="cuda")))
    dsl.check_native_jit_disabled = lambda: True
    assert reason(native) == "is turned off by TORCH_DISABLE_NATIVE_JIT"


def test_wrong_and_failing_contenders_are_rows() -> None:
    def right(given: bench.Inputs) -> Tensor:
        return torch.nn.functional.cross_entropy(given.hidden @ given.weight.T, given.target)

    def fail(given: bench.Inputs) -> Tensor:
        raise ValueError("no such shape\nand more")

    def full(given: bench.Inputs) -> Tensor:
        return given.hidden.new_empty(1 << 62)

    own = [
        Own("right", right),
        Own("half", lambda given: right(given) * 1.5),
        Own("its gradient", lambda given: right(given).detach() + 0 * given.hidden.sum() + 0 * given.weight.sum()),
        Own("detached", lambda given: right(bench.Inputs(given.hidden, given.weight.detach(), None, given.target, given.problem))),
        Own("nan", lambda given: right(given) * math.nan),
        Own("fails", fail),
        Own("too large", full),
    ]
    result = bench.compare(**SMALL, compare=own, **QUICK)
    rows = rows_of(result)
    assert rows["right"]["status"] == "ok" and rows["right"]["errors_to_torch"]["loss"] > 0  # torch's errors, without a row of torch's
    assert "torch" not in rows
    told = {
        "half": "error of loss 5.0e-01",
        "its gradient": "error of grad_hidden 1.0e+00",
        "detached": "no grad_weight",
        "nan": "loss nan",
    }
    for name, reason in told.items():
        assert rows[name]["status"] == "wrong" and reason in rows[name]["reason"], rows[name]
        assert rows[name]["ms"] is None
    assert rows["fails"]["status"] == "failed" and rows["fails"]["reason"] == "ValueError: no such shape"
    assert rows["too large"]["status"] == "failed"
    table = bench.table(result)
    assert re.search(r"^half .*WRONG", table, re.MULTILINE) and "too large: " in table
    assert bench.is_right(result)


def test_a_wrong_flce_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = flce.linear_cross_entropy
    monkeypatch.setattr(flce, "linear_cross_entropy", lambda *given, **options: right(*given, **options) * 1.1)
    assert _cli.main([*ARGUMENTS, "--compare", "torch", "--flce", "default"]) == 1
    assert re.search(r"^flce .*WRONG", capsys.readouterr().out, re.MULTILINE)


def test_everything_has_its_turn_in_each_round() -> None:
    order: list[str] = []

    def named(name: str) -> Own:
        def loss(given: bench.Inputs) -> Tensor:
            order.append(name)
            return torch.nn.functional.cross_entropy(given.hidden @ given.weight.T, given.target)

        return Own(name, loss)

    result = bench.compare(**SMALL, compare=[named("a"), named("b")], flce=["default"], rounds=4, memory=False)
    checked, timed = order[:2], order[2:]
    assert checked == ["a", "b"]
    assert timed == ["b", "a", "a", "b"] * 2
    assert rows_of(result)["a"]["rounds"] == 4


def test_seconds_bound_the_rounds() -> None:
    result = bench.compare(**SMALL, compare="torch", flce=["default"], seconds=0, memory=False)
    assert rows_of(result)["torch"]["rounds"] == _measure.LEAST_ROUNDS


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory on a CPU is read from Linux's /proc")
@pytest.mark.nightly
def test_memory_on_a_cpu_is_that_of_the_logits() -> None:
    own = Own("own", lambda given: flce.linear_cross_entropy(given.hidden, given.weight, given.target))
    shape = {"num_tokens": 512, "hidden_size": 16, "vocab_size": 16384}  # fp32 logits: 32 MiB
    result = bench.compare(**shape, device="cpu", compare=[_contenders.PEERS[0], own], flce=[], workspace_limits=[4 << 20], rounds=1)
    rows = rows_of(result)
    logits = 4 * 512 * 16384
    assert 1.9 * logits < rows["torch"]["memory_bytes"] < 4 * logits
    assert 0 < rows["flce, limit 4 MiB"]["memory_bytes"] < (4 << 20) + (2 << 20)
    assert rows["own"]["memory_bytes"] is None and "of the caller's own" in rows["own"]["memory_reason"]


def test_compiled_torch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as torch.compile traces it; a C++ compiler would take half a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    result = bench.compare(**SMALL | {"num_tokens": [40, 24]}, softcap=3.0, compare="compile", flce=["default"], **QUICK)
    for shape in result["shapes"]:
        (row,) = (row for row in shape["rows"] if row["name"] == "torch.compile")
        assert row["status"] == "ok" and row["errors"]["grad_weight"] < 1e-5, row
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "torch,nonsense"], "'nonsense'; allowed are torch, torch-native, compile, liger, cce, quack, trl"),
        (["--flce", "most"], "'most'; allowed are default, all, none"),
        (["--num-tokens", "0"], "num_tokens is 0"),
        (["--num-tokens", "12,x"], "'12,x': it must be a number"),
        (["--ignored", "1"], "ignored is 1.0"),
        (["--softcap", "-3"], "softcap is -3.0"),
        (["--logit-scale", "0"], "logit_scale is 0.0"),
        (["--rounds", "0"], "rounds is 0"),
        (["--device", "cuda:77"], "device is 'cuda:77'"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--workspace-limit", "1X"], "'1X': it must be a size"),
        (["--spec", "D=32"], "V"),
        (["--spec", "D=32,V=64,label_smoothing=0.1"], "spec has label_smoothing"),
        (["--hf-config", "no-such-config.json"], "cannot be read"),
        (["--plot", "plot.txt"], ".png, .svg, .pdf"),
        (["--json", "no-such-folder/x.json"], "whose folder does not exist"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as raised:
        _cli.main([*ARGUMENTS, *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_what_is_missing_is_a_row() -> None:
    """Runs the module without the folder that has trl."""
    path = [folder for folder in sys.path if folder and Path(folder).name not in ("trainers", "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "flce.bench", *ARGUMENTS, "--compare", "trl,torch", "--flce", "default", "--json", "-"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # and no table
    row = rows_of(result)["trl"]
    if row["status"] == "ok":
        pytest.skip("trl is installed where this interpreter looks by itself")
    assert row["status"] == "skipped" and row["reason"] == "not installed: pip install trl" and row["version"] is None


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as raised:
        _cli.main([*ARGUMENTS, "--compare", "torch", "--plot", "plot.png"])
    said = capsys.readouterr()
    assert raised.value.code == 2 and "pip install matplotlib" in said.err and not said.out


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        _cli.main(["--help"])
    assert raised.value.code == 0
    said = capsys.readouterr().out
    for word in ("--compare", "--num-tokens", "--workspace-limit", "torch,torch-native,compile,liger,cce,quack,trl", "exit code: 0 done"):
        assert word in said


@pytest.mark.parametrize(
    "more",
    [
        {"final_logit_softcapping": 30.0},
        {"logit_scale": 0.25, "dtype": "float16"},
        {"logits_scaling": 8.0, "model_type": "phi"},
        {"text_config": {"vocab_size": 515, "lm_head_multiplier": 0.5}},
    ],
)
def test_config_is_read_as_the_command_reads_it(more: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 64, "vocab_size": 512, "torch_dtype": "bfloat16", "tie_word_embeddings": True} | more))
    specs = [each["spec"] for each in flce.missing(hf_configs=[config], devices=["cpu"], cache_dir=tmp_path / "cache")["missing"]]
    layer = _compare._layer(None, config)
    assert specs and all(_compare._layer(spec, None) == layer for spec in specs)
    result = bench.compare(hf_config=config, num_tokens=24, device="cpu", compare=[], flce=["default"], **QUICK)
    problem = result["shapes"][0]["problem"]
    assert {name: problem[name] for name in layer} == layer and bench.is_right(result)
