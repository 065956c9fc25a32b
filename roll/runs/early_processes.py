"""Starts the processes of a run's roles.

The models' processes start while the driver still checks the data. They import the libraries of their backend, which
takes most of a start's CPU time, and wait for their settings. No model is loaded and no device is used before the check
has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.derived.placement import is_trainer_side, model_roles
from roll.config.plan.plan import Plan
from roll.config.schema.backend import EngineMemory
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import ExperimentConfig
from roll.ray.cluster import RECORD, ClusterSession
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements

CUBLAS_WORKSPACE = ":4096:8"
"""Workspace configuration that torch requires for deterministic cuBLAS."""


def early_groups(config: Config, plan: Plan, session: ClusterSession) -> dict[str, WorkerGroup[Any]]:
    """Start the processes of all models, and return the groups by role.

    The others import their libraries after the engines, which take longest to start: imports slow each other down, even
    on hosts with many cores.
    """
    roles = {name: role for name, role in model_roles(config).items() if name in plan.roles}
    engines = [name for name, role in roles.items() if isinstance(role.strategy_args.traits.memory, EngineMemory)]
    groups: dict[str, WorkerGroup[Any]] = {}
    imported = list[object]()  # by the engines
    for name in sorted(roles, key=lambda name: name not in engines):
        role = roles[name]
        group = groups[name] = new_group(config, plan, session, name, role.system_envs, is_trainer_side(name))
        if name in engines:
            imported += group.preload(role.strategy_args.preload)
        else:
            group.preload(role.strategy_args.preload, imported)
    return groups


def new_group(
    config: Config,
    plan: Plan,
    session: ClusterSession,
    name: str,
    system_envs: Mapping[str, str],
    blocking: bool,
) -> WorkerGroup[Any]:
    """Start the processes of a role. For the rest, see `WorkerGroup`."""
    environment = {"TMPDIR": str(session.scratch)} | worker_environment(plan, config, system_envs)
    role = plan.roles[name]
    models = (plan.roles[model] for model in model_roles(config) if model in plan.roles)
    cpu_ranks = sum(model.ranks for model in models if model.on_cpu and not model.is_outside)
    places = worker_placements(role, config.num_gpus_per_node, environment, cpu_ranks, session.places)
    record = session.shared_memory / f"{name}{RECORD}"
    return WorkerGroup[Any](name, places, session.logs, record, blocking, role.replica_size, session.places)


def worker_environment(plan: Plan, config: ExperimentConfig, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a role's processes.

    `own`, the role's `system_envs`, takes precedence over the root's `system_envs`, and these over `.deepspeed_env`.
    """
    chosen = {"CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE} if config.deterministic else {}
    return {**chosen, **plan.environment, **config.system_envs, **own}
