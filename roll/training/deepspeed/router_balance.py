"""Weights the auxiliary loss of routers by tokens, over micro-batches and ranks, and reports it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.backend import MicroBatch, Rank
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError, Fault
from roll.models.routers import RouterLoss, balanced_routers
from roll.training.deepspeed.metric_sums import MetricSums


class RouterBalance:
    """Adds the loss of the routers to the loss of an update.

    The added term is `coefficient` times the mean of the routers' loss over all micro-batches and ranks, weighted by tokens.
    As in transformers, the loss of a micro-batch covers all of its tokens, prompts included. Packed micro-batches have no padding.
    """

    def __init__(self, loss: RouterLoss, coefficient: float, rank: Rank) -> None:
        self._loss, self._coefficient, self._rank = loss, coefficient, rank
        self._total = torch.ones((), device=rank.device)
        self._tokens = 0
        self._measured: list[tuple[dict[str, Tensor], int]] = []

    def begin_update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the tokens of an update over all ranks. Collective, but does not wait for the device."""
        total = torch.tensor(float(sum(map(tokens_of_samples, micro_batches))), device=self._rank.device)
        if self._rank.world_size > 1:
            torch.distributed.all_reduce(total)
        self._total = total.clamp(min=1.0)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for the forward pass of a micro-batch."""
        self._tokens = tokens_of_samples(micro_batch)
        # Multiply by the world size, because DeepSpeed averages gradients over ranks.
        weight = self._coefficient * self._tokens * self._rank.world_size / self._total
        self._loss.begin(weight if self._coefficient else None)

    def end(self) -> None:
        """Record the metrics of a micro-batch, after its backward pass."""
        self._measured.append((self._loss.end(), self._tokens))

    def report(self, sums: MetricSums) -> None:
        """Add the metrics recorded since the last report to `sums`."""
        for metrics, tokens in self._measured:
            sums.weigh(metrics, tokens)
        self._measured.clear()


def tokens_of_samples(micro_batch: MicroBatch) -> int:
    """Return the number of tokens of a micro-batch, prompts included; 0 for a filler."""
    return len(micro_batch.batch.sequences.token_ids) if micro_batch.samples else 0


def router_balance(training: TrainingConfig, causal: PreTrainedModel, rank: Rank) -> RouterBalance | None:
    """Build the balance of the model's routers. Return None if `router_aux_loss_coef` is not set.

    Raises:
        ConfigError: the model has no routers to which the loss applies.
    """
    coefficient = training.router_aux_loss_coef
    if coefficient is None:
        return None
    if routers := balanced_routers(causal):
        return RouterBalance(RouterLoss(routers), coefficient, rank)
    where = f"{rank.role}.training_args.router_aux_loss_coef"
    problem = f"{coefficient:g}, but the model ({causal.config.model_type}) has no routers that choose experts by a softmax"
    raise ConfigError([Fault(where, problem, "remove it")])
