"""Checks of the curriculum."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def curriculum_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each setting of the block `curriculum` that has no effect or contradicts another."""
    own = config.curriculum
    if own is None:
        return
    if own.hard_at_most >= own.solved_at_least:
        problem = f"{own.hard_at_most:g}, but solved_at_least is {own.solved_at_least:g}: no prompt would be learnable"
        yield Fault("curriculum.hard_at_most", problem, "set it below solved_at_least", "contradiction")
    if not own.shares.hard + own.shares.learnable + own.shares.solved:
        problem = "the shares of hard, learnable and solved are all 0, so that solve rates would decide nothing"
        yield Fault("curriculum.shares", problem, "give one of them a share above 0, or remove curriculum", "no_effect")
    if config.replay_from is not None:
        problem = f"given, but the run replays the rollouts of '{config.replay_from}' and draws no prompts"
        yield Fault("curriculum", problem, "remove one of the two", "no_effect")
