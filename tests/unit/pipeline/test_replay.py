"""Kept rollouts that a configuration cannot learn from are refused before anything starts, with place and remedy; and
a replay plans and starts the trainer's side alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.config.plan.plan import make_plan
from roll.config.plan.show import plan_text
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from roll.models.load import load_tokenizer
from roll.rollout.kept import Origin, RolloutFiles, step_file
from roll.runs.rlvr.replay import kept_steps, token_faults
from roll.runs.role_models import vocabulary_digest
from roll.types import RolloutGroup
from tests.faults import assert_fault, coded
from tests.unit.rollout.build import make_episode, make_group

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1.0, "repetition_penalty": 1.0}
ORIGIN = Origin("vocabulary", SAMPLING, 10, "10 rows")


def groups(count: int = 2, samples: int = 3, **changes: Any) -> list[RolloutGroup]:
    return [make_group(n, [make_episode([4, 5])] * samples, domain="arithmetic", **changes) for n in range(count)]


def write(folder: Path, *steps: Sequence[RolloutGroup] | None, origin: Origin = ORIGIN) -> None:
    """Keep these steps, leaving out those that are None."""
    for number, step in enumerate(steps, 1):
        if step is not None:
            asyncio.run(RolloutFiles(folder, origin).keep(number, step, None))


@pytest.fixture
def config(configured: Callable[..., Any], tmp_path: Path) -> Callable[..., RlvrConfig]:
    """Return a function that loads a replay of `tmp_path` with 2 prompts and 3 responses, and further overrides."""
    words = ("rollout_batch_size=2", "num_return_sequences_in_group=3", "updates_per_step=1", "eval_steps=0")

    def load(*further: str) -> RlvrConfig:
        return configured("tiny/tiny_rlvr_lora_zero3", f"replay_from={tmp_path}", "max_steps=2", *words, *further)

    return load


def refusal(config: RlvrConfig) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        kept_steps(config)
    return refused.value


def test_fitting_rollouts_are_accepted(config: Callable[..., RlvrConfig], tmp_path: Path) -> None:
    write(tmp_path, groups(), groups(), groups(9))
    assert [step.step for step in kept_steps(config())] == [1, 2]


@pytest.mark.parametrize(
    ("kept", "words", "place", "code", "value", "remedy"),
    [
        ([], [], "replay_from", "not_found", "rollouts/step_000001.parquet", "keep_rollouts: true"),
        ([groups()], [], "replay_from", "missing", "steps 2 of 2", "max_steps=1"),
        ([None, groups()], [], "replay_from", "missing", "steps 1 of 2", "another run"),
        ([groups(), groups(4)], [], "rollout_batch_size", "contradiction", "step_000002.parquet has 4", "=4"),
        ([groups(samples=1)] * 2, [], "num_return_sequences_in_group", "contradiction", "has 1", "=1"),
        ([groups()] * 2, ["actor_infer.generating_args.temperature=0.5"], "temperature", "unfit", "0.5, but", "to 1"),
        ([groups()] * 2, ["adv_estimator=remax", "adv_estimator=remax"], "adv_estimator", "unfit", "remax", "another"),
        ([groups(token_ids=range(1, 40))] * 2, [], "response_length", "too_large", "one of 41", "lengths of the run"),
    ],
)
def test_unfit_rollouts_are_refused(
    config: Callable[..., RlvrConfig],
    tmp_path: Path,
    kept: list[list[RolloutGroup] | None],
    words: list[str],
    place: str,
    code: Any,
    value: str,
    remedy: str,
) -> None:
    write(tmp_path, *kept)
    assert_fault(refusal(config(*words)).faults, place, code, value, remedy)


def test_missing_log_probs_and_domains_are_refused(config: Callable[..., RlvrConfig], tmp_path: Path) -> None:
    def without(group: RolloutGroup) -> RolloutGroup:
        paths = [path for episode in group.episodes for path in episode.trajectories]
        bare = [replace(path, segments=[replace(one, log_probs=None) for one in path.segments]) for path in paths]
        return replace(group, episodes=[replace(group.episodes[0], trajectories=[path]) for path in bare])

    write(tmp_path, *[[without(replace(one, prompt=replace(one.prompt, domain="sums"))) for one in groups()]] * 2)
    assert set(coded(refusal(config()).faults)) == {("unfit", "behaviour_log_probs"), ("unknown_name", "replay_from")}
    assert coded(refusal(config("behaviour_log_probs=trainer")).faults) == [("unknown_name", "replay_from")]


def test_damaged_step_is_refused(config: Callable[..., RlvrConfig], tmp_path: Path) -> None:
    write(tmp_path, groups(), groups())
    step_file(tmp_path / "rollouts", 2).write_bytes(b"PAR1")
    assert_fault(refusal(config()).faults, "replay_from", "unreadable", "step_000002.parquet", "another run")


def test_tokens_of_another_vocabulary_are_refused(
    config: Callable[..., RlvrConfig], tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    known = replace(ORIGIN, vocabulary=vocabulary_digest(tokenizer))
    write(tmp_path, groups(), groups(), origin=known)
    own = config(f"pretrain={tiny_model}")
    steps = kept_steps(own)
    assert list(token_faults(own, steps, tokenizer)) == []
    tokenizer.add_tokens(["<new>"])
    assert coded(token_faults(own, steps, tokenizer)) == [("unfit", "replay_from")]
    beyond = [replace(step, largest_token=10**6) for step in steps]
    assert coded(token_faults(own, beyond, load_tokenizer(str(tiny_model)))) == [("out_of_range", "replay_from")]


def test_plan_has_trainers_side_alone(config: Callable[..., RlvrConfig], tmp_path: Path) -> None:
    write(tmp_path, groups())
    replay = config()
    plan = make_plan(replay)
    assert list(plan.roles) == ["actor_train", "reference"]
    [line] = [line for line in plan_text(replay, plan).splitlines() if line.startswith("Generation: none")]
    assert str(tmp_path) in line


def test_vocabulary_digest_follows_tokens_and_ids(tiny_model: Path) -> None:
    first, second = load_tokenizer(str(tiny_model)), load_tokenizer(str(tiny_model))
    assert vocabulary_digest(first) == vocabulary_digest(second)
    second.add_tokens(["<new>"])
    assert vocabulary_digest(first) != vocabulary_digest(second)
    assert np.unique([vocabulary_digest(first), vocabulary_digest(second)]).size == 2
