"""Follows held-out metrics over the validations of a run: which step was the best, and whether the run should end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from roll.config.schema.pipelines import Config
from roll.config.schema.roles import WatchedMetric
from roll.errors import ConfigError, Fault

LOG = logging.getLogger(__name__)
HELD_OUT = "val/"
"""Prefix of the metrics of held-out sets."""


class BestValue:
    """The best value of one metric so far."""

    value: float | None
    """None before the first validation."""
    step: int | None
    """Step after which it was measured."""
    validations_since: int
    """Number of later validations, none of which improved on it."""
    observed: int | None
    """Step of the newest validation."""

    def __init__(self, place: str, watched: WatchedMetric, min_delta: float = 0.0) -> None:
        """`place` is the key of the block `watched`; `min_delta` the least difference that is an improvement."""
        self.place, self.watched, self.min_delta = place, watched, min_delta
        self.load_state_dict({})

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the value after a step with the best one.

        A missing value is no improvement, nor is one that is not finite.

        Raises:
            ConfigError: the first validation lacks the metric.
        """
        name, self.observed = self.watched.metric, step
        found = metrics.get(name)
        if found is None and self.value is None:
            known = ", ".join(metric for metric in metrics if metric.startswith(HELD_OUT))
            problem = f"'{name}' is not among the metrics of the validation after step {step}"
            raise ConfigError(Fault(f"{self.place}.metric", problem, f"use one of: {known}", "not_found"))
        if found is None:
            LOG.warning("%s: the validation after step %d has no %s; it counts as no better", self.place, step, name)
        if found is not None and self._improves(found):
            self.value, self.step, self.validations_since = found, step, 0
        else:
            self.validations_since += 1

    def _improves(self, found: float) -> bool:
        if self.value is None or self.value != self.value:
            return True
        gain = found - self.value if self.watched.prefers_larger else self.value - found
        return gain > 0 and gain >= self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values."""
        return {
            "metric": self.watched.metric,
            "larger": self.watched.prefers_larger,
            "value": self.value,
            "step": self.step,
            "validations_since": self.validations_since,
            "observed": self.observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned. One of another metric is ignored; an empty one is the start."""
        own = (self.watched.metric, self.watched.prefers_larger) == (state.get("metric"), state.get("larger"))
        self.value = state["value"] if own else None
        self.step = state["step"] if own else None
        self.validations_since = state["validations_since"] if own else 0
        self.observed = state["observed"] if own else None


class Improvement:
    """The metrics of `keep_best` and `early_stopping`."""

    def __init__(self, config: Config) -> None:
        stopping = config.early_stopping
        self.kept = BestValue("keep_best", config.keep_best) if config.keep_best else None
        self._stopping = BestValue("early_stopping", stopping, stopping.min_delta) if stopping else None
        self._patience = stopping.patience if stopping else 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; steps without a validation are ignored. Raises what `BestValue.observe` raises.

        The validation before the first step has no checkpoint, so that it cannot be the best one to keep.
        """
        if not any(name.startswith(HELD_OUT) for name in metrics):
            return
        if self.kept and step:
            self.kept.observe(step, metrics)
        if self._stopping:
            self._stopping.observe(step, metrics)

    @property
    def why_stopped(self) -> str:
        """Why and where the run ends early, or an empty string."""
        one = self._stopping
        if one is None or one.validations_since < self._patience:
            return ""
        least = f" by {one.min_delta:g}" if one.min_delta else ""
        return (
            f"stopped early at step {one.observed}: {one.watched.metric} has not improved{least} in "
            f"{one.validations_since} validations; its best value was {one.value:.4g} after step {one.step}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values, by key."""
        return {one.place: one.state_dict() for one in (self.kept, self._stopping) if one}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned. What it lacks begins anew."""
        for one in (self.kept, self._stopping):
            if one:
                one.load_state_dict(state.get(one.place, {}))
