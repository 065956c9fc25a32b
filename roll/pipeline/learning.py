"""What learns from a step's batch: the policy and, with `adv_estimator: gae`, the critic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roll.algorithms.losses import Loss
from roll.pipeline.checkpointer import Trainer
from roll.pipeline.position import Position
from roll.types import Metrics, TrainBatch
from roll.workers.device_sharing import together

Update = Callable[[TrainBatch, Loss, int], Awaitable[Metrics]]
"""All updates of a step, from the batch, the loss and the policy's version before them."""
CRITIC_FOLDER = "critic"


@dataclass(frozen=True)
class CriticLearning:
    """How the critic learns beside the policy."""

    update: Update
    loss: Loss
    warmup: int
    """Steps at the start in which it learns alone. The policy's version stays what it is, and is synced again."""
    at_once: bool
    """It has devices of its own, so that both learn at the same time; otherwise it comes first, for its values were just asked for."""


@dataclass(frozen=True)
class Learning:
    """The updates of a step."""

    update: Update
    """Of the policy."""
    loss: Loss
    updates_per_step: int
    critic: CriticLearning | None = None

    async def __call__(self, batch: TrainBatch, position: Position) -> tuple[Metrics, Position]:
        """What there is to say of the updates, and the position after the step."""
        version, critic = position.policy_version, self.critic
        policy_learns = critic is None or position.step >= critic.warmup
        parts: list[Callable[[], Awaitable[Metrics]]] = [partial(critic.update, batch, critic.loss, version)] if critic else []
        if policy_learns:
            parts.append(partial(self.update, batch, self.loss, version))
        said = await together(part() for part in parts) if critic and critic.at_once else [await part() for part in parts]
        metrics = {name: value for part in said for name, value in part.items()}
        return metrics, Position(position.step + 1, version + (self.updates_per_step if policy_learns else 0))


@dataclass(frozen=True)
class BothTrainers:
    """Implements `Trainer` for a policy with a critic, whose states lie in a folder of their own. The policy alone is exported."""

    policy: Trainer
    save_critic: Callable[[Path], Awaitable[None]]
    load_critic: Callable[[Path], Awaitable[None]]

    async def save(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.policy.save(folder)
        await self.save_critic(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.policy.load(folder)
        await self.load_critic(folder / CRITIC_FOLDER)

    async def export(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.policy.export(folder)
