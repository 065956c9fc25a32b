"""A process that computes rewards: `python -m roll.rewards.child DESCRIPTOR PARENT`. Started, watched and ended by process.py.

    process.py                                  child
      ── (domain, reward, reward_args) ───────▶  imports what it needs
      ◀───────────────────── faults, or none ──
      ── [(prompt, responses), ...] ──────────▶
      ◀────────── fields ── fields ── ... ──────  of a RewardResult, for each response as soon as it is known

Each message is a pickle behind its length, of plain values where there are many. The socket is a descriptor of its own: what rewards print
stays out of it.
"""

from __future__ import annotations

import math
import operator
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from roll.errors import ConfigError
from roll.rewards.base import RewardFunction, reward_that_takes
from roll.system.orphans import adopt_orphans, die_with
from roll.types import Prompt, RewardOutcome, RewardResult, TurnReward

HEADER = struct.Struct(">Q")
NOTE_CHARACTERS = 300
OUTCOMES = {outcome.value: outcome for outcome in RewardOutcome}
Fields = tuple[float, str, Mapping[str, float], str, tuple[tuple[int, float], ...]]
"""Value, outcome, parts, note and turns."""


def encoded(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def score(reward: RewardFunction, prompt: Prompt, response: str, reward_args: Mapping[str, Any]) -> RewardResult:
    """The reward of one response. Whatever the function raises or returns in place of a result is CRASHED, with a note."""
    try:
        result = reward(prompt, response, prompt.row, **reward_args)
    except BaseException as error:  # A reward that calls sys.exit() must not end the process either.
        lines = traceback.format_exception_only(error)  # a SyntaxError's place, indented, comes before it, and notes come after it
        return _crashed(next(line for line in lines if not line.startswith(" ")).strip())
    if not isinstance(result, RewardResult):
        return _crashed(f"returned a {type(result).__name__}, not a RewardResult: {result!r}")
    try:
        return RewardResult(
            value=_finite("value", result.value),
            outcome=RewardOutcome(result.outcome),
            parts={str(name): _finite(f"part '{name}'", part) for name, part in result.parts.items()},
            note=str(result.note),
            turns=_turns(result.turns, len(response)) if result.outcome == RewardOutcome.SCORED else (),
        )
    except (TypeError, ValueError, AttributeError) as error:
        return _crashed(f"returned a malformed RewardResult: {error}")


def main(descriptor: int, parent: int) -> None:
    """Serves the process at the other end of the socket until that closes it."""
    die_with(parent)
    adopt_orphans()
    own = os.getpid()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        with connection.makefile("rb") as incoming:
            domain, name, reward_args = _receive(incoming)
            try:
                reward = reward_that_takes(reward_args, name, domain)
            except ConfigError as error:
                connection.sendall(encoded(error.faults))
                return
            connection.sendall(encoded(()))
            while (request := _receive(incoming)) is not None:
                for prompt, responses in request:
                    # What a reward does to the row or its arguments, the next response does not see.
                    asked = pickle.dumps((prompt.row, reward_args), pickle.HIGHEST_PROTOCOL)
                    for response in responses:
                        row, own_args = pickle.loads(asked)
                        result = score(reward, replace(prompt, row=row), response, own_args)
                        if os.getpid() != own:  # a process that the reward forked came back from it
                            os._exit(0)
                        connection.sendall(encoded(fields(result)))


def _receive(incoming: Any) -> Any:
    """The next message, or None once the other end is closed."""
    header = incoming.read(HEADER.size)
    return pickle.loads(incoming.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


def fields(result: RewardResult) -> Fields:
    """A result as it travels: a pickle of plain values is made and read several times faster."""
    return result.value, result.outcome.value, result.parts, result.note, tuple((turn.end, turn.value) for turn in result.turns)


def result_of(said: Fields) -> RewardResult:
    """The result of these fields."""
    value, outcome, parts, note, turns = said
    return RewardResult(value, OUTCOMES[outcome], parts, note, tuple(TurnReward(*turn) for turn in turns))


def _finite(name: str, number: Any) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"its {name} is {value}")
    return value


def _turns(turns: Sequence[TurnReward], characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(TurnReward(operator.index(turn.end), _finite("reward of a turn", turn.value)) for turn in turns)
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError(f"its turns end at {', '.join(map(str, ends[1:-1]))} of {characters} characters, which do not rise within them")
    return checked


def _crashed(note: str) -> RewardResult:
    return RewardResult(0.0, RewardOutcome.CRASHED, note=note[:NOTE_CHARACTERS])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
