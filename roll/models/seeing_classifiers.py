"""Models for sequence classification that see pictures, which transformers does not have.

They are transformers' classes for text models, with the base model of the family. vLLM finds its own models by the same
names. An export has a copy of this file, so that transformers loads it with `trust_remote_code`; therefore the file
imports nothing but transformers.
"""

from __future__ import annotations

from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.idefics3 import Idefics3Config, Idefics3PreTrainedModel
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLPreTrainedModel
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLPreTrainedModel
from transformers.models.smolvlm import SmolVLMConfig, SmolVLMPreTrainedModel


class Qwen2_5_VLForSequenceClassification(GenericForSequenceClassification, Qwen2_5_VLPreTrainedModel):  # noqa: N801
    """Qwen2.5-VL with a head for labels."""


class Qwen3VLForSequenceClassification(GenericForSequenceClassification, Qwen3VLPreTrainedModel):
    """Qwen3-VL with a head for labels."""


class SmolVLMForSequenceClassification(GenericForSequenceClassification, SmolVLMPreTrainedModel):
    """SmolVLM with a head for labels."""


class Idefics3ForSequenceClassification(GenericForSequenceClassification, Idefics3PreTrainedModel):
    """Idefics3 with a head for labels."""


CLASSIFIERS: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    Qwen2_5_VLConfig: Qwen2_5_VLForSequenceClassification,
    Qwen3VLConfig: Qwen3VLForSequenceClassification,
    SmolVLMConfig: SmolVLMForSequenceClassification,
    Idefics3Config: Idefics3ForSequenceClassification,
}
"""By configuration, the class with a head for labels."""


def register() -> None:
    """Make the classes known to transformers, with the names that the weights of their families have in files."""
    for config, model in CLASSIFIERS.items():
        AutoModelForSequenceClassification.register(config, model, exist_ok=True)
        model.register_for_auto_class("AutoModelForSequenceClassification")
        generator = model.__name__.replace("SequenceClassification", "ConditionalGeneration")
        if names := get_checkpoint_conversion_mapping(generator):
            register_checkpoint_conversion_mapping(model.__name__, names, overwrite=True)


register()
