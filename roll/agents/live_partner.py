"""The policy in training as a partner: self-play. It samples these turns with its current weights, without credit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from roll.agents.environments.base import Message
from roll.agents.episodes import SessionGenerator
from roll.data.chat import TemplateFault
from roll.data.renderers.base import ChatRenderer, one_conversation
from roll.rewards.judges.judge import JudgeReply
from roll.rollout.record import without_placeholder
from roll.types import FinishReason, Sampling, Session


class LivePartner:
    """A `Partner` whose turns the policy in training samples, with the sampling parameters of its own turns."""

    def __init__(self, generator: SessionGenerator, renderer: ChatRenderer, sampling: Sampling, longest: int) -> None:
        """
        Args:
            longest: largest number of tokens of a conversation and its answer.
        """
        self._generator, self._renderer, self._longest = generator, renderer, longest
        stops = tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids}))
        self._sampling = replace(sampling, samples=1, stop_token_ids=stops, log_probs=False)

    async def reply(self, messages: Sequence[Message], seed: int | None) -> JudgeReply:
        try:
            with one_conversation():
                token_ids = self._renderer.render(messages, ())
        except TemplateFault as fault:
            return JudgeReply(failure=f"its chat template rejects the messages: {fault}")
        room = self._longest - len(token_ids)
        if room < 1:
            return JudgeReply(
                failure=f"its messages have {len(token_ids)} tokens, but an episode at most {self._longest}"
            )
        sampling = replace(self._sampling, max_new_tokens=min(room, self._sampling.max_new_tokens))
        async with aclosing(self._generator.generate(token_ids, sampling, seed, Session())) as answer:
            [completion] = [completion async for ended in answer for _, completion in ended]
        if completion.finish_reason is FinishReason.ABORT:
            return JudgeReply(failure="the policy's engine aborted the request")
        completion = without_placeholder(completion, sampling.placeholder)
        with one_conversation():
            said = str(self._renderer.parse(completion.token_ids, ()).message.get("content") or "")
        cut = int(completion.finish_reason is FinishReason.LENGTH)
        return JudgeReply((said,), len(token_ids), len(completion.token_ids), cut=cut)
