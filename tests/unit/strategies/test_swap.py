"""Swap files of several roles and runs in one NVMe folder, and cleanup after processes that were killed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from roll.backend import Rank
from roll.errors import ConfigError
from roll.system.own_folder import remove_ownerless
from roll.training.deepspeed import setup as deepspeed_swap
from roll.training.deepspeed.settings import DeepSpeedConfig
from roll.training.deepspeed.setup import own_swap
from tests import limits

RANK = Rank("critic", 0, 2, "127.0.0.1", 0, "cpu", limits.START)
HOLDS = """
import sys, time
from pathlib import Path
from roll.system.own_folder import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    (folder / "0.tensor.swp").write_text("states")
    print(folder, flush=True)
    time.sleep(3600)
"""


def swapping(path: Path) -> DeepSpeedConfig:
    offload = {"device": "nvme", "nvme_path": str(path), "buffer_count": 5}
    return DeepSpeedConfig.model_validate(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": offload,
                "offload_param": offload,
                "reduce_bucket_size": 7,
            }
        }
    )


def paths(config: DeepSpeedConfig) -> list[Path]:
    zero = config.zero_optimization
    assert (
        zero.offload_optimizer
        and zero.offload_param
        and zero.offload_optimizer.nvme_path
        and zero.offload_param.nvme_path
    )
    return [Path(zero.offload_optimizer.nvme_path), Path(zero.offload_param.nvme_path)]


@pytest.fixture
def with_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_swap, "_check", lambda paths, rank: None)


@pytest.mark.usefixtures("with_libaio")
def test_processes_sharing_swap_folder_use_separate_ones(tmp_path: Path) -> None:
    given = swapping(tmp_path)
    with ExitStack() as one, ExitStack() as other:
        mine, theirs = (paths(held.enter_context(own_swap(given, RANK))) for held in (one, other))
        assert len({*mine, *theirs}) == 4
        for folder in (*mine, *theirs):
            assert folder.parent == tmp_path
            (folder / "zero_stage_3").mkdir()
        other.close()
        assert all((folder / "zero_stage_3").is_dir() for folder in mine)
        assert not any(folder.exists() for folder in theirs)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("with_libaio")
def test_the_rest_of_the_configuration_stays(tmp_path: Path) -> None:
    given = swapping(tmp_path)
    with own_swap(given, RANK) as own:
        assert own.zero_optimization.model_extra == {"reduce_bucket_size": 7}
        assert own.zero_optimization.offload_param and own.zero_optimization.offload_param.buffer_count == 5
        assert paths(own) != paths(given)


def test_without_nvme_nothing_is_asked_for() -> None:
    given = DeepSpeedConfig.model_validate({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    with own_swap(given, RANK) as own:
        assert own == given


@pytest.mark.usefixtures("with_libaio")
def test_swap_folder_of_dead_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "zero_stage_3").mkdir()
    with ExitStack() as ends:
        killed, living = (
            ends.enter_context(
                subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
            )
            for _ in range(2)
        )
        ends.callback(living.kill)
        assert killed.stdout and living.stdout
        left, kept = (Path(process.stdout.readline().strip()) for process in (killed, living) if process.stdout)
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with own_swap(swapping(tmp_path), RANK):
            assert not left.exists()
            assert (kept / "0.tensor.swp").read_text() == "states"
        remove_ownerless(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {kept.name, "zero_stage_3"}


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    swap = own_swap(swapping(tmp_path / "none"), RANK)
    with pytest.raises(ConfigError) as raised, swap:
        pass
    zero = "critic.strategy_args.strategy_config.zero_optimization"
    assert [(fault.place, fault.code) for fault in raised.value.faults] == [
        (f"{zero}.offload_optimizer.nvme_path", "not_writable"),
        (f"{zero}.offload_param.nvme_path", "not_writable"),
    ]
