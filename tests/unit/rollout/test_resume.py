"""A run resumes from a checkpoint of version 0.1, in which rollouts were single completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import datasets
import numpy as np

from roll.algorithms.advantages import Normalisation
from roll.config.schema.model import DataConfig
from roll.data.prompts import PromptSampler, PromptSet
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.rollout.group import SingleTurns
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Prompt, RewardResult, Sampling
from tests.unit.rollout.build import EachByItself, make_episode, make_group

WRITTEN = """{
 "step": 2,
 "policy_version": 4,
 "sampler": {
  "streams": {
   "": {
    "position": 9
   }
  }
 },
 "basis": {
  "seed": "42"
 },
 "seconds": 12.5,
 "credit": {
  "kl_coef": 0.11,
  "rewards": {
   "count": 4,
   "mean": 3.0,
   "squares": 20.0
  }
 }
}"""
"""A `loop.json` that version 0.1 wrote."""


DRAWN = ["5", "2", "4", "14"]
"""The prompts that version 0.1 drew next, from sixteen prompts with seed 42."""


def prompts(count: int) -> PromptSet:
    """Return prompts of one token each, which is the number of the prompt."""
    place = {"file": 0, "label": None}
    rows = [
        {"token_ids": [number], "text": str(number), "row": "{}", "number": number + 1, **place}
        for number in range(count)
    ]
    data_args, table = (
        DataConfig.model_validate({"file_name": "rows.jsonl", "prompt": "prompt"}),
        datasets.Dataset.from_list(rows),
    )
    return PromptSet(
        ("rows.jsonl",), ("sums",), np.arange(count), np.zeros(count, np.int16), {}, {}, {}, data_args, table
    )


class Same(EachByItself):
    """Engine and rewards in one object. Repeats the prompt, with reward 0."""

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        yield list(
            enumerate(
                [Completion(token_ids, -np.ones(1, np.float32), np.zeros(1, np.int32), FinishReason.STOP, "x")]
                * sampling.samples
            )
        )

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(0.0)] * len(responses)


def test_resumed_scheduler_continues_with_due_prompts(tmp_path: Path) -> None:
    (tmp_path / LOOP_FILE).write_text(WRITTEN)
    state = LoopState.read(tmp_path)

    async def run() -> list[tuple[int, str]]:
        scheduler = RolloutScheduler(
            PromptSampler(prompts(16), 42), SingleTurns(Same(), Same(), Sampling(8, samples=2)), 4, 1.0, 7
        )
        scheduler.load_state_dict(state.sampler)
        groups = await scheduler.take()
        await scheduler.aclose()
        return [(group.prompt.prompt_id, group.prompt.text) for group in groups]

    assert asyncio.run(run()) == list(zip(range(9, 13), DRAWN, strict=True))


def test_resumed_credit_keeps_moments_and_kl_weight(tmp_path: Path) -> None:
    (tmp_path / LOOP_FILE).write_text(WRITTEN)
    assignment = CreditAssignment(Credit("reinforce", Normalisation(mean="running"), kl_coef=0.1, target_kl=0.01))
    assignment.load_state_dict(LoopState.read(tmp_path).credit)
    step = experience([make_group(0, [make_episode([5], 8.0)])], Shaping())
    batch, metrics = assignment(step, np.array([0, 0, -1], np.float32))
    # The mean of four rewards with mean 3 and of the reward 8 is 4.
    assert batch.advantages.tolist() == [0, 0, 4]
    assert metrics["reward/kl_coef"] == 0.11
