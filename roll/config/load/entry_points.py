"""Reads names that installed packages register for rewards and environments as the `package.module:Name` behind them.

All that follows, and the run folder, has the path: it means the same where another package has the name, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll.algorithms.methods import is_path
from roll.config.roll_v2.translate import Translation
from roll.config.schema.fields import dotted
from roll.config.schema.model_rewards import MODEL_REWARDS
from roll.config.shipped import known_environments, known_rewards
from roll.errors import Fault
from roll.registry import ENVIRONMENT_GROUP, REWARD_GROUP, Registered, registered

Place = tuple[str, ...]


def settle_registered(done: Translation) -> None:
    """Replace the registered names of a configuration by their paths. A name that is not unique is a fault."""
    for block, key, group, own in (
        ("rewards", "reward", REWARD_GROUP, [*known_rewards(), *MODEL_REWARDS]),
        ("environments", "environment", ENVIRONMENT_GROUP, known_environments()),
    ):
        named = list(_named(done.values.get(block), (block,), key))
        entries = registered(group) if named else []
        for place, section, name in named:
            found = [entry for entry in entries if entry.name == name]
            done.faults += _faults(dotted((*place, key)), found, name in own)
            if found and name not in own:  # after a fault too, so that no second one says that the name is unknown
                section[key] = found[0].path
                done.is_whole &= is_path(found[0].path)


def _named(domains: Any, above: Place, key: str) -> Iterator[tuple[Place, dict[str, Any], str]]:
    """Yield the place, the block and the name of each reward or environment of domains, or of the parts of one."""
    for domain, section in domains.items() if isinstance(domains, dict) else ():
        if isinstance(section, dict):
            place = (*above, str(domain))
            if section.get("parts") and "parts" not in above:
                yield from _named(section["parts"], (*place, "parts"), key)
            else:
                yield place, section, str(section.get(key) or domain)


def _faults(place: str, found: Sequence[Registered], is_own: bool) -> Iterator[Fault]:
    paths = " or ".join(entry.path for entry in found)
    others = " and ".join(entry.package for entry in found)
    if found and is_own:
        problem = f"'{found[0].name}' is a name of roll, and is also registered by the package {others}"
        yield Fault(place, problem, f"write {paths} for that of the package; uninstall it to use roll's", "duplicate")
    elif len(found) > 1:
        problem = f"'{found[0].name}' is registered by the packages {others}"
        yield Fault(place, problem, f"write the one that you mean: {paths}", "duplicate")
    elif found and not is_path(found[0].path):
        problem = f"the package {others} registers '{found[0].name}' as '{found[0].path}'"
        yield Fault(place, problem, "its entry point must be package.module:Name; correct the package", "malformed")
