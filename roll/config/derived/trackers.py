"""The trackers of a run, their packages and their arguments."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import Parameter, signature

from roll.config.schema.pipelines import Config
from roll.errors import Fault
from roll.registry import nearest


@dataclass(frozen=True)
class TrackerPackage:
    """The package that a tracker needs, and the arguments that it accepts in `tracker_kwargs`."""

    name: str
    """Name of the package, for pip and for `import`."""
    opener: str | None = None
    """Function of the package whose arguments the tracker accepts. The package is imported to read its signature."""
    arguments: tuple[str, ...] = ()
    """Accepted arguments that are not arguments of `opener`."""

    def accepted(self, given: Iterable[str]) -> list[str]:
        """Return the names of the accepted arguments; all of `given` if any is. Raises what the import raises."""
        module = importlib.import_module(self.name)
        parameters = signature(getattr(module, self.opener)).parameters if self.opener else {}
        if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
            return list(given)
        return [*self.arguments, *parameters]


PACKAGES = {
    # The arguments of `SummaryWriter`, whose module would import torch.
    "tensorboard": TrackerPackage(
        "tensorboard", None, ("log_dir", "comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")
    ),
    "wandb": TrackerPackage("wandb", "init"),
    "swanlab": TrackerPackage("swanlab", "init"),
    "mlflow": TrackerPackage("mlflow", "start_run", ("tracking_uri", "experiment_name")),
    "trackio": TrackerPackage("trackio", "init"),
}
"""Package of each tracker, by the tracker's name."""
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
        if name in PACKAGES and not is_installed(package := PACKAGES[name].name):
            remedy = f"install it (`pip install {package}`) or remove `{name}` from `track_with`"
            yield Fault(
                "track_with", f"'{name}' is requested, but its package is not installed", remedy, "not_installed"
            )


def argument_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of arguments in `tracker_kwargs` that the tracker's package does not accept, if it is installed."""
    for name in chosen_trackers(config):
        given, package = config.tracker_kwargs.get(name), PACKAGES.get(name)
        if not given or package is None or not is_installed(package.name):
            continue
        try:
            accepted = package.accepted(given)
        except Exception as error:
            problem = f"'{name}' is requested, but its package cannot be imported: {type(error).__name__}: {error}"
            yield Fault("track_with", problem, f"reinstall it, or remove `{name}` from `track_with`", "not_installed")
            continue
        for key in (key for key in given if key not in accepted):
            problem = f"'{name}' has no argument '{key}'{nearest(key, accepted)}"
            yield Fault(f"tracker_kwargs.{name}.{key}", problem, f"use one of: {', '.join(accepted)}", "unknown_key")
