"""A tiny variant of `qwen2.5-7B-rlvr/rlvr_lora_zero3` on the CPU: its five domains, with rows in the format of ROLL's
files.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

UNUSED = {"difficulty": "", "prompt": "", "case_type": "", "test_case_function": "", "test_cases": ""}
"""Columns that all of ROLL's files have, and that are empty if the task does not need them."""
ROWS = 8
"""Rows per domain."""


def asked(content: str) -> str:
    return json.dumps([{"role": "user", "content": content}])


def rows(number: int) -> dict[str, dict[str, Any]]:
    """Return one row of each domain. Key: the name of its file."""
    checked = {"func_name": "validate_lowercase", "N": None, "quantifier": None, "end_phrase": None}
    cases = json.dumps([{"stdin": "", "expected_stdout": str(number)}, {"stdin": "", "expected_stdout": "never"}])
    found = {
        "math": {"messages": asked(f"{number}+1="), "ground_truth": str(number + 1), "tag": "deepmath_103k"},
        "code": {
            "messages": asked(f"print {number}"),
            "ground_truth": "",
            "case_type": "input",
            "test_cases": cases,
            "tag": "KodCode",
        },
        "ifeval": {"messages": asked("say it low"), "ground_truth": json.dumps(checked), "tag": "ifeval"},
        "choice": {"messages": asked(f"A or B? {number}"), "ground_truth": "A", "tag": "crossthinkqa"},
        "judge": {"messages": asked(f"who was {number}?"), "ground_truth": str(number), "tag": "RLVR"},
        "unknown": {"messages": asked(f"{number}+2="), "ground_truth": str(number + 2), "tag": "another_benchmark"},
    }
    return {name: {"id": str(number), "source": name, **UNUSED, **row} for name, row in found.items()}


@pytest.fixture
def files(world: World) -> list[str]:
    for name in rows(0):
        text = "".join(json.dumps(rows(number)[name]) + "\n" for number in range(ROWS))
        (world.folder / f"roll_{name}.jsonl").write_text(text)
    return [f"roll_{name}.jsonl" for name in rows(0)]


def overrides(files: list[str]) -> list[str]:
    """Return overrides that make the example small enough for two cores. The domains are not changed."""
    listed = ",".join(files)
    keys = ["pretrain=warm/export", "output_dir=domains", "max_steps=2", "save_at_end=false", "eval_steps=1"]
    keys += [
        "rollout_batch_size=12",
        "num_return_sequences_in_group=2",
        "prompt_length=24",
        "response_length=8",
        "track_with=[]",
    ]
    keys += [f"actor_train.data_args={{file_name: [{listed}], template: raw, messages: messages}}"]
    keys += [
        "validation.data_args={file_name: [roll_math.jsonl], template: raw, messages: messages}",
        "validation.generating_args={}",
    ]
    for role in ("actor_train", "actor_infer", "reference"):
        keys += [f"{role}.device_mapping=null", f"{role}.model_args.dtype=fp32"]
    keys += ["actor_train.model_args.attn_implementation=sdpa", "reference.model_args.attn_implementation=sdpa"]
    keys += ["actor_train.world_size=2", "actor_train.training_args.gradient_accumulation_steps=12"]
    engine = (
        "strategy_args.strategy_config={enforce_eager: true, kv_cache_gib: 0.25, max_num_seqs: 64, "
        "max_model_len: "
        "64, block_size: 32}"
    )
    keys += [f"actor_infer.{engine}", f"rewards.llm_judge.{engine}"]
    keys += [
        "rewards.llm_judge.device_mapping=null",
        "rewards.llm_judge.model_args={model_name_or_path: warm/export, dtype: fp32}",
    ]
    keys += ["rewards.llm_judge.judge_prompt=short.txt", "rewards.llm_judge.template=raw"]
    keys += ["rewards.llm_judge.generating_args={max_new_tokens: 4}"]
    return keys + [
        f"rewards.{domain}.world_size=1" for domain in ("math_rule", "crossthinkqa", "ifeval", "code_sandbox")
    ]


def test_domains_of_roll_file_score_its_rows(world: World, files: list[str]) -> None:
    (world.folder / "short.txt").write_text("{response}?{reference}")
    outcome = world.run("--config-name", "qwen2.5-7B-rlvr/rlvr_lora_zero3", *overrides(files))
    assert outcome.status == 0, outcome.output
    assert "another_benchmark" in outcome.output and "math_rule" in outcome.output, "unknown tags are reported"
    lines = world.metrics("domains")[1:]
    for domain in ("math_rule", "code_sandbox", "ifeval", "crossthinkqa", "llm_judge"):
        assert any(f"reward/{domain}/mean" in line for line in lines), f"{domain} scored no response"
    assert sum(line["judge/llm_judge/asked"] for line in lines) > 0
    for outcome in ("crashed", "timed_out", "unavailable"):
        assert all(line[f"reward/{outcome}_fraction"] == 0 for line in lines), outcome
    assert all(line["mismatch/logprob_abs_diff_mean"] < 1e-4 for line in lines)
    assert "val/math_benchmarks/pass@1" in lines[-1]
