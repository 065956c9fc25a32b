"""A policy's parameters under the names that checkpoints and engines use, optionally with the adapter merged in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.types import TensorSpec

ADAPTER = "default"
MAGNITUDES = "lora_magnitude_vector"
"""PEFT's name of the norms of DoRA."""


class WeightView:
    """A view of a model's names, parameters and tensors. The model may be sharded by ZeRO-3 and may have a LoRA
    adapter.

    Specifications are available at any time. Tensors can be read only while their parameters are gathered.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        causal = model.get_base_model() if isinstance(model, PeftModel) else model
        self._model: dict[str, nn.Parameter] = {}
        self._layers: dict[str, LoraLinear | ParamWrapper] = {}
        for name, parameter in causal.named_parameters():
            if ".lora_" not in name:
                self._model[name.replace(".base_layer", "")] = parameter
        for name, module in causal.named_modules():
            if isinstance(module, LoraLinear | ParamWrapper):
                # If several parameters of one module are adapted, as for fused experts, their wrappers are nested.
                adapted = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
                self._layers[f"{name}.{adapted}".replace(".base_layer", "")] = module
        self._adapter: dict[str, nn.Parameter] = {}
        self._initial: dict[str, tuple[nn.Module, str]] = {}
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                layer, _, part = name.partition(".lora_")
                # PEFT's files name DoRA's norms without the module that holds them.
                own = name.replace(f".{ADAPTER}.", ".").replace(MAGNITUDES + ".weight", MAGNITUDES)
                self._adapter[own] = parameter
                module, initial = model.get_submodule(layer), f"initial_{part[0]}"
                if hasattr(module, initial):
                    self._initial[own] = module, initial

    def model_specs(self) -> list[TensorSpec]:
        """Return the specifications of all tensors of the model, in the model's order."""
        return [self._spec(name, parameter) for name, parameter in self._model.items()]

    def adapter_specs(self) -> list[TensorSpec]:
        """Return the specifications of the adapter's tensors, under PEFT's names. PiSSA's have twice the rank."""
        return [
            _doubled(self._spec(name, parameter)) if name in self._initial else self._spec(name, parameter)
            for name, parameter in self._adapter.items()
        ]

    def model_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Return the parameters to gather for `model_tensors(names)`."""
        needed = [self._model[name] for name in names]
        for name in names:
            if name in self._layers:
                layer = self._layers[name]
                parts = [layer.lora_A, layer.lora_B, *([layer.lora_magnitude_vector] if _has_norms(layer) else [])]
                needed += [part[ADAPTER].get_parameter("weight") for part in parts]
        return needed

    def adapter_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Return the parameters to gather for `adapter_tensors(names)`."""
        return [self._adapter[name] for name in names]

    def model_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors, merged as W + s B A if adapted, with the scale s of the adapter. They must be
        gathered.
        """
        return {name: self._merged(name) for name in names}

    def adapter_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors of the adapter. The parameters must be gathered."""
        return {name: self._adapter_tensor(name) for name in names}

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        if is_quantized(parameter):
            return tuple(parameter.quant_state.shape)  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def tensor(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole tensor of a gathered parameter. One that is held in 4 bits is returned in the precision of
        the model.
        """
        if is_quantized(parameter):
            from roll.models.quantized import whole

            return whole(parameter)
        return parameter.detach()

    def _adapter_tensor(self, name: str) -> Tensor:
        """Return a tensor of the adapter; with PiSSA, of the plain one with the same effect on the whole model."""
        trained = self.tensor(self._adapter[name])
        if name not in self._initial:
            return trained
        module, initial = self._initial[name]
        is_down, start = ".lora_A." in name, module.get_buffer(initial)
        return torch.cat([trained, -start if is_down else start], dim=0 if is_down else 1)

    def _merged(self, name: str) -> Tensor:
        weight = self.tensor(self._model[name])
        if name not in self._layers:
            return weight
        layer = self._layers[name]
        pair = (part[ADAPTER].get_parameter("weight") for part in (layer.lora_A, layer.lora_B))
        down, up = (self.tensor(part).float() for part in pair)
        # Merge in fp32 and round once, because merging in bf16 would lose most of a small adapter. PEFT's own merge
        # also rounds the product B A.
        if weight.dim() == 3:
            assert isinstance(layer, ParamWrapper)
            change = layer.scaling[ADAPTER] * expert_changes(down, up, len(weight))
            return (weight.float() + (change if layer._did_swap_in_out_features else change.transpose(1, 2))).to(
                weight.dtype
            )
        if hasattr(layer, "initial_A"):
            starts = (layer.get_buffer(name).float() for name in ("initial_A", "initial_B"))
            down, up = torch.cat([down, -next(starts)]), torch.cat([up, next(starts)], dim=1)
        left, right = (down.t(), up.t()) if layer.fan_in_fan_out else (up, down)
        merged = torch.addmm(weight.float(), left, right, alpha=layer.scaling[ADAPTER])
        if _has_norms(layer):
            outputs = 1 if layer.fan_in_fan_out else 0
            norms = self.tensor(layer.lora_magnitude_vector[ADAPTER].get_parameter("weight")).float()
            merged *= (norms / merged.norm(dim=1 - outputs)).unsqueeze(1 - outputs)
        return merged.to(weight.dtype)

    def _spec(self, name: str, parameter: nn.Parameter) -> TensorSpec:
        shape, dtype = self.shape(parameter), parameter.dtype
        if is_quantized(parameter):
            dtype = parameter.quant_state.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return TensorSpec(name, str(dtype), shape, math.prod(shape) * dtype.itemsize)


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is held in 4 bits, with its scales beside it."""
    return getattr(parameter, "quant_state", None) is not None


def _doubled(spec: TensorSpec) -> TensorSpec:
    """Return the specification of a matrix A [r, in] or B [out, r] with twice the rank r."""
    rows, columns = spec.shape
    shape = (2 * rows, columns) if ".lora_A." in spec.name else (rows, 2 * columns)
    return replace(spec, shape=shape, nbytes=2 * spec.nbytes)


def _has_norms(layer: LoraLinear | ParamWrapper) -> bool:
    """Return whether a layer has norms of its own (DoRA)."""
    return ADAPTER in layer.lora_magnitude_vector


def expert_changes(down: Tensor, up: Tensor, experts: int) -> Tensor:
    """Return B A for each of E experts, [E, out, in], from PEFT's matrices for all experts.

    Args:
        down: [E r, in], the matrices A, ordered by expert.
        up: [out, r E], the matrices B, with the experts interleaved.
        experts: E.
    """
    a = down.view(experts, -1, down.shape[1])
    b = up.view(up.shape[0], -1, experts).permute(2, 0, 1)
    return torch.bmm(b, a)
