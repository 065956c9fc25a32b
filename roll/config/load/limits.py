"""Checks a configuration before OmegaConf processes it: UTF-8, nesting depth, and the size to which references expand.

OmegaConf recurses into nested values and copies the target of every alias, so a few lines could use up all memory.
Depth and size are therefore computed first, without recursion and copies: for a file from the events of the YAML
parser, for the composed configuration from its unresolved text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.config.schema.fields import dotted
from roll.errors import ConfigError, Fault

DEEPEST = 50
"""Largest depth of nested blocks and lists."""
MOST_BYTES = 4 << 20
"""Largest size of one file, in bytes."""
MOST_VALUES = 100_000
"""Largest number of blocks, lists, keys and values in one file, with aliases expanded."""
MOST_CHARACTERS = 10_000_000
"""Largest number of characters in all strings below a root key, with `${...}` expanded."""
REFERENCE = re.compile(r"\$\{([\w.@-]+)\}")
UNUSABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that are refused everywhere: NUL, and lone surrogates, by which Python represents bytes that are not
UTF-8.
"""
TOO_DEEP = f"blocks and lists are nested more than {DEEPEST} levels deep"
FLATTEN = "nest blocks and lists less deeply"


def check_file(file: Path) -> None:
    """Check a YAML file before it is loaded. Syntax errors are left to the loader.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is too large or too deeply nested.
    """
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise ConfigError([Fault(f"{file}:{line}", problem, "save the file as UTF-8")]) from None
    except OSError as error:
        raise ConfigError(
            [Fault(str(file), f"it cannot be read: {error.strerror}", "use another file, or change its permissions")]
        ) from None
    if len(content) > MOST_BYTES:
        problem = f"{len(content):,} bytes are too many for a configuration"
        raise ConfigError([Fault(str(file), problem, f"keep it within {MOST_BYTES:,} bytes; put rows into data files")])
    try:
        fault = _structure_fault(file, text)
    except yaml.YAMLError:
        return
    if fault:
        raise ConfigError([fault])


@dataclass
class _Open:
    """A block or list that the parser is in."""

    anchor: str | None
    values_before: int
    deepest: int


def _structure_fault(file: Path, text: str) -> Fault | None:
    within: list[_Open] = []
    anchors: dict[str, tuple[int, int]] = {}  # number of values, and nesting depth
    values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth, place = len(within), f"{file}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == block.anchor for block in within):
                return Fault(
                    place,
                    f"*{event.anchor} is inside &{event.anchor}, which it repeats",
                    "write out the values instead",
                )
            repeated, below = anchors.get(event.anchor, (0, 0))
            values, depth = values + repeated, depth + below
        elif isinstance(event, yaml.CollectionStartEvent):
            within.append(_Open(event.anchor, values, depth + 1))
            values, depth = values + 1, depth + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            block = within.pop()
            depth = block.deepest
            anchors |= (
                {block.anchor: (values - block.values_before, block.deepest - len(within))} if block.anchor else {}
            )
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            anchors |= {event.anchor: (1, 0)} if event.anchor else {}
        if depth > DEEPEST:
            return Fault(place, TOO_DEEP, FLATTEN)
        if values > MOST_VALUES:
            return Fault(
                place,
                f"more than {MOST_VALUES:,} values, including those that aliases repeat",
                "repeat fewer; put rows into data files",
            )
        if within:
            within[-1].deepest = max(within[-1].deepest, depth)
    return None


def word_faults(words: Sequence[str]) -> Iterator[Fault]:
    """Yield faults of the command line's words. Called before Hydra parses them, because its time is polynomial in the
    nesting depth.
    """
    for word in words:
        if UNUSABLE.search(word):
            yield Fault(
                "command line", f"'{UNUSABLE.sub('?', word)}' contains bytes that are not UTF-8", "write it in UTF-8"
            )
        elif word.partition("=")[0].count(".") >= DEEPEST or _depth(word) > DEEPEST:
            yield Fault("command line", f"'{word[:40]}...': {TOO_DEEP}", FLATTEN)


def _depth(word: str) -> int:
    deepest = depth = 0
    for character in word:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    return deepest


def container_faults(raw: Any) -> list[Fault]:
    """Return the faults that prevent the values from being resolved and checked.

    Args:
        raw: The unresolved configuration as plain dicts, lists and values, in which `${...}` is text.
    """
    faults: list[Fault] = []
    for place, value, in_list in _values(raw):
        where = dotted([step if isinstance(step, int) else UNUSABLE.sub("?", str(step)) for step in place])
        if len(place) > DEEPEST:
            return [Fault(where, TOO_DEEP, FLATTEN)]
        if place and not in_list and not _is_text_or_integer(place[-1]):
            faults.append(Fault(where, "the key is not text", "quote the key"))
        if isinstance(value, Mapping) and len(set(map(str, value))) < len(value):
            faults.append(Fault(where, "two of its keys are the same when read as text", "remove one of them"))
        if any(isinstance(text, str) and UNUSABLE.search(text) for text in (value, *place[-1:])):
            faults.append(Fault(where, "it contains NUL, or bytes that are not UTF-8", "remove them"))
    return faults or _expansion_faults(raw)


def _is_text_or_integer(key: Any) -> bool:
    """Return whether a key is text or a whole number, such as the keys of a table of symbols."""
    return isinstance(key, str) or isinstance(key, int) and not isinstance(key, bool)


def _values(node: Any) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yield every block, list and value with its place and whether it is an item of a list.

    This is iterative, because the values may be nested too deeply for recursion.
    """
    waiting: list[tuple[tuple[Any, ...], Any, bool]] = [((), node, False)]
    while waiting:
        place, node, in_list = waiting.pop()
        yield place, node, in_list
        if isinstance(node, Mapping):
            waiting += [((*place, key), below, False) for key, below in node.items()]
        elif isinstance(node, list):
            waiting += [((*place, number), below, True) for number, below in enumerate(node)]


def _expansion_faults(raw: Any) -> list[Fault]:
    """Return faults for references that expand to too many characters."""
    known: dict[str, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, Mapping | list):
            return sum(map(size, node.values() if isinstance(node, Mapping) else node))
        return len(node) + sum(map(named, REFERENCE.findall(node))) if isinstance(node, str) else 1

    def named(path: str) -> int:
        if path not in known:
            known[path] = 0  # a cycle is refused when the value is resolved
            node = raw
            for step in path.split("."):
                node = node.get(step) if isinstance(node, Mapping) else None
            known[path] = size(node)
        return known[path]

    problem = f"with its ${{...}} references expanded, it has more than {MOST_CHARACTERS:,} characters"
    sizes = {str(key): size(value) for key, value in raw.items()} if isinstance(raw, Mapping) else {}
    return [
        Fault(key, problem, "reference less text by ${...}")
        for key, characters in sizes.items()
        if characters > MOST_CHARACTERS
    ][:1]
