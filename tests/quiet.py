"""A progress display that prints nothing."""

from __future__ import annotations

import io

from rich.console import Console

from roll.tracking.life import Life


def quiet_life() -> Life:
    """Return a `Life` that writes to a buffer, for tests that do not check its output."""
    return Life(Console(file=io.StringIO()))
