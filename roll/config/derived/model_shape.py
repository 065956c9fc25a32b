"""The shape of a model from its config.json, and the number of its parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.config.shipped import MODELS, examples_folder
from roll.stores.address import is_address
from roll.stores.models import known_model

MLP = ("gate_proj", "up_proj", "down_proj")
NAMES = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads")

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` for models that mix gated-delta layers with attention layers."""
REPLAYED = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")
"""Values of `model_type` for models whose routers can replay the engine's choice of experts, as tests show."""
PATCHED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Values of `model_type` for models that see the patches of a picture, in positions that follow its grid."""
TILED = ("smolvlm", "idefics3")
"""Values of `model_type` for models that see a picture in tiles of one size."""
SQUARE = ("gemma3",)
"""Values of `model_type` for models that see a whole picture, resized to a square. Its placeholders see each other."""
BOTH_WAYS = ("qwen3_5", "gemma3")
"""Those of them that see pictures only with `model_args.sees_pictures`, and of which else the text model is trained."""
LINEAR = "linear_attention"
"""Name of a gated-delta layer in `layer_types` of config.json."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json with the number of experts, which differ by model family."""


@dataclass(frozen=True)
class Experts:
    """The routed MLPs of a mixture of experts."""

    count: int
    """Number of experts per layer."""
    per_token: int
    """Number of routed experts that process each token."""
    size: int
    """Intermediate width of each expert."""
    shared_size: int
    """Intermediate width of all shared experts together; 0 without shared experts."""
    layers: int
    """Number of decoder layers with experts. The other layers have a dense MLP of `intermediate_size`."""
    has_shared_gate: bool = False
    """Whether a scalar gate scales the output of the shared experts."""
    are_replayed: bool = False
    """Whether the model's routers can replay the choice of the engine (`REPLAYED`)."""
    are_adapted: bool = True
    """Whether `all-linear` of PEFT adapts the routed experts and the router."""

    def adapted(self, hidden: int) -> int:
        """Return the number of parameters of a rank-1 `all-linear` adapter on a layer's experts, router and gate."""
        routed = self.count * (2 * (hidden + 2 * self.size) + self.size + hidden)
        shared = 3 * (hidden + self.shared_size) if self.shared_size else 0
        return (routed + hidden + self.count) * self.are_adapted + shared + (hidden + 1) * self.has_shared_gate


@dataclass(frozen=True)
class DeltaLayers:
    """The gated-delta layers of a hybrid model, which replace attention (Yang et al., 2024)."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution kernel in tokens."""

    @property
    def mixed(self) -> int:
        """Return the number of channels of queries, keys and values together, which the convolution receives."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Return the number of channels of the values."""
        return self.value_heads * self.value_dim

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each linear layer of one gated-delta layer, by name."""
        gates = {"in_proj_b": (hidden, self.value_heads), "in_proj_a": (hidden, self.value_heads)}
        return {
            "in_proj_qkv": (hidden, self.mixed),
            "in_proj_z": (hidden, self.values),
            **gates,
            "out_proj": (self.values, hidden),
        }

    def parameters(self, hidden: int) -> int:
        """Return the parameters of a gated-delta layer: linear layers, convolution, decay, time-step bias, norm."""
        linears = sum(rows * columns for rows, columns in self.linears(hidden).values())
        return linears + self.mixed * self.kernel + 2 * self.value_heads + self.value_dim

    def state_bytes(self, width: int, ranks: int) -> int:
        """Return the bytes of state per sequence and rank, over all layers: fp32 state and last convolution inputs."""
        state = 4 * self.value_heads * self.key_dim * self.value_dim + width * (self.kernel - 1) * self.mixed
        return self.layers * state // ranks


@dataclass(frozen=True)
class VisionShape:
    """The part of a model that sees pictures."""

    model_type: str
    """The `model_type` of the whole model: one of `PATCHED`, `TILED` or `SQUARE`."""
    hidden_size: int
    intermediate_size: int
    layers: int
    tower: int
    """Number of parameters of the vision tower without its projector."""
    projector: int
    """Number of parameters of the projector into the text model."""
    patches_per_token: int
    """Number of patches behind a placeholder token."""
    patch_values: int
    """Number of values of a patch."""

    def frozen(self, wish: str) -> int:
        """Return the number of parameters that `freeze_vision` keeps as they are."""
        return {"none": 0, "tower": self.tower}.get(wish, self.tower + self.projector)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder of the Llama and Qwen families.

    A layer has a gated MLP or experts, and grouped-query attention, or a gated-delta layer in some layers of a hybrid.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int | None
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    experts: Experts | None = None
    delta: DeltaLayers | None = None
    norms: int = 2
    """Number of norms of a layer, besides those of queries and keys."""
    gated_attention: bool = False
    """Whether the query projection also computes a gate that scales the output of attention."""
    latent_attention: bool = False
    """Whether keys and values are compressed to a latent vector, as in DeepSeek-V2. `head_dim` is then not used."""
    sinks: bool = False
    """Whether attention has sinks, as in gpt-oss."""
    vision: VisionShape | None = None
    """The part that sees pictures. None for a model of text alone."""
    has_known_operations: bool = False
    """Whether `model_args.engine_kernels` knows vLLM's kernel of each operation."""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the widths (input, output) of linear layers by name: attention, dense MLP, gated-delta layers."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = self.attention_linears | ({} if self.delta is None else self.delta.linears(hidden))
        return attention | {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each linear layer of attention, by name."""
        hidden, query, key = (
            self.hidden_size,
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        queries = (2 if self.gated_attention else 1) * query
        return {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
        }

    @property
    def attention_layers(self) -> int:
        """Return the number of decoder layers with attention, which have a KV cache."""
        return self.num_hidden_layers - (self.delta.layers if self.delta else 0)

    def layers_with(self, linear: str) -> int:
        """Return the number of decoder layers with a linear layer of this name."""
        if linear in MLP:
            return self.dense_layers
        return self.attention_layers if linear in self.attention_linears or self.delta is None else self.delta.layers

    @property
    def parameters(self) -> int:
        """Return the number of parameters. Exact for Llama, Qwen2, Qwen3, Qwen's mixtures, Qwen3.5's text model,
        Qwen2.5-VL, Qwen3-VL, Qwen3.5, SmolVLM and Gemma 3.
        """
        seeing = self.vision.tower + self.vision.projector if self.vision else 0
        return self._parameters(self.experts.count if self.experts else 0) + seeing

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters in the forward pass of a token, with only the experts of the token, and
        without those that see pictures.
        """
        return self._parameters(self.experts.per_token if self.experts else 0)

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of all routed experts; 0 without any."""
        return self._parameters(self.experts.count) - self._parameters(0) if self.experts else 0

    def _parameters(self, experts: int) -> int:
        """Return the number of parameters with `experts` routed experts per layer."""
        attention = sum(rows * columns for rows, columns in self.attention_linears.values())
        if self.attention_bias:
            attention += sum(self.attention_linears[name][1] for name in ("q_proj", "k_proj", "v_proj"))
        if self.qk_norm:
            attention += 2 * self.head_dim
        mixers = self.attention_layers * attention + (
            self.delta.layers * self.delta.parameters(self.hidden_size) if self.delta else 0
        )
        mlps = self.dense_layers * 3 * self.hidden_size * self.intermediate_size
        if self.experts:
            sparse = 3 * self.hidden_size * (experts * self.experts.size + self.experts.shared_size)
            gates = self.hidden_size * (self.experts.count + self.experts.has_shared_gate)
            mlps += self.experts.layers * (sparse + gates)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = (self.norms * self.num_hidden_layers + 1) * self.hidden_size
        return embeddings + norms + mixers + mlps

    @property
    def dense_layers(self) -> int:
        """Return the number of decoder layers with a dense MLP."""
        return self.num_hidden_layers - (self.experts.layers if self.experts else 0)

    @property
    def linear_parameters(self) -> int:
        """Return the number of weights of the linear layers of all decoder layers, with those of all experts, but
        without routers and the head.
        """
        dense = sum(self.layers_with(name) * rows * columns for name, (rows, columns) in self.linears.items())
        if self.experts is None:
            return dense
        shared = 3 * self.hidden_size * self.experts.layers * self.experts.shared_size
        return dense + self.expert_parameters + shared

    @property
    def widest_mlp(self) -> int:
        """Return the largest intermediate width of a layer's MLP: a dense layer's, or the sum of a token's experts."""
        sparse = self.experts.per_token * self.experts.size + self.experts.shared_size if self.experts else 0
        return max(sparse, self.intermediate_size if self.dense_layers else 0)

    @property
    def valuing_parameters(self) -> int:
        """Return the number of parameters of the model with a scalar head in place of the language-model head."""
        return (
            self.parameters - (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size) + self.hidden_size
        )

    @property
    def attending_flops(self) -> int:
        """Return the FLOPs of attention from one token to another (scores and values), over all attention layers."""
        return 4 * self.attention_layers * self.num_attention_heads * self.head_dim

    @property
    def attention_cost(self) -> float:
        """Return c in the cost of a causal sequence, length + c length², in units of one token without attention."""
        return self.attending_flops / 2 / (2 * self.active_parameters)

    def kv_bytes(self, width: int, ranks: int) -> int:
        """Return the bytes of KV cache per token and rank, with `width` bytes per number.

        If there are fewer key-value heads than ranks, they are replicated.
        """
        return 2 * width * self.attention_layers * -(-self.num_key_value_heads // ranks) * self.head_dim

    def part(self, ranks: int) -> ModelShape:
        """Return the shape on one rank if `ranks` ranks shard the linear layers."""
        heads, keys, inner = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        experts = self.experts and replace(
            self.experts, size=self.experts.size // ranks, shared_size=self.experts.shared_size // ranks
        )
        part = replace(
            self,
            num_attention_heads=heads // ranks,
            num_key_value_heads=keys // ranks,
            intermediate_size=inner // ranks,
        )
        return replace(part, experts=experts)

    def adapter_parameters(self, lora_target: str, rank: int) -> int:
        """Return the number of parameters of LoRA adapters on comma-separated modules or `all-linear`. Unknown names
        count as 0.

        As in PEFT, `all-linear` adapts experts and routers: all experts of a layer as one tensor, and gate and up
        together with twice the rank. The number is exact if every layer has experts. PEFT does not adapt the MLPs of
        other layers, which are counted here.
        """
        adapted = sum(self.layers_with(name) * sum(self.linears[name]) for name in self.adapted_linears(lora_target))
        if lora_target == "all-linear" and self.experts:
            adapted += self.experts.layers * self.experts.adapted(self.hidden_size)
        return rank * adapted

    def adapted_linears(self, lora_target: str) -> list[str]:
        """Return the known linear layers among comma-separated modules; for `all-linear`, all of them."""
        if lora_target == "all-linear":
            return list(self.linears)
        return [name for module in lora_target.split(",") if (name := module.strip()) in self.linears]

    def adapted_outputs(self, lora_target: str) -> int:
        """Return the number of outputs of all adapted linear layers, each of which has a norm with DoRA."""
        return sum(self.layers_with(name) * self.linears[name][1] for name in self.adapted_linears(lora_target))


def uneven_layers(shape: ModelShape | None, size: int) -> str | None:
    """Return why a model's layers cannot be split evenly over `size` ranks; None if they can or are unknown."""
    if shape is None:
        return None
    if shape.delta:
        return (
            f"{shape.delta.layers} of the model's {shape.num_hidden_layers} layers use the delta rule, which AutoTP "
            f"cannot split"
        )
    if shape.num_key_value_heads % size or shape.num_attention_heads % size:
        heads = f"{shape.num_attention_heads} attention and {shape.num_key_value_heads} key-value heads"
        return f"the model's {heads} cannot be split over {size} ranks"
    inner = shape.intermediate_size
    return f"the model's MLP of width {inner} cannot be split over {size} ranks" if inner % size else None


def uneven_heads(heads: int, key_value_heads: int, ranks: int) -> str | None:
    """Return why attention heads cannot be split evenly over ranks, or None if they can.

    If there are fewer key-value heads than ranks, they are replicated.
    """
    if heads % ranks:
        return f"the model's {heads} attention heads cannot be split evenly over {ranks} ranks"
    if key_value_heads % ranks and ranks % key_value_heads:
        return (
            f"the model's {key_value_heads} key-value heads can be neither split evenly over {ranks} ranks nor "
            f"replicated on them"
        )
    return None


def read_shape(file: Path, asked: bool | None = None) -> ModelShape | None:
    """Return the shape in a config.json, None for an unsupported model. Raises ValueError if it cannot be read.

    Args:
        asked: `model_args.sees_pictures`.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict):
        raise ValueError("it contains no JSON object")
    return shape_of(values, asked)


def shape_of(values: Mapping[str, Any], asked: bool | None = None) -> ModelShape | None:
    """Return the shape in the values of a config.json, or None for an unsupported kind of model.

    For a vision model, this is the shape of its text model, and of the tower if roll trains it.

    Args:
        asked: `model_args.sees_pictures`.
    """
    if sees_pictures(values.get("model_type"), asked):
        return _seeing_shape(values)
    if is_seeing_hybrid(values.get("model_type")) and isinstance(text := values.get("text_config"), Mapping):
        tied = values.get("tie_word_embeddings", False)
        return shape_of({"model_type": f"{values['model_type']}_text", "tie_word_embeddings": tied, **text})
    is_hybrid = values.get("model_type") in HYBRIDS
    if is_hybrid and "moe_intermediate_size" in values:
        values = {"intermediate_size": values["moe_intermediate_size"], **values}  # the dense width, which no layer has
    if not all(isinstance(values.get(name), int) and values[name] > 0 for name in NAMES):
        return None
    heads = values["num_attention_heads"]
    has_bias = values.get("qkv_bias", values.get("model_type") in ("qwen2", "qwen2_moe", "qwen2_5_vl_text"))
    return ModelShape(
        **{name: values[name] for name in NAMES},
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=bool(values.get("attention_bias", has_bias)),
        max_position_embeddings=values.get("max_position_embeddings"),
        qk_norm=str(values.get("model_type")).startswith(("qwen3", "gemma3")),
        norms=4 if values.get("model_type") in ("gemma2", "gemma3_text") else 2,
        experts=_experts(values),
        delta=_delta(values) if is_hybrid else None,
        gated_attention=is_hybrid,
        sinks=values.get("model_type") == "gpt_oss",
        latent_attention=bool(values.get("kv_lora_rank")),
        has_known_operations=has_known_operations(values),
    )


def has_known_operations(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model whose operations are those of Llama, with Qwen's biases and norms.

    Not known are rotary embeddings that are scaled or rotate a part of each head, sliding windows, and other gates.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = values.get("model_type")
    windows = values.get("sliding_window") and (kind == "mistral" or values.get("use_sliding_window"))
    return (
        kind in ("llama", "mistral", "qwen2", "qwen3")
        and values.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) == 1.0
        and not windows
        and set(values.get("layer_types") or ()) <= {"full_attention"}
    )


TEXT_TYPES = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "gemma3": "gemma3_text",
}
"""By `model_type` of a seeing model, that of its text model. Of the others it is Llama's."""


TEXT_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "qwen3_vl": {"head_dim": 128},
    "qwen3_5": {"head_dim": 256},
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
"""By `model_type` of a seeing model, transformers' values of its text model that its files may leave out."""


def _seeing_shape(values: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a model that sees pictures. Older files of Qwen2.5-VL have no `text_config`."""
    kind, vision = str(values["model_type"]), values.get("vision_config")
    text = values.get("text_config") if isinstance(values.get("text_config"), Mapping) else values
    assert isinstance(text, Mapping)
    tied = bool(values.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in SQUARE)))
    own = {
        **TEXT_DEFAULTS.get(kind, {}),
        **text,
        "model_type": TEXT_TYPES.get(kind, "llama"),
        "tie_word_embeddings": tied,
    }
    shape = shape_of(own)
    if shape is None or not isinstance(vision, Mapping):
        return None
    if kind in PATCHED:
        return replace(shape, vision=_patches(vision, kind, shape))
    seen = (_tiles if kind in TILED else _square)(vision, values, shape)
    return replace(shape, vision=seen)


def _patches(vision: Mapping[str, Any], kind: str, text: ModelShape) -> VisionShape:
    """Return the tower of Qwen's models. Defaults are transformers'."""
    is_third = kind != "qwen2_5_vl"
    hidden = vision.get("hidden_size", 1152 if is_third else 3584)
    inner = vision.get("intermediate_size", 4304 if is_third else 3420)
    layers, merge = vision.get("depth", 27 if is_third else 32), vision.get("spatial_merge_size", 2)
    side, out = vision.get("patch_size", 16 if is_third else 14), vision.get("out_hidden_size", text.hidden_size)
    values = vision.get("in_channels", vision.get("in_chans", 3)) * vision.get("temporal_patch_size", 2) * side**2
    wide = hidden * merge**2
    merger = wide * wide + wide + wide * out + out
    attention = 4 * hidden * hidden + 4 * hidden
    if not is_third:  # RMS norms, and a gated MLP with biases
        layer = 2 * hidden + attention + 3 * hidden * inner + 2 * inner + hidden
        tower = values * hidden + layers * layer
        return VisionShape(kind, hidden, inner, layers, tower, hidden + merger, merge**2, values)
    layer = 4 * hidden + attention + 2 * hidden * inner + inner + hidden
    deep = len(vision.get("deepstack_visual_indexes", (8, 16, 24))) if kind == "qwen3_vl" else 0
    tower = (values + 1 + vision.get("num_position_embeddings", 2304)) * hidden + layers * layer
    projector = 2 * hidden + merger + deep * (2 * wide + merger)
    return VisionShape(kind, hidden, inner, layers, tower, projector, merge**2, values)


def _tiles(vision: Mapping[str, Any], values: Mapping[str, Any], text: ModelShape) -> VisionShape:
    """Return the tower of SmolVLM and Idefics3. Defaults are transformers' for SmolVLM."""
    hidden, inner = vision.get("hidden_size", 1152), vision.get("intermediate_size", 3072)
    layers, side = vision.get("num_hidden_layers", 12), vision.get("patch_size", 32)
    merge = values.get("scale_factor", 2)
    patch = vision.get("num_channels", 3) * side**2
    tower = _siglip(hidden, inner, layers, patch, (vision.get("image_size", 224) // side) ** 2)
    projector, kind = hidden * merge**2 * text.hidden_size, str(values["model_type"])
    return VisionShape(kind, hidden, inner, layers, tower, projector, merge**2, patch)


def _square(vision: Mapping[str, Any], values: Mapping[str, Any], text: ModelShape) -> VisionShape:
    """Return the tower of Gemma 3. Defaults are transformers'."""
    hidden, inner = vision.get("hidden_size", 768), vision.get("intermediate_size", 3072)
    layers, side = vision.get("num_hidden_layers", 12), vision.get("patch_size", 16)
    patch, patches = vision.get("num_channels", 3) * side**2, (vision.get("image_size", 224) // side) ** 2
    tower = _siglip(hidden, inner, layers, patch, patches)
    per_token = patches // values.get("mm_tokens_per_image", 256)
    return VisionShape("gemma3", hidden, inner, layers, tower, hidden * text.hidden_size + hidden, per_token, patch)


def _siglip(hidden: int, inner: int, layers: int, patch: int, patches: int) -> int:
    """Return the parameters of SigLIP's tower: patches and their positions, layers, and the last norm."""
    layer = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden
    return (patch + 1 + patches) * hidden + layers * layer + 2 * hidden


def _delta(values: Mapping[str, Any]) -> DeltaLayers | None:
    """Return the gated-delta layers of a config.json's values, or None without any. Defaults are transformers'."""
    layers, every = values["num_hidden_layers"], values.get("full_attention_interval") or 4
    kinds = values.get("layer_types") or [
        LINEAR if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    count = sum(kind == LINEAR for kind in kinds)
    heads = values.get("linear_num_key_heads", 16), values.get("linear_num_value_heads", 32)
    dims = values.get("linear_key_head_dim", 128), values.get("linear_value_head_dim", 128)
    return DeltaLayers(count, *heads, *dims, values.get("linear_conv_kernel_dim", 4)) if count else None


def _experts(values: Mapping[str, Any]) -> Experts | None:
    """Return the experts in the values of a config.json, or None if every layer is dense."""
    count = next((values[name] for name in EXPERTS if values.get(name)), 0)
    if not count:
        return None
    shared = values.get("shared_expert_intermediate_size") or 0
    size = values.get("moe_intermediate_size") or values["intermediate_size"]
    shared += (values.get("n_shared_experts") or 0) * size
    layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step") or 1
    dense = {*(values.get("mlp_only_layers") or ()), *range(values.get("first_k_dense_replace") or 0)}
    sparse = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    gate = values.get("model_type") in ("qwen2_moe", "qwen3_5_moe_text")
    return Experts(
        count,
        values.get("num_experts_per_tok") or 1,
        size,
        shared,
        sparse,
        gate,
        values.get("model_type") in REPLAYED,
        values.get("model_type") not in (*HYBRIDS, "gpt_oss", "granitemoe"),
    )


def is_seeing_hybrid(model_type: object) -> bool:
    """Return whether models of this type have a hybrid text model and a vision tower, as Qwen3.5 does."""
    return f"{model_type}_text" in HYBRIDS


def has_known_tower(model_type: object) -> bool:
    """Return whether models of this type have a vision tower that roll can train on pictures."""
    return model_type in (*PATCHED, *TILED, *SQUARE)


def sees_pictures(model_type: object, asked: bool | None) -> bool:
    """Return whether roll trains models of this type on pictures, given `model_args.sees_pictures`."""
    return has_known_tower(model_type) and (bool(asked) or model_type not in BOTH_WAYS)


def config_file(model: str) -> Path | None:
    """Return the config.json of a folder, of a model in a store whose description is on this machine, or of a Hub name
    in the local cache or the shipped shapes; or None.
    """
    if is_address(model):
        known = known_model(model)
        return known / "config.json" if known else None
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    snapshots = sorted((_hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    shipped = examples_folder() / MODELS / model / "config.json"
    return snapshots[-1] if snapshots else shipped if shipped.is_file() else None


def _hub_cache() -> Path:
    """Return the cache folder of `huggingface_hub`, from the environment variables that it reads."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
