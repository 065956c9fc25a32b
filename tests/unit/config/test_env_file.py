"""Variables for every worker: `.deepspeed_env` as DeepSpeed's launcher reads it, and who wins over whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roll.config.env_file import read_env_files
from roll.pipeline.roles import worker_environment


def test_the_later_file_wins_and_comments_are_passed_over(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.write_text("# fabric\nNCCL_IB_DISABLE=1\nNCCL_SOCKET_IFNAME=eth0\n")
    here.write_text("export NCCL_SOCKET_IFNAME=ib0\n\nOPTIONS=a=b c\n")
    variables, faults = read_env_files([home, here, tmp_path / "absent"])
    assert variables == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "ib0", "OPTIONS": "a=b c"} and faults == []


def test_a_line_that_sets_nothing_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text("A=1\nNCCL_DEBUG INFO\n")
    variables, (fault,) = read_env_files([file])
    assert variables == {"A": "1"}
    assert fault.place == f"{file}:2" and "'NCCL_DEBUG INFO' sets no variable" in fault.problem


def test_a_roles_own_variables_win_over_the_roots_and_those_over_the_file() -> None:
    plan: Any = SimpleNamespace(environment={"A": "file", "B": "file", "C": "file"})
    config: Any = SimpleNamespace(system_envs={"B": "root", "C": "root"})
    assert worker_environment(plan, config, {"C": "role"}) == {"A": "file", "B": "root", "C": "role"}
