"""Runs a reward model in transformers on one device. Sequences are packed, and each gets one score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll.backend import Rank
from roll.config.plan.memory import compiles
from roll.engines.hf.settings import HfRewardSettings
from roll.models.layers import compile_layers
from roll.models.memory_guard import FEWER_TOKENS, readable_memory_errors
from roll.models.offload import Offload, tensors_in
from roll.models.packed_inputs import packed_inputs
from roll.models.score import load_reward_model
from roll.system.signs import announce
from roll.types import Ints, Sequences


@dataclass(frozen=True)
class _Request:
    sequences: Sequence[Ints]
    scores: asyncio.Future[list[float]]


class HfReward:
    """Implements `RewardStrategy`. Requests that arrive during a forward pass are processed together in the next
    pass.
    """

    def __init__(self, settings: HfRewardSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        self._offload = Offload(rank.device, constant=True)
        self._waiting: list[_Request] = []
        self._works = asyncio.Lock()

    async def start(self) -> None:
        """See `RewardStrategy`."""
        model_args = self._settings.model_args
        announce("loading the model")
        with readable_memory_errors(self._rank, "loading the model"):
            self._model = load_reward_model(self._settings.model_path, model_args).to(self._rank.device).eval()
        if compiles(model_args, on_gpu=self._rank.device == "cuda"):
            compile_layers(self._model.causal)

    async def scores(self, sequences: Sequence[Ints]) -> list[float]:
        """See `RewardStrategy`."""
        request = _Request(sequences, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        async with self._works:
            if not request.scores.done():
                await self._score_waiting()
        return await request.scores

    async def _score_waiting(self) -> None:
        requests, self._waiting = self._waiting, []
        everything = [sequence for request in requests for sequence in request.sequences]
        try:
            scores = iter(await asyncio.to_thread(self._score, everything))
        except BaseException as error:
            for request in requests:
                if not request.scores.done():
                    request.scores.set_exception(
                        error if isinstance(error, Exception) else RuntimeError("the forward pass was cancelled")
                    )
                    request.scores.exception()  # mark it as retrieved, because its caller may no longer wait for it
            raise
        for request in requests:
            found = [next(scores) for _ in request.sequences]
            if not request.scores.done():
                request.scores.set_result(found)

    @torch.no_grad()
    def _score(self, sequences: Sequence[Ints]) -> list[float]:
        with readable_memory_errors(self._rank, "scoring", FEWER_TOKENS):
            # Read results only after all micro-batches are queued, so that the device does not wait for the host
            # between them.
            parts = [
                self._model(packed_inputs(part, self._rank.device))[0]
                for part in packed(sequences, self._settings.token_budget)
            ]
            return [score for part in parts for score in part.float().tolist()]

    async def offload(self) -> None:
        """See `RewardStrategy`."""
        async with self._works:
            tensors = tensors_in([*self._model.parameters(), *self._model.buffers()])
            await asyncio.to_thread(self._offload.offload, tensors)

    async def onload(self) -> None:
        """See `RewardStrategy`."""
        async with self._works:
            with readable_memory_errors(self._rank, "returning to the device"):
                await asyncio.to_thread(self._offload.onload)

    async def close(self) -> None:
        """See `RewardStrategy`."""
        del self._model


def packed(sequences: Sequence[Ints], token_budget: int) -> Iterator[Sequences]:
    """Yield micro-batches of at most `token_budget` tokens. A longer sequence gets its own. Each sequence's last token
    is in the mask.
    """
    part: list[Ints] = []
    for sequence in sequences:
        if part and sum(map(len, part)) + len(sequence) > token_budget:
            yield _laid_out(part)
            part = []
        part.append(sequence)
    if part:
        yield _laid_out(part)


def _laid_out(part: Sequence[Ints]) -> Sequences:
    offsets = np.cumsum([0, *map(len, part)], dtype=np.int64)
    mask = np.zeros(offsets[-1], np.bool_)
    mask[offsets[1:] - 1] = True
    return Sequences(np.concatenate(part), offsets, mask)
