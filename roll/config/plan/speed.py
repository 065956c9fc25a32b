"""A rough estimate of a step's time, from the model's shape, the rates of the GPUs, and rates that were measured.

The measurements are in docs/performance.md ("A step compared with its floors, on GPUs"). Relative to data sheets,
training reached 41% (0.5B) to 52% (7B) of the bf16 peak. An engine took 6 to 10 ms for a decoding step, most of it in
Python, unless the GPU took longer: with 7B and 512 sequences 22 ms, in which it read weights and KV cache and computed
at about 70% of the rates of the data sheet. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.batch import has_pairs, learner
from roll.config.derived.flops import GpuRates, training_flops
from roll.config.derived.model_shape import ModelShape
from roll.config.plan.advice import cache_room
from roll.config.plan.memory import requests_in_flight, trained_by_adapter
from roll.config.plan.plan import Plan
from roll.config.schema.backend import EngineMemory
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ActorTrainConfig
from roll.system.sizes import GIB

MFU = 0.45
"""Share of the bf16 peak that training reaches, in model FLOPs."""
DECODING_SECONDS = 0.008
"""Least time of a decoding step of an engine."""
DECODING_USE = 0.7
"""Share of bandwidth and peak that a decoding step reaches."""


def speed_lines(config: Config, plan: Plan) -> list[str]:
    """Return the lines on the time of a step's parts; none on the CPU, in fp32, or on unknown GPUs."""
    gpu = plan.gpu
    if gpu is None:
        return []
    parts = [*_generation(config, plan, gpu), *_training(config, plan, gpu)]
    if not parts:
        return []
    return [
        f"Roughly, on {gpu.name} and with every sequence at full length, a step takes: {'; '.join(parts)}",
        f"That assumes {MFU:.0%} MFU, and decoding at {DECODING_USE:.0%} of {gpu.bandwidth / 1e12:g} TB/s and "
        f"{gpu.bf16_peak / 1e12:g} TFLOP/s but at least {DECODING_SECONDS * 1000:g} ms a token, as measured in "
        f"docs/performance.md; other passes, rewards, offload and the weight sync come on top",
    ]


def _training(config: Config, plan: Plan, gpu: GpuRates) -> Iterator[str]:
    name, role = learner(config)
    shape, placed = plan.shapes.get(name), plan.roles[name]
    if shape is None or placed.on_cpu or role.model_args.dtype == "fp32":
        return
    tokens = step_sequences(config, plan) * plan.batch.longest_sequence
    seconds = training_seconds(config, plan, shape, role, gpu)
    yield f"training {_seconds(seconds)} ({tokens / seconds / placed.ranks:,.0f} tokens/s a GPU)"


def step_sequences(config: Config, plan: Plan) -> int:
    """Return the number of sequences of a step; two for a pair."""
    return plan.batch.sequences_per_step * (2 if has_pairs(config) else 1)


def training_seconds(config: Config, plan: Plan, shape: ModelShape, role: ActorTrainConfig, gpu: GpuRates) -> float:
    """Return the seconds of a step's updates of the learner, with every sequence at full length."""
    model, count, longest = role.model_args, step_sequences(config, plan), plan.batch.longest_sequence
    adapter = trained_by_adapter(model, shape)
    whole = shape.active_parameters + adapter
    flops = training_flops(whole, adapter or whole, shape.attending_flops, count * longest, count * longest**2)
    epochs = config.ppo_epochs if isinstance(config, RlvrConfig) else 1
    return epochs * flops / (MFU * gpu.bf16_peak * plan.roles[learner(config)[0]].ranks)


def _generation(config: Config, plan: Plan, gpu: GpuRates) -> Iterator[str]:
    """Yield the time of generation. With environments it depends on them, so nothing is said."""
    if not isinstance(config, RlvrConfig) or config.environments or config.replay_from is not None:
        return
    role, shape, placed = config.actor_infer, plan.shapes.get("actor_infer"), plan.roles["actor_infer"]
    known = isinstance(role.strategy_args.traits.memory, EngineMemory) and role.model_args.dtype != "fp32"
    if shape is None or not known or placed.on_cpu:
        return
    sampled = plan.batch.sequences_per_step * config.response_length
    seconds = generation_seconds(config, plan, shape, gpu)
    yield f"generation {_seconds(seconds)} ({sampled / seconds / placed.ranks:,.0f} sampled tokens/s an engine)"


def generation_seconds(config: RlvrConfig, plan: Plan, shape: ModelShape, gpu: GpuRates) -> float:
    """Return the seconds of generating a step's responses of full length.

    Each engine decodes as many sequences at a time as it may and has room for. A decoding step reads the weights and
    the KV cache of all of them, half full on average, and multiplies with the active parameters.
    """
    placed, memory = plan.roles["actor_infer"], plan.memory["actor_infer"]
    assigned = plan.batch.sequences_per_step / placed.ranks
    at_once = min(assigned, requests_in_flight(config, placed))
    if config.gpu_memory_gib:
        room = cache_room(memory, plan.batch.longest_example, config.gpu_memory_gib * GIB)
        at_once = max(1, min(at_once, room.sequences))
    prompt, response = config.prompt_length, config.response_length
    cache = memory.device["kv_cache"] * (prompt + response / 2) / plan.batch.longest_example
    read = (memory.device["weights"] + at_once * cache) / gpu.bandwidth
    per_token = 2 * shape.active_parameters / (gpu.bf16_peak * placed.tensor_parallel)
    step = max(DECODING_SECONDS, (read + at_once * per_token) / DECODING_USE)
    prefill = assigned / config.num_return_sequences_in_group * prompt * per_token / MFU
    return prefill + assigned / at_once * response * step


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
