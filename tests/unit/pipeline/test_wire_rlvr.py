"""What the loop of RLVR requests from the roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.config.plan.plan import make_plan
from roll.pipeline.wire_rlvr import _loop


class Requested(Exception):
    """Ends the loop as soon as both trained roles are requested."""


class Roles:
    """Stands in for `Roles`, and records for how many steps each role is trained."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def actor_train(self, name: str, role: object, steps: int, *_: object) -> None:
        self.steps[name] = steps

    def actor_infer(self, config: object) -> None:
        """Do nothing."""

    def reference(self, *_: object) -> None:
        """Do nothing."""

    def critic(self, role: object, steps: int) -> None:
        self.steps["critic"] = steps
        raise Requested


@pytest.mark.parametrize(("warmup", "steps"), [(0, 12), (5, 7)])
def test_the_policys_schedule_leaves_out_the_critics_warmup(warmup: int, steps: int, configured: Callable[..., Any]) -> None:
    config, roles = configured("algorithms/ppo_critic", "max_steps=12", f"critic_warmup={warmup}"), Roles()
    context = cast(Any, SimpleNamespace(plan=make_plan(config)))
    with pytest.raises(Requested):
        asyncio.run(_loop(config, cast(Any, None), cast(Any, roles), context, cast(Any, None)))
    assert roles.steps == {"actor_train": steps, "critic": 12}
