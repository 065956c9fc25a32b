"""Imports an environment's class and its tools by the names that the configuration specifies."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from roll.agents.environments.base import ENVIRONMENTS, MalformedCalls
from roll.agents.tools import Tools
from roll.config.shipped import known_environments
from roll.errors import ConfigError, Fault
from roll.hosted.raised import raised_where
from roll.registry import nearest

METHODS: Mapping[str, tuple[Any, ...]] = {"reset": ({}, 0), "step": ({},), "close": ()}
"""Methods that an environment must have, with example arguments."""
MALFORMED = ("answer", "end", "step")


class LoadedEnvironment(NamedTuple):
    """The environment's class and the tools of a domain."""

    make: Callable[..., Any]
    """The class."""
    tools: Tools
    side_by_side: bool
    """Whether calls run concurrently: `reset`, `step` and all tools are `async def`."""
    is_plain: bool
    """Whether no method and no tool is `async def`."""
    malformed_calls: MalformedCalls


def loaded(
    domain: str, environment: str, environment_args: Mapping[str, Any], tools: tuple[str, ...]
) -> LoadedEnvironment:
    """Import the class and the tools of a domain.

    Raises:
        ConfigError: a name is not found, a module cannot be imported, a tool is not valid, or the class does not accept
            its `environment_args`, lacks a method of an environment, or has an invalid `malformed_calls`.
    """
    place = f"environments.{domain}"
    make = _class(environment, place)
    try:
        inspect.signature(make).bind(**environment_args)
    except TypeError as error:
        takes = f"the class accepts {inspect.signature(make)}"
        raise ConfigError(
            [Fault(f"{place}.environment_args", f"does not fit '{environment}': {error}", takes)]
        ) from error
    if faults := [
        fault for name in METHODS for fault in _method_faults(make, name, environment, f"{place}.environment")
    ]:
        raise ConfigError(faults)
    malformed_calls = getattr(make, "malformed_calls", "answer")
    if malformed_calls not in MALFORMED:
        problem = f"'{environment}' has malformed_calls {malformed_calls!r:.80}"
        raise ConfigError([Fault(f"{place}.environment", problem, f"set it to one of {', '.join(MALFORMED)}")])
    known = _tools(tools, f"{place}.tools")
    side_by_side = (
        inspect.iscoroutinefunction(make.reset) and inspect.iscoroutinefunction(make.step) and known.all_async
    )
    is_plain = not any(inspect.iscoroutinefunction(getattr(make, name)) for name in METHODS) and not known.any_async
    return LoadedEnvironment(make, known, side_by_side, is_plain, malformed_calls)


def _class(name: str, place: str) -> Any:
    key, known = f"{place}.environment", known_environments()
    remedy = f"name one of {', '.join(known)}{nearest(name, known)}, or your own class as `package.module:Class`"
    module_name, _, class_name = name.partition(":")
    if not class_name and name not in known:
        raise ConfigError([Fault(key, f"no environment is named '{name}'", remedy)])
    found = _imported(module_name if class_name else f"roll.agents.environments.{name}", name, key, remedy)
    made = getattr(found, class_name, None) if class_name else ENVIRONMENTS.get(name)
    if not isinstance(made, type):
        raise ConfigError([Fault(key, f"no environment is named '{name}': {found.__name__} has no such class", remedy)])
    return made


def _imported(module: str, name: str, key: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError([Fault(key, f"'{name}' is not found: {error}", remedy)]) from error
    except Exception as error:
        problem = f"'{name}' cannot be imported: {raised_where(error, importlib.__file__)}"
        raise ConfigError([Fault(key, problem, "fix the module")]) from error


def _method_faults(make: Any, name: str, environment: str, key: str) -> list[Fault]:
    method = getattr(make, name, None)
    if not callable(method):
        return [Fault(key, f"'{environment}' has no method '{name}'", "define reset, step and close in the class")]
    try:
        inspect.signature(method).bind(None, *METHODS[name])
    except TypeError as error:
        given = {"reset": "(self, row, seed)", "step": "(self, message)", "close": "(self)"}[name]
        return [
            Fault(
                key,
                f"'{environment}.{name}' cannot be called as {name}{given}: {error}",
                f"give it the parameters {given}",
            )
        ]
    return []


def _tools(names: tuple[str, ...], key: str) -> Tools:
    functions = []
    for name in names:
        module_name, _, function_name = name.partition(":")
        if not function_name:
            raise ConfigError(
                [Fault(key, f"'{name}' is not the name of a tool", "name each tool as `package.module:function`")]
            )
        module = _imported(module_name, name, key, "name each tool as `package.module:function`")
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ConfigError(
                [
                    Fault(
                        key,
                        f"'{name}' is not found: {module_name} has no such function",
                        "name a function of the module",
                    )
                ]
            )
        functions.append(function)
    try:
        return Tools(functions)
    except ValueError as error:
        raise ConfigError(
            [Fault(key, str(error), "give every parameter a name and a type hint that JSON can express")]
        ) from error
