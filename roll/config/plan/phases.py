"""The memory of each device in each phase of a step. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.config.derived.fixed_roles import TEACHERS
from roll.config.derived.placement import judging_roles
from roll.config.plan.memory import WHILE_IT_WORKS, RoleMemory
from roll.config.plan.plan import Plan


@dataclass(frozen=True)
class Phase:
    """One phase of a step on a device."""

    name: str
    """`generation`, `judging`, `training`, `weight sync`, or the active role; `all at once` without turns."""
    held: int
    """Bytes in use. An engine counts with its weights and one sequence's KV cache, not with all that it reserves."""
    of_engines: int = 0
    """The part of `held` that active engines count with."""
    reserved_fraction: float = 0.0
    """Fraction of the device that active engines reserve for weights and KV cache together."""
    reserved_bytes: int = 0
    """Bytes that active engines reserve for them, if the size of their KV cache is set in bytes."""

    def claimed(self, gpu_memory: float) -> float:
        """Return the bytes that the phase needs on a GPU with `gpu_memory` bytes, with all that engines reserve."""
        return self.held - self.of_engines + self._reserved(gpu_memory)

    def fits(self, gpu_memory: float) -> bool:
        """Return whether it fits into a GPU, and its engines into what they reserve."""
        return self.claimed(gpu_memory) <= gpu_memory and self.of_engines <= self._reserved(gpu_memory)

    def _reserved(self, gpu_memory: float) -> float:
        return self.reserved_fraction * gpu_memory + self.reserved_bytes


def misfits(plan: Plan, gpu_memory: float) -> list[str]:
    """Return texts that name the phases that do not fit into a GPU. Only the first device with such phases is reported.

    A phase with an engine does not fit either if what the engine reserves is too small for its weights and one whole
    sequence.

    Args:
        gpu_memory: Memory of a GPU in bytes.
    """
    for device in plan.devices:
        found = [phase for phase in phases(plan, device) if not phase.fits(gpu_memory)]
        if found:
            return [f"{phase.name} on device {device}" for phase in found]
    return []


def phases(plan: Plan, device: int) -> list[Phase]:
    """Return the memory of a device in each phase, counting the roles whose model has a known shape.

    Roles that take no turns count in every phase.
    """
    counts = {name: plan.roles[name].ranks_on(device) for name in plan.memory}
    here = {name: plan.memory[name].of_ranks(count) for name, count in counts.items() if count}
    movers = {name for name in here if not plan.turns.get(name, frozenset()).isdisjoint(here)}
    stays = {name: memory for name, memory in here.items() if name not in movers}
    if not movers:
        return [_phase("all at once", stays)]
    return [_phase(name, stays | present) for name, present in _work({name: here[name] for name in movers})]


def _work(movers: Mapping[str, RoleMemory]) -> Iterator[tuple[str, dict[str, RoleMemory]]]:
    """Yield the name of each phase, with the memory of the roles that are on the device during it."""
    infer, train = movers.get("actor_infer"), movers.get("actor_train")
    if infer:
        yield "generation", {"actor_infer": infer}
    teachers = [name for name in movers if name == "teacher" or name.startswith(TEACHERS)]
    yield from ((name, {name: movers[name]}) for name in ("reference", *teachers, "critic") if name in movers)
    yield from (("judging", {name: movers[name]}) for name in judging_roles(movers))
    yield from (("training", {name: movers[name]}) for name in ("actor_train", "student") if name in movers)
    if train and infer:
        yield "weight sync", {"actor_train": _idle(train), "actor_infer": _idle(infer)}


def _idle(memory: RoleMemory) -> RoleMemory:
    return RoleMemory({kind: size for kind, size in memory.device.items() if kind not in WHILE_IT_WORKS}, memory.host)


def _phase(name: str, present: Mapping[str, RoleMemory]) -> Phase:
    engines = [memory for memory in present.values() if memory.reserves]
    return Phase(
        name,
        held=sum(memory.device_total for memory in present.values()),
        of_engines=sum(memory.device_total for memory in engines),
        reserved_fraction=sum(memory.reserved_fraction for memory in engines),
        reserved_bytes=sum(memory.reserved_bytes for memory in engines),
    )
