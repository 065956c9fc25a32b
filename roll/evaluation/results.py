"""Results of an evaluation: estimates with confidence intervals, and the files that hold them.

Confidence intervals of an evaluation's estimates. Pure functions.

The prompts are the sample, and the responses to one prompt are a cluster. So every estimate is a mean over prompts,
with the standard error sqrt(sum (x_i - mean)^2) / N. This is the clustered standard error of Miller, arXiv 2411.00640,
section 2.2, for clusters of equal size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from rich.table import Table

from roll.rewards.passing import Bars
from roll.runs.rlvr.validation import (
    NO_BARS,
    bars_for,
    earned,
    estimate_pass_at_k,
    judged_groups,
    part_means,
    passes_of,
    sizes,
    unscored,
    validation_metrics,
)
from roll.tracking.base import group_record
from roll.tracking.intervals import CONFIDENCE, wilson
from roll.types import Metrics, RolloutGroup


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its confidence interval from `low` to `high`."""

    value: float
    low: float
    high: float


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean. `values` has one value for each prompt."""
    mean = fmean(values)
    return sqrt(sum((value - mean) ** 2 for value in values)) / len(values)


def share_estimate(values: Sequence[float], samples: int) -> Estimate:
    """Return the mean of shares, with the Wilson score interval for the effective sample size.

    The effective sample size is p (1 - p) / SE^2, where p is the mean and SE its standard error. With one response to
    each prompt it equals the number of prompts N, and the interval is the ordinary Wilson interval (Wilson, 1927). It
    is never below N, because a share varies no more than a single response, and never above the number of responses. If
    all responses are right, or all are wrong, it is N. Source: Dean and Pagano, 2015, "Evaluating confidence interval
    methods for binomial proportions in clustered surveys".

    Args:
        values: one value in [0, 1] for each prompt: a share of its responses, or a probability.
        samples: number of responses to each prompt.
    """
    mean, error, prompts = fmean(values), standard_error(values), len(values)
    variance = mean * (1.0 - mean)
    if variance <= 0.0:
        size = float(prompts)
    else:
        most = float(prompts * samples)
        size = min(most, max(float(prompts), variance / error**2)) if error > 0.0 else most
    low, high = wilson(mean, size)
    return Estimate(mean, low, high)


def average(values: Sequence[float]) -> Estimate:
    """Return the mean of values in any range, one for each prompt, with the interval from the normal approximation."""
    mean = fmean(values)
    width = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * standard_error(values)
    return Estimate(mean, mean - width, mean + width)


RESULTS_FILE = "evaluation.json"


@dataclass(frozen=True)
class SetResult:
    """The result of one held-out set."""

    prompts: int
    samples: int
    """Number of responses to each prompt."""
    estimates: Mapping[str, Estimate]
    """By name: `accuracy` (the share of responses that pass), `pass@k` for k above 1, and `avg@n`, the mean reward. If
    no domain of the set has an accuracy, `avg@n` alone. Empty if no response has a verdict.
    """
    metrics: Metrics
    """Validation metrics of the set, named `val/<set>/...`."""
    unscored: int = 0
    """Number of responses whose reward gave no verdict. They count as failed."""


@dataclass(frozen=True)
class EvaluationResult:
    """The results of all sets, and what needs attention in them."""

    folder: Path
    """Folder that holds `evaluation.json` and `samples.jsonl`."""
    model: str
    step: int | None
    """Step of the checkpoint. None for a model without a run."""
    sets: Mapping[str, SetResult]
    notices: Sequence[str] = ()
    """What needs attention: a set whose responses all reached the length limit, and rewards that failed."""


def set_result(
    name: str, groups: Sequence[RolloutGroup], samples: int, bars: Mapping[str, Bars] = NO_BARS
) -> SetResult:
    """Return the estimates and the metrics of one set.

    Args:
        groups: the prompts with their responses, at least one group.
        samples: number of responses in each group.
        bars: when a response passes, by domain.
    """
    right = [sum(passes_of(group, bars)) for group in judged_groups(groups, bars)]
    rewards = [[earned(episode.reward) for episode in group.episodes] for group in groups]
    estimates = {"accuracy": share_estimate([count / samples for count in right], samples)} if right else {}
    for k in sizes(samples)[1:] if right else ():
        estimates[f"pass@{k}"] = share_estimate([estimate_pass_at_k(samples, count, k) for count in right], samples)
    failed = unscored(groups)
    if failed < sum(map(len, rewards)):
        are_shares = all(0 <= reward <= 1 for of_group in rewards for reward in of_group)
        means = [fmean(of_group) for of_group in rewards]
        estimates[f"avg@{samples}"] = share_estimate(means, samples) if are_shares else average(means)
        estimates |= {f"{part}, mean": average(means) for part, means in part_means(groups).items()}
    metrics = validation_metrics(name, groups, samples, bars)
    del metrics[f"val/{name}/policy_version"]  # the weights are not updated during an evaluation
    return SetResult(len(groups), samples, estimates, metrics, failed)


def sample_record(name: str, group: RolloutGroup, bars: Mapping[str, Bars] = NO_BARS) -> dict[str, Any]:
    """Return the record of `samples.jsonl` for one prompt: the name of the set, the prompt, its responses, and the
    `row` of the data.

    `passed` is null if the domain has no accuracy.
    """
    record = group_record(0, group)
    del record["step"]
    own = bars_for(bars, group)
    for response, has_passed in zip(record["responses"], passes_of(group, bars), strict=True):
        response["passed"] = has_passed if own else None
    return {"set": name, **record, "row": dict(group.prompt.row)}


def write_results(result: EvaluationResult, facts: Mapping[str, Any]) -> None:
    """Write `evaluation.json` with the results. `facts` are additional entries that describe the evaluation."""
    record = {
        "model": result.model,
        "step": result.step,
        "confidence": CONFIDENCE,
        "sets": {name: asdict(one) for name, one in result.sets.items()},
        "notices": list(result.notices),
        **facts,
    }
    (result.folder / RESULTS_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def result_table(result: EvaluationResult) -> Table:
    """Return a table of the estimates for a terminal. It says how many responses of a set got no verdict."""
    table = Table(box=None)
    lacks = any(one.unscored for one in result.sets.values())
    for column in ("set", "", "estimate", f"{CONFIDENCE:.0%} interval", *(["not scored"] if lacks else [])):
        table.add_column(column)
    for name, one in result.sets.items():
        rows = [
            (what, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
            for what, found in one.estimates.items()
        ]
        lost = f"{one.unscored} of {one.prompts * one.samples}" if one.unscored else ""
        for place, row in enumerate(rows or [("no result", "", "")]):
            first = f"{name} ({one.prompts} x {one.samples})" if not place else ""
            table.add_row(first, *row, *([lost if not place else ""] if lacks else []))
    return table
