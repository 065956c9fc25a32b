"""Runs the code of `docs/environments.md` in an environment process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.tiny.make_image import write_machine_image
from roll.agents.environments.base import Observation, Step
from roll.agents.environments.checked import MOST_MESSAGES, MOST_METRICS, MOST_REPLY, MOST_STATE
from roll.agents.environments.picture_contents import file_in
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.tools import MOST_CHARACTERS
from roll.config.schema.environments import EnvironmentConfig
from roll.config.shipped import known_environments
from roll.data.picture_files import decoded
from tests import limits
from tests.unit.docs.pages import blocks, read
from tests.unit.environments.running import calls, says
from tests.unit.rewards.running import run

PAGE = "docs/environments.md"
LINES = {"my_environments.py": 30, "my_tools.py": 11, "my_containers.py": 26, "my_pictures.py": 34}


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, EnvironmentConfig]:
    """Make the page's modules importable, and return its environments by domain."""
    monkeypatch.syspath_prepend(tmp_path)
    found: dict[str, Any] = {}
    for block in blocks(PAGE):
        if (file := block.option("file")) is not None:
            (tmp_path / file).write_text(block.text, encoding="utf-8")
        elif block.info.startswith("yaml"):
            found |= yaml.safe_load(block.text)["environments"]
    return {name: EnvironmentConfig.model_validate_json(json.dumps(keys)) for name, keys in found.items()}


def played(
    domain: str, section: EnvironmentConfig, *messages: dict[str, Any], sees: bool = False
) -> tuple[Observation, list[Step]]:
    async def go() -> tuple[Observation, list[Step]]:
        process = EnvironmentProcess(domain, section, limits.START, sees)
        try:
            first = await process.open(0, {"seed": 3}, 0)
            return first, [await process.step(0, message) for message in messages]
        finally:
            await process.close()

    return run(go())


def test_what_is_to_be_written_is_short() -> None:
    lengths = {
        file: len(block.text.strip().splitlines())
        for block in blocks(PAGE)
        if (file := block.option("file")) is not None
    }
    assert lengths.keys() == LINES.keys()
    assert all(length <= LINES[file] for file, length in lengths.items()), lengths


def test_the_environment_plays(sections: dict[str, EnvironmentConfig]) -> None:
    number = random.Random(3).randint(1, 50)
    first, steps = played("guess", sections["guess"], says(str(number - 1)), says("what"), says(f" {number}\n"))
    assert "from 1 to 50" in first.messages[0]["content"]
    assert [[message["content"] for message in step.messages] for step in steps] == [
        ["higher"],
        ["that is no number"],
        [],
    ]
    assert [step.done for step in steps] == [False, False, True]
    assert sum(step.reward for step in steps) == pytest.approx(0.8)


def test_the_tool_answers(sections: dict[str, EnvironmentConfig]) -> None:
    asked = calls(("population", '{"town": "Ulm"}'), ("population", '{"town": "Rome"}'))
    first, [step] = played("towns", sections["towns"], asked)
    [tool] = first.tools
    assert tool["function"]["description"] == "Look up how many people live in a town."
    assert tool["function"]["parameters"]["properties"] == {"town": {"type": "string", "description": "Its name."}}
    known, unknown = (message["content"] for message in step.messages)
    assert json.loads(known) == 127_000
    assert unknown.startswith("Error: KeyError")
    assert step.metrics == {"tool_errors": 1.0}


def test_environment_and_tool_show_pictures(sections: dict[str, EnvironmentConfig]) -> None:
    colour = random.Random(3).choice(["red", "blue"])
    asked = calls(("palette", '{"colour": "blue"}'))
    first, [looked, step] = played("colours", sections["colours"], asked, says(colour), sees=True)
    picture, question = first.messages[0]["content"]
    assert decoded(file_in(picture)).getpixel((0, 0)) == {"red": (255, 0, 0), "blue": (0, 0, 255)}[colour]
    assert question["text"] == "Which colour?" and step.reward == 1.0
    text, shown = looked.messages[0]["content"]
    assert text["text"] == "This is blue:" and decoded(file_in(shown)).getpixel((0, 0)) == (0, 0, 255)


def test_an_environment_with_a_container_plays(sections: dict[str, EnvironmentConfig], tmp_path: Path) -> None:
    write_machine_image(tmp_path / "image")
    keys = {"environment": "my_containers:Sorted", "image": str(tmp_path / "image")}
    section = EnvironmentConfig.model_validate({**keys, "container": {"cache": str(tmp_path / "cache")}})
    for command, reward in (("sort names -o names", 0.0), ("printf 'Ada\\nEve\\n' > names", 1.0)):  # it has no `sort`
        _, [step] = played("sorted", section, says(command))
        assert step.reward == reward


def test_environments_page_lists_environments_and_limits() -> None:
    text = read(PAGE)
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == sorted(
        known_environments(), key=text.index
    )
    assert (
        f"{MOST_MESSAGES} messages, {MOST_REPLY >> 20} MiB, {MOST_METRICS} metrics, {MOST_STATE:,} characters of state"
        in text
    )
    assert f"{MOST_CHARACTERS:,} characters" in text
