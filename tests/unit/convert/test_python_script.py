"""Python scripts that build a trainer of TRL are read without being run, and rows that are here give the columns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from roll.convert.__main__ import main
from roll.convert.python_script import training_script
from roll.convert.rows import first_row
from roll.pipeline import main as plan

SCRIPT = """
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

LEARNING_RATE = 2e-5
rows = load_dataset("parquet", data_files="rows.parquet")["train"].shuffle(seed=1)


def right(completions, reward_model, **kwargs):
    raise SystemExit("the script was run")


args = GRPOConfig(
    output_dir="out", learning_rate=LEARNING_RATE, num_generations=4, per_device_train_batch_size=8, max_steps=3,
    temperature=float(os.environ["T"]),
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[right], args=args, train_dataset=rows,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
right([], [])
trainer.train()
"""
VERLS_ROW = {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").write_text(SCRIPT)
    return tmp_path


def converted(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(list(words)) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_script_gives_model_rows_adapter_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = converted(capsys, "train_it.py")
    trained = found["actor_train"]
    assert (found["pretrain"], found["max_steps"], found["rollout_batch_size"]) == ("Qwen/Qwen2.5-0.5B-Instruct", 3, 2)
    assert trained["data_args"]["file_name"] == "rows.parquet"
    assert trained["training_args"]["learning_rate"] == 2e-5
    assert (trained["model_args"]["lora_rank"], trained["model_args"]["lora_target"]) == (16, "all-linear")


def test_computed_values_and_functions_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train_it.py"]) == 0
    said = capsys.readouterr().err
    assert "temperature" in said and "train_it:right" in said


def test_models_and_mappings_of_a_trainer_are_read() -> None:
    text = 'm = AutoModelForCausalLM.from_pretrained("a/b", dtype="auto")\nSFTTrainer(m, args=SFTConfig("o", **more))'
    found = training_script(f"{text}\nSFTTrainer('c', eval_dataset=rows)", "x")
    assert found is not None and found.trainer == "sft"
    assert found.keys == {"output_dir": "o", "model_name_or_path": "c"}
    assert found.computed == ("**more", "eval_dataset")
    loaded = training_script(text, "x")
    assert loaded is not None and loaded.keys["model_name_or_path"] == "a/b"


def test_what_a_page_leaves_out_is_computed(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "GRPOTrainer('m', reward_funcs=[make(x=1.5), make(x=2.5)], train_dataset=..., wishes={'a': ..., **more})"
    found = training_script(text, "x")
    assert found is not None and found.computed == ("dataset_name", "wishes")
    (working_folder / "page.py").write_text(text)
    assert list(converted(capsys, "page.py")["rewards"]["make"]["parts"]) == ["make", "make_1"]


@pytest.mark.parametrize(
    ("text", "place"),
    [("\ntrainer = SFTTrainer(model='m', ...)", "page.py:2"), ("def broken(:", "page.py:1"), ("x = '\0'", "page.py")],
)
def test_invalid_python_is_said(
    text: str, place: str, working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (working_folder / "page.py").write_text(text)
    assert main(["page.py"]) == 2
    assert f"{place}: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x = 1", "def broken(:", "GRPO = 1"])
def test_other_python_is_no_training_script(text: str, working_folder: Path) -> None:
    assert training_script(text, "x") is None
    (working_folder / "other.py").write_text(text)
    assert main(["other.py"]) == 2


def test_experiment_for_the_cpu_is_planned(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERLS_ROW] * 8), working_folder / "rows.parquet")
    found = converted(capsys, "train_it.py", "--gpus", "0")
    assert not [role for role in found.values() if isinstance(role, dict) and "device_mapping" in role]
    (working_folder / "moved.yaml").write_text(yaml.safe_dump(found))
    command = ["--config-path", ".", "--config-name", "moved", "dry_run=true"]
    assert plan(command) == 2 and "rewards.right.reward: the required value" in capsys.readouterr().err
    assert plan([*command, "rewards.right.reward=math_rule"]) == 0
    assert main(["train_it.py", "--gpus", "2"]) == 0 and "device_mapping" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train_it.py", "--gpus", "-1"])


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (VERLS_ROW, {"messages": "prompt", "ground_truth": "reward_model.ground_truth"}),
        ({"prompt": "1 + 1", "answer": "2"}, {"prompt": "prompt", "ground_truth": "answer"}),
        ({"prompt": VERLS_ROW["prompt"], "solution": "2"}, {"messages": "prompt", "ground_truth": "solution"}),
        ({"question": "1 + 1"}, {"messages": "prompt", "ground_truth": "solution"}),
    ],
)
def test_rows_that_are_here_give_the_columns(
    row: dict[str, Any], columns: dict[str, str], working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (working_folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = {"model_name_or_path": "m", "num_generations": 4, "max_steps": 10, "dataset_name": "rows.jsonl"}
    (working_folder / "grpo.json").write_text(json.dumps(keys))
    assert main(["grpo.json"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["actor_train"]["data_args"] == {"file_name": "rows.jsonl", **columns}
    assert ("the columns are" in printed.err) == ("question" in row)


PARQUET = 'load_dataset("parquet", data_files="a.parquet", split="train")'


@pytest.mark.parametrize(
    ("lines", "rows", "keys", "changes"),
    [
        ("", f"{PARQUET}.map(f).shuffle()", {"dataset_name": "a.parquet"}, ("map",)),
        (
            f"r = {PARQUET}\nr = r.map(f).select(s)\nr = r.filter(f)",
            "r",
            {"dataset_name": "a.parquet"},
            ("map", "select", "filter"),
        ),
        ("", 'load_dataset("json", data_files=["a", "b"])["train"]', {"dataset_name": ["a", "b"]}, ()),
        (
            "d = {'train': 'a', 'test': f()}",
            'load_dataset("csv", data_files=d, split="train")',
            {"dataset_name": "a"},
            (),
        ),
        ("", 'load_dataset("csv", data_files={"train": "a", "test": "b"})["test"]', {"dataset_name": "b"}, ()),
        (
            "",
            'Dataset.from_parquet("a.parquet").rename_column("x", "y")',
            {"dataset_name": "a.parquet"},
            ("rename_column",),
        ),
        (
            "",
            'load_dataset("openai/gsm8k", "main", split="test")',
            {"dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_train_split": "test"},
            (),
        ),
    ],
)
def test_files_of_load_dataset_are_read(lines: str, rows: str, keys: dict[str, Any], changes: tuple[str, ...]) -> None:
    found = training_script(f"{lines}\nSFTTrainer('m', train_dataset={rows})", "x")
    assert found is not None
    assert found.keys == {"model_name_or_path": "m", **keys}
    assert (found.computed, found.changes) == ((), changes)


@pytest.mark.parametrize("rows", ["make('train')", 'load_dataset("json", data_files=f())', "unknown.map(f)", "a"])
def test_computed_files_are_said(rows: str) -> None:
    found = training_script(f"a = b.map(f)\nb = a.map(f)\nSFTTrainer('m', train_dataset={rows})", "x")
    assert found is not None and (found.computed, found.changes) == (("dataset_name",), ())


@pytest.mark.parametrize(
    ("held_out", "keys", "computed"),
    [
        ("d['test']", {"eval_dataset": "a/b", "dataset_test_split": "test"}, ()),
        ("load_dataset('json', data_files='c')['train']", {"eval_dataset": "c", "dataset_test_split": "train"}, ()),
        ("load_dataset('e', split='validation')", {"eval_dataset": "e", "dataset_test_split": "validation"}, ()),
        ("load_dataset('e', split='train').train_test_split(0.1)['test']", {}, ("eval_dataset",)),
        ("make('e')", {}, ("eval_dataset",)),
        ("None", {"eval_dataset": None}, ()),
    ],
)
def test_held_out_rows_are_read(held_out: str, keys: dict[str, Any], computed: tuple[str, ...]) -> None:
    text = f"d = load_dataset('a/b')\nSFTTrainer('m', train_dataset=d['train'], eval_dataset={held_out})"
    found = training_script(text, "x")
    assert found is not None and found.computed == computed
    assert found.keys == {"model_name_or_path": "m", "dataset_name": "a/b", **keys}


def test_held_out_rows_are_validated_on(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace("max_steps=3", "max_steps=3, eval_strategy='steps'").replace(
        "train_dataset=rows", "train_dataset=rows, eval_dataset=load_dataset('json', data_files='x.jsonl')['train']"
    )
    (working_folder / "train_it.py").write_text(text)
    found = converted(capsys, "train_it.py")
    assert found["validation"]["data_args"]["file_name"] == "x.jsonl"
    assert "split" not in found["validation"]["data_args"]


@pytest.mark.parametrize(
    ("lines", "model", "keys"),
    [
        ("name, out = 'm', 'o'", "name", {"model_name_or_path": "m"}),
        ("name = 'x'\nname = 'm'", "name", {"model_name_or_path": "m"}),
        ("if x:\n  name = 'm'\nelse:\n  name = 'n'", "name", {}),
        (
            "name = 'm'\nmodel = get_peft_model(AutoModel.from_pretrained(name), LoraConfig(r=4))",
            "model",
            {"model_name_or_path": "m", "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
        ),
    ],
)
def test_models_by_name_are_followed(lines: str, model: str, keys: dict[str, Any]) -> None:
    found = training_script(f"{lines}\nSFTTrainer({model})\nname = 'the trained one'", "x")
    assert found is not None and found.keys == keys


@pytest.mark.parametrize(
    ("bits", "keys", "computed"),
    [
        ("BitsAndBytesConfig(load_in_4bit=True)", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, ()),
        (
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
            "bnb_4bit_compute_dtype=torch.float16)",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "use_bnb_nested_quant": True,
                "bnb_4bit_compute_dtype": "torch.float16",
            },
            (),
        ),
        ("BitsAndBytesConfig(load_in_8bit=True, **more)", {"load_in_8bit": True}, ("**more",)),
        ("bits()", {}, ("quantization_config",)),
    ],
)
def test_bits_of_a_model_are_read(bits: str, keys: dict[str, Any], computed: tuple[str, ...]) -> None:
    of_model = f"m = AutoModelForCausalLM.from_pretrained('m', quantization_config={bits})\nSFTTrainer(m)"
    for text in (of_model, f"SFTTrainer('m', quantization_config={bits})"):
        found = training_script(text, "x")
        assert found is not None and (found.keys, found.computed) == ({"model_name_or_path": "m", **keys}, computed)


@pytest.mark.parametrize(
    ("rewards", "keys"),
    [
        ("'org/judge'", {"reward_model_name_or_path": "org/judge"}),
        ("['org/judge']", {"reward_model_name_or_path": "org/judge"}),
        ("[f, 'org/judge']", {"reward_model_name_or_path": "org/judge", "reward_funcs": ["f"]}),
        ("['a/b', 'c/d']", {"reward_model_name_or_path": "a/b", "reward_funcs": ["c/d"]}),
    ],
)
def test_a_text_is_a_reward_model(rewards: str, keys: dict[str, Any]) -> None:
    found = training_script(f"GRPOTrainer('m', reward_funcs={rewards})", "x")
    assert found is not None and (found.keys, found.computed) == ({"model_name_or_path": "m", **keys}, ())


def test_changed_rows_are_said(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERLS_ROW]), working_folder / "rows.parquet")
    (working_folder / "train_it.py").write_text(SCRIPT.replace(".shuffle(seed=1)", ".map(f)"))
    assert main(["train_it.py"]) == 0
    printed = capsys.readouterr()
    assert "ground_truth: reward_model.ground_truth" in printed.out and "changes the rows with .map," in printed.err


def test_rewards_and_adapters_of_a_script_are_named() -> None:
    imports = "from trl.rewards import accuracy_reward\nfrom mine import score\n"
    rewards = "[accuracy_reward, score, make(3)]"
    found = training_script(f"{imports}GRPOTrainer('m', {rewards}, peft_config=LoraConfig(r=8, bias='none'))", "x")
    assert found is not None and found.computed == ()
    assert found.keys["reward_funcs"] == ["accuracy_reward", "mine:score", "make(3)"]
    assert (found.keys["lora_r"], found.keys["lora_bias"]) == (8, "none")
    found = training_script("GRPOTrainer('m', f, c, 'rows', 'held_out', extra, peft_config=adapter())", "x")
    assert found is not None and found.computed == ("extra", "peft_config")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"prompt": "x", "answer": "1"},\n{}]'),
        ("a.json", '{"prompt": "x", "answer": "1"}\n{}'),
        ("a.csv", "prompt,answer\nx,1\n"),
    ],
)
def test_first_row_is_read(name: str, text: str, working_folder: Path) -> None:
    (working_folder / name).write_text(text)
    assert first_row([name]) == {"prompt": "x", "answer": "1"}
    (working_folder / name).write_text("")
    assert first_row(name) is None


def test_an_adapter_has_the_defaults_of_peft() -> None:
    given = {field.name: field.default for field in dataclasses.fields(peft.LoraConfig)}
    found = training_script("from peft import LoraConfig\nGRPOTrainer('m', peft_config=LoraConfig())", "x")
    assert found is not None
    assert [found.keys[name] for name in ("lora_r", "lora_alpha", "lora_dropout")] == [
        given[name] for name in ("r", "lora_alpha", "lora_dropout")
    ]
    found = training_script("GRPOTrainer('m', peft_config=LoraConfig(r=4, lora_dropout=0.1))", "x")
    assert found is not None and [found.keys[name] for name in ("lora_r", "lora_alpha", "lora_dropout")] == [4, 8, 0.1]
