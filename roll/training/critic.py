"""Facade of the value function."""

from __future__ import annotations

from dataclasses import replace

from roll.algorithms.losses import Loss
from roll.backend import TrainStrategy
from roll.training.actor_train import Learner
from roll.training.scoring import gather_tokens, share_out
from roll.types import Floats, Metrics, Sequences, TrainBatch


class Critic(Learner):
    """Facade of the `critic` group."""

    async def values(self, sequences: Sequences) -> Floats:
        """Return the critic's current values [T] before each response token, 0 for other tokens."""
        split, parts = share_out(sequences, self._group.replicas, self._shape.token_budget)
        results = await self._group.paced.within(self._train_seconds).each_replica(
            TrainStrategy.values, [(part,) for part in parts]
        )
        return gather_tokens(sequences, split, results)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """See `Learner`. Fields that only the policy needs are not sent."""
        own = replace(
            batch, behaviour_log_probs=None, ref_log_probs=None, proximal_log_probs=None, sequence_weights=None
        )
        return await super().train_step(own, loss, policy_version)
