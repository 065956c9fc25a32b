"""Offloading, activity and weight routes of `HfGenerate`. tests/engines/test_generate.py tests its generation."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from roll.backend import EngineActivity, Rank
from roll.config.schema.model import ModelConfig
from roll.engines.hf.settings import HfGenerateSettings
from roll.engines.hf.strategy import HfGenerate
from roll.types import Completion, FinishReason, Sampling
from roll.weight_sync.routes import Route, Transport
from tests import limits
from tests.streams import whole

SETTINGS = HfGenerateSettings("", ModelConfig.model_validate({}), 0)
RANK = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.START)


def test_it_leaves_once_the_prompt_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    sizes: list[int] = []

    def answer(*_: Any) -> list[Completion]:
        time.sleep(0.05)
        sizes.append(model.weight.untyped_storage().nbytes())
        return []

    async def run() -> None:
        engine = HfGenerate(SETTINGS, RANK)
        engine._model = cast(Any, model)
        monkeypatch.setattr(engine, "_generate", answer)
        answering = asyncio.create_task(whole(engine.generate(np.zeros(1, np.int32), Sampling(1), None)))
        await asyncio.sleep(0)
        await engine.offload(discard=False)
        sizes.append(model.weight.untyped_storage().nbytes())
        await engine.onload(whole=True)
        sizes.append(model.weight.untyped_storage().nbytes())
        await answering

    asyncio.run(run())
    assert sizes == [16, 0, 16]


def test_it_pauses_twice_and_leaves_while_paused() -> None:
    async def run() -> None:
        engine = HfGenerate(SETTINGS, RANK)
        engine._model = cast(Any, nn.Linear(2, 2))
        async with asyncio.timeout(limits.CALL):
            await engine.pause()
            await engine.abandon_update()
            await engine.offload(discard=False)
            await engine.onload(whole=False)
            await engine.pause()
            await engine.resume(3)
            await engine.pause()
        assert await engine.policy_version() == 3

    asyncio.run(run())


def test_it_counts_what_it_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has a prompt of three tokens and two samples, of one and of four tokens."""

    def answer(*_: Any) -> list[Completion]:
        ids = [np.zeros(length, np.int32) for length in (1, 4)]
        return [Completion(one, None, one, FinishReason.STOP, "") for one in ids]

    async def run() -> tuple[EngineActivity, EngineActivity]:
        engine = HfGenerate(SETTINGS, RANK)
        monkeypatch.setattr(engine, "_generate", answer)
        await whole(engine.generate(np.zeros(3, np.int32), Sampling(4, samples=2), None))
        await whole(engine.generate(np.zeros(3, np.int32), Sampling(4, samples=2), None))
        first = await engine.activity()
        await engine.pause()
        return first, await engine.activity()

    first, second = asyncio.run(run())
    assert (first.generated_tokens, first.prefilled_tokens) == (10, 12)
    assert first.busy_seconds > 0
    assert (second.generated_tokens, second.prefilled_tokens, second.busy_seconds) == (0, 0, 0)


def test_a_new_way_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, left = HfGenerate(SETTINGS, RANK), []
    monkeypatch.setattr(engine._reader, "close", lambda: left.append(True))
    asyncio.run(engine.open_route(Route(Transport.FILE, same_host=True), None))
    assert left == [True]
