"""Shows the states of the roles' processes on the console."""

from __future__ import annotations

import asyncio

from roll.engines.actor_infer import ActorInfer
from roll.ray.liveness import RayNodes
from roll.ray.role_signs import RoleSigns
from roll.runs.roles import Roles
from roll.tracking.life import TICK, Life


async def tell_signs(roles: Roles, life: Life) -> None:
    """Update the console until cancelled. Skip updates while its output is not visible."""
    asked = RoleSigns(RayNodes())
    while True:
        if life.is_seen:
            groups = roles.all_groups
            life.own([process.pid for group in groups.values() for process in group.processes()])
            signs = await asyncio.gather(*(asked.of(group, _progress(roles.facades.get(name))) for name, group in groups.items()))
            life.driver("all roles are ready" if roles.are_running else "starting the roles", is_busy=not roles.are_running)
            life.show([sign for sign in signs if sign])
        await asyncio.sleep(TICK)


def _progress(facade: object) -> str:
    return facade.progress if isinstance(facade, ActorInfer) else ""
