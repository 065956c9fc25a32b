"""The plan of a checked configuration: roles on devices, batches, reference and memory. Only reads files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from roll.config.checks.backends import backend_faults, backend_needs, backend_warnings
from roll.config.checks.engine_kernels import engine_kernel_faults
from roll.config.checks.experiment import experiment_faults, experiment_notes, experiment_warnings, uses_reference
from roll.config.checks.pictures import picture_warnings, seeing_faults
from roll.config.checks.quantized import quantized_faults
from roll.config.derived.batch import BatchPlan, batch_faults, batch_warnings, plan_batch
from roll.config.derived.domains import ENVIRONMENTS
from roll.config.derived.fixed_roles import PREFIX, all_partners, model_reward
from roll.config.derived.flops import GpuRates, gpu_rates
from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import RolePlan, place, placement_faults, placement_warnings, started_roles, turns
from roll.config.load.env_file import variable_faults
from roll.config.load.on_disk import DiskFacts, check_disk
from roll.config.plan.memory import RoleMemory, estimate, with_turns
from roll.config.schema.offline import DpoConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError, Fault
from roll.system.gpus import driver_gpus

ReferencePlan = Literal["unused", "role", "adapter_off"]


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a configuration before anything starts."""

    roles: Mapping[str, RolePlan]
    """Groups of workers to start, by name: the roles with a model, then `rewards.<domain>`, `environments.<domain>` and
    the partners behind URLs.

    An unused reference is not included, nor in a replay what makes rollouts."""
    batch: BatchPlan
    reference: ReferencePlan
    """Source of the reference log-probs: none, the role `reference`, or `actor_train` with its adapter off."""
    nodes: int
    """Number of nodes that the devices are on, 0 on the CPU."""
    memory: Mapping[str, RoleMemory]
    """Memory estimates by role, for roles whose model has a known shape."""
    turns: Mapping[str, frozenset[str]]
    """For each role that takes turns on its devices, the roles with which it takes turns."""
    notes: tuple[str, ...]
    """Notes on unknown facts, on automatic choices, and on possible savings."""
    warnings: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables from `.deepspeed_env`, which every worker gets."""
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Shapes of models by role, as far as they are known."""
    gpu: GpuRates | None = None
    """Rates of the GPUs: those of `gpu_name`, or of this machine. None if unknown."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Return every device that any role uses, in ascending order."""
        return tuple(sorted({device for role in self.roles.values() for device in role.all_devices}))


def make_plan(config: Config, earlier: Sequence[Fault] = ()) -> Plan:
    """Return the plan of a configuration, after all checks that the schema cannot make.

    Missing models, data files, packages and kernels are faults. In a dry run they are only warnings, because the run
    may happen on another machine.

    Args:
        earlier: Faults that were found before. They are raised together with the faults found here.

    Raises:
        ConfigError: the configuration has faults. The error lists all of them.
    """
    faults = [*earlier, *placement_faults(config), *experiment_faults(config), *batch_faults(config)]
    found = check_disk(config)
    faults += [*variable_faults(config), *found.faults, *backend_faults(config, found.shapes)]
    faults += [*seeing_faults(config, found.shapes), *quantized_faults(config, found.shapes)]
    faults += engine_kernel_faults(config, found.shapes)
    warnings = [*placement_warnings(config), *batch_warnings(config), *experiment_warnings(config)]
    warnings += [*backend_warnings(config), *picture_warnings(config, found.shapes), *found.warnings]
    missing = [*found.missing, *backend_needs(config, found.shapes)]
    if config.dry_run:
        warnings += [f"{fault.place}: {fault.problem}; {fault.remedy}" for fault in missing]
    else:
        faults += missing
    if faults:
        raise ConfigError(*list(dict.fromkeys(faults)))
    return _plan(config, found, warnings)


def are_apart(plan: Plan) -> bool:
    """Return whether policy and critic share no device. Two roles on the CPU share it."""
    policy, critic = plan.roles["actor_train"], plan.roles["critic"]
    return not (policy.on_cpu and critic.on_cpu) and policy.all_devices.isdisjoint(critic.all_devices)


def _plan(config: Config, found: DiskFacts, warnings: list[str]) -> Plan:
    batch = plan_batch(config)
    reference = _reference(config)
    models = {name: role for name, role in started_roles(config).items() if name != "reference" or reference == "role"}
    notes = (*found.notes, *experiment_notes(config))
    roles = {name: place(name, role, batch.longest_example) for name, role in models.items()}
    memory = {
        name: estimate(roles[name], role, found.shapes[name], batch.longest_example)
        for name, role in models.items()
        if name in found.shapes and not roles[name].is_outside
    }
    warnings += [
        _tight_budget(role, batch)
        for role in roles.values()
        if 0 < (role.tokens_per_microbatch or 0) < batch.longest_example
    ]
    if isinstance(config, RlvrConfig) and config.replay_from is None:
        roles |= {
            name: RolePlan(name, "reward", ((),) * (reward.world_size if model_reward(domain, reward) is None else 1))
            for domain, reward in config.rewards.items()
            if (name := f"{PREFIX}{domain}") not in roles
        }
        roles |= {
            (name := f"{ENVIRONMENTS}{domain}"): RolePlan(name, "environment", ((),) * section.world_size)
            for domain, section in config.environments.items()
        }
        roles |= {
            place: RolePlan(place, "partner", ((),))
            for place, (_, _, partner) in all_partners(config).items()
            if partner.type == "api"
        }
    last = max((device for role in roles.values() for device in role.all_devices), default=-1)
    nodes = -(-(last + 1) // config.num_gpus_per_node)
    taking_turns = turns(config, roles)
    memory |= {
        name: with_turns(memory[name], roles[name], role, config, batch)
        for name, role in models.items()
        if name in memory and name in taking_turns
    }
    return Plan(
        roles,
        batch,
        reference,
        nodes,
        memory,
        taking_turns,
        notes,
        tuple(warnings),
        found.environment,
        {name: shape for name, shape in found.shapes.items() if name in models},
        _gpu(config),
    )


def _gpu(config: Config) -> GpuRates | None:
    """Return the rates of the GPUs that the configuration names, or of this machine's if all are of one kind."""
    if config.gpu_name is not None:
        return gpu_rates(config.gpu_name)
    names = set(driver_gpus())
    return gpu_rates(names.pop()) if len(names) == 1 else None


def _reference(config: Config) -> ReferencePlan:
    if not isinstance(config, RlvrConfig | DpoConfig) or not uses_reference(config):
        return "unused"
    return "role" if config.reference else "adapter_off"


def _tight_budget(role: RolePlan, batch: BatchPlan) -> str:
    unit = "sequence" if batch.longest_example == batch.longest_sequence else "pair"
    longest = f"the longest {unit}, {batch.longest_example} tokens, which runs in a micro-batch of its own"
    return f"{role.name}.max_tokens_per_microbatch: {role.tokens_per_microbatch} is less than {longest}"
