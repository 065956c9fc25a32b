"""Placement of roles on ranks, devices and engines. Pure functions of the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from roll.config.derived.domains import ENVIRONMENTS
from roll.config.derived.fixed_roles import (
    PREFIX,
    domain_teachers,
    partner_roles,
    reward_role,
    reward_roles,
    teacher_roles,
)
from roll.config.schema.backend import EngineMemory
from roll.config.schema.base import MOST_RANKS
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import JudgeConfig, LearnerConfig, RoleConfig
from roll.errors import Fault


@dataclass(frozen=True)
class RolePlan:
    """The placement of one group of workers."""

    name: str
    """Name of the role: `actor_train`, `rewards.math_rule`, ..."""
    strategy: str
    """Name of the strategy; `reward` for the domains of `rewards`."""
    devices: tuple[tuple[int, ...], ...]
    """Devices of each rank, empty on the CPU. A rank of vLLM is one engine with all its tensor-parallel devices."""
    tokens_per_microbatch: int | None = None
    """Token budget of a micro-batch; None for roles without a budget."""
    replica_size: int = 1
    """Number of consecutive ranks that work on the same micro-batches."""
    is_outside: bool = False
    """Whether servers outside the run do its work. Its processes only talk to them, on the driver's host."""

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def replicas(self) -> int:
        return self.ranks // self.replica_size

    @property
    def on_cpu(self) -> bool:
        return not any(self.devices)

    @property
    def tensor_parallel(self) -> int:
        """Return the number of devices per rank, or 1 on the CPU."""
        return max(1, *map(len, self.devices))

    @cached_property
    def all_devices(self) -> frozenset[int]:
        """The devices of all ranks."""
        return frozenset(device for rank in self.devices for device in rank)

    def ranks_on(self, device: int) -> int:
        """Return the number of ranks with this device."""
        return sum(device in rank for rank in self.devices)


def model_roles(config: Config | OfflineConfig) -> dict[str, RoleConfig]:
    """Return the roles with a model, by name: in the schema's order, then `teachers.<name>`, `rewards.<domain>` and
    `environments.<domain>.partners.<name>`.
    """
    roles = {name: role for name in type(config).model_fields if isinstance(role := getattr(config, name), RoleConfig)}
    if not isinstance(config, RlvrConfig):
        return roles
    return {**roles, **domain_teachers(config), **reward_roles(config), **partner_roles(config)}


def is_trainer_side(role: str) -> bool:
    """Return whether a role is trained or serves training; others generate, reward, or run environments or partners."""
    return role != "actor_infer" and not role.startswith((PREFIX, ENVIRONMENTS))


def started_roles(config: Config) -> dict[str, RoleConfig]:
    """Return the roles with a model that a run starts: in a replay, those of the trainer's side alone."""
    replays = isinstance(config, RlvrConfig) and config.replay_from is not None
    return {name: role for name, role in model_roles(config).items() if is_trainer_side(name) or not replays}


def judging_roles(roles: Iterable[str]) -> list[str]:
    """Return the names of the roles that serve reward models."""
    return [name for name in roles if name.startswith(PREFIX)]


def shared_partners(config: RlvrConfig) -> dict[str, list[str]]:
    """Return the partners that would take turns with other roles on their devices, with these roles, by their names."""
    devices = {name: set(role.device_mapping or ()) for name, role in model_roles(config).items()}
    sharing = {
        name: [other for other in devices if other != name and devices[name] & devices[other]]
        for name in partner_roles(config)
    }
    return {name: others for name, others in sharing.items() if others} if config.time_sharing else {}


def judged_in_turn(config: RlvrConfig) -> frozenset[str]:
    """Return the reward roles that share devices with other roles in turns. They score after all generation."""
    devices = {name: set(role.device_mapping or ()) for name, role in model_roles(config).items()}
    sharing = {
        name
        for name in judging_roles(devices)
        if any(devices[name] & devices[other] for other in devices if other != name)
    }
    return frozenset(sharing) if config.time_sharing else frozenset()


def generates(name: str, role: RoleConfig) -> bool:
    """Whether a role generates or has kernels of its own, so that `attn_implementation` does not apply to it."""
    return name == "actor_infer" or isinstance(role, JudgeConfig) or role.strategy_args.traits.own_kernels


def ranks(role: RoleConfig) -> int:
    """Return the number of ranks of a role that has one device per rank."""
    servers = role.strategy_args.traits.servers
    if servers is not None:
        return len(servers)
    return len(role.device_mapping) if role.device_mapping else role.world_size or 1


def place(name: str, role: RoleConfig, longest: int) -> RolePlan:
    """Place the ranks of a role with a valid `device_mapping`, and compute its token budget.

    Args:
        longest: Largest number of tokens of a sequence (prompt and response), or of a pair.
    """
    traits = role.strategy_args.traits
    batch = role.training_args.per_device_train_batch_size if isinstance(role, LearnerConfig) else role.infer_batch_size
    budget = role.max_tokens_per_microbatch or batch * longest if traits.batches_by_tokens else None
    strategy, size = role.strategy_args.strategy_name, traits.replica_size
    if traits.servers is not None:
        return RolePlan(name, strategy, ((),) * len(traits.servers), is_outside=True)
    if role.device_mapping is None:
        return RolePlan(name, strategy, ((),) * (role.world_size or 1), budget, size)
    width, mapping = traits.devices_per_rank, role.device_mapping
    groups = tuple(mapping[start : start + width] for start in range(0, len(mapping), width))
    return RolePlan(name, strategy, groups, budget, size)


def neighbours(roles: Mapping[str, RolePlan]) -> dict[str, frozenset[str]]:
    """Return, for each role that shares a device, the roles with which it shares one."""
    return {
        name: others
        for name, role in roles.items()
        if (
            others := frozenset(
                other for other in roles if other != name and role.all_devices & roles[other].all_devices
            )
        )
    }


def turns(config: Config, roles: Mapping[str, RolePlan]) -> dict[str, frozenset[str]]:
    """Return, for each role that takes turns on its devices, the roles with which it takes turns.

    Engines that generate ahead of training and share no device with a trained role are never idle, so they stay on
    their devices.
    """
    if not config.time_sharing:
        return {}
    busy = isinstance(config, RlvrConfig) and config.async_generation_ratio > 0 and not interrupting(config)
    return neighbours({name: role for name, role in roles.items() if not (busy and name == "actor_infer")})


def interrupting(config: RlvrConfig) -> frozenset[str]:
    """Return the roles whose work pauses asynchronous generation.

    If a trained role shares devices with the engines, these are all roles that share devices with them, otherwise none.
    Responses in flight are paused, and continue after the weight sync. `generate_while_training` lets them go on.
    """
    if not config.async_generation_ratio or config.generate_while_training:
        return frozenset()
    return sharing_with_engines(config)


def sharing_with_engines(config: RlvrConfig) -> frozenset[str]:
    """Return the roles that share devices with the engines, if a trained role is among them, otherwise none."""
    infer = set(config.actor_infer.device_mapping or ())
    sharing = {name for name, role in model_roles(config).items() if infer & set(role.device_mapping or ())} - {
        "actor_infer"
    }
    return frozenset(sharing) if sharing & {"actor_train", "critic"} else frozenset()


def keeps_kv_cache(config: RlvrConfig) -> bool:
    """Whether responses that are in flight at a weight sync keep their KV cache."""
    if config.weight_sync.kv_cache is not None:
        return config.weight_sync.kv_cache == "keep"
    return config.async_generation_ratio > 0 and not _drops_kv_cache(config)


def _drops_kv_cache(config: RlvrConfig) -> bool:
    """Whether the engine leaves its devices while responses are in flight."""
    return config.time_sharing and bool(interrupting(config))


def placement_faults(config: Config) -> list[Fault]:
    """Return faults of roles that cannot run on their devices or with their backend."""
    roles = model_roles(config)
    faults = [fault for name, role in roles.items() for fault in _device_faults(name, role, config)]
    if isinstance(config, RlvrConfig):
        faults += _sharing_faults(config) + sync_faults(config)
        functions = {name: reward for name, reward in config.rewards.items() if reward_role(name, reward) is None}
        worlds = {f"rewards.{name}.world_size": reward.world_size for name, reward in functions.items()}
        faults += [_too_many(where, size) for where, size in worlds.items() if size > MOST_RANKS]
    return faults


def _device_faults(name: str, role: RoleConfig, config: Config) -> list[Fault]:
    traits, mapping, where = role.strategy_args.traits, role.device_mapping, f"{name}.device_mapping"
    width, wide = traits.devices_per_rank, f"{name}.strategy_args.strategy_config.{traits.devices_key}"
    if traits.servers is not None:
        keys = {where: mapping, f"{name}.world_size": role.world_size}
        problem = f"but {role.strategy_args.strategy_name} runs on the servers that base_urls lists"
        return [
            Fault(key, f"{value}, {problem}", "remove the key", "no_effect") for key, value in keys.items() if value
        ]
    if mapping is None:
        faults = [_too_many(f"{name}.world_size", role.world_size)] if (role.world_size or 1) > MOST_RANKS else []
        return faults + (
            [Fault(wide, f"{width}, but {name} runs on the CPU", "use 1, or give device_mapping", "not_supported")]
            if width > 1
            else []
        )
    if not mapping:
        return [Fault(where, "[] contains no device", "name devices, or remove the key to run on the CPU", "empty")]
    faults = []
    faults += _repetition_faults(name, role, mapping, config)
    if max(mapping) >= MOST_RANKS:
        problem = f"device {max(mapping)} is too large a number"
        faults.append(
            Fault(where, problem, f"number the devices over all nodes, from 0 to at most {MOST_RANKS - 1}", "too_large")
        )
    if len(mapping) % width:
        problem = f"{len(mapping)} devices cannot be divided into engines of {traits.devices_key} {width}"
        faults.append(
            Fault(
                where, problem, f"give a multiple of {width} devices, or another {traits.devices_key}", "not_divisible"
            )
        )
    elif role.world_size and role.world_size != len(mapping) // width:
        problem = f"{role.world_size}, but device_mapping makes {len(mapping) // width} workers"
        faults.append(
            Fault(
                f"{name}.world_size", problem, "remove world_size, which is only for roles on the CPU", "contradiction"
            )
        )
    if width > config.num_gpus_per_node:
        problem = (
            f"{width} is more than num_gpus_per_node = {config.num_gpus_per_node}, and an engine is one worker "
            f"process, which sees the GPUs of its own node only"
        )
        remedy = f"give at most {config.num_gpus_per_node}, or set num_gpus_per_node if the nodes have more GPUs"
        return [*faults, Fault(wide, problem, remedy, "too_large")]
    for engine_devices in place(name, role, 1).devices:
        nodes = sorted({device // config.num_gpus_per_node for device in engine_devices})
        if len(nodes) > 1:
            problem = f"the engine on devices {_listed(engine_devices)} is spread over nodes {_listed(nodes)}"
            remedy = f"put each group of {width} devices on one node of {config.num_gpus_per_node}"
            faults.append(Fault(where, problem, remedy, "not_supported"))
    return faults


def _repetition_faults(name: str, role: RoleConfig, mapping: Sequence[int], config: Config) -> Iterator[Fault]:
    """Yield a fault of devices that a role lists more than once. Only engines can share a device with each other."""
    repeated = [device for device, count in Counter(mapping).items() if count > 1]
    if not repeated:
        return
    where, problem = f"{name}.device_mapping", f"devices {_listed(repeated)} are listed more than once"
    remedy = "name each device once"
    if not isinstance(config, RlvrConfig) or name != "actor_infer":
        yield Fault(where, problem, remedy, "duplicate")
    elif not role.strategy_args.traits.shares_device:
        size = "tensor_parallel_size 1 and engine_args.kv_cache_memory_bytes, the size of each one's KV cache"
        yield Fault(where, problem, f"{remedy}; several engines of vllm on a device need {size}", "duplicate")
    elif not sends_adapter(config) and not set(repeated) <= set(config.actor_train.device_mapping or ()):
        problem = f"{problem}, but not all of them are devices of actor_train, and NCCL serves one process on a GPU"
        yield Fault(where, problem, f"{remedy}, or let actor_train have them, too", "not_supported")


def _sharing_faults(config: RlvrConfig) -> list[Fault]:
    train, infer = config.actor_train.device_mapping, config.actor_infer.device_mapping
    if (train is None) != (infer is None) and config.actor_infer.strategy_args.traits.servers is None:
        on_gpu, on_cpu = ("actor_infer", "actor_train") if train is None else ("actor_train", "actor_infer")
        problem = f"missing, so {on_cpu} runs on the CPU while {on_gpu} has devices"
        return [Fault(f"{on_cpu}.device_mapping", problem, "give devices to both roles, or to neither", "missing")]
    stopped_for = sorted(interrupting(config))
    if stopped_for and not config.actor_infer.strategy_args.traits.pauses:
        others, strategy = " and ".join(stopped_for), config.actor_infer.strategy_args.strategy_name
        problem = (
            f"{others} share devices with actor_infer, whose strategy {strategy} cannot pause in the middle of a "
            f"response"
        )
        remedy = "use the strategy vllm, give the roles separate devices, or set async_generation_ratio=0"
        return [
            Fault(
                "async_generation_ratio", f"{config.async_generation_ratio:g}, but {problem}", remedy, "not_supported"
            )
        ]
    return _kv_cache_faults(config)


def _kv_cache_faults(config: RlvrConfig) -> list[Fault]:
    """Return faults of values of `weight_sync.kv_cache` that have no effect or are impossible."""
    wish, where = config.weight_sync.kv_cache, "weight_sync.kv_cache"
    if wish and not config.async_generation_ratio:
        return [
            Fault(
                where,
                f"{wish}, but async_generation_ratio is 0, so that no response is unfinished at a weight sync",
                "remove it",
                "no_effect",
            )
        ]
    if wish == "keep" and _drops_kv_cache(config):
        problem = (
            f"keep, but actor_infer leaves its devices to {' and '.join(sorted(interrupting(config)))}, and its KV "
            f"cache is lost"
        )
        return [
            Fault(
                where,
                problem,
                "remove it, or set time_sharing=false so that all roles stay on their devices",
                "contradiction",
            )
        ]
    return []


def sends_adapter(config: RlvrConfig) -> bool:
    """Whether a weight sync sends only the LoRA adapter."""
    return config.actor_train.model_args.lora_target is not None and config.weight_sync.lora == "adapter"


def sync_faults(config: RlvrConfig) -> list[Fault]:
    """Return faults of engines to which the weights cannot be sent, or that cannot use them."""
    train, infer = set(config.actor_train.device_mapping or ()), config.actor_infer
    if sends_adapter(config) and not infer.strategy_args.traits.loads_adapters:
        problem = f"adapter, but the strategy {infer.strategy_args.strategy_name} takes whole weights only"
        return [Fault("weight_sync.lora", problem, "set it to merged", "not_supported")]
    if not infer.device_mapping or sends_adapter(config):
        return []
    astride = [each for each in place("actor_infer", infer, 1).devices if 0 < len(train & set(each)) < len(set(each))]
    return [
        Fault(
            "actor_infer.device_mapping",
            f"the engine on devices {_listed(each)} shares {_listed(sorted(train & set(each)))} with actor_train, but "
            f"not the others",
            "give each engine only devices of actor_train, or none of them",
            "not_supported",
        )
        for each in astride
    ]


def placement_warnings(config: Config) -> list[str]:
    """Return warnings about placements that are valid, but perhaps not intended."""
    warnings = [
        warning
        for name, role in model_roles(config).items()
        for warning in _apart(name, role, config.num_gpus_per_node)
    ]
    if not isinstance(config, RlvrConfig):
        return warnings
    memory = config.actor_infer.strategy_args.traits.memory
    infer = set(config.actor_infer.device_mapping or ())
    others = {
        name: set(role.device_mapping or ()) & infer
        for name, role in model_roles(config).items()
        if name != "actor_infer"
    }
    sharing = [name for name, shared in others.items() if shared]
    ahead = config.async_generation_ratio > 0 and not interrupting(config)
    stays = not config.time_sharing or ahead
    engine = memory if isinstance(memory, EngineMemory) and memory.cache is None else None
    if engine and sharing and engine.fraction > (0.85 if stays else 0.95):
        where = f"actor_infer.strategy_args.strategy_config.{engine.fraction_key}"
        usual = (
            "0.6 is usual if the other roles stay"
            if stays
            else "they leave, but their CUDA contexts stay; 0.9 is usual"
        )
        warnings.append(f"{where}: {engine.fraction:g} leaves little memory for {' and '.join(sharing)}; {usual}")
    for name in ("reference", *teacher_roles(config)):
        if name in sharing and ahead:
            warnings.append(
                f"{name}.device_mapping: shared with actor_infer, which never pauses for it; both must fit at once"
            )
    return warnings


def _apart(name: str, role: RoleConfig, per_node: int) -> Iterator[str]:
    """Yield warnings about replicas that span several nodes."""
    size, devices = role.strategy_args.traits.replica_size, role.device_mapping or ()
    for start in range(0, len(devices), size) if size > 1 else ():
        replica = devices[start : start + size]
        if len({device // per_node for device in replica}) > 1:
            yield f"{name}.device_mapping: devices {_listed(replica)} are one replica on several nodes: slow"


def _too_many(where: str, size: int | None) -> Fault:
    return Fault(where, f"{size} workers are too many", f"give at most {MOST_RANKS}", "too_large")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
