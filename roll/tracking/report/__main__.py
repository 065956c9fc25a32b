"""`python -m roll.tracking.report RUN_DIR` writes `RUN_DIR/report.html`: one page with the results of a run."""

from __future__ import annotations

import argparse
import sys

from roll.errors import BadInput
from roll.stores.address import run_folder
from roll.tracking.report.write import write_report


def main() -> int:
    """Write the report of the given run folder. Return 0, or 2 if the folder has no run to report."""
    parser = argparse.ArgumentParser(prog="python -m roll.tracking.report", description=__doc__)
    parser.add_argument("run_dir", type=run_folder, help="the run folder (`output_dir`)")
    try:
        print(write_report(parser.parse_args().run_dir))
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
