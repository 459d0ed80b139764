"""flce-shard-checkpoint: what it writes, reads back, refuses and leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from killed_support import killed_everywhere
from torch import Tensor

from flce import errors
from flce.engine import _shard, _shard_command, merge_checkpoint, shard_checkpoint
from flce.engine._checkpoint_files import INDEX_NAME, open_checkpoint
from flce.engine._plan import NAMES, plan_stages

transformers = pytest.importorskip("transformers")
st = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GPT2_SIZES = {"vocab_size": 96, "n_positions": 40, "n_embd": 32, "n_layer": 5, "n_head": 4}


def config_of(model_type: str, *, tied: bool) -> Any:
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    return transformers.AutoConfig.for_model(model_type, **sizes, tie_word_embeddings=tied)


def save_model(folder: Path, model_type: str = "llama", *, tied: bool = False, **options: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config_of(model_type, tied=tied), dtype=torch.bfloat16)
    model.save_pretrained(folder, **options)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= st.load_file(file)
    return found


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.reshape(-1).view(torch.uint8) for t in (actual[name], tensor)]
        assert torch.equal(*bits), name


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "flce.engine._shard_command", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=300, **options)


def called(*arguments: object) -> int:
    """The command's exit code, in this process."""
    with pytest.raises(SystemExit) as ended:
        _shard_command.main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def restored_sigterm() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.pairwise
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_sharding_and_merging_gives_the_same_bits(tmp_path: Path, model_type: str, tied: bool) -> None:
    """transformers loads the stages as it loads the original, each file holds one stage's tensors, and stages are the plan's."""
    model = save_model(tmp_path / "in", model_type, tied=tied, max_shard_size="20KB" if tied else "5GB")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    for num_stages in (1, 3):
        out, merged = tmp_path / f"out{num_stages}", tmp_path / f"merged{num_stages}"
        report = shard_checkpoint(tmp_path / "in", out, num_stages, shards_per_stage=2)
        index = json.loads((out / INDEX_NAME).read_text())
        plan = plan_stages(model.config, num_stages)
        assert tuple(index["metadata"]["flce"]["starts"]) == plan.starts
        assert index["metadata"]["flce"]["num_stages"] == num_stages == len(report["stages"])
        for stage in range(num_stages):
            files = sorted(out.glob(f"model-stage-{stage:02d}-of-{num_stages:02d}-shard-*-of-02.safetensors"))
            assert len(files) == 2
            for name in (name for file in files for name in st.load_file(file)):
                assert stage in plan.stages_of(name), name
        again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert_same_bits(dict(again.state_dict()), dict(model.state_dict()))
        assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
        merge_checkpoint(out, merged, max_shard_bytes=20_000)
        assert_same_bits(tensors_of(merged), tensors_of(tmp_path / "in"))
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (merged / name).read_bytes() == (out / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
        assert all(st.safe_open(file, "pt").metadata() == {"format": "pt"} for file in merged.glob("*.safetensors"))
    last = tensors_of(tmp_path / "out3")
    assert ("lm_head.weight" in last) and (("lm_head.weight" in tensors_of(tmp_path / "in")) != tied)


def synthetic(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    st.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = {} if "model_type" in config else {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def llama_tensors(rows: int = 8, num_layers: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(rows, 16) for i in range(num_layers)}
    return (
        made
        | {name: torch.randn(rows, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        | {"model.norm.weight": torch.randn(16)}
    )


def test_every_dtype_and_shape_of_safetensors_survives(tmp_path: Path) -> None:
    tensors = llama_tensors()
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    for dtype in dtypes:
        for kind, shape in {"scalar": (), "empty": (0, 3), "odd": (3, 5)}.items():
            bits = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensors[f"model.layers.1.{kind}.{str(dtype)[6:]}"] = bits.view(dtype).reshape(shape)
    synthetic(tmp_path / "in", tensors)
    shard_checkpoint(tmp_path / "in", tmp_path / "out", 2, shards_per_stage=2)
    assert_same_bits(tensors_of(tmp_path / "out"), tensors)
    merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    assert_same_bits(tensors_of(tmp_path / "merged"), tensors)


def test_stages_are_cut_into_another_number_of_stages(tmp_path: Path) -> None:
    save_model(tmp_path / "in", "qwen3", tied=True)
    shard_checkpoint(tmp_path / "in", tmp_path / "four", 4)
    shard_checkpoint(tmp_path / "four", tmp_path / "two", 2)
    shard_checkpoint(tmp_path / "in", tmp_path / "direct", 2)
    for file in (tmp_path / "direct").iterdir():
        assert (tmp_path / "two" / file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_of_the_bare_model_keeps_its_names(tmp_path: Path) -> None:
    """GPT-2's on the hub has no "transformer." before its names, and masks that models compute themselves."""
    model = transformers.GPT2Model(config_of("gpt2", tied=True))
    tensors = dict(model.state_dict()) | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}
    synthetic(tmp_path / "in", tensors, **model.config.to_dict())
    report = shard_checkpoint(tmp_path / "in", tmp_path / "out", 2)
    assert report["copies"] == {"lm_head.weight": "wte.weight"}
    starts = plan_stages(model.config, 2).starts
    assert [stage["layers"] for stage in report["stages"]] == [[0, starts[1] - 1], [starts[1], 4]]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(dict(loaded.transformer.state_dict()), dict(model.state_dict()))
    merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    assert_same_bits(tensors_of(tmp_path / "merged"), tensors)


def test_the_command_prints_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "in", "llama", tied=True)
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"weights of another kind")
    assert called(tmp_path / "in", tmp_path / "out", "--stages", 2, "--dry-run") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dry_run"] and planned["stages"][1]["layers"] == [3, 4]
    assert not (tmp_path / "out").exists()
    assert called(tmp_path / "in", tmp_path / "out", "--stages", 2, "--shards-per-stage", 2) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["dry_run"]
    assert report["copies"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report["copied"] == ["config.json", "generation_config.json"]
    assert report["left_behind"] == ["pytorch_model.bin"]
    for told in report["files"]:
        file = tmp_path / "out" / told["file"]
        assert sum(tensor.nbytes for tensor in st.load_file(file).values()) == told["bytes"]
    assert sum(stage["bytes"] for stage in report["stages"]) == report["total_bytes"]
    assert called(tmp_path / "out", tmp_path / "merged", "--merge", "--max-shard-bytes", "30000") == 0
    assert len(list((tmp_path / "merged").glob("model-0000*.safetensors"))) > 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["in", "out"],
        ["in", "out", "--stages", "0"],
        ["in", "out", "--stages", "2", "--merge"],
        ["in", "out", "--stages", "two"],
        ["in", "out", "--merge", "--max-shard-bytes", "5 parsecs"],
        ["in", "out", "--merge", "--shards-per-stage", "2"],
        ["in", "out", "--stages", "2", "--max-shard-bytes", "5"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*arguments) == 2
    assert "usage:" in capsys.readouterr().err


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5)


def break_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def write_raw(file: Path, header: str, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def add_duplicate(folder: Path) -> None:
    """A tensor in two files."""
    file = folder / "model-00001-of-00002.safetensors"
    st.save_file(st.load_file(file) | {"lm_head.weight": torch.zeros(2)}, file, {"format": "pt"})


def repeat_a_tensor(folder: Path) -> None:
    """A header with a name twice, with other bytes."""
    entry = '"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[%d,%d]}'
    write_raw(folder / "model-00002-of-00002.safetensors", "{" + entry % (0, 8) + "," + entry % (8, 16) + "}", bytes(16))


def of_another_dtype(folder: Path) -> None:
    entry = '"model.norm.weight":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}'
    write_raw(folder / "model-00002-of-00002.safetensors", "{" + entry + "}", bytes(8))


BROKEN = {
    "truncated": (lambda f: truncate(f / "model-00001-of-00002.safetensors"), "is truncated or no safetensors file"),
    "no safetensors": (lambda f: (f / "model-00001-of-00002.safetensors").write_text("x" * 50), "is truncated or no safetensors file"),
    "missing file": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "00002-of-00002.safetensors does not exist"),
    "unreadable": (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "must be a folder that has a config.json"),
    "weights are a folder": (
        lambda f: ((f / "model-00001-of-00002.safetensors").unlink(), (f / "model-00001-of-00002.safetensors").mkdir()),
        "model-00001-of-00002.safetensors",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "must be a folder that has a config.json"),
    "no index": (lambda f: (f / INDEX_NAME).unlink(), "neither model.safetensors nor model.safetensors.index.json"),
    "index is no JSON": (lambda f: (f / INDEX_NAME).write_text("{"), "index.json cannot be read"),
    "index without map": (lambda f: break_index(f, lambda i: i.pop("weight_map")), 'no "weight_map"'),
    "index names what is not there": (
        lambda f: break_index(f, lambda i: i["weight_map"].update({"model.layers.1.x": "model-00001-of-00002.safetensors"})),
        "tensor 'model.layers.1.x' is not there, and the index says it is",
    ),
    "index leaves out a tensor": (
        lambda f: break_index(f, lambda i: i["weight_map"].pop("model.norm.weight")),
        "'model.norm.weight' is not in",
    ),
    "index leaves the folder": (
        lambda f: break_index(f, lambda i: i["weight_map"].update({"model.norm.weight": "../model.safetensors"})),
        "only safetensors files in its own folder",
    ),
    "tensor in two files": (add_duplicate, "tensor 'lm_head.weight' is in model-00002-of-00002.safetensors according to the index"),
    "tensor twice in a header": (repeat_a_tensor, "is truncated or no safetensors file"),
    "another dtype": (of_another_dtype, "tensor 'model.norm.weight' is C64; known are F64"),
    "both kinds": (
        lambda f: shutil.copy(f / "model-00001-of-00002.safetensors", f / "model.safetensors"),
        "has both model.safetensors and",
    ),
    "newer format": (lambda f: break_index(f, lambda i: i["metadata"].update(flce={"format": 9})), "format 9; this version of flce reads"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_checkpoint_fails_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    folder = synthetic(tmp_path / "in", {})
    (folder / "model.safetensors").unlink()
    tensors = llama_tensors()
    cut = {"model-00001-of-00002.safetensors": list(tensors)[:2], "model-00002-of-00002.safetensors": list(tensors)[2:]}
    for file, names in cut.items():
        st.save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in cut.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    assert called(folder, tmp_path / "fine", "--stages", 2) == 0
    shutil.rmtree(tmp_path / "fine")
    break_it, message = BROKEN[broken]
    break_it(folder)
    with pytest.raises((errors.CheckpointError, errors.ArgumentError), match=re.escape(message)):
        shard_checkpoint(folder, tmp_path / "out", 2)
    capsys.readouterr()
    assert called(folder, tmp_path / "out", "--stages", 2) == 1
    assert os.listdir(tmp_path) == ["in"]


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = synthetic(tmp_path / "in", tensors)
    for change, expected in (
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(1)}, "'model.layers.7.mlp.up_proj.weight' belongs to no stage"),
        ({"visual.patch.weight": torch.ones(1)}, "'visual.patch.weight' belongs to no stage"),
    ):
        st.save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(errors.ArgumentError, match=expected):
            shard_checkpoint(folder, tmp_path / "out", 2)
    st.save_file({n: t for n, t in tensors.items() if "layers.1" not in n}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(errors.CheckpointError, match=r"no parameters of layer 1, and config.json says 2"):
        shard_checkpoint(folder, tmp_path / "out", 2)
    st.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(errors.ArgumentError, match="num_stages is 3; a model of 2 layers"):
        shard_checkpoint(folder, tmp_path / "out", 3)
    with pytest.raises(errors.ArgumentError, match="shards_per_stage is 5; stage 0 has 2 tensors"):
        shard_checkpoint(folder, tmp_path / "out", 2, shards_per_stage=5)
    with pytest.raises(errors.CheckpointError, match="not cut into stages"):
        merge_checkpoint(folder, tmp_path / "out")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": True}))
    with pytest.raises(errors.CheckpointError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' differ, and config.json ties"):
        shard_checkpoint(folder, tmp_path / "out", 2)
    (folder / "config.json").write_text(json.dumps({"model_type": "bloom", "num_hidden_layers": 2}))
    with pytest.raises(errors.ArgumentError, match="model_type 'bloom'; stages are made of gemma2"):
        shard_checkpoint(folder, tmp_path / "out", 2)
    assert os.listdir(tmp_path) == ["in"]


def test_merging_refuses_a_tied_weight_whose_copy_has_drifted(tmp_path: Path) -> None:
    save_model(tmp_path / "in", "llama", tied=True)
    shard_checkpoint(tmp_path / "in", tmp_path / "out", 2)
    (file,) = (tmp_path / "out").glob("model-stage-01-*")
    tensors = st.load_file(file)
    tensors["lm_head.weight"][3, 4] += 1
    st.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(errors.CheckpointError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ"):
        merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_target_in_use_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = synthetic(tmp_path / "in", llama_tensors())
    shard_checkpoint(folder, tmp_path / "out", 2)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert called(folder, tmp_path / "out", "--stages", 1) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert called(folder, tmp_path / "out", "--stages", 1, "--overwrite") == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model-stage-00-of-01-shard-00-of-01.safetensors",
        INDEX_NAME,
    ]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("all of it")
    with pytest.raises(errors.ArgumentError, match="it is no checkpoint"):
        shard_checkpoint(folder, tmp_path / "papers", 1, overwrite=True)
    for target in (folder, folder / "stages", tmp_path):
        with pytest.raises(errors.ArgumentError, match=r"neither is in the other|it is no checkpoint"):
            shard_checkpoint(folder, target, 1, overwrite=True)
    with pytest.raises(errors.ArgumentError, match="is a file"):
        shard_checkpoint(folder, tmp_path / "papers" / "thesis.tex", 1, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "papers"]
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file size limit stands in for a full disk in the middle; the free space that there is at the beginning is checked as well."""
    folder = synthetic(tmp_path / "in", llama_tensors(rows=4096))
    shard_checkpoint(folder, tmp_path / "out", 1)
    before = sorted((file.name, file.stat().st_size) for file in (tmp_path / "out").iterdir())
    limited = f"ulimit -f 300; exec {sys.executable} -m flce.engine._shard_command {folder} {tmp_path}/out --stages 2 --overwrite"
    ended = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "was not written" in ended.stderr and "File too large" in ended.stderr
    assert sorted((file.name, file.stat().st_size) for file in (tmp_path / "out").iterdir()) == before
    monkeypatch.setattr(_shard.shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
    with pytest.raises(errors.CheckpointError, match="has 99 bytes free; the checkpoint takes 1"):
        shard_checkpoint(folder, tmp_path / "out", 2, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def eight_layers(folder: Path, rows: int) -> Path:
    """A checkpoint of ten tensors, 4 KB a row."""
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((rows, 1000), float(i)) for i in range(8)}
    tensors |= {name: torch.ones(rows, 1000) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return synthetic(folder, tensors | {"model.norm.weight": torch.ones(1000)}, num_hidden_layers=8)


MEASURE = """
import sys
from flce.engine import _shard_command
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
import safetensors, transformers
from transformers import LlamaForCausalLM
before = peak()
try:
    _shard_command.main(sys.argv[1:])
finally:
    print("grew by", peak() - before, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
@pytest.mark.nightly
def test_memory_stays_far_below_a_shard(tmp_path: Path) -> None:
    large, shard_bytes = eight_layers(tmp_path / "in", 2000), 80_000_000 // 2
    for arguments in ((large, tmp_path / "out", "--stages", 2), (tmp_path / "out", tmp_path / "merged", "--merge")):
        ended = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        grown = int(re.findall(r"grew by (\d+)", ended.stderr)[0])
        assert grown < 16 << 20 < 1.1 * shard_bytes
    assert (tmp_path / "merged" / "model.safetensors").stat().st_size >= 80_000_000
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "merged")


@pytest.mark.parametrize(
    "sent",
    [signal.SIGKILL, *(pytest.param(sent, marks=pytest.mark.nightly) for sent in (signal.SIGTERM, signal.SIGINT))],
    ids=lambda sent: sent.name,
)
def test_a_killed_run_leaves_no_half_file_and_the_next_succeeds(tmp_path: Path, sent: signal.Signals) -> None:
    """The process is stopped when it has written 1.6 of 8 MB, and again with an old checkpoint in the target's place."""
    given, out = eight_layers(tmp_path / "in", 200), tmp_path / "out"
    line = [sys.executable, "-m", "flce.engine._shard_command", str(given), str(out), "--stages", "4", "--overwrite"]
    slow = "import time; from flce.engine import _safetensors as s; w = s.bytes_of; s.bytes_of = lambda *a: (time.sleep(.5), w(*a))[1];"
    line[1:3] = ["-c", slow + "from flce.engine import _shard_command as c; c.main()"]
    old: list[tuple[str, int]] = []
    for number in range(2 if sent == signal.SIGKILL else 1):
        # A shell starts background jobs with SIGINT ignored, and their children inherit that.
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        deadline = time.monotonic() + 300
        while sum(file.stat().st_size for file in tmp_path.glob(".out.flce-partial/*")) < 1_600_000:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        if number == 0:
            with pytest.raises(errors.CheckpointError, match="another process is writing"):
                shard_checkpoint(given, out, 2, overwrite=True)
        process.send_signal(sent)
        assert process.wait(timeout=300) == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[sent]
        left = [] if sent != signal.SIGKILL else [".out.flce-partial"]
        assert sorted(os.listdir(tmp_path)) == [*left, "in"] + (["out"] if old else [])
        if old:
            assert sorted((file.name, file.stat().st_size) for file in out.iterdir()) == old
        shard_checkpoint(given, out, 2, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["in", "out"]
        assert_same_bits(tensors_of(out), tensors_of(given))
        old = sorted((file.name, file.stat().st_size) for file in out.iterdir())


def test_a_run_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    folder, out = synthetic(tmp_path / "in", llama_tensors()), tmp_path / "out"
    shard_checkpoint(folder, out, 2)
    deaths = set()
    for _ in killed_everywhere(lambda: shard_checkpoint(folder, out, 1, overwrite=True)):
        found = open_checkpoint(out)
        assert found.layout is not None
        assert_same_bits(tensors_of(found.folder), tensors_of(folder))
        deaths.add((found.folder.name, found.layout.num_stages))
        again = shard_checkpoint(folder, out, 2, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["in", "out"]
        assert open_checkpoint(out).folder == out and again["stages"]
    assert deaths == {("out", 2), (".out.flce-old", 2), ("out", 1)}


@pytest.mark.full
def test_help_tells_both_directions() -> None:
    ended = command("--help")
    assert ended.returncode == 0
    for word in ("--stages", "--merge", "--overwrite", "examples:", "exit codes:"):
        assert word in ended.stdout
