"""The trackers of a run, and their packages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from roll.config.schema.pipelines import Config
from roll.errors import Fault

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""Package of each tracker, by the tracker's name. The names for pip and for `import` are equal."""
TRACKERS = (*PACKAGES, "none")


def chosen_trackers(config: Config) -> tuple[str, ...]:
    """Return the names in `track_with` without duplicates, including `none`."""
    return tuple(dict.fromkeys([config.track_with] if isinstance(config.track_with, str) else config.track_with))


def is_installed(package: str) -> bool:
    """Whether the package can be imported."""
    return find_spec(package) is not None


def missing_packages(config: Config) -> Iterator[Fault]:
    """Yield faults of requested trackers whose package is not installed."""
    for name in chosen_trackers(config):
        package = PACKAGES.get(name)
        if package and not is_installed(package):
            remedy = f"install it (`pip install {package}`) or remove `{name}` from `track_with`"
            yield Fault("track_with", f"'{name}' is requested, but its package is not installed", remedy)
