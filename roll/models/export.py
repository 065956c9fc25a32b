"""Writes a policy as a folder that transformers, PEFT and vLLM can load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

FORMAT = {"format": "pt"}


def write_model(folder: Path, buckets: Iterator[Mapping[str, Tensor]], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a Hugging Face model folder with one safetensors file per bucket, an index, the configuration and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(buckets, 1):
        file = f"model-{number:05d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / file, metadata=FORMAT)
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # The text model of a multimodal model has no `architectures`, which engines need to find the model class.
    model.config.architectures = model.config.architectures or [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:  # a reward model has none
        # save_pretrained refuses a temperature without do_sample, which some published models have.
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    tokenizer.save_pretrained(folder)


def write_adapter_folder(folder: Path, tensors: Mapping[str, Tensor], model: object, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a PEFT adapter folder with the adapter's weights and configuration, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors", metadata=FORMAT)
    (folder / "adapter_config.json").write_text(adapter_config(model))
    tokenizer.save_pretrained(folder)


def adapter_config(model: object) -> str:
    """Return the content of PEFT's `adapter_config.json` for the model's adapter."""
    assert isinstance(model, PeftModel)
    description = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return json.dumps(description, indent=2, sort_keys=True, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
