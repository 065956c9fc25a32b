"""A process that computes rewards: `python -m roll.rewards.child DESCRIPTOR PARENT`. reward_workers.py starts, monitors
and ends it.

A call scores one response, or all responses of the group if it is a call of a group reward. The calls of one entry have
consecutive numbers that start at the entry's number. Calls start in the order in which they arrive; concurrent calls
end in any order. If a call replaces a function, a class or a module, the process ends after that call, and the
remaining calls run in a new process.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from roll.config.derived.domains import is_async
from roll.hosted.protocol import Served, serve
from roll.hosted.raised import INSTALLED
from roll.rewards.base import RewardFunction, rewards_of, row_check, traits_of
from roll.rewards.verdicts import Entry, RewardAssignment, answer_message, checked_result, raised, timed_out, verdicts
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


class HostedRewards(Served[_Call]):
    """The reward functions of a domain."""

    def __init__(self, assignment: RewardAssignment) -> None:
        self._parts, self._timeout = assignment.parts, assignment.timeout
        functions = rewards_of(assignment.domain, assignment.parts, assignment.concurrency)
        self.traits = [
            [one.needs_service, one.check_row is not None, one.passes_at, one.passes_by]
            for one in map(traits_of, functions)
        ]
        self._functions = list(map(row_check, functions)) if assignment.checks_rows else functions
        self.side_by_side = any(map(is_async, self._functions))
        self._definitions = Definitions({str(getattr(one, "__module__", "")) for one in self._functions})
        self._slots = asyncio.Semaphore(assignment.concurrency)

    def calls(self, request: Sequence[Entry]) -> Iterator[_Call]:
        for first, index, prompt, responses, seals in request:
            part, function = self._parts[index], self._functions[index]
            # each call gets its own copy: changes that a reward function makes to its row or arguments must not affect
            # the next call
            asked = pickle.dumps((prompt.row, part.reward_args), pickle.HIGHEST_PROTOCOL)
            for number, own in enumerate([responses] if part.group else ([response] for response in responses)):
                row, reward_args = pickle.loads(asked)
                yield _Call(first + number, seals[number], function, part.group, prompt, own, row, reward_args)

    def reply(self, call: _Call) -> bytes:
        return self._message(call, call.results(call.begin()))

    async def awaited_reply(self, call: _Call) -> bytes:
        returned = call.begin()
        return self._message(call, call.results(await returned if is_async(call.function) else returned))

    def failure(self, call: _Call, error: BaseException) -> bytes:
        return self._message(call, [raised(error, __file__)] * len(call.responses))

    def lateness(self, call: _Call) -> bytes:
        return self._message(call, [timed_out(self._timeout)] * len(call.responses))

    def place_for(self, call: _Call) -> asyncio.Semaphore:
        """See `Served`. Calls begin in the order in which they arrive."""
        return self._slots

    def _message(self, call: _Call, results: Sequence[RewardResult]) -> bytes:
        replaced = self._definitions.replaced()
        self.is_over = self.is_over or bool(replaced)
        return answer_message(call.number, call.seal, results, replaced)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), HostedRewards)
