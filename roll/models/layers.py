"""Decoder layers: recomputes some in the backward pass, and compiles them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the model's layers, first to last."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def prepare_checkpointing(causal: PreTrainedModel, is_lora: bool) -> None:
    """Prepare the model for recomputing layers. `checkpoint_first` sets how many.

    ZeRO-3 leaves empty parameters behind after a forward pass, and torch's check that the recomputation saved the
    same shapes takes that for a fault (the error that LoRA with ZeRO-3 is known for). The re-entrant form makes no
    such check; it needs an input with a gradient, which a frozen embedding does not give of itself.
    """
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if is_lora:
        causal.enable_input_require_grads()


def on_host() -> torch.autograd.graph.save_on_cpu:
    """Keeps tensors that are saved for the backward pass in host memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def keep_inputs(causal: PreTrainedModel, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let hooks for saved tensors keep the inputs of recomputed layers until the backward pass. Call `prepare_checkpointing` first."""

    def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **keywords: Any) -> Any:
            # A re-entrant checkpoint saves its inputs and nothing else.
            with hooks():
                return function(*inputs, **keywords)

        return call

    for layer in decoder_layers(causal):
        vars(layer)["_gradient_checkpointing_func"] = recomputed(vars(layer)["_gradient_checkpointing_func"])


def checkpoint_first(causal: PreTrainedModel, count: int) -> None:
    """Recompute the first `count` layers only: the last layers' activations are used and freed first."""
    for number, layer in enumerate(decoder_layers(causal)):
        layer.gradient_checkpointing = number < count


def compile_layers(causal: PreTrainedModel) -> None:
    """Replace the layers' forward methods by compiled ones. All layers of a class share the code, for any number of tokens.

    The forward alone is compiled. What is hooked to a layer's call, checkpointing and ZeRO-3's gathering of
    parameters, stays outside.
    """
    layers = decoder_layers(causal)
    for block in (block for layer in layers for block in layer.children()):
        # PEFT's adapters of fused experts change their module's class in each call, so dynamo would compile it anew each time.
        if any(isinstance(module, ParamWrapper) for module in block.modules()):
            block.forward = torch.compiler.disable(block.forward)
    compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = MethodType(compiled[type(layer)], layer)
