"""`python -m roll.data.prepare SET [--source FOLDER] [--output FOLDER]`: writes a public data set as files that the
examples read.

Exit status: 0 done, 2 the set cannot be read or written, 3 failed otherwise, 130 interrupted.

The public data sets of `python -m roll.data.prepare`: their Hub names, and pure functions that convert their rows.

The columns are those that the sets' pages on the Hub list.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.data.json_text import parsed
from roll.errors import DataError, Fault
from roll.system.command import run_command
from roll.system.own_folder import new_folder

BOX = "Reason step by step, and put the final answer within \\boxed{}."
"""Instruction that Qwen2.5 was trained with for mathematics. `math_rule` reads the answer from the box."""
CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator annotations: `48/2 = <<48/2=24>>24`."""
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARK = "####"
"""Mark before the final answer in GSM8K."""


class LeftOut(Exception):
    """A row without anything to learn. The text is the reason, and completes a sentence that begins with "3 rows"."""


class AnotherLayout(Exception):
    """A row that does not have the layout of the set. The text is the fault."""


@dataclass(frozen=True)
class PreparedRow:
    """A line of a prepared file."""

    key: str
    """The question. Of several rows with the same key only one is written."""
    columns: Mapping[str, Any]
    """The row to write."""


@dataclass(frozen=True)
class PublicSet:
    """One data set of the Hub."""

    hub_name: str
    """`owner/name` or `owner/name:config`."""
    train: str
    """Name of the training split. Some of its rows are held out for validation."""
    test: str
    """Name of the test split."""
    convert: Callable[[Mapping[str, Any]], PreparedRow]
    """Converts a row. Raises LeftOut or AnotherLayout."""
    holds: str
    """The resulting columns, and the pipelines that read them."""


def gsm8k(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of GSM8K (arXiv 2110.14168) to a prompt with its reference answer and a worked solution.

    `ground_truth` is the number after `####`, without thousands separators. `response` is the solution without the
    calculator annotations, with the number in a box.

    Raises:
        LeftOut: there is no number after `####`.
        AnotherLayout: `question` or `answer` is not a text.
    """
    question, answer = _text(row, "question").strip(), _text(row, "answer")
    solution, mark, last = answer.rpartition(MARK)
    number = last.strip().removeprefix("$").replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise LeftOut(f"without a number after '{MARK}'")
    steps = CALCULATION.sub("", solution).strip()
    return PreparedRow(
        question,
        {
            "prompt": f"{question}\n{BOX}",
            "response": f"{steps}\nThe final answer is \\boxed{{{number}}}.",
            "ground_truth": number,
            "tag": "math_rule",
        },
    )


def preferences(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a pair of UltraFeedback (arXiv 2310.01377) to the conversation, both responses, and the difference of
    their scores.

    `chosen` and `rejected` must be whole conversations that differ only in the last message; `score_chosen` and
    `score_rejected` must be numbers.

    Raises:
        LeftOut: a response is empty, the responses are the same, or the chosen response does not have the higher score.
        AnotherLayout: the columns are different.
    """
    chosen, rejected = (_messages(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
        raise AnotherLayout("'chosen' and 'rejected' are not conversations that differ only in their last message")
    better, worse = chosen[-1]["content"], rejected[-1]["content"]
    margin = _number(row, "score_chosen") - _number(row, "score_rejected")
    if not better.strip() or not worse.strip():
        raise LeftOut("with an empty response")
    if better == worse:
        raise LeftOut("with the same response twice")
    if margin <= 0:
        raise LeftOut("whose chosen response does not have the higher score")
    return PreparedRow(
        repr(chosen[:-1]), {"messages": chosen[:-1], "chosen": better, "rejected": worse, "margin": margin}
    )


def conversation(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a conversation whose last message is the assistant's.

    Raises:
        LeftOut: the conversation ends with another message, has no question, or has an empty message that is not the
            system message.
        AnotherLayout: `messages` is not a list of messages.
    """
    messages = _messages(row, "messages")
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise LeftOut("that do not end with an answer of the assistant")
    if not all(message["content"].strip() for message in messages if message["role"] != "system"):
        raise LeftOut("with an empty message")
    return PreparedRow(repr(messages[:-1]), {"messages": messages})


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise AnotherLayout(_other_column(row, column, "a text"))
    return value


def _number(row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnotherLayout(_other_column(row, column, "a number"))
    return float(value)


def _messages(row: Mapping[str, Any], column: str) -> list[dict[str, str]]:
    """Return the messages of a column with role and content only."""
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise AnotherLayout(_other_column(row, column, "a list of messages"))
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise AnotherLayout(f"'{column}' holds a message without a text as 'role' and 'content'")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _other_column(row: Mapping[str, Any], column: str, kind: str) -> str:
    if row.get(column) is None:
        return f"there is no column '{column}'; the row has: {', '.join(row) or 'nothing'}"
    return f"'{column}' is not {kind}"


SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k:main",
        "train",
        "test",
        gsm8k,
        "prompt, response, ground_truth, tag: for rlvr, sft, distill and roll.evaluate",
    ),
    "ultrafeedback": PublicSet(
        "HuggingFaceH4/ultrafeedback_binarized",
        "train_prefs",
        "test_prefs",
        preferences,
        "messages, chosen, rejected, margin: for dpo and reward_model",
    ),
    "capybara": PublicSet("trl-lib/Capybara", "train", "test", conversation, "messages: for sft and distill"),
    "ultrachat": PublicSet(
        "HuggingFaceH4/ultrachat_200k", "train_sft", "test_sft", conversation, "messages: for sft and distill"
    ),
}


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
class WrittenRows:
    """Row counts of the written files."""

    rows: Mapping[str, int]
    """Number of rows by file."""
    left_out: Mapping[str, Mapping[str, int]]
    """Number of left-out rows by reason, for each split of the source."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data set given on the command line. Return the exit status."""
    given = prepare_parser().parse_args(argv)
    public = SETS[given.set]
    wish = SetRequest(
        given.set,
        given.source or public.hub_name,
        given.output or Path("data") / given.set,
        given.validation,
        given.seed,
    )
    return run_command(lambda: print(rows_summary(wish, write_set(wish))))


def prepare_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    sets = "\n".join(f"  {name}: {public.hub_name}\n    {public.holds}" for name, public in SETS.items())
    found = argparse.ArgumentParser(
        "python -m roll.data.prepare",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a public data set as train.jsonl, validation.jsonl and test.jsonl.",
        epilog=f"sets:\n{sets}",
    )
    found.add_argument("set", choices=SETS, help="name of the set")
    found.add_argument(
        "--source",
        help="folder with a copy of the set, or another Hub name with its splits and columns (default: the Hub)",
    )
    found.add_argument("--output", type=Path, help="folder to write; it must not exist (default: data/SET)")
    found.add_argument(
        "--validation", type=_count, default=256, help="number of training rows to hold out (default: 256)"
    )
    found.add_argument("--seed", type=int, default=42, help="seed that decides which rows are held out (default: 42)")
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
        tested, test_left_out = _write(folder / TEST, _rows(wish, public, public.test), seen)
        usable, train_left_out = _write(folder / TRAIN, _rows(wish, public, public.train), seen)
        for split, rows, least in ((public.test, tested, 1), (public.train, usable, wish.validation + 1)):
            if rows < least:
                problem = f"{rows} rows of the split '{split}' can be used, but at least {least} are needed"
                raise DataError(
                    Fault(wish.source, problem, "give a larger copy of the set, or a smaller --validation", "too_small")
                )
        _hold_out(folder, frozenset(random.Random(wish.seed).sample(range(usable), wish.validation)))
    rows = {TRAIN: usable - wish.validation, VALIDATION: wish.validation, TEST: tested}
    return WrittenRows(rows, {public.train: train_left_out, public.test: test_left_out})


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


def _rows(wish: SetRequest, public: PublicSet, split: str) -> Iterator[PreparedRow | LeftOut]:
    """Yield, for each row of a split in order, the prepared row or the reason why it is left out.

    Raises:
        DataError: the source cannot be read, or a row does not have the layout of the set.
    """
    from roll.data.sources import find_sources  # Here, so that `--help` does not import datasets.

    try:
        sources = find_sources(wish.source, split)
    except DataError as error:
        remedy = (
            f"give --source a folder with a copy of {public.hub_name}, splits {public.train} and {public.test}; or "
            f"check the network"
        )
        raise DataError(*[Fault(fault.place, fault.problem, remedy, fault.code) for fault in error.faults]) from error
    for source in sources:
        for raw in source.rows():
            place = f"{source.name}:{raw.number}"
            if raw.problem:
                raise DataError(Fault(place, raw.problem, f"give an undamaged copy of {public.hub_name}", "unreadable"))
            try:
                yield public.convert(parsed(raw.text))
            except LeftOut as reason:
                yield reason
            except AnotherLayout as error:
                raise DataError(
                    Fault(
                        place, str(error), f"give a copy of {public.hub_name} with the layout on the Hub", "malformed"
                    )
                ) from error


def _write(file: Path, rows: Iterator[PreparedRow | LeftOut], seen: set[bytes]) -> tuple[int, Counter[str]]:
    """Write the usable rows whose question is not in `seen`, and add their questions to `seen`.

    Return the number of written rows, and the number of rows left out by reason.
    """
    written, left_out = 0, Counter[str]()
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            if isinstance(row, LeftOut):
                left_out[str(row)] += 1
                continue
            key = hashlib.sha256(row.key.encode("utf-8", "surrogatepass")).digest()
            if key in seen:
                left_out[REPEATED] += 1
                continue
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
            problem = f"'{out}' cannot be created: {error}"
            raise DataError(
                Fault("--output", problem, "give a folder in a place that you can write to", "not_writable")
            ) from error
        yield folder


def _count(text: str) -> int:
    """Return the whole number of at least 0 that `text` stands for. Raises ArgumentTypeError for any other text."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")


if __name__ == "__main__":
    sys.exit(main())
