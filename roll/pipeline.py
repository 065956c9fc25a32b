"""`python -m roll.pipeline --config-name NAME [key=value ...]`: compose, check, plan, run.

Exit status: 0 done, 2 bad configuration or data, 3 a part failed, 130 interrupted.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, because the imports take a second
    from roll.system.early_signals import end_at_signals

    end_at_signals()

import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from roll.config.load.complete import answer_shell
from roll.config.load.compose import compose
from roll.config.load.flags import COMPLETION, launcher_fault, parse_flags
from roll.config.load.loader import read_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.pipelines import Config
from roll.errors import INTERRUPTED, PART_FAILED, ConfigError, DataError, Fault
from roll.runs.job import run_job
from roll.runs.side_by_side import (
    Command,
    outcome,
    present_gpus,
    python_module,
    run_side_by_side,
    slot_environments,
)
from roll.system.command import run_command

Job = tuple[Config, Plan]
"""A checked configuration and its plan."""
Check = Callable[[DictConfig, set[str] | None], None]
"""Checks a composed configuration with the root keys that only `${...}` uses; None means the shipped presets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return run_command(lambda: _run_all(words))
    except SystemExit as stop:  # raised by Hydra's own flags, such as --help
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else PART_FAILED


def _run_all(words: Sequence[str]) -> None:
    if launched := launcher_fault(os.environ, words):
        raise ConfigError(launched)
    if {*COMPLETION} & {*words}:
        print("\n".join(answer_shell(words)))
        return
    most = parse_flags(words).parallel
    jobs = jobs_of(words)
    if most and len(jobs) == 1:
        remedy = "add --multirun and several values of a key, KEY=A,B, or leave it out"
        raise ConfigError(Fault("--parallel", f"{most}, but there is only one job", remedy, "no_effect"))
    is_dry = any(config.dry_run for config, _ in jobs)
    statuses: list[int | None] = [0] * len(jobs)
    if most and not is_dry:
        statuses = _run_parallel(jobs, most)
    else:
        for config, plan in jobs:
            run_job(config, plan)
    done = [Path(config.output_dir) for (config, _), status in zip(jobs, statuses, strict=True) if status == 0]
    if len(done) > 1 and not is_dry:
        _compare(done)
    if INTERRUPTED in statuses or None in statuses:
        raise KeyboardInterrupt
    if failed := [status for status in statuses if status]:
        raise SystemExit(failed[0] if failed[0] > 0 else PART_FAILED)


def jobs_of(argv: Sequence[str]) -> list[Job]:
    """Return all jobs of the command line, checked and planned. Print warnings to stderr.

    Raises:
        ConfigError: a job has faults. The error lists all faults of that job.
        SystemExit: Hydra printed its help, or refused a flag.
    """
    jobs = _checked(partial(compose, argv))
    _refuse_shared_folders(jobs)
    return jobs


def job_of(composed: DictConfig) -> Job:
    """Return the job of a configuration that is composed already, as `jobs_of` does. Raises ConfigError if it has
    faults.
    """
    [job] = _checked(lambda check: check(composed, None))
    return job


def _checked(compose_each: Callable[[Check], None]) -> list[Job]:
    jobs: list[Job] = []

    def check(composed: DictConfig, presets: set[str] | None) -> None:
        loaded = read_config(composed, presets)
        if loaded.config is None:
            raise ConfigError(*loaded.faults)
        jobs.append((loaded.config, make_plan(loaded.config, loaded.faults)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            compose_each(check)
        finally:
            texts = [str(warning.message) for warning in caught] + [text for _, plan in jobs for text in plan.warnings]
            for text in dict.fromkeys(texts):
                print(f"warning: {text}", file=sys.stderr)
    return jobs


def _refuse_shared_folders(jobs: Sequence[Job]) -> None:
    folders = [os.path.abspath(config.output_dir) for config, _ in jobs]  # two paths may name the same folder
    for (config, _), folder in zip(jobs, folders, strict=True):
        if folders.count(folder) > 1:
            problem = f"'{config.output_dir}' is the run folder of {folders.count(folder)} jobs of the sweep"
            remedy = "interpolate the job's number: 'output_dir=./output/sweep_${hydra:job.num}'"
            raise ConfigError(Fault("output_dir", problem, remedy, "duplicate"))
    stores = [config.output_store.rstrip("/") for config, _ in jobs if config.output_store]
    if shared := next((store for store in stores if stores.count(store) > 1), None):
        problem = f"'{shared}' is the store of {stores.count(shared)} jobs of the sweep"
        remedy = "interpolate the job's number: 'output_store=s3://bucket/sweep_${hydra:job.num}'"
        raise ConfigError(Fault("output_store", problem, remedy, "duplicate"))


def _run_parallel(jobs: Sequence[Job], most: int) -> list[int | None]:
    """Run jobs side by side, print a summary and return their exit statuses. Raises ConfigError if they cannot."""
    needed = max((max(plan.devices, default=-1) + 1 for _, plan in jobs), default=0)
    slots = slot_environments(min(most, len(jobs)), needed, os.environ, present_gpus())
    commands = [Command(python_module("roll.runs.job"), pickle.dumps(job)) for job in jobs]
    statuses = run_side_by_side(commands, slots, print)
    for number, ((config, _), status) in enumerate(zip(jobs, statuses, strict=True)):
        print(f"job {number}: {outcome(status)}: {config.output_dir}")
    return statuses


def _compare(folders: Sequence[Path]) -> None:
    """Compare the runs of a multirun as `python -m roll.compare` does. If that is impossible, print the reason."""
    from roll.tracking.compare import PAGE, compare_runs, comparison_page, comparison_text
    from roll.tracking.report.page import write_page

    try:
        comparison = compare_runs(folders)
        print(comparison_text(comparison, shutil.get_terminal_size().columns))
        common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
        print(f"\npage: {write_page(common / PAGE, comparison_page(comparison))}")
    except (DataError, OSError) as error:
        print(f"the runs could not be compared: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
