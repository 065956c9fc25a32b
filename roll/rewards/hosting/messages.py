"""Messages between a reward process and its parent, each preceded by its length.

The parent sends pickles. The child runs the user's code and is not trusted, so it sends JSON, which the parent decodes
to plain values and checks one by one: nothing that is written to the socket can run in the parent. Each call has a
seal, a number that cannot be guessed. A verdict is accepted only once, and only with the seal of a call that has begun.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from roll.errors import Fault
from roll.hosted.frames import Garbled, framed, garbled_text
from roll.hosted.raised import TRACE_CHARACTERS
from roll.rewards.parts import RewardPart
from roll.rewards.verdicts import MOST_NOTE, MOST_PART_NAME, MOST_PARTS
from roll.types import FP32_MAX, Prompt, RewardOutcome, RewardResult, TurnReward

OUTCOMES = {outcome.value: outcome for outcome in RewardOutcome}
_scanned: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
_quoted = json.encoder.encode_basestring_ascii
Entry = tuple[int, int, Prompt, Sequence[str], Sequence[int]]
"""Number of the first call, index of the part, prompt, responses, and the seals of the calls."""


@dataclass(frozen=True)
class RewardAssignment:
    """The first message to a child: the rewards that it computes, and its limits."""

    domain: str
    parts: tuple[RewardPart, ...]
    concurrency: int
    timeout: float
    """Deadline of each call in seconds. The parent enforces it for all calls, and the child too for asynchronous ones.
    """
    memory_bytes: int
    """Largest number of bytes that the process may allocate."""
    checks_rows: bool = False
    """Whether calls check rows (`row_check`) instead of computing rewards."""


@dataclass(frozen=True)
class PartTraits:
    """Traits of the reward function of a part, as far as the parent needs them."""

    needs_service: bool
    """See `RewardTraits`."""
    checks_rows: bool
    """Whether the function declares a `check_row`."""
    passes_at: float | None = 1.0
    """See `RewardTraits`."""
    passes_by: str = ""
    """See `RewardTraits`."""


@dataclass(frozen=True)
class RewardsReady:
    """A child's first message, before any call."""

    faults: tuple[Fault, ...]
    """Faults of the configuration. If there are any, the process ends."""
    traits: tuple[PartTraits, ...] = ()
    """Traits of the reward function of each part."""
    ends_calls: bool = False
    """Whether the child itself ends calls that exceed the deadline, as long as its event loop is not blocked."""


class RewardOutcomeMessage(NamedTuple):
    """The outcome of a call. The results are not yet decoded."""

    number: int
    """Number of the call."""
    seal: int
    results: list[Any]
    """Encoded results; `results_of` decodes them."""
    replaced: str
    """Name of a function, class or module that was replaced during the call; the child then ends. Empty if none was."""


def rewards_ready_message(ready: RewardsReady) -> bytes:
    """Encode `Ready` as the child sends it."""
    faults = [[fault.place, fault.problem, fault.remedy] for fault in ready.faults]
    traits = [[trait.needs_service, trait.checks_rows, trait.passes_at, trait.passes_by] for trait in ready.traits]
    return framed(json.dumps([faults, traits, ready.ends_calls]).encode())


def answer_message(number: int, seal: int, results: Sequence[RewardResult], replaced: str) -> bytes:
    """Encode an answer as the child sends it. Not with `json.dumps`, which takes twice as long: there is an answer for
    each response.
    """
    said = ",".join(map(_encoded_result, results))
    return framed(f"[{number},{seal},[{said}],{_quoted(replaced)}]".encode())


def _encoded_result(result: RewardResult) -> str:
    parts = ",".join(f"{_quoted(name)}:{part!r}" for name, part in result.parts.items()) if result.parts else ""
    turns = ",".join(f"[{turn.end},{turn.value!r}]" for turn in result.turns) if result.turns else ""
    score = "null" if result.score is None else repr(result.score)
    said = f'{result.value!r},"{result.outcome.value}",{{{parts}}},{_quoted(result.note)},[{turns}],{score}'
    return f"[{said},{_quoted(result.trace)}]" if result.trace else f"[{said}]"


def read_rewards_ready(body: bytes, parts: int) -> RewardsReady:
    """Decode the `Ready` of a child that computes this number of parts. Raises Garbled if it is malformed."""
    try:
        faults, traits, ends_calls = json.loads(body)
        ready = RewardsReady(
            tuple(Fault(*map(_text, fault)) for fault in faults),
            tuple(_traits(*one) for one in traits),
            _flag(ends_calls),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled(garbled_text(body)) from error
    if not ready.faults and len(ready.traits) != parts:
        raise Garbled(garbled_text(body))
    return ready


def read_answer(body: bytes) -> RewardOutcomeMessage:
    """Decode an answer, except its results. Raises Garbled if it is malformed."""
    try:
        text = body.decode()
        (number, seal, results, replaced), end = _scanned(text, 0)
    except (ValueError, TypeError, RecursionError, StopIteration) as error:
        raise Garbled(garbled_text(body)) from error
    if (
        end == len(text)
        and type(number) is int
        and type(seal) is int
        and type(results) is list
        and type(replaced) is str
    ):
        return RewardOutcomeMessage(number, seal, results, replaced[:MOST_NOTE])
    raise Garbled(garbled_text(body))


def results_of(said: list[Any], responses: Sequence[str]) -> list[RewardResult]:
    """Decode the results in an answer, one for each response. Raises Garbled if they are malformed."""
    try:
        return [_result(len(response), *one) for one, response in zip(said, responses, strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Garbled(f"a verdict is malformed: {error}") from error


def _result(
    characters: int, value: Any, outcome: Any, parts: Any, note: Any, turns: Any, score: Any = None, trace: Any = ""
) -> RewardResult:
    if type(parts) is not dict or len(parts) > MOST_PARTS or any(len(name) > MOST_PART_NAME for name in parts):
        raise ValueError("parts")
    if type(note) is not str or len(note) > MOST_NOTE:
        raise ValueError("note")
    if type(trace) is not str or len(trace) > TRACE_CHARACTERS:
        raise ValueError("trace")
    named = {name: _number(part) for name, part in parts.items()} if parts else {}
    graded = None if score is None else _number(score)
    return RewardResult(
        _number(value), OUTCOMES[outcome], named, note, _turns(turns, characters) if turns else (), graded, trace
    )


def _turns(turns: Any, characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(TurnReward(end, _number(value)) for end, value in turns)
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(type(end) is not int for end in ends) or any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError("turns")
    return checked


def _number(value: Any) -> float:
    if (type(value) is float or type(value) is int) and -FP32_MAX <= value <= FP32_MAX:  # false for nan
        return float(value)
    raise ValueError("number")


def _traits(needs_service: Any, checks_rows: Any, passes_at: Any, passes_by: Any) -> PartTraits:
    bar = None if passes_at is None else _number(passes_at)
    return PartTraits(_flag(needs_service), _flag(checks_rows), bar, _text(passes_by))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("text")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("flag")
    return value
