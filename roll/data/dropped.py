"""Telling of rows that are too long to be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping

LOG = logging.getLogger(__name__)


def report_dropped(too_long: Mapping[str, int], key: str, limit: int) -> None:
    """Warn of rows that were left out, by file."""
    for file, count in too_long.items():
        if count:
            LOG.warning("%s: %d rows are longer than %s=%d tokens and were left out", file, count, key, limit)
