"""A tiny model with random weights learns by DPO, and as a reward model, which of two answers a picture agrees with.

Without seeing the picture, half of the held-out pairs are judged right.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from examples.tiny.make_seeing_model import write_seeing_model
from examples.tiny.make_shapes import COLOURS, SHAPES, write_shapes
from roll.config.derived.model_shape import BOTH_WAYS
from roll.models.vision_names import is_of_vision
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

ANSWERS = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
REFERENCE = "{model_args: {dtype: fp32}, strategy_args: {strategy_name: hf_infer}, system_envs: {OMP_NUM_THREADS: '1'}}"


def write_pairs(shapes: Path, seed: int) -> None:
    """Write pairs.jsonl beside the rows: the right answer to each picture, and a wrong one."""
    draw, rows = random.Random(seed), (shapes / "train.jsonl").read_text().splitlines()
    pairs = []
    for asked, answer in (json.loads(row)["messages"] for row in rows):
        wrong = draw.choice([other for other in ANSWERS if other != answer["content"]])
        pairs.append({"messages": [asked], "chosen": answer["content"], "rejected": wrong})
    (shapes / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))


@pytest.fixture(scope="module")
def pair_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("pairs")
    write_seeing_model(folder / "output/tiny/seeing", "qwen2_5_vl", seed=0)
    write_shapes(folder / "output/tiny/shapes", rows=1600, seed=0)
    write_pairs(folder / "output/tiny/shapes", seed=0)
    return World(folder)


def words(role: str, steps: int, rate: float) -> list[str]:
    """Return the words that turn an experiment with text into one with pictures."""
    named = "messages: messages, chosen: chosen, rejected: rejected, prompt: null, template: native"
    rows = f"{{file_name: output/tiny/shapes/pairs.jsonl, {named}}}"
    return [
        *("pretrain=output/tiny/seeing", "~prompt_length", "~response_length", "+max_length=64"),
        *(f"max_steps={steps}", f"save_steps={steps}", f"eval_steps={steps}"),
        f"{role}.data_args={rows}",
        f"{role}.training_args.learning_rate={rate}",
        f"{role}.training_args.num_train_epochs=9",
    ]


def test_policy_prefers_what_pictures_show(pair_world: World) -> None:
    more = ("~actor_train.model_args.lora_target", "~actor_train.model_args.lora_rank", "beta=0.5")
    more += ("~actor_train.model_args.lora_alpha", f"+reference={REFERENCE}", "output_dir=dpo")
    outcome = pair_world.run("--config-name", "tiny/tiny_dpo", *words("actor_train", 80, 1e-3), *more)
    assert outcome.status == 0, outcome.output
    first, last = (pair_world.metrics("dpo")[number]["val/validation/accuracy"] for number in (0, -1))
    assert first < 0.65 and last > 0.8, f"{first} and {last}"
    own, before = (
        AutoModelForImageTextToText.from_pretrained(pair_world.folder / name, dtype=torch.float32)
        for name in ("dpo/export", "output/tiny/seeing")
    )
    changed = {name for name, weight in own.named_parameters() if not torch.equal(weight, before.get_parameter(name))}
    assert any("visual" in name for name in changed) and any("language_model" in name for name in changed)


@pytest.mark.parametrize("family", BOTH_WAYS)
@pytest.mark.parametrize("name", ["tiny_dpo", "tiny_reward_model"])
def test_asked_towers_learn_from_pairs(name: str, family: str, pair_world: World) -> None:
    out, role = f"{name}-{family}", "actor_train" if name == "tiny_dpo" else "reward_train"
    before = pair_world.folder / family
    write_seeing_model(before, family, seed=0)
    more = [f"++{role}.model_args.sees_pictures=true", f"output_dir={out}", f"pretrain={family}"]
    more += [f"{role}.training_args.warmup_steps=0"]
    if name == "tiny_dpo":
        more += [f"~{role}.model_args.{key}" for key in ("lora_target", "lora_rank", "lora_alpha")]
        more += [f"+reference={REFERENCE}", "+reference.model_args.sees_pictures=true"]
    # The head of a reward model is 0 at first, so that the layers below learn from the second update on.
    outcome = pair_world.run("--config-name", f"tiny/{name}", *words(role, 2, 1e-3), *more)
    assert outcome.status == 0, outcome.output
    kind = AutoModelForImageTextToText if name == "tiny_dpo" else AutoModelForSequenceClassification
    own = kind.from_pretrained(pair_world.folder / out / "export", dtype=torch.float32)
    old = AutoModelForImageTextToText.from_pretrained(before, dtype=torch.float32)
    shared = dict(old.named_parameters())
    changed = {key for key, each in own.named_parameters() if key in shared and not torch.equal(each, shared[key])}
    assert {is_of_vision(key) for key in changed} == {True, False}


def test_reward_model_scores_what_pictures_show(pair_world: World) -> None:
    outcome = pair_world.run(
        "--config-name", "tiny/tiny_reward_model", *words("reward_train", 80, 2e-3), "output_dir=scorer"
    )
    assert outcome.status == 0, outcome.output
    last = pair_world.metrics("scorer")[-1]["val/validation/accuracy"]
    assert last > 0.8
    values = json.loads((pair_world.folder / "scorer/export/config.json").read_text())
    assert values["architectures"] == ["Qwen2_5_VLForSequenceClassification"] and values["auto_map"]
    assert "trust_remote_code=True" in outcome.output
