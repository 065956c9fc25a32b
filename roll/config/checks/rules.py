"""Rules that say the same of many keys, as rows of a table: a key without its owner, two keys that exclude each other,
a value that must stay below another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.model import LORA_KEYS, DataConfig, ModelConfig, TrainingConfig
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import FilterBoundsConfig
from roll.errors import Fault


@dataclass(frozen=True)
class Requires:
    """A key that has an effect only if its owner is set, too."""

    key: str
    owner: str
    remedy: str = "set {owner}=true, or remove this key"

    def fault(self, block: BaseModel, where: str) -> Fault | None:
        """See `rule_faults`."""
        given, value = block.model_fields_set, getattr(block, self.key)
        if self.key not in given or self.owner in given or value is None:
            return None
        problem = f"{value_text(value)}, but {self.owner} is not set"
        return Fault(f"{where}{self.key}", problem, self.remedy.format(owner=self.owner), "owner_missing")


@dataclass(frozen=True)
class Exclusive:
    """Two keys of which at most one may be set."""

    key: str
    other: str

    def fault(self, block: BaseModel, where: str) -> Fault | None:
        """See `rule_faults`."""
        value, other = getattr(block, self.key), getattr(block, self.other)
        if not value or not other:
            return None
        problem = f"{value_text(value)}, and {self.other} is {value_text(other)}"
        return Fault(f"{where}{self.key}", problem, "set only one of the two", "exclusive")


@dataclass(frozen=True)
class Below:
    """A key whose value must be below that of another key, if both have one."""

    key: str
    bound: str
    otherwise: str
    """What would happen otherwise."""
    remedy: str
    may_be_equal: bool = False

    def fault(self, block: BaseModel, where: str) -> Fault | None:
        """See `rule_faults`."""
        value, bound = getattr(block, self.key), getattr(block, self.bound)
        if value is None or bound is None or value < bound or (self.may_be_equal and value == bound):
            return None
        relation = "is more than" if self.may_be_equal else "is not below"
        problem = f"{value:g} {relation} {self.bound} {bound:g}: {self.otherwise}"
        return Fault(f"{where}{self.key}", problem, self.remedy, "not_below")


ADAPTER = "set lora_target (all-linear), or remove it"
RULES: Mapping[type[BaseModel], Sequence[Requires | Exclusive | Below]] = {
    RlvrConfig: [
        Requires("kl_loss_type", "use_kl_loss"),
        Requires("kl_loss_importance", "use_kl_loss"),
        Requires("kl_penalty", "add_token_level_kl"),
        Requires("kl_horizon", "target_kl", "set target_kl, or remove this key: without it, the KL weight is constant"),
        Requires("error_max_len_threshold", "error_max_len_clip"),
        Requires("difficulty_low_threshold", "difficulty_mask"),
        Requires("difficulty_high_threshold", "difficulty_mask"),
        Below(
            "difficulty_low_threshold",
            "difficulty_high_threshold",
            "every prompt would be left out of the loss",
            "lower it; 0.1 and 0.95 are usual",
        ),
        Below("clip_cov_low", "clip_cov_high", "no token is between them", "lower it (1 and 5 are usual)"),
    ],
    OfflineConfig: [Requires("truncation", "max_length", "set max_length, or remove it")],
    ModelConfig: [Requires(key, "lora_target", ADAPTER) for key in LORA_KEYS],
    TrainingConfig: [Exclusive("warmup_ratio", "warmup_steps")],
    DataConfig: [Exclusive("prompt", "messages")],
    FilterBoundsConfig: [
        Below("threshold_down", "threshold_up", "every group would be replaced", "set it below threshold_up")
    ],
    EnvironmentConfig: [
        Below(
            "step_timeout",
            "episode_timeout",
            "a single step could outlast the episode",
            "lower it, or raise episode_timeout",
            may_be_equal=True,
        )
    ],
}
"""The rules of each kind of block."""


def rule_faults(block: BaseModel, where: str = "") -> Iterator[Fault]:
    """Yield the faults of a block and of all blocks in it, by the rows of `RULES`. `where` is the block's path."""
    for kind, rules in RULES.items():
        if isinstance(block, kind):
            yield from (fault for rule in rules if (fault := rule.fault(block, where)))
    for key, value in block:
        inner = value.items() if isinstance(value, Mapping) else [(None, value)]
        for name, one in inner:
            if isinstance(one, BaseModel):
                yield from rule_faults(one, f"{where}{key}." if name is None else f"{where}{key}.{name}.")


def value_text(value: Any) -> str:
    """Return a value as text for a message: a number without trailing zeros, a text in quotes, `true` or `false`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else repr(value)
