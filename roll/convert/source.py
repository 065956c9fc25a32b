"""The source of a translation: which program it is for, and its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from roll.convert.tables import Table

NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}


PAIR = 2
SAMPLING = ("ppo", "one_step_off", "fully_async", "grpo", "rloo")
"""Trainers that sample responses."""


@dataclass
class Source:
    """The keys of a file or command line of another program, with the program's defaults."""

    program: str
    """TRL, verl or OpenRLHF."""
    trainer: str
    """The trainer of the program: ppo (verl, OpenRLHF), grpo, sft, dpo, kto, orpo or reward."""
    table: Table
    given: dict[str, Any]
    gpus: int = 1
    """Number of GPUs, where no key says it."""
    launcher: str = ""
    """Configuration file that accelerate is started with, which says how the model is sharded."""
    rows: int | None = None
    """Number of training rows, if known."""
    computed: tuple[str, ...] = ()
    """Keys whose values a Python script computes."""
    changes: tuple[str, ...] = ()
    """Methods by which a Python script changes the rows."""
    used: set[str] = field(default_factory=set)
    """Keys that code has read."""

    @property
    def in_rlvr(self) -> bool:
        """Whether the trainer samples responses."""
        return self.trainer in SAMPLING

    @property
    def role(self) -> str:
        """Return the role of roll that the trainer trains."""
        return {"sft": "sft_train", "sft_engine": "sft_train", "reward": "reward_train"}.get(
            self.trainer, "actor_train"
        )

    @property
    def devices(self) -> str:
        """Return the devices of the trained role, as a value of `device_mapping`."""
        return f"list(range(0,{self.gpus}))"

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that is given, or else the first default of the program."""
        for key in keys:
            if key in self.given:
                self.used.update(one for one in keys if one in self.given)
                if self.given[key] is not None:
                    return self.given[key]
        return next((self.table.defaults[key] for key in keys if key in self.table.defaults), None)

    def number(self, *keys: str) -> float:
        """Return the value of the first of these keys that is given and a number, or else the default, or 0."""
        value = self.get(*keys)
        if not is_number(value):
            value = next((self.table.defaults[key] for key in keys if key in self.table.defaults), 0)
        return value if is_number(value) else 0

    def count(self, *keys: str) -> int:
        """Return `number` as a whole number."""
        return int(self.number(*keys))

    def pair(self, *keys: str) -> tuple[float, float]:
        """Return the two numbers that the first of these keys holds, or else the default."""
        value = self.get(*keys)
        if not (isinstance(value, list) and len(value) == PAIR):
            value = next(self.table.defaults[key] for key in keys if key in self.table.defaults)
        return value[0], value[1]

    def named(self, key: str, names: Mapping[Any, str], otherwise: str) -> tuple[str, bool]:
        """Return roll's name for the value of a key, and whether there is one; if not, it is `otherwise`."""
        value = self.get(key)
        name = names.get(value) if isinstance(value, str) else None
        return name or otherwise, name is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """Return the given keys below a prefix, as a flat block without the prefix."""
        found = {key: value for key, value in self.given.items() if key.startswith(f"{prefix}.")}
        self.used.update(found)
        return {key.removeprefix(f"{prefix}."): value for key, value in found.items()}


def is_number(value: Any) -> bool:
    """Whether a value is a number; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_value(text: str) -> Any:
    """Return the value that a text of a command line means: a number, a truth value, None, a list, or the text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if NUMBER.fullmatch(text):
        number = float(text.replace("_", ""))
        return int(number) if number.is_integer() and not re.search(r"[.eE]", text) else number
    if text[:1] in "[{":
        try:
            return _with_numbers(yaml.safe_load(text))
        except yaml.YAMLError:
            return text
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _with_numbers(value: Any) -> Any:
    """Return a value of YAML with `1e-6` as a number, which YAML reads as a text."""
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_numbers(one) for key, one in value.items()}
    return plain_value(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def flat(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a YAML file with numbers as numbers. Nested blocks stay values."""
    return {str(key): _with_numbers(value) for key, value in block.items()}


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `KEY=VALUE`, `+KEY=VALUE` and `++KEY=VALUE`; other words are skipped."""
    found = {}
    for word in words:
        match = re.match(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", word, re.DOTALL)
        if match and not word.startswith("-"):
            found[match[1]] = plain_value(match[2].strip())
    return resolved(found)


def resolved(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with `${key}` in their texts replaced by the values of other keys."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{([\w.]+)\}", lambda match: str(keys.get(match[1], match[0])), value)

    return {key: replaced(value) for key, value in keys.items()}


def flagged(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `--key value`, `--key=value`, `--key value value` and `--key`, which is true."""
    found: dict[str, Any] = {}
    key = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word[2:].partition("=")
            key = name.replace("-", "_") if "." not in name else name
            found[key] = plain_value(value) if sign else True
        elif key is not None:
            before = found[key]
            value = plain_value(word)
            found[key] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return found
