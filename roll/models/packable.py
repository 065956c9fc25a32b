"""Checks whether a `PackedModel` returns the same outputs for packed sequences as for each sequence alone."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from roll.config.derived.model_shape import LINEAR
from roll.models.gated_delta import delta_layers, has_delta_layers
from roll.models.sequence_parallel import ATTENTION, BY_LENGTH

LOGIT_KEYS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Configuration keys of models that change the output logits or the attention logits after their matrix product."""
NEUTRAL = (None, 1.0)
"""Values of these keys that change nothing."""
OWN_ATTENTION = "it has its own attention code, which does not support packed sequences"


def not_packable(model: PreTrainedModel) -> str | None:
    """Return why the model's log-probs would be wrong for packed sequences, or None if they are right."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    is_hybrid = has_delta_layers(config)  # supports the packed kernel, but does not declare it
    if not model._supports_attention_backend and not is_hybrid:
        return OWN_ATTENTION
    if getattr(head, "bias", None) is not None:
        return "its output matrix has a bias, which roll does not apply"
    for key in LOGIT_KEYS:
        if (value := getattr(config, key, None)) not in NEUTRAL:
            return f"its {key} of {value:g} changes logits, which roll does not support"
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        return "its attention has sinks, which the packed kernel does not support"
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION - ({LINEAR} if is_hybrid else set())
    known = {id(module) for layer in delta_layers(model) for module in layer.modules()} if is_hybrid else set()
    if others or any(isinstance(module, nn.Conv1d) and id(module) not in known for module in model.modules()):
        kinds = f" ({', '.join(sorted(others))})" if others else ""
        return f"it has layers{kinds} that treat packed sequences as a single sequence"
    return None


def longest_packable(config: PreTrainedConfig) -> int | None:
    """Return the sequence length up to which the rotary embedding does not depend on the longest sequence in the row.

    None if it never depends on it.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in BY_LENGTH:
        return None
    known = (rope.get("original_max_position_embeddings"), getattr(text, "original_max_position_embeddings", None))
    return next((length for length in known if length), text.max_position_embeddings)
