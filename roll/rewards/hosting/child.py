"""A process that computes rewards: `python -m roll.rewards.hosting.child DESCRIPTOR PARENT`. process.py starts,
monitors and ends it.

    process.py                                         child
      ── Assignment ─────────────────────────────────▶  imports the rewards
      ◀─────────────────────────────────────── Ready ──
      ── [(number, part, prompt, responses, seals)] ─▶
      ◀── Answer ── ..  one for each call, as soon as the call ends

A call scores one response, or all responses of the group if it is a call of a group reward. The calls of one entry have
consecutive numbers that start at the entry's number. Calls start in the order in which they arrive; concurrent calls
end in any order. If a call replaces a function, a class or a module, the process ends after that call, and the
remaining calls run in a new process.

The socket is separate from stdout and stderr, so it never carries output that a reward function prints.

Detects whether a call of a reward function replaced a definition. The next call must then run in another process.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from roll.config.derived.rewards import is_async
from roll.errors import ConfigError
from roll.hosted.frames import receive, receive_next
from roll.hosted.raised import INSTALLED
from roll.hosted.served import bound_memory, serving_parent
from roll.rewards.base import RewardFunction, rewards_of, row_check, traits_of
from roll.rewards.hosting.messages import (
    Entry,
    PartTraits,
    RewardAssignment,
    RewardsReady,
    answer_message,
    rewards_ready_message,
)
from roll.rewards.parts import RewardPart
from roll.rewards.verdicts import checked_result, raised, timed_out, verdicts
from roll.types import Prompt, RewardResult

_CODE = attrgetter("__code__")


class _Namespace(NamedTuple):
    """The functions, classes and modules that a module or class holds, by name."""

    name: str
    variables: Mapping[str, Any]
    names: tuple[str, ...]
    look: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    held: tuple[Any, ...]


class Definitions:
    """A snapshot of functions, classes and modules by name, taken when this object is created.

    It covers the modules of the reward functions, all other modules that are not installed packages (including the
    methods of their classes), and `builtins`. Other values, such as a cache or a model that is loaded at the first
    call, may change freely.
    """

    def __init__(self, own: Iterable[str]) -> None:
        """
        Args:
            own: names of the modules of the reward functions.
        """
        names = {"builtins", *own}
        loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        modules = [module for module in loaded if module.__name__ in names or _is_users(module)]
        self._namespaces = [found for module in modules for found in _namespaces(module)]
        functions = [held for space in self._namespaces for held in space.held if isinstance(held, FunctionType)]
        self._functions = tuple(functions)
        self._codes = [function.__code__ for function in functions]

    def replaced(self) -> str:
        """Return the first name whose definition was replaced or deleted since the snapshot, or an empty string."""
        for space in self._namespaces:
            try:
                if space.look(space.variables) == space.held:
                    continue
            except KeyError:
                pass
            return next(_differing(space), "")
        if list(map(_CODE, self._functions)) != self._codes:
            return next(
                f"{f.__module__}.{f.__qualname__}"
                for f, code in zip(self._functions, self._codes, strict=True)
                if f.__code__ is not code
            )
        return ""


def _is_users(module: ModuleType) -> bool:
    file = vars(module).get("__file__")
    return isinstance(file, str) and not file.startswith(INSTALLED)


def _namespaces(module: ModuleType) -> Iterator[_Namespace]:
    name, variables = module.__name__, vars(module)
    yield from _namespace(name, variables, variables.items())
    for found in list(variables.values()) if _is_users(module) else ():
        if isinstance(found, type) and found.__module__ == name:
            yield from _namespace(f"{name}.{found.__qualname__}", vars(found), vars(found).items())


def _namespace(name: str, variables: Mapping[str, Any], items: Iterable[tuple[str, Any]]) -> Iterator[_Namespace]:
    defined = {key: value for key, value in items if _is_definition(value)}
    if defined:
        first, *others = names = tuple(defined)
        look = itemgetter(*names) if others else lambda variables: (variables[first],)
        yield _Namespace(name, variables, names, look, tuple(defined.values()))


def _is_definition(value: Any) -> bool:
    if (
        getattr(value, "__module__", "") == "typing"
    ):  # `typing` itself replaces the __init__ of a Protocol's subclass at its first use
        return False
    return callable(value) or isinstance(value, ModuleType | property | staticmethod | classmethod)


def _differing(space: _Namespace) -> Iterator[str]:
    for name, held in zip(space.names, space.held, strict=True):
        if space.variables.get(name) is not held:
            yield f"{space.name}.{name}"


class _Call(NamedTuple):
    """One call of a reward function."""

    number: int
    seal: int
    function: RewardFunction
    group: bool
    prompt: Prompt
    responses: Sequence[str]
    row: Any
    reward_args: Mapping[str, Any]

    def begin(self) -> Any:
        """Call the function and return its value. The value of an `async def` must still be awaited."""
        prompt, asked = self.prompt, self.responses if self.group else self.responses[0]
        # dataclasses.replace takes twice as long
        own = Prompt(prompt.prompt_id, prompt.token_ids, prompt.text, prompt.domain, self.row, prompt.place)
        return self.function(own, asked, self.row, **self.reward_args)

    def results(self, returned: Any) -> list[RewardResult]:
        return verdicts(returned, self.responses) if self.group else [checked_result(returned, self.responses[0])]

    def failed(self, error: BaseException) -> list[RewardResult]:
        return [raised(error, __file__)] * len(self.responses)


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the parent closes the socket."""
    with serving_parent(descriptor, parent) as (connection, incoming):
        assignment: RewardAssignment = receive(incoming)
        bound_memory(assignment.memory_bytes)
        try:
            functions = rewards_of(assignment.domain, assignment.parts, assignment.concurrency)
        except ConfigError as error:
            connection.sendall(rewards_ready_message(RewardsReady(error.faults)))
            return
        traits = tuple(
            PartTraits(one.needs_service, one.check_row is not None, one.passes_at, one.passes_by)
            for one in map(traits_of, functions)
        )
        functions = list(map(row_check, functions)) if assignment.checks_rows else functions
        side_by_side = any(map(is_async, functions))
        definitions = Definitions({str(getattr(function, "__module__", "")) for function in functions})
        connection.sendall(rewards_ready_message(RewardsReady((), traits, side_by_side)))
        if side_by_side:
            asyncio.run(_side_by_side(connection, assignment, functions, definitions))
        else:
            _in_turn(connection, incoming, assignment, functions, definitions)


def _in_turn(
    connection: socket.socket,
    incoming: Any,
    assignment: RewardAssignment,
    functions: Sequence[RewardFunction],
    definitions: Definitions,
) -> None:
    own = os.getpid()
    while (request := receive(incoming)) is not None:
        for call in _calls(request, assignment.parts, functions):
            try:
                results = call.results(call.begin())
            except BaseException as error:  # sys.exit() in a reward function must not end the process either
                results = call.failed(error)
            if os.getpid() != own:  # this is a process that the reward function forked
                os._exit(0)
            replaced = definitions.replaced()
            connection.sendall(answer_message(call.number, call.seal, results, replaced))
            if replaced:
                return


async def _side_by_side(
    connection: socket.socket,
    assignment: RewardAssignment,
    functions: Sequence[RewardFunction],
    definitions: Definitions,
) -> None:
    own, slots, running = os.getpid(), asyncio.Semaphore(assignment.concurrency), set[asyncio.Task[None]]()
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)

    async def run(call: _Call) -> None:
        async with slots:  # first in, first out
            results = await _awaited(call, assignment.timeout)
        if os.getpid() != own:
            os._exit(0)
        replaced = definitions.replaced()
        writer.write(answer_message(call.number, call.seal, results, replaced))
        if replaced:
            writer.transport.set_write_buffer_limits(0)
            await writer.drain()
            os._exit(0)

    while (request := await receive_next(reader)) is not None:
        for call in _calls(request, assignment.parts, functions):
            task = asyncio.create_task(run(call))
            running.add(task)
            task.add_done_callback(running.discard)
    os._exit(0)  # The parent is gone. A normal exit would wait for tasks that ignore cancellation.


async def _awaited(call: _Call, seconds: float) -> list[RewardResult]:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            returned = call.begin()
            results = call.results(await returned if is_async(call.function) else returned)
    except BaseException as error:
        results = call.failed(error)
    # A call that ends after the deadline has timed out, whatever its result.
    return [timed_out(seconds)] * len(call.responses) if deadline.expired() else results


def _calls(
    request: Sequence[Entry], parts: Sequence[RewardPart], functions: Sequence[RewardFunction]
) -> Iterator[_Call]:
    for first, index, prompt, responses, seals in request:
        part, function = parts[index], functions[index]
        # each call gets its own copy: changes that a reward function makes to its row or arguments must not affect the
        # next call
        asked = pickle.dumps((prompt.row, part.reward_args), pickle.HIGHEST_PROTOCOL)
        for number, own in enumerate([responses] if part.group else ([response] for response in responses)):
            row, reward_args = pickle.loads(asked)
            yield _Call(first + number, seals[number], function, part.group, prompt, own, row, reward_args)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
