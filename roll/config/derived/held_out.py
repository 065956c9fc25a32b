"""The metrics of the held-out sets that a run will have. Pure functions."""

from __future__ import annotations

from roll.config.derived.batch import has_pairs
from roll.config.schema.offline import DistillConfig, SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig

OF_RESPONSES = ("no_verdict_fraction", "length_mean", "length_max", "at_limit_fraction", "truncated_fraction")
"""Metrics of every set of held-out prompts."""


def sizes(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below `samples`, and `samples` itself."""
    return [*(1 << power for power in range((samples - 1).bit_length())), samples]


def held_out_metrics(config: Config) -> list[str]:
    """Return the names of the metrics by which policies can be compared; none if the run has no validation.

    Sets without an accuracy lack `pass@k` and `maj@k` at run time, which only the reward functions decide.
    """
    if not config.eval_steps:
        return []
    if not isinstance(config, RlvrConfig):
        name = config.validation.name if config.validation else "validation"
        return [f"val/{name}/{metric}" for metric in _of_rows(config)]
    found = []
    for name, one in (config.validation.named_sets() if config.validation else {}).items():
        samples = one.generating_args.num_return_sequences or 1
        rates = [f"pass@{k}" for k in sizes(samples)] + [f"maj@{k}" for k in sizes(samples)[1:]]
        found += [f"val/{name}/{metric}" for metric in (*rates, f"avg@{samples}", *OF_RESPONSES)]
    return found


def _of_rows(config: Config) -> tuple[str, ...]:
    if isinstance(config, SftConfig):
        return ("loss", "perplexity")
    if isinstance(config, DistillConfig):
        return ("loss", "divergence")
    return ("loss", "accuracy", "reward_margin") if has_pairs(config) else ("loss",)
