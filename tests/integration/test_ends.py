"""A base model, whose end of sequence no turn of its chat template has, learns to end a turn, and its responses end
there in RLVR.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from examples.tiny.make_model import END_ID, PAD, PAD_ID, build_model, build_tokenizer
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

SIZES = ("prompt_length=64", "save_steps=0")
TAUGHT = (
    "~sft_train.data_args.response",
    "sft_train.data_args.file_name=chat.jsonl",
    "sft_train.world_size=1",
    "~data_split",
    *SIZES,
)
LEARNER = (
    "++actor_infer.generating_args.seeded=true",
    "actor_train.data_args.file_name=prompts.jsonl",
    "actor_train.world_size=1",
    "use_kl_loss=false",
    "~kl_loss_coef",
    "~reference",
)
HELD_OUT = (
    "eval_steps=2",
    "validation.data_args.file_name=prompts.jsonl",
    "+validation.generating_args.max_new_tokens=2",
)
STEPS = (
    *SIZES,
    *(
        "response_length=40",
        "max_steps=2",
        "rollout_batch_size=4",
        "num_return_sequences_in_group=4",
        "updates_per_step=1",
    ),
    *("rewards.arithmetic.world_size=1", "+actor_infer.system_envs={TORCHDYNAMO_DISABLE: '1'}"),
)


def write_base_model(folder: Path) -> None:
    """Write a model with a ChatML template that, like Qwen2.5-7B, ends a sequence with `<|endoftext|>` and has not
    learnt `<|im_end|>`.
    """
    model, tokenizer = build_model(0, agent=True), build_tokenizer(agent=True)
    model.config.eos_token_id = PAD_ID
    model.generation_config = GenerationConfig(eos_token_id=PAD_ID, pad_token_id=PAD_ID)
    tokenizer.eos_token = PAD
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def chat(tmp_path: Path) -> World:
    """Return a world whose policy, `taught/export`, was taught to answer `ok`."""
    write_base_model(tmp_path / "base")
    asked = {"role": "user", "content": "say ok"}
    (tmp_path / "chat.jsonl").write_text(
        (json.dumps({"messages": [asked, {"role": "assistant", "content": "ok"}]}) + "\n") * 64
    )
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"messages": [asked], "ground_truth": "ok"}) + "\n") * 8)
    world = World(tmp_path)
    sft = ("--config-name", "tiny/tiny_sft", "pretrain=base", "output_dir=taught", *TAUGHT, *rows("sft_train"))
    outcome = world.run(
        *sft, "response_length=8", "max_steps=60", "eval_steps=0", "sft_train.training_args.num_train_epochs=60"
    )
    assert outcome.status == 0, outcome.output
    return world


def rows(block: str) -> list[str]:
    """Return overrides with which a block of the tiny experiments reads conversations."""
    return [
        word.format(block)
        for word in ("+{}.data_args.messages=messages", "~{}.data_args.template", "~{}.data_args.prompt")
    ]


def test_base_model_learns_to_end_responses(chat: World) -> None:
    """The held-out responses are cut after two of the three tokens, which the run must say."""
    words = (*LEARNER, *rows("actor_train"), *HELD_OUT, *rows("validation"), *STEPS)
    outcome = chat.run(
        "--config-name", "tiny/tiny_rlvr_lora_zero3", "pretrain=taught/export", "output_dir=ends", *words
    )
    assert outcome.status == 0, outcome.output
    first, *steps = chat.metrics("ends")
    assert first["val/heldout/at_limit_fraction"] == 1 and [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["reward/mean"] >= 0.9, step
        assert step["response/truncated_fraction"] <= 0.1 and step["response/length_mean"] < 10, step
    generation = json.loads((chat.folder / "ends" / "export" / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == {PAD_ID, END_ID}, "users of the export stop at both ends"

    [said] = [line for line in outcome.output.splitlines() if "ended at the length limit" in line]
    assert "step 0: " in said and "response of heldout" in said
    assert "2 tokens (validation.generating_args.max_new_tokens)" in said
    assert "'<|endoftext|>' (" in said and f"'<|im_end|>' (token {END_ID}" in said
    notices = [json.loads(line) for line in (chat.folder / "ends" / "notices.jsonl").read_text().splitlines()]
    without = [step["step"] for step in steps if step["advantage/zero_fraction"] == 1]
    topics = [("val/heldout/at_limit_fraction", 0), *[("advantage/zero_fraction", step) for step in without[:1]]]
    assert [(notice["topic"], notice["step"]) for notice in notices] == topics
    assert "response of heldout" in (chat.folder / "ends" / "report.html").read_text()
