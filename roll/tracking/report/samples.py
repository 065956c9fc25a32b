"""Selects the recorded responses that fit onto the page of a run, spread evenly over the steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.tracking.jsonl import SAMPLES_FILE, VALIDATION_SAMPLES_FILE, places, read_places
from roll.tracking.report.records import Row, number_text

BUDGET = 2_000_000
"""Largest number of characters of prompts and responses that a page takes from each file."""
LONGEST = 12_000
"""Largest number of characters of one text. Only the beginning and the end of a longer text are shown."""


@dataclass(frozen=True)
class Kept:
    """Facts about one line of a file, which is one group."""

    begin: int
    """Byte offset of the line."""
    step: int
    characters: int
    """Number of characters that the group takes on the page."""
    responses: int
    """Number of responses of the group."""
    set: str = ""
    """Name of the held-out set; empty for training."""
    responses_of_step: int | None = None
    """Number of responses in the whole step and set; None in files of earlier versions."""


@dataclass(frozen=True)
class PageSamples:
    """The part of a file that goes onto a page."""

    groups: Sequence[Mapping[str, Any]]
    """Records for the page's script, one for each prompt."""
    shown: int
    """Number of responses in `groups`."""
    kept: int
    """Number of responses in the file."""
    sampled: int | None
    """Number of responses that the run sampled in the steps of the file; None if the file does not contain this number.
    """
    unreadable: int
    """Number of unreadable lines of the file."""


def page_samples(folder: Path) -> tuple[PageSamples, PageSamples]:
    """Return the samples of training and of validation."""
    return _read(folder / SAMPLES_FILE), _read(folder / VALIDATION_SAMPLES_FILE)


def _read(path: Path, budget: int = BUDGET) -> PageSamples:
    lines: list[Kept] = []
    unreadable = 0
    for begin, record in places(path) if path.is_file() else ():
        if record is None:
            unreadable += 1
        else:
            lines.append(_kept(begin, record))
    chosen = choose_samples(lines, budget)
    records = read_places(path, [line.begin for line in chosen]) if chosen else []
    return PageSamples(
        groups=[page_group(record) for record in records],
        shown=sum(line.responses for line in chosen),
        kept=sum(line.responses for line in lines),
        sampled=count_sampled(lines),
        unreadable=unreadable,
    )


def _kept(begin: int, record: Row) -> Kept:
    group = page_group(record)
    texts = [group["prompt"], *(response["text"] for response in group["responses"])]
    texts += [turn["text"] for response in group["responses"] for turn in response["turns"]]
    characters = sum(map(len, texts))
    return Kept(
        begin,
        record["step"],
        characters,
        len(record["responses"]),
        record.get("set", ""),
        record.get("responses_of_step"),
    )


def count_sampled(lines: Iterable[Kept]) -> int | None:
    """Return the number of responses sampled in all steps and sets of the lines; None if it is unknown for one of
    them.
    """
    of_step = {(line.step, line.set): line.responses_of_step for line in lines}
    counts = [count for count in of_step.values() if count is not None]
    return sum(counts) if len(counts) == len(of_step) else None


def choose_samples(lines: Sequence[Kept], budget: int) -> list[Kept]:
    """Return the lines for a page, in the order of the file. All lines of a step are chosen, or none.

    Steps are chosen in the order of `halving` until the next one does not fit: the first and the last step, then steps
    between them. If even the first step does not fit, only its first line is chosen.

    Args:
        budget: largest number of characters.
    """
    by_step: dict[int, list[Kept]] = {}
    for line in lines:
        by_step.setdefault(line.step, []).append(line)
    steps = sorted(by_step)
    chosen: list[Kept] = []
    for place in halving(len(steps)):
        of_step = by_step[steps[place]]
        needed = sum(line.characters for line in of_step)
        if needed > budget:
            chosen = chosen or of_step[:1]
            break
        chosen += of_step
        budget -= needed
    return sorted(chosen, key=lambda line: line.begin)


def halving(count: int) -> Iterator[int]:
    """Yield 0 to count - 1: the two ends, then the middle, then the middles of the halves, and so on.

    The values yielded so far are always spread about evenly.
    """
    if count:
        yield 0
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)]
    while gaps:
        halves: list[tuple[int, int]] = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield middle
                halves += [(low, middle), (middle, high)]
        gaps = halves


def page_group(record: Row) -> dict[str, Any]:
    """Return the record of a group for the page's script."""
    return {
        "set": record.get("set", ""),
        "step": record["step"],
        "domain": record["domain"],
        "id": record["prompt_id"],
        "prompt": shortened(record["prompt"]),
        "tokens": record["prompt_length"],
        "answer": record.get("ground_truth"),
        "responses": [_response(response) for response in record["responses"]],
    }


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    turns = _turns(response.get("trajectories", []))
    parts = [f"{name} {number_text(value)}" for name, value in response["parts"].items() if value is not None]
    return {
        "reward": response["reward"],
        "tokens": response["length"],
        "flags": _flags(response),
        "text": "" if turns else shortened(response["text"]),
        "turns": turns,
        "note": " · ".join([*parts, *([response["note"]] if response["note"] else [])]),
    }


def _flags(response: Mapping[str, Any]) -> list[str]:
    flags = [response["outcome"].replace("_", " ")] if response["outcome"] != "scored" else []
    known = {"stop": [], "length": ["truncated"], "abort": ["aborted"]}
    return flags + known.get(response["finish_reason"], [response["finish_reason"].replace("_", " ")])


def _turns(trajectories: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the segments of an episode, except the first, which is the prompt."""
    turns = []
    for count, trajectory in enumerate(trajectories, 1):
        for segment in trajectory["segments"]:
            caption = [f"trajectory {count}"] * (len(trajectories) > 1) + [segment["role"]]
            caption += [f"{segment['length']} tokens"]
            caption += [f"calls {', '.join(call['name'] for call in segment['calls'])}"] if segment.get("calls") else []
            caption += [f"reward {number_text(segment['reward'])}"] if segment.get("reward") is not None else []
            turns.append({"role": segment["role"], "caption": " · ".join(caption), "text": shortened(segment["text"])})
    return turns[1:]


def shortened(text: str) -> str:
    """Return the text, or if it is longer than `LONGEST` its beginning and end with the number of omitted
    characters.
    """
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
