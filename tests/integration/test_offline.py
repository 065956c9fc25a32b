"""Offline pipelines with the real engines: SFT, resumed DPO, and a reward model and a student whose exports
transformers loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll.config.schema.model import DataConfig
from roll.data.examples import ExampleSequence, Kind, LengthLimits, RowRange, prepare_examples
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

SHORT = ("pretrain=warm/export", "max_steps=4", "save_steps=2", "eval_steps=2", "data_split=[9,1,0]")
REFERENCE = (
    "++reference={model_args: {dtype: fp32}, strategy_args: {strategy_name: hf_infer}, max_tokens_per_microbatch: 4096}"
)
MEASURED = ("time/", "throughput/", "memory/")
SEED = 42
"""Seed of the experiments."""


def held_out(world: World, kind: Kind, **columns: str) -> list[tuple[ExampleSequence, ...]]:
    """Return the examples of the rows that a run holds out for validation."""
    data_args = DataConfig.model_validate(
        {"file_name": str(world.folder / "output/tiny/problems/train.jsonl"), "template": "raw", **columns}
    )
    tokenizer = AutoTokenizer.from_pretrained(world.folder / "warm" / "export")
    rows = prepare_examples(data_args, tokenizer, LengthLimits(16, 8), kind, part=RowRange((9.0, 1.0, 0.0), 1, SEED))
    return [rows.example(number).sequences for number in range(len(rows))]


def unmeasured(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(MEASURED)}


def test_deterministic_run_repeats_bit_for_bit(world: World) -> None:
    words = ("--config-name", "tiny/tiny_sft", *SHORT, "deterministic=true")
    for folder in ("sft_one", "sft_two"):
        outcome = world.run(*words, f"output_dir={folder}")
        assert outcome.status == 0, outcome.output
    one, two = (list(map(unmeasured, world.metrics(folder))) for folder in ("sft_one", "sft_two"))
    assert len(one) == len(two) == 5 and one == two
    log = (world.folder / "sft_one" / "logs" / "sft_train-0.log").read_text()
    assert "nondeterministic" not in log


def test_preferences_go_on_exactly_from_a_checkpoint(world: World) -> None:
    preferences = ("--config-name", "tiny/tiny_dpo", *SHORT, REFERENCE, "~actor_train.model_args.lora_target")
    preferences += (
        "~actor_train.model_args.lora_rank",
        "~actor_train.model_args.lora_alpha",
        "reference_log_probs=precomputed",
    )
    outcome = world.run(*preferences, "output_dir=dpo")
    assert outcome.status == 0, outcome.output
    whole = world.metrics("dpo")
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in whole if "val/validation/accuracy" in line] == [0, 2, 4]
    assert whole[-1]["val/validation/loss"] < whole[0]["val/validation/loss"]
    assert "time/reference" in whole[0], "the reference scored all rows before the first step"
    assert not any("time/reference" in line or "memory/reference/peak_bytes" in line for line in whole[1:]), (
        "and not later"
    )
    assert (world.folder / "dpo" / "export" / "model.safetensors.index.json").exists()

    process = world.start(*preferences, "output_dir=dpo_lost")
    world.wait_for_step("dpo_lost", 2, process)
    world.working_rank("dpo_lost", process, "actor_train", 0).kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert "restart 1 of 3: " in outcome.output
    lost = world.metrics("dpo_lost")
    assert lost[-1]["run/restarts"] == 1
    assert [unmeasured(line) | {"run/restarts": 0} for line in lost] == [unmeasured(line) for line in whole]

    world.go_back("dpo", "dpo_again", last=4)
    outcome = world.run(*preferences, "output_dir=dpo_again")
    assert outcome.status == 0, outcome.output
    assert [unmeasured(line) for line in world.metrics("dpo_again")] == [unmeasured(line) for line in whole]


@torch.no_grad()
def score(folder: Path, token_ids: list[list[int]]) -> Tensor:
    """Return the scores of a padded batch, computed with transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    longest, pad = max(map(len, token_ids)), model.config.pad_token_id
    padded = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in token_ids])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids])
    assert model.config.num_labels == 1
    return model(input_ids=padded, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_transformers_reproduces_exported_reward_model_scores(world: World, lora: bool) -> None:
    name = "scores_lora" if lora else "scores"
    adapter = ("++reward_train.model_args.lora_target=all-linear",) if lora else ()
    fast = ("reward_train.training_args.learning_rate=0.01", "reward_train.training_args.warmup_steps=0")
    outcome = world.run("--config-name", "tiny/tiny_reward_model", *SHORT, *fast, *adapter, f"output_dir={name}")
    assert outcome.status == 0, outcome.output
    last = world.metrics(name)[-1]
    pairs = held_out(world, "pairs", prompt="prompt", chosen="response", rejected="rejected")
    chosen, rejected = (
        score(world.folder / name / "export", [pair[number].token_ids.tolist() for pair in pairs]) for number in (0, 1)
    )
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    assert float(loss) == pytest.approx(last["val/validation/loss"], abs=1e-5)
    assert float((chosen > rejected).float().mean()) == pytest.approx(last["val/validation/accuracy"])
    assert float((chosen - rejected).std()) > 1e-4, "the head is no longer 0"


@torch.no_grad()
def test_a_student_comes_nearer_to_its_teacher(world: World) -> None:
    teacher = "teacher.model_args.model_name_or_path=warm/export"
    outcome = world.run("--config-name", "tiny/tiny_distill", *SHORT[1:], teacher, "output_dir=student")
    assert outcome.status == 0, outcome.output
    lines = world.metrics("student")
    assert lines[-1]["val/validation/divergence"] < lines[0]["val/validation/divergence"] - 0.1
    models = [
        AutoModelForCausalLM.from_pretrained(world.folder / name / "export", dtype=torch.float32)
        for name in ("warm", "student")
    ]
    found = []
    for (sequence,) in held_out(world, "responses", prompt="prompt", response="response"):
        ids, where = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.response_mask.nonzero()[0])
        p, q = (model(input_ids=ids[None]).logits[0, where - 1].double().log_softmax(-1) for model in models)
        found.append((p.exp() * (p - q)).sum(-1))
    assert float(torch.cat(found).mean()) == pytest.approx(lines[-1]["val/validation/divergence"], abs=1e-4)
