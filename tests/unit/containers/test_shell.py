"""The environment `shell`: commands of the policy, hidden tests as the verdict, and what a policy cannot do to it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.container import ContainerBounds, ContainerLost, ContainerSettings
from roll.agents.containers.layout import BadImage
from roll.agents.containers.pool import Containers
from roll.agents.environments.base import Observation, Step
from roll.agents.environments.shell import Shell
from tests import limits
from tests.unit.environments.running import calls, says
from tests.unit.rewards.running import descendants

ROW: dict[str, Any] = {
    "prompt": "Add, do not subtract.",
    "files": {"sum": "echo $(($1-$2))\n"},
    "tests": {"judge": '[ "$(sh sum 3 2)" = 5 ]\n'},
    "verify": "sh judge",
}
REPAIR = "echo 'echo $(($1+$2))' > sum"
LIMITS = {"command_seconds": limits.CALL, "verify_seconds": limits.CALL, "command_pattern": ".*"}


@pytest.fixture
def settings(image: Path, cache: Path) -> ContainerSettings:
    bounds = ContainerBounds(memory_mib=64, disk_mib=16, processes=20)
    return ContainerSettings(str(image), bounds=bounds, warm=0, cache=str(cache))


def played(
    settings: ContainerSettings, row: dict[str, Any], messages: Sequence[dict[str, Any]], **keys: Any
) -> tuple[Observation, list[Step]]:
    async def play() -> tuple[Observation, list[Step]]:
        world = Shell(Containers(settings), **{**LIMITS, **keys})
        try:
            first = await world.reset(row, 0)
            return first, [await world.step(message) for message in messages]
        finally:
            await world.close()

    return asyncio.run(play())


def test_it_is_repaired_step_by_step(settings: ContainerSettings) -> None:
    commands = ["sh sum 3 2", "cat missing", REPAIR, "sh sum 3 2", "submit"]
    first, steps = played(settings, ROW, [says(command) for command in commands])
    assert first.messages[0]["content"].startswith("Add, do not subtract.") and "/repo" in first.messages[0]["content"]
    told = [step.messages[0]["content"] for step in steps[:-1]]
    assert told[0] == "1" and told[1].endswith("(status 1)") and told[2:] == ["(no output)", "5"]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert (steps[-1].reward, steps[-1].metrics["success"]) == (1.0, 1.0)
    assert sum(step.metrics.get("commands", 0.0) for step in steps) == 4


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("true", 0.0),
        (REPAIR, 1.0),
        ("rm -rf /repo; mkdir /repo; echo 'exit 0' > /repo/judge", 0.0),
        ("mkdir judge; touch judge/x", 0.0),
        (f"{REPAIR}; mkdir judge; touch judge/x", 1.0),
        ("rm /usr/bin/sh", 0.0),
        ("while :; do echo 'exit 0' > judge; done >/dev/null 2>&1 &", 0.0),
        ("ln -s sum again; sleep 1000 & kill -9 $$", 0.0),
    ],
)
def test_only_the_work_folder_is_judged(settings: ContainerSettings, command: str, reward: float) -> None:
    _, [step] = played(settings, ROW, [says(command)], max_steps=1)
    assert (step.done, step.reward, step.metrics["success"]) == (True, reward, reward)


def test_the_same_container_is_judged_if_asked_for(settings: ContainerSettings) -> None:
    row = {**ROW, "tests": {}, "verify": "cat /tmp/left > /tmp/reward", "reward_file": "/tmp/reward"}
    for judged_in, text, reward, unreadable in (
        ("same", "0.25", 0.25, 0.0),
        ("same", "nan", 0.0, 1.0),
        ("same", "", 0.0, 1.0),
        ("fresh", "0.25", 0.0, 1.0),
    ):
        command = says(f"printf '%s' '{text}' > /tmp/left")
        _, [step] = played(settings, {**row, "judged_in": judged_in}, [command], max_steps=1)
        assert (step.reward, step.metrics.get("unreadable_work", 0.0)) == (reward, unreadable), (judged_in, text)


def test_a_late_command_is_told(settings: ContainerSettings) -> None:
    seconds = 5 * limits.EXPIRY  # a busy host starts slowly
    _, [late, ended] = played(settings, ROW, [says("echo begun; sleep 1000"), says("submit")], command_seconds=seconds)
    assert late.messages[0]["content"].startswith("begun\n(killed") and not late.done
    assert (ended.reward, ended.metrics["late_commands"]) == (0.0, 1.0)


def test_a_late_verdict_is_no_success(settings: ContainerSettings) -> None:
    row = {**ROW, "verify": "sleep 1000"}
    _, [step] = played(settings, row, [says("submit")], verify_seconds=limits.EXPIRY)
    assert (step.reward, step.metrics["verify_late"]) == (0.0, 1.0)


def test_commands_are_found_in_fences(settings: ContainerSettings) -> None:
    keys = {**LIMITS}
    del keys["command_pattern"]

    async def play() -> list[Step]:
        world = Shell(Containers(settings), **keys)
        await world.reset(ROW, 0)
        steps = [await world.step(says(text)) for text in ("ls", "<think>```ls```</think>So:\n```bash\nls\n```\n")]
        await world.close()
        return steps

    without, within = asyncio.run(play())
    assert (without.metrics, within.metrics) == ({"invalid_commands": 1.0}, {"commands": 1.0})
    assert within.messages[0]["content"] == "sum"


def test_the_policy_may_call_a_tool(settings: ContainerSettings) -> None:
    messages = [
        calls(("shell", json.dumps({"command": REPAIR})), ("shell", json.dumps({"command": "sh sum 3 2"}))),
        calls(("shell", json.dumps({"order": "ls"}))),
        says("Done."),
    ]
    first, steps = played(settings, ROW, messages, as_tool=True)
    assert [tool["function"]["name"] for tool in first.tools] == ["shell"]
    assert [answer["content"] for answer in steps[0].messages] == ["(no output)", "5"]
    assert steps[1].metrics["tool_errors"] == 1.0 and (steps[2].done, steps[2].reward) == (True, 1.0)


def test_files_may_be_programs_and_json(settings: ContainerSettings) -> None:
    program = {"base64": base64.b64encode(b"#!/bin/sh\nexit 0").decode(), "mode": 0o755}
    row = {**ROW, "files": json.dumps({"/opt/run": program}), "tests": None, "verify": "/opt/run"}
    for judged_in, reward in (("same", 1.0), ("fresh", 0.0)):
        _, [step] = played(settings, row, [says("submit")], judged_in=judged_in)
        assert step.reward == reward


@pytest.mark.parametrize(
    ("row", "keys", "value"),
    [
        ({"verify": None}, {}, "verify"),
        ({"prompt": None}, {}, "prompt"),
        ({"files": ["sum"]}, {}, "files"),
        ({"files": {"sum": 1}}, {}, "sum"),
        ({"files": {"sum": {"base64": "&"}}}, {}, "sum"),
        ({"work_folder": "/"}, {}, "'/'"),
        ({"judged_in": "there"}, {}, "there"),
        ({}, {"judged_in": "there"}, "there"),
        ({}, {"max_steps": 0}, "max_steps"),
        ({}, {"command_pattern": "("}, "command_pattern"),
    ],
)
def test_a_bad_row_is_refused(
    settings: ContainerSettings, row: dict[str, Any], keys: dict[str, Any], value: str
) -> None:
    with pytest.raises(ValueError, match=value):
        played(settings, {**ROW, **row}, [], **keys)


@pytest.mark.parametrize(
    ("given", "image", "code"),
    [
        ({}, None, "missing"),
        ({"image": "./nowhere"}, None, "not_found"),
        ({"image": "no-such-image:1"}, None, "not_found"),
        ({"engine": "docker", "image": "some-image:1"}, None, "not_installed"),
        ({"image": "/"}, None, "unreadable"),
        ({}, "./nowhere", "not_found"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(
    given: dict[str, Any], image: str | None, code: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no podman, no docker
    with pytest.raises(BadImage) as caught:
        played(ContainerSettings(**given, cache=str(cache)), {**ROW, "image": image}, [])
    assert caught.value.code == code


def test_a_broken_container_is_no_verdict(settings: ContainerSettings) -> None:
    async def play() -> None:
        world = Shell(Containers(settings), **LIMITS)
        await world.reset(ROW, 0)
        assert isinstance(world._container, BubblewrapContainer)
        [first] = descendants(world._container._process.pid)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ContainerLost):
            await world.step(says("submit"))
        await world.close()

    asyncio.run(play())
