"""Sums of metrics over the micro-batches of a step, kept on the device and read once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from roll.algorithms.losses import Counted
from roll.backend import TrainStepResult
from roll.types import Metrics

WITHIN = ("mismatch/logprob_abs_diff_mean", "mismatch/kl")
"""Names of the mismatch metrics for responses sampled by one version of the policy."""
SPANNING = ("mismatch/spanning/logprob_abs_diff_mean", "mismatch/spanning/kl")
"""Names of the mismatch metrics for responses sampled by several versions of the policy."""


class MetricSums:
    """Adds up metrics without waiting for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counted: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._tokens = 0

    def add(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add token metrics [S] of a micro-batch with S = `tokens` response tokens."""
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.sum(dtype=torch.float64)
        self._tokens += tokens

    def count(self, metrics: Mapping[str, Counted]) -> None:
        """Add metrics that exist only for some of a micro-batch's tokens, sequences or pairs."""
        for name, (values, counts_in) in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + torch.where(counts_in, values, 0.0).sum(
                dtype=torch.float64
            )
            self._counts[name] = self._counts.get(name, 0.0) + counts_in.sum(dtype=torch.float64)

    def weigh(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add scalar metrics of a micro-batch, weighted by its number of tokens, prompts included."""
        for name, value in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + value.double() * tokens
            self._counts[name] = self._counts.get(name, 0.0) + torch.full_like(value, tokens, dtype=torch.float64)

    def add_mismatch(self, difference: Tensor, current: Tensor, spanning: Tensor) -> None:
        """Add metrics of the log-prob mismatch between trainer and engine: absolute differences, and KL(engine ||
        trainer) by k3.

        Args:
            difference: [S], log-probs of the trainer minus those of the engine.
            current: bool [S], tokens sampled by the current version. Other tokens are left out.
            spanning: bool [S], tokens of responses sampled by several versions. For these, the engine may have reused a
                KV cache that an older version computed.
        """
        compared = torch.where(current, difference.double(), 0.0)
        values = (compared.abs(), torch.expm1(compared) - compared)
        for names, chosen in ((WITHIN, current & ~spanning), (SPANNING, current & spanning)):
            self.count({name: (value, chosen) for name, value in zip(names, values, strict=True)})

    def result(self, scalars: Metrics) -> TrainStepResult:
        """Return all sums together with `scalars`. The sums are copied to the host in a single copy."""
        tables = (self._sums, self._counted, self._counts)
        there = [value for table in tables for value in table.values()]
        values = iter(torch.stack(there).tolist() if there else [])
        sums, counted, counts = ({name: next(values) for name in table} for table in tables)
        return TrainStepResult(sums, self._tokens, scalars, counted, counts)
