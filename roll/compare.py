"""`python -m roll.compare RUN...` compares runs: their results, configuration keys that differ, and curves."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.errors import BAD_INPUT, BadInput
from roll.stores.address import run_folder
from roll.tracking.compare import PAGE, compare_runs, comparison_page, comparison_text
from roll.tracking.report.page import write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and write its page. Return 0, or 2 if the runs cannot be compared or the page written."""
    parser = argparse.ArgumentParser(prog="python -m roll.compare", description=__doc__)
    parser.add_argument(
        "runs",
        type=run_folder,
        nargs="+",
        metavar="RUN",
        help="a run folder, or a folder with the run folders of a multirun",
    )
    help_of_output = (
        f"file of the page; by default {PAGE} in the given folder, or in the working directory for several folders"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_of_output)
    words = parser.parse_args(argv)
    output: Path = words.output or (words.runs[0] if len(words.runs) == 1 else Path()) / PAGE
    try:
        comparison = compare_runs(words.runs)
        print(comparison_text(comparison, shutil.get_terminal_size().columns))
        print(f"\npage: {write_page(output, comparison_page(comparison))}")
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"{output}: the page cannot be written: {error}\n    give another file with --output", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
