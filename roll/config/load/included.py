"""Follows the `defaults` of an experiment's file before Hydra composes it. Hydra itself follows a file that includes
itself until Python's stack ends, which takes seconds, and files that include each other twice without an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isfile  # unlike Path.is_file, False for a name that is too long
from pathlib import Path
from typing import Any

import yaml

from roll.errors import ConfigError, Fault

MOST_INCLUDED = 1000
"""Largest number of files that one file may include, counted as often as they are included."""
DEEPEST_INCLUDED = 50
"""Largest number of files that may include each other in a chain."""


def check_included(file: Path) -> None:
    """Check that a file does not include itself, and does not include too many files.

    Only files that are found beside the including file are followed. Files that cannot be read are left to Hydra, which
    reports them.

    Raises:
        ConfigError: a file includes itself, or the included files are too many or in too long a chain.
    """
    _count(file.resolve(), (), {})


def _count(file: Path, above: tuple[Path, ...], counted: dict[Path, int]) -> int:
    if file in counted:
        return counted[file]
    if file in above:
        chain = " -> ".join(path.name for path in (*above[above.index(file) :], file))
        raise ConfigError(
            Fault(f"{above[-1]}: defaults", f"a loop: {chain}", f"remove {file.stem} there", "not_allowed")
        )
    chain = (*above, file)
    if len(chain) > DEEPEST_INCLUDED:
        raise ConfigError(_too_many(file))
    counted[file] = 1 + sum(_count(path, chain, counted) for path in _included(file))
    if counted[file] > MOST_INCLUDED:
        raise ConfigError(_too_many(file))
    return counted[file]


def _too_many(file: Path) -> Fault:
    problem = f"more than {MOST_INCLUDED} files, or more than {DEEPEST_INCLUDED} in a chain, are included"
    return Fault(f"{file}: defaults", problem, "include fewer files", "too_large")


def _included(file: Path) -> Iterator[Path]:
    """Yield the existing files that the texts and pairs in the defaults of `file` name, as Hydra finds them."""
    entries = _values(file).get("defaults")
    for entry in entries if isinstance(entries, list) else []:
        for group, options in entry.items() if isinstance(entry, dict) else [("", entry)]:
            folder = str(group).split()[-1:] or ["."]  # "override group@package"
            for option in options if isinstance(options, list) else [options]:
                name = f"{folder[0].partition('@')[0]}/{str(option).partition('@')[0]}"
                path = file.parent / f"{name.removesuffix('.yaml')}.yaml"
                if "\0" not in name and isfile(path):
                    yield path.resolve()


def search_path_of(file: Path) -> list[str]:
    """Return `hydra.searchpath` of an experiment's file."""
    hydra = _values(file).get("hydra")
    given = hydra.get("searchpath") if isinstance(hydra, dict) else None
    return [*map(str, given)] if isinstance(given, list) else []


def _values(file: Path) -> dict[Any, Any]:
    """Return the keys of a file; none of a file that cannot be read, which Hydra reports."""
    try:
        values = yaml.load(file.read_bytes(), yaml.CSafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
