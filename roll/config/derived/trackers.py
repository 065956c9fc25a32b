"""The trackers that a run can have, and the packages that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from roll.config.schema.pipelines import Config
from roll.errors import Fault

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "mlflow": "mlflow", "trackio": "trackio"}
"""For each tracker, the package that it needs; its name for pip and for `import` is the same."""
TRACKERS = (*PACKAGES, "none")


def chosen_trackers(config: Config) -> tuple[str, ...]:
    """What `track_with` names, each once, as a tuple whichever way it was written; `none` included."""
    return tuple(dict.fromkeys([config.track_with] if isinstance(config.track_with, str) else config.track_with))


def is_installed(package: str) -> bool:
    """Whether `import` would find the package."""
    return find_spec(package) is not None


def missing_packages(config: Config) -> Iterator[Fault]:
    """Trackers that are asked for and whose package is not there."""
    for name in chosen_trackers(config):
        package = PACKAGES.get(name)
        if package and not is_installed(package):
            remedy = f"install it (`pip install {package}`) or take `{name}` out of `track_with`"
            yield Fault("track_with", f"'{name}' is asked for, but the package is not installed", remedy)
