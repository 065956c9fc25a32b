"""Telling of rows that were left out, or that teach nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

LOG = logging.getLogger(__name__)


def remark(counts: Mapping[str, int], what: str) -> None:
    """Warn of so many rows of each file; `what` goes on from "3 of its rows"."""
    for file, count in counts.items():
        LOG.warning("%s: %d of its rows %s", file, count, what)
