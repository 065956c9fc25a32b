"""Gives each process private swap folders on NVMe, because DeepSpeed names swap files only by rank and parameter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from roll.backend import Rank
from roll.errors import ConfigError, Fault
from roll.system.own_folder import own_folder, remove_ownerless
from roll.training.deepspeed.settings import DeepSpeedConfig


@contextmanager
def own_swap(config: DeepSpeedConfig, rank: Rank) -> Iterator[DeepSpeedConfig]:
    """Yield the configuration with each `nvme_path` replaced by a new private folder below it. The folders are removed
    at the end.

    At the start, folders left behind by killed processes are removed.

    Raises:
        ConfigError: an `nvme_path` is not a writable folder, or libaio is not installed.
    """
    zero, paths = config.zero_optimization, config.swap_paths
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
        Fault(
            f"{zero}.{key}.nvme_path",
            f"{path} is not a writable folder on this host",
            "create it on every host of the role",
        )
        for key, path in paths.items()
        if not os.access(path, os.W_OK | os.X_OK) or not path.is_dir()
    ]
    if faults:
        raise ConfigError(faults)
    if not AsyncIOBuilder().is_compatible():
        problem = "offloading to NVMe needs libaio with its headers, which is not installed"
        raise ConfigError(
            [Fault(zero, problem, "install libaio-dev (Debian) or libaio-devel (Red Hat), or offload to cpu")]
        )
