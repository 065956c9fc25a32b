"""Estimates memory from the model's shape, the arithmetic of ZeRO and the token budget. Pure functions.

For Φ parameters, mixed precision needs 2Φ bytes of weights, 2Φ of gradients and 12Φ of optimizer states (an fp32 copy
and two moments; Rajbhandari et al., ZeRO, 2020, section 3.1). fp32 needs 4Φ, 4Φ and also 12Φ, because DeepSpeed copies
fp32 weights, too; on stage 0 the optimizer states are 8Φ. Stage 1 shards the optimizer states over the ranks, stage 2
also the gradients, stage 3 also the weights. With LoRA, only the adapters have gradients and optimizer states.
Activations follow Korthikanti et al., 2022, for fused attention. A role that takes turns on its devices waits in host
memory while other roles work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll.config.derived.batch import BatchPlan
from roll.config.derived.model_shape import ModelShape, VisionShape
from roll.config.derived.placement import RolePlan, sends_adapter
from roll.config.schema.backend import EngineMemory, ZeroMemory
from roll.config.schema.model import ModelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import CriticConfig, LearnerConfig, RoleConfig, ScorerConfig

LOGITS = 2**29
"""Largest number of logits that exist at a time: 2 GiB in fp32, and 1 GiB for their gradient in bf16. Each chunk of
logits costs a read and a write of the head's gradient, and all chunks except one are computed twice.
"""
WHILE_IT_WORKS = ("activations", "pictures", "head", "kv_cache")
"""Kinds of memory that a role only needs during a forward or backward pass, or while it generates."""
FROZEN_TOKEN = 250
"""Host memory in bytes for one token, with its log-prob, of a request that waits in an engine. Measured with vLLM's
data structures: 200 in its front end and 48 in its scheduler.
"""


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role on each of its devices (on the CPU: of each rank)."""

    device: Mapping[str, int]
    """Bytes on the device by kind: weights, gradients, optimizer, buffers, activations, pictures, head, kv_cache."""
    host: int = 0
    """Bytes of host memory of each rank: offloaded states, and the states kept there while other roles use its devices.
    """
    reserved_fraction: float = 0.0
    """Fraction of the device that an engine reserves for weights and KV cache together. 0 for other roles."""
    reserved_bytes: int = 0
    """Bytes that an engine reserves for them, if the size of its KV cache is set in bytes."""

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def reserves(self) -> bool:
        """Whether it is the memory of an engine that reserves its KV cache. `device` then has one sequence's."""
        return bool(self.reserved_fraction or self.reserved_bytes)

    def reserved(self, gpu_memory: float) -> float:
        """Return the bytes that an engine reserves on a GPU with `gpu_memory` bytes."""
        return self.reserved_fraction * gpu_memory + self.reserved_bytes

    def of_ranks(self, count: int) -> RoleMemory:
        """Return the memory of this many ranks on one device."""
        device = {kind: count * size for kind, size in self.device.items()}
        return RoleMemory(device, count * self.host, count * self.reserved_fraction, count * self.reserved_bytes)


def head_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at a time: a multiple of 128, for whole tiles."""
    return max(128, LOGITS // vocabulary // 128 * 128)


def estimate(plan: RolePlan, role: RoleConfig, shape: ModelShape, longest: int) -> RoleMemory:
    """Return an estimate of the memory of one rank, on each of its devices.

    Sequence parallelism splits the tokens over ranks, tensor parallelism the layers, and a rank of several devices the
    layers over its devices.

    Args:
        longest: Number of tokens of the longest sequence. A micro-batch is never smaller than one sequence.
    """
    traits = role.strategy_args.traits
    width, devices = 4 if role.model_args.dtype == "fp32" else 2, traits.devices_per_rank
    whole = shape.parameters
    if isinstance(traits.memory, EngineMemory):
        narrow = traits.memory.linear_width
        saved = 0 if narrow is None else (width - narrow) * shape.linear_parameters
        weights = (width * whole - saved + traits.memory.draft) // devices
        if plan.on_cpu:
            return RoleMemory({"weights": weights, "kv_cache": traits.memory.cpu_cache})
        state = shape.delta.state_bytes(width, devices) if shape.delta else 0
        least = longest * (shape.kv_bytes(width, devices) + width * traits.memory.draft_cache // devices) + state
        held = {"weights": weights, "kv_cache": least}
        if traits.memory.cache is not None:
            return RoleMemory(held, reserved_bytes=weights + traits.memory.cache)
        return RoleMemory(held, reserved_fraction=traits.memory.fraction)
    tokens = -(-max(plan.tokens_per_microbatch or 0, longest) // traits.sequence_parallel)
    is_trained = isinstance(role, LearnerConfig) and not role.model_args.lora_target
    head = (
        {} if isinstance(role, CriticConfig | ScorerConfig) else {"head": head_bytes(shape, tokens, width, is_trained)}
    )
    shape, zero = shape.part(traits.tensor_parallel * devices), traits.memory
    if isinstance(role, LearnerConfig):
        assert zero is not None, "a role that trains shards its states by ZeRO"
        states, host = _training_states(zero, plan.ranks // traits.tensor_parallel, role, shape, traits.expert_parallel)
        wish, compiled = role.model_args.gradient_checkpointing, compiles(role.model_args, on_gpu=not plan.on_cpu)
        kept = {"activations": activations(shape, tokens, width, wish, compiled)}
        if role.model_args.lora_target:
            kept["activations"] += adapter_activations(shape, tokens, width, role.model_args)
            if head and checkpointed_layers(wish, shape.num_hidden_layers) == shape.num_hidden_layers:
                recomputed = kept["activations"] - shape.num_hidden_layers * width * tokens * shape.hidden_size
                head = {"head": max(0, head["head"] - recomputed - width * zero.bucket_numbers)}
        if shape.vision:
            kept["pictures"] = picture_bytes(shape.vision, tokens, width, role.model_args)
        return RoleMemory(states | kept | head, host)
    layer = layer_activations(shape, tokens, width, compiles(role.model_args, on_gpu=not plan.on_cpu))
    if zero is None:
        return RoleMemory({"weights": width * whole // devices, "activations": layer} | head)
    buffers = width * gathered_parameters(zero, shape, plan.ranks)
    return RoleMemory(
        {"weights": width * shape.parameters // plan.ranks, "buffers": buffers, "activations": layer} | head
    )


def _training_states(
    zero: ZeroMemory, ranks: int, role: LearnerConfig, shape: ModelShape, expert_parallel: int
) -> tuple[dict[str, int], int]:
    """Return the bytes on the device by kind, and the bytes in host memory.

    `expert_parallel` ranks divide the experts among them. ZeRO shards a rank's experts over the ranks with the same
    ones, and the rest over all ranks. A rank thus has the same part of everything that is sharded.
    """
    model = role.model_args
    full, width = shape.parameters, 4 if model.dtype == "fp32" else 2
    copies = 0 if model.dtype == "fp32" and zero.stage == 0 else 4
    states = copies + moments(role.training_args.optimizer, None if model.lora_target else shape)
    if isinstance(role, CriticConfig):
        full = shape.valuing_parameters
    frozen = shape.vision.frozen(model.freeze_vision) if shape.vision else 0
    trained = trained_by_adapter(model, shape) if model.lora_target else full - frozen
    held = full + trained if model.lora_target else full
    elsewhere = shape.expert_parameters * (expert_parallel - 1) // expert_parallel
    saved = saved_by_quantizing(model, shape, width)
    device = {
        "weights": width * (held // ranks if zero.stage == 3 else held - elsewhere)
        + width * secondary(zero, held)
        - saved,
        "gradients": width * trained // ranks if zero.stage >= 2 else width * (trained - elsewhere),
        "optimizer": int(states * trained // ranks if zero.stage >= 1 else states * (trained - elsewhere)),
        "buffers": width * (gathered_parameters(zero, shape, ranks, elsewhere) + zero.bucket_numbers),
    }
    if model.init_lora_weights is not True:  # PiSSA's first factors, which stay whole on every rank
        device["buffers"] += width * trained
    if model.quantized_base:  # one matrix at a time in the model's dtype
        device["buffers"] += width * max(rows * columns for rows, columns in shape.linears.values())
    host = 0
    if zero.optimizer_on != "none":
        if zero.stage > 1:
            del device["gradients"]
        host = host_bytes_unless_offloaded(zero, width) * trained // ranks
    for kind, place in (("optimizer", zero.optimizer_on), ("weights", zero.parameters_on)):
        if place != "none":
            moved = device.pop(kind)
            host += moved if place == "cpu" else 0
    return device, host


def moments(optimizer: str, shape: ModelShape | None) -> float:
    """Return the bytes of an optimizer's moments for each trained parameter: those of `shape`, or None for an adapter.

    Muon has one moment in fp32 for a matrix of a decoder layer, and two for the rest: the embedding and the head.
    """
    if optimizer == "muon" and shape is not None:
        ends = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
        return 4 + 4 * ends / shape.parameters
    return {"adamw": 8, "adamw_8bit": 2}.get(optimizer, 4)


def trained_by_adapter(model: ModelConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters of the LoRA adapter, with DoRA's norms; 0 without an adapter."""
    if not model.lora_target:
        return 0
    norms = shape.adapted_outputs(model.lora_target) if model.use_dora else 0
    return shape.adapter_parameters(model.lora_target, model.lora_rank) + norms


BITS = {"nf4": 4 + 32 / 64, "nf4_double": 4 + 8 / 64 + 32 / (64 * 256)}
"""Bits of a weight by `quantized_base`: 4, and the scale of its block of 64 weights, in fp32 or, for `nf4_double`, in 8
bits with one fp32 scale for 256 of them (Dettmers et al., QLoRA, 2023, section 3).
"""


def saved_by_quantizing(model: ModelConfig, shape: ModelShape, width: int) -> int:
    """Return the bytes that the linear layers of the decoder need less in 4 bits; 0 without `quantized_base`."""
    if model.quantized_base is None:
        return 0
    return int((width - BITS[model.quantized_base] / 8) * shape.linear_parameters)


def secondary(zero: ZeroMemory, held: int) -> int:
    """Return a rank's number of weights in the secondary copy, sharded over a host's ranks (ZeRO++, hpZ)."""
    return held // zero.secondary_ranks if zero.secondary_ranks > 1 else 0


def host_bytes_unless_offloaded(zero: ZeroMemory, width: int) -> int:
    """Return the host memory in bytes per parameter that offloaded optimizer states need in addition to the states.

    It holds the accumulated gradients, their fp32 copy for the update (unless the states are on NVMe), and below stage
    3 the updated weights before they are copied back.
    """
    return width * (1 if zero.stage == 3 else 2) + (0 if zero.optimizer_on == "nvme" else 4)


def gathered_parameters(zero: ZeroMemory, shape: ModelShape, ranks: int, elsewhere: int = 0) -> int:
    """Return the most parameters that stage 3 gathers on a rank at a time: at least the embedding's or the head's, and
    never the experts `elsewhere`, on other ranks.
    """
    if zero.stage < 3 or ranks == 1:
        return 0
    return min(shape.parameters - elsewhere, max(zero.live_parameters, shape.vocab_size * shape.hidden_size))


def layer_activations(shape: ModelShape, tokens: int, width: int, compiled: bool) -> int:
    """Return the bytes that one layer keeps for its backward pass.

    A layer keeps its input, two norms, q, k, v, the attention output and its projection, and four tensors of the gated
    MLP: the gate and up projections, the activation, and the input of the down projection. In a mixture of experts only
    the experts of a token count. A compiled layer recomputes norms and the elementwise parts of the MLP. A hybrid model
    has two kinds of layers; the larger one counts.
    """
    mixer = mixer_activations(shape)
    if compiled:
        return width * tokens * (2 * shape.hidden_size + mixer + 2 * shape.widest_mlp)
    return width * tokens * (5 * shape.hidden_size + mixer + 4 * shape.widest_mlp)


def mixer_activations(shape: ModelShape) -> int:
    """Return the number of values that a layer's attention keeps for each token: q, k, v and its output."""
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return max((3 if shape.gated_attention else 2) * query + 2 * key, delta_activations(shape))


def delta_activations(shape: ModelShape) -> int:
    """Return the number of values that a gated-delta mixer keeps for each token, or 0 if the model has no such mixer.

    It keeps the queries, keys and values before and after the convolution, the queries and keys of every value head,
    the gate, the output of the delta rule, the product of the two, and for each head one row of the triangular system
    of a chunk of 64 tokens.
    """
    if (delta := shape.delta) is None:
        return 0
    return 2 * delta.mixed + 2 * delta.value_heads * delta.key_dim + 3 * delta.values + 64 * delta.value_heads


def activations(shape: ModelShape, tokens: int, width: int, wish: str | int, compiled: bool) -> int:
    """Return the bytes of all activations with `gradient_checkpointing: wish`.

    A recomputed layer keeps its input, and recomputed attention keeps nothing: its input is the output of a norm. One
    is recomputed at a time.
    """
    layer, layers = layer_activations(shape, tokens, width, compiled), shape.num_hidden_layers
    if wish == ATTENTION_ONLY:
        mixer = width * tokens * mixer_activations(shape)
        return layers * (layer - mixer) + mixer
    checkpointed = checkpointed_layers(wish, layers)
    kept = (layers - checkpointed) * layer
    return kept + checkpointed * width * tokens * shape.hidden_size + (layer if checkpointed else 0)


SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linear layers that have the same input as another one."""


def adapter_activations(shape: ModelShape, tokens: int, width: int, model: ModelConfig) -> int:
    """Return the bytes that adapters need in addition to the activations of their layers.

    In 16 bits their weights are fp32, and so are copies of their inputs; the widest input has a gradient in fp32 and
    one in the model's dtype. PiSSA's second product has one more tensor in fp32. All that exists for one layer at a
    time.
    """
    more = dora_activations(shape, tokens, width, model) if model.use_dora else 0
    inputs = {
        SHARED_INPUT.get(name, name): shape.linears[name][0] for name in shape.adapted_linears(model.lora_target or "")
    }
    if width == 4 or not inputs:
        return more
    of_widest = 4 + width + (0 if model.init_lora_weights is True else 4)
    return more + tokens * (4 * sum(inputs.values()) + of_widest * max(inputs.values()))


def dora_activations(shape: ModelShape, tokens: int, width: int, model: ModelConfig) -> int:
    """Return the bytes that DoRA keeps in addition, in all layers whose activations exist at a time.

    An adapted layer keeps its output without the adapter and that of the adapter alone, and a square matrix of its
    input's width, by which PEFT computes B A. Norms need two copies of the largest matrix.
    """
    adapted = [shape.linears[name] for name in shape.adapted_linears(model.lora_target or "")]
    layer = width * sum(2 * tokens * columns + rows * rows for rows, columns in adapted)
    checkpointed = checkpointed_layers(model.gradient_checkpointing, shape.num_hidden_layers)
    at_a_time = shape.num_hidden_layers - checkpointed + (1 if checkpointed else 0)
    return at_a_time * layer + 2 * width * max((rows * columns for rows, columns in adapted), default=0)


def picture_bytes(vision: VisionShape, tokens: int, width: int, model: ModelConfig) -> int:
    """Return the bytes of the pixels and of the tower's activations if all tokens are placeholders of pictures.

    A layer keeps for each patch its input, two norms, q, k, v, the attention output and its projection, and three
    tensors of the MLP. A tower that is recomputed keeps its layers' inputs, and a frozen one keeps nothing.
    """
    patches, layers = tokens * vision.patches_per_token, vision.layers
    layer = width * patches * (8 * vision.hidden_size + 3 * vision.intermediate_size)
    is_frozen = model.lora_target is not None or model.freeze_vision == "all"
    if is_frozen:
        kept = layer
    elif checkpointed_layers(model.gradient_checkpointing, 1):
        kept = layer + layers * width * patches * vision.hidden_size
    else:
        kept = layers * layer
    return 4 * patches * vision.patch_values + kept


def head_bytes(shape: ModelShape, tokens: int, width: int, is_trained: bool) -> int:
    """Return the bytes of a chunk of logits, of its gradient and, if the head is trained, of the head's gradient.

    The head's gradient exists twice: in fp32, and in the model's dtype with `width` bytes per number.
    """
    return logit_bytes(shape, tokens, width) + is_trained * (4 + width) * shape.vocab_size * shape.hidden_size


def logit_bytes(shape: ModelShape, tokens: int, width: int) -> int:
    """Return the bytes of the logits that exist at a time, in fp32, and of their gradient."""
    return (4 + width) * min(head_tokens(shape.vocab_size), tokens) * shape.vocab_size


def fewest_checkpointed(spare: int, layers: int, layer: int) -> int:
    """Return the smallest number of layers that must be recomputed.

    Args:
        spare: Bytes that are free if all layers are recomputed. Negative if there is too little memory even then.
        layer: Additional bytes for each layer that is not recomputed.
    """
    return max(0, layers - max(0, spare) // max(1, layer))


ATTENTION_ONLY = "attention"
"""Value of `gradient_checkpointing` with which all layers recompute their attention only."""


def checkpointed_layers(wish: str | int, layers: int) -> int:
    """Return the number of layers that `gradient_checkpointing` recomputes whole at the start: with `auto`, all."""
    return min(wish, layers) if isinstance(wish, int) else 0 if wish in ("none", ATTENTION_ONLY) else layers


def compiles(model_args: ModelConfig, on_gpu: bool) -> bool:
    """Return whether decoder layers are compiled.

    `auto` does not compile with dropout, because a recomputed layer must repeat its dropout mask, which compiled code
    does not guarantee. It does not compile with Liger or an engine's kernels either, which are fused already.
    """
    wish, drops = model_args.compile_layers, model_args.dropout or model_args.lora_dropout > 0
    return wish if isinstance(wish, bool) else on_gpu and not (drops or model_args.liger or model_args.engine_kernels)


def with_turns(memory: RoleMemory, plan: RolePlan, role: RoleConfig, config: Config, batch: BatchPlan) -> RoleMemory:
    """Return the memory of a role that takes turns, with the host memory to which its state is offloaded while other
    roles work.

    An engine's weights are not offloaded if the next weight sync sends all of them. Requests that are unfinished at a
    weight sync are kept in host memory as well.
    """
    kept = sum(size for kind, size in memory.device.items() if kind not in WHILE_IT_WORKS) * len(plan.devices[0])
    frozen = 0
    if plan.name == "actor_infer" and isinstance(config, RlvrConfig):
        kept = 0 if role.strategy_args.traits.discards_weights and not sends_adapter(config) else kept
        # A synchronous step ends with no request in flight.
        waiting = requests_in_flight(config, plan) if config.async_generation_ratio else 0
        frozen = waiting * batch.longest_sequence * FROZEN_TOKEN
    return replace(memory, host=memory.host + kept + frozen)


def requests_in_flight(config: RlvrConfig, plan: RolePlan) -> int:
    """Return the largest number of requests that an engine works on at a time."""
    in_flight = (1 + config.async_generation_ratio) * config.rollout_batch_size * config.num_return_sequences_in_group
    most = [in_flight / plan.ranks]
    if config.max_running_samples is not None:
        most.append(config.max_running_samples / plan.ranks)
    elif (requests := config.actor_infer.strategy_args.traits.most_requests) is not None:
        most.append(requests)
    return math.ceil(min(most))
