"""Completes the words of a command line: flags, names of experiments, keys, groups, options and values.

`eval "$(python -m roll.pipeline -sc install=bash)"` defines a function of the shell that runs `-sc query=bash` at each
Tab (`shells.py`). It composes the experiment and reads the schema; it imports neither torch nor ray.
"""

from __future__ import annotations

import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.plugins.completion_plugin import CompletionPlugin, DefaultCompletionPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.config.load.compose import CommandLine, composed_files
from roll.config.load.flags import COMPLETION, INFO, MODULE, flag_parser, parse_flags
from roll.config.load.shells import SHELLS
from roll.config.schema.fields import blocks_of, section_at, union_members
from roll.config.schema.pipelines import PIPELINES
from roll.config.shipped import deepspeed_presets, experiments
from roll.errors import ConfigError, Fault, RollError

NAME, FOLDER = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")
SHOWN = ("job", "hydra", "all")
PREFIX = re.compile(r"^(\+\+|\+|~)?(.*)$", re.DOTALL)
PRESET = "strategy_config"


def answer_shell(argv: Sequence[str]) -> list[str]:
    """Return the lines that `-sc install=SHELL`, `uninstall=SHELL` or `query=SHELL` prints.

    The query is the variable `COMP_LINE`: the line up to the cursor.

    Raises:
        ConfigError: the words are others, or a flag is wrong.
    """
    words = parse_flags(argv).overrides
    wish, _, name = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if name in SHELLS and wish == "install":
        return [SHELLS[name].installation(sys.executable, MODULE, COMPLETION[1], name)]
    if name in SHELLS and wish == "uninstall":
        return [SHELLS[name].uninstall]
    if name in SHELLS and wish == "query":
        return completions(os.environ.get("COMP_LINE", ""))
    problem = f"{' '.join(words) or 'nothing'} is asked for"
    remedy = f"write install=bash, uninstall=bash or query=bash; the shells are {', '.join(SHELLS)}"
    raise ConfigError(Fault(COMPLETION[0], problem, remedy, "not_supported"))


def completions(line: str) -> list[str]:
    """Return the words that the last word of a line may become; none if the rest of the line has faults."""
    words = line.split()
    word = words.pop() if words and not line[-1].isspace() else ""
    given = words[words.index(MODULE) + 1 :] if MODULE in words else words[1:]
    flag, equals, start = word.partition("=")
    if word.startswith("-") and equals:
        return sorted(f"{flag}={value}" for value in _flag_values(flag, given) if value.startswith(start))
    found = _flag_values(given[-1], given) if given and given[-1].startswith("-") else []
    if not found and word.startswith("-"):
        found = [option for action in flag_parser()._actions for option in action.option_strings]
    if not found and not (given and given[-1] in FOLDER):
        try:
            with composed_files(given) as (experiment, loader, files):
                found = _overrides(word, experiment, loader, files)
        except (RollError, SystemExit):
            found = []
    return sorted({one for one in found if one.startswith(word)})


def _flag_values(flag: str, given: Sequence[str]) -> list[str]:
    if flag in NAME:
        places = [after for before, after in zip(given, given[1:], strict=False) if before in FOLDER]
        if places:
            return [file.stem for file in Path(places[0]).glob("*.yaml")]
        return [name for path in experiments() for name in (path, path.rpartition("/")[2])]
    return {"--cfg": [*SHOWN], "-c": [*SHOWN], "--info": [*INFO], "-i": [*INFO]}.get(flag, [])


def _overrides(word: str, line: CommandLine, loader: ConfigLoader, files: DictConfig) -> list[str]:
    """Return overrides that begin with a word: of groups, and of keys that the experiment or the schema has."""
    matched = PREFIX.match(word)
    assert matched is not None, "the pattern matches every text"
    sign, rest = matched[1] or "", matched[2]
    name, at, package = rest.partition("@")
    chosen = [override.input_line or "" for override in line.overrides]
    plugin = DefaultCompletionPlugin(loader)
    if at and "=" not in package:
        return [f"{sign}{name}@{key.rstrip('.=')}=" for key in _keys(package, files) if key[-1] in ".="]
    if at:
        package, _, option = package.partition("=")
        options, _ = plugin._query_config_groups(f"{name}={option}", line.file.stem, chosen)
        return [f"{sign}{name}@{package}={one.partition('=')[2]}" for one in options]
    groups, is_group = plugin._query_config_groups(rest, line.file.stem, chosen)
    if is_group and groups:
        return [f"{sign}{one}" for one in groups]
    if "=" in rest:
        return [f"{sign}{one}" for one in _values(rest, files)]
    return [f"{sign}{one}" for one in [*groups, *_keys(rest, files)]]


def _keys(start: str, files: DictConfig) -> Iterator[str]:
    """Yield the keys that begin with a text, with a point behind the key of a block and = behind others."""
    try:
        present: list[str] = CompletionPlugin._get_matches(files, start)
    except OmegaConfBaseException:
        present = []
    present = [key for key in present if not key.startswith("hydra") or start.startswith("hydra")]
    yield from present
    above, point, _ = start.rpartition(".")
    known = {key.rstrip(".=") for key in present}
    for key, is_block in _schema_keys(above.split(".") if point else [], files):
        if f"{above}{point}{key}" not in known:
            yield f"{above}{point}{key}{'.' if is_block else '='}"


def _schema_keys(place: Sequence[str], files: DictConfig) -> Iterator[tuple[str, bool]]:
    """Yield the keys of the schema's block at a path, with whether each is a block itself."""
    schema, values = _schema(files)
    section = section_at(schema, place, values)
    above = section_at(schema, place[:-1], values) if place else None
    field = above.model_fields.get(place[-1]) if above else None
    if section is None or (field and any(is_named for _, is_named in blocks_of(field.annotation))):
        return  # the user names the keys
    for key, one in section.model_fields.items():
        yield key, bool(blocks_of(one.annotation))


def _values(start: str, files: DictConfig) -> Iterator[str]:
    """Yield `key=value` for the values that a key's type lists, else for its value in the file, and for files."""
    key, _, value = start.partition("=")
    *steps, last = key.split(".")
    before, comma, part = value.rpartition(",")  # of a sweep
    schema, values = _schema(files)
    section = section_at(schema, steps, values)
    field = section.model_fields.get(last) if section else None
    listed = [str(one).lower() if isinstance(one, bool) else str(one) for one in _listed(field and field.annotation)]
    found = glob(f"{escape(part)}*") if part and not listed else []
    listed += deepspeed_presets() if last == PRESET else []
    if not listed:
        try:
            current = OmegaConf.select(files, key)
        except OmegaConfBaseException:
            current = None
        listed = [str(current)] if isinstance(current, str | int | float) and not isinstance(current, bool) else []
    for one in [*listed, *found]:
        yield f"{key}={before}{comma}{one}{'/' if os.path.isdir(one) else ''}"


def _listed(annotation: object) -> Iterator[object]:
    """Yield the values that a type lists."""
    for member in union_members(annotation):
        if typing.get_origin(member) is typing.Literal:
            yield from typing.get_args(member)
        elif member is bool:
            yield from (True, False)


def _schema(files: DictConfig) -> tuple[type[Any], Mapping[str, Any]]:
    values: Any = OmegaConf.to_container(files, resolve=False)
    return PIPELINES.get(str(values.get("pipeline", "rlvr")), PIPELINES["rlvr"]), values
