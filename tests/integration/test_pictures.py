"""A tiny model with random weights learns by SFT what a picture shows, and RLVR goes on with it. Exports load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from examples.tiny.make_seeing_model import MERGE, write_seeing_model
from examples.tiny.make_shapes import COLOURS, SHAPES, write_shapes
from roll.data.pictures import load_sight
from roll.export.__main__ import main as export
from tests.integration.conftest import World

pytestmark = pytest.mark.engines

STEPS = 90
ANSWER_TOKENS = np.mean([len(f"{colour} {shape}") + 1 for colour in COLOURS for shape in SHAPES])
BLIND = math.log(len(COLOURS) * len(SHAPES)) / ANSWER_TOKENS
"""Least loss of a model that does not see the pictures, in nats per token: it can only guess the answer."""


@pytest.fixture(scope="module")
def seeing_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_model(folder / "output/tiny/seeing", "qwen2_5_vl", seed=0)
    write_shapes(folder / "output/tiny/shapes", rows=1600, seed=0)
    return World(folder)


@torch.no_grad()
def loss_of_rows(model: Any, folder: Path, rows: list[dict[str, Any]], shapes: Path) -> float:
    """Return the mean cross-entropy of the answers' tokens, with transformers alone."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(folder),
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
    )
    total, count, token = 0.0, 0, "<|image_pad|>"
    for row in rows:
        pixels = processor([Image.open(shapes / row["messages"][0]["content"][0]["path"])], return_tensors="pt")
        placeholders = token * int(pixels["image_grid_thw"].prod() // MERGE**2)
        whole, asked = (
            tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=opens).replace(
                token, placeholders
            )
            for part, opens in ((row["messages"], False), (row["messages"][:1], True))
        )
        ids = torch.tensor([tokenizer(whole.rstrip())["input_ids"]])
        first = len(tokenizer(asked)["input_ids"])
        kinds = (ids == tokenizer.convert_tokens_to_ids(token)).int()
        log_p = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0].log_softmax(-1)
        total -= float(log_p[first - 1 : -1].gather(1, ids[0, first:, None]).sum())
        count += ids.shape[1] - first
    return total / count


def test_model_learns_what_pictures_show(seeing_world: World) -> None:
    words = (f"max_steps={STEPS}", f"save_steps={STEPS}", f"eval_steps={STEPS}", "data_split=[31,1,0]")
    keys = ("sft_train.training_args.per_device_train_batch_size=24", "++sft_train.model_args.freeze_vision=none")
    outcome = seeing_world.run("--config-name", "tiny/tiny_pictures", *words, *keys, "output_dir=run")
    assert outcome.status == 0, outcome.output
    metrics = seeing_world.metrics("run")
    first, last = (metrics[number]["val/validation/loss"] for number in (0, -1))
    assert first > BLIND > 1.4 * last, f"{first} and {last}, and {BLIND} without seeing"

    run, shapes = seeing_world.folder / "run", seeing_world.folder / "output/tiny/shapes"
    rows = [json.loads(line) for line in (shapes / "train.jsonl").read_text().splitlines()[:100]]
    model = AutoModelForImageTextToText.from_pretrained(run / "export", dtype=torch.float32).eval()
    assert load_sight(str(run / "export"), AutoTokenizer.from_pretrained(run / "export")) is not None
    assert loss_of_rows(model, run / "export", rows, shapes) < BLIND / 1.4

    exported = {name: weight.detach() for name, weight in model.named_parameters()}
    assert export([str(run), str(seeing_world.folder / "hf"), "--format", "hf"]) == 0
    own = AutoModelForImageTextToText.from_pretrained(seeing_world.folder / "hf", dtype=torch.float32)
    for name, weight in own.named_parameters():
        assert torch.equal(weight, exported[name]), name
    AutoImageProcessor.from_pretrained(seeing_world.folder / "hf", backend="pil")


@pytest.mark.full
def test_rollouts_with_pictures_are_trained_on(seeing_world: World) -> None:
    # Rewards differ only once the policy names some pictures right.
    warm_up = ("max_steps=120", "save_steps=120", "eval_steps=0", "data_split=null", "output_dir=warm")
    outcome = seeing_world.run("--config-name", "tiny/tiny_pictures", *warm_up)
    assert outcome.status == 0, outcome.output
    words = ("pretrain=warm/export", "max_steps=4", "save_steps=4", "eval_steps=4", "output_dir=rewarded")
    outcome = seeing_world.run("--config-name", "tiny/tiny_rlvr_pictures", *words)
    assert outcome.status == 0, outcome.output

    metrics = seeing_world.metrics("rewarded")
    assert "val/heldout/avg@4" in metrics[0] and "val/heldout/avg@4" in metrics[-1]
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in metrics if row["step"])
    sample = json.loads((seeing_world.folder / "rewarded/samples.jsonl").read_text().splitlines()[0])
    [picture] = sample["pictures"]
    assert Path(picture).is_file() and sample["prompt"].count("<|image_pad|>") == 1 < sample["prompt_length"]
    before, after = (
        AutoModelForImageTextToText.from_pretrained(seeing_world.folder / name / "export", dtype=torch.float32)
        for name in ("warm", "rewarded")
    )
    changed = {name for name, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(name))}
    assert any("visual" in name for name in changed) and any("language_model" in name for name in changed)
