"""The driver's side of models that give rewards: judges and reward models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from roll.config.schema.roles import RewardConfig
from roll.data.picture_parts import PictureFault
from roll.engines.pool import Running
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.rewards.judges.chat_api import ApiModel
from roll.rewards.judges.judge import JudgeReply
from roll.rewards.judges.reward_models import ApiJudge, EngineJudge, JudgeEngines, ScorerEngines, message_seed
from roll.rewards.reward_workers import SLACK, Rewards
from roll.types import (
    AskedPictures,
    Completion,
    FinishReason,
    Ints,
    NumberedCompletions,
    Prompt,
    RewardResult,
    Sampling,
)
from tests import limits
from tests.unit.rollout.build import make_prompt

SAMPLING = Sampling(4, samples=2, temperature=0.5, log_probs=False)


class Group(Ranks[Any]):
    """A group that records its calls and answers when `may_answer` is set."""

    role = "rewards.d"

    def __init__(self, answer: Any, size: int = 2) -> None:
        self.answer, self.size = answer, size
        self.calls: list[tuple[str, int, tuple[Any, ...], float]] = []
        self.shown: list[object] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def __len__(self) -> int:
        return self.size

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.calls += [(method, rank, given, seconds) for rank, given in arguments.items()]
        await self.may_answer.wait()
        return [self.answer] * len(arguments)

    @property
    def callers(self) -> list[Any]:
        return [SimpleNamespace(stream=partial(self.stream, rank)) for rank in range(len(self))]

    async def stream(
        self,
        rank: int,
        method: Any,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        shown: object,
        seconds: float,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.calls.append((method.__name__, rank, (token_ids, sampling, seed), seconds))
        self.shown.append(shown)
        await self.may_answer.wait()
        yield list(enumerate(self.answer))[::-1]

    async def held_bytes(self) -> int | None:
        return 7


def encode(message: str, pictures: Sequence[str]) -> tuple[Ints, AskedPictures | None]:
    files = tuple(picture.encode() for picture in pictures)
    shown = AskedPictures(np.zeros(1, np.int32), files, ("a",) * len(files)) if files else None
    return np.arange(len(message), dtype=np.int32), shown


def completion(text: str, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(np.arange(3, dtype=np.int32), None, np.zeros(3, np.int32), reason, text)


def engine_judge(group: Group, seed: int | None = None) -> EngineJudge:
    engines = JudgeEngines(cast(WorkerGroup, group), Running(None, len(group)), limits.CALL, limits.CALL, limits.CALL)
    return EngineJudge(engines, encode, SAMPLING, context=10, seed=seed)


def test_an_engine_answers_as_often_as_told() -> None:
    group = Group([completion("yes"), completion("no")])
    assert asyncio.run(engine_judge(group, seed=3).ask("four")) == JudgeReply(("yes", "no"), 4, 6)
    ((method, _, (token_ids, sampling, seed), _),) = group.calls
    assert (method, token_ids.tolist(), sampling) == ("generate", [0, 1, 2, 3], SAMPLING)
    assert seed == message_seed(3, "four") != message_seed(4, "four") and 0 <= seed < 2**31


def test_engine_gets_pictures_of_message() -> None:
    group = Group([completion("yes"), completion("no")])
    assert asyncio.run(engine_judge(group).ask("four", ["one", "two"])).answers == ("yes", "no")
    assert asyncio.run(engine_judge(group).ask("five")).answers == ("yes", "no")
    seen, none = group.shown
    assert isinstance(seen, AskedPictures) and seen.files == (b"one", b"two") and none is None


def test_picture_that_judge_cannot_see_is_a_failure() -> None:
    def refuse(message: str, pictures: Sequence[str]) -> tuple[Ints, AskedPictures | None]:
        raise PictureFault("is too thin")

    group = Group([completion("yes")])
    judge = engine_judge(group)
    judge._encode = refuse
    assert "is too thin" in asyncio.run(judge.ask("four", ["one"])).failure and not group.calls


def test_message_exceeding_judge_context_is_not_asked() -> None:
    group = Group([completion("yes"), completion("no")])
    reply = asyncio.run(engine_judge(group).ask("sevens!"))
    assert not group.calls and "has 7 tokens, " in reply.failure and "only 6" in reply.failure
    assert asyncio.run(engine_judge(group).ask("sixsix")).answers == ("yes", "no")


def test_an_answer_that_was_given_up_is_none() -> None:
    reply = asyncio.run(engine_judge(Group([completion("ye", FinishReason.ABORT), completion("yes")])).ask("a"))
    assert not reply.answers and "aborted the request" in reply.failure


def test_a_judge_never_forgets_its_weights() -> None:
    group = Group(None)
    assert (
        asyncio.run(
            JudgeEngines(
                cast(WorkerGroup, group), Running(None, len(group)), limits.CALL, limits.CALL, limits.CALL
            ).offload(discard=True)
        )
        == 7
    )
    assert [(method, given) for method, _, given, _ in group.calls] == [("offload", (False,))] * 2


def test_queued_messages_get_time_for_their_turn() -> None:
    model = ApiModel(
        "http://h", "m", None, SAMPLING, seconds=limits.CALL, retries=1, concurrency=2, max_calls=None, seed=0
    )

    async def run() -> None:
        group = Group(JudgeReply(("yes",)), size=1)
        group.may_answer.clear()
        judge = ApiJudge(cast(WorkerGroup, group), model, limits.START)
        asking = asyncio.gather(*(judge.ask(str(number)) for number in range(5)))
        while len(group.calls) < 5:
            await asyncio.sleep(0)
        group.may_answer.set()
        await asking
        turns = [1, 1, 2, 2, 3]
        assert [seconds for *_, seconds in group.calls] == [turn * model.longest_seconds + SLACK for turn in turns]

    asyncio.run(run())


def test_sequences_go_to_the_least_busy_worker() -> None:
    async def run() -> None:
        group = Group([0.5])
        group.may_answer.clear()
        engines = ScorerEngines(cast(WorkerGroup, group), limits.CALL, limits.CALL, limits.START)
        asking = asyncio.gather(*(engines.scores([np.zeros(length, np.int32)], [None]) for length in (9, 3, 3, 4)))
        while len(group.calls) < 4:
            await asyncio.sleep(0)
        group.may_answer.set()
        assert await asking == [[0.5]] * 4
        assert [rank for _, rank, _, _ in group.calls] == [0, 1, 1, 1]

    asyncio.run(run())


class Model:
    """An implementation of `ModelReward`."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(float(len(response))) for response in responses]


def test_domain_with_reward_model_is_scored_by_it() -> None:
    rewards = Rewards({}, {"judged": RewardConfig.model_validate({})}, limits.START, {"judged": Model()})
    prompt = make_prompt(0, domain="judged")
    results = asyncio.run(rewards.score(prompt, ["a", "bcd"]))
    assert [result.value for result in rewards.combined(prompt, results)] == [1.0, 3.0] and not rewards.compares(prompt)
