"""The model card of an export has what the Hub reads, and the newest scores with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from roll.export.convert import write_card
from roll.export.source import find_source, read_run_config
from roll.tracking.card import CARD, model_card, model_class
from roll.tracking.intervals import wilson
from roll.tracking.jsonl import METRICS_FILE, VALIDATION_SAMPLES_FILE
from tests.unit.evaluation.runs import run_folder

GSM8K = "quickstart/gsm8k_rlvr"


def write_lines(file: Path, records: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def card_of(run: Path, step: int, **files: object) -> ModelCard:
    """Return the card of an export with these configuration files."""
    export = run / "export"
    export.mkdir(exist_ok=True)
    for name, values in files.items():
        (export / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return ModelCard(model_card(read_run_config(run), run, export, step))


def test_hub_reads_the_metadata_of_a_policy(tmp_path: Path) -> None:
    card = card_of(run_folder(tmp_path / "run", name=GSM8K), 200, config={"architectures": ["Qwen2ForCausalLM"]})
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["roll", "rlvr"],
    }
    assert "from transformers import AutoModelForCausalLM" in card.text and "in 200 steps" in card.text
    for row in ("adv_estimator | grpo", "rewards.math_rule | math_rule", "data_args.file_name | train.jsonl"):
        assert row in card.text


def test_a_local_base_model_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for folder in ("mine/model", str(tmp_path / "mine/model"), "./a/b/c"):
        run = run_folder(tmp_path / folder.replace("/", "_"), f"pretrain={folder}", name=GSM8K)
        card = card_of(run, 1)
        assert "base_model" not in card.data.to_dict() and folder not in card.content


@pytest.mark.parametrize("kind", ["nf4", "nf4_double"])
def test_qlora_adapter_names_form_of_its_base(tmp_path: Path, kind: str) -> None:
    adapter = f"+actor_train.model_args={{lora_target: all-linear, quantized_base: {kind}, dtype: bf16}}"
    run = run_folder(tmp_path / "run", adapter, name=GSM8K)
    code = card_of(run, 1, adapter_config={}).text.partition("```python\n")[2].partition("```")[0]
    assert compile(code, "card", "exec") and ("double_quant=True" in code) == (kind == "nf4_double")
    assert code.splitlines()[:2] == [
        "from peft import AutoPeftModelForCausalLM",
        "from transformers import BitsAndBytesConfig",
    ]
    assert 'dtype="bfloat16"' in code
    assert 'load_in_4bit=True, bnb_4bit_quant_type="nf4"' in code


def test_an_adapter_names_its_class(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "pretrain=Qwen/Qwen2.5-0.5B")
    card = card_of(run, 1, adapter_config={})
    assert card.data.to_dict()["base_model_relation"] == "adapter" and card.data.to_dict()["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM.from_pretrained" in card.text and "lora_rank | 16" in card.text


def test_a_reward_model_names_its_class(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name="tiny/tiny_reward_model")
    card = card_of(run, 1, config={"architectures": ["Qwen2ForSequenceClassification"]})
    assert card.data.to_dict()["pipeline_tag"] == "text-classification"
    assert "import AutoModelForSequenceClassification" in card.text and "This reward model" in card.text
    assert model_class(run / "export") == ("transformers", "AutoModelForSequenceClassification")


@pytest.mark.parametrize("template", ["raw", "native"])
def test_scoring_code_is_for_native_templates(template: str, tmp_path: Path) -> None:
    columns = {"raw": ["prompt"], "native": ["messages"]}[template]
    words = [f"++reward_train.data_args={{file_name: a.jsonl, template: {template}, chosen: c, rejected: r}}"]
    words += [f"++reward_train.data_args.{column}=p" for column in columns] + ["validation=null"]
    run = run_folder(tmp_path / "run", *words, name="tiny/tiny_reward_model")
    card = card_of(run, 1, config={"architectures": ["Qwen2ForSequenceClassification"]})
    code = card.text.partition("```python\n")[2].partition("```")[0]
    assert compile(code, "card", "exec") and ("apply_chat_template" in code) == (template == "native")


@pytest.mark.parametrize("adapter", [True, False])
def test_only_keys_that_were_read_are_listed(adapter: bool, tmp_path: Path) -> None:
    words = ["++sft_train.model_args.lora_target=all-linear"] if adapter else []
    run = run_folder(tmp_path / "run", "++max_length=64", *words, name="quickstart/gsm8k_sft")
    text = card_of(run, 1).text
    assert ("lora_rank" in text) == adapter and "| max_length | 64 |" in text and "prompt_length" not in text


def test_seeing_reward_model_is_loaded_with_its_code(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name="tiny/tiny_reward_model")
    values = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForSequenceClassification"], "auto_map": {}}
    card = card_of(run, 1, config=values)
    call = 'AutoModelForSequenceClassification.from_pretrained("FOLDER_OR_HUB_NAME", trust_remote_code=True)'
    assert call in card.text


def test_scores_are_the_newest_up_to_the_step(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name=GSM8K)
    scores = {0: 0.25, 20: 0.5, 40: 0.75}
    records = [{"step": step, "val/gsm8k/pass@1": share, "val/gsm8k/avg@2": 0.4} for step, share in scores.items()]
    write_lines(
        run / METRICS_FILE, [*records, {"step": 41, "val/gsm8k/length_mean": None}, {"step": 30, "time/step": 1}]
    )
    answers = {"set": "gsm8k", "responses": [{}, {}], "responses_of_step": 200}
    write_lines(run / VALIDATION_SAMPLES_FILE, [{"step": step, **answers} for step in scores for _ in range(2)])
    low, high = wilson(0.5, 100)
    text = card_of(run, 30).text
    assert f"| gsm8k | pass@1 | 0.5 | {low:.3f} to {high:.3f} | 100 |" in text and "after step 20" in text
    assert "| gsm8k | avg@2 | 0.4 |  |  |" in text and "length_mean" not in text


def test_a_run_without_validation_has_no_scores(tmp_path: Path) -> None:
    assert "## Validation" not in card_of(run_folder(tmp_path / "run", name=GSM8K), 1).text


def test_an_exported_checkpoint_gets_its_card(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name=GSM8K, step=7)
    out = tmp_path / "out"
    out.mkdir()
    write_card(find_source(run), out)
    assert "in 7 steps" in (out / CARD).read_text(encoding="utf-8")


def test_adapter_of_seeing_model_is_loaded_by_transformers(tmp_path: Path) -> None:
    base, export = tmp_path / "base", tmp_path / "export"
    for folder in (base, export):
        folder.mkdir()
    (export / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}), encoding="utf-8")
    for kind, known in (("qwen3_vl", "AutoModelForImageTextToText"), ("qwen3", "AutoPeftModelForCausalLM")):
        (base / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        assert model_class(export)[1] == known
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}), encoding="utf-8")
    assert model_class(export)[1] == "AutoPeftModelForCausalLM"
    (export / "preprocessor_config.json").write_text("{}", encoding="utf-8")  # of one that was trained with its tower
    assert model_class(export)[1] == "AutoModelForImageTextToText"
