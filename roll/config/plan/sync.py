"""A rough estimate of a sync of whole weights: its buckets, the driver's messages, and the time that each takes.

For each bucket the driver calls every rank of the trainer, which all gather it, and every engine, which loads it. The
messages therefore grow with the model, the ranks and the engines, and take the driver longer than the bytes take the
network if buckets are small. The rates are measurements of docs/performance.md. Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.derived.placement import sends_adapter
from roll.config.plan.plan import Plan
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.system.sizes import GIB

BYTES_PER_SECOND = 42e9
"""Rate at which weights reached engines, gathered under ZeRO-3 and loaded: 15.2 GB in 0.36 s, on H200s of one host."""
MESSAGE_SECONDS = 1e-3
"""CPU time of the driver for a call and its answer through Ray, as measured for `roll/ray/batching.py`."""
LARGEST_BUCKET_MIB = 8192
"""Largest `bucket_mib` that is suggested."""


@dataclass(frozen=True)
class SyncEstimate:
    """A sync of whole weights."""

    nbytes: int
    """Size of the weights in bytes."""
    buckets: int
    """Least number of buckets. A bucket that the next tensor does not fit into stays smaller."""
    messages: int
    """Number of calls of the driver."""

    @property
    def copy_seconds(self) -> float:
        """Seconds for the bytes, if no link is slower than those of the measurement."""
        return self.nbytes / BYTES_PER_SECOND

    @property
    def call_seconds(self) -> float:
        """CPU seconds of the driver for the messages."""
        return self.messages * MESSAGE_SECONDS


def sync_estimate(config: RlvrConfig, plan: Plan, bucket_mib: int) -> SyncEstimate | None:
    """Return the estimate with buckets of this size.

    None for adapters, roles on the CPU, servers outside the run, and unknown shapes.
    """
    shape, train, infer = plan.shapes.get("actor_train"), plan.roles["actor_train"], plan.roles["actor_infer"]
    if shape is None or train.on_cpu or infer.is_outside or sends_adapter(config):
        return None
    nbytes = (4 if config.actor_train.model_args.dtype == "fp32" else 2) * shape.parameters
    buckets = math.ceil(nbytes / (bucket_mib << 20))
    return SyncEstimate(nbytes, buckets, buckets * (train.ranks + infer.ranks))


def sync_lines(config: Config, plan: Plan) -> list[str]:
    """Return the line on a sync, with a larger `bucket_mib` if the messages take longer than the bytes."""
    if not isinstance(config, RlvrConfig) or plan.gpu is None or config.replay_from is not None:
        return []
    now = sync_estimate(config, plan, config.weight_sync.bucket_mib)
    if now is None:
        return []
    size, rate = f"{now.nbytes / 1e9:,.1f} GB in {now.buckets:,} buckets", f"{BYTES_PER_SECOND / 1e9:g} GB/s"
    line = (
        f"A weight sync, roughly: {size}, {_seconds(now.copy_seconds)} at {rate}, and {now.messages:,} messages of the "
        f"driver, {_seconds(now.call_seconds)}"
    )
    better = _better_bucket_mib(config, plan, now)
    if better is None:
        return [line]
    then = sync_estimate(config, plan, better)
    assert then is not None, "only the size of the buckets differs"
    return [
        f"{line}; weight_sync.bucket_mib {better} would need {then.messages:,} messages, "
        f"{_seconds(then.call_seconds)}, and up to {2 * (better << 20) / GIB:g} GiB of each GPU of the trainer"
    ]


def _better_bucket_mib(config: RlvrConfig, plan: Plan, now: SyncEstimate) -> int | None:
    """Return the smallest doubling of `bucket_mib` whose messages take no longer than the bytes, or the largest."""
    size = config.weight_sync.bucket_mib
    while now.call_seconds > now.copy_seconds and 2 * size <= LARGEST_BUCKET_MIB:
        size *= 2
        now = sync_estimate(config, plan, size) or now
    return None if size == config.weight_sync.bucket_mib else size


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
