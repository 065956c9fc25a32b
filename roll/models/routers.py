"""Finds the routers of a mixture of experts, and adds a load-balancing loss on their outputs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms.losses import load_balancing

RECORDED = "router_logits"
"""Key under which transformers declares the router class of a model family in `_can_record_outputs`."""


def router_modules(causal: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the routers by name. Empty for dense models and families that do not declare theirs to transformers."""
    if (recorded := _recorded(causal)) is None:
        return {}
    return {name: module for name, module in causal.named_modules() if isinstance(module, recorded.target_class)}


def _recorded(causal: PreTrainedModel) -> Any:
    """Return transformers' `OutputRecorder` of router logits (router class and index), or None."""
    found = (getattr(causal.base_model, "_can_record_outputs", None) or {}).get(RECORDED)
    return found if hasattr(found, "target_class") else None


def balanced_routers(causal: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the routers to which `RouterLoss` applies, by name: those of model families for which transformers
    implements this loss.

    Excluded are DeepSeek and GLM, whose routers use sigmoids and a balancing bias, and a few families whose routers do
    not return the logits as their first output.
    """
    has_loss = hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    found = router_modules(causal) if has_loss and getattr(_recorded(causal), "index", None) == 0 else {}
    return found if all(hasattr(router, "top_k") for router in found.values()) else {}


def expert_blocks(causal: PreTrainedModel) -> set[type[nn.Module]]:
    """Return the classes of the modules that contain a router and its experts."""
    # PEFT may wrap a router. The block is the parent of the outermost wrapper.
    owners = {name.removesuffix(".base_layer").rpartition(".")[0] for name in router_modules(causal)}
    return {type(causal.get_submodule(owner)) for owner in owners}


class WithGradientOf(torch.autograd.Function):
    """Returns a tensor unchanged and adds a scalar loss to the backward pass.

    With activation checkpointing, the first forward pass of a layer runs without gradients, so a loss stored there
    could not be differentiated later. Source: `MoEAuxLossAutoScaler` of Megatron-LM.
    """

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        """Return `passed`. In the backward pass, the scalar `loss` gets a gradient of 1."""
        ctx.like = loss.detach()
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unchanged gradient for `passed`, and 1 for the loss."""
        return gradients[0], torch.ones_like(ctx.like)


class RouterLoss:
    """Adds the auxiliary loss of every router to the backward pass, and collects its metrics.

    The loss of a micro-batch is the mean of `load_balancing` over the routers. Passes without gradients are ignored.
    """

    def __init__(self, routers: Mapping[str, nn.Module]) -> None:
        """Add hooks to the routers. Each has `top_k` and returns logits [T, E], then weights of the chosen experts."""
        self._count = len(routers)
        self._weight: Tensor | None = None
        self._seen: list[tuple[Tensor, Tensor]] = []
        for router in routers.values():
            router.register_forward_hook(self._ran)

    def begin(self, weight: Tensor | None) -> None:
        """Start a micro-batch. `weight` scales its auxiliary loss. With None, the loss is measured, not added."""
        self._weight = weight
        self._seen.clear()

    def _ran(self, router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():  # a scoring pass, or one that will be recomputed
            return outputs
        logits, scores, *rest = outputs
        loss, load_max = load_balancing(logits, router.top_k)
        self._seen.append((loss.detach(), load_max))
        if self._weight is None or not scores.requires_grad:
            return outputs
        return (logits, WithGradientOf.apply(scores, loss * (self._weight / self._count)), *rest)

    def end(self) -> dict[str, Tensor]:
        """End the micro-batch after its backward pass. Return its scalar metrics, averaged over the routers."""
        losses, loads = zip(*self._seen, strict=True)
        self._seen.clear()
        return {"router/aux_loss": torch.stack(losses).mean(), "router/load_max": torch.stack(loads).mean()}
