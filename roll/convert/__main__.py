"""`python -m roll.convert FILE` translates a configuration of TRL, verl or OpenRLHF into an experiment of roll.

FILE is a YAML or JSON file of TRL, a Python script that builds one of its trainers, or a shell script that starts TRL,
verl or OpenRLHF. Nothing of a script is run. The experiment is printed, and on stderr, what became of the keys that
were not copied. Exit status: 0, or 2 if the file is for none of these programs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from roll.convert.draft import Draft
from roll.convert.recognise import TRL_TRAINERS, Wishes, converted
from roll.convert.rows import count_rows, first_row, fit_columns, fit_completions
from roll.convert.source import Source
from roll.convert.write import experiment_text, notes_text
from roll.errors import ConfigError, Fault
from roll.system.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Print the experiment for the file that the command line names. Return the exit status."""
    words = convert_parser().parse_args(argv)

    def work() -> None:
        wishes = Wishes(words.trainer, words.gpus, words.rows, _variables(words.set))
        draft, source = with_rows(words.file, wishes)
        print(experiment_text(draft, f"{words.file.name} ({source.program})"), end="")
        if notes := notes_text(draft):
            print(notes, file=sys.stderr)

    return run_command(work)


def convert_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.convert",
        description="Translate a configuration of TRL, verl or OpenRLHF into an experiment of roll, which is printed.",
    )
    found.add_argument("file", type=Path, help="a file or Python script of TRL, or a shell script of any of the three")
    found.add_argument("--trainer", choices=TRL_TRAINERS, help="TRL: the trainer, if neither keys nor names tell")
    found.add_argument("--gpus", type=whole_number, help="number of GPUs, where the file does not say it; 0: the CPU")
    found.add_argument("--rows", type=int, help="number of training rows, if the files are not here: gives max_steps")
    found.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable of the script; may be repeated",
    )
    return found


def whole_number(text: str) -> int:
    """Return a whole number of at least 0. Raises ValueError for another text."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def with_rows(path: Path, wishes: Wishes) -> tuple[Draft, Source]:
    """Return the experiment that a file describes, with `max_steps` from the rows of its data if they are here.

    Raises:
        ConfigError: see `converted`.
    """
    draft, source = converted(path, wishes)
    files = draft.at(f"{source.role}.data_args.file_name")
    if wishes.rows is None and (rows := count_rows(files)):
        draft, source = converted(path, replace(wishes, rows=rows))
    row = first_row(files) if source.program == "TRL" else None
    if row and source.in_rlvr:
        fit_columns(draft, row)
    elif row and source.trainer == "sft":
        fit_completions(draft, row, source.role, source.get("completion_only_loss") is False)
    return draft, source


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return the given variables, and those that every shell has. Raises ConfigError for a word without `=`."""
    found = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd()}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise ConfigError(Fault("--set", f"'{word}' is not NAME=VALUE", "write --set NAME=VALUE", "malformed"))
        found[name] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
