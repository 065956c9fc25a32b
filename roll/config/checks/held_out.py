"""Checks the metrics that decide which checkpoint is kept and when a run ends."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.held_out import held_out_metrics
from roll.config.schema.pipelines import Config
from roll.errors import Fault
from roll.registry import nearest


def watched_metric_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of `keep_best` and `early_stopping`: no validation, or a metric that no held-out set has."""
    for place, block in (("keep_best", config.keep_best), ("early_stopping", config.early_stopping)):
        if block is None:
            continue
        known = held_out_metrics(config)
        if not config.eval_steps:
            problem = "set, but eval_steps is 0, so that no metric of a held-out set is measured"
            yield Fault(place, problem, "set eval_steps, or remove the block", "no_effect")
        elif known and block.metric not in known:
            problem = f"'{block.metric}' is not a metric of a held-out set of this run{nearest(block.metric, known)}"
            yield Fault(f"{place}.metric", problem, f"use one of: {', '.join(known)}", "unknown_name")
