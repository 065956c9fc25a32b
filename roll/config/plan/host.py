"""Host memory of roles that take turns on devices: the memory of a role while other roles use its devices. Pure
functions.
"""

from __future__ import annotations

import math
from dataclasses import replace

from roll.config.derived.batch import BatchPlan
from roll.config.derived.placement import RolePlan, sends_adapter
from roll.config.plan.memory import RoleMemory
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig

WHILE_IT_WORKS = ("activations", "head", "kv_cache")
"""Kinds of memory that a role only needs during a forward or backward pass, or while it generates."""
FROZEN_TOKEN = 250
"""Host memory in bytes for one token, with its log-prob, of a request that waits in an engine. Measured with vLLM's
data structures: 200 in its front end and 48 in its scheduler.
"""


def with_turns(memory: RoleMemory, plan: RolePlan, role: RoleConfig, config: Config, batch: BatchPlan) -> RoleMemory:
    """Return the memory of a role that takes turns, with the host memory to which its state is offloaded while other
    roles work.

    An engine's weights are not offloaded if the next weight sync sends all of them. Requests that are unfinished at a
    weight sync are kept in host memory as well.
    """
    kept = sum(size for kind, size in memory.device.items() if kind not in WHILE_IT_WORKS) * len(plan.devices[0])
    frozen = 0
    if plan.name == "actor_infer" and isinstance(config, RlvrConfig):
        kept = 0 if role.strategy_args.traits.discards_weights and not sends_adapter(config) else kept
        frozen = _frozen_requests(config, plan) * batch.longest_sequence * FROZEN_TOKEN
    return replace(memory, host=memory.host + kept + frozen)


def _frozen_requests(config: RlvrConfig, plan: RolePlan) -> int:
    """Return the number of requests that may be in flight when an engine leaves its devices, 0 in synchronous
    training.
    """
    if not config.async_generation_ratio:
        return 0
    in_flight = (1 + config.async_generation_ratio) * config.rollout_batch_size * config.num_return_sequences_in_group
    most = [in_flight / plan.ranks]
    if config.max_running_samples is not None:
        most.append(config.max_running_samples / plan.ranks)
    elif (requests := config.actor_infer.strategy_args.traits.most_requests) is not None:
        most.append(requests)
    return math.ceil(min(most))
