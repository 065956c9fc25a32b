"""A process that holds environments: `python -m roll.agents.environments.child DESCRIPTOR PARENT`. process.py starts,
monitors and ends it.

A call (reset, step, hear, close) belongs to a session: an environment together with the tools of its domain. If
`reset`, `step`, with partners `hear`, and all tools are `async def`, calls run concurrently. Otherwise the parent sends
one call at a time. That call runs outside an event loop if no method and no tool is `async def` and the domain has no
MCP servers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.agents.environments.base import ENVIRONMENTS, TOOL_ERRORS, MalformedCalls, Message, Observation, Step
from roll.agents.environments.checked import (
    MALFORMED,
    MOST_FAILURES,
    BadReturn,
    Call,
    EnvironmentAssignment,
    failed_message,
    late,
    observation_of,
    reader,
    returned_message,
    step_of,
)
from roll.agents.environments.picture_contents import BLIND
from roll.agents.tool_failures import FirstOfKind, noting
from roll.agents.tools import Answered, Tools, calls_for
from roll.config.shipped import known_environments
from roll.errors import ConfigError, EnvironmentFailed, Fault
from roll.hosted.protocol import Served, serve
from roll.hosted.raised import raised_where
from roll.registry import imported_module, nearest, split_path

if TYPE_CHECKING:  # the import takes a second and is needed only for MCP servers
    from roll.agents.containers.pool import Containers
    from roll.agents.mcp_tools import McpTools

METHODS: Mapping[str, tuple[Any, ...]] = {"reset": ({}, 0), "step": ({},), "close": ()}
"""Methods that an environment must have, with example arguments."""
HEAR: Mapping[str, tuple[Any, ...]] = {"hear": ("", "")}
"""The method that an environment must have if the domain has partners."""
GIVEN = {"reset": "(self, row, seed)", "step": "(self, message)", "hear": "(self, partner, text)", "close": "(self)"}
NEEDED = {"hear": ", which receives the turns of partners"}
REMEDY = dict.fromkeys(METHODS, "define reset, step and close in the class") | {
    "hear": "define hear(self, partner, text) in the class, or remove partners"
}


CONTAINERS = "containers"
"""Parameter of environments that start containers; roll gives it."""


class LoadedEnvironment(NamedTuple):
    """The environment's class and the tools of a domain."""

    make: Callable[..., Any]
    tools: Tools
    side_by_side: bool
    """Whether calls run concurrently: `reset`, `step` and all tools are `async def`."""
    is_plain: bool
    """Whether no method and no tool is `async def`."""
    malformed_calls: MalformedCalls
    takes_containers: bool
    """Whether the class has a parameter `containers`."""


SHOWS = "shows_pictures"
"""Attribute of a class of environments; true if they show pictures."""


def load_environment(assignment: EnvironmentAssignment) -> LoadedEnvironment:
    """Import the class and the tools of a domain.

    Raises:
        ConfigError: a name is not found, a module cannot be imported, a tool is not valid, or the class does not accept
            its `environment_args`, lacks a method of an environment, or has an invalid `malformed_calls`.
    """
    place, environment = f"environments.{assignment.domain}", assignment.environment
    make = _class(environment, place)
    takes_containers = CONTAINERS in inspect.signature(make).parameters
    try:
        inspect.signature(make).bind(**assignment.environment_args, **({CONTAINERS: None} if takes_containers else {}))
    except TypeError as error:
        takes = f"the class accepts {inspect.signature(make)}"
        raise ConfigError(
            Fault(f"{place}.environment_args", f"does not fit '{environment}': {error}", takes, "unfit")
        ) from error
    if wrong := _wrong_arguments(make, assignment):
        raise ConfigError(*wrong)
    methods = {**METHODS, **(HEAR if assignment.partners else {})}
    if faults := [
        fault for name in methods for fault in _method_faults(make, name, environment, f"{place}.environment")
    ]:
        raise ConfigError(*faults)
    malformed_calls = getattr(make, "malformed_calls", "answer")
    if malformed_calls not in MALFORMED:
        problem = f"'{environment}' has malformed_calls {malformed_calls!r:.80}"
        raise ConfigError(
            Fault(f"{place}.environment", problem, f"set it to one of {', '.join(MALFORMED)}", "not_allowed")
        )
    if assignment.containers.image is not None and not takes_containers:
        problem = f"set, but '{environment}' has no parameter '{CONTAINERS}', so it starts no container"
        raise ConfigError(Fault(f"{place}.image", problem, "remove it, or set environment: shell", "unread"))
    if getattr(make, SHOWS, False) and not assignment.sees:
        problem, remedy = f"'{environment}' {BLIND.partition(':')[0]}", BLIND.partition(": ")[2]
        raise ConfigError(Fault(f"{place}.environment", problem, remedy, "unfit"))
    known = _tools(assignment.tools, f"{place}.tools")
    called = [name for name in methods if name != "close"]
    side_by_side = all(inspect.iscoroutinefunction(getattr(make, name)) for name in called) and known.all_async
    is_plain = not any(inspect.iscoroutinefunction(getattr(make, name)) for name in methods) and not known.any_async
    return LoadedEnvironment(make, known, side_by_side, is_plain, malformed_calls, takes_containers)


def _wrong_arguments(make: Callable[..., Any], assignment: EnvironmentAssignment) -> list[Fault]:
    """Return the faults of `environment_args` whose values are not of the annotated types."""
    if not assignment.environment_args:
        return []
    from roll.config.load.user_code import argument_faults  # the import takes 0.2 s

    place = ("environments", assignment.domain, "environment_args")
    return argument_faults(make, assignment.environment_args, place, given=(CONTAINERS,))


def _class(name: str, place: str) -> Any:
    key, known = f"{place}.environment", known_environments()
    remedy = f"name one of {', '.join(known)}{nearest(name, known)}, or your own class as `package.module:Class`"
    module_name, class_name = split_path(name)
    if not class_name and name not in known:
        raise ConfigError(Fault(key, f"no environment is named '{name}'", remedy, "unknown_name"))
    found = _imported(module_name if class_name else f"roll.agents.environments.{name}", name, key, remedy)
    made = getattr(found, class_name, None) if class_name else ENVIRONMENTS.get(name)
    if not isinstance(made, type):
        raise ConfigError(
            Fault(key, f"no environment is named '{name}': {found.__name__} has no such class", remedy, "not_found")
        )
    return made


def _imported(module: str, name: str, key: str, remedy: str) -> Any:
    try:
        return imported_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(Fault(key, f"'{name}' is not found: {error}", remedy, "not_found")) from error
    except Exception as error:
        problem = f"'{name}' cannot be imported: {raised_where(error, importlib.__file__)}"
        raise ConfigError(Fault(key, problem, "fix the module", "failed")) from error


def _method_faults(make: Any, name: str, environment: str, key: str) -> list[Fault]:
    method = getattr(make, name, None)
    if not callable(method):
        return [Fault(key, f"'{environment}' has no method '{name}'{NEEDED.get(name, '')}", REMEDY[name], "unfit")]
    try:
        inspect.signature(method).bind(None, *{**METHODS, **HEAR}[name])
    except TypeError as error:
        given = GIVEN[name]
        return [
            Fault(
                key,
                f"'{environment}.{name}' cannot be called as {name}{given}: {error}",
                f"give it the parameters {given}",
                "unfit",
            )
        ]
    return []


def _tools(names: tuple[str, ...], key: str) -> Tools:
    functions = []
    for name in names:
        module_name, function_name = split_path(name)
        if not function_name:
            raise ConfigError(
                Fault(
                    key,
                    f"'{name}' is not the name of a tool",
                    "name each tool as `package.module:function`",
                    "malformed",
                )
            )
        module = _imported(module_name, name, key, "name each tool as `package.module:function`")
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ConfigError(
                Fault(
                    key,
                    f"'{name}' is not found: {module_name} has no such function",
                    "name a function of the module",
                    "not_found",
                )
            )
        functions.append(function)
    try:
        return Tools(functions)
    except ValueError as error:
        remedy = (
            "give it a docstring that describes its own parameters alone, and every parameter a name and a type hint "
            "that JSON can express; it returns its answer"
        )
        raise ConfigError(Fault(key, str(error), remedy, "unfit")) from error


class Hosted:
    """Answers calls of the domain's tools, and passes all other messages and calls to the environment."""

    def __init__(self, environment: Any, tools: Tools, servers: McpTools | None = None, sees: bool = False) -> None:
        """`sees`: the policy sees pictures."""
        self._environment, self._tools, self._servers = environment, tools, servers
        self._sees, self._read = sees, reader(sees)

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Reset the environment. Return its observation with the domain's tools. Raises BadReturn if it is invalid."""
        if self._servers is not None:
            await self._servers.open()
        observation = observation_of(await _finished(self._environment.reset(row, seed)), self._read)
        schemas = [*observation.tools, *self._tools.schemas, *(self._servers.schemas if self._servers else ())]
        named = Counter(tool["function"]["name"] for tool in schemas)
        if taken := [name for name, count in named.items() if count > 1]:
            raise BadReturn(
                f"two tools are named '{min(taken)}'; names must be unique among the environment's tools, `tools` and "
                f"`mcp`"
            )
        return replace(observation, tools=schemas)

    async def step(self, message: Message) -> Step:
        """Return a step with the answers of the domain's tools, followed by the environment's messages.

        Messages that call only tools of the domain do not reach the environment. Raises BadReturn if the environment's
        step is invalid.
        """
        ours, others = calls_for(self._tools.names | (self._servers.names if self._servers else frozenset()), message)
        if not ours:
            return step_of(await _finished(self._environment.step(message)), self._read)
        answers = await self._answers(ours)
        messages, failed = [answer.message for answer in answers], float(sum(answer.failed for answer in answers))
        if not others:
            return Step(messages, metrics={TOOL_ERRORS: failed})
        step = step_of(await _finished(self._environment.step({**message, "tool_calls": others})), self._read)
        metrics = {**step.metrics, TOOL_ERRORS: step.metrics.get(TOOL_ERRORS, 0.0) + failed}
        return replace(step, messages=[*messages, *step.messages], metrics=metrics)

    async def hear(self, partner: str, text: str) -> Step:
        """Pass a partner's turn to the environment. Raises BadReturn if the step that it returns is invalid."""
        return step_of(await _finished(self._environment.hear(partner, text)), self._read)

    async def close(self) -> None:
        """Close the environment and the servers."""
        try:
            await _finished(self._environment.close())
        finally:
            if self._servers is not None:
                await self._servers.close()

    async def _answers(self, calls: Sequence[Mapping[str, Any]]) -> list[Answered]:
        """Make the calls: those of servers concurrently, those of functions in turn. Return the answers in order.

        Raises EnvironmentFailed if a tool shows a picture, and the policy sees none.
        """
        answers = await self._made(calls)
        for answer in answers if not self._sees else ():
            if not isinstance(answer.message["content"], str):
                raise EnvironmentFailed(f"the tool '{answer.message['name']}' {BLIND}")
        return answers

    async def _made(self, calls: Sequence[Mapping[str, Any]]) -> list[Answered]:
        servers = self._servers
        if servers is None:
            return [await self._tools.answer_awaited(call) for call in calls]
        asking = {
            number: servers.answer(call)
            for number, call in enumerate(calls)
            if call["function"]["name"] in servers.names
        }
        served = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
        return [
            served[number] if number in served else await self._tools.answer_awaited(call)
            for number, call in enumerate(calls)
        ]


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


Returned = Observation | Step | None


class Sessions(Served[Call]):
    """The environments of this process, by session number."""

    def __init__(self, assignment: EnvironmentAssignment) -> None:
        self._assignment, self._loaded = assignment, load_environment(assignment)
        self.side_by_side, self.traits = self._loaded.side_by_side, self._loaded.malformed_calls
        self._containers = self._pool(assignment) if self._loaded.takes_containers else None
        self._first = FirstOfKind()
        self._hosted: dict[int, Hosted] = {}
        self._running: dict[int, asyncio.Task[Any] | None] = {}
        self._runner = None if self._loaded.is_plain and not assignment.mcp else asyncio.Runner()

    def calls(self, request: Sequence[Call]) -> Sequence[Call]:
        return request

    def reply(self, call: Call) -> bytes:
        finish = _finished_at_once if self._runner is None else self._runner.run
        return finish(self.awaited_reply(call))

    async def awaited_reply(self, call: Call) -> bytes:
        with noting() as failures:
            returned = await self._returned(call)
        told = failures if isinstance(returned, Step) else ()  # other replies carry none
        new = [failure for failure in told if self._first.is_new(failure)]
        return returned_message(call, returned, new[:MOST_FAILURES])

    def failure(self, call: Call, error: BaseException) -> bytes:
        why = error if isinstance(error, BadReturn) else raised_where(error, __file__)
        return failed_message(call, EnvironmentFailed(f"{call.method} failed: {why}"))

    def lateness(self, call: Call) -> bytes:
        return failed_message(call, late(call.method, call.given, self._assignment.timeout))

    @asynccontextmanager
    async def place_for(self, call: Call) -> AsyncGenerator[None]:
        """See `Served`. Wait for the session's earlier call, which is cancelled: the session is closed during it."""
        before, own = self._running.get(call.session), asyncio.current_task()
        self._running[call.session] = own
        try:
            if before is not None:
                before.cancel()
                await asyncio.wait([before])
            yield
        finally:
            if self._running[call.session] is own:
                del self._running[call.session]

    async def _returned(self, call: Call) -> Returned:
        """Make a call, and return its value."""
        if call.method == "reset":
            # Each environment gets its own copy, so that changes to its arguments do not affect the next one.
            environment_args = pickle.loads(pickle.dumps(self._assignment.environment_args))
            if self._containers is not None:
                environment_args = {**environment_args, CONTAINERS: self._containers}
            hosted = self._hosted[call.session] = Hosted(
                self._loaded.make(**environment_args), self._loaded.tools, self._servers(), self._assignment.sees
            )
            return await hosted.reset(*call.given)
        if call.method == "step":
            return await self._hosted[call.session].step(*call.given)
        if call.method == "hear":
            return await self._hosted[call.session].hear(*call.given)
        if (closed := self._hosted.pop(call.session, None)) is not None:
            await closed.close()
        return None

    @staticmethod
    def _pool(assignment: EnvironmentAssignment) -> Containers:
        """Return the source of containers, with the domain's image ready. Raises ConfigError if it cannot be used."""
        from roll.agents.containers.layout import BadImage
        from roll.agents.containers.pool import Containers

        containers = Containers(assignment.containers)
        try:
            containers.prepare()
        except BadImage as error:
            raise ConfigError(error.fault(f"environments.{assignment.domain}.image")) from error
        return containers

    def _servers(self) -> McpTools | None:
        if not self._assignment.mcp:
            return None
        from roll.agents.mcp_tools import McpTools

        return McpTools(self._assignment.mcp, self._assignment.sees)


def _finished_at_once(coroutine: Coroutine[Any, Any, bytes]) -> bytes:
    """Run a call whose methods are all plain. No event loop runs meanwhile, so the environment may run its own."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise RuntimeError("a plain method returned an awaitable; write the method as async def")


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), Sessions)
