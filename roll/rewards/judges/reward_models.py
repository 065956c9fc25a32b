"""The driver's side of models that compute rewards: a judge in its own engines or behind a URL, or a reward model,
which scores a conversation that ends with the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from roll.backend import Rank, RewardStrategy
from roll.data.picture_parts import PictureFault
from roll.engines.actor_infer import ActorInfer
from roll.ray.device_sharing import Residency
from roll.ray.group import WorkerGroup
from roll.ray.replacement import Replaced
from roll.rewards.judges.chat_api import ApiChat, ApiModel, Messages, user_message
from roll.rewards.judges.judge import NOTE_CHARACTERS, JudgeReply
from roll.rewards.reward_workers import SLACK
from roll.types import (
    AskedPictures,
    Completion,
    FinishReason,
    Ints,
    Pictures,
    Prompt,
    RewardOutcome,
    RewardResult,
    Sampling,
)


class Classifier(Protocol):
    """A model that scores sequences of tokens."""

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None]) -> Sequence[float]:
        """Return the score of each sequence. `shown` are the pictures of each one."""
        ...


ScoredTokens = tuple[Ints, Pictures | None]
"""The tokens of a conversation, and its pictures."""


class Scorer:
    """Scores the responses of one domain. Must be used from a single asyncio event loop."""

    def __init__(
        self, classifier: Classifier, encode: Callable[[Prompt, str], ScoredTokens], context: int, failed_value: float
    ) -> None:
        """
        Args:
            encode: returns the tokens of a prompt with its response, up to the token at which the score is read. Raises
                ValueError if the model's chat template rejects the conversation, or the model cannot see a picture.
            context: largest number of tokens that the model accepts.
            failed_value: value of a result without a verdict.
        """
        self._classifier, self._encode = classifier, encode
        self._context, self._failed_value = context, failed_value
        self._encodes = asyncio.Lock()  # tokenizers are not thread-safe

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order, with the model's score.

        The outcome is UNAVAILABLE if the conversation is too long for the model, and CRASHED if the model's chat
        template rejects it.

        Raises:
            RollError: the workers of the reward model failed.
        """
        async with self._encodes:
            encoded = await asyncio.to_thread(lambda: [self._encoded(prompt, response) for response in responses])
        found = [one for one in encoded if not isinstance(one, RewardResult)]
        sequences, shown = [tokens for tokens, _ in found], [pictures for _, pictures in found]
        scores = iter(await self._classifier.scores(sequences, shown) if found else ())
        return [one if isinstance(one, RewardResult) else RewardResult(next(scores)) for one in encoded]

    def _encoded(self, prompt: Prompt, response: str) -> ScoredTokens | RewardResult:
        """Return the tokens to score, or a result with the reason why they cannot be scored."""
        try:
            tokens, shown = self._encode(prompt, response)
        except ValueError as error:
            return RewardResult(self._failed_value, RewardOutcome.CRASHED, note=str(error)[:NOTE_CHARACTERS])
        if len(tokens) <= self._context:
            return tokens, shown
        note = f"the conversation has {len(tokens)} tokens, but the context of the reward model is {self._context}"
        return RewardResult(self._failed_value, RewardOutcome.UNAVAILABLE, note=note)


@dataclass(frozen=True)
class ApiSettings:
    """Settings of `ApiChat`."""

    model: ApiModel

    def build(self, rank: Rank) -> ApiChat:
        """See `Settings`."""
        return ApiChat(self.model)


class ApiJudge:
    """Implements `Chat` with a process of the domain that sends requests to a URL, with limits of its own."""

    def __init__(self, group: WorkerGroup[ApiChat], model: ApiModel, start_seconds: float) -> None:
        """`start_seconds` is the deadline for each part of the start of a replacement process."""
        self._processes, self._model = Replaced(group, start_seconds), model
        self._waiting = 0

    async def ask(self, message: str, pictures: Sequence[str] = ()) -> JudgeReply:
        """See `Chat`."""
        return await self.converse([user_message(message, pictures)])

    async def converse(self, messages: Messages) -> JudgeReply:
        """Return the model's answer to a conversation; see `ApiChat.converse`."""
        self._waiting += 1
        try:
            turns = -(-self._waiting // self._model.concurrency)
            seconds = turns * self._model.longest_seconds + SLACK
            return await self._processes.one(0, seconds, ApiChat.converse, messages)
        finally:
            self._waiting -= 1


class JudgeEngines(ActorInfer):
    """Facade of the engines of a model with constant weights, which takes part in no weight sync."""

    takes_weights = False

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Always keeps the weights, because they would not be sent again."""
        return await super().offload(discard=False)


EncodedMessage = tuple[Ints, AskedPictures | None]
"""The tokens of a prompt, with as many placeholders of its pictures as the model needs, and the pictures."""
EncodeMessage = Callable[[str, Sequence[str]], EncodedMessage]
"""Returns a model's input for a user message after pictures, which are data: URLs."""


class EngineJudge:
    """Implements `Chat` with a model that the run itself serves."""

    def __init__(
        self, engines: JudgeEngines, encode: EncodeMessage, sampling: Sampling, context: int, seed: int | None
    ) -> None:
        """
        Args:
            encode: raises PictureFault if the model cannot see a picture.
            context: largest number of tokens in a message and its answer.
            seed: base of the messages' seeds; with None, the engine samples without a seed.
        """
        self._engines, self._encode, self._sampling = engines, encode, sampling
        self._context, self._seed = context, seed
        self._encodes = asyncio.Lock()  # tokenizers are not thread-safe

    async def ask(self, message: str, pictures: Sequence[str] = ()) -> JudgeReply:
        """See `Chat`."""
        try:
            async with self._encodes:
                token_ids, shown = await asyncio.to_thread(self._encode, message, pictures)
        except PictureFault as fault:
            return JudgeReply(failure=f"the judge's prompt or a picture of it {fault}")
        seed = None if self._seed is None else message_seed(self._seed, message)
        return await engine_reply(self._engines, token_ids, self._sampling, self._context, seed, "judge", shown)


async def engine_reply(
    engines: JudgeEngines,
    token_ids: Ints,
    sampling: Sampling,
    context: int,
    seed: int | None,
    who: str,
    shown: AskedPictures | None = None,
) -> JudgeReply:
    """Return what a model answers to a prompt, or why it gives no answer.

    Args:
        context: largest number of tokens of prompt and answer.
        who: what the model is, for the failure.
        shown: the pictures of the prompt.
    """
    if len(token_ids) + sampling.max_new_tokens > context:
        asked, room = len(token_ids), context - sampling.max_new_tokens
        long = f"the {who}'s prompt has {asked} tokens"
        return JudgeReply(failure=f"{long}, but its context leaves room for only {room} before the answer")
    by_number: dict[int, Completion] = {}
    async with aclosing(engines.generate(token_ids, sampling, seed, shown=shown)) as answer:
        async for ended in answer:
            by_number |= ended
    completions = [by_number[number] for number in sorted(by_number)]
    if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
        return JudgeReply(failure=f"the {who}'s engine aborted the request")
    return JudgeReply(
        tuple(completion.text for completion in completions),
        len(token_ids),
        sum(len(completion.token_ids) for completion in completions),
        cut=sum(completion.finish_reason is FinishReason.LENGTH for completion in completions),
    )


def message_seed(seed: int, message: str) -> int:
    """Return a 31-bit seed that depends only on `seed` and the message, and not on when or where it is answered."""
    return int.from_bytes(sha256(f"{seed} {message}".encode()).digest()[:4]) >> 1


class ScorerEngines:
    """Facade of a group that serves a reward model. Implements `Classifier`."""

    def __init__(
        self, group: WorkerGroup[RewardStrategy], seconds: float, move_seconds: float, start_seconds: float
    ) -> None:
        """`start_seconds` is the deadline for each part of the start of a replacement engine."""
        self._group, self._seconds, self._move_seconds = group, seconds, move_seconds
        self._engines = Replaced(group, start_seconds)
        self._tokens_in_flight = [0] * len(group)

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None]) -> Sequence[float]:
        """See `Classifier`. Calls the worker with the fewest tokens in flight."""
        worker = min(range(len(self._group)), key=self._tokens_in_flight.__getitem__)
        cost = sum(map(len, sequences))
        self._tokens_in_flight[worker] += cost
        try:
            return await self._engines.one(worker, self._seconds, RewardStrategy.scores, sequences, shown)
        finally:
            self._tokens_in_flight[worker] -= cost

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Always keeps the weights, because they would not be sent again."""
        await self._group.within(self._move_seconds).all(RewardStrategy.offload)
        return await self._group.held_bytes()

    async def onload(self, level: Residency) -> None:
        """See `ColocatedRole`. A reward model has only its weights."""
        await self._group.within(self._move_seconds).all(RewardStrategy.onload)
