"""Runs a reward model in vLLM: a sequence classifier behind `AsyncLLM.encode`. ARCHITECTURE.md, section 5, lists the
names of vLLM used.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

from vllm import AsyncEngineArgs, PoolingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from roll.backend import Rank
from roll.engines.request_gate import RequestGate
from roll.engines.vllm.arguments import engine_arguments, use_fp32_attention
from roll.engines.vllm.settings import VllmRewardSettings
from roll.models.score import check_reward_model
from roll.system.signs import announce
from roll.types import Ints


class VllmReward:
    """Implements `RewardStrategy`."""

    def __init__(self, settings: VllmRewardSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        self._request_numbers = itertools.count()
        self._may_score = RequestGate()
        self._is_asleep = False

    async def start(self) -> None:
        """See `RewardStrategy`."""
        settings = self._settings
        check_reward_model(settings.model_path, settings.model_args)
        arguments = engine_arguments(settings, self._rank.device)
        arguments |= {"runner": "pooling", "convert": "classify"} | settings.engine.engine_args
        use_fp32_attention(settings)
        announce("starting the engine's process")
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def scores(self, sequences: Sequence[Ints]) -> list[float]:
        """See `RewardStrategy`."""
        return list(await asyncio.gather(*map(self._score, sequences)))

    async def _score(self, token_ids: Ints) -> float:
        await self._may_score.wait()
        with self._may_score:
            prompt = TokensPrompt(prompt_token_ids=token_ids.tolist())
            # Return the raw score. By default, vLLM would convert it to a probability.
            params = PoolingParams(task="classify", use_activation=False)
            request_id = f"{os.getpid()}-{next(self._request_numbers)}"
            async for output in self._engine.encode(prompt, params, request_id):
                if output.finished:
                    return float(output.outputs.data.float().item())
        raise RuntimeError("the engine aborted the request")

    async def offload(self) -> None:
        """See `RewardStrategy`. Moves the weights to host memory."""
        self._may_score.clear()
        if not self._is_asleep:
            await self._engine.sleep(level=1)
            self._is_asleep = True

    async def onload(self) -> None:
        """See `RewardStrategy`."""
        if self._is_asleep:
            await self._engine.wake_up()
            self._is_asleep = False
        self._may_score.set()

    async def close(self) -> None:
        """See `RewardStrategy`."""
        self._engine.shutdown()
        del self._engine
