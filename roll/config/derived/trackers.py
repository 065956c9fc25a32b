"""The trackers of a run, and their packages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from roll.config.schema.pipelines import Config
from roll.errors import Fault

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "mlflow": "mlflow", "trackio": "trackio"}
"""Package of each tracker. Its name is the same for pip and for `import`."""
TRACKERS = (*PACKAGES, "none")


def chosen_trackers(config: Config) -> tuple[str, ...]:
    """Return the names in `track_with` without repetition, including `none`."""
    return tuple(dict.fromkeys([config.track_with] if isinstance(config.track_with, str) else config.track_with))


def is_installed(package: str) -> bool:
    """Whether `import` would find the package."""
    return find_spec(package) is not None


def missing_packages(config: Config) -> Iterator[Fault]:
    """Return faults of requested trackers without their package."""
    for name in chosen_trackers(config):
        package = PACKAGES.get(name)
        if package and not is_installed(package):
            remedy = f"install it (`pip install {package}`) or take `{name}` out of `track_with`"
            yield Fault("track_with", f"'{name}' is asked for, but the package is not installed", remedy)
