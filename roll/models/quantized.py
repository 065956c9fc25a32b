"""Linear layers whose frozen weights are held in 4 bits under an adapter, by bitsandbytes (QLoRA,
https://arxiv.org/abs/2305.14314).

A weight is rounded to one of the 16 values of NF4, in units of the largest of its block of 64. The model that is
trained is the adapter on the rounded weights, so engines and exports get the rounded weights, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.config.schema.model import QuantizedBase
from roll.errors import ConfigError, Fault
from roll.models.layers import decoder_layers

try:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import Linear4bit, Params4bit
except ImportError as error:
    problem = f"set, but the package bitsandbytes cannot be imported: {error}"
    raise ConfigError(
        Fault("model_args.quantized_base", problem, "pip install 'roll[bitsandbytes]'", "not_installed")
    ) from error


class FrozenLinear(Linear4bit):
    """A linear layer with the weights of another one, rounded to 4 bits. It computes in the precision of the other."""

    def __init__(self, layer: nn.Linear, kind: QuantizedBase) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, device="meta"
        )
        self.weight = rounded(layer.weight, kind)
        self.quant_state = self.weight.quant_state
        self.bias = layer.bias
        # On CPUs with AVX512 bitsandbytes would reorder the weights in place for inference, and compute in bf16.
        self.support_avx512bf16_for_cpu = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write no scales into checkpoints, which lack all frozen weights."""
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


def rounded(weight: Tensor, kind: QuantizedBase) -> Params4bit:
    """Return a matrix in 4 bits, in host memory. It is rounded on the GPU if there is one, which is much faster."""
    parameter: Any = Params4bit  # pyright takes the arguments of torch's Parameter
    held = parameter(weight.detach(), compress_statistics=kind == "nf4_double", quant_type="nf4")
    return held.to("cuda" if torch.cuda.is_available() else "cpu").to("cpu")


def whole(weight: Tensor) -> Tensor:
    """Return a matrix that is held in 4 bits in the precision from which it was rounded."""
    return dequantize_4bit(weight.detach(), weight.quant_state)  # pyright: ignore[reportAttributeAccessIssue]


def quantize_layers(model: PreTrainedModel, kind: QuantizedBase) -> None:
    """Replace the linear layers of the decoder layers, one after another. Others stay, such as embeddings and the head.

    Raises:
        ConfigError: a decoder layer has matrices outside of linear layers, such as fused experts.
    """
    for parent, name, layer in list(_linear_layers(model)):
        setattr(parent, name, FrozenLinear(layer, kind))


@torch.no_grad()
def round_layers(model: PreTrainedModel, kind: QuantizedBase) -> None:
    """Give the same layers the same rounded weights, in their own precision. Raises the same error."""
    for _, _, layer in _linear_layers(model):
        layer.weight.data = whole(rounded(layer.weight, kind)).to(layer.weight.device)


def scales(model: nn.Module) -> list[Tensor]:
    """Return what the quantised layers hold beside their parameters."""
    found = []
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            state: Any = module.quant_state
            for part in (state, state.state2) if state.nested else (state,):
                found += [part.absmax, part.code]
            found += [state.offset] if state.nested else []
    return found


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of the decoder layers, each with the module that has it and its name there."""
    for number, decoder in enumerate(decoder_layers(model)):
        for path, module in decoder.named_modules():
            if type(module) is nn.Linear:
                parent, _, name = path.rpartition(".")
                yield decoder.get_submodule(parent), name, module
                continue
            if matrices := [name for name, one in module.named_parameters(recurse=False) if one.ndim > 1]:
                place = ".".join(filter(None, (str(number), path, matrices[0])))
                problem = f"set, but matrix {place} of the decoder layers is in no linear layer, as with experts"
                remedy = "remove it, or use a model whose decoder layers have linear layers and norms alone"
                raise ConfigError(Fault("model_args.quantized_base", problem, remedy, "not_supported"))
