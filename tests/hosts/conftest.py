"""Hosts on this machine, if it allows them. Where it does not, these tests are skipped, and the summary says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.lab import Lab, lab
from tests.hosts.skipping import skip_without_hosts


@pytest.fixture(scope="session")
def may_make_hosts() -> None:
    """Skip the test, with a warning in the summary, where no hosts can be made."""
    skip_without_hosts()


@pytest.fixture
def two_hosts(may_make_hosts: None) -> Iterator[Lab]:
    """Return two hosts without a shared folder."""
    with lab(2) as made:
        yield made


@pytest.fixture
def sharing_hosts(may_make_hosts: None, tmp_path: Path) -> Iterator[tuple[Lab, Path]]:
    """Return two hosts and the folder that both have at `SHARED`."""
    with lab(2, shared=tmp_path) as made:
        yield made, tmp_path
