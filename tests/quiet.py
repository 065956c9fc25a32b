"""A progress display that prints nothing."""

from __future__ import annotations

import io

from rich.console import Console

from roll.tracking.life import ActivityDisplay


def quiet_life() -> ActivityDisplay:
    """Return a `Life` that writes to a buffer, for tests that do not check its output."""
    return ActivityDisplay(Console(file=io.StringIO()))
