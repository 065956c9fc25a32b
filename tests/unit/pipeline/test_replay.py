"""Kept rollouts that a configuration cannot learn from are refused before anything starts, with place and remedy; and
a replay plans and starts the trainer's side alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.config.plan.plan import make_plan
from roll.config.plan.show import plan_text
from roll.config.schema.rlvr import RlvrConfig
from roll.data.chat import NO_END
from roll.errors import ConfigError, RollError
from roll.models.load import load_tokenizer
from roll.rewards.answers import reference_text
from roll.rollout.kept import KeptRollouts, Origin, RolloutFiles, step_file
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.position import Position
from roll.runs.rlvr.loop import train_rlvr
from roll.runs.rlvr.replay import ReplayInputs, _loop, kept_steps, token_faults
from roll.runs.role_models import vocabulary_digest
from roll.types import Episode, Prompt, RewardOutcome, RolloutGroup
from tests.faults import assert_fault, coded
from tests.unit.pipeline.test_loop import Parts, wired
from tests.unit.rollout.build import make_episode, make_group, make_prompt
from tests.unit.rollout.test_stored import plain

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1.0, "repetition_penalty": 1.0}
ORIGIN = Origin("vocabulary", SAMPLING, 10, "10 rows")


def groups(count: int = 2, samples: int = 3, **changes: Any) -> list[RolloutGroup]:
    return [make_group(n, [make_episode([4, 5])] * samples, domain="arithmetic", **changes) for n in range(count)]


def write(folder: Path, *steps: Sequence[RolloutGroup] | None, origin: Origin = ORIGIN) -> None:
    """Keep these steps, leaving out those that are None."""
    for number, step in enumerate(steps, 1):
        if step is not None:
            asyncio.run(RolloutFiles(folder, origin, reference_text).keep(number, step, None))


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


class Drawn:
    """Draws prompts, and samples two responses of random length, tokens and reward to each."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        self._drawn += count
        return [make_prompt(number, [5, 6, number + 1]) for number in range(self._drawn - count, self._drawn)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        numbers = np.random.default_rng(prompt.prompt_id)

        def episode() -> Episode:
            tokens, log_probs = numbers.integers(1, 99, 4), numbers.normal(size=4)
            one = make_episode(tokens.tolist(), float(numbers.random()), log_probs=log_probs.tolist())
            return replace(one, reward=replace(one.reward, parts={"half": one.reward.value / 2}))

        return make_group(prompt.prompt_id, [episode() for _ in range(2)], prompt.token_ids.tolist())


def trained_on(scheduler: RolloutScheduler, files: RolloutFiles | None) -> Parts:
    """Return the parts of a loop of three steps that takes its groups from a scheduler."""
    parts = Parts()

    async def run() -> None:
        async with aclosing(scheduler):
            changes = {"scheduler": scheduler, "rollouts": files, "max_steps": 3}
            await train_rlvr(wired(parts, **changes), Position(0, 0))

    asyncio.run(run())
    return parts


def test_replay_trains_on_same_batches(tmp_path: Path) -> None:
    drawn = cast(Any, Drawn())
    first = trained_on(
        RolloutScheduler(drawn, drawn, 4, 1.0, 7, window=8), RolloutFiles(tmp_path, ORIGIN, reference_text)
    )
    kept = KeptRollouts(tmp_path, 4)
    again = trained_on(RolloutScheduler(kept, kept, 4, 0.0, None), None)
    assert len(first.batches) == len(again.batches) == 3
    for before, after in zip(first.batches, again.batches, strict=True):
        assert plain(after) == plain(before)
    assert again.calls == first.calls
    assert len({str(plain(batch)) for batch in first.batches}) == 3


def test_step_without_verdict_is_kept(tmp_path: Path) -> None:
    class Unscored(Drawn):
        async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
            lost = make_episode([3], outcome=RewardOutcome.CRASHED, note="it broke")
            return make_group(prompt.prompt_id, [lost, lost])

    drawn = cast(Any, Unscored())
    with pytest.raises(RollError, match="it broke"):
        trained_on(RolloutScheduler(drawn, drawn, 2, 0.0, 7), RolloutFiles(tmp_path, ORIGIN, reference_text))
    assert KeptRollouts(tmp_path, 2).facts(1).groups == 2


class Requested(Exception):
    """Ends the loop once all roles are requested."""


class TrainersRoles:
    """Stands in for `Roles` where only the trainer's side may be requested."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def actor_train(self, name: str, *_: object) -> None:
        self.names.append(name)

    def reference(self, *_: object) -> None:
        self.names.append("reference")

    async def start(self) -> None:
        raise Requested


def test_replay_requests_trainers_side_alone(config: Callable[..., RlvrConfig], tmp_path: Path) -> None:
    write(tmp_path, groups(), groups())
    replay, roles = config(), TrainersRoles()
    inputs = ReplayInputs(kept_steps(replay)[0], NO_END, None, ())
    context = cast(Any, SimpleNamespace(plan=make_plan(replay)))
    with pytest.raises(Requested):
        asyncio.run(_loop(replay, inputs, cast(Any, roles), context, cast(Any, None)))
    assert roles.names == ["actor_train", "reference"]


def test_vocabulary_digest_follows_tokens_and_ids(tiny_model: Path) -> None:
    first, second = load_tokenizer(str(tiny_model)), load_tokenizer(str(tiny_model))
    assert vocabulary_digest(first) == vocabulary_digest(second)
    second.add_tokens(["<new>"])
    assert vocabulary_digest(first) != vocabulary_digest(second)
    assert np.unique([vocabulary_digest(first), vocabulary_digest(second)]).size == 2
