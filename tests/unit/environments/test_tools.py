"""Tools: their schemas, compared with those of transformers, and the answers to a model's calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel
from transformers.utils.chat_template_utils import get_json_schema

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.child import Hosted
from roll.agents.tools import MOST_CHARACTERS, MOST_ERROR, Tools, calls_for, descriptions, function_tool
from tests.unit.environments.running import calls
from tests.unit.rewards.running import run


def plain(city: str, days: int = 3, rain: bool = True) -> str:
    """Forecast the weather.

    The forecast is for one city.

    Args:
        city: The city, by its full name.
        days: Number of days.
        rain: Whether to include rain.

    Returns:
        The forecast.
    """
    return f"{city} {days} {rain}"


def nested(shares: list[float], named: dict[str, int], unit: str | None) -> list[float]:
    """Divide an amount.

    Args:
        shares: Share of each part.
        named: Parts by name.
        unit: Unit of the shares.
    """
    return shares


def chosen(unit: Literal["metre", "mile"], title: str = "") -> dict[str, str]:
    """Choose a unit."""
    return {"unit": unit, "title": title}


async def awaited(text: str) -> str:
    """Echo."""
    return text


def raises(text: str) -> str:
    """Fail."""
    raise ValueError("no " + text)


def long(count: int) -> str:
    """Return a long text."""
    return "x" * count


TOOLS = Tools([plain, nested, chosen, raises, long])


def normal(schema: Any) -> Any:
    """Return a schema without what differs between roll and transformers: defaults, return values, and the form of
    optional types.
    """
    if isinstance(schema, list):
        return [normal(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: normal(value) for key, value in schema.items() if key not in ("default", "return")}
    if (either := kept.pop("anyOf", None)) is not None:
        [kept["type"]] = [one["type"] for one in either if one["type"] != "null"]
        kept["nullable"] = True
    return kept


@pytest.mark.parametrize("function", [plain, nested])
def test_a_schema_is_that_of_transformers(function: Any) -> None:
    assert normal(function_tool(function).schema) == normal(get_json_schema(function))


def test_tool_schema_allows_title_and_states_defaults() -> None:
    parameters = function_tool(chosen).schema["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {
            "unit": {"enum": ["metre", "mile"], "type": "string"},
            "title": {"default": "", "type": "string"},
        },
        "required": ["unit"],
    }


def test_calls_are_answered() -> None:
    [call, second] = calls(("plain", '{"city": "Ulm", "days": 2}'), ("chosen", '{"unit": "mile"}'))["tool_calls"]
    assert TOOLS.answer(call) == (
        {"role": "tool", "tool_call_id": "call-0", "name": "plain", "content": "Ulm 2 True"},
        False,
    )
    assert json.loads(TOOLS.answer(second).message["content"]) == {"unit": "mile", "title": ""}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("weather", "{}", "Error: there is no tool 'weather'; known tools: plain, nested, chosen, raises, long"),
        ("plain", "{}", "Error: the arguments of 'plain' do not fit: city: Field required"),
        ("plain", '{"city": 3}', "Error: the arguments of 'plain' do not fit: city: Input should be a valid string"),
        (
            "plain",
            '{"city": "a", "town": "b"}',
            "Error: the arguments of 'plain' do not fit: town: Extra inputs are not permitted",
        ),
        ("plain", '{"city": ', "Error: the arguments of 'plain' do not fit: the arguments: Invalid JSON"),
        ("plain", "[1]", "Error: the arguments of 'plain' do not fit: the arguments: Input should be an object"),
        (
            "chosen",
            '{"unit": "yard"}',
            "Error: the arguments of 'chosen' do not fit: unit: Input should be 'metre' or 'mile'",
        ),
        ("raises", '{"text": "way"}', "Error: ValueError: no way"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(name: str, given: str, said: str) -> None:
    answer = TOOLS.answer(calls((name, given))["tool_calls"][0])
    assert answer.failed
    assert answer.message["content"].startswith(said)
    assert len(answer.message["content"]) <= MOST_ERROR


def test_a_long_answer_is_cut() -> None:
    [call] = calls(("long", f'{{"count": {MOST_CHARACTERS + 7}}}'))["tool_calls"]
    assert TOOLS.answer(call).message["content"] == "x" * MOST_CHARACTERS + "\n... 7 characters more"


class Echo:
    """Environment that answers with the names of the calls that it received."""

    def reset(self, row: Any, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "begin"}], [function_tool(awaited).schema])

    def step(self, message: Any) -> Step:
        names = [call["function"]["name"] for call in message["tool_calls"]]
        return Step([{"role": "user", "content": " ".join(names)}], 2.0, metrics={"tool_errors": 1.0})

    def close(self) -> None: ...


def test_tools_of_domain_join_those_of_environment() -> None:
    async def go() -> tuple[Observation, Step, Step]:
        hosted = Hosted(Echo(), Tools([plain, raises]))
        ours = calls(("plain", '{"city": "Ulm"}'), ("raises", '{"text": "way"}'))
        both = calls(("plain", '{"city": "Ulm"}'), ("awaited", "{}"), ("raises", "{}"))
        return await hosted.reset({}, 0), await hosted.step(ours), await hosted.step(both)

    first, ours, both = run(go())
    assert [tool["function"]["name"] for tool in first.tools] == ["awaited", "plain", "raises"]
    assert [message["content"] for message in ours.messages] == ["Ulm 3 True", "Error: ValueError: no way"]
    assert (ours.reward, ours.done, ours.metrics) == (0.0, False, {"tool_errors": 1.0})
    assert [message["content"] for message in both.messages][::2] == ["Ulm 3 True", "awaited"]
    assert (both.reward, both.metrics) == (2.0, {"tool_errors": 2.0})


def test_asynchronous_tools_are_awaited() -> None:
    [call] = calls(("awaited", '{"text": "echo"}'))["tool_calls"]
    assert run(Tools([awaited]).answer_awaited(call)).message["content"] == "echo"
    assert Tools([awaited]).all_async and not Tools([plain]).any_async


def test_message_without_calls_yields_no_calls() -> None:
    assert calls_for(TOOLS.names, {"role": "assistant", "content": "text"}) == ([], [])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="named 'plain'"):
        Tools([plain, plain])


@dataclass
class Town:
    name: str
    people: Any


class Place(BaseModel):
    name: str


class Kind(Enum):
    CITY = "city"


VALUES: list[tuple[Any, str]] = [
    ("Köln", "Köln"),
    (["Köln", "東京"], '["Köln", "東京"]'),
    ({"Köln": 1}, '{"Köln": 1}'),
    (np.int64(127_000), "127000"),
    ([np.float64(0.5), np.bool_(True)], "[0.5, true]"),
    (np.arange(3), "[0, 1, 2]"),
    (Town("Ulm", np.int32(7)), '{"name": "Ulm", "people": 7}'),
    ([Place(name="Ulm")], '[{"name": "Ulm"}]'),
    ({"kind": Kind.CITY, "day": date(2025, 1, 2)}, '{"kind": "city", "day": "2025-01-02"}'),
    ({"b", "a"}, '["a", "b"]'),
    ({"a": 1}.values(), "[1]"),
    (None, "null"),
    (True, "true"),
]


@pytest.mark.parametrize(("value", "text"), VALUES)
def test_a_value_is_written_as_it_is(value: Any, text: str) -> None:
    def give() -> Any:
        """Give a value."""
        return value

    answer = Tools([give]).answer(calls(("give", "{}"))["tool_calls"][0])
    assert (answer.message["content"], answer.failed) == (text, False)


@pytest.mark.parametrize("value", [object(), [object()], iter("ab"), 1j, {np.int64(1): 2}])
def test_a_value_without_text_is_an_error(value: Any) -> None:
    def give() -> Any:
        """Give a value."""
        return value

    answer = Tools([give]).answer(calls(("give", "{}"))["tool_calls"][0])
    assert answer.failed and "JSON" in answer.message["content"] and " at 0x" not in answer.message["content"]


def falsy(
    exact: bool = False, count: int = 0, name: str = "", none: str | None = None, flag: Literal[False] = False
) -> str:
    """Have defaults."""
    return ""


def titled(made: dict[str, str] = {"title": "a"}) -> str:  # noqa: B006
    """Have a default with a title."""
    return ""


def test_a_schema_keeps_every_default() -> None:
    properties = function_tool(falsy).schema["function"]["parameters"]["properties"]
    assert [one["default"] for one in properties.values()] == [False, 0, "", None, False]
    assert properties["flag"]["const"] is False
    assert function_tool(titled).schema["function"]["parameters"]["properties"]["made"]["default"] == {"title": "a"}
    assert "additionalProperties" not in function_tool(falsy).schema["function"]["parameters"]


def renamed(town: str) -> str:
    """Look up.

    Args:
        city: Its name.
    """
    return town


def unwritten(town: str) -> str:
    """Look up.

    Args:
        The town to look up.
    """
    return town


async def streams(town: str) -> AsyncIterator[str]:
    """Look up."""
    yield town


def yields(town: str) -> Iterator[str]:
    """Look up."""
    yield town


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (renamed, "'renamed' describes 'city', but its parameters are town"),
        (unwritten, "'The town to look up.' under Args"),
        (streams, "'streams' is a generator"),
        (yields, "'yields' is a generator"),
    ],
)
def test_what_would_be_dropped_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tools([function])


def test_descriptions_are_read_whole() -> None:
    said, described = descriptions(
        "Look up.\n\nArgs:\n  town (str, optional): Its\n    name: in full.\n  day:\n    The day.\n\n"
        "Towns are German.\n\nReturns:\n  The town."
    )
    assert said == "Look up.\n\nTowns are German."
    assert described == {"town": "Its name: in full.", "day": "The day."}
