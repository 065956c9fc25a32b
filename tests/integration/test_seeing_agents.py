"""Two steps of an agent whose environment shows pictures in its turns, with an untrained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from examples.tiny.make_seeing_model import write_seeing_model
from roll.models.vision_names import is_of_vision
from tests.integration.conftest import World
from tests.tiers import each

pytestmark = pytest.mark.engines

STEPS = ("max_steps=2", "save_steps=2", "eval_steps=0", "rollout_batch_size=4", "num_return_sequences_in_group=4")
# Letters end a turn, because an untrained model rarely says that it has ended.
STOPS = f"++actor_infer.generating_args.stop_strings={json.dumps(list('ACEGIKMOQSUWYacegikmoqsuwy'))}"
# The answers of an untrained model are all wrong, but of different lengths.
REWARD = "+rewards={look: {reward: length_penalty, reward_args: {short: 0, enough: 40}, world_size: 1}}"
AGENT = (
    "~validation",
    "~actor_train.data_args",
    "~rewards",
    REWARD,
    "+environments={look: {environment: 'examples.tiny.look:Look', max_turns: 3, rows: 64}}",
    "prompt_length=64",
    "+sequence_length=400",
)
VLLM = "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {enforce_eager: true, kv_cache_gib: 0.5}}"
MARKS = {"qwen3_vl": "<|image_pad|>", "idefics3": "<image>"}
ENGINES = {"qwen3_vl": (), "idefics3": (VLLM, "+actor_infer.system_envs={TORCHDYNAMO_DISABLE: '1'}")}


@each("family", list(ENGINES), quick=["qwen3_vl"])
def test_pictures_of_turns_are_trained_on(family: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    write_seeing_model(tmp_path / "model", family, seed=0, tools=True)
    words = ("pretrain=model", "output_dir=run", *STEPS, *AGENT, STOPS, *ENGINES[family])
    outcome = world.run("--config-name", "tiny/tiny_rlvr_pictures", *words)
    assert outcome.status == 0, outcome.output
    metrics = [row for row in world.metrics("run") if row["step"]]
    assert len(metrics) == 2 and all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in metrics)
    assert max(row["episode/turns_max"] for row in metrics) == 3
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    responses = [response for sample in samples for response in sample["responses"]]
    given = [part for one in responses for part in one["trajectories"][0]["segments"][2::2]]
    assert given and all(len(part["pictures"]) == part["text"].count(MARKS[family]) == 1 for part in given)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / folder, dtype=torch.float32)
        for folder in ("model", "run/export")
    )
    changed = {name for name, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(name))}
    assert {is_of_vision(name) for name in changed} == {True, False}, "the tower learns from pictures of turns"
