"""`python -m roll.pipeline --config-name NAME [key=value ...]`: compose, check, plan, run.

Exit status: 0 done, 2 bad configuration or data, 3 a part failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from rich.console import Console

from roll.config.load.flags import launcher_fault
from roll.config.plan.plan import Plan
from roll.config.plan.show import WIDTH, show_plan
from roll.config.schema.pipelines import Config
from roll.errors import INTERRUPTED, PART_FAILED, ConfigError, RollError
from roll.pipeline.jobs import jobs_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if launched := launcher_fault(os.environ, words):
            raise ConfigError([launched])
        for config, plan in jobs_of(words):
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
