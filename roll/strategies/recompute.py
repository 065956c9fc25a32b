"""Implements `gradient_checkpointing: auto`: measures in the first updates how many decoder layers to recompute."""

from __future__ import annotations

import logging
from collections.abc import Callable

from roll.config.plan.memory import fewest_checkpointed
from roll.strategies.memory_guard import MemoryGuard, Need

LOG = logging.getLogger(__name__)
RESERVE = 0.05
"""Share of the device that stays free for fragmentation and for libraries that allocate beside torch."""
CHOICES = 2
"""Number of choices: the first by an estimate of a layer's memory, the second by the layers' measured memory."""


class AutoCheckpointing:
    """Starts with all layers recomputed. After one update all permanent memory is allocated, and the rest can keep layers."""

    def __init__(self, guard: MemoryGuard, layers: int, layer_bytes: float, total: int, apply: Callable[[int], None]) -> None:
        """`layer_bytes`: extra bytes a token of a layer that is not recomputed. `total`: bytes of the device."""
        self._guard, self._layers, self._layer_bytes, self._total, self._apply = guard, layers, layer_bytes, total, apply
        self._updates = 0
        self._all = guard.need
        self.checkpointed = layers

    def before_update(self) -> None:
        """Choose the number of layers before the second and the third update."""
        self._updates += 1
        if self._updates == 1 or self._updates > 1 + CHOICES:
            return
        if self.checkpointed == self._layers:
            self._all = self._guard.need
        else:
            kept = self._layers - self.checkpointed
            self._layer_bytes = max(1.0, (self._guard.need.per_token - self._all.per_token) / kept)
        tokens = self._guard.token_budget
        spare = self._guard.memory.available() - int(RESERVE * self._total) - self._all.of(tokens)
        count = self._guard.most(fewest_checkpointed(spare, self._layers, int(self._layer_bytes * tokens)))
        if count != self.checkpointed:
            self.checkpointed = count
            self._apply(count)
            more = self._layer_bytes * (self._layers - count)
            self._guard.expect(Need(self._all.fixed, self._all.per_token + more))
            LOG.info("gradient_checkpointing: %d of %d layers", count, self._layers)
