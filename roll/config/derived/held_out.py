"""The held-out sets of a run: their metrics, and rows that are also trained on. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.batch import has_pairs, learner
from roll.config.schema.model import DataConfig
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
    found, parts = [], sorted({part for section in config.rewards.values() for part in section.parts})
    for name, one in (config.validation.named_sets() if config.validation else {}).items():
        samples = one.generating_args.num_return_sequences or 1
        rates = [f"pass@{k}" for k in sizes(samples)] + [f"maj@{k}" for k in sizes(samples)[1:]]
        found += [f"val/{name}/{metric}" for metric in (*rates, f"avg@{samples}", *OF_RESPONSES)]
        found += [f"val/{name}/{part}/mean" for part in parts]
    return found


def _of_rows(config: Config) -> tuple[str, ...]:
    if isinstance(config, SftConfig):
        return ("loss", "perplexity")
    if isinstance(config, DistillConfig):
        return ("loss", "divergence")
    return ("loss", "accuracy", "reward_margin") if has_pairs(config) else ("loss",)


def held_out_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each held-out set that reads a source on which the run trains."""
    if config.validation is None or not config.eval_steps:
        return
    trained = _sources(getattr(learner(config)[1], "data_args", None))
    if isinstance(config, RlvrConfig):
        places = config.validation.places()
        sets = {places[name]: one.data_args for name, one in config.validation.named_sets().items()}
    else:
        sets = {"validation": config.validation.data_args}
    for place, source in sets.items():
        for file, split in sorted(trained & _sources(source)):
            yield (
                f"{place}.data_args.file_name: '{file}' (split {split}) is also trained on, so its metrics do not show "
                "what the policy does with new rows; give other rows"
            )


def _sources(source: DataConfig | None) -> set[tuple[str, str]]:
    """Return the files or Hub names of a source, each with its split."""
    if source is None:
        return set()
    files = (source.file_name,) if isinstance(source.file_name, str) else source.file_name
    return {(file, source.split) for file in files}
