"""Turns a command line into checked and planned jobs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.loader import read_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault

Job = tuple[Config, Plan]


def jobs_of(argv: Sequence[str]) -> list[Job]:
    """Return all jobs of the command line, checked and planned. Print warnings to stderr.

    Raises:
        ConfigError: a job has faults. The error lists all faults of that job.
        SystemExit: Hydra printed its help, or refused a flag.
    """
    jobs: list[Job] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        loaded = read_config(composed, presets)
        if loaded.config is None:
            raise ConfigError(loaded.faults)
        jobs.append((loaded.config, make_plan(loaded.config, loaded.faults)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            compose(argv, check)
        finally:
            texts = [str(warning.message) for warning in caught] + [text for _, plan in jobs for text in plan.warnings]
            for text in dict.fromkeys(texts):
                print(f"warning: {text}", file=sys.stderr)
    _refuse_shared_folders(jobs)
    return jobs


def _refuse_shared_folders(jobs: Sequence[Job]) -> None:
    folders = [os.path.abspath(config.output_dir) for config, _ in jobs]  # two paths may name the same folder
    for (config, _), folder in zip(jobs, folders, strict=True):
        if folders.count(folder) > 1:
            problem = f"'{config.output_dir}' is the run folder of {folders.count(folder)} jobs of the sweep"
            raise ConfigError(
                [
                    Fault(
                        "output_dir",
                        problem,
                        "interpolate the job's number: 'output_dir=./output/sweep_${hydra:job.num}'",
                        "duplicate",
                    )
                ]
            )
