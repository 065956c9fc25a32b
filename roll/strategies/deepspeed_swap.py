"""Gives each process swap folders of its own on NVMe, because DeepSpeed names swap files only by rank and parameter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from roll.config.checks.deepspeed import swap_paths
from roll.config.schema.engine import DeepSpeedConfig
from roll.errors import ConfigError, Fault
from roll.strategies.base import Rank
from roll.system.own_folder import own_folder, remove_ownerless


@contextmanager
def own_swap(config: DeepSpeedConfig, rank: Rank) -> Iterator[DeepSpeedConfig]:
    """Yield the configuration with new private folders below its `nvme_path`s, which are removed at the end.

    What processes left there that were killed is removed at the beginning.

    Raises:
        ConfigError: this machine lacks what an offload to NVMe needs.
    """
    zero, paths = config.zero_optimization, swap_paths(config)
    with ExitStack() as folders:
        if paths:
            _check(paths, rank)
        own = {}
        for key, path in paths.items():
            remove_ownerless(path)
            own[key] = getattr(zero, key).model_copy(update={"nvme_path": str(folders.enter_context(own_folder(path)))})
        yield config.model_copy(update={"zero_optimization": zero.model_copy(update=own)})


def _check(paths: dict[str, Path], rank: Rank) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]

    zero = f"{rank.role}.strategy_args.strategy_config.zero_optimization"
    faults = [
        Fault(f"{zero}.{key}.nvme_path", f"{path} is not a writable folder on this host", "make it on every host of the role")
        for key, path in paths.items()
        if not os.access(path, os.W_OK | os.X_OK) or not path.is_dir()
    ]
    if faults:
        raise ConfigError(faults)
    if not AsyncIOBuilder().is_compatible():
        problem = "an offload to nvme needs libaio with its headers, which is not here"
        raise ConfigError([Fault(zero, problem, "install libaio-dev (Debian) or libaio-devel (Red Hat), or offload to cpu")])
