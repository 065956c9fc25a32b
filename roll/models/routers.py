"""The routers of a mixture of experts: where they are, and a loss on what they choose."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms.load_balancing import load_balancing

RECORDED = "router_logits"
"""The name under which transformers declares a family's router class."""


def router_modules(causal: PreTrainedModel) -> dict[str, nn.Module]:
    """The routers by name; none of a dense model, or of one whose family declares none to transformers."""
    if (recorded := _recorded(causal)) is None:
        return {}
    return {name: module for name, module in causal.named_modules() if isinstance(module, recorded.target_class)}


def _recorded(causal: PreTrainedModel) -> Any:
    """transformers' `OutputRecorder` of the routers' logits: their class, and which of its outputs they are. None if there is none."""
    found = (getattr(causal.base_model, "_can_record_outputs", None) or {}).get(RECORDED)
    return found if hasattr(found, "target_class") else None


def balanced_routers(causal: PreTrainedModel) -> dict[str, nn.Module]:
    """Those of `router_modules` that `RouterLoss` holds for, where transformers has this loss for the family, too; or else none.

    DeepSeek's and GLM's routers choose by sigmoids and a bias that balances; of a few families the logits are not what comes out first.
    """
    has_loss = hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    found = router_modules(causal) if has_loss and getattr(_recorded(causal), "index", None) == 0 else {}
    return found if all(hasattr(router, "top_k") for router in found.values()) else {}


def expert_blocks(causal: PreTrainedModel) -> set[type[nn.Module]]:
    """Classes of the modules that hold a router and its experts."""
    # PEFT's wrapper of a router is not the block: that is the first module above which is no wrapper's inside.
    owners = {name.removesuffix(".base_layer").rpartition(".")[0] for name in router_modules(causal)}
    return {type(causal.get_submodule(owner)) for owner in owners}


class WithGradientOf(torch.autograd.Function):
    """Passes a tensor on, and has a loss be a part of what is differentiated.

    Layers whose activations are recomputed run without a gradient at first, so that nothing kept from there has one. Source:
    `MoEAuxLossAutoScaler` of Megatron-LM.
    """

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        """`passed`; the scalar `loss` gets the gradient 1."""
        ctx.like = loss.detach()
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of `passed` as it is, and 1."""
        return gradients[0], torch.ones_like(ctx.like)


class RouterLoss:
    """Adds the auxiliary loss of every router to what a backward pass differentiates, and keeps what it measures.

    The loss of a micro-batch is the mean of `load_balancing` over the routers. Where no gradient is asked for, nothing happens.
    """

    def __init__(self, routers: Mapping[str, nn.Module]) -> None:
        """Hooks the routers, each of which has `top_k` and puts out logits [T, E], then the weights of the chosen experts."""
        self._count = len(routers)
        self._weight: Tensor | None = None
        self._seen: list[tuple[Tensor, Tensor]] = []
        for router in routers.values():
            router.register_forward_hook(self._ran)

    def begin(self, weight: Tensor | None) -> None:
        """A micro-batch's forward pass comes, whose loss counts by this scalar; None measures it alone."""
        self._weight = weight
        self._seen.clear()

    def _ran(self, router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():  # it only scores, or will be recomputed
            return outputs
        logits, scores, *rest = outputs
        loss, load_max = load_balancing(logits, router.top_k)
        self._seen.append((loss.detach(), load_max))
        if self._weight is None or not scores.requires_grad:
            return outputs
        return (logits, WithGradientOf.apply(scores, loss * (self._weight / self._count)), *rest)

    def end(self) -> dict[str, Tensor]:
        """Metrics of the micro-batch whose backward pass is over: means over the routers, scalars."""
        losses, loads = zip(*self._seen, strict=True)
        self._seen.clear()
        return {"router/aux_loss": torch.stack(losses).mean(), "router/load_max": torch.stack(loads).mean()}
