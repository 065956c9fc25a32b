"""Error messages for checkpoints that this trainer cannot load, or that cannot be converted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from roll.errors import CheckpointError
from roll.training.deepspeed.files import (
    SWAPPED,
    TAG,
    UNIVERSAL,
    load_states,
    random_file,
    to_universal,
    trained_weights,
)


def engine(swaps: bool) -> SimpleNamespace:
    """Return a stand-in for a DeepSpeed engine on one rank, with the methods that are called before loading."""
    return SimpleNamespace(
        zero_nvme_offload_optimizer=lambda: swaps, zero_optimization_stage=lambda: 3, autotp_size=lambda: 1
    )


def written(folder: Path, swapped: bool) -> Path:
    (folder / TAG / SWAPPED if swapped else folder / TAG).mkdir(parents=True)
    random_file(folder, 0).touch()
    return folder


@pytest.mark.parametrize(("swaps", "said"), [(True, "in memory"), (False, "on NVMe")])
def test_nvme_and_memory_optimizer_states_are_not_mixed(tmp_path: Path, swaps: bool, said: str) -> None:
    folder = written(tmp_path, not swaps)
    with pytest.raises(CheckpointError, match=f"states {said}: .*same offload_optimizer"):
        load_states(engine(swaps), folder, 1, strict=True)


def test_states_on_nvme_go_to_as_many_ranks(tmp_path: Path) -> None:
    folder = written(tmp_path, swapped=True)
    with pytest.raises(CheckpointError, match="by 1 ranks, .*are 2; states on NVMe"):
        load_states(engine(swaps=True), folder, 2, strict=True)


def test_a_universal_checkpoint_is_not_swapped(tmp_path: Path) -> None:
    (tmp_path / UNIVERSAL).mkdir()
    with pytest.raises(CheckpointError, match="NVMe: set offload_optimizer.device to cpu"):
        load_states(engine(swaps=True), tmp_path, 1, strict=True)


def test_states_on_nvme_are_not_converted(tmp_path: Path) -> None:
    folder = written(tmp_path, swapped=True)
    with pytest.raises(CheckpointError, match="on NVMe: resume"):
        trained_weights(folder, as_held=False)
    with pytest.raises(CheckpointError, match="on NVMe: resume"):
        to_universal(folder, tmp_path / "out")


def test_states_without_adams_moments_are_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, swapped=False)
    torch.save({"optimizer_state_dict": {"zero_stage": 2}}, folder / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def convert(_: object) -> None:
        raise KeyError("exp_avg")

    monkeypatch.setattr(ds_to_universal, "main", convert)
    with pytest.raises(CheckpointError, match="AdamW"):
        to_universal(folder, tmp_path / "out")
