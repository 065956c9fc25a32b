"""Episodes: training uses exactly the tokens that the engine saw, and every episode has a stop reason."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from roll.agents.environments.base import Message, Observation, Step
from roll.agents.episodes import MOST_DISTURBED, episode_metrics
from roll.data.chat import TemplateFault
from roll.errors import EnvironmentFailed, NeighbourFailed, RollError
from roll.rollout.batch import Shaping, experience
from roll.rollout.filters import usable
from roll.rollout.record import token_log_probs, token_versions
from roll.types import Episode, Ints, Prompt, RewardOutcome, RewardResult, RolloutGroup, StopReason
from tests.unit.rollout.playing import DOMAIN, LATE, Chat, Engine, Judge, World, Worlds, episodes, groups, task, text
from tests.unit.rollout.simulated import VirtualTime

T = TypeVar("T")
DONE = Step(reward=1.0, done=True)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in virtual time."""
    loop = VirtualTime()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def said(*contents: str, **more: Any) -> Step:
    return Step([{"role": "tool", "content": content} for content in contents], **more)


def counting() -> Callable[[str], str]:
    """Return a policy that answers `turn N`, where N is the number of assistant turns in the context, including its
    own.
    """
    return lambda context: f"turn {context.count('assistant:')}"


def one(world: World, engine: Engine, **keys: Any) -> Episode:
    """Play an episode in one environment, and check that the environment is closed once."""

    async def play() -> Episode:
        return await episodes(Worlds(lambda: world), engine, **keys).play(task(), 5, 11)

    episode = run(play)
    assert world.closed == 1
    return episode


def laid(episode: Episode) -> list[list[str]]:
    return [[text(segment.token_ids) for segment in path.segments] for path in episode.trajectories]


def test_the_engine_sees_what_is_trained_on() -> None:
    engine = Engine(counting(), version=3)
    world = World([said("one", reward=0.25, state="s1", metrics={"moves": 2.0}), said("two", "more"), DONE])
    episode = one(world, engine)
    given = ["user:go|assistant:", "tool:one|assistant:", "tool:two|tool:more|assistant:"]
    assert laid(episode) == [[given[0], "turn 1|", given[1], "turn 2|", given[2], "turn 3|"]]
    [path] = episode.trajectories
    for turn, request in enumerate(engine.requests):
        before = path.segments[: 2 * turn + 1]
        assert request.context == "".join(text(segment.token_ids) for segment in before)
    sampled = [segment.sampled for segment in path.segments]
    assert sampled == [False, True] * 3
    ids = np.concatenate([segment.token_ids for segment in path.segments])
    mask = np.repeat(sampled, [len(segment.token_ids) for segment in path.segments])
    assert token_log_probs(path.segments).tolist() == np.where(mask, -ids, 0).tolist()
    assert token_versions(path.segments)[mask].tolist() == [3] * 7 + [4] * 7 + [5] * 7
    assert [segment.text for segment in episode.sampled] == ["turn 1", "turn 2", "turn 3"]
    assert episode.stop is StopReason.COMPLETED and episode.reward.outcome is RewardOutcome.SCORED
    assert list(episode.turn_rewards) == [0.25, 0.0, 1.0] and episode.reward.value == 1.25
    assert list(episode.turn_states) == ["go", "s1", "two\nmore"]
    assert episode.metrics["environment/moves"] == 2.0 and episode.metrics["retried"] == 0.0
    assert [message["content"] for message in world.heard] == ["turn 1", "turn 2", "turn 3"]


def test_calls_of_an_episode_have_different_ids() -> None:
    world = World([said("1", "2"), said("3"), DONE])
    policy = Engine(lambda context: {1: "!add(a) !add(b)", 2: "!add(c)"}.get(context.count("assistant:"), "!add(d)"))
    one(world, policy)
    ids = [[call["id"] for call in message["tool_calls"]] for message in world.heard]
    assert ids == [["0", "1"], ["call00002"], ["call00003"]]


def test_all_turns_of_an_episode_are_one_session() -> None:
    engine = Engine(counting())
    one(World([said("a"), DONE]), engine)
    one(World([said("a"), DONE]), engine)
    first, second, third, fourth = [request.session for request in engine.requests]
    assert first is not None and first is second and third is fourth and first is not third


def test_a_turn_has_a_seed_of_its_own() -> None:
    engine = Engine(counting())

    async def play() -> RolloutGroup:
        worlds = Worlds(lambda: World([said("a"), DONE]))
        player = groups(episodes(worlds, engine), samples=3)
        group = await player.sample(task(4), 99)
        assert len(set(worlds.seeds)) == 1, "all samples of a group start from the same environment seed"
        await player.sample(task(seed=1234), 99)
        assert worlds.seeds[3:] == [1234] * 3
        return group

    group = run(play)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds[:6])) == 6 and None not in seeds
    assert sorted(map(str, seeds[:6])) == sorted(map(str, seeds[6:])), (
        "the seeds of turns depend only on the seed of the prompt"
    )
    assert text(group.prompt.token_ids) == "user:go|assistant:" == group.prompt.text


def stops() -> Iterator[tuple[StopReason, World, Engine, dict[str, Any], int]]:
    """Yield each stop reason with an environment, an engine and limits that lead to it, and the expected number of
    turns.
    """
    yield StopReason.COMPLETED, World([DONE]), Engine(counting()), {}, 1
    yield StopReason.LENGTH, World([said("a"), DONE]), Engine(lambda _: "x" * 30), {}, 1
    yield StopReason.MAX_TURNS, World([said("a")] * 4), Engine(counting()), {"max_turns": 3}, 3
    # user:go|assistant: has 18 tokens, a turn has 7, and tool:a|assistant: has 17.
    yield StopReason.CONTEXT_FULL, World([said("a")] * 4), Engine(counting()), {"sequence": 42}, 1
    yield StopReason.CONTEXT_FULL, World([said("a"), DONE]), Engine(counting()), {"sequence": 46}, 2
    yield StopReason.COMPLETED, World([said("a"), DONE]), Engine(counting()), {"sequence": 49}, 2
    # The room equals the limit of a turn, and is one token less: the turn, or the context, was too short.
    yield StopReason.LENGTH, World([said("a"), DONE]), Engine(lambda _: "x" * 30), {"sequence": 38}, 1
    yield StopReason.CONTEXT_FULL, World([said("a"), DONE]), Engine(lambda _: "x" * 30), {"sequence": 37}, 1
    yield StopReason.CONTEXT_FULL, World([said("a"), DONE]), Engine(counting()), {"sequence": 43}, 2
    yield StopReason.DEADLINE, World([said("a")] * 4, takes=4.0), Engine(counting()), {"seconds": LATE}, 2
    yield StopReason.ABORTED, World([DONE]), Engine(counting(), aborts=True), {}, 1


@pytest.mark.parametrize("case", list(stops()), ids=lambda case: case[0].value)
def test_every_end_has_its_reason(case: tuple[StopReason, World, Engine, dict[str, Any], int]) -> None:
    stop, world, engine, keys, turns = case
    episode = one(world, engine, **keys)
    assert (episode.stop, len(episode.sampled)) == (stop, turns)
    longest = keys.get("sequence", 1000)
    for path in episode.trajectories:
        assert sum(len(segment.token_ids) for segment in path.segments) <= longest
    for request in engine.requests:
        assert request.sampling.max_new_tokens == min(20, longest - len(request.context))
    group = RolloutGroup(task(), [episode])
    assert bool(usable(group)) == (stop not in (StopReason.DEADLINE, StopReason.ABORTED))
    if usable(group):
        step = experience([group], Shaping())
        assert text(step.sequences.token_ids) == "".join(laid(episode)[0])
        assert int(step.sequences.response_mask.sum()) == episode.length


@pytest.mark.parametrize("has_bridge", [True, False])
def test_observation_filling_the_context_is_dropped(has_bridge: bool) -> None:
    """The observation ends exactly at the limit, so no token could be sampled after it: it would only cost memory."""
    chat, full = Chat(has_bridge), 42  # 18 tokens given, 7 sampled, 17 observed
    episode = one(World([said("a"), DONE]), Engine(counting()), sequence=full, chat=chat)
    assert episode.stop is StopReason.CONTEXT_FULL and laid(episode) == [["user:go|assistant:", "turn 1|"]]
    episode = one(World([said("a"), DONE]), Engine(counting()), sequence=full + 1, chat=chat)
    assert episode.stop is StopReason.CONTEXT_FULL and laid(episode)[-1][-1] == "t"


def test_a_first_observation_may_fill_the_context() -> None:
    engine = Engine(counting())
    episode = one(World([DONE]), engine, sequence=18)
    assert episode.stop is StopReason.CONTEXT_FULL and not engine.requests and episode.length == 0


def test_timeout_before_first_turn_gives_no_verdict() -> None:
    episode = one(World([DONE]), Engine(counting(), takes=2 * LATE), seconds=LATE)
    assert episode.length == 0 and episode.stop is StopReason.DEADLINE and not usable(RolloutGroup(task(), [episode]))
    assert "episode_timeout" in episode.reward.note


@pytest.mark.parametrize("reason", ["crashed", "timed_out"])
def test_a_broken_environment_is_tried_again_fresh(reason: Any) -> None:
    broken = EnvironmentFailed("it fell over", reason)

    async def play(attempts: int, *made: World | Exception) -> tuple[Episode, Worlds]:
        left = iter(made)
        worlds = Worlds(lambda: next(left))
        return await episodes(worlds, Engine(counting()), attempts=attempts).play(task(), 5, 11), worlds

    episode, worlds = run(lambda: play(3, broken, World([said("a"), broken]), World([said("a"), DONE])))
    assert episode.stop is StopReason.COMPLETED and episode.metrics["retried"] == 2 and worlds.seeds == [5, 5, 5]
    assert [world.closed for world in worlds.opened] == [1, 1]

    episode, worlds = run(lambda: play(2, World([said("a"), broken]), broken, World([DONE])))
    assert (
        episode.stop is StopReason.ENVIRONMENT_FAILED
        and len(worlds.seeds) == 2
        and episode.reward.note == "it fell over"
    )
    assert episode.reward.outcome.value == reason and not usable(RolloutGroup(task(), [episode]))


def test_what_a_neighbour_broke_uses_up_no_attempt() -> None:
    lost, broken = NeighbourFailed("a neighbour cost its process"), EnvironmentFailed("it fell over")

    async def play(*made: World | Exception) -> Episode:
        left = iter(made)
        return await episodes(Worlds(lambda: next(left)), Engine(counting()), attempts=2).play(task(), 5, 11)

    episode = run(lambda: play(lost, broken, lost, World([said("a"), lost]), World([DONE])))
    assert episode.stop is StopReason.COMPLETED and episode.metrics["retried"] == 4
    episode = run(lambda: play(*[lost] * MOST_DISTURBED))
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and "neighbour" in episode.reward.note


@pytest.mark.parametrize("refuses", [0, 1])
def test_what_the_chat_template_refuses_is_a_failure(refuses: int) -> None:
    """The template refuses the first observation, or a later one."""

    class Strict(Chat):
        rendered = 0

        def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Ints:
            self.rendered += 1
            if self.rendered > refuses:
                raise TemplateFault("two user messages in a row")
            return super().render(messages, tools)

    worlds = Worlds(lambda: World([said("a"), DONE]))

    async def play() -> Episode:
        return await episodes(worlds, Engine(counting()), attempts=1, chat=Strict()).play(task(), 5, 11)

    episode = run(play)
    assert episode.stop is StopReason.ENVIRONMENT_FAILED and "two user messages" in episode.reward.note
    assert [world.closed for world in worlds.opened] == [1]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Step(reward=1.0), "no message"),
        (Step([{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]), "whose turn"),
        (Step([{"role": "assistant", "content": "turn 1 "}, {"role": "user", "content": "b"}]), "own message"),
    ],
)
def test_answers_without_a_next_turn_are_failures(step: Step, problem: str) -> None:
    async def play(**keys: Any) -> Episode:
        worlds = Worlds(lambda: World([step, DONE]))
        return await episodes(worlds, Engine(counting()), attempts=1, **keys).play(task(), 5, 11)

    episode = run(play)
    assert episode.stop is StopReason.ENVIRONMENT_FAILED
    note = episode.reward.note
    assert note.startswith(f"environments.{DOMAIN}: ") and problem in note and "done=True" in note
    assert run(lambda: play(max_turns=1)).stop is StopReason.MAX_TURNS, "nobody has to go on"


def test_a_step_may_show_examples() -> None:
    shown = [{"role": "assistant", "content": "like this"}, {"role": "user", "content": "b"}]
    assert one(World([Step(shown), DONE]), Engine(counting())).stop is StopReason.COMPLETED


def test_observation_longer_than_prompt_length_fails_episode() -> None:
    long = Observation([{"role": "user", "content": "x" * 200}])
    worlds = Worlds(lambda: World([DONE], long))

    async def play() -> Episode:
        return await episodes(worlds, Engine(counting())).play(task(), 5, 11)

    episode = run(play)
    assert episode.stop is StopReason.ENVIRONMENT_FAILED
    assert re.search(r"216 tokens, .*prompt_length, .*100$", episode.reward.note)
    assert [world.closed for world in worlds.opened] == [1, 1]


def test_calls_that_cannot_be_read_are_answered() -> None:
    says = iter(["!add", "!add(2)", "2"])
    world = World([said("2"), DONE])
    episode = one(world, Engine(lambda _: next(says)))
    assert any(re.fullmatch(r"tool:Error: .*: !add\|assistant:", part) for part in laid(episode)[0])
    assert [message["content"] for message in world.heard] == ["!add(2)", "2"], (
        "the environment does not get the malformed call"
    )
    assert list(episode.turn_rewards) == [0.0, 0.0, 1.0] and list(episode.turn_states) == ["go", "go", "2"]
    assert episode.metrics["tool_errors"] == 1 and episode.metrics["tool_calls"] == 1
    assert [list(segment.calls) for segment in episode.sampled] == [
        [],
        [{"name": "add", "arguments": '{"text": "2"}'}],
        [],
    ]


def test_unreadable_calls_may_end_an_episode() -> None:
    world = World([DONE], malformed_calls="end")
    episode = one(world, Engine(lambda _: "!add"))
    assert episode.stop is StopReason.COMPLETED and episode.reward.value == 0 and not world.heard


def test_unreadable_calls_may_count_as_a_step() -> None:
    world = World([Step(reward=-0.5, done=True, metrics={"tool_errors": 2.0})], malformed_calls="step")
    episode = one(world, Engine(lambda _: "!add"))
    assert [message["malformed"] for message in world.heard] == [["!add"]]
    assert episode.reward.value == -0.5 and episode.metrics["tool_errors"] == 3


def test_without_a_bridge_the_context_forks() -> None:
    engine = Engine(counting())
    episode = one(World([said("a"), DONE]), engine, chat=Chat(has_bridge=False))
    whole = "user:go|assistant:turn 1|tool:a|assistant:"
    assert laid(episode) == [["user:go|assistant:", "turn 1|"], [whole, "turn 2|"]]
    assert [request.context for request in engine.requests] == ["user:go|assistant:", whole]
    assert [path.stop for path in episode.trajectories] == [StopReason.COMPLETED] * 2
    assert len(episode.sampled) == len(episode.turn_rewards) == len(episode.turn_states) == 2


def test_a_reward_of_the_domain_is_added() -> None:
    async def play() -> RolloutGroup:
        worlds = Worlds(lambda: World([said("a"), DONE]))
        return await groups(episodes(worlds, Engine(counting())), scorer=Judge()).sample(task(), None)

    for episode in run(play).episodes:
        assert episode.reward.value == 1.0 + len("turn 1\nturn 2") and dict(episode.reward.parts) == {
            "environment": 1.0
        }
        assert list(episode.turn_rewards) == [0.0, 1.0], "the reward of the domain is not in the rewards of the turns"


@pytest.mark.parametrize(
    ("last_turn", "after_tools", "steps", "scored"),
    [
        ((), (), [said("a"), DONE], "turn 1\nturn 2"),
        ((DOMAIN,), (), [said("a"), DONE], "turn 2"),
        ((DOMAIN,), (DOMAIN,), [said("a"), DONE], "turn 2"),
        ((DOMAIN,), (), [said("a")] * 4, "turn 4"),
        ((DOMAIN,), (DOMAIN,), [said("a")] * 4, ""),  # max_turns: the last turn calls a tool
    ],
)
def test_text_of_the_answer_is_scored(
    last_turn: Sequence[str], after_tools: Sequence[str], steps: list[Step], scored: str
) -> None:
    asked = list[str]()

    class Reader(Judge):
        async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
            asked.extend(responses)
            return await super().score(prompt, responses)

    async def play() -> RolloutGroup:
        player = groups(episodes(Worlds(lambda: World(list(steps))), Engine(counting())), scorer=Reader())
        sampler = replace(player, last_turn=frozenset(last_turn), after_tools=frozenset(after_tools))
        return await sampler.sample(task(), None)

    run(play)
    assert asked == [scored] * 2


def test_episodes_of_a_group_run_concurrently() -> None:
    async def play() -> float:
        worlds = Worlds(lambda: World([said("a"), DONE], takes=1.0))
        await groups(episodes(worlds, Engine(counting())), samples=16).sample(task(), None)
        return asyncio.get_running_loop().time()

    assert run(play) == pytest.approx(4.0, abs=0.01), "two turns and two steps, of one second each"


def test_cancelled_episodes_close_their_environments() -> None:
    worlds = Worlds(lambda: World([said("a")] * 4, takes=LATE))

    async def play() -> None:
        group = asyncio.create_task(groups(episodes(worlds, Engine(counting())), samples=3).sample(task(), None))
        await asyncio.sleep(LATE)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await asyncio.sleep(0)

    run(play)
    assert [world.closed for world in worlds.opened] == [1, 1, 1]


def test_engine_error_is_not_an_environment_failure() -> None:
    class Dead(Engine):
        async def generate(self, *given: Any, **more: Any) -> Any:
            raise RollError("the last engine died")
            yield

    worlds = Worlds(lambda: World([DONE]))

    async def play() -> None:
        with pytest.raises(RollError, match="the last engine died"):
            await groups(episodes(worlds, Dead(counting()))).sample(task(), None)
        await asyncio.sleep(0)

    run(play)
    assert [world.closed for world in worlds.opened] == [1, 1]


def test_metrics_say_what_happened() -> None:
    async def play() -> RolloutGroup:
        left = iter([World([said("a", metrics={"moves": 3.0}), DONE], takes=1.5), World([DONE], takes=0.5)])
        says = Engine(lambda context: "!add(1)" if context.endswith("go|assistant:") else "x")
        return await groups(episodes(Worlds(lambda: next(left)), says)).sample(task(), None)

    metrics = episode_metrics([run(play)])
    expected = {
        "episode/turns_mean": 1.5,
        "episode/turns_max": 2.0,
        "episode/tool_calls": 1.0,
        "episode/tool_errors": 0.0,
        "episode/environment_seconds": 1.75,
        "episode/forks": 0.0,
        "episode/retried": 0.0,
        "episode/completed_fraction": 1.0,
        "episode/deadline_fraction": 0.0,
        f"environment/{DOMAIN}/moves": 1.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert episode_metrics([]) == {}
