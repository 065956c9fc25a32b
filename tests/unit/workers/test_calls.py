"""`Ranks`: the method names and arguments that are sent to the ranks of a group, and the results that are returned."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roll.backend import GenerateStrategy, TrainStrategy
from roll.ray.batching import Ranks
from tests import limits


class FourRanks(Ranks[Any]):
    """Two replicas of two ranks. Each rank returns its number."""

    replica_size = 2

    def __init__(self) -> None:
        self.heard: list[tuple[str, Mapping[int, tuple[Any, ...]], float]] = []

    def __len__(self) -> int:
        return 4

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.heard.append((method, arguments, seconds))
        return list(arguments)


def test_call_is_sent_as_method_name() -> None:
    group = FourRanks()
    assert asyncio.run(group.within(limits.CALL).all(TrainStrategy.save, Path("x"))) == [0, 1, 2, 3]
    assert asyncio.run(group.within(limits.PROCESS).one(2, GenerateStrategy.resume, 7)) == 2
    assert asyncio.run(
        group.within(limits.START).each(GenerateStrategy.onload, [(True,), (False,), (True,), (False,)])
    ) == [0, 1, 2, 3]
    assert group.heard == [
        ("save", dict.fromkeys(range(4), (Path("x"),)), limits.CALL),
        ("resume", {2: (7,)}, limits.PROCESS),
        ("onload", {0: (True,), 1: (False,), 2: (True,), 3: (False,)}, limits.START),
    ]


def test_first_rank_of_replica_answers() -> None:
    group = FourRanks()
    assert asyncio.run(group.within(limits.CALL).each_replica(TrainStrategy.load, [(Path("a"),), (Path("b"),)])) == [
        0,
        2,
    ]
    assert [str(folder) for (folder,) in group.heard[0][1].values()] == ["a", "a", "b", "b"]


def test_arguments_by_name_take_their_places() -> None:
    group = FourRanks()
    asyncio.run(group.within(limits.CALL).one(0, TrainStrategy.log_probs, [], adapter=True, temperature=0.5))
    assert group.heard[0][1] == {0: ([], 0.5, True)}
    with pytest.raises(TypeError, match="required argument: 'temperature'"):
        asyncio.run(group.within(limits.CALL).one(0, TrainStrategy.log_probs, [], adapter=True))  # pyright: ignore[reportCallIssue]


def test_every_rank_needs_arguments() -> None:
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(FourRanks().within(limits.CALL).each(GenerateStrategy.onload, [(True,)]))
