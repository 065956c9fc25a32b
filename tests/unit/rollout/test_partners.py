"""Turns of partners: the environment asks for them, the policy is not trained on them, and a failure is no reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from roll.agents.environments.base import Ask, Message, Step
from roll.agents.episodes import FIRST_PARTNER_SEED, MOST_ASKED, episode_metrics
from roll.agents.live_partner import LivePartner
from roll.agents.partners import Partner, Partners
from roll.algorithms.advantages import Normalisation
from roll.rewards.judges.judge import JudgeReply
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.rollout.filters import has_verdict
from roll.rollout.group import turn_seed
from roll.types import Episode, PartnerTurn, RewardOutcome, RolloutGroup, Sampling, StopReason
from tests.unit.rollout.playing import DOMAIN, END, LATE, Chat, Engine, World, Worlds, episodes, groups, task, text
from tests.unit.rollout.test_episodes import counting, laid, run

DONE = Step(reward=1.0, done=True)
NAME = "rival"


@dataclass
class Rival:
    """Implements `Partner`: gives the replies in order, the last one for ever, after `takes` seconds."""

    replies: Sequence[JudgeReply]
    takes: float = 0.0
    asked: list[tuple[list[Message], int | None]] = field(default_factory=list)

    async def reply(self, messages: Sequence[Message], seed: int | None) -> JudgeReply:
        self.asked.append((list(messages), seed))
        await asyncio.sleep(self.takes)
        return self.replies[min(len(self.asked), len(self.replies)) - 1]


def says(*texts: str) -> Rival:
    return Rival([JudgeReply((one,), 3, 5) for one in texts])


def of(partner: Partner, name: str = NAME) -> Partners:
    return Partners({(DOMAIN, name): partner})


def asks(content: str = "your move", partner: str = NAME, **more: object) -> Step:
    return Step(asks=Ask(partner, [{"role": "user", "content": content}]), **more)  # type: ignore[arg-type]


def tells(content: str, **more: object) -> Step:
    return Step([{"role": "user", "content": content}], **more)  # type: ignore[arg-type]


def one(world: World, engine: Engine, partners: Partners, seed: int | None = 11, seconds: float = 1000.0) -> Episode:
    async def play() -> Episode:
        player = episodes(Worlds(lambda: world), engine, attempts=1, seconds=seconds, partners=partners)
        return await player.play(task(), 5, seed)

    episode = run(play)
    assert world.closed == 1
    return episode


def test_environment_hears_the_partner_and_goes_on() -> None:
    engine, rival = Engine(counting()), says("e5", "<think>mate?</think> Qh4")
    world = World(
        [
            asks("e4", reward=0.25, metrics={"moves": 1.0}),
            tells("black: e5", reward=0.5, metrics={"moves": 1.0}, state="open"),
            asks("f3"),
            DONE,
        ]
    )
    episode = one(world, engine, of(rival))
    assert laid(episode) == [["user:go|assistant:", "turn 1|", "user:black: e5|assistant:", "turn 2|"]]
    assert [request.context for request in engine.requests] == [
        "user:go|assistant:",
        "user:go|assistant:turn 1|user:black: e5|assistant:",
    ]
    assert world.partners == [(NAME, "e5"), (NAME, "Qh4")]
    assert [messages for messages, _ in rival.asked] == [[{"role": "user", "content": said}] for said in ("e4", "f3")]
    assert list(episode.turn_rewards) == [0.75, 1.0] and episode.stop is StopReason.COMPLETED
    assert list(episode.turn_states) == ["go", "open"] and episode.metrics["environment/moves"] == 2.0
    assert episode.partner_turns == (PartnerTurn(1, NAME, "e5"), PartnerTurn(2, NAME, "Qh4"))


def test_messages_around_a_partner_are_one_answer() -> None:
    world = World([Step([{"role": "user", "content": "wait"}], asks=asks().asks), asks("again"), tells("now"), DONE])
    episode = one(world, Engine(counting()), of(says("a", "b")))
    assert laid(episode)[0][2] == "user:wait|user:now|assistant:" and list(episode.turn_states) == ["go", "wait\nnow"]
    assert [turn.after for turn in episode.partner_turns] == [1, 1]


@pytest.mark.parametrize("estimator", ["grpo", "step_reinforce"])
def test_only_tokens_of_the_policy_get_advantages(estimator: str) -> None:
    """The partner's words stand in the context of every episode, here said by the policy itself."""
    secret = "partner's words"

    async def play() -> list[RolloutGroup]:
        engine = Engine(counting())
        live = LivePartner(Engine(lambda _: secret), Chat(), Sampling(20), 1000)
        worlds = Worlds(
            lambda: World([asks(), tells(f"it said {secret}"), Step(reward=1.0 + len(worlds.opened), done=True)])
        )
        player = groups(episodes(worlds, engine, partners=of(live)), samples=4)
        return [await player.sample(task(), None)]

    played = run(play)
    step = experience(played, Shaping())
    advantages = np.array(CreditAssignment(Credit(estimator, normalisation=Normalisation()))(step, None)[0].advantages)
    ids, mask = step.sequences.token_ids, step.sequences.response_mask.astype(bool)
    assert text(ids[mask]) == "turn 1|turn 2|" * 4 and text(ids[~mask]).count(secret) == 4
    assert len(advantages) == len(ids) and np.all(advantages[mask] != 0) and not np.any(advantages[~mask])


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (JudgeReply(failure="status 500: down"), f"partner '{NAME}' gave no answer: status 500: down"),
    ],
)
def test_partner_without_answer_fails_the_episode(reply: JudgeReply, note: str) -> None:
    worlds, rival = Worlds(lambda: World([asks(reward=1.0), DONE])), Rival([reply])
    partners = of(rival)

    async def play() -> Episode:
        return await episodes(worlds, Engine(counting()), attempts=3, partners=partners).play(task(), 5, 11)

    episode = run(play)
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and note in episode.reward.note
    assert episode.reward.outcome is RewardOutcome.UNAVAILABLE and not has_verdict(episode)
    assert [world.closed for world in worlds.opened] == [1, 1, 1] and len(rival.asked) == 3
    assert partners.metrics() == metrics(asked=3, unavailable=3)


def test_later_answer_counts() -> None:
    rival = Rival([JudgeReply(failure="busy"), JudgeReply(("hi",))])

    async def play() -> Episode:
        worlds = Worlds(lambda: World([asks(), DONE]))
        return await episodes(worlds, Engine(counting()), attempts=2, partners=of(rival)).play(task(), 5, 11)

    episode = run(play)
    assert episode.reward.value == 1.0 and episode.metrics["retried"] == 1.0
    assert [turn.text for turn in episode.partner_turns] == ["hi"]


def metrics(**counts: float) -> dict[str, float]:
    names = ("asked", "unavailable", "cut", "prompt_tokens", "answer_tokens")
    return {f"partner/{DOMAIN}/{NAME}/{name}": counts.get(name, 0.0) for name in names}


def test_counts_are_per_step_and_shared() -> None:
    partners = of(Rival([JudgeReply(("long",), 3, 5, cut=1)]))
    others = partners.beside({(DOMAIN, "live"): says("a")})
    for ask in (Ask(NAME, []), Ask(NAME, []), Ask("live", [])):
        asyncio.run(others.answer(DOMAIN, ask, None))
    found = partners.metrics()
    assert found.items() >= metrics(asked=2, cut=2, prompt_tokens=6, answer_tokens=10).items()
    assert found[f"partner/{DOMAIN}/live/asked"] == 1
    assert partners.metrics() == metrics()


def test_unknown_partner_is_named() -> None:
    episode = one(World([asks(partner="ghost"), DONE]), Engine(counting()), of(says("a")))
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and episode.reward.outcome is RewardOutcome.CRASHED
    assert "'ghost'" in episode.reward.note and f"environments.{DOMAIN}.partners" in episode.reward.note


def test_asking_for_ever_is_a_failure() -> None:
    episode = one(World([asks()] * MOST_ASKED + [DONE]), Engine(counting()), of(says("a")))
    assert episode.stop is StopReason.COMPLETED and len(episode.partner_turns) == MOST_ASKED
    episode = one(World([asks()] * (MOST_ASKED + 2)), Engine(counting()), of(says("a")))
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and f"more than {MOST_ASKED} times" in episode.reward.note


def test_slow_partner_has_the_deadline_of_the_episode() -> None:
    rival = Rival([JudgeReply(("a",))], takes=2 * LATE)
    episode = one(World([asks(), DONE]), Engine(counting()), of(rival), seconds=LATE)
    assert episode.stop is StopReason.DEADLINE and not has_verdict(episode)


def test_partners_turns_have_seeds_of_their_own() -> None:
    rival, engine = says("a"), Engine(counting())
    one(World([asks(), asks(), tells("x"), asks(), DONE]), engine, of(rival))
    assert [seed for _, seed in rival.asked] == [turn_seed(11, FIRST_PARTNER_SEED + number) for number in range(3)]
    assert not {seed for _, seed in rival.asked} & {request.seed for request in engine.requests}
    one(World([asks(), DONE]), engine, of(unseeded := says("a")), seed=None)
    assert unseeded.asked[0][1] is None


def test_the_policy_answers_as_its_own_partner() -> None:
    policy = Engine(lambda context: "as partner" if "your move" in context else "as player", version=4)
    live = LivePartner(policy, Chat(), Sampling(20, samples=8, log_probs=True), 1000)
    world = World([asks(), DONE])
    episode = one(world, policy, of(live))
    assert world.partners == [(NAME, "as partner")]
    assert [text(segment.token_ids) for segment in episode.sampled] == ["as player|"]
    player, partner = policy.requests
    assert partner.context == "user:your move|assistant:" and partner.session is not player.session
    assert (partner.sampling.samples, partner.sampling.log_probs) == (1, False)
    assert END in partner.sampling.stop_token_ids


@pytest.mark.parametrize(
    ("policy", "longest", "failure"),
    [
        (Engine(lambda _: "x"), 25, "have 25 tokens"),
        (Engine(lambda _: "x", aborts=True), 1000, "aborted"),
    ],
)
def test_policy_as_partner_fails(policy: Engine, longest: int, failure: str) -> None:
    live = LivePartner(policy, Chat(), Sampling(20), longest)
    episode = one(World([asks(), DONE]), Engine(counting()), of(live))
    assert failure in episode.reward.note and episode.reward.outcome is RewardOutcome.UNAVAILABLE


def test_cut_answer_of_the_policy_is_counted() -> None:
    live = LivePartner(Engine(lambda _: "x" * 30), Chat(), Sampling(20), 1000)
    partners = of(live)
    episode = one(World([asks(), DONE]), Engine(counting()), partners)
    assert episode.partner_turns[0].text == "x" * 20
    assert partners.metrics() == metrics(asked=1, cut=1, prompt_tokens=25, answer_tokens=20)


def test_metrics_of_episodes_with_partners() -> None:
    async def play() -> RolloutGroup:
        worlds = Worlds(lambda: World([asks(), tells("x"), DONE]))
        player = episodes(worlds, Engine(counting()), partners=of(Rival([JudgeReply(("a",))], takes=3.0)))
        return await groups(player).sample(task(), None)

    found = episode_metrics([run(play)])
    assert found["episode/partner_turns"] == 1.0 and found["episode/partner_seconds"] == pytest.approx(3.0)
    assert found["episode/environment_seconds"] == 0.0
