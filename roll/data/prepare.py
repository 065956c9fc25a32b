"""`python -m roll.data.prepare SET [--source FOLDER] [--output FOLDER]`: writes a public data set as files that the
examples read. The set `roll` stands for all files of ROLL's RLVR examples, `roll:DOMAIN` for one of them;
`reasoning_gym:FAMILY` for generated tasks.

Exit status: 0 done, 2 the set cannot be read or written, 3 failed otherwise, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roll.algorithms.methods import declared
from roll.data.generated import PACKAGE, generated, task
from roll.data.json_text import parsed
from roll.data.public_rows import AnotherLayout, LeftOut, PreparedRow
from roll.data.public_sets import SETS, PublicSet
from roll.data.roll_files import ROLL_FILES, RollFile
from roll.errors import DataError, Fault
from roll.registry import imported
from roll.system.command import run_command
from roll.system.own_folder import new_folder, own_folder

if TYPE_CHECKING:
    from roll.data.sources import Source

ROLL = "roll"
"""Name of the set of all files of ROLL's examples."""
ROLL_ROWS, HELD_OUT = 5000, 256
"""Defaults of `--rows`, about the size of ROLL's own files, and of `--validation`."""
GENERATED_TEST = 512
"""Number of generated tasks in the test file."""
DRAWS_A_TASK = 20
"""Largest number of tasks to generate for each that is written. Families repeat their small tasks."""
TRAIN, VALIDATION, TEST = "train.jsonl", "validation.jsonl", "test.jsonl"
REPEATED = "with the question of an earlier row"
"""Reason for leaving rows out. In the summary it follows their number: "3 row(s) with ..."."""


@dataclass(frozen=True)
class SetRequest:
    """The options of the command line."""

    name: str
    """Name of a set in `SETS`."""
    source: str
    """Folder with a copy of the set, or a Hub name."""
    output: Path
    """Folder to write. It must not exist."""
    validation: int
    """Number of rows of the training split to hold out for validation."""
    seed: int
    """Seed that decides which rows are held out."""


@dataclass(frozen=True)
class GeneratedRequest:
    """The options of the command line for generated tasks."""

    family: str
    """Name of a family of reasoning-gym."""
    settings: Mapping[str, Any]
    """Settings of the family, such as the number of digits."""
    source: str | None
    """File or folder with tasks of the family. None: they are generated."""
    output: Path
    """Folder to write. It must not exist."""
    rows: int
    """Number of training rows."""
    validation: int
    """Number of validation rows."""
    seed: int
    """Seed of the tasks."""
    repeats: bool
    """Whether a task may occur again, also in another file."""


@dataclass(frozen=True)
class WrittenRows:
    """Row counts of the written files."""

    rows: Mapping[str, int]
    """Number of rows by file."""
    left_out: Mapping[str, Mapping[str, int]]
    """Number of left-out rows by reason, for each split of the source."""


@dataclass(frozen=True)
class RollRequest:
    """The options of the command line for files of ROLL's examples."""

    domains: tuple[str, ...]
    """Keys of `ROLL_FILES`."""
    source: str | None
    """With one domain a copy of its set; with several the folder that holds a copy of each set. None: the Hub."""
    output: Path
    """Folder to write the files into."""
    rows: int
    """Largest number of rows of a file."""
    seed: int
    """Seed that decides which rows are written if there are more."""


@dataclass(frozen=True)
class WrittenRollFile:
    """Row counts of one written file of ROLL's examples."""

    path: Path
    source: str
    rows: int
    """Number of rows."""
    usable: int
    """Number of rows of the set that could be converted."""
    drawn: int
    """Number of rows that were drawn from these. The reward checks only them."""
    left_out: Mapping[str, int]
    """Number of left-out rows by reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set given on the command line. Return the exit status."""
    given = prepare_parser().parse_args(argv)
    return run_command(lambda: print(_prepared(given)))


def _prepared(given: argparse.Namespace) -> str:
    """Write the files of a command line. Return the summary to print."""
    name, kind = given.set, given.set.partition(":")[0]
    allowed = {
        "--rows": (ROLL, PACKAGE),
        "--settings": (PACKAGE,),
        "--validation": (*SETS, PACKAGE),
        "--repeats": (PACKAGE,),
    }
    chosen = {option: getattr(given, option.removeprefix("--")) for option in allowed}
    for option, value in chosen.items():
        measures = kind in SETS and not SETS[kind].train
        if value is not None and (kind not in allowed[option] or (measures and option == "--validation")):
            problem = f"{value}, but it is no option of the set '{name}'"
            raise DataError(Fault(option, problem, "remove it", "no_effect"))
    rows = ROLL_ROWS if given.rows is None else given.rows
    held_out = HELD_OUT if given.validation is None else given.validation
    if kind == ROLL:
        domains = tuple(ROLL_FILES) if name == ROLL else (name.partition(":")[2],)
        wanted = RollRequest(domains, given.source, given.output or Path("data"), rows, given.seed)
        return "\n".join(line for file in write_roll(wanted) for line in _roll_lines(file, given.seed))
    if kind == PACKAGE:
        family, settings = name.partition(":")[2], dict(given.settings or ())
        out = given.output or Path("data") / family
        tasks = GeneratedRequest(family, settings, given.source, out, rows, held_out, given.seed, bool(given.repeats))
        return "\n".join(f"{out / file}: {count:,} task(s) of {name}" for file, count in write_generated(tasks).items())
    out, source = given.output or Path("data") / name, given.source or SETS[name].hub_name
    wish = SetRequest(name, source, out, held_out, given.seed)
    return rows_summary(wish, write_set(wish))


def prepare_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    sets = [f"  {name}: {public.hub_name}\n    {public.holds}" for name, public in SETS.items()]
    sets.append(f"  {ROLL}: all of the following, files in the format of ROLL, for rlvr")
    sets += [f"  {ROLL}:{name}: {file.hub_name}\n    {file.name}" for name, file in ROLL_FILES.items()]
    sets.append(f"  {PACKAGE}:FAMILY: tasks that the package reasoning-gym generates, such as chain_sum")
    sets.append("    prompt, ground_truth, metadata, tag: for rlvr and roll.evaluate")
    found = argparse.ArgumentParser(
        "python -m roll.data.prepare",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a public data set as train.jsonl, validation.jsonl and test.jsonl; or the files that the "
        "examples\nwith Qwen2.5-7B and 72B read.",
        epilog="sets:\n" + "\n".join(sets),
    )
    found.add_argument("set", type=_known, metavar="SET", help="name of the set, one of the list below")
    found.add_argument(
        "--source",
        help="folder or file with a copy of the set, or another Hub name with its splits and columns; for "
        f"{ROLL} a folder with a copy of each set, named as on the Hub without the owner (default: the Hub)",
    )
    found.add_argument(
        "--output", type=Path, help=f"folder to write; it must not exist (default: data/SET); for {ROLL}: data"
    )
    found.add_argument("--validation", type=_count, help=f"number of training rows to hold out (default: {HELD_OUT})")
    found.add_argument(
        "--rows",
        type=_size,
        help=f"number of training tasks to generate, or largest number of rows of a file of {ROLL} "
        f"(default: {ROLL_ROWS:,})",
    )
    found.add_argument(
        "--settings", type=_setting, nargs="+", metavar="KEY=VALUE", help="settings of the family of generated tasks"
    )
    found.add_argument(
        "--repeats",
        action="store_true",
        default=None,
        help="keep generated tasks that occur again, also in another file (default: no two rows are alike)",
    )
    found.add_argument(
        "--seed", type=int, default=42, help="seed that decides which rows are held out, or drawn (default: 42)"
    )
    return found


def write_set(wish: SetRequest) -> WrittenRows:
    """Write the folder `wish.output` atomically. The same source and seed give the same files.

    Rows of the training split whose question is also in the test split are left out.

    Raises:
        DataError: the source cannot be read or has an unexpected layout, too few rows are left, or the folder exists or
            cannot be created.
    """
    public = SETS[wish.name]
    with _atomic_folder(wish.output) as folder:
        seen: set[bytes] = set()
        tested, left_out = _write_split(wish, public.test, folder / TEST, seen, 1)
        done = WrittenRows({TEST: tested}, {public.test: left_out})
        if public.train:
            usable, left_out = _write_split(wish, public.train, folder / TRAIN, seen, wish.validation + 1)
            _hold_out(folder, frozenset(random.Random(wish.seed).sample(range(usable), wish.validation)))
            rows = {TRAIN: usable - wish.validation, VALIDATION: wish.validation, **done.rows}
            done = WrittenRows(rows, {public.train: left_out, **done.left_out})
    return done


def _write_split(wish: SetRequest, split: str, file: Path, seen: set[bytes], least: int) -> tuple[int, Counter[str]]:
    """Write the rows of a split, as `_write` does. Raises DataError if there are fewer than `least`."""
    rows, left_out = _write(file, _rows(wish, SETS[wish.name], split), seen)
    if rows < least:
        problem = f"{rows} rows of the split '{split}' can be used, but at least {least} are needed"
        remedy = "give a larger copy of the set, or a smaller --validation"
        raise DataError(Fault(wish.source, problem, remedy, "too_small"))
    return rows, left_out


def rows_summary(wish: SetRequest, prepared: WrittenRows) -> str:
    """Return the summary to print: a line for each file, and one for each reason why rows of a split were left out."""
    public = SETS[wish.name]
    origin = {TRAIN: public.train, VALIDATION: f"{public.train}, drawn with seed {wish.seed}", TEST: public.test}
    lines = [
        f"{wish.output / file}: {rows:,} row(s) of {wish.source}, split {origin[file]}"
        for file, rows in prepared.rows.items()
    ]
    for split, reasons in prepared.left_out.items():
        lines += [
            f"left out of the split {split}: {rows:,} row(s) {reason}" for reason, rows in sorted(reasons.items())
        ]
    return "\n".join(lines)


def write_generated(wish: GeneratedRequest) -> dict[str, int]:
    """Write the folder `wish.output` atomically: files of different tasks, or of tasks as they are drawn. Return the
    number of tasks of each. The same settings and seed give the same files.

    Raises:
        DataError: there are too few different tasks, the package is missing or refuses the family or its settings, the
            source cannot be read, or the folder exists or cannot be created.
    """
    sizes = {TEST: GENERATED_TEST, VALIDATION: wish.validation, TRAIN: wish.rows}
    most = DRAWS_A_TASK * sum(sizes.values())

    def convert(row: Mapping[str, Any]) -> PreparedRow:
        return task(row, wish.family)

    if wish.source is None:
        tasks = map(convert, generated(wish.family, wish.settings, wish.seed, most))
    else:
        sources = _found(wish.source, "train", "give --source a file with columns question and answer, a task a line")
        tasks = (row for _, row in _converted(sources, convert, f"{PACKAGE}:{wish.family}"))
    with _atomic_folder(wish.output) as folder:
        seen: set[bytes] | None = None if wish.repeats else set()
        found = 0
        for name, size in sizes.items():
            written = 0
            while written < size:
                block = list(islice(tasks, size - written))
                if not block:
                    total, kind = sum(sizes.values()), "tasks" if wish.repeats else "different tasks"
                    problem = f"{found + written:,} {kind} were found"
                    remedy = f"{total:,} are needed: give a smaller --rows or --validation, or other --settings"
                    raise DataError(Fault(f"{PACKAGE}:{wish.family}", problem, remedy, "too_small"))
                written += _write(folder / name, iter(block), seen)[0]
            found += written
    return {name: sizes[name] for name in (TRAIN, VALIDATION, TEST)}


def write_roll(wish: RollRequest) -> list[WrittenRollFile]:
    """Write files of ROLL's examples into the folder `wish.output`: all of them or none. Each row's `id` is its number
    in the source. The same source and seed give the same files.

    Raises:
        DataError: a source cannot be read or has an unexpected layout or no usable row, or a file exists or cannot be
            created.
    """
    files = [ROLL_FILES[domain] for domain in wish.domains]
    if existing := [wish.output / file.name for file in files if (wish.output / file.name).exists()]:
        remedy = "give --output another folder, or remove the file"
        raise DataError(*[Fault("--output", f"'{path}' exists already", remedy, "already_exists") for path in existing])
    found = _roll_sources(wish, files)
    with ExitStack() as stack:
        try:
            wish.output.mkdir(parents=True, exist_ok=True)
            site = stack.enter_context(own_folder(wish.output))
        except OSError as error:
            raise DataError(_not_writable(wish.output, error)) from error
        done = [_write_roll(wish, site, file, *found[file.name]) for file in files]
        for file in files:
            (site / file.name).rename(wish.output / file.name)
    return done


def _roll_sources(wish: RollRequest, files: Sequence[RollFile]) -> dict[str, tuple[str, list[Source]]]:
    """Return the name and the sources of each file's set, by the file's name. Raises DataError with all that cannot be
    read.
    """
    found: dict[str, tuple[str, list[Source]]] = {}
    faults: list[Fault] = []
    for file in files:
        name = file.hub_name if wish.source is None else wish.source
        if wish.source is not None and len(files) > 1:
            name = str(Path(wish.source) / file.copy_name)
        inside = Path(name) / file.inside
        remedy = f"give --source a copy of {file.hub_name}, with its split {file.split}; or check the network"
        try:
            read = str(inside) if file.inside and inside.is_file() else name
            found[file.name] = (name, _found(read, file.split, remedy))
        except DataError as error:
            faults += error.faults
    if faults:
        raise DataError(*faults)
    return found


def _write_roll(wish: RollRequest, site: Path, file: RollFile, name: str, sources: Sequence[Source]) -> WrittenRollFile:
    """Write one file into the folder `site`. Raises DataError if a row has another layout, or none can be used."""
    rows = (
        row if isinstance(row, LeftOut) else PreparedRow(row.key, {"id": str(number), **row.columns})
        for number, row in _converted(sources, file.convert, file.hub_name)
    )
    whole = site / "whole.jsonl"
    usable, left_out = _write(whole, rows, set())
    if not usable:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it has no rows"
        raise DataError(Fault(name, f"no row can be used: {reasons}", f"give a copy of {file.hub_name}", "too_small"))
    drawn = frozenset(random.Random(wish.seed).sample(range(usable), min(usable, wish.rows)))
    accepted = 0
    with whole.open(encoding="utf-8") as lines, (site / file.name).open("w", encoding="utf-8") as kept:
        for line in (line for number, line in enumerate(lines) if number in drawn):
            if _is_refused(file, json.loads(line)):
                left_out[f"that {file.reward} cannot use"] += 1
                continue
            kept.write(line)
            accepted += 1
    whole.unlink()
    return WrittenRollFile(wish.output / file.name, name, accepted, usable, len(drawn), left_out)


def _is_refused(file: RollFile, row: Mapping[str, Any]) -> bool:
    """Whether the reward of the file's domain would refuse the row before a run."""
    if not file.reward:
        return False
    # By its name, because rewards stand above data in the layers.
    traits: Any = declared(imported(f"roll.rewards.functions.{file.reward}:{file.reward}"))
    try:
        traits.check_row(row)
    except ValueError:
        return True
    return False


def _roll_lines(file: WrittenRollFile, seed: int) -> list[str]:
    drawn = f", {file.drawn:,} drawn from {file.usable:,} with seed {seed}" if file.usable > file.drawn else ""
    left_out = [
        f"left out of {file.source}: {rows:,} row(s) {reason}" for reason, rows in sorted(file.left_out.items())
    ]
    return [f"{file.path}: {file.rows:,} row(s) of {file.source}{drawn}", *left_out]


def _rows(wish: SetRequest, public: PublicSet, split: str) -> Iterator[PreparedRow | LeftOut]:
    """Yield, for each row of a split in order, the prepared row or the reason why it is left out.

    Raises:
        DataError: the source cannot be read, or a row does not have the layout of the set.
    """
    splits = f"splits {public.train} and {public.test}" if public.train else f"split {public.test}"
    remedy = f"give --source a folder with a copy of {public.hub_name}, {splits}; or check the network"
    sources = _found(wish.source, split, remedy)
    return (row for _, row in _converted(sources, public.convert, public.hub_name))


def _found(name: str, split: str, remedy: str) -> list[Source]:
    """Return the sources of a name. Raises DataError with the given remedy if they cannot be read."""
    from roll.data.sources import find_sources  # Here, so that `--help` does not import datasets.

    try:
        return find_sources(name, split)
    except DataError as error:
        raise DataError(*[Fault(fault.place, fault.problem, remedy, fault.code) for fault in error.faults]) from error


def _converted(
    sources: Sequence[Source], convert: Callable[[Mapping[str, Any]], PreparedRow], hub_name: str
) -> Iterator[tuple[int, PreparedRow | LeftOut]]:
    """Yield the number of each row with the converted row, or with the reason why it is left out.

    Raises:
        DataError: a row cannot be read, or does not have the layout of the set.
    """
    for source in sources:
        for raw in source.rows():
            place = f"{source.name}:{raw.number}"
            if raw.problem:
                raise DataError(Fault(place, raw.problem, f"give an undamaged copy of {hub_name}", "unreadable"))
            try:
                yield raw.number, convert(parsed(raw.text))
            except LeftOut as reason:
                yield raw.number, reason
            except AnotherLayout as error:
                remedy = f"give a copy of {hub_name} with the layout on the Hub"
                raise DataError(Fault(place, str(error), remedy, "malformed")) from error


def _write(file: Path, rows: Iterator[PreparedRow | LeftOut], seen: set[bytes] | None) -> tuple[int, Counter[str]]:
    """Write the usable rows whose question is not in `seen`, and add their questions to `seen`; all if `seen` is None.

    Return the number of written rows, and the number of rows left out by reason.
    """
    written, left_out = 0, Counter[str]()
    with file.open("a", encoding="utf-8") as lines:
        for row in rows:
            if isinstance(row, LeftOut):
                left_out[str(row)] += 1
                continue
            key = hashlib.sha256(row.key.encode("utf-8", "surrogatepass")).digest()
            if seen is not None and key in seen:
                left_out[REPEATED] += 1
                continue
            if seen is not None:
                seen.add(key)
            lines.write(json.dumps(row.columns) + "\n")
            written += 1
    return written, left_out


def _hold_out(folder: Path, numbers: frozenset[int]) -> None:
    """Move the lines with these numbers, counted from 0, from the training file to the validation file."""
    whole = (folder / TRAIN).rename(folder / "whole.jsonl")
    train, validation = folder / TRAIN, folder / VALIDATION
    with (
        whole.open(encoding="utf-8") as lines,
        train.open("w", encoding="utf-8") as rest,
        validation.open("w", encoding="utf-8") as drawn,
    ):
        for number, line in enumerate(lines):
            (drawn if number in numbers else rest).write(line)
    whole.unlink()


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end, or is removed after an error. Raises DataError if it cannot."""
    if out.exists():
        raise DataError(
            Fault(
                "--output",
                f"'{out}' exists already",
                "give a folder that does not exist, or remove this one",
                "already_exists",
            )
        )
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(new_folder(out))
            folder.mkdir()
        except OSError as error:
            raise DataError(_not_writable(out, error)) from error
        yield folder


def _not_writable(out: Path, error: OSError) -> Fault:
    problem = f"'{out}' cannot be created: {error}"
    return Fault("--output", problem, "give a folder in a place that you can write to", "not_writable")


def _known(text: str) -> str:
    """Return the name of a set. Raises ArgumentTypeError for any other text."""
    names = [*SETS, ROLL, *(f"{ROLL}:{name}" for name in ROLL_FILES)]
    if text in names or text.startswith(f"{PACKAGE}:"):
        return text
    near = difflib.get_close_matches(text, names, 1)
    raise argparse.ArgumentTypeError(f"'{text}' is no set" + (f"; did you mean '{near[0]}'?" if near else ""))


def _setting(text: str) -> tuple[str, Any]:
    """Return the key and the value, read as YAML, of `KEY=VALUE`. Raises ArgumentTypeError for any other text."""
    key, sign, value = text.partition("=")
    try:
        if sign and key:
            return key, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")


def _count(text: str) -> int:
    """Return the whole number of at least 0 that `text` stands for. Raises ArgumentTypeError for any other text."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")


def _size(text: str) -> int:
    """Return the whole number of at least 1 that `text` stands for. Raises ArgumentTypeError for any other text."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")


if __name__ == "__main__":
    sys.exit(main())
