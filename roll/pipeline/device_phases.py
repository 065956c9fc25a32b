"""Brings onto the devices the roles that each phase of a step needs.

    piece of work      on the devices                          who is offloaded, if it shares devices with one that is onloaded
    rollout, evaluate  actor_infer, whole                      actor_train, critic, reference
    judging            rewards.<domain>                        actor_infer, actor_train, critic, reference
    reference, teacher reference, or actor_train; teacher      actor_infer (discards its weights), actor_train, critic
    values             critic                                  actor_infer (discards its weights), actor_train, reference
    train              critic, then actor_train; or both, if   actor_infer (discards its weights), reference
                       they share no device
    weight sync        actor_train, actor_infer's weights      critic, reference
    checkpoint         actor_train, then critic                actor_infer, reference

Distillation trains and keeps a student where others have actor_train, and pipelines without an engine evaluate held-out rows by
what learns.

A sync follows every train step before anything is generated, so an engine that is offloaded for the reference, for values or for
training need not keep its weights. One that is offloaded for a checkpoint must: it generates next.

Where generation runs ahead of training on devices that roles share, it stops for their work and goes on after the sync. An engine
that is offloaded freezes its responses; one that stays on its devices (`time_sharing: false`) is paused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from roll.workers.device_sharing import Level

Bring = Callable[[Mapping[str, Level], Collection[str]], Awaitable[None]]


@dataclass(frozen=True)
class DevicePhases:
    """Brings the roles of a phase onto their devices. Await the phase before the work."""

    bring: Bring
    """`DeviceSharing.bring`."""
    pausing_for: Collection[str] = ()
    """Roles that work on the devices of resident engines, for which generation is paused. The sync resumes it."""
    pause: Callable[[], Awaitable[None]] | None = None
    """Pauses generation in the middle of responses, for the roles of `pausing_for`."""

    async def generation(self) -> None:
        """The engine generates."""
        await self.bring({"actor_infer": Level.WHOLE}, ())

    async def judging(self, role: str) -> None:
        """A role computes rewards. Generation may continue before a sync."""
        await self.bring({role: Level.WHOLE}, ())

    async def scoring(self, role: str) -> None:
        """A role computes log-probs, values or a teacher's states. A sync precedes the next generation."""
        await self._pause_for(role)
        await self.bring({role: Level.WHOLE}, ("actor_infer",))

    async def training(self, *roles: str) -> None:
        """Roles learn, concurrently if there are several. A sync precedes the next generation."""
        await self._pause_for(*roles)
        await self.bring(dict.fromkeys(roles, Level.WHOLE), ("actor_infer",))

    async def sync(self) -> None:
        """The trainer sends weights. The engine's KV cache is allocated again afterwards, when the trainer is offloaded."""
        await self.bring({"actor_train": Level.WHOLE, "actor_infer": Level.WEIGHTS}, ())

    async def _pause_for(self, *roles: str) -> None:
        if self.pause and not set(roles).isdisjoint(self.pausing_for):
            await self.pause()

    async def checkpoint(self, role: str) -> None:
        """A role writes its states to a checkpoint, or reads them."""
        await self.bring({role: Level.WHOLE}, ())
