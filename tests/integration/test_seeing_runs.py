"""Two steps of RLVR with pictures in ways that the recipes do not use, with an untrained model, and an evaluation."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from examples.tiny.make_seeing_model import write_seeing_model
from examples.tiny.make_shapes import write_shapes
from roll.config.derived.model_shape import BOTH_WAYS
from roll.export.__main__ import main as export
from roll.models import seeing_classifiers
from roll.models.pictures import PROJECTORS
from roll.models.vision_names import is_of_vision
from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

STEPS = ("max_steps=2", "save_steps=2", "eval_steps=2", "rollout_batch_size=4", "num_return_sequences_in_group=4")
# The answers of an untrained model are all wrong, but of different lengths.
REWARD = "rewards={shapes: {reward: length_penalty, reward_args: {short: 0, enough: 40}, world_size: 1}}"
LORA = "{dtype: fp32, gradient_checkpointing: none, lora_target: all-linear, lora_rank: 4, lora_alpha: 8}"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_model(folder / "model", "qwen3_vl", seed=0)
    write_shapes(folder / "output/tiny/shapes", rows=64, seed=0, held_out=8)
    return World(folder)


def changed_by(world: World, name: str, *words: str, model: str = "model") -> set[str]:
    """Run two steps, and return the names of the parameters that they changed."""
    outcome = world.run(
        "--config-name", "tiny/tiny_rlvr_pictures", f"pretrain={model}", f"output_dir={name}", *STEPS, REWARD, *words
    )
    assert outcome.status == 0, outcome.output
    # Without responses of the trainer's own version, as in a step generated ahead, there is nothing to compare.
    metric = "mismatch/logprob_abs_diff_mean"
    found = [row[metric] for row in world.metrics(name) if metric in row]
    assert found and max(found) < 1e-5
    assert export([str(world.folder / name), str(world.folder / f"{name}-hf"), "--format", "hf"]) == 0
    before, after = (
        AutoModelForImageTextToText.from_pretrained(world.folder / folder, dtype=torch.float32)
        for folder in (model, f"{name}-hf")
    )
    return {key for key, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(key))}


def test_generation_ahead_of_training_sees_pictures(untrained: World) -> None:
    changed = changed_by(untrained, "ahead", "async_generation_ratio=1")
    assert any(map(is_of_vision, changed)) and untrained.metrics("ahead")[-1]["staleness/max"] >= 1


def test_frozen_tower_stays_with_zero3(untrained: World) -> None:
    zero3 = "actor_train.strategy_args.strategy_config={zero_optimization: {stage: 3}}"
    changed = changed_by(untrained, "frozen", zero3, "++actor_train.model_args.freeze_vision=tower")
    seen = {name for name in changed if is_of_vision(name)}
    assert seen and all(PROJECTORS.search(name) for name in seen), "only the projector of the tower is trained"
    assert changed - seen


@pytest.mark.full
@pytest.mark.parametrize("family", BOTH_WAYS)
def test_asked_tower_is_trained_and_synced(untrained: World, family: str) -> None:
    write_seeing_model(untrained.folder / family, family, seed=0)
    asked = [f"++{role}.model_args.sees_pictures=true" for role in ("actor_train", "actor_infer")]
    changed = changed_by(untrained, f"asked-{family}", *asked, model=family)
    assert {is_of_vision(name) for name in changed} == {False, True}


def test_merged_adapter_is_synced_and_evaluated(untrained: World) -> None:
    outcome = untrained.run(
        *("--config-name", "tiny/tiny_rlvr_pictures", "pretrain=model", "output_dir=adapted", *STEPS, REWARD),
        f"actor_train.model_args={LORA}",
        "++weight_sync.lora=merged",
    )
    assert outcome.status == 0, outcome.output
    metrics = untrained.metrics("adapted")
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in metrics if row["step"])
    command = [sys.executable, "-m", "roll.evaluate", "adapted", "--samples", "2"]
    done = subprocess.run(command, cwd=untrained.folder, capture_output=True, text=True, timeout=limits.RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = (untrained.folder / "adapted/evaluations").iterdir()
    samples = [json.loads(line) for line in (found / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and all(Path(sample["pictures"][0]).is_file() for sample in samples)


def test_served_judge_sees_pictures(untrained: World) -> None:
    """The judge of an untrained model says nothing that can be read, but it is asked about each response."""
    model = "model_args: {model_name_or_path: model, dtype: fp32}, strategy_args: {strategy_name: hf_infer}"
    judge = "reward: llm_judge, judge_model_type: inference, judge_prompt: same_answer, judge_sees_pictures: true"
    keys = f"{model}, generating_args: {{max_new_tokens: 4}}, world_size: 1"
    rewards = f"rewards={{shapes: {{{judge}, {keys}}}}}"
    words = ("pretrain=model", "output_dir=judged", *STEPS, rewards)
    outcome = untrained.run("--config-name", "tiny/tiny_rlvr_pictures", *words)
    assert outcome.status == 0, outcome.output
    asked = [row for row in untrained.metrics("judged") if row["step"]]
    assert len(asked) == 2 and asked[0]["judge/shapes/asked"] == 16
    assert all(row["judge/shapes/unavailable"] == 0 for row in asked)


@pytest.mark.parametrize("family", ["qwen3_vl", *BOTH_WAYS])
def test_reward_model_sees_pictures(untrained: World, family: str) -> None:
    seeing_classifiers.register()
    model, scorer = untrained.folder / f"policy-{family}", untrained.folder / f"scorer-{family}"
    write_seeing_model(model, family, seed=0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(scorer)
    for file in model.glob("*"):
        if file.name.startswith(("tokenizer", "preprocessor", "chat_template", "special")):
            shutil.copy(file, scorer)
    asked = family in BOTH_WAYS
    keys = f"{{model_name_or_path: {scorer.name}, dtype: fp32{', sees_pictures: true' if asked else ''}}}"
    reward = f"{{reward: reward_model, model_args: {keys}, strategy_args: {{strategy_name: hf_infer}}}}"
    words = [f"pretrain={model.name}", f"output_dir=scored-{family}", *STEPS, f"rewards={{shapes: {reward}}}"]
    words += [f"++{role}.model_args.sees_pictures=true" for role in ("actor_train", "actor_infer") if asked]
    outcome = untrained.run("--config-name", "tiny/tiny_rlvr_pictures", *words)
    assert outcome.status == 0, outcome.output
    found = [row for row in untrained.metrics(f"scored-{family}") if row["step"]]
    assert all(row["reward/scored_fraction"] == 1.0 and row["reward/std"] > 0 for row in found)


@pytest.fixture
def judge_server() -> Iterator[tuple[str, list[Any]]]:
    """Yield the URL of a chat server that says yes, and the messages that it received."""
    asked: list[Any] = []

    class Yes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
            choices = [{"index": 0, "message": {"role": "assistant", "content": "yes"}}]
            body = json.dumps({"object": "chat.completion", "choices": choices}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Yes)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def test_judge_behind_url_gets_files(untrained: World, judge_server: tuple[str, list[Any]]) -> None:
    url, asked = judge_server
    judge = f"reward: llm_judge, judge_model_type: api, judge_api_url: '{url}', judge_model_name: j"
    rewards = f"rewards={{shapes: {{{judge}, judge_prompt: same_answer, judge_sees_pictures: true}}}}"
    words = ("pretrain=model", "output_dir=sent", *STEPS, "eval_steps=0", rewards)
    outcome = untrained.run("--config-name", "tiny/tiny_rlvr_pictures", *words)
    assert outcome.status == 0, outcome.output
    samples = [json.loads(line) for line in (untrained.folder / "sent/samples.jsonl").read_text().splitlines()]
    files = {Path(sample["pictures"][0]).read_bytes() for sample in samples}
    urls = {f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files}
    assert asked and urls <= {message["content"][0]["image_url"]["url"] for [message] in asked}
    assert all("[picture 1]What?" in message["content"][1]["text"] for [message] in asked)
