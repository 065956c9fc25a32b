"""Plans the text files of a ROLL checkout as they are, with `dry_run=true`, in this process; or those about pictures.

    python benchmarks/roll_files.py FOLDER [--pictures] [--at-least 50] [--faults]

FOLDER is a checkout of ROLL v0.2.1. Printed for each file: its status (0 planned, 2 refused), the number of warnings
and the first fault; with `--faults` all of them. `--pictures` plans the files for images, video and diffusion models
instead of the others. The status is 1 if fewer files than `--at-least` are planned.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.errors import ConfigError, DataError, Fault
from roll.pipeline import jobs_of

PICTURES = ("-vl-", "_vl_", "omni", "deepeyes", "wan2.2", "reward_fl", "qwen3.5-")
"""Parts of the paths of files for images, video and diffusion models."""
PRESETS = "config"


@dataclass(frozen=True)
class Outcome:
    """What came of one file."""

    name: str
    warnings: int
    faults: Sequence[Fault]

    @property
    def status(self) -> int:
        """Return the exit status of a dry run."""
        return 2 if self.faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Plan the files, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args(argv)
    outcomes = list(planned(options.folder.resolve() / "examples", options.pictures))
    for one in outcomes:
        shown = one.faults if options.faults else one.faults[:1]
        said = [f"{fault.place}: {fault.problem} -> {fault.remedy}" for fault in shown]
        print(f"{one.name:<68} {one.status} {one.warnings:>3}  {f'{chr(10):<76}'.join(said)}")
    count = sum(one.status == 0 for one in outcomes)
    print(f"{count} of {len(outcomes)} files are planned")
    return int(count < options.at_least)


def experiments(examples: Path, pictures: bool) -> list[Path]:
    """Return the experiments below a folder of examples that are about text, or the others, without the presets."""
    files = (file for file in sorted(examples.glob("*/*.yaml")) if file.parent.name != PRESETS)
    return [file for file in files if pictures == any(part in f"{file.parent.name}/{file.name}" for part in PICTURES)]


def planned(examples: Path, pictures: bool) -> Iterator[Outcome]:
    """Yield the outcome of each file. An empty folder is the working directory, so that no module of ROLL is found."""
    with tempfile.TemporaryDirectory(prefix="roll-files-") as folder, contextlib.chdir(folder):
        for file in experiments(examples, pictures):
            yield outcome(file, file.relative_to(examples).as_posix())


def outcome(file: Path, name: str) -> Outcome:
    """Return what comes of a dry run of one file."""
    faults: Sequence[Fault] = ()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            jobs_of(["--config-path", str(file.parent), "--config-name", file.stem, "dry_run=true"])
        except (ConfigError, DataError) as error:
            faults = error.faults
    return Outcome(name, sum(line.startswith("warning: ") for line in said.getvalue().splitlines()), faults)


if __name__ == "__main__":
    sys.exit(main())
