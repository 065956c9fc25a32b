"""Keys of the curriculum: prompts are drawn by how often they are solved."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roll.config.schema.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, StrictConfig


class PoolSharesConfig(StrictConfig):
    """Shares of the pools among the draws. They are scaled to sum to 1."""

    unseen: PositiveFloat = Field(
        0.3, description="Share of prompts that were never measured. Above 0, or they would never be."
    )
    hard: NonNegativeFloat = Field(0.1, description="Share of prompts with a solve rate of at most `hard_at_most`.")
    learnable: NonNegativeFloat = Field(0.5, description="Share of prompts between the two thresholds.")
    solved: NonNegativeFloat = Field(
        0.1, description="Share of prompts with a solve rate of at least `solved_at_least`."
    )


class GroupReplayConfig(StrictConfig):
    """Replay of rare successes: groups of rarely solved prompts take the place of groups that teach nothing.

    A group is replayed whole, at most once, in a later step.
    """

    solve_rate_at_most: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25,
        description="Largest share of a group's responses that passed for the group to be buffered; one must have.",
    )
    buffer_size: PositiveInt = Field(
        64, description="Largest number of groups in the buffer. The oldest make room for new ones."
    )
    staleness_at_most: PositiveInt = Field(
        8,
        description="Largest staleness of a replayed group: optimizer updates since its oldest token was sampled. "
        "Older groups leave the buffer.",
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="Largest share of a step's groups that are replayed ones."
    )


class CurriculumConfig(StrictConfig):
    """Curriculum: prompts are drawn from pools by their measured solve rate."""

    hard_at_most: Fraction = Field(0.1, description="Largest solve rate of a hard prompt.")
    solved_at_least: Fraction = Field(0.9, description="Smallest solve rate of a solved prompt.")
    update_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Weight a of the newest group: a prompt's solve rate becomes (1 - a) times itself plus a times the "
        "share of the group's responses that passed. 1 keeps only the newest group.",
    )
    shares: PoolSharesConfig = Field(
        default_factory=lambda: PoolSharesConfig.model_validate({}),
        description="How often each pool is drawn from. The share of a pool without prompts goes to the others.",
    )
    replay: GroupReplayConfig | None = Field(
        None,
        description="Replay of rare successes; see docs/algorithms.md. Without this block, every group is trained on "
        "in one step only.",
    )
