"""How a model changes its logits after the product with its output matrix: a factor, then a bound."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

LOGIT_KEYS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
"""Configuration keys of models that change the output logits or the attention logits after their matrix product."""
NEUTRAL = (None, 1.0)
"""Values of these keys that change nothing."""
KNOWN = {
    "granite": ("logits_scaling",),
    "granitemoe": ("logits_scaling",),
    "cohere": ("logit_scale",),
    "gemma2": ("final_logit_softcapping", "attn_logit_softcapping"),
}
"""Types of models and the keys that are supported for them. The same key has another meaning in some other types."""


@dataclass(frozen=True)
class FinalLogits:
    """The change of the products: `cap * tanh(factor * product / cap)`, or `factor * product` without a cap."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits for the products of states and output matrix, in a tensor of the same shape."""
        scaled = products if self.factor == 1.0 else products * self.factor
        return scaled if self.cap is None else self.cap * (scaled / self.cap).tanh()


AS_THEY_ARE = FinalLogits()


def unknown_key(config: PreTrainedConfig) -> str | None:
    """Return a key with which a model changes its logits in a way that is not supported, or None."""
    text = config.get_text_config()
    known = KNOWN.get(text.model_type, ())
    return next((key for key in LOGIT_KEYS if key not in known and getattr(text, key, None) not in NEUTRAL), None)


def final_logits(config: PreTrainedConfig) -> FinalLogits:
    """Return how a model changes its logits, if `unknown_key` finds nothing."""
    text = config.get_text_config()
    given = {key: getattr(text, key) for key in KNOWN.get(text.model_type, ())}
    factor = given.get("logit_scale") or 1.0
    return FinalLogits(factor / given.get("logits_scaling", 1.0), given.get("final_logit_softcapping"))
