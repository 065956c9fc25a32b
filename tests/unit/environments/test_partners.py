"""Environments that ask partners, in a process: a game of two players, and critiques of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.agents.environments.base import Ask, Observation, Step
from roll.agents.environments.critique import PROMPT, REVISION, Critique, filled
from roll.agents.environments.process import EnvironmentProcess
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import ConfigError, EnvironmentFailed
from tests import limits
from tests.faults import coded
from tests.unit.environments.running import says
from tests.unit.rewards.running import run

GAME = '''
import asyncio
import time

from roll.agents.environments.base import Ask, Observation, Step


class Countdown:
    """Both players in turn take 1 to 3 of 7 stones. Who takes the last one wins."""

    def reset(self, row, seed):
        self.left = 7
        return Observation([{"role": "user", "content": "7 stones. How many do you take?"}])

    def step(self, message):
        self.left -= int(message["content"])
        if self.left == 0:
            return Step(reward=1.0, done=True)
        return Step(asks=Ask("rival", [{"role": "user", "content": f"{self.left} stones."}]), metrics={"moves": 1})

    def hear(self, partner, text):
        if text == "sleep":
            time.sleep(3600)
        if text == "raise":
            raise KeyError("no move")
        self.left -= int(text)
        if self.left == 0:
            return Step(reward=-1.0, done=True)
        told = f"{partner} took {text}, {self.left} are left."
        return Step([{"role": "user", "content": told}], metrics={"moves": 1})

    def close(self):
        pass


class Awaited(Countdown):
    async def reset(self, row, seed):
        return super().reset(row, seed)

    async def step(self, message):
        return super().step(message)

    async def hear(self, partner, text):
        await asyncio.sleep(0)
        return super().hear(partner, text)


class Deaf:
    reset, step, close = Countdown.reset, Countdown.step, Countdown.close


class Mumbling(Countdown):
    def hear(self, text):
        return Step(done=True)


class Wrong(Countdown):
    def step(self, message):
        ask = Ask("rival", [{"role": "user", "content": "?"}])
        return {
            "name": Step(asks="rival"),
            "empty": Step(asks=Ask("rival", [])),
            "wordless": Step(asks=Ask("rival", [{"role": "user", "content": None}])),
            "role": Step(asks=Ask("rival", [{"role": "judge", "content": "x"}])),
            "done": Step(asks=ask, done=True),
        }[message["content"]]
'''
PARTNERS = {"rival": {"type": "live"}}


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "games.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)


def section(name: str, **keys: Any) -> EnvironmentConfig:
    keys = {"step_timeout": limits.CALL, "episode_timeout": limits.RUN, "partners": PARTNERS, **keys}
    return EnvironmentConfig.model_validate({"environment": name, **keys})


def played(section: EnvironmentConfig, row: dict[str, Any], *turns: str | tuple[str, str]) -> list[Observation | Step]:
    """Play the turns, texts of the policy and pairs of partner and text, and return what the environment returns."""

    async def go() -> list[Observation | Step]:
        process = EnvironmentProcess("game", section, limits.START)
        try:
            found: list[Observation | Step] = [await process.open(0, row, 0)]
            for turn in turns:
                found.append(
                    await process.step(0, says(turn)) if isinstance(turn, str) else await process.hear(0, *turn)
                )
            return found
        finally:
            await process.close()

    return run(go())


@pytest.mark.usefixtures("games")
@pytest.mark.parametrize("name", ["games:Countdown", "games:Awaited"])
def test_a_game_of_two_players(name: str) -> None:
    _, asks, hears, asks_again, lost = played(section(name), {}, "3", ("rival", "2"), "1", ("rival", "1"))
    assert isinstance(asks, Step) and asks.asks == Ask("rival", [{"role": "user", "content": "4 stones."}])
    assert isinstance(hears, Step) and hears.messages[0]["content"] == "rival took 2, 2 are left."
    assert isinstance(asks_again, Step) and asks_again.asks is not None and asks_again.metrics == {"moves": 1.0}
    assert isinstance(lost, Step) and (lost.reward, lost.done, lost.asks) == (-1.0, True, None)


@pytest.mark.usefixtures("games")
@pytest.mark.parametrize(
    ("turn", "why", "reason"),
    [("raise", "KeyError: 'no move'", "crashed"), ("sleep", "hear did not end", "timed_out")],
)
def test_failing_to_hear_breaks_the_episode(turn: str, why: str, reason: str) -> None:
    keys = {"step_timeout": limits.EXPIRY} if turn == "sleep" else {}
    with pytest.raises(EnvironmentFailed) as error:
        played(section("games:Countdown", **keys), {}, "3", ("rival", turn))
    assert why in error.value.why and error.value.reason == reason


@pytest.mark.usefixtures("games")
@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("name", "not an Ask"),
        ("empty", "at least one message"),
        ("wordless", "must have a text"),
        ("role", "a role of"),
        ("done", "is done"),
    ],
)
def test_malformed_asks_break_the_episode(turn: str, why: str) -> None:
    with pytest.raises(EnvironmentFailed) as error:
        played(section("games:Wrong"), {}, turn)
    assert why in error.value.why


@pytest.mark.usefixtures("games")
@pytest.mark.parametrize("name", ["games:Deaf", "games:Mumbling"])
def test_an_environment_with_partners_must_hear_them(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        played(section(name), {})
    assert coded(error.value.faults) == [("unfit", "environments.game.environment")]
    played(section(name, partners={}), {})  # without partners, nothing is to be heard


ROW = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+{response}?"}],
    "answer": "4",
}


def test_critiques_are_turns_before_the_last_answer() -> None:
    keys = {"environment_args": {"critiques": 2}, "partners": {"critic": {"type": "live"}}}
    turns = ("<think>hm</think>5", ("critic", "check {response}"), "3", ("critic", ""), "4")
    first, *steps = played(section("critique", **keys), ROW, *turns)
    assert isinstance(first, Observation) and list(first.messages) == ROW["messages"]
    asked, told, again, empty, last = (step for step in steps if isinstance(step, Step))
    for step, answer in ((asked, "5"), (again, "3")):
        assert step.asks is not None
        [message] = step.asks.messages
        assert message["content"] == PROMPT.replace("{question}", "2+{response}?", 1).replace(
            "Answer:\n{response}", f"Answer:\n{answer}"
        )
        assert step.asks.partner == "critic" and not step.messages
    assert told.messages[0]["content"] == REVISION.replace("{critique}", "check {response}")
    assert told.metrics == {"critiques": 1.0, "empty_critiques": 0.0}
    assert empty.metrics == {"critiques": 1.0, "empty_critiques": 1.0}
    assert (last.done, last.reward, last.asks) == (True, 0.0, None)


def test_critic_sees_the_reference_only_if_asked() -> None:
    keys = {"partners": {"critic": {"type": "live"}}, "environment_args": {"prompt": "{response} or {reference}?"}}
    _, asked = played(section("critique", **keys), ROW, "5")
    assert isinstance(asked, Step) and asked.asks and asked.asks.messages[0]["content"] == "5 or 4?"
    assert "4" not in PROMPT
    with pytest.raises(EnvironmentFailed, match="ground_truth"):
        played(section("critique", **keys), {"prompt": "2+2?"})


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"critiques": 0}, "at least 1"),
        ({"prompt": "Is it right?"}, "{response}"),
        ({"revision": "Again!"}, "{critique}"),
    ],
)
def test_arguments_without_effect_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Critique(**keys)


def test_inserted_texts_are_not_filled_in() -> None:
    texts = {"question": "{response}", "response": "{question} {x}"}
    assert filled("{question}-{response}-{critique}", texts) == "{response}-{question} {x}-{critique}"
