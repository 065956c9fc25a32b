"""Brings the roles that each phase of a step needs onto the devices.

    phase              on the devices                          offloaded, if it shares devices with an onloaded role
    rollout, evaluate  actor_infer, whole                      actor_train, critic, reference
    judging            rewards.<domain>                        actor_infer, actor_train, critic, reference
    reference, teacher reference, or actor_train; teacher      actor_infer (discards its weights), actor_train, critic
    values             critic                                  actor_infer (discards its weights), actor_train,
        reference
    train              critic, then actor_train; or both, if   actor_infer (discards its weights), reference
                       they share no device
    weight sync        actor_train, actor_infer's weights      critic, reference
    checkpoint         actor_train, then critic                actor_infer, reference

SFT, reward-model training and distillation have `sft_train`, `reward_train` and `student` instead of actor_train.
Offline pipelines have no engine, and evaluate held-out rows with the learner.

A sync follows every train step before anything is generated. An engine that is offloaded for the reference, for values
or for training therefore need not keep its weights. An engine that is offloaded for a checkpoint must keep them,
because it generates next.

With asynchronous generation on shared devices, generation stops while other roles use the devices, and continues after
the sync. An engine that is offloaded freezes its unfinished responses. An engine that stays on its devices
(`time_sharing: false`) is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from roll.ray.device_sharing import DeviceSharing, Residency


class Pausable(Protocol):
    """Engines that can stop in the middle of responses."""

    async def pause(self) -> None:
        """Pause generation until the next sync."""
        ...


def untimed(part: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


@dataclass(frozen=True)
class DevicePhases:
    """Brings the roles of a phase onto their devices. Await the phase's method before its work starts."""

    sharing: DeviceSharing
    part: Callable[[str], AbstractContextManager[None]] = untimed
    """Times `onload` and `pause`; see `Meter.part`."""
    in_hands: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that is held while the engines' state changes."""
    engines: Pausable | None = None
    """Engines that stay on devices which other roles use. None if there are none."""
    pausing_for: Collection[str] = ()
    """Roles that use the devices of resident engines. Generation is paused for them until the next sync."""

    async def bring(self, levels: Mapping[str, Residency], discarding: Collection[str]) -> None:
        """Onload roles to the given levels; see `DeviceSharing.bring`."""
        with self.part("onload"), self.in_hands():
            await self.sharing.bring(levels, discarding)

    async def generation(self) -> None:
        """Prepare for generation by the engine."""
        await self.bring({"actor_infer": Residency.WHOLE}, ())

    async def judging(self, role: str) -> None:
        """Prepare for rewards computed by `role`. Generation may continue afterwards without a sync."""
        await self.bring({role: Residency.WHOLE}, ())

    async def scoring(self, role: str) -> None:
        """Prepare for `role` to compute log-probs, values or teacher states. A sync must precede generation."""
        await self._pause_for(role)
        await self.bring({role: Residency.WHOLE}, ("actor_infer",))

    async def training(self, *roles: str) -> None:
        """Prepare for training `roles` concurrently. A sync must precede the next generation."""
        await self._pause_for(*roles)
        await self.bring(dict.fromkeys(roles, Residency.WHOLE), ("actor_infer",))

    async def sync(self) -> None:
        """Prepare for a weight sync. The engine's KV cache is allocated again later, when the trainer is offloaded."""
        await self.bring({"actor_train": Residency.WHOLE, "actor_infer": Residency.WEIGHTS}, ())

    async def _pause_for(self, *roles: str) -> None:
        if self.engines and not set(roles).isdisjoint(self.pausing_for):
            with self.part("pause"):
                await self.engines.pause()

    async def checkpoint(self, role: str) -> None:
        """Prepare for `role` to write its state to a checkpoint, or to read it."""
        await self.bring({role: Residency.WHOLE}, ())
