"""Randomly mutated configurations are accepted as written or refused, without a traceback, a hang or a silent
change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks import config_mutations
from benchmarks.config_files import files, pairs
from benchmarks.config_mutations import Case, commands, differences, mutations, watched
from tests import limits
from tests.tiers import each


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_mutations, "DEADLINE", int(limits.CALL))


def bad(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.came not in ("taken", "refused")]


@each("count", [60, 1000], quick=[60])
@pytest.mark.filterwarnings("ignore")
def test_mutations(count: int) -> None:
    assert not bad(mutations(random.Random(count), count))


@each("count", [6, 60], quick=[6])
@pytest.mark.filterwarnings("ignore")
def test_commands(count: int) -> None:
    assert not bad(commands(random.Random(count), count))


@each("count", [40, 400], quick=[40])
@pytest.mark.filterwarnings("ignore")
def test_files(count: int) -> None:
    assert not bad(files(random.Random(count), count))


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_with_every_method() -> None:
    assert not bad(pairs(["algorithms/dppo"]))


def test_what_must_not_be_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> str:
        raise KeyError("x")

    def hangs() -> str:
        while True:
            pass

    came: dict[str, Callable[[], str]] = {"taken": lambda: "", "altered": lambda: "seed: 1 is 2", "traceback": raises}
    assert [watched(name, judge).came for name, judge in came.items()] == list(came)
    monkeypatch.setattr(config_mutations, "DEADLINE", int(limits.EXPIRY))
    assert watched("late", hangs).came == "late"
    assert list(differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "")) == ["a[1].b: 2 is 3"]
    assert not list(differences({"a": 1}, {"a": 2}, "a: 1 is read as 2"))
