"""Every key of six files of ROLL v0.2.1, and whether it is read as it is, said in a warning, or refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from roll.config.derived.devices import parse_devices
from roll.config.load.loader import read_config
from roll.config.roll_v2.meanings import is_of_roll, settle_meanings
from roll.config.roll_v2.translate import translate

TABLE = Path(__file__).with_name("keys_of_roll.tsv")
"""Lines of: kind, names of the files with this key and value, key path, value as JSON. Paths of models are shortened,
the prompts of environments replaced, and presets left out but for their stage.
"""
FILES = {
    "lora": "rlvr_lora_zero3",
    "sp2": "rlvr_zero3_sp2",
    "grpo": "example_grpo",
    "gspo": "example_gspo",
    "ppo": "example_ppo",
    "lake": "agent_val_frozen_lake",
}


def rows(name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the kind, the key path and the value of every key of a file."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        kind, files, place, value = line.split("\t")
        if name in files.split():
            yield kind, place, json.loads(value)


def nested(name: str) -> dict[str, Any]:
    """Return a file as Hydra composes it."""
    values: dict[str, Any] = {}
    for _, place, value in rows(name):
        block, (*above, key) = values, place.split(".")
        for step in above:
            block = block.setdefault(step, {})
        block[key] = value
    return values


def at(values: Any, place: str) -> Any:
    for step in place.split("."):
        values = values.get(step) if isinstance(values, Mapping) else None
    return values


def kind_of(place: str, value: Any, read: Mapping[str, Any], warned: list[str], refused: list[str]) -> str:
    """Return whether a key is refused, said (by itself or with its block), read with the same value, or none of
    these.
    """
    steps = place.split(".")
    places = {".".join(steps[:end]) for end in range(1, len(steps) + 1)}
    if places & set(refused):
        return "refused"
    if places & {text.split(":")[0] for text in warned}:
        return "said"
    same = parse_devices(value) if steps[-1] == "device_mapping" else value
    return "read" if at(read, place) == same else "silent"


def found(name: str) -> dict[str, str]:
    values = nested(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(DictConfig(values), passing=(), imports=False)
    done = translate(values, "")
    assert is_of_roll(done)
    settle_meanings(done)
    warned, refused = [str(one.message) for one in caught], [fault.place for fault in loaded.faults]
    return {place: kind_of(place, value, done.values, warned, refused) for _, place, value in rows(name)}


@pytest.mark.parametrize("name", FILES)
def test_roll_keys_are_handled_as_the_table_lists(name: str) -> None:
    assert found(name) == {place: kind for kind, place, _ in rows(name)}


def test_no_key_of_the_table_is_silent() -> None:
    kinds = {name: [kind for kind, _, _ in rows(name)] for name in FILES}
    assert all(set(of_file) <= {"read", "said", "refused"} and len(of_file) > 90 for of_file in kinds.values())
