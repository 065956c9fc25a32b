"""Configurations of shipped experiments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config


@pytest.fixture(scope="session")
def configured() -> Callable[..., Any]:
    """Return a function that loads an experiment with overrides, without its files."""

    @cache
    def load(experiment: str, *words: str) -> Any:
        found: list[Any] = []
        compose(
            ["--config-name", experiment, "dry_run=true", *words],
            lambda composed, presets: found.append(checked_config(composed, presets)),
        )
        return found[0]

    return load
