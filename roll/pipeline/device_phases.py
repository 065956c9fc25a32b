"""Which roles a piece of a step's work needs on the devices.

    piece of work      on the devices                          who is offloaded, if it shares devices with one that is onloaded
    rollout, evaluate  actor_infer, whole                      actor_train, critic, reference
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
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from roll.pipeline.checkpointer import Trainer
from roll.workers.device_sharing import Level

P = ParamSpec("P")
T = TypeVar("T")
Bring = Callable[[Mapping[str, Level], Collection[str]], Awaitable[None]]


@dataclass(frozen=True)
class DevicePhases:
    """Wraps the functions of a loop: each finds on the devices what it needs."""

    bring: Bring
    """`DeviceSharing.bring`."""

    def generation(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """A function that generates."""
        return self._with({"actor_infer": Level.WHOLE}, function)

    def reference(self, role: str, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """A function that asks this role for reference log-probs, or for a teacher's states."""
        return self._with({role: Level.WHOLE}, function, discard=("actor_infer",))

    def training(self, function: Callable[P, Awaitable[T]], *roles: str) -> Callable[P, Awaitable[T]]:
        """A function that these roles, `actor_train` if none is named, learn or score by; a sync comes before the next generation."""
        return self._with(dict.fromkeys(roles or ("actor_train",), Level.WHOLE), function, discard=("actor_infer",))

    def sync(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """A function that sends weights. The engine's KV cache comes back after it, when the trainer has left."""
        return self._with({"actor_train": Level.WHOLE, "actor_infer": Level.WEIGHTS}, function)

    def keeping(self, function: Callable[P, Awaitable[T]], role: str = "actor_train") -> Callable[P, Awaitable[T]]:
        """A function that brings this role's states to a checkpoint, or back."""
        return self._with({role: Level.WHOLE}, function)

    def trainer(self, trainer: Trainer, role: str = "actor_train") -> Trainer:
        """The trainer, which is of this role, as the checkpointer uses it."""
        return KeptTrainer(*(self.keeping(function, role) for function in (trainer.save, trainer.load, trainer.export)))

    def _with(
        self, needs: Mapping[str, Level], function: Callable[P, Awaitable[T]], discard: Collection[str] = ()
    ) -> Callable[P, Awaitable[T]]:
        async def wrapped(*arguments: P.args, **keywords: P.kwargs) -> T:
            await self.bring(needs, discard)
            return await function(*arguments, **keywords)

        return wrapped


@dataclass(frozen=True)
class KeptTrainer:
    """Implements `Trainer`."""

    save: Callable[[Path], Awaitable[None]]
    load: Callable[[Path], Awaitable[None]]
    export: Callable[[Path], Awaitable[None]]
