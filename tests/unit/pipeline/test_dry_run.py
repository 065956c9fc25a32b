"""A dry run tries the first rows of the data files, environments and tools, without the libraries of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from examples.tiny.make_seeing_model import build_config
from roll.errors import BadInput, Fault
from roll.pipeline import main
from roll.runs.dry_run import ROWS, try_dry_run
from tests import limits

BLIND = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
"""The config.json of a model of text alone."""
GOOD = {"prompt": "What is 1 + 1?", "ground_truth": "2", "response": "2"}
TRAINED = {"rlvr": ("gsm8k_rlvr", "actor_train"), "sft": ("quickstart/gsm8k_sft", "sft_train")}


@pytest.fixture
def tried(configured: Callable[..., Any], tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that dry-runs an experiment whose training rows are these."""

    def dry_run(kind: str, rows: list[Any] | str, *words: str, name: str = "rows.jsonl") -> list[str]:
        path, (experiment, role) = tmp_path / name, TRAINED[kind]
        path.write_text(rows if isinstance(rows, str) else "".join(f"{json.dumps(row)}\n" for row in rows))
        words = (f"{role}.data_args.file_name={path}", *words)
        return try_dry_run(configured(experiment, *words))

    return dry_run


def faults(tried: Callable[..., list[str]], *given: Any, **named: Any) -> list[Fault]:
    with pytest.raises(BadInput) as caught:
        tried(*given, **named)
    return list(caught.value.faults)


def test_built_in_rewards_are_tried(tried: Callable[..., list[str]]) -> None:
    [fault] = faults(tried, "rlvr", [GOOD], "rewards.math_rule.concurrency=8")
    assert fault.place == "rewards.math_rule.concurrency"


@pytest.mark.parametrize("kind", TRAINED)
def test_sound_rows_are_said_to_be_tried(kind: str, tried: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = tried(kind, [GOOD])
    assert any(str(tmp_path / "rows.jsonl") in line for line in lines)


def test_first_row_is_shown(tried: Callable[..., list[str]]) -> None:
    long = {**GOOD, "prompt": f"begin {'x ' * 500}end", "ground_truth": 2.5}
    assert any(f"'{GOOD['prompt']}'; its ground_truth is '2'" in line for line in tried("rlvr", [GOOD, long]))
    line = next(line for line in tried("rlvr", [long]) if "begin" in line)
    assert "'begin x x" in line and "x end'" in line and "its ground_truth is 2.5" in line and len(line) < 400
    assert any("the first answers '2'" in line for line in tried("sft", [GOOD]))


def test_a_reference_elsewhere_is_shown(tried: Callable[..., list[str]]) -> None:
    reward = "rewards.math_rule.reward=tests.unit.pipeline.test_dry_run:own"
    row = {**GOOD, "ground_truth": None, "reward_model": {"ground_truth": "2"}}
    line = next(line for line in tried("rlvr", [row], reward) if GOOD["prompt"] in line)
    assert "None" in line and "reward_model.ground_truth is '2'" in line and "data_args.ground_truth" in line
    named = "actor_train.data_args.ground_truth=reward_model.ground_truth"
    line = next(line for line in tried("rlvr", [row], reward, named) if GOOD["prompt"] in line)
    assert "its reward_model.ground_truth is '2'" in line and "but" not in line


def own(prompt: object, response: str, row: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("kind", "column"), [("rlvr", "prompt"), ("rlvr", "ground_truth"), ("sft", "prompt"), ("sft", "response")]
)
def test_missing_column_is_a_fault_at_its_row(
    kind: str, column: str, tried: Callable[..., list[str]], tmp_path: Path
) -> None:
    bad = {name: value for name, value in GOOD.items() if name != column} | {f"{column}s": "3"}
    (fault,) = faults(tried, kind, [GOOD, bad, bad])
    assert fault.place == f"{tmp_path / 'rows.jsonl'}:2"
    assert column in fault.problem
    assert f"{column}s" in fault.problem, "the columns of the row are named"


@pytest.mark.parametrize("text", ["", "\n\n"])
@pytest.mark.parametrize("kind", TRAINED)
def test_a_set_without_rows_is_a_fault(kind: str, text: str, tried: Callable[..., list[str]], tmp_path: Path) -> None:
    (fault,) = faults(tried, kind, text)
    assert (fault.place, fault.code) == (str(tmp_path / "rows.jsonl"), "empty")
    (tmp_path / "more.jsonl").write_text(json.dumps(GOOD))
    both = f"{TRAINED[kind][1]}.data_args.file_name=[{tmp_path / 'rows.jsonl'},{tmp_path / 'more.jsonl'}]"
    assert tried(kind, text, both), "another file of the set has a row"


def test_a_named_reference_is_required(tried: Callable[..., list[str]]) -> None:
    row = {"prompt": "What is 1 + 1?", "ground_truth": None, "answer": "2"}
    assert any("its answer is '2'" in line for line in tried("rlvr", [row]))
    (fault,) = faults(tried, "rlvr", [row], "actor_train.data_args.ground_truth=ground_truth")
    assert fault.code == "missing" and "'ground_truth' is null" in fault.problem


@pytest.mark.parametrize("kind", TRAINED)
def test_a_column_is_no_system_message(kind: str, tried: Callable[..., list[str]]) -> None:
    (fault,) = faults(tried, kind, [{**GOOD, "system": "Be brief."}], f"{TRAINED[kind][1]}.data_args.system=system")
    assert fault.code == "contradiction" and "data_args.system is 'system'" in fault.problem


def test_reference_in_another_column_must_be_named(tried: Callable[..., list[str]]) -> None:
    row = {"prompt": "What is 1 + 1?", "reward_model": {"ground_truth": "2"}}
    (fault,) = faults(tried, "rlvr", [row])
    assert "data_args.ground_truth" in fault.remedy
    assert tried("rlvr", [row], "actor_train.data_args.ground_truth=reward_model.ground_truth")


def test_row_without_domain_is_a_fault(tried: Callable[..., list[str]]) -> None:
    words = ("~rewards.math_rule", "+rewards.exact_match.tag_included=[a]", "+rewards.multiple_choice.tag_included=[b]")
    (fault,) = faults(tried, "rlvr", [{**GOOD, "tag": "c"}], *words)
    assert fault.code == "unknown_name"
    assert tried("rlvr", [{**GOOD, "tag": "a"}], *words)


def test_only_the_beginning_of_a_file_is_read(tried: Callable[..., list[str]]) -> None:
    assert tried("rlvr", [GOOD] * ROWS + [{}])
    long = {**GOOD, "prompt": "a" * (1 << 18)}
    array = json.dumps([long] * 6).removesuffix("]") + ", broken"
    assert tried("rlvr", array, name="rows.json")
    (fault,) = faults(tried, "rlvr", '[{"prompt": "a" broken]', name="short.json")
    assert fault.code == "unreadable"


def test_dry_run_with_rows_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD))
    program = (
        "import sys; from roll.pipeline import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'datasets', 'ray'} & {*sys.modules}; sys.exit(f'{status} {heavy}')"
    )
    words = ["--config-name", "gsm8k_rlvr", "dry_run=true", "actor_train.data_args.file_name=train.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "0 set()"
    assert "train.jsonl can be used" in done.stdout


def test_weight_files_are_tried_by_their_headers(
    tried: Callable[..., list[str]], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    words = (f"pretrain={model}",)
    assert tried("rlvr", [GOOD], *words, "actor_train.model_args.lora_target='v_proj,o_proj'")
    (fault,) = faults(tried, "rlvr", [GOOD], *words, "actor_train.model_args.lora_target=v_porj")
    assert fault.code == "unknown_name" and "v_porj" in fault.problem and "v_proj" in fault.remedy
    both = faults(tried, "rlvr", [{}], *words, "actor_train.model_args.lora_target=v_porj")
    assert "unknown_name" in [one.code for one in both] and len(both) > 1, "rows and weights in one message"
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (fault,) = faults(tried, "rlvr", [GOOD], *words)
    assert fault.place == "pretrain" and fault.code == "unreadable"
    (model / "model.safetensors").unlink()
    assert tried("rlvr", [GOOD], *words), "a plan needs no weights"


def test_unusable_tool_refuses_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_tools.py").write_text("def doubled(number):\n    '''Double a number.'''\n    return number * 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--config-name", "tiny/tiny_agent", "dry_run=true"]
    assert main([*words, "+environments.calculator.tools=[my_tools:doubled]"]) == 2
    assert "type hint" in capfd.readouterr().err
    assert main([*words, "environments.calculator.environment=calculatr"]) == 2
    assert "did you mean 'calculator'" in capfd.readouterr().err
    assert main(words) == 0


@pytest.mark.parametrize("sees", [True, False])
def test_rows_with_pictures_are_tried_if_model_sees(sees: bool, configured: Callable[..., Any], tmp_path: Path) -> None:
    shape = json.loads(build_config("qwen2_5_vl").to_json_string())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(shape if sees else BLIND))
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    # As a column `Image` of datasets: the bytes of a file, and no path.
    table = pa.table({"messages": [shown], "images": [[{"bytes": b"PNG", "path": None}]], "ground_truth": ["4"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    words = (f"pretrain={tmp_path / 'model'}", f"actor_train.data_args.file_name={tmp_path / 'rows.parquet'}")
    config = configured("tiny_rlvr_pictures", *words, "+actor_train.data_args.images=images", "eval_steps=0")
    if sees:
        assert any("'<image>What?'" in line for line in try_dry_run(config))
    else:
        with pytest.raises(BadInput):
            try_dry_run(config)
