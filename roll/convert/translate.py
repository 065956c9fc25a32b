"""Applies a table to a source: copies what has a counterpart, lets the program's own code do what needs arithmetic, and
reports every other key with the reason why it was not copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from roll.config.schema.faults import LEARNER
from roll.convert.draft import Draft
from roll.convert.shell import unassigned
from roll.convert.source import Source, is_number
from roll.convert.tables import Rule, hint
from roll.errors import ConfigError, Fault

SEES = re.compile(r"(^|[-_/.\d])(vl|omni|vision)([-_/.]|$)", re.IGNORECASE)
"""Part of the names of models that also read images."""
OFF = (None, False, "none", "no", "None")
"""Values by which a key asks for nothing."""


def translated(source: Source, build: Callable[[Source, Draft], None]) -> Draft:
    """Return the experiment for a source. `build` reads the keys of the part `read`.

    Raises:
        ConfigError: the source is about images, or about something else that is refused.
    """
    draft = Draft()
    _rename(source)
    _leave_out_unassigned(source, draft)
    _leave_out_no_numbers(source, draft)
    rules = {key: source.table.rule(key) for key in source.given}
    if refused := [key for key, rule in rules.items() if rule and rule.part == "refused" and _asks(source.given[key])]:
        rule = rules[refused[0]]
        assert rule is not None
        raise ConfigError(Fault(refused[0], rule.said, "leave it with its program", "not_supported"))
    for key in [*source.given, *(key for key in source.table.defaults if key not in source.given)]:
        if (rule := source.table.rule(key)) and rule.part in ("same", "values"):
            _copy(key, source.get(key), rule, source, draft)
    if SEES.search(name := str(draft.at("pretrain"))):
        problem = f"{name} is a model of text and images, whose configurations are not translated"
        remedy = "leave it with its program; for SFT, see Pictures in docs/post_training.md"
        raise ConfigError(Fault("pretrain", problem, remedy, "not_supported"))
    build(source, draft)
    if not draft.at("pretrain"):
        draft.note("lost", "pretrain", "the source names no model: add `pretrain: FOLDER`, or a name of the Hub")
    for key, value in source.given.items():
        _remark(key, value, rules.get(key), source, draft)
    return draft


def _rename(source: Source) -> None:
    """Give the keys of an older version their present names."""
    for key in [key for key in source.given if key in source.table.was]:
        value = source.given.pop(key)
        source.given.setdefault(source.table.was[key], value)


def _leave_out_unassigned(source: Source, draft: Draft) -> None:
    for key, value in list(source.given.items()):
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if names := [name for text in texts for name in unassigned(text)]:
            rule = source.table.rule(key)
            if rule is None or rule.part != "idle":
                said = f"its value has {', '.join(dict.fromkeys(names))}, which the script does not assign"
                draft.note("lost", key, f"{said}; give --set NAME=VALUE")
                del source.given[key]


def _leave_out_no_numbers(source: Source, draft: Draft) -> None:
    """Leave out values that are no numbers, of keys whose default is one."""
    for key, value in list(source.given.items()):
        default = source.table.defaults.get(key)
        if is_number(default) and value is not None and not is_number(value):
            draft.note("lost", key, f"{value} is not a number; the default {default} takes its place")
            del source.given[key]


def _copy(key: str, value: Any, rule: Rule, source: Source, draft: Draft) -> None:
    if value is None:
        return
    if rule.part == "same":
        draft.put(rule.said.replace(LEARNER, source.role), value)
        return
    assert rule.values is not None, "the part `values` has values"
    name = value.lower() if isinstance(value, str) else value
    if not isinstance(name, list | dict) and name in rule.values:
        draft.put(rule.said.replace(LEARNER, source.role), rule.values[name])
    elif key in source.given:
        known = ", ".join(str(one).lower() for one in rule.values)
        draft.note("lost", key, f"{value} has no counterpart in {rule.said}; known are {known}")


def _remark(key: str, value: Any, rule: Rule | None, source: Source, draft: Draft) -> None:
    """Note why a key was not copied."""
    if any(note.place == key for note in draft.notes):
        return
    if rule is None:
        in_rlvr = draft.values.get("pipeline") == "rlvr"
        draft.note("lost", key, hint(key, in_rlvr) or f"unknown to this table of {source.program}")
    elif rule.part == "read" and key not in source.used or _is_dropped(value, rule, source, draft):
        draft.note("idle", key, "nothing reads it together with the other keys of the source")
    elif rule.part == "idle":
        draft.note("idle", key, rule.said)
    elif rule.part == "lost":
        if _loses_nothing(value, rule):
            draft.note("idle", key, "roll always does this, or the key asks for nothing")
        else:
            draft.note("lost", key, rule.said)


def _is_dropped(value: Any, rule: Rule, source: Source, draft: Draft) -> bool:
    """Whether a key was copied, and removed again because of another one."""
    is_copied = rule.part in ("same", "values") and value is not None
    return is_copied and draft.at(rule.said.replace(LEARNER, source.role)) is None


def _loses_nothing(value: Any, rule: Rule) -> bool:
    if rule.values is None:
        return not _asks(value)
    return not isinstance(value, list | dict) and value in rule.values


def _asks(value: Any) -> bool:
    """Whether a value asks for something: it is not null, false, 0, empty or none."""
    return not (value in OFF or value in (0, "", [], {})) if not isinstance(value, list | dict) else bool(value)
