"""Runs the checks that backends have of their own blocks, each in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles, started_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import RoleConfig
from roll.errors import Fault


@runtime_checkable
class OwnFaults(Protocol):
    """A block `strategy_args` with checks of its own."""

    def faults(self, name: str, role: RoleConfig, config: Config, shape: ModelShape | None) -> Iterable[Fault]:
        """Return the faults of a role with this block. `shape` is None unless its model is on this machine."""
        ...


@runtime_checkable
class OwnNeeds(Protocol):
    """A block `strategy_args` whose backend needs packages or kernels."""

    def missing(self, name: str, role: RoleConfig, shape: ModelShape | None) -> Iterable[Fault]:
        """Return faults of what this machine lacks. In a dry run they are only warnings."""
        ...


@runtime_checkable
class OwnServices(Protocol):
    """A block `strategy_args` whose backend is a service that runs already."""

    def unready(self, name: str, role: RoleConfig, config: Config) -> Iterable[Fault]:
        """Ask the service, and return faults of what it lacks. In a dry run they are only warnings."""
        ...


@runtime_checkable
class OwnWarnings(Protocol):
    """A block `strategy_args` with keys that, for some roles, have no effect or another meaning."""

    def warnings(self, name: str, role: RoleConfig) -> Iterable[str]:
        """Return a warning about each such key that a role with this block sets."""
        ...


def backend_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return the faults that the backends of all roles find. `shapes` has the known shapes of models by role."""
    return [
        fault
        for name, role in model_roles(config).items()
        if isinstance(role.strategy_args, OwnFaults)
        for fault in role.strategy_args.faults(name, role, config, shapes.get(name))
    ]


def backend_needs(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return faults of packages, kernels and services of the roles' backends that this machine lacks."""
    faults = list[Fault]()
    for name, role in started_roles(config).items():
        if isinstance(role.strategy_args, OwnNeeds):
            faults += role.strategy_args.missing(name, role, shapes.get(name))
        if isinstance(role.strategy_args, OwnServices):
            faults += role.strategy_args.unready(name, role, config)
    return faults


def backend_warnings(config: Config) -> list[str]:
    """Return warnings about keys of the roles' backends that have no effect or another meaning."""
    return [
        warning
        for name, role in model_roles(config).items()
        if isinstance(role.strategy_args, OwnWarnings)
        for warning in role.strategy_args.warnings(name, role)
    ]
