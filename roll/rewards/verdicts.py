"""The results of reward functions: what a child makes of a returned value or an exception, and how it sends that.

The child runs the user's code and is not trusted. So the parent checks the sent values again, one by one.

The parts of a domain's reward, and their weighted sum. Pure functions.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from json.encoder import encode_basestring_ascii as _quoted
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.algorithms.moments import standardise
from roll.hosted.protocol import Assignment, Garbled, Reply, flag_in, framed, text_in
from roll.hosted.raised import NOTE_CHARACTERS, TRACE_CHARACTERS, raised_where, trace_of
from roll.types import FP32_MAX, NO_VERDICT, Prompt, RewardOutcome, RewardResult, TurnReward

if TYPE_CHECKING:
    from roll.config.schema.roles import RewardConfig


@dataclass(frozen=True)
class RewardPart:
    """One reward function of a domain, with its arguments and weight."""

    place: str
    """Key path of its block in the configuration."""
    name: str
    """Name of the part; empty if the domain has a single reward instead of parts."""
    reward: str
    """Name of the reward function."""
    reward_args: Mapping[str, Any]
    group: bool
    """Whether the function is called once for all responses to a prompt."""
    weight: float
    failed_value: float
    """Value of a result whose outcome is not SCORED."""


def parts_of(domain: str, section: RewardConfig) -> tuple[RewardPart, ...]:
    """Return the parts of a domain's reward. A domain without `parts` has exactly one."""
    place = f"rewards.{domain}"
    if not section.parts:
        return (
            RewardPart(
                place, "", section.reward or domain, section.reward_args, section.group, 1.0, section.failed_value
            ),
        )
    return tuple(
        RewardPart(
            f"{place}.parts.{name}",
            name,
            part.reward or name,
            part.reward_args,
            part.group,
            part.weight,
            part.failed_value,
        )
        for name, part in section.parts.items()
    )


def summed(parts: Sequence[RewardPart], results: Sequence[Sequence[RewardResult]]) -> list[RewardResult]:
    """Return one result for each response: the sum of weight times value over the parts, or the result of the single
    reward.

    If a part has no verdict, the sum has none either, and `RewardResult.failures` has that part's result. A sum that
    overflows fp32 is CRASHED. An UNPARSABLE part counts with its `failed_value`, and the sum is then UNPARSABLE.
    `RewardResult.parts` has the value of each part under the part's name, and the part's own parts as `name/part`. The
    sum has a turn end wherever a part has one. The result of a single reward has the value `failed_value` if its
    outcome is not SCORED.

    Args:
        results: results of each part, [parts][responses].
    """
    if parts[0].name:
        return [_sum(parts, of_one) for of_one in zip(*results, strict=True)]
    failed = parts[0].failed_value
    return [
        result if result.outcome is RewardOutcome.SCORED else replace(result, value=failed) for result in results[0]
    ]


def _sum(parts: Sequence[RewardPart], results: Sequence[RewardResult]) -> RewardResult:
    outcomes = [result.outcome for result in results]
    worst = next((outcome for outcome in outcomes if outcome in NO_VERDICT), None)
    outcome = worst or (RewardOutcome.UNPARSABLE if RewardOutcome.UNPARSABLE in outcomes else RewardOutcome.SCORED)
    values: dict[str, float] = {}
    turns: dict[int, float] = defaultdict(float)
    for part, result in zip(parts, results, strict=True):
        values[part.name] = result.value if result.outcome is RewardOutcome.SCORED else part.failed_value
        values |= {f"{part.name}/{name}": value for name, value in result.parts.items()}
        for turn in result.turns:
            turns[turn.end] += part.weight * turn.value
    value = sum(part.weight * values[part.name] for part in parts)
    if worst is None and not all(
        abs(number) <= FP32_MAX for number in (value, *turns.values())
    ):  # also true if a number is nan
        return RewardResult(
            0.0,
            RewardOutcome.CRASHED,
            values,
            f"the weighted sum of the parts ({value}) or of their turns is too large for fp32",
        )
    return RewardResult(
        value=value,
        outcome=outcome,
        parts=values,
        note="; ".join(
            f"{part.name}: {result.note}" for part, result in zip(parts, results, strict=True) if result.note
        ),
        turns=tuple(TurnReward(*turn) for turn in sorted(turns.items())) if worst is None else (),
        score=_score(parts, results),
        failures={
            part.name: result for part, result in zip(parts, results, strict=True) if result.outcome in NO_VERDICT
        },
    )


def _score(parts: Sequence[RewardPart], results: Sequence[RewardResult]) -> float | None:
    """Return the weighted sum of the parts' scores; None if no part has a score apart from its value."""
    if all(result.score is None for result in results):
        return None
    is_scored = [result.outcome is RewardOutcome.SCORED for result in results]
    graded = [
        result.graded if scored else part.failed_value
        for part, result, scored in zip(parts, results, is_scored, strict=True)
    ]
    return sum(part.weight * value for part, value in zip(parts, graded, strict=True))


def normalised(weights: Mapping[str, float], results: Sequence[RewardResult]) -> list[RewardResult]:
    """Return a group's results with each value replaced by the sum over the parts of weight times (value - mean) / (std
    + 1e-6).

    The mean and the standard deviation (n - 1) of a part are taken over the responses of the group that have a verdict.
    Results without a verdict are not changed. A part whose values are all equal adds 0. `RewardResult.parts` keeps the
    original values. The results have no `score` of their own: filters see the normalised rewards.

    Source: GDPO, arXiv 2601.05242, eq. 4 and 5: the first of its two steps. The second is `whiten_advantages: true`
    with an estimator that does not divide by a group's standard deviation again: `dr_grpo` or `reinforce`, not `grpo`.

    Args:
        weights: weight of each part, by name. The `parts` of every result has a value for each of these names.
    """
    judged = [index for index, result in enumerate(results) if result.outcome not in NO_VERDICT]
    one_group, sums = np.zeros(len(judged), np.int32), np.zeros(len(judged))
    for name, weight in weights.items():
        values = np.array([results[index].parts[name] for index in judged])
        if len(set(values.tolist())) > 1:
            sums += weight * standardise(values, one_group, "group", "group")
    out = list(results)
    for index, value in zip(judged, sums.tolist(), strict=True):
        out[index] = replace(results[index], value=value, score=None)
    return out


MOST_NOTE = 2000
"""Largest number of characters in a result's note. A longer note is truncated."""
MOST_PARTS, MOST_PART_NAME = 64, 100
"""Most parts of a result, and most characters of a part's name. A result above either is CRASHED."""
OUTCOMES = {outcome.value: outcome for outcome in RewardOutcome}
Entry = tuple[int, int, Prompt, Sequence[str], Sequence[int]]
"""Number of the first call, index of the part, prompt, responses, and the seals of the calls."""


def checked_result(returned: Any, response: str) -> RewardResult:
    """Return the result of one response: CRASHED unless the function returned a `RewardResult` or a number."""
    if isinstance(returned, RewardResult):
        return _bounded(returned, len(response))
    if not isinstance(returned, Real | np.bool_):
        return crashed(f"returned a {type(returned).__name__}, not a RewardResult or a number: {_excerpt(returned)}")
    try:
        return RewardResult(_number("returned", returned))
    except Exception as error:  # a number of a user-defined class may raise anything
        return crashed(str(error))


def verdicts(returned: Any, responses: Sequence[str]) -> list[RewardResult]:
    """Return the results of a group.

    The function must have returned a sequence with one `RewardResult` or number for each response. Otherwise all
    results, or the results in place of invalid elements, are CRASHED.
    """
    try:
        several = list(returned)
    except TypeError:
        problem = (
            f"returned a {type(returned).__name__}, "
            f"not a sequence with a result for each response: {_excerpt(returned)}"
        )
        return [crashed(problem)] * len(responses)
    if len(several) != len(responses):
        return [crashed(f"returned {len(several)} results for {len(responses)} responses")] * len(responses)
    return [checked_result(one, response) for one, response in zip(several, responses, strict=True)]


def raised(error: BaseException, caller: str) -> RewardResult:
    """Return a CRASHED result with the exception and its place in user code. `caller` called the function."""
    return crashed(raised_where(error, caller), trace_of(error, caller))


def crashed(note: str, trace: str = "") -> RewardResult:
    """Return the result of a call that failed."""
    return RewardResult(0.0, RewardOutcome.CRASHED, note=note[:NOTE_CHARACTERS], trace=trace)


def timed_out(seconds: float) -> RewardResult:
    """Return the result of a call that exceeded its deadline."""
    return RewardResult(0.0, RewardOutcome.TIMED_OUT, note=f"no verdict after {seconds:g} s")


def _bounded(result: RewardResult, characters: int) -> RewardResult:
    try:
        if len(result.parts) > MOST_PARTS or any(len(str(name)) > MOST_PART_NAME for name in result.parts):
            allowed = f"at most {MOST_PARTS} are allowed, with names of at most {MOST_PART_NAME} characters"
            raise ValueError(f"it has {len(result.parts)} parts; {allowed}")
        return RewardResult(
            value=_number("its value is", result.value),
            outcome=RewardOutcome(result.outcome),
            parts={str(name): _number(f"its part '{name}' is", part) for name, part in result.parts.items()},
            note=str(result.note)[:MOST_NOTE],
            turns=_turns(result.turns, characters) if result.turns and result.outcome == RewardOutcome.SCORED else (),
            score=None if result.score is None else _number("its score is", result.score),
        )
    except Exception as error:  # values of user-defined classes may raise anything
        return crashed(f"returned a malformed RewardResult: {error}")


def _number(what: str, number: Any) -> float:
    try:
        value = float(number)
    except OverflowError:
        raise ValueError(f"{what} an integer that is too large for a float") from None
    if not math.isfinite(value):
        raise ValueError(f"{what} {value}, which is not finite")
    if abs(value) > FP32_MAX:
        raise ValueError(f"{what} {value}, which is too large for fp32")
    return value


def _excerpt(returned: Any) -> str:
    return repr(returned)[:NOTE_CHARACTERS]


def _turns(turns: Sequence[TurnReward], characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(
        TurnReward(operator.index(turn.end), _number("its reward of a turn is", turn.value)) for turn in turns
    )
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        found = f"its turns end at {', '.join(map(str, ends[1:-1]))} of {characters} characters"
        raise ValueError(f"{found}; the ends must be in ascending order and within the response")
    return checked


@dataclass(frozen=True)
class RewardAssignment(Assignment):
    """The rewards of a child."""

    parts: tuple[RewardPart, ...]
    concurrency: int
    checks_rows: bool = False
    """Whether calls check rows (`row_check`) instead of computing rewards."""


@dataclass(frozen=True)
class PartTraits:
    """Traits of the reward function of a part, as far as the parent needs them."""

    needs_service: bool
    checks_rows: bool
    """Whether the function declares a `check_row`."""
    passes_at: float | None = 1.0
    passes_by: str = ""


def answer_message(number: int, seal: int, results: Sequence[RewardResult], replaced: str) -> bytes:
    """Encode an answer as the child sends it. `json.dumps` takes twice as long, and there is one for each response."""
    said = ",".join(map(_encoded_result, results))
    return framed(f"[{number},{seal},[{said}],{_quoted(replaced)}]".encode())


def _encoded_result(result: RewardResult) -> str:
    parts = ",".join(f"{_quoted(name)}:{part!r}" for name, part in result.parts.items()) if result.parts else ""
    turns = ",".join(f"[{turn.end},{turn.value!r}]" for turn in result.turns) if result.turns else ""
    score = "null" if result.score is None else repr(result.score)
    said = f'{result.value!r},"{result.outcome.value}",{{{parts}}},{_quoted(result.note)},[{turns}],{score}'
    return f"[{said},{_quoted(result.trace)}]" if result.trace else f"[{said}]"


def read_traits(said: Any, parts: int) -> tuple[PartTraits, ...]:
    """Decode the traits of this number of parts. Raises TypeError or ValueError if they are malformed."""
    traits = tuple(_sent_traits(*one) for one in said)
    if len(traits) != parts:
        raise ValueError("traits")
    return traits


def read_results(reply: Reply, responses: Sequence[str]) -> tuple[list[RewardResult], str]:
    """Decode a reply: the results of its call, one for each response, and the name of a definition that was replaced
    during the call, or an empty string.

    Raises:
        Garbled: the reply is malformed.
    """
    try:
        results = [_sent_result(len(response), *one) for one, response in zip(reply.returned, responses, strict=True)]
        return results, text_in(reply.remark)[:MOST_NOTE]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Garbled(f"a verdict is malformed: {error}") from error


def _sent_result(
    characters: int, value: Any, outcome: Any, parts: Any, note: Any, turns: Any, score: Any = None, trace: Any = ""
) -> RewardResult:
    if type(parts) is not dict or len(parts) > MOST_PARTS or any(len(name) > MOST_PART_NAME for name in parts):
        raise ValueError("parts")
    if type(note) is not str or len(note) > MOST_NOTE:
        raise ValueError("note")
    if type(trace) is not str or len(trace) > TRACE_CHARACTERS:
        raise ValueError("trace")
    named = {name: _sent_number(part) for name, part in parts.items()} if parts else {}
    graded = None if score is None else _sent_number(score)
    return RewardResult(
        _sent_number(value),
        OUTCOMES[outcome],
        named,
        note,
        _sent_turns(turns, characters) if turns else (),
        graded,
        trace,
    )


def _sent_turns(turns: Any, characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(TurnReward(end, _sent_number(value)) for end, value in turns)
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(type(end) is not int for end in ends) or any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError("turns")
    return checked


def _sent_number(value: Any) -> float:
    if (type(value) is float or type(value) is int) and -FP32_MAX <= value <= FP32_MAX:  # false for nan
        return float(value)
    raise ValueError("number")


def _sent_traits(needs_service: Any, checks_rows: Any, passes_at: Any, passes_by: Any) -> PartTraits:
    bar = None if passes_at is None else _sent_number(passes_at)
    return PartTraits(flag_in(needs_service), flag_in(checks_rows), bar, text_in(passes_by))
