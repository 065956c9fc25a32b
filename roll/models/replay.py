"""Router replay: the routers of a mixture of experts choose the experts that the engine chose (R3; Ma et al.,
Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, 2025).

Only the choice is replayed. The weights of the chosen experts come from the router's own logits, so that the router
learns.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.config.derived.model_shape import REPLAYED
from roll.models.routers import router_modules

LAYER = re.compile(r"\.layers\.(\d+)\.")


class RouteReplay:
    """Replays given routes in all routers of a model, and the router's own choice where there are none."""

    def __init__(self, causal: PreTrainedModel) -> None:
        """Add hooks to the routers.

        Raises:
            ValueError: the model's type is not in `REPLAYED`.
        """
        if (kind := causal.config.get_text_config().model_type) not in REPLAYED:
            raise ValueError(f"the routes of models of type {kind} cannot be replayed (only {', '.join(REPLAYED)})")
        self._routers: dict[int, Any] = {}
        for name, router in router_modules(causal).items():
            found = LAYER.search(name)
            assert found, name
            self._routers[int(found[1])] = router
            router.register_forward_hook(_replayed)
        self.begin(None)

    def begin(self, routes: Tensor | None) -> None:
        """Start a micro-batch with routes [T, layers, k], -1 where unknown, or without any.

        They are kept until the next one starts, because the backward pass may call the routers again. Layers without
        experts have routes too, which are ignored.
        """
        # Each router has its own, so that compiled layers, which share their code, need no number of the layer.
        for layer, router in self._routers.items():
            router.replayed_routes = None if routes is None else routes[:, layer]


def _replayed(router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if (routes := router.replayed_routes) is None:
        return outputs
    logits, scores, own = outputs
    given = routes.to(own.dtype)
    chosen = torch.where((given >= 0).all(-1, keepdim=True), given, own)
    return logits, expert_weights(logits, chosen, getattr(router, "norm_topk_prob", True)).to(scores.dtype), chosen


def expert_weights(logits: Tensor, chosen: Tensor, normalised: bool) -> Tensor:
    """Return the weights fp32 [T, k] of the chosen experts [T, k], for logits [T, experts].

    They are the probabilities of a softmax over all experts, or with `normalised` over the chosen ones.
    """
    if normalised:
        return logits.float().gather(1, chosen).softmax(-1)
    return logits.float().softmax(-1).gather(1, chosen)
