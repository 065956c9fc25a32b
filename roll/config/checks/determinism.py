"""Checks `deterministic: true` against keys with which runs still differ. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.placement import model_roles, vllm_config
from roll.config.schema.faults import shown
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def determinism_faults(config: Config) -> Iterator[Fault]:
    """Return faults of compiled layers, which choose kernels by measured speed, so that sums differ in the next run."""
    for name, role in model_roles(config).items() if config.deterministic else ():
        wish = role.model_args.compile_layers
        if vllm_config(role) is None and (wish is True or wish == "auto" and role.device_mapping):
            problem = f"{shown(wish)}, but deterministic is true, and compiled layers choose kernels by measured speed"
            yield Fault(f"{name}.model_args.compile_layers", problem, f"set {name}.model_args.compile_layers=false")


def determinism_warnings(config: RlvrConfig) -> Iterator[str]:
    """Return warnings about what deterministic training does not fix."""
    if not config.deterministic:
        return
    if not config.actor_infer.generating_args.seeded:
        yield "deterministic: responses are sampled anew in each run; set actor_infer.generating_args.seeded=true"
    if config.async_generation_ratio:
        yield "deterministic: the weights that sample a token depend on timing; set async_generation_ratio=0"
