"""Runs an agent that is a function: `python -m roll.agents.gateway.call package.module:function`, with the row as JSON
on stdin.

With `check` after the name it only checks whether the function can be called. A fault is printed to stdout.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from roll.agents.gateway.agent import BASE_URL, CHECK, KEY
from roll.errors import BAD_INPUT
from roll.hosted.raised import raised_where
from roll.registry import imported_module, split_path


def import_agent(name: str) -> Callable[..., Any]:
    """Import a function by name. Raises ValueError if it is missing or does not accept row, base_url and api_key."""
    module_name, function_name = split_path(name)
    try:
        function = getattr(imported_module(module_name), function_name, None)
    except Exception as error:  # errors of the user's module have any type
        raise ValueError(f"'{module_name}' cannot be imported: {raised_where(error, importlib.__file__)}") from error
    if not callable(function):
        raise ValueError(f"{module_name} has no function '{function_name}'")
    try:
        inspect.signature(function).bind(row={}, base_url="", api_key="")
    except TypeError as error:
        raise ValueError(f"it cannot be called with row, base_url and api_key: {error}") from error
    return function


async def _awaited(value: Any) -> None:
    await value


def main(name: str, only_check: bool) -> int:
    """Check the function, and call it unless `only_check`. Return the exit status."""
    try:
        function = import_agent(name)
    except ValueError as error:
        print(error)
        return BAD_INPUT
    if only_check:
        return 0
    returned = function(row=json.load(sys.stdin), base_url=os.environ[BASE_URL], api_key=os.environ[KEY])
    if inspect.isawaitable(returned):
        asyncio.run(_awaited(returned))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == [CHECK]))
