"""Names for functions and classes that are given as Python objects.

A configuration names them as `package.module:Name`, because other processes import them. What no other process can
import, such as a function of a notebook or of the program itself, is written into a file, whose name is
`FOLDER/DIGEST/NAME.py:NAME`. The digest depends on what the function does, so that a resumed run finds a change.
"""

from __future__ import annotations

import base64
import inspect
import keyword
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from roll.errors import ConfigError, Fault
from roll.given.digest import digest_of

MOST_BYTES = 16 << 20
"""Largest size of a written function with all that it refers to."""
FILE = '''"""`{name}`, which was given to roll as a Python object. roll loads it from the bytes below. It was:

{source}
"""

import base64

import cloudpickle

{name} = cloudpickle.loads(
    base64.b64decode("{body}")
)
'''


def name_of(given: Callable[..., Any], folder: Path, place: str) -> str:
    """Return the name by which other processes import a function or class. Write it below `folder` if they cannot.

    Args:
        place: the key or argument that errors report.

    Raises:
        ConfigError: it cannot be sent to other processes, is too large, or the folder cannot be written.
    """
    return importable_name(given) or _written(given, folder, place)


def importable_name(given: Callable[..., Any]) -> str | None:
    """Return `package.module:Name`, or None if other processes cannot import it by this name."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not module or not name or "." in name or module == "__main__":
        return None
    held = sys.modules.get(module)
    has_source = getattr(held, "__spec__", None) is not None
    return f"{module}:{name}" if has_source and getattr(held, name, None) is given else None


def _written(given: Callable[..., Any], folder: Path, place: str) -> str:
    name = file_name(given)
    try:
        body = cloudpickle.dumps(given)
    except Exception as error:  # the user's objects raise errors of any type
        problem = f"'{name}' cannot be sent to other processes: {type(error).__name__}: {error}"
        remedy = "create files, locks and models inside it, or put it into a module and give package.module:name"
        raise ConfigError(Fault(place, problem, remedy, "unfit")) from error
    if len(body) > MOST_BYTES:
        problem = f"'{name}' refers to {len(body) >> 20} MiB of values, more than {MOST_BYTES >> 20}"
        raise ConfigError(Fault(place, problem, "read them from a file inside it", "too_large"))
    file = folder / digest_of(given) / f"{name}.py"
    if not file.is_file():  # the same function was written before
        text = FILE.format(name=name, source=_source(given), body=base64.b64encode(body).decode())
        write_text(file, text, place)
    return f"{file}:{name}"


def file_name(given: Callable[..., Any]) -> str:
    """Return the name of a function or class as an identifier; `given` for one without a usable name."""
    name = re.sub(r"\W", "", str(getattr(given, "__name__", type(given).__name__)))
    return name if name.isidentifier() and not keyword.iskeyword(name) else "given"


def _source(given: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(given).replace("\\", "\\\\").replace('"""', "'''").rstrip()
    except (OSError, TypeError):  # such as a function that was typed at the prompt, or a callable object
        return repr(given).replace("\\", "\\\\").replace('"""', "'''")


def write_text(file: Path, text: str, place: str) -> None:
    """Write a file atomically, with the folders above it. Raises ConfigError if that is impossible."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        problem = f"'{file}' cannot be written: {error.strerror}"
        raise ConfigError(Fault(place, problem, "choose another output_dir", "not_writable")) from None
