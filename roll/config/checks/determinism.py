"""Checks `deterministic: true` against keys that still make two runs differ. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.placement import model_roles
from roll.config.schema.faults import printable
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def determinism_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault for each role with compiled layers: they choose kernels by measured speed, so rounding may differ
    between runs.
    """
    for name, role in model_roles(config).items() if config.deterministic else ():
        wish = role.model_args.compile_layers
        if not role.strategy_args.traits.own_kernels and (wish is True or wish == "auto" and role.device_mapping):
            problem = (
                f"{printable(wish)}, but deterministic is true, and compiled layers "
                "choose their kernels by measured speed"
            )
            yield Fault(f"{name}.model_args.compile_layers", problem, f"set {name}.model_args.compile_layers=false")


def determinism_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about differences between runs that `deterministic` alone does not prevent."""
    if not config.deterministic:
        return
    if not config.actor_infer.generating_args.seeded:
        yield (
            "deterministic: the sampled responses still differ between runs; set "
            "actor_infer.generating_args.seeded=true"
        )
    if config.async_generation_ratio:
        yield (
            "deterministic: it depends on timing which version of the weights samples a token; set "
            "async_generation_ratio=0"
        )
