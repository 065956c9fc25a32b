"""LoRA variants that PEFT implements, in a form in which the model under the adapter stays as it is.

PiSSA starts from the largest singular values of each matrix W, with factors B0 and A0 (https://arxiv.org/abs/2404.02948).
PEFT subtracts their product from W. Here W stays, and the adapter adds B A - B0 A0 instead, which is the same function
of A and B. So the model without its adapter is the one that training started from, in its own precision, and the
difference is a plain adapter of twice the rank, [B, B0] [A; -A0], for engines and exports.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import LoraVariant
from peft.utils.integrations import gather_params_ctx
from torch import Tensor, nn

from roll.models.weights import ADAPTER


class Pissa(LoraVariant):
    """Adds (B A - B0 A0) x to the output of a layer, where B0 and A0 are buffers of the layer."""

    @staticmethod
    def init(module: Any, adapter_name: str, **_: Any) -> None:
        """Do nothing: `start_from_singular_values` initialises all layers."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the layer's output [..., out] from its input x [..., in] and its output without an adapter."""
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        trained = up(down(module.lora_dropout[active_adapter](x)))
        # DeepSpeed casts the trained matrices; whether it casts buffers depends on the stage.
        starts = (module.initial_A.to(x.dtype), module.initial_B.to(x.dtype))
        initial = nn.functional.linear(nn.functional.linear(x, starts[0]), starts[1])
        return result + module.scaling[active_adapter] * (trained - initial)


def start_from_singular_values(model: PeftModel, kind: str, dtype: torch.dtype) -> None:
    """Initialise all adapters by PEFT's PiSSA.

    The factors are computed on the CPU with fixed random numbers, so that every rank, a resumed run and an export find
    the same ones.

    Args:
        kind: PEFT's `init_lora_weights`: `pissa`, or `pissa_niter_N` for a randomised SVD.
        dtype: precision to which the factors are rounded, in which they are held wherever they are held.
    """
    for layer in adapted_layers(model):
        base, down, up = layer.get_base_layer(), layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        with gather_params_ctx(base.weight), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            own, device, held = base.weight.data, down.weight.device, down.weight.dtype
            base.weight.data = own.cpu()
            layer.pissa_init(ADAPTER, kind)
            base.weight.data = own
        for part, name in ((down, "initial_A"), (up, "initial_B")):
            part.weight.data = part.weight.data.to(dtype).to(device, held).contiguous()
            layer.register_buffer(name, part.weight.data.clone(), persistent=False)
        layer.lora_variant[ADAPTER] = Pissa()


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers with an adapter."""
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def is_pissa(model: PeftModel) -> bool:
    """Return whether the adapters started from singular values."""
    return any(
        ADAPTER in layer.lora_variant and isinstance(layer.lora_variant[ADAPTER], Pissa)
        for layer in adapted_layers(model)
    )
