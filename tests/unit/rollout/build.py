"""Prompts, rollouts and groups made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import Completion, FinishReason, Prompt, RewardOutcome, RewardResult, Rollout, RolloutGroup


def make_prompt(prompt_id: int, token_ids: Sequence[int] = (1, 2), domain: str = "sums") -> Prompt:
    return Prompt(prompt_id, np.array(token_ids, np.int32), f"prompt {prompt_id}", domain, {"number": prompt_id})


def make_rollout(
    token_ids: Sequence[int],
    reward: float = 0.0,
    *,
    log_probs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    finish: FinishReason = FinishReason.STOP,
    outcome: RewardOutcome = RewardOutcome.SCORED,
    note: str = "",
) -> Rollout:
    count = len(token_ids)
    completion = Completion(
        np.array(token_ids, np.int32),
        np.array([-1.0] * count if log_probs is None else log_probs, np.float32),
        np.array([0] * count if versions is None else versions, np.int32),
        finish,
        "text",
    )
    return Rollout(completion, RewardResult(reward, outcome, note=note))


def make_group(prompt_id: int, rollouts: Sequence[Rollout], token_ids: Sequence[int] = (1, 2), domain: str = "sums") -> RolloutGroup:
    return RolloutGroup(make_prompt(prompt_id, token_ids, domain), rollouts)
