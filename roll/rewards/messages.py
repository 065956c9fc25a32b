"""Messages between a process of rewards and its parent, each preceded by its length.

The parent sends pickles. The child runs code of the user's, so what it says is JSON, which is read as plain values, bounded and checked one
by one: nothing that is written to its socket runs in the parent. Each call has a seal, a number that cannot be guessed. A verdict counts
once, and only with the seal of a call that has begun.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from roll.errors import Fault
from roll.rewards.base import RewardTraits
from roll.rewards.parts import RewardPart
from roll.rewards.verdicts import MOST_NOTE, MOST_PART_NAME, MOST_PARTS
from roll.system.frames import Garbled, framed, shown
from roll.types import FP32_MAX, Prompt, RewardOutcome, RewardResult, TurnReward

OUTCOMES = {outcome.value: outcome for outcome in RewardOutcome}
_scanned: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
_quoted = json.encoder.encode_basestring_ascii
Entry = tuple[int, int, Prompt, Sequence[str], Sequence[int]]
"""Number of the first call, number of the part, data to score, and the seals of the calls."""


@dataclass(frozen=True)
class Assignment:
    """The work of a child."""

    domain: str
    parts: tuple[RewardPart, ...]
    concurrency: int
    timeout: float
    """Deadline in seconds of each call. The child enforces it for asynchronous calls, the parent for all."""
    memory_bytes: int
    """Bytes that a process may allocate."""


@dataclass(frozen=True)
class Ready:
    """A child's first message, before any call."""

    faults: tuple[Fault, ...]
    """Faults. If there are any, the process ends."""
    traits: tuple[RewardTraits, ...] = ()
    """Traits of each part."""
    ends_calls: bool = False
    """Whether it ends late calls itself, as long as its event loop runs."""


class Answer(NamedTuple):
    """The outcome of a call, with values as the child sent them."""

    number: int
    """Number of the call."""
    seal: int
    results: list[Any]
    """See `results_of`."""
    replaced: str
    """The function, class or module that was replaced during the call, if any. The child then ends."""


def ready_message(ready: Ready) -> bytes:
    """Encode `Ready` as the child sends it."""
    faults = [[fault.place, fault.problem, fault.remedy] for fault in ready.faults]
    return framed(json.dumps([faults, [trait.needs_service for trait in ready.traits], ready.ends_calls]).encode())


def answer_message(number: int, seal: int, results: Sequence[RewardResult], replaced: str) -> bytes:
    """Encode an answer as the child sends it. There is one for each response, and `json.dumps` would take twice as long."""
    said = ",".join(map(_said, results))
    return framed(f"[{number},{seal},[{said}],{_quoted(replaced)}]".encode())


def _said(result: RewardResult) -> str:
    parts = ",".join(f"{_quoted(name)}:{part!r}" for name, part in result.parts.items()) if result.parts else ""
    turns = ",".join(f"[{turn.end},{turn.value!r}]" for turn in result.turns) if result.turns else ""
    return f'[{result.value!r},"{result.outcome.value}",{{{parts}}},{_quoted(result.note)},[{turns}]]'


def read_ready(body: bytes, parts: int) -> Ready:
    """Decode `Ready` of a child with so many parts. Raises Garbled."""
    try:
        faults, needs_service, ends_calls = json.loads(body)
        ready = Ready(
            tuple(Fault(*map(_text, fault)) for fault in faults),
            tuple(RewardTraits(needs_service=_flag(needs)) for needs in needs_service),
            _flag(ends_calls),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled(shown(body)) from error
    if not ready.faults and len(ready.traits) != parts:
        raise Garbled(shown(body))
    return ready


def read_answer(body: bytes) -> Answer:
    """Decode an answer without its results. Raises Garbled."""
    try:
        text = body.decode()
        (number, seal, results, replaced), end = _scanned(text, 0)
    except (ValueError, TypeError, RecursionError, StopIteration) as error:
        raise Garbled(shown(body)) from error
    if end == len(text) and type(number) is int and type(seal) is int and type(results) is list and type(replaced) is str:
        return Answer(number, seal, results, replaced[:MOST_NOTE])
    raise Garbled(shown(body))


def results_of(said: list[Any], responses: Sequence[str]) -> list[RewardResult]:
    """Decode the results in an answer, one for each response. Raises Garbled."""
    try:
        return [_result(len(response), *one) for one, response in zip(said, responses, strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Garbled(f"a verdict is malformed: {error}") from error


def _result(characters: int, value: Any, outcome: Any, parts: Any, note: Any, turns: Any) -> RewardResult:
    if type(parts) is not dict or len(parts) > MOST_PARTS or any(len(name) > MOST_PART_NAME for name in parts):
        raise ValueError("parts")
    if type(note) is not str or len(note) > MOST_NOTE:
        raise ValueError("note")
    named = {name: _number(part) for name, part in parts.items()} if parts else {}
    return RewardResult(_number(value), OUTCOMES[outcome], named, note, _turns(turns, characters) if turns else ())


def _turns(turns: Any, characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(TurnReward(end, _number(value)) for end, value in turns)
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(type(end) is not int for end in ends) or any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError("turns")
    return checked


def _number(value: Any) -> float:
    if (type(value) is float or type(value) is int) and -FP32_MAX <= value <= FP32_MAX:  # nan is not
        return float(value)
    raise ValueError("number")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("text")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("flag")
    return value
