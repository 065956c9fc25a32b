"""Writes a policy as a folder that transformers, PEFT and vLLM can load."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from itertools import chain
from pathlib import Path

from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from roll.models.lora_variants import is_pissa
from roll.models.seeing_classifiers import CLASSIFIERS

FORMAT = {"format": "pt"}


def write_model(
    folder: Path,
    buckets: Iterator[Mapping[str, Tensor]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int] = (),
) -> None:
    """Write a Hugging Face model folder with one safetensors file per bucket and one with the stored buffers of `model`
    (of DeepSeek-V3's routers, for example), an index, the configuration and the tokenizer.

    Args:
        ends: tokens that end a response, in addition to the model's own end of sequence. The folder's generation_config
            names them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(chain(buckets, filter(None, [stored_buffers(model)])), 1):
        file = f"model-{number:05d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / file, metadata=FORMAT)
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # The text model of a multimodal model has no `architectures`, which engines need to find the model class. A reward
    # model that started from a language model has those of the language model.
    if not model.config.architectures or not model.can_generate():
        model.config.architectures = [type(model).__name__]
    if type(model) in CLASSIFIERS.values():
        custom_object_save(model, folder, config=model.config)  # pyright: ignore[reportArgumentType]
    model.config.save_pretrained(folder)
    if model.can_generate():
        write_generation_config(folder, model.generation_config, tokenizer, ends)
    tokenizer.save_pretrained(folder)


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that are part of the model's files, by name."""
    names = {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def write_generation_config(
    folder: Path, config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> None:
    """Write the model's generation_config with further ends of sequence. Write nothing without both."""
    if config is None and not ends:
        return
    config = deepcopy(config) if config else GenerationConfig()
    own = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    known = [number for number in (own if isinstance(own, list) else [own]) if number is not None]
    if added := [number for number in ends if number not in known]:
        config.eos_token_id = [*known, *added]
    # save_pretrained refuses a temperature without do_sample, which some published models have.
    config.to_json_file(folder / GENERATION_CONFIG_NAME)


def write_adapter_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: object,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int] = (),
) -> None:
    """Write a PEFT adapter folder with the adapter's weights and configuration, the tokenizer, and the base model's
    generation_config.

    Args:
        ends: see `write_model`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata=FORMAT,
    )
    (folder / "adapter_config.json").write_text(adapter_config(model))
    assert isinstance(model, PeftModel)
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    write_generation_config(folder, base.generation_config, tokenizer, ends)
    tokenizer.save_pretrained(folder)


PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a model's processor, as far as a model has them."""


def copy_processor(source: str, folder: Path) -> None:
    """Copy the files by which transformers and vLLM process the pictures of a model.

    Args:
        source: folder or Hub name of the model from which the training started.
    """
    for name in PROCESSOR:
        if found := cached_file(source, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(found, folder / name)


def adapter_config(model: object) -> str:
    """Return the content of PEFT's `adapter_config.json` for the model's adapter, as `WeightView` gives it.

    With PiSSA, the adapter has twice the rank that is trained, and the same scale.
    """
    assert isinstance(model, PeftModel)
    description = model.peft_config["default"].to_dict() | {"inference_mode": True}
    if is_pissa(model):
        description["r"] *= 2
        description["lora_alpha"] *= math.sqrt(2) if description["use_rslora"] else 2
    return json.dumps(description, indent=2, sort_keys=True, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
