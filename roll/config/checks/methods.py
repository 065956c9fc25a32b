"""Checks that keys of the user's own methods are not given for a built-in method."""

from __future__ import annotations

from collections.abc import Iterator

from roll.algorithms.methods.kinds import KINDS
from roll.config.schema.pipelines import Config
from roll.errors import Fault


def method_faults(config: Config) -> Iterator[Fault]:
    """Return faults of such keys, because a built-in method reads keys of the root."""
    for kind in KINDS.values():
        method = getattr(config, kind.key, None)
        if method is not None and not method.is_users and getattr(config, kind.arguments):
            keys = f"its keys stand at the root: {', '.join(method.keys)}" if method.keys else "it has no keys"
            problem = f"given, but {kind.key} {method} is built in, and {keys}"
            yield Fault(kind.arguments, problem, f"remove it, or set {kind.key} to your own, as package.module:Name")
