"""Flags of Hydra and of other programs, and drivers that a launcher starts once for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from roll.config.load.compose import plugin_faults
from roll.config.load.flags import launcher_fault
from roll.pipeline import main
from tests import limits
from tests.faults import coded

NAME = ("--config-name", "tiny/tiny_sft")
REFUSED = [
    ("--num_gpus", "4", "use ROLE.device_mapping"),
    ("--num-processes=8", "", "use ROLE.device_mapping"),
    ("--num_nodes", "2", "docs/clusters.md"),
    ("--master_addr", "node0", "Ray connects"),
    ("--node_rank", "1", "Ray connects"),
    ("--no_ssh", "", "Ray connects"),
    ("--local_rank", "0", "Ray connects"),
    ("--model_name_or_path", "m", "use pretrain"),
    ("--dataset_name", "imdb", "use ROLE.data_args.file_name"),
    ("--data_path", "./rm-static", "use ROLE.data_args.file_name"),
    ("--data_split", "9,1,0", "write data_split=VALUE"),
    ("--data_output_path", "x", "HF_DATASETS_CACHE"),
    ("--max_seq_len", "256", "use max_length"),
    ("--dropout", "0.1", "use ROLE.model_args.dropout"),
    ("--add_eot_token", "", "ends with the tokenizer's own end token"),
    ("--eot_token", "</s>", "in its tokenizer_config.json"),
    ("--dtype", "bf16", "write ROLE.model_args.dtype=VALUE (ROLE is actor_train, sft_train"),
    ("--seed", "1234", "write seed=VALUE"),
    ("--dry-run", "", "write dry_run=true"),
    ("--max-steps=10", "", "write max_steps=10"),
    ("--save_steps", "500", "write save_steps=VALUE"),
    ("--per_device_train_batch_size", "4", "write ROLE.training_args.per_device_train_batch_size=VALUE"),
    ("--weight_decay", "0.01", "write ROLE.training_args.weight_decay=VALUE"),
    ("--lr_scheduler_type", "cosine", "write ROLE.training_args.lr_scheduler_type=VALUE"),
    ("--lora_learning_rate", "2e-4", "write ROLE.training_args.lora_learning_rate=VALUE"),
    ("--lora_module_name", "model.layers.", "use ROLE.model_args.lora_target"),
    ("--gradient_checkpointing", "", "true is all, false is none"),
    ("--zero_stage", "2", "${deepspeed_zero2} or ${deepspeed_zero3}"),
    ("--offload", "", "the preset ${deepspeed_zero3_cpuoffload}"),
    ("--enable_tensorboard", "", "use track_with; tensorboard"),
    ("--tensorboard_path", "x", "use track_with; tensorboard"),
    ("--log_dir", "x", "logs/ of output_dir"),
    ("--log_level", "debug", "logs/ of output_dir"),
    ("--config_file", "no_such_file.yaml", "it belongs to accelerate"),
    ("--deepspeed_config", "./ds_config.json", "the path of ds_config.json"),
    ("--report_to", "wandb", "use track_with"),
    ("--deepspeed", "ds.json", "use ROLE.strategy_args.strategy_config"),
    ("--bf16", "True", "use ROLE.model_args.dtype"),
    ("--learning_rate", "1e-5", "write ROLE.training_args.learning_rate=VALUE (ROLE is actor_train, sft_train"),
    ("--output_dir", "x", "write output_dir=VALUE"),
    ("--num_train_epochs", "3", "use ROLE.training_args.num_train_epochs (ROLE is actor_train, sft_train"),
    ("--teapot", "", "docs/configuration.md"),
    ("--config_path", "examples", "write --config-path"),
    ("--hydra_help", "", "write --hydra-help"),
    ("--experimental-rerun", "job.pickle", "same command again"),
]


@pytest.mark.parametrize(("flag", "value", "remedy"), REFUSED, ids=[flag for flag, _, _ in REFUSED])
def test_unknown_flag_is_refused_with_remedy(
    flag: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*NAME, flag, *([value] if value else []), "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[1].startswith(f"  {flag.partition('=')[0]}: ")
    assert remedy in said


FOUND = [
    (["{file}"], "command line: '{file}' is a file"),
    (["max_steps=3", "{folder}/mine"], "command line: '{folder}/mine' is a file"),
    (["--config", "{file}"], "--config: '{file}' is a file"),
    (["--config={file}"], "--config: '{file}' is a file"),
    (["--config_file", "{file}"], "--config_file: '{file}' is a file"),
    (["--config-file", "{file}"], "--config-file: '{file}' is a file"),
]


@pytest.mark.parametrize("folder", ["confs", "."])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(("words", "said"), FOUND)
def test_file_without_flags_is_refused(
    words: list[str],
    said: str,
    absolute: bool,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    above = str(tmp_path / folder) if absolute else folder
    file = Path(above, "mine.yaml")
    file.parent.mkdir(exist_ok=True)
    file.touch()
    named = {"file": f"{above}/mine.yaml", "folder": above}
    assert main([word.format(**named) for word in words]) == 2
    problem, remedy = capsys.readouterr().err.splitlines()[1:3]
    assert problem.startswith(f"  {said.format(**named)}")
    assert remedy.endswith(f"use --config-path {file.parent} --config-name mine")


def test_other_forms_are_refused_with_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yml").touch()
    for words, remedy in {
        ("mine.yml",): "rename it to mine.yaml, and use --config-path . --config-name mine",
        ("tiny_sft", "max_steps=3"): "use --config-name tiny_sft",
        ("no_such.yaml",): "correct the path, and use --config-path FOLDER --config-name NAME",
        ("--config", "no_such.yaml"): "correct the path, and use --config-path FOLDER --config-name NAME",
        ("~validation", "deepspeed=ds.yaml"): "use one of: ",
    }.items():
        assert main(list(words)) == 2
        assert remedy in capsys.readouterr().err


def test_version_names_roll_and_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"roll {version('roll')}, Hydra {version('hydra-core')}\n"


@pytest.mark.parametrize("words", [("--info",), ("-i",), ("--info", "searchpath")])
def test_info_says_where_a_configuration_comes_from(words: tuple[str, ...]) -> None:
    """Run in a separate process, because Hydra logs to the streams that it finds when it first runs."""
    command = [sys.executable, "-m", "roll.pipeline", *NAME, *words, "dry_run=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limits.CALL, check=False)
    assert done.returncode == 0, done.stderr
    assert "Config search path" in done.stdout and "examples/tiny" in done.stdout
    assert ("Defaults Tree" in done.stdout) == (len(words) == 1)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("hydra/launcher=joblib", "--parallel N"),
        ("hydra.launcher.n_jobs=2", "--parallel N"),
        ("hydra/sweeper=optuna", "--multirun KEY=A,B"),
    ],
)
def test_missing_hydra_plugin_is_refused_with_remedy(
    word: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*NAME, "--multirun", "seed=1,2", word, "dry_run=true"]) == 2
    said = capsys.readouterr().err
    place = word.partition("=")[0].replace(".", "/").removesuffix("/n_jobs")
    assert f"  {place}: " in said and remedy in said


def test_a_plugin_that_is_installed_is_refused_too() -> None:
    """An installed launcher would run each job in another process, so this process would never receive the composed
    configuration.
    """
    own = {
        "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
        "sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"},
    }
    assert list(plugin_faults(own)) == []
    (fault,) = plugin_faults(own | {"launcher": {"_target_": "hydra_plugins.hydra_joblib_launcher.JoblibLauncher"}})
    assert coded([fault]) == [("not_supported", "hydra/launcher")] and "JoblibLauncher" in fault.problem


def test_distributed_launcher_is_refused_with_single_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert main([*NAME, "exp_name='two words'", "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "RANK=3, LOCAL_RANK=3, WORLD_SIZE=8 are set" in said
    command = next(line for line in said.splitlines() if "python -m roll.pipeline" in line).partition(": ")[2]
    assert (
        command == """python -m roll.pipeline --config-name tiny/tiny_sft 'exp_name='"'"'two words'"'"'' dry_run=true"""
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert main([*NAME, "dry_run=true"]) == 0


def test_a_driver_that_is_alone_is_not(tmp_path: Path) -> None:
    """Kubernetes pods set RANK and WORLD_SIZE, and Slurm sets names of its own: both are accepted. torchrun with one
    process is refused.
    """
    assert launcher_fault({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "0"}, ["--help"]) is None
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "roll.pipeline",
        *NAME,
    ]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*torchrun, "dry_run=true"], capture_output=True, text=True, timeout=limits.START, env=environment, check=False
    )
    assert done.returncode != 0 and "RANK=0, LOCAL_RANK=0, WORLD_SIZE=1 are set" in done.stderr


def test_help_into_closed_pipe_prints_no_traceback() -> None:
    """As in `python -m roll.pipeline --help | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "roll.pipeline", "--help"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=limits.PROCESS, check=False)
    os.close(writing)
    assert done.stderr == ""
