"""Files, names and packages that cannot be used are refused with place, value and remedy. A few cases run in a separate
process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.pipeline import main
from tests import limits

FILES = [
    ("a: [1\n", "broken.yaml:2", "not YAML", "fix this line"),
    ("a: 1\na: 2\n", "broken.yaml:2", "duplicate key a", "fix this line"),
    ("defaults:\n  - ../config/deepspeed_zero9@_here_\n  - _self_\n", "defaults", "deepspeed_zero9", "deepspeed_zero3"),
    ("exp_name: x\n", "actor_train", "missing", "add the key"),
    ("sft_train: {}\n", "pipeline", "sft_train", "add pipeline: sft"),
    (
        "beta: 0.1\nactor_train: {}\n",
        "pipeline",
        "beta is set",
        "add pipeline: dpo; in rlvr, use kl_loss_coef; it is the weight of the KL",
    ),
    ("exp_name: ${oc.env:ROLL_UNSET_VARIABLE}\n", "exp_name", "ROLL_UNSET_VARIABLE", "fix the expression"),
]
MODELS = [
    (b"{", "cannot be read", "save the model again"),
    (b"[]", "contains no JSON object", "save the model again"),
    (b"\xff\xfe", "cannot be read", "save the model again"),
]
NAMES = [
    (["--config-name", "rlvr_lora_zreo3"], "--config-name", "rlvr_lora_zreo3", "qwen2.5-7B-rlvr/rlvr_lora_zero3"),
    (["--config-path", "nowhere", "--config-name", "a"], "--config-path", "nowhere", "folder"),
    (["--config-dir", "exp", "--config-name", "sund"], "--config-name", "sund", "did you mean sound"),
    (["max_steps=3"], "--config-name", "missing", "qwen2.5-7B-rlvr/rlvr_zero3"),
]


@pytest.mark.parametrize(("text", "place", "value", "remedy"), FILES)
def test_a_bad_file_is_refused(
    folder: Path, refused_by_command: Callable[..., str], text: str, place: str, value: str, remedy: str
) -> None:
    (folder / "exp" / "broken.yaml").write_text(text)
    message = refused_by_command(name="broken")
    assert f"{place}:" in message
    assert value in message
    assert remedy in message


@pytest.mark.parametrize(("content", "value", "remedy"), MODELS)
def test_a_bad_model_config_is_refused(
    folder: Path, refused: Callable[..., str], content: bytes, value: str, remedy: str
) -> None:
    (folder / "model" / "config.json").write_bytes(content)
    message = refused()
    assert "pretrain: model/config.json" in message
    assert value in message
    assert remedy in message


PACKAGES = [
    (["actor_train.model_args.liger=true"], "actor_train.model_args.liger", "liger-kernel", "remove the key"),
    (
        ["++reference={device_mapping:[0],strategy_args:{strategy_name:hf_infer},model_args:{liger:true}}"],
        "reference.model_args.liger",
        "liger-kernel",
        "install",
    ),
]


@pytest.mark.parametrize(("overrides", "place", "package", "remedy"), PACKAGES)
def test_kernel_without_its_package_is_refused(
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    place: str,
    package: str,
    remedy: str,
) -> None:
    monkeypatch.setattr("roll.config.load.on_disk.find_spec", lambda name: None)
    on_gpu = [f"{role}.device_mapping=[0]" for role in ("actor_train", "actor_infer")]
    message = refused(*on_gpu, *overrides)
    assert f"{place}:" in message
    assert f"{package} is not installed" in message
    assert remedy in message
    assert main(["--config-path", "exp", "--config-name", "sound", "dry_run=true", *on_gpu, *overrides]) == 0
    assert f"{package} is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "place", "value", "remedy"), NAMES)
def test_a_bad_name_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], place: str, value: str, remedy: str
) -> None:
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert f"{place}:" in message
    assert value in message
    assert remedy in message


def test_an_unknown_flag_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-path", "exp", "--config-name", "sound", "--nope"]) == 2
    assert "  --nope: is not a flag" in capsys.readouterr().err


def test_nothing_is_written_by_a_refusal(folder: Path, refused_by_command: Callable[..., str]) -> None:
    before = sorted(folder.rglob("*"))
    refused_by_command("--multirun", "seed=1,2")
    refused_by_command("max_step=1")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "place"), [("max_step=3", "max_step:"), ("a=[1", "command line:"), ("pretrain=./nowhere", "pretrain:")]
)
def test_bad_file_exits_2_without_traceback(folder: Path, override: str, place: str) -> None:
    command = [sys.executable, "-m", "roll.pipeline", "--config-path", "exp", "--config-name", "sound", override]
    package = str(Path(sys.modules["roll"].__path__[0]).parent)
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        env={"PYTHONPATH": package, "PATH": ""},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert place in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_tracker_packages_are_refused_before_start(
    folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll.config.derived.trackers.is_installed", lambda package: package == "tensorboard")
    before = sorted(folder.rglob("*"))
    message = refused("track_with=[tensorboard,mlflow,swanlab]")
    for package in ("mlflow", "swanlab"):
        assert re.search(
            f"  track_with: '{package}' .* not installed\n.*`pip install {package}`.*`track_with`", message
        )
    assert "'tensorboard' is requested" not in message
    assert sorted(folder.rglob("*")) == before
    assert main(["--config-path", "exp", "--config-name", "sound", "track_with=mlflow", "dry_run=true"]) == 0
    assert "warning: track_with: 'mlflow' is requested" in capsys.readouterr().err


def test_deepspeed_env_variables_are_planned_or_refused(
    folder: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n")
    assert main(["--config-path", "exp", "--config-name", "sound", "dry_run=true"]) == 0
    assert "NCCL_DEBUG from .deepspeed_env; system_envs" in capsys.readouterr().out
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG\n")
    message = refused()
    assert ".deepspeed_env:1: 'NCCL_DEBUG' " in message and "NCCL_IB_DISABLE=1" in message
