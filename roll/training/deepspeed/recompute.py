"""Implements `gradient_checkpointing: auto`: chooses the number of recomputed decoder layers from measurements in the first updates."""

from __future__ import annotations

import logging
from collections.abc import Callable

from roll.config.plan.memory import fewest_checkpointed
from roll.models.memory_guard import MemoryGuard, Need

LOG = logging.getLogger(__name__)
RESERVE = 0.05
"""Fraction of the device's memory that stays free, for fragmentation and for libraries that allocate outside torch."""
CHOICES = 2
"""Number of choices: the first uses an estimate of the memory of a layer, the second uses a measurement."""


class AutoCheckpointing:
    """Recomputes all layers in the first update, which allocates all permanent memory, and then only as many as memory requires."""

    def __init__(self, guard: MemoryGuard, layers: int, layer_bytes: float, total: int, apply: Callable[[int], None]) -> None:
        """Start with all `layers` recomputed.

        Args:
            guard: The trainer's memory guard.
            layers: Number of decoder layers.
            layer_bytes: Estimate of the extra bytes per token for each layer that is not recomputed.
            total: Memory of the device, in bytes.
            apply: Function that sets the number of recomputed layers.
        """
        self._guard, self._layers, self._layer_bytes, self._total, self._apply = guard, layers, layer_bytes, total, apply
        self._updates = 0
        self._all = guard.need
        self.checkpointed = layers

    def before_update(self) -> None:
        """Choose the number of recomputed layers before the second and the third update. Do nothing before other updates."""
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
