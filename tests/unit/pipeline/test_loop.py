"""The RLVR and offline loops with parts that record their calls, and evaluation compared with values worked out by
hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.algorithms.objectives import PolicyLoss
from roll.algorithms.self_distillation import TokenGains
from roll.data.examples import Example, ExampleSequence
from roll.errors import RollError
from roll.ray.device_sharing import DeviceSharing
from roll.rollout.batch import Credit, CreditAssignment, Experience, Shaping
from roll.rollout.filters import rewards_differ
from roll.rollout.group import SingleTurns
from roll.rollout.record import single_turn
from roll.rollout.replay import GroupReplay
from roll.runs.device_phases import DevicePhases
from roll.runs.offline import loop as offline
from roll.runs.offline.batches import given_batch
from roll.runs.position import Epochs, Position
from roll.runs.rlvr import loop as rlvr
from roll.runs.rlvr.loop import Learning, Rlvr
from roll.runs.rlvr.validation import ByItself, Evaluator, estimate_pass_at_k
from roll.types import (
    NO_VERDICT,
    Completion,
    FinishReason,
    Floats,
    Ints,
    Metrics,
    NumberedCompletions,
    Prompt,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Sampling,
    Sequences,
    TrainBatch,
)
from tests.unit.rollout.build import EachByItself, kept_nowhere


def completion(token: int, version: int) -> Completion:
    return Completion(
        np.array([token, 1], np.int32),
        np.array([-0.5, -0.25], np.float32),
        np.full(2, version, np.int32),
        FinishReason.STOP,
        str(token),
    )


def group(number: int, version: int) -> RolloutGroup:
    prompt = Prompt(number, np.array([7, 8, 9], np.int32), "789", "digits", {})
    return RolloutGroup(
        prompt, [single_turn(prompt, completion(token, version), RewardResult(float(token % 2))) for token in (2, 3)]
    )


class Parts:
    """Stands in for all parts that the loop calls, and records the calls in order."""

    def __init__(self, interrupt_after: int = 10**9) -> None:
        self.calls: list[Any] = []
        self.batches: list[TrainBatch] = []
        self.measured: list[tuple[int, int]] = []
        self.version = -1
        self.interrupt_after = interrupt_after

    async def take(self) -> list[RolloutGroup]:
        self.calls.append("take")
        return [group(0, self.version), group(1, self.version)]

    async def log_probs(self, sequences: Sequences) -> Floats:
        self.calls.append("log_probs")
        return np.full(len(sequences.token_ids), -0.5, np.float32) * sequences.response_mask

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        self.calls.append("reference")
        return np.full(len(sequences.token_ids), -0.75, np.float32) * sequences.response_mask

    async def values(self, sequences: Sequences) -> Floats:
        self.calls.append("values")
        return np.full(len(sequences.token_ids), 0.25, np.float32) * sequences.response_mask

    async def states(self, groups: Sequence[RolloutGroup], step: Experience) -> Floats:
        self.calls.append("teacher")
        return np.arange(2 * int(step.sequences.response_mask.sum()), dtype=np.float32).reshape(-1, 2)

    async def gains(self, groups: Sequence[RolloutGroup], step: Experience, log_probs: Floats | None) -> TokenGains:
        self.calls.append(("self_teacher", log_probs is None))
        mask = step.sequences.response_mask
        return TokenGains(np.arange(len(mask), dtype=np.float32) * mask, mask)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        self.calls.append(("train", policy_version))
        self.batches.append(batch)
        return {"policy/loss": 0.5}

    def generating(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def push(self, version: int) -> None:
        self.calls.append(("sync", version))
        self.version = version

    async def after(self, step: int) -> Metrics:
        self.calls.append(("evaluate", step))
        return {"val/set/pass@1": 0.5} if step == 0 else {}

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def step(self, groups: Sequence[RolloutGroup]) -> Metrics:
        self.measured.append((self.version, len(groups)))
        return {"time/step": 1.0}

    stopped_early = ""

    def observe(self, step: int, metrics: Metrics) -> None:
        """Take the metrics, as a checkpointer that follows none."""

    async def save_if_due(self, position: Position) -> None:
        self.calls.append(("save", position.step, position.policy_version))

    def happened(self) -> bool:
        return sum(call == "take" for call in self.calls) >= self.interrupt_after

    name = "recorder"

    def log(self, step: int, metrics: Metrics) -> None:
        self.calls.append(("log", step, sorted(metrics)))

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self.calls.append(("samples", step, len(groups)))

    def close(self) -> None:
        pass


def wired(parts: Parts, **changes: Any) -> Rlvr:
    phases, stand_in = DevicePhases(DeviceSharing({})), cast(Any, parts)
    run = Rlvr(
        phases=phases,
        meter=stand_in,
        scheduler=stand_in,
        engines=stand_in,
        trainer=stand_in,
        needs_log_probs=False,
        reference=stand_in,
        reference_role="reference",
        critic=None,
        teachers=None,
        self_teacher=None,
        learning=Learning(phases, parts, PolicyLoss(), updates=3),
        validation=stand_in,
        checkpointer=stand_in,
        interrupt=stand_in,
        tracker=parts,
        shaping=Shaping(),
        credit=CreditAssignment(Credit("grpo", Normalisation())),
        max_steps=2,
    )
    return replace(run, **changes)


def test_the_loop_runs_its_parts_in_order() -> None:
    parts = Parts()
    end = asyncio.run(rlvr.train_rlvr(wired(parts), Position(0, 0)))
    assert end == Position(2, 6)
    order = [call if isinstance(call, str) else call[:2] for call in parts.calls]
    step = ["take", "reference"]
    first = [*step, ("train", 0), ("sync", 3), ("evaluate", 1), ("log", 1), ("samples", 1), ("save", 1)]
    second = [*step, ("train", 3), ("sync", 6), ("evaluate", 2), ("log", 2), ("samples", 2), ("save", 2)]
    assert order == [("sync", 0), ("evaluate", 0), ("log", 0), *first, *second]


class EqualLater(Parts):
    """Takes groups of equal rewards after the first step. Keeps what is logged and what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Metrics] = []
        self.kept: list[list[int]] = []
        self.asked: list[list[int]] = []

    async def take(self) -> list[RolloutGroup]:
        groups = await super().take()
        if self.version == 0:
            return groups
        return [replace(group(9, self.version), episodes=[one.episodes[0]] * 2) for one in groups]

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        self.asked.append([one.prompt.prompt_id for one in groups])
        return await super().of(groups, sequences)

    async def keep(self, step: int, groups: Sequence[RolloutGroup], batch: TrainBatch | None) -> None:
        self.kept.append([one.prompt.prompt_id for one in groups])

    def log(self, step: int, metrics: Metrics) -> None:
        self.logged.append(metrics)


def test_replayed_groups_are_trained_on_not_measured() -> None:
    parts = EqualLater()
    replay = GroupReplay(lambda one: True, rewards_differ, most_replayed=1, buffer_size=4, staleness_at_most=9)
    run = wired(parts, max_steps=3, replay=replay, rollouts=cast(Any, parts))
    asyncio.run(rlvr.train_rlvr(run, Position(0, 0)))
    assert parts.kept == parts.asked == [[0, 1], [0, 9], [1, 9]]
    mask = parts.batches[2].sequences.response_mask
    assert parts.batches[2].policy_versions[mask].tolist() == [0] * 4 + [6] * 4
    assert (parts.batches[2].advantages[mask] != 0).tolist() == [True] * 4 + [False] * 4
    assert [told["curriculum/replayed"] for told in parts.logged[1:]] == [0, 1, 1]
    assert parts.logged[3]["curriculum/replayed_staleness"] == 6
    # The metrics of rollouts are those of the groups that the step sampled.
    assert [told["reward/mean"] for told in parts.logged[1:]] == [0.5, 0, 0]
    assert [told["reward/equal_groups_fraction"] for told in parts.logged[1:]] == [0, 1, 1]
    assert [told["staleness/max"] for told in parts.logged[1:]] == [0, 0, 0]


def test_the_batch_carries_advantages_and_behaviour() -> None:
    parts = Parts()
    asyncio.run(rlvr.train_rlvr(wired(parts, max_steps=1), Position(0, 0)))
    [batch] = parts.batches
    assert batch.sequences.token_ids.tolist() == [7, 8, 9, 2, 1, 7, 8, 9, 3, 1] * 2
    # Rewards 0 and 1 in each group: mean 0.5, sample standard deviation sqrt(0.5).
    expected = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert batch.advantages[[3, 4, 8, 9]].tolist() == pytest.approx([-expected, -expected, expected, expected])
    assert batch.behaviour_log_probs is not None and batch.behaviour_log_probs[:5].tolist() == [0, 0, 0, -0.5, -0.25]
    assert batch.proximal_log_probs is None
    assert batch.ref_log_probs is not None and batch.ref_log_probs[:5].tolist() == [0, 0, 0, -0.75, -0.75]


def test_the_trainers_log_probs_stand_beside_the_engines() -> None:
    parts = Parts()
    asyncio.run(rlvr.train_rlvr(wired(parts, max_steps=1, needs_log_probs=True), Position(0, 0)))
    assert [call for call in parts.calls if isinstance(call, str)] == ["take", "reference", "log_probs"]
    [batch] = parts.batches
    assert batch.proximal_log_probs is not None and batch.proximal_log_probs[:5].tolist() == [0, 0, 0, -0.5, -0.5]
    assert batch.behaviour_log_probs is not None and batch.behaviour_log_probs[:5].tolist() == [0, 0, 0, -0.5, -0.25]


def test_a_critics_values_become_advantages_and_its_returns() -> None:
    parts = Parts()
    credit = CreditAssignment(Credit("gae", Normalisation(gamma=0.5, lambd=0.5)))
    asyncio.run(
        rlvr.train_rlvr(wired(parts, max_steps=1, credit=credit, critic=parts, needs_log_probs=True), Position(0, 0))
    )
    assert [call for call in parts.calls if isinstance(call, str)] == ["take", "reference", "log_probs", "values"]
    [batch] = parts.batches
    # All values are 1/4. TD errors of the first response, with reward 0: -1/8 and -1/4. Of the second, with reward 1:
    # -1/8 and 3/4.
    assert batch.advantages[[3, 4, 8, 9]].tolist() == pytest.approx([-0.1875, -0.25, 0.0625, 0.75])
    assert batch.values is not None and batch.values[:5].tolist() == [0, 0, 0, 0.25, 0.25]
    assert batch.returns is not None and batch.returns[[3, 4, 8, 9]].tolist() == pytest.approx([0.0625, 0, 0.3125, 1])


def test_a_teachers_states_reach_what_learns() -> None:
    parts = Parts()
    asyncio.run(rlvr.train_rlvr(wired(parts, max_steps=1, teachers=parts), Position(0, 0)))
    assert [call for call in parts.calls if isinstance(call, str)] == ["take", "reference", "teacher"]
    [batch] = parts.batches
    assert batch.teacher_states is not None and batch.teacher_states.tolist() == [
        [2.0 * row, 2.0 * row + 1] for row in range(8)
    ]


@pytest.mark.parametrize("needs", [False, True])
def test_a_self_teachers_gains_become_advantages(needs: bool) -> None:
    parts = Parts()
    credit = CreditAssignment(Credit("reinforce", Normalisation(), teacher_weight=0.25))
    run = wired(parts, max_steps=1, credit=credit, self_teacher=parts, needs_log_probs=needs)
    asyncio.run(rlvr.train_rlvr(run, Position(0, 0)))
    own = ["log_probs"] if needs else []
    assert parts.calls[parts.calls.index("reference") :][: 2 + needs] == [
        "reference",
        *own,
        ("self_teacher", not needs),
    ]
    # Rewards of 0 and 1, and gains of 3, 4, 8 and 9: the positions of the tokens.
    assert parts.batches[0].advantages[[3, 4, 8, 9]].tolist() == [0.75, 1, 2.75, 3]


def test_kl_in_reward_lowers_earlier_returns_more() -> None:
    parts = Parts()
    credit = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.1, kl_estimator="k1"))
    asyncio.run(rlvr.train_rlvr(wired(parts, max_steps=1, credit=credit), Position(0, 0)))
    # k1 is the behaviour log-prob minus the reference log-prob: 0.25 and 0.5 on the two tokens. The reward of the first
    # response is 0.
    assert parts.batches[0].advantages[3:5].tolist() == pytest.approx([-0.075, -0.05])


def test_an_interrupt_ends_the_loop_after_its_step() -> None:
    parts = Parts(interrupt_after=1)
    assert asyncio.run(rlvr.train_rlvr(wired(parts, max_steps=50), Position(0, 0))) == Position(1, 3)
    assert parts.calls[-1] == ("save", 1, 3)


def test_resumed_run_syncs_first_without_validating_again() -> None:
    parts = Parts()
    asyncio.run(rlvr.train_rlvr(wired(parts), Position(1, 3)))
    assert parts.calls[:2] == [("sync", 3), "take"]
    assert parts.measured == [(3, 0), (6, 2)], "the meter is reset after loading, before the first step"


def offline_run(parts: Parts, held_out: dict[int, Metrics]) -> offline.Offline:
    batch = given_batch(
        [Example((ExampleSequence(np.array([5, 6, 7], np.int32), np.array([False, True, True])),), 0.0)]
    )

    class Rows:
        def draw(self, count: int) -> list[int]:
            return list(range(count))

        async def of(self, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
            assert list(numbers) == [0]
            return batch, NegativeLogLikelihood()

        async def after(self, step: int) -> Metrics:
            return held_out.get(step, {})

        def part(self, name: str) -> AbstractContextManager[None]:
            return nullcontext()

        async def step(self, tokens: int, rows: int) -> Metrics:
            parts.calls.append(("measure", tokens, rows))
            return {"tokens": tokens}

    rows, stand_in = cast(Any, Rows()), cast(Any, parts)
    return offline.Offline(
        phases=DevicePhases(DeviceSharing({})),
        meter=rows,
        role="learner",
        trainer=stand_in,
        training=rows,
        sampler=rows,
        batch_size=1,
        validation=rows if held_out else None,
        checkpointer=stand_in,
        interrupt=stand_in,
        tracker=parts,
        epochs=Epochs(rows=4, batch_size=1),
        max_steps=2,
    )


def test_the_offline_loop() -> None:
    parts = Parts()
    run = offline_run(parts, {0: {"val/held/loss": 2.0}, 2: {"val/held/loss": 1.0}})
    assert asyncio.run(offline.train_offline(run, Position(0, 0))) == Position(2, 2)
    assert parts.batches[0].sequences.response_mask.tolist() == [False, True, True]
    assert [call for call in parts.calls if call[0] == "train"] == [("train", 0), ("train", 1)]
    logged = [call for call in parts.calls if call[0] == "log"]
    assert [call[1] for call in logged] == [0, 1, 2]


def test_offline_loop_without_validation_logs_from_step_1() -> None:
    parts = Parts()
    assert asyncio.run(offline.train_offline(offline_run(parts, {}), Position(0, 0))) == Position(2, 2)
    assert [call[1] for call in parts.calls if call[0] == "log"] == [1, 2]
    assert [call for call in parts.calls if call[0] == "measure"][1:] == [("measure", 3, 1)] * 2
    assert parts.calls[0] == ("measure", 0, 0), "the meter is reset after the start, before the first step"


@pytest.mark.parametrize(("samples", "passed"), [(4, 0), (4, 1), (4, 3), (5, 5), (6, 2)])
def test_pass_at_k_counts_subsets(samples: int, passed: int) -> None:
    for k in range(1, samples + 1):
        subsets = list(combinations(range(samples), k))
        expected = sum(any(index < passed for index in subset) for subset in subsets) / len(subsets)
        assert estimate_pass_at_k(samples, passed, k) == pytest.approx(expected)


class Answers(EachByItself):
    """Answers a prompt with consecutive numbers, and rewards even ones. Scoring crashes for prompt 2, so its responses
    never pass.
    """

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        assert seed is not None
        assert not sampling.log_probs
        yield list(enumerate([completion(int(token_ids[0]) + sample, 0) for sample in range(sampling.samples)]))

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        if prompt.prompt_id == 2:
            return [RewardResult(1.0, RewardOutcome.CRASHED, note="KeyError: 'answer'") for _ in responses]
        return [RewardResult(float(int(response) % 2 == 0)) for response in responses]


class Comparing(Answers):
    """Gives every response the reward 0 when it compares the responses of a group."""

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> list[RewardResult]:
        return [replace(result, value=0.0) for result in results]


def test_validation_scores_a_response_by_itself() -> None:
    prompts = [Prompt(0, np.array([10], np.int32), "", "digits", {})]
    metrics = asyncio.run(
        Evaluator(
            "held", prompts, SingleTurns(Answers(), ByItself(Comparing()), Sampling(4, log_probs=False)), 1, 0
        ).run(kept_nowhere)
    )
    assert metrics["val/held/pass@1"] == 1


def test_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(number, np.array([10 + number], np.int32), "", "digits", {}) for number in range(3)]
    sampler = SingleTurns(Answers(), ByItself(Answers()), Sampling(4, samples=2, log_probs=False))
    metrics = asyncio.run(Evaluator("held", prompts, sampler, 2, 0).run(kept_nowhere))
    assert metrics["val/held/pass@1"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert metrics["val/held/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/held/length_mean"] == 2
    assert metrics["val/held/policy_version"] == 0
    [message] = caplog.messages
    assert message.startswith("held: 2 of 6 ") and "no verdict" in message


@pytest.mark.parametrize("outcome", sorted(NO_VERDICT))
def test_step_without_verdict_is_recorded_and_raises(outcome: RewardOutcome) -> None:
    class Unscored(Parts):
        async def take(self) -> list[RolloutGroup]:
            prompt = Prompt(0, np.array([7], np.int32), "7", "digits", {})
            return [
                RolloutGroup(prompt, [single_turn(prompt, completion(2, 0), RewardResult(0.0, outcome, note="why"))])
            ]

    parts = Unscored()
    with pytest.raises(RollError, match="why"):
        asyncio.run(rlvr.train_rlvr(wired(parts), Position(0, 0)))
    [logged] = [call for call in parts.calls if call[:2] == ("log", 1)]
    assert f"reward/{outcome.value}_fraction" in logged[2] and "reward/mean" not in logged[2]
    assert parts.calls[-1] == ("samples", 1, 1)
    assert not parts.batches, "nothing is trained as if its reward were 0"
