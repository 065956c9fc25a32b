"""Skips tests where no hosts can be made."""

from __future__ import annotations

import warnings

import pytest

from tests.hosts.lab import missing


def skip_without_hosts() -> None:
    """Skip the test where no hosts can be made, with a warning in the summary."""
    if why := missing():
        warnings.warn(f"NO RUN OVER SEVERAL HOSTS WAS TESTED: {why}", stacklevel=1)
        pytest.skip(f"no run over several hosts was tested: {why}")
