"""Warnings about rows that were left out, or that name no reward domain."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from roll.data.prompts import PromptSet
from roll.data.routes import DEFAULT_DOMAIN

LOG = logging.getLogger(__name__)
MOST_NAMED = 20
"""Largest number of tags in a warning. Those with the most rows come first."""


def warn_of_rows(counts: Mapping[str, int], what: str) -> None:
    """Log a warning for each file. `counts` is the number of rows by file; `what` continues "3 of its rows"."""
    for file, count in counts.items():
        LOG.warning("%s: %d of its rows %s", file, count, what)


def warn_of_routes(prompts: PromptSet) -> None:
    """Log warnings about prompts whose tag or domain names no reward domain of this run."""
    names = ", ".join(prompts.names)
    if prompts.unknown_tags:
        text = "%s: no reward domain includes the tag of %d rows (%s); they are scored by %s"
        LOG.warning(text, names, sum(prompts.unknown_tags.values()), _counted(prompts.unknown_tags), DEFAULT_DOMAIN)
    if prompts.unknown_domains:
        text = "%s: the column 'domain' of %d rows names no reward domain (%s); their tags decide which one scores them"
        LOG.warning(text, names, sum(prompts.unknown_domains.values()), _counted(prompts.unknown_domains))


def _counted(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    listed = ", ".join(f"{name}: {count}" for name, count in most[:MOST_NAMED])
    return f"{listed}, and {len(most) - MOST_NAMED} others" if len(most) > MOST_NAMED else listed
