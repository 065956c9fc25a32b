"""`python -m roll.convert`: which files it takes, what it prints, and that the experiments are planned."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from roll.convert.__main__ import main
from roll.pipeline import main as plan

SCRIPTS = {
    "verl.sh": "set -x\nif [ $# -lt 1 ]; then echo usage; fi\npython3 -m verl.trainer.main_ppo \\\n"
    "  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\\n  data.train_files=$HOME/train.parquet \\\n"
    "  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.logger=console \\\n"
    "  trainer.total_training_steps=10 some.unheard_of.key=1 $@\n",
    "verl_sft.sh": "torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
    "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] "
    "+data.response_dict_keys=['answer'] model.partial_pretrain=Qwen/Qwen2.5-7B-Instruct trainer.logger=console",
    "openrlhf.sh": "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_dpo \\\n   --pretrain Qwen/Qwen2.5-7B "
    "--dataset pairs.jsonl --train_batch_size 256 --micro_train_batch_size 1 --zero_stage 3 --beta 0.1\nEOF\n"
    'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi',
    "trl.sh": "accelerate launch --config_file zero3.yaml --num_processes 4 trl/scripts/sft.py "
    "--model_name_or_path Qwen/Qwen2.5-7B --dataset_name rows.jsonl --use_peft --lora_target_modules q_proj v_proj "
    "--output_dir output/sft",
    "nested.sh": "ray job submit -- bash -c 'python -m openrlhf.cli.train_rm --pretrain Qwen/Qwen2.5-7B --dataset "
    "pairs.jsonl --save_path output/rm'",
}


def convert(folder: Path, name: str, text: str, *words: str) -> int:
    (folder / name).write_text(text, encoding="utf-8")
    return main([str(folder / name), *words])


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_translated_scripts_are_planned(name: str, working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(working_folder, name, SCRIPTS[name]) == 0
    printed = capsys.readouterr()
    (working_folder / "moved.yaml").write_text(printed.out, encoding="utf-8")
    status = plan(["--config-path", str(working_folder), "--config-name", "moved", "dry_run=true"])
    assert status == 0, capsys.readouterr().err
    assert "not translated" in printed.out.lower() or not printed.err.startswith("not translated")


def test_what_is_lost_is_said_twice(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(working_folder, "verl.sh", SCRIPTS["verl.sh"])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "some.unheard_of.key: unknown" in text


def test_json_file_of_trl_is_read(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"model_name_or_path": "m", "num_generations": 4, "max_steps": 10, "dataset_name": "a.jsonl"}
    assert convert(working_folder, "config.json", json.dumps(keys)) == 0
    assert "num_return_sequences_in_group: 4" in capsys.readouterr().out


ASKED = [{"role": "user", "content": "One?"}]
SAID = [{"role": "assistant", "content": "Two."}]


@pytest.mark.parametrize(
    ("row", "more", "columns", "loss_on"),
    [
        ({"prompt": ASKED, "completion": SAID}, {}, {"messages": "prompt", "response": "completion"}, "response"),
        (
            {"prompt": "One?", "completion": "Two."},
            {"completion_only_loss": False},
            {"prompt": "prompt", "response": "completion", "template": "raw"},
            "all",
        ),
        ({"messages": [*ASKED, *SAID]}, {}, {"messages": "messages"}, "all"),
    ],
)
def test_columns_of_trl_s_completions_are_named(
    working_folder: Path, capsys: pytest.CaptureFixture[str], row: dict, more: dict, columns: dict, loss_on: str
) -> None:
    (working_folder / "a.jsonl").write_text(json.dumps(row))
    keys = {"model_name_or_path": "m", "packing": True, "dataset_name": "a.jsonl", "num_train_epochs": 1, **more}
    assert convert(working_folder, "sft.json", json.dumps(keys)) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    given = made["sft_train"]["data_args"]
    assert {key: given[key] for key in given if key != "file_name"} == columns
    assert made.get("loss_on", "response") == loss_on


def test_flags_precede_the_file_they_name(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (working_folder / "grpo.yaml").write_text("model_name_or_path: m\nnum_generations: 4\nmax_steps: 10\n")
    assert convert(working_folder, "run.sh", "trl grpo --config grpo.yaml --num_generations 16") == 0
    assert "num_return_sequences_in_group: 16" in capsys.readouterr().out


def test_rows_of_parquet_give_the_steps(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 300}), working_folder / "a.parquet")
    script = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet"
    assert convert(working_folder, "run.sh", f"{script} data.train_batch_size=100 trainer.total_epochs=4") == 0
    assert "max_steps: 12\n" in capsys.readouterr().out


def test_variables_can_be_set(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$LLM data.train_files=a.parquet"
    assert convert(working_folder, "run.sh", script) == 0
    printed = capsys.readouterr()
    assert "\npretrain:" not in printed.out and "LLM" in printed.err and "  pretrain: " in printed.err
    assert convert(working_folder, "run.sh", script, "--set", "LLM=Qwen/Qwen3-8B") == 0
    assert "pretrain: Qwen/Qwen3-8B\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.sh", "echo hello\n", ()),
        ("notes.txt", "some text", ()),
        ("list.yaml", "- a\n- b\n", ()),
        ("other.yaml", "a: 1\nb: 2\n", ()),
        ("bad.yaml", "a: [1\n", ()),
        ("gen.sh", "python -m verl.trainer.main_generation model.path=m", ()),
        ("vl.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.image_key=images", ()),
        ("vl.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", ()),
        ("run.sh", "trl grpo --config missing.yaml", ()),
        ("run.sh", "echo", ("--set", "A")),
    ],
)
def test_other_files_are_refused(
    name: str, text: str, words: tuple[str, ...], working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(working_folder, name, text, *words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("1 fault in the configuration:")


def test_missing_file_is_a_fault(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(working_folder / "none.sh")]) == 2
    assert "none.sh" in capsys.readouterr().err
