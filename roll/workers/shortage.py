"""A start that ran out of device memory, as its engine tells it, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

FULL = re.compile(
    r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory utilization "
    r"\((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
)
NO_CACHE = re.compile(r"No available memory for the cache blocks")
SMALL_CACHE = re.compile(r"\((?P<asked>[\d.]+) GiB KV cache is needed, .*? the available KV cache memory \((?P<free>[\d.]+) GiB\)")
TORCH = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\..*?"
    r"total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)

ENGINE = "strategy_args.strategy_config"
REMEDIES = {
    "actor_infer": f"lower actor_infer.{ENGINE}.gpu_memory_utilization, or end what else runs there",
    "reference": "leave time_sharing on, lower actor_infer's gpu_memory_utilization, give reference.device_mapping other devices, "
    "or shard it with strategy_name: deepspeed_infer",
}
OTHER = (
    "leave time_sharing on, lower actor_infer's gpu_memory_utilization, map the role to more devices with zero_optimization.stage 3, "
    "or take a preset with offload"
)
CACHE = (
    f"raise actor_infer.{ENGINE}.gpu_memory_utilization (on the CPU kv_cache_gib), or lower prompt_length, response_length, "
    "max_num_batched_tokens or max_num_seqs"
)


def shortage(role: str, devices: Sequence[int], text: str) -> str | None:
    """Device, what was asked, what was free, and which keys to change; None if `text` does not tell of memory that ran out.

    `text` is an exception's message, or the output of vLLM's engine process, whose exception never leaves it.
    """
    where = f"device {devices[0]}" if len(devices) == 1 else f"devices {', '.join(map(str, devices))}" if devices else "its device"
    remedy = REMEDIES.get(role, OTHER)
    if found := FULL.search(text):
        asked = f"asked for {found['asked']} GiB (gpu_memory_utilization {found['share']})"
        return f"too little memory on {where} to start: {asked}, and {found['free']} of {found['total']} GiB were free; {remedy}"
    if found := SMALL_CACHE.search(text):
        asked = f"the longest sequence asks for {found['asked']} GiB of KV cache, and {found['free']} GiB were left for it"
        return f"too little memory on {where} to start: {asked}; {CACHE}"
    if NO_CACHE.search(text):
        return f"too little memory on {where} to start: the model took all that it may, and nothing was left for a KV cache; {CACHE}"
    if found := TORCH.search(text):
        asked = f"asked for {found['asked']} more, and {found['free']} of {found['total']} were free"
        return f"too little memory on {where} to start: {asked}; {remedy}"
    return None
