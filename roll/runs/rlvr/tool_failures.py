"""Says the first failure of every kind of each tool at once, with its traceback."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import indent

from roll.agents.tool_failures import FirstOfKind, ToolFailure
from roll.config.derived.domains import ENVIRONMENTS
from roll.config.load.env_file import secrets_of
from roll.config.plan.plan import Plan
from roll.config.schema.rlvr import RlvrConfig
from roll.runs.rlvr.reward_failures import printable_text, sayer
from roll.tracking.fanout import Tracking

LATER = "  The policy reads such an error as the tool's answer. Further ones are only counted, in episode/tool_errors"


class ToolFailures:
    """Tells the user about failures of tools. Must be used from a single thread."""

    def __init__(self, say: Callable[[str, str], None], hide: Callable[[str], str] = str) -> None:
        """
        Args:
            say: tells the user about a failure, given its topic and a text of one or more lines.
            hide: removes secrets from a text. An exception may contain the key of a service.
        """
        self._say, self._hide, self._first = say, hide, FirstOfKind()

    def observe(self, domain: str, failure: ToolFailure) -> None:
        """Say a failure of a tool of a domain, unless one of its kind has been said, or many kinds of its tool."""
        told = ToolFailure(*(printable_text(self._hide(text)) for text in failure))
        if self._first.is_new(told, domain):
            place = f"{ENVIRONMENTS}{domain}"
            cause = f"\n{indent(told.trace, '  ')}" if told.trace else f" {told.note}"
            self._say(f"{place}: {told.tool}: {told.kind}", f"{place}: the tool '{told.tool}' failed:{cause}\n{LATER}")


def told_tool_failures(config: RlvrConfig, plan: Plan, tracker: Tracking) -> ToolFailures:
    """Return what makes failures of tools notices of the tracker, without the secrets of the run."""
    return ToolFailures(sayer(tracker), secrets_of(config, plan.environment).hide)
