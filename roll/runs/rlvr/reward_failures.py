"""Says the first failure of every kind of each reward at once, with its row and traceback, and counts the others.

A failure is a result without a verdict: the reward function raised, its process died, it exceeded its timeout, or its
judge or sandbox was unavailable. Failures of one reward are of the same kind if the same exception was raised at the
same line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from textwrap import indent

from roll.config.derived.fixed_roles import PREFIX
from roll.config.load.env_file import secrets_of
from roll.config.plan.plan import Plan
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.engines.actor_infer import Span, unrecorded
from roll.rewards.verdicts import parts_of
from roll.rollout.group import Scorer
from roll.tracking.base import Notice
from roll.tracking.fanout import Tracking
from roll.types import NO_VERDICT, Prompt, RewardOutcome, RewardResult

MOST_KINDS = 8
"""Largest number of kinds of a reward that are said. Further ones are only counted, under OTHERS."""
OTHERS = "other failures"
LATER = "  Such responses have no reward. Further ones are counted, and the total is said at the end"
VERBS = {
    RewardOutcome.CRASHED: "crashed",
    RewardOutcome.TIMED_OUT: "timed out",
    RewardOutcome.UNAVAILABLE: "was unavailable",
}
_RAISED = re.compile(r"([\w.]+)(?::.*)? \((.+), line (\d+)\)(?:; .*)?", re.DOTALL)


@dataclass(frozen=True)
class _Reward:
    """A reward function, or a model that scores a domain."""

    place: str
    """Key path of its block in the configuration."""
    label: str
    """The place, with the name of the function unless the place ends with it."""
    timeout: str
    """The limit of one call, with its key."""


@dataclass
class _Kinds:
    """The failures of one reward."""

    counts: Counter[str] = field(default_factory=Counter)
    """Number of failures by kind."""
    first: dict[str, str] = field(default_factory=dict)
    """Row of the first failure, by kind."""


class RewardFailures:
    """Collects the failures of all rewards. Must be used from a single thread."""

    def __init__(
        self, sections: Mapping[str, RewardConfig], say: Callable[[str, str], None], hide: Callable[[str], str] = str
    ) -> None:
        """
        Args:
            sections: the configuration of each domain's reward.
            say: tells the user about a failure, given its topic and a text of one or more lines.
            hide: removes secrets from a text. An exception may contain the key of a service.
        """
        self._say, self._hide = say, hide
        self._rewards = {
            (domain, part.name): _Reward(
                part.place, _label(part.place, part.reward), f"rewards.{domain}.timeout: {section.timeout:g}"
            )
            for domain, section in sections.items()
            for part in parts_of(domain, section)
        }
        self._found: dict[tuple[str, str], _Kinds] = {}
        self._asked = Counter[str]()

    def observe(self, prompt: Prompt, results: Sequence[RewardResult]) -> None:
        """Count the results of some responses to a prompt, and say what has failed for the first time."""
        self._asked[prompt.domain] += len(results)
        failed = [
            (part, one)
            for result in results
            if result.outcome in NO_VERDICT
            for part, one in (result.failures or {"": result}).items()
        ]
        new: dict[tuple[str, str], RewardResult] = {}
        for part, result in failed:
            kinds = self._found.setdefault((prompt.domain, part), _Kinds())
            kind = self._hide(kind_of(result))
            if kind not in kinds.counts and len(kinds.counts) >= MOST_KINDS:
                kind = OTHERS
            elif kind not in kinds.counts:
                new[part, kind] = result
            kinds.counts[kind] += 1
            kinds.first.setdefault(kind, _row(prompt))
        for (part, kind), result in new.items():
            reward = self._reward(prompt.domain, part)
            self._say(
                f"{reward.place}: {kind}",
                self._text(reward, prompt, self._found[prompt.domain, part].counts[kind], result),
            )

    def totals(self) -> list[tuple[str, str]]:
        """Return each reward that failed, as topic and text: how many responses got no verdict, by kind."""
        said = []
        for (domain, part), kinds in self._found.items():
            reward, asked, count = self._reward(domain, part), self._asked[domain], kinds.counts.total()
            by_kind = ", ".join(
                f"{number} x {kind} (first: {kinds.first[kind]})" for kind, number in kinds.counts.most_common()
            )
            said.append(
                (f"{reward.place}: total", f"{reward.label} gave no verdict on {count} of {asked} responses: {by_kind}")
            )
        return said

    def _text(self, reward: _Reward, prompt: Prompt, count: int, result: RewardResult) -> str:
        what = (
            f"{reward.label} {VERBS[result.outcome]} on {_row(prompt)} ({count} of {self._asked[prompt.domain]} "
            f"responses so far)"
        )
        cause = f"\n{indent(printable_text(result.trace), '  ')}" if result.trace else f" {printable_text(result.note)}"
        limit = f" ({reward.timeout})" if result.outcome is RewardOutcome.TIMED_OUT else ""
        return f"{what}:{self._hide(cause)}{limit}\n{LATER}"

    def _reward(self, domain: str, part: str) -> _Reward:
        """Return the reward of a part. The sum of a domain's parts may fail as well, as too large for fp32."""
        return self._rewards.get((domain, part)) or _Reward(f"rewards.{domain}", f"rewards.{domain}", "")


@dataclass(frozen=True)
class Reported:
    """Implements `Scorer`: passes the results of another scorer to `RewardFailures`."""

    scorer: Scorer
    failures: RewardFailures
    answered: Callable[[int], None] | None = None
    """Called with the number of responses that are about to be scored."""
    span: Span = unrecorded
    """Records each call; see `Trace.span`."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        if self.answered is not None:
            self.answered(len(responses))
        facts = {"prompt": prompt.prompt_id, "responses": len(responses)}
        with self.span(f"{PREFIX}{prompt.domain}", "score", **facts):
            results = await self.scorer.score(prompt, responses)
        self.failures.observe(prompt, results)
        return results

    def compares(self, prompt: Prompt) -> bool:
        return self.scorer.compares(prompt)

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return self.scorer.combined(prompt, results)


def reported(config: RlvrConfig, scorer: Scorer, plan: Plan, tracker: Tracking, span: Span = unrecorded) -> Reported:
    """Return a scorer whose failures become notices of the tracker, without the secrets of the run. `span` records its
    calls.
    """
    failures = RewardFailures(config.rewards, sayer(tracker), secrets_of(config, plan.environment).hide)
    return Reported(scorer, failures, span=span)


def sayer(tracker: Tracking) -> Callable[[str, str], None]:
    """Return what makes a topic and a text a notice of the step that is under way."""

    def say(topic: str, text: str) -> None:
        tracker.notices([Notice(tracker.step_under_way, topic, text)])

    return say


@asynccontextmanager
async def totalled(failures: RewardFailures, tracker: Tracking) -> AsyncIterator[None]:
    """Say the totals of the failures at the end, as notices of the last step that is logged."""
    begin = tracker.step_under_way
    try:
        yield
    finally:
        since, last = f"since step {begin}", max(begin, tracker.step_under_way - 1)
        tracker.notices([Notice(last, f"{topic} {since}", f"{since}, {text}") for topic, text in failures.totals()])


def kind_of(result: RewardResult) -> str:
    """Return a failure's kind: the exception and its line, or the outcome with its note's start, without numbers."""
    if result.outcome is RewardOutcome.CRASHED and (raised := _RAISED.fullmatch(result.note)):
        return printable_text("{} at {}, line {}".format(*raised.groups()))
    if result.outcome is RewardOutcome.TIMED_OUT:
        return "timed out"
    what = re.sub(r"\d+", "N", result.note.partition(":")[0])[:80]
    return printable_text(f"{VERBS[result.outcome]}: {what}" if what else VERBS[result.outcome])


def _label(place: str, reward: str) -> str:
    return place if place.endswith(f".{reward}") else f"{place} ({reward})"


def _row(prompt: Prompt) -> str:
    return prompt.place or f"prompt {prompt.prompt_id}"


def printable_text(text: str) -> str:
    """Return a text of the user's code without characters that could change the terminal or break a file's encoding."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)
