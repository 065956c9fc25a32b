"""Loads causal language models for packed sequences, with or without a LoRA adapter.

Kernels of optional packages: flash-attn's packed attention and Liger's fused layers.

Checks whether a `PackedModel` returns the same outputs for packed sequences as for each sequence alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.pytorch_utils import Conv1D

from roll.config.derived.model_shape import LINEAR, has_known_tower, sees_pictures
from roll.config.schema.model import ModelConfig
from roll.errors import ConfigError, DataError, Fault, FaultCode
from roll.models import attention
from roll.models.attention import delta_layers, has_delta_layers, pack_delta_layers
from roll.models.engine_kernels import EngineHead, use_engine_kernels
from roll.models.layers import decoder_layers
from roll.models.logits import final_logits, unknown_key
from roll.models.lora_variants import start_from_singular_values
from roll.models.packed import LogProbHead, PackedPolicy
from roll.models.picture_spans import PictureSpans, with_pictures
from roll.models.pictures import blind, freeze_vision, text_targets
from roll.models.sequence_parallel import ATTENTION, Attention, over_ranks
from roll.models.tower_attention import use_tower_attention
from roll.models.weight_files import ALL_LINEAR, check_targets, unreadable

OWN_ATTENTION = "it has its own attention code, which does not support packed sequences"


def not_packable(model: PreTrainedModel) -> str | None:
    """Return why the model's log-probs would be wrong for packed sequences, or None if they are right."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    is_hybrid = has_delta_layers(config)  # supports the packed kernel, but does not declare it
    if not model._supports_attention_backend and not is_hybrid:
        return OWN_ATTENTION
    if getattr(head, "bias", None) is not None:
        return "its output matrix has a bias, which roll does not apply"
    if key := unknown_key(config):
        return f"its {key} of {getattr(config, key):g} changes logits, which roll does not support"
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION - ({LINEAR} if is_hybrid else set())
    known = {id(module) for layer in delta_layers(model) for module in layer.modules()} if is_hybrid else set()
    if getattr(config, "use_bidirectional_attention", None):
        return "its tokens see those after them, and packed attention is causal"
    if others or any(isinstance(module, nn.Conv1d) and id(module) not in known for module in model.modules()):
        kinds = f" ({', '.join(sorted(others))})" if others else ""
        return f"it has layers{kinds} that treat packed sequences as a single sequence"
    return None


FLASH = "roll_flash"
FUSED = {"rope": True, "rms_norm": True, "swiglu": True}
PLAIN = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger options that stay off, because Liger's losses would replace the head of `models.packed`."""


def register_flash() -> str:
    """Register flash-attn's kernel in transformers, and return its name for `attn_implementation`.

    Raises:
        ConfigError: the package was built for another version of torch.
    """
    try:
        kernel = import_module("flash_attn").flash_attn_varlen_func
    except ImportError as error:
        problem = f"fa2, but the package flash-attn cannot be imported: {error}"
        remedy = "install a build of flash-attn for this version of torch, or use auto, torch's own packed kernel"
        raise ConfigError(Fault("model_args.attn_implementation", problem, remedy, "not_installed")) from error
    AttentionInterface.register(FLASH, over_ranks(flash_attention(kernel)))
    return FLASH


def flash_attention(kernel: Callable[..., Tensor]) -> Attention:
    """Return a function like `models.attention.packed_attention` that calls `kernel`, except for sinks, which it lacks.

    `kernel` is flash-attn's `flash_attn_varlen_func`. It is an argument, because compiled layers cannot import it.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        dropout: float = 0.0,
        spans: PictureSpans | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if s_aux is not None:
            given = {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q, "scaling": scaling}
            more = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}
            more["spans"] = spans
            return attention.packed_attention(module, query, key, value, attention_mask, **given, **more)
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        offsets, longest = cu_seq_lens_q, max_length_q
        more = {"dropout_p": dropout, "softmax_scale": scaling} | ({} if softcap is None else {"softcap": softcap})
        out = kernel(q, k, v, offsets, offsets, longest, longest, causal=True, window_size=window, **more)
        if spans is not None:

            def in_pictures(*parts: Any) -> Tensor:
                return kernel(*parts[:-1], causal=False, window_size=parts[-1], **more)

            out = with_pictures(out, q, k, v, spans, sliding_window, in_pictures)
        return out[None], None

    return attend


def apply_liger(model: PreTrainedModel) -> None:
    """Replace norms, MLPs and the rotary embedding of a loaded model with Liger's.

    Raises:
        ConfigError: there is no GPU, the package is not installed, or it does not support the model's type.
    """
    kind = model.config.model_type
    if not torch.cuda.is_available():
        raise _no_liger("there is no GPU, which its kernels need", "remove the key, or run on a GPU", "not_supported")
    if find_spec("liger_kernel") is None:
        raise _no_liger("the package liger-kernel is not installed", "install it, or remove the key", "not_installed")
    apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise _no_liger(f"liger-kernel does not support models of type {kind}", "remove the key", "not_supported")
    known = inspect.signature(apply).parameters
    apply(model=model, **{name: wish for name, wish in (FUSED | PLAIN).items() if name in known})


def _no_liger(why: str, remedy: str, code: FaultCode) -> ConfigError:
    return ConfigError(Fault("model_args.liger", f"true, but {why}", remedy, code))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a model folder or Hub name. Raises DataError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library tokenizers raises nothing more precise, and a file in Python anything
        raise DataError(unreadable(path, "tokenizer", error)) from error


def load_causal_model(path: str, model_args: ModelConfig, packed: bool = True) -> PreTrainedModel:
    """Load the model in the precision of `model_args`. With `packed`, prepare it for `PackedPolicy`.

    Raises:
        DataError: the weights or the configuration cannot be read, or the model does not support packed sequences.
        ConfigError: a requested kernel is not available on this machine.
    """
    model = pretrained(AutoModelForCausalLM, path, model_args, packed)
    return with_head(model, EngineHead if model_args.engine_kernels else LogProbHead) if packed else model


def with_head(model: PreTrainedModel, kind: type[LogProbHead]) -> PreTrainedModel:
    """Return the model with a head for log-probs in place of its own."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    model.set_output_embeddings(kind(head, final_logits(model.config)))
    return model


def load_seeing_model(path: str, model_args: ModelConfig, packed: bool = True) -> PreTrainedModel:
    """Load a model that sees pictures, as `load_causal_model` loads others. Its tower has torch's own attention.

    Raises the same errors as `load_causal_model`.
    """
    model = pretrained(AutoModelForImageTextToText, path, model_args, packed)
    if packed:
        model = with_head(model, LogProbHead)
    freeze_vision(model, model_args.freeze_vision)
    return model


def load_fixed_model(path: str, model_args: ModelConfig, packed: bool = True) -> PreTrainedModel:
    """Load a model that scores or generates, whether or not it sees pictures.

    Raises the same errors as `load_causal_model`.
    """
    return (load_seeing_model if sees_readably(path, model_args) else load_causal_model)(path, model_args, packed)


def load_seeing_policy(path: str, model_args: ModelConfig, seed: int) -> PackedPolicy:
    """Load a policy that sees pictures, as `load_policy` loads others. An adapter is on its text model alone."""
    model = load_seeing_model(path, model_args)
    return PackedPolicy(add_lora(model, model_args, seed) if model_args.lora_target else model)


def pretrained(kind: Any, path: str, model_args: ModelConfig, packed: bool, **more: Any) -> Any:
    """Load a folder or Hub name with `kind.from_pretrained`, where `kind` is an Auto class. `more` are further
    arguments.

    Raises the same errors as `load_causal_model`.
    """
    implementation = "sdpa"
    if packed:
        flash = model_args.attn_implementation == "fa2" and torch.cuda.is_available() and find_spec("flash_attn")
        implementation = register_flash() if flash else attention.register_packed_kernel()
    is_asked = kind is not AutoModelForCausalLM and sees_readably(path, model_args)
    is_seeing = kind is AutoModelForImageTextToText or is_asked
    if is_seeing:
        implementation = {"": implementation, "text_config": implementation, "vision_config": "sdpa"}
    try:
        loaded = kind.from_pretrained(
            path,
            dtype=DTYPES[model_args.dtype],
            attn_implementation=implementation,
            trust_remote_code=model_args.trust_remote_code,
            **more,
        )
    except KeyError as error:
        if error.args != (implementation,):
            raise
        raise DataError(
            unfit(path, OWN_ATTENTION)
        ) from error  # the model looks up attention implementations in its own table
    except (OSError, ValueError, SafetensorError) as error:
        if "Unrecognized configuration class" in str(error) and sees_readably(path, model_args):
            raise DataError(_seeing(path)) from error
        raise DataError(unreadable(path, "model", error)) from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if is_seeing:
        use_tower_attention(model)
    else:
        blind(model)
    if packed:
        if why := not_packable(model):
            raise DataError(unfit(path, why))
        pack_delta_layers(model)
    restore_frequencies(model)
    if not model_args.dropout:
        disable_dropout(model)
    if model_args.liger:
        apply_liger(model)
    if model_args.engine_kernels:
        use_engine_kernels(model)
    return loaded


def disable_dropout(model: nn.Module) -> None:
    """Switch off `nn.Dropout` modules, and the dropout that decoder layers compute themselves.

    An adapter that is added later has its own dropout.

    Ratios compare log-probs of several passes, and dropout would make these passes differ. `disable_noise` leaves
    decoder layers in training mode, where some models (OPT) drop values without an `nn.Dropout`.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for layer in decoder_layers(model):
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def restore_frequencies(model: PreTrainedModel) -> None:
    """Restore the fp32 frequencies of rotary embeddings.

    While ZeRO-3 shards a model during loading, DeepSpeed casts every tensor that the model creates to the model's
    precision. In bf16 a frequency is off by up to 0.2%, and the angle of a token at position 600 by up to a radian.
    """
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        frequencies = next((tensor for name, tensor in own.items() if name.endswith("inv_freq")), None)
        if frequencies is not None and frequencies.dtype != torch.float32:
            for name, values in type(module)(module.config).named_buffers(recurse=False):
                setattr(module, name, nn.Buffer(values.to(frequencies.device), persistent=False))


def load_policy(path: str, model_args: ModelConfig, seed: int) -> PackedPolicy:
    """Load the policy, with a new LoRA adapter if `lora_target` is set. Errors: `load_causal_model`, `add_lora`."""
    model = load_causal_model(path, model_args)
    return PackedPolicy(add_lora(model, model_args, seed) if model_args.lora_target else model)


def add_lora(model: PreTrainedModel, model_args: ModelConfig, seed: int) -> PeftModel:
    """Wrap the model in a PEFT LoRA adapter with the same initial values on every rank. With `quantized_base`, hold the
    linear layers under it in 4 bits.

    Raises:
        ConfigError: a name in `lora_target` matches no linear layer. PEFT alone would ignore it if another name
            matches. Or a variant is to adapt fused experts, for which PEFT has none. Or the layers cannot be held in
            4 bits.
    """
    assert model_args.lora_target is not None
    targets = [name.strip() for name in model_args.lora_target.split(",")]
    chosen: str | list[str] = "all-linear" if targets == ALL_LINEAR else targets
    if has_known_tower(model.config.model_type):
        chosen = text_targets(model, None if targets == ALL_LINEAR else targets)
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    check_targets(model_args.lora_target, linear)
    if model_args.quantized_base:
        from roll.models.quantized import quantize_layers

        quantize_layers(model, model_args.quantized_base)
    set_seed(seed)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=model_args.lora_rank,
            lora_alpha=model_args.lora_alpha or 2 * model_args.lora_rank,  # pyright: ignore[reportArgumentType]
            lora_dropout=model_args.lora_dropout,
            use_rslora=model_args.use_rslora,
            use_dora=model_args.use_dora,
            target_modules=chosen,
            task_type="CAUSAL_LM" if model.can_generate() else None,
        ),
    )
    assert isinstance(adapted, PeftModel)
    if isinstance(kind := model_args.init_lora_weights, str):
        start_from_singular_values(adapted, kind, DTYPES[model_args.dtype])
    return adapted


def unfit(path: str, why: str) -> Fault:
    """Return the fault of a model that does not support packed sequences."""
    remedy = (
        "use a model with standard attention layers and without changes to its logits, such as Qwen, Llama or Mistral"
    )
    return Fault("pretrain", f"the model '{path}' cannot be used: {why}", remedy, "unfit")


def sees_readably(path: str, model_args: ModelConfig) -> bool:
    """Return whether a model is asked to see pictures; false if its configuration cannot be read, which is reported
    later.
    """
    try:
        return _sees(path, model_args)
    except (OSError, ValueError):
        return False


def _sees(path: str, model_args: ModelConfig) -> bool:
    config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
    return sees_pictures(config.model_type, model_args.sees_pictures)


def _seeing(path: str) -> Fault:
    problem = f"the model '{path}' sees pictures, and teachers and students are models of text alone"
    return Fault("pretrain", problem, "use a model of text alone", "unfit")
