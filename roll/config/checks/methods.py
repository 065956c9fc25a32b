"""Checks that keys of the user's own methods are not given for a built-in method."""

from __future__ import annotations

from collections.abc import Iterator

from roll.algorithms.methods.kinds import KINDS
from roll.config.schema.pipelines import Config
from roll.errors import Fault


def method_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault for each block of arguments (`policy_loss_args` and others) that is given although the method is
    built in.

    A built-in method reads its keys from the root.
    """
    for kind in KINDS.values():
        method = getattr(config, kind.key, None)
        if method is not None and not method.is_users and getattr(config, kind.arguments):
            keys = f"its keys are at the root: {', '.join(method.keys)}" if method.keys else "it has no keys"
            problem = f"set, but {kind.key} {method} is built in, and {keys}"
            yield Fault(
                kind.arguments, problem, f"remove it, or set {kind.key} to your own method, as package.module:Name"
            )
