"""Messages of vLLM 0.26 and torch 2.11, word by word, and what becomes of them."""

from __future__ import annotations

import re

import pytest

from roll.config.fields import walk
from roll.config.schema import RlvrConfig
from roll.workers.shortage import engine_shortage

FULL = (
    "(EngineCore pid=812) ValueError: Free memory on device cuda:0 (12.31/139.80 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
SMALL_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (32768), (1.75 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (0.5 GiB). Based on the available memory, the estimated maximum model length is 9344."
)
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "310.50 MiB is free. Including non-PyTorch memory, this process has 14.00 GiB memory in use."
)


@pytest.mark.parametrize(
    ("devices", "text", "parts"),
    [
        (
            (3,),
            FULL,
            ["device 3", "asked for 125.82 GiB", "0.9", "12.31 of 139.80 GiB were free", "lower", "gpu_memory_utilization"],
        ),
        ((4, 5), NO_CACHE, ["devices 4, 5", "KV cache", "raise", "gpu_memory_utilization", "kv_cache_gib"]),
        ((0,), SMALL_CACHE, ["device 0", "asks for 1.75 GiB", "0.5 GiB were left", "response_length"]),
        ((0,), TORCH, ["asked for 1.02 GiB more", "310.50 MiB of 139.80 GiB were free", "lower", "gpu_memory_utilization"]),
        ((), NO_CACHE, ["its device"]),
    ],
)
def test_a_shortage_is_named(devices: tuple[int, ...], text: str, parts: list[str]) -> None:
    said = engine_shortage(devices, f"RuntimeError: Engine core initialization failed.\nloading\n{text}\nTraceback")
    assert said and "\n" not in said
    for part in parts:
        assert part in said


def test_keys_that_are_named_exist() -> None:
    keys = {step for key in walk(RlvrConfig) for step in key.path}
    said = [engine_shortage((0,), text) for text in (FULL, NO_CACHE, SMALL_CACHE, TORCH)]
    named = {word for text in said for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text or "")}
    assert len(named) > 7
    assert named <= keys


def test_other_failures_are_left_alone() -> None:
    assert engine_shortage((0,), "RuntimeError: Engine core initialization failed. See root cause above.") is None
