"""Recognises vLLM's reports of too little memory for the start of an engine, and suggests remedies."""

from __future__ import annotations

import re
from collections.abc import Sequence

# From `request_memory` in vllm/v1/worker/utils.py.
FULL = re.compile(
    r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory utilization "
    r"\((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
)
# Both from `_check_enough_kv_cache_memory` in vllm/v1/core/kv_cache_utils.py.
NO_CACHE = re.compile(r"No available memory for the cache blocks")
SMALL_CACHE = re.compile(r"\((?P<asked>[\d.]+) GiB KV cache is needed, .*? the available KV cache memory \((?P<free>[\d.]+) GiB\)")
# From torch's caching allocator, c10/cuda/CUDACachingAllocator.cpp.
TORCH = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\..*?"
    r"total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)

SHARE = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
LOWER = f"lower {SHARE}, leave time_sharing on, or end other processes on the device"
RAISE = f"raise {SHARE} (on the CPU kv_cache_gib), or lower prompt_length, response_length, max_num_batched_tokens or max_num_seqs"


def engine_shortage(devices: Sequence[int], text: str) -> str | None:
    """Return a message with the device, the keys to change, and, if vLLM reports them, the requested and the free memory.

    Return None if memory was not the problem. `text` is the output of vLLM's engine process, because its exception is not passed on.
    """
    where = f"device {devices[0]}" if len(devices) == 1 else f"devices {', '.join(map(str, devices))}" if devices else "its device"
    if found := FULL.search(text):
        asked = f"it requested {found['asked']} GiB (gpu_memory_utilization {found['share']})"
        return f"too little memory on {where} to start: {asked}, and {found['free']} of {found['total']} GiB were free; {LOWER}"
    if found := SMALL_CACHE.search(text):
        asked = f"the longest sequence needs {found['asked']} GiB of KV cache, and {found['free']} GiB were left for it"
        return f"too little memory on {where} to start: {asked}; {RAISE}"
    if NO_CACHE.search(text):
        return f"too little memory on {where} to start: the model used its whole share, and nothing was left for a KV cache; {RAISE}"
    if found := TORCH.search(text):
        asked = f"it requested another {found['asked']}, and {found['free']} of {found['total']} were free"
        return f"too little memory on {where} to start: {asked}; {LOWER}"
    return None
