"""Fixtures for tests of containers: an image of this machine's own programs, unpacked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny.make_image import write_machine_image
from roll.agents.containers.unpacked import UnpackedImage, unpacked


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an OCI layout with a shell."""
    folder = tmp_path_factory.mktemp("images") / "machine"
    write_machine_image(folder)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of unpacked images."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def ready(image: Path, cache: Path) -> UnpackedImage:
    """Return the unpacked image."""
    return unpacked(image, cache)
