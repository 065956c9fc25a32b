"""`python -m roll.pipeline --config-name NAME [key=value ...]`: compose, check, plan, run.

Exit status: 0 done, 2 bad configuration or data, 3 a part failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from omegaconf import DictConfig
from rich.console import Console

from roll.config.load.compose import compose
from roll.config.load.flags import launcher_fault
from roll.config.load.loader import read_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.plan.show import WIDTH, show_plan
from roll.config.schema.pipelines import Config
from roll.errors import INTERRUPTED, PART_FAILED, ConfigError, Fault, RollError

Job = tuple[Config, Plan]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if launched := launcher_fault(os.environ, words):
            raise ConfigError([launched])
        for config, plan in _jobs(words):
            _run(config, plan)
    except RollError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else PART_FAILED
    except Exception:
        traceback.print_exc()
        return PART_FAILED
    return 0


def _jobs(argv: Sequence[str]) -> list[Job]:
    """Every job of the command line, checked and planned before the first one starts."""
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
    folders = [os.path.abspath(config.output_dir) for config, _ in jobs]  # a folder may be written in two ways
    for (config, _), folder in zip(jobs, folders, strict=True):
        if folders.count(folder) > 1:
            problem = f"'{config.output_dir}' is the run folder of {folders.count(folder)} jobs of the sweep"
            raise ConfigError([Fault("output_dir", problem, "interpolate the job's number: 'output_dir=./output/sweep_${hydra:job.num}'")])


def _run(config: Config, plan: Plan) -> None:
    show_plan(config, plan, Console(width=None if sys.stdout.isatty() else WIDTH))
    if config.dry_run:
        return
    from roll.tracking.life import Life

    with Life(Console()) as life:
        life.driver("loading libraries")
        from roll.pipeline.assemble import run  # Here, so that a dry run imports neither torch nor ray.

        run(config, plan, life)


if __name__ == "__main__":
    sys.exit(main())
