"""What a plan says to help with a choice: the KV cache, larger micro-batches, host memory. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roll.config.derived.batch import has_pairs, sequences_per_step
from roll.config.derived.placement import model_roles
from roll.config.plan.memory import RoleMemory, requests_in_flight
from roll.config.plan.phases import phases
from roll.config.plan.plan import Plan
from roll.config.schema.backend import EngineMemory
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig
from roll.system.ranges import ranges
from roll.system.sizes import GIB

LEFT_OUT = 4 * GIB
"""Bytes of a GPU for what the estimate leaves out: the CUDA context, NCCL's buffers and fragmentation."""
MOST_RESERVED = 0.95
"""Largest `gpu_memory_utilization` that is suggested."""
ROUTE_BYTES = 2
"""Bytes of the number of an expert in `Routes`."""
WORTH_SAYING = 1.5
"""Least factor by which a micro-batch must be able to grow for the plan to say so."""


@dataclass(frozen=True)
class CacheRoom:
    """The room of one engine for the KV cache."""

    tokens: int
    sequences: int
    """Number of sequences of full length."""


def cache_room(memory: RoleMemory, longest: int, gpu_memory: float) -> CacheRoom:
    """Return the room that the reserved part of a GPU leaves beside the weights.

    It is an upper bound, because vLLM also keeps room for its activations and CUDA graphs.

    Args:
        memory: Memory of an engine that reserves its KV cache.
        longest: Number of tokens of a sequence of full length, which `memory` counts as its KV cache.
        gpu_memory: Memory of a GPU in bytes.
    """
    assert memory.reserves, "an engine reserves memory"
    left = max(0.0, memory.reserved(gpu_memory) - memory.device["weights"])
    whole = left / memory.device["kv_cache"]
    return CacheRoom(int(whole * longest), int(whole))


def advice_lines(config: Config, plan: Plan) -> list[str]:
    """Return the lines on engines and trained roles on GPUs of a known size, and on host memory."""
    lines = [*_cache_lines(config, plan), *_microbatch_lines(config, plan)] if config.gpu_memory_gib else []
    return [*lines, *host_lines(config, plan), *_routes_lines(config, plan)]


def _cache_lines(config: Config, plan: Plan) -> Iterator[str]:
    gpu_memory = (config.gpu_memory_gib or 0) * GIB
    for name, role in model_roles(config).items():
        engine, memory = role.strategy_args.traits.memory, plan.memory.get(name)
        if not isinstance(engine, EngineMemory) or memory is None or plan.roles[name].on_cpu:
            continue
        longest = plan.batch.longest_example
        room = cache_room(memory, longest, gpu_memory)
        line = (
            f"KV cache of {name}: each engine has room for at most {room.tokens:,} tokens = {room.sequences:,} "
            f"sequences of {longest:,}"
        )
        if name == "actor_infer" and isinstance(config, RlvrConfig):
            count = requests_in_flight(config, plan.roles[name])
            line += f"; {count:,} are assigned to it at a time, {_enough(count, memory, engine, gpu_memory)}"
        yield line


def _enough(count: int, memory: RoleMemory, engine: EngineMemory, gpu_memory: float) -> str:
    """Return which value of the engine's key holds this many sequences of full length."""
    cache = count * memory.device["kv_cache"]
    need = (memory.device["weights"] + cache + LEFT_OUT) / gpu_memory
    if engine.cache is None:
        key, enough = engine.fraction_key, f"{math.ceil(need * 100) / 100:g}"
    else:
        key, enough = engine.cache_key, str(cache)  # bytes, every digit: the key takes no rounded number
    if need > MOST_RESERVED:
        return f"which do not fit at full length with any {key}, so some would wait"
    return f"for which {key} {enough} is enough"


def _microbatch_lines(config: Config, plan: Plan) -> Iterator[str]:
    for name, role in model_roles(config).items():
        if not isinstance(role, LearnerConfig) or name not in plan.memory or plan.roles[name].on_cpu:
            continue
        now = max(plan.roles[name].tokens_per_microbatch or 0, plan.batch.longest_example)
        fits = _fitting_tokens(name, now, plan, (config.gpu_memory_gib or 0) * GIB)
        sequences = plan.batch.sequences_per_update * (2 if has_pairs(config) else 1)
        whole = math.ceil(sequences / plan.roles[name].replicas) * plan.batch.longest_sequence
        useful = min(fits, whole)
        if useful >= WORTH_SAYING * now:
            all_at_once = ", a replica's part of an update" if useful == whole else ""
            yield (
                f"Micro-batch of {name}: {now:,} tokens; about {useful:,}{all_at_once} would fit "
                f"(max_tokens_per_microbatch), with {LEFT_OUT / GIB:g} GiB left for what is not counted"
            )


def _fitting_tokens(name: str, now: int, plan: Plan, gpu_memory: float) -> int:
    """Return the largest micro-batch in tokens, in thousands, that fits on every device of a role beside the others."""
    activations = plan.memory[name].device["activations"]
    spare = min(_spare(name, device, plan, gpu_memory) for device in plan.roles[name].all_devices)
    return int(now * (1 + spare / activations)) // 1024 * 1024


def _spare(name: str, device: int, plan: Plan, gpu_memory: float) -> float:
    """Return the bytes of a device that are free while a trained role works. Negative if there is too little."""
    working = "critic" if name == "critic" else "training"
    held = [phase for phase in phases(plan, device) if phase.name in (working, "all at once")]
    return min(gpu_memory - phase.claimed(gpu_memory) for phase in held) - LEFT_OUT


def host_lines(config: Config, plan: Plan) -> list[str]:
    """Return a line for each group of nodes with equal host memory, and one for roles on the CPU beside GPUs."""
    if not plan.devices:
        return []
    nodes: dict[int, dict[str, int]] = {}
    for name, memory in plan.memory.items():
        for devices in plan.roles[name].devices if memory.host else ():
            if devices:
                held = nodes.setdefault(devices[0] // config.num_gpus_per_node, {})
                held[name] = held.get(name, 0) + memory.host
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for node, held in sorted(nodes.items()):
        groups.setdefault(tuple(held.items()), []).append(node)
    lines = [_host_line(f"node {ranges(found)}", dict(held)) for held, found in groups.items()]
    on_cpu = {
        name: memory.device_total * plan.roles[name].ranks
        for name, memory in plan.memory.items()
        if plan.roles[name].on_cpu
    }
    return [*lines, *([_host_line("roles on the CPU", on_cpu)] if on_cpu else [])]


def _routes_lines(config: Config, plan: Plan) -> Iterator[str]:
    shape = plan.shapes.get("actor_train")
    if isinstance(config, RlvrConfig) and config.router_replay and shape and shape.experts:
        each = ROUTE_BYTES * shape.num_hidden_layers * shape.experts.per_token
        size = each * plan.batch.longest_sequence * sequences_per_step(config)
        held = f"at most {size / GIB:.1f} GiB per step in the driver's memory"
        yield f"Routes to replay: {each:,} bytes per token, {held}"


def _host_line(where: str, held: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items())
    return f"Host memory of {where}: at most {sum(held.values()) / GIB:.1f} GiB ({parts})"
