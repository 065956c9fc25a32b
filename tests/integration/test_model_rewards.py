"""Training on the tiny task with rewards from a model: a judge behind a URL, a judge in its own engine, and a reward
model.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import limits
from tests.integration.conftest import TINY, World
from tests.unit.rewards.chat_server import Behaviour, ChatServer, Response, chat_server, completion, error

pytestmark = [pytest.mark.engines, pytest.mark.full]

JUDGED_STEPS, SCORED_STEPS = 30, 40
RISE = 0.1
"""Required rise of the fraction of right answers to the 256 held-out problems, with 4 samples each."""
ANSWERS = (
    "validation={data_args: {file_name: exact.jsonl, template: raw, prompt: prompt}, name: heldout, "
    "generating_args: "
    "{seeded: true}}"
)
"""Held-out problems of a domain that a function scores, so that the validation does not depend on the model that gives
the rewards.
"""
EXACT = "+rewards.exact={reward: exact_match}"


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[ChatServer]:
    """Run a chat server in a separate thread."""
    started, ended = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with chat_server(behaviour) as server:
            found.extend((server, asyncio.get_running_loop()))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(limits.CALL)
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(ended.set)
        thread.join(limits.END)


def samples(world: World, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.folder / name / "samples.jsonl").read_text().splitlines()]


def total(prompt: str) -> str:
    """Return the right answer to a prompt such as `1+2+3+4=`."""
    return str(sum(map(int, prompt.removesuffix("=").split("+"))))


@pytest.fixture
def prompt_file(world: World) -> Path:
    """Return the file with the judge's prompt template."""
    file = world.folder / "asked.txt"
    file.write_text("{question} {response} {reference}")
    return file


def asked_by_url(world: World, name: str, prompt_file: Path, url: str, *keys: str) -> tuple[str, ...]:
    """Return the arguments of a short run whose judge is behind a URL."""
    judge = (
        "reward=llm_judge",
        "judge_model_type=api",
        "judge_model_name=equality",
        f"judge_prompt={prompt_file}",
        f"judge_api_url={url}",
    )
    keys = tuple(f"rewards.arithmetic.{key}" for key in (*judge, *keys))
    return world.rlvr(name, "max_steps=2", "save_at_end=false", "validation=null", *keys)


def test_a_judge_behind_a_url(world: World, prompt_file: Path, leaves_nothing: Callable[[], None]) -> None:
    """Temporary failures of the server have no effect, and each reward is the server's verdict."""

    def behaviour(body: dict[str, Any], number: int) -> Response:
        if number % 10 == 3:
            return error(503, "busy", **{"Retry-After": "0"})
        asked = body["messages"][0]["content"]
        question, reference = asked.split(" ")[0], asked.split(" ")[-1]
        assert total(question) == reference and body["model"] == "equality"
        return completion("yes" if asked == f"{question} {reference} {reference}" else "no")

    with serving(behaviour) as server:
        arguments = asked_by_url(world, "api", prompt_file, server.url, "judge_api_key_env=TINY_JUDGE")
        outcome = world.wait(world.start(*arguments, environment={"TINY_JUDGE": "hush"}))
    assert outcome.status == 0, outcome.output
    assert {headers["authorization"] for headers in server.headers} == {"Bearer hush"}
    assert "hush" not in "".join(file.read_text() for file in (world.folder / "api").rglob("*.yaml"))
    responses = [(group["prompt"], one) for group in samples(world, "api") for one in group["responses"]]
    assert responses and all(one["reward"] == float(one["text"] == total(prompt)) for prompt, one in responses)
    for line in world.metrics("api")[1:]:
        assert line["reward/scored_fraction"] == 1.0 and line["judge/arithmetic/unavailable"] == 0
        assert line["judge/arithmetic/asked"] + line["judge/arithmetic/remembered"] == 16 * 8
    leaves_nothing()


def test_unreachable_judge_ends_run_with_cause(world: World, prompt_file: Path) -> None:
    outcome = world.run(*asked_by_url(world, "nobody", prompt_file, "http://127.0.0.1:1/v1", "judge_retries=0"))
    assert outcome.status == 3, outcome.output
    assert "ConnectError" in outcome.last_line


@pytest.fixture(scope="module")
def judging(world: World) -> World:
    """Return the world with a policy that is right about half the time, training data for judges, and held-out
    problems.
    """
    outcome = world.run("--config-name", "tiny/tiny_warm_up", "output_dir=taught")
    assert outcome.status == 0, outcome.output
    script = str(TINY / "make_judgements.py")
    arguments = [sys.executable, script, "output/tiny/problems/train.jsonl", "output/tiny/judgements"]
    subprocess.run(arguments, cwd=world.folder, check=True, timeout=limits.PROCESS)
    rows = [json.loads(line) for line in (world.folder / "output/tiny/problems/heldout.jsonl").read_text().splitlines()]
    (world.folder / "exact.jsonl").write_text("".join(json.dumps(row | {"tag": "exact"}) + "\n" for row in rows))
    return world


def train_policy(world: World, name: str, experiment: str, steps: int, *keys: str) -> None:
    """Train the policy on a model's rewards. Validate it before and after training, by a reward function that needs no
    model.
    """
    outcome = world.run(
        *("--config-name", f"tiny/{experiment}", f"output_dir={name}", "pretrain=taught/export", "save_at_end=false"),
        *(f"max_steps={steps}", f"eval_steps={steps}", ANSWERS, EXACT, *keys),
    )
    assert outcome.status == 0, outcome.output


def assert_learnt(world: World, name: str) -> None:
    before, after = [line["val/heldout/pass@1"] for line in world.metrics(name) if "val/heldout/pass@1" in line]
    assert after > before + RISE


def test_run_learns_from_judge_in_own_engine(judging: World, leaves_nothing: Callable[[], None]) -> None:
    outcome = judging.run("--config-name", "tiny/tiny_judge", "output_dir=judge", "eval_steps=0")
    assert outcome.status == 0, outcome.output
    train_policy(
        judging,
        "judged",
        "tiny_llm_judge",
        JUDGED_STEPS,
        "rewards.arithmetic.model_args.model_name_or_path=judge/export",
    )
    verdicts = [
        (one["text"] == total(group["prompt"]), one["reward"])
        for group in samples(judging, "judged")
        for one in group["responses"]
    ]
    assert np.mean([reward == float(right) for right, reward in verdicts]) > 0.95
    assert_learnt(judging, "judged")
    leaves_nothing()


@pytest.fixture(scope="module")
def reward_model(judging: World) -> Path:
    """Return a reward model, trained on right and wrong sums to an accuracy of about 99%. With 96%, the policy would
    not learn.
    """
    outcome = judging.run(
        *(
            "--config-name",
            "tiny/tiny_reward_model",
            "output_dir=preferring",
            "pretrain=taught/export",
            "max_steps=600",
            "eval_steps=0",
        ),
        *("save_steps=0", "reward_train.data_args.file_name=output/tiny/judgements/pairs.jsonl"),
        "reward_train.training_args.learning_rate=5.0e-4",
    )
    assert outcome.status == 0, outcome.output
    return judging.folder / "preferring" / "export"


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("{strategy_name: hf_infer}", SCORED_STEPS),
        ("{strategy_name: vllm, strategy_config: {enforce_eager: true, kv_cache_gib: 0.25}}", 2),
    ],
    ids=["hf_infer", "vllm"],
)
def test_learnt_from_a_reward_model(
    judging: World, reward_model: Path, strategy: str, steps: int, leaves_nothing: Callable[[], None]
) -> None:
    name = f"preferred-{steps}"
    served = (
        f"rewards.arithmetic.model_args.model_name_or_path={reward_model}",
        f"rewards.arithmetic.strategy_args={strategy}",
    )
    train_policy(judging, name, "tiny_rlvr_reward_model", steps, *served)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(reward_model),
        AutoTokenizer.from_pretrained(reward_model),
    )
    for group in samples(judging, name)[:8]:
        for one in group["responses"]:
            tokens = tokenizer.encode(f"{group['prompt']}{one['text']}") + [tokenizer.eos_token_id]
            with torch.no_grad():
                assert one["reward"] == pytest.approx(model(torch.tensor([tokens])).logits.item(), abs=1e-3)
    if steps == SCORED_STEPS:
        assert_learnt(judging, name)
    leaves_nothing()
