"""Checks the block of vLLM against the role's other keys and its model. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

from roll.config.derived.batch import longest_sequence
from roll.config.derived.methods import is_corrected, ratio_source
from roll.config.derived.model_shape import REPLAYED, SQUARE, ModelShape
from roll.config.derived.placement import sends_adapter
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardModelRole, RoleConfig
from roll.engines.vllm.engine_args import engine_args_faults
from roll.engines.vllm.invariance import invariance_faults
from roll.engines.vllm.settings import CACHE_ARGUMENT, CPU_BLOCK, VllmConfig
from roll.engines.vllm.speculation import speculation_faults
from roll.errors import Fault

TRITON_BACKENDS = "triton.backends"
"""Entry points under which packages announce backends of Triton."""
NEEDED_BY_PROCESSOR: Mapping[str, tuple[str, ...]] = {
    "qwen2_5_vl": ("torchvision",),
    "qwen3_vl": ("torchvision",),
    "smolvlm": ("torchvision", "num2words"),
}
"""By `model_type`, the packages that a model's processor in vLLM needs, because it also reads videos."""
INSTALL: Mapping[str, str] = {
    "torchvision": "install the torchvision build for this torch version",
    "num2words": "pip install num2words",
}
LARGEST_ADAPTER_RANK = 512
"""vLLM's largest `max_lora_rank`."""
CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32's attention on the CPU has a kernel. A test asks the kernel for each size."""


def vllm_faults(
    engine: VllmConfig, name: str, role: RoleConfig, config: Config, shape: ModelShape | None
) -> Iterator[Fault]:
    """Yield faults of a role on vLLM. `shape` is that of a model here; others are checked when they are loaded."""
    where = f"{name}.strategy_args.strategy_config"
    yield from _sizes(engine, where, config)
    yield from engine_args_faults(engine, where, name, role)
    yield from speculation_faults(engine, f"{where}.speculative", name, role, config, shape)
    yield from invariance_faults(engine, where, role, shape)
    if engine.quantization is not None:
        yield from _quantised(engine.quantization, f"{where}.quantization", name, role, shape)
        if name == "actor_infer" and isinstance(config, RlvrConfig):
            yield from _uncorrected(engine.quantization, f"{where}.quantization", config)
    if isinstance(role, RewardModelRole) and engine.load_format == "dummy":
        problem = "'dummy' loads no weights, and this model gets none by weight sync"
        yield Fault(f"{where}.load_format", problem, "set it to auto", "not_supported")
    if name == "actor_infer" and isinstance(config, RlvrConfig) and sends_adapter(config):
        yield from _adapter(engine, where, config, shape)
    if name == "actor_infer" and shape and shape.sinks:
        # Measured on the CPU: before a sync, the log-probs differ from the trainer's by 1e-5, after it by 4.6.
        problem = "vllm, but after a weight sync vLLM's log-probs of gpt-oss differ from the trainer's"
        yield Fault(f"{name}.strategy_args.strategy_name", problem, "use hf_infer", "not_supported")
    if shape and shape.vision and shape.vision.model_type in SQUARE:
        yield _not_both_ways(name, role, shape.vision.model_type)
    if name == "actor_infer" and isinstance(config, RlvrConfig) and config.router_replay:
        yield from _routes(engine, where, role, shape)
    if shape and shape.delta and role.device_mapping is None:
        yield from _hybrid_on_cpu(engine, where, name, role)


def vllm_warnings(engine: VllmConfig, name: str, role: RoleConfig) -> Iterator[str]:
    """Yield warnings about keys that have no effect on the role's devices, or are read as another number there.

    A default is no reason for a warning: the configuration in a run's folder contains all defaults.
    """
    where, plain = f"{name}.strategy_args.strategy_config", VllmConfig.model_validate({})
    if role.device_mapping is not None:
        if engine.kv_cache_gib != plain.kv_cache_gib:
            yield f"{where}.kv_cache_gib: has no effect on GPUs; gpu_memory_utilization sets the memory"
        if engine.kv_cache_bytes is not None and engine.gpu_memory_utilization != plain.gpu_memory_utilization:
            yield f"{where}.gpu_memory_utilization: has no effect, because engine_args has {CACHE_ARGUMENT}"
        return
    if engine.gpu_memory_utilization != plain.gpu_memory_utilization:
        size = f"kv_cache_gib ({engine.kv_cache_gib:g} GiB)"
        yield f"{where}.gpu_memory_utilization: has no effect on the CPU, where {size} sets the memory of the KV cache"
    if engine.cpu_block_size != engine.block_size:
        read = f"{engine.block_size} is read as {engine.cpu_block_size}"
        yield f"{where}.block_size: {read}: on the CPU vLLM needs a multiple of {CPU_BLOCK}"


def missing_in_vllm(name: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of a package that is not installed, and of a kernel that vLLM does not have on the CPU."""
    where = f"{name}.strategy_args.strategy_name"
    if shape and shape.delta and find_spec("torchvision") is None:
        problem = "vllm, but its code for Qwen3.5 needs the package torchvision, which is not installed"
        yield Fault(where, problem, f"{INSTALL['torchvision']}, or use hf_infer", "not_installed")
    kind = shape.vision.model_type if shape and shape.vision else ""
    for package in NEEDED_BY_PROCESSOR.get(kind, ()):
        if find_spec(package) is None:
            problem = (
                f"vllm, but its processor of pictures for {kind} needs the package {package}, which is not installed"
            )
            yield Fault(where, problem, f"{INSTALL[package]}, or use hf_infer", "not_installed")
    on_cpu = shape if role.device_mapping is None else None
    if on_cpu and not on_cpu.latent_attention and on_cpu.head_dim not in CPU_HEADS:  # latent attention: other kernel
        sizes = ", ".join(map(str, CPU_HEADS))
        problem = f"vllm, but on the CPU it has no kernel for heads of size {on_cpu.head_dim}; it has them for {sizes}"
        yield Fault(
            where, problem, "use hf_infer, a GPU (device_mapping), or a model with other heads", "not_supported"
        )


def _sizes(engine: VllmConfig, where: str, config: Config) -> Iterator[Fault]:
    longest = longest_sequence(config)
    if engine.max_model_len is not None and engine.max_model_len < longest:
        of_episodes = isinstance(config, RlvrConfig) and config.sequence_length
        keys = "sequence_length" if of_episodes else "prompt_length + response_length"
        problem = f"{engine.max_model_len} is less than {keys} = {longest}"
        yield Fault(f"{where}.max_model_len", problem, f"give at least {longest}, or remove the key", "too_small")
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        problem = (
            f"{engine.max_num_batched_tokens} is less than max_num_seqs {engine.max_num_seqs}; a step needs a "
            f"token per sequence"
        )
        remedy = f"give at least {engine.max_num_seqs}; 8192 is usual"
        yield Fault(f"{where}.max_num_batched_tokens", problem, remedy, "too_small")


def _adapter(engine: VllmConfig, where: str, config: RlvrConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of an engine to which a weight sync sends only the adapter."""
    trained, sync, on_cpu = config.actor_train.model_args, "weight_sync.lora", config.actor_infer.device_mapping is None
    if trained.use_dora:
        problem = "adapter, but use_dora is true, and vLLM has no such adapters"
        yield Fault(sync, problem, "set it to merged", "not_supported")
    if trained.sent_rank > LARGEST_ADAPTER_RANK:
        problem = f"{trained.lora_rank} is more than vLLM's largest adapter rank {LARGEST_ADAPTER_RANK}"
        if trained.sent_rank > trained.lora_rank:
            problem = (
                f"{trained.lora_rank}, but PiSSA's adapter has twice that, and vLLM's largest is {LARGEST_ADAPTER_RANK}"
            )
        remedy = f"set it to at most {LARGEST_ADAPTER_RANK}, or set weight_sync.lora=merged"
        yield Fault("actor_train.model_args.lora_rank", problem, remedy, "too_large")
    if engine.load_format == "dummy":
        problem = "'dummy' loads no weights, and only the adapter is synchronised: the base model would stay random"
        yield Fault(f"{where}.load_format", problem, "set it to auto, or set weight_sync.lora=merged", "not_supported")
    if not on_cpu and config.actor_infer.model_args.dtype == "fp32":
        problem = "vLLM's GPU kernels for adapters support bf16 and fp16, but not fp32"
        yield Fault(sync, problem, "set it to `merged`, or actor_infer.model_args.dtype to `bf16`", "not_supported")
    if shape and shape.delta and on_cpu:
        problem = "adapter, but on the CPU vLLM does not support adapters on gated-delta layers"
        yield Fault(sync, problem, "set it to merged", "not_supported")
    if shape and shape.experts and on_cpu:
        problem = "adapter, but on the CPU vLLM does not support adapters of a mixture of experts"
        yield Fault(sync, problem, "set it to merged", "not_supported")
    elif shape and shape.experts and trained.lora_target == "all-linear":
        problem = "adapter, but vLLM cannot load adapters on fused experts, which lora_target all-linear creates"
        yield Fault(sync, problem, "set it to merged", "not_supported")


def _quantised(kind: str, place: str, name: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of a quantised engine: vLLM has no kernels for the dtype, or the architecture was not tried."""
    if role.model_args.dtype == "fp32":
        problem = f"{kind}, but vLLM quantises models in bf16 or fp16 only, and {name}.model_args.dtype is fp32"
        yield Fault(place, problem, f"set {name}.model_args.dtype to bf16", "not_supported")
    if role.device_mapping is None and shape and shape.experts:
        problem = f"{kind}, but on the CPU vLLM has no kernel for experts in 8 bits"
        yield Fault(place, problem, "remove it, or use GPUs (device_mapping)", "not_supported")
    parts = {
        "gated-delta layers": shape and shape.delta,
        "a vision tower": shape and shape.vision,
        "latent attention": shape and shape.latent_attention,
    }
    if names := [what for what, has in parts.items() if has]:
        problem = f"{kind}, but the model has {' and '.join(names)}, which roll quantises in no engine"
        yield Fault(place, problem, "remove it", "not_supported")


def _uncorrected(kind: str, place: str, config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the loss would take the rounding of the quantised policy for a change of the trained one.

    Under a ratio to the engine's log-probs, PPO clips tokens that the rounding makes less probable: a tiny model then
    learns nothing (docs/performance.md, "Rollouts in 8 bits").
    """
    if is_corrected(config):
        return
    source = ratio_source(config)
    effect = "clipping would take its rounding for updates" if source == "engine" else "nothing corrects for that"
    problem = f"{kind}: the quantised policy samples, and with behaviour_log_probs {source} {effect}"
    yield Fault(place, problem, "set behaviour_log_probs=trainer and mismatch_correction=tis", "contradiction")


def _not_both_ways(name: str, role: RoleConfig, model_type: str) -> Fault:
    """Return the fault of an engine whose model sees pictures as squares. As read in vLLM 0.32: on the CPU,
    `supports_mm_prefix` of its attention is false, but nothing asks for it; and `SiglipVisionModel` does not load
    tensors under the names that transformers 5.19 gives them.
    """
    problem = f"vllm, but its vision tower of {model_type} does not take the trainer's weights in a weight sync"
    if role.device_mapping is None:
        problem = (
            f"vllm, but on the CPU its attention is causal within a picture too, while placeholders of {model_type} "
            "see each other in both directions: its log-probs would differ from the trainer's"
        )
    return Fault(f"{name}.strategy_args.strategy_name", problem, "use hf_infer", "not_supported")


def _routes(engine: VllmConfig, where: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of a model whose routes cannot be replayed, and of an engine that does not return them."""
    if shape and shape.experts is None:
        yield Fault("router_replay", "true, but the model has no experts, and so no router", "remove it", "no_effect")
    elif shape and shape.experts and not shape.experts.are_replayed:
        problem = f"true, but roll replays the routes of {', '.join(REPLAYED)} only"
        yield Fault("router_replay", problem, "remove it, or use a model of one of these types", "not_supported")
    if not engine.enable_prefix_caching:
        problem = "false, but router_replay is true, and vLLM returns routes only with its cache of prefixes"
        yield Fault(f"{where}.enable_prefix_caching", problem, "set it to true", "exclusive")
    if role.device_mapping is None and not entry_points(group=TRITON_BACKENDS, name="cpu"):
        problem = (
            "true, but vLLM returns routes only with its second model runner, which needs Triton, and the installed "
            "Triton has no backend for the CPU"
        )
        yield Fault("router_replay", problem, "remove it, or use GPUs (actor_infer.device_mapping)", "not_installed")


def _hybrid_on_cpu(engine: VllmConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    """Yield faults of settings that vLLM's CPU backend does not support for gated-delta layers."""
    if engine.enable_prefix_caching:
        problem = "true, but vLLM caches a hybrid's prefixes only with chunked prefill, which the CPU lacks"
        yield Fault(f"{where}.enable_prefix_caching", problem, "set it to false", "not_supported")
    if role.model_args.dtype != "bf16":
        problem = f"{role.model_args.dtype}, but on the CPU vLLM's kernel for the delta rule only supports bf16"
        remedy = f"set it to bf16, or {name}.strategy_args.strategy_name to hf_infer"
        yield Fault(f"{name}.model_args.dtype", problem, remedy, "not_supported")
