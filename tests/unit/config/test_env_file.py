"""Environment variables of workers: `.deepspeed_env`, read as by DeepSpeed's launcher, and which source takes
precedence.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.config.load.env_file import idle_variables, read_env_files
from roll.config.load.user_code import user_parts
from roll.config.schema.roles import RoleConfig
from roll.pipeline import main
from roll.runs.early_processes import worker_environment
from tests.faults import coded


def test_later_env_file_wins_and_comments_are_ignored(tmp_path: Path) -> None:
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
    assert coded([fault]) == [("malformed", f"{file}:2")] and "'NCCL_DEBUG INFO'" in fault.problem


def test_quotes_are_taken_away_as_a_shell_does(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text('A="eth0"\r\nB=\'x y\'\nexport  C = 1 \nD="\nE=\n')
    assert read_env_files([file]) == ({"A": "eth0", "B": "x y", "C": "1", "D": '"', "E": ""}, [])


def test_binary_env_file_and_reserved_variables_are_faults(tmp_path: Path) -> None:
    binary, place = tmp_path / "binary", tmp_path / "place"
    binary.write_bytes(b"A=\xff\n")
    place.write_text("A=1\nRANK=0\nCUDA_VISIBLE_DEVICES=0,1\n")
    variables, faults = read_env_files([binary, place])
    assert variables == {"A": "1"}
    assert coded(faults) == [
        ("unreadable", str(binary)),
        ("not_allowed", f"{place}:2"),
        ("not_allowed", f"{place}:3"),
    ]
    assert "RANK" in faults[1].problem and "device_mapping" in faults[1].remedy


def test_reserved_or_invalid_system_envs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--config-name",
        "rlvr_lora_zero3",
        "dry_run=true",
        "+system_envs.WORLD_SIZE='8'",
        "+actor_infer.system_envs.RANK='0'",
    ]
    assert main([*words, "+rewards.math_rule.system_envs.a-b='1'"]) == 2
    said = capsys.readouterr().err
    assert "  system_envs.WORLD_SIZE: roll sets WORLD_SIZE" in said
    assert "  actor_infer.system_envs.RANK: roll sets RANK" in said
    assert "  rewards.math_rule.system_envs.a-b: 'a-b' " in said


def test_environment_variables_accept_numbers_but_not_booleans(capsys: pytest.CaptureFixture[str]) -> None:
    given: Any = {"NCCL_IB_DISABLE": 1, "RATIO": 0.5, "NCCL_DEBUG": "INFO"}
    role = RoleConfig.model_validate({"strategy_args": {"strategy_name": "hf_infer"}, "system_envs": given})
    assert role.system_envs == {"NCCL_IB_DISABLE": "1", "RATIO": "0.5", "NCCL_DEBUG": "INFO"}
    reward = {"reward": "package.module:function", "system_envs": {"COUNT": 2}}
    (part,) = user_parts({"rewards": {"mine": reward}})
    assert part.environment == {"COUNT": "2"}
    assert main(["--config-name", "rlvr_lora_zero3", "dry_run=true", "+system_envs.NCCL_IB_DISABLE=1"]) == 0
    assert main(["--config-name", "rlvr_lora_zero3", "dry_run=true", "+system_envs.NCCL_IB_DISABLE=true"]) == 2
    assert re.search(r"system_envs.NCCL_IB_DISABLE: true .*\n    give a string", capsys.readouterr().err)


def test_unread_variables_warn_with_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    words = [
        "--config-name",
        "rlvr_lora_zero3",
        "dry_run=true",
        "+system_envs.NCCL_TIMEOUT=3600",
        "+actor_train.system_envs.MASTER_PORT=1",
    ]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert re.search("warning: system_envs.NCCL_TIMEOUT: .* deadlines.collective", said)
    assert re.search("warning: actor_train.system_envs.MASTER_PORT: .* address", said)
    assert "warning: MASTER_ADDR in the environment: " in said
    assert main(["--config-name", "rlvr_lora_zero3", "dry_run=true", "deadlines.collective=3600"]) == 0
    config: Any = SimpleNamespace(system_envs={})
    monkeypatch.setattr("roll.config.load.env_file.model_roles", lambda config: {})
    (line,) = idle_variables(config, {"NCCL_TIMEOUT": "1"}, {"NCCL_TIMEOUT": "1"})
    assert line.startswith("NCCL_TIMEOUT in .deepspeed_env: ")


def test_role_variables_override_root_and_file() -> None:
    plan: Any = SimpleNamespace(environment={"A": "file", "B": "file", "C": "file"})
    config: Any = SimpleNamespace(deterministic=False, system_envs={"B": "root", "C": "root"})
    assert worker_environment(plan, config, {"C": "role"}) == {"A": "file", "B": "root", "C": "role"}
