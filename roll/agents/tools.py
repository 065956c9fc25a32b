"""Tools of the policy: Python functions with type hints, their schemas, and the answers to calls.

pydantic generates the schemas and parses the arguments of calls. `transformers.utils.get_json_schema` is not used,
because it would import torch in every environment process; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from roll.agents.environments.base import Message
from roll.agents.environments.picture_contents import content_of, is_shown
from roll.agents.tool_failures import note_failed, note_raised
from roll.agents.tool_values import Unwritable, text_of_value
from roll.data.messages import MessageFault
from roll.data.picture_parts import PictureFault
from roll.errors import EnvironmentFailed

MOST_CHARACTERS = 16384
"""Largest number of characters of an answer to a call. A longer answer is truncated, with a note to the model."""
MOST_ERROR = 500
"""Largest number of characters in the report of a failed call."""
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Examples?):\s*")
ENTRY = re.compile(r"(\w+)(?: \(.*?\))?:(?: +(.*))?")
"""Begin of a parameter's description: its name, possibly its type, and the text."""


NAMED, VALUES = ("properties", "$defs"), ("default", "const", "enum", "examples")
"""Keys of a schema: those whose mappings have names as keys, and those that hold values of a parameter."""


class CallError(Exception):
    """A call that failed or cannot be made, by the policy's fault. The model receives `str()` as the reason.

    A tool may raise it for a call that the policy made wrongly: such failures are only counted.
    """


class BadAnswer(CallError):
    """A tool returned a value that cannot be shown to the model. This is the tool's fault."""


class Answered(NamedTuple):
    """The message to the model that answers a call, and whether the call failed."""

    message: Message
    failed: bool


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """Schema of the tool in the format of OpenAI's API."""
    arguments: type[BaseModel]
    """Model that parses the arguments of a call."""


class Tools:
    """The tools of a domain or of an environment, by name."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Raise ValueError if a function cannot be used as a tool, or two functions have the same name."""
        self._tools: dict[str, Tool] = {}
        for function in functions:
            tool = function_tool(function)
            if tool.name in self._tools:
                raise ValueError(f"two tools are named '{tool.name}'")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schemas of all tools, in their order."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tools."""
        return frozenset(self._tools)

    @property
    def all_async(self) -> bool:
        """Whether all tools are `async def`."""
        return all(inspect.iscoroutinefunction(tool.function) for tool in self._tools.values())

    @property
    def any_async(self) -> bool:
        """Whether at least one tool is `async def`."""
        return any(inspect.iscoroutinefunction(tool.function) for tool in self._tools.values())

    def answer(self, call: Mapping[str, Any]) -> Answered:
        """Call a plain function and return the answer. Exceptions except EnvironmentFailed are answers to the model."""
        try:
            return answered(call, self._begun(call))
        except EnvironmentFailed:
            raise
        except Exception as error:
            return failed_call(call, error)

    async def answer_awaited(self, call: Mapping[str, Any]) -> Answered:
        """Do the same as `answer` for a function that may be `async def`."""
        try:
            value = self._begun(call)
            return answered(call, await value if inspect.isawaitable(value) else value)
        except EnvironmentFailed:
            raise
        except Exception as error:
            return failed_call(call, error)

    def _begun(self, call: Mapping[str, Any]) -> Any:
        function = call["function"]
        if (tool := self._tools.get(str(function["name"]))) is None:
            raise CallError(f"there is no tool '{function['name']}'; known tools: {', '.join(self._tools)}")
        return tool.function(**_arguments(tool, function["arguments"]))


def function_tool(function: Callable[..., Any]) -> Tool:
    """Return the tool for a function, with a schema from its name, docstring (including `Args:`) and type hints.

    Raises:
        ValueError: the function has no docstring or a wrong one, or cannot be called with keyword arguments that JSON
            can express, or yields values. The message gives the reason.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ValueError(f"{function!r:.80} is not a function with a name")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"'{name}' is a generator, which yields values, and a call has one answer")
    said, described = _described(name, function)
    try:
        hints = get_type_hints(function, include_extras=True)
        fields = {
            one.name: _field(name, one, hints, described) for one in inspect.signature(function).parameters.values()
        }
        arguments: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = {"type": "object", **_stripped(arguments.model_json_schema())}
    except ValueError:
        raise
    except Exception as error:  # errors of pydantic and of the user's hints have any type
        raise ValueError(f"'{name}' has a type hint that JSON cannot express: {error}") from error
    schema = {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}
    return Tool(name, function, schema, arguments)


def _described(name: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the descriptions in a function's docstring. Raises ValueError if it does not fit the function."""
    if not (written := inspect.getdoc(function)):
        raise ValueError(f"'{name}' has no docstring, from which the model learns what it does")
    try:
        said, described = descriptions(written)
    except ValueError as error:
        raise ValueError(f"the docstring of '{name}' {error}") from error
    known = list(inspect.signature(function).parameters)
    if unknown := [other for other in described if other not in known]:
        has = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
        raise ValueError(f"the docstring of '{name}' describes '{unknown[0]}', but {has}")
    return said, described


def descriptions(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the descriptions of the function and of each parameter from a docstring in Google's style.

    A section ends at the next one, or at a paragraph that is not indented, which describes the function.

    Raises:
        ValueError: a line under `Args:` describes no parameter. The message continues the docstring's name.
    """
    said, entries, section, before = list[str](), list[str](), "", ""
    for line in docstring.splitlines():
        if (header := SECTION.fullmatch(line)) is not None:
            section = header[1]
        else:
            if line[:1].strip() and not before.strip():
                section = ""
            if section in ("", "Args"):
                (entries if section else said).append(line)
        before = line
    return re.sub(r"\n{3,}", "\n\n", "\n".join(said)).strip(), _entries(entries)


def _entries(lines: Sequence[str]) -> dict[str, str]:
    """Return the descriptions of parameters from the lines under `Args:`. Raises ValueError as `descriptions`."""
    texts: dict[str, list[str]] = {}
    name = ""
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if not line.strip():
            continue
        if line[0] == " " and texts:
            texts[name].append(line)
        elif (entry := ENTRY.fullmatch(line)) is not None:
            name = entry[1]
            texts[name] = [entry[2] or ""]
        else:
            raise ValueError(f"has the line '{line:.60}' under Args, which is not `name: what it means`")
    return {name: " ".join(" ".join(told).split()) for name, told in texts.items()}


def calls_for(names: frozenset[str], message: Message) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return (calls of tools with these names, all other calls) of a message."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return [call for call in calls if call["function"]["name"] in names], [
        call for call in calls if call["function"]["name"] not in names
    ]


def _field(function: str, parameter: inspect.Parameter, hints: Mapping[str, Any], described: Mapping[str, str]) -> Any:
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"'{function}' has the parameter {parameter}, which cannot be passed by keyword")
    if name not in hints:
        raise ValueError(f"the parameter '{name}' of '{function}' has no type hint")
    default = ... if parameter.default is parameter.empty else parameter.default
    return hints[name], Field(default, description=described.get(name))


def _stripped(schema: Any, are_names: bool = False) -> Any:
    """Return a schema without entries that are useless for a model. `are_names`: its keys are always kept.

    Values, such as defaults, stay as they are.
    """
    if isinstance(schema, list):
        return [_stripped(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    useless = (
        ()
        if are_names
        else ("title", "additionalProperties")
        if schema.get("additionalProperties") is False
        else ("title",)
    )
    return {
        key: value if key in VALUES and not are_names else _stripped(value, not are_names and key in NAMED)
        for key, value in schema.items()
        if key not in useless
    }


def _arguments(tool: Tool, text: Any) -> dict[str, Any]:
    """Return the parsed arguments of a call. Raises CallError if they do not match the tool's parameters."""
    try:
        read = tool.arguments.model_validate_json(text or "{}")
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'the arguments'}: {one['msg']}" for one in error.errors()
        )
        raise CallError(f"the arguments of '{tool.name}' do not fit: {problems}") from error
    return {name: getattr(read, name) for name in tool.arguments.model_fields}


def answered(call: Mapping[str, Any], value: Any) -> Answered:
    """Return the message to the model with the value that a tool returned: a text, a picture, a list of texts and
    pictures, or a value that is written as JSON.

    Raises:
        BadAnswer: a picture cannot be used, or is inside another value, or JSON cannot express the value.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not any(map(is_shown, values)):
        try:
            return Answered(_message(call, _cut(text_of_value(value))), failed=False)
        except Unwritable as error:
            raise BadAnswer(f"the answer {error}") from error
    try:
        parts = content_of(values)
    except PictureFault as fault:
        raise BadAnswer(f"the picture {fault}") from fault
    except MessageFault as fault:
        raise BadAnswer(f"beside its pictures, the answer {fault}") from fault
    return Answered(
        _message(call, [{**part, "text": _cut(part["text"])} if "text" in part else part for part in parts]), False
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n... {len(text) - MOST_CHARACTERS} characters more"


def failed_call(call: Mapping[str, Any], error: Exception) -> Answered:
    """Return the message to the model about a failed call. Note it if that is not the policy's fault; see `noting`."""
    name = str(call["function"]["name"])
    if isinstance(error, BadAnswer):
        note_failed(name, str(error), str(error))
    elif not isinstance(error, CallError):
        note_raised(name, error, __file__)
    said = str(error) if isinstance(error, CallError) else f"{type(error).__name__}: {error}"
    return Answered(_message(call, f"Error: {said}"[:MOST_ERROR]), failed=True)


def _message(call: Mapping[str, Any], content: str | Sequence[Mapping[str, Any]]) -> Message:
    return {
        "role": "tool",
        "tool_call_id": str(call.get("id") or ""),
        "name": str(call["function"]["name"]),
        "content": content,
    }
