"""One job: its plan on the console, and its run. `python -m roll.runs.job` runs a job that its parent sends.

The parent runs several of them side by side (`roll/runs/side_by_side.py`). It writes the checked configuration and its
plan, pickled, to standard input.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, because the imports take a second
    from roll.system.early_signals import end_at_signals

    end_at_signals()

import pickle
import sys

from rich.console import Console

from roll.config.plan.plan import Plan
from roll.config.plan.show import WIDTH, show_plan
from roll.config.schema.pipelines import Config
from roll.system.command import run_command


def run_job(config: Config, plan: Plan) -> None:
    """Print the plan, and run the job, or in a dry run only try its first rows and environments.

    Raises what `run_experiment` and `try_dry_run` raise.
    """
    show_plan(config, plan, Console(width=None if sys.stdout.isatty() else WIDTH))
    if config.dry_run:
        from roll.runs.dry_run import try_dry_run  # Imported here, because a run has no use for it.

        print("\n".join(try_dry_run(config)))
        return
    from roll.tracking.life import ActivityDisplay

    with ActivityDisplay(Console()) as life:
        life.driver("loading libraries")
        from roll.runs.assemble import run_experiment  # Imported here, so that a dry run imports neither torch nor ray.

        run_experiment(config, plan, life)


if __name__ == "__main__":
    sys.exit(run_command(lambda: run_job(*pickle.load(sys.stdin.buffer))))  # noqa: S301
