"""Checkpoints with a malicious object that would execute code when it is unpickled."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from roll.errors import CheckpointError
from roll.training.deepspeed.files import (
    FORCE,
    TAG,
    UNIVERSAL,
    load,
    load_states,
    nothing_runs,
    random_file,
    to_universal,
    trained_weights,
    zero_stage,
)

MODEL, STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


class Engine(SimpleNamespace):
    """Stands in for DeepSpeed's engine, and unpickles any object in a checkpoint, as DeepSpeed does."""

    def __init__(self) -> None:
        answers = {"zero_nvme_offload_optimizer": False, "zero_optimization_stage": 3, "autotp_size": 1}
        super().__init__(**{name: lambda answer=answer: answer for name, answer in answers.items()})
        self._config = SimpleNamespace()
        self.optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))

    def load_checkpoint(self, folder: str, tag: str, **options: object) -> None:
        for file in sorted((Path(folder) / tag).glob("*.pt")):
            torch.load(file, weights_only=False)


def checkpoint(folder: Path, planted: Mapping[str, Path], tag: str = TAG) -> Path:
    """Write a checkpoint as DeepSpeed does with ZeRO-3, and return `folder`.

    For each kind of file in `planted`, the file gets an object that would create the folder given there.
    """
    (folder / tag).mkdir()
    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 1, False)
    states = {"optimizer_state_dict": {"zero_stage": ZeroStageEnum(3), "loss_scaler": scaler}}
    model = {"module": {"model.weight": torch.ones(2)}, "shape": torch.Size([2])}
    for name, held in ((MODEL, model), (STATES, states)):
        more = (
            {"more": Planted(planted[kind])}
            if (kind := name.removesuffix("_states.pt").rpartition("_")[2]) in planted
            else {}
        )
        torch.save(held | more, folder / tag / name)
    random_file(folder, 0).touch()
    return folder


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize(
    "read",
    [
        lambda folder: load_states(Engine(), folder, 1, strict=True),
        lambda folder: trained_weights(folder, as_held=True),
        lambda folder: to_universal(folder, folder / "out"),
    ],
)
def test_planted_checkpoint_object_is_refused_unexecuted(
    tmp_path: Path, kind: str, read: Callable[[Path], object]
) -> None:
    made = tmp_path / "made"
    folder = checkpoint(tmp_path, {kind: made})
    name = MODEL if kind == "model" else STATES
    with pytest.raises(CheckpointError, match=rf"{TAG}/{name} .*: posix\.mkdir\. Nothing was executed"):
        read(folder)
    assert not made.exists()
    assert FORCE not in os.environ


def test_planted_object_in_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"model": tmp_path / "made"}, UNIVERSAL)
    with pytest.raises(CheckpointError, match=rf"{UNIVERSAL}/{MODEL} contains an object"):
        load_states(Engine(), folder, 1, strict=True)
    assert not (tmp_path / "made").exists()


def test_what_deepspeed_writes_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {})
    assert load_states(Engine(), folder, 1, strict=True)
    assert zero_stage(folder) == 3


def test_random_states_come_back(tmp_path: Path) -> None:
    own = random.Random(3)
    states = {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(3).get_state(), "python": own.getstate()}
    torch.save(states, file := random_file(tmp_path, 0))
    found = load(file)
    expected = own.random()
    own.setstate(found["python"])
    assert own.random() == expected
    again = np.random.RandomState(0)
    again.set_state(found["numpy"])
    assert again.random_sample() == np.random.RandomState(3).random_sample()
    assert torch.equal(found["torch"], states["torch"])


def test_random_states_that_would_run_are_refused(tmp_path: Path) -> None:
    torch.save({"python": Planted(tmp_path / "made")}, file := random_file(tmp_path, 0))
    with pytest.raises(CheckpointError, match="random_rank0.pt contains an object"):
        load(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("earlier", [None, "0"])
def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, earlier: str | None) -> None:
    monkeypatch.delenv(FORCE, raising=False)
    if earlier is not None:
        monkeypatch.setenv(FORCE, earlier)
    with nothing_runs(tmp_path):
        assert os.environ[FORCE] == "1"
    assert os.environ.get(FORCE) == earlier


class Attribute:
    """Stands in for a member of an enumeration. Any version of Python pickles it as Python 3.11.2 pickles a real
    member.
    """

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (self.kind, self.name)


def test_checkpoint_reader_allows_enumeration_members_only(tmp_path: Path) -> None:
    file = tmp_path / STATES
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "weights")}, file)
    assert load(file) == {"zero_stage": ZeroStageEnum.weights}
    for kind, name in ((ZeroStageEnum, "__init__"), (DynamicLossScaler, "update_scale")):
        torch.save({"zero_stage": Attribute(kind, name)}, file)
        with pytest.raises(CheckpointError, match="Nothing was executed"):
            load(file)
