"""Tables of keys of other programs: their targets exist, no two disagree, and no key vanishes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema.faults import LEARNER
from roll.config.schema.fields import ANY_NAME, walk
from roll.config.schema.foreign_names import OTHER_NAMES, OTHER_NAMES_IN_RLVR
from roll.config.schema.pipelines import PIPELINES
from roll.convert.docs import HEADING, PAGES, key_tables
from roll.convert.recognise import translate_source
from roll.convert.roles import on_cpu
from roll.convert.source import Source
from roll.convert.tables import Rule, Table, hint, table
from roll.errors import ConfigError

TABLES = {
    "grpo": ("TRL", ("trl", "trl_grpo")),
    "sft": ("TRL", ("trl", "trl_rows")),
    "dpo": ("TRL", ("trl", "trl_rows")),
    "reward": ("TRL", ("trl", "trl_rows")),
    "ppo": ("verl", ("verl",)),
    "sft_engine": ("verl", ("verl_sft",)),
}
SOURCES = [
    *((program, trainer, names) for trainer, (program, names) in TABLES.items()),
    ("OpenRLHF", "ppo", ("openrlhf", "openrlhf_ppo")),
    ("OpenRLHF", "dpo", ("openrlhf", "openrlhf_rows")),
]
FOUND = {names: table(*names) for _, _, names in SOURCES}
KEYS = {".".join(step for step in key.path if step != ANY_NAME) for root in PIPELINES.values() for key in walk(root)}


def rules(found: Table) -> Iterator[tuple[str, Rule]]:
    """Yield each rule that names a key of roll, with the key of the program."""
    yield from ((key, rule) for key, rule in found.rules.items() if rule.part in ("same", "values"))


@pytest.mark.parametrize("names", FOUND, ids="-".join)
def test_target_keys_are_in_the_schema(names: tuple[str, ...]) -> None:
    roles = ("actor_train", "sft_train", "reward_train")
    for key, rule in rules(FOUND[names]):
        paths = [rule.said.replace(LEARNER, role) for role in roles]
        assert any(path in KEYS for path in paths), f"{key}: {rule.said}"


@pytest.mark.parametrize("names", FOUND, ids="-".join)
def test_tables_agree_with_refused_names(names: tuple[str, ...]) -> None:
    for key, rule in rules(FOUND[names]):
        for refused in (OTHER_NAMES, OTHER_NAMES_IN_RLVR):
            if (found := refused.get(key)) and found.key:
                assert rule.said.split(".")[-1] == found.key.split(".")[-1], key


@pytest.mark.parametrize("names", FOUND, ids="-".join)
def test_default_has_a_rule_that_reads_it(names: tuple[str, ...]) -> None:
    for key in FOUND[names].defaults:
        rule = FOUND[names].rule(key)
        assert rule is not None and rule.part in ("same", "values", "read"), key


@pytest.mark.parametrize("names", FOUND, ids="-".join)
def test_older_names_stand_for_keys_with_rules(names: tuple[str, ...]) -> None:
    for old, new in FOUND[names].was.items():
        assert FOUND[names].rule(new) is not None, f"{old}: {new}"
        assert FOUND[names].rule(old) is None, old


@pytest.mark.parametrize("odd", [None, "odd", [1], True])
@pytest.mark.parametrize(("program", "trainer", "names"), SOURCES)
def test_no_key_vanishes(program: str, trainer: str, names: tuple[str, ...], odd: Any) -> None:
    """Each key is translated, read, or named in a note; also one that no table has, and one with an odd value. None is
    the default, or 3.
    """
    found = FOUND[names]
    for key, rule in [*found.rules.items(), ("no_such.key", None)]:
        place = key.replace("*", "inner")
        value = found.defaults.get(key, 3) if odd is None else odd
        source = Source(program, trainer, found, {place: value}, 8, "", 1000)
        if rule is not None and rule.part == "refused":
            with pytest.raises(ConfigError):
                translate_source(source)
            continue
        noted = place in {note.place for note in translate_source(source).notes}
        copied = rule is not None and rule.part in ("same", "values")
        assert noted or copied or place in source.used, place


@pytest.mark.parametrize(("program", "trainer", "names"), SOURCES)
def test_no_copied_key_vanishes_on_the_cpu(program: str, trainer: str, names: tuple[str, ...]) -> None:
    """Each copied key keeps its value, or is named in a note."""
    found = FOUND[names]
    for key, rule in rules(found):
        for value in (found.defaults.get(key, 3), 2, False, *(rule.values or ())):
            source = Source(program, trainer, found, {key: value}, 1, "", 1000)
            draft = translate_source(source)
            path = rule.said.replace(LEARNER, source.role)
            copied = draft.at(path)
            on_cpu(draft, source)
            noted = key in {note.place for note in draft.notes}
            assert noted or copied is not None and draft.at(path) == copied, (key, value)


def test_unknown_key_gets_hint_of_refused_names() -> None:
    assert "lora_target" in hint("some.block.use_lora", in_rlvr=True)
    assert hint("some.block.unheard_of", in_rlvr=True) == ""


def test_pages_have_the_tables_of_the_command() -> None:
    folder = Path(__file__).parents[3] / "docs" / "moving"
    for page in PAGES:
        text = (folder / page).read_text(encoding="utf-8")
        assert text[text.index(HEADING) :] == key_tables(page), "run python -m roll.convert.docs docs/moving"
