"""save_state and load_state, in one process."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_support import killed_everywhere
from torch import Tensor, nn

from flce import errors
from flce.engine import PackedBatch, Stage, TrainingParts, latest_step, load_state, save_state


class Dropping(Stage):
    """A stage with dropout, whose optimizer has something to remember."""

    def __init__(self, stage: int = 0, num_stages: int = 1, *, width: int = 8, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.stage, self.num_stages, self.hidden_size, self.dtype = stage, num_stages, width, dtype
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.LayerNorm(width), nn.Linear(width, width)).to(dtype)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, batch: PackedBatch | None = None) -> Tensor:
        self.seen += 1
        return self.layers(x)  # type: ignore[no-any-return]


def parts_of(seed: int, kind: Any = torch.optim.AdamW, **options: Any) -> TrainingParts:
    torch.manual_seed(seed)
    stage = Dropping(**options)
    decayed = [parameter for parameter in stage.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in stage.parameters() if parameter.dim() < 2]
    optimizer = kind([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return TrainingParts([stage], optimizer, scheduler)


def train(parts: TrainingParts, steps: int) -> list[float]:
    """Draws from torch, Python and NumPy."""
    numpy = pytest.importorskip("numpy")
    losses = []
    for _ in range(steps):
        x = torch.randn(4, parts.stages[0].hidden_size) * random.random() + numpy.random.rand()
        loss = parts.stages[0](x.to(parts.stages[0].dtype), None).float().square().mean()
        loss.backward()
        assert parts.optimizer is not None
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        parts.lr_scheduler.step()
        losses.append(loss.item())
    return losses


def bits_of(parts: TrainingParts) -> dict[str, Tensor]:
    assert parts.optimizer is not None
    found = dict(parts.stages[0].state_dict())
    for name, parameter in parts.stages[0].named_parameters():
        found |= {f"{name} {key}": value for key, value in parts.optimizer.state[parameter].items() if isinstance(value, Tensor)}
    return found | {f"lr {number}": torch.tensor(group["lr"]) for number, group in enumerate(parts.optimizer.param_groups)}


def assert_equal(actual: TrainingParts, expected: TrainingParts) -> None:
    right = bits_of(expected)
    assert bits_of(actual).keys() == right.keys()
    for name, tensor in bits_of(actual).items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_interrupted_training_equals_an_uninterrupted_one(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    whole = parts_of(1, kind, dtype=dtype)
    whole.version_steps = 7
    train(whole, 3)
    save_state(whole, tmp_path / "state", 3, extra={"epoch": 2, "order": torch.arange(5)})
    expected = train(whole, 3)
    torch.manual_seed(99)
    random.seed(99)
    resumed = parts_of(2, kind, dtype=dtype)
    train(resumed, 1)
    restored = load_state(resumed, tmp_path / "state")
    assert (restored.step, restored.version_steps, restored.extra["epoch"], resumed.version_steps) == (3, 7, 2, 7)
    assert torch.equal(restored.extra["order"], torch.arange(5))
    assert train(resumed, 3) == expected
    assert_equal(resumed, whole)


def test_wide_moments_of_narrow_parameters_stay_wide(tmp_path: Path) -> None:
    whole = parts_of(1, dtype=torch.bfloat16)
    assert whole.optimizer is not None
    train(whole, 1)
    for state in whole.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    save_state(whole, tmp_path, 1)
    resumed = parts_of(2, dtype=torch.bfloat16)
    load_state(resumed, tmp_path)
    assert_equal(resumed, whole)
    assert resumed.optimizer is not None
    assert all(state["exp_avg"].dtype == torch.float32 for state in resumed.optimizer.state.values())


SCHEDULERS = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(tmp_path: Path, name: str) -> None:
    made = []
    for seed in (1, 2):
        made.append(parts_of(seed))
        made[-1].lr_scheduler = SCHEDULERS[name](made[-1].optimizer)
    whole, resumed = made
    train(whole, 2)
    save_state(whole, tmp_path, 2)
    expected = train(whole, 3)
    load_state(resumed, tmp_path)
    assert train(resumed, 3) == expected
    assert_equal(resumed, whole)


def test_older_states_go_and_the_latest_is_named(tmp_path: Path) -> None:
    parts = parts_of(1)
    assert latest_step(tmp_path) is None
    with pytest.raises(errors.CheckpointError, match="has no state: there is no file 'latest'"):
        load_state(parts, tmp_path)
    for step in (1, 5, 12):
        train(parts, 1)
        assert save_state(parts, tmp_path, step, keep=2) == tmp_path / f"step-{step:08d}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005", "step-00000012"]
    assert latest_step(tmp_path) == 12
    assert sorted(path.name for path in (tmp_path / "step-00000012").iterdir()) == ["flce-state.json", "rank-00-of-01.data-00-of-01.pt"]
    assert load_state(parts, tmp_path, step=5).step == 5
    with pytest.raises(errors.CheckpointError, match=r"step-00000007.*does not exist"):
        load_state(parts, tmp_path, step=7)
    for wrong in ("1", -1, True, 1.0):
        with pytest.raises(errors.ArgumentError, match=r"step is .*; it must be an integer of 0 or more"):
            load_state(parts, tmp_path, step=wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.ArgumentError, match=r"step is .*; it must be an integer of 0 or more"):
            save_state(parts, tmp_path, wrong)  # type: ignore[arg-type]
    save_state(parts, tmp_path, 12)
    (tmp_path / ".step-00000099.flce-partial").mkdir()
    save_state(parts, tmp_path, 13, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000013"]


def test_the_states_that_are_kept_are_those_saved_last(tmp_path: Path) -> None:
    """Back from 300 to 100: the abandoned run's state is older than those that follow."""
    parts = parts_of(1)
    for step in (100, 300, 110, 120):
        save_state(parts, tmp_path, step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000110", "step-00000120"]
    save_state(parts, tmp_path, 110)
    save_state(parts, tmp_path, 115)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000110", "step-00000115"]


def test_a_failed_save_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(1)
    save_state(parts, tmp_path, 1)

    def fail(content: Any, out: Any) -> None:
        out.write(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", fail)
        for step in (1, 2):
            with pytest.raises(errors.CheckpointError, match="was not written: PytorchStreamWriter"):
                save_state(parts, tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert load_state(parts, tmp_path).step == 1


def test_a_save_killed_anywhere_loses_no_state(tmp_path: Path) -> None:
    """State 2 is saved again, and state 1 goes."""
    parts, other = parts_of(1), parts_of(2)
    save_state(parts, tmp_path, 1)
    save_state(parts, tmp_path, 2)
    firsts = [next(each.stages[0].parameters()).detach().clone() for each in (parts, other)]
    found = set()
    for _ in killed_everywhere(lambda: save_state(other, tmp_path, 2, keep=1)):
        loaded = parts_of(3)
        assert load_state(loaded, tmp_path).step == 2
        (which,) = [n for n, first in enumerate(firsts) if torch.equal(first, next(loaded.stages[0].parameters()))]
        found.add(which)
        save_state(parts, tmp_path, 1)
        save_state(parts, tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    assert found == {0, 1}


def other_group() -> TrainingParts:
    parts = parts_of(1)
    assert parts.optimizer is not None
    first, second = parts.optimizer.param_groups
    second["params"].append(first["params"].pop())
    return parts


def other_order() -> TrainingParts:
    parts = parts_of(1)
    assert parts.optimizer is not None
    parts.optimizer.param_groups[0]["params"].reverse()
    return parts


def without(part: str) -> TrainingParts:
    parts = parts_of(1)
    setattr(parts, part, None)
    return parts


MISMATCHES: dict[str, tuple[Any, type[Exception], str]] = {
    "stages": (lambda: parts_of(1, num_stages=2), errors.CheckpointError, "saved with num_stages 1, and this training has 2"),
    "shapes": (
        lambda: parts_of(1, width=4),
        errors.CheckpointError,
        r"'layers.0.weight' of stage 0 .*\[8, 8\], .* has .*\[4, 4\]",
    ),
    "dtypes": (
        lambda: parts_of(1, dtype=torch.bfloat16),
        errors.CheckpointError,
        "of stage 0 torch.float32 .* has torch.bfloat16",
    ),
    "optimizer": (
        lambda: parts_of(1, torch.optim.SGD),
        errors.CheckpointError,
        r"optimizer torch.optim.adamw.AdamW.*has torch.optim.sgd.SGD",
    ),
    "groups": (
        other_group,
        errors.CheckpointError,
        r"optimizer group 0 .*, and this training has \['0:layers.0.weight'\]",
    ),
    "order": (
        other_order,
        errors.CheckpointError,
        r"optimizer group 0 .*, and this training has \['0:layers.3",
    ),
    "no scheduler": (
        lambda: without("lr_scheduler"),
        errors.CheckpointError,
        r"with lr_scheduler torch.*LambdaLR, and this training has None",
    ),
    "no optimizer": (lambda: without("optimizer"), errors.CheckpointError, "with optimizer torch.*and this training has None"),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_another_training_is_refused_and_left_alone(tmp_path: Path, mismatch: str) -> None:
    parts = parts_of(3)
    train(parts, 1)
    save_state(parts, tmp_path, 1)
    make, kind, message = MISMATCHES[mismatch]
    other = make()
    before = {name: tensor.clone() for name, tensor in other.stages[0].state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(kind, match=message):
        load_state(other, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.stages[0].state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_other_names_and_damaged_files_are_refused(tmp_path: Path) -> None:
    parts = parts_of(1)
    folder = save_state(parts, tmp_path, 1)
    renamed = parts_of(1)
    renamed.stages[0].head_bias = nn.Parameter(torch.zeros(2))  # type: ignore[assignment]
    with pytest.raises(errors.CheckpointError, match=r"'head_bias' of stage 0 None, and this training has torch.float32 \[2\]"):
        load_state(renamed, tmp_path)
    file = folder / "rank-00-of-01.data-00-of-01.pt"
    content = file.read_bytes()
    for damaged, message in ((content[:-7], "bytes, and flce-state.json says"), (b"x" * len(content), "cannot be read")):
        file.write_bytes(damaged)
        with pytest.raises(errors.CheckpointError, match=message):
            load_state(parts, tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(errors.CheckpointError, match="names no state"):
        load_state(parts, tmp_path)


class List(list):  # type: ignore[type-arg]
    pass


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize("value", [defaultdict(list), List(), torch.zeros(2).as_subclass(Odd), object()])
def test_what_cannot_be_loaded_leaves_the_state_before(tmp_path: Path, value: Any) -> None:
    parts = parts_of(1)
    train(parts, 1)
    save_state(parts, tmp_path, 1, keep=1, extra=OrderedDict(x=(1, [2.0])))
    with pytest.raises(errors.CheckpointError, match="could not be read again: Weights only load failed"):
        save_state(parts, tmp_path, 2, keep=1, extra={"x": value})
    assert parts.optimizer is not None
    parts.optimizer.state[next(iter(parts.optimizer.state))]["history"] = value
    with pytest.raises(errors.CheckpointError, match="could not be read again: Weights only load failed"):
        save_state(parts, tmp_path, 2, keep=1)
    assert load_state(parts_of(1), tmp_path).extra == {"x": (1, [2.0])}


def test_what_is_no_training_is_not_saved(tmp_path: Path) -> None:
    parts = parts_of(1)
    foreign = parts_of(1)
    foreign.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    for given, options, message in (
        (parts, {"step": -1}, "step is -1"),
        (parts, {"keep": 0}, "keep is 0"),
        (foreign, {}, r"parameter 0 of group 0, of shape \[3\], is not one of stage 0"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            save_state(given, tmp_path / "out", **({"step": 1} | options))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
