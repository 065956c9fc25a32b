"""Converts a checkpoint to a folder for transformers, PEFT and vLLM, or to a checkpoint for any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from roll.config.derived.model_shape import sees_pictures
from roll.data.chat import ends_of
from roll.errors import CheckpointError, DataError
from roll.export.source import CheckpointSource
from roll.models.export import copy_processor, write_adapter_folder, write_model
from roll.models.load import DTYPES, add_lora, load_causal_model, load_seeing_model, load_tokenizer
from roll.models.pictures import sees
from roll.models.weight_files import unreadable
from roll.models.weights import WeightView
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState, seal
from roll.tracking.card import CARD, model_card
from roll.training.deepspeed import files as deepspeed_files
from roll.weight_sync.bucket import plan_buckets

FILE_BYTES = 4 << 30
LOG = logging.getLogger(__name__)


def write_hf(source: CheckpointSource, out: Path, exact: bool) -> None:
    """Write a fully trained policy as a Hugging Face folder. With `exact`, the fp32 weights of the optimizer."""
    found = deepspeed_files.trained_weights(source.checkpoint, as_held=not exact, with_frozen=True)
    model = _empty_model(source)
    view = WeightView(model)
    buckets = (
        {name: _weight(found, name, source) for name in names} for names in plan_buckets(view.model_specs(), FILE_BYTES)
    )
    if exact:
        model.config.dtype = torch.float32
    _write(source, out, buckets, model)


def write_merged(source: CheckpointSource, out: Path, exact: bool) -> None:
    """Write the base model with the adapter merged in, as a Hugging Face folder. With `exact`, merge in fp32."""
    base: Any = _base_model(source)
    if kind := source.model_args.quantized_base:
        from roll.models.quantized import round_layers

        round_layers(base, kind)
    if exact:
        base.float()
        base.config.dtype = torch.float32
    view = WeightView(_trained(base, source, as_held=not exact))
    buckets: Iterator[Mapping[str, Tensor]] = (
        view.model_tensors(names) for names in plan_buckets(view.model_specs(), FILE_BYTES)
    )
    _write(source, out, buckets, base)


def write_peft(source: CheckpointSource, out: Path) -> None:
    """Write the trained adapter as a PEFT folder."""
    starts_anew = source.model_args.init_lora_weights is not True  # from the weights, which must be read for that
    base = _base_model(source) if starts_anew else _empty_model(source)
    model = _trained(base, source, as_held=True)
    view = WeightView(model)
    tensors = view.adapter_tensors([spec.name for spec in view.adapter_specs()])
    tokenizer = _tokenizer(source)
    write_adapter_folder(out, tensors, model, tokenizer, response_ends(source, tokenizer))
    if sees(base):
        copy_processor(source.model, out)


def write_card(source: CheckpointSource, out: Path) -> None:
    """Write the model card of an exported policy, with the scores that the run had at its checkpoint."""
    if source.config and source.run:
        step = LoopState.read(source.checkpoint).step
        (out / CARD).write_text(model_card(source.config, source.run, out, step), encoding="utf-8")


def write_universal(source: CheckpointSource, out: Path) -> None:
    """Write a checkpoint that any number of ranks can resume from. Its manifest is written last."""
    state = LoopState.read(source.checkpoint)
    for states in source.checkpoint.rglob(deepspeed_files.TAG):  # of the policy, and of a critic in its own folder
        deepspeed_files.to_universal(states.parent, out / states.parent.relative_to(source.checkpoint))
    state.write(out)
    seal(out, state.step, sequence=1, required=[LOOP_FILE])


def _trained(base: PreTrainedModel, source: CheckpointSource, as_held: bool) -> PeftModel:
    """Add the checkpoint's adapter to its base model. `as_held`: see `deepspeed_files.trained_weights`."""
    # A base that was rounded to 4 bits is not held in them.
    model = add_lora(base, source.model_args.model_copy(update={"quantized_base": None}), source.seed)
    found = deepspeed_files.trained_weights(source.checkpoint, as_held=as_held)
    for name in [name for name, _ in model.named_parameters()]:
        if ".lora_" in name:
            layer, _, own = name.rpartition(".")
            # A new parameter: on the meta device, `data` cannot be set.
            setattr(model.get_submodule(layer), own, nn.Parameter(_weight(found, name, source), requires_grad=False))
    return model


def _config(source: CheckpointSource) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source.model, trust_remote_code=source.model_args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(unreadable(source.model, "model", error)) from error


def _is_seeing(config: PreTrainedConfig, source: CheckpointSource) -> bool:
    """Return whether the model of this configuration was trained with its tower."""
    return sees_pictures(config.model_type, source.model_args.sees_pictures)


def _base_model(source: CheckpointSource) -> PreTrainedModel:
    """Load the model from which the training started. Errors: `load_causal_model`."""
    load = load_seeing_model if _is_seeing(_config(source), source) else load_causal_model
    return load(source.model, source.model_args, packed=False)


def _empty_model(source: CheckpointSource) -> PreTrainedModel:
    """Build the model's modules on the meta device. Raises DataError if its configuration cannot be read."""
    config = _config(source)
    kind = AutoModelForImageTextToText if _is_seeing(config, source) else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(
            config, dtype=DTYPES[source.model_args.dtype], trust_remote_code=source.model_args.trust_remote_code
        )
    model.tie_weights()
    try:
        model.generation_config = GenerationConfig.from_pretrained(source.model)
    except OSError:  # not every model has one
        model.generation_config = None
    return model


def _write(
    source: CheckpointSource, out: Path, buckets: Iterator[Mapping[str, Tensor]], model: PreTrainedModel
) -> None:
    tokenizer = _tokenizer(source)
    write_model(out, buckets, model, tokenizer, response_ends(source, tokenizer))
    if sees(model):
        copy_processor(source.model, out)


def response_ends(source: CheckpointSource, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response in the run's template; none, logged, if it does not fit the tokenizer."""
    try:
        return ends_of(source.data_args, tokenizer).token_ids
    except ValueError as error:
        LOG.warning("generation_config.json names only the model's own end of sequence: %s", error)
        return ()


def _tokenizer(source: CheckpointSource) -> PreTrainedTokenizerBase:
    return load_tokenizer(source.model, source.model_args.trust_remote_code)


def _weight(found: Mapping[str, Tensor], name: str, source: CheckpointSource) -> Tensor:
    if name not in found:
        raise CheckpointError(
            f"{source.checkpoint} has no weights for {name}: it does not belong to the model '{source.model}'"
        )
    return found[name]
