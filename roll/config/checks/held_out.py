"""Checks held-out sets, and the metrics that decide which checkpoint is kept and when a run ends."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.batch import learner
from roll.config.derived.held_out import held_out_metrics
from roll.config.schema.model import DataConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
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


def held_out_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each held-out set that reads a source on which the run trains."""
    if config.validation is None:
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
