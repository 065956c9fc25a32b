"""Hostile input is refused: deep nesting, bytes that are not text, and excessive numbers and paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll.pipeline import main
from tests.bad_input.conftest import EXPERIMENT

LONG, LONGER = "x" * 300, "x/" * 3000


FILES = {
    "deep list": ("a: " + "[" * 300 + "]" * 300 + "\n", "spoilt.yaml", "too deeply", "less deeply"),
    "deep block": (
        "\n".join(" " * depth + f"a{depth}:" for depth in range(300)),
        "spoilt.yaml",
        "too deeply",
        "less deeply",
    ),
    "list in itself": ("a: &a [*a]\n", "spoilt.yaml", "contain themselves", "less deeply"),
    "block in itself": ("a: &a {b: {c: *a}}\n", "spoilt.yaml", "contain themselves", "less deeply"),
    "references in a circle": (
        EXPERIMENT + "x: ${y}\ny: ${x}\n",
        "x",
        "Recursive interpolation detected",
        "fix the expression",
    ),
    "not UTF-8": (
        EXPERIMENT.encode() + b"# caf\xe9\n",
        "spoilt.yaml",
        "byte 0xe9",
        "save the file as UTF-8",
    ),
    "UTF-16": (EXPERIMENT.encode("utf-16"), "spoilt.yaml", "byte 0xff", "save the file as UTF-8"),
    "half a pair": (EXPERIMENT + 'system_envs: {A: "\\ud800"}\n', "system_envs.A", "not UTF-8", "remove them"),
    "NUL": (EXPERIMENT + 'system_envs: {A: "\\0"}\n', "system_envs.A", "NUL", "remove them"),
    "a whole number of 5000 digits": (
        EXPERIMENT + f"keep_checkpoints: {'9' * 5000}\n",
        "spoilt.yaml",
        "4300 digits",
        "shorter",
    ),
}
WORDS = [
    ("pipeline=[a]", "pipeline", '["a"]', "use one of: rlvr"),
    ("pipeline={a: 1}", "pipeline", '{"a": 1}', "use one of: rlvr"),
    (f"a={'[' * 300}{']' * 300}", "sound.yaml", "too deeply", "less deeply"),
    (f"++{'a.' * 100}a=1", "a.a", "more than 50", "less deeply"),
    ("pretrain=\udcff", "command line", "not an override", "key=value"),
    (f"output_dir={LONG}", "output_dir", "xxx...", "each name in it of at most 255"),
    (f"output_dir={LONGER}", "output_dir", "x/x/x", "at most 2048 bytes"),
    (f"pretrain={LONG}", "pretrain", "xxx...", "at most 255"),
    (f"actor_train.data_args.file_name=[{LONG}]", "actor_train.data_args.file_name[0]", "xxx...", "at most 255"),
    (f"resume_from_checkpoint={LONG}", "resume_from_checkpoint", "xxx...", "at most 255"),
    ("output_dir=/proc/x", "output_dir", "a file system of the kernel (proc)", "another folder"),
    (f"exp_name={LONG}", "exp_name", "xxx...", "at most 128 characters"),
]
VALUES = [
    (
        "actor_train.data_args.file_name='~nobody-of-this-name/x.jsonl'",
        "actor_train.data_args.file_name",
        "~nobody",
        "create the file",
    ),
    (
        "actor_train.model_args.lora_rank=1000000000000000000",
        "actor_train.model_args.lora_rank",
        "1000000000000000000",
        "at most 16384",
    ),
    ("seed=4600000000000000000", "seed", "4600000000000000000", "below 4294967296"),
    ("seed=4.6e18", "seed", "4.6e+18", "a whole number"),
    ("deadlines.weight_sync=1e-300", "deadlines.weight_sync", "1e-300", "at least 0.1"),
    ("deadlines.train=1e300", "deadlines.train", "1e+300", "at most 10000000"),
    ("max_steps=3000000000", "max_steps", "3000000000", "at most 2147483647"),
    ("max_grad_norm=1e-300", "max_grad_norm", "1e-300", "at least 1e-30"),
    ("entropy_loss_coef=-1e300", "entropy_loss_coef", "-1e+300", "at least -1000000000000"),
    ("rewards.math_rule.world_size=2000000000", "rewards.math_rule.world_size", "2000000000", "at most 16384"),
    ("rewards.math_rule.timeout=1e-300", "rewards.math_rule.timeout", "1e-300", "at least 0.1"),
    (
        "deepspeed_zero3.zero_optimization.reduce_bucket_size=1e300",
        "zero_optimization.reduce_bucket_size",
        "1e+300",
        "whole number",
    ),
    (
        "deepspeed_zero3.zero_optimization.reduce_bucket_size=inf",
        "zero_optimization.reduce_bucket_size",
        "Infinity",
        "a finite number",
    ),
    (
        "actor_infer.strategy_args.strategy_config.engine_args={hf_overrides: {a: [1, nan]}}",
        "engine_args.hf_overrides",
        "NaN",
        "a finite number",
    ),
]
DOMAINS = ["../escape", "a b", "a.b", "x" * 129, "é"]


def cases() -> Iterator[object]:
    for name, case in FILES.items():
        yield pytest.param(*case, id=name)


@pytest.mark.parametrize(("content", "place", "value", "remedy"), list(cases()))
def test_a_file_that_cannot_be_followed_is_refused(
    folder: Path, refused_by_command: Callable[..., str], content: str | bytes, place: str, value: str, remedy: str
) -> None:
    (folder / "exp" / "spoilt.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused_by_command(name="spoilt")
    assert f"{place}: " in message and value in message and remedy in message, message


def test_a_preset_is_looked_through_as_well(folder: Path, refused_by_command: Callable[..., str]) -> None:
    (folder / "exp" / "mine.yaml").write_text("a: &a [*a]\n")
    (folder / "exp" / "spoilt.yaml").write_text("defaults: [mine, _self_]\n")
    assert "spoilt.yaml: " in refused_by_command(name="spoilt")


@pytest.mark.parametrize(("word", "place", "value", "remedy"), WORDS)
def test_a_word_that_cannot_be_followed_is_refused(
    refused_by_command: Callable[..., str], word: str, place: str, value: str, remedy: str
) -> None:
    message = refused_by_command(word, "dry_run=true")
    assert f"{place}: " in message and value in message and remedy in message, message


@pytest.mark.parametrize(("word", "place", "value", "remedy"), VALUES)
def test_a_value_without_measure_is_refused(
    refused: Callable[..., str], word: str, place: str, value: str, remedy: str
) -> None:
    message = refused(word)
    assert f"{place}: " in message and value in message and remedy in message, message


@pytest.mark.parametrize("name", DOMAINS)
def test_a_domain_is_a_name(folder: Path, refused: Callable[..., str], name: str) -> None:
    (folder / "exp" / "sound.yaml").write_text(
        EXPERIMENT.replace("  math_rule: {", f'  "{name}": {{reward: math_rule, ')
    )
    assert f"rewards.{name}: " in refused()


@pytest.mark.parametrize("argv", [["--config-name", LONG], ["--config-path", f"{LONGER}/{LONG}", "--config-name", "a"]])
def test_names_of_experiments_may_be_of_any_length(folder: Path, argv: list[str]) -> None:
    assert main(argv) == 2


def test_a_sweep_without_end_is_refused(refused_by_command: Callable[..., str]) -> None:
    message = refused_by_command("--multirun", "seed=range(0,1000000000)", "dry_run=true")
    assert "command line: " in message and "1,000 jobs" in message


def test_what_is_secret_stands_in_no_message(refused: Callable[..., str]) -> None:
    said = refused(
        "+wandb_api_key=abcdefgh", "++system_envs.OPENAI_API_KEY=[123456789]", "+a.mlflow=http://me:abcdefgh@host/x"
    )
    assert "wandb_api_key" in said and "system_envs.OPENAI_API_KEY" in said and "http://me:***@host/x" in said
    assert "abcdefgh" not in said and "123456789" not in said
