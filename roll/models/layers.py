"""Prepares decoder layers for activation checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from roll.errors import ConfigError, Fault
from roll.models.vision_names import is_of_vision


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the model's decoder layers, first to last, without those of a vision tower."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and not is_of_vision(name)
    ]


def prepare_checkpointing(causal: PreTrainedModel, is_lora: bool) -> None:
    """Enable activation checkpointing. `checkpoint_first` then sets the number of recomputed layers.

    Uses the re-entrant form, because the other form checks that recomputed tensors have the same shapes as the saved
    ones. ZeRO-3 empties parameters after a forward pass, so the check fails (a known error of LoRA with ZeRO-3). The
    re-entrant form needs an input with a gradient, so with LoRA, whose embedding is frozen, the inputs are made to
    require one.
    """
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if is_lora:
        causal.enable_input_require_grads()


def on_host() -> torch.autograd.graph.save_on_cpu:
    """Return a context manager that keeps the tensors saved for the backward pass in host memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def keep_inputs(causal: PreTrainedModel, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
    """Apply hooks for saved tensors to the inputs of recomputed layers. Call `prepare_checkpointing` first."""

    def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **keywords: Any) -> Any:
            # A re-entrant checkpoint saves only its inputs.
            with hooks():
                return function(*inputs, **keywords)

        return call

    for layer in decoder_layers(causal):
        vars(layer)["_gradient_checkpointing_func"] = recomputed(vars(layer)["_gradient_checkpointing_func"])


def checkpoint_first(causal: PreTrainedModel, count: int) -> None:
    """Recompute only the first `count` layers: the backward pass frees the last layers' activations first."""
    for number, layer in enumerate(decoder_layers(causal)):
        layer.gradient_checkpointing = number < count


def disable_noise(causal: PreTrainedModel) -> None:
    """Put a model in training mode back into evaluation mode, so that it adds no noise: dropped values and layers, and
    routers that sample experts or change their input.

    Decoder layers, which recompute their activations only in training mode, and modules for dropout keep their mode, as
    do adapted layers: with DoRA they drop nothing in evaluation mode.
    """
    for module in causal.modules():
        if not isinstance(module, GradientCheckpointingLayer | nn.Dropout | LoraLinear):
            module.training = False


MIXERS = ("self_attn", "attn", "linear_attn")
"""Names of the module of a decoder layer in which tokens interact, in the models of transformers."""


def recompute_attention(causal: PreTrainedModel, is_lora: bool, compiled: bool) -> None:
    """Recompute only the attention of each layer in the backward pass, projections included (Korthikanti et al.,
    Reducing Activation Recomputation in Large Transformer Models, 2022).

    It is recomputed in the re-entrant form, for the reason given at `prepare_checkpointing`. If layers are `compiled`,
    call this first: attention is then compiled by itself, because compiled code cannot contain the re-entrant form.

    Raises:
        ConfigError: the layers have no module of such a name.
    """
    layers = decoder_layers(causal)
    mixers = [mixer for layer in layers for name in MIXERS if (mixer := getattr(layer, name, None)) is not None]
    if len(mixers) < len(layers):
        problem = f"attention, but layers of {causal.config.model_type} have no module {' or '.join(MIXERS)}"
        remedy = "use a number of layers, all or auto"
        raise ConfigError(Fault("model_args.gradient_checkpointing", problem, remedy, "not_supported"))
    if is_lora:
        causal.enable_input_require_grads()
    for mixer in mixers:
        forward = torch.compile(mixer.forward, dynamic=True) if compiled else mixer.forward
        mixer.forward = torch.compiler.disable(partial(_recomputed, forward))


def _recomputed(forward: Callable[..., Any], hidden_states: Tensor, *others: Any, **keywords: Any) -> Any:
    """Call `forward`, and call it again in the backward pass if there will be one."""
    if not torch.is_grad_enabled():
        return forward(hidden_states, *others, **keywords)
    return checkpoint(partial(forward, **keywords), hidden_states, *others, use_reentrant=True)


def compile_layers(causal: PreTrainedModel) -> None:
    """Replace the layers' forward methods with compiled ones. All layers of a class share compiled code for any number
    of tokens.

    Only the forward method is compiled. Hooks on the layer's call, such as checkpointing and ZeRO-3's parameter
    gathering, are not.
    """
    layers = decoder_layers(causal)
    for block in (block for layer in layers for block in layer.children()):
        # PEFT's adapters of fused experts change the class of their module in each call, so dynamo would recompile it
        # each time.
        if any(isinstance(module, ParamWrapper) for module in block.modules()):
            block.forward = torch.compiler.disable(block.forward)
    compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = MethodType(compiled[type(layer)], layer)
